# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""Try a loop with scripted replies, without a job. Prints the conversation, the answer and how the
run ended.

    uv run --no-dev python examples/try_loop.py my_agent:MyAgent      # in a clone
    PYTHONPATH=. uv run python examples/try_loop.py my_agent:MyAgent  # in a project of your own

Change REPLIES to what your model might say. The scripted model replaces the client that the
subclass builds. Only SCRIPT is run, on this machine (Linux). Any other command of a loop "succeeds"
and prints nothing.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.llms.base import BaseLLM
from harbor.models.agent.context import AgentContext

from examples.fakes import SCRIPT, HostEnvironment, ScriptedLLM, class_named

# The last one is repeated.
REPLIES = [f"```bash\n{SCRIPT}\n```"] * 3 + ["Hello!"]


async def try_loop(agent_class: Any) -> None:
    class Tried(agent_class):
        def _build_llm(self) -> BaseLLM:
            return ScriptedLLM(REPLIES)

    environment = HostEnvironment()
    context = AgentContext()
    with tempfile.TemporaryDirectory() as folder:
        agent = Tried(
            logs_dir=Path(folder) / "agent", model_name="any", model_client="litellm", max_turns=9
        )
        await agent.setup(environment)
        # The next step of a task would be `await agent.resume("Go on.", environment, context)`.
        await agent.run("Say hello.", environment, context)
    for message in agent.messages:
        print(f"{message['role'].upper()}: {message['content']}\n")
    print(f"answer: {agent.answer!r}\nmetadata: {context.metadata}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    asyncio.run(try_loop(class_named(sys.argv[1])))
