"""The specification of basic_loop_agent.py. Harbor's Chat, TinkerLLM, LiteLLM and Job, the renderers and the tokenizer
are real; the model's answers, the environment and, in examples/offline.yaml, the verifier are the fakes below."""

import asyncio
import gc
import importlib.util
import inspect
import json
import logging
import os
import random
import re
import shlex
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

# The price list that comes with litellm: its download would hold up an offline machine for 8 seconds.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.llms.base import ContextLengthExceededError
from harbor.models import trajectories as atif
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig
from harbor.models.trial.result import TrialResult
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

from basic_loop_agent import _FENCE, _IDS, _TIMED_SCRIPT, BasicLoopAgent, StopReason, _trial_to_trajectory, to_tinker

ROOT = Path(__file__).parent

# Fakes for real jobs, named by import path. Nothing that a model says is ever run on the host.


class HostEnvironment(BaseEnvironment):
    """An environment without a container: the log folders are the host's own, and every command succeeds, unrun."""

    @staticmethod
    def type() -> str:
        return "host"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
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

    async def verify(self) -> VerifierResult:
        answer, completion = (
            "".join(filter(str.isalpha, path.read_text().lower()))
            for path in (self.task.paths.tests_dir / "answer.txt", self.trial_paths.agent_dir / "completion.txt")
        )
        return VerifierResult(rewards={"reward": float(answer == completion)})


# Fakes for single runs.


async def next_answer(script: list[Any]) -> Any:
    """A script's next item, its last one again and again: returned, raised if an exception, awaited if a function."""
    answer = script.pop(0) if len(script) > 1 else script[0]
    if callable(answer):
        answer = await answer()
    if isinstance(answer, BaseException):
        raise answer
    return answer


class ScriptedEnvironment:
    """Answers `exec` from a script of results. Keeps the commands."""

    def __init__(self, *script: Any) -> None:
        self.script, self.commands = list(script) or [ExecResult(return_code=0)], []

    async def exec(self, command: str, **kwargs: Any) -> ExecResult:
        self.commands.append(command)
        return await next_answer(self.script)


@dataclass
class Sampled:
    """What the Tinker sampler returns for one call; logprobs "own" are distinct floats, one a token."""

    text: str = "hello"
    stop_reason: str = "stop"
    logprobs: Any = "own"
    tokens: list[int] | None = None


class FakeTinker:
    """Stands in for `tinker.ServiceClient`, the class: counts what is built and scripts what the samplers return."""

    def __init__(self, tokenizer_dir: str, *script: Any) -> None:
        self.name, self.script = tokenizer_dir, list(script) or [Sampled()]
        self.services, self.samplers, self.requests, self.returned = 0, [], [], []

    def __call__(self, **kwargs: Any) -> "FakeTinker":
        self.services += 1
        return self

    async def create_sampling_client_async(self, **source: str) -> "FakeTinker":
        await asyncio.sleep(0.01)
        self.samplers.append(source)
        return self

    async def sample_async(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        self.requests.append((prompt.to_ints(), sampling_params))
        await asyncio.sleep(0)
        answer = await next_answer(self.script)
        tokens = answer.tokens if answer.tokens is not None else self.encode(answer.text, answer.stop_reason)
        own = [-((len(self.returned) + 1) + i / 1000) for i in range(len(tokens))]
        logprobs = own if answer.logprobs == "own" else answer.logprobs
        self.returned.append((prompt.to_ints(), tokens, logprobs))
        sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=answer.stop_reason)
        return SimpleNamespace(sequences=[sequence])

    def encode(self, text: str, stop_reason: str) -> list[int]:
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        ids = get_tokenizer(self.name).encode(text, add_special_tokens=False)
        return ids + [2] * (stop_reason == "stop")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte-level tokenizer with Qwen's special tokens; <|im_end|>, id 2, ends a reply."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello world user assistant bash"], trainer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tinker_service(tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeTinker]:
    def install(*script: Any) -> FakeTinker:
        fake = FakeTinker(tokenizer_dir, *script)
        monkeypatch.setattr("tinker.ServiceClient", fake)
        return fake

    return install


@pytest.fixture
def agent(tokenizer_dir: str, tmp_path: Path) -> Callable[..., BasicLoopAgent]:
    def build(**options: Any) -> BasicLoopAgent:
        if options.get("model_client") != "litellm":
            options = {"model_name": tokenizer_dir, "renderer_name": "qwen3_instruct"} | options
        return BasicLoopAgent(**{"logs_dir": tmp_path, "model_name": "openai/mock"} | options)

    return build


def run(agent: BasicLoopAgent, environment: Any = None, instruction: str = "do it") -> AgentContext:
    """One run in an event loop of its own; a run that raises has its exception in `context.raised`."""
    context = Context()

    async def main() -> None:
        try:
            await agent.run(instruction=instruction, environment=environment or ScriptedEnvironment(), context=context)
        except Exception as error:
            context.raised = error

    asyncio.run(main())
    return context


class Context(AgentContext):
    raised: Any = None

    @property
    def turns(self) -> list[tuple[list[int], list[int], list[float]]]:
        """The record as (prompt ids, completion ids, logprobs) of each turn; fails if it is not aligned."""
        assert self.rollout_details is None or len(self.rollout_details) == 1
        segment = (self.rollout_details or [{name: [] for name in _IDS}])[0]
        turns = list(zip(*(segment[name] for name in _IDS), strict=True))
        assert all(len(completion) == len(logprobs) for _, completion, logprobs in turns)
        return turns


def needs(module: str, reason: str) -> Any:
    try:
        return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)
    except ModuleNotFoundError:
        return pytest.mark.skip(reason=reason)


def job_config(jobs_dir: Path, kwargs: dict[str, Any], **config: Any) -> JobConfig:
    """A job over the example task with the fakes above in place of the container and the verifier."""
    agents = [{"import_path": "basic_loop_agent:BasicLoopAgent", "model_name": "openai/mock", "kwargs": kwargs}]
    fakes = {kind: {"import_path": f"{__name__}:Host{kind.title()}"} for kind in ("environment", "verifier")}
    tasks = [{"path": ROOT / "examples/greet"}]
    return JobConfig.model_validate(
        {"jobs_dir": jobs_dir, "quiet": True, "agents": agents, "tasks": tasks} | fakes | config
    )


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended meanwhile
        return b""


