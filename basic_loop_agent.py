"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://...

From top to bottom: the options, the record of a turn, the agent (`_converse` is its loop), the
commands, the conversation, what a trial leaves, the model clients, their cache, training data.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
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
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.llms.chat import Chat
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

try:
    # Harbor 0.23 and later: BaseAgent parses the options, and does so before any trial starts.
    from harbor.agents.options import AgentOptions
except ImportError:
    AgentOptions = BaseModel

__version__ = "0.5.0"

# Options that no client sees: trials that differ only in these share one.
_OF_THE_LOOP = {
    "command_timeout_sec",
    "max_output_chars",
    "max_seconds",
    "max_turns",
    "rerender_history",
    "session_id",
    "system_prompt",
}

# What Tinker takes in `llm_kwargs`: TinkerLLM's other arguments, and one of the sampling client's.
_TINKER_KWARGS = ("context_limit", "record_stability_info", "seed", "top_k", "top_p")


class BasicLoopOptions(
    AgentOptions,
    extra="forbid",
    coerce_numbers_to_str=True,
    hide_input_in_errors=True,
    allow_inf_nan=False,
):
    """What `--ak key=value` accepts: the one place where an option and its default stand.

    Neither an error nor `repr` shows `llm_kwargs`, for it may hold an API key.
    """

    model_path: str | None = Field(
        None,
        pattern="^tinker://",
        description="Tinker checkpoint to sample, tinker://...; default: the base model.",
    )
    renderer_name: str | None = Field(
        None, description="tinker-cookbook renderer; default: the one recommended for the model."
    )
    max_tokens: PositiveInt = Field(
        512, description="Most tokens that one model call may sample, thinking included."
    )
    temperature: NonNegativeFloat | None = Field(
        1.0, description="Sampling temperature; null leaves it to the client."
    )
    max_turns: PositiveInt = Field(
        1, description="Most model calls; above 1, the bash blocks of a reply are run."
    )
    max_seconds: PositiveFloat | None = Field(
        None, description="Seconds after which the loop ends, and the trial is scored."
    )
    system_prompt: str | None = Field(
        None, description="System message, verbatim; default: the protocol if max_turns > 1."
    )
    model_client: Literal["tinker", "litellm"] = Field(
        "tinker", description="Harbor's TinkerLLM, or its LiteLLM for API models and servers."
    )
    api_base: str | None = Field(
        None, description="Base URL of the model's server; default: the client's own."
    )
    llm_kwargs: dict[str, Any] | None = Field(
        None,
        repr=False,
        description="More arguments of the client: top_p, seed, ...",
    )
    collect_rollout_details: bool | None = Field(
        None, description="Record token ids; default: with the Tinker client only."
    )
    rerender_history: bool = Field(
        False, description="Render the history anew each turn, as the template would."
    )
    session_id: str | None = Field(
        None, description="LiteLLM: sent as X-Session-ID, for routers; default: the trial's."
    )
    command_timeout_sec: PositiveInt = Field(
        120, description="Seconds after which a reply's commands are ended."
    )
    max_output_chars: PositiveInt = Field(
        10_000, description="Most command output that the model sees, in bytes."
    )

    @model_validator(mode="after")
    def _fits_the_client(self) -> Self:
        # Refuses what the client cannot do, and fills in the one default that depends on it.
        is_tinker = self.model_client == "tinker"
        given = set(self.llm_kwargs or {})
        # What Harbor 0.25 adds, such as reasoning_effort, older ones take in llm_kwargs.
        own = type(self).model_fields.keys() - AgentOptions.model_fields
        taken = given & {*own, "model_name"}
        unknown = given.difference(_TINKER_KWARGS)
        has_tinker = all(map(importlib.util.find_spec, ("tinker", "tinker_cookbook")))
        wrong = {
            f"llm_kwargs holds {', '.join(taken)}: use the option of that name instead": taken,
            "model_path and renderer_name are for tinker: drop them, or set model_client=tinker": (
                not is_tinker and (self.model_path or self.renderer_name)
            ),
            "the Tinker packages are missing: run `pip install 'harbor[tinker]'`, or set "
            "model_client=litellm": is_tinker and not has_tinker,
            f"llm_kwargs: Tinker takes no {', '.join(unknown)}; it takes "
            f"{', '.join(_TINKER_KWARGS)}": is_tinker and unknown,
            "reasoning_effort is for litellm; for tinker name a renderer": (
                is_tinker and getattr(self, "reasoning_effort", None)
            ),
        }
        for what_to_do, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(what_to_do)
        if self.collect_rollout_details is None:
            self.collect_rollout_details = is_tinker
        return self


class StopReason(StrEnum):
    """Why a run ended, under the names of `tinker_cookbook.rl.types.StopReason` where it has them.

    A single-step trial is scored after all but ERROR and Ctrl-C. In a multi-step task Harbor scores
    a step that ended in ERROR, too: no reward of such a trial is one (see `trial_to_trajectory`).
    """

    # The reply holds no command, or was the one completion asked for.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was cut off, at `max_tokens` or the end of the context; nothing in it was run.
    MAX_TOKENS = "max_tokens"
    # The conversation left no room in the context window for a reply.
    CONTEXT_OVERFLOW = "context_overflow"
    # `max_seconds` have passed; the call or the script that was under way was stopped.
    ROLLOUT_TIMEOUT = "rollout_timeout"
    # From outside: the agent's timeout (which is scored), or Ctrl-C.
    CANCELLED = "cancelled"
    # An exception, which Harbor keeps as the trial's (or the step's) exception_info.
    ERROR = "error"


