#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# LangChain: convert_to_openai_messages puts the user's text of an Anthropic message before the tool
# outputs, and drops the thoughts and the training weights of OpenAI messages.
#
# Versions: langchain-core 1.8.3, its convert_to_openai_messages.
# Guess: messages in Anthropic's format, which the docstring allows, come out as OpenAI messages in
#   the same order. An OpenAI message comes out as it was.
# Behaviour: a user message of Anthropic that has tool results and then a text becomes a user
#   message and then the tool messages, so the text stands between the calls and their outputs. In
#   OpenAI messages, weight and reasoning_content are dropped. There is no warning.
# Why it matters: in transcripts of Anthropic's agents, a reminder or the user's next wish follows
#   the tool results in one message. In the converted file, that text comes before the outputs.
#   OpenAI refuses such a history; a chat template renders it, so it is trained. Without the weight
#   of 0, the replies that should be left out are trained.
# Source: convert_to_openai_messages of langchain_core/messages/utils.py adds the tool messages
#   after the message that holds them.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv langchain-core==1.8.3

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
from langchain_core.messages import convert_to_openai_messages

ANTHROPIC = [
    {"role": "user", "content": "Fix the test."},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "1", "name": "read", "input": {}},
            {"type": "tool_use", "id": "2", "name": "run", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "x = 1"},
            {"type": "tool_result", "tool_use_id": "2", "content": "exit 1"},
            {"type": "text", "text": "Now add a comment."},
        ],
    },
]
OPENAI = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Go away.", "weight": 0},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi.", "reasoning_content": "Be kind.", "weight": 1},
]

for label, messages in (("from Anthropic", ANTHROPIC), ("from OpenAI", OPENAI)):
    print(label)
    for message in convert_to_openai_messages(messages):
        calls = [call["function"]["name"] for call in message.pop("tool_calls", [])]
        print("  ", {**message, "tool_calls": calls} if calls else message)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
from Anthropic
   {'role': 'user', 'content': 'Fix the test.'}
   {'role': 'assistant', 'content': '', 'tool_calls': ['read', 'run']}
   {'role': 'user', 'content': 'Now add a comment.'}
   {'role': 'tool', 'tool_call_id': '1', 'content': 'x = 1'}
   {'role': 'tool', 'tool_call_id': '2', 'content': 'exit 1'}
from OpenAI
   {'role': 'user', 'content': 'Hello'}
   {'role': 'assistant', 'content': 'Go away.'}
   {'role': 'user', 'content': 'Hello?'}
   {'role': 'assistant', 'content': 'Hi.'}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
