# SPDX-License-Identifier: Apache-2.0
"""An agent for tasks that one script solves: it runs the script of one reply, and ends.

    uv run python examples/train.py --agent one_script:OneScript ...

With --max-turns 1 the model gets the instruction and nothing else, which keeps prompts short. The
instruction has to say that commands go into a bash block.
"""

from harbor.environments.base import BaseEnvironment

from basic_loop_agent import BasicLoopAgent, Conversation, StopReason


class OneScript(BasicLoopAgent):
    """BasicLoopAgent with another loop."""

    async def _converse(
        self, conversation: Conversation, environment: BaseEnvironment
    ) -> StopReason:
        turn = await conversation.sample()
        if turn.cut_off:
            return StopReason.MAX_TOKENS
        blocks = self.script_in(turn.content)
        if blocks is not None:
            conversation.tell(await self._execute(blocks, environment))
        return StopReason.COMPLETED
