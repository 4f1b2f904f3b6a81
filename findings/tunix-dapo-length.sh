#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Tunix: DAPO's penalty for overlong replies counts characters, against limits that are tokens.
#
# Versions: google-tunix 0.1.7, the default DAPOConfig and the reward manager that calls the
#   penalty, with jax 0.12.0.1, flax 0.12.12 and stand-ins for the modules that load models.
# Guess: max_response_length 20480, which the code calls the maximum generation length, and
#   overlong_buffer_length 4096 are tokens, as in DAPO's paper. So the penalty is 0 up to 16384
#   tokens, goes down to -1 at 20480 tokens, and is never less.
# Behaviour: the reward function gets the texts and takes len(text). English has about four
#   characters for a token, so the penalty begins at about 4096 tokens. It goes on in a straight
#   line below -1: a reply of 10000 tokens, half of the limit, has -5.8, and one of 20000 tokens
#   -15.5. The learner appends the penalty to the list of rewards that it is given, so a second
#   learner made with the same list counts it twice.
# Why it matters: from about 5100 tokens on, a right reply has less reward than a short wrong one.
#   So the default run is trained towards short replies. A language with fewer characters for each
#   token is punished less.
# Source: reward_shaping and DAPOLearner of tunix/rl/grpo/dapo_learner.py; GRPOLearner passes
#   rollout_output.text.
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
    sys.modules[name] = MagicMock()
learner = sys.modules["tunix.rl.rl_learner"] = MagicMock()
learner.RLLearner = type("RLLearner", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})

from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.reward_manager import SequenceRewardManager

GRPOLearner.__init__ = lambda self, **options: None  # It would load the models.


def correct(prompts, completions, **options):
    return [float("The answer is 42." in completion) for completion in completions]


config = DAPOConfig()
print(config.overlong_buffer)
rewards = [correct]
for learners in (1, 2):
    DAPOLearner(rl_cluster=None, algo_config=config, reward_fns=rewards)
    print(f"after {learners} learner(s):", *(reward.__name__ for reward in rewards))
    manager = SequenceRewardManager(rewards, config)
    for tokens in (4000, 5000, 6000, 10000, 20000):
        # Four characters for a token.
        text = "so, " * (tokens - 5) + "The answer is 42.   "
        score = manager(["What is 6 times 7?"], [text], mode=None)["rewards"][0]
        print(f"  a right reply of {tokens} tokens: {score:.2f}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
{'enable': True, 'overlong_buffer_length': 4096, 'overlong_buffer_penalty': 1.0, 'max_response_length': 20480}
after 1 learner(s): correct reward_shaping
  a right reply of 4000 tokens: 1.00
  a right reply of 5000 tokens: 0.12
  a right reply of 6000 tokens: -0.86
  a right reply of 10000 tokens: -4.77
  a right reply of 20000 tokens: -14.53
after 2 learner(s): correct reward_shaping reward_shaping
  a right reply of 4000 tokens: 1.00
  a right reply of 5000 tokens: -0.77
  a right reply of 6000 tokens: -2.72
  a right reply of 10000 tokens: -10.53
  a right reply of 20000 tokens: -30.06
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
