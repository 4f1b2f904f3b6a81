"""BasicLoopAgent: a minimal, single-file agent for Harbor that records every token it samples.

    harbor run ... --agent basic_loop_agent:BasicLoopAgent -m Qwen/Qwen3-8B --ak model_path=tinker://...

From top to bottom: options, model clients, their cache, the record, the agent (`_converse` is the loop), training data.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import os
import re
import shlex
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Self
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
from pydantic import BaseModel, Field, model_validator

__version__ = "0.1.0"
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")  # of a RolloutDetail, of an LLMResponse, of a Turn

try:  # Harbor 0.23 and later: BaseAgent parses the options, and does so before any trial starts
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions

    class _HarborAgent(BaseAgent):
        capabilities = AgentCapabilities(atif=True, resume=True)

except ImportError:  # Harbor 0.16 to 0.22 swallows unknown kwargs: here each trial parses the options
    AgentOptions = BaseModel

    class _HarborAgent(BaseAgent):
        SUPPORTS_ATIF = SUPPORTS_RESUME = True

        def __init__(self, **kw: Any) -> None:
            super().__init__(**{k: kw.pop(k) for k in inspect.signature(BaseAgent.__init__).parameters if k in kw})
            self.options = self.options_model(**kw)


class BasicLoopOptions(AgentOptions, extra="forbid", coerce_numbers_to_str=True, hide_input_in_errors=True):
    """What `--ak key=value` accepts. Errors hide the input, for `llm_kwargs` may hold an API key."""

    model_path: str | None = Field(None, description="Tinker checkpoint to sample, tinker://...; default: base model.")
    renderer_name: str | None = Field(None, description="tinker-cookbook renderer; default: the model's recommended.")
    max_tokens: int = Field(512, ge=1, description="Most tokens that one model call may sample.")
    temperature: float | None = Field(1.0, ge=0, description="Sampling temperature; null leaves it to the client.")
    max_turns: int = Field(1, ge=1, description="Most model calls; above 1, the bash blocks of a reply are run.")
    system_prompt: str | None = Field(None, description="System message, verbatim; default: the loop's protocol.")
    model_client: Literal["tinker", "litellm"] = Field("tinker", description="Harbor's TinkerLLM or its LiteLLM.")
    api_base: str | None = Field(None, description="Base URL of the model's server; default: the client's own.")
    llm_kwargs: dict[str, Any] | None = Field(None, description="More arguments of the client: top_p, seed, ...")
    collect_rollout_details: bool | None = Field(None, description="Record token ids; default: with tinker only.")
    command_timeout_sec: int = Field(120, ge=1, description="Seconds after which a reply's commands are ended.")
    max_output_chars: int = Field(10_000, ge=1, description="Characters of command output that the model sees.")

    @model_validator(mode="after")
    def _fits_the_client(self) -> Self:
        if self.model_path is not None and not self.model_path.startswith("tinker://"):
            raise ValueError("model_path must be a Tinker checkpoint: tinker://<run>/sampler_weights/<name>")
        if twice := {"model_name", *type(self).model_fields}.intersection(self.llm_kwargs or ()):
            raise ValueError(f"llm_kwargs holds {', '.join(sorted(twice))}: use the option of that name instead")
        if self.model_client == "litellm" and (self.model_path or self.renderer_name):
            raise ValueError("model_path and renderer_name are for tinker: drop them, or set model_client=tinker")
        if self.model_client == "tinker" and not all(map(importlib.util.find_spec, ("tinker", "tinker_cookbook"))):
            raise ValueError("tinker is missing: run `pip install 'harbor[tinker]'`, or set model_client=litellm")
        return self


class StopReason(StrEnum):
    """Why a run ended, under the names of `tinker_cookbook.rl.types.StopReason` where it has them."""

    COMPLETED = "completed"  # the reply holds no command, or was the one completion asked for
    MAX_TURNS = "max_turns"  # `max_turns` model calls were made; the commands of the last reply were still run
    MAX_TOKENS = "max_tokens"  # the reply was cut off at `max_tokens` or the end of the context; nothing in it was run
    CONTEXT_OVERFLOW = "context_overflow"  # the conversation left no room in the context window for a reply
    CANCELLED = "cancelled"  # from outside: the agent's timeout, or Ctrl-C
    ERROR = "error"  # an exception, which Harbor keeps as the trial's exception_info


class CutOffUsage(UsageInfo):
    """Marks a reply that was cut off for its length. Harbor's way, an error, drops its ids and usage."""


