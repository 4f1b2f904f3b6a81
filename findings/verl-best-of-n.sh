#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# verl: best@4 of four rollouts, one of them solved, is 0.687.
#
# Versions: verl 0.9.1, the metrics of its validation; numpy 2.5.5. Of verl's wheel only this file
#   is used, with stand-ins for torch and the modules that need it.
# Guess: best@4 of four rollouts is their maximum, and best@2 is the mean over all pairs, as in the
#   usual estimate of pass@k. maj@4 of four is the score of the majority's answer. Computing a
#   metric changes nothing else.
# Behaviour: each is the mean of 1000 draws with replacement, so a rollout may be drawn twice and
#   another not at all. One solved of four gives best@4 = 0.687, not 1, and best@2 = 0.453, not 0.5.
#   If three of four agree on the right answer, maj@4 is 0.862. The draws are the same for each
#   task, so their noise depends on the place of the solved rollout. They start with
#   numpy.random.seed(42), so each validation sets numpy's global generator back to the same point.
# Why it matters: best@N of N rollouts is below the pass@N of the same rollouts, most for hard
#   tasks, and cannot be compared to other tools' numbers. Whatever else draws from numpy's global
#   generator in the trainer's process repeats itself after each validation.
# Source: bootstrap_metric and process_validation_metrics of verl/trainer/ppo/metric_utils.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv numpy==2.5.5
uv pip install -q --python venv --no-deps verl==0.9.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import itertools
import pathlib
import runpy
import sys
import sysconfig
from unittest.mock import MagicMock

import numpy

for name in ("", ".utils", ".utils.torch_functional", ".utils.fs", ".utils.import_utils"):
    sys.modules["verl" + name] = MagicMock()
for name in ("torch", "omegaconf", "transformers", "verl.utils.model"):
    sys.modules[name] = MagicMock()
site = pathlib.Path(sysconfig.get_paths()["purelib"])
verl = runpy.run_path(str(site / "verl/trainer/ppo/metric_utils.py"))

for scores, answers in (
    ([1, 0, 0, 0], "abcd"),
    ([1, 1, 1, 0], "aaab"),
    ([1] + [0] * 15, "abcdefghijklmnop"),
):
    n = len(scores)
    infos = {"reward": [float(score) for score in scores], "pred": list(answers)}
    got = verl["process_validation_metrics"](["set"] * n, ["task"] * n, infos)["set"]["reward"]
    print(f"{sum(scores)} of {n} solved:")
    for k in (2, n):
        pairs = list(itertools.combinations(scores, k))
        usual = sum(map(max, pairs)) / len(pairs)
        print(f"  best@{k} {got[f'best@{k}/mean']:.3f}, usual pass@{k} {usual:.3f}", end="")
        print(f", maj@{k} {got[f'maj@{k}/mean']:.3f}")
    print("  numpy's next random number:", f"{numpy.random.random():.6f}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
1 of 4 solved:
  best@2 0.453, usual pass@2 0.500, maj@2 0.272
  best@4 0.687, usual pass@4 1.000, maj@4 0.281
  numpy's next random number: 0.261706
3 of 4 solved:
  best@2 0.945, usual pass@2 1.000, maj@2 0.750
  best@4 0.996, usual pass@4 1.000, maj@4 0.862
  numpy's next random number: 0.261706
1 of 16 solved:
  best@2 0.149, usual pass@2 0.125, maj@2 0.083
  best@16 0.656, usual pass@16 1.000, maj@16 0.061
  numpy's next random number: 0.720268
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
