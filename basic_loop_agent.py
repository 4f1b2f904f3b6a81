# SPDX-License-Identifier: Apache-2.0
"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://...

The agent samples from one model in one conversation and runs one script a turn. It does not compact
long conversations, call tools natively or run commands in parallel. To add such a thing, change the
loop: `BasicLoopAgent._converse`.

Words that the file uses from the start:

- turn: one model call, as a `Turn`. A run ends for a `StopReason`.
- exact prompt: a prompt whose token ids begin with the ids of the previous turn's prompt and reply.
- client: an object that calls the model. `TinkerClient` and `VllmClient` are `ExactClient`s: they
  send exact prompts as token ids. `chat_client` makes Harbor's LiteLLM, which sends messages.
- conversation: a `Conversation`, which is a trial's Harbor Chat and the record of its turns.

The order is: options, the cache of clients, the agent with its loop, the turn and the endings, the
conversation, thinking, the clients, training data, files, and last how a script is run.
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
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
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
    # Harbor before 0.23 has neither class. The agent then parses its options itself.
    AgentCapabilities = AgentOptions = BaseModel
    HARBOR_PARSES_OPTIONS = False

__version__ = "0.7.0"


class BasicLoopOptions(
    AgentOptions,
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    hide_input_in_errors=True,
    use_attribute_docstrings=True,
):
    """The options that `--ak key=value` accepts, with their defaults.

    `BasicLoopAgent.__init__` repeats the names and defaults of the first eight. `llm_kwargs` may
    hold an API key: no error and no repr shows it.
    """

    model_path: str | None = Field(None, pattern="^tinker://")
    """Tinker checkpoint to sample, tinker://...; default: the base model."""
    renderer_name: str | None = None
    """tinker-cookbook renderer; default: the one recommended for the model."""
    max_tokens: PositiveInt = 512
    """Maximum tokens per model call, thinking included."""
    temperature: NonNegativeFloat | None = 1.0
    """Sampling temperature; null: the client's default."""
    max_turns: PositiveInt = 1
    """Maximum model calls; above 1, the bash blocks of a reply are run."""
    system_prompt: str | None = None
    """System message, verbatim; default: with max_turns > 1 the text that tells the model to write
    bash blocks. With an empty one, the instruction has to tell it."""
    model_client: Literal["tinker", "litellm"] = "tinker"
    """tinker, or litellm for API models and servers."""
    api_base: str | None = None
    """Base URL of the model's server; default: the client's own."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends and the trial is scored."""
    llm_kwargs: dict = Field({}, repr=False)
    """More arguments for the client: top_p, seed, ..."""
    collect_rollout_details: bool | None = None
    """Record token ids; with api_base this also selects exact prompts on vLLM; default: true for
    tinker."""
    context_limit: PositiveInt | None = None
    """Maximum tokens of a conversation; default: the server's, or 32,000 for tinker."""
    rerender_history: bool = False
    """Tinker, vLLM: render the whole history with the template in each turn."""
    interleaved_thinking: bool = False
    """Chat endpoints: send earlier reasoning back, as reasoning_content."""
    session_id: str | None = None
    """Sent to servers with each request, for routers; default: the trial's."""
    command_timeout_sec: PositiveInt = Field(120, le=7 * 24 * 3600)
    """Seconds after which a script is ended; at most a week."""
    max_output_bytes: PositiveInt = 10_000
    """Maximum bytes of a script's output that the model sees."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_tinker = self.model_client == "tinker"
        if self.collect_rollout_details is None:
            self.collect_rollout_details = is_tinker
        own_options = {*type(self).model_fields, "model_name"} - AgentOptions.model_fields.keys()
        duplicates = self.llm_kwargs.keys() & own_options
        if duplicates:
            raise ValueError(f"llm_kwargs holds {', '.join(duplicates)}: use the option instead")
        if not is_tinker and (self.model_path or self.renderer_name):
            raise ValueError(
                "model_path and renderer_name are for tinker: drop them, or set model_client=tinker"
            )
        if is_tinker and not importlib.util.find_spec("tinker_cookbook"):
            raise ValueError(
                "the Tinker packages are missing: run `pip install 'harbor[tinker]'`, or set "
                "model_client=litellm"
            )
        return self


# The cache: one client per event loop and configuration, built once per job and shared by its
# trials. The first trial builds it, in `setup` and under the lock; trials that come meanwhile wait
# for it. If it cannot be built, the error is kept in its place: trials that waited share it, and a
# later trial tries again. `BasicLoopAgent._shared_llm` is the code.
_clients: dict[tuple, Any] = {}
_locks: dict[tuple, asyncio.Lock] = {}

# A training run has a new configuration, its checkpoint, in each step: old clients are dropped.
MAX_CLIENTS = 128


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies if asked to, and records it all.

    A trial leaves the token counts, cost_usd (None if unknown), `metadata` and the rollout (see
    `rollout_details`) on the context. In `logs_dir` it leaves completion.txt, the last reply, and
    trajectory.json, in Harbor's format ATIF.
    """

    options_model = BasicLoopOptions
    # Harbor 0.23 does not know the last two fields: they would not pass validation.
    capabilities = AgentCapabilities.model_construct(
        atif=True, resume=True, skills=True, mcp_servers=True
    )

    # The default system message of a loop. {seconds} is replaced by the time limit of a script.
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
            **kw: The further options of `BasicLoopOptions`, and Harbor's arguments (logs_dir, ...).

        Raises:
            ValueError: An option is unknown or has a bad value.
        """
        # The agent's environment (`--ae KEY=value`) stays on the host. Harbor 0.16 and later would
        # put it into the environment of each command in the container.
        self._settings = ChainMap(without_masked(kw.pop("extra_env", None)), os.environ)
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
            super().__init__(model_name=model_name, **options, **kw)
        else:
            # Harbor takes these by name, and drops the last one.
            of_harbor = {*inspect.signature(BaseAgent).parameters, "override_setup_timeout_sec"}
            own = {name: kw.pop(name) for name in kw.keys() - of_harbor}
            super().__init__(model_name=model_name, **kw)
            self.options = self.options_model(**options, **own)
        # What the task brings besides the instruction; `setup` reads it.
        self._introduction: list[str] = []

    async def _converse(
        self, conversation: Conversation, environment: BaseEnvironment
    ) -> StopReason:
        """The loop: sample a reply, run its script, tell the model what the script said.

        `sample` records the turn before it returns. `conversation.messages` may be edited in
        place to have the model forget; pending text joins them at the next `sample`. What else is
        to be kept goes into `conversation.metadata`.
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
        """Go on with the conversation of the last `run`, and record this call's turns.

        The turns are on the context and in the files before anything is raised.

        Raises:
            Exception: What the client or the environment raises, and OSError if the files cannot
                be written.
        """
        conversation = self._conversation
        # This stays if a CancelledError passes.
        stop_reason = StopReason.CANCELLED
        try:
            async with asyncio.timeout(self.options.max_seconds) as limit:
                await conversation.begin(instruction)
                stop_reason = await self._converse(conversation, environment)
        except Exception as error:
            # A client or an environment may answer a cancellation with an error of its own.
            if asyncio.current_task().cancelling():
                raise asyncio.CancelledError from error
            stop_reason = StopReason.ROLLOUT_TIMEOUT if limit.expired() else StopReason.ERROR
            if stop_reason == StopReason.ERROR and isinstance(error, TimeoutError):
                # Harbor would take it for the agent's timeout, and score the trial.
                raise RuntimeError(f"a call timed out: {error!r}") from error
            if stop_reason == StopReason.ERROR:
                raise
        finally:
            try:
                self._record(conversation, stop_reason, context)
            except Exception:
                # A full disk must not hide why the run failed.
                if stop_reason not in (StopReason.ERROR, StopReason.CANCELLED):
                    raise

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Check the options and Tinker's key. Harbor 0.23 and later calls this before any trial."""
        if cls.parse_options(kwargs, env).model_client == "tinker":
            check_tinker_key(ChainMap(without_masked(env), os.environ))

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build the model client, and read what the task brings besides its instruction.

        Importing torch takes seconds, which do not count as the agent's time here.

        Raises:
            ValueError: The model cannot be called: no name, no provider, no key.
            Exception: What the client raises.
        """
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        if self.options.model_client == "tinker":
            check_tinker_key(self._settings)
        await self._shared_llm()
        self._introduction = []
        if self.skills_dir:
            listing = await self._execute([LIST_SKILLS % shlex.quote(self.skills_dir)], environment)
            self._introduction.append(f"Skills, to be read before they are used. {listing}")
        for server in self.mcp_servers:
            text = server.model_dump_json(exclude_none=True)
            self._introduction.append(f"MCP server: {text}")

    def script_in(self, reply: str) -> list[str] | None:
        """The bash blocks of a reply, which run as one script; None if there are none."""
        shells = ("bash", "sh", "shell")
        blocks = [text for language, text in fenced_blocks(reply) if language in shells]
        return blocks or None

    async def _execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        """Run blocks as one script in the environment. Returns what the model is told."""
        limit = self.options.command_timeout_sec
        mark = uuid4().hex
        call = ["run", mark, str(limit), str(FLOOD_BYTES), *blocks]
        command = f"BASIC_LOOP_RUN={mark} {shell_command(*call)}"
        # Modal takes 65,536 bytes of arguments.
        if len(command) > 65_000:
            return "Not run: the script is too long. Split it into smaller ones."
        told = None
        try:
            async with asyncio.timeout(limit + ANSWER_MARGIN_SEC) as timer:
                result = await environment.exec(command, timeout_sec=limit + EXEC_MARGIN_SEC)
            told = self._read_result(result, mark)
            return told or f"Exit code: {result.return_code}\nOutput:\n{LOST_OUTPUT}"
        except Exception as error:
            # Some environments raise an error of their own when they are cancelled.
            if asyncio.current_task().cancelling():
                raise asyncio.CancelledError from error
            if not timer.expired() and not isinstance(error, TimeoutError):
                raise
            return f"Exit code: 124\nOutput:\n[no answer; the time limit is {limit} seconds]"
        finally:
            # Without a whole answer the script may run on, into the next turn or the verifier.
            if told is None:
                command = shell_command("end_run", mark)
                ending = environment.exec(command, timeout_sec=ENDING_SEC + ANSWER_MARGIN_SEC)
                ending = asyncio.wait_for(ending, ENDING_SEC)
                # A cancellation does not stop the ending. The ending may fail: the environment may
                # be gone.
                await asyncio.shield(asyncio.gather(ending, return_exceptions=True))

    def _read_result(self, result: ExecResult, mark: str) -> str | None:
        # What the model is told of a script; None if the output of `run` is damaged.
        before, *ours = valid_text(result.stdout).split(f":{mark}:")
        # Without a mark `run` did not start: the environment says why.
        code, output, note = result.return_code, before.encode(), ""
        if ours:
            try:
                encoded, status, _ = ours
                output = base64.b64decode(encoded)
            except ValueError:
                return None
            code, _, note = status.partition(" ")
            output, end, _ = output.partition(f"\nend-of-{mark}\n".encode())
            if not (end or note):
                note = f"[cut off after {len(output)} bytes]"
        shown_bytes = self.options.max_output_bytes
        noise = valid_text(result.stderr).encode()
        texts = [middle_cut(output, shown_bytes), note, middle_cut(noise, shown_bytes)]
        shown = "\n".join(text.removesuffix("\n") for text in texts if text)
        return f"Exit code: {code}\nOutput:\n{shown or '(none)'}"

    def _record(
        self, conversation: Conversation, stop_reason: StopReason, context: AgentContext
    ) -> None:
        # Puts the run onto the context, then into the files.
        turns = conversation.turns
        usages = [turn.usage for turn in turns if turn.usage]
        if usages:
            context.n_input_tokens = sum(usage.prompt_tokens for usage in usages)
            context.n_output_tokens = sum(usage.completion_tokens for usage in usages)
            context.n_cache_tokens = sum(usage.cache_tokens for usage in usages)
        # The price of some turns is not the run's.
        if turns and all(turn.cost_usd for turn in turns):
            context.cost_usd = sum(turn.cost_usd for turn in turns)
        metadata = {**conversation.metadata, "stop_reason": stop_reason, "n_episodes": len(turns)}
        if self.options.collect_rollout_details:
            context.rollout_details = rollout_details(turns)
            metadata["n_turns_without_ids"] = sum(not turn.is_trainable for turn in turns)
            metadata["n_prefix_breaks"] = sum(turn.breaks_prefix for turn in turns)
        # A loop may have put anything there. JSON must hold it, or the job loses all its results.
        text = json.dumps(metadata, default=str, skipkeys=True, ensure_ascii=False)
        context.metadata = json.loads(valid_text(text))
        # Without a reply the file is empty: the reply of an earlier step must not be scored.
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
        """Build the client of this configuration. To bring your own, return any Harbor `BaseLLM`.

        - model_client=tinker: `TinkerClient`.
        - model_client=litellm with collect_rollout_details and a server's URL: `VllmClient`.
        - model_client=litellm otherwise: Harbor's LiteLLM, from `chat_client`.

        Token ids are on for Tinker, where training needs them. They are off for API models: closed
        APIs answer `logprobs` and `return_token_ids` with a 400, and a benchmark needs only the
        completion, the reward and the usage.

        This runs in a thread, for importing torch or litellm takes seconds.

        Raises:
            ValueError: The model's name has no provider, or no HTTP header takes the API key.
            Exception: What the client raises.
        """
        # Harbor's LiteLLM writes into what it is given: hand it a copy.
        options = self.options.model_copy(deep=True)
        model, provider = self.model_name, "tinker"
        if options.model_client == "litellm":
            model, provider = split_model_name(model, options.api_base, options.llm_kwargs)
        name = provider.upper()
        setting = self._settings.get
        base = options.api_base or setting(f"{name}_BASE_URL") or setting(f"{name}_API_BASE")
        key = options.llm_kwargs.pop("api_key", None) or setting(f"{name}_API_KEY", "")
        # A key from a file often ends in a newline.
        key = key.strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"the API key of {provider} holds a character that no HTTP header takes: is it "
                "the key alone?"
            )
        if base and provider in ("openai", "hosted_vllm"):
            # A local server serves its API under /v1, and needs no key, though the SDK wants one.
            base = re.sub(r"(//[^/]+:\d+)/?\Z", r"\1/v1", base)
            key = key or "none"
        arguments = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "context_limit": options.context_limit,
            "model_path": options.model_path,
            "renderer_name": options.renderer_name,
            "api_base": base,
            "api_key": key or None,
            **options.llm_kwargs,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if provider == "tinker":
            return TinkerClient(model_name=model, **arguments)
        chat = functools.partial(
            chat_client,
            model_name=self.model_name,
            collect_rollout_details=options.collect_rollout_details,
            **arguments,
        )
        # The template of gpt-oss refuses a history with its own headers.
        if options.collect_rollout_details and base and "gpt-oss" not in model:
            return VllmClient(model_name=model, without_tokenize=chat, **arguments)
        return chat()

    def _cache_key(self) -> tuple:
        """What makes two clients different. Keys and URLs are hashed, so that nothing shows them.

        Trials with another session id share a client; a key that was renewed in the environment
        makes a new one.
        """
        options = self.options.model_dump(exclude={"session_id"})
        endings = ("_API_KEY", "_BASE_URL", "_API_BASE")
        settings = [item for item in self._settings.items() if item[0].endswith(endings)]
        hashed = hash((repr(options), frozenset(settings)))
        return (type(self), self.model_name, hashed, _given_service)

    async def _shared_llm(self) -> Any:
        """The client of this configuration from the cache, which is explained there.

        Raises:
            Exception: What `_build_llm` or the server raises.
        """
        key = (asyncio.get_running_loop(), self._cache_key())
        old_error = _clients.get(key)
        async with _locks.setdefault(key, asyncio.Lock()):
            client = _clients.get(key)
            if client is None or (isinstance(client, Exception) and client is old_error):
                try:
                    client = await asyncio.to_thread(self._build_llm)
                    if isinstance(client, VllmClient):
                        client = await client.connect(self.logger)
                except Exception as error:
                    client = error
                _clients[key] = client
                for oldest in list(_clients)[:-MAX_CLIENTS]:
                    _clients.pop(oldest, None)
                    _locks.pop(oldest, None)
        if isinstance(client, Exception):
            raise client
        return client


# Harbor 0.20 to 0.22 looks for this flag. Later versions warn if the class body sets it.
BasicLoopAgent.SUPPORTS_RESUME = True


def without_masked(env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables whose values are whole: `harbor jobs resume` gives keys as sk-r****456."""
    return {name: value for name, value in (env or {}).items() if "****" not in value}


