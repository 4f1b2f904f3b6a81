#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Inspect: match(numeric=True) compares five significant digits, so 1234567 is 1234568, and finds no
# number in "5%", "70kg" or "\boxed{70}".
#
# Version: inspect-ai 0.3.285, its scorer match(numeric=True), which inspect-evals uses for GSM8K.
# Guess: two numbers are equal if they are the same number, in whatever format. The number of "It
#   weighs 70kg" is 70.
# Behaviour: both numbers are written with five significant digits before they are compared, with
#   location "exact" too. So from six digits on the last ones do not count: another id, another
#   amount in dollars and cents, and 2026.123 for 2026.1. A word is a number only if nothing but
#   punctuation is around it: a unit, a per cent sign or a LaTeX box hides it, and then an earlier
#   number of the line is taken.
# Why it matters: an answer that is wrong in its last digits is right, most of all for money, ids
#   and counts, and right answers in a box are wrong. The log shows 1.2346e+06 as the answer,
#   whichever number it was.
# Source: normalize_number and match_str of inspect_ai/scorer/_common.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-ai==0.3.285

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import asyncio

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, match
from inspect_ai.solver import TaskState


def show(target, *replies, location="end"):
    found = []
    for reply in replies:
        output = ModelOutput.from_content("model", reply)
        state = TaskState("model", "1", 1, "?", [], output=output)
        score = asyncio.run(match(location=location, numeric=True)(state, Target(target)))
        found.append(f"{reply!r} {score.value} ({score.answer})")
    print(f"{target}, {location}:", ", ".join(found))


show("1234568", "The answer is 1234568.", "The answer is 1234567.", "The answer is 1234999.")
show("1234568", "1234567", location="exact")
show("$1,250,001.75", "It costs $1,250,049.25")
show("2026.123", "It is 2026.1")
show("70", "It is 70.", "It is 70 kg", "It is 70kg", "It is 70%", "It is \\boxed{70}")
show("6", "2 + 4 = 6kg", "6 apples make 70kg")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
1234568, end: 'The answer is 1234568.' C (1.2346e+06), 'The answer is 1234567.' C (1.2346e+06), 'The answer is 1234999.' I (1.235e+06)
1234568, exact: '1234567' C (1.2346e+06)
$1,250,001.75, end: 'It costs $1,250,049.25' C (1.25e+06)
2026.123, end: 'It is 2026.1' C (2026.1)
70, end: 'It is 70.' C (70), 'It is 70 kg' C (70), 'It is 70kg' I (), 'It is 70%' I (), 'It is \\boxed{70}' I ()
6, end: '2 + 4 = 6kg' I (4), '6 apples make 70kg' C (6)
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
