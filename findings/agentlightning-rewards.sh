#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Agent Lightning: a reward of true is no reward and counts as 0, of several rewards only the last
# counts, and all rewards are rounded to bfloat16, so 1001 and 1003 become 1000 and 1004.
#
# Versions: agentlightning 1.0.2: its schema, the server's triplet format, the rollout manager and
#   the rollout adapter with the default reward_fillna_value, and a stand-in for verl's DataProto;
#   torch 2.13.0, tensordict 0.15.3.
# Guess: true is 1.0, as in the schema RewardData, whose value is a float. If an environment gives a
#   reward per step, each step is trained with its own, or all with the sum, since each turn has a
#   field for a reward. A reward of 0.993 is trained as 0.993: rewards are float32, as in verl.
# Behaviour: the server stores any value. The manager accepts a number, but neither true nor a text.
#   In their place the adapter fills in 0 (reward_fillna_value), without a warning. Only the last
#   reward of a rollout is read, and all its turns get it. The adapter stores the rewards in
#   bfloat16, which has eight significant bits. So 0.991 and 0.993 are one reward, and 1001 and 1003
#   differ by 4.
# Why it matters: a grader that ends in "return answer == expected" trains on zeros alone. That
#   looks like a model that solves nothing, except that n_rollouts_w_reward is 0. With rewards per
#   step, the earlier ones are lost. Large rewards, for instance scores of a game, are rounded
#   before the baseline is subtracted, so differences vanish or double.
# Source: _as_reward_value and _build_completed_rollout of
#   agentlightning/verl/agl_rollout_manager.py, get_train_data_batch of rollout_adapter.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 tensordict==0.15.3 numpy==2.4.6 pydantic==2.14.4 fastapi==0.165.0 httpx==0.28.1 \
  httpx-retries==0.6.0
uv pip install -q --python venv --no-deps agentlightning==1.0.2

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import contextlib
import importlib.util
import io
import pathlib
import sys
import sysconfig
import types

import torch

# The packages themselves import verl and the trainer.
site = pathlib.Path(sysconfig.get_paths()["purelib"])
for name in "agentlightning", "agentlightning.verl", "agentlightning.server.routes":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(site / name.replace(".", "/"))]
verl = sys.modules["verl"] = types.ModuleType("verl")
verl.DataProto = lambda batch: types.SimpleNamespace(batch=batch, non_tensor_batch={})

from agentlightning.schemas import Event, RewardData, Rollout, RolloutConfig
from agentlightning.server.routes.events import _to_triplet_format
from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase, EnqueuedRollout
from agentlightning.verl.rollout_adapter import RolloutAdapter


class Manager(AglRolloutManagerBase):
    """The manager, with the events of one rollout in place of a server."""

    def __init__(self, events):
        self.events = events

    def _fetch_rollout_events(self, rollout_id):
        return self.events, [_to_triplet_format(event) for event in self.events]


def trained(*values):
    """Returns the reward that is trained for a rollout with these events, and how many had one."""
    tokens = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3, 4]}]}
    events = [("model_request", {"response": tokens, "status": "ok"})]
    events += [("reward", {"value": value}) for value in values]
    events = [
        Event(event_type=kind, rollout_id="r", attempt_id="0", timestamp=1.0, data=data)
        for kind, data in events
    ]
    status = {"state": "succeeded", "created_at": 1.0, "updated_at": 2.0}
    rollout = Rollout(rollout_id="r", input="?", config=RolloutConfig(), status=status)
    enqueued = EnqueuedRollout(
        data_id="d", rollout_id="r", step=0, sample_idx_in_step=0, enqueue_time=1.0
    )
    completed = Manager(events)._build_completed_rollout(enqueued, rollout)
    adapter = RolloutAdapter(
        max_prompt_length=8,
        max_response_length=8,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    with contextlib.redirect_stdout(io.StringIO()):
        data, metrics = adapter.get_train_data_batch([completed])
    return data.batch["token_level_scores"].sum().item(), metrics["training/n_rollouts_w_reward"]


print("the schema reads true as", RewardData(value=True).value)
for values in (
    ((1.0,), (1,), (True,), ("1.0",), ()),
    ((0.25, 0.25, 0.5), (1.0, 0.0)),
    ((0.991,), (0.993,), (1001,), (1003,)),
):
    for rewards in values:
        reward, count = trained(*rewards)
        print(f"rewards {list(rewards)}: trained as {reward}, rollouts with a reward: {count}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
the schema reads true as 1.0
rewards [1.0]: trained as 1.0, rollouts with a reward: 1
rewards [1]: trained as 1.0, rollouts with a reward: 1
rewards [True]: trained as 0.0, rollouts with a reward: 0
rewards ['1.0']: trained as 0.0, rollouts with a reward: 0
rewards []: trained as 0.0, rollouts with a reward: 0
rewards [0.25, 0.25, 0.5]: trained as 0.5, rollouts with a reward: 1
rewards [1.0, 0.0]: trained as 0.0, rollouts with a reward: 1
rewards [0.991]: trained as 0.9921875, rollouts with a reward: 1
rewards [0.993]: trained as 0.9921875, rollouts with a reward: 1
rewards [1001]: trained as 1000.0, rollouts with a reward: 1
rewards [1003]: trained as 1004.0, rollouts with a reward: 1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
