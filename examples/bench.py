# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""Measure the overhead of the agent itself: CPU, pauses of the event loop, and memory.

    uv run --no-dev python examples/bench.py --other path/of/another/basic_loop_agent.py

The model and the environment answer at once, so the figures are the agent's own. Every measurement
runs in a new process, and the table shows the medians. Two versions alternate, so that a busy
machine slows both. The benchmark takes some minutes for each version.
"""

import argparse
import asyncio
import importlib.util
import logging
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from harbor.job import Job
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig

HERE = Path(__file__).parent
# A process that measures reads the path of its version from this variable.
AGENT = Path(os.environ.get("BENCH_AGENT", HERE.parent / "basic_loop_agent.py"))
loader = SourceFileLoader("basic_loop_agent", str(AGENT))
spec = importlib.util.spec_from_loader(loader.name, loader)
assert spec
module: Any = importlib.util.module_from_spec(spec)
# fakes.py, which defines the job's environment, imports the agent under this name.
sys.modules["basic_loop_agent"] = module
loader.exec_module(module)

REPLY = "I look at the files first.\n\n```bash\nls -la /app /app/src\ncat /app/README.md\n```"


class FreeClient(module.ModelClient):
    """A model for one trial, which answers at once or after `seconds`."""

    with_ids, seconds = False, 0.0

    def __init__(self) -> None:
        self.prompt_ids, self.reply_ids = [], []

    async def call(self, prompt: str, message_history: Any = (), **other: Any) -> Any:
        # Other tasks run here, as they do while a real client waits.
        await asyncio.sleep(self.seconds)
        if not self.with_ids:
            return module.Turn(content=REPLY)
        # The last of 200 prompts has 399,800 tokens. As in a parsed answer, each id is a separate
        # object.
        new_ids = random.choices(range(1_000, 150_000), k=2_000)
        # The parentheses avoid a second copy of the prompt.
        self.prompt_ids = self.prompt_ids + (self.reply_ids + new_ids[:1_800])
        self.reply_ids = new_ids[1_800:]
        logprobs = [-random.random() for _ in self.reply_ids]
        ids = {"prompt_token_ids": self.prompt_ids, "completion_token_ids": self.reply_ids}
        return module.Turn(content=REPLY, logprobs=logprobs, **ids)


class BenchAgent(module.BasicLoopAgent):
    """The agent with FreeClient. Its scripts do not run."""

    output_bytes = 2_000

    def _build_llm(self) -> FreeClient:
        return FreeClient()

    async def execute(self, blocks: list[str], environment: Any) -> str:
        return "Exit code: 0\nOutput:\n" + "-rw-r--r-- 1 root\n" * (self.output_bytes // 18)


async def run_trial(n_turns: int) -> Any:
    """Run a trial. Returns the objects that Harbor keeps of the trial."""
    agent = BenchAgent(
        logs_dir=Path(tempfile.mkdtemp(), "agent"),
        # Trials with the same options would share a client.
        model_name=f"free-{random.random()}",
        max_turns=n_turns,
        collect_rollout_details=FreeClient.with_ids,
        logger=logging.getLogger("bench"),
    )
    await agent.setup(None)
    context = AgentContext()
    await agent.run("Do it.", None, context)
    if len(agent.turns) != n_turns:
        raise RuntimeError(f"the run ended after {len(agent.turns)} of {n_turns} turns")
    return agent, context


async def cpu(n_turns: int) -> float:
    """CPU time of all threads in milliseconds per turn, in trials of `n_turns` turns."""
    n_trials = 400 // n_turns
    start = time.process_time()
    for _ in range(n_trials):
        await run_trial(n_turns)
    return (time.process_time() - start) / n_trials / n_turns * 1000


async def longest_pause(work: Awaitable) -> float:
    """Await `work`. Returns the longest time in seconds during which no other task ran."""
    gaps = []

    async def beat() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - start)

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0.1)
    await work
    # Wait for one more beat, so that a pause at the end counts.
    await asyncio.sleep(0.1)
    heart.cancel()
    return max(gaps)


async def pause_without_ids() -> float:
    """In milliseconds. Each reply takes 20 ms, which leaves time for writes during the run."""
    FreeClient.seconds, BenchAgent.output_bytes = 0.02, 10_000
    return await longest_pause(run_trial(200)) * 1000


async def pause_with_ids() -> float:
    FreeClient.with_ids = True
    return await longest_pause(run_trial(200))


async def pause_at_start() -> float:
    """A pause in a real Harbor job. Harbor's own work for the 16 trials is part of this figure."""
    options = {"max_turns": 2, "collect_rollout_details": False}
    agent = {"import_path": "__main__:BenchAgent", "model_name": "free", "kwargs": options}
    config = JobConfig(
        jobs_dir=tempfile.mkdtemp(),
        n_attempts=16,
        n_concurrent_trials=16,
        quiet=True,
        tasks=[{"path": str(HERE / "greet")}],
        agents=[agent],
        environment={"import_path": "fakes:HostEnvironment"},
        verifier={"import_path": "fakes:HostVerifier"},
    )
    running = asyncio.ensure_future((await Job.create(config)).run())
    pause = await longest_pause(running)
    for trial in running.result().trial_results:
        if trial.exception_info:
            raise RuntimeError(trial.exception_info.exception_message)
    return pause


