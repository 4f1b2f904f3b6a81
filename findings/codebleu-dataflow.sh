#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# CodeBLEU: a data flow that matches nothing counts as full, so an empty reply beats a right one.
#
# Versions: codebleu 0.7.0, tree-sitter 0.22.3, tree-sitter-python 0.21.0.
# Guess: CodeBLEU is the weighted sum of its four parts. An empty reply scores 0. A reply with some
#   of the reference's data flow scores more than the same reply with none.
# Behaviour: a data flow score of 0 is replaced with 1 in the sum, while the result still shows it
#   as 0. So an empty reply, or a refusal, scores 0.25. A right program in another style, with 36 %
#   of the data flow, scores 0.18. A function that only returns 0 scores 0.29, more than one that
#   has the right first line as well. With all the weight on the data flow, the empty reply scores
#   1.0, as much as the reference itself. The scores here are those of single replies.
# Why it matters: as a reward for each reply, it pays for replies that have nothing in common with
#   the reference. A model that refuses can look better than one that writes right code.
# Source: "theta * (dataflow_match_score or 1)" in codebleu/codebleu.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv codebleu==0.7.0 tree-sitter==0.22.3 tree-sitter-python==0.21.0 \
  setuptools==80.9.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
from codebleu import calc_codebleu

REFERENCE = """def total(prices, rate):
    result = 0
    for price in prices:
        result = result + price * rate
    return result
"""
REPLIES = {
    "the reference": REFERENCE,
    "sum(...), also right": "def total(prices, rate):\n"
    "    return sum(price * rate for price in prices)\n",
    "first line, then return": "def total(prices, rate):\n    result = 0\n    return result\n",
    "return 0": "def total(prices, rate):\n    return 0\n",
    "a refusal": "I cannot solve this.",
    "an empty reply": "",
}
for title, reply in REPLIES.items():
    parts = calc_codebleu([REFERENCE], [reply], "python")
    total = parts.pop("codebleu")
    print(f"{title}: {total:.3f}; mean of the four parts {sum(parts.values()) / 4:.3f},", end="")
    print(f" data flow {parts['dataflow_match_score']:.3f}")
for title in ("the reference", "first line, then return", "a refusal", "an empty reply"):
    only = calc_codebleu([REFERENCE], [REPLIES[title]], "python", weights=(0, 0, 0, 1))
    print(f"only data flow, {title}: {only['codebleu']:.3f}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
the reference: 1.000; mean of the four parts 1.000, data flow 1.000
sum(...), also right: 0.179; mean of the four parts 0.179, data flow 0.364
first line, then return: 0.242; mean of the four parts 0.242, data flow 0.182
return 0: 0.289; mean of the four parts 0.039, data flow 0.000
a refusal: 0.250; mean of the four parts 0.000, data flow 0.000
an empty reply: 0.250; mean of the four parts 0.000, data flow 0.000
only data flow, the reference: 1.000
only data flow, first line, then return: 0.182
only data flow, a refusal: 1.000
only data flow, an empty reply: 1.000
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
