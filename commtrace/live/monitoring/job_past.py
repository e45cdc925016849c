"""What stages and links did in the last windows in which they were well, for when others do not tell what is normal.

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

from commtrace.analysis.stragglers.limits import FAST_PERCENTILE, WINDOWS_TO_NAME
from commtrace.analysis.stragglers.normal import PAST
from commtrace.analysis.stragglers.transfers import Traffic
from commtrace.analysis.stragglers.usual import Usual

_WINDOWS: Final = 16
"""Of each stage and each link so many are kept, the newest in which it was well."""

_MOST_KEPT: Final = 10_000
"""So many are remembered: a job of more sends too much of different sizes for its past to tell anything."""

_Key = TypeVar("_Key")


class JobPast:
    """The work of stages and the speed of links while they were well. Not for several threads at a time."""

    def __init__(self) -> None:
        self._quickest_ns: dict[int, deque[float]] = {}
        self._transfer_ns: dict[Traffic, deque[float]] = {}
        self._windows = 0

    def add(self, well: Usual) -> None:
        """Take what some steps tell of the stages and links that are not slow in them."""
        self._windows += 1
        _remember(self._quickest_ns, well.quickest_ns)
        _remember(self._transfer_ns, well.transfer_ns)

    @property
    def usual(self) -> Usual:
        """Return what a stage did in the median, and how long transfers took in the fast windows of their link.

        Links have no past before ``WINDOWS_TO_NAME`` windows: a network is busy for seconds.
        """
        has_links = self._windows >= WINDOWS_TO_NAME
        return Usual(
            quickest_ns={stage: float(np.median(told)) for stage, told in self._quickest_ns.items()},
            transfer_ns={
                link: float(np.percentile(told, FAST_PERCENTILE, method="lower"))
                for link, told in self._transfer_ns.items()
                if has_links
            },
            by=PAST,
        )


def _remember(known: dict[_Key, deque[float]], news: Mapping[_Key, float]) -> None:
    for key, ns in news.items():
        if key in known or len(known) < _MOST_KEPT:
            known.setdefault(key, deque(maxlen=_WINDOWS)).append(ns)
