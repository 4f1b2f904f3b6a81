"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B \
      --ak model_path=tinker://...

One model, one conversation, one script a turn. There is no compaction of long conversations, no
native tool calls, no commands side by side: for these write your own loop in `_converse`.

From top to bottom: the options, the record of a turn, the agent with its loop, the commands, the
conversation, what a reply says, what a trial leaves, the three model clients, their cache, training
data. A turn is one model call. A prompt is "exact" where it is sent as token ids that go on from
those of the turn before, as with Tinker and vLLM.
"""

import asyncio
import base64
import contextlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shlex
import threading
import time
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Self
from uuid import uuid4

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.llms.chat import Chat
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.metric import UsageInfo
from harbor.models.trial.result import TrialResult
from markdown_it import MarkdownIt
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

try:
    # Harbor 0.23 and later: BaseAgent parses the options, and does so before any trial starts.
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions
except ImportError:

    class AgentOptions(BaseModel):
        """Nothing of Harbor's own."""

    AgentCapabilities = AgentOptions

__version__ = "0.6.0"


class BasicLoopOptions(
    AgentOptions,
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    hide_input_in_errors=True,
    use_attribute_docstrings=True,
):
    """What `--ak key=value` accepts: the one place where an option and its default stand.

    Neither an error nor `repr` shows `llm_kwargs`, for it may hold an API key.
    """

    model_path: str | None = Field(None, pattern="^tinker://")
    """Tinker checkpoint to sample, tinker://...; default: the base model."""
    renderer_name: str | None = None
    """tinker-cookbook renderer; default: the one recommended for the model."""
    max_tokens: PositiveInt = 512
    """Most tokens that one model call may sample, thinking included."""
    temperature: NonNegativeFloat | None = 1.0
    """Sampling temperature; null leaves it to the client."""
    max_turns: PositiveInt = 1
    """Most model calls; above 1, the bash blocks of a reply are run."""
    max_seconds: PositiveFloat | None = None
    """Seconds after which the loop ends, and the trial is scored."""
    system_prompt: str | None = None
    """System message, verbatim; default: the protocol if max_turns > 1."""
    model_client: Literal["tinker", "litellm"] = "tinker"
    """Tinker, or litellm for API models and servers."""
    api_base: str | None = None
    """Base URL of the model's server; default: the client's own."""
    llm_kwargs: dict = Field({}, repr=False)
    """More arguments of the client: top_p, seed, ..."""
    collect_rollout_details: bool | None = None
    """Record token ids (with api_base: vLLM by ids); default: true for tinker."""
    context_limit: PositiveInt | None = None
    """Most tokens of a conversation; default: the server's, Tinker 32,000."""
    rerender_history: bool = False
    """Tinker, vLLM: render the history anew each turn, as the template would."""
    interleaved_thinking: bool = False
    """Chat endpoints: send the reasoning back with the history, as reasoning_content."""
    session_id: str | None = None
    """Sent with each request to a server, for routers; default: the trial's."""
    session_id_headers: list[str] = ["X-Session-ID"]
    """The headers that carry the session id."""
    command_timeout_sec: PositiveInt = 120
    """Seconds after which a reply's commands are ended."""
    max_output_chars: PositiveInt = 10_000
    """Most command output that the model sees, in bytes."""

    @model_validator(mode="after")
    def _fits_the_client(self) -> Self:
        # Refuses one client's options with the other, and fills in the default that depends on it.
        is_tinker = self.model_client == "tinker"
        if self.collect_rollout_details is None:
            self.collect_rollout_details = is_tinker
        # Not the fields of Harbor 0.25's own AgentOptions: llm_kwargs may hold these.
        ours = {*type(self).model_fields, "model_name"} - AgentOptions.model_fields.keys()
        taken = self.llm_kwargs.keys() & ours
        if taken:
            raise ValueError(f"llm_kwargs holds {', '.join(taken)}: use the option of that name")
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


class StopReason(StrEnum):
    """Why a run ended, under the names of `tinker_cookbook.rl.types.StopReason` where it has them.

    A single-step trial is scored after all but ERROR and Ctrl-C. In a multi-step task Harbor scores
    a step that ended in ERROR, too: such a trial is no training data (see `trial_to_trajectory`).
    """

    # The reply holds no command, or was the one completion asked for.
    COMPLETED = "completed"
    # `max_turns` model calls were made; the commands of the last reply were still run.
    MAX_TURNS = "max_turns"
    # The reply was cut off: at `max_tokens`, the end of the context, or by the server.
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
    """One model call, exactly as sampled: a trial's record is made of these.

    `content` is the answer, `reasoning_content` the thinking before it. `prompt_token_ids` has
    shape [n_prompt], earlier turns included; `completion_token_ids` and `logprobs` (natural) have
    shape [n_completion], the stop token included; None if not given. Tinker's
    logprobs are those of the policy that sampled; vLLM's are the raw model's, before temperature
    and top_p, unless it runs with --logprobs-mode processed_logprobs. `extra` is what else the
    client has of a turn, by name (Tinker: sequence_id; vLLM: routed_experts). A cost of 0.0 dollars
    means unknown.

    A turn that was read back from a trial's result has ids, logprobs and `extra`, but no text.
    """

    content: str = ""
    # Whether the reply is not whole; nothing in it is run.
    cut_off: bool = False
    # Whether the prompt does not begin with the last turn's prompt and completion.
    breaks_prefix: bool = False

    def __post_init__(self) -> None:
        # A lone surrogate would fail the next call, and the record.
        self.content = valid_text(self.content)
        self.reasoning_content = valid_text(self.reasoning_content)
        self.extra = self.extra or {}
        # What the client does not say of its tokens is counted.
        if self.usage is None and self.prompt_token_ids:
            self.usage = UsageInfo(
                prompt_tokens=len(self.prompt_token_ids),
                completion_tokens=len(self.completion_token_ids or []),
                cache_tokens=0,
                cost_usd=0.0,
            )

    @property
    def is_trainable(self) -> bool:
        """Whether ids and logprobs are there, of one length, and finite (a policy may diverge).

        vLLM writes -9999.0 for a logprob that it does not have.
        """
        logprobs = self.logprobs or []
        return (
            bool(self.prompt_token_ids)
            and self.completion_token_ids is not None
            and len(self.completion_token_ids) == len(logprobs)
            and {None, -9999.0}.isdisjoint(logprobs)
            and all(map(math.isfinite, logprobs))
        )


class BasicLoopAgent(BaseAgent):
    """Samples from one model, runs the bash blocks of its replies if asked to, and records it all.

    A trial leaves token counts, cost (None: unknown), `metadata` and one RolloutDetail, whose lists
    have an entry for each trainable `Turn`, on the context; completion.txt, the last reply, and
    trajectory.json, in Harbor's format ATIF, in `logs_dir`.

    Takes the options of `BasicLoopOptions` by keyword, and raises ValueError for a bad one.
    """

    options_model = BasicLoopOptions
    # For `help`: the options and their defaults stand in one place only.
    __signature__ = inspect.signature(BasicLoopOptions)
    # `model_construct`: Harbor 0.23 would refuse the last two.
    capabilities = AgentCapabilities.model_construct(
        atif=True, resume=True, load_atif_trajectory=True, skills=True, mcp_servers=True
    )

    # What the model is told of the loop; {seconds} becomes the time limit of a script.
    protocol: ClassVar[str] = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with \
