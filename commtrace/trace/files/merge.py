"""Merge the folders of a job's ranks from several nodes into one run directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from commtrace.errors import ConfigurationError, RunNotFoundError
from commtrace.trace.files.locate import RecordedLaunch, find_run_directory, rank_directories
from commtrace.trace.files.rank_files import RANK_DIRECTORY_PATTERN
from commtrace.trace.files.reader import newest_launch_in, why_not_one_job

Place = Callable[[Path, Path], None]
"""Puts a folder or file, the first path, at the second one."""


def merge(nodes: Sequence[Path], output: Path, place: Place) -> int:
    """Put the folders of all ranks into one run directory with ``place``, and return their number.

    Raises:
        ConfigurationError: there are two jobs, a rank occurs twice, or ``output`` is in the way.
        RunNotFoundError: one of the ``nodes`` holds no run, or more than one.
    """
    directories = list(dict.fromkeys(find_run_directory(node).resolve() for node in nodes))
    folders = _folders_of_one_job(directories)
    if output.is_dir() and any(output.iterdir()):
        raise ConfigurationError(f"{output} is not empty; name a directory that does not exist yet")
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"{output} is a file; name a directory that does not exist yet")
    output.mkdir(parents=True, exist_ok=True)
    for path in [*folders, *_files_beside_ranks(directories)]:
        place(path, output / path.name)
    return len(folders)


def copy(folder: Path, target: Path) -> None:
    """Copy a folder or file; on the same file system by hard links, which need no space."""
    if folder.is_dir():
        shutil.copytree(folder, target, copy_function=_hard_link)
    else:
        _hard_link(str(folder), str(target))


def link(folder: Path, target: Path) -> None:
    """Link to a folder or file, so that later writes are seen."""
    target.symlink_to(folder, target_is_directory=folder.is_dir())


def _hard_link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _folders_of_one_job(directories: Sequence[Path]) -> list[Path]:
    launches: list[tuple[Path, RecordedLaunch]] = []
    folders: dict[str, Path] = {}
    for directory in directories:
        launch = newest_launch_in(directory)
        if launch is None:
            raise RunNotFoundError(f"{directory}: no readable spans.")
        for earlier_directory, earlier in launches:
            why = why_not_one_job(earlier, launch)
            if why:
                raise ConfigurationError(
                    f"{earlier_directory} ({earlier.name}) and {directory} ({launch.name}) are not of one job: {why}."
                )
        launches.append((directory, launch))
        for folder in rank_directories(directory):
            if folder.name in folders:
                raise ConfigurationError(f"{folders[folder.name]} and {folder} are of the same rank; leave one out.")
            folders[folder.name] = folder
    return list(folders.values())


def _files_beside_ranks(directories: Sequence[Path]) -> list[Path]:
    """Return files beside the ranks that only one directory has, such as the monitor's report."""
    paths_by_name: dict[str, list[Path]] = {}
    for directory in directories:
        for path in directory.iterdir():
            if not RANK_DIRECTORY_PATTERN.match(path.name):
                paths_by_name.setdefault(path.name, []).append(path)
    return [paths[0] for paths in paths_by_name.values() if len(paths) == 1]
