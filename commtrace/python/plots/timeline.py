"""The timeline of a step as a figure: a row per rank, with its work, its stalls and what its host did."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from commtrace.analysis.timeline import BUBBLE as BUBBLE_STATE
from commtrace.analysis.timeline import WAIT, Columns, Outline, RankBoxes, Timeline, representatives
from commtrace.errors import ConfigurationError
from commtrace.python.plots.style import (
    BOX_HEIGHT,
    BUBBLE,
    COLOURS,
    MICROBATCH_COLOURS,
    SMALL,
    WIDTH,
    Box,
    Fill,
    Plot,
    add_boxes,
    add_legend,
    exposed,
    label_rows,
    new_plot,
)
from commtrace.trace.inputs import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ColourBy = Literal["kind", "microbatch"]

MANY_RANKS: Final = 24
"""Of more ranks, the median and the slowest of each stage are drawn, as on the page."""

_ROW_INCHES: Final = 0.3
_NARROWEST: Final = 1 / 4000
"""Share of the step that is still drawn: narrower boxes are widened to it, and of several at one place one is drawn."""

_POINTS_PER_CHARACTER: Final = 4.2
_DEEPEST: Final = 4
_INSET: Final = BOX_HEIGHT * 4 / 30
_HOST_HEIGHT: Final = BOX_HEIGHT * 6 / 30
_STALL_INSET: Final = BOX_HEIGHT * 0.55
_KINDS: Final = ("forward", "backward", "recompute", "optimizer", "data", "checkpoint", "gc")
_WEIGHT: Final = re.compile("wgrad|weight")

# Layers of the drawing, by what covers what: work is nested in work, stalls interrupt it.
_ROW_LAYER, _WORK_LAYER, _STALL_LAYER, _HOST_LAYER, _TEXT_LAYER = 0, 1, 6, 7, 8


class _Row(NamedTuple):
    rank_index: int  # in the ranks of the outline
    label: str


class _Label(NamedTuple):
    x: float
    y: float
    text: str
    colour: str


def draw_timeline(
    timeline: Timeline, step: int, run_id: str, ranks: Collection[int] | None = None, colour_by: ColourBy = "kind"
) -> Plot:
    """Return the figure of one step.

    Args:
        ranks: global ranks to draw, in order; by default all, or of many the median and the slowest of each stage.
        colour_by: colours of forwards and backwards: by what they are, or by microbatch.

    Raises:
        ConfigurationError: none of the ranks recorded the step.
        MissingExtraError: matplotlib is not installed.
    """
    outline = timeline.outline()
    rows = _rows(timeline, step, outline, ranks)
    boxes_of = {boxes["rank_index"]: boxes for boxes in timeline.step(step, {row.rank_index for row in rows})["ranks"]}
    duration_ms = timeline.duration_ns(step) / 1e6
    drawing = _Drawing(outline, colour_by, duration_ms)
    for position, row in enumerate(rows):
        drawing.add_rank(boxes_of[row.rank_index], position)
    title = f"{run_id} · {'whole recording' if step < 0 else f'step {step}'} · {duration_ms:.4g} ms"
    caption = f"{_clocks(outline)} {_shown(len(rows), len(outline['ranks']), is_choice=ranks is not None)}".strip()
    with new_plot(len(rows) * _ROW_INCHES + 1.3, title, caption) as (plot, axes):
        drawing.draw(axes)
        label_rows(axes, [row.label for row in rows])
        axes.set_xlim(0, duration_ms)
        axes.set_xlabel("ms after the begin of the step")
        add_legend(axes, drawing.legend())
    return plot


def _rows(timeline: Timeline, step: int, outline: Outline, ranks: Collection[int] | None) -> list[_Row]:
    bounds = timeline.bounds(step)
    recorded = outline["ranks"]
    if ranks is None and len(bounds) > MANY_RANKS:
        stages = [rank["coordinates"].get("pp", 0) for rank in recorded]
        rows = []
        for _, (median, slowest) in sorted(representatives(bounds, stages).items()):
            if median != slowest:
                rows.append(_Row(median, f"median: {recorded[median]['label']}"))
            rows.append(_Row(slowest, f"{'slowest: ' * (median != slowest)}{recorded[slowest]['label']}"))
        return rows
    rows = [
        _Row(rank_bounds.rank_index, recorded[rank_bounds.rank_index]["label"])
        for rank_bounds in bounds
        if ranks is None or recorded[rank_bounds.rank_index]["rank"] in ranks
    ]
    if not rows:
        raise ConfigurationError(f"no rank of these recorded step {step}: {', '.join(map(str, sorted(ranks or ())))}")
    return rows


class _Drawing:
    """All boxes of a figure by look, so that each look becomes one collection."""

    def __init__(self, outline: Outline, colour_by: ColourBy, duration_ms: float) -> None:
        self._outline = outline
        self._colour_by = colour_by
        self._narrowest = max(duration_ms * _NARROWEST, 1e-9)
        self._points_per_ms = 72 * WIDTH * 0.8 / max(duration_ms, 1e-9)
        self._boxes: defaultdict[tuple[int, Fill], list[Box]] = defaultdict(list)
        self._narrow: set[tuple[int, Fill, float, int]] = set()
        self._labels: list[_Label] = []
        # For the legend, in the order of appearance: roles without a colour of their own share one.
        self._meanings: defaultdict[Fill, dict[str, None]] = defaultdict(dict)

    def add_rank(self, rank: RankBoxes, position: int) -> None:
        top = position - BOX_HEIGHT / 2
        self._add(_ROW_LAYER, Fill("row"), rank["start"], rank["end"] - rank["start"], top, BOX_HEIGHT)
        self._add_work(rank["work"], rank["stalls"], top)
        self._add_stalls(rank["stalls"], top)
        host = rank["host"]
        for kind, start, duration in zip(host["kind"], host["start"], host["duration"], strict=True):
            name = self._outline["kinds"][kind]
            colour = name if name in _KINDS else "span"
            self._meanings[Fill(colour)][colour if colour == name else "other spans"] = None
            self._add(_HOST_LAYER, Fill(colour), start, duration, top + BOX_HEIGHT - _HOST_HEIGHT, _HOST_HEIGHT)

    def _add_work(self, work: Columns, stalls: Columns, top: float) -> None:
        nested = sorted(start for start, depth in zip(stalls["start"], stalls["depth"], strict=True) if depth > 0)
        columns = (work[name] for name in ("kind", "name", "start", "duration", "microbatch", "chunk", "depth"))
        for kind_code, name_code, start, duration, microbatch, chunk, depth in zip(*columns, strict=True):
            kind = self._outline["kinds"][kind_code]
            name = self._outline["names"][name_code] if name_code >= 0 else ""
            fill = self._work_fill(kind, name, microbatch)
            inset = min(depth, _DEEPEST) * _INSET
            self._add(_WORK_LAYER + min(depth, _DEEPEST), fill, start, duration, top + inset, BOX_HEIGHT - inset)
            number = f"{microbatch}·{chunk}" if chunk > 0 else str(microbatch)
            text = number if microbatch >= 0 else printable(name or kind)
            room = self._points_per_ms * duration / 1e6
            if not depth and len(text) * _POINTS_PER_CHARACTER + 2 <= room:
                ink = COLOURS.get(f"on-{fill.colour}", COLOURS["text"])
                # Above the stalls inside the box, which cover its lower part.
                is_interrupted = bisect_left(nested, start) < bisect_left(nested, start + duration)
                middle = (_STALL_INSET if is_interrupted else BOX_HEIGHT) / 2
                self._labels.append(_Label((start + duration / 2) / 1e6, top + middle, text, ink))

    def _work_fill(self, kind: str, name: str, microbatch: int) -> Fill:
        if self._colour_by == "microbatch" and microbatch >= 0 and kind in ("forward", "backward"):
            soft = "-soft" if kind == "backward" else ""
            fill = Fill(f"microbatch-{microbatch % MICROBATCH_COLOURS}{soft}")
            if microbatch % MICROBATCH_COLOURS == 0:
                self._meanings[fill][f"{kind}, by microbatch"] = None
            return fill
        if kind == "backward" and _WEIGHT.search(name):
            fill, meaning = Fill("backward-weight"), "backward of weights"
        elif kind in _KINDS:
            fill, meaning = Fill(kind), kind
        else:
            fill, meaning = Fill("span"), "other spans"
        self._meanings[fill][meaning] = None
        return fill

    def _add_stalls(self, stalls: Columns, top: float) -> None:
        columns = (stalls[name] for name in ("state", "role", "start", "duration", "depth"))
        for state, role_code, start, duration, depth in zip(*columns, strict=True):
            role = self._outline["roles"][role_code]
            if state == BUBBLE_STATE:
                fill, meaning = BUBBLE, "pipeline bubble"
            else:
                fill = exposed(role, is_wait=state == WAIT)
                meaning = f"{'wait' if state == WAIT else 'transfer'} {role}"
            self._meanings[fill][meaning] = None
            inset = _STALL_INSET if depth > 0 else 0.0
            self._add(_STALL_LAYER, fill, start, duration, top + inset, BOX_HEIGHT - inset)

    def _add(self, layer: int, fill: Fill, start: int, duration: int, top: float, height: float) -> None:
        x, width = start / 1e6, duration / 1e6
        if width < self._narrowest:
            cell = (layer, fill, top, int(x / self._narrowest))
            if cell in self._narrow:
                return
            self._narrow.add(cell)
            width = self._narrowest
        self._boxes[layer, fill].append(Box(x, top, width, height))

    def draw(self, axes: Axes) -> None:
        coarse = 4 / self._points_per_ms
        for (layer, fill), boxes in sorted(self._boxes.items()):
            gap = 0 if layer == _ROW_LAYER else coarse
            add_boxes(axes, boxes, fill, ", ".join(self._meanings.get(fill, [fill.colour])), layer=layer, gap=gap)
        for label in self._labels:
            axes.text(
                label.x,
                label.y,
                label.text,
                color=label.colour,
                fontsize=SMALL,
                ha="center",
                va="center_baseline",
                zorder=_TEXT_LAYER,
                clip_on=True,
            )

    def legend(self) -> Mapping[str, Fill]:
        order = {colour: number for number, colour in enumerate(COLOURS)}
        fills = sorted(self._meanings, key=lambda fill: (bool(fill.hatch), order[fill.hatch or fill.colour]))
        return {", ".join(self._meanings[fill]): fill for fill in fills}


def _clocks(outline: Outline) -> str:
    if len({rank["host"] for rank in outline["ranks"]}) == 1:
        return "All ranks are on the clock of one host."
    residual = outline["residual_ns"]
    if residual is None:
        return "The hosts' clocks could not be aligned: the order of events on different hosts is unknown."
    return f"The hosts' clocks agree to {residual['p99'] / 1e3:.3g} µs (p99)."


def _shown(count: int, of: int, *, is_choice: bool) -> str:
    if is_choice:
        return f"{count} of {of:,} ranks." if count < of else ""
    return f"Of {of:,} ranks, the median and the slowest of each stage." if of > MANY_RANKS else ""
