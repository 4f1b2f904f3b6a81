#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# openevals: for JSON, a right empty list scores 0 with "average", 1 with "all", and nothing without
# an aggregator; with same_elements the score depends on the order.
#
# Version: openevals 0.2.2, its create_json_match_evaluator; langchain-core 1.8.3.
# Guess: outputs that equal the reference score 1, with each aggregator. With
#   list_match_mode="same_elements", the default, the order of a list does not count.
# Behaviour: the mean of no scores is 0, so an empty list or object that is right is a failure, and
#   with aggregator=None there is no score at all. "all" of none is 1. If two lists are not quite
#   equal, each item takes the reference with the most equal keys, one after the other, and keeps it
#   from a later item that equals it: the same items in another order score 0.50 or 0.75. true
#   equals 1.
# Why it matters: "no entities in this text" is a common right answer of an extraction, and counts
#   as the worst one. With average, a model that always returns one made-up item and one that
#   returns the right empty list are the same.
# Source: _prepare_parameters and _aggregate_results of openevals/json/match.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv openevals==0.2.2 langchain-core==1.8.3

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import json

from openevals.json import create_json_match_evaluator


def show(outputs, reference, **options):
    results = create_json_match_evaluator(**options)(
        outputs=outputs, reference_outputs=reference
    )
    results = results if isinstance(results, list) else [results]
    scores = ", ".join(f"{result['key']} {result['score']}" for result in results)
    print(f"{json.dumps(outputs)} for {json.dumps(reference)}: {scores or 'no score'}")


for options in (
    {"aggregator": "average", "list_aggregator": "average"},
    {"aggregator": "all", "list_aggregator": "average"},
    {"aggregator": "all", "list_aggregator": "all"},
    {"aggregator": None},
):
    print(*(f"{name}={value}" for name, value in options.items()))
    show([], [], **options)
    show([{"name": "Ann"}], [], **options)
print("aggregator=average, objects")
show({}, {}, aggregator="average")
show({"open": True}, {"open": 1}, aggregator="average")
print("aggregator=average, the same two items in two orders")
first, second = {"name": "Ann", "age": 1}, {"name": "Ann", "age": 2}
reference = [second, {"name": "Ann", "age": 3}]
show([first, second], reference, aggregator="average", list_aggregator="average")
show([second, first], reference, aggregator="average", list_aggregator="average")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
aggregator=average list_aggregator=average
[] for []: json_match:average 0
[{"name": "Ann"}] for []: json_match:average 0.0
aggregator=all list_aggregator=average
[] for []: json_match:all 0
[{"name": "Ann"}] for []: json_match:all 0.0
aggregator=all list_aggregator=all
[] for []: json_match:all 1
[{"name": "Ann"}] for []: json_match:all 0
aggregator=None
[] for []: no score
[{"name": "Ann"}] for []: json_match:name 0
aggregator=average, objects
{} for {}: json_match:average 0
{"open": true} for {"open": 1}: json_match:average 1.0
aggregator=average, the same two items in two orders
[{"name": "Ann", "age": 1}, {"name": "Ann", "age": 2}] for [{"name": "Ann", "age": 2}, {"name": "Ann", "age": 3}]: json_match:average 0.5
[{"name": "Ann", "age": 2}, {"name": "Ann", "age": 1}] for [{"name": "Ann", "age": 2}, {"name": "Ann", "age": 3}]: json_match:average 0.75
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
