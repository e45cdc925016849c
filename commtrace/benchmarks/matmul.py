"""Measure the rate of matrix multiplications: the most that a model can reach on a device (MAMF)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, NamedTuple

import torch

from commtrace.benchmarks.device import timed_iterations
from commtrace.trace.json_values import JsonObject

_CACHE_BYTES: Final = 512 << 20
"""More than the second-level cache of any GPU: writing it leaves nothing of the matrices there."""


class Shape(NamedTuple):
    """The product of an m × k and a k × n matrix."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """One shape over its timed iterations, FLOP/s."""

    shape: Shape
    iterations: int
    mean: float  # of the mean time
    median: float
    max: float

    def to_json(self) -> JsonObject:
        return {
            **self.shape._asdict(),
            "iterations": self.iterations,
            "flops_per_second": {"mean": self.mean, "median": self.median, "max": self.max},
        }


def rate(shape: Shape, times_ns: Sequence[int]) -> MatmulRate:
    """Return the rates that follow from the times of a shape."""
    per_second = shape.flops * 1e9
    mean, middle, shortest = fmean(times_ns), median(times_ns), min(times_ns)
    return MatmulRate(shape, len(times_ns), per_second / mean, per_second / middle, per_second / shortest)


def measure_matmul(
    shapes: Sequence[Shape], device: torch.device, dtype: str, warmup: int, iterations: int
) -> Iterator[MatmulRate]:
    """Yield the rate of each shape; the cache of a GPU is flushed before each iteration."""
    flush = _flush(device)
    for shape in shapes:
        left, right, product = (
            torch.randn(rows, columns, device=device).to(getattr(torch, dtype))
            for rows, columns in ((shape.m, shape.k), (shape.k, shape.n), (shape.m, shape.n))
        )

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = product) -> object:
            return torch.mm(left, right, out=out)

        yield rate(shape, timed_iterations(multiply, device, warmup, iterations, flush))


def _flush(device: torch.device) -> Callable[[], bool]:
    """Return what empties the cache before an iteration."""
    if device.type != "cuda":
        return lambda: True
    buffer = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)

    def flush() -> bool:
        buffer.zero_()
        return True

    return flush
