"""The specification of basic_loop_agent.py, in the order of the README.

Harbor's Chat, TinkerLLM, LiteLLM and Job, the renderers and the tokenizer are real; the model's
answers, the environment and, in examples/offline.yaml, the verifier are the fakes below.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import gc
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
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

# The price list that comes with litellm: its download would hold up an offline machine.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig
from harbor.models.trial.result import TrialResult
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

import basic_loop_agent
from basic_loop_agent import (
    BasicLoopAgent,
    BasicLoopOptions,
    StopReason,
    _trial_to_trajectory,
    fenced_blocks,
    split_thinking,
    to_tinker,
    trial_to_trajectory,
)

ROOT = Path(__file__).parent
IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")

# Fakes for real jobs, named by import path. Nothing that a model says is ever run on the host.


class HostEnvironment(BaseEnvironment):
    """An environment without a container: every command succeeds, unrun.

    The log folders are the host's own, as they are with Docker.
    """

    # Harbor before 0.14 asks for these properties, later ones for `capabilities`.
    supports_gpus = False
    can_disable_internet = False
    is_mounted = True

    @staticmethod
    def type() -> str:
        return "host"

    @property
    def capabilities(self) -> Any:
        from harbor.environments.capabilities import EnvironmentCapabilities

        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None: ...

    async def exec(self, command: str, **kwargs: Any) -> ExecResult:
        return ExecResult(return_code=0)


class HostVerifier(BaseVerifier):
    """Scores completion.txt as the task's tests/test.sh does in a container."""

    def __init__(self, task: Any, trial_paths: Any, *args: Any, **kwargs: Any) -> None:
        self.task = task
        self.trial_paths = trial_paths

    async def verify(self) -> VerifierResult:
        answer = letters(self.task.paths.tests_dir / "answer.txt")
        completion = letters(self.trial_paths.agent_dir / "completion.txt")
        return VerifierResult(rewards={"reward": float(answer == completion)})


def letters(path: Path) -> str:
    # A link in this folder may lead anywhere on the host.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, encoding="utf-8") as file:
        return re.sub("[^a-z]", "", file.read().lower())


# Fakes for single runs.


async def next_answer(script: list[Any]) -> Any:
    """A script's next item, its last one again and again.

    It is returned, raised if it is an exception, and awaited first if it is a function.
    """
    answer = script.pop(0) if len(script) > 1 else script[0]
    if callable(answer):
        answer = await answer()
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def forever() -> None:
    await asyncio.Event().wait()


class ScriptedEnvironment:
    """Answers `exec` from a script of results. Keeps the scripts that it was to run."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script) or [ExecResult(return_code=0)]
        self.scripts, self.timeouts = [], []

    async def exec(self, command: str, timeout_sec: int | None = None, **kwargs: Any) -> ExecResult:
        self.scripts.append(script_of(command))
        self.timeouts.append(timeout_sec)
        return await next_answer(self.script)


def script_of(command: str) -> str | None:
    """What a command of the agent runs; None if it ends what an earlier one has started."""
    arguments = shlex.split(command)
    return arguments[-1] if len(arguments) > 5 else None


class ShellEnvironment:
    """Runs commands for real, by a shell of the test's own: only for what this file says."""

    def __init__(self, **variables: str) -> None:
        self.variables = os.environ | variables
        self.results: list[ExecResult] = []
        self.marks: list[str] = []
        self.left: list[Path] = []

    async def exec(self, command: str, **kwargs: Any) -> ExecResult:
        arguments = shlex.split(command)
        self.marks.append(arguments[arguments.index("basic-loop") + 1])
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", command),
            env=self.variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate(b"not for the script\n")
        result = ExecResult(
            stdout=output.decode(errors="replace"), stderr=None, return_code=process.returncode
        )
        self.results.append(result)
        self.left += files_of(self.marks[-1])
        return result


def files_of(mark: str) -> list[Path]:
    """What a command of the agent has left outside its own folder."""
    folders = (Path("/dev/shm"), Path("/tmp"))
    return [path for folder in folders for path in folder.glob(f"basic-loop-{mark}*")]


@dataclass
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
        self.services, self.samplers = [], []
        # Of each call: its prompt and parameters; and of each answer: prompt, tokens, logprobs.
        self.requests, self.returned = [], []

    def __call__(self, **kwargs: Any) -> "FakeService":
        self.services.append(FakeService(self, kwargs))
        return self.services[-1]

    def end_sessions(self, status: int) -> None:
        for service in self.services:
            service.ended = ended(status)

    def encode(self, text: str, stop_reason: str) -> list[int]:
        ids = tokenizer_of(self.name).encode(text, add_special_tokens=False)
        return ids + [2] * (stop_reason == "stop")


def ended(status: int) -> Exception:
    import httpx
    import tinker

    response = httpx.Response(status, request=httpx.Request("POST", "http://tinker"))
    return tinker.APIStatusError("Session has been terminated", response=response, body=None)


class FakeService:
    def __init__(self, tinker: FakeTinker, arguments: dict[str, Any]) -> None:
        self.tinker, self.arguments = tinker, arguments
        self.ended: Exception | None = None
        self.closed = False

    def create_sampling_client(self, **source: str) -> "Done":
        time.sleep(0.01)
        if self.ended:
            return Done(self.ended)
        if "missing" in source.get("model_path", ""):
            return Done(ended(404))
        self.tinker.samplers.append(source)
        return Done(FakeSampler(self))

    def close(self, status: str) -> Any:
        self.closed = True
        self.ended = RuntimeError("Internal client holder is closed")
        return Done(None)


class FakeSampler:
    def __init__(self, service: FakeService) -> None:
        self.service, self.tinker = service, service.tinker

    def sample(self, **call: Any) -> "Sampling":
        return Sampling(self.answer(**call))

    async def answer(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        fake = self.tinker
        fake.requests.append((prompt.to_ints(), sampling_params))
        await asyncio.sleep(0)
        if self.service.ended:
            raise self.service.ended
        answer = await next_answer(fake.script)
        tokens = answer.tokens
        if tokens is None:
            tokens = fake.encode(answer.text, answer.stop_reason)
        own = [-((len(fake.returned) + 1) + i / 1000) for i in range(len(tokens))]
        logprobs = own if answer.logprobs == "own" else answer.logprobs
        fake.returned.append((prompt.to_ints(), tokens, logprobs))
        sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=answer.stop_reason)
        return SimpleNamespace(sequences=[sequence])


class Sampling(concurrent.futures.Future):
    """What `sample` of the SDK gives from 0.38 on: to be awaited, though it is a future too."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def __await__(self) -> Any:
        return self.answer.__await__()

    def add_done_callback(self, function: Any) -> None:
        raise FutureWarning("deprecated: await it")


class Done(concurrent.futures.Future):
    """A future of the Tinker SDK (from 0.38 on) that has its result, or raises it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        if isinstance(result, Exception):
            self.set_exception(result)
        else:
            self.set_result(result)

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.result()


