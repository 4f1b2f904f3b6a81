#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# agentevals: in subset mode, arguments that may be fewer must be more, and in unordered mode they
# must be equal.
#
# Version: agentevals 0.0.9, its create_trajectory_match_evaluator.
# Guess: tool_args_match_mode means the same in each trajectory mode. "subset": the agent's
#   arguments may be some of the reference's. "superset": they may be more. In unordered mode only
#   the order of the calls is free in addition, so what passes in strict mode passes there.
# Behaviour: the subset mode is the superset mode with both sides exchanged, even for the arguments.
#   So "subset" accepts more arguments and refuses fewer, and "superset" the other way round. A
#   custom matcher receives the reference as the agent's arguments. The unordered mode asks for
#   both directions, so it refuses whatever is not equal, and "subset" and "superset" mean
#   "exact". A call takes the first partner that fits, so two runs that could be paired are refused
#   in superset mode.
# Why it matters: the test of an agent passes when it makes up arguments and fails when it leaves
#   out optional ones, the opposite of what was asked. In unordered mode, a rate of 0 looks like a
#   bad agent.
# Source: _scorer of agentevals/trajectory/subset.py and unordered.py, and _is_trajectory_superset
#   of trajectory/utils.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv agentevals==0.0.9 openevals==0.2.2 langchain-core==1.8.3

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json

from agentevals.trajectory.match import create_trajectory_match_evaluator

MODES = "strict", "unordered", "superset", "subset"
FEW = {"query": "cats"}
MANY = {"query": "cats", "limit": 5}


def run(*calls):
    """Returns the messages of a run that searches with the given arguments."""
    messages = [{"role": "user", "content": "Search."}]
    for arguments in calls:
        function = {"name": "search", "arguments": json.dumps(arguments)}
        calls = [{"type": "function", "id": "1", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    return messages


def show(label, outputs, reference, **options):
    scores = []
    for mode in MODES:
        evaluate = create_trajectory_match_evaluator(trajectory_match_mode=mode, **options)
        score = evaluate(outputs=outputs, reference_outputs=reference)["score"]
        scores.append(f"{mode} {score}")
    print(f"{label}:", ", ".join(scores))


for arguments in "exact", "subset", "superset":
    print("arguments:", arguments)
    show("  fewer", run(FEW), run(MANY), tool_args_match_mode=arguments)
    show("  more", run(MANY), run(FEW), tool_args_match_mode=arguments)
print("a matcher that asks for a limit from the agent")
limit = {"search": lambda agent, reference: "limit" in agent}
show("  without", run(FEW), run(MANY), tool_args_match_overrides=limit)
show("  with", run(MANY), run(FEW), tool_args_match_overrides=limit)
print("two calls, arguments: superset")
show("  same order", run(FEW, MANY), run(FEW, MANY), tool_args_match_mode="superset")
show("  other order", run(MANY, FEW), run(FEW, MANY), tool_args_match_mode="superset")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
arguments: exact
  fewer: strict False, unordered False, superset False, subset False
  more: strict False, unordered False, superset False, subset False
arguments: subset
  fewer: strict True, unordered False, superset True, subset False
  more: strict False, unordered False, superset False, subset True
arguments: superset
  fewer: strict False, unordered False, superset False, subset True
  more: strict True, unordered False, superset True, subset False
a matcher that asks for a limit from the agent
  without: strict False, unordered False, superset False, subset True
  with: strict True, unordered False, superset True, subset False
two calls, arguments: superset
  same order: strict True, unordered True, superset True, subset True
  other order: strict False, unordered False, superset False, subset True
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
