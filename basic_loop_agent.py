# SPDX-License-Identifier: Apache-2.0
"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://...

The agent samples from one model in one conversation, and runs one script per turn. It does not
compact long conversations, call tools natively or run commands in parallel. To add such a thing,
change the loop: `BasicLoopAgent._converse`.

Terms:

- run: the work on one instruction. A multi-step task has a run for each step, any other has one.
- turn: one model call and its reply (class `Turn`).
- rollout: the token ids and log-probabilities of a run's turns.
- exact prompt: a prompt whose token ids begin with the previous turn's prompt and completion ids.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shlex
import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from uuid import uuid4

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import ContextLengthExceededError, LLMResponse
from harbor.llms.chat import Chat
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from markdown_it import MarkdownIt
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

try:
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions
except ImportError:
    # Harbor before 0.23 has neither class, and never asks for them.
    class AgentOptions(BaseModel, extra="forbid"): ...

    class AgentCapabilities(BaseModel): ...


__version__ = "0.9.0"


class BasicLoopOptions(
    AgentOptions, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
):
    """The options of `--ak key=value`. The first eight are parameters of the constructor, too."""

    model_path: str | None = Field(None, pattern="^tinker://")
    """Tinker checkpoint to sample, tinker://...; default: the base model."""
    renderer_name: str | None = None
    """tinker-cookbook renderer; default: the one recommended for the model."""
    max_tokens: PositiveInt = 512
    """Maximum tokens per model call, thinking included."""
    temperature: NonNegativeFloat | None = 1.0
    """Sampling temperature; null: the client's default."""
    max_turns: PositiveInt = 1
    """Maximum model calls. 1: the reply is the answer. Above 1: its bash blocks are run."""
    system_prompt: str | None = None
    """System message; "" sends none. Default: an explanation of bash blocks if max_turns > 1."""
    model_client: Literal["tinker", "litellm", "vllm"] = "tinker"
    """tinker; vllm for a vLLM server, by token ids; litellm for API models and other servers."""
    api_base: str | None = None
    """Base URL of the model's server; default: the client's. /v1 is added to http://host:port."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends and the trial is scored."""
    llm_kwargs: dict = Field({}, repr=False)
    """More arguments for the client: top_p, seed, ... Errors hide them: one may be an api_key."""
    collect_rollout_details: bool | None = None
    """Record token ids and logprobs; default: true for tinker and vllm."""
    context_limit: PositiveInt | None = None
    """Maximum tokens of a conversation (tinker: 32,000; vllm: the server's; litellm: none)."""
    interleaved_thinking: bool = False
    """Send back the reasoning that the server gave apart from the text (litellm)."""
    session_id: str | None = None
    """Sent with each model call, for routers (litellm, vllm). Each id has a client of its own."""
    command_timeout_sec: PositiveInt = Field(120, le=7 * 24 * 3600)
    """Time limit of a script in seconds; at most a week."""
    max_output_bytes: PositiveInt = 10_000
    """Maximum bytes of a script's output that the model sees."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        client = self.model_client
        if self.collect_rollout_details is None:
            self.collect_rollout_details = client != "litellm"
        # Harbor 0.25 has options of its own, such as reasoning_effort. Here llm_kwargs takes it.
        names = {*type(self).model_fields, "model_name"} - AgentOptions.model_fields.keys()
        duplicates = self.llm_kwargs.keys() & names
        if duplicates:
            raise ValueError(f"llm_kwargs holds {', '.join(duplicates)}: use the option instead")
        if client != "tinker" and (self.model_path or self.renderer_name):
            raise ValueError("model_path and renderer_name are for model_client=tinker: drop them")
        if client == "vllm" and not self.api_base:
            raise ValueError("model_client=vllm needs api_base, such as http://localhost:8000")
        if client == "tinker" and not importlib.util.find_spec("tinker_cookbook"):
            raise ValueError("the Tinker packages are missing: `pip install 'harbor[tinker]'`")
        return self


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies, and records each turn.

    After a run the context holds the token counts, cost_usd (None if unknown), the metadata and the
    rollout (see `rollout_details`). `logs_dir` holds completion.txt, which is the last answer, and
    trajectory.json, in Harbor's format ATIF.

    Attributes for the loop (`run` and `resume` create them):
        client: The model client, which the trials of a job share.
        messages: The conversation so far, without thinking. The loop may edit it.
        turns: The turns of this run.
        metadata: The loop may keep JSON values here. They go into the context's metadata.
        _pending: The texts that the next `sample` sends.
        _last_ids, _last_messages: The ids of the last turn, and a copy of `messages` then, which
            shows whether the loop has edited them since.
    """

    client: Any = None
    options_model = BasicLoopOptions
    # Harbor 0.23 does not know the last two fields. `model_construct` lets them pass.
    capabilities = AgentCapabilities.model_construct(
        atif=True, resume=True, skills=True, mcp_servers=True
    )
    # The default system message if max_turns > 1. {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with \
