"""Colours, boxes and files of all figures. Only this module imports matplotlib, when a figure is drawn."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.trace.inputs import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# Those of the page's light theme, viewer/web/src/viewer.css; a test compares them.
COLOURS: Final[Mapping[str, str]] = {
    "surface": "#ffffff",
    "text": "#1b2330",
    "muted": "#5b6675",
    "line": "#d9dee6",
    "row": "#eef1f5",
    "compute": "#3e5a8a",
    "forward": "#2f6fb7",
    "on-forward": "#ffffff",
    "backward": "#f0a830",
    "on-backward": "#2b1c00",
    "backward-weight": "#c9832a",
    "on-backward-weight": "#ffffff",
    "recompute": "#f7d493",
    "on-recompute": "#2b1c00",
    "optimizer": "#4b5568",
    "on-optimizer": "#ffffff",
    "span": "#b9c4d3",
    "on-span": "#1b2330",
    "bubble": "#9aa5b4",
    "bubble-soft": "#e3e7ed",
    "data": "#8c6d46",
    "checkpoint": "#3f4a5a",
    "gc": "#6e2c4f",
    "idle": "#ccd3dc",
    "other": "#e3e7ed",
    "tp": "#2a9d8f",
    "pp": "#c8553d",
    "dp": "#8e4a9e",
    "cp": "#8a8d2f",
    "ep": "#b0417a",
    "embedding": "#7f9a55",
    "role": "#6fa3c7",
    "microbatch-0": "#0072b2",
    "microbatch-1": "#e69f00",
    "microbatch-2": "#009e73",
    "microbatch-3": "#cc79a7",
    "microbatch-4": "#56b4e9",
    "microbatch-5": "#d55e00",
    "microbatch-6": "#b8a800",
    "microbatch-7": "#6b6b6b",
    "microbatch-0-soft": "#8fc3e3",
    "microbatch-1-soft": "#f5d28a",
    "microbatch-2-soft": "#8ad3bd",
    "microbatch-3-soft": "#e9c6da",
    "microbatch-4-soft": "#b8e0f7",
    "microbatch-5-soft": "#f0b78d",
    "microbatch-6-soft": "#e6de8a",
    "microbatch-7-soft": "#bdbdbd",
    "heat-0": "#fdf6e3",
    "heat-1": "#fbd58b",
    "heat-2": "#f08c2e",
    "heat-3": "#b84a12",
    "heat-4": "#5c2108",
}
MICROBATCH_COLOURS: Final = 8

_ROLES: Final = frozenset({"tp", "pp", "dp", "cp", "ep", "embedding"})
_FAMILIES: Final = {"dp-cp": "dp", "expert-dp": "dp", "expert-tp": "tp", "position-embedding": "embedding"}

WIDTH: Final = 10.0
"""Of a figure, inches."""

BOX_HEIGHT: Final = 0.8
"""Of a row, whose centre is a whole number on the y axis."""

SMALL: Final = 6.5
"""Size of text inside boxes, points."""

_SETTINGS: Final[dict[str, object]] = {
    # Names in a recording may hold "$"; nothing in them is a formula.
    "text.parse_math": False,
    "text.usetex": False,
    "font.size": 8,
    "text.color": COLOURS["text"],
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["line"],
    "ytick.labelcolor": COLOURS["text"],
    "hatch.linewidth": 0.7,
    # Text stays text, which can be searched and edited; equal figures are equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "commtrace",
    "pdf.fonttype": 42,
}

_DOTS_PER_INCH: Final = 150

_METADATA: Final[Mapping[str, Mapping[str, None]]] = {
    ".svg": {"Date": None},
    ".png": {},
    ".pdf": {"CreationDate": None},
}
"""By suffix of a file: what matplotlib would write and a file of the same figure must not hold."""


class Fill(NamedTuple):
    """The look of a box; names of :data:`COLOURS`."""

    colour: str
    hatch: str = ""  # colour of the hatching; empty for none


class Box(NamedTuple):
    """A rectangle, in units of the axes."""

    x: float
    y: float  # of its upper edge: y grows downwards
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure. A notebook shows it; ``figure`` is matplotlib's own, to be changed before it is saved."""

    figure: Figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figure as SVG, PNG or PDF, by the suffix of the path.

        Raises:
            ConfigurationError: the suffix is none of these.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in _METADATA:
            raise ConfigurationError(f"{os.fspath(path)}: name a file that ends in {', '.join(_METADATA)}")
        with _settings():
            self.figure.savefig(path, format=suffix[1:], dpi=_DOTS_PER_INCH, metadata=dict(_METADATA[suffix]))

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        with _settings():
            self.figure.savefig(content, format="png", dpi=_DOTS_PER_INCH)
        return content.getvalue()


