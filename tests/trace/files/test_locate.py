from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from commtrace.errors import RunNotFoundError
from commtrace.trace.files import reader
from commtrace.trace.files.budget import Budget
from commtrace.trace.files.locate import find_run_directory, runs_below
from commtrace.trace.files.rank_files import link_as_latest, segment_paths
from commtrace.trace.files.reader import load_newest, load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.run import Run
from tests.trace.files.nodes import write_node
from tests.trace.rows import mark, metadata, steps, write_rank


def recorded(directory: Path, written_at: int) -> Path:
    folder = write_rank(directory, steps(0, 1))
    for path in (*folder.iterdir(), directory):
        os.utime(path, (written_at, written_at))
    return directory


def refusal(path: Path) -> str:
    with pytest.raises(RunNotFoundError) as caught:
        find_run_directory(path)
    return str(caught.value)


def test_all_runs_are_listed_the_newest_last(tmp_path: Path) -> None:
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


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path} is empty: it holds no recorded run. Was the job started with")
    (tmp_path / "notes.txt").touch()
    assert "holds no recorded run (no rank-NNNNN folders)" in refusal(tmp_path)
    assert refusal(tmp_path / "notes.txt") == f"{tmp_path / 'notes.txt'} is a file; pass the run directory."
    assert "no such directory" in refusal(tmp_path / "latest")
    assert "no such directory" in refusal(tmp_path / "nowhere")


def test_folders_that_cannot_be_read_hide_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "run", 1)
    dead = tmp_path / "dead" / "rank-00000"
    dead.parent.mkdir()
    dead.symlink_to("/no/such/node")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "rank-00000").touch()
    forbidden = tmp_path / "lost+found"
    forbidden.mkdir()
    contents = Path.iterdir

    def guarded(path: Path) -> Iterator[Path]:
        if path == forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return contents(path)

    monkeypatch.setattr(Path, "iterdir", guarded)

    assert find_run_directory(tmp_path) == run


def test_a_rank_whose_folder_is_a_link_to_nowhere_is_missing(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 1), rank=0, world_size=2)
    (tmp_path / "rank-00001").symlink_to("/no/such/node")

    run = load_run(tmp_path)

    assert list(run.ranks) == [0]
    assert run.problems[0].startswith("1 of 2 ranks have no readable files: 1. Bring their")


def test_a_rank_whose_folder_may_not_be_read_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, steps(0, 1), rank=rank, world_size=2)

    def guarded(folder: Path) -> list[Path]:
        if folder.name == "rank-00001":
            raise PermissionError(13, "Permission denied", str(folder))
        return segment_paths(folder)

    monkeypatch.setattr(reader, "segment_paths", guarded)

    run = load_run(tmp_path)

    assert list(run.ranks) == [0]
    assert run.problems[0] == f"{tmp_path / 'rank-00001'}: skipped, it cannot be read (Permission denied)."


