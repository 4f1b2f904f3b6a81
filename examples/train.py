# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""RL on Tinker: each Harbor trial is a rollout for tinker-cookbook's trainer.

    uv run python examples/train.py model_name=Qwen/Qwen3-8B learning_rate=4e-5 max_tokens=1024 \
      log_path=runs/greet dataset_builder.tasks=examples/greet \
      dataset_builder.agent_options.max_turns=8

`--help` lists all arguments. This file defines the arguments under `dataset_builder.`, and the
cookbook defines all others. You can train on any tasks that Harbor runs, with BasicLoopAgent, a
copy of its file, or a subclass. To use HarborTasks with the cookbook's own Config, set
`rollout_error_tolerance=HarborTrials(...)`.
"""

import asyncio
import logging
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from uuid import NAMESPACE_URL, uuid4, uuid5

import chz
import tinker
from harbor.environments.factory import EnvironmentFactory
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial
from harbor.utils.import_path import import_symbol
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.completers import TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl import rollouts, train, types
from tinker_cookbook.rl.rollout_strategy import MinViableGroup, RolloutResult, RolloutStrategy
from tinker_cookbook.utils.ml_log import setup_logging

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Removes what the trials of one training run left in Docker. Only the names of that run begin with
# its prefix, {0}.
CLEAN_UP = """\
docker ps -aq --filter name=^{0} | xargs -r docker rm -f
docker network ls -q --filter name=^{0} | xargs -r docker network rm
docker images -q --filter 'reference={0}*' | xargs -r docker rmi -f"""
# Harbor builds the agent from a configuration of plain values, which cannot hold a sampling client.
# So the agent samples through the `tinker_service` of its class. In asynchronous training, groups
# with different policies run at the same time, so a context variable holds each trial's policy.
_policy: ContextVar[TinkerTokenCompleter] = ContextVar("policy")


class PolicyService:
    """Stands in for Tinker's service client and sampling client, so that the agent samples from the
    cookbook's policy."""

    def create_sampling_client(self, **client_args: Any) -> "PolicyService":
        return self

    def result(self) -> "PolicyService":
        # The agent calls `result`, because the SDK's method returns a future of the client.
        return self

    def sample(self, **request: Any) -> Any:
        client: Any = _policy.get().sampling_client
        # SDK 0.38 gives the cookbook a future of the client instead of the client.
        return (client.result() if hasattr(client, "result") else client).sample(**request)


POLICY_SERVICE = PolicyService()


@dataclass
class HarborTrial(types.Env):
    """A trial. A finished trial has either an error or an outcome (from `training_data`)."""

    group: "HarborGroup"
    error: types.RolloutError | None = None
    outcome: Any = None
    step = None  # The cookbook never calls `step`.

    async def initial_observation(self) -> types.InitialObservationOverflow:
        """Run the whole trial. Returns an overflow, which ends the cookbook's rollout before it
        samples. Raises RuntimeError if the trial cannot be used for training."""
        group = self.group
        if group.policy:
            _policy.set(group.policy)
        try:
            config = group.tasks.trial_config(group.task, group.policy)
            agent = agent_module(group.tasks.agent)
            import_symbol(group.tasks.agent).tinker_service = POLICY_SERVICE
            async with group.slots:
                result = await (await Trial.create(config)).run()
            outcome = agent.training_data(result)
            if not outcome or not outcome.turns or outcome.reward is None:
                parts = (result, *(result.step_results or []))
                for info in filter(None, [part.exception_info for part in parts]):
                    text = f"{result.trial_name}: {info.exception_message}"
                    self.error = self.error or types.RolloutError(info.exception_type, text)
                raise ValueError(f"{result.trial_name}: no token ids, or no single reward")
            self.outcome = outcome
            return types.InitialObservationOverflow(reward=0.0)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise asyncio.CancelledError from error
            # Any other CancelledError comes from the trial, for example from a remote environment.
            text = f"{group.task}: {error}"
            self.error = self.error or types.RolloutError(type(error).__name__, text)
            raise RuntimeError(self.error.error_message) from error

    def trajectory(self) -> types.Trajectory:
        transitions = []
        for turn in self.outcome.turns:
            prompt = tinker.ModelInput.from_ints(turn.prompt_token_ids)
            action: Any = TokensWithLogprobs(turn.completion_token_ids, turn.logprobs)
            # The loss stable_reinforce needs the sequence id, and the price of a step needs the
            # cached tokens. The constructor accepts both only since cookbook 0.6.
            action.sequence_id = turn.extra.get("sequence_id")
            action.prompt_cache_hit_tokens = turn.extra.get("prompt_cache_hit_tokens") or 0
            is_last = turn is self.outcome.turns[-1]
            logs = {"trial": self.outcome.trial.trial_name}
            transitions.append(types.Transition(prompt, action, 0.0, is_last, logs=logs))
        return types.Trajectory(transitions, tinker.ModelInput.empty(), self.outcome.stop_reason)


