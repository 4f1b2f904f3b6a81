#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: one history reaches each provider as another one, some with sentences that nobody wrote.
#
# Versions: litellm 1.110.2, openai 3.57.0; a server on this machine that records requests.
# Guess: roles and fields get the provider's names, and system messages go where the provider wants
#   them. For the rest each provider gets the same turns: an empty reply as an empty text, two user
#   messages in a row as two.
# Behaviour: to Anthropic's API an empty reply is sent as the assistant's own words "[System: Empty
#   message content sanitised to satisfy protocol]", and a system message in the middle as part of
#   the user's turn, after a sentence that calls it an operator's note. Mistral's API gets no empty
#   reply at all. Anthropic and Google get two user messages as one. No option asks for any of this.
# Why it matters: the record holds the caller's messages; the model answered others, which differ by
#   provider. A model that reads in its own last turn that its message was sanitised goes on
#   otherwise than after silence, so a comparison of models is not one of the same conversation.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv litellm==1.110.2 openai==3.57.0

seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python - 2>errors.log <<'PYTHON'
import contextlib
import http.server
import json
import threading

import litellm

litellm.suppress_debug_info = True
sent = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_error(400)  # What was sent is all that is wanted.


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
where = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "unused"}
one, two, yes = ("user", "One."), ("user", "Two."), ("assistant", "Yes.")
histories = {
    "empty reply": [one, ("assistant", ""), two],
    "two in a row": [one, two],
    "late system": [one, yes, ("system", "Be quick."), two],
}
models = ("openrouter/a/b", "mistral/b", "gemini/gemini-2.5-pro", "anthropic/claude-opus-4-1")
for name, turns in histories.items():
    for model in models:
        chat = [{"role": role, "content": content} for role, content in turns]
        with contextlib.suppress(litellm.BadRequestError):
            litellm.completion(model, chat, max_tokens=9, **where)
        print(f"{name}, {model.split('/')[0]}")
        for message in sent[-1].get("contents") or sent[-1]["messages"]:
            parts = message.get("parts") or message["content"]
            texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts]
            print(" ", message["role"], *map(repr, texts))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
empty reply, openrouter
  user 'One.'
  assistant ''
  user 'Two.'
empty reply, mistral
  user 'One.'
  user 'Two.'
empty reply, gemini
  user 'One.'
  model ''
  user 'Two.'
empty reply, anthropic
  user 'One.'
  assistant '[System: Empty message content sanitised to satisfy protocol]'
  user 'Two.'
two in a row, openrouter
  user 'One.'
  user 'Two.'
two in a row, mistral
  user 'One.'
  user 'Two.'
two in a row, gemini
  user 'One.' 'Two.'
two in a row, anthropic
  user 'One.' 'Two.'
late system, openrouter
  user 'One.'
  assistant 'Yes.'
  system 'Be quick.'
  user 'Two.'
late system, mistral
  user 'One.'
  assistant 'Yes.'
  system 'Be quick.'
  user 'Two.'
late system, gemini
  user 'One.'
  model 'Yes.'
  user 'Two.'
late system, anthropic
  user 'One.'
  assistant 'Yes.'
  user 'Operator note (not from the user): the following was originally a mid-conversation system-role reminder.' 'Be quick.' 'Two.'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
