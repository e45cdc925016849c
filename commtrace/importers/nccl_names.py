"""Maps names of operations and element types in torch and NCCL to commtrace's."""

from __future__ import annotations

from typing import Final

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

ANONYMOUS: Final = "(anonymous namespace)::"
"""Its bracket does not begin the arguments of a kernel."""

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
    """Return the operation that ``_allgather_base``, ``nccl:all_reduce`` or ``ncclDevKernel_SendRecv(…)`` is; else
    empty.
    """
    letters = name.replace(ANONYMOUS, "").partition("(")[0].replace("_", "").lower()
    return next((operation for part, operation in _OPERATIONS.items() if part in letters), "")
