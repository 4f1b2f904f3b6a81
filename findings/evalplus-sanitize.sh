#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# EvalPlus: its clean-up deletes loops, decorated functions, and functions without a return.
#
# Version: evalplus 0.3.1 (HumanEval+ and MBPP+), its function sanitize. `evalplus.codegen` calls it
#   on each sample, and what it returns is the solution that is then tested.
# Guess: the clean-up removes the prose around the code, and tests and prints after it. What the
#   function needs at run time stays, and the program behaves as before.
# Behaviour: sanitize keeps only imports, classes, assignments to one plain name, and functions with
#   a return statement. It deletes everything else at the top level: a loop that fills a table, a
#   tuple assignment, a try around an import, a decorated function, even the one that was asked for,
#   and a helper that works in place and returns nothing. If a name is defined twice, the first
#   definition wins, not the last. Of two code blocks, the one with more lines wins, even if it is
#   only the usage example.
# Why it matters: the model's correct program is scored as wrong, usually because of a NameError.
#   This affects sieves, memo tables, @cache and in-place recursion, which the best answers use, so
#   pass@1 differs from that of a grader that runs the code as it is.
# Source: extract_target_code_or_empty of evalplus/sanitize.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"

cat >show.py <<'PYTHON'
from evalplus.sanitize import sanitize

ANSWERS = {
    "plain": """
def f(n):
    return n > 1 and all(n % d for d in range(2, n))
print(f(7))
""",
    "a table that a loop fills": """
composite = set()
for d in range(2, 10):
    composite.update(range(2 * d, 100, d))
def f(n):
    return n > 1 and n not in composite
""",
    "two names in one assignment": """
LOW, HIGH = 2, 100
def f(n):
    return n >= LOW and all(n % d for d in range(2, min(n, HIGH)))
""",
    "a cached function": """
from functools import cache
@cache
def f(n):
    return n > 1 and all(n % d for d in range(2, n))
""",
    "a cached helper": """
from functools import cache
@cache
def divides(d, n):
    return n % d == 0
def f(n):
    return n > 1 and not any(divides(d, n) for d in range(2, n))
""",
    "a helper that returns nothing": """
def mark(n, found):
    for d in range(2, n):
        if n % d == 0:
            found.append(d)
def f(n):
    found = []
    mark(n, found)
    return n > 1 and not found
""",
    "an import with a fallback": """
try:
    from math import isqrt
except ImportError:
    isqrt = lambda n: int(n ** 0.5)
def f(n):
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))
""",
    "a corrected second version": """
def f(n):
    return n % 2 == 1
# Wrong for 1, 2 and 9, so:
def f(n):
    return n > 1 and all(n % d for d in range(2, n))
""",
    "a usage example in a block of its own": """
def f(n):
    return n > 1 and all(n % d for d in range(2, n))
```
For example:
```python
small = 7
print(small)
large = 91
print(large)
""",
}


def test(code):
    names = {"print": lambda *values: None}
    try:
        exec(code, names)
        numbers = [n for n in range(20) if names["f"](n)]
        return "right" if numbers == [2, 3, 5, 7, 11, 13, 17, 19] else "wrong"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


for name, code in ANSWERS.items():
    reply = f"Here is the code:\n```python{code}```\nIt tests all divisors.\n"
    raw = code.split("```")[0]
    print(f"{name}: as it is {test(raw)}, after sanitize {test(sanitize(reply, 'f'))}")
PYTHON
seen=$(uv run -q --no-project --python 3.13 --with 'evalplus==0.3.1' python show.py 2>errors.log) ||
  { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
plain: as it is right, after sanitize right
a table that a loop fills: as it is right, after sanitize wrong
two names in one assignment: as it is right, after sanitize NameError: name 'LOW' is not defined
a cached function: as it is right, after sanitize KeyError: 'f'
a cached helper: as it is right, after sanitize NameError: name 'divides' is not defined
a helper that returns nothing: as it is right, after sanitize NameError: name 'mark' is not defined
an import with a fallback: as it is right, after sanitize NameError: name 'isqrt' is not defined
a corrected second version: as it is right, after sanitize wrong
a usage example in a block of its own: as it is right, after sanitize KeyError: 'f'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
