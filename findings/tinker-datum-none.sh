#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# tinker: a Datum turns a missing logprob into NaN and cuts a broken token id to an integer, without
# a word.
#
# Version: tinker 0.38.0; no service is called.
# Guess: a Datum is checked when it is made: None among logprobs raises, as None among token ids
#   does, and a float is no token id. The kind of number comes from the values, so a list and an
#   array of the same ones give the same tensor, under any name of an input.
# Behaviour: for a list it comes from the input's name, and the values are forced into it. None
#   among logprobs becomes NaN; 2.9 among target tokens becomes 2, and "7" becomes 7. An array keeps
#   its own kind: the same weights are float32 from a list and int64 from an array, and 2.9 stays. A
#   list under a name of one's own is a KeyError, an array is not.
# Why it matters: servers leave out logprobs now and then (the first token of a prompt, an aborted
#   request), and recorders keep the place with None. The record is accepted here, and one NaN makes
#   the loss of the whole batch NaN. Ids that have been through a table with gaps are floats, and
#   are taken as well.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv tinker==0.38.0 numpy==2.5.5

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import numpy
from tinker import types

for name, values in (
    ("logprobs", [None, -1.0]),
    ("target_tokens", [None, 2]),
    ("target_tokens", [2.9, "7"]),
    ("target_tokens", numpy.array([2.9, 7.0])),
    ("weights", [1, 0]),
    ("weights", numpy.array([1, 0])),
    ("mask", [1, 0]),
    ("mask", numpy.array([1, 0])),
):
    kind = type(values).__name__
    shown = values if kind == "list" else values.tolist()
    try:
        made = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={name: values}
        )
        print(
            name, kind, shown, "->", made.loss_fn_inputs[name].dtype, made.loss_fn_inputs[name].data
        )
    except Exception as error:
        print(name, kind, shown, "->", type(error).__name__)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
logprobs list [None, -1.0] -> float32 [nan, -1.0]
target_tokens list [None, 2] -> TypeError
target_tokens list [2.9, '7'] -> int64 [2, 7]
target_tokens ndarray [2.9, 7.0] -> float32 [2.9000000953674316, 7.0]
weights list [1, 0] -> float32 [1.0, 0.0]
weights ndarray [1, 0] -> int64 [1, 0]
mask list [1, 0] -> KeyError
mask ndarray [1, 0] -> int64 [1, 0]
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
