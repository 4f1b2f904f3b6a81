# SPDX-License-Identifier: Apache-2.0
"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://...

The agent samples from one model in one conversation, and runs one script per turn. It does not
compact long conversations, call tools natively or run commands in parallel. To add such a thing,
change the loop: `BasicLoopAgent._converse`.

Words that the file uses from the start:

- trial: one attempt at a task.
- run: the work on one instruction. A multi-step task has a run for each step, any other has one.
- turn: one model call and its reply (class `Turn`).
- stop reason: why a run ended (class `StopReason`).
- rollout: the token ids and log-probabilities of a run's turns.
- exact prompt: a prompt whose token ids begin with the previous turn's prompt and completion ids.
  A later prompt that does not begin with them breaks the prefix.
- client: the object that calls the model. `TinkerClient` and `VllmClient` send exact prompts; their
  base is `ExactClient`. `chat_client` makes Harbor's LiteLLM, which sends messages with litellm.
- Chat: Harbor's class with the list of messages. A call appends the prompt and the reply to it.
- conversation: the messages of a trial, and the turns of its current run (class `Conversation`).
- to break a special token: to put a zero-width space into its text, so that it becomes plain text.
- lone surrogate: half of a UTF-16 character, as broken JSON gives it. Files cannot hold it.
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
import logging
import math
import os
import re
import shlex
import threading
import weakref
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit
from uuid import uuid4

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import ContextLengthExceededError, LLMResponse, OutputLengthExceededError
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

    HARBOR_PARSES_OPTIONS = True
except ImportError:
    # Harbor before 0.23 has neither class, and the agent parses its options itself.
    class AgentOptions(BaseModel):
        """Stands in for both classes."""

    AgentCapabilities = AgentOptions
    HARBOR_PARSES_OPTIONS = False

__version__ = "0.8.2"


