"""How often predicted orders held, counted again from the measured tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from commtrace.planning.layout import Layout
from commtrace.planning.search.prediction import Assumptions
from commtrace.planning.search.reliability import ORDER_HELD, PairsInOrder, can_be_ranked, kinds_of_change

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "RESULTS.md"
COLUMNS = ["layout", "predicted, ms", "measured, ms", "error", "between rounds", "assumed", "kind of change"]
RUN = Layout(pp=2, dp=2, microbatches=4)


def tables() -> Iterator[list[list[str]]]:
    """Yield the rows of each table of layouts that were predicted and really run."""
    rows: list[list[str]] = []
    is_inside = False
    for line in [*RESULTS.read_text().splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells == COLUMNS:
            is_inside = True
        elif is_inside and not line:
            yield rows[1:]
            rows, is_inside = [], False
        elif is_inside:
            rows.append(cells)


def test_the_counts_are_those_of_the_measured_tables() -> None:
    kinds = list(ORDER_HELD)
    held = dict.fromkeys(kinds, PairsInOrder(0, 0))
    for rows in tables():
        for one, other in combinations(rows, 2):
            kind = max(one[-1], other[-1], key=kinds.index)
            right = (float(one[1]) < float(other[1])) == (float(one[2]) < float(other[2]))
            held[kind] = PairsInOrder(held[kind].right + right, held[kind].pairs + 1)

    assert held == ORDER_HELD


def test_only_changes_whose_order_held_in_two_thirds_of_pairs_are_ranked() -> None:
    assert [kind for kind, held in ORDER_HELD.items() if not held.is_enough] == ["tp", "cp", "ep", "the number of GPUs"]
    assert [PairsInOrder(*pairs).is_enough for pairs in ((2, 3), (19, 30), (0, 0))] == [True, False, False]


def test_the_kinds_of_change_of_a_layout() -> None:
    def kinds(layout: Layout, *sizes: str, borrowed: tuple[str, ...] = ()) -> tuple[str, ...]:
        return kinds_of_change(Assumptions(sizes, borrowed), layout, RUN)

    division = "pp, dp, chunks or layers"
    assert kinds(RUN) == kinds(replace(RUN, pp=4, dp=1)) == (division,)
    assert kinds(replace(RUN, microbatch=2), "microbatch 2", "recompute full") == (division, "microbatch", "recompute")
    assert kinds(replace(RUN, pp=1, tp=2), "tp 2", borrowed=("tp",)) == (division, "a borrowed bandwidth", "tp")
    assert kinds(replace(RUN, dp=4)) == (division, "the number of GPUs")
    assert can_be_ranked((division, "microbatch"))
    assert not can_be_ranked((division, "microbatch", "tp"))
