"""The operators of ``_c10d_functional`` and what each of them sends.

Their tensors are arguments and results of a graph, so sizes come from the inputs: what an all_gather gathers is the
input once per member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from commtrace.capture.collectives.operations import NO_SELF_BYTES, OPERATIONS, Operation

FunctionalPayload = tuple[int, int, Any, "tuple[int, ...] | None"]
"""``(num_bytes, self_bytes, dtype, bytes of each member if several)``, as in
:mod:`commtrace.capture.collectives.operations`."""


class FunctionalOperation(NamedTuple):
    """An operator of ``_c10d_functional``.

    Attributes:
        operation: the operation that it is.
        measure: payload from the arguments and the process group.
        group_argument: position of the group (its name, or the group itself).
        tensor_argument: position of the tensor, or list of tensors, that is sent.
        root_argument: position of the root's rank inside the group; −1 where there is no root.
    """

    operation: Operation
    measure: Callable[[tuple[Any, ...], Any], FunctionalPayload]
    group_argument: int
    tensor_argument: int = 0
    root_argument: int = -1


def _input(arguments: tuple[Any, ...], _process_group: Any) -> FunctionalPayload:
    tensor = arguments[0]
    return tensor.nbytes, NO_SELF_BYTES, tensor.dtype, None


def _input_per_member(arguments: tuple[Any, ...], process_group: Any) -> FunctionalPayload:
    tensor = arguments[0]
    return tensor.nbytes * process_group.size(), NO_SELF_BYTES, tensor.dtype, None


def _inputs(arguments: tuple[Any, ...], _process_group: Any) -> FunctionalPayload:
    return _members([tensor.nbytes for tensor in arguments[0]], arguments[0])


def _inputs_per_member(arguments: tuple[Any, ...], process_group: Any) -> FunctionalPayload:
    return _members([tensor.nbytes * process_group.size() for tensor in arguments[0]], arguments[0])


def _members(sizes: list[int], tensors: Any) -> FunctionalPayload:
    dtype = tensors[0].dtype if tensors else None
    return sum(sizes), NO_SELF_BYTES, dtype, tuple(sizes) if len(sizes) > 1 else None


def _splits(arguments: tuple[Any, ...], process_group: Any) -> FunctionalPayload:
    tensor, splits = arguments[0], [int(split) for split in arguments[2]]
    rows = tensor.size(0)
    own = tensor.nbytes // rows * splits[process_group.rank()] if splits and rows else 0
    return tensor.nbytes, own if splits else NO_SELF_BYTES, tensor.dtype, None


_ALL_REDUCE: Final = OPERATIONS["allreduce"]
_ALL_GATHER: Final = OPERATIONS["allgather"]
_REDUCE_SCATTER: Final = OPERATIONS["reduce_scatter"]
_BROADCAST: Final = OPERATIONS["broadcast"]

FUNCTIONAL: Final[Mapping[str, FunctionalOperation]] = {
    "all_reduce": FunctionalOperation(_ALL_REDUCE, _input, 2),
    "all_reduce_": FunctionalOperation(_ALL_REDUCE, _input, 2),
    "all_reduce_coalesced": FunctionalOperation(_ALL_REDUCE, _inputs, 2),
    "all_reduce_coalesced_": FunctionalOperation(_ALL_REDUCE, _inputs, 2),
    "all_gather_into_tensor": FunctionalOperation(_ALL_GATHER, _input_per_member, 2),
    "all_gather_into_tensor_out": FunctionalOperation(_ALL_GATHER, _input_per_member, 2),
    "all_gather_into_tensor_coalesced": FunctionalOperation(_ALL_GATHER, _inputs_per_member, 2),
    "reduce_scatter_tensor": FunctionalOperation(_REDUCE_SCATTER, _input, 3),
    "reduce_scatter_tensor_out": FunctionalOperation(_REDUCE_SCATTER, _input, 3),
    "reduce_scatter_tensor_coalesced": FunctionalOperation(_REDUCE_SCATTER, _inputs, 3),
    "all_to_all_single": FunctionalOperation(OPERATIONS["alltoall"], _splits, 3),
    "broadcast": FunctionalOperation(_BROADCAST, _input, 2, root_argument=1),
    "broadcast_": FunctionalOperation(_BROADCAST, _input, 2, root_argument=1),
}
"""Operator → operation."""


class Message(NamedTuple):
    """One point-to-point operation. ``peer`` is a rank inside the group."""

    operation: Operation
    tensor: Any
    peer: int
    tag: int


def _sent(arguments: tuple[Any, ...]) -> list[Message]:
    return [Message(OPERATIONS["send"], *arguments[:3])]


def _received(arguments: tuple[Any, ...]) -> list[Message]:
    return [Message(OPERATIONS["recv"], *arguments[:3])]


def _batch(arguments: tuple[Any, ...]) -> list[Message]:
    names, peers, tags, tensors = arguments[:4]
    return [
        Message(OPERATIONS["send" if name == "isend" else "recv"], tensor, peer, tag)
        for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True)
    ]


FUNCTIONAL_P2P: Final[Mapping[str, Callable[[tuple[Any, ...]], list[Message]]]] = {
    "isend": _sent,
    "irecv": _received,
    "batch_p2p_ops": _batch,
}
"""Operators of newer versions of torch → the messages in their arguments, of which the last is the group."""

TENSOR_ARGUMENT: Final[Mapping[str, int]] = {"batch_p2p_ops": 3}
"""Position of the tensors where it is not the first one."""
