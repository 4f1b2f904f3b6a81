#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# OpenInference: a long history loses its first messages and the parameters, at 128 attributes.
#
# Versions: openinference-instrumentation-openai 0.1.66 and -litellm 0.1.51, with
#   openinference-instrumentation 0.1.72 and opentelemetry-sdk 1.45.2; openai 3.57.0, litellm
#   1.110.2. A local server answers each request.
# Guess: a span of a model call has all messages of the request, or, if it is too long, its end is
#   cut off.
# Behaviour: each message is two to five attributes of the span, and OpenTelemetry's own
#   TracerProvider keeps 128 of them: a new one pushes out the oldest. From about fifteen turns with
#   a tool call on, or a few more for litellm, the system prompt, the task and the first turns are
#   gone; with the OpenAI client also the parameters and the input as JSON. About the last thirty
#   messages stay. The provider that OpenInference itself offers keeps 10,000 attributes. Each loss
#   is a warning in the log, which does not say what was lost.
# Why it matters: traces are read to see why long rollouts fail, and data for training is exported
#   from them. Just the long ones lack their task and their temperature, and the exported prompt
#   looks complete: it starts with some later message.
# Source: BoundedAttributes of opentelemetry/attributes/__init__.py, SpanLimits of
#   opentelemetry/sdk/trace/__init__.py; openinference/instrumentation/_tracer_providers.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv openai==3.57.0 litellm==1.110.2 opentelemetry-sdk==1.45.2 \
  openinference-instrumentation==0.1.72 openinference-instrumentation-openai==0.1.66 \
  openinference-instrumentation-litellm==0.1.51

seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python - 2>errors.log <<'PYTHON'
import http.server
import json
import threading

import litellm
import openai
import openinference.instrumentation
import opentelemetry.sdk.trace
from openinference.instrumentation.litellm import LiteLLMInstrumentor
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "done"}
        reply = {
            "id": "reply",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key")


def history(turns):
    messages = [
        {"role": "system", "content": "You repair programs."},
        {"role": "user", "content": "Repair the parser."},
    ]
    for turn in range(turns):
        function = {"name": "bash", "arguments": json.dumps({"command": f"step {turn}"})}
        call = {"id": f"call{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "Next.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    return messages


def use_openai(messages):
    client.chat.completions.create(model="policy", messages=messages, temperature=0.5)


def use_litellm(messages):
    litellm.completion(
        model="hosted_vllm/policy",
        api_base=url,
        api_key="key",
        messages=messages,
        temperature=0.5,
    )


CLIENTS = ((OpenAIInstrumentor(), use_openai), (LiteLLMInstrumentor(), use_litellm))
for instrumentor, ask in CLIENTS:
    for package in (opentelemetry.sdk.trace, openinference.instrumentation):
        spans = InMemorySpanExporter()
        provider = package.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        instrumentor.instrument(tracer_provider=provider)
        for turns in (5, 15, 40):
            spans.clear()
            messages = history(turns)
            ask(messages)
            (span,) = spans.get_finished_spans()
            kept = {
                int(name.split(".")[2])
                for name in span.attributes
                if name.startswith("llm.input_messages") and name.endswith("role")
            }
            print(
                f"{ask.__name__}, {package.__name__.split('.')[0]}, {len(messages)} messages: "
                f"{min(kept)} to {max(kept)}, "
                f"parameters {'llm.invocation_parameters' in span.attributes}, "
                f"JSON {'input.value' in span.attributes}"
            )
        instrumentor.uninstrument()
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
use_openai, opentelemetry, 12 messages: 0 to 11, parameters True, JSON True
use_openai, opentelemetry, 32 messages: 2 to 31, parameters False, JSON False
use_openai, opentelemetry, 82 messages: 52 to 81, parameters False, JSON False
use_openai, openinference, 12 messages: 0 to 11, parameters True, JSON True
use_openai, openinference, 32 messages: 0 to 31, parameters True, JSON True
use_openai, openinference, 82 messages: 0 to 81, parameters True, JSON True
use_litellm, opentelemetry, 12 messages: 0 to 11, parameters True, JSON True
use_litellm, opentelemetry, 32 messages: 0 to 31, parameters True, JSON True
use_litellm, opentelemetry, 82 messages: 49 to 81, parameters True, JSON True
use_litellm, openinference, 12 messages: 0 to 11, parameters True, JSON True
use_litellm, openinference, 32 messages: 0 to 31, parameters True, JSON True
use_litellm, openinference, 82 messages: 0 to 81, parameters True, JSON True
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
