#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# LlamaFactory: a sample that is too long loses the end of the question and the header of the reply,
# and the reply is trained right after the cut.
#
# Version: llamafactory 0.9.5, its SupervisedDatasetProcessor with the qwen3 template and the
#   default options but cutoff_len; stand-ins for torch, transformers and the other modules that
#   this does not need. A tokenizer of single characters stands in too, so texts are cut within
#   words, where a real one cuts between tokens.
# Guess: a sample longer than cutoff_len, "the cutoff length of the tokenized inputs", is cut at
#   its right end, or is dropped. What is left of it is a piece of the conversation.
# Behaviour: the turns are filled in one after the other. In the turn that does not fit, question
#   and reply are cut separately, each at its right end, and joined. So the end of the question,
#   its end marker and the assistant's header are gone, and the reply follows at once, with a loss
#   on all of it. If the reply is long too, it loses its end and its stop token. There is no
#   warning.
# Why it matters: the default cutoff_len is 2048, and an agent's observations are often longer. The
#   instruction often stands at the end of a long question. The model then learns to answer, inside
#   the user's turn, what it was not asked. The sequence ends with the stop token, as a sample that
#   fits does.
# Source: _encode_data_example of llamafactory/data/processor/supervised.py, infer_seqlen of
#   processor_utils.py. The pairwise and the KTO processor use the same function.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv typing-extensions==4.15.0
uv pip install -q --python venv --no-deps llamafactory==0.9.5

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import sys
import types
from unittest.mock import MagicMock

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/llamafactory")
for name in "", "data", "data/processor", "extras":
    module = types.ModuleType("/".join(filter(None, ("llamafactory", name))).replace("/", "."))
    module.__path__ = [str(root / name)]
    sys.modules[module.__name__] = module
for name in "constants", "logging", "misc":
    sys.modules["llamafactory.extras." + name] = MagicMock(IGNORE_INDEX=-100)
for name in "fsspec", "huggingface_hub", "datasets", "llamafactory.data.mm_plugin":
    sys.modules[name] = MagicMock()

from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES

characters = MagicMock(bos_token_id=None, eos_token_id=0)
characters.encode = lambda text, **options: list(map(ord, text))
template = TEMPLATES["qwen3"]
template.mm_plugin.process_messages = lambda messages, *others: messages
template.mm_plugin.process_token_ids = lambda ids, labels, *others: (ids, labels)


def show(cutoff, *texts):
    options = types.SimpleNamespace(cutoff_len=cutoff, mask_history=False, train_on_prompt=False)
    processor = SupervisedDatasetProcessor(template, characters, None, options)
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    ids, labels = processor._encode_data_example(messages[:-1], messages[-1:], "", "", [], [], [])
    print(f"cutoff_len {cutoff}, {len(ids)} tokens; trained parts are in brackets:")
    text, inside = "", False
    for token, label in zip(ids, labels):
        if inside != (label != -100):
            text, inside = text + "[]"[inside], not inside
        text += chr(token)
    print((text + "]" * inside).replace("<think>\n\n</think>\n\n", "<think></think>"))


question = "Log: one error, two warnings, three errors, four notes. Count the notes, nothing else."
show(400, question, "There are four.")
show(130, question, "There are four.")
show(250, "Hi", "Hello", question, "There are four.")
show(110, question, "There are four notes, one error more than one, and two warnings in the log.")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
cutoff_len 400, 181 tokens; trained parts are in brackets:
<|im_start|>user
Log: one error, two warnings, three errors, four notes. Count the notes, nothing else.<|im_end|>
<|im_start|>assistant
[<think></think>There are four.<|im_end|>
]
cutoff_len 130, 130 tokens; trained parts are in brackets:
<|im_start|>user
Log: one error, two warnings, three errors, four notes. Count the no[<think></think>There are four.<|im_end|>
]
cutoff_len 250, 250 tokens; trained parts are in brackets:
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
[<think></think>Hello<|im_end|>
]<|im_start|>user
Log: one error, two warnings, three errors, four notes. Count the notes, nothing else.<|im_end|>
<|im[<think></think>There are four.<|im_end|>
]
cutoff_len 110, 110 tokens; trained parts are in brackets:
<|im_start|>user
Log: one error, two warnings, three errors, fo[<think></think>There are four notes, one er]
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
