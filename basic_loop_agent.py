# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://... --ak max_turns=50

The agent samples from one model in one conversation, and runs one script per turn. It does not
compact long conversations, call tools natively or run commands in parallel. To add such a thing,
change the loop: `BasicLoopAgent.converse`.

Harbor calls `run` or `resume` once per instruction: once for most trials, once per step for a task
with several steps. A run is one such call. A turn is one model call and its reply. A rollout is the
token ids and log-probabilities of a run's turns. The answer is the last reply, without thinking.

The model's scripts run in the task's container. They can write to the agent's log folder, because
Harbor mounts it there. No other file of the host is in their reach.
"""

from __future__ import annotations

import asyncio
import base64
import copy
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
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from uuid import uuid4

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse
from harbor.llms.chat import Chat
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from markdown_it import MarkdownIt
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

# Older versions of Harbor lack some names.
try:
    # Harbor 0.23 and later has these.
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions
except ImportError:

    class AgentOptions(BaseModel, extra="forbid"): ...

    class AgentCapabilities(BaseModel): ...


try:
    # Harbor 0.24 and later has this.
    from harbor.utils.trajectory_utils import compute_model_usage
except ImportError:
    compute_model_usage = None
try:
    # Harbor 0.25 and later has this.
    from harbor.models.trial.error_policy import ERROR_POLICIES
except ImportError:
    ERROR_POLICIES = None


__version__ = "0.13.0"


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
    model_client: Literal["tinker", "litellm", "vllm", "sglang"] = "tinker"
    """Where replies are sampled: tinker; vllm or sglang, your own server, which gets token ids; or
    litellm, any chat API, which gets messages."""
    api_base: str | None = Field(None, pattern="^https?://")
    """URL of the server. Default: a variable such as VLLM_BASE_URL, or that of the provider."""
    top_p: PositiveFloat | None = Field(None, le=1)
    """Nucleus sampling: the smallest set of tokens with this total probability. null: not sent."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends and the trial is scored."""
    llm_kwargs: dict = Field({}, repr=False)
    """More arguments for the client, such as seed. Error messages do not show them."""
    collect_rollout_details: bool | None = None
    """Record token ids and logprobs; default: false for litellm, true for the others."""
    context_limit: PositiveInt | None = None
    """Not for litellm: maximum tokens of prompt and reply. Default: the server's limit, or 32000 if
    Tinker does not tell it."""
    interleaved_thinking: bool = False
    """Only for litellm: send the thinking back with each reply, as reasoning_content."""
    session_id: str | None = None
    """Not for tinker: sent with each call, for a router with sticky sessions. Default: the trial's
    name for vllm and sglang, none for litellm."""
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
        # An option that is null may be in llm_kwargs instead, but not the model's name and URL.
        options = {name for name, value in self if value is not None}
        duplicates = self.llm_kwargs.keys() & {*options, "model", "model_name", "api_base"}
        if duplicates:
            names = ", ".join(sorted(duplicates))
            raise ValueError(f"llm_kwargs holds {names}: use the option instead")
        # By `use_responses_api` and `model_api_format` Harbor uses code of its own for OpenAI's
        # Responses API. That loses usage and thinking.
        api_format = self.llm_kwargs.get("model_api_format")
        if self.llm_kwargs.get("use_responses_api") or api_format == "openai_responses":
            raise ValueError("for the Responses API name the model openai/responses/NAME instead")
        return self


class StopReason(StrEnum):
    """Why a run ended."""

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
# The finish reasons of complete replies. After another one (length, content_filter, ...) nothing is
# run. If the agent warns of "finish reason 'x'" where a reply is complete, add x here.
END_REASONS = {"stop", "stop_sequence", "end_turn", "eos", "eos_token", "complete", "completed"}


@dataclass
class Turn(LLMResponse):
    """One model call. The ids are exactly as sampled.

    Attributes of Harbor's LLMResponse:
        content: The reply's text, without thinking.
        reasoning_content: The thinking.
        usage: The tokens of prompt, reply and cache, and the cost in USD (0.0: not known). The
            run's totals are the sums of these.
        prompt_token_ids: One id per token of the whole prompt, or None.
        completion_token_ids: One id per sampled token, the stop token included, or None.
        logprobs: One natural logarithm per sampled token, or None. vLLM gives those of the raw
            model, before temperature and top_p, unless it has --logprobs-mode processed_logprobs.
        extra: Other JSON values of the client: sequence_id (Tinker), routed_experts (vLLM, SGLang),
            and n_aborts, how often the server aborted this reply before it was whole.

    More attributes:
        finish_reason: The server's word for why the reply ended, in lower case.
        timestamp: When the reply came, in ISO 8601.
        told: The texts from the queue that were sent before this reply, such as the instruction.
        observation: What the model gets after this reply: the output of its script. The loop sets
            it, and the next `sample` makes special tokens in it plain text, and sends it. "":
            nothing is sent.
    """

    # LLMResponse gives defaults to its other fields, but not to `content`.
    content: str = ""
    finish_reason: str = "stop"
    timestamp: str | None = None
    told: str = ""
    observation: str = ""

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
        """The ids of the prompt and of the reply, or an empty list if either is missing."""
        if self.prompt_token_ids is None or self.completion_token_ids is None:
            return []
        return self.prompt_token_ids + self.completion_token_ids

    @property
    def is_trainable(self) -> bool:
        """True if the prompt's ids are here, and every sampled token has a finite logprob."""
        ids, logprobs = self.completion_token_ids, self.logprobs or []
        # vLLM writes -9999.0 for a logprob that it does not have. NaN fails any comparison.
        is_finite = all(x is not None and -9999.0 < x < math.inf for x in logprobs)
        is_aligned = ids is not None and len(ids) == len(logprobs)
        return bool(self.prompt_token_ids) and is_aligned and is_finite


@dataclass
class Request:
    """What a client gets with the messages, and where it may leave a part of the reply.

    Attributes:
        previous_ids: The `all_ids` of the last turn, with which the next prompt begins. Empty: the
            client has to render the whole conversation.
        session_id: For a router with sticky sessions. None: nothing is sent.
        partial: A client that needs several calls for one reply sets this to what it has so far. If
            the run ends before the reply is whole, the agent records this part as a turn.
    """

    previous_ids: list[int] = field(default_factory=list)
    session_id: str | None = None
    partial: Turn | None = None


