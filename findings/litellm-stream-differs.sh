#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# litellm: the same reply, streamed and put together again, is another reply.
#
# Versions: litellm 1.110.2, openai 3.57.0; a server on this machine that gives one reply, whole or
#   as a stream.
# Guess: stream_chunk_builder puts the parts together to what the plain call returns: text,
#   reasoning, logprobs, finish reason. Fields that are not OpenAI's, such as vLLM's token_ids, get
#   lost.
# Behaviour: it is the other way round with ids: token_ids are joined, and logprobs, which each part
#   had, are gone. The plain call takes "<think>" out of the text into reasoning_content, the stream
#   leaves it in. The finish reason "abort", which vLLM and SGLang give for a request that was
#   ended, is "stop" in the plain call and an InternalServerError in the stream.
# Why it matters: a recorder that streams, for the time of the first token or to be able to stop,
#   gets no logprobs to train on and another text; and the two do not agree on whether a reply is
#   complete or failed.
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
TOKENS = ["<think>", "hm", "</think>", "yes"]


def answer(first, end, key, finish):
    entries = [{"token": token, "logprob": -0.5, "top_logprobs": []} for token in TOKENS[first:end]]
    choice = {"index": 0, "logprobs": {"content": entries}, "token_ids": [*range(first, end)]}
    choice[key] = {"role": "assistant", "content": "".join(TOKENS[first:end])}
    choice["finish_reason"] = finish if end == len(TOKENS) else None
    return json.dumps({"id": "1", "created": 1, "model": "m", "choices": [choice]})


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, text = "application/json", answer(0, len(TOKENS), "message", asked["model"])
        if asked.get("stream"):
            parts = [answer(n, n + 1, "delta", asked["model"]) for n in range(len(TOKENS))]
            kind = "text/event-stream"
            text = "".join(f"data: {part}\n\n" for part in [*parts, "[DONE]"])
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
where = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "unused"}
chat = [{"role": "user", "content": "Hi"}]
for finish in ("stop", "abort"):  # The server answers with the model's name as finish reason.
    for stream in (False, True):
        print(finish, "streamed:" if stream else "plain:", end=" ")
        try:
            reply = litellm.completion(f"openai/{finish}", chat, stream=stream, **where)
            (choice,) = (litellm.stream_chunk_builder([*reply]) if stream else reply).choices
        except Exception as error:
            print(type(error).__name__, "of", type(error.__cause__ or error.__context__).__name__)
            continue
        kept, message = getattr(choice, "logprobs", None), choice.message
        thought = getattr(message, "reasoning_content", None)
        print(f"{message.content!r}, reasoning {thought}, finish {choice.finish_reason}", end="")
        print(f", ids {choice.token_ids}, logprobs {kept and len(kept.content)}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
stop plain: 'yes', reasoning hm, finish stop, ids [0, 1, 2, 3], logprobs 4
stop streamed: '<think>hm</think>yes', reasoning None, finish stop, ids [0, 1, 2, 3], logprobs None
abort plain: 'yes', reasoning hm, finish stop, ids [0, 1, 2, 3], logprobs 4
abort streamed: MidStreamFallbackError of InternalServerError
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
