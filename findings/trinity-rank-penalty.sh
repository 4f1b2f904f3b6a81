#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Trinity-RFT: rank_penalty penalizes no rollout, and raises all advantages of a group together.
#
# Versions: trinity-rft 0.6.0, its GRPOGroupedAdvantage; torch 2.13.0. Stand-ins replace packages
#   that are not needed here.
# Guess: with rank_penalty, the more likely of two right rollouts gets the smaller advantage, as in
#   the paper that the docstring links. The advantages of a group add up to 0.
# Behaviour: the rewards are lowered by rank, but only the mean and the standard deviation of the
#   group are computed from them. The advantage is computed from the reward that was not lowered. So
#   two right rollouts have the same advantage, whichever is more likely, and the advantages of a
#   group add up to more than 0. If all four rewards are 1, each advantage is 1.16. The lowered
#   rewards would give advantages from -1.16 for the most likely rollout to 1.16 for the least
#   likely one.
# Why it matters: the option does not do what it is for, since it makes no difference between right
#   rollouts. Instead, each rollout of a task that is always solved is reinforced as strongly as a
#   right rollout of a mixed group.
# Source: calculate_group_advantage of trinity/algorithm/advantage_fn/grpo_advantage.py: rewards is
#   lowered, exp.reward is used.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
uv pip install -q --python venv --no-deps trinity-rft==0.6.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

STANDINS = "datasets omegaconf openai ray sqlalchemy transformers verl vllm".split()


class Standins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STANDINS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[])

    def exec_module(self, module):
        pass


sys.meta_path.append(Standins())

from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage
from trinity.common.experience import EID, Experience

LOGPROBS = (-0.1, -0.5, -1.0, -2.0)  # The first rollout is the most likely one.


def show(label, rewards, **options):
    rollouts = [
        Experience(
            eid=EID(batch=0, task=0, run=run),
            tokens=[1, 2, 3],
            prompt_length=1,
            logprobs=[logprob, logprob],
            reward=reward,
        )
        for run, (reward, logprob) in enumerate(zip(rewards, LOGPROBS))
    ]
    rollouts, _ = GRPOGroupedAdvantage(**options).process(rollouts)
    advantages = [rollout.advantages[0].item() for rollout in rollouts]
    rounded, total = [round(x, 2) for x in advantages], abs(round(sum(advantages), 2))
    print(f"  {label}: {rounded}, sum {total}")


PENALTY = 0.25
for rewards in (1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0):
    print(f"rewards {rewards}, most likely first")
    show("no penalty", rewards)
    show("rank_penalty", rewards, rank_penalty=PENALTY)
    ranks = 0.75, 0.5, 0.25, 0.0
    show("lowered before", [x * (1 - rank * PENALTY) for x, rank in zip(rewards, ranks)])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
rewards (1.0, 1.0, 0.0, 0.0), most likely first
  no penalty: [0.87, 0.87, -0.87, -0.87], sum 0.0
  rank_penalty: [1.19, 1.19, -0.86, -0.86], sum 0.64
  lowered before: [0.8, 0.93, -0.86, -0.86], sum 0.0
rewards (1.0, 1.0, 1.0, 1.0), most likely first
  no penalty: [0.0, 0.0, 0.0, 0.0], sum 0.0
  rank_penalty: [1.16, 1.16, 1.16, 1.16], sum 4.65
  lowered before: [-1.16, -0.39, 0.39, 1.16], sum 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