# A byte-level tokenizer with every special token that the cookbook's renderers name. As in the
# real ones `<|...|>` are special, and tags like <think> are merely added.
_TAGS = r"</?(?:think|tool_call|tool_response|tool_result|arg_key|arg_value|img)>|<image>|\[gMASK\]"
_FIRST = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of(folder: str) -> Any:
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    return get_tokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=_FIRST, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello world user assistant bash\n\n```"] * 9, trainer)
    cookbook = Path(importlib.util.find_spec("tinker_cookbook").origin).parent
    sources = "".join(path.read_text() for path in (cookbook / "renderers").glob("*.py"))
    bar = "[|\N{FULLWIDTH VERTICAL LINE}]"
    special = set(re.findall(rf"<{bar}[\w▁]+{bar}>", sources)) - set(_FIRST)
    tokenizer.add_special_tokens(sorted(special))
    tokenizer.add_tokens(sorted(set(re.findall(_TAGS, sources))))
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.save_pretrained(folder)
    return str(folder)


def all_renderers() -> list[str]:
    """What the cookbook can build with that tokenizer: all but one, for which it has its own."""
    cookbook = Path(importlib.util.find_spec("tinker_cookbook").origin).parent
    source = (cookbook / "renderers/__init__.py").read_text()
    return sorted(set(re.findall(r'name == "(\w+)"', source)) - {"tml_v0"})


RENDERERS = all_renderers()
# Those whose history closes a turn with another token than was sampled, or with a text.
INEXACT = [name for name in RENDERERS if name.startswith(("gpt_oss", "role_colon"))]
EXACT = [name for name in RENDERERS if name not in INEXACT]


def renderer_of(name: str, tokenizer_dir: str) -> Any:
    from tinker_cookbook.renderers import get_renderer

    return get_renderer(name, tokenizer_of(tokenizer_dir))


def opens_thinking(name: str, tokenizer_dir: str) -> bool:
    prompt = renderer_of(name, tokenizer_dir).build_generation_prompt(
        [{"role": "user", "content": "a"}]
    )
    return tokenizer_of(tokenizer_dir).decode(prompt.to_ints()).rstrip().endswith("<think>")


def reply_tokens(name: str, tokenizer_dir: str, text: str, end: bool = True) -> list[int]:
    """A reply's tokens, with the first stop token of that renderer where it is to end."""
    tokenizer = tokenizer_of(tokenizer_dir)
    stop = renderer_of(name, tokenizer_dir).get_stop_sequences()[0]
    stop = [stop] if isinstance(stop, int) else tokenizer.encode(stop, add_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False) + stop * end


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of its own for each test, and so a Tinker service of its own."""
    monkeypatch.setenv("TINKER_API_KEY", f"tml-{uuid4().hex}")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")


@pytest.fixture
def tinker_service(
    tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., FakeTinker]:
    def install(*script: Any) -> FakeTinker:
        fake = FakeTinker(tokenizer_dir, *script)
        monkeypatch.setattr("tinker.ServiceClient", fake)
        monkeypatch.setenv("TINKER_API_KEY", f"tml-{uuid4().hex}")
        return fake

    return install


@pytest.fixture
def agent(tokenizer_dir: str, tmp_path: Path) -> Callable[..., BasicLoopAgent]:
    def build(agent_class: type = BasicLoopAgent, **options: Any) -> BasicLoopAgent:
        if options.get("model_client") != "litellm":
            defaults = {"model_name": tokenizer_dir, "renderer_name": "qwen3_instruct"}
        else:
            defaults = {"model_name": "openai/mock"}
        return agent_class(**{"logs_dir": tmp_path} | defaults | options)

    return build


class Context(AgentContext):
    @property
    def turns(self) -> list[tuple[list[int], list[int], list[float]]]:
        """The record as prompt, completion and logprobs of each turn; fails if not aligned."""
        assert self.rollout_details is None or len(self.rollout_details) == 1
        segment = (self.rollout_details or [{name: [] for name in IDS}])[0]
        turns = list(zip(*(segment[name] for name in IDS), strict=True))
        assert all(len(completion) == len(logprobs) for _, completion, logprobs in turns)
        return turns

    @property
    def stop_reason(self) -> str:
        return self.metadata["stop_reason"]


def run(
    agent: BasicLoopAgent,
    environment: Any = None,
    instruction: str = "do it",
    context: Context | None = None,
) -> Context:
    """One run in an event loop of its own, without `setup`; lets exceptions out."""
    context = context or Context()
    environment = environment or ScriptedEnvironment()
    asyncio.run(agent.run(instruction=instruction, environment=environment, context=context))
    return context


def trajectory(agent: BasicLoopAgent) -> Any:
    text = (agent.logs_dir / "trajectory.json").read_text(encoding="utf-8")
    return atif.Trajectory.model_validate_json(text)


def completion(agent: BasicLoopAgent) -> str:
    return (agent.logs_dir / "completion.txt").read_text(encoding="utf-8")


def told(agent: BasicLoopAgent) -> list[str]:
    """What the model was told after its commands, in order."""
    steps = trajectory(agent).steps
    return [step.observation.results[0].content for step in steps if step.observation]


def bash(*commands: str, language: str = "bash") -> str:
    blocks = [f"I will run this:\n\n```{language}\n{command}\n```\n" for command in commands]
    return "\n".join(blocks)


def needs(module: str, reason: str) -> Any:
    try:
        return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)
    except ModuleNotFoundError:
        return pytest.mark.skip(reason=reason)


class PatientSelector(selectors.DefaultSelector):
    """Has an event loop's timers fire at once: time passes when there is nothing else to do."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list:
        events = super().select(0)
        if not events and timeout is None:
            return super().select(None)
        if not events and timeout:
            self.skipped += timeout
        return events


@contextlib.contextmanager
def time_passes_at_once() -> Any:
    selector = PatientSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: time.monotonic() + selector.skipped
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        yield runner


# One completion.


def test_one_completion_is_on_the_context_in_completion_txt_and_in_the_trajectory(
    agent, tinker_service
):
    fake = tinker_service(Sampled("hello world"))
    one = agent(system_prompt="Be {brief}.", max_tokens=9, temperature=0.5)
    context = run(one, instruction="greet")
    ((prompt, tokens, logprobs),) = fake.returned
    assert context.turns == [(prompt, tokens, logprobs)]
    assert (context.n_input_tokens, context.n_output_tokens) == (len(prompt), len(tokens))
    assert context.n_cache_tokens == 0
    assert context.cost_usd is None
    assert context.metadata == {
        "stop_reason": "completed",
        "n_episodes": 1,
        "n_turns_without_ids": 0,
        "n_prefix_breaks": 0,
    }
    assert completion(one) == "hello world"
    view = trajectory(one)
    assert [(step.source, step.message) for step in view.steps] == [
        ("system", "Be {brief}."),
        ("user", "greet"),
        ("agent", "hello world"),
    ]
    metrics = view.steps[-1].metrics
    assert metrics.prompt_token_ids == prompt
    assert metrics.completion_token_ids == tokens
    assert metrics.logprobs == logprobs
    assert view.final_metrics.total_prompt_tokens == len(prompt)
    assert view.extra == context.metadata
    assert (view.agent.name, view.agent.model_name) == ("basic-loop", fake.name)


def test_an_empty_reply_is_an_empty_answer(agent, tinker_service):
    tinker_service(Sampled(""))
    one = agent()
    assert run(one).stop_reason == "completed"
    assert completion(one) == trajectory(one).steps[-1].message == ""


def test_nothing_in_a_single_completion_is_ever_executed(agent, tinker_service):
    tinker_service(Sampled(bash("rm -rf /")))
    environment = ScriptedEnvironment()
    assert run(agent(), environment).stop_reason == "completed"
    assert environment.scripts == []


@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize("name", [name for name in RENDERERS if not name.startswith("gpt_oss")])
def test_thinking_that_was_never_closed_is_neither_answer_nor_commands(
    agent, tinker_service, tokenizer_dir, name, end
):
    text = f"I could <tool_call>this</tool_call>\n{bash('rm x')}"
    opened = opens_thinking(name, tokenizer_dir)
    tokens = reply_tokens(name, tokenizer_dir, text if opened else f"<think>{text}", end == "stop")
    fake = tinker_service(Sampled(tokens=tokens, stop_reason=end))
    one, environment = agent(renderer_name=name, max_turns=3), ScriptedEnvironment()
    context = run(one, environment)
    assert environment.scripts == []
    assert completion(one) == ""
    assert "I could" in trajectory(one).steps[-1].reasoning_content
    assert "<think>" not in trajectory(one).steps[-1].reasoning_content
    assert [turn[1] for turn in context.turns] == [tokens] == [turn[1] for turn in fake.returned]


@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize("name", [name for name in RENDERERS if not name.startswith("gpt_oss")])
def test_thinking_that_was_closed_is_kept_apart_from_the_answer(
    agent, tinker_service, tokenizer_dir, name, end
):
    text = "who?</think>\n\nhello world"
    opened = opens_thinking(name, tokenizer_dir)
    tokens = reply_tokens(name, tokenizer_dir, text if opened else f"<think>{text}", end == "stop")
    tinker_service(Sampled(tokens=tokens, stop_reason=end))
    one = agent(renderer_name=name)
    run(one)
    assert completion(one).strip() == "hello world"
    assert trajectory(one).steps[-1].reasoning_content.strip() == "who?"


@pytest.mark.parametrize("name", [name for name in RENDERERS if name.startswith("gpt_oss")])
def test_gpt_oss_cut_off_anywhere_never_answers_with_its_analysis(
    agent, tinker_service, tokenizer_dir, name
):
    text = "<|channel|>analysis<|message|>rm x<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>hello"
    tokens = reply_tokens(name, tokenizer_dir, text, end=False)
    n_answer = len(reply_tokens(name, tokenizer_dir, "hello", end=False))
    one = agent(renderer_name=name)
    for n_tokens in range(1, len(tokens) + 1):
        tinker_service(Sampled(tokens=tokens[:n_tokens], stop_reason="length"))
        run(one)
        if n_tokens <= len(tokens) - n_answer:
            assert completion(one) == "", n_tokens
    assert completion(one) == "hello"


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>a</think>\n\nb", "a", "b"),
        (" <think>a</think> <think>b</think>c", "ab", "c"),
        ("<think>a", "a", ""),
        ("<think>a</think><think>b", "ab", ""),
        ("a\n</think>\n\nb", "a\n", "b"),
        ("a\r\n</think>\r\nb", "a\r\n", "b"),
        ("sed 's#</think>##' x", "", "sed 's#</think>##' x"),
        ("cat <<E\n<think>\n</think>\nE", "", "cat <<E\n<think>\n</think>\nE"),
        ("b", "", "b"),
    ],
)
def test_where_thinking_ends_in_a_reply_that_came_as_one_text(text, thinking, answer):
    assert split_thinking(text) == (thinking, answer)


def test_a_closing_tag_in_a_command_after_the_thinking_closes_nothing(agent, tinker_service):
    script = "cat >f <<E\nfoo\n</think>\nbar\nE"
    tinker_service(Sampled(f"<think>a</think>{bash(script)}"), Sampled("done"))
    one, environment = agent(renderer_name="qwen3", max_turns=2), ScriptedEnvironment()
    run(one, environment)
    assert environment.scripts == [f"{script}\n"]
    assert trajectory(one).steps[2].reasoning_content == "a"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "kimi_k2"])
@pytest.mark.parametrize("tag", ["<think>", "<tool_call>", "x <think>"])
def test_a_reply_of_unclosed_tags_is_parsed_in_time_that_grows_as_its_length(
    agent, tinker_service, tokenizer_dir, name, tag
):
    tokens = tokenizer_of(tokenizer_dir).encode(tag, add_special_tokens=False)
    seconds = []
    for n_tags in (6_000, 24_000):
        tinker_service(Sampled(tokens=[*tokens * n_tags, 2]))
        one = agent(renderer_name=name, max_tokens=99_999, max_turns=2)
        start = time.thread_time()
        run(one)
        seconds.append(time.thread_time() - start)
    assert seconds[1] < 10 * seconds[0] + 1


def test_lone_surrogates_reach_neither_tokenizer_nor_file(agent, tinker_service, monkeypatch):
    tinker_service(Sampled(bash("ls")), Sampled("done"))
    tinker = agent(max_turns=3, system_prompt="\udc80")
    out = ExecResult.model_construct(stdout="a\udcff", stderr=b"b\xff", return_code=0)
    run(tinker, ScriptedEnvironment(out), "x\ud83d\ude00\udc80")
    assert trajectory(tinker).steps[1].message == "x😀\ufffd"
    assert told(tinker) == ["Exit code: 0\nOutput:\na\ufffd\nb\ufffd"]

    requests = api(monkeypatch, bash("echo \udc80"), "\ud800 done")
    lite, environment = agent(model_client="litellm", max_turns=3), ScriptedEnvironment(out)
    run(lite, environment)
    assert completion(lite) == "\ufffd done"
    assert environment.scripts == ["echo \ufffd\n"]
    json.dumps(requests[-1]["messages"], ensure_ascii=False).encode()


# API models. The fake stands at litellm's door: Harbor's LiteLLM calls it as any provider.


def api(
    monkeypatch: pytest.MonkeyPatch, *script: Any, finish: str = "stop", ids: bool = False
) -> list[dict]:
    import litellm

    requests, answers = [], list(script)

    async def acompletion(**request: Any) -> Any:
        messages = [dict(message) for message in request["messages"]]
        requests.append({**copy.deepcopy(request), "messages": messages})
        answer = await next_answer(answers)
        message = {"role": "assistant", "content": answer}
        if isinstance(answer, dict):
            message |= answer
        choice = {"message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        response = litellm.ModelResponse(model="mock", choices=[choice], usage=usage)
        if ids:
            # As litellm passes on what vLLM answers.
            n_turns = sum(message["role"] == "assistant" for message in messages)
            response.prompt_token_ids = [1, 2] + [3, 4, 5, 6] * n_turns
            response.choices[0].provider_specific_fields = {"token_ids": [3, 4, 5]}
            content = [{"token": "x", "logprob": -0.5, "bytes": [], "top_logprobs": []}] * 3
            logprobs = litellm.types.utils.ChoiceLogprobs(content=content)
            response.choices[0].logprobs = logprobs
        return response

    monkeypatch.setattr(litellm, "acompletion", acompletion)
    return requests


def test_an_api_model_gets_the_options_and_leaves_text_and_usage_but_no_invented_cost(
    agent, monkeypatch
):
    requests = api(monkeypatch, "hello")
    one = agent(
        model_client="litellm",
        max_tokens=7,
        temperature=None,
        api_base="http://localhost:1/v1",
        llm_kwargs={"top_p": 0.9, "reasoning_effort": "low"},
    )
    context = run(one)
    (request,) = requests
    assert (request["max_tokens"], request["top_p"]) == (7, 0.9)
    assert request["api_base"] == "http://localhost:1/v1"
    assert request["reasoning_effort"] == "low"
    assert not {"temperature", "logprobs", "extra_body"} & request.keys()
    assert (context.n_input_tokens, context.n_output_tokens) == (10, 3)
    assert context.cost_usd is None
    assert context.rollout_details is None
    assert context.metadata == {"stop_reason": "completed", "n_episodes": 1}
    assert completion(one) == "hello"
    run(agent(model_client="litellm", temperature=0.3))
    assert requests[-1]["temperature"] == 0.3


def test_litellms_own_offline_answer_has_a_price_where_litellm_knows_one(agent):
    kwargs = {"mock_response": "hello"}
    one = agent(model_client="litellm", model_name="openai/gpt-4o", llm_kwargs=kwargs)
    assert run(one).cost_usd > 0
    assert completion(one) == "hello"


def test_the_cost_of_some_turns_is_not_the_runs(agent, monkeypatch):
    import litellm

    api(monkeypatch, bash("ls"), "done")
    prices = iter([0.5, 0.0])
    monkeypatch.setattr(litellm, "completion_cost", lambda **kwargs: next(prices))
    assert run(agent(model_client="litellm", max_turns=2)).cost_usd is None


def test_a_server_that_returns_token_ids_is_recorded_like_tinker(agent, monkeypatch):
    requests = api(monkeypatch, bash("ls"), "hello", ids=True)
    one = agent(model_client="litellm", collect_rollout_details=True, max_turns=2)
    context = run(one)
    assert context.turns == [
        ([1, 2], [3, 4, 5], [-0.5] * 3),
        ([1, 2, 3, 4, 5, 6], [3, 4, 5], [-0.5] * 3),
    ]
    assert context.metadata["n_prefix_breaks"] == 0
    assert requests[0]["logprobs"] is True
    assert requests[0]["extra_body"]["return_token_ids"] is True


def test_token_ids_that_were_asked_for_and_not_delivered_are_an_error(agent, monkeypatch):
    api(monkeypatch, "hello")
    one, context = agent(model_client="litellm", collect_rollout_details=True), Context()
    with pytest.raises(RuntimeError, match="collect_rollout_details"):
        run(one, context=context)
    assert completion(one) == "hello"
    assert context.stop_reason == "error"
    assert context.metadata["n_turns_without_ids"] == 1


def test_a_turn_that_came_without_its_completion_ids_is_left_out_and_counted(agent, monkeypatch):
    import litellm

    api(monkeypatch, bash("ls"), "hello", ids=True)
    answered = litellm.acompletion

    async def acompletion(**request: Any) -> Any:
        response = await answered(**request)
        if len(request["messages"]) > 2:
            response.choices[0].provider_specific_fields = {}
        return response

    monkeypatch.setattr(litellm, "acompletion", acompletion)
    one = agent(model_client="litellm", collect_rollout_details=True, max_turns=3)
    context = run(one)
    assert context.turns == [([1, 2], [3, 4, 5], [-0.5] * 3)]
    assert context.metadata["n_turns_without_ids"] == 1


def test_what_a_server_calls_reasoning_is_the_thinking_and_all_else_the_answer(agent, monkeypatch):
    answer = f"x\n</think>\n{bash('ls')}"
    api(monkeypatch, {"content": answer, "reasoning_content": "hm"}, "done")
    one = agent(model_client="litellm", max_turns=2)
    run(one)
    assert trajectory(one).steps[2].message == answer
    assert trajectory(one).steps[2].reasoning_content == "hm"


def test_thinking_without_its_opening_tag_is_neither_answer_nor_commands(agent, monkeypatch):
    api(monkeypatch, f"I could\n{bash('rm x')}\nbut no.\n</think>\n\ndone")
    one, environment = agent(model_client="litellm", max_turns=3), ScriptedEnvironment()
    run(one, environment)
    assert completion(one) == "done"
    assert environment.scripts == []


def test_a_cut_off_api_reply_keeps_its_text_usage_and_ids(agent, monkeypatch):
    api(monkeypatch, bash("ls"), finish="length", ids=True)
    one = agent(model_client="litellm", collect_rollout_details=True, max_turns=5)
    environment = ScriptedEnvironment()
    context = run(one, environment)
    assert context.stop_reason == "max_tokens"
    assert completion(one) == bash("ls")
    assert context.n_output_tokens == 3
    assert context.turns == [([1, 2], [3, 4, 5], [-0.5] * 3)]
    assert environment.scripts == []


def test_all_requests_of_a_trial_carry_its_session_id_and_trials_share_the_client(
    agent, monkeypatch
):
    requests = api(monkeypatch, bash("ls"), "a", bash("ls"), "b", ids=True)
    headers = {"llm_kwargs": {"extra_headers": {"X-Other": "1"}, "extra_body": {"salt": 1}}}
    options = {"model_client": "litellm", "max_turns": 2, "collect_rollout_details": True}
    one, other = agent(session_id="mine", **options, **headers), agent(**options, **headers)
    other.session_id = "task__abc__agent"

    async def main() -> list[Any]:
        for trial in (one, other):
            await trial.run("x", ScriptedEnvironment(), Context())
        return [await trial._shared_llm() for trial in (one, other)]

    clients = asyncio.run(main())
    assert clients[0] is clients[1]
    sent = [request["extra_headers"] for request in requests]
    assert [one["X-Session-ID"] for one in sent] == ["mine"] * 2 + ["task__abc__agent"] * 2
    assert {one["X-Other"] for one in sent} == {"1"}
    bodies = [request["extra_body"] for request in requests]
    assert [body["session_id"] for body in bodies] == ["mine"] * 2 + ["task__abc__agent"] * 2
    assert {body["salt"] for body in bodies} == {1}
    assert trajectory(other).session_id == "task__abc__agent"


def test_a_closed_api_gets_the_session_id_as_a_header_only(agent, monkeypatch):
    requests = api(monkeypatch, "hello")
    run(agent(model_client="litellm", session_id="mine"))
    assert requests[0]["extra_headers"] == {"X-Session-ID": "mine"}
    assert "extra_body" not in requests[0]
    run(agent(model_client="litellm"))
    assert "extra_headers" not in requests[1]


# The loop.


def test_the_loop_runs_every_block_of_a_reply_as_one_script_until_a_reply_has_none(
    agent, tinker_service
):
    fake = tinker_service(
        Sampled(bash("ls", "cat x")), Sampled(bash("pwd", language="sh")), Sampled("done")
    )
    environment = ScriptedEnvironment(
        ExecResult(stdout="x\n", stderr="no x", return_code=1), ExecResult(return_code=0)
    )
    one = agent(max_turns=9, command_timeout_sec=77)
    context = run(one, environment)
    assert context.stop_reason == "completed"
    assert context.turns == fake.returned
    assert environment.scripts == ["ls\n\ncat x\n", "pwd\n"]
    steps = trajectory(one).steps
    assert [step.source for step in steps] == ["system", "user", "agent", "agent", "agent"]
    assert "```bash" in steps[0].message
    assert "has 77 seconds" in steps[0].message
    assert told(one) == ["Exit code: 1\nOutput:\nx\nno x", "Exit code: 0\nOutput:\n(none)"]
    assert completion(one) == "done"


def test_the_trajectory_has_no_tool_calls_that_the_model_did_not_write(agent, tinker_service):
    tinker_service(Sampled(bash("ls")), Sampled("done"))
    one = agent(max_turns=2)
    run(one)
    assert [step.tool_calls for step in trajectory(one).steps] == [None] * 4


@pytest.mark.parametrize(
    ("reply", "runs"),
    [
        (bash("a"), "a\n"),
        ("```sh\na\n```", "a\n"),
        ("1. so:\n   ```bash\n   cat <<E\n     x\n   E\n   ```", "cat <<E\n  x\nE\n"),
        ("- ```bash\n  a\n  ```\n- ```bash\n  b\n  ```", "a\n\nb\n"),
        ("10) ```bash\n    a\n    ```", "a\n"),
        ("   ```bash\na\n```", "a\n"),
        ("````bash\ncat <<E\n```\nE\n````", "cat <<E\n```\nE\n"),
        ("```bash title=x\na\n```", "a\n"),
        ("````markdown\n```bash\nrm x\n```\n````", None),
        ("~~~\n```bash\nrm x\n```\n~~~", None),
        ("```python\na\n```", None),
        ("```bash\nrm x", None),
        ("```bash\r\na\r\n```", "a\n"),
        ("```bash\nprintf 'a\0b'\n```", "printf 'ab'\n"),
        ("run `ls`", None),
        ("``` bash\na\n```", "a\n"),
    ],
)
def test_only_whole_fenced_bash_blocks_are_run(agent, tinker_service, reply, runs):
    tinker_service(Sampled(reply), Sampled("done"))
    environment = ScriptedEnvironment()
    run(agent(max_turns=2), environment)
    assert environment.scripts == ([runs] if runs else [])


