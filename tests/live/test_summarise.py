"""A step of one rank in numbers, each of them computed by hand; rows go through the collector as in a training job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import commtrace.live.collector as collector_module
from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.live.collector import StepCollector
from commtrace.live.rank import LiveRank
from commtrace.live.summary import GroupSummary, MessageSummary, OperationSummary, StepSummary, trace_id
from commtrace.trace import schema
from commtrace.trace.metadata import Group
from commtrace.trace.schema import Row
from tests.factory import group
from tests.live.listeners import Listener, group_mark
from tests.trace.rows import mark, metadata, row

DP = group("dp", 0, 1, 2, 3)
PP = group("pp", 0, 1, ordinal=1)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def collector(listener: Listener) -> StepCollector:
    live = StepCollector(LiveRank(metadata(), Path("run")), [listener], thread_ns=lambda: 0)
    live.write([group_mark(DP), group_mark(PP)])
    return live


def step(number: int, start: int, end: int) -> Row:
    return row(kind=schema.STEP, name="step", step=number, start=start, end=end)


def all_reduce(number: int, start: int, end: int, **columns: Any) -> Row:
    return row(
        kind=schema.COLLECTIVE, name="all_reduce", lane=schema.COMMUNICATION, step=0, start=start, end=end,
        group=DP.id, seq=number, op_in_seq=0, bytes=4_000, id=number, **columns,
    )  # fmt: skip


def stall(on: int, start: int, end: int, where: Group = DP, name: str = "all_reduce", **columns: Any) -> Row:
    columns = {"step": 0, "seq": on, "op_in_seq": 0, **columns}
    return row(kind=schema.STALL, name=name, start=start, end=end, group=where.id, stalled_on=on, **columns)


def test_a_step_is_partitioned_and_its_communication_added_up(collector: StepCollector, listener: Listener) -> None:
    collector.write(
        [
            row(step=0, start=0, end=400),
            row(kind=schema.BACKWARD, name="backward", step=0, start=400, end=800),
            all_reduce(1, 500, 700),
            stall(1, 650, 700),
            all_reduce(2, 800, 900),
            stall(2, 800, 900),
            row(kind=schema.P2P, name="recv", lane=schema.COMMUNICATION, step=0, start=100, end=130, group=PP.id,
                seq=1, op_in_seq=0, bytes=10, id=3, peer=1),
            stall(3, 110, 130, PP, "recv", peer=1),
            row(kind=schema.OPTIMIZER, name="optimizer", step=0, start=900, end=960),
            row(kind=schema.GC, name="generation 2", lane=schema.HOST, step=0, start=950, end=955),
            step(0, 0, 1000),
        ]
    )  # fmt: skip
    assert listener.summaries == []
    collector.write([])

    assert listener.summaries == [
        StepSummary(
            run_id="r1",
            rank=0,
            step=0,
            start_ns=0,
            duration_ns=1000,
            compute_ns={
                "forward": 380, "backward": 350, "recompute": 0, "optimizer": 55, "evaluation": 0, "other": 0,
            },
            exposed_ns={"dp": 150},
            bubble_ns=20,
            gc_ns=5,
            other_ns=40,
            operations=(
                # 4 members: each call moves 4000 · 2 · 3/4 bytes on the bus, in 200 and in 100 ns.
                OperationSummary("all_reduce", "dp", 2, 8_000, 300, 150, 150, 12_000.0, 300),
                OperationSummary("recv", "pp", 1, 10, 30, 20, 10, 10.0, 30),
            ),
            messages=(
                MessageSummary("all_reduce", "unknown", "64KiB", 2, 300, 12_000.0),
                MessageSummary("recv", "unknown", "64KiB", 1, 30, 10.0),
            ),
            collectives=(GroupSummary(DP.id, 0, "all_reduce", "dp", 4, 1, 200, 50, 8_000),),
            spans=11,
        )
    ]  # fmt: skip
    summary = listener.summaries[0]
    assert summary.work_ns == 1000 - 150 - 20
    assert summary.operations[0].overlap_ratio == 0.5
    assert summary.operations[0].busbw_bytes_per_second == 12_000 / 300e-9
    assert summary.operations[1].exposed_ns == 0


def receive(number: int, peer: int) -> Row:
    at, own_id = 50 * number, 10 + number
    return row(
        kind=schema.P2P, name="recv", step=0, start=at, end=at + 40, group=PP.id, seq=number, peer=peer, bytes=10,
        id=own_id, lane=schema.COMMUNICATION,
    )  # fmt: skip


def test_messages_are_told_apart_by_size_and_by_whether_they_leave_the_node(
    collector: StepCollector, listener: Listener
) -> None:
    # Rank 0 of a node with two ranks: DP has ranks 0 to 3, PP has 0 and 1.
    collector.write([mark("topology", {"ranks_per_node": 2})])
    collector.write(
        [
            all_reduce(1, 0, 100),
            all_reduce(2, 100, 300)._replace(bytes=2**20),
            all_reduce(3, 300, 700)._replace(bytes=2**20 + 1),
            all_reduce(4, 700, 800)._replace(bytes=2**28 + 1),
            *(receive(at, peer) for at, peer in ((1, 1), (2, 2))),
            step(0, 0, 1000),
        ]
    )  # fmt: skip
    collector.write([])

    ((summary),) = listener.summaries
    assert summary.messages == (
        MessageSummary("all_reduce", "between", "16MiB", 1, 400, (2**20 + 1) * 1.5),
        MessageSummary("all_reduce", "between", "1MiB", 1, 200, 2**20 * 1.5),
        MessageSummary("all_reduce", "between", "64KiB", 1, 100, 6_000.0),
        MessageSummary("all_reduce", "between", "larger", 1, 100, (2**28 + 1) * 1.5),
        MessageSummary("recv", "between", "64KiB", 1, 40, 10.0),
        MessageSummary("recv", "within", "64KiB", 1, 40, 10.0),
    )


def test_calls_of_one_bracket_are_one_message_in_its_place(collector: StepCollector, listener: Listener) -> None:
    collector.write([mark("topology", {"ranks_per_node": 2})])
    collector.write(
        [
            all_reduce(1, 0, 100),
            all_reduce(1, 0, 100)._replace(op_in_seq=1, id=2),
            receive(1, 1),
            step(0, 0, 1000),
        ]
    )
    collector.write([])

    ((summary),) = listener.summaries
    assert summary.messages == (
        MessageSummary("all_reduce", "between", "64KiB", 1, 100, 12_000.0),
        MessageSummary("recv", "within", "64KiB", 1, 40, 10.0),
    )


@pytest.mark.parametrize(
    ("ranks_per_node", "ratio"), [(2, 0.4), (4, None), (None, None)], ids=["between", "within", "unknown"]
)
def test_communication_is_a_share_of_the_baseline_where_its_kind_and_size_were_measured(
    ranks_per_node: int | None, ratio: float | None, listener: Listener
) -> None:
    # Measured were 4 ranks on two nodes.
    measured = Measurement(
        "all_reduce", (0, 1, 2, 3), ("a", "b"), 4_000, "float32", 20, MeasuredSpread(60.0, 50.0, 70.0)
    )
    rank = LiveRank(metadata(), Path("run"), baseline=NetworkBaseline({}, (measured,)))
    collector = StepCollector(rank, [listener], thread_ns=lambda: 0)
    collector.write([group_mark(DP), group_mark(PP)])
    if ranks_per_node is not None:
        collector.write([mark("topology", {"ranks_per_node": ranks_per_node})])
    collector.write(
        [
            all_reduce(1, 0, 200),
            all_reduce(2, 200, 300),
            all_reduce(3, 300, 700)._replace(bytes=2**20),  # far from what was measured
            all_reduce(4, 700, 800)._replace(bytes=-1),
            receive(1, 1),
            step(0, 0, 1000),
        ]
    )
    collector.write([])

    ((summary),) = listener.summaries
    all_reduces, received = summary.operations
    assert all_reduces.count == 4
    assert all_reduces.baseline_ratio == pytest.approx(ratio)
    assert (received.count, received.baseline_ratio) == (1, None)


@pytest.mark.parametrize(("role", "ratio"), [("pp", None), ("cp", 0.5)])
def test_messages_between_stages_have_no_share_as_their_time_in_flight_holds_the_bubble(
    role: str, ratio: float | None, listener: Listener
) -> None:
    measured = Measurement("send", (0, 1), ("a",), 10, "float32", 20, MeasuredSpread(20.0, 20.0, 20.0))
    rank = LiveRank(metadata(), Path("run"), baseline=NetworkBaseline({}, (measured,)))
    collector = StepCollector(rank, [listener], thread_ns=lambda: 0)
    collector.write([group_mark(structs.replace(PP, role=role)), mark("topology", {"ranks_per_node": 2})])
    sent = receive(2, 1)._replace(name="send")
    collector.write([receive(1, 1), sent, step(0, 0, 1000)])
    collector.write([])

    ((summary),) = listener.summaries
    assert [one.operation for one in summary.operations] == ["recv", "send"]
    assert [one.baseline_ratio for one in summary.operations] == [pytest.approx(ratio)] * 2


def test_a_communication_that_ends_late_is_counted_once_in_the_next_step(
    collector: StepCollector, listener: Listener
) -> None:
    collector.write([row(step=0, start=0, end=900), step(0, 0, 1000)])
    collector.write([row(step=1, start=1000, end=1900)])
    collector.write([all_reduce(1, 800, 1200), step(1, 1000, 2000)])
    collector.write([])

    assert [[one.count for one in summary.operations] for summary in listener.summaries] == [[], [1]]
    assert [summary.spans for summary in listener.summaries] == [2, 3]


def test_a_communication_known_one_pass_after_its_step_belongs_to_it(
    collector: StepCollector, listener: Listener
) -> None:
    collector.write([step(0, 0, 1000)])
    collector.write([all_reduce(1, 800, 1200)])

    assert [summary.operations[0].count for summary in listener.summaries] == [1]


def test_a_row_that_reaches_into_the_next_step_is_a_part_of_both_and_handed_out_once(
    collector: StepCollector, listener: Listener
) -> None:
    saving = row(kind=schema.CHECKPOINT, name="checkpoint", lane=schema.HOST, step=0, start=900, end=1300)
    collector.write([saving, step(0, 0, 1000), step(1, 1000, 2000)])
    collector.write([])
    collector.write([step(2, 2000, 3000)])
    collector.write([])

    assert [summary.checkpoint_ns for summary in listener.summaries] == [100, 300, 0]
    assert [rows.count(saving) for rows in listener.rows] == [1, 0, 0]


def test_every_row_of_steps_of_one_pass_goes_to_its_own_step(collector: StepCollector, listener: Listener) -> None:
    rows = []
    for number in range(5):
        begin = 100 * number
        rows += [row(step=number, start=begin, end=begin + 10 * number), step(number, begin, begin + 100)]
    collector.write(rows)
    collector.write([])

    assert [summary.step for summary in listener.summaries] == [0, 1, 2, 3, 4]
    assert [summary.compute_ns["forward"] for summary in listener.summaries] == [0, 10, 20, 30, 40]
    assert [list(handed) for handed in listener.rows] == [rows[2 * number : 2 * number + 2] for number in range(5)]


def test_a_number_that_is_used_again_is_a_step_of_its_own(collector: StepCollector, listener: Listener) -> None:
    collector.write([step(0, 0, 100), row(step=0, start=120, end=150), step(0, 100, 200)])
    collector.write([])

    assert [summary.compute_ns["forward"] for summary in listener.summaries] == [0, 30]


def test_the_last_step_is_told_when_the_recording_ends(collector: StepCollector, listener: Listener) -> None:
    collector.write([step(0, 0, 100)])
    collector.close()

    assert [summary.step for summary in listener.summaries] == [0]
    assert listener.closed == 1


def test_counts_of_the_script_are_added_up(collector: StepCollector, listener: Listener) -> None:
    counts = [{"tokens": 10.0}, {"tokens": 5.0, "samples": 1.0}]
    told_of_step = [
        row(kind=schema.MARK, name="count", step=0, start=50, end=50, detail=json.dumps(count)) for count in counts
    ]
    collector.write([*told_of_step, step(0, 0, 100)])
    collector.write([])

    assert listener.summaries[0].counts == {"tokens": 15.0, "samples": 1.0}
    assert listener.summaries[0].spans == 1


def test_drops_and_overhead_are_those_since_the_last_step() -> None:
    listener, dropped, cpu_ns = Listener(), {"stall": 3}, [0]
    live = StepCollector(
        LiveRank(metadata(), Path("run")), [listener], dropped=lambda: dropped, thread_ns=lambda: cpu_ns[0]
    )
    for number in range(3):
        cpu_ns[0] += 500
        live.write([step(number, number, number + 1)])
        dropped["stall"] += number
    live.close()

    assert [summary.overhead_ns for summary in listener.summaries] == [1000, 500, 0]
    assert [summary.dropped for summary in listener.summaries] == [{"stall": 3}, {"stall": 1}, {"stall": 2}]
    assert live.rank.dropped == {"stall": 6}


def test_a_listener_that_fails_is_switched_off_and_the_others_go_on(
    collector: StepCollector, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Listener()
    broken.error = ConnectionError("gone")
    live = StepCollector(LiveRank(metadata(), Path("run")), [broken, listener])
    for number in range(4):
        live.write([step(number, number, number + 1)])
    live.close()

    assert len(listener.summaries) == 4
    assert (broken.closed, listener.closed) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "commtrace: Listener failed and is switched off; training and the trace go on"
    ]


def test_a_job_without_steps_does_not_make_memory_grow(
    collector: StepCollector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "MOST_ROWS", 100)
    for number in range(30):
        collector.write([row(step=-1, start=number, end=number + 1)] * 10)

    assert len(collector._pending) == 100
    assert len(caplog.records) == 1
    assert "with commtrace.step(i):" in caplog.text


def test_rows_that_make_no_sense_switch_the_live_view_off_and_nothing_else(
    collector: StepCollector, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    nonsense: Any = ("nonsense",)
    collector.write([step(0, 0, 1), nonsense])
    collector.write([step(1, 1, 2)])
    collector.close()

    assert listener.summaries == []
    assert listener.closed == 1
    assert "live metrics are off" in caplog.text


def test_all_ranks_find_the_same_trace_id() -> None:
    import hashlib

    digest = hashlib.sha256(b"gpt/17").hexdigest()
    assert f"{trace_id('gpt', 17):032x}" == digest[:32]


def test_bounds_have_no_bandwidth(collector: StepCollector, listener: Listener) -> None:
    collector.write(
        [
            all_reduce(1, 0, 200),
            all_reduce(2, 200, 900, end_exact=False),
            all_reduce(3, 300, 900, start_exact=False),
            step(0, 0, 1000),
        ]
    )
    collector.write([])

    (summary,) = listener.summaries
    (operation,) = summary.operations
    assert (operation.count, operation.bus_bytes, operation.bus_ns) == (3, 6_000.0, 200)
    assert operation.duration_ns == 1_500
    assert summary.messages == (MessageSummary("all_reduce", "unknown", "64KiB", 1, 200, 6_000.0),)


def test_time_in_which_the_device_waited_for_its_host_is_known_from_leads(
    collector: StepCollector, listener: Listener
) -> None:
    ms = 1_000_000
    late, ahead = {"start_lead_us": 3, "end_lead_us": 4}, {"start_lead_us": 4, "end_lead_us": 9_000}
    collector.write(
        [
            row(step=0, start=0, end=10 * ms, **late),
            row(kind=schema.BACKWARD, name="backward", step=0, start=10 * ms, end=30 * ms, **ahead),
            step(0, 0, 30 * ms),
            row(step=1, start=30 * ms, end=40 * ms),
            step(1, 30 * ms, 40 * ms),
        ]
    )
    collector.write([])

    first, second = listener.summaries
    assert first.launch_bound_ns == {
        **dict.fromkeys(("in_no_span", "backward", "recompute", "optimizer", "evaluation", "other"), 0),
        "forward": 10 * ms,
    }
    assert second.launch_bound_ns is not None  # its first mark ends the step before
    collector.write([row(step=2, start=50 * ms, end=60 * ms), step(2, 50 * ms, 60 * ms)])
    collector.write([])
    assert listener.summaries[2].launch_bound_ns is None
