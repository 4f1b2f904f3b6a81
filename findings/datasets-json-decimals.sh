#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# datasets and pandas: a tool call with other arguments rounds all floats of a JSON Lines file.
#
# Versions: datasets 5.2.0, its load_dataset("json") and Dataset.to_json; pandas 3.1.1.
# Guess: floats are read as json.loads reads them, and written so that they can be read again. A
#   column of objects with different keys, or of numbers and strings, changes no other column, and
#   its strings stay strings.
# Behaviour: as soon as one column has objects with different keys, or two types, the whole file is
#   written again before it is read, with ten digits behind the point. So all logprobs beyond the
#   tenth digit are cut, and a logprob of -1e-11 is -0.0. In a column with two types, a string that
#   is JSON becomes its value: "18" is 18 and "null" is nothing. Dataset.to_json writes ten digits,
#   too, for any dataset.
# Why it matters: rollouts with tool calls are such files, since each tool has its own arguments.
#   Recorded logprobs change by the presence of another column. For a token that is nearly sure,
#   1e-7 has four digits left. In a column of answers, a string equals no longer what the task says.
# Source: Json._generate_tables of packaged_modules/json/json.py calls ujson_dumps of
#   datasets/utils/json.py, pandas' writer, whose double_precision is 10; json_encode_field leaves
#   strings that it can parse.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv datasets==5.2.0 pandas==3.1.1

seen=$(HF_HOME="$dir/home" HF_HUB_OFFLINE=1 venv/bin/python - 2>errors.log <<'PYTHON'
import json
import pathlib

import datasets

LOGPROBS = [-1.1920928244535389e-07, -0.6931471805599453, -1e-11]


def load(name, key, *values):
    path = pathlib.Path(f"{name}.jsonl")
    path.write_text("".join(json.dumps({"logprobs": LOGPROBS, key: x}) + "\n" for x in values))
    loaded = datasets.load_dataset("json", data_files=str(path), split="train")
    print(f"{name}: logprobs {loaded[0]['logprobs']}, {key} {loaded[:][key]}")
    return loaded


print("in the file:", LOGPROBS)
same = load("same keys", "arguments", {"path": "a"}, {"path": "b"})
load("other keys", "arguments", {"path": "a"}, {"command": "b"})
load("strings", "answer", "18", "null", "yes")
load("two types", "answer", "18", "null", "yes", 7)
same.to_json("again.jsonl")
print("to_json:", pathlib.Path("again.jsonl").read_text().split("\n")[0])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
in the file: [-1.1920928244535389e-07, -0.6931471805599453, -1e-11]
same keys: logprobs [-1.1920928244535389e-07, -0.6931471805599453, -1e-11], arguments [{'path': 'a'}, {'path': 'b'}]
other keys: logprobs [-1.192e-07, -0.6931471806, -0.0], arguments [{'path': 'a'}, {'command': 'b'}]
strings: logprobs [-1.1920928244535389e-07, -0.6931471805599453, -1e-11], answer ['18', 'null', 'yes']
two types: logprobs [-1.192e-07, -0.6931471806, -0.0], answer [18, None, 'yes', 7]
to_json: {"logprobs":[-0.0000001192,-0.6931471806,-0.0],"arguments":{"path":"a"}}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