```bash: the blocks of a reply run as one script, and its exit code and output are the next \
message. Each script starts in a fresh shell (files stay, variables and directory do not) and has \
{seconds} seconds. When the task is done, reply without such a block."""

    async def _converse(self, environment: BaseEnvironment) -> StopReason | str:
        """Sample a reply, run its script, tell the model the script's output, and so on."""
        for _ in range(self.options.max_turns):
            try:
                turn = await self.sample()
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW
            if turn.cut_off:
                return StopReason.MAX_TOKENS
            blocks = self.bash_blocks(turn.content)
            if not blocks:
                return StopReason.COMPLETED
            if self.options.max_turns == 1:
                self.logger.warning("the reply holds commands; max_turns is 1, so none was run")
                return StopReason.COMPLETED
            self.tell(await self.execute(blocks, environment))
        return StopReason.MAX_TURNS

    def bash_blocks(self, reply: str) -> list[str]:
        """The bash blocks of a reply, which run as one script."""
        return [text for name, text in fenced_blocks(reply) if name in ("bash", "sh", "shell")]

    async def execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        """Run blocks as one script in the environment. Returns the text that the model gets."""
        seconds = self.options.command_timeout_sec
        return await run_script(blocks, environment, seconds, self.options.max_output_bytes)

    def tell(self, text: str | None) -> None:
        """Queue a text for the next `sample`. If the client sends token ids, special tokens in the
        text become plain text. (Behind a chat endpoint that is the server's part.)"""
        text = valid_text(text)
        if isinstance(self.client, TokenClient):
            # A zero-width space after its first character makes a special token plain text.
            text = self.client.special_tokens.sub("\\g<0>\u200b", text)
        self._pending.append(text)

    async def sample(self) -> Turn:
        """Send the queued texts, and record the reply as a turn. Once the client has answered,
        nothing is awaited until the reply is recorded. Raises RuntimeError if no text is queued, or
        the server gives no token ids; ContextLengthExceededError; and any error of the client."""
        if not self._pending:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        prompt = "\n\n".join(self._pending)
        request = {}
        if isinstance(self.client, TokenClient):
            # If the loop has edited `messages`, the ids do not fit them: render all anew.
            is_same = self.messages == self._last_messages
            request["previous_ids"] = self._last_ids if is_same else []
        # Chat adds the prompt and the reply (with its reasoning, if wanted) to its messages. It is
        # a new one for each call, so that `messages` stays as it is if the call fails.
        chat = Chat(self.client, interleaved_thinking=self.options.interleaved_thinking)
        chat.messages.extend(self.messages)
        reply = await chat.chat(prompt, **request)

        # A client of your own may return Harbor's LLMResponse.
        turn = reply if isinstance(reply, Turn) else Turn(**vars(reply))
        turn.prompt = prompt
        turn.timestamp = datetime.now(UTC).isoformat()
        thinking, turn.content = split_thinking(turn.content)
        turn.reasoning_content += thinking
        self.turns.append(turn)
        self._pending.clear()
        self.messages.extend(chat.messages[-2:])
        self.messages[-1]["content"] = turn.content
        self._last_messages = [dict(message) for message in self.messages]
        self._last_ids = turn.all_ids
        # This comes after the record, so that the files show the reply. A later turn without ids is
        # left out of the rollout, and counted (`n_turns_without_ids`).
        ids = (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        if self.options.collect_rollout_details and len(self.turns) == 1 and None in ids:
            raise RuntimeError("collect_rollout_details=true, but the server returned no token ids")
        return turn

    def __init__(
        self,
        *,
        model_name: str | None,
        model_path: str | None = None,
        renderer_name: str | None = None,
        max_tokens: int = 512,
        temperature: float | None = 1.0,
        max_turns: int = 1,
        system_prompt: str | None = None,
        model_client: Literal["tinker", "litellm", "vllm"] = "tinker",
        api_base: str | None = None,
        **kw: Any,
    ) -> None:
        """Create the agent of one trial. Raises ValueError for an unknown option or a bad value."""
        # extra_env has the variables of `--ae KEY=value`, such as API keys. Harbor must not see it:
        # from 0.16 on it would pass the keys on to each command in the container.
        self._agent_env = without_masked(kw.pop("extra_env", None))
        # Keys and URLs of servers are looked up here: first the agent's, then the process's.
        self._env = ChainMap(self._agent_env, os.environ)
        options = {
            "model_path": model_path,
            "renderer_name": renderer_name,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "max_turns": max_turns,
            "system_prompt": system_prompt,
            "model_client": model_client,
            "api_base": api_base,
        }
        # From 0.23 on Harbor parses the options, and sets `self.options`.
        super().__init__(model_name=model_name, **options, **kw)
        if not hasattr(self, "options"):
            # Earlier versions ignore unknown arguments. What is not Harbor's is an option.
            harbor_names = {*inspect.signature(BaseAgent).parameters, "override_setup_timeout_sec"}
            options |= {name: kw[name] for name in kw.keys() - harbor_names}
            self.options = self.options_model(**options)
        # Texts on the task's skills and MCP servers. `setup` makes them, `run` sends them.
        self._introduction: list[str] = []

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Check the options and Tinker's key. Harbor 0.23 and later calls this before any trial."""
        check_tinker_key(cls.parse_options(kwargs, env), ChainMap(without_masked(env), os.environ))

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build the model client, and list the task's skills and MCP servers for the model. Harbor
        does not count the seconds of imports here as the agent's time. Raises ValueError if the
        model has no name, or Tinker no key, and any error of the client."""
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        check_tinker_key(self.options, self._env)
        self.client = await self._shared_llm()
        if self.skills_dir:
            # Each skill's path, and the lines that hold its name and description; or the error.
            command = f"head -v -n 10 -- {shlex.quote(self.skills_dir)}/*/SKILL.md 2>&1"
            listed = await environment.exec(command, timeout_sec=60)
            self._introduction += ["Skills. Read a skill's file before you use it.", listed.stdout]
        for server in self.mcp_servers:
            self._introduction.append(f"MCP server: {server.model_dump_json(exclude_none=True)}")

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Start a new conversation, and go on as `resume` does. Raises what that raises."""
        self._system = valid_text(self.options.system_prompt)
        if self.options.system_prompt is None and self.options.max_turns > 1:
            self._system = self.protocol.replace("{seconds}", str(self.options.command_timeout_sec))
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._pending: list[str] = []
        self._last_ids: list[int] = []
        self._last_messages: list[dict] = []
        for text in self._introduction:
            self.tell(text)
        await self.resume(instruction, environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Continue the conversation of the last `run`: Harbor calls this for the later steps of a
        task. First the new turns are recorded, then any error of the client or the environment is
        raised. Raises OSError if the files cannot be written."""
        if not hasattr(self, "messages"):
            raise RuntimeError("`resume` continues a conversation: call `run` first")
        self.turns: list[Turn] = []
        self.metadata: dict[str, Any] = {}
        # Not by `tell`: the task's author may use special tokens on purpose.
        self._pending.append(valid_text(instruction))
        stop_reason = StopReason.ERROR
        try:
            async with asyncio.timeout(self.options.max_seconds) as timer:
                # If another trial found the client of `setup` broken, this is a new one.
                self.client = await self._shared_llm()
                stop_reason = await self._converse(environment)
        except (Exception, asyncio.CancelledError) as error:
            # The error's type does not tell why the run ended, because a client may turn a
            # cancellation into an error of its own. So check in this order: Harbor has cancelled
            # this task, `max_seconds` are over, or it is a real error.
            if asyncio.current_task().cancelling():
                stop_reason = StopReason.CANCELLED
                raise asyncio.CancelledError from error
            if timer.expired():
                # Return, so that Harbor scores the trial.
                stop_reason = StopReason.ROLLOUT_TIMEOUT
                return
            # The client may be broken: have the next trial build another, unless one has done so.
            if self._cache_entry.client is self.client:
                self._cache_entry.client = None
            if isinstance(error, TimeoutError | asyncio.CancelledError):
                # Harbor would take the first for the agent's timeout, the second for Ctrl-C.
                raise RuntimeError(f"a call timed out: {error!r}") from error
            raise
        finally:
            self._record(stop_reason, context)

    def _record(self, stop_reason: StopReason | str, context: AgentContext) -> None:
        context.n_input_tokens = sum(turn.usage.prompt_tokens for turn in self.turns)
        context.n_output_tokens = sum(turn.usage.completion_tokens for turn in self.turns)
        context.n_cache_tokens = sum(turn.usage.cache_tokens for turn in self.turns)
        # Harbor's clients give 0.0 for an unknown price.
        context.cost_usd = sum(turn.usage.cost_usd for turn in self.turns) or None
        # SkyRL and verl call the number of turns n_episodes.
        metadata = {**self.metadata, "stop_reason": stop_reason, "n_episodes": len(self.turns)}
        if self.options.collect_rollout_details:
            trainable = [turn for turn in self.turns if turn.is_trainable]
            context.rollout_details = rollout_details(trainable)
            metadata["n_turns_without_ids"] = len(self.turns) - len(trainable)
            metadata["n_prefix_breaks"] = 0
            for turn, later in itertools.pairwise(trainable):
                ids = turn.all_ids
                metadata["n_prefix_breaks"] += later.prompt_token_ids[: len(ids)] != ids
        # What JSON cannot hold becomes text: else Harbor could not save the result.
        text = json.dumps(metadata, default=str, ensure_ascii=False)
        context.metadata = json.loads(valid_text(text))
        # It is written even without a turn, because the last step's answer may still be there.
        write_file(self.logs_dir / "completion.txt", self.turns[-1].content if self.turns else "")
        trajectory = atif.Trajectory(
            # Without an option, the trial's name.
            session_id=self.options.session_id or self.logs_dir.parent.name,
            agent={"name": self.name(), "version": __version__, "model_name": self.model_name},
            steps=[{**step, "step_id": n} for n, step in enumerate(self._steps(), start=1)],
            extra=context.metadata,
        )
        with suppress(ImportError):
            # Else Harbor (0.24 and 0.25) reads the file, and a command may have put a pipe there.
            from harbor.utils.trajectory_utils import compute_model_usage

            context.model_usage = compute_model_usage(trajectory)
        write_file(self.logs_dir / "trajectory.json", trajectory.model_dump_json(exclude_none=True))

    def _steps(self) -> list[dict]:
        # This run as ATIF's steps, without numbers. The texts are those that were sent, and the one
        # that is queued. The first is the user's message, a later one what a turn observed.
        message, *observations = [turn.prompt for turn in self.turns] + ["\n\n".join(self._pending)]
        steps = [{"source": "system", "message": self._system}] if self._system else []
        steps.append({"source": "user", "message": message})
        for turn, observed in zip(self.turns, observations, strict=True):
            metrics = {
                "prompt_tokens": turn.usage.prompt_tokens,
                "completion_tokens": turn.usage.completion_tokens,
                "cached_tokens": turn.usage.cache_tokens,
                "cost_usd": turn.usage.cost_usd or None,
            }
            if self.options.collect_rollout_details:
                metrics["completion_token_ids"] = turn.completion_token_ids
                # JSON has no NaN.
                metrics["logprobs"] = turn.logprobs if turn.is_trainable else None
            step = {
                "source": "agent",
                "message": turn.content,
                "reasoning_content": turn.reasoning_content or None,
                "timestamp": turn.timestamp,
                "metrics": metrics,
            }
            if observed:
                step["observation"] = {"results": [{"content": observed}]}
            steps.append(step)
        return steps

    def _build_llm(self) -> Any:
        """Build the client. To use your own, return any Harbor `BaseLLM` whose content is text.

        This runs in a thread, because the imports take seconds. Raises any error of the client, and
        litellm's error for an unknown provider.
        """
        options, getenv = self.options, self._env.get
        # Harbor's LiteLLM modifies its arguments, so it gets a copy.
        arguments = copy.deepcopy(options.llm_kwargs)
        if options.model_client == "litellm":
            from litellm import get_llm_provider

            provider = get_llm_provider(self.model_name, arguments.get("custom_llm_provider"))[1]
            arguments["collect_rollout_details"] = options.collect_rollout_details
        else:
            provider = options.model_client
        # Such as OPENAI_BASE_URL and OPENAI_API_KEY.
        prefix = provider.upper()
        base = options.api_base or getenv(f"{prefix}_BASE_URL") or getenv(f"{prefix}_API_BASE")
        key = arguments.pop("api_key", None) or getenv(f"{prefix}_API_KEY")
        if base and provider in ("openai", "hosted_vllm", "vllm"):
            # A URL that ends in a port gets the /v1 of a local server. Such a server may need no
            # key, but the openai package insists on one.
            base = re.sub(r"(:\d+)/?$", r"\1/v1", base)
            key = key or "none"
        arguments |= {
            "model_name": self.model_name,
            "model_path": options.model_path,
            "renderer_name": options.renderer_name,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "context_limit": options.context_limit,
            "session_id": options.session_id,
            "api_base": base,
            # No blanks: a key from a file often ends in a newline, and HTTP errors show such a key.
            "api_key": key and "".join(str(key).split()),
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        make_client = {"tinker": TinkerClient, "vllm": VllmClient, "litellm": chat_client}
        return make_client[options.model_client](**given)

    def _cache_key(self) -> tuple:
        options, env = repr(self.options.model_dump()), frozenset(self._agent_env.items())
        return (type(self), self.model_name, options, env, _given_service)

    async def _shared_llm(self) -> Any:
        """The client: the first trial builds it, the others wait. If that fails, the next tries."""
        self._cache_entry = cache_entry(asyncio.get_running_loop(), self._cache_key())
        async with self._cache_entry.lock:
            if self._cache_entry.client is None:
                self._cache_entry.client = await asyncio.to_thread(self._build_llm)
            return self._cache_entry.client


# Harbor 0.20 to 0.22 looks for this flag. Later versions warn if the class body sets it.
BasicLoopAgent.SUPPORTS_RESUME = True


@dataclass
class CacheEntry:
    """A client, None until it is built, and the lock under which it is built."""

    lock: asyncio.Lock
    client: Any = None


# lru_cache is the cache: for the same event loop and key it returns the same entry.
@functools.lru_cache(maxsize=128)
def cache_entry(event_loop: asyncio.AbstractEventLoop, key: tuple) -> CacheEntry:
    """A new entry, for a `_cache_key` in the event loop to which its lock and client belong."""
    return CacheEntry(asyncio.Lock())


def without_masked(env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables without those that Harbor has masked in a saved job, as sk-r****456."""
    return {name: value for name, value in (env or {}).items() if "****" not in value}


class StopReason(StrEnum):
    """Why a run ended. Harbor does not score a trial that ended in ERROR or by Ctrl-C. It scores a
    multi-step trial with such a step, but `trial_to_trajectory` leaves that out."""

    # The reply holds no command, or max_turns is 1.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was cut off: at `max_tokens`, at the end of the context, or by the server.
    MAX_TOKENS = "max_tokens"
    # The conversation left no room in the context window for a reply.
    CONTEXT_OVERFLOW = "context_overflow"
    # `max_seconds` have passed; the call or script that was under way was stopped.
    ROLLOUT_TIMEOUT = "rollout_timeout"
    # Harbor cancelled the run: at the agent's timeout, or by Ctrl-C.
    CANCELLED = "cancelled"
    # An exception, which Harbor keeps as the exception_info of the trial or the step.
    ERROR = "error"


@dataclass
class Turn(LLMResponse):
    """One model call. The ids are exactly as sampled.

    Attributes:
        content: The reply's text. `sample` takes the thinking out of it.
        reasoning_content: The thinking.
        prompt: The text that was sent: the instruction, or a script's output.
        prompt_token_ids: One id per token of the whole prompt, or None.
        completion_token_ids: One id per sampled token, the stop token included, or None.
        logprobs: One natural logarithm per sampled token, or None. vLLM gives those of the raw
            model, before temperature and top_p, unless it has --logprobs-mode processed_logprobs.
        extra: Other JSON values of the client (Tinker: sequence_id; vLLM: routed_experts).
        cut_off: True if the reply is incomplete; nothing in it is run.
        timestamp: When the reply came, in ISO 8601.
    """

    content: str = ""
    prompt: str = ""
    cut_off: bool = False
    timestamp: str | None = None

    def __post_init__(self) -> None:
        self.content = valid_text(self.content)
        self.reasoning_content = valid_text(self.reasoning_content)
        self.extra = self.extra or {}
        # The client gave no usage: count the tokens.
        self.usage = self.usage or UsageInfo(
            prompt_tokens=len(self.prompt_token_ids or []),
            completion_tokens=len(self.completion_token_ids or []),
            cache_tokens=0,
            cost_usd=0.0,
        )

    @property
    def all_ids(self) -> list[int]:
        """The ids of the prompt and the completion: the next exact prompt begins with them."""
        return (self.prompt_token_ids or []) + (self.completion_token_ids or [])

    @property
    def is_trainable(self) -> bool:
        """True if every sampled token has a finite logprob."""
        ids, logprobs = self.completion_token_ids, self.logprobs or []
        # vLLM writes -9999.0 for a logprob that it does not have. NaN fails any comparison.
        is_finite = all(x is not None and -9999.0 < x < math.inf for x in logprobs)
        is_aligned = ids is not None and len(ids) == len(logprobs)
        return bool(self.prompt_token_ids) and is_aligned and is_finite


# The tag that opens thinking, and the one that closes it. gpt-oss and Inkling have headers in place
# of tags. All that they write before the header of the answer is thinking:
#
#     <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
THINKING_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>": "<|channel|>final<|message|>",
    "<|message_model|>": "<|message_model|><|content_text|>",
}
_OPENING = "|".join(map(re.escape, THINKING_TAGS))
_CLOSING = "|".join(map(re.escape, THINKING_TAGS.values()))


def split_thinking(text: str) -> tuple[str, str]:
    """Split a reply into thinking and answer: thinking is taken off the front.

    It ends at its closing tag, or at the end of the text. A lone closing tag is dropped.
    """
    thinking = ""
    # Closing tags come first, because some begin with an opening tag.
    while tag := re.match(rf"\s*(?:({_CLOSING})|({_OPENING}))", text):
        text = text[tag.end() :]
        opening = tag[2]
        if opening:
            thought, _, text = text.partition(THINKING_TAGS[opening])
            thinking += thought
        text = text.lstrip()
    return thinking, text


def with_opening_tag(text: str) -> str:
    """Put back the opening tag, if the template of a chat endpoint has written it into the prompt.

    The reply then has a closing tag only. A closing tag in code (a ``` block, or `...`) is text: a
    command that writes </think> must not turn the reply into thinking.
    """
    without_code = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", text)
    before_opening = re.split(_OPENING, without_code)[0]
    for opening, closing in THINKING_TAGS.items():
        if closing in before_opening:
            return opening + text
    return text


class TokenClient(ABC):
    """A client that sends exact prompts, as token ids. The limits count tokens."""

    context_limit: float
    max_tokens: int
    # Matches the first character of each special token in a text.
    special_tokens: re.Pattern[str]
    # `next_prompt` explains its probes. This is what they begin with, up to the probe's reply.
    _probe_start: list[int] | None = None

    @abstractmethod
    async def render(self, messages: list[dict]) -> tuple[list[int], str]:
        """Render messages with the chat template, ready for a reply. Returns the ids, and the text
        of the last few ids, which shows whether the template has opened thinking."""

    @abstractmethod
    async def generate(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        """Sample a reply to a prompt. Raises any error of the server."""

    async def call(
        self,
        prompt: str,
        message_history: list[dict],
        previous_ids: list[int] | None = None,
        **others: Any,
    ) -> Turn:
        """Sample a reply to `prompt`, as Harbor's Chat asks for it. `previous_ids` are the history
        as sampled; without them it is rendered. (`others` are not used.) Raises
        ContextLengthExceededError, and any error of the server."""
        messages = [*message_history, {"role": "user", "content": prompt}]
        prompt_ids, prompt_end = await self.next_prompt(messages, previous_ids or [])
        room = self.context_limit - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceededError(f"the prompt fills the context: {len(prompt_ids)}")
        try:
            turn = await self.generate(prompt_ids, min(self.max_tokens, room))
        except Exception as error:
            if says_context_is_full(error):
                raise ContextLengthExceededError(str(error)) from error
            raise
        # If the template opened thinking, the reply begins inside it.
        opened = re.search(rf"({_OPENING})\s*\Z", prompt_end)
        if opened:
            turn.content = opened[1] + turn.content
        return turn

    async def next_prompt(
        self, messages: list[dict], previous_ids: list[int]
    ) -> tuple[list[int], str]:
        """The prompt for the next reply: the previous ids, and what the template puts after them.

        Earlier turns are not rendered again, because their ids must stay as they were sampled. What
        the template puts after a reply is called the tail: the stop token, the new message, and the
        header of the next reply. It is found in three steps:

        1. Render a short conversation that ends in the new message, called the probe:

            <|im_start|> user a <|im_end|> <|im_start|> assistant b
            <|im_end|> <|im_start|> user NEW <|im_end|> <|im_start|> assistant

        2. The tail begins after the reply "b", where a probe with "c" differs first. The ids up to
           there are kept, and this step is left out while later probes begin with them. (With
           another date, or an edited system message, they do not.)
        3. Drop the stop token from the tail, because the sampled reply ends in it already.

        Without previous ids (in the first turn, or after an edit), or if the reply does not end in
        the template's stop token, the whole history is rendered.
        """
        if not previous_ids:
            return await self.render(messages)
        start = [{"role": "user", "content": "a"}]
        if messages[0]["role"] == "system":
            # The tail may depend on it: SmolLM3's system message turns thinking off.
            start.insert(0, messages[0])
        new = messages[-1]
        ids, prompt_end = await self.render([*start, {"role": "assistant", "content": "b"}, new])
        probe_start = self._probe_start
        if probe_start is None or ids[: len(probe_start)] != probe_start:
            other, _ = await self.render([*start, {"role": "assistant", "content": "c"}, new])
            differs = [x != y for x, y in zip(ids, other, strict=False)] + [True]
            probe_start = self._probe_start = ids[: differs.index(True) + 1]
        tail = ids[len(probe_start) :]
        # The reply already ends in the stop token (Inkling: in two), so the tail goes without it.
        for n_stop in (1, 2):
            if previous_ids[-n_stop:] == tail[:n_stop]:
                return previous_ids + tail[n_stop:], prompt_end
        return await self.render(messages)


def says_context_is_full(error: Exception) -> bool:
    """True if the error says that the prompt is too long; the phrases are Harbor's. The message of
    a timeout has such a phrase, too, so the status has to fit (Tinker: the category)."""
    is_user_error = str(getattr(error, "category", "")) == "user"
    is_bad_request = getattr(error, "status_code", None) in (400, 413, 422)
    phrases = "(?i)context length|context_length|maximum context|token limit|too long"
    return (is_user_error or is_bad_request) and bool(re.search(phrases, str(error)))


# The Tinker clients of a process share these services, by server and key. Each service has a
# session with Tinker, and about 11 file descriptors.
_services: dict[tuple, Any] = {}
_services_lock = threading.Lock()
# The service of `use_service`, which all trials use in their place.
_given_service: Any = None
# Clients are built in threads, and a process may run several event loops. All share a tokenizer,
# which raises "Already borrowed" if two threads use it at once. The lock is held for milliseconds.
_tokenizer_lock = threading.Lock()


def use_service(service: Any) -> None:
    """Use this `tinker.ServiceClient` for later trials, such as a trainer's: some losses need that
    sampling and training share a session. None restores the agent's own service."""
    global _given_service
    _given_service = service


