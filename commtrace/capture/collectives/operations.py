"""The communication methods of ``ProcessGroup`` in any version of torch, and the streams on which NCCL runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from commtrace.capture.guard import Guard
from commtrace.trace import schema

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


NO_SELF_BYTES: Final = -1


class HasRank(Protocol):
    """The part of a process group that a payload depends on."""

    def rank(self) -> int:
        """Return this rank's place in the group."""


Arguments: TypeAlias = tuple[Any, ...]
"""Positional arguments of a method or an operator of torch: any of its overloads."""

Payload: TypeAlias = "tuple[int, int, torch.dtype | None, torch.Tensor | None, tuple[int, ...] | None]"
"""The payload of one call: ``(num_bytes, self_bytes, dtype, a tensor of it, bytes of each member if several)``.

A plain tuple: making a named one costs as much as the rest of the measurement."""

Measure: TypeAlias = Callable[[Arguments, Any], Payload]
"""Payload of a call, from its positional arguments and its process group."""


class Operation(NamedTuple):
    """A method of ``ProcessGroup``, with the canonical name of its operation."""

    name: str
    measure: Measure
    arguments: tuple[tuple[str, ...], ...]  # names, for calls by keyword; the last: the options, or a root
    has_root: bool = False
    is_p2p: bool = False
    is_send: bool = False


