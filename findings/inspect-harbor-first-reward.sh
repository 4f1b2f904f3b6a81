#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# inspect-harbor: of a task's rewards the first one in the file is the score, whatever it measures.
#
# Versions: inspect-harbor 1.0.0, inspect-ai 0.3.285, harbor-rewardkit 0.2.3, litellm 1.110.2; a
#   folder stands in for the container.
# Guess: a task with rewards of several names has a score for each name, as Harbor's own job has a
#   mean for each, or one score that is their mean.
# Behaviour: the score is the reward that is named "reward". Without it, it is the first one in
#   reward.json. rewardkit writes one reward for each folder of tests, in the order of their names,
#   and a total of another name behind them. So brevity is the score and correctness is not, and if
#   the folder is renamed to terseness, it is the other way round.
# Why it matters: the same work, graded by the same tests, has an accuracy of 1 or of 0, by the name
#   of a folder. Nothing in the log's results says which reward it is.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-harbor==1.0.0 inspect-ai==0.3.285 \
  harbor-rewardkit==0.2.3 litellm==1.110.2

export LITELLM_LOCAL_MODEL_COST_MAP=True
seen=$(PATH="$dir/venv/bin:$PATH" venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import subprocess
import tempfile

from inspect_ai import eval, task_with
from inspect_ai.solver import solver
from inspect_ai.util import ComposeConfig, ExecResult, SandboxEnvironment, sandboxenv
from inspect_harbor import harbor

GRADE = "rewardkit tests --workspace . --output logs/verifier/reward.json\n"
PASSES = "from rewardkit import criteria\ncriteria.command_succeeds('true')\n"
FAILS = "from rewardkit import criteria\ncriteria.command_succeeds('false')\n"


@sandboxenv(name="folder")
class Folder(SandboxEnvironment):
    """A container's files in a folder of the host: /tests/test.sh is tests/test.sh there."""

    def __init__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(dir="."))

    @classmethod
    def config_deserialize(cls, config):
        return ComposeConfig.model_validate(config)

    @classmethod
    async def sample_init(cls, task_name, config, metadata):
        return {"default": cls()}

    @classmethod
    async def sample_cleanup(cls, task_name, config, environments, interrupted):
        pass

    async def exec(self, cmd, *args, **kwargs):
        if "test.sh" in cmd[-1]:
            run = subprocess.run(["sh", "tests/test.sh"], cwd=self.root, capture_output=True)
            return ExecResult(run.returncode == 0, run.returncode, "", "")
        return ExecResult(True, 0, "", "")

    async def write_file(self, file, contents):
        path = self.root / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)

    async def read_file(self, file, text=True):
        return (self.root / file.lstrip("/")).read_text()


@solver
def nothing():
    async def solve(state, generate):
        return state

    return solve


for name, names, total in (
    ("one", ("brevity", "correctness"), None),
    ("two", ("terseness", "correctness"), None),
    ("three", ("brevity", "correctness"), "total"),
    ("four", ("brevity", "correctness"), "reward"),
):
    task = pathlib.Path(name).resolve()
    for folder, criterion in zip(names, (PASSES, FAILS), strict=True):
        (task / "tests" / folder).mkdir(parents=True)
        (task / "tests" / folder / "check.py").write_text(criterion)
    if total:
        table = f'[[reward]]\nname = "{total}"\naggregation = "all-pass"\n'
        (task / "tests" / "reward.toml").write_text(table)
    (task / "tests" / "test.sh").write_text(GRADE)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "instruction.md").write_text("Do it.")
    (task / "task.toml").touch()
    evaluated = task_with(harbor(str(task), sandbox_env_name="folder"), solver=nothing())
    (log,) = eval(evaluated, model="none", display="none", log_dir="logs")
    (score,) = log.samples[0].scores.values()
    (result,) = log.results.scores
    rewards, accuracy = score.metadata["reward_dict"], result.metrics["accuracy"].value
    print(f"{rewards}: {score.answer}, {result.name} accuracy {accuracy}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
{'brevity': 1.0, 'correctness': 0.0}: PASS, harbor_scorer accuracy 1.0
{'correctness': 0.0, 'terseness': 1.0}: FAIL, harbor_scorer accuracy 0.0
{'brevity': 1.0, 'correctness': 0.0, 'total': 0.0}: PASS, harbor_scorer accuracy 1.0
{'brevity': 1.0, 'correctness': 0.0, 'reward': 0.0}: FAIL, harbor_scorer accuracy 0.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
