"""Facts about steps that were not recorded in detail: their times, and sums over their spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.matching.roles import role_of
from commtrace.analysis.statistics import Float64
from commtrace.trace import schema
from commtrace.trace.aggregates import read_aggregates
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.quiet import quiet_steps
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int32

_EVERY_STEP: Final = 1


class SampledStepTimes(NamedTuple):
    mean: int
    p50: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class SpanSum:
    """Spans of one kind, role and name in steps without detail: means per rank and step; the longest of all."""

    kind: str
    role: str
    name: str
    count: float
    time_ns: int
    num_bytes: int
    longest_ns: int

    def to_json(self) -> JsonObject:
        return {"bytes" if name == "num_bytes" else name: value for name, value in fields_to_json(self).items()}


class TriggeredSteps(NamedTuple):
    """Steps requested while the job ran."""

    id: str
    first: int
    end: int  # exclusive
    by: str
    late: dict[int, int]  # by rank that saw the request too late to begin with the others, its step


class Discarded(NamedTuple):
    """Files that ``ranks`` ranks deleted to keep to their budget, up to ``last_step``, at ``at_ns`` (epoch)."""

    ranks: int
    segments: int
    num_bytes: int
    last_step: int  # −1 before the first
    at_ns: int

    def to_json(self) -> JsonObject:
        return {"bytes" if name == "num_bytes" else name: value for name, value in fields_to_json(self).items()}


@dataclass(frozen=True, slots=True)
class RecordedDetail:
    """The share of a run that is in detail, and the known facts of the rest."""

    every: int  # one step in so many is in detail; 0: only on request
    steps: int
    steps_in_detail: int
    quiet_steps: int  # not recorded, to measure what recording costs
    step_time_ns: SampledStepTimes | None  # of all steps, each the mean over its ranks; None without steps
    sums: tuple[SpanSum, ...]  # of the steps without detail, the largest time first
    triggers: tuple[TriggeredSteps, ...]  # in the order of their steps
    discarded: Discarded | None


def find_detail(run: Run) -> RecordedDetail:
    samples = {int(trace.recording.get("sample", _EVERY_STEP)) for trace in run.ranks.values()}
    summed = {step for trace in run.ranks.values() for step in trace.aggregates if step >= 0}
    quiet = frozenset[int]().union(*(quiet_steps(trace.quiet) for trace in run.ranks.values()))
    steps, times = _step_times(run)
    return RecordedDetail(
        every=min(samples, default=_EVERY_STEP),
        steps=len(steps),
        steps_in_detail=len(steps) - int(np.isin(steps, [*summed, *quiet]).sum()),
        quiet_steps=int(np.isin(steps, [*quiet]).sum()),
        step_time_ns=_distribution(times.tolist()),
        sums=tuple(_sums(run)),
        triggers=tuple(_triggers(run)),
        discarded=_discarded(run.ranks.values()),
    )


def _step_times(run: Run) -> tuple[Int32, Float64]:
    """Return the numbers of all steps, and the mean time of each over its ranks."""
    steps, durations = [], []
    for trace in run.ranks.values():
        rows = trace.spans.kind == schema.STEP
        steps.append(trace.spans.step[rows])
        durations.append(trace.spans.end[rows] - trace.spans.start[rows])
    numbers, which = np.unique(np.concatenate(steps), return_inverse=True)
    which = which.reshape(-1)
    return numbers, np.bincount(which, np.concatenate(durations)) / np.bincount(which)


def _distribution(times: list[float]) -> SampledStepTimes | None:
    if not times:
        return None
    p50, p99 = np.percentile(times, (50, 99))
    return SampledStepTimes(round(sum(times) / len(times)), round(p50), round(p99), round(max(times)))


def _sums(run: Run) -> list[SpanSum]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    cells = 0
    for trace in run.ranks.values():
        for step, texts in trace.aggregates.items():
            if step < 0:
                continue
            cells += 1
            for aggregate in read_aggregates(texts):
                role = role_of(run, trace, aggregate.group, aggregate.peer) if aggregate.group >= 0 else ""
                total = totals.setdefault((aggregate.kind, role, aggregate.name), [0, 0, 0, 0])
                total[0] += aggregate.num_spans
                total[1] += aggregate.total_ns
                total[2] += aggregate.num_bytes
                total[3] = max(total[3], aggregate.longest_ns)
    return [
        SpanSum(kind, role, name, count / cells, round(total_ns / cells), round(num_bytes / cells), longest_ns)
        for (kind, role, name), (count, total_ns, num_bytes, longest_ns) in sorted(
            totals.items(), key=lambda item: (-item[1][1], item[0])
        )
    ]


def _triggers(run: Run) -> list[TriggeredSteps]:
    requests: dict[str, TriggeredSteps] = {}
    late: dict[str, dict[int, int]] = {}
    for trace in run.ranks.values():
        for mark in trace.triggers:
            late_ranks = late.setdefault(mark.id, {})
            if mark.late:
                late_ranks[trace.rank] = mark.seen_at_step
            request = TriggeredSteps(mark.id, mark.first, mark.end, mark.by, late_ranks)
            requests.setdefault(request.id, request)
    return sorted(requests.values(), key=lambda request: (request.first, request.id))


def _discarded(traces: Iterable[RankTrace]) -> Discarded | None:
    discarded = [trace.discarded for trace in traces if trace.discarded]
    if not discarded:
        return None
    return Discarded(
        ranks=len(discarded),
        segments=sum(mark.segments for mark in discarded),
        num_bytes=sum(mark.bytes for mark in discarded),
        last_step=max(mark.last_step for mark in discarded),
        at_ns=max(mark.at_ns for mark in discarded),
    )
