"""trace/files/attempts.py: one attempt of a job as a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError
from commtrace.trace.files.attempts import directory_of_attempt
from commtrace.trace.files.rank_files import write_exit
from commtrace.trace.files.reader import load_earlier_attempts, load_run
from commtrace.trace.run import Run
from tests.trace.rows import steps, write_rank


def three_attempts(directory: Path) -> Path:
    """Of two ranks, of three, of two; the last one was recorded twice."""
    for attempt, (size, first, end) in enumerate([(2, 0, 9), (3, 5, 12), (2, 10, 20)]):
        for rank in range(size):
            about = {"rank": rank, "world_size": size, "attempt": attempt, "pid": 100 * attempt + rank}
            write_rank(directory, steps(first, end), **about, session=1_000 * attempt + rank)
    write_rank(directory, steps(10, 20), rank=1, world_size=2, attempt=2, session=2_500)
    return directory


def read(directory: Path, attempt: int, tmp_path: Path) -> Run:
    directory_of_attempt(directory, attempt, tmp_path / f"attempt-{attempt}")
    return load_run(tmp_path / f"attempt-{attempt}")


def attempt_of(run: Run) -> tuple[int, int, list[int]]:
    return run.any_metadata.attempt, run.world_size, sorted({*run.ranks[0].spans.step.tolist()})


def test_each_attempt_can_be_read_with_those_before_it(tmp_path: Path) -> None:
    run = three_attempts(tmp_path / "run")

    for attempt, (size, first, end) in enumerate([(2, 0, 9), (3, 5, 12), (2, 10, 20)]):
        found = read(run, attempt, tmp_path)
        assert attempt_of(found) == (attempt, size, [*range(first, end)])
        assert [one.any_metadata.attempt for one in load_earlier_attempts(found)] == [*range(attempt)]
    assert attempt_of(load_run(run)) == attempt_of(read(run, 2, tmp_path / "again"))


def test_the_ends_of_earlier_attempts_are_those_of_their_last_files(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 9), steps_per_segment=4)
    write_rank(tmp_path, steps(9, 12), attempt=1, session=2_000)
    run = load_run(tmp_path)

    (whole,) = load_earlier_attempts(run)
    (end,) = load_earlier_attempts(run, only_ends=True)

    assert [{*one.ranks[0].spans.step.tolist()} for one in (whole, end)] == [{*range(9)}, {8}]


def test_an_attempts_directory_has_the_side_files_too(tmp_path: Path) -> None:
    folder = write_rank(tmp_path / "run", steps(0, 2))
    write_exit(folder, 1_000, 3)
    (tmp_path / "run" / "monitor.json").write_text("{}")

    directory_of_attempt(tmp_path / "run", 0, tmp_path / "made")

    names = sorted(str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made").rglob("*"))
    assert names == ["monitor.json", "rank-00000", "rank-00000/exit-1000-3", "rank-00000/spans-0000.arrows"]


def test_a_later_run_in_the_same_directory_is_not_in_it(tmp_path: Path) -> None:
    """The newest run is another one, started between the attempts of the first."""
    write_rank(tmp_path / "run", steps(0, 3), session=1_000)
    write_rank(tmp_path / "run", steps(70, 80), run_id="other", session=2_000)
    write_rank(tmp_path / "run", steps(3, 6), attempt=1, session=1_500)
    write_rank(tmp_path / "run", steps(6, 9), attempt=2, session=3_000)

    assert read(tmp_path / "run", 0, tmp_path).any_metadata.run_id == "r1"


def test_an_attempt_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    run = three_attempts(tmp_path / "run")

    with pytest.raises(ConfigurationError, match=r"--attempt 3: .* \(recorded: 0, 1, 2\)"):
        directory_of_attempt(run, 3, tmp_path / "made")
    assert not (tmp_path / "made").exists()
