"""A value of every rank as a heat map: by two parallel dimensions, or over the steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.rank_steps import RankSteps, own_and_typical_work
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.statistics import Float64
from commtrace.errors import ConfigurationError
from commtrace.python.plots.style import COLOURS, SMALL, Plot, heat_colours, new_plot
from commtrace.trace.inputs import printable
from commtrace.trace.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOWNESS: Final = "slowness"
"""The value that needs a replay of the steps."""

_MOST_NUMBERED: Final = 400  # cells whose values can be read
_MOST_COLUMNS_NUMBERED: Final = 16
_MOST_VECTORS: Final = 4096  # more cells are a bitmap inside an SVG or PDF
_MOST_TICKS: Final = 32
_LEAST_SPREAD: Final = 0.05
"""Differences below this share are noise, which gets no strong colour."""
_FAR_OFF: Final = 4
"""One cell so much further than 98 % of them does not hide the differences of all others."""


class RankValues(NamedTuple):
    """Values of ranks in blocks of steps, as fractions: those of several blocks are added above and below."""

    above: Float64  # ranks × blocks; nan where it is not known
    below: Float64


class _Quantity(NamedTuple):
    label: str  # with the unit
    meaning: str
    values: Callable[[RankSteps], RankValues]
    low_is_bad: bool = False
    typical: float | None = None  # the faintest colour, where it is known beforehand


def _per_step_ms(*names: str) -> Callable[[RankSteps], RankValues]:
    def values(times: RankSteps) -> RankValues:
        total = sum((times.of(name) for name in names), np.zeros_like(times.of("steps")))
        return _known(total / 1e6, times.of("steps"))

    return values


def _known(above: npt.NDArray[np.floating], below: npt.NDArray[np.number]) -> RankValues:
    unknown = below <= 0
    return RankValues(np.where(unknown, np.nan, above), np.where(unknown, np.nan, below))


_QUANTITIES: Final[Mapping[str, _Quantity]] = {
    "compute": _Quantity("ms per step", "the compute stream worked", _per_step_ms("compute")),
    "wait": _Quantity(
        "ms per step", "stalls before the last participant had arrived, without bubbles", _per_step_ms("wait")
    ),
    "exposed": _Quantity("ms per step", "stalls on communication, without bubbles", _per_step_ms("wait", "transfer")),
    "bubble": _Quantity("ms per step", "stalls on a pipeline neighbour that had not sent yet", _per_step_ms("bubble")),
    "step": _Quantity("ms", "the whole step", _per_step_ms("wall")),
    "bandwidth": _Quantity(
        "GB/s",
        "bus bandwidth of calls of at least 1 MiB after the last member had arrived",
        lambda times: _known(times.of("bus_bytes").astype(float), times.of("bus_ns")),
        low_is_bad=True,
    ),
}

VALUES: Final = (SLOWNESS, *_QUANTITIES, "clock offset")


class _Grid(NamedTuple):
    rows: list[str]
    columns: list[str]
    values: Float64  # rows × columns; nan where nothing is known
    most_ranks: int  # in a cell


def draw_heat_map(
    recorded: Run,
    alignment: Alignment,
    times: RankSteps,
    work: StepStatistics | None,
    value: str = SLOWNESS,
    rows: str | None = None,
    columns: str | None = None,
    named: Collection[int] = (),
) -> Plot:
    """Return the figure of one of the :data:`VALUES`.

    Args:
        work: needed for ``slowness`` only; None if the steps could not be replayed.
        rows: ``rank``, ``host`` or a parallel dimension in which the ranks differ; by default ``dp``, else ``rank``.
        columns: the same, or ``step``; by default ``pp``, else ``step``.
        named: ranks that findings name: ``slowness`` compares with the others of their stage.

    Raises:
        ConfigurationError: the value or a dimension is none of these, or the value is not known of this run.
        MissingExtraError: matplotlib is not installed.
    """
    quantity = _quantity(value, recorded, alignment, work, named)
    values = quantity.values(times)
    if np.isnan(values.above).all():
        raise ConfigurationError(f"{value} is not known of this run: choose another value")
    groups = _dimensions(recorded)
    is_grid = {"dp", "pp"} <= groups.keys()
    rows = rows or ("dp" if is_grid else "rank")
    columns = columns or ("pp" if is_grid else "step")
    for name, choices in ((rows, [*groups]), (columns, [*groups, "step"])):
        if name not in choices:
            raise ConfigurationError(f"{name!r} is no dimension of this run: write one of {', '.join(choices)}")
    grid = _grid(times, values, quantity, groups[rows], groups.get(columns))
    extreme = "lowest" if quantity.low_is_bad else "highest"
    several = f" A cell of several ranks shows the {extreme} of them." if grid.most_ranks > 1 else ""
    caption = f"{value}: {quantity.meaning}.{several}"
    title = f"{recorded.any_metadata.run_id} · {value} of ranks by {rows} and {columns}"
    height = min(max(0.24 * len(grid.rows), 0.8), 12) + 1.3
    with new_plot(height, title, caption) as (plot, axes):
        _draw(axes, grid, quantity)
    return plot


def _draw(axes: Axes, grid: _Grid, quantity: _Quantity) -> None:
    shown = np.ma.masked_invalid(grid.values)
    low, high = _colour_range(grid.values, quantity)
    colours = heat_colours()
    mesh = axes.pcolormesh(
        np.arange(len(grid.columns) + 1) - 0.5,
        np.arange(len(grid.rows) + 1) - 0.5,
        shown,
        cmap=colours.reversed() if quantity.low_is_bad else colours,
        vmin=low,
        vmax=high,
        edgecolors=COLOURS["surface"],
        linewidth=0.5 if grid.values.size <= _MOST_VECTORS else 0,
        rasterized=grid.values.size > _MOST_VECTORS,
    )
    axes.set_facecolor(COLOURS["row"])
    axes.invert_yaxis()
    _label(axes.set_yticks, grid.rows)
    _label(axes.set_xticks, grid.columns)
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelcolor=COLOURS["text"])
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(mesh, ax=axes, label=quantity.label, pad=0.01, fraction=0.03)
    bar.outline.set_visible(False)
    if grid.values.size <= _MOST_NUMBERED and len(grid.columns) <= _MOST_COLUMNS_NUMBERED:
        _number(axes, grid, mesh.to_rgba(grid.values))


def _number(axes: Axes, grid: _Grid, colours: Float64) -> None:
    """Write the value of every cell on its colour, in an ink that can be read there."""
    for (row, column), number in np.ndenumerate(grid.values):
        if not np.isnan(number):
            red, green, blue, _ = colours[row, column]
            ink = "#1b1b1b" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
            axes.text(column, row, f"{number:.4g}", ha="center", va="center", fontsize=SMALL, color=ink)


def _quantity(
    value: str, recorded: Run, alignment: Alignment, work: StepStatistics | None, named: Collection[int]
) -> _Quantity:
    if value in _QUANTITIES:
        return _QUANTITIES[value]

    def slowness(times: RankSteps) -> RankValues:
        work_of_rank, typical = own_and_typical_work(times, work, named)
        steps = times.of("steps")
        return _known(work_of_rank * steps.astype(float), typical * steps)

    def clock_offset(times: RankSteps) -> RankValues:
        offsets = {} if alignment.refused else {clock.host: clock.offset_ns for clock in alignment.hosts}
        offsets_ns = [offsets.get(recorded.ranks[rank].metadata.node, np.nan) for rank in times.ranks.tolist()]
        steps = times.of("steps")
        return _known(np.array(offsets_ns)[:, np.newaxis] / 1e3 * steps, steps)

    if value == SLOWNESS:
        meaning = "own work of a rank per step over the median of its stage's ranks that no finding names; 1 is typical"
        return _Quantity("× the median of the stage", meaning, slowness, typical=1.0)
    if value == "clock offset":
        return _Quantity("µs", "the clock of the rank's host against the reference, before correction", clock_offset)
    raise ConfigurationError(f"value={value!r}: write one of {', '.join(VALUES)}")


def _dimensions(run: Run) -> dict[str, dict[str, list[int]]]:
    """Return the ranks at each place of each dimension, by name of the place; dimensions of one place are left out."""
    dimensions: dict[str, dict[tuple[int, str], list[int]]] = {"rank": {}}
    for rank, trace in run.ranks.items():
        places = {name: (value, f"{name} {value}") for name, value in trace.coordinates.items()}
        for name, value in {"rank": (rank, f"rank {rank}"), **places, "host": (0, trace.metadata.node)}.items():
            dimensions.setdefault(name, {}).setdefault(value, []).append(rank)
    return {
        name: {label: ranks for (_, label), ranks in sorted(places.items())}
        for name, places in dimensions.items()
        if len(places) > 1 or name == "rank"
    }


def _grid(
    times: RankSteps,
    values: RankValues,
    quantity: _Quantity,
    rows: Mapping[str, Sequence[int]],
    columns: Mapping[str, Sequence[int]] | None,
) -> _Grid:
    """Return the cells; without ``columns`` they are blocks of steps. A cell shows the worst of its ranks."""
    worst = np.fmin if quantity.low_is_bad else np.fmax
    position = {rank: index for index, rank in enumerate(times.ranks.tolist())}
    if columns is None:
        names = [
            f"{first}" if first == last else f"{first}–{last}"
            for first, last in zip(times.first, times.last, strict=True)
        ]
        of_block = values.above / values.below
        cells = [
            worst.reduce(of_block[[position[rank] for rank in ranks if rank in position]], initial=np.nan)
            for ranks in rows.values()
        ]
        return _Grid([*rows], names, np.array(cells), max(map(len, rows.values())))
    with np.errstate(invalid="ignore"):  # 0 / 0 where nothing is known of a rank
        of_rank = np.nansum(values.above, axis=1) / np.nansum(values.below, axis=1)
    cells = []
    most = 0
    for rows_of_rank in rows.values():
        for columns_of_rank in columns.values():
            ranks = [position[rank] for rank in sorted({*rows_of_rank} & {*columns_of_rank}) if rank in position]
            most = max(most, len(ranks))
            cells.append(worst.reduce(of_rank[ranks], initial=np.nan))
    return _Grid([*rows], [*columns], np.array(cells).reshape(len(rows), len(columns)), most)


def _colour_range(values: Float64, quantity: _Quantity) -> tuple[float, float]:
    """Return the values of the faintest and of the strongest colour, as on the page."""
    known = np.sort(values[~np.isnan(values)])
    lowest, highest = float(known[0]), float(known[-1])
    if quantity.typical is not None:
        return quantity.typical, max(highest, quantity.typical + _LEAST_SPREAD)
    if quantity.low_is_bad:
        return min(lowest, highest * (1 - _LEAST_SPREAD)), highest
    usual = float(known[int((len(known) - 1) * 0.98)])
    high = usual if usual > lowest and highest - lowest > _FAR_OFF * (usual - lowest) else highest
    return lowest, max(high, lowest + max(abs(lowest) * _LEAST_SPREAD, 1e-6))


def _label(set_ticks: Callable[[list[int], list[str]], object], names: Sequence[str]) -> None:
    every = -(-len(names) // _MOST_TICKS)
    places = list(range(0, len(names), every))
    set_ticks(places, [printable(names[position]) for position in places])