```bash: the blocks of a reply run as one script, and its exit code and output are the next \
message. Each script starts in a fresh shell (files stay, variables and directory do not) and has \
{seconds} seconds. When the task is done, reply without such a block."""

    def __init__(self, *, model_name: str | None, **kwargs: Any) -> None:
        super().__init__(model_name=model_name, **kwargs)
        self._file_to_load: Path | None = None
        # `--ae KEY=value` comes before the process's environment. `jobs resume` gives what Harbor
        # has saved, where a key is starred: sk-r****456.
        self._given = kwargs.get("extra_env") or {}
        usable = {name: value for name, value in self._given.items() if "****" not in value}
        self._settings = ChainMap(usable, os.environ)
        if not hasattr(BaseAgent, "parse_options"):
            # Harbor 0.13 to 0.22 swallows unknown arguments: here each trial parses the options.
            of_harbor = inspect.signature(BaseAgent.__init__).parameters
            names = kwargs.keys() - of_harbor - {"extra_env", "override_setup_timeout_sec"}
            self.options = self.options_model(**{name: kwargs[name] for name in names})

    @classmethod
    def preflight(cls, kwargs: dict | None = None, env: Any = None) -> None:
        """Called by Harbor 0.23 and later, before any trial, when no model is known yet."""
        if cls.parse_options(kwargs, env).model_client == "tinker":
            check_tinker_key(ChainMap(env or {}, os.environ))

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Build the model client, outside the agent's own time: importing torch takes seconds.

        Raises ValueError for a model that cannot be called, and what the client raises.
        """
        if not self.model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        lost = self._given.keys() - self._settings.keys()
        if lost:
            raise ValueError(f"Harbor saved {', '.join(lost)} with stars: export it, then resume")
        if self.options.model_client == "tinker":
            # But openai/gpt-oss is a model of Tinker's.
            apis = r"(anthropic|gemini|hosted_vllm|openai|openrouter)/(?!.*gpt-oss)"
            if re.match(apis, self.model_name):
                raise ValueError(f"{self.model_name} is an API model: set model_client=litellm")
            check_tinker_key(self._settings)
        await self._shared_llm()

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Solve a task in a new conversation."""
        self._conversation = Conversation(self)
        await self.resume(instruction, environment, context)

    async def load(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Solve a task in a conversation that goes on from the ATIF file `self.load_trajectory`."""
        self._file_to_load = self.load_trajectory
        await self.run(instruction, environment, context)

    async def resume(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Go on with the conversation that `run` began (`run` calls this, too).

        Only this call's turns are recorded. They are on the context and in the files before
        anything is raised.
        """
        conversation = self._conversation
        stop_reason = StopReason.CANCELLED
        try:
            async with asyncio.timeout(self.options.max_seconds) as limit:
                await conversation.begin(instruction)
                if conversation.is_new:
                    await self._introduce(conversation, environment)
                    conversation.is_new = False
                stop_reason = await self._converse(conversation, environment)
        except Exception:
            stop_reason = StopReason.ERROR
            # A client may raise an error of its own when the time is over.
            if not limit.expired():
                raise
            stop_reason = StopReason.ROLLOUT_TIMEOUT
        finally:
            # Where the run has failed, an error of the record's (a full disk) must not hide that.
            is_raised = stop_reason in (StopReason.ERROR, StopReason.CANCELLED)
            with contextlib.suppress(Exception if is_raised else ()):
                self._record(conversation, stop_reason, context)

    async def _converse(
        self, conversation: "Conversation", environment: BaseEnvironment
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
            script = self.script_in(turn.content)
            if script is None:
                return StopReason.COMPLETED

            # Act, and observe.
            conversation.tell(await self._execute(script, environment))
        return StopReason.MAX_TURNS

    async def _introduce(self, conversation: "Conversation", environment: BaseEnvironment) -> None:
        # What the task brings; Harbor loads in the first step only.
        if self._file_to_load:
            await conversation.load(self._file_to_load)
            self._file_to_load = None
        # What may fail comes first, so that nothing is told twice.
        if self.skills_dir:
            listing = _LIST_SKILLS.format(shlex.quote(self.skills_dir))
            listed = await self._execute(listing, environment)
            conversation.tell(f"Skills, to be read before they are used. {listed}")
        for server in self.mcp_servers:
            conversation.tell(f"MCP server: {server.model_dump_json(exclude_none=True)}")

    def script_in(self, reply: str) -> str | None:
        """The bash script that a reply asks to run; None if it asks for nothing.

        A NUL, which no script can hold, stands between blocks: each has to be whole by itself.
        """
        shells = ("bash", "sh", "shell")
        blocks = [text for language, text in fenced_blocks(reply) if language in shells]
        return "\0".join(blocks) if blocks else None

    async def _execute(self, script: str, environment: BaseEnvironment) -> str:
        """Run a script in the environment, never on the host. Returns what the model is told."""
        limit = self.options.command_timeout_sec
        most = self.options.max_output_chars
        mark = uuid4().hex
        call = f"run {mark} {most} {limit} {script.count('\0') + 1}"
        blocks = valid_text(f"\0{script}").replace("\0", f":{mark}:")
        command = f"BASIC_LOOP_RUN={mark} {in_bash(call, blocks)}"
        # Modal takes 65,536 bytes of arguments, and some environments quote the command once more.
        if len(command) > 65_000:
            return "Not run: the script is too long. Split it into smaller ones."
        # What the script and the environment said; nothing: the output was lost.
        texts = []
        try:
            # Three limits: _RUN keeps the script's; ours is for an exec that takes longer; past the
            # environment's Docker raises RuntimeError, which would end the trial.
            async with asyncio.timeout(limit + 30) as timer:
                result = await environment.exec(command, timeout_sec=limit + 90)
            before, *parts = valid_text(result.stdout).split(f":{mark}:")
            # Where _RUN did not run, there is no mark.
            texts = [] if parts else [before]
            with contextlib.suppress(ValueError):
                in_base64, _ = parts
                ends = base64.b64decode(in_base64).split(f"end-of-{mark}".encode())
                _, code, note = ends[-1].split(b" ", 2)
                result.return_code = int(code)
                texts = [ends[0], note.strip()]
        except Exception as error:
            # Some environments raise another error when they are cancelled.
            if not timer.expired() and not isinstance(error, TimeoutError):
                raise
            return f"Exit code: 124\nOutput:\n[no answer; the time limit is {limit} seconds]"
        finally:
            # Cancelled, or it hangs, or what kept the limit was killed: the script would run on,
            # into the next turn or the tests.
            if not texts:
                command = in_bash(f'end_processes "[A-Z]*" {mark}')
                ending = asyncio.wait_for(environment.exec(command, timeout_sec=15), 10)
                # The environment may be gone, and the trial goes on, or ends, for its own reason.
                await asyncio.shield(asyncio.gather(ending, return_exceptions=True))
        lost = ["[the output was lost: what runs the script was killed or written into]"]
        texts = [valid_text(text) for text in [*(texts or lost), result.stderr] if text]
        # What others print has not been cut.
        shown = "\n".join(text[: most + 200].removesuffix("\n") for text in texts)
        return f"Exit code: {result.return_code}\nOutput:\n{shown or '(none)'}"

    def _record(
        self, conversation: "Conversation", stop_reason: StopReason, context: AgentContext
    ) -> None:
        # Puts the run onto the context, then into the files. Raises OSError of these.
        turns = conversation.turns
        totals = Counter()
        for turn in turns:
            totals.update(dict(turn.usage or {}))
        context.n_input_tokens = totals.get("prompt_tokens")
        context.n_output_tokens = totals.get("completion_tokens")
        context.n_cache_tokens = totals.get("cache_tokens")
        # 0.0 is an unknown price, and that of some turns is not the run's.
        is_priced = all(turn.usage and turn.usage.cost_usd for turn in turns)
        context.cost_usd = totals.get("cost_usd") if is_priced else None
        kept = {**conversation.metadata, "stop_reason": stop_reason, "n_episodes": len(turns)}
        if self.options.collect_rollout_details:
            context.rollout_details = rollout_details(turns)
            kept["n_turns_without_ids"] = sum(not turn.is_trainable for turn in turns)
            kept["n_prefix_breaks"] = sum(turn.breaks_prefix for turn in turns)
        # Whatever was put there: what JSON cannot hold would cost the whole job its results.
        text = json.dumps(kept, default=str, skipkeys=True, ensure_ascii=False)
        context.metadata = json.loads(valid_text(text))
        # Without a reply it is empty: an earlier step's, in the same folder, must not be scored.
        write_file(self.logs_dir / "completion.txt", turns[-1].content if turns else "")
        trajectory = atif.Trajectory(
            session_id=conversation.session_id,
            agent={"name": self.name(), "version": __version__, "model_name": self.model_name},
            steps=[{**step, "step_id": n} for n, step in enumerate(conversation.steps, start=1)],
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
        """A new client of this configuration, which any number of conversations call.

        Return any of Harbor's `BaseLLM` here (with model_client=litellm, for tinker wants a key).
        Runs in a thread: importing litellm or torch takes seconds. Raises what the client raises.
        """
        # A copy, for Harbor's LiteLLM writes into what it is given.
        options = self.options.model_copy(deep=True)
        model = self.model_name
        provider = options.model_client
        if provider == "litellm":
            import litellm

            # Else it prints a list of providers for each name that it does not know.
            litellm.suppress_debug_info = True
            # For a name that litellm does not know, llm_kwargs may name the provider.
            with contextlib.suppress(litellm.BadRequestError):
                model, provider, *_ = litellm.get_llm_provider(model)

        def setting(name: str) -> str | None:
            return self._settings.get(f"{provider.upper()}_{name}")

        base = options.api_base or setting("BASE_URL") or setting("API_BASE")
        if base and provider in ("openai", "hosted_vllm"):
            # A server at a bare http://host:port has its API under /v1; no public one is so.
            base = re.sub(r"(//[^/]+:\d+)/?\Z", r"\1/v1", base)
        same = {"max_tokens", "temperature", "context_limit", "model_path", "renderer_name"}
        arguments = {
            "api_key": setting("API_KEY"),
            **options.llm_kwargs,
            **options.model_dump(include=same),
            "model_name": self.model_name,
            "api_base": base,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if provider == "tinker":
            return TinkerClient(**arguments)
        # gpt-oss' template refuses a history of its own headers.
        if options.collect_rollout_details and base and "gpt-oss" not in model:
            client = VllmClient(**arguments | {"model_name": model})
            # A worker thread has no event loop yet.
            if asyncio.run(client.connect()):
                return client
            self.logger.warning("the server has no /tokenize: prompts are not exact")
        return chat_client(**arguments, collect_rollout_details=options.collect_rollout_details)

    @property
    def _cache_key(self) -> tuple:
        # All that makes two clients different, also the options that a subclass adds.
        options = self.options.model_dump(exclude=_OPTIONS_OF_A_TRIAL)
        return (type(self), self.model_name, repr(options), repr(self._given), _given_service)

    async def _shared_llm(self, gone: Any = None) -> Any:
        # One trial builds the client, in a thread (the next, if that fails), and another one when
        # that is gone; all others share it.
        key = (asyncio.get_running_loop(), self._cache_key)
        place = _places.setdefault(key, SimpleNamespace(client=None, lock=asyncio.Lock()))
        async with place.lock:
            if place.client in (None, gone):
                place.client = await asyncio.to_thread(self._build_llm)
                # Waiting places stay, and this one, which others may have dropped meanwhile.
                _places[key] = place
                built = [one for one, other in list(_places.items()) if other.client]
                for oldest in built[:-32]:
                    _places.pop(oldest, None)
            return place.client


# Options that trials which share a client may have as they like.
_OPTIONS_OF_A_TRIAL = {
    "command_timeout_sec",
    "interleaved_thinking",
    "max_output_chars",
    "max_seconds",
    "max_turns",
    "rerender_history",
    "session_id",
    "session_id_headers",
    "system_prompt",
}

# Harbor 0.20 to 0.22 looks for these; inside the class later ones would warn.
BasicLoopAgent.SUPPORTS_RESUME = BasicLoopAgent.SUPPORTS_LOAD_ATIF_TRAJECTORY = True

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


# `run MARK BYTES SECONDS N` runs a script inside the environment. This text, and then the script's
# N blocks, each after a :MARK:, come in base64 by $BASIC_LOOP_TEXT: no argument holds them, so no
# `pgrep -f` finds them. The output goes back in base64, which any environment can decode, between
# two marks, so that it can be told from what others print; only BYTES of it cross `exec`. No file
# is written:
#
#     :3f2a:eQp5CnkKeQp5CnkKeQpb(...):3f2a:
#
# The line end-of-3f2a, with the exit code and what ended the script, follows its last one. There
# `sed` stops, though a process in the background may keep the pipe open: for it `cat` reads on.
#
# What a script starts has the mark in its environment, as BASIC_LOOP_SCRIPT, also what left its
# process group; what runs it has BASIC_LOOP_RUN.
#
# Seen on bash 4.4 to 5.3. Before 5.1 a shell can wait for its last process substitution only, and
# pipelines within the last part of a pipeline spoil PIPESTATUS. `read -t` of what the script writes
# would lose what comes as its time is over.
_SOURCE = r"""syntax() { LC_ALL=C; eval "set -n; $1" 2>&1; }
# It stays in the first line: bash counts a block's lines from where it is evaluated.

exec 2>/dev/null
export -n BASIC_LOOP_RUN BASIC_LOOP_TEXT

end_processes() {
  for _ in 1 2 3; do
    pids=$(grep -ls "BASIC_LOOP_$1=$2" /proc/[0-9]*/environ | cut -d/ -f3)
    [ -n "$pids" ] || break
    # All stand first: else a shell would go on to its next command when the last one is killed.
    kill -STOP $pids
    kill -9 $pids
  done
}

decoded() {
  printf %s "$text" | base64 -d
}

# The last line: exit code, and what ended the script. Of one length, for the tail is cut with it.
end_with() {
  printf "$end %-3s %-60s\n" $1 "$2"
}

report() {
  exec 6< <(run_script)
  runner=$!
  # Bytes, not characters; and to load a locale is a tenth of what a short script costs.
  export LC_ALL=C
  # Room for the last line, too: three lines of base64, each of 57 bytes.
  room=$((most + 171))
  exec 5< <(exec head -c $room <&6)
  reader=$!
  # The bracket: so a script that lists all processes does not print the line.
  sed "/[e]nd-of-$mark/q" <&5 | text=$(base64)
  if [ ${#text} -ge $((room / 57 * 77)) ]; then
    end_processes SCRIPT $mark
    text=$({ decoded; end_with 137 "[ended: it wrote more than $most bytes]"; } | base64)
  fi
  # The head, and the tail with the line that shows the end.
  half=$((shown / 2)) rest=$((shown - shown / 2 + ${#end} + 66))
  left_out=0
  if [ ${#text} -gt $shown ]; then left_out=$(($(decoded | wc -c) - half - rest)); fi
  if [ $left_out -gt 0 ]; then
    text=$({
      decoded | head -c $half
      printf "\n[... $left_out bytes left out ...]\n"
      decoded | tail -c $rest
    } | base64)
  fi
  printf %s "$text"
  # What is behind the last line. A process in the background may go on to write.
  read -t 0.1 -N 200000 <&6
  if [ $? != 1 ]; then cat <&6 >/dev/null & fi
  # Else each script would leave zombies.
  kill -9 $reader
  wait $reader $runner
}

watch() {
  read -t $limit
  case $? in
    # The script has ended.
    0) ;;
    # What runs it was killed.
    1) end_processes SCRIPT $mark ;;
    *)
      end_processes SCRIPT $mark
      # A script can stop what runs it.
      kill -CONT $runner
      read
      exit 1
  esac
}

read_blocks() {
  script= refused=
  # From the last to the first, and in bytes, for so bash finds them at once.
  local LC_ALL=C text=$BASIC_LOOP_TEXT
  for ((; n_blocks > 0; n_blocks--)); do
    before=${text%":$mark:"*}
    block=${text:${#before}+${#mark}+2}
    text=$before
    script=$block$'\n\n'$script
    # Only what is not whole is refused: what else is no syntax here may be some when it is run, as
    # with extglob. In front of a backtick is what bash says, behind it what the script does.
    said=$(syntax "$block")
    case ${said%%\`*} in
      *"unexpected EOF"* | *"unexpected end of file"* | *"delimited by end-of-file"*)
        refused="[nothing was run: a block is not whole: line ${said#*line }]"
    esac
  done
}

run_script() {
  if [ -n "$refused" ]; then
    printf "%s\n" "$refused"
    code=2
  else
    runner=$BASHPID
    exec 4> >(watch >/dev/null)
    # bash 5.3 ignores them in what it runs in the background.
    trap - INT QUIT
    BASIC_LOOP_SCRIPT=$mark BASIC_LOOP_TEXT=$script \
      bash -c 'export -n BASIC_LOOP_TEXT; eval -- "$BASIC_LOOP_TEXT"' </dev/null 2>&1 4>&-
    code=$?
    echo >&4
    wait $!
    [ $? != 1 ] || code=124 why="[ended: the time limit of $limit seconds was reached]"
  fi
  end_with $code "$why"
  # Pushes the last line out of the buffer of `head`; and busybox' `sed` stops when it has another.
  printf "\n%65536s"
  exit $code
}

run() {
  mark=$1 shown=$2 limit=$3 n_blocks=$4 most=4000000 end=end-of-$1 why=
  read_blocks
  printf ":$mark:"
  report
  code=$?
  printf ":$mark:"
  exit $code
}
"""
# To read the comments, too, would cost each script 1 % more.
_RUN = re.sub(r"(?m)^ *#.*\n", "", _SOURCE)


# Prints each skill's place, and its frontmatter: its name and what it is for.
_LIST_SKILLS = """\
cd -- {} || exit
for file in */SKILL.md; do
  [ -f "$file" ] && printf '\\n%s\\n' "$PWD/$file" || continue
  sed -n '1!{{/^---/q;p;}}' "$file" | head -c 2000
done
"""


def in_bash(call: str, blocks: str = "") -> str:
    """The command that calls a function of _RUN."""
    text = base64.b64encode(f"{_RUN}{call}; exit\n{blocks}".encode()).decode()
    # lastpipe saves a process for each pipe into a variable. An image's BASH_ENV may set anything.
    sets = "set +efmu; shopt -s lastpipe"
    decodes = "printf %s $BASIC_LOOP_TEXT | BASIC_LOOP_TEXT=$(LC_ALL=C base64 -d)"
    return f"BASIC_LOOP_TEXT={text} exec bash -c '{sets}; {decodes}; eval \"$BASIC_LOOP_TEXT\"'"


def valid_text(text: str | bytes | list[atif.ContentPart] | None) -> str:
    """Text that tokenizers and files accept: lone surrogates are replaced, None becomes "".

    Of the parts of a message in ATIF what is no text is named.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if isinstance(text, list):
        text = "\n".join(part.text or f"[{part.type} left out]" for part in text)
    return (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# The conversation: Harbor's Chat, with a record of its turns.


class Conversation(Chat):
    """Harbor's Chat for one trial, and its record. (Clients serve many trials at once.)"""

    def __init__(self, agent: BasicLoopAgent) -> None:
        options = agent.options
        # Chat has a reply from the `call` below.
        super().__init__(model=self, interleaved_thinking=options.interleaved_thinking)
        self.agent = agent
        # Any of Harbor's; another event loop has another.
        self.client = None
        # Harbor 0.13 gives a trial no id.
        self.session_id = options.session_id or getattr(agent, "session_id", None) or uuid4().hex
        # Until it has been told what the task brings.
        self.is_new = True
        # Of a run: its turns, its steps in ATIF, and what else is to be kept of it.
        self.turns: list[Turn] = []
        self.steps = []
        self.metadata = {}
        system = valid_text(options.system_prompt)
        if options.system_prompt is None and options.max_turns > 1:
            system = agent.protocol.replace("{seconds}", str(options.command_timeout_sec))
        if system:
            self.messages.append({"role": "system", "content": system})
            self.steps.append({"source": "system", "message": system})
        # What the model was not yet told: the parts of steps that hold it.
        self._unsent = []
        # After the last turn: the messages, and the ids and number of their tokens.
        self._as_recorded = []
        self._last_ids = []
        self._n_tokens = 0
        # When the call, or the command, that now takes its time began.
        self._since = 0.0

    async def begin(self, instruction: str) -> None:
        """Start a run: after what it was not yet told, the model is told this."""
        if self.turns:
            self.steps = [step for step in self.steps if step["source"] == "system"]
        self.turns = []
        self.metadata = {}
        self.steps.append({"source": "user", "message": valid_text(instruction)})
        self._unsent.append(self.steps[-1])
        self.client = await self.agent._shared_llm()

    def tell(self, text: str) -> None:
        """Have the model told this next; where prompts are exact, special tokens stay text."""
        told = {"content": valid_text(text)}
        self.steps[-1].setdefault("observation", {"results": []})["results"].append(told)
        self._unsent.append(told)
        # Before the first reply there was no command.
        if self.turns:
            self._take_time("command_exec_times_msec")

    async def call(self, **request: Any) -> Turn:
        """One model call; where a session with Tinker is over, all trials get a new client.

        Raises ContextLengthExceededError where the context is full, and what the client raises.
        """
        for n_replaced in range(3):
            try:
                return Turn(**vars(await self.client.call(**request)))
            except OutputLengthExceededError as cut:
                # The text is all there is; the server's chain of responses lacks it.
                self.reset_response_chain()
                return Turn(content=cut.truncated_response, cut_off=True)
            except Exception as error:
                is_tinker = self.agent.options.model_client == "tinker"
                if n_replaced == 2 or not (is_tinker and session_is_gone(error)):
                    raise
                # It may have another trial's new client, whose session is over, too.
                self.client = await self.agent._shared_llm(gone=self.client)

    async def sample(self) -> Turn:
        """Send what was not yet sent, and record the reply.

        Raises ContextLengthExceededError where the context is full, RuntimeError where there is
        nothing to send, or ids were asked for and none came, and what the client raises.
        """
        if not self._unsent:
            raise RuntimeError("there is nothing to send: `tell` the model something first")
        options = self.agent.options
        is_edited = self.messages != self._as_recorded
        if not is_edited and self._n_tokens >= (options.context_limit or math.inf):
            raise ContextLengthExceededError(f"the conversation has {self._n_tokens} tokens")
        is_exact = isinstance(self.client, ExactClient)
        for told in self._unsent:
            # An instruction may have special tokens of its own; elsewhere they are the server's.
            if is_exact and "content" in told:
                told["content"] = await self.client.defused(told["content"])
        prompt = "\n\n".join(told.get("content", told.get("message")) for told in self._unsent)
        headers = options.llm_kwargs.get("extra_headers") or {}
        ours = dict.fromkeys(options.session_id_headers, self.session_id)
        request = {"extra_headers": headers | ours}
        # Closed APIs refuse fields that they do not know, and return no ids either.
        if options.collect_rollout_details:
            request["extra_body"] = {"session_id": self.session_id}
        if is_exact:
            starts_anew = is_edited or options.rerender_history
            request["goes_on_from"] = [] if starts_anew else self._last_ids
        self._since = time.monotonic()
        return self._append(await self.chat(prompt, **request))

    def _append(self, turn: Turn) -> Turn:
        # Completes a reply's turn and records it: the only place that does.
        self._take_time("api_request_times_msec")
        # What the server calls reasoning is all of it, but for tags that the content begins with.
        content = "<think></think>" * bool(turn.reasoning_content) + turn.content
        thinking, turn.content = split_thinking(content, isinstance(self.client, ExactClient))
        turn.reasoning_content += thinking
        prompt_ids, ids = turn.prompt_token_ids, turn.completion_token_ids
        if prompt_ids:
            turn.breaks_prefix = prompt_ids[: len(self._last_ids)] != self._last_ids
            self._last_ids = prompt_ids + (ids or [])
        self.turns.append(turn)
        self._unsent.clear()
        self._as_recorded = [dict(one) for one in self.messages]
        metrics = dict(turn.usage or {})
        self._n_tokens = metrics.get("prompt_tokens", 0) + metrics.get("completion_tokens", 0)
        metrics["cached_tokens"] = metrics.pop("cache_tokens", None)
        # 0.0 is an unknown price.
        metrics["cost_usd"] = metrics.get("cost_usd") or None
        step = {
            "source": "agent",
            "message": turn.content,
            "reasoning_content": turn.reasoning_content or None,
            "timestamp": datetime.now(UTC).isoformat(),
            "metrics": metrics,
        }
        self.steps.append(step)
        if self.agent.options.collect_rollout_details:
            is_first = len(self.turns) == 1
            metrics |= {
                # Those of all turns would let the file grow with the square of the turns.
                "prompt_token_ids": prompt_ids if is_first else None,
                "completion_token_ids": ids,
                # JSON has no NaN.
                "logprobs": turn.logprobs if turn.is_trainable else None,
            }
            # Later turns without ids are only counted.
            if is_first and (ids is None or (ids and turn.logprobs is None)):
                raise RuntimeError(
                    "collect_rollout_details=true, but the server returned no token ids with "
                    "logprobs"
                )
        return turn

    def _take_time(self, name: str) -> None:
        now = time.monotonic()
        self.metadata.setdefault(name, []).append(round(1000 * (now - self._since), 1))
        self._since = now

    async def load(self, path: Path) -> None:
        """Put an earlier conversation, a file in ATIF, before what the model was not yet told.

        Calls of tools become text of their step. Raises ValueError for any other file.
        """
        try:
            text = await asyncio.to_thread(path.read_bytes)
            steps = atif.Trajectory.model_validate_json(text).steps
        except ValueError as error:
            raise ValueError(f"{path} is no trajectory in ATIF: {error}") from error
        said = []
        for step in steps:
            # The files of pictures are not copied.
            step.message = valid_text(step.message)
            step.is_copied_context = True
            calls = [call.model_dump_json(exclude_none=True) for call in step.tool_calls or []]
            role = "assistant" if step.source == "agent" else step.source
            said.append({"role": role, "content": "\n".join([step.message, *calls])})
            for result in step.observation.results if step.observation else []:
                result.content = valid_text(result.content)
                said.append({"role": "user", "content": result.content})
        # One system message, ours behind theirs, and roles that alternate: many templates want it.
        said = sorted(said + self.messages, key=lambda one: one["role"] != "system")
        messages = []
        for role, parts in itertools.groupby(said, key=lambda one: one["role"]):
            text = "\n\n".join(part["content"] for part in parts)
            if role == "user" and isinstance(self.client, ExactClient):
                text = await self.client.defused(text)
            messages.append({"role": role, "content": text})
        # All at once, for `resume` does it again where it failed.
        if messages[-1]["role"] == "user":
            self._unsent.insert(0, messages.pop())
        self.messages[:] = messages
        self.steps[:0] = [step.model_dump(exclude={"metrics"}) for step in steps]


# What a reply says.

# What opens and closes thinking: most models', Mistral's, Seed-OSS', Cohere's. Another pair of tags
# goes into all three patterns.
_OPENING = r"<think>|\[THINK\]|<seed:think>|<\|START_THINKING\|>"
_CLOSING = r"</think>|\[/THINK\]|</seed:think>|<\|END_THINKING\|>"
# Each is closed by its own, or the text's end.
_THOUGHT = r"""(?xs) \s* (?: <think> (.*?) (?: </think> | \Z )
    | \[THINK\] (.*?) (?: \[/THINK\] | \Z )
    | <seed:think> (.*?) (?: </seed:think> | \Z )
    | <\|START_THINKING\|> (.*?) (?: <\|END_THINKING\|> | \Z ) )"""
# Fenced blocks, to their end or that of the text, inline code, and the tags outside of them.
_TAGS = rf"""(?xms) ^[-*+.)\d \t]*(```|~~~) .*? (?: ^[ \t]*\1 | \Z %s ) | (?<!`)(`++)[^`\n]+\2(?!`)
    | (?P<opening> {_OPENING} ) | (?P<closing> {_CLOSING} )"""


def split_thinking(text: str, prompt_is_known: bool = False) -> tuple[str, str]:
    """The thinking and the answer of a reply.

    What tags at its start open is thinking, to the reply's end where it is never closed. Without
    them the prompt may have opened it, or the model have left that out: then the first closing tag
    outside of code closes it. Any other tag is text.

    Where it is not known that the prompt opened nothing, a closing tag at a line's start counts in
    a fenced block, too: thinking may stop inside one.
    """
    thinking = ""
    answer = text
    while opened := re.match(_THOUGHT, answer):
        thinking += opened[opened.lastindex]
        answer = answer[opened.end() :]
    if answer != text:
        return thinking, answer.lstrip()
    ends = "" if prompt_is_known else rf"|(?=^[ \t]*(?:{_CLOSING}))"
    for found in re.finditer(_TAGS % ends, text):
        if found["closing"]:
            return text[: found.start()], text[found.end() :].lstrip()
        if found["opening"]:
            break
    return "", text


# Where a message of gpt-oss or of Inkling ends; elsewhere such a mark is quoted.
_HEADER_BEGINS = r"\s*(?:to=\S{1,200}\s*)?<\|(?:channel|start|message_model)\|>"
_MESSAGE_ENDS = rf"<\|(?:end|call|return|end_message)\|>(?={_HEADER_BEGINS}|\s*\Z)"


def tagged(text: str) -> str:
    """A reply that is a sequence of messages with headers, its thinking in tags; others unchanged.

    All but the answer's messages is thinking; a call of a tool ("to=") is no answer.

    gpt-oss: <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi
    Inkling: <|message_model|><|content_thinking|>hm<|end_message|><|message_model|>
    <|content_text|>hi<|end_message|>
    Both become <think>hm</think>hi.
    """
    if not re.match(_HEADER_BEGINS, text):
        return text
    thinking = answer = ""
    for part in re.split(_MESSAGE_ENDS, text):
        header, body = re.match(r"(?s)(.*?<\|(?:message|content_\w+)\|>|.*)(.*)", part).groups()
        if "to=" not in header and re.search("final|commentary|content_text", header):
            answer += body
        else:
            thinking += body
    # A tag that the thinking quotes would end it.
    return f"<think>{thinking.replace('</think>', '</ think>')}</think>{answer}"


# What a trial leaves.

# The lists of a RolloutDetail, each with an entry a turn, are named as a turn's own.
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def rollout_details(turns: list[Turn]) -> list[dict] | None:
    """One Harbor RolloutDetail, an entry per turn in each list; None without any ids.

    Turns that cannot be trained on are left out whole, for a piece of one would misalign all that
    follow. Where a turn's `extra` lacks a name, its entry is None.
    """
    kept = [turn for turn in turns if turn.is_trainable]
    detail = {name: [getattr(turn, name) or [] for turn in kept] for name in _IDS}
    names = {name for turn in kept for name in turn.extra}
    if names:
        detail["extra"] = {name: [turn.extra.get(name) for turn in kept] for name in names}
    return [detail] if kept else None


def write_file(path: Path, text: str) -> None:
    """Put a file at `path`, whatever lies there. Raises OSError if that cannot be done.

    With Docker the folder is the container's /logs/agent, where a command may have put a link, a
    pipe or a folder of this name: nothing there is opened, and a folder is moved aside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        # Nobody can have put a link at this name.
        fresh.write_text(text, encoding="utf-8")
        if path.is_dir() and not path.is_symlink():
            path.rename(f"{fresh}.aside")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


