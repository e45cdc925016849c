"""The histogram of step durations: fine around the usual duration, coarse elsewhere.

Native histograms are not used: prometheus-client has them only in its experimental OpenMetrics 2 text, and Prometheus
reads them from protobuf.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from commtrace.live.summary import StepSummary

_RATIO: Final = 1.05
_COARSE: Final = 24
"""Every 24th bound, a factor of 3.2, is exported whatever the steps take."""

BOUNDS_SECONDS: Final = tuple(float(f"{_RATIO**power:.4g}") for power in range(-6 * _COARSE, 7 * _COARSE + 1))
"""One grid for all ranks, from 0.9 ms to an hour in steps of 5 %, so that bounds chosen by different ranks coincide."""

_REACH: Final = 10
"""Fine bounds on either side of the usual duration: from it divided by 1.6 to it times 1.6."""

_FIRST_STEPS: Final = 8
_RECENT_STEPS: Final = 32
"""After so many more steps, the usual duration is looked at again."""


class Example(NamedTuple):
    """A step that a bucket contains."""

    run_id: str
    step: int
    duration_ns: int
    end_ns: int  # on the host's monotonic clock


class Bucket(NamedTuple):
    """The steps up to a bound, and the newest one above the previous bound."""

    bound_seconds: float  # infinity for the last bucket
    num_steps: int
    example: Example | None


class StepHistogram:
    """Counts steps on the whole grid, so that any of its bounds can be exported later. Not thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._examples: dict[int, Example] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._num_steps = 0
        self._usual: int | None = None  # place in the grid of the usual duration; None during the first steps

    def add(self, summary: StepSummary) -> None:
        at = bisect_left(BOUNDS_SECONDS, summary.duration_ns / 1e9)
        self._counts[at] += 1
        self._examples[at] = Example(summary.run_id, summary.step, summary.duration_ns, summary.end_ns)
        self._recent.append(at)
        self._num_steps += 1
        if self._num_steps == _FIRST_STEPS or self._num_steps % _RECENT_STEPS == 0:
            self._learn()

    def _learn(self) -> None:
        usual = statistics.median_low(self._recent)
        # Bounds that move with every small change would be new series each time.
        if self._usual is None or abs(usual - self._usual) > _REACH // 2:
            self._usual = usual

    def buckets(self) -> Iterator[Bucket]:
        """Yield the exported buckets by ascending bound; counts are cumulative."""
        exported = set(range(0, len(BOUNDS_SECONDS), _COARSE))
        if self._usual is not None:
            exported |= set(range(max(self._usual - _REACH, 0), min(self._usual + _REACH + 1, len(BOUNDS_SECONDS))))
        begin = count = 0
        for at in (*sorted(exported), len(BOUNDS_SECONDS)):
            cells = range(begin, at + 1)
            count += sum(self._counts[begin : at + 1])
            examples = [self._examples[cell] for cell in cells if cell in self._examples]
            bound = BOUNDS_SECONDS[at] if at < len(BOUNDS_SECONDS) else float("inf")
            yield Bucket(bound, count, max(examples, key=lambda one: one.end_ns, default=None))
            begin = at + 1
