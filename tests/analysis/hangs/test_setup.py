"""Ranks that wait for each other while process groups are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commtrace.analysis.hangs.examination import examine
from commtrace.trace.hang_report import Activity
from commtrace.trace.run import Run
from tests.factory import EPOCH_NS, make_run
from tests.findings.reading import said

SECOND_NS = 1_000_000_000
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"
PREPARES = ("/job/data.py:9 read", "/job/train.py:4 <module>")


def in_call(call: str, line: int = 5) -> tuple[str, ...]:
    return (
        f"{TORCH}/distributed_c10d.py:99 {call}",
        f"{TORCH}/c10d_logger.py:83 wrapper",
        f"/job/train.py:{line} main",
    )


def run_at(frames: Sequence[tuple[str, ...]], seconds: int = 40, *, closed: Sequence[int] = (), world: int = 0) -> Run:
    run = make_run({rank: [] for rank in range(len(frames))}, world_size=world or len(frames))
    ranks = {
        rank: replace(
            trace,
            closed=rank in closed,
            activity=Activity((-1, -1, -1, -1), (), {}, (), frames[rank]),
            activity_ns=seconds * SECOND_NS,
            last_written_ns=seconds * SECOND_NS,
            no_progress_ns=seconds * SECOND_NS,
        )
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def findings(run: Run, seconds: int = 40) -> list[str]:
    return said(examine(run, now_ns=EPOCH_NS + seconds * SECOND_NS).findings)


def test_the_rank_that_has_not_come_is_named_with_its_place() -> None:
    run = run_at([in_call("new_group"), PREPARES, in_call("new_group")])

    assert findings(run) == [
        "The job hangs while process groups are made: ranks 0, 2 wait in new_group at /job/train.py:5 main for 40 s. "
        "Not come: rank 1 at /job/data.py:9 read."
    ]


def test_ranks_that_ended_will_not_come_and_of_some_there_are_no_files() -> None:
    run = run_at([in_call("init_process_group"), PREPARES], closed=[1], world=3)

    (hang, *_) = findings(run)
    assert "Not come: rank 1, which ended and will not come; rank 2, of which there are no files." in hang


def test_ranks_in_different_calls_wait_for_each_other() -> None:
    run = run_at([in_call("new_group"), in_call("split_group", 7)])

    (hang,) = findings(run)
    assert "rank 0 waits in new_group at /job/train.py:5 main" in hang
    assert "rank 1 waits in split_group at /job/train.py:7 main" in hang
    assert "They wait for each other in different calls" in hang


def test_a_call_in_which_all_have_arrived_is_one_of_the_network() -> None:
    assert "No rank is missing there" in findings(run_at([in_call("new_group")] * 2))[0]


def test_a_short_wait_is_none() -> None:
    assert findings(run_at([in_call("new_group"), PREPARES], 10), 10) == []


def test_ranks_of_which_none_has_begun_are_reported_with_their_places() -> None:
    assert findings(run_at([PREPARES, PREPARES])) == [
        "No rank has begun a step or communicated: no progress for 40 s. They are: ranks 0–1 at /job/data.py:9 read."
    ]
    assert findings(run_at([PREPARES, PREPARES], 20), 20) == []


def test_the_end_of_a_job_that_hung_so_names_no_rank_as_failed() -> None:
    run = run_at([in_call("new_group"), PREPARES])

    (first, *_rest) = findings(run, seconds=4000)
    assert first.startswith("The job hangs while process groups are made")
