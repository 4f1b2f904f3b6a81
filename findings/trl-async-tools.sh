#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# TRL: if a reply calls an async tool and then a normal one, or makes a wrong call after an async
# one, the model gets the outputs in the opposite order.
#
# Version: trl 1.16.0, GRPOTrainer._tool_call_loop, taken out of its file and run with a stand-in
#   for the trainer, and TRL's template for Qwen3; jinja2 3.1.6.
# Guess: the outputs come in the order of the calls, and the calls take effect in that order, or at
#   the same time. The documentation allows normal and async tools, and names no other difference.
# Behaviour: while TRL goes through the calls, normal tools run at once, and async ones are put
#   aside and run after all of them. Their outputs are appended at the end. An unknown tool or a
#   wrong argument gives its error at once, so that error precedes the output of an async call. A
#   tool message has the tool's name but no id of its call, and Qwen3's template does not print the
#   name. So for "Rome" and "Oslo" the model reads the weather of Oslo where it asked for Rome, and
#   a read that follows a write runs before the write.
# Why it matters: the policy is trained on swapped observations. Only the position tells the model
#   which output belongs to which call. With normal tools alone the order is right, so a tool that
#   becomes async for speed changes the data. With async tools alone it is right until the model
#   makes a wrong call.
# Source: _tool_call_loop of trl/trainer/grpo_trainer.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv jinja2==3.1.6
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import ast
import asyncio
import pathlib
import sys
import threading
from unittest.mock import MagicMock

import jinja2

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/trl")
tree = ast.parse((root / "trainer/grpo_trainer.py").read_text())
trainer = next(node for node in tree.body if getattr(node, "name", "") == "GRPOTrainer")
method = next(node for node in trainer.body if getattr(node, "name", "") == "_tool_call_loop")
scope = {
    "asyncio": asyncio,
    "parse_response": lambda *arguments, **options: {"role": "assistant", "content": "Done."},
}
exec(compile(ast.Module([method], []), "grpo_trainer.py", "exec"), scope)
template = jinja2.Environment().from_string((root / "chat_templates/qwen3.jinja").read_text())
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
files = {}


def weather(city):
    return {"Rome": "sunny", "Oslo": "snow"}[city]


async def weather_async(city):
    return weather(city)


def read(path):
    return files.get(path, "no such file")


async def write(path, text):
    files[path] = text
    return "written"


NORMAL = {"weather": weather, "read": read}
ASYNC = {"weather_async": weather_async, "write": write}


def run(*calls):
    made = [
        {"type": "function", "function": {"name": tool.__name__, "arguments": arguments}}
        for tool, arguments in calls
    ]
    stand_in = MagicMock(max_tool_calling_iterations=1, max_completion_length=9, async_loop=loop)
    stand_in.model.config.max_position_embeddings = 9
    stand_in.configure_mock(use_vllm=False, _is_vlm=False, environment_factories=None)
    stand_in._sync_tool_dicts, stand_in._async_tool_dicts = [NORMAL], [ASYNC]
    stand_in._get_tool_suffix_ids = lambda messages: []
    stand_in._generate_single_turn = lambda *arguments, **options: ([[1]], None)
    prompt = [{"role": "user", "content": "Go."}]
    completion = [{"role": "assistant", "content": "", "tool_calls": made}]
    scope["_tool_call_loop"](stand_in, [prompt], [[1]], [[1]], [completion], None, None, {})
    text = template.render(messages=prompt, add_generation_prompt=False)
    for line in text.splitlines():
        if line.startswith('{"name"'):
            print("  call:  ", line)
        elif line and "<" not in line:
            print("  output:", line)


print("both async:")
run((weather_async, {"city": "Rome"}), (weather_async, {"city": "Oslo"}))
print("both async, the second with a wrong argument:")
run((weather_async, {"city": "Rome"}), (weather_async, {"town": "Oslo"}))
print("the first async, the second not:")
run((weather_async, {"city": "Rome"}), (weather, {"city": "Oslo"}))
run((write, {"path": "a", "text": "x = 1"}), (read, {"path": "a"}))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
both async:
  call:   {"name": "weather_async", "arguments": {"city": "Rome"}}
  call:   {"name": "weather_async", "arguments": {"city": "Oslo"}}
  output: sunny
  output: snow
both async, the second with a wrong argument:
  call:   {"name": "weather_async", "arguments": {"city": "Rome"}}
  call:   {"name": "weather_async", "arguments": {"town": "Oslo"}}
  output: {'error': "weather_async() got an unexpected keyword argument 'town'"}
  output: sunny
the first async, the second not:
  call:   {"name": "weather_async", "arguments": {"city": "Rome"}}
  call:   {"name": "weather", "arguments": {"city": "Oslo"}}
  output: snow
  output: sunny
  call:   {"name": "write", "arguments": {"path": "a", "text": "x = 1"}}
  call:   {"name": "read", "arguments": {"path": "a"}}
  output: no such file
  output: written
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
