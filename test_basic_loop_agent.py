# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
"""The specification of basic_loop_agent.py: from its options to training data, and in real jobs.
The last section tests examples/train.py.

Harbor's jobs, litellm, openai, HTTP, renderers, tokenizers and shells are real. The fakes below
stand for a container, Tinker's service, vLLM and a chat endpoint. Like the real server, a fake
leaves out what the request does not ask for. Tests that leave the replies to the server also run
against a real one:

    VLLM_BASE_URL=http://127.0.0.1:8000 VLLM_MODEL=name uv run pytest -k vllm
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_MODEL=name uv run pytest -k real_tinker -W ignore
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
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from uuid import uuid4

# litellm would download its price list, tokenizers would ask the model hub, and each job of Harbor
# would report itself to Harbor's makers.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HARBOR_TELEMETRY"] = "0"
REAL_VLLM = os.environ.get("VLLM_BASE_URL")
VLLM_MODEL = os.environ.get("VLLM_MODEL", "tiny")
REAL_TINKER = os.environ.get("TINKER_BASE_URL")
TINKER_MODEL = os.environ.get("TINKER_MODEL")

import httpx
import litellm
import pytest
import tinker as tinker_sdk
import yaml
from harbor.agents.base import BaseAgent
from harbor.environments.base import ExecResult
from harbor.job import Job
from harbor.llms.base import ContextLengthExceededError
from harbor.llms.lite_llm import LiteLLM
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig
from harbor.models.task.config import MCPServerConfig
from harbor.models.trial.result import ExceptionInfo, TrialResult
from harbor.models.verifier.result import VerifierResult
from tinker_cookbook.renderers import RendererError, get_renderer
from tinker_cookbook.rl import train as cookbook
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import basic_loop_agent as module
from basic_loop_agent import BasicLoopAgent, BasicLoopOptions, StopReason, Turn, fenced_blocks
from examples import train
from examples.fakes import FakeTraining, HostVerifier

ROOT = Path(__file__).parent
COOKBOOK = Path(importlib.util.find_spec("tinker_cookbook").origin).parent


# ------------------------------------------------------------------------------------ the fakes


@dataclass
class Reply:
    """What a model samples: a text, or ids. It ends in the stop token, unless it is cut off."""

    text: str = "hello"
    ids: list[int] | None = None
    cut_off: bool = False
    gives_logprobs: bool = True
    # By default -1.000, -1.001, ... in the first turn, -2.000, ... in the second, and so on.
    logprobs: list[Any] | None = None
    # Fields of the server's answer, of its choice and of the choice's message, in place of the
    # usual ones. (Tinker's answer has no choice.)
    answer: dict[str, Any] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    message: dict[str, Any] = field(default_factory=dict)


class Refusal(tinker_sdk.APIStatusError):
    """An error in place of an answer. Tinker's SDK raises this one, and the HTTP server sends its
    status and text."""

    def __init__(self, status: int, message: str = "refused") -> None:
        response = httpx.Response(status, request=httpx.Request("POST", "http://tinker"))
        super().__init__(message, response=response, body=None)


FULL = Refusal(400, "This model's maximum context length is 8192 tokens.")
# A command that succeeds and prints nothing.
SILENT = ExecResult(return_code=0)


async def forever() -> None:
    """A reply that does not come, or a command that does not end."""
    await asyncio.Event().wait()


async def outcome(result: Any) -> Any:
    """A scripted result: an async function is awaited, an error is raised."""
    if callable(result):
        result = await result()
    if isinstance(result, BaseException):
        raise result
    return result


class FakeEnvironment:
    """Runs nothing. Each `exec` has the next of these results, and then SILENT."""

    def __init__(self, *results: Any) -> None:
        self.results, self.commands, self.timeouts = iter(results), [], []

    async def exec(self, command: str, timeout_sec: int) -> Any:
        self.commands.append(command)
        self.timeouts.append(timeout_sec)
        return await outcome(next(self.results, SILENT))

    @property
    def scripts(self) -> list[list[str]]:
        """The blocks of each script. The module sends them in this variable."""
        found = re.findall(r"BASIC_LOOP_BLOCKS=(\S+)", " ".join(self.commands))
        return [base64.b64decode(blocks).decode().split("\0")[:-1] for blocks in found]

    @property
    def first_script_was_killed(self) -> bool:
        """Whether the second command kills all that has the mark of the first one."""
        marks = [re.search(r"BASIC_LOOP_MARK=(\w+)", command)[1] for command in self.commands]
        return marks[0] == marks[1] and "kill -9" in self.commands[1]


class ShellEnvironment:
    """Runs commands in real shells. Each has a session of its own, so that no signal of a script
    reaches pytest or the user's terminal. It sets no time limit: the module's own ends a script."""

    def __init__(self, **variables: str) -> None:
        self.variables = os.environ | variables

    async def exec(self, command: str, timeout_sec: int) -> Any:
        settings = {"env": self.variables, "start_new_session": True, "shell": True}
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        settings["input"] = b"not for the script\n"
        result = await asyncio.to_thread(subprocess.run, command, **settings)
        # All output has to be ASCII: Modal's environment decodes as strictly.
        return ExecResult(stdout=result.stdout.decode("ascii"), return_code=result.returncode)


class Sampled(NamedTuple):
    """One turn, as a fake has sampled it, or as the context has it."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[Any] | None


class Model:
    """What the fakes of model servers share: an agent's options, replies, and what was sampled."""

    def __init__(self, tokenizer_dir: str, **options: Any) -> None:
        self.tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
        self.options, self.replies = options, itertools.repeat("hello")
        self.sampled: list[Sampled] = []

    def agent(self, agent_class: type = BasicLoopAgent, **options: Any) -> BasicLoopAgent:
        return agent_class(**self.options | options)

    def will_reply(self, *replies: Any) -> None:
        """Choose the replies: a text, a Reply, an error (such as a Refusal), or an async function.
        The model says "hello" if this is not called."""
        self.replies = iter(replies)

    def run(self, replies: Any = (), environment: Any = None, **options: Any) -> "AgentRun":
        """Run an agent with these options on one instruction."""
        if replies:
            self.will_reply(*replies)
        return AgentRun(self.agent(**options), environment).run()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ids_by_character(self, text: str) -> list[int]:
        """An id for each special token or character. If a prompt rendered this text again, some
        characters would be merged into other ids, and a test would notice."""
        pieces = re.findall(r"(?s)<[^<>\s]+>|.", text)
        return [token for piece in pieces for token in self.encode(piece)]

    def prompt_text(self, number: int) -> str:
        return self.tokenizer.decode(self.sampled[number].prompt, skip_special_tokens=False)

    async def sample(self, prompt: list[int], stop: list[int], max_tokens: int) -> tuple[Any, str]:
        """Sample the next reply. Returns it, and its finish reason."""
        reply = await outcome(next(self.replies, RuntimeError("no reply is left")))
        reply = Reply(reply) if isinstance(reply, str) else reply
        ids = reply.ids
        if ids is None:
            ids = self.ids_by_character(reply.text) + ([] if reply.cut_off else stop)
        default = [-(len(self.sampled) + 1) - n / 1000 for n in range(len(ids))]
        logprobs = (reply.logprobs or default[:max_tokens]) if reply.gives_logprobs else None
        self.sampled.append(Sampled(prompt, ids[:max_tokens], logprobs))
        return reply, "length" if reply.cut_off or len(ids) > max_tokens else "stop"


# Before SDK 0.38 `create_sampling_client` returns the client (now: its future), and `sample`
# returns a future (now: a coroutine).
IS_OLD_SDK = importlib.util.find_spec("tinker.auth") is None
HAS_SEQUENCE_IDS = "sequence_id" in tinker_sdk.types.SampledSequence.__annotations__


class FakeTinker(Model):
    """Stands in for the class `tinker.ServiceClient`."""

    def __init__(self, tokenizer_dir: str, **options: Any) -> None:
        super().__init__(tokenizer_dir, **options)
        # The sessions, the arguments of each sampling client, and the parameters of each reply.
        self.sessions, self.opened, self.params = [], [], []
        self.connecting_sec = 0

    def __call__(self, **arguments: Any) -> "Session":
        time.sleep(self.connecting_sec)
        self.sessions.append(Session(self, arguments))
        return self.sessions[-1]


class Session:
    """A session with Tinker, and its sampling clients. Once `status` is set, each answer is an
    error with this status."""

    def __init__(self, fake: FakeTinker, arguments: dict[str, Any]) -> None:
        self.fake, self.arguments, self.status = fake, arguments, None

    def create_sampling_client(
        self, model_path=None, base_model=None, record_stability_info=False
    ) -> Any:
        """Like the SDK's, it takes no other arguments."""
        self.fake.opened.append((model_path, base_model, record_stability_info))
        created = Future()
        if self.status:
            created.set_exception(Refusal(self.status))
        else:
            created.set_result(self)
        return created.result() if IS_OLD_SDK else created

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert num_samples == 1
        answer = self.answer(prompt.to_ints(), sampling_params)
        if IS_OLD_SDK:
            return asyncio.run_coroutine_threadsafe(answer, asyncio.get_running_loop())
        return answer

    async def answer(self, prompt: list[int], params: Any) -> Any:
        fake = self.fake
        fake.params.append(params)
        # A run can be cancelled here.
        await asyncio.sleep(0)
        if self.status:
            raise Refusal(self.status, "Session has been terminated")
        # A text, or an id.
        stop = params.stop[0]
        stop = fake.ids_by_character(stop) if isinstance(stop, str) else [stop]
        reply, finish_reason = await fake.sample(prompt, stop, params.max_tokens)
        _, ids, logprobs = fake.sampled[-1]
        sequence = SimpleNamespace(tokens=ids, logprobs=logprobs, stop_reason=finish_reason)
        if HAS_SEQUENCE_IDS:
            sequence.sequence_id = f"sequence-{len(fake.sampled)}"
        answer = {"sequences": [sequence], "prompt_cache_hit_tokens": None} | reply.answer
        return SimpleNamespace(**answer)


