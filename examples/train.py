# SPDX-License-Identifier: Apache-2.0
"""RL on Tinker: a Harbor trial is a rollout of tinker-cookbook's trainer.

    uv run python examples/train.py model_name=Qwen/Qwen3-8B learning_rate=4e-5 max_tokens=1024 \
      log_path=runs/greet dataset_builder.tasks=examples/greet \
      dataset_builder.agent_options.max_turns=8

`--help` lists all arguments. Those below `dataset_builder.` are this file's, the others are the
cookbook's (`tinker_cookbook.rl.train.Config`). A step runs each of its tasks `group_size` times
with the weights so far, and updates the weights by the rewards, each relative to the mean of its
task. The same command, started again, goes on after the last finished step.

Tasks may be any that Harbor runs, in any of its environments. The agent is BasicLoopAgent, a copy
of it or a subclass. Tested with tinker-cookbook 0.5.7, 0.5.8 and 0.6.1.
"""

import asyncio
import contextvars
import functools
import importlib
import logging
import os
import random
import sys
import warnings
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import chz
from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial
from tinker import ModelInput
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl import train, types
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy

logger = logging.getLogger(__name__)

# The sampling client of the group that runs. Each group has its own context.
_sampling_client: contextvars.ContextVar[Any] = contextvars.ContextVar("sampling_client")


class PolicyService:
    """Stands in for Tinker's service and client: the agent samples from the cookbook's policy."""

    def create_sampling_client(self, **client_args: Any) -> "PolicyService":
        """The checkpoint is the policy's, whatever the agent asks for."""
        return self

    def sample(self, **request: Any) -> Any:
        """As `tinker.SamplingClient.sample`."""
        return _sampling_client.get().sample(**request)


POLICY_SERVICE = PolicyService()


@dataclass(frozen=True)
class HarborGroup(types.EnvGroupBuilder):
    """The trials of one task. `config` holds the fields of TrialConfig that they have in common."""

    task: str
    config: dict[str, Any]
    group_size: int
    concurrency: int

    async def make_envs(self) -> list[types.Env]:
        """A trial has no Env: HarborTrials runs it whole."""
        raise NotImplementedError

    def logging_tags(self) -> list[str]:
        """The task's name, under which the cookbook logs its reward."""
        return [Path(self.task).name]


@dataclass(frozen=True)
class HarborTrials(RolloutStrategy):
    """Runs the trials of a group. A failed trial is named, and left out."""

    @property
    def catches_group_errors(self) -> bool:
        """A group that fails is skipped."""
        return True

    async def execute(
        self, env_group_builder: HarborGroup, policy: TokenCompleter
    ) -> RolloutResult:
        """Run the trials. Raises AllTrajectoriesFailedError if fewer than two have a reward."""
        group = env_group_builder
        agent_module(group.config["agent"]["import_path"]).use_service(POLICY_SERVICE)
        client = policy.sampling_client
        # SDK 0.38 gives the cookbook a future in its place.
        _sampling_client.set(client.result() if hasattr(client, "result") else client)
        size = group.group_size
        trials = [asyncio.create_task(run_trial(group), name="trial") for _ in range(size)]
        # If this is cancelled, `gather` waits for all trials: each has a container to remove.
        outcomes = await asyncio.gather(*trials, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, types.RolloutError)]
        trajectories = [outcome for outcome in outcomes if outcome not in errors]
        if len(trajectories) < min(2, size):
            raise AllTrajectoriesFailedError(f"{group.task}: fewer than two trials can be compared")
        return RolloutResult(trajectories, envs=trajectories, errors=errors)


async def run_trial(group: HarborGroup) -> types.Trajectory | types.RolloutError:
    """Run a trial of the group, when there is room for one more."""
    name = f"rl-{Path(group.task).name[:32]}-{uuid4().hex[:12]}"
    config = TrialConfig(task={"path": group.task}, trial_name=name, **group.config)
    try:
        async with trial_slots(asyncio.get_running_loop(), group.concurrency):
            result = await (await Trial.create(config)).run()
        return to_trajectory(result, agent_module(config.agent.import_path))
    except Exception as error:
        logger.warning("left out %s: %s", name, " ".join(str(error).split())[:300])
        return types.RolloutError(type(error).__name__, str(error))


