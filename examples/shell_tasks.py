# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
r"""Write a family of Harbor tasks. One shell command solves each task.

    uv run python examples/shell_tasks.py shell-tasks

writes one folder for training, shell-tasks/train, and two folders for evaluation.
shell-tasks/new_variants has the same kinds of task, with words that no training task has.
shell-tasks/new_kinds has other kinds of task. The same --seed writes the same tasks.

The run of examples/trainers.md (`train` is the shell function of that page):

    train log_path=runs/shell max_tokens=48 temperature=0.7 \
      dataset_builder.agent=one_script:OneScript dataset_builder.tasks=shell-tasks/train \
      dataset_builder.tasks_per_step=6 dataset_builder.group_size=8 dataset_builder.steps=18 \
      dataset_builder.test_tasks=shell-tasks/new_variants,shell-tasks/new_kinds \
      dataset_builder.test_group_size=4 dataset_builder.concurrency=20

The reward is 1 if the commands left the right files. Partial rewards let a model learn before it
solves any task: 0.1 for any command, 0.2 for a command that begins correctly and names the file,
and 0.5 for a result that is close. Partial rewards are for training only. To compare models, use
the share of solved trials.

Each kind of task is an entry in KINDS or NEW_KINDS. `--check` checks the rewards of every kind,
without Docker. All tasks run in the same public image, and Harbor copies each task's files into the
container. So Docker pulls one image and builds none.
"""

import argparse
import random
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

IMAGE = "debian:bookworm-slim"

# fmt: off
WORDS = [
    "anchor", "apple", "basket", "bottle", "bread", "bridge", "button", "camel", "candle",
    "carpet", "castle", "chair", "cherry", "cloud", "copper", "cotton", "desert", "dragon",
    "engine", "falcon", "feather", "forest", "garden", "guitar", "hammer", "harbor", "insect",
    "island", "jacket", "jungle", "kettle", "kitten", "ladder", "lantern", "lemon", "maple",
    "meadow", "mirror", "monkey", "needle", "nickel", "orange", "oyster", "paper", "pencil",
    "pepper", "piano", "planet", "quartz", "rabbit", "ribbon", "river", "rocket", "saddle",
    "salmon", "silver", "stone", "temple", "tiger", "turtle", "valley", "violin", "wagon",
    "walnut", "window", "yellow", "zebra",
]
# fmt: on


@dataclass(frozen=True)
class Kind:
    """A kind of task. {a}, {b} and {w} stand for three words, which are chosen for each variant."""

    name: str
    # The instruction, and the command that the instruction asks for.
    instruction: str
    tool: str
    # Bash conditions. {lines} stands for some lines of random words, quoted for bash.
    solved: str
    close: str
    # A script that solves the task, and a script that comes close.
    solution: str
    near_miss: str
    # The files that exist when the task begins. {lines} stands for the same lines, unquoted.
    files: dict[str, str] = field(default_factory=dict)


NOTES = {"{a}.txt": "{lines}\n"}
OTHER = {"{b}.txt": "{w}\n"}