class HttpServer(Model, ThreadingHTTPServer):
    """vLLM's paths and a chat endpoint. With `real_url` it records requests and passes them on, and
    a test that needs more of the fake is skipped."""

    def __init__(self, tokenizer_dir: str, real_url: str | None, **options: Any) -> None:
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), HttpHandler)
        self.url, self.real_url = f"http://127.0.0.1:{self.server_port}", real_url
        Model.__init__(self, tokenizer_dir, api_base=self.url, **options)
        # Of each request: path, body and headers.
        self.requests = []
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def will_reply(self, *replies: Any) -> None:
        self.skip_if_real()
        super().will_reply(*replies)

    def prompt_text(self, number: int) -> str:
        self.skip_if_real()
        return super().prompt_text(number)

    def skip_if_real(self) -> None:
        if self.real_url:
            pytest.skip(f"needs the fake: {os.environ['PYTEST_CURRENT_TEST']}")

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for requested, body, _ in self.requests if requested == path]

    def headers(self, name: str) -> list[str]:
        return [headers[name] for _, _, headers in self.requests]

    def real_answer(self, path: str, body: dict[str, Any], authorization: str) -> dict[str, Any]:
        headers = {"Authorization": authorization}
        answer = httpx.post(self.real_url + path, json=body, headers=headers, timeout=60)
        if answer.status_code != 200:
            raise Refusal(answer.status_code, answer.text)
        for choice in answer.json().get("choices", []):
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            self.sampled.append(Sampled(choice["prompt_token_ids"], ids, logprobs))
        return answer.json()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        # The chat endpoint has every model.
        if "chat" not in path and body["model"] != self.options["model_name"]:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        prompt = self.prompt_ids(body)
        if path == "/tokenize":
            strings = [self.tokenizer.id_to_token(token) for token in prompt]
            answer = {"tokens": prompt, "max_model_len": 8192}
            return answer | {"token_strs": strings if body.get("return_token_strs") else None}
        return self.completion(prompt, body)

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        """The ids of a request's prompt. The argument `opens_with` of the chat template is a text
        that it puts after the assistant's header."""
        if isinstance(body.get("prompt"), list):
            return body["prompt"]
        if "prompt" in body:
            return self.encode(body["prompt"])
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"]]
        opening = body.get("chat_template_kwargs", {}).get("opens_with", "")
        return self.encode("".join(turns) + f"<|im_start|>assistant\n{opening}")

    def completion(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. What it does not ask for is null."""
        stop, max_tokens = self.encode("<|im_end|>"), body.get("max_tokens", 16)
        reply, finish_reason = asyncio.run(self.sample(prompt, stop, max_tokens))
        _, ids, logprobs = self.sampled[-1]
        shown = ids[:-1] if finish_reason == "stop" else ids
        skips_special = body.get("skip_special_tokens", True)
        text = self.tokenizer.decode(shown, skip_special_tokens=skips_special)
        asks_ids, asks_logprobs = body.get("return_token_ids"), body.get("logprobs")
        choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        choice["token_ids"] = ids if asks_ids else None
        prompt_ids = {"prompt_token_ids": prompt if asks_ids else None}
        if "prompt" in body:
            choice |= prompt_ids | {"text": text, "routed_experts": None}
            if asks_logprobs is not None:
                choice["logprobs"] = {"token_logprobs": logprobs}
        else:
            choice["message"] = {"role": "assistant", "content": text} | reply.message
            if asks_logprobs:
                entry = {"token": "x", "bytes": [], "top_logprobs": []}
                choice["logprobs"] = {"content": [entry | {"logprob": x} for x in logprobs]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": 0}
        answer = {"id": "1", "created": 1, "model": body["model"], "usage": usage}
        return answer | prompt_ids | {"choices": [choice | reply.choice]} | reply.answer


class HttpHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        fake, status = self.server, 200
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append((self.path, body, self.headers))
        try:
            if fake.real_url:
                answer = fake.real_answer(self.path, body, self.headers["Authorization"])
            else:
                answer = fake.answer(self.path, body)
        except Exception as error:
            # A Refusal, or a mistake in this file. Without an answer the client would ask again.
            status, answer = getattr(error, "status_code", 400), {"error": {"message": repr(error)}}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        # The openai package waits this long before the next attempt.
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments: Any) -> None: ...


# ---------------------------------------------------------------------------- runs and fixtures

IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


class AgentRun:
    """An agent at work as in Harbor: `setup`, then `run`, then `resume` for each later step. The
    instruction is "do it" if none is given.

    Its properties come from the last step's context and files, but `recorded` joins all steps."""

    def __init__(self, agent: Any, environment: Any = None, timeout_sec: Any = None) -> None:
        self.agent, self.environment = agent, environment or FakeEnvironment()
        self.timeout_sec, self.contexts = timeout_sec, []

    def run(self, *instructions: str) -> Self:
        asyncio.run(self.go(*instructions))
        return self

    async def go(self, *instructions: str) -> None:
        await self.agent.setup(self.environment)
        for instruction in instructions or ["do it"]:
            begin = self.agent.resume if self.contexts else self.agent.run
            self.contexts.append(AgentContext())
            step = begin(instruction, self.environment, self.context)
            await asyncio.wait_for(step, self.timeout_sec)

    @property
    def recorded(self) -> list[Sampled]:
        """The turns of the rollout. Fails if the lists do not align."""
        turns = []
        for context in self.contexts:
            for detail in context.rollout_details or []:
                lists = [detail[name] for name in IDS]
                turns += [Sampled(*row) for row in zip(*lists, strict=True)]
        assert all(len(turn.completion) == len(turn.logprobs) for turn in turns)
        return turns

    @property
    def observations(self) -> list[str]:
        """What the model was told after its replies."""
        seen = [step.observation for step in self.steps if step.observation]
        return [result.content for observation in seen for result in observation.results]

    @property
    def trajectory(self) -> Any:
        text = (self.agent.logs_dir / "trajectory.json").read_text()
        return atif.Trajectory.model_validate_json(text)

    steps = property(lambda self: self.trajectory.steps)
    completion = property(lambda self: (self.agent.logs_dir / "completion.txt").read_text())
    scripts = property(lambda self: self.environment.scripts)
    context = property(lambda self: self.contexts[-1])
    metadata = property(lambda self: self.context.metadata)
    stop_reason = property(lambda self: self.metadata["stop_reason"])


def set_up(*agents: BasicLoopAgent) -> list[Any]:
    """Set agents up, one after the other, in one event loop. Returns their clients."""

    async def main() -> list[Any]:
        for agent in agents:
            await agent.setup(FakeEnvironment())
        return [agent.client for agent in agents]

    return asyncio.run(main())


def bash(*commands: str, language: str = "bash") -> str:
    return "\n".join(f"I will run this:\n\n```{language}\n{command}\n```\n" for command in commands)


def printing(text: str) -> FakeEnvironment:
    return FakeEnvironment(ExecResult(stdout=text, return_code=0))


def cases(columns: str, **table: Any) -> Any:
    """Parametrize a test with a table that has these columns. An entry's name is the case's id."""
    names = columns.split()
    rows = [entry if len(names) > 1 else (entry,) for entry in table.values()]
    return pytest.mark.parametrize(names, rows, ids=table)


@contextlib.contextmanager
def virtual_time() -> Iterator[asyncio.Runner]:
    """An event loop whose timers fire at once when there is nothing else to do. It is not for tests
    with HTTP: while a thread works, each timer that is pending would fire."""

    class Selector(selectors.DefaultSelector):
        skipped_seconds = 0.0

        def select(self, timeout: float | None = None) -> list:
            events = super().select(0 if timeout else timeout)
            if timeout and not events:
                self.skipped_seconds += timeout
            return events

    loop = asyncio.SelectorEventLoop(selector := Selector())
    loop.time = lambda: time.monotonic() + selector.skipped_seconds
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        yield runner
        # On exit the runner waits for the threads of `to_thread`, which take real time.
        loop.time = time.monotonic


# The special tokens of the models for which the cookbook has renderers: <|im_end|> and so on.
RENDERER_SOURCES = "".join(path.read_text() for path in sorted(COOKBOOK.glob("renderers/*.py")))
SPECIAL_TOKENS = sorted(set(re.findall(r"<\|[^|\s]+\|>", RENDERER_SOURCES)))
# DeepSeek's, which are in full-width bars.
DEEPSEEK_TOKENS = """
Assistant System User begin▁of▁sentence end▁of▁sentence tool▁calls▁begin tool▁calls▁end
tool▁call▁begin tool▁call▁end tool▁output▁begin tool▁output▁end tool▁sep
"""
# Tokens of these models that are added, but not special. (Some models add single characters.)
ADDED_TOKENS = """
<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <tool_result>
</tool_result> <arg_key> </arg_key> <arg_value> </arg_value> <image> <img> </img> [gMASK] §
"""
# Ordinary tokens that look like special ones, as in the vocabularies of Qwen and Llama.
ORDINARY = ["Class<?>", "a[:]", "x<()>", "x[...]"]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    """The folder of a byte-level tokenizer that has these tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    text = f"hello world user assistant bash\n\n``` {' '.join(ORDINARY)}"
    tokenizer.train_from_iterator([text] * 9, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_special_tokens([f"<\uff5c{name}\uff5c>" for name in DEEPSEEK_TOKENS.split()])
    tokenizer.add_tokens(ADDED_TOKENS.split())
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return str(folder)


@pytest.fixture
def tinker(tokenizer_dir, tmp_path, monkeypatch) -> FakeTinker:
    options = {"model_name": tokenizer_dir, "renderer_name": "qwen3_instruct"}
    fake = FakeTinker(tokenizer_dir, logs_dir=tmp_path, **options)
    monkeypatch.setattr("tinker.ServiceClient", fake)
    return fake


@pytest.fixture
def vllm(tokenizer_dir, tmp_path) -> Iterator[HttpServer]:
    options = {"model_name": VLLM_MODEL, "model_client": "vllm", "logs_dir": tmp_path}
    with contextlib.closing(HttpServer(tokenizer_dir, REAL_VLLM, **options)) as fake:
        yield fake


@pytest.fixture
def chat(tokenizer_dir, tmp_path, monkeypatch) -> Iterator[HttpServer]:
    # Harbor's client waits between its attempts.
    monkeypatch.setattr(LiteLLM.call.retry, "wait", lambda state: 0)
    options = {"model_name": "openai/tiny", "model_client": "litellm", "logs_dir": tmp_path}
    with contextlib.closing(HttpServer(tokenizer_dir, None, **options)) as fake:
        yield fake


@pytest.fixture(params=["tinker", "vllm", "chat"])
def model(request) -> Model:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["vllm", "chat"])
def server(request) -> HttpServer:
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch) -> Iterator[None]:
    """Keys for tests, no Tinker service of an earlier test, and at most a minute for a test."""
    for name in [name for name in os.environ if re.match("(OPENAI|VLLM|TINKER)_", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    module.tinker_service.cache_clear()
    module.use_service(None)

    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the test takes more than a minute"))
    signal.alarm(60)
    yield
    signal.alarm(0)


# -------------------------------------------------------------------------- options and errors

NO_KEY = "no API key for Tinker: set TINKER_API_KEY"
NO_URL = "vllm needs api_base or VLLM_BASE_URL, such as http://localhost:8000"
CHAT_OPTIONS = {"model_client": "litellm"}
since_harbor_023 = pytest.mark.skipif(
    not hasattr(BaseAgent, "parse_options"), reason="Harbor calls preflight since 0.23"
)


@pytest.fixture
def no_key(monkeypatch) -> None:
    """Tinker's key is neither in the environment nor stored by the SDK."""
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setattr(module, "tinker_has_key", lambda: False)


class TestOptions:
    def test_the_options_have_these_defaults(self):
        # Without those of Harbor's class.
        own = set(BasicLoopOptions.__annotations__)
        assert BasicLoopOptions().model_dump(include=own, exclude_none=True) == {
            "max_tokens": 512,
            "temperature": 1.0,
            "max_turns": 1,
            "model_client": "tinker",
            "llm_kwargs": {},
            "collect_rollout_details": True,
            "interleaved_thinking": False,
            "command_timeout_sec": 120,
            "max_output_bytes": 10_000,
        }

    def test_the_constructor_has_eight_options_with_their_defaults(self):
        parameters = inspect.signature(BasicLoopAgent).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert len(defaults) == 8
        assert defaults == BasicLoopOptions().model_dump(include=set(defaults))

    @cases(
        "given message",
        temperature=({"temperature": -0.1}, "temperature.*greater than or equal to 0"),
        temperature_infinite=({"temperature": math.inf}, "temperature.*finite number"),
        top_p=({"top_p": 1.1}, "top_p.*less than or equal to 1"),
        more_than_a_week=({"command_timeout_sec": 604_801}, "less than or equal to 604800"),
        model_path=({"model_path": ""}, "model_path.*tinker://"),
        unknown=({"max_turn": 3}, "max_turn"),
        model_path_elsewhere=(CHAT_OPTIONS | {"model_path": "tinker://1"}, "=tinker: drop them"),
        renderer_elsewhere=(CHAT_OPTIONS | {"renderer_name": "x"}, "=tinker: drop them"),
        model_twice=({"llm_kwargs": {"model_name": 1}}, "llm_kwargs holds model_name: use"),
        server_twice=({"llm_kwargs": {"api_base": 1}}, "llm_kwargs holds api_base: use the"),
        option_twice=({"llm_kwargs": {"max_tokens": 1}}, "llm_kwargs holds max_tokens: use"),
    )
    def test_a_bad_option_is_an_error_that_shows_no_key(self, given, message, tmp_path):
        llm_kwargs = {"api_key": "sk-secret"} | given.get("llm_kwargs", {})
        with pytest.raises(ValueError, match=f"(?s){message}") as error:
            BasicLoopAgent(logs_dir=tmp_path, model_name="m", **given | {"llm_kwargs": llm_kwargs})
        assert "sk-secret" not in str(error.value)

    def test_an_error_does_not_show_what_llm_kwargs_was(self):
        with pytest.raises(ValueError, match="llm_kwargs") as error:
            BasicLoopOptions(llm_kwargs="sk-secret")
        assert "sk-secret" not in str(error.value)

    NUMBERS = "max_turns max_tokens max_seconds context_limit max_output_bytes command_timeout_sec"

    @pytest.mark.parametrize("name", [*NUMBERS.split(), "top_p"])
    def test_a_number_that_has_to_be_positive_is_not_0(self, name):
        with pytest.raises(ValueError, match=f"(?s){name}.*greater than 0"):
            BasicLoopOptions(**{name: 0})

    def test_setup_names_missing_tinker_packages(self, tinker, monkeypatch):
        monkeypatch.setitem(sys.modules, "tinker_cookbook", None)
        with pytest.raises(ValueError, match=r"missing: `pip install 'harbor\[tinker\]'`"):
            set_up(tinker.agent())

    @since_harbor_023
    @pytest.mark.parametrize("name", ["atif", "resume", "skills", "mcp_servers"])
    def test_a_capability_is_declared(self, name):
        assert getattr(BasicLoopAgent.capabilities, name) is True

    @cases(
        "client given message",
        no_model=("tinker", {"model_name": None}, "no model: name one with -m"),
        an_unknown_renderer=("tinker", {"renderer_name": "qwen9"}, "qwen9"),
        a_misspelt_argument=("tinker", {"llm_kwargs": {"tempreature": 1}}, "tempreature"),
        no_url=("vllm", {"api_base": None}, NO_URL),
        no_such_model=("vllm", {"model_name": "other"}, "no such model.*`other` does not exist"),
        a_model_without_provider=("chat", {"model_name": "mock"}, "LLM Provider NOT provided"),
    )
    def test_setup_refuses_what_cannot_work(self, client, given, message, request):
        errors = (ValueError, TypeError, RuntimeError, litellm.BadRequestError)
        with pytest.raises(errors, match=message):
            set_up(request.getfixturevalue(client).agent(**given))

    @cases("env", none={}, masked_by_harbor={"TINKER_API_KEY": "tml-r****456"})
    def test_setup_refuses_tinker_without_a_key(self, env, tinker, no_key):
        with pytest.raises(ValueError, match=NO_KEY):
            set_up(tinker.agent(extra_env=env))

    def test_tinkers_sdk_may_have_stored_a_key(self, tinker, monkeypatch):
        pytest.importorskip("tinker.auth", reason="since SDK 0.38")
        monkeypatch.delenv("TINKER_API_KEY")
        monkeypatch.setattr("tinker.auth.tinker_has_credentials", lambda: True)
        set_up(tinker.agent())
        assert tinker.sessions[0].arguments["api_key"] is None

    X, Y = "http://x/1", "http://y/1"

    # The names of all variables begin with OPENAI_. Expected are URL and key.
    @cases(
        "given agent_env env expected",
        process=({}, {}, {"API_BASE": Y, "BASE_URL": X, "API_KEY": "a"}, (X, "a")),
        agent=({}, {"API_BASE": X, "API_KEY": "a"}, {"API_BASE": Y, "API_KEY": "b"}, (X, "a")),
        option=({"api_base": X}, {"BASE_URL": Y, "API_KEY": "a"}, {}, (X, "a")),
        llm_kwargs=({"llm_kwargs": {"api_key": "a"}}, {"API_KEY": "b"}, {}, (None, "a")),
        masked_by_harbor=({}, {"API_KEY": "sk-r****456"}, {"API_KEY": "a"}, (None, "a")),
        key_from_a_file=({}, {"API_KEY": " sk-\nown\n"}, {}, (None, "sk-own")),
    )
    def test_a_key_is_from_the_first_place_that_has_one(
        self, given, agent_env, env, expected, monkeypatch
    ):
        for name, value in env.items():
            monkeypatch.setenv(f"OPENAI_{name}", value)
        options = BasicLoopOptions(**CHAT_OPTIONS, **given)
        agent_env = {f"OPENAI_{name}": value for name, value in agent_env.items()}
        assert module.url_and_key(options, "openai", agent_env) == expected

    @cases(
        "provider url expected",
        openai=("openai", "http://x:1", "http://x:1/v1"),
        with_a_slash=("hosted_vllm", "http://x:1/", "http://x:1/v1"),
        with_a_path=("openai", "http://x:1/y", "http://x:1/y"),
        another_provider=("anthropic", "http://x:1", "http://x:1"),
    )
    def test_v1_is_added_after_a_port(self, provider, url, expected):
        options = BasicLoopOptions(**CHAT_OPTIONS, api_base=url)
        assert module.url_and_key(options, provider, {})[0] == expected

    def test_a_server_of_ones_own_needs_no_key(self):
        options = BasicLoopOptions(**CHAT_OPTIONS, api_base="http://x:1")
        assert module.url_and_key(options, "hosted_vllm", {})[1] == "none"

    def test_tinker_is_reached_as_the_agent_says(self, tinker):
        env = {"TINKER_BASE_URL": "http://own", "TINKER_API_KEY": "tml-own"}
        set_up(tinker.agent(extra_env=env))
        assert tinker.sessions[0].arguments == {"base_url": "http://own", "api_key": "tml-own"}

    def test_vllm_is_reached_as_the_agent_says(self, vllm):
        env = {"VLLM_BASE_URL": vllm.url, "VLLM_API_KEY": "own"}
        set_up(vllm.agent(api_base=None, extra_env=env))
        assert vllm.headers("Authorization") == ["Bearer own"]

    @cases(
        "given",
        prefix={"model_name": "openai/tiny"},
        name_that_litellm_knows={"model_name": "gpt-4o"},
        argument={"model_name": "tiny", "llm_kwargs": {"custom_llm_provider": "openai"}},
    )
    def test_the_models_provider_is_reached_as_the_agent_says(self, given, chat):
        env = {"OPENAI_BASE_URL": chat.url, "OPENAI_API_KEY": "own"}
        chat.run(api_base=None, extra_env=env, **given)
        assert chat.headers("Authorization") == ["Bearer own"]

    def test_a_key_is_seen_nowhere(self, chat, caplog):
        caplog.set_level("DEBUG")
        done = chat.run(llm_kwargs={"api_key": "sk-2nd"}, extra_env={"OPENAI_API_KEY": "sk-own"})
        seen = [path.read_text() for path in done.agent.logs_dir.glob("*.*")]
        seen += [*caplog.messages, done.context.model_dump_json(), repr(done.agent.options)]
        # Harbor would pass its own copy on to each command.
        seen += [str(getattr(done.agent, "extra_env", ""))]
        assert [text for text in seen if "sk-2nd" in text or "sk-own" in text] == []

    @since_harbor_023
    @cases(
        "kwargs env message",
        a_bad_option=({"max_turns": 0}, {}, "max_turns"),
        no_key_for_tinker=({}, {"TINKER_API_KEY": "****"}, NO_KEY),
        no_url_of_vllm=({"model_client": "vllm"}, None, NO_URL),
    )
    def test_preflight_refuses_what_setup_would_refuse(self, kwargs, env, message, no_key):
        with pytest.raises(ValueError, match=message):
            BasicLoopAgent.preflight(kwargs, env)

    @since_harbor_023
    def test_preflight_looks_at_the_agents_variables(self, no_key):
        BasicLoopAgent.preflight({}, {"TINKER_API_KEY": "tml-own"})


# ------------------------------------------------------------------------------------ the loop


class OwnLoop(BasicLoopAgent):
    """A user's loop. It makes `max_turns` calls, whatever the replies, with a step after each."""

    def after_turn(self) -> None: ...

    async def converse(self, environment: Any) -> str:
        for _ in range(self.options.max_turns):
            await self.sample()
            self.after_turn()
            self.tell("go on")
        return "own reason"


class TestLoop:
    CUT_OFF = Reply(bash("rm x"), cut_off=True)

    @cases(
        "replies max_turns scripts stop_reason answer",
        an_answer=(["hi"], 9, [], "completed", "hi"),
        two_scripts=([bash("a"), bash("b"), "hi"], 9, [["a\n"], ["b\n"]], "completed", "hi"),
        two_blocks=([bash("a", "b"), "hi"], 9, [["a\n", "b\n"]], "completed", "hi"),
        a_single_turn=([bash("rm x")], 1, [], "completed", bash("rm x")),
        the_last_turn=([bash("a"), bash("b")], 2, [["a\n"], ["b\n"]], "max_turns", bash("b")),
        cut_off=([bash("a"), CUT_OFF], 9, [["a\n"]], "max_tokens", bash("rm x")),
        a_full_context=([bash("a"), FULL], 9, [["a\n"]], "context_overflow", bash("a")),
    )
    def test_the_loop_runs_scripts_until_it_ends(
        self, replies, max_turns, scripts, stop_reason, answer, model
    ):
        done = model.run(replies, max_turns=max_turns, collect_rollout_details=True)
        assert (done.scripts, done.stop_reason) == (scripts, stop_reason)
        assert (done.completion, done.recorded) == (answer, model.sampled)

    def test_the_model_is_told_what_its_script_printed(self, model):
        failed = ExecResult(stdout="x\n", stderr="no x", return_code=1)
        done = model.run([bash("ls"), "done"], FakeEnvironment(failed), max_turns=2)
        assert done.observations == ["Exit code: 1\nOutput:\nx\nno x"]
        assert "<|im_start|>user\nExit code: 1\nOutput:\nx\nno x<|im_end|>" in model.prompt_text(1)

    def test_the_model_sees_max_output_bytes_of_an_output(self, tinker):
        done = tinker.run([bash("ls"), "done"], printing("abcdef"), max_turns=2, max_output_bytes=4)
        cut = "ab\n[... 2 bytes left out ...]\nef"
        assert done.observations == [f"Exit code: 0\nOutput:\n{cut}"]

    def test_a_script_has_command_timeout_sec(self, tinker):
        done = tinker.run([bash("ls"), "done"], max_turns=2, command_timeout_sec=7)
        # The program's arguments are the script's limit, and that of its output.
        assert done.environment.commands[0].endswith(" bash 7 4000000")

    @cases(
        "given messages",
        a_single_turn=({}, []),
        an_empty_one=({"max_turns": 2, "system_prompt": ""}, []),
        its_own=({"max_turns": 2, "system_prompt": "Be {brief}."}, ["Be {brief}."]),
    )
    def test_the_system_message_is_as_given(self, given, messages, model):
        done = model.run(**given)
        assert [step.message for step in done.steps if step.source == "system"] == messages
        assert re.findall(r"<\|im_start\|>system\n(.*)<", model.prompt_text(0)) == messages

    def test_the_default_system_message_explains_bash_blocks(self, tinker):
        message = tinker.run(max_turns=2, command_timeout_sec=77).steps[0].message
        assert re.search("(?s)fenced blocks that open with ```bash.*has 77 seconds", message)

    def test_an_instruction_may_use_special_tokens(self, model):
        AgentRun(model.agent()).run("Explain <|im_end|>.")
        assert "<|im_start|>user\nExplain <|im_end|>.<|im_end|>" in model.prompt_text(0)

    def test_special_tokens_in_output_become_plain_text(self, tinker):
        done = tinker.run([bash("ls"), "done"], printing("a<|im_end|>b"), max_turns=2)
        assert done.observations == ["Exit code: 0\nOutput:\na<\u200b|im_end|>b"]

    def test_a_chat_endpoint_gets_output_as_it_is(self, chat):
        done = chat.run([bash("ls"), "done"], printing("a<|im_end|>b"), max_turns=2)
        assert done.observations == ["Exit code: 0\nOutput:\na<|im_end|>b"]

    def test_a_lone_surrogate_becomes_a_question_mark(self, tinker):
        tinker.will_reply(bash("ls"), "done")
        agent = tinker.agent(max_turns=2, system_prompt="\ud800")
        done = AgentRun(agent, printing("a\udc80")).run("greet\udc80")
        assert [step.message for step in done.steps[:2]] == ["?", "greet?"]
        assert done.observations == ["Exit code: 0\nOutput:\na?"]

    def test_tell_takes_a_lone_surrogate(self, tinker):
        agent = tinker.run().agent
        agent.tell("a\ud800")
        asyncio.run(agent.sample())
        assert agent.turns[-1].sent == "a?"

    def test_sample_without_a_text_to_send_is_an_error(self, tinker):
        agent = tinker.run().agent
        with pytest.raises(RuntimeError, match="nothing to send: `tell` the model something first"):
            asyncio.run(agent.sample())

    def test_resume_before_run_is_an_error(self, tinker):
        resumed = tinker.agent().resume("go on", FakeEnvironment(), AgentContext())
        with pytest.raises(RuntimeError, match="call `run` first"):
            asyncio.run(resumed)

    def test_a_resumed_step_begins_with_the_last_scripts_output(self, tinker):
        tinker.will_reply(bash("a"), bash("b"), "done")
        done = AgentRun(tinker.agent(max_turns=2)).run("one", "two")
        assert done.steps[1].message == "Exit code: 0\nOutput:\n(none)\n\ntwo"
        assert done.metadata["n_episodes"] == 1

    def test_a_second_run_starts_a_new_conversation(self, tinker):
        used = tinker.run([bash("a"), bash("b"), "done", "done"], max_turns=2).agent
        AgentRun(used).run()
        AgentRun(tinker.agent(max_turns=2)).run()
        *_, second, fresh = tinker.sampled
        assert second.prompt == fresh.prompt

    def test_the_model_is_told_of_the_tasks_skills(self, tinker, tmp_path):
        file = tmp_path / "my skills/pdf/SKILL.md"
        file.parent.mkdir(parents=True)
        head = "---\nname: pdf\ndescription: Reads <|im_end|>\n---\n" + "more\n" * 6
        file.write_text(f"{head}BODY on line 11")
        agent = tinker.agent(skills_dir=str(tmp_path / "my skills"), max_output_bytes=9)
        message = AgentRun(agent, ShellEnvironment()).run().steps[0].message
        # The first ten lines. The last newline is left out.
        listed = f"==> {file} <==\n{head}".replace("<|", "<\u200b|").rstrip()
        intro = "Skills. Read a skill's file before you use it.\n\nExit code: 0\nOutput:"
        assert message == f"{intro}\n{listed}\n\ndo it"

    def test_the_model_is_told_once_of_the_tasks_servers(self, tinker):
        web = MCPServerConfig(name="web", transport="sse", url="http://mcp:8000/sse")
        AgentRun(tinker.agent(mcp_servers=[web])).run("one", "two")
        told = f"MCP server: {web.model_dump_json(exclude_none=True)}\n\none"
        assert told in tinker.prompt_text(1)
        assert tinker.prompt_text(1).count("MCP server") == 1

    def test_a_subclass_may_run_python(self, tinker):
        class PythonAgent(BasicLoopAgent):
            protocol = "Write ```python blocks."

            def bash_blocks(self, reply: str) -> list[str]:
                return [text for name, text in fenced_blocks(reply) if name == "python"]

        replies = [bash("x()", language="python"), bash("ls")]
        done = tinker.run(replies, agent_class=PythonAgent, max_turns=9)
        assert (done.steps[0].message, done.scripts) == ("Write ```python blocks.", [["x()\n"]])

    def test_after_render_anew_the_prompt_is_rendered(self, tinker, monkeypatch):
        monkeypatch.setattr(OwnLoop, "after_turn", OwnLoop.render_anew)
        done = tinker.run(agent_class=OwnLoop, max_turns=2)
        # The fake samples other ids than a rendering of the same text has.
        assert done.metadata["n_prefix_breaks"] == 1

    def test_an_edited_conversation_is_rendered_anew_once(self, tinker, monkeypatch):
        def edit(agent: OwnLoop) -> None:
            agent.messages[0]["content"] = "(left out)"

        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        done = tinker.run(agent_class=OwnLoop, max_turns=3)
        assert tinker.prompt_text(1).startswith("<|im_start|>system\n(left out)<|im_end|>")
        assert done.metadata["n_prefix_breaks"] == 1

    @cases(
        "kept seen",
        JSON=({"judge": {"score": 0.5}}, {"judge": {"score": 0.5}}),
        object=({"by": Path("me")}, {"by": "me"}),
        lone_surrogate=({"cut": "\ud83d"}, {"cut": "?"}),
        key_that_is_no_text=({("no", "text"): 1, "last": 1}, {"last": 1}),
        own_stop_reason=({"stop_reason": "x", "n_episodes": 9}, {}),
    )
    def test_what_a_loop_keeps_is_in_the_metadata(self, kept, seen, tinker, monkeypatch):
        monkeypatch.setattr(OwnLoop, "after_turn", lambda agent: agent.metadata.update(kept))
        counts = {"n_episodes": 1, "n_turns_without_ids": 0, "n_prefix_breaks": 0}
        expected = {"stop_reason": "own reason", **counts, **seen}
        assert tinker.run(agent_class=OwnLoop).metadata == expected


# ---------------------------------------------------------------------------- limits and endings


class ToyClient(module.TokenClient):
    """A client whose tokens are characters, and whose template is `u:do it;a:`. The stop token is
    the semicolon."""

    special_tokens = ()

    def __init__(self, context_limit: float = 999) -> None:
        self.context_limit, self.max_tokens = context_limit, 50
        self.rendered, self.generated = [], []

    async def render(self, messages: list[dict]) -> tuple[list[int], str]:
        text = "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + "a:"
        self.rendered.append(text)
        return [ord(character) for character in text], text

    async def generate(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        self.generated.append(("".join(map(chr, prompt_ids)), max_tokens))
        return Turn(content="hello")

    def ask(self, prompt: str, previous: str = "", history: Any = ()) -> None:
        """Ask for a reply to a prompt. `history` holds (role, text)."""
        messages = [{"role": role, "content": text} for role, text in history]
        asyncio.run(self.call(prompt, messages, [ord(c) for c in previous]))


def tinker_error(message: str, category: str) -> Exception:
    category = tinker_sdk.types.RequestErrorCategory(category)
    return tinker_sdk.RequestFailedError(message, request_id="1", category=category)


async def fails_when_cancelled() -> None:
    """A server that answers a cancellation with an error of its own."""
    try:
        await forever()
    finally:
        raise ConnectionError("the connection was closed")


# vLLM writes -9999.0.
NO_LOGPROBS = [math.nan, math.inf, -math.inf, None, -9999.0]


def random_reply(rng: random.Random, stop: list[int]) -> Any:
    text = rng.choice(["", "done", *[bash("ls")] * 3, "<think>a</think>" + bash("ls")])
    # 50 and 51 are any two ids.
    odd_replies = [
        Reply(text, cut_off=True),
        Reply(text, gives_logprobs=False),
        Reply(text, logprobs=[-1.0]),
        Reply(ids=[]),
        Reply(ids=[], gives_logprobs=False),
        Reply(ids=[50, 51, *stop], logprobs=[-1.0, rng.choice(NO_LOGPROBS), -1.0]),
        RuntimeError("API error"),
        FULL,
    ]
    return rng.choice([text] * 8 + odd_replies)


async def cancelled_after(run: AgentRun, n_steps: int) -> None:
    """Start a run, and cancel it after so many steps of the event loop."""
    task = asyncio.create_task(run.go())
    while n_steps and not task.done():
        # `setup` comes before the first context. Its steps do not count.
        if run.contexts:
            n_steps -= 1
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


# What a run waits for: the last reply, or the last result of the environment.
whatever_it_waits_for = cases(
    "reply result",
    model=(forever, SILENT),
    script=(bash("ls"), forever),
    model_that_fails_when_cancelled=(fails_when_cancelled, SILENT),
    script_that_fails_when_cancelled=(bash("ls"), fails_when_cancelled),
)


class TestEndings:
    TIMED_OUT = "^a call timed out or was cancelled"

    @cases(
        "reply result error_type message",
        client=(RuntimeError("gone"), SILENT, RuntimeError, "^gone$"),
        server=(Refusal(400, "no such thing"), SILENT, tinker_sdk.APIStatusError, "no such thing"),
        clients_timeout=(TimeoutError("it"), SILENT, RuntimeError, TIMED_OUT),
        sdks_cancellation=(asyncio.CancelledError("it"), SILENT, RuntimeError, TIMED_OUT),
        environment=(bash("b"), RuntimeError("it is gone"), RuntimeError, "^it is gone$"),
    )
    def test_an_error_ends_the_run(self, reply, result, error_type, message, tinker):
        tinker.will_reply(bash("a"), reply)
        failed = AgentRun(tinker.agent(max_turns=3), FakeEnvironment(SILENT, result))
        with pytest.raises(error_type, match=message):
            failed.run()
        assert (failed.stop_reason, failed.recorded) == ("error", tinker.sampled)

    @whatever_it_waits_for
    def test_harbors_timeout_ends_a_run_as_cancelled(self, reply, result, tinker):
        tinker.will_reply(bash("ls"), reply)
        environment = FakeEnvironment(SILENT, result)
        ended = AgentRun(tinker.agent(max_turns=2), environment, timeout_sec=50)
        with virtual_time() as runner, pytest.raises(TimeoutError):
            runner.run(ended.go())
        assert (ended.stop_reason, ended.recorded) == ("cancelled", tinker.sampled)

    @whatever_it_waits_for
    def test_max_seconds_end_a_run_for_scoring(self, reply, result, tinker):
        tinker.will_reply(bash("ls"), reply)
        agent = tinker.agent(max_turns=2, max_seconds=50)
        ended = AgentRun(agent, FakeEnvironment(SILENT, result), timeout_sec=9000)
        with virtual_time() as runner:
            runner.run(ended.go())
        assert (ended.stop_reason, ended.recorded) == ("rollout_timeout", tinker.sampled)

    def test_harbors_cancellation_wins_over_max_seconds(self, tinker):
        """Both come at once. A trial that Harbor has ended must not look as if it were scored."""

        async def hangs() -> None:
            try:
                await forever()
            finally:
                # `max_seconds` have just cancelled the wait. This second cancellation is Harbor's.
                asyncio.current_task().cancel()
                await asyncio.sleep(0)

        tinker.will_reply(bash("ls"))
        agent = tinker.agent(max_turns=2, max_seconds=50)
        ended = AgentRun(agent, FakeEnvironment(hangs))
        with virtual_time() as runner, pytest.raises(asyncio.CancelledError):
            runner.run(ended.go())
        assert ended.stop_reason == "cancelled"

    @cases("context_limit max_tokens", plenty=(100, 50), some=(30, 20), one_token=(11, 1))
    def test_a_reply_gets_what_the_context_has_left(self, context_limit, max_tokens):
        client = ToyClient(context_limit)
        client.ask("do it")
        assert client.generated == [("u:do it;a:", max_tokens)]

    def test_a_prompt_that_fills_the_context_is_not_sent(self):
        client = ToyClient(context_limit=10)
        with pytest.raises(ContextLengthExceededError, match="fills the context: 10 tokens"):
            client.ask("do it")
        assert client.generated == []

    @cases(
        "error expected",
        vLLM=(FULL, True),
        openAI=(Refusal(400, "code: context_length_exceeded"), True),
        token_limit=(Refusal(413, "over the Token Limit"), True),
        too_long=(Refusal(422, "prompt is too long"), True),
        tinkers_user=(tinker_error("too long", "user"), True),
        tinkers_server=(tinker_error("too long", "server"), False),
        a_gateways_timeout=(Refusal(504, "the upstream took too long"), False),
        another_bad_request=(Refusal(400, "no such model"), False),
        no_status=(RuntimeError("too long"), False),
    )
    def test_only_an_error_in_the_request_is_a_full_context(self, error, expected):
        assert module.says_context_is_full(error) is expected

    @cases("choice", no_ids={"token_ids": None}, no_logprobs={"logprobs": None})
    def test_a_first_turn_without_ids_is_an_error(self, choice, server):
        server.will_reply(Reply("hi", choice=choice))
        failed = AgentRun(server.agent(collect_rollout_details=True))
        with pytest.raises(RuntimeError, match="collect_rollout_details=true, but no token ids"):
            failed.run()
        assert (failed.stop_reason, failed.completion) == ("error", "hi")

    def test_ids_that_are_not_wanted_are_not_recorded(self, vllm):
        done = vllm.run(collect_rollout_details=False)
        assert done.context.rollout_details is None
        assert set(done.metadata) == {"stop_reason", "n_episodes"}

    @pytest.mark.parametrize("seed", range(300))
    def test_whatever_ends_a_run_its_tokens_are_recorded_once(self, tinker, seed):
        rng = random.Random(seed)
        tinker.will_reply(*(random_reply(rng, tinker.encode("<|im_end|>")) for _ in range(12)))
        results = [ExecResult(stdout="x" * 30, return_code=0), RuntimeError("gone"), TimeoutError()]
        environment = FakeEnvironment(*rng.choices(results, weights=[8, 1, 1], k=12))
        renderer = rng.choice(["qwen3", "qwen3_instruct", "role_colon", "qwen3_5"])
        options = {"renderer_name": renderer, "context_limit": rng.choice([None, None, 600])}
        run = AgentRun(tinker.agent(max_turns=rng.randint(1, 8), **options), environment)
        # With an old SDK an answer may be sampled, but not yet received, at a cancellation.
        n_steps = 10_000 if IS_OLD_SDK else rng.choice([10_000, rng.randrange(1, 60)])
        asyncio.run(cancelled_after(run, n_steps))
        answered = [turn._replace(logprobs=turn.logprobs or []) for turn in tinker.sampled]
        # The fake's own logprobs are negative, and far above -99.
        aligned = [turn for turn in answered if len(turn.completion) == len(turn.logprobs)]
        whole = [turn for turn in aligned if all(x and -99 < x < 0 for x in turn.logprobs)]
        assert run.recorded == whole
        assert run.metadata["n_episodes"] == len(answered)
        assert run.metadata["n_turns_without_ids"] == len(answered) - len(run.recorded)


# ------------------------------------------------------------------------------------- thinking

# How each family of models writes: the opening, a thinking, and what closes it before the answer.
families = cases(
    "opening thinking closing",
    qwen=("<think>", "\nhm\n", "</think>\n\n"),
    mistral=("[THINK]", "hm", "[/THINK]"),
    seed=("<seed:think>", "hm", "</seed:think>"),
    cohere=("<|START_THINKING|>", "hm", "<|END_THINKING|>"),
    gemma=("<|channel>", "thought\nhm", "<channel|>"),
    gpt_oss=(
        "<|channel|>",
        "analysis<|message|>hm<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
    ),
    inkling=(
        "<|message_model|>",
        "<|content_thinking|>hm<|end_message|>",
        "<|message_model|><|content_text|>",
    ),
)


class TestThinking:
    @families
    def test_the_answer_follows_the_thinking(self, opening, thinking, closing):
        assert module.split_thinking(f"{opening}{thinking}{closing}hi") == (thinking, "hi")

    @families
    def test_a_reply_cut_off_before_its_answer_has_none(self, opening, thinking, closing):
        reply = opening + thinking + closing
        cut_replies = [reply[:length] for length in range(len(opening), len(reply) + 1)]
        assert {module.split_thinking(cut_reply)[1] for cut_reply in cut_replies} == {""}

    @cases(
        "reply thinking answer",
        plain=("hi", "", "hi"),
        a_closing_tag_alone=("</think>\n\nhi", "", "hi"),
        gpt_oss_without_thinking=("<|channel|>final<|message|>hi", "", "hi"),
        two_thoughts=("<think>a</think> <think>b</think>c", "ab", "c"),
        blanks_at_the_start=(" \n<think>a</think>c", "a", "c"),
        an_answer_is_not_stripped=("  c\n", "", "  c\n"),
        a_tag_inside_the_answer=("c</think>d", "", "c</think>d"),
        another_models_tag=("<think>a[/THINK]b</think>c", "a[/THINK]b", "c"),
        never_closed=("<seed:think>a[/THINK]b", "a[/THINK]b", ""),
    )
    def test_thinking_is_what_its_tags_enclose(self, reply, thinking, answer):
        assert module.split_thinking(reply) == (thinking, answer)

    # Thinking of a chat endpoint whose template has written <think> into the prompt.
    @cases(
        "thought",
        plain="hm",
        empty="",
        a_closed_block="so\n```bash\nrm x\n```\nno",
        a_block_left_open="so\n```bash\nrm x",
        a_block_at_a_lists_marker="- ```bash\nrm x\n```",
        a_block_in_mid_line="Try ```bash\nrm x\n```",
        a_block_left_open_in_mid_line="Try ```bash\nrm x",
        lone_backticks="a ` or ```",
        a_quoted_tag="I could drop `</think>` here.",
        a_tag_in_a_block="```bash\nsed 's#</think>##' f\n```\nno",
    )
    def test_a_lone_closing_tag_ends_the_thinking(self, thought):
        reply = f"{thought}\n</think>\n{bash('ls')}"
        assert module.split_untagged_thinking(reply) == (f"{thought}\n", bash("ls"))

    # Whole answers of such an endpoint.
    @cases(
        "answer",
        sed="```bash\nsed -i 's#</think>##' f\n```\n",
        here_document="```bash\ncat > f <<E\n</think>\nE\n```\n",
        a_fence_of_four="````bash\ncat > f <<E\n```py\n</think>\n```\nE\n````\n",
        quoted_in_a_line="Drop `</think>` from f:\n```bash\nls\n```\n",
        both_tags_in_a_line="It is <think>hm</think> in Qwen's format.",
    )
    def test_a_tag_that_an_answer_quotes_is_text(self, answer):
        assert module.split_untagged_thinking(answer) == ("", answer)

    # If the time grew with the square of the length, a test's minute would end it. (The alarm also
    # interrupts a regular expression.)
    @cases("reply", backticks="`" * 400_000, fences="```a\n" * 80_000, blanks=" " * 400_000)
    def test_a_degenerate_reply_is_split_in_time(self, reply):
        assert module.split_untagged_thinking(reply) == ("", reply)


# --------------------------------------------------------------------------------------- blocks


class TestBlocks:
    DOCSTRING = 'cat >f.py <<E\ndef f():\n    """\n    ```\n    x\n    ```\n    """\nE\n'
    TWO = [("bash", "a\n"), ("sh", "b\n")]

    @cases(
        "reply blocks",
        two=("```bash\na\n```\n```sh\nb\n```", TWO),
        without_a_language=("```\na\n```", [("", "a\n")]),
        a_language_with_more=("```Bash title=x\na\n```", [("bash", "a\n")]),
        empty=("```bash\n```", [("bash", "")]),
        in_a_list=("1. so:\n   ```bash\n   if a\n     b\n   ```", [("bash", "if a\n  b\n")]),
        at_a_lists_marker=("- ```bash\n  a\n  ```\n- ```sh\n  b\n  ```", TWO),
        indented_fences_inside=(f"```bash\n{DOCSTRING}```", [("bash", DOCSTRING)]),
        a_longer_fence=("````bash\na\n```\n````", [("bash", "a\n```\n")]),
        with_a_nul=("```bash\nprintf 'a\0b'\n```", [("bash", "printf 'ab'\n")]),
        inside_another=("````md\n```bash\nx\n```\n````", [("md", "```bash\nx\n```\n")]),
        inside_tildes=("~~~\n```bash\nrm x\n```\n~~~", []),
        tildes=("~~~bash\nrm x\n~~~", []),
        never_closed=("```bash\nrm x", []),
        never_closed_in_a_list=("- ```bash\n  rm x\n```\n", []),
        in_a_line=("run ```bash rm x``` now", []),
        indented_as_code=("    ```bash\n    rm x\n    ```", []),
    )
    def test_whole_fenced_blocks_are_found(self, reply, blocks):
        assert fenced_blocks(reply) == blocks

    @pytest.mark.parametrize("language", ["bash", "sh", "shell"])
    def test_blocks_of_the_shell_are_run(self, tinker, language):
        assert tinker.agent().bash_blocks(bash("ls", language=language)) == ["ls\n"]

    @pytest.mark.parametrize("language", ["", "python", "console", "zsh", "bashrc"])
    def test_other_blocks_are_not_run(self, tinker, language):
        assert tinker.agent().bash_blocks(bash("ls", language=language)) == []


# -------------------------------------------------------------------------------------- scripts

CUT = "[the output is cut: more than 4000000 bytes, or its reader was killed]"
LIMIT = "[ended: the time limit of 1 seconds was reached]"
# A command that no other process on the machine runs.
SLEEP = f"sleep {60 + uuid4().int % 10**9}"


def run_shell(environment: Any, *blocks: str, seconds: int = 9, shown_bytes: int = 10_000) -> str:
    """Run blocks as one script. Returns what the model is told."""
    return asyncio.run(module.run_script(list(blocks), environment, seconds, shown_bytes))


def told(code: int, output: str) -> str:
    """What the model is told. (Code 124 is the time limit, 137 a kill, 143 a SIGTERM.)"""
    return f"Exit code: {code}\nOutput:\n{output}"


def wait_until_sleep_ends() -> None:
    last = time.monotonic() + 9
    while subprocess.run(["pgrep", "-f", SLEEP], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < last, "a process of the script lives on"
        time.sleep(0.01)


@pytest.fixture
def shell() -> Iterator[ShellEnvironment]:
    """A shell. What its scripts have left is killed after the test."""
    yield ShellEnvironment(TAG=SLEEP, LC_ALL="C.UTF-8")
    left = f"kill -9 $(grep -ls 'TAG={SLEEP}' /proc/[0-9]*/environ | cut -d / -f 3)"
    subprocess.run(left, shell=True, stderr=subprocess.DEVNULL)


class TestScripts:
    @cases(
        "script code",
        its_own=("exit 3", 3),
        kills_its_group=("kill 0; echo b", 143),
        kills_its_timeout=("kill -9 $PPID; sleep 0.1", 137),
    )
    def test_the_model_is_told_the_exit_code(self, script, code, shell):
        assert run_shell(shell, script) == told(code, "(none)")

    @cases(
        "script output",
        both_streams=("echo 1; echo e >&2; echo 2", "1\ne\n2"),
        a_blank_line_at_the_end=("echo x; echo", "x\n"),
        no_newline_at_the_end=(r"printf '\n\nx'", "\n\nx"),
        no_text=(r"printf 'caf\351 \0x\344\270'", "caf\ufffd \0x\ufffd"),
        of_a_long_script=(f"cat <<E | wc -c\n{40_000 * 'x'}\nE", "40001"),
        late=("exec > >(sleep 0.1; cat) 2>&1\necho hello", "hello"),
        of_a_script_like_an_option=("-n\necho y", "bash: line 1: -n: command not found\ny"),
    )
    def test_the_model_sees_what_a_script_prints(self, script, output, shell):
        assert run_shell(shell, script) == told(0, output)

    # What a script could notice of the program that runs it. (hBc: the options of any `bash -c`.)
    @cases(
        "script output",
        its_stdin=("cat", "(none)"),
        its_shell_options=("echo $-; shopt -q lastpipe", "hBc"),
        its_variables=("env | sed 's/=.*//' | grep BASIC", "BASIC_LOOP_MARK"),
        its_command_line=("pgrep -s 0 -f 'pgrep|BASIC_LOOP_BLOCKS'", "(none)"),
    )
    def test_a_script_is_shut_off_from_its_runner(self, script, output, shell):
        assert run_shell(shell, f"{script}; true") == told(0, output)

    def test_a_trailing_backslash_does_not_join_two_blocks(self, shell):
        assert run_shell(shell, "x=a; echo b \\", "echo $x") == told(0, "b\na")

    @cases(
        "half rest",
        quote=("echo 'x", "'"),
        if_=("if a; then", "fi"),
        here_document_after_extglob=("shopt -s extglob\nls !(keep)\ncat <<E\nx", "E"),
    )
    def test_a_block_left_open_runs_nothing(self, half, rest, shell, tmp_path):
        text = run_shell(shell, f"touch {tmp_path}/ran", half, rest)
        assert text == told(2, "[nothing was run: a block is unfinished]")
        assert list(tmp_path.iterdir()) == []

    @cases(
        "n_bytes expected",
        longest=(65_000, told(0, "as it is")),
        too_long=(65_001, "Not run: the script is too long. Split it into smaller ones."),
    )
    def test_a_command_has_at_most_65000_bytes(self, n_bytes, expected, monkeypatch):
        # Output without the mark is shown as it is.
        monkeypatch.setattr(module, "script_command", lambda *_: n_bytes * "x")
        assert run_shell(printing("as it is"), "") == expected

    @cases(
        "output shown_bytes expected",
        fits=(b"abc", 3, "abc"),
        one_too_many=(b"abcd", 3, "a\n[... 1 bytes left out ...]\ncd"),
        halves_of_characters=("ßß".encode(), 2, "\ufffd\n[... 2 bytes left out ...]\n\ufffd"),
    )
    def test_long_output_loses_its_middle(self, output, shown_bytes, expected):
        assert module.middle_cut(output, shown_bytes) == expected

    # What the program printed after the mark (code and seconds; the limit is 1), and what is read.
    @cases(
        "printed expected",
        forged=("end-of-M 1 0\nend-of-M 2 0\n", (2, b"end-of-M 1 0\n", "")),
        another_code_at_the_limit=("end-of-M 3 1\n", (3, b"", "")),
        limit=("a\nend-of-M 137 1\n", (124, b"a\n", LIMIT)),
        limit_by_uutils=("a\nend-of-M 124 2\n", (124, b"a\n", LIMIT)),
        half_an_end=("hi\nend-of-M 3 0", (137, b"hi\nend-of-M 3 0", CUT)),
    )
    def test_the_end_words_are_read(self, printed, expected):
        stdout = f"noise\n:M:{base64.b64encode(printed.encode()).decode()}\n"
        assert module.parse_output(ExecResult(stdout=stdout, return_code=9), "M", 1) == expected

    def test_broken_base64_is_a_cut_output(self):
        result = ExecResult(stdout=":M:A", return_code=9)
        assert module.parse_output(result, "M", 1) == (137, b"", CUT)

    def test_printing_the_process_list_does_not_end_the_output(self, shell):
        # The list of the session holds the program's own `sed "/[e]nd-of-MARK/q"`, once this runs.
        text = run_shell(shell, "until pgrep -s 0 -a sed; do sleep 0.1; done; exit 3")
        assert re.fullmatch(r"Exit code: 3\nOutput:\n\d+ sed /\[e\]nd-of-\w+/q", text)

    @cases(
        "missing text",
        base64=("base64", "not run: it needs bash 4.4 and base64"),
        bash=("bash", "bash: not found"),
    )
    def test_a_program_that_the_image_lacks_is_named(self, missing, text, shell, tmp_path):
        for name in {"bash", "base64", "sed", "head", "timeout"} - {missing}:
            (tmp_path / name).symlink_to(shutil.which(name))
        shell.variables["PATH"] = str(tmp_path)
        shown = run_shell(shell, "true")
        assert shown.startswith("Exit code: 127\n") and shown.endswith(text)

    def test_no_file_is_written(self, shell, tmp_path):
        # No bash can write to a file of more than 0 bytes.
        (tmp_path / "limit").write_text("ulimit -f 0")
        shell.variables["BASH_ENV"] = f"{tmp_path}/limit"
        assert run_shell(shell, "seq 2") == told(0, "1\n2")

    def test_shell_options_of_the_image_break_nothing(self, shell):
        shell.variables["SHELLOPTS"] = "errexit:monitor:noclobber:nounset:pipefail:posix"
        assert run_shell(shell, "echo a; (exit 3)") == told(3, "a")

    def test_busybox_sed_does_not_hold_up_the_turn(self, shell, tmp_path):
        # Like busybox's sed, this one ends at a line only after it has read the next one.
        (tmp_path / "sed").write_text('#!/bin/bash\nexec /bin/sed "${1%q}{N;P;Q}"')
        (tmp_path / "sed").chmod(0o755)
        shell.variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        assert run_shell(shell, f"{SLEEP} & echo a", seconds=5) == told(0, "a")

    def test_the_time_limit_ends_all_that_a_script_started(self, shell):
        # A process in a session of its own, one without the mark, and one that ignores SIGTERM.
        script = f"echo a; setsid {SLEEP} & env -i {SLEEP} & trap '' TERM; {SLEEP}"
        assert run_shell(shell, script, seconds=1) == told(124, f"a\n{LIMIT}")
        wait_until_sleep_ends()

    @cases(
        "flood output",
        lines=("yes", f"y\n\n[... 3999996 bytes left out ...]\ny\n{CUT}"),
        one_line_on_stderr=("yes | tr '\\n' y >&2", CUT),
    )
    def test_a_flood_ends_all_that_a_script_started(self, flood, output, shell):
        text = run_shell(shell, f"setsid {SLEEP} & {flood}", shown_bytes=4)
        assert text == told(137, output)
        wait_until_sleep_ends()

    def test_a_server_that_a_script_left_lives_on(self, shell, tmp_path):
        # When it is told to, it prints more than a script may. Without a reader, seq would fail.
        server = "until [ -e go ]; do sleep 0.1; done; seq 999999 && touch alive"
        assert run_shell(shell, f"cd {tmp_path}; ({server}) & echo a") == told(0, "a")
        # The agent kills the next script, and only that.
        run_shell(shell, "sleep 9", seconds=1)
        script = f"cd {tmp_path}; touch go; until [ -e alive ]; do sleep 0.1; done"
        assert run_shell(shell, script) == told(0, "(none)")

    # What becomes of the script's exec and of the one that kills. The seconds that this takes: the
    # limit of 100, 30 until the agent gives up, 15 for the kill.
    @cases(
        "answer killing seconds",
        environments_limit=(TimeoutError(), SILENT, 0),
        gone=(fails_when_cancelled, RuntimeError("gone"), 130),
        kill_hangs=(forever, forever, 145),
    )
    def test_a_script_without_an_answer_is_killed(self, answer, killing, seconds):
        environment = FakeEnvironment(answer, killing)
        with virtual_time() as runner:
            start = runner.get_loop().time()
            text = runner.run(module.run_script(["x"], environment, 100, 99))
            assert round(runner.get_loop().time() - start) == seconds
        assert text == told(124, "[no answer; the limit is 100 seconds]")
        assert environment.first_script_was_killed
        # The environment's own limits come 90 seconds later than the agent's.
        assert environment.timeouts == [100 + 90, 15 + 90]

    def test_an_error_of_exec_is_raised_after_a_kill(self):
        environment = FakeEnvironment(RuntimeError("no container"))
        with pytest.raises(RuntimeError, match="no container"):
            run_shell(environment, "x")
        assert environment.first_script_was_killed

    def test_cancelling_a_run_kills_its_script(self, shell):
        # The script also stops what runs it.
        script = f"setsid {SLEEP} & env -i {SLEEP} & kill -STOP $PPID; {SLEEP}"
        run = module.run_script([script], shell, 7000, 99)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(run, 1))
        wait_until_sleep_ends()

    def test_a_script_stays_cancelled_if_exec_then_fails(self):
        # `wait_for` raises this in place of the CancelledError.
        run = module.run_script(["x"], FakeEnvironment(fails_when_cancelled), 100, 99)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(run, 0.01))

    def test_cancelling_a_kill_does_not_end_it(self):
        async def slow() -> None:
            await asyncio.sleep(0.1)
            ended.set()

        async def main() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(module.kill_script("abc", FakeEnvironment(slow)), 0.01)
            await asyncio.wait_for(ended.wait(), 9)

        ended = asyncio.Event()
        asyncio.run(main())


# ------------------------------------------------------------------------------ prompts on Tinker

# The cookbook's one model that needs a tokenizer of its own, which comes with the cookbook. For the
# others the suite's will do.
INKLING = "thinkingmachines/Inkling"
# A renderer that is not named here fails a test. Then look at its prompts, and name it.
RENDERER_NAMES = """
deepseekv3 deepseekv3_disable_thinking deepseekv3_thinking deepseekv4_1
deepseekv4_1_disable_thinking deepseekv4_1_low_reasoning deepseekv4_1_max_reasoning
deepseekv4_1_preserve_thinking glm5_3_high_reasoning glm5_3_low_reasoning glm5_3_max_reasoning
gpt_oss_high_reasoning gpt_oss_low_reasoning gpt_oss_medium_reasoning gpt_oss_no_sysprompt kimi_k2
kimi_k25 kimi_k25_disable_thinking kimi_k26 kimi_k26_disable_thinking kimi_k26_preserve_thinking
kimi_k31_pro_disable_thinking kimi_k31_pro_high_reasoning kimi_k31_pro_low_reasoning
kimi_k31_pro_max_reasoning kimi_k31_pro_no_reasoning_effort llama3 nemotron3
nemotron3_disable_thinking nemotron3_low_thinking nemotron3_preserve_thinking nemotron3_ultra
nemotron3_ultra_disable_thinking nemotron3_ultra_medium_thinking nemotron3_ultra_preserve_thinking
qwen3 qwen3_5 qwen3_5_disable_thinking qwen3_5_preserve_thinking qwen3_8_disable_thinking
qwen3_8_low_reasoning qwen3_8_medium_reasoning qwen3_8_xhigh_reasoning qwen3_disable_thinking
qwen3_instruct qwen3_vl qwen3_vl_instruct role_colon tml_v0
"""
RENDERERS = RENDERER_NAMES.split()
# The cookbook's `get_renderer` compares the name with each.
IN_COOKBOOK = re.findall(r'name == "(\w+)"', RENDERER_SOURCES)


class Family:
    """A renderer, and what its model would sample."""

    def __init__(self, name: str, tokenizer_dir: str) -> None:
        model_name = INKLING if name == "tml_v0" else tokenizer_dir
        self.options = {"model_name": model_name, "renderer_name": name}
        self.renderer = get_renderer(name, get_tokenizer(model_name))
        # These templates close a reply in another way than the model: by another token, by text.
        self.closes_differently = name == "role_colon" or name.startswith("gpt_oss")

    def reply(self, answer: str, thinking: str = "hm") -> list[int]:
        """The ids of a reply, with its stop token: those that have a weight in training. It has
        thinking if the renderer allows that."""
        content = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": answer}]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        try:
            prompt, weights = self.renderer.build_supervised_example(messages)
        except RendererError:
            messages[1]["content"] = answer
            prompt, weights = self.renderer.build_supervised_example(messages)
        return list(itertools.compress(prompt.to_ints(), weights.tolist()))


@pytest.fixture(params=[name for name in RENDERERS if name in IN_COOKBOOK])
def family(request, tokenizer_dir) -> Family:
    return Family(request.param, tokenizer_dir)


class TestTinker:
    # REPLY is a reply as it was sampled, `reply` the same one as it is rendered.
    @cases("previous", one_stop_token="u:old;a:REPLY;", two_as_of_inkling="u:old;a:REPLY;u")
    def test_a_prompt_begins_with_the_ids_so_far(self, previous):
        client = ToyClient()
        client.ask("new", previous, [("user", "old"), ("assistant", "reply")])
        assert client.generated == [("u:old;a:REPLY;u:new;a:", 50)]

    @cases("previous", first_turn="", no_stop_token="u:old;a:REPLY")
    def test_a_prompt_that_cannot_go_on_is_rendered(self, previous):
        client = ToyClient()
        client.ask("new", previous, [("user", "old"), ("assistant", "reply")])
        assert client.generated == [("u:old;a:reply;u:new;a:", 50)]

    def test_the_templates_tail_is_looked_for_again_if_it_moved(self):
        client = ToyClient()
        for system in ("one", "another"):
            client.ask("new", "x;", [("system", system), ("user", "old")])
        assert client.generated == [("x;u:new;a:", 50)] * 2
        # This was rendered for the second system message, too.
        assert client.rendered[-1] == "s:another;u:a;a:c;u:new;a:"

    @cases(
        "given expected",
        defaults=({}, {}),
        temperature_0=({"temperature": 0}, {"temperature": 0.0}),
        no_temperature=({"temperature": None}, {}),
        seed=({"llm_kwargs": {"seed": 3}}, {"seed": 3}),
    )
    def test_tinker_gets_the_sampling_options(self, given, expected, tinker):
        tinker.run(**given)
        defaults = {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}
        stop = tinker.encode("<|im_end|>")
        assert dict(tinker.params[0]) == {**defaults, "stop": stop, **expected}

    @cases("given limit", default=(None, 32_000), given=(300, 300))
    def test_tinkers_context_has_32000_tokens_by_default(self, given, limit, tinker):
        tinker.run(max_tokens=99_999, context_limit=given)
        assert tinker.params[0].max_tokens == limit - len(tinker.sampled[0].prompt)

    def test_a_base_models_end_of_text_is_taken_off(self, tinker):
        # cut_off: the renderer's stop token does not follow.
        assert tinker.run([Reply("hi<|endoftext|>", cut_off=True)]).completion == "hi"

    def test_a_character_that_is_an_added_token_stays(self, tinker):
        (client,) = set_up(tinker.agent())
        assert client.plain_text("a § b") == "a § b"

    def test_text_for_a_model_without_special_tokens_stays(self):
        assert ToyClient().plain_text("a<|im_end|>") == "a<|im_end|>"

    def test_tinker_opens_a_checkpoint_else_the_base_model(self, tinker, tokenizer_dir):
        more = {"llm_kwargs": {"record_stability_info": True}}
        set_up(tinker.agent(), tinker.agent(model_path="tinker://run/1", **more))
        # Path, base model, record_stability_info.
        assert tinker.opened == [(None, tokenizer_dir, False), ("tinker://run/1", None, True)]

    @pytest.mark.skipif(not HAS_SEQUENCE_IDS, reason="SDK 0.26 gives each sequence an id")
    def test_tinkers_sequence_ids_are_recorded(self, tinker):
        (detail,) = tinker.run().context.rollout_details
        assert detail["extra"] == {"sequence_id": ["sequence-1"]}

    def test_a_model_has_its_recommended_renderer_by_default(self, tinker):
        # The fake samples ids of another tokenizer, so one is enough.
        done = tinker.run(model_name=INKLING, renderer_name=None, max_tokens=1)
        assert "<|message_user|>" in get_tokenizer(INKLING).decode(done.recorded[0].prompt)

    def test_a_tokenizer_decodes_under_its_lock(self, tinker, tokenizer_dir, monkeypatch):
        """It raises "Already borrowed" if two threads use it at once."""

        def decode(ids: list[int]) -> str:
            seen.append(module._tokenizer_lock.locked())
            return "hello"

        seen = []
        monkeypatch.setattr(get_tokenizer(tokenizer_dir), "decode", decode)
        tinker.run()
        assert set(seen) == {True}

    def test_clients_that_are_built_at_once_share_a_session(self, tinker):
        async def main() -> None:
            agents = [tinker.agent(max_tokens=1 + n) for n in range(4)]
            await asyncio.gather(*(agent.setup(FakeEnvironment()) for agent in agents))

        tinker.connecting_sec = 0.05
        asyncio.run(main())
        assert (len(tinker.opened), len(tinker.sessions)) == (4, 1)

    def test_each_login_has_a_session_of_its_own(self, tinker):
        set_up(tinker.agent(), tinker.agent(max_tokens=1))
        set_up(tinker.agent(llm_kwargs={"api_key": "tml-2"}), tinker.agent(api_base="http://x"))
        assert len(tinker.sessions) == 3

    def test_a_session_that_has_ended_is_replaced(self, tinker):
        set_up(tinker.agent())
        tinker.sessions[0].status = 410
        set_up(tinker.agent(max_tokens=1), tinker.agent(max_tokens=2))
        assert len(tinker.sessions) == 2

    def test_a_given_service_needs_no_key(self, tinker, no_key):
        module.use_service(tinker())
        assert tinker.run().completion == "hello"

    def test_a_given_service_is_never_replaced(self, tinker):
        module.use_service(tinker())
        tinker.sessions[0].status = 410
        with pytest.raises(tinker_sdk.APIStatusError):
            set_up(tinker.agent())

    @pytest.mark.skipif(not REAL_TINKER, reason="TINKER_BASE_URL names no server")
    def test_a_real_tinker_continues_from_the_sampled_ids(self, tmp_path, monkeypatch):
        # On a CPU the first reply takes over a minute.
        signal.alarm(600)
        monkeypatch.setenv("TINKER_BASE_URL", REAL_TINKER)
        options = {"model_name": TINKER_MODEL, "renderer_name": "qwen3_instruct"}
        agent = BasicLoopAgent(logs_dir=tmp_path, max_tokens=200, **options)
        first, second = AgentRun(agent).run("one", "two").recorded
        ids = first.prompt + first.completion
        assert second.prompt[: len(ids)] == ids

    def test_the_list_names_every_renderer_of_the_cookbook(self):
        # Cookbook 0.5.7 has 38. Fewer would show that this looks in the wrong place.
        assert len(IN_COOKBOOK) >= 38
        assert set(IN_COOKBOOK) <= set(RENDERERS)

    def test_a_later_prompt_goes_on_from_the_sampled_ids(self, tinker, family):
        texts = ["\n\n \t hm \n" + bash("a"), bash("b"), "\n" + bash("c"), bash("d")]
        replies = [Reply(ids=family.reply(text)) for text in texts]
        done = tinker.run(replies, printing("\n o \n"), **family.options, max_turns=4)
        assert done.scripts == [["a\n"], ["b\n"], ["c\n"], ["d\n"]]
        assert done.recorded == tinker.sampled
        assert done.metadata["n_prefix_breaks"] == (3 if family.closes_differently else 0)

    def test_a_later_prompt_ends_as_the_template_would(self, tinker, family):
        replies = [Reply(ids=family.reply(bash("ls")))] * 2
        done = tinker.run(replies, printing("out"), **family.options, max_turns=2)
        first, second = done.recorded
        # From the stop token on. (Some templates close a reply differently. Then all is rendered.)
        end = second.prompt[len(first.prompt + first.completion) - 1 :]
        history = done.agent.messages[:-1]
        assert len(end) > 1
        assert end == family.renderer.build_generation_prompt(history).to_ints()[-len(end) :]

    def test_output_adds_no_special_token_to_a_prompt(self, tinker, family):
        """The special tokens of a prompt are the template's, whatever a script prints."""
        added = tinker.tokenizer.get_added_tokens_decoder().values()
        # The last one is Inkling's.
        names = [token.content for token in added if len(token.content) > 1] + ["<|message_user|>"]
        hostile = "".join(f"a {name} b<{name}<{name}\n" for name in names)
        (client,) = set_up(tinker.agent(**family.options))
        seen = []
        for text in ("out", client.plain_text(hostile)):
            ids, _ = asyncio.run(client.render([{"role": "user", "content": text}]))
            pieces = [family.renderer.tokenizer.decode([token]) for token in ids]
            seen.append([piece for piece in pieces if piece in names])
        assert seen[0] == seen[1]
        assert client.plain_text(hostile).replace("\u200b", "") == hostile

    def test_a_reply_cut_off_anywhere_shows_no_thinking(self, tinker, family):
        whole = family.reply("It is done.", f"Could <tool_call>be</tool_call> 42\n{bash('rm x')}")
        lengths = [*range(1, len(whole), 5), len(whole)]
        replies = [Reply(ids=whole[:length], cut_off=True) for length in lengths]
        options = family.options | {"agent_class": OwnLoop, "max_turns": len(lengths)}
        done = tinker.run(replies, **options)
        answers = [turn.content.strip() for turn in done.agent.turns]
        assert [answer for answer in answers if not "It is done.".startswith(answer)] == []
        assert answers[-1] == "It is done."


# -------------------------------------------------------------------------------- prompts on vLLM


class TestVllm:
    def test_vllm_gets_this_request_for_a_completion(self, vllm):
        vllm.run(max_tokens=7, temperature=None)
        (body,) = vllm.bodies("/v1/completions")
        assert body == {
            "model": VLLM_MODEL,
            "prompt": vllm.sampled[0].prompt,
            "max_tokens": 7,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def test_vllm_gets_this_request_for_a_prompt(self, vllm):
        arguments = {"enable_thinking": True}
        vllm.run(llm_kwargs={"extra_body": {"chat_template_kwargs": arguments}})
        assert vllm.bodies("/tokenize")[1] == {
            "model": VLLM_MODEL,
            "messages": [{"role": "user", "content": "do it"}],
            "add_generation_prompt": True,
            "chat_template_kwargs": arguments,
            "return_token_strs": True,
        }

    def test_setup_asks_vllm_for_its_special_tokens(self, vllm):
        set_up(vllm.agent())
        question = {"prompt": module.SPECIAL_NAMES, "add_special_tokens": False}
        question |= {"model": VLLM_MODEL, "return_token_strs": True}
        assert vllm.bodies("/tokenize") == [question]

    @cases(
        "given name value",
        temperature_0=({"temperature": 0}, "temperature", 0),
        extra_body_wins=({"llm_kwargs": {"top_k": 1, "extra_body": {"top_k": 5}}}, "top_k", 5),
        max_tokens_stays=({"llm_kwargs": {"extra_body": {"max_tokens": 9}}}, "max_tokens", 512),
        session_id=({"session_id": "mine"}, "session_id", "mine"),
        hosted_vllm=({"model_name": f"hosted_vllm/{VLLM_MODEL}"}, "model", VLLM_MODEL),
    )
    def test_vllm_gets_an_option(self, given, name, value, vllm):
        vllm.run(**given)
        assert vllm.bodies("/v1/completions")[0][name] == value

    def test_every_request_to_vllm_has_the_given_headers(self, vllm):
        """openai sends the time limit in a header, too."""
        vllm.run(llm_kwargs={"extra_headers": {"X-Other": "1"}, "timeout": 77})
        assert vllm.headers("X-Other") == ["1"] * 3
        assert vllm.headers("X-Stainless-Read-Timeout") == ["77"] * 3

    def test_vllm_does_not_get_the_key_of_openai(self, vllm):
        set_up(vllm.agent())
        assert vllm.headers("Authorization") == ["Bearer none"]

    @pytest.mark.parametrize("end", ["/v1", "/v1/"])
    def test_vllms_paths_are_found_from_its_api(self, vllm, end):
        vllm.run(api_base=vllm.url + end)
        assert len(vllm.bodies("/v1/completions")) == 1

    def test_a_turn_on_vllm_costs_two_requests(self, vllm):
        """One more finds the template's tail, and one in `setup` the special tokens."""
        vllm.run([bash("a"), bash("b"), "done"], max_turns=3)
        assert len(vllm.bodies("/v1/completions")) == 3
        assert len(vllm.bodies("/tokenize")) == 1 + 3 + 1

    def test_a_prompt_on_vllm_begins_with_the_ids_so_far(self, vllm):
        first, second = AgentRun(vllm.agent(max_tokens=200)).run("one", "two").recorded
        ids = first.prompt + first.completion
        assert second.prompt[: len(ids)] == ids

    def test_coheres_marks_of_an_answer_are_taken_off(self, vllm):
        assert vllm.run(["<|START_RESPONSE|>done<|END_RESPONSE|>"]).completion == "done"

    @pytest.mark.parametrize("opening", ["<think>\n", "<think>"])
    def test_thinking_that_vllms_template_opened_is_taken_off(self, vllm, opening):
        replies = [f"so {bash('rm x')}</think>{bash('ls')}", "</think>done"]
        template = {"chat_template_kwargs": {"opens_with": opening}}
        done = vllm.run(replies, max_turns=2, llm_kwargs={"extra_body": template})
        assert (done.scripts, done.completion) == ([["ls\n"]], "done")

    def test_vllms_cached_tokens_are_counted(self, vllm):
        usage = {"prompt_tokens_details": {"cached_tokens": 40}}
        done = vllm.run([Reply(answer={"usage": usage})])
        assert done.context.n_cache_tokens == 40

    @cases("given limit", servers=(None, 8192), higher=(9000, 8192), lower=(300, 300))
    def test_vllms_context_limit_is_the_smaller_one(self, given, limit, vllm):
        vllm.skip_if_real()
        vllm.run(context_limit=given, max_tokens=99_999)
        (body,) = vllm.bodies("/v1/completions")
        assert body["max_tokens"] == limit - len(body["prompt"])

    def test_a_busy_vllm_is_asked_again(self, vllm):
        assert vllm.run([*[Refusal(503)] * 5, "hello"]).completion == "hello"

    ALWAYS = ["<|im_end|>", "<|turn>", "<turn|>", "[|user|]", "<\uff5cUser\uff5c>", "<unused42>"]

    @pytest.mark.parametrize("name", [*ALWAYS, "<think>", "</think>"])
    def test_a_special_token_of_vllms_model_becomes_plain(self, vllm, name):
        (client,) = set_up(vllm.agent())
        broken = f"{name[0]}\u200b{name[1:]}"
        assert client.plain_text(f"a{name}{name}b") == f"a{broken}{broken}b"

    @pytest.mark.parametrize("text", ["[ARGS]", "<s>old</s>", "vector<file_t>", *ORDINARY])
    def test_a_text_that_is_no_token_of_vllms_model_stays(self, vllm, text):
        (client,) = set_up(vllm.agent())
        assert client.plain_text(text) == text

    @cases(
        "answer",
        no_strings={"token_strs": None, "max_model_len": 9},
        no_limit={"token_strs": ["a"]},
    )
    def test_setup_refuses_a_server_without_vllms_tokenize(self, answer, vllm, monkeypatch):
        vllm.skip_if_real()
        monkeypatch.setattr(vllm, "answer", lambda path, body: answer)
        with pytest.raises(RuntimeError, match="no such model, or no vLLM server"):
            set_up(vllm.agent())


# -------------------------------------------------------------------------------- chat endpoints


class TestChat:
    CHAT = "/v1/chat/completions"

    def test_the_module_does_not_import_litellm(self):
        code = "import sys, basic_loop_agent; sys.exit('litellm' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    def test_nothing_is_sent_that_was_not_asked_for(self, chat):
        chat.run(temperature=None)
        message = {"role": "user", "content": "do it"}
        request = {"model": "tiny", "messages": [message], "max_tokens": 512}
        assert chat.bodies(self.CHAT) == [request]

    @cases(
        "given name value",
        temperature_0=({"temperature": 0}, "temperature", 0),
        top_p=({"top_p": 0.9}, "top_p", 0.9),
        extra_body_beside_session_id=(
            {"llm_kwargs": {"extra_body": {"top_k": 5}}, "session_id": "x"},
            "top_k",
            5,
        ),
        session_id=({"session_id": "x"}, "session_id", "x"),
        ids=({"collect_rollout_details": True}, "return_token_ids", True),
        logprobs=({"collect_rollout_details": True}, "logprobs", True),
    )
    def test_a_chat_endpoint_gets_an_option(self, given, name, value, chat):
        chat.run(**given)
        assert chat.bodies(self.CHAT)[0][name] == value

    @pytest.mark.skipif(not hasattr(BaseAgent, "extra_env"), reason="since Harbor 0.16")
    def test_the_model_output_limit_is_max_tokens(self, chat):
        """With use_responses_api LiteLLM sends this, and not max_tokens."""
        (client,) = set_up(chat.agent(max_tokens=7))
        assert client.get_model_output_limit() == 7

    def test_the_example_for_skyrl_reaches_the_server(self, chat):
        config = yaml.safe_load((ROOT / "examples/skyrl.yaml").read_text())
        chat.run(model_name="hosted_vllm/tiny", session_id="mine", **config["agent"]["kwargs"])
        sent = {"model": "tiny", "max_tokens": 4096, "top_k": -1, "min_p": 0.0, "logprobs": True}
        assert sent.items() <= chat.bodies(self.CHAT)[0].items()

    def test_a_client_leaves_the_options_as_they_are(self, chat):
        done = chat.run(session_id="mine", llm_kwargs={"extra_body": {"top_k": 5}})
        assert done.agent.options.llm_kwargs == {"extra_body": {"top_k": 5}}

    def test_the_price_of_a_known_model_is_known(self, chat):
        done = chat.run(model_name="openai/gpt-4o-2024-05-13")
        # litellm's price list: 5 and 15 dollars per million tokens.
        price = done.context.n_input_tokens * 5e-6 + done.context.n_output_tokens * 15e-6
        assert done.context.cost_usd == pytest.approx(price)
        assert done.trajectory.final_metrics.total_cost_usd == done.context.cost_usd

    def test_a_server_need_not_give_the_usage(self, server):
        assert server.run([Reply("hi", answer={"usage": None})]).completion == "hi"

    def test_an_answer_without_text_is_empty(self, chat):
        assert chat.run([Reply(message={"content": None})]).completion == ""

    @pytest.mark.parametrize("reason", ["STOP", "end_turn"])
    def test_a_complete_reply_is_run(self, server, reason):
        reply = Reply(bash("ls"), choice={"finish_reason": reason})
        assert server.run([reply, "done"], max_turns=2).scripts == [["ls\n"]]

    @pytest.mark.parametrize("reason", ["length", "abort", "MALFORMED", "content_filter"])
    def test_a_reply_that_was_cut_off_is_not_run(self, server, reason, caplog):
        reply = Reply(bash("rm x"), choice={"finish_reason": reason})
        done = server.run([reply], max_turns=2)
        assert (done.stop_reason, done.scripts) == ("max_tokens", [])
        assert f"the reply was cut off: finish reason {reason.lower()!r}" in caplog.text

    @cases("is_wanted sent", wanted=(True, {"reasoning_content": "hm"}), not_wanted=(False, {}))
    def test_reasoning_goes_back_only_if_wanted(self, is_wanted, sent, chat):
        text = f"<think>and</think>{bash('ls')}"
        replies = [Reply(text, message={"reasoning_content": "hm"}), "done"]
        chat.run(replies, max_turns=2, interleaved_thinking=is_wanted)
        answer = chat.bodies(self.CHAT)[1]["messages"][2]
        assert answer == {"role": "assistant", "content": bash("ls"), **sent}

    # The text of a reply, the server's reasoning, and what they are in the record.
    @cases(
        "text reasoning expected",
        a_tag_beside_the_servers_reasoning=("a </think> b", "hm", ("hm", "a </think> b")),
        both=("<think>b</think>hi", "a", ("ab", "hi")),
        only_closed=(f"so {bash('rm x')}</think>hi", None, (f"so {bash('rm x')}", "hi")),
    )
    def test_thinking_is_recorded_apart(self, text, reasoning, expected, chat):
        done = chat.run([Reply(text, message={"reasoning_content": reasoning})])
        assert (done.agent.turns[0].reasoning_content, done.agent.turns[0].content) == expected


# ------------------------------------------------------------------------------ the shared client


async def finish(*runs: AgentRun) -> list[Any]:
    """Do runs one after the other, whatever ends them. Returns their clients."""
    for run in runs:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await run.go()
    return [run.agent.client for run in runs]


class TestSharedClient:
    def test_trials_with_the_same_configuration_share_a_client(self, tinker, tmp_path):
        async def main() -> None:
            await asyncio.gather(*(AgentRun(agent).go() for agent in agents))

        agents = [tinker.agent(logs_dir=tmp_path / str(n)) for n in range(20)]
        asyncio.run(main())
        assert len({agent.client for agent in agents}) == len(tinker.opened) == 1

    @cases(
        "given",
        option={"max_tokens": 1},
        llm_kwargs={"llm_kwargs": {"seed": 1}},
        key={"extra_env": {"TINKER_API_KEY": "tml-own"}},
        model={"model_name": "another"},
        subclass={"agent_class": OwnLoop},
    )
    def test_another_configuration_has_a_client_of_its_own(self, given, tinker, monkeypatch):
        monkeypatch.setattr(BasicLoopAgent, "_build_llm", lambda _: object())
        first, second = set_up(tinker.agent(), tinker.agent(**given))
        assert first is not second

    def test_another_event_loop_has_clients_of_its_own(self, tinker):
        assert set_up(tinker.agent()) != set_up(tinker.agent())

    def test_the_client_is_built_in_a_thread(self, tinker, monkeypatch):
        monkeypatch.setattr(BasicLoopAgent, "_build_llm", lambda _: threading.current_thread())
        assert set_up(tinker.agent()) != [threading.main_thread()]

    def test_another_given_service_has_clients_of_its_own(self, tinker):
        with asyncio.Runner() as runner:
            first = runner.run(finish(AgentRun(tinker.agent())))
            module.use_service(tinker())
            second = runner.run(finish(AgentRun(tinker.agent())))
        assert first != second

    # Whether the next trial has the same client after such a reply.
    @cases(
        "reply timeout_sec stays",
        an_error=(RuntimeError("gone"), None, False),
        the_clients_timeout=(TimeoutError(), None, False),
        max_seconds=(forever, None, True),
        harbors_timeout=(forever, 20, True),
        a_full_context=(FULL, None, True),
    )
    def test_only_an_error_replaces_the_client(self, reply, timeout_sec, stays, tinker):
        tinker.will_reply(reply, "hello")
        runs = [AgentRun(tinker.agent(max_seconds=50), timeout_sec=timeout_sec) for _ in range(2)]
        with virtual_time() as runner:
            first, second = runner.run(finish(*runs))
        assert (first is second) is stays

    def test_a_run_uses_the_client_that_replaced_its_own(self, tinker):
        tinker.will_reply(RuntimeError("gone"), "hello")
        agent = tinker.agent()
        with asyncio.Runner() as runner:
            runner.run(agent.setup(FakeEnvironment()))
            (replaced,) = runner.run(finish(AgentRun(tinker.agent())))
            runner.run(agent.run("do it", FakeEnvironment(), AgentContext()))
        assert agent.client is not replaced

    def test_a_late_error_leaves_the_client_that_replaced_its_own(self, tinker):
        async def fail_late() -> None:
            # Meanwhile the client is replaced.
            await finish(early, second)
            raise RuntimeError("gone, too")

        tinker.will_reply(fail_late, RuntimeError("gone"), "hello", "hello")
        late, early, second, third = (AgentRun(tinker.agent()) for _ in range(4))
        asyncio.run(finish(late, third))
        assert late.agent.client is not second.agent.client is third.agent.client


# ----------------------------------------------------------------------------- files with ATIF


class TestFiles:
    @cases(
        "replies completion messages",
        an_answer=(["hi"], "hi", ["do it", "hi"]),
        an_error=([bash("ls"), RuntimeError("gone")], bash("ls"), ["do it", bash("ls")]),
        a_cancellation=([bash("ls"), forever], bash("ls"), ["do it", bash("ls")]),
        no_reply=([FULL], "", ["do it"]),
    )
    def test_every_ending_leaves_both_files(self, replies, completion, messages, tinker):
        tinker.will_reply(*replies)
        ended = AgentRun(tinker.agent(max_turns=2, system_prompt=""), timeout_sec=50)
        with virtual_time() as runner:
            runner.run(finish(ended))
        assert ended.completion == completion
        assert [step.message for step in ended.steps] == messages

    @cases("trap", link="ln -s victim", pipe="mkfifo")
    @pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
    def test_a_trap_at_a_files_name_is_replaced(self, trap, name, tinker, tmp_path):
        subprocess.run(f"{trap} {name}", shell=True, cwd=tmp_path, check=True)
        done = tinker.run()
        assert done.completion == done.steps[-1].message == "hello"
        assert sorted(os.listdir(tmp_path)) == ["completion.txt", "trajectory.json"]

    def test_a_file_that_cannot_be_written_is_an_error(self, tinker, tmp_path):
        (tmp_path / "completion.txt").mkdir()
        failed = AgentRun(tinker.agent())
        with pytest.raises(IsADirectoryError):
            failed.run()
        assert failed.recorded == tinker.sampled

    def test_a_run_leaves_this_trajectory(self, tinker, tokenizer_dir, tmp_path):
        options = {"logs_dir": tmp_path / "greet__x7/agent", "system_prompt": "Be brief."}
        replies = [bash("ls"), "<think>hm</think>done"]
        done = tinker.run(replies, printing("out"), max_turns=2, **options)
        file = json.loads((tmp_path / "greet__x7/agent/trajectory.json").read_text())
        system, user, first, second = file["steps"]
        assert system == {"step_id": 1, "source": "system", "message": "Be brief."}
        assert user == {"step_id": 2, "source": "user", "message": "do it"}
        assert (first["message"], second["message"]) == (bash("ls"), "done")
        assert ("reasoning_content" in first, second["reasoning_content"]) == (False, "hm")
        assert first["observation"] == {"results": [{"content": "Exit code: 0\nOutput:\nout"}]}
        assert first["timestamp"] < second["timestamp"]
        assert (file["session_id"], file["extra"]) == ("greet__x7", done.metadata)
        agent = {"name": "basic-loop", "version": module.__version__, "model_name": tokenizer_dir}
        assert file["agent"] == agent

    def test_a_run_counts_the_tokens_of_its_turns(self, tinker):
        replies = [Reply(bash("ls"), answer={"prompt_cache_hit_tokens": 2}), "done"]
        done = tinker.run(replies, max_turns=2)
        first, second = tinker.sampled
        assert done.trajectory.final_metrics.model_dump(exclude_none=True) == {
            "total_prompt_tokens": len(first.prompt + second.prompt),
            "total_completion_tokens": len(first.completion + second.completion),
            "total_cached_tokens": 2,
        }

    @pytest.mark.skipif("model_usage" not in AgentContext.model_fields, reason="since Harbor 0.23")
    def test_the_context_has_the_models_usage(self, tinker, tokenizer_dir):
        assert list(tinker.run().context.model_usage) == [tokenizer_dir]

    def test_a_step_has_what_trainers_read(self, vllm):
        done = vllm.run([Reply(choice={"routed_experts": [[1]]})])
        (turn,) = vllm.sampled
        assert done.steps[-1].metrics.model_dump(exclude_none=True) == {
            **dict(zip(IDS, turn, strict=True)),
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(turn.completion),
            "cached_tokens": 0,
            "extra": {"routed_experts": [[1]]},
        }

    @cases(
        "reply given",
        no_logprobs=(Reply(gives_logprobs=False), {}),
        not_wanted=(Reply(), {"collect_rollout_details": False}),
    )
    def test_a_step_that_cannot_be_trained_has_no_ids(self, reply, given, tinker):
        metrics = tinker.run([bash("ls"), reply], max_turns=2, **given).steps[-1].metrics
        assert [getattr(metrics, name) for name in (*IDS, "extra")] == [None] * 4


# ---------------------------------------------------------------------------------- training data

WHOLE = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]}
ONE_TURN = (Turn(**WHOLE),)
REWARD = {"reward": 1.0}


