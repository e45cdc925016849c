"""When operations on a device started and ended, and what is only a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commtrace.capture.device.placement import (
    HOST_BOUND_NS,
    MOST_REMEMBERED,
    MOST_REMEMBERED_IN_ALL,
    SHORTEST_STALL_NS,
    SOON_NS,
    DeviceOperations,
    PlacedTimes,
    Placement,
)
from commtrace.trace import schema

CUDA, NCCL, HOST, UNKNOWN = (
    schema.CUDA_EVENT_TIMING,
    schema.NCCL_TIMING,
    schema.HOST_TIMING,
    schema.UNKNOWN_TIMING,
)
MICROSECOND, MILLISECOND = 1_000, 1_000_000
OWN, JOBS = 0, 1
"""Queues of communicator 0: its own stream, and the streams of the job."""


@dataclass(frozen=True)
class Call:
    """A row of ``DeviceOperations``, with the marks of a stream that was long behind the host."""

    id: int
    launch: int
    waited_from: int
    end: int
    queue: int = OWN
    position: int = -1  # that of an operation that is launched in each id
    batch: int = -1
    waited_taken_at: int = 1
    end_taken_at: int = 2
    handed_on: int = 0
    duration: int = -1


def calls_of(rows: Sequence[Call]) -> DeviceOperations:
    columns: dict[str, list[int]] = {}
    for field in dataclasses.fields(DeviceOperations):
        columns[field.name] = [getattr(row, field.name) for row in rows]
    columns["position"] = [row.id if row.position < 0 else row.position for row in rows]
    columns["batch"] = [row.id if row.batch < 0 else row.batch for row in rows]
    return DeviceOperations(**{name: np.array(column, np.int64) for name, column in columns.items()})


Times = tuple[int, int, bool, bool, int]


def times_of(placed: PlacedTimes) -> list[Times]:
    """Start, end, whether they are exact, and the timing."""
    columns = (placed.start, placed.end, placed.start_exact, placed.end_exact, placed.timing)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def place(*passes: Sequence[Call]) -> list[Times]:
    """In the order in which they come."""
    placement = Placement()
    return [times for rows in passes for times in times_of(placement.place(calls_of(rows)))]


def stalled(number: int, launch: int, end: int, **columns: Any) -> Call:
    """A wait held the stream until it had ended."""
    return Call(number, launch, max(launch, end - 20 * MICROSECOND), end, **columns)


def hidden(number: int, launch: int, waited: int, **columns: Any) -> Call:
    """It was over when the stream came to the wait for it."""
    return Call(number, launch, waited, waited + MICROSECOND, **columns)


MS = MILLISECOND
FIRST = stalled(0, MS, 2 * MS)
"""Behind it, the communicator is known to be idle."""


def test_a_wait_that_stalls_gives_the_end_and_the_end_the_next_start() -> None:
    times = place([FIRST, stalled(1, MS + 1, 3 * MS), stalled(2, 5 * MS, 6 * MS)])

    assert times == [
        (MS, 2 * MS, False, True, CUDA),  # nobody knows what ran before
        (2 * MS, 3 * MS, True, True, CUDA),
        (5 * MS, 6 * MS, True, True, CUDA),
    ]


def test_only_known_times_of_operations_in_flight_together_are_exact() -> None:
    """Three of them, hidden but for the last: its stall gives its end, and nothing gives its start."""
    flight = [hidden(1, 3 * MS, 9 * MS), hidden(2, 3 * MS + 1_000, 9 * MS + 2_000), stalled(3, 3 * MS + 2_000, 10 * MS)]

    assert place([FIRST, *flight])[1:] == [
        (3 * MS, 9 * MS + 1_000, True, False, UNKNOWN),
        (3 * MS + 1_000, 9 * MS + 3_000, False, False, UNKNOWN),
        (3 * MS + 2_000, 10 * MS, False, True, CUDA),
    ]


def test_durations_give_the_starts_and_ends_of_operations_in_flight_together() -> None:
    flight = [
        hidden(1, 3 * MS, 9 * MS, duration=MS),
        hidden(2, 3 * MS + 1_000, 9 * MS + 2_000, duration=2 * MS),
        stalled(3, 3 * MS + 2_000, 10 * MS, duration=4 * MS),
    ]

    assert place([FIRST, *flight])[1:] == [
        (3 * MS, 4 * MS, True, True, NCCL),
        (4 * MS, 6 * MS, True, True, NCCL),
        (6 * MS, 10 * MS, True, True, CUDA),
    ]


def test_a_known_end_and_a_duration_give_the_start_where_no_start_was_known() -> None:
    flight = [hidden(1, 3 * MS, 9 * MS), stalled(2, 3 * MS + 1_000, 10 * MS, duration=4 * MS)]

    assert place([FIRST, *flight])[2] == (6 * MS, 10 * MS, True, True, CUDA)
    # What ran before it may have been on another stream, and the duration counts from before that ended.
    assert place([FIRST, flight[1]], [flight[0]])[1] == (6 * MS, 10 * MS, False, True, CUDA)


def test_a_duration_counts_from_when_the_own_stream_got_there() -> None:
    """It includes the wait for an operation on another stream: the start is not before that one's end."""
    beside = stalled(1, 3 * MS, 6 * MS, queue=JOBS)
    behind = hidden(2, 4 * MS, 20 * MS, duration=5 * MS)  # 2 ms of it waiting

    assert place([FIRST, beside, behind])[2] == (6 * MS, 9 * MS, True, True, NCCL)

    unknown = hidden(1, 3 * MS, 8 * MS, queue=JOBS)
    known = stalled(2, 4 * MS, 9 * MS, duration=5 * MS)
    assert place([FIRST, unknown, known])[2] == (4 * MS, 9 * MS, False, True, CUDA)


