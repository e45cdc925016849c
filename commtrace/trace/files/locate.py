"""Finds the run directory that a path means, for all reading commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commtrace.errors import RunNotFoundError
from commtrace.trace.files.writer import RANK_DIRECTORY_PATTERN
from commtrace.trace.inputs import printable

LATEST: Final = "latest"
"""As the last part of a path: the run below the rest of it that was written last."""

RUNS: Final = Path("commtrace-runs")
"""The default directory of runs."""

NEWEST_RUN: Final = RUNS / LATEST
"""The run that commands read by default."""

_MOST_RUNS: Final = 12


def find_run_directory(path: Path) -> Path:
    """Return ``path`` if it has folders of ranks, else the only run directory below it; for ``…/latest`` the newest.

    Raises:
        RunNotFoundError: there is no run, or more than one; the message says what to pass.
    """
    if path.is_file():
        raise RunNotFoundError(f"{path} is a file; pass the run directory{_around(path)}.")
    if not path.is_dir():
        return _latest(path)
    if rank_directories(path):
        return path
    if RANK_DIRECTORY_PATTERN.match(path.absolute().name):
        raise RunNotFoundError(f"{path} is the folder of one rank; pass the run directory{_around(path)}.")
    below = runs_below(path)
    if len(below) == 1:
        return below[0]
    if below:
        raise RunNotFoundError(
            f"{path} holds {len(below)} runs, the one that was written last at the end:\n{_listing(below)}\n"
            f"Pass one of them, or {path / LATEST} for the last one."
        )
    some = any(path.iterdir())
    none = "holds no recorded run (no rank-NNNNN folders)" if some else "is empty: it holds no recorded run"
    raise RunNotFoundError(
        f"{path} {none}. Was the job started with `import commtrace.auto` or `commtrace run`, and did it call "
        "torch.distributed.init_process_group?"
    )


def runs_below(path: Path) -> list[Path]:
    """Return the run directories directly below, the last written one at the end."""
    found = [child for child in path.iterdir() if child.is_dir() and rank_directories(child)]
    return sorted(found, key=lambda run: (_written_at(run), run.name))


def rank_directories(directory: Path) -> list[Path]:
    """Return the folders of the ranks, in order."""
    return sorted(child for child in directory.iterdir() if RANK_DIRECTORY_PATTERN.match(child.name))


def _latest(path: Path) -> Path:
    below = runs_below(path.parent) if path.name == LATEST and path.parent.is_dir() else []
    if not below:
        raise RunNotFoundError(f"{path}: no such directory. {_instead()}")
    return below[-1]


def _instead() -> str:
    """Return what to pass for a path that does not exist."""
    here = runs_below(RUNS) if RUNS.is_dir() else []
    if not here:
        return (
            f"There is no run below ./{RUNS} either. Pass the directory that COMMTRACE_DIR gave, or that "
            "`commtrace run` named at its end."
        )
    return f"Runs below ./{RUNS}, the one that was written last at the end:\n{_listing(here)}"


def _around(path: Path) -> str:
    """Return the run directory that holds a folder of a rank, or a file of it, if it is one."""
    for folder in (path.absolute(), path.absolute().parent):
        if RANK_DIRECTORY_PATTERN.match(folder.name):
            return f" around it, {folder.parent}"
    return ""


def _written_at(run: Path) -> float:
    """Return seconds; a file that a running job deletes meanwhile does not count."""
    times = [run.stat().st_mtime]
    for path in rank_directories(run)[0].iterdir():
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)


def _listing(runs: Sequence[Path]) -> str:
    left_out = [f"  ({len(runs) - _MOST_RUNS} older ones)"] if len(runs) > _MOST_RUNS else []
    lines = [
        f"  {printable(str(run))}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(_written_at(run)))}, "
        f"{len(rank_directories(run))} rank{'s' * (len(rank_directories(run)) != 1)}"
        for run in runs[-_MOST_RUNS:]
    ]
    return "\n".join([*left_out, *lines])
