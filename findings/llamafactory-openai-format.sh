#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# LlamaFactory: a dataset in the "openai" format gets "detailed thinking off" in its system prompt,
# and loses what the assistant says before a tool call.
#
# Version: llamafactory 0.9.5, its converter for formatting "openai" and for "sharegpt", and its
#   templates qwen3 and llama3, with a tokenizer of single characters and stand-ins for torch,
#   transformers and the other modules that this does not need.
# Guess: both formatting values give the same training text, since the documentation of the data
#   calls this format a special case of sharegpt. The system prompt is the dataset's own, or the
#   template's. A tool call keeps the text and the thought before it, and its arguments.
# Behaviour: without tools, the converter adds "detailed thinking off" to the system prompt, or
#   makes it the system prompt, for every model. It is a switch of Ling and Nemotron models. An
#   assistant message with tool_calls becomes the calls alone: text and thought are gone, and qwen3
#   then trains an empty thought. The arguments, JSON text as in the API, are quoted once more.
#   Several tool outputs are joined with Qwen's tags, for Llama 3 too. There is no warning.
# Why it matters: exported chat logs have this format. The model learns with a sentence in the
#   system prompt that it does not see later. It learns to call tools without a thought, and with
#   arguments that are text instead of an object.
# Source: OpenAIDatasetConverter of llamafactory/data/converter.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv typing-extensions==4.15.0
uv pip install -q --python venv --no-deps llamafactory==0.9.5

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types
from unittest.mock import MagicMock

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/llamafactory")
for name in "", "data", "extras":
    module = types.ModuleType(".".join(filter(None, ("llamafactory", name))))
    module.__path__ = [str(root / name)]
    sys.modules[module.__name__] = module
for name in "constants", "logging", "misc":
    sys.modules["llamafactory.extras." + name] = MagicMock()
for name in "fsspec", "huggingface_hub", "datasets", "llamafactory.data.mm_plugin":
    sys.modules[name] = MagicMock()

from llamafactory.data.converter import get_dataset_converter
from llamafactory.data.parser import DatasetAttr
from llamafactory.data.template import TEMPLATES

characters = MagicMock(bos_token_id=None, eos_token_id=ord("$"))
characters.encode = lambda text, **options: list(map(ord, text))
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def show(template, formatting, messages, **tools):
    attributes = DatasetAttr("file", "rollouts")
    tags = {"role_tag": "role", "content_tag": "content", "system_tag": "system"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    tags |= {"observation_tag": "tool", "function_tag": "function"}
    columns = {"messages": "messages"} | {name: name for name in tools}
    attributes.join({"formatting": formatting, "columns": columns, "tags": tags})
    row = get_dataset_converter(formatting, attributes, None)({"messages": messages, **tools})
    turns = row["_prompt"] + row["_response"]
    pairs = TEMPLATES[template].encode_multiturn(characters, turns, row["_system"], row["_tools"])
    print(f"{template}, {formatting}, with tools:" if tools else f"{template}, {formatting}:")
    for number, pair in enumerate(pairs):
        prompt, reply = ("".join(map(chr, ids)) for ids in pair)
        start = "the task" if tools and not number else repr(prompt)
        print("  ", start, "->", repr(reply))


chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
brief = [{"role": "system", "content": "Be brief."}, *chat]
show("llama3", "sharegpt", brief)
show("llama3", "openai", brief)
show("llama3", "openai", chat)
call = {"type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
thought = "<think>The file first.</think>I read the file."
agent = [
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": thought, "tool_calls": [call, call]},
    {"role": "tool", "content": "x = 1"},
    {"role": "tool", "content": "y = 2"},
    {"role": "assistant", "content": "Done."},
]
show("qwen3", "openai", agent, tools=TOOLS)
show("llama3", "openai", agent, tools=TOOLS)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
llama3, sharegpt:
   '<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n' -> 'Hello<|eot_id|>'
llama3, openai:
   '<|start_header_id|>system<|end_header_id|>\n\nBe brief.\ndetailed thinking off<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n' -> 'Hello<|eot_id|>'
llama3, openai:
   '<|start_header_id|>system<|end_header_id|>\n\ndetailed thinking off<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n' -> 'Hello<|eot_id|>'
qwen3, openai, with tools:
   the task -> '<think>\n\n</think>\n\n<tool_call>\n{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}\n</tool_call>\n<tool_call>\n{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}\n</tool_call><|im_end|>\n'
   '<|im_start|>user\n<tool_response>\nx = 1\n</tool_response>\n<tool_response>\ny = 2\n</tool_response><|im_end|>\n<|im_start|>assistant\n' -> '<think>\n\n</think>\n\nDone.<|im_end|>\n'
llama3, openai, with tools:
   the task -> '[{"name": "read", "parameters": "{\\"path\\": \\"a\\"}"}, {"name": "read", "parameters": "{\\"path\\": \\"a\\"}"}]<|eot_id|>'
   '<|start_header_id|>ipython<|end_header_id|>\n\nx = 1\n</tool_response>\n<tool_response>\ny = 2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n' -> 'Done.<|eot_id|>'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
