"""What ranks say of themselves when training has stopped, put together."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from commtrace.exporters.monitor import hangs
from commtrace.exporters.monitor.hangs import HangJoiner, Word, hang_event, packed, unpacked
from commtrace.exporters.monitor.joiner import Joiner
from tests.factory import group, metadata

SECOND = 1_000_000_000
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
        "quiet_ns": 50 * SECOND,
        "metadata": asdict(metadata(rank, world_size=4, node=f"node{rank}")),
        "groups": [{**DP._asdict(), "ranks": list(DP.ranks)}],
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


def test_the_rank_that_did_not_arrive_is_named_with_the_place_where_it_is() -> None:
    event = hang_event(hung(), 4, now=1.0)
    assert (event.kind, event.rank, event.host) == ("hang", 2, "node2")
    assert "4 of 4 ranks say so" in event.sentence
    assert "Hung at seq 5 of the dp group" in event.sentence
    assert "Root: rank 2" in event.sentence
    assert "train.py:2 f" in event.sentence


def test_a_rank_that_says_nothing_is_the_suspect() -> None:
    event = hang_event(hung([0, 1, 3]), 4, now=1.0)
    assert event.rank == 2
    assert "No word from rank 2: dead, or stuck" in event.sentence


def test_a_report_survives_the_store_without_its_stacks() -> None:
    told = report(0, waits_at=5, launched=6)
    again = unpacked(packed(told))
    (own,) = again["groups"]
    assert {**again, "groups": [{**own, "ranks": list(own["ranks"])}]} == {
        name: value for name, value in told.items() if name != "threads"
    }
    with pytest.raises(ValueError, match="not a report"):
        unpacked(b"something else")


@pytest.mark.parametrize("ranks", [[], [7], [3, 2], [0, 1, 2, 3], [1, 9, 17], [0, 1, 3], [5, 5], [4, 0, 8]])
def test_members_of_any_group_survive_it(ranks: list[int]) -> None:
    told = report(0, waits_at=5, launched=6)
    (own,) = unpacked(packed({**told, "groups": [{**told["groups"][0], "ranks": ranks}]}))["groups"]
    assert own["ranks"] == tuple(ranks)


def test_a_report_stays_small_and_members_are_kept_once_in_a_job_of_many_ranks() -> None:
    told = report(0, waits_at=5, launched=6)
    sent = packed({**told, "groups": [{**told["groups"][0], "ranks": list(range(0, 80_000, 8))}]})
    assert len(sent) < 1_000
    first, second = (unpacked(sent)["groups"][0]["ranks"] for _ in range(2))
    assert first is second


class FakeBoard:
    """What ranks have put on it."""

    def __init__(self) -> None:
        self.count = self.reads = 0
        self._reports: dict[int, bytes] = {}

    @property
    def reports(self) -> dict[int, bytes]:
        return self._reports

    @reports.setter
    def reports(self, reports: dict[int, bytes]) -> None:
        self.count += 1
        self._reports = reports

    def hangs_told(self) -> int:
        return self.count

    def hangs(self, ranks: Any) -> dict[int, bytes]:
        self.reads += 1
        return {rank: self.reports[rank] for rank in ranks if self.reports.get(rank)}


def test_it_is_told_when_all_have_spoken_or_after_six_seconds() -> None:
    board, joiner = FakeBoard(), HangJoiner(4)
    assert joiner.look(board, 0.0) == []  # type: ignore[arg-type]
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung([0, 1])}
    assert joiner.look(board, 1.0) == []  # type: ignore[arg-type]
    assert joiner.look(board, 4.0) == []  # type: ignore[arg-type]
    (event,) = joiner.look(board, 7.0)  # type: ignore[arg-type]
    assert "2 of 4 ranks say so" in event.sentence
    assert joiner.look(board, 30.0) == []  # type: ignore[arg-type]
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung()}
    (event,) = joiner.look(board, 31.0)  # type: ignore[arg-type]
    assert "4 of 4 ranks say so" in event.sentence
    assert board.reads == 2, "what ranks say is read again only when there is something new"


def test_ranks_that_wait_for_one_that_saves_do_not_hang_until_it_does() -> None:
    board, joiner = FakeBoard(), HangJoiner(4)
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung([0, 1, 3])}
    for now in range(0, 300, 4):
        assert joiner.look(board, now, {2: Word("checkpoint", now)}) == []  # type: ignore[arg-type]
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung()}
    (event,) = joiner.look(board, 304, {2: Word("checkpoint", 304)})  # type: ignore[arg-type]
    assert event.rank == 2


def test_a_rank_that_goes_on_is_not_said_to_be_dead() -> None:
    """Rank 2 reports windows: it is busy with something that launches no communication that others wait for."""
    for reported_at, said in ((9.0, "Rank 2: something still moves there."), (1.0, "No word from rank 2: dead")):
        board, joiner = FakeBoard(), HangJoiner(4)
        board.reports = {one["metadata"]["rank"]: packed(one) for one in hung([0, 1, 3])}
        assert joiner.look(board, 4.0, {}) == []  # type: ignore[arg-type]
        (event,) = joiner.look(board, 11.0, {2: Word("", reported_at)})  # type: ignore[arg-type]
        assert said in event.sentence
        assert event.rank == 2


def test_where_nobody_is_in_a_communication_it_is_said_where_ranks_are() -> None:
    reports = [report(rank, waits_at=None, launched=5, at=f"train.py:{7 + (rank == 3)} validate") for rank in range(4)]
    event = hang_event(reports, 4, now=1.0)
    assert event.sentence == (
        "Training has stopped: 4 of 4 ranks say so. Ranks 0–2 in no communication, at train.py:7 validate. "
        "Rank 3 in no communication, at train.py:8 validate."
    )


def test_a_rank_that_works_on_when_the_others_have_ended_does_not_hang_unless_it_waits_for_them() -> None:
    ended = {rank: Word("", 1.0, ended=True) for rank in (1, 2, 3)}
    board, joiner = FakeBoard(), HangJoiner(4)
    board.reports = {0: packed(report(0, waits_at=None, launched=6))}
    assert [joiner.look(board, now, ended) for now in range(0, 100, 5)] == [[]] * 20  # type: ignore[arg-type]
    board.reports = {0: packed(report(0, waits_at=5, launched=6))}
    (event,) = joiner.look(board, 100, ended)  # type: ignore[arg-type]
    assert "1 of 4 ranks say so. Ranks 1–3 ended in order. Hung at seq 5 of the dp group" in event.sentence
    assert "No word" not in event.sentence


def test_the_next_hang_is_told_as_well() -> None:
    board, joiner = FakeBoard(), HangJoiner(4)
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung()}
    assert len(joiner.look(board, 0.0)) == 1  # type: ignore[arg-type]
    assert "Hung at seq 5" in joiner.sentence
    board.reports = dict.fromkeys(board.reports, b"")
    assert joiner.look(board, 10.0) == []  # type: ignore[arg-type]
    assert joiner.sentence == ""
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung()}
    assert len(joiner.look(board, 20.0)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nonsense", [b"nonsense", zlib.compress(b"[1, 2]"), zlib.compress(b'{"metadata": {}}'), zlib.compress(b"\xff")]
)
def test_a_report_that_cannot_be_read_hides_no_other_and_accuses_nobody(
    nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    board, joiner = FakeBoard(), HangJoiner(4)
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung()} | {1: nonsense}
    (event,) = joiner.look(board, 1.0)  # type: ignore[arg-type]
    assert (event.rank, event.host) == (2, "node2")
    assert "3 of 4 ranks say so" in event.sentence
    assert "What rank 1 says cannot be read, and is left out" in event.sentence
    assert "No word from" not in event.sentence
    joiner.look(board, 8.0)  # type: ignore[arg-type]
    assert caplog.text.count("what rank 1 says of a hang cannot be read") == 1


def test_an_analysis_that_fails_does_not_switch_the_monitor_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board, joiner = FakeBoard(), Joiner(4, 4.0, [])
    board.reports = {one["metadata"]["rank"]: packed(one) for one in hung()}
    monkeypatch.setattr(hangs, "hang_event", lambda *_: 1 / 0)
    assert joiner.look_for_hangs(board, 1.0) == []  # type: ignore[arg-type]
    assert joiner.look_for_hangs(board, 2.0) == []  # type: ignore[arg-type]
    assert caplog.text.count("the monitor tells of no hang any more") == 1
