#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# tinker-cookbook: a solved Harbor task with a binary file, slow tests or a named reward gives 0.
#
# Versions: tinker-cookbook 0.6.1, its HarborReward, and what that imports (tinker 0.38.0,
#   transformers 5.24.0, torch 2.13.0). A folder with bash stands in for the sandbox. Each task is
#   solved: its test.sh writes a reward.
# Guess: a task that Harbor grades gets the same reward here: any file may lie in tests/, task.toml
#   sets the verifier's time limit, and reward.json may have any names and several of them.
# Behaviour: all files of tests/ are read as text, so one image or archive ends the grading. The
#   limit is grader_timeout, 60 seconds by default, whatever task.toml says. Of reward.json only
#   "reward" is read. In all these cases the reward is 0, with a line in the log at most.
#   test_passed is 1.0 for any reward above 0.
# Why it matters: such a task gives 0 to all rollouts, which looks like a task that is too hard, and
#   teaches nothing. Where the tests take about a minute, right solutions get 1 or 0 by chance.
# Source: HarborReward of tinker_cookbook/recipes/harbor_rl/harbor_tools.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 tinker==0.38.0 transformers==5.24.0 datasets==5.2.0 tiktoken==0.14.0 \
  chz==0.4.0 blobfile==3.3.0 cloudpickle==3.1.3 termcolor==3.3.0 pillow==13.0.0 rich==15.0.0 \
  aiohttp==3.14.5
uv pip install -q --python venv --no-deps tinker-cookbook==0.6.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import subprocess
import tempfile
from pathlib import Path

from tinker_cookbook.recipes.harbor_rl.harbor_tools import HarborReward
from tinker_cookbook.sandbox import SandboxResult


class Folder:
    """A sandbox whose / is a folder of this machine."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp())

    async def run_command(self, command, workdir=None, timeout=60, max_output_bytes=None):
        for name in ("/tests", "/logs"):
            command = command.replace(name, f"{self.root}{name}")
        try:
            run = subprocess.run(
                command, shell=True, cwd=self.root, timeout=timeout, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return SandboxResult(stdout="", stderr="timed out", exit_code=124)
        return SandboxResult(stdout=run.stdout, stderr=run.stderr, exit_code=run.returncode)

    async def read_file(self, path, max_bytes=None, timeout=60):
        return await self.run_command(f"cat {path}")

    async def write_file(self, path, content, executable=False, timeout=60):
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        # test.sh names absolute paths, as in a container.
        content = content if isinstance(content, bytes) else content.encode()
        target.write_bytes(content.replace(b"/logs/", f"{self.root}/logs/".encode()))
        return SandboxResult(stdout="", stderr="", exit_code=0)


def grade(what, test, files=(), **options):
    tests = Path(tempfile.mkdtemp())
    (tests / "test.sh").write_text(test)
    for name, data in files:
        (tests / name).write_bytes(data)
    reward, metrics = asyncio.run(HarborReward(tests, Folder(), **options)([]))
    print(f"{what}: {reward} {metrics}")


ONE = "echo 1 >/logs/verifier/reward.txt\n"
grade("reward.txt", ONE)
grade("an image beside test.sh", ONE, [("expected.png", b"\x89PNG\r\n\x1a\n\x00\xff")])
grade("tests of 2 seconds, with a limit of 1", "sleep 2\n" + ONE, grader_timeout=1)
grade("reward 0.5", """echo '{"reward": 0.5}' >/logs/verifier/reward.json\n""")
grade("another name", """echo '{"accuracy": 1}' >/logs/verifier/reward.json\n""")
grade("two names", """echo '{"tests": 1, "style": 1}' >/logs/verifier/reward.json\n""")
print("default limit:", HarborReward(Path(), None).grader_timeout)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
reward.txt: 1.0 {'reward': 1.0, 'test_passed': 1.0}
an image beside test.sh: 0.0 {'reward': 0.0, 'test_passed': 0.0, 'grading_error': 1.0}
tests of 2 seconds, with a limit of 1: 0.0 {'reward': 0.0, 'test_passed': 0.0}
reward 0.5: 0.5 {'reward': 0.5, 'test_passed': 1.0}
another name: 0.0 {'reward': 0.0, 'test_passed': 0.0}
two names: 0.0 {'reward': 0.0, 'test_passed': 0.0}
default limit: 60
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
