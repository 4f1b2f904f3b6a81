#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# pytest 9: a test with a failed subTest is PASSED in the log, and the graders believe it.
#
# Versions: pytest 9.2.0 and 8.4.2; the graders terminal-bench 0.2.18 (its PytestParser), swebench
#   5.0.2 (get_eval_report) and pytest-json-report 1.5.0, each on the same run.
# Guess: a test with a failed `with self.subTest()` of unittest is a failed test, as in unittest and
#   in pytest 8 without plugins, and each grader says so.
# Behaviour: since 9.0, pytest writes a SUBFAILED line for the subtest and a PASSED line for the
#   test. Terminal-Bench and SWE-bench read only the second line. SWE-bench distrusts a log without
#   a failure if pytest's exit code is not 0. But if one other test fails, even one that failed
#   before the change, the log is trusted and the instance is resolved. With -q, pytest-json-report
#   counts the test under "subtests passed". The same test with pytest's own fixture `subtests` is
#   FAILED.
# Why it matters: a newer pytest in a task's image turns failures into rewards. If a test checks a
#   table of cases in subtests, all of them may fail, and the test counts as passed. A wrong
#   solution is trained as a right one, and a change that breaks such a test passes for harmless.
# Source: PytestParser of terminal_bench/parsers/pytest_parser.py; parse_log_pytest_v2 of
#   swebench/harness/log_parsers/python.py, and get_logs_eval of swebench/harness/grading.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
for version in 8.4.2 9.2.0; do
  uv venv -q --python 3.13 "pytest-$version"
  uv pip install -q --python "pytest-$version" "pytest==$version" pytest-json-report==1.5.0
done
for grader in terminal-bench==0.2.18 swebench==5.0.2; do
  uv venv -q --python 3.13 "${grader%%==*}"
  uv pip install -q --python "${grader%%==*}" "$grader"
done

cat >test_square.py <<'PYTHON'
import unittest


class Square(unittest.TestCase):
    def test_cases(self):
        for number, square in ((1, 1), (2, 5), (3, 9)):
            with self.subTest(number=number):
                self.assertEqual(number * number, square)

    def test_old_failure(self):
        self.fail()
PYTHON
cat >tb.py <<'PYTHON'
import sys
from pathlib import Path

from terminal_bench.parsers.pytest_parser import PytestParser

for name, status in PytestParser().parse(Path(sys.argv[1]).read_text()).items():
    if "test_cases" in name:
        print("Terminal-Bench:", name.split(" - ")[0], status.value)
PYTHON
cat >swe.py <<'PYTHON'
import sys
from pathlib import Path

from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT, TEST_EXIT_CODE
from swebench.harness.grading import get_eval_report
from swebench.types import TestSpec

log = Path(sys.argv[1])
eval_log = log.with_suffix(".eval")
eval_log.write_text(
    f"{START_TEST_OUTPUT}\n{log.read_text()}\n{END_TEST_OUTPUT}\n{TEST_EXIT_CODE}: 1\n"
)
for parser in ("parse_log_pytest", "parse_log_pytest_v2"):
    tests = ["test_square.py::Square::test_cases"]
    spec = TestSpec("a__a-1", "", [], "a/a", "1", tests, [], parser, "pass_and_fail")
    patch = {"instance_id": "a__a-1", "model_name_or_path": "a", "model_patch": "a"}
    report = get_eval_report(spec, patch, str(eval_log), True)["a__a-1"]
    print(f"SWE-bench, {parser}: resolved {report['resolved']}")
PYTHON
cat >jr.py <<'PYTHON'
import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text())
print("pytest-json-report:", report["summary"])
PYTHON
{
  for version in 8.4.2 9.2.0; do
    echo "pytest $version"
    "pytest-$version/bin/pytest" -q -rA -p no:cacheprovider --json-report \
      "--json-report-file=$version.json" test_square.py >"$version.log" || echo "exit code $?"
    grep -E '^[A-Z]+\S* test_square' "$version.log"
    terminal-bench/bin/python tb.py "$version.log"
    swebench/bin/python swe.py "$version.log"
    swebench/bin/python jr.py "$version.json"
  done
} >seen.txt 2>errors.log || { tail -n 20 errors.log; exit 1; }
seen=$(cat seen.txt)
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
pytest 8.4.2
exit code 1
FAILED test_square.py::Square::test_cases - AssertionError: 4 != 5
FAILED test_square.py::Square::test_old_failure - AssertionError: None
Terminal-Bench: Square::test_cases failed
SWE-bench, parse_log_pytest: resolved False
SWE-bench, parse_log_pytest_v2: resolved False
pytest-json-report: {'failed': 2, 'total': 2, 'collected': 2}
pytest 9.2.0
exit code 1
PASSED test_square.py::Square::test_cases
SUBFAILED(number=2) test_square.py::Square::test_cases - AssertionError: 4 != 5
FAILED test_square.py::Square::test_old_failure - AssertionError: None
Terminal-Bench: Square::test_cases passed
SWE-bench, parse_log_pytest: resolved True
SWE-bench, parse_log_pytest_v2: resolved True
pytest-json-report: {'subtests passed': 1, 'failed': 1, 'total': 2, 'collected': 2}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