# The three model clients: two send token ids, so that a prompt is exact; all else is Harbor's.

Ids = list[int]

# What a server says of a reply that is whole; else it is length, abort, content_filter, ...
WHOLE = ("stop", "tool_calls", "function_call")


class ExactClient:
    """Prompts that begin with the tokens of the turn before, as they were sampled.

    A client adds `render` (messages to the ids of the template's view of them, and the text of
    their end), `generate` (a prompt's ids to a Turn), `special_texts` (those in a text that become
    one token each), and the most tokens of a conversation, `context_limit`, and of a reply,
    `max_tokens`.
    """

    # Whether a prompt's end may depend on the system message: of a server's template nobody knows.
    probes_system = True
    # The tokens of a probe up to the end of its reply; see `next_prompt`. () is equal to no list.
    _start: Ids = ()

    async def call(
        self, prompt: str, message_history: list = (), goes_on_from: Ids = (), **request: Any
    ) -> Turn:
        """Sample a reply to these messages.

        `goes_on_from` are the ids of the history, as sampled; none: it is rendered.

        Raises ContextLengthExceededError when the context has no room for a reply, and what the
        client raises.
        """
        messages = [*message_history, {"role": "user", "content": prompt}]
        prompt_ids, end = await self.next_prompt(messages, goes_on_from)
        room = self.context_limit - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceededError(f"the prompt fills the context: {len(prompt_ids)}")
        try:
            turn = await self.generate(prompt_ids, min(self.max_tokens, room), **request)
        except Exception as error:
            if says_context_is_full(error):
                raise ContextLengthExceededError(str(error)) from error
            raise
        # Where the template has opened thinking, the reply begins in it.
        opened = re.search(rf"({_OPENING})\s*\Z", end)
        turn.content = (opened[1] if opened else "") + tagged(turn.content)
        return turn

    async def defused(self, text: str) -> str:
        """Text without special tokens: a zero-width space breaks each of them up."""
        for special in await self.special_texts(text):
            # Also where two of them overlap.
            if special in text:
                text = re.sub(f"(?s)(?={re.escape(special)}).", "\\g<0>\u200b", text)
        return text

    async def next_prompt(self, messages: list[dict], goes_on_from: Ids) -> tuple[Ids, str]:
        """The ids of the last turn as sampled, and what the template puts behind a reply.

        A probe shows that: a short conversation that ends in the new message.

            goes_on_from <|im_start|> user hi <|im_end|> <|im_start|> assistant hello <|im_end|>
            the probe    ... <|im_start|> assistant b <|im_end|> <|im_start|> user NEW ...

        What stands behind its reply "b" begins with the stop token, which is not repeated. Another
        probe, with another reply, has the same at its end: so it is found, and what stands before
        it is kept for as long as probes begin with it (a template may show the date).

        All is rendered from the messages where that cannot be trusted: in the first turn, after an
        edit of the history, and after a reply without the template's stop token.
        """
        if goes_on_from:
            said = [one for one in messages[:1] if self.probes_system and one["role"] == "system"]
            said.append({"role": "user", "content": "a"})
            reply = {"role": "assistant", "content": "b"}
            ids, end = await self.render([*said, reply, messages[-1]])
            if ids[: len(self._start)] != self._start:
                other, _ = await self.render([*said, {**reply, "content": "c"}, messages[-1]])
                # It takes any lists.
                tail = os.path.commonprefix([ids[::-1], other[::-1]])  # noqa: RUF071
                self._start = ids[: len(ids) - len(tail)]
            tail = ids[len(self._start) :]
            # Inkling's template closes the message before it stops: two tokens were sampled.
            for n_sampled in (1, 2):
                if goes_on_from[-n_sampled:] == tail[:n_sampled]:
                    return goes_on_from + tail[n_sampled:], end
        return await self.render(messages)