def a_trial(rewards=REWARD, error="", stop_reason="completed", turns=ONE_TURN, steps=None) -> Any:
    """A trial as Harbor reads it from result.json. (A step of a trial has the same fields.)"""
    details = module.rollout_details(turns)
    context = AgentContext(metadata={"stop_reason": stop_reason}, rollout_details=details)
    return TrialResult.model_construct(
        trial_name="greet__1",
        agent_result=context if turns else None,
        verifier_result=VerifierResult(rewards=rewards) if rewards else None,
        exception_info=ExceptionInfo.model_construct(exception_type=error) if error else None,
        step_results=steps,
    )


class TestTrainingData:
    END_REASONS = ["stop", "stop_sequence", "end_turn", "eos", "eos_token", "complete", "completed"]

    @cases(
        "given cut_off",
        **{reason: ({"finish_reason": reason}, False) for reason in END_REASONS},
        none_given=({}, False),
        null=({"finish_reason": None}, True),
    )
    def test_a_finish_reason_says_if_a_reply_is_cut_off(self, given, cut_off):
        assert Turn(**given).cut_off is cut_off

    @cases(
        "given expected",
        an_empty_reply=({"completion_token_ids": [], "logprobs": None}, True),
        no_prompt=({"prompt_token_ids": None}, False),
        no_ids=({"completion_token_ids": None}, False),
        no_logprobs=({"logprobs": None}, False),
        too_few_logprobs=({"logprobs": [-0.5]}, False),
        **{f"logprob_{x}": ({"logprobs": [-0.5, x]}, False) for x in NO_LOGPROBS},
    )
    def test_a_turn_whose_logprobs_are_whole_is_trainable(self, given, expected):
        assert Turn(**WHOLE | given).is_trainable is expected

    def test_rollout_details_have_an_entry_for_each_turn(self):
        empty = Turn(prompt_token_ids=[5], completion_token_ids=[], logprobs=None, extra={"a": 1})
        (detail,) = module.rollout_details([Turn(**WHOLE), empty])
        assert detail == {
            "prompt_token_ids": [[1, 2], [5]],
            "completion_token_ids": [[3, 4], []],
            "logprobs": [[-0.5, -0.25], []],
            "extra": {"a": [None, 1]},
        }

    @cases(
        "wrong",
        a_logprob_is_missing={"logprobs": [[-0.5]]},
        NaN={"logprobs": [[-0.5, math.nan]]},
        an_extra_list_is_too_short={"extra": {"a": []}},
    )
    def test_a_broken_rollout_is_an_error(self, wrong):
        (detail,) = module.rollout_details(ONE_TURN)
        context = AgentContext(rollout_details=[detail | wrong])
        with pytest.raises(ValueError, match=r"zip\(\) argument|differ in length"):
            list(module.turns_of(context))

    @cases(
        "rewards reward",
        the_one_named_reward=({"style": 0.5, "reward": 1}, 1),
        the_only_one=({"score": 0.25}, 0.25),
        several_without_that_name=({"a": 1, "b": 2}, None),
    )
    def test_a_trajectory_has_the_trials_reward(self, rewards, reward):
        assert module.trial_to_trajectory(a_trial(rewards)).reward == reward

    def test_a_trajectory_has_the_turns_of_all_steps(self):
        turns = [Turn(**WHOLE, extra={"a": n}) for n in range(3)]
        steps = [a_trial(turns=turns[:2]), a_trial(turns=turns[2:], stop_reason="max_turns")]
        whole = module.trial_to_trajectory(a_trial({"reward": 0.5}, steps=steps))
        assert (whole.turns, whole.stop_reason, whole.reward) == (turns, "max_turns", 0.5)

    def test_another_agents_trial_needs_ids_only(self):
        detail = {name: [values] for name, values in WHOLE.items()}
        trial = a_trial()
        trial.agent_result = AgentContext(rollout_details=[detail])
        expected = module.Trajectory([Turn(**WHOLE)], 1.0, None, trial)
        assert module.trial_to_trajectory(trial) == expected

    @cases(
        "trial is_data",
        the_agents_timeout=(a_trial(error="AgentTimeoutError", stop_reason="cancelled"), True),
        a_command_that_failed=(a_trial(error="NonZeroAgentExitCodeError"), True),
        a_reward_without_turns=(a_trial(turns=[]), True),
        an_error=(a_trial(error="RuntimeError"), False),
        an_error_without_a_reward=(a_trial(None, error="RuntimeError"), False),
        a_run_that_ended_in_error=(a_trial(stop_reason="error"), False),
        neither_reward_nor_turns=(a_trial(None, turns=[]), False),
        an_error_with_a_broken_reward=(a_trial({"reward": math.nan}, error="RuntimeError"), False),
        a_failed_step=(a_trial(steps=[a_trial(error="RuntimeError"), a_trial()]), False),
        a_step_in_error=(a_trial(steps=[a_trial(stop_reason="error"), a_trial()]), False),
        its_own_error_beside_its_steps=(a_trial(error="RuntimeError", steps=[a_trial()]), False),
    )
    def test_a_trial_is_training_data_unless_it_failed(self, trial, is_data, monkeypatch):
        # Harbor before 0.25 has no such property.
        monkeypatch.delattr(TrialResult, "reward_valid", raising=False)
        assert (module.trial_to_trajectory(trial) is not None) is is_data

    @cases(
        "trial reward_valid is_data",
        an_error=(a_trial(error="RuntimeError"), True, True),
        no_error=(a_trial(), False, False),
        no_reward=(a_trial(None), False, True),
    )
    def test_harbors_reward_valid_decides(self, trial, reward_valid, is_data, monkeypatch):
        monkeypatch.setattr(TrialResult, "reward_valid", reward_valid, raising=False)
        assert (module.trial_to_trajectory(trial) is not None) is is_data

    @pytest.mark.parametrize("reward", [math.nan, math.inf])
    def test_a_reward_that_is_no_number_is_an_error(self, reward):
        with pytest.raises(ValueError, match="trial greet__1: a reward is not a finite number"):
            module.trial_to_trajectory(a_trial({"reward": 1, "style": reward}))


