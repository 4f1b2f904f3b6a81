# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
"""Print the trials of a job: reward, stop reason, answers, and each turn's token ids and logprobs.

    uv run --no-dev python examples/read.py jobs/first      # in a clone
    PYTHONPATH=. uv run python examples/read.py jobs/first  # in a project of your own

A trial without ids has a line that says why.
"""

import signal
import sys
from pathlib import Path

from basic_loop_agent import TrialResult, training_data


def print_trial(folder: Path) -> None:
    trial = TrialResult.model_validate_json((folder / "result.json").read_text())
    data = training_data(trial)
    if data:
        print(f"{folder}: reward {data.reward}, stop reason {data.stop_reason}")
    elif trial.exception_info:
        error = trial.exception_info
        print(f"{folder}: failed: {error.exception_type}: {error.exception_message}")
    else:
        print(f"{folder}: no training data, because it has no valid reward, or a step failed")
    # A task with steps has a folder for each. (A script may have put a link or a pipe there.)
    paths = [*folder.glob("agent/completion.txt"), *folder.glob("steps/*/agent/completion.txt")]
    for path in sorted(path for path in paths if path.is_file() and not path.is_symlink()):
        answer = path.read_text(errors="replace")
        if answer:
            # A terminal obeys control characters.
            print("answer:", "".join(c if c.isprintable() or c == "\n" else "?" for c in answer))
        if data and data.stop_reason == "completed" and "```bash" in answer:
            print("(The bash block was not run. With max_turns=1, the default, no block is.)")
    for turn in data.turns if data else []:
        print("token ids:", turn.completion_token_ids)
        print("logprobs:", [round(logprob, 2) for logprob in turn.logprobs or []])
    if data and (reason := why_ids_are_missing(trial)):
        print(reason)


def why_ids_are_missing(trial: TrialResult) -> str:
    """Why some turns of a trial have no ids. Empty if all have."""
    runs = [step.agent_result for step in trial.step_results or [trial]]
    records = [run.metadata or {} for run in runs if run]
    if not any("n_turns_without_ids" in record for record in records):
        return "(no ids: the client records none, which is the default with litellm)"
    n_turns = sum(record.get("n_turns_without_ids") or 0 for record in records)
    if n_turns:
        return (
            f"(turns without ids: {n_turns}. The server gave no id or no logprob for some token. "
            "llama.cpp has none for a token that ends in the middle of a character, as in emoji.)"
        )
    return ""


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    # `read.py jobs/first | head` ends without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for job in sys.argv[1:]:
        paths = sorted(Path(job).glob("*/result.json"))
        if not paths:
            problem = "has no finished trials" if Path(job).is_dir() else "does not exist"
            raise SystemExit(f"{job} {problem}")
        for path in paths:
            print_trial(path.parent)
