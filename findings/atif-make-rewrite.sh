#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# atif-make: an ATIF file that passes through it has no token ids, no logprobs and no marks of
# copied steps, and its tool calls lose arguments.
#
# Versions: atif-make 0.10.0, atif 1.8.0. The file is an ATIF-v1.7 trajectory, the version that
#   atif-make itself writes.
# Guess: a trajectory that is ATIF already comes out as it was, apart from its layout. Only fields
#   of a newer version may be missing, as the documentation says.
# Behaviour: what atif-make's own parsers do not fill is dropped: prompt_token_ids,
#   completion_token_ids and logprobs, which ATIF has had since v1.4, is_copied_context, and the
#   reference to the trajectory's continuation. A null in a tool call's arguments is removed with
#   its key. The output is valid and still says ATIF-v1.7, and no message names the loss. With
#   the atif package, the same round trip changes nothing.
# Why it matters: a trajectory that was rewritten or bundled with it can no longer be trained on as
#   it was sampled. A copied step, which must not be trained on, looks like the model's own. A call
#   that said "no limit" by a null falls back to the tool's default.
# Source: Metrics, Step and _clean in atif_make/atif.py; _build ignores the other keys.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv atif-make==0.10.0 atif==1.8.0
cat >trajectory.json <<'JSON'
{"schema_version": "ATIF-v1.7", "session_id": "run-1",
 "agent": {"name": "an-agent", "version": "1.0", "model_name": "a-model"},
 "steps": [
  {"step_id": 1, "source": "user", "message": "How many lines has a.txt?"},
  {"step_id": 2, "source": "agent", "message": "From an earlier run.", "is_copied_context": true},
  {"step_id": 3, "source": "agent", "message": "", "tool_calls": [
    {"tool_call_id": "1", "function_name": "read", "arguments": {"path": "a.txt", "limit": null}}],
   "observation": {"results": [{"source_call_id": "1", "content": "one\ntwo\n"}]},
   "metrics": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_token_ids": [1, 2, 3],
    "completion_token_ids": [4, 5], "logprobs": [-0.1, -0.2]}},
  {"step_id": 4, "source": "agent", "message": "Two.", "metrics": {"completion_tokens": 1,
    "completion_token_ids": [6], "logprobs": [-0.5]}}],
 "continued_trajectory_ref": "trajectory.cont-1.json"}
JSON

venv/bin/atif-make trajectory.json -o out.json 2>messages.log || { cat messages.log; exit 1; }
seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json
import pathlib

import atif


def paths(value, path=""):
    if not isinstance(value, dict | list) or not value:
        return {path}
    items = value.items() if isinstance(value, dict) else enumerate(value, 1)
    return {found for key, item in items for found in paths(item, f"{path}/{key}")}


print(*pathlib.Path("messages.log").read_text().splitlines(), sep="\n")
files = "trajectory.json", "out.json"
before, after = (json.loads(pathlib.Path(file).read_text()) for file in files)
print("lost:", *sorted(paths(before) - paths(after)), sep="\n  ")
print("new:", *paths(after) - paths(before))
print("version:", after["schema_version"])
print("atif accepts it:", atif.Trajectory.model_validate(after) is not None)
print("atif changes nothing:", atif.Trajectory.model_validate(before).to_json_dict() == before)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
detected: atif
wrote out.json
4 steps
lost:
  /continued_trajectory_ref
  /steps/2/is_copied_context
  /steps/3/metrics/completion_token_ids/1
  /steps/3/metrics/completion_token_ids/2
  /steps/3/metrics/logprobs/1
  /steps/3/metrics/logprobs/2
  /steps/3/metrics/prompt_token_ids/1
  /steps/3/metrics/prompt_token_ids/2
  /steps/3/metrics/prompt_token_ids/3
  /steps/3/tool_calls/1/arguments/limit
  /steps/4/metrics/completion_token_ids/1
  /steps/4/metrics/logprobs/1
new: /trajectory_id
version: ATIF-v1.7
atif accepts it: True
atif changes nothing: True
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
