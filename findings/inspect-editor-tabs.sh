#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Inspect: one edit by the text_editor tool turns all tabs of the file into spaces, for good.
#
# Version: inspect-ai 0.3.285, its text_editor tool in the sandbox "local", with the program that it
#   brings along for sandboxes, and leaves in /var/tmp.
# Guess: an edit changes the text that the model names, and undo_edit restores the file. Tabs may be
#   shown as spaces, but they stay in the file.
# Behaviour: str_replace and insert expand every tab of the file before they write it, even in lines
#   far from the edit, in strings and in tables. The output shows spaces for tabs anyway, so the
#   model cannot see the change. undo_edit brings back the words, but with spaces.
# Why it matters: a Makefile is broken by an edit of its comment, a table has one column, and the
#   diff of a Go file touches every line. A task whose tests build with make fails although the
#   model's edit was right, so models that edit with sed score higher.
# Source: the program is compiled. Its older form, the package inspect-tool-support, calls
#   expandtabs on the whole file in str_replace and insert, and saves that text for undo_edit.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv inspect-ai==0.3.285

seen=$(INSPECT_LOG_DIR=$dir/logs venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import subprocess

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.solver import solver
from inspect_ai.tool import text_editor

MAKEFILE = "# Builds it.\nall:\n\techo built\n"
TABLE = "name\tscore\nann\t1\nbob\t2\n"


def show(label, path):
    line = f"  {label}: {path.read_text()!r}"
    if path.name == "Makefile":
        code = subprocess.run(["make", "-s", "-f", path], capture_output=True).returncode
        line += ", make works" if code == 0 else ", make fails"
    print(line)


async def edit(name, text, **arguments):
    path = pathlib.Path(name).resolve()
    path.write_text(text)
    print(arguments["command"], "in", name)
    show("before", path)
    editor = text_editor()
    await editor(path=str(path), **arguments)
    show("after", path)
    await editor(command="undo_edit", path=str(path))
    show("undone", path)


@solver
def edits():
    async def solve(state, generate):
        words = {"old_str": "Builds it", "new_str": "Builds all"}
        await edit("Makefile", MAKEFILE, command="str_replace", **words)
        await edit("table.tsv", TABLE, command="insert", insert_line=3, new_str="cy\t3")
        return state

    return solve


task = inspect_ai.Task(dataset=[Sample(input="")], solver=edits(), sandbox="local")
(log,) = inspect_ai.eval(task, model="mockllm/model", display="none")
print(log.status)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
str_replace in Makefile
  before: '# Builds it.\nall:\n\techo built\n', make works
  after: '# Builds all.\nall:\n        echo built\n', make fails
  undone: '# Builds it.\nall:\n        echo built\n', make fails
insert in table.tsv
  before: 'name\tscore\nann\t1\nbob\t2\n'
  after: 'name    score\nann     1\nbob     2\ncy      3\n'
  undone: 'name    score\nann     1\nbob     2\n'
success
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
