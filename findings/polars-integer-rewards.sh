#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# polars: after 100 rewards of 0, a reward of 0.9 is 0, and logprobs are cut by the first rollout.
#
# Version: polars 2.1.0, with its defaults. The rows are what json.loads gives for a server or a
#   grader that writes 0 for 0.0, as JavaScript and Go do.
# Guess: the type of a column comes from the first 100 rows (infer_schema_length). A later row that
#   does not fit is an error, since strict is True by default ("Throw an error if any data value
#   does not exactly match the given or inferred data type"). All readers do the same.
# Behaviour: pl.DataFrame, from rows, and pl.read_json truncate the number: 0.9 becomes 0, and 1.9
#   becomes 1. If the first rows are booleans, 0.5 becomes false. Only read_ndjson raises an error.
#   If the column is a list of lists, the first row alone decides, not the first 100: [-0.25, -1.5]
#   after [0, -1] becomes [0, -1]. pl.DataFrame and read_ndjson drop a key that first appears in a
#   nested object after 100 rows; here, read_json raises the error. If the first 100 lists are
#   empty, read_ndjson turns each item of later lists into null.
# Why it matters: partial rewards after a run of failures are counted as failures, and the mean is
#   too low. Logprobs lose their fraction, so the ratios of importance sampling are wrong. Which
#   rows are affected depends on the order of the rollouts.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv polars==2.1.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json

import polars

READERS = {
    "DataFrame": polars.DataFrame,
    "read_json": lambda rows: polars.read_json(json.dumps(rows).encode()),
    "read_ndjson": lambda rows: polars.read_ndjson("\n".join(map(json.dumps, rows)).encode()),
}


def show(label, make):
    try:
        print(f"  {label}:", json.dumps(make().to_series().to_list()[-1]))
    except Exception as error:
        print(f"  {label}: {type(error).__name__}")


for count, first, last in (
    (99, 0, 0.9),
    (100, 0, 0.9),
    (100, 1, 1.9),
    (100, False, 0.5),
    (100, {"cmd": "ls"}, {"cmd": "ls", "cwd": "/app"}),
    (100, [], [-0.25]),
):
    print(f"{count} rows of {json.dumps(first)}, then {json.dumps(last)}")
    rows = [{"column": first}] * count + [{"column": last}]
    for name, reader in READERS.items():
        show(name, lambda: reader(rows))
for first, last in (([0, -1], [-0.25, -1.5]), ([0.0, -1], [-0.25, -1.5])):
    print(f"column of {json.dumps(first)}, then {json.dumps(last)}")
    show("DataFrame", lambda: polars.DataFrame({"logprobs": [first, last]}))
    show("Series", lambda: polars.Series("logprobs", [first, last]).to_frame())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
99 rows of 0, then 0.9
  DataFrame: 0.9
  read_json: 0.9
  read_ndjson: 0.9
100 rows of 0, then 0.9
  DataFrame: 0
  read_json: 0
  read_ndjson: ComputeError
100 rows of 1, then 1.9
  DataFrame: 1
  read_json: 1
  read_ndjson: ComputeError
100 rows of false, then 0.5
  DataFrame: false
  read_json: ComputeError
  read_ndjson: ComputeError
100 rows of {"cmd": "ls"}, then {"cmd": "ls", "cwd": "/app"}
  DataFrame: {"cmd": "ls"}
  read_json: ComputeError
  read_ndjson: {"cmd": "ls"}
100 rows of [], then [-0.25]
  DataFrame: [-0.25]
  read_json: ComputeError
  read_ndjson: [null]
column of [0, -1], then [-0.25, -1.5]
  DataFrame: [0, -1]
  Series: [0, -1]
column of [0.0, -1], then [-0.25, -1.5]
  DataFrame: [-0.25, -1.5]
  Series: [-0.25, -1.5]
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
