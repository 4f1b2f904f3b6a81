"""RL on Tinker with rollouts from Harbor: one command, and a curve to look at.

    uv run python examples/train.py --model Qwen/Qwen3-8B --task examples/greet --max-turns 8

A step runs each task --group-size times with the weights so far, which is one Harbor job, and
updates the weights by the rewards, each relative to the mean of its task. The log folder gets
metrics.jsonl (a line a step, under tinker-cookbook's names), config.json and code.diff, jobs/, for
`harbor view`, and progress.json, where a second start goes on. With WANDB_PROJECT set, the metrics
go to W&B too.

Read for this: tinker 0.25 and 0.38, tinker-cookbook 0.5.7, 0.5.8 and 0.6.1. Of the cookbook's
helpers three are not used: `train_step` and `save_checkpoint_async` of 0.5.8 call what tinker 0.38
says is deprecated, a page of warnings a step; and what `get_last_checkpoint` reads is appended to,
so that a kill can leave half a line.
"""

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import os
import time
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import tinker
from harbor.job import Job
from harbor.models.job.config import JobConfig
from harbor.models.trial.result import TrialResult
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.metrics import compute_kl_sample_train
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.ml_log import setup_logging

from basic_loop_agent import (
    Trajectory,
    to_tinker,
    trial_to_trajectory,
    use_service,
    write_file,
)

# How long Tinker keeps what a step saves; the final checkpoint stays for good.
WEEK_SEC = 7 * 24 * 3600


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, by default the process's. Raises SystemExit for a bad one."""
    parser = argparse.ArgumentParser(
        description="RL on Tinker with rollouts from Harbor. Start it again to go on after a crash."
    )
    add = parser.add_argument
    add("--model", required=True, help="base model, as Tinker names it")
    add("--task", required=True, action="append", help="task folder; may be repeated")
    add("--steps", type=int, default=10, help="steps in all (%(default)s)")
    add("--group-size", type=int, default=8, help="trials of each task in a step (%(default)s)")
    add("--max-turns", type=int, default=1, help="above 1 the model runs commands (%(default)s)")
    add("--max-tokens", type=int, default=4096, help="most tokens of a reply (%(default)s)")
    add("--learning-rate", type=float, default=4e-5, help="Adam's, constant (%(default)s)")
    add("--rank", type=int, default=32, help="rank of the LoRA adapter (%(default)s)")
    add("--renderer", help="tinker-cookbook renderer (the one recommended for the model)")
    add("--base-url", help="a Tinker server of your own ($TINKER_BASE_URL, else Tinker's)")
    loss_help = "Tinker's loss; stable_reinforce needs tinker-cookbook 0.6 (%(default)s)"
    add("--loss", default="importance_sampling", help=loss_help)
    add("--log-dir", help="a second start with it goes on there (runs/TASK-MODEL)")
    add("--plot", action="store_true", help="draw curve.png after each step, with matplotlib")
    args = parser.parse_args(argv)

    if args.log_dir is None:
        names = [Path(name).resolve().name for name in (*args.task, args.model)]
        args.log_dir = "runs/" + "-".join(names)
    # Said here, not when a step has been paid for.
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot: start this with `uv run --with matplotlib python examples/train.py`")
    fields = [field.name for field in dataclasses.fields(TokensWithLogprobs)]
    if args.loss == "stable_reinforce" and "sequence_id" not in fields:
        parser.error("--loss stable_reinforce: it needs tinker-cookbook 0.6 or later")
    return args


def job_config(args: argparse.Namespace, step: int, model_path: str) -> JobConfig:
    """A step's job: every task, --group-size times, with the checkpoint `model_path`."""
    options: dict[str, Any] = {
        "model_path": model_path,
        "max_tokens": args.max_tokens,
        "max_turns": args.max_turns,
        "renderer_name": args.renderer,
    }
    if args.loss == "stable_reinforce":
        options["llm_kwargs"] = {"record_stability_info": True}
    agent = "basic_loop_agent:BasicLoopAgent"
    return JobConfig(
        # With the time, for after a crash the same step is run again.
        job_name=f"{step:04}-{datetime.now():%Y%m%d-%H%M%S-%f}",
        jobs_dir=Path(args.log_dir, "jobs"),
        agents=[{"import_path": agent, "model_name": args.model, "kwargs": options}],
        tasks=[{"path": path} for path in args.task],
        n_attempts=args.group_size,
        n_concurrent_trials=32,
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
            if error:
                return f"{error.exception_type}: {error.exception_message}"
        return "not scored: the verifier gave no reward"
    if trajectory.failure:
        return trajectory.failure
    if trajectory.reward is None:
        return f"no single reward: {trajectory.rewards}"
    if not trajectory.turns:
        return "no token ids: nothing was sampled"
    return None


def read_trials(step: int, trials: list[TrialResult]) -> tuple[list[Trajectory], Counter[str]]:
    """The trials to train on, and how many were left out, by cause; each of these is named.

    Raises SystemExit if there is none to train on.
    """
    usable = []
    causes: Counter[str] = Counter()
    for trial in trials:
        try:
            trajectory = trial_to_trajectory(trial)
            reason = why_left_out(trial, trajectory)
        except ValueError as error:
            reason = f"ValueError: {error}"
        if reason is None:
            usable.append(trajectory)
            continue
        # Docker's errors are a page.
        reason = " ".join(reason.split())[:300]
        causes[reason.partition(":")[0]] += 1
        print(f"step {step}: left out {trial.trial_name}: {reason}", flush=True)
    if not usable:
        raise SystemExit(f"step {step}: no trial to train on, the last was left out: {reason}")
    return usable, causes


def group_by_task(trajectories: list[Trajectory]) -> dict[Path, TrajectoryGroup]:
    """The trials of a task are a group."""
    by_task = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.trial.config.task.path].append(trajectory)
    groups = {}
    for path, members in by_task.items():
        rollouts = [to_tinker(trajectory) for trajectory in members]
        rewards = [trajectory.reward for trajectory in members]
        groups[path] = TrajectoryGroup(rollouts, rewards, [{} for _ in members])
    return groups


