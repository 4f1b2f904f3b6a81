#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# transformers: one call with truncation=True changes the tokenizer.json that save_pretrained
# writes.
#
# Versions: transformers 5.24.0 with tokenizers 0.23.3; a byte-level tokenizer that is made here.
# Guess: `truncation` and `max_length` are arguments of one call. What save_pretrained writes does
#   not depend on which texts the tokenizer was called with before.
# Behaviour: the call leaves its truncation in the tokenizer below. tokenizer.backend_tokenizer cuts
#   each text at the same length from then on, until the next call of the outer one; and
#   tokenizer.json is saved with it. transformers itself does not show it: a tokenizer that it loads
#   from there cuts nothing. What reads tokenizer.json with the tokenizers library cuts each text at
#   that length, silently.
# Why it matters: a trainer that truncates its examples and then saves checkpoint and tokenizer
#   makes a model whose prompts are cut at the trainer's length by one program and not by another.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv transformers==5.24.0 tokenizers==0.23.3

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json

import tokenizers
import transformers

alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
vocabulary = {character: number for number, character in enumerate(alphabet)}
bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise)
text = "twenty-one characters"


def show(when):
    tokenizer.save_pretrained("saved")
    below = len(tokenizer.backend_tokenizer.encode(text).ids)
    saved = json.load(open("saved/tokenizer.json"))["truncation"]
    by_tokenizers = len(tokenizers.Tokenizer.from_file("saved/tokenizer.json").encode(text).ids)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained("saved")
    by_transformers = len(loaded(text)["input_ids"])
    limit = saved and saved["max_length"]
    print(
        f"{when}: below {below}, saved limit {limit}, "
        f"tokenizers {by_tokenizers}, transformers {by_transformers}"
    )


show("new")
tokenizer("an example for training", truncation=True, max_length=4)
show("after one truncated call")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
new: below 21, saved limit None, tokenizers 21, transformers 21
after one truncated call: below 4, saved limit 4, tokenizers 4, transformers 21
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
