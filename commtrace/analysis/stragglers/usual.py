"""What stages and links do where the job is well: in its own past, or in another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from commtrace.analysis.replay.step_statistics import Traffic
from commtrace.analysis.stragglers.normal import BASELINE


class Usual(NamedTuple):
    """What is usual, for when stages and links do not tell by themselves what is normal.

    Attributes:
        quickest_ns: by pipeline stage, what its quickest rank works per step in forward and backward.
        transfer_ns: how long transfers over each link take.
        by: where that was: PAST or BASELINE.
    """

    quickest_ns: Mapping[int, float] = {}
    transfer_ns: Mapping[Traffic, float] = {}
    by: str = BASELINE
