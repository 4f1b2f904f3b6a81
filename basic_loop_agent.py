# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://... --ak max_turns=50 --ak max_tokens=4096

The agent samples from one model in one conversation, and runs one script per turn. It does not
compact long conversations, call tools natively or run commands in parallel. To add such a thing,
change the loop: `BasicLoopAgent.converse`.

Harbor calls `run` or `resume` once per instruction: once for most trials, once per step for a task
with several steps. A run is one such call. A turn is one model call and its reply. A rollout is the
token ids and log-probabilities of a run's turns. The answer is the last reply, without thinking.

The model's scripts run in the task's container, where nothing limits the disk and the memory that
they use. The container may have the agent's log folder as a mount, where they can write, too.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import copy
import math
import os
import re
import shlex
import threading
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from uuid import uuid4

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import (
    BaseLLM,
    ContextLengthExceededError,
    LLMResponse,
    OutputLengthExceededError,
)
from harbor.llms.chat import Chat
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from markdown_it import MarkdownIt
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import to_json, to_jsonable_python

# Older versions of Harbor lack some names.
try:
    # Harbor 0.23 and later has these.
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions
    from harbor.models.agent.context import ModelUsage
except ImportError:

    class AgentOptions(BaseModel, extra="forbid"): ...

    class AgentCapabilities(BaseModel): ...

    ModelUsage = None

__version__ = "0.18.0"


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
    """Nucleus sampling: the smallest set of tokens with this total probability. null: 1.0 for vllm
    and sglang, and not sent otherwise."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends and the trial is scored. Choose it below the task's
    timeout, which Harbor does not tell an agent."""
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
    """If a script prints more bytes, the model sees half of this number from the start and half
    from the end."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.collect_rollout_details is None:
            self.collect_rollout_details = self.model_client != "litellm"
        if self.model_client != "tinker" and (self.model_path or self.renderer_name):
            raise ValueError("model_path and renderer_name are for model_client=tinker: drop them")
        # llm_kwargs, and an extra_body in it, must not hold what the agent sends itself.
        given = {*self.llm_kwargs, *(self.llm_kwargs.get("extra_body") or {})}
        if names := given & {*type(self).model_fields, "model", "model_name", "stream"}:
            raise ValueError(
                f"llm_kwargs must not hold {', '.join(sorted(names))}: the agent sets it"
            )
        return self


DEFAULTS = BasicLoopOptions()


class StopReason(StrEnum):
    """The agent's own reasons for the end of a run. The stop_reason in the metadata may also be a
    server's finish reason, such as "content_filter", or any string that your `converse` returns."""

    # The reply holds no command, or max_turns is 1.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was cut off, at `max_tokens` or at the end of the context.
    MAX_TOKENS = "max_tokens"
    # The conversation left no room in the context window for a reply.
    CONTEXT_OVERFLOW = "context_overflow"
    # `max_seconds` have passed; the call or script that was under way was stopped.
    ROLLOUT_TIMEOUT = "rollout_timeout"
    # Harbor cancelled the run: at the agent's timeout, or by Ctrl-C.
    CANCELLED = "cancelled"
    # An exception, which Harbor keeps as the exception_info of the trial or the step.
    ERROR = "error"


# A reply with one of these finish reasons (words of vLLM, SGLang, DeepSeek) is a failure of the
# server, also if a client of your own returns it.
FAILED_REASONS = {"abort", "cancelled", "error", "time_limit", "insufficient_system_resource"}
# The lists of a RolloutDetail with one entry per turn. `Turn` has attributes of the same names.
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


@dataclass
class Turn(LLMResponse):
    """One model call. The ids are exactly as sampled. Also used for a reply that is still being
    sampled (`Request.partial`), and by `training_data`, which knows the ids but not the text.

    Set by the client, attributes of Harbor's LLMResponse:
        content: The reply's text, without thinking.
        reasoning_content: The thinking.
        usage: The tokens of prompt, reply and cache, and the cost in USD (0.0: not known). The
            run's totals are the sums of these.
        prompt_token_ids: One id per token of the whole prompt, or None.
        completion_token_ids: One id per sampled token, the stop token included, or None.
        logprobs: One natural logarithm per sampled token, or None. vLLM gives those of the raw
            model, before temperature and top_p, unless it has --logprobs-mode processed_logprobs.
        extra: Other JSON values of the client: sequence_id (Tinker), routed_experts (vLLM, SGLang),
            weight_versions (vLLM 0.33, SGLang 0.5.21 and later: which policy has sampled which
            tokens, as a list of {version, start, end}).

    Set by the client, too:
        finish_reason: Why the reply ended. "stop": it is complete. "max_tokens": it was cut off, at
            `max_tokens` or at the end of the context. Another word of the server, in lower case: it
            is incomplete, too.

    Set by the agent:
        timestamp: When the reply came, in ISO 8601.
        sent_text: What was sent for this reply, such as the instruction, or the observation of the
            turn before.
        observation: What the model is told after this reply, such as its script's output. `observe`
            sets it.
        breaks_prefix: True if the prompt does not begin with the ids of the turn before. It is only
            compared if both turns are trainable (see `is_trainable`).
    """

    # LLMResponse gives defaults to its other fields, but not to `content`.
    content: str = ""
    finish_reason: str = "stop"
    timestamp: str | None = None
    sent_text: str = ""
    observation: str = ""
    breaks_prefix: bool = False

    def __post_init__(self) -> None:
        self.content = valid_text(self.content)
        self.reasoning_content = valid_text(self.reasoning_content)
        reason = str(self.finish_reason).lower()
        # Servers say "length".
        self.finish_reason = StopReason.MAX_TOKENS.value if reason == "length" else reason
        self.extra = self.extra or {}
        # The client gave no usage: count the tokens.
        self.usage = self.usage or UsageInfo(
            prompt_tokens=len(self.prompt_token_ids or []),
            completion_tokens=len(self.completion_token_ids or []),
            cache_tokens=0,
            cost_usd=0.0,
        )

    @property
    def is_trainable(self) -> bool:
        """True if the prompt's ids are here, and there is at least one sampled token, each with a
        finite logprob."""
        ids, logprobs = self.completion_token_ids, self.logprobs or []
        # vLLM writes -9999.0 for a logprob that it does not have. NaN fails any comparison.
        is_finite = all(isinstance(x, int | float) and -9999.0 < x < math.inf for x in logprobs)
        return bool(self.prompt_token_ids and ids and len(ids) == len(logprobs) and is_finite)

    def continues(self, earlier: Turn) -> bool:
        """True if the prompt begins with the ids of an earlier turn."""
        ids = earlier.prompt_token_ids + earlier.completion_token_ids
        return self.prompt_token_ids[: len(ids)] == ids


class AbortedError(RuntimeError):
    """The server has stopped before the reply was complete, for instance to load new weights. The
    agent waits, as for a busy server, and calls the client again with the same request."""


@dataclass
class Request:
    """What a client gets with the messages. `sample` makes one for each reply. Only `partial`
    changes: the client writes it, and `sample` reads it if the run ends.

    Attributes:
        previous: The last turn, with whose ids the next prompt begins (TokenClient.next_prompt).
            None: this is the first turn, or the conversation was edited, so all is rendered.
        session_id: For a router with sticky sessions.
        partial: The part of the reply that was sampled before the server aborted it. The agent
            calls again with the same request, and the client goes on from there. If the run ends
            first, `sample` records the part as a turn.
    """

    previous: Turn | None = None
    session_id: str | None = None
    partial: Turn | None = None


class ModelClient:
    """Samples the replies of a model. The trials of a job share it. Harbor's Chat uses it in place
    of a BaseLLM."""

    # The server's URL without a password, for error messages. None: the default of its SDK.
    url: str | None = None

    async def connect(self) -> None:
        """Ask the server for its limits. Raises any error of the server."""

    async def call(
        self,
        prompt: str,
        message_history: Iterable[dict] = (),
        request: Request | None = None,
        **other: Any,
    ) -> Turn:
        """Sample a reply, and split off its thinking. Harbor's Chat calls this. `prompt` is the
        text of the new message, which is not in `message_history` yet. `request` comes from the
        agent, and `other` holds what Chat adds. While the server is busy, this is called again with
        the same request. Raises ContextLengthExceededError if there is no room for a reply, and any
        error of the server."""
        raise NotImplementedError

    def escape_special_tokens(self, text: str) -> str:
        """The text, with the model's special tokens made plain text, if the client knows them."""
        return text

    def discard(self) -> None:
        """Called when a call has failed for good. Forget what this client shares with others, such
        as a session (only TinkerClient has one). Close nothing: other trials may use it."""