def split_model_name(model_name: str, api_base: str | None, llm_kwargs: dict) -> tuple[str, str]:
    """The model and the provider, as litellm tells them apart. Importing litellm takes seconds.

    Raises:
        ValueError: litellm knows no provider of that name.
    """
    import litellm

    # Else litellm prints a list of providers for each name that it does not know.
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


# The turn and the endings.


class StopReason(StrEnum):
    """Why a run ended, under the names of `tinker_cookbook.rl.types.StopReason` where it has them.

    Harbor scores a single-step trial after all endings but ERROR and Ctrl-C. In a multi-step task
    it scores a step that ended in ERROR, too; `trial_to_trajectory` leaves such a trial out.
    """

    # The reply holds no command, or was the one completion asked for.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was cut off: at `max_tokens`, at the end of the context, or by the server.
    MAX_TOKENS = "max_tokens"
    # The conversation left no room in the context window for a reply.
    CONTEXT_OVERFLOW = "context_overflow"
    # `max_seconds` have passed; the call or script that was under way was stopped.
    ROLLOUT_TIMEOUT = "rollout_timeout"
    # The agent's timeout, which Harbor scores, or Ctrl-C.
    CANCELLED = "cancelled"
    # An exception, which Harbor keeps as the exception_info of the trial or the step.
    ERROR = "error"


