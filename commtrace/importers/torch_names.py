"""Translates the names that torch and NCCL give to process groups, operations and element types."""

from __future__ import annotations

import re
import zlib
from typing import Final

from commtrace.trace.inputs import MOST_RANKS, decode_json
from commtrace.trace.metadata import UNKNOWN_ROLE, Group, group_id

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


def named_group(name: str, members: tuple[int, ...], description: str, backend: str = "") -> Group:
    """Return the group of this name. It is equal on all ranks."""
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
    """Return the role of a group with this description: ``default_pg``, a mesh's ``mesh_tp``, Megatron's names."""
    if description == "default_pg":
        return "world"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    kind = "_".join(part for part in _PARALLEL_GROUP.sub("", description).split("_") if part)
    return _MEGATRON_ROLES.get(kind) or ("" if description == "undefined" else description) or UNKNOWN_ROLE


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
"""torch's names of scalar types in C++, as in Python, and their sizes."""


def operation_of(name: str) -> str:
    """Return the operation of a name such as ``_allgather_base``, ``nccl:all_reduce`` or ``ncclDevKernel_SendRecv(…)``;
    empty if it is unknown.
    """
    letters = name.replace(ANONYMOUS, "").partition("(")[0].replace("_", "").lower()
    return next((operation for part, operation in _OPERATIONS.items() if part in letters), "")