@functools.lru_cache(maxsize=8)
def trial_slots(event_loop: asyncio.AbstractEventLoop, n: int) -> asyncio.Semaphore:
    """At most `n` trials at a time, over all groups of an event loop."""
    # A process of a pool has a new event loop for each group. Harbor (0.13 to 0.24) has no other
    # way to forget the locks of an old one.
    DockerEnvironment._image_build_locks.clear()
    return asyncio.Semaphore(n)


def to_trajectory(trial: TrialResult, agent: ModuleType) -> types.Trajectory:
    """The trial as the cookbook sees it. Its last transition has the reward.

    Raises ValueError if the trial failed, has no single reward or no token ids, if ids and logprobs
    do not align, or if a number is not finite.
    """
    whole = agent.trial_to_trajectory(trial)
    if whole is None:
        parts = (trial, *(trial.step_results or []))
        errors = [part.exception_info.exception_message for part in parts if part.exception_info]
        raise ValueError(f"it failed: {'; '.join(errors) or 'no reward'}")
    if whole.reward is None or not whole.turns:
        raise ValueError(f"no token ids, or no single reward: {trial.verifier_result}")
    transitions = []
    for turn in whole.turns:
        prompt = ModelInput.from_ints(turn.prompt_token_ids)
        action = TokensWithLogprobs(turn.completion_token_ids, turn.logprobs)
        # For the loss stable_reinforce. The constructor has it from cookbook 0.6 on.
        action.sequence_id = turn.extra.get("sequence_id")
        transitions.append(types.Transition(prompt, action, reward=0.0, episode_done=False))
    # The cookbook logs the mean of each metric over the trials.
    metrics = {"solved": float(whole.reward >= 1)}
    for reason in ("completed", "max_turns", "max_tokens"):
        metrics[f"stopped_by/{reason}"] = float(reason == whole.stop_reason)
    last = transitions[-1]
    last.reward, last.episode_done, last.metrics = whole.reward, True, metrics
    last.logs = {"trial": trial.trial_name}
    return types.Trajectory(transitions, ModelInput.empty(), whole.stop_reason)


def agent_module(import_path: str) -> ModuleType:
    """The module of BasicLoopAgent, or of the copy of it, that the agent `module:Class` is from."""
    name, _, class_name = import_path.partition(":")
    agent = getattr(importlib.import_module(name), class_name)
    return sys.modules[agent.run.__module__]


@chz.chz
class HarborTasks(types.RLDatasetBuilder):
    """What is trained on, and how its trials run."""

    tasks: list[str] = chz.field(doc="task folders, or folders of tasks: a,b,...")
    test_tasks: list[str] = chz.field(default_factory=list, doc="the same, to evaluate on")
    steps: int = chz.field(default=10, doc="steps in all")
    group_size: int = chz.field(default=8, doc="trials of each task in a step")
    test_group_size: int = chz.field(default=4, doc="trials of each task in an evaluation")
    tasks_per_step: int | None = chz.field(default=None, doc="default: all")
    # Docker has addresses for about 30 networks, and a trial takes one.
    concurrency: int = chz.field(default=16, doc="trials at a time")
    environment: str = chz.field(default="docker", doc="a type of Harbor's, or module:Class")
    verifier: str | None = chz.field(default=None, doc="module:Class; default: the task's tests")
    agent: str = chz.field(default="basic_loop_agent:BasicLoopAgent", doc="module:Class")
    agent_options: dict[str, Any] = chz.field(default_factory=dict, doc="such as .max_turns=8")
    trial_config: dict[str, Any] = chz.field(default_factory=dict, doc="more of TrialConfig")

    async def __call__(self) -> tuple["TaskDataset", None]:
        """The training tasks. (`main` makes an evaluator of each of `test_tasks`.)"""
        groups = self.groups(self.tasks, self.group_size)
        batch_size = self.tasks_per_step or len(groups)
        if batch_size > len(groups):
            raise ValueError(f"tasks_per_step is {batch_size}, but there are {len(groups)} tasks")
        return TaskDataset(groups, batch_size, self.steps), None

    def groups(self, folders: list[str], group_size: int) -> list[HarborGroup]:
        """A group for each task in these folders. Raises ValueError if one has no task."""
        tasks = []
        for folder in folders:
            path = Path(folder).expanduser()
            files = sorted(path.glob("task.toml")) or sorted(path.glob("*/task.toml"))
            if not files:
                raise ValueError(f"{folder} is no task, nor a folder of tasks (task.toml)")
            tasks += [str(file.parent) for file in files]
        common = (self.trial_config, group_size, self.concurrency)
        return [HarborGroup(task, *common) for task in tasks]


