#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# safetensors: a transposed or sliced numpy array is saved with other numbers, without an error.
#
# Versions: safetensors 0.7.0 and 0.8.0, numpy 2.5.5, their save and load for numpy.
# Guess: an array comes back as it was saved. If its memory has gaps or another order, it is copied,
#   as numpy.save does, or refused, as safetensors does for torch.
# Behaviour: 0.7.0 copies. 0.8.0 writes the bytes that lie in memory, from the array's first element
#   on, under the array's shape. So a transposed array comes back with its numbers out of place, and
#   a column of a table comes back as the start of a row. Each has the right shape and type.
# Why it matters: logprobs or advantages of a batch are often such a view, batch[:, start:] or
#   batch.T. Saved rollouts then have numbers that belong to other tokens. Nothing is out of range,
#   so the loss looks normal. A view that goes backwards, not run here, even takes bytes from
#   outside the array.
# Source: _flatten of safetensors/numpy.py hands over tensor.ctypes.data and tensor.nbytes, and
#   looks at the byte order alone. The project's issue 825 tells it of Fortran arrays.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >show.py <<'PYTHON'
import numpy
import safetensors
from safetensors.numpy import load, save

logprobs = -numpy.arange(1.0, 7.0, dtype="float32").reshape(2, 3)
print("safetensors", safetensors.__version__, "saves", logprobs.tolist())
for name, array in {
    "whole": logprobs,
    "[1:]": logprobs[1:],
    "[:, 1:]": logprobs[:, 1:],
    "[:, 1]": logprobs[:, 1],
    ".T": logprobs.T,
    "Fortran order": numpy.asfortranarray(logprobs),
}.items():
    loaded = load(save({"logprobs": array}))["logprobs"]
    print(f"  {name}:", loaded.tolist(), "same" if numpy.array_equal(loaded, array) else "OTHER")
PYTHON
uv venv -q --python 3.13 venv
seen=$(
  for version in 0.7.0 0.8.0; do
    uv pip install -q --python venv numpy==2.5.5 safetensors=="$version"
    venv/bin/python show.py
  done 2>errors.log
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
safetensors 0.7.0 saves [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]
  whole: [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]] same
  [1:]: [[-4.0, -5.0, -6.0]] same
  [:, 1:]: [[-2.0, -3.0], [-5.0, -6.0]] same
  [:, 1]: [-2.0, -5.0] same
  .T: [[-1.0, -4.0], [-2.0, -5.0], [-3.0, -6.0]] same
  Fortran order: [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]] same
safetensors 0.8.0 saves [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]
  whole: [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]] same
  [1:]: [[-4.0, -5.0, -6.0]] same
  [:, 1:]: [[-2.0, -3.0], [-4.0, -5.0]] OTHER
  [:, 1]: [-2.0, -3.0] OTHER
  .T: [[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]] OTHER
  Fortran order: [[-1.0, -4.0, -2.0], [-5.0, -3.0, -6.0]] OTHER
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
