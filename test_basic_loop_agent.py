# SPDX-License-Identifier: Apache-2.0
"""The specification of basic_loop_agent.py, in the order of the README.

Harbor's Chat, TinkerLLM, LiteLLM and Job, the renderers and tokenizers, shells and HTTP are real;
the model's answers and the container are the fakes below and those of examples/fakes.py.
"""

import asyncio
import base64
import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import random
import re
import selectors
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch
from uuid import uuid4

# The price list that comes with litellm: its download would hold up an offline machine.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# For each job Harbor would start a process that reports it to Harbor's makers.
os.environ["HARBOR_TELEMETRY"] = "0"

import httpx
import litellm
import pytest
import tinker
from harbor.agents.base import BaseAgent
from harbor.environments.base import ExecResult
from harbor.job import Job
from harbor.llms.lite_llm import LiteLLM
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig
from harbor.models.task.config import MCPServerConfig
from harbor.models.trial.result import TrialResult
from harbor.models.verifier.result import VerifierResult
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import basic_loop_agent
from basic_loop_agent import BasicLoopAgent, BasicLoopOptions, trial_to_trajectory

# What the imports made stays: to look through it would take most of each garbage collection.
gc.freeze()

ROOT = Path(__file__).parent
IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
AT_LEAST_ONE = ("max_tokens", "max_turns", "max_seconds", "command_timeout_sec", "max_output_bytes")


async def next_answer(script: list[Any]) -> Any:
    """A script's next item, at last the same again and again; awaited or raised if it can be."""
    answer = script.pop(0) if len(script) > 1 else script[0]
    if callable(answer):
        answer = await answer()
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def forever() -> None:
    await asyncio.Event().wait()


async def fails_when_cancelled() -> None:
    try:
        await forever()
    finally:
        raise TimeoutError("the connection was closed")


class ScriptedEnvironment:
    """Answers `exec` from a script, where None is a silent success. Keeps what it was to run, None
    for what ends a script."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script) or [None]
        self.scripts, self.timeouts = [], []

    async def exec(self, command: str, timeout_sec: int | None = None, **kwargs: Any) -> ExecResult:
        blocks = re.search(r"BASIC_LOOP_BLOCKS=(\S+)", command)
        script = blocks and base64.b64decode(blocks[1]).decode().replace("\0", "")
        self.scripts.append(script)
        self.timeouts.append(timeout_sec)
        return await next_answer(self.script) or ExecResult(return_code=0)


class ShellEnvironment:
    """Runs commands for real, by a shell of the test's own: only for what this file says."""

    def __init__(self, before: str = "", **variables: str) -> None:
        self.before, self.variables, self.outputs = before, os.environ | variables, []

    async def exec(self, command: str, **kwargs: Any) -> ExecResult:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command, pipes["env"] = self.before + command, self.variables
        process = await asyncio.create_subprocess_shell(command, **pipes)
        output, _ = await process.communicate(b"not for the script\n")
        # Modal is as strict. What is printed is ASCII, whatever the script writes.
        self.outputs.append(output.decode("ascii", "strict"))
        return ExecResult(stdout=self.outputs[-1], return_code=process.returncode)


# Fakes of the model: Tinker's service, by what the SDK gives. Before 0.38 that is no future where
# a client is made, one where it samples, and less in the answer.
IS_OLD_SDK = importlib.metadata.version("tinker") < "0.30"


@dataclasses.dataclass
class Sampled:
    """What the Tinker sampler returns for one call; logprobs "own" are distinct, one a token."""

    text: str = "hello"
    stop_reason: str = "stop"
    logprobs: Any = "own"
    tokens: list[int] | None = None


class FakeTinker:
    """Stands in for `tinker.ServiceClient`, the class, and for all that comes of it."""

    def __init__(self, tokenizer_dir: str, *script: Any) -> None:
        self.name, self.script = tokenizer_dir, list(script) or [Sampled()]
        # The agent's own may be used by one thread at a time.
        self.tokenizer, self.encoding = a_copy_of_tokenizer(self.name), threading.Lock()
        # Of each call: its prompt and parameters; and of each answer: prompt, tokens, logprobs.
        self.services, self.samplers, self.requests, self.returned = [], [], [], []

    def __call__(self, **kwargs: Any) -> "FakeService":
        self.services.append(FakeService(self, kwargs))
        return self.services[-1]

    def prompt_text(self, number: int) -> str:
        return self.tokenizer.decode(self.requests[number][0])

    def encode(self, text: str, stop_reason: str) -> list[int]:
        with self.encoding:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids + [2] * (stop_reason == "stop")


def refused(status: int, message: str) -> Exception:
    """An answer of Tinker's API that is an error."""
    response = httpx.Response(status, request=httpx.Request("POST", "http://tinker"))
    return tinker.APIStatusError(message, response=response, body=None)


class FakeService:
    """A session, and the client that samples in it."""

    def __init__(self, tinker: FakeTinker, arguments: dict[str, Any]) -> None:
        self.tinker, self.arguments = tinker, arguments
        # The status of each answer when the session is over.
        self.status = None

    def create_sampling_client(self, **source: Any) -> Any:
        if unknown := source.keys() - {"model_path", "base_model", "record_stability_info"}:
            raise TypeError(f"unexpected keyword argument {unknown}")
        created = Future()
        if self.status or "missing" in source.get("model_path", ""):
            created.set_exception(refused(self.status or 404, "no such checkpoint"))
        else:
            self.tinker.samplers.append(source)
            created.set_result(self)
        return created.result() if IS_OLD_SDK else created

    def sample(self, **call: Any) -> Any:
        answer = self.answer(**call)
        if IS_OLD_SDK:
            return asyncio.run_coroutine_threadsafe(answer, asyncio.get_running_loop())
        return answer

    async def answer(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        fake = self.tinker
        fake.requests.append((prompt.to_ints(), sampling_params))
        await asyncio.sleep(0)
        if self.status:
            raise refused(self.status, "Session has been terminated")
        answer = await next_answer(fake.script)
        answer = Sampled(answer) if isinstance(answer, str) else answer
        tokens = answer.tokens
        if tokens is None:
            tokens = fake.encode(answer.text, answer.stop_reason)
        number = len(fake.returned)
        own = [-((number + 1) + i / 1000) for i in range(len(tokens))]
        logprobs = own if answer.logprobs == "own" else answer.logprobs
        fake.returned.append((prompt.to_ints(), tokens, logprobs))
        sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=answer.stop_reason)
        if not IS_OLD_SDK:
            sequence.sequence_id = f"sequence-{number}"
        return SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=3 * number)


# Tokenizers and renderers. The suite's own tokenizer is a byte-level one with every special token
# that the cookbook's renderers name. As in the real ones `<|...|>` are special, and tags like
# <think> are merely added. Inkling's renderer has its own.
_TAGS = r"</?(?:think|tool_call|tool_response|tool_result|arg_key|arg_value|img)>|<image>|\[gMASK\]"
_FIRST = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ORDINARY = ["Class<?>", "a[:]", "x<()>", "x[...]"]
INKLING = "thinkingmachines/Inkling"
a_copy_of_tokenizer = functools.cache(lambda folder: copy.deepcopy(get_tokenizer(folder)))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=_FIRST, initial_alphabet=alphabet)
    # Ordinary tokens that look like special ones, as in the vocabularies of Qwen and Llama.
    text = f"hello world user assistant bash\n\n``` {' '.join(ORDINARY)}"
    tokenizer.train_from_iterator([text] * 9, trainer)
    sources = "".join(path.read_text() for path in (COOKBOOK / "renderers").glob("*.py"))
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    special = set(re.findall(rf"<[|{bar}][\w▁]+[|{bar}]>", sources)) - set(_FIRST)
    # Before cookbook 0.5.8 DeepSeek's are put together from these names.
    names = re.findall(r'_get_special_token\("([\w▁]+)"\)', sources)
    special.update(f"<{bar}{name}{bar}>" for name in names)
    tokenizer.add_special_tokens(sorted(special))
    tokenizer.add_tokens(sorted(set(re.findall(_TAGS, sources))))
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.save_pretrained(folder)
    return str(folder)


COOKBOOK = Path(importlib.util.find_spec("tinker_cookbook").origin).parent
_SOURCE = (COOKBOOK / "renderers/__init__.py").read_text()
RENDERERS = sorted(set(re.findall(r'name == "(\w+)"', _SOURCE)))


class Model:
    """A renderer and the tokenizer that it can be built with, and replies as its model writes."""

    def __init__(self, renderer_name: str, tokenizer_dir: str) -> None:
        self.name = renderer_name
        for tokenizer_name in (tokenizer_dir, INKLING):
            self.tokenizer = get_tokenizer(tokenizer_name)
            try:
                self.renderer = get_renderer(renderer_name, self.tokenizer)
                stop = self.renderer.get_stop_sequences()[0]
                prompt = self.rendered([{"role": "user", "content": "a"}])
                break
            except Exception as error:
                reason = f"{renderer_name} needs another tokenizer: {error}"
        else:
            pytest.skip(reason)
        self.options = {"model_name": tokenizer_name, "renderer_name": renderer_name}
        self.stop = [stop] if isinstance(stop, int) else self.encode(stop)
        self.opens_thinking = self.tokenizer.decode(prompt).rstrip().endswith("<think>")
        self.is_inkling = tokenizer_name == INKLING
        # Those whose history closes a turn with another token than was sampled, or with a text.
        self.is_exact = not renderer_name.startswith(("gpt_oss", "role_colon"))
        if self.is_inkling:
            self.special = self.tokenizer.tml_tokenizer.all_special_tokens
        else:
            self.special = [text for text in self.tokenizer.added_tokens_encoder if text.strip()]
        self.special_ids = {self.encode(text)[0] for text in self.special}

    def rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.renderer.build_generation_prompt(messages).to_ints()

    def encode(self, text: str) -> list[int]:
        """A reply's tokens, special ones in the place of their texts."""
        inkling = getattr(self.tokenizer, "tml_tokenizer", None)
        if inkling is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids = []
        for number, piece in enumerate(re.split(r"<\|(\w+)\|>", text)):
            ids += [inkling.encode_special(piece)] if number % 2 else inkling.encode_ordinary(piece)
        return ids

    def encode_oddly(self, text: str) -> list[int]:
        """The same in other pieces than the tokenizer would cut."""
        pieces = re.findall(r"<[^<>\s]+>|.", text, re.DOTALL)
        return [token for piece in pieces for token in self.encode(piece)]

    def reply(self, answer: str, thinking: str | None = "hm") -> str:
        """The text that its model samples, without the stop token."""
        if self.name.startswith("gpt_oss"):
            thought = f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant"
            return (thought if thinking else "") + f"<|channel|>final<|message|>{answer}"
        if self.is_inkling:
            thought = f"<|message_model|><|content_thinking|>{thinking}<|end_message|>"
            answer = f"<|message_model|><|content_text|>{answer}<|end_message|>"
            return (thought if thinking else "") + answer
        if thinking is None and not self.opens_thinking:
            return answer
        return f"{'' if self.opens_thinking else '<think>'}{thinking or ''}</think>{answer}"


