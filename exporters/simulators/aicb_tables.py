"""AICB's two tables of a log: its calls by type, group and size, and the times of its iterations."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from commtrace.exporters.simulators.aicb_log import INIT, TRAIN, Call, Log

_P90: Final = 0.9


class Spread(NamedTuple):
    """Mean, standard deviation of the whole population, least and most."""

    mean: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        numbers = np.array(values, np.float64)
        return cls(float(numbers.mean()), float(numbers.std()), float(numbers.min()), float(numbers.max()))


class CallsOfSize(NamedTuple):
    """The calls of one phase with the same operation, group and size."""

    phase: str  # init or train
    operation: str
    group: str
    group_size: int
    num_bytes: int  # of one call
    calls: int
    elapsed_ms: Spread
    busbw_gibps: Spread  # GiB/s, by AICB's formula


def calls_by_size(log: Log) -> list[CallsOfSize]:
    """Return the calls of a log by phase, operation, group and size, ascending."""
    trained = [call for step in log.steps for call in step]
    return [*_grouped(INIT, log.init), *_grouped(TRAIN, trained)]


def _grouped(phase: str, calls: Iterable[Call]) -> Iterator[CallsOfSize]:
    found: dict[tuple[str, str, int, int], list[Call]] = {}
    for call in calls:
        found.setdefault((call.operation, call.group, call.num_bytes, call.group_size), []).append(call)
    for (operation, group, num_bytes, group_size), own in sorted(found.items()):
        elapsed = Spread.of([call.elapsed_ns / 1e6 for call in own])
        busbw = Spread.of([call.bandwidth[1] / (1 << 30) for call in own])
        yield CallsOfSize(phase, operation, group, group_size, num_bytes, len(own), elapsed, busbw)


class IterationTimes(NamedTuple):
    """The times of a log's steps, ms. AICB calls the first step the init time."""

    init: float
    most: float
    least: float
    mean: float
    p90: float
    std: float

    @classmethod
    def of(cls, log: Log) -> IterationTimes:
        """Return the times of all steps, the first included, as AICB's analyser computes them."""
        times = [time / 1e6 for time in log.step_ns]
        spread = Spread.of(times)
        p90 = sorted(times)[int(len(times) * _P90)]
        return cls(times[0], spread.most, spread.least, spread.mean, p90, spread.std)


_SPREAD: Final = ("mean", "std", "min", "max")


def write_calls(rows: Iterable[CallsOfSize], path: Path) -> None:
    """Write the first table as CSV, with units in the names of its columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        head = ("phase", "comm_type", "comm_group", "comm_group_size", "msg_bytes", "count")
        times, bandwidths = ([f"{name}_{which}" for which in _SPREAD] for name in ("elapsed_ms", "busbw_GiBps"))
        writer.writerow([*head, *times, *bandwidths])
        for row in rows:
            key = (row.phase, row.operation, row.group, row.group_size, row.num_bytes, row.calls)
            writer.writerow([*key, *map(_rounded, row.elapsed_ms), *map(_rounded, row.busbw_gibps)])


def write_iterations(times: IterationTimes, path: Path) -> None:
    """Write the second table as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["init_ms", "max_ms", "min_ms", "mean_ms", "p90_ms", "std_ms"])
        writer.writerow(map(_rounded, times))


def _rounded(number: float) -> float:
    return round(number, 6)