def agent_module(import_path: str) -> Any:
    """The module that defines BasicLoopAgent, or a copy of it, for the agent `module:Class`."""
    return sys.modules[import_symbol(import_path).run.__module__]


@dataclass(frozen=True)
class HarborGroup(types.EnvGroupBuilder):
    """The trials of one task in one step. HarborTrials sets the policy and reads the trials."""

    task: str
    tasks: "HarborTasks"
    size: int
    slots: asyncio.Semaphore
    # The number of groups in the step (0 for an evaluation), and the errors of the groups in which
    # every trial failed.
    n_groups: int = 0
    step_errors: list[str] = field(default_factory=list)
    policy: TinkerTokenCompleter | None = None
    trials: list[HarborTrial] = field(default_factory=list)

    async def make_envs(self) -> list[HarborTrial]:
        if self.policy is None:
            raise ValueError("HarborTasks needs rollout_error_tolerance=HarborTrials(...)")
        self.trials.extend(HarborTrial(self) for _ in range(self.size))
        return self.trials[-self.size :]

    async def compute_group_rewards(self, trajectory_group: Any, env_group: Any) -> list[Any]:
        """The reward and the metrics of each trial. The cookbook logs the mean of each metric."""
        rewards = []
        for outcome in [trial.outcome for trial in env_group]:
            metrics = {"solved": float(outcome.reward >= 1)}
            for reason in agent_module(self.tasks.agent).StopReason:
                name = f"{types.STOP_METRIC_PREFIX}{reason}"
                metrics[name] = float(reason == outcome.stop_reason)
            for name in ("n_prefix_breaks", "n_turns_without_ids"):
                steps = outcome.trial.step_results or [outcome.trial]
                metrics[name] = sum(step.agent_result.metadata[name] for step in steps)
            rewards.append((outcome.reward, metrics))
        return rewards

    def logging_tags(self) -> list[str]:
        """The task's folder and the task. The cookbook logs separate metrics for both."""
        return [Path(self.task).parent.name, "/".join(Path(self.task).parts[-2:])]

    def fail(self, error: str) -> None:
        """Record that all trials of this group failed. Raises SystemExit once all groups of the
        step failed."""
        self.step_errors.append(error)
        if len(self.step_errors) == self.n_groups:
            reason = f"Every trial of a step failed. The first error: {self.step_errors[0]}"
            raise SystemExit(f"{reason}\nFix the cause, then run the same command to continue.")


@dataclass(frozen=True)
class HarborTrials(RolloutStrategy):
    """Runs trials with a strategy of the cookbook, which decides how many trials may fail."""

    tolerance: RolloutStrategy

    @property
    def catches_group_errors(self) -> bool:
        return self.tolerance.catches_group_errors

    async def execute(self, env_group_builder: Any, policy: Any) -> RolloutResult:
        """Run the trials of a HarborGroup. Raises the errors of `tolerance`, and SystemExit (see
        `HarborGroup.fail`)."""
        group: HarborGroup = replace(env_group_builder, policy=policy, trials=[])
        try:
            result = await self.tolerance.execute(group, policy)
        except Exception as error:
            if not any(trial.outcome for trial in group.trials):
                errors = [trial.error for trial in group.trials if trial.error]
                group.fail(str([*errors, error][0]))
            raise
        errors = [trial.error for trial in group.trials if trial.error]
        trials = cast(list[HarborTrial], result.envs)
        return RolloutResult([trial.trajectory() for trial in trials], result.envs, errors)