def trajectory(agent: BasicLoopAgent) -> Any:
    return atif.Trajectory.model_validate_json((agent.logs_dir / "trajectory.json").read_text())


def completion(agent: BasicLoopAgent) -> str:
    return (agent.logs_dir / "completion.txt").read_text(encoding="utf-8")


def bash(*commands: str, language: str = "bash") -> str:
    return "\n".join(f"I will run this:\n\n```{language}\n{command}\n```\n" for command in commands)


# The model clients and their cache.


def test_sixteen_concurrent_trials_share_one_client_and_one_sampling_client(agent, tinker_service):
    fake, built = tinker_service(), []

    class Counted(BasicLoopAgent):
        def _build_llm(self) -> Any:
            built.append(super()._build_llm())
            return built[-1]

    async def trial(number: int) -> Any:
        one = Counted(logs_dir=agent().logs_dir / str(number), model_name=fake.name, renderer_name="qwen3_instruct")
        await one.run("hello", ScriptedEnvironment(), AgentContext())
        return await one._shared_llm()

    async def main() -> list[Any]:
        return await asyncio.gather(*map(trial, range(16)))

    clients = asyncio.run(main())
    assert len(built) == len(fake.samplers) == fake.services == 1
    assert all(client is built[0] for client in clients) and len(fake.returned) == 16


def test_another_event_loop_or_configuration_gets_a_client_of_its_own_on_the_same_service(agent, tinker_service):
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
    same = agent(max_turns=5, system_prompt="x", command_timeout_sec=1, max_output_chars=1)
    asked = [base, same, *others]
    first, again = (both := asyncio.run(clients(*asked, *asked)))[: len(asked)], both[len(asked) :]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert first[0] is first[1] and len(set(map(id, first))) == 1 + len(others)
    assert asyncio.run(clients(base))[0] not in first
    assert fake.services == 1 and len(fake.samplers) == 2 + len(others)
    assert fake.samplers[:2] == [{"base_model": fake.name}, {"model_path": "tinker://run/sampler_weights/1"}]


def test_a_build_that_fails_or_is_cancelled_is_tried_again_by_the_next_trial(agent, tinker_service, monkeypatch):
    fake, build = tinker_service(), BasicLoopAgent._build_llm
    failures = [None, None, RuntimeError("no tokenizer")]  # the last comes first
    started = asyncio.Event()

    def flaky(self: BasicLoopAgent) -> Any:
        if failure := failures.pop():
            raise failure
        return build(self)

    async def slow(**source: str) -> Any:
        started.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(BasicLoopAgent, "_build_llm", flaky)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="no tokenizer"):
            await agent()._shared_llm()
        with monkeypatch.context() as patch:
            patch.setattr(fake, "create_sampling_client_async", slow)
            context = AgentContext()
            trial = asyncio.create_task(agent().run("hello", ScriptedEnvironment(), context))
            await started.wait()
            trial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trial
            assert context.metadata == {"stop_reason": "cancelled", "n_episodes": 0, "n_turns_without_ids": 0}
        one, other = await asyncio.gather(agent()._shared_llm(), agent()._shared_llm())
        assert one is other

    asyncio.run(main())
    assert len(fake.samplers) == 1


def test_the_cache_drops_the_least_recently_used_client_and_those_of_a_closed_loop(agent, tinker_service):
    tinker_service()

    async def main() -> list[Any]:
        first = await agent(max_tokens=1)._shared_llm()
        gone = weakref.ref(await agent(max_tokens=2)._shared_llm())
        for max_tokens in range(3, 10):
            assert await agent(max_tokens=1)._shared_llm() is first
            await agent(max_tokens=max_tokens)._shared_llm()
        gc.collect()
        assert gone() is None and await agent(max_tokens=1)._shared_llm() is first
        together = await asyncio.gather(*(agent(max_tokens=99)._shared_llm() for _ in range(4)))  # waits on a lock
        return [weakref.ref(first), weakref.ref(together[0])]

    clients = asyncio.run(main())
    gc.collect()
    assert [client() for client in clients] == [None, None]


def test_each_client_is_harbors_own_and_gets_the_options(agent, tinker_service):
    from harbor.llms.lite_llm import LiteLLM
    from harbor.llms.tinker import TinkerLLM

    tinker = agent(
        max_tokens=7, temperature=0.5, llm_kwargs={"seed": 3, "top_p": 0.9, "context_limit": 99}
    )._build_llm()
    assert isinstance(tinker, TinkerLLM) and tinker._collect_rollout_details
    assert (tinker._max_tokens, tinker._temperature, tinker._seed, tinker._top_p) == (7, 0.5, 3, 0.9)
    assert tinker.get_model_context_limit() == 99 and agent(temperature=None)._build_llm()._temperature == 1.0

    options = {"max_tokens": 7, "api_base": "http://localhost:1/v1", "llm_kwargs": {"top_p": 0.9}}
    lite = agent(model_client="litellm", **options)._build_llm()
    assert isinstance(lite, LiteLLM) and not lite._collect_rollout_details
    assert (lite._temperature, lite._api_base) == (1.0, "http://localhost:1/v1")
    assert lite._llm_kwargs == {"max_tokens": 7, "top_p": 0.9}
    vllm = agent(model_client="litellm", temperature=None, collect_rollout_details=True)._build_llm()
    assert vllm._temperature is None and vllm._collect_rollout_details


