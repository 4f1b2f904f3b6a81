#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# OpenEnv: of an Inspect task with two scorers it reports one, and its judge takes 2/10 for 1.0.
#
# Versions: openenv 0.10.0, its InspectAIHarness and its LLMJudge; inspect-ai 0.3.285 with a model
#   that gives one fixed reply.
# Guess: the harness reports the metrics of each scorer, by the scorer's name, and of each task. The
#   judge's option normalize, on by default, brings "2/10" to 0.2, and a score that it cannot read
#   is the default score.
# Behaviour: the harness puts all metrics into one dict by the metric's name alone. Two scorers have
#   an accuracy each, and the last one's is all that is left; of two tasks, the first one's. The
#   judge takes the first number of the reply, without its sign, and cuts it to 0 to 1. So "2/10",
#   "-1", ".2" and "On a scale of 0 to 10: 2" are 1, 1, 1 and 0, and a number in the reasoning
#   before the score counts as the score.
# Why it matters: which accuracy one sees depends on the order of the scorers, and a strict scorer
#   vanishes behind a lenient one. A judge that is asked for 1 to 10 gives every rollout the full
#   reward, which looks like a solved task.
# Source: InspectAIHarness._extract_scores and run of openenv/core/evals/inspect_harness.py;
#   LLMJudge._parse_score of openenv/core/rubrics/llm_judge.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv openenv==0.10.0 inspect-ai==0.3.285

cat >show.py <<'PYTHON'
import asyncio

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import includes, match
from openenv.core.evals.inspect_harness import InspectAIHarness
from openenv.core.rubrics.llm_judge import LLMJudge


@modelapi(name="fixed")
class Fixed(ModelAPI):
    async def generate(self, input, tools, tool_choice, config):
        return ModelOutput.from_content("fixed", "Not 4 but 5")

    async def count_tokens(self, *arguments, **options):
        return 1


strict, lenient = match(), includes()


def task(name, *scorers):
    return Task(dataset=[Sample("?", target="4")], scorer=list(scorers), name=name)


def run(*tasks):
    parameters = {"model": "fixed/model", "task": list(tasks)}
    scores = InspectAIHarness(log_dir="logs").run("", {}, "", parameters)
    return {name: score for name, score in scores.items() if name == "accuracy"}


print("strict alone:", run(task("a", strict)))
print("strict, lenient:", run(task("b", strict, lenient)))
print("lenient, strict:", run(task("c", lenient, strict)))
print("two tasks:", run(task("d", lenient), task("e", strict)))


class Client:
    async def complete(self, prompt):
        return prompt


judge = LLMJudge("{action}", Client())
for reply in ("0.2", "2/10", "-1", ".2", "On a scale of 0 to 10: 2", "Step 1 fails. Score: 0.2"):
    print(f"judge says {reply!r}:", asyncio.run(judge.forward(reply, None)))
PYTHON
seen=$(INSPECT_DISPLAY=none venv/bin/python show.py 2>errors.log) ||
  { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
strict alone: {'accuracy': 0.0}
strict, lenient: {'accuracy': 1.0}
lenient, strict: {'accuracy': 0.0}
two tasks: {'accuracy': 1.0}
judge says '0.2': 0.2
judge says '2/10': 1.0
judge says '-1': 1.0
judge says '.2': 1.0
judge says 'On a scale of 0 to 10: 2': 0.0
judge says 'Step 1 fails. Score: 0.2': 1.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
