#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# tinker-cookbook: in its GPQA benchmark, A is the right choice of every question.
#
# Versions: tinker-cookbook 0.6.1 and what its benchmark imports (tinker 0.38.0, datasets 5.2.0,
#   transformers 5.24.0, torch 2.13.0). GPQA itself is gated, so four questions with the columns of
#   its public table stand in for it; the rest is the package's own code.
# Guess: the four choices are shuffled with a seed, or sorted, so a model that always says A scores
#   about 0.25.
# Behaviour: the choices are the column "Correct Answer" and then the three "Incorrect Answer"
#   columns, in this order. A model that always says A scores 1.0, and one that says B scores 0.
# Why it matters: the score measures the preference for A as well as the knowledge, so it cannot be
#   compared with published ones. A policy that is selected or trained with this environment learns
#   to say A. SuperGPQA, MMLU-Pro and the others take the answer's place from the dataset.
# Source: make_envs of tinker_cookbook/eval/benchmarks/gpqa.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 tinker==0.38.0 transformers==5.24.0 datasets==5.2.0 tiktoken==0.14.0 \
  chz==0.4.0 blobfile==3.3.0 cloudpickle==3.1.3 termcolor==3.3.0 pillow==13.0.0 rich==15.0.0
uv pip install -q --python venv --no-deps tinker-cookbook==0.6.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
from types import SimpleNamespace

from datasets import Dataset
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, gpqa

TABLE = Dataset.from_list(
    [
        {
            "Pre-Revision Question": f"What is {number} and {number}?",
            "Question": f"What is {number} + {number}?",
            "Correct Answer": str(2 * number),
            "Incorrect Answer 1": str(2 * number + 1),
            "Incorrect Answer 2": str(2 * number - 1),
            "Incorrect Answer 3": str(2 * number + 10),
            "Explanation": "Addition.",
            "Subdomain": "Arithmetic",
        }
        for number in (3, 8, 21, 34)
    ]
)
gpqa.load_benchmark_dataset = lambda *args, **kwargs: TABLE
renderer = SimpleNamespace(get_stop_sequences=list)
envs = [
    env.message_env
    for env in gpqa.GPQABenchmarkBuilder().make_envs(renderer, BenchmarkConfig())
]
for env in envs:
    lines = env.prompt.splitlines()
    print(lines[0], " ".join(lines[2:6]), "expected:", env.expected)
for letter in "ABCD":
    reply = {"role": "assistant", "content": f"The answer is {letter}."}
    rewards = [asyncio.run(env.step(reply)).reward for env in envs]
    print(f"always {letter}: {sum(rewards) / len(rewards)}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
What is 3 + 3? (A) 6 (B) 7 (C) 5 (D) 16 expected: A
What is 8 + 8? (A) 16 (B) 17 (C) 15 (D) 26 expected: A
What is 21 + 21? (A) 42 (B) 43 (C) 41 (D) 52 expected: A
What is 34 + 34? (A) 68 (B) 69 (C) 67 (D) 78 expected: A
always A: 1.0
always B: 0.0
always C: 0.0
always D: 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
