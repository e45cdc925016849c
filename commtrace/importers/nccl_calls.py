"""Which collective a communication kernel is: operation, process group, number, bytes, from the arguments of its event.

torch describes NCCL calls since 2.2 (on the host) and on the kernel itself since 2.4; ``Seq`` came later. What is not
told is found by order: the n-th collective of a group on one rank is the n-th on every other.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from commtrace.importers.device_events import CommunicationKernel, integer
from commtrace.trace.groups import Group, group_id

_OPERATIONS: Final = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    # Without a description, sends and receives that NCCL runs as one kernel are an all_to_all.
    "sendrecv": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
"""By what a name contains without its underscores; the first that fits is meant."""

_DTYPES: Final = {
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
"""torch's names of scalar types in C++, as in Python, and their sizes."""

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
UNKNOWN_ROLE: Final = "unknown"
_LARGEST_ORDINAL: Final = 2**31


class Call(NamedTuple):
    """What a communication kernel did; fields as in the columns of a span."""

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
    kernels: Sequence[CommunicationKernel], rank: int, world: Sequence[int], distributed: Mapping[str, Any]
) -> tuple[list[Call], list[Group]]:
    """Name what each of a rank's communication kernels did.

    Args:
        kernels: of one rank.
        rank: which.
        world: all ranks of the job.
        distributed: the ``distributedInfo`` of the trace.

    Returns:
        The calls by start, and the groups that they are on. Where no kernel of the trace is described, those of each
        stream are taken for one group of all ranks; else one that is not described is in no group.
    """
    ordered = sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))
    table = _Groups(world, distributed)
    streams = sorted({kernel.stream for kernel in ordered}, key=lambda stream: (integer(stream), stream))
    any_described = any(kernel.is_described for kernel in ordered)
    numbers = _Numbers(rank)
    calls = []
    for kernel in ordered:
        group = None
        if kernel.is_described:
            group = table.described(kernel.arguments)
        elif not any_described:
            group = table.of_stream(streams.index(kernel.stream))
        calls.append(numbers.number(_call(kernel, group)))
    return calls, table.used


def _call(kernel: CommunicationKernel, group: Group | None) -> Call:
    """Everything about the call but its number."""
    arguments = kernel.arguments
    operation = operation_of(str(arguments.get("Collective name", ""))) or operation_of(kernel.name)
    dtype, size = _DTYPES.get(str(arguments.get("dtype", "")), (None, 0))
    peer = integer(arguments.get("Dst Rank" if operation == "send" else "Src Rank"))
    num_bytes, self_bytes = _bytes(operation, arguments, size, group)
    return Call(
        kernel,
        operation or _plain_name(kernel.name),
        group.id if group else -1,
        integer(arguments.get("Seq")),
        num_bytes=num_bytes,
        self_bytes=self_bytes,
        dtype=dtype,
        peer=peer if operation in ("send", "recv") else -1,
    )


def operation_of(name: str) -> str:
    """The operation that ``_allgather_base``, ``nccl:all_reduce`` or ``ncclDevKernel_SendRecv(…)`` is; else empty."""
    letters = name.partition("(")[0].replace("_", "").lower()
    return next((operation for part, operation in _OPERATIONS.items() if part in letters), "")


def _plain_name(kernel: str) -> str:
    """``void deep_ep::intranode::dispatch<8, 768>(int4*, …)`` → ``dispatch``."""
    return kernel.partition("(")[0].partition("<")[0].split()[-1].rpartition("::")[2] if kernel.strip() else "unknown"


def _bytes(operation: str, arguments: Mapping[str, Any], size: int, group: Group | None) -> tuple[int, int]:
    """Bytes of the full tensor, and of an uneven all_to_all what stays on the rank (−1 where the splits are even)."""
    sent, received = integer(arguments.get("In msg nelems")), integer(arguments.get("Out msg nelems"))
    elements = received if operation in ("all_gather", "recv") else sent
    if elements < 0 or not size:
        return -1, -1
    return elements * size, -1


class _Groups:
    """The process groups of one rank, found by what events tell about them."""

    def __init__(self, world: Sequence[int], distributed: Mapping[str, Any]) -> None:
        self._world = tuple(world)
        self._backend = str(distributed.get("backend", ""))
        self._configured = {
            str(one.get("pg_name")): one for one in distributed.get("pg_config") or () if isinstance(one, dict)
        }
        self._known: dict[tuple[Any, ...], Group] = {}

    @property
    def used(self) -> list[Group]:
        return list({group.id: group for group in self._known.values()}.values())

    def described(self, arguments: Mapping[str, Any]) -> Group:
        words = ("Process Group Name", "Process Group Ranks", "Process Group Description")
        name, ranks, description = (str(arguments.get(word, "")) for word in words)
        key = (name, ranks, description)
        if key not in self._known:
            self._known[key] = self._from_description(name, ranks, description, arguments)
        return self._known[key]

    def _from_description(self, name: str, ranks: str, description: str, arguments: Mapping[str, Any]) -> Group:
        members = self._members(name, ranks, arguments)
        # torch numbers groups in the order in which they are created; other names tell groups apart, and no more.
        ordinal = int(name) if name.isdecimal() else zlib.crc32(name.encode()) % _LARGEST_ORDINAL
        return Group(
            group_id(members, ordinal), members, ordinal, role_of(description), name, description, self._backend
        )

    def _members(self, name: str, ranks: str, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        told = _complete_list(ranks)
        if told:
            return told
        configured = _complete_list(self._configured.get(name, {}).get("ranks"))
        if configured:
            return configured
        first, stride, size = (
            integer(arguments.get(word)) for word in ("Global rank start", "Global rank stride", "Group size")
        )
        if size == len(self._world):
            return self._world
        return tuple(range(first, first + stride * size, stride)) if first >= 0 and stride > 0 and size > 0 else ()

    def of_stream(self, position: int) -> Group:
        key = ("stream", position)
        if key not in self._known:
            self._known[key] = Group(
                group_id(self._world, position), self._world, position, "world", backend=self._backend
            )
        return self._known[key]


def _complete_list(ranks: Any) -> tuple[int, ...]:
    """Members from a list, or from its text, which torch cuts off with ``...`` after 30; empty if it was cut off."""
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except ValueError:
            return ()
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        return ()
    return tuple(sorted(ranks))


def role_of(description: str) -> str:
    """What a group is for, from torch's description: ``default_pg``, a mesh's ``mesh_tp``, Megatron's names."""
    if description == "default_pg":
        return "world"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    kind = "_".join(part for part in _PARALLEL_GROUP.sub("", description).split("_") if part)
    return _MEGATRON_ROLES.get(kind) or ("" if description == "undefined" else description) or UNKNOWN_ROLE


class _Numbers:
    """Counts calls of a group where events do not number them, and messages of each pair in any case."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next: dict[tuple[Any, ...], int] = defaultdict(int)

    def number(self, call: Call) -> Call:
        if call.group < 0:
            return call._replace(seq=-1)
        if call.is_p2p:
            sides = (self._rank, call.peer) if call.operation == "send" else (call.peer, self._rank)
            return call._replace(seq=self._count(call.group, *sides))
        if call.seq < 0:
            return call._replace(seq=self._count(call.group))
        return call._replace(op_in_seq=self._count(call.group, "seq", call.seq))

    def _count(self, *key: Any) -> int:
        self._next[key] += 1
        return self._next[key] - 1