async def memory() -> float:
    """Peak memory of the process in gigabytes."""
    FreeClient.with_ids = True
    results = await asyncio.gather(*[run_trial(200) for _ in range(4)])
    # Linux reports this value in units of 1,024 bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    # The results must stay in memory until here.
    del results
    return peak


MEASUREMENTS = {
    "CPU a turn, 20 turns of 2 kB (ms)": lambda: cpu(20),
    "CPU a turn, 200 turns of 2 kB (ms)": lambda: cpu(200),
    "longest pause, 200 turns of 10 kB (ms)": pause_without_ids,
    "longest pause, 200 turns with ids (s)": pause_with_ids,
    "longest pause, 16 trials start (s)": pause_at_start,
    "peak memory, 4 trials of 200 turns with ids (GB)": memory,
}


async def measure(name: str) -> None:
    """Print one figure."""
    # Harbor writes each log line to two files, trial.log and job.log.
    logger = logging.getLogger("bench")
    logger.setLevel(logging.DEBUG)
    for _ in range(2):
        logger.addHandler(logging.FileHandler(Path(tempfile.mkdtemp(), "log")))
    # The first agent makes Harbor 0.25 import litellm, which takes seconds. Do not measure this.
    await run_trial(2)
    print(await MEASUREMENTS[name]())


def figure(name: str, path: Path) -> float:
    """One figure for the version at this path, measured in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        # Fetch nothing, report nothing, and do not compile a module again.
        env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}
        env |= {"PYTHONDONTWRITEBYTECODE": "", "TMPDIR": folder, "BENCH_AGENT": str(path)}
        command = [sys.executable, __file__, "--measure", name]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}, {path}:\n{done.stdout}{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def print_table(paths: list[Path], n_rounds: int) -> None:
    # Compile all imported modules before the measurements.
    for path in paths:
        figure("longest pause, 16 trials start (s)", path)
    print(" " * 50 + "  this file" + "      other      ratio" * (len(paths) - 1))
    for name in MEASUREMENTS:
        figures = {path: [] for path in paths}
        for n in range(n_rounds):
            # Alternate which version runs first.
            for path in sorted(paths, reverse=n % 2 == 1):
                figures[path].append(figure(name, path))
        numbers = [statistics.median(values) for values in figures.values()]
        if len(numbers) == 2:
            numbers.append(numbers[0] / numbers[1])
        print(f"{name:50}" + "".join(f"{number:11.3f}" for number in numbers), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="another version to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each figure")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="print only this figure")
    given = parser.parse_args()
    if given.measure:
        asyncio.run(measure(given.measure))
    else:
        others = [given.other.resolve()] if given.other else []
        print_table([AGENT.resolve(), *others], given.rounds)