def test_durations_on_streams_of_the_job_are_not_used() -> None:
    assert place([FIRST, hidden(1, 3 * MS, 8 * MS, queue=JOBS, duration=MS)])[1] == (
        3 * MS, 8 * MS + 1_000, True, False, UNKNOWN,
    )  # fmt: skip


def test_a_duration_that_would_end_behind_the_upper_bound_is_refused_and_nothing_is_known_behind_it() -> None:
    flight = [
        hidden(1, 3 * MS, 4 * MS, duration=5 * MS),
        hidden(2, 3 * MS + 1_000, 9 * MS, duration=MS),
        hidden(3, 12 * MS, 15 * MS, duration=MS),  # all was over when it was launched
    ]
    placement = Placement()
    placed = placement.place(calls_of([FIRST, *flight]))

    assert times_of(placed)[1:] == [
        (3 * MS, 4 * MS + 1_000, True, False, UNKNOWN),
        (3 * MS + 1_000, 9 * MS + 1_000, False, False, UNKNOWN),
        (12 * MS, 13 * MS, True, True, NCCL),
    ]
    assert placed.measured_end.tolist() == [-1, 8 * MS, -1, 13 * MS]


def test_durations_can_be_compared_with_known_ends() -> None:
    placed = Placement().place(calls_of([FIRST, stalled(1, 3 * MS, 5 * MS, duration=2 * MS - 7)]))

    assert placed.measured_end.tolist() == [-1, 5 * MS - 7]


def test_later_launches_ended_later() -> None:
    first, second = hidden(1, 3 * MS, 9 * MS), stalled(2, 4 * MS, 5 * MS)

    assert place([FIRST, first, second])[1] == (3 * MS, 5 * MS, True, False, UNKNOWN)
    assert place([FIRST, second], [first])[1:] == [
        (4 * MS, 5 * MS, False, True, CUDA), (3 * MS, 5 * MS, True, False, UNKNOWN),
    ]  # fmt: skip


def test_a_later_operation_on_another_stream_of_the_communicator_ended_later_too() -> None:
    first, second = hidden(1, 3 * MS, 9 * MS), stalled(2, 4 * MS, 5 * MS, queue=JOBS)

    assert place([FIRST, first, second])[1:] == [
        (3 * MS, 5 * MS, True, False, UNKNOWN), (4 * MS, 5 * MS, False, True, CUDA),
    ]  # fmt: skip


def test_a_wait_for_several_operations_gives_the_end_of_the_last_one_only() -> None:
    calls = [Call(number, 3 * MS + number, 4 * MS, 5 * MS) for number in (1, 2, 3)]

    assert [times[1:] for times in place([FIRST, *calls])[1:]] == [
        (5 * MS, True, False, UNKNOWN), (5 * MS, False, False, UNKNOWN), (5 * MS, False, True, CUDA),
    ]  # fmt: skip


