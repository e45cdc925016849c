from __future__ import annotations

from typing import Any

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.matching.arrivals import find_arrivals
from commtrace.analysis.matching.coverage import (
    Captured,
    CollectiveNumbers,
    RowCounts,
    Seen,
    cover_groups,
    find_coverage,
    missing_numbers,
)
from commtrace.analysis.matching.roles import find_roles
from commtrace.trace import schema
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.run import Run
from tests.analysis.hung_runs import NOW_NS, activity, done, flight, stopped_run
from tests.factory import collective, group, make_run, p2p, span
from tests.findings.reading import said

PAIR = group("dp-cp", 0, 1)


def coverage(run: Run) -> dict[str, Any]:
    return fields_to_json(find_coverage(run, find_roles(run)))


def test_rows_and_drops_are_added_up_over_the_ranks() -> None:
    rows = {rank: [collective("all_reduce", PAIR, 0, 0, 1), span("forward", 0, 1)] for rank in (0, 1)}
    run = make_run(rows, [PAIR], dropped=lambda rank: {"p2p": 3 + rank})
    assert coverage(run) == {
        "captured": {"forward": 2, "collective": 2},
        "dropped": {"p2p": 7},
        "not_visible": [],
        "replays": [],
    }


def test_captured_rows_of_two_runs_add_up() -> None:
    some, more = (
        Captured({"step": 1}, frozenset({"dp"}), {}),
        Captured({"gc": 2, "step": 3}, frozenset({"tp", "dp"}), {}),
    )

    assert some + more == more + some == Captured({"step": 4, "gc": 2}, frozenset({"dp", "tp"}), {})
    assert [*(more + some).rows] == [kind for kind in schema.KINDS if kind in ("step", "gc")]


def test_a_dimension_that_must_communicate_and_was_not_heard_is_not_visible() -> None:
    rows = {0: [collective("all_reduce", PAIR, 0, 0, 1)]}
    run = make_run(rows, [PAIR], world_size=8, parallel={"tp": 4, "dp": 2, "pp": 1})
    (sentence,) = coverage(run)["not_visible"]
    assert sentence.startswith("tp communication: tp = 4, and none was seen.")
    assert "unknown" in sentence


def test_paths_that_an_integration_found_are_reported_once() -> None:
    run = make_run({0: [], 1: []}, topology={"not_visible": ["DeepEP"]})
    assert coverage(run)["not_visible"] == ["DeepEP"]


def test_a_role_that_was_skipped_on_purpose_is_not_zero() -> None:
    run = make_run(
        {0: [], 1: []},
        [group("tp", 0, 1)],
        parallel={"tp": 2},
        topology={"recording": {"skip_roles": ["tp"]}},
    )
    assert find_coverage(run, find_roles(run)).not_visible == (
        "tp: not recorded (skipped by COMMTRACE_SKIP_ROLES); its time is not zero, it is unknown.",
    )


TP = group("tp", 0, 1)


def seen(run: Run) -> Seen:
    (covered,) = [one for one in cover_groups(run, find_arrivals(run)) if one.group.role == "tp"]
    return covered.collectives[0]


def test_numbers_that_are_missing_are_told_as_ranges() -> None:
    rows = [row for row in done({TP: 20}) if row["seq"] not in (0, 5, 6, 7, 12)]
    assert seen(stopped_run({0: rows}, [TP])) == Seen(0, 1, 19, 15, 0, 5, ((0, 0), (5, 7), (12, 12)), 0)


def test_launched_calls_without_a_row_are_missing_at_the_end() -> None:
    run = stopped_run({0: done({TP: 4})}, [TP], activities={0: activity(collectives={str(TP.id): 7})})
    assert seen(run) == Seen(0, 0, 3, 4, 0, 3, ((4, 6),))


def test_a_call_that_others_completed_is_unwritten_in_files_that_break_off() -> None:
    """Rank 1 came out of 7, the last but one, so rank 0 had called that."""
    rows = {0: done({TP: 4}), 1: done({TP: 9})}
    assert seen(stopped_run(rows, [TP])) == Seen(0, 0, 3, 4, 0, 0, (), unwritten=4)
    assert seen(stopped_run(rows, [TP], closed=[0])) == Seen(0, 0, 3, 4, 0, 0, ()), "it has reported everything"
    quiet = {0: activity(collectives={str(TP.id): 4})}
    assert seen(stopped_run({0: done({TP: 4})}, [TP], activities=quiet)) == Seen(0, 0, 3, 4, 0, 0, ()), "it stalled"


def test_messages_that_others_received_are_unwritten_of_a_rank_whose_files_break_off() -> None:
    sent = [p2p("send", TP, 1, seq, seq, seq + 1, id=seq) for seq in range(2)]
    received = [p2p("recv", TP, 0, seq, seq, seq + 1, id=seq) for seq in range(5)]
    run = stopped_run({0: sent, 1: received}, [TP])
    (covered,) = cover_groups(run, find_arrivals(run))
    assert [*covered.messages] == [Seen(0, None, None, 2, 0, 0, (), unwritten=3), Seen(1, None, None, 5, 0, 0, (), 0)]


def test_calls_in_flight_are_not_missing() -> None:
    run = stopped_run({0: done({TP: 4})}, [TP], in_flight={0: [flight(TP, 4)]})
    assert seen(run) == Seen(0, 0, 3, 4, 1, 0, (), 0)


def test_members_of_a_bracket_are_one_number() -> None:
    rows = [{**row, "op_in_seq": position, "id": 10 + position} for row in done({TP: 1}) for position in range(3)]
    assert seen(stopped_run({0: rows}, [TP])).recorded == 1


def test_messages_are_counted() -> None:
    rows = [p2p("send", TP, 1, seq, seq, seq + 1, id=seq) for seq in (0, 1, 3)]
    (covered,) = cover_groups(run := stopped_run({0: rows}, [TP]), find_arrivals(run))
    assert [*covered.messages] == [Seen(0, None, None, 3, 0, 1, (), 0)]


def test_gaps_that_nothing_explains_are_a_finding() -> None:
    rows = [row for row in done({TP: 20}) if row["seq"] != 5]
    run = stopped_run({0: rows, 1: done({TP: 20})}, [TP], closed=[0, 1])
    assert said(examine(run, now_ns=NOW_NS).findings) == [
        "1 collectives were launched and are not in the files, and nothing says why."
    ]


def test_numbers_of_parts_add_up_and_what_lies_between_them_is_missing() -> None:
    other = group("dp", 0, 1, ordinal=1)
    rows = [collective("all_reduce", TP, seq, seq, seq + 1, id=seq) for seq in (0, 1, 3, 5)]
    rows += [collective("all_gather", other, seq, seq, seq + 1, id=10 + seq) for seq in (2, 3)]
    rows += [collective("all_gather", other, 3, 3, 4, id=20, op_in_seq=1)]  # in the bracket of the row before
    run = stopped_run({0: rows}, [TP, other])
    spans = run.ranks[0].spans
    whole = RowCounts.of(spans)

    assert whole == RowCounts({TP.id: CollectiveNumbers(0, 5, 4), other.id: CollectiveNumbers(2, 3, 2)}, 0)
    assert RowCounts.of(spans.take(slice(0, 3))) + RowCounts.of(spans.take(slice(3, None))) == whole
    assert missing_numbers(run, {0: whole}) == 2
