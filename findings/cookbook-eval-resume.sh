#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# SPDX-License-Identifier: Apache-2.0
#
# tinker-cookbook: a resumed benchmark keeps errors as failures, and another model's score.
#
# Versions: tinker-cookbook 0.6.1 and what its benchmarks import (tinker 0.38.0, datasets 5.2.0,
#   transformers 5.24.0, torch 2.13.0), with its renderer qwen3. A small benchmark and a client that
#   answers at once stand in for a real one; running, saving and grading are the package's own.
# Guess: a second run in the same save_dir repeats what failed with an error of the server, and
#   starts again if the model is another one. Graders get the reply without thought and stop token,
#   as the docstrings of grade_fn and regrade_trajectories say.
# Behaviour: an example with an error counts as done, with a reward of 0, and no later run asks for
#   it again. Neither model nor options are compared, so a second model is never asked, and gets the
#   first one's score. A grader gets the decoded tokens, with thought and <|im_end|>: an exact
#   comparison fails all right replies, and "is the number in it" passes wrong ones whose thought
#   has it.
# Why it matters: a server that restarts during a run lowers its score for good, and a script that
#   evaluates checkpoints into one folder reports the first one's score for all of them.
# Source: _load_completed, run_benchmark and regrade_trajectories of
#   tinker_cookbook/eval/benchmarks/_runner.py.
# Seen on 29 November 2026: the lines between SEEN and SEEN below.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
uv venv -q --python 3.11 venv
# A folder of wheels that pip is set up with may have the smaller torch for CPU.
uv pip install -q --python venv ${PIP_FIND_LINKS:+--find-links="$PIP_FIND_LINKS"} \
  torch==2.13.0 tinker==0.38.0 transformers==5.24.0 datasets==5.2.0 tiktoken==0.14.0 \
  chz==0.4.0 blobfile==3.3.0 cloudpickle==3.1.3 termcolor==3.3.0 pillow==13.0.0 rich==15.0.0
uv pip install -q --python venv --no-deps tinker-cookbook==0.6.1

seen=$(venv/bin/python - 2>errors.log <<'PYTHON'
import asyncio
from types import SimpleNamespace

from tinker_cookbook.eval.benchmarks import (
    BenchmarkBuilder,
    BenchmarkConfig,
    regrade_trajectories,
    run_benchmark,
)
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# A tokenizer of single bytes, with the markers that the renderer needs.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
raw.decoder = decoders.ByteLevel()
raw.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
renderer = get_renderer("qwen3", tokenizer)


class Sum(MessageEnv):
    def __init__(self, number):
        self.number, self.example_id = number, f"sum-{number}"

    async def initial_observation(self):
        return [{"role": "user", "content": f"{self.number} + 1 ="}]

    async def step(self, message):
        expected = str(self.number + 1)
        reward = float(get_text_content(message).strip() == expected)
        return MessageStepResult(reward, True, [], logs={"expected": expected})


class Sums(BenchmarkBuilder):
    name = "sums"

    def make_envs(self, renderer, config):
        sums = [Sum(number) for number in range(4)]
        return [EnvFromMessageEnv(renderer, env, failed_parse_reward=0) for env in sums]


class Client:
    def __init__(self, answer):
        self.answer, self.calls = answer, 0

    async def sample(self, prompt, num_samples, sampling_params):
        self.calls += 1
        question = tokenizer.decode(prompt.to_ints()).split("user\n")[1]
        reply = f"{self.answer(int(question.split()[0]))}<|im_end|>"
        tokens = tokenizer.encode(reply, add_special_tokens=False)
        sequence = SimpleNamespace(
            tokens=tokens, logprobs=[-0.1] * len(tokens), stop_reason="stop", sequence_id=None
        )
        return SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0)


def good(number):
    return f"<think>\n{number} and 1 is {number + 1}.\n</think>\n\n{number + 1}"


def bad(number):
    return f"<think>\nIs it {number + 1}? No.\n</think>\n\nIt is {number}."


def restarting(number):
    if number >= 2:
        raise ConnectionError("the server restarts")
    return good(number)


def run(answer, folder, **options):
    client = Client(answer)
    config = BenchmarkConfig(save_dir=folder, **options)
    result = asyncio.run(run_benchmark(Sums(), client, renderer, config))
    return f"{client.calls} calls, score {result.score}, {result.num_errors} errors"


def exact(reply, logs):
    return float(reply.strip() == logs["expected"])


def contains(reply, logs):
    return float(logs["expected"] in reply)


print("a good model, the server restarts:", run(restarting, "restart"))
print("the same again, with a server that works:", run(good, "restart"))
print("a bad model:", run(bad, "bad"))
print("a good model in the same folder:", run(good, "bad"))
print("a good model in its own folder:", run(good, "good"))
print("a good model, grade_fn=exact:", run(good, "exact", grade_fn=exact))
print("the good one, regraded with exact:", regrade_trajectories("good", "sums", exact).score)
print("the bad one, regraded with contains:", regrade_trajectories("bad", "sums", contains).score)
PYTHON
) || { tail -n 20 errors.log; exit 1; }
echo "$seen"
[ "$seen" = "$(cat <<'SEEN'
a good model, the server restarts: 4 calls, score 0.5, 2 errors
the same again, with a server that works: 0 calls, score 0.5, 2 errors
a bad model: 4 calls, score 0.0, 0 errors
a good model in the same folder: 0 calls, score 0.0, 0 errors
a good model in its own folder: 4 calls, score 1.0, 0 errors
a good model, grade_fn=exact: 4 calls, score 0.0, 0 errors
the good one, regraded with exact: 0.0
the bad one, regraded with contains: 1.0
SEEN
)" ] || { echo "This is not what was seen before." >&2; exit 1; }
