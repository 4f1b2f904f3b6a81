#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# reasoning-gym: seed 2 gives the tasks of seed 1, moved by one, and its endless stream repeats
# itself.
#
# Version: reasoning-gym 0.1.25.
# Guess: two seeds give two independent samples, so training with seed 1 and evaluating with seed 2
#   share next to no task, if the kind of task has many. ReseedingDataset, which makes a dataset
#   endless, gives new tasks after each chunk.
# Behaviour: task number i is made from the seed plus i. Of 500 tasks, seeds 1 and 2 share 499, and
#   seeds 1 and 42 share 459. Only seeds that lie 500 or more apart share none but by chance.
#   ReseedingDataset adds the number of the chunk to the seed, so each further chunk of 500 has one
#   new task: the first 5000 tasks are 509 different ones.
# Why it matters: a held-out set with the next seed is the training set. Its score rises as the
#   policy learns the answers by heart, and several seeds, for an error bar or for several workers,
#   are nearly the same tasks.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv reasoning-gym==0.1.25

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import itertools

import reasoning_gym
from reasoning_gym.dataset import ReseedingDataset


def tasks(name, seed):
    made = reasoning_gym.create_dataset(name, size=500, seed=seed)
    return [task["question"] for task in made]


for name in ("basic_arithmetic", "gcd", "leg_counting"):
    first = tasks(name, 1)
    print(f"{name}: {len(set(first))} different tasks with seed 1")
    for seed in (2, 42, 501):
        print(f"  with seed {seed}, too: {len(set(first) & set(tasks(name, seed)))}")
    print("  seed 2 is seed 1, moved by one:", tasks(name, 2)[:-1] == first[1:])
    stream = ReseedingDataset(reasoning_gym.create_dataset(name, size=500, seed=1), chunk_size=500)
    streamed = [task["question"] for task in itertools.islice(stream, 5000)]
    print(f"  stream: {len(set(streamed))} different tasks in {len(streamed)}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
basic_arithmetic: 500 different tasks with seed 1
  with seed 2, too: 499
  with seed 42, too: 459
  with seed 501, too: 0
  seed 2 is seed 1, moved by one: True
  stream: 509 different tasks in 5000
gcd: 500 different tasks with seed 1
  with seed 2, too: 499
  with seed 42, too: 459
  with seed 501, too: 1
  seed 2 is seed 1, moved by one: True
  stream: 509 different tasks in 5000
leg_counting: 500 different tasks with seed 1
  with seed 2, too: 499
  with seed 42, too: 459
  with seed 501, too: 0
  seed 2 is seed 1, moved by one: True
  stream: 509 different tasks in 5000
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