# ------------------------------------------------------------------------------------ the main job

GREET = str(ROOT / "examples/greet")
OFFLINE = yaml.safe_load((ROOT / "examples/offline.yaml").read_text())
# The offline job's environment runs nothing. Its verifier pays for the reply RIGHT.
RIGHT, WRONG, GONE = "Hello, world!", "no", RuntimeError("the sampler is gone")


def run_job(tinker: FakeTinker, *replies: Any, task: Any = GREET, **agent: Any) -> TrialResult:
    """Run a job of one trial at Tinker. Returns the trial, after a round trip through JSON."""
    tinker.will_reply(*replies)
    agent |= {"import_path": "basic_loop_agent:BasicLoopAgent"}
    agent |= {"model_name": tinker.options["model_name"]}
    agent |= {"kwargs": {"renderer_name": "qwen3", "max_turns": 2}}
    config = OFFLINE | {"jobs_dir": tinker.options["logs_dir"], "n_attempts": 1, "quiet": True}
    config |= {"tasks": [{"path": task}], "agents": [agent]}
    with asyncio.Runner() as runner:
        job = runner.run(Job.create(JobConfig(**config)))
        (trial,) = runner.run(job.run()).trial_results
    return TrialResult.model_validate_json(trial.model_dump_json())


def two_steps(folder: Path) -> Path:
    """A task that has the example task as both of its steps."""
    task = folder / "task"
    for copy in (task, task / "steps/one", task / "steps/two"):
        shutil.copytree(GREET, copy)
    (task / "task.toml").write_text('steps = [{name = "one"}, {name = "two"}]')
    return task


