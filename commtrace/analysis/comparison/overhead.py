"""The cost of recording, from alternating runs with and without commtrace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

WARM_UP_STEPS: Final = 3
"""Steps at the beginning of a run that do not count, where there are more than twice as many."""
_RESAMPLES: Final = 10_000
_CONFIDENCE: Final = (2.5, 97.5)


class Stamp(NamedTuple):
    """A step of an optimizer has ended. ``optimizer`` tells several apart; wall and CPU time of the process in ns."""

    optimizer: int
    wall_ns: int
    cpu_ns: int


class RankStamps(NamedTuple):
    """The step times that one process reported at its end."""

    rank: int
    max_rss_bytes: int
    stamps: Sequence[Stamp]


class Measured(NamedTuple):
    """One run of the command.

    Attributes:
        wall_ns, cpu_ns: of the command with all processes below it, start-up included.
        ranks: the processes that trained; empty if none of them ended in order.
        steps, spans, num_bytes, dropped: of the recording; 0 and empty without one.
    """

    wall_ns: int
    cpu_ns: int
    ranks: Sequence[RankStamps]
    steps: int = 0
    spans: int = 0
    num_bytes: int = 0
    dropped: dict[str, int] = {}  # noqa: RUF012 -- never changed


Pair = tuple[Measured, Measured]
"""A run without and a run with commtrace."""


def summarise_overhead(pairs: Sequence[Pair]) -> dict[str, object]:
    """Ratios with / without, each the median over pairs with its spread, and what the recordings hold.

    Returns:
        ``step_time``, ``step_cpu`` and ``job_cpu``: ``without`` and ``with`` (medians, ns) and ``ratio`` (``median``,
        and ``low`` to ``high``, the bootstrapped 95 % interval of that median); ``noise``: the same for runs without
        commtrace, each against the one before it; ``memory_bytes``: what a rank holds more at its peak, ``median`` and
        ``max``; ``clock``: ``optimizer`` or, where no process stamped its steps, ``wall``; ``recorded``: ``steps``,
        ``spans_per_step``, ``bytes_per_step``, ``bytes_per_span`` (per rank) and ``dropped``.
    """
    stamped = all(measured.ranks for pair in pairs for measured in pair)
    step_time: Callable[[Measured], float] = _step_time if stamped else _wall_time
    return {
        "pairs": len(pairs),
        "clock": "optimizer" if stamped else "wall",
        "step_time": _compared(pairs, step_time),
        "noise": _noise([without for without, _ in pairs], step_time),
        "step_cpu": _compared(pairs, _step_cpu) if stamped else None,
        "job_cpu": _compared(pairs, lambda measured: measured.cpu_ns),
        "memory_bytes": _memory(pairs) if stamped else None,
        "recorded": _recorded([recorded for _, recorded in pairs]),
    }


def _intervals(stamps: Sequence[Stamp], column: int) -> list[int]:
    """Between the steps of the optimizer that steps most often, the warm-up left out."""
    if not stamps:
        return []
    most = Counter(stamp.optimizer for stamp in stamps).most_common(1)[0][0]
    times = [stamp[column] for stamp in stamps if stamp.optimizer == most]
    steps = [after - before for before, after in pairwise(times)]
    return steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps


def _step_time(measured: Measured) -> float:
    """Mean over the ranks of their median step."""
    return float(np.mean([np.median(steps) for rank in measured.ranks if (steps := _intervals(rank.stamps, 1))]))


def _step_cpu(measured: Measured) -> float:
    """CPU time of a rank in a mean step: of all its threads, the writing one included."""
    return float(np.mean([np.mean(steps) for rank in measured.ranks if (steps := _intervals(rank.stamps, 2))]))


def _wall_time(measured: Measured) -> float:
    return float(measured.wall_ns)


def _compared(pairs: Sequence[Pair], figure: Callable[[Measured], float]) -> dict[str, object]:
    without, recorded = ([figure(pair[side]) for pair in pairs] for side in (0, 1))
    ratios = [after / before for before, after in zip(without, recorded, strict=True)]
    return {
        "without": round(float(np.median(without))),
        "with": round(float(np.median(recorded))),
        "ratio": _median_with_spread(ratios),
    }


def _noise(runs: Sequence[Measured], figure: Callable[[Measured], float]) -> dict[str, float] | None:
    """Ratios of what should be equal: how much of a difference means nothing."""
    ratios = [figure(after) / figure(before) for before, after in pairwise(runs)]
    return _median_with_spread(ratios) if ratios else None


def _median_with_spread(values: Sequence[float]) -> dict[str, float]:
    sample = np.asarray(values)
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(sample, (_RESAMPLES, len(sample))), axis=1)
    low, high = np.percentile(medians, _CONFIDENCE)
    return {"median": float(np.median(sample)), "low": float(low), "high": float(high)}


def _memory(pairs: Sequence[Pair]) -> dict[str, int]:
    more = []
    for without, recorded in pairs:
        before = {rank.rank: rank.max_rss_bytes for rank in without.ranks}
        more += [rank.max_rss_bytes - before[rank.rank] for rank in recorded.ranks if rank.rank in before]
    return {"median": round(float(np.median(more))), "max": max(more)}


def _recorded(runs: Sequence[Measured]) -> dict[str, object]:
    dropped: Counter[str] = Counter()
    for run in runs:
        dropped.update(run.dropped)
    steps, spans, num_bytes = (sum(getattr(run, name) for run in runs) for name in ("steps", "spans", "num_bytes"))
    return {
        "steps": steps,
        "spans_per_step": spans / steps if steps else None,
        "bytes_per_step": num_bytes / steps if steps else None,
        "bytes_per_span": num_bytes / spans if spans else None,
        "dropped": dict(dropped),
    }
