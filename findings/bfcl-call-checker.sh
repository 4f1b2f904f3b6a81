#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# bfcl-eval: the checker of function calls takes x - 2 for x**2 and version 55 for 5.5, refuses the
# interval [1, 3] for [1.0, 3.0], and refuses the right parallel calls if Apple comes before
# Microsoft.
#
# Version: bfcl-eval 2026.3.23 (the Berkeley Function-Calling Leaderboard), its ast_parse,
#   ast_checker and agentic_checker with its own tasks; a stand-in for the table of models.
# Guess: texts are compared without case and with some freedom for dates. An integer is accepted for
#   a float. Parallel calls are right in any order, as the checker's name no_order says. Python
#   literals are read as Python reads them.
# Behaviour: before texts are compared, spaces and , . / - _ * ^ are deleted, in all texts:
#   formulas, version numbers, addresses. An integer is accepted for a float, but not in a list of
#   floats. Each expected call takes the first call that fits; if that one was needed by a later
#   expected call, the answer is refused, so with the same calls one order is right and another
#   wrong. Any sign of a number is read as a minus, so +5 is -5. The checker of final answers takes
#   18 for 1.8.
# Why it matters: the scores are compared in model cards and are used as rewards. A model is
#   rewarded for the area under another curve, and punished for the order of its calls or for a 1 in
#   place of 1.0.
# Source: standardize_string, list_checker, type_checker and parallel_function_checker_no_order of
#   bfcl_eval/eval_checker/ast_eval/ast_checker.py, resolve_ast_by_type of model_handler/utils.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv tree_sitter==0.21.3 tree-sitter-java==0.21.0 \
  tree-sitter-javascript==0.21.4 tenacity==9.2.1 filelock==3.20.0
uv pip install -q --python venv --no-deps bfcl-eval==2026.3.23

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import collections
import json
import pathlib
import sys
import types

import bfcl_eval

# The table imports the clients of all providers. Here it only says how names with dots are sent.
table = types.ModuleType("bfcl_eval.constants.model_config")
option = types.SimpleNamespace(underscore_to_dot=False)
table.MODEL_CONFIG_MAPPING = collections.defaultdict(lambda: option)
sys.modules[table.__name__] = table

from bfcl_eval.constants.enums import Language, ReturnFormat
from bfcl_eval.eval_checker.agentic_eval.agentic_checker import agentic_checker
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.model_handler.utils import ast_parse

DATA = pathlib.Path(bfcl_eval.__file__).parent / "data"


def find(path, name):
    return next(row for row in map(json.loads, path.open()) if row["id"] == name)


def show(name, *replies):
    """Prints what a task accepts and whether the replies to it are right."""
    category = name.split("_")[0]
    category += "_python" if category == "simple" else "_multiple" if category == "live" else ""
    functions = find(DATA / f"BFCL_v4_{category}.json", name)["function"]
    truth = find(DATA / f"possible_answer/BFCL_v4_{category}.json", name)["ground_truth"]
    print(name)
    for call in truth:
        print("  expected", *(f"{key} {values}" for key, values in call[next(iter(call))].items()))
    for reply in replies:
        calls = ast_parse(reply, ReturnFormat.PYTHON)
        valid = ast_checker(functions, calls, truth, Language.PYTHON, category, "model")["valid"]
        print(f"  {valid}: {reply}")


show(
    "simple_python_13",
    "[calculate_area_under_curve(function='x**2', interval=[1.0, 3.0])]",
    "[calculate_area_under_curve(function='x - 2', interval=[1.0, 3.0])]",
    "[calculate_area_under_curve(function='x**2', interval=[1, 3])]",
)
show(
    "simple_python_15",
    "[integrate(function='x**3', start_x=-2, end_x=3, method='simpson')]",
    "[integrate(function='x/3', start_x=+2, end_x=3, method='simpson')]",
    "[integrate(function='x**3', start_x=-2, end_x=+3, method='simpson')]",
)
show(
    "live_multiple_1007-236-0",
    "[software_versions(version='5.5')]",
    "[software_versions(version='55')]",
)
MICROSOFT, APPLE = (
    [f"get_stock_price(company_name='{name}', date='2022-0{month}-01')" for month in (1, 2)]
    for name in ("Microsoft", "Apple")
)
show(
    "parallel_178",
    "[" + ", ".join(MICROSOFT + APPLE) + "]",
    "[" + ", ".join(APPLE + MICROSOFT) + "]",
)
for reply in "1.8 hours", "18 hours", "2.8 hours":
    print("final answer, expected 1.8:", agentic_checker(reply, ["1.8"])["valid"], reply)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
simple_python_13
  expected function ['x**2', 'lambda x: x**2', 'y=x**2'] interval [[1.0, 3.0]] method ['', 'trapezoidal']
  True: [calculate_area_under_curve(function='x**2', interval=[1.0, 3.0])]
  True: [calculate_area_under_curve(function='x - 2', interval=[1.0, 3.0])]
  False: [calculate_area_under_curve(function='x**2', interval=[1, 3])]
simple_python_15
  expected function ['x**3', 'lambda x: x**3'] start_x [-2] end_x [3] method ['simpson']
  True: [integrate(function='x**3', start_x=-2, end_x=3, method='simpson')]
  True: [integrate(function='x/3', start_x=+2, end_x=3, method='simpson')]
  False: [integrate(function='x**3', start_x=-2, end_x=+3, method='simpson')]
live_multiple_1007-236-0
  expected time ['', 'null'] origin [''] type [''] name [''] version ['5.5']
  True: [software_versions(version='5.5')]
  True: [software_versions(version='55')]
parallel_178
  expected company_name ['Microsoft', 'Apple'] date ['2022-01-01', '01/01/2022', 'Jan.1,2022'] exchange ['NASDAQ', '']
  expected company_name ['Microsoft'] date ['2022-02-01', '02/01/2022', 'Feb.1,2022'] exchange ['NASDAQ', '']
  expected company_name ['Apple'] date ['2022-01-01', '01/01/2022', 'Jan.1,2022'] exchange ['NASDAQ', '']
  expected company_name ['Apple'] date ['2022-02-01', '02/01/2022', 'Feb.1,2022'] exchange ['NASDAQ', '']
  True: [get_stock_price(company_name='Microsoft', date='2022-01-01'), get_stock_price(company_name='Microsoft', date='2022-02-01'), get_stock_price(company_name='Apple', date='2022-01-01'), get_stock_price(company_name='Apple', date='2022-02-01')]
  False: [get_stock_price(company_name='Apple', date='2022-01-01'), get_stock_price(company_name='Apple', date='2022-02-01'), get_stock_price(company_name='Microsoft', date='2022-01-01'), get_stock_price(company_name='Microsoft', date='2022-02-01')]
final answer, expected 1.8: True 1.8 hours
final answer, expected 1.8: True 18 hours
final answer, expected 1.8: False 2.8 hours
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
