#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# LlamaIndex: a memory with a token limit counts no tool calls and no thoughts, and does not limit
# the history of one task.
#
# Versions: llama-index-core 0.14.25, its Memory and ChatMemoryBuffer. The latter is deprecated, but
#   still the default of its agents.
# Guess: token_limit limits what get() returns: the newest messages that fit. All that the model
#   receives is counted: texts, thoughts, tool calls and their outputs.
# Behaviour: in both, a tool call and a thought count as almost nothing, so calls that write 1000
#   words are free. Memory removes only whole turns that begin with a user's message. A task and all
#   its calls are one turn, so nothing of it is removed, even if the outputs alone exceed the limit.
#   ChatMemoryBuffer keeps such a turn as long as the texts alone are within the limit. Beyond it,
#   get() returns only the last message, which is a tool's output without its call.
# Why it matters: a loop that puts each call and output into the memory exceeds the model's context,
#   although the memory counts less than its token_limit. With ChatMemoryBuffer, the model that
#   has worked for 30 steps suddenly sees one output, with no task and no call. A server that does
#   not check this accepts it, and the rollout is scored all the same.
# Source: _estimate_token_count and _manage_queue of llama_index/core/memory/memory.py,
#   _token_count_for_messages and get of memory/chat_memory_buffer.py. LlamaIndex's issue 21950, on
#   the count, is open.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv llama-index-core==0.14.25

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock, ToolCallBlock
from llama_index.core.memory import ChatMemoryBuffer, Memory

WORDS = "word " * 1000


def history(turns):
    """Returns a task and calls that write 1000 words after a thought of 1000 words."""
    messages = [ChatMessage(role="user", content="task")]
    for i in range(1, turns + 1):
        arguments = {"path": "a.txt", "text": WORDS}
        call = ToolCallBlock(tool_call_id=str(i), tool_name="write", tool_kwargs=arguments)
        messages.append(ChatMessage(role="assistant", blocks=[ThinkingBlock(content=WORDS), call]))
        options = {"tool_call_id": str(i)}
        output = f"out{i} " + "word " * 9
        messages.append(ChatMessage(role="tool", content=output, additional_kwargs=options))
    return messages


def words(message):
    """Counts the words of a message, its thoughts and its calls."""
    texts = [message.content or ""]
    for block in message.blocks:
        texts.append(getattr(block, "content", None) or "")
        texts += getattr(block, "tool_kwargs", {}).values()
    return sum(len(text.split()) for text in texts)


def show(label, messages):
    names = [m.role.value + " " + (m.content or "").split(" ")[0] for m in messages]
    total = sum(map(words, messages))
    print(f"  {label}: {len(messages)} messages, {total} words, first: {names[0]}")


for turns, limit in ((20, 300), (30, 300)):
    messages = history(turns)
    print(f"{turns} turns, token_limit {limit}")
    memory = Memory.from_defaults(token_limit=limit, tokenizer_fn=str.split)
    buffer = ChatMemoryBuffer.from_defaults(token_limit=limit, tokenizer_fn=str.split)
    for message in messages:
        memory.put(message)
        buffer.put(message)
    show("Memory", memory.get())
    show("ChatMemoryBuffer", buffer.get())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
20 turns, token_limit 300
  Memory: 41 messages, 40221 words, first: user task
  ChatMemoryBuffer: 41 messages, 40221 words, first: user task
30 turns, token_limit 300
  Memory: 61 messages, 60331 words, first: user task
  ChatMemoryBuffer: 1 messages, 10 words, first: tool out30
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
