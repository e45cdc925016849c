"""The heat maps of the page: resources ``map.json`` and ``map`` (docs/viewer-data.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commtrace.analysis.chain import Analysis
from commtrace.analysis.rank_steps import QUANTITIES, RankSteps, rank_steps
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.trace.spans import Int64
from commtrace.viewer.data import encode_table

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class MapSums:
    """All that the maps need of some steps; those of several windows of a run add up."""

    times: RankSteps

    def __add__(self, later: MapSums) -> MapSums:
        return MapSums(self.times + later.times)


def measure_maps(analysis: Analysis) -> MapSums:
    """Measure the steps that count."""
    return MapSums(rank_steps(analysis))


def map_views(times: RankSteps, work: StepStatistics | None) -> Mapping[str, bytes]:
    """Return the resources; ``work`` is None where the steps could not be replayed: slowness is then not known."""
    steps = times.of("steps")
    columns = {"steps": steps}
    columns |= {name: _per_step(times.of(name), steps) for name in QUANTITIES if name != "steps"}
    columns |= dict(zip(("work", "typical_work"), _work(times, work), strict=True))
    described = {
        "ranks": times.ranks.tolist(),
        "blocks": [
            {"first": one, "last": last} for one, last in zip(times.first.tolist(), times.last.tolist(), strict=True)
        ],
    }
    return {
        "map.json": json.dumps(described, separators=(",", ":")).encode(),
        "map": encode_table({name: column.reshape(-1) for name, column in columns.items()}),
    }


def _per_step(sums: Int64, steps: Int64) -> Int64:
    return np.where(steps > 0, np.rint(sums / np.maximum(steps, 1)), UNKNOWN).astype(np.int64)


def _work(times: RankSteps, work: StepStatistics | None) -> tuple[Int64, Int64]:
    """Return the own work of each rank per step and the median of its stage, ns, by rank and block."""
    shape = times.of("steps").shape
    if work is None:
        return (np.full(shape, UNKNOWN, np.int64),) * 2
    own = work.by_rank_and_step(work.table.work_ns)
    typical = work.typical_work_ns(own)
    rank, block = np.searchsorted(times.ranks, work.ranks), times.blocks_of(work.steps)
    number = np.bincount(block, minlength=shape[1])

    def mean(values: npt.NDArray[np.float64]) -> Int64:
        sums = np.zeros(shape)
        np.add.at(sums, (rank[:, np.newaxis], block[np.newaxis, :]), values)
        known = (number > 0) & np.isfinite(sums)
        return np.where(known, np.rint(np.nan_to_num(sums) / np.maximum(number, 1)), UNKNOWN).astype(np.int64)

    return mean(own), mean(typical)
