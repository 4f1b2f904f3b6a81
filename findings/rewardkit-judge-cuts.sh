#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# rewardkit: its judge model reads a cut version of a trajectory that would fit many times over.
#
# Versions: harbor-rewardkit 0.2.3, litellm 1.110.2, tiktoken 0.14.0; a server on this machine plays
#   the judge model and records requests.
# Guess: with `atif-trajectory`, the judge reads each message and each observation. Only a
#   trajectory that is too long for the judge's context is cut: in its middle, so that the last
#   turns stay, and with a warning in reward-details.json.
# Behaviour: the context's tokens are divided by the number of texts, and each text is cut at its
#   end to that share, whether or not the whole fits. The last message here, a report of 4,000
#   tokens, is whole after 10 short turns, ends at line 297 after 100 and at line 75 after 400, with
#   98% of the context free. Three dots are the only sign. A warning comes only if the trajectory is
#   too long after the cuts.
# Why it matters: a judge grades the first part of an answer for the whole, and reads a test run
#   without its summary. The same answer after more turns is a shorter one to it, so the reward can
#   depend on the number of turns.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv harbor-rewardkit==0.2.3 litellm==1.110.2 tiktoken==0.14.0

export LITELLM_LOCAL_MODEL_COST_MAP=True
seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import http.server
import json
import os
import pathlib
import re
import threading

import litellm
import rewardkit

JUDGE = """
[judge]
judge = "openai/gpt-5-mini"
atif-trajectory = "trajectory.json"
[[criterion]]
name = "complete"
description = "Does the report have all 1000 lines?"
"""
requests = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        verdict = json.dumps({"complete": {"score": "yes", "reasoning": ""}})
        message = {"role": "assistant", "content": verdict}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "1", "object": "chat.completion", "created": 1, "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply | {"model": "judge"}).encode())

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OPENAI_API_BASE"] = f"http://127.0.0.1:{server.server_port}/v1"
os.environ["OPENAI_API_KEY"] = "none"
pathlib.Path("tests").mkdir()
pathlib.Path("tests/judge.toml").write_text(JUDGE)

report = "\n".join(f"line {number}" for number in range(1, 1001))
print("context:", litellm.get_model_info("openai/gpt-5-mini")["max_input_tokens"])
for turns in (10, 100, 400):
    turn = {"source": "agent", "message": "ls", "observation": {"results": [{"content": "ok"}]}}
    steps = [{"source": "user", "message": "Write a report of 1000 lines."}, *[turn] * turns]
    steps.append({"source": "agent", "message": report})
    trajectory = {
        "schema_version": "ATIF-v1.7",
        "session_id": "one",
        "agent": {"name": "agent", "version": "1"},
        "steps": [{"step_id": number} | step for number, step in enumerate(steps, 1)],
    }
    pathlib.Path("trajectory.json").write_text(json.dumps(trajectory))
    rewardkit.run("tests", workspace="tests", output="reward.json")
    details = json.loads(pathlib.Path("reward-details.json").read_text())["reward"]
    prompt = "".join(part["text"] for part in requests[-1]["messages"][-1]["content"])
    tokens = len(litellm.encode(model="openai/gpt-5-mini", text=prompt))
    last = re.findall(r"line \d+", prompt)[-1]
    end = prompt[prompt.rindex(last):]
    print(f"{turns} turns: {tokens} tokens, end {end!r}, warnings {details.get('warnings')}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
context: 272000
10 turns: 4165 tokens, end 'line 1000', warnings None
100 turns: 2523 tokens, end 'line 297...', warnings None
400 turns: 5535 tokens, end 'line 75...', warnings None
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