def check_tinker_key(options: BasicLoopOptions, env: Mapping[str, str]) -> None:
    """Raise ValueError if the client is Tinker and its SDK would find no key."""
    key = options.llm_kwargs.get("api_key") or env.get("TINKER_API_KEY")
    if options.model_client != "tinker" or key or _given_service:
        return
    # SDK 0.38 and later may also find a stored key, or run a command that prints one.
    with suppress(ImportError):
        from tinker.auth import tinker_has_credentials

        if tinker_has_credentials():
            return
    raise ValueError("no API key for Tinker: set TINKER_API_KEY, or choose another model_client")


def open_checkpoint(client_args: dict, api_base: str | None, api_key: str | None) -> Any:
    """Open a checkpoint in the process's service, or in a new one if its session has ended. Tinker
    gives the same error for that and for a missing checkpoint. If a new session gives it, too, the
    checkpoint is missing, and the error is raised. `client_args` are those of
    `create_sampling_client`. If URL or key are None, the SDK finds its own."""
    import tinker

    def open_in(service: Any) -> Any:
        created = service.create_sampling_client(**client_args)
        # SDK 0.38 and later give a future.
        return created.result() if hasattr(created, "result") else created

    if _given_service:
        return open_in(_given_service)
    server = (api_base, api_key)
    with _services_lock:
        if server in _services:
            # After an error, go on below.
            with suppress(tinker.TinkerError):
                return open_in(_services[server])
        service = tinker.ServiceClient(base_url=api_base, api_key=api_key)
        sampling_client = open_in(service)
        _services[server] = service
        return sampling_client


