"""What ``commtrace search`` prints of a run."""

from __future__ import annotations

from dataclasses import replace

from commtrace.cli.found_layouts import search_json
from commtrace.planning.search.layouts import FoundLayouts, search_layouts
from tests.json_reading import read_back
from tests.planning.search.exact_costs import GIB, exact

PREDICTOR = exact(scatter=0.3)


def sentences(found: FoundLayouts) -> str:
    printed = read_back(search_json(PREDICTOR, found, sequences=8, memory=80, notes=()))
    return " ".join([str(printed["verdict"]), *printed["notes"]])


def test_why_a_faster_layout_of_the_table_is_not_the_one_to_take_is_reported() -> None:
    found = search_layouts(PREDICTOR, 8, 80 * GIB, 8, top=3)

    assert len(found.ties) > 1
    assert f"{len(found.ties)} layouts are a tie: no other is faster by more than its ±. This is the" in sentences(
        found
    )


def test_if_nothing_can_be_ranked_the_candidates_are_to_be_measured() -> None:
    found = search_layouts(PREDICTOR, 8, 80 * GIB, 8, top=3)
    nothing = sentences(replace(found, best=(), chosen=None, ties=()))

    assert nothing.startswith(
        f"None of the {found.fitting} of {found.layouts} layouts that fit into 80 GiB can be ranked"
    )
    assert "in the predicted order, by what changes" not in nothing
    assert "Candidates to measure: what they change was not in the predicted order often enough (tp 6 of 22)" in nothing
    assert "fastest" not in nothing.lower()
