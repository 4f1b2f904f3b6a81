#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# SGLang: an argument that the tool declares as text arrives as another text, or as nothing.
#
# Version: sglang 0.5.23, its tool call parsers qwen3_coder, glm45, glm47, minimax-m2 and mimo, each
#   with one call in its model's own format. Of its wheel only the parsers are used: a stand-in for
#   the package's __init__ lets them be imported alone.
# Guess: an argument of type string is the text between the tags, in each of them. One that may also
#   be null (Pydantic's `str | None`, or a list of types) is that text too, unless it is "null".
# Behaviour: with minimax-m2, an argument that may be null is always null, whatever the model wrote.
#   With glm45, a text that looks like a value is printed anew: 1.50 is "1.5", 1e5 is "100000.0",
#   true is "True", null is "None". With glm45 and glm47, a JSON string loses its quotes. mimo turns
#   &lt; into <. For qwen3_coder, minimax-m2 and mimo, the text null is null even for type string.
# Why it matters: the tool runs with something else than the model wrote, without an error. With
#   minimax-m2 no optional text ever reaches a tool. HTML is written without its escapes, and a
#   version 1.50 becomes 1.5. A reward then judges the parser.
# Source: _convert_param_value_with_types of minimax_m2.py returns None if null is one of the types;
#   _parse_argument_pairs of glm4_moe_detector.py; _convert_param_value of mimo_detector.py and of
#   qwen3_coder_detector.py, all in sglang/srt/function_call.
# Seen on 28 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv --no-deps sglang==0.5.23
uv pip install -q --python venv openai==3.57.0 transformers==5.24.0 \
  msgspec pybase64 requests ipython orjson partial-json-parser

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import json
import pathlib
import sys
import sysconfig
import types

package = types.ModuleType("sglang")
package.__path__ = [str(pathlib.Path(sysconfig.get_paths()["purelib"], "sglang"))]
sys.modules["sglang"] = package

from sglang.srt.entrypoints.openai.protocol import Tool  # noqa: E402
from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector  # noqa: E402
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector  # noqa: E402
from sglang.srt.function_call.mimo_detector import MiMoDetector  # noqa: E402
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector  # noqa: E402
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector  # noqa: E402

CALLS = {
    "qwen3_coder": (
        Qwen3CoderDetector,
        "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "glm45": (
        Glm4MoeDetector,
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    ),
    "glm47": (
        Glm47MoeDetector,
        "<tool_call>write<arg_key>text</arg_key><arg_value>{}</arg_value></tool_call>",
    ),
    "minimax-m2": (
        MinimaxM2Detector,
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">{}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "mimo": (
        MiMoDetector,
        "<tool_call>\n<function=write>\n<parameter=text>{}</parameter>\n</function>\n</tool_call>",
    ),
}
TYPES = {
    "string": {"type": "string"},
    "string or null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TEXTS = ("hello", "1.50", "1e5", "true", "null", '"yes"', "a &lt; b")
for name, (parser, call) in CALLS.items():
    for kind, schema in TYPES.items():
        parameters = {"type": "object", "properties": {"text": schema}}
        tool = Tool(type="function", function={"name": "write", "parameters": parameters})
        changed = []
        for text in TEXTS:
            found = parser().detect_and_parse(call.format(text), [tool])
            got = json.loads(found.calls[0].parameters)["text"]
            if got != text:
                changed.append(f"{text} is {got!r}")
        print(f"{name}, {kind}: {'; '.join(changed) or 'all as written'}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
qwen3_coder, string: null is None
qwen3_coder, string or null: null is None
glm45, string: 1.50 is '1.5'; 1e5 is '100000.0'; true is 'True'; null is 'None'; "yes" is 'yes'
glm45, string or null: 1.50 is '1.5'; 1e5 is '100000.0'; true is 'True'; null is 'None'; "yes" is 'yes'
glm47, string: "yes" is 'yes'
glm47, string or null: null is None; "yes" is 'yes'
minimax-m2, string: null is None
minimax-m2, string or null: hello is None; 1.50 is None; 1e5 is None; true is None; null is None; "yes" is None; a &lt; b is None
mimo, string: null is None; a &lt; b is 'a < b'
mimo, string or null: null is None; a &lt; b is 'a < b'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
