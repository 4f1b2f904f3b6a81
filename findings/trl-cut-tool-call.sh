#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# TRL: for some models, a tool call truncated at the token limit is parsed as a call without its
# last argument, for others as text.
#
# Versions: trl 1.16.0, its parse_response with its templates and parsers for each model;
#   transformers 5.24.0, and a tokenizer of single bytes. The reply is the template's own rendering
#   of a call, whole or cut inside the last argument.
# Guess: a cut call is no call. parse_response falls back to the plain text, as it does for a call
#   that is not well-formed, and that is the same for each model. The whole call gives the
#   arguments that it was rendered from.
# Behaviour: this holds for Qwen3, gpt-oss, Llama 3.1 and Gemma 4. For Qwen3.5, Qwen3.8 and GLM 4
#   MoE, the truncated call is parsed as a call with the arguments before the cut, and nothing shows
#   that one is missing. For LFM2.5, it has the truncated argument, with a quote in front. For
#   Qwen3.5, Qwen3.8 and GLM 4 MoE, even the whole call loses the argument's indent and its last
#   newline.
# Why it matters: GRPOTrainer runs each call that parse_response returns, and only then checks the
#   length. It removes the tool's result from a rollout that is full, but what the tool did to the
#   environment stays, and the reward is computed from that. If the truncated argument has a
#   default, the tool did something that the policy did not ask for. With another model, the tool is
#   not run at the same limit.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv transformers==5.24.0 jinja2==3.1.6 datasets==5.2.0
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import sysconfig

import tokenizers
import transformers
from trl.chat_template_utils import add_response_schema, parse_response

site = pathlib.Path(sysconfig.get_paths()["purelib"])
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
bytewise = tokenizers.Tokenizer(
    tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
)
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = tokenizers.decoders.ByteLevel()

string = {"type": "string"}
parameters = {"type": "object", "properties": {"path": string, "text": string}}
function = {"name": "write", "description": "Writes a file.", "parameters": parameters}
tools = [{"type": "function", "function": function}]
arguments = {"path": "a.py", "text": "    x = 1\n"}
call = {"type": "function", "function": {"name": "write", "arguments": arguments}}
chat = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [call]},
]
for name in (
    "qwen3",
    "gptoss",
    "llama3_1",
    "gemma4",
    "qwen3_5_think",
    "qwen3_8",
    "glm4moe",
    "lfm2_2_5",
):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")
    tokenizer.chat_template = (site / f"trl/chat_templates/{name}.jinja").read_text()
    add_response_schema(tokenizer)
    options = {"tools": tools, "tokenize": False}
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **options)
    reply = tokenizer.apply_chat_template(chat, **options).removeprefix(prompt)
    for how, sampled in (("whole", reply), ("cut", reply[: reply.index(" 1")])):
        ids, prefix = tokenizer.encode(sampled), tokenizer.encode(prompt)
        parsed = parse_response(tokenizer, ids, prefix=prefix, tools=tools)
        calls = [made["function"]["arguments"] for made in parsed.get("tool_calls", [])]
        text = "plain text" if parsed["content"] == sampled else repr(parsed["content"])
        print(f"{name}, {how}:", *calls or [text])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
qwen3, whole: {'path': 'a.py', 'text': '    x = 1\n'}
qwen3, cut: plain text
gptoss, whole: {'path': 'a.py', 'text': '    x = 1\n'}
gptoss, cut: plain text
llama3_1, whole: {'path': 'a.py', 'text': '    x = 1\n'}
llama3_1, cut: plain text
gemma4, whole: {'path': 'a.py', 'text': '    x = 1\n'}
gemma4, cut: plain text
qwen3_5_think, whole: {'path': 'a.py', 'text': 'x = 1'}
qwen3_5_think, cut: {'path': 'a.py'}
qwen3_8, whole: {'path': 'a.py', 'text': 'x = 1'}
qwen3_8, cut: {'path': 'a.py'}
glm4moe, whole: {'path': 'a.py', 'text': 'x = 1'}
glm4moe, cut: {'path': 'a.py'}
lfm2_2_5, whole: {'path': 'a.py', 'text': '    x = 1\n'}
lfm2_2_5, cut: {'path': 'a.py', 'text': "'    x ="}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
