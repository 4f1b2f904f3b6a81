# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""Draw reward and share solved by step: `uv run --with matplotlib examples/plot.py LOG_DIR`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

# What is drawn, by the metric's name: for the trials of the step, and for each evaluated folder.
DRAWN = {"reward/total": "mean reward", "solved": "share solved (reward 1)"}


def draw(log_dir: Path) -> Path:
    """Draw metrics.jsonl of a run of train.py into curve.png. Returns the picture's path.

    Raises ImportError without matplotlib, which this project does not install, and OSError.
    """
    # This project does not install it.
    from matplotlib.figure import Figure  # ty: ignore[import-not-found]

    steps = metrics_of_steps(log_dir)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (metric, title) in zip(panels, DRAWN.items(), strict=True):
        for name, points in curves(steps, metric).items():
            at, values = zip(*points, strict=True)
            style = {"marker": "."} if name == "training" else {"marker": "o", "linestyle": "--"}
            axes.plot(at, values, label=name, **style)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    path = log_dir / "curve.png"
    figure.savefig(path, dpi=100)
    return path


def metrics_of_steps(log_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step in metrics.jsonl, with the step's number. Raises OSError."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (log_dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        # A step that was repeated after a crash has two lines. Other lines belong to no step, such
        # as those of cookbook 0.6 on the whole training.
        if "step" in metrics:
            steps.setdefault(metrics["step"], {}).update(metrics)
    return [*steps.values()]


def curves(steps: list[dict[str, Any]], metric: str) -> dict[str, list[tuple[int, float]]]:
    """The metric's (step, value) points, by "training" or the name of the evaluated folder."""
    found: dict[str, list[tuple[int, float]]] = {}
    for of_step in steps:
        for key, value in of_step.items():
            match = re.fullmatch(f"(test/)?env/([^/]+)/{metric}", key)
            # Of the training's folders only the mean is drawn.
            if match and (match[1] or match[2] == "all"):
                name = match[2] if match[1] else "training"
                found.setdefault(name, []).append((of_step["step"], value))
    # The mean of the evaluated folders is drawn if there is only one.
    if len(found) > 2:
        found.pop("all", None)
    return found


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