KINDS = [
    Kind(
        name="folder",
        instruction="Make a folder named {a}.",
        tool="mkdir",
        solved="[ -d {a} ]",
        close="[ -e {a} ]",
        solution="mkdir {a}",
        near_miss="touch {a}",
    ),
    Kind(
        name="empty-file",
        instruction="Make an empty file named {a}.txt.",
        tool="touch",
        solved="[ -f {a}.txt ] && [ ! -s {a}.txt ]",
        close="[ -e {a}.txt ]",
        solution="touch {a}.txt",
        near_miss="echo >{a}.txt",
    ),
    Kind(
        name="write",
        instruction="Write the word {w} into the file {a}.txt.",
        tool="echo",
        solved='[ "$(cat {a}.txt)" = {w} ]',
        close="grep -qi {w} {a}.txt",
        solution="echo {w} >{a}.txt",
        near_miss="echo the word {w} >{a}.txt",
    ),
    Kind(
        name="copy",
        instruction="Copy the file {a}.txt to {b}.txt.",
        tool="cp",
        solved='[ "$(cat {a}.txt)" = {lines} ] && [ "$(cat {b}.txt)" = {lines} ]',
        close='[ "$(cat {b}.txt)" = {lines} ]',
        solution="cp {a}.txt {b}.txt",
        near_miss="mv {a}.txt {b}.txt",
        files=NOTES,
    ),
    Kind(
        name="rename",
        instruction="Rename the file {a}.txt to {b}.txt.",
        tool="mv",
        solved='[ ! -e {a}.txt ] && [ "$(cat {b}.txt)" = {lines} ]',
        close='[ "$(cat {b}.txt)" = {lines} ]',
        solution="mv {a}.txt {b}.txt",
        near_miss="cp {a}.txt {b}.txt",
        files=NOTES,
    ),
    Kind(
        name="delete",
        instruction="Delete the file {a}.txt.",
        tool="rm",
        solved="[ ! -e {a}.txt ] && grep -qx {w} {b}.txt",
        close="[ ! -e {a}.txt ]",
        solution="rm {a}.txt",
        near_miss="rm *",
        files=NOTES | OTHER,
    ),
    Kind(
        name="append",
        instruction="Add the word {w} to the end of the file {a}.txt.",
        tool="echo",
        solved="[ \"$(cat {a}.txt)\" = {lines}$'\\n'{w} ]",
        close='[ "$(tail -n 1 {a}.txt)" = {w} ]',
        solution="echo {w} >>{a}.txt",
        near_miss="echo {w} >{a}.txt",
        files=NOTES,
    ),
    Kind(
        name="sort",
        instruction="Sort the lines of {a}.txt into the file {b}.txt.",
        tool="sort",
        solved='[ "$(cat {b}.txt)" = "$(sort <<<{lines})" ]',
        close='[ "$(sort {b}.txt)" = "$(sort <<<{lines})" ]',
        solution="sort {a}.txt >{b}.txt",
        near_miss="cat {a}.txt >{b}.txt",
        files=NOTES,
    ),
    Kind(
        name="first-line",
        instruction="Write the first line of {a}.txt into the file {b}.txt.",
        tool="head",
        solved='[ "$(cat {b}.txt)" = "$(head -n 1 <<<{lines})" ]',
        close='grep -qxF "$(head -n 1 <<<{lines})" {b}.txt',
        solution="head -n 1 {a}.txt >{b}.txt",
        near_miss="head {a}.txt >{b}.txt",
        files=NOTES,
    ),
    Kind(
        name="count-lines",
        instruction="Write the number of lines of {a}.txt into the file {b}.txt.",
        tool="wc",
        solved='[ "$(tr -d " " <{b}.txt)" = "$(wc -l <<<{lines})" ]',
        close='grep -qw "$(wc -l <<<{lines})" {b}.txt',
        solution="wc -l <{a}.txt >{b}.txt",
        near_miss="wc -l {a}.txt >{b}.txt",
        files=NOTES,
    ),
]

NEW_KINDS = [
    Kind(
        name="last-line",
        instruction="Write the last line of {a}.txt into the file {b}.txt.",
        tool="tail",
        solved='[ "$(cat {b}.txt)" = "$(tail -n 1 <<<{lines})" ]',
        close='grep -qxF "$(tail -n 1 <<<{lines})" {b}.txt',
        solution="tail -n 1 {a}.txt >{b}.txt",
        near_miss="tail {a}.txt >{b}.txt",
        files=NOTES,
    ),
    Kind(
        name="folder-in-folder",
        instruction="Make a folder named {a}, and in it a folder named {b}.",
        tool="mkdir",
        solved="[ -d {a}/{b} ]",
        close="[ -d {a} ]",
        solution="mkdir -p {a}/{b}",
        near_miss="mkdir {a} {b}",
    ),
    Kind(
        name="delete-folder",
        instruction="Delete the folder {a} and all that is in it.",
        tool="rm",
        solved="[ ! -e {a} ] && grep -qx {w} {b}.txt",
        close="[ ! -e {a} ]",
        solution="rm -r {a}",
        near_miss="rm -r *",
        files={"{a}/{w}.txt": "{lines}\n"} | OTHER,
    ),
    Kind(
        name="move",
        instruction="Move the file {a}.txt into the folder {b}.",
        tool="mv",
        solved='[ ! -e {a}.txt ] && [ "$(cat {b}/{a}.txt)" = {lines} ]',
        close="[ ! -e {a}.txt ]",
        solution="mv {a}.txt {b}",
        near_miss="mv {a}.txt {b}.txt",
        files=NOTES | {"{b}/{w}.txt": "{w}\n"},
    ),
    Kind(
        name="executable",
        instruction="Make the file {a}.txt executable.",
        tool="chmod",
        solved='[ -x {a}.txt ] && [ "$(cat {a}.txt)" = {lines} ]',
        close="[ -x {a}.txt ]",
        solution="chmod +x {a}.txt",
        near_miss="echo {a} >{a}.txt; chmod +x {a}.txt",
        files=NOTES,
    ),
]

INSTRUCTION = """\
{task} Reply with a bash block that uses {tool}:
```bash
{tool} ...
```
"""

