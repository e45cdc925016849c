"""Dumps of the flight recorder are laid over the groups and the numbers of a run."""

from __future__ import annotations

import pytest

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.flight_recorder import FlightCall, FlightState, fit_flight_calls
from commtrace.analysis.matching.arrivals import find_arrivals
from tests.analysis.hangs.flight_calls import TP, calls, hung
from tests.analysis.hung_runs import NOW_NS, done, flight, stopped_run
from tests.factory import collective, group


def test_each_rank_shows_its_last_enqueued_call_and_its_place() -> None:
    diagnosis = examine(hung(), now_ns=NOW_NS, flight_calls=[*calls(0, 6, state="started"), *calls(1, 5)])

    assert diagnosis.flight_recorder is not None
    assert diagnosis.flight_recorder.groups[0].offset == 1
    assert diagnosis.flight_recorder.stops[0] == (
        FlightState(0, True, 5, 6, "all_reduce", "started", ("train.py:6 step",)),
        FlightState(1, False, 4, 5, "all_reduce", "completed", ("train.py:5 step",)),
    )
    story = diagnosis.hang.sentences
    assert "  Flight recorder: rank 0: all_reduce started (collective_seq_id 6) from train.py:6 step." in story
    assert (
        "  Flight recorder: rank 1: not there; last all_reduce completed (collective_seq_id 5) from train.py:5 step."
        in story
    )


def test_a_dump_knows_of_an_arrival_of_which_the_files_do_not() -> None:
    diagnosis = examine(
        hung(), now_ns=NOW_NS, flight_calls=[*calls(0, 6, state="started"), *calls(1, 6, state="scheduled")]
    )
    (stop,) = diagnosis.hang.stops
    assert (stop.arrived, stop.missing) == ((0, 1), ())


def test_a_rank_without_files_is_known_by_its_dump() -> None:
    run = stopped_run({0: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]}, world_size=2)
    diagnosis = examine(run, now_ns=NOW_NS, flight_calls=calls(1, 5))
    assert diagnosis.flight_recorder is not None
    assert [one.rank for one in diagnosis.flight_recorder.stops[0]] == [1]


@pytest.mark.parametrize("before", [0, 3, 1000])
def test_the_numbers_are_brought_together_by_the_operations(before: int) -> None:
    """Of what was enqueued before the recording began, torch has counted every one."""
    words = ["all_reduce", "broadcast", "all_gather", "all_reduce", "barrier", "all_gather", "broadcast", "all_reduce"]
    rows = [collective(word, TP, seq, seq * 10, seq * 10 + 1, id=seq) for seq, word in enumerate(words)]
    dump = [FlightCall(0, (0, 1), 4, word, seq + 1 + before, "completed") for seq, word in enumerate(words)]
    run = stopped_run({0: rows, 1: rows}, [TP])
    fitted = fit_flight_calls(run, find_arrivals(run), dump)

    assert fitted[TP.id].offset == 1 + before
    assert (fitted[TP.id].agreed, fitted[TP.id].compared) == (8, 8)


def test_groups_of_the_same_members_are_told_apart_by_their_order() -> None:
    second = group("dp", 0, 1, ordinal=1)
    run = stopped_run({0: done({TP: 5, second: 2}), 1: done({TP: 5, second: 2})}, [TP, second])
    fitted = fit_flight_calls(run, find_arrivals(run), [*calls(0, 5, order=3), *calls(0, 2, order=8)])

    assert {number: len(found.calls) for number, found in fitted.items()} == {TP.id: 5, second.id: 2}


def test_which_group_is_which_is_not_guessed() -> None:
    second = group("dp", 0, 1, ordinal=1)
    run = stopped_run({0: done({TP: 5, second: 2}), 1: []}, [TP, second])
    assert fit_flight_calls(run, find_arrivals(run), calls(0, 5)) == {}