def now() -> str:
    """The time in ISO 8601, as ATIF wants it."""
    return datetime.now(UTC).isoformat()


@dataclass
class Turn(LLMResponse):
    """One model call: the ids exactly as sampled, the text cleaned.

    Attributes:
        content: The answer, without the thinking.
        reasoning_content: The thinking before the answer.
        prompt_token_ids: The whole prompt, shape [n_prompt]; None if the client gives none.
        completion_token_ids: The reply with its stop token, shape [n_completion], or None.
        logprobs: Natural logarithms, shape [n_completion], or None. Tinker gives those of the
            policy that sampled. vLLM gives those of the raw model, before temperature and top_p,
            unless it runs with --logprobs-mode processed_logprobs.
        extra: What else the client has of the turn (Tinker: sequence_id; vLLM: routed_experts).
        cut_off: Whether the reply is not whole; nothing in it is run.
        breaks_prefix: Whether the prompt is not exact.
        cost_usd: The price of the call, or None if it is unknown.
        timestamp: When the reply came, in ISO 8601.

    A turn that was read back from a trial's result has ids, logprobs and `extra`, but no text.
    """

    content: str = ""
    cut_off: bool = False
    breaks_prefix: bool = False
    cost_usd: float | None = None
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
        # Harbor's clients say 0.0 where they do not know the price.
        self.cost_usd = (self.usage and self.usage.cost_usd) or None

    @property
    def is_trainable(self) -> bool:
        """Whether there are ids and logprobs, of one length and finite (a policy may diverge)."""
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
class Told:
    """A text for the model: an instruction, or what the environment said."""

    text: str
    is_instruction: bool = False
    timestamp: str = field(default_factory=now)


class Conversation:
    """A trial's Harbor Chat, the text that waits for the next model call, and the run's record.

    Attributes:
        metadata: What the loop wants to keep of this run, by name.
        session_id: The id that servers get with each request.
    """

    def __init__(self, agent: BasicLoopAgent) -> None:
        options = agent.options
        self._agent = agent
        # Harbor 0.13 gives a trial no id.
        self.session_id = options.session_id or getattr(agent, "session_id", None) or uuid4().hex
        self.metadata: dict[str, Any] = {}
        self._system = valid_text(options.system_prompt)
        if options.system_prompt is None and options.max_turns > 1:
            self._system = agent.protocol.replace("{seconds}", str(options.command_timeout_sec))
        self._chat: Chat | None = None
        # This run's texts and turns, in the order in which the model was told and replied.
        self._told: list[Told | Turn] = []
        # The texts that the next call sends. They stay here until a reply has come.
        self._pending: list[Told] = []
        # The last turn: a copy of the messages, its token ids, and the number of these.
        self._last_messages: list[dict] = []
        self._last_ids: list[int] = []
        self._n_tokens = 0

    @property
    def messages(self) -> list[dict]:
        """The Chat's live list of messages. Edit it in place to have the model forget."""
        return self._chat.messages

    @property
    def turns(self) -> list[Turn]:
        """This run's turns."""
        return [part for part in self._told if isinstance(part, Turn)]

    async def begin(self, instruction: str) -> None:
        """Start a run with this instruction. Raises what building the client raises."""
        self._told = []
        self.metadata = {}
        self._pending.append(Told(valid_text(instruction), is_instruction=True))
        messages = [{"role": "system", "content": self._system}] if self._system else []
        if self._chat:
            messages = self.messages
        # Each event loop has a client of its own.
        self.client = await self._agent._shared_llm()
        thinks = self._agent.options.interleaved_thinking
        self._chat = Chat(self.client, interleaved_thinking=thinks)
        self.messages.extend(messages)

    def tell(self, text: str) -> None:
        """Have the next `sample` send this text, in which special tokens stay text."""
        self._pending.append(Told(valid_text(text)))

    async def sample(self) -> Turn:
        """Send the pending text, and record the reply before anything else is awaited.

        Raises:
            ContextLengthExceededError: The context has no room for a reply.
            RuntimeError: Nothing is pending, or ids were asked for and the server gave none.
            Exception: What the client raises.
        """
        if not self._pending:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        options = self._agent.options
        is_edited = self.messages != self._last_messages
        if is_edited:
            # The Responses API keeps the messages as they were.
            self._chat.reset_response_chain()
        elif self._n_tokens >= (options.context_limit or math.inf):
            raise ContextLengthExceededError(f"the conversation has {self._n_tokens} tokens")
        headers = options.llm_kwargs.get("extra_headers") or {}
        request = {"extra_headers": {**headers, "X-Session-ID": self.session_id}}
        if options.collect_rollout_details:
            # Closed APIs refuse a field that they do not know; they return no ids either.
            request["extra_body"] = {"session_id": self.session_id}
        if isinstance(self.client, ExactClient):
            # An instruction may hold special tokens on purpose.
            for told in self._pending:
                if not told.is_instruction:
                    told.text = await self.client.break_special_tokens(told.text)
            starts_anew = is_edited or options.rerender_history
            request["goes_on_from"] = [] if starts_anew else self._last_ids
        prompt = "\n\n".join(told.text for told in self._pending)
        try:
            reply = await self._chat.chat(prompt, **request)
        except OutputLengthExceededError as error:
            # A client of Harbor's own gives only the text of a reply that was cut off.
            reply = Turn(content=error.truncated_response, cut_off=True)
            self.messages.append({"role": "user", "content": prompt})
            self.messages.append({"role": "assistant", "content": reply.content})
            self._chat.reset_response_chain()
        return self._record_turn(Turn(**vars(reply)))

    def _record_turn(self, turn: Turn) -> Turn:
        # Splits the thinking off, and adds the turn to the record. Nothing else does.
        if turn.reasoning_content:
            # The server split it off; tags at the start of the content are thinking all the same.
            thinking, turn.content = opening_thinking(turn.content)
        else:
            prompt_is_known = isinstance(self.client, ExactClient)
            thinking, turn.content = split_thinking(turn.content, prompt_is_known)
        turn.reasoning_content += thinking
        turn.timestamp = now()
        if turn.prompt_token_ids:
            start = turn.prompt_token_ids[: len(self._last_ids)]
            turn.breaks_prefix = start != self._last_ids
            self._last_ids = turn.prompt_token_ids + (turn.completion_token_ids or [])
        self._n_tokens = 0
        if turn.usage:
            self._n_tokens = turn.usage.prompt_tokens + turn.usage.completion_tokens
        self._told += [*self._pending, turn]
        self._pending.clear()
        self._last_messages = [dict(message) for message in self.messages]
        # A later turn without ids is only counted.
        has_ids = turn.completion_token_ids == [] or (turn.completion_token_ids and turn.logprobs)
        if self._agent.options.collect_rollout_details and len(self.turns) == 1 and not has_ids:
            raise RuntimeError(
                "collect_rollout_details=true, but the server returned no token ids with logprobs"
            )
        return turn

    def steps(self) -> list[dict]:
        """This run as the steps of an ATIF trajectory, without their numbers.

        A script's output is the observation of the step that ran it. Text that no call has sent
        is shown as well.
        """
        steps = [{"source": "system", "message": self._system}] if self._system else []
        for part in [*self._told, *self._pending]:
            if isinstance(part, Turn):
                steps.append(self._agent_step(part, is_first=part is self.turns[0]))
            elif not part.is_instruction and steps and steps[-1]["source"] == "agent":
                result = {"content": part.text, "extra": {"timestamp": part.timestamp}}
                steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            else:
                step = {"source": "user", "message": part.text, "timestamp": part.timestamp}
                steps.append(step)
        return steps

    def _agent_step(self, turn: Turn, is_first: bool) -> dict:
        metrics = {"cost_usd": turn.cost_usd}
        if turn.usage:
            metrics["prompt_tokens"] = turn.usage.prompt_tokens
            metrics["completion_tokens"] = turn.usage.completion_tokens
            metrics["cached_tokens"] = turn.usage.cache_tokens
        if self._agent.options.collect_rollout_details:
            # The prompts of all turns would let the file grow with the square of their number.
            metrics["prompt_token_ids"] = turn.prompt_token_ids if is_first else None
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


