"""The names of a rank's files, and what a rank does with them beside writing its spans.

A rank has these functions called by a process of its own (:mod:`.file_process`): nothing large is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from commtrace.trace.files.safe_files import open_new, open_to_append, replace_file
from commtrace.trace.inputs import read_file

SEGMENT_PATTERN: Final = re.compile(r"^spans-(\d+)\.arrows$")
RANK_DIRECTORY_PATTERN: Final = re.compile(r"^rank-(\d+)$")

LATEST: Final = "latest"
"""As the last part of a path: the run beside it that was written last. Recorders make a link of that name."""

COMPACTING: Final = ".compacting"
"""Suffix of a segment that is being rewritten, until it replaces the old one."""

_HEAD_BYTES: Final = 65_536
"""Enough for the header of a segment."""


def rank_directory(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank:05d}"


def link_as_latest(run_directory: Path) -> None:
    """Link ``latest`` to a run directory beside it, unless a file or folder has that name; raise OSError."""
    link = run_directory.parent / LATEST
    if link.exists() and not link.is_symlink():
        return
    made = link.with_name(f".{LATEST}-{os.getpid()}")
    made.symlink_to(run_directory.name)
    made.replace(link)


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments in a rank's folder, oldest first."""
    return sorted((path for path in directory.iterdir() if SEGMENT_PATTERN.match(path.name)), key=segment_number)


def segment_number(path: Path) -> int:
    match = SEGMENT_PATTERN.match(path.name)
    assert match is not None
    return int(match[1])


def next_segment_number(directory: Path) -> int:
    return max(map(segment_number, segment_paths(directory)), default=-1) + 1


def prepare_rank_directory(directory: Path) -> list[tuple[Path, int]]:
    """Make a rank's folder, and return the segments in it, oldest first, with their sizes; may raise OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(f"*{COMPACTING}"):  # left by a process that was killed meanwhile
        remove_quietly(path)
    return [(path, size_of(path) or 0) for path in segment_paths(directory)]


def remove_quietly(path: Path) -> None:
    """Remove a file that readers do not look at, if that is possible."""
    with contextlib.suppress(OSError):  # the folder is gone or read-only now
        path.unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Remove a file if it is there; raise OSError if that fails."""
    path.unlink(missing_ok=True)


def size_of(path: Path) -> int | None:
    """Return the size of a file; None if it is not there. May raise OSError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def holds_a_recording(run_directory: Path) -> bool:
    """Return whether rank 0 has recorded there; may raise OSError."""
    folder = rank_directory(run_directory, 0)
    return folder.is_dir() and bool(segment_paths(folder))


def head_of_newest(directory: Path) -> bytes:
    """Return the beginning of the newest segment of a rank, with its header; empty if none can be read."""
    try:
        if not directory.is_dir():
            return b""
        for path in segment_paths(directory)[-1:]:
            with path.open("rb") as file:
                return file.read(_HEAD_BYTES)
    except OSError:  # it is being written or deleted
        pass
    return b""


def json_files_below(folder: Path, known: Collection[str], most_bytes: int) -> list[tuple[str, bytes | OSError]]:
    """Return the names, without their ending, and contents of files that are not known; raise OSError for the folder.

    In the place of a content that cannot be read, or is larger than ``most_bytes``, is the reason.
    """
    try:
        names = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
    except FileNotFoundError:
        return []
    contents: list[tuple[str, bytes | OSError]] = []
    for name in names:
        if name not in known:
            try:
                contents.append((name, read_file(folder / f"{name}.json", most_bytes)))
            except OSError as error:
                contents.append((name, error))
    return contents


def files_of_recording(directory: Path) -> set[Path]:
    """Return the segments and reports of hangs in a rank's folder; empty if there is none."""
    return {*segment_paths(directory), *directory.glob("hang-*.json")} if directory.is_dir() else set()


def discard_recording(directory: Path, kept: Collection[Path]) -> None:
    """Remove the segments and reports of hangs but those that are kept, and folders that are empty then."""
    for path in files_of_recording(directory).difference(kept):
        path.unlink(missing_ok=True)
    for folder in (directory, directory.parent):
        if not any(folder.iterdir()):
            folder.rmdir()


def report_path(rank_directory: Path, session: int, number: int) -> Path:
    """Return the file of one recording's report of a hang, by its number from 1."""
    return rank_directory / f"hang-{session}-{number:03}.json"


def write_report(path: Path, text: str) -> None:
    """Write a report of a hang, in a folder that may be gone; may raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def write_losses(rank_directory: Path, session: int, lost: Mapping[str, int]) -> None:
    """Record that a recording was closed, and by kind the spans that are in no segment; raise OSError if that fails."""
    file = open_new(rank_directory / f"lost-{session}-{sum(lost.values())}")
    try:
        with contextlib.suppress(OSError):  # the name alone suffices
            os.write(file, json.dumps(dict(lost)).encode())
    finally:
        os.close(file)


def write_exit(rank_directory: Path, session: int, exit_code: int, *, by_shell: bool = False) -> None:
    """Record that the command that a rank belongs to has ended with this code; raise OSError if that fails.

    ``by_shell``: the command reaches the rank through a shell, which may hide that the rank failed.
    """
    hides = "-shell" if by_shell and exit_code == 0 else ""
    os.close(open_new(rank_directory / f"exit-{session}-{exit_code}{hides}"))


def stack_path(rank_directory: Path, session: int) -> Path:
    """Return faulthandler's file of one recording."""
    return rank_directory / f"stack-{session}"


def end_path(rank_directory: Path, session: int) -> Path:
    """Return the beginning of the name of the file that says how a rank ended; see :meth:`FileCalls.note_end`."""
    return rank_directory / f"ended-{session}"


def looks_path(rank_directory: Path, session: int) -> Path:
    return rank_directory / f"gone-{session}"


def note_gone_peers(rank_directory: Path, session: int, at_ns: int, ranks: Collection[int]) -> None:
    """Record a look at ``at_ns`` (host's monotonic clock) and ranks gone since the last one; may raise OSError."""
    file = open_to_append(looks_path(rank_directory, session))
    try:
        os.write(file, f"{json.dumps([at_ns, sorted(ranks)])}\n".encode())
    finally:
        os.close(file)


def forget_gone_peers(rank_directory: Path, session: int) -> None:
    """Remove all looks; raise OSError if that fails."""
    looks_path(rank_directory, session).unlink(missing_ok=True)
