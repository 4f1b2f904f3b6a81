#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# json-repair: one trailing comma anywhere removes the last newline of each text.
#
# Version: json-repair 0.64.6.
# Guess: in a tool call with a trailing comma, only the comma is repaired. The texts, which are
#   valid JSON strings, are read as json.loads reads them.
# Behaviour: valid JSON goes to json.loads. Everything else goes to json-repair's own parser, which
#   reads strings differently, even those that need no repair. If a text ends with a newline, all
#   white space at its end is removed, including spaces before the newline. `\f` and `\/` keep their
#   backslash, and an escaped emoji becomes two halves that no UTF-8 file can hold. There is no
#   warning, and the optional log of repairs calls each of these escapes a stray one.
# Why it matters: a model's call that writes a file is valid except for one comma. Then the file has
#   no newline at its end, a patch no longer applies, or the old text of an edit is not found.
#   Whether a text arrives whole depends on a typo elsewhere in the call. In training data made from
#   such calls, texts end differently.
# Source: the end of _finalize_string_result in json_repair/parse_string.py.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"

cat >show.py <<'PYTHON'
import json_repair

for text in (
    r'"x = 1\n"',
    r'"x = 1"',
    r'"x = 1 "',
    r'"x = 1 \n\n"',
    r'"-old\n \n"',
    r'"a\fb"',
    r'"a\/b"',
    r'"\ud83d\ude00"',
):
    valid = json_repair.loads('{"text": %s, "path": "a"}' % text)["text"]
    comma = json_repair.loads('{"text": %s, "path": "a",}' % text)["text"]
    same = "the same" if valid == comma else ascii(comma)
    print(f"{text}: {ascii(valid)}, with a comma after the path: {same}")
PYTHON
seen=$(uv run -q --no-project --python 3.13 --with 'json-repair==0.64.6' python show.py \
  2>errors.log) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
"x = 1\n": 'x = 1\n', with a comma after the path: 'x = 1'
"x = 1": 'x = 1', with a comma after the path: the same
"x = 1 ": 'x = 1 ', with a comma after the path: the same
"x = 1 \n\n": 'x = 1 \n\n', with a comma after the path: 'x = 1'
"-old\n \n": '-old\n \n', with a comma after the path: '-old'
"a\fb": 'a\x0cb', with a comma after the path: 'a\\fb'
"a\/b": 'a/b', with a comma after the path: 'a\\/b'
"\ud83d\ude00": '\U0001f600', with a comma after the path: '\ud83d\ude00'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
