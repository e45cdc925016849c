"""The work of stages and links when the job is well: in its own past, or in another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from commtrace.analysis.replay.step_statistics import Traffic
from commtrace.analysis.stragglers.normal import BASELINE


class Usual(NamedTuple):
    """Usual durations, for when stages and links do not show what is normal."""

    quickest_ns: Mapping[int, float] = {}  # by stage, work of its quickest rank per step in forward and backward
    transfer_ns: Mapping[Traffic, float] = {}  # typical transfers
    by: str = BASELINE  # or PAST
