# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""A stand-in for Tinker's training, which lets the tests run train.py without a server.

The stand-in records the training data that it receives, and samples with the sampler that a test
passes.
"""

from types import SimpleNamespace
from typing import Any, Self


class Answer(SimpleNamespace):
    """An answer of Tinker's training client. Cookbook 0.5 awaits the result of `result_async`, and
    cookbook 0.6 awaits the answer itself."""

    async def result_async(self) -> Self:
        return self

    def __await__(self) -> Any:
        return self.result_async().__await__()


def sampled_in(datum: Any) -> tuple[list[int], list[float], float]:
    """The sampled ids of a datum, their logprobs, and their advantage."""
    names = ("target_tokens", "logprobs", "advantages")
    columns = [datum.loss_fn_inputs[name].to_torch().tolist() for name in names]
    # Prompt tokens have the logprob 0.
    tokens = [token for token in zip(*columns, strict=True) if token[1]]
    ids, logprobs, advantages = zip(*tokens, strict=True)
    (advantage,) = set(advantages)
    return list(ids), [round(logprob, 3) for logprob in logprobs], advantage


class FakeTraining:
    """Stands in for `tinker.ServiceClient` and for its clients. `sampler` returns a sampling
    client. `batches` holds the result of `sampled_in` for each datum of each batch."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.batches = sampler, []

    def __getattr__(self, name: str) -> Any:
        # Cookbook 0.5 adds _async to the name of each method that it calls. Cookbook 0.6 does not.
        if name.endswith("_async"):
            return getattr(self, name.removesuffix("_async"))
        # The answers of all other methods do not matter here.
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
        self.batches.append([sampled_in(datum) for datum in data])
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return Answer(loss_fn_outputs=outputs)

    def save_state(self, name: str, **kwargs: Any) -> Answer:
        return Answer(path=f"tinker://{name}")

    save_weights_for_sampler = save_state
