"""The communication methods of ``torch.distributed.ProcessGroup`` and what each of them sends.

Names of methods differ between torch versions (``_allgather_base`` became ``all_gather_single``): every method listed
here is patched if the class has it. Bytes follow docs/definitions.md: the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

NO_SELF_BYTES: Final = -1


class Payload(NamedTuple):
    """What one call sends: ``num_bytes`` and ``self_bytes`` as in the trace schema, dtype, and the members' bytes."""

    num_bytes: int
    self_bytes: int
    dtype: Any
    device_type_source: Any
    members: tuple[int, ...] = ()


class Operation(NamedTuple):
    """A method of ``ProcessGroup``.

    Attributes:
        name: canonical name of the operation.
        measure: payload of a call from its positional arguments and the group's rank inside it.
        peer_argument: for P2P, position of the peer's group rank; for rooted collectives −1 (the root is in the
            options); None without either.
        arguments: names of the positional arguments, for calls that pass them by keyword.
    """

    name: str
    measure: Callable[[tuple[Any, ...], int], Payload]
    arguments: tuple[str, ...]
    peer_argument: int | None = None
    is_p2p: bool = False
    is_send: bool = False


def _flat(value: Any) -> list[Any]:
    """The tensors of an argument: a tensor, a list, or a list of lists."""
    if not isinstance(value, (list, tuple)):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]


def _tensors(position: int) -> Callable[[tuple[Any, ...], int], Payload]:
    """The bytes of all tensors in one argument."""

    def measure(arguments: tuple[Any, ...], _group_rank: int) -> Payload:
        value = arguments[position]
        # The common case first: one tensor, alone or in a list.
        tensor = value[0] if type(value) is list and len(value) == 1 else value
        if type(tensor) is list or type(tensor) is tuple:
            tensors = _flat(tensor)
            if not tensors:
                return Payload(0, NO_SELF_BYTES, None, None)
            return Payload(sum(item.nbytes for item in tensors), NO_SELF_BYTES, tensors[0].dtype, tensors[0])
        return Payload(tensor.nbytes, NO_SELF_BYTES, tensor.dtype, tensor)

    return measure


def _coalesced(position: int) -> Callable[[tuple[Any, ...], int], Payload]:
    """Like :func:`_tensors`, and remembers what each member sends when there are several."""

    def measure(arguments: tuple[Any, ...], _group_rank: int) -> Payload:
        members = [
            (sum(tensor.nbytes for tensor in tensors), tensors[0]) for tensors in map(_flat, arguments[position])
        ]
        if not members:
            return Payload(0, NO_SELF_BYTES, None, None)
        sizes = tuple(size for size, _ in members)
        first = members[0][1]
        return Payload(sum(sizes), NO_SELF_BYTES, first.dtype, first, sizes if len(sizes) > 1 else ())

    return measure


def _nothing(_arguments: tuple[Any, ...], _group_rank: int) -> Payload:
    return Payload(0, NO_SELF_BYTES, None, None)


def _split_input(arguments: tuple[Any, ...], group_rank: int) -> Payload:
    """all_to_all_single: the input tensor; with splits, also the part that stays on this rank."""
    tensor, splits = arguments[1], arguments[3] if len(arguments) > 3 else None
    self_bytes = NO_SELF_BYTES
    if splits:
        rows = tensor.size(0)
        self_bytes = tensor.nbytes // rows * int(splits[group_rank]) if rows else 0
    return Payload(tensor.nbytes, self_bytes, tensor.dtype, tensor)


def _list_input(arguments: tuple[Any, ...], group_rank: int) -> Payload:
    """alltoall of tensor lists, which may differ in size."""
    tensors = arguments[1]
    sizes = [tensor.nbytes for tensor in tensors]
    self_bytes = NO_SELF_BYTES if len(set(sizes)) <= 1 else sizes[group_rank]
    return Payload(sum(sizes), self_bytes, tensors[0].dtype, tensors[0])


_TENSORS = ("tensors", "opts")
_OUTPUT_INPUT = ("output_tensors", "input_tensors", "opts")
_SINGLE = ("output", "input", "opts")
_SPLITS = ("output", "input", "output_split_sizes", "input_split_sizes", "opts")

_ROOT: Final = -1

OPERATIONS: Final[Mapping[str, Operation]] = {
    "allreduce": Operation("all_reduce", _tensors(0), _TENSORS),
    "allreduce_coalesced": Operation("all_reduce", _coalesced(0), _TENSORS),
    "broadcast": Operation("broadcast", _tensors(0), _TENSORS, _ROOT),
    "reduce": Operation("reduce", _tensors(0), _TENSORS, _ROOT),
    "allgather": Operation("all_gather", _tensors(0), _OUTPUT_INPUT),
    "all_gather_single": Operation("all_gather", _tensors(0), _SINGLE),
    "_allgather_base": Operation("all_gather", _tensors(0), _SINGLE),
    "allgather_coalesced": Operation("all_gather", _coalesced(0), ("output_lists", "input_list", "opts")),
    "all_gather_single_coalesced": Operation("all_gather", _coalesced(0), ("outputs", "inputs", "opts")),
    "allgather_into_tensor_coalesced": Operation("all_gather", _coalesced(0), ("outputs", "inputs", "opts")),
    "gather": Operation("gather", _tensors(1), _OUTPUT_INPUT, _ROOT),
    "scatter": Operation("scatter", _tensors(0), _OUTPUT_INPUT, _ROOT),
    "reduce_scatter": Operation("reduce_scatter", _tensors(1), _OUTPUT_INPUT),
    "reduce_scatter_single": Operation("reduce_scatter", _tensors(1), _SINGLE),
    "_reduce_scatter_base": Operation("reduce_scatter", _tensors(1), _SINGLE),
    "reduce_scatter_single_coalesced": Operation("reduce_scatter", _coalesced(1), ("outputs", "inputs", "opts")),
    "reduce_scatter_tensor_coalesced": Operation("reduce_scatter", _coalesced(1), ("outputs", "inputs", "opts")),
    "all_to_all_single": Operation("all_to_all", _split_input, _SPLITS),
    "alltoall_base": Operation("all_to_all", _split_input, _SPLITS),
    "alltoall": Operation("all_to_all", _list_input, _OUTPUT_INPUT),
    "send": Operation("send", _tensors(0), ("tensors", "dstRank", "tag"), 1, is_p2p=True, is_send=True),
    "recv": Operation("recv", _tensors(0), ("tensors", "srcRank", "tag"), 1, is_p2p=True),
    "recv_anysource": Operation("recv", _tensors(0), ("tensors", "tag"), None, is_p2p=True),
    "barrier": Operation("barrier", _nothing, ("opts",)),
    "monitored_barrier": Operation("barrier", _nothing, ("timeout", "wait_all_ranks")),
}
"""Method name → operation. Whatever else the class has that communicates is reported as not visible."""

NOT_COMMUNICATION: Final = frozenset(
    {
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "abort", "bound_device_id", "boxed",
        "get_group_store", "group_desc", "group_name", "merge_remote_group", "name", "rank", "set_timeout", "shutdown",
        "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous",
    }
)  # fmt: skip
"""Public attributes of the class that send nothing: a public method in neither list is one we do not know."""