class BasicLoopOptions(
    AgentOptions,
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,  # `--ak session_id=7` arrives as a number.
    hide_input_in_errors=True,
    use_attribute_docstrings=True,
):
    """The options of `--ak key=value`. The first eight are also parameters of `BasicLoopAgent`."""

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
    """System message, verbatim; default: an explanation of bash blocks if max_turns > 1. "" sends
    none; the instruction must then explain the blocks."""
    model_client: Literal["tinker", "litellm"] = "tinker"
    """tinker, or litellm for API models and servers."""
    api_base: str | None = None
    """Base URL of the model's server; default: the client's. /v1 is added to http://host:port."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends and the trial is scored."""
    # It may hold an API key, so it appears in no error and in no repr.
    llm_kwargs: dict = Field({}, repr=False)
    """More arguments for the client: top_p, seed, ..."""
    collect_rollout_details: bool | None = None
    """Record token ids; default: true for tinker. For a vLLM server, true also selects the client
    that sends exact prompts."""
    context_limit: PositiveInt | None = None
    """Maximum tokens of a conversation; default: the server's, or 32,000 for tinker."""
    rerender_history: bool = False
    """Tinker, vLLM: render the whole history in each turn. Prompts are then not exact."""
    interleaved_thinking: bool = False
    """Chat endpoints: send earlier reasoning back, as reasoning_content."""
    session_id: str | None = None
    """litellm: the X-Session-ID of each request, for routers; default: the trial's id."""
    command_timeout_sec: PositiveInt = Field(120, le=7 * 24 * 3600)
    """Time limit of a script in seconds; at most a week."""
    max_output_bytes: PositiveInt = 10_000
    """Maximum bytes of a script's output that the model sees."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_tinker = self.model_client == "tinker"
        if self.collect_rollout_details is None:
            self.collect_rollout_details = is_tinker
        # llm_kwargs must not repeat an option that this class adds. It may repeat a field of
        # AgentOptions, because a client may have an argument of that name.
        own_options = type(self).model_fields.keys() - AgentOptions.model_fields.keys()
        duplicates = self.llm_kwargs.keys() & (own_options | {"model_name"})
        if duplicates:
            raise ValueError(f"llm_kwargs holds {', '.join(duplicates)}: use the option instead")
        if not is_tinker and (self.model_path or self.renderer_name):
            raise ValueError("model_path and renderer_name are for model_client=tinker: drop them")
        if is_tinker and not importlib.util.find_spec("tinker_cookbook"):
            raise ValueError(
                "the Tinker packages are missing: `pip install 'harbor[tinker]'` (in a clone: "
                "`uv sync --no-dev --extra tinker`), or set model_client=litellm"
            )
        return self


# The cache: one client per event loop and configuration, built once per job and shared by its
# trials. The first trial builds it in `setup`, under the lock, and the others wait for the lock. If
# that fails, those that waited raise the same error, and a later trial tries again. So a value is
# a client, or the error of building it.
_clients: dict[tuple, Any] = {}
_locks: dict[tuple, asyncio.Lock] = {}
# Training adds a client for each checkpoint. Above this number the oldest one leaves the cache.
MAX_CLIENTS = 128


async def shared_client(agent: BasicLoopAgent) -> Any:
    """The client of this agent's configuration. Raises any error of building it."""
    key = (asyncio.get_running_loop(), agent._cache_key())
    lock = _locks.setdefault(key, asyncio.Lock())
    has_waited = lock.locked()
    async with lock:
        client = _clients.get(key)
        failed = isinstance(client, Exception)
        # A trial that has waited shares the error that it finds. Any other builds the client anew.
        if client is None or (failed and not has_waited):
            client = await agent._client_or_error()
            _clients[key] = client
            for oldest in list(_clients)[:-MAX_CLIENTS]:
                # An event loop in another thread may have removed it.
                _clients.pop(oldest, None)
                _locks.pop(oldest, None)
    if isinstance(client, Exception):
        # The error stays in the cache. Its old traceback would keep those that raised it in memory.
        raise client.with_traceback(None)
    return client


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies, and records each turn.

    After a run the context holds the token counts, cost_usd (None if unknown), `metadata` and the
    rollout (see `rollout_details`). `logs_dir` holds completion.txt, which is the last answer, and
    trajectory.json, in Harbor's format ATIF.
    """

    options_model = BasicLoopOptions
    # Harbor 0.23 does not know the last two fields: they would not pass validation.
    capabilities = AgentCapabilities.model_construct(
        atif=True, resume=True, skills=True, mcp_servers=True
    )

    # The default system message if max_turns > 1. {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with \
```bash: the blocks of a reply run as one script, and its exit code and output are the next \
message. Each script starts in a fresh shell (files stay, variables and directory do not) and has \
{seconds} seconds. When the task is done, reply without such a block."""

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
        model_client: Literal["tinker", "litellm"] = "tinker",
        api_base: str | None = None,
        **kw: Any,
    ) -> None:
        """Create the agent of one trial; Harbor does this.

        Args:
            model_name: The model, as Tinker or litellm names it.
            **kw: The other options of `BasicLoopOptions`, and Harbor's arguments (logs_dir, ...).

        Raises:
            ValueError: An option is unknown or has a bad value.
        """
        # `--ae KEY=value` comes as extra_env and may hold API keys. It is taken out, because Harbor
        # 0.16 and later would pass it on to each command in the container. In a resumed job the
        # keys are masked, and a masked one is of no use.
        agent_env = without_masked(kw.pop("extra_env", None))
        # Keys and URLs of servers are looked up here: first the agent's, then the process's.
        self._env = ChainMap(agent_env, os.environ)
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
        if HARBOR_PARSES_OPTIONS:
            # This sets `self.options`.
            super().__init__(model_name=model_name, **options, **kw)
        else:
            # BaseAgent takes these. The last one is not in its signature: it comes by **kwargs.
            harbor_names = {*inspect.signature(BaseAgent).parameters, "override_setup_timeout_sec"}
            options |= {name: kw.pop(name) for name in kw.keys() - harbor_names}
            super().__init__(model_name=model_name, **kw)
            self.options = self.options_model(**options)
        # Texts on the task's skills and MCP servers. `setup` makes them, `run` sends them.
        self._introduction: list[str] = []
        # `run` makes it, and `resume` continues it.
        self._conversation: Conversation | None = None

    async def _converse(
        self, conversation: Conversation, environment: BaseEnvironment
    ) -> StopReason:
        """The loop: sample a reply, run its script, and tell the model the script's output.

        `tell` queues a text; the instruction is queued already. `sample` sends the queued texts,
        records the reply as a turn, and returns it; it needs a queued text. To shorten the history,
        edit `conversation.messages` in place. To record something else, put it into
        `conversation.metadata`.
        """
        for _ in range(self.options.max_turns):
            # Sample, and record.
            try:
                turn = await conversation.sample()
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW

            # Stop?
            if turn.cut_off:
                return StopReason.MAX_TOKENS
            blocks = self.script_in(turn.content)
            if blocks is None:
                return StopReason.COMPLETED
            if self.options.max_turns == 1:
                self.logger.warning("the reply holds commands; max_turns is 1, so none was run")
                return StopReason.COMPLETED

            # Act, and observe.
            conversation.tell(await self._execute(blocks, environment))
        return StopReason.MAX_TURNS

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Solve a task in a new conversation. Raises as `resume` does."""
        self._conversation = Conversation(self)
        text = "\n\n".join([instruction, *self._introduction])
        await self.resume(text, environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Continue the conversation of the last `run`, and record the new turns.

        The turns are recorded before an exception leaves. This raises the error of the client or
        the environment, or OSError if the files cannot be written.
        """
        conversation = self._conversation
        stop_reason = StopReason.ERROR
        # After a cancellation or a timeout, a client or an environment may raise another error in
        # place of CancelledError. So ask first: was the run cancelled, or is its time up?
        try:
            async with asyncio.timeout(self.options.max_seconds) as timer:
                await conversation.begin(instruction)
                stop_reason = await self._converse(conversation, environment)
        except asyncio.CancelledError:
            stop_reason = StopReason.CANCELLED
            raise
        except Exception as error:
            if was_cancelled():
                # Harbor has cancelled the run.
                stop_reason = StopReason.CANCELLED
                raise asyncio.CancelledError from error
            if timer.expired():
                # `max_seconds` have passed. Return, so that Harbor scores the trial.
                stop_reason = StopReason.ROLLOUT_TIMEOUT
            elif isinstance(error, TimeoutError):
                # Harbor takes any TimeoutError for the agent's timeout, and would score the trial.
                raise RuntimeError(f"a call timed out: {error!r}") from error
            else:
                raise
        finally:
            self._record(conversation, stop_reason, context)

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Check the options and Tinker's key. Harbor 0.23 and later calls this before any trial."""
        # `parse_options` is Harbor's.
        check_tinker_key(cls.parse_options(kwargs, env), ChainMap(without_masked(env), os.environ))

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build the model client, and list the task's skills and MCP servers for the model.

        The client is built here because importing torch takes seconds, and Harbor does not count
        `setup` as the agent's time.

        Raises:
            ValueError: The model has no name, no provider or no key.
            Exception: Any error of the client.
        """
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        check_tinker_key(self.options, self._env)
        client = await shared_client(self)
        self._introduction = []
        if self.skills_dir:
            folder = shlex.quote(self.skills_dir)
            command = f"cd -- {folder} && {{\n{LIST_SKILLS}\n}} 2>&1"
            listed = await environment.exec(command, timeout_sec=60)
            skills = valid_text(listed.stdout)
            if isinstance(client, ExactClient):
                # `sample` breaks special tokens in every text but an instruction, which may hold
                # them on purpose. The skills become part of it, so theirs are broken here.
                skills = await client.break_special_tokens(skills)
            self._introduction.append(f"Skills. Read a skill's file before you use it.\n{skills}")
        for server in self.mcp_servers:
            text = server.model_dump_json(exclude_none=True)
            self._introduction.append(f"MCP server: {text}")

    def script_in(self, reply: str) -> list[str] | None:
        """The bash texts to run as one script: a reply's bash blocks; None if there are none."""
        shells = ("bash", "sh", "shell")
        blocks = [text for language, text in fenced_blocks(reply) if language in shells]
        return blocks or None

    async def _execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        """Run blocks as one script in the environment. Returns the text that the model gets."""
        seconds = self.options.command_timeout_sec
        return await execute_blocks(blocks, environment, seconds, self.options.max_output_bytes)

    def _record(
        self, conversation: Conversation, stop_reason: StopReason, context: AgentContext
    ) -> None:
        # Put the run onto the context, then into the files.
        turns = conversation.turns
        usages = [turn.usage for turn in turns if turn.usage]
        if usages:
            context.n_input_tokens = sum(usage.prompt_tokens for usage in usages)
            context.n_output_tokens = sum(usage.completion_tokens for usage in usages)
            context.n_cache_tokens = sum(usage.cache_tokens for usage in usages)
        # If one price is unknown, the run's price is unknown.
        if turns and all(turn.cost_usd is not None for turn in turns):
            context.cost_usd = sum(turn.cost_usd for turn in turns)
        # SkyRL and verl read the number of turns under the name n_episodes.
        metadata = {**conversation.metadata, "stop_reason": stop_reason, "n_episodes": len(turns)}
        if self.options.collect_rollout_details:
            context.rollout_details = rollout_details(turns)
            # This also counts turns without logprobs.
            metadata["n_turns_without_ids"] = sum(not turn.is_trainable for turn in turns)
            metadata["n_prefix_breaks"] = sum(turn.breaks_prefix for turn in turns)
        # Harbor writes the metadata as JSON. One value that JSON cannot hold would cost the whole
        # job its results.
        text = json.dumps(metadata, default=str, skipkeys=True, ensure_ascii=False)
        context.metadata = json.loads(valid_text(text))
        # A verifier may score this file. Without a reply it becomes empty, for it may still hold
        # the reply of the run before.
        write_file(self.logs_dir / "completion.txt", turns[-1].content if turns else "")
        steps = conversation.steps()
        trajectory = atif.Trajectory(
            session_id=conversation.session_id,
            agent={"name": self.name(), "version": __version__, "model_name": self.model_name},
            steps=[{**step, "step_id": n} for n, step in enumerate(steps, start=1)],
            final_metrics={
                "total_prompt_tokens": context.n_input_tokens,
                "total_completion_tokens": context.n_output_tokens,
                "total_cached_tokens": context.n_cache_tokens,
                "total_cost_usd": context.cost_usd,
            },
            extra=context.metadata,
        )
        write_file(self.logs_dir / "trajectory.json", trajectory.model_dump_json(exclude_none=True))

    def _build_llm(self) -> Any:
        """Build this configuration's client. To use your own, return any Harbor `BaseLLM`.

        - model_client=tinker: `TinkerClient`.
        - model_client=litellm with collect_rollout_details and a server's URL: `VllmClient`.
        - model_client=litellm otherwise: Harbor's LiteLLM, from `chat_client`.

        By default token ids (collect_rollout_details) are on for Tinker, where training needs them,
        and off for API models. Closed APIs answer `logprobs` and `return_token_ids` with a 400, and
        a benchmark needs only the completion, the reward and the usage.

        This runs in a thread, because importing torch or litellm takes seconds.

        Raises:
            ValueError: The model's name has no provider, or the API key has bad characters.
            Exception: Any error of the client.
        """
        # Harbor's LiteLLM modifies its arguments, so it gets a copy.
        options = self.options.model_copy(deep=True)
        model, provider = self.model_name, "tinker"
        if options.model_client == "litellm":
            model, provider = split_model_name(model, options.api_base, options.llm_kwargs)
        prefix = provider.upper()
        env = self._env.get
        base = options.api_base or env(f"{prefix}_BASE_URL") or env(f"{prefix}_API_BASE")
        key = options.llm_kwargs.pop("api_key", None) or env(f"{prefix}_API_KEY", "")
        # A key from a file often ends in a newline.
        key = str(key).strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"the API key of {provider} has a character that an HTTP header cannot hold: set "
                "the variable to the key and nothing else"
            )
        if base and provider in ("openai", "hosted_vllm"):
            # A URL with a port and no path is a local server, with its API under /v1. It needs no
            # key, but the SDK insists on one.
            url = urlsplit(base)
            if url.port and url.path in ("", "/"):
                base = f"{base.rstrip('/')}/v1"
            key = key or "none"
        arguments = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "context_limit": options.context_limit,
            "api_base": base,
            "api_key": key or None,
            **options.llm_kwargs,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if provider == "tinker":
            return TinkerClient(
                model_name=model,
                model_path=options.model_path,
                renderer_name=options.renderer_name,
                **arguments,
            )
        # Harbor's LiteLLM wants the name of the model with its provider.
        chat = functools.partial(
            chat_client,
            model_name=self.model_name,
            collect_rollout_details=options.collect_rollout_details,
            **arguments,
        )
        # gpt-oss ends a reply with one stop token, but its template renders a different one. So no
        # prompt would be exact, and gpt-oss gets the chat endpoint, which also parses its replies.
        if options.collect_rollout_details and base and "gpt-oss" not in model:
            # `chat` is called if the server has no /tokenize.
            return VllmClient(model_name=model, fallback=chat, **arguments)
        return chat()

    async def _client_or_error(self) -> Any:
        """Build the client, and connect it. Returns the error if that fails."""
        try:
            client = await asyncio.to_thread(self._build_llm)
            if isinstance(client, VllmClient):
                # The connections belong to this event loop, so the thread cannot open them.
                client = await client.connect_or_fall_back(self.logger)
        except Exception as error:
            return error
        return client

    def _cache_key(self) -> tuple:
        """The key of this configuration in the cache.

        Trials with different session ids share a client. An API key or a URL that changes in the
        environment makes a new client.
        """
        options = self.options.model_dump(exclude={"session_id"})
        endings = ("_API_KEY", "_BASE_URL", "_API_BASE")
        variables = [item for item in self._env.items() if item[0].endswith(endings)]
        # This is a hash, so that the returned tuple shows no API key where it is printed.
        hashed = hash((repr(options), frozenset(variables)))
        # `_given_service` is the Tinker service that a trainer gave to `use_service`, or None.
        return (type(self), self.model_name, hashed, _given_service)


# Harbor 0.20 to 0.22 looks for this flag. Later versions warn if the class body sets it.
BasicLoopAgent.SUPPORTS_RESUME = True


def was_cancelled() -> bool:
    """True if this task is to stop: it was cancelled, or an `asyncio.timeout` around it expired.

    If True, raise CancelledError, which an expired timeout turns into a TimeoutError. Call this
    outside your own `asyncio.timeout` block, or it also reports that one.
    """
    return asyncio.current_task().cancelling() > 0