_EMPTY: Final = (0, NO_SELF_BYTES, None, None, None)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a tensor, or in lists of any depth."""
    if not isinstance(value, (list, tuple)):
        return [value]
    return [tensor for item in value for tensor in flat_tensors(item)]


def _tensors(position: int) -> Measure:
    def measure(arguments: Arguments, _process_group: object) -> Payload:
        tensor = arguments[position]
        if type(tensor) is list:
            if len(tensor) != 1 or type(tensor[0]) is list:
                return _sum(flat_tensors(tensor))
            tensor = tensor[0]
        try:
            return tensor.nbytes, NO_SELF_BYTES, tensor.dtype, tensor, None
        except RuntimeError:  # It is sparse. 0 says that other members may rightly send more or less.
            return _num_bytes(tensor), 0, tensor.dtype, tensor, None

    return measure


def _num_bytes(tensor: torch.Tensor) -> int:
    try:
        num_bytes: int = tensor.nbytes
    except RuntimeError:  # It is not defined for sparse tensors: indices and values are what is sent.
        num_bytes = tensor._indices().nbytes + tensor._values().nbytes
    return num_bytes


def _sum(tensors: list[torch.Tensor]) -> Payload:
    if not tensors:
        return _EMPTY
    return sum(map(_num_bytes, tensors)), NO_SELF_BYTES, tensors[0].dtype, tensors[0], None


def _coalesced(position: int) -> Measure:
    def measure(arguments: Arguments, _process_group: object) -> Payload:
        members = [_sum(flat_tensors(member)) for member in arguments[position]]
        if not members:
            return _EMPTY
        sizes = tuple(member[0] for member in members)
        return sum(sizes), NO_SELF_BYTES, members[0][2], members[0][3], sizes if len(sizes) > 1 else None

    return measure


def _nothing(_arguments: Arguments, _process_group: object) -> Payload:
    return _EMPTY


def _split_input(arguments: Arguments, process_group: HasRank) -> Payload:
    tensor, splits = arguments[1], arguments[3] if len(arguments) > 3 else None
    self_bytes = NO_SELF_BYTES
    # Megatron passes an array of numpy, which is neither true nor false.
    if splits is not None and len(splits):
        rows = tensor.size(0)
        self_bytes = tensor.nbytes // rows * int(splits[process_group.rank()]) if rows else 0
    return tensor.nbytes, self_bytes, tensor.dtype, tensor, None


def _list_input(arguments: Arguments, process_group: HasRank) -> Payload:
    tensors = arguments[1]
    if not tensors:
        return _EMPTY
    sizes = [tensor.nbytes for tensor in tensors]
    self_bytes = NO_SELF_BYTES if len(set(sizes)) <= 1 else sizes[process_group.rank()]
    return sum(sizes), self_bytes, tensors[0].dtype, tensors[0], None


_OPTIONS = ("opts", "root", "op", "timeout")
_OUTPUTS = ("output_tensors", "output_tensor", "outputs", "output", "outputTensor", "output_lists")
_INPUTS = ("input_tensors", "input_tensor", "inputs", "input", "inputTensor", "input_list")
_TENSORS = (("tensors", "tensor"), _OPTIONS)
_OUTPUT_INPUT = (_OUTPUTS, _INPUTS, _OPTIONS)
_SPLITS = (_OUTPUTS, _INPUTS, ("output_split_sizes",), ("input_split_sizes",), _OPTIONS)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "allreduce": Operation("all_reduce", _tensors(0), _TENSORS),
    "allreduce_coalesced": Operation("all_reduce", _coalesced(0), _TENSORS),
    "broadcast": Operation("broadcast", _tensors(0), _TENSORS, has_root=True),
    "reduce": Operation("reduce", _tensors(0), _TENSORS, has_root=True),
    "allgather": Operation("all_gather", _tensors(0), _OUTPUT_INPUT),
    "all_gather_single": Operation("all_gather", _tensors(0), _OUTPUT_INPUT),
    "_allgather_base": Operation("all_gather", _tensors(0), _OUTPUT_INPUT),
    "allgather_coalesced": Operation("all_gather", _coalesced(0), _OUTPUT_INPUT),
    "all_gather_single_coalesced": Operation("all_gather", _coalesced(0), _OUTPUT_INPUT),
    "allgather_into_tensor_coalesced": Operation("all_gather", _coalesced(0), _OUTPUT_INPUT),
    "gather": Operation("gather", _tensors(1), _OUTPUT_INPUT, has_root=True),
    "gather_single": Operation("gather", _tensors(1), _OUTPUT_INPUT, has_root=True),
    "gather_into_tensor": Operation("gather", _tensors(1), _OUTPUT_INPUT, has_root=True),
    "scatter": Operation("scatter", _tensors(0), _OUTPUT_INPUT, has_root=True),
    "reduce_scatter": Operation("reduce_scatter", _tensors(1), _OUTPUT_INPUT),
    "reduce_scatter_single": Operation("reduce_scatter", _tensors(1), _OUTPUT_INPUT),
    "_reduce_scatter_base": Operation("reduce_scatter", _tensors(1), _OUTPUT_INPUT),
    "reduce_scatter_single_coalesced": Operation("reduce_scatter", _coalesced(1), _OUTPUT_INPUT),
    "reduce_scatter_tensor_coalesced": Operation("reduce_scatter", _coalesced(1), _OUTPUT_INPUT),
    "all_to_all_single": Operation("all_to_all", _split_input, _SPLITS),
    "alltoall_base": Operation("all_to_all", _split_input, _SPLITS),
    "alltoall": Operation("all_to_all", _list_input, _OUTPUT_INPUT),
    "send": Operation("send", _tensors(0), (("tensors",), ("dstRank",), ("tag",)), is_p2p=True, is_send=True),
    "recv": Operation("recv", _tensors(0), (("tensors",), ("srcRank",), ("tag",)), is_p2p=True),
    "recv_anysource": Operation("recv", _tensors(0), (("tensors",), ("tag",)), is_p2p=True),
    "barrier": Operation("barrier", _nothing, (_OPTIONS,)),
    "monitored_barrier": Operation("barrier", _nothing, (("timeout",), ("wait_all_ranks",))),
}
"""Method name → operation. Whatever else the class has that communicates is reported as not visible."""

HOOKED_OPERATIONS: Final[Mapping[str, Operation]] = {
    "SEND": OPERATIONS["send"],
    "RECV": OPERATIONS["recv"],
    "BROADCAST": OPERATIONS["broadcast"],
    "ALLREDUCE": OPERATIONS["allreduce"],
    "ALLREDUCE_COALESCED": OPERATIONS["allreduce_coalesced"],
    "REDUCE": OPERATIONS["reduce"],
    "ALLGATHER": OPERATIONS["allgather"],
    "ALLGATHER_BASE": OPERATIONS["_allgather_base"],
    "ALLGATHER_COALESCED": OPERATIONS["allgather"],  # one list of outputs: where a member ends is unknown
    "ALLGATHER_INTO_TENSOR_COALESCED": OPERATIONS["allgather_into_tensor_coalesced"],
    "REDUCE_SCATTER": OPERATIONS["reduce_scatter"],
    "REDUCE_SCATTER_BASE": OPERATIONS["_reduce_scatter_base"],
    "REDUCE_SCATTER_TENSOR_COALESCED": OPERATIONS["reduce_scatter_tensor_coalesced"],
    "ALLTOALL": OPERATIONS["alltoall"],
    "ALLTOALL_BASE": OPERATIONS["alltoall_base"]._replace(measure=_tensors(1)),  # without splits
    "GATHER": OPERATIONS["gather"],
    "SCATTER": OPERATIONS["scatter"],
    "BARRIER": OPERATIONS["barrier"],
}
"""Name in torch's ``HookOpName`` → operation. What it lacks (``SPLIT``, ``NEW_WINDOW``) sends nothing that is timed."""

