#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# LangChain: a tool call that was truncated by the token limit is run if messages are
# streamed.
#
# Versions: langchain 1.5.2, its create_agent, with langchain-core 1.8.3 and langchain-openai 1.7.4,
#   and a scripted server.
# Guess: a tool call whose arguments are half a JSON object is an invalid call and is not run. How
#   the caller looks at the run does not change that.
# Behaviour: invoke, and stream with "updates", find an invalid tool call and end the run. stream
#   with "messages", and astream_events, make the model stream. The parts of a streamed reply are
#   joined and read leniently to the end: open texts and brackets are closed, a key without a value
#   is dropped. So the call is valid, and the tool runs with half of the text, or with the default
#   of the argument that was not reached.
# Why it matters: the limit strikes in long arguments, so the first half of a file replaces the
#   file, and an edit lacks its second half. The model is told that it worked. An agent that was
#   tested with invoke behaves otherwise behind a user interface or a logger of tokens.
# Source: AIMessageChunk.init_tool_calls of langchain_core/messages/ai.py calls parse_partial_json
#   even for the last chunk. The project's issue 39275 reports this for streams that break off.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv langchain==1.5.2 langchain-core==1.8.3 langchain-openai==1.7.4

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
import http.server
import json
import threading

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

TEXT = '{"path": "notes.txt", "text": "first line\\nsecond li'
MODE = '{"path": "notes.txt", "text": "third line", "append":'


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message, reason = {"role": "assistant", "content": "Done."}, "stop"
        if body["messages"][-1]["role"] == "user":
            function = {"name": "write", "arguments": body["messages"][-1]["content"]}
            message["tool_calls"] = [{"index": 0, "id": "1", "type": "function"}]
            message["tool_calls"][0]["function"], reason = function, "length"
        part = "delta" if body.get("stream") else "message"
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        reply["choices"] = [{"index": 0, part: message, "finish_reason": reason}]
        kind, data = "application/json", json.dumps(reply)
        if body.get("stream"):
            reply["object"] = "chat.completion.chunk"
            kind, data = "text/event-stream", f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
runs = []


def write(path: str, text: str, append: bool = False) -> str:
    """Writes a file."""
    runs.append(f"write({path!r}, {text!r}, append={append})")
    return "written"


url = f"http://127.0.0.1:{server.server_port}/v1"
agent = create_agent(ChatOpenAI(model="m", base_url=url, api_key="none"), [write])


async def events(task):
    async for _ in agent.astream_events(task, version="v2"):
        pass


for arguments in TEXT, MODE:
    task = {"messages": [{"role": "user", "content": arguments}]}
    print("arguments:", arguments)
    for name, run in {
        "invoke": lambda: agent.invoke(task),
        "stream updates": lambda: list(agent.stream(task, stream_mode="updates")),
        "stream messages": lambda: list(agent.stream(task, stream_mode="messages")),
        "astream_events": lambda: asyncio.run(events(task)),
    }.items():
        runs.clear()
        run()
        print(f"  {name}:", *runs or ["not run"])
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
arguments: {"path": "notes.txt", "text": "first line\nsecond li
  invoke: not run
  stream updates: not run
  stream messages: write('notes.txt', 'first line\nsecond li', append=False)
  astream_events: write('notes.txt', 'first line\nsecond li', append=False)
arguments: {"path": "notes.txt", "text": "third line", "append":
  invoke: not run
  stream updates: not run
  stream messages: write('notes.txt', 'third line', append=False)
  astream_events: write('notes.txt', 'third line', append=False)
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
