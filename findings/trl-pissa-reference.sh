#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# TRL and PEFT: with init_lora_weights="pissa" or "olora", the reference model is not the model that
# training starts from.
#
# Versions: trl 1.16.0, its GRPOTrainer with beta=0.1 and its DPOTrainer; peft 0.21.2; transformers
#   5.24.0; torch 2.13.0. The model is a random one of two layers, the learning rate is 0, and the
#   adapter is a new one, given as peft_config.
# Guess: these options only choose how an adapter starts. The policy starts as the base model, and
#   the reference is the base model, so at the first step the KL divergence is 0, DPO's loss is
#   ln 2 = 0.693, and the implicit rewards are 0, as with LoRA's default.
# Behaviour: the policy does start as the base model. But PEFT subtracts the adapter's initial
#   contribution from the base weights, and TRL computes the reference with the adapter switched
#   off. So the reference is the base model without its largest singular directions (pissa), or
#   minus a factor of its QR decomposition (olora), a model that nobody trained. Here, the KL
#   divergence starts above 1, and DPO starts with spurious margins. There is no warning.
#   "orthogonal" is correct.
# Why it matters: the KL penalty of GRPO pulls the policy towards a broken model, at full strength
#   from the first step, and DPO's loss, margins and accuracies are measured against it.
# Source: pissa_init and olora_init of peft/tuners/lora/layer.py; use_adapter(adapter_name=None) in
#   both trainers.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 trl==1.16.0 peft==0.21.2 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0

seen=$(HF_HOME="$dir/home" HF_HUB_OFFLINE=1 venv/bin/python - 2>errors.log <<'PYTHON'
import datasets
import peft
import tokenizers
import torch
import transformers
import trl

alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
bytewise = tokenizers.Tokenizer(
    tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
)
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = tokenizers.decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bytewise, eos_token="</s>", pad_token="<pad>"
)
options = {
    "output_dir": "out",
    "learning_rate": 0.0,
    "max_steps": 1,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
texts = {"prompt": ["Is it?"] * 4, "chosen": [" Yes, it is."] * 4, "rejected": [" No."] * 4}
data = datasets.Dataset.from_dict(texts)


def first_step(trainer, init, *, option, **arguments):
    transformers.set_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
    )
    model = transformers.Qwen3ForCausalLM(config)
    ids = torch.tensor([tokenizer.encode("Is it?")])
    before = model(ids).logits.detach()
    made = trainer(
        model=model,
        args=option(per_device_train_batch_size=4, **options),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights=init
        ),
        **arguments,
    )
    same = torch.allclose(made.model(ids).logits, before, atol=1e-3)
    made.train()
    return same, made.state.log_history[0]


def grpo(**settings):
    return trl.GRPOConfig(num_generations=4, max_completion_length=12, beta=0.1, **settings)


def reward(completions, **columns):
    return [float(len(set(completion))) for completion in completions]


for init in (True, "orthogonal", "pissa", "olora"):
    same, log = first_step(trl.GRPOTrainer, init, option=grpo, reward_funcs=reward)
    kl = f"{log['kl']:.3f}" if log["kl"] < 1 else "more than 1"
    print(f"init_lora_weights={init}: starts as the base model: {same}")
    print("  GRPO: KL divergence", kl)
    _, log = first_step(trl.DPOTrainer, init, option=trl.DPOConfig)
    margin = abs(log["rewards/margins"])
    print(f"  DPO: loss is 0.693: {abs(log['loss'] - 0.6931) < 0.001}", end="")
    print(f", margin is 0: {margin < 0.001}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
seen=$(grep -v "^{" <<<"$seen")
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
init_lora_weights=True: starts as the base model: True
  GRPO: KL divergence 0.000
  DPO: loss is 0.693: True, margin is 0: True
init_lora_weights=orthogonal: starts as the base model: True
  GRPO: KL divergence 0.000
  DPO: loss is 0.693: True, margin is 0: True
init_lora_weights=pissa: starts as the base model: True
  GRPO: KL divergence more than 1
  DPO: loss is 0.693: False, margin is 0: False
init_lora_weights=olora: starts as the base model: True
  GRPO: KL divergence more than 1
  DPO: loss is 0.693: False, margin is 0: False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
