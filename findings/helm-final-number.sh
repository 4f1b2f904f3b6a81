#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# HELM: in GSM8K a comma in the text after the answer is read as the final number, so a right reply
# scores 0.
#
# Version: crfm-helm 0.5.16, final_number_exact_match, the main metric of GSM8K in HELM Lite. Of its
#   wheel only this file is used, with stand-ins for the modules that it imports.
# Guess: the final number of a reply is its last number. It is compared with the last number of the
#   reference, and 18.00 is 18.
# Behaviour: a number is one or more digits or commas, then any character with digits behind it. So
#   a comma in the text after the answer is the final number. It becomes an empty text, and the
#   reply scores 0: "She makes $18 a day, as she sells the rest." A comma right behind the number is
#   harmless. In "4+6+8=18" the last number is "8=18". 18.00 is not 18.
# Why it matters: the same right answer scores 1 or 0 by the words behind it, or by the spaces in a
#   sum. A model that explains after the answer loses points for it. A reply that ends as HELM's
#   few-shot examples do, with "The answer is 18.", is read rightly.
# Source: the pattern -?[\d,]+(?:.\d+)? in helm/benchmark/metrics/evaluate_reference_metrics.py has
#   a "." without a backslash, and needs no digit.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv --no-deps crfm-helm==0.5.16

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import ast
import pathlib
import runpy
import sys
import sysconfig
from unittest.mock import MagicMock

site = pathlib.Path(sysconfig.get_paths()["purelib"])
file = site / "helm/benchmark/metrics/evaluate_reference_metrics.py"
for node in ast.walk(ast.parse(file.read_text())):
    names = [node.module] if isinstance(node, ast.ImportFrom) else []
    names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
    for name in names:
        if name.split(".")[0] not in sys.stdlib_module_names:
            sys.modules[name] = MagicMock()
match = runpy.run_path(str(file))["final_number_exact_match"]

GOLD = "She sells 16 - 3 - 4 = 9 eggs a day. She makes 9 * 2 = $18 every day. The answer is 18."
for reply in (
    "The answer is 18.",
    "The answer is 18, since she sells the rest.",
    "The answer is 18 dollars.",
    "The answer is 18 dollars, since she sells the rest.",
    "She makes $18 a day, as she sells the rest.",
    "She makes $18 a day as she sells the rest.",
    "4 + 6 + 8 = 18",
    "4+6+8=18",
    "The answer is $18.00.",
):
    print(f"{match(GOLD, reply)}  {reply}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
1  The answer is 18.
1  The answer is 18, since she sells the rest.
1  The answer is 18 dollars.
0  The answer is 18 dollars, since she sells the rest.
0  She makes $18 a day, as she sells the rest.
1  She makes $18 a day as she sells the rest.
1  4 + 6 + 8 = 18
0  4+6+8=18
0  The answer is $18.00.
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
