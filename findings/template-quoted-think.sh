#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Chat templates: a reply that only quotes "</think>" loses all that stands before it in the next
# turn's prompt.
#
# Versions: transformers 5.24.0; the templates are the copies in trl 1.16.0 (those of models that
#   think).
# Guess: templates drop thinking that a reply begins with: a message that starts with <think>, or
#   `reasoning_content`. A reply without thinking that mentions the tag, say a script that greps for
#   it, is rendered whole.
# Behaviour: seven of these eight templates cut at the tag wherever it is, without looking for an
#   opening one; Qwen3.8's does not. What was said before the tag, here most of the reply's command,
#   is gone from the prompt. Nothing is raised or logged.
# Why it matters: agents that work on templates, parsers or logs of models write the tag in plain
#   text. The next prompt then shows the model a reply that it did not give, and does not begin with
#   the last prompt and completion.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv transformers==5.24.0 jinja2==3.1.6
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import sysconfig

import tokenizers
import transformers

site = pathlib.Path(sysconfig.get_paths()["purelib"])
empty = tokenizers.Tokenizer(tokenizers.models.BPE())
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=empty, bos_token="<s>", eos_token="</s>"
)
reply = "grep -c '</think>' replies.txt"
chat = [
    {"role": "user", "content": "Count them."},
    {"role": "assistant", "content": reply},
    {"role": "user", "content": "Done?"},
]
for name in (
    "deepseek_r1_distill",
    "deepseekv3",
    "glm4moe",
    "lfm2_2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
):
    template = (site / f"trl/chat_templates/{name}.jinja").read_text()
    prompt = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    quoted = prompt.index("' replies.txt")
    print(name, repr(prompt[:quoted].split("Count them.")[1]))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
deepseek_r1_distill '<｜Assistant｜>'
deepseekv3 '<｜Assistant｜>'
glm4moe '<|assistant|>\n<think></think>\n'
lfm2_2_5 '<|im_end|>\n<|im_start|>assistant\n'
qwen3 '<|im_end|>\n<|im_start|>assistant\n'
qwen3_5_think '<|im_end|>\n<|im_start|>assistant\n'
qwen3_6 '<|im_end|>\n<|im_start|>assistant\n'
qwen3_8 "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\ngrep -c '</think>"
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
