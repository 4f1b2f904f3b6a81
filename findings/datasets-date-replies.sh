#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# datasets: a reply that is a date comes back from a JSON Lines file as a datetime, with a time that
# nobody wrote.
#
# Version: datasets 5.2.0.
# Guess: a JSON string is loaded as a string, whatever it says.
# Behaviour: if all strings of a column look like dates or times, the column becomes a timestamp.
#   "2026-11-27" comes back as datetime(2026, 11, 27, 0, 0), and "2026-11-27T10:00:00Z" without its
#   zone. One other value in the column, say in a second file or a longer sample, and all are
#   strings again. Message contents inside a list are changed as well.
# Why it matters: rollouts of a task such as "what is the date of the last commit" have such
#   answers, and records have columns of start times. A reward that compares strings, or a chat
#   template, meets a datetime; which of them depends on the other rows.
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


def load(name, rows):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return datasets.Dataset.from_json(f"{name}.jsonl")[0]


def answer(text):
    return {"messages": [{"role": "assistant", "content": text}]}


print(load("dates", [answer("2026-11-27"), answer("2026-11-28")])["messages"][0])
print(load("mixed", [answer("2026-11-27"), answer("I don't know.")])["messages"][0])
print(load("times", [{"started_at": "2026-11-27T10:00:00Z"}]))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
{'role': 'assistant', 'content': datetime.datetime(2026, 11, 27, 0, 0)}
{'role': 'assistant', 'content': '2026-11-27'}
{'started_at': datetime.datetime(2026, 11, 27, 10, 0)}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