# Thinking: where it ends, and the answer begins.

# The tags that open and close it: most models', Mistral's, Seed-OSS', Cohere's.
THINKING_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
_OPENING = "|".join(re.escape(tag) for tag in THINKING_TAGS)
_CLOSING = "|".join(re.escape(tag) for tag in THINKING_TAGS.values())
# Each tag is closed by its own, or by the end of the text.
_PAIRS = "|".join(
    rf"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\Z)"
    for opening, closing in THINKING_TAGS.items()
)
_THOUGHT = re.compile(rf"(?s)\s*(?:{_PAIRS})")
_CODE = re.compile(
    r"""(?xms)
    ^ [-*+.)\d\ \t]* (?P<fence> `{3,} | ~{3,} ) .*? (?: ^[\ \t]* (?P=fence) [`~]* [\ \t]* $ | \Z )
    | (?<!`) (?P<ticks> `++ ) [^`\n]+ (?P=ticks) (?!`)
    """
)


def opening_thinking(text: str) -> tuple[str, str]:
    """The thinking in the tags that a text begins with, and the rest of the text."""
    thinking = ""
    end = 0
    while thought := _THOUGHT.match(text, end):
        thinking += thought[thought.lastindex]
        end = thought.end()
    return thinking, text[end:].lstrip() if end else text


def split_thinking(text: str, prompt_is_known: bool = False) -> tuple[str, str]:
    """The thinking and the answer of a reply.

    Tags that a reply begins with enclose thinking, to the reply's end if they are never closed.
    Without them the prompt may have opened the thinking, or the model may have left the tag out:
    then the first closing tag outside of code ends it. Any other tag is text.

    Args:
        text: The reply.
        prompt_is_known: Whether the text says all that the prompt opened. Otherwise thinking may
            have stopped inside a fenced block: a closing tag at a line's start counts there, too,
            unless the same block opened it.
    """
    thinking, answer = opening_thinking(text)
    if answer != text:
        return thinking, answer

    def blanked(code: re.Match) -> str:
        closing = re.search(rf"(?m)^[ \t]*(?:{_CLOSING})", code[0])
        if closing and not prompt_is_known and not re.search(_OPENING, code[0]):
            return code[0]
        return " " * len(code[0])

    tag = re.search(f"(?:{_OPENING})|(?P<closing>{_CLOSING})", _CODE.sub(blanked, text))
    if tag and tag["closing"]:
        return text[: tag.start()], text[tag.end() :].lstrip()
    return "", text


# A message of gpt-oss or Inkling ends here if a header or nothing follows; else the mark is quoted.
_HEADER_BEGINS = r"\s*(?:to=\S{1,200}\s*)?<\|(?:channel|start|message_model)\|>"
_MESSAGE_ENDS = rf"<\|(?:end|call|return|end_message)\|>(?={_HEADER_BEGINS}|\s*\Z)"


def headers_to_tags(text: str) -> str:
    """A reply whose messages have headers, with tags around its thinking; other text unchanged.

    Both of these become <think>hm</think>hi:

        <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
        <|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>hi

    The first is gpt-oss' form, the second Inkling's. A message to a tool ("to=") is no answer.
    """
    if not re.match(_HEADER_BEGINS, text):
        return text
    thinking = ""
    answer = ""
    for message in re.split(_MESSAGE_ENDS, text):
        header_end = re.search(r"<\|(?:message|content_\w+)\|>|\Z", message).end()
        header = message[:header_end]
        if "to=" not in header and re.search("final|commentary|content_text", header):
            answer += message[header_end:]
        else:
            thinking += message[header_end:]
    # A tag that the thinking quotes would end it.
    return f"<think>{thinking.replace('</think>', '</ think>')}</think>{answer}"


# The clients. Two send exact prompts as token ids; the third is Harbor's LiteLLM.

Ids = list[int]

# The words of a server for a reply that is whole, in lower case. Every other word (length,
# insufficient_system_resource, time_limit, ...) means that the reply was cut off.
COMPLETED_REASONS = {
    "stop",
    "stop_sequence",
    "end_turn",
    "eos",
    "eos_token",
    "endoftext",
    "complete",
    "completed",
    "tool_calls",
    "tool_use",
    "function_call",
}


