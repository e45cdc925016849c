"""Resources of the page's overview: steps, events, the parts of blocks of steps, bandwidth by size, critical paths.

docs/viewer-data.md describes each. All are small: they grow with the steps of a run, not with its spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from commtrace.analysis.breakdown.critical_path import KINDS, StepPath, critical_paths
from commtrace.analysis.breakdown.run_steps import EVENTS, RunSteps
from commtrace.analysis.chain import Analysis
from commtrace.analysis.clocks.time_of_day import iso_utc
from commtrace.analysis.communication.bandwidth_by_size import BandwidthBySize
from commtrace.analysis.step_totals import SummedSteps
from commtrace.analysis.summary import Summary
from commtrace.analysis.timeline import Timeline
from commtrace.trace.spans import Int64
from commtrace.viewer.data import Resources, encode_json, encode_table

MOST_BLOCKS: Final = 200
"""Bars of steps that a reader can still tell apart."""


def overview_resources(summary: Summary) -> Resources:
    """Return the resources of a whole run, by name."""
    steps, totals = summary.all_steps, summary.totals
    summed = totals.steps
    begin_ns = int(steps.start_ns.min()) if len(steps.step) else 0
    bins = sorted(totals.bandwidth.bins)
    roles = sorted({key.role for key in bins})
    operations = sorted({key.operation for key in bins})
    described = {
        "begin_utc": iso_utc(begin_ns) if len(steps.step) else None,
        "median_ns": steps.median_ns,
        "reasons": steps.reasons,
        "events": EVENTS,
        "states": [{"kind": state.kind, "detail": state.detail} for state in summed.states],
        "roles": roles,
        "operations": operations,
        "uncertain_calls": totals.bandwidth.uncertain,
    }
    return {
        "overview.json": encode_json(described),
        "steps": encode_table(_steps(steps, begin_ns)),
        "events": encode_table(_events(steps, begin_ns)),
        "blocks": encode_table(_blocks(summed)),
        "bandwidth": encode_table(_bandwidth(totals.bandwidth, roles, operations)),
    }


def _steps(steps: RunSteps, begin_ns: int) -> dict[str, Int64]:
    return {
        "step": steps.step,
        "launch": steps.launch,
        "start": steps.start_ns - begin_ns,
        "duration": steps.duration_ns,
        "reason": steps.reason,
        "is_outlier": steps.is_outlier.astype(np.int64),
    }


def _events(steps: RunSteps, begin_ns: int) -> dict[str, Int64]:
    rows = [(EVENTS.index(one.kind), one.start_ns - begin_ns, one.end_ns - one.start_ns) for one in steps.events]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return dict(zip(("kind", "start", "duration"), columns, strict=True))


def _blocks(steps: SummedSteps) -> dict[str, Int64]:
    """Return the parts of blocks of neighbouring steps: a row per block and state that it was in."""
    count = len(steps.step)
    first = np.arange(0, count, -(-count // MOST_BLOCKS) or 1)
    sums = np.add.reduceat(steps.ns, first, axis=0) if count else np.zeros((0, len(steps.states)), np.int64)
    block, state = np.nonzero(sums)
    last = np.append(first[1:], count)[block] - 1
    return {
        "first": steps.step[first[block]],
        "last": steps.step[last],
        "rank_steps": (last + 1 - first[block]) * steps.num_ranks,
        "state": state.astype(np.int64),
        "ns": sums[block, state],
    }


def _bandwidth(measured: BandwidthBySize, roles: Sequence[str], operations: Sequence[str]) -> dict[str, Int64]:
    """Return a row per bin; bandwidths are in bytes per second."""
    rows = []
    exact = {key for key in measured.bins if not key.is_bound}
    for key, own in sorted(measured.bins.items()):
        if key.is_bound and key._replace(is_bound=False) in exact:
            continue  # a lower bound tells nothing beside exact ones
        busbw = own.busbw_gbps
        quantiles = [round((busbw.nearest_rank(percent) or 0.0) * 1e9) for percent in (50, 100)]
        rows.append(
            (
                roles.index(key.role),
                operations.index(key.operation),
                key.group_size,
                key.reach,
                int(key.is_matched),
                int(key.is_bound),
                len(busbw),
                own.num_bytes // len(busbw),
                *quantiles,
            )
        )
    names = ("role", "operation", "group_size", "reach", "is_matched", "is_bound", "calls", "bytes", "median", "best")
    return dict(zip(names, np.array(rows, np.int64).reshape(-1, len(names)).T, strict=True))


def critical_tables(analysis: Analysis, timeline: Timeline, steps: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """Yield the critical path of each of these steps of a timeline, by resource name; nothing without common clocks."""
    if analysis.alignment.refused is not None:
        return
    context = analysis.context
    residual_ns = analysis.alignment.residual_ns["p99"]
    outline = timeline.outline()
    index_of = {rank["rank"]: index for index, rank in enumerate(outline["ranks"])}
    for path in critical_paths(context.run, context.matches, context.roles, steps, residual_ns):
        columns = _critical_path(path, timeline.base_ns(path.step), index_of, outline["roles"])
        yield f"step/{path.step}/critical", encode_table(columns)


def part_tables(analysis: Analysis, timeline: Timeline, steps: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of each of these steps of a timeline on every rank, by resource name.

    A row is a rank, by its index in the outline, and a column a state, ``kind/detail``, in ns; states in which no rank
    was are left out.
    """
    times = analysis.partition
    index_of = {rank["rank"]: index for index, rank in enumerate(timeline.outline()["ranks"])}
    for step in steps:
        rows = np.flatnonzero(times.step == step)
        columns = {"rank": np.array([index_of[rank] for rank in times.rank[rows].tolist()], np.int64)}
        for state, ns in zip(times.states, times.ns[rows].T, strict=True):
            if ns.any():
                columns[f"{state.kind}/{state.detail}"] = np.asarray(ns, np.int64)
        yield f"step/{step}/parts", encode_table(columns)


def _critical_path(path: StepPath, base_ns: int, index_of: dict[int, int], roles: Sequence[str]) -> dict[str, Int64]:
    rows = [
        (
            index_of[piece.rank],
            piece.start - base_ns,
            piece.ns,
            KINDS.index(piece.kind),
            roles.index(piece.role) if piece.role else -1,
            int(piece.uncertain),
        )
        for piece in path.pieces
    ]
    names = ("rank", "start", "duration", "kind", "role", "uncertain")
    return dict(zip(names, np.array(rows, np.int64).reshape(-1, len(names)).T, strict=True))
