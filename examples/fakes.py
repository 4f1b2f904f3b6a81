# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""Stand-ins for a real job: a model, an environment and a verifier that need nothing.

examples/offline.yaml names them by import path. Of what a model says, the host runs nothing but
SCRIPT, to the letter.

To try a copy of the agent, or a subclass of it, in this folder's parent:

    AGENT=my_agent:BasicLoopAgent PYTHONPATH=. harbor run -c examples/offline.yaml

The scripted model takes the place of a client that the subclass builds itself.
"""

import asyncio
import base64
import importlib
import os
import re
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.metric import UsageInfo
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

# Harbor imports litellm after a job: the price list that comes with it, so that nothing is fetched.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# The one script that HostEnvironment runs, what the model is told of it, and the model's replies.
SCRIPT = "echo hello from the script"
# The same, as the agent writes it into a file.
ENCODED = base64.b64encode(f"eval '{SCRIPT}\n'".encode()).decode()
OUTPUT = "Exit code: 0\nOutput:\nhello from the script"
REPLIES = (f"I will try a command.\n\n```bash\n{SCRIPT}\n```", "Hello, world!")
module, _, name = os.environ.get("AGENT", "basic_loop_agent:BasicLoopAgent").partition(":")


class ScriptedAgent(getattr(importlib.import_module(module), name)):
    """The agent with a model that says REPLIES. (A client with token ids: two_candidates.py.)"""

    def _build_llm(self) -> BaseLLM:
        return ScriptedLLM()


class WritingAgent(ScriptedAgent):
    """The agent with a model that solves examples/hello, for examples/hello.yaml."""

    def _build_llm(self) -> BaseLLM:
        return ScriptedLLM(["I will.\n\n```bash\necho hello >greeting.txt\n```", "Done."])


class ScriptedLLM(BaseLLM):
    """Says the replies, one for each reply in the conversation, and the last one from then on. If
    its script has not printed what it expects, it complains."""

    def __init__(self, replies: Sequence[str] = REPLIES) -> None:
        super().__init__()
        self.replies = replies

    async def call(
        self, prompt: str, message_history: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> LLMResponse:
        """The reply to a conversation, whose earlier messages are `message_history`."""
        messages = message_history or []
        n_replies = sum(message["role"] == "assistant" for message in messages)
        reply = self.replies[min(n_replies, len(self.replies) - 1)]
        ran_script = n_replies and "```" in messages[-1]["content"]
        if ran_script and self.replies is REPLIES and prompt != OUTPUT:
            reply = "That is not what my command prints."
        # Words in place of tokens.
        said = " ".join(str(message["content"]) for message in messages)
        usage = UsageInfo(
            prompt_tokens=len(f"{said} {prompt}".split()),
            completion_tokens=len(reply.split()),
            cache_tokens=0,
            cost_usd=0.0,
        )
        return LLMResponse(content=reply, usage=usage)

    def get_model_context_limit(self) -> int:
        """In tokens."""
        return 32_000

    def get_model_output_limit(self) -> int | None:
        """In tokens; None: as many as the context has left."""
        return None


class HostEnvironment(BaseEnvironment):
    """An environment without a container. It runs SCRIPT on the host, which needs bash and
    coreutils, and nothing else.

    The log folders are the host's own, as they are with Docker.
    """

    # Harbor before 0.14 asks for these properties, later ones for `capabilities`.
    supports_gpus = False
    can_disable_internet = False
    is_mounted = True

    @staticmethod
    def type() -> str:
        """The environment's name in Harbor's results."""
        return "host"

    @property
    def capabilities(self) -> Any:
        """What Harbor asks for from 0.14 on."""
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

    @staticmethod
    async def exec(command: str, **kwargs: Any) -> ExecResult:
        """Run a command of the agent that holds this file's own script, and no other."""
        if "BASIC_LOOP_MARK" in command and f"echo {ENCODED} |" not in command:
            raise RuntimeError("this environment runs no script but its own")
        arguments = ("bash", "-c", command)
        process = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=PIPE)
        stdout, stderr = await process.communicate()
        return ExecResult(
            stdout=stdout.decode(), stderr=stderr.decode(), return_code=process.returncode
        )


class HostVerifier(BaseVerifier):
    """Scores completion.txt as the task's tests/test.sh does in a container."""

    def __init__(self, task: Any, trial_paths: Any, *args: Any, **kwargs: Any) -> None:
        self.task = task
        self.trial_paths = trial_paths

    async def verify(self) -> VerifierResult:
        """Reward 1.0 if what answer.txt says stands in the last reply, else 0.0."""
        answer = words(self.task.paths.tests_dir / "answer.txt")
        completion = words(self.trial_paths.agent_dir / "completion.txt")
        return VerifierResult(rewards={"reward": float(answer in completion)})


def words(path: Path) -> str:
    """The words of a file in lower case, between blanks. Raises OSError for a link: it may lead
    anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, encoding="utf-8") as file:
        return " ".join(["", *re.findall("[a-z]+", file.read().lower()), ""])
