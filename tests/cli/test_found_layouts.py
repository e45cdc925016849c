"""What ``commtrace search`` prints of a run."""

from __future__ import annotations

from dataclasses import replace

from commtrace.cli.found_layouts import search_json
from commtrace.cli.output import duration
from commtrace.search.layouts import Found, search_layouts
from tests.json_reading import read_back
from tests.search.exact_costs import GIB, exact

PREDICTOR = exact(scatter=0.3)


def sentences(found: Found) -> str:
    printed = read_back(search_json(PREDICTOR, found, sequences=8, memory=80, notes=()))
    return " ".join([str(printed["verdict"]), *printed["notes"]])


def test_why_a_faster_layout_of_the_table_is_not_the_one_to_take_is_reported() -> None:
    """Also if all of them assume something."""
    found = search_layouts(PREDICTOR, 8, 80 * GIB, 8, top=3)
    none_measured = replace(found, measured=None, chosen=None, ties=())

    for said, ties, how in (
        (sentences(found), found.ties, "as measured"),
        (sentences(none_measured), found.assuming_ties, "with assumptions"),
    ):
        tie = f"{len(ties)} layouts are a tie: within ± 30% of the fastest of them, {duration(ties[0].time.step_ns)}."
        assert how in said
        assert len(ties) > 1
        assert f"{tie} This is the simplest." in said


def test_ties_of_a_layout_with_assumptions_are_counted_beside_it() -> None:
    found = search_layouts(PREDICTOR, 8, 80 * GIB, 8, top=3)
    assert found.chosen is not None
    slow = replace(found.chosen, time=found.chosen.time._replace(rest_ns=10**12))
    ties = len(found.assuming_ties)

    assert ties > 1
    assert f"iB. {ties} layouts are a tie: within ± 30% of " in sentences(replace(found, chosen=slow, ties=(slow,)))
