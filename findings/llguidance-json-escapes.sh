#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# llguidance: constrained decoding refuses what Python's json.dumps writes for a string like "é".
#
# Version: llguidance 1.9.1, a grammar engine of vLLM and SGLang; its own tokenizer of bytes.
# Guess: a schema for a string admits each JSON text of a string: é as it is, or as \u00e9.
# Behaviour: é is admitted as it is only. Of the escapes by \u only those of control characters are
#   admitted, so é, 漢 and a pair of surrogates are refused behind "\u", as is "/" as "\/". It is the
#   same in a value of an object, and if the schema is {}, which admits anything.
# Why it matters: tool calls in training data are often written by json.dumps, which escapes all
#   that is not ASCII. A model that has learned this writes "\u00e9", and has little probability for
#   the tokens that the grammar allows: it is forced off its own distribution, and the recorded
#   log-probabilities show it. (json.dumps(..., ensure_ascii=False) writes what is admitted.)
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv llguidance==1.9.1

seen=$(PYTHONUTF8=1 venv/bin/python - 2>errors.log <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

TOKENIZER = LLTokenizer("byte")
STRING = {"type": "string"}
OBJECT = {"type": "object", "properties": {"city": STRING}}


def admitted(schema: dict, text: str) -> str:
    """How far the grammar of a schema follows a text."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    ids = list(text.encode())
    n = matcher.try_consume_tokens(ids)
    if n == len(ids) and matcher.is_accepting():
        return "admitted"
    return f"refused after {bytes(ids[:n]).decode(errors='replace')}"


for schema, value in (
    (STRING, "Orléans"),
    (STRING, "漢"),
    (STRING, "\U0001f5fa"),
    (STRING, "\x1f"),
    ({}, "é"),
    (OBJECT, {"city": "Orléans"}),
):
    for is_ascii in (False, True):
        text = json.dumps(value, ensure_ascii=is_ascii)
        print(text, "->", admitted(schema, text))
print(r'"a\/b"', "->", admitted(STRING, r'"a\/b"'))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
"Orléans" -> admitted
"Orl\u00e9ans" -> refused after "Orl\u00
"漢" -> admitted
"\u6f22" -> refused after "\u
"🗺" -> admitted
"\ud83d\uddfa" -> refused after "\u
"\u001f" -> admitted
"\u001f" -> admitted
"é" -> admitted
"\u00e9" -> refused after "\u00
{"city": "Orléans"} -> admitted
{"city": "Orl\u00e9ans"} -> refused after {"city": "Orl\u00
"a\/b" -> refused after "a\
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
