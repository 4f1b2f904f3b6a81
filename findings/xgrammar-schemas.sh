#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# XGrammar: a text with a length limit can have no line break and no quote, and beside anyOf the
# rest of a schema is dropped.
#
# Versions: xgrammar 0.2.9, llguidance 1.9.1, jsonschema 4.26.0. For each schema, the replies that
#   are valid, and the ones that two constraints would let a model write. torch, which only the
#   masks need, has a stand-in.
# Guess: a constraint lets a model write what is valid. Where XGrammar cannot, it warns.
# Behaviour: with minLength or maxLength, no escape is allowed, so the text has no line break, quote
#   or backslash. A pattern must match the whole text, so ^ISO- allows nothing but "ISO-". Beside
#   anyOf, properties and required are dropped: a valid reply is refused, and one without the
#   required key is allowed. If anyOf only lists which keys are required, even a text is allowed.
#   There is no warning for any of these, but one for allOf.
# Why it matters: XGrammar is the default of SGLang and the first choice of vLLM. A limit of 500
#   characters turns a summary or a patch into one line without quotes. Tools with variants get
#   calls that are not valid. By the rollouts alone, it looks like the model's mistake.
# Source: cpp/json_schema_converter.cc. XGrammar's issues 800 (lengths) and 858 (anyOf) are open.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv --no-deps xgrammar==0.2.9
uv pip install -q --python venv apache-tvm-ffi==0.1.15.post2 numpy==2.5.5 pydantic==2.14.4 \
  llguidance==1.9.1 jsonschema==4.26.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json
import sys
from unittest.mock import MagicMock

import jsonschema
import llguidance
import tvm_ffi  # noqa: F401

for name in ("torch", "transformers", "triton"):
    sys.modules[name] = MagicMock()
import xgrammar  # noqa: E402
from xgrammar.testing import _is_grammar_accept_string  # noqa: E402

TOKENIZER = llguidance.LLTokenizer("byte")


def guided(schema, reply):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    return matcher.consume_tokens(list(reply.encode())) and matcher.is_accepting()


A, B = ({"properties": {key: {"type": "integer"}}, "required": [key]} for key in "ab")
KIND = {"properties": {"kind": {"type": "string"}}, "required": ["kind"]}
TEXT = {"type": "string"}
for title, schema, *replies in (
    ("a text", TEXT, "two\nlines"),
    ("maxLength 500", TEXT | {"maxLength": 500}, "two\nlines", 'say "hi"', "C:\\a", "plain"),
    ("minLength 1", TEXT | {"minLength": 1}, "two\nlines"),
    ("pattern ^ISO-", TEXT | {"pattern": "^ISO-"}, "ISO-9001", "ISO-"),
    ("kind, and anyOf a, b", KIND | {"anyOf": [A, B]}, {"kind": "x", "a": 1}, {"a": 1}),
    ("anyOf of required", {"anyOf": [{"required": [key]} for key in "ab"]}, {"a": 1}, "text"),
):
    for reply in replies:
        full = schema if schema.get("type") else {"type": "object", **schema}
        valid = jsonschema.Draft202012Validator(full).is_valid(reply)
        written = json.dumps(reply)
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(full))
        allowed = _is_grammar_accept_string(grammar, written)
        print(f"{title}: {written} is {'' if valid else 'not '}valid; ", end="")
        print(f"xgrammar {allowed}, llguidance {guided(full, written)}")
print("The next schema is one with allOf.", file=sys.stderr, flush=True)
xgrammar.Grammar.from_json_schema(json.dumps({"allOf": [A, B]}))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
count() { grep -c json_schema_converter || true; }
seen+=$'\n'"warnings of xgrammar: $(sed '/^The next/,$d' errors.log | count)"
seen+=", with allOf: $(sed '1,/^The next/d' errors.log | count)"
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
a text: "two\nlines" is valid; xgrammar True, llguidance True
maxLength 500: "two\nlines" is valid; xgrammar False, llguidance True
maxLength 500: "say \"hi\"" is valid; xgrammar False, llguidance True
maxLength 500: "C:\\a" is valid; xgrammar False, llguidance True
maxLength 500: "plain" is valid; xgrammar True, llguidance True
minLength 1: "two\nlines" is valid; xgrammar False, llguidance True
pattern ^ISO-: "ISO-9001" is valid; xgrammar False, llguidance True
pattern ^ISO-: "ISO-" is valid; xgrammar True, llguidance True
kind, and anyOf a, b: {"kind": "x", "a": 1} is valid; xgrammar False, llguidance True
kind, and anyOf a, b: {"a": 1} is not valid; xgrammar True, llguidance False
anyOf of required: {"a": 1} is valid; xgrammar True, llguidance True
anyOf of required: "text" is not valid; xgrammar True, llguidance False
warnings of xgrammar: 0, with allOf: 1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
