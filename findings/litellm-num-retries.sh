#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: litellm.num_retries works once, and max_retries does nothing for most providers.
#
# Versions: litellm 1.110.2, openai 3.57.0; tenacity 9.2.1, which litellm does not install. A local
#   server answers with the given status codes, and then with a reply.
# Guess: litellm.num_retries = 3 holds for all later calls. num_retries and max_retries are two
#   names of one option: two retries are three requests, for server errors and rate limits, and none
#   for a bad request.
# Behaviour: the first error sets litellm.num_retries to None, so all later calls have no retry.
#   num_retries=2 repeats a bad request as well, and adds itself to the OpenAI client's own retries:
#   five requests. max_retries=2 is only read for openai/; hosted_vllm, deepseek and anthropic send
#   one request. Without tenacity, completion with num_retries turns each error into a plain
#   Exception, which no `except litellm.RateLimitError` catches, and acompletion raises the error
#   after one request. The Router has its own retries and is not concerned.
# Why it matters: a long run with the global setting survives one hiccup of the server, and its
#   second one ends a trial, although the setting is at the top of the program. One with max_retries
#   survives none, and one with num_retries sends each too long prompt three times.
# Source: the two wrappers in litellm.utils.client, and completion_with_retries of litellm/main.py.
#   The project's issue 33272 reports the global setting.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv litellm==1.110.2 openai==3.57.0

cat >show.py <<'PYTHON'
import asyncio
import http.server
import json
import sys
import threading

import litellm

litellm.suppress_debug_info = True


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.count += 1
        code = self.server.codes.pop(0) if self.server.codes else 200
        message = {"role": "assistant", "content": "done"}
        reply = {
            "id": "reply",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
        }
        error = {"error": {"message": "not now", "type": "error", "code": code}}
        data = json.dumps(reply if code == 200 else error).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


def ask(codes, provider="hosted_vllm", later=False, **options):
    server.codes, server.count = list(codes), 0
    options |= {
        "model": f"{provider}/policy",
        "api_base": f"http://127.0.0.1:{server.server_port}/v1",
        "api_key": "key",
        "messages": [{"role": "user", "content": "Write a function."}],
    }
    try:
        call = litellm.acompletion if later else litellm.completion
        reply = asyncio.run(call(**options)) if later else call(**options)
        end = reply.choices[0].message.content
    except Exception as error:
        end = type(error).__name__
    return f"{server.count} {end}"


if sys.argv[1:]:
    for later in (False, True):
        name = "acompletion" if later else "completion"
        end = ask([429], later=later, num_retries=2)
        print(f"without tenacity, {name}, num_retries=2, error 429: {end}")
    sys.exit()
for later in (False, True):
    litellm.num_retries = 3
    calls = [ask([500], later=later) for _ in range(3)]
    name = "acompletion" if later else "completion"
    print(f"global 3, {name}, one error in each call: {', '.join(calls)}")
for provider in ("openai", "hosted_vllm", "deepseek", "anthropic"):
    for options in ({}, {"max_retries": 2}, {"num_retries": 2}):
        ends = [f"{code}: {ask([code] * 9, provider, **options)}" for code in (500, 400)]
        print(provider, options, ", ".join(ends))
PYTHON
export LITELLM_LOCAL_MODEL_COST_MAP=True
seen=$(
  venv/bin/python show.py bare 2>errors.log
  uv pip install -q --python venv tenacity==9.2.1
  venv/bin/python show.py 2>errors.log
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
without tenacity, completion, num_retries=2, error 429: 1 Exception
without tenacity, acompletion, num_retries=2, error 429: 1 RateLimitError
global 3, completion, one error in each call: 2 done, 1 InternalServerError, 1 InternalServerError
global 3, acompletion, one error in each call: 2 done, 1 InternalServerError, 1 InternalServerError
openai {} 500: 3 InternalServerError, 400: 1 BadRequestError
openai {'max_retries': 2} 500: 3 InternalServerError, 400: 1 BadRequestError
openai {'num_retries': 2} 500: 5 InternalServerError, 400: 3 BadRequestError
hosted_vllm {} 500: 1 InternalServerError, 400: 1 BadRequestError
hosted_vllm {'max_retries': 2} 500: 1 InternalServerError, 400: 1 BadRequestError
hosted_vllm {'num_retries': 2} 500: 3 InternalServerError, 400: 3 BadRequestError
deepseek {} 500: 1 InternalServerError, 400: 1 BadRequestError
deepseek {'max_retries': 2} 500: 1 InternalServerError, 400: 1 BadRequestError
deepseek {'num_retries': 2} 500: 3 InternalServerError, 400: 3 BadRequestError
anthropic {} 500: 1 InternalServerError, 400: 1 BadRequestError
anthropic {'max_retries': 2} 500: 1 InternalServerError, 400: 1 BadRequestError
anthropic {'num_retries': 2} 500: 3 InternalServerError, 400: 3 BadRequestError
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
