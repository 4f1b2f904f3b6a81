#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Inspect Scout: of a Harbor trial with several steps it imports the last step alone.
#
# Versions: inspect-scout 0.6.1, inspect-ai 0.3.285, harbor 0.26.0.
# Guess: `scout import atif` makes a transcript of each trajectory.json in a job's folder, as its
#   dry run lists them, or says which it leaves out.
# Behaviour: a transcript's id is made of the trajectory's session id and the file's name, unless
#   there is a trajectory_id. Terminus-2 writes none, and one session id for all steps of a trial;
#   each file is named trajectory.json. So the file that was written last is imported, and the
#   others are dropped without a word. If one session id was set for the whole job, one transcript
#   of the job is left.
# Why it matters: a scan of rollouts for reward hacking or refusals looks at the last steps only,
#   and its rate is taken for that of the job. The dry run counted all of them.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv inspect-scout==0.6.1 inspect-ai==0.3.285 harbor==0.26.0

cat >save.py <<'PYTHON'
"""Saves the trajectories of two trials with two steps each."""

import json
import os
import pathlib
import sys

from harbor.models.trajectories import Trajectory

for number, place in enumerate(("a/steps/one", "a/steps/two", "b/steps/one", "b/steps/two")):
    trajectory = Trajectory(
        session_id="one for all" if sys.argv[1] == "shared" else f"{place[0]}__agent",
        agent={"name": "terminus-2", "version": "2", "model_name": "model"},
        steps=[
            {"step_id": 1, "source": "user", "message": place},
            {"step_id": 2, "source": "agent", "message": "done"},
        ],
    )
    path = pathlib.Path(sys.argv[1], place, "agent", "trajectory.json")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(trajectory.to_json_dict()))
    os.utime(path, (1_700_000_000 + number,) * 2)
PYTHON
cat >show.py <<'PYTHON'
import asyncio
import sys

from inspect_scout import transcripts_db


async def main() -> None:
    async with transcripts_db(sys.argv[1]) as database:
        async for transcript in database.select():
            print("imported:", transcript.transcript_id, transcript.source_uri)


asyncio.run(main())
PYTHON
import() { venv/bin/scout import atif -P "path=$1" -T "$1.db" --display plain "${@:2}"; }
seen=$(
  for job in job shared; do
    venv/bin/python save.py "$job"
    [ "$job" = shared ] || import "$job" --dry-run | grep found
    import "$job" | grep complete
    venv/bin/python show.py "$job.db" | sort
  done 2>errors.log
  cat errors.log
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
4 transcript(s) found.
Import complete. To view transcripts:
imported: a__agent-trajectory job/a/steps/two/agent/trajectory.json
imported: b__agent-trajectory job/b/steps/two/agent/trajectory.json
Import complete. To view transcripts:
imported: one for all-trajectory shared/b/steps/two/agent/trajectory.json
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
