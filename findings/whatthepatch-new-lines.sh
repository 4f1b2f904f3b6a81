#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# whatthepatch: if the number behind "+" in a hunk's header is wrong, the new lines land elsewhere
# in the file, without an error; git finds their place by the context.
#
# Versions: whatthepatch 1.0.7, git 2.39.
# Guess: apply_diff puts a hunk where its context is. It checks the context, and raises
#   HunkApplyException if that does not fit, so a patch is applied as git applies it, or not at all.
# Behaviour: context and removed lines are looked up by the number behind "-", and each new line is
#   inserted at the number behind "+". If an earlier hunk was left out, or the model forgot its
#   lines, the two numbers do not fit together. Then the old line is removed from its place, and the
#   new one lands above or below it.
# Why it matters: a model that writes a patch by hand gets the second number wrong, and a patch from
#   which one hunk was taken has it wrong by nature. A grader or an agent's tool that applies such
#   patches with whatthepatch gets another program than git does, and counts a right patch as wrong.
# Source: apply_diff of whatthepatch/apply.py; a comment there, but not the documentation, says that
#   a removed hunk makes the numbers unreliable.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv whatthepatch==1.0.7

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import subprocess

import whatthepatch

TEXT = "".join(f"{letter}\n" for letter in "abcdefghijkl")
FIRST = "@@ -1,2 +1,3 @@\n a\n+NEW\n b\n"
SECOND = "@@ -6,3 +{},3 @@\n f\n-g\n+G\n h\n"
PATCHES = {
    "as diff writes it": FIRST + SECOND.format(7),
    "the second hunk forgets the first": FIRST + SECOND.format(6),
    "the second hunk alone, as it was": SECOND.format(7),
    "the second hunk alone, after a long one": SECOND.format(9),
    "context that is not in the file": SECOND.format(6).replace(" h", " x"),
}


def git(patch):
    pathlib.Path("file").write_text(TEXT)
    result = subprocess.run(["git", "apply", "-"], input=patch, capture_output=True, text=True)
    return pathlib.Path("file").read_text() if result.returncode == 0 else result.stderr.strip()


def apply_diff(patch):
    (diff,) = whatthepatch.parse_patch(patch)
    return "\n".join(whatthepatch.apply_diff(diff, TEXT))


for name, hunks in PATCHES.items():
    print(name)
    patch = f"--- a/file\n+++ b/file\n{hunks}"
    for call in git, apply_diff:
        try:
            seen = " ".join(call(patch).split())
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
        print(f"  {call.__name__}: {seen}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
as diff writes it
  git: a NEW b c d e f G h i j k l
  apply_diff: a NEW b c d e f G h i j k l
the second hunk forgets the first
  git: a NEW b c d e f G h i j k l
  apply_diff: a NEW b c d e G f h i j k l
the second hunk alone, as it was
  git: a b c d e f G h i j k l
  apply_diff: a b c d e f h G i j k l
the second hunk alone, after a long one
  git: a b c d e f G h i j k l
  apply_diff: a b c d e f h i j G k l
context that is not in the file
  git: error: patch failed: file:6 error: file: patch does not apply
  apply_diff: HunkApplyException: context line 8, "x" does not match "h", in hunk #1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
