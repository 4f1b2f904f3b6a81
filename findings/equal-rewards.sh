#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# OpenRLHF and verl: a group of equal rewards gets advantages of up to 0.96 instead of 0.
#
# Versions: openrlhf 0.11.2, its estimator group_norm; verl 0.9.1, grpo; areal 1.0.4, reward_norm by
#   group, which is right. All with stand-ins for the modules that this does not need; torch 2.13.0
#   for CPU. There is no KL penalty.
# Guess: if all rollouts of a prompt have the same reward, all advantages are 0, so the prompt
#   teaches nothing. A tiny number is added to the standard deviation for this very case.
# Behaviour: in float32, the mean of equal numbers such as 0.1 may be a neighbouring number instead.
#   The difference is then divided by an equally small standard deviation. OpenRLHF adds only 1e-9,
#   which is less than the rounding error of 0.1: eight rewards of 0.1 produce eight advantages of
#   -0.83, and 0.7 produces 0.92. verl adds 1e-6, so 1.2 produces 0.11 and 123.4 produces -0.83. The
#   sign depends on the number, and is the same for the whole group. Rewards of 0, 0.5 and 1 are
#   handled correctly, and so are groups of four. AReaL computes the mean in float64, and is
#   correct.
# Why it matters: a prompt whose rollouts all fail in the same way, for example with 0.1 for the
#   format, should be ignored. Instead, all its rollouts are pushed up or down, nearly as far as a
#   solved or failed rollout of a mixed group. In verl, this happens with rewards such as times or
#   game scores.
# Source: compute_advantages_and_returns of openrlhf/trainer/ppo_utils/experience_maker.py, and
#   compute_grpo_outcome_advantage of verl/trainer/ppo/core_algos.py.
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
uv pip install -q --python venv --no-deps \
  areal==1.0.4 verl==0.9.1 openrlhf==0.11.2

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import logging
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

STANDINS = """PIL aiofiles aiohttp datasets einops flask httpx lark numba openai orjson psutil
pybase64 ray requests swanlab tabulate tensorboardX torchdata trackio transformers uvloop wandb
werkzeug codetiming tensordict verl.workers deepspeed openrlhf.trainer.ray
openrlhf.models.actor openrlhf.models.model pylatexenc peft flash_attn""".split()


class Standins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(STANDINS)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[])

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Standins())

import numpy
import torch
from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.trainer.ppo.actor import PPOActor
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from verl.trainer.ppo import core_algos

logging.disable()


def openrlhf(rewards):
    count = len(rewards)
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator="group_norm", gamma=1.0, lambd=1.0, no_std_norm=False
            )
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=count),
        reward=SimpleNamespace(clip_range=(-10, 10)),
    )
    maker = RemoteExperienceMaker(
        None, None, None, None, SimpleNamespace(value=0.0), SimpleNamespace(args=args), None
    )
    experience = SimpleNamespace(
        rewards=torch.tensor(rewards),
        index=list(range(count)),
        info={},
        kl=torch.zeros(count, 4),
        action_mask=torch.ones(count, 4),
    )
    return maker.compute_advantages_and_returns([experience])[0].advantages[:, 0]


def verl(rewards):
    ones = torch.ones(len(rewards), 4)
    scores = ones * 0
    scores[:, -1] = torch.tensor(rewards)
    grpo = core_algos.get_adv_estimator_fn("grpo")
    return grpo(scores, ones, index=numpy.zeros(len(rewards)))[0][:, 0]


def areal(rewards):
    norm = NormConfig(mean_level="group", std_level="group", group_size=len(rewards))
    options = {"reward_norm": norm, "kl_ctl": 0.0, "reward_clip": 1e9}
    ones = torch.ones(len(rewards), 4, dtype=torch.long)
    batch = {"input_ids": ones, "attention_mask": ones, "loss_mask": ones}
    batch |= {"logprobs": ones * 0.0, "prox_logp": ones * 0.0, "rewards": torch.tensor(rewards)}
    actor = PPOActor(PPOActorConfig(**options), None)
    return actor.compute_advantages([batch])[0]["advantages"][:, 0]


print("advantage of each rollout: OpenRLHF, verl, AReaL")
for count in (4, 6, 8, 16):
    for reward in (0.1, 0.3, 0.5, 0.7, 1.0, 1.2, 123.4, 777.7):
        made = [library([reward] * count) for library in (openrlhf, verl, areal)]
        assert all((values == values[0]).all() for values in made)
        values = ", ".join(f"{values[0].item():z.2f}" for values in made)
        print(f"  {count} rollouts of reward {reward}: {values}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
advantage of each rollout: OpenRLHF, verl, AReaL
  4 rollouts of reward 0.1: 0.00, 0.00, 0.00
  4 rollouts of reward 0.3: 0.00, 0.00, 0.00
  4 rollouts of reward 0.5: 0.00, 0.00, 0.00
  4 rollouts of reward 0.7: 0.00, 0.00, 0.00
  4 rollouts of reward 1.0: 0.00, 0.00, 0.00
  4 rollouts of reward 1.2: 0.00, 0.00, 0.00
  4 rollouts of reward 123.4: 0.00, 0.00, 0.00
  4 rollouts of reward 777.7: 0.00, 0.00, 0.00
  6 rollouts of reward 0.1: 0.00, 0.00, 0.00
  6 rollouts of reward 0.3: 0.89, 0.03, 0.00
  6 rollouts of reward 0.5: 0.00, 0.00, 0.00
  6 rollouts of reward 0.7: 0.00, 0.00, 0.00
  6 rollouts of reward 1.0: 0.00, 0.00, 0.00
  6 rollouts of reward 1.2: 0.91, 0.11, 0.00
  6 rollouts of reward 123.4: 0.00, 0.00, 0.00
  6 rollouts of reward 777.7: 0.00, 0.00, 0.00
  8 rollouts of reward 0.1: -0.83, -0.01, 0.00
  8 rollouts of reward 0.3: 0.91, 0.03, 0.00
  8 rollouts of reward 0.5: 0.00, 0.00, 0.00
  8 rollouts of reward 0.7: 0.92, 0.06, 0.00
  8 rollouts of reward 1.0: 0.00, 0.00, 0.00
  8 rollouts of reward 1.2: 0.93, 0.11, 0.00
  8 rollouts of reward 123.4: -0.94, -0.83, 0.00
  8 rollouts of reward 777.7: -0.94, -0.92, 0.00
  16 rollouts of reward 0.1: -0.86, -0.01, 0.00
  16 rollouts of reward 0.3: 0.94, 0.03, 0.00
  16 rollouts of reward 0.5: 0.00, 0.00, 0.00
  16 rollouts of reward 0.7: 0.95, 0.06, 0.00
  16 rollouts of reward 1.0: 0.00, 0.00, 0.00
  16 rollouts of reward 1.2: 0.96, 0.11, 0.00
  16 rollouts of reward 123.4: -0.97, -0.86, 0.00
  16 rollouts of reward 777.7: -0.97, -0.95, 0.00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
