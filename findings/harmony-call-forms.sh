#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# openai-harmony and TRL: a sampled tool call of gpt-oss is rendered to other ids, or is not seen at
# all.
#
# Versions: openai-harmony 0.0.8, with the ranks of o200k from quicktok-v1 0.4.0 (harmony checks
#   their hash); trl 1.16.0, its template and its parser for gpt-oss, transformers 5.24.0, and a
#   tokenizer of single bytes.
# Guess: OpenAI's own library parses a call and renders it again to the ids that were sampled.
#   gpt-oss's chat template writes a call in the same form, and a parser that is made for gpt-oss
#   sees each form that the library sees.
# Behaviour: OpenAI's guide to the format allows the recipient in front of the channel or behind it,
#   and its examples have it behind. harmony parses that, and renders the recipient in front. The
#   template puts it in front, too, and leaves out <|constrain|>. So one call has three forms. TRL's
#   parse_response sees the template's form alone: for the other two it gives neither a call nor a
#   text, and raises nothing.
# Why it matters: after a call in the form of the guide, the prompt of the next turn does not begin
#   with the last prompt and completion, so the turns cannot be joined. A trainer that renders the
#   messages trains on ids that nobody sampled. With TRL's parser the tool is not run, and the
#   rollout ends with an empty answer.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv openai-harmony==0.0.8 transformers==5.24.0 jinja2==3.1.6 \
  datasets==5.2.0
uv pip install -q --python venv --no-deps quicktok-v1==0.4.0 trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import base64
import os
import pathlib
import struct
import sysconfig

import openai_harmony
import tokenizers
import transformers
from trl.chat_template_utils import add_response_schema, parse_response

site = pathlib.Path(sysconfig.get_paths()["purelib"])
packed = (site / "quicktok/data/o200k.vocab").read_bytes()
with open("o200k_base.tiktoken", "wb") as file:
    at = 4
    while at < len(packed):
        (length,) = struct.unpack_from("<H", packed, at)
        token = packed[at + 2 : at + 2 + length]
        (rank,) = struct.unpack_from("<I", packed, at + 2 + length)
        file.write(base64.b64encode(token) + b" %d\n" % rank)
        at += 6 + length
os.environ["TIKTOKEN_ENCODINGS_BASE"] = os.getcwd()
harmony = openai_harmony.load_harmony_encoding("HarmonyGptOss")

alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
bytewise = tokenizers.Tokenizer(
    tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
)
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = tokenizers.decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|return|>")
tokenizer.chat_template = (site / "trl/chat_templates/gptoss.jinja").read_text()
add_response_schema(tokenizer)

START = "<|start|>assistant"
ASSISTANT = openai_harmony.Role.ASSISTANT
call = {"type": "function", "function": {"name": "f", "arguments": {}}}
chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
template = tokenizer.apply_chat_template(chat, tokenize=False).split(START)[1]
for name, sampled in (
    ("guide", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"),
    ("harmony", " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"),
    ("template", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"),
):
    ids = harmony.encode(sampled, allowed_special="all")
    (message,) = harmony.parse_messages_from_completion_tokens(ids, ASSISTANT)
    rendered = harmony.render(message)[len(harmony.encode(START, allowed_special="all")) :]
    again = "the same ids" if rendered == ids else harmony.decode(rendered)
    parsed = parse_response(tokenizer, tokenizer.encode(sampled), prefix=tokenizer.encode(START))
    called = [made["function"]["name"] for made in parsed.get("tool_calls", [])]
    print(f"{name}: {sampled}")
    print(f"  harmony sees {message.recipient}")
    print(f"  harmony renders {again}")
    print("  template renders", "the same" if template == sampled else template)
    print(f"  TRL sees {called}, content {parsed['content']!r}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
guide: <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
  harmony sees functions.f
  harmony renders  to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>
  template renders  to=functions.f<|channel|>commentary json<|message|>{}<|call|>
  TRL sees [], content ''
harmony:  to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>
  harmony sees functions.f
  harmony renders the same ids
  template renders  to=functions.f<|channel|>commentary json<|message|>{}<|call|>
  TRL sees [], content ''
template:  to=functions.f<|channel|>commentary json<|message|>{}<|call|>
  harmony sees functions.f
  harmony renders the same ids
  template renders the same
  TRL sees ['f'], content ''
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
