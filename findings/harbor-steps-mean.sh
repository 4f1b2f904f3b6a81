#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Harbor: a trial that fails its second step and stops has a higher reward than one that passes it.
#
# Version: harbor 0.26.0; a job of five tasks with three steps each. The environment does nothing,
#   and the verifier gives each step the reward that the task's metadata has for it.
# Guess: min_reward = 0.5 ends a trial after a step below 0.5. With the strategy "mean", the steps
#   that it did not reach count 0. With "final", its reward is 0, or it has none.
# Behaviour: "mean" is the mean of the steps that ran, and "final" the reward of the last one that
#   ran. Steps of 0.9 and 0.4 are 0.65, while 0.9, 0.5 and 0 are 0.47. With "final", a trial that
#   failed its first step has that step's 0.4, and one that failed only its last step has 0. Harbor
#   calls each of these rewards valid.
# Why it matters: RL rewards the trial that failed earlier. A job's mean compares trials that were
#   graded on different numbers of steps, and a min_reward that is added to a task can raise it:
#   without one, 0.9, 0.4 and 0 are 0.43.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor==0.26.0

cat >stand_ins.py <<'PYTHON'
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier


async def nothing(self, *args, **kwargs):
    return ExecResult(stdout="", stderr="", return_code=0)


class NoEnvironment(BaseEnvironment):
    type = staticmethod(lambda: "none")
    start = stop = exec = prepare_logs_for_host = nothing
    upload_file = upload_dir = download_file = download_dir = nothing

    def _validate_definition(self):
        pass


class MetadataVerifier(BaseVerifier):
    async def verify(self):
        return VerifierResult(rewards={"reward": self.task.config.metadata[self.step_name]})
PYTHON
export HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True PYTHONPATH=.
seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import contextlib
import os
import pathlib

from harbor.job import Job
from harbor.models.job.config import JobConfig
from harbor.models.trial.result import TrialResult

TASKS = {
    "mean-fails-3": ("mean", 0.5, {"one": 0.9, "two": 0.5, "three": 0.0}),
    "mean-fails-2": ("mean", 0.5, {"one": 0.9, "two": 0.4, "three": 0.0}),
    "mean-no-min": ("mean", None, {"one": 0.9, "two": 0.4, "three": 0.0}),
    "final-fails-3": ("final", 0.5, {"one": 1.0, "two": 1.0, "three": 0.0}),
    "final-fails-1": ("final", 0.5, {"one": 0.4, "two": 1.0, "three": 1.0}),
}


def save_task(name, strategy, least, rewards):
    task = pathlib.Path("tasks", name)
    lines = [f'multi_step_reward_strategy = "{strategy}"', "[metadata]"]
    lines += [f"{step} = {reward}" for step, reward in rewards.items()]
    for step in rewards:
        lines += ["[[steps]]", f'name = "{step}"']
        lines += [f"min_reward = {least}"] if least else []
        (task / "steps" / step / "tests").mkdir(parents=True)
        (task / "steps" / step / "tests" / "test.sh").touch()
        (task / "steps" / step / "instruction.md").write_text(step)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "task.toml").write_text("\n".join(lines))
    return {"path": str(task)}


async def main():
    config = JobConfig(
        job_name="job",
        jobs_dir="jobs",
        quiet=True,
        tasks=[save_task(name, *task) for name, task in TASKS.items()],
        agents=[{"name": "nop"}],
        environment={"import_path": "stand_ins:NoEnvironment"},
        verifier={"import_path": "stand_ins:MetadataVerifier"},
    )
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        await (await Job.create(config)).run()
    results = pathlib.Path("jobs/job").glob("*/result.json")
    trials = [TrialResult.model_validate_json(path.read_text()) for path in results]
    for trial in sorted(trials, key=lambda trial: list(TASKS).index(trial.task_name)):
        steps = [step.verifier_result.rewards["reward"] for step in trial.step_results]
        reward = round(trial.verifier_result.rewards["reward"], 2)
        print(f"{trial.task_name}: steps {steps}, reward {reward}, valid {trial.reward_valid}")


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
mean-fails-3: steps [0.9, 0.5, 0.0], reward 0.47, valid True
mean-fails-2: steps [0.9, 0.4], reward 0.65, valid True
mean-no-min: steps [0.9, 0.4, 0.0], reward 0.43, valid True
final-fails-3: steps [1.0, 1.0, 0.0], reward 0.0, valid True
final-fails-1: steps [0.4], reward 0.4, valid True
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
