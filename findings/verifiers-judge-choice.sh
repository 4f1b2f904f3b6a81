#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# verifiers: the article "a" in a judge's reason is the verdict A, and a "no" in it means no.
#
# Version: verifiers 0.4.0, its parse_judge_choice with the default choices A, B and C, and its
#   reference judge with yes and no, the default, and with A and B. The judge's replies are given.
# Guess: a verdict that begins the reply, such as "B. It is a different year.", is the verdict. A
#   reason may follow. The letters A, B and C are capital letters.
# Behaviour: without a line such as "Verdict: B" the last choice in the reply wins. The reply is
#   turned into capital letters before, so each "a" is an A, and "B. It is a different year." is A.
#   After "Judgment:" or "Verdict:" at the start of a line the first choice wins, so "Judgment: a
#   clear B." is A as well. A line that begins with "**Verdict:**" is not recognised. With yes and
#   no, "Yes, there is no difference." scores 0, and "No, the response does not say yes." scores 1.
#   None of these replies is an error. A last line "Final verdict: yes" decides.
# Why it matters: the prompt asks for the choice only, but models that judge often add a reason. A
#   is usually "correct", as in SimpleQA's grader, whose letters these are, so an English reason
#   marks wrong answers as correct.
# Source: parse_judge_choice of verifiers/v1/utils/score.py, ReferenceJudge of
#   verifiers/v1/judges/reference.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv verifiers==0.4.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import asyncio
import types

import verifiers.v1 as vf
from verifiers.v1.judges.reference import ReferenceJudge, ReferenceJudgeConfig


class Judge(ReferenceJudge):
    async def complete(self, messages, *, parse, **options):
        return types.SimpleNamespace(parsed=parse(vf.JudgeResponse(text=self.reply)))


async def score(reply, **options):
    judge = Judge(ReferenceJudgeConfig(**options))
    judge.reply = reply
    task = types.SimpleNamespace(prompt_text="Which year?", answer="1999")
    return await judge.score(task, types.SimpleNamespace(last_reply="In 1998."))


print("A, B or C:")
for reply in (
    "B",
    "B: the year differs.",
    "B. It is a different year.",
    "B\n\nThe response gives a wrong year.",
    "INCORRECT (B). This is a contradiction.",
    "Judgment: a clear B.",
    "**Verdict:** B, since it is not a match.",
    "Verdict: B, since it is not a match.",
):
    print(f"  {reply!r}: {vf.parse_judge_choice(reply)}")
print("Reference judge, A or B:")
for reply in ("B", "B. It is a different year."):
    print(f"  {reply!r}: {asyncio.run(score(reply, choices=('A', 'B')))}")
print("Reference judge, yes or no:")
for reply in (
    "No.",
    "No, the response does not say yes.",
    "No. To be correct it would have to say yes, 1999.",
    "Yes, there is no difference.",
    "Yes. The wording differs, but no fact does.",
    "Yes. The wording differs, but no fact does.\nFinal verdict: yes",
):
    print(f"  {reply!r}: {asyncio.run(score(reply))}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
A, B or C:
  'B': B
  'B: the year differs.': B
  'B. It is a different year.': A
  'B\n\nThe response gives a wrong year.': A
  'INCORRECT (B). This is a contradiction.': A
  'Judgment: a clear B.': A
  '**Verdict:** B, since it is not a match.': A
  'Verdict: B, since it is not a match.': B
Reference judge, A or B:
  'B': 0.0
  'B. It is a different year.': 1.0
Reference judge, yes or no:
  'No.': 0.0
  'No, the response does not say yes.': 1.0
  'No. To be correct it would have to say yes, 1999.': 1.0
  'Yes, there is no difference.': 0.0
  'Yes. The wording differs, but no fact does.': 0.0
  'Yes. The wording differs, but no fact does.\nFinal verdict: yes': 1.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
