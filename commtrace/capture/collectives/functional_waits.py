"""Captures waits for the results of functional collectives: ``wait_tensor`` and ``wait_tensors``.

No hook and no Python method sees a wait: graphs and C++ call the operator. A kernel in the dispatcher takes the time;
the storage of the tensor says what was waited for, as it does to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from commtrace.capture.collectives.dispatcher import Captures, Kernel, is_traced, kernel_for
from commtrace.capture.device.clock import Mark, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.records import (
    NUMBER,
    WAITED,
    DeviceCall,
    Launch,
    forgotten_rows,
    kind_of,
    next_id,
    stall_rows,
    waited_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of functional collectives"


class Awaited:
    """A communication whose result somebody may wait for; a coalesced one has several results.

    Args:
        launch: as in :mod:`commtrace.capture.records`.
        call: times it, if its tensors are on an accelerator.
        completion: what its callback fills in, as in :mod:`commtrace.capture.records`; None if the wait is its end.
    """

    __slots__ = ("call", "completion", "launch", "number", "waited")

    def __init__(self, launch: Launch, call: DeviceCall | None = None, completion: list[int] | None = None) -> None:
        self.launch = launch
        self.call = call
        self.completion = completion
        self.number = next_id() if completion is None else completion[NUMBER]
        self.waited = False


class FunctionalWaits:
    """The results that are waited for, and the waits.

    Args:
        tracer: where entries go.
        devices: times tensors of an accelerator; None where there is none.
    """

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        self._tracer = tracer
        self._devices = devices
        self._captures = Captures()
        # By storage of the result (not by address: empty ones have none).
        self._pending: dict[int, Awaited] = {}

    def install(self) -> None:
        """Capture what the kernels get. Idempotent."""
        if self._captures:
            return
        one, several = functional_kernel("wait_tensor"), functional_kernel("wait_tensors")
        if one is not None:
            self._captures.take(one, self._wait_capture(one))
        if one is not None and several is not None:  # torch ≥ 2.15
            self._captures.take(several, self._waits_capture(several, one.overload))

    def uninstall(self) -> None:
        """Have the kernels pass everything through."""
        self._captures.release()
        for pending in list(self._pending.values()):
            self._forget(pending)
        self._pending.clear()

    def unfinished(self) -> list[Launch]:
        """Return what nobody has waited for, and whose end nobody else reports."""
        pending = list(self._pending.values())
        return [each.launch for each in pending if not each.waited and each.completion is None]

    def remember(self, awaited: Awaited, storages: Iterable[int]) -> None:
        """Take note that who waits for a tensor in one of these storages waits for this communication."""
        if awaited.call is not None and self._devices is not None:
            self._devices.returned(awaited.call)
        for storage in storages:
            earlier = self._pending.get(storage)
            if earlier is not None:
                self._forget(earlier)
            self._pending[storage] = awaited

    def _forget(self, pending: Awaited) -> None:
        if pending.waited or pending.completion is not None:
            return
        pending.waited = True
        if pending.call is not None and self._devices is not None:
            self._devices.forgotten(pending.call)
            return
        self._tracer.append((forgotten_rows, kind_of(pending.launch), pending.launch, pending.number))

    def _wait_capture(self, kernel: Kernel) -> Callable[..., object]:
        from torch._C import DispatchKey

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed
        overload, original = kernel.overload, kernel.original

        def capture(tensor: Any) -> object:
            key = None
            try:
                key = meta if is_traced(tensor) else composite
            except Exception as error:
                failed(PART, error)
            if key is None:
                return original(tensor)
            return overload._op_dk(key, tensor) if key is meta else self._timed_wait(overload, key, tensor)

        return capture

    def _waits_capture(self, kernel: Kernel, one: Any) -> Callable[..., object]:
        from torch._C import DispatchKey

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed
        overload, original = kernel.overload, kernel.original

        def capture(tensors: Any) -> object:
            key = None
            ours: list[Any] = []
            try:
                key = meta if is_traced(tensors) else composite
                ours = [tensor for tensor in tensors if storage_of(tensor) in self._pending] if key is composite else []
            except Exception as error:
                failed(PART, error)
            if key is None:
                return original(tensors)
            # torch waits for one after the other. Where one wait ends and the next begins is known only if each is
            # an operator of its own; the operator for all of them then finds nothing left to wait for.
            for tensor in ours:
                self._timed_wait(one, key, tensor)
            return overload._op_dk(key, tensors)

        return capture

    def _timed_wait(self, overload: Any, key: Any, tensor: Any) -> object:
        pending = start = None
        try:
            pending, start = self._about_to_wait(tensor)
        except Exception as error:
            pending = None
            self._tracer.failed(PART, error)
        try:
            result = overload._op_dk(key, tensor)
        finally:
            try:
                self._tracer.blocked[0] = None
            except Exception as error:
                self._tracer.failed(PART, error)
        try:
            if pending is not None:
                self._waited(pending, start, self._mark(pending))
        except Exception as error:
            self._tracer.failed(PART, error)
        return result

    def _about_to_wait(self, tensor: Any) -> tuple[Awaited | None, Mark]:
        pending = self._pending.pop(storage_of(tensor), None)
        if pending is None or (pending.waited and pending.launch.operation.is_p2p):
            # A message that has been waited for: torch did not wait either, tensor and result have one Work.
            return None, None
        self._tracer.blocked[0] = pending.launch
        return pending, self._mark(pending)

    def _mark(self, pending: Awaited) -> Mark:
        return now_ns() if pending.call is None else pending.call.clock.mark(pending.call.device)

    def _waited(self, pending: Awaited, start: Mark, end: Mark) -> None:
        if pending.call is not None and self._devices is not None:
            self._devices.waited(pending.call, start, end)
            pending.waited = True
            return
        tracer = self._tracer
        tracer.last_mark = end
        if pending.completion is not None:
            pending.completion[WAITED] = pending.completion[WAITED] or end
        if pending.completion is not None or pending.waited:  # it has a row of its own, or another result had
            tracer.append((stall_rows, schema.STALL, pending.launch, pending.number, tracer.coordinates, start, end))
        else:
            kinds = (kind_of(pending.launch), schema.STALL)
            tracer.append((waited_rows, kinds, pending.launch, tracer.coordinates, start, end, pending.number))
        pending.waited = True


def storage_of(tensor: Any) -> int:
    """Return the storage of a tensor, by which torch keeps the Work of a result."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def functional_kernel(name: str, tensor_argument: int = 0) -> Kernel | None:
    """Return our kernel of an operator of ``_c10d_functional``."""
    from torch._C import DispatchKey

    # Theirs are of no device. With the key of one torch ends with a segmentation fault.
    return kernel_for("_c10d_functional", name, lambda _: DispatchKey.CompositeExplicitAutograd, tensor_argument)
