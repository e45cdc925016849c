"""The utilization of a recorded job: the FLOPs of its model, by formula, over the time of its steps.

>>> recorded_utilization(summary, run).mfu                                # doctest: +SKIP
0.412
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commtrace.analysis.summary import Summary
from commtrace.analysis.utilization import Recompute, Utilization, peak_flops
from commtrace.errors import ConfigurationError
from commtrace.planning.flops import FORMULA, flops_per_sequence
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.recorded_job import has_sizes, recorded_job
from commtrace.trace.run import Run


class StepFlops(NamedTuple):
    """The FLOPs of a step of the whole job."""

    flops: float
    formula: str  # where they are from
    recompute: Recompute | None  # None if it is not known how much is computed again


def flops_of_step(model: Model, layout: Layout) -> StepFlops:
    """Return the FLOPs of a step.

    Raises:
        ConfigurationError: the layout does not fit the model.
    """
    layout.check(model)
    sequences = layout.dp * layout.microbatch * layout.microbatches
    planned: Recompute | None = None if layout.recompute == "selective" else layout.recompute
    return StepFlops(float(flops_per_sequence(model) * sequences), f"{FORMULA}, {sequences} sequences", planned)


def utilization_of(
    summary: Summary, work: StepFlops, *, peak: float | None = None, achievable: float | None = None
) -> Utilization:
    """Return the utilization of a job with steps.

    Args:
        peak: of one device, FLOP/s; by default that of the recorded device, where it is known.
        achievable: of one device as measured, FLOP/s.
    """
    run, budget = summary.run, summary.run_budget
    return Utilization(
        model_flops=work.flops,
        formula=work.formula,
        devices=run.world_size,
        device=run.device,
        step_ns=sum(rank.wall_ns for rank in summary.ranks) / len(summary.ranks),
        run_ns=None if budget is None else budget.job.wall_ns,
        run_steps=None if budget is None else len(np.unique(summary.all_steps.step)),
        peak=peak or peak_flops(run.device),
        achievable=achievable,
        recompute=work.recompute,
    )


def recorded_utilization(summary: Summary, recorded: Run) -> Utilization | None:
    """Return the utilization by the sizes that a job recorded; None without them, without steps, or without a peak."""
    if not (summary.ranks and has_sizes(recorded) and peak_flops(summary.run.device)):
        return None
    try:
        job = recorded_job(recorded)
        return utilization_of(summary, flops_of_step(job.model, job.layout))
    except ConfigurationError:  # sizes that contradict one another: the plan of the run says which
        return None