@pytest.fixture(params=RENDERERS)
def model(request: pytest.FixtureRequest, tokenizer_dir: str) -> Model:
    return Model(request.param, tokenizer_dir)


@dataclasses.dataclass
class Run:
    """What a run leaves; all of it is read anew from the context and the files."""

    agent: BasicLoopAgent
    environment: Any = dataclasses.field(default_factory=ScriptedEnvironment)
    context: AgentContext = dataclasses.field(default_factory=AgentContext)
    fake: Any = None

    @property
    def turns(self) -> list[tuple[list[int], list[int], list[float]]]:
        """The record as prompt, completion and logprobs of each turn; fails if not aligned."""
        (segment,) = self.context.rollout_details or [{name: [] for name in IDS}]
        turns = list(zip(*(segment[name] for name in IDS), strict=True))
        assert all(len(completion) == len(logprobs) for _, completion, logprobs in turns)
        return turns

    metadata = property(lambda self: self.context.metadata)
    stop_reason = property(lambda self: self.metadata["stop_reason"])
    completion = property(lambda self: (self.agent.logs_dir / "completion.txt").read_text())
    scripts = property(lambda self: self.environment.scripts)

    @property
    def view(self) -> Any:
        text = (self.agent.logs_dir / "trajectory.json").read_text()
        return atif.Trajectory.model_validate_json(text)

    @property
    def told(self) -> list[str]:
        """What the model was told after its replies, in order."""
        seen = [step.observation for step in self.view.steps if step.observation]
        return [result.content for observation in seen for result in observation.results]

    async def go(self, instruction: str = "do it") -> None:
        await self.agent.run(instruction, self.environment, self.context)

    def resumed(self, instruction: str) -> "Run":
        """The same conversation's next step."""
        step = Run(self.agent, self.environment, fake=self.fake)
        asyncio.run(self.agent.resume(instruction, step.environment, step.context))
        return step


