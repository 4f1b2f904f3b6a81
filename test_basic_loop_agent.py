# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
"""The specification of basic_loop_agent.py: from its options to training data, and in real jobs.
At the end stand the examples that train.

Harbor's jobs, litellm, openai, HTTP, renderers, tokenizers and shells are real. The fakes below
stand for a container, Tinker's service, vLLM and a chat endpoint. As the real server, a fake leaves
out what the request does not ask for. The same tests run against real servers:

    VLLM_BASE_URL=http://127.0.0.1:8000 VLLM_MODEL=name uv run pytest -k vllm
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_MODEL=name uv run pytest -k real_tinker

A test that needs the fake, for instance to choose the replies, is skipped there.
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

# litellm would download its price list, tokenizers would ask the model hub, and each job of Harbor
# would report itself to Harbor's makers.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HARBOR_TELEMETRY"] = "0"
REAL_VLLM = os.environ.pop("VLLM_BASE_URL", None)
VLLM_MODEL = os.environ.get("VLLM_MODEL", "tiny")
REAL_TINKER = os.environ.pop("TINKER_BASE_URL", None)
TINKER_MODEL = os.environ.get("TINKER_MODEL")

import httpx
import litellm
import openai
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
from packaging.version import Version
from tinker_cookbook.renderers import RendererError, get_renderer
from tinker_cookbook.rl import train as cookbook
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import basic_loop_agent
from basic_loop_agent import (
    FLOOD_BYTES,
    BasicLoopAgent,
    BasicLoopOptions,
    StopReason,
    Turn,
    fenced_blocks,
    kill_script,
    parse_output,
    rollout_details,
    run_script,
    split_thinking,
    split_untagged_thinking,
    trial_to_trajectory,
    turns_of,
    url_and_key,
    use_service,
)
from examples import shell_tasks
from examples.fakes import HostVerifier, ScriptedLLM

# A garbage collection would look through all that these imports made.
gc.freeze()
ROOT = Path(__file__).parent
COOKBOOK = Path(importlib.util.find_spec("tinker_cookbook").origin).parent


# ------------------------------------------------------------------------------------ the fakes


@dataclasses.dataclass
class Reply:
    """What a model samples: a text, or ids. It ends in the stop token, unless it is cut off."""

    text: str = "hello"
    tokens: list[int] | None = None
    cut_off: bool = False
    gives_logprobs: bool = True
    # By default -1.000, -1.001, ... in the first turn, -2.000, ... in the second, and so on.
    logprobs: list[Any] | None = None
    cached_tokens: int = 0
    # Fields of an HTTP answer's choice, and of its message, in place of the usual ones.
    choice: dict[str, Any] = dataclasses.field(default_factory=dict)
    message: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Fields of the whole answer.
    answer: dict[str, Any] = dataclasses.field(default_factory=dict)


class Sampled(NamedTuple):
    """One turn, as a fake has sampled it, or as the context has it."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[Any] | None


@dataclasses.dataclass
class Refusal:
    """A server's answer that is an error."""

    status: int
    message: str = "scripted"


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


class ScriptedEnvironment:
    """Runs nothing. Each `exec` has the next of these results, and then SILENT."""

    def __init__(self, *results: Any) -> None:
        self.results, self.commands, self.timeouts = list(results), [], []

    async def exec(self, command: str, cwd=None, env=None, timeout_sec=None, user=None) -> Any:
        self.commands.append(command)
        self.timeouts.append(timeout_sec)
        return await outcome(self.results.pop(0) if self.results else SILENT)

    @property
    def scripts(self) -> list[list[str]]:
        """The blocks of each script. The module sends them in this variable."""
        found = re.findall(r"BASIC_LOOP_BLOCKS=(\S+)", " ".join(self.commands))
        return [base64.b64decode(blocks).decode().split("\0")[:-1] for blocks in found]

    @property
    def kills_its_first_script(self) -> bool:
        """Whether the second command kills all that has the mark of the first one."""
        marks = [re.search(r"BASIC_LOOP_MARK=(\w+)", command)[1] for command in self.commands]
        return marks[0] == marks[1] and "kill -9" in self.commands[1]


class ShellEnvironment:
    """Runs commands in real shells. Each has a session of its own, so that no signal of a script
    reaches pytest or the user's terminal."""

    def __init__(self, **variables: str) -> None:
        self.env, self.outputs = os.environ | variables, []

    async def exec(self, command: str, cwd=None, env=None, timeout_sec=None, user=None) -> Any:
        result = await asyncio.to_thread(
            subprocess.run,
            ["/bin/sh", "-c", command],
            env=self.env,
            input=b"not for the script\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # All output has to be ASCII: Modal's environment decodes as strictly.
        self.outputs.append(result.stdout.decode("ascii"))
        return ExecResult(stdout=self.outputs[-1], return_code=result.returncode)


class Model:
    """What the fakes of model servers share: an agent's options, replies, and what was sampled."""

    def __init__(self, tokenizer_dir: str, **options: Any) -> None:
        self.tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
        self.options, self.replies = options, itertools.repeat("hello")
        self.sampled: list[Sampled] = []

    def agent(self, **options: Any) -> BasicLoopAgent:
        return BasicLoopAgent(**self.options | options)

    def script(self, *replies: Any) -> None:
        """Choose the replies: a text, a `Reply`, a `Refusal`, an error, or an async function."""
        self.replies = iter(replies)

    def next_reply(self) -> Any:
        reply = next(self.replies)
        return Reply(reply) if isinstance(reply, str) else reply

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def sampled_ids(self, text: str) -> list[int]:
        """An id for each special token or character. If a prompt rendered this text again, some
        characters would be merged into other ids, and a test would notice."""
        pieces = re.findall(r"(?s)<[^<>\s]+>|.", text)
        return [token for piece in pieces for token in self.encode(piece)]

    def prompt_text(self, number: int) -> str:
        return self.tokenizer.decode(self.sampled[number].prompt, skip_special_tokens=False)

    def sample(self, reply: Reply, prompt: list[int], stop: list[int], max_tokens: int) -> str:
        """Sample a reply. Returns its finish reason."""
        ids = reply.tokens
        if ids is None:
            ids = self.sampled_ids(reply.text) + ([] if reply.cut_off else stop)
        own = [-(len(self.sampled) + 1) - n / 1000 for n in range(len(ids))]
        logprobs = (reply.logprobs or own[:max_tokens]) if reply.gives_logprobs else None
        self.sampled.append(Sampled(prompt, ids[:max_tokens], logprobs))
        return "length" if reply.cut_off or len(ids) > max_tokens else "stop"


SDK = Version(importlib.metadata.version("tinker"))
# Before 0.38 `create_sampling_client` returns the client (now: its future), and `sample` returns a
# future (now: a coroutine).
IS_OLD_SDK = Version("0.38") > SDK
HAS_SEQUENCE_IDS = Version("0.26") <= SDK


class FakeTinker(Model):
    """Stands in for the class `tinker.ServiceClient`."""

    def __init__(self, tokenizer_dir: str, **options: Any) -> None:
        super().__init__(tokenizer_dir, **options)
        # The arguments of each `create_sampling_client`, and the parameters of each completion.
        self.sessions, self.opened, self.params = [], [], []
        self.missing_checkpoints, self.connecting_sec = set(), 0

    def __call__(self, **arguments: Any) -> "Session":
        time.sleep(self.connecting_sec)
        self.sessions.append(Session(self, arguments))
        return self.sessions[-1]


class Session:
    """A session with Tinker. Once `status` is set, each answer is an error with this status."""

    def __init__(self, fake: FakeTinker, arguments: dict[str, Any]) -> None:
        self.fake, self.arguments, self.status = fake, arguments, None

    def error(self, status: int, message: str) -> Exception:
        response = httpx.Response(status, request=httpx.Request("POST", "http://tinker"))
        return tinker_sdk.APIStatusError(message, response=response, body=None)

    def create_sampling_client(
        self, model_path=None, base_model=None, record_stability_info=False
    ) -> Any:
        self.fake.opened.append((model_path, base_model, record_stability_info))
        created = Future()
        if self.status or model_path in self.fake.missing_checkpoints:
            created.set_exception(self.error(self.status or 404, "no such checkpoint"))
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
        await asyncio.sleep(0)
        if self.status:
            raise self.error(self.status, "Session has been terminated")
        reply = await outcome(fake.next_reply())
        if isinstance(reply, Refusal):
            raise self.error(reply.status, reply.message)
        # A text, or an id.
        stop = params.stop[0]
        stop = fake.sampled_ids(stop) if isinstance(stop, str) else [stop]
        finish_reason = fake.sample(reply, prompt, stop, params.max_tokens)
        _, tokens, logprobs = fake.sampled[-1]
        sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=finish_reason)
        if HAS_SEQUENCE_IDS:
            sequence.sequence_id = f"sequence-{len(fake.sampled)}"
        return SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=reply.cached_tokens)


# The fields that a request may have. (vLLM ignores others, so a wrong name would have no effect.)
SAMPLING = (
    "model max_tokens temperature top_p top_k min_p seed stop logprobs return_token_ids session_id"
)
FIELDS = {
    "/tokenize": "model prompt messages add_generation_prompt add_special_tokens "
    "chat_template_kwargs return_token_strs",
    "/v1/completions": f"{SAMPLING} prompt skip_special_tokens",
    "/v1/chat/completions": f"{SAMPLING} messages max_completion_tokens",
}
MAX_MODEL_LEN = 8192


