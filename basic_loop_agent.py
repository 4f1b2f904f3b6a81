# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
r"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples,
if the server returns token ids.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://... --ak max_turns=50 --ak max_tokens=4096

The agent samples from one model in one conversation, and runs one script per turn. It does not
compact long conversations, call tools natively or run commands in parallel.

Harbor calls `run` or `resume` once per instruction: once for most trials, once per step for a task
with several steps. A run is one such call. A turn is one model call and its reply. A rollout is the
token ids and log-probabilities of a run's turns. The answer is normally the text of the last reply
(see the property `answer`).

The parts of this file, in order. To change the loop, read up to the end of `answer`.

1. Options, and the words and errors with which a run ends.
2. `Turn`, which is what the agent records, and `ModelClient`, which samples turns.
3. `BasicLoopAgent`: the loop, `sample`, a run from start to end, its record, its client.
4. What an error of a server means. The cache of clients. URLs and keys.
5. Thinking. The clients of chat APIs. The clients that send token ids: Tinker, vLLM, SGLang.
6. Training data from a finished trial.
7. Files, the time limit of a task, the blocks of a reply, and the scripts made of them. (A subclass
   that overrides `execute` does not use the scripts.)
8. Tables: the words of servers, the variables of providers, thinking tags, special tokens.

The model's scripts run in the task's container. The agent limits how much of their output the model
sees, but not the disk space and memory that they use. They can also write into the agent's log
folder if it is mounted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import functools
import json
import math
import os
import re
import shlex
import socket
import threading
import traceback
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast
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
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import to_json, to_jsonable_python

if TYPE_CHECKING or find_spec("harbor.agents.options"):
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions
    from harbor.models.agent.context import ModelUsage
else:
    # Harbor before 0.23 lacks them.
    class AgentOptions(BaseModel, extra="forbid"): ...

    class AgentCapabilities(BaseModel): ...

    ModelUsage = None

__version__ = "1.0.0"


# ---- options, endings and errors