@pytest.mark.parametrize(
    "worst",
    [
        "\n",
        " \n",
        "```bash\n",
        "`",
        "- ",
        "1. ",
        "   ```bash\n   x\n",
        "~~~\n```\n",
        "<think>",
        "</think>",
        "<think></think>",
        " </think>x\n",
        "``` ` ",
        "~",
        "<",
    ],
)
@pytest.mark.parametrize("read", [fenced_blocks, split_thinking])
def test_a_reply_is_read_in_time_that_grows_as_its_length(read, worst):
    """CPU time, not the wall's, of the best of three: four times the text may take ten times."""

    def seconds(length: int) -> float:
        text = worst * (length // len(worst)) + "`"
        best = math.inf
        for _ in range(3):
            start = time.thread_time()
            read(text)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(256_000) < 10 * seconds(64_000) + 0.005


class PythonToo(BasicLoopAgent):
    """What a user writes to run other blocks too: one method and one text."""

    protocol = "Write ```bash or ```python blocks, not {json: 1}; {seconds} seconds."

    def script_in(self, reply: str) -> str | None:
        scripts = []
        for language, block in fenced_blocks(reply):
            if language == "bash":
                scripts.append(block)
            if language == "python":
                scripts.append(f"python3 - <<'EOF'\n{block}EOF\n")
        return "".join(scripts) or None


def test_a_subclass_runs_another_language_under_a_protocol_of_its_own(agent, tinker_service):
    fake = tinker_service(Sampled("```python\nprint(1)\n```"), Sampled("done"))
    one, environment = agent(PythonToo, max_turns=3), ScriptedEnvironment()
    context = run(one, environment)
    assert environment.scripts == ["python3 - <<'EOF'\nprint(1)\nEOF\n"]
    assert trajectory(one).steps[0].message == (
        "Write ```bash or ```python blocks, not {json: 1}; 120 seconds."
    )
    assert context.turns == fake.returned


def changed_copy(*changes: tuple[str, str]) -> Any:
    """The module as a user's copy, with some of its text replaced."""
    source = (ROOT / "basic_loop_agent.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType("changed_copy")
    sys.modules["changed_copy"] = module
    exec(compile(source, "changed_copy.py", "exec"), module.__dict__)
    return module


NO_SCRIPT = """\
            if turn.script is None:
                return StopReason.COMPLETED
"""


def test_a_copy_that_reminds_the_model_and_goes_on_records_the_reminder(agent, tinker_service):
    fake = tinker_service(Sampled("hm"), Sampled(bash("ls")), Sampled("last"))
    reminder = """\
            if turn.script is None:
                conversation.tell("no command found, go on")
                continue
"""
    copied = changed_copy((NO_SCRIPT, reminder))
    one = agent(copied.BasicLoopAgent, max_turns=3)
    context = run(one)
    steps = [(step.source, step.message) for step in trajectory(one).steps[2:]]
    assert steps == [
        ("agent", "hm"),
        ("user", "no command found, go on"),
        ("agent", bash("ls")),
        ("agent", "last"),
        ("user", "no command found, go on"),
    ]
    assert completion(one) == "last"
    assert context.turns == fake.returned
    assert "no command found" in tokenizer_of(fake.name).decode(fake.requests[1][0])


def test_a_copy_ends_in_a_way_of_its_own_with_a_member_and_a_condition(agent, tinker_service):
    tinker_service(Sampled(bash("ls")), Sampled("TASK_COMPLETE " + bash("rm x")))
    copied = changed_copy(
        ('    ERROR = "error"', '    ERROR = "error"\n    TASK_COMPLETE = "task_complete"'),
        (
            NO_SCRIPT,
            NO_SCRIPT + '            if "TASK_COMPLETE" in turn.text:\n'
            "                return StopReason.TASK_COMPLETE\n",
        ),
    )
    one, environment = agent(copied.BasicLoopAgent, max_turns=5), ScriptedEnvironment()
    context = run(one, environment)
    assert context.stop_reason == trajectory(one).extra["stop_reason"] == "task_complete"
    assert environment.scripts == ["ls\n"]


def test_a_default_stands_in_one_place_which_a_copy_or_a_subclass_may_change(agent, tokenizer_dir):
    class Longer(BasicLoopOptions):
        max_tokens: int = 99

    class Own(BasicLoopAgent):
        options_model = Longer

    assert agent(Own).options.max_tokens == 99
    assert agent(Own, max_tokens=5).options.max_tokens == 5
    copied = changed_copy(("        512,", "        77,"))
    assert agent(copied.BasicLoopAgent).options.max_tokens == 77
    signature = inspect.signature(copied.BasicLoopAgent.__init__)
    assert signature.parameters["max_tokens"].default == 77


def test_the_constructor_shows_the_options_and_their_defaults():
    parameters = inspect.signature(BasicLoopAgent.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    contract = {
        "model_path": None,
        "renderer_name": None,
        "max_tokens": 512,
        "temperature": 1.0,
        "max_turns": 1,
        "system_prompt": None,
        "model_client": "tinker",
        "api_base": None,
        "llm_kwargs": None,
        "collect_rollout_details": None,
        "rerender_history": False,
        "session_id": None,
        "command_timeout_sec": 120,
        "max_output_chars": 10_000,
    }
    assert contract.items() <= defaults.items()
    assert list(parameters)[:2] == ["self", "model_name"]


# The commands, run for real by the test's own shell.


@pytest.fixture
def shell(agent, tinker_service) -> Callable[..., str]:
    """Runs a script through the agent's loop in a real shell; gives what the model is told."""

    def tell(script: str, environment: Any = None, **options: Any) -> str:
        tinker_service(Sampled(bash(script)), Sampled("done"))
        one = agent(max_turns=2, **options)
        run(one, environment or ShellEnvironment())
        return told(one)[0]

    return tell


def processes(text: str) -> list[str]:
    """The command lines of this machine that hold a text."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if text in line and "basic-loop" not in line]


def left_of(text: str) -> list[str]:
    """The processes of this text that do not go away: one that was killed may take a moment."""
    for _ in range(1000):
        if not processes(text):
            return []
        time.sleep(0.01)
    return processes(text)


def with_program(folder: Path, name: str, text: str) -> ShellEnvironment:
    """A shell in which a program of that name is this text instead."""
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
    return ShellEnvironment(PATH=f"{program.parent}:{os.environ['PATH']}")


def own_seconds() -> str:
    """A time that no other process on the machine sleeps."""
    return f"6{uuid4().int % 10**9}"


def test_the_model_is_told_exit_code_and_output_in_the_order_in_which_it_was_written(shell):
    script = "for i in 1 2 3; do echo $i; echo e$i >&2; done; exit 3"
    assert shell(script) == "Exit code: 3\nOutput:\n1\ne1\n2\ne2\n3\ne3"
    assert shell("-n\necho y").endswith("-n: command not found\ny")


@pytest.mark.parametrize(
    ("script", "output"),
    [("true", "(none)"), ("printf x", "x"), ("cat", "(none)"), ("printf '\\n\\nx'", "\n\nx")],
)
def test_output_comes_as_it_was_written(shell, script, output):
    assert shell(script) == f"Exit code: 0\nOutput:\n{output}"


def test_a_long_output_is_cut_to_its_head_and_tail_inside_the_environment(shell):
    environment = ShellEnvironment()
    text = shell("printf 'a%.0s' {1..5000}; printf 'b%.0s' {1..5000}", environment)
    assert text == "Exit code: 0\nOutput:\n" + "a" * 5000 + "b" * 5000
    text = shell(
        "printf 'a%.0s' {1..5000}; printf 'b%.0s' {1..5000}", environment, max_output_chars=100
    )
    middle = "\n[... 9900 bytes left out ...]\n"
    assert text == "Exit code: 0\nOutput:\n" + "a" * 50 + middle + "b" * 50
    assert len(environment.results[-1].stdout) < 300


@pytest.mark.parametrize(
    "flood", ["yes", "yes >&2", "trap '' PIPE; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxx; done"]
)
def test_a_flood_is_ended_and_the_model_told(shell, flood):
    environment = ShellEnvironment()
    text = shell(f"echo first; {flood}", environment, max_output_chars=1000)
    assert environment.left == []
    assert text.startswith("Exit code: 137\nOutput:\nfirst\n")
    assert text.endswith("[ended: it wrote more than 4000000 bytes]")
    assert "bytes left out" in text
    assert len(environment.results[-1].stdout) < 2000


def test_a_script_over_its_time_is_ended_with_all_it_started_and_keeps_its_output(shell):
    own = own_seconds()
    escapes = f"setsid sleep {own}.1 & timeout 99 sleep {own}.2 & trap '' TERM; sleep {own}.3"
    text = shell(f"echo so far; {escapes}", command_timeout_sec=1)
    assert text == (
        "Exit code: 124\nOutput:\nso far\n[ended: the time limit of 1 seconds was reached]"
    )
    assert left_of(f"sleep {own}") == []


def test_a_script_that_traps_what_runs_it_is_gone_with_it_when_the_trial_is_cancelled(
    agent, tinker_service
):
    own = own_seconds()
    trap = "sleep 0.1; f=/dev/shm/basic-loop-$BASIC_LOOP_SCRIPT; rm $f; ln -s /dev/zero $f"
    tinker_service(Sampled(bash(f"{trap}; : {own}")))
    one = agent(max_turns=2)

    environment = ShellEnvironment()

    def traps() -> list[Path]:
        return [path for mark in environment.marks for path in files_of(mark)]

    def is_set() -> bool:
        return any(path.is_symlink() for path in traps())

    async def main() -> None:
        trial = asyncio.create_task(one.run("x", environment, Context()))
        for _ in range(3000):
            if is_set():
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)

    asyncio.run(main())
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(own.encode() in line for line in lines)
    assert traps() == []


def test_output_that_was_written_around_the_limit_does_not_reach_the_model(shell):
    answer = ExecResult(stdout="x" * 30_000_000, return_code=0)
    assert len(shell("x", ScriptedEnvironment(answer), max_output_chars=100)) < 1000


def test_output_that_reaches_its_file_late_is_waited_for(shell, tmp_path):
    environment = with_program(tmp_path, "tee", f'sleep 0.5; exec {shutil.which("tee")} "$@"')
    assert shell("echo x", environment) == "Exit code: 0\nOutput:\nx"


def test_a_container_without_shared_memory_has_the_output_in_tmp(shell):
    class WithoutShm(ShellEnvironment):
        async def exec(self, command: str, **kwargs: Any) -> ExecResult:
            return await super().exec(command.replace("/dev/shm", "/no/shm"), **kwargs)

    environment = WithoutShm()
    assert shell("echo x", environment) == "Exit code: 0\nOutput:\nx"
    assert environment.left == []


def test_a_script_has_no_other_way_to_its_own_output(shell):
    text = shell("echo x >&3; echo y")
    assert text.startswith("Exit code: 0\n")
    assert "Bad file descriptor" in text
    assert text.endswith("\ny")


def test_a_timeout_of_the_scripts_own_is_not_the_limit(shell):
    assert shell("timeout 0.1 sleep 5") == "Exit code: 124\nOutput:\n(none)"
    assert shell("exit 143") == "Exit code: 143\nOutput:\n(none)"


def test_a_timeout_that_answers_143_as_busyboxs_does_is_the_limit_too(shell, tmp_path):
    own = own_seconds()
    busybox = '"${@:4}" & sleep 1; kill $!; wait $!; exit 143'
    environment = with_program(tmp_path, "timeout", busybox)
    text = shell(f"setsid sleep {own} & sleep {own}", environment, command_timeout_sec=1)
    assert text.startswith("Exit code: 124\n")
    assert text.endswith("[ended: the time limit of 1 seconds was reached]")
    assert left_of(f"sleep {own}") == []


def test_a_process_left_in_the_background_neither_holds_up_the_turn_nor_dies_with_it(
    shell, tmp_path
):
    own = own_seconds()
    ticks = tmp_path / "ticks"
    # It goes on to write to its standard output, far more than a script may.
    server = f"while :; do echo tick >>{ticks}; head -c 100000 /dev/zero; sleep 0.01; done"
    try:
        # Its output passes the limit while the file is still there, behind the script's end.
        wait = f"for _ in {{1..500}}; do [ $(wc -c <{ticks}) -ge 300 ] && break; sleep 0.02; done"
        environment = with_program(tmp_path, "rm", f'{wait}; exec {shutil.which("rm")} "$@"')
        script = f"echo started; ({server}) & sleep {own} &"
        text = shell(script, environment, command_timeout_sec=60)
        assert text.startswith("Exit code: 0\nOutput:\n")
        assert "started" in text
        assert len([line for line in processes(own) if line.startswith("sleep")]) == 1
        n_ticks = len(ticks.read_bytes())
        deadline = time.monotonic() + 30
        while len(ticks.read_bytes()) < n_ticks + 300 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(ticks.read_bytes()) >= n_ticks + 300
    finally:
        subprocess.run(["pkill", "-9", "-f", own], check=False)


def test_what_a_script_does_to_its_own_output_file_costs_only_its_own_output(shell, tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    environment = with_program(tmp_path, "sleep", f"echo >>{log}; exec {shutil.which('sleep')} $1")
    own = "/dev/shm/basic-loop-$BASIC_LOOP_SCRIPT"
    text = shell(f"ls {own} && rm {own}; echo x", environment)
    assert text == "Exit code: 0\nOutput:\n(none)"
    assert environment.left == []
    # The agent does not wait for what cannot come any more.
    assert len(log.read_text()) < 200


def test_a_script_that_no_command_line_can_hold_is_not_run_and_the_model_told_to_split_it(shell):
    environment = ScriptedEnvironment()
    text = shell("cat <<E\n" + "x" * 120_000 + "\nE", environment)
    assert "too long" in text
    assert "Split it" in text
    assert environment.scripts == []
    assert shell("cat <<E | wc -c\n" + "x" * 100_000 + "\nE").endswith("Output:\n100001")


def test_the_agents_limit_comes_before_the_environments_own_and_the_model_is_told(
    agent, tinker_service
):
    tinker_service(Sampled(bash("kill -STOP $PPID")), Sampled("done"))
    one, context = agent(max_turns=2, command_timeout_sec=30), Context()

    async def hangs() -> None:
        # As Docker does: a RuntimeError at its own limit, which would end the trial.
        await asyncio.sleep(environment.timeouts[-1])
        raise RuntimeError("Command timed out")

    environment = ScriptedEnvironment(hangs)
    with time_passes_at_once() as runner:
        runner.run(one.run("x", environment, context))
    assert told(one) == ["Exit code: 124\nOutput:\n[no answer; the time limit is 30 seconds]"]
    assert context.stop_reason == "completed"
    # What the script started was to be ended, too, for which a hung container gets its own time.
    assert environment.scripts == ["kill -STOP $PPID\n", None]
    assert all(environment.timeouts)


def test_a_script_over_its_time_is_ended_even_if_the_trial_is_cancelled_meanwhile(
    agent, tinker_service
):
    tinker_service(Sampled(bash("x")))
    ended, cancelled = asyncio.Event(), []

    async def ending() -> ExecResult:
        cancelled.append(trial.cancel())
        await asyncio.sleep(1)
        ended.set()
        return ExecResult(return_code=0)

    with time_passes_at_once() as runner:
        one = agent(max_turns=2)
        environment = ScriptedEnvironment(forever, ending)

        async def main() -> None:
            nonlocal trial
            trial = asyncio.create_task(one.run("x", environment, Context()))
            with pytest.raises(asyncio.CancelledError):
                await trial
            await asyncio.sleep(2)

        trial: Any = None
        runner.run(main())
    assert cancelled == [True]
    assert ended.is_set()


@pytest.mark.parametrize("raised", [TimeoutError(), "never returns"])
def test_an_environment_that_times_out_by_itself_is_no_error(agent, tinker_service, raised):
    tinker_service(Sampled(bash("x")), Sampled("done"))
    one, context = agent(max_turns=2), Context()
    environment = ScriptedEnvironment(forever if raised == "never returns" else raised)
    with time_passes_at_once() as runner:
        runner.run(one.run("x", environment, context))
    assert "[no answer; the time limit is 120 seconds]" in told(one)[0]


def test_a_cancelled_trial_leaves_no_process_of_its_script(agent, tinker_service):
    own = own_seconds()
    fake = tinker_service(Sampled(bash(f"setsid sleep {own} & sleep {own}")))
    one, context = agent(max_turns=2), Context()

    async def main() -> None:
        trial = asyncio.create_task(one.run("x", ShellEnvironment(), context))
        for _ in range(3000):
            if processes(f"sleep {own}"):
                break
            await asyncio.sleep(0.01)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        assert left_of(f"sleep {own}") == []

    asyncio.run(main())
    assert context.stop_reason == "cancelled"
    assert context.turns == fake.returned


def test_a_container_that_is_gone_holds_up_a_cancellation_for_seconds_only(agent, tinker_service):
    tinker_service(Sampled(bash("x")))
    one, context, reached = agent(max_turns=2), Context(), asyncio.Event()

    async def hangs() -> None:
        reached.set()
        await forever()

    async def main() -> float:
        trial = asyncio.create_task(one.run("x", ScriptedEnvironment(hangs), context))
        await reached.wait()
        start = asyncio.get_running_loop().time()
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        return asyncio.get_running_loop().time() - start

    with time_passes_at_once() as runner:
        assert runner.run(main()) < 15


def test_a_second_cancellation_does_not_stop_what_ends_the_script(agent, tinker_service):
    tinker_service(Sampled(bash("x")))
    one, ended_scripts = agent(max_turns=2), []
    reached, ending, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        reached.set()
        await forever()

    async def ends() -> ExecResult:
        ending.set()
        await release.wait()
        ended_scripts.append("x")
        return ExecResult(return_code=0)

    async def main() -> None:
        trial = asyncio.create_task(one.run("x", ScriptedEnvironment(hangs, ends), Context()))
        for event in (reached, ending):
            await event.wait()
            trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        release.set()
        for _ in range(9):
            await asyncio.sleep(0)
        assert ended_scripts == ["x"]

    asyncio.run(main())


# The endings.


def overflow() -> Any:
    import litellm

    return litellm.ContextWindowExceededError("too long", "mock", "openai")


@pytest.mark.parametrize(
    ("script", "stop_reason", "n_episodes", "n_scripts"),
    [
        (["done"], StopReason.COMPLETED, 1, 0),
        ([bash("ls"), bash("ls"), "done"], StopReason.COMPLETED, 3, 2),
        ([bash("ls")], StopReason.MAX_TURNS, 3, 3),
        ([bash("ls"), Sampled(bash("rm x"), "length")], StopReason.MAX_TOKENS, 2, 1),
        ([bash("ls"), overflow], StopReason.CONTEXT_OVERFLOW, 1, 1),
        ([overflow], StopReason.CONTEXT_OVERFLOW, 0, 0),
        ([bash("ls"), asyncio.CancelledError()], StopReason.CANCELLED, 1, 1),
        ([bash("ls"), RuntimeError("gone")], StopReason.ERROR, 1, 1),
    ],
)
@pytest.mark.parametrize("client", ["tinker", "litellm"])
def test_every_ending_has_a_name_and_keeps_its_turns(
    agent, tinker_service, monkeypatch, client, script, stop_reason, n_episodes, n_scripts
):
    answers = []
    for answer in script:
        if answer is overflow:
            answer = overflow() if client == "litellm" else RuntimeError("maximum context length")
        if isinstance(answer, str) and client == "tinker":
            answer = Sampled(answer)
        answers.append(answer)
    if client == "tinker":
        fake = tinker_service(*answers)
    elif any(isinstance(answer, Sampled) for answer in answers):
        pytest.skip("a test of its own")
    else:
        api(monkeypatch, *answers)
    one, environment, context = agent(model_client=client, max_turns=3), None, Context()
    environment = ScriptedEnvironment()
    if stop_reason in (StopReason.CANCELLED, StopReason.ERROR):
        with pytest.raises((asyncio.CancelledError, RuntimeError)), no_waiting(monkeypatch):
            run(one, environment, context=context)
    else:
        run(one, environment, context=context)
    assert context.stop_reason == trajectory(one).extra["stop_reason"] == stop_reason
    assert context.metadata["n_episodes"] == n_episodes
    assert len(environment.scripts) == n_scripts
    replies = [step.message for step in trajectory(one).steps if step.source == "agent"]
    assert completion(one) == (replies[-1] if replies else "")
    if client == "tinker":
        assert context.turns == fake.returned


@contextlib.contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Harbor's LiteLLM waits between its three attempts."""
    from harbor.llms.lite_llm import LiteLLM

    with monkeypatch.context() as patch:
        patch.setattr(LiteLLM.call.retry, "wait", lambda state: 0)
        yield


@pytest.mark.parametrize(
    "message",
    ["Context length 9", "context_length_exceeded", "maximum context", "token limit", "too long"],
)
def test_each_way_to_say_that_a_prompt_is_too_long_is_context_overflow(
    agent, tinker_service, message
):
    tinker_service(RuntimeError(message))
    assert run(agent()).stop_reason == "context_overflow"


def test_exactly_max_tokens_is_not_cut_off(agent, tinker_service):
    fake = tinker_service(Sampled("hello world"))
    length = len(fake.encode("hello world", "stop"))
    assert run(agent(max_tokens=length)).stop_reason == "completed"


def test_a_long_conversation_gets_shorter_replies_and_then_ends_as_context_overflow(
    agent, tinker_service
):
    fake = tinker_service(Sampled(bash("ls")))
    limit = {"llm_kwargs": {"context_limit": 300}}
    context = run(agent(max_turns=99, system_prompt="x", max_tokens=100, **limit))
    assert context.stop_reason == "context_overflow"
    room = [300 - len(prompt) for prompt, _ in fake.requests]
    assert [params.max_tokens for _, params in fake.requests] == [min(100, left) for left in room]
    assert 0 < min(room) < 100
    assert context.turns == fake.returned


def test_a_reply_that_the_renderer_cannot_parse_is_recorded_and_scored_as_no_answer(
    agent, tinker_service
):
    tokens = tinker_service().encode(bash("rm x"), "stop")
    fake = tinker_service(Sampled(tokens=[50, 2, *tokens]))
    one, environment = agent(max_turns=2), ScriptedEnvironment()
    context = run(one, environment)
    assert context.turns == fake.returned
    assert context.stop_reason == "completed"
    assert completion(one) == ""
    assert environment.scripts == []


def test_an_environment_that_is_gone_is_raised_unchanged_with_the_turns_recorded(
    agent, tinker_service
):
    fake, gone = tinker_service(Sampled(bash("x"))), RuntimeError("container is gone")
    one, context = agent(max_turns=2), Context()
    with pytest.raises(RuntimeError) as raised:
        run(one, ScriptedEnvironment(gone), context=context)
    assert raised.value is gone
    assert context.turns == fake.returned
    assert completion(one) == bash("x")
    assert trajectory(one).extra["stop_reason"] == "error"


@pytest.mark.parametrize("where", ["before", "during the call", "command"])
def test_a_cancelled_run_keeps_its_finished_turns(agent, tinker_service, where):
    async def hangs() -> Any:
        reached.set()
        await forever()

    script = {"before": [hangs], "during the call": [Sampled(bash("a")), hangs]}
    fake = tinker_service(*script.get(where, [Sampled(bash("a"))]))
    answers = [hangs, ExecResult(return_code=0)] if where == "command" else []
    environment = ScriptedEnvironment(*answers)
    one, context, reached = agent(max_turns=2), Context(), asyncio.Event()

    async def main() -> None:
        trial = asyncio.create_task(one.run("x", environment, context))
        await reached.wait()
        trial.cancel()
        await trial

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert context.stop_reason == trajectory(one).extra["stop_reason"] == "cancelled"
    assert context.turns == fake.returned
    assert completion(one) == (bash("a") if fake.returned else "")


def test_a_second_run_starts_clean_and_resume_goes_on(agent, tinker_service):
    fake = tinker_service(Sampled("one"), Sampled("two"), Sampled("three"))
    one, resumed = agent(system_prompt="Be brief."), Context()
    first = run(one, instruction="a")
    asyncio.run(one.resume("b", ScriptedEnvironment(), resumed))
    assert first.turns + resumed.turns == fake.returned[:2]
    assert resumed.metadata["n_episodes"] == 1
    assert [step.message for step in trajectory(one).steps] == ["Be brief.", "b", "two"]
    second = run(one, instruction="a")
    assert fake.returned[2][0] == fake.returned[0][0]
    assert second.turns == fake.returned[2:]


def test_a_cut_off_reply_of_the_responses_api_keeps_its_text_and_is_gone_on_with(
    agent, monkeypatch
):
    import litellm

    requests = []

    async def aresponses(**request: Any) -> Any:
        requests.append(request)
        part = SimpleNamespace(type="output_text", text="one")
        output = [SimpleNamespace(type="message", content=[part])]
        reason = SimpleNamespace(reason="max_output_tokens")
        return SimpleNamespace(output=output, status="incomplete", incomplete_details=reason)

    monkeypatch.setattr(litellm, "aresponses", aresponses)
    one, context = agent(model_client="litellm", llm_kwargs={"use_responses_api": True}), Context()
    assert run(one, instruction="a", context=context).stop_reason == "max_tokens"
    assert completion(one) == "one"
    asyncio.run(one.resume("b", ScriptedEnvironment(), Context()))
    assert [message["content"] for message in requests[-1]["input"]] == ["a", "one", "b"]


def test_an_answer_of_an_earlier_step_is_never_left_to_be_scored(agent, tinker_service):
    tinker_service(Sampled("hello"), RuntimeError("service is gone"))
    one = agent()
    run(one)
    assert completion(one) == "hello"
    with pytest.raises(RuntimeError, match="service is gone"):
        run(one)
    assert completion(one) == ""


# What a trial leaves.


@pytest.mark.parametrize("trap", ["link", "dangling link", "pipe", "folder", "file"])
@pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
def test_whatever_a_command_puts_at_a_files_name_is_neither_followed_nor_waited_for(
    agent, tinker_service, tmp_path, name, trap
):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    logs = tmp_path / "logs"
    logs.mkdir()
    place = logs / name
    match trap:
        case "link":
            place.symlink_to(victim)
        case "dangling link":
            place.symlink_to(tmp_path / "authorized_keys")
        case "pipe":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
            (place / "x").write_text("x")
        case "file":
            place.write_text("old")
            place.chmod(0)
    tinker_service(Sampled("hello"))
    one = agent(logs_dir=logs)
    assert run(one).stop_reason == "completed"
    assert completion(one) == "hello"
    assert trajectory(one).steps[-1].message == "hello"
    assert stat.S_ISREG(place.lstat().st_mode)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "authorized_keys").exists()


def test_a_process_that_puts_folders_at_a_files_name_again_and_again_does_not_end_the_trial(
    agent, tinker_service, tmp_path
):
    tinker_service(Sampled("hello"))
    one, stop = agent(), threading.Event()

    def attack() -> None:
        while not stop.is_set():
            for path in [tmp_path / "completion.txt", *tmp_path.glob("completion.txt.*")]:
                with contextlib.suppress(OSError):
                    path.unlink()
            with contextlib.suppress(OSError):
                (tmp_path / "completion.txt").mkdir()

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        for _ in range(30):
            assert run(one).stop_reason == "completed"
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("attack", ["a folder at its name", "the file taken away"])
def test_a_process_that_comes_between_the_steps_of_writing_a_file_is_met_with_another_try(
    agent, tinker_service, monkeypatch, attack
):
    replace, attacks = Path.replace, []

    def attacked(self: Path, target: Path) -> Path:
        if len(attacks) < 20:
            attacks.append(self)
            if attack == "the file taken away":
                self.unlink()
            else:
                target.mkdir()
        return replace(self, target)

    tinker_service(Sampled("hello"))
    one = agent()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", attacked)
        assert run(one).stop_reason == "completed"
    assert len(attacks) == 20
    assert completion(one) == "hello"
    assert trajectory(one).steps[-1].message == "hello"


def test_a_log_folder_that_cannot_be_written_leaves_the_context_whole_and_hides_no_other_error(
    agent, tinker_service, tmp_path
):
    fake = tinker_service(Sampled("hello"), RuntimeError("service is gone"))
    (tmp_path / "file").write_text("")
    one, context = agent(logs_dir=tmp_path / "file" / "logs"), Context()
    with pytest.raises(OSError, match="Not a directory"):
        run(one, context=context)
    assert context.turns == fake.returned
    with pytest.raises(RuntimeError, match="service is gone"):
        run(one)


def test_a_trajectory_that_cannot_be_written_does_not_cost_the_answer(
    agent, tinker_service, monkeypatch
):
    tinker_service(Sampled("hello"))
    write_file = basic_loop_agent.write_file

    def full(path: Path, text: str) -> None:
        if path.name == "trajectory.json":
            raise OSError("No space left on device")
        write_file(path, text)

    monkeypatch.setattr(basic_loop_agent, "write_file", full)
    one = agent()
    with pytest.raises(OSError, match="No space left"):
        run(one)
    assert completion(one) == "hello"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_turn_with_logprobs_that_are_no_numbers_stays_out_of_the_ids_and_is_counted(
    agent, tinker_service, bad
):
    fake = tinker_service(Sampled(bash("ls")), Sampled("hello", logprobs=[bad] * 6))
    length = len(fake.encode("hello", "stop"))
    fake.script[1].logprobs = [bad] * length
    one = agent(max_turns=2)
    context = run(one)
    assert context.turns == fake.returned[:1]
    assert context.metadata["n_turns_without_ids"] == 1
    assert Context.model_validate_json(context.model_dump_json()) == context
    assert trajectory(one).steps[-1].metrics.completion_token_ids == fake.returned[1][1]


def test_logprobs_that_do_not_align_are_in_the_trajectory_but_not_among_the_ids(
    agent, tinker_service
):
    tinker_service(Sampled("hello", logprobs=[-1.0]))
    one = agent()
    assert run(one).rollout_details is None
    assert trajectory(one).steps[-1].metrics.logprobs == [-1.0]


def test_no_key_is_shown_or_left_anywhere(agent, monkeypatch, tmp_path, caplog):
    secret = "sk-secret-1234"
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    api(monkeypatch, bash("ls"), "done")
    one = agent(model_client="litellm", max_turns=2, llm_kwargs={"api_key": secret})
    with caplog.at_level(logging.DEBUG):
        context = run(one)
    assert secret not in repr(one.options)
    assert secret not in str(one.options)
    with pytest.raises(ValueError, match="model_path") as error:
        BasicLoopOptions(model_path="runs/1", llm_kwargs={"api_key": secret})
    assert secret not in str(error.value)
    assert secret not in context.model_dump_json()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 2
    assert not any(secret in path.read_text() for path in written)
    assert not any(secret in record.getMessage() for record in caplog.records)


def test_no_sampled_token_is_ever_lost_misaligned_or_recorded_twice(agent, tinker_service):
    """300 runs with random endings. A cancellation inside the client's own call is the one
    exception: what the sampler had not yet returned is gone, so the fake does not count it."""
    for seed in range(300):
        rng = random.Random(seed)
        fake = tinker_service(*(random_answer(rng) for _ in range(12)))
        results = [
            ExecResult(stdout="x" * rng.randrange(40), return_code=0),
            RuntimeError("gone"),
            TimeoutError(),
        ]
        environment = ScriptedEnvironment(*rng.choices(results, weights=[8, 1, 1], k=12))
        one = agent(
            max_turns=rng.randint(1, 8),
            renderer_name=rng.choice(["qwen3", "qwen3_instruct", "role_colon", "qwen3_5"]),
            rerender_history=rng.random() < 0.3,
            llm_kwargs={"context_limit": rng.choice([32_000, 32_000, 600])},
        )
        context = Context()
        n_steps = rng.choice([10_000, rng.randrange(1, 60)])
        asyncio.run(stopped_after(n_steps, one, environment, context))
        whole = [turn for turn in fake.returned if len(turn[1]) == len(turn[2] or [])]
        expected = [(prompt, tokens, logprobs or []) for prompt, tokens, logprobs in whole]
        assert context.turns == expected, seed
        assert context.metadata["n_episodes"] == len(fake.returned), seed
        assert context.metadata["n_turns_without_ids"] == len(fake.returned) - len(whole), seed
        view = trajectory(one)
        agents = [step for step in view.steps if step.source == "agent"]
        ids = [step.metrics.completion_token_ids for step in agents]
        assert ids == [turn[1] for turn in fake.returned], seed
        assert StopReason(context.stop_reason) == view.extra["stop_reason"], seed


def random_answer(rng: random.Random) -> Any:
    text = rng.choice(
        ["", "done", bash("ls"), "<think>a</think>" + bash("ls"), "<tool_call>{}</tool_call>"]
    )
    match rng.choice(["whole"] * 6 + ["cut off", "no tokens", "none", "short", "error"]):
        case "cut off":
            return Sampled(text, "length")
        case "no tokens":
            stop_reason = rng.choice(["stop", "length"])
            return Sampled(tokens=[], stop_reason=stop_reason, logprobs=rng.choice(["own", None]))
        case "none":
            return Sampled(text, logprobs=None)
        case "short":
            return Sampled(text, logprobs=[-1.0])
        case "error":
            return rng.choice([RuntimeError("API error"), RuntimeError("prompt is too long")])
    return Sampled(text)


async def stopped_after(
    n_steps: int, one: BasicLoopAgent, environment: Any, context: Context
) -> None:
    await one.setup(environment)
    trial = asyncio.create_task(one.run("x", environment, context))
    for _ in range(n_steps):
        if trial.done():
            break
        await asyncio.sleep(0)
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)


# Exact conversations.

ODD_SPACE = "\n\n \t hm \n"


def odd_tokens(name: str, tokenizer_dir: str, rng: random.Random) -> list[int]:
    """A reply with a command in other pieces than the tokenizer would cut, thinking closed."""
    tokenizer = tokenizer_of(tokenizer_dir)
    thought = f"hm{rng.random()}</think>"
    if not opens_thinking(name, tokenizer_dir):
        thought = f"<think>{thought}"
    thinking = tokenizer.encode(thought, add_special_tokens=False)
    text = rng.choice([ODD_SPACE, "", "\n"]) + bash(f"echo {rng.random()}")
    pieces = [tokenizer.encode(character, add_special_tokens=False) for character in text]
    stop = renderer_of(name, tokenizer_dir).get_stop_sequences()[0]
    stop = [stop] if isinstance(stop, int) else tokenizer.encode(stop, add_special_tokens=False)
    return [*thinking, *itertools.chain.from_iterable(pieces), *stop]


def datums(turns: list[tuple[list[int], list[int], list[float]]]) -> list[Any]:
    from tinker_cookbook.rl.data_processing import trajectory_to_data

    record = [basic_loop_agent.Turn(*turn) for turn in turns]
    fields = {name: None for name in basic_loop_agent.Trajectory.__dataclass_fields__}
    whole = basic_loop_agent.Trajectory(**fields | {"turns": record})
    return trajectory_to_data(to_tinker(whole), 1.0)


@pytest.mark.parametrize("name", RENDERERS)
def test_a_prompt_is_the_last_prompt_the_sampled_tokens_and_what_the_template_puts_around_a_message(
    agent, tinker_service, tokenizer_dir, name
):
    rng = random.Random(name)
    replies = [Sampled(tokens=odd_tokens(name, tokenizer_dir, rng)) for _ in range(6)]
    fake = tinker_service(*replies)
    environment = ScriptedEnvironment(ExecResult(stdout=f"{ODD_SPACE}out\n", return_code=0))
    context = run(agent(renderer_name=name, max_turns=6, max_tokens=4096), environment)
    assert context.turns == fake.returned
    kept = 0
    for (prompt, tokens, _), (following, _, _) in zip(
        fake.returned, fake.returned[1:], strict=False
    ):
        kept += following[: len(prompt + tokens)] == prompt + tokens
    assert context.metadata["n_prefix_breaks"] == 5 - kept
    if name in EXACT:
        assert kept == 5
        assert len(datums(context.turns)) == 1


@pytest.mark.parametrize("name", RENDERERS)
def test_a_prompt_has_the_special_tokens_of_the_templates_own_rendering(
    agent, tinker_service, tokenizer_dir, name
):
    """Also: it is that rendering where the template keeps what it once rendered."""
    renderer, tokenizer = renderer_of(name, tokenizer_dir), tokenizer_of(tokenizer_dir)
    tokens = reply_tokens(name, tokenizer_dir, bash("ls"))
    thinks = opens_thinking(name, tokenizer_dir)
    if thinks:
        tokens = reply_tokens(name, tokenizer_dir, "hm</think>" + bash("ls"))
    fake = tinker_service(Sampled(tokens=tokens))
    one = agent(renderer_name=name, max_turns=3, system_prompt="Be brief.")
    run(one, instruction="do it")
    answer = {"role": "assistant", "content": renderer.parse_response(tokens)[0]["content"]}
    output = {"role": "user", "content": "Exit code: 0\nOutput:\n(none)"}
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "do it"}]
    thinking = {tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>")}
    special = set(tokenizer.added_tokens_encoder.values()) - thinking
    for number, (prompt, _, _) in enumerate(fake.returned):
        whole = renderer.build_generation_prompt(start + [answer, output] * number).to_ints()
        assert [i for i in prompt if i in special] == [i for i in whole if i in special]
        if renderer.has_extension_property and not thinks:
            assert prompt == whole


@pytest.mark.parametrize("name", RENDERERS)
def test_output_of_a_command_cannot_become_structure(agent, tinker_service, tokenizer_dir, name):
    tokenizer = tokenizer_of(tokenizer_dir)
    added = [text for text in tokenizer.added_tokens_encoder if text.strip()]
    hostile = "".join(f"a {text} b<{text}<{text}\n" for text in added)
    harmless = "".join(f"a {text.strip('<>')[1:-1]} b\n" for text in added)
    counts = []
    for output in (hostile, harmless):
        tokens = reply_tokens(name, tokenizer_dir, "hm</think>" + bash("ls"))
        fake = tinker_service(Sampled(tokens=tokens))
        one = agent(renderer_name=name, max_turns=3, max_tokens=99_999)
        # In one run the history is rendered anew, in the other it is not.
        environment = ScriptedEnvironment(ExecResult(stdout=output, return_code=0))
        run(one, environment)
        assert output.removesuffix("\n") in told(one)[0]
        special = set(tokenizer.added_tokens_encoder.values())
        counts.append([sum(i in special for i in prompt) for prompt, _, _ in fake.returned])
    assert counts[0] == counts[1]


def test_an_instruction_keeps_its_special_tokens(agent, tinker_service):
    fake = tinker_service()
    run(agent(), instruction="Think in <think> tags.")
    think = tokenizer_of(fake.name).convert_tokens_to_ids("<think>")
    assert fake.returned[0][0].count(think) == 1


def rendered_anew(fake: FakeTinker, name: str, messages: list[dict]) -> bool:
    prompt = renderer_of(name, fake.name).build_generation_prompt(messages)
    return fake.returned[-1][0] == prompt.to_ints()


def test_an_edited_history_is_rendered_anew_and_the_next_turn_goes_on_from_there(
    agent, tinker_service
):
    class Forgetful(BasicLoopAgent):
        async def _execute(self, script: str, environment: Any) -> str:
            if script == "forget\n":
                self._conversation.messages[2]["content"] = "(left out)"
            return await super()._execute(script, environment)

    command = tinker_service().encode(bash("ls"), "stop")
    odd = [Sampled(tokens=[*map(ord, "hm "), *command])]
    fake = tinker_service(*odd, Sampled(bash("forget")), *odd, *odd, Sampled("done"))
    one = agent(Forgetful, max_turns=9, system_prompt="x")
    context = run(one, ScriptedEnvironment(ExecResult(stdout="out", return_code=0)))
    assert context.metadata["n_prefix_breaks"] == 1
    assert "left out" in tokenizer_of(fake.name).decode(fake.returned[2][0])
    assert "left out" in tokenizer_of(fake.name).decode(fake.returned[4][0])
    assert context.turns == fake.returned


@pytest.mark.parametrize("change", ["a reply that was cut off", "the template's own view"])
def test_what_cannot_be_trusted_is_rendered_anew_and_counted(agent, tinker_service, change):
    first = Sampled("<think>hm</think>one", "length" if change.startswith("a reply") else "stop")
    fake = tinker_service(first, Sampled("two"))
    one = agent(renderer_name="qwen3", rerender_history=not change.startswith("a reply"))
    resumed = Context()
    run(one, instruction="a")
    asyncio.run(one.resume("b", ScriptedEnvironment(), resumed))
    assert resumed.metadata["n_prefix_breaks"] == 1
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "one"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    assert rendered_anew(fake, "qwen3", [*messages, {"role": "user", "content": "b"}])


@pytest.mark.parametrize("name", INEXACT)
def test_a_stop_that_is_no_token_of_the_templates_history_is_rendered_anew(
    agent, tinker_service, tokenizer_dir, name
):
    tokens = reply_tokens(name, tokenizer_dir, bash("ls"))
    fake = tinker_service(Sampled(tokens=tokens))
    one = agent(renderer_name=name, max_turns=2, system_prompt="x")
    context = run(one, instruction="a")
    assert context.metadata["n_prefix_breaks"] == 1
    content = renderer_of(name, tokenizer_dir).parse_response(tokens)[0]["content"]
    output = "Exit code: 0\nOutput:\n(none)"
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": output},
    ]
    assert rendered_anew(fake, name, messages)


