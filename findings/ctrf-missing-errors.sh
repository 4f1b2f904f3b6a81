#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# pytest-json-ctrf: a test file that cannot be imported is not in the report.
#
# Versions: pytest-json-ctrf 0.6.1, which Harbor's template for tasks uses, and pytest 9.2.0.
# Guess: the summary of the CTRF report counts what pytest counts: an error is a failed test, or at
#   least one with the status "other".
# Behaviour: a file that fails to import is missing, with all its tests. The report has 0 tests and
#   0 failed or, with --continue-on-collection-errors, only the other files' tests, all passed. A
#   teardown error is lost if the test was skipped. pytest's own JUnit report counts each of these
#   as an error, and the exit code is 1 or 2.
# Why it matters: a reward of passed / tests, or a check for failed == 0, treats a solution that no
#   test could import as perfect. The file that fails is the one that tests the module that the
#   agent did not write, and only the tests that passed before remain.
# Source: Report.collect of ctrf/Report.py, which sees no reports of the collection, and set_status
#   of ctrf/TestObject.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv pytest==9.2.0 pytest-json-ctrf==0.6.1

mkdir import teardown
cat >import/test_old.py <<'PYTHON'
def test_old():
    pass
PYTHON
cat >import/test_new.py <<'PYTHON'
from solution import solve


def test_new():
    assert solve() == 1


def test_more():
    assert solve() != 2
PYTHON
cat >teardown/test_clean.py <<'PYTHON'
import pytest


@pytest.fixture
def server():
    yield
    raise RuntimeError("The server crashed.")


def test_passes(server):
    pass


def test_skips(server):
    pytest.skip("no network")

PYTHON
cat >show.py <<'PYTHON'
import json
import xml.etree.ElementTree as tree

results = json.load(open("ctrf.json"))["results"]
names = ("tests", "passed", "failed", "skipped", "other")
print("  CTRF:", ", ".join(f"{results['summary'][name]} {name}" for name in names))
for test in results["tests"]:
    print("   ", test["name"], test["status"])
suite = tree.parse("junit.xml").getroot()[0]
names = ("tests", "failures", "errors", "skipped")
print("  JUnit:", ", ".join(f"{suite.get(name)} {name}" for name in names))
PYTHON
seen=$(
  for arguments in import "import --continue-on-collection-errors" teardown; do
    code=0
    # shellcheck disable=SC2086
    venv/bin/pytest -p no:cacheprovider --ctrf ctrf.json --junit-xml junit.xml $arguments \
      >log.txt 2>&1 || code=$?
    echo "pytest $arguments: exit code $code"
    venv/bin/python show.py
  done
)
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
pytest import: exit code 2
  CTRF: 0 tests, 0 passed, 0 failed, 0 skipped, 0 other
  JUnit: 1 tests, 0 failures, 1 errors, 0 skipped
pytest import --continue-on-collection-errors: exit code 1
  CTRF: 1 tests, 1 passed, 0 failed, 0 skipped, 0 other
    import/test_old.py::test_old passed
  JUnit: 2 tests, 0 failures, 1 errors, 0 skipped
pytest teardown: exit code 1
  CTRF: 2 tests, 0 passed, 1 failed, 1 skipped, 0 other
    teardown/test_clean.py::test_passes failed
    teardown/test_clean.py::test_skips skipped
  JUnit: 2 tests, 0 failures, 2 errors, 1 skipped
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
