"""Make a directory of a run as it was at the end of one of its attempts, so that every command can read it.

A launcher may start a job again after a failure, and a job may make its world anew in the same processes, with other
ranks: each such attempt has its own ranks, steps and groups. Readers show the newest one.

>>> directory_of_attempt(Path("runs/gpt"), 0, Path("elsewhere/gpt"))    # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path

from commtrace.errors import ConfigurationError
from commtrace.trace.files.locate import attempts_of_newest_run, find_run_directory, rank_directories, until_attempt
from commtrace.trace.files.merge import link
from commtrace.trace.files.rank_files import RANK_DIRECTORY_PATTERN, SEGMENT_PATTERN
from commtrace.trace.files.reader import segments_in


def directory_of_attempt(run: Path, attempt: int, target: Path) -> None:
    """Make ``target``, with links to the files of a run but the segments of attempts after ``attempt`` (from 0).

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: there is no such attempt.
    """
    directory = find_run_directory(run)
    segments = segments_in(directory)
    recorded = attempts_of_newest_run(segments)
    if attempt not in recorded:
        there = f"recorded: {', '.join(map(str, recorded))}" if recorded else "nothing of it can be read"
        raise ConfigurationError(f"--attempt {attempt}: there is no such attempt in {directory} ({there})")
    kept = {segment.path for segment in until_attempt(segments, attempt)}
    target.mkdir(parents=True)
    for path in directory.iterdir():
        if not RANK_DIRECTORY_PATTERN.match(path.name):
            link(path.absolute(), target / path.name)
    for folder in rank_directories(directory):
        files = [path for path in folder.iterdir() if path in kept or not SEGMENT_PATTERN.match(path.name)]
        if any(path in kept for path in files):
            (target / folder.name).mkdir()
            for path in files:
                link(path.absolute(), target / folder.name / path.name)