def test_sampling_the_base_model_is_logged_and_dropped_thinking_is_warned_about(agent, tinker_service, caplog):
    with caplog.at_level(logging.INFO):
        agent(renderer_name="qwen3", max_turns=1)._build_llm()
        agent(renderer_name="qwen3_instruct", max_turns=2, model_path="tinker://run/w")._build_llm()
    assert caplog.text.count("Sampling the base model") == 1 and "WARNING" not in caplog.text
    agent(renderer_name="qwen3", max_turns=2)._build_llm()
    assert "training example of its own" in caplog.text and "_preserve_thinking" in caplog.text


def test_importing_the_module_loads_no_model_library():
    code = "import basic_loop_agent, sys; print({'torch', 'transformers', 'tinker', 'litellm'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


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
        ({"model_path": "runs/1"}, "model_path must be a Tinker checkpoint: tinker://"),
        ({"llm_kwargs": {"max_tokens": 3}}, "llm_kwargs holds max_tokens: use the option of that name"),
        ({"model_client": "litellm", "model_path": "tinker://run/w"}, "set model_client=tinker"),
        ({"model_name": None}, "no model: name one with -m"),
    ],
)
def test_a_bad_option_is_one_clear_error(agent, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}") as error:
        BasicLoopAgent(**{"logs_dir": Path(), "model_name": "m", "llm_kwargs": {"api_key": "sk-secret"}} | options)
    assert "sk-secret" not in str(error.value)


def test_a_client_argument_that_does_not_exist_is_one_clear_error(agent, tinker_service):
    with pytest.raises(ValueError, match="llm_kwargs: TinkerLLM takes no tempreature"):
        agent(llm_kwargs={"tempreature": 1})._build_llm()


