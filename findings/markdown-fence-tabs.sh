#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# markdown-it-py: one space before a fence turns the tabs of its content into spaces.
#
# Version: markdown-it-py 4.3.0 (rich brings it, so each Harbor has it).
# Guess: a fence may be indented by up to three spaces; that many spaces are then taken off each
#   line of its content, if the line has them. A line that begins with a tab has none, so it is left
#   alone.
# Behaviour: the tab counts as four columns. The fence's indent is taken off them, and what is left
#   of the tab is written as spaces: after one space before the fence a recipe line of a Makefile
#   begins with three spaces. A second tab on the line stays a tab. A fence in column 0, or lines
#   that are indented like their fence, keep all tabs.
# Why it matters: an agent that runs what is in the fence writes another Makefile, here-document
#   (<<-) or TSV than the model sampled. The recorded reply looks right, and make's "missing
#   separator" looks like the model's fault.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv markdown-it-py==4.3.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
from markdown_it import MarkdownIt

for name, text in (
    ("column 0", "```make\nall:\n\techo a\tb\n```\n"),
    ("one space", " ```make\nall:\n\techo a\tb\n ```\n"),
    ("one space, all lines", " ```make\n all:\n \techo a\tb\n ```\n"),
    ("two tabs", " ```\n\t\tdeep\n ```\n"),
):
    fence = next(token for token in MarkdownIt().parse(text) if token.type == "fence")
    print(f"{name}: {fence.content!r}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
column 0: 'all:\n\techo a\tb\n'
one space: 'all:\n   echo a\tb\n'
one space, all lines: 'all:\n\techo a\tb\n'
two tabs: '   \tdeep\n'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
