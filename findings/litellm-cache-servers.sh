#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: a cached reply of one server is given out as another server's, and for other options.
#
# Versions: litellm 1.110.2, openai 3.57.0, with litellm.cache in memory and caching=True. The cache
#   also imports fastapi, orjson and soundfile. Two local servers stand in for two checkpoints that
#   are both served as "policy"; each names itself and counts its requests.
# Guess: a reply comes from the cache if the same request was sent before: the same server, model,
#   messages and options.
# Behaviour: the key has the model, the messages and a list of known options, but no address. Server
#   B is never asked: the replies are A's. An option that is not on the list is not in the key
#   either: min_p, repetition_penalty, chat_template_kwargs (thinking on or off), extra_headers, and
#   all of extra_body. top_k as an argument counts, and extra_body={"top_k": 1} does not.
#   litellm.enable_caching_on_provider_specific_optional_params, off by default, adds these options
#   to the key, but not the address. The copy keeps A's id, so even the id does not tell.
# Why it matters: an evaluation with a cache compares a checkpoint with itself: all rollouts of the
#   second one are the first one's, and thinking on and off come out equal. Nothing warns.
# Source: Cache.get_cache_key of litellm/caching/caching.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv litellm==1.110.2 openai==3.57.0 fastapi==0.165.0 \
  orjson==3.13.0 soundfile==0.14.0

seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python - 2>errors.log <<'PYTHON'
import http.server
import json
import threading

import litellm
from litellm.caching.caching import Cache


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.count += 1
        text = f"{self.server.name}{self.server.count}"
        message = {"role": "assistant", "content": text}
        reply = {
            "id": f"reply-{text}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def serve(name):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.name, server.count = name, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


A, B = serve("A"), serve("B")


def ask(server, **options):
    reply = litellm.completion(
        model="hosted_vllm/policy",
        api_base=f"http://127.0.0.1:{server.server_port}/v1",
        api_key="key",
        messages=[{"role": "user", "content": "Write a function."}],
        caching=True,
        **options,
    )
    return reply.choices[0].message.content


for options in (
    {},
    {"temperature": 0.0},
    {"seed": 7},
    {"top_k": 1},
    {"extra_body": {"top_k": 1}},
    {"extra_body": {"seed": 7}},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"extra_headers": {"X-Adapter": "second"}},
):
    # A new cache with one reply of server A, without options, in it.
    litellm.cache = Cache(type="local")
    A.count = B.count = 0
    assert ask(A) == "A1"
    print(f"{options or 'the same'}: A says {ask(A, **options)}, B says {ask(B, **options)}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
the same: A says A1, B says A1
{'temperature': 0.0}: A says A2, B says A2
{'seed': 7}: A says A2, B says A2
{'top_k': 1}: A says A2, B says A2
{'extra_body': {'top_k': 1}}: A says A1, B says A1
{'extra_body': {'seed': 7}}: A says A1, B says A1
{'min_p': 0.1}: A says A1, B says A1
{'repetition_penalty': 1.2}: A says A1, B says A1
{'chat_template_kwargs': {'enable_thinking': False}}: A says A1, B says A1
{'extra_headers': {'X-Adapter': 'second'}}: A says A1, B says A1
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
