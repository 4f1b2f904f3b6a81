#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# NeMo Gym: one partial reward makes pass@1 the reward of the first rollout, so the order decides;
# majority@k/no_answer is 0 even if no rollout has an answer; one missing rollout raises pass@4 from
# 50 to 100.
#
# Version: nemo-gym 0.7.0, its compute_pass_majority_metrics and highest_k_metrics, which 32 of its
#   resource servers call, and stand-ins for wandb and for the version of ray.
# Guess: pass@k is over all tasks, and does not fall when rollouts get better. A task with too few
#   rollouts makes an error or a warning, or counts with what it has. pass@1 is the mean of all
#   rollouts, in any order. no_answer is "fraction with no extracted answer", as the docstring says.
# Behaviour: a task with fewer than k rollouts is left out of pass@k, but not of pass@1[avg-of-k],
#   so the two are over different tasks, and the headline, which is the highest k, may rest on one
#   task. If one of a task's rewards is not 0 or 1, its pass@k is the best of its first k rollouts,
#   so pass@1 is its first rollout. pass@k/no_answer is the chance that one of k has no answer and
#   rises with k; majority@k/no_answer is 0 even if no rollout has an answer.
# Why it matters: rollouts are lost to time limits and full contexts, most of all in hard tasks, and
#   are left out by default (count_missing_rollouts_as_zero). Then a model that fails more has a
#   higher pass@k; the help of that option says that the score "reads higher than the run earned". A
#   run with many unanswered tasks looks as if it had none.
# Source: compute_pass_majority_metrics of nemo_gym/reward_profile.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv orjson==3.13.0 pandas==3.1.1 scipy==1.18.1 pydantic==2.14.4 \
  hydra-core==1.3.8 omegaconf==2.3.1 rich==15.0.0 openai==3.57.0
# It asks for Python 3.13.14, but these modules run with any 3.13.
uv pip install -q --python-version 3.13.14 --no-deps --target packages nemo-gym==0.7.0

seen=$(PYTHONPATH=packages venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib.metadata
import sys
from unittest.mock import MagicMock

sys.modules["wandb"] = MagicMock()
importlib.metadata.version = lambda name: "0"

from nemo_gym.reward_profile import compute_pass_majority_metrics, highest_k_metrics


def show(label, *tasks):
    rows = [[{"reward": reward} for reward in rewards] for rewards in tasks]
    found = compute_pass_majority_metrics(rows)[0]
    values = [f"{found[f'pass@{k}/accuracy']:.0f}" for k in (1, 2, 3, 4)]
    average = found["pass@1[avg-of-4]/accuracy"]
    headline = highest_k_metrics(found, "pass@{k}", score_names=["accuracy"])
    print(f"{label}: pass@1 to 4 {' '.join(values)}, avg-of-4 {average:.1f}, headline {headline}")


SOLVED = [1, 1, 1, 1]
show("one solved, one unsolved task", SOLVED, [0, 0, 0, 0])
show("without one unsolved rollout ", SOLVED, [0, 0, 0])
show("1 0 0 0  ", [1, 0, 0, 0])
show("1 0 0 0.5", [1, 0, 0, 0.5])
show("0.5 0 0 1", [0.5, 0, 0, 1])
show("0 0 0.5 1", [0, 0, 0.5, 1])
for label, answers in (
    ("no answer in any rollout", [None, None, None, None]),
    ("an answer in 3 of 4", ["x", "x", "x", None]),
):
    rows = [[{"reward": 0, "answer": answer} for answer in answers]]
    found = compute_pass_majority_metrics(rows, answer_key="answer")[0]
    names = [f"{mode}@{k}/no_answer" for mode in ("pass", "majority") for k in (1, 2, 4)]
    print(f"{label}:", ", ".join(f"{name} {found[name]:.0f}" for name in names))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
one solved, one unsolved task: pass@1 to 4 50 50 50 50, avg-of-4 50.0, headline {'pass@4/accuracy': 50.0}
without one unsolved rollout : pass@1 to 4 50 50 50 100, avg-of-4 50.0, headline {'pass@4/accuracy': 100.0}
1 0 0 0  : pass@1 to 4 25 50 75 100, avg-of-4 25.0, headline {'pass@4/accuracy': 100.0}
1 0 0 0.5: pass@1 to 4 100 100 100 100, avg-of-4 37.5, headline {'pass@4/accuracy': 100.0}
0.5 0 0 1: pass@1 to 4 50 50 50 100, avg-of-4 37.5, headline {'pass@4/accuracy': 100.0}
0 0 0.5 1: pass@1 to 4 0 0 50 100, avg-of-4 37.5, headline {'pass@4/accuracy': 100.0}
no answer in any rollout: pass@1/no_answer 100, pass@2/no_answer 100, pass@4/no_answer 100, majority@1/no_answer 0, majority@2/no_answer 0, majority@4/no_answer 0
an answer in 3 of 4: pass@1/no_answer 25, pass@2/no_answer 50, pass@4/no_answer 100, majority@1/no_answer 0, majority@2/no_answer 0, majority@4/no_answer 0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
