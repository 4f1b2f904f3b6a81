#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# ART: on Tinker, only the last reply of a trajectory in messages_and_choices is trained, and
# without a system message the model gets no tools.
#
# Version: openpipe-art 0.5.23, the data functions of its TinkerNativeBackend, with stand-ins for
#   torch, tinker and the renderer, which writes a character as a token.
# Guess: each Choice in messages_and_choices is trained, as ART's LocalBackend does. The tools of a
#   request are in the prompt, with or without a system message.
# Behaviour: only the last Choice of messages_and_choices is trained. The replies before it, which
#   are the tool calls, are part of its prompt. The tools are put into the prompt only if the first
#   message is the system's. Otherwise they are dropped without a warning. The backend's server
#   calls the same function, so the model is not told of its tools when it is sampled either.
# Why it matters: ART's skill for training, which is in the package and names two other backends,
#   recommends messages_and_choices for tool use over several turns. On Tinker such a rollout trains
#   only its final answer, not the tool calls that earned the reward. It still gives one datum, and
#   there is no warning.
# Source: convert_openai_messages_to_renderer_format, find_last_choice and history_to_datum of
#   art/tinker_native/data.py; art/skills/train-rl/SKILL.md.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv openai==2.14.0 anthropic==0.77.0 pydantic==2.14.4 numpy==2.5.5
uv pip install -q --python venv --no-deps openpipe-art==0.5.23

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import json
import pathlib
import sys
import types
from unittest.mock import MagicMock

import numpy

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/art")
for name in "art", "art.tinker_native":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]


class Tensor(numpy.ndarray):
    def std(self, unbiased):
        return numpy.asarray(self).std(ddof=int(unbiased))


tinker = sys.modules["tinker"] = MagicMock(Datum=types.SimpleNamespace)
tinker.ModelInput.from_ints = lambda tokens: tokens
tinker.TensorData.from_torch = list
sys.modules["tinker_cookbook"] = MagicMock()
torch = sys.modules["torch"] = MagicMock()
torch.tensor = lambda values, dtype=None: numpy.array(values, dtype=float).view(Tensor)

from openai.types.chat.chat_completion import Choice
from art.tinker_native.data import trajectory_groups_to_datums
from art.trajectories import Trajectory, TrajectoryGroup


class Renderer:
    def create_conversation_prefix_with_tools(self, tools, system_prompt):
        names = ", ".join(tool["name"] for tool in tools)
        return [{"role": "system", "content": f"{system_prompt} Tools: {names}."}]

    def build_generation_prompt(self, messages):
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return types.SimpleNamespace(to_ints=lambda: list(map(ord, text + "<assistant>")))


def choice(text):
    tokens = [{"token": f"token_id:{ord(c)}", "logprob": -0.5, "top_logprobs": []} for c in text]
    message = {"role": "assistant", "content": text}
    parts = {"index": 0, "finish_reason": "stop", "message": message}
    return Choice.model_validate({**parts, "logprobs": {"content": tokens}})


tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
system = {"role": "system", "content": "You fix code."}
for start in ([system], []):
    rollouts = []
    for reward in (0.0, 1.0):
        turns = [{"role": "user", "content": "Fix it."}, choice("CALL read")]
        turns += [{"role": "tool", "tool_call_id": "1", "content": "x = 1"}, choice("Done.")]
        rollouts.append(Trajectory(messages_and_choices=start + turns, tools=tools, reward=reward))
    for datum in trajectory_groups_to_datums([TrajectoryGroup(rollouts)], Renderer(), None):
        inputs = datum.loss_fn_inputs
        ids = [datum.model_input[0], *map(int, inputs["target_tokens"])]
        trained = [chr(token) for token, mask in zip(ids[1:], inputs["mask"]) if mask]
        print("".join(map(chr, ids)))
        print("  trained:", "".join(trained), f"- advantage {inputs['advantages'][-1]:g}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
<system>You fix code. Tools: read.<user>Fix it.<assistant>CALL read<tool>x = 1<assistant>Done.
  trained: Done. - advantage -1
<system>You fix code. Tools: read.<user>Fix it.<assistant>CALL read<tool>x = 1<assistant>Done.
  trained: Done. - advantage 1
<user>Fix it.<assistant>CALL read<tool>x = 1<assistant>Done.
  trained: Done. - advantage -1
<user>Fix it.<assistant>CALL read<tool>x = 1<assistant>Done.
  trained: Done. - advantage 1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
