#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# openai-agents and OpenHands: a hunk whose @@ header is not a whole line of the file changes the
# first place that fits, in another class.
#
# Versions: openai-agents 0.24.0, its apply_diff; openhands-tools 1.58.2, the core of its
#   apply_patch; codex-apply-patch 0.4.0 and apply-patch-py 0.4.1 for comparison.
# Guess: "@@ class B" limits the hunk to class B, as OpenAI's guide to the format says, which writes
#   such headers without a colon. A header that is not found is an error.
# Behaviour: a header must equal a whole line, apart from blanks at its ends. "class B" is not
#   "class B:", so it is not found, and the two go on as if it were not there: class A is changed.
#   The same happens with a header for a class that the file does not have, and with the line
#   numbers of a unified diff. An insertion without context then goes to the top of the file. The
#   other two packages change nothing in these cases, apart from line numbers in apply-patch-py. In
#   apply_diff, two headers in a row must be found; one alone need not be.
# Why it matters: headers are for code that occurs more than once, so the wrong place nearly always
#   fits. The model is told that the edit is done, and a rollout is judged by a change that it did
#   not ask for.
# Source: _advance_cursor_to_anchor of agents/apply_diff.py, with require_match for two headers or
#   more; Parser.parse_update_file of openhands/tools/apply_patch/core.py, where found is not used.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv openai-agents==0.24.0 codex-apply-patch==0.4.0 apply-patch-py==0.4.1
uv pip install -q --python venv --no-deps openhands-tools==1.58.2

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import importlib.util
import pathlib
import sys

import apply_patch_py
import codex_apply_patch
from agents.apply_diff import apply_diff

# The core alone, since the package around it needs all of OpenHands.
(core,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/openhands/tools/apply_patch/core.py")
spec = importlib.util.spec_from_file_location("openhands_core", core)
openhands_core = sys.modules["openhands_core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openhands_core)

CLASS = "class {}:\n    def run(self):\n        return 1\n"
SOURCE = CLASS.format("A") + "\n\n" + CLASS.format("B")
CHANGE = "     def run(self):\n-        return 1\n+        return 2\n"
PATH = pathlib.Path("code.py")


def agents_sdk(diff, patch):
    PATH.write_text(apply_diff(SOURCE, diff))


def openhands(diff, patch):
    write = lambda path, text: pathlib.Path(path).write_text(text)
    openhands_core.process_patch(patch, lambda path: SOURCE, write, lambda path: None)


def codex(diff, patch):
    codex_apply_patch.apply_patch(patch)


def apply_patch(diff, patch):
    asyncio.run(apply_patch_py.apply_patch(patch))


def changed(tool, diff):
    PATH.write_text(SOURCE)
    try:
        tool(diff, f"*** Begin Patch\n*** Update File: {PATH}\n{diff}*** End Patch")
    except (ValueError, RuntimeError):
        return "error"
    text = PATH.read_text()
    if text == SOURCE:
        return "unchanged"
    first, second = text.split("class B:")
    return "above A" if not first.startswith("class A") else "B" if second[-2] == "2" else "A"


for header, hunk in (
    ("@@ class B:", CHANGE),
    ("@@ class B", CHANGE),
    ("@@ class C:", CHANGE),
    ("@@ -6,3 +6,3 @@", CHANGE),
    ("@@ class B", "+    size = 2\n"),
):
    print(f"{header:15}", "insertion:" if "-" not in hunk else "change:", end=" ")
    tools = (agents_sdk, openhands, codex, apply_patch)
    print(", ".join(f"{tool.__name__} {changed(tool, f'{header}\n{hunk}')}" for tool in tools))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
@@ class B:     change: agents_sdk B, openhands B, codex B, apply_patch B
@@ class B      change: agents_sdk A, openhands A, codex unchanged, apply_patch error
@@ class C:     change: agents_sdk A, openhands A, codex unchanged, apply_patch error
@@ -6,3 +6,3 @@ change: agents_sdk A, openhands A, codex unchanged, apply_patch A
@@ class B      insertion: agents_sdk above A, openhands above A, codex unchanged, apply_patch error
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