@dataclass
class Turn(LLMResponse):
    """One model call, exactly as sampled, and what came of it: a trial's record is made of these.

    `content` is the answer, `reasoning_content` the thinking before it. `prompt_token_ids` has
    shape [n_prompt], earlier turns included; `completion_token_ids` and `logprobs` (natural, under
    the policy that sampled) have shape [n_completion], the stop token included; None if not asked
    for, or not given. `extra` is what else the client has of a turn, by name (Tinker: sequence_id).
    A cost of 0.0 dollars means unknown.

    A turn that was read back from a trial's result has ids, logprobs and `extra` only.
    """

    content: str = ""
    # Whether the reply ended for its length.
    cut_off: bool = False
    # Whether the prompt does not begin with the last turn's prompt and completion.
    breaks_prefix: bool = False
    # What the reply asked to run, and what the model was told after it.
    script: str | None = None
    told: list[str] = field(default_factory=list)
    timestamp: str | None = None

    @property
    def is_trainable(self) -> bool:
        """Whether ids and logprobs are there, of one length, and finite (a policy may diverge)."""
        logprobs = self.logprobs or []
        return (
            bool(self.prompt_token_ids)
            and self.completion_token_ids is not None
            and len(self.completion_token_ids) == len(logprobs)
            and None not in logprobs
            and all(map(math.isfinite, logprobs))
        )


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies if asked to, and records it all.

    A trial leaves token counts, cost (None: unknown), `metadata` and one RolloutDetail, whose lists
    have an entry for each `Turn`, on the context; completion.txt, the last reply, and
    trajectory.json, in Harbor's format ATIF, in `logs_dir`.

    Takes the options of `BasicLoopOptions` by keyword, and raises ValueError for a bad one.
    """

    options_model: ClassVar[type[BasicLoopOptions]] = BasicLoopOptions
    with contextlib.suppress(ImportError):
        # Harbor 0.23 and later; base_url and reasoning_effort are new in 0.25.
        from harbor.agents.capabilities import AgentCapabilities

        capabilities = AgentCapabilities(
            **dict.fromkeys(
                {"atif", "resume", "base_url", "reasoning_effort"}
                & AgentCapabilities.model_fields.keys(),
                True,
            )
        )
        # Harbor 0.25: takes --base-url.
        from harbor.agents.agent_auth_resolution import ModelConnectionSpec

        MODEL_CONNECTION = ModelConnectionSpec()

    # The client, from `setup` or the first `sample` on.
    _llm: Any = None

    # What the model is told of the loop; {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with \
```bash: the blocks of a reply run as one script, and its exit code and output are the next \
message. Each script starts in a fresh shell (files stay, variables and directory do not) and has \
{seconds} seconds. When the task is done, reply without such a block."""

    def __init__(
        self,
        *,
        model_name: str | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_name=model_name, **kwargs)
        # What `--ae KEY=value` gives comes before the process's environment.
        self._settings = ChainMap(kwargs.get("extra_env") or {}, os.environ)
        if AgentOptions is BaseModel:
            # Harbor 0.13 to 0.22 swallows unknown arguments: here each trial parses the options.
            of_harbor = inspect.signature(BaseAgent.__init__).parameters.keys()
            own = kwargs.keys() - of_harbor - {"extra_env", "override_setup_timeout_sec"}
            self.options = self.options_model(**{name: kwargs[name] for name in own})

    @classmethod
    def preflight(
        cls,
        kwargs: dict | None = None,
        env: Any = None,
    ) -> None:
        """Called by Harbor 0.23 and later, before any trial, when no model is known yet."""
        if cls.parse_options(kwargs, env).model_client == "tinker":
            check_tinker_key(ChainMap(env or {}, os.environ))

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    async def setup(
        self,
        environment: BaseEnvironment,
    ) -> None:
        """Build the model client, outside the agent's own time: importing torch takes seconds.

        Raises ValueError for a model that cannot be called, and what the client raises.
        """
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        if self.options.model_client == "tinker":
            apis = r"(anthropic|gemini|hosted_vllm|openai|openrouter)/(?!.*gpt-oss)"
            if re.match(apis, self.model_name):
                raise ValueError(f"{self.model_name} is an API model: set model_client=litellm")
            check_tinker_key(self._settings)
        await self._shared_llm()

    async def run(
        self,
        instruction: str,
        environment: BaseEnvironment,
        context: AgentContext,
    ) -> None:
        """Solve a task in a new conversation."""
        self._conversation = Conversation(self)
        await self.resume(instruction, environment, context)

    async def resume(
        self,
        instruction: str,
        environment: BaseEnvironment,
        context: AgentContext,
    ) -> None:
        """Go on with the conversation that `run` began. Only this call's turns are recorded.

        They are on the context and in the files before anything is raised.
        """
        conversation = self._conversation
        conversation.begin(instruction)
        try:
            async with asyncio.timeout(self.options.max_seconds) as limit:
                stop_reason = await self._converse(conversation, environment)
        except BaseException as error:
            # A client may raise another error for the TimeoutError; CancelledError is no Exception.
            is_error = isinstance(error, Exception)
            if is_error and limit.expired():
                stop_reason = StopReason.ROLLOUT_TIMEOUT
            else:
                stop_reason = StopReason.ERROR if is_error else StopReason.CANCELLED
                with contextlib.suppress(Exception):
                    self._record(conversation, stop_reason, context)
                raise
        self._record(conversation, stop_reason, context)

    async def _converse(
        self,
        conversation: "Conversation",
        environment: BaseEnvironment,
    ) -> StopReason:
        """The loop. The conversation records what the model says, and what `tell` tells it.

        To have the model forget, edit `conversation.messages` in place (for the Responses API call
        `conversation.reset_response_chain()` too). What the model was not yet told is not in it,
        but comes with the next `sample`. What else is to be kept goes into `conversation.metadata`.
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
            if self.options.max_turns == 1:
                return StopReason.COMPLETED
            turn.script = self.script_in(turn.content)
            if turn.script is None:
                return StopReason.COMPLETED

            # Act, and observe.
            conversation.tell(await self._execute(turn.script, environment))
        return StopReason.MAX_TURNS

    def script_in(
        self,
        reply: str,
    ) -> str | None:
        """The bash script that a reply asks to run; None if it asks for nothing."""
        scripts = [block for language, block in fenced_blocks(reply) if language in ("bash", "sh")]
        return "\n".join(scripts) if scripts else None

    async def _execute(
        self,
        script: str,
        environment: BaseEnvironment,
    ) -> str:
        """Run a script in the environment, never on the host. Returns what the model is told."""
        limit = self.options.command_timeout_sec
        most = self.options.max_output_chars
        mark = uuid4().hex
        # No argument can hold a NUL.
        script = valid_text(script).replace("\0", "")
        command = f"BASIC_LOOP_RUN={mark} " + in_bash(mark, str(most), script)
        # Modal takes 65,536 bytes of arguments, and some environments quote the command once more.
        if len(shlex.quote(command).encode()) > 65_000:
            return "Not run: the script is too long. Split it into smaller ones."
        # Past its own limit Docker's exec raises RuntimeError: ours comes first.
        running = asyncio.ensure_future(environment.exec(command, timeout_sec=limit + 60))
        try:
            _, late = await asyncio.wait([running], timeout=limit)
            if late:
                # What runs the script goes on, and hands over the output so far.
                await end_processes(environment, "BASIC_LOOP_SCRIPT", mark)
                await asyncio.wait([running], timeout=10)
        finally:
            # Cancelled, or it hangs: it would run on, into the next turn or the tests.
            if not running.done():
                running.cancel()
                await asyncio.shield(end_processes(environment, "BASIC_LOOP_RUN", mark))
        try:
            result = running.result()
        except (Exception, asyncio.CancelledError) as error:
            # Some environments fail when what they wait for is ended, or by themselves.
            if not late and not isinstance(error, TimeoutError | asyncio.CancelledError):
                raise
            return f"Exit code: 124\nOutput:\n[no answer; the time limit is {limit} seconds]"
        note = f"[ended: the time limit of {limit} seconds was reached]" if late else ""
        # A script can write into its parent's output, which _RUN does not cut.
        texts = [output_of(result.stdout, mark), valid_text(result.stderr), note]
        shown = "\n".join(text[: most + 200].removesuffix("\n") for text in texts if text)
        return f"Exit code: {124 if late else result.return_code}\nOutput:\n{shown or '(none)'}"

    def _record(
        self,
        conversation: "Conversation",
        stop_reason: StopReason,
        context: AgentContext,
    ) -> None:
        """Put the run onto the context, then into the files. Raises OSError of these."""
        turns = conversation.turns
        usages = [turn.usage for turn in turns if turn.usage]
        if usages:
            context.n_input_tokens = sum(usage.prompt_tokens for usage in usages)
            context.n_output_tokens = sum(usage.completion_tokens for usage in usages)
            context.n_cache_tokens = sum(usage.cache_tokens for usage in usages)
            # The price of some turns is not the run's.
            costs = [usage.cost_usd for usage in usages if usage.cost_usd]
            context.cost_usd = sum(costs) if len(costs) == len(turns) else None
        # Whatever was put there: what JSON cannot hold would cost the whole job its results.
        kept = json.dumps(
            conversation.metadata,
            default=str,
            ensure_ascii=False,
        )
        context.metadata = {
            **json.loads(valid_text(kept)),
            "stop_reason": str(stop_reason),
            "n_episodes": len(turns),
        }
        if self.options.collect_rollout_details:
            context.rollout_details = rollout_details(turns)
            n_breaks = sum(turn.breaks_prefix for turn in turns)
            context.metadata |= {
                "n_turns_without_ids": sum(not turn.is_trainable for turn in turns),
                "n_prefix_breaks": n_breaks,
            }
            if n_breaks:
                self.logger.info("%d prompts do not begin with the turn before", n_breaks)
        room = getattr(self._llm, "context_limit", math.inf)
        if any(usage.prompt_tokens + self.options.max_tokens > room for usage in usages):
            self.logger.warning(
                "max_tokens=%d was cut to the room in the context, which holds %d tokens",
                self.options.max_tokens,
                room,
            )
        # Without a reply it is empty: an earlier step's, in the same folder, must not be scored.
        write_file(self.logs_dir / "completion.txt", turns[-1].content if turns else "")
        trajectory = atif.Trajectory(
            session_id=conversation.session_id or uuid4().hex,
            agent={
                "name": self.name(),
                "version": __version__,
                "model_name": self.model_name,
            },
            steps=to_steps(conversation),
            final_metrics={
                "total_prompt_tokens": context.n_input_tokens,
                "total_completion_tokens": context.n_output_tokens,
                "total_cached_tokens": context.n_cache_tokens,
                "total_cost_usd": context.cost_usd,
            },
            extra=context.metadata,
        )
        view = trajectory.model_dump_json(exclude_none=True)
        write_file(self.logs_dir / "trajectory.json", view)

    def _build_llm(self) -> Any:
        """A new client of this configuration, which any number of conversations call.

        Return any of Harbor's `BaseLLM` here (with model_client=litellm, for tinker wants a key).
        Runs in a thread: importing litellm or torch takes seconds.
        """
        # A copy, for Harbor's LiteLLM writes into what it is given.
        options = self.options.model_copy(deep=True)
        if options.model_client == "litellm":
            from harbor.llms.lite_llm import LiteLLM
            from litellm import get_llm_provider

            class Client(LiteLLMMixin, LiteLLM):
                """Harbor's client for API models."""

            provider, has_provider, _ = self.model_name.partition("/")
            if not has_provider:
                # The client's own arguments may say what this cannot find.
                with contextlib.suppress(Exception):
                    provider = get_llm_provider(self.model_name)[1]
        else:
            from harbor.llms.tinker import TinkerLLM

            class Client(TinkerMixin, TinkerLLM):
                """Harbor's client for Tinker."""

            provider = "tinker"
            self.logger.info("Sampling %s", options.model_path or f"base model {self.model_name}")
        prefix = provider.upper()
        arguments = {
            "api_key": self._settings.get(f"{prefix}_API_KEY"),
            # An option of Harbor 0.25; before, it is in llm_kwargs.
            "reasoning_effort": getattr(options, "reasoning_effort", None),
            **(options.llm_kwargs or {}),
            "model_name": self.model_name,
            "model_path": options.model_path,
            "renderer_name": options.renderer_name,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "collect_rollout_details": options.collect_rollout_details,
            "api_base": options.api_base
            or getattr(options, "base_url", None)
            or self._settings.get(f"{prefix}_BASE_URL")
            or self._settings.get(f"{prefix}_API_BASE"),
        }
        return Client(**without_none(arguments))

    @functools.cached_property
    def _client_key(self) -> tuple:
        # All that makes two clients different: what a subclass adds may be the client's, too.
        options = self.options.model_dump(exclude=_OF_THE_LOOP)
        server = {n: x for n, x in self._settings.items() if n.endswith(("_KEY", "_URL", "_BASE"))}
        return (type(self), self.model_name, repr(options), repr(server), _given_service)

    async def _shared_llm(self) -> Any:
        """The client that all trials of this event loop and configuration share.

        One trial builds it (the next, if that fails).
        """
        key = self._client_key
        empty = (WeakValueDictionary(), WeakValueDictionary(), deque(maxlen=8))
        clients, locks, latest = _caches.setdefault(asyncio.get_running_loop(), empty)
        async with locks.setdefault(key, asyncio.Lock()):
            client = clients.get(key)
            if client is None:
                client = await in_thread(self._build_llm)
                clients[key] = client
        if client in latest:
            latest.remove(client)
        latest.append(client)
        # The cache is weak: this keeps it between `setup` and `run`.
        self._llm = client
        return client


