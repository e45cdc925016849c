"""Ranks that agree through a store, each asking when a test says so."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from commtrace.recording import agreement
from commtrace.recording.agreement import Agreed, Agreement, Predecessor, Seat, is_same_world

KEY = "commtrace/run"


class Job:
    """A store that outlives the processes of one attempt, as torchrun's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = HashStore()
        self.now = 100.0
        self._monkeypatch = monkeypatch

    def starts(self, world_size: int, counted: dict[int, int] | None = None) -> list[Agreement]:
        """The ranks of a new attempt. ``counted``: by rank, the restarts that its node's launcher has counted."""
        return [
            Agreement(rank, world_size, f"name of {rank}", restarts=(counted or {}).get(rank, 0), now=lambda: self.now)
            for rank in range(world_size)
        ]

    def asks(self, rank: Agreement) -> tuple[str, int] | None:
        """A rank asks, for the first time from a process of its own, for the name and attempt."""
        answer = self.agrees(rank)
        return answer and (answer.run_id, answer.attempt)

    def agrees(self, rank: Agreement) -> Agreed | None:
        self._monkeypatch.setattr(agreement, "_arrived_in", 0)
        answer = rank.reached(self.store)
        self._monkeypatch.setattr(agreement, "_arrived_in", os.getpid())
        return answer

    def settles(self, ranks: list[Agreement]) -> list[tuple[str, int] | None]:
        """All ask, in the order of their ranks, until all have been answered."""
        for rank in ranks:
            self.asks(rank)
        return [self.asks(rank) for rank in ranks]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_rank_0_decides_and_the_others_ask_until_it_has(job: Job) -> None:
    first, second, third = job.starts(3)

    assert [job.asks(rank) for rank in (second, third)] == [None, None]
    assert [job.asks(rank) for rank in (first, second, third)] == [("name of 0", 0)] * 3


def test_rank_0_knows_when_all_others_have_heard_it(job: Job) -> None:
    first, second, third = job.starts(3)
    for rank in (first, second, third, first, second):
        job.asks(rank)
    assert [rank.unreported(job.store) for rank in (first, second)] == [1, 0]
    job.asks(third)
    assert first.unreported(job.store) == 0


def test_rank_0_waits_a_second_for_ranks_that_may_not_be_recorded(job: Job) -> None:
    first, second, _ = job.starts(3)
    assert [job.asks(rank) for rank in (first, second)] == [None, None]
    job.now += 0.9
    assert job.asks(first) is None
    job.now += 0.1
    assert [job.asks(rank) for rank in (first, second)] == [("name of 0", 0)] * 2


def test_an_answer_of_an_earlier_attempt_is_not_taken(job: Job) -> None:
    job.settles(job.starts(2))
    first, second = job.starts(2, {0: 1, 1: 1})

    assert job.asks(second) is None
    assert [job.asks(rank) for rank in (first, second)] == [("name of 0", 1)] * 2


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("failed", [0, 1])
def test_a_restart_that_only_the_node_that_failed_has_counted_is_an_attempt_of_all(
    job: Job, is_kept: bool, failed: int
) -> None:
    job.settles(job.starts(2))
    if not is_kept:
        job.store = HashStore()

    assert job.settles(job.starts(2, {failed: 1})) == [("name of 0", 1)] * 2


def test_ranks_that_have_joined_take_no_answer_for_a_smaller_job(job: Job) -> None:
    job.settles(job.starts(1))
    first, joined = job.starts(2)

    assert job.asks(joined) is None
    assert [job.asks(rank) for rank in (first, joined)] == [("name of 0", 1)] * 2


def test_a_requeue_counts_beside_restarts(job: Job) -> None:
    assert job.asks(Agreement(0, 1, "a", requeues=2, restarts=1)) == ("a", 3)


def test_a_process_that_records_twice_is_no_second_attempt(job: Job) -> None:
    assert job.settles(job.starts(2)) == [("name of 0", 0)] * 2

    again = [Agreement(rank, 2, f"second name of {rank}") for rank in range(2)]
    assert again[1].reached(job.store) is None
    assert [agreed and agreed[:2] for agreed in (rank.reached(job.store) for rank in again)] == [
        ("second name of 0", 0)
    ] * 2


def test_the_ranks_of_a_world_have_one_key_and_those_of_another_one_have_another(job: Job) -> None:
    def worlds(ranks: list[Agreement]) -> set[str]:
        job.settles(ranks)
        return {agreed.world for agreed in map(job.agrees, ranks) if agreed is not None}

    trainers, restarted = worlds(job.starts(2)), worlds(job.starts(2, {0: 1}))
    job.store = HashStore()
    rollouts = worlds(job.starts(2))

    assert [len(keys) for keys in (trainers, restarted, rollouts)] == [1, 1, 1]
    assert len(trainers | restarted | rollouts) == 3


def test_rank_0_announces_the_name_that_its_world_is_given_once_that_is_settled(job: Job) -> None:
    names = iter([None, "job-world-2"])
    asked = []

    def name(job_name: str, world: str, attempt: int) -> str | None:
        asked.append((job_name, attempt))
        return next(names)

    first = Agreement(0, 2, "job", requeues=1, name=name)
    second = Agreement(1, 2, "job", requeues=1)
    assert [job.asks(rank) for rank in (second, first, second)] == [None, None, None]
    agreed = [job.agrees(first), job.agrees(second)]

    assert asked == [("job", 1), ("job", 1)]
    assert [one and (one.run_id, one.job) for one in agreed] == [("job-world-2", "job")] * 2


def test_a_number_that_no_rank_has_told_ends_the_agreement(job: Job) -> None:
    job.store.set("commtrace/run/restarts", "9" * 4000)
    with pytest.raises(RuntimeError, match="holds b'99999999999999999999' for a number"):
        job.asks(job.starts(2)[1])


