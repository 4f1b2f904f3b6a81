#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: trim_messages exceeds its limit after a tool's output, and keeps outputs without calls.
#
# Versions: litellm 1.110.2, openai 3.57.0, tiktoken's tokenizer for gpt-4o. litellm's own
#   token_counter counts. The limit is given as max_tokens; without it, litellm takes 75% of the
#   model's context.
# Guess: the result has at most max_tokens tokens. The oldest messages go first, the system message
#   stays, and a tool's output stays together with the call that it answers.
# Behaviour: the outputs at the end of the history are set aside, are not counted, and are added
#   again at the end. So here no trimmed history fits, and one that would fit without them comes
#   back whole. For most limits an output stays whose call is gone, which the providers refuse, and
#   the task of the user is gone. If a call's message has the content None and would have to be
#   shortened, the error is only logged, and the whole history comes back. With a message of the
#   user at the end, each limit is kept, but outputs lose their calls all the same.
# Why it matters: an agent that trims before each request trims just there, after a tool's output.
#   The request exceeds the context all the same, or is refused for an output without its call, or
#   the model goes on without knowing its task.
# Source: trim_messages, process_messages and shorten_message_to_fit_limit of litellm/utils.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv litellm==1.110.2 openai==3.57.0

seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python - 2>errors.log <<'PYTHON'
import copy
import json
from collections import Counter

from litellm.utils import token_counter, trim_messages

TASK = "Repair the parser, so that its test passes, and say what was wrong."


def history(content, question):
    messages = [
        {"role": "system", "content": "You repair programs with the tool bash."},
        {"role": "user", "content": TASK},
    ]
    for turn in range(3):
        arguments = json.dumps({"command": f"sed -n {turn + 1}0,{turn + 1}9p parser.py"})
        function = {"name": "bash", "arguments": arguments}
        call = {"id": f"call{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        output = f"part {turn} " * 25
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    return [*messages, {"role": "user", "content": "Go on."}] if question else messages


def count(messages):
    return token_counter(model="gpt-4o", messages=messages)


for content, question in (("I look at it.", True), ("I look at it.", False), (None, False)):
    messages = history(content, question)
    whole = count(messages)
    limits = range(30, whole)
    seen = Counter()
    for limit in limits:
        trimmed = trim_messages(
            copy.deepcopy(messages), model="gpt-4o", max_tokens=limit
        )
        calls = {call["id"] for message in trimmed for call in message.get("tool_calls") or []}
        outputs = {m["tool_call_id"] for m in trimmed if m["role"] == "tool"}
        seen["fit"] += count(trimmed) <= limit
        seen["have an output without its call"] += not outputs <= calls
        seen["have a call without its output"] += not calls <= outputs
        seen["have the task"] += any(message["content"] == TASK for message in trimmed)
        seen["are the whole history"] += trimmed == messages
    end = "the user's question" if question else "a tool's output"
    print(f"content {content!r}, {end} last: {whole} tokens, {len(limits)} limits below")
    for what, number in seen.items():
        print(f"  {number} {what}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
content 'I look at it.', the user's question last: 360 tokens, 330 limits below
  330 fit
  279 have an output without its call
  0 have a call without its output
  2 have the task
  0 are the whole history
content 'I look at it.', a tool's output last: 353 tokens, 323 limits below
  0 fit
  196 have an output without its call
  0 have a call without its output
  83 have the task
  81 are the whole history
content None, a tool's output last: 338 tokens, 308 limits below
  0 fit
  164 have an output without its call
  0 have a call without its output
  104 have the task
  104 are the whole history
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
