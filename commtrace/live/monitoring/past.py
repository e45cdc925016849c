"""The past of a job: its stages and links while they were healthy.

>>> past = JobPast()
>>> past.add(Usual({0: 100.0, 1: 100.0}))
>>> past.add(Usual({0: 102.0}))  # stage 1 is slow by now
>>> past.usual.quickest_ns
{0: 101.0, 1: 100.0}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, TypeVar

import numpy as np

from commtrace.analysis.replay.step_statistics import LinkTraffic
from commtrace.analysis.stragglers.limits import FAST_PERCENTILE, WINDOWS_TO_NAME
from commtrace.analysis.stragglers.normal import PAST, Usual

_WINDOWS_WELL: Final = 16
"""Windows kept of each stage and link: the newest in which it was healthy."""

_MOST_KEPT: Final = 10_000
"""Limit of entries: the past of a job with more sizes of messages is of no use."""

_Key = TypeVar("_Key")


class JobPast:
    """The work of stages and the speed of links while they were healthy. Not thread-safe."""

    def __init__(self) -> None:
        self._quickest_ns: dict[int, deque[float]] = {}
        self._transfer_ns: dict[LinkTraffic, deque[float]] = {}
        self._windows = 0

    def add(self, healthy: Usual) -> None:
        self._windows += 1
        _remember(self._quickest_ns, healthy.quickest_ns)
        _remember(self._transfer_ns, healthy.transfer_ns)

    @property
    def usual(self) -> Usual:
        """Return the median work of each stage, and the time of transfers in the fast windows of their link."""
        # A network may be busy for seconds.
        has_links = self._windows >= WINDOWS_TO_NAME
        return Usual(
            quickest_ns={stage: float(np.median(seen)) for stage, seen in self._quickest_ns.items()},
            transfer_ns={
                link: float(np.percentile(seen, FAST_PERCENTILE, method="lower"))
                for link, seen in self._transfer_ns.items()
                if has_links
            },
            by=PAST,
        )


def _remember(known: dict[_Key, deque[float]], news: Mapping[_Key, float]) -> None:
    for key, ns in news.items():
        if key in known or len(known) < _MOST_KEPT:
            known.setdefault(key, deque(maxlen=_WINDOWS_WELL)).append(ns)
