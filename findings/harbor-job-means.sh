#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Harbor: a job's result.json and its viewer give two means, and two settings are mixed into one.
#
# Version: harbor 0.26.0; four jobs of two tasks and two attempts each. The environment does
#   nothing, an agent with effort=high solves each task, and one with effort=low solves none.
# Guess: the job's result.json has a mean and a pass@k for each agent of the job's configuration, on
#   each dataset, and `harbor view` shows the same mean.
# Behaviour: a row is keyed by agent name, model name and dataset, but not by the provider or the
#   agent's kwargs. So high and low effort share one row, with a mean of 0.5 and a pass@4 of 1.0
#   from two attempts each. Two providers of one model also share a row, though the viewer shows
#   them apart. If two tasks name their rewards differently, result.json counts each name as 0 for
#   the other task, and the viewer leaves it out: 0.5 and 1.0 for the same job. A dataset folder
#   with "__" in its name has no mean in result.json, because the dataset is parsed from the end of
#   that key.
# Why it matters: a comparison of two settings in one job yields one number that belongs to neither,
#   and a pass@k for a k that nobody ran. Which mean ends up in a table depends on where one looks.
# Source: JobStats.format_agent_evals_key of harbor/models/job/result.py, Job.run of harbor/job.py,
#   aggregate_reward_dicts of harbor/metrics/base.py, cohort_evals of harbor/viewer/queries.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor==0.26.0

cat >stand_ins.py <<'PYTHON'
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

    def __init__(self, *args, effort, **kwargs):
        super().__init__(*args, **kwargs)
        self.effort = effort

    async def run(self, instruction, environment, context):
        (self.logs_dir / "effort").write_text(self.effort)


class EffortVerifier(BaseVerifier):
    async def verify(self):
        solved = (self.trial_paths.agent_dir / "effort").read_text() == "high"
        return VerifierResult(rewards={self.task.config.metadata["reward"]: int(solved)})
PYTHON
export HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True PYTHONPATH=.
seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import contextlib
import json
import os
import pathlib

from harbor.job import Job
from harbor.models.job.config import JobConfig
from harbor.viewer.queries import cohort_evals
from harbor.viewer.sources.folder import FolderSource


def save_task(dataset, name, reward):
    task = pathlib.Path(dataset, name)
    for folder in ("tests", "environment"):
        (task / folder).mkdir(parents=True)
    (task / "tests" / "test.sh").touch()
    (task / "instruction.md").write_text(name)
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "task.toml").write_text(f'[metadata]\nreward = "{reward}"\n')


def agent(model, effort):
    path = "stand_ins:Agent"
    return {"import_path": path, "model_name": model, "kwargs": {"effort": effort}}


JOBS = {
    "two settings": ("tasks", agent("openai/m", "low"), agent("openai/m", "high")),
    "two providers": ("tasks", agent("openai/m", "low"), agent("azure/m", "high")),
    "two reward names": ("names", agent("openai/m", "high")),
    "a folder tasks__v2": ("tasks__v2", agent("openai/m", "high")),
}


async def main():
    for dataset in ("tasks", "tasks__v2", "names"):
        save_task(dataset, "one", "reward")
        save_task(dataset, "two", "score" if dataset == "names" else "reward")
    for name, (dataset, *agents) in JOBS.items():
        config = JobConfig(
            job_name=name,
            jobs_dir="jobs",
            quiet=True,
            datasets=[{"path": dataset}],
            agents=agents,
            n_attempts=2,
            environment={"import_path": "stand_ins:NoEnvironment"},
            verifier={"import_path": "stand_ins:EffortVerifier"},
        )
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            await (await Job.create(config)).run()
    viewer = FolderSource(pathlib.Path("jobs"))
    ids = {job["name"]: job["id"] for job in (await viewer.read("jobs", {}))["items"]}
    for name in JOBS:
        print(f"{name}:")
        result = json.loads(pathlib.Path("jobs", name, "result.json").read_text())
        for key, row in result["stats"]["evals"].items():
            print(f"  result.json, {key}: {row['metrics']}, pass@k {row['pass_at_k']}")
        for key, row in sorted((await cohort_evals(viewer, ids[name])).items()):
            print(f"  viewer, {key.removeprefix('stand_ins:')}: {row.metrics}")
    await viewer.close()


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
two settings:
  result.json, agent__m__tasks: [{'mean': 0.5}], pass@k {'2': 0.8333333333333334, '4': 1.0}
  viewer, Agent__openai/m__tasks: [{'reward': 0.5}]
two providers:
  result.json, agent__m__tasks: [{'mean': 0.5}], pass@k {'2': 0.8333333333333334, '4': 1.0}
  viewer, Agent__azure/m__tasks: [{'reward': 1.0}]
  viewer, Agent__openai/m__tasks: [{'reward': 0.0}]
two reward names:
  result.json, agent__m__names: [{'reward': 0.5, 'score': 0.5}], pass@k {'2': 1.0}
  viewer, Agent__openai/m__names: [{'reward': 1.0, 'score': 1.0}]
a folder tasks__v2:
  result.json, agent__m__tasks__v2: [], pass@k {'2': 1.0}
  viewer, Agent__openai/m__tasks__v2: [{'reward': 1.0}]
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
