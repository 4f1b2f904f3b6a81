#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# distilabel: a right step is labelled wrong if the model writes one completion too few, and always
# with structured output.
#
# Versions: distilabel 1.5.3, its MathShepherdCompleter and FormatPRM.
# Guess: a step is good if one of its N completions reaches the golden answer. A missing completion
#   counts as one that does not, so two right ones of three are enough. With structured output,
#   which the docstring calls the preferred way, the labels are the same.
# Behaviour: missing completions are replaced by empty ones, and an empty completion that comes
#   after a right one takes the label away again. With structured output, the number of characters
#   of the reply is compared to N, so all completions are thrown away, and no step but the last gets
#   a label. FormatPRM takes the last character of each step for its label: in a step without a
#   label it cuts the full stop, and the step is bad.
# Why it matters: a process reward model learns that right steps are wrong, each time the model
#   writes fewer than N completions. With structured output, all steps but the last are wrong in all
#   rows. There is no warning, and the rows look complete.
# Source: _parse_output, _format_structured_output and _auto_label of
#   distilabel/steps/tasks/math_shepherd/completer.py; _format_trl of math_shepherd/utils.py.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv distilabel==1.5.3 requests==2.34.2

seen=$(HF_HUB_OFFLINE=1 venv/bin/python - 2>errors.log <<'PYTHON'
import json

from distilabel.models.llms.base import LLM
from distilabel.steps.tasks import FormatPRM, MathShepherdCompleter

GOLDEN = ["Step 1: 3+2=5.", "Step 2: 5*2=10.", "The answer is: 10"]
SOLUTION = ["Step 1: 2+3=5.", "Step 2: Double it.", "Step 3: 2*5=10.", "The answer is: 10"]
RIGHT = "Step 2: 5*2=10.\nThe answer is: 10"
WRONG = "Step 2: 5*3=15.\nThe answer is: 15"


class Model(LLM):
    """Completes every solution with the same reply."""

    reply: str
    structured_output: dict | None = None

    @property
    def model_name(self):
        return "model"

    def generate(self, inputs, num_generations=1, **kwargs):
        statistics = {"input_tokens": [1], "output_tokens": [1]}
        return [{"generations": [self.reply], "statistics": statistics} for _ in inputs]


def show(label, completions, structured=False):
    reply = "\n\n---\n\n".join(completions)
    if structured:
        reply = json.dumps({"solutions": [{"solution": text} for text in completions]})
    model = Model(reply=reply, structured_output={"format": "json"} if structured else None)
    completer = MathShepherdCompleter(llm=model, N=3, use_default_structured_output=structured)
    completer.load()
    row = {"instruction": "?", "golden_solution": GOLDEN, "solutions": [list(SOLUTION)]}
    ((row,),) = completer.process([row])
    formatter = FormatPRM(format="trl")
    formatter.load()
    ((row,),) = formatter.process([{"instruction": "?", "solutions": row["solutions"][0]}])
    print(f"{label}: labels {row['labels']}, second step {row['completions'][1]!r}")


show("three right", [RIGHT] * 3)
show("one right of three", [RIGHT, WRONG, WRONG])
show("three wrong", [WRONG] * 3)
show("two right, none missing", [RIGHT, RIGHT, WRONG])
show("two right, one missing", [RIGHT, RIGHT])
show("three right, structured", [RIGHT] * 3, structured=True)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
three right: labels [True, True, True], second step 'Step 2: Double it.'
one right of three: labels [True, True, True], second step 'Step 2: Double it.'
three wrong: labels [False, False, True], second step 'Step 2: Double it.'
two right, none missing: labels [True, True, True], second step 'Step 2: Double it.'
two right, one missing: labels [False, False, True], second step 'Step 2: Double it'
three right, structured: labels [False, False, True], second step 'Step 2: Double it'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
