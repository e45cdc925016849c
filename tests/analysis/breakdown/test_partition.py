"""Every instant of a step is in exactly one state. Times in the drawings are the nanoseconds of the tests."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commtrace.analysis.breakdown.partition import Partition, partition
from commtrace.analysis.matching.match import match
from commtrace.trace.run import Run
from tests.analysis.breakdown.drawn_rows import DATA_PARALLEL, PIPELINE, any_rows
from tests.factory import Row, collective, make_run, p2p, span, stall
from tests.pipeline_factory import PipelineJob


def divide(run: Run) -> Partition:
    return partition(run, match(run))


def states(table: Partition, row: int = 0) -> dict[str, int]:
    """Time in each state that is not empty, under names like ``compute forward``."""
    return {
        " ".join(filter(None, state)): time
        for state, time in zip(table.states, table.ns[row].tolist(), strict=True)
        if time
    }


def test_work_is_divided_by_phase_and_the_rest_is_other() -> None:
    rows = [
        span("step", 0, 100, step=0),
        span("forward", 10, 30),
        span("backward", 40, 70),
        span("optimizer", 70, 80),
    ]
    table = divide(make_run({0: rows}))
    assert states(table) == {"compute forward": 20, "compute backward": 30, "compute optimizer": 10, "other": 40}
    assert table.wall_ns.tolist() == [100]


def test_the_innermost_phase_counts() -> None:
    rows = [span("step", 0, 100, step=0), span("backward", 0, 100), span("recompute", 10, 40)]
    assert states(divide(make_run({0: rows}))) == {"compute backward": 70, "compute recompute": 30}


def test_modules_are_part_of_their_phase_and_alone_they_are_compute() -> None:
    rows = [span("step", 0, 100, step=0), span("forward", 0, 50), span("module", 10, 60), span("user", 70, 80)]
    assert states(divide(make_run({0: rows}))) == {"compute forward": 50, "compute other": 20, "other": 30}


def test_a_span_of_the_user_on_the_host_lane_says_nothing_about_the_compute_lane() -> None:
    rows = [span("step", 0, 100, step=0), span("user", 10, 60, lane="host")]
    assert states(divide(make_run({0: rows}))) == {"other": 100}


def test_the_cause_of_a_stall_takes_precedence_over_the_work_behind_it() -> None:
    """gc > stall > checkpoint > data > evaluation > phases: each covers the one before it by half."""
    message = collective("all_reduce", DATA_PARALLEL, 0, 40, 60, id=1)
    rows = [
        span("step", 0, 100, step=0),
        span("forward", 0, 20),
        span("evaluation", 10, 30),
        span("data", 20, 40),
        span("checkpoint", 30, 50),
        message,
        stall(message, 40, 60),
        span("gc", 50, 70),
    ]
    assert states(divide(make_run({0: rows}, [DATA_PARALLEL]))) == {
        "compute forward": 10,
        "compute evaluation": 10,
        "data": 10,
        "checkpoint": 10,
        "exposed transfer dp": 10,
        "gc": 20,
        "other": 30,
    }


def test_a_stall_is_wait_until_the_last_participant_came_and_transfer_after_it() -> None:
    early, late = (collective("all_reduce", DATA_PARALLEL, 0, start, 80, id=1) for start in (20, 50))
    rows = {
        0: [span("step", 0, 100, step=0), early, stall(early, 20, 80)],
        1: [span("step", 0, 100, step=0), late, stall(late, 50, 80)],
    }
    table = divide(make_run(rows, [DATA_PARALLEL]))
    assert states(table, 0) == {"exposed wait dp": 30, "exposed transfer dp": 30, "other": 40}
    assert states(table, 1) == {"exposed transfer dp": 30, "other": 70}
    assert table.total("exposed wait", "dp").tolist() == [30, 0]
    assert table.total("exposed transfer").tolist() == [30, 30]


@pytest.mark.parametrize("waiting", ["send", "recv"])
def test_waiting_for_the_neighbour_to_give_or_to_take_is_bubble(waiting: str) -> None:
    other = "recv" if waiting == "send" else "send"
    mine, theirs = p2p(waiting, PIPELINE, 1, 0, 10, 60, id=1), p2p(other, PIPELINE, 0, 0, 40, 60, id=1)
    rows = {0: [span("step", 0, 100, step=0), mine, stall(mine, 10, 60)], 1: [theirs]}
    assert states(divide(make_run(rows, [PIPELINE]))) == {"bubble": 30, "exposed transfer pp": 20, "other": 50}


def test_waiting_in_a_collective_of_the_pipeline_group_is_no_bubble() -> None:
    rows = {
        rank: [row, stall(row, 10 + 30 * rank, 60), span("step", 0, 100, step=0)]
        for rank in (0, 1)
        for row in [collective("all_reduce", PIPELINE, 0, 10 + 30 * rank, 60, id=1)]
    }
    assert states(divide(make_run(rows, [PIPELINE])))["exposed wait pp"] == 30


def test_a_stall_on_something_that_was_not_recorded_is_transfer() -> None:
    lost = collective("all_reduce", DATA_PARALLEL, 0, 10, 30, id=1)
    table = divide(make_run({0: [span("step", 0, 100, step=0), stall(lost, 10, 30)]}, [DATA_PARALLEL]))
    assert states(table) == {"exposed transfer dp": 20, "other": 80}


def test_a_stall_across_the_end_of_a_step_is_shared_between_the_steps() -> None:
    message = collective("all_reduce", DATA_PARALLEL, 0, 80, 130, id=1)
    rows = [span("step", 0, 100, step=0), span("step", 100, 200, step=1), message, stall(message, 80, 130)]
    table = divide(make_run({0: rows}, [DATA_PARALLEL]))
    assert [states(table, row)["exposed transfer dp"] for row in (0, 1)] == [20, 30]


def test_communication_behind_compute_is_hidden_and_outside_the_sum() -> None:
    """Two all_reduces, 10–50 and 30–70; the lane computes until 60 and then stalls on the second one."""
    first = collective("all_reduce", DATA_PARALLEL, 0, 10, 50, id=1, is_async=True)
    second = collective("all_reduce", DATA_PARALLEL, 1, 30, 70, id=2, is_async=True)
    rows = [span("step", 0, 100, step=0), span("backward", 0, 60), first, second, stall(second, 60, 70)]
    table = divide(make_run({0: rows}, [DATA_PARALLEL]))
    assert table.hidden_ns.tolist() == [50]  # 10–60: the overlap of the two counts once
    assert states(table) == {"compute backward": 60, "exposed transfer dp": 10, "other": 30}


def test_a_pipeline_step_divides_as_the_schedule_says() -> None:
    job = PipelineJob(4, 8, forward_ns=1, backward_ns=2, optimizer_ns=5)
    table = divide(job.run())
    assert (table.wall_ns == job.step_ns).all()
    for row, stage in enumerate(np.repeat(np.arange(4), 3)):
        expected = {"compute forward": 8, "compute backward": 16, "compute optimizer": 5, "bubble": 9 - 2 * stage}
        drain = {"exposed wait mp": 2 * stage} if stage else {}
        assert states(table, row) == {**expected, **drain}


def test_each_stall_knows_how_much_of_the_steps_it_stands_for() -> None:
    run = PipelineJob(2, 3, data_parallel=2, transfer_ns=7, all_reduce_ns=11, forward_ns=100, backward_ns=200).run()
    table = divide(run)
    for rank, stalled in table.stalled_ns.items():
        own = table.rank == rank
        waits = table.total("exposed wait")[own].sum() + table.total("bubble")[own].sum()
        assert stalled.sum(axis=0).tolist() == [waits, table.total("exposed transfer")[own].sum()]


@settings(max_examples=200)
@given(any_rows(), any_rows(), st.randoms(use_true_random=False), st.integers(-(10**17), 10**17))
def test_the_parts_always_add_up_whatever_the_order_and_the_clock(
    rows: list[Row], other: list[Row], random: Random, constant: int
) -> None:
    run = make_run({0: rows, 1: other}, [DATA_PARALLEL, PIPELINE])
    table = divide(run)
    assert (table.ns.sum(axis=1) == table.end - table.start).all()
    assert (table.ns >= 0).all()
    assert (table.hidden_ns >= 0).all()
    assert (table.hidden_ns <= table.wall_ns).all()

    ranks = {}
    for rank, trace in run.ranks.items():
        order = list(range(len(trace.spans)))
        random.shuffle(order)
        spans = trace.spans.take(np.array(order))
        ranks[rank] = replace(trace, spans=spans.replace(start=spans.start + constant, end=spans.end + constant))
    moved = divide(replace(run, ranks=ranks))
    assert (moved.ns == table.ns).all()
    assert (moved.hidden_ns == table.hidden_ns).all()


def test_a_rank_without_steps_has_no_rows() -> None:
    table = divide(make_run({0: [span("forward", 0, 10)]}))
    assert table.ns.shape[0] == 0


def test_the_time_between_steps_is_divided_by_what_is_known_of_it() -> None:
    """The work of the step begins at 60; what lies before it has no number."""
    barrier = collective("barrier", DATA_PARALLEL, 0, 45, 55, id=1, step=-1)
    rows = [
        span("step", 0, 100, step=1),
        span("between", 0, 60, step=1),
        span("data", 0, 10, step=-1),
        span("evaluation", 10, 25, step=-1),
        span("checkpoint", 25, 32, step=-1),
        span("user", 32, 40, step=-1),
        barrier,
        stall(barrier, 45, 55, step=-1),
        span("forward", 70, 90, step=1),
    ]
    table = divide(make_run({0: rows}))

    parts = states(table)
    exposed = sum(parts.pop(state) for state in list(parts) if state.startswith("exposed"))
    assert (exposed, parts) == (
        10,
        {
            "data": 10, "compute evaluation": 15, "checkpoint": 7, "compute other": 8, "between": 10,
            "compute forward": 20, "other": 20,
        },
    )  # fmt: skip
    assert int(table.ns.sum()) == 100
