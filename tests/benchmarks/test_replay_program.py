"""What each rank of a replay does, from a run whose every time is known."""

from __future__ import annotations

import pytest

from commtrace.analysis.chain import analyse
from commtrace.benchmarks.replay import _batches
from commtrace.benchmarks.replay_program import CallEvent, ReplayedCall, programs_of
from commtrace.errors import ConfigurationError
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.pipeline_factory import PipelineJob

DP, PP, ALONE = group("dp", 0, 1), group("pp", 0, 1, ordinal=1), group("tp", 0, ordinal=2)


def rank_0(step: int) -> list[Row]:
    begin, at = 100 * step, {"step": step, "id": 10 * step}
    reduced = collective("all_reduce", DP, step, begin + 10, begin + 30, bytes=64, **at)
    sent = p2p("send", PP, 1, step, begin + 40, begin + 60, is_async=True, **at | {"id": 10 * step + 1})
    alone = collective("all_reduce", ALONE, step, begin + 80, begin + 81, step=step, id=10 * step + 2)
    return [
        span("step", begin, begin + 100, step=step),
        reduced,
        stall(reduced, begin + 10, begin + 30),
        sent,
        stall(sent, begin + 55, begin + 60),
        alone,
    ]


def rank_1(step: int) -> list[Row]:
    begin = 100 * step
    reduced = collective("all_reduce", DP, step, begin + 20, begin + 30, bytes=64, step=step, id=10 * step)
    received = p2p("recv", PP, 0, step, begin + 50, begin + 60, step=step, id=10 * step + 1)
    return [span("step", begin, begin + 100, step=step), reduced, received]


def test_calls_waits_and_gaps() -> None:
    run = make_run(
        {rank: [row for step in range(4) for row in make(step)] for rank, make in enumerate((rank_0, rank_1))},
        [DP, PP, ALONE],
    )

    programs = programs_of(analyse(run), 2)

    first, second = programs.ranks
    assert first.calls[:2] == (
        ReplayedCall("all_reduce", "dp", (0, 1), 64, "float32", -1, False),
        ReplayedCall("send", "pp", (0, 1), 1024, "float32", 1, True),
    )
    assert [step.number for step in first.steps] == [1, 2]
    assert first.steps[0].events == (CallEvent(10, 0, False, 20), CallEvent(10, 1, False, 0), CallEvent(15, 1, True, 5))
    assert (first.steps[0].rest_ns, first.steps[0].recorded_ns) == (40, 100)
    assert second.steps[1].events == (CallEvent(20, 2, False, 10), CallEvent(20, 3, False, 10))
    assert programs.groups == ((0, 1),)
    assert programs.notes == ("2 calls are left out: their group has one rank.",)


def test_a_call_without_its_partner_is_left_out() -> None:
    rows = {
        0: [row for step in range(4) for row in rank_0(step)],
        1: [row for step in range(4) for row in rank_1(step)],
    }
    rows[1] = [row for row in rows[1] if not (row["kind"] == "p2p" and row["step"] == 1)]

    programs = programs_of(analyse(make_run(rows, [DP, PP, ALONE])), 2)

    assert "1 calls are left out: not all members made them in these steps." in programs.notes
    assert [call.operation for call in programs.ranks[0].calls] == ["all_reduce", "all_reduce", "send"]


def test_every_message_of_a_pipeline_has_two_ends() -> None:
    programs = programs_of(analyse(PipelineJob(stages=4, microbatches=6, transfer_ns=1000, steps=3).run()), 10)

    calls = [call.operation for program in programs.ranks for call in program.calls]
    assert calls.count("send") == calls.count("recv") == 2 * 2 * 3 * 6
    for program in programs.ranks:
        for step in program.steps:
            waited = sum(event.gap_ns + event.recorded_ns for event in step.events)
            assert waited + step.rest_ns == step.recorded_ns


def test_messages_right_behind_one_another_are_one_batch() -> None:
    calls = [ReplayedCall("send", "pp", (0, 1), 8, "", 1, True), ReplayedCall("recv", "pp", (0, 1), 8, "", 1, True)]
    send, recv, wait = CallEvent(5, 0, False, 0), CallEvent(7, 1, False, 0), CallEvent(9, 1, True, 4)

    assert list(_batches([send, recv, wait], calls)) == [[send, recv], [wait]]
    later = recv._replace(gap_ns=10_000_000)
    assert list(_batches([send, later, wait], calls)) == [[send], [later], [wait]]


def test_a_run_without_all_ranks_cannot_be_replayed() -> None:
    rows = [row for step in range(3) for row in rank_0(step)]

    with pytest.raises(ConfigurationError, match="a replay needs all 2 ranks, and 1 are missing, rank 1 first"):
        programs_of(analyse(make_run({0: rows}, [DP, PP, ALONE], world_size=2)), 2)


def test_a_run_in_which_nothing_was_sent_cannot_be_replayed() -> None:
    rows = [span("step", 100 * step, 100 * step + 100, step=step) for step in range(3)]

    with pytest.raises(ConfigurationError, match="nothing was sent between ranks"):
        programs_of(analyse(make_run({0: rows})), 2)
