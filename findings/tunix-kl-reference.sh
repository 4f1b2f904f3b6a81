#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Tunix: GRPO's KL penalty has the same gradient for every reference model.
#
# Versions: google-tunix 0.1.7, its grpo_loss_fn and the defaults of its GRPOConfig, with jax
#   0.12.0.1, flax 0.12.12 and a model of five tokens; stand-ins for the modules that load models.
# Guess: with beta above 0, as by default, the loss pulls the policy to the reference model. GRPO's
#   paper does so, and the docstring says that the term keeps the policy near that model. If the
#   policy is the reference, the term has no gradient.
# Behaviour: kl_loss_mode is "kl" by default, which adds beta * (logp - reference logp) to the
#   loss. The reference's logprobs are constants there, so the gradient is that of beta * logp: the
#   same for a reference that prefers the sampled token, for one that avoids it and for the policy
#   itself. It makes each sampled token less probable, whatever it is, which mostly averages out.
#   The KL in the log does depend on the reference, and so does the gradient of "low_var_kl", which
#   GRPO's paper uses.
# Why it matters: the default run pays for a reference model and its forward passes, which do not
#   hold the policy. A larger beta does not hold it either, since it scales the same gradient.
# Source: GRPOConfig of tunix/rl/grpo/grpo_learner.py and of rl/agentic/agentic_grpo_learner.py,
#   grpo_loss_fn of tunix/rl/algo_core.py, compute_kl_divergence of tunix/rl/common.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv jax==0.12.0.1 flax==0.12.12
uv pip install -q --python venv --no-deps google-tunix==0.1.7

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types
from unittest.mock import MagicMock

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/tunix")
for name in "tunix", "tunix.rl", "tunix.rl.grpo", "tunix.sft", "tunix.oss":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]
for name in "humanize", "tunix.oss.utils", "tunix.rl.rl_cluster":
    sys.modules[name] = sys.modules[name.rpartition(".")[0] or name].utils = MagicMock()
learner = sys.modules["tunix.rl.rl_learner"] = MagicMock()
learner.RLLearner = type("RLLearner", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
for name in "rl_utils", "reward_manager", "utils":
    sys.modules["tunix.rl." + name] = MagicMock()

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl.algo_core import grpo_loss_fn
from tunix.rl.grpo.grpo_learner import GRPOConfig


class Model(nnx.Module):
    """Gives each of five tokens a probability of 0.2."""

    def __init__(self):
        self.logits = nnx.Param(jnp.zeros(5))

    def __call__(self, tokens, **options):
        return jnp.broadcast_to(self.logits[...], (*tokens.shape, 5)), None


def show(label, probability, **options):
    config = GRPOConfig(**options)
    config.temperature = 1.0  # The learner takes it from the rollout's options.
    sample = types.SimpleNamespace(
        prompt_ids=jnp.array([[1, 2]]),
        completion_ids=jnp.array([[3]]),
        completion_mask=jnp.ones((1, 1)),
        advantages=jnp.zeros(1),
        old_per_token_logps=None,
        ref_per_token_logps=jnp.log(jnp.full((1, 1), probability)),
    )
    loss = nnx.value_and_grad(lambda model: grpo_loss_fn(model, sample, config, 0, 4), has_aux=True)
    (_, logged), gradient = loss(Model())
    (values,) = jax.tree.leaves(gradient)
    shown = " ".join(f"{value:.3f}" for value in (values + 0).tolist())
    print(f"  reference {label}: logged KL {logged['kl']:.2f}, gradient {shown}")


for options in ({}, {"kl_loss_mode": "low_var_kl"}):
    config = GRPOConfig(**options)
    print(f"beta {config.beta}, kl_loss_mode {config.kl_loss_mode!r}, an advantage of 0")
    show("as the policy, 0.2", 0.2, **options)
    show("prefers the token, 0.8", 0.8, **options)
    show("avoids the token, 0.01", 0.01, **options)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
beta 0.04, kl_loss_mode 'kl', an advantage of 0
  reference as the policy, 0.2: logged KL 0.00, gradient -0.008 -0.008 -0.008 0.032 -0.008
  reference prefers the token, 0.8: logged KL -1.39, gradient -0.008 -0.008 -0.008 0.032 -0.008
  reference avoids the token, 0.01: logged KL 3.00, gradient -0.008 -0.008 -0.008 0.032 -0.008
beta 0.04, kl_loss_mode 'low_var_kl', an advantage of 0
  reference as the policy, 0.2: logged KL 0.00, gradient 0.000 0.000 0.000 0.000 0.000
  reference prefers the token, 0.8: logged KL 1.61, gradient 0.024 0.024 0.024 -0.096 0.024
  reference avoids the token, 0.01: logged KL 2.05, gradient -0.008 -0.008 -0.008 0.030 -0.008
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
