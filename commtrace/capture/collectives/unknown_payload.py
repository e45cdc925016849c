"""Communication whose bytes cannot be read: a tensor of a kind that nobody has thought of, for one.

It is recorded all the same, with its number, its group and its times; its bytes are :data:`UNKNOWN_BYTES`. The capture
goes on, and the ranks' numbers stay equal. The log and the run's files report it once per operation; the rows show how
often it happened.
"""

from __future__ import annotations

from typing import Any, Final

from commtrace.capture.collectives.operations import NO_SELF_BYTES, Operation, Payload
from commtrace.capture.guard import Guard
from commtrace.trace import schema

UNKNOWN_BYTES: Final = schema.NOT_APPLICABLE

_MOST_NESTING: Final = 3


class Unmeasured:
    """Stands in for what measures a communication where that fails.

    Args:
        guard: tells it.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._reported: set[str] = set()

    def __call__(self, operation: Operation, arguments: tuple[Any, ...], error: Exception) -> Payload:
        """Return the payload, of which the dtype and one tensor may be known. ``arguments`` are those of the call."""
        if operation.name not in self._reported:
            self._reported.add(operation.name)
            self._guard.noticed(
                f"the bytes of {operation.name} cannot be read ({type(error).__name__}: {error}): where that is so "
                "they are unknown. Its time, its group and its number are recorded."
            )
        tensor = _tensor(arguments, _MOST_NESTING)
        return UNKNOWN_BYTES, NO_SELF_BYTES, getattr(tensor, "dtype", None), tensor, None


def _tensor(values: Any, nesting: int) -> Any:
    """Return the first tensor in arguments that says where it is: that decides how the communication is timed."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if nesting and isinstance(value, (list, tuple)):
            found = _tensor(value, nesting - 1)
            if found is not None:
                return found
    return None