ONE_SIDED: Final[Mapping[str, str]] = {
    "new_window": "one-sided communication through the window is not recorded",
    "reconfigure": "the group is rebuilt, but recorded with its members and numbers of before",
}
"""Methods that lead to communication, or change it, in a way that is not followed → what that means."""

NOT_COMMUNICATION: Final = frozenset(
    {
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "Options", "UCC", "UNDEFINED", "XCCL", "abort",
        "bound_device_id", "boxed", "get_backend", "get_group_store", "get_reconfigure_handle", "group_desc",
        "group_name", "merge_remote_group", "name", "options", "rank", "register_abort_hook", "register_post_hook",
        "register_pre_hook", "set_timeout", "shutdown", "size", "split_group", "supports_abort_hooks",
        "supports_completion_hooks", "supports_reconfigure", "supports_window", "unbox", "unregister_abort_hook",
        "unregister_post_hook", "unregister_pre_hook", "use_pg_for_symm_mem_rendezvous",
        "_add_ephemeral_timeout", "_backend_id", "_device_types", "_enable_collectives_timing", "_end_coalescing",
        "_get_backend", "_get_backend_name", "_get_sequence_number_for_group", "_has_hooks", "_id",
        "_pybind11_conduit_v1_", "_register_backend", "_register_on_completion_hook", "_set_default_backend",
        "_set_group_desc", "_set_group_name", "_set_sequence_number_for_group", "_start_coalescing",
        "_wait_for_pending_works",
    }
)  # fmt: skip
"""Attributes of the class that send nothing: a method in none of these lists is unknown, and its calls are reported."""


UNKNOWN_BYTES: Final = schema.NOT_APPLICABLE

_MOST_NESTING: Final = 3


class Unmeasured:
    """Replace a payload that cannot be read by :data:`UNKNOWN_BYTES`, so that the ranks' numbers stay equal."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._reported: set[str] = set()

    def __call__(self, operation: Operation, arguments: Arguments, error: Exception) -> Payload:
        if operation.name not in self._reported:
            self._reported.add(operation.name)
            self._guard.noticed(
                f"the bytes of {operation.name} cannot be read ({type(error).__name__}: {error}) and are "
                "recorded as unknown. Its time, group and sequence number are recorded."
            )
        tensor = _tensor(arguments, _MOST_NESTING)
        return UNKNOWN_BYTES, NO_SELF_BYTES, getattr(tensor, "dtype", None), tensor, None


def _tensor(values: Iterable[object], nesting: int) -> torch.Tensor | None:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if nesting and isinstance(value, (list, tuple)):
            tensor = _tensor(value, nesting - 1)
            if tensor is not None:
                return tensor
    return None


class NcclBackend(NamedTuple):
    """A backend's use of streams."""

    name: str
    returns_work: bool  # a synchronous collective, and any barrier, runs on the current stream and yet returns a Work
    has_stream_per_pair: bool  # a message outside of a bracket runs on its pair's stream, not the collectives'
    launches_in_brackets: bool  # a collective in a bracket is launched where it is called, not at the end

    def runs_on_current_stream(self, operation: Operation, is_async: bool) -> bool:
        return self.returns_work and not operation.is_p2p and (not is_async or operation.name == "barrier")


# Since torch 2.15 the name ``nccl`` builds nccl2, unless TORCH_DIST_USE_NCCL2=0; ``nccl-legacy`` is the old one. See
# c10d/nccl2/ProcessGroupNCCL.hpp and ProcessGroupNCCLBackend.cpp of pytorch's repository.
LEGACY: Final = NcclBackend("nccl", returns_work=False, has_stream_per_pair=True, launches_in_brackets=False)
NCCL2: Final = NcclBackend("nccl2", returns_work=True, has_stream_per_pair=False, launches_in_brackets=True)
LAZY: Final = NcclBackend("nccl-lazy", returns_work=True, has_stream_per_pair=True, launches_in_brackets=True)

_BY_NAME: Final = {backend.name: backend for backend in (LEGACY, NCCL2, LAZY)}


def nccl_backend(process_group: ProcessGroup) -> NcclBackend:
    """Return the backend of a group's CUDA tensors; :data:`LEGACY` where it has none of these."""
    import torch

    try:  # Not by the name under which the group was made: ``nccl`` stands for either.
        backend = process_group._get_backend(torch.device("cuda"))
        return _BY_NAME.get(backend.name(), LEGACY)
    except (AttributeError, RuntimeError):  # A group without CUDA, or a stand-in for a group.
        return LEGACY
