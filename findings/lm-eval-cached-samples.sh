#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# lm-evaluation-harness: with use_cache and a temperature, but without do_sample, the second run
# gets one reply eight times, so pass@8 falls to the score of that reply.
#
# Version: lm-eval 0.4.13, a task with repeats: 8 over a local file, with a model that gives other
#   replies each time, and stand-ins for four metrics' packages.
# Guess: a temperature above 0 means sampling, as for lm-eval's own models for vLLM and APIs; the
#   documentation's example of --gen_kwargs has only a temperature, too. Sampled replies are not
#   cached, as a warning of the cache says, or the eight replies come back as they were.
# Behaviour: the cache looks only at do_sample. If it is absent, the eight requests of a row have
#   one key. In the first run each gets a reply of its own, and the last one stays in the cache. Any
#   later run gives this reply eight times. There is no warning.
# Why it matters: the same command gives two different pass@8, first the right one, then the score
#   of one reply. A run that continues after an interruption mixes rows of both kinds. Best-of-n
#   data that is collected like this has one reply per task.
# Source: CachingLM in lm_eval/api/model.py, which reads only do_sample; normalize_gen_kwargs of
#   lm_eval/models/utils.py. EleutherAI/lm-evaluation-harness#3046 is open; a comment there says
#   that the check for do_sample has fixed it.
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
import itertools
import json
import pathlib
import sys
from unittest.mock import MagicMock

for name in "sacrebleu", "evaluate", "sklearn", "sklearn.metrics", "rouge_score":
    sys.modules[name] = MagicMock()
import lm_eval
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

pathlib.Path("tasks.jsonl").write_text(json.dumps({"question": "?", "answer": "1"}))


class Sampler(LM):
    """A model whose replies are 1, 2, 3 and so on."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)

    def generate_until(self, requests):
        return [str(next(self.numbers)) for _ in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def pass_at_8(references, predictions):
    return float(references[0] in predictions[0])


def show(name, **sampling):
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "tasks.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "repeats": 8,
        "generation_kwargs": {"until": ["\n"], **sampling},
        "filter_list": [{"name": "all", "filter": [{"function": "take_first_k", "k": 8}]}],
        "metric_list": [{"metric": pass_at_8, "aggregation": "mean", "higher_is_better": True}],
    }
    print(sampling, "vLLM samples:", normalize_gen_kwargs(dict(sampling))["do_sample"])
    for run in "first", "second":
        result = lm_eval.simple_evaluate(
            Sampler(), tasks=[task], bootstrap_iters=0, use_cache=f"cache-{name}"
        )
        (sample,) = result["samples"]["mine"]
        print(f"  {run} run: {' '.join(sample['resps'][0])}, pass@8 {sample['pass_at_8']:.0f}")


show("one", temperature=0.7)
show("two", temperature=0.7, do_sample=True)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
{'temperature': 0.7} vLLM samples: True
  first run: 1 2 3 4 5 6 7 8, pass@8 1
  second run: 8 8 8 8 8 8 8 8, pass@8 0
{'temperature': 0.7, 'do_sample': True} vLLM samples: True
  first run: 1 2 3 4 5 6 7 8, pass@8 1
  second run: 1 2 3 4 5 6 7 8, pass@8 1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
