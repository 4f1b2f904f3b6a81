#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Inspect Evals, AssistantBench: two answers with the same first number are equal, so "12 Monkeys"
# is right for "12 Angry Men"; -1 is a better answer to 100 than 10 is.
#
# Versions: inspect-evals 0.26.0, its scorer for AssistantBench, with inspect-ai 0.3.285.
# Guess: "strings: use F1 between the predicted and gold answer words", as the scorer's docstring
#   says, so a wrong title or a wrong date scores less than 1. A number scores less, the further it
#   is from the right one, and 0 if it is ten times too small. A reply may have any layout that
#   json.loads reads, since the prompts ask for nothing more.
# Behaviour: every text that has a digit is a number, and the number is the first one in it. Titles,
#   addresses and dates whose first numbers are equal score 1.0, also in JSON: all dates 2024-.. are
#   equal, and so are all times of an hour. "3.5 million" is 3.5. If one of the numbers is negative,
#   the difference of their sizes is added to both, so -1 scores 0.69 for 100, and 1 and 10 score 0.
#   The answer ends at the first line break, so a JSON object over several lines scores 0.
# Why it matters: wrong answers are counted as right, and for a date a long search is worth no more
#   than a guess of the year. A model that writes -1 for "unknown" gets points. A right answer over
#   several lines, or "3500000" for "3.5 million", is counted as wrong.
# Source: extract_number, parse_and_classify, calculate_number_score and extract_answer of
#   inspect_evals/assistant_bench/scoring.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-ai==0.3.285
uv pip install -q --python venv --no-deps inspect-evals==0.26.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import pathlib
import runpy
import sys
import sysconfig
import types

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState

# The packages themselves import datasets.
solver = types.ModuleType("inspect_evals.assistant_bench.solver")
solver.SEARCH_LIMIT_REACHED_KEY = "search_limit_reached"
for name in "inspect_evals", "inspect_evals.assistant_bench":
    sys.modules[name] = types.ModuleType(name)
sys.modules[solver.__name__] = solver
site = pathlib.Path(sysconfig.get_paths()["purelib"])
scoring = runpy.run_path(str(site / "inspect_evals/assistant_bench/scoring.py"))
scorer = scoring["assistant_bench_scorer"]()


def score(answer, target):
    state = TaskState("mockllm/model", "1", 1, "Which one?", [], target=Target(target))
    reply = f"Intermediate answer: I know it.\nThe final answer is: {answer}"
    state.output = ModelOutput.from_content("mockllm/model", reply)
    return asyncio.run(scorer(state, Target(target))).value["score"]


for label, target, answers in (
    ("titles", "12 Angry Men", ("12 Monkeys", "Twelve Angry Men")),
    ("addresses", "300 Main Street", ("300 Oak Avenue", "the one in Main Street")),
    ("dates", "2024-12-31", ("2024-01-05", "31 December 2024")),
    ("dates in JSON", '{"from": "2024-12-31"}', ('{"from": "2024-01-05"}',)),
    ("times", "10:45 AM", ("10:05 PM", "a quarter to eleven")),
    ("large numbers", "3.5 million", ("3.5", "3500000")),
    ("negative numbers", "100", ("101", "10", "1", "-1")),
    ("a JSON object", '{"name": "Ann"}', ('{"name": "Ann"}', '{\n  "name": "Ann"\n}')),
):
    print(f"{label}, right is {target}")
    for answer in answers:
        print(f"  {answer!r}: {score(answer, target):.2f}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
titles, right is 12 Angry Men
  '12 Monkeys': 1.00
  'Twelve Angry Men': 0.00
addresses, right is 300 Main Street
  '300 Oak Avenue': 1.00
  'the one in Main Street': 0.00
dates, right is 2024-12-31
  '2024-01-05': 1.00
  '31 December 2024': 0.00
dates in JSON, right is {"from": "2024-12-31"}
  '{"from": "2024-01-05"}': 1.00
times, right is 10:45 AM
  '10:05 PM': 1.00
  'a quarter to eleven': 0.00
large numbers, right is 3.5 million
  '3.5': 1.00
  '3500000': 0.00
negative numbers, right is 100
  '101': 1.00
  '10': 0.00
  '1': 0.00
  '-1': 0.69
a JSON object, right is {"name": "Ann"}
  '{"name": "Ann"}': 1.00
  '{\n  "name": "Ann"\n}': 0.00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