def says_context_is_full(error: Exception) -> bool:
    """Whether a prompt was refused for its length; the phrases are those of Harbor's clients.

    Only an error in what was asked is a prompt's: a maintenance may "take too long", too.
    """
    is_user_error = str(getattr(error, "category", "")) == "user"
    is_bad_request = getattr(error, "status_code", None) in (400, 413, 422)
    phrases = "(?i)context length|context_length|maximum context|token limit|too long"
    return (is_user_error or is_bad_request) and bool(re.search(phrases, str(error)))


# A tokenizer is shared by all threads, and raises "Already borrowed" when two use it at once.
_tokenizing = threading.Lock()


class TinkerClient(ExactClient):
    """Tinker, with the renderer that Harbor's TinkerLLM finds for a model.

    TinkerLLM's own `call` passes a cut-off reply off as complete (Harbor 0.13 to 0.24) or drops its
    ids (0.25), and each TinkerLLM opens a session of its own.
    """

    # No renderer asks, and to tokenize it again each turn takes a fifth of a turn's CPU.
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

        # Outside the lock, for it takes seconds; the cookbook keeps what it has loaded.
        get_tokenizer(model_name)
        with _tokenizing:
            # Private, and the same in Harbor 0.13 to 0.25.
            self._renderer = TinkerLLM(model_name, renderer_name=renderer_name)._renderer
            # The tokenizer of the Inkling models has no list of its special texts, and needs none.
            special = getattr(self._renderer.tokenizer, "get_added_vocab", dict)()
            stop = self._renderer.get_stop_sequences()
        self._special_texts = [text for text in special if len(text.strip()) > 1]
        self.context_limit = context_limit
        self.max_tokens = max_tokens
        self._params = tinker.SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        source = {"model_path": model_path} if model_path else {"base_model": model_name}
        if record_stability_info:
            source["record_stability_info"] = True
        self._sampling_client = open_sampling_client(source, api_base, api_key)

    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        in_parts = []
        for one in messages:
            if one["role"] == "assistant":
                thinking, text = split_thinking(one["content"], prompt_is_known=True)
                parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
                one = {"role": "assistant", "content": parts if thinking else text}
            in_parts.append(one)
        with _tokenizing:
            try:
                prompt = self._renderer.build_generation_prompt(in_parts)
            except ValueError:
                # llama3 and role_colon know of no thinking.
                prompt = self._renderer.build_generation_prompt(messages)
            ids = prompt.to_ints()
            return ids, self._renderer.tokenizer.decode(ids[-8:])

    async def special_texts(self, text: str) -> list[str]:
        return self._special_texts

    async def generate(self, prompt_ids: Ids, max_tokens: int, **_: Any) -> Turn:
        import tinker

        # Unchecked, for pydantic would look at each token of a long prompt in each turn.
        chunk = tinker.EncodedTextChunk.model_construct(tokens=prompt_ids)
        sampling = self._sampling_client.sample(
            prompt=tinker.ModelInput(chunks=[chunk]),
            num_samples=1,
            sampling_params=self._params.model_copy(update={"max_tokens": max_tokens}),
        )
        if not inspect.isawaitable(sampling):
            # A future of another kind before SDK 0.38.
            sampling = asyncio.wrap_future(sampling)
        response = await sampling
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

    def _text_of(self, ids: Ids) -> str:
        # A reply's text up to its stop token, or stop text (role_colon's).
        stop = self._params.stop
        ends = {*stop, self._renderer.tokenizer.eos_token_id}
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        try:
            with _tokenizing:
                text = self._renderer.tokenizer.decode(ids)
        except Exception:
            # What no tokenizer can read is neither an answer nor commands.
            return ""
        return text.partition(stop[0])[0].removeprefix(" ") if isinstance(stop[0], str) else text


