#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# lm-evaluation-harness: in maj@8 and maj@64 replies without an answer vote for "[invalid]", and
# 1,000 and 1000 are two candidates, so the majority can be wrong where most answers are right.
#
# Version: lm-eval 0.4.13, the filters and the metric of its task gsm8k_cot_self_consistency, and a
#   stand-in for sacrebleu.
# Guess: the majority is taken of the answers that were found, and answers that the metric calls
#   equal are one candidate, as in the paper on self-consistency.
# Behaviour: the filter for the answer gives "[invalid]" if it finds none, and the filter for the
#   vote counts it like an answer. "The answer is $18." has none, because of the dollar sign, which
#   the metric would ignore. Commas and dollar signs are ignored by the metric only, after the vote.
# Why it matters: five of eight replies with a dollar sign make a solved task unsolved, so maj@8 is
#   lower than score-first, and the model looks as if sampling did not help.
# Source: RegexFilter of lm_eval/filters/extraction.py, MajorityVoteFilter of filters/selection.py,
#   tasks/gsm8k/gsm8k-cot-self-consistency.yaml and gsm8k-cot.yaml.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv numpy==2.5.5 pyyaml==6.0.4
uv pip install -q --python venv --no-deps lm-eval==0.4.13

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types
from unittest.mock import MagicMock

import yaml

# The packages themselves import datasets and the models.
(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/lm_eval")
for name in "lm_eval", "lm_eval.api", "lm_eval.filters":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]
sys.modules["sacrebleu"] = MagicMock()

from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters import extraction, selection

FILTERS = {
    "regex": extraction.RegexFilter,
    "majority_vote": selection.MajorityVoteFilter,
    "take_first": selection.TakeFirstFilter,
    "take_first_k": selection.TakeKFilter,
}
folder = root / "tasks" / "gsm8k"
task = yaml.safe_load((folder / "gsm8k-cot-self-consistency.yaml").read_text())
(metric,) = yaml.safe_load((folder / task["include"]).read_text())["metric_list"]
options = ("regexes_to_ignore", "ignore_case", "ignore_punctuation")
options = {name: metric[name] for name in options}


def show(label, target, *answers):
    """Prints what two of the task's filters make of eight replies."""
    replies = [f"So it is that. The answer is {answer}." for answer in answers]
    print(f"{label}:", ", ".join(answers))
    for pipeline in task["filter_list"]:
        if pipeline["name"] in ("score-first", "maj@8"):
            found = [replies]
            for step in pipeline["filter"]:
                arguments = {key: value for key, value in step.items() if key != "function"}
                found = FILTERS[step["function"]](**arguments).apply(found, [{}])
            (answer,) = found
            score = exact_match_hf_evaluate([answer], [target], **options)["exact_match"]
            print(f"  {pipeline['name']}: {answer}, score {score:.0f}")


show("18, all the same", "18", *["18"] * 8)
show("18, some with a dollar sign", "18", *["18"] * 3, *["$18"] * 5)
show("1000, some with a comma", "1000", *["1000"] * 2, *["1,000"] * 3, *["900"] * 3)
show("1000, some with a comma", "1000", *["1000"] * 2, *["1,000"] * 2, *["900"] * 3, "800")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
18, all the same: 18, 18, 18, 18, 18, 18, 18, 18
  score-first: 18, score 1
  maj@8: 18, score 1
18, some with a dollar sign: 18, 18, 18, $18, $18, $18, $18, $18
  score-first: 18, score 1
  maj@8: [invalid], score 0
1000, some with a comma: 1000, 1000, 1,000, 1,000, 1,000, 900, 900, 900
  score-first: 1000, score 1
  maj@8: 1,000, score 1
1000, some with a comma: 1000, 1000, 1,000, 1,000, 900, 900, 900, 800
  score-first: 1000, score 1
  maj@8: 900, score 0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
