#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SWE-smith: a fix is resolved if its test is skipped; tests with a space in their parameter and
# tests whose fixture fails are never graded; two Go packages with a test of one name share one
# result.
#
# Versions: swesmith 0.0.9 and swebench 4.1.0, whose resolution rule it uses (with swebench 5.0.2 it
#   cannot be imported), with stand-ins for clients that this does not need; pytest 9.2.0, run with
#   the options of SWE-smith's own command.
# Guess: a task is resolved if each test of FAIL_TO_PASS passes. All tests that fail with the bug
#   and pass without it are in FAIL_TO_PASS. A failed test makes its task unresolved.
# Behaviour: a skipped test is neither a success nor a failure, and of no tests all pass, so the
#   task is resolved. The name of a test ends at the first space, so test_upper[a b] has no status;
#   if it is the test that the bug breaks, the bug seems harmless. Only FAILED counts before the
#   fix, not ERROR. A Go test is known by its name without its package, and the last result counts.
# Why it matters: a patch after which a module cannot be imported or a platform check fails is a
#   solved task, if the tests are skipped then. Bugs are thrown away although tests find them, and
#   patches that break a test in one package count as right because another package has its name.
# Source: test_failed and get_valid_report of swesmith/harness/grading.py, compute_fail_to_pass of
#   swebench/harness/grading.py, log_parser of swesmith/profiles/python.py and golang.py. In
#   swebench 5.0.2's own grading a skipped test is a failure.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv pytest==9.2.0
uv pip install -q --python venv --no-deps swesmith==0.0.9 swebench==4.1.0

cat > test_words.py <<'TESTS'
import os

import pytest

FIXED, NO_NETWORK = "FIXED" in os.environ, "NO_NETWORK" in os.environ


@pytest.fixture
def words():
    assert FIXED
    return []


@pytest.mark.parametrize("text", ["a", "b", "a b"])
def test_upper(text):
    assert FIXED or text == "a"


@pytest.mark.skipif(NO_NETWORK, reason="no network")
def test_send():
    assert FIXED


def test_empty(words):
    assert words == []
TESTS

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import os
import pathlib
import shlex
import subprocess
import sys
from unittest.mock import MagicMock

STANDINS = """anthropic bs4 chardet datasets docker dotenv fastcore ghapi git litellm modal numpy
openai pandas requests rich tenacity tiktoken tqdm transformers unidiff""".split()


class Standins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STANDINS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[])

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Standins())

from swesmith.harness import grading
from swesmith.profiles.golang import Gin3c12d2a8
from swesmith.profiles.python import Addict75284f95

profile = Addict75284f95()
options = shlex.split(profile.test_cmd.rpartition("; pytest ")[2])


def log(**environment):
    """Returns the name of a file with the marked output of the tests."""
    command = [sys.executable, "-m", "pytest", *options]
    output = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE)
    path = pathlib.Path("-".join(environment) + ".log")
    start, end = grading.TEST_OUTPUT_START, grading.TEST_OUTPUT_END
    path.write_text(f"+ : '{start}'\n{output.stdout.decode()}\n+ : '{end}'\n")
    return str(path)


print("pytest", *options)
bug, fixed = log(BUG="1"), log(FIXED="1")
for label, path in ("with the bug", bug), ("without it", fixed):
    tests = profile.log_parser(pathlib.Path(path).read_text())
    print(f"{label}:", *(f"{name.partition('::')[2]} {status}" for name, status in tests.items()))
report = grading.get_valid_report(bug, fixed, {"repo": profile.repo_name})
print("FAIL_TO_PASS:", *(name.partition("::")[2] for name in report["FAIL_TO_PASS"]))
task = {"instance_id": f"{profile.repo_name}.x", "repo": profile.repo_name}
task |= {"FAIL_TO_PASS": ["test_words.py::test_send"], "PASS_TO_PASS": []}
for label, path in ("failed", bug), ("passed", fixed), ("skipped", log(NO_NETWORK="1")):
    report = grading.get_eval_report({"model_patch": "diff"}, dict(task), path)
    print(f"test_send {label}: resolved {report['resolved']}")

FAIL = "=== RUN   TestNew\n--- FAIL: TestNew (0.00s)\nFAIL\nFAIL\texample.com/a\t0.01s\n"
PASS = "=== RUN   TestNew\n--- PASS: TestNew (0.00s)\nPASS\nok  \texample.com/b\t0.01s\n"
print("Go, failed in a, then passed in b:", Gin3c12d2a8().log_parser(FAIL + PASS))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
pytest --disable-warnings --color=no --tb=no --verbose
with the bug: test_upper[a] PASSED test_upper[b] FAILED test_send FAILED test_empty ERROR
without it: test_upper[a] PASSED test_upper[b] PASSED test_send PASSED test_empty PASSED
FAIL_TO_PASS: test_upper[b] test_send
test_send failed: resolved False
test_send passed: resolved True
test_send skipped: resolved True
Go, failed in a, then passed in b: {'TestNew': 'PASSED', 'example.com/a': 'FAILED'}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
