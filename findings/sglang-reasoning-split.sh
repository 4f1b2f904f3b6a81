#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SGLang: which part of a reply is reasoning depends on whether it is streamed, if the reply
# mentions the tags.
#
# Version: sglang 0.5.23, its reasoning parser as the chat endpoint calls it. Only the wheel's
#   Python files are used: a stand-in for the package's __init__, which wants torch, lets the parser
#   be imported alone.
# Guess: the parser for Qwen3 takes thinking off the front of a reply, if the reply begins with
#   <think>. A reply without thinking that mentions the tags is text as a whole, and streamed and
#   plain replies are split in the same way.
# Behaviour: plain, everything up to the first </think> is reasoning, with the opening tag left in
#   it, if <think> is anywhere before. Streamed, only what is between the tags is, and both tags
#   vanish from the text. A space before the opening tag is enough to make the two differ. A reply
#   that does begin with <think> is the same in both.
# Why it matters: an agent runs the text. Of a plain reply that writes the tags into a file, the
#   command's first half is reasoning and is not run; streamed, all of it is run, without the tags.
#   Neither is what was sampled.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv --no-deps sglang==0.5.23
uv pip install -q --python venv openai==3.57.0 transformers==5.24.0 \
  msgspec pybase64 requests ipython orjson partial-json-parser

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import pathlib
import sys
import sysconfig
import types

package = types.ModuleType("sglang")
package.__path__ = [str(pathlib.Path(sysconfig.get_paths()["purelib"], "sglang"))]
sys.modules["sglang"] = package

from sglang.srt.parser.reasoning_parser import ReasoningParser  # noqa: E402

for reply in (
    "<think>short</think>echo yes",
    " <think>short</think>echo yes",
    "echo '<think>x</think>' > template.txt",
):
    print(repr(reply))
    print(
        "  plain:    reasoning {!r}, text {!r}".format(
            *ReasoningParser("qwen3").parse_non_stream(reply)
        )
    )
    parser = ReasoningParser("qwen3")
    parts = [parser.parse_stream_chunk(character) for character in reply]
    print(
        "  streamed: reasoning {!r}, text {!r}".format(
            *("".join(part or "" for part in side) for side in zip(*parts))
        )
    )
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
'<think>short</think>echo yes'
  plain:    reasoning 'short', text 'echo yes'
  streamed: reasoning 'short', text 'echo yes'
' <think>short</think>echo yes'
  plain:    reasoning ' <think>short', text 'echo yes'
  streamed: reasoning 'short', text ' echo yes'
"echo '<think>x</think>' > template.txt"
  plain:    reasoning "echo '<think>x", text "' > template.txt"
  streamed: reasoning 'x', text "echo '' > template.txt"
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
