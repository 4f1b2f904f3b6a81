# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
"""The agent as a harness for verifiers 0.4.0, which prime-rl uses.

verifiers does not run Harbor agents. A harness starts a program in the task's container and records
the program's model calls. Here the program is PROGRAM, which runs the agent, and the agent runs
commands in the same container. Put this folder and the agent's file on PYTHONPATH, and name the
harness with `--env.agent.harness.id basic-loop-harness`.

The container needs bash and network access, because verifiers installs uv in the container, and uv
installs Harbor.
"""

import importlib.util
from pathlib import Path

# This project does not install verifiers.
from verifiers.v1 import Harness, HarnessConfig, ModelContext, TaskData, Trace  # ty: ignore[import-not-found]
from verifiers.v1.runtimes import ProgramResult, Runtime  # ty: ignore[import-not-found]

__all__ = ["BasicLoopHarness"]

# Do not import the agent here, because the agent needs Harbor.
spec = importlib.util.find_spec("basic_loop_agent")
if not (spec and spec.origin):
    raise ImportError("put the folder of basic_loop_agent.py on PYTHONPATH")
AGENT = Path(spec.origin).read_bytes()
FOLDER = "/tmp/basic-loop"
PROGRAM = """\
# /// script
# requires-python = ">=3.12"
# dependencies = ["harbor==0.26.0"]
# ///
import asyncio, os, sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from pathlib import Path

sys.path.insert(0, "FOLDER")
from basic_loop_agent import BasicLoopAgent
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class ThisContainer:
    @staticmethod
    async def exec(command, cwd=None, timeout_sec=None, **other):
        arguments = ("bash", "-c", command)
        bash = await create_subprocess_exec(*arguments, cwd=cwd, stdout=PIPE, stderr=PIPE)
        async with asyncio.timeout(timeout_sec):
            stdout, stderr = [text.decode(errors="replace") for text in await bash.communicate()]
        return ExecResult(stdout=stdout, stderr=stderr, return_code=bash.returncode)


async def main(model, prompt):
    agent = BasicLoopAgent(
        logs_dir=Path("FOLDER/trial/agent"),
        model_name=f"openai/{model}",
        model_client="litellm",
        # Scripts inherit the environment, so remove the URL and the key from it.
        api_base=os.environ.pop("MODEL_URL"),
        llm_kwargs={"api_key": os.environ.pop("MODEL_KEY")},
        max_turns=50,
        max_tokens=4096,
        interleaved_thinking=True,
    )
    await agent.setup(ThisContainer)
    await agent.run(prompt, ThisContainer, AgentContext())


asyncio.run(main(*sys.argv[1:]))
""".replace("FOLDER", FOLDER)


class BasicLoopHarness(Harness[HarnessConfig]):
    async def setup(self, runtime: Runtime) -> None:
        await runtime.write(f"{FOLDER}/basic_loop_agent.py", AGENT)
        await runtime.prepare_uv_script(PROGRAM, self.config.resolved_env)

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        _, prompt = self.resolve_text_prompt(data)
        env = self.config.resolved_env | {
            "MODEL_URL": endpoint,
            "MODEL_KEY": secret,
            # Otherwise litellm downloads its price list, and waits if there is no network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        program = await runtime.prepare_uv_script(PROGRAM, self.config.resolved_env)
        return await runtime.run_program([*program, ctx.model, prompt], env)
