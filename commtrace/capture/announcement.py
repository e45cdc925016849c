"""Tells ``commtrace run`` where a process records."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from commtrace.config import FORWARDED, NOTES_VARIABLE, has_variables
from commtrace.trace.files.writer import rank_directory
from commtrace.trace.metadata import RankMetadata

_logger = logging.getLogger("commtrace")


def announce(directory: Path, metadata: RankMetadata) -> None:
    """Tell ``commtrace run`` on this node where the rank records; without one, rank 0 prints it."""
    is_noted = _note(rank_directory(directory, metadata.rank))
    if metadata.rank == 0:
        if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
            _logger.info("commtrace records to %s", directory)
        elif not is_noted:
            _print(f"commtrace: recording to {directory}. Read it with: commtrace summary {directory}")
    if metadata.local_rank == 0 and _lacks_variables():
        _logger.warning(
            "commtrace: the launcher has brought PYTHONPATH of `commtrace run` to %s, and none of its options: this "
            "node records with the defaults, to %s. Let it forward %s as well, for example with mpirun -x %s.",
            metadata.node,
            directory,
            FORWARDED,
            FORWARDED,
        )


def _note(folder: Path) -> bool:
    """Return whether a ``commtrace run`` on this node now knows of the folder."""
    notes = os.environ.get(NOTES_VARIABLE)
    if not notes:
        return False
    try:
        with open(os.open(notes, os.O_WRONLY | os.O_APPEND), "w") as file:
            file.write(f"{folder}\n")
    except OSError:  # it runs on another node, or the disk of its notes is full
        return False
    return True


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr)
    except (OSError, ValueError) as error:  # The job has closed its stderr: recording must not depend on it.
        _logger.debug("commtrace could not say where it records: %s", error)


def _lacks_variables() -> bool:
    """Return whether ``commtrace run`` of another node did not get its variables forwarded."""
    search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_injected = any(Path(entry).parts[-2:] == ("commtrace", "_inject") for entry in search_path)
    return is_injected and not has_variables(os.environ)