class Bench:
    def __init__(self, tokenizer_dir: str, logs_dir: Path, monkeypatch: Any) -> None:
        self.tokenizer_dir, self.logs_dir, self.monkeypatch = tokenizer_dir, logs_dir, monkeypatch
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "TINKER_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        # LiteLLM and openai wait between attempts.
        monkeypatch.setattr(LiteLLM.call.retry, "wait", lambda state: 0)
        monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0)
        self.service()

    def service(self, *script: Any) -> FakeTinker:
        """A new Tinker service with a key, and so a session, of its own."""
        fake = FakeTinker(self.tokenizer_dir, *script)
        self.monkeypatch.setattr("tinker.ServiceClient", fake)
        self.monkeypatch.setenv("TINKER_API_KEY", f"tml-{uuid4().hex}")
        return fake

    def agent(self, agent_class: type = BasicLoopAgent, **options: Any) -> BasicLoopAgent:
        defaults = {"model_name": self.tokenizer_dir, "renderer_name": "qwen3_instruct"}
        if options.get("model_client", "tinker") != "tinker":
            defaults = {"model_name": "openai/mock"}
        return agent_class(**{"logs_dir": self.logs_dir} | defaults | options)

    def prepare(self, *script: Any, environment: Any = None, **options: Any) -> Run:
        """A run that is to come, of an agent that samples this script from a new service."""
        fake, environment = self.service(*script), environment or ScriptedEnvironment()
        return Run(self.agent(**options), environment, fake=fake)

    def tinker(self, *script: Any, raises=None, instruction="do it", **options: Any) -> Run:
        """The same, and it is run, in an event loop of its own and without `setup`."""
        did = self.prepare(*script, **options)
        with pytest.raises(raises) if raises else contextlib.nullcontext():
            asyncio.run(did.go(instruction))
        return did

    def refuses(self, error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            set_up(self.agent(**options))

    def shell(self, script: str, environment: Any = None, **options: Any) -> str:
        """Runs a script through the loop in a real shell; gives what the model is told."""
        options |= {"environment": environment or ShellEnvironment(), "max_turns": 2}
        return self.tinker(bash(script), "done", **options).told[0]

    def api(self, *script: Any, finish: str = "stop", ids: bool = False) -> list[dict]:
        """Has an API model give these answers, at litellm's door; gives its requests."""
        requests, answers = [], list(script)

        async def acompletion(**request: Any) -> Any:
            requests.append(copy.deepcopy(request))
            message = await next_answer(answers)
            if isinstance(message, str):
                message = {"role": "assistant", "content": message}
            n_turns = sum(message["role"] == "assistant" for message in request["messages"])
            # OpenRouter's native reason is null at times.
            fields = {"token_ids": [3, 4, 5], "routed_experts": [[n_turns]]} if ids else {}
            fields |= {"native_finish_reason": None}
            choice = {"message": message, "finish_reason": finish}
            choice["provider_specific_fields"] = fields
            usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
            response = litellm.ModelResponse(model="mock", choices=[choice], usage=usage)
            if ids and "no ids" not in message["content"]:
                # As litellm passes on what vLLM answers.
                if "no prompt" not in message["content"]:
                    response.prompt_token_ids = [1, 2] + [3, 4, 5, 6] * n_turns
                content = [{"token": "x", "logprob": -0.5, "bytes": [], "top_logprobs": []}] * 3
                response.choices[0].logprobs = litellm.types.utils.ChoiceLogprobs(content=content)
            return response

        self.monkeypatch.setattr(litellm, "acompletion", acompletion)
        return requests

    def lite(self, *script: Any, ids: bool = False, **options: Any) -> Run:
        """A run with these answers of an API model; `fake` is the requests."""
        requests = self.api(*script, ids=ids)
        did = self.tinker(model_client="litellm", collect_rollout_details=ids or None, **options)
        did.fake = requests
        return did


@pytest.fixture(autouse=True)
def bench(tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(tokenizer_dir, tmp_path, monkeypatch)
    basic_loop_agent.use_service(None)


def run(agent: BasicLoopAgent, environment: Any = None, instruction: str = "do it") -> Run:
    one = Run(agent, environment or ScriptedEnvironment())
    asyncio.run(one.go(instruction))
    return one


def set_up(agent: BasicLoopAgent) -> None:
    asyncio.run(agent.setup(ScriptedEnvironment()))


def printing(text: str) -> ScriptedEnvironment:
    return ScriptedEnvironment(ExecResult(stdout=text, return_code=0))


async def together(trials: Iterable[Any]) -> None:
    await asyncio.gather(*trials)


async def until(is_reached: Callable[[], Any]) -> None:
    last = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < last
        await asyncio.sleep(0.001)


def bash(*commands: str, language: str = "bash") -> str:
    return "\n".join(f"I will run this:\n\n```{language}\n{command}\n```\n" for command in commands)


DOCSTRING = 'cat >f.py <<E\ndef f():\n    """\n    ```\n    x\n    ```\n    """\nE\n'
OVERFLOW = litellm.ContextWindowExceededError("too long", "mock", "openai")
BALANCED = "cat >f <<E\n<think>\nhm\n</think>\nE"
TAGGED = f"x\n</think>\n{bash('ls')}"
FLOOD = r"first\n.*\[the output is cut: more than 4000000 bytes.*"
LATE = r"so far\n\[ended: the time limit of 1 seconds was reached\]"
ESCAPES = "echo so far; setsid bash -c 'sleep OWN.1 &'; timeout 99 sleep OWN.2 & trap '' TERM;"
# A reply of vLLM's, with its finish reason.
COMMAND = ("<think>hm</think>\n\n" + bash("ls"), "stop")
# What a policy that diverged has for logprobs; vLLM writes -9999.0 for one that it does not have.
NO_LOGPROBS = [math.nan, math.inf, -math.inf, None, -9999.0]


class PatientSelector(selectors.DefaultSelector):
    """Has an event loop's timers fire at once: time passes when there is nothing else to do."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list:
        events = super().select(timeout and 0)
        self.skipped += 0 if events else timeout or 0
        return events


def time_passes_at_once() -> asyncio.Runner:
    loop = asyncio.SelectorEventLoop(selector := PatientSelector())
    loop.time = lambda: time.monotonic() + selector.skipped
    return asyncio.Runner(loop_factory=lambda: loop)


@pytest.mark.parametrize("reply", ["", bash("rm -rf /")])
def test_one_completion_is_recorded_in_context_and_files_and_never_run(bench, reply, caplog):
    # Neither a tokenizer nor a file takes a lone surrogate.
    did = bench.tinker(reply, system_prompt="Be {brief}.", instruction="greet\udc80")
    ((prompt, tokens, _),) = did.turns
    usage = did.context.n_input_tokens, did.context.n_output_tokens, did.context.n_cache_tokens
    assert usage == (len(prompt), len(tokens), 0)
    assert did.fake.name in getattr(did.context, "model_usage", [did.fake.name])
    ids = {"n_turns_without_ids": 0, "n_prefix_breaks": 0}
    assert did.metadata == {"stop_reason": "completed", "n_episodes": 1, **ids}
    assert (did.completion, did.scripts) == (reply, [])
    assert ("max_turns is 1, so none was run" in caplog.text) == bool(reply)
    said = [("system", "Be {brief}."), ("user", "greet?"), ("agent", reply)]
    assert [(step.source, step.message) for step in did.view.steps] == said
    metrics = did.view.steps[-1].metrics
    written = metrics.completion_token_ids, metrics.logprobs
    assert did.turns == did.fake.returned == [(prompt, *written)]


def test_a_reply_cut_off_anywhere_neither_shows_thinking_nor_loses_the_answer(bench, model):
    answer, thought = bash("ls"), f"Could <tool_call>be</tool_call> 42\n{bash('rm x')}"
    end = 1 if model.is_inkling else 0
    replies, expected = [], []
    for thinking in (thought, None):
        tokens = model.encode(model.reply(answer, thinking))
        n_before = len(model.encode(model.reply("", thinking))) - end
        for n_tokens in [*range(1, len(tokens), 3), len(tokens)]:
            replies.append(Sampled(tokens=tokens[:n_tokens], stop_reason="length"))
            expected.append(tokens[n_before : min(n_tokens, len(tokens) - end)])
    # Whole replies follow: one that never leaves its thinking, and one that does.
    unclosed = re.split(r"<\|end\|>|<\|end_message\|>|</think>", model.reply("", thought))[0]
    for text in (unclosed, model.reply(answer, thought)):
        replies.append(Sampled(tokens=model.encode(text) + model.stop))
    did = bench.prepare(*replies, **model.options, max_turns=2)
    with asyncio.Runner() as runner:
        for answered in expected:
            runner.run(did.go())
            assert did.stop_reason == "max_tokens"
            assert did.turns == did.fake.returned[-1:]
            assert did.completion.strip() == model.tokenizer.decode(answered).strip()
        runner.run(did.go())
        assert did.completion == ""
        assert "Could" in did.view.steps[-1].reasoning_content
        runner.run(did.go())
        assert did.completion.strip() == answer.strip()
        assert did.scripts == ["ls\n", "ls\n"]
        thoughts = [step.reasoning_content for step in did.view.steps[2:]]
        assert all(thought.strip() in text for text in thoughts)


@pytest.mark.parametrize(
    ("reply", "thinking", "answer", "runs"),
    [
        (" <think>a</think> <think>b</think>c", "ab", "c", None),
        (f"<seed:think>[/THINK]{bash('rm x')}", f"[/THINK]{bash('rm x')}", "", None),
        # The prompt had opened it.
        (f"so{bash('rm x')}no</think>{bash('ls')}", f"so{bash('rm x')}no", bash("ls"), "ls\n"),
        (f"a ` or ```{bash('rm x')}</think>b", f"a ` or ```{bash('rm x')}", "b", None),
        (f"</think>{bash('ls')}", None, bash("ls"), "ls\n"),
        # A tag in a command is text.
        (bash("sed -i 's#</think>##' f"), None, None, "sed -i 's#</think>##' f\n"),
        (bash(BALANCED), None, None, f"{BALANCED}\n"),
        (f"Drop `</think>`:{bash('ls')}", None, None, "ls\n"),
        (f"<think>a</think>{bash('# x\n</think>')}", "a", bash("# x\n</think>"), "# x\n</think>\n"),
        # What the server calls reasoning is all of it, but for what tags at the start enclose.
        ({"content": TAGGED, "reasoning_content": "hm"}, "hm", TAGGED, "ls\n"),
        ({"content": f"<think>{TAGGED}", "reasoning_content": "hm"}, "hmx\n", bash("ls"), "ls\n"),
    ],
)
def test_the_answer_begins_where_the_thinking_ends(bench, reply, thinking, answer, runs):
    did = bench.lite(reply, max_turns=2)
    step = did.view.steps[2]
    assert (step.reasoning_content, step.message) == (thinking, reply if answer is None else answer)
    assert did.scripts == ([runs] * 2 if runs else [])


def test_an_api_model_gets_the_options_and_leaves_text_usage_and_price(bench, monkeypatch):
    sampling = {"top_p": 0.9, "reasoning_effort": "low"}
    kwargs = {"extra_headers": {"X-Other": "1"}, "extra_body": {"salt": 1}, **sampling}
    options = {"temperature": None, "api_base": "http://localhost:1/v1", "llm_kwargs": kwargs}
    did = bench.lite("hello\ud800", max_tokens=7, session_id="mine", **options)
    (request,) = did.fake
    sampling |= {"max_tokens": 7, "api_base": options["api_base"]}
    assert sampling.items() <= request.items()
    assert not {"temperature", "logprobs"} & request.keys()
    # Harbor 0.16 and later send the session's id as X-Session-ID, too.
    sent = request["extra_body"] | request["extra_headers"]
    assert {"salt": 1, "X-Other": "1", "session_id": "mine"}.items() <= sent.items()
    assert (did.context.n_input_tokens, did.context.n_output_tokens) == (10, 3)
    assert (did.completion, did.context.rollout_details) == ("hello?", None)
    assert did.metadata == {"stop_reason": "completed", "n_episodes": 1}
    # Reasoning goes back with the history if asked to.
    reply = {"role": "assistant", "content": bash("ls"), "reasoning_content": "hm"}
    for sends in (True, False):
        did = bench.lite(reply, "done", interleaved_thinking=sends, max_turns=2)
        sent = did.fake[-1]["messages"][2]
        assert sent.get("reasoning_content") == ("hm" if sends else None)
    for prices, cost in (([0.0, 0.0], None), ([0.5, 0.25], 0.75)):
        monkeypatch.setattr("litellm.completion_cost", Mock(side_effect=prices))
        assert bench.lite(bash("ls"), "done", max_turns=2).context.cost_usd == cost


def test_a_servers_token_ids_are_recorded_like_tinkers_and_have_to_come(bench):
    did = bench.lite(bash("ls"), bash("no ids"), "hello", "no ids", ids=True, max_turns=3)
    last_prompt = [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]
    assert did.turns == [(ids, [3, 4, 5], [-0.5] * 3) for ids in ([1, 2], last_prompt)]
    assert (did.metadata["n_prefix_breaks"], did.metadata["n_turns_without_ids"]) == (0, 1)
    assert did.context.rollout_details[0]["extra"]["routed_experts"] == [[[0]], [[2]]]
    assert did.fake[0]["logprobs"] is True
    assert did.fake[0]["extra_body"]["return_token_ids"] is True
    for text in ("hello, no ids", "hello, no prompt"):
        with pytest.raises(RuntimeError, match="collect_rollout_details"):
            bench.lite(text, ids=True)
        assert did.completion == text


@pytest.mark.parametrize(
    "word", ["STOP", "COMPLETE", "end_turn", "eos_token", "abort", "MALFORMED"]
)
def test_a_reply_is_run_only_if_the_server_says_that_it_is_whole(bench, word, caplog):
    bench.api(bash("ls"), finish=word)
    did = run(bench.agent(model_client="litellm", max_turns=2))
    is_cut_off = word in ("abort", "MALFORMED")
    expected = ("max_tokens", [], 3) if is_cut_off else ("max_turns", ["ls\n"] * 2, 6)
    assert (did.stop_reason, did.scripts, did.context.n_output_tokens) == expected
    assert did.completion == bash("ls")
    warning = f"finish reason {word.lower()!r}: the reply counts as cut off"
    assert (warning in caplog.text) == is_cut_off


class FakeVllm:
    """Answers where HTTP would go out. Its chat template is a renderer's."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.model = bench, Model("qwen3", bench.tokenizer_dir)
        # Replies with their finish reason, or an error's status; the last one again and again.
        self.script: list[tuple[str, str] | int] = []
        # Of each request: path, body and headers; and of each reply: prompt, tokens, logprobs.
        self.requests, self.returned = [], []

    def agent(self, **options: Any) -> BasicLoopAgent:
        defaults = {"model_name": "openai/served", "api_base": "http://x:1", "max_turns": 4}
        return self.bench.agent(model_client="vllm", **defaults | options)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        self.requests.append((path, body, request.headers))
        answer = self.answer(path, body)
        status = answer if isinstance(answer, int) else 200
        return httpx.Response(status, json=answer, request=request)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | int:
        if path == "/tokenize":
            ids = self.model.rendered(body["messages"])
            pieces = self.model.tokenizer.convert_ids_to_tokens(ids)
            return {"tokens": ids, "max_model_len": 9000, "token_strs": pieces}
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(reply, int):
            return reply
        text, finish_reason = reply
        prompt, ids = body["prompt"], self.model.encode_oddly(text)
        ids += self.model.stop * (finish_reason == "stop")
        logprobs = [-(len(self.returned) + 1.0)] * len(ids)
        self.returned.append((prompt, ids, logprobs))
        choice = {"index": 0, "finish_reason": finish_reason, "token_ids": ids, "text": text}
        choice |= {"logprobs": {"token_logprobs": logprobs}, "prompt_token_ids": prompt}
        choice["routed_experts"] = [[len(self.returned)]]
        return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}}


@pytest.fixture
def vllm(bench) -> FakeVllm:
    fake = FakeVllm(bench)
    transport = httpx.MockTransport(fake.handle)
    bench.monkeypatch.setattr("httpx.AsyncClient._transport_for_url", lambda *_: transport)
    bench.monkeypatch.setenv("VLLM_API_KEY", "k")
    return fake


def test_prompts_are_exact_and_unforgeable_on_vllm(vllm):
    vllm.script = [COMMAND, 503, COMMAND, COMMAND, (bash("rm x"), "length")]
    template, sampling = {"enable_thinking": True}, {"top_p": 0.9, "seed": 3}
    kwargs = {**sampling, "extra_headers": {"X-Other": "1"}, "timeout": 77}
    kwargs["extra_body"] = {"top_k": 5, "chat_template_kwargs": template}
    agent = vllm.agent(llm_kwargs=kwargs, session_id="mine", max_tokens=99)
    # A token of the vocabulary that only looks special stays as it is.
    special, code = vllm.model.special, "".join(f"{text}\n" for text in ORDINARY)
    did = run(agent, printing(code + "".join(f"a {text} b<{text}\n" for text in special)))
    # A reply that was cut off keeps its ids, and is not run.
    assert (did.stop_reason, did.scripts) == ("max_tokens", ["ls\n"] * 3)
    assert did.turns == vllm.returned
    assert (did.metadata["n_prefix_breaks"], did.context.cost_usd) == (0, None)
    assert did.context.n_output_tokens == sum(len(ids) for _, ids, _ in vllm.returned)
    assert did.context.n_cache_tokens == 4 * 7
    experts = [[[number]] for number in range(1, 5)]
    assert did.context.rollout_details[0]["extra"]["routed_experts"] == experts
    # The template's own tail follows a turn, with special tokens broken up.
    broken = [f"{text[0]}\u200b{text[1:]}" for text in special]
    out = (code + "".join(f"a {text} b<{text}\n" for text in broken)).rstrip()
    tail = f"\n<|im_start|>user\nExit code: 0\nOutput:\n{out}<|im_end|>\n<|im_start|>"
    for (prompt, ids, _), (following, _, _) in itertools.pairwise(vllm.returned):
        assert following == prompt + ids + vllm.model.encode(tail + "assistant\n")
    # A turn costs two requests; once, the tail's beginning is looked for.
    assert [path for path, _, _ in vllm.requests].count("/tokenize") == 5
    for path, body, headers in vllm.requests:
        assert (headers["X-Other"], headers["Authorization"]) == ("1", "Bearer k")
        assert body["model"] == "served"
        if path == "/v1/completions":
            asked = {"max_tokens": 99, "temperature": 1.0, "top_k": 5, "session_id": "mine"}
            assert (asked | sampling).items() <= body.items()
            assert headers["X-Stainless-Read-Timeout"] == "77"
        else:
            assert body["chat_template_kwargs"] == template


