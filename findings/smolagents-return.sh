#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# smolagents: its Python catches `return` and `break` as errors, and skips decorators.
#
# Version: smolagents 1.26.0, the executor that runs a CodeAgent's code by default.
# Guess: code does what Python does, or fails with the name of what is not supported, as it does for
#   yield, global and match.
# Behaviour: return, break and continue are exceptions there, so `except Exception` around them
#   catches them: a function that returns from a try block goes on behind it, and a database's
#   `with` block that is left by return is rolled back. A decorator and the else of a loop are
#   skipped. A function returns the value of its last line, without return. Default values are
#   computed at each call. A function inside another replaces one of the same name outside. None of
#   it is an error.
# Why it matters: "try, return, except, try again" is usual in generated code, and it gives None
#   after three tries that all worked. The model reads its own printed error, and corrects code that
#   is right. An agent's score with this executor and with real Python differ for the same reply.
# Source: smolagents/local_python_executor.py: the classes ReturnException, BreakException and
#   ContinueException are Exceptions for evaluate_try and evaluate_with; evaluate_for,
#   create_function and evaluate_function_def. The project's issues 1688, 2758 and 2782 tell of
#   parts of it. OpenEnv 0.10.0 runs Python in this executor, too
#   (openenv/core/tools/local_python_executor.py).
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv smolagents==1.26.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import contextlib
import io

from smolagents.local_python_executor import LocalPythonExecutor

CODES = {
    "try again": """
def get():
    for number in range(3):
        try:
            return "page"
        except Exception:
            print("try", number, "failed;", end=" ")
print(get())
""",
    "database": """
import sqlite3
database = sqlite3.connect(":memory:")
database.execute("create table rows (value)")
def add():
    with database:
        database.execute("insert into rows values (1)")
        return True
add()
print(database.execute("select count(*) from rows").fetchone()[0], "rows")
""",
    "decorator": """
def twice(function):
    return lambda value: 2 * function(value)
@twice
def same(value):
    return value
print(same(4))
""",
    "loop's else": """
found = "prime"
for divisor in (2, 3, 4):
    if 9 % divisor == 0:
        break
else:
    found = "no divisor"
for divisor in (2, 3, 4):
    if 7 % divisor == 0:
        break
else:
    found = "no divisor"
print(found)
""",
    "no return": """
def last():
    4
print(last())
""",
    "default": """
limit = 1
def get(value=limit):
    return value
limit = 2
print(get())
""",
    "inner function": """
def name():
    return "outer"
def use():
    def name():
        return "inner"
    return name()
print(use(), name())
""",
}
for name, code in CODES.items():
    executor = LocalPythonExecutor(additional_authorized_imports=["sqlite3"])
    executor.send_tools({})
    there = executor(code).logs
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    print(f"{name}: Python {printed.getvalue().strip()!r}, smolagents {there.strip()!r}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
try again: Python 'page', smolagents 'try 0 failed;\ntry 1 failed;\ntry 2 failed;\nNone'
database: Python '1 rows', smolagents '0 rows'
decorator: Python '8', smolagents '4'
loop's else: Python 'no divisor', smolagents 'prime'
no return: Python 'None', smolagents '4'
default: Python '1', smolagents '2'
inner function: Python 'inner outer', smolagents 'inner inner'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
