#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# verl, SkyRL and Inspect: an exact match takes "A" for an article, and 5 for -5.
#
# Versions: verl 0.9.1, its reward for search tasks; skyrl-gym 0.4.0, the reward of its environment
#   "search"; inspect-ai 0.3.285, its scorer exact(). Of verl's wheel only the one file is used.
# Guess: an exact match ignores case, spaces and perhaps a full stop. The reply A is right for the
#   target A and no other reply is. A number is right if it is the same number.
# Behaviour: all three take out the words a, an and the, and punctuation. For verl and SkyRL nothing
#   is left of A, so an empty reply is right, and so is any reply of articles and punctuation. For
#   Inspect no reply at all is right for A, not even A. The other letters work. A minus sign goes
#   too: -5 is right for 5, "x > 1" for "x < 1", 3/4 for 34; in verl and SkyRL also 1.5 for 15.
# Why it matters: a multiple-choice set has A for a quarter of its answers. With verl or SkyRL an
#   empty answer earns them, and a policy learns to say nothing. With Inspect the best possible
#   accuracy is three quarters.
# Source: normalize_answer of verl/utils/reward_score/search_r1_like_qa_em.py and of
#   skyrl_gym/envs/search/utils.py; _normalize, _tokenize and max_exact_score of
#   inspect_ai/scorer/_classification.py. The rule is that of SQuAD, whose answers are phrases.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv skyrl-gym==0.4.0 inspect-ai==0.3.285
uv pip install -q --python venv --no-deps verl==0.9.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import pathlib
import runpy
import sysconfig

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, exact
from inspect_ai.solver import TaskState
from skyrl_gym.envs.search.utils import compute_score

site = pathlib.Path(sysconfig.get_paths()["purelib"])
verl = runpy.run_path(str(site / "verl/utils/reward_score/search_r1_like_qa_em.py"))


def inspect(reply, target):
    output = ModelOutput.from_content("model", reply)
    state = TaskState("model", 1, 1, "question", [], output=output)
    return asyncio.run(exact()(state, Target(target))).value


for target, reply in (
    ("B", "b."),
    ("B", ""),
    ("A", "A"),
    ("A", ""),
    ("A", "The"),
    ("5", "-5"),
    ("15", "1.5"),
    ("34", "3/4"),
    ("x < 1", "x > 1"),
):
    answer, truth = f"<answer>{reply}</answer>", {"target": [target]}
    print(
        f"target {target!r}, reply {reply!r}: verl {verl['compute_score'](answer, truth)}, "
        f"SkyRL {compute_score(answer, truth)}, Inspect {inspect(reply, target)}"
    )
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
target 'B', reply 'b.': verl 1.0, SkyRL 1.0, Inspect C
target 'B', reply '': verl 0.0, SkyRL 0.0, Inspect I
target 'A', reply 'A': verl 1.0, SkyRL 1.0, Inspect I
target 'A', reply '': verl 1.0, SkyRL 1.0, Inspect I
target 'A', reply 'The': verl 1.0, SkyRL 1.0, Inspect I
target '5', reply '-5': verl 1.0, SkyRL 1.0, Inspect C
target '15', reply '1.5': verl 1.0, SkyRL 1.0, Inspect I
target '34', reply '3/4': verl 1.0, SkyRL 1.0, Inspect C
target 'x < 1', reply 'x > 1': verl 1.0, SkyRL 1.0, Inspect C
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