def test_a_vllm_models_special_tokens_are_known_by_their_shapes():
    tokens = "<|im_end|> <|turn> <turn|> <s> </s> <start_of_turn> <tool_call> <think> <unk> [THINK]"
    tokens += " </seed:think> [INST] [/TOOL_RESULTS] [gMASK] ]~b] ]~!b[ [e~[ <fim_prefix>"
    for token in [*tokens.split(), "<\uff5ctool\u2581calls\u2581begin\uff5c>"]:
        text = f"a[1] <h1> {token}{token} List<int>"
        broken = basic_loop_agent.SPECIAL_SHAPES.sub("\\g<0>_", text)
        assert broken == f"a[1] <h1> {2 * f'{token[0]}_{token[1:]}'} List<int>"


@pytest.mark.parametrize("answer", [404, [], {"max_model_len": 9}, {"tokens": [1], "count": 1}])
def test_a_server_without_vllms_tokenize_is_an_error_that_names_the_other_client(vllm, answer):
    vllm.answer = lambda *request: answer
    with pytest.raises(RuntimeError, match=r"no /tokenize as vLLM's.*model_client=litellm"):
        run(vllm.agent())


def test_the_blocks_of_a_reply_run_as_one_script_until_it_has_none(bench):
    failed = ExecResult(stdout="x\n", stderr="no x", return_code=1)
    environment = ScriptedEnvironment(failed, None)
    replies = [bash("ls", "cat x"), bash("pwd", language="sh"), "done"]
    options = {"max_turns": 9, "command_timeout_sec": 77}
    did = bench.tinker(*replies, environment=environment, **options)
    assert (did.stop_reason, did.completion) == ("completed", "done")
    assert did.scripts == ["ls\ncat x\n", "pwd\n"]
    steps = did.view.steps
    assert [step.source for step in steps] == ["system", "user", "agent", "agent", "agent"]
    assert re.search("(?s)```bash.*has 77 seconds", steps[0].message)
    assert did.told == ["Exit code: 1\nOutput:\nx\nno x", "Exit code: 0\nOutput:\n(none)"]
    times = [step.timestamp for step in steps[2:]]
    assert sorted(times) == times
    # A loop that forgets to `tell` the model something.
    with pytest.raises(RuntimeError, match="nothing to send"):
        asyncio.run(did.agent.sample())
    with pytest.raises(RuntimeError, match="call `run` first"):
        asyncio.run(bench.agent().resume("go on", environment, AgentContext()))


@pytest.mark.parametrize(
    ("reply", "runs"),
    [
        ("1. so:\n   ```bash\n   cat <<E\n     x\n   E\n   ```", "cat <<E\n  x\nE\n"),
        ("- ```bash\n  a\n  ```\n- ```bash\n  b\n  ```", "a\nb\n"),
        (f"```bash\n{DOCSTRING}```", DOCSTRING),
        ("````bash\ncat <<E\n```\nE\n````", "cat <<E\n```\nE\n"),
        ("````markdown\n```bash\nrm x\n```\n````", None),
        ("~~~\n```bash\nrm x\n```\n~~~", None),
        ("```Bash\na\n```\n```SHELL\nb\n```", "a\nb\n"),
        ("```bash\nrm x", None),
        ("- ```bash\n  rm x\n```\n", None),
        ("```bash\nrm x\n    ```", None),
        ("```bash\nprintf 'a\0b'\n```", "printf 'ab'\n"),
    ],
)
def test_only_whole_fenced_bash_blocks_are_run(bench, reply, runs):
    assert bench.tinker(reply, "done", max_turns=2).scripts == ([runs] if runs else [])