def role_colour(role: str) -> str:
    """Return the name of the colour of a role."""
    name = _FAMILIES.get(role, role)
    return name if name in _ROLES else "role"


def exposed(role: str, *, is_wait: bool) -> Fill:
    """Return the look of a stall on communication: hatched until the last participant has arrived."""
    colour = role_colour(role)
    return Fill("surface", colour) if is_wait else Fill(colour)


BUBBLE: Final = Fill("bubble-soft", "bubble")


@contextmanager
def new_plot(height: float, title: str, caption: str) -> Iterator[tuple[Plot, Axes]]:
    """Yield a figure with one pair of axes to draw on.

    Args:
        height: inches.
        caption: what a reader of the figure alone must know, below it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(printable(title), x=0.005, ha="left", fontsize=10, fontweight="bold")
        figure.supxlabel(caption, x=0.005, ha="left", fontsize=7, color=COLOURS["muted"], wrap=True)
        yield Plot(figure), figure.subplots()


@contextmanager
def _settings() -> Iterator[None]:
    try:
        import matplotlib.style
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'commtrace[plot]'") from error
    with matplotlib.style.context(["default", _SETTINGS]):
        yield


def add_boxes(axes: Axes, boxes: Sequence[Box], fill: Fill, label: str, *, layer: float = 1, gap: float = 0) -> None:
    """Draw all boxes of one look as one collection.

    Args:
        label: of the collection, by which a program finds it again.
        layer: higher ones are drawn above lower ones.
        gap: boxes at least this wide, in units of the x axis, get an outline in the colour of the page; 0 for none.
    """
    from matplotlib.collections import PolyCollection

    sides = np.array(boxes).reshape(-1, 4)
    left, top, right, bottom = sides[:, 0], sides[:, 1], sides[:, 0] + sides[:, 2], sides[:, 1] + sides[:, 3]
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    edge = fill.hatch or "surface"
    collection = PolyCollection(
        list(corners),
        facecolors=COLOURS[fill.colour],
        edgecolors=COLOURS[edge],
        linewidths=np.where((sides[:, 2] >= gap) & (gap > 0) & (not fill.hatch), 0.5, 0.0),
        hatch="//////" if fill.hatch else None,
        zorder=layer,
    )
    collection.set_label(label)
    axes.add_collection(collection, autolim=False)


def add_legend(axes: Axes, entries: Mapping[str, Fill]) -> None:
    """Explain the looks in a line or several above the axes, in the order of the entries."""
    from matplotlib.patches import Patch

    patches = [
        Patch(
            facecolor=COLOURS[fill.colour],
            edgecolor=COLOURS[fill.hatch or fill.colour],
            hatch="//////" if fill.hatch else None,
            linewidth=0,
        )
        for fill in entries.values()
    ]
    axes.legend(
        patches,
        list(map(printable, entries)),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=6,
        borderaxespad=0.2,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
        fontsize=7.5,
    )


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows, the first one at the top."""
    axes.set_yticks(range(len(labels)), list(map(printable, labels)))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def heat_colours() -> Colormap:
    """Return the colours of a heat map, from faint to strong; cells without a value have that of an empty row."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = [COLOURS[f"heat-{stop}"] for stop in range(5)]
    return LinearSegmentedColormap.from_list("commtrace-heat", stops)
