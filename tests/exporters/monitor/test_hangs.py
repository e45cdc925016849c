"""What ranks say of themselves when training has stopped, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from commtrace.exporters.monitor import hangs
from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.hangs import HangAggregator, _Groups, hang_finding, hang_report, trace_of
from commtrace.exporters.monitor.messages import (
    MOST_BYTES,
    MessageError,
    RankHang,
    Report,
    WatchedJob,
    WireProcess,
    encoded,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.findings.finding import Finding
from commtrace.findings.status import LiveEvent
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.wire_types import RankRange, WireGroup
from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.run import RankTrace
from tests.factory import group, metadata

SECOND = 1_000_000_000
MS = 1_000_000
DP = group("dp", 0, 1, 2, 3)


def report(rank: int, *, waits_at: int | None, launched: int, at: str = "train.py:7 step") -> dict[str, Any]:
    """A rank that has launched so many all_reduces, and waits for one of them or for none."""
    in_flight = [] if waits_at is None else [
        {"operation": "all_reduce", "group": DP.id, "seq": waits_at, "peer": -1, "bytes": 4, "dtype": "float32",
         "is_async": False, "start": 10 * SECOND, "blocking": True}
    ]  # fmt: skip
    return {
        "time": 1_700_000_060.0,
        "monotonic_ns": 60 * SECOND,
        "no_progress_ns": 60 * SECOND,
        "metadata": fields_to_json(metadata(rank, world_size=4, node=f"node{rank}")),
        "groups": [DP.to_json()],
        "topology": {"coordinates": {"dp": rank}},
        "activity": {
            "at": [17, -1, -1, -1], "open": [], "collectives": {str(DP.id): launched}, "p2p": [], "frames": [at],
        },
        "in_flight": in_flight,
        "threads": [{"thread": "MainThread", "frames": [at] * 40}],
    }  # fmt: skip


def hung(ranks: Sequence[int] = (0, 1, 2, 3)) -> list[dict[str, Any]]:
    """Rank 2 has not come to all_reduce 5."""
    return [
        report(rank, waits_at=None if rank == 2 else 5, launched=5 if rank == 2 else 6, at=f"train.py:{rank} f")
        for rank in ranks
    ]


JOB = WatchedJob("run", 0, 4, 4.0)
STOPPED_AT = 1_700_000_000.0
"""A window ends with it; ranks notice 60 s later."""


def traces(reports: Sequence[dict[str, Any]]) -> list[RankTrace]:
    groups = _Groups(4)
    return [trace_of(hang_report(record), JOB, groups) for record in reports]


def test_the_rank_that_did_not_arrive_is_named_with_the_place_where_it_is() -> None:
    finding = hang_finding(traces(hung()), 4, now=1.0)
    assert (finding.id, finding.kind, finding.ranks, finding.host) == ("hang", "hang", (2,), "node2")
    assert "4 of 4 ranks report it" in finding.evidence
    assert "Hung at seq 5 of the dp group" in finding.evidence
    assert "Root: rank 2" in finding.evidence
    assert "train.py:2 f" in finding.evidence


def test_a_rank_that_says_nothing_is_the_suspect() -> None:
    finding = hang_finding(traces(hung([0, 1, 3])), 4, now=1.0)
    assert finding.ranks == (2,)
    assert "Rank 2 never reported: not started, or cut off." in finding.evidence
    assert "Nothing is known of rank 2, which sent no report of a hang." in finding.evidence
    assert "left no files" not in finding.evidence


def test_open_phases_are_named() -> None:
    record = hung()
    record[2]["activity"]["open"] = [{"kind": "forward", "name": "forward", "since": 5}]
    assert "inside forward" in hang_finding(traces(record), 4, now=1.0).evidence


def test_a_report_is_sent_without_the_stacks_of_its_threads_and_the_environment() -> None:
    record = report(0, waits_at=5, launched=6)
    record["metadata"]["environment"] = {"NCCL_DEBUG_FILE": "a-secret"}
    record["threads"][0]["frames"] = ["secret.py:1 f"]
    sent = encoded(RankHang(JOB, 0, True, hang_report(record)))
    assert b"secret" not in sent
    (trace,) = traces([record])
    assert trace.in_flight == tuple(InFlight(**one) for one in record["in_flight"])
    assert (trace.activity, trace.no_progress_ns) == (msgspec.convert(record["activity"], Activity), 60 * SECOND)
    assert (trace.groups, trace.coordinates) == ({DP.id: DP}, {"dp": 0})


@pytest.mark.parametrize("ranks", [[], [3], [3, 2], [0, 1, 2, 3], [1, 3], [0, 1, 3], [2, 0, 1]])
def test_members_of_any_group_survive_it(ranks: list[int]) -> None:
    record = report(0, waits_at=5, launched=6)
    record["groups"][0]["ranks"] = ranks
    (trace,) = traces([record])
    assert trace.groups[DP.id].ranks == tuple(ranks)


def test_a_report_stays_small_and_members_are_kept_once_in_a_job_of_many_ranks() -> None:
    record = report(0, waits_at=5, launched=6)
    record["groups"][0]["ranks"] = list(range(0, 80_000, 8))
    sent, job, groups = hang_report(record), WatchedJob("run", 0, 80_000, 4.0), _Groups(80_000)
    assert len(encoded(RankHang(job, 0, True, sent))) < 1_500
    first, second = (trace_of(sent, job, groups).groups[DP.id].ranks for _ in range(2))
    assert first is second
    assert len(first) == 10_000


def test_a_report_that_would_be_too_long_is_sent_without_its_groups() -> None:
    record = report(0, waits_at=5, launched=6)
    record["groups"] = [{**record["groups"][0], "id": number, "ranks": [0, 1, 3] * 100} for number in range(600)]
    sent = hang_report(record)
    assert len(encoded(RankHang(JOB, 0, True, sent))) < MOST_BYTES
    assert (sent.groups, sent.activity.collectives) == ((), {})
    assert (len(sent.in_flight), sent.activity.frames) == (1, ("train.py:7 step",))


def test_paths_may_hold_any_bytes() -> None:
    record = report(0, waits_at=None, launched=6, at="/data/\udcff\nx/train.py:7 step")
    assert hang_report(record).activity.frames == ("/data/\\udcff\nx/train.py:7 step",)


def test_groups_of_ranks_that_the_job_does_not_have_are_refused() -> None:
    groups = _Groups(4)
    for ranks, members in ((RankRange(0, 5, 1), ()), (RankRange(4, 5, 1), ()), (None, (0, 9))):
        with pytest.raises(MessageError, match="does not have"):
            groups.group(WireGroup(1, ranks, members, 0, "dp"))
    for length in range(1, 90):
        groups.group(WireGroup(1, None, (0,) * length, 0, "dp"))
    with pytest.raises(MessageError, match="does not have"):
        groups.group(WireGroup(1, None, (0,) * 400, 0, "dp"))


class Ranks:
    """Ranks of a job of four that tell a store of a hang."""

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.stacks: dict[tuple[int, int], tuple[str, ...]] = {}
        self.store = MonitorStore(JOB)
        self.hangs = HangAggregator(
            JOB,
            lambda metadata: self.processes.get(metadata.rank),
            lambda rank, session: self.stacks.get((rank, session), ()),
        )

    def say(self, reports: Sequence[dict[str, Any]]) -> None:
        for record in reports:
            rank = record["metadata"]["rank"]
            assert self.store.answer(RankHang(JOB, rank, True, hang_report(record))).refused == ""

    def go_on(self) -> None:
        for rank in range(4):
            self.store.answer(RankHang(JOB, rank, False))

    def report(
        self,
        rank: int,
        at: float,
        *,
        phase: str = "",
        ended: bool = False,
        exception: str = "",
        age: float = 0.0,
        last_step: int = 99,
    ) -> None:
        """Its newest window ended so many seconds after training had stopped, and ``age`` after its last step."""
        window = WindowReport(
            rank, f"node{rank}", 0, int((STOPPED_AT + at) // 4), last_step=last_step, age_ns=round(age * 1e9),
            phase=phase, ended=ended, exception=exception,
        )  # fmt: skip
        process = WireProcess(f"node{rank}", "boot", 100 + rank, 5)
        assert self.store.answer(Report(JOB, window, process=process)).refused == ""

    def look(self, after: float, step_ns: int = 0) -> list[LiveEvent]:
        """So many seconds after training had stopped."""
        return self.hangs.look(self.store, STOPPED_AT + after, step_ns)

    def finding(self) -> Finding | None:
        return self.hangs.finding

    def report_steps(self, last_steps: Sequence[int], at: float, age: float, **window: Any) -> None:
        """Their newest windows, that closed so many seconds after training had stopped, and the age of their step."""
        for rank, last in enumerate(last_steps):
            number, age_ns = int((STOPPED_AT + at) // 4), round(age * 1e9)
            told = WindowReport(rank, f"node{rank}", 0, number, last_step=last, age_ns=age_ns, **window)
            assert self.store.answer(Report(JOB, told)).refused == ""


def test_it_is_told_when_all_have_spoken_or_after_two_looks() -> None:
    ranks = Ranks()
    assert ranks.look(60) == []
    ranks.say(hung([0, 1]))
    assert ranks.look(61) == []
    assert ranks.look(62) == []
    (event,) = ranks.look(63)
    assert "2 of 4 ranks report it" in event.sentence
    assert ranks.look(90) == []
    ranks.say(hung())
    (event,) = ranks.look(91)
    assert "4 of 4 ranks report it" in event.sentence


def test_nobody_is_called_silent_before_its_window_has_ended() -> None:
    job = WatchedJob("run", 0, 4, 60.0)
    store, hangs = MonitorStore(job), HangAggregator(job, lambda metadata: None)
    for record in hung([0, 1, 3]):
        store.answer(
            RankHang(job, record["metadata"]["rank"], True, hang_report({**record, "no_progress_ns": 5 * SECOND}))
        )
    assert [hangs.look(store, STOPPED_AT + after) for after in range(60, 116)] == [[]] * 56
    assert len(hangs.look(store, STOPPED_AT + 117)) == 1


def test_ranks_that_wait_for_one_that_saves_do_not_hang_until_it_does() -> None:
    ranks = Ranks()
    ranks.say(hung([0, 1, 3]))
    for after in range(60, 300, 4):
        ranks.report(2, after, phase="checkpoint")
        assert ranks.look(after) == []
    ranks.say(hung())
    (event,) = ranks.look(304)
    assert event.finding.rank == 2


def test_one_that_saved_and_is_heard_of_no_more_does_not_excuse_the_others() -> None:
    ranks = Ranks()
    ranks.report(2, 0, phase="checkpoint")
    ranks.say(hung([0, 1, 3]))
    ranks.look(60)
    assert [event.finding.rank for event in ranks.look(62)] == [2]


def test_a_rank_that_goes_on_is_not_said_to_be_dead() -> None:
    """Rank 2 reports windows: it is busy with something that launches no communication that others wait for."""
    ranks = Ranks()
    ranks.say(hung([0, 1, 3]))
    ranks.report(2, 60)
    assert ranks.look(60) == []
    (event,) = ranks.look(62)
    assert "Rank 2 still makes progress." in event.sentence
    assert "sign of life" not in event.sentence
    assert event.finding.rank == 2


def test_a_rank_that_left_its_stack_is_reported_with_its_place() -> None:
    ranks = Ranks()
    ranks.processes, ranks.stacks = {2: "runs"}, {(2, 5): ("/job/train.py:12 main",)}
    ranks.report(2, -4)
    ranks.say(hung([0, 1, 3]))
    assert ranks.look(60) == []
    (event,) = ranks.look(62)
    assert "run: code in C keeps its lock, at /job/train.py:12 main; py-spy dump --native --pid 102 " in event.sentence


def test_a_rank_that_leaves_its_stack_later_is_told_of_again() -> None:
    ranks = Ranks()
    ranks.processes = {2: "runs"}
    ranks.report(2, -4)
    ranks.say(hung([0, 1, 3]))
    assert ranks.look(60) == []
    (event,) = ranks.look(62)
    assert "train.py:12" not in event.sentence
    assert ranks.look(63) == []
    ranks.stacks = {(2, 5): ("/job/train.py:12 main",)}
    (event,) = ranks.look(64)
    assert "keeps its lock, at /job/train.py:12 main; " in event.sentence
    assert ranks.look(66) == []


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (
            "suspended",
            "process 102 on node2 is suspended, by SIGSTOP or a debugger; kill -CONT 102 lets it go on.",
        ),
        (
            "runs",
            "process 102 on node2 lives and lets no other thread of Python run; py-spy dump --native --pid 102 shows "
            "where.",
        ),
        ("gone", "process 102 on node2 is gone."),
        (None, "dead, suspended, or in code that lets no thread run; look for process 102 on node2."),
    ],
)
def test_a_silent_rank_is_told_in_the_words_of_the_doctor(process: str | None, why: str) -> None:
    ranks = Ranks()
    ranks.processes = {2: process} if process else {}
    ranks.report(2, -4)
    ranks.say(hung([0, 1, 3]))
    assert ranks.look(60) == []
    (event,) = ranks.look(62)
    silence = f"Rank 2 gave its last sign of life 64 s before the others: {why}"
    assert (event.finding.rank, event.finding.host) == (2, "node2")
    assert event.sentence == (
        "Training has stopped: 3 of 4 ranks report it. The job hangs: 1 communication is held up by rank 2. "
        f"Hung at seq 5 of the dp group of ranks 0–3. Arrived: ranks 0–1, 3 in all_reduce, waiting for 50 s. "
        "Not known to have arrived: rank 2, see below. Root: rank 2, which holds up 3 ranks. "
        f"{silence} At the end of the last window that it reported: step 99."
    )


def test_a_hang_outside_of_communication_says_where_the_ranks_are() -> None:
    reports = [report(rank, waits_at=None, launched=5, at=f"train.py:{7 + (rank == 3)} validate") for rank in range(4)]
    finding = hang_finding(traces(reports), 4, now=1.0)
    assert finding.evidence == (
        "Training has stopped: 4 of 4 ranks report it. Ranks 0–2 in no communication, at train.py:7 validate. "
        "Rank 3 in no communication, at train.py:8 validate."
    )


def test_a_rank_that_works_on_when_the_others_have_ended_does_not_hang_unless_it_waits_for_them() -> None:
    ranks = Ranks()
    for rank in (1, 2, 3):
        ranks.report(rank, 0, ended=True)
    ranks.say([report(0, waits_at=None, launched=6)])
    assert [ranks.look(after) for after in range(60, 160, 5)] == [[]] * 20
    ranks.say([report(0, waits_at=5, launched=6)])
    (event,) = ranks.look(160)
    assert "1 of 4 ranks report it. " in event.sentence
    assert "Ranks 1–3 ended cleanly. Hung at seq 5 of the dp group" in event.sentence
    assert "No word" not in event.sentence


def test_ranks_that_ended_with_an_exception_did_not_end_in_order() -> None:
    ranks = Ranks()
    ranks.report(1, 0, ended=True)
    ranks.report(2, 0, ended=True, exception="ValueError")
    ranks.report(3, 0, ended=True, exception="ValueError")
    ranks.say([report(0, waits_at=5, launched=6)])
    assert ranks.look(60) == []
    (event,) = ranks.look(70)
    assert "Rank 1 ended cleanly. Ranks 2–3 ended with an uncaught exception, ValueError. Hung at" in event.sentence
    assert "Rank 2 ended with an uncaught ValueError and will not arrive. " in event.sentence
    assert "Nothing is known" not in event.sentence


def test_a_rank_that_stands_still_after_another_one_has_raised_is_told_even_outside_of_a_communication() -> None:
    ranks = Ranks()
    for rank in (1, 2, 3):
        ranks.report(rank, 0, ended=True, exception="OutOfMemoryError" if rank == 3 else "")
    ranks.say([report(0, waits_at=None, launched=6)])
    assert ranks.look(60) == []
    (event,) = ranks.look(70)
    assert "Ranks 1–2 ended cleanly. Rank 3 ended with an uncaught exception, OutOfMemoryError." in event.sentence
    assert event.finding.rank == 3


def test_the_next_hang_is_told_as_well() -> None:
    ranks = Ranks()
    ranks.say(hung())
    assert len(ranks.look(60)) == 1
    finding = ranks.finding()
    assert finding is not None
    assert "Hung at seq 5" in finding.evidence
    ranks.go_on()
    (event,) = ranks.look(70)
    assert (event.kind, event.sentence) == ("recovered", "Training goes on; no rank hangs any more.")
    assert ranks.look(71) == []
    assert ranks.finding() is None
    ranks.say(hung())
    assert len(ranks.look(80)) == 1


def look_often(ranks: Ranks, until: int, step_ns: int, **window: Any) -> list[tuple[int, LiveEvent]]:
    """What is told in each second; the ranks report every four seconds, and none has ended a step since it stopped."""
    told = []
    for after in range(until + 1):
        if after % 4 == 0:
            ranks.report_steps([99, 99, 98, 99], after, after, **window)
        told += [(after, event) for event in ranks.look(after, step_ns)]
    return told


@pytest.mark.parametrize(("step_ns", "after"), [(MS, 16), (1_000 * MS, 16), (2_500 * MS, 26)])
def test_that_no_step_ends_is_told_after_ten_usual_steps_and_15_seconds(step_ns: int, after: int) -> None:
    ranks = Ranks()
    ((told_after, event),) = look_often(ranks, 50, step_ns)

    assert (told_after, event.kind, event.finding) == (after, "found", ranks.finding())
    assert (event.finding.id, event.finding.kind, event.finding.ranks) == ("hang", "hang", (2,))
    assert event.finding.since_ns == round(STOPPED_AT * 1e9)
    usual = {MS: "1 ms", 1_000 * MS: "1.0 s", 2_500 * MS: "2.5 s"}[step_ns]
    assert event.sentence == (
        f"No step has ended for {after} s (a step takes {usual}). The last one is 99; rank 2 ended none after 98. "
        "See where each rank is: commtrace doctor RUN"
    )
    ranks.say(hung())
    (event,) = ranks.look(60)
    assert (event.kind, event.finding.id) == ("changed", "hang")
    assert "4 of 4 ranks report it" in event.sentence
    ranks.go_on()
    ranks.report_steps([100, 100, 100, 100], 64, 0.1)
    assert [event.kind for event in ranks.look(64, step_ns)] == ["recovered"]
    assert ranks.look(65, step_ns) == []


@pytest.mark.parametrize("window", [{"phase": "checkpoint"}, {"phase": "evaluation"}, {"ended": True}])
def test_a_job_that_saves_evaluates_or_ends_makes_progress(window: dict[str, Any]) -> None:
    assert look_often(Ranks(), 50, MS, **window) == []


def test_before_a_usual_step_is_known_nothing_is_said_of_progress() -> None:
    assert look_often(Ranks(), 50, 0) == []


def test_a_job_that_no_longer_reports_is_silent_and_not_without_progress() -> None:
    ranks = Ranks()
    ranks.report_steps([99, 99, 99, 99], 0, 0)
    assert [ranks.look(after, MS) for after in range(60)] == [[]] * 60


def without_progress() -> Ranks:
    """Ranks of which it was told 16 s after their last step that none has ended since."""
    ranks = Ranks()
    ((_, event),) = look_often(ranks, 16, MS)
    assert event.kind == "found"
    return ranks


def test_a_job_without_progress_that_falls_silent_does_not_go_on() -> None:
    ranks = without_progress()
    assert [ranks.look(after, MS) for after in range(17, 120)] == [[]] * 103
    assert ranks.finding() is not None
    ranks.report_steps([100, 100, 99, 100], 120, 0.1)
    assert [event.kind for event in ranks.look(120, MS)] == ["recovered"]


@pytest.mark.parametrize("ended", [(0,), (0, 1, 2, 3)])
def test_ranks_that_end_in_order_after_a_hang_are_no_progress(ended: Sequence[int]) -> None:
    ranks, told = without_progress(), []
    for after in range(17, 80):
        if after % 4 == 0:
            ranks.report_steps([99, 99, 98, 99], after, after)
            for rank in ended:
                ranks.report(rank, after, ended=True, age=after, last_step=98 if rank == 2 else 99)
        told += ranks.look(after, MS)
    assert told == []
    assert ranks.finding() is not None


def test_a_job_that_goes_on_and_ends_at_once_went_on() -> None:
    ranks = without_progress()
    for rank in range(4):
        ranks.report(rank, 20, ended=True, age=0.1, last_step=100)
    assert [event.kind for event in ranks.look(20, MS)] == ["recovered"]


def test_a_step_that_had_ended_before_is_no_progress() -> None:
    """The ranks of a job with quick steps tell of a hang, and no longer do, within the time of a step that is late."""
    ranks = Ranks()
    ranks.report_steps([99] * 4, 4, 4)
    ranks.say([{**record, "time": STOPPED_AT + 5, "no_progress_ns": 5 * SECOND} for record in hung()])
    assert [event.kind for event in ranks.look(6, MS)] == ["found"]
    ranks.go_on()
    ranks.report_steps([99] * 4, 8, 8)
    assert ranks.look(8, MS) == []
    ranks.report_steps([100] * 4, 12, 1)
    assert [event.kind for event in ranks.look(12, MS)] == ["recovered"]


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_a_rank_that_begins_to_save_or_evaluate_goes_on(phase: str) -> None:
    ranks = without_progress()
    ranks.report(1, 20, phase=phase)
    assert [event.kind for event in ranks.look(20, MS)] == ["recovered"]


def test_a_rank_that_hangs_and_falls_silent_does_not_go_on_because_another_one_ends() -> None:
    ranks = Ranks()
    ranks.report_steps([99] * 4, 0, 0)
    ranks.say(hung())
    assert [event.kind for event in ranks.look(60)] == ["found"]
    ranks.go_on()
    ranks.report(0, 64, ended=True, age=64)
    assert [ranks.look(after, MS) for after in range(64, 120)] == [[]] * 56


def test_a_rank_that_cannot_tell_hides_no_other_and_is_not_accused() -> None:
    ranks = Ranks()
    ranks.say(hung([0, 2, 3]))
    ranks.store.answer(RankHang(JOB, 1, True))
    (event,) = ranks.look(61)
    assert (event.finding.rank, event.finding.host) == (2, "node2")
    assert "3 of 4 ranks report it" in event.sentence
    assert "Left out, because it cannot be read: the report of rank 1." in event.sentence
    assert "never reported" not in event.sentence


def test_a_report_of_ranks_that_are_not_there_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    made_up = report(1, waits_at=5, launched=6)
    made_up["groups"][0]["ranks"] = list(range(100_000))
    ranks.say([*hung([0, 2, 3]), made_up])
    (event,) = ranks.look(61)
    assert "Left out, because it cannot be read: the report of rank 1." in event.sentence
    assert caplog.text.count("the hang report of rank 1 is left out") == 1


def test_an_analysis_that_fails_does_not_switch_the_monitor_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, aggregator = Ranks(), Aggregator(JOB, [])
    ranks.say(hung())
    monkeypatch.setattr(hangs, "hang_finding", lambda *_: 1 / 0)
    assert aggregator.look_for_hangs(ranks.store, STOPPED_AT + 61) == []
    assert aggregator.look_for_hangs(ranks.store, STOPPED_AT + 62) == []
    assert caplog.text.count("the monitor no longer reports hangs") == 1
