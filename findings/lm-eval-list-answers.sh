#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# lm-evaluation-harness: if the first answer of a dataset looks like a list, all other answers are
# split into characters: for "42" the reply "42" is wrong and "4" is right.
#
# Version: lm-eval 0.4.13, a task of its own kind (generate_until, exact_match) over a local file,
#   with a model that replies with fixed texts, and stand-ins for four metrics' packages.
# Guess: doc_to_target: "{{answer}}", as in the guide to new tasks, is the same as doc_to_target:
#   answer, that is, the text of the column. Whether a reply is right depends on its own row, and
#   not on the order of the rows.
# Behaviour: a rendered target that begins with "[" and ends with "]" is read as a Python list. If
#   that happens in the first row, all rows have several right answers. A list has its items, so
#   '["a", "b"]' is wrong for itself and "a" is right. Any other text has its characters. If it
#   happens in a later row only, the list is turned into a text again, with Python's quotes and
#   spaces, so the right reply '["a", "b"]' or "[0.50]" is wrong. With doc_to_target: answer, none
#   of this happens.
# Why it matters: a dataset whose answers are JSON lists, or that has one of them in the first row,
#   gives 0 for right replies and 1 for a part of them. Filtering or shuffling the rows changes
#   which replies are right. There is no warning.
# Source: doc_to_target and process_results of ConfigurableTask, and multiple_target in its
#   constructor, in lm_eval/api/task.py. The pull request EleutherAI/lm-evaluation-harness#4057 for
#   lists that are meant as text is open.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv datasets==5.2.0 dill==0.4.1 jinja2==3.1.6 jsonlines==4.0.0 \
  more-itertools==11.2.1 numpy==2.5.5 requests==2.34.2 sqlitedict==2.1.0 word2number==1.1
uv pip install -q --python venv --no-deps lm-eval==0.4.13
export HF_HUB_OFFLINE=1 HF_HOME="$dir/hub"

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import json
import pathlib
import sys
from unittest.mock import MagicMock

for name in "sacrebleu", "evaluate", "sklearn", "sklearn.metrics", "rouge_score":
    sys.modules[name] = MagicMock()
import lm_eval
from lm_eval.api.model import LM


class Parrot(LM):
    """A model that replies with the row's own reply."""

    def generate_until(self, requests):
        return [request.doc["reply"] for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def show(label, target, *rows):
    path = pathlib.Path(f"{label.replace(' ', '-')}-{len(target)}.jsonl")
    lines = [json.dumps({"question": "?", "answer": a, "reply": b}) for a, b in rows]
    path.write_text("\n".join(lines))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": target,
        "metric_list": [{"metric": "exact_match"}],
    }
    result = lm_eval.simple_evaluate(Parrot(), tasks=[task], bootstrap_iters=0)
    print(f"{label}, doc_to_target: {target}")
    for sample in result["samples"]["mine"]:
        doc, score = sample["doc"], sample["exact_match"]
        print(f"  answer {doc['answer']!r}, reply {doc['reply']!r}: {score:.0f}")


LIST = ("[1, 2]", "[1, 2]")
WORDS = (('["a", "b"]', '["a", "b"]'), ('["a", "b"]', "a"))
NUMBERS = (("42", "42"), ("42", "4"), ("yes", "yes"), ("yes", "e"))
LATER = (("42", "42"), LIST, ("[0.50]", "[0.50]"), *WORDS)
for target in "answer", "{{answer}}":
    show("list first", target, *WORDS, *NUMBERS)
    show("list later", target, *LATER)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
list first, doc_to_target: answer
  answer '["a", "b"]', reply '["a", "b"]': 1
  answer '["a", "b"]', reply 'a': 0
  answer '42', reply '42': 1
  answer '42', reply '4': 0
  answer 'yes', reply 'yes': 1
  answer 'yes', reply 'e': 0
list later, doc_to_target: answer
  answer '42', reply '42': 1
  answer '[1, 2]', reply '[1, 2]': 1
  answer '[0.50]', reply '[0.50]': 1
  answer '["a", "b"]', reply '["a", "b"]': 1
  answer '["a", "b"]', reply 'a': 0
list first, doc_to_target: {{answer}}
  answer '["a", "b"]', reply '["a", "b"]': 0
  answer '["a", "b"]', reply 'a': 1
  answer '42', reply '42': 0
  answer '42', reply '4': 1
  answer 'yes', reply 'yes': 0
  answer 'yes', reply 'e': 1
list later, doc_to_target: {{answer}}
  answer '42', reply '42': 1
  answer '[1, 2]', reply '[1, 2]': 1
  answer '[0.50]', reply '[0.50]': 0
  answer '["a", "b"]', reply '["a", "b"]': 0
  answer '["a", "b"]', reply 'a': 0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
