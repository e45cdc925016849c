"""What the arguments of a communicating method of ``ProcessGroup`` tell of the call, and who made it.

These run inside of the methods that stand in for torch's (:mod:`commtrace.capture.collectives.process_groups`): the
frames of the callers are counted from there.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import Operation
from commtrace.capture.records import Launch

_SYNCHRONOUS_P2P: Final = frozenset({"send", "recv"})


def collective_number(operation: Operation, state: GroupState, arguments: tuple[Any, ...]) -> tuple[int, int, bool]:
    """Sequence number, global rank of the root (or −1), and whether the caller gets the Work."""
    position = len(operation.arguments) - 1
    options = arguments[position] if len(arguments) > position else None
    is_async = getattr(options, "asyncOp", None)
    if is_async is None or not _options_tell():
        # torch before 2.8 tells it only to its own Python function, which is the caller of the replaced method. Any
        # other caller gets the Work, unless its options say something else.
        caller = sys._getframe(2).f_locals
        is_async = bool(caller.get("async_op", caller.get("async_ops", is_async is not False)))
    peer = -1
    if operation.has_root:
        root = getattr(options, "rootRank", options)
        peer = _global_rank(state, root) if isinstance(root, int) else -1
    if state.bracket is not None:
        state.bracket_is_collective = True
        return -1, peer, is_async
    return next(state.collective_seq), peer, is_async


@functools.cache
def _options_tell() -> bool:
    """Whether torch's functions tell all options whether the call is asynchronous; some have the field without that."""
    from torch.distributed import AllreduceOptions

    return hasattr(AllreduceOptions, "asyncOp")


def _global_rank(state: GroupState, group_rank: int) -> int:
    """−1 for one that the group does not have: torch refuses the call, and that is no failure of ours."""
    ranks = state.ranks_by_group_rank
    return ranks[group_rank] if 0 <= group_rank < len(ranks) else -1


def p2p_number(operation: Operation, state: GroupState, arguments: tuple[Any, ...]) -> tuple[int, int, bool]:
    """Sequence number towards the peer, the peer's global rank, and whether the caller gets the Work."""
    # The peer of a receive from anybody, and so its number, is not known when it is posted: see from_anybody.
    peer = _global_rank(state, arguments[1]) if len(arguments) > 2 else -1
    # Frame 0 is this function, 1 the replaced method, 2 its caller: isend, irecv, send or recv.
    caller = sys._getframe(2)
    outer = caller.f_back
    is_async = caller.f_code.co_name not in _SYNCHRONOUS_P2P and (
        # dist.send and dist.recv call isend and irecv, and wait.
        outer is None or outer.f_code.co_name not in _SYNCHRONOUS_P2P or outer.f_globals is not caller.f_globals
    )
    seq = -1 if peer < 0 else state.next_p2p(operation.is_send, peer, arguments[2] or 0)
    return seq, peer, is_async


def from_anybody(launch: Launch, work: Any) -> Launch:
    """Return the launch of a receive from anybody, with the sender that its Work knows once it is over."""
    state = launch.state
    try:
        peer = state.ranks_by_group_rank[work._source_rank()]
    except RuntimeError:  # This backend does not tell.
        return launch
    return launch._replace(seq=state.next_p2p(False, peer), peer=peer)


def barrier_device(arguments: tuple[Any, ...]) -> Any:
    """The device that runs an operation without tensors, where its options say so."""
    return getattr(arguments[-1], "device", None) if arguments else None


def by_position(
    arguments: tuple[Any, ...], keywords: dict[str, Any], names: tuple[tuple[str, ...], ...]
) -> tuple[Any, ...]:
    """Arguments in the order of ``names``, wherever they were passed by keyword; None for those that are missing."""
    return arguments + tuple(
        next((keywords[name] for name in alternatives if name in keywords), None)
        for alternatives in names[len(arguments) :]
    )
