"""Describe a rank: identity, host, versions, clocks; as JSON in the Arrow schema metadata of every segment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Final, NamedTuple

from commtrace.trace.inputs import MOST_RANKS, all_printable, decode_json, is_plain_json

TIMING_VARIABLE: Final = "TORCH_NCCL_ENABLE_TIMING"
SLURM_NODE: Final = "SLURMD_NODENAME"
KUBERNETES_NODE: Final = "NODE_NAME"
KUBERNETES: Final = "KUBERNETES_SERVICE_PORT"
NODE_VARIABLES: Final = frozenset({SLURM_NODE, KUBERNETES_NODE, KUBERNETES})
"""Environment variables with the scheduler's name of the node, or a sign of Kubernetes."""

_TRUE: Final = frozenset({"1", "t", "true", "y", "yes"})

IMPORTED: Final = "imported"
"""The boot id of ranks that another program recorded."""

IMPORTED_FROM: Final = "imported from"
"""Names that program among the versions."""

FLIGHT_RECORDER: Final = "flight-recorder"
"""The program of dumps, which a rank writes while it lives."""

KINETO: Final = "kineto"
"""The program of traces that hold some steps of a job."""

_LARGEST: Final = 2**62
"""Differences of such numbers still fit into 64 bits."""


UNKNOWN_ROLE: Final = "unknown"

SLOWDOWNS: Final = {
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
}
"""Reasons for a reduced clock, by NVML's bits, without idleness and users' settings."""


def measures_durations(environment: Mapping[str, str]) -> bool:
    """Return whether torch measures the durations of NCCL operations; hidden communication then comes late."""
    return environment.get(TIMING_VARIABLE, "").lower() in _TRUE


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """The same instant on the host's monotonic clock and on its wall clock, ns; off by at most ``bracket_ns``."""

    monotonic_ns: int
    realtime_ns: int
    bracket_ns: int = 0

    @property
    def offset_ns(self) -> int:
        """Return what turns times of the monotonic clock into epoch times."""
        return self.realtime_ns - self.monotonic_ns


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """Identity of the process that wrote a trace. Ranks with equal ``node`` and ``boot_id`` share a clock."""

    run_id: str
    attempt: int
    session: int  # epoch ns of the recorder's start; differs between runs in one directory
    rank: int
    local_rank: int
    world_size: int
    host: str
    node: str  # the host name, or COMMTRACE_NODE_ID for emulated nodes
    boot_id: str
    pid: int
    backend: str
    device: str
    device_uuid: str
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    anchor: ClockAnchor = ClockAnchor(0, 0)

    @property
    def is_imported(self) -> bool:
        return self.boot_id == IMPORTED

    @property
    def most_ranks(self) -> int:
        """Return a limit above all ranks of the job; an imported job may have unknown ranks."""
        return MOST_RANKS if self.is_imported else self.world_size

    @property
    def is_dump(self) -> bool:
        """Return whether it was read from a dump, which shows one moment and says nothing of the end."""
        return self.versions.get(IMPORTED_FROM) == FLIGHT_RECORDER

    @property
    def is_window(self) -> bool:
        """Return whether it was read from a trace of a part of the job, whose communication began before it."""
        return self.versions.get(IMPORTED_FROM) == KINETO

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> RankMetadata:
        """Read the header of a segment; raise ValueError if it is no metadata of a possible rank."""
        metadata: RankMetadata = decode_json(text, cls)
        anchor = metadata.anchor
        numbers = (
            *(metadata.attempt, metadata.session, metadata.local_rank, metadata.pid),
            *(anchor.monotonic_ns, anchor.realtime_ns, anchor.bracket_ns),
        )
        if any(abs(number) > _LARGEST for number in numbers):
            raise ValueError("a number of its header is larger than any clock or process has")
        if not (0 <= metadata.rank < metadata.most_ranks and 1 <= metadata.world_size <= MOST_RANKS):
            raise ValueError(f"rank {metadata.rank} of {metadata.world_size} is no rank of a job")
        if is_plain_json(text):
            return metadata
        words = {name: all_printable(getattr(metadata, name)) for name in _WORDS}
        return replace(metadata, **words)


_WORDS: Final = tuple(one.name for one in fields(RankMetadata) if one.type in ("str", "dict[str, str]"))


class Group(NamedTuple):
    """A process group as recorded by one rank."""

    id: int  # 63 bits, equal on all members (group_id)
    ranks: tuple[int, ...]  # global, ascending
    ordinal: int  # among the groups of the same members, by creation
    role: str  # tp, pp, dp, world, …
    name: str = ""  # torch's in this process
    description: str = ""  # group_desc
    backend: str = ""  # nccl, gloo, …

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_id(ranks: Sequence[int], ordinal: int) -> int:
    """Return a number for the ``ordinal``-th group with these members, equal on all ranks without communication.

    Names may differ between members; members and their groups' order of creation do not. With 100,000 groups the chance
    of a collision of these 63 bits is below 10⁻⁹.
    """
    text = ",".join(map(str, sorted(ranks))) + f";{ordinal}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class PeakMemory(NamedTuple):
    """The highest peaks of torch's allocator on a rank's device, since the process began, whatever the script reset."""

    step: int  # at whose end the last of them was read
    allocated_bytes: int  # of tensors
    reserved_bytes: int  # held for tensors, with what is free or lost to fragmentation


class DeviceState(NamedTuple):
    """One reading of an accelerator by its driver; None for what the device does not report."""

    at_ns: int  # on the rank's monotonic clock
    clock_mhz: int | None = None  # of its multiprocessors
    most_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None  # the enforced one
    slowdowns: tuple[str, ...] = ()  # keys of SLOWDOWNS
    corrected_errors: int | None = None  # ECC, since the driver was loaded, like the next
    uncorrected_errors: int | None = None
    nvlink_errors: int | None = None  # replays, recoveries and CRC errors of all links, since the last reset
    pcie_replays: int | None = None  # since the last reset
    serial: str = ""  # of the board; empty if it has none