class ExactClient(ABC):
    """A client that sends exact prompts.

    Attributes:
        context_limit: The maximum tokens of a conversation.
        max_tokens: The maximum tokens of a reply.
        probes_system: Whether the text behind a reply may depend on the system message.
    """

    context_limit: float
    max_tokens: int
    probes_system: bool = True
    # The ids of a probe up to the end of its reply; see `next_prompt`. No probe begins with None.
    _probe_start: Ids | None = None

    @abstractmethod
    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        """The ids of the template's view of these messages, ready for a reply, and their end.

        The end is the text of the last few tokens: it shows whether the template opens thinking.
        """

    @abstractmethod
    async def generate(self, prompt_ids: Ids, max_tokens: int, **request: Any) -> Turn:
        """Sample a reply to a prompt. Raises what the model's service raises."""

    @abstractmethod
    async def special_texts(self, text: str) -> Iterable[str]:
        """The texts that may become special tokens if they stand in this text."""

    async def call(
        self,
        prompt: str,
        message_history: list[dict] | tuple = (),
        goes_on_from: Ids | tuple = (),
        **request: Any,
    ) -> Turn:
        """Sample a reply to these messages, as Harbor's Chat asks for it.

        Args:
            prompt: The new message of the user.
            message_history: The messages before it.
            goes_on_from: The ids of the history as they were sampled; without them it is rendered.
            **request: What else the client may send: extra_headers, extra_body.

        Raises:
            ContextLengthExceededError: The context has no room for a reply.
            Exception: What the model's service raises.
        """
        messages = [*message_history, {"role": "user", "content": prompt}]
        prompt_ids, end = await self.next_prompt(messages, list(goes_on_from))
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
        opened = re.search(rf"({_OPENING})\s*\Z", end)
        if opened:
            turn.content = opened[1] + turn.content
        return turn

    async def break_special_tokens(self, text: str) -> str:
        """The text with a zero-width space inside each special token, which makes it plain text."""
        for special in await self.special_texts(text):
            if special in text:
                # The lookahead finds overlapping ones, too.
                text = re.sub(f"(?s)(?={re.escape(special)}).", "\\g<0>\u200b", text)
        return text

    async def next_prompt(self, messages: list[dict], goes_on_from: Ids) -> tuple[Ids, str]:
        """The prompt for the next reply: the last turn's ids, and what the template adds to them.

        A probe shows what the template adds: a short conversation that ends in the new message.

            goes_on_from <|im_start|> user hi <|im_end|> <|im_start|> assistant hello <|im_end|>
            the probe    ... <|im_start|> assistant b <|im_end|> <|im_start|> user NEW ...

        The probe's tail, behind its reply "b", is the part that is wanted. It begins with the stop
        token, which was sampled and is not repeated. The place where the tail begins is found once,
        by a second probe with another reply: both have the same tail. It is found again if a probe
        begins in another way (a template may show the date).

        The whole history is rendered if there is nothing to go on from (the first turn, or an
        edited history), or if the reply does not end in the template's stop token.

        Returns:
            The ids, shape [n_prompt], and the text of their end (see `render`).
        """
        if not goes_on_from:
            return await self.render(messages)
        start = [{"role": "user", "content": "a"}]
        if self.probes_system and messages[0]["role"] == "system":
            start.insert(0, messages[0])
        new = messages[-1]
        ids, end = await self.render([*start, {"role": "assistant", "content": "b"}, new])
        if self._probe_start is None or ids[: len(self._probe_start)] != self._probe_start:
            other, _ = await self.render([*start, {"role": "assistant", "content": "c"}, new])
            n_tail = 0
            while n_tail < len(other) and ids[-1 - n_tail] == other[-1 - n_tail]:
                n_tail += 1
            self._probe_start = ids[: len(ids) - n_tail]
        tail = ids[len(self._probe_start) :]
        # Two tokens may have been sampled: Inkling's template closes the message, then it stops.
        for n_sampled in (1, 2):
            if goes_on_from[-n_sampled:] == tail[:n_sampled]:
                return goes_on_from + tail[n_sampled:], end
        return await self.render(messages)


def says_context_is_full(error: Exception) -> bool:
    """Whether a prompt was refused for its length; the phrases are those of Harbor's clients.

    Only an error in the request counts: a server that is down may "take too long", too.
    """
    is_user_error = str(getattr(error, "category", "")) == "user"
    is_bad_request = getattr(error, "status_code", None) in (400, 413, 422)
    phrases = "(?i)context length|context_length|maximum context|token limit|too long"
    return (is_user_error or is_bad_request) and bool(re.search(phrases, str(error)))


# All threads share a tokenizer, and it raises "Already borrowed" if two use it at once.
_tokenizing = threading.Lock()


class TinkerClient(ExactClient):
    """Tinker, with the renderer that Harbor's TinkerLLM finds for a model.

    TinkerLLM's own `call` passes a cut-off reply off as complete (Harbor 0.13 to 0.24) or drops its
    ids (0.25), and each TinkerLLM opens a session of its own.
    """

    # No renderer looks at it, and to tokenize it in each turn takes a fifth of a turn's CPU.
    probes_system = False

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

        # Loading takes seconds, so it is done outside the lock; the cookbook keeps what it loads.
        get_tokenizer(model_name)
        with _tokenizing:
            # Harbor has no public name for the renderer. This one is in 0.13 to 0.25.
            self._renderer = TinkerLLM(model_name, renderer_name=renderer_name)._renderer
            self._tokenizer = self._renderer.tokenizer
            # Inkling's tokenizer has no such method, and reads no special token in a text.
            vocabulary = getattr(self._tokenizer, "get_added_vocab", dict)()
            stop = self._renderer.get_stop_sequences()
        self._special_texts = [text for text in vocabulary if len(text.strip()) > 1]
        self.context_limit = context_limit
        self.max_tokens = max_tokens
        self._params = tinker.SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        source = {"model_path": model_path} if model_path else {"base_model": model_name}
        if record_stability_info:
            source["record_stability_info"] = True
        self._open = functools.partial(open_sampling_client, source, api_base, api_key)
        self._sampling_client = self._open()
        self._reopening = asyncio.Lock()

    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        in_parts = [with_thinking_part(message) for message in messages]
        with _tokenizing:
            try:
                prompt = self._renderer.build_generation_prompt(in_parts)
            except ValueError:
                # The renderers llama3 and role_colon know no thinking.
                prompt = self._renderer.build_generation_prompt(messages)
            ids = prompt.to_ints()
            return ids, self._tokenizer.decode(ids[-8:])

    async def special_texts(self, text: str) -> Iterable[str]:
        return self._special_texts

    async def generate(self, prompt_ids: Ids, max_tokens: int, **request: Any) -> Turn:
        import tinker

        # Not validated: pydantic would look at each token of a long prompt in each turn.
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
        # SDK 0.25 and later.
        turn.usage.cache_tokens = getattr(response, "prompt_cache_hit_tokens", None) or 0
        return turn

    async def _sample(self, **request: Any) -> Any:
        # Samples; if the session with Tinker is over, once more in a new one.
        client = self._sampling_client
        try:
            return await sampled(client, request)
        except Exception as error:
            if not session_is_over(error):
                raise
        # The first trial that comes here opens the new session, and the others share it.
        async with self._reopening:
            if self._sampling_client is client:
                self._sampling_client = await asyncio.to_thread(self._open)
        return await sampled(self._sampling_client, request)

    def _text_of(self, ids: Ids) -> str:
        # The reply's text up to its stop token, or up to the stop text of role_colon.
        stop = self._params.stop
        ends = {*stop, self._tokenizer.eos_token_id}
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        try:
            with _tokenizing:
                text = self._tokenizer.decode(ids)
        except Exception:
            # Ids that the tokenizer cannot read are neither an answer nor commands.
            return ""
        if isinstance(stop[0], str):
            text = text.partition(stop[0])[0].removeprefix(" ")
        return text


def with_thinking_part(message: dict) -> dict:
    """A message as tinker-cookbook's renderers want it: thinking is a part of its own."""
    if message["role"] != "assistant":
        return message
    thinking, text = split_thinking(message["content"], prompt_is_known=True)
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
    return {"role": "assistant", "content": parts if thinking else text}


async def sampled(client: Any, request: dict) -> Any:
    """What a Tinker sampling client answers."""
    sampling = client.sample(**request)
    if not inspect.isawaitable(sampling):
        # SDKs before 0.38 give a concurrent.futures.Future.
        sampling = asyncio.wrap_future(sampling)
    return await sampling


