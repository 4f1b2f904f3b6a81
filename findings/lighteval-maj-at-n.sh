#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# lighteval: its MATH tasks score 0 for right replies, because a sampling metric ignores parameters
# that it does not know.
#
# Versions: lighteval 0.13.0, torch 2.13.0.
# Guess: in the seven tasks math:algebra and so on, maj@4 compares the boxed answers, as their
#   parameters normalize_pred and normalize_gold say. avg@1, maj@1 and pass@1 of one reply are the
#   same, and a parameter with a wrong name is an error.
# Behaviour: the parameters become attributes of the metric, and maj@n reads another one, normalize.
#   So it compares the whole reply with the whole reference solution: four replies with the right
#   box score 0, and only a copy of the solution scores 1. With the right name, normalize, such
#   replies score 1. The metric's name lists the parameters as if they were used; a misspelled one
#   is listed, too. avg@n takes strip_strings, but never uses it, although its description speaks of
#   normalisation: avg@1 is 0 where pass@1 and maj@1 are 1.
# Why it matters: a MATH score near 0 looks like a weak model. With avg@n, the space that
#   lighteval's own prompts put before the reference makes the exact match fail.
# Source: MajAtN and AvgAtN in lighteval/metrics/metrics_sample.py; __call__ of Metric in
#   lighteval/metrics/utils/metric_utils.py uses setattr; lighteval/tasks/tasks/math.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  lighteval==0.13.0 torch==2.13.0 transformers==5.24.0 datasets==5.2.0 inspect-ai==0.3.285

seen=$(HF_HOME="$dir/home" HF_HUB_OFFLINE=1 venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
from lighteval.metrics.metrics import Metrics
from lighteval.metrics.normalizations import math_normalizer
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc
from lighteval.tasks.tasks import math


def score(metric, doc, *replies):
    response = ModelResponse(text=list(replies))
    return float(*metric.compute_sample(doc=doc, model_response=response).values())


solution = r"We add: $2+2=\boxed{4}$."
task = math.math_prompt({"problem": "What is 2+2?", "solution": solution})
metric = math.math_algebra.metrics[0]
names = [task.metrics[0].metric_name for task in math.TASKS_TABLE]
print("MATH tasks:", len(names), "with the same metric:", names.count(metric.metric_name))
print("math:algebra reports", metric.metric_name.split("=<")[0])
for reply in (r"2+2 is 4, so $\boxed{4}$.", r"$\boxed{4}$", "4", solution):
    print(f"  four times {reply}: {score(metric, task, *[reply] * 4)}")
fixed = Metrics.maj_at_n(sample_params={"n": 4, "normalize": math_normalizer})
reply = r"2+2 is 4, so $\boxed{4}$."
print(f"with normalize, four times {reply}: {score(fixed, task, *[reply] * 4)}")

capital = Doc(query="The capital of France?", choices=[" Paris"], gold_index=0)
strip = {"n": 1, "strip_strings": True}
for name, metric in (
    ("avg@1", Metrics.avg_at_n(sample_params=strip)),
    ("maj@1", Metrics.maj_at_n(sample_params=strip)),
    ("pass@1", Metrics.pass_at_k(sample_params=strip | {"k": 1})),
):
    print(f"{name} of Paris: {score(metric, capital, 'Paris')}")
wrong = Metrics.maj_at_n(sample_params={"n": 1, "strip_string": True})
print(f"{wrong.metric_name} of Paris: {score(wrong, capital, 'Paris')}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
MATH tasks: 7 with the same metric: 7
math:algebra reports maj@n:n=4&strip_strings=True&normalize_pred
  four times 2+2 is 4, so $\boxed{4}$.: 0.0
  four times $\boxed{4}$: 0.0
  four times 4: 0.0
  four times We add: $2+2=\boxed{4}$.: 1.0
with normalize, four times 2+2 is 4, so $\boxed{4}$.: 1.0
avg@1 of Paris: 0.0
maj@1 of Paris: 1.0
pass@1 of Paris: 1.0
maj@n:n=1&strip_string=True of Paris: 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
