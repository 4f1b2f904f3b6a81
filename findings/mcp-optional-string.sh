#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# MCP's Python SDK: an argument `str | None` refuses a string that is JSON, and "null" is None.
#
# Version: mcp 2.3.0, a tool of its MCPServer (FastMCP before 2.0), called by its own client.
# Guess: an argument of type `str | None` takes each string as it is, like one of type `str`.
# Behaviour: unless the type is plain `str`, a string that is JSON is parsed first, but for numbers,
#   truth values and strings. So '{"a": 1}' becomes a dictionary, which is then refused
#   for being no string, and "null" becomes None without an error. With `str | list[str]`, '["x"]'
#   arrives as a list.
# Why it matters: a model that writes a JSON file by such a tool gets a validation error, though its
#   call follows the tool's schema, and one that writes the word null writes nothing. Whether a call
#   works depends on the text, so it looks like the model's fault.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv mcp==2.3.0

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio

from mcp import Client
from mcp.server.mcpserver import MCPServer

server = MCPServer("files")


@server.tool()
def plain(text: str) -> str:
    return repr(text)


@server.tool()
def optional(text: str | None = None) -> str:
    return repr(text)


@server.tool()
def one_or_more(text: str | list[str]) -> str:
    return repr(text)


async def main() -> None:
    async with Client(server) as client:
        for text in ("hello", "42", "null", '{"a": 1}', '["x"]'):
            for tool in ("plain", "optional", "one_or_more"):
                result = await client.call_tool(tool, {"text": text})
                got = "refused" if result.is_error else result.content[0].text
                print(f"{tool}({text!r}): {got}")


asyncio.run(main())
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
plain('hello'): 'hello'
optional('hello'): 'hello'
one_or_more('hello'): 'hello'
plain('42'): '42'
optional('42'): '42'
one_or_more('42'): '42'
plain('null'): 'null'
optional('null'): None
one_or_more('null'): refused
plain('{"a": 1}'): '{"a": 1}'
optional('{"a": 1}'): refused
one_or_more('{"a": 1}'): refused
plain('["x"]'): '["x"]'
optional('["x"]'): refused
one_or_more('["x"]'): ['x']
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
