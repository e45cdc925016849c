"""What recording costs a job, from its own steps: those that were not recorded against those around them.

The cost is the mean difference between a stretch of quiet steps and as many steps before and after it, so that a slow
drift of the job cancels; its error is half of Student's 95 % interval of that mean (docs/own-cost.md).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.analysis.statistics import half_width_of_mean
from commtrace.findings.own_cost import OwnCost
from commtrace.trace.selection import QUIET_STEPS
from commtrace.trace.spans import Bool, Int64

FEWEST_STRETCHES: Final = 5
"""Quiet stretches from which a cost is told: of fewer the error is not known well."""

_LONGEST: Final = 2.0
"""In medians; see :func:`own_cost`."""


def own_cost(step: Int64, duration_ns: Int64, is_quiet: Bool, is_comparable: Bool) -> OwnCost | None:
    """Return the cost of recording; None from fewer than :data:`FEWEST_STRETCHES` stretches.

    Args:
        step: the numbers of the steps, in the order of time; as long as the following.
        duration_ns: the length of each.
        is_quiet: it was not recorded.
        is_comparable: neither a warm-up, nor of an attempt that was done again, nor incomplete.

    Stretches are left out in which, or around which, a step takes more than twice the median: a checkpoint, an
    evaluation or a pause, and nothing that recording does. A lower limit would leave out what is to be measured, as the
    writing thread slows some steps more than others.
    """
    usual = is_comparable.copy()
    if usual.any():
        usual &= duration_ns <= _LONGEST * np.median(duration_ns[usual])
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
        quiet_ns=max(1, round(float(np.mean(quiet)))),
        cost_ns=round(float(np.mean(differences))),
        error_ns=round(half_width_of_mean(np.array(differences))),
    )
