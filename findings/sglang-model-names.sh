#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SGLang: a wrong model name is answered by the base model under that name, and so is the id that
# /v1/models lists for a LoRA adapter.
#
# Versions: sglang 0.5.23, torch 2.14.1, transformers 5.19.0, on a CPU, with a random Qwen3 ("tiny")
#   and a random adapter ("sql"). The stand-in for sgl_kernel only has to be importable. It also
#   lets torch ignore `pin_memory`, which the LoRA code asks for and a CPU does not have.
# Guess: an unknown name gets a 404, as with OpenAI and vLLM. Each id in the list of /v1/models
#   works as `model`, so "sql" is the adapter.
# Behaviour: /v1/models/NAME has that 404. Completions (and chat) take any name. The base model
#   answers "wrong" and "sql", and the reply's `model` repeats the name. The adapter answers to
#   "tiny:sql". The documentation gives this form, but the list does not have it, and
#   /v1/models/NAME refuses it. The part before the colon may be anything. Only an unknown name
#   after a colon is an error.
# Why it matters: an evaluation of an adapter under its listed id measures the base model, and
#   rollouts for its training are sampled from the base model. The reply's `model` names the
#   adapter, so the records look right.
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
cat >sgl_kernel.py <<'PYTHON'
import torch

__getattr__ = {}.get


def unpinned(make):
    return lambda *args, pin_memory=False, **options: make(*args, **options)


for name in ("arange", "empty", "ones", "tensor", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor: tensor
PYTHON
mkdir sql
echo '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"]}' \
  >sql/adapter_config.json
venv/bin/python - 2>server.log <<'PYTHON' || { tail -n 20 server.log; exit 1; }
import safetensors.torch
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
part = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
lora = {part.format("A"): torch.randn(8, 64), part.format("B"): torch.randn(64, 8)}
safetensors.torch.save_file(lora, "sql/adapter_model.safetensors")
PYTHON
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE="" \
  PYTHONPATH=. SGLANG_USE_CPU_ENGINE=1
port=$(venv/bin/python -c "import socket; print(socket.create_server(('', 0)).getsockname()[1])")
setsid venv/bin/python -m sglang.launch_server --model-path tiny --port "$port" --device cpu \
  --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --dtype float32 --skip-server-warmup \
  --max-total-tokens 4096 --lora-paths sql=sql --lora-backend torch_native >server.log 2>&1 &
server=$!
disown
until curl -sf "http://127.0.0.1:$port/v1/models" -o /dev/null; do
  kill -0 "$server" || { tail -n 20 server.log; exit 1; }
  sleep 1
done

seen=$(venv/bin/python - "http://127.0.0.1:$port" <<'PYTHON'
import sys

import requests

url = sys.argv[1] + "/v1/"
ids = [card["id"] for card in requests.get(url + "models").json()["data"]]


def complete(**options):
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 0} | options
    answer = requests.post(url + "completions", json=body)
    if answer.ok:
        reply = answer.json()
        return reply["model"], str(reply["choices"][0]["logprobs"]["token_logprobs"])
    return answer.status_code, None


_, base = complete(model="tiny")
_, adapter = complete(model="tiny", lora_path="sql")
by = {base: "by the base model", adapter: "by the adapter", None: "refused"}
for name in ("tiny", "sql", "wrong", "tiny:sql", "wrong:sql", "tiny:wrong"):
    status = requests.get(url + "models/" + name).status_code
    model, logprobs = complete(model=name)
    listed = "listed" if name in ids else "not listed"
    print(f"{name}: {listed}, /v1/models/NAME {status}, completion {by[logprobs]}: {model}")
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
tiny: listed, /v1/models/NAME 200, completion by the base model: tiny
sql: listed, /v1/models/NAME 404, completion by the base model: sql
wrong: not listed, /v1/models/NAME 404, completion by the base model: wrong
tiny:sql: not listed, /v1/models/NAME 404, completion by the adapter: tiny:sql
wrong:sql: not listed, /v1/models/NAME 404, completion by the adapter: wrong:sql
tiny:wrong: not listed, /v1/models/NAME 404, completion refused: 400
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
