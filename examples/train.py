# SPDX-License-Identifier: Apache-2.0
"""RL on Tinker with rollouts from Harbor: one command, and a curve to look at.

    uv run python examples/train.py --model Qwen/Qwen3-8B --task examples/greet --max-turns 8

A step runs each task --group-size times with the weights so far, which is one Harbor job, and
updates the weights by the rewards, each relative to the mean of its task. Evaluation tasks are run
before the first step and after the last, and are not trained on. The log folder gets metrics.jsonl
(a line a step, under tinker-cookbook's names), config.json and code.diff, jobs/, for `harbor view`,
and progress.json, where a second start with the same arguments goes on. With WANDB_PROJECT set, the
metrics go to W&B too.

Read for this: tinker 0.25 and 0.38, tinker-cookbook 0.5.7, 0.5.8 and 0.6.1. Of the cookbook's
helpers three are not used: `train_step` and `save_checkpoint_async` of 0.5.8 call what tinker 0.38
says is deprecated, a page of warnings a step; and what `get_last_checkpoint` reads is appended to,
so that a kill can leave half a line.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import importlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import httpx
import tinker
from harbor.job import Job
from harbor.llms.tinker import TinkerLLM
from harbor.models.environment_type import EnvironmentType
from harbor.models.job.config import JobConfig
from harbor.models.trial.result import TrialResult
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.metrics import compute_kl_sample_train
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.ml_log import setup_logging

from basic_loop_agent import SCORED_EXCEPTIONS, Trajectory, write_file

# How long Tinker keeps what a step saves; the final checkpoint stays for good.
WEEK_SEC = 7 * 24 * 3600

# What a second start may change: all else decides what is learned.
FREE_OPTIONS = {
    "base_url",
    "concurrency",
    "environment",
    "eval_every",
    "eval_task",
    "eval_trials",
    "log_dir",
    "plot",
    "steps",
}

# Metrics of a job: the mean reward, and the share of the trials that have a reward of 1.
REWARD, SOLVED = "env/all/reward/total", "env/all/solved"


class NoUsableTrialError(SystemExit):
    """No trial of a job has a reward and tokens."""


def positive(text: str) -> int:
    """A number of an option. Raises ArgumentTypeError for 0 and below."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def positive_float(text: str) -> float:
    """As `positive`."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, by default the process's. Raises SystemExit for a bad one."""
    parser = argparse.ArgumentParser(
        description="RL on Tinker with rollouts from Harbor. Start it again to go on after a crash."
    )
    add = parser.add_argument
    add("--model", required=True, help="base model, as Tinker names it")
    task_help = "task folder, or a folder of tasks; may be repeated"
    add("--task", required=True, action="append", help=task_help)
    agent_help = "module:Class, a copy of ours or a subclass (%(default)s)"
    add("--agent", default="basic_loop_agent:BasicLoopAgent", help=agent_help)
    add("--steps", type=positive, default=10, help="steps in all (%(default)s)")
    add("--group-size", type=int, default=8, help="trials of each task in a step (%(default)s)")
    add("--tasks-per-step", type=positive, help="a step takes this many of the tasks (all)")
    max_turns_help = "above 1 the model runs commands (%(default)s)"
    add("--max-turns", type=positive, default=1, help=max_turns_help)
    add("--max-tokens", type=positive, default=4096, help="most tokens of a reply (%(default)s)")
    add("--temperature", type=positive_float, default=1.0, help="to sample with (%(default)s)")
    rate_help = "Adam's, constant (%(default)s)"
    add("--learning-rate", type=positive_float, default=4e-5, help=rate_help)
    add("--rank", type=positive, default=32, help="rank of the LoRA adapter (%(default)s)")
    renderer_help = "tinker-cookbook renderer (the one recommended for the model)"
    add("--renderer-name", help=renderer_help)
    url_help = "a Tinker server of your own ($TINKER_BASE_URL, else Tinker's)"
    add("--base-url", default=os.environ.get("TINKER_BASE_URL"), help=url_help)
    loss_help = "Tinker's loss; stable_reinforce needs tinker-cookbook 0.6 (%(default)s)"
    losses = get_args(tinker.types.LossFnType)
    add("--loss", default="importance_sampling", choices=losses, help=loss_help)
    environments = [environment.value for environment in EnvironmentType]
    type_help = "where Harbor runs the tasks: docker, daytona, modal, ... (%(default)s)"
    add("--environment", default="docker", choices=environments, metavar="TYPE", help=type_help)
    # Docker has addresses for about 30 networks, and a trial takes one.
    add("--concurrency", type=positive, default=16, help="most trials at a time (%(default)s)")
    eval_help = "as --task, to evaluate on before the first step and after the last"
    add("--eval-task", action="append", default=[], help=eval_help)
    add("--eval-every", type=positive, metavar="STEPS", help="evaluate in between, too")
    trials_help = "trials of each evaluated task (--group-size)"
    add("--eval-trials", type=positive, help=trials_help)
    add("--log-dir", help="a second start with it goes on there (runs/TASK-MODEL)")
    add("--plot", action="store_true", help="draw curve.png after each step, with matplotlib")
    args = parser.parse_args(argv)

    if args.log_dir is None:
        names = [Path(name).resolve().name for name in (*args.task, args.model)]
        args.log_dir = "runs/" + "-".join(names)
    # `--log-dir=~/run` reaches us as it stands.
    args.log_dir = str(Path(args.log_dir).expanduser())
    args.task = find_tasks(args.task)
    check_arguments(args)
    return args


