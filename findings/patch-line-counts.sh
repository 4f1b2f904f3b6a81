#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# git apply, GNU patch and unidiff: if a hunk's header counts too few lines, the lines beyond are
# lost, with exit code 0; GNU patch then also loses all later hunks of the file.
#
# Versions: git 2.39, GNU patch 2.7, unidiff 1.0.1; the commands are those of swebench 5.0.2.
# Guess: a hunk with more lines than its header says is a corrupt patch, as one with fewer lines is.
#   git and patch refuse it, and PatchSet raises UnidiffParseError ("Hunk is longer than expected").
# Behaviour: all three stop at the count. If the lines beyond it are the last ones of a file's part,
#   they are taken for text between the patches and dropped: a new file loses its last lines, a
#   change loses its last line, and the next file is patched as if nothing had happened. If another
#   hunk follows, git and unidiff refuse the patch. GNU patch drops the lines, takes that hunk for
#   text as well, and exits with 0. "git apply --recount" counts itself, and is right.
# Why it matters: a model that writes a patch by hand miscounts. A part of its patch is tested, and
#   the log says that it applied. The reward then says that the model was wrong, or, if the tests do
#   not see it, that the part was right. SWE-bench runs patch whenever git refuses, so the second
#   hunk is lost there.
# Source: GIT_APPLY_CMDS of swebench/harness/run_evaluation.py, whose first three commands, all of
#   git apply, refuse the patch with two hunks; _parse_hunk of unidiff/patch.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv unidiff==1.0.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import subprocess

import unidiff

TEXT = "".join(f"{letter}\n" for letter in "abcdefghijkl")
NEW = "diff --git a/new b/new\nnew file mode 100644\n--- /dev/null\n+++ b/new\n"
OLD = "diff --git a/old b/old\n--- a/old\n+++ b/old\n"
LINES = "+one\n+two\n+three\n"
END = " k\n l\n+m\n+n\n"
FIRST = " a\n-b\n+B\n c\n"
SECOND = "@@ -8,3 +8,3 @@\n h\n-i\n+I\n j\n"
PATCHES = {
    "a new file, right": f"{NEW}@@ -0,0 +1,3 @@\n{LINES}",
    "a new file, one line too few": f"{NEW}@@ -0,0 +1,2 @@\n{LINES}",
    "a new file, one line too few, then another file": (
        f"{NEW}@@ -0,0 +1,2 @@\n{LINES}{OLD}@@ -1,3 +1,3 @@\n{FIRST}"
    ),
    "two lines at the end, right": f"{OLD}@@ -11,2 +11,4 @@\n{END}",
    "two lines at the end, one too few": f"{OLD}@@ -11,2 +11,3 @@\n{END}",
    "two hunks, right": f"{OLD}@@ -1,3 +1,3 @@\n{FIRST}{SECOND}",
    "two hunks, the first one line too few": f"{OLD}@@ -1,2 +1,2 @@\n{FIRST}{SECOND}",
    "two hunks, the first one line too many": f"{OLD}@@ -1,4 +1,4 @@\n{FIRST}{SECOND}",
}
COMMANDS = (
    "git apply --verbose",
    "patch --batch --forward --fuzz=5 -p1 -i",
    "git apply --recount",
)


def show(command, patch):
    pathlib.Path("old").write_text(TEXT)
    pathlib.Path("new").unlink(missing_ok=True)
    pathlib.Path("patch.diff").write_text(patch)
    result = subprocess.run([*command.split(), "patch.diff"], capture_output=True)
    texts = []
    for name in "new", "old":
        if f"b/{name}" in patch:
            path = pathlib.Path(name)
            texts.append(" ".join(path.read_text().split()) if path.exists() else "no file")
    print(f"  {command}: exit code {result.returncode}, {'; '.join(texts)}")


for name, patch in PATCHES.items():
    print(name)
    for command in COMMANDS:
        show(command, patch)
    try:
        print(f"  unidiff: {unidiff.PatchSet(patch).added} lines added")
    except unidiff.UnidiffParseError as error:
        print(f"  unidiff: {error!r}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
a new file, right
  git apply --verbose: exit code 0, one two three
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, one two three
  git apply --recount: exit code 0, one two three
  unidiff: 3 lines added
a new file, one line too few
  git apply --verbose: exit code 0, one two
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, one two
  git apply --recount: exit code 0, one two three
  unidiff: 2 lines added
a new file, one line too few, then another file
  git apply --verbose: exit code 0, one two; a B c d e f g h i j k l
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, one two; a B c d e f g h i j k l
  git apply --recount: exit code 0, one two three; a B c d e f g h i j k l
  unidiff: 3 lines added
two lines at the end, right
  git apply --verbose: exit code 0, a b c d e f g h i j k l m n
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, a b c d e f g h i j k l m n
  git apply --recount: exit code 0, a b c d e f g h i j k l m n
  unidiff: 2 lines added
two lines at the end, one too few
  git apply --verbose: exit code 0, a b c d e f g h i j k l m
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, a b c d e f g h i j k l m
  git apply --recount: exit code 0, a b c d e f g h i j k l m n
  unidiff: 1 lines added
two hunks, right
  git apply --verbose: exit code 0, a B c d e f g h I j k l
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, a B c d e f g h I j k l
  git apply --recount: exit code 0, a B c d e f g h I j k l
  unidiff: 2 lines added
two hunks, the first one line too few
  git apply --verbose: exit code 128, a b c d e f g h i j k l
  patch --batch --forward --fuzz=5 -p1 -i: exit code 0, a B c d e f g h i j k l
  git apply --recount: exit code 0, a B c d e f g h I j k l
  unidiff: UnidiffParseError('Unexpected hunk found: @@ -8,3 +8,3 @@\n')
two hunks, the first one line too many
  git apply --verbose: exit code 128, a b c d e f g h i j k l
  patch --batch --forward --fuzz=5 -p1 -i: exit code 2, a b c d e f g h i j k l
  git apply --recount: exit code 0, a B c d e f g h I j k l
  unidiff: UnidiffParseError('Hunk diff line expected: @@ -8,3 +8,3 @@\n')
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
