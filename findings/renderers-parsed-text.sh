#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# renderers: the text that parse_response gives is not the text that was sampled, and the next turn
# starts from scratch.
#
# Versions: renderers 0.1.12 (Prime Intellect's, of verifiers and prime-rl), transformers 5.24.0;
#   its renderer for Qwen3 over a tokenizer of single bytes with Qwen3's special tokens.
# Guess: `content` is the sampled text up to the stop token, less thinking and tool calls.
#   bridge_to_next_turn puts a user message after prompt and completion as they are, unless the
#   reply has thinking that Qwen3's template would drop.
# Behaviour: `content` is stripped at both ends, so the first line of a script loses its indent;
#   text that follows a tool call is nowhere. By default bridge_to_next_turn gives None for any user
#   message, also if no reply ever thought; with thinking_retention="all" it does what was guessed.
# Why it matters: the package is made to keep tokens exact. Messages that are built from what it
#   parsed cannot be rendered to the same ids again, and with the default the next prompt is
#   rendered from just those messages.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv \
  renderers==0.1.12 transformers==5.24.0 tokenizers==0.23.3 httpx==0.28.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import tokenizers
import transformers
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
bytewise = tokenizers.Tokenizer(
    tokenizers.models.BPE({character: n for n, character in enumerate(alphabet)}, [])
)
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = tokenizers.decoders.ByteLevel()
bytewise.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
tags = ["tool_call", "tool_response", "think"]
bytewise.add_tokens([f"<{tag}>" for tag in tags] + [f"</{tag}>" for tag in tags])
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>")

user = {"role": "user", "content": "Go on."}
renderer = Qwen3Renderer(tokenizer)
for sampled in (
    "  indented:\n    x\n<|im_end|>",
    'Before.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nAfter.<|im_end|>',
):
    parsed = renderer.parse_response(tokenizer.encode(sampled))
    print("content", repr(parsed.content), "and", len(parsed.tool_calls), "tool calls")
prompt = renderer.render_ids([user], add_generation_prompt=True)
completion = tokenizer.encode("Yes.<|im_end|>")
for name, config in (("default", None), ("all", Qwen3RendererConfig(thinking_retention="all"))):
    bridged = Qwen3Renderer(tokenizer, config).bridge_to_next_turn(prompt, completion, [user])
    print(f"retention {name}:", bridged and repr(tokenizer.decode(bridged.token_ids)))
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
content 'indented:\n    x' and 0 tool calls
content 'Before.' and 1 tool calls
retention default: None
retention all: '<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