class VllmClient(ExactClient):
    """vLLM by token ids: /tokenize renders, /v1/completions samples (seen on 0.32).

    What `__init__` does not name goes into each request. `model_info` has prices, as litellm's.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_tokens: int,
        api_base: str,
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
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.context_limit = context_limit
        self.max_tokens = max_tokens
        self._prices = model_info or {}
        self._body = body | (extra_body or {}) | {"model": model_name}
        # What the chat endpoint would give the template.
        self._template = dict(self._body.get("chat_template_kwargs") or {})
        if "reasoning_effort" in self._body:
            self._template.setdefault("reasoning_effort", self._body["reasoning_effort"])
        self._server = AsyncOpenAI(
            base_url=api_base.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            # A connection that was kept would belong to the event loop that opened it.
            default_headers={**(extra_headers or {}), "Connection": "close"},
            http_client=DefaultAsyncHttpxClient(verify=ssl_verify),
        )

    async def connect(self) -> bool:
        """Whether the server tokenizes. Takes its limit of the context over, too.

        Raises openai.OpenAIError for any answer but that there is no such thing.
        """
        try:
            answer = await self._tokenize(messages=[{"role": "user", "content": "a"}])
            self.context_limit = min(self.context_limit, int(answer["max_model_len"]))
            return bool(answer["tokens"] and answer["token_strs"])
        except (LookupError, TypeError, ValueError):
            # A gateway may answer anything to what it does not know.
            return False
        except Exception as error:
            if getattr(error, "status_code", None) in (400, 404, 405, 422):
                return False
            raise

    async def _tokenize(self, **body: Any) -> dict:
        body |= {"model": self._body["model"], "return_token_strs": True}
        return await self._server.post(
            "/tokenize",
            cast_to=object,
            body=body,
            # An outage of some seconds, three times a turn, ends no trial.
            options={"timeout": 30, "max_retries": 5},
        )

    async def render(self, messages: list[dict]) -> tuple[Ids, str]:
        answer = await self._tokenize(
            messages=messages, add_generation_prompt=True, chat_template_kwargs=self._template
        )
        # How byte-level tokenizers, and others, show spaces and the ends of lines.
        end = re.sub("Ċ|Ġ|▁|<0x0A>", " ", "".join(answer["token_strs"][-8:]))
        return answer["tokens"], end

    async def special_texts(self, text: str) -> list[str]:
        answer = await self._tokenize(prompt=text, add_special_tokens=False)
        # HTML's tags, which Gemma has as tokens, structure no prompt.
        html = "caption|t(able|head|body|foot|[rdh])|h[1-6]|blockquote|code|strong|em|[biu]|su[bp]"
        # What looks like <|im_end|>, <think> or </s>, [INST], MiniMax' ]~b]; but not <?> or [:].
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
        answer = await self._server.post(
            "/v1/completions",
            cast_to=object,
            body=body,
            options={"headers": request.get("extra_headers") or {}},
        )
        # What is left of it, such as routed_experts, is kept.
        reply = answer["choices"][0]
        turn = Turn(
            content=reply.pop("text"),
            cut_off=reply.pop("finish_reason") not in WHOLE,
            # As the server had it: an option may have cut it.
            prompt_token_ids=reply.pop("prompt_token_ids", None) or prompt_ids,
            completion_token_ids=reply.pop("token_ids", None),
            logprobs=(reply.pop("logprobs", None) or {}).get("token_logprobs"),
            extra=reply,
        )
        cached = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        usage = turn.usage
        usage.cache_tokens = cached.get("cached_tokens") or 0
        usage.cost_usd = usage.prompt_tokens * self._prices.get("input_cost_per_token", 0.0)
        usage.cost_usd += usage.completion_tokens * self._prices.get("output_cost_per_token", 0.0)
        return turn


# How the server says that the reply to the current call ended; trials share the client.
_finish_reason: ContextVar[str] = ContextVar("finish_reason")


def chat_client(*, context_limit: int | None = None, **arguments: Any) -> Any:
    """Harbor's LiteLLM, for whole replies. What is private is the same in Harbor 0.13 to 0.25.

    A limit of the context is the conversation's to keep.
    """
    from harbor.llms.lite_llm import LiteLLM

    class ChatClient(LiteLLM):
        """Defined here, for importing LiteLLM takes seconds."""

        async def call(self, prompt: str, **request: Any) -> Turn:
            """One model call. Raises what Harbor's LiteLLM raises, after its three attempts."""
            _finish_reason.set("stop")
            response = await super().call(prompt, **request)
            return Turn(**vars(response), cut_off=_finish_reason.get() not in WHOLE)

        def get_model_output_limit(self) -> int:
            # Harbor sends it to the Responses API, where the most that the model can is no limit.
            return self._llm_kwargs["max_tokens"]

        def _extract_usage_info(self, response: Any) -> UsageInfo | None:
            # A hook: `call` looks at finish_reason after this, and a reply that was cut off would
            # become an error there, without its ids and usage.
            choice = response["choices"][0]
            # litellm makes a "stop" of what it does not know, and keeps the server's own word.
            fields = getattr(choice, "provider_specific_fields", None) or {}
            native = str(fields.get("native_finish_reason"))
            is_broken = re.search("(?i)abort|error|malformed", native)
            _finish_reason.set("abort" if is_broken else choice["finish_reason"])
            choice["finish_reason"] = "stop"
            return super()._extract_usage_info(response)

    return ChatClient(**arguments)