def test_a_path_that_does_not_exist_is_answered_with_the_runs_there_are(
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


def test_nodes_that_were_given_other_names_are_one_job(tmp_path: Path) -> None:
    write_node(tmp_path, [0, 1], "a")
    write_node(tmp_path, [2, 3], "b", began_s=2)

    for run in (load_run(tmp_path), load_newest(tmp_path)):
        assert list(run.ranks) == [0, 1, 2, 3]
        assert run.problems == (
            "One job was recorded under several names, and is shown as one: run b, attempt 1 holds ranks 2, 3; "
            "run a, attempt 1 holds ranks 0, 1. Give all nodes the same COMMTRACE_RUN_ID.",
        )


def test_also_those_whose_launcher_counted_another_attempt(tmp_path: Path) -> None:
    write_node(tmp_path, [0, 1], "a")
    write_node(tmp_path, [2, 3], "a", began_s=2, attempt=1)

    assert list(load_run(tmp_path).ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("others", "changes"),
    [
        ([0, 1, 2], {}),  # they hold a rank that is there
        ([0, 1], {"world_size": 8}),
        ([0, 1], {"began_s": -76}),  # they had ended 31 s before
        ([0, 1], {"groups": [[0, 1, 2, 3], [0, 2]]}),  # here the others know a group of 1 and 3 or 0 and 3
    ],
)
def test_another_job_is_named_and_left_out(tmp_path: Path, others: list[int], changes: dict[str, Any]) -> None:
    write_node(tmp_path, others, "other", **{"began_s": -2, **changes})
    write_node(tmp_path, [2, 3], "shown", groups=[[0, 1, 2, 3], [0, 3]])

    run = load_run(tmp_path)

    assert list(run.ranks) == [2, 3]
    assert run.problems == (
        f"{len(others)} segments of other runs or attempts in the same directory were left out (run other, attempt 1); "
        "shown is run shown, attempt 1.",
        "2 of 4 ranks have folders in which nothing of this run can be read: 0, 1.",
    )


def test_a_node_that_was_ended_before_all_groups_were_made_is_of_the_job(tmp_path: Path) -> None:
    write_node(tmp_path, [0, 1], "a", groups=[[0, 1, 2, 3]])
    write_node(tmp_path, [2, 3], "b", groups=[[0, 1, 2, 3], [0, 2], [1, 3]])

    assert list(load_run(tmp_path).ranks) == [0, 1, 2, 3]


def test_a_run_that_is_whole_takes_nothing_in(tmp_path: Path) -> None:
    write_node(tmp_path, [0, 1], "old", world_size=2)
    write_node(tmp_path, [0, 1], "new", began_s=1, world_size=2)

    assert {trace.metadata.run_id for trace in load_run(tmp_path).ranks.values()} == {"new"}


def write_two_ranks(directory: Path) -> tuple[Path, Path]:
    """50 steps in five segments each; returns their folders."""
    first, second = (
        write_rank(directory, [*steps(0, 50), mark("end", {})], rank=rank, world_size=2, steps_per_segment=10)
        for rank in (0, 1)
    )
    return first, second


def num_rows(run: Run) -> list[int]:
    return [len(trace.spans) for trace in run.ranks.values()]


def test_a_segment_that_is_missing_in_the_middle_is_reported(tmp_path: Path) -> None:
    _, folder = write_two_ranks(tmp_path)
    (folder / "spans-0002.arrows").unlink()

    run = load_run(tmp_path)

    assert num_rows(run) == [50, 40]
    assert run.problems == (
        f"rank 1: 1 file is missing in {folder} between spans-0001.arrows and spans-0003.arrows, from about step 10 to "
        "30: its numbers are lower bounds there. Copy the folder again.",
    )


def test_a_number_that_no_folder_holds_costs_no_memory(tmp_path: Path) -> None:
    folder, _ = write_two_ranks(tmp_path)
    path = folder / "spans-0004.arrows"
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    table = table.replace_schema_metadata({**table.schema.metadata, b"commtrace.segment": b"999999999"})
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)

    assert "rank 0: 999999994 files are missing" in load_run(tmp_path).problems[0]


def test_segments_that_are_missing_at_the_beginning_are_reported(tmp_path: Path) -> None:
    folder, _ = write_two_ranks(tmp_path)
    for number in (0, 1):
        (folder / f"spans-000{number}.arrows").unlink()

    assert load_run(tmp_path).problems == (
        f"rank 0: 2 files are missing in {folder} before spans-0002.arrows, which begins with step 20. Copy the folder "
        "again.",
    )
    assert load_newest(tmp_path).problems == ()


@pytest.mark.parametrize("ends", [True, False])
def test_segments_that_were_deleted_to_keep_to_the_budget_are_not_missing(tmp_path: Path, ends: bool) -> None:
    write_rank(tmp_path, steps(0, 30), steps_per_segment=10)
    writer = SegmentWriter(tmp_path, metadata(session=2_000), budget=Budget(steps=16))
    for step in range(100):
        writer.write([*steps(step, step + 1), mark("topology", {"recording": {"keep_steps": 16}})])
        if step > 20:
            assert not any("missing" in one for one in load_run(tmp_path).problems)
    if ends:
        writer.write([mark("end", {})])
    writer.close()
    run = load_run(tmp_path)
    assert (run.problems, run.ranks[0].discarded is not None) == ((), True)


