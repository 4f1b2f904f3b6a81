#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: on the way to Anthropic's API a conversation gets sentences that nobody wrote.
#
# Versions: litellm 1.110.2, openai 3.57.0; a server on this machine that records requests.
# Guess: system messages go into the request's `system`, wherever they are. An empty reply in the
#   history is left out, or refused by the API.
# Behaviour: a system message in the middle becomes part of the user's turn, with a sentence in
#   front that calls it an operator's note. An empty assistant message is sent as the assistant's
#   own words "[System: Empty message content sanitised to satisfy protocol]"; with None it is left
#   out, and the user messages around it become two in a row. No option asks for this, and the
#   caller's list is unchanged.
# Why it matters: the record holds the caller's messages, the model answered others. A model that
#   reads in its own last turn that its message was sanitised goes on otherwise than after silence.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv litellm==1.110.2 openai==3.57.0

seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python - 2>errors.log <<'PYTHON'
import http.server
import json
import threading

import litellm

litellm.suppress_debug_info = True
sent = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
where = {"api_base": f"http://127.0.0.1:{server.server_port}", "api_key": "unused"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]}
ANSWER |= {"model": "m", "stop_reason": "end_turn"}
ANSWER |= {"usage": {"input_tokens": 1, "output_tokens": 1}}
system, first, second = ("system", "Be brief."), ("user", "One."), ("user", "Two.")
for turns in (
    [system, first, ("assistant", "Yes."), ("system", "Time is short."), second],
    [system, first, ("assistant", ""), second],
    [system, first, ("assistant", None), second],
):
    chat = [{"role": role, "content": content} for role, content in turns]
    litellm.completion("anthropic/claude-opus-4-1", chat, max_tokens=9, **where)
    print("system:", *(part["text"] for part in sent[-1]["system"]))
    for message in sent[-1]["messages"]:
        for part in message["content"]:
            print(f"  {message['role']}: {part['text']}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
system: Be brief.
  user: One.
  assistant: Yes.
  user: Operator note (not from the user): the following was originally a mid-conversation system-role reminder.
  user: Time is short.
  user: Two.
system: Be brief.
  user: One.
  assistant: [System: Empty message content sanitised to satisfy protocol]
  user: Two.
system: Be brief.
  user: One.
  user: Two.
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
