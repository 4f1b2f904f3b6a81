#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# mistral-common: the system prompt and the tools move along with the newest user message.
#
# Version: mistral-common 1.13.1, the tokenizers v3 and v7 that it ships.
# Guess: system prompt and tools stand at the front. Each prompt begins with the prompt before it
#   and the reply to it, so a conversation is one sequence for training and for the server's prefix
#   cache. A reply is encoded as it is.
# Behaviour: v3 puts the system prompt into the last user message and takes it out of the earlier
#   ones. v7 has it in front, but puts the tools before the last user message, as v3 does. So no
#   turn's prompt begins with the one before. Spaces at a reply's end are cut, a newline there
#   stays.
# Why it matters: turns cannot be joined to one sequence. A trainer that masks all but the replies
#   of the last prompt trains each earlier reply after a context without the system prompt under
#   which it was sampled.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv 'mistral-common[sentencepiece]==1.13.1'

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, Tool
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

first = [SystemMessage(content="S"), UserMessage(content="one")]
tools = [Tool(function=Function(name="f", parameters={}))]


def second(reply):
    return [*first, AssistantMessage(content=reply), UserMessage(content="two")]


for name in ("v3", "v7"):
    tokenizer = getattr(MistralTokenizer, name)()

    def encode(messages, tools=None):
        request = ChatCompletionRequest(messages=messages, tools=tools)
        return tokenizer.encode_chat_completion(request)

    print(name, encode(second("yes")).text)
    for given in (None, tools):
        before, after = encode(first, given).tokens, encode(second("yes"), given).tokens
        begins = after[: len(before)] == before
        print(f"{name} {'with' if given else 'no'} tools, begins with the turn before: {begins}")
    for end in ("  ", "\n"):
        same = encode(second("yes" + end)).tokens == encode(second("yes")).tokens
        print(name, f"reply ends with {end!r}: ids as without: {same}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
v3 <s>[INST]▁one[/INST]▁yes</s>[INST]▁S<0x0A><0x0A>two[/INST]
v3 no tools, begins with the turn before: False
v3 with tools, begins with the turn before: False
v3 reply ends with '  ': ids as without: True
v3 reply ends with '\n': ids as without: False
v7 <s>[SYSTEM_PROMPT]▁S[/SYSTEM_PROMPT][INST]▁one[/INST]▁yes</s>[INST]▁two[/INST]
v7 no tools, begins with the turn before: True
v7 with tools, begins with the turn before: False
v7 reply ends with '  ': ids as without: True
v7 reply ends with '\n': ids as without: False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