@chz.chz
class HarborTasks(types.RLDatasetBuilder):
    """The tasks to train on, and how their trials run. `main` sets the last three fields."""

    tasks: list[str] = chz.field(doc="task folders, or folders of tasks: a,b,...")
    test_tasks: list[str] = chz.field(default_factory=list, doc="the same, for evaluation")
    steps: int = chz.field(default=10, doc="total steps")
    group_size: int = chz.field(default=8, doc="trials of each task in a step")
    test_group_size: int = chz.field(default=4, doc="trials of each task in an evaluation")
    tasks_per_step: int | None = chz.field(default=None, doc="default: all")
    # Docker has addresses for about 30 networks, and each trial needs one network.
    concurrency: int = chz.field(default=16, doc="trials at once")
    environment: str = chz.field(default="docker", doc="Harbor's environment type, or module:Class")
    verifier: str | None = chz.field(default=None, doc="module:Class; default: the task's tests")
    agent: str = chz.field(default="basic_loop_agent:BasicLoopAgent", doc="module:Class")
    agent_options: dict[str, Any] = chz.field(default_factory=dict, doc="such as .max_turns=8")
    trial_options: dict[str, Any] = chz.field(default_factory=dict, doc="fields of TrialConfig")
    model_name: str | None = chz.field(default=None, doc="default: the trained model")
    renderer_name: str | None = chz.field(default=None, doc="default: the trained model's")
    trials_dir: str = chz.field(default="trials", doc="default: log_path/trials")

    async def __call__(self) -> tuple["TaskDataset", "TaskDataset | None"]:
        groups = self.groups(self.tasks, self.group_size)
        n = min(self.tasks_per_step or len(groups), len(groups))
        training = TaskDataset([replace(group, n_groups=n) for group in groups], n, self.steps)
        tests = self.groups(self.test_tasks, self.test_group_size)
        return training, TaskDataset(tests, len(tests), 1) if tests else None

    def groups(self, folders: list[str], size: int) -> list[HarborGroup]:
        """A group for each task in these folders. Raises ValueError if a folder has no task."""
        groups, slots = [], asyncio.Semaphore(self.concurrency)
        for folder in folders:
            path = Path(folder).expanduser().resolve()
            files = sorted(path.glob("task.toml")) or sorted(path.glob("*/task.toml"))
            if not files:
                raise ValueError(f"{folder} is neither a task nor a folder of tasks (no task.toml)")
            groups += [HarborGroup(str(file.parent), self, size, slots) for file in files]
        return groups

    def prefix(self) -> str:
        """The prefix of the names of this training run's containers."""
        return f"rl-{uuid5(NAMESPACE_URL, str(Path(self.trials_dir).resolve())).hex[:8]}-"

    def trial_config(self, task: str, policy: Any) -> TrialConfig:
        """The configuration of a trial with the policy's limits. Raises ValueError for an option
        that is unknown or that the trainer sets."""
        limits = {"max_tokens": policy.max_tokens, "temperature": policy.temperature}
        if wrong := limits.keys() & self.agent_options.keys():
            raise ValueError(f"agent_options has {', '.join(wrong)}, which the trainer sets")
        kwargs = {"renderer_name": self.renderer_name, **self.agent_options, **limits}
        is_class = ":" in self.environment
        environment = dict[str, Any](
            type=None if is_class else self.environment,
            import_path=self.environment if is_class else None,
        )
        if self.environment == "docker":
            # Otherwise Harbor 0.25 and later copy /logs/agent over the agent's files on the host.
            environment["kwargs"] = {"auto_mounting": True}
        config = {
            "task": {"path": task},
            "trial_name": f"{self.prefix()}{Path(task).name[:32]}-{uuid4().hex[:12]}",
            "trials_dir": self.trials_dir,
            # The trainer also owns the keys with None, so `merged` rejects them in trial_options.
            "agent": {
                "name": None,
                "import_path": self.agent,
                "model_name": self.model_name,
                "kwargs": kwargs,
            },
            "environment": environment,
            "verifier": {"import_path": self.verifier},
        }
        # Without extra="forbid", a misspelled option would be ignored.
        return TrialConfig.model_validate(merged(config, self.trial_options), extra="forbid")


