#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# mini-swe-agent: the submitted patch of a file with CRLF line ends does not apply.
#
# Versions: mini-swe-agent 2.4.6, its DefaultAgent with a LocalEnvironment and its own model with
#   fixed replies; git 2.39 and GNU patch 2.7 of this machine. The environments for Docker,
#   Singularity and bubblewrap read the output alike.
# Guess: the submission is what the last command printed, so `git diff` in it is a patch that
#   `git apply` takes.
# Behaviour: the output is read as text with universal newlines, so each CRLF becomes LF. The patch
#   for a CRLF file then applies nowhere: `git apply` and `patch` reject it, even with the options
#   that SWE-bench's harness (swebench 5.0.2) tries. The exit status is still Submitted.
# Why it matters: the agent solved the task and tested its fix, but the harness applies the
#   submission in a fresh container, and the instance counts as unresolved. The failure looks like a
#   wrong patch from the model. The observations lack the CR as well, so no trajectory shows the
#   cause.
# Source: LocalEnvironment.execute and _run of minisweagent/environments/local.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
export MSWEA_GLOBAL_CONFIG_DIR=$dir/config MSWEA_SILENT_STARTUP=1

cat >show.py <<'PYTHON'
import subprocess
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel, make_output

FIX = "sed -i 's/return 1/return 2/' a.py && git diff >../patch.txt"
PROGRAMS = (
    "git apply",
    "git apply --3way",
    "git apply --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat ../patch.txt"


def shell(command, folder):
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True)


for end in ("\n", "\r\n"):
    work = Path("lf" if end == "\n" else "crlf")
    repo = work / "repo"
    repo.mkdir(parents=True)
    (repo / "a.py").write_bytes(f"def f():{end}    return 1{end}".encode())
    shell("git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm 1", repo)

    commands = [FIX, SUBMIT]
    model = DeterministicModel(outputs=[make_output("", [{"command": c}]) for c in commands])
    environment = LocalEnvironment(cwd=str(repo))
    result = DefaultAgent(model, environment, system_template="", instance_template="").run()
    fixed = (repo / "a.py").read_bytes()

    (work / "submission.txt").write_text(result["submission"], newline="")
    same = (work / "submission.txt").read_bytes() == (work / "patch.txt").read_bytes()
    print(f"{work}: {result['exit_status']}, as git diff wrote it: {same}")
    for program in PROGRAMS:
        fits = []
        for patch in ("patch.txt", "submission.txt"):
            shell("git reset -q --hard && git clean -fdq", repo)
            shell(f"{program} ../{patch}", repo)
            fits.append((repo / "a.py").read_bytes() == fixed)
        print(f"  {program}: git diff's own patch fits: {fits[0]}, the submission: {fits[1]}")
PYTHON
seen=$(uv run -q --no-project --python 3.13 --with 'mini-swe-agent==2.4.6' python show.py \
  2>errors.log) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
lf: Submitted, as git diff wrote it: True
  git apply: git diff's own patch fits: True, the submission: True
  git apply --3way: git diff's own patch fits: True, the submission: True
  git apply --reject: git diff's own patch fits: True, the submission: True
  patch --batch --forward --fuzz=5 -p1 -i: git diff's own patch fits: True, the submission: True
crlf: Submitted, as git diff wrote it: False
  git apply: git diff's own patch fits: True, the submission: False
  git apply --3way: git diff's own patch fits: True, the submission: False
  git apply --reject: git diff's own patch fits: True, the submission: False
  patch --batch --forward --fuzz=5 -p1 -i: git diff's own patch fits: True, the submission: False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