class TestJob:
    def test_a_trial_gives_back_every_sampled_token(self, tinker):
        turns = module.trial_to_trajectory(run_job(tinker, bash("ls"), RIGHT)).turns
        recorded = [Sampled(*(getattr(turn, name) for name in IDS)) for turn in turns]
        assert recorded == tinker.sampled

    def test_a_trial_that_harbor_timed_out_is_scored(self, tinker):
        trial = run_job(tinker, bash("ls"), forever, override_timeout_sec=1)
        whole = module.trial_to_trajectory(trial)
        assert (whole.reward, whole.stop_reason, len(whole.turns)) == (0.0, "cancelled", 1)

    def test_a_clients_timeout_is_not_scored(self, tinker):
        trial = run_job(tinker, bash("ls"), TimeoutError("service is gone"))
        assert "service is gone" in trial.exception_info.exception_message
        assert trial.verifier_result is None

    def test_a_failed_step_is_no_training_data(self, tinker, tmp_path):
        trial = run_job(tinker, GONE, RIGHT, task=two_steps(tmp_path))
        assert trial.verifier_result.rewards == {"reward": 0.5}
        assert module.trial_to_trajectory(trial) is None

    @pytest.mark.skipif(not hasattr(BaseAgent, "resume"), reason="since Harbor 0.20")
    def test_a_later_step_resumes_the_conversation(self, tinker, tmp_path):
        trial = run_job(tinker, RIGHT, RIGHT, task=two_steps(tmp_path), resume_trajectory=True)
        first, second = module.trial_to_trajectory(trial).turns
        assert second.prompt_token_ids[: len(first.all_ids)] == first.all_ids

    @since_harbor_023
    def test_a_job_is_refused_before_any_trial(self, tinker, no_key):
        with pytest.raises(ValueError, match=NO_KEY):
            run_job(tinker)


