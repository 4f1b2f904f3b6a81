#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# mlx-lm: an id of 19 digits in a tool call becomes another id, and a text loses its first
# indentation and its last line break.
#
# Version: mlx-lm 0.32.2, the tool call parsers of its server, each with one call in its model's own
#   format. Of its wheel only the parsers are used.
# Guess: an argument of type integer is the number that the model wrote. One of type string is the
#   text between the tags.
# Behaviour: qwen3_coder reads an integer as a float, so 1234567890123456789 arrives as
#   1234567890123456768. glm47, longcat and minimax_m2 strip a text: an edit that starts with four
#   spaces starts with none, and a file loses its last line break. function_gemma cannot parse a
#   text with a closing brace. The server then drops the call, and its log says that the call was
#   probably truncated.
# Why it matters: the ids of chats and posts are often that long, and the tool asks for another one.
#   An inserted line of Python loses its indentation, and a file that is written loses its last line
#   break. The reply shows no error, so it looks like the model's mistake.
# Source: _convert_param_value of mlx_lm/tool_parsers/qwen3_coder.py has int(float(...)); strip() in
#   the others.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv --no-deps mlx-lm==0.32.2
uv pip install -q --python venv regex==2026.11.19

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import importlib
import json
import pathlib
import sys
import sysconfig
import types

package = types.ModuleType("mlx_lm")
package.__path__ = [str(pathlib.Path(sysconfig.get_paths()["purelib"], "mlx_lm"))]
sys.modules["mlx_lm"] = package

CALLS = {
    "qwen3_coder": "\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n",
    "glm47": "f<arg_key>x</arg_key><arg_value>{}</arg_value>",
    "longcat": "f<longcat_arg_key>x</longcat_arg_key><longcat_arg_value>{}</longcat_arg_value>",
    "minimax_m2": '\n<invoke name="f">\n<parameter name="x">{}</parameter>\n</invoke>\n',
    "gemma4": 'call:f{{x:<|"|>{}<|"|>}}',
    "function_gemma": "call:f{{x:<escape>{}<escape>}}",
}
for kind, value in (
    ("integer", 1234567890123456789),
    ("string", "    return x\n"),
    ("string", "def f(): return {}"),
):
    schema = {"type": "object", "properties": {"x": {"type": kind}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    print(f"{kind} {json.dumps(value)}")
    for name, form in CALLS.items():
        if kind == "integer" and "gemma" in name:
            continue
        parser = importlib.import_module("mlx_lm.tool_parsers." + name)
        try:
            got = json.dumps(parser.parse_tool_call(form.format(value), tools)["arguments"]["x"])
        except ValueError:
            got = "no call"
        if got != json.dumps(value):
            print(f"  {name}: {got}")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
integer 1234567890123456789
  qwen3_coder: 1234567890123456768
string "    return x\n"
  glm47: "return x"
  longcat: "return x"
  minimax_m2: "return x"
string "def f(): return {}"
  function_gemma: no call
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
