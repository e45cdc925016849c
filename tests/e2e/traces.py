"""What end-to-end tests ask of a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from commtrace.analysis.windows.run import measure_run
from commtrace.planning.call_counts import count_calls
from commtrace.planning.comparison import PlanComparison, compare_plan, expected_of_run
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run


def role_of(trace: RankTrace, group: int, peer: int = -1) -> str:
    """Role of a communication; of point-to-point operations that of the narrowest pp group that holds both peers."""
    if peer >= 0:
        both = {trace.rank, peer}
        pipelines = [known for known in trace.groups.values() if known.role == "pp" and both <= set(known.ranks)]
        if pipelines:
            return min(pipelines, key=lambda known: known.size).role
    return trace.groups[group].role


def compared_with_plan(directory: Path) -> PlanComparison:
    """What a run should have sent by its own sizes, beside what it sent."""
    measured = measure_run(directory, count_calls)
    return compare_plan(expected_of_run(measured.recorded)[0], measured.result)


def rows(run: Run, rank: int, *kinds: int, **columns: int) -> Iterator[dict[str, Any]]:
    """Spans of a rank in order of their start, as dictionaries; ``columns`` select by value."""
    spans = run.ranks[rank].spans
    chosen = np.isin(spans.kind, kinds)
    for name, value in columns.items():
        chosen &= getattr(spans, name) == value
    picked = spans.take(np.flatnonzero(chosen))
    for position in np.argsort(picked.start, kind="stable"):
        row = {name: getattr(picked, name)[position].item() for name in type(picked).__slots__}
        yield {**row, "kind": schema.KINDS[row["kind"]], "name": run.names[row["name"]]}
