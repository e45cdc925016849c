"""What is drawn in a figure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from commtrace.analysis.chain import analyse
from commtrace.analysis.windows.run import OpenedRun
from commtrace.python.plots.run_plots import RunPlots
from commtrace.python.plots.style import Plot
from commtrace.trace.run import Run


def plots_of(run: Run) -> RunPlots:
    return RunPlots(OpenedRun.of(analyse(run)))


def boxes(plot: Plot) -> Mapping[str, list[tuple[float, float, int]]]:
    """By meaning: begin and end, ms, and the row, of every box."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for collection in plot.figure.axes[0].collections:
        for path in collection.get_paths():
            corners = np.asarray(path.vertices)
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            row = round((top + bottom) / 2)
            found.setdefault(str(collection.get_label()), []).append((round(left, 6), round(right, 6), row))
    return found
