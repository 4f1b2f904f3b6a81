#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Chat templates: a tool call's arguments as OpenAI's API gives them, a JSON string, are put into
# quotes once more.
#
# Versions: transformers 5.24.0; the templates are the copies in trl 1.16.0.
# Guess: a template renders arguments that are a dict and arguments that are the same dict as JSON
#   text to the same prompt, or it refuses the text.
# Behaviour: some do the one (Qwen3) or the other (GLM 4 MoE). Those of Qwen2.5, Llama 3.1 and
#   gpt-oss print the text as a JSON string, with backslashes (gpt-oss with the outer quotes, too);
#   Gemma 4 puts a second pair of braces around it. Nothing is raised.
# Why it matters: the chat API answers with text and wants text back, so a recorded conversation
#   holds text. llama.cpp's server parses it before it renders. Rendered from the record, the
#   prompts of all later turns are other ones.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv transformers==5.24.0 jinja2==3.1.6
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json
import pathlib
import sysconfig

import tokenizers
import transformers

site = pathlib.Path(sysconfig.get_paths()["purelib"])
empty = tokenizers.Tokenizer(tokenizers.models.BPE())
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=empty, bos_token="<s>", eos_token="</s>"
)


def render(name, arguments):
    call = {"type": "function", "id": "c1", "function": {"name": "run", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]
    template = (site / f"trl/chat_templates/{name}.jinja").read_text()
    prompt = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    return prompt[prompt.index("Look.") : prompt.index("a.txt")]


arguments = {"cmd": "ls"}
for name in ("qwen3", "glm4moe", "qwen2_5", "llama3_1", "gptoss", "gemma4"):
    try:
        text = render(name, json.dumps(arguments))
        same = text == render(name, arguments)
        print(name, "same" if same else text[text.index("{") : text.rindex("}") + 1].strip())
    except Exception as error:
        print(name, type(error).__name__)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
qwen3 same
glm4moe UndefinedError
qwen2_5 {"name": "run", "arguments": "{\"cmd\": \"ls\"}"}
llama3_1 {"name": "run", "parameters": "{\"cmd\": \"ls\"}"}
gptoss {\"cmd\": \"ls\"}
gemma4 {{"cmd": "ls"}}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
