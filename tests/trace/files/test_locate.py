from __future__ import annotations

import os
from pathlib import Path

import pytest

from commtrace.errors import RunNotFoundError
from commtrace.trace.files.locate import find_run_directory
from tests.trace.rows import steps, write_rank


def recorded(directory: Path, written_at: int) -> Path:
    folder = write_rank(directory, steps(0, 1))
    for path in (*folder.iterdir(), directory):
        os.utime(path, (written_at, written_at))
    return directory


def refusal(path: Path) -> str:
    with pytest.raises(RunNotFoundError) as caught:
        find_run_directory(path)
    return str(caught.value)


def test_of_several_runs_all_are_listed_the_newest_last(tmp_path: Path) -> None:
    for name, written_at in (("b", 100_000), ("c", 300_000), ("a", 200_000)):
        recorded(tmp_path / name, written_at)
    lines = refusal(tmp_path).splitlines()

    assert lines[0] == f"{tmp_path} holds 3 runs, the one that was written last at the end:"
    assert [line.split()[0] for line in lines[1:4]] == [str(tmp_path / name) for name in "bac"]
    assert lines[3].endswith("1 rank")
    assert lines[4] == f"Pass one of them, or {tmp_path / 'latest'} for the last one."
    assert find_run_directory(tmp_path / "latest") == tmp_path / "c"


def test_a_rank_folder_and_a_file_in_it_lead_to_the_run(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 1)
    rank = run / "rank-00000"
    (segment,) = rank.iterdir()

    assert refusal(rank) == f"{rank} is the folder of one rank; pass the run directory around it, {run}."
    assert refusal(segment) == f"{segment} is a file; pass the run directory around it, {run}."


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path} is empty: it holds no recorded run. Was the job started with")
    (tmp_path / "notes.txt").touch()
    assert "holds no recorded run (no rank-NNNNN folders)" in refusal(tmp_path)
    assert refusal(tmp_path / "notes.txt") == f"{tmp_path / 'notes.txt'} is a file; pass the run directory."
    assert "no such directory" in refusal(tmp_path / "latest")
    assert "no such directory" in refusal(tmp_path / "nowhere")


def test_for_a_path_that_does_not_exist_the_runs_there_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("nowhere")).startswith(
        "nowhere: no such directory. There is no run below ./commtrace-runs either."
    )

    recorded(tmp_path / "commtrace-runs" / "old", 100_000)
    recorded(tmp_path / "commtrace-runs" / "new", 200_000)
    head, *lines = refusal(Path("nowhere")).splitlines()
    assert head.endswith("Runs below ./commtrace-runs, the one that was written last at the end:")
    assert [line.split()[0] for line in lines] == ["commtrace-runs/old", "commtrace-runs/new"]