def update(
    training: tinker.TrainingClient,
    groups: list[TrajectoryGroup],
    args: argparse.Namespace,
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
    step: int,
    training: tinker.TrainingClient,
    args: argparse.Namespace,
    runner: asyncio.Runner,
) -> dict[str, float]:
    """Sample, and update the weights. Prints one line, and returns the step's metrics.

    Raises SystemExit if there is nothing to train on, and what the SDK and Harbor raise.
    """
    started = time.monotonic()
    checkpoint = training.save_weights_for_sampler(f"{step:04}", ttl_seconds=WEEK_SEC).result()
    trials = runner.run(run_job(job_config(args, step, checkpoint.path)))
    trajectories, causes = read_trials(step, trials)
    groups = group_by_task(trajectories)
    sampled = time.monotonic()
    kl = update(training, list(groups.values()), args)
    trained = time.monotonic()

    metrics = compute_trajectory_metrics(list(groups.values()), [[path.name] for path in groups])
    metrics |= kl
    metrics["time/sampling"] = sampled - started
    metrics["time/training"] = trained - sampled
    for cause, count in causes.items():
        metrics[f"left_out/{cause}"] = count
    stop_reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    shares = []
    for reason, count in stop_reasons.most_common():
        share = count / len(trajectories)
        metrics[f"stop_reason/{reason}"] = share
        shares.append(f"{share:.0%} {reason}")

    divergence = "no update (equal rewards within each group)"
    if kl:
        v1 = kl["optim/kl_sample_train_v1"]
        v2 = kl["optim/kl_sample_train_v2"]
        divergence = f"KL {v1:.4f} (v1) {v2:.4f} (v2)"
    print(
        f"step {step}: reward {metrics['env/all/reward/total']:.3f} of {len(trajectories)} trials, "
        f"{', '.join(shares)}, {metrics['env/all/total_ac_tokens']:,} tokens, {divergence}, "
        f"{trained - started:.0f} s",
        flush=True,
    )
    return metrics


def open_training(
    service: tinker.ServiceClient,
    args: argparse.Namespace,
    state: str | None,
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


def main(argv: list[str] | None = None) -> None:
    """Train, or go on training. Raises SystemExit, and what the SDK and Harbor raise."""
    args = parse_arguments(argv)
    log_dir = Path(args.log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    progress_file = log_dir / "progress.json"
    metrics_file = log_dir / "metrics.jsonl"
    progress = {"step": 0, "state": None}
    if progress_file.exists():
        progress = json.loads(progress_file.read_text())
        print(f"{progress['step']} of {args.steps} steps are done: going on from {progress_file}")
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

    service = tinker.ServiceClient(base_url=args.base_url)
    # Sampling and training share a session: stable_reinforce looks at what was recorded in it.
    use_service(service)
    training = open_training(service, args, progress["state"])
    # One event loop for all jobs: Harbor's Docker environment keeps locks that belong to the first.
    with asyncio.Runner() as runner:
        for step in range(progress["step"], args.steps):
            metrics = run_step(step, training, args, runner)
            state = training.save_state(f"{step:04}", ttl_seconds=WEEK_SEC).result()
            logger.log_metrics(metrics, step=step)
            # By rename: a kill leaves the old file or the new one.
            write_file(progress_file, json.dumps({"step": step + 1, "state": state.path}))
            if args.plot:
                from plot import draw

                draw(log_dir)
    final = training.save_weights_for_sampler("final").result()
    logger.close()
    print(f"final checkpoint: {final.path}")


if __name__ == "__main__":
    main()
