# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""train.py on several machines: each group of trials runs on a node of a Ray cluster.

    uv run --with ray python examples/ray_train.py ...  # the arguments of train.py

To start the cluster, run `ray start --head` on one machine, and `ray start --address=...` on each
other machine. A node needs this project and its packages in the same folder, Docker or one of
Harbor's remote environments, and network access to the model's server.
"""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import chz
from harbor.environments.docker.docker import DockerEnvironment
from train import Config, main

# Each node has its own environment. Without this variable, Ray would copy the environment of
# `uv run`. Ray reads the variable at import time.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
ray = importlib.import_module("ray")
# The time limit for the trials of a stopped training run to end, and then for the clean-up.
STOP_SEC = 30


class RayExecutor(Executor):
    """Runs each group of a step as a Ray task."""

    # `run_in_executor` passes only these two arguments, and also accepts an asyncio future.
    def submit(self, run: Any, task: Any) -> asyncio.Task:  # ty: ignore[incompatible-method-override]
        """Start a group. `run_in_executor` calls this method."""
        return asyncio.create_task(self.run(run, task))

    async def run(self, run: Any, task: Any) -> Any:
        """Run a group. If its node dies, report the group and count all its trials as failed."""
        group = task.env_group_builder
        # On its node, a group cannot see the other groups or tell whether all of them failed.
        alone = replace(task, env_group_builder=replace(group, n_groups=0, step_errors=[]))
        reference = run_group.remote(run, alone)
        future = asyncio.wrap_future(reference.future())
        try:
            result, errors = await asyncio.shield(future)
        except asyncio.CancelledError:
            # Training was stopped. On the node, `ray.cancel` has the effect of Ctrl-C.
            ray.cancel(reference)
            with suppress(ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(future, STOP_SEC)
            raise
        except ray.exceptions.RayError as error:
            result, errors = None, [f"{type(error).__name__}: {error}"]
            print(f"{group.task}: the group is lost: {str(error)[:200]}", file=sys.stderr)
        for error in errors:
            group.fail(error)
        return result


@ray.remote(max_retries=0, scheduling_strategy="SPREAD")
def run_group(run: Any, task: Any) -> tuple[Any, list[str]]:
    """Run a group, on a node. Returns its result, and an error if all its trials failed."""
    group = task.env_group_builder
    print(f"{group.task} runs on node {ray.get_runtime_context().get_node_id()[:8]}")
    # Each group has its own event loop. Remove the locks of the previous loop, which Harbor keeps.
    DockerEnvironment._image_build_locks.clear()
    # Ray's Ctrl-C is not a real signal and does not wake an idle event loop. A timer wakes it.
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    return run(task), group.step_errors


@ray.remote(num_cpus=0, max_retries=0)
def run_bash(script: str) -> None:
    """Run a bash script, on a node."""
    subprocess.run(["bash", "-c", script], capture_output=True)


def run_on_nodes(script: str) -> None:
    """Run a clean-up script on each node that is alive."""
    on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    running = []
    for node in ray.nodes():
        if node["Alive"]:
            place = on_node(node["NodeID"], soft=False)
            running.append(run_bash.options(scheduling_strategy=place).remote(script))
    _, late = ray.wait(running, num_returns=len(running), timeout=STOP_SEC)
    if late:
        print(f"clean-up did not finish on {len(late)} of {len(running)} nodes", file=sys.stderr)


if __name__ == "__main__":
    names = [name for name in os.environ if name.startswith(("TINKER_", "HF_", "LITELLM_"))]
    settings = {name: os.environ[name] for name in names}
    settings["PYTHONPATH"] = os.pathsep.join([*sys.path[:1], os.getcwd()])
    ray.init(runtime_env={"env_vars": settings})
    main(chz.entrypoint(Config), RayExecutor(), run_on_nodes)
