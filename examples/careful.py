# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""An agent that checks its work: a reply without a block is not the answer until the model was
asked to check it against the instruction.

    harbor run --agent examples.careful:Careful --ak n_checks=2 --ak max_turns=50 ...

A check is one more message, so the prompts stay exact. It costs at least one more turn. For RL, try
the plain loop first: the reward teaches the model to check.
"""

from harbor.environments.base import BaseEnvironment
from pydantic import NonNegativeInt

from basic_loop_agent import BasicLoopAgent, BasicLoopOptions, StopReason


class CarefulOptions(BasicLoopOptions):
    """The options of `--ak key=value`."""

    n_checks: NonNegativeInt = 1
    """How many times the model is asked to check its work before the run ends."""


class Careful(BasicLoopAgent):
    """BasicLoopAgent with checks before its end."""

    options_model = CarefulOptions
    # ty: a base class could assign other options, but Harbor makes these from `options_model`.
    options: CarefulOptions  # ty: ignore[incompatible-mutable-override]

    async def converse(self, prompt: str, environment: BaseEnvironment) -> StopReason | str:
        stop_reason = await super().converse(prompt, environment)
        for _ in range(self.options.n_checks):
            if stop_reason != StopReason.COMPLETED or len(self.turns) >= self.options.max_turns:
                return stop_reason
            check = (
                "Before you end, check your work with commands. The task was:\n\n"
                f"{self.instruction}\n\n"
                "If something is missing, go on. If not, repeat your answer, without a block."
            )
            stop_reason = await super().converse(check, environment)
        return stop_reason
