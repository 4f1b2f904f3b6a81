#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# eval-protocol: a reply that is valid for the schema scores 0.20, and one without the required
# integer 0.33; the items of lists and the values of enums are not checked.
#
# Version: eval-protocol 0.3.33, its json_schema_reward, with stand-ins for modules that this does
#   not need; jsonschema 4.26.0 for comparison.
# Guess: the docstring speaks of "general JSON schema validation" with a similarity, so a JSON text
#   that is valid for the schema scores 1, and one that is not scores less.
# Behaviour: the reward is the Jaccard similarity of two sets of names with types, and in the reply
#   each number has the type "number". So an integer is never right: it counts as a missing and an
#   extra property. Without that property the score rises, whether it is required or not. Only the
#   word "array" is compared, so the items may be anything, and enum and required are not looked at.
#   A property without a type, as pydantic writes for a reference or an Optional, is never right
#   either.
# Why it matters: most schemas have an integer or an optional field. As a reward, it trains the
#   model to leave such fields out, although they are required.
# Source: build_schema_from_content of eval_protocol/rewards/json_schema.py, and
#   extract_schema_properties and calculate_jaccard_similarity of function_calling.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv pydantic==2.14.4 openai==3.57.0 requests==2.34.2 jsonschema==4.26.0
uv pip install -q --python venv --no-deps eval-protocol==0.3.33

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types
import warnings
from unittest.mock import MagicMock

warnings.simplefilter("ignore")
(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/eval_protocol")
# The packages themselves import the clients of all providers.
for name in "eval_protocol", "eval_protocol.rewards":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]
for name in "mcp", "mcp.client", "mcp.client.session", "mcp.types", "eval_protocol.resources":
    sys.modules[name] = MagicMock()
sys.modules["eval_protocol.get_pep440_version"] = MagicMock(get_pep440_version=lambda *args: "0")

import json

import jsonschema
import pydantic
from eval_protocol.models import Message
from eval_protocol.rewards.json_schema import json_schema_reward


def show(reply, schema):
    text = json.dumps(reply)
    messages = [Message(role="user", content="?"), Message(role="assistant", content=text)]
    score = json_schema_reward(messages, expected_schema=schema).score
    valid = not list(jsonschema.Draft202012Validator(schema).iter_errors(reply))
    print(f"  {text}: {score:.2f}, {'valid' if valid else 'invalid'}")


class Search(pydantic.BaseModel):
    query: str
    limit: int
    user: str | None = None


print("query: str, limit: int, user: str | None")
schema = Search.model_json_schema()
for reply in (
    {"query": "a", "limit": 3, "user": "b"},
    {"query": "a", "limit": 3},
    {"query": "a"},
    {"query": "a", "limit": "three"},
):
    show(reply, schema)
print("colour: one of red and blue; names: list of texts")
names = {"type": "array", "items": {"type": "string"}}
colour = {"type": "string", "enum": ["red", "blue"]}
schema = {"type": "object", "properties": {"colour": colour, "names": names}}
schema["required"] = list(schema["properties"])
for reply in (
    {"colour": "red", "names": ["a", "b"]},
    {"colour": "seven", "names": [{"x": 1}, 2, None]},
):
    show(reply, schema)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
query: str, limit: int, user: str | None
  {"query": "a", "limit": 3, "user": "b"}: 0.20, valid
  {"query": "a", "limit": 3}: 0.25, valid
  {"query": "a"}: 0.33, invalid
  {"query": "a", "limit": "three"}: 0.25, invalid
colour: one of red and blue; names: list of texts
  {"colour": "red", "names": ["a", "b"]}: 1.00, valid
  {"colour": "seven", "names": [{"x": 1}, 2, null]}: 1.00, invalid
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
