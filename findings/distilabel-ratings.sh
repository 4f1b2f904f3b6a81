#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# distilabel: an empty line in a judge's reply gives a score to another response, and equal ratings
# become a DPO pair of one response with itself.
#
# Versions: distilabel 1.5.3, its QualityScorer, ComplexityScorer, UltraFeedback and
#   FormatTextGenerationDPO.
# Guess: "[2] Score: 3" is the score of response 2, wherever the line is. An empty line, a heading
#   or a rationale of two paragraphs changes nothing, and there is one score for each response. If
#   all ratings are equal, there is no chosen and no rejected response, so the row is left out, or
#   two different responses are taken.
# Behaviour: the scorers read the first lines of the reply, one for each response, and ignore the
#   numbers in brackets. With empty lines between the scores, response 2 has no score, response 3
#   has that of response 2, and its own is lost. With a heading, each response has the score of the
#   one before. If the judge lists 3, 2, 1, responses 1 and 3 exchange their scores. UltraFeedback
#   splits the reply at empty lines and makes a rating of each part, so a second paragraph is a
#   rating of None, and there are more ratings than responses. FormatTextGenerationDPO takes the
#   first highest and the first lowest rating; if all are equal, both are the same response.
# Why it matters: the judge is right, but the data says that another response is the best one.
#   Ratings from 1 to 5 are often equal. A pair of equal texts has no gradient in DPO: the row costs
#   a place in the batch.
# Source: format_output of distilabel/steps/tasks/quality_scorer.py, complexity_scorer.py and
#   ultrafeedback.py; process of steps/formatting/dpo.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv distilabel==1.5.3 requests==2.34.2

seen=$(HF_HUB_OFFLINE=1 venv/bin/python - 2>errors.log <<'PYTHON'
from distilabel.models.llms.base import LLM
from distilabel.steps import FormatTextGenerationDPO
from distilabel.steps.tasks import ComplexityScorer, QualityScorer, UltraFeedback


class Judge(LLM):
    """Is never asked: the replies are given below."""

    @property
    def model_name(self):
        return "judge"

    def generate(self, inputs, num_generations=1, **kwargs):
        raise NotImplementedError


LINES = ["[1] Score: 1", "[2] Score: 3", "[3] Score: 2"]
REPLIES = {
    "plain": "\n".join(LINES),
    "empty lines": "\n\n".join(LINES),
    "heading": "\n".join(["Scores:", *LINES]),
    "other order": "\n".join(reversed(LINES)),
}
for kind, column in ((QualityScorer, "responses"), (ComplexityScorer, "instructions")):
    print(kind.__name__)
    task = kind(llm=Judge())
    task.load()
    for label, reply in REPLIES.items():
        print(f"  {label}:", task.format_output(reply, {column: ["a", "b", "c"]})["scores"])

first = "#### Output for Text 1\nRating: 2\nRationale: It is wrong."
second = "#### Output for Text 2\nRating: 5\nRationale: It is right."
print("UltraFeedback, two responses")
task = UltraFeedback(llm=Judge(), aspect="instruction-following")
task.load()
for label, reply in (
    ("plain", f"{first}\n\n{second}"),
    ("two paragraphs", f"{first}\n\nIt is long, too.\n\n{second}"),
):
    print(f"  {label}:", task.format_output(reply, {"generations": ["a", "b"]})["ratings"])

print("FormatTextGenerationDPO")
for ratings in ([2, 5], [4, 4]):
    row = {"instruction": "?", "generations": ["a", "b"], "ratings": ratings}
    (row,) = next(FormatTextGenerationDPO().process([row]))
    chosen, rejected = row["chosen"][-1]["content"], row["rejected"][-1]["content"]
    print(f"  ratings {ratings}: chosen {chosen}, rejected {rejected}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
QualityScorer
  plain: [1.0, 3.0, 2.0]
  empty lines: [1.0, None, 3.0]
  heading: [None, 1.0, 3.0]
  other order: [2.0, 3.0, 1.0]
ComplexityScorer
  plain: [1.0, 3.0, 2.0]
  empty lines: [1.0, None, 3.0]
  heading: [None, 1.0, 3.0]
  other order: [2.0, 3.0, 1.0]
UltraFeedback, two responses
  plain: [2, 5]
  two paragraphs: [2, None, 5]
FormatTextGenerationDPO
  ratings [2, 5]: chosen b, rejected a
  ratings [4, 4]: chosen a, rejected a
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
