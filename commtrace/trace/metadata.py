"""Facts about a rank apart from its spans: identity, host, versions, clocks.

It travels as JSON in the Arrow schema metadata of every segment. What changes during the run is appended as marks
(:mod:`commtrace.trace.marks`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Final, NamedTuple

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


UNKNOWN_ROLE: Final = "unknown"
"""Of a group of which nobody said what it is for."""

SLOWDOWNS: Final = {
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
}
"""Why a device runs below its clock, by NVML's bits; idleness and what users have set are left out."""


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
        """Return a number that no rank of the job reaches. Of an imported job not every rank may be known."""
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


class Group(NamedTuple):
    """A process group as recorded by one rank.

    Attributes:
        id: 63-bit number that is equal on every member (see :func:`group_id`).
        ranks: global ranks of the members, ascending.
        ordinal: position among the groups of the same members, in order of creation.
        role: in the field's words: ``tp``, ``pp``, ``dp``, ``world``, …
        name: torch's in this process.
        description: ``group_desc``; empty where there is none.
        backend: ``nccl``, ``gloo``, …
    """

    id: int
    ranks: tuple[int, ...]
    ordinal: int
    role: str
    name: str = ""
    description: str = ""
    backend: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_id(ranks: Sequence[int], ordinal: int) -> int:
    """Return a number for the ``ordinal``-th group with these members: equal on all ranks without communication.

    Names of groups may differ between members; the set of members, and the order in which groups of the same members
    were created, do not. With 100,000 groups the chance of any collision of these 63 bits is below 10⁻⁹.
    """
    text = ",".join(map(str, sorted(ranks))) + f";{ordinal}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class DeviceState(NamedTuple):
    """One reading of an accelerator by its driver. A field that the device does not report is None.

    Attributes:
        at_ns: on the rank's monotonic clock.
        clock_mhz, most_clock_mhz: of its multiprocessors, at this moment and at most.
        power_mw, power_limit_mw: drawn, and the limit that is enforced.
        slowdowns: why its clock is held down: words of :data:`SLOWDOWNS`.
        corrected_errors, uncorrected_errors: of its memory (ECC), since the driver was loaded.
        nvlink_errors: replays, recoveries and CRC errors of all its links, since they were last reset.
        pcie_replays: since the device was last reset.
        serial: of the board; empty where it has none.
    """

    at_ns: int
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    slowdowns: tuple[str, ...] = ()
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    nvlink_errors: int | None = None
    pcie_replays: int | None = None
    serial: str = ""
