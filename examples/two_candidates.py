# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""A client of one's own, with token ids: it asks another client twice, and picks a candidate.

    harbor run --agent examples.two_candidates:TwoCandidates --ak model_client=vllm ...

It wraps the client of the option model_client. A client that gives no ids needs the option
collect_rollout_details=false, which is the default with model_client=litellm. What is picked is no
longer the model's own distribution, so this is for evaluation, or for a trainer that corrects it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from harbor.models.metric import UsageInfo

from basic_loop_agent import BasicLoopAgent, ModelClient, Request, Turn


class TwoCandidates(BasicLoopAgent):
    """BasicLoopAgent with another client."""

    def _build_llm(self) -> ModelClient:
        return PickingClient(super()._build_llm())


class PickingClient(ModelClient):
    """Asks a client twice for each reply, one after the other."""

    def __init__(self, client: ModelClient) -> None:
        self.client = client
        self.url = client.url

    async def connect(self) -> None:
        await self.client.connect()

    def discard(self) -> None:
        self.client.discard()

    def escape_special_tokens(self, text: str) -> str:
        return self.client.escape_special_tokens(text)

    async def call(
        self,
        prompt: str,
        message_history: Iterable[dict] = (),
        request: Request | None = None,
        **other: Any,
    ) -> Turn:
        request = request or Request()
        first = await self.client.call(prompt, message_history, request)
        second_request = replace(request, partial=None)
        try:
            second = await self.client.call(prompt, message_history, second_request)
        except asyncio.CancelledError:
            # The run's time is over. The agent records the first reply. Of the second call it
            # counts what the client has left in `partial`.
            part = second_request.partial
            request.partial = replace(first, usage=both(first.usage, part.usage)) if part else first
            raise
        except Exception:
            return first
        picked = max(first, second, key=worth)
        return replace(picked, usage=both(first.usage, second.usage))


def worth(turn: Turn) -> tuple[bool, float]:
    """A complete reply is worth more than one that was cut off, then the more probable one."""
    mean = sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else 0.0
    return turn.finish_reason == "stop", mean


def both(one: UsageInfo, other: UsageInfo) -> UsageInfo:
    """What two calls took together. A cost of 0 means that the price is unknown."""
    costs = (one.cost_usd, other.cost_usd)
    return UsageInfo(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cache_tokens=one.cache_tokens + other.cache_tokens,
        cost_usd=sum(costs) if all(costs) else 0.0,
    )