class HttpServer(Model, ThreadingHTTPServer):
    """vLLM's paths and a chat endpoint. With `real_url` it records requests and passes them on, and
    a test that needs more of the fake is skipped."""

    def __init__(self, tokenizer_dir: str, real_url: str | None, **options: Any) -> None:
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), HttpHandler)
        self.url, self.real_url = f"http://127.0.0.1:{self.server_port}", real_url
        Model.__init__(self, tokenizer_dir, api_base=self.url, **options)
        # Of each request: path, body and headers.
        self.requests, self.mistakes, self.tokenize_answer = [], [], None
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        assert self.mistakes == []

    def script(self, *replies: Any) -> None:
        self.skip_if_real()
        super().script(*replies)

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

    def pass_on(self, path: str, content: bytes, headers: Any) -> Any:
        wanted = {name: headers[name] for name in ("Authorization", "Content-Type")}
        try:
            with urlopen(Request(self.real_url + path, content, wanted)) as response:
                answer = json.load(response)
        except HTTPError as error:
            return Refusal(error.code, error.read().decode())
        if path == "/v1/completions":
            choice = answer["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            self.sampled.append(Sampled(choice["prompt_token_ids"], ids, logprobs))
        return answer

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        unknown = body.keys() - FIELDS[path].split()
        assert not unknown, f"{path} got unknown fields: {unknown}"
        # The chat endpoint has every model.
        if "chat" not in path and body["model"] != self.options["model_name"]:
            return Refusal(404, f"The model `{body['model']}` does not exist.")
        prompt = self.prompt_ids(body)
        if path == "/tokenize":
            strings = [self.tokenizer.id_to_token(token) for token in prompt]
            answer = {"tokens": prompt, "max_model_len": MAX_MODEL_LEN, "count": len(prompt)}
            answer["token_strs"] = strings if body.get("return_token_strs") else None
            return self.tokenize_answer or answer
        if len(prompt) >= MAX_MODEL_LEN:
            return FULL
        reply = self.next_reply()
        return self.completion(reply, prompt, body) if isinstance(reply, Reply) else reply

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

    def completion(self, reply: Reply, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        stop, max_tokens = self.encode("<|im_end|>"), body.get("max_tokens", 16)
        finish_reason = self.sample(reply, prompt, stop, max_tokens)
        _, ids, logprobs = self.sampled[-1]
        shown = ids[:-1] if finish_reason == "stop" else ids
        skips_special = body.get("skip_special_tokens", True)
        text = self.tokenizer.decode(shown, skip_special_tokens=skips_special)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": 0}
        cached = {"cached_tokens": reply.cached_tokens}
        usage["prompt_tokens_details"] = cached if reply.cached_tokens else None
        # What was not asked for is null.
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
        answer = {"id": "1", "created": 1, "model": body["model"], "usage": usage}
        return answer | prompt_ids | {"choices": [choice | reply.choice]} | reply.answer


class HttpHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        content, fake = self.rfile.read(int(self.headers["Content-Length"])), self.server
        body = json.loads(content)
        fake.requests.append((self.path, body, self.headers))
        try:
            if fake.real_url:
                answer = fake.pass_on(self.path, content, self.headers)
            else:
                answer = fake.answer(self.path, body)
        except Exception as error:
            # A mistake in this file. Without an answer the client would ask again and again.
            fake.mistakes.append(error)
            answer = Refusal(400, repr(error))
        status = 200
        if isinstance(answer, Refusal):
            status, answer = answer.status, {"error": {"message": answer.message}}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        # The openai package waits as long before the next attempt.
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments: Any) -> None: ...


# Ordinary tokens that look like special ones, as in the vocabularies of Qwen and Llama.
ORDINARY = ["Class<?>", "a[:]", "x<()>", "x[...]"]


# The special tokens of the models for which the cookbook has renderers.
SPECIAL_TOKENS = """
<|Assistant|> <|User|> <|assistant|> <|begin_of_sentence|> <|begin_of_text|> <|call|> <|channel|>
<|constrain|> <|end_header_id|> <|end_of_sentence|> <|endoftext|> <|end|> <|eot_id|>
<|im_assistant|> <|im_end|> <|im_middle|> <|im_start|> <|im_system|> <|im_user|> <|media_begin|>
<|media_content|> <|media_end|> <|message|> <|observation|> <|return|> <|start_header_id|> <|start|>
<|system|> <|tool_call_argument_begin|> <|tool_call_begin|> <|tool_call_end|>
<|tool_call_section_begin|> <|tool_call_section_end|> <|tool_calls_section_begin|>
<|tool_calls_section_end|> <|user|> <|vision_end|> <|vision_start|> <｜Assistant｜> <｜System｜>
<｜User｜> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
<｜tool▁sep｜>
"""  # noqa: RUF001 (the bars of DeepSeek's tokens are wide ones)
# Tokens of these models that are added, but not special. (Some models add single characters.)
ADDED_TOKENS = """
<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <tool_result>
</tool_result> <arg_key> </arg_key> <arg_value> </arg_value> <image> <img> </img> [gMASK] §
"""


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    """A byte-level tokenizer that has these tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    text = f"hello world user assistant bash\n\n``` {' '.join(ORDINARY)}"
    tokenizer.train_from_iterator([text] * 9, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS.split())
    tokenizer.add_tokens(ADDED_TOKENS.split())
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder)
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


@pytest.fixture
def shell() -> Iterator[Any]:
    """Makes shell environments, and kills what the scripts have left."""
    tag = uuid4().hex
    yield functools.partial(ShellEnvironment, TAG=tag)
    left = f"kill -9 $(grep -ls {tag} /proc/[0-9]*/environ | cut -d / -f 3)"
    subprocess.run(left, shell=True, stderr=subprocess.DEVNULL)


@pytest.fixture
def no_key(monkeypatch) -> None:
    """Tinker's key is neither in the environment nor stored by the SDK."""
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setattr(basic_loop_agent, "tinker_has_key", lambda: False)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch) -> Iterator[None]:
    """A process with keys of its own, without services, and for at most a minute."""
    for name in [name for name in os.environ if re.match("(OPENAI|VLLM|TINKER)_", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    basic_loop_agent.tinker_service.cache_clear()
    use_service(None)

    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the test takes more than a minute"))
    signal.alarm(60)
    yield
    signal.alarm(0)


# --------------------------------------------------------------------------------------- runs

IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


class AgentRun:
    """An agent at work as in Harbor: `setup`, then `run`, then `resume` for each later step.

    Its properties come from the last step's context and files, but `recorded` joins all steps."""

    def __init__(self, agent: Any, environment: Any = None, timeout_sec: Any = None) -> None:
        self.agent, self.environment = agent, environment or ScriptedEnvironment()
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
        details = [detail for context in self.contexts for detail in context.rollout_details or []]
        columns = [[detail[name] for name in IDS] for detail in details]
        turns = [Sampled(*row) for lists in columns for row in zip(*lists, strict=True)]
        assert all(len(turn.completion) == len(turn.logprobs) for turn in turns)
        return turns

    @property
    def trajectory(self) -> Any:
        text = (self.agent.logs_dir / "trajectory.json").read_text()
        return atif.Trajectory.model_validate_json(text)

    @property
    def observations(self) -> list[str]:
        """What the model was told after its replies."""
        seen = [step.observation for step in self.steps if step.observation]
        return [result.content for observation in seen for result in observation.results]

    steps = property(lambda self: self.trajectory.steps)
    context = property(lambda self: self.contexts[-1])
    metadata = property(lambda self: self.context.metadata)
    stop_reason = property(lambda self: self.metadata["stop_reason"])
    completion = property(lambda self: (self.agent.logs_dir / "completion.txt").read_text())
    scripts = property(lambda self: self.environment.scripts)


def set_up(*agents: BasicLoopAgent) -> list[Any]:
    """Set agents up, one after the other, in one event loop. Returns their clients."""

    async def main() -> list[Any]:
        for agent in agents:
            await agent.setup(ScriptedEnvironment())
        return [agent.client for agent in agents]

    return asyncio.run(main())


def bash(*commands: str, language: str = "bash") -> str:
    return "\n".join(f"I will run this:\n\n```{language}\n{command}\n```\n" for command in commands)


def printing(text: str) -> ScriptedEnvironment:
    return ScriptedEnvironment(ExecResult(stdout=text, return_code=0))


def cases(**table: Any) -> Any:
    """Parametrize a test with a table. An entry's name is the id. A tuple has the test's first
    arguments; anything else is the first argument."""
    rows = [entry if isinstance(entry, tuple) else (entry,) for entry in table.values()]

    def decorate(test: Any) -> Any:
        arguments = [name for name in inspect.signature(test).parameters if name != "self"]
        return pytest.mark.parametrize(arguments[: len(rows[0])], rows, ids=table)(test)

    return decorate


class SelectorOfVirtualTime(selectors.DefaultSelector):
    """Does not wait for a timer, but counts the seconds until it."""

    skipped_seconds = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            return super().select()
        events = super().select(0)
        if not events:
            self.skipped_seconds += timeout
        return events


@contextlib.contextmanager
def virtual_time() -> Iterator[asyncio.Runner]:
    """An event loop whose timers fire at once when there is nothing else to do. It is not for tests
    with HTTP: all timers would fire before an answer comes from the server's thread."""
    loop = asyncio.SelectorEventLoop(selector := SelectorOfVirtualTime())
    loop.time = lambda: time.monotonic() + selector.skipped_seconds
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        yield runner
        # On exit the runner waits for the threads of `to_thread`, which take real time.
        loop.time = time.monotonic


# -------------------------------------------------------------------------- options and errors

NO_KEY = "no API key for Tinker: set TINKER_API_KEY"
NO_URL = "vllm needs api_base or VLLM_BASE_URL, such as http://localhost:8000"
CHAT_OPTIONS = {"model_client": "litellm"}
since_harbor_023 = pytest.mark.skipif(
    not hasattr(BaseAgent, "options_schema"), reason="Harbor calls preflight since 0.23"
)


class TestOptions:
    def test_the_options_have_these_defaults(self):
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

    def test_the_constructor_has_the_first_eight_options(self):
        """Users rely on these arguments, and on their defaults."""
        parameters = inspect.signature(BasicLoopAgent).parameters.values()
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == {
            "model_path": None,
            "renderer_name": None,
            "max_tokens": 512,
            "temperature": 1.0,
            "max_turns": 1,
            "system_prompt": None,
            "model_client": "tinker",
            "api_base": None,
        }

    @cases(
        vllm=({"model_client": "vllm"}, True),
        litellm=(CHAT_OPTIONS, False),
        not_wanted=({"collect_rollout_details": False}, False),
        wanted=(CHAT_OPTIONS | {"collect_rollout_details": True}, True),
    )
    def test_ids_are_collected_where_servers_give_them(self, given, expected):
        assert BasicLoopOptions(**given).collect_rollout_details is expected

    @cases(
        temperature=({"temperature": -0.1}, "temperature.*greater than or equal to 0"),
        temperature_infinite=({"temperature": math.inf}, "temperature.*finite number"),
        top_p=({"top_p": 1.1}, "top_p.*less than or equal to 1"),
        top_p_0=({"top_p": 0}, "top_p.*greater than 0"),
        max_turns=({"max_turns": 0}, "max_turns.*greater than 0"),
        max_tokens=({"max_tokens": 0}, "max_tokens.*greater than 0"),
        max_seconds=({"max_seconds": 0}, "max_seconds.*greater than 0"),
        context_limit=({"context_limit": 0}, "context_limit.*greater than 0"),
        max_output_bytes=({"max_output_bytes": 0}, "max_output_bytes.*greater than 0"),
        command_timeout_sec=({"command_timeout_sec": 0}, "timeout_sec.*greater than 0"),
        more_than_a_week=({"command_timeout_sec": 604_801}, "less than or equal to 604800"),
        model_path=({"model_path": ""}, "model_path.*tinker://"),
        model_client=({"model_client": "openai"}, "'tinker', 'litellm' or 'vllm'"),
        unknown=({"max_turn": 3}, "max_turn"),
        model_path_elsewhere=(CHAT_OPTIONS | {"model_path": "tinker://1"}, "=tinker: drop them"),
        renderer_elsewhere=(CHAT_OPTIONS | {"renderer_name": "x"}, "=tinker: drop them"),
        model_twice=({"llm_kwargs": {"model_name": 1}}, "llm_kwargs holds model_name: use"),
        server_twice=({"llm_kwargs": {"api_base": 1}}, "llm_kwargs holds api_base: use the"),
        option_twice=({"llm_kwargs": {"max_tokens": 1}}, "llm_kwargs holds max_tokens: use"),
    )
    def test_a_bad_option_is_a_clear_error(self, given, message, tmp_path):
        llm_kwargs = {"api_key": "sk-secret"} | given.get("llm_kwargs", {})
        with pytest.raises(ValueError, match=f"(?s){message}") as error:
            BasicLoopAgent(logs_dir=tmp_path, model_name="m", **given | {"llm_kwargs": llm_kwargs})
        assert "sk-secret" not in str(error.value)

    def test_an_error_does_not_show_a_bad_value(self):
        with pytest.raises(ValueError, match="valid dictionary") as error:
            BasicLoopOptions(llm_kwargs="sk-secret")
        assert "sk-secret" not in str(error.value)

    def test_missing_tinker_packages_are_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tinker_cookbook", None)
        BasicLoopOptions(model_client="vllm")
        with pytest.raises(ValueError, match=r"missing: `pip install 'harbor\[tinker\]'`"):
            BasicLoopOptions()

    @since_harbor_023
    def test_each_option_has_a_description(self):
        properties = BasicLoopAgent.options_schema()["properties"]
        described = {name for name in properties if properties[name].get("description")}
        assert set(BasicLoopOptions.__annotations__) <= described

    @since_harbor_023
    def test_the_agents_capabilities_are_declared(self):
        names = ("atif", "resume", "skills", "mcp_servers")
        assert [getattr(BasicLoopAgent.capabilities, name) for name in names] == [True] * 4

    def test_harbor_020_sees_that_the_agent_can_resume(self):
        assert BasicLoopAgent.SUPPORTS_RESUME is True

    @cases(
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

    @cases(none={}, masked_by_harbor={"TINKER_API_KEY": "tml-r****456"})
    def test_setup_refuses_tinker_without_a_key(self, env, tinker, no_key):
        with pytest.raises(ValueError, match=NO_KEY):
            set_up(tinker.agent(extra_env=env))

    def test_tinkers_sdk_may_have_stored_a_key(self, tinker, monkeypatch):
        pytest.importorskip("tinker.auth", reason="since SDK 0.38")
        monkeypatch.delenv("TINKER_API_KEY")
        monkeypatch.setattr("tinker.auth.tinker_has_credentials", lambda: True)
        set_up(tinker.agent())
        assert tinker.sessions[0].arguments["api_key"] is None

    def test_an_older_sdk_has_stored_no_key(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tinker.auth", None)
        assert basic_loop_agent.tinker_has_key() is False

    X, Y = "http://x/1", "http://y/1"

    # Options, the agent's variables, the process's (all begin with OPENAI_), and the URL.
    @cases(
        none=({}, {}, {}, None),
        process=({}, {}, {"BASE_URL": X}, X),
        older_name=({}, {}, {"API_BASE": X}, X),
        both_names=({}, {}, {"API_BASE": Y, "BASE_URL": X}, X),
        agent=({}, {"BASE_URL": X}, {"BASE_URL": Y}, X),
        option=({"api_base": X}, {"BASE_URL": Y}, {}, X),
        port=({"api_base": "http://x:1"}, {}, {}, "http://x:1/v1"),
        port_with_slash=({"api_base": "http://x:1/"}, {}, {}, "http://x:1/v1"),
        port_with_v1=({"api_base": "http://x:1/v1"}, {}, {}, "http://x:1/v1"),
    )
    def test_the_nearest_url_is_taken(self, given, agent_env, env, url, monkeypatch):
        for name, value in env.items():
            monkeypatch.setenv(f"OPENAI_{name}", value)
        agent_env = {f"OPENAI_{name}": value for name, value in agent_env.items()}
        assert url_and_key(BasicLoopOptions(**CHAT_OPTIONS, **given), "openai", agent_env)[0] == url

    # Options, the agent's variables, and the key. (The process has the key sk-test.)
    @cases(
        process=({}, {}, "sk-test"),
        agent=({}, {"OPENAI_API_KEY": "sk-own"}, "sk-own"),
        llm_kwargs=({"llm_kwargs": {"api_key": "sk-2"}}, {"OPENAI_API_KEY": "sk-own"}, "sk-2"),
        masked_by_harbor=({}, {"OPENAI_API_KEY": "sk-r****456"}, "sk-test"),
        from_a_file=({}, {"OPENAI_API_KEY": " sk-\nown\n"}, "sk-own"),
    )
    def test_the_nearest_key_is_taken(self, given, agent_env, key):
        options = BasicLoopOptions(**CHAT_OPTIONS, **given)
        assert url_and_key(options, "openai", agent_env)[1] == key

    @cases(
        hosted_vllm=("hosted_vllm", ("http://x:1/v1", "none")),
        vllm=("vllm", ("http://x:1/v1", "none")),
        another_provider=("anthropic", ("http://x:1", None)),
    )
    def test_a_local_server_needs_no_key(self, provider, expected):
        options = BasicLoopOptions(**CHAT_OPTIONS, api_base="http://x:1")
        assert url_and_key(options, provider, {}) == expected

    def test_tinker_is_reached_as_the_agent_says(self, tinker):
        env = {"TINKER_BASE_URL": "http://own", "TINKER_API_KEY": "tml-own"}
        set_up(tinker.agent(extra_env=env))
        assert tinker.sessions[0].arguments == {"base_url": "http://own", "api_key": "tml-own"}

    @pytest.mark.parametrize("name", ["VLLM_BASE_URL", "VLLM_API_BASE"])
    def test_vllm_is_reached_as_the_agent_says(self, name, vllm):
        set_up(vllm.agent(api_base=None, extra_env={name: vllm.url, "VLLM_API_KEY": "own"}))
        assert vllm.headers("Authorization") == ["Bearer own"]

    @cases(
        prefix={"model_name": "openai/tiny"},
        name_that_litellm_knows={"model_name": "gpt-4o"},
        argument={"model_name": "tiny", "llm_kwargs": {"custom_llm_provider": "openai"}},
    )
    def test_the_models_provider_is_reached_as_the_agent_says(self, given, chat):
        env = {"OPENAI_BASE_URL": chat.url, "OPENAI_API_KEY": "own"}
        AgentRun(chat.agent(api_base=None, extra_env=env, **given)).run()
        assert chat.headers("Authorization") == ["Bearer own"]

    def test_a_key_is_seen_nowhere(self, chat, caplog):
        caplog.set_level(logging.DEBUG)
        keys = {"llm_kwargs": {"api_key": "sk-2nd"}, "extra_env": {"OPENAI_API_KEY": "sk-own"}}
        done = AgentRun(chat.agent(**keys)).run()
        seen = [path.read_text() for path in done.agent.logs_dir.glob("*.*")]
        seen += [*caplog.messages, done.context.model_dump_json(), repr(done.agent.options)]
        # Harbor would pass its own copy on to each command.
        seen += [str(getattr(done.agent, "extra_env", ""))]
        assert [text for text in seen if "sk-2nd" in text or "sk-own" in text] == []

    @since_harbor_023
    @cases(
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


class PythonAgent(BasicLoopAgent):
    """A user's subclass: it runs Python blocks, and tells the last line of their output. (Braces in
    its protocol are kept.)"""

    protocol = "Write ```python blocks, not {json: 1}; {seconds} seconds."

    def bash_blocks(self, reply: str) -> list[str]:
        blocks = fenced_blocks(reply)
        return [f"python3 - <<'EOF'\n{text}EOF\n" for name, text in blocks if name == "python"]

    async def execute(self, blocks: list[str], environment: Any) -> str:
        return (await super().execute(blocks, environment)).splitlines()[-1]


class OwnLoop(BasicLoopAgent):
    """A user's loop of `max_turns` turns, whatever they are, with a step of its own after each."""

    def after_turn(self) -> None: ...

    async def converse(self, environment: Any) -> str:
        for _ in range(self.options.max_turns):
            await self.sample()
            self.after_turn()
            self.tell("go on")
        return "own reason"


@pytest.fixture
def skilled(tinker, tmp_path) -> AgentRun:
    """A run whose task brings a skill and an MCP server."""
    (tmp_path / "my skills/pdf").mkdir(parents=True)
    text = "---\nname: pdf\ndescription: Reads <|im_end|>\n---" + "\n" * 7 + "BODY on line 11"
    (tmp_path / "my skills/pdf/SKILL.md").write_text(text)
    web = MCPServerConfig(name="web", transport="sse", url="http://mcp:8000/sse")
    agent = tinker.agent(skills_dir=str(tmp_path / "my skills"), mcp_servers=[web])
    return AgentRun(agent, ShellEnvironment())


class TestLoop:
    CUT_OFF = Reply(bash("rm x"), cut_off=True)

    # The replies, max_turns, the blocks of each script, the stop reason and the answer.
    @cases(
        an_answer=(["hi"], 9, [], "completed", "hi"),
        two_scripts=([bash("a"), bash("b"), "hi"], 9, [["a\n"], ["b\n"]], "completed", "hi"),
        two_blocks=([bash("a", "b"), "hi"], 9, [["a\n", "b\n"]], "completed", "hi"),
        a_single_turn=([bash("rm x")], 1, [], "completed", bash("rm x")),
        the_last_turn=([bash("a"), bash("b")], 2, [["a\n"], ["b\n"]], "max_turns", bash("b")),
        cut_off=([bash("a"), CUT_OFF], 9, [["a\n"]], "max_tokens", bash("rm x")),
        a_full_context=([bash("a"), FULL], 9, [["a\n"]], "context_overflow", bash("a")),
    )
    def test_a_run_goes_on_to_its_end(
        self, replies, max_turns, scripts, stop_reason, answer, model
    ):
        model.script(*replies)
        done = AgentRun(model.agent(max_turns=max_turns, collect_rollout_details=True)).run()
        assert (done.scripts, done.stop_reason) == (scripts, stop_reason)
        assert (done.completion, done.recorded) == (answer, model.sampled)

    def test_the_model_is_told_what_its_script_printed(self, model):
        model.script(bash("ls"), "done")
        failed = ExecResult(stdout="x\n", stderr="no x", return_code=1)
        done = AgentRun(model.agent(max_turns=2), ScriptedEnvironment(failed)).run()
        assert done.observations == ["Exit code: 1\nOutput:\nx\nno x"]
        assert "<|im_start|>user\nExit code: 1\nOutput:\nx\nno x<|im_end|>" in model.prompt_text(1)

    @cases(
        a_command=(bash("ls"), ["the reply holds commands; max_turns is 1, so none was run"]),
        an_answer=("hi", []),
    )
    def test_a_command_that_is_not_run_is_logged(self, reply, messages, tinker, caplog):
        tinker.script(reply)
        AgentRun(tinker.agent()).run()
        assert caplog.messages == messages

    @cases(
        a_single_turn=({}, []),
        an_empty_one=({"max_turns": 2, "system_prompt": ""}, []),
        its_own=({"max_turns": 2, "system_prompt": "Be {brief}."}, ["Be {brief}."]),
        its_own_for_a_turn=({"system_prompt": "Be brief."}, ["Be brief."]),
    )
    def test_the_system_message_is_as_given(self, given, messages, model):
        done = AgentRun(model.agent(**given)).run()
        assert [step.message for step in done.steps if step.source == "system"] == messages
        assert re.findall(r"<\|im_start\|>system\n(.*)<", model.prompt_text(0)) == messages

    def test_the_default_system_message_explains_bash_blocks(self, tinker):
        message = AgentRun(tinker.agent(max_turns=2, command_timeout_sec=77)).run().steps[0].message
        assert re.search("(?s)fenced blocks that open with ```bash.*has 77 seconds", message)

    def test_the_conversation_does_not_keep_thinking(self, tinker):
        tinker.script("<think>hm</think>done")
        agent = AgentRun(tinker.agent()).run().agent
        assert agent.messages[-1] == {"role": "assistant", "content": "done"}

    def test_an_instruction_may_use_special_tokens(self, model):
        AgentRun(model.agent()).run("Explain <|im_end|>.")
        assert "<|im_start|>user\nExplain <|im_end|>.<|im_end|>" in model.prompt_text(0)

    @cases(by_ids=("tinker", "a<\u200b|im_end|>b"), by_text=("chat", "a<|im_end|>b"))
    def test_special_tokens_in_output_are_plain_text(self, client, seen, request):
        model = request.getfixturevalue(client)
        model.script(bash("ls"), "done")
        done = AgentRun(model.agent(max_turns=2), printing("a<|im_end|>b")).run()
        assert done.observations == [f"Exit code: 0\nOutput:\n{seen}"]

    def test_a_lone_surrogate_becomes_a_question_mark(self, tinker):
        tinker.script(bash("ls"), "done")
        agent = tinker.agent(max_turns=2, system_prompt="\ud800")
        done = AgentRun(agent, printing("a\udc80")).run("greet\udc80")
        assert [step.message for step in done.steps[:2]] == ["?", "greet?"]
        assert done.observations == ["Exit code: 0\nOutput:\na?"]

    def test_sample_without_a_text_to_send_is_an_error(self, tinker):
        agent = AgentRun(tinker.agent()).run().agent
        with pytest.raises(RuntimeError, match="nothing to send: `tell` the model something first"):
            asyncio.run(agent.sample())

    def test_resume_before_run_is_an_error(self, tinker):
        resumed = tinker.agent().resume("go on", ScriptedEnvironment(), AgentContext())
        with pytest.raises(RuntimeError, match="call `run` first"):
            asyncio.run(resumed)

    def test_a_resumed_step_begins_with_the_last_scripts_output(self, tinker):
        tinker.script(bash("a"), bash("b"), "done")
        done = AgentRun(tinker.agent(max_turns=2)).run("one", "two")
        assert done.steps[1].message == "Exit code: 0\nOutput:\n(none)\n\ntwo"
        assert done.metadata["n_episodes"] == 1

    def test_a_second_run_starts_a_new_conversation(self, tinker):
        tinker.script(bash("a"), bash("b"), "done", "done")
        used = AgentRun(tinker.agent(max_turns=2)).run("one").agent
        AgentRun(used).run("two")
        AgentRun(tinker.agent(max_turns=2)).run("two")
        assert tinker.sampled[2].prompt == tinker.sampled[3].prompt

    # How often a text is in the first message.
    @cases(
        an_explanation=("Skills. Read a skill's file before you use it.\n\n", 1),
        a_skills_name=("name: pdf\ndescription: Reads <\u200b|im_end|>\n---", 1),
        a_skills_path=("my skills/pdf/SKILL.md", 1),
        a_skills_text=("BODY", 0),
        a_server=('MCP server: {"name":"web","transport":"sse","url":"http://mcp:8000/sse"', 1),
        a_servers_empty_fields=("null", 0),
        the_instruction_after_them=("}\n\ndo it", 1),
    )
    def test_the_model_is_told_what_the_task_brings(self, text, n_times, skilled):
        assert skilled.run().steps[0].message.count(text) == n_times

    def test_a_resumed_step_is_not_told_again_what_the_task_brings(self, skilled):
        assert skilled.run("one", "two").steps[0].message == "two"

    def test_a_subclass_may_run_python(self, tinker):
        tinker.script(bash("x()", language="python"), bash("ls"))
        done = AgentRun(PythonAgent(**tinker.options, max_turns=9), printing("first\nlast")).run()
        protocol = "Write ```python blocks, not {json: 1}; 120 seconds."
        assert (done.steps[0].message, done.observations) == (protocol, ["last"])
        assert done.scripts == [["python3 - <<'EOF'\nx()\nEOF\n"]]

    def test_a_client_of_ones_own_may_return_harbors_response(self, tinker, monkeypatch):
        monkeypatch.setattr(OwnLoop, "_build_llm", lambda self: ScriptedLLM())
        agent = OwnLoop(**tinker.options, max_turns=2, collect_rollout_details=False)
        assert AgentRun(agent).run().completion == "Hello, world!"

    def test_render_anew_ends_the_exact_prompt(self, tinker, monkeypatch):
        monkeypatch.setattr(OwnLoop, "after_turn", OwnLoop.render_anew)
        done = AgentRun(OwnLoop(**tinker.options, max_turns=2)).run()
        assert done.metadata["n_prefix_breaks"] == 1

    def test_an_edited_conversation_is_rendered_anew_once(self, tinker, monkeypatch):
        def edit(agent: OwnLoop) -> None:
            agent.messages[0]["content"] = "(left out)"

        monkeypatch.setattr(OwnLoop, "after_turn", edit)
        done = AgentRun(OwnLoop(**tinker.options, max_turns=3)).run()
        assert tinker.prompt_text(1).startswith("<|im_start|>system\n(left out)<|im_end|>")
        assert done.metadata["n_prefix_breaks"] == 1

    # What a loop keeps in `metadata`, and what of it is in the context.
    @cases(
        JSON=({"judge": {"score": 0.5}}, {"judge": {"score": 0.5}}),
        object=({"by": Path("me")}, {"by": "me"}),
        lone_surrogate=({"cut": "\ud83d"}, {"cut": "?"}),
        key_that_is_no_text=({("no", "text"): 1, "last": 1}, {"last": 1}),
        own_stop_reason=({"stop_reason": "x", "n_episodes": 9}, {}),
    )
    def test_what_a_loop_keeps_is_in_the_metadata(self, kept, seen, tinker, monkeypatch):
        monkeypatch.setattr(OwnLoop, "after_turn", lambda agent: agent.metadata.update(kept))
        done = AgentRun(OwnLoop(**tinker.options)).run()
        counts = {"n_episodes": 1, "n_turns_without_ids": 0, "n_prefix_breaks": 0}
        assert done.metadata == {"stop_reason": "own reason", **counts, **seen}

    def test_metadata_does_not_outlive_its_step(self, tinker, monkeypatch):
        def keep(agent: OwnLoop) -> None:
            agent.metadata[agent.turns[0].sent] = 1

        monkeypatch.setattr(OwnLoop, "after_turn", keep)
        metadata = AgentRun(OwnLoop(**tinker.options)).run("one", "two").metadata
        # The first text of each step.
        assert ("one" in metadata, "go on\n\ntwo" in metadata) == (False, True)

    def test_the_readmes_reminder_works_as_printed(self, tinker, tmp_path, monkeypatch):
        readme, source = ((ROOT / n).read_text() for n in ("README.md", "basic_loop_agent.py"))
        recipe = re.search(r"(?s)A bounded reminder.*?```python\n(.*?)```", readme)[1]
        no_block = "if not blocks:\n                return StopReason.COMPLETED\n"
        copied = source.replace(no_block, textwrap.indent(recipe, " " * 12).lstrip())
        assert copied != source
        (tmp_path / "changed_copy.py").write_text(copied)
        monkeypatch.syspath_prepend(tmp_path)
        agent_class = importlib.import_module("changed_copy").BasicLoopAgent
        tinker.script("hm", bash("ls"), "so?", "last")
        done = AgentRun(agent_class(**tinker.options, max_turns=9)).run()
        reminder = "No bash block. If you are done, repeat your answer. If not, write a block."
        assert done.observations == [reminder, "Exit code: 0\nOutput:\n(none)", reminder]


# ---------------------------------------------------------------------------- limits and endings


class ToyClient(basic_loop_agent.TokenClient):
    """A client whose tokens are characters, and whose template is `u:do it;a:`. The stop token is
    the semicolon."""

    special_tokens = (";",)

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


def http_error(status_code: int, message: str) -> Exception:
    error = RuntimeError(message)
    error.status_code = status_code
    return error


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
    odd_replies = [
        Reply(text, cut_off=True),
        Reply(text, gives_logprobs=False),
        Reply(text, logprobs=[-1.0]),
        Reply(tokens=[]),
        Reply(tokens=[], gives_logprobs=False),
        Reply(tokens=[50, 51, *stop], logprobs=[-1.0, rng.choice(NO_LOGPROBS), -1.0]),
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
waiting = cases(
    model=(forever, SILENT),
    script=(bash("ls"), forever),
    model_that_fails_then=(fails_when_cancelled, SILENT),
    script_that_fails_then=(bash("ls"), fails_when_cancelled),
)
without_ids = cases(no_ids={"token_ids": None}, no_logprobs={"logprobs": None})


class TestEndings:
    TIMED_OUT = "^a call timed out or was cancelled"

    # The last reply and the last result of the environment, the error's type and its text.
    @cases(
        client=(RuntimeError("gone"), SILENT, RuntimeError, "^gone$"),
        server=(Refusal(400, "no such thing"), SILENT, tinker_sdk.APIStatusError, "no such thing"),
        clients_timeout=(TimeoutError("it"), SILENT, RuntimeError, TIMED_OUT),
        sdks_cancellation=(asyncio.CancelledError("it"), SILENT, RuntimeError, TIMED_OUT),
        environment=(bash("b"), RuntimeError("it is gone"), RuntimeError, "^it is gone$"),
    )
    def test_an_error_ends_the_run(self, reply, result, error_type, message, tinker):
        tinker.script(bash("a"), reply)
        failed = AgentRun(tinker.agent(max_turns=3), ScriptedEnvironment(SILENT, result))
        with pytest.raises(error_type, match=message):
            failed.run()
        assert (failed.stop_reason, failed.recorded) == ("error", tinker.sampled)

    @waiting
    def test_harbors_timeout_ends_a_run_as_cancelled(self, reply, result, tinker):
        tinker.script(bash("ls"), reply)
        environment = ScriptedEnvironment(SILENT, result)
        ended = AgentRun(tinker.agent(max_turns=2), environment, timeout_sec=50)
        with virtual_time() as runner, pytest.raises(TimeoutError):
            runner.run(ended.go())
        assert (ended.stop_reason, ended.recorded) == ("cancelled", tinker.sampled)

    @waiting
    def test_max_seconds_end_a_run_for_scoring(self, reply, result, tinker):
        tinker.script(bash("ls"), reply)
        agent = tinker.agent(max_turns=2, max_seconds=50)
        ended = AgentRun(agent, ScriptedEnvironment(SILENT, result), timeout_sec=9000)
        with virtual_time() as runner:
            runner.run(ended.go())
        assert (ended.stop_reason, ended.recorded) == ("rollout_timeout", tinker.sampled)

    def test_harbors_cancellation_wins_over_max_seconds(self, tinker):
        """Both come at once. A trial that Harbor has ended must not look as if it were scored."""
        tasks = []

        async def main() -> None:
            task = asyncio.create_task(ended.go())
            tasks.append(task)
            await asyncio.wait([task])

        async def hangs() -> None:
            try:
                await forever()
            finally:
                # `max_seconds` have ended the wait. Now Harbor cancels the run, too.
                tasks[0].cancel()
                await asyncio.sleep(0)

        tinker.script(bash("ls"))
        agent = tinker.agent(max_turns=2, max_seconds=50)
        ended = AgentRun(agent, ScriptedEnvironment(hangs))
        with virtual_time() as runner:
            runner.run(main())
        assert ended.stop_reason == "cancelled"

    def test_max_seconds_begin_with_each_step(self, tinker):
        """Neither the seconds of `setup` nor those of an earlier step count."""

        async def slow_reply() -> Any:
            await asyncio.sleep(40)
            return Reply()

        async def slow_listing() -> Any:
            await asyncio.sleep(90)
            return SILENT

        tinker.script(slow_reply, slow_reply)
        # `setup` lists the skills.
        agent = tinker.agent(max_seconds=50, skills_dir="/skills")
        done = AgentRun(agent, ScriptedEnvironment(slow_listing))
        with virtual_time() as runner:
            runner.run(done.go("one", "two"))
        assert [context.metadata["stop_reason"] for context in done.contexts] == ["completed"] * 2

    @cases(plenty=(100, 50), some=(30, 20), one_token=(11, 1))
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
        vLLM=(http_error(400, FULL.message), True),
        openAI=(http_error(400, "code: context_length_exceeded"), True),
        litellm=(http_error(400, "ContextWindowExceededError"), True),
        maximum_context=(http_error(400, "Maximum context: 9 tokens"), True),
        token_limit=(http_error(413, "over the Token Limit"), True),
        too_long=(http_error(422, "prompt is too long"), True),
        tinkers_user=(tinker_error("too long", "user"), True),
        tinkers_server=(tinker_error("too long", "server"), False),
        a_gateways_timeout=(http_error(504, "the upstream took too long"), False),
        another_bad_request=(http_error(400, "no such model"), False),
        no_status=(RuntimeError("too long"), False),
    )
    def test_only_an_error_in_the_request_is_a_full_context(self, error, expected):
        assert basic_loop_agent.says_context_is_full(error) is expected

    @without_ids
    def test_a_server_that_gives_no_ids_ends_the_first_turn(self, choice, server):
        server.script(Reply("hi", choice=choice))
        failed = AgentRun(server.agent(collect_rollout_details=True))
        with pytest.raises(RuntimeError, match="collect_rollout_details=true, but no token ids"):
            failed.run()
        assert (failed.stop_reason, failed.completion) == ("error", "hi")

    def test_tinker_without_logprobs_ends_the_first_turn(self, tinker):
        tinker.script(Reply(gives_logprobs=False))
        with pytest.raises(RuntimeError, match="no token ids or logprobs came"):
            AgentRun(tinker.agent()).run()

    def test_a_server_that_gives_no_prompt_ids_ends_the_first_turn(self, chat):
        chat.script(Reply("hi", answer={"prompt_token_ids": None}))
        with pytest.raises(RuntimeError, match="no token ids"):
            AgentRun(chat.agent(collect_rollout_details=True)).run()

    @without_ids
    def test_a_later_turn_without_ids_is_left_out_whole(self, choice, server):
        server.script(bash("a"), Reply(bash("b"), choice=choice), "done")
        done = AgentRun(server.agent(max_turns=3, collect_rollout_details=True)).run()
        assert done.recorded == [server.sampled[0], server.sampled[2]]
        assert (done.metadata["n_episodes"], done.metadata["n_turns_without_ids"]) == (3, 1)

    def test_where_no_ids_are_wanted_nothing_is_said_of_them(self, vllm):
        vllm.script(Reply("hi", choice={"token_ids": None}))
        done = AgentRun(vllm.agent(collect_rollout_details=False)).run()
        assert done.metadata == {"stop_reason": "completed", "n_episodes": 1}
        assert done.context.rollout_details is None

    @pytest.mark.parametrize("seed", range(300))
    def test_whatever_ends_a_run_its_tokens_are_recorded_once(self, tinker, seed):
        rng = random.Random(seed)
        tinker.script(*(random_reply(rng, tinker.encode("<|im_end|>")) for _ in range(12)))
        results = [ExecResult(stdout="x" * 30, return_code=0), RuntimeError("gone"), TimeoutError()]
        environment = ScriptedEnvironment(*rng.choices(results, weights=[8, 1, 1], k=12))
        renderer = rng.choice(["qwen3", "qwen3_instruct", "role_colon", "qwen3_5"])
        options = {"renderer_name": renderer, "context_limit": rng.choice([None, None, 600])}
        run = AgentRun(tinker.agent(max_turns=rng.randint(1, 8), **options), environment)
        # With an old SDK a cancellation may find an answer that waits for the event loop.
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
        assert split_thinking(f"{opening}{thinking}{closing}hi") == (thinking, "hi")

    @families
    def test_a_reply_cut_off_before_its_answer_has_none(self, opening, thinking, closing):
        reply = opening + thinking + closing
        cut_replies = [reply[:length] for length in range(len(opening), len(reply) + 1)]
        assert {split_thinking(cut_reply)[1] for cut_reply in cut_replies} == {""}

    @cases(
        plain=("hi", "", "hi"),
        a_closing_tag_alone=("</think>\n\nhi", "", "hi"),
        gpt_oss_without=("<|channel|>final<|message|>hi", "", "hi"),
        two_thoughts=("<think>a</think> <think>b</think>c", "ab", "c"),
        blanks_at_the_start=(" \n<think>a</think>c", "a", "c"),
        an_answer_is_not_stripped=("  c\n", "", "  c\n"),
        a_tag_inside_the_answer=("c</think>d", "", "c</think>d"),
        another_models_tag=("<think>a[/THINK]b</think>c", "a[/THINK]b", "c"),
        never_closed=("<seed:think>a[/THINK]b", "a[/THINK]b", ""),
    )
    def test_thinking_is_what_its_tags_enclose(self, reply, thinking, answer):
        assert split_thinking(reply) == (thinking, answer)

    # Thinking of a chat endpoint whose template has written <think> into the prompt.
    @cases(
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
        assert split_untagged_thinking(reply) == (f"{thought}\n", bash("ls"))

    # Whole answers of such an endpoint.
    @cases(
        sed="```bash\nsed -i 's#</think>##' f\n```\n",
        here_document="```bash\ncat > f <<E\n</think>\nE\n```\n",
        a_fence_of_four="````bash\ncat > f <<E\n```py\n</think>\n```\nE\n````\n",
        quoted_in_a_line="Drop `</think>` from f:\n```bash\nls\n```\n",
        both_tags_in_a_line="It is <think>hm</think> in Qwen's format.",
    )
    def test_a_tag_that_an_answer_quotes_is_text(self, answer):
        assert split_untagged_thinking(answer) == ("", answer)

    @cases(backticks="`" * 80_000, fences="```a\n" * 16_000, blanks=" " * 80_000)
    def test_a_degenerate_reply_is_split_at_once(self, reply):
        start = time.process_time()
        assert split_untagged_thinking(reply) == ("", reply)
        assert time.process_time() - start < 1


# --------------------------------------------------------------------------------------- blocks


class TestBlocks:
    DOCSTRING = 'cat >f.py <<E\ndef f():\n    """\n    ```\n    x\n    ```\n    """\nE\n'
    TWO = [("bash", "a\n"), ("sh", "b\n")]

    @cases(
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

# The command of a script is
#
#     BASIC_LOOP_MARK=<hex> BASIC_LOOP_BLOCKS=<base64> BASIC_LOOP_CODE=<program> exec bash -c ...
#
# The program runs the script by `timeout -s KILL <seconds> bash ...`, and reads its output by
# `sed "/[e]nd-of-<mark>/q"`. Where a test looks at these words, it says so.

CUT = "[the output is cut: more than 4000000 bytes, or its reader was killed]"


def run_shell(environment: Any, *blocks: str, seconds: int = 9, shown_bytes: int = 10_000) -> str:
    """Run blocks as one script. Returns what the model is told."""
    return asyncio.run(run_script(list(blocks), environment, seconds, shown_bytes))


def told(code: int, output: str) -> str:
    """What the model is told. (Code 124 is the time limit, 137 a kill, 143 a SIGTERM.)"""
    return f"Exit code: {code}\nOutput:\n{output}"


def at_limit(seconds: int) -> str:
    return f"[ended: the time limit of {seconds} seconds was reached]"


def wait_until(is_true: Any) -> None:
    last = time.monotonic() + 9
    while not is_true():
        assert time.monotonic() < last, "it did not come true in time"
        time.sleep(0.01)


@pytest.fixture
def sleep() -> str:
    """A command that no other process on the machine runs."""
    return f"sleep 6{uuid4().int % 10**9}"


def is_running(command: str) -> bool:
    return subprocess.run(["pgrep", "-f", command], stdout=subprocess.DEVNULL).returncode == 0


def image_with(folder: Path, **programs: str) -> str:
    """A PATH on which programs of these texts come first."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


class TestScripts:
    @cases(
        both_streams=("echo 1; echo e >&2; echo 2; exit 3", told(3, "1\ne\n2")),
        no_output=("true", told(0, "(none)")),
        a_blank_line_at_the_end=("echo x; echo", told(0, "x\n")),
        no_newline_at_the_end=(r"printf '\n\nx'", told(0, "\n\nx")),
        an_empty_stdin=("cat", told(0, "(none)")),
        no_option_of_bash=("-n\necho y", told(0, "bash: line 1: -n: command not found\ny")),
        its_own_timeout=("timeout 0.1 sleep 5", told(124, "(none)")),
        kills_itself=("kill -9 $$", told(137, "(none)")),
        kills_its_group=("echo a; kill 0; echo b", told(143, "a")),
        kills_its_timeout=("kill -9 $PPID; sleep 0.1", told(137, "(none)")),
        # The options of any bash, not those of the program.
        bashs_default_options=("echo $-", told(0, "hBc")),
        no_lastpipe=("shopt -q lastpipe", told(1, "(none)")),
        other_end_words=("echo 'end-of-x 1 2'", told(0, "end-of-x 1 2")),
        no_text=(r"printf 'caf\351 \377\0x'", told(0, "caf\ufffd \ufffd\0x")),
        half_a_character=(r"printf 'a\344\270'", told(0, "a\ufffd")),
        forty_kilobytes=(f"cat <<E | wc -c\n{40_000 * 'x'}\nE", told(0, "40001")),
        late_output=("exec > >(sleep 0.1; cat) 2>&1\necho hello; exit 3", told(3, "hello")),
        only_the_mark=("env | sed 's/=.*//' | grep BASIC", told(0, "BASIC_LOOP_MARK")),
        not_its_runner=("pgrep -s 0 -f BASIC_LOOP_BLOC[K]S", told(1, "(none)")),
    )
    def test_the_model_is_told_how_a_script_ended(self, script, expected, shell):
        assert run_shell(shell(LC_ALL="C.UTF-8"), script) == expected

    def test_a_trailing_backslash_does_not_join_two_blocks(self, shell):
        assert run_shell(shell(), "x=a; echo b \\", "echo $x") == told(0, "b\na")

    @cases(
        here_document="cat <<E\nx",
        quote="echo 'x",
        if_="if a; then",
        here_document_after_extglob="shopt -s extglob\nls !(keep)\ncat <<E\nx",
    )
    def test_a_block_left_open_runs_nothing(self, half, shell, tmp_path):
        # The third block closes what the second one has opened, and opens nothing.
        text = run_shell(shell(), f"touch {tmp_path}/ran", half, 'E\necho "\'"\nfi')
        assert text == told(2, "[nothing was run: a block is unfinished]")
        assert list(tmp_path.iterdir()) == []

    @cases(
        longest=(65_000, told(0, "as it is")),
        too_long=(65_001, "Not run: the script is too long. Split it into smaller ones."),
    )
    def test_a_command_has_at_most_65000_bytes(self, n_bytes, expected, monkeypatch):
        monkeypatch.setattr("basic_loop_agent.script_command", lambda *_: n_bytes * "x")
        assert run_shell(printing("as it is"), "") == expected

    @cases(
        fits=(b"abcd", 4, "abcd"),
        one_too_many=(b"abcde", 4, "ab\n[... 1 bytes left out ...]\nde"),
        odd=(b"abcdef", 3, "a\n[... 3 bytes left out ...]\nef"),
        halves_of_characters=("ßß".encode(), 2, "\ufffd\n[... 2 bytes left out ...]\n\ufffd"),
    )
    def test_long_output_loses_its_middle(self, output, shown_bytes, expected):
        assert basic_loop_agent.middle_cut(output, shown_bytes) == expected

    def test_the_model_sees_shown_bytes_of_an_output(self, shell):
        text = run_shell(shell(), "echo abcdef", shown_bytes=4)
        assert text == told(0, "ab\n[... 3 bytes left out ...]\nf")

    # What the program printed after the mark (code and seconds; the limit is 8), and what is read.
    @cases(
        whole=("hi\nend-of-M 3 2\n", (3, b"hi\n", "")),
        no_newline=("hiend-of-M 0 0\n", (0, b"hi", "")),
        forged=("end-of-M 1 1\nend-of-M 2 2\n", (2, b"end-of-M 1 1\n", "")),
        n_124_in_time=("end-of-M 124 7\n", (124, b"", "")),
        n_137_in_time=("end-of-M 137 7\n", (137, b"", "")),
        another_code_at_the_limit=("end-of-M 1 8\n", (1, b"", "")),
        limit=("a\nend-of-M 137 8\n", (124, b"a\n", at_limit(8))),
        after_the_limit=("end-of-M 137 9\n", (124, b"", at_limit(8))),
        limit_by_uutils=("a\nend-of-M 124 8\n", (124, b"a\n", at_limit(8))),
        no_end=("hi\n", (137, b"hi\n", CUT)),
        half_an_end=("hi\nend-of-M 1 1", (137, b"hi\nend-of-M 1 1", CUT)),
    )
    def test_the_end_words_are_read(self, printed, expected):
        stdout = f"noise\n:M:{base64.b64encode(printed.encode()).decode()}\n"
        assert parse_output(ExecResult(stdout=stdout, return_code=9), "M", 8) == expected

    @cases(
        no_mark=("a\n", "b", (9, b"a\nb", "")),
        nothing=(None, None, (9, b"", "")),
        a_lone_surrogate=("\ud800:M", None, (9, b"?:M", "")),
        broken_base64=(":M:A", None, (137, b"", CUT)),
    )
    def test_what_else_was_printed_is_shown(self, stdout, stderr, expected):
        result = ExecResult(stdout=stdout, stderr=stderr, return_code=9)
        assert parse_output(result, "M", 8) == expected

    def test_a_script_does_not_find_itself_by_its_text(self, shell, sleep):
        # It would wait for itself, and then kill itself.
        script = f"while pgrep -f '{sleep}'; do sleep 1; done; pkill -f '{sleep}'; echo y"
        assert run_shell(shell(), script) == told(0, "y")

    def test_printing_the_process_list_does_not_end_the_output(self, shell):
        text = run_shell(shell(), "ps -eo args; echo $BASIC_LOOP_MARK; exit 3", shown_bytes=999_999)
        assert re.fullmatch(r"(?s)Exit code: 3\n.*/\[e\]nd-of-(\w+)/q\n.*\n\1", text)

    @cases(
        base64=("base64", "not run: it needs bash 4.4 and base64"), bash=("bash", "bash: not found")
    )
    def test_a_program_that_the_image_lacks_is_named(self, missing, text, shell, tmp_path):
        for name in {"bash", "base64", "sed", "head", "timeout"} - {missing}:
            (tmp_path / name).symlink_to(shutil.which(name))
        shown = run_shell(shell(PATH=str(tmp_path)), "true")
        assert shown.startswith("Exit code: 127\n") and shown.endswith(text)

    def test_no_file_is_written(self, shell, tmp_path):
        # No process can write to a file of more than 0 bytes.
        path = image_with(tmp_path, bash='ulimit -f 0; exec /bin/bash "$@"')
        assert run_shell(shell(PATH=path), "seq 2") == told(0, "1\n2")

    @pytest.mark.parametrize(
        "options", ["errexit:nounset:pipefail", "monitor", "posix", "noclobber"]
    )
    def test_shell_options_of_the_image_break_nothing(self, shell, options):
        assert run_shell(shell(SHELLOPTS=options), "echo a; (exit 3)") == told(3, "a")

    # As busybox's sed, this one ends at a line only after it has read the next one. (It takes the
    # end words from the module's own argument, /[e]nd-of-MARK/q.)
    BUSYBOX_SED = """end=${@: -1}; end=${end#*]}; end=${end%/q}
while IFS= read -r line; do
  echo "$line"
  case $line in *"$end"*) read -r; exit ;; esac
done"""

    def test_busybox_sed_does_not_hold_up_the_turn(self, shell, tmp_path, sleep):
        environment = shell(PATH=image_with(tmp_path, sed=self.BUSYBOX_SED))
        assert run_shell(environment, f"{sleep} & echo a", seconds=5) == told(0, "a")

    @pytest.mark.parametrize("end", ["sleep 60", "exec sleep 60", "kill -STOP $$"])
    def test_the_time_limit_ends_all_that_a_script_started(self, end, shell, sleep):
        # A process in a session of its own, and one without the mark.
        script = f"echo first; setsid {sleep} & env -i {sleep} & {end}"
        assert run_shell(shell(), script, seconds=1) == told(124, "first\n" + at_limit(1))
        wait_until(lambda: not is_running(sleep))

    @cases(
        lines="yes",
        one_line_on_stderr="yes | tr '\\n' y >&2",
        ignores_sigpipe="trap '' PIPE; while :; do seq 9999; done",
    )
    def test_a_flood_ends_all_that_a_script_started(self, flood, shell, sleep):
        environment = shell()
        text = run_shell(environment, f"setsid {sleep} & {flood}", shown_bytes=9)
        assert text.startswith("Exit code: 137\n") and text.endswith(CUT)
        # In base64 three bytes are four characters.
        assert len(environment.outputs[0]) < 1.4 * FLOOD_BYTES
        wait_until(lambda: not is_running(sleep))

    def test_a_process_that_an_earlier_script_left_lives_on(self, shell, sleep):
        environment = shell()
        assert run_shell(environment, f"{sleep} & echo a", seconds=5) == told(0, "a")
        run_shell(environment, "sleep 9", seconds=1)
        assert is_running(sleep)

    def test_a_server_that_floods_lives_on(self, shell, tmp_path):
        ticks = tmp_path / "ticks"
        server = f"for i in {{1..2000}}; do echo >>{ticks}; printf %99999d; sleep .01; done"
        text = run_shell(shell(), f"echo started; ({server}) &", shown_bytes=40)
        assert text.startswith("Exit code: 0\n")
        n_ticks = len(ticks.read_bytes())
        # 60 times 99,999 bytes are more than a script may print.
        wait_until(lambda: len(ticks.read_bytes()) >= n_ticks + 60)

    # What becomes of the script's exec and of the one that kills. The seconds that this takes: the
    # limit of 100, 30 until the agent gives up, 15 for the kill.
    @cases(
        hangs=(forever, SILENT, 130),
        environments_limit=(TimeoutError(), SILENT, 0),
        gone=(forever, RuntimeError("gone"), 130),
        kill_hangs=(forever, forever, 145),
    )
    def test_a_script_without_an_answer_is_killed(self, answer, killing, seconds):
        environment = ScriptedEnvironment(answer, killing)
        with virtual_time() as runner:
            start = runner.get_loop().time()
            text = runner.run(run_script(["x"], environment, 100, 99))
            assert round(runner.get_loop().time() - start) == seconds
        assert text == told(124, "[no answer; the limit is 100 seconds]")
        assert environment.kills_its_first_script

    def test_the_environment_has_later_limits_than_the_agent(self):
        environment = ScriptedEnvironment(TimeoutError())
        run_shell(environment, "x", seconds=100)
        # The script's exec: 60 seconds after the agent has given up. The kill: 90 seconds.
        assert environment.timeouts == [190, 105]

    def test_an_error_of_exec_is_raised_after_a_kill(self):
        environment = ScriptedEnvironment(RuntimeError("no container"))
        with pytest.raises(RuntimeError, match="no container"):
            run_shell(environment, "x")
        assert environment.kills_its_first_script

    def test_cancelling_a_run_kills_its_script(self, shell, tmp_path, sleep):
        # The script also stops what runs it.
        script = f"setsid {sleep} & env -i {sleep} & kill -STOP $PPID; "
        script += f"touch {tmp_path}/stopped; {sleep}"

        async def main() -> None:
            run = asyncio.create_task(run_script([script], shell(), 7000, 99))
            await asyncio.to_thread(wait_until, (tmp_path / "stopped").exists)
            run.cancel()
            await run

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
        wait_until(lambda: not is_running(sleep))

    def test_a_cancellation_is_raised_if_exec_fails_by_it(self):
        async def main() -> None:
            environment = ScriptedEnvironment(fails_when_cancelled)
            run = asyncio.create_task(run_script(["x"], environment, 100, 99))
            await asyncio.sleep(0.01)
            run.cancel()
            await run

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())

    def test_a_second_cancellation_does_not_end_the_kill(self):
        async def slow() -> None:
            await asyncio.sleep(0.1)
            ended.append(True)

        async def main() -> None:
            kill = asyncio.create_task(kill_script("abc", ScriptedEnvironment(slow)))
            await asyncio.sleep(0.01)
            kill.cancel()
            await asyncio.sleep(0.3)

        ended = []
        asyncio.run(main())
        assert ended == [True]


# ------------------------------------------------------------------------------ prompts on Tinker

# The cookbook's one model that needs a tokenizer of its own. For the others the suite's will do.
INKLING = "thinkingmachines/Inkling"
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
# What the cookbook has.
IN_COOKBOOK = re.findall(r'name == "(\w+)"', (COOKBOOK / "renderers/__init__.py").read_text())


class Family:
    """A renderer, the tokenizer for it, and what its model would sample."""

    def __init__(self, name: str, tokenizer_dir: str) -> None:
        model_name = INKLING if name == "tml_v0" else tokenizer_dir
        self.options = {"model_name": model_name, "renderer_name": name, "max_tokens": 4096}
        self.tokenizer = get_tokenizer(model_name)
        self.renderer = get_renderer(name, self.tokenizer)
        # These templates close a reply in another way than the model: by another token, by text.
        self.closes_differently = name == "role_colon" or name.startswith("gpt_oss")

    @property
    def special(self) -> dict[str, int]:
        """The special tokens and their ids."""
        if tml := getattr(self.tokenizer, "tml_tokenizer", None):
            return {text: tml.encode_special(text[2:-2]) for text in tml.all_special_tokens}
        added = self.tokenizer.added_tokens_encoder.items()
        return {text: token for text, token in added if len(text) > 1}

    def render(self, *messages: dict[str, Any]) -> list[int]:
        return self.renderer.build_generation_prompt(list(messages)).to_ints()

    def reply(self, answer: str, thinking: str = "hm") -> list[int]:
        """The ids of a reply, with its stop token. It has thinking if the renderer allows that."""
        thought = {"type": "thinking", "thinking": thinking}
        for content in ([thought, {"type": "text", "text": answer}], answer):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            with contextlib.suppress(RendererError):
                prompt, weights = self.renderer.build_supervised_example(messages)
                pairs = zip(prompt.to_ints(), weights.tolist(), strict=True)
                return [token for token, weight in pairs if weight]
        raise AssertionError("the renderer takes no answer")


@pytest.fixture(params=[name for name in RENDERERS if name in IN_COOKBOOK])
def family(request, tokenizer_dir) -> Family:
    if request.param == "tml_v0":
        pytest.importorskip("tml_renderers", reason="Inkling's tokenizer needs tml-renderers")
    return Family(request.param, tokenizer_dir)


class TestTinker:
    def test_a_template_without_a_tail_renders_the_prompt(self, monkeypatch):
        client = ToyClient()
        render = client.render
        # A template that shows the last message only.
        monkeypatch.setattr(client, "render", lambda messages: render(messages[-1:]))
        client.ask("new", "x;", [("user", "old")])
        assert client.generated == [("u:new;a:", 50)]

    # The ids so far (as sampled in capitals, as rendered in small letters), and the next prompt. (A
    # reply of Inkling ends in two stop tokens. Here these are `;` and `u`.)
    @cases(
        first_turn=("", "u:old;a:reply;u:new;a:"),
        later_turn=("u:old;a:REPLY;", "u:old;a:REPLY;u:new;a:"),
        no_stop_token=("u:old;a:REPLY", "u:old;a:reply;u:new;a:"),
        two_stop_tokens=("u:old;a:REPLY;u", "u:old;a:REPLY;u:new;a:"),
    )
    def test_a_prompt_begins_with_the_ids_so_far(self, previous, prompt):
        client = ToyClient()
        client.ask("new", previous, [("user", "old"), ("assistant", "reply")])
        assert client.generated == [(prompt, 50)]

    def test_the_templates_tail_is_looked_for_again_if_it_moved(self):
        client, n_renders = ToyClient(), []
        for system in ("one", "one", "another"):
            client.rendered.clear()
            client.ask("new", "x;", [("system", system), ("user", "old")])
            n_renders.append(len(client.rendered))
        # Two probes find it. One shows that it has not moved.
        assert n_renders == [2, 1, 2]
        assert client.generated == [("x;u:new;a:", 50)] * 3

    @cases(
        defaults=({}, {}),
        max_tokens=({"max_tokens": 7}, {"max_tokens": 7}),
        temperature_0=({"temperature": 0}, {"temperature": 0.0}),
        no_temperature=({"temperature": None}, {}),
        top_p=({"top_p": 0.9}, {"top_p": 0.9}),
        top_p_in_llm_kwargs=({"llm_kwargs": {"top_p": 0.9}}, {"top_p": 0.9}),
        seed=({"llm_kwargs": {"seed": 3}}, {"seed": 3}),
        session_id=({"session_id": "mine"}, {}),
    )
    def test_tinker_gets_the_sampling_options(self, given, expected, tinker):
        AgentRun(tinker.agent(**given)).run()
        defaults = {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}
        stop = tinker.encode("<|im_end|>")
        assert dict(tinker.params[0]) == {**defaults, "stop": stop, **expected}

    def test_tinker_has_a_context_of_32000_tokens_by_default(self, tinker):
        AgentRun(tinker.agent(max_tokens=99_999)).run()
        assert tinker.params[0].max_tokens == 32_000 - len(tinker.sampled[0].prompt)

    def test_a_base_models_end_of_text_is_taken_off(self, tinker):
        tinker.script(Reply("hi<|endoftext|>", cut_off=True))
        assert AgentRun(tinker.agent()).run().completion == "hi"

    def test_a_tokenizer_need_not_have_an_end_of_text(self, tinker, monkeypatch):
        monkeypatch.setattr(PreTrainedTokenizerFast, "eos_token", None, raising=False)
        assert AgentRun(tinker.agent()).run().completion == "hello"

    def test_a_character_that_is_an_added_token_stays(self, tinker):
        (client,) = set_up(tinker.agent())
        assert client.plain_text("a \u00a7 b") == "a \u00a7 b"

    def test_tinker_opens_the_base_model(self, tinker, tokenizer_dir):
        set_up(tinker.agent())
        assert tinker.opened == [(None, tokenizer_dir, False)]

    def test_tinker_opens_a_checkpoint(self, tinker):
        more = {"llm_kwargs": {"record_stability_info": True}}
        set_up(tinker.agent(model_path="tinker://run/1", **more))
        assert tinker.opened == [("tinker://run/1", None, True)]

    @pytest.mark.skipif(not HAS_SEQUENCE_IDS, reason="SDK 0.26 gives each sequence an id")
    def test_tinkers_sequence_ids_are_recorded(self, tinker):
        done = AgentRun(tinker.agent()).run("one", "two")
        extras = [context.rollout_details[0]["extra"] for context in done.contexts]
        assert extras == [{"sequence_id": ["sequence-1"]}, {"sequence_id": ["sequence-2"]}]

    def test_a_model_has_its_recommended_renderer_by_default(self, tinker):
        pytest.importorskip("tml_renderers", reason="Inkling's tokenizer needs tml-renderers")
        done = AgentRun(tinker.agent(model_name=INKLING, renderer_name=None, max_tokens=1)).run()
        assert "<|message_user|>" in get_tokenizer(INKLING).decode(done.recorded[0].prompt)

    def test_a_tokenizer_is_used_under_its_lock(self, tinker, tokenizer_dir, monkeypatch):
        """It raises "Already borrowed" if two threads use it at once."""
        tokenizer = get_tokenizer(tokenizer_dir)
        seen, decode = [], tokenizer.decode

        def watched(*arguments: Any, **options: Any) -> str:
            seen.append(basic_loop_agent._tokenizer_lock.locked())
            return decode(*arguments, **options)

        monkeypatch.setattr(tokenizer, "decode", watched)
        AgentRun(tinker.agent()).run()
        assert set(seen) == {True}

    def test_clients_that_are_built_at_once_share_a_session(self, tinker):
        async def main() -> None:
            agents = [tinker.agent(max_tokens=1 + n) for n in range(4)]
            await asyncio.gather(*(agent.setup(ScriptedEnvironment()) for agent in agents))

        tinker.connecting_sec = 0.05
        asyncio.run(main())
        assert (len(tinker.opened), len(tinker.sessions)) == (4, 1)

    @cases(
        url=("base_url", [{"api_base": f"http://x/{n}"} for n in (1, 2, 1)]),
        key=("api_key", [{"llm_kwargs": {"api_key": n}} for n in "121"]),
    )
    def test_each_server_has_a_session_of_its_own(self, name, servers, tinker):
        set_up(*(tinker.agent(**given) for given in servers))
        assert [session.arguments[name][-1] for session in tinker.sessions] == ["1", "2"]

    @pytest.mark.parametrize("status", [404, 410])
    def test_a_session_that_has_ended_is_replaced(self, tinker, status):
        set_up(tinker.agent())
        tinker.sessions[0].status = status
        set_up(tinker.agent(max_tokens=1), tinker.agent(max_tokens=2))
        assert len(tinker.sessions) == 2

    def test_a_given_service_needs_no_key(self, tinker, monkeypatch):
        monkeypatch.delenv("TINKER_API_KEY")
        use_service(tinker())
        AgentRun(tinker.agent()).run()
        assert (len(tinker.sessions), len(tinker.opened)) == (1, 1)

    def test_a_given_service_is_never_replaced(self, tinker):
        use_service(tinker())
        tinker.sessions[0].status = 410
        with pytest.raises(tinker_sdk.APIStatusError):
            set_up(tinker.agent())
        assert (len(tinker.sessions), len(tinker.opened)) == (1, 1)

    @pytest.mark.skipif(not REAL_TINKER, reason="TINKER_BASE_URL names no server")
    # The SDK leaves its connections open.
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Exception ignored in")
    def test_a_real_tinker_continues_from_the_sampled_ids(self, tmp_path, monkeypatch):
        """On a CPU the first run compiles for over a minute, and fails: start it again."""
        monkeypatch.setenv("TINKER_BASE_URL", REAL_TINKER)
        options = {"model_name": TINKER_MODEL, "renderer_name": "qwen3_instruct"}
        agent = BasicLoopAgent(logs_dir=tmp_path, max_tokens=40, **options)
        done = AgentRun(agent).run("one", "two")
        first, second = done.recorded
        assert second.prompt[: len(first.prompt)] == first.prompt
        assert done.metadata["n_turns_without_ids"] == 0

    def test_the_list_names_every_renderer_of_the_cookbook(self):
        # Cookbook 0.5.7 has 38. Fewer would show that this looks in the wrong place.
        assert len(IN_COOKBOOK) >= 38
        assert set(IN_COOKBOOK) <= set(RENDERERS)

    def test_a_later_prompt_goes_on_from_the_sampled_ids(self, tinker, family):
        texts = ["\n\n \t hm \n" + bash("a"), bash("b"), "\n" + bash("c"), bash("d")]
        tinker.script(*(Reply(tokens=family.reply(text)) for text in texts))
        done = AgentRun(tinker.agent(**family.options, max_turns=4), printing("\n o \n")).run()
        assert done.scripts == [["a\n"], ["b\n"], ["c\n"], ["d\n"]]
        assert done.recorded == tinker.sampled
        assert done.metadata["n_prefix_breaks"] == (3 if family.closes_differently else 0)

    def test_a_later_prompt_ends_as_the_template_would(self, tinker, family):
        tinker.script(*[Reply(tokens=family.reply(bash("ls")))] * 2)
        agent = tinker.agent(**family.options, max_turns=2, system_prompt="Be brief.")
        first, second = AgentRun(agent, printing("out")).run().recorded
        view = family.render(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "do it"},
            {"role": "assistant", "content": bash("ls")},
            {"role": "user", "content": "Exit code: 0\nOutput:\nout"},
        )
        # (Where a reply is closed differently, the whole prompt was rendered.)
        stop_and_tail = second.prompt[len(first.prompt + first.completion) - 1 :]
        assert len(stop_and_tail) > 1
        assert stop_and_tail == view[-len(stop_and_tail) :]

    def test_output_adds_no_special_token_to_a_prompt(self, tinker, family):
        """The special tokens of a prompt are the template's, whatever a script prints."""
        hostile = "".join(f"a {text} b<{text}<{text}\n" for text in family.special)
        seen = []
        for output in ("out", hostile):
            tinker.script(*[Reply(tokens=family.reply(bash("ls")))] * 2)
            agent = tinker.agent(**family.options, max_turns=2, max_output_bytes=99_999)
            done = AgentRun(agent, printing(output)).run()
            ids = family.special.values()
            seen.append([token for token in done.recorded[1].prompt if token in ids])
        assert seen[0] == seen[1]
        assert done.observations[0].replace("\u200b", "").endswith(hostile.rstrip())

    def test_a_reply_cut_off_anywhere_shows_no_thinking(self, tinker, family):
        thinking = f"Could <tool_call>be</tool_call> 42\n{bash('rm x')}"
        whole = family.reply("It is done.", thinking)
        lengths = [*range(1, len(whole), 5), len(whole)]
        tinker.script(*(Reply(tokens=whole[:length], cut_off=True) for length in lengths))
        agent = OwnLoop(**tinker.options | family.options, max_turns=len(lengths))
        AgentRun(agent).run()
        answers = [turn.content.strip() for turn in agent.turns]
        parts = ("<", "Could", "42", "rm")
        assert [text for text in answers if any(part in text for part in parts)] == []
        assert answers[-1] == "It is done."


# -------------------------------------------------------------------------------- prompts on vLLM


class TestVllm:
    def test_vllm_gets_this_request_for_a_completion(self, vllm):
        AgentRun(vllm.agent()).run()
        assert vllm.bodies("/v1/completions") == [
            {
                "model": VLLM_MODEL,
                "prompt": vllm.sampled[0].prompt,
                "max_tokens": 512,
                "temperature": 1.0,
                "logprobs": 0,
                "return_token_ids": True,
                "skip_special_tokens": False,
            }
        ]

    def test_vllm_gets_this_request_for_a_prompt(self, vllm):
        AgentRun(vllm.agent(system_prompt="Be brief.")).run()
        system = {"role": "system", "content": "Be brief."}
        assert vllm.bodies("/tokenize")[1] == {
            "model": VLLM_MODEL,
            "messages": [system, {"role": "user", "content": "do it"}],
            "add_generation_prompt": True,
            "chat_template_kwargs": {},
            "return_token_strs": True,
        }

    def test_setup_asks_vllm_for_its_special_tokens(self, vllm):
        set_up(vllm.agent())
        (body,) = vllm.bodies("/tokenize")
        names = body.pop("prompt").split()
        assert {"<think>", "[INST]"} < set(names)
        model = VLLM_MODEL
        assert body == {"model": model, "add_special_tokens": False, "return_token_strs": True}

    # Options, and what stands in the request for a completion (None: nothing).
    @cases(
        max_tokens=({"max_tokens": 7}, "max_tokens", 7),
        temperature_0=({"temperature": 0}, "temperature", 0),
        no_temperature=({"temperature": None}, "temperature", None),
        top_p=({"top_p": 0.9}, "top_p", 0.9),
        top_p_in_llm_kwargs=({"llm_kwargs": {"top_p": 0.9}}, "top_p", 0.9),
        extra_body=({"llm_kwargs": {"top_k": 1, "extra_body": {"top_k": 5}}}, "top_k", 5),
        limit=({"llm_kwargs": {"extra_body": {"max_tokens": 9}}}, "max_tokens", 512),
        session_id=({"session_id": "mine"}, "session_id", "mine"),
        hosted_vllm=({"model_name": f"hosted_vllm/{VLLM_MODEL}"}, "model", VLLM_MODEL),
    )
    def test_vllm_gets_an_option(self, given, name, value, vllm):
        AgentRun(vllm.agent(**given)).run()
        assert vllm.bodies("/v1/completions")[0].get(name) == value

    def test_vllms_template_gets_its_arguments(self, vllm):
        arguments = {"enable_thinking": True}
        llm_kwargs = {"extra_body": {"chat_template_kwargs": arguments}}
        AgentRun(vllm.agent(llm_kwargs=llm_kwargs)).run()
        assert vllm.bodies("/tokenize")[1]["chat_template_kwargs"] == arguments
        assert "chat_template_kwargs" not in vllm.bodies("/v1/completions")[0]

    # openai sends the time limit in this header.
    @cases(
        headers=({"extra_headers": {"X-Other": "1"}}, "X-Other", "1"),
        time_limit=({"timeout": 77}, "X-Stainless-Read-Timeout", "77"),
        default_time_limit=({}, "X-Stainless-Read-Timeout", "600"),
    )
    def test_every_request_to_vllm_has_a_header(self, llm_kwargs, name, value, vllm):
        AgentRun(vllm.agent(llm_kwargs=llm_kwargs)).run()
        assert vllm.headers(name) == [value] * 3

    @pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
    def test_vllms_paths_are_found_from_its_api(self, vllm, end):
        AgentRun(vllm.agent(api_base=vllm.url + end)).run()
        paths = [path for path, _, _ in vllm.requests]
        assert paths == ["/tokenize", "/tokenize", "/v1/completions"]

    def test_a_turn_on_vllm_costs_two_requests(self, vllm):
        """One more finds the template's tail, and one in `setup` the special tokens."""
        vllm.script(bash("a"), bash("b"), "done")
        AgentRun(vllm.agent(max_turns=3)).run()
        paths = [path for path, _, _ in vllm.requests]
        assert (paths.count("/tokenize"), paths.count("/v1/completions")) == (1 + 3 + 1, 3)

    def test_a_prompt_on_vllm_begins_with_the_ids_so_far(self, vllm):
        first, second = AgentRun(vllm.agent(max_tokens=200)).run("one", "two").recorded
        ids = first.prompt + first.completion
        assert second.prompt[: len(ids)] == ids

    def test_a_prompt_on_vllm_ends_in_the_templates_tail(self, vllm):
        vllm.script("one.", "two.")
        first, second = AgentRun(vllm.agent()).run("one", "two").recorded
        tail = vllm.encode("\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
        assert second.prompt == first.prompt + first.completion + tail

    def test_coheres_marks_of_an_answer_are_taken_off(self, vllm):
        vllm.script("<|START_RESPONSE|>done<|END_RESPONSE|>")
        assert AgentRun(vllm.agent()).run().completion == "done"

    @pytest.mark.parametrize("opening", ["<think>\n", "<think>"])
    def test_thinking_that_vllms_template_opened_is_taken_off(self, vllm, opening):
        vllm.script(f"so {bash('rm x')}</think>{bash('ls')}", "</think>done")
        template = {"chat_template_kwargs": {"opens_with": opening}}
        done = AgentRun(vllm.agent(max_turns=2, llm_kwargs={"extra_body": template})).run()
        assert (done.scripts, done.completion) == ([["ls\n"]], "done")

    def test_vllms_cached_tokens_are_counted(self, vllm):
        vllm.script(Reply(bash("ls"), cached_tokens=3), Reply(cached_tokens=40))
        assert AgentRun(vllm.agent(max_turns=2)).run().context.n_cache_tokens == 43

    def test_vllms_routed_experts_are_recorded(self, vllm):
        vllm.script(Reply(choice={"routed_experts": [[[1, 2]], [[3, 4]]]}))
        (detail,) = AgentRun(vllm.agent()).run().context.rollout_details
        assert detail["extra"] == {"routed_experts": [[[[1, 2]], [[3, 4]]]]}

    @cases(servers=(None, 8192), higher=(9000, 8192), lower=(300, 300))
    def test_vllms_context_limit_is_the_smaller_one(self, given, limit, vllm):
        AgentRun(vllm.agent(context_limit=given, max_tokens=99_999)).run()
        (body,) = vllm.bodies("/v1/completions")
        assert body["max_tokens"] == limit - len(body["prompt"])

    def test_a_busy_vllm_is_asked_six_times(self, vllm):
        vllm.script(*[Refusal(503)] * 6, "hello")
        with pytest.raises(openai.InternalServerError):
            AgentRun(vllm.agent()).run()
        assert len(vllm.bodies("/v1/completions")) == 6

    BROKEN = ["<|im_end|>", "<|turn>", "<turn|>", "[|user|]", "<\uff5cUser\uff5c>", "<unused42>"]

    @pytest.mark.parametrize("text", [*BROKEN, "<think>", "</think>"])
    def test_a_special_token_of_vllms_model_is_broken(self, vllm, text):
        (client,) = set_up(vllm.agent())
        assert (
            client.plain_text(f"a{text}{text}b")
            == f"a{text[0]}\u200b{text[1:]}{text[0]}\u200b{text[1:]}b"
        )

    LEFT = ["[ARGS]", "vocab[UNK]", "<s>old</s>", "vector<file_t>", "<start_time>", *ORDINARY]

    @pytest.mark.parametrize("text", LEFT)
    def test_a_text_that_is_no_token_of_vllms_model_stays(self, vllm, text):
        (client,) = set_up(vllm.agent())
        assert client.plain_text(text) == text

    @cases(
        status_404=Refusal(404),
        a_list=[1],
        no_strings={"tokens": [1], "token_strs": None, "max_model_len": 9},
        no_limit={"tokens": [1], "token_strs": ["a"]},
    )
    def test_setup_refuses_a_server_without_vllms_tokenize(self, answer, vllm):
        vllm.skip_if_real()
        vllm.tokenize_answer = answer
        with pytest.raises(
            RuntimeError, match=r"no /tokenize as vLLM's \(then use model_client=litellm"
        ):
            set_up(vllm.agent())

    def test_setup_refuses_a_url_where_no_server_is(self, vllm):
        with pytest.raises(openai.APIConnectionError):
            set_up(vllm.agent(api_base="http://127.0.0.1:1", llm_kwargs={"max_retries": 0}))


# -------------------------------------------------------------------------------- chat endpoints

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


class TestChat:
    CHAT = "/v1/chat/completions"

    def test_the_module_does_not_import_litellm(self):
        code = "import sys, basic_loop_agent; sys.exit('litellm' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    def test_nothing_is_sent_that_was_not_asked_for(self, chat):
        AgentRun(chat.agent(temperature=None)).run()
        message = {"role": "user", "content": "do it"}
        request = {"model": "tiny", "messages": [message], "max_tokens": 512}
        assert chat.bodies(self.CHAT) == [request]

    # Options, and what stands in the request (None: nothing).
    @cases(
        max_tokens=({"max_tokens": 7}, "max_tokens", 7),
        temperature=({}, "temperature", 1.0),
        temperature_0=({"temperature": 0}, "temperature", 0),
        refused=({"model_name": "openai/gpt-5", "temperature": 0.3}, "temperature", None),
        top_p=({"top_p": 0.9}, "top_p", 0.9),
        top_p_in_llm_kwargs=({"llm_kwargs": {"top_p": 0.9}}, "top_p", 0.9),
        extra_body=({"llm_kwargs": {"extra_body": {"top_k": 5}}, "session_id": "x"}, "top_k", 5),
        session_id=({"session_id": "x"}, "session_id", "x"),
        ids=({"collect_rollout_details": True}, "return_token_ids", True),
        logprobs=({"collect_rollout_details": True}, "logprobs", True),
        no_logprobs=({}, "logprobs", None),
        claudes_cache=(
            {"model_name": "openai/claude-x"},
            "messages",
            [{"role": "user", "content": [{"type": "text", "text": "do it", **EPHEMERAL}]}],
        ),
    )
    def test_a_chat_endpoint_gets_an_option(self, given, name, value, chat):
        AgentRun(chat.agent(**given)).run()
        assert chat.bodies(self.CHAT)[0].get(name) == value

    @pytest.mark.skipif(not hasattr(BaseAgent, "extra_env"), reason="since Harbor 0.16")
    def test_the_responses_api_may_ask_for_max_tokens(self, chat):
        """With that API LiteLLM sends what this method says, and not max_tokens."""
        (client,) = set_up(chat.agent(max_tokens=7))
        assert client.get_model_output_limit() == 7

    def test_the_example_for_skyrl_reaches_the_server(self, chat):
        config = yaml.safe_load((ROOT / "examples/skyrl.yaml").read_text())
        kwargs = config["agent"]["kwargs"] | {"session_id": "mine"}
        AgentRun(chat.agent(model_name="hosted_vllm/tiny", **kwargs)).run()
        sent = {"model": "tiny", "max_tokens": 4096, "top_k": -1, "min_p": 0.0, "logprobs": True}
        assert sent.items() <= chat.bodies(self.CHAT)[0].items()

    def test_the_conversation_is_sent_again_each_turn(self, chat):
        chat.script(f"<think>hm</think>{bash('ls')}", "done")
        AgentRun(chat.agent(max_turns=2, system_prompt="Be brief.")).run()
        assert chat.bodies(self.CHAT)[1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "do it"},
            {"role": "assistant", "content": bash("ls")},
            {"role": "user", "content": "Exit code: 0\nOutput:\n(none)"},
        ]

    def test_a_client_leaves_the_options_as_they_are(self, chat):
        agent = chat.agent(session_id="mine", llm_kwargs={"extra_body": {"top_k": 5}})
        AgentRun(agent).run()
        assert agent.options.llm_kwargs == {"extra_body": {"top_k": 5}}

    def test_the_price_of_a_known_model_is_known(self, chat):
        chat.script(bash("ls"), "done")
        agent = chat.agent(model_name="openai/gpt-4o-2024-05-13", max_turns=2)
        done = AgentRun(agent).run()
        context, totals = done.context, done.trajectory.final_metrics
        # litellm's price list: 5 and 15 dollars per million tokens.
        price = context.n_input_tokens * 5e-6 + context.n_output_tokens * 15e-6
        assert context.cost_usd == totals.total_cost_usd == pytest.approx(price)

    @cases(null=None, no_details={"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10})
    def test_a_server_need_not_give_all_usage(self, usage, server):
        server.script(Reply("hi", answer={"usage": usage}))
        assert AgentRun(server.agent()).run().completion == "hi"

    def test_an_answer_without_text_is_empty(self, chat):
        chat.script(Reply(message={"content": None}))
        assert AgentRun(chat.agent()).run().completion == ""

    @pytest.mark.parametrize("reason", ["STOP", "end_turn"])
    def test_a_complete_reply_is_run(self, server, reason):
        server.script(Reply(bash("ls"), choice={"finish_reason": reason}), "done")
        done = AgentRun(server.agent(max_turns=2)).run()
        assert (done.stop_reason, done.scripts) == ("completed", [["ls\n"]])

    def test_a_reply_without_a_finish_reason_is_recorded(self, server):
        server.script(Reply("hi", choice={"finish_reason": None}))
        assert AgentRun(server.agent()).run().completion == "hi"

    @pytest.mark.parametrize("reason", ["length", "abort", "MALFORMED", "content_filter"])
    def test_a_reply_that_was_cut_off_is_not_run(self, server, reason, caplog):
        server.script(Reply(bash("rm x"), choice={"finish_reason": reason}))
        done = AgentRun(server.agent(max_turns=2)).run()
        assert (done.stop_reason, done.scripts) == ("max_tokens", [])
        assert f"finish reason {reason.lower()!r}: the reply counts as cut off" in caplog.text

    @cases(wanted=(True, {"reasoning_content": "hm"}), not_wanted=(False, {}))
    def test_reasoning_goes_back_only_if_wanted(self, is_wanted, sent, chat):
        chat.script(Reply(bash("ls"), message={"reasoning_content": "hm"}), "done")
        AgentRun(chat.agent(max_turns=2, interleaved_thinking=is_wanted)).run()
        message = chat.bodies(self.CHAT)[1]["messages"][2]
        assert message == {"role": "assistant", "content": bash("ls"), **sent}

    # The text of a reply, the server's reasoning, and what they are in the record.
    @cases(
        the_servers=("hi", "hm", ("hm", "hi")),
        a_tag_is_text_then=("a </think> b", "hm", ("hm", "a </think> b")),
        both=("<think>b</think>hi", "a", ("ab", "hi")),
        only_closed=(f"so {bash('rm x')}</think>hi", None, (f"so {bash('rm x')}", "hi")),
    )
    def test_thinking_is_recorded_apart(self, text, reasoning, expected, chat):
        chat.script(Reply(text, message={"reasoning_content": reasoning}))
        (turn,) = AgentRun(chat.agent()).run().agent.turns
        assert (turn.reasoning_content, turn.content) == expected


# ------------------------------------------------------------------------------ the shared client


class TestSharedClient:
    def test_trials_with_the_same_configuration_share_a_client(self, tinker, tmp_path):
        async def main() -> None:
            await asyncio.gather(*(AgentRun(agent).go() for agent in agents))

        agents = [tinker.agent(logs_dir=tmp_path / str(n)) for n in range(20)]
        asyncio.run(main())
        assert len({agent.client for agent in agents}) == 1
        assert len(tinker.opened) == 1

    @cases(
        max_tokens={"max_tokens": 1},
        max_turns={"max_turns": 5},
        server={"api_base": "http://x"},
        llm_kwargs={"llm_kwargs": {"seed": 1}},
        key={"extra_env": {"TINKER_API_KEY": "tml-own"}},
    )
    def test_another_configuration_has_a_client_of_its_own(self, given, tinker):
        first, second = set_up(tinker.agent(), tinker.agent(**given))
        assert first is not second

    def test_another_model_has_a_client_of_its_own(self, tinker, tokenizer_dir):
        # The same tokenizer, by another name.
        first, second = set_up(tinker.agent(), tinker.agent(model_name=f"{tokenizer_dir}/"))
        assert first is not second

    def test_a_subclass_has_clients_of_its_own(self, tinker):
        first, second = set_up(tinker.agent(), OwnLoop(**tinker.options))
        assert first is not second

    def test_another_given_service_has_clients_of_its_own(self, tinker):
        async def main() -> None:
            await agents[0].setup(ScriptedEnvironment())
            use_service(tinker())
            await agents[1].setup(ScriptedEnvironment())

        agents = [tinker.agent(), tinker.agent()]
        asyncio.run(main())
        assert agents[0].client is not agents[1].client

    def test_another_event_loop_has_clients_of_its_own(self, tinker):
        agents = tinker.agent(), tinker.agent()
        assert set_up(agents[0]) != set_up(agents[1])

    def test_the_client_is_built_in_a_thread(self, tinker, monkeypatch):
        monkeypatch.setattr(BasicLoopAgent, "_build_llm", lambda _: threading.current_thread())
        assert set_up(tinker.agent()) != [threading.main_thread()]

    def test_after_a_build_that_failed_the_next_trial_builds(self, tinker):
        async def main() -> None:
            with pytest.raises(tinker_sdk.APIStatusError):
                await tinker.agent(model_path="tinker://1").setup(ScriptedEnvironment())
            tinker.missing_checkpoints.clear()
            await tinker.agent(model_path="tinker://1").setup(ScriptedEnvironment())

        tinker.missing_checkpoints.add("tinker://1")
        asyncio.run(main())
        # A build asks once more if it fails: two requests, and then one.
        assert len(tinker.opened) == 3

    # Whether the next trial has the same client after such a reply.
    @cases(
        an_error=(RuntimeError("gone"), None, False),
        the_clients_timeout=(TimeoutError(), None, False),
        max_seconds=(forever, None, True),
        harbors_timeout=(forever, 20, True),
        a_full_context=(FULL, None, True),
        an_answer=("hello", None, True),
    )
    def test_only_an_error_replaces_the_client(self, reply, timeout_sec, stays, tinker):
        async def main() -> None:
            with contextlib.suppress(RuntimeError, TimeoutError):
                await AgentRun(agents[0], timeout_sec=timeout_sec).go()
            await AgentRun(agents[1]).go()

        tinker.script(reply, "hello")
        agents = [tinker.agent(max_seconds=50), tinker.agent(max_seconds=50)]
        with virtual_time() as runner:
            runner.run(main())
        assert (agents[0].client is agents[1].client) is stays

    def test_a_run_uses_the_client_that_replaced_its_own(self, tinker):
        async def main() -> None:
            await waiting_agent.setup(ScriptedEnvironment())
            with contextlib.suppress(RuntimeError):
                await AgentRun(failing).go()
            await AgentRun(later).go()
            await waiting_agent.run("do it", ScriptedEnvironment(), AgentContext())

        tinker.script(RuntimeError("gone"), "hello", "hello")
        failing, waiting_agent, later = (tinker.agent() for _ in range(3))
        asyncio.run(main())
        assert waiting_agent.client is not failing.client
        assert waiting_agent.client is later.client

    def test_a_late_error_leaves_the_client_that_replaced_its_own(self, tinker):
        async def main() -> None:
            await failing.setup(ScriptedEnvironment())
            failing._forget_client()
            await second.setup(ScriptedEnvironment())
            # Another trial of the first client fails late.
            failing._forget_client()
            await third.setup(ScriptedEnvironment())

        failing, second, third = (tinker.agent() for _ in range(3))
        asyncio.run(main())
        assert second.client is not failing.client
        assert third.client is second.client

    def test_the_oldest_of_128_clients_goes_first(self, tinker, monkeypatch):
        monkeypatch.setattr(BasicLoopAgent, "_build_llm", lambda _: object())
        monkeypatch.setattr(basic_loop_agent, "_clients", {})
        many = (tinker.agent(max_tokens=n) for n in range(1, 130))
        again = tinker.agent(max_tokens=2), tinker.agent(max_tokens=1)
        first, second, *_, second_again, first_again = set_up(*many, *again)
        assert second_again is second
        assert first_again is not first


# ----------------------------------------------------------------------------- files with ATIF


class TestFiles:
    def test_completion_txt_is_the_last_answer(self, tinker):
        tinker.script(bash("ls"), "<think>hm</think>\n\ndone \N{SNOWMAN}")
        done = AgentRun(tinker.agent(max_turns=2)).run()
        answer = (done.agent.logs_dir / "completion.txt").read_bytes()
        assert answer == "done \N{SNOWMAN}".encode()

    def test_an_earlier_answer_is_not_left_to_be_scored(self, tinker):
        tinker.script("first", RuntimeError("gone"))
        failed = AgentRun(tinker.agent())
        with pytest.raises(RuntimeError):
            failed.run("one", "two")
        assert failed.completion == ""

    def test_no_other_file_is_left(self, tinker, tmp_path):
        AgentRun(tinker.agent(logs_dir=tmp_path / "new" / "agent")).run()
        left = {path.name for path in (tmp_path / "new" / "agent").iterdir()}
        assert left == {"completion.txt", "trajectory.json"}

    @cases(
        link="ln -s ../victim",
        link_to_a_name_that_is_too_long="ln -s $(printf %0300d)",
        pipe="mkfifo",
    )
    @pytest.mark.parametrize("name", ["completion.txt", "trajectory.json"])
    def test_a_trap_at_a_files_name_is_replaced(self, trap, name, tinker, tmp_path):
        logs, victim = tmp_path / "logs", tmp_path / "victim"
        victim.write_text("precious")
        logs.mkdir()
        subprocess.run(f"{trap} {name}", shell=True, cwd=logs, check=True)
        done = AgentRun(tinker.agent(logs_dir=logs)).run()
        assert done.completion == done.steps[-1].message == "hello"
        assert (logs / name).is_file() and not (logs / name).is_symlink()
        assert victim.read_text() == "precious"

    def test_a_file_that_cannot_be_written_is_an_error(self, tinker):
        failed = AgentRun(tinker.agent())
        (failed.agent.logs_dir / "trajectory.json").mkdir()
        with pytest.raises(IsADirectoryError):
            failed.run()
        assert failed.recorded == tinker.sampled

    def test_the_context_can_be_saved(self, tinker):
        tinker.script(Reply(tokens=[50], logprobs=[math.nan]))
        context = AgentRun(tinker.agent()).run().context
        assert AgentContext.model_validate_json(context.model_dump_json()) == context

    def test_a_run_leaves_this_trajectory(self, tinker, tokenizer_dir, tmp_path):
        tinker.script(Reply(bash("ls"), cached_tokens=2), Reply("<think>hm</think>done"))
        options = {"logs_dir": tmp_path / "greet__x7/agent", "system_prompt": "Be brief."}
        done = AgentRun(tinker.agent(**options, max_turns=2), printing("out")).run()
        file = json.loads((options["logs_dir"] / "trajectory.json").read_text())
        system, user, first, second = file["steps"]
        assert system == {"step_id": 1, "source": "system", "message": "Be brief."}
        assert user == {"step_id": 2, "source": "user", "message": "do it"}
        assert (first["message"], second["message"]) == (bash("ls"), "done")
        assert ("reasoning_content" in first, second["reasoning_content"]) == (False, "hm")
        assert first["observation"] == {"results": [{"content": "Exit code: 0\nOutput:\nout"}]}
        assert [step["metrics"]["cached_tokens"] for step in (first, second)] == [2, 0]
        assert file["final_metrics"]["total_cached_tokens"] == done.context.n_cache_tokens == 2
        assert (file["session_id"], file["extra"]) == ("greet__x7", done.metadata)
        names = {"name": "basic-loop", "version": basic_loop_agent.__version__}
        assert file["agent"] == names | {"model_name": tokenizer_dir}

    def test_tokens_are_counted_as_they_were_sampled(self, tinker):
        tinker.script(bash("ls"), "done")
        done = AgentRun(tinker.agent(max_turns=2)).run()
        n_prompt = sum(len(turn.prompt) for turn in tinker.sampled)
        n_completion = sum(len(turn.completion) for turn in tinker.sampled)
        context, totals = done.context, done.trajectory.final_metrics
        assert context.n_input_tokens == totals.total_prompt_tokens == n_prompt
        assert context.n_output_tokens == totals.total_completion_tokens == n_completion

    def test_an_unknown_price_is_null(self, tinker):
        done = AgentRun(tinker.agent()).run()
        totals, metrics = done.trajectory.final_metrics, done.steps[-1].metrics
        assert done.context.cost_usd is totals.total_cost_usd is metrics.cost_usd is None

    @pytest.mark.skipif("model_usage" not in AgentContext.model_fields, reason="since Harbor 0.23")
    def test_the_context_has_the_models_usage(self, tinker, tokenizer_dir):
        assert list(AgentRun(tinker.agent()).run().context.model_usage) == [tokenizer_dir]

    def test_a_trajectory_without_a_reply_shows_the_instruction(self, tinker):
        tinker.script(FULL)
        steps = AgentRun(tinker.agent()).run().steps
        assert [(step.source, step.message) for step in steps] == [("user", "do it")]

    def test_a_reply_has_the_time_at_which_it_came(self, tinker):
        before = datetime.now(UTC).isoformat()
        done = AgentRun(tinker.agent()).run()
        assert before < done.steps[-1].timestamp < datetime.now(UTC).isoformat()

    def test_a_step_has_what_trainers_read(self, model):
        done = AgentRun(model.agent(collect_rollout_details=True)).run()
        (turn,) = model.sampled
        metrics = done.steps[-1].metrics
        assert tuple(getattr(metrics, name) for name in IDS) == turn
        counts = (metrics.prompt_tokens, metrics.completion_tokens)
        assert counts == (len(turn.prompt), len(turn.completion))

    def test_a_step_has_vllms_routed_experts(self, vllm):
        vllm.script(Reply(choice={"routed_experts": [[1]]}))
        assert AgentRun(vllm.agent()).run().steps[-1].metrics.extra == {"routed_experts": [[1]]}

    @cases(
        no_logprobs=(Reply(gives_logprobs=False), {}),
        not_wanted=(Reply(), {"collect_rollout_details": False}),
    )
    def test_a_step_that_cannot_be_trained_has_no_ids(self, reply, given, tinker):
        tinker.script(bash("ls"), reply)
        metrics = AgentRun(tinker.agent(max_turns=2, **given)).run().steps[-1].metrics
        assert [getattr(metrics, name) for name in (*IDS, "extra")] == [None] * 4

    def test_the_trajectory_has_a_given_session_id(self, vllm):
        assert AgentRun(vllm.agent(session_id="mine")).run().trajectory.session_id == "mine"


# ---------------------------------------------------------------------------------- training data


def a_turn(prompt=(1, 2), completion=(3, 4), logprobs=(-0.5, -0.25), **extra: Any) -> Turn:
    given = zip(IDS, (prompt, completion, logprobs), strict=True)
    return Turn(**{name: ids if ids is None else list(ids) for name, ids in given}, extra=extra)


ONE = {"reward": 1.0}
A_TURN = (a_turn(),)


def a_trial(rewards=ONE, error="", stop_reason="completed", turns=A_TURN, steps=()) -> TrialResult:
    """A trial as Harbor reads it from result.json, or a step of one, which has the same fields.
    With rewards=None there was no verifier."""
    details = rollout_details(list(turns))
    context = AgentContext(metadata={"stop_reason": stop_reason}, rollout_details=details)
    return TrialResult.model_construct(
        trial_name="greet__1",
        agent_result=None if steps else context,
        verifier_result=None if rewards is None else VerifierResult(rewards=rewards),
        exception_info=ExceptionInfo.model_construct(exception_type=error) if error else None,
        step_results=list(steps) or None,
    )


class TestTrainingData:
    REASONS = ["stop", "stop_sequence", "end_turn", "eos", "eos_token", "complete", "completed"]

    @pytest.mark.parametrize("reason", REASONS)
    def test_these_finish_reasons_end_a_complete_reply(self, reason):
        assert Turn(finish_reason=reason).cut_off is False

    def test_a_turn_is_complete_if_its_client_gives_no_reason(self):
        assert Turn().cut_off is False

    def test_a_reason_that_is_null_counts_as_cut_off(self):
        assert Turn(finish_reason=None).cut_off is True

    @cases(
        aligned=(a_turn(), True),
        an_empty_reply=(a_turn(completion=(), logprobs=()), True),
        an_empty_reply_without_logprobs=(a_turn(completion=(), logprobs=None), True),
        no_prompt=(a_turn(prompt=None), False),
        an_empty_prompt=(a_turn(prompt=()), False),
        no_ids=(a_turn(completion=None), False),
        no_logprobs=(a_turn(logprobs=None), False),
        too_few_logprobs=(a_turn(logprobs=(-0.5,)), False),
        **{f"logprob_{x}": (a_turn(logprobs=(-0.5, x)), False) for x in NO_LOGPROBS},
    )
    def test_a_turn_whose_logprobs_are_whole_is_trainable(self, turn, expected):
        assert turn.is_trainable is expected

    def test_a_turn_without_usage_counts_its_tokens(self):
        counts = {"prompt_tokens": 2, "completion_tokens": 2, "cache_tokens": 0, "cost_usd": 0.0}
        assert a_turn().usage.model_dump() == counts

    def test_rollout_details_have_an_entry_for_each_turn(self):
        other = a_turn(prompt=(5,), completion=(6,), logprobs=(-1.0,), b=2)
        empty = a_turn(completion=(), logprobs=None)
        (detail,) = rollout_details([a_turn(a=1), other, empty])
        assert detail == {
            "prompt_token_ids": [[1, 2], [5], [1, 2]],
            "completion_token_ids": [[3, 4], [6], []],
            "logprobs": [[-0.5, -0.25], [-1.0], []],
            "extra": {"a": [1, None, None], "b": [None, 2, None]},
        }

    def test_a_run_without_turns_has_no_rollout_details(self):
        assert rollout_details([]) is None

    @cases(no_turns=[], two=[a_turn(a=1), a_turn(completion=(), logprobs=(), a=2)])
    def test_turns_of_gives_back_what_rollout_details_holds(self, turns):
        assert list(turns_of(AgentContext(rollout_details=rollout_details(turns)))) == turns

    def test_another_agents_turns_need_not_have_extra(self):
        (detail,) = rollout_details([a_turn()])
        del detail["extra"]
        assert list(turns_of(AgentContext(rollout_details=[detail]))) == [a_turn()]

    @cases(
        a_logprob_is_missing={"logprobs": [[-0.5]]},
        a_turn_has_no_logprobs={"logprobs": []},
        a_prompt_too_many={"prompt_token_ids": [[1], [1]]},
        an_empty_prompt={"prompt_token_ids": [[]]},
        NaN={"logprobs": [[-0.5, math.nan]]},
        an_extra_list_is_too_short={"extra": {"a": []}},
        an_extra_list_is_too_long={"extra": {"a": [1, 2]}},
    )
    def test_a_broken_rollout_is_an_error(self, wrong):
        (detail,) = rollout_details([a_turn(a=1)])
        context = AgentContext.model_construct(rollout_details=[detail | wrong])
        with pytest.raises(ValueError, match=r"zip\(\) argument|differ in length"):
            list(turns_of(context))

    @cases(
        the_one_named_reward=({"style": 0.5, "reward": 1}, 1),
        the_only_one=({"score": 0.25}, 0.25),
        several_without_that_name=({"a": 1, "b": 2}, None),
        none_at_all=({}, None),
        no_verifier=(None, None),
    )
    def test_a_trajectory_has_the_trials_reward(self, rewards, reward):
        assert trial_to_trajectory(a_trial(rewards)).reward == reward

    def test_a_trajectory_has_the_turns_of_all_steps(self):
        turns = [a_turn(prompt=(8,)), a_turn(prompt=(9,))]
        steps = [a_trial(turns=turns[:1]), a_trial(turns=turns[1:], stop_reason="max_turns")]
        whole = trial_to_trajectory(a_trial({"reward": 0.5}, steps=steps))
        assert (whole.turns, whole.stop_reason, whole.reward) == (turns, "max_turns", 0.5)

    @cases(
        the_agents_timeout=a_trial(error="AgentTimeoutError", stop_reason="cancelled"),
        a_command_that_failed=a_trial(error="NonZeroAgentExitCodeError"),
        no_turns=a_trial(turns=[]),
        no_reward=a_trial(None),
        a_step_that_timed_out=a_trial(steps=[a_trial(error="AgentTimeoutError"), a_trial()]),
        a_step_without_turns=a_trial(steps=[a_trial(), a_trial(turns=[])]),
    )
    def test_a_trial_that_harbor_scores_is_training_data(self, trial, monkeypatch):
        # Harbor before 0.25 has no such field.
        monkeypatch.delattr(TrialResult, "reward_valid", raising=False)
        assert trial_to_trajectory(trial).trial is trial

    @cases(
        an_error=a_trial(error="RuntimeError"),
        an_error_without_a_reward=a_trial(None, error="RuntimeError"),
        a_run_that_ended_in_error=a_trial(stop_reason="error"),
        neither_reward_nor_turns=a_trial(None, turns=[]),
        an_error_with_a_broken_reward=a_trial({"reward": math.nan}, error="RuntimeError"),
        a_failed_step=a_trial(steps=[a_trial(error="RuntimeError"), a_trial()]),
        a_step_that_ended_in_error=a_trial(steps=[a_trial(stop_reason="error"), a_trial()]),
        its_own_error_beside_its_steps=a_trial(error="RuntimeError", steps=[a_trial()]),
    )
    def test_a_trial_that_failed_is_no_training_data(self, trial, monkeypatch):
        # Harbor before 0.25 has no such field.
        monkeypatch.delattr(TrialResult, "reward_valid", raising=False)
        assert trial_to_trajectory(trial) is None

    @pytest.mark.parametrize("said", [True, False])
    def test_harbors_reward_valid_decides(self, said, monkeypatch):
        monkeypatch.setattr(TrialResult, "reward_valid", said, raising=False)
        assert (trial_to_trajectory(a_trial(error="RuntimeError")) is not None) is said

    def test_without_a_reward_harbors_word_does_not_count(self, monkeypatch):
        monkeypatch.setattr(TrialResult, "reward_valid", False, raising=False)
        assert trial_to_trajectory(a_trial(None)).reward is None

    @pytest.mark.parametrize("reward", [math.nan, math.inf])
    def test_a_reward_that_is_no_number_is_an_error(self, reward):
        with pytest.raises(ValueError, match="trial greet__1: a reward is not a finite number"):
            trial_to_trajectory(a_trial({"reward": 1, "style": reward}))

    def test_another_agents_trial_has_no_stop_reason(self):
        trial = a_trial()
        trial.agent_result.metadata = None
        assert trial_to_trajectory(trial).stop_reason is None

    def test_the_older_name_of_trial_to_trajectory_is_kept(self):
        assert basic_loop_agent._trial_to_trajectory is trial_to_trajectory


# ------------------------------------------------------------------------------------ the main job


def job_config(tinker: FakeTinker, jobs_dir: Path, agent: Any = None, **settings: Any) -> JobConfig:
    """A job on the example task, without a container. `agent` adds to the agent's settings."""
    agent = {
        "import_path": "basic_loop_agent:BasicLoopAgent",
        "model_name": tinker.options["model_name"],
        "kwargs": {"renderer_name": "qwen3_instruct"},
    } | (agent or {})
    settings = {
        "tasks": [{"path": ROOT / "examples/greet"}],
        "environment": {"import_path": "examples.fakes:HostEnvironment"},
        "verifier": {"import_path": "examples.fakes:HostVerifier"},
    } | settings
    return JobConfig(jobs_dir=jobs_dir, quiet=True, agents=[agent], **settings)


def run_job(*arguments: Any, **settings: Any) -> list[TrialResult]:
    """Run such a job. Returns its trials, read back from its files."""
    with asyncio.Runner() as runner:
        job = runner.run(Job.create(job_config(*arguments, **settings)))
        trials = runner.run(job.run()).trial_results
    folders = [Path(trial.trial_uri.removeprefix("file://")) for trial in trials]
    texts = [(folder / "result.json").read_text() for folder in folders]
    return [TrialResult.model_validate_json(text) for text in texts]


@pytest.fixture
def two_steps(tmp_path) -> dict[str, Any]:
    """The example task, twice over in one trial, as a job's setting."""
    task = tmp_path / "task"
    shutil.copytree(ROOT / "examples/greet", task)
    settings = 'schema_version = "1.3"\nmulti_step_reward_strategy = "mean"\n'
    for step in ("first", "second"):
        settings += f'[[steps]]\nname = "{step}"\n'
        shutil.copytree(task / "tests", task / f"steps/{step}/tests")
        shutil.copy(task / "instruction.md", task / f"steps/{step}")
    (task / "task.toml").write_text(settings)
    return {"tasks": [{"path": task}]}


# The right answer to the example task, another one, and none.
RIGHT, WRONG, GONE = "Hello, world!", "no", RuntimeError("the sampler is gone")


class TestJob:
    TWO_TURNS = {"kwargs": {"renderer_name": "qwen3", "max_turns": 2}}

    def test_a_jobs_trials_give_back_every_sampled_token(self, tinker, tmp_path):
        tinker.script(*[f"<think>a</think>{bash('ls')}", Reply("hello wo", cut_off=True)] * 2)
        trials = run_job(tinker, tmp_path, self.TWO_TURNS, n_attempts=2, n_concurrent_trials=1)
        turns = [turn for trial in trials for turn in trial_to_trajectory(trial).turns]
        recorded = [Sampled(*(getattr(turn, name) for name in IDS)) for turn in turns]
        assert sorted(recorded) == sorted(tinker.sampled)

    def test_a_trial_that_harbor_timed_out_is_scored(self, tinker, tmp_path):
        tinker.script(bash("ls"), forever)
        (trial,) = run_job(tinker, tmp_path, self.TWO_TURNS | {"override_timeout_sec": 1})
        whole = trial_to_trajectory(trial)
        assert trial.exception_info.exception_type == "AgentTimeoutError"
        assert (whole.reward, whole.stop_reason, len(whole.turns)) == (0.0, "cancelled", 1)

    def test_a_clients_timeout_is_not_scored(self, tinker, tmp_path):
        tinker.script(bash("ls"), TimeoutError("service is gone"))
        (trial,) = run_job(tinker, tmp_path, self.TWO_TURNS)
        assert trial.exception_info.exception_type == "RuntimeError"
        assert "service is gone" in trial.exception_info.exception_message
        assert (trial.verifier_result, trial_to_trajectory(trial)) == (None, None)

    @cases(first=[GONE, RIGHT], second=[RIGHT, GONE])
    def test_a_failed_step_is_no_training_data(self, replies, tinker, tmp_path, two_steps):
        tinker.script(*replies)
        (trial,) = run_job(tinker, tmp_path / "jobs", **two_steps)
        assert trial.verifier_result.rewards["reward"] is not None
        assert trial_to_trajectory(trial) is None

    @pytest.mark.skipif(not hasattr(BaseAgent, "resume"), reason="since Harbor 0.20")
    def test_a_later_step_resumes_the_conversation(self, tinker, tmp_path, two_steps):
        resumes = {"resume_trajectory": True}
        (trial,) = run_job(tinker, tmp_path / "jobs", resumes, **two_steps)
        first, second = trial_to_trajectory(trial).turns
        assert second.prompt_token_ids[: len(first.all_ids)] == first.all_ids

    @since_harbor_023
    @cases(a_bad_option=({"max_turn": 3}, "Unknown option 'max_turn'"), no_key=({}, NO_KEY))
    def test_a_job_is_refused_before_any_trial(self, kwargs, message, tinker, tmp_path, no_key):
        with pytest.raises(ValueError, match=message):
            asyncio.run(Job.create(job_config(tinker, tmp_path, {"kwargs": kwargs})))


# ------------------------------------------------------------------------------- the trainer


class Answer(SimpleNamespace):
    """An answer of Tinker's training client. Cookbook 0.5 awaits `result_async`, 0.6 itself."""

    async def result_async(self) -> Self:
        return self

    def __await__(self) -> Any:
        return self.result_async().__await__()


class FakeTraining:
    """Stands in for `tinker.ServiceClient` and for its clients. `sampler` samples."""

    def __init__(self, sampler: FakeTinker) -> None:
        self.sampler, self.batches, self.checkpoints = sampler, [], []

    def __getattr__(self, name: str) -> Any:
        # Cookbook 0.5 calls each method by its name with _async, 0.6 without.
        if name.endswith("_async"):
            return getattr(self, name.removesuffix("_async"))
        # What else is asked for does not matter here.
        return lambda *args, **kwargs: Answer(metrics={}, user_metadata={})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def create_rest_client(self) -> Self:
        return self

    async def create_lora_training_client(self, *args: Any, **kwargs: Any) -> Self:
        return self

    create_training_client_from_state_with_optimizer = create_lora_training_client

    async def save_weights_and_get_sampling_client(self, *args: Any, **kwargs: Any) -> Any:
        return self.sampler()

    create_sampling_client = save_weights_and_get_sampling_client

    def forward_backward(self, data: list[Any], **kwargs: Any) -> Answer:
        self.batches.append(data)
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return Answer(loss_fn_outputs=outputs)

    def save_state(self, name: str, **kwargs: Any) -> Answer:
        self.checkpoints.append(name)
        return Answer(path=f"tinker://{name}")

    save_weights_for_sampler = save_state


class Trainer:
    """Trains on examples/greet, four trials a step, one after the other."""

    def __init__(self, tinker: FakeTinker, folder: Path, monkeypatch: Any) -> None:
        self.module = importlib.import_module("examples.train")
        self.tinker, self.folder, self.training = tinker, folder, FakeTraining(tinker)
        # Nothing here is in Docker.
        monkeypatch.setattr(self.module, "CLEAN_UP", "true {0}")
        monkeypatch.setattr("tinker.ServiceClient", lambda **kwargs: self.training)

    def tasks(self, **options: Any) -> Any:
        defaults = {"tasks": [str(ROOT / "examples/greet")], "steps": 1, "group_size": 4}
        defaults |= {"environment": "examples.fakes:HostEnvironment", "concurrency": 1}
        defaults |= {"verifier": "examples.fakes:HostVerifier"}
        return self.module.HarborTasks(**defaults | options)

    def config(self, tasks: Any, config_class: Any, **options: Any) -> Any:
        defaults = {"model_name": self.tinker.options["model_name"], "max_tokens": 64}
        defaults |= {"renderer_name": "qwen3_instruct", "learning_rate": 0.5}
        defaults |= {"log_path": str(self.folder / "log")}
        return config_class(dataset_builder=tasks, **defaults | options)

    def main(self, *replies: Any, config: dict[str, Any] | None = None, **tasks: Any) -> None:
        self.tinker.script(*replies)
        self.module.main(self.config(self.tasks(**tasks), self.module.Config, **config or {}))

    def metric(self, name: str) -> dict[int, float]:
        """A metric's values by step."""
        lines = (self.folder / "log/metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: round(row[name], 3) for row in rows if name in row}


@pytest.fixture
def trainer(tinker, tmp_path, monkeypatch) -> Trainer:
    return Trainer(tinker, tmp_path, monkeypatch)


def sampled_in(datum: Any) -> tuple[list[int], list[float], float]:
    """The sampled ids of a datum, their logprobs, and their advantage."""
    names = ("target_tokens", "logprobs", "advantages")
    columns = [datum.loss_fn_inputs[name].to_torch().tolist() for name in names]
    tokens = [token for token in zip(*columns, strict=True) if token[1]]
    ids, logprobs, advantages = zip(*tokens, strict=True)
    (advantage,) = set(advantages)
    return list(ids), [round(logprob, 3) for logprob in logprobs], advantage


class TestTrainer:
    def test_each_trial_is_one_datum_with_its_own_logprobs(self, trainer):
        trainer.main(bash("ls"), RIGHT, WRONG, WRONG, RIGHT, agent_options={"max_turns": 2})
        first, second, *others = trainer.tinker.sampled
        two_turns = first.completion + second.completion, first.logprobs + second.logprobs, 0.5
        expected = [two_turns]
        for turn, advantage in zip(others, (-0.5, -0.5, 0.5), strict=True):
            expected.append((turn.completion, turn.logprobs, advantage))
        assert [sampled_in(datum) for datum in trainer.training.batches[0]] == expected

    def test_a_second_start_goes_on_with_more_steps(self, trainer):
        trainer.main(*[RIGHT, WRONG] * 4, steps=2)
        trainer.main(*[RIGHT, WRONG] * 2, steps=3)
        assert len(trainer.training.batches) == 3
        assert trainer.metric("progress/done_frac") == {0: 0.5, 1: 1.0, 2: 1.0}

    def test_weights_are_evaluated_at_both_ends(self, trainer):
        tests = {"test_tasks": [str(ROOT / "examples/greet")], "test_group_size": 1}
        trainer.main(WRONG, *[RIGHT, WRONG] * 4, RIGHT, **tests, steps=2)
        assert trainer.metric("test/env/all/solved") == {0: 0.0, 2: 1.0}

    def test_a_step_of_failed_trials_ends_the_training(self, trainer):
        with pytest.raises(SystemExit, match=r"(?i)every trial.*RuntimeError.*the sampler is gone"):
            trainer.main(*[GONE] * 4, steps=2)
        assert trainer.training.checkpoints == []

    def test_the_same_command_goes_on_after_a_failed_step(self, trainer):
        with pytest.raises(SystemExit):
            trainer.main(*[GONE] * 4, steps=2)
        trainer.main(*[RIGHT, WRONG] * 4, steps=2)
        assert len(trainer.training.batches) == 2

    def test_a_step_with_some_failed_trials_is_trained(self, trainer):
        # The cookbook retries a failed trial three times.
        trainer.main(RIGHT, WRONG, RIGHT, *[GONE] * 4)
        assert len(trainer.training.batches[0]) == 3
        assert trainer.metric("rollout_errors/RuntimeError") == {0: 1.0}

    def test_a_cancelled_verifier_counts_as_a_failed_trial(self, trainer, monkeypatch):
        async def verify(verifier: HostVerifier) -> Any:
            result = await scored(verifier)
            if result.rewards["reward"] == 0:
                raise asyncio.CancelledError("the remote call was cancelled")
            return result

        scored = HostVerifier.verify
        monkeypatch.setattr(HostVerifier, "verify", verify)
        # The cookbook retries a failed trial three times.
        trainer.main(RIGHT, RIGHT, RIGHT, *[WRONG] * 4)
        assert len(trainer.training.batches[0]) == 3
        assert trainer.metric("rollout_errors/CancelledError") == {0: 1.0}

    @cases(
        environment=({"environment": "dockr"}, "dockr"),
        environments_module=({"environment": "nothing:Environment"}, "nothing"),
        verifiers_module=({"verifier": "nothing:Verifier"}, "nothing"),
        verifiers_class=({"verifier": "examples.fakes:Nothing"}, "Nothing"),
        agent=({"agent": "nothing:Agent"}, "nothing"),
        option=({"agent_options": {"max_turn": 2}}, "max_turn"),
        limit=({"agent_options": {"max_tokens": 9}}, "max_tokens"),
        tasks=({"tasks": ["examples/nothing"]}, "examples/nothing"),
        trials_field=({"trial_options": {"agent": 3}}, "agent"),
    )
    def test_a_typo_is_an_error_before_anything_connects(self, tasks, message, trainer):
        with pytest.raises(ValueError, match=message):
            trainer.main(**tasks)
        assert not (trainer.folder / "log").exists()

    def test_streamed_minibatches_end(self, trainer):
        stream = cookbook.StreamMinibatchConfig(groups_per_batch=1, num_minibatches=1)
        config = {"stream_minibatch_config": stream}
        trainer.main(*[RIGHT, WRONG] * 4, config=config, steps=2)
        assert len(trainer.training.batches) == 2

    def test_the_cookbooks_own_config_takes_harbor_tasks(self, trainer):
        trainer.tinker.script(*[RIGHT, WRONG] * 2)
        model = {"model_name": trainer.tinker.options["model_name"]}
        model |= {"renderer_name": "qwen3_instruct"}
        tasks = trainer.tasks(**model, trials_dir=str(trainer.folder / "trials"))
        tolerance = trainer.module.HarborTrials(MinViableGroup())
        more = {"recipe_name": "own", "rollout_error_tolerance": tolerance}
        asyncio.run(cookbook.main(trainer.config(tasks, cookbook.Config, **more)))
        assert len(trainer.training.batches[0]) == 4

    def test_the_users_error_tolerance_is_kept(self, trainer):
        strict = MinViableGroup(min_successful=4, max_retries=1)
        trainer.main(RIGHT, GONE, WRONG, RIGHT, WRONG, config={"rollout_error_tolerance": strict})
        assert len(trainer.training.batches[0]) == 4

    def test_a_group_can_be_pickled(self, trainer):
        (group,) = trainer.tasks().groups([str(ROOT / "examples/greet")], 4)
        copied = pickle.loads(pickle.dumps(group))
        assert (copied.task, copied.size, copied.tasks) == (group.task, 4, group.tasks)

    def test_each_stop_reason_has_a_metric(self, trainer):
        trainer.main(RIGHT, *[bash("ls")] * 6, agent_options={"max_turns": 2})
        means = {reason: trainer.metric(f"env/all/stop/{reason}") for reason in StopReason}
        none = {reason: {0: 0.0} for reason in StopReason}
        assert means == none | {"completed": {0: 0.25}, "max_turns": {0: 0.75}}
        assert trainer.metric("env/all/n_prefix_breaks") == {0: 0.0}


def score(task: Path, folder: Path, script: str) -> str:
    """The reward for a script: both run by bash in `folder`, whose paths replace a container's."""
    shutil.copytree(task / "environment", folder / "home")
    (folder / "verifier").mkdir()
    test = (task / "tests/test.sh").read_text().replace("/logs/", f"{folder}/")
    for text in (script, test):
        subprocess.run(["bash", "-c", text], cwd=folder / "home", stderr=subprocess.DEVNULL)
    return (folder / "verifier/reward.txt").read_text().strip()


class TestShellTasks:
    @cases(**{kind.name: kind for kind in shell_tasks.KINDS + shell_tasks.NEW_KINDS})
    def test_a_shell_task_gives_its_rewards(self, kind, tmp_path):
        task = tmp_path / "task"
        shell_tasks.write_task(task, kind, shell_tasks.WORDS, random.Random(0))
        solution = (task / "solution/solve.sh").read_text()
        near_miss = (task / "solution/near_miss.sh").read_text()
        scripts = {"solution": solution, "near": near_miss, "nothing": "true"}
        rewards = {name: score(task, tmp_path / name, text) for name, text in scripts.items()}
        assert rewards == {"solution": "1", "near": "0.5", "nothing": "0"}
