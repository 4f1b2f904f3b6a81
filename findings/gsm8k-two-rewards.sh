#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# verl and SkyRL: one GSM8K reply is right in one and wrong in the other, and a full stop is wrong
# in both.
#
# Versions: verl 0.9.1, its default_compute_score; skyrl-gym 0.4.0, its environment "gsm8k", whose
#   reward is derived from verl's. Of verl's wheel only the reward files are used: stand-ins for two
#   __init__ files, which want torch and ray, let them be imported alone.
# Guess: both give the same reward for the same reply. The number behind the last "####" is the
#   answer, wherever it stands. A full stop that ends the sentence and a dollar sign do not count,
#   nor does .00.
# Behaviour: verl takes the last "####" of the last 300 characters, SkyRL the first one of all. A
#   reply that corrects itself is right in verl alone. One that goes on for more than 300 characters
#   behind its answer is right in SkyRL alone, as is one that spoils its answer. In both, the full
#   stop is part of the number, so "#### 18." is wrong, and "#### $18" is no answer.
# Why it matters: a policy is punished for a full stop. Rewards and pass rates of the two trainers
#   cannot be compared: with one of them the policy learns to stop after the answer, with the other
#   never to take it back.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv skyrl-gym==0.4.0 packaging
uv pip install -q --python venv --no-deps verl==0.9.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import sys
import sysconfig
import types

for name in ("verl", "verl.utils"):
    package = types.ModuleType(name)
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    package.__path__ = [str(site.joinpath(*name.split(".")))]
    sys.modules[name] = package

import skyrl_gym
from verl.utils.reward_score import default_compute_score

for name, reply in (
    ("plain", "#### 18"),
    ("full stop", "#### 18."),
    ("dollar", "#### $18"),
    ("cents", "#### 18.00"),
    ("corrected", "#### 9\nI forgot the second day.\n#### 18"),
    ("spoilt", "#### 18\nI forgot the second day.\n#### 36"),
    ("300 characters more", "#### 18\n" + "Checked. " * 34),
):
    environment = skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": "18"}})
    skyrl = environment.step(reply)["reward"]
    verl = default_compute_score("openai/gsm8k", reply, "18")
    print(f"{name}: verl {float(verl)}, SkyRL {float(skyrl)}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
plain: verl 1.0, SkyRL 1.0
full stop: verl 0.0, SkyRL 0.0
dollar: verl 0.0, SkyRL 0.0
cents: verl 0.0, SkyRL 0.0
corrected: verl 1.0, SkyRL 0.0
spoilt: verl 0.0, SkyRL 1.0
300 characters more: verl 0.0, SkyRL 1.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
