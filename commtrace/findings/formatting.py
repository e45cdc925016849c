"""Ranks and numbers in sentences: ``rank 3``, ``ranks 0–3, 7``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

_MOST_RANGES: Final = 8


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return consecutive numbers as (first, last), ascending."""
    ordered = enumerate(sorted(set(numbers)))
    runs = (list(group) for _, group in groupby(ordered, key=lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1]) for run in runs]


def format_ranges(found: Iterable[tuple[int, int]], most: int = _MOST_RANGES) -> str:
    """Return ``0–3, 7``; with `` …`` where there are more than ``most`` ranges."""
    listed = list(found)
    words = [str(first) if first == last else f"{first}–{last}" for first, last in listed[:most]]
    return ", ".join(words) + (" …" if len(listed) > most else "")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0–3, 7``."""
    listed = sorted(set(ranks))
    return f"rank{'s' * (len(listed) != 1)} {format_ranges(ranges(listed))}"


def format_spread(values: Iterable[float]) -> str:
    """Return ``98 to 99``, or one number where both ends are alike."""
    ascending = sorted(values)
    low, high = f"{ascending[0]:.0f}", f"{ascending[-1]:.0f}"
    return low if low == high else f"{low} to {high}"


def format_time(time_ns: float) -> str:
    """Return a short time with three digits and its unit, as of a step: ``1.25 ms``, ``156 ms``, ``2.30 s``."""
    size, unit = next(
        (size, unit)
        for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))
        if (time_ns >= size or size == 1)
    )
    number = time_ns / size
    return f"{number:.{0 if number >= 100 or size == 1 else 1 if number >= 10 else 2}f} {unit}"


def format_duration(time_ns: int) -> str:
    """Return ``3 ms``, ``0.4 s``, ``42 s``, ``7 min``, ``3.2 h``, ``12 days``."""
    seconds = time_ns / 1e9
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else "less than 1 ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
