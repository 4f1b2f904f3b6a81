#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Harbor: `traces export --filter success` leaves out solved trials: they count as failures.
#
# Version: harbor 0.26.0, datasets 5.2.0; `export_traces`, which is behind `harbor traces export`.
# Guess: "success" is a trial with a reward above 0, whatever the reward's name is, as in the job's
#   mean, and also if the agent's time ran out after the work was done. "failure" is a trial that
#   was graded 0.
# Behaviour: only the reward that is named "reward" is seen. A solved trial with {"accuracy": 1.0}
#   has the result None, and is a failure, as is a trial that was never graded. An exception wins
#   over the reward: a trial that was graded 1.0 after AgentTimeoutError has the exception's name
#   for its result, and is a failure. (A reward of 0.5 is a success.)
# Why it matters: whoever trains on the successes loses each solved trial that used up its time, and
#   all of a task set whose reward has another name. Whoever learns from the failures has solved and
#   ungraded trials among them.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor==0.26.0 datasets==5.2.0

export HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True
seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import contextlib
import datetime
import json
import os
import pathlib

from harbor.models.task.id import LocalTaskId
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import AgentInfo, ExceptionInfo, ModelInfo, TrialResult
from harbor.models.verifier.result import VerifierResult
from harbor.utils.traces_utils import export_traces

NOW = datetime.datetime.now()
JOB = pathlib.Path("job")
TIMED_OUT = ExceptionInfo(
    exception_type="AgentTimeoutError",
    exception_message="",
    exception_traceback="",
    occurred_at=NOW,
)


def save_trial(name, rewards, exception=None):
    """A finished trial of Harbor's own agent with one turn."""
    agent = {"name": "terminus-2", "version": "1", "model_name": "m"}
    steps = [
        {"step_id": 1, "source": "user", "message": "do it"},
        {"step_id": 2, "source": "agent", "message": "done", "model_name": "m"},
    ]
    trajectory = {
        "schema_version": "ATIF-v1.6", "session_id": name, "agent": agent, "steps": steps
    }
    result = TrialResult(
        task_name="task",
        trial_name=name,
        trial_uri="file:///trial",
        task_id=LocalTaskId(path=pathlib.Path("task")),
        task_checksum="x",
        config=TrialConfig(task={"path": "task"}, agent={"name": "terminus-2", "model_name": "m"}),
        agent_info=AgentInfo(
            name="terminus-2", version="1", model_info=ModelInfo(name="m", provider="p")
        ),
        verifier_result=VerifierResult(rewards=rewards) if rewards else None,
        exception_info=exception,
        started_at=NOW,
        finished_at=NOW,
    )
    (JOB / name / "agent").mkdir(parents=True)
    (JOB / name / "agent/trajectory.json").write_text(json.dumps(trajectory))
    (JOB / name / "result.json").write_text(result.model_dump_json())


save_trial("solved", {"reward": 1.0})
save_trial("half", {"reward": 0.5})
save_trial("failed", {"reward": 0.0})
save_trial("accuracy_1", {"accuracy": 1.0})
save_trial("timeout_1", {"reward": 1.0}, TIMED_OUT)
save_trial("not_graded", None)
for wanted in ("success", "failure"):
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        rows = export_traces(JOB, success_filter=wanted)
    print(wanted, *sorted(f"{row['trial_name']}={row['result']}" for row in rows))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
success half=0.5 solved=1.0
failure accuracy_1=None failed=0.0 not_graded=None timeout_1=AgentTimeoutError
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
