"""Asks of the versions that are installed here what a cell of docs/support.md says: do steps and communications agree?

    python -m tests.matrix.cell ddp fsdp pipelining

Each kind of training (:mod:`tests.matrix.training`) is run on two ranks, recorded by commtrace and by torch.profiler.
What the two saw must be equal. A training that fails is run once more without commtrace, to tell whose fault it is.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e import oracle
from tests.e2e.launch import REPOSITORY, Completed, Starter, launch
from tests.e2e.traces import rows
from tests.matrix import STEPS

RANKS = 2
SECONDS = 90.0
PROGRAM = REPOSITORY / "tests" / "matrix" / "training.py"
NAMED = ("torch", "numpy", "pyarrow", "megatron-core", "deepspeed", "transformers", "accelerate", "lightning")


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of one kind of training.

    Attributes:
        is_right: commtrace recorded what there was, or the training does not run without it either.
        outcome: a few words for the table.
    """

    kind: str
    is_right: bool
    outcome: str


def try_kind(kind: str, folder: Path, start: Starter = launch) -> Cell:
    """Train under commtrace, and compare what it recorded with what torch.profiler saw."""
    completed = _train(kind, folder, start, enabled=True)
    if completed.returncode:
        without = _train(kind, folder, start, enabled=False)
        if without.returncode:
            return Cell(kind, True, f"fails without commtrace too: {_reason(without)}")
        return Cell(kind, False, f"fails under commtrace: {_reason(completed)}")
    run = load_run(folder / "run")
    wrong = differences(run, folder)
    if wrong:
        return Cell(kind, False, "; ".join(wrong[:3]))
    communications = sum(1 for rank in run.ranks for _ in rows(run, rank, schema.COLLECTIVE, schema.P2P))
    return Cell(kind, True, f"{STEPS} of {STEPS} steps, {communications} of {communications} communications")


def differences(run: Run, folder: Path) -> list[str]:
    """Return a line for each thing that commtrace and the profiler, or commtrace and the script, do not agree on."""
    lines = [f"ranks {sorted(run.ranks)}"] if sorted(run.ranks) != list(range(RANKS)) else []
    lines += run.problems
    for rank in run.ranks:
        steps = sum(1 for _ in rows(run, rank, schema.STEP))
        if steps != STEPS:
            lines.append(f"rank {rank}: {steps} of {STEPS} steps")
        seen = _all(oracle.profiled(folder / f"profiler-{rank}.json", RANKS))
        ours = _all(oracle.recorded(run, rank))
        missing, extra = oracle.unmatched(seen, ours)
        lines += [f"rank {rank}: {count} × {each} not recorded" for each, count in sorted(missing.items())]
        lines += [f"rank {rank}: {count} × {each} not issued" for each, count in sorted(extra.items())]
    return lines


def versions() -> dict[str, str]:
    """Return what is installed, by name."""
    found = {"python": platform.python_version()}
    for name in NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _train(kind: str, folder: Path, start: Starter, *, enabled: bool) -> Completed:
    environment = {
        "COMMTRACE_DIR": str(folder / "run"), "COMMTRACE_ENABLED": str(int(enabled)), "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    return start([PROGRAM, kind, folder], RANKS, environment, SECONDS)


def _reason(completed: Completed) -> str:
    if completed.timed_out:
        return f"no end after {SECONDS:g} s"
    named = r"^(?:\[rank\d\]: ?)?((?:[A-Za-z_.]*(?:Error|Exception)|Fatal Python error): .*)$"
    errors = re.findall(named, completed.stdout, re.MULTILINE)
    wanted = [error for error in errors if "ChildFailedError" not in error]
    return (wanted or [f"exit status {completed.returncode}"])[0][:120]


def _all(sections: oracle.Sections) -> Counter[oracle.Communication]:
    return sum(sections.values(), Counter())


def main(kinds: list[str]) -> int:
    """Print a line of JSON for each kind; return 1 if one of them is wrong."""
    installed: dict[str, Any] = versions()
    cells = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            cells.append(try_kind(kind, Path(folder)))
        print(json.dumps({**installed, **asdict(cells[-1])}), flush=True)
    return int(not all(cell.is_right for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
