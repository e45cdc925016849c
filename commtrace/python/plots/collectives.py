"""The bandwidth of measured collectives by the size of their tensors."""

from __future__ import annotations

from typing import Final

from commtrace.analysis.communication.baseline import NetworkBaseline
from commtrace.findings.formatting import format_ranges, ranges
from commtrace.python.plots.style import COLOURS, MICROBATCH_COLOURS, Plot, new_plot

_MARKERS: Final = "os^vDPX*<>"
_HEIGHT: Final = 5.0


def draw_collectives(baseline: NetworkBaseline) -> Plot:
    """Return the mean busbw of each operation and group, with a band from the smallest to the largest.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    made = baseline.made
    title = f"Bandwidth of collectives · {made.get('backend', '')} · {made.get('device', '')}"
    caption = "Lines: mean of the iterations. Bands: from the slowest to the quickest. Time is that of the last member."
    with new_plot(_HEIGHT, title, caption) as (plot, axes):
        for number, measurements in enumerate(baseline.by_group()):
            colour = COLOURS[f"microbatch-{number % MICROBATCH_COLOURS}"]
            sizes, bandwidths = (
                [measurement.num_bytes for measurement in measurements],
                [measurement.busbw_gbps for measurement in measurements],
            )
            marker = _MARKERS[number // MICROBATCH_COLOURS % len(_MARKERS)]
            group = f" in group {measurements[0].group}" if measurements[0].group else ""
            label = f"{measurements[0].operation}{group}: ranks {format_ranges(ranges(measurements[0].ranks))}"
            axes.plot(sizes, [each.mean for each in bandwidths], color=colour, marker=marker, markersize=3, label=label)
            low, high = [each.min for each in bandwidths], [each.max for each in bandwidths]
            axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("busbw, GB/s")
        axes.grid(color=COLOURS["line"], linewidth=0.5)
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return plot
