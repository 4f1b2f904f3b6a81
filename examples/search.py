# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""An agent with a tool: it answers a block ```search itself, from a folder of texts.

    harbor run --agent examples.search:Search --ak docs=/path/to/texts --ak max_turns=50 ...

A tool runs on the host, in Harbor's process, for all trials. So it has three duties:

- It takes what the model wrote as data. This one compares words, and opens no path of the model's.
- It does not block the event loop: it awaits, or works in a thread.
- It bounds what it returns. (`max_output_bytes` bounds the output of scripts only.)
"""

import asyncio
from pathlib import Path

from harbor.environments.base import BaseEnvironment

from basic_loop_agent import BasicLoopAgent, BasicLoopOptions, fenced_blocks

MAX_CHARACTERS = 2_000


class Search(BasicLoopAgent):
    """BasicLoopAgent with a search in texts."""

    class options_model(BasicLoopOptions):
        docs: str
        """The folder of the texts, *.md and *.txt, on the host."""

    protocol = f"""{BasicLoopAgent.protocol}
To search the manual, write some words in a block that opens with ```search. The paragraphs that \
have most of these words are the next message."""

    def bash_blocks(self, reply: str) -> list[str] | None:
        # A reply with any of these blocks is not the answer yet.
        return fenced_blocks(reply, "bash", "sh", "shell", "search")

    async def execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        reply = self.turns[-1].content
        texts = []
        for words in fenced_blocks(reply, "search"):
            texts.append(await asyncio.to_thread(search, words, Path(self.options.docs)))
        if commands := super().bash_blocks(reply):
            texts.append(await super().execute(commands, environment))
        return "\n\n".join(texts)


def search(words: str, folder: Path) -> str:
    """The paragraphs with most of these words, as much as fits."""
    wanted = set(words.lower().split())
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".txt"):
            for paragraph in path.read_text(errors="replace").split("\n\n"):
                n_words = len(wanted & set(paragraph.lower().split()))
                if n_words:
                    found.append((-n_words, f"{path.name}: {paragraph.strip()}"))
    found.sort(key=lambda pair: pair[0])
    texts = "\n\n".join(text for _, text in found)
    return f"Search results:\n{texts[:MAX_CHARACTERS] or '(none)'}"