def test_tinker_without_its_packages_says_what_to_install(agent, monkeypatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(ValueError, match=r"pip install 'harbor\[tinker\]'.*model_client=litellm"):
        agent()
    agent(model_client="litellm")


@needs("harbor.agents.options", "Harbor checks options before any trial since 0.23")
def test_a_bad_option_ends_a_job_before_any_trial(tmp_path):
    from harbor.job import Job

    config = job_config(tmp_path, {"model_client": "litellm", "max_turn": 3})
    with pytest.raises(ValueError, match="Unknown option 'max_turn'"):
        asyncio.run(Job.create(config))
    assert not list(tmp_path.rglob("result.json"))


@needs("harbor.agents.options", "harbor agent schema exists since 0.23")
def test_the_schema_describes_every_option():
    schema, own = BasicLoopAgent.options_schema()["properties"], BasicLoopAgent.options_model.__annotations__
    described = {name: schema[name] for name in own}
    signature = set(inspect.signature(BasicLoopAgent.__init__).parameters) - {"self", "model_name", "kw"}
    assert signature <= set(described) and all(option["description"] for option in described.values())


# One completion.


def test_one_completion_is_on_the_context_in_completion_txt_and_in_the_trajectory(agent, tinker_service):
    fake = tinker_service(Sampled("hello world"))
    one = agent(system_prompt="Be brief.", max_tokens=9, temperature=0.5)
    context = run(one, instruction="greet")
    ((prompt, tokens, logprobs),) = fake.returned
    assert context.turns == [(prompt, tokens, logprobs)]
    assert (context.n_input_tokens, context.n_output_tokens, context.n_cache_tokens) == (len(prompt), len(tokens), 0)
    assert context.cost_usd is None
    assert context.metadata == {"stop_reason": "completed", "n_episodes": 1, "n_turns_without_ids": 0}
    assert completion(one) == "hello world"
    steps = trajectory(one).steps
    assert [(step.source, step.message) for step in steps] == [
        ("system", "Be brief."),
        ("user", "greet"),
        ("agent", "hello world"),
    ]
    metrics = steps[-1].metrics
    assert (metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs) == (prompt, tokens, logprobs)
    assert trajectory(one).extra["stop_reason"] == "completed" and trajectory(one).agent.model_name == fake.name
    assert (fake.requests[0][1].max_tokens, fake.requests[0][1].temperature) == (9, 0.5)


def test_nothing_in_a_single_completion_is_ever_executed(agent, tinker_service):
    tinker_service(Sampled(bash("rm -rf /")))
    environment = ScriptedEnvironment()
    context = run(agent(max_turns=1), environment)
    assert environment.commands == [] and context.metadata["stop_reason"] == "completed"


def test_a_reply_cut_off_within_the_thinking_that_its_template_opened_has_no_answer(agent, tinker_service):
    fake = tinker_service(Sampled("I think " + bash("rm x"), "length"))
    one = agent(renderer_name="qwen3_5")
    assert run(one).turns == fake.returned and completion(one) == ""
    assert trajectory(one).steps[-1].reasoning_content == "I think " + bash("rm x")


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
def test_thinking_is_kept_apart_from_the_answer_in_whole_and_in_cut_off_replies(agent, tinker_service, stop_reason):
    fake = tinker_service(Sampled("<think>who?</think>hello world", stop_reason))
    one = agent(renderer_name="qwen3")
    context = run(one)
    assert completion(one) == trajectory(one).steps[-1].message == "hello world"
    assert trajectory(one).steps[-1].reasoning_content == "who?" and context.turns == fake.returned


def test_a_reply_cut_off_within_its_thinking_has_no_answer(agent, tinker_service):
    fake = tinker_service(Sampled("<think>who", "length"))
    one = agent(renderer_name="qwen3")
    context = run(one)
    assert completion(one) == "" and trajectory(one).steps[-1].reasoning_content == "who"
    assert context.turns == fake.returned


def test_lone_surrogates_in_instruction_output_and_reply_reach_neither_tokenizer_nor_file(
    agent, tinker_service, monkeypatch
):
    tinker_service(Sampled(bash("ls")), Sampled("done"))
    tinker = agent(max_turns=3, system_prompt="\udc80")
    out = ExecResult.model_construct(stdout="a\udcff", stderr=b"b\xff", return_code=0)
    assert run(tinker, ScriptedEnvironment(out), "x\ud83d\ude00\udc80").raised is None
    assert trajectory(tinker).steps[1].message == "x😀\ufffd"
    assert "a\ufffd\nb\ufffd" in trajectory(tinker).steps[2].observation.results[0].content

    requests = api(monkeypatch, bash("echo \udc80"), "\ud800 done")
    lite = agent(model_client="litellm", max_turns=3)
    assert run(lite, ScriptedEnvironment(out)).raised is None and completion(lite) == "\ufffd done"
    json.dumps(requests[-1]["messages"], ensure_ascii=False).encode()


# API models. The fake stands at litellm's door: Harbor's LiteLLM calls it as it calls any provider.


def api(monkeypatch: pytest.MonkeyPatch, *script: Any, finish: str = "stop", ids: bool = False) -> list[dict]:
    import litellm

    requests, answers = [], list(script)

    async def acompletion(**request: Any) -> Any:
        requests.append({**request, "messages": [dict(message) for message in request["messages"]]})
        answer = await next_answer(answers)
        choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": finish}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        response = litellm.ModelResponse(model="mock", choices=[choice], usage=usage)
        if ids:  # as litellm passes on what vLLM answers
            response.prompt_token_ids = [1, 2]
            response.choices[0].provider_specific_fields = {"token_ids": [3, 4, 5]}
            content = [{"token": "x", "logprob": -0.5, "bytes": [], "top_logprobs": []}] * 3
            response.choices[0].logprobs = litellm.types.utils.ChoiceLogprobs(content=content)
        return response

    monkeypatch.setattr(litellm, "acompletion", acompletion)
    return requests


def test_an_api_model_gets_the_options_and_leaves_text_and_usage_but_no_invented_cost(agent, monkeypatch):
    requests = api(monkeypatch, "hello")
    one = agent(model_client="litellm", max_tokens=7, temperature=None)
    context = run(one)
    assert requests[0]["max_tokens"] == 7
    assert not {"temperature", "logprobs", "extra_body"} & requests[0].keys()
    assert (context.n_input_tokens, context.n_output_tokens, context.n_cache_tokens) == (10, 3, 0)
    assert context.cost_usd is None and context.rollout_details is None and completion(one) == "hello"


def test_litellms_own_offline_answer_needs_no_patch_and_has_a_price_where_litellm_knows_one(agent):
    one = agent(model_client="litellm", model_name="openai/gpt-4o", llm_kwargs={"mock_response": "hello"})
    assert run(one).cost_usd > 0 and completion(one) == "hello"


def test_a_server_that_returns_token_ids_is_recorded_like_tinker(agent, monkeypatch):
    requests = api(monkeypatch, "hello", ids=True)
    context = run(agent(model_client="litellm", collect_rollout_details=True))
    assert context.turns == [([1, 2], [3, 4, 5], [-0.5] * 3)]
    assert requests[0]["logprobs"] is True and requests[0]["extra_body"] == {"return_token_ids": True}


def test_token_ids_that_were_asked_for_and_not_delivered_are_an_error(agent, monkeypatch):
    api(monkeypatch, "hello")
    one = agent(model_client="litellm", collect_rollout_details=True)
    context = run(one)
    assert "collect_rollout_details" in str(context.raised) and completion(one) == "hello"
    assert context.metadata == {"stop_reason": "error", "n_episodes": 1, "n_turns_without_ids": 1}


def test_a_turn_that_came_without_its_completion_ids_is_left_out_and_counted(agent, monkeypatch):
    api(monkeypatch, "hello", ids=True)
    from harbor.llms.lite_llm import LiteLLM

    monkeypatch.setattr(LiteLLM, "_extract_token_ids", lambda self, response: ([1, 2], None))
    monkeypatch.setattr(LiteLLM, "_extract_logprobs", lambda self, response: None)
    context = run(agent(model_client="litellm", collect_rollout_details=True))
    assert context.rollout_details is None and context.metadata["n_turns_without_ids"] == 1


def test_a_full_context_on_the_first_call_is_no_error_even_where_ids_are_asked_for(agent, monkeypatch):
    import litellm

    api(monkeypatch, litellm.ContextWindowExceededError("too long", "mock", "openai"))
    context = run(agent(model_client="litellm", collect_rollout_details=True))
    assert context.raised is None and context.metadata["stop_reason"] == "context_overflow"


def test_thinking_without_its_opening_tag_is_neither_answer_nor_commands(agent, monkeypatch):
    api(monkeypatch, f"I could\n{bash('rm x')}\nbut no.\n</think>\n\ndone")
    one, environment = agent(model_client="litellm", max_turns=3), ScriptedEnvironment()
    run(one, environment)
    assert completion(one) == "done" and environment.commands == []


def test_a_cut_off_api_reply_keeps_its_text_usage_and_ids(agent, monkeypatch):
    api(monkeypatch, bash("ls"), finish="length", ids=True)
    one, environment = agent(model_client="litellm", collect_rollout_details=True, max_turns=5), ScriptedEnvironment()
    context = run(one, environment)
    assert context.metadata["stop_reason"] == "max_tokens" and completion(one) == bash("ls")
    assert context.n_output_tokens == 3 and context.turns == [([1, 2], [3, 4, 5], [-0.5] * 3)]
    assert environment.commands == []


def test_a_full_context_ends_the_run_normally_and_an_api_error_is_raised_unchanged(agent, monkeypatch):
    import litellm

    full = litellm.ContextWindowExceededError("too long", "mock", "openai")
    api(monkeypatch, bash("ls"), full)
    context = run(agent(model_client="litellm", max_turns=5))
    assert context.raised is None and context.metadata["stop_reason"] == "context_overflow"
    refused = litellm.AuthenticationError("bad key", "openai", "mock")
    api(monkeypatch, bash("ls"), refused)
    one = agent(model_client="litellm", max_turns=5)
    context = run(one)
    assert context.raised is refused and context.metadata == {
        "stop_reason": "error",
        "n_episodes": 1,
        "n_turns_without_ids": 1,
    }
    assert completion(one) == bash("ls")


# The loop.


def test_the_loop_runs_every_block_of_a_reply_as_one_script_until_a_reply_has_none(agent, tinker_service):
    fake = tinker_service(Sampled(bash("ls", "cat x")), Sampled(bash("pwd", language="sh")), Sampled("done"))
    environment = ScriptedEnvironment(ExecResult(stdout="x\n", stderr="no x", return_code=1), ExecResult(return_code=0))
    one = agent(max_turns=9)
    context = run(one, environment)
    assert context.metadata["stop_reason"] == "completed" and context.turns == fake.returned
    assert "ls\n\ncat x" in environment.commands[0] and "pwd" in environment.commands[1]
    steps = trajectory(one).steps
    assert [step.source for step in steps] == ["system", "user", "agent", "agent", "agent"]
    assert "```bash" in steps[0].message and "fresh shell" in " ".join(steps[0].message.split())
    assert steps[2].tool_calls[0].arguments == {"command": "ls\n\ncat x\n"}
    assert steps[2].observation.results[0].content == "Exit code: 1\nOutput:\nx\nno x"
    assert steps[3].observation.results[0].content == "Exit code: 0\nOutput:\n(none)"
    assert completion(one) == "done"
    first, second = fake.returned[0], fake.returned[1]
    assert second[0][: len(first[0] + first[1])] == first[0] + first[1], "a prompt extends the turn before"


@pytest.mark.parametrize(
    ("reply", "runs"),
    [
        (bash("a"), "a\n"),
        ("```sh\na\n```", "a\n"),
        ("1. so:\n   ```bash\n   a\n   ```", "   a\n"),
        ("````bash\ncat <<E\n```\nE\n````", "cat <<E\n```\nE\n"),
        ("````markdown\n```bash\nrm x\n```\n````", None),
        ("```python\na\n```", None),
        ("```bash\nrm x", None),
        ("```bash\r\na\r\n```", "a\n"),
        ("```bash\nprintf 'a\0b'\n```", "printf 'ab'\n"),
        ("run `ls`", None),
    ],
)
def test_only_whole_fenced_bash_blocks_are_run(agent, tinker_service, reply, runs):
    tinker_service(Sampled(reply), Sampled("done"))
    environment, one = ScriptedEnvironment(), agent(max_turns=2)
    run(one, environment)
    calls = [call.arguments["command"] for step in trajectory(one).steps for call in step.tool_calls or []]
    assert calls == ([runs] if runs else []) and len(environment.commands) == len(calls)


def test_a_reply_of_nothing_but_opened_fences_is_searched_once_not_once_a_fence():
    """Else the search takes time with the square of the reply's length: 98 s of a stopped event loop for 256 KB."""
    assert len(_FENCE.findall("```bash\n" * 1000)) == 1


def test_the_commands_of_the_last_turn_are_still_run(agent, tinker_service):
    tinker_service(Sampled(bash("ls")))
    environment = ScriptedEnvironment()
    context = run(agent(max_turns=3), environment)
    assert context.metadata["stop_reason"] == "max_turns" and context.metadata["n_episodes"] == 3
    assert len(environment.commands) == 3


def test_a_cut_off_reply_is_recorded_but_not_run_and_exactly_max_tokens_is_not_cut_off(agent, tinker_service):
    fake = tinker_service(Sampled(bash("rm x"), "length"))
    environment, one = ScriptedEnvironment(), agent(max_turns=3)
    context = run(one, environment)
    assert context.metadata["stop_reason"] == "max_tokens" and environment.commands == []
    assert context.turns == fake.returned and completion(one) == bash("rm x")
    whole = tinker_service(Sampled("hello world"))
    length = len(whole.encode("hello world", "stop"))
    assert run(agent(max_tokens=length)).metadata["stop_reason"] == "completed"


def test_a_long_conversation_gets_shorter_replies_and_then_ends_as_context_overflow(agent, tinker_service):
    fake = tinker_service(Sampled(bash("ls")))
    context = run(agent(max_turns=99, system_prompt="x", max_tokens=100, llm_kwargs={"context_limit": 300}))
    assert context.metadata["stop_reason"] == "context_overflow" and len(context.turns) > 2
    room = [300 - len(prompt) for prompt, _ in fake.requests]
    assert [params.max_tokens for _, params in fake.requests] == [min(100, left) for left in room]
    assert min(room) < 100 and context.turns == fake.returned


def test_a_reply_that_the_renderer_cannot_parse_is_recorded_before_the_error_is_raised(
    agent, tinker_service, monkeypatch
):
    from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer

    broken = ZeroDivisionError("renderer")

    def parse(self: Any, tokens: list[int]) -> Any:
        raise broken

    monkeypatch.setattr(Qwen3InstructRenderer, "parse_response", parse)
    fake = tinker_service()
    context = run(agent())
    assert context.raised is broken and context.metadata["stop_reason"] == "error" and context.turns == fake.returned


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ExecResult(return_code=3), "Exit code: 3\nOutput:\n(none)"),
        (ExecResult(stdout="", stderr=None, return_code=0), "Exit code: 0\nOutput:\n(none)"),
        (ExecResult(stdout="a" * 500_000 + "b" * 500_000, return_code=0), "999900 characters left out"),
        (TimeoutError(), "Exit code: 124\nOutput:\n[no answer from the environment"),
    ],
)
def test_the_model_is_told_however_a_command_ends(agent, tinker_service, answer, told):
    tinker_service(Sampled(bash("x")), Sampled("done"))
    one = agent(max_turns=2, max_output_chars=100)
    assert run(one, ScriptedEnvironment(answer)).metadata["stop_reason"] == "completed"
    content = trajectory(one).steps[2].observation.results[0].content
    assert told in content and len(content) < 200
    if "left out" in told:
        assert content.startswith("Exit code: 0\nOutput:\n" + "a" * 50) and content.endswith("b" * 50)