# The cache: one client for all trials of an event loop and configuration, and Tinker's sessions.

# By event loop and configuration: the client, and the lock under which it is built. The newest 32
# stay, for a training run brings a new checkpoint each step.
_places: dict[tuple, SimpleNamespace] = {}

# The process's sessions with Tinker, by server and key; each holds about 11 file descriptors.
_services: dict[tuple, Any] = {}
_opening = threading.Lock()
_given_service: Any = None


def use_service(service: Any) -> None:
    """Have the trials that follow sample in this `tinker.ServiceClient`; None: in one of our own.

    So sampling and training share a session, which losses need that look at what was recorded
    when sampling. It is never closed or replaced.
    """
    global _given_service
    _given_service = service


def check_tinker_key(settings: Mapping[str, str]) -> None:
    """Raise ValueError where the Tinker SDK would find no key."""
    if settings.get("TINKER_API_KEY") or _given_service:
        return
    # From 0.38 on it may also be stored, or printed by a command.
    with contextlib.suppress(ImportError):
        from tinker.auth import tinker_has_credentials

        if tinker_has_credentials():
            return
    raise ValueError(
        "no API key for Tinker: set TINKER_API_KEY, or model_client=litellm for other models"
    )


def session_is_gone(error: Exception) -> bool:
    """Whether a Tinker session, or a checkpoint, does not exist (any more).

    The SDK (0.38) has no class for what a client says that was closed, or one that polls.
    """
    phrases = r"(?s)is closed$|polling failed.*code: (404|410)"
    has_status = getattr(error, "status_code", None) in (404, 410)
    return has_status or bool(re.search(phrases, str(error)))


