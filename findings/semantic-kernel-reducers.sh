#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Semantic Kernel: the history reducers remove the task, and nothing else.
#
# Versions: semantic-kernel 1.45.0, its ChatHistoryTruncationReducer and
#   ChatHistorySummarizationReducer.
# Guess: target_count is about the number of messages that are left: the system message and the
#   newest ones. So that a call keeps its output, one message more may be left. The summary replaces
#   the old calls and outputs.
# Behaviour: the cut starts at the target and moves back over all calls and outputs, up to a message
#   that is neither. In the run of an agent, the only such message is the user's task. So the cut is
#   right behind the task: with a target of 6, all 40 calls and outputs stay, and only the task is
#   gone. reduce() says that it reduced, and says so again the next time, when nothing changes. The
#   other reducer asks the model to summarize the task alone, and keeps all calls and outputs, too.
# Why it matters: the limit does not limit the history of an agent. From the first reduction on, the
#   model works without its task, with a history that looks complete. The rollout fails, or is
#   scored and trained with prompts that have no task.
# Source: locate_safe_reduction_index of
#   semantic_kernel/contents/history_reducer/chat_history_reducer_utils.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv semantic-kernel==1.45.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio

from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import (
    ChatHistorySummarizationReducer,
    ChatHistoryTruncationReducer,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)


class Model(ChatCompletionClientBase):
    def get_prompt_execution_settings_class(self):
        return PromptExecutionSettings

    async def _inner_get_chat_message_contents(self, chat_history, settings):
        print("  the model is asked to summarize:", *map(name, chat_history.messages[:-1]))
        return [ChatMessageContent(role="assistant", content="summary")]


def run():
    """Returns the messages of a task that takes 20 turns."""
    messages = [
        ChatMessageContent(role="system", content="system"),
        ChatMessageContent(role="user", content="task"),
    ]
    for i in range(1, 21):
        call = FunctionCallContent(id=str(i), name="bash", arguments="{}")
        output = FunctionResultContent(id=str(i), name="bash", result="")
        messages.append(ChatMessageContent(role="assistant", items=[call]))
        messages.append(ChatMessageContent(role="tool", items=[output]))
    return messages


def name(message):
    item = message.items[0]
    kinds = {"function_call": "call", "function_result": "out"}
    return message.content or kinds[item.content_type] + item.id


async def show(label, kind, **options):
    history = kind(messages=run(), target_count=6, **options)
    print(f"{label}: {len(history.messages)} messages")
    for _ in range(2):
        reduced = await history.reduce() is not None
        names = list(map(name, history.messages))
        print(f"  reduced {reduced}: {len(names)} messages,", *names[:4], "...", names[-1])


async def main():
    await show("truncation", ChatHistoryTruncationReducer)
    model = Model(ai_model_id="model")
    await show("summary", ChatHistorySummarizationReducer, service=model)


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
truncation: 42 messages
  reduced True: 41 messages, system call1 out1 call2 ... out20
  reduced True: 41 messages, system call1 out1 call2 ... out20
summary: 42 messages
  the model is asked to summarize: task
  reduced True: 42 messages, system summary call1 out1 ... out20
  the model is asked to summarize: summary
  reduced True: 42 messages, system summary call1 out1 ... out20
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
