# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""An agent for tasks that one script solves: it runs the script of one reply, and ends.

    uv run python examples/train.py dataset_builder.agent=one_script:OneScript ...

With max_turns=1 the model gets the instruction and nothing else, which keeps prompts short. The
instruction has to say that commands go into a bash block.
"""

from harbor.environments.base import BaseEnvironment

from basic_loop_agent import BasicLoopAgent, StopReason


class OneScript(BasicLoopAgent):
    """BasicLoopAgent with another loop."""

    async def converse(self, environment: BaseEnvironment) -> StopReason | str:
        turn = await self.sample()
        if turn.finish_reason != "stop":
            return turn.finish_reason
        # If a block is not closed, this is None, and nothing is run.
        blocks = self.bash_blocks(turn.content)
        if blocks:
            self.observe(await self.execute(blocks, environment))
        return StopReason.COMPLETED
