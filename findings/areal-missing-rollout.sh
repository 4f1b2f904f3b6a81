#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# AReaL: one rollout that is missing moves all later groups by one, and the last one's advantage is
# 100000.
#
# Versions: areal 1.0.4, its PPOActor.compute_advantages, with stand-ins for the modules that this
#   does not need; torch 2.13.0. The rewards are normalised by group, with group_size=4.
# Guess: compute_advantages takes a list with a batch for each prompt, so it knows the groups. A
#   prompt that lost a rollout (arun_episode returned None, and AReaL says that it goes on with the
#   remaining ones) is normalised over its three rollouts.
# Behaviour: the batches are joined, and cut into groups of four by position. So each group from the
#   missing rollout on takes its last members from the next prompt: a prompt whose four rollouts are
#   all solved has positive advantages, and a prompt with none solved has negative ones. The rest,
#   less than a group, has mean 0 and standard deviation 0, so its rewards are divided by eps: 1
#   becomes 100000. A prompt with more than four rows has the same effect, for instance if each turn
#   of an agent is a separate row.
# Why it matters: one such value of 100000 is the whole gradient of the batch, or, if the advantages
#   are normalised afterwards, makes all others nearly 0. A warning names only the missing rollout.
# Source: Normalization.__call__ of areal/utils/data.py. AReaL's pull request #1454 is meant to fix
#   this; 1.0.4, the newest release on PyPI, does not include it.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 numpy==2.4.6 omegaconf==2.4.0.dev2 hydra-core==1.4.0.dev1 pyyaml==6.0.4 \
  colorlog==6.12.0 pydantic==2.14.4 msgspec==0.22.0 tenacity==9.2.1
uv pip install -q --python venv --no-deps areal==1.0.4

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import logging
import sys
from unittest.mock import MagicMock

STANDINS = """PIL aiofiles aiohttp datasets einops flask httpx lark numba openai orjson psutil
pybase64 ray requests swanlab tabulate tensorboardX torchdata trackio transformers uvloop wandb
werkzeug""".split()


class Standins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(STANDINS)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[])

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Standins())

import torch
from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.trainer.ppo.actor import PPOActor

logging.disable()


def advantages(*groups):
    norm = NormConfig(mean_level="group", std_level="group", group_size=4)
    actor = PPOActor(PPOActorConfig(reward_norm=norm, kl_ctl=0.0), None)
    batches = []
    for rewards in groups:
        ones = torch.ones(len(rewards), 6, dtype=torch.long)
        mask = ones.clone()
        mask[:, :2] = 0
        batch = {"input_ids": ones, "attention_mask": ones, "loss_mask": mask}
        batch |= {"logprobs": ones * 0.0, "prox_logp": ones * 0.0}
        batches.append(batch | {"rewards": torch.tensor(rewards, dtype=torch.float32)})
    for rewards, batch in zip(groups, actor.compute_advantages(batches)):
        trained = batch["advantages"][:, 3].tolist()
        print(f"  rewards {rewards}:", " ".join(f"{value:.2f}" for value in trained))


print("all rollouts")
advantages([0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0])
print("the first prompt lacks its last rollout")
advantages([0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0])
print("the last prompt lacks a rollout")
advantages([0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1])
print("the last prompt has another row")
advantages([0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0, 1])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
all rollouts
  rewards [0, 0, 0, 1]: -0.50 -0.50 -0.50 1.50
  rewards [1, 1, 1, 1]: 0.00 0.00 0.00 0.00
  rewards [0, 1, 1, 0]: -0.87 0.87 0.87 -0.87
the first prompt lacks its last rollout
  rewards [0, 0, 0]: -0.50 -0.50 -0.50
  rewards [1, 1, 1, 1]: 1.50 0.50 0.50 0.50
  rewards [0, 1, 1, 0]: -1.50 100000.00 100000.00 0.00
the last prompt lacks a rollout
  rewards [0, 0, 0, 1]: -0.50 -0.50 -0.50 1.50
  rewards [1, 1, 1, 1]: 0.00 0.00 0.00 0.00
  rewards [0, 1, 1]: 0.00 100000.00 100000.00
the last prompt has another row
  rewards [0, 0, 0, 1]: -0.50 -0.50 -0.50 1.50
  rewards [1, 1, 1, 1]: 0.00 0.00 0.00 0.00
  rewards [0, 1, 1, 0, 1]: -0.87 0.87 0.87 -0.87 100000.00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
