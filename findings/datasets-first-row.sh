#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# datasets: Dataset.from_list keeps only the columns of the first row.
#
# Version: datasets 5.2.0.
# Guess: rows are dicts, so a key that only some rows have becomes a column that is null elsewhere.
#   Nested dicts are filled up like that, and the same rows have that column when they are read from
#   a JSON Lines file.
# Behaviour: a key that the first row lacks is dropped from all rows, without a warning. Nested
#   dicts are filled up, and from_json finds the column in a later row.
# Why it matters: rollouts are rows like these. Of a list whose first trial went well, the errors,
#   the mask of cut-off turns or the logprobs of all other trials are gone, and which list loses
#   what depends on which trial ended first.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv datasets==5.2.0

export HF_HOME="$dir/hub" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1
seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json

import datasets

good = {"trial": "a", "reward": 1.0, "extra": {"turns": 2}}
bad = {
    "trial": "b",
    "reward": 0.0,
    "extra": {"turns": 9, "limit": "time"},
    "error": "AgentTimeoutError",
}
for name, rows in (("good first", [good, bad]), ("bad first", [bad, good])):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for kind, made in (
        ("list", datasets.Dataset.from_list(rows)),
        ("file", datasets.Dataset.from_json(f"{name}.jsonl")),
    ):
        print(
            f"{name}, {kind}:",
            sorted(made.column_names),
            [row["extra"] for row in made if row["trial"] == "a"],
        )
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
good first, list: ['extra', 'reward', 'trial'] [{'turns': 2, 'limit': None}]
good first, file: ['error', 'extra', 'reward', 'trial'] [{'turns': 2}]
bad first, list: ['error', 'extra', 'reward', 'trial'] [{'turns': 2, 'limit': None}]
bad first, file: ['error', 'extra', 'reward', 'trial'] [{'turns': 2}]
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
