#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# tinker-cookbook: its IFEval checks nothing for "less than", and passes replies that are wrong.
#
# Versions: tinker-cookbook 0.6.1, of whose wheel only the one file is used; if-verifiable 0.1.2,
#   which has the benchmark's own checkers, for comparison. The ids and arguments are of the forms
#   that the dataset google/IFEval has.
# Guess: the cookbook "Covers all 48 instruction types from the IFEval dataset", as it says (IFEval
#   has 25), so both judge a reply alike, except for texts at the edge, such as what counts as a
#   sentence.
# Behaviour: the dataset's relations are "at least" and "less than", and the cookbook knows "at
#   least", "at most" and "exactly"; any other one passes. So does combination:repeat_prompt, which
#   it does not know, and detectable_format:constrained_response. "All in capital letters" needs
#   only a capital at the start of each word, sections need Markdown headings instead of the word
#   that the task names, a title may be a heading, and three paragraphs may be five. Right replies
#   fail as well, where the forms differ.
# Why it matters: the score is not that of IFEval. An endless reply passes each "less than 100
#   words", so a policy that is selected by this score, or trained with it, drops these constraints.
# Source: verify_instruction and _relation_check of
#   tinker_cookbook/eval/benchmarks/_ifeval_verify.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv if-verifiable==0.1.2
uv pip install -q --python venv --no-deps tinker-cookbook==0.6.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import runpy
import sysconfig

from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

site = pathlib.Path(sysconfig.get_paths()["purelib"])
cookbook = runpy.run_path(str(site / "tinker_cookbook/eval/benchmarks/_ifeval_verify.py"))


def official(name, reply, arguments):
    checker = INSTRUCTION_DICT[name](name)
    checker.build_description(**arguments)
    return bool(checker.check_following(reply))


LESS = {"relation": "less than"}
for name, arguments, reply in (
    ("length_constraints:number_words", {**LESS, "num_words": 100}, "word " * 500),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 100}, "word"),
    ("keywords:frequency", {**LESS, "keyword": "dog", "frequency": 2}, "dog " * 9),
    (
        "keywords:letter_frequency",
        {"let_relation": "less than", "letter": "e", "let_frequency": 2},
        "e" * 9,
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "Roses are red."),
    ("detectable_format:constrained_response", {}, "I would rather not say."),
    ("change_case:english_capital", {}, "Only The Words Begin With One"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "# First\nRoses are red.\n# Second\nViolets are blue.",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nRoses are red.\nSECTION 2\nViolets are blue.",
    ),
    ("detectable_format:title", {}, "# Roses\nRoses are red."),
    ("detectable_format:title", {}, "Here it is.\n<<Roses>>\nRoses are red."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "a\n\nb\n\nc\n\nd\n\ne"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "a\n***\nb\n***\nc"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b\n* c\n* d"),
    ("keywords:forbidden_words", {"forbidden_words": ["can"]}, "Light a candle."),
):
    print(
        f"{name} {reply[:30]!r}: IFEval {official(name, reply, arguments)}, "
        f"cookbook {cookbook['verify_instruction'](name, reply, arguments)}"
    )
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
length_constraints:number_words 'word word word word word word ': IFEval False, cookbook True
length_constraints:number_words 'word': IFEval False, cookbook False
keywords:frequency 'dog dog dog dog dog dog dog do': IFEval False, cookbook True
keywords:letter_frequency 'eeeeeeeee': IFEval False, cookbook True
combination:repeat_prompt 'Roses are red.': IFEval False, cookbook True
detectable_format:constrained_response 'I would rather not say.': IFEval False, cookbook True
change_case:english_capital 'Only The Words Begin With One': IFEval False, cookbook True
detectable_format:multiple_sections '# First\nRoses are red.\n# Secon': IFEval False, cookbook True
detectable_format:multiple_sections 'SECTION 1\nRoses are red.\nSECTI': IFEval True, cookbook False
detectable_format:title '# Roses\nRoses are red.': IFEval False, cookbook True
detectable_format:title 'Here it is.\n<<Roses>>\nRoses ar': IFEval True, cookbook False
length_constraints:number_paragraphs 'a\n\nb\n\nc\n\nd\n\ne': IFEval False, cookbook True
length_constraints:number_paragraphs 'a\n***\nb\n***\nc': IFEval True, cookbook False
detectable_format:number_bullet_lists '* a\n* b\n* c\n* d': IFEval False, cookbook True
keywords:forbidden_words 'Light a candle.': IFEval True, cookbook False
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