class BasicLoopOptions(
    AgentOptions, allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
):
    """The options of `--ak key=value`."""

    model_path: str | None = None
    """Only for tinker: the checkpoint to sample from, tinker://...; default: the base model."""
    renderer_name: str | None = None
    """Only for tinker: tinker-cookbook's renderer; default: the one recommended for the model."""
    max_tokens: PositiveInt = 512
    """Maximum tokens per model call, thinking included."""
    temperature: NonNegativeFloat | None = 1.0
    """Sampling temperature. null leaves it out of the request, because some models reject it."""
    max_turns: PositiveInt = 1
    """Maximum number of model calls. 1: the reply is the answer. Above 1: each reply's blocks are
    run."""
    system_prompt: str | None = None
    """System message; "" sends none. Default: an explanation of bash blocks if max_turns > 1."""
    model_client: Literal["tinker", "litellm", "vllm", "sglang"] = "tinker"
    """Where replies are sampled: tinker; vllm or sglang, a server that receives token ids; or
    litellm, any chat API, which receives messages."""
    api_base: str | None = None
    """URL of the server: http://... Default: a variable such as VLLM_BASE_URL, or the provider's
    own URL."""
    top_p: PositiveFloat | None = Field(None, le=1)
    """Nucleus sampling: the smallest set of tokens with this total probability. null: 1.0 for vllm
    and sglang, omitted otherwise."""
    max_seconds: NonNegativeFloat | None = None
    """Seconds after which the loop ends and the trial is scored. 0: no limit. Default: the task's
    timeout minus 30 seconds, or 90% of a timeout under 300 seconds."""
    llm_kwargs: dict[str, Any] = Field({}, repr=False)
    """Further arguments for the client, such as stop. Some servers ignore a misspelled name. Error
    messages do not show these arguments."""
    collect_rollout_details: bool | None = None
    """Record token ids and logprobs; default: false for litellm, true for the others."""
    context_limit: PositiveInt | None = None
    """Not for litellm: maximum tokens of prompt and reply. Default: the server's limit, or 32000 if
    Tinker reports none."""
    interleaved_thinking: bool = False
    """Only for litellm: send the thinking back with each reply, as reasoning_content."""
    model_info: dict[str, Any] | None = None
    """Only for litellm: prices of a model unknown to litellm, in the format of its price list."""
    session_id: str | None = None
    """Not for tinker: sent with each call, for a router with sticky sessions. Default: the trial's
    name for vllm and sglang, none for litellm."""
    command_timeout_sec: PositiveInt = Field(120, le=7 * 24 * 3600)
    """Time limit of a script in seconds; at most a week."""
    max_output_bytes: PositiveInt = 10_000
    """If a script prints more bytes, the model sees half of this number from the start and half
    from the end."""

    @model_validator(mode="before")
    @classmethod
    def _take_options_from_llm_kwargs(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Trainers put options into llm_kwargs, such as the top_p of SkyRL's own configuration. So
        an option that was not given is taken from there."""
        llm_kwargs = given.get("llm_kwargs")
        if isinstance(llm_kwargs, str):
            raise ValueError('llm_kwargs must be a JSON object, such as \'{"stop": ["x"]}\'')
        if not isinstance(llm_kwargs, dict):
            return given
        taken = {name: value for name, value in llm_kwargs.items() if name in OPTION_NAMES}
        for name, value in taken.items():
            if name in given and given[name] != value:
                raise ValueError(
                    f"llm_kwargs and the option {name} have different values: give one of them"
                )
        others = {name: value for name, value in llm_kwargs.items() if name not in taken}
        return given | taken | {"llm_kwargs": others}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.collect_rollout_details is None:
            self.collect_rollout_details = self.model_client != "litellm"
        for name in ("extra_body", "extra_headers"):
            if not isinstance(self.llm_kwargs.get(name) or {}, dict):
                raise ValueError(f"llm_kwargs: {name} must be a JSON object")
        extra_body = self.llm_kwargs.get("extra_body") or {}
        for name in OPTION_NAMES & extra_body.keys():
            raise ValueError(f"extra_body must not contain {name}: give it as an option")
        arguments = {*self.llm_kwargs, *extra_body}
        for name in REFUSED_ARGUMENTS.keys() & arguments:
            raise ValueError(f"llm_kwargs must not contain {name}: {REFUSED_ARGUMENTS[name]}")
        for name, clients in CLIENTS_OF_OPTION.items():
            # Harbor's AgentOptions has reasoning_effort, from 0.25 on.
            is_given = getattr(self, name, None) or name in arguments
            if is_given and self.model_client not in clients:
                raise ValueError(f"{name} is for model_client={' or '.join(clients)}: drop it")
        if self.model_path is not None and not self.model_path.startswith("tinker://"):
            raise ValueError("model_path must begin with tinker://")
        if self.api_base is not None:
            check_url(self.api_base, "api_base")
        return self


# The options declared above. Of the others in Harbor's AgentOptions, the agent reads only
# reasoning_effort.
OPTION_NAMES = BasicLoopOptions.__annotations__.keys()
# Options that only some clients use. model_info, interleaved_thinking and session_id are not
# listed, because trainers set them for every client.
CLIENTS_OF_OPTION = {
    "model_path": ["tinker"],
    "renderer_name": ["tinker"],
    "reasoning_effort": ["litellm"],
    "context_limit": ["tinker", "vllm", "sglang"],
}
# What llm_kwargs must not contain, and why.
REFUSED_ARGUMENTS = {
    **dict.fromkeys(["model", "model_name", "messages", "prompt", "stream"], "the agent sets it"),
    **dict.fromkeys(["n", "best_of", "echo"], "the agent reads one reply per prompt"),
    "truncate_prompt_tokens": "the recorded prompt ids would differ from those that the model saw",
    "base_url": "use the option api_base",
    # Arguments of Harbor's LiteLLM that the litellm package does not accept.
    "max_thinking_tokens": 'use thinking={"type": "enabled", "budget_tokens": ...}',
    "use_responses_api": "name the model openai/responses/NAME",
}


class StopReason(StrEnum):
    """The agent's own reasons for the end of a run. The stop_reason in the metadata may also be a
    server's finish reason, such as "content_filter", or any string that `converse` returns."""

    # The reply holds no command, or max_turns is 1.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was truncated, at `max_tokens` or at the end of the context window.
    MAX_TOKENS = "max_tokens"
    # The conversation left no room in the context window for a reply.
    CONTEXT_OVERFLOW = "context_overflow"
    # `max_seconds` passed; the call or script that was under way was stopped.
    ROLLOUT_TIMEOUT = "rollout_timeout"
    # Harbor cancelled the run at the agent's timeout or after Ctrl-C.
    CANCELLED = "cancelled"
    # An exception, which Harbor keeps as the exception_info of the trial or the step.
    ERROR = "error"


NO_MODEL = "no model: name one with -m, such as Qwen/Qwen3-8B (tinker) or openai/gpt-5 (litellm)"

# Every run that fails raises ApiError or RuntimeRequestError. The names are Harbor's: it decides by
# the name of an error's class whether to score a trial, and does not score these two (see its
# error_policy.py).


class ApiError(RuntimeError):
    """The model's server failed, or the very first prompt is too long for the model."""


class RuntimeRequestError(RuntimeError):
    """The environment, the loop or the recording failed."""


class UnreadableError(RuntimeError):
    """The server's answer cannot be read as a result. It may be a gateway's error page, so the
    agent waits, as for a server that is down."""


class AbortedError(RuntimeError):
    """The server stopped before the reply was complete, for instance to load new weights. The agent
    waits, as for a busy server, and samples the reply again from its first token."""


# ---- turns, and the clients that sample them

# A message of the conversation: its role and its content.
Message = dict[str, Any]


@dataclass
class Turn(LLMResponse):
    """One model call. The reply's ids are exactly those that were sampled. The turns that
    `training_data` returns have the ids but not the text.

    Set by the client, attributes of Harbor's LLMResponse:
        content: The reply's text, without thinking.
        reasoning_content: The thinking.
        usage: The tokens of prompt, reply and cache, and the cost in USD (0.0: not known). The
            run's totals are the sums of these.
        prompt_token_ids: One id per token of the whole prompt, or None.
        completion_token_ids: One id per sampled token, the stop token included, or None.
        logprobs: One log-probability per sampled token, or None. vLLM gives those of the raw
            model, before temperature and top_p, unless it has --logprobs-mode processed_logprobs.
        extra: Other JSON values: sequence_id and prompt_cache_hit_tokens (for Tinker's trainer),
            routed_experts (vLLM, SGLang), weight_versions (vLLM 0.33, SGLang 0.5.21 and later:
            which policy sampled which tokens, as a list of {version, start, end}).

    Also set by the client:
        finish_reason: Why the reply ended. "stop": it is complete. "max_tokens": it was truncated,
            at `max_tokens` or at the end of the context window. Any other word is the server's own,
            in lower case, and the reply is incomplete.

    Set by `sample`:
        prompt: The user message of this turn, as it was passed to `sample`.
        sent_at, timestamp: When the prompt was sent and when the reply came, in ISO 8601.
        breaks_prefix: True if the prompt does not begin with the ids of the turn before, and both
            turns are trainable (see `is_trainable`).

    Set by the loop; a subclass's `execute` may change them:
        script: The commands that ran after this reply, or that were running when the run ended.
        observation: What the model is told after this reply, such as the script's output. If the
            run ends before the model has seen it, the next step opens with it. A reply with an
            observation is not an answer (see the property `answer`).
    """

    # LLMResponse gives defaults to its other fields, but not to `content`.
    content: str = ""
    finish_reason: str = "stop"
    prompt: str = ""
    sent_at: str | None = None
    timestamp: str | None = None
    breaks_prefix: bool = False
    script: str = ""
    observation: str = ""

    def __post_init__(self) -> None:
        # Not every tokenizer, server or file accepts a lone surrogate or a NUL.
        self.content = valid_text(self.content)
        self.reasoning_content = valid_text(self.reasoning_content)
        reason = valid_text(str(self.finish_reason)).lower()
        is_truncated = reason in TRUNCATED_REASONS
        self.finish_reason = StopReason.MAX_TOKENS.value if is_truncated else reason
        self.extra = self.extra or {}
        # The client gave no usage: count the tokens.
        self.usage = self.usage or usage_of(
            len(self.prompt_token_ids or []), len(self.completion_token_ids or [])
        )

    @property
    def is_trainable(self) -> bool:
        """True if the turn has the prompt's ids and at least one sampled token, and every sampled
        token has a finite logprob."""
        ids, logprobs = self.completion_token_ids, self.logprobs or []
        # vLLM writes -9999.0 for a logprob that it does not have. NaN fails any comparison.
        is_finite = all(isinstance(x, int | float) and -9999.0 < x < math.inf for x in logprobs)
        return bool(self.prompt_token_ids and ids and len(ids) == len(logprobs) and is_finite)

    @property
    def ids(self) -> list[int]:
        """The ids of the prompt and the reply, in one list; empty if the client gave none."""
        return (self.prompt_token_ids or []) + (self.completion_token_ids or [])


def usage_of(
    n_prompt: int, n_completion: int, n_cached: int | None = 0, cost_usd: float | None = 0.0
) -> UsageInfo:
    """What a call used, in tokens. A cost of None or 0.0 is not known."""
    return UsageInfo(
        prompt_tokens=n_prompt,
        completion_tokens=n_completion,
        cache_tokens=n_cached or 0,
        cost_usd=cost_usd or 0.0,
    )


class ModelClient(ABC):
    """Samples the replies of a model, for all trials of a job. Harbor's Chat uses it in place of a
    BaseLLM."""

    # The server's URL without a password, or its provider, for error messages. None: not known.
    url: str | None = None

    async def connect(self) -> None:  # noqa: B027 (most clients need nothing here)
        """Ask the server for its limits. Raises any error of the server."""

    def after_failure(self) -> None:  # noqa: B027
        """Called when the server failed for good. Drop what several clients share, such as Tinker's
        session."""

    @abstractmethod
    async def call(
        self,
        prompt: str,
        message_history: Sequence[Message] = (),
        *,
        previous: Turn | None = None,
        session_id: str | None = None,
        **other: Any,
    ) -> Turn:
        """Sample a reply, and split off its thinking. Harbor's Chat calls this. While the server is
        busy or down, the agent repeats the call.

        Args:
            prompt: The text of the new message, which is not in `message_history` yet.
            message_history: The messages before it.
            previous: The previous turn, for clients that send token ids. Its prompt ids and its
                reply ids begin the next prompt. None for the first turn and after an edit of the
                conversation; the whole prompt is then rendered.
            session_id: For a router with sticky sessions.
            other: Arguments that Chat adds.

        Raises ContextLengthExceededError if there is no room for a reply, AbortedError if the
        server stopped before the reply was complete, and any other error of the server. The agent
        passes on an ApiError, and turns any other error into an ApiError with the server's URL.
        """

    def escape_special_tokens(self, text: str) -> str:
        """The text, with the model's special tokens made plain text, if the client knows them."""
        return text


# ---- the agent

_Init = TypeVar("_Init", bound=Callable[..., None])


def remembers_arguments(init: _Init) -> _Init:  # noqa: UP047 (tools on Python 3.11 parse this file)
    """Decorator of `__init__` that keeps the caller's arguments in `self._arguments`.

    A default in the signature of `__init__` must not override that of a subclass's `options_model`.
    So only the arguments that the caller passed become options."""

    @functools.wraps(init)
    def wrapper(self: Any, **arguments: Any) -> None:
        self._arguments = arguments
        init(self, **arguments)

    return cast(_Init, wrapper)


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies, and records each turn.

    After a run the context holds the token counts, cost_usd (None if unknown), metadata and the
    rollout. `logs_dir` holds completion.txt, the last answer, and trajectory.json (ATIF).

    Attributes of the trial:
        client: The model client, shared by the trials of a job. `setup` sets it. To use or wrap
            another one, override `_build_llm`.
        introduction: Texts about skills and MCP servers, which begin the first prompt.
        _n_runs: How many runs have begun.

    Attributes of the conversation, which `run` begins and `resume` continues:
        messages: The messages so far, as copies. To edit the conversation, assign a new list (see
            the property).
        _chat: Harbor's Chat, which holds the messages. `run` makes it.
        _previous: The previous turn, whose ids begin the next prompt. None if there is no such turn
            or the messages were edited.
        _has_replied: True once the server has replied in this conversation.

    Attributes of one run:
        instruction: What Harbor asks for.
        first_prompt: The instruction, after any text that precedes it.
        turns: The turns so far. They stay until the next run begins.
        metadata: The loop may keep JSON values here. They are saved in result.json under
            agent_result.metadata, and override the agent's own keys, such as stop_reason.
        seconds_left: Seconds until `max_seconds` ends the run; math.inf without a limit.
        _deadline: When the run must end, on the event loop's clock.
    """

    options_model = BasicLoopOptions
    options: BasicLoopOptions
    # Older versions of Harbor know fewer of these.
    capabilities = AgentCapabilities.model_validate(
        {
            name: True
            for name in ("atif", "resume", "skills", "mcp_servers", "reasoning_effort")
            if name in AgentCapabilities.model_fields
        }
    )
    # The default system message if max_turns > 1. {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. No one will answer questions. Put the \
commands in fenced blocks that open with ```bash: the blocks of a reply run as one script, and its \
exit code and output are the next message. Each script starts in a fresh shell (files persist; \
variables and the working directory do not) and may run for at most {seconds} seconds. Do not use \
a pager or an editor. Send long output to a file, and look at it with head, tail or grep. When the \
task is done, reply without such a block."""
    # The languages of the blocks that are run, in lower case. `protocol` and `misplaced_fence` name
    # bash.
    languages: ClassVar[tuple[str, ...]] = ("bash", "sh", "shell")
    # What the model is told if `bash_blocks` returns None, or if `has_misplaced_fence`.
    unclosed_block: ClassVar[str] = (
        "Nothing was run. Close each block with a ``` line. Write nothing but the language after "
        "the opening ```. If a block holds ``` lines of its own, begin and end the block with ````."
    )
    misplaced_fence: ClassVar[str] = (
        "Nothing was run. Put ```bash on a line of its own, and the commands on the lines below "
        "it. If this was your final answer, repeat it."
    )
    # A trainer's subclass may set this to a `tinker.ServiceClient`, so that sampling and training
    # share a session.
    tinker_service: ClassVar[Any] = None

    client: ModelClient
    introduction: list[str]
    instruction: str
    first_prompt: str
    turns: list[Turn]
    metadata: dict[str, Any]
    _arguments: dict[str, Any]
    _chat: Chat
    _previous: Turn | None
    _has_replied: bool
    _n_runs: int
    _deadline: float

    @remembers_arguments
    def __init__(
        self,
        *,
        model_name: str,
        model_path: str | None = None,
        renderer_name: str | None = None,
        max_tokens: int = 512,
        temperature: float = 1.0,
        max_turns: int = 1,
        system_prompt: str | None = None,
        model_client: str = "tinker",
        api_base: str | None = None,
        **kw: Any,
    ) -> None:
        """Create the agent of one trial. These nine keywords, with their defaults, are the
        interface that callers and editors see. `kw` holds the other options of BasicLoopOptions and
        Harbor's arguments (logs_dir, extra_env, ...). extra_env holds the variables that
        `--ae KEY=value` sets, such as API keys. Raises ValueError for a bad option."""
        # The parameters themselves are not read (see `remembers_arguments`).
        arguments = dict(self._arguments)
        # Harbor 0.16 and later would give `extra_env` to each command in the container, where
        # scripts could read the keys.
        self._agent_env: dict[str, str] = arguments.pop("extra_env", None) or {}
        # Harbor 0.23 and later makes `self.options` from the arguments. Earlier versions ignore
        # options.
        super().__init__(**arguments)
        if not hasattr(BaseAgent, "parse_options"):
            self.options = self._options_among(arguments)
        self._n_runs = 0

    @classmethod
    def _options_among(cls, arguments: dict[str, Any]) -> BasicLoopOptions:
        """The options among the arguments of an agent. Raises ValueError for a bad one."""
        options_model = cast(type[BasicLoopOptions], cls.options_model)
        names = options_model.model_fields.keys() & arguments.keys()
        return options_model(**{name: arguments[name] for name in names})

    async def converse(self, prompt: str, environment: BaseEnvironment) -> StopReason | str:
        """Send the prompt, run the script of the reply, send the script's output, and so on. The
        first prompt of a run ends with the instruction. It begins with the task's skills, or with
        what the model has not seen of the previous step. Returns why the run ended: a StopReason or
        any other string. A subclass may call this again with another prompt, for instance after
        COMPLETED. After `max_turns` turns, a further call returns MAX_TURNS at once."""
        while len(self.turns) < self.options.max_turns:
            try:
                turn = await self.sample(prompt)
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW
            if not isinstance(turn, Turn):
                raise TypeError("`sample` must return the turn")
            if turn.finish_reason != "stop":
                # The reply is incomplete, so nothing in it may be run.
                return turn.finish_reason
            if self.options.max_turns == 1:
                return StopReason.COMPLETED
            blocks = self.bash_blocks(turn.content)
            if blocks:
                turn.script = "\n".join(blocks)
                turn.observation = await self.execute(blocks, environment)
            elif blocks is None:
                turn.observation = self.unclosed_block
            elif self.has_misplaced_fence(turn.content) and prompt != self.misplaced_fence:
                # Tell the model once. If its next reply does the same, that reply is the answer.
                turn.observation = self.misplaced_fence
            else:
                return StopReason.COMPLETED
            prompt = turn.observation
        return StopReason.MAX_TURNS

    def bash_blocks(self, reply: str) -> list[str] | None:
        """The blocks of a reply that `execute` receives: those in one of the `languages`. An empty
        list ends the run. None means that a block cannot be read, so nothing may be run. A subclass
        that runs another language sets `languages`, and overrides this method or `execute`."""
        return fenced_blocks(reply, *self.languages)

    def has_misplaced_fence(self, reply: str) -> bool:
        """True if a reply without blocks names one of the `languages` after a fence, as in
        "I will look: ```bash", "```{bash}" or "~~~bash"."""
        names = "|".join(map(re.escape, self.languages))
        return re.search(rf"(?i)(```|~~~)[^`\n]{{0,40}}\b({names})\b", reply) is not None

    async def execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        """Run blocks as one script in the environment. Returns the text for the model: the line
        "Exit code: N" (N may be "unknown"), and the output. A subclass may call this several times
        per reply. `self.turns[-1]` is the turn with the reply; its `script` holds the blocks. To
        refuse them, set `script` to "" and return the reason. To end the run, set `observation` to
        the reason, raise an exception, and catch it in `converse`. Raises RuntimeRequestError if
        the environment no longer runs commands."""
        limits = (self.options.command_timeout_sec, self.options.max_output_bytes)
        text = await run_script(blocks, environment, *limits)
        self.logger.debug(f"script: {text.splitlines()[0]}")
        return text

    async def sample(self, prompt: str) -> Turn:
        """Send a text, and record the reply as a turn, which counts toward `max_turns`. A subclass
        may override this, for instance to add text to each prompt. Raises
        ContextLengthExceededError if a prompt after the first reply is too long, ApiError if the
        server failed, and RuntimeError if the first turn lacks ids."""
        if not isinstance(prompt, str):
            name = type(self).execute.__qualname__
            raise TypeError(f"a prompt must be a string, not {prompt!r}: did {name} return it?")
        prompt = valid_text(prompt)
        sent_at = datetime.now(UTC).isoformat()
        turn = await self._call_model(self._escaped(prompt))
        # Nothing is awaited from here on, so that a cancellation cannot lose the reply.
        turn.prompt = prompt
        turn.sent_at = sent_at
        self._add_turn(turn)
        self._previous = turn
        self._has_replied = True
        # The turn is recorded before these checks, so that its reply can be inspected.
        if turn.finish_reason in FAILED_REASONS:
            raise ApiError(f"the server ended the reply with {turn.finish_reason!r}")
        # If the first reply is complete and has no ids, the server never returns any. A later reply
        # without ids is counted, and left out of the rollout.
        ids = (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        is_first = len(self.turns) == 1 and turn.finish_reason == "stop"
        if is_first and self.options.collect_rollout_details and None in ids:
            text = "the server returned no token ids or logprobs"
            raise RuntimeError(f"{text}: set collect_rollout_details=false")
        return turn

    def _escaped(self, prompt: str) -> str:
        """The prompt with its special tokens made plain text, except inside the task's instruction,
        whose author may use them on purpose. The litellm client knows no special tokens, and
        changes nothing."""
        escape = self.client.escape_special_tokens
        # Only a run's first prompt has the instruction. Later, an output may repeat its text.
        if self.turns or not self.instruction or self.instruction not in prompt:
            return escape(prompt)
        # Split at the last occurrence, because texts before the instruction, such as a skill, may
        # repeat it.
        before, instruction, after = prompt.rpartition(self.instruction)
        return escape(before) + instruction + escape(after)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as copies. To edit it, assign a new list: the next prompt is
        then rendered from it, and does not begin with the sampled ids. The new messages are
        rendered as they are. If they hold a reply or an output, pass it through
        `client.escape_special_tokens`, because an <|im_end|> in it would become a token."""
        return tuple(dict(message) for message in self._chat.messages)

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._chat.messages[:] = [dict(message) for message in messages]
        self._previous = None

    @property
    def seconds_left(self) -> float:
        """Seconds until `max_seconds` ends this run; math.inf without a limit."""
        return self._deadline - asyncio.get_running_loop().time()

    @property
    def answer(self) -> str:
        """The text for completion.txt: the last complete reply that has neither a script nor an
        observation; if there is none, the last reply. A subclass may override this."""
        complete = [turn for turn in self.turns if turn.finish_reason == "stop"]
        answers = [turn for turn in complete if not turn.script and not turn.observation]
        last = (answers or self.turns)[-1:]
        return last[0].content if last else ""

    async def _call_model(self, prompt: str) -> Turn:
        """Call the model. While its server is busy or down, wait, and call it again. Raises
        ContextLengthExceededError and ApiError."""
        clock = asyncio.get_running_loop().time
        session_id = self.options.session_id
        if self.options.model_client != "litellm":
            session_id = session_id or self._trial_name
        n_failures = 0
        # The first failure sets this.
        give_up_at = math.inf
        while True:
            try:
                # Chat calls `self.client.call(prompt, message_history, ...)`, and then appends the
                # prompt and the reply to its messages. After an error it appends nothing, so the
                # call can be repeated.
                turn = await self._chat.chat(prompt, previous=self._previous, session_id=session_id)
                return cast(Turn, turn)
            except asyncio.CancelledError:
                # At the deadline `_converse_in_time` cancels this call, and Harbor would score the
                # trial. If the server was down, raise ApiError, so that Harbor does not score it.
                if n_failures and clock() >= self._deadline:
                    raise ApiError(
                        "max_seconds passed before the model's server recovered"
                    ) from None
                raise
            except Exception as error:
                n_failures += 1
                # A server that aborts a reply is alive, so the wait starts again.
                if n_failures == 1 or isinstance(error, AbortedError):
                    give_up_at = min(clock() + WAIT_SEC, self._deadline)
                meaning = meaning_of(error)
                pause = pause_sec(meaning, n_failures, self._has_replied)
                if pause is None or clock() + pause > give_up_at:
                    self._give_up(error, meaning)
                self.logger.warning(
                    f"the model's server failed, next call in {pause} s: {error_text(error)}"
                )
            # `give_up_at` is at most the deadline, so the pause ends before it.
            await asyncio.sleep(pause)

    def _give_up(self, failure: Exception, meaning: Meaning) -> NoReturn:
        """Raise the error that the loop receives for a call that failed for good. If the server
        failed, new trials do not use its client."""
        if meaning in ("busy", "down", "failed"):
            forget_client(self.client)
        # A first prompt that is too long is not the model's fault, so raise ApiError, which Harbor
        # does not score.
        if meaning == "context is full" and self._has_replied:
            raise ContextLengthExceededError(error_text(failure)) from as_cause(failure)
        raise_api_error(failure, self.client)

    def _add_turn(self, turn: Turn) -> None:
        turn.timestamp = datetime.now(UTC).isoformat()
        # Compare here and not at the end of the run, where comparing all turns at once would block
        # the event loop. A prompt may have hundreds of thousands of ids.
        if self.turns and self.turns[-1].is_trainable and turn.is_trainable:
            earlier = self.turns[-1].ids
            turn.breaks_prefix = (turn.prompt_token_ids or [])[: len(earlier)] != earlier
        self.turns.append(turn)
        # Harbor writes this into trial.log, so that the text survives `kill -9`.
        text = to_json([turn.prompt, turn.reasoning_content, turn.content]).decode()
        usage = turn.usage or usage_of(0, 0)
        tokens = f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out"
        self.logger.debug(f"turn {len(self.turns)}: {tokens}, {turn.finish_reason}: {text}")

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None, env: Any = None) -> None:
        """Check the options, Tinker's packages and key, and the URL of a vLLM or SGLang server.
        Harbor 0.23 and later calls this before any trial. Raises ValueError."""
        options = cast(BasicLoopOptions, cls.parse_options(kwargs, env))
        # A subclass that builds its own client may need no key and no URL.
        if options.model_client != "litellm" and cls._build_llm is BasicLoopAgent._build_llm:
            server_access(options, env or {}, cls.tinker_service)

    @classmethod
    def check_model_credentials(
        cls, connection: Any, *, kwargs: dict[str, Any], env: Any, explicit_env: Any = None
    ) -> None:
        """Check the model's name and, for litellm, its provider and API key. Harbor 0.25 and later
        calls this before any trial, unless --skip-credential-checks is given. Raises ValueError."""
        model = kwargs.get("model_name")
        if not model:
            raise ValueError(NO_MODEL)
        options = cls._options_among(kwargs)
        if options.model_client == "litellm" and cls._build_llm is BasicLoopAgent._build_llm:
            check_litellm_key(options, model, explicit_env or {})

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build or reuse the model client, and list the task's skills. Raises ValueError if
        something is missing, and any error of the client or the environment."""
        if not self.model_name:
            raise ValueError(NO_MODEL)
        self.introduction = []
        self.client = await self._shared_llm()
        if self.skills_dir:
            # `head -v` prints each path, and then the start of the file, which has the skill's name
            # and description.
            command = f"head -v -c 1500 -- {shlex.quote(self.skills_dir)}/*/SKILL.md 2>/dev/null"
            listing = valid_text((await environment.exec(command, timeout_sec=60)).stdout)
            if listing:
                self.introduction.append(
                    f"Skills. Read a skill's whole file before you use the skill.\n\n{listing}"
                )
        for server in self.mcp_servers:
            self.introduction.append(f"MCP server: {server.model_dump_json(exclude_none=True)}")

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Start a new conversation. Its first prompt begins with the task's skills and MCP servers.
        The turns are recorded even after an error. Raises ApiError or RuntimeRequestError."""
        system = self.options.system_prompt
        if system is None and self.options.max_turns > 1:
            system = self.protocol.replace("{seconds}", str(self.options.command_timeout_sec))
        # Chat only uses its model's `call`, so a ModelClient need not be a BaseLLM.
        self._chat = Chat(cast(Any, self.client), self.options.interleaved_thinking)
        # The setter clears `_previous`.
        self.messages = [{"role": "system", "content": valid_text(system)}] if system else []
        self._has_replied = False
        await self._run_loop([*self.introduction, instruction], environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Continue the conversation of the last `run`, for the later steps of a task. The prompt
        begins with what the model has not seen of the previous step: its last observation, or its
        first prompt if no reply came. Raises the errors of `run`."""
        # If no reply came, the whole first prompt is unseen, with all that it carried over.
        unseen = self.turns[-1].observation if self.turns else self.first_prompt
        await self._run_loop([unseen, instruction], environment, context)

    async def _run_loop(
        self, texts: list[str], environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Carry out a run. Its first prompt joins the texts; the last one is the instruction."""
        self.instruction = valid_text(texts[-1])
        self.turns = []
        self.metadata = {}
        self._n_runs += 1
        seconds = self.options.max_seconds
        if seconds is None:
            # Leave a margin for killing the script and writing the files.
            timeout = task_timeout_sec(self.logs_dir.parent)
            seconds = timeout - min(30, timeout / 10)
        elif seconds == 0:
            seconds = math.inf
        self._deadline = asyncio.get_running_loop().time() + seconds
        self.first_prompt = valid_text("\n\n".join(filter(None, texts)))
        stop_reason: StopReason | str = StopReason.ERROR
        try:
            stop_reason = await self._converse_in_time(environment)
        except asyncio.CancelledError:
            stop_reason = StopReason.CANCELLED
            raise
        except (ApiError, RuntimeRequestError):
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            text = valid_text(f"{type(error).__name__}: {error} ({place})")
            raise RuntimeRequestError(text) from as_cause(error)
        finally:
            try:
                self._record(stop_reason, context)
                # In a thread, because converting the ids of a long run to JSON takes seconds.
                await asyncio.to_thread(self._write_files, context)
            except Exception as error:
                # Raise, so that Harbor does not score a trial without its answer. exception.txt
                # also shows the error of the run, which this one replaces.
                text = f"the run could not be recorded: {error!r}"
                raise RuntimeRequestError(text) from as_cause(error)

    async def _converse_in_time(self, environment: BaseEnvironment) -> StopReason | str:
        """Call `converse`, and stop it at the deadline. Raises any error of the loop."""
        timer = asyncio.timeout_at(self._deadline)
        try:
            async with timer:
                if self._n_runs > 1:
                    await self._remove_old_files(environment)
                stop_reason = await self.converse(self.first_prompt, environment)
                if not isinstance(stop_reason, str):
                    name = type(self).converse.__qualname__
                    raise TypeError(f"{name} must return a string, not {stop_reason!r}")
                return stop_reason
        except TimeoutError:
            if not timer.expired():
                # This timeout came from the environment or the loop.
                raise
            # Return instead of raising, so that Harbor scores the trial.
            return StopReason.ROLLOUT_TIMEOUT

    async def _remove_old_files(self, environment: BaseEnvironment) -> None:
        """Remove the previous step's files from the container, where Harbor put them for the tests.
        After a run, Harbor 0.25 and 0.26 copy the container's log folder over `logs_dir`, so the
        old files would replace the new ones."""
        folder = getattr(self, "environment_logs_dir", "/logs/agent")
        names = shlex.join([f"{folder}/completion.txt", f"{folder}/trajectory.json"])
        await environment.exec(f"rm -f {names}", cwd="/", timeout_sec=60)

    def _record(self, stop_reason: StopReason | str, context: AgentContext) -> None:
        """Fill the context."""
        usages = [turn.usage for turn in self.turns if turn.usage]
        costs = [usage.cost_usd for usage in usages]
        totals: dict[str, Any] = {
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
            context.model_usage = {str(self.model_name): ModelUsage(**totals)}
        # SkyRL and verl call the number of turns n_episodes.
        metadata = {"stop_reason": stop_reason, "n_episodes": len(self.turns)}
        # `to_json` fails on a value that JSON cannot hold, such as a lone surrogate. In the context
        # that value would end the whole job when Harbor saves the trial.
        if self.options.collect_rollout_details:
            trainable = [turn for turn in self.turns if turn.is_trainable]
            to_json([turn.extra for turn in trainable])
            context.rollout_details = rollout_details(trainable)
            metadata["n_turns_without_ids"] = len(self.turns) - len(trainable)
            metadata["n_prefix_breaks"] = sum(turn.breaks_prefix for turn in trainable)
        metadata = to_jsonable_python(metadata | self.metadata, fallback=str, inf_nan_mode="null")
        to_json(metadata)
        context.metadata = metadata

    def _write_files(self, context: AgentContext) -> None:
        """Write what the run leaves in the log folder. Raises OSError, and the errors of a
        subclass's `answer` or `trajectory_step`."""
        # The file may hold the answer of the step before. A run without a turn empties it.
        write_file(self.logs_dir / "completion.txt", [valid_text(self.answer).encode()])
        write_file(self.logs_dir / "trajectory.json", self._trajectory(context))

    def _trajectory(self, context: AgentContext) -> Iterator[bytes]:
        """Yield trajectory.json in parts. It is a JSON object that ends with the list of steps.
        Each step is converted alone. Converting all ids at once would double the memory use, and
        hold the GIL for a long time."""
        agent = {"name": self.name(), "version": self.version(), "model_name": self.model_name}
        messages = self._chat.messages
        if messages and messages[0]["role"] == "system":
            # Not a step, because NeMo Gym treats the steps before the first reply as its input.
            agent["extra"] = {"system_prompt": messages[0]["content"]}
        # Unique for each file, because viewers join the files of one session into one trace.
        name = f"{self._trial_name}-run{self._n_runs}"
        head = {
            # Version 1.8 adds audio, and some readers do not know it.
            "schema_version": "ATIF-v1.7",
            "session_id": name,
            "trajectory_id": name,
            "agent": agent,
            "extra": context.metadata,
            "final_metrics": {
                "total_prompt_tokens": context.n_input_tokens,
                "total_completion_tokens": context.n_output_tokens,
                "total_cached_tokens": context.n_cache_tokens,
                "total_cost_usd": context.cost_usd,
            },
        }
        # {"schema_version": ..., "steps": [{...}, {...}]}
        yield to_json(head).removesuffix(b"}") + b', "steps": ['
        for step_id, step in enumerate(self._steps(), start=1):
            yield b", " if step_id > 1 else b""
            yield to_json(step | {"step_id": step_id}, fallback=str, inf_nan_mode="null")
        yield b"]}"

    def _steps(self) -> Iterator[dict[str, Any]]:
        """Yield the steps of trajectory.json, without their numbers. ATIF requires at least one."""
        if not self.turns:
            now = datetime.now(UTC).isoformat()
            yield {"source": "user", "message": self.first_prompt, "timestamp": now}
        shown = ""
        for turn in self.turns:
            # The step before already shows its observation. Do not repeat it.
            message = turn.prompt.removeprefix(shown)
            if message:
                yield {"source": "user", "message": message, "timestamp": turn.sent_at}
            yield self.trajectory_step(turn)
            shown = valid_text(turn.observation)

    def trajectory_step(self, turn: Turn) -> dict[str, Any]:
        """A turn as a step of trajectory.json (ATIF), without a step_id. If collect_rollout_details
        is true, the step has the ids of a trainable turn, and no tool call. Otherwise the script is
        a tool call, which viewers count and show. A subclass may override this, for instance to
        leave out the reasoning_content."""
        usage = turn.usage or usage_of(0, 0)
        metrics: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cache_tokens,
            "cost_usd": usage.cost_usd or None,
        }
        result = {"content": valid_text(turn.observation)}
        calls = []
        if self.options.collect_rollout_details:
            # No tool call, because NeMo Gym drops the ids of a step that has one.
            if turn.is_trainable:
                metrics |= {name: getattr(turn, name) for name in (*_TOKEN_FIELDS, "extra")}
        elif turn.script:
            result["source_call_id"] = call_id = f"bash-{turn.timestamp}"
            arguments = {"command": turn.script}
            calls = [{"tool_call_id": call_id, "function_name": "bash", "arguments": arguments}]
        is_complete = turn.finish_reason == "stop"
        step = {
            "source": "agent",
            "message": turn.content,
            "reasoning_content": turn.reasoning_content or None,
            "timestamp": turn.timestamp,
            "metrics": metrics,
            "tool_calls": calls or None,
            "observation": {"results": [result]} if turn.observation else None,
            "extra": None if is_complete else {"finish_reason": turn.finish_reason},
        }
        # NeMo Gym's converter takes no null here.
        return {name: value for name, value in step.items() if value is not None}

    @property
    def _trial_name(self) -> str:
        # Harbor names a trial's folder after the trial. The logs are in its subfolder agent/.
        return self.logs_dir.absolute().parent.name

    def _build_llm(self) -> Any:
        """Build the client. This runs in a thread, because the imports take seconds. Override it
        for a custom client: a ModelClient, or any BaseLLM of Harbor's that returns text. Raises
        ValueError, and any error of the client."""
        options = self.options
        args = copy.deepcopy(options.llm_kwargs)
        sampling = {"temperature", "top_p", "reasoning_effort"}
        args |= options.model_dump(include=sampling, exclude_none=True)
        # The clients receive the key as a separate argument.
        args.pop("api_key", None)
        model = str(self.model_name)
        if options.model_client == "litellm":
            return ChatClient(options, model, self._agent_env, **args)
        url, key = server_access(options, self._agent_env, self.tinker_service)
        if options.model_client == "tinker":
            return TinkerClient(options, model, url, key, self.tinker_service, **args)
        return ServerClient(options, model, str(url), key, **args)

    def _cache_key(self) -> tuple:
        """What the shared client depends on. Trials with equal keys share a client. Raises
        RuntimeError outside of an event loop."""
        # The variables of the process that may hold a URL or a key. A process may run several jobs,
        # with a different VLLM_BASE_URL for each.
        process_env = {k: v for k, v in os.environ.items() if CLIENT_VARIABLES.search(k)}
        return (
            # A client and its lock work in one event loop only.
            asyncio.get_running_loop(),
            # A subclass may build another client.
            type(self),
            self.tinker_service,
            self.model_name,
            # The session id is an argument of each call, and the client does not use max_seconds.
            as_text(dict(self.options) | {"session_id": None, "max_seconds": None}),
            as_text(self._agent_env),
            as_text(process_env),
        )

    async def _shared_llm(self) -> Any:
        """The client of all trials with this `_cache_key`. Raises any error of the build."""
        return await shared_client(self._cache_key(), self._build_llm)


# The lists of a RolloutDetail with one entry per turn. `Turn` has attributes of the same names.
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


# ---- what an error of a server means


# What litellm writes before it quotes a response that it cannot read.
UNREADABLE = re.compile("original response|received_args|error converting to valid response")
# The statuses of an error about the request: bad, too large, not valid.
REFUSED_STATUSES = (400, 413, 422)
# The statuses of a server that is overloaded, or paused for new weights.
BUSY_STATUSES = (
    429,  # too many requests
    498,  # Groq: no capacity
    503,  # unavailable
    529,  # Anthropic: overloaded
)
# The statuses below 500 that go away by themselves, mostly from gateways.
DOWN_STATUSES = (
    408,  # timeout of the request
    409,  # conflict
    425,  # too early
    460,  # AWS: the connection was closed
    499,  # nginx: the connection was closed
)

Meaning = Literal["context is full", "refused", "busy", "down", "failed"]


def meaning_of(error: Exception) -> Meaning:
    """What an error of a client means. "refused" is an error in the request, and "failed" one that
    does not go away by itself, such as a wrong key."""
    if isinstance(error, ContextLengthExceededError):
        return "context is full"
    if isinstance(error, AbortedError):
        return "busy"
    code = getattr(error, "status_code", None) or 0
    # litellm passes on the code of a server's error, which may be a word.
    status = int(code) if str(code).isdigit() else 500
    message = str(error).lower()
    # Search the start only. After it, some servers repeat the request, and litellm quotes the
    # response. Either may hold any phrase.
    start = UNREADABLE.split(message)[0][:500]
    body = str(getattr(error, "body", ""))[:500]
    text = f"{code} {start} {body}".lower()
    # Some errors of Tinker have no status, but a category. "user" means a fault of the request.
    category = str(getattr(error, "category", ""))
    is_refused = status in REFUSED_STATUSES or category == "user"
    # A prompt that is too long has no status of its own, so look for phrases. (llama.cpp and Ollama
    # return status 500 for it.)
    if (is_refused or status == 500) and has_phrase(text, CONTEXT_IS_FULL):
        return "context is full"
    is_unreadable = isinstance(error, UnreadableError | json.JSONDecodeError)
    if is_unreadable or UNREADABLE.search(message):
        return "down"
    if is_refused:
        return "refused"
    if status in BUSY_STATUSES:
        return "failed" if has_phrase(text, QUOTA_IS_USED_UP) else "busy"
    # The packages openai, litellm and tinker each have a class of this name.
    is_unreachable = any(cls.__name__ == "APIConnectionError" for cls in type(error).__mro__)
    is_down = is_unreachable or status in DOWN_STATUSES or category in ("server", "unknown")
    return "down" if is_down or status >= 500 else "failed"


def has_phrase(text: str, phrases: Iterable[str]) -> bool:
    """True if a lower-case text contains one of the phrases, apart from those of OTHER_LIMITS."""
    # "too many tokens per minute" is a rate limit, unlike "too many tokens".
    for phrase in OTHER_LIMITS:
        text = text.replace(phrase, "")
    return any(phrase in text for phrase in phrases)


# The pauses before each further call to a server that is busy or down. The last pause is repeated.
PAUSES_SEC = (1, 2, 4, 5)
# The agent gives up if the next call would begin more than these seconds after the first failure.
WAIT_SEC = 600
# How many calls to make to a server that is down and never replied: its URL may be wrong.
CALLS_BEFORE_FIRST_REPLY = 3


def pause_sec(meaning: Meaning, n_failures: int, has_replied: bool) -> float | None:
    """Seconds until the agent calls the server again, or None if another call would not help."""
    if meaning not in ("busy", "down"):
        return None
    if meaning == "down" and not has_replied and n_failures >= CALLS_BEFORE_FIRST_REPLY:
        return None
    return PAUSES_SEC[min(n_failures, len(PAUSES_SEC)) - 1]


def error_text(error: Exception) -> str:
    """The text of an error, and of the OSError that first caused it, such as "Connection error.
    ([Errno 111] Connection refused)". It is valid text. Passwords of URLs are left out."""
    text = str(error) or repr(error)
    cause = first_cause(error)
    cause_text = str(cause) or repr(cause)
    if isinstance(cause, OSError) and cause_text not in text:
        text = f"{text} ({cause_text})"
    return valid_text(without_passwords(text))


def as_cause(error: Exception) -> Exception | None:
    """The error, for `raise ... from`. None if its traceback holds a lone surrogate, which JSON
    from a server or a model may contain: saving it would end Harbor's whole job."""
    text = "".join(traceback.format_exception(error))
    return error if valid_text(text) == text else None


# What to do about an error with this status.
STATUS_HINTS = {401: "check the API key", 404: "check the model's name and the URL's path"}


def raise_api_error(failure: Exception, client: ModelClient) -> NoReturn:
    """Raise ApiError for an error of a client's server."""
    cause = as_cause(failure)
    if isinstance(cause, ApiError):
        raise cause
    server = client.url or "the server"
    place = f"{type(failure).__name__} from {server}"
    hint = STATUS_HINTS.get(getattr(failure, "status_code", 0))
    if isinstance(first_cause(failure), ConnectionError | socket.gaierror):
        place = f"cannot connect to {server}"
        hint = "check its URL, the network, and whether the server is running"
    raise ApiError(": ".join(filter(None, [place, hint, error_text(failure)]))) from cause


def first_cause(error: BaseException) -> BaseException:
    """What first caused an error: the ConnectionRefusedError behind an APIConnectionError."""
    # A bound, because causes may form a cycle.
    for _ in range(20):
        if isinstance(error, BaseExceptionGroup):
            # "All connection attempts failed" is a group with one error for each address.
            cause: BaseException | None = error.exceptions[0]
        else:
            cause = error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    return error


# ---- what the trials of a process share


@dataclass
class CacheEntry:
    """A cache entry, shared by all trials with equal keys. The trial that builds the client sets
    `client`, or `build_error` if the build fails. Both are None until then."""

    # Held while the client is built.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    client: ModelClient | None = None
    # Why the build failed. The trials that wait for the lock raise the same error. Otherwise each
    # in turn would wait FIRST_RESPONSE_SEC for a dead server.
    build_error: Exception | None = None


# The cache: an entry for each `BasicLoopAgent._cache_key`, the oldest first. An entry is removed
# when its server fails, and when its event loop has closed. If there are more than MAX_CLIENTS, the
# oldest is removed, because each client has connections, and some trainers give each trial a
# different URL. A running trial keeps its client.
_clients: dict[tuple, CacheEntry] = {}
MAX_CLIENTS = 64
# Names of variables that may hold a URL or a key.
CLIENT_VARIABLES = re.compile("(?i)KEY|TOKEN|SECRET|URL|BASE|HOST|ENDPOINT|PROXY|CERT")


def as_text(values: dict[str, Any]) -> str:
    """A text for `_cache_key`. It is equal for equal items in the same order."""

    def other(value: Any) -> str:
        # A subclass's options may hold a pydantic secret, whose repr is masked.
        return repr(value.get_secret_value() if hasattr(value, "get_secret_value") else value)

    return json.dumps(values, default=other)


async def shared_client(key: tuple, build: Callable[[], Any]) -> ModelClient:
    """The client of all trials with this key, whose first part is the event loop. The first trial
    builds the client. The others wait, and receive the client, or the error with which the build
    failed."""
    # Drop the clients of closed event loops, because they still hold connections.
    for old in [key for key in _clients if key[0].is_closed()]:
        del _clients[old]
    entry = _clients.setdefault(key, CacheEntry())
    while len(_clients) > MAX_CLIENTS:
        del _clients[next(iter(_clients))]
    async with entry.lock:
        if entry.build_error:
            raise entry.build_error
        if entry.client is None:
            try:
                entry.client = await connected_client(build)
            except Exception as error:
                # The trials that already wait for this entry raise this error. Later trials build a
                # new client. By now the cache may hold a newer entry for the key: keep that one.
                entry.build_error = error
                if _clients.get(key) is entry:
                    del _clients[key]
                raise
        return entry.client


async def connected_client(build: Callable[[], Any]) -> ModelClient:
    """Build a client, and connect it. Raises any error of the build, and ApiError if the server
    refuses the connection."""
    client = await asyncio.to_thread(build)
    if client is None:
        raise TypeError("_build_llm must return a ModelClient or a BaseLLM")
    if not isinstance(client, ModelClient):
        client = HarborClient(client)
    try:
        await client.connect()
    except Exception as error:
        raise_api_error(error, client)
    return client


def forget_client(client: ModelClient) -> None:
    """Drop the client of a server that failed, so that new trials do not reuse it. Close nothing:
    running trials may use it."""
    for key, entry in list(_clients.items()):
        if entry.client is client:
            del _clients[key]
    client.after_failure()


# ---- URLs and keys

# How long a server has for its first response.
FIRST_RESPONSE_SEC = 30


def check_url(url: str, name: str) -> None:
    """Raise ValueError if a text is not the URL of a server. The error does not show it, because it
    may hold a password."""
    if not re.fullmatch(r"https?://[^\s/?#][^\s?#]*", url):
        raise ValueError(
            f"{name} must be a URL such as http://localhost:8000 (with http://, without ? or #)"
        )


def url_and_key(
    options: BasicLoopOptions, provider: str, agent_env: dict[str, str]
) -> tuple[str | None, str | None]:
    """The URL and the API key of the model's server, None for the client's default. They come from
    an option, a variable of the agent (`--ae`) or one of the process, such as OPENAI_BASE_URL. The
    provider is tinker, vllm, sglang, or litellm's name for the server, such as openai. Raises
    ValueError for a bad URL, and for a key that no HTTP header can hold."""
    # `harbor jobs resume` passes on masked keys, such as sk-r****456. Ignore them.
    given = {name: text for name, text in agent_env.items() if "****" not in text}
    prefixes = VARIABLE_PREFIXES.get(provider, [provider.upper().replace("-", "_")])

    def variable(*endings: str) -> str | None:
        names = [f"{prefix}_{ending}" for prefix in prefixes for ending in endings]
        values = [variables.get(name, "") for variables in (given, os.environ) for name in names]
        # A value from a file often ends in a newline.
        return next((value.strip() for value in values if value.strip()), None)

    url = options.api_base or variable(URL_ENDINGS.get(provider, "API_BASE"), "API_BASE")
    if url:
        check_url(url, f"the URL of {provider}")
    key = options.llm_kwargs.get("api_key") or variable(
        "API_KEY", "TOKEN", "API_TOKEN", "KEY", "SECRET_KEY", "APIKEY", "JWT"
    )
    if key:
        # Remove all whitespace, because a key may be wrapped at the end of a line.
        key = "".join(str(key).split())
        if not (key.isascii() and key.isprintable()):
            # An HTTP client would show such a key in its error.
            raise ValueError(
                f"the API key for {provider} contains an invalid character: copy it again"
            )
    if url and provider in ("openai", "hosted_vllm"):
        # A URL without a path is a server that has its API under /v1: http://host:8000 becomes
        # http://host:8000/v1.
        url = re.sub(r"^(https?://[^/]+)/?$", r"\1/v1", url)
        # litellm requires a key. A server without keys accepts any.
        key = key or "none"
    return url, key


def without_passwords(text: str) -> str:
    """The text without the usernames and passwords in its URLs, for error messages."""
    return re.sub(r"//[^/\s]*@", "//", text)


def server_access(
    options: BasicLoopOptions, agent_env: dict[str, str], tinker_service: Any
) -> tuple[str | None, str | None]:
    """The URL and the API key of Tinker, or of a vLLM or SGLang server (see `url_and_key`). Raises
    ValueError if Tinker's packages, its key, or the URL of a server are missing."""
    client = options.model_client
    url, key = url_and_key(options, client, agent_env)
    if client == "tinker":
        # Tinker's SDK has this module from 0.38 on.
        if not (find_spec("tinker_cookbook") and find_spec("tinker.auth")):
            raise ValueError(
                "model_client=tinker, the default, needs its packages: `uv sync` in a clone, and "
                "elsewhere `uv add 'tinker>=0.38' tinker-cookbook` (or `pip install`). For Claude, "
                "GPT, Gemini and the like, set -m PROVIDER/NAME and --ak model_client=litellm"
            )
        from tinker.auth import tinker_has_credentials

        if not (key or tinker_service or tinker_has_credentials()):
            raise ValueError(
                "model_client=tinker, the default, needs a key: set TINKER_API_KEY. For Claude, "
                "GPT, Gemini and the like, set -m PROVIDER/NAME and --ak model_client=litellm"
            )
    elif not url:
        raise ValueError(
            f"model_client={client} needs the server's URL: set api_base=http://... or "
            f"{client.upper()}_BASE_URL"
        )
    return url, key


def litellm_access(
    options: BasicLoopOptions, model: str, agent_env: dict[str, str]
) -> tuple[str, str | None, str | None]:
    """litellm's name for the provider of a model, and the provider's URL and key (see
    `url_and_key`). Raises ValueError if litellm knows no provider, or no URL for it."""
    import litellm

    try:
        _, provider, *_ = litellm.get_llm_provider(
            model, options.llm_kwargs.get("custom_llm_provider")
        )
    except litellm.exceptions.BadRequestError as error:
        raise ValueError(
            f"litellm does not know the provider of {model}: write -m PROVIDER/NAME, such as "
            "anthropic/claude-sonnet-4-5, or openai/NAME for a server whose URL is in api_base"
        ) from error
    url, key = url_and_key(options, provider, agent_env)
    if not url and provider in PROVIDERS_WITHOUT_URL:
        raise ValueError(f"set api_base=http://...: litellm knows no URL for {provider}")
    return provider, url, key


def check_litellm_key(options: BasicLoopOptions, model: str, agent_env: dict[str, str]) -> None:
    """Raise ValueError if the model's provider has a public API that needs a key, and no key is
    set. Raises the errors of `litellm_access`."""
    import litellm

    _, url, key = litellm_access(options, model, agent_env)
    names = litellm.validate_environment(model)["missing_keys"]
    # A custom URL may need no key. Clouds have other variables, and other ways to log in.
    if names and not url and not key and all(name.endswith("_API_KEY") for name in names):
        raise ValueError(
            f"no API key: set {' or '.join(names)} (or use --skip-credential-checks if the model "
            "needs none)"
        )


# ---- thinking, and what a model wraps around its answer


def tags_for(text: str) -> dict[str, str]:
    """THINKING_TAGS, and Hunyuan's if the text has them near its start. The names of Hunyuan's end
    in a suffix that differs by checkpoint: <think:6124c78e>hm</think:6124c78e>hi"""
    suffixes = re.findall(r"<think(:[\w.-]+)>", text[:99])
    return THINKING_TAGS | {f"<think{suffix}>": f"</think{suffix}>" for suffix in suffixes}


def split_reply(turn: Turn) -> Turn:
    """A copy of the turn, with the thinking moved from the front of `content` to
    `reasoning_content`, and without the tags around the answer. If the thinking is not closed, all
    of the content is thinking."""
    text = turn.content.lstrip()
    thinking, answer = "", turn.content
    tags = tags_for(text)
    opening = next((tag for tag in tags if text.startswith(tag)), None)
    if opening:
        thinking, _, answer = text.partition(tags[opening])
        thinking = thinking.removeprefix(opening)
        answer = answer.lstrip()
    if thinking and answer.startswith("<response>"):
        # Ernie: <think>hm</think><response>hi</response>
        answer = answer.rstrip().removeprefix("<response>").removesuffix("</response>").strip()
    thinking = (turn.reasoning_content or "") + thinking
    return replace(turn, content=without_wrapping(answer), reasoning_content=thinking)


def without_wrapping(answer: str) -> str:
    """An answer without the tags around it: "hi" for <|START_RESPONSE|>hi<|END_RESPONSE|>."""
    for start in ANSWER_STARTS:
        if answer.lstrip().startswith(start):
            answer = answer.lstrip().removeprefix(start)
    for end in ANSWER_ENDS:
        answer = answer.removesuffix(end)
    return answer


# ---- clients that send messages


def with_prompt(history: Iterable[Message], prompt: str) -> list[Message]:
    """The messages, with the prompt as the last one. A message without text, such as a reply that
    was nothing but thinking, becomes "(empty)", because some servers reject empty messages."""
    messages = [*history, {"role": "user", "content": prompt}]
    return [m if str(m["content"] or "").strip() else m | {"content": "(empty)"} for m in messages]


class HarborClient(ModelClient):
    """Wraps a `BaseLLM` of Harbor's."""

    def __init__(self, llm: BaseLLM) -> None:
        self.llm = llm

    async def call(
        self, prompt: str, message_history: Sequence[Message] = (), **other: Any
    ) -> Turn:
        *history, message = with_prompt(message_history, prompt)
        try:
            response = await self.llm.call(prompt=message["content"], message_history=history)
            # A Turn has all fields of Harbor's LLMResponse.
            turn = Turn(**vars(response))
        except OutputLengthExceededError as error:
            # Harbor's error has only the text, and no usage.
            turn = Turn(content=error.truncated_response or "", finish_reason="length")
        return split_reply(turn)


class ChatClient(ModelClient):
    """Any chat API, through litellm. Harbor's LiteLLM is not used, because it drops the server's
    finish reason and the usage of a truncated reply."""

    def __init__(
        self, options: BasicLoopOptions, model: str, agent_env: dict[str, str], **args: Any
    ) -> None:
        import litellm

        provider, url, key = litellm_access(options, model, agent_env)
        self.url = without_passwords(url or provider)
        if options.model_info:
            litellm.register_model({model: options.model_info})
        # drop_params leaves out what a model refuses, such as a temperature. There are no retries,
        # because `_call_model` repeats a call.
        defaults = {"drop_params": True, "num_retries": 0, "max_retries": 0}
        own = {"model": model, "max_tokens": options.max_tokens, "api_base": url, "api_key": key}
        self._args: dict[str, Any] = defaults | args | own
        if options.collect_rollout_details:
            self._args["logprobs"] = True
            # This asks vLLM for the token ids.
            self._args["extra_body"] = {"return_token_ids": True, **(args.get("extra_body") or {})}

    async def call(
        self,
        prompt: str,
        message_history: Sequence[Message] = (),
        *,
        session_id: str | None = None,
        **other: Any,
    ) -> Turn:
        import litellm
        from harbor.llms.utils import add_anthropic_caching

        args = dict(self._args)
        if session_id:
            args["extra_body"] = (args.get("extra_body") or {}) | {"session_id": session_id}
            # A header is ASCII, but a trial's name may hold other letters.
            header = {"X-Session-ID": urllib.parse.quote(session_id)}
            args["extra_headers"] = (args.get("extra_headers") or {}) | header
        messages: Any = with_prompt(message_history, prompt)
        messages = add_anthropic_caching(messages, args["model"])
        return split_reply(self._turn(await litellm.acompletion(messages=messages, **args)))

    def _turn(self, response: Any) -> Turn:
        if not response.choices:
            raise ApiError("the server's response has no choices")
        choice = response.choices[0]
        # Some of litellm's providers leave this attribute out. (Seen in litellm 1.110.)
        fields = getattr(choice, "provider_specific_fields", None) or {}
        if fields.get("error"):
            raise ApiError(f"the server ended the reply with an error: {fields['error']}")
        # litellm turns a finish reason that it does not know into "stop", and keeps the server's
        # own word here. Take that word if it means a failure or a truncation.
        server_reason = str(fields.get("native_finish_reason")).lower()
        reason = choice.finish_reason
        if server_reason in FAILED_REASONS | TRUNCATED_REASONS:
            reason = server_reason
        if reason == "abort":
            raise AbortedError("the server aborted the reply")
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        details = getattr(response.usage, "prompt_tokens_details", None)
        return Turn(
            # OpenAI puts a refusal into a field of its own.
            content=choice.message.content or choice.message.get("refusal") or "",
            reasoning_content=choice.message.get("reasoning_content"),
            usage=usage_of(
                response.usage.prompt_tokens,
                response.usage.completion_tokens,
                getattr(details, "cached_tokens", None),
                # litellm has no public place for the cost. (Seen in 1.106 to 1.110.)
                response._hidden_params.get("response_cost"),
            ),
            prompt_token_ids=getattr(response, "prompt_token_ids", None),
            completion_token_ids=fields.get("token_ids"),
            logprobs=[token["logprob"] for token in logprobs] or None,
            finish_reason=reason,
            extra={name: fields[name] for name in EXTRA_NAMES if fields.get(name)},
        )


# Other fields that are recorded from replies of vLLM and SGLang.
EXTRA_NAMES = ("routed_experts", "weight_versions")


# ---- clients that send token ids


class TokenClient(ModelClient, ABC):
    """A client that sends exact prompts: the token ids of a prompt begin with the previous turn's
    prompt and completion ids. The limits count tokens."""

    context_limit: int
    max_tokens: int
    # Regular expressions that match the model's special tokens.
    special_tokens: Sequence[str]

    def __init__(self, options: BasicLoopOptions, url: str) -> None:
        self.url = without_passwords(url)
        self.max_tokens = options.max_tokens
        # The client sets `context_limit` from this limit and the server's.
        self._given_limit = options.context_limit
        # A cache for `_tail`, which explains it.
        self._heads: dict[str, list[int]] = {}

    @abstractmethod
    async def render(self, messages: list[Message]) -> list[int]:
        """Render messages with the chat template, ready for a reply. Raises any server error."""

    @abstractmethod
    async def decode(self, ids: list[int]) -> str:
        """The text of some ids, with special tokens. Raises any server error."""

    @abstractmethod
    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        """Sample a reply to a prompt. Raises any server error."""

    def escape_special_tokens(self, text: str) -> str:
        """The text with a zero-width space after the first character of each special token. The
        tokenizer then turns it into ordinary tokens."""
        if not self.special_tokens:
            return text
        tokens = "|".join(self.special_tokens)
        return re.sub(tokens, lambda match: match[0][0] + "\u200b" + match[0][1:], text)

    async def call(
        self,
        prompt: str,
        message_history: Sequence[Message] = (),
        *,
        previous: Turn | None = None,
        session_id: str | None = None,
        **other: Any,
    ) -> Turn:
        messages = [*message_history, {"role": "user", "content": prompt}]
        ids = await self.next_prompt(messages, previous)
        room = min(self.max_tokens, self.context_limit - len(ids))
        if room < 1:
            raise ContextLengthExceededError(
                f"the prompt's {len(ids)} tokens leave no room for a reply"
            )
        opening_tag = await self._opening_tag(ids)
        turn = await self.generate(ids, room, session_id)
        if turn.finish_reason == "abort":
            raise AbortedError("the server aborted the reply")
        return split_reply(replace(turn, content=opening_tag + turn.content))

    async def _opening_tag(self, prompt_ids: list[int]) -> str:
        """The tag of THINKING_TAGS with which the template ends the prompt, such as <think> in
        "...assistant <think>". The reply then lacks it."""
        # The longest tag has three tokens (<|open|>think<|sep|>), and a newline may follow.
        end = (await self.decode(prompt_ids[-4:])).rstrip()
        return next((tag for tag in tags_for(end) if end.endswith(tag)), "")

    async def next_prompt(self, messages: list[Message], previous: Turn | None) -> list[int]:
        """The ids of the next prompt: the previous prompt, the reply as it was sampled, and the
        tail. The tail is what the template writes after a reply:

            prompt   <|im_start|>user OLD<|im_end|><|im_start|>assistant
            reply    REPLY<|im_end|>
            tail     <|im_end|><|im_start|>user NEW<|im_end|><|im_start|>assistant

            next prompt = prompt + reply + tail

        The ids with which the tail repeats the end of the reply, here <|im_end|>, are left out. If
        the prompt cannot be built this way, the whole conversation is rendered.
        """
        if previous and previous.prompt_token_ids and previous.completion_token_ids:
            tail = await self._tail(messages)
            # The reply and the tail share one stop token, or several (Inkling, Kimi K3).
            n_shared = overlap(previous.completion_token_ids, tail)
            # A truncated reply shares none. A complete reply that shares none did not end as the
            # template's replies do, so the whole conversation is rendered.
            if tail and (n_shared or previous.finish_reason != "stop"):
                return previous.ids + tail[n_shared:]
        return await self.render(messages)

    async def _tail(self, messages: list[Message]) -> list[int]:
        """The tokens that the template writes after a reply, up to the next reply. The list is
        empty if they cannot be found.

        The real conversation is not rendered, because templates change the replies in it. Render a
        short one twice instead, with the made-up replies "b" and "c". The first token that differs
        is the reply, and everything after it is the tail:

            <|im_start|>user a<|im_end|><|im_start|>assistant b TAIL
            <|im_start|>user a<|im_end|><|im_start|>assistant c TAIL
            head: up to and including the reply               |

        The head is kept in `_heads`, by system message. The next rendering with "b" nearly always
        begins with it, and then needs no rendering with "c".
        """
        # The tail may depend on the system message, which may turn thinking off.
        system = [message for message in messages[:1] if message["role"] == "system"]
        before = [*system, {"role": "user", "content": "a"}]
        with_b = await self.render([*before, {"role": "assistant", "content": "b"}, messages[-1]])
        key = json.dumps(system)
        head = self._heads.get(key, [])
        if not head or with_b[: len(head)] != head:
            with_c = await self.render(
                [*before, {"role": "assistant", "content": "c"}, messages[-1]]
            )
            differs = [b != c for b, c in zip(with_b, with_c, strict=False)]
            if True not in differs:
                return []
            # "b" is one token in all vocabularies.
            head = self._heads[key] = with_b[: differs.index(True) + 1]
        return with_b[len(head) :]


def overlap(reply: list[int], tail: list[int]) -> int:
    """How many ids at the end of the reply are the first ones of the tail, at most 32. (Kimi K3 has
    the most, 7.)"""
    longest = min(len(reply), len(tail), 32)
    return next((n for n in range(longest, 0, -1) if reply[-n:] == tail[:n]), 0)


# ---- Tinker

# tinker-cookbook gives all clients of a model the same tokenizer. It raises "Already borrowed" if
# two threads use it at once, as when one client is built in a thread while another one renders.
_tokenizer_lock = threading.Lock()


@functools.cache
def shared_tinker_service(url: str | None, key: str | None) -> Any:
    """The tinker.ServiceClient of all clients with this URL and key. None means the SDK's default.
    A service has a session and about 11 file descriptors. After a failure of Tinker the next client
    opens a new session. Raises any error of the SDK."""
    import tinker

    return tinker.ServiceClient(base_url=url, api_key=key)


async def in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Like `asyncio.to_thread`, but Python's exit does not wait for the thread. If nothing answers
    at its URL, Tinker's SDK keeps trying for up to twelve minutes, and Ctrl-C would hang."""
    result: Future[Any] = Future()
    # Mark it as running, so that a cancelled caller cannot cancel it. On a cancelled future,
    # `set_result` would fail.
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(result)


class TinkerClient(TokenClient):
    """Tinker, with tinker-cookbook's renderer. Harbor's TinkerLLM is not used: it returns no ids of
    a truncated reply, and opens a session for each checkpoint."""

    def __init__(
        self,
        options: BasicLoopOptions,
        model: str,
        url: str | None,
        key: str | None,
        service: Any = None,
        **args: Any,
    ) -> None:
        import tinker
        from tinker_cookbook.model_info import get_recommended_renderer_name
        from tinker_cookbook.renderers import get_renderer
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        super().__init__(options, url or "Tinker")
        try:
            name = options.renderer_name or get_recommended_renderer_name(model)
        except Exception as error:
            raise ValueError(
                f"tinker-cookbook does not know {model}: set renderer_name. For Claude, GPT, "
                "Gemini and the like, set model_client=litellm instead"
            ) from error
        try:
            self._tokenizer: Any = get_tokenizer(model)
        except Exception as error:
            raise ValueError(
                f"cannot load the tokenizer of {model} (check -m and the network): {error}"
            ) from error
        # Llama 3's tokenizers set this flag, with which `decode` turns `cp ../a .` into `cp../a.`
        self._tokenizer.clean_up_tokenization_spaces = False
        with _tokenizer_lock:
            try:
                self._renderer = get_renderer(name, self._tokenizer)
            except Exception as error:
                raise ValueError(
                    f"cannot load the renderer {name} (without renderer_name, the agent uses the "
                    f"one that tinker-cookbook recommends for the model): {error}"
                ) from error
            # Token ids, or strings from the renderer role_colon.
            stop = self._renderer.get_stop_sequences()
            # What `generate` removes from the end of a reply's text: the stop sequence, and the
            # end token of a base model. Decode its id, because `eos_token` may be another text.
            endings = [*stop, self._tokenizer.eos_token_id]
            self._endings = [
                ending if isinstance(ending, str) else self._tokenizer.decode([ending])
                for ending in endings
                if ending is not None
            ]
            # Some tokenizers lack this method, and never turn text into special tokens.
            has_names = hasattr(self._tokenizer, "get_added_vocab")
            names = self._tokenizer.get_added_vocab() if has_names else []
        # Skip single characters and spaces, which some vocabularies add: any text may hold them.
        self.special_tokens = [re.escape(name) for name in names if len(name.strip()) > 1]
        parameters = tinker.SamplingParams.model_fields
        sampling = {name: value for name, value in args.items() if name in parameters}
        self._params = tinker.SamplingParams(stop=stop, **sampling)
        # Names that SamplingParams does not have go to `create_sampling_client`, which refuses
        # unknown ones. So a misspelled name fails.
        client_args = {name: value for name, value in args.items() if name not in parameters}
        source = {"model_path": options.model_path} if options.model_path else {"base_model": model}
        self._source = source | client_args
        self._model = model
        # A trainer's ServiceClient, or None to use the shared one.
        self._trainer_service = service
        self._url_and_key = (url, key)

    async def connect(self) -> None:
        # In threads, because the SDK's constructors wait for the server.
        try:
            async with asyncio.timeout(FIRST_RESPONSE_SEC):
                cards = await in_daemon_thread(self._fetch_models)
        except TimeoutError as error:
            raise ApiError(
                f"{self.url} did not answer within {FIRST_RESPONSE_SEC} seconds"
            ) from error
        limit = {card.model_name: card.max_context_length for card in cards}.get(self._model)
        self.context_limit = min(filter(None, (limit, self._given_limit)), default=32_000)
        try:
            # Set no time limit, because a large checkpoint loads slowly. The SDK itself gives up
            # after some minutes.
            await in_daemon_thread(self._open)
        except Exception:
            self.after_failure()
            raise

    def after_failure(self) -> None:
        # The session may have ended. The next client opens a new one.
        shared_tinker_service.cache_clear()

    def _fetch_models(self) -> list[Any]:
        import tinker

        url, key = self._url_and_key
        try:
            answer: Any = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities()
            return answer.result().supported_models
        except tinker.TinkerError:
            # Some Tinker servers do not report their limits. A wrong key is reported by `_open`.
            return []

    def _open(self) -> None:
        service = self._trainer_service or shared_tinker_service(*self._url_and_key)
        self._sampling_client = service.create_sampling_client(**self._source).result()
        # With another model's tokenizer all ids would be wrong. A local folder's name does not say
        # which model its tokenizer is from, so it is not checked.
        if "model_path" in self._source and not Path(self._model).is_dir():
            base = self._sampling_client.get_base_model()
            if base and base != self._model:
                raise ApiError(f"model_path is a checkpoint of {base}: set -m {base}")

    async def render(self, messages: list[Message]) -> list[int]:
        with _tokenizer_lock:
            return self._renderer.build_generation_prompt(cast(Any, messages)).to_ints()

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
        return Turn(
            content=text,
            usage=usage_of(len(prompt_ids), len(ids), response.prompt_cache_hit_tokens),
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            logprobs=sequence.logprobs,
            finish_reason=sequence.stop_reason,
            extra={
                "sequence_id": sequence.sequence_id,
                "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens or 0,
            },
        )


# ---- vLLM and SGLang

# These values leave the model's distribution as it is. Without them vLLM uses those of the model's
# generation_config.json.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def context_limits(cards: list[dict[str, Any]], is_sglang: bool) -> dict[str, int]:
    """The context limit of each model and LoRA adapter on a server, by the name that a request has
    to give: "sql" for an adapter of vLLM, "base:sql" for one of SGLang."""
    # An adapter has no limit of its own: take the largest, which is that of its base model.
    largest = max((int(card.get("max_model_len") or 0) for card in cards), default=0)

    def name(card: dict[str, Any]) -> str:
        parent = card.get("parent") if is_sglang else None
        return f"{parent}:{card['id']}" if parent else card["id"]

    return {name(card): int(card.get("max_model_len") or largest) for card in cards}


class ServerClient(TokenClient):
    """A vLLM or SGLang server that receives token ids. /tokenize renders messages, and
    /v1/completions samples."""

    def __init__(
        self, options: BasicLoopOptions, model: str, url: str, key: str | None, **args: Any
    ) -> None:
        from openai import AsyncOpenAI, Timeout

        super().__init__(options, url)
        self.special_tokens = SPECIAL_TOKENS
        self._is_sglang = options.model_client == "sglang"
        # In litellm the name of a model on vLLM begins with hosted_vllm/.
        self._model = model.removeprefix("hosted_vllm/")
        # This client is never closed, because Harbor does not say when a job ends.
        self._http = AsyncOpenAI(
            # /tokenize is not under /v1.
            base_url=url.rstrip("/").removesuffix("/v1"),
            # The openai package requires a key. A server without keys accepts any.
            api_key=key or "none",
            default_headers=args.pop("extra_headers", None),
            # No time limit for a response, unless llm_kwargs has one, because a repeated call would
            # sample a second reply. `max_seconds` ends a call that takes too long.
            timeout=Timeout(args.pop("timeout", None), connect=FIRST_RESPONSE_SEC),
            # The agent repeats a call itself.
            max_retries=args.pop("max_retries", 0),
        )
        # The other arguments go into each request for a completion.
        extra_body = args.pop("extra_body", None) or {}
        self._body: dict[str, Any] = NEUTRAL_SAMPLING | args | extra_body
        self._template_kwargs = self._body.pop("chat_template_kwargs", {})
        # The texts of the ids that were decoded. Nearly all prompts end in the same ids.
        self._decoded: dict[tuple[int, ...], str] = {}

    async def connect(self) -> None:
        from openai import APIStatusError, AuthenticationError

        http = self._http.with_options(timeout=FIRST_RESPONSE_SEC, max_retries=1)
        limits: dict[str, int] = {}
        try:
            # cast_to=object: the response is plain JSON.
            response: Any = await http.get("/v1/models", cast_to=object)
            limits = context_limits(response["data"], self._is_sglang)
        except AuthenticationError as error:
            name = "SGLANG_API_KEY" if self._is_sglang else "VLLM_API_KEY"
            raise ApiError(
                f"{self.url} rejected the API key, or requires one: set {name} ({error})"
            ) from error
        except (APIStatusError, AttributeError, KeyError, TypeError, ValueError) as error:
            # With `context_limit`, a server need not have /v1/models.
            if not self._given_limit:
                raise ApiError(
                    f"{self.url} is not a vLLM or SGLang server (for others set "
                    f"model_client=litellm), or is not ready: {error!r}"
                ) from error
        if self._is_sglang and limits and self._model not in limits:
            # SGLang would answer to any name, with its base model.
            raise ApiError(f"{self.url} has no model {self._model}: its models are {list(limits)}")
        # vLLM may load an adapter at the first request for it, and does not list it before that.
        limit = limits.get(self._model) or self._given_limit
        if not limit:
            raise ApiError(
                f"{self.url} gives no context limit for the model {self._model}: its models are "
                f"{list(limits)}. Set context_limit if the name is right"
            )
        self.context_limit = min(limit, self._given_limit or limit)

    async def _post(self, path: str, body: dict[str, Any], headers: Any = None) -> Any:
        from openai import APIStatusError

        body = {"model": self._model, **body}
        options: Any = {"headers": headers or {}}
        try:
            response: Any = await self._http.post(path, body=body, options=options, cast_to=object)
        except APIStatusError as error:
            if error.status_code not in (404, 405):
                raise
            # A gateway may pass on nothing but /v1, so the error names the path.
            place = f"{type(error).__name__} from {self.url}, {path}"
            raise ApiError(f"{place}: {error_text(error)}") from error
        if not isinstance(response, dict) or response.get("error"):
            text = f"{self.url}, {path} returned no result: {str(response)[:200]}"
            raise UnreadableError(text)
        return response

    async def render(self, messages: list[Message]) -> list[int]:
        # The servers add the generation prompt, unless they are told not to.
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
        body: dict[str, Any] = {
            **self._body,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            # 0 means the log-probability of the sampled token alone.
            "logprobs": 0,
            "return_token_ids": True,
            # Thinking tags may be special tokens. The server still removes the stop token.
            "skip_special_tokens": False,
        }
        if not self._is_sglang:
            # vLLM 0.33 and later honor this. SGLang returns the versions by default.
            body["return_weight_versions"] = True
        headers = None
        if session:
            body["session_id"] = session
            # Routers look at the header first.
            headers = {"X-Session-ID": urllib.parse.quote(session)}
        response = await self._post("/v1/completions", body, headers)
        reply = response["choices"][0]
        extra = {}
        # vLLM returns these in the choice, SGLang beside the choices.
        for place in (reply, response.get("sglext"), response.get("metadata")):
            extra |= {name: place[name] for name in EXTRA_NAMES if place and place.get(name)}
        ids = reply.get("token_ids")
        usage = response.get("usage") or {}
        # With --allow-auto-truncate, SGLang truncates a long prompt, but returns all its ids, so
        # compare the count. It is 0 if SGLang aborted the request in its queue.
        n_prompt = usage.get("prompt_tokens") or len(prompt_ids)
        if n_prompt != len(prompt_ids) or reply.get("prompt_token_ids") not in (None, prompt_ids):
            raise ApiError(f"{self.url} changed the ids of the prompt")
        details = usage.get("prompt_tokens_details") or {}
        # A server that gives no ids still counts the tokens.
        n_completion = usage.get("completion_tokens") or len(ids or [])
        return Turn(
            content=reply["text"],
            usage=usage_of(len(prompt_ids), n_completion, details.get("cached_tokens")),
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            logprobs=(reply.get("logprobs") or {}).get("token_logprobs"),
            finish_reason=reply["finish_reason"] or "error",
            extra=extra,
        )


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
    # The last step's `StopReason`, or the loop's own word. None for other agents.
    stop_reason: str | None
    # Harbor's result, with all rewards, tokens, cost and names.
    trial: TrialResult


def training_data(trial: TrialResult) -> TrainingData | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`. None if
    the trial failed, if one of its steps ended in ERROR, or if the trial has neither a reward nor a
    trainable turn. Raises ValueError if ids and logprobs do not align, or a number is not finite.
    """
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    stop_reasons = [(context.metadata or {}).get("stop_reason") for context in contexts]
    rewards = (trial.verifier_result.rewards if trial.verifier_result else None) or {}
    errors = {part.exception_info.exception_type for part in (trial, *steps) if part.exception_info}
    if (
        errors - SCORED_ERRORS
        or StopReason.ERROR in stop_reasons
        # Harbor drops the error of a verifier that failed after the agent's timeout.
        or any(step.verifier and not step.verifier_result for step in steps)
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


# The names of `training_data` in earlier versions, which trainers import.
_trial_to_trajectory = trial_to_trajectory = training_data


def rollout_details(turns: list[Turn]) -> list[RolloutDetail] | None:
    """One Harbor RolloutDetail, in a list, with an entry for each of these turns; None if there are
    none. The caller leaves out turns that are not trainable, so that all lists stay aligned."""
    if not turns:
        return None
    names = {name for turn in turns for name in turn.extra or {}}
    detail: RolloutDetail = {
        "prompt_token_ids": [turn.prompt_token_ids or [] for turn in turns],
        "completion_token_ids": [turn.completion_token_ids or [] for turn in turns],
        "logprobs": [turn.logprobs or [] for turn in turns],
        "extra": {name: [(turn.extra or {}).get(name) for turn in turns] for name in names},
    }
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


# ---- files, texts, and the task's time limit


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file, readable by all users, into the log folder. Raises OSError, for instance if a
    script put a folder there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A script may have put a link or a pipe there, which must not be opened.
    path.unlink(missing_ok=True)
    try:
        # "x" fails if a script put another file there in the meantime.
        with open(path, "xb") as file:
            # The tests may run as another user, and the umask may be restrictive.
            os.chmod(file.fileno(), 0o644)
            file.writelines(parts)
    except BaseException:
        # Leave no incomplete file behind.
        path.unlink(missing_ok=True)
        raise


def valid_text(text: str | None) -> str:
    """Text that tokenizers, servers and files accept: None becomes "", a lone surrogate becomes
    "?", and NUL is left out."""
    return (text or "").replace("\0", "").encode("utf-8", "replace").decode()


def task_timeout_sec(trial_dir: Path) -> float:
    """The agent's timeout in seconds: the trial's override, else the step's, else the task's,
    capped at the trial's maximum, times the trial's multiplier. Harbor does not report it, so this
    repeats Harbor's rule (trial/trial.py and trial/multi_step.py, 0.13.1 to 0.26). math.inf if
    there is no timeout, or if the trial's files cannot be read: programs other than Harbor might
    not write them."""
    from harbor.models.task.config import TaskConfig
    from harbor.models.trial.config import TrialConfig

    try:
        config = TrialConfig.model_validate_json((trial_dir / "config.json").read_bytes())
        task_file = config.task.get_local_path() / "task.toml"
        task = TaskConfig.model_validate_toml(task_file.read_text())
    except Exception:
        return math.inf
    # Harbor makes the folder of each step when the step begins.
    begun = [step for step in task.steps or [] if (trial_dir / "steps" / step.name).exists()]
    of_step = begun[-1].agent.timeout_sec if begun else None
    of_task = task.agent.timeout_sec if of_step is None else of_step
    seconds = config.agent.override_timeout_sec or of_task or math.inf
    multiplier = config.agent_timeout_multiplier
    if multiplier is None:
        multiplier = config.timeout_multiplier
    return min(seconds, config.agent.max_timeout_sec or math.inf) * multiplier


# ---- the blocks of a reply

# A line that opens a block: spaces or the marker of a list item, the fence, and the words after it,
# as in "- ```bash".
_OPENING_FENCE = re.compile(
    r"(?P<before>(?:[ \t]|[-*+] |\d{1,9}[.)] )*)(?P<fence>`{3,}|~{3,})(?P<words>[^`]*)"
)


@dataclass
class _Block:
    # What is before the fence, the fence, and the words after it.
    before: str
    fence: str
    words: list[str]
    lines: list[str] = field(default_factory=list)

    def has_fence(self, line: str) -> bool:
        """True if a line begins with a fence of the same character that is at least as long, and
        that is indented at most three spaces more than this block's fence, as in Markdown."""
        n_spaces = len(line) - len(line.lstrip(" \t"))
        return line.lstrip(" \t").startswith(self.fence) and n_spaces <= len(self.before) + 3

    def is_closed_by(self, line: str) -> bool:
        """True if a line holds the block's fence and nothing else."""
        return self.has_fence(line) and not line.strip(f"{self.fence[0]} \t")

    def content(self) -> str:
        # In "- ```bash" each character of the list item's marker counts as a space.
        indent = re.sub(r"\S", " ", self.before)
        return "".join(f"{without_indent(line, indent)}\n" for line in self.lines)


def fenced_blocks(text: str, *languages: str) -> list[str] | None:
    """The contents of the ``` blocks of a Markdown text that are in one of these languages (in
    lower case). Their fences are lines of their own. A block inside another one, or inside ~~~,
    does not count.

    An empty list: there is no such block. None: there is one, but nothing may run, because

    1. the text's last block, in whatever language, is not closed (`open_block`),
    2. some block holds a line such as ```python (`is_ambiguous`), or
    3. a block in one of the languages has other words on its first line (`has_other_words`)."""
    blocks: list[_Block] = []
    # The block that is not closed yet.
    open_block: _Block | None = None
    is_ambiguous = False
    for line in re.sub("\r\n?", "\n", text).split("\n"):
        if open_block is None:
            if opening := _OPENING_FENCE.fullmatch(line):
                before, fence, words = opening.groups()
                open_block = _Block(before, fence, words.lower().split())
                blocks.append(open_block)
        elif open_block.is_closed_by(line):
            open_block = None
        else:
            open_block.lines.append(line)
            # A line such as ```python in a bash block may open a nested block. It is then unclear
            # which of the two the next ``` closes.
            is_ambiguous = is_ambiguous or open_block.has_fence(line)
    wanted = [
        block
        for block in blocks
        if block.fence.startswith("`") and block.words and block.words[0] in languages
    ]
    has_other_words = any(len(block.words) > 1 for block in wanted)
    if wanted and (open_block or has_other_words or is_ambiguous):
        return None
    return [block.content() for block in wanted]


def without_indent(line: str, indent: str) -> str:
    """A line of a block without the indentation of its fence. A line with less indentation loses
    the spaces at its start. Tabs stay, because Makefiles need them."""
    if line.startswith(indent):
        return line[len(indent) :]
    return line[: len(indent)].lstrip(" ") + line[len(indent) :]


# ---- scripts
#
# A plain `bash -c SCRIPT` does not survive what models write. So `run_script` starts a bash program
# in the container. The program runs the model's script, and prints a report. For `echo hello` the
# report holds the output in base64, and the exit code:
#
#     begin:3f2a19bc:
#     aGVsbG8K
#     :3f2a19bc:0:
#
# A second program kills the script at its time limit, on cancellation, and if there is no report.
#
# The comments quote scripts in backticks, for example `yes`. Models wrote scripts like these.

# The latest time, in seconds, of each event for a script with a limit of 120 seconds:
#
#     120   the limit: the kill begins
#     150   the kill has ended, or the run ends with RuntimeRequestError (KILL_SEC)
#     180   the report has come, or the model is told that there is none (REPORT_SEC)
#     210   the environment's own limit, which is never reached
KILL_SEC = 30
REPORT_SEC = 30


@dataclass
class ScriptResult:
    """The result of a script."""

    # None: there is no report.
    exit_code: int | None
    # The script's output. Without a report: what came instead, or the environment's error.
    output: str
    # True if the program's exit code is not 0, and nothing shows that the script ran.
    did_not_start: bool = False
    timed_out: bool = False


async def run_script(
    blocks: list[str], environment: BaseEnvironment, seconds: int, max_bytes: int
) -> str:
    """Run blocks as one script with a time limit in seconds. Returns the text for the model: the
    exit code and the output. A script that ends leaves its background processes running. Raises
    RuntimeRequestError if the environment no longer runs commands."""
    # Each block has its own `eval`, so that `cat <<EOF` without EOF does not swallow the next one.
    script = "".join(f"eval {shlex.quote(block)}\n" for block in blocks)
    # base64 hides the words: `pkill -f WORD` kills every process with WORD in its command line.
    encoded = base64.b64encode(script.encode()).decode()
    # The program is one argument of a process. Linux accepts 131,072 bytes.
    if len(encoded) > 129_000:
        # 126 is bash's code for "cannot be run".
        return "Exit code: 126\nOutput:\n[Nothing was run: the script is too long. Split it.]"
    mark = uuid4().hex[:8]
    # The names begin with loop_. If the image exports a variable `mark`, an assignment to `mark`
    # would change it for the script.
    variables = f"loop_mark={mark} loop_max_bytes={max_bytes} loop_script={encoded}"
    program = f"{variables}\n{SCRIPT_PROGRAM}"
    result = await run_or_kill(program, mark, environment, seconds)
    did_not_start = result.did_not_start and not result.timed_out
    # No command starts in a directory that an earlier script removed.
    runs_in_root = did_not_start and await is_directory_gone(environment)
    if runs_in_root:
        result = await run_or_kill(program, mark, environment, seconds, cwd="/")
    code, lines = result.exit_code, [result.output]
    if code is None:
        # Text that came instead of a report is unbounded, so cut it.
        lines = [result.output[-max_bytes:], "[The script's result could not be read.]"]
    elif runs_in_root:
        lines.append("[The working directory cannot be used, so the script ran in /.]")
    if result.timed_out:
        lines.append(f"[The time limit of {seconds} seconds was reached.]")
    shown = "\n".join(filter(None, lines)) or "(none)"
    return f"Exit code: {'unknown' if code is None else code}\nOutput:\n{shown}"


async def run_or_kill(
    program: str, mark: str, environment: BaseEnvironment, seconds: int, cwd: str | None = None
) -> ScriptResult:
    """Run a script. Kill it at its time limit, on cancellation, and if there is no report, because
    it may still be running then. Raises RuntimeRequestError if the kill fails, for instance because
    the environment no longer runs commands."""
    timeout_sec = seconds + KILL_SEC + REPORT_SEC + 30
    running = asyncio.create_task(run_program(program, mark, environment, cwd, timeout_sec))
    try:
        await asyncio.wait([running], timeout=seconds)
        timed_out = not running.done()
        if timed_out or running.result().exit_code is None:
            await kill_script(mark, environment)
            # SCRIPT_PROGRAM survives the kill, and reports what the script printed until then.
            await asyncio.wait([running], timeout=REPORT_SEC)
        result = running.result() if running.done() else ScriptResult(None, "no answer")
    except asyncio.CancelledError:
        # Free the environment for the kill: some environments run one command at a time.
        running.cancel()
        with contextlib.suppress(RuntimeRequestError):
            await kill_script(mark, environment)
        raise
    finally:
        # Give up an `exec` that has not returned.
        running.cancel()
    return replace(result, timed_out=timed_out)


async def run_program(
    program: str, mark: str, environment: BaseEnvironment, cwd: str | None, timeout_sec: int
) -> ScriptResult:
    """Run SCRIPT_PROGRAM after its variables, and find the report in what it printed. Raises no
    error of the environment."""
    try:
        answer = await environment.exec(program, cwd=cwd, timeout_sec=timeout_sec)
        # stderr may say why there is no report, such as "bash: not found".
        printed = valid_text(answer.stdout) + valid_text(answer.stderr)
    except Exception as error:
        return ScriptResult(None, f"{type(error).__name__}: {error}")
    report = re.search(rf"begin:{mark}:([A-Za-z0-9+/=\s]*):{mark}:(\d{{1,3}}):", printed)
    if report:
        # A script can write into the report (`echo x >/proc/$PPID/fd/1`), so this may fail.
        with contextlib.suppress(ValueError):
            output = base64.b64decode("".join(report[1].split()), validate=True)
            text = output.decode("utf-8", "replace").removesuffix("\n")
            return ScriptResult(int(report[2]), text)
    # With exit code 0 the program did run, and what it printed was lost.
    did_not_start = answer.return_code != 0 and f"begin:{mark}:" not in printed
    return ScriptResult(None, printed, did_not_start)


async def is_directory_gone(environment: BaseEnvironment) -> bool:
    """True if no command starts in the working directory, as after `mv /app /old`. The
    `kill_script` before this call showed that commands start in /."""
    try:
        async with asyncio.timeout(KILL_SEC):
            return (await environment.exec("true", timeout_sec=KILL_SEC)).return_code != 0
    except Exception:
        return False


def without_comments(program: str) -> str:
    """A bash program as it is sent. A script's `pkill -f WORD` would find the words of comments,
    because the program becomes a command line."""
    return re.sub(r"(?m)^ *#.*\n", "", program)


# The programs need bash, grep, /proc, and coreutils or busybox.
SCRIPT_PROGRAM = without_comments(r"""
# The script must not read the stdin of the environment. Bash's own messages must not spoil the
# report, if the environment joins stderr with stdout.
exec </dev/null 2>/dev/null
# The script and its output are files in /dev/shm, because `yes` would fill the disk. /dev/shm is in
# memory, and small (64 MB in Docker): a script that prints more gets write errors. If the script
# does not fit there, both files are in /tmp.
loop_write() { echo $loop_script | base64 -d >$loop_file.script; }
loop_file=/dev/shm/$loop_mark
trap 'rm -f $loop_file.script $loop_file.output' EXIT
if ! loop_write; then
  rm -f $loop_file.script
  loop_file=/tmp/$loop_mark
  if ! loop_write; then
    echo "no room in /dev/shm and /tmp, or no base64"
    exit 1
  fi
fi
echo begin:$loop_mark:
# With -m the script has a process group of its own. Otherwise `trap 'kill 0' EXIT` in a script
# would kill this program, too.
set -m
# BASIC_LOOP_MARK: the script's processes inherit it, and the kill finds them by it.
# The output goes to a file, because `python -m http.server &` would keep a pipe open.
# >> because a script may empty the file (`echo x >/dev/stderr`). With >, the next output would be
# written at the old offset, with NULs before it.
# & because an interrupt that ends a foreground script would also end this program.
BASIC_LOOP_MARK=$loop_mark bash $loop_file.script >>$loop_file.output 2>&1 &
wait $!
loop_code=$?
# 0: the script removed the file.
loop_size=$(stat -c %s $loop_file.output || echo 0)
loop_half=$((loop_max_bytes / 2))
# The output is in base64, because `cat /bin/ls` prints bytes that are not text.
if [ $loop_size -gt $loop_max_bytes ]; then
  {
    head -c $loop_half $loop_file.output
    printf '\n[... %s bytes left out ...]\n' $((loop_size - 2 * loop_half))
    tail -c $loop_half $loop_file.output
  } | base64
else
  # A background process may still be printing: `cat` might never end.
  head -c $loop_max_bytes $loop_file.output | base64
fi
echo :$loop_mark:$loop_code:
""")

KILL_PROGRAM = without_comments(r"""
# The script's processes, by their mark. `timeout 90 make` leaves the script's process group. This
# program does not export loop_mark, and so does not find itself.
script_pids() { grep -ls BASIC_LOOP_MARK=$loop_mark /proc/[0-9]*/environ | cut -d / -f 3; }
# Without grep and cut nothing would be killed.
type grep cut >/dev/null || exit 127
# At SIGTERM `git commit` removes its lock. SIGKILL ends what is left after two seconds.
kill -TERM $(script_pids)
for _ in {1..20}; do
  [ -n "$(script_pids)" ] || break
  sleep 0.1
done
kill -KILL $(script_pids)
# It is not an error if there is nothing to kill.
exit 0
""")


async def kill_script(mark: str, environment: BaseEnvironment) -> None:
    """Kill the processes with this mark in their environment. A process that was started by
    `env -i` or as another user survives. Without /proc, all of them survive. Raises
    RuntimeRequestError if the container lacks grep or cut, or no longer runs commands."""
    program = f"loop_mark={mark}\n{KILL_PROGRAM}"
    try:
        # Some environments ignore timeout_sec.
        async with asyncio.timeout(KILL_SEC):
            answer = await environment.exec(program, cwd="/", timeout_sec=KILL_SEC)
        printed = f"{answer.stdout or ''}{answer.stderr or ''}"
        problem = f"exit code {answer.return_code}: {printed}" if answer.return_code else ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise RuntimeRequestError(f"the environment no longer runs scripts: {valid_text(problem)}")


# ---- tables
#
# The functions above look up words, names and tags here. You need not read the tables to change the
# agent, but may have to add an entry for your model, server or provider.

# Finish reasons with which a server failed, in lower case: words of vLLM, SGLang, TensorRT-LLM,
# watsonx, DeepSeek, GLM, OpenRouter, Gemini and Bedrock. (For "abort" the clients of this file
# raise AbortedError, but a custom client may not.) If a word is missing, the trial is scored.
FAILED_REASONS = {
    "abort",
    "aborted",
    "cancelled",
    "canceled",
    "error",
    "failed",
    "time_limit",
    "timeout",
    "insufficient_system_resource",
    "network_error",
    "engine_overloaded",
    "overloaded",
    "server_error",
    "malformed_response",
    "malformed_model_output",
}
# Finish reasons of a truncated reply, in lower case: "length" is the usual one, the others are
# those of Mistral, Responses APIs and Cohere. If a word is missing, litellm calls the reply
# complete.
TRUNCATED_REASONS = {
    "length",
    "max_tokens",
    "model_length",
    "max_output_tokens",
    "incomplete",
    "length_capped",
    "context_length",
    "error_limit",
}
# Phrases for a prompt that is too long, in lower case. If a phrase is missing, the trial ends in an
# ApiError, which Harbor does not score.
CONTEXT_IS_FULL = (
    # OpenAI, vLLM, SGLang, Anthropic, llama.cpp, LM Studio, MiniMax, Kimi
    "context window",
    "context length",
    "context_length",
    "context size",
    "context limit",
    "maximum context",
    "the token limit",
    "model token limit",
    "total tokens limit",
    # Anthropic, Bedrock, Ollama, SGLang
    "prompt is too long",
    "prompt too long",
    "input is too long",
    "input too long",
    "request_too_large",
    "request exceeds the maximum size",
    "request body too large for",
    # Fireworks, vLLM, SambaNova, TensorRT-LLM
    "maximum model length",
    "maximum sequence length",
    "supported sequence length",
    # Gemini, Bedrock, GLM, Volcengine, SGLang
    "exceeds max length",
    "maximum allowed length",
    "exceeds the maximum number of tokens",
    "max message tokens",
    # OpenAI, Gemini, DashScope, OpenRouter, Tencent, Copilot, Databricks, watsonx, xAI
    "input tokens exceed",
    "number of input tokens",
    "input token count",
    "input length",
    "input text length",
    "prompt length",
    "prompt tokens",
    "prompt token count",
    # Cohere, Bedrock, Groq
    "too many tokens",
    "too many input tokens",
    "expected maxlength",
    "reduce the length",
    # TGI, Together
    "`inputs` tokens",
    "`inputs` must have less",
    # TensorRT-LLM, vLLM, SGLang, LMDeploy
    "max_seq_len",
    "max_num_tokens",
    "exceeds max_model_len",
    "exceeds the kv",
    "max_tokens must be at least 1, got",
    "length limit exceeded",
    "tokens_limit_reached",
    "larger than the max_length",
)
# Rate limits, which contain "too many tokens". `has_phrase` removes them first.
OTHER_LIMITS = ("too many tokens, please wait", "too many tokens per")
# Phrases for a quota that is used up, in lower case. Waiting does not help then. If a phrase is
# missing, the agent waits for ten minutes.
QUOTA_IS_USED_UP = (
    "insufficient quota",
    "insufficient_quota",
    "insufficient balance",
    "insufficient_balance",
    "insufficient credit",
    "insufficient_credit",
    "insufficient fund",
    "insufficient_fund",
    "exceeded_current_quota",
    "credit balance",
    "credit_balance",
    "spend_limit_exceeded",
    "usage_limit_exceeded",
    "spending limit",
    "usage limit reached",
    "free-models-per-day",
    "daily free allocation",
    "credits are depleted",
    "budget has been exceeded",
    "billing hard",
    "billing_hard",
    "billing_not",
    "arrearage",
    "is suspended",
    "account balance",
    "request too large for",  # larger than the limit per minute
    "余额不足",  # GLM: insufficient balance
)
# Providers for which litellm, without a URL, would send the conversation and the key to OpenAI.
PROVIDERS_WITHOUT_URL = ("hosted_vllm", "lm_studio", "litellm_proxy", "custom_openai", "xinference")
# The variables of a provider. Most of their names begin with the provider's name in capitals, such
# as GROQ_API_KEY. This table lists the exceptions, as of litellm 1.110. If an entry is missing,
# export the key: litellm itself looks for it in the environment of the process.
VARIABLE_PREFIXES = {
    "ai21_chat": ["AI21"],
    "aleph_alpha": ["ALEPH_ALPHA", "ALEPHALPHA"],
    "apertis": ["STIMA"],
    "azure": ["AZURE", "AZURE_OPENAI"],
    "azure_ai": ["AZURE_AI", "AZURE", "AZURE_OPENAI"],
    "cohere": ["COHERE", "CO"],
    "cohere_chat": ["COHERE", "CO"],
    "featherless_ai": ["FEATHERLESS_AI", "FEATHERLESS"],
    "fireworks_ai": ["FIREWORKS", "FIREWORKS_AI", "FIREWORKSAI"],
    "friendliai": ["FRIENDLIAI", "FRIENDLI"],
    "gemini": ["GEMINI", "GOOGLE", "PALM"],
    "huggingface": ["HUGGINGFACE", "HF"],
    "lambda_ai": ["LAMBDA"],
    "meta_llama": ["LLAMA"],
    "nano-gpt": ["NANOGPT"],
    "ollama_chat": ["OLLAMA"],
    "openrouter": ["OPENROUTER", "OR"],
    "perplexity": ["PERPLEXITYAI", "PERPLEXITY"],
    "qwen_ai_platform": ["DASHSCOPE"],
    "qwencloud": ["QWENCLOUD", "DASHSCOPE"],
    "scaleway": ["SCW"],
    "tensormesh": ["TENSORMESH_INFERENCE", "TENSORMESH_SERVERLESS"],
    "text-completion-openai": ["OPENAI"],
    "together_ai": ["TOGETHER_AI", "TOGETHERAI", "TOGETHER"],
    "veniceai": ["VENICE_AI"],
    "vercel_ai_gateway": ["VERCEL_AI_GATEWAY", "VERCEL_OIDC"],
    "watsonx": ["WATSONX", "WX", "WML"],
}
# Any provider's URL may be in a variable such as GROQ_API_BASE. For these providers, a variable
# with this ending may hold it, too. Other providers have no second ending: HF_ENDPOINT, for
# example, is the URL of the model hub.
URL_ENDINGS = {
    "anthropic": "BASE_URL",
    "cometapi": "BASE_URL",
    "datarobot": "ENDPOINT",
    "openai": "BASE_URL",
    "sglang": "BASE_URL",
    "tensormesh": "BASE_URL",
    "text-completion-openai": "BASE_URL",
    "tinker": "BASE_URL",
    "vllm": "BASE_URL",
    "watsonx": "URL",
}
# The tag that opens the thinking, and the text after which the answer begins. For most models that
# is the closing tag, and for gpt-oss and others the header of the final message. If a template ends
# the prompt with an opening tag, `TokenClient.call` puts the tag in front of the reply. If the tags
# of a model are missing, its thinking is part of its answer, and a script in it is run.
THINKING_TAGS = {
    # <think>hm</think>hi
    "<think>": "</think>",
    "<longcat_think>": "</longcat_think>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<ifm|think>": "</ifm|think>",
    "<ifm|think_fast>": "</ifm|think_fast>",
    "<ifm|think_faster>": "</ifm|think_faster>",
    # [THINK]hm[/THINK]hi
    "[THINK]": "[/THINK]",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    # <|START_THINKING|>hm<|END_THINKING|>hi
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
    # <|open|>think<|sep|>hm<|close|>think<|sep|>hi
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    # Gemma: <|channel>thought hm<channel|>hi
    "<|channel>": "<channel|>",
    # gpt-oss:
    # <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
    "<|channel|>": "<|channel|>final<|message|>",
    # Inkling:
    # <|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>hi
    "<|message_model|>": "<|message_model|><|content_text|>",
    # Muse: to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>hi
    "to=self<|message|>": "to=user<|message|>",
    # Solar: <|think|>hm<|end|><|begin|>assistant<|content|>hi
    "<|think|>": "<|content|>",
}
# What may precede an answer, whether or not there was thinking.
ANSWER_STARTS = (
    # Kimi K3: <|open|>response<|sep|>hi<|close|>response<|sep|><|close|>message<|sep|>
    "<|open|>response<|sep|>",
    # Cohere: <|START_RESPONSE|>hi<|END_RESPONSE|>
    "<|START_RESPONSE|>",
    "<|START_TEXT|>",
    # Muse and Solar without thinking
    "to=user<|message|>",
    "<|content|>",
    # MiniMax: </mm:think>hi
    "</mm:think>",
)
# What may end an answer, the outermost first.
ANSWER_ENDS = (
    "<|close|>message<|sep|>",
    "<|close|>response<|sep|>",
    "<|END_RESPONSE|>",
    "<|END_TEXT|>",
    "<|end_message|>",
)
# Special tokens, as regular expressions. A server does not list those of its model, so all of these
# become plain text for every model, even an HTML <s>. If a token is missing, an output that holds
# its name can end a message. (FF5C is DeepSeek's full-width bar.)
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
    # MiniMax's ]~b] and ]~!b[. Their first characters are enough.
    r"\]~!?b",
    r"\[e~\[",
]
