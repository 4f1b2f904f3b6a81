#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# OpenBench: the scorer of multiple-choice tasks takes the first letter of a word for the answer.
#
# Versions: openbench 0.5.3, its scorer for MMLU, GPQA and other multiple-choice tasks, alone,
#   without the 600 MB that the rest of the package needs; inspect-ai 0.3.285.
# Guess: the prompt asks for a last line "Answer: $LETTER". A reply with just that last line gets
#   that letter, whatever stands above it.
# Behaviour: a high-priority pattern takes any letter after "Answer" at the start of a line, with or
#   without a colon, even a letter inside a longer word or one that is not a choice. So a line that
#   begins with "Answer choices", "Answering" or "Answers" makes the answer C, I or S, even if the
#   last line says "Answer: B". "Answer: The correct option is B" yields T. The first match in the
#   reply counts, so a corrected answer is ignored. "The answer is B." yields no answer, while
#   "Option A is tempting, but the answer is B." yields A.
# Why it matters: the same knowledge earns different scores depending on the words before the last
#   line. A model that is asked to think step by step, and so goes through the answer choices one by
#   one, loses points. Where C is the right choice, every line with "Answer choice" counts as a
#   right answer.
# Source: MCQ_PATTERNS and extract_mcq_answer of openbench/scorers/mcq.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-ai==0.3.285
uv pip install -q --python venv --no-deps openbench==0.5.3

cat >show.py <<'PYTHON'
import asyncio
import importlib.util
import sys
from types import ModuleType

# The package's own __init__ imports its command line, so it is replaced by an empty module.
for name in ("openbench", "openbench.scorers", "openbench.metrics", "openbench.utils"):
    sys.modules[name] = ModuleType(name)
    folder = importlib.util.find_spec("inspect_ai").submodule_search_locations[0]
    folder = folder.replace("inspect_ai", name.replace(".", "/"))
    sys.modules[name].__path__ = [folder]

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState
from openbench.scorers.mcq import simple_mcq_scorer

REPLIES = (
    "I know this one.\nAnswer: B",
    "Answer choices A and D are wrong.\nAnswer: B",
    "Answering this needs two facts.\nAnswer: B",
    "Answers that mention lead are out.\nAnswer: B",
    "Answer: The correct option is B",
    "Answer: A\nWait, lead is heavier.\nAnswer: B",
    "The answer is B.",
    "Option A is tempting, but the answer is B.",
)


async def main():
    score = simple_mcq_scorer()
    for reply in REPLIES:
        output = ModelOutput.from_content("model", reply)
        state = TaskState("model", 1, 1, "?", [], output=output)
        right, lucky = await score(state, Target("B")), await score(state, Target("C"))
        values = f"if B is right: {right.value}, if C is: {lucky.value}"
        print(f"{reply!r}: {right.answer}; {values}")


asyncio.run(main())
PYTHON
seen=$(venv/bin/python show.py 2>errors.log) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
'I know this one.\nAnswer: B': B; if B is right: C, if C is: I
'Answer choices A and D are wrong.\nAnswer: B': C; if B is right: I, if C is: C
'Answering this needs two facts.\nAnswer: B': I; if B is right: I, if C is: I
'Answers that mention lead are out.\nAnswer: B': S; if B is right: I, if C is: I
'Answer: The correct option is B': T; if B is right: I, if C is: I
'Answer: A\nWait, lead is heavier.\nAnswer: B': A; if B is right: I, if C is: I
'The answer is B.': None; if B is right: I, if C is: I
'Option A is tempting, but the answer is B.': A; if B is right: I, if C is: I
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
