#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SGLang: to abort request "job-1" also aborts "job-10" and "job-11".
#
# Versions: sglang 0.5.23, torch 2.14.1, transformers 5.19.0, on a CPU, with a random Qwen3. The
#   stand-in for sgl_kernel only has to be importable.
# Guess: /abort_request with a `rid` aborts the request that was sent with this `rid`, and no other.
#   The endpoint's only description is "Abort a request."
# Behaviour: the scheduler aborts all requests whose `rid` starts with the given one. A client that
#   hangs up does the same: its own request is aborted by its `rid`, and those of other clients
#   with it. They get a 200 with what was sampled so far and the finish reason "abort".
# Why it matters: many clients number their requests. One cancelled or timed-out rollout then ends
#   all others whose number begins with its number, and their replies may be recorded as complete.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -9 -- "-$server"; rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv --no-deps sglang==0.5.23
uv pip install -q --python venv torch==2.14.1 torchvision==0.29.2 transformers==5.19.0 \
  xgrammar==0.2.7 openai==2.8.0 aiohttp compressed-tensors dill einops fastapi gguf ipython \
  jsonschema msgspec orjson partial-json-parser psutil pybase64 python-multipart pyzmq requests \
  sentencepiece setproctitle soundfile uvicorn uvloop
echo '__getattr__ = {}.get' >sgl_kernel.py
venv/bin/python - 2>server.log <<'PYTHON' || { tail -n 20 server.log; exit 1; }
import tokenizers
import torch
import transformers

words = tokenizers.models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w1")
tokenizer = tokenizers.Tokenizer(words)
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("tiny")
torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64}
counts = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
config = transformers.Qwen3Config(**sizes, **counts, bos_token_id=None, eos_token_id=None)
transformers.Qwen3ForCausalLM(config).save_pretrained("tiny")
PYTHON
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE="" \
  PYTHONPATH=. SGLANG_USE_CPU_ENGINE=1
port=$(venv/bin/python -c "import socket; print(socket.create_server(('', 0)).getsockname()[1])")
setsid venv/bin/python -m sglang.launch_server --model-path tiny --port "$port" --device cpu \
  --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --dtype float32 --skip-server-warmup --max-total-tokens 16384 >server.log 2>&1 &
server=$!
disown
until curl -sf "http://127.0.0.1:$port/v1/models" -o /dev/null; do
  kill -0 "$server" || { tail -n 20 server.log; exit 1; }
  sleep 1
done

seen=$(venv/bin/python - "http://127.0.0.1:$port" <<'PYTHON'
import json
import sys
import threading

import requests

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1500, "stream": True}


class Job(threading.Thread):
    def __init__(self, rid):
        super().__init__()
        self.rid, self.reason, self.begun = rid, None, threading.Event()
        self.start()

    def run(self):
        url, body = sys.argv[1] + "/v1/completions", BODY | {"rid": self.rid}
        with requests.post(url, json=body, stream=True) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    self.reason = json.loads(line[6:])["choices"][0]["finish_reason"]
                    self.begun.set()


def show(what, jobs):
    for job in jobs:
        job.join()
    print(what, ", ".join(f"{job.rid} {job.reason}" for job in jobs))


def start(*rids):
    begun = [Job(rid) for rid in rids]
    for job in begun:
        job.begun.wait()
    return begun


jobs = start("job-1", "job-10", "job-11", "job-2", "a-job-1")
requests.post(sys.argv[1] + "/abort_request", json={"rid": "job-1"})
show("abort job-1:", jobs)

jobs = start("run-10", "run-2")
try:  # A client that waits for one second
    body = BODY | {"rid": "run-1", "stream": False}
    requests.post(sys.argv[1] + "/v1/completions", json=body, timeout=1)
except requests.Timeout:
    show("run-1 hangs up:", jobs)
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
abort job-1: job-1 abort, job-10 abort, job-11 abort, job-2 length, a-job-1 length
run-1 hangs up: run-10 abort, run-2 length
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
