#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# ms-swift: with an agent's loss scale, a plain word in a reply decides what is trained: all after
# "Observation:" has no loss, and all after "Command" has three times the loss.
#
# Version: ms-swift 4.6.0, its get_loss_scale("react"), "agentflan", "alpha_umi" and "hermes", with
#   stand-ins for torch, transformers and swift.utils, which this does not need.
# Guess: the keywords count where the format has them: at the start of a line, in a reply that calls
#   a tool. The JSON text after "Action Input:" is one piece. The questions of agentflan count if
#   the query is that question.
# Behaviour: a keyword counts wherever it occurs, in the middle of a sentence, of a word or of a
#   tool call's JSON text, and holds up to the next keyword or to the end of the reply. So a final
#   answer that quotes a log has no loss after "Observation:", and the call's closing quotes and
#   braces have none if its text has the word. agentflan's keyword is "Command" without a colon, and
#   "Name:" is found in "FileName:". With agentflan, any query that contains "What is the value of"
#   makes the loss of the whole reply three times as large. hermes has no such keywords, since it
#   looks for tags.
# Why it matters: the model learns to call the tool, but not how the call ends, or learns answers
#   only up to a word. Nothing warns, and the loss looks normal.
# Source: calculate_loss_scale of swift/loss_scale/utils.py with split_str_parts_by of
#   swift/template/utils.py, and swift/loss_scale/config/*.json.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.13 venv
uv pip install -q --python venv --no-deps ms-swift==4.6.0

seen=$(venv/bin/python -W ignore - 2>errors.log <<'PYTHON'
import importlib
import pathlib
import sys
import types
from unittest.mock import MagicMock

(root,) = pathlib.Path(sys.prefix).glob("lib/*/site-packages/swift")
for name in "swift", "swift.template":
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(root.parent / name.replace(".", "/"))]
sys.modules["torch"] = sys.modules["swift.utils"] = MagicMock()
transformers = sys.modules["transformers"] = types.ModuleType("transformers")
transformers.PreTrainedTokenizerBase = transformers.StoppingCriteria = object
utils = importlib.import_module("swift.template.utils")
for name in "ContextType", "Messages", "get_last_user_round", "split_str_parts_by":
    setattr(sys.modules["swift.template"], name, getattr(utils, name))

from swift.loss_scale import get_loss_scale


def show(scale, reply, query="Help me."):
    texts, weights = get_loss_scale(scale).get_loss_scale(reply, query=query)
    print(f"{scale}:", *(f"{weight:g} {text!r}" for text, weight in zip(texts, weights)))


LOG = "The log says: Observation: disk full. So delete the old logs."
show("react", f"Final Answer: {LOG}")
show("alpha_umi", f"Final Answer: {LOG}")
show("react", 'Action: note\nAction Input: {"text": "Observation: rain", "day": 5}')
show("react", "Final Answer: End the page with a Call to Action: Buy now. Then stop.")
show("agentflan", "Press Command and C to copy it.")
show("agentflan", "The header has FileName: a.txt and a date.")
show("agentflan", "It is 3.14.")
show("agentflan", "It is 3.14.", "What is the value of pi?")
show("hermes", f"{LOG} Press Command.")
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
react: 1 'Final Answer:' 1 ' The log says: ' 2 'Observation:' 0 ' disk full. So delete the old logs.'
alpha_umi: 1 'Final Answer:' 1 ' The log says: ' 2 'Observation:' 0 ' disk full. So delete the old logs.'
react: 2 'Action:' 2 ' note\n' 2 'Action Input:' 2 ' {"text": "' 2 'Observation:' 0 ' rain", "day": 5}'
react: 1 'Final Answer:' 1 ' End the page with a Call to ' 2 'Action:' 2 ' Buy now. Then stop.'
agentflan: 1 'Press ' 1 'Command' 3 ' and C to copy it.'
agentflan: 1 'The header has File' 1 'Name:' 3 ' a.txt and a date.'
agentflan: 1 'It is 3.14.'
agentflan: 3 'It is 3.14.'
hermes: 1 'The log says: Observation: disk full. So delete the old logs. Press Command.'
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