def said_by_rank_0(
    world_size: int, attempt: int, run_id: str, world: str = "0123456789abcdef", job: str = "a"
) -> bytes:
    return json.dumps([0, world_size, attempt, run_id, world, job]).encode()


def test_an_answer_that_rank_0_can_have_given_is_taken(job: Job) -> None:
    job.store.set(KEY, said_by_rank_0(2, 0, "a").decode())

    assert job.asks(job.starts(2)[1]) == ("a", 0)


@pytest.mark.parametrize(
    "said",
    [
        b"", b"{}", b"[0, 2, 0]", b"\xff", said_by_rank_0(2, -1, "a"), said_by_rank_0(2, True, "a"),
        said_by_rank_0(2, 0, "../../etc"), said_by_rank_0(2, 0, ""), said_by_rank_0(2, 0, "a\x1b[2J"),
        said_by_rank_0(2, 0, "x" * 5000), said_by_rank_0(2, 0, "a", world="../a"), said_by_rank_0(2, 0, "a", job=""),
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_answer_that_rank_0_cannot_have_given_is_not_taken(job: Job, said: bytes) -> None:
    job.store.set(KEY, said.decode("latin-1"))

    assert job.asks(job.starts(2)[1]) is None


def test_a_number_that_several_ranks_of_a_host_were_told_is_that_of_one_of_them() -> None:
    store = HashStore()
    ranks = [Agreement(rank, 4, "a") for rank in range(4)]

    told = [(0, "left"), (0, "left"), (1, "right"), (0, "right")]
    for _ in range(2):
        numbers = [rank.local_rank(store, host, wanted) for rank, (wanted, host) in zip(ranks, told, strict=True)]
        assert numbers == [0, 1, 1, 0]


def test_ranks_are_numbered_on_each_host_and_keep_their_number() -> None:
    store = HashStore()
    ranks = [Agreement(rank, 4, "a") for rank in range(4)]
    hosts = ["left", "right", "left", "right"]

    for _ in range(2):
        assert [rank.local_rank(store, host) for rank, host in zip(ranks, hosts, strict=True)] == [0, 0, 1, 1]


MEETING = "commtrace/run/reunion/1"


def reunion(monkeypatch: pytest.MonkeyPatch, *seats: tuple[Seat, tuple[int, int]]) -> list[bool]:
    """All processes of a new default group meet, each on a thread of its own."""
    monkeypatch.setattr(agreement, "_reunion", lambda store: MEETING)  # the first one of each of them
    store = HashStore()
    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(lambda seats: is_same_world(store, seats[0], seats[1], seconds=10.0), seats))


def test_a_world_goes_on_where_all_sit_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reunion(monkeypatch, *((Seat("a", rank, 3), (rank, 3)) for rank in range(3))) == [True, True, True]


@pytest.mark.parametrize("places", [[(2, 3), (1, 3), (0, 3)], [(0, 2), (1, 2)], [(1, 4), (0, 4), (2, 4)]])
def test_one_that_sits_elsewhere_makes_it_another_world_for_all(
    places: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = [(Seat("a", rank, 3), place) for rank, place in enumerate(places)]

    assert reunion(monkeypatch, *seats) == [False] * len(places)


def test_a_process_that_is_new_makes_it_another_world_for_those_that_wait(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 was replaced by another one, which says so as it asks for the name of the run."""
    newcomer = job.starts(2)[1]
    assert job.asks(newcomer) is None

    monkeypatch.setattr(agreement, "_names", {})  # as of another process
    assert is_same_world(job.store, Seat("a", 0, 2), (0, 2), seconds=10.0) is False


def test_a_process_knows_of_no_change_after_a_while_when_others_do_not_report() -> None:
    slept: list[float] = []

    found = is_same_world(HashStore(), Seat("a", 0, 2), (0, 2), 0.5, now=lambda: 10.0 + sum(slept), sleep=slept.append)

    assert found
    assert 0.5 <= sum(slept) < 0.52


def test_the_first_decision_holds_for_a_late_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_reunion", lambda store: MEETING)
    store = HashStore()

    assert is_same_world(store, Seat("a", 0, 2), (0, 2), 0.0)
    assert is_same_world(store, Seat("a", 1, 3), (1, 2), 0.0), "it sits elsewhere, and was too late to say so"


def test_meetings_at_one_store_are_told_apart() -> None:
    store = HashStore()

    assert [agreement._reunion(store) for _ in range(2)] == [MEETING, "commtrace/run/reunion/2"]


def test_a_world_that_follows_is_the_next_attempt_of_its_job_also_for_one_that_joins_as_rank_0(job: Job) -> None:
    before = Predecessor("0123456789abcdef", "gpt", 4, first_step=70)
    joins = Agreement(0, 3, "a name of its own", now=lambda: job.now)
    others = [
        Agreement(rank, 3, "gpt", predecessor=before._replace(first_step=69 + rank), now=lambda: job.now)
        for rank in (1, 2)
    ]

    assert job.settles([joins, *others]) == [("gpt", 5)] * 3
    assert [one.first_step for one in (joins, *others)] == [71] * 3
    assert joins.predecessors == {"0123456789abcdef"}


def test_the_first_step_of_a_long_job_is_agreed_on(job: Job) -> None:
    before = Predecessor("0123456789abcdef", "gpt", 0, first_step=2_000_000_000)
    ranks = [Agreement(rank, 2, "gpt", predecessor=before, now=lambda: job.now) for rank in range(2)]

    assert job.settles(ranks) == [("gpt", 1)] * 2
    assert ranks[1].first_step == 2_000_000_000