def test_an_environment_that_is_gone_is_raised_unchanged_with_the_turns_recorded(agent, tinker_service):
    fake, gone = tinker_service(Sampled(bash("x"))), RuntimeError("container is gone")
    one = agent(max_turns=2)
    context = run(one, ScriptedEnvironment(gone))
    assert context.raised is gone and context.turns == fake.returned and completion(one) == bash("x")
    assert trajectory(one).extra["stop_reason"] == "error" and trajectory(one).steps[-1].tool_calls


def test_a_script_over_its_time_is_ended_with_all_it_started_and_keeps_its_output(agent, tinker_service, tmp_path):
    """The wrapper, run for real: by a shell of the test's own, on commands of the test's own."""
    tinker_service(Sampled(bash("x")), Sampled("done"))
    own = f"6{uuid4().int % 10**9}"  # seconds that no other process on the machine sleeps
    escapes = f"echo so far; setsid sleep {own}.1 & timeout 99 sleep {own}.2 & trap '' TERM; sleep {own}.3"
    script = _TIMED_SCRIPT.format(mark=uuid4().hex, limit=1, script=shlex.quote(escapes))
    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=30)
    assert ended.returncode in (124, 137) and ended.stdout.startswith("so far\n")
    assert "the time limit of 1 seconds was reached" in ended.stdout
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if f"sleep\0{own}".encode() in read(path)]
    assert not left
    inner = _TIMED_SCRIPT.format(mark=uuid4().hex, limit=60, script=shlex.quote("timeout 0.1 sleep 5"))
    assert (quick := subprocess.run(["sh", "-c", inner], capture_output=True)).returncode == 124 and not quick.stdout


