"""Ranks of one job that lie under several names are one run, and those of other jobs are not taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.trace.metadata import ClockAnchor
from commtrace.trace.reader import load_newest, load_run
from tests.trace.rows import mark, row, steps, write_rank

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
UNTIL = 50 * SECOND
"""On the monotonic clock of every host, which says 5 s when a rank begins."""


def write_node(directory: Path, ranks: list[int], run_id: str, began_s: float = 0, **changes: Any) -> None:
    """Ranks of one node that record for 45 s."""
    groups = changes.pop("groups", [list(range(changes.get("world_size", 4)))])
    began = BEGAN + round(began_s * SECOND)
    for rank in ranks:
        told = [
            mark("process_group", {"id": 100 + sum(group), "ranks": group, "ordinal": 0, "role": "", "name": "",
                                   "description": "", "backend": "gloo"})
            for group in groups
            if rank in group
        ]  # fmt: skip
        fields = {
            "world_size": 4,
            "run_id": run_id,
            "host": run_id,
            "node": run_id,
            "boot_id": run_id,
            "session": began + rank,
            "anchor": ClockAnchor(5 * SECOND, began),
            **changes,
        }
        write_rank(directory, [*told, *steps(0, 3), row(start=6 * SECOND, end=UNTIL)], rank=rank, **fields)


def test_nodes_that_were_given_other_names_are_one_job(tmp_path: Path) -> None:
    write_node(tmp_path, [0, 1], "a")
    write_node(tmp_path, [2, 3], "b", began_s=2)

    for run in (load_run(tmp_path), load_newest(tmp_path)):
        assert list(run.ranks) == [0, 1, 2, 3]
        assert run.problems == (
            "One job was recorded under several names, and is shown as one: run b, attempt 0 holds ranks 2, 3; "
            "run a, attempt 0 holds ranks 0, 1. Give all nodes the same COMMTRACE_RUN_ID.",
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
        f"{len(others)} segments of other runs or attempts in the same directory were left out (run other, attempt 0); "
        "shown is run shown, attempt 0.",
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
