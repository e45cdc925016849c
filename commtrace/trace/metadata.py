"""Facts about a rank apart from its spans: identity, host, versions, clocks.

It travels as JSON in the Arrow schema metadata of every segment. What changes during the run is appended as marks
(:mod:`commtrace.trace.marks`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Final

from commtrace.trace.inputs import MOST_RANKS, all_printable, decode_json

TIMING_VARIABLE: Final = "TORCH_NCCL_ENABLE_TIMING"
SLURM_NODE: Final = "SLURMD_NODENAME"
KUBERNETES_NODE: Final = "NODE_NAME"
KUBERNETES: Final = "KUBERNETES_SERVICE_PORT"
NODE_VARIABLES: Final = frozenset({SLURM_NODE, KUBERNETES_NODE, KUBERNETES})
"""Of the environment: what the scheduler calls the node, and by what Kubernetes is known."""

_TRUE: Final = frozenset({"1", "t", "true", "y", "yes"})
"""Values that torch takes for true."""

IMPORTED: Final = "imported"
"""The boot id of ranks that another program recorded."""

_LARGEST: Final = 2**62
"""Differences of such numbers still fit into 64 bits."""


def measures_durations(environment: Mapping[str, str]) -> bool:
    """Return whether the job's environment makes torch measure the durations of NCCL operations.

    Rows of hidden communication are then written some seconds late (:mod:`commtrace.capture.device.hidden_ends`).
    """
    return environment.get(TIMING_VARIABLE, "").lower() in _TRUE


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """The same instant on the host's monotonic clock and on its wall clock, both ns; wrong by at most the bracket."""

    monotonic_ns: int
    realtime_ns: int
    bracket_ns: int = 0


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """Identity of the process that wrote a trace.

    ``node`` names the host for the reader: the host name, or COMMTRACE_NODE_ID where nodes are emulated. Two ranks
    share a clock when ``boot_id`` and ``node`` are both equal. ``session`` is the epoch nanosecond at which the
    recorder started: it tells runs apart that were written into one directory.
    """

    run_id: str
    attempt: int
    session: int
    rank: int
    local_rank: int
    world_size: int
    host: str
    node: str
    boot_id: str
    pid: int
    backend: str
    device: str
    device_uuid: str
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    anchor: ClockAnchor = ClockAnchor(0, 0)

    @property
    def most_ranks(self) -> int:
        """No rank of the job has this number or a higher one. Of an imported job not every rank may be known."""
        return MOST_RANKS if self.boot_id == IMPORTED else self.world_size

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> RankMetadata:
        """Read the header of a segment.

        Raises:
            ValueError: it is no metadata, or of a rank that cannot be.
        """
        metadata: RankMetadata = decode_json(text, cls)
        numbers = (metadata.attempt, metadata.session, metadata.local_rank, metadata.pid, *astuple(metadata.anchor))
        if any(abs(number) > _LARGEST for number in numbers):
            raise ValueError("a number of its header is larger than any clock or process has")
        if not (0 <= metadata.rank < metadata.most_ranks and 1 <= metadata.world_size <= MOST_RANKS):
            raise ValueError(f"rank {metadata.rank} of {metadata.world_size} is no rank of a job")
        words = {name: all_printable(getattr(metadata, name)) for name in _WORDS}
        return replace(metadata, **words)


_WORDS: Final = tuple(one.name for one in fields(RankMetadata) if one.type in ("str", "dict[str, str]"))
