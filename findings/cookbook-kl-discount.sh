#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# tinker-cookbook: with kl_discount_factor, the prompt and the tools' outputs are trained as well.
#
# Versions: tinker-cookbook 0.6.1, its functions that make the training data of one rollout with
#   two turns; tinker 0.38.0, torch 2.13.0. Stand-ins answer for the service. The loss is computed
#   as Tinker documents "importance_sampling", the default: -(exp(target - sampled) *
#   advantage).sum().
# Guess: only sampled tokens have an advantage, with any option. kl_discount_factor adds the KL
#   penalty of later sampled tokens to the advantages of earlier sampled tokens.
# Behaviour: the penalty is masked first and discounted then, so each token before a sampled one
#   receives a share: the prompt and the tool's output too. The mask is removed before the data is
#   sent, and the documented loss has no other mask. A prompt token has a "sampled" logprob of 0,
#   so it enters the loss with its probability times its advantage.
# Why it matters: the model is trained to write its prompts and its tools' outputs, or to avoid
#   them. The metrics of the KL penalty do not show it, since they use the mask. The authors know
#   it: with the loss stable_reinforce the option is an error, and a comment there gives this
#   reason. The default loss takes the option, and the option's description says nothing. The
#   recipes for distillation offer it, also the one for Harbor tasks with several turns.
# Source: incorporate_kl_penalty and discounted_future_sum_vectorized of
#   tinker_cookbook/rl/metrics.py, _remove_mask of rl/train.py; distillation/train_on_policy.py has
#   the same two lines.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 tinker==0.38.0 transformers==5.24.0 datasets==5.2.0 tiktoken==0.14.0 \
  chz==0.4.0 blobfile==3.3.0 cloudpickle==3.1.3 termcolor==3.3.0 pillow==13.0.0 rich==15.0.0
uv pip install -q --python venv --no-deps tinker-cookbook==0.6.1

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import asyncio
import types

import tinker
import torch
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.train import _remove_mask
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

prompt, call, output, answer = [10, 11, 12, 13], [20, 21], [30, 31, 32], [40, 41]
kinds = ["prompt"] * 3 + ["call"] * 2 + ["output"] * 3 + ["answer"] * 2


def turn(before, after):
    reply = TokensWithLogprobs(tokens=after, maybe_logprobs=[-0.5] * len(after))
    return Transition(tinker.ModelInput.from_ints(before), reply, 0.0, False)


async def coroutine(*, prompt, **options):
    # The reference model gives all sampled tokens but the last a higher logprob than the policy.
    logprobs = [None] + [-0.2] * (prompt.length - 2) + [-3.0]
    return types.SimpleNamespace(prompt_logprobs=logprobs, prompt_cache_hit_tokens=0, sequences=[])


client = types.SimpleNamespace(
    sample=lambda **options: types.SimpleNamespace(coroutine=lambda: coroutine(**options))
)
for factor in (0.0, 0.9):
    turns = [turn(prompt, call), turn(prompt + call + output, answer)]
    group = TrajectoryGroup([Trajectory(turns, tinker.ModelInput.empty())], [1.0], [{}])
    data, _ = assemble_training_data([group], compute_advantages([group]))
    asyncio.run(incorporate_kl_penalty(data, client, 0.1, factor))
    (datum,) = map(_remove_mask, data)
    print("kl_discount_factor", factor, "- sent to the service:", *sorted(datum.loss_fn_inputs))
    advantages = datum.loss_fn_inputs["advantages"].to_torch()
    # The gradient of the documented loss, if the model gives each token a probability of a half.
    target = torch.full((len(kinds),), 0.5).log().requires_grad_()
    ratio = (target - datum.loss_fn_inputs["logprobs"].to_torch()).exp()
    (-(ratio * advantages).sum()).backward()
    for kind in dict.fromkeys(kinds):
        at = [i for i, other in enumerate(kinds) if other == kind]
        shown = [f"{value:.3f}" for value in (advantages[at] + 0).tolist()]
        print(f"  {kind}: advantages {' '.join(shown)}", end="")
        share = target.grad[at].abs().sum() / target.grad.abs().sum()
        print(f", share of the gradient {share:.2f}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
kl_discount_factor 0.0 - sent to the service: advantages logprobs target_tokens
  prompt: advantages 0.000 0.000 0.000, share of the gradient 0.00
  call: advantages 0.070 0.070, share of the gradient 0.33
  output: advantages 0.000 0.000 0.000, share of the gradient 0.00
  answer: advantages 0.070 -0.210, share of the gradient 0.67
kl_discount_factor 0.9 - sent to the service: advantages logprobs target_tokens
  prompt: advantages 0.046 0.051 0.056, share of the gradient 0.14
  call: advantages 0.063 -0.008, share of the gradient 0.11
  output: advantages -0.087 -0.096 -0.107, share of the gradient 0.26
  answer: advantages -0.119 -0.210, share of the gradient 0.49
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
