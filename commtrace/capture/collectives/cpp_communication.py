"""Captures communication that C++ issues: functional collectives, compiled graphs, the reducer of DDP.

No method of ``ProcessGroup`` sees it. On torch ≥ 2.14 its hooks of process groups do (:class:`Hooked`), before that
kernels in its dispatcher (:class:`Dispatched`). Both count alike; only ends of functional collectives differ.
"""

from __future__ import annotations

from typing import Final, Protocol

from commtrace.capture.collectives.ddp_reducer import CppCalls, ReducerCapture
from commtrace.capture.collectives.functional import FUNCTIONAL_P2P, FunctionalCapture, FunctionalWaits
from commtrace.capture.collectives.process_group_hooks import ProcessGroupHooks
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.hooks import Part
from commtrace.capture.records import Launch
from commtrace.capture.tracer import Tracer

PART: Final = "capture of what C++ communicates"

NOT_TOLD_TO_HOOKS: Final = frozenset({"all_to_all_single", *FUNCTIONAL_P2P})
"""Functional operators with splits or tags."""


class CppCommunication(Part, Protocol):
    """A way to see what C++ issues."""

    def unfinished(self) -> list[Launch]:
        """Return what was launched and whose end has not been seen."""


def capture_of_cpp(tracer: Tracer, devices: DeviceCalls | None = None) -> CppCommunication:
    """Return the way that this version of torch has."""
    return Hooked(tracer, devices) if torch_has_hooks() else Dispatched(tracer, devices)


def torch_has_hooks() -> bool:
    """Return whether process groups have pre- and post-hooks."""
    from torch.distributed import ProcessGroup

    return hasattr(ProcessGroup, "register_pre_hook") and hasattr(ProcessGroup, "register_post_hook")


class _Timed:
    """The calls that either way times."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None) -> None:
        self._issued = CppCalls(tracer, devices)
        self._waits = FunctionalWaits(tracer, devices)

    def unfinished(self) -> list[Launch]:
        return [*self._waits.unfinished(), *self._issued.unfinished()]


class Hooked(_Timed):
    """Torch's hooks, and kernels for what they are not told: splits, tags and waits."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        super().__init__(tracer, devices)
        self._reducer = ReducerCapture(tracer, self._issued, by_kernels=False)
        self._functional = FunctionalCapture(tracer, self._waits, devices, operators=NOT_TOLD_TO_HOOKS)
        self._hooks = ProcessGroupHooks(tracer, self._issued, self._waits, self._reducer)

    def install(self) -> None:
        """Register the hooks, and capture what the kernels get."""
        self._functional.install()
        self._reducer.install()
        self._hooks.install()

    def uninstall(self) -> None:
        """Remove the hooks, and have the kernels pass everything through."""
        self._hooks.uninstall()
        self._reducer.uninstall()
        self._functional.uninstall()


class Dispatched(_Timed):
    """Kernels for all of it."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        super().__init__(tracer, devices)
        self._reducer = ReducerCapture(tracer, self._issued)
        self._functional = FunctionalCapture(tracer, self._waits, devices)

    def install(self) -> None:
        """Capture what the kernels get: those for the reducer when the first DDP is made."""
        self._functional.install()
        self._reducer.install()

    def uninstall(self) -> None:
        """Have the kernels pass everything through."""
        self._reducer.uninstall()
        self._functional.uninstall()
