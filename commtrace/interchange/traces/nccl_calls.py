"""Find operation, process group, number and bytes of NCCL kernels from the arguments of their events.

torch describes NCCL calls since 2.2 on the host and since 2.4 on the kernel; ``Seq`` came later. Missing numbers are
counted: the n-th collective of a group is the same on all ranks.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from commtrace.interchange.traces.device_events import CommunicationKernel
from commtrace.interchange.traces.host_calls import integer
from commtrace.interchange.traces.trace_events import Distributed
from commtrace.trace.inputs import MOST_RANKS, decode_json, printable
from commtrace.trace.metadata import UNKNOWN_ROLE, Group, group_id

_MOST_ELEMENTS = 2**43
"""70 TB of doubles: more is damage."""

_PARALLEL_GROUP: Final = re.compile(r"(?:MODEL_)?(?:PARALLEL_)?GROUP")
_MEGATRON_ROLES: Final = {
    "TENSOR": "tp",
    "PIPELINE": "pp",
    "DATA": "dp",
    "DATA_WITH_CP": "dp-cp",
    "CONTEXT": "cp",
    "EXPERT": "ep",
    "EXPERT_DATA": "expert-dp",
    "EXPERT_TENSOR": "expert-tp",
    "EMBEDDING": "embedding",
    "POSITION_EMBEDDING": "position-embedding",
}
_NUMBER: Final = re.compile("[0-9]{1,9}")
_LARGEST_ORDINAL: Final = 2**31

SENDS_AND_RECEIVES: Final = "sends_and_receives"
"""The operation of a kernel of which only this is known: messages of a pipeline, or an all_to_all."""

_OPERATIONS: Final = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    # NCCL runs an all_to_all and a batch of messages as this kernel; without a description it may be either.
    "sendrecv": SENDS_AND_RECEIVES,
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "receive": "recv",
}
"""By a part of the name without underscores; the first match counts."""

ANONYMOUS: Final = "(anonymous namespace)::"
"""Removed first: its bracket does not begin the arguments of a kernel."""

DTYPES: Final = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
}
"""Python names and sizes of torch's C++ scalar types."""


class NcclCall(NamedTuple):
    kernel: CommunicationKernel
    operation: str
    group: int
    seq: int
    op_in_seq: int = 0
    num_bytes: int = -1
    self_bytes: int = -1
    dtype: str | None = None
    peer: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.operation in ("send", "recv")


def describe(
    kernels: Sequence[CommunicationKernel],
    rank: int,
    world: Sequence[int],
    distributed: Distributed,
    host_calls: Collection[str] = (),
) -> tuple[list[NcclCall], list[Group]]:
    """Return the communication kernels of one rank as calls, by start, and their groups; ``world`` are the job's ranks.

    If no kernel is described, each stream is one group of all ranks; else a kernel without description has no group.
    Nor has one that sends and receives, unless ``host_calls``, the names of communication on the host, have all_to_alls
    and no messages.
    """
    ordered = sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))
    table = _KernelGroups(world, distributed)
    streams = sorted({kernel.stream for kernel in ordered}, key=lambda stream: (integer(stream), stream))
    any_described = any(kernel.is_described for kernel in ordered)
    called = {operation_of(name) or name for name in host_calls}
    sends_are_all_to_all = "all_to_all" in called and called.isdisjoint(("send", "recv", "nccl:coalesced"))
    numbers = _KernelNumbers(rank)
    calls = []
    for kernel in ordered:
        group = None
        if kernel.is_described:
            group = table.described(kernel.arguments)
        elif not any_described and (sends_are_all_to_all or operation_of(kernel.name) != SENDS_AND_RECEIVES):
            group = table.of_stream(streams.index(kernel.stream))
        call = _call(kernel, group, rank)
        if group and not kernel.is_described and call.operation == SENDS_AND_RECEIVES:
            call = call._replace(operation="all_to_all")
        calls.append(numbers.number(call))
    return calls, table.used


def _call(kernel: CommunicationKernel, group: Group | None, rank: int) -> NcclCall:
    arguments = kernel.arguments
    operation = operation_of(str(arguments.get("Collective name", ""))) or operation_of(kernel.name)
    dtype, size = DTYPES.get(str(arguments.get("dtype", "")), (None, 0))
    peer = integer(arguments.get("Dst Rank" if operation == "send" else "Src Rank"))
    peer = peer if 0 <= peer < MOST_RANKS else -1
    elements = integer(arguments.get("Out msg nelems" if operation in ("all_gather", "recv") else "In msg nelems"))
    num_bytes = elements * size if 0 <= elements <= _MOST_ELEMENTS and size else -1
    return NcclCall(
        kernel,
        operation or plain_name(kernel.name),
        group.id if group else -1,
        integer(arguments.get("Seq")),
        num_bytes=num_bytes,
        self_bytes=_self_bytes(arguments, num_bytes, group, rank) if operation == "all_to_all" else -1,
        dtype=dtype,
        peer=peer if operation in ("send", "recv") else -1,
    )


def qualified_name(kernel: str) -> str:
    """Return ``deep_ep::intranode::dispatch`` of ``void deep_ep::intranode::dispatch<8, 768>(int4*, …)``."""
    words = kernel.replace(ANONYMOUS, "").partition("(")[0].partition("<")[0].split()
    return words[-1] if words else kernel.strip()


def plain_name(kernel: str) -> str:
    """Return ``dispatch`` of ``void deep_ep::intranode::dispatch<8, 768>(int4*, …)``."""
    return qualified_name(kernel).rpartition("::")[2] or "unknown"