# The process's sessions with Tinker, by server and key. A session holds about 11 file descriptors.
_services: dict[tuple, Any] = {}
_opening = threading.Lock()
_given_service: Any = None


def use_service(service: Any) -> None:
    """Have later trials sample in this `tinker.ServiceClient`; None: in a session of our own.

    Sampling and training then share a session, which some losses need: they look at what Tinker
    recorded when it sampled. The service is never closed or replaced.
    """
    global _given_service
    _given_service = service


def check_tinker_key(settings: Mapping[str, str]) -> None:
    """Raise ValueError if the Tinker SDK would find no key."""
    if settings.get("TINKER_API_KEY") or _given_service:
        return
    # SDK 0.38 and later may also have stored a key, or run a command that prints it.
    with suppress(ImportError):
        from tinker.auth import tinker_has_credentials

        if tinker_has_credentials():
            return
    raise ValueError(
        "no API key for Tinker: set TINKER_API_KEY, or model_client=litellm for other models"
    )


def session_is_over(error: Exception) -> bool:
    """Whether Tinker says that a session, or a checkpoint, does not exist (any more).

    SDK 0.38 has no class for the errors of a closed client or of polling: their text must do.
    """
    phrases = r"(?s)is closed$|polling failed.*code: (404|410)"
    has_status = getattr(error, "status_code", None) in (404, 410)
    return has_status or bool(re.search(phrases, str(error)))


def open_sampling_client(source: dict, api_base: str | None, api_key: str | None) -> Any:
    """Open a checkpoint in the process's session, or in a new session if that is over. Blocks.

    Tinker answers alike for a session that is over and for a checkpoint that does not exist. So a
    new session takes the old one's place only if it opens the checkpoint; else it is closed.

    Raises:
        Exception: What the SDK raises.
    """
    import tinker

    def opened_in(service: Any) -> Any:
        created = service.create_sampling_client(**source)
        # SDK 0.38 and later give a future.
        return created.result() if hasattr(created, "result") else created

    server = (api_base, api_key)
    with _opening:
        old = _given_service or _services.get(server)
        if old:
            try:
                return opened_in(old)
            except Exception as error:
                if _given_service or not session_is_over(error):
                    raise
        # Without URL or key the SDK takes them from the environment, or its own.
        new = tinker.ServiceClient(base_url=api_base, api_key=api_key)
        try:
            client = opened_in(new)
        except Exception:
            close_service(new)
            raise
        _services[server] = new
        close_service(old)
        return client


def close_service(service: Any) -> None:
    """Give a session's file descriptors back, without waiting. SDKs before 0.30 cannot."""
    if hasattr(service, "close"):
        service.close("success")


class VllmClient(ExactClient):
    """vLLM by token ids: /tokenize renders, /v1/completions samples (seen on 0.32).

    Arguments that `__init__` does not name go into each request.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_tokens: int,
        api_base: str,
        without_tokenize: Callable[[], Any],
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
        # Makes the client to use if the server has no /tokenize.
        self._without_tokenize = without_tokenize
        # What the chat endpoint would give the template.
        self._body = {**body, **(extra_body or {}), "model": model_name}
        self._template = dict(self._body.get("chat_template_kwargs") or {})
        if "reasoning_effort" in self._body:
            self._template.setdefault("reasoning_effort", self._body["reasoning_effort"])
        self._url = api_base.rstrip("/").removesuffix("/v1")
        self._opening = open_server(
            base_url=self._url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=extra_headers,
            ssl_verify=ssl_verify,
        )

    async def connect(self, logger: logging.Logger) -> Any:
        """Open the connection to the server, and take over its limit of the context.

        Returns:
            The client to use: this one, or one for the chat endpoint if there is no /tokenize.

        Raises:
            openai.OpenAIError: The server does not answer, or refuses the key.
        """
        self._server = await anext(self._opening)
        try:
            answer = await self._tokenize(messages=[{"role": "user", "content": "a"}])
            self.context_limit = min(self.context_limit, int(answer["max_model_len"]))
            if answer["tokens"] and answer["token_strs"]:
                return self
        except (LookupError, TypeError, ValueError):
            # A gateway may answer anything to a path that it does not know.
            pass
        except Exception as error:
            if getattr(error, "status_code", None) not in (400, 404, 405, 422):
                raise
        logger.warning("the server has no /tokenize: prompts are not exact")
        return await asyncio.to_thread(self._without_tokenize)

    async def _tokenize(self, **body: Any) -> dict:
        body |= {"model": self._body["model"], "return_token_strs": True}
        # An outage of some seconds must not end a trial: this is the first request of a turn.
        return await self._post("/tokenize", body, timeout=30, max_retries=5)

    async def _post(self, path: str, body: dict, **options: Any) -> dict:
        try:
            return await self._server.post(path, cast_to=object, body=body, options=options)
        except Exception as error:
            add_url(error, self._url + path)
            raise

    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        answer = await self._tokenize(
            messages=messages, add_generation_prompt=True, chat_template_kwargs=self._template
        )
        # Byte-level tokenizers, and others, show spaces and ends of lines by these characters.
        end = re.sub("Ċ|Ġ|▁|<0x0A>", " ", "".join(answer["token_strs"][-8:]))
        return answer["tokens"], end

    async def special_texts(self, text: str) -> Iterable[str]:
        # A special token has angle brackets, square brackets, or a tilde. Most texts have none.
        has_pair = ("<" in text and ">" in text) or ("[" in text and "]" in text)
        if not (has_pair or "~" in text):
            return []
        answer = await self._tokenize(prompt=text, add_special_tokens=False)
        # Gemma has HTML's tags as tokens; they structure no prompt.
        html = "caption|t(able|head|body|foot|[rdh])|h[1-6]|blockquote|code|strong|em|[biu]|su[bp]"
        # These look special: <|im_end|>, <think>, </s>, [INST], MiniMax' ]~b]; not <?> or [:].
        looks = rf"(?s)(?!</?(?:{html})>)<.*[^\W\d_].*>|\[.*[^\W\d_].*\]|[][]e?~!?b?[][]"
        return [piece for piece in set(answer["token_strs"]) if re.fullmatch(looks, piece)]

    async def generate(self, prompt_ids: Ids, max_tokens: int, **request: Any) -> Turn:
        body = {
            **self._body,
            **(request.get("extra_body") or {}),
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        headers = request.get("extra_headers") or {}
        answer = await self._post("/v1/completions", body, headers=headers)
        # What is left of the reply, such as routed_experts, is kept.
        reply = answer["choices"][0]
        turn = Turn(
            content=reply.pop("text"),
            cut_off=reply.pop("finish_reason") not in COMPLETED_REASONS,
            # An option such as truncate_prompt_tokens may have cut it.
            prompt_token_ids=reply.pop("prompt_token_ids", None) or prompt_ids,
            completion_token_ids=reply.pop("token_ids", None),
            logprobs=(reply.pop("logprobs", None) or {}).get("token_logprobs"),
            extra=reply,
        )
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        turn.usage.cache_tokens = details.get("cached_tokens") or 0
        return turn


async def open_server(*, ssl_verify: bool, **arguments: Any) -> AsyncIterator[Any]:
    """Yields an openai.AsyncOpenAI whose connections are kept, and closes them.

    Python closes an async generator when its event loop ends, or when nothing refers to it: so the
    connections live as long as the client that holds this generator, and no longer.
    """
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http_client = DefaultAsyncHttpxClient(verify=ssl_verify)
    async with AsyncOpenAI(http_client=http_client, **arguments) as server:
        yield server


def add_url(error: Exception, url: str) -> None:
    """Have a server's error say in its traceback which URL was called."""
    # A URL's user name, password and query may hold a key.
    shown = re.sub("//[^/]*@", "//", url.partition("?")[0])
    error.add_note(f"The URL was {shown}.")
    if getattr(error, "status_code", None) == 404:
        error.add_note("Its path, or the name of the model, may be wrong.")