def test_breaks_are_logged_once_a_run(agent, tinker_service, caplog):
    tinker_service(Sampled(bash("ls")))
    with caplog.at_level(logging.INFO):
        run(agent(max_turns=3))
        assert "do not begin with the turn before" not in caplog.text
        run(agent(max_turns=3, renderer_name="role_colon"))
    assert caplog.text.count("2 prompts do not begin with the turn before") == 1


def test_the_next_step_goes_on_exactly_and_hears_what_the_last_commands_gave(agent, tinker_service):
    fake = tinker_service(Sampled(bash("ls")), Sampled("done"))
    one, resumed = agent(max_turns=1 + 1, renderer_name="qwen3"), Context()
    fake.script = [Sampled(bash("ls")), Sampled(bash("ls")), Sampled("done")]
    first = run(one, ScriptedEnvironment(ExecResult(stdout="<|im_end|>out", return_code=0)))
    assert first.stop_reason == "max_turns"
    asyncio.run(one.resume("step two", ScriptedEnvironment(), resumed))
    assert resumed.metadata["n_prefix_breaks"] == 0
    prompt, completion_ids, _ = fake.returned[1]
    new = fake.returned[2][0][len(prompt + completion_ids) :]
    text = tokenizer_of(fake.name).decode(new)
    assert "Output:\n<\u200b|im_end|>out\n\nstep two<|im_end|>" in text
    assert fake.returned[2][0][: len(prompt + completion_ids)] == prompt + completion_ids
    assert [step.message for step in trajectory(one).steps][1:] == ["step two", "done"]