def test_a_second_run_starts_clean_and_resume_goes_on(agent, tinker_service):
    fake = tinker_service(Sampled("one"), Sampled("two"), Sampled("three"))
    one = agent(system_prompt="Be brief.")
    first, resumed = run(one, instruction="a"), Context()

    async def resume() -> None:
        await one.resume(instruction="b", environment=ScriptedEnvironment(), context=resumed)

    asyncio.run(resume())
    assert first.turns + resumed.turns == fake.returned[:2] and resumed.metadata["n_episodes"] == 1
    assert fake.returned[1][0][: len(fake.returned[0][0])] == fake.returned[0][0]
    assert [step.message for step in trajectory(one).steps] == ["Be brief.", "b", "two"]
    second = run(one, instruction="a")
    assert fake.returned[2][0] == fake.returned[0][0] and second.turns == fake.returned[2:]


def test_an_answer_of_an_earlier_step_is_never_left_to_be_scored(agent, tinker_service):
    tinker_service(Sampled("hello"), RuntimeError("service is gone"))
    one = agent()
    run(one)
    assert completion(one) == "hello" and run(one).raised and completion(one) == ""


@pytest.mark.parametrize("where", ["before", "during the call", "command", "after"])
def test_a_cancelled_run_keeps_its_finished_turns(agent, tinker_service, where):
    async def forever() -> Any:
        reached.set()
        await asyncio.Event().wait()

    script = {"before": [forever], "during the call": [Sampled(bash("a")), forever]}.get(where, [Sampled(bash("a"))])
    fake = tinker_service(*script)
    environment = ScriptedEnvironment(forever if where == "command" else ExecResult(return_code=0))
    one, context, reached = agent(max_turns=2), Context(), asyncio.Event()

    async def main() -> None:
        trial = asyncio.create_task(one.run("x", environment, context))
        if where == "after":
            await trial
        else:
            await reached.wait()
        trial.cancel()
        await trial

    if where == "after":
        asyncio.run(main())
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
        assert context.metadata["stop_reason"] == trajectory(one).extra["stop_reason"] == "cancelled"
    assert context.turns == fake.returned and context.metadata["n_episodes"] == len(fake.returned)
    assert completion(one) == (bash("a") if fake.returned else "")


def test_a_log_folder_that_cannot_be_written_leaves_the_context_whole_and_hides_no_other_error(
    agent, tinker_service, tmp_path
):
    fake = tinker_service(Sampled("hello"), RuntimeError("service is gone"))
    for name in ("completion.txt", "trajectory.json"):
        (tmp_path / name).symlink_to("/dev/full")
    one = agent()
    context = run(one)
    assert "No space left on device" in str(context.raised) and context.turns == fake.returned
    assert "service is gone" in str(run(one).raised)


def test_no_sampled_token_is_ever_lost_misaligned_or_recorded_twice(agent, tinker_service):
    """300 runs with random endings. A cancellation inside the client's own call is the one exception: what the sampler
    had not yet returned to the agent is gone, so the fake does not count it."""
    for seed in range(300):
        rng = random.Random(seed)

        def sampled(rng: random.Random = rng) -> Any:
            text = rng.choice(["", "done", bash("ls"), "<think>a</think>" + bash("ls"), "<tool_call>{}</tool_call>"])
            kind = rng.choice(["whole"] * 6 + ["cut off", "no tokens", "no logprobs", "short logprobs", "error"])
            match kind:
                case "cut off":
                    return Sampled(text, "length")
                case "no tokens":
                    return Sampled(
                        tokens=[], stop_reason=rng.choice(["stop", "length"]), logprobs=rng.choice(["own", None])
                    )
                case "no logprobs":
                    return Sampled(text, logprobs=None)
                case "short logprobs":
                    return Sampled(text, logprobs=[-1.0])
                case "error":
                    return rng.choice([RuntimeError("API error"), ContextLengthExceededError("full")])
            return Sampled(text)

        fake = tinker_service(*(sampled() for _ in range(12)))
        results = [ExecResult(stdout="x" * rng.randrange(40), return_code=0), RuntimeError("gone"), TimeoutError()]
        environment = ScriptedEnvironment(*rng.choices(results, weights=[8, 1, 1], k=12))
        renderer = rng.choice(["qwen3", "qwen3_instruct", "role_colon"])
        limit = rng.choice([32_000, 32_000, 600])
        one = agent(max_turns=rng.randint(1, 8), renderer_name=renderer, llm_kwargs={"context_limit": limit})
        context = Context()

        async def main(
            rng: random.Random = rng, one: Any = one, environment: Any = environment, c: Any = context
        ) -> None:
            await one._shared_llm()
            trial = asyncio.create_task(one.run("x", environment, c))
            for _ in range(rng.choice([10_000, rng.randrange(1, 60)])):
                if trial.done():
                    break
                await asyncio.sleep(0)
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)

        asyncio.run(main())
        whole = [turn for turn in fake.returned if len(turn[1]) == len(turn[2] or [])]
        assert context.turns == [(prompt, tokens, logprobs or []) for prompt, tokens, logprobs in whole], seed
        assert context.metadata["n_episodes"] == len(fake.returned), seed
        assert context.metadata["n_turns_without_ids"] == len(fake.returned) - len(whole), seed
        agents = [step for step in trajectory(one).steps if step.source == "agent"]
        assert [step.metrics.completion_token_ids for step in agents] == [turn[1] for turn in fake.returned], seed
        assert StopReason(context.metadata["stop_reason"]) == trajectory(one).extra["stop_reason"], seed