def _self_bytes(arguments: Mapping[str, object], num_bytes: int, group: Group | None, rank: int) -> int:
    """Return the bytes that a rank sends to itself in an uneven all_to_all; −1 for even or unknown splits."""
    try:
        splits: object = decode_json(str(arguments.get("In split size", "[]")))
    except ValueError:  # torch cuts long lists off
        return -1
    if (
        not group
        or rank not in group.ranks
        or not isinstance(splits, list)
        or len(splits) != group.size
        or num_bytes < 0
    ):
        return -1
    total = sum(integer(split, 0) for split in splits)
    own_split = integer(splits[group.ranks.index(rank)], 0)
    return num_bytes * own_split // total if total > 0 and 0 <= own_split <= total else 0


class _KernelGroups:
    def __init__(self, world: Sequence[int], distributed: Distributed) -> None:
        self._world = tuple(world)
        self._backend = distributed.backend or ""
        self._configured = {
            str(configured_group.pg_name): configured_group for configured_group in distributed.pg_config or ()
        }
        self._known: dict[tuple[object, ...], Group] = {}

    @property
    def used(self) -> list[Group]:
        return list({group.id: group for group in self._known.values()}.values())

    def described(self, arguments: Mapping[str, object]) -> Group:
        words = ("Process Group Name", "Process Group Ranks", "Process Group Description")
        name, ranks, description = (_word(arguments.get(word, "")) for word in words)
        key = (name, ranks, description)
        if key not in self._known:
            self._known[key] = self._from_description(name, ranks, description, arguments)
        return self._known[key]

    def _from_description(self, name: str, ranks: str, description: str, arguments: Mapping[str, object]) -> Group:
        members = self._members(name, ranks, arguments)
        configured = self._configured.get(name)
        description = description or printable(configured.pg_desc or "" if configured else "")
        return named_group(name, members, description, self._backend)

    def _members(self, name: str, ranks: str, arguments: Mapping[str, object]) -> tuple[int, ...]:
        members = complete_list(ranks)
        if members:
            return members
        configured = self._configured.get(name)
        if configured and (members := complete_list(configured.ranks)):
            return members
        first, stride, size = (
            integer(arguments.get(word)) for word in ("Global rank start", "Global rank stride", "Group size")
        )
        if size == len(self._world):
            return self._world
        if first < 0 or stride <= 0 or size <= 0:
            return ()
        if first + stride * (size - 1) >= MOST_RANKS:
            raise ValueError(
                f"a process group lists {size} ranks from {first} on, {stride} apart, which is out of range"
            )
        return tuple(range(first, first + stride * size, stride))

    def of_stream(self, position: int) -> Group:
        key = ("stream", position)
        if key not in self._known:
            self._known[key] = Group(
                group_id(self._world, position), self._world, position, "world", backend=self._backend
            )
        return self._known[key]


def _word(value: object) -> str:
    return printable(str(value)) if isinstance(value, (str, int, float, list)) else ""


class _KernelNumbers:
    """Counts the calls of a group if events do not number them, and always the messages of a pair."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next: dict[tuple[object, ...], int] = defaultdict(int)

    def number(self, call: NcclCall) -> NcclCall:
        if call.group < 0:
            return call._replace(seq=-1)
        if call.is_p2p:
            sides = (self._rank, call.peer) if call.operation == "send" else (call.peer, self._rank)
            return call._replace(seq=self._count(call.group, *sides))
        if call.seq < 0:
            return call._replace(seq=self._count(call.group))
        return call._replace(op_in_seq=self._count(call.group, "seq", call.seq))

    def _count(self, *key: object) -> int:
        self._next[key] += 1
        return self._next[key] - 1


def named_group(name: str, members: tuple[int, ...], description: str, backend: str = "") -> Group:
    """Return the group of this name; it is equal on all ranks."""
    # torch numbers groups in order of creation. Any other name only has to keep groups apart.
    ordinal = int(name) if _NUMBER.fullmatch(name) else zlib.crc32(name.encode()) % _LARGEST_ORDINAL
    return Group(group_id(members, ordinal), members, ordinal, role_of(description), name, description, backend)


def complete_list(ranks: object) -> tuple[int, ...]:
    """Return members from a list or its JSON; empty if torch cut the text off with ``...`` after 30.

    Raises:
        ValueError: a rank is repeated or out of range.
    """
    if isinstance(ranks, str):
        try:
            ranks = decode_json(ranks)
        except ValueError:
            return ()
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        return ()
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < MOST_RANKS for rank in ranks):
        listed = ", ".join(str(rank)[:20] for rank in ranks[:4])
        raise ValueError(f"a process group lists the ranks {listed}{' …' if len(ranks) > 4 else ''}")
    return tuple(sorted(ranks))


def role_of(description: str) -> str:
    """Return the role of a group: by ``default_pg``, a mesh's ``mesh_tp``, or Megatron's names."""
    if description == "default_pg":
        return "world"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    kind = "_".join(part for part in _PARALLEL_GROUP.sub("", description).split("_") if part)
    return _MEGATRON_ROLES.get(kind) or ("" if description == "undefined" else description) or UNKNOWN_ROLE


def operation_of(name: str) -> str:
    """Return the operation in a name such as ``nccl:all_reduce`` or ``ncclDevKernel_SendRecv(…)``; empty if unknown."""
    letters = name.replace(ANONYMOUS, "").partition("(")[0].replace("_", "").lower()
    return next((operation for part, operation in _OPERATIONS.items() if part in letters), "")
