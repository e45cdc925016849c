"""Describe a rank: identity, host, versions, clocks; as JSON in the Arrow schema metadata of every segment."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Final

from msgspec import Meta, Struct, structs

from commtrace.trace.bounds import LARGEST, OUTSIDE, Count, GroupId, Rank, Step, Time, Word
from commtrace.trace.inputs import MOST_RANKS, all_printable, decode_json, is_plain_json
from commtrace.trace.json_values import JsonObject, fields_to_json

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


class ClockAnchor(Struct, frozen=True):
    """The same instant on the host's monotonic clock and on its wall clock, ns; off by at most ``bracket_ns``."""

    monotonic_ns: Time
    realtime_ns: Time
    bracket_ns: Count = 0

    @property
    def offset_ns(self) -> int:
        """Return what turns times of the monotonic clock into epoch times."""
        return self.realtime_ns - self.monotonic_ns


_NO_ANCHOR: Final = ClockAnchor(0, 0)


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
    anchor: ClockAnchor = _NO_ANCHOR
    world: str = ""  # key of its world, equal on its ranks alone; empty if unknown
    job: str = ""  # name that worlds started together share: a run id without the number of a world

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
        return json.dumps(fields_to_json(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> RankMetadata:
        """Read the header of a segment; raise ValueError if it is no metadata of a possible rank."""
        metadata: RankMetadata = decode_json(text, cls)
        numbers = (metadata.attempt, metadata.session, metadata.local_rank, metadata.pid)
        if any(abs(number) > LARGEST for number in numbers):
            raise ValueError("a number of its header is larger than any clock or process has")
        if not (0 <= metadata.rank < metadata.most_ranks and 1 <= metadata.world_size <= MOST_RANKS):
            raise ValueError(f"rank {metadata.rank} of {metadata.world_size} is no rank of a job")
        if is_plain_json(text):
            return metadata
        words = {name: all_printable(getattr(metadata, name)) for name in _WORDS}
        return replace(metadata, **words)


_WORDS: Final = tuple(field.name for field in fields(RankMetadata) if field.type in ("str", "dict[str, str]"))


def new_world_key() -> str:
    """Return a key that no other world has."""
    return secrets.token_hex(8)


def is_world_key(text: str) -> bool:
    """Return whether this can be a world's key."""
    return re.fullmatch("[0-9a-f]{16}", text) is not None


class GroupMember(Struct, frozen=True):
    """A member of a group over several worlds, as it presents itself in the group's store."""

    world: Word  # key of its world
    run_id: Word
    rank: Rank  # in its world
    host: Word
    pid: Count


class Group(Struct, frozen=True):
    """A process group as recorded by one rank.

    Its identity is its world together with its id: groups of different worlds may have equal ids. A group over several
    worlds has ``members`` instead of ``ranks``, and its identity among worlds is its ``key``.
    """

    id: GroupId  # 63 bits, equal on all members in a world (group_id, outside_group_id)
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)]  # in the world, ascending; empty if unknown
    ordinal: Count  # among the groups of the same members, by creation
    role: Word  # tp, pp, dp, world, …
    name: Word = ""  # torch's in this process
    description: Word = ""  # group_desc
    backend: Word = ""  # nccl, gloo, …
    world: Word = ""  # key of the world in which this rank made it; empty in older files
    # By their rank in the group; None: has not presented itself.
    members: Annotated[tuple[GroupMember | None, ...], Meta(max_length=MOST_RANKS)] = ()
    key: Word = ""  # equal on all members in all worlds; empty until they have exchanged it

    @property
    def size(self) -> int:
        return len(self.ranks) or len(self.members)

    @property
    def is_over_worlds(self) -> bool:
        """Return whether members may be of another world."""
        return bool(self.members)

    def to_json(self) -> JsonObject:
        """Return the detail of a mark ``process_group``: without what only groups over several worlds have."""
        detail = fields_to_json(self)
        return {name: value for name, value in detail.items() if value or name not in _LATER_FIELDS}

    def of_world(self, world: str) -> Group:
        """Return the group with ``ranks`` instead of members if all of these are of one world.

        A program may make a group at a store of its own without need.
        """
        ranks = [member.rank for member in self.members if member is not None and member.world == world != ""]
        if not self.members or len(ranks) < len(self.members):
            return self
        return structs.replace(self, ranks=tuple(sorted(ranks)), members=())

    def rank_in_world(self, peer: int, world: str) -> int:
        """Return the rank in a world of a peer; the peer itself if it is no member that is known to be of that world.

        Args:
            peer: of a row: a rank, or :data:`OUTSIDE` and the rank in the group.
        """
        number = peer - OUTSIDE
        member = self.members[number] if 0 <= number < len(self.members) else None
        return peer if member is None or not world or member.world != world else member.rank


_LATER_FIELDS: Final = frozenset({"world", "members", "key"})
"""Of groups, empty in files of older versions."""


def group_id(ranks: Sequence[int], ordinal: int) -> int:
    """Return a number for the ``ordinal``-th group with these members, equal on all ranks without communication.

    Names may differ between members; members and their groups' order of creation do not. With 100,000 groups the chance
    of a collision of these 63 bits is below 10⁻⁹.
    """
    return _number_of(",".join(map(str, sorted(ranks))) + f";{ordinal}")


def outside_group_id(store: str, name: str, size: int, ordinal: int) -> int:
    """Return a number for the ``ordinal``-th group of this name and size that meets at a store of its own.

    It differs from those of :func:`group_id`. Members of one world name the store alike, those of others may not.
    """
    return _number_of(f"outside;{store};{name};{size};{ordinal}")


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class PeakMemory(Struct, frozen=True, rename={"allocated_bytes": "allocated", "reserved_bytes": "reserved"}):
    """The highest peaks of torch's allocator on a rank's device, since the process began, whatever the script reset."""

    step: Step  # at whose end the last of them was read
    allocated_bytes: Count  # of tensors
    reserved_bytes: Count  # held for tensors, with what is free or lost to fragmentation


class DeviceState(Struct, frozen=True, omit_defaults=True):
    """One reading of an accelerator by its driver; None for what the device does not report."""

    at_ns: Time  # on the rank's monotonic clock
    clock_mhz: Count | None = None  # of its multiprocessors
    most_clock_mhz: Count | None = None
    temperature_c: Annotated[int, Meta(ge=-300, le=1000)] | None = None
    power_mw: Count | None = None
    power_limit_mw: Count | None = None  # the enforced one
    slowdowns: Annotated[tuple[Word, ...], Meta(max_length=16)] = ()  # keys of SLOWDOWNS
    corrected_errors: Count | None = None  # ECC, since the driver was loaded, like the next
    uncorrected_errors: Count | None = None
    nvlink_errors: Count | None = None  # replays, recoveries and CRC errors of all links, since the last reset
    pcie_replays: Count | None = None  # since the last reset
    serial: Word = ""  # of the board; empty if it has none

    def to_json(self) -> JsonObject:
        """Return the detail of a mark ``device_state``: what the device reports."""
        return {name: value for name, value in fields_to_json(self).items() if value not in (None, "", [])}
