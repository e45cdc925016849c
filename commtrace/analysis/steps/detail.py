"""Facts about steps that were not recorded in detail: when they ran, how long, and sums over their spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from commtrace.analysis.matching.roles import role_of
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.selection.aggregates import read_aggregates


def find_detail(run: Run) -> dict[str, Any]:
    """Return how much of a run is in detail, and what is known of the rest.

    Returns:
        ``every`` (one step in so many is in detail; 0: only on request), ``steps``, ``steps_in_detail``,
        ``step_time_ns`` of all steps (of each the mean over its ranks; None without steps), ``sums`` of the steps that
        are not in detail (means per rank and step), ``triggers`` and ``discarded`` (None if nothing was).
    """
    samples = {int(trace.recording.get("sample", 1)) for trace in run.ranks.values()}
    summed = {step for trace in run.ranks.values() for step in trace.aggregates if step >= 0}
    times = _step_times(run)
    return {
        "every": min(samples, default=1),
        "steps": len(times),
        "steps_in_detail": len(set(times) - summed),
        "step_time_ns": _distribution(list(times.values())),
        "sums": _sums(run),
        "triggers": _triggers(run),
        "discarded": _discarded(run.ranks.values()),
    }


def _step_times(run: Run) -> dict[int, float]:
    """Duration of every step, ns: the mean over the ranks that recorded it."""
    steps, durations = [], []
    for trace in run.ranks.values():
        rows = trace.spans.kind == schema.STEP
        steps.append(trace.spans.step[rows])
        durations.append(trace.spans.end[rows] - trace.spans.start[rows])
    if not steps:
        return {}
    numbers, which = np.unique(np.concatenate(steps), return_inverse=True)
    which = which.reshape(-1)
    means = np.bincount(which, np.concatenate(durations)) / np.bincount(which) if len(which) else np.empty(0)
    return {int(number): float(mean) for number, mean in zip(numbers, means, strict=True)}


def _distribution(times: list[float]) -> dict[str, int] | None:
    if not times:
        return None
    p50, p99 = np.percentile(times, (50, 99))
    return {"mean": round(sum(times) / len(times)), "p50": round(p50), "p99": round(p99), "max": round(max(times))}


def _sums(run: Run) -> list[dict[str, Any]]:
    """By kind, role and name; the largest time first."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    cells = 0
    for trace in run.ranks.values():
        for step, texts in trace.aggregates.items():
            if step < 0:
                continue
            cells += 1
            for one in read_aggregates(texts):
                role = role_of(run, trace, one.group, one.peer) if one.group >= 0 else ""
                total = totals.setdefault((one.kind, role, one.name), [0, 0, 0, 0])
                total[0] += one.num_spans
                total[1] += one.total_ns
                total[2] += one.num_bytes
                total[3] = max(total[3], one.longest_ns)
    return [
        {
            "kind": kind,
            "role": role,
            "name": name,
            "count": count / cells,
            "time_ns": round(total_ns / cells),
            "bytes": round(num_bytes / cells),
            "longest_ns": longest_ns,
        }
        for (kind, role, name), (count, total_ns, num_bytes, longest_ns) in sorted(
            totals.items(), key=lambda item: (-item[1][1], item[0])
        )
    ]


def _triggers(run: Run) -> list[dict[str, Any]]:
    """Requests, in the order of their steps, each with the ranks that saw it too late to begin with the others."""
    seen: dict[str, dict[str, Any]] = {}
    for trace in run.ranks.values():
        for trigger in trace.triggers:
            one = seen.setdefault(
                trigger["id"],
                {
                    "id": trigger["id"],
                    "first": trigger["first"],
                    "end": trigger["end"],
                    "by": trigger.get("by", ""),
                    "late": {},
                },
            )
            if trigger.get("late"):
                one["late"][str(trace.rank)] = trigger["seen_at_step"]
    return sorted(seen.values(), key=lambda one: (one["first"], one["id"]))


def _discarded(traces: Iterable[RankTrace]) -> dict[str, Any] | None:
    discarded: list[Mapping[str, Any]] = [trace.discarded for trace in traces if trace.discarded]
    if not discarded:
        return None
    return {
        "ranks": len(discarded),
        "segments": sum(one["segments"] for one in discarded),
        "bytes": sum(one["bytes"] for one in discarded),
        "last_step": max(one["last_step"] for one in discarded),
        "at_ns": max(one["at_ns"] for one in discarded),
    }
