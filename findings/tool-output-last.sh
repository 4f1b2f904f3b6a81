#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# verl and AReaL: a rollout that ends with a tool's output loses its reward, unless the estimator is
# GRPO.
#
# Versions: verl 0.9.1, its default placing of rewards (RewardManagerBase.assemble_rm_scores) and
#   its estimators; areal 1.0.4, its PPOActor.compute_advantages. Both with stand-ins for the
#   modules that this does not need; torch 2.13.0.
# Guess: the tokens of a tool's output are not trained, but the rollout's reward reaches all tokens
#   that the model wrote, wherever the last of them stands. That is the same for each estimator.
# Behaviour: the reward is put on the rollout's last token. If that token is masked, verl's GAE,
#   REINFORCE++ and ReMax skip it together with its reward, and so does AReaL. A solved rollout then
#   receives the same as a failed one: 0. verl's GRPO, RLOO and OPO sum the rewards first, and keep
#   it.
# Why it matters: an agent's rollout often ends with an observation: the output of a tool that
#   submits the answer, or of the last turn that a limit allows. The logged score is right, since it
#   is summed before. Only the rollouts that end with the model's text teach anything, so the policy
#   learns nothing from those that end otherwise, and another estimator gives another result.
# Source: compute_gae_advantage_return and the functions after it in verl/trainer/ppo/core_algos.py.
#   verl's own ToolAgentLoop leaves out the last output, but other agent loops may keep it.
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
uv pip install -q --python venv --no-deps areal==1.0.4 verl==0.9.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import logging
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

STANDINS = """PIL aiofiles aiohttp datasets einops flask httpx lark numba openai orjson psutil
pybase64 ray requests swanlab tabulate tensorboardX torchdata trackio transformers uvloop wandb
werkzeug codetiming tensordict verl.workers verl.utils.model""".split()


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
from areal.api.cli_args import PPOActorConfig
from areal.trainer.ppo.actor import PPOActor
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo import core_algos

logging.disable()

REWARDS = [1.0, 0.0, 1.0, 0.0]
FIRST = 2  # The prompt's length.
OPTIONS = {
    "gae": {"values": torch.zeros(4, 6), "gamma": 1.0, "lam": 1.0},
    "reinforce_plus_plus": {"config": SimpleNamespace(gamma=1.0)},
    "remax": {"reward_baselines": torch.zeros(4)},
    "grpo": {"index": numpy.zeros(4)},
    "rloo": {"index": numpy.zeros(4)},
    "opo": {"index": numpy.zeros(4)},
}


def show(label, mask):
    """Prints what the first token of each reply gets."""
    print(label)
    mask = torch.tensor([mask] * 4)
    ones = torch.ones(4, FIRST + 6, dtype=torch.long)
    batch = {"prompts": ones[:, :FIRST], "responses": ones[:, FIRST:], "attention_mask": ones}
    rewards = RewardManagerBase.assemble_rm_scores(SimpleNamespace(batch=batch), REWARDS)
    for name, options in OPTIONS.items():
        estimator = core_algos.get_adv_estimator_fn(name)
        advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, **options)
        print(f"  verl {name}:", *(f"{value:.2f}" for value in advantages[:, 0]))
    batch = {"input_ids": ones, "attention_mask": ones, "rewards": torch.tensor(REWARDS)}
    batch["loss_mask"] = torch.cat([torch.zeros(4, FIRST, dtype=torch.long), mask], dim=1)
    batch |= {"logprobs": ones * 0.0, "prox_logp": ones * 0.0}
    actor = PPOActor(PPOActorConfig(kl_ctl=0.0), None)
    advantages = actor.compute_advantages([batch])[0]["advantages"]
    print("  AReaL:", *(f"{value:.2f}" for value in advantages[:, FIRST]))


print("rewards:", *REWARDS)
show("text, output, text", [1, 1, 0, 0, 1, 1])
show("text, output", [1, 1, 1, 1, 0, 0])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
rewards: 1.0 0.0 1.0 0.0
text, output, text
  verl gae: 0.97 -0.97 0.97 -0.97
  verl reinforce_plus_plus: 0.97 -0.97 0.97 -0.97
  verl remax: 1.00 0.00 1.00 0.00
  verl grpo: 0.87 -0.87 0.87 -0.87
  verl rloo: 0.67 -0.67 0.67 -0.67
  verl opo: 0.50 -0.50 0.50 -0.50
  AReaL: 1.00 0.00 1.00 0.00
text, output
  verl gae: 0.00 0.00 0.00 0.00
  verl reinforce_plus_plus: 0.00 0.00 0.00 0.00
  verl remax: 0.00 0.00 0.00 0.00
  verl grpo: 0.87 -0.87 0.87 -0.87
  verl rloo: 0.67 -0.67 0.67 -0.67
  verl opo: 0.50 -0.50 0.50 -0.50
  AReaL: 0.00 0.00 0.00 0.00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
