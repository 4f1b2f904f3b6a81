#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Unsloth: train_on_responses_only trains the tool's output with GLM 4 MoE and Gemma 4, and leaves
# out the tool calls of gpt-oss and the thoughts of Qwen3.8.
#
# Versions: unsloth-zoo 2026.10.9, the file with Unsloth's train_on_responses_only, which detects
#   the markers itself; transformers 5.24.0, and the templates as trl 1.16.0 ships them; a tokenizer
#   of single bytes and of the model's own special tokens; torch 2.13.0, datasets 5.2.0.
# Guess: the labels are the tokens that the model writes: each thought, tool call and answer, and
#   the token that ends it. The system's, the user's and the tool's texts are not in the labels.
# Behaviour: this holds for Llama 3.1, LFM2.5, Qwen2.5 and Qwen3. With GLM 4 MoE, the output of a
#   tool is trained, because only <|user|>, <|assistant|> and the EOS token end a response there,
#   and the token that ends an answer is not trained. With Gemma 4, tool outputs are trained as
#   well. With gpt-oss and Muse Glimmer, the marker includes the channel or the recipient of an
#   answer, so no tool call and no thought is trained. With Qwen3.8, the marker includes the empty
#   thought of the probe, so a turn with a real thought is left out altogether. An error is raised
#   only if no token of the whole dataset is left.
# Why it matters: an agent's rollouts are mostly tool calls and outputs. The policy learns to write
#   the outputs itself, or learns everything but its calls, and the loss looks normal.
# Source: get_chat_template_parts and train_on_responses_only of unsloth_zoo/dataset_utils.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 transformers==5.24.0 jinja2==3.1.6 datasets==5.2.0
uv pip install -q --python venv --no-deps unsloth-zoo==2026.10.9 trl==1.16.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import contextlib
import io
import itertools
import pathlib
import runpy
import sysconfig
import textwrap

import tokenizers
import transformers

site = pathlib.Path(sysconfig.get_paths()["purelib"])
unsloth = runpy.run_path(str(site / "unsloth_zoo/dataset_utils.py"))
QWEN = ("<|im_start|> <|im_end|>", "<think> </think> <tool_call> </tool_call>")
# The special tokens, with the EOS token last, and other added tokens.
TOKENS = {
    "llama3_1": ("<|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>", ""),
    "lfm2_2_5": ("<|im_start|> <|im_end|>", ""),
    "qwen2_5": QWEN,
    "qwen3": QWEN,
    "glm4moe": (
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
    ),
    "gemma4": (
        "<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <eos>",
        "",
    ),
    "gptoss": ("<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>", ""),
    "muse_glimmer": ("<|start|> <|message|> <|eom|> <|eot|>", ""),
    "qwen3_8": QWEN,
}
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
function = {"name": "bash", "description": "Runs a command.", "parameters": parameters}
tools = [{"type": "function", "function": function}]
call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
chat = [
    {"role": "user", "content": "List the files."},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "name": "bash", "content": "OUTPUT"},
    {"role": "assistant", "content": "ANSWER"},
    {"role": "user", "content": "Is that all?"},
    {"role": "assistant", "reasoning_content": "THOUGHT", "content": "Yes."},
]
for name, (special, added) in TOKENS.items():
    bytewise = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
    )
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.add_special_tokens(special.split())
    bytewise.add_tokens(added.split())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token=special.split()[-1]
    )
    tokenizer.chat_template = (site / f"trl/chat_templates/{name}.jinja").read_text()
    _, marker = unsloth["get_chat_template_parts"](tokenizer)
    print(f"{name}, marker {marker.encode('unicode_escape').decode()}")
    with contextlib.redirect_stdout(io.StringIO()):  # It prints the markers.
        mask = unsloth["train_on_responses_only"](None, tokenizer=tokenizer, return_function=True)
    text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    labels = mask({"input_ids": [ids]})["labels"][0]
    for trained, pairs in itertools.groupby(zip(ids, labels), lambda pair: pair[1] != -100):
        if trained:
            span = tokenizer.decode([token for token, _ in pairs])
            lines = textwrap.wrap(span.encode("unicode_escape").decode(), 80)
            print("  trained:", "\n    ".join(lines))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
llama3_1, marker <|start_header_id|>assistant<|end_header_id|>\n\n
  trained: {"name": "bash", "parameters": {"command": "ls"}}<|eot_id|>
  trained: ANSWER<|eot_id|>
  trained: Yes.<|eot_id|>
lfm2_2_5, marker <|im_start|>assistant\n
  trained: <|tool_call_start|>[bash(command='ls')]<|tool_call_end|><|im_end|>
  trained: ANSWER<|im_end|>
  trained: <think>THOUGHT</think>Yes.<|im_end|>
qwen2_5, marker <|im_start|>assistant\n
  trained: <tool_call>\n{"name": "bash", "arguments": {"command":
    "ls"}}\n</tool_call><|im_end|>
  trained: ANSWER<|im_end|>
  trained: Yes.<|im_end|>
qwen3, marker <|im_start|>assistant\n
  trained: <tool_call>\n{"name": "bash", "arguments": {"command":
    "ls"}}\n</tool_call><|im_end|>
  trained: ANSWER<|im_end|>
  trained: <think>\nTHOUGHT\n</think>\n\nYes.<|im_end|>
glm4moe, marker <|assistant|>\n
  trained: <think></think>\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg
    _value>\n</tool_call><|observation|>\n<tool_response>\nOUTPUT\n</tool_response>
  trained: <think></think>\nANSWER
  trained: <think>THOUGHT</think>\nYes.
gemma4, marker <|turn>model\n
  trained: <|tool_call>call:bash{command:<|"|>ls<|"|>}<tool_call|><|tool_response>response:
    bash{value:<|"|>OUTPUT<|"|>}<tool_response|>ANSWER<turn|>\n
  trained: Yes.<turn|>\n
gptoss, marker <|end|><|start|>assistant<|channel|>final<|message|>
  trained: ANSWER
  trained: Yes.<|return|>
muse_glimmer, marker <|start|>assistant to=user<|message|>
  trained: ANSWER<|eot|>
  trained: Yes.<|eot|>
qwen3_8, marker \n<|im_start|>assistant\n<think>\n\n</think>\n\n
  trained: <tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>
    \n</tool_call><|im_end|>
  trained: ANSWER<|im_end|>
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