# Harbor 0.20 to 0.22 looks for this; inside the class later ones would warn.
BasicLoopAgent.SUPPORTS_RESUME = True

# The options' defaults stand in one place only; `help` shows them in the constructor.
*_named, _kwargs = inspect.signature(BasicLoopAgent.__init__).parameters.values()
_options = inspect.signature(BasicLoopOptions).parameters.values()
BasicLoopAgent.__init__.__signature__ = inspect.Signature([*_named, *_options, _kwargs])


# The commands: which text is a script, and how it is run.

# A line that opens or closes a block: "```bash", "   ```", "- ```sh", "10) ~~~".
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<mark>`{3,}|~{3,})(?P<info>[^`\n]*)\n?",
    re.MULTILINE,
)


def fences(text: str) -> Iterator[tuple[re.Match, re.Match]]:
    """The lines that open and close each fenced block of a Markdown text, by Markdown's rules."""
    opening = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        # One that is indented further, in a docstring say, is content.
        elif (
            fence["mark"].startswith(opening["mark"])
            and not (fence["indent"] + fence["info"]).strip()
            and len(fence["indent"]) <= max(3, len(opening["indent"]))
        ):
            yield opening, fence
            opening = None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The ``` blocks of a Markdown text, as (language, content); an unclosed one does not count.

    What looks like a block inside another one, or inside ~~~, is quoted and none either.
    """
    text = text.replace("\r\n", "\n")
    blocks = []
    for opening, closing in fences(text):
        if opening["mark"].startswith("`"):
            # An indented block loses that much of each line's indent.
            indent = rf"(?m)^[ \t]{{0,{len(opening['indent'])}}}"
            content = re.sub(indent, "", text[opening.end() : closing.start()])
            blocks.append((opening["info"].strip().partition(" ")[0], content))
    return blocks


