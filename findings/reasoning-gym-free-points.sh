#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# reasoning-gym: "0" solves nearly every coin flip, and any text solves game_of_life_halting.
#
# Version: reasoning-gym 0.1.25; 200 tasks of each dataset with its default options.
# Guess: a constant reply earns full marks only for the tasks whose answer it is: half of them where
#   the answer is True or False, and next to none for numbers.
# Behaviour: game_of_life_halting compares bool(reply) with bool(answer), and the answer is the text
#   "True" or "False", so each reply that is not empty earns 1. coin_flip divides the length of the
#   common prefix by the shorter length, so "0" earns 1 for 0.3125, as does each number that breaks
#   off early. complex_arithmetic takes min(1, exp(-distance)), and for "nan" that is 1.
# Why it matters: in RL the first of them gives no signal at all, and the others teach the model to
#   answer "0" and "nan". The curve of the reward looks like success, and an evaluation with the
#   same dataset agrees.
# Source: score_answer in coin_flip.py, game_of_life_halting.py and complex_arithmetic.py of
#   reasoning_gym.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"

cat >show.py <<'PYTHON'
import reasoning_gym

for name, replies in {
    "game_of_life_halting": ("True", "False", "no idea", ""),
    "coin_flip": ("0", "1", "0.3", "no idea"),
    "complex_arithmetic": ("nan", "0", "no idea"),
}.items():
    dataset = reasoning_gym.create_dataset(name, size=200, seed=1)
    for reply in replies:
        scores = [dataset.score_answer(reply, task) for task in dataset]
        full = sum(score == 1 for score in scores)
        right = sum(task["answer"] == reply for task in dataset)
        print(f"{name}, always {reply!r}: full marks {full} of 200, equal to the answer {right}")

dataset = reasoning_gym.create_dataset("coin_flip", size=200, seed=1)
task = next(task for task in dataset if task["answer"] == "0.3125")
print(task["question"], task["answer"])
for reply in ("0.3125", "5/16", "0", "0.3", "0.31", "0.32"):
    print(f"  {reply}: {dataset.score_answer(reply, task):.3f}")
PYTHON
seen=$(uv run -q --no-project --python 3.13 --with 'reasoning-gym==0.1.25' python show.py \
  2>errors.log) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
game_of_life_halting, always 'True': full marks 200 of 200, equal to the answer 92
game_of_life_halting, always 'False': full marks 200 of 200, equal to the answer 108
game_of_life_halting, always 'no idea': full marks 200 of 200, equal to the answer 0
game_of_life_halting, always '': full marks 0 of 200, equal to the answer 0
coin_flip, always '0': full marks 187 of 200, equal to the answer 0
coin_flip, always '1': full marks 13 of 200, equal to the answer 13
coin_flip, always '0.3': full marks 14 of 200, equal to the answer 0
coin_flip, always 'no idea': full marks 0 of 200, equal to the answer 0
complex_arithmetic, always 'nan': full marks 200 of 200, equal to the answer 0
complex_arithmetic, always '0': full marks 0 of 200, equal to the answer 0
complex_arithmetic, always 'no idea': full marks 0 of 200, equal to the answer 0
What is the probability of getting exactly 2 heads in 5 fair coin flips? 0.3125
  0.3125: 1.000
  5/16: 1.000
  0: 1.000
  0.3: 1.000
  0.31: 1.000
  0.32: 0.750
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