# ---- what an error means


# Harbor decides by the name of an error's class whether to score a trial (its table is in
# harbor.models.trial.error_policy). It does not score a trial with an error of these two names, so
# every run that has failed raises one of them.


class ApiError(RuntimeError):
    """The model's server has failed."""


class RuntimeRequestError(RuntimeError):
    """The environment or the loop has failed."""


# How servers say that a prompt is too long: OpenAI, vLLM, SGLang, Anthropic, Gemini, llama.cpp,
# xAI, GLM, DashScope. (A timeout may say "took too long", and a wrong field "string too long".)
CONTEXT_IS_FULL = (
    "(?i)context[ _]?(window|length|size)|maximum context|token limit"
    "|(?<!took )(?<!string )too long|maximum prompt length|exceeds max length"
    "|range of input length|input length.*exceeds|max_tokens must be at least 1, got"
)
# The statuses of an error about the request. (llama.cpp's is 500 if the prompt is too long.)
REFUSED_STATUSES = (400, 413, 422, 500)
# The statuses of a server that is overloaded, or paused for new weights.
BUSY_STATUSES = (429, 503, 529)
# The seconds before each call to a server that is busy or down: ten minutes in all.
PAUSES_SEC = (0, 1, 2, 4, *[5] * 119)


def meaning_of(error: Exception) -> Literal["context is full", "busy", "down", "failed"]:
    """What an error of a client means. The agent may wait for a server that is busy or down."""
    if isinstance(error, ContextLengthExceededError):
        return "context is full"
    # A prompt that is too long has no status of its own, so match the text. (Some errors of Tinker
    # have no status. Their category is "user" if the request is at fault.)
    status = getattr(error, "status_code", None)
    is_refused = status in REFUSED_STATUSES or str(getattr(error, "category", "")) == "user"
    if is_refused and re.search(CONTEXT_IS_FULL, str(error)):
        return "context is full"
    if isinstance(error, AbortedError) or status in BUSY_STATUSES:
        return "busy"
    # The packages openai, litellm and tinker have a class of this name. For some providers litellm
    # reports a refused connection as status 500, so every remaining 5xx counts as down.
    is_down = type(error).__name__ == "APIConnectionError" or (status or 0) >= 500
    return "down" if is_down else "failed"


# ---- what the trials of a process share


@dataclass
class SharedClient:
    """An entry of the cache: a client for all trials with equal keys. `client` and `error` are None
    until a trial has built the client, or has failed to."""

    # From `BasicLoopAgent._cache_key`.
    key: tuple
    # Held while the client is built.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    client: ModelClient | None = None
    # Why the build has failed. The trials that wait for the lock raise it, too. Otherwise each in
    # turn would wait FIRST_RESPONSE_SEC for a dead server.
    error: Exception | None = None


# The cache: an entry for each client, the oldest first. It is a list, because the keys hold
# dictionaries. An entry is removed when its client fails, and the oldest one when there are more
# than MAX_CLIENTS: each client has connections, and some trainers give each trial a URL of its own.
# A trial keeps the client that it has.
_clients: list[SharedClient] = []
MAX_CLIENTS = 64


async def shared_client(key: tuple, build: Callable[[], Any]) -> ModelClient:
    """The client of all trials with this key. The first trial builds it. The others wait, and get
    the client, or the error with which the build has failed."""
    entry = next((entry for entry in _clients if entry.key == key), None)
    if entry is None:
        entry = SharedClient(key)
        _clients.append(entry)
        del _clients[:-MAX_CLIENTS]
    async with entry.lock:
        if entry.client is None and entry.error is None:
            try:
                client = await asyncio.to_thread(build)
                if not isinstance(client, ModelClient):
                    client = HarborClient(client)
                await client.connect()
                entry.client = client
            except Exception as error:
                entry.error = error
                # Later trials build anew.
                _clients[:] = [other for other in _clients if other is not entry]
        if entry.error:
            raise entry.error
        return entry.client


def forget_client(client: ModelClient) -> None:
    """After an error of a client: see that no new trial gets it."""
    _clients[:] = [entry for entry in _clients if entry.client is not client]
    client.discard()


# For Tinker: one tinker.ServiceClient, with a session and about 11 file descriptors, for each URL
# and key. The clients of all checkpoints use it. `TinkerClient.discard` removes it after an error.
_tinker_services: dict[tuple, Any] = {}
# The service of `use_service`, in place of these.
_given_service: Any = None
# tinker-cookbook gives all clients of a model the same tokenizer. It raises "Already borrowed" if
# two threads use it at once, as when one client is built in a thread while another one renders.
_tokenizer_lock = threading.Lock()


