"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://...

From top to bottom: the options, the record of a turn, the agent (`_converse` is its loop), the
commands, the conversation, what a trial leaves, the model clients, their cache, training data.
"""

import asyncio
import concurrent.futures.thread
import contextlib
import copy
import importlib.util
import inspect
import itertools
import math
import os
import re
import shlex
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

import tenacity
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.llms.chat import Chat
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from pydantic import BaseModel, Field, model_validator

__version__ = "0.3.0"

# A chat message as Harbor and tinker-cookbook have it: its role, and its content.
Message = dict[str, Any]

try:
    # Harbor 0.23 and later: BaseAgent parses the options, and does so before any trial starts.
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions

    class HarborAgent(BaseAgent):
        capabilities = AgentCapabilities(atif=True, resume=True)

except ImportError:
    # Harbor 0.13 to 0.22 swallows unknown arguments: here each trial parses the options.
    AgentOptions = BaseModel

    class HarborAgent(BaseAgent):
        SUPPORTS_ATIF = True
        SUPPORTS_RESUME = True
        session_id: str | None = None

        def __init__(self, **kwargs: Any) -> None:
            harbors = inspect.signature(BaseAgent.__init__).parameters.keys()
            others = kwargs.keys() - harbors - {"extra_env", "override_setup_timeout_sec"}
            options = {name: kwargs.pop(name) for name in others}
            super().__init__(**kwargs)
            self.options = self.options_model(**options)


class BasicLoopOptions(
    AgentOptions,
    extra="forbid",
    coerce_numbers_to_str=True,
    hide_input_in_errors=True,
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
        None,
        description="tinker-cookbook renderer; default: the one recommended for the model.",
    )
    max_tokens: int = Field(
        512,
        ge=1,
        description="Most tokens that one model call may sample, thinking included.",
    )
    temperature: float | None = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="Sampling temperature; null leaves it to the client.",
    )
    max_turns: int = Field(
        1,
        ge=1,
        description="Most model calls; above 1, the bash blocks of a reply are run.",
    )
    system_prompt: str | None = Field(
        None,
        description="System message, verbatim; default: the loop's protocol.",
    )
    model_client: Literal["tinker", "litellm"] = Field(
        "tinker",
        description="Harbor's TinkerLLM, or its LiteLLM for API models and servers.",
    )
    api_base: str | None = Field(
        None,
        description="Base URL of the model's server; default: the client's own.",
    )
    llm_kwargs: dict[str, Any] | None = Field(
        None,
        repr=False,
        description="More arguments of the client: top_p, seed, ...",
    )
    collect_rollout_details: bool | None = Field(
        None,
        description="Record token ids; default: with the Tinker client only.",
    )
    rerender_history: bool = Field(
        False,
        description="Tinker: render the history anew each turn, as the template would.",
    )
    session_id: str | None = Field(
        None,
        description="LiteLLM: sent as X-Session-ID, for routers; default: the trial's.",
    )
    command_timeout_sec: int = Field(
        120,
        ge=1,
        description="Seconds after which a reply's commands are ended.",
    )
    max_output_chars: int = Field(
        10_000,
        ge=1,
        description="Most command output that the model sees, in bytes of UTF-8.",
    )

    @model_validator(mode="after")
    def _fits_the_client(self) -> Self:
        """Refuse what the client cannot do, and fill in the one default that depends on it."""
        # Harbor 0.25 adds options that are not this agent's, such as reasoning_effort.
        own = type(self).model_fields.keys() - AgentOptions.model_fields.keys()
        taken = (own | {"model_name"}) & (self.llm_kwargs or {}).keys()
        if taken:
            raise ValueError(f"llm_kwargs holds {taken.pop()}: use the option of that name instead")
        if self.model_client == "litellm":
            if self.model_path or self.renderer_name:
                raise ValueError(
                    "model_path and renderer_name are for tinker: "
                    "drop them, or set model_client=tinker"
                )
        elif not all(map(importlib.util.find_spec, ("tinker", "tinker_cookbook"))):
            raise ValueError(
                "the Tinker packages are missing: run `pip install 'harbor[tinker]'`, "
                "or set model_client=litellm"
            )
        if self.collect_rollout_details is None:
            self.collect_rollout_details = self.model_client == "tinker"
        return self


class StopReason(StrEnum):
    """Why a run ended, under the names of `tinker_cookbook.rl.types.StopReason` where it has them.

    The trial is scored after all of them but ERROR; after CANCELLED by a timeout, not by Ctrl-C.
    """

    # The reply holds no command, or was the one completion asked for.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was cut off, at `max_tokens` or the end of the context; nothing in it was run.
    MAX_TOKENS = "max_tokens"
    # The conversation left no room in the context window for a reply.
    CONTEXT_OVERFLOW = "context_overflow"
    # From outside: the agent's timeout, or Ctrl-C.
    CANCELLED = "cancelled"
    # An exception, which Harbor keeps as the trial's exception_info.
    ERROR = "error"


@dataclass
class Turn:
    """One model call, exactly as sampled. All that a trial leaves is derived from its turns.

    A turn that was read back from a trial's result has the first three fields only.
    """

    # Shape [n_prompt], earlier turns included. None: not asked for, or the server gave none.
    prompt_token_ids: list[int] | None
    # Shape [n_completion], the stop token included.
    completion_token_ids: list[int] | None
    # Shape [n_completion], natural logarithms, under the policy that sampled.
    logprobs: list[float] | None
    # The reply, and the thinking that is no part of it.
    text: str = ""
    thinking: str = ""
    # A cost of 0.0 US dollars means unknown (Harbor's convention).
    usage: UsageInfo | None = None
    # Whether the reply ended for its length.
    cut_off: bool = False
    # Whether the prompt does not begin with the turn before: its prompt and its completion.
    breaks_prefix: bool = False
    # What the reply asked to run, and what the model was told after it.
    script: str | None = None
    told: str | None = None
    timestamp: str | None = None

    @property
    def has_finite_logprobs(self) -> bool:
        """Whether each logprob is a number: a policy that diverged gives NaN."""
        logprobs = self.logprobs or []
        return all(logprob is not None and math.isfinite(logprob) for logprob in logprobs)

    @property
    def is_trainable(self) -> bool:
        """Whether ids and logprobs are all there, of one length, and finite."""
        return (
            bool(self.prompt_token_ids)
            and self.completion_token_ids is not None
            and len(self.completion_token_ids) == len(self.logprobs or [])
            and self.has_finite_logprobs
        )


class BasicLoopAgent(HarborAgent):
    """Samples from one model, runs the bash blocks of its replies if asked to, and records it all.

    Each trial leaves on the context: token counts, cost (None: unknown), `metadata` (the
    `StopReason`, the number of model calls) and one Harbor RolloutDetail, whose lists have an
    entry for each `Turn`; in `logs_dir`: completion.txt, the last reply, and trajectory.json, in
    Harbor's format ATIF.

    Takes the options of `BasicLoopOptions` by keyword. Raises ValueError for a bad option, a
    missing API key or no model, before any container starts.
    """

    options_model: ClassVar[type[BasicLoopOptions]] = BasicLoopOptions

    # What the model is told of the loop; {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with \
```bash: the blocks of a reply run as one script, and its exit code and output are the next \
message. Each script starts in a fresh shell (files stay, variables and directory do not) and has \
{seconds} seconds. When the task is done, reply without such a block."""

    def __init__(self, *, model_name: str | None, **kwargs: Any) -> None:
        super().__init__(model_name=model_name, **kwargs)
        check_model(model_name, self.options)

    @classmethod
    def preflight(
        cls,
        kwargs: dict | None = None,
        env: Any = None,
    ) -> None:
        """Called by Harbor 0.23 and later, before any trial; the model is not known here."""
        if cls.parse_options(kwargs, env).model_client == "tinker":
            check_tinker_key()

    @staticmethod
    def name() -> str:
        """The agent's name in Harbor's results."""
        return "basic-loop"

    def version(self) -> str | None:
        """The version in Harbor's results."""
        return __version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build the model client: importing torch is no part of the agent's own time."""
        await self._shared_llm()

    async def run(
        self,
        instruction: str,
        environment: BaseEnvironment,
        context: AgentContext,
    ) -> None:
        """Solve a task in a new conversation."""
        session_id = self.options.session_id or self.session_id
        self._conversation = Conversation(self._system_message(), self.options, session_id)
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
            conversation.use(await self._shared_llm())
            stop_reason = await self._converse(conversation, environment)
        except BaseException as error:
            # A cancellation is no Exception.
            is_error = isinstance(error, Exception)
            stop_reason = StopReason.ERROR if is_error else StopReason.CANCELLED
            # The context has it all, and `error` says more than a full disk.
            with contextlib.suppress(OSError):
                self._record(conversation, stop_reason, context)
            raise
        self._record(conversation, stop_reason, context)

    async def _converse(
        self,
        conversation: "Conversation",
        environment: BaseEnvironment,
    ) -> StopReason:
        """The loop. The conversation records what the model says, and what `tell` tells it.

        To have the model forget, edit `conversation.messages` (for the Responses API call
        `conversation.reset_response_chain()` too): an edited history is rendered anew.
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
            turn.script = self.script_in(turn.text)
            if turn.script is None:
                return StopReason.COMPLETED

            # Act, and observe.
            conversation.tell(await self._execute(turn.script, environment))
        return StopReason.MAX_TURNS

    def script_in(self, reply: str) -> str | None:
        """The bash script that a reply asks to run; None if it asks for nothing."""
        languages = ("bash", "sh")
        scripts = [block for language, block in fenced_blocks(reply) if language in languages]
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
        run = in_bash(_RUN, mark, str(limit), str(most), script)
        command = f"BASIC_LOOP_RUN={mark} {run}"
        # Linux takes 128 KiB an argument, and some environments quote the command once more.
        size = len(shlex.quote(command).encode())
        if size > 120_000:
            return f"Not run: the script is too long ({size:,} bytes). Split it into smaller ones."
        try:
            # Three limits, the innermost first: the script's, ours, the environment's own, at which
            # Docker's raises RuntimeError and would end the trial.
            async with asyncio.timeout(limit + 20):
                result = await environment.exec(command, timeout_sec=limit + 60)
        except (TimeoutError, asyncio.CancelledError) as ended:
            # Else it would go on, in the next turn or while the tests run.
            await asyncio.shield(end_script(environment, mark))
            if isinstance(ended, asyncio.CancelledError):
                raise
            return f"Exit code: 124\nOutput:\n[no answer; the time limit is {limit} seconds]"
        # As _RUN prints it: the output, the mark, what came from the background since, the mark,
        # why the script was ended. A script can write around _RUN, so it is cut here too: at twice
        # `most`, for bytes that are no text become longer.
        end = f"end-of-{mark}"
        output, _, rest = valid_text(result.stdout).partition(end)
        why_ended = rest.rpartition(end)[2]
        parts = [
            output[: 2 * most + 100],
            valid_text(result.stderr),
            why_ended,
        ]
        shown = "\n".join(part.removesuffix("\n") for part in parts if part)
        return f"Exit code: {result.return_code}\nOutput:\n{shown or '(none)'}"

    def _system_message(self) -> str:
        options = self.options
        if options.system_prompt is not None or options.max_turns == 1:
            return options.system_prompt or ""
        return self.protocol.replace("{seconds}", str(options.command_timeout_sec))

    def _record(
        self,
        conversation: "Conversation",
        stop_reason: StopReason,
        context: AgentContext,
    ) -> None:
        """Put the run onto the context, then into the files. Raises OSError of these."""
        turns = conversation.turns
        usage = total_usage(turns)
        context.n_input_tokens = usage.total_prompt_tokens
        context.n_output_tokens = usage.total_completion_tokens
        context.n_cache_tokens = usage.total_cached_tokens
        context.cost_usd = usage.total_cost_usd
        context.metadata = {
            "stop_reason": str(stop_reason),
            "n_episodes": len(turns),
        }
        if self.options.collect_rollout_details:
            context.rollout_details = rollout_details(turns)
            n_trainable = sum(turn.is_trainable for turn in turns)
            n_breaks = sum(turn.breaks_prefix for turn in turns)
            context.metadata["n_turns_without_ids"] = len(turns) - n_trainable
            context.metadata["n_prefix_breaks"] = n_breaks
            if n_breaks:
                self.logger.info("%d prompts do not begin with the turn before", n_breaks)
        trajectory = atif.Trajectory(
            session_id=conversation.session_id or uuid4().hex,
            agent=atif.Agent(
                name=self.name(),
                version=__version__,
                model_name=self.model_name,
            ),
            steps=to_steps(conversation),
            final_metrics=usage,
            extra=context.metadata,
        )
        # Without a reply it is empty: an earlier step's, in the same folder, must not be scored.
        completion = turns[-1].text if turns else ""
        write_file(self.logs_dir / "completion.txt", completion)
        view = trajectory.model_dump_json(exclude_none=True)
        write_file(self.logs_dir / "trajectory.json", view)

    def _build_llm(self) -> Any:
        """A new client of this configuration; its `call` takes the conversation, too.

        Takes seconds, so it is called in a thread.
        """
        options = self.options
        kwargs = {
            **(options.llm_kwargs or {}),
            "model_name": self.model_name,
            "max_tokens": options.max_tokens,
            "api_base": options.api_base,
            "collect_rollout_details": options.collect_rollout_details,
        }
        if options.temperature is not None:
            kwargs["temperature"] = options.temperature
        # Imported here, for importing litellm or torch takes seconds.
        if options.model_client == "litellm":
            from harbor.llms.lite_llm import LiteLLM

            class LiteLLMClient(LiteLLMMixin, LiteLLM):
                """Harbor's client for API models."""

            return LiteLLMClient(**kwargs)
        from harbor.llms.tinker import TinkerLLM

        class TinkerClient(TinkerMixin, TinkerLLM):
            """Harbor's client for Tinker."""

        self.logger.info("Sampling %s", options.model_path or f"base model {self.model_name}")
        kwargs["model_path"] = options.model_path
        kwargs["renderer_name"] = options.renderer_name
        return TinkerClient(**kwargs)

    def _cache_key(self) -> tuple:
        """Everything that makes two clients different."""
        loop_only = {
            "max_turns",
            "system_prompt",
            "rerender_history",
            "session_id",
            "command_timeout_sec",
            "max_output_chars",
        }
        return (
            type(self),
            self.model_name,
            self.options.model_dump_json(exclude=loop_only, fallback=repr),
            service_key(self.options.api_base),
        )

    async def _shared_llm(self) -> Any:
        """The client of this event loop and configuration, which all its trials share."""
        clients = _clients.setdefault(asyncio.get_running_loop(), LoopClients())
        llm = await clients.get(self._cache_key(), self._build_llm)
        if isinstance(llm, TinkerMixin):
            await llm.connect()
        return llm


