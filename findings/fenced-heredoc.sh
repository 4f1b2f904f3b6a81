#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# mini-swe-agent and AutoGen: a command that writes a fenced block into a file is cut at the inner
# fence, even inside a fence of four backticks, and ends with exit code 0.
#
# Versions: mini-swe-agent 2.4.6 with the text-based model, which its mini_textbased.yaml chooses;
#   autogen-agentchat 0.7.5 and autogen-ext 0.7.5, CodeExecutorAgent with the local executor;
#   markdown-it-py 4.3.0 for comparison.
# Guess: a block in a fence of four backticks ends at four backticks, as in Markdown, so the lines
#   of three in it are text. If a command is cut all the same, the shell reports an error.
# Behaviour: both look for three backticks with a regular expression, and find them in the four. The
#   command ends at the inner fence. A here-document without its end is no error: the shell writes
#   what is there, with exit code 0, and all commands after it are lost. dash says nothing at all,
#   bash prints a warning.
# Why it matters: READMEs, docstrings and prompts contain fences. The file is truncated, the model
#   reads that the command succeeded, and what followed in the same block, such as the tests, never
#   runs.
# Source: action_regex of minisweagent/models/litellm_textbased_model.py,
#   _extract_markdown_code_blocks of autogen_agentchat/agents/_code_executor_agent.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv mini-swe-agent==2.4.6 autogen-agentchat==0.7.5 autogen-ext==0.7.5 \
  aiofiles==25.1.0 markdown-it-py==4.3.0

seen=$(MSWEA_SILENT_STARTUP=1 MSWEA_GLOBAL_CONFIG_DIR=$dir venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import logging
import pathlib

logging.disable()
from autogen_agentchat.agents import CodeExecutorAgent
from autogen_core import CancellationToken
from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor
from markdown_it import MarkdownIt
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModelConfig
from minisweagent.models.utils.actions_text import parse_regex_actions

LINES = ["cat >README.md <<'END'", "# Tool", "```", "pip install tool", "```", "END", "echo end"]
README = pathlib.Path("README.md")


def mini_swe_agent(reply):
    config = LitellmTextbasedModelConfig(model_name="none")
    templates = {"format_error_template": config.format_error_template}
    (action,) = parse_regex_actions(reply, action_regex=config.action_regex, **templates)
    output = LocalEnvironment().execute(action)
    return output["returncode"], output["output"]


async def autogen(reply):
    executor = LocalCommandLineCodeExecutor(work_dir=".")
    await executor.start()
    agent = CodeExecutorAgent("agent", executor, supported_languages=["bash"])
    (block,) = agent._extract_markdown_code_blocks(reply)
    result = await executor.execute_code_blocks([block], CancellationToken())
    await executor.stop()
    return result.exit_code, result.output


def markdown(reply):
    """Runs what Markdown takes as the block."""
    (block,) = [token for token in MarkdownIt().parse(reply) if token.type == "fence"]
    output = LocalEnvironment().execute({"command": block.content})
    return output["returncode"], output["output"]


for name, language, run in (
    ("Markdown", "bash", markdown),
    ("mini-swe-agent", "mswea_bash_command", mini_swe_agent),
    ("AutoGen", "bash", lambda reply: asyncio.run(autogen(reply))),
):
    code, output = run("\n".join(["Writing.", "", f"````{language}", *LINES, "````", ""]))
    last = "end" in output.splitlines()
    print(f"{name}: exit code {code}, README.md is {README.read_text().rstrip()!r},", end=" ")
    print("the last command", "ran" if last else "did not run")
    README.unlink()
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
Markdown: exit code 0, README.md is '# Tool\n```\npip install tool\n```', the last command ran
mini-swe-agent: exit code 0, README.md is '# Tool', the last command did not run
AutoGen: exit code 0, README.md is '# Tool', the last command did not run
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
