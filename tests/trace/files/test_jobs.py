"""The worlds of a job are found: by its name, by what recorded them, and by the groups that join them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.history.runs import list_runs
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.files.jobs import are_of_one_job, other_worlds, read_world, worlds_in
from commtrace.trace.files.reader import load_run
from commtrace.trace.metadata import ClockAnchor, group_id
from commtrace.trace.schema import COMMUNICATION, P2P
from tests.trace.rows import mark, row, steps, write_rank

BEGAN_NS = 1_700_000_000_000_000_000
GROUP = {"id": 9, "ranks": [], "ordinal": 0, "role": "unknown", "name": "weights", "world": "a" * 16, "key": "k"}


def member(world: str, rank: int, run_id: str) -> dict[str, Any]:
    return {"world": world * 16, "rank": rank, "run_id": run_id, "host": "alpha", "pid": 10 + rank}


def world(
    directory: Path,
    key: str,
    *,
    job: str = "a",
    began: int = 0,
    lasted: int = 100,
    groups: Sequence[dict[str, Any]] = (),
    size: int = 1,
) -> Path:
    """A world that began and ended at these seconds."""
    for rank in range(size):
        folder = write_rank(
            directory,
            [*(mark("process_group", group) for group in groups), *steps(0, 2)],
            rank=rank,
            world_size=size,
            world=key * 16,
            job=job,
            run_id=directory.name,
            anchor=ClockAnchor(0, BEGAN_NS + began * 10**9),
        )
        for path in folder.iterdir():
            os.utime(path, ns=(0, BEGAN_NS + (began + lasted) * 10**9))
    return directory


def names(directory: Path) -> list[str]:
    return [found.path.name for found in other_worlds(directory)]


def test_worlds_of_one_name_that_ran_at_the_same_time_are_one_job(tmp_path: Path) -> None:
    first = world(tmp_path / "a", "a")
    world(tmp_path / "a-world-2", "b", began=20)
    world(tmp_path / "a-world-3", "c", began=1000)  # of a later job
    world(tmp_path / "b", "d", job="b")

    assert names(first) == ["a-world-2"]
    assert names(tmp_path / "a-world-2") == ["a"]
    assert names(tmp_path / "b") == []


def test_worlds_of_one_launch_are_one_job_though_one_had_ended(tmp_path: Path) -> None:
    first, second = world(tmp_path / "a", "a"), world(tmp_path / "a-world-2", "b", began=1000)
    for directory, key in ((first, "a"), (second, "b")):
        holder = {
            "world": key * 16, "launch": "x", "attempt": 0, "host": "alpha", "boot_id": "b1", "pid": 1, "session": 1,
        }  # fmt: skip
        (directory / "world-0000.json").write_text(json.dumps(holder))

    assert names(first) == ["a-world-2"]


def test_worlds_that_a_group_joins_are_one_job_whatever_they_are_called(tmp_path: Path) -> None:
    group = {**GROUP, "members": [member("a", 0, "trainer"), member("b", 0, "rollout")]}
    first = world(tmp_path / "trainer", "a", job="trainer", groups=[group])
    world(tmp_path / "rollout", "b", job="rollout", began=5000)

    assert names(first) == ["rollout"]
    assert names(tmp_path / "rollout") == ["trainer"]


def test_a_world_in_the_directory_of_another_one_is_found_from_both(tmp_path: Path) -> None:
    first = world(tmp_path / "fixed", "a")
    second = world(first / "world-2", "b")

    assert (names(first), names(second)) == (["world-2"], ["fixed"])
    assert list(load_run(first).ranks) == [0]
    for directory in (first, tmp_path):
        listed = list_runs(directory, now_ns=BEGAN_NS)
        assert sorted(run.directory for run in listed.runs) == ["fixed", "fixed/world-2"]


def test_the_name_of_the_run_may_be_above_the_last_folder(tmp_path: Path) -> None:
    first = world(tmp_path / "a" / "traces", "a")
    write_rank(first, steps(0, 1), run_id="a", world="a" * 16, job="a", session=2_000)
    second = tmp_path / "a-world-2" / "traces"
    write_rank(second, steps(0, 1), run_id="a-world-2", world="b" * 16, job="a")

    assert [found.path for found in other_worlds(first)] == [second]


def test_a_run_of_an_older_version_has_no_other_worlds(tmp_path: Path) -> None:
    write_rank(tmp_path / "a", steps(0, 1))
    world(tmp_path / "a-world-2", "b")

    assert read_world(tmp_path / "a") is None
    assert names(tmp_path / "a") == []


def test_a_directory_of_one_job_holds_its_worlds_and_one_of_several_jobs_none(tmp_path: Path) -> None:
    world(tmp_path / "a", "a")
    world(tmp_path / "a-world-2", "b")
    assert [found.path.name for found in worlds_in(tmp_path)] == ["a", "a-world-2"]

    world(tmp_path / "b", "c", job="b")
    assert worlds_in(tmp_path) == []
    assert worlds_in(tmp_path / "a") == []


def test_a_world_is_no_other_world_than_itself(tmp_path: Path) -> None:
    found = read_world(world(tmp_path / "a", "a"))

    assert found is not None
    assert not are_of_one_job(found, found)


def test_two_worlds_in_one_directory_are_never_mixed(tmp_path: Path) -> None:
    """As after copying the folders of nodes with disks of their own into one."""
    for rank, key in ((0, "a"), (1, "a"), (1, "b")):
        write_rank(tmp_path, steps(0, 3), rank=rank, world_size=2, world=key * 16, session=1000 + ord(key))
    run = load_run(tmp_path)

    assert {trace.metadata.world for trace in run.ranks.values()} == {"b" * 16}
    assert run.problems[0].startswith("2 segments of other runs or attempts in the same directory were left out")


def test_a_rank_that_has_not_learned_its_world_is_shown_with_the_others(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 3), rank=0, world_size=2, world="a" * 16)
    write_rank(tmp_path, steps(0, 3), rank=1, world_size=2)

    assert list(load_run(tmp_path).ranks) == [0, 1]


def test_members_of_ones_own_world_have_their_ranks_and_others_a_number_that_no_rank_has(tmp_path: Path) -> None:
    group = {**GROUP, "members": [member("a", 1, "a"), member("b", 0, "b"), None]}
    messages = [
        row(kind=P2P, lane=COMMUNICATION, name="send", group=9, seq=0, peer=peer, id=number, start=number)
        for number, peer in enumerate([OUTSIDE, OUTSIDE + 1, OUTSIDE + 2, OUTSIDE + 3, 1, 2])
    ]
    flight = [{"operation": "recv", "group": 9, "seq": 0, "peer": OUTSIDE, "start": 1}]
    rows = [mark("process_group", group), *messages, mark("in_flight", flight)]
    write_rank(tmp_path, rows, world_size=2, world="a" * 16)
    run = load_run(tmp_path)

    assert run.ranks[0].spans.peer.tolist() == [1, OUTSIDE + 1, OUTSIDE + 2, OUTSIDE + 3, 1]
    assert run.ranks[0].in_flight[0].peer == 1
    assert [problem for problem in run.problems if "impossible" in problem] == [
        "rank 0: 1 rows are impossible (an end before its start, a missing or impossible number) and were left out: "
        "its numbers are lower bounds."
    ]  # the message to rank 2 of 2


def test_groups_of_two_worlds_with_equal_ids_are_told_apart_by_their_worlds(tmp_path: Path) -> None:
    for key in "ab":
        default = {**GROUP, "id": group_id((0,), 0), "ranks": [0], "world": key * 16, "key": ""}
        world(tmp_path / key, key, groups=[default])
    groups = [next(iter(load_run(tmp_path / key).ranks[0].groups.values())) for key in "ab"]

    assert groups[0].id == groups[1].id
    assert [group.world for group in groups] == ["a" * 16, "b" * 16]


@pytest.mark.parametrize("command", ["merge", "straggler"])
def test_worlds_are_not_merged_into_one_run(tmp_path: Path, command: str) -> None:
    runs = [str(world(tmp_path / name, key, job=name)) for name, key in (("a", "a"), ("b", "b"))]
    words = [command, *runs, *(["-o", str(tmp_path / "merged")] if command == "merge" else [])]
    result = CliRunner().invoke(app, words)

    assert result.exit_code == 2
    assert "not of one job: they are two worlds" in " ".join(result.output.split())
