#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# AutoGen: a context with a token limit drops the messages in the middle, and splits tool calls from
# their outputs.
#
# Versions: autogen-core 0.7.5, its TokenLimitedChatCompletionContext.
# Guess: a context with a token limit returns the newest messages that fit, as the docstring of
#   get_messages says, so the oldest turns go first. A call and its output go together. The context
#   that limits the number of messages, BufferedChatCompletionContext, keeps the newest ones.
# Behaviour: as long as there are too many tokens, the message in the middle of the list is removed.
#   So the oldest and the newest turns stay, and the gap is not marked. One message is removed at a
#   time, so at the gap there is an output without its call, and often a call without its output,
#   depending on the limit. An output without its call is removed only at the start of the list.
# Why it matters: after step 2 the model sees the end of step 7, as if one followed the other, and
#   the output of one call looks like the answer to another. A server that does not check this
#   accepts the history, so rollouts with such gaps are scored and trained. With a server that
#   checks it, the run ends with an error that depends on the length of the history.
# Source: get_messages of autogen_core/model_context/_token_limited_chat_completion_context.py.
#   AutoGen's issue 7955 is open.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv autogen-core==0.7.5

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio

from autogen_core import FunctionCall
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    TokenLimitedChatCompletionContext,
)
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    UserMessage,
)


class Client:
    """Counts each message as ten tokens."""

    def count_tokens(self, messages, tools=()):
        return 10 * len(messages)


def history(turns):
    messages = [UserMessage(content="task", source="user")]
    for i in range(1, turns + 1):
        call = FunctionCall(id=str(i), name="bash", arguments="{}")
        output = FunctionExecutionResult(content="", name="bash", call_id=str(i), is_error=False)
        messages.append(AssistantMessage(content=[call], source="agent"))
        messages.append(FunctionExecutionResultMessage(content=[output]))
    return messages


def name(message):
    if isinstance(message, AssistantMessage):
        return "call" + message.content[0].id
    if isinstance(message, FunctionExecutionResultMessage):
        return "out" + message.content[0].call_id
    return message.content


async def show(label, context):
    print(f"{label}:", *map(name, await context.get_messages()))


async def main():
    for turns in 9, 10:
        messages = history(turns)
        for limit in 100, 110:
            context = TokenLimitedChatCompletionContext(
                Client(), token_limit=limit, initial_messages=messages
            )
            await show(f"{turns} turns, {limit} tokens", context)
    context = BufferedChatCompletionContext(buffer_size=6, initial_messages=messages)
    await show("10 turns, 6 messages", context)


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
9 turns, 100 tokens: task call1 out1 call2 out2 out7 call8 out8 call9 out9
9 turns, 110 tokens: task call1 out1 call2 out2 call3 out7 call8 out8 call9 out9
10 turns, 100 tokens: task call1 out1 call2 out2 out8 call9 out9 call10 out10
10 turns, 110 tokens: task call1 out1 call2 out2 call3 out8 call9 out9 call10 out10
10 turns, 6 messages: call8 out8 call9 out9 call10 out10
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
