"""Draw reward by step: `uv run --with matplotlib examples/plot.py LOG_DIR`."""

import json
import sys
from pathlib import Path

REWARD = "env/all/reward/total"


def draw(log_dir: Path) -> Path:
    """Draw metrics.jsonl of a run of train.py into curve.png. Returns the picture's path.

    Raises ImportError without matplotlib, which this project does not install, and OSError.
    """
    from matplotlib.figure import Figure

    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    steps = [of_step["step"] for of_step in metrics]
    means = [of_step[REWARD] for of_step in metrics]
    spreads = [of_step["env/all/reward/std"] for of_step in metrics]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, low, high, alpha=0.15, label="standard deviation of its trials")
    axes.plot(steps, means, marker=".", label="mean of the step")
    evaluated = [of_step for of_step in metrics if f"test/{REWARD}" in of_step]
    if evaluated:
        at = [of_step["step"] for of_step in evaluated]
        values = [of_step[f"test/{REWARD}"] for of_step in evaluated]
        axes.plot(at, values, marker="o", label="mean of the eval tasks")
    axes.set_ylabel("reward")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right")
    path = log_dir / "curve.png"
    figure.savefig(path, dpi=100)
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