# ------------------------------------------------------------------------------- the trainer


class Trainer:
    """Trains on the example task, four trials a step, one after the other."""

    def __init__(self, tinker: FakeTinker, monkeypatch: Any) -> None:
        self.tinker, self.training = tinker, FakeTraining(tinker)
        # It would remove what is left in Docker.
        monkeypatch.setattr(train, "CLEAN_UP", "true {0}")
        monkeypatch.setattr("tinker.ServiceClient", lambda **arguments: self.training)
        self.folder = tinker.options["logs_dir"] / "training"
        self.model = {name: tinker.options[name] for name in ("model_name", "renderer_name")}
        self.config = {"log_path": str(self.folder), "max_tokens": 64, "learning_rate": 0.5}
        self.tasks = {"tasks": [GREET], "steps": 1, "group_size": 4, "concurrency": 1}
        self.tasks |= {kind: OFFLINE[kind]["import_path"] for kind in ("environment", "verifier")}
        self.tasks |= {"trials_dir": str(self.folder / "trials")}

    def train(self, *replies: Any, **tasks: Any) -> None:
        """Start the trainer. `tasks` holds other settings of HarborTasks."""
        self.tinker.will_reply(*replies)
        tasks = train.HarborTasks(**self.tasks | tasks)
        train.main(train.Config(dataset_builder=tasks, **self.model, **self.config))

    def metric(self, name: str) -> dict[int, float]:
        """A metric's values by step."""
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: round(row[name], 3) for row in rows if name in row}


