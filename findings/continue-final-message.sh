#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# transformers: continue_final_message drops the indent at the end of the message, and closes a
# thought before it continues it.
#
# Versions: transformers 5.24.0, its apply_chat_template(continue_final_message=True), with the
#   templates of 13 models as trl 1.16.0 ships them; a tokenizer of single bytes.
# Guess: the prompt is the one that the model sampled from (add_generation_prompt=True), followed by
#   the message exactly as given, so that the model goes on where it stopped. A template that cannot
#   do this raises an error.
# Behaviour: seven of the templates strip the newline and the spaces at the end of the message, or
#   even a single space, without a warning. If the token limit cut a reply inside its thought,
#   Qwen3, Qwen3.5, Qwen3.8 and GLM 4 MoE put an empty, closed thought in front of the reply. These
#   four and Nemotron 3 also put one in front of plain text, although Qwen3 and GLM sample from a
#   prompt without one. If the thought alone is passed as reasoning_content, with
#   continue_final_message="reasoning_content", it is continued, but three of the four strip its
#   last space.
# Why it matters: this is how an interrupted rollout is resumed, and how a reply is prefilled. The
#   model goes on after a thought that is already closed, or without its indent, so the joined code
#   is broken, and the logprobs of the second part belong to a prompt other than the joined one.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv transformers==5.24.0 jinja2==3.1.6
uv pip install -q --python venv --no-deps trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import sysconfig

import tokenizers
import transformers

templates = pathlib.Path(sysconfig.get_paths()["purelib"]) / "trl/chat_templates"
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
bytewise = tokenizers.Tokenizer(
    tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>"
)
chat = [{"role": "user", "content": "Go."}]
THOUGHT = "<think>\nFirst I look at"
CODE = "def double(x):\n    "
for name in (
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_8",
    "glm4moe",
    "nemotron_3_nano",
    "deepseekv3",
    "gptoss",
    "llama3_1",
    "gemma3",
    "gemma4",
    "lfm2_2_5",
    "qwen3_instruct_2507",
):
    tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
    start = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    start = start.removesuffix("<think>\n")
    print(name)
    for what, content in (("thought", THOUGHT), ("code", CODE)):
        prompt = tokenizer.apply_chat_template(
            [*chat, {"role": "assistant", "content": content}],
            continue_final_message=True,
            tokenize=False,
        )
        assert prompt.startswith(start)
        rest = prompt.removeprefix(start)
        print(f"  {what}:", "as given" if rest == content else repr(rest))
print("as reasoning_content")
for name in ("qwen3", "qwen3_5_think", "qwen3_8", "glm4moe"):
    tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
    for thought in ("First I look at", "1. look\n2. "):
        prompt = tokenizer.apply_chat_template(
            [*chat, {"role": "assistant", "content": "", "reasoning_content": thought}],
            continue_final_message="reasoning_content",
            tokenize=False,
        )
        print(f"  {name}:", repr(prompt[prompt.rindex("<think>") :]))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
qwen2_5
  thought: as given
  code: as given
qwen3
  thought: '<think>\n\n</think>\n\n<think>\nFirst I look at'
  code: '<think>\n\n</think>\n\ndef double(x):\n    '
qwen3_5_think
  thought: '<think>\n\n</think>\n\n<think>\nFirst I look at'
  code: '<think>\n\n</think>\n\ndef double(x):'
qwen3_8
  thought: '<think>\n\n</think>\n\n<think>\nFirst I look at'
  code: '<think>\n\n</think>\n\ndef double(x):'
glm4moe
  thought: '\n<think></think>\n<think>\nFirst I look at'
  code: '\n<think></think>\ndef double(x):'
nemotron_3_nano
  thought: as given
  code: '<think></think>def double(x):'
deepseekv3
  thought: as given
  code: as given
gptoss
  thought: '<|channel|>final<|message|><think>\nFirst I look at'
  code: '<|channel|>final<|message|>def double(x):\n    '
llama3_1
  thought: as given
  code: 'def double(x):'
gemma3
  thought: as given
  code: 'def double(x):'
gemma4
  thought: as given
  code: 'def double(x):'
lfm2_2_5
  thought: as given
  code: as given
qwen3_instruct_2507
  thought: as given
  code: as given
as reasoning_content
  qwen3: '<think>\nFirst I look at'
  qwen3: '<think>\n1. look\n2. '
  qwen3_5_think: '<think>\nFirst I look at'
  qwen3_5_think: '<think>\n1. look\n2.'
  qwen3_8: '<think>\nFirst I look at'
  qwen3_8: '<think>\n1. look\n2.'
  glm4moe: '<think>First I look at'
  glm4moe: '<think>1. look\n2.'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
