#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# bfcl-eval: after one wrong rollout of a multi-turn task, right ones are judged wrong, because the
# tools keep their state; and an argument that mentions a tool is rewritten.
#
# Version: bfcl-eval 2026.3.23 (the Berkeley Function-Calling Leaderboard), its multi_turn_checker
#   and execute_multi_turn_func_call with its own tasks of multi_turn_base: 163 of the 200, those in
#   which the wrong rollout here is judged wrong when it is alone.
# Guess: each call of multi_turn_checker runs the rollout and the expected calls from the task's
#   initial_config, so its verdict depends on its arguments alone. The text of an argument reaches
#   the tool as it is.
# Behaviour: the tools are kept in the module's globals under the names of model, task and class,
#   and a second rollout of the task by the same model begins where the first one stopped. The
#   checker stops at the first wrong turn, and then the two sides differ from the start. In texts, a
#   word that is a tool's name and stands before a parenthesis becomes the name of that variable,
#   which contains the model's name and so differs from the expected one; a space before any
#   parenthesis is deleted.
# Why it matters: with several rollouts of a task in one process, as for pass@k or as a reward,
#   about half of the right rollouts that follow a wrong one count as failures. Nothing in the
#   result says so, and the order of the rollouts decides.
# Source: execute_multi_turn_func_call and _process_method_calls of
#   bfcl_eval/eval_checker/multi_turn_eval/multi_turn_utils.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv mpmath==1.3.0
uv pip install -q --python venv --no-deps bfcl-eval==2026.3.23

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import collections
import json
import pathlib

import bfcl_eval
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils

DATA = pathlib.Path(bfcl_eval.__file__).parent / "data"
CATEGORY = "multi_turn_base"


def rows(path):
    return {row["id"]: row for row in map(json.loads, path.open())}


TASKS = rows(DATA / f"BFCL_v4_{CATEGORY}.json")
TRUTHS = rows(DATA / f"possible_answer/BFCL_v4_{CATEGORY}.json")


def verdict(task, truth, rollout, model):
    steps = [[turn] for turn in rollout]
    return multi_turn_checker.multi_turn_checker(steps, truth, task, CATEGORY, model)["valid"]


counts = collections.Counter()
for name, task in TASKS.items():
    truth = TRUTHS[name]["ground_truth"]
    # A wrong rollout leaves out the last call of each turn that has several.
    wrong = [turn[:-1] or turn for turn in truth]
    rollouts = wrong, truth, wrong, truth
    alone = [verdict(task, truth, rollout, f"m{i}") for i, rollout in enumerate(rollouts)]
    together = [verdict(task, truth, rollout, "m") for rollout in rollouts]
    if alone[0] is False:
        counts[f"each with its own model name {alone}, all with one {together}"] += 1
print("wrong, right, wrong, right:")
for label, count in counts.most_common():
    print(f"  {count} tasks, {label}")

texts = "Total (EUR)", "Call sort(x) first."
config = {"root": {"workspace": {"type": "directory", "contents": {}}}}
task = {
    "id": f"{CATEGORY}_900",
    "initial_config": {"GorillaFileSystem": config},
    "involved_classes": ["GorillaFileSystem"],
}
for number, text in enumerate(texts):
    task["id"] = f"{CATEGORY}_90{number}"
    calls = ["touch(file_name='a.txt')", f"echo(content={text!r}, file_name='a.txt')"]
    valid = verdict(task, [calls], [calls], "model")
    results, _ = multi_turn_utils.execute_multi_turn_func_call(
        [*calls, "cat(file_name='a.txt')"], *list(task.values())[1:], "model", task["id"]
    )
    print(f"{text!r} is written as {results[2]}; the expected calls themselves: {valid}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
wrong, right, wrong, right:
  77 tasks, each with its own model name [False, True, False, True], all with one [False, False, False, False]
  66 tasks, each with its own model name [False, True, False, True], all with one [False, True, False, True]
  20 tasks, each with its own model name [False, True, False, True], all with one [False, False, False, True]
'Total (EUR)' is written as {"file_content": "Total(EUR)"}; the expected calls themselves: True
'Call sort(x) first.' is written as {"file_content": "Call model_multi_turn_base_901_GorillaFileSystem_instance.sort(x) first."}; the expected calls themselves: False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
