#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# AReaL: mask_no_eos_with_zero removes the reward of the longest rollout in each batch, even if that
# rollout is complete.
#
# Versions: areal 1.0.4, its PPOActor.compute_advantages with mask_no_eos_with_zero=True, which is
#   not the default, and stand-ins for the modules that this does not need; torch 2.13.0.
# Guess: mask_no_eos_with_zero ("Mask truncated generations (no EOS token) and exclude from
#   training") is for rollouts that reached max_new_tokens or do not end with the EOS token. In a
#   batch without such a rollout it changes nothing.
# Behaviour: a rollout counts as truncated if it is as long as the batch, which is padded to its
#   longest rollout. So in each batch the longest rollout, prompt and reply together, gets an
#   advantage of 0, whatever its last token is, and a rollout that was truncated but is shorter
#   than another keeps its reward. Which one is affected depends on what it is batched with.
# Why it matters: the longest solved rollout is never rewarded, so the policy is trained towards
#   short replies, and most of all in small batches. The log does not show it, since the metric
#   no_eos_ratios uses the same test.
# Source: seq_no_eos_mask in PPOActor._compute_advantages of areal/trainer/ppo/actor.py.
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

EOS = 2


def show(label, *rollouts, **options):
    """Prints the advantage of rollouts, each of a reward, a length and a last token."""
    actor = PPOActor(
        PPOActorConfig(kl_ctl=0.0, max_new_tokens=10, mask_no_eos_with_zero=True), None
    )
    size = max(length for _, length, _ in rollouts)
    batch = {key: torch.zeros(len(rollouts), size) for key in ("logprobs", "prox_logp")}
    ids = torch.zeros(len(rollouts), size, dtype=torch.long)
    mask = ids.clone()
    for row, (_, length, last) in enumerate(rollouts):
        ids[row, :length] = 7
        ids[row, length - 1] = last
        mask[row, :length] = 1
    loss_mask = mask.clone()
    loss_mask[:, :3] = 0
    rewards = torch.tensor([reward for reward, _, _ in rollouts])
    batch |= {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask, "rewards": rewards}
    print(label)
    trained = actor.compute_advantages([batch])[0]["advantages"][:, 3].tolist()
    for (reward, length, last), value in zip(rollouts, trained):
        end = "ends with EOS" if last == EOS else "truncated"
        print(f"  {length} tokens, {end}, reward {reward}: advantage {value}")


show("three complete rollouts", (1.0, 6, EOS), (1.0, 8, EOS), (-1.0, 7, EOS))
show("the first two of them", (1.0, 6, EOS), (1.0, 8, EOS))
show("the first and the last", (1.0, 6, EOS), (-1.0, 7, EOS))
show("the same length", (1.0, 6, EOS), (1.0, 6, EOS))
show("a longer prompt and a truncated reply", (1.0, 13, 7), (1.0, 15, EOS))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
three complete rollouts
  6 tokens, ends with EOS, reward 1.0: advantage 1.0
  8 tokens, ends with EOS, reward 1.0: advantage 0.0
  7 tokens, ends with EOS, reward -1.0: advantage -1.0
the first two of them
  6 tokens, ends with EOS, reward 1.0: advantage 1.0
  8 tokens, ends with EOS, reward 1.0: advantage 0.0
the first and the last
  6 tokens, ends with EOS, reward 1.0: advantage 1.0
  7 tokens, ends with EOS, reward -1.0: advantage 0.0
the same length
  6 tokens, ends with EOS, reward 1.0: advantage 0.0
  6 tokens, ends with EOS, reward 1.0: advantage 0.0
a longer prompt and a truncated reply
  13 tokens, truncated, reward 1.0: advantage 1.0
  15 tokens, ends with EOS, reward 1.0: advantage 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
