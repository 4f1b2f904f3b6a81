#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# lighteval: avg@n scores the thought with the reply, where pass@k and maj@n score the reply alone.
#
# Versions: lighteval 0.13.0, torch 2.13.0. The metrics get what lighteval's pipeline passes: the
#   replies, and the same replies after the removal of the thoughts, which is on by default.
# Guess: avg@1, pass@1 and maj@1 of one reply are the same number, and all read the text without
#   the thought.
# Behaviour: avg@n takes each reply out of the response with response[i], and this copy has lost the
#   text without the thought. So the thought is scored. With an exact match each reply with a
#   thought scores 0. In the metrics for mathematics a box in the thought counts if the reply has
#   none: a reply that answers 42 scores 0 after a thought with \boxed{41}, and a reply without an
#   answer scores 1 after a thought with \boxed{42}. pass@1 is right in all these cases.
# Why it matters: avg@n is the usual number for AIME with several samples. lighteval's AIME tasks
#   report avg@1 beside pass@1 of the same reply, or avg@64 alone. Its value for a reasoning model
#   is then partly a score of the thoughts.
# Source: AvgAtN.compute of lighteval/metrics/metrics_sample.py, ModelResponse.__getitem__ of
#   lighteval/models/model_output.py; _post_process_outputs of lighteval/pipeline.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  lighteval==0.13.0 torch==2.13.0 transformers==5.24.0 datasets==5.2.0 inspect-ai==0.3.285

seen=$(HF_HOME="$dir/home" HF_HUB_OFFLINE=1 venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc
from lighteval.utils.utils import remove_reasoning_tags

doc = Doc(query="What is 6 times 7?", choices=["42"], gold_index=0)


def show(text, **metrics):
    without = remove_reasoning_tags(text, [("<think>", "</think>")])
    response = ModelResponse(text=[text], text_post_processed=[without])
    print(repr(text))
    for name, metric in metrics.items():
        options = {"n": 1} | ({"k": 1} if name.startswith("pass") else {})
        scores = metric(sample_params=options).compute_sample(doc=doc, model_response=response)
        print(f"  {name}: {float(*scores.values()):g}")


exact = {"avg_at_n": Metrics.avg_at_n, "maj_at_n": Metrics.maj_at_n, "pass_at_k": Metrics.pass_at_k}
show("42", **exact)
show("<think>6 times 7 is 42.</think>42", **exact)
math = {"avg_at_n_math": Metrics.avg_at_n_math, "pass_at_k_math": Metrics.pass_at_k_math}
show("<think>So \\boxed{41}. No, 42.</think>The answer is 42.", **math)
show("<think>So \\boxed{42}.</think>See above.", **math)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
'42'
  avg_at_n: 1
  maj_at_n: 1
  pass_at_k: 1
'<think>6 times 7 is 42.</think>42'
  avg_at_n: 0
  maj_at_n: 1
  pass_at_k: 1
'<think>So \\boxed{41}. No, 42.</think>The answer is 42.'
  avg_at_n_math: 0
  pass_at_k_math: 1
'<think>So \\boxed{42}.</think>See above.'
  avg_at_n_math: 1
  pass_at_k_math: 0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
