#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SWE-ReX: a tab in a command is the completion key, and "!" in double quotes is the history.
#
# Version: swe-rex 1.4.0 (the runtime of SWE-agent), a bash session of its LocalDeployment, in a
#   folder with one file, README.md.
# Guess: a command arrives as it was sent, so a here-document writes the text that is in it.
# Behaviour: the session types the command into an interactive bash with line editing. A tab is
#   taken out, or replaced by a file name that fits: README, tab, x is written as "README.md x", and
#   the tab before a Makefile's recipe becomes the name of the folder's only file. A command with
#   "!word" in double quotes is not run at all; its exit code is 0. None of these is an error for
#   the caller.
# Why it matters: a model that writes a Makefile, Go code or a table by a here-document gets another
#   file, and sees no sign of it. What it gets depends on the other files in the folder. The rollout
#   then fails for a fault that is not the policy's.
# Source: BashSession.start of swerex/runtime/local.py gives pexpect a plain `bash`, which finds a
#   terminal, and BashSession._run_normal sends the command as typed text.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv swe-rex==1.4.0

cat >run.py <<'PYTHON'
import asyncio
import logging
import pathlib
import tempfile

logging.disable(logging.CRITICAL)

from swerex.deployment.local import LocalDeployment  # noqa: E402
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest  # noqa: E402

TEXTS = {
    "Makefile": "all:\n\techo hi\n",
    "table.tsv": "README\tx\n",
    "main.go": "if x {\n\tif y {\n\t\tz()\n",
    "spaces.py": "if x:\n    y = '!z'\n",
}


async def main() -> None:
    deployment = LocalDeployment()
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())

    async def run(command: str):
        return await deployment.runtime.run_in_session(BashAction(command=command, timeout=10))

    for name, text in TEXTS.items():
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "README.md").touch()
            await run(f"cd {folder}")
            result = await run(f"cat > {name} <<'EOF'\n{text}EOF")
            got = pathlib.Path(folder, name).read_text()
            print(f"{name}: sent {text!r}, got {got!r}, exit code {result.exit_code}")
            await run("cd /")
    for command in ('echo "Hello!you"', "echo 'Hello!you'"):
        result = await run(command)
        print(f"{command}: {result.output.strip()!r}, exit code {result.exit_code}")
    await deployment.stop()


asyncio.run(main())
PYTHON
seen=$(env -u INPUTRC HOME="$dir" TERM=dumb venv/bin/python run.py 2>errors.log) ||
  { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
Makefile: sent 'all:\n\techo hi\n', got 'all:\nREADME.md echo hi\n', exit code 0
table.tsv: sent 'README\tx\n', got 'README.md x\n', exit code 0
main.go: sent 'if x {\n\tif y {\n\t\tz()\n', got 'if x {\nREADME.md if y {\nREADME.md README.md z()\n', exit code 0
spaces.py: sent "if x:\n    y = '!z'\n", got "if x:\n    y = '!z'\n", exit code 0
echo "Hello!you": 'bash: !you: event not found', exit code 0
echo 'Hello!you': 'Hello!you', exit code 0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