class ModelClient:
    """Samples the replies of a model. The trials of a job share it. Harbor's Chat takes it for one
    of Harbor's BaseLLMs, and calls `call` like theirs."""

    # The server's URL, for error messages. None: the default of its SDK.
    url: str | None = None

    async def connect(self) -> None:
        """Ask the server for its limits. Raises any error of the server."""

    async def call(
        self, prompt: str, message_history: list[dict], request: Request, **other: Any
    ) -> Turn:
        """Sample a reply, and split off its thinking. `prompt` is the text of the new message,
        which is not in `message_history` yet. `other` holds what else Chat may pass. Raises
        ContextLengthExceededError if there is no room for a reply, and any error of the server."""
        raise NotImplementedError

    def escape_special_tokens(self, text: str) -> str:
        """The text, with the model's special tokens made plain text, if the client knows them."""
        return text


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies, and records each turn.

    After a run the context holds the token counts, cost_usd (None if unknown), metadata and the
    rollout. `logs_dir` holds completion.txt, the last answer, and trajectory.json (ATIF).

    Attributes of the trial, which `setup` sets:
        client: The model client, which the trials of a job share.
        _introduction: What the model is told before the first instruction.

    Attributes of the conversation, which `run` begins and `resume` continues:
        chat: Harbor's Chat, which holds the messages.
        _queued: The texts that the next `sample` sends. Emptied when a turn is recorded. After a
            run without a turn those with which it began are put back, for `resume`.
        _last_turn: The last turn, also if an earlier run made it. None before the first one.
        _last_messages: A copy of `messages` after this turn, to notice if the loop edits them.

    Attributes of one run:
        instruction: What Harbor asks for.
        turns: The turns so far. Each holds what the model was told before it, and its observation.
        metadata: The loop may keep JSON values here, for the context's metadata.
    """

    options_model = BasicLoopOptions
    # Older versions of Harbor know fewer of these.
    capabilities = AgentCapabilities(
        **{
            name: True
            for name in ("atif", "resume", "skills", "mcp_servers")
            if name in AgentCapabilities.model_fields
        }
    )
    # The default system message if max_turns > 1. {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Nobody answers questions. Put the commands \
in fenced blocks that open with ```bash: the blocks of a reply run as one script, and its exit \
code and output are the next message. Each script starts in a fresh shell (files stay, variables \
and directory do not) and has {seconds} seconds. Use no pager and no editor. Send long output to a \
file, and look at it with head, tail or grep. When the task is done, reply without such a block."""
    # What the model is told if `bash_blocks` is None.
    unclosed_block: ClassVar[str] = "Nothing was run: a block lacks the line ``` that closes it."

    def __init__(self, *, extra_env: dict[str, str] | None = None, **kwargs: Any) -> None:
        """Create the agent of one trial. `kwargs` hold Harbor's arguments (logs_dir, model_name,
        ...) and the options, each by its name in BasicLoopOptions. `extra_env` holds the variables
        of `--ae KEY=value`, such as API keys. Raises ValueError for a bad option."""
        # `extra_env` is not passed on: Harbor (0.16 and later) would give it to each command in the
        # container, and scripts could read the keys.
        self._agent_env = extra_env or {}
        # From 0.23 on Harbor makes `self.options` of the arguments. Earlier ones ignore options.
        super().__init__(**kwargs)
        if not hasattr(BaseAgent, "parse_options"):
            names = self.options_model.model_fields.keys() & kwargs.keys()
            self.options = self.options_model(**{name: kwargs[name] for name in names})

        self.client: ModelClient | None = None
        self._introduction: list[str] = []

        self.chat: Chat | None = None
        self._queued: list[str] = []
        self._last_turn: Turn | None = None
        self._last_messages: list[dict] | None = None

        self.instruction = ""
        self.turns: list[Turn] = []
        self.metadata: dict[str, Any] = {}

    async def converse(self, environment: BaseEnvironment) -> StopReason | str:
        """Sample a reply, run its script, send the script's output with the next `sample`, and so
        on. Returns why the run ended: a StopReason, or a word of your own. A subclass may `tell`
        something and call this again: the run goes on, and `max_turns` counts all of its turns."""
        while len(self.turns) < self.options.max_turns:
            try:
                turn = await self.sample()
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW
            if turn.cut_off:
                return StopReason.MAX_TOKENS
            if self.options.max_turns == 1:
                return StopReason.COMPLETED
            blocks = self.bash_blocks(turn.content)
            if blocks is None:
                turn.observation = self.unclosed_block
            elif blocks:
                turn.observation = await self.execute(blocks, environment)
            else:
                return StopReason.COMPLETED
        return StopReason.MAX_TURNS

    def bash_blocks(self, reply: str) -> list[str] | None:
        """The blocks of a reply that `execute` gets: those for bash, sh and shell. A reply without
        any ends the run. None: the reply has such a block, and one of its blocks is not closed, so
        nothing may be run."""
        return fenced_blocks(reply, "bash", "sh", "shell")

    async def execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        """Run blocks as one script in the environment. Returns its exit code and its output, as the
        model gets them. The reply that holds the blocks is `self.turns[-1].content`. To end the run
        from here, raise an exception of your own, and catch it in `converse`. Raises any error of
        the environment."""
        script = await run_script(blocks, environment, self.options.command_timeout_sec)
        self.logger.debug(f"script: exit code {script.exit_code}, {script.seconds:.1f} seconds")
        return script.text(self.options.max_output_bytes)

    def tell(self, text: str) -> None:
        """Queue a text for the next `sample` of this run. Special tokens in it become plain text
        (not with model_client=litellm, which does not know them)."""
        self._queued.append(self._escaped(text))

    def _escaped(self, text: str) -> str:
        return self.client.escape_special_tokens(valid_text(text))

    @property
    def messages(self) -> list[dict]:
        """The conversation. The loop may edit the list in place: the next prompt is then rendered
        from it, and does not begin with the sampled ids."""
        return self.chat.messages

    async def sample(self) -> Turn:
        """Send the last turn's output and the queued texts, and record the reply as a turn. A
        subclass may override this. Raises RuntimeError if there is nothing to send, or if the first
        turn lacks ids; ContextLengthExceededError if a later prompt is too long; and any error of
        the client."""
        texts = list(self._queued)
        # In the first turn of a resumed run `turns` is empty, and `resume` has queued the last
        # observation.
        if self.turns and self.turns[-1].observation:
            texts.insert(0, self._escaped(self.turns[-1].observation))
        if not texts:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        prompt = "\n\n".join(texts)
        request = Request(session_id=self.options.session_id)
        if self.options.model_client in ("vllm", "sglang"):
            request.session_id = request.session_id or self._trial_name
        if self.messages == self._last_messages:
            request.previous_ids = self._last_turn.all_ids
        else:
            # This is the first turn, or the loop has edited the messages, so that the last turn's
            # ids do not belong to them. Nor does Chat's last response, whose id Chat sends for
            # OpenAI's Responses API (by a BaseLLM of your own).
            self.chat.reset_response_chain()
        try:
            turn = await self._call_model(prompt, request)
        except BaseException:
            if request.partial:
                self._keep_partial(prompt, request.partial)
            raise
        # From here to the end nothing is awaited, so that no cancellation loses the reply.
        self._add_turn(turn)
        # The turn is recorded before this check, so that its reply can be looked at. Later turns
        # without ids are no error: they are left out of the rollout, and counted.
        ids = (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        if self.options.collect_rollout_details and len(self.turns) == 1 and None in ids:
            raise RuntimeError("no token ids or logprobs came: set collect_rollout_details=false")
        # The ids are left out until the run ends, because they take long to write.
        self._write_trajectory()
        return turn

    async def _call_model(self, prompt: str, request: Request) -> Turn:
        try:
            # Chat calls `self.client.call(prompt=..., message_history=self.messages, request=...)`,
            # and then appends the prompt and the reply to `messages`.
            return await self.chat.chat(prompt, request=request)
        except Exception as error:
            if not is_context_full(error):
                # The next trial builds a new client, because this one may have lost its connection.
                forget(_clients, self.client)
                if self.client.url:
                    error.add_note(f"The model's server is {self.client.url}")
                raise
            if self._last_turn is None:
                raise RuntimeError(f"the first prompt is too long: {error}") from error
            self.logger.warning(f"the context is full: {error}")
            raise ContextLengthExceededError(str(error)) from error

    def _keep_partial(self, prompt: str, turn: Turn) -> None:
        """Record a part of a reply, after which the run ends. A later run may go on from it."""
        self.messages.append({"role": "user", "content": prompt})
        self.messages.append({"role": "assistant", "content": turn.content})
        # Chat's last response belongs to the turn before.
        self.chat.reset_response_chain()
        self._add_turn(turn)

    def _add_turn(self, turn: Turn) -> None:
        turn.told = "\n\n".join(self._queued)
        self._queued = []
        turn.timestamp = datetime.now(UTC).isoformat()
        self.turns.append(turn)
        self._last_turn = turn
        self._last_messages = copy.deepcopy(self.messages)
        n_in, n_out = turn.usage.prompt_tokens, turn.usage.completion_tokens
        self.logger.debug(
            f"turn {len(self.turns)}: {n_in} tokens in, {n_out} out, {turn.finish_reason!r}"
        )

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Check the options, Tinker's key, and the URL of a vLLM or SGLang server. Harbor 0.23 and
        later calls this before any trial. Raises ValueError."""
        options = cls.parse_options(kwargs, env)
        # A subclass that builds its own client may need no key and no URL.
        if cls._build_llm is BasicLoopAgent._build_llm:
            check_access(options, env or {})

    async def setup(self, environment: BaseEnvironment) -> None:
        """Get the model client, and list the task's skills. Raises ValueError for what is missing,
        and any error of the client or the environment."""
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        self._introduction = []
        self.client = await self._shared_client()
        if self.skills_dir:
            # The model sees each path, and the lines with the skill's name and description.
            command = f"head -v -n 10 -- {shlex.quote(self.skills_dir)}/*/SKILL.md 2>/dev/null"
            listing = await environment.exec(command, timeout_sec=60)
            text = f"Skills. Read a skill's file before you use it.\n\n{listing.stdout or ''}"
            self._introduction.append(text)
        for server in self.mcp_servers:
            self._introduction.append(f"MCP server: {server.model_dump_json(exclude_none=True)}")

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Start a new conversation, which begins with the task's skills and MCP servers. The turns
        are recorded even after an error. Raises any error of the client or the environment, or
        RuntimeRequestError in its place."""
        system = self.options.system_prompt
        if system is None and self.options.max_turns > 1:
            system = self.protocol.replace("{seconds}", str(self.options.command_timeout_sec))
        self.chat = Chat(self.client, self.options.interleaved_thinking)
        if system:
            self.messages.append({"role": "system", "content": valid_text(system)})
        self._last_turn = None
        self._last_messages = None
        self._queued = []
        for text in self._introduction:
            self.tell(text)
        await self._run_loop(instruction, environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Continue the conversation of the last `run`, for the later steps of a task. The model
        first gets the last turn's observation. If the last run made no turn, its instruction was
        not sent, and is sent now. Raises RuntimeError before the first `run`, and the errors of
        `run`."""
        if self.chat is None:
            raise RuntimeError("`resume` continues a conversation: call `run` first")
        if self.turns and self.turns[-1].observation:
            self.tell(self.turns[-1].observation)
        await self._run_loop(instruction, environment, context)

    async def _run_loop(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        self.instruction = valid_text(instruction)
        self.turns = []
        self.metadata = {}
        # Not by `tell`: the task's author may use special tokens on purpose.
        self._queued.append(self.instruction)
        opening = list(self._queued)
        stop_reason = StopReason.ERROR
        try:
            async with asyncio.timeout(self.options.max_seconds) as timer:
                stop_reason = await self.converse(environment)
        # Who ended the run? The error's class does not tell: a client may make an error of its own
        # of a cancellation, and an SDK may raise CancelledError by itself. So ask task and timer.
        except (Exception, asyncio.CancelledError) as error:
            if asyncio.current_task().cancelling():
                # Harbor has called `cancel` on this task. (`timer` takes its own `cancel` back.)
                stop_reason = StopReason.CANCELLED
                raise asyncio.CancelledError from error
            if timer.expired():
                # `max_seconds` are over. No error is raised, so that Harbor scores the trial.
                stop_reason = StopReason.ROLLOUT_TIMEOUT
            elif is_in_harbors_table(error):
                raise
            else:
                raise RuntimeRequestError(f"{type(error).__name__}: {error}") from error
        finally:
            self._record(stop_reason, context)
            # What the loop has queued is for this run only. If there is no turn, the opening was
            # not sent, and a later run sends it.
            self._queued = [] if self.turns else opening

    def _record(self, stop_reason: StopReason | str, context: AgentContext) -> None:
        """Write what the run leaves: first the context, then the files."""
        usages = [turn.usage for turn in self.turns]
        costs = [usage.cost_usd for usage in usages]
        context.n_input_tokens = sum(usage.prompt_tokens for usage in usages)
        context.n_output_tokens = sum(usage.completion_tokens for usage in usages)
        context.n_cache_tokens = sum(usage.cache_tokens for usage in usages)
        # Harbor's clients give 0.0 for an unknown price.
        context.cost_usd = sum(costs) if costs and all(costs) else None
        # SkyRL and verl call the number of turns n_episodes.
        metadata = {"stop_reason": stop_reason, "n_episodes": len(self.turns)}
        if self.options.collect_rollout_details:
            trainable = [turn for turn in self.turns if turn.is_trainable]
            context.rollout_details = rollout_details(trainable)
            metadata["n_turns_without_ids"] = len(self.turns) - len(trainable)
            # Prefix breaks are prompts that do not begin with the ids of the turn before.
            metadata["n_prefix_breaks"] = 0
            for earlier, later in itertools.pairwise(trainable):
                ids = earlier.all_ids
                if later.prompt_token_ids[: len(ids)] != ids:
                    metadata["n_prefix_breaks"] += 1
        context.metadata = json_values(metadata | self.metadata)
        last_turn = self.turns[-1] if self.turns else Turn()
        self._warn(stop_reason, last_turn)
        # Without a turn this empties the file, which may hold the answer of the step before.
        write_file(self.logs_dir / "completion.txt", last_turn.content)
        trajectory = self._write_trajectory(context)
        if compute_model_usage:
            # So Harbor need not read trajectory.json, which a script may have replaced by a pipe.
            context.model_usage = compute_model_usage(trajectory)

    def _warn(self, stop_reason: StopReason | str, turn: Turn) -> None:
        """Log what often explains a reward of 0."""
        if stop_reason == StopReason.MAX_TOKENS:
            self.logger.warning(f"the reply was cut off: finish reason {turn.finish_reason!r}")
        has_unrun_blocks = re.search("```|~~~", turn.content) and not turn.observation
        if stop_reason == StopReason.COMPLETED and has_unrun_blocks:
            self.logger.warning("none of the answer's blocks was run: see max_turns and `protocol`")
        if stop_reason == StopReason.COMPLETED and not turn.content.strip():
            self.logger.warning("the answer is empty: the reply may hold nothing but thinking")

    def _write_trajectory(self, context: AgentContext | None = None) -> atif.Trajectory:
        """Write trajectory.json. At the end of the run, `context` adds its totals and the ids."""
        steps = []
        if self.messages and self.messages[0]["role"] == "system":
            steps.append({"source": "system", "message": self.messages[0]["content"]})
        for turn in self.turns:
            if turn.told:
                steps.append({"source": "user", "message": turn.told})
            steps.append(self.trajectory_step(turn, with_ids=context is not None))
        if not self.turns:
            # ATIF wants at least one step.
            steps.append({"source": "user", "message": "\n\n".join(self._queued)})
        for n, step in enumerate(steps, start=1):
            step["step_id"] = n
        trajectory = atif.Trajectory(
            session_id=self.options.session_id or self._trial_name,
            agent={"name": self.name(), "version": self.version(), "model_name": self.model_name},
            steps=steps,
        )
        if context:
            trajectory.extra = context.metadata
            trajectory.final_metrics = atif.FinalMetrics(
                total_prompt_tokens=context.n_input_tokens,
                total_completion_tokens=context.n_output_tokens,
                total_cached_tokens=context.n_cache_tokens,
                total_cost_usd=context.cost_usd,
            )
        write_file(self.logs_dir / "trajectory.json", trajectory.model_dump_json(exclude_none=True))
        return trajectory

    def trajectory_step(self, turn: Turn, with_ids: bool) -> dict:
        """A turn as a step of trajectory.json, without a step_id. A subclass may override this: for
        instance, NeMo Gym does not train a step that has reasoning_content."""
        metrics = {
            "prompt_tokens": turn.usage.prompt_tokens,
            "completion_tokens": turn.usage.completion_tokens,
            "cached_tokens": turn.usage.cache_tokens,
            "cost_usd": turn.usage.cost_usd or None,
        }
        if with_ids and self.options.collect_rollout_details and turn.is_trainable:
            metrics |= {name: getattr(turn, name) for name in (*_TOKEN_FIELDS, "extra")}
        step = {
            "source": "agent",
            "message": turn.content,
            "reasoning_content": turn.reasoning_content or None,
            "timestamp": turn.timestamp,
            # This skips Pydantic's validation, which would look at each id of each prompt.
            "metrics": atif.Metrics.model_construct(**metrics),
        }
        if turn.observation:
            step["observation"] = {"results": [{"content": valid_text(turn.observation)}]}
        return step

    @property
    def _trial_name(self) -> str:
        # Harbor names a trial's folder after it. The logs are in its folder agent/.
        return self.logs_dir.parent.name

    def _build_llm(self) -> Any:
        """Build the client, in a thread, because the imports take seconds. Override this for a
        client of your own: a ModelClient, or any BaseLLM of Harbor's whose content is text. Raises
        ValueError, and any error of the client."""
        options = self.options
        check_access(options, self._agent_env)
        server = options.model_client
        args = copy.deepcopy(options.llm_kwargs)
        args |= options.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        if options.model_client == "litellm":
            from litellm import get_llm_provider

            given = args.get("custom_llm_provider")
            _, server, _, _ = get_llm_provider(self.model_name, given)
        url, key = url_and_key(options, server, self._agent_env)
        # The clients get it as `key`.
        args.pop("api_key", None)
        if options.model_client == "tinker":
            return TinkerClient(options, self.model_name, url, key, **args)
        if options.model_client == "litellm":
            return HarborClient(chat_llm(options, self.model_name, url, key, **args), url)
        return ServerClient(options, self.model_name, url, key, **args)

    async def _shared_client(self) -> ModelClient:
        """The client of all trials with the same options. The first trial builds it, the others
        wait. If that fails, the next one tries."""
        key = (
            # A client and its lock work in one event loop only.
            asyncio.get_running_loop(),
            # A subclass may build another client.
            type(self),
            self.model_name,
            # As text, because a dict cannot be part of a key.
            repr(self.options.model_dump(exclude={"session_id"})),
            repr(self._agent_env),
            _given_service,
        )
        async with _client_locks[key]:
            if key not in _clients:
                client = await asyncio.to_thread(self._build_llm)
                if not isinstance(client, ModelClient):
                    client = HarborClient(client)
                await client.connect()
                _clients[key] = client
            return _clients[key]


# The state of the process, which the trials of a job share:
#
# - The clients, one for all trials with equal options. After an error of a client, which may have
#   lost its connection, its entry is deleted: trials that have this client go on with it, and the
#   next trial builds a new one.
_clients: dict[tuple, ModelClient] = {}
# - A lock for each key, held while its client is built.
_client_locks: defaultdict[tuple, asyncio.Lock] = defaultdict(asyncio.Lock)
# - Tinker's services, by URL and key. Each has a session with Tinker and about 11 file descriptors,
#   so the clients of all checkpoints share it. After an error of one of them its entry is deleted,
#   because the session may have ended, and the next client opens a new one.
_tinker_services: dict[tuple[str | None, str | None], Any] = {}
# - The service of `use_service`, or None.
_given_service: Any = None
# - A lock for all tokenizers. A tokenizer raises "Already borrowed" if two threads use it at once,
#   and clients are built in threads.
_tokenizer_lock = threading.Lock()


def use_service(service: Any) -> None:
    """From now on, sample by this `tinker.ServiceClient`, for instance a trainer's: some losses
    need sampling and training in one session. None: use the agent's own services again."""
    global _given_service
    _given_service = service


def forget(entries: dict, value: Any) -> None:
    """Delete a client or a service that has failed from the dict that holds it."""
    for key, other in list(entries.items()):
        if other is value:
            del entries[key]


def url_and_key(
    options: BasicLoopOptions, provider: str, agent_env: dict[str, str]
) -> tuple[str | None, str | None]:
    """The URL and the API key of the model's server, None for the client's default. They come from
    an option, a variable of the agent (`--ae`) or one of the process, such as OPENAI_BASE_URL. The
    provider is tinker, vllm, sglang, or litellm's name for the server, such as openai."""
    # In a job that is resumed Harbor has masked the keys, as in sk-r****456. They do not count.
    env = os.environ | {name: text for name, text in agent_env.items() if "****" not in text}
    prefix = provider.upper()
    url = options.api_base or env.get(f"{prefix}_BASE_URL") or env.get(f"{prefix}_API_BASE")
    key = options.llm_kwargs.get("api_key") or env.get(f"{prefix}_API_KEY")
    if key:
        # No blanks: a key from a file often ends in a newline, and HTTP errors show such a key.
        key = "".join(str(key).split())
    if url and provider in ("openai", "hosted_vllm"):
        # A URL that ends in a port is a server of your own, which has its API under /v1:
        # http://host:8000 becomes http://host:8000/v1.
        url = re.sub(r"(:\d+)/?$", r"\1/v1", url)
        # litellm wants a key. A server without keys takes any.
        key = key or "none"
    return url, key


def check_access(options: BasicLoopOptions, agent_env: dict[str, str]) -> None:
    """Raise ValueError if Tinker's packages, its key, or the URL of a server are missing."""
    client = options.model_client
    url, key = url_and_key(options, client, agent_env)
    missing = ""
    if client == "tinker" and not importlib.util.find_spec("tinker_cookbook"):
        missing = "Tinker's packages: `pip install 'harbor[tinker]'`"
    elif client == "tinker" and not (key or _given_service or tinker_has_key()):
        missing = "Tinker's API key: set TINKER_API_KEY"
    elif client in ("vllm", "sglang") and not url:
        missing = f"the server's URL: set api_base=http://... or {client.upper()}_BASE_URL"
    if missing:
        others = "tinker (the default), vllm, sglang, litellm"
        raise ValueError(f"model_client={client} lacks {missing}. Other clients: {others}")


def tinker_has_key() -> bool:
    """True if Tinker's SDK finds a key by itself, which 0.38 and later may have stored."""
    with suppress(ImportError):
        from tinker.auth import tinker_has_credentials

        return tinker_has_credentials()
    return False


class RuntimeRequestError(RuntimeError):
    """The run failed, and its model is not to blame. Harbor (0.25 and later) has a table of errors
    by the names of their classes. With this name it does not score the trial, and may repeat it."""


def is_in_harbors_table(error: BaseException) -> bool:
    """True if Harbor knows from its table whether to score a trial after this error. After an error
    that is not in the table Harbor 0.26 scores it."""
    if isinstance(error, TimeoutError | asyncio.CancelledError):
        # Harbor takes TimeoutError for the agent's timeout, and CancelledError for Ctrl-C.
        return False
    # Harbor before 0.25 has no table, and scores no trial after an error.
    return ERROR_POLICIES is None or type(error).__name__ in ERROR_POLICIES


# How servers say that a prompt is too long: OpenAI, vLLM, Anthropic, Gemini, llama.cpp, xAI, GLM,
# DashScope. (A timeout may say "took too long".)
CONTEXT_IS_FULL = (
    "(?i)context[ _]?(window|length|size)|maximum context|token limit|(?<!took )too long"
    "|maximum prompt length|exceeds max length|range of input length"
)


def is_context_full(error: Exception) -> bool:
    """True if the error says that the prompt is too long."""
    if isinstance(error, ContextLengthExceededError):
        return True
    # Believe the text only if the request was at fault: by HTTP's status (llama.cpp sends 500), or
    # by Tinker's category.
    is_refused = getattr(error, "status_code", None) in (400, 413, 422, 500)
    is_refused |= str(getattr(error, "category", "")) == "user"
    return is_refused and bool(re.search(CONTEXT_IS_FULL, str(error)))


# How models mark thinking: pairs of regular expressions, for what opens it and what closes it. The
# comment above each pair is an example of a reply.
_THINK = r"(?:\w+[:|])?think(?:[:_]\w+)?"
THINKING_TAGS = [
    # <think>hm</think>hi, and the like: <seed:think>, <ifm|think>, <think:opensource>, <think_fast>
    (rf"<{_THINK}>", rf"</{_THINK}>"),
    # [THINK]hm[/THINK]hi
    (r"\[THINK\]", r"\[/THINK\]"),
    # <|START_THINKING|>hm<|END_THINKING|>hi
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    # <|open|>think<|sep|>hm<|close|>think<|sep|>hi
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
    # <|channel>thought hm<channel|>hi
    (r"<\|channel>", r"<channel\|>"),
    # <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
    (r"<\|channel\|>", r"<\|channel\|>final<\|message\|>"),
    # <|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>hi
    (r"<\|message_model\|>", r"<\|message_model\|><\|content_text\|>"),
]


def split_thinking(text: str) -> tuple[str, str]:
    """Split a reply into the thoughts at its front and the rest. A thought goes from an opening tag
    to its closing tag, or to the end of the text. A closing tag alone is an empty thought, as in
    <|channel|>final<|message|>hi."""
    # The closing tag is tried first, because some closing tags begin with the opening one.
    thought = "|".join(
        rf"{closing}|{opening}(.*?)(?:{closing}|\Z)" for opening, closing in THINKING_TAGS
    )
    thinking = ""
    while match := re.match(rf"\s*(?:{thought})\s*", text, re.DOTALL):
        # At most one of the groups, one for each pair of tags, has a text.
        thinking += "".join(group for group in match.groups() if group)
        text = text[match.end() :]
    return thinking, text


def without_thinking(turn: Turn) -> Turn:
    """The turn with the thinking of its content in reasoning_content."""
    thinking, content = split_thinking(turn.content)
    return replace(turn, content=content, reasoning_content=turn.reasoning_content + thinking)


def with_opening_tag(reply: str) -> str:
    """The reply of a chat endpoint, with <think> in front if it lacks that tag, because the
    template has written it into the prompt: "hm\\n</think>hi". Such a </think> stands at the start
    or the end of a line. Elsewhere, as in `grep "</think>" log`, it is part of the answer."""
    closing = re.search(rf"(?m)^</{_THINK}>|</{_THINK}>[ \t]*$", reply)
    if closing and not re.search(f"<{_THINK}>", reply[: closing.start()]):
        return f"<think>{reply}"
    return reply


class HarborClient(ModelClient):
    """Wraps a `BaseLLM` of Harbor's, which sends messages."""

    def __init__(self, llm: BaseLLM, url: str | None = None) -> None:
        self.llm = llm
        self.url = url

    async def call(
        self, prompt: str, message_history: list[dict], request: Request, **other: Any
    ) -> Turn:
        if request.session_id:
            other["session_id"] = request.session_id
        reply = await self.llm.call(prompt=prompt, message_history=message_history, **other)
        turn = Turn(**vars(reply))
        if not turn.reasoning_content:
            # The server has not split the thinking off.
            turn.content = with_opening_tag(turn.content)
        return without_thinking(turn)


def chat_llm(
    options: BasicLoopOptions, model: str, url: str | None, key: str | None, **args: Any
) -> BaseLLM:
    """Make a LiteLLM of Harbor's that also returns replies which were cut off."""
    # Importing LiteLLM takes seconds, so the class is defined in here.
    from harbor.llms.lite_llm import LiteLLM

    args |= options.model_dump(include={"max_tokens", "collect_rollout_details"})

    class ChatLLM(LiteLLM):
        """A patch: LiteLLM raises an error if a reply's finish reason is "length", and the reply's
        ids and cost are lost. So this class hides the reason from LiteLLM:

        1. `call` makes a copy of this object, to have one `finish_reason` for each call.
        2. LiteLLM's `call` first calls `_extract_usage_info`, which keeps the finish reason, and
           replaces it by "stop".
        3. `call` puts the reason that was kept into the turn.
        """

        finish_reason = "stop"

        async def call(self, prompt: str, session_id: str | None = None, **other: Any) -> Turn:
            if session_id:
                body, headers = args.get("extra_body") or {}, args.get("extra_headers") or {}
                other["extra_body"] = body | {"session_id": session_id}
                other["extra_headers"] = headers | {"X-Session-ID": session_id}
            one_call = copy.copy(self)
            try:
                reply = await LiteLLM.call(one_call, prompt, **other)
            except ContextLengthExceededError as error:
                # Harbor's error has no message. The server's error has one.
                raise ContextLengthExceededError(str(error.__context__)) from error
            return Turn(**vars(reply), finish_reason=one_call.finish_reason)

        def _extract_usage_info(self, response: Any) -> UsageInfo | None:
            # LiteLLM has no public place for this (Harbor 0.13 to 0.26 were looked at).
            choice = response["choices"][0]
            # litellm replaces an unknown finish reason by "stop", and keeps the original here.
            fields = getattr(choice, "provider_specific_fields", None) or {}
            self.finish_reason = fields.get("native_finish_reason") or choice["finish_reason"]
            choice["finish_reason"] = "stop"
            return super()._extract_usage_info(response)

    return ChatLLM(model_name=model, api_base=url, api_key=key, **args)


# How long a client waits after a server has aborted its call, before it goes on.
ABORT_PAUSE_SEC = 1.0


class TokenClient(ModelClient, ABC):
    """A client that sends exact prompts: the token ids of a prompt begin with the previous turn's
    prompt and completion ids. The limits count tokens."""

    context_limit: int
    max_tokens: int
    # Regular expressions that match the model's special tokens.
    special_tokens: list[str]

    @abstractmethod
    async def render(self, messages: list[dict]) -> list[int]:
        """Render messages with the chat template, ready for a reply. Raises any server error."""

    @abstractmethod
    async def decode(self, ids: list[int]) -> str:
        """The text of some ids, with special tokens. Raises any server error."""

    @abstractmethod
    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        """Sample a reply to a prompt. Raises any server error."""

    def escape_special_tokens(self, text: str) -> str:
        """The text with a zero-width space after the first character of each special token. The
        tokenizer then makes ordinary tokens of it."""
        if not self.special_tokens:
            return text
        # The regular expression matches the first character of each special token. It looks ahead
        # for the others, because two tokens may overlap, as "]~b]" and "]~!b[" do in "]~b]~!b[".
        return re.sub(f"(?={'|'.join(self.special_tokens)}).", "\\g<0>\u200b", text)

    async def call(
        self, prompt: str, message_history: list[dict], request: Request, **other: Any
    ) -> Turn:
        messages = [*message_history, {"role": "user", "content": prompt}]
        ids = await self.next_prompt(messages, request.previous_ids)
        opening_tag = await self.opening_tag(ids)
        room = min(self.max_tokens, self.context_limit - len(ids))
        if room < 1:
            raise ContextLengthExceededError(f"the prompt fills the context: {len(ids)} tokens")
        session = request.session_id
        turn = await self.generate(ids, room, session)
        turn.content = opening_tag + turn.content
        # A trainer that updates the weights aborts the calls under way. Go on from the ids so far.
        # If the server aborts on and on, the time limit of the run ends this.
        while turn.finish_reason == "abort" and turn.completion_token_ids is not None:
            request.partial = without_thinking(turn)
            n_left = room - len(turn.completion_token_ids)
            if n_left < 1:
                break
            await asyncio.sleep(ABORT_PAUSE_SEC)
            part = await self.generate(turn.all_ids, n_left, session)
            turn = with_continuation(turn, part)
        return without_thinking(turn)

    async def opening_tag(self, prompt_ids: list[int]) -> str:
        """The tag, such as <think>, with which the template has ended the prompt; or "". The model
        then goes on with its thinking, and its reply lacks this tag."""
        # Four tokens have room for a tag and a newline.
        end = await self.decode(prompt_ids[-4:])
        opening_tags = "|".join(opening for opening, _ in THINKING_TAGS)
        tag = re.search(rf"({opening_tags})\s*$", end)
        return tag[1] if tag else ""

    async def next_prompt(self, messages: list[dict], previous_ids: list[int]) -> list[int]:
        """The ids of the next prompt: the previous ids, and the tail. The tail is what the template
        writes after a reply: the stop token, the new message, and the header of the next reply.

        Earlier turns are not rendered again, because their ids must stay as they were sampled. The
        whole conversation is rendered if there are no previous ids (in the first turn, or after an
        edit), or if the reply does not end in the template's stop token.
        """
        if previous_ids:
            tail = await self._tail(messages)
            # The reply has the stop token, with which the tail begins: do not repeat it. (A reply
            # of the model Inkling ends in two stop tokens. An empty tail never matches.)
            for n_stop in (2, 1):
                if previous_ids[-n_stop:] == tail[:n_stop]:
                    return previous_ids + tail[n_stop:]
        return await self.render(messages)

    # What `_tail` keeps for its next call.
    _made_up_prefix: list[int] | None = None

    async def _tail(self, messages: list[dict]) -> list[int]:
        """To learn the tail, render a made-up conversation that ends in the new message, and cut it
        after the made-up reply, which is "b". The second line is the tail:

            <|im_start|>user a<|im_end|><|im_start|>assistant b
            <|im_end|><|im_start|>user NEW<|im_end|><|im_start|>assistant
        """

        async def rendered(reply: str) -> list[int]:
            # The tail may depend on the system message: SmolLM3's turns thinking off.
            system = [message for message in messages[:1] if message["role"] == "system"]
            user = {"role": "user", "content": "a"}
            assistant = {"role": "assistant", "content": reply}
            return await self.render([*system, user, assistant, messages[-1]])

        ids = await rendered("b")
        # The made-up prefix, up to the made-up reply, is kept: most turns then render only once. It
        # does not fit if another trial, with another system message, has made it.
        prefix = self._made_up_prefix
        if prefix is None or ids[: len(prefix)] != prefix:
            # With the reply "c", the first id that differs is the reply. ("b" and "c" are one token
            # each. If a template shows no replies, nothing differs, and the tail is empty.)
            n_same = n_common(ids, await rendered("c"))
            prefix = self._made_up_prefix = ids[: n_same + 1]
        return ids[len(prefix) :]


def n_common(one: list[int], other: list[int]) -> int:
    """How many ids both lists begin with."""
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def with_continuation(turn: Turn, part: Turn) -> Turn:
    """The turn of a reply that was aborted, and then went on with `part`."""
    usage = turn.usage.model_copy()
    usage.completion_tokens += part.usage.completion_tokens
    ids, logprobs = part.completion_token_ids, part.logprobs
    return replace(
        part,
        content=turn.content + part.content,
        usage=usage,
        prompt_token_ids=turn.prompt_token_ids,
        completion_token_ids=None if ids is None else turn.completion_token_ids + ids,
        logprobs=None if None in (turn.logprobs, logprobs) else turn.logprobs + logprobs,
        extra=part.extra | {"n_aborts": turn.extra.get("n_aborts", 0) + 1},
    )


class TinkerClient(TokenClient):
    """Tinker, by tinker-cookbook's renderer. (Harbor's TinkerLLM returns no ids of a reply that was
    cut off, and opens a session for each checkpoint.)"""

    def __init__(
        self, options: BasicLoopOptions, model: str, url: str | None, key: str | None, **args: Any
    ) -> None:
        import tinker
        from tinker_cookbook.model_info import get_recommended_renderer_name
        from tinker_cookbook.renderers import get_renderer
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        if "stop" in args:
            raise ValueError("llm_kwargs holds stop: on Tinker the renderer sets it")
        self.url = url
        self.max_tokens = options.max_tokens
        name = options.renderer_name or get_recommended_renderer_name(model)
        self._tokenizer = get_tokenizer(model)
        with _tokenizer_lock:
            self._renderer = get_renderer(name, self._tokenizer)
            # A list of token ids, or of texts: the renderer role_colon has one text.
            stop = self._renderer.get_stop_sequences()
            # What `generate` removes from the end of a reply's text.
            self._endings = [s if isinstance(s, str) else self._tokenizer.decode([s]) for s in stop]
            vocabulary = {}
            # Inkling's tokenizer has no such method, and makes no special token of any text.
            if hasattr(self._tokenizer, "get_added_vocab"):
                vocabulary = self._tokenizer.get_added_vocab()
        # Base models may stop at their eos_token. Inkling ends each message with <|end_message|>.
        self._endings += [self._tokenizer.eos_token or "", "<|end_message|>"]
        # Skip single characters and blanks, which some vocabularies add: any text may hold them.
        self.special_tokens = [re.escape(name) for name in vocabulary if len(name.strip()) > 1]
        parameters = tinker.SamplingParams.model_fields
        sampling = {name: value for name, value in args.items() if name in parameters}
        self._params = tinker.SamplingParams(stop=stop, **sampling)
        # A misspelt name has to fail: `create_sampling_client` refuses it, SamplingParams does not.
        client_args = {name: value for name, value in args.items() if name not in parameters}
        # A server of your own has no prices.
        self._rates = None if url else tinker_rates(model)
        source = {"model_path": options.model_path} if options.model_path else {"base_model": model}
        self._source = source | client_args
        self._model, self._key, self._given_limit = model, key, options.context_limit

    async def connect(self) -> None:
        import tinker

        cards = []
        # SDKs before 0.38 do not tell the models' limits.
        if hasattr(tinker, "RestClient"):
            client = tinker.RestClient(base_url=self.url, api_key=self._key)
            try:
                async with asyncio.timeout(FIRST_RESPONSE_SEC):
                    cards = (await client.get_server_capabilities()).supported_models
            except TimeoutError as error:
                name = self.url or "Tinker"
                text = f"{name} has not answered in {FIRST_RESPONSE_SEC} seconds"
                raise RuntimeError(text) from error
            except tinker.TinkerError:
                # A server of your own may not tell its limits. If it is down, `_open` fails next.
                pass
        limits = {card.model_name: card.max_context_length for card in cards}
        limit = limits.get(self._model)
        self.context_limit = min(filter(None, (limit, self._given_limit)), default=32_000)
        # In a thread, because the SDK waits for the server.
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        import tinker

        url, key = self.url, self._key
        # There is no lock: two clients at once may open two services, which does no harm.
        self._service = _given_service or _tinker_services.get((url, key))
        if not self._service:
            # If URL or key are None, the SDK finds its own.
            self._service = tinker.ServiceClient(base_url=url, api_key=key)
            _tinker_services[url, key] = self._service
        try:
            created = self._service.create_sampling_client(**self._source)
            # SDK 0.38 and later give a future.
            self._sampling_client = created.result() if hasattr(created, "result") else created
        except Exception:
            forget(_tinker_services, self._service)
            raise

    async def render(self, messages: list[dict]) -> list[int]:
        with _tokenizer_lock:
            return self._renderer.build_generation_prompt(messages).to_ints()

    async def decode(self, ids: list[int]) -> str:
        with _tokenizer_lock:
            return self._tokenizer.decode(ids)

    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        import tinker

        try:
            response = self._sampling_client.sample(
                prompt=tinker.ModelInput.from_ints(prompt_ids),
                num_samples=1,
                sampling_params=self._params.model_copy(update={"max_tokens": max_tokens}),
            )
            if not inspect.isawaitable(response):
                # SDKs before 0.38 give a concurrent.futures.Future.
                response = asyncio.wrap_future(response)
            response = await response
        except Exception as error:
            if not is_context_full(error):
                forget(_tinker_services, self._service)
            raise
        sequence = response.sequences[0]
        ids = list(sequence.tokens)
        text = await self.decode(ids)
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
        if self._rates:
            from tinker_cookbook.utils.cost_estimation import TokenUsage

            n_cached = turn.usage.cache_tokens
            billed = TokenUsage(
                sampled=len(ids),
                prefill_cached=n_cached,
                prefill_uncached=len(prompt_ids) - n_cached,
            )
            turn.usage.cost_usd = self._rates.estimate_usd(billed)
        return turn


def tinker_rates(model: str) -> Any:
    """The model's prices, which tinker-cookbook 0.6 and later fetches once in a process. None if it
    does not know them, or has no network."""
    try:
        from tinker_cookbook.utils.cost_estimation import fetch_model_pricing
    except ImportError:
        return None
    return fetch_model_pricing(model, timeout=2)


# Special tokens, as regular expressions. A server does not list those of its model, so these become
# plain text for any model. Add those of yours. (FF5C is DeepSeek's full-width bar.)
SPECIAL_TOKENS = [
    # <|im_end|>, <|turn>, <turn|>, [|user|]
    r"<[|\uFF5C][^<>\s]{1,99}>",
    r"<[^<>\s]{1,99}[|\uFF5C]>",
    r"\[\|\w+\|\]",
    # Llama, Gemma, Mistral, GLM, Seed, MiniMax
    r"</?s>",
    r"<(?:bos|eos|sop|eop|start_of_turn|end_of_turn)>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]",
    r"\[[gs]MASK\]",
    r"<seed:[be]os>",
    # ]~b] ]~!b[ [e~[
    r"\]~b\]",
    r"\]~!b\[",
    r"\[e~\[",
]
# How long a server has for its first response.
FIRST_RESPONSE_SEC = 30
# These values leave the model's distribution as it is. Without them vLLM uses those of the model's
# generation_config.json.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerClient(TokenClient):
    """A vLLM or SGLang server by token ids: /tokenize renders, /v1/completions samples."""

    special_tokens = SPECIAL_TOKENS

    def __init__(
        self, options: BasicLoopOptions, model: str, url: str, key: str | None, **args: Any
    ) -> None:
        from openai import AsyncOpenAI, Timeout

        # /tokenize is not under /v1.
        self.url = url.rstrip("/").removesuffix("/v1")
        self.max_tokens = options.max_tokens
        self._given_limit = options.context_limit
        # litellm calls a model on vLLM hosted_vllm/<its name>.
        self._model = model.removeprefix("hosted_vllm/")
        # It is never closed, because Harbor does not say when a job ends.
        self._http = AsyncOpenAI(
            base_url=self.url,
            # The openai package wants a key. A server without keys takes any.
            api_key=key or "none",
            default_headers=args.pop("extra_headers", None),
            # No time limit for a response, unless llm_kwargs has one: after a timeout the package
            # asks again, and the reply is sampled twice. The limits of the run end the call.
            timeout=Timeout(args.pop("timeout", None), connect=FIRST_RESPONSE_SEC),
            max_retries=args.pop("max_retries", 5),
        )
        # The other arguments go into each request for a completion.
        extra_body = args.pop("extra_body", None) or {}
        self._body = NEUTRAL_SAMPLING | args | extra_body
        self._template_kwargs = self._body.pop("chat_template_kwargs", {})
        # The texts of the ids that were decoded. Nearly all prompts end in the same ids.
        self._decoded: dict[tuple[int, ...], str] = {}

    async def connect(self) -> None:
        from openai import APIError

        http = self._http.with_options(timeout=FIRST_RESPONSE_SEC, max_retries=1)
        try:
            # cast_to=object: the response is plain JSON.
            response = await http.get("/v1/models", cast_to=object)
            limits = {card["id"]: card["max_model_len"] for card in response["data"]}
            limit = limits[self._model]
            if limit is None:
                # A LoRA adapter has no limit of its own. The largest limit is its base model's.
                limit = max(other for other in limits.values() if other)
        except (APIError, KeyError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"{self.url} is no vLLM or SGLang server with the model {self._model} (for another "
                f"one set model_client=litellm): {error!r}"
            ) from error
        self.context_limit = min(limit, self._given_limit or limit)

    async def render(self, messages: list[dict]) -> list[int]:
        body = {
            "model": self._model,
            "messages": messages,
            "add_generation_prompt": True,
            "chat_template_kwargs": self._template_kwargs,
        }
        response = await self._http.post("/tokenize", body=body, cast_to=object)
        return response["tokens"]

    async def decode(self, ids: list[int]) -> str:
        key = tuple(ids)
        if key not in self._decoded:
            # The flag is for SGLang, which drops special tokens by default.
            body = {"model": self._model, "tokens": ids, "skip_special_tokens": False}
            response = await self._http.post("/detokenize", body=body, cast_to=object)
            # vLLM calls the text "prompt".
            self._decoded[key] = response["text"] if "text" in response else response["prompt"]
        return self._decoded[key]

    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        body = {
            **self._body,
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            # 0 means the log-probability of the sampled token alone.
            "logprobs": 0,
            "return_token_ids": True,
            # The tags of thinking may be special tokens. (The server takes the stop token off.)
            "skip_special_tokens": False,
        }
        options = {}
        if session:
            # vLLM's router looks at the header first.
            body["session_id"] = session
            options["headers"] = {"X-Session-ID": session}
        response = await self._http.post(
            "/v1/completions", body=body, options=options, cast_to=object
        )
        reply = response["choices"][0]
        # vLLM returns the routed experts in the choice, SGLang beside the choices.
        experts = reply.get("routed_experts") or (response.get("sglext") or {}).get(
            "routed_experts"
        )
        turn = Turn(
            # Cohere puts its answer between these marks.
            content=re.sub(r"<\|(START|END)_RESPONSE\|>", "", reply["text"]),
            prompt_token_ids=prompt_ids,
            completion_token_ids=reply.get("token_ids"),
            logprobs=(reply.get("logprobs") or {}).get("token_logprobs"),
            finish_reason=reply["finish_reason"],
            extra={"routed_experts": experts},
        )
        details = (response.get("usage") or {}).get("prompt_tokens_details") or {}
        turn.usage.cache_tokens = details.get("cached_tokens") or 0
        return turn


# After these errors Harbor scores what the agent has left.
SCORED_ERRORS = {"AgentTimeoutError", "NonZeroAgentExitCodeError"}


@dataclass(frozen=True)
class TrainingData:
    """A trial as a trainer sees it, which many trainers call a trajectory."""

    # The trainable turns of all steps: ids, logprobs and `extra`, but no text.
    turns: list[Turn]
    # The reward named "reward", or else the only one. None if there is no such reward.
    reward: float | None
    # The last step's `StopReason`, or your loop's word. None for other agents.
    stop_reason: str | None
    # Harbor's result, with all rewards, tokens, cost and names.
    trial: TrialResult


def trial_to_trajectory(trial: TrialResult) -> TrainingData | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`. None if
    the trial failed, if one of its steps ended in ERROR, or if it has neither a reward nor a
    trainable turn. Raises ValueError if ids and logprobs do not align, or a number is infinite."""
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    stop_reasons = [(context.metadata or {}).get("stop_reason") for context in contexts]
    rewards = trial.verifier_result.rewards if trial.verifier_result else None
    errors = {part.exception_info.exception_type for part in (trial, *steps) if part.exception_info}
    if errors - SCORED_ERRORS or StopReason.ERROR in stop_reasons:
        return None
    # Harbor 0.25 and later also says whether the reward is valid.
    if rewards and not getattr(trial, "reward_valid", True):
        return None
    rewards = rewards or {}
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"trial {trial.trial_name}: a reward is not a finite number: {rewards}")
    reward = rewards.get("reward")
    if len(rewards) == 1:
        (reward,) = rewards.values()
    turns = [turn for context in contexts for turn in turns_of(context)]
    if not rewards and not turns:
        return None
    return TrainingData(turns, reward, stop_reasons[-1], trial)


# The users of earlier versions import it by this name.
_trial_to_trajectory = trial_to_trajectory


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, in a list, with an entry for each of these turns; None if there are
    none. (The caller leaves out turns that are not trainable, so that all lists stay aligned.)"""
    if not turns:
        return None
    detail = {name: [getattr(turn, name) or [] for turn in turns] for name in _TOKEN_FIELDS}
    names = {name for turn in turns for name in turn.extra}
    detail["extra"] = {name: [turn.extra.get(name) for turn in turns] for name in names}
    return [detail]


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The trainable turns of a run, from its `rollout_details`. Raises ValueError if the lists do
    not align."""
    for detail in context.rollout_details or []:
        prompts, completions, logprobs = (detail.get(name) or [] for name in _TOKEN_FIELDS)
        extra = detail.get("extra") or {}
        # Each list has one entry per turn.
        if any(
            len(entries) != len(prompts) for entries in (completions, logprobs, *extra.values())
        ):
            raise ValueError("the lists of a rollout differ in length")
        for n, prompt in enumerate(prompts):
            turn = Turn(
                prompt_token_ids=prompt,
                completion_token_ids=completions[n],
                logprobs=logprobs[n],
                extra={name: entries[n] for name, entries in extra.items()},
            )
            if not turn.is_trainable:
                raise ValueError("ids and logprobs differ in length, or a logprob is not finite")
            yield turn


def write_file(path: Path, text: str) -> None:
    """Write a file into the log folder. Scripts may have tampered with it: a link, a pipe or a
    folder may have the file's name. So nothing there is opened, and a new file gets the name.
    Raises RuntimeRequestError if the file cannot be written."""
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(text.encode())
        if path.is_dir() and not path.is_symlink():
            # A file cannot replace a folder.
            path.rename(path.with_name(f"{path.name}.folder.{uuid4().hex}"))
        fresh.replace(path)
    except OSError as error:
        raise RuntimeRequestError(f"{path} cannot be written: {error}") from error


def valid_text(text: str | None) -> str:
    """Text that tokenizers and files accept: a lone surrogate becomes "?", None becomes ""."""
    return (text or "").encode("utf-8", "replace").decode()


def json_values(values: dict) -> dict:
    """The values as JSON has them, because Harbor cannot save others. Other values become text, and
    an entry is left out if its key is no JSON key, such as a tuple."""
    text = json.dumps(values, default=str, skipkeys=True, ensure_ascii=False)
    return json.loads(valid_text(text))


# A Markdown parser with three of its rules: "fence", "list" (for fences in list items), and "code"
# (text that is indented by four blanks: without this rule a fence in it would count).
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "code"]).disable("inline")


def fenced_blocks(text: str, *languages: str) -> list[str] | None:
    """The ``` blocks of a Markdown text that are in one of these languages (in lower case), without
    NULs. A block inside another one, or inside ~~~, does not count. None: there are such blocks,
    and a block of the text is not closed, so it is not clear where they end."""
    blocks = []
    is_any_open = False
    # The newline is for an open block at the end of the text: the last line of its content would
    # end without one, and would not be counted below.
    for token in _MARKDOWN.parse(text.replace("\0", "") + "\n"):
        if token.type != "fence":
            continue
        # The lines of a closed block are its content and two fences.
        first_line, end_line = token.map
        is_closed = end_line - first_line == token.content.count("\n") + 2
        is_any_open = is_any_open or not is_closed
        words = token.info.lower().split()
        if token.markup.startswith("`") and words and words[0] in languages:
            blocks.append(token.content)
    return None if blocks and is_any_open else blocks


# This much of a script's output is kept. (In units of 1,024 bytes, as in bash's ulimit.)
MAX_OUTPUT_KIB = 4000
# Limits of a script with `seconds` to run:
#   seconds       its own limit; the model sees the output so far
#   seconds + 30  the agent stops waiting, and kills the script
#   seconds + 90  `environment.exec` fails, which would end the run
WAIT_MARGIN_SEC = 30
EXEC_MARGIN_SEC = 90
# How long the agent waits for the exec that kills a script.
KILL_TIMEOUT_SEC = 15
# Exit codes that the model sees, as bash and GNU's `timeout` have them.
NOT_RUN = 126
TIMED_OUT = 124
KILLED = 137


@dataclass
class ScriptResult:
    """How a script ended. `note` is what the model is told after the output."""

    exit_code: int
    seconds: float
    output: bytes = b""
    note: str = ""
    # True if the script did not end by itself. Its runner kills one process group only, so
    # `kill_script` has to follow.
    needs_kill: bool = False

    def text(self, shown_bytes: int) -> str:
        """What the model is told, with at most this much of the output: its middle is left out."""
        output = self.output
        if len(output) > shown_bytes:
            half = shown_bytes // 2
            end = len(output) - half
            left_out = f"\n[... {end - half} bytes left out ...]\n"
            output = output[:half] + left_out.encode() + output[end:]
        shown = output.decode("utf-8", "replace").removesuffix("\n")
        texts = [text for text in (shown, self.note) if text] or ["(none)"]
        return "\n".join([f"Exit code: {self.exit_code}", "Output:", *texts])


async def run_script(blocks: list[str], environment: BaseEnvironment, seconds: int) -> ScriptResult:
    """Run blocks as one script with a time limit in seconds. Raises any error of the environment's
    `exec` but TimeoutError."""
    # An empty line after each block keeps a trailing backslash from joining two blocks.
    script = "".join(f"{block}\n\n" for block in blocks)
    # Each process of the script has this mark in its environment, where `kill_script` finds it.
    mark = uuid4().hex
    # `start` writes script and runner to files, makes a pipe, and becomes the runner.
    # - In files, neither text is an argument of a process, where a script's own `pkill -f` would
    #   find it.
    # - If there is no room in /dev/shm, which is memory, the second `start` tries /tmp.
    # - With -p bash ignores BASH_ENV, which an image may set.
    command = (
        f"export BASIC_LOOP_MARK={mark}; "
        f"start() {{ printf %s {shlex.quote(script)} >$1.in && "
        f"printf %s {shlex.quote(_RUNNER)} >$1.bash && mkfifo $1.pipe && "
        f"exec bash -p $1.bash {seconds} {MAX_OUTPUT_KIB}; rm -f $1.*; }}; "
        f"start /dev/shm/{mark}; start /tmp/{mark}"
    )
    # The command becomes one argument: Linux takes 131,072 bytes, Modal 65,536. (shlex.quote makes
    # five bytes of an apostrophe.)
    if len(command.encode()) > 65_000:
        note = "[not run: the script is too long; split it into smaller ones]"
        return ScriptResult(NOT_RUN, 0, note=note)
    # The result if the environment hangs, or if the script has stopped its runner by a signal.
    note = f"[no answer; the limit is {seconds} seconds]"
    result = ScriptResult(TIMED_OUT, seconds + WAIT_MARGIN_SEC, note=note, needs_kill=True)
    try:
        async with asyncio.timeout(seconds + WAIT_MARGIN_SEC):
            printed = await environment.exec(command, timeout_sec=seconds + EXEC_MARGIN_SEC)
        result = parse_output(printed, mark, seconds)
    except TimeoutError:
        pass
    finally:
        # Also if the run was cancelled, or the environment failed: leave no script running.
        if result.needs_kill:
            await kill_script(mark, environment)
    return result


# A bash program, the runner, that runs a script. Its own file is NAME.bash, the script is NAME.in,
# and the named pipe is NAME.pipe. Its arguments are the time limit in seconds and MAX_OUTPUT_KIB.
# It prints the exit code, the seconds, the output in base64 (because some environments change what
# a command prints), and "cut" if some output is missing:
#
#     :MARK:CODE SECONDS:BASE64:cut:
#
# It needs bash 4.2 and coreutils.
_RUNNER = r"""
name=${0%.bash}
# The script writes into the pipe, and a reader in the background copies that to a file. So `ulimit`
# bounds the reader's file, and the script may write larger ones. At the limit, or if memory is
# full, the first cat fails. The second cat reads on, because a process that writes into a pipe
# without a reader is killed.
#
# The reader must not hold stdout or stderr, or `environment.exec` would wait for it. What it prints
# comes through descriptor 9.
exec </dev/null 2>/dev/null
exec 9< <(
  # "cut" must not kill the reader if this program has ended, and nobody reads that word.
  trap "" PIPE
  exec <"$name.pipe"
  ulimit -c 0 -f "$2"
  cat >"$name.output" || {
    echo cut
    exec cat >/dev/null
  }
)
# bash reads the script from descriptor 3, so that its messages name /dev/fd/3, and not a file with
# another name in each rollout. Descriptor 9 is closed for the script.
timeout -s KILL "$1" bash /dev/fd/3 3<"$name.in" 9<&- >"$name.pipe" 2>&1
ended="$? $SECONDS"

# Wait until the reader ends or says "cut", but no longer than a second: if the script has left a
# server running, the reader goes on for it.
read -r -t 1 -u 9 cut
printf ":%s:%s:" "$BASIC_LOOP_MARK" "$ended"
# If the script has removed its output, that is missing, too.
base64 "$name.output" || cut="cut"
printf ":%s:" "$cut"
rm -f "$name".*
"""


async def kill_script(mark: str, environment: BaseEnvironment) -> None:
    """Kill a script and what runs it, and remove their files, by another exec."""
    # Each process of the script has inherited the mark in its environment, which Linux shows in the
    # file /proc/PID/environ. Kill each such process, and its process group. (grep has the mark in
    # its arguments only, so it does not find itself.)
    command = (
        f"for pid in $(grep -ls BASIC_LOOP_MARK={mark} /proc/[0-9]*/environ | cut -d / -f 3); do "
        f"kill -9 $pid -$pid; done 2>/dev/null; rm -f /dev/shm/{mark}.* /tmp/{mark}.*"
    )
    # The environment may be gone.
    with suppress(Exception):
        async with asyncio.timeout(KILL_TIMEOUT_SEC):
            await environment.exec(command, timeout_sec=KILL_TIMEOUT_SEC + EXEC_MARGIN_SEC)


def parse_output(printed: ExecResult, mark: str, seconds: int) -> ScriptResult:
    """The result, from what the bash program printed."""
    stdout = valid_text(printed.stdout)
    found = re.search(rf":{mark}:(\d+) (\d+):([^:]*):(cut)?:", stdout)
    if not found:
        output = (stdout + valid_text(printed.stderr)).encode()
        note = "[no answer: what runs scripts was killed, or it could not start]"
        return ScriptResult(printed.return_code or KILLED, 0, output, note, needs_kill=True)
    result = ScriptResult(int(found[1]), int(found[2]), base64.b64decode(found[3]))
    notes = []
    if found[4]:
        notes.append(f"[cut: {MAX_OUTPUT_KIB} KiB of output are kept, or less if memory is full]")
    # GNU's `timeout` exits with 137 at its limit, that of uutils with 124. A script may exit with
    # these codes itself, so the seconds count, too.
    if result.exit_code in (TIMED_OUT, KILLED) and result.seconds >= seconds:
        result.exit_code = TIMED_OUT
        result.needs_kill = True
        notes.append(f"[ended: the time limit of {seconds} seconds was reached]")
    result.note = "\n".join(notes)
    return result