def test_a_stream_that_waited_for_the_host_gives_an_upper_bound() -> None:
    """The host took 300 µs between the marks, and the stream passed the second one right behind it."""
    late = Call(1, 3 * MS, 4 * MS, 4 * MS + 300_000, waited_taken_at=4 * MS - 10_000, end_taken_at=4 * MS + 295_000)

    assert place([FIRST, late])[1][3] is False
    assert place([FIRST, dataclasses.replace(late, end_taken_at=4 * MS + 300_000 - HOST_BOUND_NS)])[1][3] is True
    assert place([FIRST, dataclasses.replace(late, waited_taken_at=0)])[1][3] is True


def test_an_operation_that_was_over_at_once_was_short() -> None:
    assert place([FIRST, Call(1, 3 * MS, 3 * MS, 3 * MS + SHORTEST_STALL_NS - 1)])[1][3] is True


def test_a_mark_that_is_the_hosts_time_says_so() -> None:
    assert place([FIRST, Call(1, 3 * MS, 3 * MS, 5 * MS, end_taken_at=0)])[1][4] == HOST


def test_members_of_a_bracket_share_their_times() -> None:
    members = [stalled(number, 3 * MS, 6 * MS, batch=1) for number in (1, 2, 3)]
    after = stalled(4, 4 * MS, 7 * MS)

    assert place([FIRST, *members, after])[1:] == [
        *[(3 * MS, 6 * MS, True, True, CUDA)] * 3, (6 * MS, 7 * MS, True, True, CUDA),
    ]  # fmt: skip
    assert place([FIRST, members[0], members[2]], [members[1]])[1:] == [(3 * MS, 6 * MS, True, True, CUDA)] * 3


def test_behind_an_operation_that_has_not_come_a_start_is_a_bound_until_the_communicator_was_idle() -> None:
    second, third = stalled(2, 4 * MS, 5 * MS), stalled(3, 6 * MS, 7 * MS)

    assert [times[2] for times in place([FIRST, second, third])] == [False, False, True]


def test_the_start_is_not_before_that_of_the_operation_before() -> None:
    """Its own stream was ready earlier."""
    before, after = hidden(1, 5 * MS, 8 * MS), stalled(2, 3 * MS, 9 * MS, queue=JOBS)

    assert place([FIRST, before, after])[2][0] == 5 * MS


def test_communicators_have_nothing_to_do_with_one_another() -> None:
    other = stalled(1, 3 * MS, 50 * MS, queue=2, position=0)

    assert place([FIRST, other, stalled(2, 4 * MS, 5 * MS, position=1)])[2] == (4 * MS, 5 * MS, True, True, CUDA)


def test_an_idle_communicator_of_long_ago_is_remembered_and_does_not_hurt() -> None:
    year_ns = 365 * 86_400 * 1_000_000_000
    old = [stalled(number, 1, MS, queue=2 * number, position=0) for number in range(1_000)]
    new = [stalled(1_000 + number, year_ns, year_ns + MS, queue=2 * number, position=1) for number in range(1_000)]

    assert place(old, new)[1_000:] == [(year_ns, year_ns + MS, True, True, CUDA)] * 1_000


def test_placement_remembers_one_operation() -> None:
    placement = Placement()
    times = [
        placement.place(calls_of([stalled(n, n * MS, n * MS + 500_000) for n in range(i, i + 50)])) for i in (0, 50)
    ]
    assert all(placed.start_exact[1:].all() for placed in times)
    assert times[1].start_exact[0]
    assert len(placement._remembered.batch) == 1

    without_predecessor = [stalled(n, n * MS, n * MS + 500_000) for n in range(101, 401)]
    placement.place(calls_of(without_predecessor))
    assert len(placement._remembered.batch) == MOST_REMEMBERED

    gone = [stalled(n, 500 * MS, 501 * MS, queue=2 * n, position=0) for n in range(1_000, 6_000)]
    placement.place(calls_of(gone))
    assert len(placement._remembered.batch) == MOST_REMEMBERED_IN_ALL


def test_nothing_is_placed_of_nothing() -> None:
    assert times_of(Placement().place(calls_of([]))) == []


# The same rules as plain loops.


@dataclass
class Launch:
    """What a communicator launched as one."""

    batch: int
    queue: int
    positions: tuple[int, int]
    launch: int
    end: int
    ends_exactly: bool
    duration: int
    handed_on: int
    times: Times | None = None
    is_new: bool = True