def check_arguments(args: argparse.Namespace) -> None:
    """Raises SystemExit for what would fail, or teach nothing, when a step has been paid for."""
    if args.group_size < 2:
        raise SystemExit(f"--group-size {args.group_size}: it takes 2 to compare rewards")
    if args.tasks_per_step and args.tasks_per_step > len(args.task):
        raise SystemExit(f"--tasks-per-step {args.tasks_per_step}: {len(args.task)} are there")
    if args.eval_every and not args.eval_task:
        raise SystemExit(f"--eval-every {args.eval_every}: it needs --eval-task")
    names = list(eval_sets(args))
    if len(names) < len(args.eval_task):
        raise SystemExit(f"--eval-task: their names are the same: {', '.join(args.eval_task)}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise SystemExit("--plot: start this with `uv run --with matplotlib python ...`")
    fields = [field.name for field in dataclasses.fields(TokensWithLogprobs)]
    if args.loss == "stable_reinforce" and "sequence_id" not in fields:
        raise SystemExit("--loss stable_reinforce: it needs tinker-cookbook 0.6 or later")
    module_of(args.agent)
    try:
        # As each trial does it.
        TinkerLLM(args.model, renderer_name=args.renderer_name)
    except Exception as error:
        raise SystemExit(f"--model, --renderer-name: {one_line(error)}") from None
    if args.base_url:
        try:
            httpx.get(f"{args.base_url.rstrip('/')}/api/v1/healthz", timeout=10)
        except httpx.HTTPError as error:
            # The SDK would try for minutes, without a word.
            raise SystemExit(f"--base-url {args.base_url}: {one_line(error)}") from None


def find_tasks(folders: list[str]) -> list[str]:
    """The task in each of these folders, or the tasks of a folder of tasks, without repetition.

    Raises SystemExit for a folder that holds none.
    """
    tasks = []
    for folder in [Path(name).expanduser() for name in folders]:
        files = [folder / "task.toml"]
        if not files[0].exists():
            files = sorted(folder.glob("*/task.toml"))
        if not files:
            raise SystemExit(f"{folder}: no task is there, nor a folder of tasks (task.toml)")
        tasks += [str(file.parent) for file in files]
    return list(dict.fromkeys(tasks))


def eval_sets(args: argparse.Namespace) -> dict[str, list[str]]:
    """The tasks of each --eval-task, by the folder's name. Raises what `find_tasks` does."""
    return {Path(folder).resolve().name: find_tasks([folder]) for folder in args.eval_task}


def module_of(agent: str) -> ModuleType:
    """Where the code of the agent `module:Class` is: ours, or a copy of it.

    A subclass may be elsewhere. Raises SystemExit if there is no such agent.
    """
    # As Python does it for `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    name, _, class_name = agent.partition(":")
    try:
        agent_class = getattr(importlib.import_module(name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(f"--agent {agent}: {one_line(error)}") from None
    for base in agent_class.__mro__:
        module = sys.modules[base.__module__]
        if hasattr(module, "use_service"):
            return module
    raise SystemExit(f"--agent {agent}: it is no copy of BasicLoopAgent, nor a subclass")


def one_line(error: object) -> str:
    """The text of an error, of which Docker's are a page."""
    return " ".join(str(error).split())[:300]


def job_config(
    args: argparse.Namespace, name: str, tasks: list[str], n_trials: int, model_path: str
) -> JobConfig:
    """A job: `n_trials` trials of each task, with the checkpoint `model_path`."""
    options: dict[str, Any] = {
        "model_path": model_path,
        "max_tokens": args.max_tokens,
        "max_turns": args.max_turns,
        "temperature": args.temperature,
        "renderer_name": args.renderer_name,
    }
    if args.loss == "stable_reinforce":
        options["llm_kwargs"] = {"record_stability_info": True}
    return JobConfig(
        # With the time, for after a crash the same step is run again.
        job_name=f"{datetime.now():%Y%m%d-%H%M%S-%f}-{name.replace(' ', '-')}",
        jobs_dir=Path(args.log_dir, "jobs"),
        agents=[{"import_path": args.agent, "model_name": args.model, "kwargs": options}],
        tasks=[{"path": path} for path in tasks],
        environment={"type": args.environment},
        n_attempts=n_trials,
        n_concurrent_trials=args.concurrency,
        quiet=True,
    )


async def run_job(config: JobConfig) -> list[TrialResult]:
    """Run a job to its end. A trial that failed is a result like any other.

    Raises CancelledError after Ctrl-C, when Harbor has ended the trials that ran.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        # asyncio's own handler lets a second Ctrl-C tear everything down: a page of tracebacks.
        if not task.cancelling():
            print("\nstopping, when the trials that run are ended", flush=True)
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        job = await Job.create(config)
        result = await job.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return result.trial_results


def why_left_out(trial: TrialResult, trajectory: Trajectory | None) -> str | None:
    """Why a trial cannot be trained on, as "cause: in other words"; None if it can."""
    if trajectory is None:
        for part in (trial, *(trial.step_results or [])):
            error = part.exception_info
            if error and error.exception_type not in SCORED_EXCEPTIONS:
                return f"{error.exception_type}: {error.exception_message}"
        return "not scored: the verifier gave no reward"
    if trajectory.reward is None:
        return f"no single reward: {trial.verifier_result.rewards}"
    if not trajectory.turns:
        return "no token ids: nothing was sampled"
    return None


def read_trials(
    name: str, trials: list[TrialResult], agent: ModuleType
) -> tuple[list[Trajectory], Counter[str]]:
    """The trials to train on, and how many were left out, by cause; each of these is named.

    Raises NoUsableTrialError if there is none.
    """
    usable = []
    causes: Counter[str] = Counter()
    for trial in trials:
        try:
            trajectory = agent.trial_to_trajectory(trial)
            reason = why_left_out(trial, trajectory)
        except ValueError as error:
            reason = f"ValueError: {error}"
        if reason is None:
            usable.append(trajectory)
            continue
        reason = one_line(reason)
        causes[reason.partition(":")[0]] += 1
        print(f"{name}: left out {trial.trial_name}: {reason}", flush=True)
    if not usable:
        raise NoUsableTrialError(f"{name}: no trial can be used, the last was left out: {reason}")
    return usable, causes


def group_by_task(trajectories: list[Trajectory], agent: ModuleType) -> dict[Path, TrajectoryGroup]:
    """The trials of a task are a group."""
    by_task = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.trial.config.task.path].append(trajectory)
    groups = {}
    for path, members in by_task.items():
        rollouts = [agent.to_tinker(trajectory) for trajectory in members]
        rewards = [trajectory.reward for trajectory in members]
        groups[path] = TrajectoryGroup(rollouts, rewards, [{} for _ in members])
    return groups


def sample(
    config: JobConfig, name: str, agent: ModuleType, runner: asyncio.Runner
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Run a job. Returns the groups of its trials, and its metrics.

    Raises NoUsableTrialError, KeyboardInterrupt after Ctrl-C, and what Harbor raises.
    """
    started = time.monotonic()
    try:
        trials = runner.run(run_job(config))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    trajectories, causes = read_trials(name, trials, agent)
    groups = group_by_task(trajectories, agent)
    metrics = compute_trajectory_metrics(list(groups.values()), [[path.name] for path in groups])
    rewards = [trajectory.reward for trajectory in trajectories]
    metrics["env/all/reward/std"] = statistics.pstdev(rewards)
    metrics[SOLVED] = sum(reward >= 1 for reward in rewards) / len(rewards)
    metrics["time/sampling"] = time.monotonic() - started
    for cause, count in causes.items():
        metrics[f"left_out/{cause}"] = count
    stop_reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    for reason, count in stop_reasons.most_common():
        metrics[f"stop_reason/{reason}"] = count / len(trajectories)
    return list(groups.values()), metrics


def update(
    training: tinker.TrainingClient, groups: list[TrajectoryGroup], args: argparse.Namespace
) -> dict[str, float]:
    """One update of the weights. Returns the KL divergence of sampler and trainer before it.

    They have the same weights, so it should be near 0. v1, the mean difference of the logprobs,
    can cancel out; v2, half the mean of its square, cannot. A group of equal rewards teaches
    nothing; if there is no other, nothing is done and nothing returned.
    """
    unequal = [group for group in groups if len(set(group.get_total_rewards())) > 1]
    if not unequal:
        return {}
    data, _ = assemble_training_data(unequal, compute_advantages(unequal))
    inputs = []
    for datum in data:
        # The mask is for the KL below, the loss does not take it. The datum's other fields stay:
        # stable_reinforce wants to know of which sequence each token is.
        unmasked = {name: x for name, x in datum.loss_fn_inputs.items() if name != "mask"}
        inputs.append(dataclasses.replace(datum, loss_fn_inputs=unmasked))
    backward = training.forward_backward(inputs, loss_fn=args.loss)
    optimizer = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
    output = backward.result()
    optimizer.result()
    logprobs = [one["logprobs"].to_torch() for one in output.loss_fn_outputs]
    return compute_kl_sample_train(data, logprobs)


def evaluate(
    step: int,
    model_path: str,
    args: argparse.Namespace,
    progress: dict[str, Any],
    runner: asyncio.Runner,
) -> dict[str, float]:
    """Run the tasks of each --eval-task. Returns their metrics, and prints a line for each.

    The metrics are named test/FOLDER/..., and are kept in `progress`: a second start does not
    repeat an evaluation that was finished. Raises what Harbor raises.
    """
    known = progress["evaluated"]
    if known.get("step") != step:
        known = progress["evaluated"] = {"step": step, "sets": {}}
    found = {}
    for folder, tasks in eval_sets(args).items():
        if folder not in known["sets"]:
            name = f"{folder} before step {step}"
            config = job_config(args, name, tasks, args.eval_trials or args.group_size, model_path)
            try:
                _, metrics = sample(config, name, module_of(args.agent), runner)
            except NoUsableTrialError as error:
                print(f"{error}: not evaluated", flush=True)
                continue
            known["sets"][folder] = metrics
            write_progress(args, progress)
            print(f"{name}: {scores(metrics)}, {metrics['time/sampling']:.0f} s", flush=True)
        found |= {f"test/{folder}/{name}": x for name, x in known["sets"][folder].items()}
    return found


def run_step(
    step: int,
    training: tinker.TrainingClient,
    args: argparse.Namespace,
    progress: dict[str, Any],
    runner: asyncio.Runner,
) -> dict[str, float]:
    """Sample, and update the weights. Prints one line, and returns the step's metrics.

    Raises SystemExit if there is nothing to train on, and what the SDK and Harbor raise.
    """
    checkpoint = training.save_weights_for_sampler(f"{step:04}", ttl_seconds=WEEK_SEC).result()
    evaluated = {}
    is_known = progress["evaluated"].get("step") == step
    if step == 0 or is_known or (args.eval_every and step % args.eval_every == 0):
        evaluated = evaluate(step, checkpoint.path, args, progress, runner)
    # By the step alone, so that after a crash it takes the same ones.
    n_tasks = args.tasks_per_step or len(args.task)
    tasks = random.Random(step).sample(args.task, n_tasks)
    name = f"step {step}"
    config = job_config(args, name, tasks, args.group_size, checkpoint.path)
    groups, metrics = sample(config, name, module_of(args.agent), runner)
    started = time.monotonic()
    kl = update(training, groups, args)
    metrics |= kl
    metrics["time/training"] = time.monotonic() - started
    print(f"{name}: {summary(metrics)}", flush=True)
    return metrics | evaluated


def scores(metrics: dict[str, float]) -> str:
    """The result of a job's trials in a few words."""
    n_trials = metrics["env/all/total_episodes"]
    return f"reward {metrics[REWARD]:.3f}, solved {metrics[SOLVED]:.3f} of {n_trials} trials"


def summary(metrics: dict[str, float]) -> str:
    """A step in one line."""
    parts = [scores(metrics)]
    for name, share in metrics.items():
        if name.startswith("stop_reason/"):
            parts.append(f"{share:.0%} {name.removeprefix('stop_reason/')}")
    parts.append(f"{metrics['env/all/total_ac_tokens']:,} tokens")
    divergence = "no update (equal rewards within each group)"
    if "optim/kl_sample_train_v1" in metrics:
        # Rounded, a small negative number would be -0.0000.
        v1 = round(metrics["optim/kl_sample_train_v1"], 4) + 0.0
        divergence = f"KL {v1:.4f} (v1) {metrics['optim/kl_sample_train_v2']:.4f} (v2)"
    parts.append(divergence)
    parts.append(f"{metrics['time/sampling'] + metrics['time/training']:.0f} s")
    return ", ".join(parts)


def open_training(
    service: tinker.ServiceClient, args: argparse.Namespace, state: str | None
) -> tinker.TrainingClient:
    """A new adapter, or one that goes on from the checkpoint `state`. Raises the SDK's errors."""
    if state is not None:
        try:
            return client_of(service.create_training_client_from_state_with_optimizer(state))
        except tinker.UnprocessableEntityError:
            # SkyRL's server (0.4.0) only knows the way that SDK 0.38 calls deprecated.
            pass
    training = client_of(service.create_lora_training_client(args.model, rank=args.rank))
    if state is not None:
        training.load_state_with_optimizer(state).result()
    return training


def client_of(created: Any) -> tinker.TrainingClient:
    """SDK 0.38 gives a future of a new client, those before it the client."""
    return created.result() if hasattr(created, "result") else created


def give_back(training: tinker.TrainingClient, base_url: str | None) -> None:
    """Free the adapter where the server can. SkyRL's would keep it for minutes, and has few.

    The SDK has no call for it, and Tinker itself needs none.
    """
    if base_url:
        body = {"model_id": training.model_id, "type": "unload_model"}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{base_url.rstrip('/')}/api/v1/unload_model", json=body, timeout=10)


@contextlib.contextmanager
def only_run_in(log_dir: Path) -> Iterator[None]:
    """Raises SystemExit if another run is in this folder. The kernel tells, kills included."""
    with (log_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run is in {log_dir}: choose another --log-dir") from None
        yield


def read_progress(args: argparse.Namespace) -> dict[str, Any]:
    """How far the run in the folder is, as progress.json says, or the start of a new run.

    It holds the steps that are done, the state to go on from or None, the last evaluation, and the
    arguments that the run began with. Raises SystemExit if these were others, or if more steps are
    done than are asked for.
    """
    log_dir = Path(args.log_dir)
    progress_file = log_dir / "progress.json"
    if not progress_file.exists():
        return {"step": 0, "state": None, "evaluated": {}, "began_with": vars(args)}
    # Versions before this one kept less in it.
    progress = {"evaluated": {}, "began_with": {}} | json.loads(progress_file.read_text())
    for name, value in vars(args).items():
        before = progress["began_with"].get(name, value)
        if name not in FREE_OPTIONS and before != value:
            option = "--" + name.replace("_", "-")
            raise SystemExit(
                f"{log_dir} began with {option} {one_line(before)}, this is {one_line(value)}: "
                "choose another --log-dir"
            )
    if args.steps < progress["step"]:
        raise SystemExit(f"--steps {args.steps}: {progress['step']} are done in {log_dir}")
    print(f"{progress['step']} of {args.steps} steps are done: going on from {progress_file}")
    return progress


def write_progress(args: argparse.Namespace, progress: dict[str, Any]) -> None:
    """Write progress.json. By rename: a kill leaves the old file or the new one."""
    write_file(Path(args.log_dir, "progress.json"), json.dumps(progress))


def end_leftovers(log_dir: Path) -> None:
    """End the containers and networks that trials of this run left in Docker, and say so."""
    # Docker Compose's projects, as Harbor 0.13 to 0.24 calls them: TRIAL, or TRIAL__env.
    trials = [path.name.lower() for path in (log_dir / "jobs").glob("*/*/")]
    prefixes = tuple(re.sub("[^a-z0-9_-]", "-", name) for name in trials)
    if not prefixes or not shutil.which("docker"):
        return
    label = '{{.Label "com.docker.compose.project"}}'
    projects = set()
    for listing in (["ps", "--all"], ["network", "ls"]):
        command = ["docker", *listing, "--format", label]
        projects.update(subprocess.run(command, capture_output=True, text=True).stdout.split())
    ending = []
    for project in sorted(projects):
        if project.startswith(prefixes):
            command = f"docker compose --project-name {project} down --volumes --timeout 1"
            print(f"ending what was left in Docker: {command}", flush=True)
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            ending.append(subprocess.Popen(command.split(), **quiet))
    for process in ending:
        process.wait()


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop that can end the processes which it started.

    A trial that is cancelled leaves its `docker compose` running (Harbor 0.24), and asyncio prints
    a traceback for each process that is still there when its event loop is closed.
    """

    patience_sec = 10

    def __init__(self) -> None:
        super().__init__()
        self._processes: weakref.WeakSet[asyncio.SubprocessTransport] = weakref.WeakSet()

    async def subprocess_exec(
        self, *args: Any, **kwargs: Any
    ) -> tuple[asyncio.SubprocessTransport, asyncio.SubprocessProtocol]:
        """As asyncio's."""
        transport, protocol = await super().subprocess_exec(*args, **kwargs)
        self._processes.add(transport)
        return transport, protocol

    async def end_processes(self) -> None:
        """Wait for the processes, and kill those that take longer than `patience_sec`."""
        deadline = time.monotonic() + self.patience_sec
        while running := [one for one in self._processes if one.get_returncode() is None]:
            if time.monotonic() > deadline:
                for transport in running:
                    transport.close()
            await asyncio.sleep(0.05)


def train(args: argparse.Namespace, progress: dict[str, Any]) -> None:
    """The steps that are left. Raises what `main` does."""
    log_dir = Path(args.log_dir)
    try:
        service = tinker.ServiceClient(base_url=args.base_url)
        training = open_training(service, args, progress["state"])
    except tinker.TinkerError as error:
        raise SystemExit(f"Tinker: {one_line(error)}") from None
    except ValueError as error:
        # What the server refused.
        raise SystemExit(f"no adapter of rank {args.rank}: {one_line(error)}") from None
    # Sampling and training share a session: stable_reinforce looks at what was recorded in it.
    module_of(args.agent).use_service(service)
    metrics_file = log_dir / "metrics.jsonl"
    if metrics_file.exists():
        # A line beyond the progress is of a step that is done again, or of the last evaluation.
        lines = metrics_file.read_text().splitlines(keepends=True)
        write_file(metrics_file, "".join(lines[: progress["step"]]))
    logger = setup_logging(
        args.log_dir,
        wandb_project=os.environ.get("WANDB_PROJECT"),
        config=vars(args),
        do_configure_logging_module=False,
    )

    def log(metrics: dict[str, float], step: int) -> None:
        logger.log_metrics(metrics, step=step)
        if args.plot:
            from plot import draw

            draw(log_dir)

    # One event loop for all jobs: Harbor's Docker environment keeps locks that belong to the first.
    with contextlib.closing(logger), asyncio.Runner(loop_factory=EventLoop) as runner:
        try:
            for step in range(progress["step"], args.steps):
                metrics = run_step(step, training, args, progress, runner)
                state = training.save_state(f"{step:04}", ttl_seconds=WEEK_SEC).result()
                log(metrics, step)
                progress |= {"step": step + 1, "state": state.path}
                write_progress(args, progress)
            final = training.save_weights_for_sampler("final").result()
            if args.eval_task:
                log(evaluate(args.steps, final.path, args, progress, runner), args.steps)
        finally:
            give_back(training, args.base_url)
            runner.run(runner.get_loop().end_processes())
    print(f"final checkpoint: {final.path}")


def main(argv: list[str] | None = None) -> None:
    """Train, or go on training. Raises SystemExit, and what the SDK and Harbor raise."""
    # Harbor imports it, and without a network it would look for its prices for 10 seconds.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    args = parse_arguments(argv)
    log_dir = Path(args.log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    with only_run_in(log_dir):
        progress = read_progress(args)
        end_leftovers(log_dir)
        try:
            train(args, progress)
        finally:
            end_leftovers(log_dir)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None