def test_a_copy_with_the_readmes_reminder_records_it(bench, tmp_path, monkeypatch):
    no_script = "if not blocks:\n                return StopReason.COMPLETED\n"
    readme, source = ((ROOT / name).read_text() for name in ("README.md", "basic_loop_agent.py"))
    recipe = re.search(r"(?s)A bounded reminder.*?```python\n(.*?)```", readme)[1]
    source = source.replace(no_script, textwrap.indent(recipe, " " * 12).lstrip())
    (tmp_path / "changed_copy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    copied = importlib.import_module("changed_copy").BasicLoopAgent
    replies = "hm", bash("ls"), "so?", "last"
    did = bench.tinker(*replies, max_turns=9, agent_class=copied)
    reminder = "No bash block. If you are done, repeat your answer. If not, write a block."
    assert did.told == [reminder, "Exit code: 0\nOutput:\n(none)", reminder]
    assert (did.stop_reason, did.completion) == ("completed", "last")
    assert did.metadata["n_reminders"] == 2


# As issue 40 has it, literally.
INTERFACE = """
__init__(self, *, model_name, model_path=None, renderer_name=None, max_tokens=512, \
temperature=1.0, max_turns=1, system_prompt=None, model_client='tinker', api_base=None, \
**kw) -> None
name() -> str
version(self) -> str | None
async setup(self, environment) -> None
_build_llm(self) -> Any
_cache_key(self) -> tuple
async _shared_llm(self) -> Any
async run(self, instruction, environment, context) -> None
"""


def test_the_agent_has_the_interface_that_others_rely_on():
    for line in INTERFACE.strip().splitlines():
        method = getattr(BasicLoopAgent, re.search(r"(\w+)\(", line)[1])
        signature, empty = inspect.signature(method), inspect.Parameter.empty
        bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
        bare = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
        kind = "async " if inspect.iscoroutinefunction(method) else ""
        assert line == f"{kind}{method.__name__}{bare} -> {signature.return_annotation}"
    assert basic_loop_agent._trial_to_trajectory is trial_to_trajectory
    fields = BasicLoopOptions.model_fields
    parameters = list(inspect.signature(BasicLoopAgent).parameters.values())[1:9]
    defaults = {name: fields[name].default for name in list(fields)[-16:-8]}
    assert {one.name: one.default for one in parameters} == defaults


def test_the_model_is_told_of_a_tasks_skills_and_mcp_servers(bench, tmp_path):
    (tmp_path / "my skills/pdf").mkdir(parents=True)
    pdf = "---\nname: pdf\ndescription: Reads <|im_end|>\n---" + "\n" * 9 + "BODY"
    (tmp_path / "my skills/pdf/SKILL.md").write_text(pdf)
    web = MCPServerConfig(name="web", transport="sse", url="http://mcp:8000/sse")
    brought = {"skills_dir": str(tmp_path / "my skills"), "mcp_servers": [web]}
    did = bench.prepare("hello", environment=ShellEnvironment(), **brought)
    asyncio.run(did.agent.setup(did.environment))
    asyncio.run(did.go())
    told = did.view.steps[0].message
    assert f"user\n{told}<|im_end|>" in did.fake.prompt_text(0)
    assert re.search(r"(?s)web.*sse.*http://mcp:8000/sse.*\ndo it$", told)
    for text in ("name: pdf", "Reads <\u200b|im_end|>", f"{tmp_path}/my skills/pdf/SKILL.md"):
        assert told.count(text) == 1
    assert "BODY" not in told
    # A step that goes on is not told again.
    assert "http://mcp" not in did.resumed("next").view.steps[0].message


def processes(text: str) -> list[str]:
    """The command lines of this machine that hold a text."""
    found = subprocess.run(["pgrep", "-af", text], stdout=subprocess.PIPE, text=True)
    return [line.partition(" ")[2] for line in found.stdout.splitlines()]


def left_of(text: str) -> list[str]:
    """The processes of this text that do not go away: one that was killed may take a moment."""
    last = time.monotonic() + 20
    while processes(text) and time.monotonic() < last:
        time.sleep(0.01)
    return processes(text)


def own_seconds() -> str:
    """A time that no other process on the machine sleeps."""
    return f"6{uuid4().int % 10**9}"


@pytest.mark.parametrize(
    ("script", "exit_code", "output"),
    [
        ("for i in 1 2; do echo $i; echo e$i >&2; done; exit 3", 3, "1\ne1\n2\ne2"),
        ("-n\necho y", 0, "bash: (line 1: )?-n: command not found\ny"),
        ("cat", 0, r"\(none\)"),
        (r"printf '\n\nx'", 0, "\n\nx"),
        ("printf ':%s:'; head -c 3000 /dev/urandom", 0, ":.*"),
        # These exit codes are those of `timeout`; here they are the script's own.
        ("timeout 0.1 sleep 5", 124, r"\(none\)"),
        ("kill -9 $$", 137, r"\(none\)"),
        # A script may signal its process group. bash before 5.2 keeps the second one's exit code.
        ("echo a; kill 0; echo b", 143, "a"),
        ("trap 'kill 0' EXIT; sleep 99 & echo a; exit 4", "(4|143)", "a"),
        ("shopt -s extglob\necho /!(*)", 0, r"/!\(\*\)"),
        # A script sees of what runs it the mark alone; no argument holds its text.
        ("env | sed 's/=.*//' | grep BASIC", 0, "BASIC_LOOP_MARK"),
        (r"t=OWN; cat /proc/*/cmdline 2>/dev/null | tr '\0' '\n' | grep -c [6]${t#6}", 1, "0"),
        (r"ps -ef; echo $BASIC_LOOP_MARK; exit 3", 3, r".*\n\w+"),
        # With its time limit, or a flood, all that it started ends.
        *(
            (f"{ESCAPES} {end}", 124, LATE)
            for end in ("sleep OWN", "exec sleep OWN", "kill -STOP $$")
        ),
        ("echo first; setsid sleep OWN & yes", 137, FLOOD),
        ("echo first; setsid sleep OWN & yes | tr '\\n' y>&2", 137, FLOOD),
        ("echo first; setsid sleep OWN & trap '' PIPE; while :; do seq 9999; done", 137, FLOOD),
    ],
)
def test_the_model_is_told_exit_code_and_output_as_it_was_written(bench, script, exit_code, output):
    own, environment = own_seconds(), ShellEnvironment()
    seconds = 1 if output == LATE else 9
    told = bench.shell(script.replace("OWN", own), environment, command_timeout_sec=seconds)
    assert re.fullmatch(f"(?s)Exit code: {exit_code}\nOutput:\n{output}", told)
    assert len(environment.outputs[0]) < 5_500_000
    assert left_of(f"sleep {own}") == []


def test_output_of_any_bytes_comes_through_cut_to_its_head_and_tail(bench):
    script = "printf 'a%.0s' {1..5000}; printf 'b%.0s' {1..5000}"
    assert bench.shell(script) == "Exit code: 0\nOutput:\n" + "a" * 5000 + "b" * 5000
    middle = "\n[... 9999 bytes left out ...]\nb"
    assert bench.shell(script, max_output_bytes=1) == f"Exit code: 0\nOutput:\n{middle}"
    # Inside a character, or no text: what the shell above prints is decoded strictly, as ASCII.
    text = bench.shell("printf '中%.0s' {1..7000}", max_output_bytes=1000)
    lines = [line.strip("\ufffd") for line in text.splitlines()[2:]]
    assert lines == ["中" * 166, "[... 20000 bytes left out ...]", "中" * 166]
    assert bench.shell("printf 'caf\\351 \\377\\0x'").endswith("\ncaf\ufffd \ufffd\0x")
    text = bench.shell("head -c 3999900 /dev/zero; exit 7", max_output_bytes=10)
    assert (text[:13], text.count("\n[")) == ("Exit code: 7\n", 1)


@pytest.mark.parametrize("half", ["cat <<E\nx", "echo 'x", "if a; then", "f() {", "x=$(", "x &&"])
def test_half_a_script_is_not_run_and_the_model_is_told_why(bench, tmp_path, half):
    # Another block does not make it whole.
    blocks = (f"touch {tmp_path}/ran", half, "x\nE\n'\nfi\n)\n}")
    did = bench.tinker(bash(*blocks), "done", environment=ShellEnvironment(), max_turns=2)
    assert did.told[0] == "Exit code: 2\nOutput:\n[nothing was run: a block is unfinished]"
    assert not (tmp_path / "ran").exists()


def test_a_script_is_as_long_as_an_environment_takes_and_does_not_find_itself(bench):
    assert bench.shell(f'echo "{7_000 * chr(39)}" | wc -c').endswith("Output:\n7001")
    assert bench.shell("cat <<E | wc -c\n" + "x" * 40_000 + "\nE").endswith("Output:\n40001")
    environment = ScriptedEnvironment()
    assert "too long. Split it" in bench.shell("cat <<E\n" + "x" * 70_000 + "\nE", environment)
    assert environment.scripts == []
    # It finds neither itself nor its text: or it would never end, or end itself.
    own = f"x{own_seconds()}"
    script = f"while pgrep -f {own}; do sleep 1; done; pkill -f {own}; echo y"
    assert bench.shell(script) == "Exit code: 0\nOutput:\ny"


def test_a_script_costs_seven_programs_and_no_file(bench, tmp_path):
    # All that an image has to have.
    for name in ("base64", "bash", "cat", "cut", "grep", "head", "sed", "timeout"):
        real = f'echo {name} >>{tmp_path}/ran\nexec {shutil.which(name)} "$@"'
        (tmp_path / name).write_text(f"#!/bin/bash\n{real}\n")
        (tmp_path / name).chmod(0o755)
    # What others print spoils no output.
    environment = ShellEnvironment("echo noise; ", PATH=str(tmp_path))
    assert bench.shell("echo x", environment) == "Exit code: 0\nOutput:\nx"
    ran = ["base64", "base64", "bash", "bash", "head", "sed", "timeout"]
    assert sorted((tmp_path / "ran").read_text().split()) == ran
    assert bench.shell("seq 2", ShellEnvironment("ulimit -f 0; ")).endswith("\n1\n2")
    # An image that lacks something is named, and so is a bash before 4.4.
    for missing, text in (("base64", "not run: it needs bash 4.4"), ("bash", "bash: not found")):
        (tmp_path / missing).unlink()
        assert re.search(f"Exit code: 127\nOutput:\nnoise\n.*{text}", bench.shell("x", environment))


def test_a_process_in_the_background_neither_holds_up_the_turn_nor_dies(bench, tmp_path):
    own, ticks = own_seconds(), tmp_path / "ticks"
    # It goes on to write to its standard output, far more than a script may.
    server = f"for i in {{1..2000}}; do echo >>{ticks}; printf %99999d; sleep .01; done"
    try:
        text = bench.shell(f"echo started; ({server}) & sleep {own} &", command_timeout_sec=9)
        assert re.match(r"(?s)Exit code: 0\nOutput:\n.*started", text)
        assert len([line for line in processes(own) if line.startswith("sleep")]) == 1
        n_ticks = len(ticks.read_bytes())
        asyncio.run(until(lambda: len(ticks.read_bytes()) >= n_ticks + 60))
    finally:
        subprocess.run(["pkill", "-9", "-f", own])


def test_the_agents_limit_comes_before_the_environments_own(bench):
    async def hangs() -> None:
        # As Docker does: a RuntimeError at its own limit, which would end the trial.
        await asyncio.sleep(did.environment.timeouts[0])
        raise RuntimeError("Command timed out")

    for answer in (hangs, TimeoutError()):
        environment = ScriptedEnvironment(answer)
        did = bench.prepare(bash("ls"), "done", max_turns=2, environment=environment)
        with time_passes_at_once() as runner:
            runner.run(did.go())
        assert did.told == ["Exit code: 124\nOutput:\n[no answer; the time limit is 120 seconds]"]
        assert (did.stop_reason, did.scripts) == ("completed", ["ls\n", None])


@pytest.mark.parametrize("ending", ["cancelled", "rollout_timeout"])
def test_a_script_goes_with_its_trial(bench, tmp_path, ending):
    own, passed = own_seconds(), []
    # It stops what runs it, too.
    script = f"setsid sleep {own} & env -i sleep {own} & kill -STOP $PPID;"
    script += f"touch {tmp_path}/stopped; sleep {own}"
    options = {"max_turns": 2, "max_seconds": 3000, "command_timeout_sec": 7000}
    did = bench.prepare(bash(script), environment=ShellEnvironment(), **options)

    async def main() -> None:
        trial = asyncio.create_task(did.go())
        await until((tmp_path / "stopped").exists)
        # An hour passes, or Ctrl-C is pressed.
        passed.append(3600 * (ending == "rollout_timeout"))
        assert ending == "rollout_timeout" or trial.cancel()
        await asyncio.wait([trial], timeout=60)

    loop = asyncio.new_event_loop()
    loop.time = lambda: time.monotonic() + sum(passed)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert left_of(f"sleep {own}") == []
    assert (did.stop_reason, did.completion) == (ending, bash(script))


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.parametrize(("seconds", "ending"), [(None, "cancelled"), (50, "rollout_timeout")])
def test_a_cancellation_wins_over_an_error_that_answers_it(bench, by_client, seconds, ending):
    reply, output = (fails_when_cancelled, None) if by_client else ("done", fails_when_cancelled)
    options = {"environment": ScriptedEnvironment(output, None), "max_seconds": seconds}
    did = bench.prepare(bash("ls"), reply, command_timeout_sec=500, max_turns=9, **options)
    with time_passes_at_once() as runner:
        runner.run(did.agent.setup(did.environment))
        with pytest.raises(TimeoutError) if seconds is None else contextlib.nullcontext():
            runner.run(asyncio.wait_for(did.go(), None if seconds else 50))
    assert (did.stop_reason, len(did.turns)) == (ending, 1)


@pytest.mark.parametrize(
    ("script", "stop_reason", "n_both"),  # Of turns, and of scripts.
    [
        (["done"], "completed", (1, 0)),
        ([bash("ls"), bash("ls"), "done"], "completed", (3, 2)),
        ([bash("ls")], "max_turns", (3, 3)),
        ([bash("rm x"), "length"], "max_tokens", (1, 0)),
        ([bash("ls"), OVERFLOW], "context_overflow", (1, 1)),
        ([bash("ls"), forever], "cancelled", (1, 1)),
        ([bash("ls"), asyncio.CancelledError("by the SDK")], "error", (1, 1)),
        ([bash("ls"), TimeoutError("of the server's")], "error", (1, 1)),
        ([bash("ls"), forever], "rollout_timeout", (1, 1)),
    ],
)
@pytest.mark.parametrize("client", ["tinker", "litellm"])
def test_every_ending_has_a_name_and_keeps_its_turns(bench, client, script, stop_reason, n_both):
    finish = "length" if stop_reason == "max_tokens" else "stop"
    if client == "litellm":
        bench.api(*script, finish=finish, ids=True)
    elif finish == "length":
        script = [Sampled(script[0], finish)]
    options = {"model_client": client, "collect_rollout_details": True}
    # Harbor's limit, which cancels the run, comes before the agent's own, or after it.
    limit = 20 if stop_reason == "cancelled" else 9000
    did = bench.prepare(*script, max_turns=3, max_seconds=50, **options)
    fails = stop_reason in ("cancelled", "error")
    error = pytest.raises((RuntimeError, TimeoutError))
    with time_passes_at_once() as runner, error if fails else contextlib.nullcontext():
        runner.run(did.agent.setup(did.environment))
        runner.run(asyncio.wait_for(did.go(), limit))
    assert did.stop_reason == stop_reason
    assert did.metadata["n_episodes"] == len(did.turns)
    assert (len(did.turns), len(did.scripts)) == n_both
    replies = [step.message for step in did.view.steps if step.source == "agent"]
    assert did.completion == (replies[-1] if replies else "")
    assert client == "litellm" or did.turns == did.fake.returned


def test_only_an_error_in_the_request_itself_is_a_full_context(bench):
    def failed(message: str, category: str) -> Exception:
        category = tinker.types.RequestErrorCategory(category)
        return tinker.RequestFailedError(message, request_id="1", category=category)

    for error in (refused(400, "Context length 9"), failed("prompt is too long", "user")):
        assert bench.tinker(error).stop_reason == "context_overflow"
    for error in (failed("too long", "server"), refused(503, "too long"), refused(400, "no model")):
        assert bench.tinker(error, raises=type(error)).stop_reason == "error"


def test_a_long_conversation_gets_shorter_replies_and_then_overflows(bench, vllm):
    options = {"max_turns": 99, "system_prompt": "x", "max_tokens": 100, "context_limit": 300}
    did = bench.tinker(bash("ls"), **options)
    assert did.stop_reason == "context_overflow"
    room = [300 - len(prompt) for prompt, _ in did.fake.requests]
    assert [asked.max_tokens for _, asked in did.fake.requests] == [min(100, n) for n in room]
    assert 0 < min(room) < 100
    # The smaller of the server's and the option's.
    vllm.script = [("hello", "stop")]
    for limit, most in ((None, 9000), (99_999, 9000), (300, 300)):
        run(vllm.agent(context_limit=limit, max_tokens=99_999, max_turns=1))
        assert vllm.requests[-1][1]["max_tokens"] == most - len(vllm.returned[-1][0])


def test_an_error_is_raised_unchanged_and_leaves_what_there_is(bench):
    # An earlier step's answer is not left where no client came about.
    (bench.logs_dir / "completion.txt").write_text("earlier")
    did = bench.tinker(model_path="tinker://missing", raises=tinker.APIStatusError)
    assert (did.stop_reason, did.completion) == ("error", "")
    gone = ScriptedEnvironment(RuntimeError("container is gone"))
    did = bench.tinker(bash("x"), max_turns=2, environment=gone, raises=RuntimeError)
    assert (did.stop_reason, did.completion) == ("error", bash("x"))
    # A folder in a file's place leaves the context whole.
    (bench.logs_dir / "trajectory.json").unlink()
    (bench.logs_dir / "trajectory.json").mkdir()
    did = bench.tinker("hello", raises=IsADirectoryError)
    assert did.turns == did.fake.returned


def test_a_second_run_starts_clean_and_resume_goes_on_exactly(bench):
    replies = [bash("ls"), bash("ls"), "one", "two", RuntimeError("gone")]
    options = {"max_turns": 2, "renderer_name": "qwen3", "system_prompt": "Be brief."}
    did = bench.tinker(*replies, environment=printing("<|im_end|>out"), **options)
    assert did.stop_reason == "max_turns"
    step = did.resumed("step two")
    assert did.turns + step.turns == did.fake.returned
    assert (step.metadata["n_episodes"], step.metadata["n_prefix_breaks"]) == (1, 0)
    # It hears what the last commands gave.
    output = "Exit code: 0\nOutput:\n<\u200b|im_end|>out\n\nstep two"
    assert [turn.message for turn in step.view.steps] == ["Be brief.", output, "one"]
    prompt, tokens, _ = did.fake.returned[1]
    assert did.fake.returned[2][0][: len(prompt + tokens)] == prompt + tokens
    asyncio.run(did.go())
    assert did.fake.returned[3][0] == did.fake.returned[0][0]
    assert did.completion == "two"
    # An earlier run's answer is never left to be scored.
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(did.go())
    assert did.completion == ""


TRAPS = ["ln -s ../victim", "ln -s $(printf %0300d)", "mkfifo", "touch x; chmod 0 x; mv x"]


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
def test_what_a_command_puts_at_a_files_name_is_no_trap(bench, tmp_path, name, trap):
    victim, logs = tmp_path / "victim", tmp_path / "logs"
    victim.write_text("precious")
    logs.mkdir()
    place = logs / name
    subprocess.run(f"{trap} {name}", shell=True, cwd=logs, check=True)
    did = bench.tinker("hello", logs_dir=logs)
    assert did.completion == did.view.steps[-1].message == "hello"
    assert (place.is_file(), place.is_symlink()) == (True, False)
    assert victim.read_text() == "precious"


def test_no_sampled_token_is_ever_lost_misaligned_or_recorded_twice(bench):
    """300 runs with random endings. A cancellation inside the client's own call is the one
    exception: what the sampler had not yet returned is gone, so the fake does not count it."""

    async def stopped_after(n_steps: int) -> None:
        await did.agent.setup(did.environment)
        trial = asyncio.create_task(did.go())
        while n_steps and not trial.done():
            n_steps -= 1
            await asyncio.sleep(0)
        trial.cancel()
        await asyncio.wait([trial])

    for seed in range(300):
        rng = random.Random(seed)
        results = [ExecResult(stdout="x" * 30, return_code=0), RuntimeError("gone"), TimeoutError()]
        did = bench.prepare(
            *(random_answer(rng) for _ in range(12)),
            environment=ScriptedEnvironment(*rng.choices(results, weights=[8, 1, 1], k=12)),
            max_turns=rng.randint(1, 8),
            renderer_name=rng.choice(["qwen3", "qwen3_instruct", "role_colon", "qwen3_5"]),
            context_limit=rng.choice([None, None, 600]),
        )
        # In the old SDK's future an answer waits for the loop, where a cancellation may find it.
        n_steps = 10_000 if IS_OLD_SDK else rng.choice([10_000, rng.randrange(1, 60)])
        asyncio.run(stopped_after(n_steps))
        returned = did.fake.returned
        whole = [(prompt, tokens, logprobs or []) for prompt, tokens, logprobs in returned]
        is_odd = set(NO_LOGPROBS).intersection
        whole = [one for one in whole if len(one[1]) == len(one[2]) and not is_odd(one[2])]
        assert did.turns == whole, seed
        assert did.metadata["n_episodes"] == len(returned), seed
        assert did.metadata["n_turns_without_ids"] == len(returned) - len(whole), seed
        agents = [step for step in did.view.steps if step.source == "agent"]
        ids = [step.metrics.completion_token_ids for step in agents]
        assert ids == [turn[1] for turn in returned], seed
        assert AgentContext.model_validate_json(did.context.model_dump_json()) == did.context


def random_answer(rng: random.Random) -> Any:
    text = rng.choice(["", "done", *[bash("ls")] * 3, "<think>a</think>" + bash("ls")])
    no_tokens = Sampled("", rng.choice(["stop", "length"]), rng.choice(["own", None]), [])
    odd = [Sampled(text, logprobs=None), Sampled(text, logprobs=[-1.0]), Sampled(text, "length")]
    odd.append(Sampled(tokens=[50, 51, 2], logprobs=[-1.0, rng.choice(NO_LOGPROBS), -1.0]))
    errors = [RuntimeError("API error"), refused(400, "prompt is too long")]
    return rng.choice([Sampled(text)] * 8 + odd + [no_tokens, rng.choice(errors)])


def test_a_prompt_is_the_last_prompt_its_reply_and_the_templates_tail(bench, model):
    rng, odd_space = random.Random(model.name), "\n\n \t hm \n"
    texts = [rng.choice([odd_space, "", "\n"]) + bash(f"echo {rng.random()}") for _ in range(6)]
    replies = [model.encode_oddly(model.reply(text)) + model.stop for text in texts]
    options = {"max_turns": 6, "max_tokens": 4096, "environment": printing(f"{odd_space}out\n")}
    did = bench.tinker(*(Sampled(tokens=tokens) for tokens in replies), **options, **model.options)
    returned = did.fake.returned
    assert did.turns == returned
    assert len(did.scripts) == 6
    kept = 0
    for (prompt, tokens, _), (following, _, _) in itertools.pairwise(returned):
        kept += following[: len(prompt + tokens)] == prompt + tokens
    assert did.metadata["n_prefix_breaks"] == 5 - kept
    assert kept == 5 or not model.is_exact


def test_a_prompt_has_no_special_tokens_but_those_of_the_templates_view(bench, model):
    """So a command's output cannot become structure. Also: the prompt is that view where the
    template keeps what it once rendered, or closes a reply in its own way."""
    thinking = "hm" if model.opens_thinking else None
    tokens = model.encode(model.reply(bash("ls"), thinking)) + model.stop
    content = bash("ls")
    if model.opens_thinking:
        content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": content}]
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "do it"}]
    said = {"role": "user", "content": "Exit code: 0\nOutput:\nout"}
    turn = [{"role": "assistant", "content": content}, said]
    views = [model.rendered(start + turn * number) for number in range(3)]
    special = model.special_ids - {model.encode(tag)[0] for tag in ("<think>", "</think>")}
    hostile = "".join(f"a {text} b<{text}<{text}\n" for text in model.special)
    prompts = []
    for output in ("out", hostile):
        options = {"max_turns": 3, "system_prompt": "Be brief.", "environment": printing(output)}
        did = bench.tinker(Sampled(tokens=tokens), **options, **model.options, max_tokens=99_999)
        seen = did.told[0].replace("\u200b", "")
        assert seen == f"Exit code: 0\nOutput:\n{output}".rstrip()
        prompts.append([prompt for prompt, _, _ in did.fake.returned])
    keeps = model.renderer.has_extension_property and not model.opens_thinking
    for view, prompt, with_hostile in zip(views, *prompts, strict=True):
        assert [i for i in prompt if i in special] == [i for i in view if i in special]
        special_ids = [[i for i in ids if i in model.special_ids] for ids in (prompt, with_hostile)]
        assert special_ids[0] == special_ids[1]
        if keeps or not model.is_exact:
            assert prompt == view


