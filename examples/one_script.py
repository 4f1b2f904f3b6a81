# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""An agent for tasks that one script solves: it runs the script of one reply and ends.

    uv run python examples/train.py dataset_builder.agent=one_script:OneScript ...

With max_turns=1 the model receives the instruction and nothing else, which keeps prompts short. The
instruction must say that commands go into a bash block.
"""

from harbor.environments.base import BaseEnvironment

from basic_loop_agent import BasicLoopAgent, StopReason


class OneScript(BasicLoopAgent):
    """BasicLoopAgent with a custom loop."""

    async def converse(self, prompt: str, environment: BaseEnvironment) -> StopReason | str:
        turn = await self.sample(prompt)
        if turn.finish_reason != "stop":
            return turn.finish_reason
        # None: a block cannot be read, so nothing may be run.
        blocks = self.bash_blocks(turn.content)
        if blocks:
            turn.script = "\n".join(blocks)
            turn.observation = await self.execute(blocks, environment)
        return StopReason.COMPLETED