def merged(ours: dict[str, Any], options: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Our configuration of a trial, merged with trial_options. `place` is the path of both dicts,
    such as "environment.". Raises ValueError for an option that our configuration already sets."""
    both = dict(ours)
    for name, value in options.items():
        if isinstance(ours.get(name), dict) and isinstance(value, dict):
            both[name] = merged(ours[name], value, f"{place}{name}.")
        elif name in ours:
            text = "which the trainer sets from its other arguments (see --help)"
            raise ValueError(f"trial_options has {place}{name}, {text}")
        else:
            both[name] = value
    return both


@dataclass
class TaskDataset(types.RLDataset):
    groups: list[HarborGroup]
    batch_size: int
    n_batches: int

    def __len__(self) -> int:
        return self.n_batches

    def get_batch(self, index: int) -> list[HarborGroup]:
        """The groups of a step. The step's number alone determines their tasks, so a repeated step
        has the same tasks."""
        errors = []
        groups = random.Random(index).sample(self.groups, self.batch_size)
        return [replace(group, step_errors=errors) for group in groups]


@chz.chz
class Config(train.Config):
    """The cookbook's Config with different defaults. Each step saves what a restart needs."""

    dataset_builder: HarborTasks
    recipe_name: str = "harbor"
    rollout_error_tolerance: Any = MinViableGroup()
    save_every: int = 0
    rolling_save_every: int = 1
    rolling_ttl_seconds: int = 7 * 24 * 3600


def run_here(script: str) -> None:
    """Run a clean-up script on this machine."""
    subprocess.run(["bash", "-c", script], capture_output=True, start_new_session=True)


def main(
    config: Config,
    rollout_executor: Executor | None = None,
    clean_up: Callable[[str], None] = run_here,
) -> None:
    """Start or continue training. `clean_up` runs a bash script where the trials ran. Raises
    ValueError for a wrong configuration before anything connects, SystemExit after a signal or if
    all trials of a step failed, and errors of the SDK."""
    names = {"model_name": config.model_name, "renderer_name": config.renderer_name}
    trials_dir = str(Path(config.log_path, "trials").resolve())
    builder = chz.replace(config.dataset_builder, **names, trials_dir=trials_dir)
    for name in ("steps", "group_size", "test_group_size", "concurrency", "tasks_per_step"):
        number = getattr(builder, name)
        if number is not None and number < 1:
            raise ValueError(f"dataset_builder.{name}={number}: it has to be 1 or more")
    task = builder.groups([*builder.test_tasks, *builder.tasks], 1)[-1].task
    trial = builder.trial_config(task, config)
    import_symbol(builder.agent).options_model(**trial.agent.kwargs)
    for path in filter(None, (builder.verifier, trial.environment.import_path)):
        import_symbol(path)
    if not rollout_executor:
        EnvironmentFactory.run_preflight(trial.environment.type, trial.environment.import_path)
    strategy = config.effective_rollout_strategy()
    if not isinstance(strategy, HarborTrials):
        strategy = HarborTrials(strategy)
    config = chz.replace(config, dataset_builder=builder, rollout_error_tolerance=strategy)
    script = CLEAN_UP.format(builder.prefix())
    print(f"After kill -9, remove what the trials left in Docker:\n{script}")
    try:
        asyncio.run(train_and_evaluate(config, rollout_executor))
    finally:
        # A signal also ends each running `docker compose`, which may then leave something behind.
        clean_up(script)


async def train_and_evaluate(config: Config, rollout_executor: Executor | None) -> None:
    """Train, then evaluate the last weights unless the cookbook already did (0.6.1 does)."""
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    rollouts.set_rollout_executor(rollout_executor)
    await train.main(config)
    _, tests = await config.dataset_builder()
    last = get_last_checkpoint(config.log_path, "sampler_path")
    log = setup_logging(config.log_path, do_configure_logging_module=False)
    store: Any = log.store
    rows = [row for row in store.read_metrics() if row.get("step") == last.batch]
    if tests and config.eval_every and not any("test/env/all/solved" in row for row in rows):
        strategy = config.effective_rollout_strategy()
        evaluator = train.RLTestSetEvaluator(tests, config.max_tokens, strategy=strategy)
        service = tinker.ServiceClient(base_url=config.base_url)
        # SDK 0.38 introduced the method without _async. The tests' fake has both methods.
        client = await service.create_sampling_client_async(last.sampler_path)  # ty: ignore[deprecated]
        log.log_metrics(await evaluator(client), step=last.batch)


def stop() -> None:
    """End training after a signal. Ignore later signals, which would interrupt the clean-up."""
    for number in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    print("Waiting for the trials to remove their containers ...")
    raise SystemExit("stopped; to continue, run the same command again")


if __name__ == "__main__":
    # The agent's module may be in the current folder.
    sys.path.append("")
    # Each trial.log already contains Harbor's debug lines.
    logging.getLogger("harbor.utils.logger").propagate = False
    # Cookbook 0.5.8 calls methods that SDK 0.38 deprecates. That causes five warnings a step.
    warnings.filterwarnings("ignore", "DEPRECATED: ", FutureWarning)
    main(chz.entrypoint(Config))
