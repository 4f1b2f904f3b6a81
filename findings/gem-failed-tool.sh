#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# GEM: with two tools, a failure of the first one ends the episode, for instance a Python program
# that raises an error.
#
# Versions: gem-llm 0.1.0, its ToolEnvWrapper, PythonCodeTool and SearchTool. A stand-in replaces
#   datasets and reasoning-gym.
# Guess: a reply with a program is a use of the Python tool, whether the program works or not. The
#   model sees the traceback and may try again. The order of the tools does not matter, since each
#   has its own tags. A time limit of one second stops a program after one second.
# Behaviour: the wrapper goes on to the next tool if a tool fails, and keeps only what the last tool
#   returns. The search tool finds no query in the reply, so the reply counts as one without a tool:
#   the environment gets it as the final answer, and the episode ends with a reward of 0. The
#   counter says that no tool was used. With the search first, the model gets the traceback, but a
#   search whose server does not answer ends the episode. The Python tool ignores its time limit:
#   with a limit of one second, a program of two seconds runs to its end.
# Why it matters: a rollout is cut off at the first mistake in a program and counts as wrong, so the
#   model learns not to write programs. Nothing in the record shows that a program was run.
# Source: ToolEnvWrapper.step of gem/tools/tool_env_wrapper.py leaves the loop only if there is no
#   error; run_python of gem/utils/sandbox.py calls subprocess_run without its timeout, so the
#   default of ten seconds counts.
# Seen on 30 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv regex==2026.11.19 msgspec==0.23.0 requests==2.34.2 numpy==2.4.6
uv pip install -q --python venv --no-deps gem-llm==0.1.0

# GEM runs programs with the first "python" on the path.
seen=$(PATH="$dir/venv/bin:$PATH" python -W ignore - 2>errors.log <<'PYTHON'
import sys
from unittest.mock import MagicMock

sys.modules["datasets"] = sys.modules["reasoning_gym"] = MagicMock()

from gem.core import Env
from gem.tools.python_code_tool import PythonCodeTool
from gem.tools.search_tool import SearchTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper

REPLIES = (
    "<python>print(6 * 7)</python>",
    "<python>print(42 / 0)</python>",
    "<search>6 times 7</search>",
)


class Product(Env):
    def reset(self, seed=None):
        return "How much is 6 times 7?", {}

    def step(self, action):
        return "The end.", float("\\boxed{42}" in action), True, False, {}


def show(*tools):
    print(*(tool.tool_type for tool in tools), sep=", ")
    for reply in REPLIES:
        env = ToolEnvWrapper(Product(), list(tools))
        env.reset()
        text, reward, terminated, _, info = env.step(reply)
        text = text.strip().split("\n")[-1][:33]
        print(f"  {reply}: {text!r}, reward {reward}, ended {terminated}", end="")
        print(f", tools used {info['tool_use_counter']}")


# Nothing answers at this address.
python, search = PythonCodeTool(), SearchTool(search_url="http://localhost:9")
show(python)
show(python, search)
show(search, python)
program = "<python>import time; time.sleep(2); print('after two seconds')</python>"
print("limit of 1 s:", PythonCodeTool(timeout=1).execute_action(program)[2].strip())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
python_code
  <python>print(6 * 7)</python>: 'Code execution result: 42', reward 0.0, ended False, tools used 1
  <python>print(42 / 0)</python>: 'ZeroDivisionError: division by ze', reward 0.0, ended False, tools used 1
  <search>6 times 7</search>: 'The end.', reward 0.0, ended True, tools used 0
python_code, search
  <python>print(6 * 7)</python>: 'Code execution result: 42', reward 0.0, ended False, tools used 1
  <python>print(42 / 0)</python>: 'The end.', reward 0.0, ended True, tools used 0
  <search>6 times 7</search>: '<information>[SearchTool Error: H', reward 0.0, ended False, tools used 1
search, python_code
  <python>print(6 * 7)</python>: 'Code execution result: 42', reward 0.0, ended False, tools used 1
  <python>print(42 / 0)</python>: 'ZeroDivisionError: division by ze', reward 0.0, ended False, tools used 1
  <search>6 times 7</search>: 'The end.', reward 0.0, ended True, tools used 0
limit of 1 s: Code execution result: after two seconds
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
