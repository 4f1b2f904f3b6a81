#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Google ADK: in a conversation of several turns, the rubrics of all turns but the last are dropped,
# so a failed rubric of the first turn gives 1.0; a rubric without a type is not asked at all.
#
# Version: google-adk 2.13.0, its RubricBasedFinalResponseQualityV1Evaluator with a judge that
#   answers from a table, in the format that the prompt asks for.
# Guess: Invocation.rubrics are "applicable to only this invocation": the judge's verdict on each is
#   in the score of its turn, and the score of the conversation is the mean of them all. The type of
#   a rubric is optional.
# Behaviour: the judge is asked about the rubrics of each turn, but all prompts are written before
#   the first judge is called, and writing one sets the evaluator's only list of rubrics. So each
#   verdict is looked up in the last turn's list, and is dropped if it is not there: the turn's
#   score is None or without that rubric, and the mean is of the rest. A warning is logged. With the
#   turns in another order, the score is another. A rubric whose type is not
#   "FINAL_RESPONSE_QUALITY" is left out, also if it has none, without a warning if there are
#   others.
# Why it matters: the judge's calls are paid for and thrown away, and a test of an agent passes
#   although its first turn failed. The other evaluators with rubrics (tool use, trajectory) have
#   the same two methods.
# Source: evaluate_invocations of google/adk/evaluation/llm_as_judge.py,
#   create_effective_rubrics_list and convert_auto_rater_response_to_score of
#   rubric_based_evaluator.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv google-adk==2.13.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import asyncio

from google.adk.evaluation import eval_metrics
from google.adk.evaluation.eval_case import Invocation
from google.adk.evaluation.eval_rubrics import Rubric, RubricContent
from google.adk.evaluation.rubric_based_final_response_quality_v1 import (
    RubricBasedFinalResponseQualityV1Evaluator,
)
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types

VERDICTS = {"It names the city.": "no", "It is polite.": "yes", "It is short.": "yes"}
TYPE = "FINAL_RESPONSE_QUALITY"
calls = []


def content(text):
    return types.Content(role="model", parts=[types.Part(text=text)])


class Judge(BaseLlm):
    @classmethod
    def supported_models(cls):
        return ["table"]

    async def generate_content_async(self, request, stream=False):
        prompt = request.contents[0].parts[0].text
        asked = [name for name in VERDICTS if f"] {name}" in prompt]
        calls.extend(asked)
        form = "Property: {}\nRationale: I read it.\nVerdict: {}"
        reply = "\n\n".join(form.format(name, VERDICTS[name]) for name in asked)
        yield LlmResponse(content=content(reply))


LLMRegistry.register(Judge)


def rubric(text, type=TYPE):
    return Rubric(rubric_id=text, type=type, rubric_content=RubricContent(text_property=text))


def show(label, *turns, common=()):
    """Prints the scores of a conversation whose turns have the given rubrics."""
    criterion = eval_metrics.RubricsBasedCriterion(
        threshold=0.5,
        rubrics=[rubric(text) for text in common],
        judge_model_options=eval_metrics.JudgeModelOptions(judge_model="table", num_samples=1),
    )
    metric = eval_metrics.EvalMetric(metric_name="quality", threshold=0.5, criterion=criterion)
    invocations = [
        Invocation(user_content=content("?"), final_response=content("!"), rubrics=rubrics)
        for rubrics in turns
    ]
    calls.clear()
    evaluator = RubricBasedFinalResponseQualityV1Evaluator(metric)
    result = asyncio.run(evaluator.evaluate_invocations(invocations))
    scores = [turn.score for turn in result.per_invocation_results]
    print(f"{label}: score {result.overall_score}, of the turns {scores}, asked {calls}")


city, polite = rubric("It names the city."), rubric("It is polite.")
show("city alone", [city])
show("polite alone", [polite])
show("city, then polite", [city], [polite])
show("polite, then city", [polite], [city])
show("city, then nothing, short in both", [city], [], common=["It is short."])
show("city without a type, short", [rubric("It names the city.", None)], common=["It is short."])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
city alone: score 0.0, of the turns [0.0], asked ['It names the city.']
polite alone: score 1.0, of the turns [1.0], asked ['It is polite.']
city, then polite: score 1.0, of the turns [None, 1.0], asked ['It names the city.', 'It is polite.']
polite, then city: score 0.0, of the turns [None, 0.0], asked ['It is polite.', 'It names the city.']
city, then nothing, short in both: score 1.0, of the turns [1.0, 1.0], asked ['It names the city.', 'It is short.', 'It is short.']
city without a type, short: score 1.0, of the turns [1.0], asked ['It is short.']
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
