"""The operations that are measured: what each rank of a group calls, and the buffers for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

Call = Callable[[], Any]
"""Returns a handle to wait for, where it was made to be asynchronous."""

OPERATIONS: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
)  # fmt: skip

_DIVIDED: Final = ("all_gather", "reduce_scatter", "all_to_all")
_OF_ROOT: Final = ("gather", "scatter")


def members(operation: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that take part: of a message, the first and the last of the group."""
    return (ranks[0], ranks[-1]) if operation == "send" else tuple(ranks)


def tensor_elements(operation: str, num_bytes: int, group_size: int, element_size: int) -> int:
    """Return the elements of the largest tensor of at most ``num_bytes`` that can be sent; at least one for each."""
    unit = group_size if operation in _DIVIDED else 1
    return max(num_bytes // (unit * element_size), 1) * unit


def buffer_bytes(operation: str, num_bytes: int, group_size: int) -> int:
    """Return the memory that the rank with the most of it needs."""
    if operation in _OF_ROOT:
        return num_bytes * (group_size + 1)
    return num_bytes * (2 if operation in _DIVIDED else 1)


def make_call(
    operation: str,
    elements: int,
    ranks: Sequence[int],
    group: ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_async: bool = False,
) -> Call:
    """Return what this rank calls in each iteration; the tensor S has ``elements``.

    Args:
        ranks: the root first.
        is_async: collectives return a handle.
    """
    import torch
    import torch.distributed as dist

    size, root, rank = len(ranks), ranks[0], dist.get_rank()
    is_root = rank == root
    whole = torch.ones(elements, dtype=dtype, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group, async_op=is_async)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, root, group=group, async_op=is_async)
    if operation == "reduce":
        return lambda: dist.reduce(whole, root, group=group, async_op=is_async)
    if operation == "send":
        if is_root:
            return lambda: dist.send(whole, ranks[-1], group=group)
        return lambda: dist.recv(whole, root, group=group)
    if operation in _OF_ROOT:
        parts = [torch.ones_like(whole) for _ in ranks] if is_root else None
        if operation == "gather":
            return lambda: dist.gather(whole, parts, dst=root, group=group, async_op=is_async)
        return lambda: dist.scatter(whole, parts, src=root, group=group, async_op=is_async)
    if operation == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group, async_op=is_async)
    shard = torch.ones(elements // size, dtype=dtype, device=device)
    # torch 2.13 renamed both, and warns of the old names.
    if operation == "all_gather":
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: all_gather(whole, shard, group=group, async_op=is_async)
    assert operation == "reduce_scatter", operation
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: reduce_scatter(shard, whole, group=group, async_op=is_async)
