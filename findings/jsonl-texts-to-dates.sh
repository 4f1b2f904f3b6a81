#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# DuckDB and datasets: texts in JSON Lines become dates, and which date depends on the row before.
#
# Versions: duckdb 2.0.1; datasets 5.2.0 with pyarrow 26.0.1. Each reads a column of JSON strings.
# Guess: JSON has strings and numbers, so a string stays a string. If a reader does look for dates,
#   then for the full ISO form, and it reads a column in one form.
# Behaviour: if all strings of a column look like it, DuckDB makes dates of 3-4-5, and times of
#   3:15. For 12-01-2024 it takes the first of the day-month and month-day forms that fits the
#   value, so one column has both: the same text is 12 January in one row order, and 1 December in
#   another. datasets makes timestamps of 2024-01-05, and moves a time with a zone to UTC and drops
#   the zone. One other text in the column, and all of them stay texts.
# Why it matters: answers, versions and durations of rollouts are such texts. The answer 3-4-5 of a
#   task is 2003-04-05 for the grader, and no reply equals it. Whether that happens depends on the
#   other rows, so a test with few rows does not show it, or shows nothing else.
# Source: DuckDB's JSON reader tries a list of date formats on each value (its pull request 22289
#   tells of it), unless it is given dateformat or columns; pyarrow.json infers timestamps, and
#   Json._generate_tables of datasets' packaged_modules/json/json.py keeps them.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv duckdb==2.0.1 datasets==5.2.0 pyarrow==26.0.1 pytz

seen=$(HF_HOME="$dir/home" HF_HUB_OFFLINE=1 venv/bin/python - 2>errors.log <<'PYTHON'
import json
import pathlib

import datasets
import duckdb

for number, answers in enumerate(
    (
        ["3-4-5"],
        ["3:15", "12:30"],
        ["12-01-2024", "01-13-2024"],
        ["01-13-2024", "12-01-2024"],
        ["2024-01-05", "2024-02-06"],
        ["2024-01-05", "3-4-5", "unknown"],
        ["2024-01-05T10:00:00+02:00"],
    )
):
    path = pathlib.Path(f"{number}.jsonl")
    path.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    loaded = datasets.load_dataset("json", data_files=str(path), split="train")["answer"]
    rows = duckdb.sql(f"select answer from '{path}'").fetchall()
    print(" and ".join(answers))
    for name, values in ("DuckDB", [row[0] for row in rows]), ("datasets", list(loaded)):
        print(f"  {name}, {type(values[0]).__name__}:", ", ".join(map(str, values)))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
3-4-5
  DuckDB, date: 2003-04-05
  datasets, str: 3-4-5
3:15 and 12:30
  DuckDB, time: 03:15:00, 12:30:00
  datasets, str: 3:15, 12:30
12-01-2024 and 01-13-2024
  DuckDB, date: 2024-01-12, 2024-01-13
  datasets, str: 12-01-2024, 01-13-2024
01-13-2024 and 12-01-2024
  DuckDB, date: 2024-01-13, 2024-12-01
  datasets, str: 01-13-2024, 12-01-2024
2024-01-05 and 2024-02-06
  DuckDB, date: 2024-01-05, 2024-02-06
  datasets, datetime: 2024-01-05 00:00:00, 2024-02-06 00:00:00
2024-01-05 and 3-4-5 and unknown
  DuckDB, str: 2024-01-05, 3-4-5, unknown
  datasets, str: 2024-01-05, 3-4-5, unknown
2024-01-05T10:00:00+02:00
  DuckDB, datetime: 2024-01-05 08:00:00+00:00
  datasets, datetime: 2024-01-05 08:00:00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
