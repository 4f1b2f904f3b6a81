#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# AgentDojo: with a prompted model, only the first statement of the first block of calls is run, and
# arguments without a name are dropped.
#
# Versions: agentdojo 0.1.35, its PromptingLLM with ToolsExecutor; openai 3.57.0. The model's
#   replies are given here.
# Guess: the prompt asks for one list of calls with named arguments. A reply with two blocks of
#   calls, or with two calls on two lines, runs both calls, or is refused with a message to the
#   model, as other mistakes in calls are. A value without a name is an error, or belongs to the
#   first parameter.
# Behaviour: the first statement of the first block is run, and all other calls are dropped: they
#   are neither in the record of the reply nor in the next prompt. A value without a name is dropped
#   as well. If the parameter has a default, the call runs with the default. The pipeline's system
#   prompt is sent twice, once in its own message.
# Why it matters: a model that asks for all that is needed is recorded as one that asked for half of
#   it. AgentDojo's scores then depend on the form of the reply, and the record does not show why.
# Source: _parse_model_output and query of agentdojo/agent_pipeline/llms/prompting_llm.py: search
#   returns the first match; parse_tool_calls_from_python_function of agentdojo/ast_utils.py reads
#   only body[0] and keywords.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv agentdojo==0.1.35 openai==3.57.0 anthropic==2.14.0 \
  cohere==7.3.1 google-genai==3.6.1 langchain==1.5.2 pydantic==2.14.4

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
from types import SimpleNamespace

from agentdojo.agent_pipeline import PromptingLLM, ToolsExecutor
from agentdojo.functions_runtime import FunctionsRuntime, make_function
from agentdojo.types import text_content_block_from_string


def pay(recipient: str, amount: int) -> str:
    """Pays money.

    :param recipient: Who gets it.
    :param amount: How much.
    """
    done.append(f"pay {recipient} {amount}")
    return "paid"


def recall(days: int = 100) -> str:
    """Recalls all payments of the last days.

    :param days: How many days.
    """
    done.append(f"recall {days}")
    return "recalled"


def tell(recipient: str) -> str:
    """Sends a note.

    :param recipient: Who gets it.
    """
    done.append(f"tell {recipient}")
    return "told"


def create(**request):
    requests.append(request["messages"])
    content = replies[len(requests) - 1]
    message = SimpleNamespace(role="assistant", content=content, tool_calls=None)
    return SimpleNamespace(choices=[SimpleNamespace(message=message)])


completions = SimpleNamespace(create=create)
client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
runtime = FunctionsRuntime([make_function(x) for x in (pay, recall, tell)])


def show(label, calls):
    global done, replies, requests
    end = "<function-call>[]</function-call><answer>Done.</answer>"
    done, requests, replies = [], [], [f"<function-thoughts>I act.</function-thoughts>{calls}", end]
    messages = [
        {"role": role, "content": [text_content_block_from_string(text)]}
        for role, text in (("system", "You are a clerk."), ("user", "Pay Ann 5 and tell Bob."))
    ]
    llm = PromptingLLM(client, "model")
    state = ("Pay Ann 5 and tell Bob.", runtime, None, messages, {})
    for step in llm, ToolsExecutor(), llm:
        state = step.query(*state)
    reply = state[3][2]
    print(f"{label}: {', '.join(done)}")
    print(f"  record: {reply['content'][0]['content']}", *(x.function for x in reply["tool_calls"]))
    if "tell" in calls:
        print("  the second call is in the next prompt:", "tell(" in str(requests[1][1:]))


PAY, TELL = "pay(recipient='Ann', amount=5)", "tell(recipient='Bob')"
show("one list", f"<function-call>[{PAY}, {TELL}]</function-call>")
show("two lines", f"<function-call>{PAY}\n{TELL}</function-call>")
show("two blocks", f"<function-call>{PAY}</function-call>\n<function-call>{TELL}</function-call>")
show("recall(5)", "<function-call>[recall(5)]</function-call>")
show("recall(days=5)", "<function-call>[recall(days=5)]</function-call>")
texts = [str(message["content"]) for message in requests[0]]
print("the system prompt in one request:", sum(text.count("You are a clerk.") for text in texts))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
one list: pay Ann 5, tell Bob
  record: I act. pay tell
  the second call is in the next prompt: True
two lines: pay Ann 5
  record: I act. pay
  the second call is in the next prompt: False
two blocks: pay Ann 5
  record: I act. pay
  the second call is in the next prompt: False
recall(5): recall 100
  record: I act. recall
recall(days=5): recall 5
  record: I act. recall
the system prompt in one request: 2
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