def open_sampling_client(source: dict, api_base: str | None, api_key: str | None) -> Any:
    """A sampling client in the process's session, or in a new one if that is over. Blocks.

    Tinker answers alike for a session that is over and for a checkpoint that does not exist: a new
    session takes the old one's place where it opens the checkpoint, else it is closed. Raises what
    the SDK raises.
    """
    import tinker

    def opened_in(service: Any) -> Any:
        created = service.create_sampling_client(**source)
        # A future from SDK 0.38 on.
        return created.result() if hasattr(created, "result") else created

    server = (api_base, api_key)
    with _opening:
        old = _given_service or _services.get(server)
        if old:
            try:
                return opened_in(old)
            except Exception as error:
                if _given_service or not session_is_gone(error):
                    raise
        # None: as the environment says, or the SDK.
        fresh = tinker.ServiceClient(base_url=api_base, api_key=api_key)
        unused = fresh
        try:
            client = opened_in(fresh)
            _services[server] = fresh
            unused = old
            return client
        finally:
            # Gives its descriptors back, without waiting; SDKs before 0.30 cannot.
            if hasattr(unused, "close"):
                unused.close("success")


# Training data.


@dataclass(frozen=True)
class Trajectory:
    """A scored trial as a trainer sees it; rewards, tokens, cost and names are in `trial`."""

    # Of all steps, in order, with ids and logprobs; none for API models.
    turns: list[Turn]
    # The reward named "reward", or the only one. None: not scored, or several of other names.
    reward: float | None
    # The `StopReason` of the last step; None for another agent's trial.
    stop_reason: str | None
    trial: TrialResult