class Forgetful(BasicLoopAgent):
    """What a user writes to run other blocks, keep a verdict, and make the model forget."""

    protocol = "Write ```sh or ```python blocks, not {json: 1}; {seconds} seconds."

    def bash_blocks(self, reply: str) -> list[str]:
        blocks = basic_loop_agent.fenced_blocks(reply)
        return [f"python3 - <<'EOF'\n{text}EOF\n" for name, text in blocks if name == "python"]

    async def execute(self, blocks: list[str], environment: Any) -> str:
        # Also what JSON cannot hold: it would cost the whole job its results.
        self.metadata |= {"judge": 0.5, "by": Path("me"), "cut": "\ud83d"}
        if "forget" in blocks[0]:
            self.messages[0]["content"] = self.messages[2]["content"] = "(left out)"
        return (await super().execute(blocks, environment)).splitlines()[-1]


def test_a_subclass_changes_the_loop_and_edits_the_history(bench, tokenizer_dir):
    python = functools.partial(bash, language="python")
    ids = Model("qwen3_instruct", tokenizer_dir).encode_oddly(python("ls()"))
    odd, gone = Sampled(tokens=[*ids, 2]), RuntimeError("gone")
    options = {"max_turns": 9, "agent_class": Forgetful, "environment": printing("first\nlast\n")}
    did = bench.tinker(odd, python("forget()"), odd, odd, gone, raises=RuntimeError, **options)
    assert did.scripts[0] == "python3 - <<'EOF'\nls()\nEOF\n"
    assert did.view.steps[0].message == Forgetful.protocol.replace("{seconds}", "120")
    assert did.told == ["last"] * 4
    assert [did.metadata[name] for name in ("judge", "by", "cut")] == [0.5, "me", "?"]
    # After the edit it is rendered anew, once.
    assert (did.stop_reason, did.metadata["n_prefix_breaks"]) == ("error", 1)
    tail = "<|im_end|>\n<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
    texts = [did.fake.prompt_text(number) for number in (2, 3, 4)]
    assert all(text.count("left out") == 2 and text.endswith(tail) for text in texts)