# With the arguments MARK BYTES SCRIPT this text runs a script inside the environment. It prints the
# output in base64, which any environment can decode, between two marks, and what is said of it
# behind them, so that `output_of` can tell it from what others print. Of a script that floods:
#
#     :3f2a:eQp5CnkKeQp5CnkKeQpb(...):3f2a:[ended: it wrote more than 4000000 bytes]
#
# `tee` writes the output to a file, of which BYTES are returned, and `head` counts: past `most` the
# script is ended. A process left in the background keeps their pipe, and `cat` reads on for it; so
# a line behind the script's last one, end-of-MARK, shows that all before it is in the file.
#
# With the arguments VARIABLE MARK it ends a script. What the script started has the mark in its
# environment, as BASIC_LOOP_SCRIPT, also what left its process group; what runs it too has
# BASIC_LOOP_RUN.
_RUN = r"""
exec 2>/dev/null
end_processes() {
  for _ in 1 2 3; do
    pids=$(grep -ls "$1=$2" /proc/[0-9]*/environ | cut -d/ -f3)
    [ -n "$pids" ] || break
    # All stand first: else a shell would go on to its next command when the last one is killed.
    kill -STOP $pids
    kill -9 $pids
  done
}
if [ $# = 2 ]; then
  end_processes $1 $2
  [ $1 = BASIC_LOOP_SCRIPT ] || rm -f /dev/shm/basic-loop-$2* /tmp/basic-loop-$2*
  exit
fi
mark=$1 shown=$2 script=$3 most=4000000 end=end-of-$mark why=
printf ':%s:' $mark
case $(LC_ALL=C bash -n -c -- "$script" 2>&1) in
  *"warning: here-document at line "*" delimited by end-of-file"*)
    printf ':%s:%s' $mark "[not run: a here-document is not closed]"
    exit 2
esac
# The first folder with room: Docker gives /dev/shm 64 MB, and programs fill it.
for file in /tmp/basic-loop-$mark /dev/shm/basic-loop-$mark; do
  head -c $most /dev/zero >$file && break
  rm -f $file
done
: >$file
exec 3> >(
  exec >/dev/null
  tee $file | head -c $most
  # Not when the script had ended before, and a process in the background wrote the rest.
  if [ $(wc -c <$file) -ge $most ] && ! grep -qs $end $file; then
    : >$file.full
    end_processes BASIC_LOOP_SCRIPT $mark
  fi
  exec cat
)
BASIC_LOOP_SCRIPT=$mark bash -c -- "$script" </dev/null >&3 2>&1 3>&-
code=$?
printf '%s\n' $end >&3
exec 3>&-
why="[some of the output was lost: there was no room for it, or its file was removed]"
for _ in {1..200}; do
  if [ -e $file.full ]; then why="[ended: it wrote more than $most bytes]"; break; fi
  grep -qs $end $file
  # 0: it is there; 1: not yet; 2: the file was taken away.
  case $? in 0) why=; break;; 2) break; esac
  sleep 0.02
done
size=$(wc -c <$file || echo 0)
# The head, and the tail with the line that shows the end.
half=$((shown / 2)) rest=$((shown - shown / 2 + ${#end} + 1))
if [ $size -le $((half + rest)) ]; then cat $file; else
  head -c $half $file
  printf '\n[... %d bytes left out ...]\n' $((size - half - rest))
  tail -c $rest $file
fi | base64
rm -f $file $file.full
printf ':%s:%s' $mark "$why"
exit $code
"""


def in_bash(*arguments: str) -> str:
    return shlex.join(["bash", "-c", _RUN, "basic-loop", *arguments])


async def end_processes(
    environment: BaseEnvironment,
    variable: str,
    mark: str,
) -> None:
    """End all that has the mark in this variable of its environment; gives up after 10 seconds."""
    # The environment may be gone, and the trial goes on, or ends, for its own reason.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(environment.exec(in_bash(variable, mark), timeout_sec=15), 10)


def output_of(
    stdout: str | bytes | None,
    mark: str,
) -> str:
    """A script's output and what _RUN says of it; where _RUN did not run, all of `stdout`."""
    before, *parts = valid_text(stdout).split(f":{mark}:")
    if not parts:
        return before
    try:
        in_base64, note = parts
        output = base64.b64decode(in_base64).partition(f"end-of-{mark}".encode())[0]
    except ValueError:
        return "[the output was lost: what runs the script was killed or written into]"
    texts = (valid_text(output).removesuffix("\n"), note)
    return "\n".join(text for text in texts if text)