# The exceptions after which Harbor scores on purpose. (0.25: `TrialResult.reward_valid`.)
SCORED_EXCEPTIONS = {"AgentTimeoutError", "NonZeroAgentExitCodeError"}


def trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or from `TrialResult.model_validate_json`.

    None if the trial or one of its steps failed (why is in their `exception_info`; Harbor scores
    such steps all the same), or if it has neither tokens nor a score. Raises ValueError where ids,
    logprobs and `extra` do not align, or a logprob or reward is not finite.
    """
    steps = trial.step_results or [trial]
    contexts = [step.agent_result or AgentContext() for step in steps]
    rewards = getattr(trial.verifier_result, "rewards", None) or {}
    try:
        turns = list(itertools.chain(*map(turns_of, contexts)))
        if not all(map(math.isfinite, rewards.values())):
            raise ValueError(f"a reward is no number: {rewards}")
    except ValueError as error:
        raise ValueError(f"trial {trial.trial_name}: {error}") from error
    raised = {part.exception_info.exception_type for part in (trial, *steps) if part.exception_info}
    if raised - SCORED_EXCEPTIONS or not (rewards or turns) or (raised and not rewards):
        return None
    only = next(iter(rewards.values())) if len(rewards) == 1 else None
    stop_reason = (contexts[-1].metadata or {}).get("stop_reason")
    return Trajectory(turns, rewards.get("reward", only), stop_reason, trial)


# Kept for code that was written against its first name.
_trial_to_trajectory = trial_to_trajectory


def turns_of(context: AgentContext) -> Iterator[Turn]:
    """The turns of a run. Raises ValueError where their lists are not aligned, or no numbers."""
    for segment in context.rollout_details or []:
        extra = segment.get("extra") or {}
        columns = [*map(segment.get, _IDS), *extra.values()]
        for prompt_ids, ids, logprobs, *values in zip(*(one or [] for one in columns), strict=True):
            turn = Turn(prompt_token_ids=prompt_ids, completion_token_ids=ids, logprobs=logprobs)
            turn.extra = dict(zip(extra, values, strict=True))
            if not turn.is_trainable:
                raise ValueError("ids and logprobs are not aligned, or no numbers")
            yield turn


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
        ending = "length" if cut_off else "stop"
        action = TokensWithLogprobs(turn.completion_token_ids, turn.logprobs, ending)
        # A field of cookbook 0.6.
        action.sequence_id = turn.extra.get("sequence_id")
        prompt = ModelInput.from_ints(turn.prompt_token_ids)
        transitions.append(types.Transition(prompt, action, reward=0.0, episode_done=is_last))
    return types.Trajectory(transitions, ModelInput.empty(), trajectory.stop_reason)
