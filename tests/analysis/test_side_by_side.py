"""Things done at once: never on more cores than there are, in order, and each of them once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from commtrace.analysis import side_by_side as module
from commtrace.analysis.side_by_side import beside, in_gaps, side_by_side

TIMEOUT_S = 60


@pytest.fixture(params=[0, 1, 3])
def helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many cores are free, besides the one that the test runs on; in the end they are free again."""
    cores = module._Cores(request.param)
    monkeypatch.setattr(module, "_cores", cores)
    yield request.param
    deadline = time.monotonic() + TIMEOUT_S
    while cores.free != request.param:  # A thread says what it is done with before it ends.
        assert time.monotonic() < deadline
    assert not cores._left
    assert not cores._for_gaps


def test_results_are_in_the_order_of_the_arguments(helpers: int) -> None:
    assert side_by_side(divmod, [(number, 7) for number in range(50)]) == [divmod(number, 7) for number in range(50)]


def test_nothing_to_do_is_done(helpers: int) -> None:
    assert side_by_side(abs, []) == []


@pytest.mark.parametrize("helpers", [3], indirect=True)
def test_as_many_run_at_once_as_there_are_cores(helpers: int) -> None:
    all_of_them = threading.Barrier(helpers + 1)

    assert len(set(side_by_side(all_of_them.wait, [(TIMEOUT_S,)] * (helpers + 1)))) == helpers + 1


def test_within_one_another_they_take_no_more_cores(helpers: int) -> None:
    threads = set[int]()

    def leaf(_: int) -> int:
        threads.add(threading.get_ident())
        return threading.active_count()

    def inner(_: int) -> int:
        return max(side_by_side(leaf, [(number,) for number in range(8)]))

    before = threading.active_count()
    assert max(side_by_side(inner, [(number,) for number in range(8)])) <= before + helpers


def test_the_error_of_the_first_call_that_failed_is_raised(helpers: int) -> None:
    done = []

    def fail_from(number: int) -> None:
        done.append(number)
        if number:
            raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 1"):
        side_by_side(fail_from, [(number,) for number in range(100)])
    assert len(done) < 100


def test_beside_a_block_something_is_worked_out(helpers: int) -> None:
    with beside(pow, 2, 10) as power:
        assert power() == 1024
        assert power() == 1024


def test_its_error_is_that_of_whoever_asks(helpers: int) -> None:
    with pytest.raises(ZeroDivisionError), beside(divmod, 1, 0) as result:
        result()


@pytest.mark.parametrize("helpers", [1], indirect=True)
def test_whoever_waits_lends_its_core(helpers: int) -> None:
    both, deadline = threading.Barrier(2), time.monotonic() + TIMEOUT_S

    def call(number: int) -> int:
        if number:
            return both.wait(TIMEOUT_S)
        while not module._cores.free:  # the other thread is not yet waiting
            assert time.monotonic() < deadline
        return -1

    with beside(side_by_side, call, [(0,), (1,), (2,)]) as result:
        assert sorted(result()) == [-1, 0, 1]


@pytest.mark.parametrize("helpers", [1], indirect=True)
def test_a_core_that_becomes_free_takes_up_what_found_none(helpers: int) -> None:
    may_end, was_done = threading.Event(), threading.Event()

    with beside(may_end.wait, TIMEOUT_S), beside(was_done.set):
        assert not was_done.is_set()
        may_end.set()
        assert was_done.wait(TIMEOUT_S)


@pytest.mark.parametrize("helpers", [1], indirect=True)
def test_whoever_waits_does_what_found_no_core(helpers: int) -> None:
    was_done = threading.Event()

    with beside(was_done.wait, TIMEOUT_S) as first, beside(was_done.set):
        assert first()