def chat_client(*, context_limit: int | None = None, **arguments: Any) -> Any:
    """Harbor's LiteLLM, except that a reply which was cut off keeps its ids and usage.

    `Conversation` keeps the limit of the context. The private names are in Harbor 0.13 to 0.25.
    """
    # Importing it takes seconds, so the class is defined here.
    from harbor.llms.lite_llm import LiteLLM

    class ChatClient(LiteLLM):
        finish_reason: str | None = None

        async def call(self, prompt: str, **request: Any) -> Turn:
            """One model call. Raises what Harbor's LiteLLM raises after its three attempts."""
            # Trials share this object: the hooks below write into a copy for this call.
            of_this_call = copy.copy(self)
            try:
                response = await LiteLLM.call(of_this_call, prompt, **request)
            except Exception as error:
                if self._api_base:
                    add_url(error, self._api_base)
                raise
            is_whole = str(of_this_call.finish_reason).lower() in COMPLETED_REASONS
            return Turn(**vars(response), cut_off=not is_whole)

        def get_model_output_limit(self) -> int:
            # Harbor sends it to the Responses API, where the model's own maximum limits nothing.
            return self._llm_kwargs["max_tokens"]

        def _extract_usage_info(self, response: Any) -> UsageInfo | None:
            # LiteLLM asks for the usage before it looks at finish_reason. A "length" there would
            # become an error without ids and usage.
            choice = response["choices"][0]
            # litellm turns a word that it does not know into "stop", and keeps it under this name.
            fields = getattr(choice, "provider_specific_fields", None) or {}
            self.finish_reason = fields.get("native_finish_reason") or choice["finish_reason"]
            choice["finish_reason"] = "stop"
            return super()._extract_usage_info(response)

        def _extract_responses_usage_info(self, response: Any) -> UsageInfo | None:
            # The same for the Responses API, which says "completed" of a reply that is whole.
            self.finish_reason = response.status
            response.status = "completed"
            return super()._extract_responses_usage_info(response)

    return ChatClient(**arguments)


# Training data.


@dataclass(frozen=True)
class Trajectory:
    """A scored trial as a trainer sees it.

    Attributes:
        turns: Those of all steps with ids and logprobs, in order; none for API models.
        reward: The reward named "reward", or the only one. None: not scored, or several others.
        stop_reason: The `StopReason` of the last step; None for another agent's trial.
        trial: Harbor's result, with all rewards, tokens, cost and names.
    """

    turns: list[Turn]
    reward: float | None
    stop_reason: str | None
    trial: TrialResult


# Harbor before 0.25 scores on purpose after these; 0.25 has `TrialResult.reward_valid`.
SCORED_EXCEPTIONS = {"AgentTimeoutError", "NonZeroAgentExitCodeError"}


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`.

    Returns:
        None if the trial or one of its steps failed (their `exception_info` says why; Harbor scores
        a failed step all the same), or if there are neither tokens nor a score.

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
    failed = any(error.exception_type not in SCORED_EXCEPTIONS for error in errors)
    if rewards:
        failed = not getattr(trial, "reward_valid", not failed)
    elif errors or not turns:
        failed = True
    if failed or StopReason.ERROR in stop_reasons:
        return None
    reward = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    return Trajectory(turns, reward, stop_reasons[-1], trial)


# Code that was written against the first name still works.
_trial_to_trajectory = trial_to_trajectory

# The lists of a RolloutDetail that have an entry a turn; a `Turn` has the same names.
_LISTS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, whose lists have an entry for each trainable turn.

    A turn that cannot be trained on is left out whole, for a piece of it would misalign all that
    follow. `extra` has a list for each name; a turn without that name has None there.

    Returns:
        A list with the RolloutDetail, or None if no turn is trainable.
    """
    trainable = [turn for turn in turns if turn.is_trainable]
    if not trainable:
        return None
    detail = {name: [getattr(turn, name) or [] for turn in trainable] for name in _LISTS}
    names = {name for turn in trainable for name in turn.extra}
    if names:
        detail["extra"] = {name: [turn.extra.get(name) for turn in trainable] for name in names}
    return [detail]


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The turns of a run. Raises ValueError if their lists do not align or hold no numbers."""
    for detail in context.rollout_details or []:
        extra = detail.get("extra") or {}
        columns = [detail.get(name) or [] for name in _LISTS] + list(extra.values())
        for row in zip(*columns, strict=True):
            turn = Turn(**dict(zip(_LISTS, row, strict=False)))
            turn.extra = dict(zip(extra, row[len(_LISTS) :], strict=True))
            if not turn.is_trainable:
                raise ValueError("ids and logprobs are not aligned, or no numbers")
            yield turn


def to_tinker(trajectory: Trajectory) -> tinker_cookbook.rl.types.Trajectory:  # noqa: F821
    """The trial for tinker-cookbook's RL functions. Imports torch.

    Every transition has reward 0.0: the trial's goes into `TrajectoryGroup.final_rewards_G`. From
    cookbook 0.6 on an action names the sequence that Tinker sampled, for `stable_reinforce`.
    """
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl import types

    transitions = []
    for turn in trajectory.turns:
        is_last = turn is trajectory.turns[-1]
        cut_off = is_last and trajectory.stop_reason == StopReason.MAX_TOKENS
        ending = "length" if cut_off else "stop"
        action = TokensWithLogprobs(turn.completion_token_ids, turn.logprobs, ending)
        # A field of cookbook 0.6.
        action.sequence_id = turn.extra.get("sequence_id")
        prompt = ModelInput.from_ints(turn.prompt_token_ids)
        transitions.append(types.Transition(prompt, action, reward=0.0, episode_done=is_last))
    return types.Trajectory(transitions, ModelInput.empty(), trajectory.stop_reason)


# Files.


def write_file(path: Path, text: str) -> None:
    """Put a file at `path`, whatever lies there. Raises OSError if that cannot be done.

    With Docker the folder is /logs/agent in the container. A command may have put a link, a pipe or
    a folder at this name: nothing there is opened, and a folder is moved aside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nobody can have put a link at this name.
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        fresh.write_text(text, encoding="utf-8")
        if path.is_dir() and not path.is_symlink():
            path.rename(f"{fresh}.aside")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def valid_text(text: str | bytes | None) -> str:
    """Text that tokenizers and files accept: lone surrogates are replaced, None becomes ""."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# The commands: which text is a script, and how it is run.

# CommonMark's fenced blocks and lists. With the rule "code" a fence that is indented like code
# closes no block; without "inline" parsing takes two thirds of the time.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "list", "code"]).disable("inline")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The ``` blocks of a Markdown text, as (language in lower case, content without NULs).

    An unclosed one does not count. What looks like a block inside another one, or inside ~~~, is
    quoted and none either.
    """
    blocks = []
    # Behind the last fence is no block: 80,000 characters of list items take a third of a second.
    until = re.match("(?s)(.*```[^\n]*)?", text.replace("\0", ""))
    # Without a newline a last line of content would count as the block's end.
    for token in _MARKDOWN.parse(f"{until[0]}\n"):
        if token.markup.startswith("`"):
            first, end = token.map
            if end - first == token.content.count("\n") + 2:
                language = token.info.lower().split()[:1]
                blocks.append(("".join(language), token.content))
    return blocks


# Prints each skill's place, and its frontmatter: its name and what it is for.
LIST_SKILLS = """\
cd -- %s || exit
for file in */SKILL.md; do
  [ -f "$file" ] && printf '\\n%%s\\n' "$PWD/$file" || continue
  sed -n '1!{/^---/q;p;}' "$file" | head -c 2000