def test_tinker_gets_every_option_and_a_server_of_its_own(bench):
    source = {"model_path": "tinker://run/sampler_weights/1", "record_stability_info": True}
    sampling = {"seed": 3, "top_p": 0.9, "top_k": 5}
    options = {"model_path": source["model_path"], "api_base": "http://localhost:1"}
    options["llm_kwargs"] = sampling | {"record_stability_info": True}
    fake = bench.tinker("hello", max_tokens=7, temperature=0.5, **options).fake
    asked = {"max_tokens": 7, "temperature": 0.5, "stop": [2], **sampling}
    assert asked.items() <= dict(fake.requests[0][1]).items()
    assert fake.samplers == [source]
    assert fake.services[0].arguments["base_url"] == options["api_base"]
    fake = bench.tinker("hello", temperature=None).fake
    assert fake.requests[0][1].temperature == 1.0
    assert fake.samplers == [{"base_model": fake.name}]


def test_a_configuration_has_one_client_and_all_one_session(bench, tmp_path):
    fake = bench.service()
    different = [{}, {"model_path": "tinker://1"}, {"max_turns": 5}, {"max_tokens": 1}]
    different += [{"renderer_name": "role_colon"}, {"temperature": 0}, {"llm_kwargs": {"seed": 1}}]
    set_up(bench.agent())
    assert (len(fake.samplers), len(fake.requests)) == (1, 0)
    trials = []
    for number, options in enumerate([{}, *different] * 3):
        trials.append(Run(bench.agent(logs_dir=tmp_path / str(number), **options)))
    asyncio.run(together(trial.go() for trial in trials))
    assert len(fake.samplers) == 1 + len(different)
    # Another event loop has clients of its own, in the same session.
    asyncio.run(together(trial.go() for trial in trials))
    assert (len(fake.samplers), len(fake.services)) == (1 + 2 * len(different), 1)


@pytest.mark.parametrize("status", [404, 410])
def test_when_a_session_is_over_the_next_trial_goes_on_in_a_new_one(bench, status):
    fake = bench.service(bash("ls"))

    async def ends_the_session() -> None:
        fake.services[0].status = status

    with asyncio.Runner() as runner:
        lost = Run(bench.agent(max_turns=3), ScriptedEnvironment(ends_the_session))
        with pytest.raises(Exception, match="terminated"):
            runner.run(lost.go())
        # What was sampled until then is kept.
        assert (lost.stop_reason, lost.turns) == ("error", fake.returned)
        # All later ones share one session, and new checkpoints, too.
        options = [{}, {}, {"max_tokens": 9}, {"model_path": "tinker://run/sampler_weights/2"}]
        dids = [Run(bench.agent(max_turns=3, **one)) for one in options]
        runner.run(together(did.go() for did in dids))
    assert [len(did.turns) for did in dids] == [3] * 4
    assert len(fake.services) == 2
    # A checkpoint that does not exist fails its trial, and leaves the session to the others.
    with pytest.raises(Exception, match="no such checkpoint"):
        run(bench.agent(model_path="tinker://run/sampler_weights/missing"))
    run(bench.agent(max_tokens=9))
    assert fake.services[1] in basic_loop_agent._services.values()
    # A service that was given is never replaced.
    basic_loop_agent.use_service(fake.services[0])
    with pytest.raises(Exception, match="no such checkpoint"):
        run(bench.agent())
    assert len(fake.services) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turn": 3}, r"max_turn\b"),
        ({"model_client": "openai"}, "model_client.*'tinker', 'litellm' or 'vllm'"),
        *(({name: 0}, f"{name}.*greater than") for name in AT_LEAST_ONE),
        ({"temperature": math.inf}, "temperature.*finite number"),
        ({"model_path": ""}, "model_path.*tinker://"),
        ({"llm_kwargs": {"max_tokens": 3}}, "llm_kwargs holds max_tokens: use the option"),
        ({"model_client": "litellm", "renderer_name": "qwen3"}, "are for model_client=tinker"),
        ({"model_client": "vllm"}, "vllm needs api_base, such as http://localhost:8000"),
    ],
)
def test_a_bad_option_is_one_clear_error(options, message):
    given = {"logs_dir": Path(), "model_name": "m", "llm_kwargs": {"api_key": "sk-secret"}}
    with pytest.raises(ValueError, match=f"(?s){message}") as error:
        BasicLoopAgent(**given | options)
    assert "sk-secret" not in str(error.value)


def test_what_depends_on_the_model_is_refused_in_setup(bench, monkeypatch):
    bench.refuses(ValueError, "qwen9", renderer_name="qwen9")
    bench.refuses(TypeError, "tempreature", llm_kwargs={"tempreature": 1})
    bench.refuses(ValueError, "no model: name one with -m", model_name=None)
    litellm = {"model_client": "litellm"}
    bench.refuses(Exception, "LLM Provider NOT provided", model_name="mock", **litellm)
    # Keys of providers other than Tinker are their own business.
    set_up(bench.agent(model_name="anthropic/claude-sonnet-4-5", **litellm))
    monkeypatch.delenv("TINKER_API_KEY")
    bench.refuses(ValueError, "no API key for Tinker: set TINKER_API_KEY")
    if importlib.util.find_spec("tinker.auth"):
        # From 0.38 on the SDK stores keys, too.
        monkeypatch.setattr("tinker.auth.tinker_has_credentials", lambda: True)
        set_up(bench.agent())
    monkeypatch.setitem(sys.modules, "tinker_cookbook", None)
    with pytest.raises(ValueError, match=r"pip install 'harbor\[tinker\]'"):
        bench.agent()


