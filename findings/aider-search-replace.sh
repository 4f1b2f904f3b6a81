#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# aider: a heading that is underlined with "=" splits an edit in the wrong place, and a first line
# that ends with the file's name is deleted.
#
# Version: aider-chat 0.86.2, the parser and the replacement of its edit format "diff". Of its wheel
#   only this module is used, with stand-ins for the modules that it imports.
# Guess: the file gets the text between ======= and >>>>>>> REPLACE, line by line, in place of the
#   one before. If the text cannot be found, the edit fails and the model hears of it.
# Behaviour: each line of five to nine "=" is the divider. So an edit of a section with such an
#   underline, as in reStructuredText and Markdown, replaces the title with the old body. The first
#   line of a text is removed if it ends with the file's name. So a new file new.py loses its
#   "# new.py", an added "# Usage: python app.py" changes nothing, and a changed one is there twice.
#   A replacement that is one fenced block loses its fences, so the first code block of a Markdown
#   file is plain text. No edit fails.
# Why it matters: the model wrote a right edit, and aider accepts it without an error. The file has
#   lost a title, a line or its fences. In a benchmark with this format, the model is blamed for it.
# Source: DIVIDER, find_original_update_blocks and strip_quoted_wrapping of
#   aider/coders/editblock_coder.py. For the underlines: Aider-AI/aider#1803, which is open.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv --no-deps aider-chat==0.86.2

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib
import pathlib
import sys
import sysconfig
import types
from unittest.mock import MagicMock

site = pathlib.Path(sysconfig.get_paths()["purelib"])
for name in ("aider", "aider.coders"):
    package = types.ModuleType(name)
    package.__path__ = [str(site / name.replace(".", "/"))]
    sys.modules[name] = package
sys.modules["aider.utils"] = sys.modules["aider.dump"] = MagicMock()
sys.modules["aider.coders.base_coder"] = types.SimpleNamespace(Coder=object)
blocks = importlib.import_module("aider.coders.editblock_coder")


def edit(title, name, before, search, replace):
    if before is not None:
        pathlib.Path(name).write_text(before)
    change = f"<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n"
    reply = f"{name}\n```\n{change}```\n"
    for file, old, new in blocks.find_original_update_blocks(reply, valid_fnames=[name]):
        after = blocks.do_replace(file, before, old, new, blocks.DEFAULT_FENCE)
    right = replace if before is None else before.replace(search, replace)
    print(f"{title}: {after!r}")
    print(f"  should be {right!r}")


RST = "Usage\n=====\nRun it.\n"
edit("a section", "a.rst", RST, RST, RST.replace("it", "it fast"))
edit("its body", "b.rst", RST, "Run it.\n", "Run it fast.\n")
edit("a new file", "new.py", None, "", "# new.py\nprint(1)\n")
edit("an added line", "app.py", "print(1)\n", "print(1)\n", "# Usage: python app.py\nprint(1)\n")
RUN = "# Run: python app.py\nprint(1)\n"
edit("a changed line", "app.py", RUN, RUN, RUN.replace(".py", ".py --fast"))
edit("a code block", "a.md", "To start:\n(later)\n", "(later)\n", "```\npython app.py\n```\n")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
a section: 'Run it.\n=====\nRun it.\n'
  should be 'Usage\n=====\nRun it fast.\n'
its body: 'Usage\n=====\nRun it fast.\n'
  should be 'Usage\n=====\nRun it fast.\n'
a new file: 'print(1)\n'
  should be '# new.py\nprint(1)\n'
an added line: 'print(1)\n'
  should be '# Usage: python app.py\nprint(1)\n'
a changed line: '# Run: python app.py\n# Run: python app.py --fast\nprint(1)\n'
  should be '# Run: python app.py --fast\nprint(1)\n'
a code block: 'To start:\npython app.py\n'
  should be 'To start:\n```\npython app.py\n```\n'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