class TinkerMixin:
    """Gives Harbor's TinkerLLM the process's one service and whole replies: its own `call` passes a cut-off one off as
    complete (0.16 to 0.24) or drops its ids (0.25). The private attributes are the same in all these versions."""

    async def _ensure_client(self) -> Any:
        if self._sampling_client is None:
            service = await asyncio.to_thread(_tinker_service, self.tinker.ServiceClient, self.api_base)
            source = {"model_path": self._model_path} if self._model_path else {"base_model": self._model_name}
            self._sampling_client = await service.create_sampling_client_async(**source)  # the name that Harbor calls
        return self._sampling_client

    async def call(self, prompt: str, message_history: Any = (), **kwargs: Any) -> LLMResponse:
        """Sample one reply; its content is the renderer's: text, or a list of parts as soon as the model thinks."""
        client = await self._ensure_client()
        rendered = self._renderer.build_generation_prompt([*message_history, {"role": "user", "content": prompt}])
        if (room := self._context_limit - rendered.length) < 1:
            raise ContextLengthExceededError(f"{rendered.length} prompt tokens fill the {self._context_limit} allowed")
        params = {name: getattr(self, f"_{name}") for name in ("temperature", "seed", "top_k", "top_p")}
        stop, most = self._renderer.get_stop_sequences(), min(self._max_tokens, room)
        params = self.tinker.SamplingParams(max_tokens=most, stop=stop, **params)
        sampled = (await client.sample_async(prompt=rendered, num_samples=1, sampling_params=params)).sequences[0]
        counts = {"prompt_tokens": rendered.length, "completion_tokens": len(sampled.tokens), "cache_tokens": 0}
        usage = (CutOffUsage if sampled.stop_reason == "length" else UsageInfo)(**counts, cost_usd=0.0)
        ids = dict(zip(_IDS, (rendered.to_ints(), list(sampled.tokens), list(sampled.logprobs or [])), strict=True))
        reply = LLMResponse(content="", usage=usage, **(ids if self._collect_rollout_details else {}))
        try:
            reply.content = self._renderer.parse_response(sampled.tokens)[0]["content"]
        except Exception as error:
            error.sampled_reply = reply  # `resume` still records it
            raise
        if sampled.stop_reason == "length" and isinstance(reply.content, str):  # some templates open the thinking
            opened = self._renderer.tokenizer.decode(ids["prompt_token_ids"][-4:]).rstrip().endswith("<think>")
            reply.content = "<think>" * opened + reply.content
        return reply


class LiteLLMMixin:
    """Gives Harbor's LiteLLM whole replies: its `call` (0.16 to 0.25) looks at finish_reason after this method."""

    def _extract_usage_info(self, response: Any) -> UsageInfo | None:
        usage, choice = super()._extract_usage_info(response), response["choices"][0]
        if usage and choice["finish_reason"] == "length":  # the reply would become an error, without its ids and usage
            choice["finish_reason"], usage = "stop", CutOffUsage(**usage.model_dump())
        return usage


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple, Any]] = WeakKeyDictionary()  # latest used last
_locks: WeakValueDictionary[tuple, asyncio.Lock] = WeakValueDictionary()  # weak: a lock refers to its loop for good
_services, _services_lock = {}, threading.Lock()


def _tinker_service(service_class: Any, api_base: str | None) -> Any:
    """The process's only client of this service: each holds a session and 11 file descriptors for good. Blocks."""
    key = service_class, api_base or os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY")
    with _services_lock:  # trials of two checkpoints come here in two threads
        if key not in _services:
            _services[key] = service_class(**({"base_url": api_base} if api_base else {}))
            threading._register_atexit(_close, _services[key])  # private: by `atexit`, the SDK can start no thread
    getattr(_services[key], "holder", None)  # a property that opens the session; tinker 0.38 would do it on the loop
    return _services[key]