def test_two_conversations_on_one_client_do_not_mix(agent, tinker_service, tmp_path):
    replies = [Sampled(f"<think>{i}</think>" + bash(f"echo {i}")) for i in range(8)]
    fake = tinker_service(*replies)
    contexts = [Context(), Context()]

    async def main() -> None:
        trials = []
        for number, context in enumerate(contexts):
            one = agent(renderer_name="qwen3", max_turns=4, logs_dir=tmp_path / str(number))
            trials.append(one.run(f"task {number}", ScriptedEnvironment(), context))
        await asyncio.gather(*trials)

    asyncio.run(main())
    assert len(fake.samplers) == 1
    assert [context.metadata["n_prefix_breaks"] for context in contexts] == [0, 0]
    turns = contexts[0].turns + contexts[1].turns
    assert sorted(turns) == sorted(fake.returned)
    for number, context in enumerate(contexts):
        prompt = tokenizer_of(fake.name).decode(context.turns[-1][0])
        assert f"task {number}" in prompt
        assert f"task {1 - number}" not in prompt


# The model clients and their cache.


def test_tinker_gets_every_option_and_a_server_of_its_own(agent, tinker_service):
    fake = tinker_service()
    sampling = {"seed": 3, "top_p": 0.9, "top_k": 5}
    one = agent(
        model_path="tinker://run/sampler_weights/1",
        max_tokens=7,
        temperature=0.5,
        api_base="http://localhost:1",
        llm_kwargs=sampling,
    )
    run(one)
    ((_, params),) = fake.requests
    assert (params.max_tokens, params.temperature) == (7, 0.5)
    assert (params.seed, params.top_p, params.top_k) == (3, 0.9, 5)
    assert params.stop == [2]
    assert fake.samplers == [{"model_path": "tinker://run/sampler_weights/1"}]
    assert [service.arguments for service in fake.services] == [{"base_url": "http://localhost:1"}]
    run(agent(temperature=None))
    assert fake.requests[-1][1].temperature == 1.0
    assert fake.services[-1].arguments == {}


