"""Divides the time of a run's steps beyond the ideal by cause: a sum that adds up.

The steps are replayed several times, each time with one more thing ideal. What a replay is shorter than the one before
it is the cost of that thing.

>>> lost = lost_time(program, findings.verdicts)                # doctest: +SKIP
>>> lost.steps_ns - lost.ideal_ns == sum(lost.costs_ns().values())  # doctest: +SKIP
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from commtrace.analysis.keys import grouped, pack, sort_groups
from commtrace.analysis.replay.ideal import equal_stages
from commtrace.analysis.replay.program import Program
from commtrace.analysis.statistics import grouped_median
from commtrace.analysis.stragglers.verdict import Verdict
from commtrace.trace.json_values import JsonObject
from commtrace.trace.spans import Int64

_PART_OF_CAUSE: Final[Mapping[str, str | None]] = {
    "data": "input_ns",
    "gc": "rest_ns",
    "checkpoint": "rest_ns",
    "evaluation": "rest_ns",
    "communication": "exposed_communication_ns",
    "stage_imbalance": None,
    "sequence_length_imbalance": None,
}
"""Where the cost of a verdict is found; of other causes it is in the imbalance. None: it stays there, being one."""


@dataclass(frozen=True, slots=True)
class LostTime:
    """The time in steps: the mean over the ranks, summed over the steps; ns.

    Attributes:
        num_steps: how many.
        gpus: of the job; None where it did not run on GPUs.
        steps_ns: the whole.
        ideal_ns: what the work of the mean rank takes when like work takes as long as on the quicker ranks.
        stragglers_ns: what the verdicts on slow ranks cost.
        imbalance_ns: other differences between like work: uneven stages and sequences, scatter.
        exposed_communication_ns: transfers that nothing hides.
        bubble_ns: what the schedule of a pipeline makes equal stages wait.
        input_ns: waiting for input.
        rest_ns: garbage collection, checkpoints, evaluation, launches, and what the replay does not see.
    """

    num_steps: int
    gpus: int | None
    steps_ns: int
    ideal_ns: int
    stragglers_ns: int
    imbalance_ns: int
    exposed_communication_ns: int
    bubble_ns: int
    input_ns: int
    rest_ns: int

    def costs_ns(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)[4:]}

    def plus(self, other: LostTime) -> LostTime:
        """Return the sum of two parts of one job."""
        names = [field.name for field in fields(self) if field.name != "gpus"]
        return LostTime(gpus=self.gpus, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def to_json(self) -> JsonObject:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def lost_time(program: Program, verdicts: Iterable[Verdict], gpus: int | None = None) -> LostTime:
    """Add up what was lost.

    Args:
        program: of clocks that agree.
        verdicts: on stragglers, of the same steps.
        gpus: of the job; None where it did not run on GPUs.
    """
    segments = program.segments
    work_ns = _ideal_work(program)
    at_once = np.zeros(len(program.transfers), np.int64)
    without_fixed = replace(program, edges=replace(program.edges, fixed_ns=np.zeros_like(program.edges.fixed_ns)))

    steps_ns = _sum(program.measured_step_times())
    as_replayed = _sum(program.step_times())
    without_input = _sum(program.step_times(segments.total_ns - segments.data_ns))
    only_work = _sum(program.step_times(segments.work_ns))
    even = _sum(program.step_times(work_ns))
    without_transfers = _sum(program.step_times(work_ns, at_once))
    without_launches = _sum(without_fixed.step_times(work_ns, at_once))
    ideal_ns = round(int(work_ns.sum()) / len(program.ranks))

    is_pipeline = len(np.unique(segments.stage)) > 1
    waiting = without_launches - ideal_ns
    parts = {
        "imbalance_ns": only_work - even,
        "exposed_communication_ns": even - without_transfers,
        "bubble_ns": waiting if is_pipeline else 0,
        "input_ns": as_replayed - without_input,
        "rest_ns": steps_ns
        - as_replayed
        + (without_input - only_work)
        + (without_transfers - without_launches)
        + (0 if is_pipeline else waiting),
    }
    stragglers_ns = 0
    for verdict in verdicts:
        part = _PART_OF_CAUSE.get(verdict.cause, "imbalance_ns")
        if part is not None:
            cost_ns = min(round(verdict.cost_ms_per_step * 1e6 * len(program.steps)), max(parts[part], 0))
            parts[part] -= cost_ns
            stragglers_ns += cost_ns
    return LostTime(len(program.steps), gpus, steps_ns, ideal_ns, stragglers_ns, **parts)


def _sum(step_ns: Int64) -> int:
    return int(step_ns.sum())


def _ideal_work(program: Program) -> Int64:
    """Return what each segment takes on the quicker ranks, made equal over the stages."""
    segments = program.segments
    nothing = np.zeros(len(segments), np.int64)
    work_ns = _typical_of_quicker_ranks(program)
    quick = replace(
        segments, work_ns=work_ns, data_ns=nothing, gc_ns=nothing, checkpoint_ns=nothing, evaluation_ns=nothing
    )
    return equal_stages(replace(program, segments=quick), work_ns)


def _typical_of_quicker_ranks(program: Program) -> Int64:
    """Return the median of the same work on each rank; of these, the lower quartile over ranks."""
    segments, work = program.segments, program.work
    if not len(segments):
        return segments.work_ns
    example, entry = grouped(pack([work, segments.rank]))
    medians = grouped_median(entry, segments.work_ns, len(example))
    by_work = np.lexsort((medians, work[example]))
    _, begins = sort_groups(work[example])
    size = np.diff(np.append(begins, len(example)))
    quartile = medians[by_work[begins + (size - 1) // 4]]
    return np.asarray(np.rint(quartile[work]), np.int64)
