#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# NeMo Gym: two equal texts in a tool call have a similarity of 0.5, so a threshold of 0.6 refuses
# the expected call itself, and the threshold of its configs accepts other calls.
#
# Version: nemo-gym 0.7.0, the ActionComparator of single_step_tool_use_with_argument_comparison
#   with thresholds from its own configs.
# Guess: equal texts have a similarity of 1, as the comment says ("Jaccard similarity"), so a
#   threshold of 0.9 allows small differences, and one of 0.3 asks for a third of the words. 5 and
#   5.0 are one JSON number; true and 1 are different.
# Behaviour: the number of common words is divided by the words of both texts together, so 0.5 is
#   the most. Each threshold over 0.5 refuses every text of two words or more, even an equal one.
#   The configs use 0.1 and 0.3, which stand for 0.2 and 0.6, and 0.0 for software engineering,
#   where every text of two words equals every other. Order and case of words do not count, but a
#   text of one word must be equal to the last blank. 5 is refused for 5.0, and true is accepted for
#   1.
# Why it matters: these configs belong to the published Nemotron RL datasets. With 0.0 the policy is
#   rewarded for any command of two words or more in the right tool. Whoever raises the threshold
#   for stricter rewards gets a reward of 0 for all calls with texts.
# Source: compare_tool_call_arguments of resources_servers/
#   single_step_tool_use_with_argument_comparison/common/verification_utils.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv pydantic==2.14.4 pyyaml==6.0.4
# It asks for Python 3.13.14, but this module runs with any 3.13.
uv pip install -q --python-version 3.13.14 --no-deps --target packages nemo-gym==0.7.0

seen=$(PYTHONPATH=packages venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib
import json
import pathlib

import yaml

SERVER = "single_step_tool_use_with_argument_comparison"
comparison = importlib.import_module(f"resources_servers.{SERVER}.common.verification_utils")


def call(value):
    arguments = json.dumps({"x": value})
    return comparison.FunctionCallAction(type="function_call", name="run", arguments=arguments)


def show(expected, actual):
    found = []
    for threshold in 0.0, 0.1, 0.3, 0.5, 0.6, 0.9:
        config = comparison.ToolCallComparatorConfig(word_count_similarity_threshold=threshold)
        comparator = comparison.ActionComparator(config=config)
        reward = comparator.compare_action(call(expected), call(actual)).reward
        found.append(f"{threshold}: {reward:.0f}")
    print(f"{json.dumps(expected)} and {json.dumps(actual)}:", ", ".join(found))


configs = pathlib.Path("packages/resources_servers", SERVER, "configs")
for path in sorted(configs.glob("*.yaml")):
    for entry in yaml.safe_load(path.read_text()).values():
        if server := entry.get("resources_servers"):
            threshold = server[SERVER]["tool_call_comparator_config"]
            name = path.stem.removesuffix(SERVER) or "(no prefix)"
            print(name, threshold["word_count_similarity_threshold"])
show("git push origin main", "git push origin main")
show("git push origin main", "rm -r build")
show("Cancel order 12 of user 7", "Refund order 34 of user 9")
show("cp old new", "cp NEW OLD")
show("pytest", "Pytest")
show("pytest", "pytest ")
show(5.0, 5)
show(1, True)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
droid_pivot_ 0.0
parallel_tool_calls_ 0.1
search_pivot_ 0.3
(no prefix) 0.1
swe_pivot_ 0.0
toolcall_schema_ 0.1
"git push origin main" and "git push origin main": 0.0: 1, 0.1: 1, 0.3: 1, 0.5: 1, 0.6: 0, 0.9: 0
"git push origin main" and "rm -r build": 0.0: 1, 0.1: 0, 0.3: 0, 0.5: 0, 0.6: 0, 0.9: 0
"Cancel order 12 of user 7" and "Refund order 34 of user 9": 0.0: 1, 0.1: 1, 0.3: 0, 0.5: 0, 0.6: 0, 0.9: 0
"cp old new" and "cp NEW OLD": 0.0: 1, 0.1: 1, 0.3: 1, 0.5: 1, 0.6: 0, 0.9: 0
"pytest" and "Pytest": 0.0: 0, 0.1: 0, 0.3: 0, 0.5: 0, 0.6: 0, 0.9: 0
"pytest" and "pytest ": 0.0: 0, 0.1: 0, 0.3: 0, 0.5: 0, 0.6: 0, 0.9: 0
5.0 and 5: 0.0: 0, 0.1: 0, 0.3: 0, 0.5: 0, 0.6: 0, 0.9: 0
1 and true: 0.0: 1, 0.1: 1, 0.3: 1, 0.5: 1, 0.6: 1, 0.9: 1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
