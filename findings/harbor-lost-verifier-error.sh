#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Harbor: a step whose verifier fails is left out of the reward, and after the agent's timeout its
# error is in no result.
#
# Version: harbor 0.26.0; tasks with two steps. The environment does nothing. In step two, the agent
#   exceeds its timeout of one second, or the verifier raises an error, or both.
# Guess: a trial with a step that could not be tested has no valid reward, as a trial without steps
#   has none. Its result names the verifier's error, whatever happened before.
# Behaviour: the trial has the reward of the other step, which Harbor calls valid. If the agent
#   timed out first, the step has only the AgentTimeoutError, and the verifier's error is nowhere in
#   result.json.
# Why it matters: a trial whose second half was never tested has the best reward, and training
#   takes the step that timed out for a part of a solved trial. Only the missing verifier_result of
#   the step shows that nothing was tested.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor==0.26.0

cat >stand_ins.py <<'PYTHON'
import asyncio

from harbor.agents.base import BaseAgent
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


class Agent(BaseAgent):
    name = staticmethod(lambda: "agent")
    version = staticmethod(lambda: "1")
    setup = nothing

    async def run(self, instruction, environment, context):
        if "slow" in instruction:
            await asyncio.sleep(30)


class Verifier(BaseVerifier):
    async def verify(self):
        if "broken" in (self.task.paths.steps_dir / self.step_name / "instruction.md").read_text():
            raise RuntimeError("the tests could not run")
        return VerifierResult(rewards={"reward": 1.0})
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

# The name of each task, which is also the instruction of its second step.
TASKS = "slow", "broken", "slow-and-broken"


def save_task(name):
    task = pathlib.Path("tasks", name)
    lines = ["[agent]", "timeout_sec = 1"]
    for step, text in (("one", "fine"), ("two", name)):
        lines += ["[[steps]]", f'name = "{step}"']
        (task / "steps" / step / "tests").mkdir(parents=True)
        (task / "steps" / step / "tests" / "test.sh").touch()
        (task / "steps" / step / "instruction.md").write_text(text)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "task.toml").write_text("\n".join(lines))
    return {"path": str(task)}


def show(name, part):
    rewards = part.verifier_result and part.verifier_result.rewards
    error = part.exception_info and part.exception_info.exception_type
    print(f"{name}: rewards {rewards}, error {error}")


async def main():
    config = JobConfig(
        job_name="job",
        jobs_dir="jobs",
        quiet=True,
        tasks=[save_task(name) for name in TASKS],
        agents=[{"import_path": "stand_ins:Agent"}],
        environment={"import_path": "stand_ins:NoEnvironment"},
        verifier={"import_path": "stand_ins:Verifier"},
    )
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        await (await Job.create(config)).run()
    for name in TASKS:
        (path,) = pathlib.Path("jobs/job").glob(f"{name}__*/result.json")
        trial = TrialResult.model_validate_json(path.read_text())
        show(f"{name}, valid {trial.reward_valid}", trial)
        for step in trial.step_results:
            show(f"  step {step.step_name}", step)
        print("  names the verifier's error:", "could not run" in path.read_text())


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
slow, valid True: rewards {'reward': 1.0}, error None
  step one: rewards {'reward': 1.0}, error None
  step two: rewards {'reward': 1.0}, error AgentTimeoutError
  names the verifier's error: False
broken, valid True: rewards {'reward': 1.0}, error None
  step one: rewards {'reward': 1.0}, error None
  step two: rewards None, error RuntimeError
  names the verifier's error: True
slow-and-broken, valid True: rewards {'reward': 1.0}, error None
  step one: rewards {'reward': 1.0}, error None
  step two: rewards None, error AgentTimeoutError
  names the verifier's error: False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
