#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# pydantic-evals, Braintrust and Weave: a case that crashes is no case, so the mean rises. In Weave
# it depends on whether the scorer returns True or 1.0.
#
# Versions: pydantic-evals 2.62.0, braintrust 0.48.1 with no_send_logs, weave 0.54.0 without
#   tracing.
# Guess: of four cases, two are right, one is wrong, and one raises an error. The mean is 0.5, or
#   there is none. An agent that only ever crashes has the mean 0.
# Behaviour: pydantic-evals and Braintrust leave the crashed case out: 0.67. So does Weave if the
#   scorer returns a number. If it returns a boolean, Weave's true_fraction counts the case as
#   wrong: 0.5. If three of four cases crash and the fourth is right, the mean is 1.00, or 0.25 with
#   Weave's booleans. If all crash, there is none.
# Why it matters: the worse of two agents wins if its failures are errors, such as timeouts or full
#   context windows, and a gate on the mean passes. The errors are listed elsewhere, but no number
#   shows over how many cases the mean was taken. In Weave, two scorers with the same meaning have
#   different means in one table.
# Source: ReportCaseAggregate.average of pydantic_evals, build_local_summary of
#   braintrust/framework.py, auto_summarize of weave. Weave's pull request 7758 mended the booleans.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv pydantic-evals==2.62.0 braintrust==0.48.1 weave==0.54.0

seen=$(WEAVE_DISABLED=true HOME=$dir venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import contextlib
import io
import logging

import braintrust
import weave
from pydantic_evals import Case, Dataset
from pydantic_evals.evaluators import Evaluator

logging.disable()
REPLIES = {"right": "yes", "wrong": "no"}  # Another word is a crash.


class Number(Evaluator):
    def evaluate(self, context):
        return 1.0 if context.output == "yes" else 0.0


class Boolean(Evaluator):
    def evaluate(self, context):
        return context.output == "yes"


@weave.op
def number(output):
    return 1.0 if output == "yes" else 0.0


@weave.op
def boolean(output):
    return output == "yes"


@weave.op
def agent(word):
    return REPLIES[word]


def means(words):
    """Yields a name, the mean of the numbers, and the one of the booleans if there is another."""
    cases = [Case(name=str(i), inputs=word) for i, word in enumerate(words)]
    dataset = Dataset(name="test", cases=cases, evaluators=[Number(), Boolean()])
    averages = dataset.evaluate_sync(lambda word: REPLIES[word], progress=False).averages()
    yield "pydantic-evals", averages and averages.scores["Number"], averages and averages.assertions

    result = braintrust.Eval(
        "test",
        data=[{"input": word} for word in words],
        task=lambda word: REPLIES[word],
        scores=[lambda input, output: number(output)],
        no_send_logs=True,
    )
    yield "Braintrust", next((score.score for score in result.summary.scores.values()), None)

    rows = [{"word": word} for word in words]
    summary = asyncio.run(weave.Evaluation(dataset=rows, scorers=[number, boolean]).evaluate(agent))
    number_summary, boolean_summary = summary.get("number") or {}, summary.get("boolean") or {}
    yield "Weave", number_summary.get("mean"), boolean_summary.get("true_fraction")


print("means of a scorer with numbers, and of one with booleans")
for words in (
    ["right", "right", "wrong", "wrong"],
    ["right", "right", "wrong", "crash"],
    ["right", "crash", "crash", "crash"],
    ["crash", "crash", "crash", "crash"],
):
    with contextlib.redirect_stdout(io.StringIO()):
        found = list(means(words))
    shown = [
        " ".join([name, *("none" if mean is None else f"{mean:.2f}" for mean in values)])
        for name, *values in found
    ]
    print(" ".join(words) + ":", ", ".join(shown))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
means of a scorer with numbers, and of one with booleans
right right wrong wrong: pydantic-evals 0.50 0.50, Braintrust 0.50, Weave 0.50 0.50
right right wrong crash: pydantic-evals 0.67 0.67, Braintrust 0.67, Weave 0.67 0.50
right crash crash crash: pydantic-evals 1.00 1.00, Braintrust 1.00, Weave 1.00 0.25
crash crash crash crash: pydantic-evals none none, Braintrust none, Weave none none
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
