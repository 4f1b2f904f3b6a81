#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Inspect: OpenAI messages that go through Inspect come back with other texts, and a tool's output
# loses what it has between <think> and </think>.
#
# Versions: inspect-ai 0.3.285, its messages_from_openai and messages_to_openai; openai 3.57.0.
# Guess: Inspect's messages can hold all that OpenAI's hold, so the way there and back gives the
#   same texts and calls. Only a thought at the start of a reply is taken as its thought, and an
#   output of a tool has no thought.
# Behaviour: the first <think> and </think> anywhere in a reply are taken as its thought. So a reply
#   that explains the tags loses the words between them, and on the way back they are its thought.
#   From a tool's output, the tags and all between them are deleted. A reply with a thought, or of
#   several parts, gains a line break at its start, and tags gain line breaks around them. Arguments
#   that are a JSON object are written anew, with other spaces and with escapes; all others become
#   {}.
# Why it matters: Inspect's bridge reads the history of an agent this way, and its providers for
#   OpenAI-compatible servers write it this way. So the model is not shown what it wrote and what it
#   read: a file that has the tags seems to have a gap, a wrong call has lost its arguments, and
#   other tokens than the sampled ones miss the prefix cache. Transcripts that are converted like
#   this train these texts.
# Source: messages_from_openai and openai_assistant_content of inspect_ai/model/_openai.py;
#   parse_content_with_reasoning of model/_reasoning.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-ai==0.3.285 openai==3.57.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio

from inspect_ai.model import messages_from_openai, messages_to_openai


def call(arguments):
    function = {"name": "bash", "arguments": arguments}
    return {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


MESSAGES = [
    {"content": " indented\n"},
    {"content": "Write <think> first, then </think>."},
    {"content": "<think>Why?</think>Yes."},
    {"content": "Yes.", "reasoning_content": "Why?"},
    {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    call('{"command": "ls"}'),
    call('{"command":"echo é"}'),
    call('{"command": "ls'),
    call('"ls"'),
    {"role": "tool", "tool_call_id": "1", "content": "  a\n<think>b</think>\nc\n"},
]


def text(message):
    fields = {key: message[key] for key in ("content", "reasoning_content") if message.get(key)}
    for tool_call in message.get("tool_calls", []):
        fields["arguments"] = tool_call["function"]["arguments"]
    return fields


async def main():
    for message in MESSAGES:
        message = {"role": "assistant", **message}
        messages = await messages_from_openai([{"role": "user", "content": "?"}, message])
        back = (await messages_to_openai(messages))[-1]
        print(message["role"], text(message))
        print("  same" if text(back) == text(message) else f"  {text(back)}")


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
assistant {'content': ' indented\n'}
  same
assistant {'content': 'Write <think> first, then </think>.'}
  {'content': '\n<think>\nfirst, then\n</think>\n\nWrite .'}
assistant {'content': '<think>Why?</think>Yes.'}
  {'content': '\n<think>\nWhy?\n</think>\n\nYes.'}
assistant {'content': 'Yes.', 'reasoning_content': 'Why?'}
  {'content': '\nYes.', 'reasoning_content': 'Why?'}
assistant {'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]}
  {'content': '\na\nb'}
assistant {'arguments': '{"command": "ls"}'}
  same
assistant {'arguments': '{"command":"echo é"}'}
  {'arguments': '{"command": "echo \\u00e9"}'}
assistant {'arguments': '{"command": "ls'}
  {'arguments': '{}'}
assistant {'arguments': '"ls"'}
  {'arguments': '{}'}
tool {'content': '  a\n<think>b</think>\nc\n'}
  {'content': 'a\n\nc'}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