def _close(service: Any) -> None:
    with contextlib.suppress(Exception):  # it may be gone, and nobody is left to tell
        service.close("success").result(timeout=5)


def _utf8(text: str | bytes | None) -> str:
    """Text that tokenizers and files accept: pairs of surrogates are joined, lone ones replaced."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text or "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _add_step(steps: list[atif.Step], **fields: Any) -> atif.Step:
    steps.append(atif.Step(step_id=len(steps) + 1, timestamp=datetime.now(UTC).isoformat(), **fields))
    return steps[-1]


def _add_turn(steps: list[atif.Step], reply: LLMResponse) -> atif.Step:
    """Record a model call, the only place that does. Sets the ids late, as Metrics(...) would copy the whole prompt."""
    text, thinking, metrics = reply.content or "", reply.reasoning_content, atif.Metrics()
    if not isinstance(text, str):  # parts, from a renderer that knows thinking
        thinking = "".join(part["thinking"] for part in text if part["type"] == "thinking")
        text = "".join(part["text"] for part in text if part["type"] == "text")
    elif match := re.match(r"\s*(?:<think>)?(.*?)</think>\s*|\s*<think>(.*)\Z", text, re.DOTALL):  # left in the text
        thinking, text = match[1] or match[2], text[match.end() :]
    if usage := reply.usage:
        metrics.prompt_tokens, metrics.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        metrics.cached_tokens, metrics.cost_usd = usage.cache_tokens, usage.cost_usd or None  # Harbor: 0.0 if unknown
    metrics.prompt_token_ids, metrics.completion_token_ids = reply.prompt_token_ids, reply.completion_token_ids
    ids, logprobs = reply.completion_token_ids, reply.logprobs or []
    whole = reply.prompt_token_ids and ids is not None and len(ids) == len(logprobs) and None not in logprobs
    metrics.logprobs = logprobs if whole else None  # None: this turn stays out of rollout_details
    thinking = _utf8(thinking) or None
    return _add_step(steps, source="agent", message=_utf8(text), reasoning_content=thinking, metrics=metrics)


_PROTOCOL = """\
Solve the task by running commands in its environment. Put them in fenced blocks that open with ```bash: the blocks of
a reply run as one script, and its exit code and output are the next message. Each script starts in a fresh shell (files
stay, variables and directory do not) and has {seconds} seconds. When the task is done, reply without such a block."""
_FENCE = re.compile(r"^[ \t]*(`{3,})([^`\n]*)\n(.*?)(^[ \t]*\1`*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
# All fenced blocks, so that bash quoted in another one does not count; nor does a block without an end.
# `timeout` ends a script inside the environment and leaves its output so far. Processes outside its group (setsid, a
# nested `timeout`, all of them with busybox) are found by the mark, which children inherit.
_TIMED_SCRIPT = """\
start=$(date +%s); BASIC_LOOP_SCRIPT={mark} timeout -k 5 {limit} bash -c -- {script} </dev/null; code=$?
case $code in 124|137) if [ $(($(date +%s) - start)) -ge {limit} ]; then
  kill -9 $(grep -ls BASIC_LOOP_SCRIPT={mark} /proc/[0-9]*/environ | cut -d/ -f3) 2>/dev/null
  printf '\\n[ended: the time limit of {limit} seconds was reached]\\n'
fi;; esac
exit $code"""


class BasicLoopAgent(_HarborAgent):
    """Samples completions from one model, runs the bash blocks in them if asked to, and records the rollout: on the
    context token counts, cost (None: unknown), `metadata` (a `StopReason`, the number of model calls) and one Harbor
    RolloutDetail, whose lists have an entry per turn as in `Turn`; in `logs_dir` completion.txt and trajectory.json.
    Raises ValueError for a bad option."""

    options_model = BasicLoopOptions

    def __init__(
        self, *, model_name: str, model_path: str | None = None, renderer_name: str | None = None,
        max_tokens: int = 512, temperature: float | None = 1.0, max_turns: int = 1, system_prompt: str | None = None,
        model_client: str = "tinker", api_base: str | None = None, **kw: Any,
    ) -> None:  # fmt: skip
        given = {name: value for name, value in locals().items() if name in BasicLoopOptions.model_fields}
        if not model_name:
            raise ValueError("no model: name one with -m, such as -m Qwen/Qwen3-8B")
        super().__init__(model_name=model_name, **given, **kw)
        self._messages: list[dict[str, Any]] = []  # the conversation so far, for resume()

    @staticmethod
    def name() -> str:
        return "basic-loop"

    def version(self) -> str | None:
        return __version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install: the model is called from the host."""

    def _build_llm(self) -> Any:
        """A new client of this configuration. Takes seconds (torch, tokenizer), so call it in a thread."""
        options, is_tinker = self.options, self.options.model_client == "tinker"
        collect = is_tinker if options.collect_rollout_details is None else options.collect_rollout_details
        kwargs = options.model_dump(include={"max_tokens", "temperature"}, exclude_none=True)
        kwargs |= {"model_name": self.model_name, "collect_rollout_details": collect, **(options.llm_kwargs or {})}
        if not is_tinker:
            from harbor.llms.lite_llm import LiteLLM

            return type("LiteLLMClient", (LiteLLMMixin, LiteLLM), {})(api_base=options.api_base, **kwargs)
        import tinker
        from harbor.llms.tinker import TinkerLLM

        if unknown := kwargs.keys() - inspect.signature(TinkerLLM).parameters:
            raise ValueError(f"llm_kwargs: TinkerLLM takes no {', '.join(sorted(unknown))}")
        kwargs |= {"model_path": options.model_path, "renderer_name": options.renderer_name}
        client = type("TinkerClient", (TinkerMixin, TinkerLLM), {"tinker": tinker, "api_base": options.api_base})
        llm = client(**kwargs)
        self.logger.info("Sampling %s", options.model_path or f"the base model {self.model_name}: no model_path given")
        if options.max_turns > 1 and not llm._renderer.has_extension_property:
            self.logger.warning("Each turn becomes a training example of its own; use a ..._preserve_thinking renderer")
        return llm

    def _cache_key(self) -> tuple:
        """Everything that makes two clients different."""
        loop_only = {"max_turns", "system_prompt", "command_timeout_sec", "max_output_chars"}
        options = self.options.model_dump_json(exclude=loop_only, fallback=repr)
        return type(self), self.model_name, options, *map(os.environ.get, ("TINKER_BASE_URL", "TINKER_API_KEY"))

    async def _shared_llm(self) -> Any:
        """The client of this loop and configuration. One trial builds it (the next, if that fails), the others wait."""
        clients, key = _clients.setdefault(asyncio.get_running_loop(), {}), self._cache_key()
        async with _locks.setdefault((id(clients), *key), asyncio.Lock()):
            if (llm := clients.pop(key, None)) is None:
                llm = await asyncio.to_thread(self._build_llm)
                if connect := getattr(llm, "_ensure_client", None):  # the sampling client, also one for all trials
                    await connect()
            clients[key] = llm
        if len(clients) > 8:  # a training run brings a new checkpoint each step
            del clients[next(iter(clients))]
        return llm

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Solve a task in a new conversation."""
        system = self.options.system_prompt
        if system is None and self.options.max_turns > 1:
            system = _PROTOCOL.format(seconds=self.options.command_timeout_sec)
        self._messages = [{"role": "system", "content": _utf8(system)}] if system else []
        await self.resume(instruction, environment, context)

    async def resume(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Go on with the conversation. Only this call's turns are recorded, and before anything is raised."""
        steps: list[atif.Step] = []
        if self._messages and self._messages[0]["role"] == "system":
            _add_step(steps, source="system", message=self._messages[0]["content"])
        _add_step(steps, source="user", message=_utf8(instruction))
        try:
            chat = Chat(await self._shared_llm())
            chat.messages.extend(self._messages)
            self._messages = chat.messages
            stop_reason = await self._converse(chat, steps[-1].message, environment, steps)
        except BaseException as error:  # also a cancellation
            if reply := getattr(error, "sampled_reply", None):
                _add_turn(steps, reply)
            with contextlib.suppress(OSError):  # of the files: the context has it all, and `error` says more
                self._record(context, steps, StopReason.ERROR if isinstance(error, Exception) else StopReason.CANCELLED)
            raise
        self._record(context, steps, stop_reason)

    async def _converse(self, chat: Chat, prompt: str, environment: BaseEnvironment, steps: list) -> StopReason:
        """The loop. Change what you like, but let each reply reach `_add_turn` before the next await."""
        for turn in range(self.options.max_turns):
            try:
                reply = await chat.chat(prompt)
            except ContextLengthExceededError:
                return StopReason.CONTEXT_OVERFLOW
            except OutputLengthExceededError as cut:  # of another client, or the Responses API: text is all there is
                _add_turn(steps, LLMResponse(content=cut.truncated_response or ""))
                return StopReason.MAX_TOKENS
            step = _add_turn(steps, reply)
            if turn == 0 and self.options.collect_rollout_details and step.metrics.logprobs is None:
                raise RuntimeError("collect_rollout_details=true, but the server returned no token ids with logprobs")
            if isinstance(reply.content, str):  # a lone surrogate would fail the next call
                chat.messages[-1]["content"] = _utf8(reply.content)
            if isinstance(reply.usage, CutOffUsage):
                return StopReason.MAX_TOKENS
            blocks = _FENCE.findall(step.message.replace("\r\n", "\n")) if self.options.max_turns > 1 else []
            scripts = [text for _, info, text, end in blocks if end and info.split()[:1] in (["bash"], ["sh"])]
            if not scripts:
                return StopReason.COMPLETED
            prompt = await self._execute("\n".join(scripts).replace("\0", ""), environment, step)
        return StopReason.MAX_TURNS

    async def _execute(self, script: str, environment: BaseEnvironment, step: atif.Step) -> str:
        """Run a script in the environment, never on the host; note it on the step and return what the model is told."""
        limit, most = self.options.command_timeout_sec, self.options.max_output_chars
        step.tool_calls = [atif.ToolCall(tool_call_id="1", function_name="bash", arguments={"command": script})]
        command = _TIMED_SCRIPT.format(mark=uuid4().hex, limit=limit, script=shlex.quote(script))
        try:
            async with asyncio.timeout(limit + 60):
                result = await environment.exec(command, timeout_sec=limit + 30)
            texts = map(_utf8, (result.stdout, result.stderr))
            code, output = result.return_code, "\n".join(text.removesuffix("\n") for text in texts if text)
        except TimeoutError:  # the environment hangs: `timeout` never got its turn
            code, output = 124, f"[no answer from the environment; the time limit is {limit} seconds]"
        if (left_out := len(output) - most) > 0:
            output = f"{output[: most // 2]}\n[... {left_out} characters left out ...]\n{output[most // 2 - most :]}"
        told = f"Exit code: {code}\nOutput:\n{output or '(none)'}"
        step.observation = atif.Observation(results=[atif.ObservationResult(source_call_id="1", content=told)])
        return told

    def _record(self, context: AgentContext, steps: list[atif.Step], stop_reason: StopReason) -> None:
        """Put the run onto the context, then into the files. Raises OSError when a file cannot be written."""
        turns, totals = [step.metrics for step in steps if step.metrics], {}
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"):
            known = [value for turn in turns if (value := getattr(turn, name)) is not None]
            whole = len(known) == len(turns) or name != "cost_usd"  # the price of some turns is not the run's
            totals[f"total_{name}"] = sum(known) if known and whole else None
        context.n_input_tokens, context.n_output_tokens, context.n_cache_tokens, context.cost_usd = totals.values()
        kept = [turn for turn in turns if turn.logprobs is not None]
        # Chat.rollout_details appends to each list by itself, so one missing piece would misalign all that follow.
        context.rollout_details = [{key: [getattr(turn, key) for turn in kept] for key in _IDS}] if kept else None
        n = len(turns)
        context.metadata = {"stop_reason": str(stop_reason), "n_episodes": n, "n_turns_without_ids": n - len(kept)}
        agent = atif.Agent(name=self.name(), version=__version__, model_name=self.model_name)
        final = atif.FinalMetrics(**totals, total_steps=len(steps))
        run = self.session_id or uuid4().hex
        view = atif.Trajectory(session_id=run, agent=agent, steps=steps, final_metrics=final, extra=context.metadata)
        # In a conversation the prompts would let the file grow with the square of the turns; the context has them.
        omit = {"steps": {"__all__": {"metrics": {"prompt_token_ids"}}}} if n > 1 else None
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        # Without a reply it is empty: an earlier step's, left in the same folder, must not be scored for this step.
        (self.logs_dir / "completion.txt").write_text(steps[-1].message if turns else "", encoding="utf-8")
        (self.logs_dir / "trajectory.json").write_text(view.model_dump_json(exclude_none=True, exclude=omit), "utf-8")


@dataclass(frozen=True)
class Turn:
    """One model call, exactly as sampled."""

    prompt_token_ids: list[int]  # shape [n_prompt], earlier turns included
    completion_token_ids: list[int]  # shape [n_completion]
    logprobs: list[float]  # shape [n_completion], natural log, under the policy that sampled


@dataclass(frozen=True)
class Trajectory:
    """A finished trial as a trainer sees it. Usage is summed over the steps of the task, None where unknown."""

    turns: list[Turn]  # of all steps, in order; none for API models
    reward: float | None  # the reward named "reward", or the only one
    rewards: dict[str, float]  # all that the verifier gave
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    cost_usd: float | None
    seconds: float | None  # wall time of the agent
    stop_reason: str | None  # the `StopReason` of the last step; None for another agent's trial
    task_name: str
    trial_name: str
    exception_type: str | None  # such as "AgentTimeoutError"


def _trial_to_trajectory(trial: TrialResult) -> Trajectory | None:
    """Training data from a finished trial, live or read back with `TrialResult.model_validate_json`. None if it failed
    before it was scored, or has neither tokens nor a score. Raises ValueError if its ids and logprobs do not align."""
    steps, turns = trial.step_results or [trial], []
    contexts = [step.agent_result for step in steps if step.agent_result]
    for segment in [segment for context in contexts for segment in context.rollout_details or []]:
        prompts, completions, logprobs = [segment.get(name) or [] for name in _IDS]
        if len(prompts) != len(completions) or [*map(len, completions)] != [*map(len, logprobs)]:
            raise ValueError(f"trial {trial.trial_name}: token ids and logprobs are not aligned, do not train on them")
        turns += map(Turn, prompts, completions, logprobs)
    rewards = (trial.verifier_result and trial.verifier_result.rewards) or {}
    errors = [part.exception_info.exception_type for part in (trial, *steps) if part.exception_info]
    if not rewards and (errors or not turns):
        return None
    n_prompt, n_cached, n_completion, cost = trial.compute_token_cost_totals()
    clocks = [step.agent_execution for step in steps if step.agent_execution and step.agent_execution.finished_at]
    return Trajectory(
        turns=turns,
        reward=rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None),
        rewards=rewards,
        prompt_tokens=sum(len(t.prompt_token_ids) for t in turns) or None if n_prompt is None else n_prompt,
        completion_tokens=sum(len(t.logprobs) for t in turns) or None if n_completion is None else n_completion,
        cached_tokens=n_cached,
        cost_usd=cost,
        seconds=sum((clock.finished_at - clock.started_at).total_seconds() for clock in clocks) if clocks else None,
        stop_reason=(contexts[-1].metadata or {}).get("stop_reason") if contexts else None,
        task_name=trial.task_name,
        trial_name=trial.trial_name,
        exception_type=errors[0] if errors else None,
    )


def to_tinker(trajectory: Trajectory) -> "tinker_cookbook.rl.types.Trajectory":  # noqa: F821, torch is slow to import
    """For tinker-cookbook's RL functions. Every transition has reward 0.0: the trial's goes into `final_rewards_G`."""
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl import types

    transitions = []
    for turn in trajectory.turns:
        last = turn is trajectory.turns[-1]
        stop = "length" if last and trajectory.stop_reason == StopReason.MAX_TOKENS else "stop"
        ac = TokensWithLogprobs(turn.completion_token_ids, turn.logprobs, stop)
        ob = ModelInput.from_ints(turn.prompt_token_ids)
        transitions.append(types.Transition(ob=ob, ac=ac, reward=0.0, episode_done=last))
    return types.Trajectory(transitions, final_ob=ModelInput.empty(), stop_reason=trajectory.stop_reason)
