#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# judges: three votes "good" and three votes "bad" are both the verdict 3, and the first judge
# decides a tie.
#
# Versions: judges 0.1.1, its Jury and Judgment; instructor 1.17.0, pydantic 2.14.4. The judges'
#   replies are given here, without a model.
# Guess: of "terrible, bad, average, good, excellent", the scale of the documentation, a jury makes
#   numbers from 1 to 5. In a majority vote without a single winner the mean counts, as a comment
#   in the code says. So the order of the judges does not matter.
# Behaviour: when a judgment is made, "good" becomes True and "bad" becomes False, because its type
#   is not known yet. For the likert scale these two are unknown words, which count as "average".
#   So "good" and "bad" are both 3. So is "poor" from the package's own MagpieQueryQuality, and so
#   is each class of its ORBenchRefusalDetection. Three votes "terrible" are True, because the
#   verdict is a boolean or an integer and 1.0 becomes a boolean. A tie never has a mean:
#   statistics.mode has raised no error for ties since Python 3.8, and returns the first value.
# Why it matters: a jury cannot tell good replies from bad ones, and its 3 looks like a careful
#   verdict. With two judges, the majority is the opinion of the first.
# Source: convert_string_to_boolean of judges/base.py, where info.data has no score_type yet;
#   _normalize_score and majority_voting of judges/voting_methods.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv judges==0.1.1 instructor==1.17.0 pydantic==2.14.4

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
from judges import Jury
from judges.base import BaseJudge, Judgment
from judges.graders.query_quality import MagpieQueryQuality
from judges.graders.refusal_detection import ORBenchRefusalDetection


class Fixed(BaseJudge):
    """A judge that says the same each time."""

    def __init__(self, score, kind):
        self.score, self.kind = score, kind

    def judge(self, input, output=None, expected=None):
        return Judgment(reasoning="", score=self.score, score_type=self.kind)


def vote(method, kind, *scores):
    verdict = Jury([Fixed(score, kind) for score in scores], method).vote("Why?", "Because.")
    print(f"  {', '.join(map(str, scores))}: {verdict.score}")


print("likert, average")
for word in "terrible", "bad", "average", "good", "excellent":
    vote("average", "likert", *[word] * 3)
print("likert, majority")
vote("majority", "likert", "terrible", "good", "good")
vote("majority", "likert", "excellent", "bad", "bad")
print("ties, majority")
for scores in ((1, 5), (5, 1)):
    vote("majority", "numerical", *scores)
for scores in ((True, False), (False, True)):
    vote("majority", "boolean", *scores)

for grader, words in (
    (MagpieQueryQuality, ("very poor", "poor", "average", "good", "excellent")),
    (ORBenchRefusalDetection, ("direct_answer", "direct_refusal", "indirect_refusal")),
):
    print(grader.__name__)
    for word in words:
        judge = grader(model="none")
        judge._judge = lambda **prompts: ("", word)
        verdict = Jury([judge] * 3).vote(input="Why?", output="Because.")
        print(f"  {word}: {verdict.score}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
likert, average
  terrible, terrible, terrible: True
  bad, bad, bad: 3
  average, average, average: 3
  good, good, good: 3
  excellent, excellent, excellent: 5
likert, majority
  terrible, good, good: 3
  excellent, bad, bad: 3
ties, majority
  1, 5: 1
  5, 1: 5
  True, False: True
  False, True: False
MagpieQueryQuality
  very poor: 3
  poor: 3
  average: 3
  good: 3
  excellent: 5
ORBenchRefusalDetection
  direct_answer: 3
  direct_refusal: 3
  indirect_refusal: 3
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
