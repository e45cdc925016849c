from __future__ import annotations

from typing import Any

from commtrace.analysis.matching.coverage import find_coverage
from commtrace.analysis.matching.roles import find_roles
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.run import Run
from tests.factory import collective, group, make_run, span

PAIR = group("dp-cp", 0, 1)


def coverage(run: Run) -> dict[str, Any]:
    return fields_to_json(find_coverage(run, find_roles(run)))


def test_rows_and_drops_are_added_up_over_the_ranks() -> None:
    rows = {rank: [collective("all_reduce", PAIR, 0, 0, 1), span("forward", 0, 1)] for rank in (0, 1)}
    run = make_run(rows, [PAIR], dropped=lambda rank: {"p2p": 3 + rank})
    assert coverage(run) == {"captured": {"forward": 2, "collective": 2}, "dropped": {"p2p": 7}, "not_visible": []}


def test_a_dimension_that_must_communicate_and_was_not_heard_is_not_visible() -> None:
    rows = {0: [collective("all_reduce", PAIR, 0, 0, 1)]}
    run = make_run(rows, [PAIR], world_size=8, parallel={"tp": 4, "dp": 2, "pp": 1})
    (sentence,) = coverage(run)["not_visible"]
    assert sentence.startswith("tp communication: tp = 4, and none was seen.")
    assert "unknown" in sentence


def test_paths_that_an_integration_found_are_told_once() -> None:
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
