#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Harbor: a refused call makes pass@k better, and one partial reward removes it for all tasks.
#
# Version: harbor 0.26.0; its own pass@k over trial results, as a job computes it at its end.
# Guess: with rewards of 0 and 1, a trial that ended with an error and was graded 0 is an attempt
#   that failed. If fewer attempts of one task count, its largest k is smaller; the other tasks keep
#   theirs. A task with a partial reward is left out.
# Behaviour: a trial that ended with an error of the model's server, here RateLimitError, is no
#   attempt, though it was graded 0: two of four like that and two solved give pass@2 of 1.0. The
#   task with the fewest attempts sets the largest k for all, so one task with a single attempt
#   leaves no pass@k at all. So does one reward of 0.5 in any task.
# Why it matters: a server that refuses half of the calls makes pass@k better. One unlucky task
#   takes pass@k out of the job's result, and its reader cannot tell that from a job with one
#   attempt a task.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor==0.26.0

seen=$(HARBOR_TELEMETRY=0 venv/bin/python - 2>errors.log <<'PYTHON'
import datetime
import pathlib

from harbor.models.task.id import LocalTaskId
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import AgentInfo, ExceptionInfo, TrialResult
from harbor.models.verifier.result import VerifierResult
from harbor.utils.pass_at_k import compute_pass_at_k_by_evals

NOW = datetime.datetime.now()
refused = ExceptionInfo(
    exception_type="RateLimitError", exception_message="", exception_traceback="", occurred_at=NOW
)


def trial(task, reward):
    return TrialResult(
        task_name=task, trial_name="t", trial_uri="u", task_checksum="c",
        task_id=LocalTaskId(path=pathlib.Path(task)), config=TrialConfig(task={"path": task}),
        agent_info=AgentInfo(name="agent", version="1"),
        verifier_result=VerifierResult(rewards={"reward": 0 if reward == "refused" else reward}),
        exception_info=refused if reward == "refused" else None,
    )  # fmt: skip


for job in (
    {"a": [1, 1, 0, 0]},
    {"a": [1, 1, "refused", "refused"]},
    {"a": [1, 1, 0, 0], "b": [1, "refused", "refused", "refused"]},
    {"a": [1, 1, 0, 0], "b": [0.5, 1, 1, 1]},
):
    trials = [trial(task, reward) for task, rewards in job.items() for reward in rewards]
    print(job, "->", compute_pass_at_k_by_evals(trials))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
{'a': [1, 1, 0, 0]} -> {'agent__adhoc': {2: 0.8333333333333334, 4: 1.0}}
{'a': [1, 1, 'refused', 'refused']} -> {'agent__adhoc': {2: 1.0}}
{'a': [1, 1, 0, 0], 'b': [1, 'refused', 'refused', 'refused']} -> {}
{'a': [1, 1, 0, 0], 'b': [0.5, 1, 1, 1]} -> {}
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
