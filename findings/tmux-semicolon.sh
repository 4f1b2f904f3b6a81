#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Terminus 2 and libtmux: a semicolon at the end of the typed text is lost.
#
# Versions: harbor 0.26.0, the TmuxSession of its agent Terminus 2, on this machine instead of in a
#   container; libtmux 0.62.0; tmux of this machine (seen with 3.3a).
# Guess: Terminus 2's prompt says that "keystrokes are sent exactly as written", and libtmux's
#   literal=True is to "send keys literally". So what is typed arrives.
# Behaviour: tmux takes a semicolon at the end of any argument for the end of its own command, even
#   after `--` and with -l, and neither package escapes it. `int x = 1;` arrives without the
#   semicolon, `;;` and `\;` arrive as a single semicolon, and ";" alone does not arrive. There is
#   no error. If the same keystrokes contain a newline, nothing is lost, so most commands work.
# Why it matters: an agent that types a line and its newline in two steps, in an editor, a debugger
#   or an SQL prompt, ends up with a different program from the one it wrote. The trajectory has the
#   semicolon, so the model seems to have typed the right thing and received an error. With libtmux,
#   `find -exec ... \;` and the `;;` of a case fail.
# Source: _send_keys_command of harbor/agents/terminus_2/tmux_session.py; Pane.send_keys of
#   libtmux/pane.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
socket=tmux-semicolon-$$
trap 'tmux -L "$socket" kill-server 2>/dev/null || true; rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor==0.26.0 libtmux==0.62.0

cat >show.py <<'PYTHON'
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import libtmux
from harbor.agents.terminus_2.tmux_session import TmuxSession

socket = sys.argv[1]
TEXTS = ("int x = 1;", "int x = 1", "a; b", "case a) b;;", "find . -exec ls {} \\;", ";")


class Here:
    session_id = "here"

    async def exec(self, command, user=None, **options):
        tmux = f'tmux() {{ command tmux -L {socket} "$@"; }}'
        done = subprocess.run(["bash", "-c", f"{tmux}\n{command}"], capture_output=True, text=True)
        return SimpleNamespace(return_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def wait(path):
    """The lines of the file, once "ready" is the last one."""
    for _ in range(200):
        lines = path.read_text().splitlines() if path.exists() else []
        if lines[-1:] == ["ready"]:
            return lines[:-1]
        time.sleep(0.05)
    raise SystemExit(f"{path} did not come to an end")


async def terminus(path, *parts):
    session = TmuxSession(path.stem, Here(), "/dev/null", None, None)
    session._attempt_tmux_installation = lambda: asyncio.sleep(0)
    await session.start()
    await session.send_keys(f"cat >{path}\n", min_timeout_sec=1)
    for text in TEXTS:
        for part in parts:
            await session.send_keys(part.replace("TEXT", text))
    for keys in ("ready\n", "C-d"):
        await session.send_keys(keys, min_timeout_sec=0.2)
    return wait(path)


def pane(path, literal):
    server = libtmux.Server(socket_name=socket)
    session = server.new_session(path.stem, window_command=f"cat >{path}")
    time.sleep(1)
    for text in (*TEXTS, "ready"):
        session.active_pane.send_keys(text, literal=literal)
    return wait(path)


here = Path.cwd()
seen = {
    "Terminus 2, with its newline": asyncio.run(terminus(here / "one", "TEXT\n")),
    "Terminus 2, then a newline": asyncio.run(terminus(here / "two", "TEXT", "\n")),
    "libtmux": pane(here / "three", False),
    "libtmux, literal=True": pane(here / "four", True),
}
for index, text in enumerate(TEXTS):
    print(f"typed {text!r}:")
    for name, lines in seen.items():
        print(f"  {name}: {lines[index]!r}")
PYTHON
seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python show.py "$socket" 2>errors.log) ||
  { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
typed 'int x = 1;':
  Terminus 2, with its newline: 'int x = 1;'
  Terminus 2, then a newline: 'int x = 1'
  libtmux: 'int x = 1'
  libtmux, literal=True: 'int x = 1'
typed 'int x = 1':
  Terminus 2, with its newline: 'int x = 1'
  Terminus 2, then a newline: 'int x = 1'
  libtmux: 'int x = 1'
  libtmux, literal=True: 'int x = 1'
typed 'a; b':
  Terminus 2, with its newline: 'a; b'
  Terminus 2, then a newline: 'a; b'
  libtmux: 'a; b'
  libtmux, literal=True: 'a; b'
typed 'case a) b;;':
  Terminus 2, with its newline: 'case a) b;;'
  Terminus 2, then a newline: 'case a) b;'
  libtmux: 'case a) b;'
  libtmux, literal=True: 'case a) b;'
typed 'find . -exec ls {} \\;':
  Terminus 2, with its newline: 'find . -exec ls {} \\;'
  Terminus 2, then a newline: 'find . -exec ls {} ;'
  libtmux: 'find . -exec ls {} ;'
  libtmux, literal=True: 'find . -exec ls {} ;'
typed ';':
  Terminus 2, with its newline: ';'
  Terminus 2, then a newline: ''
  libtmux: ''
  libtmux, literal=True: ''
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
