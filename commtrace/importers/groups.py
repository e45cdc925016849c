"""Process groups as torch describes them outside of a process: by name, members and description."""

from __future__ import annotations

import re
import zlib
from typing import Any, Final

from commtrace.trace.groups import UNKNOWN_ROLE, Group, group_id
from commtrace.trace.inputs import MOST_RANKS, decode_json

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
    """Return the group that torch calls by this name; the same on every rank that tells of it."""
    # torch numbers groups in the order in which they are created; other names tell groups apart, and no more.
    ordinal = int(name) if _NUMBER.fullmatch(name) else zlib.crc32(name.encode()) % _LARGEST_ORDINAL
    return Group(group_id(members, ordinal), members, ordinal, role_of(description), name, description, backend)


def complete_list(ranks: Any) -> tuple[int, ...]:
    """Return members from a list or its text; empty if torch cut the text off with ``...`` after 30.

    Raises:
        ValueError: no job has such ranks.
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
        raise ValueError(f"a process group is said to have the ranks {listed}{' …' if len(ranks) > 4 else ''}")
    return tuple(sorted(ranks))


def role_of(description: str) -> str:
    """Return what a group is for, from torch's description: ``default_pg``, a mesh's ``mesh_tp``, Megatron's names."""
    if description == "default_pg":
        return "world"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    kind = "_".join(part for part in _PARALLEL_GROUP.sub("", description).split("_") if part)
    return _MEGATRON_ROLES.get(kind) or ("" if description == "undefined" else description) or UNKNOWN_ROLE