def without_masked(env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables without masked values, such as sk-r****456.

    Harbor masks keys in a job's saved config, and `harbor jobs resume` reads them from there.
    """
    return {name: value for name, value in (env or {}).items() if "****" not in value}


def split_model_name(model_name: str, api_base: str | None, llm_kwargs: dict) -> tuple[str, str]:
    """Split a model's name into the model and its provider, as litellm does.

    Raises:
        ValueError: litellm knows no provider of that name.
    """
    # Importing it takes seconds.
    import litellm

    # Otherwise litellm prints a list of providers for each name that it does not know.
    litellm.suppress_debug_info = True
    provider = llm_kwargs.get("custom_llm_provider")
    try:
        model, provider, *_ = litellm.get_llm_provider(model_name, provider, api_base)
    except litellm.BadRequestError:
        raise ValueError(
            f"litellm does not know who serves {model_name!r}: put the provider before the name, "
            f"such as openai/{model_name} for an OpenAI-compatible server"
        ) from None
    return model, provider


# Turns and stop reasons.


class StopReason(StrEnum):
    """Why a run ended. tinker-cookbook's StopReason has some of these, with the same values.

    Harbor scores a single-step trial unless it ended in ERROR, or was CANCELLED by Ctrl-C. In a
    multi-step task it scores every step. `trial_to_trajectory` leaves a trial out if one of its
    steps ended in ERROR.
    """

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


def now() -> str:
    """The time in ISO 8601, as ATIF wants it."""
    return datetime.now(UTC).isoformat()


@dataclass
class Turn(LLMResponse):
    """One model call. The ids are exactly as sampled; the text has no lone surrogates.

    Attributes:
        content: The reply's text.
        reasoning_content: The thinking before the answer. A client may leave it in `content`, in
            tags; it is moved here when the turn is recorded.
        prompt_token_ids: The whole prompt, shape [n_prompt]; None if the client gives none.
        completion_token_ids: The reply with its stop token, shape [n_completion], or None.
        logprobs: Natural logarithms, shape [n_completion], or None. Tinker gives those of the
            policy that sampled. vLLM gives those of the raw model, before temperature and top_p,
            unless it runs with --logprobs-mode processed_logprobs.
        extra: Other fields of the client, as JSON values (Tinker: sequence_id; vLLM:
            routed_experts).
        cut_off: True if the reply is incomplete; nothing in it is run.
        breaks_prefix: True if the prompt is not exact.
        timestamp: When the reply came, in ISO 8601.

    A turn that `turns_of` reads from a saved trial has ids, logprobs and `extra`, but no text.
    """

    content: str = ""
    cut_off: bool = False
    breaks_prefix: bool = False
    timestamp: str | None = None

    def __post_init__(self) -> None:
        self.content = valid_text(self.content)
        self.reasoning_content = valid_text(self.reasoning_content)
        self.extra = self.extra or {}
        # The client gave no usage: count the tokens.
        if self.usage is None and self.prompt_token_ids:
            self.usage = UsageInfo(
                prompt_tokens=len(self.prompt_token_ids),
                completion_tokens=len(self.completion_token_ids or []),
                cache_tokens=0,
                cost_usd=0.0,
            )

    @property
    def all_ids(self) -> list[int]:
        """The ids of the prompt and the completion: the next exact prompt begins with them."""
        if not self.prompt_token_ids:
            return []
        return self.prompt_token_ids + (self.completion_token_ids or [])

    @property
    def n_tokens(self) -> int:
        """The number of tokens of prompt and completion by the client's count, or 0."""
        if self.usage is None:
            return 0
        return self.usage.prompt_tokens + self.usage.completion_tokens

    @property
    def cost_usd(self) -> float | None:
        """The price of the call, or None if it is unknown. Harbor writes 0.0 for an unknown one."""
        if self.usage is None or self.usage.cost_usd == 0:
            return None
        return self.usage.cost_usd

    @property
    def is_trainable(self) -> bool:
        """Whether ids and logprobs exist, equally long and finite. A diverging policy gives NaN."""
        logprobs = self.logprobs or []
        # vLLM writes -9999.0 for a logprob that it does not have.
        return (
            bool(self.prompt_token_ids)
            and self.completion_token_ids is not None
            and len(self.completion_token_ids) == len(logprobs)
            and None not in logprobs
            and -9999.0 not in logprobs
            and all(map(math.isfinite, logprobs))
        )


# The conversation.


@dataclass
class UserText:
    """A text for the model: an instruction, or what the environment said."""

    text: str
    is_instruction: bool = False
    timestamp: str = field(default_factory=now)


class Conversation:
    """The messages of a trial, and the turns of its current run.

    `_chat` has the messages that the model sees, which the loop may edit. `_transcript` has what
    was said in this run, for the record. `_pending` has what the next call sends.

    Attributes:
        client: The client of the current run.
        metadata: Anything that the loop wants to keep of the current run, by name.
        session_id: The id that servers get with each request.
    """

    def __init__(self, agent: BasicLoopAgent) -> None:
        options = agent.options
        self._agent = agent
        # Harbor 0.13 gives a trial no id.
        self.session_id = options.session_id or getattr(agent, "session_id", None) or uuid4().hex
        # `valid_text` makes "" of None.
        self._system = valid_text(options.system_prompt)
        if options.system_prompt is None and options.max_turns > 1:
            self._system = agent.protocol.replace("{seconds}", str(options.command_timeout_sec))
        # `begin` makes these anew for each run. A client works in one event loop only, and a caller
        # may start each run in a new one. The messages of the old Chat go into the new one.
        self.client: Any = None
        self._chat: Chat | None = None
        self.metadata: dict[str, Any] = {}
        self._transcript: list[UserText | Turn] = []
        # These last for the whole trial. The output of a run's last script is still pending when
        # the next run begins.
        self._pending: list[UserText] = []
        self._last_turn = Turn()
        # A copy of `messages` after the last turn. If they differ now, the loop has edited them.
        self._last_messages: list[dict] = []

    @property
    def messages(self) -> list[dict]:
        """The Chat's live list of messages. Edit it in place to shorten the history."""
        return self._chat.messages

    @property
    def turns(self) -> list[Turn]:
        """This run's turns."""
        return [part for part in self._transcript if isinstance(part, Turn)]

    async def begin(self, instruction: str) -> None:
        """Start a run with this instruction. Raises any error of building the client."""
        self._transcript = []
        self.metadata = {}
        self._pending.append(UserText(valid_text(instruction), is_instruction=True))
        if self._chat:
            messages = self._chat.messages
        else:
            messages = [{"role": "system", "content": self._system}] if self._system else []
        self.client = await shared_client(self._agent)
        sends_thinking = self._agent.options.interleaved_thinking
        self._chat = Chat(self.client, interleaved_thinking=sends_thinking)
        self._chat.messages.extend(messages)

    def tell(self, text: str) -> None:
        """Have the next `sample` send this text. Special tokens in it are sent as plain text."""
        self._pending.append(UserText(valid_text(text)))

    async def sample(self) -> Turn:
        """Send the pending text, and record the reply.

        Nothing is awaited between the reply and its record, so no cancellation can lose a reply.

        Raises:
            ContextLengthExceededError: The context has no room for a reply.
            RuntimeError: No text is pending, or the server returned no token ids.
            Exception: Any error of the client.
        """
        if not self._pending:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        options = self._agent.options

        # Has the loop edited the messages? In the first turn a system message looks like an edit,
        # too. That is harmless, because there are no earlier turns.
        is_edited = self.messages != self._last_messages
        if is_edited:
            # With the Responses API the server keeps the messages. Have the Chat send all of them.
            self._chat.reset_response_chain()

        # Make the request. Harbor's LiteLLM merges extra_body with that of llm_kwargs, but not
        # extra_headers, so these are merged here.
        headers = options.llm_kwargs.get("extra_headers") or {}
        request = {"extra_headers": {**headers, "X-Session-ID": self.session_id}}
        if options.collect_rollout_details:
            # Routers in front of vLLM may read the id here. Closed APIs refuse unknown fields.
            request["extra_body"] = {"session_id": self.session_id}
        if isinstance(self.client, ExactClient):
            # An instruction may hold special tokens on purpose. In any other text they are broken,
            # in place, so that the record shows what was sent.
            for message in self._pending:
                if not message.is_instruction:
                    message.text = await self.client.break_special_tokens(message.text)
            starts_anew = is_edited or options.rerender_history
            request["previous_ids"] = [] if starts_anew else self._last_turn.all_ids
        elif options.context_limit and not is_edited:
            # An ExactClient counts the real prompt. Here the count after the last turn must do.
            n_tokens = self._last_turn.n_tokens
            if n_tokens >= options.context_limit:
                raise ContextLengthExceededError(f"the conversation has {n_tokens} tokens")

        # Send it.
        prompt = "\n\n".join(message.text for message in self._pending)
        try:
            reply = await self._chat.chat(prompt, **request)
        except OutputLengthExceededError as error:
            # No client of this file raises this, but Harbor's own do for a reply that was cut off,
            # and a `_build_llm` of yours may return one. The error has the text, but no ids.
            reply = Turn(content=error.truncated_response, cut_off=True)
            self.messages.append({"role": "user", "content": prompt})
            self.messages.append({"role": "assistant", "content": reply.content})
            # The server of a Responses API does not have this turn.
            self._chat.reset_response_chain()
        # A client of your own may return Harbor's LLMResponse.
        turn = Turn(**vars(reply))
        # The Chat has put the reply's text into `messages`. Replace it by the turn's, which has no
        # lone surrogates. It still holds the thinking, so `messages` keeps that. `_record_turn`
        # takes it out of the turn only.
        self.messages[-1]["content"] = turn.content
        return self._record_turn(turn)

    def _record_turn(self, turn: Turn) -> Turn:
        # Split the thinking off, and record the turn.
        if turn.reasoning_content:
            # The server has split the thinking off. `split_thinking` would take the text before a
            # lone closing tag for thinking. Here that is answer, and only tags at the start count.
            thinking, turn.content = leading_thinking(turn.content)
        else:
            thinking, turn.content = split_thinking(turn.content)
        turn.reasoning_content += thinking
        turn.timestamp = now()
        if turn.prompt_token_ids:
            previous_ids = self._last_turn.all_ids
            turn.breaks_prefix = turn.prompt_token_ids[: len(previous_ids)] != previous_ids
        is_first_of_trial = not self._last_messages
        self._transcript += [*self._pending, turn]
        self._pending.clear()
        self._last_turn = turn
        self._last_messages = [dict(message) for message in self.messages]
        # A server that gives no ids in the trial's first turn gives none at all. A later gap costs
        # one turn, which is counted in the metadata.
        if self._agent.options.collect_rollout_details and is_first_of_trial:
            ids = turn.completion_token_ids
            # An empty reply has no logprobs.
            if not turn.prompt_token_ids or ids is None or (ids and not turn.logprobs):
                raise RuntimeError(
                    "collect_rollout_details=true, but the server returned no token ids with "
                    "logprobs"
                )
        return turn

    def steps(self) -> list[dict]:
        """This run as the steps of an ATIF trajectory, without their numbers.

        A script's output is the observation of the step that ran it. Output that is left over from
        the previous run becomes a step of the user. Unsent text is included.
        """
        turns = self.turns
        steps = [{"source": "system", "message": self._system}] if self._system else []
        for part in [*self._transcript, *self._pending]:
            if isinstance(part, Turn):
                steps.append(self._agent_step(part, is_first_of_run=part is turns[0]))
            elif not part.is_instruction and steps and steps[-1]["source"] == "agent":
                result = {"content": part.text, "extra": {"timestamp": part.timestamp}}
                steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            else:
                step = {"source": "user", "message": part.text, "timestamp": part.timestamp}
                steps.append(step)
        return steps

    def _agent_step(self, turn: Turn, is_first_of_run: bool) -> dict:
        metrics = {"cost_usd": turn.cost_usd}
        if turn.usage:
            metrics["prompt_tokens"] = turn.usage.prompt_tokens
            metrics["completion_tokens"] = turn.usage.completion_tokens
            metrics["cached_tokens"] = turn.usage.cache_tokens
        if self._agent.options.collect_rollout_details:
            # Only the first prompt is written, because prompts grow. The context has all of them.
            metrics["prompt_token_ids"] = turn.prompt_token_ids if is_first_of_run else None
            metrics["completion_token_ids"] = turn.completion_token_ids
            # JSON has no NaN.
            metrics["logprobs"] = turn.logprobs if turn.is_trainable else None
        return {
            "source": "agent",
            "message": turn.content,
            "reasoning_content": turn.reasoning_content or None,
            "timestamp": turn.timestamp,
            "metrics": metrics,
        }


# Thinking, and where the answer begins.

# The tags of most models, of Mistral, of Seed-OSS and of Cohere.
THINKING_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
_OPENING_TAG = "|".join(map(re.escape, THINKING_TAGS))
_CLOSING_TAG = "|".join(map(re.escape, THINKING_TAGS.values()))


def leading_thinking(text: str) -> tuple[str, str]:
    """Take the tagged thinking off the start of a reply. Returns the thinking and the answer.

    Thinking ends at the closing tag that matches its opening tag, or at the end of the text. If the
    text begins with no opening tag, all of it is the answer.
    """
    thinking = ""
    answer = text
    while opening := re.match(rf"\s*({_OPENING_TAG})", answer):
        thought, _, rest = answer[opening.end() :].partition(THINKING_TAGS[opening[1]])
        thinking += thought
        answer = rest.lstrip()
    return thinking, answer


def split_thinking(text: str) -> tuple[str, str]:
    """Split a reply into thinking and answer. The prompt may have had the opening tag.

    If the first tag of the text is a closing tag, the text before it is the thinking. (This search
    skips tags between quotation marks or backticks.) Otherwise this is `leading_thinking`.
    """
    tags = f"(?:{_OPENING_TAG}|{_CLOSING_TAG})"
    # This finds the first tag that lacks a quotation mark on at least one side.
    tag = re.search(rf"(?<!['\"`]){tags}|{tags}(?!['\"`])", text)
    if tag and tag[0] not in THINKING_TAGS:
        return text[: tag.start()], text[tag.end() :].lstrip()
    return leading_thinking(text)


def headers_to_tags(text: str) -> str:
    """Convert the message headers of gpt-oss and Inkling, two models of Tinker, to thinking tags.

    Both of these become <think>hm</think>hi:

        <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
        <|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>hi

    The first is gpt-oss' form, the second Inkling's. A message to a tool ("to=") counts as
    thinking. Any other text stays as it is.
    """
    # The prompt ends in <|start|>assistant, so the reply begins with the rest of that header:
    # "<|channel|>...", or " to=NAME<|channel|>..." for a message to a tool. A later header begins
    # with <|start|>, and each of Inkling's with <|message_model|>. The limit of 200 bounds the time
    # of a search.
    header = r"\s*(?:to=\S{1,200}\s*)?<\|(?:channel|start|message_model)\|>"
    if not re.match(header, text):
        return text
    # One of these tokens ends a message if another header, or the end of the text, follows it.
    # Otherwise it is quoted text.
    message_end = rf"<\|(?:end|call|return|end_message)\|>(?={header}|\s*\Z)"
    thinking = ""
    answer = ""
    for message in re.split(message_end, text):
        header_end = re.search(r"<\|(?:message|content_\w+)\|>", message)
        if header_end is None:
            # The reply was cut off in a header.
            continue
        kind = message[: header_end.end()]
        content = message[header_end.end() :]
        # gpt-oss writes to the user in "commentary", too.
        if "to=" not in kind and re.search("final|commentary|content_text", kind):
            answer += content
        else:
            thinking += content
    # A closing tag that is quoted in the thinking gets a blank, so that it does not end it.
    return f"<think>{thinking.replace('</think>', '</ think>')}</think>{answer}"


# Clients. Two send exact prompts as token ids; the third is Harbor's LiteLLM.

Ids = list[int]

# The finish reasons of complete replies, in lower case, as litellm, vLLM and APIs write them. Any
# other one (length, time_limit, insufficient_system_resource, ...) counts as cut off, so that half
# a script is never run. If runs with a server end after one turn, and the log warns of "finish
# reason 'x'", add x here.
COMPLETED_REASONS = {
    "stop",
    "stop_sequence",
    "stop_str",
    "stop_token",
    "end_turn",
    "eos",
    "eos_found",
    "eos_token",
    "endoftext",
    "done",
    "finish",
    "finish_reason_stop",
    "finished",
    "normal",
    "complete",
    "completed",
    "tool_calls",
    "tool_use",
    "function_call",
    "function_calls",
}


class ExactClient(ABC):
    """A client that sends exact prompts.

    Attributes:
        context_limit: The maximum tokens of a conversation; math.inf until a server tells it.
        max_tokens: The maximum tokens of a reply.
    """

    context_limit: float
    max_tokens: int
    # See `next_prompt`.
    _probe_start: Ids | None = None

    @abstractmethod
    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        """Render messages with the chat template, ready for a reply.

        Returns:
            The prompt's ids, and the text of its last few tokens, which shows whether the template
            opens thinking.
        """

    @abstractmethod
    async def generate(self, prompt_ids: Ids, max_tokens: int, **request: Any) -> Turn:
        """Sample a reply to a prompt. Raises any error of the server."""

    @abstractmethod
    async def special_tokens_in(self, text: str) -> list[str]:
        """The parts of a text that would become special tokens."""

    async def call(
        self,
        prompt: str,
        message_history: list[dict] | tuple = (),
        previous_ids: Ids | tuple = (),
        **request: Any,
    ) -> Turn:
        """Sample a reply to these messages, as Harbor's Chat asks for it.

        Args:
            prompt: The new message of the user.
            message_history: The messages before it.
            previous_ids: The ids of the history as sampled. If empty, the history is rendered.
            **request: Further fields for the server: extra_headers, extra_body.

        Raises:
            ContextLengthExceededError: The context has no room for a reply.
            Exception: Any error of the server.
        """
        messages = [*message_history, {"role": "user", "content": prompt}]
        prompt_ids, prompt_end = await self.next_prompt(messages, list(previous_ids))
        room = self.context_limit - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceededError(f"the prompt fills the context: {len(prompt_ids)}")
        try:
            turn = await self.generate(prompt_ids, min(self.max_tokens, room), **request)
        except Exception as error:
            if says_context_is_full(error):
                raise ContextLengthExceededError(str(error)) from error
            raise
        turn.content = headers_to_tags(turn.content)
        # If the template opened thinking, the reply begins inside it.
        opened = re.search(rf"({_OPENING_TAG})\s*\Z", prompt_end)
        if opened:
            turn.content = opened[1] + turn.content
        return turn

    async def break_special_tokens(self, text: str) -> str:
        """Put a zero-width space into each special token of a text, which makes it plain text."""
        # A broken token may uncover another one, so this repeats until none is left. Each pass
        # breaks a token at least, so it ends.
        while found := await self.special_tokens_in(text):
            for token in found:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    async def next_prompt(self, messages: list[dict], previous_ids: Ids) -> tuple[Ids, str]:
        """The prompt for the next reply: the previous ids, and what the template puts after them.

        Earlier turns are not rendered again, because their ids must stay as they were sampled. What
        the template puts after a reply is called the tail: the stop token, the new message, and the
        header of the next reply. It is found in three steps:

        1. Render a short conversation that ends in the new message, called the probe:

            <|im_start|> user a <|im_end|> <|im_start|> assistant b
            <|im_end|> <|im_start|> user NEW <|im_end|> <|im_start|> assistant

        2. Render it again with "c" in place of "b". The tail is what the two have in common at
           their end: here the second line.
        3. Drop the stop token from the tail, because the sampled reply ends in it already.

        Step 2 runs only if it is needed: its result, the ids before the tail, is kept in
        `_probe_start`, and counts as long as probes begin with it. (After midnight they may not, if
        the template shows the date.) Trials share it without a lock, because each one checks it.

        The whole history is rendered instead if there are no previous ids (the first turn, or an
        edited history), or if the reply does not end in the template's stop token.

        Returns:
            The ids, shape [n_prompt], and the text of the last few (see `render`).
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
            probe_start = ids[: len(ids) - n_common_end(ids, other)]
            self._probe_start = probe_start
        tail = ids[len(probe_start) :]
        # The end of the reply and the start of the tail overlap: in the stop, which is one token,
        # or Inkling's two. Send it once.
        for n_stop in (1, 2):
            if previous_ids[-n_stop:] == tail[:n_stop]:
                return previous_ids + tail[n_stop:], prompt_end
        return await self.render(messages)


def n_common_end(ids: Ids, other: Ids) -> int:
    """The number of ids at the end that two lists have in common."""
    n_common = 0
    for one, another in zip(reversed(ids), reversed(other), strict=False):
        if one != another:
            break
        n_common += 1
    return n_common


def says_context_is_full(error: Exception) -> bool:
    """True if the error says that the prompt is too long; the phrases are Harbor's.

    The error must also blame the request, by its status or by Tinker's category "user": a server
    that is down may "take too long", too.
    """
    is_user_error = str(getattr(error, "category", "")) == "user"
    is_bad_request = getattr(error, "status_code", None) in (400, 413, 422)
    phrases = "(?i)context length|context_length|maximum context|token limit|too long"
    return (is_user_error or is_bad_request) and bool(re.search(phrases, str(error)))


# Sessions with Tinker.


class Session:
    """A session with Tinker. It is closed when no `Checkpoint` refers to it any more.

    A session holds about 11 file descriptors. Do not close it while it is used: with SDK 0.38, the
    samples that are under way in it would wait for ever.

    Attributes:
        service: The `tinker.ServiceClient`.
    """

    def __init__(self, service: Any) -> None:
        self.service = service
        # SDKs before 0.30 cannot close.
        if hasattr(service, "close"):
            # "success" is the status of a session that was ended on purpose.
            finalizer = weakref.finalize(self, service.close, "success")
            # At exit the SDK's thread may have ended, so nothing is closed then.
            finalizer.atexit = False


@dataclass
class Checkpoint:
    """A checkpoint, or a base model, that is open for sampling.

    Attributes:
        sampling_client: Tinker's client.
        session: The session that it samples in, or None in a service that `use_service` was given.
    """

    sampling_client: Any
    session: Session | None

    async def sample(self, request: dict) -> Any:
        """Sample, and return Tinker's answer."""
        sampling = self.sampling_client.sample(**request)
        if not inspect.isawaitable(sampling):
            # SDKs before 0.38 give a concurrent.futures.Future.
            sampling = asyncio.wrap_future(sampling)
        return await sampling


# The process's sessions, by server and key. TinkerClients with the same server and key share one.
# The first of them to notice that it has ended puts a new one here.
_sessions: dict[tuple, Session] = {}
_session_lock = threading.Lock()
_given_service: Any = None


def use_service(service: Any) -> None:
    """Use this `tinker.ServiceClient` for later trials. None restores the agent's own session.

    Sampling and training then share a session. Some losses need that, because they read what Tinker
    recorded during sampling. The service is never closed or replaced.
    """
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
    raise ValueError(
        "no API key for Tinker: set TINKER_API_KEY, or model_client=litellm for other models"
    )


def is_gone(error: Exception) -> bool:
    """True if Tinker says that a session or a checkpoint no longer exists.

    SDK 0.38 has no class for the errors of a closed client or of polling, so their text is matched.
    """
    phrases = r"(?s)is closed$|polling failed.*code: (404|410)"
    has_status = getattr(error, "status_code", None) in (404, 410)
    return has_status or bool(re.search(phrases, str(error)))


def open_checkpoint(
    given_service: Any, arguments: dict, api_base: str | None, api_key: str | None
) -> Checkpoint:
    """Open a checkpoint in the process's session, or in a new one if that has ended.

    Call this in a thread, because it waits for the server.

    Tinker gives the same error for an ended session and for a missing checkpoint. Only a new
    session tells which it is. If the checkpoint opens in the new session, that session replaces
    the old one. If not, the SDK's error is raised.
    """
    import tinker

    def opened_in(service: Any) -> Any:
        created = service.create_sampling_client(**arguments)
        # SDK 0.38 and later give a future.
        return created.result() if hasattr(created, "result") else created

    if given_service:
        return Checkpoint(opened_in(given_service), session=None)
    server = (api_base, api_key)
    with _session_lock:
        old = _sessions.get(server)
        if old:
            try:
                return Checkpoint(opened_in(old.service), old)
            except Exception as error:
                if not is_gone(error):
                    raise
        # If URL or key are None, the SDK finds its own.
        new = Session(tinker.ServiceClient(base_url=api_base, api_key=api_key))
        checkpoint = Checkpoint(opened_in(new.service), new)
        _sessions[server] = new
        return checkpoint


# Clients are built in threads, and a process may run several event loops. All share a tokenizer,
# which raises "Already borrowed" if two threads use it at once. Each use takes a millisecond or so.
_tokenizer_lock = threading.Lock()


class TinkerClient(ExactClient):
    """Tinker, with the renderer that Harbor's TinkerLLM finds for a model.

    Only TinkerLLM's renderer is used. Its `call` reports a cut-off reply as complete (Harbor 0.13
    to 0.24) or drops its ids (0.25), and opens a session of its own.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_tokens: int,
        context_limit: int = 32_000,
        model_path: str | None = None,
        renderer_name: str | None = None,
        api_base: str | None = None,
        api_key: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        record_stability_info: bool = False,
    ) -> None:
        import tinker
        from harbor.llms.tinker import TinkerLLM, get_tokenizer

        # This loads the tokenizer into the cookbook's cache, where TinkerLLM finds it. It takes
        # seconds, so it comes before the lock.
        get_tokenizer(model_name)
        with _tokenizer_lock:
            # The renderer has no public name. Harbor 0.13 to 0.25 have this one.
            self._renderer = TinkerLLM(model_name, renderer_name=renderer_name)._renderer
            self._tokenizer = self._renderer.tokenizer
            # Inkling's tokenizer has no get_added_vocab, and turns no text into a special token.
            has_vocabulary = hasattr(self._tokenizer, "get_added_vocab")
            vocabulary = self._tokenizer.get_added_vocab() if has_vocabulary else []
            # A list of token ids. With the renderer role_colon it is a list of one text.
            stop = self._renderer.get_stop_sequences()
        # Some vocabularies add single characters and runs of blanks, which ordinary text has.
        self._special_tokens = [token for token in vocabulary if len(token.strip()) > 1]
        self.context_limit = context_limit
        self.max_tokens = max_tokens
        self._params = tinker.SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        arguments = {"model_path": model_path} if model_path else {"base_model": model_name}
        if record_stability_info:
            arguments["record_stability_info"] = True
        # The service is bound here: a later `use_service` does not change this client.
        self._open = functools.partial(
            open_checkpoint, _given_service, arguments, api_base, api_key
        )
        self._checkpoint = self._open()
        self._reopen_lock = asyncio.Lock()

    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        in_parts = [with_thinking_part(message) for message in messages]
        with _tokenizer_lock:
            try:
                prompt = self._renderer.build_generation_prompt(in_parts)
            except ValueError:
                # The renderers llama3 and role_colon do not support thinking parts.
                prompt = self._renderer.build_generation_prompt(messages)
            ids = prompt.to_ints()
            return ids, self._tokenizer.decode(ids[-8:])

    async def special_tokens_in(self, text: str) -> list[str]:
        return [token for token in self._special_tokens if token in text]

    async def generate(self, prompt_ids: Ids, max_tokens: int, **request: Any) -> Turn:
        import tinker

        # This skips pydantic's validation, which would look at each token of a long prompt.
        chunk = tinker.EncodedTextChunk.model_construct(tokens=prompt_ids)
        response = await self._sample(
            prompt=tinker.ModelInput(chunks=[chunk]),
            num_samples=1,
            sampling_params=self._params.model_copy(update={"max_tokens": max_tokens}),
        )
        sequence = response.sequences[0]
        ids = list(sequence.tokens)
        turn = Turn(
            content=self._text_of(ids),
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            logprobs=sequence.logprobs and list(sequence.logprobs),
            cut_off=sequence.stop_reason != "stop",
            # SDK 0.26 and later.
            extra={"sequence_id": getattr(sequence, "sequence_id", None)},
        )
        # `Turn` has counted the tokens. SDK 0.25 and later know how many were cached.
        turn.usage.cache_tokens = getattr(response, "prompt_cache_hit_tokens", None) or 0
        return turn

    async def _sample(self, **request: Any) -> Any:
        # Sample. If the session with Tinker has ended, open a new one and try again, once.
        checkpoint = self._checkpoint
        try:
            return await checkpoint.sample(request)
        except Exception as error:
            if not is_gone(error):
                raise
        # The first trial that gets the lock opens the checkpoint again, and the others share it.
        async with self._reopen_lock:
            if self._checkpoint is checkpoint:
                self._checkpoint = await asyncio.to_thread(self._open)
        return await self._checkpoint.sample(request)

    def _text_of(self, ids: Ids) -> str:
        # The reply's text up to its stop token, or up to the stop text of role_colon.
        stop = self._params.stop
        stop_text = stop[0] if isinstance(stop[0], str) else None
        stop_ids = {self._tokenizer.eos_token_id}
        if stop_text is None:
            stop_ids.update(stop)
        ids = list(itertools.takewhile(lambda token: token not in stop_ids, ids))
        try:
            with _tokenizer_lock:
                text = self._tokenizer.decode(ids)
        except Exception:
            # A model may sample an id that its tokenizer does not have, for which each tokenizer
            # has an error of its own. The answer is empty then.
            return ""
        if stop_text is not None:
            # The prompt of role_colon ends in "Assistant:", so a reply begins with a blank.
            text = text.partition(stop_text)[0].removeprefix(" ")
        return text


def with_thinking_part(message: dict) -> dict:
    """Convert a message for tinker-cookbook's renderers, which want the thinking as a part."""
    if message["role"] != "assistant":
        return message
    thinking, text = split_thinking(message["content"])
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
    return {"role": "assistant", "content": parts if thinking else text}


# Ordinary tokens that look special: the HTML tags of Gemma's vocabulary.
HTML_TAGS = (
    "caption|table|thead|tbody|tfoot|tr|td|th|h[1-6]|blockquote|code|strong|em|b|i|u|sub|sup"
)
# Special tokens that do not look special.
MINIMAX_TOKENS = ("]~b]", "]~!b[", "[e~[")


def looks_special(token: str) -> bool:
    """Guess whether a token is special, because vLLM does not say it.

    A special token stands in angle or square brackets and has a letter, as <|im_end|> and [INST].
    An ordinary token such as [i] looks the same, and is then broken as well.
    """
    if token in MINIMAX_TOKENS:
        return True
    if re.fullmatch(f"</?({HTML_TAGS})>", token):
        return False
    in_brackets = (token[:1], token[-1:]) in (("<", ">"), ("[", "]"))
    return in_brackets and any(map(str.isalpha, token))


class VllmClient(ExactClient):
    """vLLM by token ids: /tokenize renders, /v1/completions samples (tested with 0.32).

    Arguments that `__init__` does not name go into each request for a completion. `model_info` is
    LiteLLM's, and is not sent.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_tokens: int,
        api_base: str,
        fallback: Callable[[], Any],
        context_limit: float = math.inf,
        api_key: str = "none",
        timeout: float = 600,
        max_retries: int = 2,
        ssl_verify: bool = True,
        extra_headers: dict | None = None,
        extra_body: dict | None = None,
        model_info: dict | None = None,
        **body: Any,
    ) -> None:
        self.context_limit = context_limit
        self.max_tokens = max_tokens
        # This makes the client to use instead if the server has no /tokenize.
        self._make_fallback = fallback
        self._body = {**body, **(extra_body or {}), "model": model_name}
        # The chat endpoint would pass these on to the template. /tokenize must be given them.
        self._template_kwargs = dict(self._body.get("chat_template_kwargs") or {})
        if "reasoning_effort" in self._body:
            self._template_kwargs.setdefault("reasoning_effort", self._body["reasoning_effort"])
        self._url = api_base.rstrip("/").removesuffix("/v1")
        # This yields an openai.AsyncOpenAI, which `connect_or_fall_back` puts into `_http`. It is a
        # generator, because Python closes it when the event loop ends. Harbor closes no client.
        self._http_generator = open_http(
            base_url=self._url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=extra_headers,
            ssl_verify=ssl_verify,
        )

    async def connect_or_fall_back(self, logger: logging.Logger) -> Any:
        """Open the connection to the server, and read its context limit.

        Returns:
            The client to use: this one, or one for the chat endpoint if there is no /tokenize.

        Raises:
            openai.OpenAIError: The server does not answer, or refuses the key.
        """
        self._http = await anext(self._http_generator)
        # A gateway may answer anything to an unknown path. Only vLLM's answer has token_strs.
        answer = None
        try:
            answer = await self._tokenize(messages=[{"role": "user", "content": "a"}])
        except json.JSONDecodeError:
            pass
        except Exception as error:
            if getattr(error, "status_code", None) not in (400, 404, 405, 422):
                raise
        if isinstance(answer, dict) and answer.get("token_strs") and answer.get("max_model_len"):
            self.context_limit = min(self.context_limit, answer["max_model_len"])
            return self
        logger.warning("the server has no /tokenize like vLLM's: prompts are not exact")
        return await asyncio.to_thread(self._make_fallback)

    async def _tokenize(self, **body: Any) -> dict:
        body |= {"model": self._body["model"], "return_token_strs": True}
        # Each turn starts with this request. More retries help it through a short outage.
        return await self._post("/tokenize", body, timeout=30, max_retries=5)

    async def _post(self, path: str, body: dict, **options: Any) -> dict:
        try:
            return await self._http.post(path, cast_to=object, body=body, options=options)
        except Exception as error:
            add_url(error, self._url + path)
            raise

    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        answer = await self._tokenize(
            messages=messages,
            add_generation_prompt=True,
            chat_template_kwargs=self._template_kwargs,
        )
        # `call` searches this text for a tag that is followed by nothing but white space.
        # Tokenizers write a blank or a newline in one of these ways.
        end = re.sub("Ċ|Ġ|▁|<0x0A>", " ", "".join(answer["token_strs"][-8:]))
        return answer["tokens"], end

    async def special_tokens_in(self, text: str) -> list[str]:
        # A special token has a pair of brackets, or a tilde. Most texts have neither.
        has_pair = ("<" in text and ">" in text) or ("[" in text and "]" in text)
        if not (has_pair or "~" in text):
            return []
        answer = await self._tokenize(prompt=text, add_special_tokens=False)
        tokens = {token for token in answer["token_strs"] if looks_special(token)}
        # vLLM may spell a token differently from the text, such as Ġ for a blank. It is left out,
        # because `break_special_tokens` would not find it, and try for ever.
        return [token for token in tokens if token in text]

    async def generate(self, prompt_ids: Ids, max_tokens: int, **request: Any) -> Turn:
        body = {
            **self._body,
            **(request.get("extra_body") or {}),
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            # 0 means the log-probability of the sampled token alone.
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        headers = request.get("extra_headers") or {}
        answer = await self._post("/v1/completions", body, headers=headers)
        reply = answer["choices"][0]
        content = reply.pop("text")
        finish_reason = reply.pop("finish_reason")
        # The server returns the prompt, which an option such as truncate_prompt_tokens may shorten.
        returned_prompt_ids = reply.pop("prompt_token_ids", None)
        completion_ids = reply.pop("token_ids", None)
        logprobs = reply.pop("logprobs", None) or {}
        turn = Turn(
            content=content,
            cut_off=finish_reason not in COMPLETED_REASONS,
            prompt_token_ids=returned_prompt_ids or prompt_ids,
            completion_token_ids=completion_ids,
            logprobs=logprobs.get("token_logprobs"),
            # The rest, such as routed_experts.
            extra=reply,
        )
        # `Turn` has counted the tokens. The server may know how many were cached.
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        turn.usage.cache_tokens = details.get("cached_tokens") or 0
        return turn


async def open_http(*, ssl_verify: bool, **arguments: Any) -> AsyncIterator[Any]:
    """Yield an openai.AsyncOpenAI, which keeps its connections open, and close it in the end.

    This is a generator because Python closes an async generator by itself: when its event loop
    ends, or when nothing refers to it any more. Harbor never closes a client.
    """
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http_client = DefaultAsyncHttpxClient(verify=ssl_verify)
    async with AsyncOpenAI(http_client=http_client, **arguments) as client:
        yield client


def add_url(error: Exception, url: str) -> None:
    """Add the URL that was called to an error's traceback."""
    # The user name, password, query and fragment of a URL may hold a key.
    shown = re.split("[?#]", re.sub("//.*@", "//", url))[0]
    error.add_note(f"The URL was {shown}.")
    if getattr(error, "status_code", None) == 404:
        error.add_note("Its path, or the name of the model, may be wrong.")


def chat_client(*, context_limit: int | None = None, **arguments: Any) -> Any:
    """Make Harbor's LiteLLM, changed so that a reply which was cut off keeps its ids and usage.

    LiteLLM raises an error if a reply ends by "length". The client notes the real finish reason,
    and shows LiteLLM "stop" instead.

    `context_limit` is dropped here: `Conversation` enforces it. The private methods that are
    overridden are in Harbor 0.13 to 0.25.
    """
    # Importing LiteLLM takes seconds, so the class is defined in here.
    from harbor.llms.lite_llm import LiteLLM

    class ChatClient(LiteLLM):
        finish_reason: str | None = None

        async def call(self, prompt: str, **request: Any) -> Turn:
            """Call the model. Raises the error of the last of LiteLLM's three attempts."""
            # Trials share this object. LiteLLM's method is called on a copy, to which the methods
            # below write the finish reason of this call.
            this_call = copy.copy(self)
            try:
                response = await LiteLLM.call(this_call, prompt, **request)
            except Exception as error:
                if self._api_base:
                    add_url(error, self._api_base)
                raise
            reason = str(this_call.finish_reason).lower()
            cut_off = reason not in COMPLETED_REASONS
            if cut_off and reason != "length":
                self._logger.warning(f"finish reason {reason!r}: the reply counts as cut off")
            return Turn(**vars(response), cut_off=cut_off)

        def get_model_output_limit(self) -> int:
            # Harbor would send the model's own limit to the Responses API.
            return self._llm_kwargs["max_tokens"]

        def _extract_usage_info(self, response: Any) -> UsageInfo | None:
            # This is about usage, but it is the last method that LiteLLM calls before it looks at
            # the finish reason. For "length" LiteLLM would raise an error without ids and usage.
            choice = response["choices"][0]
            # litellm replaces an unknown finish reason by "stop", and keeps the original under this
            # name.
            fields = getattr(choice, "provider_specific_fields", None) or {}
            self.finish_reason = fields.get("native_finish_reason") or choice["finish_reason"]
            choice["finish_reason"] = "stop"
            return super()._extract_usage_info(response)

        def _extract_responses_usage_info(self, response: Any) -> UsageInfo | None:
            # The same for the Responses API, whose word for a complete reply is "completed".
            self.finish_reason = response.status or "completed"
            response.status = "completed"
            return super()._extract_responses_usage_info(response)

    return ChatClient(**arguments)


# Training data.


@dataclass(frozen=True)
class Trajectory:
    """A trial as a trainer sees it. (ATIF's trajectory is a conversation for people to read.)

    Attributes:
        turns: All turns that have ids and logprobs, from all steps; none for API models.
        reward: The reward named "reward", or the only one. None if the trial has no score, or has
            several without that name.
        stop_reason: The `StopReason` of the last step; None for another agent's trial.
        trial: Harbor's result, with all rewards, tokens, cost and names.
    """

    turns: list[Turn]
    reward: float | None
    stop_reason: str | None
    trial: TrialResult


# Exceptions after which a reward still counts. Harbor 0.25 decides this itself, by `reward_valid`.
SCORED_EXCEPTIONS = {"AgentTimeoutError", "NonZeroAgentExitCodeError"}


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`.

    Returns:
        The trajectory, or None in one of these cases:

        - A step ended in ERROR.
        - There is no reward, and there is an exception or no trainable turn.
        - There is a reward, and Harbor says that it is not valid. (Before Harbor 0.25: there is an
          exception that is not in SCORED_EXCEPTIONS.)

    Raises:
        ValueError: Ids, logprobs and `extra` do not align, or a logprob or reward is not finite.
    """
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    rewards = getattr(trial.verifier_result, "rewards", None) or {}
    try:
        turns = [turn for context in contexts for turn in turns_of(context)]
        if not all(map(math.isfinite, rewards.values())):
            raise ValueError(f"a reward is not a finite number: {rewards}")
    except ValueError as error:
        raise ValueError(f"trial {trial.trial_name}: {error}") from error
    stop_reasons = [(context.metadata or {}).get("stop_reason") for context in contexts]
    errors = [part.exception_info for part in (trial, *steps) if part.exception_info]
    if not rewards:
        # No verifier has scored it.
        is_valid = bool(turns) and not errors
    elif hasattr(trial, "reward_valid"):
        # Harbor 0.25 and later
        is_valid = trial.reward_valid
    else:
        is_valid = all(error.exception_type in SCORED_EXCEPTIONS for error in errors)
    if not is_valid or StopReason.ERROR in stop_reasons:
        return None
    reward = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    return Trajectory(turns, reward, stop_reasons[-1], trial)


# The old name of the function, which other projects import.
_trial_to_trajectory = trial_to_trajectory

# The lists of a RolloutDetail with one entry per turn. `Turn` has attributes of the same names.
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, whose lists have an entry for each trainable turn.

    A turn that is not trainable is left out whole, because a part of it would misalign all others.
    `extra` has a list for each name; a turn without that name has None there.

    Returns:
        A list with the RolloutDetail, or None if no turn is trainable.
    """
    trainable = [turn for turn in turns if turn.is_trainable]
    if not trainable:
        return None
    detail = {name: [getattr(turn, name) or [] for turn in trainable] for name in _TOKEN_FIELDS}
    names = {name for turn in trainable for name in turn.extra}
    if names:
        detail["extra"] = {name: [turn.extra.get(name) for turn in trainable] for name in names}
    return [detail]


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The trainable turns of a run.

    Raises:
        ValueError: The lists differ in length, or a logprob is missing or not finite.
    """
    for detail in context.rollout_details or []:
        fields = {name: detail.get(name) or [] for name in _TOKEN_FIELDS}
        extra = detail.get("extra") or {}
        lengths = {len(values) for values in [*fields.values(), *extra.values()]}
        if len(lengths) != 1:
            raise ValueError("the lists of a rollout differ in length")
        for n in range(lengths.pop()):
            turn = Turn(
                **{name: values[n] for name, values in fields.items()},
                extra={name: values[n] for name, values in extra.items()},
            )
            if not turn.is_trainable:
                raise ValueError("ids and logprobs differ in length, or a logprob is not finite")
            yield turn


def to_tinker(trajectory: Trajectory) -> tinker_cookbook.rl.types.Trajectory:  # noqa: F821
    """The trial for tinker-cookbook's RL functions. Imports torch.

    Every transition has reward 0.0. Put the trial's reward into `TrajectoryGroup.final_rewards_G`.
    Each action has Tinker's sequence_id, which the loss stable_reinforce of cookbook 0.6 needs.
    """
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl import types

    transitions = []
    for turn in trajectory.turns:
        # `Turn.cut_off` is not saved. The stop reason tells it for the trial's last turn, and no
        # other turn is marked.
        is_last = turn is trajectory.turns[-1]
        cut_off = is_last and trajectory.stop_reason == StopReason.MAX_TOKENS
        ending = "length" if cut_off else "stop"
        action = TokensWithLogprobs(turn.completion_token_ids, turn.logprobs, ending)
        # The constructor takes this field only from cookbook 0.6 on.
        action.sequence_id = turn.extra.get("sequence_id")
        prompt = ModelInput.from_ints(turn.prompt_token_ids)
        transitions.append(types.Transition(prompt, action, reward=0.0, episode_done=is_last))
    return types.Trajectory(transitions, ModelInput.empty(), trajectory.stop_reason)


# Files.


def write_file(path: Path, text: str) -> None:
    """Write a file, even if a command left a link, a pipe or a folder there. May raise OSError.

    This is a security boundary. With Docker, the folder is /logs/agent in the container, where
    commands may put anything. Nothing in it is opened: a new file is renamed over the old name, and
    a folder of that name is moved aside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # This name is random, so no link can be there.
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        fresh.write_text(text, encoding="utf-8")
        # `is_dir` would follow a link, and raise OSError if the name of its target is too long.
        if not path.is_symlink() and path.is_dir():
            path.rename(f"{fresh}.aside")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def valid_text(text: str | bytes | None) -> str:
    """Text that tokenizers and files accept: lone surrogates are replaced, None becomes ""."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    # UTF-16 joins pairs of surrogates into characters. A lone one becomes U+FFFD.
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Running scripts.

# Only the rules of CommonMark that are needed: a list item may hold a fenced block, and a fence
# that is indented by four spaces is code. Without links and other inline marks, parsing takes two
# thirds of the time.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "code"]).disable("inline")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The ``` blocks of a Markdown text, as (language in lower case, content without NULs).

    An unclosed block does not count. A block inside another one, or inside ~~~, is quoted and does
    not count either.
    """
    blocks = []
    # The parser also returns unclosed blocks. A closed block has two more lines than its content:
    # its fences. The parser counts the closing fence only if a newline follows, so one is added.
    for token in _MARKDOWN.parse(text.replace("\0", "") + "\n"):
        if token.markup.startswith("`"):
            first_line, end_line = token.map
            n_lines = end_line - first_line
            is_closed = n_lines == token.content.count("\n") + 2
            if is_closed:
                words = token.info.lower().split()
                blocks.append((words[0] if words else "", token.content))
    return blocks


# This prints the path of each skill and its front matter: line 2 to the next ---.
LIST_SKILLS = r"""
for file in */SKILL.md; do
  [ -f "$file" ] || continue
  printf "\n%s\n" "$PWD/$file"
  sed -n '1!{/^---/q;p;}' "$file" | head -c 2000
done
"""

# A script has three limits:
#
#     seconds                      The bash program kills the script.
#     seconds + ANSWER_MARGIN_SEC  The agent stops waiting, and kills the script by another exec.
#     seconds + EXEC_MARGIN_SEC    exec ends. With Docker it raises RuntimeError, which would end
#                                  the run, so this limit comes last.
ANSWER_MARGIN_SEC = 30
EXEC_MARGIN_SEC = 90
# The time that the second exec gets.
KILL_SEC = 15

# A script is killed if it writes more: Harbor keeps all output of an exec in memory.
FLOOD_BYTES = 4_000_000
# The model gets one of these texts if output is not complete.
CUT_OUTPUT = (
    f"[cut here: more than {FLOOD_BYTES} bytes, or the script killed what collects its output]"
)
LOST_OUTPUT = "[the output was lost: the script killed the process that returns it]"


async def execute_blocks(
    blocks: list[str], environment: BaseEnvironment, seconds: int, shown_bytes: int
) -> str:
    """Run blocks as one script in an environment. The comment above `_SHELL` explains how.

    Args:
        blocks: The texts of the blocks.
        environment: Harbor's environment. An error of its `exec` is raised, except for a
            TimeoutError, which gives the exit code 124.
        seconds: The time limit of the script.
        shown_bytes: The maximum bytes of the script's output in the answer.

    Returns:
        The text that the model gets: the exit code and the output.
    """
    # A random id. It names the processes of this script, and marks the parts of the answer.
    mark = uuid4().hex
    call = ["run_blocks", mark, str(seconds), str(FLOOD_BYTES), *blocks]
    # `kill_script` finds the runner by this variable.
    command = f"BASIC_LOOP_RUNNER={mark} {shell_command(*call)}"
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
        if was_cancelled():
            raise asyncio.CancelledError from error
        if timer.expired() or isinstance(error, TimeoutError):
            return f"Exit code: 124\nOutput:\n[no answer; the time limit is {seconds} seconds]"
        raise
    observation = read_answer(result, mark, shown_bytes)
    if observation is None:
        await kill_script(mark, environment)
        return f"Exit code: {result.return_code}\nOutput:\n{LOST_OUTPUT}"
    return observation


async def kill_script(mark: str, environment: BaseEnvironment) -> None:
    """Kill a script and its runner by another exec. If the agent is cancelled, this goes on."""

    async def kill() -> None:
        # The runner has BASIC_LOOP_RUNNER=MARK in its environment, and the script's processes have
        # BASIC_LOOP_SCRIPT=MARK. The bash pattern BASIC_LOOP_*=MARK matches both. It does not match
        # this exec, which has the mark only in base64.
        command = shell_command("kill_processes", f"BASIC_LOOP_*={mark}")
        # As above, the limit of exec itself comes last.
        exec_call = environment.exec(command, timeout_sec=KILL_SEC + EXEC_MARGIN_SEC)
        # The environment may be gone.
        with suppress(Exception):
            await asyncio.wait_for(exec_call, KILL_SEC)

    await asyncio.shield(kill())


def read_answer(result: ExecResult, mark: str, shown_bytes: int) -> str | None:
    """The text that the model gets, or None if the answer is damaged.

    A complete answer is

        :MARK:output and end line in base64:MARK:exit code:MARK:

    The end line is "end-of-MARK", followed by a note if the script was killed. It is missing if the
    output was cut.
    """
    parts = valid_text(result.stdout).split(f":{mark}:")
    note = ""
    if len(parts) == 1:
        # bash did not start, and the output of exec says why.
        code = result.return_code
        output = parts[0].encode()
    elif len(parts) == 4:
        code = parts[2]
        try:
            decoded = base64.b64decode(parts[1])
        except ValueError:
            return None
        output, end_line, rest = decoded.partition(f"\nend-of-{mark}".encode())
        # A script that knows the mark may write its own end line, with a note of any length.
        note = middle_cut(rest, 1000).strip() if end_line else CUT_OUTPUT
    else:
        return None
    # The script's own stderr is in the output. This is what exec itself reports.
    exec_stderr = middle_cut(valid_text(result.stderr).encode(), shown_bytes)
    texts = [middle_cut(output, shown_bytes), note, exec_stderr]
    shown = "\n".join(text.removesuffix("\n") for text in texts if text)
    return f"Exit code: {code}\nOutput:\n{shown or '(none)'}"


def middle_cut(output: bytes, shown_bytes: int) -> str:
    """Cut the middle out of long output, and say how many bytes are left out."""
    n_left_out = len(output) - shown_bytes
    if n_left_out > 0:
        half = shown_bytes // 2
        middle = f"\n[... {n_left_out} bytes left out ...]\n".encode()
        output = output[:half] + middle + output[half + n_left_out :]
    return output.decode("utf-8", "replace")


def shell_command(*call: str) -> str:
    """The command that calls a function of the bash program `_SHELL` with these arguments.

    It is `BASIC_LOOP_PROGRAM=<the program in base64> exec bash -c '<decode and run it>'`. The text
    is not an argument of bash, because a script's `pkill -f` would find it there.
    """
    program = f"{_SHELL}\n{shlex.join(call)}\nexit\n"
    encoded = base64.b64encode(valid_text(program).encode()).decode()
    # The program ends in `exit`. `exit 1` runs only if decoding failed, because the container can
    # start no more processes.
    start = 'eval "$(printf %s $BASIC_LOOP_PROGRAM | base64 -d)"; exit 1'
    return f"BASIC_LOOP_PROGRAM={encoded} exec bash -c '{start}'"


# How a script is run. The environment's exec starts a bash, the runner, which calls `run_blocks`:
#
#     runner ---- watch_script ---- run_script ---- bash, the script
#        '------- sed | head | base64
#
# The script writes into a pipe. The runner reads it and turns the output into base64, which every
# environment passes on unchanged. watch_script keeps the time limit: run_script tells it the exit
# code through a second pipe. When the script is over, watch_script writes the line "end-of-MARK"
# after the output. sed stops at that line, even if a background server keeps the pipe open. The
# whole output of an exec is
#
#     :MARK:output and end line in base64:MARK:exit code:MARK:
#
# If the script was killed, the end line says so after the mark.
#
# The file descriptors are
#
#     3   of watch_script: reads the exit code; being open, it also tells run_blocks that the end
#         line is still to come
#     4   of watch_script: writes the output, into the pipe that the runner reads
#     5   of the runner: reads the output and the end line
#
# MARK is random hex. The script's processes inherit it in BASIC_LOOP_SCRIPT, and the runner has it
# in BASIC_LOOP_RUNNER. No file is written. The image needs bash 4.4 or later, base64, cat, head,
# sed, and Linux' /proc. Tested with bash 4.4 to 5.3.
_SHELL = r"""
# bash reports killed processes on stderr, and the model would see that.
exec 2>/dev/null
# The script must not inherit these. /proc/PID/environ of the runner and its subshells still has
# them, so kill_script finds these processes.
unset BASIC_LOOP_PROGRAM BASIC_LOOP_RUNNER

# run_blocks MARK SECONDS BYTES BLOCK...: run the blocks as one script.
run_blocks() {
  local mark=$1 seconds=$2 flood_bytes=$3 block script watcher
  shift 3
  # An empty line after each block keeps a trailing backslash from joining two blocks.
  printf -v script "%s\n\n" "$@"
  for block; do
    if is_unfinished "$block"; then
      # This script is run in place of the blocks.
      script="echo '[nothing was run: a block ends inside a quote, a here-document or a command]'
        exit 2"
      break
    fi
  done
  printf ":%s:" "$mark"
  exec 5< <(watch_script "$mark" "$seconds" "$script")
  # The process of the last <(...).
  watcher=$!
  # In the C locale sed takes any bytes. It is set only now, because the script, which has started
  # already, keeps the locale of the container.
  local -x LC_ALL=C
  # sed would keep a line of any length in memory. Above 100 MB it ends.
  { ulimit -v 100000; exec sed "/^end-of-$mark/q"; } <&5 | head -c "$flood_bytes" | base64
  # watch_script closes its fd 3 just before it writes the end line. If it is still open, the
  # readers ended too early: the output was too long, or the script killed sed, head or base64.
  if [ -e "/proc/$watcher/fd/3" ]; then
    kill_processes "BASIC_LOOP_SCRIPT=$mark" "$watcher"
  fi
  # Does a process of the script still hold the pipe, such as a server in the background? If none
  # does, read returns 1, for the end of the file.
  read -r -t 0.1 -N 1 <&5
  if [ $? != 1 ]; then
    # cat drains the pipe until the server ends. Otherwise the server would block, or get SIGPIPE.
    cat <&5 >/dev/null &
  fi
  # watch_script returns the exit code that the model is told.
  wait "$watcher"
  printf ":%s:%s:%s:" "$mark" "$?" "$mark"
}

# watch_script MARK SECONDS SCRIPT: run a script, and kill it at its time limit, or if it kills the
# shell that runs it. Print its output and the end line, and return its exit code.
watch_script() {
  local mark=$1 seconds=$2 script=$3 subshell code note
  exec 4>&1
  # Inside <(...), stdout is the pipe to fd 3, to which only `echo $?` writes. The output of
  # run_script goes to fd 4.
  exec 3< <(
    run_script "$mark" "$script" >&4 4>&-
    echo $?
  )
  # The process of the last <(...).
  subshell=$!
  read -r -t "$seconds" code <&3
  case $? in
    0) ;;
    # EOF
    1) code=137 note="the script killed the shell that runs it" ;;
    # More than 128
    *) code=124 note="the time limit of $seconds seconds was reached" ;;
  esac
  if [ -n "$note" ]; then
    kill_processes "BASIC_LOOP_SCRIPT=$mark" "$subshell"
    note="[ended: $note]"
  fi
  # Reap the subshell. In many containers PID 1 reaps nothing, and it would stay as a zombie.
  wait "$subshell"
  # Close it before writing the end line: an open fd 3 tells run_blocks that the readers have ended
  # too early.
  exec 3<&-
  printf "\nend-of-%s %s\n" "$mark" "$note"
  return "$code"
}

