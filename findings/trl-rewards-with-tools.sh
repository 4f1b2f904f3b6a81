#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# TRL: with tools, its accuracy and format rewards judge the first message, which is the tool call,
# and its length and repetition rewards count the tools' outputs.
#
# Version: trl 1.16.0, the reward functions of trl.rewards, called with what its GRPOTrainer passes
#   for a rollout with a tool call: all messages of the completion, and all its ids; math-verify
#   0.9.0.
# Guess: the trainer and the rewards are of one library, so accuracy_reward reads the final answer.
#   Length and repetition are about what the model wrote, as the loss is, which masks the outputs.
# Behaviour: accuracy_reward, reasoning_accuracy_reward and think_format_reward read
#   completion[0]["content"], the message with the tool call. The docstring asks for "a list of one
#   message", but neither the trainer nor the reward objects to more. So a right answer after a call
#   scores 0, and a right guess before the call scores 1, whatever the answer is. completion_ids
#   contains the outputs of the tools, so a repetitive output is a repetition penalty, and a long
#   one is an overlong rollout with the smallest cosine reward.
# Why it matters: whoever adds tools to a GRPO run with these rewards trains the model to answer
#   before the tool is called, and to call tools with short outputs. The rewards look plausible in
#   the log.
# Source: trl/rewards/accuracy_rewards.py, format_rewards.py and other_rewards.py;
#   GRPOTrainer._tool_call_loop of trl/trainer/grpo_trainer.py, which appends to completions and
#   completion_ids, and _calculate_rewards.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv math-verify==0.9.0 latex2sympy2-extended==1.11.0
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types

# The package itself imports torch and transformers, which the rewards do not need.
(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/trl")
for name in "trl", "trl.rewards":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]
utils = sys.modules["trl.import_utils"] = types.ModuleType("trl.import_utils")
utils.is_math_verify_available = lambda: True

from trl.rewards.accuracy_rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    reasoning_accuracy_reward,
)
from trl.rewards.format_rewards import think_format_reward
from trl.rewards.other_rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

TOOL = {"role": "tool", "name": "multiply", "content": "42"}
RIGHT = {"role": "assistant", "content": "<think>Easy.</think> It is \\boxed{42}."}
WRONG = {"role": "assistant", "content": "It is \\boxed{7}."}


def call(text):
    function = {"name": "multiply", "arguments": {"x": 6, "y": 7}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls}


for label, *messages in (
    ("right answer, no tool", RIGHT),
    ("call, right answer", call(""), TOOL, RIGHT),
    ("right guess and call, wrong answer", call(RIGHT["content"]), TOOL, WRONG),
):
    found = []
    for reward in accuracy_reward, reasoning_accuracy_reward, think_format_reward:
        found.append(f"{reward.__name__} {reward([messages], solution=['42'])[0]}")
    print(f"{label}:", ", ".join(found))

MODEL = list(range(100))
for label, output in (
    ("no output", []),
    ("an output of 100 equal ids", [7] * 100),
    ("an output of 400 ids", list(range(1000, 1400))),
):
    ids = MODEL[:50] + output + MODEL[50:]
    repetition = get_repetition_penalty_reward()([ids])[0]
    overlong = get_soft_overlong_punishment(400, 100)(completion_ids=[ids])[0]
    cosine = get_cosine_scaled_reward(max_len=400)([[RIGHT]], ["42"], [ids])[0]
    print(f"{label}: repetition {repetition:.2f}, overlong {overlong:.2f}, cosine {cosine:.2f}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
right answer, no tool: accuracy_reward 1.0, reasoning_accuracy_reward 1.0, think_format_reward 1.0
call, right answer: accuracy_reward 0.0, reasoning_accuracy_reward 0.0, think_format_reward 0.0
right guess and call, wrong answer: accuracy_reward 1.0, reasoning_accuracy_reward 1.0, think_format_reward 1.0
no output: repetition 0.00, overlong 0.00, cosine 0.93
an output of 100 equal ids: repetition -0.49, overlong 0.00, cosine 0.75
an output of 400 ids: repetition 0.00, overlong -1.00, cosine 0.50
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
