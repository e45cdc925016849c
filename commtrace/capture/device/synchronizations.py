"""See the host wait for the device: the mark after it is passed at once by necessity, not because the host is late."""

from __future__ import annotations

from typing import Final, Literal

from commtrace.capture.device.clock import DeviceTiming
from commtrace.capture.hooks import RAISED, Arguments, Hooks, Keywords
from commtrace.capture.tracer import Tracer

PART: Final = "capture of synchronisations"

_METHODS: Final = (("Stream", "synchronize"), ("Event", "synchronize"))


class Synchronizations:
    """Tells the clock of calls of ``torch.cuda`` that wait for a device. Waits in C++ (``Tensor.item``) are not seen.

    ``cuda`` stands for the module ``torch.cuda``.
    """

    def __init__(self, tracer: Tracer, clock: DeviceTiming, cuda: object = None) -> None:
        self._clock = clock
        self._cuda = cuda
        self._hooks = Hooks(PART, tracer)

    def install(self) -> None:
        import torch

        cuda, replacement = self._cuda or torch.cuda, self._hooks.around(_waits, self._has_waited)
        self._hooks.replace(cuda, "synchronize", replacement)
        for owner, name in _METHODS:
            self._hooks.replace(getattr(cuda, owner), name, replacement)

    def uninstall(self) -> None:
        """Put the originals back."""
        self._hooks.restore()

    def _has_waited(self, _waited: Literal[True], result: object) -> None:
        if result is not RAISED:
            self._clock.synchronized()


def _waits(_arguments: Arguments, _keywords: Keywords) -> Literal[True]:
    return True
