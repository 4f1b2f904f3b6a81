#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SGLang: with --allow-auto-truncate, a prompt that is too long gets an empty reply, and
# `prompt_token_ids` has ids that the model never saw.
#
# Versions: sglang 0.5.23, torch 2.14.1, transformers 5.19.0, on a CPU, with a random Qwen3. The
#   context has 300 tokens and the KV cache 200. The stand-in for sgl_kernel only has to be
#   importable.
# Guess: the prompt is cut so far that the reply has room. `prompt_token_ids` has the ids that are
#   left, as many as `usage.prompt_tokens` says.
# Behaviour: the first 194 ids are left. `usage` says so, and the logprobs are those for these ids.
#   `prompt_token_ids` has all ids that were sent, up to the context. The room for the reply is
#   computed from the uncut prompt. A prompt that is one id too long gets three tokens, and one that
#   is four too long gets none, with status 200 and "length". With a larger KV cache, the limit is
#   the context less six, so at most six of the returned ids were not seen.
# Why it matters: an evaluation gets empty answers instead of errors, and counts them as the
#   model's. The end of the prompt is dropped, which is the newest message. Recorded rollouts have
#   prompts that the model did not see.
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
  --dtype float32 --skip-server-warmup \
  --context-length 300 --max-total-tokens 200 --allow-auto-truncate >server.log 2>&1 &
server=$!
disown
until curl -sf "http://127.0.0.1:$port/v1/models" -o /dev/null; do
  kill -0 "$server" || { tail -n 20 server.log; exit 1; }
  sleep 1
done

seen=$(venv/bin/python - "http://127.0.0.1:$port" <<'PYTHON'
import sys

import requests

ids = [i * i % 256 for i in range(400)]


def complete(prompt):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "temperature": 0}
    body |= {"logprobs": 0, "return_token_ids": True}
    answer = requests.post(sys.argv[1] + "/v1/completions", json=body)
    (choice,) = answer.json()["choices"]
    return answer.status_code, answer.json()["usage"]["prompt_tokens"], choice


*_, start = complete(ids[:194])
for n in (150, 194, 195, 198, 250, 400):
    status, n_prompt, choice = complete(ids[:n])
    n_ids, reply = len(choice["prompt_token_ids"]), choice["token_ids"]
    print(
        f"{n} sent: {status} {choice['finish_reason']}, prompt_tokens {n_prompt}, "
        f"prompt_token_ids {n_ids}, reply {len(reply)} tokens"
    )
    if n == 195:
        n = len(reply)
        same = [start["token_ids"][:n], start["logprobs"]["token_logprobs"][:n]]
        print("as for the first 194:", same == [reply, choice["logprobs"]["token_logprobs"]])
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
150 sent: 200 length, prompt_tokens 150, prompt_token_ids 150, reply 9 tokens
194 sent: 200 length, prompt_tokens 194, prompt_token_ids 194, reply 4 tokens
195 sent: 200 length, prompt_tokens 194, prompt_token_ids 195, reply 3 tokens
as for the first 194: True
198 sent: 200 length, prompt_tokens 194, prompt_token_ids 198, reply 0 tokens
250 sent: 200 length, prompt_tokens 194, prompt_token_ids 250, reply 0 tokens
400 sent: 200 length, prompt_tokens 194, prompt_token_ids 300, reply 0 tokens
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