class TinkerClient(TokenClient):
    """Tinker, by tinker-cookbook's renderer. Harbor's TinkerLLM reports a cut-off reply as complete
    (0.13 to 0.24) or drops its ids (0.25), and opens a session for each checkpoint."""

    def __init__(
        self,
        *,
        model_name: str,
        max_tokens: int,
        model_path: str | None = None,
        renderer_name: str | None = None,
        context_limit: int = 32_000,
        api_base: str | None = None,
        api_key: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        **client_args: Any,
    ) -> None:
        # `create_sampling_client` gets the rest, and raises a TypeError for what it does not know.
        import tinker
        from tinker_cookbook.model_info import get_recommended_renderer_name
        from tinker_cookbook.renderers import get_renderer
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        name = renderer_name or get_recommended_renderer_name(model_name)
        self._tokenizer = get_tokenizer(model_name)
        with _tokenizer_lock:
            self._renderer = get_renderer(name, self._tokenizer)
            # A list of token ids, or of texts: the renderer role_colon has one text.
            stop = self._renderer.get_stop_sequences()
            self._endings = [s if isinstance(s, str) else self._tokenizer.decode([s]) for s in stop]
            # Inkling's tokenizer has no such method, and turns no text into a special token.
            has_vocabulary = hasattr(self._tokenizer, "get_added_vocab")
            vocabulary = self._tokenizer.get_added_vocab() if has_vocabulary else {}
        # Base models may stop at this token. Inkling ends each message with <|end_message|>.
        self._endings += [self._tokenizer.eos_token or "", "<|end_message|>"]
        # Single characters and runs of blanks, which some vocabularies add, are in ordinary text.
        tokens = [re.escape(token) for token in vocabulary if len(token.strip()) > 1]
        # Without tokens: (?!), which never matches.
        self.special_tokens = re.compile(f"(?={'|'.join(tokens) or '(?!)'}).")
        self.context_limit = context_limit
        self.max_tokens = max_tokens
        self._params = tinker.SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        client_args |= {"model_path": model_path} if model_path else {"base_model": model_name}
        self._sampling_client = open_checkpoint(client_args, api_base, api_key)

    async def render(self, messages: list[dict]) -> tuple[list[int], str]:
        with _tokenizer_lock:
            ids = self._renderer.build_generation_prompt(messages).to_ints()
            return ids, self._tokenizer.decode(ids[-8:])

    async def generate(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        import tinker

        # Pydantic's validation would look at each token of a long prompt.
        chunk = tinker.EncodedTextChunk.model_construct(tokens=prompt_ids)
        response = self._sampling_client.sample(
            prompt=tinker.ModelInput(chunks=[chunk]),
            num_samples=1,
            sampling_params=self._params.model_copy(update={"max_tokens": max_tokens}),
        )
        if not inspect.isawaitable(response):
            # SDKs before 0.38 give a concurrent.futures.Future.
            response = asyncio.wrap_future(response)
        response = await response
        sequence = response.sequences[0]
        ids = list(sequence.tokens)
        with _tokenizer_lock:
            text = self._tokenizer.decode(ids)
        for ending in self._endings:
            text = text.removesuffix(ending)
        turn = Turn(
            content=text,
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            logprobs=list(sequence.logprobs or []),
            cut_off=sequence.stop_reason != "stop",
            # SDK 0.26 and later.
            extra={"sequence_id": getattr(sequence, "sequence_id", None)},
        )
        turn.usage.cache_tokens = response.prompt_cache_hit_tokens or 0
        return turn


# vLLM does not say which tokens are special, so their shapes are listed. Add those of your model.
SPECIAL_SHAPES = re.compile(
    r"""(?x)(?=
      <[|\uFF5C][^<>\s]{1,99}> | <[^<>\s]{1,99}[|\uFF5C]>  # in bars, or full-width bars
    | </?(?:s|pad|unk|mask|cls|sep|bos|eos|sop|eop|think|img|image)>
    | </?(?:arg|end|extra|fim|file|image|jupyter|repo|reserved|start|tool|SPECIAL)_\w+>
    | <unused\d+> | <filename> | \[\|\w+\|\] | \[@\w+@\]
    | </?(?:seed|minimax):\w+>
    | \[/?(?:INST|THINK|IMG|IMG_BREAK|IMG_END|ARGS|CALL_ID|SYSTEM_PROMPT|MODEL_SETTINGS|PREFIX
        |MIDDLE|SUFFIX|AUDIO|BEGIN_AUDIO|TOOL_\w+|AVAILABLE_TOOLS|BOS|EOS|PAD|UNK|[gs]?MASK)\]
    | \]~!?b[\[\]] | \[e~\[  # MiniMax
    )."""
)
# The finish reasons of complete replies. After another one (length, abort, ...) nothing is run. If
# this agent warns of "finish reason 'x'" where a reply is complete, add x here.
END_REASONS = {"stop", "stop_sequence", "end_turn", "eos", "eos_token", "complete", "completed"}


class VllmClient(TokenClient):
    """vLLM by token ids: /tokenize renders, /v1/completions samples (tested with 0.32). Arguments
    that `__init__` does not name go into each request for a completion."""

    special_tokens = SPECIAL_SHAPES

    def __init__(
        self,
        *,
        model_name: str,
        max_tokens: int,
        api_base: str,
        api_key: str,
        context_limit: float = math.inf,
        timeout: float = 600,
        max_retries: int = 5,
        extra_headers: dict | None = None,
        extra_body: dict | None = None,
        **body: Any,
    ) -> None:
        from openai import AsyncOpenAI

        self.context_limit = context_limit
        self.max_tokens = max_tokens
        self._body = body | (extra_body or {})
        # Without the prefix that litellm's names have.
        self._body["model"] = re.sub("^(openai|hosted_vllm)/", "", model_name)
        self._template_kwargs = self._body.pop("chat_template_kwargs", {})
        # It is never closed, because Harbor does not say when a job ends.
        http = AsyncOpenAI(
            # /tokenize is not under /v1.
            base_url=api_base.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=extra_headers,
        )
        # cast_to=object: an answer is plain JSON.
        self._post = functools.partial(http.post, cast_to=object)

    async def render(self, messages: list[dict]) -> tuple[list[int], str]:
        from openai import NotFoundError

        body = {
            "model": self._body["model"],
            "messages": messages,
            "add_generation_prompt": True,
            "chat_template_kwargs": self._template_kwargs,
            "return_token_strs": True,
        }
        try:
            answer = await self._post("/tokenize", body=body)
            self.context_limit = min(self.context_limit, answer["max_model_len"])
            end = "".join(answer["token_strs"][-8:])
        except (NotFoundError, KeyError, TypeError) as error:
            message = (
                f"no /tokenize as vLLM's, or no such model: use model_client=litellm ({error})"
            )
            raise RuntimeError(message) from error
        # In token strings, newlines and blanks have other characters.
        return answer["tokens"], re.sub("Ċ|Ġ|▁|<0x0A>", " ", end)

    async def generate(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        body = {
            **self._body,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            # 0 means the log-probability of the sampled token alone.
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = await self._post("/v1/completions", body=body)
        reply = answer["choices"][0]
        turn = Turn(
            content=reply.pop("text"),
            prompt_token_ids=reply.pop("prompt_token_ids", None) or prompt_ids,
            completion_token_ids=reply.pop("token_ids", None),
            logprobs=(reply.pop("logprobs", None) or {}).get("token_logprobs"),
            cut_off=reply.pop("finish_reason") not in END_REASONS,
            # The rest, such as routed_experts.
            extra=reply,
        )
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        turn.usage.cache_tokens = details.get("cached_tokens") or 0
        return turn


def chat_client(*, context_limit: int | None = None, **arguments: Any) -> Any:
    """Make a LiteLLM of Harbor's that also returns replies which were cut off, and has no limit.

    For the finish reason "length" LiteLLM raises an error, which has neither ids nor usage. So it
    must not see that reason:

    1. `call` makes a copy of the client, which keeps the reason of this call.
    2. LiteLLM calls `_extract_usage_info` (private; Harbor 0.13 to 0.25) just before it looks at
       the reason. Here that keeps the reason, and writes "stop" in its place.
    3. `call` looks at the reason that was kept.
    """
    # Importing LiteLLM takes seconds, so the class is defined in here.
    from harbor.llms.lite_llm import LiteLLM

    class ChatClient(LiteLLM):
        finish_reason: str | None = "stop"

        async def call(self, prompt: str, **request: Any) -> Turn:
            this_call = copy.copy(self)
            response = await LiteLLM.call(this_call, prompt, **request)
            reason = str(this_call.finish_reason).lower()
            turn = Turn(**vars(response), cut_off=reason not in END_REASONS)
            if turn.cut_off and reason != "length":
                self._logger.warning(f"finish reason {reason!r}: the reply counts as cut off")
            if not turn.reasoning_content:
                turn.content = with_opening_tag(turn.content)
            return turn

        def _extract_usage_info(self, response: Any) -> UsageInfo | None:
            choice = response["choices"][0]
            # litellm replaces an unknown finish reason by "stop", and keeps the original here.
            fields = getattr(choice, "provider_specific_fields", None) or {}
            self.finish_reason = fields.get("native_finish_reason") or choice["finish_reason"]
            choice["finish_reason"] = "stop"
            return super()._extract_usage_info(response)

    return ChatClient(**arguments)


@dataclass(frozen=True)
class Trajectory:
    """A trial as a trainer sees it. (ATIF's trajectory is a conversation for people to read.)

    Attributes:
        turns: The trainable turns of all steps: ids, logprobs and `extra`, but no text.
        reward: The reward named "reward", or else the only one. None if there is no such reward.
        stop_reason: The `StopReason` of the last step; None for another agent's trial.
        trial: Harbor's result, with all rewards, tokens, cost and names.
    """

    turns: list[Turn]
    reward: float | None
    stop_reason: str | None
    trial: TrialResult


# The lists of a RolloutDetail with one entry per turn. `Turn` has attributes of the same names.
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`. None for
    a trial that failed, that has a step which ended in ERROR, or that has neither a reward nor a
    trainable turn. If there is a reward, Harbor 0.25 and later says itself whether it is valid.
    Raises ValueError if ids and logprobs do not align, or a number is not finite."""
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    turns = [turn for context in contexts for turn in turns_of(context)]
    stop_reasons = [(context.metadata or {}).get("stop_reason") for context in contexts]
    rewards = getattr(trial.verifier_result, "rewards", None) or {}
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"trial {trial.trial_name}: a reward is not a finite number: {rewards}")
    errors = [part.exception_info for part in (trial, *steps) if part.exception_info]
    # These exceptions are no failures: Harbor scores the trial after them.
    scored = ("AgentTimeoutError", "NonZeroAgentExitCodeError")
    is_valid = all(error.exception_type in scored for error in errors)
    if rewards:
        is_valid = getattr(trial, "reward_valid", is_valid)
    if not is_valid or StopReason.ERROR in stop_reasons or not (rewards or turns):
        return None
    reward = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    return Trajectory(turns, reward, stop_reasons[-1], trial)


# The users of earlier versions import it by this name.
_trial_to_trajectory = trial_to_trajectory


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, in a list, with an entry for each of these trainable turns. (Others
    are left out whole, so that all lists stay aligned.) None if there are none."""
    detail = {name: [getattr(turn, name) or [] for turn in turns] for name in _TOKEN_FIELDS}
    names = {name for turn in turns for name in turn.extra}
    detail["extra"] = {name: [turn.extra.get(name) for turn in turns] for name in names}
    return [detail] if turns else None


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The trainable turns of a run. Raises ValueError if the lists do not align."""
    for detail in context.rollout_details or []:
        columns = [detail.get(name) or [] for name in _TOKEN_FIELDS]
        extra = detail.get("extra") or {}
        for n, (prompt_ids, completion_ids, logprobs) in enumerate(zip(*columns, strict=True)):
            turn = Turn(
                prompt_token_ids=prompt_ids,
                completion_token_ids=completion_ids,
                logprobs=logprobs,
                extra={name: values[n] for name, values in extra.items()},
            )
            if not turn.is_trainable:
                raise ValueError("ids and logprobs differ in length, or a logprob is not finite")
            yield turn


def write_file(path: Path, text: str) -> None:
    """Write a file without opening what is there: with Docker the folder is /logs/agent in the
    container, and a command may have left a link or a pipe. A file with a random name is written,
    and gets this name. Raises OSError, for instance if a command left a folder there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def valid_text(text: str | None) -> str:
    """Text that tokenizers and files accept: a lone surrogate becomes "?", None becomes ""."""
    return (text or "").encode("utf-8", "replace").decode()


# With the rule "list" a list item may hold a block. With "code" an indented fence is no fence.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "code"]).disable("inline")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The ``` blocks of a Markdown text, as (language in lower case, content without NULs). A block
    that is not closed, or that stands inside another one or inside ~~~, does not count."""
    blocks = []
    # The parser recognises a closing fence only if a newline follows, so one is added.
    for token in _MARKDOWN.parse(text.replace("\0", "") + "\n"):
        if token.markup.startswith("`"):
            n_lines = token.map[1] - token.map[0]
            # A closed block has two more lines than its content: its fences.
            if n_lines == token.content.count("\n") + 2:
                language = "".join(token.info.lower().split()[:1])
                blocks.append((language, token.content))
    return blocks


# A script that writes more is killed, because Harbor keeps all output of an exec in memory.
FLOOD_BYTES = 4_000_000
# Three limits end a script. All count from its start:
#
#     seconds       `timeout` kills it; the model sees the output so far
#     seconds + 30  the agent stops waiting, and kills it by another exec
#     seconds + 90  exec gives up, with Docker by a RuntimeError, which would end the run
ANSWER_MARGIN_SEC = 30
EXEC_MARGIN_SEC = 90
# The time limit of killing a script from outside.
KILL_SEC = 15

# This bash program runs a script: `bash PROGRAM SECONDS FLOOD_BYTES N_BLOCKS`. It prints
#
#     :MARK:<base64 of the output, followed by "end-of-MARK CODE SECONDS" and a newline>
#
# - Base64, because some environments change what a command prints.
# - These words mark the end, because a server in the background may keep the pipe open. It may
#   still write there, so they need not begin a line.
# - MARK is random hex. All processes of the script have it in their environment, where
#   `kill_script` finds them. (So a script can forge these words. It deceives its own model only.)
# - Program and script are in variables. As arguments they could match a `pkill -f` in the script.
# - No file is written, because a container's disk may be full or read-only.
# - The image needs bash 4.4, coreutils, sed and grep.
_SHELL = r"""
# bash reports killed processes on stderr, and the model would see that.
exec 2>/dev/null
# The blocks come in one base64, with a NUL after each. (lastpipe: mapfile runs in this shell.)
shopt -s lastpipe
printf %s "$BASIC_LOOP_BLOCKS" | base64 -d | mapfile -d "" -t blocks
[ "${#blocks[@]}" = "$3" ] || { echo "not run: it needs bash 4.4 and base64"; exit 127; }
# An empty line after each block keeps a trailing backslash from joining two blocks.
printf -v BASIC_LOOP_TEXT "%s\n\n" "${blocks[@]}"
# A block that ends inside a quote, a here-document or a command would swallow the next block. After
# `set -n` bash parses a block and does not run it, and reports such a block in these phrases.
for block in "${blocks[@]}"; do
  case $(LC_ALL=C; eval "set -n; $block" 2>&1) in
    *"unexpected EOF"* | *"unexpected end of file"* | *"delimited by end-of-file"*)
      BASIC_LOOP_TEXT="echo '[nothing was run: a block is unfinished]'; exit 2" ;;
  esac
done
unset BASIC_LOOP_BLOCKS BASIC_LOOP_PROGRAM
export BASIC_LOOP_TEXT
printf ":%s:" "$BASIC_LOOP_MARK"
# fd 5 is a pipe: the script writes to it, and then printf writes the end. (bash expands the whole
# argument of eval, with the script, before `unset` runs: the script does not see itself.)
exec 5< <(
  timeout -s KILL "$1" bash -c 'eval "unset BASIC_LOOP_TEXT; $BASIC_LOOP_TEXT"' </dev/null 2>&1
  printf "end-of-%s %s %s\n" "$BASIC_LOOP_MARK" "$?" "$SECONDS"
)
# sed ends at these words, even if a server still has the pipe open. head ends a flood. "[e]nd"
# does not match itself: a script may print sed's arguments, by `ps`. The ulimit is for a line that
# does not end, which sed would keep in memory.
(ulimit -d 300000; exec sed "/[e]nd-of-$BASIC_LOOP_MARK/q") <&5 | head -c "$2" | base64
# A server that still has the pipe open would block when the pipe is full, so cat reads on. (`read`
# returns 1 at the end of a pipe that nobody has open.)
read -r -t 0.1 -N 1 <&5
if [ $? != 1 ]; then
  cat <&5 >/dev/null &
fi
"""


async def run_script(
    blocks: list[str], environment: BaseEnvironment, seconds: int, shown_bytes: int
) -> str:
    """Run blocks as one script with a time limit in seconds. Returns the text that the model gets,
    with at most `shown_bytes` of the output. Raises any error of the environment's `exec` but a
    TimeoutError, which is exit code 124."""
    mark = uuid4().hex
    encoded = base64.b64encode("".join(f"{block}\0" for block in blocks).encode()).decode()
    command = (
        f"BASIC_LOOP_MARK={mark} BASIC_LOOP_BLOCKS={encoded} "
        f"BASIC_LOOP_PROGRAM={shlex.quote(_SHELL)} "
        f"exec bash -c 'eval \"$BASIC_LOOP_PROGRAM\"' bash {seconds} {FLOOD_BYTES} {len(blocks)}"
    )
    # Modal takes 65,536 bytes of arguments.
    if len(command) > 65_000:
        return "Not run: the script is too long. Split it into smaller ones."
    try:
        async with asyncio.timeout(seconds + ANSWER_MARGIN_SEC) as timer:
            result = await environment.exec(command, timeout_sec=seconds + EXEC_MARGIN_SEC)
    except BaseException as error:
        # The script may still be running. Kill it before the next turn or the verifier.
        await kill_script(mark, environment)
        # If the run was cancelled, exec may have raised an error of its own instead.
        if asyncio.current_task().cancelling():
            raise asyncio.CancelledError from error
        if timer.expired() or isinstance(error, TimeoutError):
            return f"Exit code: 124\nOutput:\n[no answer; the time limit is {seconds} seconds]"
        raise
    code, output, note = parse_output(result, mark, seconds)
    if note:
        await kill_script(mark, environment)
    shown = middle_cut(output, shown_bytes).removesuffix("\n")
    texts = [text for text in (shown, note) if text] or ["(none)"]
    return "\n".join([f"Exit code: {code}", "Output:", *texts])


async def kill_script(mark: str, environment: BaseEnvironment) -> None:
    """Kill a script and what runs it by another exec, which a second cancellation does not end."""
    # Kill each process that has the mark in its environment, and its process group.
    command = (
        f"for pid in $(grep -ls BASIC_LOOP_MARK={mark} /proc/[0-9]*/environ | cut -d / -f 3); do "
        "kill -9 $pid -$pid; done 2>/dev/null"
    )
    # The environment may be gone.
    with suppress(Exception):
        exec_call = environment.exec(command, timeout_sec=KILL_SEC + EXEC_MARGIN_SEC)
        await asyncio.shield(asyncio.wait_for(exec_call, KILL_SEC))


def parse_output(result: ExecResult, mark: str, seconds: int) -> tuple[str, bytes, str]:
    """The exit code, the output and a note from what the bash program printed. With a note, a part
    of the script may still be running."""
    before, found, encoded = valid_text(result.stdout).partition(f":{mark}:")
    if not found:
        # The program did not get as far as the mark. What was printed says why.
        return str(result.return_code), (before + valid_text(result.stderr)).encode(), ""
    decoded = b""
    with suppress(ValueError):
        decoded = base64.b64decode(encoded)
    complete = re.fullmatch(rb"(?s)(.*)end-of-%b (\d+) (\d+)\n" % mark.encode(), decoded)
    if not complete:
        note = f"[the output is cut: more than {FLOOD_BYTES} bytes, or its reader was killed]"
        return "137", decoded, note
    output, code, n_seconds = complete.groups()
    # `timeout -s KILL` gives 137, as other kills do.
    if code == b"137" and int(n_seconds) >= seconds:
        return "124", output, f"[ended: the time limit of {seconds} seconds was reached]"
    return code.decode(), output, ""


def middle_cut(output: bytes, shown_bytes: int) -> str:
    """Cut the middle out of long output, and say how many bytes are left out."""
    n_left_out = len(output) - shown_bytes
    if n_left_out > 0:
        half = shown_bytes // 2
        end = output[half + n_left_out :]
        output = b"%b\n[... %d bytes left out ...]\n%b" % (output[:half], n_left_out, end)
    return output.decode("utf-8", "replace")
