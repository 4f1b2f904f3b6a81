#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Inspect and NeMo Evaluator: the right letter in "**Answer:** B" is wrong for all six scorers, and
# "Answer: (B)" for five of them.
#
# Versions: inspect-ai 0.3.285, its scorers answer("letter"), ("word") and ("line"); nemo-evaluator
#   0.3.0, its multichoice_regex (used for MMLU and GPQA), mcq_extract and answer_line.
# Guess: a scorer that looks for "Answer: B" also finds it with Markdown around it, since all chat
#   models write Markdown.
# Behaviour: only "Answer: B" and "ANSWER: B" are right for all. "**Answer:** B" is wrong for all
#   six, since the stars stand between colon and letter. With the stars around the whole line,
#   "letter", multichoice_regex and mcq_extract find it, and the others read "B**". A letter in
#   bold, in parentheses or in a box is found by one scorer or none.
# Why it matters: a model's rank on MMLU or GPQA depends on its taste for bold, and a system prompt
#   that changes the format changes the accuracy. A wrong format is not reported as such: the answer
#   is only incorrect.
# Source: AnswerPattern of inspect_ai/scorer/_answer.py; nemo_evaluator/scoring/pattern.py and
#   text.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-ai==0.3.285
uv pip install -q --python venv --no-deps nemo-evaluator==0.3.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import asyncio
import pathlib
import sys
import types

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, answer
from inspect_ai.solver import TaskState

# The package itself imports all of its environments.
(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/nemo_evaluator")
package = sys.modules["nemo_evaluator"] = types.ModuleType("nemo_evaluator")
package.__path__ = [str(root)]

from nemo_evaluator.scoring import ScorerInput, get_scorer

INSPECT = "letter", "word", "line"
NEMO = "multichoice_regex", "mcq_extract", "answer_line"
for reply in (
    "Answer: B",
    "ANSWER: B",
    "**Answer: B**",
    "**Answer:** B",
    "Answer: **B**",
    "Answer: (B)",
    "Answer: \\boxed{B}",
    "Answer: B. Rome",
    "The answer is B.",
):
    output = ModelOutput.from_content("model", reply)
    state = TaskState("model", "1", 1, "?", [], output=output)
    right = [
        f'answer("{name}")'
        for name in INSPECT
        if asyncio.run(answer(name)(state, Target("B"))).value == "C"
    ]
    sample = ScorerInput(response=reply, target="B")
    right += [name for name in NEMO if get_scorer(name)(sample)["correct"]]
    print(f"{reply}: right for", ", ".join(right) or "none")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
Answer: B: right for answer("letter"), answer("word"), answer("line"), multichoice_regex, mcq_extract, answer_line
ANSWER: B: right for answer("letter"), answer("word"), answer("line"), multichoice_regex, mcq_extract, answer_line
**Answer: B**: right for answer("letter"), multichoice_regex, mcq_extract
**Answer:** B: right for none
Answer: **B**: right for none
Answer: (B): right for mcq_extract
Answer: \boxed{B}: right for mcq_extract
Answer: B. Rome: right for answer("letter"), multichoice_regex, mcq_extract
The answer is B.: right for none
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
