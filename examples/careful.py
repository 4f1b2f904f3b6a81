# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""An agent that has its answer checked: before it takes a reply without a block for the answer, it
sends the instruction again, and asks to check the work.

    harbor run --agent examples.careful:Careful --ak n_checks=2 --ak max_turns=50 ...

A check is one more message, so the prompts stay exact. It costs at least one more turn. For RL take
the plain loop first: there the reward teaches the model to check.
"""

from harbor.environments.base import BaseEnvironment
from pydantic import NonNegativeInt

from basic_loop_agent import BasicLoopAgent, BasicLoopOptions, StopReason


class Careful(BasicLoopAgent):
    """BasicLoopAgent with checks before its end."""

    class options_model(BasicLoopOptions):
        n_checks: NonNegativeInt = 1
        """How often the model is asked to check its work before the run ends."""

    async def converse(self, environment: BaseEnvironment) -> StopReason | str:
        for _ in range(self.options.n_checks):
            stop_reason = await super().converse(environment)
            if stop_reason != StopReason.COMPLETED or len(self.turns) >= self.options.max_turns:
                return stop_reason
            self.tell(
                f"Before you end, check your work by commands. The task was:\n\n{self.instruction}"
                "\n\nIf something is missing, go on. If not, repeat your answer, without a block."
            )
        return await super().converse(environment)
