"""Draw reward and KL by step: `uv run --with matplotlib examples/plot.py LOG_DIR`."""

import json
import sys
from pathlib import Path


def draw(log_dir: Path) -> Path:
    """Draw metrics.jsonl of a run of train.py into curve.png. Returns the picture's path.

    Raises ImportError without matplotlib, which this project does not install, and OSError.
    """
    from matplotlib.figure import Figure

    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    steps = [of_step["step"] for of_step in metrics]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    rewards, divergences = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    rewards.plot(steps, [of_step["env/all/reward/total"] for of_step in metrics], marker=".")
    rewards.set_ylabel("mean reward")
    for version in ("v1", "v2"):
        # A step without an update has none: a gap in the line.
        values = [of_step.get(f"optim/kl_sample_train_{version}") for of_step in metrics]
        values = [float("nan") if value is None else value for value in values]
        divergences.plot(steps, values, marker=".", label=f"KL {version}")
    # For scale: rounding alone would fill the picture.
    divergences.axhline(0.01, color="gray", linestyle=":", label="0.01")
    divergences.set_ylabel("KL, sampler to trainer")
    divergences.set_xlabel("step")
    divergences.legend(ncols=3)
    path = log_dir / "curve.png"
    figure.savefig(path, dpi=100)
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
