"""What SimAI-Analytical assumes and answers, measured: the overlap of each group, and its row of a result.

SimAI takes the overlap ratios as options (``-dp_o`` …) and multiplies communication by one minus the ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.communication.table import Communication
from commtrace.interchange.simulators.simai_of_run import DP, DP_EP, EP, PP, TP, class_of

_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "-dp_o": (DP, DP_EP),
    "-tp_o": (TP,),
    "-ep_o": (EP,),
    "-pp_o": (PP,),
}
COLUMNS: Final = (
    "File name", "Expose DP comm", "Expose DP_EP comm", "Expose TP comm", "Expose_EP_comm", "Expose_PP_comm",
    "bubble time", "total comp", "total exposed comm", "Total time",
)  # fmt: skip
_NS_PER_US: Final = 1000


@dataclass(frozen=True, slots=True)
class Overlap:
    """The hidden share of a class of communication; None if there was none."""

    option: str
    hidden_ns: int
    exposed_ns: int

    @property
    def ratio(self) -> float | None:
        in_flight = self.hidden_ns + self.exposed_ns
        return self.hidden_ns / in_flight if in_flight else None


def overlaps(communication: Iterable[Communication], roles: Sequence[str], bubble_ns: int = 0) -> tuple[Overlap, ...]:
    """Return the overlap behind each option of SimAI-Analytical, over all ranks and the steps that count.

    Args:
        roles: of the process groups of the run.
        bubble_ns: over the same ranks and steps. SimAI has the bubble beside the exposed messages, not in them.
    """
    rows = list(communication)
    shares = []
    for option, classes in _OPTIONS.items():
        rows_of_classes = [row for row in rows if class_of(row.role, roles) in classes]
        exposed = sum(row.exposed_ns for row in rows_of_classes) - (bubble_ns if PP in classes else 0)
        shares.append(Overlap(option, sum(row.hidden_ns for row in rows_of_classes), max(exposed, 0)))
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class Result:
    """The row of SimAI-Analytical, ns of a mean step, from ranks that were measured."""

    exposed_ns: Mapping[str, int]  # by class; what belongs to none is in the total only
    bubble_ns: int
    compute_ns: int
    total_exposed_ns: int  # without the pipeline's, as in SimAI
    wall_ns: int

    @property
    def rest_ns(self) -> int:
        """Time that SimAI has no column for: waits for data, garbage collection, what no span covers."""
        parts = self.compute_ns + self.total_exposed_ns + self.bubble_ns + self.exposed_ns[PP]
        return self.wall_ns - parts


def result_of(ranks: Sequence[RankMean], roles: Sequence[str]) -> Result:
    """Return the mean over ranks of their mean steps; ``ranks`` must not be empty."""
    exposed = dict.fromkeys((DP, DP_EP, TP, EP, PP), 0)
    total = 0
    for rank in ranks:
        for role, time in rank.exposed.items():
            group_class = class_of(role, roles)
            if group_class:
                exposed[group_class] += time.total_ns
            total += time.total_ns if group_class != PP else 0
    count = len(ranks)
    return Result(
        {group_class: time // count for group_class, time in exposed.items()},
        sum(rank.part("bubble") for rank in ranks) // count,
        sum(rank.part("compute") for rank in ranks) // count,
        total // count,
        sum(rank.wall_ns for rank in ranks) // count,
    )


def write_result(result: Result, name: str, path: Path) -> None:
    """Write header and row as SimAI-Analytical does: µs, with the share of the total time."""
    parts = [
        *(result.exposed_ns[group_class] for group_class in (DP, DP_EP, TP, EP, PP)),
        result.bubble_ns,
        result.compute_ns,
        result.total_exposed_ns,
    ]
    cells = [f"{time / _NS_PER_US:.0f} ({_percent(time, result.wall_ns)})" for time in parts]
    row = [name.replace(",", "_"), *cells, f"{result.wall_ns / _NS_PER_US:.0f}"]
    path.write_text(f"{', '.join(COLUMNS)}\n{', '.join(row)}\n", encoding="utf-8")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "–"


def write_options(shares: Iterable[Overlap], path: Path) -> str:
    """Write the overlap ratios as options of SimAI-Analytical, on one line, and return them."""
    options = " ".join(f"{share.option} {share.ratio:.4f}" for share in shares if share.ratio is not None)
    path.write_text(f"{options}\n", encoding="utf-8")
    return options
