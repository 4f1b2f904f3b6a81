#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SkyRL: the length of the tools' outputs decides how much a rollout is rewarded or punished.
#
# Versions: skyrl 0.4.0, its RayPPOTrainer.compute_advantages_and_returns after
#   convert_prompts_responses_to_batch_tensors, with stand-ins for the modules that this does not
#   need. Python 3.11 and torch 2.13.0; SkyRL asks for 3.12, here only for its TypedDict.
# Guess: REINFORCE++ and GAE normalise the advantages over the trained tokens. The tokens of a
#   tool's output are in no loss (loss_mask), so their number changes nothing: of two rollouts whose
#   texts have the same number of tokens, the solved one has an advantage of 0.99 and the failed one
#   of -0.99.
# Behaviour: mean and standard deviation are computed over response_mask, which includes the
#   outputs. If a tool printed 2000 tokens in the failed rollout, the solved one has 10.02, and the
#   failed one -0.10. If it printed them in the solved one, they have 0.10 and -10.02. GRPO is not
#   affected.
# Why it matters: the size of a step depends on what the tools printed. Failed rollouts of an agent
#   are often the long ones, so they are hardly punished, and the few solved ones are pushed far
#   beyond the usual range. The logged mean of the advantages includes the tokens of the outputs, so
#   it is 0. With GRPO, whose mean over the trained tokens is 0, the logged mean is not 0 for the
#   same reason.
# Source: RayPPOTrainer.compute_advantages_and_returns of skyrl/train/trainer.py passes
#   data["response_mask"] to masked_whiten.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 numpy==2.4.6 pydantic==2.14.4
uv pip install -q --no-deps --python-version 3.12 --target skyrl skyrl==0.4.0

seen=$(PYTHONPATH="$dir/skyrl" venv/bin/python - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import sys
import typing
from types import SimpleNamespace
from unittest.mock import MagicMock

import typing_extensions

STANDINS = """accelerate aiohttp cloudpathlib datasets httpx jaxtyping loguru omegaconf orjson
packaging pybase64 ray rich skyrl_gym torchdata tqdm transformers wandb yaml""".split()


class Standins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(STANDINS)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[], is_initialized=lambda: False)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Standins())
typing.TypedDict = typing_extensions.TypedDict

import torch
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.trainer import RayPPOTrainer


class Batch(dict):
    metadata = {"uids": ["task", "task"], "avg_response_length": 0}

    def to(self, device):
        return self


def show(estimator, *rollouts):
    """Prints the advantages of rollouts (text, output, text) of a reward and an output's length."""
    masks = [[1] * 5 + [0] * output + [1] * 5 for _, output in rollouts]
    responses = [[7] * len(mask) for mask in masks]
    rewards = [[0.0] * (len(mask) - 1) + [reward] for mask, (reward, _) in zip(masks, rollouts)]
    prompts = [[7, 7]] * len(rollouts)
    _, _, response_mask, rewards, loss_mask, *_ = convert_prompts_responses_to_batch_tensors(
        0, prompts, responses, rewards, masks
    )
    batch = Batch(rewards=rewards, response_mask=response_mask, values=rewards * 0)
    algorithm = SimpleNamespace(
        advantage_estimator=estimator, gamma=1.0, lambd=1.0, grpo_norm_by_std=True
    )
    config = SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=False),
        trainer=SimpleNamespace(algorithm=algorithm),
    )
    trainer = SimpleNamespace(cfg=config, all_metrics={})
    RayPPOTrainer.compute_advantages_and_returns(trainer, batch)
    advantages = batch["advantages"]
    for row, (reward, output) in enumerate(rollouts):
        trained = advantages[row][loss_mask[row].bool()]
        assert torch.allclose(trained, trained[0])
        print(f"  reward {reward}, output of {output} tokens: advantage {trained[0]:.2f}")
    mean = advantages[loss_mask.bool()].mean()
    logged = trainer.all_metrics["loss/avg_raw_advantages"]
    print(f"  mean of the trained tokens {mean:.2f}, logged mean {abs(logged):.2f}")


for estimator in ("reinforce++", "gae", "grpo"):
    for outputs in ((10, 10), (10, 2000), (2000, 10)):
        print(estimator)
        show(estimator, *zip((1.0, 0.0), outputs))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
reinforce++
  reward 1.0, output of 10 tokens: advantage 0.99
  reward 0.0, output of 10 tokens: advantage -0.99
  mean of the trained tokens 0.00, logged mean 0.00
reinforce++
  reward 1.0, output of 10 tokens: advantage 10.02
  reward 0.0, output of 2000 tokens: advantage -0.10
  mean of the trained tokens 4.96, logged mean 0.00
reinforce++
  reward 1.0, output of 2000 tokens: advantage 0.10
  reward 0.0, output of 10 tokens: advantage -10.02
  mean of the trained tokens -4.96, logged mean 0.00
gae
  reward 1.0, output of 10 tokens: advantage 0.99
  reward 0.0, output of 10 tokens: advantage -0.99
  mean of the trained tokens 0.00, logged mean 0.00
gae
  reward 1.0, output of 10 tokens: advantage 10.02
  reward 0.0, output of 2000 tokens: advantage -0.10
  mean of the trained tokens 4.96, logged mean 0.00
gae
  reward 1.0, output of 2000 tokens: advantage 0.10
  reward 0.0, output of 10 tokens: advantage -10.02
  mean of the trained tokens -4.96, logged mean 0.00
grpo
  reward 1.0, output of 10 tokens: advantage 0.71
  reward 0.0, output of 10 tokens: advantage -0.71
  mean of the trained tokens 0.00, logged mean 0.00
grpo
  reward 1.0, output of 10 tokens: advantage 0.71
  reward 0.0, output of 2000 tokens: advantage -0.71
  mean of the trained tokens 0.00, logged mean 0.69
grpo
  reward 1.0, output of 2000 tokens: advantage 0.71
  reward 0.0, output of 10 tokens: advantage -0.71
  mean of the trained tokens 0.00, logged mean 0.69
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