@pytest.mark.skipif(not hasattr(BasicLoopAgent, "extra_env"), reason="since Harbor 0.16")
def test_keys_and_urls_are_the_agents_or_the_processs_and_stay_unseen(bench, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    fake = bench.service()
    for name in ("TINKER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "key-process")
    monkeypatch.setenv("OPENAI_API_BASE", "http://process")
    own = {"TINKER_API_KEY": "key-own", "TINKER_BASE_URL": "http://own"}
    other = own | {"TINKER_API_KEY": "key-other"}
    for options, key, url in (
        ({}, "key-process", None),
        ({"extra_env": own}, "key-own", "http://own"),
        ({"extra_env": other, "api_base": "http://x"}, "key-other", "http://x"),
    ):
        run(bench.agent(**options))
        arguments = fake.services[-1].arguments
        assert (arguments["api_key"] or "key-process", arguments["base_url"]) == (key, url)
    # A key from a file ends in a newline. `jobs resume` gives a key as Harbor has saved it.
    own = {"OPENAI_API_KEY": "key-own\n", "OPENAI_BASE_URL": "http://own"}
    starred = {"OPENAI_API_KEY": "key-****own", "TINKER_API_KEY": "****"}
    for options, key, url in (
        ({"extra_env": starred}, "key-process", "http://process"),
        ({"extra_env": own, "api_base": "http://x:1/"}, "key-own", "http://x:1/v1"),
        ({"extra_env": own, "llm_kwargs": {"api_key": "key-2\n"}}, "key-2", "http://own"),
        # A name without its provider, which litellm knows.
        ({"extra_env": own, "model_name": "gpt-4o"}, "key-own", "http://own"),
    ):
        did = bench.lite("hello", **options)
        assert (did.fake[-1]["api_key"], did.fake[-1]["api_base"]) == (key, url)
        seen = [repr(did.agent.options), str(did.agent.options), did.context.model_dump_json()]
        seen += [path.read_text() for path in bench.logs_dir.glob("*.*")]
        assert not any("key-" in text for text in [*seen, *caplog.messages])
        # Harbor would put it into the environment of each command.
        assert did.agent.extra_env == {}
    monkeypatch.delenv("OPENAI_API_KEY")
    assert bench.lite("hello", api_base="http://x").fake[-1]["api_key"] == "none"
    monkeypatch.delenv("TINKER_API_KEY")
    set_up(bench.agent(extra_env=other))
    set_up(bench.agent(llm_kwargs={"api_key": "key-own"}))
    bench.refuses(ValueError, "no API key for Tinker: ", extra_env=starred)


@pytest.mark.skipif(not hasattr(BasicLoopAgent, "options_schema"), reason="since Harbor 0.23")
def test_a_bad_option_or_a_missing_key_ends_a_job_before_any_trial(tmp_path, monkeypatch):
    schema = BasicLoopAgent.options_schema()["properties"]
    assert all(schema[name]["description"] for name in BasicLoopOptions.__annotations__)
    with pytest.raises(ValueError, match="Unknown option 'max_turn'"):
        asyncio.run(Job.create(job_config(tmp_path, lite_agent(max_turn=3))))
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ValueError, match="no API key for Tinker: set TINKER_API_KEY"):
        asyncio.run(Job.create(job_config(tmp_path, lite_agent())))
    keyed = lite_agent() | {"env": {"TINKER_API_KEY": "tml-own"}}
    asyncio.run(Job.create(job_config(tmp_path, keyed)))


def job_config(jobs_dir: Path, *agents: dict[str, Any], **config: Any) -> JobConfig:
    """A job over the example task, with the fakes in place of the container and the verifier."""
    fakes = {"environment": "HostEnvironment", "verifier": "HostVerifier"}
    fakes = {part: {"import_path": f"examples.fakes:{name}"} for part, name in fakes.items()}
    config = {"tasks": [{"path": ROOT / "examples/greet"}], **fakes, **config}
    return JobConfig(jobs_dir=jobs_dir, quiet=True, agents=agents, **config)


def lite_agent(model_name="openai/mock", **kwargs: Any) -> dict[str, Any]:
    path = "basic_loop_agent:BasicLoopAgent"
    return {"import_path": path, "model_name": model_name, "kwargs": kwargs}


def tinker_agent(fake, renderer_name="qwen3_instruct", **kwargs: Any) -> dict[str, Any]:
    return lite_agent(fake.name, renderer_name=renderer_name, **kwargs)


def run_job(jobs_dir: Path, *agents: dict[str, Any], **config: Any) -> list[Any]:
    """The trials of such a job, as they are read back from its files."""
    with asyncio.Runner() as runner:
        job = runner.run(Job.create(job_config(jobs_dir, *agents, **config)))
        result = runner.run(job.run())
    trials = []
    for trial in result.trial_results:
        folder = Path(trial.trial_uri.removeprefix("file://"))
        trials.append(TrialResult.model_validate_json((folder / "result.json").read_text()))
        live, read = trial_to_trajectory(trial), trial_to_trajectory(trials[-1])
        assert live is read is None or live.turns == read.turns
    return trials


def test_a_jobs_trials_give_back_every_sampled_token_and_its_sequence(bench, tmp_path):
    fake = bench.service(*[f"<think>a</think>{bash('ls')}", Sampled("hello wo", "length")] * 2)
    agent = tinker_agent(fake, max_turns=2, renderer_name="qwen3")
    trials = run_job(tmp_path, agent, n_attempts=2, n_concurrent_trials=1)
    wholes = [trial_to_trajectory(trial) for trial in trials]
    assert {whole.stop_reason for whole in wholes} == {"max_tokens"}
    turns = [turn for whole in wholes for turn in whole.turns]
    ids = [tuple(getattr(turn, name) for name in IDS) for turn in turns]
    assert sorted(ids) == sorted(fake.returned)
    numbers = [fake.returned.index(turn) for turn in ids]
    sequences = [None if IS_OLD_SDK else f"sequence-{number}" for number in numbers]
    assert [turn.extra["sequence_id"] for turn in turns] == sequences
    assert sum(trial.agent_result.n_cache_tokens for trial in trials) == 3 * (1 + 2 + 3)


def test_a_timeout_is_scored_a_failed_trial_is_not_and_a_bad_record_is_an_error(bench, tmp_path):
    fake = bench.service(Sampled("hello world\n" + bash("ls")), forever)
    hasty = tinker_agent(fake, max_turns=3) | {"override_timeout_sec": 1}
    (trial,) = run_job(tmp_path / "late", hasty)
    whole = trial_to_trajectory(trial)
    assert trial.exception_info is not None
    assert (whole.stop_reason, whole.reward) == ("cancelled", 0.0)
    assert len(whole.turns) == len(fake.returned) == 1
    # Harbor would take a client's own TimeoutError for the agent's timeout, and score the trial.
    fake = bench.service(bash("ls"), TimeoutError("service is gone"))
    (failed,) = run_job(tmp_path, tinker_agent(fake, max_turns=2))
    assert failed.exception_info.exception_type == "RuntimeError"
    assert "service is gone" in failed.exception_info.exception_message
    assert trial_to_trajectory(failed) is None
    failed.exception_info = None
    failed.verifier_result = VerifierResult(rewards={"reward": 1})
    assert trial_to_trajectory(failed) is None
    failed.agent_result.metadata["stop_reason"] = "completed"
    # Harbor's own word, where it has one (0.25).
    with patch.object(TrialResult, "reward_valid", False, create=True):
        assert trial_to_trajectory(failed) is None
    scored = [({"reward": 1, "style": 0.5}, 1), ({"score": 0.25}, 0.25), ({"a": 1, "b": 2}, None)]
    for rewards, reward in [*scored, ({}, None)]:
        failed.verifier_result = VerifierResult(rewards=rewards)
        assert trial_to_trajectory(failed).reward == reward
    (record,) = failed.agent_result.rollout_details
    for wrong in {"logprobs": [[]]}, {"logprobs": [[math.nan]]}, {"prompt_token_ids": [[1], [1]]}:
        failed.agent_result.rollout_details = [record | wrong]
        with pytest.raises(ValueError, match=r"argument \d|differ in length"):
            trial_to_trajectory(failed)
    failed.agent_result.rollout_details = None
    assert trial_to_trajectory(failed) is None
    failed.verifier_result = VerifierResult(rewards={"style": math.nan})
    with pytest.raises(ValueError, match=f"trial {failed.trial_name}: .*'style': nan"):
        trial_to_trajectory(failed)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_multi_step_trial_with_a_failed_step_is_no_training_data(bench, tmp_path, failing):
    script = ["Hello, world!", "Hello, world!"]
    script[failing] = RuntimeError("service is gone")
    fake = bench.service(*script)
    task = shutil.copytree(ROOT / "examples/greet", tmp_path / "task")
    settings = 'schema_version = "1.3"\nmulti_step_reward_strategy = "mean"\n'
    for step in ("first", "second"):
        settings += f'[[steps]]\nname = "{step}"\n'
        shutil.copytree(task / "tests", task / f"steps/{step}/tests")
        shutil.copy(task / "instruction.md", task / f"steps/{step}")
    (task / "task.toml").write_text(settings)
    # Harbor resumes steps since 0.20.
    resumes = {"resume_trajectory": True} if failing and hasattr(BaseAgent, "resume") else {}
    (trial,) = run_job(tmp_path, tinker_agent(fake) | resumes, tasks=[{"path": task}])
    assert trial.exception_info is None
    assert trial.verifier_result.rewards["reward"] is not None
    assert trial_to_trajectory(trial) is None
    # After a timeout a step is scored on purpose.
    trial.step_results[failing].exception_info.exception_type = "AgentTimeoutError"
    trial.step_results[failing].agent_result.metadata["stop_reason"] = "cancelled"
    whole = trial_to_trajectory(trial)
    assert whole.reward == trial.verifier_result.rewards["reward"]
    assert whole.stop_reason == ("completed" if failing == 0 else "cancelled")


def fake_training(fake: FakeTinker) -> AsyncMock:
    """What tinker-cookbook's trainer has for Tinker's service, and for its training client."""

    def future(**result: Any) -> Any:
        return Mock(result_async=AsyncMock(return_value=SimpleNamespace(**result)))

    def forward_backward(data: list[Any], **kwargs: Any) -> Any:
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return future(loss_fn_outputs=outputs)

    training = AsyncMock(create_rest_client=Mock(return_value=AsyncMock()))
    training.create_lora_training_client_async.return_value = training
    training.create_training_client_from_state_with_optimizer_async.return_value = training
    training.forward_backward_async.side_effect = forward_backward
    training.optim_step_async.return_value = future(metrics={})
    training.save_state_async.side_effect = lambda name, **kwargs: future(path=f"tinker://{name}")
    training.save_weights_for_sampler_async.return_value = future(path="tinker://final")
    training.save_weights_and_get_sampling_client_async.side_effect = fake
    return training


def sampled_in(datum: Any) -> tuple[list[int], list[float], float]:
    """The sampled ids of a datum, their logprobs, and their advantage."""
    names = ("target_tokens", "logprobs", "advantages")
    columns = [datum.loss_fn_inputs[name].to_torch().tolist() for name in names]
    tokens = [token for token in zip(*columns, strict=True) if token[1]]
    ids, logprobs, advantages = zip(*tokens, strict=True)
    (advantage,) = set(advantages)
    return list(ids), [round(logprob, 3) for logprob in logprobs], round(advantage, 3)


def test_the_cookbooks_trainer_trains_on_trials(bench, tmp_path, monkeypatch):
    module = importlib.import_module("examples.train")
    right, wrong, gone = "Hello, world!", "no", RuntimeError("the sampler\nis gone")
    # Four trials a step, of which one fails. Of the second step only one is scored, so it is
    # skipped. An evaluation is two trials.
    step = [bash("ls"), right, bash("ls"), wrong, gone, right]
    fake = bench.service(right, wrong, *step, gone, gone, gone, right, *step, right)
    training = fake_training(fake)
    monkeypatch.setattr("tinker.ServiceClient", lambda **kwargs: training)
    greet, fakes = str(ROOT / "examples/greet"), "examples.fakes:Host"
    tasks = {"tasks": [greet], "test_tasks": [greet], "test_group_size": 2, "group_size": 4}
    tasks |= {"environment": f"{fakes}Environment", "verifier": f"{fakes}Verifier"}
    tasks |= {"concurrency": 1, "agent_options": {"max_turns": 2}, "steps": 3}
    config = {"model_name": fake.name, "renderer_name": "qwen3_instruct", "max_tokens": 64}
    config |= {"learning_rate": 0.5, "log_path": str(tmp_path / "log")}
    config = module.Config(dataset_builder=module.HarborTasks(**tasks), **config)
    module.main(config)
    # The same command, once more, finds nothing to do.
    module.main(config)
    trained = [call.args[0] for call in training.forward_backward_async.await_args_list]
    assert [len(data) for data in trained] == [3, 3]
    # A multi-turn trial is one datum, and each token has the logprob that it was sampled with.
    expected = []
    for first, last, advantage in ((2, 3, 0.333), (4, 5, -0.667), (6, 6, 0.333)):
        turns = fake.returned[first : last + 1]
        ids, logprobs = ([one for turn in turns for one in turn[n]] for n in (1, 2))
        expected.append((ids, logprobs, advantage))
    assert list(map(sampled_in, trained[0])) == expected
    log = (tmp_path / "log/logs.log").read_text()
    assert re.search("left out rl-greet-[0-9a-f]+: it failed: the sampler is gone\n", log)
    lines = map(json.loads, (tmp_path / "log/metrics.jsonl").read_text().splitlines())
    names = ["step", "env/all/solved", "test/greet/env/all/reward/total"]
    metrics = [[round(line.get(name, -1), 2) for name in names] for line in lines]
    assert metrics == [[0, 0.67, 0.5], [1, -1, -1], [2, 0.67, -1], [3, -1, 1]]
