#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# outlines-core: with "allOf" or a pattern like yes|no, the text that it demands is not JSON.
#
# Versions: outlines-core 0.2.14, lm-format-enforcer 0.11.3, llguidance 1.9.1, jsonschema 4.26.0.
#   For each schema, what one knows to be valid and what each of three constraints would let a model
#   write, character by character.
# Guess: what a constrained model writes is JSON, and fits the schema. Keywords that are not
#   supported are an error, as in llguidance.
# Behaviour: outlines-core makes one regular expression of the schema. The parts of allOf are put
#   one behind the other, so for two objects it demands {"a": 1}{"b": 2}, and refuses
#   {"a": 1, "b": 2}. A pattern is put between two quotes as it is, so for yes|no the quotes belong
#   to the alternatives: it allows "yes without its second quote, and refuses "yes". Like
#   lm-format-enforcer, it ignores minimum, maximum and uniqueItems; lm-format-enforcer also ignores
#   the types of a tuple's items.
# Why it matters: the reply cannot be parsed, though it was constrained so that it could be, and the
#   model had no choice. A number beyond the maximum reaches the tool or the grader. By the rollouts
#   alone, it looks like a model that cannot write JSON.
# Source: parse_all_of and parse_string_type of outlines-core's src/json_schema/parsing.rs.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv outlines-core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.9.1 \
  jsonschema==4.26.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json
import re

import jsonschema
import llguidance
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema


def valid(schema, text):
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def outlines(schema, text):
    return bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), text))


def enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


def guidance(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    if matcher.is_error():
        return None
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


def has(key):
    return {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}


WORDS = {False: "no", True: "yes", None: "error"}
for name, schema, texts in (
    ("allOf", {"allOf": [has("a"), has("b")]}, ('{"a": 1, "b": 2}', '{"a": 1}{"b": 2}')),
    ("pattern", {"type": "string", "pattern": "^yes$|^no$"}, ('"yes"', '"yes')),
    ("maximum", {"type": "integer", "maximum": 5}, ("5", "7")),
    ("unique", {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, ("[1,1]",)),
    (
        "tuple",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2},
        ('[1,"a"]', '["a",1]'),
    ),
):
    for text in texts:
        print(f"{name}: {text}: valid {WORDS[valid(schema, text)]};", end="")
        for constraint in (outlines, enforcer, guidance):
            try:
                answer = WORDS[constraint(schema, text)]
            except Exception:
                answer = "error"
            print(f" {constraint.__name__} {answer}", end="")
        print()
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
allOf: {"a": 1, "b": 2}: valid yes; outlines no enforcer yes guidance yes
allOf: {"a": 1}{"b": 2}: valid no; outlines yes enforcer no guidance no
pattern: "yes": valid yes; outlines no enforcer error guidance yes
pattern: "yes: valid no; outlines yes enforcer error guidance no
maximum: 5: valid yes; outlines yes enforcer yes guidance yes
maximum: 7: valid no; outlines yes enforcer yes guidance no
unique: [1,1]: valid no; outlines yes enforcer yes guidance error
tuple: [1,"a"]: valid yes; outlines yes enforcer yes guidance yes
tuple: ["a",1]: valid no; outlines no enforcer yes guidance no
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