# Real jobs, and from their trials to training data.


def run_job(config: JobConfig) -> list[Any]:
    from harbor.job import Job

    async def main() -> Any:
        return await (await Job.create(config)).run()

    return asyncio.run(main()).trial_results


def tinker_agent(fake: FakeTinker, **kwargs: Any) -> list[dict[str, Any]]:
    kwargs = {"renderer_name": "qwen3_instruct"} | kwargs
    return [{"import_path": "basic_loop_agent:BasicLoopAgent", "model_name": fake.name, "kwargs": kwargs}]


def from_disk(trial: Any) -> Any:
    return TrialResult.model_validate_json((Path(trial.trial_uri.removeprefix("file://")) / "result.json").read_text())


def test_a_real_job_scores_its_trials_and_names_the_model(tmp_path):
    kwargs = {"model_client": "litellm", "llm_kwargs": {"mock_response": "Hello, world!"}}
    trials = run_job(job_config(tmp_path, kwargs, n_attempts=2))
    for trial in map(from_disk, trials):
        assert trial.verifier_result.rewards == {"reward": 1.0} and trial.agent_info.version == "0.1.0"
        assert trial.agent_info.model_info.model_dump() == {"name": "mock", "provider": "openai"}
        trajectory = _trial_to_trajectory(trial)
        assert (trajectory.turns, trajectory.reward, trajectory.rewards) == ([], 1.0, {"reward": 1.0})
        assert trajectory.prompt_tokens and trajectory.completion_tokens and trajectory.cost_usd is None
        assert trajectory.seconds > 0 and trajectory.stop_reason == "completed" and trajectory.exception_type is None
        assert (trajectory.task_name, trajectory.trial_name) == (trial.task_name, trial.trial_name)


@pytest.mark.parametrize(
    ("renderer", "replies", "n_datums"),
    [
        ("qwen3_instruct", [Sampled("hello world")], 1),
        ("qwen3_instruct", [Sampled(bash("ls")), Sampled("hello world")], 1),
        ("qwen3", [Sampled("<think>a</think>" + bash("ls")), Sampled("<think>b</think>hello world")], 2),
        ("qwen3", [Sampled("<think>a</think>" + bash("ls")), Sampled("hello wo", "length")], 2),
    ],
)
def test_a_jobs_trials_become_datums_with_every_sampled_token(tmp_path, tinker_service, renderer, replies, n_datums):
    from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
    from tinker_cookbook.rl.types import TrajectoryGroup

    fake = tinker_service(*replies, *replies)
    agents = tinker_agent(fake, max_turns=len(replies), renderer_name=renderer)
    trials = run_job(job_config(tmp_path, {}, agents=agents, n_attempts=2, n_concurrent_trials=1))
    live, read = ([_trial_to_trajectory(trial) for trial in some] for some in (trials, map(from_disk, trials)))
    assert live == read
    sampled = [turn for trajectory in live for turn in trajectory.turns]
    assert sorted((t.prompt_token_ids, t.completion_token_ids, t.logprobs) for t in sampled) == sorted(fake.returned)

    rollouts = [to_tinker(trajectory) for trajectory in live]
    group = TrajectoryGroup(rollouts, [1.0, 0.0], [{}, {}])
    data, _ = assemble_training_data([group], compute_advantages([group]))
    assert len(data) == 2 * n_datums
    inputs = [datum.loss_fn_inputs for datum in data]
    trained = [
        (int(token), round(float(logprob), 3)) for one in inputs for token, logprob, mask in columns(one) if mask
    ]
    expected = [pair for turn in sampled for pair in zip(turn.completion_token_ids, turn.logprobs, strict=True)]
    assert trained == [(token, round(logprob, 3)) for token, logprob in expected]
    cut_off = replies[-1].stop_reason == "length"
    assert [rollout.stop_reason for rollout in rollouts] == ["max_tokens" if cut_off else "completed"] * 2
    assert [t.ac.stop_reason for t in rollouts[0].transitions] == ["stop"] * (len(replies) - 1) + [
        "length" if cut_off else "stop"
    ]
    assert [t.episode_done for t in rollouts[0].transitions] == [False] * (len(replies) - 1) + [True]


def columns(inputs: Any) -> Any:
    return zip(*(inputs[name].to_torch().tolist() for name in ("target_tokens", "logprobs", "mask")), strict=True)


def test_a_timed_out_trial_is_scored_and_keeps_its_turns(tmp_path, tinker_service):
    async def forever() -> Any:
        await asyncio.sleep(60)

    fake = tinker_service(Sampled("hello world\n" + bash("ls")), forever)
    agents = tinker_agent(fake, max_turns=3)
    agents[0]["override_timeout_sec"] = 8
    (trial,) = map(from_disk, run_job(job_config(tmp_path, {}, agents=agents)))
    trajectory = _trial_to_trajectory(trial)
    assert trajectory.exception_type == "AgentTimeoutError" and trajectory.stop_reason == "cancelled"
    assert trajectory.reward == 0.0 and len(trajectory.turns) == len(fake.returned) == 1


