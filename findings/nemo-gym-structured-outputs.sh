#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# NeMo Gym: in structured_outputs a refusal of one line is valid CSV, an XML list of one object is
# refused, and so are a YAML or TOML date and a reply that leaves out an optional property.
#
# Version: nemo-gym 0.7.0, the StructuredOutputsResourcesServer of its structured_outputs with
#   xml_coerce_types=True, and stand-ins for fastapi and for the base classes;
#   openapi-schema-validator 0.9.0.
# Guess: the reward is 1 if the reply is valid for the schema in the prompt, and 0 otherwise, in
#   each of its five formats.
# Behaviour: the schema is made strict first: all properties are required and no others are allowed,
#   also where the schema says otherwise. CSV without rows is an empty list, which is valid, and the
#   header is not compared, so a refusal of one line scores 1. In XML, a dictionary with one key at
#   the place of a list is taken for a wrapper, so one item with one property is opened, but two are
#   right. YAML and TOML read a date as a date, and YAML 12:30 as 750, which are no texts.
# Why it matters: the server belongs to the published Nemotron RL datasets. The model is trained to
#   fill every optional property, and in CSV it is rewarded for giving up. A list with one item is a
#   failure in one format only.
# Source: strictify_schema, coerce_xml_types and parse_content of
#   resources_servers/structured_outputs/app.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv openapi-schema-validator==0.9.0 jsonschema==4.26.0 \
  xmltodict==1.0.4 pyyaml==6.0.4
# It asks for Python 3.13.14, but this module runs with any 3.13.
uv pip install -q --python-version 3.13.14 --no-deps --target packages nemo-gym==0.7.0

seen=$(PYTHONPATH=packages venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import json
import sys
import types
from unittest.mock import MagicMock

# The server is not started, so its base classes are not needed.
sys.modules["fastapi"] = MagicMock()
base = sys.modules["nemo_gym.base_resources_server"] = types.ModuleType("base")
for name in (
    "BaseResourcesServerConfig",
    "BaseRunRequest",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "SimpleResourcesServer",
):
    setattr(base, name, type(name, (), {}))

import jsonschema
from resources_servers.structured_outputs.app import StructuredOutputsResourcesServer

server = StructuredOutputsResourcesServer()
server.config = types.SimpleNamespace(xml_coerce_types=True)


def show(form, schema, *replies):
    for reply in replies:
        reward, kind, message = server.evaluate_structured_output_response(
            form, json.dumps(schema), reply
        )
        reason = "" if kind is None else f" {message.splitlines()[0]}"
        valid = ""
        if form == "json":
            valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(reply))
            valid = " valid" if valid else " invalid"
        print(f"{form}{valid} {reward}: {reply!r}{reason}")


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
name = {"type": "object", "properties": {"name": TEXT, "age": NUMBER}, "required": ["name"]}
show("json", name, '{"name": "Ann", "age": 5}', '{"name": "Ann"}')
show("json", name | {"additionalProperties": True}, '{"name": "Ann", "age": 5, "city": "Rome"}')
show("csv", {"type": "array", "items": name}, "name,age\nAnn,5", "I cannot do this.")
item = {"type": "object", "properties": {"id": NUMBER}, "required": ["id"]}
order = {"type": "object", "properties": {"item": {"type": "array", "items": item}}}
orders = {"type": "object", "properties": {"order": order}}
one, two = "<item><id>1</id></item>", "<item><id>1</id></item><item><id>2</id></item>"
show("xml", orders, f"<order>{two}</order>", f"<order>{one}</order>")
date = {"type": "object", "properties": {"date": TEXT | {"format": "date"}}}
show("json", date, '{"date": "2026-01-02"}')
show("yaml", date, "date: 2026-01-02")
show("toml", date, "date = 2026-01-02")
show("yaml", {"type": "object", "properties": {"time": TEXT}}, "time: 09:30", "time: 12:30")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
json valid 1.0: '{"name": "Ann", "age": 5}'
json valid 0.0: '{"name": "Ann"}' ValidationError: 'age' is a required property
json valid 0.0: '{"name": "Ann", "age": 5, "city": "Rome"}' ValidationError: Additional properties are not allowed ('city' was unexpected)
csv 1.0: 'name,age\nAnn,5'
csv 1.0: 'I cannot do this.'
xml 1.0: '<order><item><id>1</id></item><item><id>2</id></item></order>'
xml 0.0: '<order><item><id>1</id></item></order>' ValidationError: '1' is not of type 'object'
json valid 1.0: '{"date": "2026-01-02"}'
yaml 0.0: 'date: 2026-01-02' ValidationError: datetime.date(2026, 1, 2) is not of type 'string'
toml 0.0: 'date = 2026-01-02' ValidationError: datetime.date(2026, 1, 2) is not of type 'string'
yaml 1.0: 'time: 09:30'
yaml 0.0: 'time: 12:30' ValidationError: 750 is not of type 'string'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
