#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# NeMo Evaluator: for the answer 20, "20." is wrong, and 2 and 2000 are right; an empty reply is
# right for every text; and a list with one item is not a list.
#
# Version: nemo-evaluator 0.3.0, its scorers numeric_match (used for MGSM) and fuzzy_match (DROP),
#   and validate_json_schema.
# Guess: the last number of the reply is compared as a number. fuzzy_match asks for the answer in
#   the reply. A reply that is JSON is read as it is.
# Behaviour: zeros at the end are removed from integers too, so 20 is 2, and 0 is the empty text,
#   which is also what a reply without a number gives. With a full stop nothing is removed, so "20."
#   is not 20. fuzzy_match also asks whether the reply is in the answer, after articles and
#   punctuation are removed: an empty reply and "A" are in all. The first brace of a reply is looked
#   for before the first bracket, so [{"a": 1}] is read as {"a": 1}, but a list of two is a list.
# Why it matters: many answers of MGSM end in 0. A model that gives up, or whose reply was lost,
#   scores 1 in DROP. Whether a sentence ends with a full stop decides.
# Source: numeric_match of nemo_evaluator/scoring/pattern.py, fuzzy_match of text.py, extract_json
#   of json_schema.py, and _load_mgsm of benchmarks/mgsm.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv --no-deps nemo-evaluator==0.3.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types

# The package itself imports all of its environments.
(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/nemo_evaluator")
package = sys.modules["nemo_evaluator"] = types.ModuleType("nemo_evaluator")
package.__path__ = [str(root)]

from nemo_evaluator.scoring import ScorerInput, get_scorer, validate_json_schema


def show(name, target, *replies):
    scorer = get_scorer(name)
    found = []
    for reply in replies:
        right = scorer(ScorerInput(response=reply, target=target))["correct"]
        found.append(f"{reply!r} {'right' if right else 'wrong'}")
    print(f"{name}, {target}:", ", ".join(found))


show("numeric_match", "20", "It is 20", "It is 20.", "It is 2", "It is 2000", "It is 30")
show("numeric_match", "0", "It is 0", "I do not know.", "")
show("fuzzy_match", "Denver Broncos", "The Denver Broncos.", "", "A", "...", "Chicago Bears")
schema = {"type": "array", "items": {"type": "object"}}
for reply in '[{"a": 1}, {"a": 2}]', '[{"a": 1}]':
    found = validate_json_schema(reply, schema)
    print(f"list of objects: {reply}", found["score"], found["errors"])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
numeric_match, 20: 'It is 20' right, 'It is 20.' wrong, 'It is 2' right, 'It is 2000' right, 'It is 30' wrong
numeric_match, 0: 'It is 0' right, 'I do not know.' right, '' right
fuzzy_match, Denver Broncos: 'The Denver Broncos.' right, '' right, 'A' right, '...' right, 'Chicago Bears' wrong
list of objects: [{"a": 1}, {"a": 2}] 1.0 []
list of objects: [{"a": 1}] 0.0 ['$: expected array, got dict']
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