def test_each_client_is_harbors_own(agent, tinker_service):
    from harbor.llms.lite_llm import LiteLLM
    from harbor.llms.tinker import TinkerLLM

    tinker_service()
    assert isinstance(agent()._build_llm(), TinkerLLM)
    assert isinstance(agent(model_client="litellm")._build_llm(), LiteLLM)


def test_without_collect_rollout_details_no_ids_are_left_and_prompts_are_exact_all_the_same(
    agent, tinker_service
):
    fake = tinker_service(Sampled("<think>a</think>" + bash("ls")), Sampled("done"))
    one = agent(renderer_name="qwen3", collect_rollout_details=False, max_turns=2)
    context = run(one)
    assert context.rollout_details is None
    assert context.metadata == {"stop_reason": "completed", "n_episodes": 2}
    assert all(not step.metrics.completion_token_ids for step in trajectory(one).steps[2:])
    (prompt, tokens, _), (following, _, _) = fake.returned
    assert following[: len(prompt + tokens)] == prompt + tokens
    assert context.n_output_tokens == sum(len(turn[1]) for turn in fake.returned)


def test_sampling_the_base_model_is_logged(agent, tinker_service, caplog):
    fake = tinker_service()
    with caplog.at_level(logging.INFO):
        run(agent())
    assert f"Sampling base model {fake.name}" in caplog.text


def test_importing_the_module_loads_no_model_library():
    code = "import basic_loop_agent, sys; "
    code += "print({'torch', 'transformers', 'tinker', 'litellm'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


def test_sixteen_concurrent_trials_share_one_client_and_one_sampling_client(
    agent, tinker_service, tmp_path
):
    fake, built = tinker_service(), []

    class Counted(BasicLoopAgent):
        def _build_llm(self) -> Any:
            built.append(super()._build_llm())
            return built[-1]

    async def trial(number: int) -> None:
        one = agent(Counted, logs_dir=tmp_path / str(number))
        await one.setup(ScriptedEnvironment())
        await one.run("hello", ScriptedEnvironment(), AgentContext())

    async def main() -> None:
        await asyncio.gather(*map(trial, range(16)))

    asyncio.run(main())
    assert len(built) == len(fake.samplers) == len(fake.services) == 1
    assert len(fake.returned) == 16


def test_the_client_is_built_in_setup(agent, tinker_service):
    fake = tinker_service()
    asyncio.run(agent().setup(ScriptedEnvironment()))
    assert len(fake.samplers) == 1
    assert fake.requests == []


def test_another_event_loop_or_configuration_gets_a_client_of_its_own_on_the_same_service(
    agent, tinker_service
):
    fake = tinker_service()

    async def clients(*agents: BasicLoopAgent) -> list[Any]:
        return [await one._shared_llm() for one in agents]

    base = agent()
    others = [
        agent(model_path="tinker://run/sampler_weights/1"),
        agent(renderer_name="role_colon"),
        agent(max_tokens=7),
        agent(temperature=0.0),
        agent(llm_kwargs={"seed": 1}),
        agent(collect_rollout_details=False),
    ]
    loop_only = {"max_turns": 5, "system_prompt": "x", "command_timeout_sec": 1}
    same = agent(max_output_chars=1, session_id="x", rerender_history=True, **loop_only)
    asked = [base, same, *others]
    both = asyncio.run(clients(*asked, *asked))
    first, again = both[: len(asked)], both[len(asked) :]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert first[0] is first[1]
    assert len(set(map(id, first))) == 1 + len(others)
    assert asyncio.run(clients(base))[0] not in first
    assert len(fake.services) == 1
    assert len(fake.samplers) == 2 + len(others)


def test_a_build_that_fails_or_is_cancelled_is_tried_again_by_the_next_trial(
    agent, tinker_service, monkeypatch
):
    fake, build, create = (
        tinker_service(),
        BasicLoopAgent._build_llm,
        FakeService.create_sampling_client,
    )
    failures = [None, None, RuntimeError("no tokenizer")]
    started, answers = asyncio.Event(), threading.Event()
    loop: Any = None

    def flaky(self: BasicLoopAgent) -> Any:
        failure = failures.pop()
        if failure:
            raise failure
        return build(self)

    def slow(self: Any, **source: str) -> Any:
        loop.call_soon_threadsafe(started.set)
        answers.wait(30)
        return create(self, **source)

    monkeypatch.setattr(BasicLoopAgent, "_build_llm", flaky)

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no tokenizer"):
            await agent().setup(ScriptedEnvironment())
        with monkeypatch.context() as patch:
            patch.setattr(FakeService, "create_sampling_client", slow)
            context = Context()
            trial = asyncio.create_task(agent().run("hello", ScriptedEnvironment(), context))
            await started.wait()
            trial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trial
            assert context.stop_reason == "cancelled"
            assert context.metadata["n_episodes"] == 0
            answers.set()
        one, other = await asyncio.gather(agent()._shared_llm(), agent()._shared_llm())
        assert one is other

    asyncio.run(main())
    assert len(fake.samplers) == 1


def test_the_cache_drops_the_least_recently_used_client_and_those_of_a_closed_loop(
    agent, tinker_service
):
    tinker_service()

    async def main() -> list[Any]:
        first = await agent(max_tokens=1)._shared_llm()
        gone = weakref.ref(await agent(max_tokens=2)._shared_llm())
        for max_tokens in range(3, 10):
            assert await agent(max_tokens=1)._shared_llm() is first
            await agent(max_tokens=max_tokens)._shared_llm()
        gc.collect()
        assert gone() is None
        assert await agent(max_tokens=1)._shared_llm() is first
        waiting = [agent(max_tokens=99)._shared_llm() for _ in range(4)]
        together = await asyncio.gather(*waiting)
        return [weakref.ref(first), weakref.ref(together[0])]

    clients = asyncio.run(main())
    gc.collect()
    assert [client() for client in clients] == [None, None]


def test_more_configurations_than_the_cache_keeps_are_built_once_each(
    agent, tinker_service, tmp_path
):
    # Tokenized before, for the fake takes no lock.
    tokens = tinker_service().encode("hello", "stop")
    fake = tinker_service(Sampled(tokens=tokens))

    async def main() -> None:
        trials = []
        for number in range(36):
            one = agent(max_tokens=1 + number % 12, logs_dir=tmp_path / str(number))
            trials.append(one.run("x", ScriptedEnvironment(), Context()))
        await asyncio.gather(*trials)

    asyncio.run(main())
    assert len(fake.samplers) == 12
    assert len(fake.returned) == 36


@pytest.mark.parametrize("status", [404, 410])
def test_trials_go_on_in_a_new_session_when_the_service_has_ended_theirs(
    agent, tinker_service, tmp_path, status
):
    fake = tinker_service(Sampled(bash("ls")))
    contexts = [Context() for _ in range(4)]

    async def ends_the_session() -> ExecResult:
        # After two trials' first commands, in the middle of all of them.
        fake.end_sessions(status)
        return ExecResult(return_code=0)

    async def main() -> None:
        trials = []
        for number, context in enumerate(contexts):
            one = agent(max_turns=3, logs_dir=tmp_path / str(number), max_tokens=50 + number % 2)
            first = ends_the_session if number == 3 else ExecResult(return_code=0)
            environment = ScriptedEnvironment(first, ExecResult(return_code=0))
            trials.append(one.run("x", environment, context))
        await asyncio.gather(*trials)

    asyncio.run(main())
    assert [context.stop_reason for context in contexts] == ["max_turns"] * 4
    assert [context.metadata["n_prefix_breaks"] for context in contexts] == [0] * 4
    assert sum(len(context.turns) for context in contexts) == len(fake.returned) == 12
    assert fake.services[0].closed
    assert len([service for service in fake.services if not service.closed]) == 1


def test_a_trial_goes_on_when_another_one_has_closed_the_ended_session(
    agent, tinker_service, tmp_path
):
    fake = tinker_service(Sampled(bash("ls")))
    other = agent(max_tokens=9, logs_dir=tmp_path / "other")

    async def meanwhile() -> ExecResult:
        fake.end_sessions(404)
        await other.run("x", ScriptedEnvironment(), Context())
        # It is closed in a thread.
        for _ in range(100_000):
            if "is closed" in str(fake.services[0].ended):
                break
            await asyncio.sleep(0)
        return ExecResult(return_code=0)

    context = run(agent(max_turns=2), ScriptedEnvironment(meanwhile, ExecResult(return_code=0)))
    assert context.stop_reason == "max_turns"
    assert context.turns == [fake.returned[0], fake.returned[2]]
    assert [service.closed for service in fake.services] == [True, False]


def test_a_new_checkpoint_meets_an_ended_session_and_goes_on_in_a_new_one(agent, tinker_service):
    fake = tinker_service()
    run(agent())
    fake.end_sessions(404)
    assert run(agent(model_path="tinker://run/sampler_weights/2")).stop_reason == "completed"
    assert len(fake.services) == 2


def test_a_checkpoint_that_does_not_exist_fails_its_trial_and_leaves_the_session_to_the_others(
    agent, tinker_service
):
    fake = tinker_service()
    run(agent())
    for _ in range(3):
        with pytest.raises(Exception, match="terminated"):
            run(agent(model_path="tinker://run/sampler_weights/missing"))
    run(agent(max_tokens=9))
    still_open = [service for service in fake.services if not service.closed]
    assert still_open == [fake.services[0]]


@pytest.mark.parametrize(
    ("answer", "stop_reason"),
    [(Sampled("hello"), "completed"), (RuntimeError("too long"), "context_overflow")],
)
def test_the_second_attempt_on_a_new_session_counts_like_the_first(
    agent, tinker_service, answer, stop_reason
):
    async def ends() -> Any:
        fake.end_sessions(410)
        # As the SDK says it where it polls for answers.
        raise RuntimeError("retrieve_futures polling failed for s:0\nError code: 410 - gone")

    fake = tinker_service(ends, answer)
    assert run(agent()).stop_reason == stop_reason
    assert len(fake.services) == 2


def test_a_checkpoint_that_is_slow_to_open_holds_up_no_other_checkpoint(
    agent, tinker_service, monkeypatch
):
    tinker_service()
    opening, answers = threading.Event(), threading.Event()
    create = FakeService.create_sampling_client

    def slow(self: FakeService, **source: str) -> Any:
        if "slow" in source["model_path"]:
            opening.set()
            answers.wait(30)
        return create(self, **source)

    monkeypatch.setattr(FakeService, "create_sampling_client", slow)
    environment = ScriptedEnvironment()

    async def main() -> None:
        waiting = asyncio.create_task(agent(model_path="tinker://run/slow").setup(environment))
        await asyncio.to_thread(opening.wait)
        await agent(model_path="tinker://run/fast").setup(environment)
        assert not waiting.done()
        answers.set()
        await waiting

    asyncio.run(main())


def test_cancelled_trials_leave_one_attempt_to_open_a_session_behind(
    agent, tinker_service, monkeypatch
):
    fake = tinker_service(Sampled(bash("ls")), Sampled("done"))
    attempts, attempted, answers = [], threading.Event(), threading.Event()

    def down(self: FakeService, **source: str) -> Any:
        attempts.append(source)
        attempted.set()
        answers.wait(30)
        return Done(RuntimeError("still down"))

    async def main() -> None:
        await agent().setup(ScriptedEnvironment())
        fake.end_sessions(410)
        with monkeypatch.context() as patch:
            patch.setattr(FakeService, "create_sampling_client", down)
            context = [Context() for _ in range(8)]
            runs = [agent().run("x", ScriptedEnvironment(), one) for one in context]
            trials = [asyncio.create_task(one) for one in runs]
            await asyncio.to_thread(attempted.wait)
            for trial in trials:
                trial.cancel()
            await asyncio.gather(*trials, return_exceptions=True)
            assert {one.stop_reason for one in context} == {"cancelled"}
            answers.set()
            with pytest.raises(RuntimeError, match="still down"):
                await agent().run("x", ScriptedEnvironment(), Context())
        assert len(attempts) <= 2
        await agent().run("x", ScriptedEnvironment(), Context())

    asyncio.run(main())


def test_a_session_that_ends_again_at_once_is_an_error(agent, tinker_service):
    async def ends() -> Any:
        fake.end_sessions(410)
        raise ended(410)

    fake = tinker_service(ends)
    context = Context()
    with pytest.raises(Exception, match="terminated"):
        run(agent(), context=context)
    assert context.stop_reason == "error"


def test_event_loops_in_threads_share_the_tokenizer(agent, tinker_service, tmp_path):
    # Tokenized before, for the fake takes no lock.
    tokens = tinker_service().encode("<think>hm</think>" + bash("ls"), "stop")
    fake = tinker_service(Sampled(tokens=tokens))
    failures, contexts = [], []

    def loop(number: int) -> None:
        async def main() -> None:
            trials = []
            for trial in range(5):
                one = agent(logs_dir=tmp_path / f"{number}-{trial}", max_turns=4)
                contexts.append(Context())
                output = ExecResult(stdout="x" * 9999, return_code=0)
                trials.append(one.run("x", ScriptedEnvironment(output), contexts[-1]))
            await asyncio.gather(*trials)

        try:
            asyncio.run(main())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(fake.services) == 1
    assert sum(len(context.turns) for context in contexts) == len(fake.returned) == 80


def test_every_use_of_the_tokenizer_holds_its_lock(
    agent, tinker_service, tokenizer_dir, monkeypatch
):
    tinker_service(Sampled(bash("ls")))
    renderer = type(renderer_of("qwen3_instruct", tokenizer_dir))
    unlocked, used = [], []

    def watched(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def use(*args: Any, **kwargs: Any) -> Any:
            used.append(name)
            if not basic_loop_agent._tokenizing.locked():
                unlocked.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, use)

    watched(renderer, "build_generation_prompt")
    watched(renderer, "parse_response")
    watched(type(tokenizer_of(tokenizer_dir)), "get_added_vocab")
    run(agent(max_turns=2))
    assert set(used) == {"build_generation_prompt", "parse_response", "get_added_vocab"}
    assert unlocked == []


