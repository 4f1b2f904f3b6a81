#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# math-verify: 5 km is 5 m, 5000 mm is not, and 1e3 is three times Euler's number.
#
# Version: math-verify 0.9.0 with latex2sympy2-extended 1.11.0. TRL, verifiers and others compute
#   rewards by it. The answer stands in \boxed{}, as their prompts ask for.
# Guess: an answer in another unit is right if it is the same length, and wrong if only its number
#   is the same. 1e3 is 1000. "4,3" is not "3,4".
# Behaviour: a unit or currency behind a number is cut off, and the numbers are compared: 5 km, 5
#   USD and 3 am pass for 5 m, 5 EUR and 3 pm, and 5000 mm fails for 5 m. In "1e3" the e is the
#   constant: it is 1*e*3, so an answer as Python prints it is wrong, where "1E3" is right; 1e-3 is
#   e - 3. "3,4" is a set, whose order does not count; "(3,4)" is a pair, whose order does.
# Why it matters: a policy is rewarded for a wrong unit, and punished for a right one or for the
#   notation that its Python tool prints.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv math-verify==0.9.0 latex2sympy2-extended==1.11.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
from math_verify import parse, verify

for gold, answer in (
    (r"5\text{ m}", r"5\text{ m}"),
    (r"5\text{ m}", r"5\text{ km}"),
    (r"5\text{ m}", r"5000\text{ mm}"),
    (r"5\text{ EUR}", r"5\text{ USD}"),
    (r"3\text{ pm}", r"3\text{ am}"),
    ("1000", "10^3"),
    ("1000", "1E3"),
    ("1000", "1e3"),
    ("0.001", "1e-3"),
    ("3,4", "4,3"),
    ("(3,4)", "(4,3)"),
):
    parsed = parse(rf"\boxed{{{answer}}}")
    is_right = verify(parse(f"${gold}$"), parsed)
    print(f"gold {gold}, answer {answer}, read as {parsed[0]}: {is_right}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
gold 5\text{ m}, answer 5\text{ m}, read as 5: True
gold 5\text{ m}, answer 5\text{ km}, read as 5: True
gold 5\text{ m}, answer 5000\text{ mm}, read as 5000: False
gold 5\text{ EUR}, answer 5\text{ USD}, read as 5: True
gold 3\text{ pm}, answer 3\text{ am}, read as 3: True
gold 1000, answer 10^3, read as 10**3: True
gold 1000, answer 1E3, read as 1000.00000000000: True
gold 1000, answer 1e3, read as 1*E*3: False
gold 0.001, answer 1e-3, read as -3 + 1*E: False
gold 3,4, answer 4,3, read as {3, 4}: True
gold (3,4), answer (4,3), read as (4, 3): False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