@dataclass
class TaskDataset(types.RLDataset):
    """`n_batches` batches of random tasks, and an empty one: the cookbook evaluates before a batch,
    and so evaluates after the last step too."""

    groups: list[HarborGroup]
    batch_size: int
    n_batches: int

    def __len__(self) -> int:
        return self.n_batches + 1

    def get_batch(self, index: int) -> list[HarborGroup]:
        """The tasks of a step, by its number alone, so that after a crash it has the same ones."""
        n_tasks = self.batch_size if index < self.n_batches else 0
        return random.Random(index).sample(self.groups, n_tasks)


@chz.chz
class Config(train.Config):
    """The cookbook's, with other defaults."""

    dataset_builder: HarborTasks
    recipe_name: str = "harbor"
    eval_every: int | None = chz.field(default=None, doc="default: before and after all steps")
    # Saved after each step, for a second start.
    save_every: int = 0
    rolling_save_every: int = 1
    rolling_ttl_seconds: int = 7 * 24 * 3600


def main(config: Config, rollout_executor: Executor | None = None) -> None:
    """Train, or go on training. The cookbook runs the groups of a step in `rollout_executor`, such
    as a process pool. Raises what the cookbook, the SDK and Harbor raise."""
    builder = config.dataset_builder
    # A wrong agent or folder is an error before anything connects.
    agent_module(builder.agent)
    builder.groups(builder.tasks, 1)
    names = ("max_tokens", "temperature", "renderer_name")
    options = {name: getattr(config, name) for name in names} | builder.agent_options
    kind = "import_path" if ":" in builder.environment else "type"
    trial_config = {
        "trials_dir": Path(config.log_path, "trials"),
        "agent": {"import_path": builder.agent, "model_name": config.model_name, "kwargs": options},
        "environment": {kind: builder.environment},
        "verifier": {"import_path": builder.verifier} if builder.verifier else {},
        **builder.trial_config,
    }
    builder = chz.replace(builder, trial_config=trial_config)
    evaluators = []
    for folder in builder.test_tasks:
        groups = builder.groups([folder], builder.test_group_size)
        dataset = TaskDataset(groups, len(groups), 1)
        name = f"test/{Path(folder).resolve().name}"
        make = functools.partial(RLTestSetEvaluator, strategy=HarborTrials())
        evaluators.append(functools.partial(make, dataset, config.max_tokens, name))
    config = chz.replace(
        config,
        dataset_builder=builder,
        evaluator_builders=[*config.evaluator_builders, *evaluators],
        eval_every=builder.steps if config.eval_every is None else config.eval_every,
        rollout_error_tolerance=HarborTrials(),
    )
    asyncio.run(train_to_the_end(config, rollout_executor))


async def train_to_the_end(config: Config, rollout_executor: Executor | None) -> None:
    """Train. After Ctrl-C the cookbook does not wait for the trials, but they have containers."""
    try:
        await train.main(config, rollout_executor)
    finally:
        trials = [task for task in asyncio.all_tasks() if task.get_name() == "trial"]
        if trials:
            await asyncio.wait(trials)
            # asyncio has a traceback for each `docker compose` that is still there.
            await asyncio.sleep(1)


if __name__ == "__main__":
    # The agent may be in the current folder.
    sys.path.append(os.getcwd())
    # Harbor's debug lines of each trial are in its trial.log, too.
    logging.getLogger("harbor.utils.logger").propagate = False
    # Cookbook 0.5.8 calls methods that SDK 0.38 says are deprecated: five warnings a step.
    warnings.filterwarnings("ignore", "DEPRECATED: ", FutureWarning)
    try:
        main(chz.entrypoint(Config))
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None