def use_service(service: Any) -> None:
    """From now on, sample by this `tinker.ServiceClient`, for instance a trainer's, so that
    sampling and training have one session. None: use the agent's own services again."""
    global _given_service
    _given_service = service
    # Later trials get no client of another service.
    _clients.clear()


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies, and records each turn.

    After a run the context holds the token counts, cost_usd (None if unknown), metadata and the
    rollout. `logs_dir` holds completion.txt, the last answer, and trajectory.json (ATIF).

    Attributes of the trial:
        client: The model client, which `setup` gets, and which the trials of a job share.
        introduction: What the model is told of skills and MCP servers before the first instruction.

    Attributes of the conversation, which `run` begins and `resume` continues:
        chat: Harbor's Chat, which holds the messages.
        unsent: The texts for the next `sample`, in order. `run`, `resume`, `tell` and `observe` add
            to this list. `sample` removes the texts that it has sent, once the reply has come. What
            is left at the end of a run opens the next step.
        _last_turn: The last turn; None before the first. (Each run begins `turns` anew, but not
            this.) The next prompt begins with its ids, unless the loop has edited `messages`.
        _last_messages: A copy of `messages` after the last turn, to notice such edits.

    Attributes of one run:
        instruction: What Harbor asks for.
        turns: The turns so far.
        metadata: The loop may keep JSON values here, for the context's metadata.
        _waits_for_server: True while the agent waits for the model's server: it is busy or down, or
            has aborted a reply that did not go on yet.
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
    # What the model is told if `bash_blocks` returns None.
    unclosed_block: ClassVar[str] = "Nothing was run: a block lacks the line ``` that closes it."

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Keep the names of the arguments that were given, so that a subclass's `options_model` may
        have other defaults than the signature of `__init__`. If its max_turns is 50, MyAgent() has
        50 turns, and MyAgent(max_turns=1) has 1. `__init__` alone sees max_turns=1 both times."""
        agent = super().__new__(cls)
        agent._given = set(given)
        return agent

    def __init__(
        self,
        *,
        model_name: str,
        model_path: str | None = DEFAULTS.model_path,
        renderer_name: str | None = DEFAULTS.renderer_name,
        max_tokens: int = DEFAULTS.max_tokens,
        temperature: float = DEFAULTS.temperature,
        max_turns: int = DEFAULTS.max_turns,
        system_prompt: str | None = DEFAULTS.system_prompt,
        model_client: str = DEFAULTS.model_client,
        api_base: str | None = DEFAULTS.api_base,
        **kw: Any,
    ) -> None:
        """Create the agent of one trial. These nine keywords, with their defaults, are the
        interface that callers know. `kw` holds the other options of BasicLoopOptions and Harbor's
        arguments (logs_dir, extra_env, ...), of which extra_env holds the variables of `--ae
        KEY=value`, such as API keys. Raises ValueError for a bad option."""
        # `extra_env` is not passed on: Harbor (0.16 and later) would give it to each command in the
        # container, and scripts could read the keys.
        self._agent_env = kw.pop("extra_env", None) or {}
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
        # Leave out what was not given: it gets the default of `options_model`. A value was given if
        # the caller named it, or if a subclass's `__init__` passed one that differs from DEFAULTS.
        for name, value in options.items():
            if name in self._given or value != getattr(DEFAULTS, name):
                kw[name] = value
        # From 0.23 on Harbor makes `self.options` of the arguments. Earlier ones ignore options.
        super().__init__(model_name=model_name, **kw)
        if not hasattr(BaseAgent, "parse_options"):
            names = self.options_model.model_fields.keys() & kw.keys()
            self.options = self.options_model(**{name: kw[name] for name in names})

        self.client: ModelClient | None = None
        self.introduction: list[str] = []

        self.chat: Chat | None = None
        self.unsent: list[str] = []
        self._last_turn: Turn | None = None
        self._last_messages: list[dict] | None = None

        self.instruction = ""
        self.turns: list[Turn] = []
        self.metadata: dict[str, Any] = {}
        self._waits_for_server = False

    async def converse(self, environment: BaseEnvironment) -> StopReason | str:
        """Sample a reply, run its script, send the script's output with the next `sample`, and so
        on. Returns why the run ended: a StopReason, or a word of your own. A subclass may `tell`
        something and call this again: the run goes on. Once `max_turns` turns are made, a further
        call returns MAX_TURNS at once, and what was told stays in `unsent` for the next step."""
        while len(self.turns) < self.options.max_turns:
            try:
                turn = await self.sample()
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW
            if turn.finish_reason != "stop":
                # The reply is incomplete, so nothing in it may be run.
                return turn.finish_reason
            if self.options.max_turns == 1:
                return StopReason.COMPLETED
            blocks = self.bash_blocks(turn.content)
            if blocks is None:
                self.observe(self.unclosed_block)
            elif blocks:
                self.observe(await self.execute(blocks, environment))
            else:
                return StopReason.COMPLETED
        return StopReason.MAX_TURNS

    def bash_blocks(self, reply: str) -> list[str] | None:
        """The blocks of a reply that `execute` gets: those for bash, sh and shell. An empty list
        ends the run. None: a block is not closed, so nothing may be run."""
        return fenced_blocks(reply, "bash", "sh", "shell")

    async def execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        """Run blocks as one script in the environment. Returns its exit code and its output, as the
        model gets them. The reply that holds the blocks is `self.turns[-1].content`. To end the run
        from here, raise an exception of your own, and catch it in `converse`. Raises any error of
        the environment."""
        limits = (self.options.command_timeout_sec, self.options.max_output_bytes)
        text = await run_script(blocks, environment, *limits)
        self.logger.debug(f"script: {text.splitlines()[0]}")
        return text

    def tell(self, text: str) -> None:
        """Add a text to those that the next `sample` sends, in a later run if need be. Special
        tokens in it become plain text (not with model_client=litellm, which does not know them)."""
        self.unsent.append(self.client.escape_special_tokens(valid_text(text)))

    def observe(self, text: str) -> None:
        """`tell` the model what came of its last reply. The text is the turn's observation."""
        self.tell(text)
        self.turns[-1].observation = self.unsent[-1]

    @property
    def messages(self) -> list[dict]:
        """The conversation. The loop may edit the list in place: the next prompt is then rendered
        from it, and does not begin with the sampled ids. An edit alone sends nothing: `tell` the
        model something, too. Special tokens in an edit are not made plain text."""
        return self.chat.messages

    async def sample(self) -> Turn:
        """Send the texts that are unsent, and record the reply as a turn. A subclass may override
        this. Raises RuntimeError if there is nothing to send, or if the first turn lacks ids;
        ContextLengthExceededError if a later prompt is too long; and any error of the client. If no
        reply came, `unsent` is as before."""
        # Count them now: a text that is told during the call (by another asyncio task) stays.
        n_sent = len(self.unsent)
        if not n_sent:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        prompt = "\n\n".join(self.unsent)
        request = Request(session_id=self.options.session_id or self._trial_name)
        if self.messages == self._last_messages:
            request.previous = self._last_turn
        try:
            turn = await self._call_model(prompt, request)
        except BaseException:
            # Record what was sampled before an abort, so that its tokens are counted. `messages`
            # and `unsent` stay as they are.
            if request.partial:
                self._add_turn(without_thinking(request.partial), prompt)
            raise
        # From here to the end nothing is awaited, so that no cancellation loses the reply.
        self._add_turn(turn, prompt)
        del self.unsent[:n_sent]
        self._last_turn = turn
        self._last_messages = [dict(message) for message in self.messages]
        # These checks come after the turn was recorded, so that its reply can be looked at.
        if turn.finish_reason in FAILED_REASONS:
            raise ApiError(f"the server has ended the reply with {turn.finish_reason!r}")
        # Later turns without ids are no error: they are left out of the rollout, and counted. (A
        # reply that was cut off has no ids with litellm.)
        ids = (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        is_first = len(self.turns) == 1 and turn.finish_reason == "stop"
        if is_first and self.options.collect_rollout_details and None in ids:
            raise RuntimeError("no token ids or logprobs came: set collect_rollout_details=false")
        return turn

    async def _call_model(self, prompt: str, request: Request) -> Turn:
        """Call the model. While its server is busy or down, wait, and call it again."""
        # Before the first reply, a prompt that is too long is the task's fault, and a URL where
        # nothing answers may be wrong. So both are errors then.
        has_replied = self._last_turn is not None
        for pause in PAUSES_SEC:
            await asyncio.sleep(pause)
            try:
                # Chat calls `self.client.call(prompt=..., message_history=..., request=...)`, and
                # then appends the prompt and the reply to `messages`. After an error it appends
                # nothing, so the call can be repeated.
                turn = await self.chat.chat(prompt, request=request)
                self._waits_for_server = False
                return turn
            except Exception as error:
                failure = error
            meaning = meaning_of(failure)
            # Harbor's ContextLengthExceededError has no text, but litellm's error behind it has.
            text = str(failure) or repr(failure.__context__ or failure)
            self._waits_for_server = meaning == "busy" or (meaning == "down" and has_replied)
            if not self._waits_for_server:
                break
            self.logger.warning(f"the model's server has failed: {text}")
        # The call has failed for good, or the agent has waited in vain.
        self._waits_for_server = False
        if meaning == "context is full" and has_replied:
            raise ContextLengthExceededError(text) from failure
        if meaning != "context is full":
            forget_client(self.client)
        server = self.client.url or "the server"
        raise ApiError(f"{type(failure).__name__} of {server}: {text}") from failure

    def _add_turn(self, turn: Turn, prompt: str) -> None:
        turn.sent_text = prompt
        turn.timestamp = datetime.now(UTC).isoformat()
        # Compared here, and not at the end of the run, where all turns at once would stop the event
        # loop for long: a prompt may have hundreds of thousands of ids.
        if self.turns and self.turns[-1].is_trainable and turn.is_trainable:
            turn.breaks_prefix = not turn.continues(self.turns[-1])
        self.turns.append(turn)
        # Harbor writes this into trial.log, so that the text survives `kill -9`.
        text = to_json([prompt, turn.reasoning_content, turn.content]).decode()
        n_in, n_out = turn.usage.prompt_tokens, turn.usage.completion_tokens
        self.logger.debug(
            f"turn {len(self.turns)}: {n_in} tokens in, {n_out} out, {turn.finish_reason}: {text}"
        )

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Check the options, Tinker's packages and key, and the URL of a vLLM or SGLang server.
        Harbor 0.23 and later calls this before any trial. Raises ValueError."""
        options = cls.parse_options(kwargs, env)
        # A subclass that builds its own client may need no key and no URL.
        if cls._build_llm is BasicLoopAgent._build_llm:
            check_access(options, env or {})

    async def setup(self, environment: BaseEnvironment) -> None:
        """Get the model client, and list the task's skills. Raises ValueError for what is missing,
        and any error of the client or the environment."""
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        self.introduction = []
        self.client = await self._shared_llm()
        if self.skills_dir:
            # Each path, and the front of the file: the skill's name and description.
            command = f"head -v -c 1500 -- {shlex.quote(self.skills_dir)}/*/SKILL.md 2>/dev/null"
            listing = valid_text((await environment.exec(command, timeout_sec=60)).stdout)
            if listing:
                self.introduction.append(
                    f"Skills. Read a skill's file before you use it.\n\n{listing}"
                )
        for server in self.mcp_servers:
            self.introduction.append(f"MCP server: {server.model_dump_json(exclude_none=True)}")

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Start a new conversation, which begins with the task's skills and MCP servers. The turns
        are recorded even after an error. Raises ApiError or RuntimeRequestError."""
        system = self.options.system_prompt
        if system is None and self.options.max_turns > 1:
            system = self.protocol.replace("{seconds}", str(self.options.command_timeout_sec))
        self.chat = Chat(self.client, self.options.interleaved_thinking)
        if system:
            self.messages.append({"role": "system", "content": valid_text(system)})
        self._last_turn = None
        self._last_messages = None
        self.unsent = []
        for text in self.introduction:
            self.tell(text)
        await self._run_loop(instruction, environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Continue the conversation of the last `run`, for the later steps of a task. The model
        first gets what the last run has left unsent. Raises the errors of `run`."""
        await self._run_loop(instruction, environment, context)

    async def _run_loop(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        self.instruction = valid_text(instruction)
        self.turns = []
        self.metadata = {}
        self._waits_for_server = False
        # Not by `tell`: the task's author may use special tokens on purpose.
        self.unsent.append(self.instruction)
        stop_reason = StopReason.ERROR
        try:
            stop_reason = await self._converse_in_time(environment)
        except asyncio.CancelledError:
            stop_reason = StopReason.CANCELLED
            raise
        except (ApiError, RuntimeRequestError):
            raise
        except Exception as error:
            raise RuntimeRequestError(f"{type(error).__name__}: {error}") from error
        finally:
            self._record(stop_reason, context)
            # In a thread, because it takes seconds to make JSON of all ids of a long run. `wait`
            # lets the thread finish if Harbor cancels this, and does not raise the error of the
            # writing, which would replace the run's own.
            loop = asyncio.get_running_loop()
            writing = loop.run_in_executor(None, self._write_files, context)
            await asyncio.wait([writing])
        # Reached if the run has not failed: raise the error of the writing, if there is one.
        writing.result()

    async def _converse_in_time(self, environment: BaseEnvironment) -> StopReason | str:
        """`converse`, which is stopped after `max_seconds`. Raises any error of the loop, and
        ApiError if the model's server was not back in time."""
        try:
            async with asyncio.timeout(self.options.max_seconds) as timer:
                return await self.converse(environment)
        except TimeoutError as error:
            if not timer.expired():
                # Another timeout, of the environment or the loop.
                raise
            if self._waits_for_server:
                raise ApiError("max_seconds ended before the model's server was back") from error
            # No error, so that Harbor scores the trial.
            return StopReason.ROLLOUT_TIMEOUT

    def _record(self, stop_reason: StopReason | str, context: AgentContext) -> None:
        """Fill the context."""
        usages = [turn.usage for turn in self.turns]
        costs = [usage.cost_usd for usage in usages]
        totals = {
            "n_input_tokens": sum(usage.prompt_tokens for usage in usages),
            "n_output_tokens": sum(usage.completion_tokens for usage in usages),
            "n_cache_tokens": sum(usage.cache_tokens for usage in usages),
            # Harbor's clients give 0.0 for an unknown price.
            "cost_usd": sum(costs) if costs and all(costs) else None,
        }
        for name, value in totals.items():
            setattr(context, name, value)
        if ModelUsage:
            # Without it Harbor reads the totals from trajectory.json, which scripts can replace.
            context.model_usage = {self.model_name: ModelUsage(**totals)}
        # SkyRL and verl call the number of turns n_episodes.
        metadata = {"stop_reason": stop_reason, "n_episodes": len(self.turns)}
        if self.options.collect_rollout_details:
            trainable = [turn for turn in self.turns if turn.is_trainable]
            context.rollout_details = rollout_details(trainable)
            metadata["n_turns_without_ids"] = len(self.turns) - len(trainable)
            metadata["n_prefix_breaks"] = sum(turn.breaks_prefix for turn in trainable)
        # Harbor cannot save other values than JSON's.
        context.metadata = to_jsonable_python(
            metadata | self.metadata, fallback=str, inf_nan_mode="null"
        )

    def _write_files(self, context: AgentContext) -> None:
        """Write what the run leaves in the log folder. Raises RuntimeRequestError."""
        answer = self.turns[-1].content if self.turns else ""
        try:
            # Without a turn this empties the file, which may hold the answer of the step before.
            write_file(self.logs_dir / "completion.txt", [valid_text(answer).encode()])
            write_file(self.logs_dir / "trajectory.json", self._trajectory(context))
        except Exception as error:
            raise RuntimeRequestError(f"the log folder cannot be written: {error}") from error

    def _trajectory(self, context: AgentContext) -> Iterator[bytes]:
        """The parts of trajectory.json: a JSON object that ends in the list of steps. (A step at a
        time, because all ids at once would double the memory, and hold Python's lock for long.)"""
        agent = {"name": self.name(), "version": self.version(), "model_name": self.model_name}
        if self.messages and self.messages[0]["role"] == "system":
            # Not a step, because NeMo Gym takes the steps before the first reply for its input.
            agent["extra"] = {"system_prompt": self.messages[0]["content"]}
        head = {
            "schema_version": atif.Trajectory.model_fields["schema_version"].default,
            "session_id": self.options.session_id or self._trial_name,
            "agent": agent,
            "extra": context.metadata,
            "final_metrics": {
                "total_prompt_tokens": context.n_input_tokens,
                "total_completion_tokens": context.n_output_tokens,
                "total_cached_tokens": context.n_cache_tokens,
                "total_cost_usd": context.cost_usd,
            },
        }
        steps = []
        observation = ""
        for turn in self.turns:
            # The step before shows its observation already.
            if turn.sent_text != observation:
                steps.append({"source": "user", "message": turn.sent_text})
            steps.append(self.trajectory_step(turn))
            observation = turn.observation
        # ATIF wants at least one step.
        steps = steps or [{"source": "user", "message": "\n\n".join(self.unsent)}]

        yield b"{"
        for name, value in head.items():
            yield to_json(name) + b": " + to_json(value) + b", "
        yield b'"steps": ['
        for step_id, step in enumerate(steps, start=1):
            yield b", " if step_id > 1 else b""
            yield to_json(step | {"step_id": step_id}, fallback=str, inf_nan_mode="null")
        yield b"]}"

    def trajectory_step(self, turn: Turn) -> dict:
        """A turn as a step of trajectory.json (ATIF), without a step_id. A subclass may override
        this: for instance, some trainers do not train a step that has reasoning_content."""
        metrics = {
            "prompt_tokens": turn.usage.prompt_tokens,
            "completion_tokens": turn.usage.completion_tokens,
            "cached_tokens": turn.usage.cache_tokens,
            "cost_usd": turn.usage.cost_usd or None,
        }
        if self.options.collect_rollout_details and turn.is_trainable:
            metrics |= {name: getattr(turn, name) for name in (*_TOKEN_FIELDS, "extra")}
        step = {
            "source": "agent",
            "message": turn.content,
            "reasoning_content": turn.reasoning_content or None,
            "timestamp": turn.timestamp,
            "metrics": metrics,
            "observation": {"results": [{"content": turn.observation}]}
            if turn.observation
            else None,
        }
        # NeMo Gym's converter takes no null here.
        return {name: value for name, value in step.items() if value is not None}

    @property
    def _trial_name(self) -> str:
        # Harbor names a trial's folder after it. The logs are in its folder agent/.
        return self.logs_dir.parent.name

    def _build_llm(self) -> Any:
        """Build the client. This runs in a thread, because the imports take seconds. Override it
        for a client of your own: a ModelClient, or any BaseLLM of Harbor's whose content is text.
        Raises ValueError, and any error of the client."""
        options = self.options
        check_access(options, self._agent_env)
        args = copy.deepcopy(options.llm_kwargs)
        # It comes from `url_and_key`.
        args.pop("api_key", None)
        args |= options.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        if options.model_client == "litellm":
            from harbor.llms.lite_llm import LiteLLM
            from litellm import get_llm_provider

            _, provider, *_ = get_llm_provider(self.model_name, args.get("custom_llm_provider"))
            url, key = url_and_key(options, provider, self._agent_env)
            args |= options.model_dump(
                include={"max_tokens", "collect_rollout_details", "session_id"}
            )
            llm = LiteLLM(model_name=self.model_name, api_base=url, api_key=key, **args)
            return HarborClient(llm, url)
        url, key = url_and_key(options, options.model_client, self._agent_env)
        client_class = TinkerClient if options.model_client == "tinker" else ServerClient
        return client_class(options, self.model_name, url, key, **args)

    def _cache_key(self) -> tuple:
        """What the shared client depends on. Trials with equal keys share a client. Raises
        RuntimeError outside of an event loop."""
        # A client and its lock work in one event loop only.
        loop = asyncio.get_running_loop()
        options = self.options.model_dump()
        if self.options.model_client != "litellm":
            # Each call brings its session id. (LiteLLM gets it once, when it is built.)
            del options["session_id"]
        # A subclass may build another client.
        return (loop, type(self), self.model_name, options, self._agent_env)

    async def _shared_llm(self) -> Any:
        """The client of all trials with this `_cache_key`. Raises any error of the build."""
        return await shared_client(self._cache_key(), self._build_llm)


# ---- clients: how they are built

# How long a server has for its first response.
FIRST_RESPONSE_SEC = 30


def url_and_key(
    options: BasicLoopOptions, provider: str, agent_env: dict[str, str]
) -> tuple[str | None, str | None]:
    """The URL and the API key of the model's server, None for the client's default. They come from
    an option, a variable of the agent (`--ae`) or one of the process, such as OPENAI_BASE_URL. The
    provider is tinker, vllm, sglang, or litellm's name for the server, such as openai. Raises
    ValueError for a key that no HTTP header can hold."""
    # `harbor jobs resume` passes on masked keys, such as sk-r****456. They do not count.
    env = os.environ | {name: text for name, text in agent_env.items() if "****" not in text}
    prefix = provider.upper()
    url = options.api_base or env.get(f"{prefix}_BASE_URL") or env.get(f"{prefix}_API_BASE")
    key = options.llm_kwargs.get("api_key") or env.get(f"{prefix}_API_KEY")
    if key:
        # No blanks: a key from a file often ends in a newline.
        key = "".join(str(key).split())
        if not (key.isascii() and key.isprintable()):
            # An HTTP client would show such a key in its error.
            raise ValueError(f"{prefix}_API_KEY holds a character that no key has: copy it again")
    if url and provider in ("openai", "hosted_vllm"):
        # A URL that ends in a port is a server of your own, which has its API under /v1:
        # http://host:8000 becomes http://host:8000/v1.
        url = re.sub(r"(:\d+)/?$", r"\1/v1", url)
        # litellm wants a key. A server without keys takes any.
        key = key or "none"
    return url, key


def shown_url(url: str | None) -> str | None:
    """A URL without user and password, for error messages."""
    return url and re.sub("//[^/]*@", "//", url)


def check_access(options: BasicLoopOptions, agent_env: dict[str, str]) -> None:
    """Raise ValueError if Tinker's packages, its key, or the URL of a server are missing."""
    client = options.model_client
    url, key = url_and_key(options, client, agent_env)
    if client == "tinker":
        # Tinker's SDK has this module from 0.38 on.
        if not (find_spec("tinker_cookbook") and find_spec("tinker.auth")):
            raise ValueError(
                "model_client=tinker lacks its packages: `pip install 'harbor[tinker]' "
                "'tinker>=0.38'`. Other clients: vllm, sglang, litellm"
            )
        from tinker.auth import tinker_has_credentials

        if not (key or _given_service or tinker_has_credentials()):
            raise ValueError(
                "model_client=tinker lacks a key: set TINKER_API_KEY, or model_client=vllm, sglang "
                "or litellm"
            )
    elif client != "litellm" and not url:
        raise ValueError(
            f"model_client={client} lacks the server's URL: set api_base=http://... or "
            f"{client.upper()}_BASE_URL"
        )


# ---- thinking

# What opens the thinking, and the text after which the answer begins. Other tags between these two
# stay in the thinking. (The opening may be in the prompt: see `start_reply`.) Add what your model
# has.
THINKING_TAGS = {
    # <think>hm</think>hi
    "<think>": "</think>",
    "<longcat_think>": "</longcat_think>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<ifm|think>": "</ifm|think>",
    "<ifm|think_fast>": "</ifm|think_fast>",
    "<think:opensource>": "</think:opensource>",
    # [THINK]hm[/THINK]hi
    "[THINK]": "[/THINK]",
    # <|START_THINKING|>hm<|END_THINKING|>hi
    "<|START_THINKING|>": "<|END_THINKING|>",
    # <|open|>think<|sep|>hm<|close|>think<|sep|>hi
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    # Gemma: <|channel>thought hm<channel|>hi
    "<|channel>": "<channel|>",
    # gpt-oss (without thinking, a reply begins with this end):
    # <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
    "<|channel|>": "<|channel|>final<|message|>",
    # Inkling:
    # <|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>hi
    "<|message_model|>": "<|message_model|><|content_text|>",
}


def without_thinking(turn: Turn) -> Turn:
    """Move the thinking from the front of `content` to `reasoning_content`. If it is not closed,
    all of the content is thinking."""
    text = turn.content.lstrip()
    for opening, end in THINKING_TAGS.items():
        if text.startswith(opening):
            thinking, _, answer = text.partition(end)
            thinking = turn.reasoning_content + thinking.removeprefix(opening)
            return replace(turn, content=answer.lstrip(), reasoning_content=thinking)
    return turn


# ---- clients that send messages


class HarborClient(ModelClient):
    """Wraps a `BaseLLM` of Harbor's, which sends messages."""

    def __init__(self, llm: BaseLLM, url: str | None = None) -> None:
        self.llm = llm
        self.url = shown_url(url)

    async def call(
        self,
        prompt: str,
        message_history: Iterable[dict] = (),
        request: Request | None = None,
        **other: Any,
    ) -> Turn:
        # Some servers refuse an empty message, such as a reply that was nothing but thinking.
        history = [m | {"content": m["content"] or "(empty)"} for m in message_history]
        try:
            turn = Turn(**vars(await self.llm.call(prompt=prompt, message_history=history)))
        except OutputLengthExceededError as error:
            # Harbor's error has only the text, and no usage.
            turn = Turn(content=error.truncated_response, finish_reason="length")
        return without_thinking(turn)


# ---- clients that send token ids


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
        """The text with a zero-width space after the first and the last character of each special
        token. The tokenizer then makes ordinary tokens of it. (After the last one, too, because two
        tokens may share a bracket: ]~b] and ]~!b[ in ]~b]~!b[.)"""

        def broken_up(match: re.Match) -> str:
            token = match[0]
            return f"{token[0]}\u200b{token[1:]}\u200b"

        if not self.special_tokens:
            return text
        return re.sub("|".join(self.special_tokens), broken_up, text)

    async def call(
        self,
        prompt: str,
        message_history: Iterable[dict] = (),
        request: Request | None = None,
        **other: Any,
    ) -> Turn:
        request = request or Request()
        messages = [*message_history, {"role": "user", "content": prompt}]
        so_far = request.partial or await self.start_reply(messages, request.previous)
        # After an abort what was sampled so far follows the prompt.
        sampled = so_far.completion_token_ids
        ids = so_far.prompt_token_ids + sampled
        room = min(self.max_tokens - len(sampled), self.context_limit - len(ids))
        if room < 1:
            raise ContextLengthExceededError(f"no room is left after {len(ids)} tokens")
        part = await self.generate(ids, room, request.session_id)
        turn = joined(so_far, part)
        if part.finish_reason == "abort":
            # A part without ids or logprobs is of no use: go on from the parts before it.
            if part.is_trainable:
                request.partial = turn
            raise AbortedError("the server has aborted the reply")
        return without_thinking(turn)

    async def start_reply(self, messages: list[dict], previous: Turn | None) -> Turn:
        """The reply before its first token: a turn with the prompt, and no sampled ids. If the
        template opens the thinking in the prompt, the reply lacks the tag. So this puts it in front
        of `content`, where `without_thinking` looks for it."""
        ids = await self.next_prompt(messages, previous)
        # Such as "...assistant\n<think>\n". (Four tokens have room for a tag and a newline.)
        end = (await self.decode(ids[-4:])).rstrip()
        opening_tag = next((tag for tag in THINKING_TAGS if end.endswith(tag)), "")
        return Turn(content=opening_tag, prompt_token_ids=ids, completion_token_ids=[], logprobs=[])

    async def next_prompt(self, messages: list[dict], previous: Turn | None) -> list[int]:
        """The ids of the next prompt: the previous prompt, the reply as it was sampled, and the
        tail. The tail is what the template writes after a reply:

            prompt   <|im_start|>user OLD<|im_end|><|im_start|>assistant
            reply    REPLY<|im_end|>
            tail     <|im_end|><|im_start|>user NEW<|im_end|><|im_start|>assistant

        (<|im_end|> is in the reply and in the tail, and is kept once.)

        All is rendered instead if there is no previous turn, if it has no ids, or if its reply is
        complete and does not end in the token with which the tail begins.
        """
        if not (previous and previous.prompt_token_ids and previous.completion_token_ids):
            return await self.render(messages)
        reply = previous.completion_token_ids
        tail = await self._tail(messages)
        # How many tokens at the end of the reply are the tail's first ones: the stop token, two
        # (Inkling), or none if the reply was cut off.
        n_shared = next((n for n in (2, 1) if reply[-n:] == tail[:n]), 0)
        ends_unlike_the_template = previous.finish_reason == "stop" and n_shared == 0
        if not tail or ends_unlike_the_template:
            return await self.render(messages)
        return previous.prompt_token_ids + reply + tail[n_shared:]

    async def _tail(self, messages: list[dict]) -> list[int]:
        """The tokens that the template writes after a reply, up to the next one. To find them,
        render two short conversations that differ in the reply only, "b" or "c", which are one
        token each. (Not the real conversation, because templates change the replies in it.)

            one      <|im_start|>user a<|im_end|><|im_start|>assistant b TAIL
            other    <|im_start|>user a<|im_end|><|im_start|>assistant c TAIL

        The first token that differs is the reply, and all after it is the tail. It is empty if no
        token differs.
        """

        async def rendered(reply: str) -> list[int]:
            # The tail may depend on the system message, which may turn thinking off.
            system = [message for message in messages[:1] if message["role"] == "system"]
            user = {"role": "user", "content": "a"}
            assistant = {"role": "assistant", "content": reply}
            return await self.render([*system, user, assistant, messages[-1]])

        one, other = await rendered("b"), await rendered("c")
        differs = [a != b for a, b in zip(one, other, strict=False)]
        return one[differs.index(True) + 1 :] if True in differs else []


def joined(so_far: Turn, part: Turn) -> Turn:
    """The turn of a reply that came in two parts, of which the first one may be empty."""
    n = len(so_far.completion_token_ids)
    usage = part.usage.model_copy()
    usage.prompt_tokens = len(so_far.prompt_token_ids)
    # The server may have cached the parts before, too.
    usage.cache_tokens = min(usage.cache_tokens, usage.prompt_tokens)
    usage.completion_tokens += n
    ids, logprobs = part.completion_token_ids, part.logprobs
    # (The routed_experts of the last part cover the whole reply, and replace those before.)
    extra = so_far.extra | part.extra
    if "weight_versions" in part.extra:
        # `start` and `end` count the tokens of the part: add those of the parts before.
        spans = [
            span | {"start": span["start"] + n, "end": span["end"] + n}
            for span in part.extra["weight_versions"]
        ]
        extra["weight_versions"] = so_far.extra.get("weight_versions", []) + spans
    return replace(
        part,
        content=so_far.content + part.content,
        usage=usage,
        prompt_token_ids=so_far.prompt_token_ids,
        completion_token_ids=None if ids is None else so_far.completion_token_ids + ids,
        logprobs=None if logprobs is None else so_far.logprobs + logprobs,
        extra=extra,
    )


# ---- Tinker


async def in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Like `asyncio.to_thread`, but the thread does not keep the process alive: if nothing answers
    at its URL, Tinker's SDK tries for up to twelve minutes, and the process could not exit."""
    future = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    # Without the shield a cancellation would cancel `future`, too, and `set_result` would raise.
    return await asyncio.shield(asyncio.wrap_future(future))


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

        self.url = shown_url(url)
        self.max_tokens = options.max_tokens
        name = options.renderer_name or get_recommended_renderer_name(model)
        self._tokenizer = get_tokenizer(model)
        with _tokenizer_lock:
            self._renderer = get_renderer(name, self._tokenizer)
            # A list of token ids, or of texts: the renderer role_colon has one text.
            stop = self._renderer.get_stop_sequences()
            stop_texts = [s if isinstance(s, str) else self._tokenizer.decode([s]) for s in stop]
            # Some tokenizers have no such method, and make no special token of any text.
            has_names = hasattr(self._tokenizer, "get_added_vocab")
            names = self._tokenizer.get_added_vocab() if has_names else []
        # What `generate` removes from the end of a reply's text, one after the other: the stop
        # sequence, the eos_token (of a base model), and what Inkling has before its stop token, as
        # in hi<|end_message|><|end_turn|>.
        self._endings = [*stop_texts, self._tokenizer.eos_token or "", "<|end_message|>"]
        # Skip single characters and blanks, which some vocabularies add: any text may hold them.
        self.special_tokens = [re.escape(name) for name in names if len(name.strip()) > 1]
        parameters = tinker.SamplingParams.model_fields
        sampling = {name: value for name, value in args.items() if name in parameters}
        self._params = tinker.SamplingParams(stop=stop, **sampling)
        # Names that SamplingParams does not have go to `create_sampling_client`, which refuses
        # unknown ones. So a misspelt name fails.
        client_args = {name: value for name, value in args.items() if name not in parameters}
        source = {"model_path": options.model_path} if options.model_path else {"base_model": model}
        self._source = source | client_args
        self._model, self._given_limit, self._service = model, options.context_limit, None
        # URL and key. If one is None, the SDK finds its own.
        self._login = (url, key)

    async def connect(self) -> None:
        # In threads, because the SDK's constructors wait for the server.
        try:
            async with asyncio.timeout(FIRST_RESPONSE_SEC):
                cards = await in_daemon_thread(self._models)
        except TimeoutError as error:
            raise ApiError(
                f"{self.url or 'Tinker'} has not answered in {FIRST_RESPONSE_SEC} seconds"
            ) from error
        limit = {card.model_name: card.max_context_length for card in cards}.get(self._model)
        self.context_limit = min(filter(None, (limit, self._given_limit)), default=32_000)
        try:
            # (The SDK itself gives up here after some minutes.)
            await in_daemon_thread(self._open)
        except Exception:
            self.discard()
            raise

    def _models(self) -> list[Any]:
        import tinker

        url, key = self._login
        try:
            answer = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities()
            return answer.result().supported_models
        except tinker.TinkerError:
            # A server of your own may not tell its limits. A wrong key is reported by `_open`.
            return []

    def _open(self) -> None:
        import tinker

        # There is no lock: two clients at once may open two services, which does no harm.
        self._service = _given_service or _tinker_services.get(self._login)
        if not self._service:
            url, key = self._login
            self._service = tinker.ServiceClient(base_url=url, api_key=key)
            _tinker_services[self._login] = self._service
        self._sampling_client = self._service.create_sampling_client(**self._source).result()

    def discard(self) -> None:
        # Only its own: another client may have opened a new one already.
        if _tinker_services.get(self._login) is self._service:
            _tinker_services.pop(self._login, None)

    async def render(self, messages: list[dict]) -> list[int]:
        with _tokenizer_lock:
            return self._renderer.build_generation_prompt(messages).to_ints()

    async def decode(self, ids: list[int]) -> str:
        with _tokenizer_lock:
            return self._tokenizer.decode(ids)

    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        import tinker

        response = await self._sampling_client.sample(
            prompt=tinker.ModelInput.from_ints(prompt_ids),
            num_samples=1,
            sampling_params=self._params.model_copy(update={"max_tokens": max_tokens}),
        )
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
            extra={"sequence_id": sequence.sequence_id},
        )
        turn.usage.cache_tokens = response.prompt_cache_hit_tokens or 0
        return turn


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
# These values leave the model's distribution as it is. Without them vLLM uses those of the model's
# generation_config.json.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def context_limits(cards: list[dict], is_sglang: bool) -> dict[str, int]:
    """The context limit of each model and LoRA adapter on a server, by the name that a request has
    to give: "sql" for an adapter of vLLM, "base:sql" for one of SGLang."""
    # An adapter has no limit of its own. The largest is that of its base model.
    largest = max(card["max_model_len"] or 0 for card in cards)
    limits = {}
    for card in cards:
        name = card["id"]
        if is_sglang and card.get("parent"):
            name = f"{card['parent']}:{name}"
        limits[name] = card["max_model_len"] or largest
    return limits


class ServerClient(TokenClient):
    """A vLLM or SGLang server by token ids: /tokenize renders, /v1/completions samples."""

    special_tokens = SPECIAL_TOKENS

    def __init__(
        self, options: BasicLoopOptions, model: str, url: str, key: str | None, **args: Any
    ) -> None:
        from openai import AsyncOpenAI, Timeout

        self.url = shown_url(url)
        self.max_tokens = options.max_tokens
        self._given_limit = options.context_limit
        self._is_sglang = options.model_client == "sglang"
        # In litellm the name of a model on vLLM begins with hosted_vllm/.
        self._model = model.removeprefix("hosted_vllm/")
        # It is never closed, because Harbor does not say when a job ends.
        self._http = AsyncOpenAI(
            # /tokenize is not under /v1.
            base_url=url.rstrip("/").removesuffix("/v1"),
            # The openai package wants a key. A server without keys takes any.
            api_key=key or "none",
            default_headers=args.pop("extra_headers", None),
            # No time limit for a response, unless llm_kwargs has one: after a timeout the package
            # asks again, and the reply is sampled twice. The limits of the run end the call.
            timeout=Timeout(args.pop("timeout", None), connect=FIRST_RESPONSE_SEC),
            max_retries=args.pop("max_retries", 2),
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
            limits = context_limits(response["data"], self._is_sglang)
            if self._model not in limits:
                raise ValueError(f"its models are {list(limits)}")
            limit = limits[self._model]
            self.context_limit = min(limit, self._given_limit or limit)
        except (APIError, KeyError, TypeError, ValueError) as error:
            raise ApiError(
                f"{self.url} is no vLLM or SGLang server with the model {self._model} (for another "
                f"one set model_client=litellm): {error!r}"
            ) from error

    async def _post(self, path: str, body: dict, headers: dict | None = None) -> dict:
        body = {"model": self._model, **body}
        options = {"headers": headers or {}}
        return await self._http.post(path, body=body, options=options, cast_to=object)

    async def render(self, messages: list[dict]) -> list[int]:
        # The servers add the header of the next reply, unless they are told not to.
        body = {"messages": messages, "chat_template_kwargs": self._template_kwargs}
        return (await self._post("/tokenize", body))["tokens"]

    async def decode(self, ids: list[int]) -> str:
        key = tuple(ids)
        if key not in self._decoded:
            # The flag is for SGLang, which drops special tokens by default.
            body = {"tokens": ids, "skip_special_tokens": False}
            response = await self._post("/detokenize", body)
            # vLLM calls the text "prompt".
            self._decoded[key] = response["text"] if "text" in response else response["prompt"]
        return self._decoded[key]

    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        body = {
            **self._body,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            # 0 means the log-probability of the sampled token alone.
            "logprobs": 0,
            "return_token_ids": True,
            # The tags of thinking may be special tokens. (The server takes the stop token off.)
            "skip_special_tokens": False,
        }
        if not self._is_sglang:
            # vLLM 0.33 and later answers this. SGLang answers it unasked.
            body["return_weight_versions"] = True
        headers = {}
        if session:
            body["session_id"] = session
            # Routers look at the header first. It is ASCII: a trial's name may hold other letters.
            headers = {"X-Session-ID": urllib.parse.quote(session)}
        response = await self._post("/v1/completions", body, headers)
        reply = response["choices"][0]
        extra = {}
        # vLLM returns these in the choice, SGLang beside the choices.
        for place in (reply, response.get("sglext"), response.get("metadata")):
            for name in ("routed_experts", "weight_versions"):
                if place and place.get(name):
                    extra[name] = place[name]
        usage = response.get("usage") or {}
        ids = reply.get("token_ids")
        turn = Turn(
            content=reply["text"],
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            logprobs=(reply.get("logprobs") or {}).get("token_logprobs"),
            finish_reason=reply["finish_reason"],
            extra=extra,
        )
        # A server that gives no ids still counts them.
        turn.usage.completion_tokens = usage.get("completion_tokens") or len(ids or [])
        details = usage.get("prompt_tokens_details") or {}
        turn.usage.cache_tokens = details.get("cached_tokens") or 0
        return turn


# ---- training data

# A trial that ended with one of these errors was scored, so it has training data. With any other
# error it has none.
SCORED_ERRORS = {
    # The task's time ran out.
    "AgentTimeoutError",
    # From agents that are installed in the container.
    "NonZeroAgentExitCodeError",
}


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


def training_data(trial: TrialResult) -> TrainingData | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`. None if
    the trial failed, if one of its steps ended in ERROR, or if it has neither a reward nor a
    trainable turn. Raises ValueError if ids and logprobs do not align, or a number is infinite."""
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    stop_reasons = [(context.metadata or {}).get("stop_reason") for context in contexts]
    rewards = (trial.verifier_result.rewards if trial.verifier_result else None) or {}
    errors = {part.exception_info.exception_type for part in (trial, *steps) if part.exception_info}
    if (
        errors - SCORED_ERRORS
        or StopReason.ERROR in stop_reasons
        # Harbor 0.25 and later also says whether the reward is valid.
        or (rewards and not getattr(trial, "reward_valid", True))
    ):
        return None
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"trial {trial.trial_name}: a reward is not a finite number: {rewards}")
    reward = rewards.get("reward")
    if len(rewards) == 1:
        (reward,) = rewards.values()
    turns = [turn for context in contexts for turn in turns_of(context)]
    if not rewards and not turns:
        return None
    return TrainingData(turns, reward, stop_reasons[-1], trial)


# The names by which callers of earlier versions import it.
_trial_to_trajectory = trial_to_trajectory = training_data


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, in a list, with an entry for each of these turns; None if there are
    none. (The caller leaves out turns that are not trainable, so that all lists stay aligned.)"""
    if not turns:
        return None
    detail = {name: [getattr(turn, name) for turn in turns] for name in _TOKEN_FIELDS}
    names = {name for turn in turns for name in turn.extra}
    detail["extra"] = {name: [turn.extra.get(name) for turn in turns] for name in names}
    return [detail]


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The trainable turns of a run, from its `rollout_details`. Raises ValueError if the lists do
    not align."""
    for detail in context.rollout_details or []:
        extra = detail.get("extra") or {}
        columns = [detail.get(name) or [] for name in _TOKEN_FIELDS]
        n_turns = len(columns[0])
        if any(len(column) != n_turns for column in (*columns, *extra.values())):
            raise ValueError("the lists of a rollout differ in length")
        for n, (prompt, completion, logprobs) in enumerate(zip(*columns, strict=True)):
            turn = Turn(
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                logprobs=logprobs,
                extra={name: entries[n] for name, entries in extra.items()},
            )
            if not turn.is_trainable:
                raise ValueError("ids and logprobs differ in length, or a logprob is not finite")
            yield turn


# ---- files and texts


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file into the log folder, where a script can put a link or a pipe in its place. So
    the old file is never opened: write a new one beside the log folder, then rename it. Raises
    OSError, also if a script has put a folder in its place."""
    fresh = path.parent.parent / f".{path.name}.{uuid4().hex}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(fresh, "wb") as file:
            file.writelines(parts)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def valid_text(text: str | None) -> str:
    """Text that tokenizers, servers and files accept: None becomes "", a lone surrogate becomes
    "?", and NUL is left out."""
    return (text or "").replace("\0", "").encode("utf-8", "replace").decode()


# A parser of Markdown's fences. The other rules are on because they decide whether ``` is a fence:
# it is none in indented code, and a heading decides where a list begins.
_MARKDOWN = MarkdownIt("zero").disable("inline")
_MARKDOWN.enable(["fence", "code", "list", "heading", "lheading", "hr", "reference"])


def fenced_blocks(text: str, *languages: str) -> list[str] | None:
    """The ``` blocks of a Markdown text that are in one of these languages (in lower case). Their
    fences are lines of their own. A block inside another one, or inside ~~~, does not count. None
    if there is such a block, and some block of the text is not closed."""
    blocks = []
    is_any_open = False
    # Add a newline, so that each line of the text ends in one.
    for token in _MARKDOWN.parse(f"{text}\n"):
        if token.type != "fence":
            continue
        # A closed block has two fences around the lines of its content, an open one has one.
        first_line, end_line = token.map
        n_fences = end_line - first_line - token.content.count("\n")
        is_any_open = is_any_open or n_fences < 2
        words = token.info.lower().split()
        if token.markup.startswith("`") and words and words[0] in languages:
            blocks.append(token.content)
    return None if blocks and is_any_open else blocks


# ---- scripts
#
# A script runs from a file, by a short bash program in a file, the runner. So no word of the script
# is on a command line: models run `pkill -f python`, which kills every process with "python" on its
# command line. The output goes to a file, too, and not to a pipe: a background process would hold a
# pipe open after the script has ended. The files are in /dev/shm, where endless output stops at its
# size (64 MB in Docker). In /tmp, the fallback, it fills the disk.
#
# 1. `start_command` makes a command for `environment.exec`. It writes script and runner, and then
#    becomes the runner. The files' names begin with a random mark. The runner has it as the
#    variable BASIC_LOOP_MARK, too, which all that it starts inherits.
# 2. The runner runs the script. Its report is :MARK:EXIT CODE:OUTPUT: with the output in base64,
#    because `environment.exec` returns text, and a script may print any bytes. The report of
#    `echo hello` is :3f2a19bc:0:aGVsbG8K: (base64 adds newlines, which the decoder skips).
# 3. `kill_script` kills all processes that have the mark in their environment (not those that have
#    cleared it, or run as another user). It is called if there is no report, after the time limit,
#    and if the run is cancelled. Otherwise a background process, such as a server, lives on.
#
# The environment needs /proc, bash, coreutils and grep.

# Three limits, so that the inner one ends first: `timeout` at N seconds, the agent at N + 30 (if a
# call of `environment.exec` hangs), `exec` itself at N + 60 (some environments have a short limit
# by default).
MARGIN_SEC = 30


def start_command(blocks: list[str], mark: str, seconds: int, max_bytes: int) -> str:
    """The command that writes the files, and becomes the runner."""
    # One `eval` per block: a here-document that is left open, or a syntax error, ends with its
    # block, and the next block runs.
    script = "\n".join(f"eval {shlex.quote(block)}" for block in blocks)

    # In base64: so no word of the script is on this command line, and quoting it twice would make
    # it much longer.
    def in_base64(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    # bash's `exec` replaces this shell by the runner. So the loop goes on only if a file could not
    # be written.
    return f"""
for base in /dev/shm/{mark} /tmp/{mark}; do
  echo {in_base64(script)} | base64 -d >$base.script &&
    echo {in_base64(_RUNNER)} | base64 -d >$base.runner &&
    exec env BASIC_LOOP_MARK={mark} bash $base.runner {seconds} {max_bytes}
done
"""


# The runner's arguments are the time limit in seconds, and the bytes of output that the model sees.
_RUNNER = r"""
# Some environments mix stderr into stdout, where a message would spoil the report.
exec 2>/dev/null
# An image may set SHELLOPTS=errexit.
set +e
base=${0%.runner}
seconds=$1
max_bytes=$2
half=$((max_bytes / 2))
# Append, because `>/dev/stderr` in a script truncates this file.
timeout -s KILL "$seconds" bash "$base.script" </dev/null >>"$base.output" 2>&1
code=$?
printf ":%s:%s:" "$BASIC_LOOP_MARK" "$code"
{
  size=$(stat -c %s "$base.output")
  if [ "$size" -gt "$max_bytes" ]; then
    head -c "$half" "$base.output"
    printf "\n[... %s bytes left out ...]\n" "$((size - 2 * half))"
    tail -c "$half" "$base.output"
  else
    # Not cat: a background process may still be printing.
    head -c "$max_bytes" "$base.output"
  fi
  # If no byte more can be written, the folder is full, and the end of the output was lost.
  echo >>"$base.output" || printf "\n[The output is incomplete: %s is full.]" "${base%/*}"
} | base64
# The last colon: the report is complete.
echo :
# Both folders: writing to /dev/shm may have failed half-way.
rm -f /dev/shm/"$BASIC_LOOP_MARK".* /tmp/"$BASIC_LOOP_MARK".*
"""


def script_result(exit_code: int | str, *texts: str) -> str:
    """What the model is told of a script."""
    return f"Exit code: {exit_code}\nOutput:\n" + ("\n".join(filter(None, texts)) or "(none)")


def parse_report(printed: str, mark: str) -> tuple[int, str] | None:
    """The exit code and the output, from what the runner has printed. None if that is missing or
    incomplete."""
    _, _, report = printed.partition(f":{mark}:")
    try:
        # Without the last colon the unpacking fails (ValueError), as does bad base64.
        code, encoded, _ = report.split(":", 2)
        output = base64.b64decode(encoded).decode("utf-8", "replace")
        return int(code), output.removesuffix("\n")
    except ValueError:
        return None


_KILL = """
# grep finds /proc/PID/environ, and cut takes the PID. (This command has no mark in its own.)
kill -9 $(grep -ls BASIC_LOOP_MARK={mark} /proc/[0-9]*/environ | cut -d / -f 3) 2>/dev/null
rm -f /dev/shm/{mark}.* /tmp/{mark}.*
# Return code 0: the environment still runs commands.
true
"""


async def kill_script(mark: str, environment: BaseEnvironment) -> bool:
    """Kill a script and what it has started, and remove its files. Returns whether the environment
    still runs commands."""
    try:
        async with asyncio.timeout(MARGIN_SEC):
            result = await environment.exec(_KILL.format(mark=mark), timeout_sec=2 * MARGIN_SEC)
    except Exception:
        return False
    return result.return_code == 0


async def run_script(
    blocks: list[str], environment: BaseEnvironment, seconds: int, max_bytes: int
) -> str:
    """Run blocks as one script with a time limit in seconds. Returns its exit code and its output,
    as the model gets them. Raises RuntimeRequestError if the environment runs nothing any more, and
    any error of its `exec`."""
    mark = uuid4().hex[:8]
    command = start_command(blocks, mark, seconds, max_bytes)
    # The command becomes one argument of a process: Linux takes 131,072 bytes, Modal 65,536.
    if len(command) > 65_000:
        # 126 is bash's code for "cannot be run".
        return script_result(126, "[Nothing was run: the script is too long. Split it.]")
    clock = asyncio.get_running_loop().time
    started = clock()
    printed = ""
    try:
        async with asyncio.timeout(seconds + MARGIN_SEC):
            result = await environment.exec(command, timeout_sec=seconds + 2 * MARGIN_SEC)
            # stderr says why there is no report, such as "bash: not found".
            printed = valid_text(result.stdout) + valid_text(result.stderr)
    except TimeoutError:
        pass  # There is no report.
    except BaseException:
        # The run was cancelled, or `environment.exec` has failed.
        await kill_script(mark, environment)
        raise
    report = parse_report(printed, mark)
    if report is None:
        printed = printed[-max_bytes:]
        # The kill is also the test whether the environment still runs commands.
        if not await kill_script(mark, environment):
            raise RuntimeRequestError(f"the environment runs no scripts any more: {printed}")
        return script_result("unknown", printed, "[The script's runner gave no report.]")
    code, output = report
    # A script can forge the report, so limit it here, too. (The runner adds less than 200
    # characters.)
    output = output[: max_bytes + 200]
    # `timeout` exits with 137 at the limit (uutils: 124). A script may exit with them earlier.
    if code in (137, 124) and clock() - started >= seconds:
        # What has left the process group of `timeout`, such as by setsid, still runs.
        await kill_script(mark, environment)
        return script_result(code, output, f"[The time limit of {seconds} seconds was reached.]")
    return script_result(code, output)