def test_one_more_than_the_budget_deleted_is_missing(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata(), budget=Budget(steps=16))
    for step in range(100):
        writer.write(steps(step, step + 1))
    writer.write([mark("end", {})])
    writer.close()
    assert load_run(tmp_path).problems == ()

    min(writer.directory.glob("*.arrows")).unlink()
    assert "1 file is missing" in load_run(tmp_path).problems[0]


def test_segments_that_were_exchanged_between_ranks_are_reported(tmp_path: Path) -> None:
    one, other = (folder / "spans-0002.arrows" for folder in write_two_ranks(tmp_path))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)

    run = load_run(tmp_path)

    assert num_rows(run) == [40, 40]
    assert run.problems == (
        "rank-00001/spans-0002.arrows: left out, of rank 0 by the header. Was a file moved or copied there?",
        "rank-00000/spans-0002.arrows: left out, of rank 1 by the header. Was a file moved or copied there?",
    )


def test_a_segment_that_was_copied_counts_once(tmp_path: Path) -> None:
    folder, _ = write_two_ranks(tmp_path)
    shutil.copy(folder / "spans-0002.arrows", folder / "spans-0009.arrows")

    run = load_run(tmp_path)

    assert num_rows(run) == [50, 50]
    assert run.problems == (f"{folder}/spans-0009.arrows: left out, it is a copy of spans-0002.arrows.",)


def test_segments_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    folder, _ = write_two_ranks(tmp_path)
    (folder / "spans-0001.arrows").rename(folder / "spans-0077.arrows")

    run = load_run(tmp_path, "12:14")

    assert (num_rows(run), run.problems) == ([2, 2], ())


def test_a_rank_of_another_import_is_reported(tmp_path: Path) -> None:
    """One call writes all ranks of an import; here somebody has put a folder of another one in the place of its own."""
    for rank in range(3):
        write_rank(tmp_path, steps(0, 3), rank=rank, world_size=3, session=2_000 if rank == 1 else 1_000)

    assert load_run(tmp_path).problems == (
        "rank 1: not written together with the others, though under the same name. Is what is shown of two runs? Copy "
        "the folders of one run again.",
    )


def test_the_link_of_a_recording_is_no_run_of_its_own_and_the_last_written_one_is_read(tmp_path: Path) -> None:
    older, newer = recorded(tmp_path / "older", 100_000), recorded(tmp_path / "newer", 200_000)
    link_as_latest(newer)
    link_as_latest(older)

    assert (tmp_path / "latest").readlink() == Path("older")
    assert find_run_directory(tmp_path / "latest") == newer
    assert runs_below(tmp_path) == [older, newer]


def test_a_directory_called_latest_stays(tmp_path: Path) -> None:
    run = recorded(tmp_path / "latest", 1)
    link_as_latest(recorded(tmp_path / "other", 2))

    assert not (tmp_path / "latest").is_symlink()
    assert find_run_directory(tmp_path / "latest") == run


def test_a_name_as_the_list_of_runs_prints_it_is_accepted_and_the_nearest_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = recorded(tmp_path / "commtrace-runs" / "gpt-large", 100_000)

    assert find_run_directory(Path("gpt-large")).resolve() == run.resolve()
    assert refusal(Path("gpt-lrage")) == "gpt-lrage: no such directory. Did you mean commtrace-runs/gpt-large?"


def test_of_many_runs_the_newest_few_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        recorded(tmp_path / "commtrace-runs" / f"r{number}", 100_000 + number)

    said = refusal(Path("somewhere"))
    assert "(3 older ones)" in said
    assert said.count("commtrace-runs/r") == 5
