#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Rewardkit: diff_ratio gives 0 to a table with one wrong digit, if the digit is at its start.
#
# Version: harbor-rewardkit 0.2.3, the criterion diff_ratio, run by its command as in Harbor.
# Guess: diff_ratio is, as documented, a "similarity ratio between file content and expected text".
#   A file with one wrong character of 267 scores 0.996, wherever that character is.
# Behaviour: diff_ratio is difflib's ratio with autojunk on. If the expected text has 200 characters
#   or more, no match can start at a character that makes up more than one percent of it. In a table
#   of numbers, that applies to every character, so only the text before the first difference
#   counts. One wrong digit scores 0 at the start, 0.498 in the middle and 0.996 at the end. An
#   extra header line scores 0. The same mistakes in a table of 199 characters score 0.977 or more.
# Why it matters: this is the criterion for partial reward. The reward depends on where the mistake
#   is and not on how large it is, so a nearly right file is worth as much as no file. One more row
#   in the expected file, past 200 characters, changes all rewards of a task.
# Source: rewardkit/criteria/diff_ratio.py calls SequenceMatcher(None, content, expected).
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
mkdir tests work

cat >tests/checks.py <<'PYTHON'
from difflib import SequenceMatcher
from pathlib import Path

from rewardkit import criteria

long = "\n".join(f"{number},{number * number}" for number in range(1, 41))
short = long[:199]
FILES = []
for name, right in ("long", long), ("short", short):
    middle = len(right) // 2
    FILES += [
        (f"{name}, right", right, right),
        (f"{name}, first digit wrong", "9" + right[1:], right),
        (f"{name}, middle digit wrong", right[:middle] + "9" + right[middle + 1 :], right),
        (f"{name}, last digit wrong", right[:-1] + "9", right),
        (f"{name}, with a header", f"n,square\n{right}", right),
    ]
FILES.append(("long, empty", "", long))
for name, text, right in FILES:
    Path("work", name).write_text(text)
    criteria.diff_ratio(name, right)
    exact = SequenceMatcher(None, text, right, autojunk=False).ratio()
    with open("exact.txt", "a") as file:
        print(f"{exact:.3f}", file=file)
PYTHON
export LITELLM_LOCAL_MODEL_COST_MAP=True
uv run -q --no-project --python 3.13 --with 'harbor-rewardkit==0.2.3' rewardkit tests \
  --workspace work --output reward.json >log.txt 2>errors.log || { tail -n 20 errors.log; exit 1; }
cat >show.py <<'PYTHON'
import json
from pathlib import Path

scores = json.loads(Path("reward-details.json").read_text())["reward"]["criteria"]
for score, exact in zip(scores, Path("exact.txt").read_text().split(), strict=True):
    print(f"{score['name']}: {score['value']:.3f}, without autojunk {exact}")
PYTHON
seen=$(python3 show.py)
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
diff_ratio:long, right: 1.000, without autojunk 1.000
diff_ratio:long, first digit wrong: 0.000, without autojunk 0.996
diff_ratio:long, middle digit wrong: 0.498, without autojunk 0.996
diff_ratio:long, last digit wrong: 0.996, without autojunk 0.996
diff_ratio:long, with a header: 0.000, without autojunk 0.983
diff_ratio:short, right: 1.000, without autojunk 1.000
diff_ratio:short, first digit wrong: 0.995, without autojunk 0.995
diff_ratio:short, middle digit wrong: 0.995, without autojunk 0.995
diff_ratio:short, last digit wrong: 0.995, without autojunk 0.995
diff_ratio:short, with a header: 0.978, without autojunk 0.978
diff_ratio:long, empty: 0.000, without autojunk 0.000
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