def test_two_threads_open_one_session(tinker_service, monkeypatch):
    fake = tinker_service()

    def slow() -> FakeService:
        time.sleep(0.1)
        return fake()

    monkeypatch.setattr("tinker.ServiceClient", slow)
    service = basic_loop_agent.TinkerService(None)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        samplers = list(pool.map(service.sampling_client, [{"base_model": "m"}] * 4))
    assert len(fake.services) == 1
    assert len({id(sampler.service) for sampler in samplers}) == 1


def test_the_calls_of_older_sdks_that_give_a_future_or_the_client_itself_work_too(
    agent, tinker_service, monkeypatch
):
    fake = tinker_service(Sampled("hello"))
    created, sampled = FakeService.create_sampling_client, FakeSampler.answer

    def create(self: FakeService, **source: str) -> FakeSampler:
        return created(self, **source).result()

    def sample(self: FakeSampler, **call: Any) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(sampled(self, **call), loop)

    monkeypatch.setattr(FakeService, "create_sampling_client", create)
    monkeypatch.setattr(FakeSampler, "sample", sample)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert run(agent()).turns == fake.returned
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_a_service_that_does_not_answer_holds_up_neither_the_loop_nor_the_exit(
    agent, tinker_service, monkeypatch
):
    fake = tinker_service()
    opening = threading.Event()

    def down(**kwargs: Any) -> None:
        opening.wait(60)

    monkeypatch.setattr("tinker.ServiceClient", down)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await agent().setup(ScriptedEnvironment())

    asyncio.run(main())
    waiting = [thread for thread in threading.enumerate() if not thread.daemon]
    assert waiting == [threading.main_thread()]
    opening.set()
    assert fake.samplers == []


EXIT = """\
import asyncio, sys, time
# Before what imports the thread pools.
import basic_loop_agent
import tinker
from concurrent.futures import ThreadPoolExecutor

class Service:
    def create_sampling_client(self, **source):
        return source
    def close(self, status):
        # The end of the process waits for it, but not for long.
        time.sleep(60 if "hangs" in sys.argv else 0.5)
        # As the SDK does: by `atexit`, or after the thread pools' end, this would raise.
        return ThreadPoolExecutor().submit(print, "closed", status)

tinker.ServiceClient = Service

service = basic_loop_agent.TinkerService(None)
basic_loop_agent._services["this"] = service
asyncio.run(asyncio.to_thread(service.sampling_client, {"base_model": "m"}))
"""


@pytest.mark.parametrize("how", ["answers", "hangs"])
def test_the_session_is_finished_when_the_process_ends_or_left_if_that_hangs(how):
    command = [sys.executable, "-c", EXIT, how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ended.stdout == ("closed success\n" if how == "answers" else "")
    assert ended.returncode == 0


def test_the_real_sdk_warns_of_nothing_that_this_file_calls():
    import tinker

    service, sampler = tinker.ServiceClient, tinker.SamplingClient
    for method in (service.create_sampling_client, service.close, sampler.sample):
        assert not hasattr(method, "__deprecated__")


# The options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turn": 3}, r"max_turn\b"),
        ({"model_client": "openai"}, "model_client.*'tinker' or 'litellm'"),
        ({"max_tokens": 0}, "max_tokens.*greater than or equal to 1"),
        ({"max_turns": 0}, "max_turns.*greater than or equal to 1"),
        ({"temperature": -0.1}, "temperature.*greater than or equal to 0"),
        ({"command_timeout_sec": 0}, "command_timeout_sec.*greater than or equal to 1"),
        ({"max_output_chars": 0}, "max_output_chars.*greater than or equal to 1"),
        ({"model_path": "runs/1"}, "model_path.*tinker://"),
        ({"model_path": ""}, "model_path.*tinker://"),
        ({"temperature": math.inf}, "temperature.*finite number"),
        ({"llm_kwargs": {"max_tokens": 3}}, "llm_kwargs holds max_tokens: use the option of that"),
        ({"llm_kwargs": {"model_name": "x"}}, "llm_kwargs holds model_name: use the option"),
        ({"model_client": "litellm", "model_path": "tinker://run/w"}, "set model_client=tinker"),
        ({"model_client": "litellm", "renderer_name": "qwen3"}, "set model_client=tinker"),
        ({"model_name": None}, "no model: name one with -m"),
        (
            {"model_name": "openai/gpt-4o"},
            "openai/gpt-4o is an API model: set model_client=litellm",
        ),
    ],
)
def test_a_bad_option_is_one_clear_error(options, message):
    given = {"logs_dir": Path(), "model_name": "m", "llm_kwargs": {"api_key": "sk-secret"}}
    with pytest.raises(ValueError, match=f"(?s){message}") as error:
        BasicLoopAgent(**given | options)
    assert "sk-secret" not in str(error.value)


def test_openais_open_models_can_be_sampled_with_tinker(agent):
    assert agent(model_name="openai/gpt-oss-20b").options.model_client == "tinker"


def test_a_missing_key_is_found_when_the_trial_is_made_before_any_container(agent, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ValueError, match="no API key for Tinker: set TINKER_API_KEY"):
        agent()
    lite = {"model_client": "litellm", "model_name": "anthropic/claude-sonnet-4-5"}
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"no API key for anthropic/.*: set ANTHROPIC_API_KEY"):
        agent(**lite)
    agent(**lite, llm_kwargs={"api_key": "x"})
    agent(**lite, llm_kwargs={"mock_response": "x"})
    # Of the clients for a server of one's own, only OpenAI's wants a key.
    own = "http://localhost:8000/v1"
    agent(**lite, api_base=own)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="set OPENAI_API_KEY"):
        agent(model_client="litellm", model_name="openai/my-model", api_base=own)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "x")
    agent(**lite)


@needs("tinker.auth", "tinker stores keys since 0.38")
def test_a_key_that_tinker_has_stored_is_a_key(agent, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setattr("tinker.auth.tinker_has_credentials", lambda: True)
    assert agent().options.model_client == "tinker"


def test_models_that_need_no_key_are_not_asked_for_one(agent):
    model_info = {"max_input_tokens": 99, "max_output_tokens": 99}
    prices = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
    for name in ("hosted_vllm/my-model", "ollama/llama3"):
        kwargs = {"model_info": model_info | prices}
        agent(model_client="litellm", model_name=name, llm_kwargs=kwargs)


def test_a_client_argument_that_does_not_exist_is_one_clear_error(agent, tinker_service):
    tinker_service()
    with pytest.raises(ValueError, match="llm_kwargs: TinkerLLM takes no tempreature"):
        run(agent(llm_kwargs={"tempreature": 1}))


def test_tinker_without_its_packages_says_what_to_install(agent, monkeypatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(ValueError, match=r"pip install 'harbor\[tinker\]'.*model_client=litellm"):
        agent()
    agent(model_client="litellm")


def test_numbers_that_the_command_line_took_for_numbers_are_texts_where_texts_are_meant(agent):
    assert agent(session_id=7).options.session_id == "7"


@needs("harbor.agents.options", "Harbor checks options before any trial since 0.23")
def test_a_bad_option_or_a_missing_key_ends_a_job_before_any_trial(tmp_path, monkeypatch):
    from harbor.job import Job

    config = job_config(tmp_path, {"model_client": "litellm", "max_turn": 3})
    with pytest.raises(ValueError, match="Unknown option 'max_turn'"):
        asyncio.run(Job.create(config))
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ValueError, match="no API key for Tinker: set TINKER_API_KEY"):
        asyncio.run(Job.create(job_config(tmp_path, {})))
    assert not list(tmp_path.rglob("result.json"))


@needs("harbor.agents.options", "harbor agent schema exists since 0.23")
def test_the_schema_describes_every_option():
    schema = BasicLoopAgent.options_schema()["properties"]
    own = BasicLoopOptions.__annotations__
    assert all(schema[name]["description"] for name in own)


# Real jobs, and from their trials to training data.


def job_config(jobs_dir: Path, kwargs: dict[str, Any], **config: Any) -> JobConfig:
    """A job over the example task, with the fakes in place of the container and the verifier."""
    fakes = {
        "environment": {"import_path": f"{__name__}:HostEnvironment"},
        "verifier": {"import_path": f"{__name__}:HostVerifier"},
    }
    defaults = {
        "jobs_dir": jobs_dir,
        "quiet": True,
        "agents": [lite_agent(**kwargs)],
        "tasks": [{"path": ROOT / "examples/greet"}],
    }
    return JobConfig.model_validate(defaults | fakes | config)


def lite_agent(**kwargs: Any) -> dict[str, Any]:
    path = "basic_loop_agent:BasicLoopAgent"
    return {"import_path": path, "model_name": "openai/mock", "kwargs": kwargs}


def tinker_agent(fake: FakeTinker, **kwargs: Any) -> list[dict[str, Any]]:
    kwargs = {"renderer_name": "qwen3_instruct"} | kwargs
    return [lite_agent(**kwargs) | {"model_name": fake.name}]


def run_job(config: JobConfig) -> list[Any]:
    from harbor.job import Job

    async def main() -> Any:
        # Harbor 0.13 makes a job with its constructor's work done in `create` too.
        return await (await Job.create(config)).run()

    return asyncio.run(main()).trial_results


def from_disk(trial: Any) -> Any:
    folder = Path(trial.trial_uri.removeprefix("file://"))
    return TrialResult.model_validate_json((folder / "result.json").read_text())


def test_a_real_job_scores_its_trials_and_names_the_model(tmp_path):
    kwargs = {"model_client": "litellm", "llm_kwargs": {"mock_response": "Hello, world!"}}
    trials = run_job(job_config(tmp_path, kwargs, n_attempts=2))
    for trial in map(from_disk, trials):
        assert trial.verifier_result.rewards == {"reward": 1.0}
        assert trial.agent_info.version == basic_loop_agent.__version__
        assert trial.agent_info.model_info.model_dump() == {"name": "mock", "provider": "openai"}
        whole = trial_to_trajectory(trial)
        assert (whole.turns, whole.reward, whole.rewards) == ([], 1.0, {"reward": 1.0})
        assert whole.prompt_tokens > 0
        assert whole.completion_tokens > 0
        assert whole.cost_usd is None
        assert whole.seconds > 0
        assert (whole.stop_reason, whole.exception_type) == ("completed", None)
        assert (whole.task_name, whole.trial_name) == (trial.task_name, trial.trial_name)


def test_the_name_under_which_it_was_first_copied_still_works():
    assert _trial_to_trajectory is trial_to_trajectory


@pytest.mark.parametrize("answer", ["Hello, world!", "hello WORLD", "hello", "", "hello world x"])
def test_the_example_tasks_own_test_and_the_host_side_verifier_agree(tmp_path, answer):
    """tests/test.sh is run as it stands, with its absolute paths led into a folder of its own."""
    for name in ("agent", "verifier"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    (tmp_path / "logs/agent/completion.txt").write_text(answer)
    tests = tmp_path / "tests"
    shutil.copytree(ROOT / "examples/greet/tests", tests)
    text = (tests / "test.sh").read_text()
    (tests / "test.sh").write_text(text.replace("/logs/", f"{tmp_path}/logs/"))
    subprocess.run(["bash", tests / "test.sh"], check=True)
    scored = float((tmp_path / "logs/verifier/reward.txt").read_text())
    paths = SimpleNamespace(tests_dir=tests)
    folders = SimpleNamespace(agent_dir=tmp_path / "logs/agent")
    verifier = HostVerifier(SimpleNamespace(paths=paths), folders)
    assert asyncio.run(verifier.verify()).rewards == {"reward": scored}
    assert scored == float(
        answer.lower().startswith("hello") and "x" not in answer and len(answer) > 5
    )


@pytest.mark.parametrize(
    ("renderer", "replies", "n_datums"),
    [
        ("qwen3_instruct", [Sampled("hello world")], 1),
        ("qwen3", [Sampled("<think>a</think>" + bash("ls")), Sampled("hello world")], 1),
        ("qwen3", [Sampled(bash("ls")), Sampled("hello wo", "length")], 1),
        ("role_colon", [Sampled(bash("ls")), Sampled("hello world")], 2),
    ],
)
def test_a_jobs_trials_become_datums_with_every_sampled_token(
    tmp_path, tinker_service, renderer, replies, n_datums
):
    from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
    from tinker_cookbook.rl.types import TrajectoryGroup

    fake = tinker_service(*replies, *replies)
    agents = tinker_agent(fake, max_turns=len(replies), renderer_name=renderer)
    one_by_one = {"n_attempts": 2, "n_concurrent_trials": 1}
    trials = run_job(job_config(tmp_path, {}, agents=agents, **one_by_one))
    live = [trial_to_trajectory(trial) for trial in trials]
    assert live == [trial_to_trajectory(from_disk(trial)) for trial in trials]
    turns = [turn for one in live for turn in one.turns]
    ids = [(turn.prompt_token_ids, turn.completion_token_ids, turn.logprobs) for turn in turns]
    assert sorted(ids) == sorted(fake.returned)

    rollouts = [to_tinker(one) for one in live]
    group = TrajectoryGroup(rollouts, [1.0, 0.0], [{}, {}])
    data, _ = assemble_training_data([group], compute_advantages([group]))
    assert len(data) == 2 * n_datums
    trained = []
    for datum in data:
        columns = [
            datum.loss_fn_inputs[name].to_torch().tolist()
            for name in ("target_tokens", "logprobs", "mask")
        ]
        for token, logprob, mask in zip(*columns, strict=True):
            if mask:
                trained.append((int(token), round(logprob, 3)))
    expected = []
    for _, tokens, logprobs in ids:
        expected += zip(tokens, [round(logprob, 3) for logprob in logprobs], strict=True)
    assert trained == expected
    cut_off = replies[-1].stop_reason == "length"
    assert {one.stop_reason for one in rollouts} == {"max_tokens" if cut_off else "completed"}
    stops = [one.ac.stop_reason for one in rollouts[0].transitions]
    assert stops == ["stop"] * (len(replies) - 1) + ["length" if cut_off else "stop"]
    done = [one.episode_done for one in rollouts[0].transitions]
    assert done == [False] * (len(replies) - 1) + [True]


def test_a_timed_out_trial_is_scored_and_keeps_its_turns(tmp_path, tinker_service):
    fake = tinker_service(Sampled("hello world\n" + bash("ls")), forever)
    agents = tinker_agent(fake, max_turns=3)
    agents[0]["override_timeout_sec"] = 2
    (trial,) = map(from_disk, run_job(job_config(tmp_path, {}, agents=agents)))
    whole = trial_to_trajectory(trial)
    assert whole.exception_type == "AgentTimeoutError"
    assert whole.stop_reason == "cancelled"
    assert whole.reward == 0.0
    assert len(whole.turns) == len(fake.returned) == 1


def test_a_trial_whose_policy_diverged_has_a_result_that_can_be_read_back(tmp_path, tinker_service):
    fake = tinker_service(Sampled("hello", logprobs=[math.nan] * 6))
    fake.script[0].logprobs = [math.nan] * len(fake.encode("hello", "stop"))
    (trial,) = map(from_disk, run_job(job_config(tmp_path, {}, agents=tinker_agent(fake))))
    assert trial.agent_result.rollout_details is None
    assert trial.agent_result.metadata["n_turns_without_ids"] == 1


def test_a_trial_that_fails_is_no_training_data_and_an_unscored_one_has_no_reward(
    tmp_path, tinker_service
):
    fake = tinker_service(Sampled(bash("ls")), RuntimeError("service is gone"))
    agents = tinker_agent(fake, max_turns=2)
    (failed,) = run_job(job_config(tmp_path / "failed", {}, agents=agents))
    assert failed.exception_info.exception_type == "RuntimeError"
    assert failed.agent_result.rollout_details
    assert trial_to_trajectory(failed) is None
    fake = tinker_service(Sampled("hello"))
    config = job_config(
        tmp_path / "unscored", {}, agents=tinker_agent(fake), verifier={"disable": True}
    )
    (unscored,) = run_job(config)
    whole = trial_to_trajectory(unscored)
    assert (whole.reward, whole.rewards, len(whole.turns)) == (None, {}, 1)
    unscored.agent_result = AgentContext()
    assert trial_to_trajectory(unscored) is None


def test_rewards_tokens_and_bad_records_of_other_agents(tmp_path, tinker_service):
    fake = tinker_service(Sampled("hello"))
    (trial,) = run_job(job_config(tmp_path, {}, agents=tinker_agent(fake)))
    context = trial.agent_result
    for rewards, reward in [
        ({"reward": 1, "style": 0.5}, 1),
        ({"score": 0.25}, 0.25),
        ({"a": 1.0, "b": 2.0}, None),
    ]:
        trial.verifier_result = VerifierResult(rewards=rewards)
        whole = trial_to_trajectory(trial)
        assert (whole.reward, whole.rewards) == (reward, rewards)
    context.n_input_tokens = context.n_output_tokens = None
    whole, ((prompt, tokens, logprobs),) = trial_to_trajectory(trial), fake.returned
    assert (whole.prompt_tokens, whole.completion_tokens) == (len(prompt), len(tokens))
    context.rollout_details = None
    whole = trial_to_trajectory(trial)
    assert (whole.prompt_tokens, whole.completion_tokens) == (None, None)
    good = {"prompt_token_ids": [prompt], "completion_token_ids": [tokens], "logprobs": [logprobs]}
    for bad, message in [
        ({"logprobs": [logprobs[1:]]}, "not aligned"),
        ({"prompt_token_ids": [prompt, prompt]}, "not aligned"),
        ({"logprobs": None}, "not aligned"),
        ({"logprobs": [[math.nan] * len(logprobs)]}, "a logprob is not finite"),
        ({"logprobs": [[-math.inf] * len(logprobs)]}, "a logprob is not finite"),
    ]:
        context.rollout_details = [good | bad]
        with pytest.raises(ValueError, match=f"trial {trial.trial_name}: .*{message}"):
            trial_to_trajectory(trial)
    context.rollout_details = [good]
    trial.verifier_result = VerifierResult(rewards={"reward": 1.0, "style": math.nan})
    with pytest.raises(ValueError, match=f"trial {trial.trial_name}: the reward 'style' is nan"):
        trial_to_trajectory(trial)


@pytest.mark.skipif(
    not hasattr(BasicLoopAgent.__base__.__base__, "resume"),
    reason="Harbor resumes steps since 0.20",
)
@pytest.mark.parametrize("first", [Sampled("hello"), Sampled("hel", "length")])
def test_a_multi_step_task_resumes_one_conversation_and_gives_one_trajectory(
    tmp_path, tinker_service, first
):
    task = tmp_path / "task"
    for step, instruction in {"first": "remember x", "second": "what was it?"}.items():
        (task / "steps" / step / "tests").mkdir(parents=True)
        (task / "steps" / step / "tests" / "test.sh").write_text("exit 0\n")
        (task / "steps" / step / "instruction.md").write_text(instruction)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "tests").mkdir()
    (task / "tests" / "answer.txt").write_text("x")
    steps = '[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n'
    (task / "task.toml").write_text(f'schema_version = "1.3"\n{steps}')
    fake = tinker_service(first, Sampled("x"))
    agents = tinker_agent(fake)
    agents[0]["resume_trajectory"] = True
    config = job_config(tmp_path, {}, agents=agents, tasks=[{"path": task}])
    (trial,) = map(from_disk, run_job(config))
    details = [step.agent_result.rollout_details for step in trial.step_results]
    assert [len(one[0]["logprobs"]) for one in details] == [1, 1]
    whole = trial_to_trajectory(trial)
    ids = [(one.prompt_token_ids, one.completion_token_ids, one.logprobs) for one in whole.turns]
    assert ids == fake.returned
    (prompt, tokens, _), (following, _, _) = ids
    exact = following[: len(prompt + tokens)] == prompt + tokens
    assert exact or first.stop_reason == "length"
    breaks = [step.agent_result.metadata["n_prefix_breaks"] for step in trial.step_results]
    assert breaks == [0, 0 if exact else 1]
    assert "hel" in tokenizer_of(fake.name).decode(following)
    assert whole.completion_tokens == sum(len(tokens) for _, tokens, _ in fake.returned)
    assert whole.reward == trial.verifier_result.rewards["reward"] == 0.5


# The training loop in the README.

RIGHT, WRONG = Sampled("Hello, world!"), Sampled("no")
# Ten groups of eight.
HALF_RIGHT = [RIGHT, WRONG] * 40


class FakeTraining(FakeTinker):
    """The training half of the service too. Each client is a training run of its own.

    Every call is held against the installed SDK: it must take these arguments, and not call it
    deprecated.
    """

    def __init__(self, tokenizer_dir: str, *script: Any) -> None:
        import tinker

        super().__init__(tokenizer_dir, *script)
        self.real = {"service": tinker.ServiceClient, "training": tinker.TrainingClient}
        self.clients, self.saved, self.trained, self.futures = [], [], [], []
        # The number of the forward_backward that raises.
        self.crash_in_update = None

    def __call__(self, **kwargs: Any) -> "FakeService":
        service = super().__call__(**kwargs)
        for method in (
            self.create_lora_training_client,
            self.create_training_client_from_state_with_optimizer,
        ):
            setattr(service, method.__name__, method)
        return service

    def future(self, of: str, method: str, result: Any, *args: Any, **kwargs: Any) -> Done:
        real = getattr(self.real[of], method)
        inspect.signature(real).bind(None, *args, **kwargs)
        assert not hasattr(real, "__deprecated__"), real.__deprecated__
        self.futures.append(Done(result))
        return self.futures[-1]

    def client(self, method: str, source: str) -> Done:
        self.clients.append(source)
        return self.future("service", method, self, source)

    def create_lora_training_client(self, base_model: str) -> Done:
        return self.client("create_lora_training_client", base_model)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Done:
        return self.client("create_training_client_from_state_with_optimizer", path)

    def save(self, method: str, kind: str, name: str, **kwargs: Any) -> Done:
        path = f"tinker://run-{len(self.clients)}/{kind}/{name}"
        assert path not in self.saved, "the service refuses a second checkpoint of the same name"
        self.saved.append((path, kwargs.get("ttl_seconds")))
        return self.future("training", method, SimpleNamespace(path=path), name, **kwargs)

    def save_weights_for_sampler(self, name: str, **kwargs: Any) -> Done:
        return self.save("save_weights_for_sampler", "sampler_weights", name, **kwargs)

    def save_state(self, name: str, **kwargs: Any) -> Done:
        return self.save("save_state", "weights", name, **kwargs)

    def forward_backward(self, data: list[Any], loss_fn: str) -> Done:
        import tinker

        assert loss_fn == "importance_sampling"
        assert all(isinstance(datum, tinker.Datum) for datum in data)
        outputs = []
        for datum in data:
            logprobs = datum.loss_fn_inputs["logprobs"].to_torch() - 0.25
            outputs.append({"logprobs": tinker.TensorData.from_torch(logprobs)})
        result = tinker.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs
        )
        if len(self.trained) == self.crash_in_update:
            self.crash_in_update = None
            result = ConnectionError("the service is gone")
        else:
            self.trained.append(data)
        return self.future("training", "forward_backward", result, data, loss_fn=loss_fn)

    def optim_step(self, params: Any) -> Done:
        import tinker

        assert isinstance(params, tinker.AdamParams)
        return self.future("training", "optim_step", None, params)


