#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# eval-protocol: its accuracy reward gives 1.0 for 2025 instead of 2026 and for 314 instead of 3149,
# and reads the first equation of a solution as its answer.
#
# Version: eval-protocol 0.3.33, its accuracy_reward (also in cosine_scaled_accuracy_length_reward),
#   with stand-ins for modules that this does not need.
# Guess: a number is right if it is equal, apart from rounding. The final answer is what counts.
# Behaviour: an error below 0.1% scores 1, below 1% 0.9, which the metrics call a success, below 5%
#   0.8, and below 30% at least 0.3. All numbers that begin with 314 are equal, as if they were pi.
#   The number after the first "answer is" or, without one, after the first "=" is the answer, and a
#   box is looked for only then, so a solution that ends in a box is judged by its first step. A
#   number ends at a comma, so 1,000 is 1.
# Why it matters: as an RL reward, years, counts and ids are nearly right whatever they are, and a
#   model that shows its work is punished. math_reward of the same package takes 2025 for 2026, too,
#   and is right in the other cases.
# Source: extract_math_expression and compare_math_expressions of eval_protocol/rewards/accuracy.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv pydantic==2.14.4 openai==3.57.0 requests==2.34.2
uv pip install -q --python venv --no-deps eval-protocol==0.3.33

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types
import warnings
from unittest.mock import MagicMock

warnings.simplefilter("ignore")
(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/eval_protocol")
# The packages themselves import the clients of all providers.
for name in "eval_protocol", "eval_protocol.rewards":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]
for name in "mcp", "mcp.client", "mcp.client.session", "mcp.types", "eval_protocol.resources":
    sys.modules[name] = MagicMock()
sys.modules["eval_protocol.get_pep440_version"] = MagicMock(get_pep440_version=lambda *args: "0")

from eval_protocol.models import Message
from eval_protocol.rewards.accuracy import accuracy_reward
from eval_protocol.rewards.math import math_reward


def show(reply, answer):
    messages = [Message(role="user", content="?"), Message(role="assistant", content=reply)]
    truth = [Message(role="assistant", content=answer)]
    result = accuracy_reward(messages, ground_truth=truth)
    success = result.metrics["answer_accuracy"].is_score_valid
    other = math_reward(messages, ground_truth=answer).score
    print(f"{answer}: {reply!r} {result.score:.1f} ({success}), math_reward {other:.1f}")


show("The answer is 2026.", "2026")
show("The answer is 2025", "2026")
show("The answer is 2010", "2026")
show("The answer is 103", "100")
show("The answer is 125", "100")
show("The answer is 314", "3149")
show("2 + 2 = 4, so we need the square. \\boxed{16}", "16")
show("2 + 2 = 4, so we need the square. \\boxed{16}", "4")
show("The answer is 1,000", "1000")
show("The answer is 1,000", "1")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
2026: 'The answer is 2026.' 1.0 (True), math_reward 1.0
2026: 'The answer is 2025' 1.0 (True), math_reward 1.0
2026: 'The answer is 2010' 0.9 (True), math_reward 0.0
100: 'The answer is 103' 0.8 (False), math_reward 0.0
100: 'The answer is 125' 0.3 (False), math_reward 0.0
3149: 'The answer is 314' 1.0 (True), math_reward 0.0
16: '2 + 2 = 4, so we need the square. \\boxed{16}' 0.0 (False), math_reward 1.0
4: '2 + 2 = 4, so we need the square. \\boxed{16}' 1.0 (True), math_reward 0.0
1000: 'The answer is 1,000' 0.0 (False), math_reward 1.0
1: 'The answer is 1,000' 1.0 (True), math_reward 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
