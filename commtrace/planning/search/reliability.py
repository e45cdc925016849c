"""How often predictions put two layouts in the right order, where both were really run, by what changes between them.

``bench/search_real.py`` runs layouts of Megatron-core and compares all pairs of them; its tables are in
bench/RESULTS.md, and a test counts these numbers again from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from commtrace.planning.layout import Layout
from commtrace.planning.search.prediction import Assumptions

ENOUGH: Final = 2 / 3
"""Share of pairs in the right order from which an order is shown."""

DIVISION: Final = "pp, dp, chunks or layers"
MICROBATCH: Final = "microbatch"
RECOMPUTE: Final = "recompute"
BANDWIDTH: Final = "a borrowed bandwidth"
GPUS: Final = "the number of GPUs"


class PairsInOrder(NamedTuple):
    """Pairs of layouts, and how many of them were in the predicted order."""

    right: int
    pairs: int

    @property
    def is_enough(self) -> bool:
        return self.pairs > 0 and self.right >= ENOUGH * self.pairs


ORDER_HELD: Final[Mapping[str, PairsInOrder]] = {
    DIVISION: PairsInOrder(19, 21),
    MICROBATCH: PairsInOrder(8, 10),
    RECOMPUTE: PairsInOrder(5, 5),
    BANDWIDTH: PairsInOrder(6, 6),
    "tp": PairsInOrder(6, 22),
    "cp": PairsInOrder(0, 0),
    "ep": PairsInOrder(0, 0),
    GPUS: PairsInOrder(0, 0),
}
"""By kind of change. A pair counts for the last kind of change that one of the two is from the recorded layout."""


def kinds_of_change(assumptions: Assumptions, layout: Layout, recorded: Layout) -> tuple[str, ...]:
    """Return in what a layout differs from the recorded one, in the order of :data:`ORDER_HELD`."""
    changed = {text.split()[0] for text in assumptions.sizes}
    if assumptions.borrowed_roles or assumptions.baseline_roles:
        changed.add(BANDWIDTH)
    if layout.world_size != recorded.world_size:
        changed.add(GPUS)
    return (DIVISION, *(kind for kind in ORDER_HELD if kind in changed))


def can_be_ranked(kinds: tuple[str, ...]) -> bool:
    """Return whether layouts with all of these changes were in the predicted order often enough."""
    return all(ORDER_HELD[kind].is_enough for kind in kinds)
