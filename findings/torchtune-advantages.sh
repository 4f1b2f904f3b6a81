#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# torchtune: PPO's normalized advantages keep their mean, so a batch of high rewards is reinforced
# as a whole.
#
# Versions: torchtune 0.6.1, its estimate_advantages, which the PPO recipe calls; torch 2.13.0. Of
#   torchtune's wheel only this file is used.
# Guess: advantages are normalized over the batch to mean 0 and standard deviation 1, as is usual
#   and as in TRL, which whiten's docstring names as its origin. If 5 is added to all rewards of a
#   batch and the critic's values stay, the advantages stay.
# Behaviour: the standard deviation is 1, but the old mean is added again. whiten reads shift_mean
#   the other way round than TRL: with True, the default, it adds the mean. With values of 0,
#   rewards from 5 to 6.5 give advantages from 4.5 to 7.0, so even the worst of the four rollouts is
#   reinforced. Rewards from -7 to -5.5 give advantages from -7.5 to -5.0. The mean is 0 only if the
#   critic is right on average.
# Why it matters: the sign of an advantage depends on the zero of the reward and on the error of
#   the critic, not on the comparison with the other rollouts. If the critic's values are far
#   too low, all rollouts of a batch get more likely; if far too high, all get less likely.
# Source: whiten and estimate_advantages of torchtune/rlhf/rewards.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 numpy==2.4.6
uv pip install -q --python venv --no-deps torchtune==0.6.1

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import runpy
import sysconfig

import torch

site = pathlib.Path(sysconfig.get_paths()["purelib"])
torchtune = runpy.run_path(str(site / "torchtune/rlhf/rewards.py"))
TOKENS = 3


def numbers(tensor):
    return ", ".join(f"{number:.2f}" for number in tensor)


def show(scores, value=0.0):
    """Prints the advantages of rollouts with a reward at the end and the same value everywhere."""
    rewards = torch.zeros(len(scores), TOKENS)
    rewards[:, -1] = torch.tensor(scores)
    values = torch.full_like(rewards, value)
    mask = torch.ones_like(rewards, dtype=torch.bool)
    advantages, _ = torchtune["estimate_advantages"](values, rewards, 1.0, 1.0, masks=mask)
    print(f"rewards {numbers(rewards[:, -1])}, values {value}:")
    print(f"  advantages {numbers(advantages[:, 0])}", end="")
    mean, deviation = advantages.mean().round(decimals=2) + 0.0, advantages.std()
    print(f", mean {mean:.2f}, deviation {deviation:.2f}")


for shift in (0.0, 5.0, -7.0):
    show([shift + reward for reward in (0.0, 0.5, 1.0, 1.5)])
show([5.0, 5.5, 6.0, 6.5], value=5.75)
show([1.0, 1.0, 0.0, 0.0])
three = torch.tensor([1.0, 2.0, 3.0])
for shift_mean in (True, False):
    whitened = torchtune["whiten"](three, shift_mean=shift_mean)
    print(f"whiten(1, 2, 3, shift_mean={shift_mean}):", numbers(whitened))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
rewards 0.00, 0.50, 1.00, 1.50, values 0.0:
  advantages -0.53, 0.32, 1.18, 2.03, mean 0.75, deviation 1.00
rewards 5.00, 5.50, 6.00, 6.50, values 0.0:
  advantages 4.47, 5.32, 6.18, 7.03, mean 5.75, deviation 1.00
rewards -7.00, -6.50, -6.00, -5.50, values 0.0:
  advantages -7.53, -6.68, -5.82, -4.97, mean -6.25, deviation 1.00
rewards 5.00, 5.50, 6.00, 6.50, values 5.75:
  advantages -1.28, -0.43, 0.43, 1.28, mean 0.00, deviation 1.00
rewards 1.00, 1.00, 0.00, 0.00, values 0.0:
  advantages 1.46, 1.46, -0.46, -0.46, mean 0.50, deviation 1.00
whiten(1, 2, 3, shift_mean=True): 1.00, 2.00, 3.00
whiten(1, 2, 3, shift_mean=False): -1.00, 0.00, 1.00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
