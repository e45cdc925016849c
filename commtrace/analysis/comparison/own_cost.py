"""What recording costs a job, from its own steps: those that were not recorded against those around them.

The cost is the mean difference between a stretch of quiet steps and as many steps before and after it, so that a slow
drift of the job cancels; its error is half of Student's 95 % interval of that mean (docs/own-cost.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.breakdown.run_steps import is_outlier
from commtrace.analysis.statistics import half_width_of_mean
from commtrace.findings.formatting import format_time
from commtrace.trace.json_values import JsonObject
from commtrace.trace.selection import QUIET_STEPS
from commtrace.trace.spans import Bool, Int64

FEWEST_STRETCHES: Final = 5
"""Quiet stretches from which a cost is told: of fewer the error is not known well."""

_SMALL_SHARE: Final = 0.02
"""Of a step. A bound above it says nothing good of the recorder, only that the steps are too uneven."""


@dataclass(frozen=True, slots=True)
class OwnCost:
    """The cost of recording in a run, ns per step."""

    stretches: int  # of steps that were not recorded, with recorded ones on both sides
    quiet_ns: int  # the mean length of a step that was not recorded
    cost_ns: int  # how much longer a recorded one is; chance can make it negative
    error_ns: int  # half of the 95 % interval

    @property
    def share(self) -> float:
        """Return the cost as a share of a step that was not recorded."""
        return self.cost_ns / self.quiet_ns

    @property
    def error_share(self) -> float:
        return self.error_ns / self.quiet_ns

    @property
    def is_seen(self) -> bool:
        """Return whether the cost is larger than its error."""
        return self.cost_ns > self.error_ns

    @property
    def most_share(self) -> float:
        """Return the upper end of the interval, as a share."""
        return max(self.share + self.error_share, 0.0)

    @property
    def sentence(self) -> str:
        """Return what recording costs, in one sentence."""
        by = f"by {self.stretches} stretches of steps that were not recorded"
        if self.is_seen:
            cost, error = format_time(self.cost_ns), format_time(self.error_ns)
            return f"Recording costs {_percent(self.share)} of a step: {cost} ± {error}, {by}."
        if self.most_share <= _SMALL_SHARE:
            return f"Recording costs too little to be seen: at most {_percent(self.most_share)} of a step, {by}."
        within = f"{_percent(self.share)} ± {_percent(self.error_share)}"
        return f"What recording costs is lost in the noise of the steps so far: {within} of a step, {by}."

    def to_json(self) -> JsonObject:
        return {
            "stretches": self.stretches,
            "quiet_ns": self.quiet_ns,
            "cost_ns": self.cost_ns,
            "error_ns": self.error_ns,
            "share": self.share,
            "error_share": self.error_share,
        }


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def own_cost(step: Int64, duration_ns: Int64, is_quiet: Bool, is_comparable: Bool) -> OwnCost | None:
    """Return the cost of recording; None from fewer than :data:`FEWEST_STRETCHES` stretches.

    Args:
        step: the numbers of the steps, in the order of time; as long as the following.
        duration_ns: the length of each.
        is_quiet: it was not recorded.
        is_comparable: neither a warm-up, nor of an attempt that was done again, nor incomplete.

    Outliers, as a checkpoint or a pause makes them, are left out on both sides: with the median of all steps as the
    measure they are the same steps, whether recorded or not.
    """
    usual = is_comparable.copy()
    usual[usual] = ~is_outlier(duration_ns[usual])
    quiet, differences = [], []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_quiet, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        side = min(QUIET_STEPS, first, len(step) - end)
        around = slice(first - side, end + side)
        recorded = np.r_[first - side : first, end : end + side]
        if not side or is_quiet[recorded].any() or not usual[around].all() or (np.diff(step[around]) != 1).any():
            continue
        quiet.append(float(duration_ns[first:end].mean()))
        differences.append(float(duration_ns[recorded].mean()) - quiet[-1])
    if len(differences) < FEWEST_STRETCHES:
        return None
    return OwnCost(
        stretches=len(differences),
        quiet_ns=round(float(np.mean(quiet))),
        cost_ns=round(float(np.mean(differences))),
        error_ns=round(half_width_of_mean(np.array(differences))),
    )
