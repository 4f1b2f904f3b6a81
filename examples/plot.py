# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""Plot reward and share solved by step: `uv run --with matplotlib examples/plot.py LOG_DIR`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

# The title of each plotted metric. A metric has a curve for training, and one for each evaluated
# folder.
DRAWN = {"reward/total": "mean reward", "solved": "share solved (reward 1)"}


def draw(log_dir: Path) -> Path:
    """Plot the metrics.jsonl of a train.py run to curve.png. Returns the path of curve.png.

    Raises ImportError without matplotlib, which this project does not install, and OSError.
    """
    # This project does not install matplotlib.
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
        # A step that was repeated after a crash has two lines. Some lines belong to no step, such
        # as the lines of cookbook 0.6 about the whole training run.
        if "step" in metrics:
            steps.setdefault(metrics["step"], {}).update(metrics)
    return [*steps.values()]


def curves(steps: list[dict[str, Any]], metric: str) -> dict[str, list[tuple[int, float]]]:
    """The metric's (step, value) points. The keys are "training" and the evaluated folders."""
    found: dict[str, list[tuple[int, float]]] = {}
    for of_step in steps:
        for key, value in of_step.items():
            match = re.fullmatch(f"(test/)?env/([^/]+)/{metric}", key)
            # For training, plot only the mean of the folders.
            if match and (match[1] or match[2] == "all"):
                name = match[2] if match[1] else "training"
                found.setdefault(name, []).append((of_step["step"], value))
    # Drop the mean of the evaluated folders if a folder has its own curve.
    if len(found) > 2:
        found.pop("all", None)
    return found


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