def test_many_within_one_another_come_to_an_end(helpers: int) -> None:
    def both(depth: int) -> int:
        if not depth:
            return 1
        with beside(both, depth - 1) as left:
            (right, other) = side_by_side(both, [(depth - 1,), (depth // 2,)])
            return left() + right + other

    def alone(depth: int) -> int:
        return 1 if not depth else 2 * alone(depth - 1) + alone(depth // 2)

    for _ in range(20):
        assert both(6) == alone(6)


def test_an_error_of_the_block_waits_for_what_is_beside_it(helpers: int) -> None:
    done = []
    with pytest.raises(KeyError), beside(done.append, 1):
        raise KeyError
    assert done == [1] * bool(helpers)


def test_what_is_for_gaps_is_worked_out_when_it_is_asked_for(helpers: int) -> None:
    with in_gaps(pow, 2, 10) as power:
        assert power() == 1024
        assert power() == 1024


def test_an_error_in_a_gap_is_that_of_whoever_asks(helpers: int) -> None:
    with pytest.raises(ZeroDivisionError), in_gaps(divmod, 1, 0) as result:
        result()


@pytest.mark.parametrize("helpers", [1], indirect=True)
def test_what_is_for_gaps_comes_after_what_is_done_side_by_side(helpers: int) -> None:
    """Nor is it done by a thread that waits for the last one of these: it has more to do."""
    begun = list[str]()
    both, filled = threading.Barrier(2), threading.Event()

    def call(number: int) -> None:
        begun.append(f"call {number}")
        both.wait(TIMEOUT_S)

    def fill() -> None:
        begun.append(threading.current_thread().name)
        filled.set()

    with in_gaps(fill):
        side_by_side(call, [(0,), (1,), (2,), (3,)])
        assert filled.wait(TIMEOUT_S)  # by the other core, while this one goes on
    assert sorted(begun[:4]) == ["call 0", "call 1", "call 2", "call 3"]
    assert begun[4:] == ["commtrace-analysis"]


@pytest.mark.parametrize("helpers", [1], indirect=True)
def test_of_several_gaps_the_innermost_is_filled_first(helpers: int) -> None:
    done, filled = list[int](), threading.Event()

    def outer() -> None:
        done.append(1)
        filled.set()

    with in_gaps(outer), in_gaps(done.append, 2):
        side_by_side(time.sleep, [(0,), (0,)])
        assert filled.wait(TIMEOUT_S)
    assert done == [2, 1]


def test_gaps_that_nobody_asks_for_are_not_filled_after_the_block(helpers: int) -> None:
    done = list[int]()
    with in_gaps(done.append, 1):
        pass
    side_by_side(abs, [(1,), (2,)])

    assert done == []


def test_many_gaps_within_one_another_come_to_an_end(helpers: int) -> None:
    def both(depth: int) -> int:
        if not depth:
            return 1
        with in_gaps(both, depth - 1) as left, beside(both, depth // 2) as middle:
            (right, other) = side_by_side(both, [(depth - 1,), (depth // 2,)])
            return left() + middle() + right + other

    def alone(depth: int) -> int:
        return 1 if not depth else 2 * alone(depth - 1) + 2 * alone(depth // 2)

    for _ in range(20):
        assert both(5) == alone(5)


@pytest.mark.parametrize("helpers", [1], indirect=True)
def test_of_several_gaps_one_is_filled_while_something_is_waited_for(helpers: int) -> None:
    """The core of what is waited for is that of whoever waits, as soon as it is done."""
    both, begun, may_end = threading.Barrier(2), list[int](), threading.Event()

    def fill(number: int) -> None:
        begun.append(number)
        may_end.wait(TIMEOUT_S)

    def call(number: int) -> None:
        both.wait(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while threading.current_thread().name == "commtrace-analysis" and not begun:  # begun by whoever waits
            assert time.monotonic() < deadline

    with in_gaps(fill, 1), in_gaps(fill, 2):
        side_by_side(call, [(0,), (1,)])
        assert begun == [2]
        may_end.set()


def test_after_an_error_no_gap_is_filled(helpers: int) -> None:
    done = list[int]()
    with pytest.raises(ZeroDivisionError), in_gaps(done.append, 1):
        side_by_side(divmod, [(1, 0)])

    assert done == []
