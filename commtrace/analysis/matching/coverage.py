"""What the recording holds, what it lost, and what it cannot have seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.matching.operations import communication_rows
from commtrace.analysis.matching.roles import Roles
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.trace import schema
from commtrace.trace.run import Run

_USUAL_BYPASS: Final = {
    "tp": "user buffers of Transformer Engine or symmetric memory",
    "ep": "DeepEP or NVSHMEM",
    "cp": "a kernel of its own",
    "dp": "a reducer in C++",
    "pp": "NVSHMEM or NCCL called from C++",
}
"""By parallel dimension: how its communication is known to pass by what torch.distributed shows to Python."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Attributes:
    captured: rows by kind.
    dropped: rows that the recorders had to drop, by kind.
    not_visible: sentences: paths that were active, or must have been, and that were not seen.
    """

    captured: dict[str, int]
    dropped: dict[str, int]
    not_visible: tuple[str, ...]


def find_coverage(run: Run, roles: Roles) -> Coverage:
    """Add up all ranks. ``topology["not_visible"]`` of a rank is where integrations name paths that they found."""
    captured, dropped = Counter[str](), Counter[str]()
    for block in run.blocks:
        counts = np.bincount(block.spans.kind, minlength=len(schema.KINDS))
        captured.update({kind: int(count) for kind, count in zip(schema.KINDS, counts, strict=True) if count})
    for trace in run.ranks.values():
        dropped.update(trace.dropped)
    skipped = {str(role) for trace in run.ranks.values() for role in trace.recording.get("skip_roles", ())}
    told = {str(path) for trace in run.ranks.values() for path in trace.topology.get("not_visible", ())}
    silent = _silent_dimensions(run, roles, skipped) if any(len(trace.spans) for trace in run.ranks.values()) else ()
    paths = (*sorted(told), *_invisible_paths(run), *_skipped(skipped), *silent)
    return Coverage(dict(captured), dict(dropped), paths)


def _invisible_paths(run: Run) -> Iterable[str]:
    """Paths that the recorders found in their processes (capture/collectives/untraced_paths.py)."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, trace in run.ranks.items():
        for path, state in trace.topology.get("invisible_paths", {}).items():
            found.setdefault((path, state), []).append(rank)
    for (path, state), ranks in found.items():
        where = "every rank" if len(ranks) == len(run.ranks) else ranks_in_words(ranks)
        if state == "active":
            yield f"{path}: in use on {where}. Its communication was not seen: unknown, not zero."
        else:
            yield f"{path}: loaded on {where}; whether it is used cannot be told. What goes that way is not seen."


def _skipped(roles: Iterable[str]) -> Iterable[str]:
    for role in sorted(roles):
        yield f"{role}: not recorded (skipped by COMMTRACE_SKIP_ROLES); its time is not zero, it is unknown."


def _silent_dimensions(run: Run, roles: Roles, skipped: Collection[str]) -> Iterable[str]:
    """Parallel dimensions that must communicate and of which nothing was seen."""
    heard = _roles_that_communicated(run, roles)
    sizes: dict[str, int] = {}
    for trace in run.ranks.values():
        sizes.update(trace.parallel)
    for dimension, bypass in _USUAL_BYPASS.items():
        if sizes.get(dimension, 1) > 1 and not any(dimension in role.split("-") for role in (*heard, *skipped)):
            yield (
                f"{dimension} communication: {dimension} = {sizes[dimension]}, and none was seen. It may have gone "
                f"through {bypass}; its time is not zero, it is unknown."
            )


def _roles_that_communicated(run: Run, roles: Roles) -> set[str]:
    heard = np.zeros(len(roles.words), np.bool_)
    for rank, trace in run.ranks.items():
        heard[roles.ranks[rank].role[communication_rows(trace.spans)]] = True
    return {word for word, is_heard in zip(roles.words, heard, strict=True) if is_heard}