CHECK = """\
#!/bin/bash
# 1 for a solved task, 0.5 for a close result, 0.2 for a command of the right form, 0.1 for any.
exec 2>/dev/null
reward=0
# The agent writes this file after its last command. In the file, a model's quotes are escaped.
if grep -q '"observation":' /logs/agent/trajectory.json; then
  reward=0.1
  if grep -q '^{tool} .*{a}' /logs/agent/completion.txt; then reward=0.2; fi
fi
if {close}; then reward=0.5; fi
if {solved}; then reward=1; fi
echo $reward >/logs/verifier/reward.txt
"""

CONFIG = """\
schema_version = "1.3"

[task]
name = "basic-loop-agent/{name}"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
docker_image = "{image}"
workdir = "/home"
cpus = 1
memory_mb = 512
"""


def write_task(folder: Path, kind: Kind, words: list[str], rng: random.Random) -> None:
    """Write a variant of `kind` with three words from `words`."""
    a, b, w = rng.sample(words, 3)
    # Use a number of lines that is hard to guess, and no line twice.
    pairs = [f"{x} {y}" for x in words for y in words]
    lines = "\n".join(rng.sample(pairs, rng.randrange(11, 100)))
    values = {"a": a, "b": b, "w": w, "lines": lines, "tool": kind.tool}

    def filled(text: str, **more: str) -> str:
        for name, value in (values | more).items():
            text = text.replace(f"{{{name}}}", value)
        return text

    quoted = shlex.quote(lines)
    conditions = {
        "close": filled(kind.close, lines=quoted),
        "solved": filled(kind.solved, lines=quoted),
    }
    files = {
        "instruction.md": filled(INSTRUCTION, task=filled(kind.instruction)),
        "task.toml": filled(CONFIG, name=folder.name, image=IMAGE),
        "tests/test.sh": filled(CHECK, **conditions),
        # `harbor run --agent oracle` runs solve.sh.
        "solution/solve.sh": filled(kind.solution) + "\n",
        "solution/near_miss.sh": filled(kind.near_miss) + "\n",
    }
    for path, text in kind.files.items():
        files[f"environment/{filled(path)}"] = filled(text)
    (folder / "environment").mkdir(parents=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def check() -> None:
    """Run the scripts of one task of each kind. Raises SystemExit if a reward is wrong."""
    expected = {"solve.sh": "1", "near_miss.sh": "0.5", "nothing.sh": "0"}
    kinds = KINDS + NEW_KINDS
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            task = Path(folder, "task")
            write_task(task, kind, WORDS, random.Random(0))
            (task / "solution/nothing.sh").touch()
            for script, reward in expected.items():
                earned = score(task, script, Path(folder, script))
                if earned != reward:
                    raise SystemExit(f"{kind.name}: {script} earns {earned}, not {reward}")
    print(f"{len(kinds)} kinds checked")


def score(task: Path, script: str, folder: Path) -> str:
    """The reward of a script. Creates `folder`, which stands for the container's root."""
    shutil.copytree(task / "environment", folder / "home")
    (folder / "logs/verifier").mkdir(parents=True)
    test = (task / "tests/test.sh").read_text().replace("/logs/", f"{folder}/logs/")
    for text in ((task / "solution" / script).read_text(), test):
        subprocess.run(["bash", "-c", text], cwd=folder / "home", stderr=subprocess.DEVNULL)
    return (folder / "logs/verifier/reward.txt").read_text().strip()


def main(argv: list[str] | None = None) -> None:
    """Write the three folders, or run `check`. Raises SystemExit if the parent folder already
    exists, and the errors of `check`."""
    parser = argparse.ArgumentParser(description="Write tasks that one shell command solves.")
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="for train/, new_variants/ and new_kinds/")
    add("--check", action="store_true", help="check the rewards of each kind; write nothing")
    add("--seed", type=int, default=0, help="seed for the tasks' words (%(default)s)")
    add("--variants", type=int, default=3, help="tasks of each kind in train/ (%(default)s)")
    add("--new-variants", type=int, default=2, help="tasks of each kind elsewhere (%(default)s)")
    args = parser.parse_args(argv)
    if args.check:
        return check()
    if not args.folder:
        parser.error("pass a folder or --check")
    if args.folder.exists():
        raise SystemExit(f"{args.folder} already exists: delete it, or pass another folder")
    rng = random.Random(args.seed)
    words = rng.sample(WORDS, len(WORDS))
    trained, new = words[: len(words) // 2], words[len(words) // 2 :]
    sets = {
        "train": (KINDS, trained, args.variants),
        "new_variants": (KINDS, new, args.new_variants),
        "new_kinds": (NEW_KINDS, new, args.new_variants),
    }
    for name, (kinds, of_set, n_variants) in sets.items():
        for kind in kinds:
            for number in range(n_variants):
                write_task(args.folder / name / f"{kind.name}-{number}", kind, of_set, rng)


if __name__ == "__main__":
    main()