def readme_block(language: str, holding: str) -> str:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)
    (block,) = [block for block in blocks if holding in block]
    return block


@pytest.fixture
def training_loop(tmp_path, tokenizer_dir, monkeypatch) -> Callable[..., FakeTraining]:
    """Runs the README's text as it stands, in a folder of its own.

    Only `tinker.ServiceClient`, the tokenizer and the container are exchanged.
    """
    fake = FakeTraining(tokenizer_dir)
    kept = {"environment", "verifier", "jobs_dir", "quiet"}
    fakes = job_config(tmp_path / "jobs", {}).model_dump(include=kept)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tinker.ServiceClient", fake)
    tokenizer = tokenizer_of(tokenizer_dir)
    monkeypatch.setattr("harbor.llms.tinker.get_tokenizer", lambda name: tokenizer)
    config = "harbor.models.job.config.JobConfig"
    monkeypatch.setattr(config, lambda **config: JobConfig(**fakes, **config))
    text = readme_block("python", "assemble_training_data")

    def run(*script: Any, steps: int = 10, crash_in_update: int | None = None) -> FakeTraining:
        fake.script, fake.crash_in_update = list(script), crash_in_update
        source = text.replace("STEPS = 10", f"STEPS = {steps}")
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
        return fake

    return run


def printed(capsys: pytest.CaptureFixture) -> list[str]:
    """What the loop prints, without Harbor's progress bars."""
    return re.findall(r"^(?:step|final|greet).*", capsys.readouterr().out, re.MULTILINE)


def example(datum: Any) -> tuple[list[int], list[int], list[float], float]:
    """Prompt ids, completion ids, logprobs and advantage of a datum of one turn."""
    inputs = {name: tensor.to_torch().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert set(inputs) == {"target_tokens", "logprobs", "advantages"}
    assert {len(values) for values in inputs.values()} == {datum.model_input.length}
    start = next(i for i, advantage in enumerate(inputs["advantages"]) if advantage)
    assert len(set(inputs["advantages"][start:])) == 1
    assert not any(inputs["logprobs"][:start])
    logprobs = [round(logprob, 3) for logprob in inputs["logprobs"][start:]]
    prompt = datum.model_input.to_ints()[: start + 1]
    return prompt, inputs["target_tokens"][start:], logprobs, inputs["advantages"][start]


def test_the_training_loop_in_the_readme_runs_as_it_stands(training_loop, capsys):
    fake = training_loop(*HALF_RIGHT)
    assert fake.clients == ["Qwen/Qwen3-8B"]
    week = 7 * 24 * 3600
    saved = []
    for step in range(10):
        saved.append((f"tinker://run-1/sampler_weights/{step:04}", week))
        saved.append((f"tinker://run-1/weights/{step:04}", week))
    assert fake.saved == [*saved, ("tinker://run-1/sampler_weights/final", None)]
    paths = [f"tinker://run-1/sampler_weights/{step:04}" for step in range(10)]
    assert fake.samplers == [{"model_path": path} for path in paths]
    assert {params.max_tokens for _, params in fake.requests} == {4096}
    right = fake.encode("Hello, world!", "stop")
    sampled = iter(fake.returned)
    for data in fake.trained:
        expected = []
        for prompt, tokens, logprobs in sorted(next(sampled) for _ in data):
            advantage = 0.5 if tokens == right else -0.5
            expected.append((prompt, tokens, logprobs, advantage))
        assert sorted(map(example, data)) == expected
    assert [len(data) for data in fake.trained] == [8] * 10
    lines = printed(capsys)
    assert lines[:2] == [
        "step 0: 8 trials, mean reward 0.500, {'completed': 8}",
        "step 0: trained on 1 of 1 groups, KL 0.2500",
    ]
    assert len(lines) == 21
    assert lines[-1] == "final checkpoint: tinker://run-1/sampler_weights/final"


def test_after_a_crash_the_training_loop_goes_on_from_the_last_saved_state(
    training_loop, tmp_path, capsys
):
    with pytest.raises(ConnectionError, match="the service is gone"):
        training_loop(*HALF_RIGHT, steps=4, crash_in_update=2)
    state = "tinker://run-1/weights/0001"
    (progress,) = tmp_path.glob("*.json")
    assert json.loads(progress.read_text()) == {"step": 2, "state": state}
    fake = training_loop(*HALF_RIGHT, steps=4)
    assert fake.clients == ["Qwen/Qwen3-8B", state]
    assert [source["model_path"] for source in fake.samplers] == [
        *(f"tinker://run-1/sampler_weights/{step:04}" for step in (0, 1, 2)),
        *(f"tinker://run-2/sampler_weights/{step:04}" for step in (2, 3)),
    ]
    assert len(fake.trained) == 4
    assert len(list((tmp_path / "jobs").iterdir())) == 5
    assert f"2 of 4 steps are done, going on from {state}" in capsys.readouterr().out
    fake = training_loop(*HALF_RIGHT, steps=4)
    assert len(fake.trained) == 4
    assert "final checkpoint: tinker://run-3/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "rewards", "reason"),
    [
        (RuntimeError("no more credit"), {}, "RuntimeError: no more credit"),
        (
            RIGHT,
            {"a": 1.0, "b": 0.0},
            "no token ids or no single reward: rewards={'a': 1.0, 'b': 0.0}",
        ),
    ],
)
def test_a_training_step_without_a_usable_trial_ends_the_run_with_the_reason(
    training_loop, monkeypatch, tmp_path, capsys, reply, rewards, reason
):
    async def verify(self: Any) -> VerifierResult:
        return VerifierResult(rewards=rewards)

    monkeypatch.setattr(HostVerifier, "verify", verify)
    with pytest.raises(SystemExit, match=f"step 0: no trial to train on, .*: {re.escape(reason)}"):
        training_loop(reply)
    named = re.findall(r"step 0: left out greet__\w+: (.*)", capsys.readouterr().out)
    assert named == [reason] * 8
    assert not list(tmp_path.glob("*.json"))


def test_a_failed_trial_is_named_and_the_rest_of_its_group_trained_on(training_loop, capsys):
    fake = training_loop(RuntimeError("no more credit"), *HALF_RIGHT, steps=1)
    assert [len(data) for data in fake.trained] == [7]
    out = capsys.readouterr().out
    assert len(re.findall(r"left out greet__\w+: RuntimeError: no more credit", out)) == 1
    assert "7 trials" in out


def test_without_different_rewards_in_a_group_nothing_is_trained_and_the_run_says_so(
    training_loop, capsys
):
    fake = training_loop(*[Sampled("no", "length")] * 8, *HALF_RIGHT, steps=2)
    assert len(fake.trained) == 1
    assert len(fake.saved) == 5
    assert printed(capsys)[:3] == [
        "step 0: 8 trials, mean reward 0.000, {'max_tokens': 8}",
        "step 0: no update, the rewards within each group are equal",
        "step 1: 8 trials, mean reward 0.500, {'completed': 8}",
    ]
