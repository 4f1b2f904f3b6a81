"""RL on Tinker with rollouts from Harbor: one command, and a curve to look at.

    uv run python examples/train.py --model Qwen/Qwen3-8B --task examples/greet --max-turns 8

A step runs each task --group-size times with the weights so far, which is one Harbor job, and
updates the weights by the rewards, each relative to the mean of its task. The log folder gets
metrics.jsonl (a line a step, under tinker-cookbook's names), config.json and code.diff, jobs/, for
`harbor view`, and progress.json, where a second start with the same arguments goes on. With
WANDB_PROJECT set, the metrics go to W&B too.

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
import statistics
import subprocess
import sys
import time
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
    "log_dir",
    "plot",
    "steps",
}


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
    eval_help = "task, or folder of tasks, that is sampled and not trained on; may be repeated"
    add("--eval-task", action="append", default=[], help=eval_help)
    add("--eval-every", type=positive, help="which is done every so many steps")
    add("--log-dir", help="a second start with it goes on there (runs/TASK-MODEL)")
    add("--plot", action="store_true", help="draw curve.png after each step, with matplotlib")
    args = parser.parse_args(argv)

    if args.log_dir is None:
        names = [Path(name).resolve().name for name in (*args.task, args.model)]
        args.log_dir = "runs/" + "-".join(names)
    args.task = find_tasks(args.task)
    args.eval_task = find_tasks(args.eval_task)
    check_arguments(args)
    return args


def check_arguments(args: argparse.Namespace) -> None:
    """Raises SystemExit for what would fail, or teach nothing, when a step has been paid for."""
    if args.group_size < 2:
        raise SystemExit(f"--group-size {args.group_size}: it takes 2 to compare rewards")
    if args.tasks_per_step and args.tasks_per_step > len(args.task):
        raise SystemExit(f"--tasks-per-step {args.tasks_per_step}: {len(args.task)} are there")
    if bool(args.eval_task) != bool(args.eval_every):
        raise SystemExit("--eval-task and --eval-every: one is nothing without the other")
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
    for folder in map(Path, folders):
        files = [folder / "task.toml"]
        if not files[0].exists():
            files = sorted(folder.glob("*/task.toml"))
        if not files:
            raise SystemExit(f"{folder}: no task is there, nor a folder of tasks (task.toml)")
        tasks += [str(file.parent) for file in files]
    return list(dict.fromkeys(tasks))


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


def job_config(args: argparse.Namespace, name: str, tasks: list[str], model_path: str) -> JobConfig:
    """A job: each task, --group-size times, with the checkpoint `model_path`."""
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
        n_attempts=args.group_size,
        n_concurrent_trials=args.concurrency,
        quiet=True,
    )


async def run_job(config: JobConfig) -> list[TrialResult]:
    """Run a job to its end. A trial that failed is a result like any other."""
    job = await Job.create(config)
    result = await job.run()
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

    Raises SystemExit if there is none to train on.
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
        raise SystemExit(f"{name}: no trial to train on, the last was left out: {reason}")
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
    name: str, tasks: list[str], model_path: str, args: argparse.Namespace, runner: asyncio.Runner
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Run a job. Returns the groups of its trials, and its metrics.

    Raises SystemExit if there is no trial to train on, and what Harbor raises.
    """
    agent = module_of(args.agent)
    started = time.monotonic()
    config = job_config(args, name, tasks, model_path)
    trials = runner.run(run_job(config))
    trajectories, causes = read_trials(name, trials, agent)
    groups = group_by_task(trajectories, agent)
    metrics = compute_trajectory_metrics(list(groups.values()), [[path.name] for path in groups])
    rewards = [trajectory.reward for trajectory in trajectories]
    metrics["env/all/reward/std"] = statistics.pstdev(rewards)
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


