# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""An agent with a search tool, which answers ```search blocks from a folder of text files.

    harbor run --agent examples.search:Search --ak docs=/path/to/texts --ak max_turns=50 ...

A tool runs on the host, in Harbor's process, for all trials. So a tool has four duties:

- Treat the model's text as data. This tool compares words, and opens no path that a model names.
- Avoid errors, because an error of the tool fails the trial. This tool skips broken links.
- Do not block the event loop. Await, or work in a thread.
- Limit the results, because `max_output_bytes` limits only the output of scripts.
"""

import asyncio
from pathlib import Path

from harbor.environments.base import BaseEnvironment
from pydantic import DirectoryPath

from basic_loop_agent import BasicLoopAgent, BasicLoopOptions, fenced_blocks

# The model sees at most this many characters of search results for each reply.
MAX_CHARACTERS = 2_000


class SearchOptions(BasicLoopOptions):
    """The options that `--ak key=value` sets."""

    docs: DirectoryPath
    """The folder of text files, *.md and *.txt, on the host."""


class Search(BasicLoopAgent):
    """BasicLoopAgent with a search tool."""

    options_model = SearchOptions
    # ty: a base class could assign other options, but Harbor builds these from `options_model`.
    options: SearchOptions  # ty: ignore[incompatible-mutable-override]

    protocol = f"""{BasicLoopAgent.protocol}
To search the manual, write a few words in a block that opens with ```search. The paragraphs with \
most of these words are the next message."""

    # A reply with any of these blocks is not the answer yet.
    languages = (*BasicLoopAgent.languages, "search")

    async def execute(self, blocks: list[str], environment: BaseEnvironment) -> str:
        turn = self.turns[-1]
        # The record lists only what ran in the container, and nothing has run there yet.
        turn.script = ""
        results = ""
        for words in fenced_blocks(turn.content, "search") or []:
            result = await asyncio.to_thread(search, words, self.options.docs)
            results = f"{results}\n\n{result}".strip()[:MAX_CHARACTERS]
            # The run may end here or during the script. The next step then opens with the results.
            turn.observation = results
        commands = fenced_blocks(turn.content, *BasicLoopAgent.languages)
        if not commands:
            return results
        turn.script = "\n".join(commands)
        output = await super().execute(commands, environment)
        return f"{results}\n\n{output}".strip()


def search(words: str, folder: Path) -> str:
    """The paragraphs with any of these words. Those with the most of these words come first."""
    wanted = set(words.lower().split())
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".txt") and path.is_file():
            for paragraph in path.read_text(errors="replace").split("\n\n"):
                n_words = len(wanted & set(paragraph.lower().split()))
                if n_words:
                    found.append((-n_words, f"{path.name}: {paragraph.strip()}"))
    found.sort(key=lambda pair: pair[0])
    texts = "\n\n".join(text for _, text in found)
    return f"Search results:\n{texts or '(none)'}"
