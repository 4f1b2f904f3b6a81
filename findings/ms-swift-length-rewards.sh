#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# ms-swift: a right rollout of several turns gets the highest cosine reward if it is twice too long,
# and soft_overlong punishes long rollouts without a limit.
#
# Version: ms-swift 4.6.0, the reward functions cosine and soft_overlong with the default values, a
#   maximum of 1000 tokens and a soft_cache_length of 200 (which has no default), and a stand-in for
#   its inference engine.
# Guess: the cosine reward goes from cosine_min_len_value to cosine_max_len_value, and stays there
#   or is a penalty beyond cosine_max_len, as in the paper that it cites. soft_overlong is between 0
#   and -1, as in DAPO and TRL.
# Behaviour: beyond cosine_max_len the cosine turns back: at twice the length a right rollout has
#   the reward of an empty one, 1.0, and at three times it is at the minimum again. soft_overlong
#   goes on in a straight line, here to -11 for three times the length. Both add up the tokens of
#   all turns, but the maximum is max_completion_length by default, which limits each turn
#   (completion_length_limit_scope is per_round).
# Why it matters: with tools, rollouts are longer than one turn's limit as a rule. Then longer right
#   rollouts are rewarded more, where the option is there to make them shorter, and one reward of
#   -11 decides the advantages of its whole group.
# Source: CosineReward.cosfn and SoftOverlong of swift/rewards/orm.py, the defaults in
#   swift/rlhf_trainers/arguments.py and args_mixin.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv --no-deps ms-swift==4.6.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import ast
import pathlib
import sys
import types
from unittest.mock import MagicMock

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/swift")
for name in "", "rewards":
    module = types.ModuleType(".".join(filter(None, ("swift", name))))
    module.__path__ = [str(root / name)]
    sys.modules[module.__name__] = module
sys.modules["swift.infer_engine"] = MagicMock()

from swift.rewards.orm import orms

# The default values of the options, read from the file that defines them.
options = {"cosine_max_len": 1000, "soft_max_length": 1000, "soft_cache_length": 200}
for node in ast.walk(ast.parse((root / "rlhf_trainers/args_mixin.py").read_text())):
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        name = node.target.id
        if name.startswith("cosine_") or name == "completion_length_limit_scope":
            options.setdefault(name, ast.literal_eval(node.value))
print(options)
arguments = types.SimpleNamespace(**options)


def show(label, *turns):
    """Prints the rewards of a rollout whose turns have the given numbers of tokens."""
    ids = [[[1] * size for size in turns]]
    values = []
    for right in 1.0, 0.0:
        cosine = orms["cosine"](arguments, accuracy_orm=lambda *texts, **others: [right])
        (reward,) = cosine(["reply"], ["solution"], response_token_ids=ids)
        values.append(f"cosine {reward:+.2f} if {'right' if right else 'wrong'}")
    (reward,) = orms["soft_overlong"](arguments)(["reply"], response_token_ids=ids)
    print(f"{label}:", ", ".join([*values, f"soft_overlong {reward:+.1f}"]))


show("empty               ", 0)
show("one turn of 500     ", 500)
show("one turn of 1000    ", 1000)
show("three turns of 500  ", 500, 500, 500)
show("four turns of 500   ", 500, 500, 500, 500)
show("three turns of 1000 ", 1000, 1000, 1000)
show("four turns of 1000  ", 1000, 1000, 1000, 1000)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
{'cosine_max_len': 1000, 'soft_max_length': 1000, 'soft_cache_length': 200, 'cosine_min_len_value_wrong': -0.5, 'cosine_max_len_value_wrong': 0.0, 'cosine_min_len_value_correct': 1.0, 'cosine_max_len_value_correct': 0.5, 'completion_length_limit_scope': 'per_round'}
empty               : cosine +1.00 if right, cosine -0.50 if wrong, soft_overlong +0.0
one turn of 500     : cosine +0.75 if right, cosine -0.25 if wrong, soft_overlong +0.0
one turn of 1000    : cosine +0.50 if right, cosine +0.00 if wrong, soft_overlong -1.0
three turns of 500  : cosine +0.75 if right, cosine -0.25 if wrong, soft_overlong -3.5
four turns of 500   : cosine +1.00 if right, cosine -0.50 if wrong, soft_overlong -6.0
three turns of 1000 : cosine +0.50 if right, cosine +0.00 if wrong, soft_overlong -11.0
four turns of 1000  : cosine +1.00 if right, cosine -0.50 if wrong, soft_overlong -16.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