def run_step(
    step: int, training: tinker.TrainingClient, args: argparse.Namespace, runner: asyncio.Runner
) -> dict[str, float]:
    """Sample, and update the weights. Prints one line, and returns the step's metrics.

    Raises SystemExit if there is nothing to train on, and what the SDK and Harbor raise.
    """
    checkpoint = training.save_weights_for_sampler(f"{step:04}", ttl_seconds=WEEK_SEC).result()
    evaluated = {}
    if args.eval_task and step % args.eval_every == 0:
        _, evaluated = sample(f"eval of step {step}", args.eval_task, checkpoint.path, args, runner)
    # By the step alone, so that after a crash it takes the same ones.
    n_tasks = args.tasks_per_step or len(args.task)
    tasks = random.Random(step).sample(args.task, n_tasks)
    groups, metrics = sample(f"step {step}", tasks, checkpoint.path, args, runner)
    started = time.monotonic()
    kl = update(training, groups, args)
    metrics |= kl
    metrics["time/training"] = time.monotonic() - started
    # As tinker-cookbook calls them.
    metrics |= {f"test/{name}": value for name, value in evaluated.items()}
    print(f"step {step}: {summary(metrics, groups)}", flush=True)
    return metrics


def summary(metrics: dict[str, float], groups: list[TrajectoryGroup]) -> str:
    """A step in one line."""
    n_trials = sum(len(group.trajectories_G) for group in groups)
    parts = [f"reward {metrics['env/all/reward/total']:.3f} of {n_trials} trials"]
    if "test/env/all/reward/total" in metrics:
        parts.append(f"eval reward {metrics['test/env/all/reward/total']:.3f}")
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
    """How far the run in the folder is: the steps done, and the state to go on from, or None.

    Raises SystemExit if it began with other arguments, or has done more steps.
    """
    log_dir = Path(args.log_dir)
    progress_file = log_dir / "progress.json"
    if not progress_file.exists():
        return {"step": 0, "state": None}
    progress = json.loads(progress_file.read_text())
    began_with = json.loads((log_dir / "config.json").read_text())
    for name, value in vars(args).items():
        before = began_with.get(name, value)
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


def end_leftovers(log_dir: Path) -> None:
    """End the containers and networks that a killed run left in Docker, or say how."""
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
    for project in sorted(projects):
        if project.startswith(prefixes):
            command = f"docker compose --project-name {project} down --volumes --timeout 1"
            print(f"ending what a killed run left: {command}", flush=True)
            subprocess.run(command.split(), capture_output=True)


def train(args: argparse.Namespace, progress: dict[str, Any]) -> None:
    """The steps that are left. Raises what `main` does."""
    log_dir = Path(args.log_dir)
    try:
        service = tinker.ServiceClient(base_url=args.base_url)
        training = open_training(service, args, progress["state"])
    except (tinker.TinkerError, ValueError) as error:
        raise SystemExit(f"no adapter of rank {args.rank}: {one_line(error)}") from None
    # Sampling and training share a session: stable_reinforce looks at what was recorded in it.
    module_of(args.agent).use_service(service)
    metrics_file = log_dir / "metrics.jsonl"
    if metrics_file.exists():
        # But for the line of a step whose progress was not written: that step is done again.
        lines = metrics_file.read_text().splitlines(keepends=True)
        write_file(metrics_file, "".join(lines[: progress["step"]]))
    logger = setup_logging(
        args.log_dir,
        wandb_project=os.environ.get("WANDB_PROJECT"),
        config=vars(args),
        do_configure_logging_module=False,
    )
    # One event loop for all jobs: Harbor's Docker environment keeps locks that belong to the first.
    with contextlib.closing(logger), asyncio.Runner() as runner:
        try:
            for step in range(progress["step"], args.steps):
                metrics = run_step(step, training, args, runner)
                state = training.save_state(f"{step:04}", ttl_seconds=WEEK_SEC).result()
                logger.log_metrics(metrics, step=step)
                # By rename: a kill leaves the old file or the new one.
                done = {"step": step + 1, "state": state.path}
                write_file(log_dir / "progress.json", json.dumps(done))
                if args.plot:
                    from plot import draw

                    draw(log_dir)
            final = training.save_weights_for_sampler("final").result()
        finally:
            give_back(training, args.base_url)
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
        train(args, progress)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None