class PlainPlacement:
    """Knows all that has come before."""

    def __init__(self) -> None:
        self.communicators: dict[int, dict[int, Launch]] = {}

    def place(self, rows: Sequence[Call]) -> list[Times]:
        for row in rows:
            launches = self.communicators.setdefault(row.queue // 2, {})
            is_late = row.handed_on - row.launch > SOON_NS
            duration = row.duration if row.queue % 2 == 0 and not is_late else -1
            positions = (row.position, row.position)
            new = Launch(row.batch, row.queue, positions, row.launch, row.end, ended(row), duration, row.handed_on)
            launch = launches.setdefault(row.batch, new)
            launch.handed_on = max(launch.handed_on, row.handed_on)
            launch.positions = min(launch.positions[0], row.position), max(launch.positions[1], row.position)
        for communicator in {row.queue // 2 for row in rows}:
            self._place([launch for _, launch in sorted(self.communicators[communicator].items())])
        return [self._times(row) for row in rows]

    def _times(self, row: Call) -> Times:
        times = self.communicators[row.queue // 2][row.batch].times
        assert times is not None
        return times

    def _place(self, launches: list[Launch]) -> None:
        bounds, exact, timing = [], [], []
        for index, launch in enumerate(launches):
            later = min((behind.end for behind in launches[index + 1 :]), default=None)
            if launch.times is not None or later is None or launch.end < later:
                bounds.append(launch.end)
                exact.append(launch.ends_exactly)
            else:
                bounds.append(later)
                exact.append(False)
            timing.append(CUDA if exact[-1] else UNKNOWN)
        ends = list(bounds)
        for index, launch in enumerate(launches):
            if launch.times is None and not exact[index] and launch.duration >= 0:
                reached = self._reached(launches, index, bounds, ends, exact)
                if reached is not None and reached + launch.duration <= bounds[index] + SHORTEST_STALL_NS:
                    ends[index], exact[index], timing[index] = reached + launch.duration, True, NCCL
        for index in reversed(range(len(launches))):
            if launches[index].times is None and not exact[index]:
                ends[index] = min([ends[index], *ends[index + 1 :]])
        for index, launch in enumerate(launches):
            if launch.times is None:
                start, start_exact = self._start(launches, index, bounds, ends, exact)
                launch.times = start, ends[index], start_exact, exact[index], timing[index]
        for launch in launches:
            assert launch.times is not None
            launch.launch, launch.end, _, launch.ends_exactly, _ = launch.times

    def _before(self, launches: list[Launch], index: int) -> int | None:
        """The launch right before it, if it has come."""
        is_there = index > 0 and launches[index - 1].positions[1] + 1 == launches[index].positions[0]
        return index - 1 if is_there else None

    def _reached(
        self, launches: list[Launch], index: int, bounds: list[int], ends: list[int], exact: list[bool]
    ) -> int | None:
        """When the communicator's own stream had nothing else to do than this operation."""
        launch = min(launches[index].launch, bounds[index])
        before = self._before(launches, index)
        if before is not None and bounds[before] <= launch:
            return launch
        while before is not None and launches[before].queue != launches[index].queue:
            before = self._before(launches, before)
        if before is None:
            return None
        if bounds[before] <= launch:
            return launch
        return max(launch, ends[before]) if exact[before] else None

    def _start(
        self, launches: list[Launch], index: int, bounds: list[int], ends: list[int], exact: list[bool]
    ) -> tuple[int, bool]:
        launch = launches[index]
        starts = [min(earlier.launch, bound) for earlier, bound in zip(launches[: index + 1], bounds, strict=False)]
        start = max([*starts, *(end for end, known in zip(ends[:index], exact[:index], strict=True) if known)])
        before = self._before(launches, index)
        reached = min(launch.launch, bounds[index])
        was_idle = before is not None and bounds[before] <= reached and launch.handed_on - reached <= SOON_NS
        is_exact = was_idle or (before is not None and exact[before])
        is_exact &= launch.handed_on - min(start, ends[index]) <= SOON_NS
        if exact[index] and launch.duration >= 0:
            measured = ends[index] - launch.duration
            start = max(start, measured)
            if before is not None:
                is_exact |= launches[before].queue == launch.queue or ends[before] <= measured
        return min(start, ends[index]), is_exact


def ended(row: Call) -> bool:
    if row.end - row.launch < SHORTEST_STALL_NS:
        return True
    waited_ns, host_ns = row.end - row.waited_from, row.end_taken_at - row.waited_taken_at
    may_be_the_host = row.waited_taken_at > 0 and row.end - row.end_taken_at < HOST_BOUND_NS
    if may_be_the_host and waited_ns < host_ns + SHORTEST_STALL_NS:
        return False
    return waited_ns >= SHORTEST_STALL_NS


@st.composite
def jobs(draw: st.DrawFn) -> list[list[Call]]:
    """Passes of calls of two communicators, some with brackets, some that come late or never; times of any kind."""
    short = st.sampled_from([0, 1, 5, 9, 10, 11, 30])
    positions, known_ends = [0, 0], [0, 0]
    passes: list[list[Call]] = [[] for _ in range(draw(st.integers(1, 4)))]
    number, now = 0, 1_000 * MICROSECOND
    for _ in range(draw(st.integers(1, 14))):
        communicator = draw(st.integers(0, 1))
        queue = 2 * communicator + draw(st.integers(0, 1))
        now += draw(short) * MICROSECOND
        launch = now - draw(st.sampled_from([0, 0, 0, 25])) * MICROSECOND
        waited_from = launch + draw(short) * MICROSECOND
        # None ends before one that was launched earlier and is known to have ended.
        end = max(waited_from + draw(short) * MICROSECOND, known_ends[communicator])
        lateness = draw(st.sampled_from([0, 0, 50, 200])) * MICROSECOND
        duration = draw(st.sampled_from([-1, 0, 3, 8, 20])) * MICROSECOND
        waited_taken_at = draw(st.sampled_from([0, waited_from - lateness]))
        handed_on = launch + draw(st.sampled_from([0, 30])) * MICROSECOND
        batch = number
        comes_in = draw(st.integers(0, len(passes)))  # the last one: never
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
            call = Call(
                number, launch, waited_from, end, queue, positions[communicator], batch,
                waited_taken_at=waited_taken_at, end_taken_at=end - lateness,
                handed_on=handed_on, duration=duration if duration >= 0 else -1,
            )  # fmt: skip
            known_ends[communicator] = end if ended(call) else known_ends[communicator]
            number, positions[communicator] = number + 1, positions[communicator] + 1
            comes_in += draw(st.sampled_from([0, 0, 0, 1]))  # A pass may end between two members.
            if comes_in < len(passes):
                passes[comes_in].append(call)
    return [draw(st.permutations(rows)) for rows in passes]


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_columns_give_what_plain_loops_give(passes: list[list[Call]]) -> None:
    placement, plain = Placement(), PlainPlacement()
    for rows in passes:
        assert times_of(placement.place(calls_of(rows))) == plain.place(rows)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_and_exact_times_are_true_on_a_simulated_communicator(seed: int) -> None:
    """Operations in order, each on one of two streams, waited for by a busy or an idle stream, in any order."""
    random = np.random.default_rng(seed)
    truth, rows, free, own_free, launch = {}, [], 0, 0, 0
    for number in range(200):
        launch += int(random.integers(1, 60)) * MICROSECOND
        queue = int(random.integers(0, 2))
        reached = max(launch, own_free) if queue == OWN else launch
        start = max(reached, free)
        free = end = start + int(random.integers(20, 60)) * MICROSECOND
        truth[number] = start, end
        own_free = end if queue == OWN else own_free
        waited_from = launch + int(random.integers(1, 400)) * MICROSECOND
        duration = end - reached if random.random() < 0.5 else -1
        rows.append(Call(number, launch, waited_from, max(waited_from + 1_000, end), queue, duration=duration))
    placement = Placement()
    order = sorted(rows, key=lambda row: row.end + int(random.integers(0, 400)) * MICROSECOND)
    exact = 0
    for begin in range(0, len(order), 30):
        part = order[begin : begin + 30]
        for row, (start, end, start_exact, end_exact, _) in zip(
            part, times_of(placement.place(calls_of(part))), strict=True
        ):
            true_start, true_end = truth[row.id]
            assert start <= true_start
            assert end >= true_end
            assert not start_exact or start == true_start
            assert not end_exact or end == true_end
            exact += start_exact + end_exact
    assert exact > 100
