#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: the name of your own model decides which options reach your own server.
#
# Versions: litellm 1.110.2, openai 3.57.0; a server on this machine that records requests.
# Guess: "openai/NAME" with an api_base of one's own is an OpenAI-compatible server with an unknown
#   model. The options are sent as they are given; special rules hold for the models in litellm's
#   list alone.
# Behaviour: a name with "gpt-5" in it falls under the rules of OpenAI's GPT-5. With
#   drop_params=True, which Harbor sets, temperature, top_p, stop and logprobs are left out without
#   a word, and max_tokens is sent as max_completion_tokens. Without it the call raises. A name that
#   begins like an older model, "o3-run7", has no such effect.
# Why it matters: a student that is served as "gpt-5-mini-distilled" is sampled at the server's
#   temperature, runs past its stop strings, and comes back without logprobs, while the job's record
#   says otherwise.
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
where = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "unused"}
MESSAGE = {"role": "assistant", "content": "hi"}
ANSWER = {"choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}]}
options = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 50, "stop": ["END"], "logprobs": True}
chat = [{"role": "user", "content": "Hi"}]
for name in ("student", "o3-run7", "my-gpt-5", "gpt-5-mini-distilled"):
    litellm.completion(f"openai/{name}", chat, drop_params=True, **where, **options)
    print(f"{name}:", *sorted(sent[-1].keys() - {"model", "messages"}))
try:
    litellm.completion("openai/gpt-5-mini-distilled", chat, **where, **options)
except litellm.UnsupportedParamsError:
    print("without drop_params: UnsupportedParamsError")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
student: logprobs max_tokens stop temperature top_p
o3-run7: logprobs max_tokens stop temperature top_p
my-gpt-5: max_completion_tokens
gpt-5-mini-distilled: max_completion_tokens
without drop_params: UnsupportedParamsError
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
