#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# TRL: assistant_only_loss trains some models not to think in any turn but the last.
#
# Versions: trl 1.16.0, the templates that its SFTTrainer takes for assistant_only_loss=True
#   (get_training_chat_template); transformers 5.24.0, and a tokenizer of single bytes.
# Guess: TRL changes a model's template for training, so that each assistant message is trained as
#   it was given, with its reasoning_content. It says so of Qwen3's ("Always include the thinking
#   block regardless of message position"), since a template drops old thoughts for inference.
# Behaviour: this holds for Qwen3, Qwen3.5, Qwen3.6, Qwen3.8 and Muse Glimmer. For GLM 4 MoE and the
#   four Nemotron 3 models, each turn before the last user message is trained with an empty thought
#   instead of its own: the tokens of <think></think> are in the mask. For gpt-oss and
#   DiffusionGemma, such a turn is trained without a thought. There is no warning.
# Why it matters: in a rollout whose observations are user messages, all turns but one teach the
#   model to answer without thinking, and the last one teaches the opposite. The loss looks fine,
#   since an empty thought is easy to learn.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv transformers==5.24.0 jinja2==3.1.6 datasets==5.2.0
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import itertools
import pathlib
import sysconfig

import tokenizers
import transformers
from trl.chat_template_utils import get_training_chat_template

templates = pathlib.Path(sysconfig.get_paths()["purelib"]) / "trl/chat_templates"
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
bytewise = tokenizers.Tokenizer(
    tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
)
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = tokenizers.decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>"
)
chat = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "reasoning_content": "THOUGHT", "content": "ls"},
    {"role": "user", "content": "a.py"},
    {"role": "assistant", "reasoning_content": "ANOTHER", "content": "cat a.py"},
]
for name in (
    "qwen3",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
    "muse_glimmer",
    "glm4moe",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "nemotron_3_5_lightning",
    "gptoss",
    "diffusion_gemma",
):
    tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    made = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(made["input_ids"], made["assistant_masks"])
    first, last = (
        tokenizer.decode([token for token, _ in run])
        for trained, run in itertools.groupby(pairs, lambda pair: pair[1])
        if trained
    )
    kept = "with" if "ANOTHER" in last else "without"
    print(f"{name}: last turn {kept} its thought, first turn:")
    print("  ", first.encode("unicode_escape").decode())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
qwen3: last turn with its thought, first turn:
   <think>\nTHOUGHT\n</think>\n\nls<|im_end|>\n
qwen3_5_think: last turn with its thought, first turn:
   <think>\nTHOUGHT\n</think>\n\nls<|im_end|>\n
qwen3_6: last turn with its thought, first turn:
   <think>\nTHOUGHT\n</think>\n\nls<|im_end|>\n
qwen3_8: last turn with its thought, first turn:
   <think>\nTHOUGHT\n</think>\n\nls<|im_end|>\n
muse_glimmer: last turn with its thought, first turn:
   <|start|>assistant to=self<|message|>THOUGHT<|eom|><|start|>assistant to=user<|message|>ls<|eot|>
glm4moe: last turn with its thought, first turn:
   \n<think></think>\nls<|user|>
nemotron_3_nano: last turn with its thought, first turn:
   <think></think>\nls<|im_end|>\n
nemotron_3_super: last turn with its thought, first turn:
   <think></think>\nls<|im_end|>\n
nemotron_3_ultra: last turn with its thought, first turn:
   <think></think>ls<|im_end|>\n
nemotron_3_5_lightning: last turn with its thought, first turn:
   <think></think>ls<|im_end|>\n
gptoss: last turn with its thought, first turn:
   <|start|>assistant<|channel|>final<|message|>ls<|end|>
diffusion_gemma: last turn with its thought, first turn:
   ls<turn|>\n
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