def test_a_trial_that_fails_is_no_training_data_and_an_unscored_one_has_no_reward(tmp_path, tinker_service):
    fake = tinker_service(Sampled(bash("ls")), RuntimeError("service is gone"))
    (failed,) = run_job(job_config(tmp_path / "failed", {}, agents=tinker_agent(fake, max_turns=2)))
    assert failed.exception_info.exception_type == "RuntimeError" and failed.agent_result.rollout_details
    assert _trial_to_trajectory(failed) is None
    fake = tinker_service(Sampled("hello"))
    (unscored,) = run_job(job_config(tmp_path / "unscored", {}, agents=tinker_agent(fake), verifier={"disable": True}))
    trajectory = _trial_to_trajectory(unscored)
    assert trajectory.reward is None and trajectory.rewards == {} and len(trajectory.turns) == 1
    unscored.agent_result = AgentContext()
    assert _trial_to_trajectory(unscored) is None


def test_rewards_tokens_and_misaligned_records_of_other_agents(tmp_path, tinker_service):
    fake = tinker_service(Sampled("hello"))
    (trial,) = run_job(job_config(tmp_path, {}, agents=tinker_agent(fake)))
    context = trial.agent_result
    for rewards, reward in [
        ({"reward": 1, "style": 0.5}, 1),
        ({"score": 0.25}, 0.25),
        ({"a": 1.0, "b": 2.0}, None),
    ]:
        trial.verifier_result = VerifierResult(rewards=rewards)
        trajectory = _trial_to_trajectory(trial)
        assert trajectory.reward == reward and trajectory.rewards == rewards
    context.n_input_tokens = context.n_output_tokens = None
    trajectory, ((prompt, tokens, logprobs),) = _trial_to_trajectory(trial), fake.returned
    assert (trajectory.prompt_tokens, trajectory.completion_tokens) == (len(prompt), len(tokens))
    for misaligned in (
        {"prompt_token_ids": [prompt], "completion_token_ids": [tokens], "logprobs": [logprobs[1:]]},
        {"prompt_token_ids": [prompt, prompt], "completion_token_ids": [tokens], "logprobs": [logprobs]},
        {"prompt_token_ids": [prompt], "completion_token_ids": [tokens]},
    ):
        context.rollout_details = [misaligned]
        with pytest.raises(ValueError, match=f"trial {trial.trial_name}: .* not aligned"):
            _trial_to_trajectory(trial)


@pytest.mark.skipif(not hasattr(BasicLoopAgent.__base__.__base__, "resume"), reason="Harbor resumes steps since 0.20")
def test_a_multi_step_task_resumes_one_conversation_and_gives_one_trajectory(tmp_path, tinker_service):
    task = tmp_path / "task"
    for step, instruction in {"first": "remember x", "second": "what was it?"}.items():
        (task / "steps" / step / "tests").mkdir(parents=True)
        (task / "steps" / step / "tests" / "test.sh").write_text("exit 0\n")
        (task / "steps" / step / "instruction.md").write_text(instruction)
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "tests").mkdir()
    (task / "tests" / "answer.txt").write_text("x")
    (task / "task.toml").write_text('schema_version = "1.3"\n[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n')
    fake = tinker_service(Sampled("hello"), Sampled("x"))
    agents = tinker_agent(fake)
    agents[0]["resume_trajectory"] = True
    (trial,) = map(from_disk, run_job(job_config(tmp_path, {}, agents=agents, tasks=[{"path": task}])))
    assert [len(step.agent_result.rollout_details[0]["logprobs"]) for step in trial.step_results] == [1, 1]
    trajectory = _trial_to_trajectory(trial)
    first, second = trajectory.turns
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    assert [(t.prompt_token_ids, t.completion_token_ids, t.logprobs) for t in trajectory.turns] == fake.returned
    assert trajectory.completion_tokens == sum(len(tokens) for _, tokens, _ in fake.returned)
    assert trajectory.reward == trial.verifier_result.rewards["reward"] == 0.5


def test_the_training_loop_in_the_readme_runs_as_it_stands(tmp_path, tokenizer_dir, monkeypatch):
    """Only `tinker.ServiceClient` and what the text names for want of a real service are exchanged."""
    from concurrent.futures import Future

    import tinker
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    class Training(FakeTinker):
        trained: ClassVar[list[Any]] = []

        async def create_lora_training_client_async(self, base_model: str) -> "Training":
            assert base_model == "Qwen/Qwen3-8B"
            return self

        async def save_weights_for_sampler_async(self, name: str) -> Any:
            return Done(SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"))

        async def forward_backward_async(self, data: list[Any], loss_fn: str) -> Any:
            assert loss_fn == "importance_sampling" and all(isinstance(datum, tinker.Datum) for datum in data)
            assert all(set(d.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"} for d in data)
            self.trained.append(data)
            return Done(None)

        async def optim_step_async(self, params: Any) -> Any:
            assert isinstance(params, tinker.AdamParams)
            return Done(None)

    class Done(Future):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self.set_result(result)

        async def result_async(self) -> Any:
            return self.result()

    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    replies = [Sampled("Hello, world!"), Sampled("no")] * 80
    fake = Training(tokenizer_dir, *replies)
    monkeypatch.setattr(tinker, "ServiceClient", fake)
    monkeypatch.setattr("harbor.llms.tinker.get_tokenizer", lambda name: get_tokenizer(tokenizer_dir))
    fakes = job_config(tmp_path, {}).model_dump(include={"environment", "verifier", "jobs_dir", "quiet"})
    monkeypatch.setattr("harbor.models.job.config.JobConfig", lambda **config: JobConfig(**fakes, **config))
    monkeypatch.chdir(ROOT)
    exec(compile(text, "README.md", "exec"), {"__name__": "readme"})
    assert fake.samplers == [{"model_path": f"tinker://run/sampler_weights/{step:04}"} for step in range(10)]
    assert len(fake.trained) == 10 and all(len(data) == 8 for data in fake.trained)
    advantages = {float(max(datum.loss_fn_inputs["advantages"].to_torch())) for datum in fake.trained[0]}
    assert len(advantages) == 2 and fake.services == 2, "one service of the script's, one of the agent's"
