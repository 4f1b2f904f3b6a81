#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# datatrove: MinHash deduplication keeps one of four tasks that differ in their numbers or
# operators, and keeps equal texts of less than five words.
#
# Version: datatrove 0.10.1, its four MinHash steps with the default MinhashConfig; spacy 3.8.18,
#   xxhash 3.8.2.
# Guess: near duplicates are texts with most words in common; tasks with other numbers and
#   operators, or the same text with another result, are others. Equal texts are duplicates, however
#   short.
# Behaviour: before the words are compared, each number becomes 0 and all punctuation a space, so "3
#   + 4" equals "3 / 4", and "x < y" equals "x > y". Tasks from a template are one text, of which
#   the first is kept. Texts of fewer words than the n-gram (5) have no signature and are all kept,
#   even if they are equal.
# Why it matters: synthetic tasks for RL (arithmetic, calendars, tool calls with ids) and agents'
#   logs differ in numbers alone, so nearly all are dropped, and code or formulas lose their
#   variants.
# Source: simplify_text and TextNormConfig of datatrove/utils/text.py,
#   MinhashDedupSignature.get_shingles of datatrove/pipeline/dedup/minhash.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv datatrove==0.10.1 spacy==3.8.18 regex==2026.11.19 numpy==2.5.5 \
  xxhash==3.8.2 tokenizers==0.23.3 nltk==3.10.4 orjson==3.13.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pathlib
import tempfile

from datatrove.data import Document
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.text import TextNormConfig
from datatrove.utils.typeshelper import Languages


def show(label, *texts, **options):
    config = MinhashConfig(**options)
    folders = [tempfile.mkdtemp() for _ in range(3)]
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    signature = MinhashDedupSignature(folders[0], config=config, language=Languages.english)
    signature.run(iter(documents))
    for rank in range(config.num_buckets):
        MinhashDedupBuckets(*folders[:2], config=config).run(None, rank, config.num_buckets)
    MinhashDedupCluster(*folders[1:], config=config).run(None)
    kept = [document.text for document in MinhashDedupFilter(folders[2]).run(iter(documents))]
    print(f"{label}: {len(kept)} of {len(texts)} kept, first {kept[0]!r}")


TASK = "Ann has {} apples and buys {} more at the market. How many apples has she now?"
tasks = [TASK.format(*numbers) for numbers in ((3, 5), (12, 7), (40, 2), (9, 9))]
show("other numbers", *tasks)
show("other operators", *(f"Please compute 3 {op} 4 for me now." for op in "+-*/"))
show("other relations", *(f"Is it true that x {op} y for all x?" for op in "<>="))
show("other words", *(f"Please compute the {name} for me now." for name in ("sum", "product")))
show("equal short texts", *["Run the tests."] * 4)
show("equal long texts", *["Run all the tests once more."] * 4)
norm = TextNormConfig(norm_numbers=False, remove_punctuation=False)
show("other numbers, not normalised", *tasks, norm_config=norm)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
other numbers: 1 of 4 kept, first 'Ann has 3 apples and buys 5 more at the market. How many apples has she now?'
other operators: 1 of 4 kept, first 'Please compute 3 + 4 for me now.'
other relations: 1 of 3 kept, first 'Is it true that x < y for all x?'
other words: 2 of 2 kept, first 'Please compute the sum for me now.'
equal short texts: 4 of 4 kept, first 'Run the tests.'
equal long texts: 1 of 4 kept, first 'Run all the tests once more.'
other numbers, not normalised: 4 of 4 kept, first 'Ann has 3 apples and buys 5 more at the market. How many apples has she now?'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