# `help` and `inspect` show the options, whose defaults stand in one place only.
_parameters = inspect.signature(BasicLoopAgent.__init__).parameters
BasicLoopAgent.__init__.__signature__ = inspect.Signature(
    [
        _parameters["self"],
        _parameters["model_name"],
        *inspect.signature(BasicLoopOptions).parameters.values(),
        _parameters["kwargs"],
    ]
)


# The commands: which text is a script, and how it is run.

_FENCED_BLOCK = re.compile(
    r"""
    ^ (?P<indent> [ \t]* (?: (?: [-*+] | \d{1,9}[.)] ) [ \t]+ )* )  # also of a list's item
    (?P<fence> (?P<mark> [`~] ) (?P=mark){2,}+ ) (?P<info> [^`\n]* ) \n
    (?P<content> .*? )
    (?P<end> ^ [ \t]* (?P=fence) (?P=mark)* [ \t]* $ | \Z )
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The ``` blocks of a Markdown text, as (language, content); one without an end is none.

    What looks like a block inside another one, or inside ~~~, is quoted and none either.
    """
    blocks = []
    for block in _FENCED_BLOCK.finditer(text.replace("\r\n", "\n")):
        if block["end"] and block["mark"] == "`":
            # Markdown's rule: an indented block loses that much of each line's indent.
            indent = re.compile(rf"^[ \t]{{0,{len(block['indent'])}}}", re.MULTILINE)
            language = block["info"].strip().partition(" ")[0]
            blocks.append((language, indent.sub("", block["content"])))
    return blocks


# Both texts run inside the environment, with the arguments MARK [SECONDS BYTES SCRIPT]. What a
# script starts is found by the mark in its environment, which children inherit, also those that
# left its process group; with what runs it, by BASIC_LOOP_RUN.
_END_ALL = r"""
exec 2>/dev/null
mark=$1 file=/dev/shm
[ -w $file ] || file=/tmp
file=$file/basic-loop-$mark
end_all() {
  for _ in 1 2 3; do
    pids=$(grep -ls "$1=$mark" /proc/[0-9]*/environ | cut -d/ -f3)
    [ -n "$pids" ] || break
    # All stand first: else a shell would go on to its next command when the last one is killed.
    kill -STOP $pids
    kill -9 $pids
  done
}
"""
# The output goes through a pipe: `tee` fills a file, of which no more than BYTES are returned, and
# `head` counts; past `most` the script is ended, and a second file, .full, says so. A process left
# in the background keeps the pipe, and `cat` reads on for it; so a line behind the script's last
# one, end-of-MARK, shows that all before it has reached the file.
_RUN = (
    _END_ALL
    + r"""
limit=$2 shown=$3 script=$4 most=4000000 end=end-of-$mark why=
: >$file
exec 3> >(
  exec >/dev/null
  tee $file | head -c $most
  # Not when the script had ended before, and a process in the background wrote the rest.
  if [ $(wc -c <$file) -ge $most ] && ! grep -qs $end $file; then
    : >$file.full
    end_all BASIC_LOOP_SCRIPT
  fi
  exec cat
)
SECONDS=0
BASIC_LOOP_SCRIPT=$mark timeout -k 5 $limit bash -c -- "$script" </dev/null >&3 2>&1 3>&-
code=$?
case $code in 124|137|143)
  if [ $SECONDS -ge $limit ]; then
    end_all BASIC_LOOP_SCRIPT
    code=124
    why="the time limit of $limit seconds was reached"
  fi
esac
printf '%s\n' $end >&3
exec 3>&-
for _ in {1..200}; do
  if [ -e $file.full ]; then why="it wrote more than $most bytes"; break; fi
  grep -qs $end $file
  # 1: not yet; 2: the file was taken away.
  [ $? = 1 ] || break
  sleep 0.02
done
size=$(wc -c <$file || echo 0)
# The head, and the tail with the line that shows the end.
half=$((shown / 2)) rest=$((shown - shown / 2 + ${#end} + 1))
if [ $size -le $((half + rest)) ]; then cat $file; else
  head -c $half $file
  printf '\n[... %d bytes left out ...]\n' $((size - half - rest))
  tail -c $rest $file
fi
rm -f $file $file.full
printf '%s%s' $end "${why:+[ended: $why]}"
exit $code
"""
)
_END = _END_ALL + "end_all BASIC_LOOP_RUN; rm -f $file $file.full"


def in_bash(text: str, *arguments: str) -> str:
    """The command that has bash run a text with these arguments."""
    return shlex.join(["bash", "-c", text, "basic-loop", *arguments])


async def end_script(environment: BaseEnvironment, mark: str) -> None:
    """End what a script started; gives up after 10 seconds."""
    # The environment may be gone, and the trial goes on, or ends, for its own reason.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(10):
            await environment.exec(in_bash(_END, mark), timeout_sec=15)


def valid_text(text: str | bytes | None) -> str:
    """Text that tokenizers and files accept: lone surrogates are replaced, None becomes ""."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# The conversation: Harbor's Chat, with a record of its turns.


@dataclass
class Reply(LLMResponse):
    """A reply of this file's clients; `cut_off` says whether it ended for its length."""

    cut_off: bool = False


class Conversation(Chat):
    """Harbor's Chat for one trial: it records each call as a `Turn`, and what the model is told.

    Clients serve many trials at once, so what belongs to one conversation stands here.
    """

    def __init__(
        self,
        system: str,
        options: BasicLoopOptions,
        session_id: str | None,
    ) -> None:
        super().__init__(model=None)
        self.options = options
        self.session_id = session_id
        self.system = valid_text(system)
        if system:
            self.messages.append({"role": "system", "content": self.system})
        # What this run began with, and its turns.
        self.instruction = ""
        self.turns: list[Turn] = []
        # The prompt and the completion of the last turn; those that the next prompt goes on from.
        self._last_ids: list[int] = []
        self.goes_on_from: list[int] = []
        # A copy of the messages after that turn, and what the model was not yet told.
        self._as_sent: list[Message] = []
        self._unsent: list[str] = []

    def use(self, llm: Any) -> None:
        """Sample from this client from now on."""
        # Harbor's Chat (0.13 to 0.25) has no public name for it.
        self._model = llm

    def begin(self, instruction: str) -> None:
        """Start a run: the model is told this next, after what it was not yet told."""
        self.turns = []
        self.instruction = valid_text(instruction)
        self._unsent.append(self.instruction)

    def tell(self, text: str) -> None:
        """Have the model told this next. For Tinker, special tokens in it stay plain text."""
        text = valid_text(text)
        if self.turns:
            turn = self.turns[-1]
            turn.told = f"{turn.told}\n\n{text}" if turn.told else text
        else:
            self.instruction += f"\n\n{text}"
        if isinstance(self._model, TinkerMixin):
            text = self._model.defused(text)
        self._unsent.append(text)

    async def sample(self) -> Turn:
        """Send what was not yet sent, and record the reply.

        Raises what the client raises, and RuntimeError where ids were asked for and none came.
        """
        is_edited = self.messages != self._as_sent
        if is_edited:
            self._as_sent = []
        rerender = is_edited or self.options.rerender_history
        self.goes_on_from = [] if rerender else self._last_ids
        reply = await self.chat("\n\n".join(self._unsent), conversation=self)
        with_ids = self.options.collect_rollout_details
        turn = to_turn(reply, with_ids)
        self.turns.append(turn)
        self._unsent.clear()
        # Copies, so that an edit is noticed; of what is new, so that each turn costs the same.
        self._as_sent += copy.deepcopy(self.messages[len(self._as_sent) :])
        if reply.prompt_token_ids:
            begins_with = reply.prompt_token_ids[: len(self._last_ids)]
            turn.breaks_prefix = begins_with != self._last_ids
            self._last_ids = reply.prompt_token_ids + (reply.completion_token_ids or [])
        must_have_ids = self.options.model_client == "litellm" and with_ids
        ids = (turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs)
        if must_have_ids and len(self.turns) == 1 and None in ids:
            raise RuntimeError(
                "collect_rollout_details=true, but the server returned no token ids with logprobs"
            )
        return turn


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def to_turn(
    reply: Reply,
    with_ids: bool,
) -> Turn:
    """The record of a reply; the only place that makes one."""
    thinking = reply.reasoning_content
    text = text_of(reply.content)
    if not thinking:
        thinking, text = split_thinking(text)
    return Turn(
        prompt_token_ids=reply.prompt_token_ids if with_ids else None,
        completion_token_ids=reply.completion_token_ids if with_ids else None,
        logprobs=reply.logprobs if with_ids else None,
        text=valid_text(text),
        # Some renderers put a second tag before what began with one.
        thinking=valid_text(thinking).lstrip().removeprefix("<think>"),
        usage=reply.usage,
        cut_off=reply.cut_off,
        timestamp=datetime.now(UTC).isoformat(),
    )


def text_of(content: str | list[Message] | None) -> str:
    """A message's content as one text, its thinking in tags before the answer.

    A renderer that knows thinking gives a list of parts.
    """
    if not isinstance(content, list):
        return content or ""
    thinking = "".join(part.get("thinking", "") for part in content)
    text = "".join(part.get("text", "") for part in content)
    return f"<think>{thinking}</think>{text}" if thinking else text


# The thinking at the start of a reply, to its end where it is never closed.
_THINKING = re.compile(r"(?:\s*<think>.*?(?:</think>|\Z))+", re.DOTALL)
_TAG = re.compile(r"\s*<think>|</think>")
_CLOSING_TAG_ALONE = re.compile(r"^[ \t]*</think>[ \t]*\r?$", re.MULTILINE)


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking and the answer of a reply that holds both.

    What a <think> at its start opens is thinking. Without one the prompt may have opened it: then
    a </think> on a line of its own closes it.
    """
    opened = _THINKING.match(text)
    if opened:
        return _TAG.sub("", opened[0]), text[opened.end() :].lstrip()
    closing = _CLOSING_TAG_ALONE.search(text)
    if closing is None or "<think>" in text[: closing.start()]:
        return "", text
    return text[: closing.start()], text[closing.end() :].lstrip()


# What a trial leaves, derived from its turns.


def rollout_details(turns: list[Turn]) -> list[RolloutDetail] | None:
    """One Harbor RolloutDetail, an entry per turn in each list; None without any ids.

    Turns that cannot be trained on are left out. (Chat.rollout_details does not: one missing piece
    misaligns all that follow.)
    """
    kept = [turn for turn in turns if turn.is_trainable]
    detail = RolloutDetail(
        prompt_token_ids=[turn.prompt_token_ids for turn in kept],
        completion_token_ids=[turn.completion_token_ids for turn in kept],
        logprobs=[turn.logprobs or [] for turn in kept],
    )
    return [detail] if kept else None


def total_usage(turns: list[Turn]) -> atif.FinalMetrics:
    """Tokens and cost of all turns; None: unknown."""
    known = [turn.usage for turn in turns if turn.usage]
    if not known:
        return atif.FinalMetrics()
    # The price of some turns is not the run's.
    costs = [usage.cost_usd for usage in known if usage.cost_usd]
    return atif.FinalMetrics(
        total_prompt_tokens=sum(usage.prompt_tokens for usage in known),
        total_completion_tokens=sum(usage.completion_tokens for usage in known),
        total_cached_tokens=sum(usage.cache_tokens for usage in known),
        total_cost_usd=sum(costs) if len(costs) == len(turns) else None,
    )


def to_steps(conversation: Conversation) -> list[Message]:
    """The run as steps of ATIF (harbor.models.trajectories), which `harbor view` shows."""
    steps = []
    if conversation.system:
        steps.append({"source": "system", "message": conversation.system})
    steps.append({"source": "user", "message": conversation.instruction})
    for turn in conversation.turns:
        step = {
            "source": "agent",
            "message": turn.text,
            "reasoning_content": turn.thinking or None,
            "timestamp": turn.timestamp,
            # In a conversation the prompts would let the file grow with the square of the turns.
            "metrics": to_metrics(turn, with_prompt=len(conversation.turns) == 1),
        }
        steps.append(step)
        if turn.told and turn.script:
            step["observation"] = {"results": [{"content": turn.told}]}
        elif turn.told:
            steps.append({"source": "user", "message": turn.told})
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    return steps


def to_metrics(
    turn: Turn,
    with_prompt: bool,
) -> atif.Metrics:
    """A turn's ids, logprobs and usage as ATIF's metrics."""
    usage = {}
    if turn.usage:
        usage = {
            "prompt_tokens": turn.usage.prompt_tokens,
            "completion_tokens": turn.usage.completion_tokens,
            "cached_tokens": turn.usage.cache_tokens,
            "cost_usd": turn.usage.cost_usd or None,
        }
    return atif.Metrics(
        prompt_token_ids=turn.prompt_token_ids if with_prompt else None,
        completion_token_ids=turn.completion_token_ids,
        # JSON has no NaN.
        logprobs=turn.logprobs if turn.has_finite_logprobs else None,
        **usage,
    )


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((IsADirectoryError, FileNotFoundError)),
    stop=tenacity.stop_after_attempt(200),
    reraise=True,
)
def write_file(path: Path, text: str) -> None:
    """Put a file at `path`, whatever lies there. Raises OSError if that cannot be done.

    With Docker the folder is the container's /logs/agent, where a command may have put a link, a
    pipe or a folder of this name: nothing there is opened, and a folder is moved aside. A process
    in the background may do so again and again, and take our file away: so we try again, at once.
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

# A tokenizer is shared by all threads, and raises "Already borrowed" when two use it at once.
_tokenizing = threading.Lock()

# A short conversation, from which the template shows what it puts around a new user message.
_PROBE = [
    user("a"),
    {"role": "assistant", "content": "b"},
]
_LONGER_PROBE = [
    *_PROBE,
    user("a"),
    {"role": "assistant", "content": "c"},
]


class TinkerMixin:
    """What this file adds to Harbor's TinkerLLM.

    One session for the whole process, prompts that go on from the sampled tokens, and whole
    replies: TinkerLLM's own `call` passes a cut-off reply off as complete (Harbor 0.13 to 0.24) or
    drops its ids (0.25). Its private attributes are the same in all these versions.
    """

    def __init__(self, *, api_base: str | None, **kwargs: Any) -> None:
        import harbor.llms.tinker

        unknown = kwargs.keys() - inspect.signature(super().__init__).parameters.keys()
        if unknown:
            raise ValueError(f"llm_kwargs: TinkerLLM takes no {unknown.pop()}")
        # Outside the lock, for it takes seconds; the cookbook keeps what it has loaded.
        harbor.llms.tinker.get_tokenizer(kwargs["model_name"])
        with _tokenizing:
            super().__init__(**kwargs)
            self._stop = self._renderer.get_stop_sequences()
            self._boundary = self._find_boundary()
            # The tokenizer of the Inkling models has no list of its special texts.
            special = getattr(self._renderer.tokenizer, "get_added_vocab", dict)()
        texts = [re.escape(text) for text in special if len(text.strip()) > 1]
        # (?!) matches nothing.
        any_text = "|".join(texts) or "(?!)"
        # The first character of each of them.
        self._special = re.compile(f"(?=(?:{any_text})).", re.DOTALL)
        self._service = _services.setdefault(service_key(api_base), TinkerService(api_base))
        self._opening: asyncio.Task | None = None

    async def connect(self, gone: Any = None) -> Any:
        """The sampling client, or another in the place of one that is gone.

        Raises what the SDK raises, as for a checkpoint that does not exist.
        """
        if self._sampling_client is gone:
            # One attempt for all trials that wait for it. It goes on if they are cancelled.
            self._opening = self._opening or asyncio.create_task(self._open())
            await asyncio.shield(self._opening)
        return self._sampling_client

    async def _open(self) -> None:
        source = {"model_path": self._model_path}
        if self._model_path is None:
            source = {"base_model": self._model_name}
        try:
            self._sampling_client = await in_thread(self._service.sampling_client, source)
        finally:
            # A task refers to its event loop, and would keep it for good.
            self._opening = None

    async def call(
        self,
        prompt: str,
        message_history: list[Message],
        conversation: Conversation,
        **kwargs: Any,
    ) -> Reply:
        """Sample one reply; its content is text, or a list of parts as soon as the model thinks.

        Raises ContextLengthExceededError when the context has no room for a reply.
        """
        import tinker

        messages = [*message_history, user(prompt)]
        with _tokenizing:
            prompt_ids = self._next_prompt(messages, conversation.goes_on_from)
        room = self._context_limit - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceededError(
                f"{len(prompt_ids)} prompt tokens fill the {self._context_limit} allowed"
            )
        params = tinker.SamplingParams(
            max_tokens=min(self._max_tokens, room),
            temperature=self._temperature,
            stop=self._stop,
            seed=self._seed,
            top_k=self._top_k,
            top_p=self._top_p,
        )
        # Unchecked, for pydantic would look at each token of a long prompt in each turn.
        chunk = tinker.EncodedTextChunk.model_construct(tokens=prompt_ids)
        try:
            response = await self._sample(
                prompt=tinker.ModelInput(chunks=[chunk]),
                num_samples=1,
                sampling_params=params,
            )
        except Exception as error:
            if says_context_is_full(error):
                raise ContextLengthExceededError(str(error)) from error
            raise
        sequence = response.sequences[0]
        completion_ids = list(sequence.tokens)
        cut_off = sequence.stop_reason == "length"
        try:
            with _tokenizing:
                content = self._parse(prompt_ids, completion_ids, cut_off)
        except Exception as error:
            # What no template writes is neither an answer nor commands.
            self._logger.warning("a reply that the renderer cannot read: %s", error)
            content = ""
        usage = UsageInfo(
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(completion_ids),
            cache_tokens=0,
            cost_usd=0.0,
        )
        return Reply(
            content=content,
            usage=usage,
            prompt_token_ids=prompt_ids,
            completion_token_ids=completion_ids,
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            cut_off=cut_off,
        )

    async def _sample(self, **request: Any) -> Any:
        """Sample. Once more, on a new session, where the service has ended the last."""
        client = await self.connect()
        try:
            return await finished(client.sample(**request))
        except Exception as error:
            if not is_gone(error):
                raise
        client = await self.connect(gone=client)
        return await finished(client.sample(**request))

    def _next_prompt(
        self,
        messages: list[Message],
        goes_on_from: list[int],
    ) -> list[int]:
        """The ids of the last turn as sampled, and what the template puts around the new message.

        Rendered from the messages where that cannot be trusted: in the first turn, after an edit
        of the history, and after a reply that has no stop token or another than the template's.
        """
        if goes_on_from and self._boundary:
            rendered = self._render([*_PROBE, messages[-1]])
            end = len(self._boundary)
            is_known = rendered[:end] == self._boundary
            # The stop token that was sampled is not repeated.
            if is_known and goes_on_from[-1] == self._boundary[-1]:
                return goes_on_from + rendered[end:]
        return self._render(messages)

    def _find_boundary(self) -> list[int] | None:
        """The tokens of `_PROBE` up to and with the stop token of its reply.

        None if what follows is not the same in a longer conversation.
        """
        short = self._render([*_PROBE, user("d")])
        long = self._render([*_LONGER_PROBE, user("d")])
        # Their common end begins behind "b" and "c".
        n_common = 0
        while short[-1 - n_common] == long[-1 - n_common]:
            n_common += 1
        boundary = short[: len(short) - n_common + 1]
        return boundary if boundary[-1] in self._stop else None

    def _render(self, messages: list[Message]) -> list[int]:
        return self._renderer.build_generation_prompt(messages).to_ints()

    def defused(self, text: str) -> str:
        """Text without special tokens: a zero-width space breaks each of them up."""
        return self._special.sub("\\g<0>\u200b", text)

    def _parse(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        cut_off: bool,
    ) -> str | list[Message]:
        """A reply's content, its thinking in a part of its own or between tags."""
        decode = self._renderer.tokenizer.decode
        decoded = decode(completion_ids)
        # Renderers search for them in time that grows with the square of their number.
        if decoded.count("<think>") + decoded.count("<tool_call>") > 100:
            return "<think>" + decoded.replace("</think>", "")
        # Renderers leave a reply without a stop token as it is, thinking and all: any will do.
        stop = self._stop[0]
        if cut_off and isinstance(stop, int):
            completion_ids = [token for token in completion_ids if token != stop]
            completion_ids.append(stop)
        content = self._renderer.parse_response(completion_ids)[0]["content"]
        text = text_of(content)
        # Many templates open the thinking in the prompt. It may never be closed, or be closed
        # where the renderer does not see it. gpt-oss may be cut off in the header of a message.
        is_opened = decode(prompt_ids[-4:]).rstrip().endswith("<think>")
        may_be_unclosed = "</think>" not in decoded or isinstance(content, str)
        if (is_opened and may_be_unclosed) or text.startswith("<|channel|>"):
            return "<think>" + text.removeprefix("<think>")
        return content


def is_gone(error: Exception) -> bool:
    """Whether a Tinker session, or a checkpoint, does not exist (any more)."""
    # The SDK (0.38) has no class for what a client says that was closed, or one that polls.
    text = re.compile(r"is closed$|polling failed.*code: (404|410)", re.DOTALL)
    return getattr(error, "status_code", None) in (404, 410) or bool(text.search(str(error)))


def says_context_is_full(error: Exception) -> bool:
    """Whether Tinker refused a prompt for its length; the phrases are those of Harbor's client."""
    message = str(error).lower()
    phrases = (
        "context length",
        "context_length",
        "maximum context",
        "token limit",
        "too long",
    )
    return any(phrase in message for phrase in phrases)


async def finished(sampling: Any) -> Any:
    """What `sample` of the Tinker SDK gives: an awaitable from 0.38 on, before that a future."""
    if not inspect.isawaitable(sampling):
        sampling = asyncio.wrap_future(sampling)
    return await sampling


# How the server says that the reply to the current call ended; trials share the client.
_finish_reason = ContextVar("finish_reason", default="")


class LiteLLMMixin:
    """What this file adds to Harbor's LiteLLM: whole replies, and the trial's session id."""

    async def call(
        self,
        prompt: str,
        message_history: list[Message],
        conversation: Conversation,
        **kwargs: Any,
    ) -> Reply:
        """One model call. Raises what Harbor's LiteLLM raises, after its three attempts."""
        session_id = conversation.session_id
        if session_id:
            headers = self._llm_kwargs.get("extra_headers") or {}
            kwargs["extra_headers"] = {**headers, "X-Session-ID": session_id}
            # Closed APIs refuse fields that they do not know, and return no ids either.
            if self._collect_rollout_details:
                kwargs["extra_body"] = {"session_id": session_id}
        _finish_reason.set("")
        try:
            response = await super().call(prompt, message_history, **kwargs)
        except OutputLengthExceededError as cut:
            # Of the Responses API: the text is all there is.
            return Reply(content=valid_text(cut.truncated_response), cut_off=True)
        reply = Reply(**vars(response), cut_off=_finish_reason.get() == "length")
        # A lone surrogate would fail the next call.
        reply.content = valid_text(reply.content)
        return reply

    def _extract_usage_info(self, response: Any) -> UsageInfo | None:
        # A hook: `call` (Harbor 0.13 to 0.25) looks at finish_reason after this, and a reply that
        # was cut off would become an error there, without its ids and usage.
        choice = response["choices"][0]
        _finish_reason.set(choice["finish_reason"])
        if choice["finish_reason"] == "length":
            choice["finish_reason"] = "stop"
        return super()._extract_usage_info(response)


_API_PROVIDERS = (
    "anthropic",
    "gemini",
    "hosted_vllm",
    "openai",
    "openrouter",
)


def check_model(
    model_name: str | None,
    options: BasicLoopOptions,
) -> None:
    """Raise ValueError where no model is named, or one that cannot be called: no key, no client."""
    if not model_name:
        raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
    provider = model_name.partition("/")[0]
    if options.model_client == "tinker":
        if provider in _API_PROVIDERS and "gpt-oss" not in model_name:
            raise ValueError(f"{model_name} is an API model: set model_client=litellm")
        check_tinker_key()
        return
    # litellm answers itself; and only the OpenAI client wants a key for any server.
    given = options.llm_kwargs or {}
    if (
        f"{provider.upper()}_API_KEY" in os.environ
        or "api_key" in given
        or "mock_response" in given
        or (options.api_base and provider != "openai")
    ):
        return
    from litellm import validate_environment

    for name in validate_environment(model_name)["missing_keys"]:
        # Other credentials, such as a cloud's, can come from places where litellm does not look.
        if name.endswith("_API_KEY"):
            raise ValueError(f"no API key for {model_name}: set {name}")


def check_tinker_key() -> None:
    """Raise ValueError where the Tinker SDK would find no key."""
    has_key = bool(os.environ.get("TINKER_API_KEY"))
    # From 0.38 on a key may also be stored, or printed by a command.
    if not has_key:
        with contextlib.suppress(ImportError):
            from tinker.auth import tinker_has_credentials

            has_key = tinker_has_credentials()
    if not has_key:
        raise ValueError("no API key for Tinker: set TINKER_API_KEY")


# The cache: one client for all trials of an event loop and configuration.


class LoopClients:
    """The clients of one event loop by their configuration, the latest used last."""

    def __init__(self) -> None:
        self._clients: dict[tuple, Any] = {}
        # Weak: a lock refers to its event loop, and would keep it for good.
        self._locks = WeakValueDictionary()

    async def get(
        self,
        key: tuple,
        build: Callable,
    ) -> Any:
        """The client for `key`. One trial builds it (the next, if that fails), the others wait."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            client = self._clients.pop(key, None) or await in_thread(build)
            self._clients[key] = client
        # A training run brings a new checkpoint each step. One that is waited for has a lock.
        for old in list(self._clients)[:-8]:
            if old not in self._locks:
                del self._clients[old]
        return client


# Weak: a closed event loop's clients go with it.
_clients = WeakKeyDictionary()


class TinkerService:
    """The process's session with one Tinker server.

    A thread of the SDK keeps it alive, and it holds about 11 file descriptors.
    """

    def __init__(self, api_base: str | None) -> None:
        self._arguments = {"base_url": api_base} if api_base else {}
        self._lock = threading.Lock()
        self.client: Any = None

    def sampling_client(self, source: dict[str, str]) -> Any:
        """A sampling client, on a new session if the service has ended the last. Blocks."""
        import tinker

        with self._lock:
            if self.client is None:
                self.client = tinker.ServiceClient(**self._arguments)
            client = self.client
        try:
            return self._create(client, source)
        except Exception as error:
            if not is_gone(error):
                raise
        # The session is over, or there is no such checkpoint: a new session tells.
        with self._lock:
            if self.client is client:
                unused = tinker.ServiceClient(**self._arguments)
                try:
                    sampling_client = self._create(unused, source)
                    self.client, unused = unused, client
                    return sampling_client
                finally:
                    start(finish, unused)
        # Another trial was faster.
        return self.sampling_client(source)

    def _create(self, client: Any, source: dict[str, str]) -> Any:
        created = client.create_sampling_client(**source)
        # A future from tinker 0.38 on.
        return created.result() if hasattr(created, "result") else created


# The process's services, by server and key.
_services: dict[tuple, TinkerService] = {}


def service_key(api_base: str | None) -> tuple:
    """What makes two services different: the server and the key."""
    server = api_base or os.environ.get("TINKER_BASE_URL")
    return server, os.environ.get("TINKER_API_KEY")


def finish(client: Any) -> None:
    """Finish a client's session. Blocks while the service is down."""
    client.close("success").result(timeout=5)


def _finish_all() -> None:
    finishing = [start(finish, service.client) for service in list(_services.values())]
    concurrent.futures.wait(finishing, timeout=5)


# Private in the standard library (3.12 to 3.14): by `atexit`, the SDK can start no thread. What is
# registered last runs first, so before the end of the thread pools, which were imported above.
threading._register_atexit(_finish_all)


def start(function: Callable, *args: Any) -> concurrent.futures.Future:
    """Run a function in a daemon thread.

    While Tinker is down its SDK retries for minutes, and Python waits at exit for other threads.
    """
    future = concurrent.futures.Future()
    # From here on it cannot be cancelled, and takes whatever comes.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


async def in_thread(function: Callable, *args: Any) -> Any:
    """Like asyncio.to_thread, but in a daemon thread."""
    return await asyncio.wrap_future(start(function, *args))


# Training data.


@dataclass(frozen=True)
class Trajectory:
    """A finished trial as a trainer sees it. Usage is summed over the task's steps."""

    # Of all steps, in order, with ids and logprobs; none for API models.
    turns: list[Turn]
    # The reward named "reward", or the only one; None: not scored, or several of other names.
    reward: float | None
    # All that the verifier gave.
    rewards: dict[str, float]
    # None: unknown.
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    cost_usd: float | None
    # Wall time of the agent.
    seconds: float | None
    # The `StopReason` of the last step; None for another agent's trial.
    stop_reason: str | None
    task_name: str
    trial_name: str
    # Such as "AgentTimeoutError".
    exception_type: str | None


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`.

    None if the trial failed before it was scored, or has neither tokens nor a score. Raises
    ValueError where ids and logprobs do not align, or a logprob or reward is not finite.
    """
    steps = trial.step_results or [trial]
    contexts = [step.agent_result for step in steps if step.agent_result]
    turns: list[Turn] = []
    for context in contexts:
        for segment in context.rollout_details or []:
            turns += turns_of(segment, trial.trial_name)
    rewards = trial.verifier_result.rewards if trial.verifier_result else None
    rewards = rewards or {}
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise ValueError(f"trial {trial.trial_name}: the reward {name!r} is {value}")
    failures = [part.exception_info for part in (trial, *steps) if part.exception_info]
    if not rewards and (failures or not turns):
        return None

    reward = rewards.get("reward")
    if len(rewards) == 1:
        (reward,) = rewards.values()
    n_prompt, n_cached, n_completion, cost = trial.compute_token_cost_totals()
    if n_prompt is None and turns:
        n_prompt = sum(len(turn.prompt_token_ids) for turn in turns)
    if n_completion is None and turns:
        n_completion = sum(len(turn.completion_token_ids) for turn in turns)
    clocks = [step.agent_execution for step in steps if step.agent_execution]
    spans = [clock.finished_at - clock.started_at for clock in clocks if clock.finished_at]
    metadata = contexts[-1].metadata if contexts else None
    return Trajectory(
        turns=turns,
        reward=reward,
        rewards=rewards,
        prompt_tokens=n_prompt,
        completion_tokens=n_completion,
        cached_tokens=n_cached,
        cost_usd=cost,
        seconds=sum(span.total_seconds() for span in spans) if spans else None,
        stop_reason=(metadata or {}).get("stop_reason"),
        task_name=trial.task_name,
        trial_name=trial.trial_name,
        exception_type=failures[0].exception_type if failures else None,
    )


# Kept for code that was written against its first name.
_trial_to_trajectory = trial_to_trajectory


def turns_of(segment: RolloutDetail, trial_name: str) -> list[Turn]:
    """The turns of a RolloutDetail. Raises ValueError if it cannot be trained on."""
    names = ("prompt_token_ids", "completion_token_ids", "logprobs")
    lists = [segment.get(name) or [] for name in names]
    # Where one list is shorter, a turn has None.
    turns = [Turn(*parts) for parts in itertools.zip_longest(*lists)]
    if not all(turn.is_trainable for turn in turns):
        raise ValueError(
            f"trial {trial_name}: token ids and logprobs are not aligned, or a logprob is not "
            "finite: do not train on them"
        )
    return turns


def to_tinker(trajectory: Trajectory) -> "tinker_cookbook.rl.types.Trajectory":  # noqa: F821
    """For tinker-cookbook's RL functions. Imports torch.

    Every transition has reward 0.0: the trial's goes into `TrajectoryGroup.final_rewards_G`.
    """
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl import types

    transitions = []
    for turn in trajectory.turns:
        is_last = turn is trajectory.turns[-1]
        cut_off = is_last and trajectory.stop_reason == StopReason.MAX_TOKENS
        stop_reason = "length" if cut_off else "stop"
        transition = types.Transition(
            ob=ModelInput.from_ints(turn.prompt_token_ids),
            ac=TokensWithLogprobs(
                tokens=turn.completion_token_ids,
                maybe_logprobs=turn.logprobs,
                stop_reason=stop_reason,
            ),
            reward=0.0,
            episode_done=is_last,
        )
        transitions.append(transition)
    return types.Trajectory(transitions, ModelInput.empty(), trajectory.stop_reason)