done
"""

LOST_OUTPUT = "[the output was lost: what runs the script was killed]"
# A script that writes more is ended: Harbor keeps all output of an exec in memory.
FLOOD_BYTES = 4_000_000
# A script's time limit is kept inside the environment. An exec that has no answer this much later
# hangs.
ANSWER_MARGIN_SEC = 30
# At its own limit Docker's exec raises RuntimeError, which would end the trial: it comes last.
EXEC_MARGIN_SEC = 90
# A second exec, which ends a script from outside, may take this long.
ENDING_SEC = 15


def middle_cut(output: bytes, shown_bytes: int) -> str:
    """The head and the tail of long output, with the number of bytes left out between them."""
    n_left_out = len(output) - shown_bytes
    if n_left_out > 0:
        half = shown_bytes // 2
        middle = f"\n[... {n_left_out} bytes left out ...]\n".encode()
        output = output[:half] + middle + output[half + n_left_out :]
    return output.decode("utf-8", "replace")


def shell_command(*call: str) -> str:
    """A command that calls a function of the bash program _SHELL, with these arguments.

    Program and arguments are base64 in a variable: no process has them among its arguments, where
    `pgrep -f` or `pkill -f` of a script would find them.
    """
    program = f"{_SHELL}\n{shlex.join(call)}\nexit\n"
    encoded = base64.b64encode(valid_text(program).encode()).decode()
    # Without a process to decode it the program is empty, and nothing exits before `exit 1`.
    start = 'eval "$(printf %s $BASIC_LOOP_PROGRAM | base64 -d)"; exit 1'
    return f"BASIC_LOOP_PROGRAM={encoded} exec bash -c '{start}'"


# How a script is run. The environment's exec starts a bash, the runner, which calls `run`:
#
#     runner ---- run_script ---- bash, the script
#        '------- read_output: sed | head | base64
#
# The script writes into a pipe (file 4), and the reader turns it into base64, which every
# environment passes on unchanged. The runner waits for a line in a second pipe (file 3), at most
# for the time limit: run_script says "exited CODE" when the script is over, or the reader says
# "closed" when it has had enough bytes. If the script is not over, the runner ends it and all that
# it started. Then it writes the line "end-of-MARK" behind the output. The reader stops there: a
# server in the background may keep the pipe open. The whole output of an exec is
#
#     :MARK:output in base64:MARK:code and note:MARK:
#
# MARK is a random word. Each process of the script has it in its environment, as BASIC_LOOP_SCRIPT,
# and the runner has it as BASIC_LOOP_RUN. No file is written. Seen on bash 4.4 to 5.3.
_SHELL = r"""
exec 2>/dev/null
unset BASIC_LOOP_PROGRAM BASIC_LOOP_RUN

# run MARK SECONDS BYTES BLOCK...: runs the blocks as one script.
run() {
  local mark=$1 seconds=$2 max_bytes=$3 block script event code note parent reader REPLY
  shift 3
  for block; do
    find_unfinished "$block"
    [ -z "$REPLY" ] || break
  done
  printf ":$mark:"
  # File 3 is a pipe for events: this opens both ends of one. File 4 is the script's output.
  exec 3<> <(:)
  wait $!
  exec 4> >(read_output "$mark" "$max_bytes")
  reader=$!
  if [ -n "$REPLY" ]; then
    printf "[nothing was run: a block does not end: %s]\n" "$REPLY" >&4
    event=exited code=2
  else
    # An empty line ends each block: a backslash at its end must not join it to the next one.
    printf -v script "%s\n\n" "$@"
    run_script "$mark" "$script" >&4 &
    parent=$!
    # Without an event in time both variables become empty.
    read -r -t "$seconds" event code <&3
  fi
  if [ "$event" != exited ]; then
    end_processes "BASIC_LOOP_SCRIPT=$mark" "$parent"
    note="ended${REPLY:+, except for processes$REPLY}"
    case $event in
      closed) note="[$note: it wrote more than $max_bytes bytes, or ended what reads them]" ;;
      *) code=124 note="[$note: the time limit of $seconds seconds was reached]" ;;
    esac
  fi
  # The reader may be gone.
  trap "" PIPE
  printf "\nend-of-$mark\n" >&4
  exec 4>&-
  # The runner waits for each of its children: PID 1 of a container may not reap them.
  wait $parent $reader
  printf ":$mark:%s:$mark:" "$code $note"
}

# run_script MARK SCRIPT: runs a script in a bash of its own, and tells its exit code.
run_script() {
  local mark=$1 script=$2
  # bash 5.3 ignores these signals in a background job, and so would the script.
  trap - INT QUIT
  # The script gets its own process group, so that its `kill 0` ends nothing else.
  set -m
  BASIC_LOOP_SCRIPT=$mark BASIC_LOOP_TEXT=$script \
    bash -c 'eval "unset BASIC_LOOP_TEXT; $BASIC_LOOP_TEXT"' </dev/null 2>&1 3>&- 4>&-
  echo "exited $?" >&3
}

# read_output MARK BYTES: prints its input in base64, up to the line end-of-MARK.
read_output() {
  local mark=$1 max_bytes=$2
  # To load a locale costs time, and bytes are no characters.
  export LC_ALL=C
  # sed keeps a line in memory: at most 100 MB.
  { ulimit -v 100000; exec sed "/^end-of-$mark\$/q"; } | head -c "$max_bytes" | base64
  echo "closed 137" >&3
  # A server in the background may still write: it must neither block nor get SIGPIPE. (1: nobody
  # has the pipe open.)
  read -r -t 0.1 -N 1
  if [ $? != 1 ]; then
    cat <&0 >/dev/null 3>&- &
  fi
}

# find_unfinished BLOCK: sets REPLY to what bash says of a block that does not end, or to nothing.
find_unfinished() {
  REPLY=$(LC_ALL=C; eval "set -n; $1" 2>&1)
  # Bash may quote the block, but only behind a backtick.
  case ${REPLY%%\`*} in
    *"unexpected EOF"* | *"unexpected end of file"* | *"delimited by end-of-file"*)
      # A fresh bash counts lines from the block's first one.
      REPLY=$(printf %s "$1" | LC_ALL=C bash -n 2>&1)
      REPLY=${REPLY%%$'\n'*}
      REPLY=${REPLY#*: }
      ;;
    *) REPLY= ;;
  esac
}

# end_processes ENTRY [ROOT]: ends each process with ENTRY in its environment, the process ROOT,
# and all that descends from them. It starts no process, for the script may have left none to start.
# Sets REPLY to the ids of processes that it may not end.
end_processes() {
  local entry=$1 root=$2 path pid environ stat fields is_new
  local -A is_found=()
  local -a found=()
  for _ in {1..100}; do
    is_new=
    for path in /proc/[0-9]*; do
      pid=${path#/proc/} environ=() stat=
      [ -z "${is_found[$pid]}" ] || continue
      mapfile -t -d "" environ <"$path/environ"
      read -r -d "" stat <"$path/stat"
      # The command's name, in parentheses, may hold anything. The state and the parent follow it.
      fields=(${stat##*)})
      if [[ $pid = "$root" || ${environ[*]} = *"$entry"* || ${is_found[${fields[1]:-0}]} ]]; then
        # All are stopped before one is killed: else a shell would start its next command.
        kill -STOP "$pid"
        is_found[$pid]=yes
        is_new=yes
        # Children come before their parents: a stopped one whose parent is gone may get SIGCONT.
        found=("$pid" "${found[@]}")
      fi
    done
    [ -n "$is_new" ] || break
  done
  REPLY=
  for pid in "${found[@]}"; do
    kill -KILL "$pid" || [ ! -e "/proc/$pid" ] || REPLY+=" $pid"
  done
}

# end_run MARK: ends what `run` started, from another shell.
end_run() {
  end_processes "BASIC_LOOP_RUN=$1"
  end_processes "BASIC_LOOP_SCRIPT=$1"
}
"""
