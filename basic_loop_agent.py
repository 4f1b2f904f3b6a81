# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://... --ak max_turns=50

The agent samples from one model in one conversation, and runs one script per turn. It does not
compact long conversations, call tools natively or run commands in parallel. To add such a thing,
change the loop: `BasicLoopAgent.converse`.

A run is the work on one instruction: a trial has one, or one for each step of its task. A turn is
one model call and its reply. A rollout is the token ids and log-probabilities of a run's turns.
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
from collections import Counter, defaultdict
from collections.abc import Iterator
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
    # Harbor before 0.23 does not have these classes.
    class AgentOptions(BaseModel, extra="forbid"): ...

    class AgentCapabilities(BaseModel): ...


__version__ = "0.10.0"


class BasicLoopOptions(
    AgentOptions, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
):
    """The options of `--ak key=value`."""

    model_path: str | None = Field(None, pattern="^tinker://")
    """Only for tinker: the checkpoint to sample, tinker://...; default: the base model."""
    renderer_name: str | None = None
    """Only for tinker: tinker-cookbook's renderer; default: the one recommended for the model."""
    max_tokens: PositiveInt = 512
    """Maximum tokens per model call, thinking included."""
    temperature: NonNegativeFloat | None = 1.0
    """Sampling temperature. null: none is sent, because some models refuse it."""
    max_turns: PositiveInt = 1
    """Maximum model calls. 1: the reply is the answer. Above 1: its bash blocks are run."""
    system_prompt: str | None = None
    """System message; "" sends none. Default: an explanation of bash blocks if max_turns > 1."""
    model_client: Literal["tinker", "litellm", "vllm"] = "tinker"
    """tinker; vllm for a vLLM server, by token ids; litellm for API models and other servers."""
    api_base: str | None = None
    """Base URL of the server. litellm: /v1 is added after a port. Default: the client's own."""
    top_p: PositiveFloat | None = Field(None, le=1)
    """Nucleus sampling: the smallest set of tokens with this total probability. null: not sent."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends and the trial is scored."""
    llm_kwargs: dict = Field({}, repr=False)
    """More arguments for the client, such as seed. Error messages do not show them."""
    collect_rollout_details: bool | None = None
    """Record token ids and logprobs; default: true for tinker and vllm."""
    context_limit: PositiveInt | None = None
    """Only for tinker (default: 32,000) and vllm (the server's): tokens of prompt and reply."""
    interleaved_thinking: bool = False
    """Only for litellm: send the server's reasoning_content back with each answer."""
    session_id: str | None = None
    """Only for litellm and vllm: sent with each model call, for a router with sticky sessions."""
    command_timeout_sec: PositiveInt = Field(120, le=7 * 24 * 3600)
    """Time limit of a script in seconds; at most a week."""
    max_output_bytes: PositiveInt = 10_000
    """Maximum bytes of a script's output that the model sees."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.collect_rollout_details is None:
            self.collect_rollout_details = self.model_client != "litellm"
        if self.model_client != "tinker" and (self.model_path or self.renderer_name):
            raise ValueError("model_path and renderer_name are for model_client=tinker: drop them")
        # Nothing may be set twice. llm_kwargs may hold an option that is null, such as top_p.
        options = {name for name, value in self if value is not None}
        duplicates = self.llm_kwargs.keys() & {*options, "model", "model_name", "api_base"}
        if duplicates:
            raise ValueError(f"llm_kwargs holds {', '.join(duplicates)}: use the option instead")
        return self


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies, and records each turn.

    After a run the context holds the token counts, cost_usd (None if unknown), the metadata and the
    rollout (see `rollout_details`). `logs_dir` holds completion.txt, which is the last answer, and
    trajectory.json, in Harbor's format ATIF.

    Attributes:
        client: The model client, which the trials of a job share.
        messages: The conversation so far, which `run` begins. The loop may edit it.
        turns: The turns of this run. `resume` begins with none.
        metadata: The loop may keep JSON values of this run here, for the context's metadata.
        _system: The system message, "" for none. None before the first `run`.
        _pending: The texts that the next `sample` sends, even if that is in the next step.
        _last_ids: The ids of the last turn. The next prompt begins with them, or if this is empty,
            it is rendered from `messages`.
        _last_messages: A copy of `messages` after the last turn, to see if the loop edited them.
    """

    options_model = BasicLoopOptions
    # Harbor 0.23 would refuse the last two fields. `model_construct` does not validate.
    capabilities = AgentCapabilities.model_construct(
        atif=True, resume=True, skills=True, mcp_servers=True
    )
    # The default system message if max_turns > 1. {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with \
