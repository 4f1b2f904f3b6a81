# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
r"""The specification of basic_loop_agent.py, from options to real jobs, and of examples/train.py.

Harbor's jobs, litellm, openai, HTTP, renderers, tokenizers and shells are real. The fakes below
stand for a container, Tinker's service, vLLM and a chat endpoint. As with the real server, what a
request does not ask for is not in the answer. Tests that do not choose the replies also run against
a real server:

    VLLM_BASE_URL=http://127.0.0.1:8000 VLLM_MODEL=name uv run pytest -n 0 -k vllm
    TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_MODEL=name \
      uv run pytest -n 0 -k real_tinker -W ignore
"""

import asyncio
import base64
import contextlib
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import selectors
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self
from unittest.mock import MagicMock
from uuid import uuid4

# litellm would download its price list, tokenizers would ask the model hub, and each job of Harbor
# would report itself to Harbor's makers.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HARBOR_TELEMETRY"] = "0"
# Each HTTP client would read all certificates again, which takes 27 ms.
ssl.create_default_context = functools.cache(ssl.create_default_context)
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
from harbor.llms.base import ContextLengthExceededError, LLMResponse
from harbor.llms.lite_llm import LiteLLM
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig
from harbor.models.metric import UsageInfo
from harbor.models.task.config import MCPServerConfig
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import ExceptionInfo, TimingInfo, TrialResult
from harbor.models.verifier.result import VerifierResult
from harbor.utils.trajectory_validator import TrajectoryValidator
from pydantic import Field, SecretBytes, SecretStr
from tinker_cookbook import renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import basic_loop_agent as module
from basic_loop_agent import (
    BasicLoopAgent,
    BasicLoopOptions,
    RuntimeRequestError,
    Turn,
    fenced_blocks,
)
from examples import plot, train
from examples.fake_training import FakeTraining
from examples.fakes import SCRIPT, ScriptedAgent
from examples.local import NEUTRAL_SAMPLING, LocalAgent
from examples.one_script import OneScript

# A shell starts a background job (`uv run pytest &`) with SIGINT ignored, and all processes would
# inherit that. The tests of scripts that are interrupted need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from harbor.models.trial.error_policy import ERROR_POLICIES
except ImportError:  # Harbor before 0.25
    ERROR_POLICIES = {}

since_harbor_023 = pytest.mark.skipif(not hasattr(BaseAgent, "parse_options"), reason="Harbor 0.23")
since_harbor_025 = pytest.mark.skipif(
    not hasattr(BaseAgent, "check_model_credentials"), reason="Harbor 0.25"
)
ROOT = Path(__file__).parent


# ------------------------------------------------------------------------------------ the fakes


@dataclass
class Reply:
    """What a model samples: a text, or ids. It ends in the stop token, unless it is cut off."""

    text: str = "hello"
    ids: list[int] | None = None
    cut_off: bool = False
    # () stands for -1.000, -1.001, ... in the first turn, -2.000, ... in the second, and so on.
    logprobs: Any = ()
    # Fields of the server's answer, of its choice and of the choice's message, in place of the
    # usual ones. (Tinker's answer has no choice.)
    answer: dict[str, Any] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    message: dict[str, Any] = field(default_factory=dict)


class Refusal(tinker_sdk.APIStatusError):
    """An error in place of an answer. Tinker's SDK raises this one, and the HTTP server sends its
    status and text."""

    def __init__(self, status: int, message: str = "refused", body: Any = None) -> None:
        response = httpx.Response(status, request=httpx.Request("POST", "http://tinker"))
        super().__init__(message, response=response, body=body)


FULL = Refusal(400, "This model's maximum context length is 8192 tokens.")


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
    """Runs nothing. Each `exec` of a script, a kill or a listing has the next of these results. A
    text is a script's output, which the module's bash program prints in base64, before the exit
    code. `cleared` has the commands that remove the files of an earlier run."""

    def __init__(self, *results: Any) -> None:
        self.results, self.commands, self.timeouts, self.folders = iter(results), [], [], []
        self.cleared = []

    async def exec(self, command: str, cwd: str | None = None, timeout_sec: int = 0) -> Any:
        if command.startswith("rm -f "):
            self.cleared.append(command)
            return ExecResult(return_code=0)
        self.commands.append(command)
        self.timeouts.append(timeout_sec)
        self.folders.append(cwd)
        result = await outcome(next(self.results, ""))
        if not isinstance(result, str):
            return result
        mark = re.search(r"loop_mark=(\w+)", command)[1]
        output = base64.b64encode(result.encode()).decode()
        return ExecResult(stdout=f"begin:{mark}:\n{output}\n:{mark}:0:\n", return_code=0)

    @property
    def scripts(self) -> list[str]:
        """Each script, without the newlines at its end. (The module's program has it in base64, and
        in it each block as `eval 'BLOCK'`.)"""
        programs = [command for command in self.commands if "begin:" in command]
        encoded = [re.search(r"loop_script=(\S+)", program)[1] for program in programs]
        texts = [base64.b64decode(text).decode() for text in encoded]
        return ["".join(shlex.split(text)[1::2]).rstrip() for text in texts]

    @property
    def first_script_was_killed(self) -> bool:
        """Whether the second command kills all that has the mark of the first one."""
        marks = [re.search(r"loop_mark=(\w+)", command)[1] for command in self.commands]
        return marks[0] == marks[1] and "kill -TERM" in self.commands[1]


class ShellEnvironment:
    """Runs commands in real shells. Each has a session of its own, so that no signal of a script
    reaches pytest or the user's terminal. It sets no time limit: the module's own ends a script."""

    def __init__(self, **variables: str) -> None:
        self.variables = os.environ | variables
        self.marks: set[str] = set()

    async def exec(self, command: str, cwd: str | None = None, timeout_sec: int = 0) -> Any:
        self.marks |= set(re.findall(r"^loop_mark=(\w+)", command))
        settings = {"env": self.variables, "start_new_session": True, "shell": True, "cwd": cwd}
        # Docker's environment runs commands by bash, too.
        settings["executable"] = "/bin/bash"
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

    def new_run(self, replies=(), environment=None, timeout_sec=None, **options: Any) -> "AgentRun":
        """A run that has yet to start: for tests with several instructions (`follow`), an error or
        an event loop of their own (`go`). It takes replies, and the arguments of `agent`."""
        if replies:
            self.will_reply(*replies)
        return AgentRun(self.agent(**options), environment, timeout_sec)

    def run(self, replies=(), environment=None, **options: Any) -> "AgentRun":
        """A whole run on one instruction."""
        return self.new_run(replies, environment, **options).follow()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ids_by_character(self, text: str) -> list[int]:
        """An id for each special token or character. `encode` merges some characters, so the ids
        of a prompt show whether this text was rendered again."""
        pieces = re.findall(r"(?s)<[^<>\s]+>|.", text)
        return [token for piece in pieces for token in self.encode(piece)]

    def prompt_text(self, number: int) -> str:
        return self.tokenizer.decode(self.sampled[number].prompt, skip_special_tokens=False)

    async def sample(self, prompt: list[int], stop: list[int], max_tokens: int) -> tuple:
        """Sample the next reply. Returns it, what was sampled, and the finish reason."""
        reply = await outcome(next(self.replies, RuntimeError("no reply is left")))
        reply = Reply(reply) if isinstance(reply, str) else reply
        ids = reply.ids
        if ids is None:
            ids = self.ids_by_character(reply.text) + ([] if reply.cut_off else stop)
        is_cut_off = reply.cut_off or len(ids) > max_tokens
        ids, logprobs = ids[:max_tokens], reply.logprobs
        if logprobs == ():
            logprobs = [-(len(self.sampled) + 1) - n / 1000 for n in range(len(ids))]
        self.sampled.append(Sampled(prompt, ids, logprobs))
        return reply, self.sampled[-1], "length" if is_cut_off else "stop"


class FakeTinker(Model):
    """Stands in for Tinker: `open_session` for the class `tinker.ServiceClient`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The sessions, the arguments of each sampling client, and the parameters of each reply.
        self.sessions, self.opened, self.params = [], [], []
        # The model's context limit, which the server tells if it is not None.
        self.context_limit = None
        # What each checkpoint was trained from.
        self.base_model = self.options["model_name"]

    def open_session(self, **arguments: Any) -> "Session":
        self.sessions.append(Session(self, arguments))
        return self.sessions[-1]

    def rest_client(self, **arguments: Any) -> Any:
        """Stands in for the class `tinker.RestClient`, of which one method is used."""
        name = self.options["model_name"]
        card = SimpleNamespace(model_name=name, max_context_length=self.context_limit)

        answer = Future()
        answer.set_result(SimpleNamespace(supported_models=[card]))
        return SimpleNamespace(get_server_capabilities=lambda: answer)


class Session:
    """A session with Tinker, and its sampling clients. Once `status` is set, each answer is an
    error with this status."""

    def __init__(self, fake: FakeTinker, arguments: dict[str, Any]) -> None:
        self.fake, self.arguments, self.status = fake, arguments, None

    def create_sampling_client(self, model_path=None, base_model=None, record_stability_info=False):
        """Like the SDK's, it takes no other arguments."""
        self.fake.opened.append((model_path, base_model, record_stability_info))
        if self.status:
            raise Refusal(self.status)
        created = Future()
        created.set_result(self)
        return created

    def get_base_model(self) -> str:
        return self.fake.base_model

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert num_samples == 1
        return self.answer(prompt.to_ints(), sampling_params)

    async def answer(self, prompt: list[int], params: Any) -> Any:
        fake = self.fake
        fake.params.append(params)
        # A run can be cancelled here.
        await asyncio.sleep(0)
        if self.status:
            raise Refusal(self.status, "Session has been terminated")
        # A stop sequence is a text or an id.
        stop = params.stop[0]
        stop = fake.ids_by_character(stop) if isinstance(stop, str) else [stop]
        reply, turn, reason = await fake.sample(prompt, stop, params.max_tokens)
        _, ids, logprobs = turn
        sequence = SimpleNamespace(tokens=ids, logprobs=logprobs, stop_reason=reason)
        sequence.sequence_id = f"sequence-{len(fake.sampled)}"
        answer = {"sequences": [sequence], "prompt_cache_hit_tokens": None} | reply.answer
        return SimpleNamespace(**answer)


class FakeServer(Model):
    """vLLM's paths and a chat endpoint. It answers the requests to an HTTP server."""

    def __init__(self, http: ThreadingHTTPServer, *arguments: Any, **options: Any) -> None:
        self.url = f"http://127.0.0.1:{http.server_port}"
        super().__init__(*arguments, api_base=self.url, **options)
        # Of each request: path, body and headers.
        self.requests = []
        # From now on the HTTP server has this fake answer.
        http.fake = self

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for requested, body, _ in self.requests if requested == path]

    def headers(self, name: str) -> list[str]:
        return [headers[name] for _, _, headers in self.requests]

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": self.options["model_name"], "max_model_len": 8192}]}
        # The chat endpoint has every model.
        if "chat" not in path and body["model"] != self.options["model_name"]:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(body["tokens"], skip_special_tokens=False)}
        prompt = self.prompt_ids(body)
        if path == "/tokenize":
            return {"tokens": prompt}
        return self.completion(prompt, body)

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        """The ids of a request's prompt. As SmolLM3's chat template does, this one opens thinking
        in the prompt if the system message asks for it."""
        if isinstance(body.get("prompt"), list):
            return body["prompt"]
        if "prompt" in body:
            return self.encode(body["prompt"])
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"]]
        opening = "<think>\n" if body["messages"][0]["content"] == "/think" else ""
        return self.encode("".join(turns) + f"<|im_start|>assistant\n{opening}")

    def completion(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. What it does not ask for is null."""
        stop, max_tokens = self.encode("<|im_end|>"), body.get("max_tokens", 16)
        reply, turn, reason = asyncio.run(self.sample(prompt, stop, max_tokens))
        _, ids, logprobs = turn
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": 0}
        answer = {"id": "1", "created": 1, "model": body["model"], "usage": usage}
        shown = ids[:-1] if reason == "stop" else ids
        skips_special = body.get("skip_special_tokens", True)
        text = self.tokenizer.decode(shown, skip_special_tokens=skips_special)
        given_ids, given_prompt = (ids, prompt) if body.get("return_token_ids") else (None, None)
        choice = {"index": 0, "finish_reason": reason, "token_ids": given_ids, "logprobs": None}
        asks_logprobs = body.get("logprobs") is not None
        if "prompt" in body:
            # /v1/completions
            choice |= {"text": text, "prompt_token_ids": given_prompt, "routed_experts": None}
            if asks_logprobs:
                choice["logprobs"] = {"token_logprobs": logprobs}
        else:
            # /v1/chat/completions
            answer["prompt_token_ids"] = given_prompt
            choice["message"] = {"role": "assistant", "content": text} | reply.message
            if asks_logprobs:
                entry = {"token": "x", "bytes": [], "top_logprobs": []}
                choice["logprobs"] = {"content": [entry | {"logprob": x} for x in logprobs]}
        return answer | {"choices": [choice | reply.choice]} | reply.answer


class HttpHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        fake, status = self.server.fake, 200
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        fake.requests.append((self.path, body, self.headers))
        try:
            answer = fake.answer(self.path, body)
        except Exception as error:
            # A Refusal, or a mistake in this file. Without an answer the client would ask again.
            status = getattr(error, "status_code", 400)
            answer = getattr(error, "body", None) or {"error": {"message": repr(error)}}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        # The openai package waits this long before the next attempt.
        self.send_header("retry-after-ms", "1")
        # What is no JSON is given as bytes.
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        # A client whose run was cancelled no longer reads.
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *arguments: Any) -> None: ...


# ---------------------------------------------------------------------------- runs and fixtures

IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


class AgentRun:
    """An agent at work as in Harbor: `setup`, then `run`, then `resume` for each later step. The
    properties come from the last step's context and files, but `recorded` joins all steps."""

    def __init__(self, agent: Any, environment: Any = None, timeout_sec: Any = None) -> None:
        self.agent, self.environment = agent, environment or FakeEnvironment()
        self.timeout_sec, self.contexts = timeout_sec, []

    def follow(self, *instructions: str) -> Self:
        asyncio.run(self.go(*instructions))
        return self

    async def go(self, *instructions: str) -> None:
        await self.agent.setup(self.environment)
        for instruction in instructions or ["do it"]:
            await self.step(instruction)

    async def step(self, instruction: str = "do it") -> None:
        begin = self.agent.resume if self.contexts else self.agent.run
        self.contexts.append(AgentContext())
        await asyncio.wait_for(begin(instruction, self.environment, self.context), self.timeout_sec)

    @property
    def recorded(self) -> list[Sampled]:
        """The turns of the rollout. Fails if the lists do not align."""
        details = [detail for context in self.contexts for detail in context.rollout_details or []]
        lists = [[detail[name] for name in IDS] for detail in details]
        turns = [Sampled(*turn) for three in lists for turn in zip(*three, strict=True)]
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


def shown_text(error: BaseException) -> str:
    """All that Harbor writes to exception.txt."""
    return "".join(traceback.format_exception(error))


def bash(*commands: str, language: str = "bash") -> str:
    return "\n".join(f"I will run this:\n\n```{language}\n{command}\n```\n" for command in commands)


@dataclass
class columns:
    """Parametrizes a test: `@columns("a b").rows(x=(1, 2), y=(3, 4))` has two cases, named x and y.
    With a single column a row is the value itself, not a tuple."""

    names: str

    def rows(self, **table: Any) -> Any:
        return pytest.mark.parametrize(self.names.replace(" ", ","), table.values(), ids=table)


def virtual_loop() -> asyncio.AbstractEventLoop:
    """An event loop with a time of its own, from 0. If there is nothing else to do, the next timer
    fires at once. While a thread works, it first waits a second at most."""

    class Selector(selectors.DefaultSelector):
        now = 0.0

        def select(self, timeout: float | None = None) -> list:
            if not timeout:  # There is work to do, or no timer.
                return super().select(timeout)
            deadline = time.monotonic() + 1
            waits = True
            while waits and time.monotonic() < deadline:
                # This is asked first, because a thread wakes the loop up before it ends.
                waits = bool(at_work) or any(thread.daemon for thread in new_threads())
                if events := super().select(0.001 if waits else 0):
                    return events
            self.now += timeout
            return []

    earlier_threads = set(threading.enumerate())

    def new_threads() -> set[threading.Thread]:
        return set(threading.enumerate()) - earlier_threads

    loop = asyncio.SelectorEventLoop(selector := Selector())
    loop.time = lambda: selector.now
    at_work = set()
    in_executor = loop.run_in_executor

    def run_in_executor(*args: Any) -> Any:
        at_work.add(future := in_executor(*args))
        future.add_done_callback(at_work.discard)
        return future

    loop.run_in_executor = run_in_executor
    # At its end `asyncio.run` waits for idle threads. They need real time, so without a limit here.
    end_threads = loop.shutdown_default_executor
    loop.shutdown_default_executor = lambda timeout: end_threads()
    return loop


# The special tokens of the cookbook's models, <|im_end|> and so on. No function lists them.
RENDERER_FILES = Path(renderers.__file__).parent.glob("*.py")
RENDERER_SOURCES = "".join(path.read_text() for path in RENDERER_FILES)
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


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    """The folder of a byte-level tokenizer that has these tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello world user assistant bash\n\n```"] * 9, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_special_tokens([f"<\uff5c{name}\uff5c>" for name in DEEPSEEK_TOKENS.split()])
    tokenizer.add_tokens(ADDED_TOKENS.split())
    # With the last argument, which Llama 3's tokenizers have, `decode` drops spaces by default.
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=True
    )
    wrapped.save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return str(folder)


@pytest.fixture
def tinker(tokenizer_dir, tmp_path, monkeypatch) -> FakeTinker:
    # The cookbook takes the folder of a tokenizer for a model's name, too.
    options = {"model_name": tokenizer_dir, "renderer_name": "qwen3_instruct"}
    fake = FakeTinker(tokenizer_dir, logs_dir=tmp_path, **options)
    monkeypatch.setattr("tinker.ServiceClient", fake.open_session)
    monkeypatch.setattr("tinker.RestClient", fake.rest_client)
    return fake


@pytest.fixture(scope="session")
def http() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HttpHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


class RealVllm(FakeServer):
    """Passes each request on to the server at VLLM_BASE_URL, and records what it samples. A test
    that chooses a reply, or reads a prompt's text, is skipped."""

    def skip(self, *arguments: Any) -> None:
        pytest.skip(f"needs the fake: {os.environ['PYTEST_CURRENT_TEST']}")

    will_reply = prompt_text = skip

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": self.headers("Authorization")[-1]}
        method = "POST" if body else "GET"
        answer = httpx.request(
            method, REAL_VLLM + path, json=body or None, headers=headers, timeout=60
        )
        if answer.status_code != 200:
            raise Refusal(answer.status_code, answer.text)
        for choice in answer.json().get("choices", []):
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            self.sampled.append(Sampled(choice["prompt_token_ids"], ids, logprobs))
        return answer.json()


@pytest.fixture
def vllm(http, tokenizer_dir, tmp_path) -> FakeServer:
    options = {"model_name": VLLM_MODEL, "model_client": "vllm", "logs_dir": tmp_path}
    return (RealVllm if REAL_VLLM else FakeServer)(http, tokenizer_dir, **options)


class FakeSglang(FakeServer):
    """Answers as SGLang does, where it differs from vLLM."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().answer(path, body)
        if path == "/detokenize":
            text = answer["prompt"]
            return {
                "text": re.sub("<.*?>", "", text) if body.get("skip_special_tokens", True) else text
            }
        if path == "/tokenize":
            # This limit is the tokenizer's.
            return {"tokens": answer["tokens"], "count": 1, "max_model_len": 10**6}
        for choice in answer.get("choices", []):
            experts = choice.pop("routed_experts")
            if body.get("return_routed_experts"):
                answer["sglext"] = {"routed_experts": experts or "AAAA"}
        return answer


@pytest.fixture
def sglang(http, tokenizer_dir, tmp_path) -> FakeSglang:
    options = {"model_name": "tiny", "model_client": "sglang", "logs_dir": tmp_path}
    return FakeSglang(http, tokenizer_dir, **options)


@pytest.fixture
def chat(http, tokenizer_dir, tmp_path) -> FakeServer:
    options = {"model_name": "openai/tiny", "model_client": "litellm", "logs_dir": tmp_path}
    return FakeServer(http, tokenizer_dir, **options)


@pytest.fixture(params=["tinker", "vllm", "chat"])
def model(request) -> Model:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["vllm", "chat"])
def server(request) -> FakeServer:
    return request.getfixturevalue(request.param)


class OwnLoop(BasicLoopAgent):
    """A user's loop. It makes `max_turns` calls, whatever the replies, with a step after each."""

    def after_turn(self) -> None: ...

    async def converse(self, prompt: str, environment: Any) -> str:
        for _ in range(self.options.max_turns):
            await self.sample(prompt)
            self.after_turn()
            prompt = "go on"
        return "own reason"


def saying(*replies: Any) -> type[BasicLoopAgent]:
    """An agent whose own client gives these replies, as a chat endpoint does. It asks no server."""
    iterator = iter(replies)

    class Client:
        async def call(self, **given: Any) -> LLMResponse:
            return await outcome(next(iterator))

    class SayingAgent(BasicLoopAgent):
        def _build_llm(self) -> Any:
            return Client()

    return SayingAgent


def tinker_error(message: str, category: str) -> Exception:
    category = tinker_sdk.types.RequestErrorCategory(category)
    return tinker_sdk.RequestFailedError(message, request_id="1", category=category)


async def cancelled_after(run: AgentRun, n_steps: int) -> None:
    """Start a run, and cancel it after so many steps of the event loop."""
    await run.agent.setup(run.environment)
    task = asyncio.create_task(run.step())
    for _ in range(n_steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


def always_busy_after(server: FakeServer, *replies: Any) -> Any:
    """In place of `server.sample`: the replies, and then the error of a server that is paused."""
    sample, answers = server.sample, [*replies]
    server.will_reply(*replies)

    async def sample_or_refuse(*arguments: Any) -> tuple:
        if not answers:
            raise Refusal(503, "Generation is paused. Please retry after it resumes.")
        answers.pop()
        return await sample(*arguments)

    return sample_or_refuse


class Restarting:
    """An HTTP server that can be stopped, and started again at the same URL."""

    def __init__(self) -> None:
        self.http, self.port = None, 0

    def start(self, fake: FakeServer) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), HttpHandler)
        self.http.fake, self.port = fake, self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=[0.01]).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def restarting() -> Iterator[Restarting]:
    server = Restarting()
    yield server
    server.stop()


@pytest.fixture
def no_pause(monkeypatch) -> list[float]:
    """Pauses take no time. The fixture is the list of their seconds, without those of none."""
    pauses, sleep = [], asyncio.sleep

    def no_sleep(seconds: float) -> Any:
        # litellm's own tasks also sleep, on a busy machine.
        is_own = sys._getframe(1).f_globals["__name__"] == module.__name__
        pauses.extend([seconds] if seconds and is_own else [])
        return sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    return pauses


class Unused(module.ModelClient):
    """A client that nobody calls."""

    async def call(self, *given: Any, **other: Any) -> Turn:
        raise NotImplementedError


class CountingAgent(BasicLoopAgent):
    """Builds clients that do nothing. `built` holds those that somebody still refers to."""

    built: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def _build_llm(self) -> Any:
        client = Unused()
        self.built.add(client)
        return client


@pytest.fixture
def counting(tmp_path, monkeypatch) -> Any:
    """Makes agents that share no client with those of other tests."""
    monkeypatch.setattr(CountingAgent, "built", weakref.WeakSet())
    monkeypatch.setattr(module, "_clients", {})
    options = {"model_name": "m", "model_client": "litellm", "logs_dir": tmp_path}
    return lambda agent_class=CountingAgent, **given: agent_class(**options | given)


async def finish(*runs: AgentRun) -> list[Any]:
    """Finish runs one after the other, and pass over their errors. Returns their clients."""
    for run in runs:
        await run.agent.setup(run.environment)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await run.step()
    return [run.agent.client for run in runs]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch) -> Iterator[None]:
    """Keys for tests, no Tinker service of an earlier test, and at most ten minutes for a test."""
    for name in [name for name in os.environ if re.match("(OPENAI|VLLM|TINKER)_", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    module.shared_tinker_service.cache_clear()
    module._clients.clear()
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the test takes more than ten minutes"))
    signal.alarm(600)
    yield
    signal.alarm(0)


# -------------------------------------------------------------------------- options and errors

NO_KEY = "model_client=tinker, the default, needs a key: set TINKER_API_KEY"
NO_URL = "model_client=vllm needs the server's URL: set api_base=http://... or VLLM_BASE_URL"
CHAT_OPTIONS = {"model_client": "litellm"}


@pytest.fixture
def no_key(monkeypatch) -> None:
    """Tinker's key is neither in the environment nor stored by the SDK."""
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setattr("tinker.auth.tinker_has_credentials", lambda: False)


class OwnOptions(BasicLoopOptions):
    max_turns: int = 50
    temperature: float | None = 0.5
    token: SecretStr = SecretStr("")
    secret: SecretBytes = SecretBytes(b"")
    left_out: str = Field("", exclude=True)


class OwnDefaults(BasicLoopAgent):
    """A user's agent with defaults of its own."""

    options_model = OwnOptions


class OwnInit(OwnDefaults):
    """A user's agent with a constructor, which passes on what it receives."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.n_checks = 0


def preflight_of_harbor(
    model: str | None,
    given: dict[str, Any],
    env: dict[str, str] | None = None,
    agent_class: type[BasicLoopAgent] = BasicLoopAgent,
) -> None:
    """What `harbor run` does before it makes trials."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    path = f"{__name__}:{agent_class.__name__}"
    config = AgentConfig(import_path=path, model_name=model, kwargs=given, env=env or {})
    AgentFactory.run_preflight(config)


def miles_agent() -> type[BasicLoopAgent]:
    """The agent for the trainer Miles, from the examples' text on trainers."""
    recipes = fenced_blocks((ROOT / "examples/trainers.md").read_text(), "python")
    (code,) = [recipe for recipe in recipes if "class MilesAgent" in recipe]
    exec(code, names := {})
    return names["MilesAgent"]


class TestContract:
    """The interface that people call. Nothing in it may be dropped, renamed, or hidden in **kw."""

    KEYWORDS = {
        "model_name": ("str", inspect.Parameter.empty),
        "model_path": ("str | None", None),
        "renderer_name": ("str | None", None),
        "max_tokens": ("int", 512),
        "temperature": ("float", 1.0),
        "max_turns": ("int", 1),
        "system_prompt": ("str | None", None),
        "model_client": ("str", "tinker"),
        "api_base": ("str | None", None),
    }

    def test_an_agent_takes_these_keywords(self):
        _, *parameters, rest = inspect.signature(BasicLoopAgent.__init__).parameters.values()
        assert {one.kind for one in parameters} == {inspect.Parameter.KEYWORD_ONLY}
        found = {one.name: (one.annotation, one.default) for one in parameters}
        assert list(found.items()) == list(self.KEYWORDS.items())
        assert (rest.name, rest.kind) == ("kw", inspect.Parameter.VAR_KEYWORD)

    @pytest.mark.parametrize("name", [name for name in KEYWORDS if name != "model_name"])
    def test_an_option_has_the_same_default_as_the_keyword(self, name):
        assert BasicLoopOptions.model_fields[name].default == self.KEYWORDS[name][1]

    @columns("name parameters returns is_async").rows(
        version=("version", "self", "str | None", False),
        setup=("setup", "self environment", "None", True),
        run=("run", "self instruction environment context", "None", True),
        build_llm=("_build_llm", "self", "Any", False),
        cache_key=("_cache_key", "self", "tuple", False),
        shared_llm=("_shared_llm", "self", "Any", True),
    )
    def test_a_method_has_this_signature(self, name, parameters, returns, is_async):
        method = getattr(BasicLoopAgent, name)
        signature = inspect.signature(method)
        assert list(signature.parameters) == parameters.split()
        assert signature.return_annotation == returns
        assert inspect.iscoroutinefunction(method) is is_async

    def test_the_name_is_known_without_an_agent(self):
        assert isinstance(inspect.getattr_static(BasicLoopAgent, "name"), staticmethod)
        assert BasicLoopAgent.name() == "basic-loop"

    def test_the_module_converts_a_trial(self):
        assert list(inspect.signature(module._trial_to_trajectory).parameters) == ["trial"]

    def test_an_agent_takes_no_positional_argument(self):
        with pytest.raises(TypeError, match="positional"):
            BasicLoopAgent("Qwen/Qwen3-8B")

    @columns("given expected").rows(
        nothing=({}, (50, 0.5)),
        others=({"max_turns": 7, "temperature": 0.0}, (7, 0.0)),
        the_base_class_defaults=({"max_turns": 1, "temperature": 1.0}, (1, 1.0)),
        none=({"temperature": None}, (50, None)),
    )
    @pytest.mark.parametrize("agent_class", [OwnDefaults, OwnInit])
    def test_what_is_given_wins_over_the_defaults_of_a_subclass(
        self, agent_class, given, expected, counting
    ):
        options = counting(agent_class, **given).options
        assert (options.max_turns, options.temperature) == expected

    def test_what_a_subclass_passes_to_the_constructor_wins_over_its_defaults(self, counting):
        class Fixed(OwnDefaults):
            def __init__(self, max_tokens: int = 512, **kw: Any) -> None:
                super().__init__(max_turns=1, max_tokens=2 * max_tokens, **kw)

        options = counting(Fixed).options
        assert (options.max_turns, options.max_tokens, options.temperature) == (1, 1024, 0.5)

    @since_harbor_023
    def test_preflight_sees_the_defaults_of_a_subclass(self):
        class OnVllm(BasicLoopAgent):
            class options_model(BasicLoopOptions):
                model_client: str = "vllm"

        with pytest.raises(ValueError, match=NO_URL):
            OnVllm.preflight({}, {})

    @since_harbor_023
    def test_harbor_agent_schema_shows_the_defaults_of_a_subclass(self, capsys):
        from harbor.cli.agents import schema_cmd

        schema_cmd(f"{__name__}:OwnDefaults", as_json=True)
        shown = json.loads(capsys.readouterr().out)["properties"]
        found = [shown[name]["default"] for name in ("max_turns", "temperature", "max_tokens")]
        assert found == [50, 0.5, 512]

    MILES: ClassVar = {"model_info": {"max_input_tokens": 9}, "max_seq_len": 4096}

    @since_harbor_023
    def test_preflight_takes_what_miles_passes(self):
        miles_agent().preflight(self.MILES, {})

    def test_miles_agent_has_the_defaults_of_its_recipe(self, counting):
        options = counting(miles_agent(), **self.MILES).options
        limits = (options.max_turns, options.max_tokens, options.max_seq_len)
        assert limits == (50, 4096, 4096)
        assert (options.model_client, options.interleaved_thinking) == ("litellm", True)

    def test_trials_at_once_share_one_build(self, counting):
        async def main() -> list[Any]:
            return await asyncio.gather(*(counting()._shared_llm() for _ in range(20)))

        clients = asyncio.run(main())
        assert len(CountingAgent.built) == len(set(clients)) == 1

    @columns("given").rows(
        option={"max_turns": 2},
        option_that_is_not_in_the_signature={"max_output_bytes": 5},
        model={"model_name": "another"},
        key={"extra_env": {"OPENAI_API_KEY": "another"}},
        subclass={"agent_class": BasicLoopAgent},
    )
    def test_only_equal_trials_have_equal_cache_keys(self, given, counting):
        async def keys() -> list[tuple]:
            agents = (counting(), counting(), counting(**given))
            return [agent._cache_key() for agent in agents]

        first, second, other = asyncio.run(keys())
        assert isinstance(first, tuple)
        assert first == second != other

    def test_another_event_loop_has_another_cache_key(self, counting):
        agent = counting()

        async def key() -> tuple:
            return agent._cache_key()

        # The loops exist at once, so that they are not the same object.
        with asyncio.Runner() as one, asyncio.Runner() as other:
            assert one.run(key()) != other.run(key())


class TestOptions:
    def test_the_options_have_these_defaults(self):
        # The options of Harbor's class are left out, and so are those whose default is None.
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

    POSITIVE = "max_turns max_tokens context_limit max_output_bytes command_timeout_sec"

    @columns("given message").rows(
        temperature=({"temperature": -0.1}, "temperature.*greater than or equal to 0"),
        max_seconds=({"max_seconds": -1}, "max_seconds.*greater than or equal to 0"),
        **{f"{n}_0": ({n: 0}, f"{n}.*greater than 0") for n in [*POSITIVE.split(), "top_p"]},
        temperature_infinite=({"temperature": math.inf}, "temperature.*finite number"),
        top_p=({"top_p": 1.1}, "top_p.*less than or equal to 1"),
        more_than_a_week=({"command_timeout_sec": 604_801}, "less than or equal to 604800"),
        empty_path=({"model_path": ""}, "model_path must begin with tinker://"),
        path_of_a_file=({"model_path": "/tmp/m"}, "model_path must begin with tinker://"),
        model_path_elsewhere=(CHAT_OPTIONS | {"model_path": "x"}, "=tinker: drop it"),
        renderer_elsewhere=(CHAT_OPTIONS | {"renderer_name": "x"}, "=tinker: drop it"),
        url_without_http=({"api_base": "localhost:8000"}, "api_base must be a URL such as"),
        empty_url=(CHAT_OPTIONS | {"api_base": ""}, "api_base must be a URL such as"),
        url_without_host=({"api_base": "http://"}, "api_base must be a URL such as"),
        effort_elsewhere=({"llm_kwargs": {"reasoning_effort": "low"}}, "=litellm: drop it"),
        model_twice=(
            {"llm_kwargs": {"model_name": 1}},
            "llm_kwargs must not contain model_name: the",
        ),
        model_named_otherwise=(
            {"llm_kwargs": {"model": 1}},
            "llm_kwargs must not contain model: the",
        ),
        server_twice=(
            {"api_base": "http://x", "llm_kwargs": {"api_base": "http://y"}},
            "llm_kwargs and the option api_base have",
        ),
        option_twice=(
            {"max_tokens": 2, "llm_kwargs": {"max_tokens": 1}},
            "llm_kwargs and the option max_tokens have",
        ),
        option_twice_once_as_its_default=(
            {"max_tokens": 512, "llm_kwargs": {"max_tokens": 1}},
            "llm_kwargs and the option max_tokens have",
        ),
        option_twice_once_as_null=(
            {"temperature": None, "llm_kwargs": {"temperature": 1.0}},
            "llm_kwargs and the option temperature have",
        ),
        bad_option_in_llm_kwargs=({"llm_kwargs": {"max_tokens": 0}}, "max_tokens.*greater than 0"),
        option_in_extra_body=(
            {"llm_kwargs": {"extra_body": {"temperature": 0.5}}},
            "extra_body must not contain temperature: give",
        ),
        stream=({"llm_kwargs": {"stream": True}}, "llm_kwargs must not contain stream"),
        messages=({"llm_kwargs": {"messages": []}}, "not contain messages: the agent sets it"),
        prompt=({"llm_kwargs": {"prompt": "x"}}, "not contain prompt: the agent sets it"),
        two_replies=({"llm_kwargs": {"n": 2}}, "not contain n: the agent reads one reply"),
        best_of=({"llm_kwargs": {"best_of": 2}}, "not contain best_of: the agent reads one reply"),
        prompt_in_the_reply=(
            {"llm_kwargs": {"echo": True}},
            "not contain echo: the agent reads one",
        ),
        two_replies_in_extra_body=({"llm_kwargs": {"extra_body": {"n": 2}}}, "must not contain n:"),
        truncated_prompt=(
            {"llm_kwargs": {"truncate_prompt_tokens": 9}},
            "not contain truncate_prompt_tokens: the recorded",
        ),
        server_named_otherwise=(
            {"llm_kwargs": {"base_url": "http://y"}},
            "not contain base_url: use the option api_base",
        ),
        limit_elsewhere=(CHAT_OPTIONS | {"context_limit": 9}, "=tinker or vllm or sglang: drop it"),
        stream_in_extra_body=(
            {"llm_kwargs": {"extra_body": {"stream": True}}},
            "not contain stream",
        ),
        text_as_extra_body=(
            {"llm_kwargs": {"extra_body": "x"}},
            "extra_body must be a JSON object",
        ),
        text_as_llm_kwargs=({"llm_kwargs": "n=2"}, "llm_kwargs must be a JSON object, such as"),
        text_as_extra_headers=(
            {"llm_kwargs": {"extra_headers": "x"}},
            "extra_headers must be a JSON object",
        ),
        thinking_of_harbors_class=(
            {"llm_kwargs": {"max_thinking_tokens": 9}},
            "not contain max_thinking_tokens: use thinking={",
        ),
        thinking_of_harbors_class_in_extra_body=(
            {"llm_kwargs": {"extra_body": {"max_thinking_tokens": 9}}},
            "not contain max_thinking_tokens: use thinking={",
        ),
        responses_of_harbors_class=(
            {"llm_kwargs": {"use_responses_api": True}},
            "not contain use_responses_api: name the model openai/responses/NAME",
        ),
    )
    def test_a_bad_option_is_an_error_that_shows_no_key(self, given, message, tmp_path):
        llm_kwargs = given.get("llm_kwargs", {})
        if isinstance(llm_kwargs, dict):
            llm_kwargs = {"api_key": "sk-secret"} | llm_kwargs
        with pytest.raises(ValueError, match=f"(?s){message}") as error:
            BasicLoopAgent(logs_dir=tmp_path, model_name="m", **given | {"llm_kwargs": llm_kwargs})
        assert "sk-secret" not in str(error.value)

    @columns("name value").rows(
        path=("model_path", "tinker://1"),
        renderer=("renderer_name", "qwen3"),
        tokens=("max_tokens", 7),
        temperature=("temperature", 0.25),
        no_temperature=("temperature", None),
        turns=("max_turns", 7),
        system=("system_prompt", "Be brief."),
        client=("model_client", "vllm"),
        url=("api_base", "http://x"),
        top_p=("top_p", 0.25),
        seconds=("max_seconds", 7.0),
        ids=("collect_rollout_details", False),
        limit=("context_limit", 7),
        thinking=("interleaved_thinking", True),
        session=("session_id", "7"),
        script_seconds=("command_timeout_sec", 7),
        bytes=("max_output_bytes", 7),
    )
    def test_an_option_that_is_not_given_is_taken_from_llm_kwargs(self, name, value, tmp_path):
        llm_kwargs = {name: value, "seed": 3}
        agent = BasicLoopAgent(logs_dir=tmp_path, model_name="m", llm_kwargs=llm_kwargs)
        assert (getattr(agent.options, name), agent.options.llm_kwargs) == (value, {"seed": 3})

    def test_an_option_in_llm_kwargs_wins_over_the_default_of_a_subclass(self, counting):
        options = counting(OwnDefaults, llm_kwargs={"max_turns": 7}).options
        assert (options.max_turns, options.temperature) == (7, 0.5)

    def test_llm_kwargs_may_repeat_an_option(self, counting):
        options = counting(max_tokens=7, llm_kwargs={"max_tokens": 7}).options
        assert (options.max_tokens, options.llm_kwargs) == (7, {})

    def test_the_callers_llm_kwargs_stay_as_they_are(self, counting):
        given = {"top_p": 0.5, "extra_body": {"top_k": 3}}
        counting(llm_kwargs=given)
        assert given == {"top_p": 0.5, "extra_body": {"top_k": 3}}

    @since_harbor_023
    def test_preflight_takes_options_from_llm_kwargs(self):
        with pytest.raises(ValueError, match=NO_URL):
            BasicLoopAgent.preflight({"llm_kwargs": {"model_client": "vllm"}}, {})

    # These are SkyRL's own.
    SKYRL: ClassVar = {"timeout": 900, "max_retries": 0, "top_p": 0.75, "top_k": -1, "min_p": 0.0}

    def test_vllm_receives_an_option_from_llm_kwargs(self, vllm):
        vllm.run(llm_kwargs=self.SKYRL | {"model_info": {"max_input_tokens": 9}})
        assert vllm.bodies("/v1/completions")[0]["top_p"] == 0.75

    def test_a_chat_api_receives_an_option_from_llm_kwargs(self, chat):
        chat.run(llm_kwargs={"top_p": 0.75, "max_tokens": 7})
        body = chat.bodies("/v1/chat/completions")[0]
        assert (body["top_p"], body["max_tokens"]) == (0.75, 7)

    @since_harbor_025
    def test_a_chat_api_receives_the_reasoning_effort(self, chat):
        chat.run(reasoning_effort="high")
        assert chat.bodies("/v1/chat/completions")[0]["reasoning_effort"] == "high"

    @since_harbor_025
    def test_a_reasoning_effort_for_another_client_is_an_error(self):
        with pytest.raises(ValueError, match="=litellm: drop it"):
            BasicLoopOptions(reasoning_effort="high")

    @pytest.mark.parametrize("place", ["llm_kwargs", "extra_body"])
    def test_a_chat_api_receives_a_reasoning_effort_among_its_arguments(self, place, chat):
        effort = {"reasoning_effort": "high"}
        chat.run(llm_kwargs={"extra_body": effort} if place == "extra_body" else effort)
        assert chat.bodies("/v1/chat/completions")[0]["reasoning_effort"] == "high"

    @since_harbor_023
    def test_an_unknown_option_is_an_error(self, tmp_path):
        with pytest.raises(ValueError, match="max_turn"):
            BasicLoopAgent(logs_dir=tmp_path, model_name="m", max_turn=3)

    def test_a_wrong_llm_kwargs_is_not_shown(self):
        with pytest.raises(ValueError, match="llm_kwargs") as error:
            BasicLoopOptions(llm_kwargs="sk-secret")
        assert "sk-secret" not in str(error.value)

    # SDKs before 0.38 have no module tinker.auth.
    @pytest.mark.parametrize("missing", ["tinker_cookbook", "tinker.auth"])
    def test_setup_names_missing_or_old_tinker_packages(self, missing, tinker, monkeypatch):
        monkeypatch.setitem(sys.modules, missing, None)
        command = "uv add 'tinker>=0.38' tinker-cookbook"
        with pytest.raises(ValueError, match=f"needs its packages: .*`{command}`"):
            set_up(tinker.agent())

    @since_harbor_023
    @pytest.mark.parametrize("name", ["atif", "resume", "skills", "mcp_servers"])
    def test_a_capability_is_declared(self, name):
        assert getattr(BasicLoopAgent.capabilities, name) is True

    @columns("model given message").rows(
        no_model=(None, {}, "no model: name one with -m"),
        no_provider=("claude", CHAT_OPTIONS, "write -m PROVIDER/NAME"),
        no_url=("hosted_vllm/x", CHAT_OPTIONS, "set api_base=http"),
        no_key=("groq/x", CHAT_OPTIONS, "no API key: set GROQ_API_KEY"),
        no_key_of_two=("gemini/x", CHAT_OPTIONS, "set GOOGLE_API_KEY or GEMINI_API_KEY"),
    )
    @since_harbor_025
    def test_harbor_refuses_a_model_before_any_trial(self, model, given, message):
        with pytest.raises(ValueError, match=message):
            preflight_of_harbor(model, given)

    @columns("model given env").rows(
        key_of_the_agent=("groq/x", {}, {"GROQ_API_KEY": "any"}),
        key_in_llm_kwargs=("groq/x", {"llm_kwargs": {"api_key": "any"}}, {}),
        key_that_litellm_does_not_list=("gemini/x", {}, {"PALM_API_KEY": "any"}),
        url_that_may_need_no_key=("groq/x", {"api_base": "http://localhost:1"}, {}),
        provider_without_keys=("ollama_chat/x", {}, {}),
        cloud_with_other_variables=("bedrock/x", {}, {}),
    )
    @since_harbor_025
    def test_harbor_accepts_a_model_before_any_trial(self, model, given, env):
        preflight_of_harbor(model, CHAT_OPTIONS | given, env)

    @since_harbor_025
    def test_an_agent_with_its_own_client_needs_no_key(self):
        preflight_of_harbor("groq/x", CHAT_OPTIONS, agent_class=CountingAgent)

    @columns("client given error_type message").rows(
        no_model=("tinker", {"model_name": None}, ValueError, "no model: name one with -m"),
        an_unknown_renderer=(
            "tinker",
            {"renderer_name": "qwen9"},
            ValueError,
            "cannot load the renderer qwen9 ",
        ),
        stop=("tinker", {"llm_kwargs": {"stop": "x"}}, TypeError, "argument 'stop'"),
        # `create_sampling_client` takes the rest, and refuses this.
        a_misspelt_argument=("tinker", {"llm_kwargs": {"top_pi": 1}}, module.ApiError, "top_pi"),
        no_url=("vllm", {"api_base": None}, ValueError, NO_URL),
        no_such_model=(
            "vllm",
            {"model_name": "x"},
            RuntimeError,
            "gives no context limit for the model x: its models are",
        ),
        no_provider=("chat", {"model_name": "x"}, ValueError, "write -m PROVIDER/NAME, such as"),
    )
    def test_setup_refuses_what_cannot_work(self, client, given, error_type, message, request):
        with pytest.raises(error_type, match=message):
            set_up(request.getfixturevalue(client).agent(**given))

    @columns("env").rows(none={}, masked_by_harbor={"TINKER_API_KEY": "tml-r****456"})
    def test_setup_refuses_tinker_without_a_key(self, env, tinker, no_key):
        with pytest.raises(ValueError, match=NO_KEY):
            set_up(tinker.agent(extra_env=env))

    def test_a_key_that_tinkers_sdk_has_stored_is_used(self, tinker, no_key, monkeypatch):
        monkeypatch.setattr("tinker.auth.tinker_has_credentials", lambda: True)
        set_up(tinker.agent())
        assert tinker.sessions[0].arguments["api_key"] is None

    # The process has OPENAI_BASE_URL and OPENAI_API_KEY. `agent_env` holds the agent's variables,
    # without OPENAI_. `expected` is the URL and the key. Each value says where it is from.
    @columns("given agent_env expected").rows(
        process=({}, {}, ("process", "process")),
        agent=({}, {"BASE_URL": "http://agent", "API_KEY": "agent"}, ("agent", "agent")),
        api_base=({}, {"BASE_URL": "", "API_BASE": "http://agent"}, ("agent", "process")),
        option=({"api_base": "http://x"}, {"BASE_URL": "http://agent"}, ("x", "process")),
        url_from_a_file=({}, {"BASE_URL": "http://agent\n"}, ("agent", "process")),
        key=({"llm_kwargs": {"api_key": "option"}}, {"API_KEY": "agent"}, ("process", "option")),
        masked_by_harbor=({}, {"API_KEY": "sk-r****456"}, ("process", "process")),
        key_from_a_file=({}, {"API_KEY": " ag\nent\n"}, ("process", "agent")),
    )
    def test_the_first_place_with_a_value_wins(self, given, agent_env, expected, monkeypatch):
        monkeypatch.setenv("OPENAI_BASE_URL", "http://process")
        monkeypatch.setenv("OPENAI_API_KEY", "process")
        options = BasicLoopOptions(**CHAT_OPTIONS, **given)
        agent_env = {f"OPENAI_{name}": value for name, value in agent_env.items()}
        url, key = module.url_and_key(options, "openai", agent_env)
        assert (url, key) == (f"http://{expected[0]}/v1", expected[1])

    @columns("provider url expected").rows(
        openai=("openai", "http://x:1", "http://x:1/v1"),
        with_a_slash=("hosted_vllm", "http://x:1/", "http://x:1/v1"),
        with_a_path=("hosted_vllm", "http://x:1/y", "http://x:1/y"),
        without_a_port=("openai", "http://x", "http://x/v1"),
        https=("openai", "https://x.org", "https://x.org/v1"),
        https_with_a_slash=("hosted_vllm", "https://x.org/", "https://x.org/v1"),
        https_with_a_path=("openai", "https://x.org/y/", "https://x.org/y/"),
        ip_6=("openai", "http://[::1]:8000", "http://[::1]:8000/v1"),
        with_v1=("openai", "http://x/v1", "http://x/v1"),
        another_provider=("anthropic", "http://x:1", "http://x:1"),
    )
    def test_v1_is_added_to_a_url_without_a_path(self, provider, url, expected):
        options = BasicLoopOptions(**CHAT_OPTIONS, api_base=url)
        assert module.url_and_key(options, provider, {})[0] == expected

    # What litellm 1.110 looks up for a provider.
    LOOKED_UP = """
    ai21_chat AI21_API_KEY
    aleph_alpha ALEPH_ALPHA_API_KEY ALEPHALPHA_API_KEY
    apertis STIMA_API_KEY
    anthropic ANTHROPIC_API_KEY ANTHROPIC_API_BASE ANTHROPIC_BASE_URL
    azure AZURE_API_KEY AZURE_OPENAI_API_KEY AZURE_API_BASE
    azure_ai AZURE_AI_API_KEY AZURE_AI_API_BASE
    cohere COHERE_API_KEY CO_API_KEY COHERE_API_BASE
    cohere_chat COHERE_API_KEY CO_API_KEY COHERE_API_BASE
    cometapi COMETAPI_KEY COMETAPI_API_BASE
    datarobot DATAROBOT_API_TOKEN DATAROBOT_ENDPOINT
    dashscope DASHSCOPE_API_KEY DASHSCOPE_API_BASE
    deepseek DEEPSEEK_API_KEY DEEPSEEK_API_BASE
    featherless_ai FEATHERLESS_AI_API_KEY FEATHERLESS_API_KEY FEATHERLESS_API_BASE
    fireworks_ai FIREWORKS_API_KEY FIREWORKS_AI_API_KEY FIREWORKSAI_API_KEY FIREWORKS_AI_TOKEN
    fireworks_ai FIREWORKS_API_BASE
    friendliai FRIENDLIAI_API_KEY FRIENDLI_TOKEN FRIENDLI_API_BASE
    gemini GEMINI_API_KEY GOOGLE_API_KEY PALM_API_KEY GEMINI_API_BASE
    groq GROQ_API_KEY GROQ_API_BASE
    hosted_vllm HOSTED_VLLM_API_KEY HOSTED_VLLM_API_BASE
    huggingface HUGGINGFACE_API_KEY HF_TOKEN HUGGINGFACE_API_BASE HF_API_BASE
    lambda_ai LAMBDA_API_KEY LAMBDA_API_BASE
    meta_llama LLAMA_API_KEY LLAMA_API_BASE
    nano-gpt NANOGPT_API_KEY
    ollama OLLAMA_API_KEY OLLAMA_API_BASE
    ollama_chat OLLAMA_API_KEY OLLAMA_API_BASE
    openrouter OPENROUTER_API_KEY OR_API_KEY OPENROUTER_API_BASE
    perplexity PERPLEXITYAI_API_KEY PERPLEXITY_API_KEY PERPLEXITY_API_BASE
    qwencloud QWENCLOUD_API_KEY DASHSCOPE_API_KEY
    replicate REPLICATE_API_KEY REPLICATE_API_TOKEN REPLICATE_API_BASE
    scaleway SCW_SECRET_KEY
    snowflake SNOWFLAKE_JWT
    tensormesh TENSORMESH_INFERENCE_API_KEY TENSORMESH_SERVERLESS_BASE_URL
    text-completion-openai OPENAI_API_KEY OPENAI_BASE_URL
    together_ai TOGETHER_API_KEY TOGETHER_AI_API_KEY TOGETHERAI_API_KEY TOGETHER_AI_TOKEN
    veniceai VENICE_AI_API_KEY
    vercel_ai_gateway VERCEL_AI_GATEWAY_API_KEY VERCEL_OIDC_TOKEN VERCEL_AI_GATEWAY_API_BASE
    volcengine VOLCENGINE_API_KEY VOLCENGINE_API_BASE
    watsonx WATSONX_APIKEY WATSONX_API_KEY WX_API_KEY WATSONX_API_BASE WATSONX_URL WX_URL WML_URL
    xai XAI_API_KEY XAI_API_BASE
    """
    PAIRS = [
        (provider, name)
        for provider, *names in (line.split() for line in LOOKED_UP.strip().splitlines())
        for name in names
    ]

    @columns("provider name").rows(**{f"{pair[0]}-{pair[1]}": pair for pair in PAIRS})
    def test_each_variable_that_litellm_looks_up_may_be_the_agents(
        self, provider, name, monkeypatch
    ):
        # The process has values under all names of this provider.
        for _, other in [pair for pair in self.PAIRS if pair[0] == provider]:
            monkeypatch.setenv(other, "http://process")
        options = BasicLoopOptions(**CHAT_OPTIONS)
        url, key = module.url_and_key(options, provider, {name: "http://agent/x"})
        assert (url if re.search("BASE|URL|ENDPOINT$", name) else key) == "http://agent/x"

    # Variables of the same company for other servers: the model hub's mirror, Google's other APIs.
    @columns("provider name").rows(
        hugging_face=("huggingface", "HF_ENDPOINT"),
        google=("gemini", "GOOGLE_BASE_URL"),
        openrouter=("openrouter", "OR_URL"),
        azure=("azure_ai", "AZURE_ENDPOINT"),
        wandb=("wandb", "WANDB_BASE_URL"),
    )
    def test_a_url_of_another_server_is_not_the_models(self, provider, name, monkeypatch):
        monkeypatch.setenv(name, "http://process")
        options = BasicLoopOptions(**CHAT_OPTIONS)
        assert module.url_and_key(options, provider, {name: "http://agent"})[0] is None

    @pytest.mark.parametrize(
        "url", ["127.0.0.1:8000", "http://", "https:///v1", "http://h?x", "http://a:b c@h"]
    )
    def test_a_variable_that_holds_no_url_is_an_error(self, url):
        with pytest.raises(ValueError, match="the URL of vllm must be a URL such as"):
            module.url_and_key(BasicLoopOptions(), "vllm", {"VLLM_BASE_URL": url})

    def test_a_masked_key_does_not_hide_a_key_of_the_process(self, monkeypatch):
        monkeypatch.setenv("FIREWORKS_AI_API_KEY", "process")
        options = BasicLoopOptions(**CHAT_OPTIONS)
        masked = {"FIREWORKS_API_KEY": "fw_1****456"}
        assert module.url_and_key(options, "fireworks_ai", masked)[1] == "process"

    def test_a_provider_receives_the_key_of_a_name_that_only_litellm_has(self, chat):
        chat.run(model_name="fireworks_ai/tiny", extra_env={"FIREWORKS_API_KEY": "own"})
        assert chat.headers("Authorization") == ["Bearer own"]

    def test_a_server_of_ones_own_needs_no_key(self):
        options = BasicLoopOptions(**CHAT_OPTIONS, api_base="http://x:1")
        assert module.url_and_key(options, "hosted_vllm", {})[1] == "none"

    def test_vllm_is_reached_by_the_agents_variables(self, vllm):
        # vLLM's /tokenize is not under /v1.
        env = {"VLLM_BASE_URL": f"{vllm.url}/v1/", "VLLM_API_KEY": "own"}
        set_up(vllm.agent(api_base=None, extra_env=env))
        assert vllm.headers("Authorization") == ["Bearer own"]

    @columns("given").rows(
        prefix={"model_name": "openai/tiny"},
        name_that_litellm_knows={"model_name": "gpt-4o"},
        argument={"model_name": "tiny", "llm_kwargs": {"custom_llm_provider": "openai"}},
    )
    def test_a_provider_is_reached_by_the_agents_variables(self, given, chat):
        env = {"OPENAI_BASE_URL": chat.url, "OPENAI_API_KEY": "own"}
        chat.run(api_base=None, extra_env=env, **given)
        assert chat.headers("Authorization") == ["Bearer own"]

    def test_a_key_is_seen_nowhere(self, chat, caplog):
        caplog.set_level("DEBUG")
        done = chat.run(llm_kwargs={"api_key": "sk-2nd"}, extra_env={"OPENAI_API_KEY": "sk-own"})
        seen = [path.read_text() for path in done.agent.logs_dir.glob("*.*")]
        seen += [*caplog.messages, done.context.model_dump_json(), repr(done.agent.options)]
        # What Harbor finds here, it gives to each command.
        seen += [str(getattr(done.agent, "extra_env", ""))]
        assert [text for text in seen if "sk-2nd" in text or "sk-own" in text] == []

    # As they come from a web page or a word processor.
    @columns("key").rows(
        zero_width_space="sk-\u200bsecret",
        byte_order_mark="\ufeffsk-secret",
        typographic_quotes="\u201csk-secret\u201d",
    )
    def test_a_key_with_a_strange_character_is_an_error_that_does_not_show_it(self, key, model):
        env = {f"{name}_API_KEY": key for name in ("TINKER", "VLLM", "OPENAI")}
        message = r"API key for (tinker|vllm|openai) contains an invalid character: copy it again"
        with pytest.raises(ValueError, match=message) as error:
            set_up(model.agent(extra_env=env))
        assert "secret" not in shown_text(error.value)

    @since_harbor_023
    @columns("kwargs env message").rows(
        a_bad_option=({"max_turns": 0}, {}, "max_turns"),
        no_key_for_tinker=({}, {"TINKER_API_KEY": "****"}, NO_KEY),
        no_url_of_vllm=({"model_client": "vllm"}, None, NO_URL),
        an_option_twice=(
            {"top_p": 0.5, "llm_kwargs": {"top_p": 1.0}},
            {},
            "and the option top_p have",
        ),
    )
    def test_preflight_refuses_what_setup_would_refuse(self, kwargs, env, message, no_key):
        with pytest.raises(ValueError, match=message):
            BasicLoopAgent.preflight(kwargs, env)

    @since_harbor_023
    def test_preflight_looks_at_the_agents_variables(self, no_key):
        BasicLoopAgent.preflight({}, {"TINKER_API_KEY": "tml-own"})


# ------------------------------------------------------------------------------------ the loop

WEB = MCPServerConfig(name="web", transport="sse", url="http://mcp:8000/sse")


OUTPUT = "Exit code: 0\nOutput:\n"
GONE = RuntimeError("gone")
LEFT_OUT = {"role": "system", "content": "(left out)"}
# What the loop tells the model of a block that it cannot read, and of a fence after other words.
UNCLOSED = BasicLoopAgent.unclosed_block
MISPLACED = BasicLoopAgent.misplaced_fence


async def two_steps(run: AgentRun) -> None:
    """A first step, whose error is passed over, and a second one."""
    await finish(run)
    await run.step("two")


class TestLoop:
    OPEN = bash("rm x") + "```bash\nrm y"
    # This fence stands after other words.
    LATE = "Let me look: ```bash\nls\n```"

    @columns("replies max_turns scripts stop_reason answer").rows(
        an_answer=(["hi"], 9, [], "completed", "hi"),
        two_scripts=([bash("a"), bash("b"), "hi"], 9, ["a", "b"], "completed", "hi"),
        two_blocks=([bash("a", "b"), "hi"], 9, ["a\nb"], "completed", "hi"),
        a_single_turn=([bash("rm x")], 1, [], "completed", bash("rm x")),
        the_last_turn=([bash("a"), bash("b")], 2, ["a", "b"], "max_turns", bash("b")),
        a_full_context=([bash("a"), FULL], 9, ["a"], "context_overflow", bash("a")),
        an_open_block=([OPEN, "hi"], 9, [], "completed", "hi"),
        an_open_block_in_a_single_turn=([OPEN], 1, [], "completed", OPEN),
        an_open_block_in_the_last_turn=([bash("a"), OPEN], 2, ["a"], "max_turns", OPEN),
    )
    def test_how_a_run_ends(self, replies, max_turns, scripts, stop_reason, answer, model):
        done = model.run(replies, max_turns=max_turns, collect_rollout_details=True)
        assert (done.scripts, done.stop_reason) == (scripts, stop_reason)
        assert (done.completion, done.recorded) == (answer, model.sampled)

    def test_nothing_is_run_of_a_reply_that_is_cut_off(self, model):
        done = model.run([bash("a"), Reply(bash("rm x"), cut_off=True)], max_turns=9)
        assert (done.scripts, done.stop_reason) == (["a"], "max_tokens")
        assert done.completion == bash("rm x")

    def test_the_model_is_told_what_its_script_printed(self, model):
        done = model.run([bash("ls"), "done"], FakeEnvironment("x\ny\n"), max_turns=2)
        assert done.observations == ["Exit code: 0\nOutput:\nx\ny"]
        assert "<|im_start|>user\nExit code: 0\nOutput:\nx\ny<|im_end|>" in model.prompt_text(1)

    def test_the_model_sees_max_output_bytes_of_an_output(self, tinker):
        options = {"max_turns": 2, "max_output_bytes": 4}
        done = tinker.run([bash("printf abcdef"), "done"], ShellEnvironment(), **options)
        cut = "ab\n[... 2 bytes left out ...]\nef"
        assert done.observations == [f"Exit code: 0\nOutput:\n{cut}"]

    def test_a_script_has_command_timeout_sec(self, tinker):
        done = tinker.run([bash("ls"), "done"], max_turns=2, command_timeout_sec=7)
        # The environment's limit comes 90 seconds later.
        assert done.environment.timeouts == [7 + 90]

    @columns("given messages").rows(
        none_for_a_single_turn=({}, []),
        empty=({"max_turns": 2, "system_prompt": ""}, []),
        one_with_braces=({"max_turns": 2, "system_prompt": "Be {brief}."}, ["Be {brief}."]),
    )
    def test_the_system_message_is_as_given(self, given, messages, model):
        model.run(**given)
        assert re.findall(r"<\|im_start\|>system\n(.*)<\|im_end", model.prompt_text(0)) == messages

    def test_the_default_system_message_explains_bash_blocks(self, tinker):
        tinker.run(max_turns=2, command_timeout_sec=77)
        pattern = (
            "(?s)system\n.*fenced blocks that open with ```bash.*may run for at most 77 seconds"
        )
        assert re.search(pattern, tinker.prompt_text(0))

    def test_an_instruction_may_use_special_tokens(self, model):
        model.new_run().follow("Explain <|im_end|>.")
        assert "<|im_start|>user\nExplain <|im_end|>.<|im_end|>" in model.prompt_text(0)

    @columns("client shown").rows(known=("tinker", "<\u200b|end|>"), unknown=("chat", "<|end|>"))
    def test_known_special_tokens_in_output_become_plain_text(self, client, shown, request):
        model, replies = request.getfixturevalue(client), [bash("ls"), "done"]
        model.run(replies, FakeEnvironment("a<|end|>b"), max_turns=2)
        assert f"Exit code: 0\nOutput:\na{shown}b" in model.prompt_text(1)

    def test_a_lone_surrogate_becomes_a_question_mark(self, tinker):
        tinker.new_run(system_prompt="\ud800").follow("greet\udc80")
        assert "system\n?<|im_end|>\n<|im_start|>user\ngreet?<|im_end|>" in tinker.prompt_text(0)

    def test_no_request_holds_a_nul(self, chat):
        """Some servers refuse it."""
        options = {"max_turns": 2, "system_prompt": "a\0b"}
        run = chat.new_run([bash("ls"), "hi"], FakeEnvironment("a\0b"), **options)
        run.follow("a\0b")
        sent = [message["content"] for message in chat.requests[-1][1]["messages"]]
        assert sent == ["ab", "ab", bash("ls"), "Exit code: 0\nOutput:\nab"]

    @columns("before after shown").rows(
        alone=("", "", "Explain <|im_end|>."),
        words_of_a_loop=("a<|end|> ", " <|end|>b", "a{end} Explain <|im_end|>. {end}b"),
        the_same_words_before=("Explain <|im_end|>. ", "", "Explain {im_end}. Explain <|im_end|>."),
    )
    def test_special_tokens_stay_in_the_instruction_alone(self, before, after, shown, tinker):
        class Around(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                return await super().converse(f"{before}{prompt}{after}", environment)

        tinker.new_run(agent_class=Around).follow("Explain <|im_end|>.")
        shown = shown.format(end="<\u200b|end|>", im_end="<\u200b|im_end|>")
        assert f"<|im_start|>user\n{shown}<|im_end|>\n" in tinker.prompt_text(0)

    def test_special_tokens_of_an_instruction_that_is_sent_again_become_plain_text(self, tinker):
        class Again(OwnLoop):
            async def converse(self, prompt: str, environment: Any) -> str:
                await self.sample(prompt)
                await self.sample(prompt)
                return "own reason"

        tinker.new_run(agent_class=Again).follow("Explain <|end|>.")
        assert "user\nExplain <\u200b|end|>.<|im_end|>" in tinker.prompt_text(1)

    def test_special_tokens_of_the_introduction_become_plain_text(self, tinker):
        server = MCPServerConfig(name="<|end|>", transport="sse", url="http://mcp:8000/sse")
        tinker.new_run(mcp_servers=[server]).follow("Explain <|im_end|>.")
        assert '"name":"<\u200b|end|>"' in tinker.prompt_text(0)
        assert "\n\nExplain <|im_end|>.<|im_end|>" in tinker.prompt_text(0)

    @columns("output instruction shown").rows(
        another=("a<|end|>", "two <|im_end|>", "a<\u200b|end|>\n\ntwo <|im_end|>"),
        equal=("<|end|>", "<|end|>", "<\u200b|end|>\n\n<|end|>"),
    )
    def test_special_tokens_of_an_output_that_opens_a_step_become_plain_text(
        self, output, instruction, shown, tinker
    ):
        replies = [bash("a"), bash("b"), "done"]
        run = tinker.new_run(replies, FakeEnvironment("", output), max_turns=2)
        run.follow("one", instruction)
        assert f"user\n{OUTPUT}{shown}<|im_end|>" in tinker.prompt_text(2)

    def test_the_record_has_texts_with_special_tokens_without_zero_width_spaces(self, tinker):
        done = tinker.run([bash("ls"), "done"], FakeEnvironment("a<|end|>b"), max_turns=2)
        assert done.observations == [f"{OUTPUT}a<|end|>b"]
        # No second step shows the output once more.
        assert [step.message for step in done.steps if step.source == "user"] == ["do it"]

    @columns("replies results opening").rows(
        a_first_call_failed=([GONE], [], "do it"),
        a_later_call_failed=([bash("a"), GONE], ["A"], f"{OUTPUT}A"),
        the_context_was_full=([bash("a"), FULL], ["A"], f"{OUTPUT}A"),
        the_time_ended_in_the_first_call=([forever], [], "do it"),
        the_time_ended_in_a_later_call=([bash("a"), forever], ["A"], f"{OUTPUT}A"),
        a_call_was_cancelled=([bash("a"), asyncio.CancelledError()], ["A"], f"{OUTPUT}A"),
        the_last_output=([bash("a"), bash("b")], ["A", "B"], f"{OUTPUT}B"),
        an_open_block=([bash("a"), OPEN], ["A"], UNCLOSED),
        a_misplaced_fence=([bash("a"), LATE], ["A"], MISPLACED),
    )
    def test_what_was_not_sent_opens_the_next_step(self, replies, results, opening, tinker):
        environment = FakeEnvironment(*results)
        run = tinker.new_run([*replies, "hi"], environment, max_turns=2, max_seconds=50)
        asyncio.run(two_steps(run), loop_factory=virtual_loop)
        assert run.steps[0].message == f"{opening}\n\ntwo"

    @columns("replies").rows(
        an_answer=["hi"],
        an_answer_after_a_script=[bash("a"), "hi"],
        a_reply_that_was_cut_off=[bash("a"), Reply(bash("b"), cut_off=True)],
        an_error_of_the_environment=[bash("dies")],
    )
    def test_what_was_sent_is_not_sent_again_in_the_next_step(self, replies, tinker):
        environment = FakeEnvironment(*(["A"] if len(replies) > 1 else [GONE, GONE]))
        run = tinker.new_run([*replies, "hi"], environment, max_turns=2)
        asyncio.run(two_steps(run))
        assert run.steps[0].message == "two"

    def test_what_two_steps_in_a_row_did_not_send_opens_the_third(self, tinker):
        run = tinker.new_run([bash("a"), bash("b"), GONE, "hi"], max_turns=2)
        asyncio.run(finish(run, run))
        asyncio.run(run.step("three"))
        assert run.steps[0].message == f"{OUTPUT}(none)\n\ndo it\n\nthree"

    def test_instructions_of_two_failed_steps_open_the_third(self, tinker):
        run = tinker.new_run([GONE, GONE, "hi"], mcp_servers=[WEB])

        with pytest.raises(module.ApiError):
            asyncio.run(run.go("one"))
        with pytest.raises(module.ApiError):
            asyncio.run(run.step("two"))
        asyncio.run(run.step("three"))
        server = f"MCP server: {WEB.model_dump_json(exclude_none=True)}"
        assert run.steps[0].message == f"{server}\n\none\n\ntwo\n\nthree"

    def test_a_prompt_of_a_loop_that_had_no_reply_is_not_repeated(self, tinker):
        run = tinker.new_run(["hi", GONE, "hi", "hi"], agent_class=OwnLoop, max_turns=2)
        asyncio.run(two_steps(run))
        users = [step.message for step in run.steps if step.source == "user"]
        assert users == ["two", "go on"]

    class Reminds(BasicLoopAgent):
        async def converse(self, prompt: str, environment: Any) -> str:
            return await super().converse(f"{prompt}\n\nremember", environment)

    def test_what_a_loop_added_in_a_step_without_a_turn_is_not_repeated(self, tinker):
        run = tinker.new_run([GONE, "hi"], agent_class=TestLoop.Reminds)
        asyncio.run(finish(run, run))
        assert run.steps[0].message == "do it\n\ndo it\n\nremember"

    def test_a_step_without_a_turn_shows_its_first_prompt(self, tinker):
        run = tinker.new_run([GONE], agent_class=TestLoop.Reminds)
        asyncio.run(finish(run))
        assert run.steps[0].message == "do it"

    def test_what_a_failed_call_did_not_send_is_sent_once_it_can(self, tinker):
        """A loop may catch an error of the model's server, and try again."""

        class Persistent(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                with contextlib.suppress(module.ApiError):
                    await self.sample(prompt)
                return await super().converse(prompt, environment)

        tinker.run([GONE, "hi"], agent_class=Persistent)
        assert tinker.prompt_text(0).count("do it") == 1

    def test_a_second_run_tells_nothing_of_a_first_without_a_turn(self, tinker):
        run = tinker.new_run([RuntimeError("gone"), "hi"])
        asyncio.run(finish(run))
        run.contexts.clear()
        asyncio.run(run.step("two"))
        assert run.steps[0].message == "two"

    class Tool(OwnLoop):
        """Sends what a tool of its own said."""

        async def converse(self, prompt: str, environment: Any) -> str:
            for _ in range(2):
                turn = await self.sample(prompt)
                turn.observation = "a<|im_end|>"
                prompt = f"{turn.observation}\n\ngo on"
            return "own reason"

    def test_what_a_loop_observes_is_sent_as_plain_text(self, tinker):
        done = tinker.run(agent_class=TestLoop.Tool, system_prompt="")
        assert "user\na<\u200b|im_end|>\n\ngo on<|im_end|>" in tinker.prompt_text(1)
        assert done.observations == ["a<|im_end|>"] * 2
        # The step before has the observation.
        users = [step.message for step in done.steps if step.source == "user"]
        assert users == ["do it", "\n\ngo on"]

    def test_an_observation_that_the_loop_does_not_send_is_not_sent(self, tinker):
        class Noted(OwnLoop):
            def after_turn(self) -> None:
                self.turns[-1].observation = "a note"

        done = tinker.run(agent_class=Noted, max_turns=2)
        assert done.observations == ["a note"] * 2
        assert "a note" not in tinker.prompt_text(1)

    def test_a_block_that_is_not_closed_is_told(self, tinker):
        done = tinker.run([TestLoop.OPEN, "done"], max_turns=2)
        assert "Nothing was run. Close each block with a ``` line." in tinker.prompt_text(1)
        assert done.scripts == []

    @columns("reply").rows(
        options="```bash ls -la\n```",
        command_on_the_fence="```bash ls\npwd\n```",
        upper_case="```BASH ls\n```",
        sh="```sh -c ls\n```",
        shell="```shell ls\n```",
        tab="```bash\tls\n```",
        blank_first="``` bash ls\n```",
        title="```bash title=x\nls\n```",
        in_a_list="- ```bash ls\n  ```",
        second_block=f"{bash('rm x')}```bash ls\n```",
        closed_at_the_end_of_a_line="```bash\nls```",
    )
    def test_a_block_with_more_than_its_language_on_the_first_line_is_told(self, reply, tinker):
        done = tinker.run([reply, "done"], max_turns=2)
        assert (done.observations, done.scripts) == ([UNCLOSED], [])

    @columns("reply").rows(
        words_before=LATE,
        word_without_a_blank="run```sh\nls\n```",
        bold="**Run:** ```shell\nls\n```",
        list_item="- Look: ```bash\n  ls\n  ```",
        quotation="> ```bash\n> ls\n> ```",
        second_line="Let me look.\nI run ```bash\nls\n```",
        upper_case="Look: ```BASH\nls\n```",
        blank_before_the_language="Look: ``` bash\nls\n```",
        four_backticks="Look: ````bash\nls\n````",
        tildes="Look: ~~~bash\nls\n~~~",
        carriage_returns="Look: ```bash\r\nls\r\n```",
        not_closed="Look: ```bash\nls",
        commands_beside_it="Look: ```bash ls\npwd\n```",
        one_line="```bash ls```",
        one_line_after_words="Look: ```bash ls```",
        indented_line="  ```sh ls```",
        braces="```{bash}\nls\n```",
        braces_with_a_dot="```{.bash .numberLines}\nls\n```",
        prefix="```language-bash\nls\n```",
        path="```/bin/bash\nls\n```",
        file_name="```bash:run.sh\nls\n```",
        lines="```bash{1,3}\nls\n```",
        session="```shell-session\n$ ls\n```",
        behind_an_open_block="```\nout\n```bash\nls\n```",
        in_a_block_of_markdown="```markdown\n```bash\nrm x\n```\n```\n\n```bash\nls\n```",
    )
    def test_a_fence_that_is_not_on_a_line_of_its_own_is_told(self, reply, tinker):
        done = tinker.run([reply, "done"], max_turns=2)
        assert (done.observations, done.scripts) == ([MISPLACED], [])
        assert "user\nNothing was run. Put ```bash on a line of its own" in tinker.prompt_text(1)

    @columns("reply").rows(
        no_fence="bash and sh are shells.",
        code_in_a_line="I ran `bash x.sh`.",
        another_language="Look: ```python\nprint()\n```",
        longer_word="Look: ```bashrc\nx\n```",
        no_language="```\nls\n```",
        block_of_another_language="```python\nprint()\n```",
    )
    def test_a_reply_without_a_fence_for_the_shell_is_the_answer(self, reply, tinker):
        done = tinker.run([reply], max_turns=2)
        assert (done.stop_reason, done.completion) == ("completed", reply)

    def test_a_misplaced_fence_twice_in_a_row_is_the_answer(self, tinker):
        done = tinker.run([self.LATE, "Again: ```bash\nls\n```"], max_turns=9)
        assert (done.stop_reason, done.scripts) == ("completed", [])
        assert done.completion == "Again: ```bash\nls\n```"

    def test_a_misplaced_fence_in_a_single_turn_is_the_answer(self, tinker):
        done = tinker.run([self.LATE])
        assert (done.stop_reason, done.completion) == ("completed", self.LATE)

    @columns("reply told").rows(script=(bash("ls"), f"{OUTPUT}(none)"), open_block=(OPEN, UNCLOSED))
    def test_a_misplaced_fence_is_told_anew_after_another_reply(self, reply, told, tinker):
        done = tinker.run([self.LATE, reply, self.LATE, "done"], max_turns=9)
        assert done.observations == [MISPLACED, told, MISPLACED]

    class CountsTurns(BasicLoopAgent):
        async def sample(self, prompt: str) -> Turn:
            n_left = self.options.max_turns - len(self.turns)
            return await super().sample(f"{prompt}\n[{n_left} turns left]")

    def test_a_loop_that_tells_the_turns_left_takes_a_repeated_misplaced_fence(self, tinker):
        done = tinker.run([self.LATE] * 2, agent_class=TestLoop.CountsTurns, max_turns=9)
        assert (done.stop_reason, len(done.agent.turns)) == ("completed", 2)
        assert f"user\n{MISPLACED}\n[8 turns left]<|im_end|>" in tinker.prompt_text(1)

    class Checks(BasicLoopAgent):
        async def converse(self, prompt: str, environment: Any) -> str:
            await super().converse(prompt, environment)
            return await super().converse("Check it.", environment)

    @columns("replies answer").rows(
        a_check_that_repeats_it=(["first", "second"], "second"),
        a_script_in_the_check=(["first", bash("ls")], "first"),
        a_check_whose_time_is_over=(["first", bash("ls"), forever], "first"),
        a_truncated_check=(["first", Reply("sec", cut_off=True)], "first"),
        scripts_alone=([bash("a"), bash("b")], bash("b")),
        a_truncated_reply_alone=([bash("a"), Reply("b", cut_off=True)], "b"),
    )
    def test_the_answer_is_the_last_reply_that_is_one(self, replies, answer, tinker):
        agent_class = TestLoop.Checks if replies[0] == "first" else BasicLoopAgent
        done = tinker.new_run(
            replies, agent_class=agent_class, max_turns=len(replies), max_seconds=50
        )
        asyncio.run(done.go(), loop_factory=virtual_loop)
        assert done.completion == answer

    def test_the_tokens_of_a_client_without_usage_are_counted(self, tinker):
        class Silent(module.ModelClient):
            async def call(self, prompt: str, *given: Any, **other: Any) -> Turn:
                return Turn(
                    content="hi", prompt_token_ids=[1, 2], completion_token_ids=[3], logprobs=[-1.0]
                )

        class SilentAgent(BasicLoopAgent):
            def _build_llm(self) -> module.ModelClient:
                return Silent()

        context = tinker.run(agent_class=SilentAgent).context
        assert (context.n_input_tokens, context.n_output_tokens) == (2, 1)

    def test_a_subclass_may_choose_the_answer(self, tinker):
        class Shouts(BasicLoopAgent):
            @property
            def answer(self) -> str:
                return super().answer.upper()

        assert tinker.run(["hello"], agent_class=Shouts).completion == "HELLO"

    def test_a_subclass_may_add_to_the_output(self, tinker):
        class Adds(BasicLoopAgent):
            async def execute(self, blocks: list[str], environment: Any) -> str:
                return await super().execute(blocks, environment) + "\n[3 turns left]"

        done = tinker.run([bash("ls"), "done"], FakeEnvironment("x"), agent_class=Adds, max_turns=2)
        assert done.observations == [f"{OUTPUT}x\n[3 turns left]"]
        assert f"user\n{OUTPUT}x\n[3 turns left]<|im_end|>" in tinker.prompt_text(1)

    def test_a_subclass_may_choose_the_languages(self, tinker):
        class Zsh(BasicLoopAgent):
            languages = ("zsh",)

        replies = [bash("a", language="zsh"), "Look: ```zsh\nb\n```", bash("c")]
        done = tinker.run(replies, agent_class=Zsh, max_turns=9)
        assert (done.scripts, done.observations[1:]) == (["a"], [MISPLACED])

    def test_a_loop_may_go_on_after_an_answer(self, tinker):
        class Twice(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                await super().converse(prompt, environment)
                return await super().converse(f"Check it: {self.instruction}", environment)

        done = tinker.run([bash("a"), "hi", "checked"], agent_class=Twice, max_turns=9)
        assert (done.completion, done.metadata["n_prefix_breaks"]) == ("checked", 0)
        assert [step.message for step in done.steps if step.source == "user"][
            1
        ] == "Check it: do it"

    def test_max_turns_holds_for_all_of_a_run(self, tinker):
        class Again(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                await super().converse(prompt, environment)
                return await super().converse("go on", environment)

        done = tinker.run([bash("a"), bash("b")], agent_class=Again, max_turns=2)
        assert (done.stop_reason, len(tinker.sampled)) == ("max_turns", 2)

    def test_a_script_may_run_before_the_first_turn(self, tinker):
        class Prepared(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                output = await self.execute(["ls"], environment)
                return await super().converse(f"{prompt}\n\n{output}", environment)

        tinker.run((), FakeEnvironment("files"), agent_class=Prepared)
        assert "do it\n\nExit code: 0\nOutput:\nfiles" in tinker.prompt_text(0)

    def test_a_resumed_step_has_metadata_of_its_own(self, tinker, monkeypatch):
        def count(agent: OwnLoop) -> None:
            agent.metadata["n"] = agent.metadata.get("n", 0) + 1

        monkeypatch.setattr(OwnLoop, "after_turn", count)
        done = tinker.new_run(agent_class=OwnLoop).follow("one", "two")
        assert done.metadata["n"] == 1

    def test_a_second_run_starts_a_new_conversation(self, tinker):
        used = tinker.run([bash("a"), bash("b")], max_turns=2).agent
        tinker.will_reply("done")
        asyncio.run(used.run("do it", FakeEnvironment(), AgentContext()))
        tinker.run(["done"], max_turns=2)
        _, _, second, fresh = tinker.sampled
        assert second.prompt == fresh.prompt

    def test_the_model_is_told_of_the_front_of_each_skill(self, tinker, tmp_path):
        file = tmp_path / "my skills/pdf/SKILL.md"
        file.parent.mkdir(parents=True)
        file.write_text(f"---\nname: pdf\n---\n{2_000 * 'x'}")
        # `max_output_bytes` does not apply to the list.
        options = {"skills_dir": str(tmp_path / "my skills"), "max_output_bytes": 9}
        message = tinker.run((), ShellEnvironment(), **options).steps[0].message
        intro = "Skills. Read a skill's whole file before you use the skill."
        front = f"---\nname: pdf\n---\n{1_482 * 'x'}"
        assert message == f"{intro}\n\n==> {file} <==\n{front}\n\ndo it"

    def test_each_skill_is_listed(self, tinker, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "SKILL.md").write_text(f"---\nname: {name}\n---\ntext\n")
        message = tinker.run((), ShellEnvironment(), skills_dir=str(tmp_path)).steps[0].message
        assert re.findall("^name: (.*)$", message, re.M) == ["one", "two"]

    def test_the_model_is_told_once_of_the_tasks_servers(self, tinker):
        tinker.new_run(mcp_servers=[WEB]).follow("one", "two")
        told = f"MCP server: {WEB.model_dump_json(exclude_none=True)}\n\none"
        assert told in tinker.prompt_text(1)
        assert tinker.prompt_text(1).count("MCP server") == 1

    def test_a_second_setup_tells_nothing_twice(self, tinker):
        run = tinker.new_run(mcp_servers=[WEB])
        set_up(run.agent)
        run.follow("one")
        assert tinker.prompt_text(0).count("MCP server") == 1

    def test_a_subclass_may_run_python(self, tinker):
        class PythonAgent(BasicLoopAgent):
            languages = ("python",)

        replies = [bash("x()", language="python"), bash("ls")]
        assert tinker.run(replies, agent_class=PythonAgent, max_turns=9).scripts == ["x()"]

    def test_the_example_with_a_tool_bounds_its_results(self, tinker, tmp_path):
        from examples.search import MAX_CHARACTERS, Search

        (tmp_path / "manual.md").write_text("word " * 1000)
        replies = [9 * f"{bash('word', language='search')}\n", "done"]
        done = tinker.run(replies, agent_class=Search, max_turns=2, docs=str(tmp_path))
        (seen,) = done.observations
        assert seen.startswith("Search results:\nmanual.md: word")
        assert len(seen) == MAX_CHARACTERS

    def test_a_client_of_ones_own_may_give_harbors_response(self, chat):
        # ScriptedAgent's client asks no server. Its replies are in examples/fakes.py.
        done = chat.run((), ShellEnvironment(), agent_class=ScriptedAgent, max_turns=2)
        assert done.observations == ["Exit code: 0\nOutput:\nhello from the script"]
        assert done.completion == "Hello, world!"

    @since_harbor_023
    def test_a_client_of_ones_own_needs_no_key(self, no_key):
        ScriptedAgent.preflight({}, {})

    @columns("edited n_turns").rows(never=(None, [3]), after_the_second_turn=(2, [2, 1]))
    def test_a_recipe_merges_turns_into_sequences(self, edited, n_turns, tinker, monkeypatch):
        def edit(agent: OwnLoop) -> None:
            if len(agent.turns) == edited:
                agent.messages = [LEFT_OUT, *agent.messages[1:]]

        recipes = fenced_blocks((ROOT / "examples/trainers.md").read_text(), "python")
        exec(next(recipe for recipe in recipes if "def sequences" in recipe), names := {})
        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        turns = tinker.run(agent_class=OwnLoop, max_turns=3).agent.turns
        rest = iter(turns)
        for sequence, n in zip(names["sequences"](turns), n_turns, strict=True):
            own = list(itertools.islice(rest, n))
            assert sequence["ids"] == own[-1].ids
            sampled = [token for token in zip(*sequence.values(), strict=True) if token[1]]
            pairs = [zip(turn.completion_token_ids, turn.logprobs, strict=True) for turn in own]
            assert sampled == [(x, 1, logprob) for pair in pairs for x, logprob in pair]

    def test_an_example_tries_a_loop_without_a_job(self, tmp_path):
        """It tries the recipe that stops a model which repeats its script."""
        recipes = fenced_blocks((ROOT / "examples/recipes.md").read_text(), "python")
        (recipe,) = [recipe for recipe in recipes if "class StopsRepeats" in recipe]
        (tmp_path / "my_agent.py").write_text(recipe)
        command = [sys.executable, str(ROOT / "examples/try_loop.py"), "my_agent:StopsRepeats"]
        env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        printed = subprocess.check_output(command, env=env, cwd=tmp_path, text=True)
        assert printed.endswith("\nmetadata: {'stop_reason': 'repeats', 'n_episodes': 3}\n")

    def test_a_client_may_sample_twice_for_a_reply(self, tinker):
        """What it returns is recorded."""

        class Two(module.ModelClient):
            async def call(self, prompt: str, message_history: Any, **other: Any) -> Turn:
                await inner.call(prompt, message_history, **other)
                return await inner.call(prompt, message_history, **other)

        class TwoAgent(BasicLoopAgent):
            def _build_llm(self) -> Any:
                return Two()

        (inner,) = set_up(tinker.agent())
        done = tinker.run(["first", "second"], agent_class=TwoAgent)
        assert (done.completion, done.recorded) == ("second", tinker.sampled[1:])

    def test_a_client_may_be_called_as_harbors_own(self, model):
        model.will_reply("hello")
        (client,) = set_up(model.agent())
        assert asyncio.run(client.call("hi", message_history=[])).content == "hello"

    def test_an_edited_conversation_is_rendered_anew_once(self, tinker, monkeypatch):
        def edit(agent: OwnLoop) -> None:
            if len(agent.turns) == 2:
                agent.messages = [LEFT_OUT, *agent.messages[1:]]

        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        done = tinker.run(agent_class=OwnLoop, max_turns=4)
        assert tinker.prompt_text(2).startswith("<|im_start|>system\n(left out)<|im_end|>")
        assert done.metadata["n_prefix_breaks"] == 1

    def test_messages_cannot_be_appended_to(self, tinker):
        agent = tinker.run().agent
        with pytest.raises(AttributeError):
            agent.messages.append(LEFT_OUT)

    def test_a_slice_of_messages_cannot_be_assigned(self, tinker):
        agent = tinker.run().agent
        with pytest.raises(TypeError):
            agent.messages[:] = [LEFT_OUT]

    def test_a_message_is_a_copy(self, tinker, monkeypatch):
        def spoil(agent: OwnLoop) -> None:
            agent.messages[-1]["content"] = "(left out)"

        monkeypatch.setattr(OwnLoop, "after_turn", spoil)
        done = tinker.run(agent_class=OwnLoop, max_turns=2)
        said = ["do it", "hello", "go on", "hello"]
        assert [message["content"] for message in done.agent.messages[1:]] == said

    def test_assigned_messages_are_copied(self, tinker, monkeypatch):
        def edit(agent: OwnLoop) -> None:
            agent.messages = mine = [LEFT_OUT.copy()]
            mine[0]["content"] = "mine"
            mine.append(LEFT_OUT)

        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        tinker.run(agent_class=OwnLoop, max_turns=2)
        opening = "<|im_start|>system\n(left out)<|im_end|>\n<|im_start|>user\ngo on<|im_end|>"
        assert tinker.prompt_text(1).startswith(opening)

    @columns("replies opening").rows(prompt=([GONE], "do it"), output=([bash("a")], f"{OUTPUT}A"))
    def test_edited_messages_do_not_drop_what_was_not_sent(self, replies, opening, tinker):
        class LastOutput(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                turn = await self.sample(prompt)
                turn.observation = await self.execute(["a"], environment)
                return "own reason"

        run = tinker.new_run([*replies, "hi"], FakeEnvironment("A"), agent_class=LastOutput)
        asyncio.run(finish(run))
        run.agent.messages = [LEFT_OUT]
        asyncio.run(run.step("two"))
        assert run.steps[0].message == f"{opening}\n\ntwo"
        texts = [message["content"] for message in run.agent.messages]
        assert texts == ["(left out)", f"{opening}\n\ntwo", "hi"]

    def test_a_client_receives_no_previous_turn_after_an_edit(self, chat, monkeypatch):
        previous = []

        class Numbered(module.ModelClient):
            async def call(self, *given: Any, **other: Any) -> Turn:
                previous.append(other["previous"] and other["previous"].content)
                return Turn(content=str(len(previous)))

        def edit(agent: OwnLoop) -> None:
            if len(agent.turns) == 2:
                agent.messages = agent.messages[2:]

        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        monkeypatch.setattr(OwnLoop, "_build_llm", lambda agent: Numbered())
        chat.new_run(agent_class=OwnLoop, max_turns=4).follow("one", "two")
        assert previous == [None, "1", None, "3", "4", "5", None, "7"]

    def test_a_full_context_after_an_edit_ends_the_run_as_a_full_context(self, tinker):
        class Edits(BasicLoopAgent):
            async def execute(self, blocks: list[str], environment: Any) -> str:
                self.messages = []
                return await super().execute(blocks, environment)

        done = tinker.run([bash("a"), FULL], agent_class=Edits, max_turns=9)
        assert done.stop_reason == "context_overflow"

    def test_a_full_context_at_the_start_of_a_second_run_is_an_error(self, tinker):
        run = tinker.new_run(["hi", FULL]).follow()
        run.contexts.clear()
        with pytest.raises(module.ApiError):
            asyncio.run(run.step())

    @columns("given expected").rows(none=({}, math.inf), a_limit=({"max_seconds": 100}, 90))
    def test_a_loop_sees_the_seconds_left(self, given, expected, tinker, monkeypatch):
        async def slow() -> str:
            await asyncio.sleep(10)
            return "hi"

        left = []
        monkeypatch.setattr(OwnLoop, "after_turn", lambda agent: left.append(agent.seconds_left))
        run = tinker.new_run([slow], agent_class=OwnLoop, **given)
        asyncio.run(run.go(), loop_factory=virtual_loop)
        assert left == [expected]

    @columns("given expected").rows(
        none=({}, 90), zero=({"max_seconds": 0}, math.inf), more=({"max_seconds": 500}, 500)
    )
    def test_the_tasks_timeout_is_the_limit_unless_max_seconds_is_given(
        self, given, expected, tinker, tmp_path, monkeypatch
    ):
        (tmp_path / "task").mkdir()
        (tmp_path / "task/task.toml").write_text("[agent]\ntimeout_sec = 100.0\n")
        (tmp_path / "trial/agent").mkdir(parents=True)
        config = {"task": {"path": str(tmp_path / "task")}}
        (tmp_path / "trial/config.json").write_text(json.dumps(config))
        left = []
        monkeypatch.setattr(OwnLoop, "after_turn", lambda agent: left.append(agent.seconds_left))
        run = tinker.new_run(agent_class=OwnLoop, logs_dir=tmp_path / "trial/agent", **given)
        asyncio.run(run.go(), loop_factory=virtual_loop)
        assert left == [expected]

    @columns("prompt completion").rows(
        no_prompt=(None, [9]), no_completion=([1], None), no_token=([1], [])
    )
    def test_after_a_turn_without_ids_all_is_rendered(
        self, prompt, completion, tinker, monkeypatch
    ):
        async def render(messages: list[dict]) -> list[int]:
            return [len(messages)]

        (client,) = set_up(tinker.agent())
        monkeypatch.setattr(client, "render", render)
        previous = Turn(prompt_token_ids=prompt, completion_token_ids=completion)
        messages = [{"role": "user", "content": text} for text in ("q", "n")]
        assert asyncio.run(client.next_prompt(messages, previous)) == [2]

    def test_only_trainable_turns_have_prefix_breaks(self, tinker, monkeypatch):
        def edit(agent: OwnLoop) -> None:
            agent.messages = [LEFT_OUT, *agent.messages[1:]]

        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        replies = [Reply("hi", logprobs=[-1.0]), "hi"]
        done = tinker.run(replies, agent_class=OwnLoop, max_turns=2)
        assert (done.metadata["n_turns_without_ids"], done.metadata["n_prefix_breaks"]) == (1, 0)

    @columns("kept seen").rows(
        JSON=({"judge": {"score": 0.5}}, {"judge": {"score": 0.5}}),
        object=({"by": Path("me")}, {"by": "me"}),
        key_that_is_no_text=({("no", "text"): 1}, {"no,text": 1}),
        infinite=({"loss": math.inf}, {"loss": None}),
        a_name_of_the_agents=({"stop_reason": "x"}, {"stop_reason": "x"}),
    )
    def test_what_a_loop_keeps_is_in_the_metadata(self, kept, seen, tinker, monkeypatch):
        monkeypatch.setattr(OwnLoop, "after_turn", lambda agent: agent.metadata.update(kept))
        counts = {"n_episodes": 1, "n_turns_without_ids": 0, "n_prefix_breaks": 0}
        expected = {"stop_reason": "own reason", **counts, **seen}
        assert tinker.run(agent_class=OwnLoop).metadata == expected

    # Harbor could not save the second one, and would end the whole job.
    @columns("metadata").rows(no_dict=None, half_a_character={"x": "\ud83d"})
    def test_bad_metadata_is_an_error_and_is_not_saved(self, metadata, tinker, monkeypatch):
        def replace(agent: BasicLoopAgent) -> None:
            agent.metadata = metadata

        monkeypatch.setattr(OwnLoop, "after_turn", replace)
        failed = tinker.new_run(agent_class=OwnLoop)
        with pytest.raises(RuntimeRequestError, match="the run could not be recorded: "):
            failed.follow()
        assert failed.context.model_dump_json()

    # Harbor cannot save either value, which would end the whole job.
    @columns("value").rows(half_a_character="\ud83d", object=object())
    def test_a_bad_extra_value_of_a_turn_is_an_error_and_is_not_saved(
        self, value, tinker, monkeypatch
    ):
        def add(agent: BasicLoopAgent) -> None:
            agent.turns[-1].extra["x"] = value

        monkeypatch.setattr(OwnLoop, "after_turn", add)
        failed = tinker.new_run(agent_class=OwnLoop)
        with pytest.raises(RuntimeRequestError, match="the run could not be recorded: "):
            failed.follow()
        assert failed.context.model_dump_json()

    def test_an_execute_that_returns_nothing_is_an_error(self, tinker):
        class ReturnsNothing(BasicLoopAgent):
            async def execute(self, blocks: list[str], environment: Any) -> str:
                await super().execute(blocks, environment)

        with pytest.raises(
            RuntimeRequestError, match=r"not None: did .*ReturnsNothing\.execute return it"
        ):
            tinker.run([bash("ls")], agent_class=ReturnsNothing, max_turns=2)

    def test_the_error_of_a_loop_names_its_line(self, tinker):
        class Fails(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                return {}["no such key"]

        with pytest.raises(RuntimeRequestError) as error:
            tinker.run(agent_class=Fails)
        number = re.search(r"\(test_basic_loop_agent.py, line (\d+)\)$", str(error.value))[1]
        assert "no such key" in Path(__file__).read_text().splitlines()[int(number) - 1]

    def test_a_sample_that_returns_nothing_is_an_error(self, tinker):
        class ReturnsNothing(BasicLoopAgent):
            async def sample(self, prompt: str) -> None:
                await super().sample(prompt)

        with pytest.raises(RuntimeRequestError, match="`sample` must return the turn"):
            tinker.run(agent_class=ReturnsNothing)

    def test_half_a_character_in_the_error_of_a_loop_can_be_saved(self, tinker):
        """Harbor would end the whole job at such a text."""

        class Fails(BasicLoopAgent):
            async def execute(self, blocks: list[str], environment: Any) -> str:
                raise ValueError(json.loads(r'"caf\ud83d"'))

        with pytest.raises(RuntimeRequestError, match=r"ValueError: caf\?") as error:
            tinker.run([bash("ls")], agent_class=Fails, max_turns=2)
        assert shown_text(error.value).encode()

    def test_half_a_character_in_the_error_of_a_server_ends_no_job(self, vllm, monkeypatch):
        def refuse(path: str, body: Any) -> None:
            raise Refusal(401, body={"error": {"message": "caf\ud83d"}})

        monkeypatch.setattr(vllm, "answer", refuse)
        trial = run_job(vllm, RIGHT)
        assert trial.exception_info.exception_type == "ApiError"
        assert "caf?" in trial.exception_info.exception_message

    def test_the_error_of_a_base_class_names_its_line(self, tinker):
        """Also if the subclass was sent by value, so that its module is not in this process."""

        class Fails(BasicLoopAgent):
            async def execute(self, blocks: list[str], environment: Any) -> str:
                raise ValueError("mine")

        class Sent(Fails):
            __module__ = "elsewhere"

        message = r"mine \(test_basic_loop_agent\.py, line \d+\)"
        with pytest.raises(RuntimeRequestError, match=message):
            tinker.run([bash("ls")], agent_class=Sent, max_turns=2)

    def test_a_loop_that_returns_nothing_is_an_error(self, tinker):
        class ReturnsNothing(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                await super().converse(prompt, environment)

        with pytest.raises(
            RuntimeRequestError, match=r"ReturnsNothing\.converse must return a string, not None"
        ):
            tinker.run(agent_class=ReturnsNothing)


# ---------------------------------------------------------------------------- limits and endings


# A run waits for the last of these replies, or for the last of the environment's results.
each_way_to_wait = columns("replies results").rows(
    model=([bash("ls"), forever], [""]), script=([bash("ls"), bash("ls")], ["", forever])
)


# The finish reasons of a server that has failed.
FAILED = """
abort aborted cancelled canceled error failed time_limit timeout insufficient_system_resource
network_error engine_overloaded overloaded server_error malformed_response malformed_model_output
"""


def written_trial(folder: Path, task_toml: str, begun: str = "", **config: Any) -> Path:
    """What Harbor has written before a run: a task, and a trial with the folders of the steps that
    have begun. Returns the agent's log folder."""
    (folder / "task").mkdir(parents=True)
    (folder / "task/task.toml").write_text(task_toml)
    for name in ["agent", *(f"steps/{step}" for step in begun.split())]:
        (folder / "trial" / name).mkdir(parents=True)
    trial = TrialConfig(**{"task": {"path": folder / "task"}} | config)
    (folder / "trial/config.json").write_text(trial.model_dump_json())
    return folder / "trial/agent"


class AsksTheTime(saying()):
    """Asks no model, and ends at once."""

    async def converse(self, prompt: str, environment: Any) -> str:
        self.left = self.seconds_left
        return "own reason"


def seconds_of_a_run(chat: FakeServer, logs_dir: Path, **options: Any) -> float:
    run = chat.new_run(agent_class=AsksTheTime, logs_dir=logs_dir, **options)
    asyncio.run(run.go(), loop_factory=virtual_loop)
    return run.agent.left


class TestTheTimeLimit:
    THOUSAND = "[agent]\ntimeout_sec = 1000"

    # The margin is 30 seconds here.
    @columns("config seconds").rows(
        the_tasks_own=({}, 970),
        less_for_the_job=({"agent": {"override_timeout_sec": 500}}, 470),
        more_for_the_job=({"agent": {"override_timeout_sec": 2000}}, 1970),
        at_most=({"agent": {"max_timeout_sec": 900}}, 870),
        a_higher_maximum=({"agent": {"max_timeout_sec": 1100}}, 970),
        more_for_the_job_but_at_most=(
            {"agent": {"override_timeout_sec": 2000, "max_timeout_sec": 900}},
            870,
        ),
        multiplied=({"timeout_multiplier": 2}, 1970),
        multiplied_for_the_agent=({"agent_timeout_multiplier": 0.5}, 470),
        multiplied_for_the_agent_and_for_all=(
            {"agent_timeout_multiplier": 1, "timeout_multiplier": 2},
            970,
        ),
        the_maximum_is_multiplied=(
            {"agent": {"max_timeout_sec": 900}, "agent_timeout_multiplier": 0.5},
            420,
        ),
    )
    def test_a_run_has_the_timeout_that_harbor_gives_the_agent(
        self, config, seconds, chat, tmp_path
    ):
        logs_dir = written_trial(tmp_path, self.THOUSAND, **config)
        assert seconds_of_a_run(chat, logs_dir) == seconds

    @columns("config seconds").rows(
        none=({}, math.inf),
        only_a_maximum=({"agent": {"max_timeout_sec": 900}}, 870),
        only_for_the_job=({"agent": {"override_timeout_sec": 500}}, 470),
    )
    def test_a_task_may_have_no_timeout(self, config, seconds, chat, tmp_path):
        logs_dir = written_trial(tmp_path, "", **config)
        assert seconds_of_a_run(chat, logs_dir) == seconds

    @columns("begun seconds").rows(
        own_timeout=("one", 770),
        the_tasks_timeout=("one two", 970),
        the_last_one_that_began=("one two three", 1970),
        none_has_begun=("", 970),
    )
    def test_each_step_has_its_own_timeout(self, begun, seconds, chat, tmp_path):
        steps = """
        [[steps]]
        name = "one"
        agent.timeout_sec = 800
        [[steps]]
        name = "two"
        [[steps]]
        name = "three"
        agent.timeout_sec = 2000
        """
        logs_dir = written_trial(tmp_path, self.THOUSAND + steps, begun)
        assert seconds_of_a_run(chat, logs_dir) == seconds

    @columns("task").rows(
        git={"git_url": "https://example.com/tasks.git", "path": "tasks/hello"},
        dataset={"name": "harbor/hello", "ref": f"sha256:{'a' * 64}"},
    )
    def test_the_timeout_of_a_task_that_harbor_downloaded_is_known(
        self, task, chat, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("harbor.models.task.id.TASK_CACHE_DIR", tmp_path / "cache")
        monkeypatch.setattr("harbor.models.task.id.PACKAGE_CACHE_DIR", tmp_path / "cache")
        logs_dir = written_trial(tmp_path, "", task=task)
        downloaded = TrialConfig(task=task).task.get_local_path()
        downloaded.mkdir(parents=True)
        (downloaded / "task.toml").write_text(self.THOUSAND)
        assert seconds_of_a_run(chat, logs_dir) == 970

    @columns("path text").rows(
        no_config=("trial/config.json", None),
        another_programs_config=("trial/config.json", '{"model": "tiny"}'),
        another_programs_list=("trial/config.json", "[]"),
        no_JSON=("trial/config.json", "timeout: 3"),
        not_UTF8=("trial/config.json", b"\xff"),
        a_dataset_without_a_digest=("trial/config.json", '{"task": {"name": "harbor/hello"}}'),
        no_task=("task/task.toml", None),
        a_broken_task=("task/task.toml", "[agent"),
        a_wrong_timeout=("task/task.toml", "[agent]\ntimeout_sec = 'long'"),
    )
    def test_a_timeout_that_cannot_be_read_is_no_limit(self, path, text, chat, tmp_path):
        logs_dir = written_trial(tmp_path, self.THOUSAND)
        (tmp_path / path).unlink()
        if text is not None:
            (tmp_path / path).write_bytes(text if isinstance(text, bytes) else text.encode())
        assert seconds_of_a_run(chat, logs_dir) == math.inf

    @columns("timeout seconds").rows(
        short=(20, 18), minutes=(299, 269.1), five_minutes=(300, 270), an_hour=(3600, 3570)
    )
    def test_a_run_ends_a_tenth_or_half_a_minute_earlier(self, timeout, seconds, chat, tmp_path):
        logs_dir = written_trial(tmp_path, f"[agent]\ntimeout_sec = {timeout}")
        assert seconds_of_a_run(chat, logs_dir) == pytest.approx(seconds)

    @columns("max_seconds seconds").rows(less=(5, 5), more=(5000, 5000), no_limit=(0, math.inf))
    def test_max_seconds_is_taken_as_it_is(self, max_seconds, seconds, chat, tmp_path):
        logs_dir = written_trial(tmp_path, self.THOUSAND)
        assert seconds_of_a_run(chat, logs_dir, max_seconds=max_seconds) == seconds

    def test_without_a_trial_there_is_no_limit(self, chat):
        assert seconds_of_a_run(chat, chat.options["logs_dir"]) == math.inf

    def test_the_tasks_timeout_is_no_option(self, chat, tmp_path):
        run = chat.new_run(logs_dir=written_trial(tmp_path, self.THOUSAND)).follow()
        assert run.agent.options.max_seconds is None

    @columns("options").rows(the_tasks=({}, {}), given=({"max_seconds": 5}, {"max_seconds": 6}))
    def test_trials_with_different_limits_share_a_client(self, options, chat, tmp_path):
        one = written_trial(tmp_path / "a", self.THOUSAND)
        other = written_trial(tmp_path / "b", "")
        pairs = zip((one, other), options, strict=True)
        runs = [chat.new_run(logs_dir=logs_dir, **given) for logs_dir, given in pairs]
        first, second = asyncio.run(finish(*runs))
        assert first is second

    @each_way_to_wait
    def test_a_trial_ends_before_harbor_cancels_it(self, replies, results, tinker, tmp_path):
        logs_dir = written_trial(tmp_path, "[agent]\ntimeout_sec = 50")
        run = tinker.new_run(
            replies, FakeEnvironment(*results), timeout_sec=50, logs_dir=logs_dir, max_turns=2
        )
        asyncio.run(run.go(), loop_factory=virtual_loop)
        assert (run.stop_reason, run.recorded) == ("rollout_timeout", tinker.sampled)

    def test_each_run_has_the_whole_limit(self, tinker):
        """The first one takes 40 of its 50 seconds."""

        async def slow() -> str:
            await asyncio.sleep(40)
            return "hi"

        run = tinker.new_run([slow, slow], max_seconds=50)
        asyncio.run(run.go("one", "two"), loop_factory=virtual_loop)
        assert (run.stop_reason, run.completion) == ("completed", "hi")


class TestEndings:
    @columns("reply result error_type message").rows(
        client=(RuntimeError("gone"), "", module.ApiError, "^RuntimeError from Tinker: gone"),
        server=(
            Refusal(404, "no"),
            "",
            module.ApiError,
            "^Refusal from Tinker: check the model's name .*: no$",
        ),
        clients_timeout=(TimeoutError("x"), "", module.ApiError, "^TimeoutError from Tinker: x"),
        environment=(bash("b"), RuntimeError("gone"), RuntimeRequestError, "Error: gone$"),
    )
    def test_an_error_ends_the_run(self, reply, result, error_type, message, tinker):
        # The second of these results answers the kill, after which nothing is left to run.
        environment = FakeEnvironment("", result, result)
        failed = tinker.new_run([bash("a"), reply], environment, max_turns=3)
        with pytest.raises(error_type, match=message):
            failed.follow()
        assert (failed.stop_reason, failed.recorded) == ("error", tinker.sampled)

    @each_way_to_wait
    def test_harbors_timeout_ends_a_run_as_cancelled(self, replies, results, tinker):
        environment = FakeEnvironment(*results)
        ended = tinker.new_run(replies, environment, timeout_sec=50, max_turns=2)
        with pytest.raises(TimeoutError):
            asyncio.run(ended.go(), loop_factory=virtual_loop)
        assert (ended.stop_reason, ended.recorded) == ("cancelled", tinker.sampled)

    @each_way_to_wait
    def test_a_run_that_max_seconds_ended_is_no_error(self, replies, results, tinker):
        environment = FakeEnvironment(*results)
        ended = tinker.new_run(replies, environment, max_turns=2, max_seconds=50)
        asyncio.run(ended.go(), loop_factory=virtual_loop)
        assert (ended.stop_reason, ended.recorded) == ("rollout_timeout", tinker.sampled)

    @each_way_to_wait
    def test_a_server_that_was_busy_earlier_makes_no_error_of_max_seconds(
        self, replies, results, tinker
    ):
        replies = [Refusal(503), *replies]
        ended = tinker.new_run(replies, FakeEnvironment(*results), max_turns=9, max_seconds=50)
        asyncio.run(ended.go(), loop_factory=virtual_loop)
        assert ended.stop_reason == "rollout_timeout"

    def test_a_loop_that_catches_the_servers_failure_may_end_by_max_seconds(self, tinker):
        class GoesOn(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> None:
                with pytest.raises(module.ApiError):
                    await super().converse(prompt, environment)
                await forever()

        replies = [bash("ls"), *[Refusal(503)] * 200]
        ended = tinker.new_run(replies, agent_class=GoesOn, max_turns=9, max_seconds=5000)
        asyncio.run(ended.go(), loop_factory=virtual_loop)
        assert ended.stop_reason == "rollout_timeout"

    def test_harbors_timeout_wins_over_max_seconds(self, tinker):
        """Both come at once."""
        ended = tinker.new_run([forever], timeout_sec=50, max_seconds=50)
        with pytest.raises(TimeoutError):
            asyncio.run(ended.go(), loop_factory=virtual_loop)
        assert ended.stop_reason == "cancelled"

    def test_an_environment_that_runs_nothing_any_more_ends_the_run(self, tinker):
        """As after `docker kill`. Further turns would cost money, and the trial would be scored."""
        gone = ExecResult(stdout="", stderr="the container is not running", return_code=1)
        # Three results are for the second script, begun in three places, and one for its kill.
        environment = FakeEnvironment("", gone, gone, gone, gone)
        failed = tinker.new_run([bash("a"), bash("b"), bash("c")], environment, max_turns=9)
        with pytest.raises(RuntimeRequestError, match=r"^the environment .*: the container is"):
            failed.follow()
        assert (failed.stop_reason, len(tinker.sampled)) == ("error", 2)

    @pytest.mark.skipif(not ERROR_POLICIES, reason="Harbor before 0.25 does not look at names")
    @pytest.mark.parametrize("name", ["ApiError", "RuntimeRequestError"])
    def test_harbor_does_not_score_the_errors_of_the_agent(self, name):
        policy = ERROR_POLICIES[name]
        # Harbor 0.26 has renamed it.
        names = [name for name in ("reward_valid", "has_valid_reward") if hasattr(policy, name)]
        assert [getattr(policy, name) for name in names] == [False]

    def test_an_error_of_a_client_is_told_with_its_name(self, tinker):
        error_type = type("AuthenticationError", (Exception,), {})
        with pytest.raises(module.ApiError, match=r"^AuthenticationError from Tinker: why"):
            tinker.new_run([error_type("why")]).follow()

    def test_a_plain_answer_is_logged_without_a_warning(self, tinker, caplog):
        tinker.run([bash("ls"), "done"], max_turns=2)
        assert [record for record in caplog.records if record.levelname == "WARNING"] == []

    def test_a_first_prompt_that_is_too_long_is_an_error(self, model):
        failed = model.new_run([FULL])
        with pytest.raises(module.ApiError, match=r"maximum context length is"):
            failed.follow()
        assert failed.stop_reason == "error"

    def test_a_second_run_has_a_first_prompt_of_its_own(self, tinker):
        used = tinker.run(["hello"]).agent
        tinker.will_reply(FULL)
        with pytest.raises(module.ApiError, match="maximum context length is"):
            asyncio.run(used.run("do it", FakeEnvironment(), AgentContext()))

    def test_a_first_prompt_that_fills_the_context_is_an_error(self, tinker):
        with pytest.raises(module.ApiError, match="15 tokens leave no room for a reply"):
            tinker.new_run(context_limit=1).follow()

    def test_a_later_step_may_fill_the_context(self, tinker):
        assert tinker.new_run(["hi", FULL]).follow("one", "two").stop_reason == "context_overflow"

    @columns("error stop_reason").rows(
        vLLM=(FULL, "context_overflow"),
        no_room_in_vLLM=(Refusal(400, "max_tokens must be at least 1, got 0"), "context_overflow"),
        sglangs_pool=(
            Refusal(400, "Input length (9 tokens) exceeds the maximum allowed length (8 tokens)"),
            "context_overflow",
        ),
        openAI=(Refusal(400, "code: context_length_exceeded"), "context_overflow"),
        too_long=(Refusal(422, "prompt is too long"), "context_overflow"),
        a_gateway=(Refusal(413, "exceeds the token limit"), "context_overflow"),
        xAI=(Refusal(400, "This model's maximum prompt length is 131072"), "context_overflow"),
        glm=(Refusal(400, "Prompt exceeds max length"), "context_overflow"),
        dashscope=(Refusal(400, "Range of input length should be [1, 30720]"), "context_overflow"),
        llama_cpp=(Refusal(500, "exceeds the available context size"), "context_overflow"),
        harbors=(ContextLengthExceededError(), "context_overflow"),
        tinkers_user=(tinker_error("prompt is too long", "user"), "context_overflow"),
        tinkers_server=(tinker_error("prompt is too long", "server"), "error"),
        a_gateways_timeout=(Refusal(504, "the upstream took too long"), "error"),
        a_servers_timeout=(Refusal(500, "the request took too long"), "error"),
        a_field_of_the_request=(Refusal(400, "Invalid 'user': string too long"), "error"),
        another_bad_request=(Refusal(400, "no such model"), "error"),
        no_status=(RuntimeError("prompt is too long"), "error"),
    )
    def test_only_a_refused_request_is_a_full_context(self, error, stop_reason, tinker):
        # An error that may pass is waited for: the next one ends the run.
        ended = tinker.new_run([bash("ls"), error, Refusal(404)], max_turns=2)
        asyncio.run(finish(ended), loop_factory=virtual_loop)
        assert ended.stop_reason == stop_reason

    # The sentences of servers, as their sources, their documents or litellm's tests have them.
    @columns("status message").rows(
        openAI=(400, "Your input exceeds the context window of this model."),
        openAI_configured=(
            400,
            "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in "
            "300000 tokens.",
        ),
        vLLM_prompt=(
            400,
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        ),
        vLLM_ids=(400, "prompt_token_ids length (5000) exceeds max_model_len (4096)"),
        sglang=(400, "The input (5000 tokens) is longer than the model's context length."),
        sglangs_memory=(400, "Request prompt exceeds the KV memory budget: input_len=5000."),
        sglangs_images=(400, "Multimodal prompt is too long after expanding multimodal tokens."),
        anthropic=(400, "prompt is too long: 213462 tokens > 200000 maximum"),
        anthropic_with_reply=(
            400,
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
        ),
        anthropic_bytes=(413, "request_too_large"),
        anthropic_bytes_in_words=(413, "Request exceeds the maximum size"),
        gemini=(
            400,
            "The input token count (1196265) exceeds the maximum number of tokens allowed "
            "(1048576).",
        ),
        groq=(400, "Please reduce the length of the messages or completion."),
        openrouter=(400, "Input length 5000 exceeds the maximum allowed input length of 4096."),
        together=(422, "`inputs` tokens + `max_new_tokens` must be <= 4097. Given: 4000"),
        tgi=(422, "Input validation error: `inputs` must have less than 1024 tokens. Given: 1500"),
        kimi=(400, "Your request exceeded model token limit: 262144 (requested: 300000)"),
        minimax=(400, "invalid params, context window exceeds limit (2013)"),
        tencent=(400, "Input text length should not exceed 8000"),
        cohere=(400, "too many tokens: total number of tokens cannot exceed 4081 - received 6354."),
        cohere_v2=(400, "too many tokens: size limit exceeded by 11326 tokens."),
        bedrock=(400, "Input is too long for requested model."),
        bedrock_converse=(400, "Input Tokens Exceeded: Number of input tokens exceeds maximum."),
        bedrock_titan=(400, "Too many input tokens. Max input tokens: 8192, request: 9000"),
        bedrock_claude=(400, "Malformed input request: expected maxLength: 200000, actual: 300000"),
        llama_cpp=(400, "request (26352 tokens) exceeds the available context size (24576)"),
        lm_studio=(
            400,
            "Trying to keep the first 5000 tokens when the context overflows. "
            "However, the model is loaded with context length of only 4096 tokens",
        ),
        ollama=(500, "the input length exceeds the context length"),
        tensorrt=(
            400,
            "The sum of prompt length (9351.0), query length (0) should not exceed max_num_tokens",
        ),
        tensorrt_with_reply=(
            400,
            "The sum of prompt length (4000) and query length (0) max_tokens "
            "(2048) should not exceed max_seq_len (4096)",
        ),
        github=(413, "tokens_limit_reached"),
        github_in_words=(413, "Request body too large for gpt-4o. Max size: 8000 tokens."),
        tensorrts_input=(500, "Prompt length (5056) exceeds maximum input length (2048)."),
        tensorrts_sequence=(500, "Prompt length (5056) exceeds maximum sequence length (2048)"),
        copilot=(400, "prompt token count of 9000 exceeds the limit of 8192"),
        databricks=(400, "The prompt length (5000 tokens) exceeds the max sequence length"),
        watsonx=(400, "the number of input tokens 5000 cannot exceed the total tokens limit 4096"),
        volcengine=(400, "Total tokens of image and text exceed max message tokens."),
        sambanova=(
            400,
            "The provided prompt is 16000 long, so generating 1000 tokens requires a "
            "sequence length of 17000, but the maximum supported sequence length is 16384!",
        ),
        siliconflow=(400, "max_total_tokens (40000) must be less than or equal to max_seq_len."),
        predibase=(400, "length limit exceeded"),
        lmdeploy=(400, "Current length of row(40000) is larger than the max_length(32768)."),
        # The same in a gateway's own words.
        context_limit=(400, "9000 tokens are more than the context limit of 8192"),
        maximum_context=(400, "9000 tokens are more than the maximum context of 8192"),
        maximum_input=(400, "9000 tokens are more than the maximum input length of 8192"),
        maximum_sequence=(400, "9000 tokens are more than the maximum sequence length of 8192"),
        maximum_number=(400, "The request exceeds the maximum number of tokens (8192)."),
        max_num_tokens=(400, "9000 tokens are more than max_num_tokens (8192)"),
        prompt_tokens=(400, "The prompt tokens exceed the limit of 8192."),
        prompt_length=(400, "The prompt length, 9000 tokens, exceeds the limit of 8192."),
        prompt_count=(400, "The prompt token count, 9000, exceeds the limit of 8192."),
        should_not=(400, "The input length should not be more than 8192."),
        must=(400, "The input length must be less than 8192."),
    )
    def test_a_servers_words_for_a_full_context_are_known(self, status, message, chat):
        agent_class = saying(LLMResponse(content=bash("ls")), Refusal(status, message))
        assert chat.run(agent_class=agent_class, max_turns=2).stop_reason == "context_overflow"

    # The second error ends a run that waits for the first one to pass.
    @columns("status message").rows(
        a_timeout=(500, "The request took too long to complete"),
        a_slow_model=(500, "Request timed out: the model took too long to respond"),
        a_user=(400, "Invalid 'user': string too long. Expected a string with maximum length 64"),
        a_list=(400, "Invalid 'stop': array too long. Expected an array with maximum length 4"),
        a_key=(400, "API key is too long"),
        a_slow_server=(500, "The model is taking too long to respond"),
        a_long_queue=(500, "The queue is too long"),
        a_rate=(400, "Deployment x is over its token limit (TPM)"),
        a_file=(500, "[Errno 36] File name too long: 'x'"),
        a_command=(400, "Field required: 'content' (bash: Argument list too long)"),
        a_request_that_is_repeated=(400, "Field required: " + "x" * 500 + "context length"),
        tokens_per_minute=(429, "Request too large on tokens per min (TPM): Limit 30000"),
        tokens_per_minute_of_groq=(
            413,
            "Request too large for model `x` on tokens per minute (TPM): Limit 12000, Requested "
            "20000, please reduce your message size and try again.",
        ),
        tokens_per_day=(429, "Too many tokens per day, please wait before trying again."),
        too_many_tokens_a_day=(400, "Too many tokens per day, please wait before trying again."),
        too_many_tokens_now=(400, "Too many tokens, please wait before trying again."),
        input_tokens_per_minute=(
            429,
            "This request would exceed your organization's rate limit of 40,000 input tokens",
        ),
        a_reply_limit=(400, "max_tokens is too large: 100000. This model supports at most 16384"),
        a_reply_limit_of_anthropic=(
            400,
            "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens",
        ),
        a_range=(400, "Range of max_tokens should be [1, 8192]"),
        a_proxy=(413, "<html><title>413 Request Entity Too Large</title></html>"),
        an_address=(414, "414 Request-URI Too Large"),
        a_header=(431, "Request header fields too large"),
        an_image=(400, "image exceeds 5 MB maximum: 6000000 bytes > 5242880 bytes"),
        images=(400, "exceeds the maximum number of images allowed (20)"),
        stop_sequences=(400, "The number of stop sequences exceeds the maximum number of 4"),
        a_thinking_budget=(400, "`max_tokens` must be greater than `thinking.budget_tokens`"),
        a_wrong_type=(422, "`inputs` must be a string"),
        a_call_that_was_cancelled=(500, "context canceled"),
        a_full_queue=(503, "The request queue is full."),
        a_wrong_token=(401, "Invalid token"),
    )
    def test_other_limits_are_no_full_context(self, status, message, chat):
        replies = [LLMResponse(content=bash("ls")), Refusal(status, message), Refusal(404)]
        run = chat.new_run(agent_class=saying(*replies), max_turns=2)
        asyncio.run(finish(run), loop_factory=virtual_loop)
        assert run.stop_reason == "error"

    @columns("word stop_reason").rows(
        whole=("stop", "completed"),
        capitals=("STOP", "completed"),
        cut_off=("length", "max_tokens"),
        another_word=("tool_calls", "tool_calls"),
        in_capitals=("ERROR", "error"),
        **{word: (word, "error") for word in FAILED.split()},
    )
    def test_a_finish_reason_is_a_stop_reason(self, word, stop_reason, chat):
        run = chat.new_run(agent_class=saying(Turn(content=bash("rm x"), finish_reason=word)))
        asyncio.run(finish(run))
        assert (run.stop_reason, run.completion) == (stop_reason, bash("rm x"))

    @columns("word").rows(cut_off="length", refused="content_filter", another="tool_calls")
    def test_nothing_is_run_of_a_reply_that_is_not_whole(self, word, chat):
        agent_class = saying(Turn(content=bash("rm x"), finish_reason=word))
        assert chat.run(agent_class=agent_class, max_turns=2).scripts == []

    def test_a_first_reply_of_litellm_that_is_cut_off_needs_no_ids(self, chat):
        """Harbor's client loses them."""
        done = chat.run([Reply("hi", cut_off=True)], collect_rollout_details=True)
        assert (done.stop_reason, done.completion) == ("max_tokens", "hi")

    def test_a_turn_without_sampled_tokens_is_not_trained(self, tinker):
        done = tinker.run([bash("ls"), Reply(ids=[])], max_turns=2)
        assert done.recorded == tinker.sampled[:1]
        assert done.metadata["n_turns_without_ids"] == 1

    def test_a_run_that_sampled_nothing_keeps_its_instruction_for_the_next_step(
        self, vllm, monkeypatch
    ):
        """The server aborts the reply before its first token, and the time is too short."""
        monkeypatch.setattr(module, "PAUSES_SEC", (99,))
        aborted = Reply(ids=[], choice={"finish_reason": "abort"})
        run = vllm.new_run([aborted, "hi"], max_seconds=50)
        with pytest.raises(module.ApiError):
            run.follow("one")
        assert run.context.rollout_details is None
        asyncio.run(run.step("two"))
        assert "user\none\n\ntwo<|im_end|>" in vllm.prompt_text(-1)

    def test_a_prompt_that_the_server_changed_is_an_error(self, vllm):
        failed = vllm.new_run([Reply("hi", choice={"prompt_token_ids": [4, 5, 6]})])
        with pytest.raises(module.ApiError, match="changed the ids of the prompt"):
            failed.follow()

    def test_a_prompt_that_the_server_cut_is_an_error(self, sglang):
        """SGLang with --allow-auto-truncate returns all ids of the prompt."""
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        failed = sglang.new_run([Reply("hi", answer={"usage": usage})])
        with pytest.raises(module.ApiError, match="changed the ids of the prompt"):
            failed.follow()

    def test_a_reply_on_vllm_without_a_finish_reason_is_an_error(self, vllm):
        failed = vllm.new_run([Reply("hi", choice={"finish_reason": None})])
        with pytest.raises(module.ApiError, match="ended the reply with 'error'"):
            failed.follow()

    @columns("choice").rows(no_ids={"token_ids": None}, no_logprobs={"logprobs": None})
    def test_a_first_turn_without_ids_is_an_error(self, choice, server):
        failed = server.new_run([Reply("hi", choice=choice)], collect_rollout_details=True)
        with pytest.raises(RuntimeError, match="the server returned no token ids or logprobs: set"):
            failed.follow()
        assert (failed.stop_reason, failed.completion) == ("error", "hi")

    def test_ids_that_are_not_wanted_are_not_recorded(self, vllm):
        done = vllm.run(collect_rollout_details=False)
        assert (done.context.rollout_details, done.steps[-1].metrics.logprobs) == (None, None)
        assert set(done.metadata) == {"stop_reason", "n_episodes"}

    # Replies, each with whether its turn can be trained.
    WITH_A_SCRIPT = [
        (bash("ls"), True),
        (f"<think>hm</think>{bash('ls')}", True),
        (Reply(bash("ls"), logprobs=None), False),
        (Reply(bash("ls"), logprobs=[-1.0]), False),
    ]
    LAST = [
        ("done", True),
        (Reply(ids=[]), False),
        (Reply(bash("rm x"), cut_off=True), True),
        (Reply("hm", logprobs=[-1.0, math.nan, -1.0]), False),
        (RuntimeError("API error"), False),
        (FULL, False),
    ]

    @pytest.mark.parametrize("seed", range(300))
    def test_whatever_ends_a_run_its_tokens_are_recorded_once(self, tinker, seed):
        """About a quarter of these runs are cancelled on their way, and a third end in an error."""
        rng = random.Random(seed)
        turns = [*rng.choices(self.WITH_A_SCRIPT, k=rng.randrange(5)), rng.choice(self.LAST)]
        results = rng.choices(["out", TimeoutError(), RuntimeError("gone")], [8, 1, 1], k=4)
        replies = [reply for reply, _ in turns]
        run = tinker.new_run(replies, FakeEnvironment(*results), max_turns=5)
        asyncio.run(cancelled_after(run, n_steps=rng.randrange(1, 12)))
        # `compress` stops after the last turn that was sampled.
        trainable = list(itertools.compress(tinker.sampled, [flag for _, flag in turns]))
        assert run.recorded == trainable
        assert run.metadata["n_episodes"] == len(tinker.sampled)
        assert run.metadata["n_turns_without_ids"] == len(tinker.sampled) - len(trainable)


# ------------------------------------------------------------------------- waiting, and errors


BUSY, GATEWAY = Refusal(503, "Generation is paused."), Refusal(504, "upstream timed out")
ABORTED = module.AbortedError("the server aborted the reply")


def after(seconds: float, result: Any) -> Any:
    """A result that takes its time."""

    async def slow() -> Any:
        await asyncio.sleep(seconds)
        return await outcome(result)

    return slow


class Watched:
    """A run in virtual time, on these replies of a model. It has the times of all calls after the
    first reply, from the end of that one, and of the end of the run."""

    def __init__(self, chat: FakeServer, *replies: Any, **options: Any) -> None:
        self.calls, self.ended_at = [], None

        def watched(reply: Any) -> Any:
            async def call() -> Any:
                self.calls.append(asyncio.get_running_loop().time())
                return await outcome(reply)

            return call

        agent_class = saying(*map(watched, replies))
        self.run = chat.new_run(agent_class=agent_class, **{"max_turns": 9} | options)

        async def main() -> None:
            await finish(self.run)
            self.ended_at = asyncio.get_running_loop().time()

        asyncio.run(main(), loop_factory=virtual_loop)
        self.stop_reason = self.run.stop_reason


class TestWaiting:
    def test_a_gateway_that_ends_each_call_after_a_minute_is_asked_for_ten_minutes(self, chat):
        watched = Watched(chat, LLMResponse(content=bash("ls")), *[after(60, GATEWAY)] * 99)
        # The first of these calls ends at 60, so the last one begins at 660 at the latest.
        calls = [0, 61, 123, 187, 252, 317, 382, 447, 512, 577, 642]
        assert (watched.calls[1:], watched.ended_at) == (calls, 702)
        assert watched.stop_reason == "error"

    def test_a_busy_server_is_asked_more_and_more_seldom(self, chat):
        watched = Watched(chat, LLMResponse(content=bash("ls")), *[BUSY] * 6)
        assert watched.calls[1:7] == [0, 1, 3, 7, 12, 17]

    def test_a_server_that_is_busy_for_ten_minutes_is_an_error(self, chat):
        watched = Watched(chat, LLMResponse(content=bash("ls")), *[BUSY] * 300)
        assert (watched.calls[-1], watched.ended_at, watched.stop_reason) == (597, 597, "error")

    def test_a_reply_that_comes_after_the_ten_minutes_counts(self, chat):
        watched = Watched(
            chat, LLMResponse(content=bash("ls")), BUSY, after(5000, LLMResponse(content="done"))
        )
        assert (watched.stop_reason, watched.ended_at) == ("completed", 5001)

    @columns("middle stop_reason").rows(abort=(ABORTED, "completed"), busy=(BUSY, "error"))
    def test_an_aborted_reply_starts_the_ten_minutes_anew(self, middle, stop_reason, chat):
        replies = [*[BUSY] * 100, middle, *[BUSY] * 100, LLMResponse(content="done")]
        watched = Watched(chat, LLMResponse(content=bash("ls")), *replies)
        assert watched.stop_reason == stop_reason

    def test_each_reply_has_ten_minutes_of_its_own(self, chat):
        ls, done = LLMResponse(content=bash("ls")), LLMResponse(content="done")
        watched = Watched(chat, ls, *[BUSY] * 100, ls, *[BUSY] * 100, done)
        assert watched.stop_reason == "completed"

    def test_a_run_ends_when_its_next_pause_would_pass_the_limit(self, chat):
        ls = LLMResponse(content=bash("ls"))
        watched = Watched(chat, ls, *[BUSY] * 300, max_seconds=100)
        assert (watched.calls[-1], watched.ended_at, watched.stop_reason) == (97, 97, "error")

    @columns("error").rows(busy=BUSY, gateway=GATEWAY, abort=ABORTED)
    def test_a_limit_that_strikes_while_a_call_is_repeated_is_the_servers_error(self, error, chat):
        agent_class = saying(LLMResponse(content=bash("ls")), error, forever)
        run = chat.new_run(agent_class=agent_class, max_turns=9, max_seconds=100)
        with pytest.raises(module.ApiError, match="passed before the model's server recovered"):
            asyncio.run(run.go(), loop_factory=virtual_loop)
        assert run.stop_reason == "error"

    def test_a_limit_that_strikes_in_a_slow_first_call_is_no_error(self, chat):
        watched = Watched(chat, after(200, GATEWAY), max_seconds=100)
        assert (watched.ended_at, watched.stop_reason) == (100, "rollout_timeout")

    @columns("error").rows(
        http_500=Refusal(500),
        bad_gateway=Refusal(502),
        slow=Refusal(408),
        connection=tinker_sdk.APIConnectionError(request=httpx.Request("POST", "http://tinker")),
        timeout=litellm.Timeout("timed out", "tiny", "openai"),
    )
    def test_a_server_that_never_answered_is_asked_three_times(self, error, chat):
        watched = Watched(chat, *[error] * 9)
        assert (watched.calls, watched.stop_reason) == ([0, 1, 3], "error")

    def test_one_error_before_the_first_reply_costs_no_run(self, chat):
        watched = Watched(chat, Refusal(502), Refusal(502), LLMResponse(content="done"))
        assert watched.stop_reason == "completed"

    def test_a_server_that_is_busy_at_first_has_ten_minutes(self, chat):
        watched = Watched(chat, *[BUSY] * 100, LLMResponse(content="done"))
        assert watched.stop_reason == "completed"

    def test_a_later_step_waits_for_a_server_that_has_replied(self, chat):
        hi = LLMResponse(content="hi")
        run = chat.new_run(agent_class=saying(hi, *[Refusal(502)] * 9, hi))
        asyncio.run(run.go("one", "two"), loop_factory=virtual_loop)
        assert run.stop_reason == "completed"

    # TestVllm has those of a server that is paused or overloaded.
    @columns("status").rows(
        **{f"http_{status}": status for status in (408, 409, 425, 460, 498, 499)},
        **{f"http_{status}": status for status in (500, 520, 522, 524, 530, 599)},
    )
    def test_a_status_that_passes_by_itself_is_waited_for(self, status, server, no_pause):
        done = server.run([bash("ls"), *[Refusal(status)] * 4, "done"], max_turns=3)
        assert (done.stop_reason, done.completion) == ("completed", "done")

    @columns("status").rows(
        **{f"http_{status}": status for status in (400, 401, 402, 403, 404, 405, 410, 413)},
        **{f"http_{status}": status for status in (415, 418, 422, 451)},
    )
    def test_a_status_that_does_not_pass_ends_the_run_at_once(self, status, server, no_pause):
        run = server.new_run([bash("ls"), Refusal(status), "done"], max_turns=3)
        with pytest.raises(module.ApiError):
            run.follow()
        assert no_pause == []

    @columns("message code").rows(
        openai=("You exceeded your current quota.", "insufficient_quota"),
        openai_credit=("No credits are left.", "credit_balance_exhausted"),
        openai_organization=("Over the limit.", "organization_spend_limit_exceeded"),
        openai_project=("Over the limit.", "project_spend_limit_exceeded"),
        openai_usage=("Over the limit.", "organization_usage_limit_exceeded"),
        openai_hard_limit=("Billing hard limit has been reached", "billing_hard_limit_reached"),
        openai_inactive=("Your account is not active.", "billing_not_active"),
        kimi=("Over the quota.", "exceeded_current_quota_error"),
        kimi_suspended=("Your account org-x is suspended, please recharge it.", None),
        deepseek=("Insufficient Balance", None),
        openrouter=("Insufficient credits. Add more.", None),
        minimax=("insufficient balance (1008)", "1008"),
        dashscope=("Access denied.", "Arrearage"),
        anthropic=("Your credit balance is too low to access the API.", None),
        insufficient_funds=("insufficient_funds", None),
        xai=("Your team has reached its monthly spending limit.", None),
        openrouter_a_day=("Rate limit exceeded: free-models-per-day.", None),
        zai=("Usage limit reached for 5 hour. Your limit will reset at 18:00.", "1308"),
        cloudflare=("You have used up your daily free allocation of 10,000 neurons.", None),
        gemini_prepaid=("Your prepayment credits are depleted.", None),
        litellms_proxy=("Budget has been exceeded! Current cost: 1.2, Max budget: 1.0", None),
        glm=("\u4f59\u989d\u4e0d\u8db3\u6216\u65e0\u53ef\u7528\u8d44\u6e90\u5305", "1113"),
        an_account=("Your account balance is too low.", None),
        more_than_a_minute_allows=(
            "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 40000.",
            "rate_limit_exceeded",
        ),
    )
    def test_a_quota_that_is_used_up_is_not_waited_for(self, message, code, server, no_pause):
        error = {"message": message, "type": code, "code": code}
        refusal = Refusal(429, body={"error": error})
        run = server.new_run([bash("ls"), refusal, "done"], max_turns=3)
        with pytest.raises(module.ApiError):
            run.follow()
        assert no_pause == []

    @columns("message").rows(
        openai="Rate limit reached for tiny on tokens per min (TPM): Limit 30000, Used 29000.",
        gemini="You exceeded your current quota, please check your plan and billing details. "
        "Please retry in 33.2s.",
        anthropic="This request would exceed your rate limit of 40,000 input tokens per minute",
        dashscope="Throttling.AllocationQuota: Allocated quota exceeded, please increase it.",
        groq="Rate limit reached on tokens per day. Upgrade at https://console.groq.com/billing",
        kimi="Your account org-x request reached max organization concurrency: 3",
        bedrock="Too many tokens, please wait before trying again.",
        mistral="Service tier capacity exceeded for this model.",
    )
    def test_a_rate_limit_is_waited_for(self, message, server, no_pause):
        refusal = Refusal(429, body={"error": {"message": message}})
        done = server.run([bash("ls"), refusal, "done"], max_turns=3)
        assert done.completion == "done"


def caused(*errors: BaseException) -> BaseException:
    """The first of these errors, caused by the second one, and so on."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def raised_while(handled: Exception, error: Exception) -> Exception:
    """An error that was raised while another one was handled."""
    error.__context__ = handled
    return error


REFUSED = ConnectionRefusedError(111, "Connection refused")


class TestErrorTexts:
    @columns("error text").rows(
        alone=(ValueError("a"), "a"),
        a_cause=(
            caused(ValueError("Connection error."), OSError("refused")),
            "Connection error. (refused)",
        ),
        the_last_of_three=(caused(ValueError("a"), OSError("b"), OSError("c")), "a (c)"),
        while_another_was_handled=(raised_while(OSError("b"), ValueError("a")), "a (b)"),
        # What httpx says of a status tells nothing more.
        another_error=(raised_while(ValueError("b"), ValueError("a")), "a"),
        # httpcore hides what a refused port says, which is the last cause all the same. (BUG E10)
        one_that_its_cause_hides=(
            caused(ValueError("a"), raised_while(OSError("b"), caused(OSError("c"), None))),
            "a (b)",
        ),
        a_cause_that_is_told=(caused(ValueError("it failed: b"), OSError("b")), "it failed: b"),
        without_a_text=(TimeoutError(), "TimeoutError()"),
        a_cause_without_a_text=(caused(ValueError("a"), TimeoutError()), "a (TimeoutError())"),
        # A name with two addresses, such as localhost.
        a_group=(
            caused(ValueError("a"), OSError("b"), ExceptionGroup("two", [REFUSED, REFUSED])),
            "a ([Errno 111] Connection refused)",
        ),
        a_group_of_causes=(
            ExceptionGroup("two", [caused(ValueError("a"), OSError("refused")), OSError("c")]),
            "two (2 sub-exceptions) (refused)",
        ),
        a_password=(OSError("no https://me:secret@host/v1"), "no https://host/v1"),
        an_at_sign_in_a_password=(OSError("no http://me:s@cret@host"), "no http://host"),
        a_user_alone=(OSError("no http://sk-secret@host:80"), "no http://host:80"),
        two_passwords=(OSError("http://a:b@c http://d:e@f"), "http://c http://f"),
        a_causes_password=(
            caused(ValueError("a"), OSError("no http://me:secret@host")),
            "a (no http://host)",
        ),
        an_address_of_mail=(OSError("ask http://h/x or me@h"), "ask http://h/x or me@h"),
    )
    def test_an_error_is_told_with_its_last_cause(self, error, text):
        assert module.error_text(error) == text

    def test_errors_that_caused_each_other_are_told(self):
        """A fallback raises its first error again."""
        first, second = ValueError("a"), OSError("b")
        assert module.error_text(caused(first, second, first)).startswith("a")

    def test_a_refused_connection_is_told_as_such(self, server):
        """It is the last cause of an APIConnectionError, or of litellm's."""
        run = server.new_run()
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            run.agent = server.agent(api_base=url)
            with pytest.raises(module.ApiError, match=f"(?s){url}.*(refused|Connect call failed)"):
                asyncio.run(run.go(), loop_factory=virtual_loop)


# ------------------------------------------------------------------------------------- thinking

# gpt-oss and Inkling write headers in place of tags. Other headers stay in the thinking.
GPT_OSS_HM = "analysis<|message|>hm<|end|><|start|>assistant"
INKLING_HM = "<|content_thinking|>hm<|end_message|>"
# How each family of models writes: the opening, a thinking, and what closes it before the answer.
styles = columns("opening thinking closing").rows(
    qwen=("<think>", "\nhm\n", "</think>\n\n"),
    mistral=("[THINK]", "hm", "[/THINK]"),
    longcat=("<longcat_think>", "hm", "</longcat_think>"),
    seed=("<seed:think>", "hm", "</seed:think>"),
    minimax=("<mm:think>", "hm", "</mm:think>"),
    hy3=("<think:opensource>", "hm", "</think:opensource>"),
    k2_horizon=("<ifm|think>", "hm", "</ifm|think>"),
    k2_horizon_fast=("<ifm|think_fast>", "hm", "</ifm|think_fast>"),
    k2_horizon_faster=("<ifm|think_faster>", "hm", "</ifm|think_faster>"),
    hy4=("<think:6124c78e>", "hm", "</think:6124c78e>"),
    kimi_vl=("\u25c1think\u25b7", "hm", "\u25c1/think\u25b7"),
    apertus=("<|inner_prefix|>", "hm", "<|inner_suffix|>"),
    plamo=("<|plamo:begin_think:plamo|>", "hm", "<|plamo:end_think:plamo|>"),
    muse=(" to=self<|message|>", "hm<|eom|><|start|>assistant ", "to=user<|message|>"),
    solar=("<|think|>", "hm<|end|><|begin|>assistant", "<|content|>"),
    kimi_k3=("<|open|>think<|sep|>", "hm", "<|close|>think<|sep|>"),
    cohere=("<|START_THINKING|>", "hm", "<|END_THINKING|>"),
    gemma=("<|channel>", "thought\nhm", "<channel|>"),
    gpt_oss=("<|channel|>", GPT_OSS_HM, "<|channel|>final<|message|>"),
    inkling=("<|message_model|>", INKLING_HM, "<|message_model|><|content_text|>"),
)
K3_THINKING = "<|open|>think<|sep|>hm<|close|>think<|sep|>"
K3_END = "<|close|>response<|sep|><|close|>message<|sep|>"
# What a model wraps around its answer: before the wrapper, its start and its end.
wrappers = columns("thinking start end").rows(
    kimi_k3=(K3_THINKING, "<|open|>response<|sep|>", K3_END),
    kimi_k3_before_the_messages_end=(
        K3_THINKING,
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
    ),
    kimi_k3_opened_in_the_prompt=(K3_THINKING, "", K3_END),
    cohere=("<|START_THINKING|>hm<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    command_a_plus=("<|START_THINKING|>hm<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    inkling=(
        "<|message_model|><|content_thinking|>hm<|end_message|>",
        "<|message_model|><|content_text|>",
        "<|end_message|>",
    ),
    muse=("to=self<|message|>hm<|eom|><|start|>assistant ", "to=user<|message|>", ""),
    solar=("<|think|>hm<|end|><|begin|>assistant", "<|content|>", ""),
    gpt_oss=(f"<|channel|>{GPT_OSS_HM}", "<|channel|>final<|message|>", ""),
    minimax_m3=("<mm:think>hm", "</mm:think>", ""),
)


def parts(run: AgentRun) -> tuple[str, str]:
    """The thinking and the answer of a run's last reply."""
    return run.steps[-1].reasoning_content or "", run.completion


class TestThinking:
    @styles
    def test_the_answer_follows_the_thinking(self, opening, thinking, closing, tinker):
        done = tinker.run([f"{opening}{thinking}{closing}hi"])
        assert parts(done) == (thinking, "hi")

    @styles
    def test_thinking_that_is_cut_off_is_no_answer(self, opening, thinking, closing, tinker):
        reply = opening + thinking + closing
        # Half an opening tag would be an answer.
        replies = [reply[:length] for length in range(len(opening), len(reply) + 1)]
        done = tinker.run(replies, agent_class=OwnLoop, max_turns=len(replies))
        assert {step.message for step in done.steps if step.source == "agent"} == {""}

    @wrappers
    def test_the_wrapper_of_an_answer_is_taken_off(self, thinking, start, end, chat):
        done = chat.run(agent_class=saying(LLMResponse(content=f"{thinking}{start}hi{end}")))
        assert done.completion == "hi"

    @wrappers
    def test_an_answer_without_thinking_is_unwrapped_too(self, thinking, start, end, chat):
        done = chat.run(agent_class=saying(LLMResponse(content=f"{start}hi{end}")))
        assert parts(done) == ("", "hi")

    @wrappers
    def test_the_start_of_a_truncated_answer_is_taken_off(self, thinking, start, end, chat):
        reply = Turn(content=f"{thinking}{start}hi", finish_reason="length")
        assert chat.run(agent_class=saying(reply)).completion == "hi"

    @columns("reply").rows(
        whole="<think>\nhm\n</think>\n\n<response>\nhi\n</response>\n",
        truncated="<think>\nhm\n</think>\n\n<response>\nhi",
        plain="<think>\nhm\n</think>\n\nhi",
    )
    def test_ernies_response_is_its_answer(self, reply, chat):
        done = chat.run(agent_class=saying(LLMResponse(content=reply)))
        assert parts(done) == ("\nhm\n", "hi")

    def test_a_block_at_the_end_of_a_wrapped_answer_is_run(self, chat):
        """The wrapper follows its last fence in the same line."""
        reply = f"{K3_THINKING}<|open|>response<|sep|>```bash\nls\n```{K3_END}"
        agent_class = saying(LLMResponse(content=reply), LLMResponse(content="done"))
        assert chat.run(agent_class=agent_class, max_turns=2).scripts == ["ls"]

    @columns("answer").rows(
        response="<response>hi</response>",
        answer="<answer>hi</answer>",
        kimi_k3_inside="It ends in <|close|>message<|sep|> there.",
        cohere_inside="It is <|START_RESPONSE|>hi<|END_RESPONSE|>.",
        a_closing_tag_inside="hi</mm:think>",
        a_tag_of_another_form="<think:>hi",
        words_of_thought="Here is my thought process: hm",
    )
    def test_markup_inside_an_answer_is_text(self, answer, chat):
        done = chat.run(agent_class=saying(LLMResponse(content=answer)))
        assert parts(done) == ("", answer)

    def test_a_pair_of_tags_may_be_added(self, tinker, monkeypatch):
        monkeypatch.setitem(module.THINKING_TAGS, "<reason>", "</reason>")
        assert parts(tinker.run(["<reason>hm</reason>hi"])) == ("hm", "hi")

    @columns("reply thinking answer").rows(
        plain=("hi", "", "hi"),
        a_closing_tag_alone=("</think>\n\nhi", "", "</think>\n\nhi"),
        gpt_oss_without_thinking=("<|channel|>final<|message|>hi", "", "hi"),
        gemma_without_thinking=("<|channel>thought\n<channel|>hi", "thought\n", "hi"),
        kimi_k3_that_was_cut_off_at_once=(f"{K3_THINKING}<|open|>response<|sep|>", "hm", ""),
        two_thoughts=("<think>a</think>\n<think>b</think>c", "a", "<think>b</think>c"),
        an_empty_thought=("<think></think>\n\nhi", "", "hi"),
        blanks_at_the_start=(" \n<think>a</think>\n\nc", "a", "c"),
        an_answer_is_not_stripped=("  c\n", "", "  c\n"),
        a_tag_inside_the_answer=("c</think>d", "", "c</think>d"),
        another_models_tag=("<think>a[/THINK]b</think>c", "a[/THINK]b", "c"),
        never_closed=("<seed:think>a[/THINK]b", "a[/THINK]b", ""),
    )
    def test_thinking_is_what_its_tags_enclose(self, reply, thinking, answer, tinker):
        assert parts(tinker.run([reply])) == (thinking, answer)

    def test_thinking_of_a_chat_endpoint_is_split_off_in_the_same_way(self, chat):
        done = chat.run(agent_class=saying(LLMResponse(content="<think>\nhm\n</think>\n\nhi")))
        assert parts(done) == ("\nhm\n", "hi")

    @columns("answer").rows(
        thinking_without_its_opening_tag="hm\n</think>\nhi",
        sed="```bash\nsed -i 's#</think>##' f\n```\n",
        here_document="```bash\ncat >f <<E\nhm\n</think>\nE\n```\n",
        here_document_in_tildes="~~~\nhm\n</think>\n~~~\n",
        quoted_in_a_line="Drop `</think>` from f:\n```bash\nls\n```\n",
        both_tags_in_a_line="It is <think>hm</think>\nin Qwen's format.",
    )
    def test_a_tag_that_does_not_open_a_reply_is_text(self, answer, chat):
        done = chat.run(agent_class=saying(LLMResponse(content=answer)))
        assert parts(done) == ("", answer)

    # If the time grew with the square of the length, `clean_process` would end this after a minute.
    # (Its alarm also interrupts a regular expression.)
    @columns("reply").rows(
        backticks="`" * 400_000,
        fences="```a\n" * 80_000,
        blanks=" " * 400_000,
        a_long_tag="<" + "think_" * 60_000,
        a_long_suffix="<think:" + "a" * 400_000,
    )
    def test_a_degenerate_reply_is_split_in_time(self, reply, chat):
        done = chat.run(agent_class=saying(LLMResponse(content=reply)))
        assert parts(done) == ("", reply)

    def test_a_degenerate_response_is_split_in_time(self, chat):
        reply = f"<think>hm</think><response>a{' ' * 400_000}b"
        done = chat.run(agent_class=saying(LLMResponse(content=reply)))
        assert done.completion == f"a{' ' * 400_000}b"


# --------------------------------------------------------------------------------------- blocks


class TestBlocks:
    DOCSTRING = 'cat >f.py <<E\ndef f():\n    """\n    ```\n    x\n    ```\n    """\nE\n'

    @columns("reply blocks").rows(
        two=("```bash\na\n```\n```sh\nb\n```", ["a\n", "b\n"]),
        none=("hello", []),
        in_capitals=("```Bash\na\n```", ["a\n"]),
        blanks_around_the_language=("``` bash \na\n```", ["a\n"]),
        another_language_with_more=("```python x\nb\n```\n```bash\na\n```", ["a\n"]),
        a_command_in_tildes=("~~~bash ls\nb\n~~~\n```bash\na\n```", ["a\n"]),
        empty=("```bash\n```", [""]),
        in_a_list=("1. so:\n   ```bash\n   if a\n     b\n   ```", ["if a\n  b\n"]),
        at_a_lists_marker=("- ```bash\n  a\n  ```\n- ```sh\n  b\n  ```", ["a\n", "b\n"]),
        indented_fences_inside=(f"```bash\n{DOCSTRING}```", [DOCSTRING]),
        a_longer_fence=("````bash\na\n```\n````", ["a\n```\n"]),
        a_shorter_fence_inside=("````bash\n```python\nx\n```\n````", ["```python\nx\n```\n"]),
        an_indented_fence_inside=("```bash\n    ```python\n```", ["    ```python\n"]),
        with_carriage_returns=("```bash\r\na\r\n```\r\n", ["a\n"]),
        another_language=("```python\nx\n```", []),
        without_a_language=("```\na\n```", []),
        inside_another=("````md\n```bash\nx\n```\n````", []),
        inside_tildes=("~~~\n```bash\nrm x\n```\n~~~", []),
        tildes=("~~~bash\nrm x\n~~~", []),
        in_a_line=("run ```bash rm x``` now", []),
        indented_by_four_blanks=("2. Run\n    ```bash\n    a\n    ```", ["a\n"]),
        indented_by_a_tab=("2. Run\n\t```bash\n\ta\n\t```", ["a\n"]),
        closed_outside_of_its_item=("- ```bash\n  a\n```\n", ["a\n"]),
        less_indented_than_its_item=("- ```bash\n  cat <<E\nx\nE\n  ```\n", ["cat <<E\nx\nE\n"]),
        another_language_never_closed=("```python\nx", []),
    )
    def test_the_blocks_of_a_language_are_found(self, reply, blocks):
        assert fenced_blocks(reply, "bash", "sh") == blocks

    # In each, a block is not closed by a fence of its own.
    @columns("reply").rows(
        at_the_end="```bash\nrm x",
        with_a_newline="```bash\nrm x\n",
        beside_a_whole_block="```bash\na\n```\n```bash\nrm x\n",
        in_an_item="- run:\n  ```bash\n  rm x\n",
        fence_behind_the_last_command="```bash\nrm x```\nNow:\n",
        by_a_shorter_fence="````bash\nrm x\n```\n",
        only_its_opening_fence="```bash",
        by_a_fence_that_is_part_of_it="```bash\nrm x\n    ```\n",
        by_a_longer_fence_that_is_part_of_it="````bash\nrm x\n    ````\n",
        by_a_fence_of_its_own_text="```bash\ncat >f <<E\n```python\nx\n```\nE\nrm y\n```",
        beside_another_language="```bash\na\n```\n```python\nx",
        a_fence_of_bash_in_its_text="```bash\ncat <<E\n```bash\nrm x\n```\nE\n```\n```bash\na\n```",
        a_fence_of_python_in_its_text="```bash\ncat >f <<E\n```python\nx\n```\nE\n```\n",
        a_fence_in_a_block_that_was_not_closed="```bash\nls```\nNow:\n```bash\na\n```",
        a_fence_in_another_block="```bash\na\n```\n```\nout\n```bash\nrm x\n```\n",
    )
    def test_a_block_that_is_not_closed_is_told_from_none(self, reply):
        assert fenced_blocks(reply, "bash") is None

    @columns("reply").rows(
        a_command="```bash ls -la\n```\n",
        a_command_after_a_tab="```bash\tls\n```\n",
        a_command_in_capitals="```BASH ls\n```\n",
        a_command_before_another="```bash ls\na\n```\n",
        a_command_of_sh="```sh ls\n```\n",
        a_comment="```bash # list\nls\n```\n",
        a_title="```bash title=x\na\n```\n",
        beside_a_whole_block="```bash\na\n```\n```bash rm x\n```\n",
        before_a_whole_block="```bash rm x\n```\n```bash\na\n```\n",
        in_an_item="- ```bash ls\n  ```\n",
        indented="  ```bash ls\n  ```\n",
    )
    def test_a_command_beside_the_language_is_not_lost_in_silence(self, reply, tinker):
        told = tinker.run([reply, "done"], max_turns=2)
        assert (told.scripts, told.observations) == ([], [BasicLoopAgent.unclosed_block])

    # Each indent is a fence's, in blanks, and a text before the fence.
    @columns("before indent").rows(
        none=("", ""),
        one_blank=("", " "),
        two_blanks=("", "  "),
        three_blanks=("", "   "),
        in_an_item=("- so:\n", "  "),
        in_an_item_after_a_blank_line=("- so:\n\n", "  "),
        in_a_numbered_item=("1. so:\n", "   "),
        in_an_item_and_one_blank=("- so:\n", "   "),
        in_an_item_of_an_item=("- a\n  - b\n", "    "),
    )
    @columns("newline").rows(unix="\n", windows="\r\n")
    def test_the_tabs_of_a_block_stay(self, before, indent, newline):
        makefile = ["all:", "\techo", "", "\t\tif a;\tthen", "  \tb"]
        lines = ["```bash", *makefile, "```"]
        reply = before + "".join(f"{indent}{line}\n" for line in lines)
        blocks = fenced_blocks(reply.replace("\n", newline), "bash")
        assert blocks == ["all:\n\techo\n\n\t\tif a;\tthen\n  \tb\n"]

    @columns("reply block").rows(
        at_a_marker=("- ```bash\n  a:\n  \tb\n  ```\n", "a:\n\tb\n"),
        at_a_number=("1. ```bash\n   a:\n   \tb\n   ```\n", "a:\n\tb\n"),
        at_a_marker_of_an_item=("1. a\n   - ```bash\n     \tb\n     ```\n", "\tb\n"),
        less_than_the_fence=("   ```bash\n \ta\n\tb\n   ```\n", "\ta\n\tb\n"),
        more_than_the_fence=(" ```bash\n   a\tb\n ```\n", "  a\tb\n"),
        here_document=("  ```bash\n  cat <<-E\n  \ta\n  \tE\n  ```", "cat <<-E\n\ta\n\tE\n"),
        a_block_after_it=("  ```bash\n  \ta\n  ```\n```python\n\tb\n```", "\ta\n"),
    )
    def test_only_the_blanks_of_an_indent_are_taken_off(self, reply, block):
        assert fenced_blocks(reply, "bash") == [block]

    # As for thinking: a time that grows with the square of the length would never end.
    @columns("reply").rows(
        a_line="a" * 200_000,
        ticks="a```" * 50_000,
        tildes="a~" + "~" * 200_000,
        tildes_with_blanks="~~~ " * 50_000,
        languages="x ```bas " * 20_000,
        items="- " * 100_000,
        headings="#" * 200_000,
        links="[" * 200_000,
        blanks="\t " * 100_000,
    )
    def test_a_degenerate_reply_is_read_in_time(self, reply, chat):
        agent_class = saying(LLMResponse(content=reply))
        assert chat.run(agent_class=agent_class, max_turns=2).stop_reason == "completed"

    def test_a_deeply_indented_block_is_read_in_time(self):
        blanks = " " * 200_000
        lines = [f"{blanks}```bash", f"{blanks}ls", *[""] * 20_000, f"{blanks}```"]
        (block,) = fenced_blocks("\n".join(lines), "bash")
        assert block.split() == ["ls"]

    def test_a_nul_in_a_block_is_left_out(self, tinker):
        done = tinker.run([bash("printf 'a\0b'"), "done"], max_turns=2)
        assert done.scripts == ["printf 'ab'"]

    def test_blocks_of_the_shell_are_run(self, tinker):
        languages = ["bash", "", "sh", "python", "shell", "console", "zsh", "bashrc"]
        reply = "".join(bash(language, language=language) for language in languages)
        assert tinker.agent().bash_blocks(reply) == ["bash\n", "sh\n", "shell\n"]


# -------------------------------------------------------------------------------------- scripts

LIMIT = "[The time limit of 1 seconds was reached.]"
NO_REPORT = "[The script's result could not be read.]"
MOVED = "[The working directory cannot be used, so the script ran in /.]"
# A command that no other process on the machine runs.
SLEEP = f"sleep {60 + uuid4().int % 10**9}"
# The id of the shell that writes the report: the parent of a script.
REPORTER = "$PPID"


def script_agent(seconds: int = 9, shown_bytes: int = 10_000) -> BasicLoopAgent:
    """An agent for its method `execute` alone, which writes no file into the log folder."""
    options = {"command_timeout_sec": seconds, "max_output_bytes": shown_bytes}
    return BasicLoopAgent(model_name="any", logs_dir=ROOT, **options)


def run_shell(environment: Any, *blocks: str, **options: Any) -> str:
    """Run blocks as one script. Returns what the model is told."""
    return asyncio.run(script_agent(**options).execute(list(blocks), environment))


class PrintingEnvironment(FakeEnvironment):
    """Each command prints this, with the script's mark for M, after so many seconds."""

    def __init__(self, printed: str, seconds: float = 0) -> None:
        super().__init__(*[self.print] * 3)
        self.printed, self.seconds = printed, seconds

    async def print(self) -> ExecResult:
        await asyncio.sleep(self.seconds)
        return ExecResult(stdout=self.printed.replace(":M:", f":{self.mark}:"), return_code=0)

    @property
    def mark(self) -> str:
        return re.search(r"loop_mark=(\w+)", self.commands[0])[1]


def run_shell_that_prints(printed: str, seconds: float = 0, **options: Any) -> str:
    """Run a script in such an environment. Returns what the model is told, with M for the mark."""
    environment = PrintingEnvironment(printed, seconds)
    run = script_agent(**options).execute(["x"], environment)
    return asyncio.run(run, loop_factory=virtual_loop).replace(environment.mark, "M")


def told(code: int | str, output: str) -> str:
    """What the model is told. (Code 124 is the time limit, 137 a SIGKILL, 143 a SIGTERM.)"""
    return f"Exit code: {code}\nOutput:\n{output}"


def wait_until_sleep_ends() -> None:
    last = time.monotonic() + 9
    while subprocess.run(["pgrep", "-f", SLEEP], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < last, "a process of the script lives on"
        time.sleep(0.01)


@pytest.fixture
def shell() -> Iterator[ShellEnvironment]:
    """A shell. The processes and files that its scripts left are removed after the test."""
    yield (environment := ShellEnvironment(TAG=SLEEP, LC_ALL="C.UTF-8"))
    left = f"kill -9 $(grep -ls 'TAG={SLEEP}' /proc/[0-9]*/environ | cut -d / -f 3)"
    # A script that kills its reporter leaves files.
    files = " ".join(f"/dev/shm/{mark}.*" for mark in environment.marks)
    subprocess.run(f"{left}; rm -rf {files}", shell=True, stderr=subprocess.DEVNULL)


def cleaner(folder: Path, cleaning: str = "trap '' TERM; sleep 0.4") -> str:
    """A script whose child prints "ready", and at SIGTERM cleans up. It then makes a file."""
    trap = shlex.quote(f"{cleaning}; touch {folder}/clean; exit")
    return f"(trap {trap} TERM; echo ready; exec 2>/dev/null; while :; do sleep 0.05; done); true"


class MountEnvironment(ShellEnvironment):
    """Runs commands in real shells that see other mounts than the rest of the machine. (They are
    gone after the command.)"""

    def __init__(self, *mounts: str) -> None:
        super().__init__(LC_ALL="C.UTF-8")
        self.mounts = " && ".join(mounts)

    async def exec(self, command: str, cwd: str | None = None, timeout_sec: int = 0) -> Any:
        inner = shlex.quote(f"{self.mounts} && {command}")
        return await super().exec(f"{UNSHARE} bash -c {inner}", cwd, timeout_sec)


class WorkdirEnvironment(ShellEnvironment):
    """Runs commands in real shells in this folder. If it is gone, a command without a folder of its
    own does not start, as in Docker."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(TAG=SLEEP)
        self.workdir = workdir
        workdir.mkdir()

    async def exec(self, command: str, cwd: str | None = None, timeout_sec: int = 0) -> Any:
        if cwd is None and not self.workdir.exists():
            error = f"OCI runtime exec failed: chdir to cwd ({self.workdir}) failed: no such file"
            return ExecResult(stdout=error, return_code=126)
        return await super().exec(command, cwd or str(self.workdir), timeout_sec)


UNSHARE = "unshare --mount --map-root-user"
CAN_MOUNT = subprocess.run(f"{UNSHARE} mount -t tmpfs none /tmp", shell=True, capture_output=True)
needs_mounts = pytest.mark.skipif(CAN_MOUNT.returncode != 0, reason="needs `unshare --mount`")


class TestScripts:
    @columns("script code").rows(
        that_fails=("echo a; exit 3", 3),
        that_kills_its_group=("echo a; kill 0; echo b", 143),
        that_kills_its_group_at_its_end=("trap 'kill 0' EXIT; echo a", 143),
        that_kills_the_group_of_its_number=("echo a; kill -- -$$; echo b", 143),
        that_is_interrupted=("echo a; kill -INT $$; echo b", 130),
        that_ends_with_an_interrupted_command=("echo a; exec bash -c 'kill -INT $$'", 130),
    )
    def test_the_model_is_told_the_exit_code(self, script, code, shell):
        assert run_shell(shell, script) == told(code, "a")

    @columns("script output").rows(
        both_streams=("echo 1; echo e >&2; echo 2", "1\ne\n2"),
        a_blank_line_at_the_end=("echo x; echo", "x\n"),
        no_newline_at_the_end=(r"printf '\n\nx'", "\n\nx"),
        nothing=("true", "(none)"),
        invalid_utf8=(r"printf 'caf\351 x\344\270'", "caf\ufffd x\ufffd"),
        of_a_script_of_96_kB=(f"cat <<E | wc -c\n{96_000 * 'x'}\nE", "96001"),
        of_6000_apostrophes=(f"cat <<'E' | wc -c\n{25_000 * 'x' + 6000 * chr(39)}\nE", "31001"),
        of_backslashes_and_dollars=(r"""printf '%s' '\\$x\`\n'""", r"\\$x\`\n"),
        of_a_script_with_quotes=("""echo "it's" '"$HOME"'""", 'it\'s "$HOME"'),
        of_a_script_with_extended_patterns=("shopt -s extglob\necho !(*)", "!(*)"),
    )
    def test_the_model_sees_what_a_script_prints(self, script, output, shell):
        assert run_shell(shell, script) == told(0, output)

    @columns("output shown_bytes expected").rows(
        fits=("abcd", 4, "abcd"),
        one_too_many=("abcde", 4, "ab\n[... 1 bytes left out ...]\nde"),
        halves_of_characters=("ßaaß", 2, "\ufffd\n[... 4 bytes left out ...]\n\ufffd"),
    )
    def test_of_long_output_the_first_and_the_last_half_are_seen(
        self, output, shown_bytes, expected, shell
    ):
        text = run_shell(shell, f"printf {output}", shown_bytes=shown_bytes)
        assert text == told(0, expected)

    def test_of_a_flood_the_end_is_seen_too(self, shell):
        text = run_shell(shell, "seq 1500000; exit 3", shown_bytes=16)
        assert text == told(3, "1\n2\n3\n4\n\n[... 10888880 bytes left out ...]\n1500000")

    # ---- blocks

    def test_a_here_document_with_fences_is_told_and_swallows_no_other_block(
        self, tinker, tmp_path
    ):
        """The second fence ends the block, and so its here-document, which lacks its end."""
        readme = f"cat >{tmp_path}/README.md <<'E'\nTo install:\n```\nmake\n```\nE"
        config = f"cat >{tmp_path}/config.ini <<'E'\nx\nE"
        done = tinker.run([bash(readme, config), "done"], ShellEnvironment(), max_turns=2)
        (seen,) = done.observations
        assert "warning: here-document at line " in seen
        assert (tmp_path / "config.ini").read_text() == "x\n"

    def test_the_blocks_of_a_reply_share_a_shell(self, shell):
        blocks = ["cd /usr; x=3", "set -e", "pwd; echo $x; false", "echo never"]
        assert run_shell(shell, *blocks) == told(1, "/usr\n3")

    @columns("first second output").rows(
        function=('f() { echo "<$1>"; }', "f a", "<a>"),
        alias=("shopt -s expand_aliases; alias a='echo x'", "a", "x"),
        exit_trap=("trap 'echo bye' EXIT", "echo a", "a\nbye"),
        error_trap=("trap 'echo failed' ERR", "false; echo a", "failed\na"),
        redirection=("exec >/dev/null", "echo never", "(none)"),
        positional_arguments=("set -- a b", 'echo "$# $2"', "2 b"),
        server=("sleep 0.1 & server=$!", "wait $server && echo ended", "ended"),
        comment_at_the_end=("echo a # it's", "echo b", "a\nb"),
        backslash_at_the_end=("x=a; echo b \\\n", "echo $x\n", "b\na"),
    )
    def test_what_one_block_sets_holds_in_the_next_one(self, first, second, output, shell):
        assert run_shell(shell, first, second) == told(0, output)

    @columns("first code").rows(
        exit=("echo a; exit 3", 3),
        exec=("exec bash -c 'echo a; exit 4'", 4),
        error=("set -e; echo a; false", 1),
        unset_variable=("set -u; echo a; echo $missing 2>/dev/null", 1),
    )
    def test_a_block_that_ends_the_shell_ends_the_script(self, first, code, shell):
        text = run_shell(shell, first, "echo never")
        assert text.startswith(f"Exit code: {code}\nOutput:\na")
        assert "never" not in text

    @columns("first error").rows(
        here_document=("cat <<E >/dev/null\nx", "here-document at line"),
        quotation_mark=("echo 'never", "unexpected EOF while looking for matching"),
        if_without_fi=("if true; then\n  echo never", "unexpected end of file"),
        subshell=("( echo never", "unexpected end of file"),
        function=("f() {\n  echo never", "unexpected end of file"),
        stray_word=("fi", "near unexpected token `fi'"),
    )
    def test_a_block_that_is_left_open_is_told_and_the_next_one_runs(self, first, error, shell):
        text = run_shell(shell, first, "echo next")
        assert text.startswith("Exit code: 0\n")
        assert error in text
        assert text.endswith("\nnext")
        assert "never" not in text.splitlines()

    @columns("script output").rows(
        a_guard_for_main=('main() { echo a; }\n[[ ${BASH_SOURCE[0]} == "$0" ]] && main', "a"),
        a_test_by_return=("(return 0 2>/dev/null) && echo sourced || echo run", "run"),
        a_trap_of_RETURN=("trap 'echo never' RETURN; echo a", "a"),
    )
    def test_a_script_takes_itself_for_the_main_program(self, script, output, shell):
        assert run_shell(shell, script, "true") == told(0, output)

    def test_eleven_blocks_run_in_their_order(self, shell):
        blocks = [f"printf ' {n}'" for n in range(11)]
        assert run_shell(shell, *blocks) == told(0, " 0 1 2 3 4 5 6 7 8 9 10")

    def test_a_here_document_in_four_backticks_may_hold_fences(self, tinker, tmp_path):
        reply = f"````bash\ncat >{tmp_path}/README.md <<'E'\n```\nmake\n```\nE\n````\n"
        done = tinker.run([reply, "done"], ShellEnvironment(), max_turns=2)
        assert done.observations == [told(0, "(none)")]
        assert (tmp_path / "README.md").read_text() == "```\nmake\n```\n"

    # ---- what a script sees of the program that runs it

    # hB are the options of any script. pgrep leaves itself out, but would find a process that has
    # the script as an argument.
    @columns("script output").rows(
        its_stdin=("cat", "(none)"),
        its_shell_options=("shopt -p lastpipe; echo $-", "shopt -u lastpipe\nhB"),
        its_variables_but_the_mark=("env | sed 's/=.*//' | grep BASIC", "BASIC_LOOP_MARK"),
        its_command_line=("! pgrep -s 0 -f pgrep", "(none)"),
        its_descriptors=("ls /proc/self/fd | tr '\\n' ' '", "0 1 2 3 "),
    )
    def test_a_script_is_shut_off_from_the_program_that_runs_it(self, script, output, shell):
        text = run_shell(shell, script)
        assert re.sub("^Exit code: [01]", "", text) == f"\nOutput:\n{output}"

    @columns("blocks").rows(
        a_command=["pkill -s 0 -f marmalade; echo alive"],
        a_comment=["# marmalade\npkill -s 0 -f marmalade; echo alive"],
        an_earlier_block=["marmalade() { :; }", "pkill -s 0 -f 'marm.lade'; echo alive"],
        a_later_block=["pkill -s 0 -f 'marm.lade'; echo alive", ": marmalade"],
    )
    def test_pkill_finds_no_word_of_a_block(self, blocks, shell):
        assert run_shell(shell, *blocks) == told(0, "alive")

    def test_no_comment_of_a_program_is_sent(self):
        run_shell(environment := PrintingEnvironment("no report"), "x")
        script, kill = environment.commands
        assert "#" not in script + kill

    def test_the_images_variables_reach_a_script(self, shell):
        names = [
            "base",
            "seconds",
            "half",
            "max_bytes",
            "size",
            "file",
            "files",
            "code",
            "mark",
            "n",
            "i",
            "try",
            "pid",
            "name",
            "output",
            "script",
            "report",
            "text",
            "limit",
            "block",
            "blocks",
            "folder",
            "shm",
            "loop",
            "program",
            "timeout",
        ]
        shell.variables |= dict.fromkeys(names, "image")
        # "image" once for each name.
        script = "printf '%s\\n' " + " ".join(f'"${name}"' for name in names) + " | sort | uniq -c"
        assert run_shell(shell, script) == told(0, f"{len(names):7} image")

    def test_a_script_inherits_no_variable_of_its_program_but_the_mark(self, shell):
        command = ["bash", "-c", "bash -c 'compgen -e; true'"]
        bare = subprocess.run(command, env=shell.variables, capture_output=True, text=True).stdout
        names = sorted({*bare.split(), "BASIC_LOOP_MARK"})
        assert run_shell(shell, "compgen -e | LC_ALL=C sort") == told(0, "\n".join(names))

    def test_a_script_that_is_too_long_is_not_run(self):
        text = run_shell(environment := FakeEnvironment(), 98_000 * "x")
        assert text == told(126, "[Nothing was run: the script is too long. Split it.]")
        assert environment.commands == []

    # ---- what the environment prints

    # The program's report: the output, and then the exit code. It comes after so many seconds. The
    # time limit is 9. YQo= is the output, "a" and a newline.
    @columns("printed seconds expected").rows(
        whole=("begin:M:\nYQo=\n:M:3:\n", 0, told(3, "a")),
        after_other_text=("12:30:45 99:1\nbegin:M:\nYQo=\n:M:3:", 0, told(3, "a")),
        before_other_text=("begin:M:\nYQo=\n:M:3:\nlogout: 99:1\n", 0, told(3, "a")),
        with_other_ends_of_lines=("begin:M:\r\nYWFh\r\nYQo=\r\n:M:3:\r\n", 0, told(3, "aaaa")),
        just_before_the_limit=("begin:M:\n:M:3:", 8.9, told(3, "(none)")),
        a_time_limit_of_its_own=("begin:M:\nYQo=\n:M:124:", 8, told(124, "a")),
        a_kill_before_the_limit=("begin:M:\nYQo=\n:M:137:", 8, told(137, "a")),
        a_SIGTERM_before_the_limit=("begin:M:\nYQo=\n:M:143:", 8, told(143, "a")),
        no_report=("no bash here", 0, told("unknown", f"no bash here\n{NO_REPORT}")),
    )
    def test_what_the_model_is_told_of_a_report(self, printed, seconds, expected):
        assert run_shell_that_prints(printed, seconds) == expected

    # (A script may print in place of the program.)
    @columns("printed").rows(
        cut_in_a_byte="begin:M:\nYQo",
        cut_between_bytes="begin:M:\nYQo=",
        cut_in_the_code="begin:M:\nYQo=\n:M:12",
        of_another_script="begin:1234:\nYQo=\n:1234:0:",
        with_forged_output="begin:M:\nY\n:M:0:",
        with_forged_output_before="begin:M:\nYQ==YQo=\n:M:0:",
        with_a_message_in_it="begin:M:\nYQo=\nbash: line 9: rm: not found\n:M:0:",
        with_a_forged_code="begin:M:\nYQo=\n:M:x:",
    )
    def test_a_report_that_is_not_whole_is_shown_as_it_is(self, printed):
        assert run_shell_that_prints(printed) == told("unknown", f"{printed}\n{NO_REPORT}")

    # The code of the script, which the kill ends, or which ends by itself just then.
    @columns("code").rows(of_SIGTERM=143, of_SIGKILL=137, of_a_script_that_traps_SIGTERM=3)
    def test_a_time_limit_is_told(self, code):
        text = run_shell_that_prints(f"begin:M:\nYQo=:M:{code}:", seconds=9.1)
        assert text == told(code, "a\n[The time limit of 9 seconds was reached.]")

    @columns("printed").rows(
        no_report=60_000 * "x",
        a_report_that_is_cut=f"begin:M:\n{60_000 * 'A'}",
        a_code_of_5000_digits=f"begin:M:\n:M:{5000 * '9'}:",
    )
    def test_without_a_report_the_text_is_short(self, printed):
        """`max_output_bytes` are 99. A message of the agent has less than 300 more."""
        text = run_shell_that_prints(printed, shown_bytes=99)
        assert text.startswith("Exit code: unknown\n")
        assert len(text) < 400

    def test_a_script_that_spoils_its_report_ends_no_run(self, tinker):
        forger = f"echo A >/proc/{REPORTER}/fd/1"
        options = {"max_turns": 3, "command_timeout_sec": 9}
        done = tinker.run([bash(forger), bash("echo a"), "done"], ShellEnvironment(), **options)
        forged, honest = done.observations
        assert forged.startswith("Exit code: unknown\n")
        assert forged.endswith(NO_REPORT)
        assert (honest, done.stop_reason) == (told(0, "a"), "completed")

    # What a script puts in the place of its output.
    @columns("command").rows(
        a_big_file="ln -s {folder}/big", an_endless_device="ln -s /dev/zero", a_folder="mkdir"
    )
    def test_something_else_in_the_place_of_the_output_does_no_harm(self, command, shell, tmp_path):
        (tmp_path / "big").write_text(1_000_000 * "x")
        output = "/dev/shm/$BASIC_LOOP_MARK.output"
        script = f"rm {output}; {command.format(folder=tmp_path)} {output}; exit 3"
        text = run_shell(shell, script, shown_bytes=100)
        assert text.startswith("Exit code: 3\n")
        assert len(text.encode()) < 400

    def test_a_pipe_in_the_place_of_the_output_costs_its_script_alone(self, shell, monkeypatch):
        monkeypatch.setattr(module, "REPORT_SEC", 2)
        output = "/dev/shm/$BASIC_LOOP_MARK.output"
        # Without this writer the reporter would read the pipe for ever.
        writer = f"env -i bash -c 'sleep 9; : >{output.replace('$BASIC_LOOP_MARK', '$0')}'"
        script = f"rm {output}; mkfifo {output}; {writer} $BASIC_LOOP_MARK &"
        text = run_shell(shell, script, seconds=1)
        assert text.startswith("Exit code: unknown\n")

    def test_a_script_may_remove_its_output(self, shell):
        script = "echo a; rm /dev/shm/$BASIC_LOOP_MARK.*; exit 3"
        assert run_shell(shell, script) == told(3, "(none)")

    # ---- images

    def test_output_by_the_name_of_stderr_has_no_holes(self, shell):
        """The name opens the file anew, and empties it."""
        assert run_shell(shell, "echo aaaa; echo b >/dev/stderr; echo c") == told(0, "b\nc")

    @columns("missing output").rows(
        bash=("bash", "bash: command not found"), base64=("base64", "or no base64")
    )
    def test_an_image_that_lacks_a_program_is_told(self, missing, output, shell, tmp_path):
        needed = {"bash", "base64", "head", "rm", "stat", "tail", "grep", "cut"}
        for name in needed - {missing}:
            (tmp_path / name).symlink_to(shutil.which(name))
        shell.variables |= {"PATH": str(tmp_path), "LC_ALL": "C"}
        assert output in run_shell(shell, "echo a")

    @pytest.mark.parametrize("missing", ["grep", "cut"])
    def test_a_script_that_cannot_be_killed_is_an_error(self, missing, shell, tmp_path):
        for name in {"bash", "base64", "rm", "sleep", "grep", "cut"} - {missing}:
            (tmp_path / name).symlink_to(shutil.which(name))
        shell.variables["PATH"] = str(tmp_path)
        message = f"no longer runs scripts: exit code 127: .*{missing}: not found"
        with pytest.raises(RuntimeRequestError, match=message):
            run_shell(shell, "sleep 4", seconds=1)

    # What an image may set.
    @columns("name value").rows(
        posix_mode=("POSIXLY_CORRECT", "1"),
        a_clock=("SECONDS", "5000"),
        a_file_for_each_shell=("BASH_ENV", "/dev/fd/0"),
        an_unknown_locale=("LC_ALL", "xx_XX.UTF-8"),
    )
    def test_a_variable_of_the_image_breaks_nothing(self, name, value, shell):
        shell.variables[name] = value
        assert run_shell(shell, "true\n(exit 3)").startswith("Exit code: 3\n")

    def test_the_time_limit_holds_in_an_image_with_such_variables(self, shell):
        shell.variables |= {"POSIXLY_CORRECT": "1", "SECONDS": "5000"}
        assert run_shell(shell, "echo a; sleep 9", seconds=1) == told(143, f"a\n{LIMIT}")

    @needs_mounts
    def test_a_sandbox_without_dev_fd_runs_scripts(self, tmp_path):
        devices = ("mkdir shm", "touch null", "mount --bind /dev/null null", "mount --rbind . /dev")
        environment = MountEnvironment(f"cd {tmp_path}", *devices)
        text = run_shell(environment, "ls /dev; cat <<<a")
        assert text == told(0, "null\nshm\na")

    # ---- files and devices

    @needs_mounts
    @columns("memory").rows(
        full="mount -t tmpfs -o size=64k none /dev/shm; head -c 65536 /dev/zero >/dev/shm/x",
        read_only="mount -t tmpfs -o ro none /dev/shm",
        # A /dev that has nothing but null.
        missing="mount -t tmpfs none /mnt && touch /mnt/null && "
        "mount --bind /dev/null /mnt/null && mount --rbind /mnt /dev",
    )
    def test_without_room_in_memory_the_disk_is_used(self, memory):
        environment = MountEnvironment(memory)
        text = run_shell(environment, "seq 99999; exit 3", shown_bytes=10)
        assert text == told(3, "1\n2\n3\n[... 588878 bytes left out ...]\n9999")

    @needs_mounts
    def test_a_message_on_the_way_to_the_disk_cannot_come_into_the_report(self, tmp_path):
        """Docker carries stderr in a pipe of its own, so what is in there may come late."""
        stderr = tmp_path / "stderr"
        environment = MountEnvironment(f"exec 2>{stderr}", "mount -t tmpfs -o ro none /dev/shm")
        assert run_shell(environment, "echo a") == told(0, "a")
        assert stderr.read_text() == ""

    @needs_mounts
    def test_a_folder_where_half_of_a_script_fits_is_left_empty(self):
        environment = MountEnvironment("mount -t tmpfs -o size=8k none /dev/shm")
        blocks = ["echo a", f"ls -A /dev/shm # {9000 * 'x'}", "echo b"]
        assert run_shell(environment, *blocks) == told(0, "a\nb")

    @needs_mounts
    @columns("script seen").rows(
        by_the_output=("seq 99999; exit 3", "1\n2\n3\n\n[... "),
        by_another_file=("cat /dev/zero >/dev/shm/x; exit 3", "(none)"),
    )
    def test_of_a_script_that_fills_the_memory_the_exit_code_is_told(self, script, seen):
        environment = MountEnvironment("mount -t tmpfs -o size=64k none /dev/shm")
        text = run_shell(environment, script, shown_bytes=12)
        assert text.startswith(f"Exit code: 3\nOutput:\n{seen}")

    # A part of the script would fit.
    @needs_mounts
    @columns("blocks").rows(
        part_of_a_block=["touch /mnt/never\n# " + 9000 * "x" + "\nexit 0"],
        one_of_two_blocks=["touch /mnt/never", "# " + 9000 * "x"],
    )
    def test_a_script_that_fits_nowhere_is_told_and_not_run(self, blocks, tmp_path):
        small = [f"mount -t tmpfs -o size=8k none {folder}" for folder in ("/dev/shm", "/tmp")]
        environment = MountEnvironment(f"mount --bind {tmp_path} /mnt", *small)
        text = run_shell(environment, *blocks)
        assert text.startswith("Exit code: unknown\n")
        assert "no room in /dev/shm and /tmp" in text
        assert not (tmp_path / "never").exists()

    @needs_mounts
    def test_folders_that_cannot_be_written_are_told(self):
        read_only = [f"mount -t tmpfs -o ro none {folder}" for folder in ("/dev/shm", "/tmp")]
        text = run_shell(MountEnvironment(*read_only), "true")
        assert text.startswith("Exit code: unknown\n")
        assert "no room in /dev/shm and /tmp" in text

    @columns("script seconds").rows(
        by_itself=("echo a", 9),
        at_the_limit=("sleep 9", 1),
        unread=("fi", 9),
        that_ends_its_program=(f"kill {REPORTER}; sleep 9", 9),
    )
    def test_a_script_leaves_no_file_of_its_own(self, script, seconds, shell):
        run_shell(shell, script, seconds=seconds)
        (mark,) = shell.marks
        left = [*os.listdir("/dev/shm"), *os.listdir("/tmp")]
        assert [name for name in left if name.startswith(mark)] == []

    # ---- what goes on, and what is killed

    def test_the_time_limit_ends_all_that_a_script_started(self, shell):
        # A process in a session of its own, one with a time limit of its own, and one that ignores
        # SIGTERM.
        script = f"echo a; setsid {SLEEP} & timeout 90 {SLEEP} & trap '' TERM; {SLEEP}"
        assert run_shell(shell, script, seconds=1) == told(137, f"a\n{LIMIT}")
        wait_until_sleep_ends()

    def test_a_silent_server_does_not_hold_a_script_up(self, shell):
        assert run_shell(shell, f"{SLEEP} & echo a") == told(0, "a")

    def test_a_server_that_a_script_left_lives_on(self, shell, tmp_path):
        # It outlives its script, a kill of the next one, and the removal of the file that it
        # prints to.
        server = "until [ -e go ]; do sleep 0.1; done; echo hello && touch alive"
        assert run_shell(shell, f"cd {tmp_path}; ({server}) & echo a") == told(0, "a")
        run_shell(shell, "sleep 9", seconds=1)
        script = f"cd {tmp_path}; touch go; until [ -e alive ]; do sleep 0.1; done"
        assert run_shell(shell, script) == told(0, "(none)")

    @columns("command code").rows(
        a_time_limit_of_its_own=("timeout 0.1 sleep 9", 124),
        a_crash=("bash -c 'kill -SEGV $$' 2>/dev/null", 139),
        an_interrupt=("bash -c 'kill -INT $$'", 130),
    )
    def test_a_server_outlives_a_script_whose_last_command_fails(
        self, command, code, shell, tmp_path
    ):
        server = "until [ -e go ]; do sleep 0.1; done; touch alive"
        text = run_shell(shell, f"cd {tmp_path}; ({server}) & {command}")
        assert text.startswith(f"Exit code: {code}\n")
        (tmp_path / "go").touch()
        script = f"until [ -e {tmp_path}/alive ]; do sleep 0.1; done"
        assert run_shell(shell, script, seconds=2) == told(0, "(none)")

    # How the script's exec ends, what the model reads, and the seconds until then: the limit of
    # 100, and 30 more until the agent gives up. The kill works.
    LIMIT_OF_100 = f"{NO_REPORT}\n[The time limit of 100 seconds was reached.]"

    @columns("answer printed end_of_text seconds").rows(
        hangs=(forever, "no answer\n", LIMIT_OF_100, 130),
        ends_at_a_limit_of_the_environment=(
            TimeoutError("exec"),
            "TimeoutError: exec\n",
            NO_REPORT,
            0,
        ),
        raises=(RuntimeError("no container"), "RuntimeError: no container\n", NO_REPORT, 0),
        cannot_decode=(
            UnicodeDecodeError("x", b"", 0, 1, "y"),
            "UnicodeDecodeError: 'x' codec",
            NO_REPORT,
            0,
        ),
    )
    def test_a_script_without_a_report_is_killed_and_told(
        self, answer, printed, end_of_text, seconds
    ):
        environment = FakeEnvironment(answer, ExecResult(stdout=None, return_code=0))

        async def main() -> tuple[str, float]:
            text = await script_agent(seconds=100).execute(["x"], environment)
            return text, asyncio.get_running_loop().time()

        text, end = asyncio.run(main(), loop_factory=virtual_loop)
        assert text.startswith(f"Exit code: unknown\nOutput:\n{printed}")
        assert text.endswith(f"\n{end_of_text}")
        assert end == seconds
        assert environment.first_script_was_killed
        # The environment's own limits come later than the agent's.
        assert environment.timeouts == [100 + 90, 30]
        # The kill runs in "/", because the script may have moved the working directory away.
        assert environment.folders == [None, "/"]

    def test_a_script_whose_report_is_lost_is_not_run_again(self):
        environment = PrintingEnvironment("begin:M:\n")
        assert run_shell(environment, "x").startswith("Exit code: unknown\n")
        assert len(environment.scripts) == 1

    # How the exec that kills the script ends, and the seconds until then: at most 30.
    @columns("killing seconds").rows(
        fails=(RuntimeError("gone"), 100),
        hangs=(forever, 130),
        returns_an_error=(ExecResult(stdout="", stderr="gone", return_code=1), 100),
        returns_a_code=(ExecResult(return_code=1), 100),
    )
    def test_an_environment_that_cannot_even_kill_is_an_error(self, killing, seconds):
        environment = FakeEnvironment(forever, killing)

        async def main() -> float:
            with pytest.raises(RuntimeRequestError, match="environment no longer runs scripts"):
                await script_agent(seconds=100).execute(["x"], environment)
            return asyncio.get_running_loop().time()

        assert asyncio.run(main(), loop_factory=virtual_loop) == seconds

    def test_cancelling_a_script_kills_it_in_any_environment(self):
        environment = FakeEnvironment(forever)
        run = script_agent().execute(["x"], environment)
        # `wait_for` raises TimeoutError for a cancellation.
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(run, 0.01))
        assert environment.first_script_was_killed
        assert environment.folders == [None, "/"]

    def test_an_exec_that_does_not_answer_is_given_up(self):
        ended = []

        async def never_answers() -> None:
            try:
                await forever()
            finally:
                ended.append("here")

        environment = FakeEnvironment(never_answers, ExecResult(stdout=None, return_code=0))

        async def main() -> None:
            await script_agent(seconds=100).execute(["x"], environment)
            await asyncio.sleep(0)
            assert ended

        asyncio.run(main(), loop_factory=virtual_loop)

    def test_an_exec_that_is_slow_to_end_holds_no_run_up(self):
        """After 39 seconds the agent gives this exec up, which takes 5 more."""

        async def is_slow_to_end() -> str:
            try:
                await forever()
            finally:
                await asyncio.sleep(5)

        async def main() -> float:
            await script_agent().execute(["ls"], FakeEnvironment(is_slow_to_end))
            return asyncio.get_running_loop().time()

        assert asyncio.run(main(), loop_factory=virtual_loop) == 39

    @columns("script").rows(
        that_ignores_SIGTERM=f"trap '' TERM; {SLEEP} & {SLEEP}",
        in_a_session_of_its_own=f"setsid {SLEEP} & {SLEEP}",
    )
    def test_cancelling_a_script_kills_it(self, script, shell):
        run = script_agent(seconds=7000).execute([script], shell)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(run, 0.4))
        wait_until_sleep_ends()

    # ---- SIGTERM first

    def test_at_the_time_limit_a_child_has_two_seconds_to_clean_up(self, shell, tmp_path):
        assert run_shell(shell, cleaner(tmp_path, "trap '' TERM; sleep 1"), seconds=1) == told(
            143, f"ready\n{LIMIT}"
        )
        assert (tmp_path / "clean").exists()

    def test_on_cancellation_a_child_has_two_seconds_to_clean_up(self, shell, tmp_path):
        run = script_agent().execute([cleaner(tmp_path)], shell)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(run, 1))
        assert (tmp_path / "clean").exists()

    def test_without_a_report_a_child_has_two_seconds_to_clean_up(self, shell, tmp_path):
        script = f"({cleaner(tmp_path)}) & sleep 0.5; kill -9 {REPORTER}; wait"
        assert run_shell(shell, script).startswith("Exit code: unknown\n")
        assert (tmp_path / "clean").exists()

    def test_at_max_seconds_a_child_has_two_seconds_to_clean_up(self, tinker, shell, tmp_path):
        done = tinker.run([bash(cleaner(tmp_path))], shell, max_turns=2, max_seconds=1.5)
        assert done.stop_reason == "rollout_timeout"
        assert (tmp_path / "clean").exists()

    def test_a_child_that_cleans_up_for_longer_is_killed(self, shell, tmp_path):
        run_shell(shell, cleaner(tmp_path, f"trap '' TERM; {SLEEP}"), seconds=1)
        wait_until_sleep_ends()
        assert not (tmp_path / "clean").exists()

    def test_a_child_that_ends_at_once_is_not_waited_for(self, shell, tmp_path):
        program = '#!/bin/sh\necho "$1" >>"$0.log"\nexec /bin/sleep "$1"\n'
        (tmp_path / "sleep").write_text(program)
        (tmp_path / "sleep").chmod(0o755)
        shell.variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        run_shell(shell, "sleep 9", seconds=1)
        # A child that goes on has twenty pauses.
        pauses = (tmp_path / "sleep.log").read_text().split()
        assert pauses.count("9") == 1
        assert pauses.count("0.1") < 20

    # While `git add` reads a file by this filter, it holds its lock.
    @pytest.mark.skipif(not shutil.which("git"), reason="needs git")
    @columns("seconds limit ending").rows(
        time_limit=(1, 9, contextlib.nullcontext()),
        cancellation=(9, 1, pytest.raises(TimeoutError)),
    )
    def test_git_leaves_no_lock(self, seconds, limit, ending, shell, tmp_path):
        git = (
            f"cd {tmp_path}; git init -q; echo '* filter=slow' >.gitattributes; "
            f"git config filter.slow.clean '{SLEEP}'; (sleep 0.5; ls .git >locked) & git add ."
        )
        run = script_agent(seconds=seconds).execute([git], shell)
        with ending:
            asyncio.run(asyncio.wait_for(run, limit))
        assert "index.lock" in (tmp_path / "locked").read_text()
        assert not (tmp_path / ".git/index.lock").exists()

    # ---- a working directory that is gone

    @columns("script").rows(
        moved="mv $PWD $PWD-moved; echo a",
        removed="rm -r $PWD; echo a",
        moved_by_its_parent="mv $(dirname $PWD) {moved}; echo a",
    )
    def test_scripts_after_one_that_takes_the_folder_away_run_in_the_root(self, script, tmp_path):
        (tmp_path / "work").mkdir()
        environment = WorkdirEnvironment(tmp_path / "work" / "dir")
        script = script.format(moved=tmp_path / "moved")
        assert run_shell(environment, script) == told(0, "a")
        assert run_shell(environment, "pwd; exit 3") == told(3, f"/\n{MOVED}")

    def test_a_run_whose_working_directory_is_gone_is_completed(self, tinker, tmp_path):
        replies = [bash("rm -r $PWD"), bash("echo b"), "done"]
        environment = WorkdirEnvironment(tmp_path / "work")
        done = tinker.run(replies, environment, max_turns=3)
        assert done.observations == [told(0, "(none)"), told(0, f"b\n{MOVED}")]
        assert done.stop_reason == "completed"

    def test_no_blank_line_stands_before_the_notice_of_a_silent_script(self, tmp_path):
        environment = WorkdirEnvironment(tmp_path / "work")
        run_shell(environment, "rm -r $PWD")
        assert run_shell(environment, "true") == told(0, MOVED)

    def test_a_script_that_takes_the_folder_away_is_killed_at_its_limit(self, tmp_path):
        environment = WorkdirEnvironment(tmp_path / "work")
        text = run_shell(environment, f"rm -r $PWD; setsid {SLEEP} & {SLEEP}", seconds=1)
        assert text == told(143, LIMIT)
        wait_until_sleep_ends()

    # What an environment may do for a folder that is gone, and which folders are tried.
    @columns("answer printed").rows(
        prints_an_error=(ExecResult(stdout="chdir failed", return_code=126), "chdir failed"),
        prints_it_to_stderr=(ExecResult(stderr="chdir failed", return_code=1), "chdir failed"),
        prints_nothing=(ExecResult(return_code=127), ""),
    )
    def test_a_script_that_starts_nowhere_is_told(self, answer, printed):
        killed = ExecResult(return_code=0)
        environment = FakeEnvironment(answer, killed, answer, answer, killed)
        text = run_shell(environment, "x")
        assert text == told("unknown", "\n".join(filter(None, [printed, NO_REPORT])))
        # The script, a kill, `true`, the script once more, and a kill.
        assert environment.folders == [None, "/", None, "/", "/"]

    # The code of the lost report's program, and then that of `true` in the working directory.
    @pytest.mark.parametrize(("code", "true_code"), [(0, 0), (0, 126), (1, 0), (137, 0)])
    def test_a_script_whose_report_is_lost_does_not_run_twice(self, code, true_code):
        lost, killed = ExecResult(return_code=code), ExecResult(return_code=0)
        environment = FakeEnvironment(lost, killed, ExecResult(return_code=true_code))
        assert run_shell(environment, "x") == told("unknown", NO_REPORT)
        assert len(environment.scripts) == 1

    def test_a_script_that_starts_nowhere_does_not_start_after_its_time_limit(self):
        async def slow() -> ExecResult:
            await asyncio.sleep(2)
            return ExecResult(return_code=126)

        environment = FakeEnvironment(slow, ExecResult(return_code=0), slow, "too late")
        run = script_agent(seconds=1).execute(["x"], environment)
        text = asyncio.run(run, loop_factory=virtual_loop)
        assert text == told("unknown", f"{NO_REPORT}\n{LIMIT}")
        assert len(environment.scripts) == 1

    def test_a_cancelled_script_is_killed_where_commands_run_one_at_a_time(self):
        class OneAtATime(FakeEnvironment):
            lock = asyncio.Lock()

            async def exec(self, *arguments: Any, **options: Any) -> Any:
                async with self.lock:
                    return await super().exec(*arguments, **options)

        environment = OneAtATime(forever, ExecResult(return_code=0))
        run = asyncio.wait_for(script_agent().execute(["x"], environment), 1)
        with pytest.raises(TimeoutError):
            asyncio.run(run, loop_factory=virtual_loop)
        assert len(environment.commands) == 2


# ------------------------------------------------------------------------------ prompts on Tinker

# The renderers that need their model's own tokenizer, which the package tml-renderers has. The
# suite's tokenizer serves the others.
INKLING = "thinkingmachines/Inkling"
OWN_TOKENIZERS = {"tml_v0": INKLING, "kimi_k31_pro": "moonshotai/Kimi-K3.1-Pro"}
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
# The cookbook's `get_renderer` compares the name with each.
IN_COOKBOOK = re.findall(r'name == "(\w+)"', RENDERER_SOURCES)


class Family:
    """A renderer, and what its model would sample."""

    def __init__(self, name: str, tokenizer_dir: str) -> None:
        own = [model for prefix, model in OWN_TOKENIZERS.items() if name.startswith(prefix)]
        (model_name,) = own or [tokenizer_dir]
        self.options = {"model_name": model_name, "renderer_name": name}
        self.renderer = renderers.get_renderer(name, get_tokenizer(model_name))
        # This template closes a reply by another token than the model, so each later prompt is
        # rendered.
        self.renders_again = name.startswith("gpt_oss")

    def reply(self, answer: str, thinking: str = "hm") -> list[int]:
        """The ids that the model would sample for a reply. In a supervised example these are the
        ones with a weight. The reply has thinking if the renderer takes any."""
        content = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": answer}]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        try:
            prompt, weights = self.renderer.build_supervised_example(messages)
        except renderers.RendererError:
            messages[1]["content"] = answer
            prompt, weights = self.renderer.build_supervised_example(messages)
        return list(itertools.compress(prompt.to_ints(), weights.tolist()))


@pytest.fixture(params=[name for name in RENDERER_NAMES.split() if name in IN_COOKBOOK])
def family(request, tokenizer_dir) -> Family:
    if request.param.startswith("kimi_k31_pro"):
        tokenizers = pytest.importorskip("tml_renderers.tokenizers")
        if not hasattr(tokenizers, "KimiK3Tokenizer"):
            pytest.skip("the tokenizer is in tml-renderers 0.4.1 and later")
    return Family(request.param, tokenizer_dir)


def sampling_by(service: Any) -> type[BasicLoopAgent]:
    """A trainer's agent, which samples by the trainer's service."""
    return type("TrainersAgent", (BasicLoopAgent,), {"tinker_service": service})


class TestTinker:
    @columns("given expected").rows(
        defaults=({}, {}),
        temperature_0=({"temperature": 0}, {"temperature": 0.0}),
        no_temperature=({"temperature": None}, {}),
        top_p=({"top_p": 0.5}, {"top_p": 0.5}),
        seed=({"llm_kwargs": {"seed": 3}}, {"seed": 3}),
    )
    def test_tinker_gets_the_sampling_options(self, given, expected, tinker):
        tinker.run(**given)
        defaults = {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}
        stop = tinker.encode("<|im_end|>")
        assert dict(tinker.params[0]) == {**defaults, "stop": stop, **expected}

    @columns("cut_off end n_breaks").rows(
        complete=(False, "<|im_end|>", 0),
        cut_off=(True, "", 0),
        with_another_end=(False, "<|endoftext|>", 1),
    )
    def test_only_a_reply_with_another_end_is_rendered_again(self, cut_off, end, n_breaks, tinker):
        # The text is the same. Only the ids tell whether the reply is as it was sampled.
        ids = tinker.ids_by_character(f"hello{end}")
        replies = [Reply(ids=ids, cut_off=cut_off), "done"]
        done = tinker.run(replies, agent_class=OwnLoop, max_turns=2, system_prompt="")
        assert tinker.prompt_text(1) == (
            "<|im_start|>user\ndo it<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
            "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        )
        assert done.metadata["n_prefix_breaks"] == n_breaks

    @columns("reply added").rows(with_both=([7, 9, 9], []), with_one=([7, 9], [9]))
    def test_the_prompt_adds_the_stop_tokens_that_a_reply_lacks(
        self, reply, added, tinker, monkeypatch
    ):
        """The made-up template of this test ends each message by the id 9, twice."""

        async def render(messages: list[dict]) -> list[int]:
            return [id for message in messages for id in (ord(message["content"]), 9, 9)] + [3]

        (client,) = set_up(tinker.agent())
        monkeypatch.setattr(client, "render", render)
        messages = [{"role": "user", "content": text} for text in ("q", "n")]
        previous = Turn(prompt_token_ids=[1, 2], completion_token_ids=reply)
        prompt = asyncio.run(client.next_prompt(messages, previous))
        assert prompt == [1, 2, *reply, *added, ord("n"), 9, 9, 3]

    def test_a_prompt_that_leaves_one_token_is_sampled(self, tinker):
        length = len(tinker.run().recorded[0].prompt)
        ended = tinker.run(context_limit=length + 1)
        assert (ended.stop_reason, ended.context.n_output_tokens) == ("max_tokens", 1)

    def test_a_later_prompt_that_fills_the_context_ends_the_run(self, tinker):
        turns = tinker.run([bash("ls"), "done"], max_turns=2).agent.turns
        limit = len(turns[1].prompt_token_ids)
        ended = tinker.run([bash("ls"), "done"], max_turns=2, context_limit=limit)
        assert (ended.stop_reason, ended.metadata["n_episodes"]) == ("context_overflow", 1)

    @columns("servers given limit").rows(
        servers=(50_000, None, 50_000),
        lower=(50_000, 300, 300),
        higher=(50_000, 60_000, 50_000),
        unknown=(None, None, 32_000),
        higher_than_the_default=(None, 64_000, 64_000),
    )
    def test_tinkers_context_limit_is_the_smaller_one(self, servers, given, limit, tinker):
        tinker.context_limit = servers
        tinker.run(max_tokens=99_999, context_limit=given)
        assert tinker.params[0].max_tokens == limit - len(tinker.sampled[0].prompt)

    @pytest.fixture
    def own_rest_clients(self, monkeypatch) -> None:
        """The SDK builds one client at a time, so a server that does not answer holds up those of
        later tests. Here the SDK has none yet, and later tests have other ones."""
        from tinker.lib.public_interfaces import rest_client_common as sdk

        monkeypatch.setattr(sdk, "sessionless_holder_cache", type(sdk.sessionless_holder_cache)())

    @columns("is_listening").rows(accepts_and_never_answers=True, nothing_listens=False)
    def test_a_tinker_server_that_does_not_answer_stops_only_its_trial(
        self, is_listening, tokenizer_dir, tmp_path, monkeypatch, own_rest_clients
    ):
        """The SDK is the real one, and would wait for minutes."""
        # (In a shorter time the SDK's own start may leave the other trial hardly a tick.)
        monkeypatch.setattr(module, "FIRST_RESPONSE_SEC", 1.5)
        # The connections wait here to be accepted.
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1] if is_listening else 1}"
        options = {"model_name": tokenizer_dir, "renderer_name": "qwen3_instruct"}
        agent = BasicLoopAgent(
            logs_dir=tmp_path, api_base=f"http://user:secret@{address}", **options
        )

        async def another_trial() -> None:
            while True:
                await asyncio.sleep(0.01)
                ticks.append(time.monotonic())

        async def main() -> None:
            other = asyncio.create_task(another_trial())
            with pytest.raises(module.ApiError) as error:
                await agent.setup(FakeEnvironment())
            assert str(error.value) == f"http://{address} did not answer within 1.5 seconds"
            assert "secret" not in shown_text(error.value)
            other.cancel()

        ticks: list[float] = []
        asyncio.run(main())
        listener.close()
        assert ticks[-1] - ticks[0] < 10
        assert len(ticks) > 10

    def test_a_thread_may_end_after_the_wait_for_it_was_cancelled(self, monkeypatch):
        errors, threads, end = [], [], threading.Event()
        monkeypatch.setattr(threading, "excepthook", errors.append)

        def work() -> None:
            threads.append(threading.current_thread())
            end.wait(9)

        async def main() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(module.in_daemon_thread(work), 0.1)

        asyncio.run(main())
        end.set()
        threads[0].join(9)
        # (Threads of other tests may end now, too.)
        assert [error for error in errors if error.thread in threads] == []

    @columns("error").rows(no_such_path=Refusal(404), not_allowed=Refusal(403))
    def test_a_tinker_server_need_not_tell_its_limit(self, error, tinker, monkeypatch):
        answer = Future()
        answer.set_exception(error)
        silent = SimpleNamespace(get_server_capabilities=lambda: answer)
        monkeypatch.setattr("tinker.RestClient", lambda **arguments: silent)
        (client,) = set_up(tinker.agent())
        assert client.context_limit == 32_000

    def test_a_base_models_end_of_text_is_taken_off(self, tinker):
        # cut_off: the renderer's stop token does not follow.
        assert tinker.run([Reply("hi<|endoftext|>", cut_off=True)]).completion == "hi"

    @columns("text ends_in_token answer").rows(
        the_token=("hi", True, "hi"),
        the_bare_word=("hi endoftext", False, "hi endoftext"),
        both=("hi endoftext", True, "hi endoftext"),
    )
    def test_only_inklings_end_token_is_taken_off(self, text, ends_in_token, answer, tinker):
        """Its tokenizer calls this token "endoftext", which is also a word."""
        tokenizer = get_tokenizer(INKLING)
        assert tokenizer.eos_token == "endoftext"
        ids = tokenizer.encode(text) + [tokenizer.eos_token_id] * ends_in_token
        inkling = {"model_name": INKLING, "renderer_name": "tml_v0"}
        assert tinker.run([Reply(ids=ids, cut_off=True)], **inkling).completion == answer

    def test_an_added_token_of_one_character_is_kept(self, tinker):
        (client,) = set_up(tinker.agent())
        assert client.escape_special_tokens("a § b") == "a § b"

    def test_text_for_a_model_without_special_tokens_is_kept(self, tinker):
        """Inkling's tokenizer turns no text into a special token."""
        (client,) = set_up(tinker.agent(model_name=INKLING, renderer_name="tml_v0"))
        assert client.escape_special_tokens("a<|message_user|>") == "a<|message_user|>"

    def test_tinker_opens_a_checkpoint_else_the_base_model(self, tinker, tokenizer_dir):
        more = {"llm_kwargs": {"record_stability_info": True}}
        set_up(tinker.agent(), tinker.agent(model_path="tinker://run/1", **more))
        # Path, base model, record_stability_info.
        assert tinker.opened == [(None, tokenizer_dir, False), ("tinker://run/1", None, True)]

    def test_what_tinkers_trainer_needs_of_each_turn_is_recorded(self, tinker):
        replies = [Reply(bash("ls")), Reply("done", answer={"prompt_cache_hit_tokens": 7})]
        (detail,) = tinker.run(replies, max_turns=2).context.rollout_details
        assert detail["extra"] == {
            "sequence_id": ["sequence-1", "sequence-2"],
            "prompt_cache_hit_tokens": [0, 7],
        }

    def test_a_model_has_its_recommended_renderer_by_default(self, tinker):
        # Only the prompt matters. The fake's replies have ids of another tokenizer.
        done = tinker.run(model_name=INKLING, renderer_name=None, max_tokens=1)
        assert "<|message_user|>" in get_tokenizer(INKLING).decode(done.recorded[0].prompt)

    def test_threads_use_the_tokenizer_under_a_lock(self, tinker, monkeypatch):
        """To build the client, to render the prompt, for its end, and to decode the reply."""
        lock = MagicMock()
        monkeypatch.setattr(module, "_tokenizer_lock", lock)
        tinker.run()
        assert lock.__enter__.call_count == 4

    def test_tinkers_clients_share_a_session_for_each_key(self, tinker):
        own = {"TINKER_API_KEY": "own", "TINKER_BASE_URL": "http://own"}
        set_up(tinker.agent(), tinker.agent(max_tokens=1), tinker.agent(extra_env=own))
        assert [session.arguments for session in tinker.sessions] == [
            {"base_url": None, "api_key": "tml-test"},
            {"base_url": "http://own", "api_key": "own"},
        ]

    def test_a_session_that_has_ended_is_replaced(self, tinker):
        set_up(tinker.agent())
        tinker.sessions[0].status = 410
        with pytest.raises(module.ApiError, match=r"^Refusal from Tinker: "):
            set_up(tinker.agent(max_tokens=1))
        set_up(tinker.agent(max_tokens=2), tinker.agent(max_tokens=3))
        assert len(tinker.sessions) == 2

    # How many sessions there are when another client has been built after such a second reply.
    @columns("reply n_sessions").rows(an_error=(RuntimeError("gone"), 2), a_full_context=(FULL, 1))
    def test_only_an_error_of_a_call_replaces_the_session(self, reply, n_sessions, tinker):
        asyncio.run(finish(tinker.new_run([bash("ls"), reply], max_turns=2)))
        set_up(tinker.agent(max_tokens=1))
        assert len(tinker.sessions) == n_sessions

    def test_an_error_of_a_wrapped_client_replaces_the_session(self, tinker):
        """The agent does not see that the example's client is one of Tinker."""
        from examples.two_candidates import TwoCandidates

        failing = tinker.new_run([RuntimeError("gone")], agent_class=TwoCandidates)
        asyncio.run(finish(failing))
        set_up(tinker.agent(max_tokens=1))
        assert len(tinker.sessions) == 2

    def test_a_script_keeps_the_spaces_that_were_sampled(self, tinker):
        script = "cp ../a . ; [ 1 != 2 ] && echo ok , done"
        done = tinker.run([bash(script), "done"], max_turns=2)
        assert done.agent.turns[0].script == f"{script}\n"

    def test_a_checkpoint_of_another_model_is_refused(self, tinker):
        """Its ids would be those of another tokenizer."""
        tinker.base_model = "other/model"
        options = {"renderer_name": "tml_v0", "model_path": "tinker://1"}
        with pytest.raises(module.ApiError, match="checkpoint of other/model: set -m other/model"):
            set_up(tinker.agent(model_name=INKLING, **options))

    @pytest.mark.parametrize("category", ["server", "unknown"])
    def test_a_failure_inside_tinker_is_waited_for(self, category, tinker, no_pause):
        done = tinker.run([bash("ls"), tinker_error("gone", category), "done"], max_turns=2)
        assert (done.stop_reason, done.completion) == ("completed", "done")

    def test_a_tokenizer_that_cannot_be_loaded_is_told(self, tinker):
        agent = tinker.agent(model_name="no-such/model", renderer_name="qwen3")
        with pytest.raises(ValueError, match="cannot load the tokenizer of no-such/model"):
            set_up(agent)

    def test_a_model_that_tinker_cookbook_does_not_know_is_told(self, tinker):
        agent = tinker.agent(model_name="anthropic/claude-sonnet-4-5", renderer_name=None)
        with pytest.raises(ValueError, match=r"does not know anthropic/.*model_client=litellm"):
            set_up(agent)

    @columns("variable argument").rows(
        url=("TINKER_BASE_URL", "base_url"), key=("TINKER_API_KEY", "api_key")
    )
    def test_a_session_follows_a_variable_that_changes_between_trials(
        self, variable, argument, tinker, monkeypatch
    ):
        async def main() -> None:
            for value in ("http://one", "http://two"):
                monkeypatch.setenv(variable, value)
                await tinker.agent().setup(FakeEnvironment())

        asyncio.run(main())
        values = [session.arguments[argument] for session in tinker.sessions]
        assert values == ["http://one", "http://two"]

    def test_the_cost_on_tinker_is_unknown(self, tinker):
        assert tinker.run().context.cost_usd is None

    def test_a_given_service_needs_no_key(self, tinker, no_key, monkeypatch):
        def refuse(base_url: Any, api_key: Any) -> Any:
            """Without a key the SDK refuses to ask for the model's limit."""
            raise tinker_sdk.TinkerError("The api_key client option must be set")

        monkeypatch.setattr("tinker.RestClient", refuse)
        agent_class = sampling_by(tinker.open_session())
        assert tinker.run(agent_class=agent_class).completion == "hello"

    @since_harbor_023
    def test_preflight_needs_no_key_for_a_given_service(self, tinker, no_key):
        # Without the service it is an error (see TestOptions).
        sampling_by(tinker.open_session()).preflight({}, {})

    def test_a_given_service_is_never_replaced(self, tinker):
        agent_class = sampling_by(tinker.open_session())
        tinker.sessions[0].status = 410
        with pytest.raises(module.ApiError, match=r"^Refusal from Tinker: "):
            set_up(tinker.agent(agent_class))
        tinker.sessions[0].status = None
        set_up(tinker.agent(agent_class))
        assert len(tinker.sessions) == 1

    @columns("minutes stop_reason").rows(nine=(9, "completed"), thirteen=(13, "error"))
    def test_a_tinker_that_is_busy_has_ten_minutes(self, minutes, stop_reason, tinker, monkeypatch):
        monkeypatch.setattr(module, "PAUSES_SEC", (0, *[60] * 9))
        replies = [bash("ls"), *[Refusal(503)] * minutes, "done"]
        run = tinker.new_run(replies, max_turns=3)
        asyncio.run(finish(run), loop_factory=virtual_loop)
        assert run.stop_reason == stop_reason

    @pytest.mark.skipif(not REAL_TINKER, reason="TINKER_BASE_URL names no server")
    @pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
    def test_a_real_tinker_continues_from_the_sampled_ids(self, tmp_path, monkeypatch):
        # On a CPU the first reply takes over a minute.
        signal.alarm(600)
        monkeypatch.setenv("TINKER_BASE_URL", REAL_TINKER)
        options = {"model_name": TINKER_MODEL, "renderer_name": "qwen3_instruct"}
        agent = BasicLoopAgent(logs_dir=tmp_path, max_tokens=200, **options)
        first, second = AgentRun(agent).follow("one", "two").recorded
        ids = first.prompt + first.completion
        assert second.prompt[: len(ids)] == ids
        # The SDK (0.38) leaves a socket open. Collect it here, where its warning is ignored.
        gc.collect()

    def test_the_list_names_every_renderer_of_the_cookbook(self):
        # Cookbook 0.5.7 has 38. Fewer would show that this looks in the wrong place.
        assert len(IN_COOKBOOK) >= 38
        assert set(IN_COOKBOOK) <= set(RENDERER_NAMES.split())

    def test_a_later_prompt_goes_on_from_the_sampled_ids(self, tinker, family):
        # Templates strip blanks. What was sampled keeps them.
        texts = ["\n\n \t hm \n" + bash("a"), bash("b"), "\n" + bash("c"), bash("d")]
        replies = [Reply(ids=family.reply(text)) for text in texts]
        done = tinker.run(replies, FakeEnvironment("\n o \n"), **family.options, max_turns=4)
        assert done.scripts == ["a", "b", "c", "d"]
        assert done.recorded == tinker.sampled
        assert bool(done.metadata["n_prefix_breaks"]) is family.renders_again

    def test_a_later_prompt_ends_as_the_template_would(self, tinker, family):
        if family.renders_again:
            pytest.skip("the whole prompt is rendered")
        replies = [Reply(ids=family.reply(bash("ls")))] * 2
        done = tinker.run(replies, FakeEnvironment("out"), **family.options, max_turns=2)
        first, second = done.recorded
        # The tail begins with the stop token, which is the first completion's last id.
        tail = second.prompt[len(first.prompt + first.completion) - 1 :]
        history = list(done.agent.messages[:-1])
        rendered = family.renderer.build_generation_prompt(history).to_ints()
        assert len(tail) > 1
        assert rendered[-len(tail) :] == tail

    def test_output_adds_no_special_token_to_a_prompt(self, tinker, family):
        """The special tokens of a prompt are the template's, whatever a script prints."""
        added = tinker.tokenizer.get_added_tokens_decoder().values()
        # The last one is Inkling's.
        names = [token.content for token in added if len(token.content) > 1] + ["<|message_user|>"]
        # Each by itself, after a bracket, and twice.
        hostile = "".join(f"a {name} b<{name}<{name}\n" for name in names)
        (client,) = set_up(tinker.agent(**family.options))

        def special_tokens(text: str) -> list[str]:
            ids = asyncio.run(client.render([{"role": "user", "content": text}]))
            pieces = [family.renderer.tokenizer.decode([token]) for token in ids]
            return [piece for piece in pieces if piece in names]

        assert special_tokens(client.escape_special_tokens(hostile)) == special_tokens("out")

    def test_a_reply_cut_off_early_shows_no_thinking(self, tinker, family):
        whole = family.reply("It is done.", f"Could <tool_call>.\n{bash('rm x')}")
        lengths = [*range(1, len(whole), 5), len(whole)]
        replies = [Reply(ids=whole[:length], cut_off=True) for length in lengths]
        options = family.options | {"agent_class": OwnLoop, "max_turns": len(lengths)}
        done = tinker.run(replies, **options)
        answers = [turn.content.strip() for turn in done.agent.turns]
        assert all("It is done.".startswith(answer) for answer in answers)
        assert answers[-1] == "It is done."


# ------------------------------------------------------------------------------ the shared client


class TestSharedClient:
    def test_trials_with_the_same_configuration_share_a_client(self, tinker, tmp_path):
        async def main() -> None:
            await asyncio.gather(*(run.go() for run in runs))

        runs = [tinker.new_run(logs_dir=tmp_path / str(n)) for n in range(20)]
        asyncio.run(main())
        assert len({run.agent.client for run in runs}) == len(tinker.opened) == 1

    @columns("given").rows(
        option={"max_tokens": 1},
        llm_kwargs={"llm_kwargs": {"seed": 1}},
        key={"extra_env": {"TINKER_API_KEY": "tml-own"}},
        url={"extra_env": {"TINKER_BASE_URL": "http://own"}},
        model={"model_name": "another"},
        subclass={"agent_class": OwnLoop},
    )
    def test_another_configuration_has_a_client_of_its_own(self, given, tinker, monkeypatch):
        monkeypatch.setattr(BasicLoopAgent, "_build_llm", lambda _: object())
        first, second = set_up(tinker.agent(), tinker.agent(**given))
        assert first is not second

    def test_another_event_loop_has_clients_of_its_own(self, tinker):
        # Each `set_up` has its own.
        assert set_up(tinker.agent()) != set_up(tinker.agent())

    def test_the_client_is_built_in_a_thread(self, tinker, monkeypatch):
        monkeypatch.setattr(BasicLoopAgent, "_build_llm", lambda _: threading.current_thread())
        (builder,) = set_up(tinker.agent())
        assert builder is not threading.main_thread()

    def test_a_given_service_has_clients_of_its_own(self, tinker):
        agent_class = sampling_by(None)
        first, second = (tinker.new_run(agent_class=agent_class) for _ in range(2))
        with asyncio.Runner() as runner:
            runner.run(first.go())
            agent_class.tinker_service = tinker.open_session()
            runner.run(second.go())
        assert first.agent.client is not second.agent.client

    # Whether the next trial has the same client after such a second reply.
    @columns("reply limits stays").rows(
        an_error=(RuntimeError("gone"), {}, False),
        max_seconds=(forever, {"max_seconds": 50}, True),
        harbors_timeout=(forever, {"timeout_sec": 50}, True),
        a_full_context=(FULL, {}, True),
        a_refused_request=(Refusal(400), {}, True),
        a_request_that_is_too_large=(Refusal(413), {}, True),
        a_request_that_is_invalid=(Refusal(422), {}, True),
        an_error_of_the_user=(tinker_error("bad stop", "user"), {}, True),
        a_wrong_key=(Refusal(401), {}, False),
        no_such_path=(Refusal(404), {}, False),
        a_quota_that_is_used_up=(Refusal(429, "insufficient_quota"), {}, False),
    )
    def test_only_a_server_that_failed_replaces_the_client(self, reply, limits, stays, tinker):
        tinker.will_reply(bash("ls"), reply, "hello")
        runs = [tinker.new_run(**limits, max_turns=2) for _ in range(2)]
        first, second = asyncio.run(finish(*runs), loop_factory=virtual_loop)
        assert (first is second) is stays

    def test_a_first_prompt_that_is_too_long_replaces_no_client(self, tinker):
        tinker.will_reply(FULL, "hello")
        first, second = asyncio.run(finish(tinker.new_run(), tinker.new_run()))
        assert first is second

    def test_an_error_of_the_environment_replaces_no_client(self, tinker):
        tinker.will_reply(bash("ls"), "hello")
        failed = tinker.new_run((), FakeEnvironment(RuntimeError("gone")), max_turns=2)
        first, second = asyncio.run(finish(failed, tinker.new_run(max_turns=2)))
        assert first is second

    def test_a_failed_client_leaves_the_clients_of_other_trials(self, tinker):
        tinker.will_reply(RuntimeError("gone"))
        other = {"max_tokens": 1}

        async def main() -> list[Any]:
            before = await finish(tinker.new_run(["hello"], **other))
            await finish(tinker.new_run([RuntimeError("gone")]))
            return before + await finish(tinker.new_run(["hello"], **other))

        first, second = asyncio.run(main())
        assert first is second

    def test_an_error_of_an_older_client_replaces_no_newer_one(self, tinker):
        old, slow, new, last = (tinker.new_run() for _ in range(4))

        async def main() -> None:
            await slow.agent.setup(slow.environment)
            tinker.will_reply(RuntimeError("gone"), "hello", RuntimeError("gone"), "hello")
            await finish(old, new)
            with pytest.raises(module.ApiError):
                await slow.step()
            await finish(last)

        asyncio.run(main())
        assert old.agent.client is slow.agent.client
        assert new.agent.client is last.agent.client is not old.agent.client

    def test_a_slow_build_holds_up_only_the_trials_that_wait_for_it(self, counting):
        end = threading.Event()

        class Agent(CountingAgent):
            def _build_llm(self) -> Any:
                if self.options.max_tokens == 1:
                    end.wait(30)
                return super()._build_llm()

        async def main() -> None:
            slow = asyncio.create_task(counting(Agent, max_tokens=1)._shared_llm())
            await asyncio.sleep(0)
            await asyncio.wait_for(counting(Agent)._shared_llm(), 20)
            assert not slow.done()
            end.set()
            await slow

        asyncio.run(main())

    def test_if_the_trial_that_builds_is_cancelled_the_next_one_builds(self, counting):
        began, end = threading.Event(), threading.Event()
        builders = []

        class Agent(CountingAgent):
            def _build_llm(self) -> Any:
                builders.append(self)
                began.set()
                if len(builders) == 1:
                    end.wait(30)
                return super()._build_llm()

        async def main() -> None:
            agents = [counting(Agent) for _ in range(3)]
            first, *others = [asyncio.create_task(agent._shared_llm()) for agent in agents]
            await asyncio.to_thread(began.wait, 30)
            first.cancel()
            clients = await asyncio.gather(*others)
            end.set()
            assert clients[0] is clients[1]
            assert (first.cancelled(), builders) == (True, agents[:2])

        asyncio.run(main())

    @columns("given").rows(
        session_id=lambda n: {"session_id": str(n)},
        max_seconds=lambda n: {"max_seconds": n},
        logs_dir=lambda n: {"logs_dir": Path(f"/nowhere/{n}")},
    )
    def test_trials_that_differ_in_what_is_theirs_alone_share_a_client(self, given, server):
        assert len(set(set_up(*(server.agent(**given(n)) for n in range(9))))) == 1

    def test_trials_with_a_shared_client_send_their_own_session_ids(self, server, tmp_path):
        async def main() -> None:
            for name in ("one", "two"):
                await server.new_run(session_id=name).go()

        asyncio.run(main())
        sent = [name for name in server.headers("X-Session-ID") if name]
        assert list(dict.fromkeys(sent)) == ["one", "two"]

    # One server, at two URLs.
    @columns("client model_name variable").rows(
        vllm=("vllm", "tiny", "VLLM_BASE_URL"),
        vllm_under_another_name=("vllm", "tiny", "VLLM_API_BASE"),
        sglang=("sglang", "tiny", "SGLANG_BASE_URL"),
        openai=("litellm", "openai/tiny", "OPENAI_BASE_URL"),
        openai_under_another_name=("litellm", "openai/tiny", "OPENAI_API_BASE"),
        another_provider=("litellm", "hosted_vllm/tiny", "HOSTED_VLLM_API_BASE"),
    )
    def test_a_url_that_changes_between_trials_is_used(
        self, client, model_name, variable, http, tokenizer_dir, tmp_path, monkeypatch
    ):
        options = {"model_name": model_name, "model_client": client, "logs_dir": tmp_path}
        server = FakeServer(http, tokenizer_dir, **options)
        del server.options["api_base"]

        async def main() -> None:
            for host in ("127.0.0.1", "localhost"):
                monkeypatch.setenv(variable, f"http://{host}:{http.server_port}")
                await server.new_run().go()

        asyncio.run(main())
        hosts = [host.split(":")[0] for host in server.headers("Host")]
        assert list(dict.fromkeys(hosts)) == ["127.0.0.1", "localhost"]

    @columns("client model_name variable").rows(
        vllm=("vllm", "tiny", "VLLM_API_KEY"),
        sglang=("sglang", "tiny", "SGLANG_API_KEY"),
        openai=("litellm", "openai/tiny", "OPENAI_API_KEY"),
        another_provider=("litellm", "hosted_vllm/tiny", "HOSTED_VLLM_API_KEY"),
    )
    def test_a_key_that_changes_between_trials_is_used(
        self, client, model_name, variable, http, tokenizer_dir, tmp_path, monkeypatch
    ):
        options = {"model_name": model_name, "model_client": client, "logs_dir": tmp_path}
        server = FakeServer(http, tokenizer_dir, **options)

        async def main() -> None:
            for key in ("one", "two"):
                monkeypatch.setenv(variable, key)
                await server.new_run().go()

        asyncio.run(main())
        keys = dict.fromkeys(server.headers("Authorization"))
        assert list(keys) == ["Bearer one", "Bearer two"]

    def test_200_trials_with_their_own_keys_leave_at_most_64_clients(self, counting):
        async def main() -> int:
            for n in range(200):
                await counting(extra_env={"OPENAI_API_KEY": str(n)})._shared_llm()
            return len(CountingAgent.built)

        assert asyncio.run(main()) == 64

    def test_the_newest_of_many_clients_is_shared(self, counting):
        async def main() -> None:
            for n in range(200):
                newest = await counting(extra_env={"OPENAI_API_KEY": str(n)})._shared_llm()
            assert await counting(extra_env={"OPENAI_API_KEY": "199"})._shared_llm() is newest

        asyncio.run(main())

    @columns("values").rows(
        of_a_text=[{"token": SecretStr(text)} for text in ("one", "two")],
        of_bytes=[{"secret": SecretBytes(text)} for text in (b"one", b"two")],
        that_pydantic_leaves_out=[{"left_out": text} for text in ("one", "two")],
    )
    def test_options_that_look_equal_with_different_secrets_share_no_client(self, values, counting):
        class Agent(CountingAgent):
            options_model = OwnOptions

        agents = [counting(Agent, **value) for value in values]
        shown = [str(agent.options.model_dump()) for agent in agents]
        assert shown[0] == shown[1]
        first, second = set_up(*agents)
        assert first is not second

    def test_clients_of_closed_event_loops_are_dropped(self, counting):
        """A trainer may call `asyncio.run` for each batch."""
        for _ in range(5):
            set_up(counting())
        assert len(module._clients) == 1

    def test_trials_that_wait_for_a_silent_server_raise_one_error_at_once(self, vllm, monkeypatch):
        monkeypatch.setattr(module, "FIRST_RESPONSE_SEC", 0.2)
        built = []

        class Agent(BasicLoopAgent):
            def _build_llm(self) -> Any:
                built.append(self)
                return super()._build_llm()

        async def main(api_base: str) -> list[Any]:
            agents = [vllm.agent(Agent, api_base=api_base) for _ in range(8)]
            setups = [agent.setup(FakeEnvironment()) for agent in agents]
            return await asyncio.gather(*setups, return_exceptions=True)

        # Connections wait here for ever to be accepted.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            errors = asyncio.run(main(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        assert len(built) == 1
        assert all(isinstance(error, module.ApiError) for error in errors)
        assert len({str(error) for error in errors}) == 1

    def test_a_build_that_failed_is_tried_again_by_a_later_trial(self, counting, monkeypatch):
        build = CountingAgent._build_llm
        results = iter([ConnectionError("not yet"), None])

        def fails_once(agent: Any) -> Any:
            if error := next(results):
                raise error
            return build(agent)

        monkeypatch.setattr(CountingAgent, "_build_llm", fails_once)

        async def main() -> None:
            with pytest.raises(ConnectionError):
                await counting()._shared_llm()
            await counting()._shared_llm()

        asyncio.run(main())
        assert len(CountingAgent.built) == 1


# -------------------------------------------------------------------------------- prompts on vLLM


def sends(*prompts: str) -> type[BasicLoopAgent]:
    """An agent that sends these prompts, one a turn, whatever the replies."""

    class Sends(BasicLoopAgent):
        async def converse(self, prompt: str, environment: Any) -> str:
            for text in prompts:
                await self.sample(text)
            return "own reason"

    return Sends


def writes(fake: FakeServer, template: Any) -> None:
    """From now on the server has this chat template, a function of the messages."""

    def prompt_ids(body: dict[str, Any]) -> list[int]:
        return body["prompt"] if "prompt" in body else fake.encode(template(body["messages"]))

    fake.prompt_ids = prompt_ids


def chatml(messages: list[dict], before_reply: str = "", opening: str = "") -> str:
    """Qwen's template. It may write a text before each earlier reply, and open the next one."""
    before = {"assistant": before_reply}
    texts = [
        f"<|im_start|>{m['role']}\n{before.get(m['role'], '')}{m['content']}<|im_end|>\n"
        for m in messages
    ]
    return "".join(texts) + f"<|im_start|>assistant\n{opening}"


def chatml_tail(text: str) -> str:
    """What it writes between a reply and the next one, after the reply's stop token."""
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


class KeepAlive(HttpHandler):
    """Keeps a connection open for further requests, as real servers do, until the last. (Python
    warns of a client that leaves one open.) Its server counts the connections."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.n_connections += 1

    def end_headers(self) -> None:
        if len(self.server.fake.requests) == self.server.n_requests:
            self.send_header("Connection", "close")
        super().end_headers()


@pytest.fixture
def clock(no_pause, monkeypatch) -> list[float]:
    """Time stands still but for the pauses, which are over at once. Append what a call takes."""
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: float(sum(no_pause)))
    return no_pause


def models_are(fake: FakeServer, answer: Any) -> None:
    """From now on this is the server's answer to /v1/models, or the error in its place."""
    usual = fake.answer

    def answer_or_raise(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != "/v1/models":
            return usual(path, body)
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake.answer = answer_or_raise


class TestVllm:
    def test_vllm_gets_this_request_for_a_completion(self, vllm):
        vllm.run(max_tokens=7, temperature=None)
        (body,) = vllm.bodies("/v1/completions")
        assert body == {
            "model": VLLM_MODEL,
            "prompt": vllm.sampled[0].prompt,
            "max_tokens": 7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "session_id": vllm.options["logs_dir"].parent.name,
            "logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
            "skip_special_tokens": False,
        }

    def test_vllm_gets_this_request_for_a_prompt(self, vllm):
        arguments = {"enable_thinking": True}
        vllm.run(llm_kwargs={"extra_body": {"chat_template_kwargs": arguments}})
        (body,) = vllm.bodies("/tokenize")
        messages = {"messages": [{"role": "user", "content": "do it"}]}
        assert body == {"model": VLLM_MODEL, **messages, "chat_template_kwargs": arguments}

    @columns("given name value").rows(
        extra_body_wins=({"llm_kwargs": {"top_k": 1, "extra_body": {"top_k": 5}}}, "top_k", 5),
        hosted_vllm=({"model_name": f"hosted_vllm/{VLLM_MODEL}"}, "model", VLLM_MODEL),
    )
    def test_the_body_for_vllm_has_the_right_value(self, given, name, value, vllm):
        vllm.run(**given)
        assert vllm.bodies("/v1/completions")[0][name] == value

    def test_the_http_client_for_vllm_takes_llm_kwargs(self, vllm):
        """openai sends the time limit in a header, too."""
        vllm.run(llm_kwargs={"extra_headers": {"X-Other": "1"}, "timeout": 77})
        assert set(vllm.headers("X-Other")) == {"1"}
        assert vllm.headers("X-Stainless-Read-Timeout")[-1] == "77"

    def test_vllm_may_take_any_time_for_a_reply(self, vllm):
        vllm.run()
        assert vllm.headers("X-Stainless-Read-Timeout")[-1] is None

    def test_the_first_question_to_vllm_has_30_seconds(self, vllm):
        set_up(vllm.agent())
        assert vllm.headers("X-Stainless-Read-Timeout") == ["30"]

    def test_vllm_does_not_get_the_key_of_openai(self, vllm):
        set_up(vllm.agent())
        assert vllm.headers("Authorization") == ["Bearer none"]

    @columns("given expected").rows(
        option=({"session_id": "own"}, "own"), default=({}, "greet__x7")
    )
    def test_a_call_of_vllm_has_the_session_id(self, given, expected, vllm, tmp_path):
        vllm.run(logs_dir=tmp_path / "greet__x7/agent", **given)
        (body,) = vllm.bodies("/v1/completions")
        assert (body["session_id"], vllm.headers("X-Session-ID")[-1]) == (expected, expected)

    def test_a_trial_may_have_a_name_that_is_no_ascii(self, vllm, tmp_path):
        vllm.run(logs_dir=tmp_path / "größe-任务__x7/agent")
        (body,) = vllm.bodies("/v1/completions")
        assert body["session_id"] == "größe-任务__x7"
        assert vllm.headers("X-Session-ID")[-1] == "gr%C3%B6%C3%9Fe-%E4%BB%BB%E5%8A%A1__x7"

    @columns("url cause").rows(
        # Nothing listens on port 1.
        refused=("http://127.0.0.1:1", r"Connect call failed \('127\.0\.0\.1', 1\)"),
        # Systems have several words for it.
        wrong_name=("http://no-such-host.invalid", r"\[Errno -?\d+\] .*(Name|name)"),
    )
    def test_a_server_that_does_not_answer_is_named_with_the_cause(
        self, url, cause, server, no_pause
    ):
        failed = server.new_run(api_base=url)
        with pytest.raises(module.ApiError, match=cause) as error:
            failed.follow()
        assert url in str(error.value)

    def test_a_server_that_does_not_answer_is_not_called_another_server(self, vllm):
        with pytest.raises(module.ApiError, match=r"^cannot connect to http://127\.0\.0\.1:1: "):
            set_up(vllm.agent(api_base="http://127.0.0.1:1"))

    @columns("certificate cause").rows(
        none=(False, "WRONG_VERSION_NUMBER|record layer failure"),
        self_signed=(True, "self-signed certificate"),
    )
    def test_a_connection_that_tls_refuses_says_why(self, certificate, cause, server, request):
        port = request.getfixturevalue("tls_port") if certificate else server.url.split(":")[-1]
        failed = server.new_run(api_base=f"https://127.0.0.1:{port}")
        request.getfixturevalue("no_pause")
        with pytest.raises(module.ApiError, match=cause):
            failed.follow()

    @pytest.fixture
    def tls_port(self, tmp_path) -> Iterator[int]:
        """The port of a server with a certificate that nobody signed."""
        if not shutil.which("openssl"):
            pytest.skip("openssl is not installed")
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = "openssl req -x509 -nodes -newkey rsa:2048 -days 1 -subj /CN=127.0.0.1"
        made = ["-keyout", key, "-out", certificate]
        subprocess.run([*command.split(), *made], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        with ThreadingHTTPServer(("127.0.0.1", 0), HttpHandler) as own:
            own.socket = context.wrap_socket(own.socket, server_side=True)
            threading.Thread(target=own.serve_forever, args=[0.01]).start()
            yield own.server_port
            own.shutdown()

    def test_an_error_of_a_call_names_the_server(self, vllm):
        failed = vllm.new_run([Refusal(401, "gone")])
        with pytest.raises(module.ApiError, match=f"^AuthenticationError from {vllm.url}: .*gone"):
            failed.follow()

    def test_an_error_of_a_call_says_what_the_server_said_and_no_more(self, vllm):
        failed = vllm.new_run([Refusal(401, "gone")])
        with pytest.raises(module.ApiError) as error:
            failed.follow()
        said = "Error code: 401 - Refusal('gone')"
        place = f"AuthenticationError from {vllm.url}: check the API key"
        assert str(error.value) == f"{place}: {said}"

    @columns("status").rows(not_found=404, not_allowed=405)
    @pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
    def test_a_gateway_that_lacks_a_path_is_told_apart_from_a_wrong_model(
        self, path, status, vllm, monkeypatch
    ):
        usual = vllm.answer

        def answer(asked: str, body: dict[str, Any]) -> dict[str, Any]:
            if asked == path:
                raise Refusal(status, "no route")
            return usual(asked, body)

        monkeypatch.setattr(vllm, "answer", answer)
        with pytest.raises(module.ApiError, match=f"{vllm.url}.*{path}.*no route|no route.*{path}"):
            vllm.run()

    @columns("given reply").rows(setup=({"model_name": "x"}, ""), a_call=({}, Refusal(404, "gone")))
    def test_no_error_shows_the_password_of_a_url(self, given, reply, vllm):
        url = vllm.url.replace("//", "//user:secret@")
        failed = vllm.new_run([reply], api_base=url, **given)
        with pytest.raises(module.ApiError, match=r"context limit for the model x|gone") as error:
            failed.follow()
        assert vllm.url in shown_text(error.value)
        assert "secret" not in shown_text(error.value)

    # A server's words in turn 2.
    @columns("message").rows(
        sglangs_pool=(
            "Input length (9021 tokens) exceeds the maximum allowed length (8187 tokens). Use a "
            "shorter input or enable --allow-auto-truncate."
        ),
        exactly_the_window="max_tokens must be at least 1, got 0.",
    )
    def test_a_full_context_ends_the_run_and_keeps_its_turns(self, message, server):
        done = server.run([bash("ls"), Refusal(400, message)], max_turns=3)
        assert (done.stop_reason, len(done.agent.turns)) == ("context_overflow", 1)

    @columns("message").rows(
        user="Invalid 'user': string too long. Expected a string with maximum length 64.",
        cache_key="Invalid 'prompt_cache_key': string too long. Expected at most 64.",
    )
    def test_a_field_that_is_too_long_is_no_full_context(self, message, server):
        failed = server.new_run([bash("ls"), Refusal(400, message)], max_turns=3)
        with pytest.raises(module.ApiError, match="string too long"):
            failed.follow()

    def test_tokens_are_counted_if_the_server_does_not_count_them(self, vllm):
        done = vllm.run([Reply("hi", answer={"usage": None})])
        assert done.context.n_output_tokens == 3

    def test_a_turn_on_vllm_has_no_extra_values_by_default(self, vllm):
        assert vllm.run().context.rollout_details[0]["extra"] == {}

    def test_vllms_weight_versions_are_recorded(self, vllm):
        spans = [{"version": "7", "start": 0, "end": 3}]
        done = vllm.run([Reply("hi", choice={"weight_versions": spans})])
        assert done.context.rollout_details[0]["extra"] == {"weight_versions": [spans]}

    def test_a_turn_on_vllm_costs_two_requests_from_the_third_on(self, vllm):
        vllm.run(agent_class=OwnLoop, max_turns=4)
        assert [path for path, _, _ in vllm.requests] == [
            "/v1/models",
            # The prompt, and the text of its end.
            *["/tokenize", "/detokenize", "/v1/completions"],
            # Two short conversations.
            *["/tokenize", "/tokenize", "/v1/completions"],
            *["/tokenize", "/v1/completions"],
            *["/tokenize", "/v1/completions"],
        ]

    def test_a_later_trial_on_vllm_costs_two_requests_a_turn(self, vllm):
        runs = [vllm.new_run(agent_class=OwnLoop, max_turns=3) for _ in range(2)]

        async def one_after_the_other() -> None:
            await runs[0].go()
            vllm.requests.clear()
            await runs[1].go()

        asyncio.run(one_after_the_other())
        paths = [path for path, _, _ in vllm.requests]
        assert paths == ["/tokenize", "/v1/completions"] * 3

    def test_a_run_on_vllm_needs_one_connection(self, vllm):
        with ThreadingHTTPServer(("127.0.0.1", 0), KeepAlive) as own:
            own.fake, own.n_connections, own.n_requests = vllm, 0, 11
            threading.Thread(target=own.serve_forever, args=[0.01]).start()
            url = f"http://127.0.0.1:{own.server_port}"
            vllm.run(api_base=url, agent_class=OwnLoop, max_turns=4)
            own.shutdown()
        assert (len(vllm.requests), own.n_connections) == (11, 1)

    def test_a_prompt_is_exact_where_the_message_changes_how_the_reply_is_written(self, vllm):
        """Qwen3.5's template writes an empty thinking before a reply that a tool's result follows.
        So the made-up reply stands elsewhere in the short conversation."""

        def template(messages: list[dict]) -> str:
            is_result = messages[-1]["content"].startswith("<tool_response>")
            return chatml(messages, "<think>\n\n</think>\n\n" if is_result else "")

        writes(vllm, template)
        result = "<tool_response>\nx\n</tool_response>"
        vllm.run(["hi"] * 6, agent_class=sends("do it", "a", result, "b", result, result))
        expected = [
            earlier.prompt + earlier.completion + vllm.encode(chatml_tail(text))
            for earlier, text in zip(vllm.sampled, ["a", result, "b", result, result], strict=False)
        ]
        assert [turn.prompt for turn in vllm.sampled[1:]] == expected

    def test_a_key_in_llm_kwargs_is_in_no_requests_body(self, vllm):
        vllm.run(llm_kwargs={"api_key": "sk-secret", "top_k": 3})
        (body,) = vllm.bodies("/v1/completions")
        assert (body["top_k"], "api_key" in body) == (3, False)

    def test_a_message_may_turn_thinking_on_and_off(self, vllm):
        def template(messages: list[dict]) -> str:
            is_on = messages[-1]["content"] == "/think"
            return chatml(messages, opening="<think>\n" if is_on else "")

        writes(vllm, template)
        prompts = ["do it", "/think", "a", "/think"]
        done = vllm.run(["hi", "hm</think>hi", "hi", "hm</think>hi"], agent_class=sends(*prompts))
        assert [turn.content for turn in done.agent.turns] == ["hi"] * 4

    def test_a_later_prompt_is_exact_after_another_system_message(self, vllm):
        class Edits(BasicLoopAgent):
            async def converse(self, prompt: str, environment: Any) -> str:
                await self.sample(prompt)
                await self.sample("a")
                self.messages = [{"role": "system", "content": "/think"}, *self.messages]
                await self.sample("b")
                await self.sample("c")
                return "own reason"

        vllm.run(["hi"] * 4, agent_class=Edits)
        *_, third, fourth = vllm.sampled
        tail = chatml_tail("c") + "<think>\n"
        assert fourth.prompt == third.prompt + third.completion + vllm.encode(tail)

    def test_a_prompt_on_vllm_begins_with_the_ids_so_far(self, vllm):
        first, second = vllm.new_run(max_tokens=200).follow("one", "two").recorded
        ids = first.prompt + first.completion
        assert second.prompt[: len(ids)] == ids

    def test_thinking_that_vllms_template_opened_is_taken_off(self, vllm):
        replies = [f"so {bash('rm x')}</think>{bash('ls')}", "</think>done"]
        # For this system message the fake's template opens thinking.
        done = vllm.run(replies, max_turns=2, system_prompt="/think")
        assert (done.scripts, done.completion) == (["ls"], "done")

    def test_a_later_prompt_depends_on_the_system_message(self, vllm):
        vllm.run([f"</think>{bash('a')}", "done"], max_turns=2, system_prompt="/think")
        assert vllm.prompt_text(1).endswith("<|im_start|>assistant\n<think>\n")

    def test_vllms_cached_tokens_are_counted(self, vllm):
        usage = {"prompt_tokens_details": {"cached_tokens": 40}}
        done = vllm.new_run([Reply(answer={"usage": usage})]).follow("word " * 50)
        assert done.context.n_cache_tokens == 40

    @columns("own_limit").rows(
        of_an_adapter_is_its_base_models=None, of_another_model_is_its_own=99
    )
    def test_the_context_limit(self, own_limit, vllm):
        base = {"id": "base", "max_model_len": 100}
        adapter = {"id": vllm.options["model_name"], "max_model_len": own_limit}
        models_are(vllm, {"data": [base, adapter]})
        vllm.run(max_tokens=99_999)
        (body,) = vllm.bodies("/v1/completions")
        assert body["max_tokens"] == (own_limit or 100) - len(body["prompt"])

    @columns("given limit").rows(servers=(None, 8192), higher=(9000, 8192), lower=(300, 300))
    def test_vllms_context_limit_is_the_smaller_one(self, given, limit, vllm):
        # A chosen reply: on a real server this is skipped.
        vllm.run(["hello"], context_limit=given, max_tokens=99_999)
        (body,) = vllm.bodies("/v1/completions")
        assert body["max_tokens"] == limit - len(body["prompt"])

    ABORTED = Reply("ab", cut_off=True, choice={"finish_reason": "abort"})

    def test_a_reply_that_the_server_aborts_is_sampled_again_from_its_prompt(self, vllm, no_pause):
        done = vllm.run([self.ABORTED, self.ABORTED, "c"])
        first, second, third = vllm.sampled
        assert first.prompt == second.prompt == third.prompt
        assert done.recorded == [third]
        assert (done.stop_reason, done.completion) == ("completed", "c")

    def test_a_request_that_sglang_aborts_in_its_queue_is_sent_again(self, sglang, no_pause):
        """It then counts no ids of the prompt."""
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        aborted = Reply(ids=[], choice={"finish_reason": "abort"}, answer={"usage": usage})
        assert sglang.run([aborted, "c"]).completion == "c"

    def test_an_aborted_reply_is_sampled_again_after_a_pause(self, server, no_pause):
        done = server.run([self.ABORTED, self.ABORTED, "c"])
        assert (done.completion, len(done.agent.turns)) == ("c", 1)
        assert no_pause == [1, 2]

    @columns("logprobs").rows(too_few=[-1.0], too_many=[-1.0] * 3, none=None, nan=[-1.0, -9999.0])
    def test_an_aborted_reply_may_have_any_logprobs(self, logprobs, vllm, no_pause):
        part = Reply("ab", cut_off=True, choice={"finish_reason": "abort"}, logprobs=logprobs)
        done = vllm.run([part, "cd"])
        assert (done.completion, done.recorded) == ("cd", [vllm.sampled[1]])

    def test_a_reply_after_an_abort_whose_logprobs_do_not_align_is_no_training_data(
        self, vllm, no_pause
    ):
        done = vllm.run([self.ABORTED, Reply("cd", logprobs=[-1.0] * 4)])
        assert (done.completion, done.recorded) == ("cd", [])
        assert done.metadata["n_turns_without_ids"] == 1

    @columns("before").rows(the_only_abort=[], after_another=[ABORTED])
    def test_an_aborted_reply_may_have_no_ids(self, before, vllm, no_pause):
        no_ids = {"finish_reason": "abort", "token_ids": None, "logprobs": None}
        done = vllm.run([*before, Reply("x", cut_off=True, choice=no_ids), "c"])
        assert done.completion == "c"
        assert done.recorded[0].completion == vllm.ids_by_character("c<|im_end|>")

    @columns("ids").rows(no_token=[], a_token=[70])
    def test_an_instruction_without_a_whole_reply_is_sent_again(self, ids, vllm):
        run = vllm.new_run([Reply(ids=ids, cut_off=True, choice={"finish_reason": "abort"})])

        async def two_steps() -> None:
            run.agent.options.max_seconds = 0.3
            await finish(run)
            run.agent.options.max_seconds = None
            vllm.will_reply("hi")
            await run.step("two")

        asyncio.run(two_steps())
        assert [message["content"] for message in run.agent.messages] == ["do it\n\ntwo", "hi"]
        assert len(run.recorded) == 1

    def test_a_complete_reply_of_no_tokens_is_no_training_data(self, vllm):
        done = vllm.run([Reply(ids=[])])
        assert (done.recorded, done.metadata["n_turns_without_ids"]) == ([], 1)

    def test_a_server_that_is_paused_after_an_abort_is_waited_for(self, vllm, no_pause):
        done = vllm.run([self.ABORTED, *[Refusal(503, "Generation is paused.")] * 30, "c"])
        assert done.completion == "c"

    def test_an_abort_starts_the_ten_minutes_anew(self, vllm, clock, monkeypatch):
        monkeypatch.setattr(module, "PAUSES_SEC", (100,))
        paused = [Refusal(503, "Generation is paused.")] * 5
        done = vllm.run([*paused, self.ABORTED, *paused, self.ABORTED, *paused, "c"])
        assert (done.completion, sum(clock)) == ("c", 1700)

    def test_the_tokens_of_an_aborted_reply_are_not_counted(self, vllm, no_pause):
        done = vllm.run([self.ABORTED, "c"])
        first, second = vllm.sampled
        assert done.context.n_input_tokens == len(first.prompt)
        assert done.context.n_output_tokens == len(second.completion) == 2

    def test_a_reply_after_an_abort_may_have_all_of_max_tokens(self, vllm, no_pause):
        # "ab" has two tokens.
        done = vllm.run([*[self.ABORTED] * 2, "c"], max_tokens=9)
        assert [body["max_tokens"] for body in vllm.bodies("/v1/completions")] == [9, 9, 9]
        assert done.completion == "c"

    def test_a_call_that_is_aborted_before_its_first_token_goes_on(self, vllm, no_pause):
        aborted = Reply(ids=[], choice={"finish_reason": "abort"})
        done = vllm.run([aborted, "hi"])
        assert (done.completion, len(done.recorded[0].completion)) == ("hi", 3)

    def test_a_server_that_aborts_at_once_is_not_asked_at_once(self, vllm, no_pause):
        vllm.run([*[Reply(ids=[], choice={"finish_reason": "abort"})] * 30, "hi"])
        assert no_pause == [1, 2, 4, *[5] * 27]

    @columns("limits stop_reason").rows(
        max_seconds=({"max_seconds": 0.5}, "error"),
        harbors_timeout=({"timeout_sec": 0.5}, "cancelled"),
    )
    def test_a_run_that_ends_after_an_abort_has_no_turn_of_it(self, limits, stop_reason, vllm):
        ended = vllm.new_run([self.ABORTED], **limits)
        asyncio.run(finish(ended))
        assert (ended.recorded, ended.completion) == ([], "")
        assert ended.stop_reason == stop_reason

    @columns("status").rows(
        too_many=429,
        groqs_capacity=498,
        paused=503,
        overloaded=529,
        request_timeout=408,
        conflict=409,
        too_early=425,
        proxy_closed=460,
        client_closed=499,
        server_error=500,
        gateway=502,
        gateway_slow=504,
        cloudflare_down=521,
        cloudflare_slow=524,
    )
    def test_a_server_that_is_busy_or_down_is_waited_for(self, status, server, no_pause):
        replies = [bash("ls"), *[Refusal(status, "Overloaded")] * 3, "done"]
        done = server.run(replies, max_turns=3)
        assert (done.stop_reason, done.completion) == ("completed", "done")
        # Each failed call is one request, and the agent waits before the next one.
        assert no_pause == [1, 2, 4]

    @columns("status").rows(refused=400, wrong_key=401, forbidden=403, gone=404, unprocessable=422)
    def test_a_call_that_is_refused_is_one_request(self, status, server, no_pause):
        failed = server.new_run([bash("ls"), *[Refusal(status, "no")] * 3], max_turns=3)
        with pytest.raises(module.ApiError, match="no"):
            failed.follow()
        calls = [path for path, _, _ in server.requests if path.endswith("completions")]
        assert len(calls) == 2

    @columns("status").rows(timeout=408, server_error=500, gateway=502, gateway_slow=504)
    def test_a_server_that_is_down_before_the_first_reply_is_asked_three_times(
        self, status, server, no_pause
    ):
        failed = server.new_run([Refusal(status, "down")] * 9)
        with pytest.raises(module.ApiError, match="down"):
            failed.follow()
        calls = [path for path, _, _ in server.requests if path.endswith("completions")]
        assert (len(calls), no_pause) == (3, [1, 2])

    def test_a_pause_of_a_minute_costs_no_run(self, server, no_pause):
        paused = Refusal(503, "Generation is paused. Please retry after it resumes.")
        done = server.run([bash("ls"), *[paused] * 14, "done"], max_turns=3)
        assert (done.stop_reason, done.completion) == ("completed", "done")
        assert sum(no_pause) == 62

    @columns("replies").rows(first_call=[], second_call=[bash("ls")])
    def test_a_server_that_stays_busy_is_an_error_after_ten_minutes(
        self, replies, server, clock, monkeypatch
    ):
        monkeypatch.setattr(module, "PAUSES_SEC", (100,))
        monkeypatch.setattr(server, "sample", always_busy_after(server, *replies))
        failed = server.new_run(max_turns=3)
        with pytest.raises(module.ApiError, match="Generation is paused"):
            failed.follow()
        assert (failed.stop_reason, len(failed.agent.turns)) == ("error", len(replies))
        assert clock == [100] * 6

    def test_a_gateway_that_ends_each_call_after_a_minute_costs_eleven_calls(self, server, clock):
        async def gateway_timeout() -> None:
            clock.append(60)
            raise Refusal(504, "Gateway Time-out")

        failed = server.new_run([bash("ls"), *[gateway_timeout] * 99], max_turns=3)
        with pytest.raises(module.ApiError, match="Gateway Time-out"):
            failed.follow()
        # The last call begins 582 seconds after the first one has ended.
        assert clock.count(60) == 11
        assert sum(clock) == 60 + 582 + 60

    def test_an_error_ends_the_run_if_max_seconds_would_pass_in_the_next_pause(
        self, server, monkeypatch
    ):
        monkeypatch.setattr(module, "PAUSES_SEC", (0.1, 99))
        monkeypatch.setattr(server, "sample", always_busy_after(server, bash("ls")))
        failed = server.new_run(max_turns=3, max_seconds=50)
        with pytest.raises(module.ApiError, match="Generation is paused"):
            failed.follow()
        assert (failed.stop_reason, len(failed.agent.turns)) == ("error", 1)

    def test_max_seconds_that_end_while_a_call_is_repeated_are_the_servers_error(
        self, server, monkeypatch
    ):
        monkeypatch.setattr(module, "PAUSES_SEC", (0,))

        async def slow() -> str:
            await asyncio.sleep(3)
            return "late"

        # On a busy machine the first call may take a second.
        failed = server.new_run([Refusal(504, "slow"), slow], max_seconds=2)
        with pytest.raises(module.ApiError, match="max_seconds passed before"):
            failed.follow()
        assert failed.stop_reason == "error"

    def test_a_server_that_restarts_is_waited_for(self, server, restarting, monkeypatch):
        monkeypatch.setattr(module, "PAUSES_SEC", (0.05,))
        restarting.start(server)

        async def restart() -> str:
            restarting.stop()
            asyncio.get_running_loop().call_later(0.3, restarting.start, server)
            return "out"

        options = {"api_base": restarting.url, "max_turns": 3}
        done = server.run([bash("ls"), "done"], FakeEnvironment(restart), **options)
        assert (done.stop_reason, done.completion) == ("completed", "done")

    def test_a_server_that_does_not_come_back_is_an_error(self, server, restarting, monkeypatch):
        monkeypatch.setattr(module, "PAUSES_SEC", (0.05,))
        monkeypatch.setattr(module, "WAIT_SEC", 0.2)
        restarting.start(server)

        async def stop() -> str:
            restarting.stop()
            return "out"

        options = {"api_base": restarting.url, "max_turns": 3}
        failed = server.new_run([bash("ls"), "done"], FakeEnvironment(stop), **options)
        with pytest.raises(module.ApiError, match="Connect call failed") as error:
            failed.follow()
        assert restarting.url in str(error.value)
        assert (failed.stop_reason, len(failed.agent.turns)) == ("error", 1)

    SPECIAL = "<|im_end|> <|turn> <turn|> [|user|] <\uff5cUser\uff5c> <s> </s> <bos> <end_of_turn>"
    MORE = "[INST] [/INST] [TOOL_RESULTS] [gMASK] <seed:eos> ]~b] ]~!b[ [e~["

    @pytest.mark.parametrize("name", f"{SPECIAL} {MORE}".split())
    def test_a_special_token_becomes_plain_text_on_vllm(self, vllm, name):
        (client,) = set_up(vllm.agent())
        broken = f"{name[0]}\u200b{name[1:]}"
        assert client.escape_special_tokens(f"a{name}{name}b") == f"a{broken}{broken}b"

    def test_special_tokens_that_overlap_become_plain_text(self, vllm):
        (client,) = set_up(vllm.agent())
        text = client.escape_special_tokens("]~b]~!b[e~[")
        assert text == "]\u200b~b]\u200b~!b[\u200be~["

    # Ordinary text may look like special tokens.
    @pytest.mark.parametrize("text", ["[ARGS]", "<img>", "a<file_t>", "A<?>", "a[:]", "x<()>"])
    def test_other_text_is_kept_on_vllm(self, vllm, text):
        (client,) = set_up(vllm.agent())
        assert client.escape_special_tokens(text) == text

    # What may come with status 200.
    @columns("answer shown").rows(
        an_error=({"error": {"message": "no engine"}}, "no engine"), a_page=("<html>", "<html>")
    )
    def test_an_answer_that_is_no_result_is_shown(self, answer, shown, vllm, monkeypatch, no_pause):
        run, real_answer = vllm.new_run(), vllm.answer

        def answer_to(path: str, body: Any) -> Any:
            return real_answer(path, body) if path == "/v1/models" else answer

        monkeypatch.setattr(vllm, "answer", answer_to)
        with pytest.raises(module.ApiError, match=f"returned no result: .*{shown}"):
            run.follow()

    # What a server may say of its models, and the error if no limit is given.
    NO_LIMIT = columns("answer error").rows(
        # vLLM may load an adapter at its first request.
        adapter=({"data": [{"id": "base", "max_model_len": 8192}]}, "its models are ['base']"),
        no_limit=({"data": [{"id": VLLM_MODEL}]}, f"its models are ['{VLLM_MODEL}']"),
        null_limit=(
            {"data": [{"id": VLLM_MODEL, "max_model_len": None}]},
            "gives no context limit",
        ),
        no_models=({"data": []}, "gives no context limit"),
        no_list=({"data": None}, "is not a vLLM or SGLang server"),
        another_answer=({"models": []}, "is not a vLLM or SGLang server"),
        no_path=(Refusal(404, "gone"), "is not a vLLM or SGLang server"),
        not_ready=(Refusal(503, "loading"), "or is not ready"),
        names=({"data": [VLLM_MODEL]}, "is not a vLLM or SGLang server"),
    )

    @columns("options").rows(default={}, with_a_limit={"context_limit": 500})
    def test_setup_names_the_variable_if_a_server_wants_another_key(self, options, vllm):
        models_are(vllm, Refusal(401, "Unauthorized"))
        with pytest.raises(
            module.ApiError, match="rejected the API key, or requires one: set VLLM_API_KEY"
        ):
            set_up(vllm.agent(**options))

    def test_a_limit_may_be_a_text(self, vllm):
        models_are(vllm, {"data": [{"id": VLLM_MODEL, "max_model_len": "4096"}]})
        set_up(agent := vllm.agent())
        assert agent.client.context_limit == 4096

    @NO_LIMIT
    def test_setup_refuses_a_server_without_a_limit(self, answer, error, vllm):
        models_are(vllm, answer)
        with pytest.raises(module.ApiError, match=re.escape(error)):
            set_up(vllm.agent())

    @NO_LIMIT
    def test_a_context_limit_that_is_given_needs_no_list(self, answer, error, vllm):
        models_are(vllm, answer)
        vllm.run(context_limit=500, max_tokens=99_999)
        (body,) = vllm.bodies("/v1/completions")
        assert (body["model"], body["max_tokens"]) == (VLLM_MODEL, 500 - len(body["prompt"]))


# ------------------------------------------------------------------------------ prompts on SGLang


@pytest.fixture
def protocol(monkeypatch) -> Any:
    """SGLang's own classes of requests and answers. (Its package would import CUDA, so an empty one
    takes its place, and a function that these classes need.)"""
    found = importlib.util.find_spec("sglang")
    if not found:
        pytest.skip("SGLang is not installed: `uv pip install --no-deps sglang msgspec`")
    package, utils = ModuleType("sglang"), ModuleType("sglang.utils")
    package.__path__ = list(found.submodule_search_locations)
    utils.convert_json_schema_to_str = json.dumps
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, "sglang.utils", utils)
    return importlib.import_module("sglang.srt.entrypoints.openai.protocol")


class TestSglang:
    def test_sglang_knows_each_field_that_it_gets(self, sglang, protocol):
        classes = {
            "/tokenize": protocol.TokenizeRequest,
            "/detokenize": protocol.DetokenizeRequest,
            "/v1/completions": protocol.CompletionRequest,
        }
        sglang.run([bash("ls"), "done"], max_turns=2)
        requests = [(classes[path], body) for path, body, _ in sglang.requests if body]
        # Three renderings, the text of a prompt's end, two replies.
        assert len(requests) == 3 + 1 + 2
        for request_class, body in requests:
            request_class.model_validate(body)
            assert set(body) <= set(request_class.model_fields)

    def test_the_fake_answers_as_sglang_does(self, sglang, protocol):
        """This keeps the other tests of SGLang true."""
        ids = {"model": "tiny", "prompt": [5], "return_token_ids": True, "logprobs": 0}
        protocol.ModelList.model_validate(sglang.answer("/v1/models", {}) | {"object": "list"})
        question = {"model": "tiny", "prompt": "hi"}
        protocol.TokenizeResponse.model_validate(sglang.answer("/tokenize", question))
        question = {"model": "tiny", "tokens": [5]}
        protocol.DetokenizeResponse.model_validate(sglang.answer("/detokenize", question))
        answer = protocol.CompletionResponse.model_validate(sglang.answer("/v1/completions", ids))
        assert answer.choices[0].token_ids == sglang.sampled[0].completion

    def test_a_prompt_on_sglang_begins_with_the_ids_so_far(self, sglang):
        done = sglang.run([bash("ls"), "done"], max_turns=2)
        assert (done.recorded, done.metadata["n_prefix_breaks"]) == (sglang.sampled, 0)

    def test_thinking_that_sglangs_template_opened_is_taken_off(self, sglang):
        done = sglang.run(["so</think>done"], system_prompt="/think")
        assert (done.agent.turns[0].reasoning_content, done.completion) == ("so", "done")

    def test_sglangs_limit_is_that_of_its_list_of_models(self, sglang):
        sglang.run(max_tokens=99_999)
        (body,) = sglang.bodies("/v1/completions")
        assert body["max_tokens"] == 8192 - len(body["prompt"])

    def test_sglangs_routed_experts_are_recorded(self, sglang):
        done = sglang.run(llm_kwargs={"return_routed_experts": True})
        assert done.context.rollout_details[0]["extra"] == {"routed_experts": ["AAAA"]}

    @pytest.mark.parametrize("name", ["base:sql", "base"])
    def test_an_adapter_is_asked_for_by_its_name_on_sglang(self, name, sglang, adapters):
        sglang.run(model_name=name, max_tokens=99_999)
        assert {body["model"] for _, body, _ in sglang.requests if body} == {name}
        (body,) = sglang.bodies("/v1/completions")
        # The adapter has its base model's limit.
        assert body["max_tokens"] == 8192 - len(body["prompt"])

    @pytest.mark.parametrize("limit", [None, 100])
    @pytest.mark.parametrize("name", ["base:other", "other:sql", "other", "base:"])
    def test_a_name_that_sglang_does_not_list_is_refused(self, name, limit, sglang, adapters):
        """SGLang would answer with its base model."""
        with pytest.raises(module.ApiError, match=f"has no model {name}: its models are "):
            set_up(sglang.agent(model_name=name, context_limit=limit))

    def test_an_adapter_without_its_base_model_is_refused_by_sglangs_name(self, sglang, adapters):
        with pytest.raises(module.ApiError, match=r"its models are .*'base:sql'"):
            set_up(sglang.agent(model_name="sql"))

    @pytest.fixture
    def adapters(self, sglang, monkeypatch) -> None:
        """SGLang with a base model and an adapter of it."""
        base = {"id": "base", "max_model_len": 8192, "parent": None}
        adapter = {"id": "sql", "max_model_len": None, "parent": "base"}
        usual = sglang.answer

        def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
            if path == "/v1/models":
                return {"data": [base, adapter]}
            return usual(path, body | {"model": "tiny"})

        monkeypatch.setattr(sglang, "answer", answer)

    def test_sglangs_weight_versions_are_recorded(self, sglang):
        spans = [{"version": "7", "start": 0, "end": 3}]
        done = sglang.run([Reply("hi", answer={"metadata": {"weight_versions": spans}})])
        assert done.context.rollout_details[0]["extra"] == {"weight_versions": [spans]}

    def test_sglang_is_not_asked_for_what_it_does_not_know(self, sglang):
        sglang.run()
        (body,) = sglang.bodies("/v1/completions")
        assert "return_weight_versions" not in body


# -------------------------------------------------------------- answers that a model's markup wraps

KIMI_USER = "<|open|>message role=user<|sep|>{}<|close|>message<|sep|><|end_of_msg|>"
KIMI_BEGIN = "<|open|>message role=assistant<|sep|>"
KIMI_END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
COHERE_USER = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
COHERE_BEGIN = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
COHERE_END = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
INKLING_USER = "<|message_user|><|content_text|>{}<|end_message|>"
INKLING_BEGIN = "<|message_model|><|content_text|>"
INKLING_END = "<|end_message|><|content_model_end_sampling|>"


@dataclass
class Markup:
    """What a family of models writes around a message (also the system's), an earlier answer and a
    sampled one. The prompt ends in `opening`, and both kinds of answers in `end`."""

    user: str
    earlier: str
    opening: str
    sampled: str
    end: str

    def template(self, messages: list[dict]) -> str:
        written = {"assistant": self.earlier + "{}" + self.end}
        texts = [written.get(m["role"], self.user).format(m["content"]) for m in messages]
        return "".join(texts) + self.opening


MARKUP = {
    "kimi_k3": Markup(
        KIMI_USER,
        f"{KIMI_BEGIN}<|open|>response<|sep|>",
        f"{KIMI_BEGIN}<|open|>think<|sep|>",
        "hm<|close|>think<|sep|><|open|>response<|sep|>",
        KIMI_END,
    ),
    "kimi_k3_without_thinking": Markup(
        KIMI_USER,
        f"{KIMI_BEGIN}<|open|>response<|sep|>",
        f"{KIMI_BEGIN}<|open|>response<|sep|>",
        "",
        KIMI_END,
    ),
    "cohere": Markup(
        COHERE_USER,
        f"{COHERE_BEGIN}<|START_RESPONSE|>",
        f"{COHERE_BEGIN}<|START_THINKING|>",
        "hm<|END_THINKING|><|START_RESPONSE|>",
        COHERE_END,
    ),
    "cohere_without_thinking": Markup(
        COHERE_USER,
        f"{COHERE_BEGIN}<|START_RESPONSE|>",
        COHERE_BEGIN,
        "<|START_RESPONSE|>",
        COHERE_END,
    ),
    "cohere_text": Markup(
        COHERE_USER,
        f"{COHERE_BEGIN}<|START_TEXT|>",
        COHERE_BEGIN,
        "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>",
        "<|END_TEXT|><|END_OF_TURN_TOKEN|>",
    ),
    "inkling": Markup(
        INKLING_USER,
        INKLING_BEGIN,
        "",
        "<|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>",
        INKLING_END,
    ),
    "inkling_without_thinking": Markup(INKLING_USER, INKLING_BEGIN, "", INKLING_BEGIN, INKLING_END),
}


@pytest.fixture(params=["vllm", "sglang"])
def marked_up(request) -> FakeServer:
    """A server that has the tokens of these models, each of which is one id."""
    fake = request.getfixturevalue(request.param)
    texts = [text for markup in MARKUP.values() for text in vars(markup).values()]
    names = sorted(set(re.findall(r"<\|\w+\|>", "".join(texts))))
    fake.tokenizer.add_special_tokens(names)
    fake.tokenizer.add_tokens(["think", "response", "message"])
    return fake


@pytest.mark.parametrize("markup", MARKUP.values(), ids=MARKUP)
class TestMarkup:
    def test_the_loop_sees_the_text_alone(self, markup, marked_up):
        writes(marked_up, markup.template)
        # The fence is the last line of the answer.
        texts = [bash("ls").rstrip(), "done"]
        replies = [marked_up.encode(markup.sampled + text + markup.end) for text in texts]
        done = marked_up.run([Reply(ids=ids) for ids in replies], max_turns=3)
        assert (done.scripts, done.completion) == (["ls"], "done")
        assert [turn.content for turn in done.agent.turns] == texts

    def test_the_next_prompt_goes_on_exactly(self, markup, marked_up):
        writes(marked_up, markup.template)
        ids = marked_up.encode(f"{markup.sampled}hi{markup.end}")
        marked_up.run([Reply(ids=ids)] * 2, agent_class=sends("do it", "go on"))
        first, second = marked_up.sampled
        tail = marked_up.encode(markup.user.format("go on") + markup.opening)
        assert second.prompt == first.prompt + first.completion + tail

    def test_an_answer_that_is_cut_off_within_its_end_is_completed(self, markup, marked_up):
        writes(marked_up, markup.template)
        cut_off = marked_up.encode(f"{markup.sampled}hi{markup.end}")[:-1]
        replies = [Reply(ids=cut_off, cut_off=True), "hi"]
        marked_up.run(replies, agent_class=sends("do it", "go on"))
        first, second = marked_up.sampled
        last = marked_up.encode(markup.end)[-1:]
        tail = marked_up.encode(markup.user.format("go on") + markup.opening)
        assert second.prompt == first.prompt + cut_off + last + tail


def test_the_end_of_a_reply_of_kimi_k3_is_seven_tokens(marked_up):
    """This keeps the other tests of Kimi K3 true."""
    assert len(marked_up.encode(KIMI_END)) == 7


# ------------------------------------------------------------------------- prompts on llama.cpp


class FakeLlamaCpp(FakeServer):
    """The paths of llama.cpp's own server, as xllamacpp 2026.10.11549 has them."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/props":
            return {"default_generation_settings": {"n_ctx": 8192}}
        if path == "/apply-template":
            return {"prompt": self.tokenizer.decode(self.prompt_ids(body), False)}
        if path == "/tokenize":
            return {"tokens": self.encode(body["content"])}
        if path == "/detokenize":
            return {"content": self.tokenizer.decode(body["tokens"], False)}
        assert path == "/completion"
        stop = self.encode("<|im_end|>")
        _, turn, reason = asyncio.run(self.sample(body["prompt"], stop, body["n_predict"]))
        return {
            "tokens": turn.completion,
            "completion_probabilities": [{"logprob": x} for x in turn.logprobs],
            "stop_type": "eos" if reason == "stop" else "limit",
            "timings": {"cache_n": 0},
        }


@pytest.fixture
def llama_cpp(http, tokenizer_dir, tmp_path) -> FakeLlamaCpp:
    return FakeLlamaCpp(http, tokenizer_dir, model_name="tiny", logs_dir=tmp_path)


class TestLlamaCpp:
    def test_the_rollout_is_what_was_sampled_and_each_prompt_goes_on(self, llama_cpp):
        run = llama_cpp.run([bash("ls"), "done"], agent_class=LocalAgent, max_turns=2)
        first, second = run.recorded
        assert [first, second] == llama_cpp.sampled
        assert second.prompt[: len(first.prompt + first.completion)] == (
            first.prompt + first.completion
        )
        assert (run.completion, run.stop_reason) == ("done", "completed")

    def test_sampling_is_neutral(self, llama_cpp):
        llama_cpp.run(agent_class=LocalAgent, top_p=0.9, llm_kwargs={"seed": 3})
        (body,) = llama_cpp.bodies("/completion")
        assert body.items() >= (NEUTRAL_SAMPLING | {"top_p": 0.9, "seed": 3}).items()

    def test_a_reply_that_lacks_logprobs_is_counted_and_not_recorded(self, llama_cpp):
        # llama.cpp gives none for a token that ends within a character.
        run = llama_cpp.run([Reply("hello", logprobs=[-1.0])], agent_class=LocalAgent)
        assert (run.recorded, run.metadata["n_turns_without_ids"]) == ([], 1)

    def test_a_reply_that_was_cut_off_is_recorded_as_such(self, llama_cpp):
        run = llama_cpp.run(["hello " * 9], agent_class=LocalAgent, max_tokens=3)
        assert (run.stop_reason, len(run.recorded[0].completion)) == ("max_tokens", 3)

    def test_another_server_is_named_in_the_error(self, vllm):
        with pytest.raises(RuntimeError, match=r"is no llama\.cpp server"):
            vllm.run(agent_class=LocalAgent, model_client="tinker")

    def test_a_server_that_does_not_answer_is_named_with_the_cause(
        self, llama_cpp, no_pause, monkeypatch
    ):
        # The openai package waits between its attempts.
        monkeypatch.setattr("anyio.sleep", lambda seconds: asyncio.sleep(0))
        failed = llama_cpp.new_run(agent_class=LocalAgent, api_base="http://127.0.0.1:1")
        with pytest.raises(module.ApiError, match=r"http://127\.0\.0\.1:1.*Connect call failed"):
            failed.follow()

    def test_a_server_that_loads_its_model_is_waited_for(self, llama_cpp, no_pause, monkeypatch):
        usual, loading = llama_cpp.answer, iter([Refusal(503, "Loading model")] * 2)

        def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
            for error in loading:
                raise error
            return usual(path, body)

        monkeypatch.setattr(llama_cpp, "answer", answer)
        assert llama_cpp.run(agent_class=LocalAgent).completion == "hello"

    def test_a_later_turn_renders_one_short_conversation(self, llama_cpp):
        llama_cpp.run([bash("ls")] * 4, agent_class=LocalAgent, max_turns=4)
        # The prompt, two short conversations, and one for each further turn.
        assert len(llama_cpp.bodies("/apply-template")) == 1 + 2 + 1 + 1


# -------------------------------------------------------------------------------- chat endpoints


class FakeClaude(FakeServer):
    """Answers as Anthropic's endpoint does. `answers` has one for each request, or an error."""

    answers: Iterator[Any] = iter(())

    @staticmethod
    def says(text: str, stop_reason: str = "end_turn", **usage: int) -> dict[str, Any]:
        return {
            "id": "1",
            "type": "message",
            "role": "assistant",
            "model": "claude-sonnet-4-5-20250929",
            "content": [{"type": "text", "text": text}],
            "stop_reason": stop_reason,
            "usage": {"input_tokens": 1, "output_tokens": 1} | usage,
        }

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(outcome(next(self.answers)))


# Finish reasons of a server that failed. (After "abort" the reply is sampled again.)
FAILED_WORDS = [
    *("aborted", "cancelled", "error", "ERROR", "failed", "time_limit", "timeout", "TIMEOUT"),
    *("insufficient_system_resource", "network_error", "engine_overloaded"),
    *("overloaded", "server_error"),
    *("malformed_response", "malformed_model_output"),
]


class TestChat:
    def test_the_module_does_not_import_litellm(self):
        code = "import sys, basic_loop_agent; sys.exit('litellm' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    def test_nothing_is_sent_that_was_not_asked_for(self, chat):
        chat.run(temperature=None)
        message = {"role": "user", "content": "do it"}
        request = {"model": "tiny", "messages": [message], "max_tokens": 512}
        assert chat.bodies("/v1/chat/completions") == [request]

    @columns("given name value").rows(
        temperature_0=({"temperature": 0}, "temperature", 0),
        top_p=({"top_p": 0.9}, "top_p", 0.9),
        session_id=({"session_id": "x"}, "session_id", "x"),
        extra_body=({"llm_kwargs": {"extra_body": {"top_k": 5}}, "session_id": "x"}, "top_k", 5),
    )
    def test_a_server_gets_an_option(self, given, name, value, server):
        server.run(**given)
        _, body, _ = server.requests[-1]
        assert body[name] == value

    def test_a_chat_endpoint_gets_the_session_id_in_a_header(self, chat):
        headers = {"extra_headers": {"X-Other": "1"}}
        chat.run(session_id="mine", llm_kwargs=headers)
        assert (chat.headers("X-Session-ID"), chat.headers("X-Other")) == (["mine"], ["1"])

    # Without a URL, litellm would send the conversation and the key to OpenAI.
    @columns("provider").rows(
        vllm="hosted_vllm",
        lm_studio="lm_studio",
        proxy="litellm_proxy",
        custom="custom_openai",
        xinference="xinference",
    )
    def test_a_provider_that_needs_a_url_is_not_asked_without_one(self, provider, monkeypatch):
        monkeypatch.setenv(f"{provider.upper()}_API_KEY", "sk-secret")
        agent = BasicLoopAgent(
            model_name=f"{provider}/x", model_client="litellm", logs_dir=ROOT, max_turns=1
        )
        with pytest.raises(ValueError, match=r"^set api_base=http://\.\.\.: litellm knows no URL"):
            set_up(agent)

    def test_a_chat_endpoint_gets_no_session_id_by_default(self, chat):
        chat.run()
        assert "session_id" not in chat.bodies("/v1/chat/completions")[0]

    # Harbor's clients give 0.0 for an unknown price.
    @columns("costs total").rows(known=([0.5, 0.25], 0.75), one_unknown=([0.5, 0.0], None))
    def test_the_cost_is_known_if_that_of_each_turn_is(self, costs, total, chat):
        tokens = {"prompt_tokens": 1, "completion_tokens": 1, "cache_tokens": 0}
        first, second = (UsageInfo(**tokens, cost_usd=cost) for cost in costs)
        replies = [Turn(content=bash("ls"), usage=first), Turn(content="done", usage=second)]
        done = chat.run(agent_class=saying(*replies), max_turns=2)
        assert done.context.cost_usd == total

    def test_a_client_leaves_the_options_as_they_are(self, chat):
        done = chat.run(session_id="mine", llm_kwargs={"extra_body": {"top_k": 5}})
        assert done.agent.options.llm_kwargs == {"extra_body": {"top_k": 5}}

    def test_the_price_of_a_known_model_is_known(self, chat):
        done = chat.run(model_name="openai/gpt-4o-2024-05-13")
        # litellm's price list: 5 and 15 dollars per million tokens.
        price = done.context.n_input_tokens * 5e-6 + done.context.n_output_tokens * 15e-6
        assert done.context.cost_usd == pytest.approx(price)
        assert done.trajectory.final_metrics.total_cost_usd == done.context.cost_usd

    @columns("content completion").rows(null=(None, ""), lone_surrogate=("a\ud800", "a?"))
    def test_an_answer_becomes_valid_text(self, content, completion, chat):
        assert chat.run([Reply(message={"content": content})]).completion == completion

    @columns("reason stop_reason").rows(
        length=("length", "max_tokens"),
        content_filter=("content_filter", "content_filter"),
        repetition=("repetition", "repetition"),
        capitals=("MALFORMED", "malformed"),
    )
    def test_a_reply_on_vllm_that_is_incomplete_is_not_run(self, reason, stop_reason, vllm):
        done = vllm.run([Reply(bash("rm x"), choice={"finish_reason": reason})], max_turns=2)
        assert (done.stop_reason, done.scripts) == (stop_reason, [])

    # litellm makes "stop" of the words that it does not know.
    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    @pytest.mark.parametrize(
        "reason",
        ["stop", "STOP", "end_turn", "eos", "COMPLETE", "stop_sequence", "repetition", None],
    )
    def test_a_reply_of_litellm_that_is_not_cut_off_is_complete(self, reason, provider, chat):
        reply = Reply(bash("ls"), choice={"finish_reason": reason})
        done = chat.run([reply, "done"], max_turns=2, model_name=f"{provider}/tiny")
        assert done.scripts == ["ls"]

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    @columns("reason stop_reason").rows(
        length=("length", "max_tokens"),
        capitals=("LENGTH", "max_tokens"),
        max_tokens=("MAX_TOKENS", "max_tokens"),
        context_window=("model_context_window_exceeded", "max_tokens"),
        mistrals=("model_length", "max_tokens"),
        of_the_responses_api=("max_output_tokens", "max_tokens"),
        capped=("length_capped", "max_tokens"),
        incomplete=("incomplete", "max_tokens"),
        context_length=("context_length", "max_tokens"),
        coheres=("ERROR_LIMIT", "max_tokens"),
        content_filter=("content_filter", "content_filter"),
        refusal=("refusal", "content_filter"),
        tool_calls=("tool_calls", "tool_calls"),
    )
    def test_a_reply_of_litellm_that_is_incomplete_is_not_run(
        self, reason, stop_reason, provider, chat
    ):
        reply = Reply(bash("rm x"), choice={"finish_reason": reason})
        done = chat.run([reply], max_turns=2, model_name=f"{provider}/tiny")
        assert (done.stop_reason, done.scripts) == (stop_reason, [])

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    @pytest.mark.parametrize("word", FAILED_WORDS)
    def test_a_reply_that_the_server_broke_off_is_an_error(self, word, provider, chat):
        reply = Reply(bash("rm x"), choice={"finish_reason": word})
        failed = chat.new_run([reply], max_turns=2, model_name=f"{provider}/tiny")
        with pytest.raises(module.ApiError, match=f"ended the reply with '{word.lower()}'"):
            failed.follow()
        assert (failed.stop_reason, failed.scripts) == ("error", [])

    # OpenRouter says so of an upstream server.
    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "openrouter"])
    @columns("reason").rows(error="error", null=None, stop="stop")
    def test_an_error_in_a_choice_is_an_error(self, reason, provider, chat):
        upstream = {"code": 502, "message": "Upstream went away"}
        reply = Reply(bash("rm x"), choice={"finish_reason": reason, "error": upstream})
        options = {"model_name": f"{provider}/tiny", "llm_kwargs": {"api_key": "sk-test"}}
        failed = chat.new_run([reply], **options)
        with pytest.raises(module.ApiError, match="Upstream went away"):
            failed.follow()
        assert failed.stop_reason == "error"

    def test_an_error_in_place_of_the_choices_is_an_error(self, chat, no_pause):
        upstream = {"error": {"code": 502, "message": "Upstream went away"}, "choices": []}
        with pytest.raises(module.ApiError, match="Upstream went away"):
            chat.new_run([Reply(answer=upstream)] * 3).follow()

    # The openai package reads such a page as a text, the others raise an error with status 200.
    @pytest.mark.parametrize(
        "provider",
        [
            "anthropic",
            "deepseek",
            "fireworks_ai",
            "hosted_vllm",
            "openrouter",
            "together_ai",
            "xai",
        ],
    )
    def test_a_page_in_place_of_a_reply_is_waited_for(self, provider, chat, no_pause, monkeypatch):
        pages, real_answer = iter([b"<html>"]), chat.answer
        if provider == "anthropic":
            real_answer = lambda *request: FakeClaude.says("hello")  # noqa: E731
        monkeypatch.setattr(
            chat, "answer", lambda *request: next(pages, None) or real_answer(*request)
        )
        done = chat.run(model_name=f"{provider}/tiny", llm_kwargs={"api_key": "sk-test"})
        assert (done.stop_reason, done.completion) == ("completed", "hello")

    def test_a_reply_of_claude_that_breaks_off_is_no_full_context(self, claude, no_pause):
        """The text of litellm's error holds the whole response."""
        broken = b'{"content": [{"type": "text", "text": "This file is too long'
        claude.answers = iter([claude.says(bash("ls")), broken, claude.says("done")])
        done = claude.run(max_turns=3)
        assert (done.stop_reason, done.completion) == ("completed", "done")

    def test_a_reply_that_litellm_cannot_read_is_no_full_context(self, chat, no_pause):
        """The text of litellm's error holds the whole response."""
        usage = {"prompt_tokens": 1.5, "completion_tokens": 1, "total_tokens": 2.5}
        unreadable = Reply("This file is too long", answer={"usage": usage})
        failed = chat.new_run([bash("ls"), *[unreadable] * 999], max_turns=3)
        asyncio.run(finish(failed), loop_factory=virtual_loop)
        assert failed.stop_reason == "error"

    def test_a_reply_of_gemini_that_litellm_cannot_read_is_no_full_context(
        self, chat, no_pause, monkeypatch
    ):
        """The text of litellm's error holds the whole response. Here the usage is missing."""
        parts = [{"text": "This is about the context window."}]
        answer = {"candidates": [{"content": {"role": "model", "parts": parts}}]}
        monkeypatch.setattr(chat, "answer", lambda *request: answer)
        with pytest.raises(module.ApiError, match="Error converting to valid response"):
            chat.run(model_name="gemini/gemini-2.5-pro", llm_kwargs={"api_key": "sk-test"})
        assert len(chat.requests) == 3

    @columns("code").rows(number="503", word="server_overloaded")
    def test_a_code_that_is_a_text_is_waited_for(self, code, chat, no_pause):
        error = {"error": {"message": "busy", "code": code}}
        done = chat.run([bash("ls"), Reply(answer=error), "done"], max_turns=3)
        assert (done.stop_reason, done.completion) == ("completed", "done")

    def test_a_code_may_say_that_the_context_is_full(self, chat):
        error = {"error": {"message": "too much", "code": "context_length_exceeded"}}
        done = chat.run([bash("ls"), Reply(answer=error)], max_turns=3)
        assert done.stop_reason == "context_overflow"

    @columns("page").rows(a_page=b'"<html>"', broken_json=b'{"id": "1", "choi', nothing=b"")
    def test_a_page_in_place_of_a_completion_is_waited_for(self, page, vllm, no_pause, monkeypatch):
        real_answer, pages = vllm.answer, iter([page])

        def answer(path: str, body: Any) -> Any:
            page = next(pages, None) if path == "/v1/completions" else None
            return real_answer(path, body) if page is None else page

        monkeypatch.setattr(vllm, "answer", answer)
        assert vllm.run().completion == "hello"

    def test_words_after_a_full_context_change_nothing(self, server):
        full = Refusal(400, "prompt is too long. The original response was: ...")
        assert server.run([bash("ls"), full], max_turns=2).stop_reason == "context_overflow"

    def test_an_error_that_repeats_the_request_is_no_full_context(self, server):
        detail = {"message": "Field required", "input": f"{500 * 'x'} context length"}
        failed = server.new_run([bash("ls"), Refusal(400, body={"error": detail})], max_turns=2)
        asyncio.run(finish(failed))
        assert failed.stop_reason == "error"

    def test_an_error_with_half_a_character_can_be_saved(self, server):
        """Harbor would end the whole job at such a text."""
        refusal = Refusal(400, body={"error": {"message": "invalid content: caf\ud83d"}})
        with pytest.raises(module.ApiError, match=r"invalid content: caf\?") as error:
            server.new_run([refusal]).follow()
        assert shown_text(error.value).encode()

    def test_a_reply_of_litellm_that_the_server_aborts_is_sampled_again(self, chat, no_pause):
        aborted = Reply(bash("rm x"), choice={"finish_reason": "abort"})
        done = chat.run([aborted, "done"], max_turns=2)
        assert (done.stop_reason, done.completion, done.scripts) == ("completed", "done", [])
        first, second = chat.bodies("/v1/chat/completions")
        assert first == second

    def test_a_reply_of_litellm_that_is_cut_off_is_not_run(self, chat):
        done = chat.run([Reply(bash("rm x"), cut_off=True)], max_turns=2)
        assert (done.stop_reason, done.scripts, done.completion) == ("max_tokens", [], bash("rm x"))

    def test_a_reply_of_litellm_that_is_cut_off_keeps_its_usage(self, chat):
        done = chat.run([Reply(cut_off=True)], model_name="openai/gpt-4o-2024-05-13")
        (turn,) = chat.sampled
        counted = (done.context.n_input_tokens, done.context.n_output_tokens)
        assert counted == (len(turn.prompt), len(turn.completion))
        price = len(turn.prompt) * 5e-6 + len(turn.completion) * 15e-6
        assert done.context.cost_usd == pytest.approx(price)

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    @pytest.mark.parametrize("is_cut_off", [False, True])
    def test_ids_of_a_chat_endpoint_are_recorded_if_wanted(self, is_cut_off, provider, chat):
        options = {"model_name": f"{provider}/tiny", "collect_rollout_details": True}
        done = chat.run([bash("ls"), Reply(cut_off=is_cut_off)], max_turns=2, **options)
        assert done.recorded == chat.sampled
        assert len(done.recorded) == 2

    @columns("stop_reason").rows(stop="stop", content_filter="content_filter")
    def test_the_text_of_a_refusal_is_the_answer(self, stop_reason, chat):
        refusal = {"content": None, "refusal": "I cannot help with that."}
        choice = {"finish_reason": stop_reason}
        done = chat.run([Reply(message=refusal, choice=choice)], max_turns=2)
        assert done.completion == "I cannot help with that."

    def test_the_prices_of_model_info_are_used(self, chat):
        prices = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.002}
        name = "openai/with-model-info"
        done = chat.run(model_name=name, llm_kwargs={"model_info": {"max_tokens": 9, **prices}})
        (turn,) = chat.sampled
        price = len(turn.prompt) * 0.001 + len(turn.completion) * 0.002
        assert done.context.cost_usd == pytest.approx(price)
        assert "model_info" not in chat.bodies("/v1/chat/completions")[0]

    @pytest.mark.parametrize("name", ["openai/o3", "openai/gpt-5"])
    def test_a_model_that_takes_no_temperature_is_sent_none(self, name, chat):
        done = chat.run(model_name=name, temperature=0.7)
        assert done.stop_reason == "completed"
        assert "temperature" not in chat.bodies("/v1/chat/completions")[0]

    def test_no_choices_are_an_error(self, chat):
        with pytest.raises(module.ApiError, match="the server's response has no choices"):
            chat.new_run([Reply(answer={"choices": []})]).follow()

    def test_a_claude_that_is_overloaded_for_a_minute_is_waited_for(self, claude, no_pause):
        """litellm makes another error of it: an InternalServerError with status 500."""
        busy = Refusal(529, "overloaded_error")
        replies = [claude.says(bash("ls")), *[busy] * 21, claude.says("done")]
        claude.answers = iter(replies)
        done = claude.run(max_turns=3)
        assert (done.stop_reason, done.completion) == ("completed", "done")

    @columns("word stop_reason").rows(
        end_turn=("end_turn", "completed"),
        stop_sequence=("stop_sequence", "completed"),
        max_tokens=("max_tokens", "max_tokens"),
        context_window=("model_context_window_exceeded", "max_tokens"),
        refusal=("refusal", "content_filter"),
    )
    def test_a_stop_reason_of_claude_ends_the_run(self, word, stop_reason, claude):
        claude.answers = iter([claude.says("hi", word)])
        done = claude.run(max_turns=2)
        assert (done.stop_reason, done.completion) == (stop_reason, "hi")

    def test_claude_is_asked_to_cache_the_prompt(self, claude):
        claude.answers = iter([*[claude.says(bash("ls"))] * 5, claude.says("done")])
        claude.run(max_turns=6)
        messages = claude.requests[-1][1]["messages"]
        parts = [part for message in messages for part in message["content"]]
        assert parts[-1]["cache_control"] == {"type": "ephemeral"}
        # Anthropic allows four of these.
        assert sum("cache_control" in part for part in parts) <= 4

    def test_claudes_cached_tokens_are_counted_and_are_cheaper(self, claude):
        claude.answers = iter([claude.says("hi", cache_read_input_tokens=1000)])
        context = claude.run(model_name="anthropic/claude-sonnet-4-5").context
        assert (context.n_input_tokens, context.n_cache_tokens) == (1001, 1000)
        # litellm's price list: 3, 15 and, for a cached token, 0.3 dollars per million tokens.
        assert context.cost_usd == pytest.approx(3e-6 + 15e-6 + 1000 * 0.3e-6)

    @pytest.fixture
    def claude(self, http, tokenizer_dir, chat, monkeypatch) -> "FakeClaude":
        monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-test")
        options = chat.options | {"model_name": "anthropic/claude-opus-4-1"}
        del options["api_base"]
        return FakeClaude(http, tokenizer_dir, **options)

    def test_before_the_first_reply_a_refused_connection_is_an_error(self, chat, no_pause):
        # Nothing listens on port 1.
        url = "http://127.0.0.1:1"
        failed = chat.new_run(api_base=url, llm_kwargs={"max_retries": 0})
        with pytest.raises(module.ApiError, match="Connection error") as error:
            failed.follow()
        assert f"cannot connect to {url}/v1: check its URL" in shown_text(error.value)

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
    @columns("url place cause").rows(
        refused_port=("http://127.0.0.1:1", "^cannot connect to", "Connect call failed"),
        unknown_host=("http://no-such-host.invalid", "^cannot connect to", "not known"),
        no_https=("https://127.0.0.1:{port}", "Error from", "wrong version number"),
    )
    def test_the_error_says_why_no_server_answers(
        self, url, place, cause, provider, chat, no_pause
    ):
        url = url.format(port=chat.url.rpartition(":")[2])
        options = {"model_name": f"{provider}/tiny", "llm_kwargs": {"api_key": "sk-test"}}
        with pytest.raises(module.ApiError, match=f"(?s){place} {url}.*{cause}"):
            chat.new_run(api_base=url, **options).follow()

    @pytest.mark.parametrize("status", [408, 409, 425, 460, 499, 500, 502, 504, 520, 524])
    def test_before_the_first_reply_a_server_that_is_down_is_asked_three_times(
        self, status, chat, no_pause
    ):
        with pytest.raises(module.ApiError, match="refused"):
            chat.new_run([Refusal(status)] * 9).follow()
        assert (len(chat.requests), no_pause) == (3, [1, 2])

    def test_before_the_first_reply_a_slow_server_is_asked_three_times(self, chat, no_pause):
        async def late() -> str:
            # (The fixture no_pause replaces asyncio.sleep.)
            await asyncio.to_thread(time.sleep, 0.3)
            return "hello"

        with pytest.raises(module.ApiError, match="timed out"):
            chat.new_run([late] * 9, llm_kwargs={"timeout": 0.1}).follow()
        assert (len(chat.requests), no_pause) == (3, [1, 2])

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_before_the_first_reply_a_closed_connection_is_tried_three_times(
        self, provider, chat, no_pause
    ):
        accepted = []

        def close_each() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    accepted.append(connection.recv(9))
                    connection.close()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=close_each, daemon=True).start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(module.ApiError, match=r"(?i)disconnected|connection"):
                chat.new_run(api_base=url, model_name=f"{provider}/tiny").follow()
            listener.shutdown(socket.SHUT_RDWR)
        assert (len(accepted), no_pause) == (3, [1, 2])

    def test_a_server_that_is_back_at_the_third_try_loses_nothing(self, chat, no_pause):
        done = chat.run([Refusal(500), Refusal(502), "hi"])
        assert (done.stop_reason, done.completion) == ("completed", "hi")
        assert done.metadata["n_episodes"] == 1

    @pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 413, 422])
    def test_an_error_that_does_not_pass_is_asked_for_once(self, status, chat, no_pause):
        failed = chat.new_run([bash("ls"), *[Refusal(status)] * 9], max_turns=3)
        with pytest.raises(module.ApiError, match="refused"):
            failed.follow()
        assert (len(chat.requests), no_pause) == (2, [])

    @columns("kind message").rows(
        openais=("insufficient_quota", "You exceeded your current quota."),
        spend_limit=("organization_spend_limit_exceeded", "Your organization's limit."),
        usage_limit=("organization_usage_limit_exceeded", "Your organization's limit."),
        credit=("credit_balance_exhausted", "Buy credits."),
        billing=("billing_hard_limit_reached", "Raise it."),
        kimis=("exceeded_current_quota_error", "Your account is suspended."),
        only_the_text=("error", "Insufficient balance, please recharge."),
    )
    def test_a_quota_that_is_used_up_is_not_waited_for(self, kind, message, chat, no_pause):
        body = {"error": {"message": message, "type": kind, "code": kind}}
        failed = chat.new_run([bash("ls"), *[Refusal(429, body=body)] * 9], max_turns=3)
        with pytest.raises(module.ApiError, match=re.escape(message)):
            failed.follow()
        assert (len(chat.requests), no_pause) == (2, [])

    @columns("message").rows(
        openais="Rate limit reached for gpt-4o on tokens per min (TPM). Please try again in 6ms.",
        # Gemini says this of its limit per minute, too.
        geminis="You exceeded your current quota, please check your plan and billing details.",
    )
    def test_a_limit_per_minute_is_waited_for(self, message, chat, no_pause):
        done = chat.run([Refusal(429, message), Refusal(429, message), "done"])
        assert (done.completion, no_pause) == ("done", [1, 2])

    @columns("name variable").rows(
        anthropic=("anthropic/claude-opus-4-1", "ANTHROPIC_API_KEY"),
        no_provider=("claude-sonnet-4-5", "ANTHROPIC_API_KEY"),
        gemini=("gemini/gemini-2.5-pro", "GEMINI_API_KEY"),
        zai=("zai/glm-4.6", "ZAI_API_KEY"),
        fireworks=("fireworks_ai/x", "FIREWORKS_API_KEY"),
        openai=("openai/gpt-4o", "OPENAI_API_KEY"),
    )
    def test_an_error_names_the_key_that_is_missing(
        self, name, variable, chat, no_pause, monkeypatch
    ):
        for key in [key for key in os.environ if key.endswith(("_API_KEY", "_TOKEN"))]:
            monkeypatch.delenv(key)
        with pytest.raises(module.ApiError, match=variable):
            chat.new_run(model_name=name, api_base=None).follow()

    def test_the_error_of_a_wrong_key_is_the_servers(self, chat):
        with pytest.raises(module.ApiError, match=r"AuthenticationError from .*no such key"):
            chat.new_run([Refusal(401, "no such key")]).follow()

    def test_a_subclass_that_returns_no_client_is_an_error(self, chat):
        class NoClient(BasicLoopAgent):
            def _build_llm(self) -> Any: ...

        with pytest.raises(TypeError, match="_build_llm must return a ModelClient"):
            set_up(chat.agent(NoClient))

    def test_a_subclass_may_return_any_llm_of_harbor(self, chat):
        class HarborsAgent(BasicLoopAgent):
            def _build_llm(self) -> Any:
                return LiteLLM("openai/tiny", api_base=f"{chat.url}/v1", max_tokens=512)

        done = chat.run([bash("ls"), "done"], agent_class=HarborsAgent, max_turns=2)
        assert (done.stop_reason, done.completion, done.scripts) == ("completed", "done", ["ls"])
        assert done.context.n_output_tokens == sum(len(turn.completion) for turn in chat.sampled)

    def test_a_reply_of_harbors_llm_that_is_cut_off_is_not_run(self, chat):
        """Harbor's client loses its usage."""

        class HarborsAgent(BasicLoopAgent):
            def _build_llm(self) -> Any:
                return LiteLLM("openai/tiny", api_base=f"{chat.url}/v1", max_tokens=512)

        replies = [Reply(bash("rm x"), cut_off=True)]
        done = chat.run(replies, agent_class=HarborsAgent, max_turns=2)
        assert (done.stop_reason, done.scripts) == ("max_tokens", [])
        assert (done.completion, done.context.cost_usd) == (bash("rm x"), None)

    def test_no_error_of_a_chat_server_shows_the_password_of_a_url(self, chat, no_pause):
        url = chat.url.replace("//", "//user:secret@")
        failed = chat.new_run([Refusal(404, "gone")] * 9, api_base=url)
        with pytest.raises(Exception, match="litellm") as error:
            failed.follow()
        assert f"Error from {chat.url}/v1: " in shown_text(error.value)
        assert "secret" not in shown_text(error.value)

    def test_no_request_holds_a_nul(self, server):
        replies = [bash("printf 'a\0b'"), "done"]
        options = {"max_turns": 2, "system_prompt": "a\0b"}
        run = server.new_run(replies, FakeEnvironment("a\0b"), **options).follow("c\0d")
        assert run.observations == ["Exit code: 0\nOutput:\nab"]
        assert [body for _, body, _ in server.requests if "\\u0000" in json.dumps(body)] == []

    @columns("reply").rows(
        nothing_but_thinking="<think>hm</think>",
        null=Reply(message={"content": None}),
        empty="",
        blank=" \n\t",
    )
    def test_no_empty_assistant_message_is_sent(self, reply, chat):
        chat.new_run([reply, "done"]).follow("one", "two")
        messages = chat.bodies("/v1/chat/completions")[1]["messages"]
        assert [message["content"] for message in messages] == ["one", "(empty)", "two"]

    @pytest.mark.parametrize("text", ["", " \n\t"])
    def test_no_empty_instruction_is_sent(self, text, chat):
        chat.new_run().follow(text)
        messages = chat.bodies("/v1/chat/completions")[0]["messages"]
        assert messages == [{"role": "user", "content": "(empty)"}]

    @pytest.mark.parametrize("text", ["", " \n\t"])
    def test_no_empty_output_is_sent(self, text, chat):
        class SilentAgent(BasicLoopAgent):
            async def execute(self, blocks: list[str], environment: Any) -> str:
                return text

        chat.run([bash("ls"), "done"], agent_class=SilentAgent, max_turns=2)
        message = chat.bodies("/v1/chat/completions")[1]["messages"][-1]
        assert message == {"role": "user", "content": "(empty)"}

    def test_no_empty_output_is_sent_by_an_llm_of_harbor(self, chat):
        class SilentAgent(BasicLoopAgent):
            def _build_llm(self) -> Any:
                return LiteLLM("openai/tiny", api_base=f"{chat.url}/v1", max_tokens=512)

            async def execute(self, blocks: list[str], environment: Any) -> str:
                return ""

        chat.run([bash("ls"), "done"], agent_class=SilentAgent, max_turns=2)
        message = chat.bodies("/v1/chat/completions")[1]["messages"][-1]
        assert message == {"role": "user", "content": "(empty)"}

    def test_no_blank_system_message_is_sent(self, chat):
        chat.run(system_prompt=" \n\t")
        messages = chat.bodies("/v1/chat/completions")[0]["messages"]
        assert [message["content"] for message in messages] == ["(empty)", "do it"]

    @columns("is_wanted sent").rows(yes=(True, {"reasoning_content": "hm"}), no=(False, {}))
    def test_reasoning_goes_back_only_if_wanted(self, is_wanted, sent, chat):
        replies = [Reply(bash("ls"), message={"reasoning_content": "hm"}), "done"]
        chat.run(replies, max_turns=2, interleaved_thinking=is_wanted)
        answer = chat.bodies("/v1/chat/completions")[1]["messages"][2]
        assert answer == {"role": "assistant", "content": bash("ls"), **sent}

    # A reply's text, the server's reasoning, and the thinking and the answer that are recorded.
    @columns("text reasoning expected").rows(
        a_tag_beside_the_servers_reasoning=("a </think>\nb", "hm", ("hm", "a </think>\nb")),
        both=("<think>b</think>hi", "a", ("ab", "hi")),
        only_closed=("so\n</think>\nhi", None, ("", "so\n</think>\nhi")),
    )
    def test_thinking_is_recorded_apart(self, text, reasoning, expected, chat):
        done = chat.run([Reply(text, message={"reasoning_content": reasoning})])
        assert (done.agent.turns[0].reasoning_content, done.agent.turns[0].content) == expected


# ----------------------------------------------------------------------------- files with ATIF


class TestFiles:
    @columns("replies completion messages").rows(
        an_error=([bash("ls"), RuntimeError("gone")], bash("ls"), ["do it", bash("ls")]),
        a_cancellation=([bash("ls"), forever], bash("ls"), ["do it", bash("ls")]),
        no_reply=([RuntimeError("gone")], "", ["do it"]),
    )
    def test_every_ending_leaves_both_files(self, replies, completion, messages, tinker):
        ended = tinker.new_run(replies, timeout_sec=50, max_turns=2, system_prompt="")
        asyncio.run(finish(ended), loop_factory=virtual_loop)
        assert ended.completion == completion
        assert [step.message for step in ended.steps] == messages

    def test_a_step_without_a_reply_leaves_no_older_answer(self, tinker):
        assert tinker.new_run(["hi", FULL]).follow("one", "two").completion == ""

    @pytest.mark.parametrize("again", ["resume", "run"])
    def test_a_later_run_leaves_its_own_files(self, again, tinker, tmp_path):
        """Harbor copies the log folder into the container for the tests, and 0.25 copies it back
        after the next run."""
        host, container = tmp_path / "agent", tmp_path / "container"
        run = tinker.new_run(["one", "two"], ShellEnvironment(), logs_dir=host)
        run.agent.environment_logs_dir = container

        async def main() -> None:
            await run.go("first")
            shutil.copytree(host, container)
            (container / "notes.txt").write_text("a script's")
            go_on = getattr(run.agent, again)
            await go_on("second", run.environment, AgentContext())
            shutil.copytree(container, host, dirs_exist_ok=True)

        asyncio.run(main())
        assert (run.completion, run.steps[-1].message) == ("two", "two")
        assert (host / "notes.txt").read_text() == "a script's"

    def test_the_first_run_removes_nothing_from_the_container(self, tinker):
        run = tinker.new_run(["one", "two"]).follow("first")
        assert run.environment.cleared == []

    def test_all_users_can_read_the_files(self, tinker, tmp_path):
        (tmp_path / "completion.txt").touch(0o600)
        usual = os.umask(0o077)
        try:
            tinker.run()
        finally:
            os.umask(usual)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes == {"completion.txt": 0o644, "trajectory.json": 0o644}

    def test_the_log_folder_may_be_on_another_mount(self, tinker, tmp_path):
        folder = Path("/dev/shm", uuid4().hex)
        folder.mkdir()
        (tmp_path / "agent").symlink_to(folder)
        try:
            done = tinker.run(logs_dir=tmp_path / "agent")
            assert done.completion == done.steps[-1].message == "hello"
        finally:
            shutil.rmtree(folder)

    def test_nothing_is_written_beside_the_log_folder(self, tinker, tmp_path):
        # Nobody can make a file in /proc/self/fd, not even root.
        number = os.open(tmp_path, os.O_RDONLY)
        try:
            done = tinker.run(logs_dir=Path(f"/proc/self/fd/{number}"))
            assert done.completion == done.steps[-1].message == "hello"
        finally:
            os.close(number)

    @columns("folder name").rows(two=("trial/agent", "trial"), one=("agent", "work"))
    def test_the_log_folder_may_be_a_relative_path(
        self, folder, name, tinker, tmp_path, monkeypatch
    ):
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        done = tinker.run(logs_dir=Path(folder))
        assert done.completion == done.steps[-1].message == "hello"
        assert done.trajectory.session_id == f"{name}-run1"

    @columns("command").rows(link="ln -s victim", pipe="mkfifo")
    @pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
    def test_what_a_script_left_at_a_files_name_is_replaced(self, command, name, tinker, tmp_path):
        subprocess.run(f"{command} {name}", shell=True, cwd=tmp_path, check=True)
        done = tinker.run()
        assert done.completion == done.steps[-1].message == "hello"
        assert sorted(os.listdir(tmp_path)) == ["completion.txt", "trajectory.json"]

    @columns("command").rows(link="ln -s ../victim", hard_link="ln ../victim")
    @pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
    def test_a_file_to_which_a_script_left_a_link_stays(self, command, name, tinker, tmp_path):
        (tmp_path / "victim").write_text("keep this")
        (tmp_path / "agent").mkdir()
        subprocess.run(f"{command} {name}", shell=True, cwd=tmp_path / "agent", check=True)
        tinker.run(logs_dir=tmp_path / "agent")
        assert (tmp_path / "victim").read_text() == "keep this"

    @pytest.fixture
    def no_logs(self, tmp_path) -> Path:
        """A log folder into which nothing can be written, because it is a file."""
        (tmp_path / "logs").touch()
        return tmp_path / "logs"

    def test_a_log_folder_that_cannot_be_written_is_an_error(self, no_logs, tinker):
        failed = tinker.new_run(logs_dir=no_logs)
        with pytest.raises(RuntimeRequestError, match=r"run could not be recorded: .*exists"):
            failed.follow()
        # The context is complete.
        assert (failed.recorded, failed.stop_reason) == (tinker.sampled, "completed")
        assert failed.context.n_output_tokens == len(tinker.sampled[0].completion)

    @pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
    def test_a_folder_at_a_files_name_is_an_error(self, name, tinker, tmp_path):
        (tmp_path / name).mkdir()
        with pytest.raises(module.RuntimeRequestError, match="the run could not be recorded"):
            tinker.run()

    def test_no_half_written_file_is_left(self, tinker, tmp_path):
        class BrokenAgent(BasicLoopAgent):
            def trajectory_step(self, turn: Turn) -> dict:
                raise ValueError("no step")

        with pytest.raises(RuntimeRequestError, match=r"recorded: ValueError\('no step'\)"):
            tinker.run(agent_class=BrokenAgent)
        assert os.listdir(tmp_path) == ["completion.txt"]

    @columns("reply option reason").rows(
        at_harbors_timeout=(forever, {"timeout_sec": 50}, "cancelled"),
        at_max_seconds=(forever, {"max_seconds": 50}, "rollout_timeout"),
        after_an_error=(RuntimeError("gone"), {}, "error"),
    )
    def test_however_a_run_ends_it_fails_if_its_files_cannot_be_written(
        self, reply, option, reason, no_logs, tinker
    ):
        ended = tinker.new_run([reply], logs_dir=no_logs, **option)
        with pytest.raises(module.RuntimeRequestError, match="the run could not be recorded"):
            asyncio.run(ended.go(), loop_factory=virtual_loop)
        assert ended.stop_reason == reason

    def test_a_write_error_shows_the_error_of_the_run(self, no_logs, tinker):
        with pytest.raises(RuntimeRequestError, match="could not be recorded") as failed:
            tinker.new_run([RuntimeError("gone")], logs_dir=no_logs).follow()
        assert "gone" in "".join(traceback.format_exception(failed.value))

    def test_a_script_that_removes_a_file_that_is_being_written_is_no_error(self, tinker, tmp_path):
        class Remover:
            def __str__(self) -> str:
                for path in tmp_path.glob("*.*"):
                    path.unlink()
                return "removed"

        class RemovingAgent(BasicLoopAgent):
            def trajectory_step(self, turn: Turn) -> dict:
                # This becomes text while the file is written.
                return super().trajectory_step(turn) | {"extra": {"by": Remover()}}

        done = tinker.run(agent_class=RemovingAgent)
        assert (done.stop_reason, done.recorded) == ("completed", tinker.sampled)

    def test_a_cancellation_does_not_stop_the_last_write(self, tinker, monkeypatch):
        """Harbor's timeout may come while the files are written."""
        write_file = module.write_file

        def slow_write(*given: Any) -> None:
            writing.set()
            cancelled.wait(9)
            write_file(*given)

        async def main() -> None:
            await run.agent.setup(run.environment)
            task = asyncio.create_task(run.step())
            await asyncio.to_thread(writing.wait, 9)
            # The event loop has gone on meanwhile.
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])
            cancelled.set()
            assert task.cancelled()

        writing, cancelled, run = threading.Event(), threading.Event(), tinker.new_run()
        monkeypatch.setattr(module, "write_file", slow_write)
        asyncio.run(main())
        assert (run.completion, run.steps[-1].message) == ("hello", "hello")

    def test_a_trajectory_shows_the_conversation(self, tinker, tokenizer_dir, tmp_path):
        options = {"logs_dir": tmp_path / "greet__x7/agent", "system_prompt": "Be brief."}
        replies = [bash("ls"), "<think>hm</think>done"]
        done = tinker.run(replies, FakeEnvironment("out"), max_turns=2, **options)
        file = json.loads((tmp_path / "greet__x7/agent/trajectory.json").read_text())
        # The system message is no step.
        user, first, second = file["steps"]
        assert file["agent"]["extra"] == {"system_prompt": "Be brief."}
        shown = {name: user[name] for name in user.keys() - {"timestamp"}}
        assert shown == {"step_id": 1, "source": "user", "message": "do it"}
        assert (first["message"], second["message"]) == (bash("ls"), "done")
        assert "reasoning_content" not in first
        assert second["reasoning_content"] == "hm"
        assert first["observation"] == {"results": [{"content": "Exit code: 0\nOutput:\nout"}]}
        assert user["timestamp"] < first["timestamp"] < second["timestamp"]
        assert (file["session_id"], file["extra"]) == ("greet__x7-run1", done.metadata)
        shown = (done.trajectory.agent.name, done.trajectory.agent.version)
        assert shown == ("basic-loop", module.__version__)
        assert done.trajectory.agent.model_name == tokenizer_dir

    def test_each_step_has_a_time(self, model):
        before = datetime.now(UTC)
        done = model.run([bash("ls"), "done"], max_turns=2)
        sent, first, second = (datetime.fromisoformat(step.timestamp) for step in done.steps)
        assert before <= sent <= first <= second <= datetime.now(UTC)

    @columns("replies instructions").rows(
        no_reply=([RuntimeError("gone")], ["one"]),
        a_later_error=([bash("ls"), RuntimeError("gone")], ["one"]),
        a_later_step=([bash("ls"), bash("ls"), "done"], ["one", "two"]),
    )
    def test_each_step_of_each_ending_has_a_time(self, replies, instructions, tinker):
        run = tinker.new_run(replies, max_turns=2)
        with contextlib.suppress(module.ApiError):
            run.follow(*instructions)
        assert [step.timestamp is None for step in run.steps] == [False] * len(run.steps)

    def test_the_time_of_a_text_is_when_it_was_sent(self, tinker):
        async def late() -> str:
            await asyncio.sleep(0.05)
            return "hello"

        done = tinker.run([late, late], agent_class=OwnLoop, max_turns=2)
        times = [datetime.fromisoformat(step.timestamp).timestamp() for step in done.steps]
        text, reply, next_text, next_reply = times
        assert text + 0.04 <= reply <= next_text <= next_reply - 0.04

    def test_a_script_is_a_tool_call_where_no_ids_are_recorded(self, chat):
        done = chat.run([bash("cd /", "ls"), bash("pwd"), "done"], max_turns=3)
        _, first, second, last = done.steps
        calls = [call for step in (first, second) for call in step.tool_calls]
        assert [call.function_name for call in calls] == ["bash", "bash"]
        assert [call.arguments for call in calls] == [
            {"command": "cd /\n\nls\n"},
            {"command": "pwd\n"},
        ]
        results = [step.observation.results[0] for step in (first, second)]
        ids = [call.tool_call_id for call in calls]
        assert [result.source_call_id for result in results] == ids
        assert len(set(ids)) == 2
        assert last.tool_calls is None

    def test_a_script_that_was_cancelled_is_a_tool_call(self, chat):
        async def cancel() -> None:
            task.cancel()
            await forever()

        async def main() -> None:
            nonlocal task
            await ended.agent.setup(ended.environment)
            task = asyncio.create_task(ended.step())
            await asyncio.wait([task])

        task: Any = None
        ended = chat.new_run([bash("sleep 9")], FakeEnvironment(cancel), max_turns=2)
        asyncio.run(main())
        (call,) = ended.steps[-1].tool_calls
        assert call.arguments == {"command": "sleep 9\n"}
        assert (ended.stop_reason, ended.steps[-1].observation) == ("cancelled", None)

    # What the model is told of a block that was not run is the result of no call.
    @columns("reply").rows(
        cut_off=Reply(bash("rm x"), cut_off=True),
        not_closed="```bash\nrm x",
        more_words="```bash rm x\n```",
        misplaced_fence="I will look: ```bash\nrm x\n```",
        no_block="hello",
    )
    def test_a_reply_of_which_nothing_was_run_has_no_tool_call(self, reply, chat):
        done = chat.run([reply, "done"], max_turns=2)
        assert [step.tool_calls for step in done.steps] == [None] * len(done.steps)
        seen = [step.observation.results[0] for step in done.steps if step.observation]
        assert [result.source_call_id for result in seen] == [None] * len(seen)

    def test_a_step_with_ids_has_no_tool_call(self, model):
        done = model.run([bash("ls"), "done"], max_turns=2, collect_rollout_details=True)
        (_, step, _) = done.steps
        assert step.metrics.completion_token_ids == model.sampled[0].completion
        assert (step.tool_calls, step.observation.results[0].source_call_id) == (None, None)

    def test_scripts_are_tool_calls_of_any_client_that_records_no_ids(self, model):
        done = model.run([bash("ls"), "done"], max_turns=2, collect_rollout_details=False)
        (call,) = done.steps[1].tool_calls
        assert call.arguments == {"command": "ls\n"}
        assert done.steps[1].metrics.completion_token_ids is None

    def test_a_trajectory_is_in_the_oldest_version_that_has_all_of_it(self, tinker):
        assert tinker.run().trajectory.schema_version == "ATIF-v1.7"

    @pytest.mark.parametrize("session_id", [None, "mine"])
    def test_each_file_has_an_id_of_its_own(self, session_id, chat, tmp_path):
        def ids_of(folder: str) -> tuple[str, str]:
            file = json.loads((tmp_path / folder / "trajectory.json").read_text())
            return file["session_id"], file["trajectory_id"]

        one, other = (
            chat.new_run(session_id=session_id, logs_dir=tmp_path / folder)
            for folder in ("x1/agent", "x2/agent")
        )
        one.follow("first")
        first = ids_of("x1/agent")
        one.follow("second")
        other.follow("first")
        found = [first, ids_of("x1/agent"), ids_of("x2/agent")]
        assert found == [(name, name) for name in ("x1-run1", "x1-run2", "x2-run1")]

    def test_a_step_says_that_its_reply_was_cut_off(self, model):
        done = model.run([bash("ls"), Reply(bash("rm x"), cut_off=True)], max_turns=3)
        complete, cut_off = done.steps[1:]
        assert (complete.extra, cut_off.extra) == (None, {"finish_reason": "max_tokens"})

    def test_a_step_has_the_servers_finish_reason(self, chat):
        done = chat.run([Reply("no", choice={"finish_reason": "content_filter"})])
        assert done.steps[-1].extra == {"finish_reason": "content_filter"}

    def test_a_trials_name_may_have_any_letters(self, vllm, tmp_path):
        done = vllm.run(["hi"], logs_dir=tmp_path / "größe-任务__x7/agent")
        assert (done.completion, done.trajectory.session_id) == ("hi", "größe-任务__x7-run1")
        # HTTP's headers are ASCII.
        assert vllm.headers("X-Session-ID")[-1] == "gr%C3%B6%C3%9Fe-%E4%BB%BB%E5%8A%A1__x7"

    def test_a_text_that_is_no_output_is_a_users_message(self, tinker):
        done = tinker.run(agent_class=OwnLoop, max_turns=2, system_prompt="")
        told = [(step.source, step.message) for step in done.steps]
        assert told == [
            ("user", "do it"),
            ("agent", "hello"),
            ("user", "go on"),
            ("agent", "hello"),
        ]

    def test_the_log_has_a_line_for_each_turn_and_script(self, tinker, caplog):
        """The text is JSON, so that no reply can forge a line."""
        caplog.set_level("DEBUG")
        tinker.run([f"<think>hm</think>{bash('ls')}", "done"], max_turns=2)
        first, second = tinker.sampled
        lines = [line for line in caplog.messages if line.startswith(("turn ", "script: "))]
        output = r"Exit code: 0\nOutput:\n(none)"
        assert lines == [
            f"turn 1: {len(first.prompt)} tokens in, {len(first.completion)} out, stop: "
            rf'["do it","hm","I will run this:\n\n```bash\nls\n```\n"]',
            "script: Exit code: 0",
            f"turn 2: {len(second.prompt)} tokens in, {len(second.completion)} out, stop: "
            f'["{output}","","done"]',
        ]

    def test_a_subclass_may_write_another_step(self, tinker):
        class Nemo(BasicLoopAgent):
            def trajectory_step(self, turn: Turn) -> dict:
                step = super().trajectory_step(turn)
                return step | {
                    "reasoning_content": None,
                    "extra": {"thinking": turn.reasoning_content},
                }

        (_, step) = tinker.run(["<think>hm</think>hi"], agent_class=Nemo).steps
        assert (step.reasoning_content, step.extra) == (None, {"thinking": "hm"})

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

    def test_a_turn_that_cannot_be_trained_has_no_ids(self, tinker):
        done = tinker.run([bash("ls"), Reply(logprobs=None)], max_turns=2)
        metrics = done.steps[-1].metrics
        assert [getattr(metrics, name) for name in (*IDS, "extra")] == [None] * 4


# ---------------------------------------------------------------------------------- training data

WHOLE = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]}
ONE_TURN = (Turn(**WHOLE),)
REWARD = {"reward": 1.0}


def a_trial(
    rewards=REWARD, error="", stop_reason="completed", turns=ONE_TURN, steps=None, verifier=None
) -> Any:
    """A trial as Harbor reads it from result.json. (A step of a trial has the same fields.)"""
    details = module.rollout_details(turns)
    context = AgentContext(metadata={"stop_reason": stop_reason}, rollout_details=details)
    return TrialResult.model_construct(
        trial_name="greet__1",
        agent_result=context if turns else None,
        verifier_result=VerifierResult(rewards=rewards) if rewards else None,
        exception_info=ExceptionInfo.model_construct(exception_type=error) if error else None,
        step_results=steps,
        verifier=verifier,
    )


# Harbor keeps only the first of two errors. The second one shows as a verifier that began but has
# no result.
NO_VERDICT = a_trial(None, error="AgentTimeoutError", verifier=TimingInfo())


class TestTrainingData:
    # vLLM writes -9999.0.
    NO_LOGPROBS = [math.nan, math.inf, -math.inf, None, -9999.0]

    @columns("given expected").rows(
        complete=("stop", "stop"),
        limit=("length", "max_tokens"),
        another_word=("Tool_Calls", "tool_calls"),
        null_is_no_end=(None, "none"),
    )
    def test_a_finish_reason_says_why_a_reply_ended(self, given, expected):
        assert Turn(finish_reason=given).finish_reason == expected

    @columns("given expected").rows(
        no_sampled_token=({"completion_token_ids": [], "logprobs": []}, False),
        no_prompt=({"prompt_token_ids": None}, False),
        no_ids=({"completion_token_ids": None}, False),
        no_logprobs=({"logprobs": None}, False),
        too_few_logprobs=({"logprobs": [-0.5]}, False),
        a_text_for_a_logprob=({"logprobs": [-0.5, "-0.5"]}, False),
        **{f"logprob_{x}": ({"logprobs": [-0.5, x]}, False) for x in NO_LOGPROBS},
    )
    def test_a_turn_whose_logprobs_are_whole_is_trainable(self, given, expected):
        assert Turn(**WHOLE | given).is_trainable is expected

    def test_rollout_details_have_an_entry_for_each_turn(self):
        other = Turn(**WHOLE | {"prompt_token_ids": [5], "extra": {"a": 1}})
        (detail,) = module.rollout_details([Turn(**WHOLE), other])
        assert detail == {
            "prompt_token_ids": [[1, 2], [5]],
            "completion_token_ids": [[3, 4], [3, 4]],
            "logprobs": [[-0.5, -0.25], [-0.5, -0.25]],
            "extra": {"a": [None, 1]},
        }

    @columns("wrong message").rows(
        a_logprob_is_missing=({"logprobs": [[-0.5]]}, "differ in length"),
        a_logprob_is_NaN=({"logprobs": [[-0.5, math.nan]]}, "is not finite"),
        a_list_is_too_short=({"prompt_token_ids": []}, "lists of a rollout differ"),
        an_extra_list_is_too_short=({"extra": {"a": []}}, "lists of a rollout differ"),
    )
    def test_a_broken_rollout_is_an_error(self, wrong, message):
        (detail,) = module.rollout_details(ONE_TURN)
        context = AgentContext(rollout_details=[detail | wrong])
        with pytest.raises(ValueError, match=message):
            list(module.turns_of(context))

    def test_a_rollout_of_another_agent_needs_no_extra_values(self):
        detail = {name: [values] for name, values in WHOLE.items()}
        assert list(module.turns_of(AgentContext(rollout_details=[detail]))) == [Turn(**WHOLE)]

    @columns("rewards reward").rows(
        the_one_named_reward=({"style": 0.5, "reward": 1}, 1),
        the_only_one=({"score": 0.25}, 0.25),
        several_without_that_name=({"a": 1, "b": 2}, None),
    )
    def test_a_trajectory_has_the_trials_reward(self, rewards, reward):
        assert module.training_data(a_trial(rewards)).reward == reward

    def test_a_trajectory_has_the_turns_of_all_steps(self):
        turns = [Turn(**WHOLE, extra={"a": n}) for n in range(3)]
        steps = [a_trial(turns=turns[:2]), a_trial(turns=turns[2:], stop_reason="max_turns")]
        data = module.training_data(a_trial({"reward": 0.5}, steps=steps))
        assert (data.turns, data.stop_reason, data.reward) == (turns, "max_turns", 0.5)

    @columns("trial is_data").rows(
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
        a_verifier_that_failed_after_the_agents_timeout=(NO_VERDICT, False),
        a_step_whose_verifier_failed=(a_trial(steps=[NO_VERDICT, a_trial()]), False),
        a_verifier_that_did_not_fail=(a_trial(verifier=TimingInfo()), True),
        its_own_error_beside_its_steps=(a_trial(error="RuntimeError", steps=[a_trial()]), False),
    )
    def test_a_trial_is_training_data_unless_it_failed(self, trial, is_data, monkeypatch):
        # Harbor before 0.25 has no such property.
        monkeypatch.delattr(TrialResult, "reward_valid", raising=False)
        assert (module.training_data(trial) is not None) is is_data

    # Without rewards Harbor always says False.
    @columns("trial is_data").rows(a_reward=(a_trial(), False), no_reward=(a_trial(None), True))
    def test_a_reward_that_harbor_finds_invalid_is_no_data(self, trial, is_data, monkeypatch):
        monkeypatch.setattr(TrialResult, "reward_valid", False, raising=False)
        assert (module.training_data(trial) is not None) is is_data

    @pytest.mark.parametrize("reward", [math.nan, math.inf])
    def test_a_reward_that_is_no_number_is_an_error(self, reward):
        with pytest.raises(ValueError, match="trial greet__1: a reward is not a finite number"):
            module.training_data(a_trial({"reward": 1, "style": reward}))


# ------------------------------------------------------------------------------------ the main job

GREET = str(ROOT / "examples/greet")
OFFLINE = yaml.safe_load((ROOT / "examples/offline.yaml").read_text())
# The only command that the offline job's environment runs. Its verifier gives 1 for RIGHT, else 0.
COMMAND = bash(SCRIPT)
RIGHT, WRONG, NO_SAMPLER = "Hello, world!", "no", RuntimeError("the sampler is gone")


def run_trials(
    model: Model,
    *replies: Any,
    n_trials: int = 1,
    task: Any = GREET,
    options: dict[str, Any] | None = None,
    **agent: Any,
) -> list[TrialResult]:
    """Run a job, one trial after the other. `agent` holds settings of its agent, and `options` what
    `--ak` would. Returns the trials, after a round trip through JSON."""
    model.will_reply(*replies)
    kwargs = {"max_turns": 2} | model.options | (options or {})
    names = {"import_path": "basic_loop_agent:BasicLoopAgent"}
    names |= {"model_name": kwargs.pop("model_name")}
    config = OFFLINE | {"jobs_dir": kwargs.pop("logs_dir"), "quiet": True}
    config |= {"n_attempts": n_trials, "n_concurrent_trials": 1, "tasks": [{"path": task}]}
    config |= {"agents": [names | {"kwargs": kwargs} | agent]}
    with asyncio.Runner() as runner:
        job = runner.run(Job.create(JobConfig(**config)))
        trials = runner.run(job.run()).trial_results
    return [TrialResult.model_validate_json(trial.model_dump_json()) for trial in trials]


def run_job(model: Model, *replies: Any, **settings: Any) -> TrialResult:
    """Run a job of one trial."""
    (trial,) = run_trials(model, *replies, **settings)
    return trial


def two_steps_task(folder: Path) -> Path:
    """A task that has the example task as both of its steps."""
    task = folder / "task"
    for copy in (task, task / "steps/one", task / "steps/two"):
        shutil.copytree(GREET, copy)
    (task / "task.toml").write_text('steps = [{name = "one"}, {name = "two"}]')
    return task


class TestJob:
    def test_a_trial_gives_back_every_sampled_token(self, tinker):
        turns = module.training_data(run_job(tinker, COMMAND, RIGHT)).turns
        recorded = [Sampled(*(getattr(turn, name) for name in IDS)) for turn in turns]
        assert recorded == tinker.sampled

    def test_a_trial_that_harbor_timed_out_is_scored(self, tinker):
        options = {"max_seconds": 0}
        trial = run_job(tinker, COMMAND, forever, override_timeout_sec=1, options=options)
        data = module.training_data(trial)
        assert (data.reward, data.stop_reason, len(data.turns)) == (0.0, "cancelled", 1)

    def test_a_trial_ends_before_harbors_timeout(self, tinker):
        trial = run_job(tinker, COMMAND, forever, override_timeout_sec=1)
        data = module.training_data(trial)
        assert (data.reward, data.stop_reason, len(data.turns)) == (0.0, "rollout_timeout", 1)
        # SkyRL and NeMo Gym drop a trial that has one.
        assert trial.exception_info is None

    def test_a_clients_timeout_is_not_scored(self, tinker):
        trial = run_job(tinker, COMMAND, TimeoutError("service is gone"))
        assert "service is gone" in trial.exception_info.exception_message
        assert trial.exception_info.exception_type == "ApiError"
        # Harbor 0.26 runs the verifier all the same.
        assert not getattr(trial, "reward_valid", False)
        assert module.training_data(trial) is None

    @pytest.mark.skipif(not hasattr(TrialResult, "reward_valid"), reason="since Harbor 0.25")
    def test_a_trial_that_failed_has_no_valid_reward(self, tinker):
        trial = run_job(tinker, COMMAND, NO_SAMPLER)
        message = "RuntimeError from Tinker: the sampler is gone"
        assert trial.exception_info.exception_message == message
        assert trial.reward_valid is False

    def test_a_refusal_of_the_prompt_is_not_scored(self, tinker):
        """Harbor 0.26 would score a trial after an error of this name."""
        error = litellm.ContentPolicyViolationError("no", model="m", llm_provider="openai")
        trial = run_job(tinker, COMMAND, error)
        assert trial.exception_info.exception_type == "ApiError"
        # Earlier versions do not run the verifier after an error.
        assert getattr(trial, "reward_valid", False) is False
        assert module._trial_to_trajectory(trial) is None

    def test_a_failed_step_is_no_training_data(self, tinker, tmp_path):
        trial = run_job(tinker, NO_SAMPLER, RIGHT, task=two_steps_task(tmp_path))
        # Harbor before 0.26 gives the mean of 0 (for the failed step) and 1.
        assert module.training_data(trial) is None

    @since_harbor_023
    def test_a_later_step_resumes_the_conversation(self, tinker, tmp_path):
        trial = run_job(tinker, RIGHT, RIGHT, task=two_steps_task(tmp_path), resume_trajectory=True)
        first, second = module.training_data(trial).turns
        assert second.prompt_token_ids[: len(first.ids)] == first.ids

    @since_harbor_023
    def test_a_job_is_refused_before_any_trial(self, tinker, no_key):
        with pytest.raises(ValueError, match=NO_KEY):
            run_job(tinker)


# The options of SkyRL's generator: its own `llm_kwargs` (default.yaml), and this project's file.
SKYRL_LLM_KWARGS = {"timeout": 900, "max_retries": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
SKYRL_PRICES = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
SKYRL_MODEL_INFO = {"max_input_tokens": 32768, "max_output_tokens": 32768, **SKYRL_PRICES}
SKYRL_OPTIONS = yaml.safe_load((ROOT / "examples/skyrl.yaml").read_text())["agent"]["kwargs"]


def trained_by_skyrl(trial: TrialResult) -> list[Sampled]:
    """The turns of a trial that SkyRL's generator trains on. Fails if it would mask the trial."""
    assert trial.exception_info is None
    assert trial.verifier_result.rewards["reward"] == 1.0
    (detail,) = trial.agent_result.rollout_details
    turns = [Sampled(*turn) for turn in zip(*(detail[name] for name in IDS), strict=True)]
    assert len(turns) == trial.agent_result.metadata["n_episodes"]
    return turns


class TestSkyrl:
    OWN: ClassVar = {"llm_kwargs": SKYRL_LLM_KWARGS, "model_info": SKYRL_MODEL_INFO}
    MOVED: ClassVar = {"llm_kwargs": SKYRL_LLM_KWARGS | {"model_info": SKYRL_MODEL_INFO}}
    SALT: ClassVar = {"llm_kwargs": SKYRL_LLM_KWARGS | {"extra_body": {"cache_salt": "tiny@3"}}}

    @columns("given").rows(
        this_projects_options={}, its_own_options=OWN, model_info_moved=MOVED, cache_salt=SALT
    )
    def test_skyrl_trains_on_every_turn_of_every_trial(self, given, vllm):
        # Its generator adds these.
        options = {"session_id": "6f1a", "api_base": f"{vllm.url}/v1"} | SKYRL_OPTIONS | given
        agent = {"model_name": "hosted_vllm/tiny", "override_timeout_sec": 1800}
        trials = run_trials(vllm, *[COMMAND, RIGHT] * 4, n_trials=4, options=options, **agent)
        assert [turn for trial in trials for turn in trained_by_skyrl(trial)] == vllm.sampled
        assert len(vllm.sampled) == 8

    @columns("llm_kwargs sent").rows(
        as_given=({"top_p": 0.9, "top_k": 20, "min_p": 0.1}, (0.9, 20, 0.1)),
        by_default=({}, (1.0, -1, 0.0)),
    )
    def test_the_sampling_arguments_of_skyrls_configuration_are_sent(self, llm_kwargs, sent, vllm):
        options = SKYRL_OPTIONS | {"llm_kwargs": SKYRL_LLM_KWARGS | llm_kwargs}
        run_job(vllm, RIGHT, options=options)
        (body,) = vllm.bodies("/v1/completions")
        assert (body["top_p"], body["top_k"], body["min_p"]) == sent
        assert not body.keys() & {"timeout", "max_retries", "model_info"}


# ------------------------------------------------------------------------------------- the pages

PAGES = [
    "README.md",
    *(f"examples/{name}.md" for name in ["README", "recipes", "trainers", "limits", "changes"]),
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall("(?m)^#+ (.*)", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class TestPages:
    def test_the_readme_has_at_most_200_lines(self):
        assert len((ROOT / "README.md").read_text().splitlines()) <= 200

    def test_the_pages_tell_how_long_the_file_is(self):
        n_lines = len((ROOT / "basic_loop_agent.py").read_text().splitlines())
        for page, pattern in (
            ("README.md", r"The file has about ([\d,]+) lines"),
            ("examples/README.md", r"lines to read \| ([\d,]+) \|"),
        ):
            told = re.search(pattern, (ROOT / page).read_text())[1]
            assert abs(int(told.replace(",", "")) - n_lines) < 20

    def test_the_readme_tells_which_part_of_the_file_is_the_loop(self):
        lines = (ROOT / "basic_loop_agent.py").read_text().splitlines()
        # A blank line follows `answer`.
        end = next(n for n, line in enumerate(lines) if "def _call_model" in line) - 1
        readme = (ROOT / "README.md").read_text()
        assert int(re.search(r"Read the first (\d+), to the end of `answer`", readme)[1]) == end

    def test_the_table_of_options_repeats_their_docstrings(self):
        rows = re.findall(
            r"(?m)^\| `(\w+)` \| `(.*)` \| (.*) \|$", (ROOT / "examples/recipes.md").read_text()
        )
        fields = {name: BasicLoopOptions.model_fields[name] for name in module.OPTION_NAMES}
        assert rows == [
            (name, json.dumps(field.default), " ".join(field.description.split()))
            for name, field in fields.items()
        ]

    @pytest.mark.parametrize("page", PAGES)
    def test_each_link_of_a_page_leads_somewhere(self, page):
        path = ROOT / page
        links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text())
        targets = [(path.parent / file if file else path, anchor) for file, anchor in links]
        assert [file for file, _ in targets if not file.exists()] == []
        assert [anchor for file, anchor in targets if anchor and anchor not in anchors(file)] == []


# ------------------------------------------------------------------------ what readers find

# The model's client and its replies, for a job of each kind.
JOBS = {
    "chat": ("litellm", [COMMAND, RIGHT]),
    "ids": ("vllm", [COMMAND, RIGHT]),
    "steps": ("litellm", [COMMAND, RIGHT] * 2),
    "error": ("litellm", [COMMAND, Refusal(401, "gone")]),
    "cut_off": ("litellm", [COMMAND, Reply(COMMAND, cut_off=True)]),
}


class JobFiles(NamedTuple):
    """A trial, and its trajectory.json; one for each step of the task."""

    trial: TrialResult
    files: list[dict[str, Any]]

    def of_agent(self, name: str) -> list[Any]:
        """A field of each agent's step, None if it has none."""
        steps = [step for file in self.files for step in file["steps"]]
        return [step.get(name) for step in steps if step["source"] == "agent"]


@pytest.fixture(scope="session")
def jobs(http, tokenizer_dir, tmp_path_factory) -> dict[str, JobFiles]:
    """A real job of each kind."""
    found = {}
    for kind, (client, replies) in JOBS.items():
        folder = tmp_path_factory.mktemp(kind)
        model_name = "tiny" if client == "vllm" else "openai/tiny"
        options = {"model_name": model_name, "model_client": client, "logs_dir": folder / "jobs"}
        server = FakeServer(http, tokenizer_dir, **options)
        task = two_steps_task(folder) if kind == "steps" else GREET
        trial = run_job(server, *replies, task=task)
        paths = sorted((folder / "jobs").rglob("trajectory.json"))
        found[kind] = JobFiles(trial, [json.loads(path.read_text()) for path in paths])
    return found


each_kind = pytest.mark.parametrize("kind", JOBS)


class TestReaders:
    """What readers of trajectory.json find, in the files of real jobs."""

    def test_each_run_has_a_file(self, jobs):
        numbers = {kind: len(job.files) for kind, job in jobs.items()}
        assert numbers == {"chat": 1, "ids": 1, "steps": 2, "error": 1, "cut_off": 1}

    @each_kind
    def test_harbors_validator_accepts_each_file(self, kind, jobs):
        for file in jobs[kind].files:
            validator = TrajectoryValidator()
            assert validator.validate(file), validator.get_errors()

    @each_kind
    def test_each_step_has_its_time_within_the_trial(self, kind, jobs):
        trial, files = jobs[kind]
        texts = [step["timestamp"] for file in files for step in file["steps"]]
        times = [trial.started_at, *map(datetime.fromisoformat, texts), trial.finished_at]
        assert times == sorted(times)

    @columns("kind scripts").rows(
        chat=("chat", [f"{SCRIPT}\n", None]),
        ids=("ids", [None, None]),
        steps=("steps", [f"{SCRIPT}\n", None] * 2),
        error=("error", [f"{SCRIPT}\n"]),
        a_script_that_did_not_run=("cut_off", [f"{SCRIPT}\n", None]),
    )
    def test_each_script_is_a_call_of_bash_unless_ids_are_recorded(self, kind, scripts, jobs):
        calls = jobs[kind].of_agent("tool_calls")
        shown = [call and [(c["function_name"], c["arguments"]) for c in call] for call in calls]
        assert shown == [script and [("bash", {"command": script})] for script in scripts]

    @pytest.mark.parametrize("kind", ["chat", "steps", "error", "cut_off"])
    def test_a_scripts_output_belongs_to_its_call(self, kind, jobs):
        output = "Exit code: 0\nOutput:\nhello from the script"
        calls, seen = map(jobs[kind].of_agent, ("tool_calls", "observation"))
        expected = [
            call and {"results": [{"source_call_id": call[0]["tool_call_id"], "content": output}]}
            for call in calls
        ]
        assert seen == expected

    def test_each_call_has_an_id_of_its_own(self, jobs):
        calls = [call for job in jobs.values() for call in job.of_agent("tool_calls") if call]
        assert len({call["tool_call_id"] for (call,) in calls}) == len(calls) == 5

    @each_kind
    def test_readers_of_the_last_version_take_each_file(self, kind, jobs):
        assert {file["schema_version"] for file in jobs[kind].files} == {"ATIF-v1.7"}

    def test_each_file_is_a_trace_of_its_own(self, jobs):
        files = [file for job in jobs.values() for file in job.files]
        for name in ("session_id", "trajectory_id"):
            assert len({file[name] for file in files}) == len(files) == 6

    @each_kind
    def test_a_trace_tells_its_trial_and_run(self, kind, jobs):
        trial, files = jobs[kind]
        names = [f"{trial.trial_name}-run{n}" for n in range(1, len(files) + 1)]
        assert [file["trajectory_id"] for file in files] == names

    @columns("kind reasons").rows(
        chat=("chat", [None, None]),
        ids=("ids", [None, None]),
        steps=("steps", [None] * 4),
        error=("error", [None]),
        cut_off=("cut_off", [None, {"finish_reason": "max_tokens"}]),
    )
    def test_only_a_reply_that_was_cut_off_is_marked(self, kind, reasons, jobs):
        assert jobs[kind].of_agent("extra") == reasons

    @each_kind
    def test_the_system_prompt_is_no_step(self, kind, jobs):
        for file in jobs[kind].files:
            assert file["agent"]["extra"]["system_prompt"].startswith("Solve the task by running")
            assert {step["source"] for step in file["steps"]} == {"user", "agent"}


# ------------------------------------------------------------------------------- the trainer


class Trainer:
    """Trains on the example task, four trials a step, one after the other. `training.batches` has
    the sampled ids of each trial, their logprobs and advantage (see examples/fake_training.py)."""

    def __init__(self, tinker: FakeTinker, monkeypatch: Any) -> None:
        self.tinker, self.training = tinker, FakeTraining(tinker.open_session)
        # The trainer sets it, and later tests have another one.
        monkeypatch.setattr(BasicLoopAgent, "tinker_service", None)
        # This command would remove containers.
        monkeypatch.setattr(train, "CLEAN_UP", "true")
        monkeypatch.setattr("tinker.ServiceClient", lambda **arguments: self.training)
        self.folder = tinker.options["logs_dir"] / "training"
        self.model = {name: tinker.options[name] for name in ("model_name", "renderer_name")}
        self.config = {"log_path": str(self.folder), "max_tokens": 64, "learning_rate": 0.5}
        self.tasks = {"tasks": [GREET], "steps": 1, "group_size": 4, "concurrency": 1}
        self.tasks |= {kind: OFFLINE[kind]["import_path"] for kind in ("environment", "verifier")}
        self.tasks |= {"trials_dir": str(self.folder / "trials")}

    def train(self, *replies: Any, **settings: Any) -> None:
        """Start the trainer, with other settings of HarborTasks."""
        self.tinker.will_reply(*replies)
        tasks = train.HarborTasks(**self.tasks | settings)
        train.main(train.Config(dataset_builder=tasks, **self.model, **self.config))

    def metric(self, name: str) -> dict[int, float]:
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: round(row[name], 3) for row in rows if name in row}


@pytest.fixture
def trainer(tinker, monkeypatch) -> Trainer:
    return Trainer(tinker, monkeypatch)


SET_TWICE = "trial_options has .*, which the trainer sets"


class TestTrainer:
    def test_each_trial_is_one_datum_with_its_own_logprobs(self, trainer):
        trainer.train(bash(SCRIPT), RIGHT, WRONG, group_size=2, agent_options={"max_turns": 2})
        first, second, other = trainer.tinker.sampled
        # The rewards are 1 and 0, so the advantages are 0.5 and -0.5.
        assert trainer.training.batches[0] == [
            (first.completion + second.completion, first.logprobs + second.logprobs, 0.5),
            (other.completion, other.logprobs, -0.5),
        ]

    def test_an_agent_of_ones_own_samples_from_the_policy(self, trainer, monkeypatch):
        monkeypatch.setattr(OneScript, "tinker_service", None)
        trainer.train(RIGHT, WRONG, group_size=2, agent="examples.one_script:OneScript")
        assert [ids for ids, *_ in trainer.training.batches[0]] == [
            turn.completion for turn in trainer.tinker.sampled
        ]

    def test_an_action_has_the_cached_tokens_of_its_prompt(self, trainer, monkeypatch):
        """By them cookbook 0.6 and later computes the price of a step."""
        trajectories, trajectory = [], train.HarborTrial.trajectory

        def recorded(trial: Any) -> Any:
            trajectories.append(trajectory(trial))
            return trajectories[-1]

        monkeypatch.setattr(train.HarborTrial, "trajectory", recorded)
        sampled = {COMMAND: 0, RIGHT: 7, WRONG: None}.items()
        replies = [Reply(text, answer={"prompt_cache_hit_tokens": n}) for text, n in sampled]
        trainer.train(*replies, group_size=2, agent_options={"max_turns": 2})
        actions = [[step.ac for step in one.transitions] for one in trajectories]
        cached = [[action.prompt_cache_hit_tokens for action in one] for one in actions]
        assert cached == [[0, 7], [0]]

    @pytest.mark.parametrize("without_step", ['{"a": 1}', '{"cost/total_usd": 0.1}'])
    def test_a_row_of_no_step_is_not_drawn(self, without_step, tmp_path):
        rows = ['{"step": 0, "a": 1}', without_step, '{"step": 1, "a": 2}', '{"step": 1, "b": 3}']
        (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
        steps = [{"step": 0, "a": 1}, {"step": 1, "a": 2, "b": 3}]
        assert plot.metrics_of_steps(tmp_path) == steps

    def test_training_is_between_two_evaluations(self, trainer):
        replies = [WRONG] * 4 + [RIGHT, WRONG] * 4 + [RIGHT] * 4
        trainer.train(*replies, steps=2, test_tasks=[GREET], test_group_size=4)
        assert trainer.metric("test/env/all/solved") == {0: 0.0, 2: 1.0}

    def test_after_a_failed_step_the_same_command_goes_on(self, trainer):
        with pytest.raises(SystemExit, match=r"(?i)every trial.*RuntimeError.*the sampler is gone"):
            trainer.train(*[RIGHT, WRONG] * 2, *[NO_SAMPLER] * 4, steps=2)
        # These replies are enough for one step.
        trainer.train(*[RIGHT, WRONG] * 2, steps=2)
        assert len(trainer.training.batches) == 2

    def test_a_step_with_some_failed_trials_is_trained(self, trainer):
        trainer.train(RIGHT, WRONG, RIGHT, NO_SAMPLER)
        assert len(trainer.training.batches[0]) == 3
        assert trainer.metric("rollout_errors/ApiError") == {0: 1.0}

    @columns("part import_path option").rows(
        agent=("agent", "basic_loop_agent:BasicLoopAgent", {"override_timeout_sec": 60.0}),
        environment=("environment", "examples.fakes:HostEnvironment", {"override_memory_mb": 4096}),
        verifier=("verifier", "examples.fakes:HostVerifier", {"override_timeout_sec": 60.0}),
    )
    def test_an_option_of_a_part_leaves_the_part(self, part, import_path, option, trainer):
        trainer.train(RIGHT, WRONG, group_size=2, trial_options={part: option})
        config = json.loads(next(trainer.folder.glob("trials/*/config.json")).read_text())
        assert config[part].items() >= {"import_path": import_path, **option}.items()

    @columns("settings message").rows(
        environments_module=({"environment": "nothing:Environment"}, "nothing"),
        verifiers_module=({"verifier": "nothing:Verifier"}, "nothing"),
        option=({"agent_options": {"max_turn": 2}}, "max_turn"),
        limit_that_is_not_the_trainers=({"agent_options": {"max_tokens": 9}}, "max_tokens"),
        trial_option=({"trial_options": {"timeout_multiplyer": 2}}, "timeout_multiplyer"),
        environments_option=({"trial_options": {"environment": {"cpus": 2}}}, "environment.cpus"),
        second_environment=({"trial_options": {"environment": {"type": "modal"}}}, SET_TWICE),
        second_verifier=({"trial_options": {"verifier": {"import_path": "a:B"}}}, SET_TWICE),
        second_agent=({"trial_options": {"agent": {"name": "oracle"}}}, SET_TWICE),
        second_limit=({"trial_options": {"agent": {"kwargs": {"max_tokens": 9}}}}, SET_TWICE),
        no_environment=({"trial_options": {"environment": None}}, SET_TWICE),
        tasks=({"tasks": ["examples/nothing"]}, "examples/nothing"),
        no_steps=({"steps": 0}, "dataset_builder.steps=0: it has to be 1 or more"),
        no_trials=({"group_size": 0}, "group_size=0"),
        fewer_trials=({"group_size": -1}, "group_size=-1"),
        no_test_trials=({"test_group_size": 0}, "test_group_size=0"),
        none_at_a_time=({"concurrency": 0}, "concurrency=0"),
        no_tasks_a_step=({"tasks_per_step": 0}, "tasks_per_step=0"),
    )
    def test_a_wrong_setting_is_found_before_connecting(self, settings, message, trainer):
        with pytest.raises(ValueError, match=message):
            trainer.train(**settings)
        # Before the cookbook connects, it makes this folder.
        assert not trainer.folder.exists()
