#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# LM-Polygraph: an uncertainty that is the same for all replies gets a PRR from 1 to -1, depending
# on the order of the rows and on the processor.
#
# Versions: lm-polygraph 0.7.0, its prediction-rejection ratio with the normalisation that its
#   manager applies; numpy 2.5.5 on x86-64, with its code for AVX2 and with its code for older
#   processors.
# Guess: a score that says nothing has a normalised PRR of about 0, as random scores have by
#   definition. Neither the order of the rows nor the machine matters. If all replies are right,
#   there is nothing to separate, and the result is nan or 0.
# Behaviour: rows are rejected in the order of numpy.argsort, which is arbitrary for equal values.
#   With AVX2 a constant has 1.0, the perfect score, if the right replies are first in the dataset,
#   and -0.99 if they are last; without AVX2 it has -0.84 and 0.83. A score with two values, such
#   as the number of meanings among the samples, has from -0.31 to 0.89. If all replies are right,
#   or all wrong, the "normalised" value is 0.5 for any uncertainty, since the value before the
#   normalisation is returned.
# Why it matters: counts, verbalised confidences and yes-or-no scores have many ties, and a dataset
#   may be sorted by subject or difficulty. The rank of such a score among continuous ones then
#   depends on the file and on the machine. A subject without errors adds 0.5 to a mean over
#   subjects, for good and bad scores alike.
# Source: PredictionRejectionArea of lm_polygraph/ue_metrics/pred_rej_area.py, normalize_metric and
#   get_random_scores of ue_metrics/ue_metric.py, UEManager.eval_ue of utils/manager.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv numpy==2.5.5
uv pip install -q --python venv --no-deps lm-polygraph==0.7.0

cat >prr.py <<'PYTHON'
import pathlib
import sys
import types

import numpy

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/lm_polygraph")
for name in "lm_polygraph", "lm_polygraph.ue_metrics":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]

from lm_polygraph.ue_metrics.pred_rej_area import PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import get_random_scores, normalize_metric


def prr(uncertainty, quality):
    metric, quality = PredictionRejectionArea(), numpy.array(quality)
    best, random = metric(-quality, quality), get_random_scores(metric, quality)
    return normalize_metric(metric(numpy.array(uncertainty), quality), best, random)


# 50 right and 50 wrong replies. 40 of the right ones have one meaning, and 20 of the wrong ones.
right = [(1.0, 1)] * 40 + [(1.0, 2)] * 10
wrong = [(0.0, 1)] * 20 + [(0.0, 2)] * 30
mixed = [(right + wrong)[i] for i in numpy.random.default_rng(0).permutation(100)]
orders = {"right ones first": right + wrong, "wrong ones first": wrong + right, "shuffled": mixed}
for name, rows in orders.items():
    quality = [quality for quality, _ in rows]
    print(f"  {name}: constant uncertainty {prr([1.0] * 100, quality):.2f}", end="")
    print(f", number of meanings {prr([count for _, count in rows], quality):.2f}")
for name, quality in (("right", 1.0), ("wrong", 0.0)):
    values = [prr(uncertainty, [quality] * 100) for uncertainty in (range(100), [1.0] * 100)]
    print(f"  all replies {name}: {values[0]:.2f} and {values[1]:.2f}")
PYTHON
seen=$(
  echo "with numpy's code for AVX2:"
  NPY_DISABLE_CPU_FEATURES="X86_V4" venv/bin/python -W ignore prr.py 2>errors.log
  echo "with numpy's code for older processors:"
  NPY_DISABLE_CPU_FEATURES="X86_V4 X86_V3" venv/bin/python -W ignore prr.py 2>errors.log
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
with numpy's code for AVX2:
  right ones first: constant uncertainty 1.00, number of meanings 0.89
  wrong ones first: constant uncertainty -0.99, number of meanings -0.31
  shuffled: constant uncertainty 0.08, number of meanings 0.61
  all replies right: 0.50 and 0.50
  all replies wrong: 0.50 and 0.50
with numpy's code for older processors:
  right ones first: constant uncertainty -0.84, number of meanings 0.19
  wrong ones first: constant uncertainty 0.83, number of meanings 0.69
  shuffled: constant uncertainty -0.14, number of meanings 0.32
  all replies right: 0.50 and 0.50
  all replies wrong: 0.50 and 0.50
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
