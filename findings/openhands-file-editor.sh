#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# OpenHands' file editor: str_replace changes text that it was not given, and insert joins two
# lines.
#
# Version: openhands-tools 1.58.2, its FileEditor.
# Guess: str_replace changes the file only if old_str occurs in it exactly once, with all its
#   blanks, as the tool's description demands in capitals. insert adds lines of its own after a
#   given line. Bytes outside the edit stay as they are.
# Behaviour: if old_str does not occur, its blanks and line breaks at both ends are removed, and
#   that is replaced wherever it occurs once: in the middle of a word, or at another indentation.
#   new_str keeps its blanks, so they are added to those of the file, and a removed line leaves a
#   blank one. After a last line without a line break, insert writes on that same line. A new_str
#   that ends with a line break adds an empty line. Each edit turns CRLF into LF in the whole file.
# Why it matters: a model that quotes the wrong indentation should be told to look again. Instead it
#   reads that the file was edited, and the program has another meaning or a syntax error. Patches
#   of Windows files touch every line.
# Source: str_replace and insert of openhands/tools/file_editor/editor.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
export LITELLM_LOCAL_MODEL_COST_MAP=True OPENHANDS_SUPPRESS_BANNER=1
uv venv -q --python 3.12 venv
uv pip install -q --python venv openhands-tools==1.58.2 openhands-sdk==1.58.2

seen=$(HOME=$dir TMPDIR=$dir venv/bin/python - 2>errors.log <<'PYTHON'
import logging
import pathlib

logging.disable()
from openhands.tools.file_editor.editor import FileEditor

path = pathlib.Path("code.py").resolve()
editor = FileEditor(workspace_root=str(path.parent))


def edit(label, text, command, **arguments):
    path.write_bytes(text.encode())
    result = editor(command=command, path=str(path), **arguments)
    print(f"{label} {'error' if result.is_error else 'edited'}")
    print("  before", repr(text))
    print("  after ", repr(path.read_bytes().decode()))


edit(
    "a line that the file does not have:",
    "batch_size = 8\nstep = 2\n",
    "str_replace",
    old_str="    size = 8\n",
    new_str="    size = 16\n",
)
edit(
    "another indentation:",
    "for x in y:\n    use(x)\n    log(x)\n",
    "str_replace",
    old_str="\nlog(x)\n",
    new_str="\nlog(y)\n",
)
edit(
    "a line to remove:",
    "for x in y:\n    use(x)\n    log(x)\n",
    "str_replace",
    old_str="        use(x)\n",
    new_str="",
)
edit("insert after the last line:", "x = 1", "insert", insert_line=1, new_str="y = 2")
edit("insert a whole line:", "x = 1\nz = 3\n", "insert", insert_line=1, new_str="y = 2\n")
edit("CRLF:", "x = 1\r\ny = 2\r\n", "str_replace", old_str="x = 1", new_str="x = 3")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
a line that the file does not have: edited
  before 'batch_size = 8\nstep = 2\n'
  after  'batch_    size = 16\n\nstep = 2\n'
another indentation: edited
  before 'for x in y:\n    use(x)\n    log(x)\n'
  after  'for x in y:\n    use(x)\n    \nlog(y)\n\n'
a line to remove: edited
  before 'for x in y:\n    use(x)\n    log(x)\n'
  after  'for x in y:\n    \n    log(x)\n'
insert after the last line: edited
  before 'x = 1'
  after  'x = 1y = 2\n'
insert a whole line: edited
  before 'x = 1\nz = 3\n'
  after  'x = 1\ny = 2\n\nz = 3\n'
CRLF: edited
  before 'x = 1\r\ny = 2\r\n'
  after  'x = 3\ny = 2\n'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
