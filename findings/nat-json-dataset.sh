#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# NeMo Agent Toolkit: in a JSON dataset, the questions "1.1" and "1.10" are one, and "007" is 7.
#
# Versions: nvidia-nat-eval 1.9.0 and nvidia-nat-core 1.9.0, the dataset handler of `nat eval`;
#   pandas 2.3.3. A stand-in replaces langchain-core.
# Guess: the dataset types json and jsonl give the same questions for the same records, since JSON
#   tells texts from numbers. Only records with equal ids are dropped as duplicates.
# Behaviour: type json is read with pandas.read_json, which turns a column of texts into numbers if
#   all of them look like numbers; type jsonl is read with json.loads. So ids "1.1" and "1.10" are
#   both 1.1, and the second question is dropped as a duplicate, without a message. The same happens
#   to ids of 18 digits that differ in the last one, and to "1e2" beside "100". Expected answers
#   "007" and "42" become 7 and 42, "0.50" becomes 0.5, and a text of 21 digits loses its last ones.
#   If one answer is a word, all answers stay texts.
# Why it matters: questions vanish from an evaluation, and the average score is that of the others.
#   An expected answer is not what the file says, so an exact comparison fails for right replies.
#   Both depend on the other rows and on the file type.
# Source: EvalDatasetJsonConfig.parser of nat/data_models/dataset_handler.py, and
#   DatasetHandler._preprocess_dataframe of nat/plugins/eval/dataset_handler/dataset_handler.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv pandas==2.3.3 numpy==2.4.6 pydantic==2.14.4
uv pip install -q --python venv --no-deps nvidia-nat-eval==1.9.0 nvidia-nat-core==1.9.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import json
import pathlib
import sys
from unittest.mock import MagicMock

sys.modules["langchain_core"] = sys.modules["langchain_core.agents"] = MagicMock()

from nat.data_models.dataset_handler import EvalDatasetJsonConfig, EvalDatasetJsonlConfig
from nat.plugins.eval.dataset_handler.dataset_handler import DatasetHandler


def show(*rows):
    records = [{"id": row[0], "question": "How many?", "answer": row[1]} for row in rows]
    pathlib.Path("data.json").write_text(json.dumps(records))
    pathlib.Path("data.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    for config in EvalDatasetJsonConfig, EvalDatasetJsonlConfig:
        path = "data.json" if config is EvalDatasetJsonConfig else "data.jsonl"
        handler = DatasetHandler(config(file_path=path), reps=1, concurrency=1)
        items = handler.get_eval_input_from_dataset(None).eval_input_items
        print(f"{path}:", [(item.id, item.expected_output_obj) for item in items])


show(("1.1", "007"), ("1.10", "42"), ("2.1", "13"))
show(("900719925474099301", "yes"), ("900719925474099302", "no"))
show(("1e2", "yes"), ("100", "no"))
show(("a", "0.50"), ("b", "123456789012345678901"))
show(("a", "0.50"), ("b", "none"))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
data.json: [(1.1, 7), (2.1, 13)]
data.jsonl: [('1.1', '007'), ('1.10', '42'), ('2.1', '13')]
data.json: [(900719925474099328, 'yes')]
data.jsonl: [('900719925474099301', 'yes'), ('900719925474099302', 'no')]
data.json: [(100, 'yes')]
data.jsonl: [('1e2', 'yes'), ('100', 'no')]
data.json: [('a', 0.5), ('b', 1.2345678901234568e+20)]
data.jsonl: [('a', '0.50'), ('b', '123456789012345678901')]
data.json: [('a', '0.50'), ('b', 'none')]
data.jsonl: [('a', '0.50'), ('b', 'none')]
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
