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

from commtrace.capture.clock import now_ns
from commtrace.capture.functional_operations import FUNCTIONAL, FunctionalOperation
from commtrace.capture.process_groups import CAPTURED_CODE
from commtrace.capture.records import Launch, forgotten_rows, next_id, stall_rows, waited_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of functional collectives"


class FunctionalCapture:
    """Registers the kernels and turns what passes them into entries of the recorder's buffer.

    Args:
        tracer: where entries go and coordinates come from.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
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
            launch = None
            try:
                launch = self._launch(operation, arguments)
            except Exception as error:
                self._tracer.failed(PART, error)
            result = overload._op_dk(DispatchKey.CompositeExplicitAutograd, *arguments, **keywords)
            try:
                if launch is not None:
                    self._remember(launch, result)
            except Exception as error:
                self._tracer.failed(PART, error)
            return result

        CAPTURED_CODE.add(kernel.__code__)
        return kernel

    def _launch(self, operation: FunctionalOperation, arguments: tuple[Any, ...]) -> Launch | None:
        from torch.distributed import distributed_c10d

        tracer = self._tracer
        group = arguments[operation.group_argument]
        resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
        process_group = resolve(group) if isinstance(group, str) else group
        state = tracer.groups.state(process_group)
        seq = next(state.collective_seq)
        if not tracer.recording:
            return None
        num_bytes, self_bytes, dtype, members = operation.measure(arguments, process_group)
        return (
            operation.operation, state, seq, num_bytes, self_bytes, dtype, -1, True, tracer.coordinates, members,
            now_ns(),
        )  # fmt: skip

    def _remember(self, launch: Launch, result: Any) -> None:
        pending = _Functional(launch)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            address = tensor.untyped_storage().data_ptr()
            earlier = self._pending.get(address)
            if earlier is not None:
                self._forget(earlier)
            self._pending[address] = pending

    def _forget(self, pending: _Functional) -> None:
        if not pending.waited:
            pending.waited = True
            self._tracer.append((forgotten_rows, schema.COLLECTIVE, pending.launch, pending.number))

    def _wait_kernel(self, overload: Any) -> Callable[..., Any]:
        from torch._C import DispatchKey

        def kernel(tensor: Any) -> Any:
            if is_traced(tensor):
                return overload._op_dk(DispatchKey.Meta, tensor)
            start = now_ns()
            result = overload._op_dk(DispatchKey.CompositeExplicitAutograd, tensor)
            try:
                pending = self._pending.pop(tensor.untyped_storage().data_ptr(), None)
                if pending is not None:
                    self._waited(pending, start, now_ns())
            except Exception as error:
                self._tracer.failed(PART, error)
            return result

        return kernel

    def _waited(self, pending: _Functional, start: int, end: int) -> None:
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

    __slots__ = ("launch", "number", "waited")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.number = next_id()
        self.waited = False


def overload_of(namespace: Any, name: str) -> Any:
    """The operator's default overload, or None where this version of torch does not have it."""
    packet = getattr(namespace, name, None)
    return None if packet is None else getattr(packet, "default", None)


def is_traced(value: Any) -> bool:
    """Whether a tensor is a stand-in, as when ``torch.compile`` traces a graph: nothing is sent then."""
    from torch._subclasses.fake_tensor import FakeTensor

    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(tensor, FakeTensor) or bool(getattr(tensor, "is_meta", False))
