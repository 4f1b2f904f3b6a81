#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SWE-bench, other languages: a C++ test that throws and a Ruby test that is skipped are PASSED,
# vitest's "returns 404" and "returns 500" are one test, and Rust's should_panic tests are not seen.
#
# Version: swebench 5.0.2, the log parsers of its C++, Ruby, TypeScript and Rust repositories, and
#   its rule for FAIL_TO_PASS, with stand-ins for the clients that the package imports. The logs are
#   those of doctest 2.4.9 (-s -r=xml), vitest 1.6.0 (--reporter=verbose) and cargo, shortened; the
#   one of minitest is in the form that the parser expects, with "S" for a skip.
# Guess: each test that the runner reports has its own status. A test that throws is FAILED, and one
#   that is skipped is SKIPPED, which is no pass since swebench 5.
# Behaviour: nlohmann/json: a SUBCASE passes if all its expressions do, and one that throws outside
#   of an expression has none. A TEST_CASE without SUBCASEs is not read. jekyll: a result "S" is
#   read as ".", because of the point in the duration. vuejs/core: a number at the end of a name is
#   taken for the duration, which vitest prints for slow tests only; the last of the tests with that
#   name decides. ripgrep, tokio and others: names with a space ("- should panic", doc tests) are
#   not read, and two files with a test of one name share one result.
# Why it matters: these statuses decide both which tests a task has and whether a patch resolves it.
#   A patch that makes a C++ test throw or a Ruby test skip counts as right. A failing test is
#   hidden by a passing one that has the same name. A test that is not read decides nothing.
# Source: parse_log_doctest of swebench/harness/log_parsers/c.py, parse_log_minitest of ruby.py,
#   parse_log_vitest of javascript.py, parse_log_cargo of rust.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv --no-deps swebench==5.0.2

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

ABSENT = """bs4 chardet datasets docker dotenv ghapi git modal requests rich tenacity tqdm
unidiff yaml"""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT.split():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(__path__=[])
        module.__spec__ = spec
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(StandIns())
from swebench.harness.grading import test_passed
from swebench.harness.log_parsers import c, javascript, ruby, rust

LOGS = {
    "nlohmann/json": (
        c.parse_log_doctest,
        """<doctest binary="./test" version="2.4.9"><TestSuite>
    <TestCase name="values" filename="test.cpp" line="5">
      <SubCase name="wrong" filename="test.cpp" line="5">
        <Expression success="false" type="CHECK" filename="test.cpp" line="5">
          <Original>parse(1)==2</Original><Expanded>1 == 2</Expanded>
        </Expression>
      </SubCase>
      <SubCase name="throws" filename="test.cpp" line="6">
        <Exception crash="false">
          exception thrown in subcase - will translate later when the whole test case has
          been exited
        </Exception>
      </SubCase>
      <Exception crash="false">boom</Exception>
      <OverallResultsAsserts successes="0" failures="1" test_case_success="false"/>
    </TestCase>
    <TestCase name="alone" filename="test.cpp" line="8">
      <Expression success="false" type="CHECK" filename="test.cpp" line="8">
        <Original>parse(1)==2</Original><Expanded>1 == 2</Expanded>
      </Expression>
      <OverallResultsAsserts successes="0" failures="1" test_case_success="false"/>
    </TestCase>
</TestSuite></doctest>""",
    ),
    "jekyll/jekyll": (
        ruby.parse_log_minitest,
        """TestSite#test_: A site should build. = 0.05 s = .
TestSite#test_: A site should watch. = 0.02 s = S
TestSite#test_: A site should serve. = 0.01 s = F""",
    ),
    "vuejs/core": (
        javascript.parse_log_vitest,
        """ × a.spec.ts > status > returns 404
   → expected 1 to be 2 // Object.is equality
 ✓ a.spec.ts > status > returns 500
 × a.spec.ts > status > is slow 410ms""",
    ),
    "burntsushi/ripgrep": (
        rust.parse_log_cargo,
        """test tests::plain ... ok
test tests::panics - should panic ... FAILED
test src/lib.rs - add (line 1) ... FAILED
     Running tests/b.rs
test works ... FAILED
     Running tests/c.rs
test works ... ok""",
    ),
}
for repository, (parse, log) in LOGS.items():
    print(repository)
    statuses = parse(log, None)
    for test, status in statuses.items():
        print(f"  {test}: {status}, resolved: {test_passed(test, statuses)}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
nlohmann/json
  values > wrong: FAILED, resolved: False
  values > throws: PASSED, resolved: True
jekyll/jekyll
  TestSite#test_: A site should build: PASSED, resolved: True
  TestSite#test_: A site should watch: PASSED, resolved: True
  TestSite#test_: A site should serve: FAILED, resolved: False
vuejs/core
  a.spec.ts > status > returns: PASSED, resolved: True
  a.spec.ts > status > is slow: FAILED, resolved: False
burntsushi/ripgrep
  tests::plain: PASSED, resolved: True
  works: PASSED, resolved: True
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
