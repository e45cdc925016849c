"""Captures functional collectives: those of DTensor, of compiled graphs, and of code that calls them itself.

They are issued by C++ and pass no Python method, so they are met in torch's dispatcher: a kernel at the dispatch key
BackendSelect is passed by every call of its operator, because that key is included by default, and calls on with the
key that would have been reached without it. That costs about 20 µs, so it is done only where nothing cheaper sees the
call.

In C++ a functional collective goes on to the ``c10d`` operators; :mod:`commtrace.capture.reducer` knows these kernels'
frames and does not count it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.clock import Mark, now_ns
from commtrace.capture.device_calls import DeviceCalls
from commtrace.capture.functional_operations import FUNCTIONAL, FunctionalOperation
from commtrace.capture.process_groups import CAPTURED_CODE
from commtrace.capture.records import DeviceCall, Launch, forgotten_rows, next_id, stall_rows, waited_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of functional collectives"


class FunctionalCapture:
    """Registers the kernels and turns what passes them into entries of the recorder's buffer.

    Args:
        tracer: where entries go and coordinates come from.
        devices: times tensors of an accelerator; None where there is none.
    """

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        self._tracer = tracer
        self._devices = devices
        self._library: Any = None
        # By address of the result: what has been launched and not been waited for.
        self._pending: dict[int, _Functional] = {}

    def install(self) -> None:
        """Register the kernels. Idempotent."""
        import torch

        if self._library is not None:
            return
        library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library
        for name, operation in FUNCTIONAL.items():
            overload = overload_of(torch.ops._c10d_functional, name)
            if overload is not None:
                library.impl(name, self._functional_kernel(overload, operation), "BackendSelect")
        wait = torch.ops._c10d_functional.wait_tensor.default
        library.impl("wait_tensor", self._wait_kernel(wait), "BackendSelect")

    def uninstall(self) -> None:
        """Take the kernels out."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
        for pending in list(self._pending.values()):
            self._forget(pending)
        self._pending.clear()

    def unfinished(self) -> list[Launch]:
        """Functional collectives that nobody has waited for."""
        return [pending.launch for pending in list(self._pending.values()) if not pending.waited]

    def _functional_kernel(self, overload: Any, operation: FunctionalOperation) -> Callable[..., Any]:
        from torch._C import DispatchKey

        def kernel(*arguments: Any, **keywords: Any) -> Any:
            if is_traced(arguments[operation.tensor_argument]):
                return overload._op_dk(DispatchKey.Meta, *arguments, **keywords)
            functional = None
            try:
                functional = self._launch(operation, arguments)
            except Exception as error:
                self._tracer.failed(PART, error)
            result = overload._op_dk(DispatchKey.CompositeExplicitAutograd, *arguments, **keywords)
            try:
                if functional is not None:
                    self._remember(functional, result)
            except Exception as error:
                self._tracer.failed(PART, error)
            return result

        CAPTURED_CODE.add(kernel.__code__)
        return kernel

    def _launch(self, operation: FunctionalOperation, arguments: tuple[Any, ...]) -> _Functional | None:
        from torch.distributed import distributed_c10d

        tracer = self._tracer
        group = arguments[operation.group_argument]
        resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
        process_group = resolve(group) if isinstance(group, str) else group
        state = tracer.groups.state(process_group)
        seq = next(state.collective_seq)
        if not tracer.recording or tracer.groups.skips(state):
            return None
        num_bytes, self_bytes, dtype, members = operation.measure(arguments, process_group)
        launch = (
            operation.operation, state, seq, num_bytes, self_bytes, dtype, -1, True, tracer.coordinates, members,
            now_ns(),
        )  # fmt: skip
        device = _device(arguments[operation.tensor_argument])
        if self._devices is None or device is None or device.type != "cuda":
            return _Functional(launch)
        call = self._devices.launch(launch, device.index)
        return None if call is None else _Functional(call.launch, call)

    def _remember(self, pending: _Functional, result: Any) -> None:
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            address = tensor.untyped_storage().data_ptr()
            earlier = self._pending.get(address)
            if earlier is not None:
                self._forget(earlier)
            self._pending[address] = pending

    def _forget(self, pending: _Functional) -> None:
        if not pending.waited:
            pending.waited = True
            if pending.call is not None and self._devices is not None:
                self._devices.forgotten(pending.call)
                return
            self._tracer.append((forgotten_rows, schema.COLLECTIVE, pending.launch, pending.number))

    def _wait_kernel(self, overload: Any) -> Callable[..., Any]:
        from torch._C import DispatchKey

        def kernel(tensor: Any) -> Any:
            if is_traced(tensor):
                return overload._op_dk(DispatchKey.Meta, tensor)
            pending, start = self._about_to_wait(tensor)
            self._tracer.blocked[0] = None if pending is None else pending.launch
            try:
                result = overload._op_dk(DispatchKey.CompositeExplicitAutograd, tensor)
            finally:
                self._tracer.blocked[0] = None
            try:
                if pending is not None:
                    self._waited(pending, start, self._mark(pending))
            except Exception as error:
                self._tracer.failed(PART, error)
            return result

        return kernel

    def _about_to_wait(self, tensor: Any) -> tuple[_Functional | None, Mark]:
        try:
            pending = self._pending.pop(tensor.untyped_storage().data_ptr(), None)
            return pending, None if pending is None else self._mark(pending)
        except Exception as error:
            self._tracer.failed(PART, error)
            return None, None

    def _mark(self, pending: _Functional) -> Mark:
        """On the clock that times this communication."""
        return now_ns() if pending.call is None else pending.call.clock.mark(pending.call.device)

    def _waited(self, pending: _Functional, start: Mark, end: Mark) -> None:
        if pending.call is not None and self._devices is not None:
            self._devices.waited(pending.call, start, end)
            pending.waited = True
            return
        tracer = self._tracer
        tracer.last_mark = end
        if pending.waited:  # another result of a coalesced operation
            tracer.append((stall_rows, schema.STALL, pending.launch, pending.number, tracer.coordinates, start, end))
            return
        pending.waited = True
        kinds = (schema.COLLECTIVE, schema.STALL)
        entry = (waited_rows, kinds, pending.launch, tracer.coordinates, start, end, pending.number)
        tracer.append(entry)


class _Functional:
    """A functional collective between its launch and its waits; a coalesced one has several results to wait for."""

    __slots__ = ("call", "launch", "number", "waited")

    def __init__(self, launch: Launch, call: DeviceCall | None = None) -> None:
        self.launch = launch
        self.call = call
        self.number = next_id()
        self.waited = False


def _device(value: Any) -> Any:
    """Of a tensor or of the first one of a list."""
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return getattr(tensor, "device", None)


def overload_of(namespace: Any, name: str) -> Any:
    """The operator's default overload, or None where this version of torch does not have it."""
    packet = getattr(namespace, name, None)
    return None if packet is None else getattr(packet, "default", None)


def is_traced(value: Any) -> bool:
    """Whether a tensor is a stand-in, as when ``torch.compile`` traces a graph: nothing is sent then."""
    from torch._subclasses.fake_tensor import FakeTensor

    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(tensor, FakeTensor) or bool(getattr(tensor, "is_meta", False))