@pytest.fixture
def trainer(tinker, monkeypatch) -> Trainer:
    return Trainer(tinker, monkeypatch)


class TestTrainer:
    def test_each_trial_is_one_datum_with_its_own_logprobs(self, trainer):
        trainer.train(bash("ls"), RIGHT, WRONG, group_size=2, agent_options={"max_turns": 2})
        first, second, other = trainer.tinker.sampled
        assert trainer.training.batches[0] == [
            (first.completion + second.completion, first.logprobs + second.logprobs, 0.5),
            (other.completion, other.logprobs, -0.5),
        ]

    def test_a_second_start_goes_on_with_more_steps(self, trainer):
        trainer.train(*[RIGHT, WRONG] * 4, steps=2)
        trainer.train(*[RIGHT, WRONG] * 2, steps=3)
        assert len(trainer.training.batches) == 3

    def test_weights_are_evaluated_at_both_ends(self, trainer):
        trainer.train(*[WRONG] * 4, *[RIGHT, WRONG] * 4, *[RIGHT] * 4, steps=2, test_tasks=[GREET])
        assert trainer.metric("test/env/all/solved") == {0: 0.0, 2: 1.0}

    def test_a_step_of_failed_trials_ends_the_training(self, trainer):
        with pytest.raises(SystemExit, match=r"(?i)every trial.*RuntimeError.*the sampler is gone"):
            trainer.train(*[GONE] * 4, steps=2)

    def test_the_same_command_goes_on_after_a_failed_step(self, trainer):
        with pytest.raises(SystemExit):
            trainer.train(*[GONE] * 4, steps=2)
        trainer.train(*[RIGHT, WRONG] * 4, steps=2)
        assert len(trainer.training.batches) == 2

    def test_a_step_with_some_failed_trials_is_trained(self, trainer):
        trainer.train(RIGHT, WRONG, RIGHT, GONE)
        assert len(trainer.training.batches[0]) == 3
        assert trainer.metric("rollout_errors/RuntimeError") == {0: 1.0}

    def test_a_cancelled_verifier_counts_as_a_failed_trial(self, trainer, monkeypatch):
        async def verify(verifier: HostVerifier) -> None:
            raise asyncio.CancelledError("the remote call was cancelled")

        monkeypatch.setattr(HostVerifier, "verify", verify)
        with pytest.raises(SystemExit, match="the remote call was cancelled"):
            trainer.train(*[RIGHT] * 4)

    @cases(
        "tasks message",
        environments_module=({"environment": "nothing:Environment"}, "nothing"),
        verifiers_module=({"verifier": "nothing:Verifier"}, "nothing"),
        option=({"agent_options": {"max_turn": 2}}, "max_turn"),
        limit=({"agent_options": {"max_tokens": 9}}, "max_tokens"),
        tasks=({"tasks": ["examples/nothing"]}, "examples/nothing"),
    )
    def test_a_wrong_setting_is_an_error_before_it_connects(self, tasks, message, trainer):
        with pytest.raises(ValueError, match=message):
            trainer.train(**tasks)
        # The cookbook makes this folder before it connects.
        assert not trainer.folder.exists()

    def test_the_cookbooks_own_config_takes_harbor_tasks(self, trainer):
        trainer.tinker.will_reply(*[RIGHT, WRONG] * 2)
        tasks = train.HarborTasks(**trainer.tasks, **trainer.model)
        own = trainer.model | trainer.config | {"recipe_name": "own", "dataset_builder": tasks}
        own["rollout_error_tolerance"] = train.HarborTrials(MinViableGroup())
        asyncio.run(cookbook.main(cookbook.Config(**own)))
        assert len(trainer.training.batches[0]) == 4

    def test_each_stop_reason_has_a_metric(self, trainer):
        trainer.train(RIGHT, *[bash("ls")] * 6, agent_options={"max_turns": 2})
        metrics = {reason: trainer.metric(f"env/all/stop/{reason}")[0] for reason in StopReason}
        shown = {reason: metric for reason, metric in metrics.items() if metric}
        assert shown == {"completed": 0.25, "max_turns": 0.75}
