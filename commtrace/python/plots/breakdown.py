"""The mean step of ranks, or of groups of them, as stacked bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.breakdown.states import TRANSFER, WAIT
from commtrace.errors import ConfigurationError
from commtrace.python.plots.style import (
    BOX_HEIGHT,
    BUBBLE,
    SMALL,
    Box,
    Fill,
    Plot,
    add_boxes,
    add_legend,
    exposed,
    label_rows,
    new_plot,
)

By = Literal["rank", "stage", "host", "replica"]

MOST_BARS: Final = 64
"""Of more ranks, stages or hosts are drawn unless ranks are asked for, as on the page."""

_ROW_INCHES: Final = 0.24

_GROUPS: Final[Mapping[str, Callable[[RankMean], tuple[int, str]]]] = {
    "stage": lambda rank: (rank.coordinates.get("pp", 0), f"stage {rank.coordinates.get('pp', 0)}"),
    "host": lambda rank: (0, rank.host),
    "replica": lambda rank: (rank.coordinates.get("dp", 0), f"replica {rank.coordinates.get('dp', 0)}"),
}
"""The group of a rank: its place in the order, and its name."""


class _Bar(NamedTuple):
    label: str
    ranks: Sequence[RankMean]

    def mean_ms(self, name: str) -> float:
        return float(np.mean([_parts(rank).get(name, 0) for rank in self.ranks])) / 1e6

    @property
    def wall_ms(self) -> float:
        return float(np.mean([rank.wall_ns for rank in self.ranks])) / 1e6


def draw_breakdown(means: Sequence[RankMean], run_id: str, num_steps: int, by: By | None = None) -> Plot:
    """Return the figure of these mean steps.

    Args:
        num_steps: number of steps that the means are over, for the caption.
        by: one bar per rank, or the mean of the ranks of each stage, host or data-parallel replica. By default ranks,
            or stages if there are many.

    Raises:
        ConfigurationError: ``by`` is none of these.
        MissingExtraError: matplotlib is not installed.
    """
    bars = _bars(means, by)
    roles = sorted({state.detail for rank in means for state in rank.of_state if state.kind in (WAIT, TRANSFER)})
    present = {name for rank in means for name, time in _parts(rank).items() if time} | {"other"}
    looks = {name: fill for name, fill in _looks(roles).items() if name in present}
    longest = max((bar.wall_ms for bar in bars), default=0) or 1
    caption = f"Mean over {num_steps} step{'s' * (num_steps != 1)}. The parts of a bar add up to its wall time."
    with new_plot(len(bars) * _ROW_INCHES + 1.5, f"{run_id} · where the time of a step goes", caption) as (plot, axes):
        ends = [0.0] * len(bars)
        for name, fill in looks.items():
            boxes = []
            for position, bar in enumerate(bars):
                width = bar.mean_ms(name)
                boxes.append(Box(ends[position], position - BOX_HEIGHT / 2, width, BOX_HEIGHT))
                ends[position] += width
            add_boxes(axes, boxes, fill, name, gap=longest / 200)
        for position, bar in enumerate(bars):
            axes.text(bar.wall_ms + longest / 150, position, f"{bar.wall_ms:.4g} ms", fontsize=SMALL, va="center")
        label_rows(axes, [bar.label for bar in bars])
        axes.set_xlim(0, longest * 1.08)
        axes.set_xlabel("ms per step")
        add_legend(axes, looks)
    return plot


def _bars(means: Sequence[RankMean], by: str | None) -> list[_Bar]:
    if by is None:
        has_stages = len({rank.coordinates.get("pp") for rank in means}) > 1
        by = "rank" if len(means) <= MOST_BARS else "stage" if has_stages else "host"
    if by not in get_args(By):
        raise ConfigurationError(f"by={by!r}: write one of {', '.join(get_args(By))}")
    if by == "rank":
        return [_Bar(f"rank {rank.rank} · {rank.host}", [rank]) for rank in means]
    groups: dict[tuple[int, str], list[RankMean]] = {}
    for rank in means:
        groups.setdefault(_GROUPS[by](rank), []).append(rank)
    return [_Bar(f"{name} · mean of {len(members)}", members) for (_, name), members in sorted(groups.items())]


def _looks(roles: Sequence[str]) -> dict[str, Fill]:
    """Return the parts of a step in the order in which they are stacked."""
    stalls = {
        f"{'wait' if is_wait else 'transfer'} {role}": exposed(role, is_wait=is_wait)
        for role in roles
        for is_wait in (True, False)
    }
    return {
        "compute": Fill("compute"),
        **stalls,
        "exposed memory": Fill("span"),
        "pipeline bubble": BUBBLE,
        "replay of graphs": Fill("span", "other"),
        **{name: Fill(name) for name in ("idle", "data", "checkpoint", "gc")},
        "between steps": Fill("idle", "other"),
        "other": Fill("other"),
    }


def _parts(rank: RankMean) -> dict[str, int]:
    """Return the parts of a rank's step, ns; they add up to its wall time."""
    stalls = {
        f"{'wait' if state.kind == WAIT else 'transfer'} {state.detail}": time
        for state, time in rank.of_state.items()
        if state.kind in (WAIT, TRANSFER)
    }
    parts = {
        "exposed memory": "memory",
        "pipeline bubble": "bubble",
        "replay of graphs": "replay",
        "between steps": "between",
    }
    names = (
        "compute", "exposed memory", "pipeline bubble", "replay of graphs", "idle", "data", "checkpoint", "gc",
        "between steps", "other",
    )  # fmt: skip
    return stalls | {name: rank.part(parts.get(name, name)) for name in names}
