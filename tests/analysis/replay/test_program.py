"""A recorded run, replayed with what was measured, gives the measured times back."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.matching.match import match
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import Program, build_program
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.pipeline_factory import PipelineJob

WORLD = group("world", 0, 1)


def program_of(rows: dict[int, list[Row]]) -> Program:
    run = make_run({rank: [{"step": 0, **row} for row in own] for rank, own in rows.items()}, [WORLD])
    return build_program(run, match(run))


@pytest.mark.parametrize(("stages", "microbatches", "step_ms"), [(4, 8, 33), (8, 16, 69), (2, 2, 9), (4, 4, 21)])
def test_one_forward_one_backward_takes_as_long_as_the_formula_gives(
    stages: int, microbatches: int, step_ms: int
) -> None:
    run = PipelineJob(stages, microbatches).run()

    assert build_program(run, match(run)).step_times().tolist() == [step_ms * 1_000_000] * 3


@pytest.mark.parametrize(
    "job",
    [
        PipelineJob(4, 8, data_parallel=2, transfer_ns=50_000, all_reduce_ns=3_000_000, optimizer_ns=500_000),
        PipelineJob(3, 5, data_parallel=3, all_reduce_ns=1_000, extra_forward_ns={4: 900_000}),
        PipelineJob(2, 1, transfer_ns=7),
    ],
)
def test_every_instant_comes_back_to_the_nanosecond(job: PipelineJob) -> None:
    run = job.run()
    program = build_program(run, match(run))

    times = program.times(origins=program.start_ns)

    assert (times[program.last_node] == program.end_ns).all()
    for stalls, times_of_stalls in [(program.stalls, times[program.stalls.node])]:
        for rank, trace in run.ranks.items():
            own = stalls.rank == rank
            assert (times_of_stalls[own] == trace.spans.end[stalls.row[own]]).all()
    assert (program.step_times() == program.measured_step_times()).all()


def test_a_collective_ends_its_transfer_after_the_last_participant() -> None:
    late, early = collective("all_reduce", WORLD, 0, 40, 50, id=1), collective("all_reduce", WORLD, 0, 10, 50, id=1)
    program = program_of(
        {
            0: [span("step", 0, 60), late, stall(late, 40, 50)],
            1: [span("step", 0, 60), early, stall(early, 10, 50)],
        }
    )
    halved = np.where(program.segments.rank == 0, program.segments.total_ns // 2, program.segments.total_ns)

    assert program.transfers.ns.tolist() == [10, 10]
    assert program.step_times().tolist() == [60]
    # Rank 0: 20 of work instead of 40; then 10 of transfer; then 5 instead of 10. Rank 1: 10 of work at the end.
    assert program.step_times(halved).tolist() == [40]


def test_work_beside_an_asynchronous_communication_hides_it() -> None:
    rows = [collective("all_reduce", WORLD, 0, start, 30, id=1, is_async=True) for start in (10, 5)]
    program = program_of(
        {rank: [span("step", 0, 60), row, stall(row, 50, 50)] for rank, row in enumerate(rows)},
    )
    quick = np.where(program.segments.ordinal == 0, 12, program.segments.total_ns)

    assert program.step_times().tolist() == [60]
    # Of the 50 before the wait 12 are left: the launch is at 12·10/50 = 2, the communication lasts 20 more.
    assert program.step_times(quick).tolist() == [32]


def test_an_eager_send_does_not_wait_for_its_receiver() -> None:
    send = p2p("send", WORLD, 1, 0, 10, 12, id=1)
    receive = p2p("recv", WORLD, 0, 0, 30, 33, id=1)
    program = program_of(
        {
            0: [span("step", 0, 20), send, stall(send, 10, 12)],
            1: [span("step", 0, 40), receive, stall(receive, 30, 33)],
        }
    )
    sender, receiver = program.last_node[:, 0]
    slow_receiver = np.where(program.segments.rank == 1, program.segments.total_ns * 2, program.segments.total_ns)
    slow_sender = np.where(program.segments.rank == 0, program.segments.total_ns * 5, program.segments.total_ns)

    assert program.times(slow_receiver)[[sender, receiver]].tolist() == [20, 77]
    assert program.times(slow_sender)[[sender, receiver]].tolist() == [92, 60]


def test_a_broadcast_waits_for_its_root_only() -> None:
    root = collective("broadcast", WORLD, 0, 10, 12, id=1, peer=0)
    other = collective("broadcast", WORLD, 0, 30, 31, id=1, peer=0)
    program = program_of(
        {
            0: [span("step", 0, 20), root, stall(root, 10, 12)],
            1: [span("step", 0, 40), other, stall(other, 30, 31)],
        }
    )
    slow_root = np.where(program.segments.rank == 0, program.segments.total_ns * 5, program.segments.total_ns)

    assert program.step_times().tolist() == [40]
    assert program.times(slow_root)[program.last_node[:, 0]].tolist() == [92, 60]


def test_a_bracket_ends_when_all_its_members_have_started() -> None:
    pairs = {
        0: [p2p("send", WORLD, 1, 0, 10, 45, id=1, op_in_seq=0), p2p("recv", WORLD, 1, 0, 10, 45, id=2, op_in_seq=1)],
        1: [p2p("recv", WORLD, 0, 0, 40, 45, id=1, op_in_seq=0), p2p("send", WORLD, 0, 0, 40, 45, id=2, op_in_seq=1)],
    }
    program = program_of(
        {rank: [span("step", 0, 60), *pair, stall(pair[0], pair[0]["start"], 45)] for rank, pair in pairs.items()}
    )
    slow = np.where(program.segments.rank == 0, program.segments.total_ns * 6, program.segments.total_ns)

    assert program.transfers.ns.tolist() == [5, 5, 5, 5]
    assert program.step_times().tolist() == [60]
    assert program.times(slow)[program.last_node[:, 0]].tolist() == [155, 80]


def test_a_stall_on_something_unknown_keeps_its_length() -> None:
    unknown = collective("all_reduce", WORLD, 0, 0, 0, id=99)
    rows = [span("step", 0, 60), stall(unknown, 10, 25)]

    assert program_of({0: rows, 1: rows}).step_times().tolist() == [60]


def test_the_time_of_a_segment_is_divided_by_where_it_went() -> None:
    program = program_of(
        {0: [span("step", 0, 100), span("forward", 0, 60), span("data", 5, 15), span("gc", 10, 20), span("gc", 70, 75)]}
    )
    segments = program.segments

    assert segments.total_ns.tolist() == [60, 40]
    assert segments.gc_ns.tolist() == [10, 5]
    assert segments.data_ns.tolist() == [10, 0]
    assert segments.work_ns.tolist() == [40, 35]


def test_ranks_without_a_common_step() -> None:
    with pytest.raises(ReplayError, match="No step was recorded by all ranks"):
        program_of({0: [span("step", 0, 10)], 1: [span("forward", 0, 10)]})


def test_steps_in_another_order_than_their_numbers() -> None:
    """A second epoch that counts from 0 again and is cut short: its steps take the place of those of the first."""
    rows = [span("step", 10 * at, 10 * at + 10, step=step) for at, step in enumerate([0, 1, 2, 0, 1])]
    with pytest.raises(ReplayError, match="not recorded in the order of their numbers"):
        program_of({0: rows, 1: rows})