```bash: the blocks of a reply run as one script, and its exit code and output are the next \
message. Each script starts in a fresh shell (files stay, variables and directory do not) and has \
{seconds} seconds. When the task is done, reply without such a block."""

    async def converse(self, environment: BaseEnvironment) -> StopReason | str:
        """Sample a reply, run its script, tell the model the script's output, and so on. Returns
        why the run ended: a StopReason, or a word of your own."""
        for _ in range(self.options.max_turns):
            try:
                turn = await self.sample()
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW
            if turn.cut_off:
                self.logger.warning(f"the reply was cut off: finish reason {turn.finish_reason!r}")
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
        """Queue a text for the next `sample`. Special tokens in the text become plain text, except
        with model_client=litellm, where they are not known."""
        text = valid_text(text)
        if isinstance(self.client, TokenClient):
            text = self.client.plain_text(text)
        self._pending.append(text)

    def render_anew(self) -> None:
        """Have the next prompt rendered from `messages`, not continued from the sampled ids. An
        edit of `messages` has the same effect."""
        self._last_ids = []

    async def sample(self) -> Turn:
        """Send the queued texts, and record the reply as a turn. Once the reply is here, nothing is
        awaited until it is recorded, so that no cancellation loses it. Raises RuntimeError if no
        text is queued, or if the first turn lacks ids; ContextLengthExceededError; and any error of
        the client."""
        if not self._pending:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        sent = "\n\n".join(self._pending)
        request = {}
        if isinstance(self.client, TokenClient):
            if self.messages != self._last_messages:
                self.render_anew()
            request["previous_ids"] = self._last_ids
        # Harbor's Chat calls the client with its messages, and appends what was sent and the reply.
        # Each turn has a new Chat, because the loop may have edited `messages`.
        chat = Chat(self.client, self.options.interleaved_thinking)
        chat.messages.extend(self.messages)
        try:
            reply = await chat.chat(sent, **request)
        except Exception as error:
            if says_context_is_full(error):
                raise ContextLengthExceededError(str(error)) from error
            raise

        # A client of your own may return Harbor's LLMResponse.
        turn = reply if isinstance(reply, Turn) else Turn(**vars(reply))
        turn.sent = sent
        turn.timestamp = datetime.now(UTC).isoformat()
        thinking, turn.content = split_thinking(turn.content)
        turn.reasoning_content += thinking
        self.turns.append(turn)
        self._pending.clear()
        self.messages = chat.messages
        self.messages[-1]["content"] = turn.content
        self._last_messages = [dict(message) for message in self.messages]
        self._last_ids = turn.all_ids
        # This check comes after the record, so that the files show the reply. A later turn without
        # ids is no error: it is left out of the rollout, and counted.
        ids = (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        if self.options.collect_rollout_details and len(self.turns) == 1 and None in ids:
            raise RuntimeError("collect_rollout_details=true, but no token ids or logprobs came")
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
        """Create the agent of one trial. Callers know this signature, so eight options stay in it,
        with BasicLoopOptions's defaults; others are in `kw`. Raises ValueError for a bad option."""
        # The variables of `--ae KEY=value`, such as API keys. Harbor must not have them: from 0.16
        # on it would give them to each command in the container.
        self._agent_env: dict[str, str] = kw.pop("extra_env", None) or {}
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
        # From 0.23 on Harbor parses the options in here, and sets `self.options`.
        super().__init__(model_name=model_name, **options, **kw)
        if not hasattr(BaseAgent, "parse_options"):
            # Before 0.23 `kw` also holds Harbor's arguments: BaseAgent's parameters, and one more.
            harbor_names = {*inspect.signature(BaseAgent).parameters, "override_setup_timeout_sec"}
            options |= {name: kw[name] for name in kw.keys() - harbor_names}
            self.options = self.options_model(**options)

        # The class docstring says what these are.
        self.client: Any = None
        self.messages: list[dict] = []
        self.turns: list[Turn] = []
        self.metadata: dict[str, Any] = {}
        self._system: str | None = None
        self._pending: list[str] = []
        self._last_ids: list[int] = []
        self._last_messages: list[dict] = []

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Check the options, and that Tinker has a key and vLLM a URL. Harbor 0.23 and later calls
        this before any trial. Raises ValueError."""
        options = cls.parse_options(kwargs, env)
        url_and_key(options, options.model_client, env or {})

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build the model client. Raises ValueError if the model's name, Tinker's packages or key,
        or vLLM's URL is missing; and any error of the client."""
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        self.client = await self._shared_llm()

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Start a new conversation, and go on as `resume` does. Before the instruction the model is
        told of the task's skills and MCP servers. Raises what `resume` raises."""
        self._system = valid_text(self.options.system_prompt)
        if self.options.system_prompt is None and self.options.max_turns > 1:
            self._system = self.protocol.replace("{seconds}", str(self.options.command_timeout_sec))
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._pending = []
        if self.skills_dir:
            self.tell("Skills. Read a skill's file before you use it.")
            # The model sees each path, and the lines with the skill's name and description.
            command = f"head -v -n 10 -- {shlex.quote(self.skills_dir)}/*/SKILL.md"
            self.tell(await run_script([command], environment, 60, FLOOD_BYTES))
        for server in self.mcp_servers:
            self.tell(f"MCP server: {server.model_dump_json(exclude_none=True)}")
        await self.resume(instruction, environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Continue the conversation of the last `run`, for the later steps of a task. The turns are
        recorded even after an error. Raises RuntimeError before the first `run`, any error of the
        client or the environment, and OSError if a file cannot be written."""
        if self._system is None:
            raise RuntimeError("`resume` continues a conversation: call `run` first")
        self.turns = []
        self.metadata = {}
        # Not by `tell`: the task's author may use special tokens on purpose.
        self._pending.append(valid_text(instruction))
        stop_reason = StopReason.ERROR
        try:
            async with asyncio.timeout(self.options.max_seconds) as timer:
                # Since `setup` the client may have been replaced, after another trial's error.
                self.client = await self._shared_llm()
                stop_reason = await self.converse(environment)
        except (Exception, asyncio.CancelledError) as error:
            # Who ended the run? The error's type does not tell, because a client may answer a
            # cancellation with an error of its own.
            if asyncio.current_task().cancelling():
                # Harbor did.
                stop_reason = StopReason.CANCELLED
                raise asyncio.CancelledError from error
            elif timer.expired():
                # `max_seconds` did. No error is raised, so that Harbor scores the trial.
                stop_reason = StopReason.ROLLOUT_TIMEOUT
            else:
                # The error did.
                self._forget_client()
                if isinstance(error, TimeoutError | asyncio.CancelledError):
                    # Harbor takes a TimeoutError for its own, and a CancelledError for Ctrl-C.
                    raise RuntimeError(f"a call timed out or was cancelled: {error!r}") from error
                raise
        finally:
            self._record(stop_reason, context)

    def _record(self, stop_reason: StopReason | str, context: AgentContext) -> None:
        # Counters add up name by name.
        totals = sum((Counter(turn.usage.model_dump()) for turn in self.turns), Counter())
        context.n_input_tokens = totals["prompt_tokens"]
        context.n_output_tokens = totals["completion_tokens"]
        context.n_cache_tokens = totals["cache_tokens"]
        # Harbor's clients give 0.0 for an unknown price.
        context.cost_usd = totals["cost_usd"] or None
        # SkyRL and verl call the number of turns n_episodes.
        metadata = {**self.metadata, "stop_reason": stop_reason, "n_episodes": len(self.turns)}
        if self.options.collect_rollout_details:
            trainable = [turn for turn in self.turns if turn.is_trainable]
            context.rollout_details = rollout_details(trainable)
            metadata["n_turns_without_ids"] = len(self.turns) - len(trainable)
            # Prefix breaks are prompts that do not begin with the ids of the turn before.
            metadata["n_prefix_breaks"] = 0
            for earlier, later in itertools.pairwise(trainable):
                ids = earlier.all_ids
                metadata["n_prefix_breaks"] += later.prompt_token_ids[: len(ids)] != ids
        # Harbor saves JSON only: other values become text, and keys such as tuples are left out.
        text = json.dumps(metadata, default=str, skipkeys=True, ensure_ascii=False)
        context.metadata = json.loads(valid_text(text))
        # This file is written even without a turn: it may hold the previous step's answer.
        write_file(self.logs_dir / "completion.txt", self.turns[-1].content if self.turns else "")
        trajectory = atif.Trajectory(
            # By default the trial's name.
            session_id=self.options.session_id or self.logs_dir.parent.name,
            agent={"name": self.name(), "version": self.version(), "model_name": self.model_name},
            steps=[{**step, "step_id": n} for n, step in enumerate(self._steps(), start=1)],
            final_metrics={
                "total_prompt_tokens": context.n_input_tokens,
                "total_completion_tokens": context.n_output_tokens,
                "total_cached_tokens": context.n_cache_tokens,
                "total_cost_usd": context.cost_usd,
            },
            extra=context.metadata,
        )
        # Without this, Harbor 0.24 and later compute it from trajectory.json after the run, and
        # would hang if a process of a script has put a named pipe there.
        with suppress(ImportError):
            from harbor.utils.trajectory_utils import compute_model_usage

            context.model_usage = compute_model_usage(trajectory)
        write_file(self.logs_dir / "trajectory.json", trajectory.model_dump_json(exclude_none=True))

    def _steps(self) -> list[dict]:
        """This run as ATIF's steps, without their step_id."""
        # The first text is the instruction. The output of a turn's script is the text after it: it
        # was sent with the next turn, or is still queued.
        texts = [turn.sent for turn in self.turns] + ["\n\n".join(self._pending)]
        steps = [{"source": "system", "message": self._system}] if self._system else []
        steps.append({"source": "user", "message": texts[0]})
        for turn, output in zip(self.turns, texts[1:], strict=True):
            metrics = {
                "prompt_tokens": turn.usage.prompt_tokens,
                "completion_tokens": turn.usage.completion_tokens,
                "cached_tokens": turn.usage.cache_tokens,
                "cost_usd": turn.usage.cost_usd or None,
            }
            if self.options.collect_rollout_details and turn.is_trainable:
                # NeMo Gym and NeMo RL train on each step that has completion ids.
                metrics |= {name: getattr(turn, name) for name in (*_TOKEN_FIELDS, "extra")}
            step = {
                "source": "agent",
                "message": turn.content,
                "reasoning_content": turn.reasoning_content or None,
                "timestamp": turn.timestamp,
                # This skips Pydantic's validation, which would look at each id of each prompt.
                "metrics": atif.Metrics.model_construct(**metrics),
            }
            if output:
                step["observation"] = {"results": [{"content": output}]}
            steps.append(step)
        return steps

    def _build_llm(self) -> Any:
        """Build the client, in a thread, because the imports take seconds. Override this for your
        own client: return any Harbor `BaseLLM` whose content is text. Set model_client=litellm for
        it, because `preflight` wants a key or a URL for the others. Raises the client's errors."""
        options = self.options
        provider = options.model_client
        args = copy.deepcopy(options.llm_kwargs)
        args |= options.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        if provider == "litellm":
            from litellm import get_llm_provider

            provider = get_llm_provider(self.model_name, args.get("custom_llm_provider"))[1]
        url, key = url_and_key(options, provider, self._agent_env)
        args |= {"model": self.model_name, "api_base": url, "api_key": key}
        clients = {"tinker": TinkerClient, "vllm": VllmClient, "litellm": chat_client}
        return clients[options.model_client](options, **args)

    def _cache_key(self) -> tuple:
        """What a client depends on. Trials with the same key share one."""
        options = repr(self.options.model_dump())
        return (type(self), self.model_name, options, repr(self._agent_env), _given_service)

    async def _shared_llm(self) -> Any:
        """The client: the first trial builds it, the others wait. If that fails, the next tries."""
        # A lock and an HTTP client belong to one event loop.
        key = (asyncio.get_running_loop(), self._cache_key())
        async with _client_locks[key]:
            if key not in _clients:
                _clients[key] = await asyncio.to_thread(self._build_llm)
            return _clients[key]

    def _forget_client(self) -> None:
        """Have the next trial build a new client, because this one may be broken."""
        for key, client in list(_clients.items()):
            if client is self.client:
                del _clients[key]


# The state of the process:
# - The clients that trials share, by event loop and `_cache_key`, and the locks to build them.
_clients: dict[tuple, Any] = {}
_client_locks: defaultdict[tuple, asyncio.Lock] = defaultdict(asyncio.Lock)
# - The service of `use_service`, if it was called. (`tinker_service` keeps the others.) The lock is
#   held while a service opens a checkpoint.
_given_service: Any = None
_service_lock = threading.Lock()
# - The lock of the tokenizers, held for milliseconds. A tokenizer raises "Already borrowed" if two
#   threads use it at once, and clients are built in threads.
_tokenizer_lock = threading.Lock()


def use_service(service: Any) -> None:
    """Use this `tinker.ServiceClient` in all later trials, such as a trainer's: some losses need
    that sampling and training share a session. None restores the agent's own services."""
    global _given_service
    _given_service = service


def url_and_key(
    options: BasicLoopOptions, provider: str, agent_env: dict[str, str]
) -> tuple[str | None, str | None]:
    """The URL and the API key of the model's server, None for the client's default. They come from
    an option, a variable of the agent (`--ae`) or one of the process, such as OPENAI_BASE_URL. The
    provider is tinker, vllm, or litellm's name for the server, such as openai. Raises ValueError if
    Tinker's packages or vLLM's URL are missing, or if Tinker's SDK would find no key."""
    if provider == "tinker" and not importlib.util.find_spec("tinker_cookbook"):
        raise ValueError("the Tinker packages are missing: `pip install 'harbor[tinker]'`")
    # In a job that is resumed Harbor has masked the keys, as in sk-r****456. They do not count.
    env = os.environ | {name: text for name, text in agent_env.items() if "****" not in text}
    prefix = provider.upper()
    url = options.api_base or env.get(f"{prefix}_BASE_URL") or env.get(f"{prefix}_API_BASE")
    key = options.llm_kwargs.get("api_key") or env.get(f"{prefix}_API_KEY")
    if key:
        # No blanks: a key from a file often ends in a newline, and HTTP errors show such a key.
        key = "".join(str(key).split())
    elif provider == "tinker" and not _given_service and not tinker_has_key():
        raise ValueError("no API key for Tinker: set TINKER_API_KEY, or another model_client")
    if provider == "vllm" and not url:
        raise ValueError("vllm needs api_base or VLLM_BASE_URL, such as http://localhost:8000")
    if url and provider in ("openai", "hosted_vllm"):
        # A server of your own has its API under /v1, and litellm wants a key for it.
        url = re.sub(r"(:\d+)/?$", r"\1/v1", url)
        key = key or "none"
    return url, key


def tinker_has_key() -> bool:
    """True if Tinker's SDK finds a key by itself, which 0.38 and later may have stored."""
    try:
        from tinker.auth import tinker_has_credentials
    except ImportError:
        return False
    return tinker_has_credentials()


class StopReason(StrEnum):
    """Why a run ended. A trial that ended in ERROR or by Ctrl-C is not scored by Harbor, unless its
    task has several steps. `trial_to_trajectory` leaves out each trial with such a step."""

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


# The lists of a RolloutDetail with one entry per turn. `Turn` has attributes of the same names.
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
# The finish reasons of complete replies. After another one (length, abort, ...) nothing is run. If
# the agent warns of "finish reason 'x'" where a reply is complete, add x here.
END_REASONS = {"stop", "stop_sequence", "end_turn", "eos", "eos_token", "complete", "completed"}


@dataclass
class Turn(LLMResponse):
    """One model call. The ids are exactly as sampled.

    Attributes:
        content: The reply's text. `sample` takes the thinking out of it.
        reasoning_content: The thinking.
        sent: The text that was sent: the instruction, or a script's output.
        prompt_token_ids: One id per token of the whole prompt, or None.
        completion_token_ids: One id per sampled token, the stop token included, or None.
        logprobs: One natural logarithm per sampled token, or None. vLLM gives those of the raw
            model, before temperature and top_p, unless it has --logprobs-mode processed_logprobs.
        extra: Other JSON values of the client (Tinker: sequence_id; vLLM: routed_experts).
        finish_reason: The server's word for why the reply ended, in lower case.
        timestamp: When the reply came, in ISO 8601.
    """

    # LLMResponse gives defaults to its other fields, but not to `content`.
    content: str = ""
    sent: str = ""
    finish_reason: str = "stop"
    timestamp: str | None = None

    def __post_init__(self) -> None:
        self.content = valid_text(self.content)
        self.reasoning_content = valid_text(self.reasoning_content)
        self.finish_reason = str(self.finish_reason).lower()
        self.extra = self.extra or {}
        # The client gave no usage: count the tokens.
        self.usage = self.usage or UsageInfo(
            prompt_tokens=len(self.prompt_token_ids or []),
            completion_tokens=len(self.completion_token_ids or []),
            cache_tokens=0,
            cost_usd=0.0,
        )

    @property
    def cut_off(self) -> bool:
        """True if the reply is incomplete. Nothing in it is run."""
        return self.finish_reason not in END_REASONS

    @property
    def all_ids(self) -> list[int]:
        """The ids of the prompt and the completion: the next exact prompt begins with them."""
        return (self.prompt_token_ids or []) + (self.completion_token_ids or [])

    @property
    def is_trainable(self) -> bool:
        """True if the prompt's ids are here, and every sampled token has a finite logprob."""
        ids, logprobs = self.completion_token_ids, self.logprobs or []
        # vLLM writes -9999.0 for a logprob that it does not have. NaN fails any comparison.
        is_finite = all(x is not None and -9999.0 < x < math.inf for x in logprobs)
        is_aligned = ids is not None and len(ids) == len(logprobs)
        return bool(self.prompt_token_ids) and is_aligned and is_finite


# The tags that open and close thinking. The last two are for gpt-oss and Inkling, which write
# headers in place of tags. The header of the answer closes the thinking:
#
#     <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
THINKING_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>": "<channel|>",
    "<|channel|>": "<|channel|>final<|message|>",
    "<|message_model|>": "<|message_model|><|content_text|>",
}
# The opening tags are tried first, because those two closing tags begin with them.
_TAG = re.compile("|".join(map(re.escape, [*THINKING_TAGS, *THINKING_TAGS.values()])))
_CODE = re.compile(
    r"(?s)```(?:(?!```).)*```(?!\w)"  # A block. ``` with a language would open another one.
    r"|(?<!`)`[^`\n]+`(?!`)"  # `A piece of a line`
)


def split_thinking(text: str) -> tuple[str, str]:
    """Split a reply into thinking and answer. The thinking is at the front, from an opening tag to
    its closing tag, or to the end of the text."""
    thinking = ""
    # Take one thought after another off the front.
    while tag := _TAG.match(text.lstrip()):
        # A closing tag in front closes an empty thought.
        closing_tag = THINKING_TAGS.get(tag[0], tag[0])
        thought, _, text = text.partition(closing_tag)
        thinking += thought.lstrip().removeprefix(tag[0])
        text = text.lstrip()
    return thinking, text


def split_untagged_thinking(text: str) -> tuple[str, str]:
    """Split off thinking that the prompt of a chat endpoint may have opened: then the first tag is
    a closing one. (A tag in code does not count: a command may write </think>.)"""
    # Blanks replace the code, so that the tag keeps its position.
    first = _TAG.search(_CODE.sub(lambda found: " " * len(found[0]), text))
    if first and first[0] in THINKING_TAGS.values():
        return text[: first.start()], text[first.end() :].lstrip()
    return "", text


# A prompt's token ids, and the text of the last few ids, in which a template may open thinking.
Rendered = tuple[list[int], str]


class TokenClient(ABC):
    """A client that sends exact prompts: the token ids of a prompt begin with the previous turn's
    prompt and completion ids. The limits count tokens."""

    context_limit: int
    max_tokens: int
    # Regular expressions that match the model's special tokens.
    special_tokens: list[str]
    # The ids of `next_prompt`'s probe up to its reply, for all trials that share the client.
    _probe_start: list[int] | None = None

    @abstractmethod
    async def render(self, messages: list[dict]) -> Rendered:
        """Render messages with the chat template, ready for a reply. Raises any server error."""

    @abstractmethod
    async def generate(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        """Sample a reply to a prompt. Raises any server error."""

    def plain_text(self, text: str) -> str:
        """The text with a zero-width space after the first character of each special token. The
        tokenizer then makes ordinary tokens of it."""
        if not self.special_tokens:
            return text
        # Only the first character is matched, so that tokens which overlap are found, too.
        return re.sub(f"(?={'|'.join(self.special_tokens)}).", "\\g<0>\u200b", text)

    async def call(
        self, prompt: str, message_history: list[dict], previous_ids: list[int], **others: Any
    ) -> Turn:
        """Sample a reply to `prompt`, which is the new message. `previous_ids` are the history as
        sampled; without them it is rendered. Chat's other arguments are not used. Raises
        ContextLengthExceededError if there is no room for a reply, and any error of the server."""
        messages = [*message_history, {"role": "user", "content": prompt}]
        ids, end = await self.next_prompt(messages, previous_ids)
        room = self.context_limit - len(ids)
        if room < 1:
            raise ContextLengthExceededError(f"the prompt fills the context: {len(ids)} tokens")
        turn = await self.generate(ids, min(self.max_tokens, room))
        for tag in THINKING_TAGS:
            # The template has opened thinking in the prompt, so the reply lacks the opening tag.
            if end.rstrip().endswith(tag):
                turn.content = tag + turn.content
        return turn

    async def next_prompt(self, messages: list[dict], previous_ids: list[int]) -> Rendered:
        """The prompt for the next reply: the previous ids, and what the template puts after them.

        Earlier turns are not rendered again, because their ids must stay as they were sampled. What
        the template puts after a reply is called the tail: the stop token, the new message, and the
        header of the next reply. It is found in three steps:

        1. Render a short conversation that ends in the new message, called the probe:

            <|im_start|> user a <|im_end|> <|im_start|> assistant b
            <|im_end|> <|im_start|> user NEW <|im_end|> <|im_start|> assistant

        2. Render it with "c" for "b". The first id that differs is the reply. The tail comes next.
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
        # Step 1.
        ids, end = await self.render([*start, {"role": "assistant", "content": "b"}, new])
        # Step 2. What it found is kept, and is found again only if the template's start differs.
        if self._probe_start is None or ids[: len(self._probe_start)] != self._probe_start:
            other, _ = await self.render([*start, {"role": "assistant", "content": "c"}, new])
            pairs = zip(ids, other, strict=False)
            # If a template does not show the reply, nothing differs, and the tail is empty.
            n_common = next((n for n, (x, y) in enumerate(pairs) if x != y), len(ids))
            self._probe_start = ids[: n_common + 1]
        tail = ids[len(self._probe_start) :]
        # Step 3. Inkling ends a reply in two stop tokens.
        for n_stop in (1, 2):
            if previous_ids[-n_stop:] == tail[:n_stop]:
                return previous_ids + tail[n_stop:], end
        return await self.render(messages)


def says_context_is_full(error: Exception) -> bool:
    """True if the error says that the prompt is too long (in the phrases that Harbor knows), and
    blames the request by Tinker's category or HTTP's status. A timeout may say "took too long"."""
    is_user_error = str(getattr(error, "category", "")) == "user"
    is_bad_request = getattr(error, "status_code", None) in (400, 413, 422)
    phrases = "(?i)context ?window|context[ _]length|maximum context|token limit|too long"
    return (is_user_error or is_bad_request) and bool(re.search(phrases, str(error)))


@functools.lru_cache
def tinker_service(url: str | None, key: str | None) -> Any:
    """The service that all Tinker clients of a server share: each service has a session with
    Tinker, and about 11 file descriptors. If URL or key are None, the SDK finds its own."""
    import tinker

    return tinker.ServiceClient(base_url=url, api_key=key)


def open_checkpoint(source: dict, url: str | None, key: str | None) -> Any:
    """A sampling client. `source` holds the arguments of `create_sampling_client`. Raises any SDK
    error."""
    import tinker

    def open_in(service: Any) -> Any:
        created = service.create_sampling_client(**source)
        # SDK 0.38 and later give a future.
        return created.result() if hasattr(created, "result") else created

    with _service_lock:
        if _given_service:
            return open_in(_given_service)
        try:
            return open_in(tinker_service(url, key))
        except tinker.TinkerError:
            # The service's session may have ended, so try a new one. (A missing checkpoint raises
            # the same error, and the new service raises it again.)
            tinker_service.cache_clear()
            return open_in(tinker_service(url, key))


class TinkerClient(TokenClient):
    """Tinker, by tinker-cookbook's renderer. Harbor's TinkerLLM reports a cut-off reply as complete
    (0.13 to 0.24) or drops its ids (0.25), and opens a session for each checkpoint."""

    def __init__(
        self,
        options: BasicLoopOptions,
        model: str,
        api_base: str | None,
        api_key: str | None,
        **args: Any,
    ) -> None:
        import tinker
        from tinker_cookbook.model_info import get_recommended_renderer_name
        from tinker_cookbook.renderers import get_renderer
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        name = options.renderer_name or get_recommended_renderer_name(model)
        self._tokenizer = get_tokenizer(model)
        with _tokenizer_lock:
            self._renderer = get_renderer(name, self._tokenizer)
            # A list of token ids, or of texts: the renderer role_colon has one text.
            stop = self._renderer.get_stop_sequences()
            self._endings = [s if isinstance(s, str) else self._tokenizer.decode([s]) for s in stop]
            # Empty for Inkling, whose tokenizer turns no text into a special token.
            vocabulary = getattr(self._tokenizer, "get_added_vocab", dict)()
        # Base models may stop at their eos_token. Inkling ends each message with <|end_message|>.
        self._endings += [self._tokenizer.eos_token or "", "<|end_message|>"]
        # Single characters and runs of blanks, which some vocabularies add, are in ordinary text.
        names = [token for token in vocabulary if len(token.strip()) > 1]
        self.special_tokens = [re.escape(name) for name in names]
        self.context_limit = options.context_limit or 32_000
        self.max_tokens = options.max_tokens
        # The other arguments go to `create_sampling_client`, which refuses names that it does not
        # know. (SamplingParams would ignore them.)
        parameters = tinker.SamplingParams.model_fields
        sampling = {name: args.pop(name) for name in args.keys() & parameters}
        self._params = tinker.SamplingParams(stop=stop, **sampling)
        source = {"model_path": options.model_path} if options.model_path else {"base_model": model}
        self._sampling_client = open_checkpoint(source | args, api_base, api_key)

    async def render(self, messages: list[dict]) -> Rendered:
        with _tokenizer_lock:
            ids = self._renderer.build_generation_prompt(messages).to_ints()
            return ids, self._tokenizer.decode(ids[-8:])

    async def generate(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        import tinker

        response = self._sampling_client.sample(
            prompt=tinker.ModelInput.from_ints(prompt_ids),
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
            logprobs=sequence.logprobs,
            finish_reason=sequence.stop_reason,
            # SDK 0.26 and later.
            extra={"sequence_id": getattr(sequence, "sequence_id", None)},
        )
        turn.usage.cache_tokens = response.prompt_cache_hit_tokens or 0
        return turn


# For VllmClient: special tokens of Gemma, Llama, Mistral, GLM, Qwen, Cohere, EXAONE, Seed, MiniMax
# and StarCoder. It has the server tokenize them, and those that stay one token are its model's. Add
# those of your model.
SPECIAL_NAMES = """
<s> </s> <pad> <unk> <mask> <cls> <sep> <bos> <eos> <sop> <eop> [CLS] [SEP] [PAD] [UNK] [MASK]
[gMASK] [sMASK] [BOS] [EOS] <think> </think> <tool_call> </tool_call> <tool_response>
</tool_response> <tool_result> </tool_result> <arg_key> </arg_key> <arg_value> </arg_value> <image>
<img> </img> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>
<BOS_TOKEN> <EOS_TOKEN> <PAD> <UNK> [INST] [/INST] [THINK] [/THINK] [AVAILABLE_TOOLS]
[/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CONTENT] [SYSTEM_PROMPT]
[/SYSTEM_PROMPT] [MODEL_SETTINGS] [/MODEL_SETTINGS] [ARGS] [CALL_ID] [IMG] [IMG_BREAK] [IMG_END]
[@BOS@] <seed:bos> <seed:eos> <seed:pad> <seed:think> </seed:think> <seed:tool_call>
</seed:tool_call> <minimax:tool_call> </minimax:tool_call> ]~b] ]~!b[ [e~[ <fim_prefix> <fim_middle>
<fim_suffix> <fim_pad> <filename> <file_sep> <repo_name> <reponame> <gh_stars> <issue_start>
<issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output>
<empty_output> <commit_before> <commit_msg> <commit_after>
"""
# Names of these shapes count as special tokens of any model: <|im_end|> and <|turn>; <turn|>;
# [|user|]; the numbered names of Gemma, Nemotron and T5. FF5C is DeepSeek's full-width bar.
SPECIAL_SHAPES = [
    r"<[|\uFF5C][^<>\s]{1,99}>",
    r"<[^<>\s]{1,99}[|\uFF5C]>",
    r"\[\|\w+\|\]",
    r"<(?:unused|SPECIAL_|extra_id_)\d+>",
]


class VllmClient(TokenClient):
    """vLLM by token ids: /tokenize renders, /v1/completions samples (tested with 0.32)."""

    def __init__(
        self,
        options: BasicLoopOptions,
        model: str,
        api_base: str,
        api_key: str | None,
        timeout: float = 600,
        max_retries: int = 5,
        extra_headers: dict | None = None,
        extra_body: dict | None = None,
        **body: Any,
    ) -> None:
        from openai import AsyncOpenAI, NotFoundError, OpenAI

        self.max_tokens = options.max_tokens
        server = {
            # /tokenize is not under /v1.
            "base_url": api_base.rstrip("/").removesuffix("/v1"),
            # The openai package wants a key. A server without keys takes any.
            "api_key": api_key or "none",
            "timeout": timeout,
            "max_retries": max_retries,
            "default_headers": extra_headers,
        }
        # The other arguments go into each request for a completion.
        self._body = body | (extra_body or {})
        # litellm calls a model on vLLM hosted_vllm/<its name>.
        self._body["model"] = model.removeprefix("hosted_vllm/")
        self._template_kwargs = self._body.pop("chat_template_kwargs", {})
        self._body |= options.model_dump(include={"session_id"}, exclude_none=True)
        # It is never closed, because Harbor does not say when a job ends.
        self._http = AsyncOpenAI(**server)
        question = {
            "model": self._body["model"],
            "prompt": SPECIAL_NAMES,
            "add_special_tokens": False,
            "return_token_strs": True,
        }
        try:
            # This client is synchronous, because `_build_llm` runs in a thread.
            # cast_to=object: the answer is plain JSON.
            answer = OpenAI(**server).post("/tokenize", body=question, cast_to=object)
            # A name that comes back as one token is special.
            names = [name for name in SPECIAL_NAMES.split() if name in answer["token_strs"]]
            server_limit = answer["max_model_len"]
        except (NotFoundError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"no such model, or no vLLM server (then use model_client=litellm): {error}"
            ) from error
        self.context_limit = min(server_limit, options.context_limit or server_limit)
        self.special_tokens = [*SPECIAL_SHAPES, *map(re.escape, names)]

    async def render(self, messages: list[dict]) -> Rendered:
        body = {
            "model": self._body["model"],
            "messages": messages,
            "add_generation_prompt": True,
            "chat_template_kwargs": self._template_kwargs,
            "return_token_strs": True,
        }
        answer = await self._http.post("/tokenize", body=body, cast_to=object)
        # Token strings have these characters in place of newlines and blanks.
        end = re.sub("Ċ|Ġ|▁|<0x0A>", " ", "".join(answer["token_strs"][-8:]))
        return answer["tokens"], end

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
        answer = await self._http.post("/v1/completions", body=body, cast_to=object)
        reply = answer["choices"][0]
        turn = Turn(
            # Cohere puts its answer between these marks.
            content=re.sub(r"<\|(START|END)_RESPONSE\|>", "", reply["text"]),
            prompt_token_ids=prompt_ids,
            completion_token_ids=reply.get("token_ids"),
            logprobs=(reply.get("logprobs") or {}).get("token_logprobs"),
            finish_reason=reply["finish_reason"],
            extra={"routed_experts": reply.get("routed_experts")},
        )
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        turn.usage.cache_tokens = details.get("cached_tokens") or 0
        return turn


class UsageWithReason(UsageInfo):
    """The usage of a reply at a chat endpoint, and (not in its dump) why the reply ended."""

    finish_reason: str = Field(exclude=True)


def chat_client(options: BasicLoopOptions, model: str, **args: Any) -> Any:
    """Make a LiteLLM of Harbor's that also returns replies which were cut off.

    For the finish reason "length" LiteLLM raises an error, and the ids and the cost are lost. Just
    before it looks at the reason, it calls `_extract_usage_info` (private; Harbor 0.13 to 0.25).
    The override saves the reason in the usage, where `call` finds it, and sets it to "stop".
    """
    # Importing LiteLLM takes seconds, so the class is defined in here.
    from harbor.llms.lite_llm import LiteLLM

    class ChatClient(LiteLLM):
        async def call(self, prompt: str, **request: Any) -> Turn:
            response = await super().call(prompt, **request)
            # The Responses API does not call that method: a cut-off reply counts as complete.
            reason = getattr(response.usage, "finish_reason", "stop")
            turn = Turn(**vars(response), finish_reason=reason)
            # A server that gives the reasoning has taken it out of the text.
            if not turn.reasoning_content:
                turn.reasoning_content, turn.content = split_untagged_thinking(turn.content)
            return turn

        def _extract_usage_info(self, response: Any) -> UsageInfo:
            usage = super()._extract_usage_info(response)
            choice = response["choices"][0]
            # litellm replaces an unknown finish reason by "stop", and keeps the original here.
            fields = getattr(choice, "provider_specific_fields", None) or {}
            reason = fields.get("native_finish_reason") or choice["finish_reason"]
            choice["finish_reason"] = "stop"
            return UsageWithReason(**usage.model_dump(), finish_reason=reason)

        def get_model_output_limit(self) -> int:
            # With use_responses_api (in llm_kwargs), LiteLLM sends this in place of max_tokens.
            return options.max_tokens

    args |= options.model_dump(
        include={"max_tokens", "session_id", "collect_rollout_details"}, exclude_none=True
    )
    return ChatClient(model_name=model, **args)


@dataclass(frozen=True)
class Trajectory:
    """A trial as a trainer sees it. (ATIF's trajectory is a conversation for people to read.)

    Attributes:
        turns: The trainable turns of all steps: ids, logprobs and `extra`, but no text.
        reward: The reward named "reward", or else the only one. None if there is no such reward.
        stop_reason: The last step's `StopReason`, or your loop's word; None for other agents.
        trial: Harbor's result, with all rewards, tokens, cost and names.
    """

    turns: list[Turn]
    reward: float | None
    stop_reason: str | None
    trial: TrialResult


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`.

    None for a trial that is no training data:

    - It failed. (From Harbor 0.25 on, Harbor says so itself: `reward_valid`.)
    - One of its steps ended in ERROR.
    - It has neither a reward nor a trainable turn.

    Raises ValueError if ids and logprobs do not align, or a number is not finite.
    """
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    stop_reasons = [(context.metadata or {}).get("stop_reason") for context in contexts]
    rewards = getattr(trial.verifier_result, "rewards", None) or {}
    errors = {getattr(part.exception_info, "exception_type", None) for part in (trial, *steps)}
    # Harbor scores a trial after these errors.
    is_valid = errors <= {None, "AgentTimeoutError", "NonZeroAgentExitCodeError"}
    # From 0.25 on, Harbor decides this itself. (Without rewards reward_valid is always False.)
    if rewards and hasattr(trial, "reward_valid"):
        is_valid = trial.reward_valid
    if not is_valid or StopReason.ERROR in stop_reasons:
        return None
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"trial {trial.trial_name}: a reward is not a finite number: {rewards}")
    reward = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    turns = [turn for context in contexts for turn in turns_of(context)]
    return Trajectory(turns, reward, stop_reasons[-1], trial) if rewards or turns else None


# The users of earlier versions import it by this name.
_trial_to_trajectory = trial_to_trajectory


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, in a list, with an entry for each of these turns; None if there are
    none. (The caller leaves out turns that are not trainable, so that all lists stay aligned.)"""
    detail = {name: [getattr(turn, name) or [] for turn in turns] for name in _TOKEN_FIELDS}
    names = {name for turn in turns for name in turn.extra}
    detail["extra"] = {name: [turn.extra.get(name) for turn in turns] for name in names}
    return [detail] if turns else None


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The trainable turns of a run, from its `rollout_details`. Raises ValueError if the lists do
    not align."""
    for detail in context.rollout_details or []:
        columns = {name: detail.get(name) or [] for name in _TOKEN_FIELDS}
        columns |= detail.get("extra") or {}
        # Each list has one entry per turn.
        for row in zip(*columns.values(), strict=True):
            values = dict(zip(columns, row, strict=True))
            ids = {name: values.pop(name) for name in _TOKEN_FIELDS}
            turn = Turn(**ids, extra=values)
            if not turn.is_trainable:
                raise ValueError("ids and logprobs differ in length, or a logprob is not finite")
            yield turn


def write_file(path: Path, text: str) -> None:
    """Write a file without opening what is there: the folder may be mounted as /logs/agent in the
    container, and a command may have left a link or a pipe. So a new file is written, and renamed.
    Raises OSError, for instance if a command left a folder there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    fresh.write_bytes(text.encode())
    fresh.replace(path)


def valid_text(text: str | None) -> str:
    """Text that tokenizers and files accept: a lone surrogate becomes "?", None becomes ""."""
    return (text or "").encode("utf-8", "replace").decode()


# "list" finds blocks in list items. With "code" a line that is indented by four is no fence.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "code"]).disable("inline")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The ``` blocks of a Markdown text, as (language in lower case, content without NULs). A block
    that is not closed, or that stands inside another one or inside ~~~, does not count."""
    blocks = []
    # The parser recognises a closing fence only if a newline follows, so one is added.
    for token in _MARKDOWN.parse(text.replace("\0", "") + "\n"):
        if token.markup.startswith("`"):
            first_line, end_line = token.map
            # Beside its content a closed block has two lines, its fences. One left open has one.
            if end_line - first_line == token.content.count("\n") + 2:
                language = "".join(token.info.lower().split()[:1])
                blocks.append((language, token.content))
    return blocks


# A script that writes more is killed, because Harbor keeps all output of an exec in memory.
FLOOD_BYTES = 4_000_000
# Three limits for a script, from its start. Each is there in case the one before fails:
#     seconds       `timeout` kills it; the model sees the output so far
#     seconds + 30  the agent stops waiting, and kills it by another exec
#     seconds + 90  exec gives up, with Docker by a RuntimeError, which would end the run
ANSWER_MARGIN_SEC = 30
EXEC_MARGIN_SEC = 90
# How long the agent waits for the exec that kills.
KILL_TIMEOUT_SEC = 15
# Exit codes that the model sees.
TIMED_OUT = 124
KILLED = 137

# This command runs the bash code in the variable BASIC_LOOP_CODE. The agent runs _SHELL with it,
# and _SHELL runs the script with it. (A script's own `pkill -f` would find code in an argument.)
# The variable is expanded before `unset` runs: bash has the code, and its children do not.
_RUN_CODE = """bash -c 'eval "unset BASIC_LOOP_CODE; $BASIC_LOOP_CODE"'"""

# This bash program runs a script. Its arguments are the time limit and FLOOD_BYTES. It prints
#
#     :MARK:<base64 of the output, followed by "end-of-MARK CODE SECONDS" and a newline>
#
# - Base64: some environments change what a command prints.
# - The end words: a server in the background may keep the pipe open, so sed (below) looks for them.
#   The server may have written half a line before, so they need not begin a line.
# - MARK is random hex. Each process of the script has it in its environment, where `kill_script`
#   finds it. A script that reads it can forge the end words, and deceives its own model only.
# - It writes no file, because disks may be full. It needs bash 4.4, coreutils, sed and grep.
_SHELL = r"""
# The image may have set these options by BASH_ENV or SHELLOPTS. Each would break this program.
set +em +o posix
# bash reports killed processes on stderr, and the model would see that.
exec 2>/dev/null
# lastpipe lets mapfile run in this shell. extglob lets the check below read patterns like !(keep).
shopt -s lastpipe extglob
# The blocks come in one base64, with a NUL after each. `mapfile -d` needs bash 4.4.
printf %s "$BASIC_LOOP_BLOCKS" | base64 -d | mapfile -d "" -t blocks
[ "${#blocks[@]}" != 0 ] || { echo "not run: it needs bash 4.4 and base64"; exit 127; }
# An empty line after each block keeps a trailing backslash from joining two blocks.
printf -v script "%s\n\n" "${blocks[@]}"
# A block that ends inside a quote, a here-document or a command would swallow the next block.
# After `set -n` bash only parses, even on that line. It reports such a block in these phrases.
unfinished="unexpected EOF|unexpected end of file|delimited by end-of-file"
for block in "${blocks[@]}"; do
  [[ $(LC_ALL=C; eval "set -n; $block" 2>&1) =~ $unfinished ]] &&
    script="echo '[nothing was run: a block is unfinished]'; exit 2"
done
unset BASIC_LOOP_BLOCKS
printf ":%s:" "$BASIC_LOOP_MARK"
# The script writes to a pipe, and then printf writes the end words. sed and cat read it as fd 5.
exec 5< <(
  BASIC_LOOP_CODE=$script timeout -s KILL "$1" @RUN_CODE@ </dev/null 2>&1
  code=$?
  # If another process still has this pipe as its stdout, such as the tee of `exec > >(tee log)`,
  # it gets a moment to write what it has left.
  for pid in /proc/[0-9]*; do
    [ "$pid" != "/proc/$BASHPID" ] && [ "$pid/fd/1" -ef /dev/stdout ] && sleep 0.3 && break
  done
  # busybox's sed reads a line ahead, so an empty one follows.
  printf "end-of-%s %s %s\n\n" "$BASIC_LOOP_MARK" "$code" "$SECONDS"
)
# sed ends at the end words. A script's `ps` prints this line, which [e]nd does not match. LC_ALL=C:
# they may follow half a character. sed keeps a line in memory, so the ulimit stops it at an endless
# one. head ends a flood.
(ulimit -d 300000; LC_ALL=C exec sed "/[e]nd-of-$BASIC_LOOP_MARK/q") <&5 | head -c "$2" | base64
# sed leaves at most the empty line. So a `read` of 2 bytes returns 1 if no process has the pipe. If
# one in the background still has it, cat reads on: else SIGPIPE would kill that process.
read -r -t 0.1 -N 2 <&5
[ $? = 1 ] || { cat <&5 >/dev/null & }
""".replace("@RUN_CODE@", _RUN_CODE)


def script_command(blocks: list[str], mark: str, seconds: int) -> str:
    """The shell command that runs blocks as one script with a time limit in seconds."""
    encoded = base64.b64encode("".join(f"{block}\0" for block in blocks).encode()).decode()
    return (
        f"BASIC_LOOP_MARK={mark} BASIC_LOOP_BLOCKS={encoded} BASIC_LOOP_CODE={shlex.quote(_SHELL)} "
        f"exec {_RUN_CODE} bash {seconds} {FLOOD_BYTES}"
    )


async def run_script(
    blocks: list[str], environment: BaseEnvironment, seconds: int, shown_bytes: int
) -> str:
    """Run blocks as one script with a time limit in seconds. Returns the text that the model gets,
    with at most `shown_bytes` of the output. A TimeoutError of the environment's `exec` is told to
    the model as exit code 124; any other error is raised."""
    mark = uuid4().hex
    command = script_command(blocks, mark, seconds)
    # Modal takes 65,536 bytes of arguments.
    if len(command) > 65_000:
        return "Not run: the script is too long. Split it into smaller ones."
    try:
        async with asyncio.timeout(seconds + ANSWER_MARGIN_SEC) as timer:
            result = await environment.exec(command, timeout_sec=seconds + EXEC_MARGIN_SEC)
    except BaseException as error:
        # The script may still be running. Kill it before the next turn or the verifier.
        await kill_script(mark, environment)
        # exec may have answered a cancellation with an error of its own.
        if asyncio.current_task().cancelling():
            raise asyncio.CancelledError from error
        if timer.expired() or isinstance(error, TimeoutError):
            return f"Exit code: {TIMED_OUT}\nOutput:\n[no answer; the limit is {seconds} seconds]"
        raise
    code, output, kill_reason = parse_output(result, mark, seconds)
    if kill_reason:
        # Some of its processes may still be running.
        await kill_script(mark, environment)
    shown = middle_cut(output, shown_bytes).removesuffix("\n")
    texts = [text for text in (shown, kill_reason) if text] or ["(none)"]
    return "\n".join([f"Exit code: {code}", "Output:", *texts])


async def kill_script(mark: str, environment: BaseEnvironment) -> None:
    """Kill a script and what runs it, by another exec. If this is cancelled, that exec goes on."""
    # Kill each process that has the mark in its environment, and its process group.
    command = (
        f"for pid in $(grep -ls BASIC_LOOP_MARK={mark} /proc/[0-9]*/environ | cut -d / -f 3); do "
        "kill -9 $pid -$pid; done 2>/dev/null"
    )
    # The environment may be gone.
    with suppress(Exception):
        kill = environment.exec(command, timeout_sec=KILL_TIMEOUT_SEC + EXEC_MARGIN_SEC)
        await asyncio.shield(asyncio.wait_for(kill, KILL_TIMEOUT_SEC))


def parse_output(result: ExecResult, mark: str, seconds: int) -> tuple[int, bytes, str]:
    """From what the bash program printed: the exit code, the output, and why the script has to be
    killed ("" if it ended by itself)."""
    before, found, encoded = valid_text(result.stdout).partition(f":{mark}:")
    if not found:
        # The program did not get as far as the mark. What was printed says why.
        return result.return_code, (before + valid_text(result.stderr)).encode(), ""
    decoded = b""
    with suppress(ValueError):
        decoded = base64.b64decode(encoded)
    complete = re.fullmatch(rb"(?s)(.*)end-of-%b (\d+) (\d+)\n" % mark.encode(), decoded)
    if not complete:
        note = f"[the output is cut: more than {FLOOD_BYTES} bytes, or its reader was killed]"
        return KILLED, decoded, note
    output, code, n_seconds = complete.groups()
    # At the limit GNU's `timeout` exits with 137, uutils' with 124. Before it, a script may do so.
    if int(code) in (TIMED_OUT, KILLED) and int(n_seconds) >= seconds:
        return TIMED_OUT, output, f"[ended: the time limit of {seconds} seconds was reached]"
    return int(code), output, ""


def middle_cut(output: bytes, shown_bytes: int) -> str:
    """Cut the middle out of long output, and say how many bytes are left out."""
    n_left_out = len(output) - shown_bytes
    if n_left_out > 0:
        half = shown_bytes // 2
        parts = (output[:half], n_left_out, output[half + n_left_out :])
        output = b"%b\n[... %d bytes left out ...]\n%b" % parts
    return output.decode("utf-8", "replace")
