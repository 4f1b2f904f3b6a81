#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# DeepEval and Ragas: a run whose tool calls equal the reference scores 0.25, and a run with one
# call too many scores 0.
#
# Versions: deepeval 4.3.1, its ToolCorrectnessMetric with default options and with the arguments
#   compared; ragas 0.4.3, ToolCallAccuracy and ToolCallF1 of its collections. No model is asked.
# Guess: a run that is compared with itself scores 1 everywhere. One call too many, or one that is
#   missing, costs a part of the score: Ragas promises a proportional penalty, and warns that only
#   the common calls will be compared. An argument that nobody asked for costs something.
# Behaviour: DeepEval counts equal calls once, so four equal calls score 0.25 and fail, and a test
#   run before and after a change scores 0.67 even with the arguments compared. With
#   should_consider_ordering both score 1. Ragas' accuracy is 0 as soon as the numbers of calls
#   differ, in both of its modes, right after its warning. It does not see additional arguments, and
#   compares the others as text: "5" is 5, but a dict with another order of keys is wrong. F1 is
#   over sets, so fifty equal calls are as good as one.
# Why it matters: agents repeat calls, such as a test run. Then a perfect run fails in one tool, a
#   run with one more look at a file is worth as much as none in the other, and a loop costs
#   nothing.
# Source: _calculate_non_exact_match_score of deepeval (the project's issue 3141 reports this), ascore
#   of ragas/metrics/collections/tool_call_accuracy/metric.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.12 venv
uv pip install -q --python venv deepeval==4.3.1 ragas==0.4.3 langchain-community==0.3.31

cat >show.py <<'PYTHON'
import warnings

from deepeval import test_case
from deepeval.metrics import ToolCorrectnessMetric
from deepeval.models import DeepEvalBaseLLM
from ragas.messages import AIMessage, ToolCall
from ragas.metrics.collections import ToolCallAccuracy, ToolCallF1

warnings.simplefilter("ignore")


class NoModel(DeepEvalBaseLLM):
    def load_model(self):
        return None

    def generate(self, *arguments, **options):
        raise NotImplementedError

    a_generate = generate

    def get_model_name(self):
        return "none"


def deepeval_score(called, expected, **options):
    metric = ToolCorrectnessMetric(model=NoModel(), async_mode=False, **options)
    case = test_case.LLMTestCase(
        input="task",
        actual_output="done",
        tools_called=[test_case.ToolCall(name=n, input_parameters=a) for n, a in called],
        expected_tools=[test_case.ToolCall(name=n, input_parameters=a) for n, a in expected],
    )
    return metric.measure(case, _show_indicator=False)


def ragas_score(metric, called, expected):
    messages = [AIMessage(content="", tool_calls=[ToolCall(name=n, args=a)]) for n, a in called]
    reference = [ToolCall(name=n, args=a) for n, a in expected]
    return metric.score(user_input=messages, reference_tool_calls=reference).value


def show(label, called, expected):
    inputs = [test_case.ToolCallParams.INPUT_PARAMETERS]
    scores = {
        "default": deepeval_score(called, expected),
        "arguments": deepeval_score(called, expected, evaluation_params=inputs),
        "accuracy": ragas_score(ToolCallAccuracy(), called, expected),
        "any order": ragas_score(ToolCallAccuracy(strict_order=False), called, expected),
        "F1": ragas_score(ToolCallF1(), called, expected),
    }
    print(f"{label}:", ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))


test, change, look = (("bash", {"command": command}) for command in ("pytest", "sed", "cat"))
queries = [("search", {"query": query}) for query in "abcd"]
show("four different calls", queries, queries)
show("four equal calls", [look] * 4, [look] * 4)
show("test, change, test", [test, change, test], [test, change, test])
show("one call too many", [look, change, test], [change, test])
show("nine of ten calls", [change] * 9, [change] * 10)
show("fifty calls, not one", [look] * 50, [look])
show("an additional argument", [("bash", look[1] | {"user": "root"})], [look])
show('"5" for 5', [("search", {"limit": "5"})], [("search", {"limit": 5})])
same = [("search", {"filter": {"a": 1, "b": 2}})], [("search", {"filter": {"b": 2, "a": 1}})]
show("keys in another order", *same)
PYTHON
seen=$(HOME=$dir DEEPEVAL_TELEMETRY_OPT_OUT=YES RAGAS_DO_NOT_TRACK=true \
  venv/bin/python show.py 2>errors.log) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
four different calls: default 1.00, arguments 1.00, accuracy 1.00, any order 1.00, F1 1.00
four equal calls: default 0.25, arguments 0.25, accuracy 1.00, any order 1.00, F1 1.00
test, change, test: default 0.67, arguments 0.67, accuracy 1.00, any order 1.00, F1 1.00
one call too many: default 1.00, arguments 1.00, accuracy 0.00, any order 0.00, F1 0.80
nine of ten calls: default 0.10, arguments 0.10, accuracy 0.00, any order 0.00, F1 1.00
fifty calls, not one: default 1.00, arguments 1.00, accuracy 0.00, any order 0.00, F1 1.00
an additional argument: default 1.00, arguments 0.50, accuracy 1.00, any order 1.00, F1 0.00
"5" for 5: default 1.00, arguments 0.00, accuracy 1.00, any order 1.00, F1 0.00
keys in another order: default 1.00, arguments 1.00, accuracy 0.00, any order 0.00, F1 1.00
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
