"""The specification of basic_loop_agent.py. Harbor's Chat, TinkerLLM, LiteLLM and Job, the renderers and the tokenizer
are real; the model's answers, the environment and, in examples/offline.yaml, the verifier are the fakes below."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The price list that comes with litellm: its download would hold up an offline machine for 8 seconds.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

# Fakes for real jobs, named by import path. Nothing that a model says is ever run on the host.


class HostEnvironment(BaseEnvironment):
    """An environment without a container: the log folders are the host's own, and every command succeeds, unrun."""

    @staticmethod
    def type() -> str:
        return "host"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None: ...

    async def exec(self, command: str, **kwargs: Any) -> ExecResult:
        return ExecResult(return_code=0)


class HostVerifier(BaseVerifier):
    """Scores completion.txt as the task's tests/test.sh does in a container."""

    async def verify(self) -> VerifierResult:
        answer, completion = (
            "".join(filter(str.isalpha, path.read_text().lower()))
            for path in (self.task.paths.tests_dir / "answer.txt", self.trial_paths.agent_dir / "completion.txt")
        )
        return VerifierResult(rewards={"reward": float(answer == completion)})
