# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""A scripted model, an environment and a verifier for a job without Docker, key or network.

examples/offline.yaml refers to them by import path. The host runs no model's command except SCRIPT.

To try a copy of the agent or a subclass, run this command in the parent of this folder:

    AGENT=my_agent:MyAgent PYTHONPATH=. harbor run -c examples/offline.yaml

The scripted model replaces any client that the subclass builds.
"""

import asyncio
import base64
import importlib
import os
import re
import shlex
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.metric import UsageInfo
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

# Harbor imports litellm after a job. Make litellm use its packaged price list without a download.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# The only script that HostEnvironment runs.
SCRIPT = "echo hello from the script"
# The output that the model receives after SCRIPT ran, and the model's replies.
OUTPUT = "Exit code: 0\nOutput:\nhello from the script"
REPLIES = (f"I will try a command.\n\n```bash\n{SCRIPT}\n```", "Hello, world!")
AGENT = os.environ.get("AGENT", "basic_loop_agent:BasicLoopAgent")


def class_named(path: str) -> Any:
    """The agent class with a path such as my_agent:MyAgent. Raises SystemExit if there is none."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(f"cannot load {path} (write module:Class): {error}") from error
    if not (isinstance(found, type) and issubclass(found, BaseAgent)):
        raise SystemExit(f"{path} is not an agent: name a subclass of BasicLoopAgent")
    return found


class ScriptedAgent(class_named(AGENT)):
    """The agent with a model that returns REPLIES. The class that the variable AGENT names must be
    a subclass of BasicLoopAgent, not of this class."""

    def _build_llm(self) -> BaseLLM:
        return ScriptedLLM()


class WritingAgent(ScriptedAgent):
    """The agent with a model that solves examples/hello. examples/hello.yaml names this class."""

    def _build_llm(self) -> BaseLLM:
        script = "echo hello >greeting.txt\ncat greeting.txt"
        reply = f"I write the file and read it back.\n\n```bash\n{script}\n```"
        return ScriptedLLM([reply, "greeting.txt contains the word hello."])


class ScriptedLLM(BaseLLM):
    """Returns its replies in order, then repeats the last one. If the agent ran SCRIPT but did not
    send its output, a complaint replaces the reply from REPLIES, so that the reward is 0."""

    def __init__(self, replies: Sequence[str] = REPLIES) -> None:
        super().__init__()
        self.replies = replies

    async def call(
        self, prompt: str, message_history: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> LLMResponse:
        """The reply to a prompt after the messages of `message_history`."""
        messages = message_history or []
        n_replies = sum(message["role"] == "assistant" for message in messages)
        reply = self.replies[min(n_replies, len(self.replies) - 1)]
        ran_script = n_replies and "```" in messages[-1]["content"]
        if ran_script and self.replies is REPLIES and OUTPUT not in prompt:
            reply = "That is not what my command prints."
        # Count words, because this model has no tokens.
        said = " ".join(str(message["content"]) for message in messages)
        usage = UsageInfo(
            prompt_tokens=len(f"{said} {prompt}".split()),
            completion_tokens=len(reply.split()),
            cache_tokens=0,
            cost_usd=0.0,
        )
        return LLMResponse(content=reply, usage=usage)

    def get_model_context_limit(self) -> int:
        """The context limit in tokens."""
        return 32_000

    def get_model_output_limit(self) -> int | None:
        """The output limit in tokens. None means all tokens that the context has left."""
        return None


class HostEnvironment(BaseEnvironment):
    """An environment without a container, which runs only SCRIPT. SCRIPT runs on the host, which
    needs bash and coreutils. The log folders are the host's.

    Outside a job, `HostEnvironment()` is enough to try a loop.
    """

    # Harbor before 0.14 reads these properties. Later versions read `capabilities`.
    supports_gpus = False
    can_disable_internet = False
    is_mounted = True

    def __init__(self, **given: Any) -> None:
        # In a job, Harbor passes its arguments.
        if given:
            super().__init__(**given)

    @staticmethod
    def type() -> str:
        """The environment's name in Harbor's results."""
        return "host"

    @property
    def capabilities(self) -> Any:
        """The environment's capabilities, which Harbor 0.14 and later read."""
        from harbor.environments.capabilities import EnvironmentCapabilities

        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None:
        """There is nothing to start."""

    async def stop(self, delete: bool) -> None:
        """There is nothing to stop."""

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """The host's files are in place."""

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """The host's files are in place."""

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """The host's files are in place."""

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """The host's files are in place."""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run the agent's program for SCRIPT. All other commands return 0 without running: the
        agent's kill, `rm -f /logs/agent/...` before a later run, and Harbor's commands, such as
        `pwd`. Raises RuntimeError for a program with any other block."""
        # The agent's program holds a model's text only in this variable, in base64.
        encoded = re.findall(r"loop_script=(\S*)", command)
        if not encoded:
            return ExecResult(return_code=0, stderr="not run: this environment runs only SCRIPT")
        expected = {f"eval {shlex.quote(SCRIPT + chr(10))}\n"}
        if {base64.b64decode(text).decode() for text in encoded} != expected:
            raise RuntimeError("this environment runs no script except its own")
        arguments = ("bash", "-c", command)
        process = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=PIPE)
        stdout, stderr = await process.communicate()
        return ExecResult(
            stdout=stdout.decode(), stderr=stderr.decode(), return_code=process.returncode or 0
        )


class HostVerifier(BaseVerifier):
    """Scores completion.txt in the same way as the task's tests/test.sh in a container."""

    def __init__(self, task: Any, trial_paths: Any, *args: Any, **kwargs: Any) -> None:
        self.task = task
        self.trial_paths = trial_paths

    async def verify(self) -> VerifierResult:
        """Reward 1.0 if the last reply contains the words of answer.txt, otherwise 0.0."""
        answer = words(self.task.paths.tests_dir / "answer.txt")
        completion = words(self.trial_paths.agent_dir / "completion.txt")
        return VerifierResult(rewards={"reward": float(answer in completion)})


def words(path: Path) -> str:
    """The words of a file in lower case, separated by spaces. Raises OSError for a link, which may
    point anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, encoding="utf-8") as file:
        return " ".join(["", *re.findall("[a-z]+", file.read().lower()), ""])
