#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# evidently: "whole words only" finds "no" in "know", and never finds "don't".
#
# Versions: evidently 0.7.23, its descriptors TextMatch, IncludesWords and ExcludesWords; pandas
#   2.3.3, since evidently cannot be imported with pandas 3.
# Guess: with word_boundaries, which is documented as "match whole words only" and which
#   IncludesWords and ExcludesWords always set, "no" is found in "No." but not in "I know". A word
#   with an apostrophe or a hyphen is found where the text has the word. (The documentation adds
#   that these two consider only vocabulary words. It says nothing like that of TextMatch.)
# Behaviour: the text is taken apart into words, which are joined with spaces. Then the item is
#   searched for in this text like any substring. So "no" is found in "know" and "yes" in
#   "yesterday". An item with an apostrophe or a hyphen is found in no text, because the text has
#   lost these characters and the item still has them.
# Why it matters: a check for refusals, verdicts or forbidden words is wrong in both directions. A
#   test that replies exclude "can't" always passes, and one for "ai" fails for "train" and "again".
# Source: TextMatchProcessor of evidently/descriptors/text_match.py: process_text, any_match and
#   all_match.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv evidently==0.7.23 pandas==2.3.3 numpy==2.4.6

seen=$(HOME="$dir" DO_NOT_TRACK=1 venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import pandas
from evidently import DataDefinition, Dataset
from evidently.descriptors import ExcludesWords, IncludesWords, TextMatch


def show(label, descriptor, *replies):
    data = Dataset.from_pandas(
        pandas.DataFrame({"reply": replies}),
        data_definition=DataDefinition(text_columns=["reply"]),
        descriptors=[descriptor],
    )
    print(f"{label}:")
    for reply, value in zip(replies, data.as_dataframe().iloc[:, -1]):
        print(f"  {reply!r}: {value}")


WHOLE = {"word_boundaries": True, "case_sensitive": False}
show("TextMatch no", TextMatch("reply", ["no"], **WHOLE), "No.", "I know.", "Yes.")
show("TextMatch don't", TextMatch("reply", ["don't"], **WHOLE), "I don't know.")
show("TextMatch up-to-date", TextMatch("reply", ["up-to-date"], **WHOLE), "It is up-to-date.")
show(
    "IncludesWords yes",
    IncludesWords("reply", ["yes"], lemmatize=False),
    "Yes.",
    "It failed yesterday.",
)
show(
    "ExcludesWords can't",
    ExcludesWords("reply", ["can't"], lemmatize=False),
    "I can't help with that.",
)
show(
    "ExcludesWords ai",
    ExcludesWords("reply", ["ai"], lemmatize=False),
    "The train is fast again.",
)
show(
    "TextMatch with a regular expression for no",
    TextMatch("reply", [r"\bno\b"], match_type="regex", case_sensitive=False),
    "No.",
    "I know.",
)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
TextMatch no:
  'No.': True
  'I know.': True
  'Yes.': False
TextMatch don't:
  "I don't know.": False
TextMatch up-to-date:
  'It is up-to-date.': False
IncludesWords yes:
  'Yes.': True
  'It failed yesterday.': True
ExcludesWords can't:
  "I can't help with that.": True
ExcludesWords ai:
  'The train is fast again.': False
TextMatch with a regular expression for no:
  'No.': True
  'I know.': False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
