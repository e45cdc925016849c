"""The heat maps of the page: resources ``map.json`` and ``map`` (docs/viewer-data.md)."""

from __future__ import annotations

import numpy as np

from commtrace.analysis.rank_steps import QUANTITIES, UNKNOWN, RankSteps, work_beside_typical
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.trace.spans import Int64
from commtrace.viewer.data import Resources, encode_json, encode_table


def map_resources(times: RankSteps, work: StepStatistics | None) -> Resources:
    """Return the resources; ``work`` is None where the steps could not be replayed: slowness is then not known."""
    steps = times.of("steps")
    columns = {"steps": steps}
    columns |= {name: _per_step(times.of(name), steps) for name in QUANTITIES if name != "steps"}
    columns |= dict(zip(("work", "typical_work"), work_beside_typical(times, work), strict=True))
    described = {
        "ranks": times.ranks.tolist(),
        "blocks": [
            {"first": one, "last": last} for one, last in zip(times.first.tolist(), times.last.tolist(), strict=True)
        ],
    }
    return {
        "map.json": encode_json(described),
        "map": encode_table({name: column.reshape(-1) for name, column in columns.items()}),
    }


def _per_step(sums: Int64, steps: Int64) -> Int64:
    return np.where(steps > 0, np.rint(sums / np.maximum(steps, 1)), UNKNOWN).astype(np.int64)
