from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from commtrace.analysis.chain import analyse
from commtrace.analysis.communication.groups import Arrivals, GroupOperation, Pair, PairMessages, measure_groups
from commtrace.analysis.communication.table import Detail, communication_table
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p, span
from tests.pipeline_factory import PipelineJob

MIB = 1 << 20
MS = 1_000_000
EVERYONE = group("dp", 0, 1, 2)


def three_ranks(arrivals: list[tuple[int, int, int]], nodes: dict[int, str] | None = None, **columns: Any) -> Run:
    """A step of three ranks with an all_reduce per row of arrivals; each ends 10 ms after it can first begin."""
    rows: dict[int, list[Row]] = {rank: [span("step", 0, 1000 * MS, step=0)] for rank in range(3)}
    for seq, starts in enumerate(arrivals):
        for rank, start in enumerate(starts):
            begin, end = 20 * MS * seq + start, 20 * MS * seq + 10 * MS
            rows[rank].append(collective("all_reduce", EVERYONE, seq, begin, end, step=0, **columns))
    return make_run(rows, [EVERYONE], nodes=nodes)


def test_the_rank_that_began_last_is_counted_with_the_waits_for_it() -> None:
    totals = measure_groups(analyse(three_ranks([(0, 10, 40), (5, 0, 105), (9, 1, 3)]), "0"))

    assert totals.compared == {EVERYONE.id: 3}
    assert totals.arrivals == {
        Pair(EVERYONE.id, 2): Arrivals(2, 40 + 30 + 100 + 105),
        Pair(EVERYONE.id, 0): Arrivals(1, 8 + 6),
    }


def test_two_that_began_at_once_are_not_told_apart() -> None:
    totals = measure_groups(analyse(three_ranks([(0, 10, 10)]), "0"))

    assert (totals.compared, totals.arrivals) == ({EVERYONE.id: 1}, {})


def test_speeds_are_of_large_calls_after_the_last_member() -> None:
    totals = measure_groups(analyse(three_ranks([(0, 0, 6 * MS), (0, 0, 0)], bytes=3 * MIB), "0"))

    speeds = totals.speeds[GroupOperation(EVERYONE.id, "all_reduce")]
    bus_bytes = 4 * MIB  # 2(n − 1)/n
    assert len(speeds) == 6
    assert speeds.nearest_rank(100) == bus_bytes / (4 * MS)
    assert speeds.nearest_rank(1) == bus_bytes / (10 * MS)


def test_small_calls_have_no_speed() -> None:
    assert measure_groups(analyse(three_ranks([(0, 0, 0)], bytes=1024), "0")).speeds == {}


def test_messages_count_where_they_are_received() -> None:
    pair = group("pp", 0, 1)
    rows = {
        0: [span("step", 0, 100 * MS, step=0), p2p("send", pair, 1, 0, 0, 1 * MS, bytes=2 * MIB, step=0)],
        1: [span("step", 0, 100 * MS, step=0), p2p("recv", pair, 0, 0, 0, 2 * MS, bytes=2 * MIB, step=0)],
    }

    totals = measure_groups(analyse(make_run(rows, [pair]), "0"))

    assert totals.messages == {Pair(0, 1): PairMessages(1, 2 * MIB, 2 * MIB, 2 * MS)}


def test_a_message_to_a_rank_that_was_not_recorded_counts_where_it_is_sent() -> None:
    pair = group("pp", 0, 1)
    rows = {0: [span("step", 0, 100 * MS, step=0), p2p("send", pair, 1, 0, 0, 1 * MS, bytes=2 * MIB, step=0)]}

    totals = measure_groups(analyse(make_run(rows, [pair], world_size=2), "0"))

    assert totals.messages == {Pair(0, 1): PairMessages(1, 2 * MIB, 0, 0)}


def test_steps_add_up_to_the_run() -> None:
    job = PipelineJob(stages=2, microbatches=3, data_parallel=2, transfer_ns=100_000, all_reduce_ns=MS, steps=4)
    run = job.run()

    steps = reduce(add, (measure_groups(analyse(run, str(step))) for step in (1, 2, 3)))
    whole = measure_groups(analyse(run))

    assert (steps.compared, steps.arrivals, steps.messages) == (whole.compared, whole.arrivals, whole.messages)
    assert steps.calls.table(run) == whole.calls.table(run)


def test_calls_are_those_of_the_table_by_group() -> None:
    analysis = analyse(PipelineJob(stages=2, microbatches=3, data_parallel=2, all_reduce_ns=MS, steps=3).run())
    context = analysis.context

    by_group = communication_table(
        context.run, context.matches, analysis.partition, context.roles, context.steps, Detail.GROUP
    )

    assert measure_groups(analysis).calls.table(analysis.run) == by_group


def test_bounds_of_starts_are_not_compared_and_have_no_speed() -> None:
    exact, bound = (
        measure_groups(analyse(three_ranks([(0, 10, 30)] * 3, bytes=MIB, start_exact=is_exact), "0"))
        for is_exact in (True, False)
    )

    assert (exact.compared, len(exact.speeds)) == ({EVERYONE.id: 3}, 1)
    assert (bound.compared, bound.arrivals, bound.speeds) == ({}, {}, {})
