"""The NCCL backends of torch and the streams on which they run operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from commtrace.capture.collectives.operations import Operation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