def valid_text(text: str | bytes | None) -> str:
    """Text that tokenizers and files accept: lone surrogates are replaced, None becomes ""."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# The conversation: Harbor's Chat, with a record of its turns.


class Conversation(Chat):
    """Harbor's Chat for one trial, and its record. (Clients serve many trials at once.)"""

    def __init__(
        self,
        agent: BasicLoopAgent,
    ) -> None:
        super().__init__(model=None)
        self.agent = agent
        options = agent.options
        # Harbor 0.13 gives a trial no id.
        self.session_id = options.session_id or getattr(agent, "session_id", None)
        self.system = valid_text(options.system_prompt)
        if options.system_prompt is None and options.max_turns > 1:
            self.system = agent.protocol.replace("{seconds}", str(options.command_timeout_sec))
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        # What the model was not yet told, and whether special tokens in it are to stay text.
        self._unsent: list[tuple[str, bool]] = []
        # The last turn's prompt and completion, and a copy of the messages after it.
        self._last_ids: list[int] = []
        self._as_recorded: list[dict] = []

    def begin(
        self,
        instruction: str,
    ) -> None:
        """Start a run: after what it was not yet told, the model is told this."""
        self.instruction = valid_text(instruction)
        self.turns: list[Turn] = []
        # What else is to be kept of the run.
        self.metadata = {}
        self._unsent.append((self.instruction, False))

    def tell(
        self,
        text: str,
    ) -> None:
        """Have the model told this next; where prompts are exact, special tokens stay text."""
        text = valid_text(text)
        self._unsent.append((text, True))
        if self.turns:
            self.turns[-1].told.append(text)
        else:
            self.instruction += f"\n\n{text}"

    async def sample(self) -> Turn:
        """Send what was not yet sent, and record the reply.

        Raises what the client raises, and RuntimeError where ids were asked for and none came.
        """
        # It may be any of Harbor's clients; Chat has no public name for it.
        self._model = await self.agent._shared_llm()
        is_own = isinstance(self._model, ExactPrompts)
        texts = []
        for text, is_literal in self._unsent:
            texts.append(await self._model.defused(text) if is_own and is_literal else text)
        prompt = "\n\n".join(texts)
        # An edited history is rendered anew.
        rerender = self.agent.options.rerender_history or self.messages != self._as_recorded
        goes_on_from = [] if rerender else self._last_ids
        own = {"goes_on_from": goes_on_from, "session_id": self.session_id} if is_own else {}
        try:
            reply = await self.chat(prompt, **own)
        except OutputLengthExceededError as cut:
            # The text is all there is.
            self.messages.extend([user(prompt), {"role": "assistant", "content": ""}])
            reply = Turn(content=cut.truncated_response or "", cut_off=True)
        return self._append(reply)

    def _append(
        self,
        reply: LLMResponse,
    ) -> Turn:
        # Complete a reply's turn and append it: the only place that does.
        turn = reply if isinstance(reply, Turn) else Turn(**vars(reply))
        if isinstance(turn.content, list):
            # From Harbor's own TinkerLLM (to 0.24), if `_build_llm` returns that.
            thinking = "".join(part.get("thinking", "") for part in turn.content)
            answer = "".join(part.get("text", "") for part in turn.content)
            turn.content = f"<think>{thinking}</think>{answer}" if thinking else answer
        turn.content = valid_text(turn.content)
        # A lone surrogate would fail the next call.
        self.messages[-1]["content"] = turn.content
        if not turn.reasoning_content:
            turn.reasoning_content, turn.content = split_thinking(turn.content)
        turn.timestamp = datetime.now(UTC).isoformat()
        self.turns.append(turn)
        self._unsent.clear()
        # What has no stop token cannot be gone on from: then it counts as edited.
        self._as_recorded = [] if turn.cut_off else [dict(message) for message in self.messages]
        if turn.prompt_token_ids:
            turn.breaks_prefix = turn.prompt_token_ids[: len(self._last_ids)] != self._last_ids
            self._last_ids = turn.prompt_token_ids + (turn.completion_token_ids or [])
        if not self.agent.options.collect_rollout_details:
            turn.prompt_token_ids = turn.completion_token_ids = turn.logprobs = turn.extra = None
        elif (
            self.agent.options.model_client == "litellm"
            and len(self.turns) == 1
            and None in (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        ):
            raise RuntimeError(
                "collect_rollout_details=true, but the server returned no token ids with logprobs"
            )
        return turn


def without_none(arguments: dict) -> dict:
    """What is None is left out, so that the default of what is called holds."""
    return {name: value for name, value in arguments.items() if value is not None}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


# What the replies of gpt-oss and of Inkling begin with.
_HEADERS = ("<|channel|>", "<|start|>", "<|message_model|>")


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking and the answer of a reply as it was sampled, without its stop token.

    What a <think> at its start opens is thinking, to the reply's end where it is never closed.
    Without one the prompt may have opened it: then the first </think> at a line's start, or outside
    fenced blocks, closes it. Any other tag is text.
    """
    if text.lstrip().startswith(_HEADERS):
        return _split_messages(text)
    opened = re.match(r"(?s)(\s*<think>.*?(</think>|\Z))+", text)
    if opened:
        thinking = re.sub(r"\s*<think>|</think>", "", opened[0])
        return thinking, text[opened.end() :].lstrip()
    before = text.partition("<think>")[0]
    blocks = deque(fences(before))
    for tag in re.finditer(r"(?m)(?P<at_line_start>^[ \t]*)?</think>", before):
        while blocks and blocks[0][1].start() < tag.start():
            blocks.popleft()
        is_quoted = blocks and blocks[0][0].end() <= tag.start()
        if tag["at_line_start"] is not None or not is_quoted:
            return text[: tag.end()].removesuffix("</think>"), text[tag.end() :].lstrip()
    return "", text


def _split_messages(text: str) -> tuple[str, str]:
    """The same, where a reply is a sequence of messages with headers.

    One that was cut off in its header does not count, nor does a call of a tool ("to=").

    gpt-oss: <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
    Inkling: <|message_model|><|content_thinking|>hm<|end_message|><|message_model|>
    <|content_text|>hi<|end_message|>
    """
    thinking = answer = ""
    for message in re.split(r"<\|(?:end|call|return|end_message)\|>", text):
        *header, body = re.split(r"(<\|(?:message|content_\w+)\|>)", message, maxsplit=1)
        kind = "".join(header)
        if re.search("analysis|content_thinking", kind):
            thinking += body
        elif "to=" not in kind and re.search("final|commentary|content_text", kind):
            answer += body
    return thinking, answer


# What a trial leaves, derived from its turns.

# The lists of a RolloutDetail, each with an entry a turn, are named as a turn's own.
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, an entry per turn in each list; None without any ids.

    Turns that cannot be trained on are left out whole: Chat.rollout_details drops pieces of them,
    which misaligns all that follow. Where a turn's `extra` lacks a name, its entry is None.
    """
    kept = [turn for turn in turns if turn.is_trainable]
    if not kept:
        return None
    detail = {name: [getattr(turn, name) or [] for turn in kept] for name in _IDS}
    extras = [turn.extra or {} for turn in kept]
    names = {name for extra in extras for name in extra}
    if names:
        detail["extra"] = {name: [extra.get(name) for extra in extras] for name in names}
    return [detail]


def to_steps(conversation: Conversation) -> list[dict]:
    """The run as steps of ATIF (harbor.models.trajectories), which `harbor view` shows."""
    steps = [{"source": "user", "message": conversation.instruction}]
    if conversation.system:
        steps.insert(0, {"source": "system", "message": conversation.system})
    is_single = len(conversation.turns) == 1
    for turn in conversation.turns:
        usage = vars(turn.usage) if turn.usage else {}
        metrics = {
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "cached_tokens": usage.get("cache_tokens"),
            "cost_usd": usage.get("cost_usd") or None,
            # In a conversation the prompts would let the file grow with the square of the turns.
            "prompt_token_ids": turn.prompt_token_ids if is_single else None,
            "completion_token_ids": turn.completion_token_ids,
            # JSON has no NaN.
            "logprobs": turn.logprobs if turn.is_trainable else None,
        }
        step = {
            "source": "agent",
            "message": turn.content,
            "reasoning_content": turn.reasoning_content or None,
            "timestamp": turn.timestamp,
            "metrics": metrics,
        }
        steps.append(step)
        told = "\n\n".join(turn.told)
        if told and turn.script:
            step["observation"] = {"results": [{"content": told}]}
        elif told:
            steps.append({"source": "user", "message": told})
    return [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]


def write_file(
    path: Path,
    text: str,
) -> None:
    """Put a file at `path`, whatever lies there. Raises OSError if that cannot be done.

    With Docker the folder is the container's /logs/agent, where a command may have put a link, a
    pipe or a folder of this name: nothing there is opened, and a folder is moved aside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        # "x" is O_EXCL, which follows no link.
        with fresh.open("x", encoding="utf-8") as file:
            file.write(text)
        if path.is_dir() and not path.is_symlink():
            path.rename(f"{fresh}.aside")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


# The model clients: Harbor's own, for whole replies and exact prompts.

# Two conversations that differ in the reply alone: their ids differ last where its text ends.
_PROBE = [user("a"), {"role": "assistant", "content": "b"}]
_OTHER_PROBE = [user("a"), {"role": "assistant", "content": "c"}]


class ExactPrompts:
    """Prompts that begin with the tokens of the turn before, as they were sampled.

    A client adds `render` (messages to the ids of the template's view of them), `sample` (a
    prompt's ids to a Turn) and `special_texts` (those in a text that become one token each).
    """

    # How many tokens the model holds, and whether its template ends a prompt with <think>.
    context_limit: float = math.inf
    opens_thinking: bool = False
    # Whether the system message may decide how the template ends a prompt.
    reads_system: bool = False

    def __init__(
        self,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # The tokens of `_PROBE` up to the end of the reply's text, by system message.
        self._starts: dict[str, list[int]] = {}

    async def call_exactly(
        self,
        prompt: str,
        message_history: list[dict],
        goes_on_from: list[int],
        **request: Any,
    ) -> Turn:
        """Sample a reply to these messages; of the history `goes_on_from` has the ids, or nothing.

        Raises ContextLengthExceededError when the context has no room for a reply, and what the
        client raises.
        """
        prompt_ids = await self.next_prompt([*message_history, user(prompt)], goes_on_from)
        # Kept now: another conversation may change it while this one samples.
        opens_thinking = self.opens_thinking
        room = self.context_limit - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceededError(f"the prompt fills the context: {len(prompt_ids)}")
        turn = await self.sample(prompt_ids, min(self.get_model_output_limit(), room), **request)
        if opens_thinking:
            turn.content = f"<think>{turn.content}"
        return turn

    async def defused(
        self,
        text: str,
    ) -> str:
        """Text without special tokens: a zero-width space breaks each of them up."""
        for special in await self.special_texts(text):
            # Also where two of them overlap.
            if special in text:
                text = re.sub(f"(?s)(?={re.escape(special)}).", "\\g<0>\u200b", text)
        return text

    async def next_prompt(
        self,
        messages: list[dict],
        goes_on_from: list[int],
    ) -> list[int]:
        """The ids of the last turn as sampled, and what the template puts behind a reply.

            goes_on_from <|im_start|> user hi <|im_end|> <|im_start|> assistant hello <|im_end|>
            probe        ... <|im_start|> assistant b <|im_end|> <|im_start|> user NEW ...
            start        ... <|im_start|> assistant b

        What is behind `start` begins with the stop token, which is not repeated. All is rendered
        from the messages where that cannot be trusted: in the first turn, after an edit of the
        history, and after a reply that has no stop token or another than the template's.
        """
        if goes_on_from:
            has_system = self.reads_system and messages[0]["role"] == "system"
            system = messages[:1] if has_system else []
            key = str(system)
            if key not in self._starts:
                one = await self.render([*system, *_PROBE, user("d")])
                other = await self.render([*system, *_OTHER_PROBE, user("d")])
                pairs = enumerate(zip(one, other, strict=False), start=1)
                ends = [end for end, pair in pairs if pair[0] != pair[1]]
                self._starts[key] = one[: ends[-1]] if ends else []
            start = self._starts[key]
            probe = await self.render([*system, *_PROBE, messages[-1]])
            tail = probe[len(start) :]
            if probe[: len(start)] != start:
                # The template has changed its mind, as one does at midnight that shows the date.
                self._starts.pop(key, None)
                tail = []
            # Inkling's template closes the message before it stops.
            for n in (1, 2):
                if goes_on_from[-n:] == tail[:n]:
                    return goes_on_from + tail[n:]
        return await self.render(messages)


# A tokenizer is shared by all threads, and raises "Already borrowed" when two use it at once.
_tokenizing = threading.Lock()


class TinkerMixin(ExactPrompts):
    """What this file adds to Harbor's TinkerLLM: one session, exact prompts, whole replies.

    TinkerLLM's own `call` passes a cut-off reply off as complete (Harbor 0.13 to 0.24) or drops its
    ids (0.25). Its private attributes are the same in all these versions.
    """

    def __init__(
        self,
        *,
        api_base: str | None = None,
        api_key: str | None = None,
        record_stability_info: bool | None = None,
        **kwargs: Any,
    ) -> None:
        from harbor.llms.tinker import get_tokenizer
        from tinker_cookbook import renderers

        # The cookbook has no list of them (0.5.7 to 0.6.1).
        names = re.findall(r'name == "(\w+)"', inspect.getsource(renderers.get_renderer))
        name = kwargs.get("renderer_name")
        if name and name not in names and not renderers.is_renderer_registered(name):
            raise ValueError(f"no renderer {name}; there are {', '.join(sorted(names))}")
        # Outside the lock, for it takes seconds; the cookbook keeps what it has loaded.
        get_tokenizer(kwargs["model_name"])
        with _tokenizing:
            super().__init__(**kwargs)
            self._stop = self._renderer.get_stop_sequences()
            prompt = self._renderer.build_generation_prompt([user("a")]).to_ints()
            end = self._renderer.tokenizer.decode(prompt[-4:])
            # The tokenizer of the Inkling models has no list of its special texts, and needs none.
            special = getattr(self._renderer.tokenizer, "get_added_vocab", dict)()
        self._special_texts = [text for text in special if len(text.strip()) > 1]
        self.opens_thinking = end.rstrip().endswith("<think>")
        self.context_limit = self.get_model_context_limit()
        source = {
            "model_path": self._model_path,
            "base_model": None if self._model_path else self._model_name,
            "record_stability_info": record_stability_info or None,
        }
        server = without_none({"base_url": api_base, "api_key": api_key})
        self._open = functools.partial(open_sampling_client, server, without_none(source))
        self._sampling_client = self._open()
        # No lock of asyncio's: it would keep its event loop, and so the cache.
        self._reopening = threading.Lock()

    call = ExactPrompts.call_exactly

    async def render(
        self,
        messages: list[dict],
    ) -> list[int]:
        in_parts = []
        for message in messages:
            if message["role"] == "assistant":
                thinking, answer = split_thinking(message["content"])
                parts = [
                    {"type": "thinking", "thinking": thinking},
                    {"type": "text", "text": answer},
                ]
                message = {"role": "assistant", "content": parts if thinking else answer}
            in_parts.append(message)
        build = self._renderer.build_generation_prompt
        with _tokenizing:
            try:
                return build(in_parts).to_ints()
            except ValueError:
                # llama3 and role_colon know of no thinking.
                return build(messages).to_ints()

    async def special_texts(
        self,
        text: str,
    ) -> Iterable[str]:
        return self._special_texts

    async def sample(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        **request: Any,
    ) -> Turn:
        import tinker

        params = tinker.SamplingParams(
            max_tokens=max_tokens,
            temperature=self._temperature,
            stop=self._stop,
            seed=self._seed,
            top_k=self._top_k,
            top_p=self._top_p,
        )
        # Unchecked, for pydantic would look at each token of a long prompt in each turn.
        chunk = tinker.EncodedTextChunk.model_construct(tokens=prompt_ids)
        prompt = tinker.ModelInput(chunks=[chunk])
        for attempt in (1, 2):
            client = self._sampling_client
            try:
                sampling = client.sample(
                    prompt=prompt,
                    num_samples=1,
                    sampling_params=params,
                )
                # A future before SDK 0.38, awaitable from then on.
                if not inspect.isawaitable(sampling):
                    sampling = asyncio.wrap_future(sampling)
                response = await sampling
                break
            except Exception as error:
                if says_context_is_full(error):
                    raise ContextLengthExceededError(str(error)) from error
                if attempt == 2 or not is_gone(error):
                    raise
            # The session is over: once more, in a new one.
            await in_thread(functools.partial(self._reopen, client))
        sequence = response.sequences[0]
        ids = list(sequence.tokens)
        usage = UsageInfo(
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(ids),
            # SDK 0.25 and later.
            cache_tokens=getattr(response, "prompt_cache_hit_tokens", None) or 0,
            cost_usd=0.0,
        )
        return Turn(
            content=self._text_of(ids),
            usage=usage,
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            cut_off=sequence.stop_reason == "length",
            # SDK 0.26 and later.
            extra={"sequence_id": getattr(sequence, "sequence_id", None)},
        )

    def _reopen(
        self,
        gone: Any,
    ) -> None:
        # The first trial that sees the end of a session opens another one for all.
        with self._reopening:
            if self._sampling_client is gone:
                self._sampling_client = self._open()

    def _text_of(
        self,
        ids: list[int],
    ) -> str:
        # A reply's text up to its stop token, or stop text.
        ends = {*self._stop, self._renderer.tokenizer.eos_token_id}
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        try:
            with _tokenizing:
                text = self._renderer.tokenizer.decode(ids)
        except Exception as error:
            # What no tokenizer can read is neither an answer nor commands.
            self._logger.warning("a reply that the tokenizer cannot read: %s", error)
            return ""
        # role_colon has a text.
        if isinstance(self._stop[0], str):
            text = text.partition(self._stop[0])[0].removeprefix(" ")
        return text


def check_tinker_key(settings: Mapping[str, str]) -> None:
    """Raise ValueError where the Tinker SDK would find no key."""
    has_key = settings.get("TINKER_API_KEY") or _given_service is not None
    if not has_key:
        # From 0.38 on it may also be stored, or printed by a command.
        with contextlib.suppress(ImportError):
            from tinker.auth import tinker_has_credentials

            has_key = tinker_has_credentials()
    if not has_key:
        raise ValueError("no API key for Tinker: set TINKER_API_KEY")


def is_gone(error: Exception) -> bool:
    """Whether a Tinker session, or a checkpoint, does not exist (any more).

    The SDK (0.38) has no class for what a client says that was closed, or one that polls.
    """
    phrases = r"(?s)is closed$|polling failed.*code: (404|410)"
    has_status = getattr(error, "status_code", None) in (404, 410)
    return has_status or bool(re.search(phrases, str(error)))


def says_context_is_full(error: Exception) -> bool:
    """Whether Tinker refused a prompt for its length; the phrases are those of Harbor's client.

    A day may be "too long", too: only an error in what was asked is a prompt's.
    """
    is_user_error = str(getattr(error, "category", "")) == "user"
    is_bad_request = getattr(error, "status_code", None) in (400, 413, 422)
    phrases = "(?i)context length|context_length|maximum context|token limit|too long"
    return (is_user_error or is_bad_request) and bool(re.search(phrases, str(error)))


# How the server says that the reply to the current call ended; trials share the client.
_finish_reason = ContextVar("finish_reason", default="")


class LiteLLMMixin(ExactPrompts):
    """What this file adds to Harbor's LiteLLM: whole replies, and the trial's session id.

    Where ids are asked for and the server tokenizes, as vLLM does, prompts are exact, too. What is
    private is the same in Harbor 0.13 to 0.25.
    """

    reads_system = True

    def __init__(
        self,
        **kwargs: Any,
    ) -> None:
        import httpx
        import openai

        super().__init__(**kwargs)
        self.is_exact = bool(
            self._api_base and self._collect_rollout_details and not self._use_responses_api
        )
        if not self.is_exact:
            return
        http_client = openai.DefaultAsyncHttpxClient(
            # A connection that it kept would keep its event loop, and so the cache.
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=self._llm_kwargs.get("ssl_verify", True),
            timeout=60,
        )
        self._server = openai.AsyncOpenAI(
            base_url=self._api_base.rstrip("/").removesuffix("/v1"),
            api_key=self._llm_kwargs.get("api_key") or "none",
            default_headers=self._llm_kwargs.get("extra_headers"),
            http_client=http_client,
            # An outage of some seconds, twice a turn, ends no trial.
            max_retries=5,
        )
        try:
            # This is no thread of an event loop's.
            self.is_exact = len(asyncio.run(self.render([user("a")]))) > 0
        except (openai.OpenAIError, LookupError, TypeError, ValueError):
            # A gateway may answer anything to what it does not know.
            self.is_exact = False
            self._logger.info("the server has no /tokenize: prompts are not exact")

    async def call(
        self,
        prompt: str,
        message_history: list[dict],
        goes_on_from: list[int],
        session_id: str | None = None,
        **kwargs: Any,
    ) -> Turn:
        """One model call. Raises what Harbor's LiteLLM raises, after its three attempts."""
        request = {}
        if session_id:
            headers = self._llm_kwargs.get("extra_headers") or {}
            request["extra_headers"] = {**headers, "X-Session-ID": session_id}
            # Closed APIs refuse fields that they do not know, and return no ids either.
            if self._collect_rollout_details:
                request["extra_body"] = {"session_id": session_id}
        if self.is_exact:
            return await self.call_exactly(prompt, message_history, goes_on_from, **request)
        _finish_reason.set("")
        response = await super().call(
            prompt,
            message_history,
            **kwargs,
            **request,
        )
        return Turn(**vars(response), cut_off=_finish_reason.get() == "length")

    def get_model_output_limit(self) -> int:
        # Harbor sends it to the Responses API, where the most that the model can is no limit.
        return self._llm_kwargs["max_tokens"]

    def _extract_usage_info(
        self,
        response: Any,
    ) -> UsageInfo | None:
        # A hook: `call` looks at finish_reason after this, and a reply that was cut off would
        # become an error there, without its ids and usage.
        choice = response["choices"][0]
        _finish_reason.set(choice["finish_reason"])
        choice["finish_reason"] = "stop"
        return super()._extract_usage_info(response)

    async def _tokenize(
        self,
        **body: Any,
    ) -> dict:
        # vLLM's POST /tokenize: tokens, token_strs, max_model_len. Raises after six attempts.
        body |= {"model": self._canonical_model_name, "return_token_strs": True}
        return await self._server.post(
            "/tokenize",
            cast_to=object,
            body=body,
        )

    async def render(
        self,
        messages: list[dict],
    ) -> list[int]:
        # As the chat endpoint hands them to the template.
        options = {
            "reasoning_effort": self._reasoning_effort,
            **(self._llm_kwargs.get("chat_template_kwargs") or {}),
            **((self._llm_kwargs.get("extra_body") or {}).get("chat_template_kwargs") or {}),
        }
        # gpt-oss' own template refuses its headers in a message.
        shown = [
            {**message, "content": split_thinking(message["content"])[1]}
            if message["content"].startswith(_HEADERS)
            else message
            for message in messages
        ]
        answer = await self._tokenize(
            messages=shown,
            add_generation_prompt=True,
            chat_template_kwargs=without_none(options),
        )
        self.context_limit = int(answer["max_model_len"])
        # "Ċ" is how byte-level tokenizers show a line's end.
        end = "".join(answer["token_strs"][-8:]).rstrip("Ċ\n")
        self.opens_thinking = end.endswith("<think>")
        return answer["tokens"]

    async def special_texts(
        self,
        text: str,
    ) -> Iterable[str]:
        if not self.is_exact:
            return ()
        answer = await self._tokenize(prompt=text, add_special_tokens=False)
        # As it shows them: <|im_end|>, <think>, </s>, [INST].
        return {piece for piece in answer["token_strs"] if re.fullmatch(r"(?s)<.+>|\[.+\]", piece)}

    async def sample(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        **request: Any,
    ) -> Turn:
        import litellm

        # Else it prints a list of providers in each call, for it looks for the price of the model.
        litellm.suppress_debug_info = True
        arguments = {
            # Without one hosted_vllm/ would get OPENAI_API_KEY.
            "api_key": "none",
            **self._build_base_kwargs(),
            **request,
            # Only this one of litellm's providers takes ids as a prompt.
            "model": f"openai/{self._canonical_model_name}",
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": self._temperature,
            "logprobs": 0,
            "extra_body": {
                **(self._llm_kwargs.get("extra_body") or {}),
                **(request.get("extra_body") or {}),
                "return_token_ids": True,
                "skip_special_tokens": False,
            },
        }
        # The three attempts (tenacity's) that Harbor's own call makes.
        try:
            response = await super().call.retry.copy()(litellm.atext_completion, **arguments)
        except Exception as error:
            self._handle_litellm_error(error)
        choice = response.choices[0]
        return Turn(
            content=choice.text,
            cut_off=choice.finish_reason == "length",
            usage=super()._extract_usage_info(response),
            # As the server had it: an option may have cut it.
            prompt_token_ids=getattr(choice, "prompt_token_ids", None) or prompt_ids,
            completion_token_ids=getattr(choice, "token_ids", None),
            logprobs=dict(choice.logprobs or {}).get("token_logprobs"),
        )


# The cache: one client for all trials of an event loop and configuration.

# By loop: the clients and their locks, each by configuration, and the latest clients. A client
# lives as long as a trial uses it, or as it is one of the latest (a training run brings a new
# checkpoint each step), and no longer than its loop.
_caches = WeakKeyDictionary()

# The process's sessions with Tinker, by server and key; each holds about 11 file descriptors.
_services: dict[str, Any] = {}
_opening = threading.Lock()
# Held while a checkpoint loads: only those wait for it whose session seems to be over, too.
_replacing = threading.Lock()
_given_service: Any = None


def use_service(service: Any) -> None:
    """Have the trials that follow sample in this `tinker.ServiceClient`; None: in one of our own.

    So sampling and training share a session, which losses need that look at what was recorded
    when sampling. It is never closed or replaced.
    """
    global _given_service
    _given_service = service


def open_sampling_client(
    server: dict[str, str],
    source: dict[str, Any],
) -> Any:
    """A sampling client in the process's session, or in a new one if that is over. Blocks.

    Tinker answers alike for a session that is over and for a checkpoint that does not exist: where
    a new session opens the checkpoint, it takes the old one's place, else it is closed. Raises what
    the SDK raises.
    """
    import tinker

    key = str(server)
    with _opening:
        service = _given_service or _services.get(key)
        if service is None:
            service = _services[key] = tinker.ServiceClient(**server)
    try:
        return _sampling_client(service, source)
    except Exception as error:
        if service is _given_service or not is_gone(error):
            raise
    with _replacing:
        if _services.get(key) is service:
            fresh = tinker.ServiceClient(**server)
            try:
                client = _sampling_client(fresh, source)
            except Exception:
                close(fresh)
                raise
            close(service)
            _services[key] = fresh
            return client
    # Another trial was faster.
    return open_sampling_client(server, source)


def _sampling_client(
    service: Any,
    source: dict[str, Any],
) -> Any:
    created = service.create_sampling_client(**source)
    # A future from SDK 0.38 on.
    return created.result() if hasattr(created, "result") else created


def close(service: Any) -> None:
    """Give a session's descriptors back, without waiting; SDKs before 0.30 cannot."""
    if hasattr(service, "close"):
        service.close("success")


async def in_thread(function: Callable) -> Any:
    """Like asyncio.to_thread, but in a daemon thread, for which Python does not wait at exit.

    While Tinker is down its SDK retries for minutes.
    """
    done = concurrent.futures.Future()
    # From here on it cannot be cancelled, and takes what comes, wanted or not.
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(done)


# Training data.


@dataclass(frozen=True)
class Trajectory:
    """A finished trial as a trainer sees it; tokens, cost, times and names are in `trial`."""

    # Of all steps, in order, with ids and logprobs; none for API models.
    turns: list[Turn]
    # The reward named "reward", or the only one. None: not scored, or several of other names.
    reward: float | None
    # All that the verifier gave; empty where Harbor scored a trial that failed.
    rewards: dict[str, float]
    # The `StopReason` of the last step; None for another agent's trial.
    stop_reason: str | None
    # Why there is no reward, such as "RuntimeError: service is gone".
    failure: str | None
    trial: TrialResult


# The exceptions after which Harbor scores on purpose. (0.25: `TrialResult.reward_valid`.)
_SCORED_EXCEPTIONS = ("AgentTimeoutError", "NonZeroAgentExitCodeError")


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`.

    None if the trial failed before it was scored, or has neither tokens nor a score. A multi-step
    trial of which a step failed has no reward, though Harbor scores it: `failure` says why. Raises
    ValueError where ids and logprobs do not align, or a logprob or reward is not finite.
    """
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    segments = [segment for context in contexts for segment in context.rollout_details or []]
    turns = [turn for segment in segments for turn in turns_of(segment)]
    if not all(turn.is_trainable for turn in turns):
        raise ValueError(
            f"trial {trial.trial_name}: token ids and logprobs are not aligned, or a logprob is "
            "not finite: do not train on them"
        )
    rewards = getattr(trial.verifier_result, "rewards", None) or {}
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise ValueError(f"trial {trial.trial_name}: the reward {name!r} is {value}")
    exceptions = [part.exception_info for part in (trial, *steps) if part.exception_info]
    if not rewards and (exceptions or not turns):
        return None

    failures = [
        f"{exception.exception_type}: {exception.exception_message}"
        for exception in exceptions
        if exception.exception_type not in _SCORED_EXCEPTIONS
    ]
    rewards = {} if failures else rewards
    only = next(iter(rewards.values())) if len(rewards) == 1 else None
    return Trajectory(
        turns=turns,
        reward=rewards.get("reward", only),
        rewards=rewards,
        stop_reason=(contexts[-1].metadata or {}).get("stop_reason"),
        failure=failures[0] if failures else None,
        trial=trial,
    )


# Kept for code that was written against its first name.
_trial_to_trajectory = trial_to_trajectory


def turns_of(segment: dict) -> list[Turn]:
    """The turns of a RolloutDetail. Where one of its lists is shorter, a turn has None."""
    rows = itertools.zip_longest(*[segment.get(name) or [] for name in _IDS])
    turns = [Turn(**dict(zip(_IDS, row, strict=True)), extra={}) for row in rows]
    for name, values in (segment.get("extra") or {}).items():
        for turn, value in zip(turns, values, strict=False):
            turn.extra[name] = value
    return turns


def to_tinker(trajectory: Trajectory) -> "tinker_cookbook.rl.types.Trajectory":  # noqa: F821
    """For tinker-cookbook's RL functions. Imports torch.

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
        action = TokensWithLogprobs(
            turn.completion_token_ids, turn.logprobs, "length" if cut_off else "stop"
        )
        # A field of cookbook 0.6.
        action.sequence_id = (turn.extra or {}).get("sequence_id")
        prompt = ModelInput.from_ints(turn.prompt_token_ids)
        transitions.append(
            types.Transition(
                prompt,
                action,
                reward=0.0,
                episode_done=is_last,
            )
        )
    return types.Trajectory(transitions, ModelInput.empty(), trajectory.stop_reason)
