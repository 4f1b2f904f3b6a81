# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""A custom client with token ids, which calls another client twice and picks one of the replies.

    harbor run --agent examples.two_candidates:TwoCandidates --ak model_client=vllm ...

The custom client wraps the client that the option model_client selects. A wrapped client without
ids needs collect_rollout_details=false, which is the default for model_client=litellm. The picked
replies do not follow the model's own distribution, so use this agent for evaluation, or with a
trainer that corrects for the difference. If the run ends during the second call, the first reply is
lost.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harbor.models.metric import UsageInfo

from basic_loop_agent import FAILED_REASONS, BasicLoopAgent, Message, ModelClient, Turn


class TwoCandidates(BasicLoopAgent):
    """BasicLoopAgent with a custom client."""

    def _build_llm(self) -> ModelClient:
        return PickingClient(super()._build_llm())


class PickingClient(ModelClient):
    """Calls a client twice for each reply, one call after the other."""

    def __init__(self, client: ModelClient) -> None:
        self.client = client
        self.url = client.url

    async def connect(self) -> None:
        await self.client.connect()

    def after_failure(self) -> None:
        self.client.after_failure()

    def escape_special_tokens(self, text: str) -> str:
        return self.client.escape_special_tokens(text)

    async def call(
        self, prompt: str, message_history: Sequence[Message] = (), **given: Any
    ) -> Turn:
        first = await self.client.call(prompt, message_history, **given)
        try:
            second = await self.client.call(prompt, message_history, **given)
        except Exception:
            return first
        picked = max(first, second, key=worth)
        return replace(picked, usage=total_usage(first, second))


def worth(turn: Turn) -> tuple[bool, bool, bool, float]:
    """A complete reply ranks above a truncated reply, which ranks above a failed one. Among equals,
    a reply with text ranks higher, and then the more probable reply."""
    # Without ids or logprobs, a reply cannot be trained on.
    logprobs = turn.logprobs or []
    mean = sum(logprobs) / len(logprobs) if turn.is_trainable else -math.inf
    did_not_fail = turn.finish_reason not in FAILED_REASONS
    return turn.finish_reason == "stop", did_not_fail, bool(turn.content.strip()), mean


def total_usage(*turns: Turn) -> UsageInfo:
    """The usage of several calls. A cost of 0 means that the price is unknown."""
    usages = [turn.usage for turn in turns if turn.usage]
    costs = [usage.cost_usd for usage in usages]
    return UsageInfo(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cache_tokens=sum(usage.cache_tokens for usage in usages),
        cost_usd=sum(costs) if all(costs) else 0.0,
    )
