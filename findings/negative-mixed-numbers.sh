#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# mathruler, verl and tinker-cookbook: for the answer -2 1/2, the reply -1.5 is right and -2.5 is
# wrong; for "minute", "second" is right, and so is an empty box.
#
# Versions: mathruler 0.1.0; verl 0.9.1, its reward prime_math; tinker-cookbook 0.6.1, the grader of
#   its recipe math_rl. All three derive from the grader of PRM800K. sympy 1.14.0, pylatexenc
#   2.10.
# Guess: a mixed number is the number that one reads: 2 1/2 is 2.5, and -2 1/2 is -2.5. Units are
#   removed behind a number only, so two different words are two different answers.
# Behaviour: "2 1/2" becomes 2+1/2, and "-2 1/2" becomes -2+1/2, which is -1.5. The names of
#   common units are deleted wherever they are, so "minute" and "second" are both the empty text.
# Why it matters: the three are used as rewards. If the answer is a negative mixed number, a right
#   reply in another form gets 0, and the wrong -1.5 gets 1. If the question asks for a unit, most
#   units get 1, and so does an empty box.
# Source: _inject_implicit_mixed_number and _normalize of mathruler/grader.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv sympy==1.14.0 pylatexenc==2.10 tqdm==4.70.1
uv pip install -q --python venv --no-deps mathruler==0.1.0 verl==0.9.1 tinker-cookbook==0.6.1

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib
import pathlib
import sys
import sysconfig
import types
from unittest.mock import MagicMock

from mathruler.grader import grade_answer as mathruler

# The packages themselves import torch and others.
site = pathlib.Path(sysconfig.get_paths()["purelib"])
for name in (
    "verl",
    "verl.utils",
    "verl.utils.reward_score",
    "tinker_cookbook",
    "tinker_cookbook.recipes",
    "tinker_cookbook.recipes.math_rl",
):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(site / name.replace(".", "/"))]
sys.modules["verl.utils.py_functional"] = MagicMock(timeout_limit=lambda **_: lambda call: call)
prime = importlib.import_module("verl.utils.reward_score.prime_math")
tinker = importlib.import_module("tinker_cookbook.recipes.math_rl.math_grading")


def verl(reply, answer):
    return bool(prime.compute_score(f"So it is \\boxed{{{reply}}}", answer)[0])


for answer, replies in (
    (r"2\frac{1}{2}", ("2.5", r"\frac{5}{2}")),
    (r"-2\frac{1}{2}", (r"-2\frac{1}{2}", "-2.5", r"-\frac{5}{2}", "-1.5", r"-\frac{3}{2}")),
    ("-1.5", ("-2 1/2",)),
    ("minute", ("century", "second", "")),
):
    print(f"right is {answer}")
    for reply in replies:
        marks = mathruler(reply, answer), verl(reply, answer), tinker.grade_answer(reply, answer)
        print(f"  {reply!r}: mathruler {marks[0]}, verl {marks[1]}, tinker-cookbook {marks[2]}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
right is 2\frac{1}{2}
  '2.5': mathruler True, verl True, tinker-cookbook True
  '\\frac{5}{2}': mathruler True, verl True, tinker-cookbook True
right is -2\frac{1}{2}
  '-2\\frac{1}{2}': mathruler True, verl True, tinker-cookbook True
  '-2.5': mathruler False, verl False, tinker-cookbook False
  '-\\frac{5}{2}': mathruler False, verl False, tinker-cookbook False
  '-1.5': mathruler True, verl True, tinker-cookbook True
  '-\\frac{3}{2}': mathruler True, verl True, tinker-cookbook True
right is -1.5
  '-2 1/2': mathruler True, verl True, tinker-cookbook True
right is minute
  'century': mathruler False, verl False, tinker-cookbook False
  'second': mathruler True, verl True, tinker-cookbook True
  '': mathruler True, verl True, tinker-cookbook True
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
