#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# autoevals: equal JSON scores 0 in ExactMatch if its keys have another order, and so does the
# example of its documentation.
#
# Version: autoevals 0.4.1.
# Guess: ExactMatch normalises JSON, as its documentation says. So two objects with the same keys
#   and values score 1, in each order of the keys, as objects or as texts. JSONDiff tells a missing
#   key from a null.
# Behaviour: both sides become texts again, with the keys in the order in which they came. The
#   module's own example, marked as 1.0 for another order with the same content, scores 0. Two JSON
#   texts are not parsed at all, so one space more scores 0. 1 and 1.0 differ, too. JSONDiff gives
#   1.0 if keys are missing whose expected value is null, even if all are missing.
# Why it matters: a tool call or an extracted record is wrong because the model named the same
#   arguments in another order. The score then measures key order and spaces. With JSONDiff, a model
#   that leaves the fields out scores the same as one that says that they are empty.
# Source: normalize_value in autoevals/value.py calls json.dumps without sort_keys; json_diff in
#   autoevals/json.py reads both objects with get.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv autoevals==0.4.1

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
from autoevals import ExactMatch, JSONDiff

person = {"name": "John", "age": 30}
turned = {"age": 30, "name": "John"}
for title, output, expected in (
    ("the documented example", person, '{"age": 30, "name": "John"}'),
    ("two objects, same order", person, dict(person)),
    ("two objects, other order", person, turned),
    ("two texts, same order", '{"age": 30}', '{"age": 30}'),
    ("two texts, one space less", '{"age":30}', '{"age": 30}'),
    ("a text and an object", '{"age":30}', {"age": 30}),
    ("1.0 and 1 in an object", {"count": 1.0}, {"count": 1}),
):
    print(f"ExactMatch, {title}: {ExactMatch()(output=output, expected=expected).score}")
print("Python's ==, other order:", person == turned)
for output, expected in (
    (person, turned),
    ({"name": "John"}, {"name": "John", "phone": None}),
    ({}, {"name": None, "phone": None}),
    ({}, {"name": "John"}),
):
    score = JSONDiff()(output=output, expected=expected).score
    print(f"JSONDiff, {output} for {expected}: {score}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
ExactMatch, the documented example: 0
ExactMatch, two objects, same order: 1
ExactMatch, two objects, other order: 0
ExactMatch, two texts, same order: 1
ExactMatch, two texts, one space less: 0
ExactMatch, a text and an object: 1
ExactMatch, 1.0 and 1 in an object: 0
Python's ==, other order: True
JSONDiff, {'name': 'John', 'age': 30} for {'age': 30, 'name': 'John'}: 1.0
JSONDiff, {'name': 'John'} for {'name': 'John', 'phone': None}: 1.0
JSONDiff, {} for {'name': None, 'phone': None}: 1.0
JSONDiff, {} for {'name': 'John'}: 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