# run_script MARK SCRIPT: run a script in a bash of its own, and return its exit code.
run_script() {
  local mark=$1 script=$2
  # bash 5.3 ignores these signals in <(...). The script would inherit that.
  trap - INT QUIT
  # The script gets a process group of its own, so that its `kill 0` kills nothing else.
  set -m
  # The text comes in a variable, because a `pkill -f` of the script would find it in an argument.
  # bash expands $BASIC_LOOP_TEXT before eval runs unset, so the script lacks the variable.
  BASIC_LOOP_SCRIPT=$mark BASIC_LOOP_TEXT=$script \
    bash -c 'eval "unset BASIC_LOOP_TEXT; $BASIC_LOOP_TEXT"' </dev/null 2>&1
}

# is_unfinished BLOCK: succeed if the block ends inside a quote, a here-document or a compound
# command. It would swallow the next block, and the model may have meant to write more. Other syntax
# errors are left to the script.
is_unfinished() {
  local message
  # After `set -n` bash only parses: it runs nothing more, not even on the same line. The subshell,
  # which costs less than a new bash, keeps that option out of this shell.
  message=$(LC_ALL=C; eval "set -n; $1" 2>&1)
  # After the first backtick the message may quote the block, where these phrases mean nothing.
  case ${message%%\`*} in
    *"unexpected EOF"* | *"unexpected end of file"* | *"delimited by end-of-file"*) return 0 ;;
  esac
  return 1
}

# kill_processes ENTRY [ROOT]: kill each process with ENTRY, a pattern, in its environment, the
# process ROOT, and all that descends from them. This starts no process, because the script may have
# used up the process limit.
kill_processes() {
  local entry=$1 root=$2 found=() n_before path pid environ stat parent
  # Repeat until no new process is found, but not for ever: a fork bomb may be faster.
  for _ in {1..100}; do
    n_before=${#found[@]}
    for path in /proc/[0-9]*; do
      pid=${path#/proc/} environ=() stat=
      # `found` has it already.
      [[ " ${found[*]} " != *" $pid "* ]] || continue
      mapfile -t -d "" environ <"$path/environ"
      read -r -d "" stat <"$path/stat"
      # The text is "PID (NAME) STATE PARENT ...". The name may hold anything.
      stat=${stat##*) }
      stat=${stat#* }
      parent=${stat%% *}
      # The process has ended, or is hidden from this user.
      [ -n "$parent" ] || continue
      # The root, a process with ENTRY (a pattern, so not quoted), or a child of one that was found.
      if [[ $pid = "$root" || ${environ[*]} = *$entry* || " ${found[*]} " = *" $parent "* ]]; then
        # Stop all before killing any. Otherwise a shell would start its next command.
        kill -STOP "$pid"
        # Prepend it, so that most children are killed before their parents. When a parent dies, the
        # kernel sends SIGCONT to a stopped process group that it orphans.
        found=("$pid" "${found[@]}")
      fi
    done
    [ "${#found[@]}" != "$n_before" ] || break
  done
  kill -KILL "${found[@]}"
}
"""
