#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Atropos: the weights in a combined reward are ignored, a rollout of several turns is judged by its
# first turn, and a reply that equals the reference is wrong if the number has a comma or a minus.
#
# Version: atroposlib 0.4.0, its reward functions combined, format, reasoning_steps and accuracy;
#   math-verify 0.9.0.
# Guess: the weight is the "importance factor when combining with other rewards", as the docstring
#   says: one with weight 3 counts three times as much in the combination, and one with weight 0
#   does not count. Of a list of messages, the last reply or all of them are judged. "#### 1,234",
#   in the GSM8K form that accuracy reads, is 1234.
# Behaviour: the weight is applied when a reward function is called, but the combination calls
#   compute, so all weights are 1; with normalization "sum" the sum of the weights still divides. A
#   list of messages is searched for the first message of the assistant, which is a tool call in
#   most rollouts. After "####", digits and full stops are read, so 1,234 is 1, 3/4 is 3, and -5 and
#   $18 are nothing.
# Why it matters: whoever changes the weights trains with the same rewards as before. In rollouts
#   with tools, a reward for the answer's format is a reward for the first turn.
# Source: CombinedReward.compute of atroposlib/envs/reward_fns/combined_reward.py,
#   RewardFunction.get_content of reward_function.py, _verify_answer of accuracy_reward.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv math-verify==0.9.0 latex2sympy2-extended==1.11.0
uv pip install -q --python venv --no-deps atroposlib==0.4.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib.util  # The registry uses it without an import.
import logging

from atroposlib.envs.reward_fns import CombinedReward, registry

logging.disable()

TAGGED = "<think>Hm.</think> <answer>Yes.</answer>"
STEPS = "Step 1: Look.\nStep 2: Think.\nStep 3: Answer."
FORMAT = registry.create({"type": "format", "weight": 3.0})
print("format alone, weight 3: tagged {}, steps {}".format(*FORMAT([TAGGED, STEPS])))
for weight in 1.0, 3.0, 0.0:
    parts = [{"type": "format", "weight": weight}, {"type": "reasoning_steps", "weight": 1.0}]
    for normalization in "none", "sum":
        combined = CombinedReward(rewards=parts, normalization=normalization)
        rewards = combined([TAGGED, STEPS])
        print(f"weights {weight} and 1.0, {normalization}: tagged {rewards[0]}, steps {rewards[1]}")

user, tool = {"role": "user", "content": "Is it?"}, {"role": "tool", "content": "It is."}
call, answer = ({"role": "assistant", "content": text} for text in ("I look.", TAGGED))
print("one turn:", FORMAT([[user, answer]]), "two turns:", FORMAT([[user, call, tool, answer]]))

accuracy = registry.create("accuracy")
for text in "#### 18", "#### 1,234", "#### -5", "#### $18", "#### 3/4", "\\boxed{1,234}":
    print(f"{text} for {text}:", *accuracy([text], solution=text))
print("#### 1,234 for 1:", *accuracy(["#### 1,234"], solution="1"))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
format alone, weight 3: tagged 3.0, steps 0.0
weights 1.0 and 1.0, none: tagged 1.0, steps 0.5
weights 1.0 and 1.0, sum: tagged 0.5, steps 0.25
weights 3.0 and 1.0, none: tagged 1.0, steps 0.5
weights 3.0 and 1.0, sum: tagged 0.25, steps 0.125
weights 0.0 and 1.0, none: tagged 1.0, steps 0.5
weights 0.0 and 1.0, sum: tagged 1.0, steps 0.5
one turn: [3.0] two turns: [0.0]
#### 18 for #### 18: 1.0
#### 1,234 for #### 1,234: 0.0
#### -5 for #### -5: 0.0
#### $18 for #### $18: 0.0
#### 3/4 for #### 3/4: 0.0
\boxed{1,234} for \boxed{1,234}: 1.0
#### 1,234 for 1: 1.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
