"""Captures functional collectives: those of DTensor, of compiled graphs, and of code that calls them itself.

They are issued by C++ and pass no Python method, so they are met in torch's dispatcher: a kernel at the dispatch key
BackendSelect is passed by every call of its operator, because that key is included by default, and calls on with the
key that would have been reached without it. That costs about 20 µs, so it is done only where nothing cheaper sees the
call.

In C++ a functional collective goes on to the ``c10d`` operators; :mod:`commtrace.capture.reducer` knows these kernels'
frames and does not count it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from commtrace.capture.clock import Mark, now_ns
from commtrace.capture.device_calls import DeviceCalls
from commtrace.capture.functional_operations import (
    FUNCTIONAL,
    FUNCTIONAL_P2P,
    FunctionalOperation,
    FunctionalPayload,
    Message,
)
from commtrace.capture.groups import GroupState
from commtrace.capture.operations import NO_SELF_BYTES, Operation
from commtrace.capture.process_groups import CAPTURED_CODE
from commtrace.capture.records import DeviceCall, Launch, forgotten_rows, kind_of, next_id, stall_rows, waited_rows
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
        # By storage of the result (not by address: empty ones have none): what was launched and not waited for.
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
        for name, messages in FUNCTIONAL_P2P.items():
            overload = overload_of(torch.ops._c10d_functional, name)
            if overload is not None:
                library.impl(name, self._p2p_kernel(overload, messages), "BackendSelect")
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

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed

        def kernel(*arguments: Any, **keywords: Any) -> Any:
            key = functional = state = None
            seq = -1
            try:
                if is_traced(arguments[operation.tensor_argument]):
                    key = meta
                else:
                    key = composite
                    state = self._tracer.groups.state(_process_group(arguments[operation.group_argument]))
                    seq = next(state.collective_seq)
                    functional = self._launch(operation, arguments, state, seq)
            except Exception as error:
                failed(PART, error)
            if key is None:  # The failure has taken this kernel out, so that this call passes by it.
                return overload(*arguments, **keywords)
            try:
                result = overload._op_dk(key, *arguments, **keywords)
            except BaseException:
                try:
                    if state is not None:
                        state.take_back(seq)
                except Exception as error:
                    failed(PART, error)
                raise
            try:
                if functional is not None:
                    self._remember(functional, result if isinstance(result, (list, tuple)) else (result,))
            except Exception as error:
                failed(PART, error)
            return result

        CAPTURED_CODE.add(kernel.__code__)
        return kernel

    def _p2p_kernel(self, overload: Any, messages: Callable[[tuple[Any, ...]], list[Message]]) -> Callable[..., Any]:
        from torch._C import DispatchKey

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed

        def kernel(*arguments: Any) -> Any:
            key = None
            sent: list[tuple[Any, _Functional | None]] = []
            numbers: list[tuple[bool, int, int]] = []
            state: GroupState | None = None
            try:
                if any(map(is_traced, arguments)):
                    key = meta
                else:
                    key = composite
                    state = self._tracer.groups.state(_process_group(arguments[-1]))
                    for message in messages(arguments):
                        peer = state.ranks_by_group_rank[message.peer]
                        seq = state.next_p2p(message.operation.is_send, peer, message.tag)
                        numbers.append((message.operation.is_send, peer, seq))
                        sent.append((message.tensor, self._launch_message(message, state, peer, seq)))
            except Exception as error:
                failed(PART, error)
            if key is None:  # The failure has taken this kernel out, so that this call passes by it.
                return overload(*arguments)
            try:
                results = overload._op_dk(key, *arguments)
            except BaseException:
                try:
                    for number in reversed(numbers):
                        if state is not None:
                            state.take_back_p2p(*number)
                except Exception as error:
                    failed(PART, error)
                raise
            try:
                results_of_all = results if isinstance(results, (list, tuple)) else (results,)
                # None were launched if that failed, and none when a graph is traced.
                for (tensor, functional), result in zip(sent, results_of_all, strict=False):
                    if functional is not None:
                        # torch waits for the same Work at either of them.
                        self._remember(functional, (tensor, result))
            except Exception as error:
                failed(PART, error)
            return results

        CAPTURED_CODE.add(kernel.__code__)
        return kernel

    def _launch_message(self, message: Message, state: GroupState, peer: int, seq: int) -> _Functional | None:
        operation, tensor, _, _ = message
        if not self._tracer.recording or self._tracer.groups.skips(state, peer):
            return None
        try:
            payload: FunctionalPayload = (tensor.nbytes, NO_SELF_BYTES, tensor.dtype, None)
        except Exception as error:
            payload = self._unmeasured(operation, (tensor,), error)
        return self._timed(operation, state, seq, payload, peer, tensor)

    def _unmeasured(self, operation: Operation, arguments: tuple[Any, ...], error: Exception) -> FunctionalPayload:
        num_bytes, self_bytes, dtype, _, members = self._tracer.unmeasured(operation, arguments, error)
        return num_bytes, self_bytes, dtype, members

    def _launch(
        self, operation: FunctionalOperation, arguments: tuple[Any, ...], state: GroupState, seq: int
    ) -> _Functional | None:
        if not self._tracer.recording or self._tracer.groups.skips(state):
            return None
        try:
            payload = operation.measure(arguments, _process_group(arguments[operation.group_argument]))
        except Exception as error:
            payload = self._unmeasured(operation.operation, arguments, error)
        root = operation.root_argument
        peer = -1 if root < 0 else state.ranks_by_group_rank[arguments[root]]
        tensor = arguments[operation.tensor_argument]
        return self._timed(operation.operation, state, seq, payload, peer, tensor)

    def _timed(
        self, operation: Operation, state: GroupState, seq: int, payload: FunctionalPayload, peer: int, tensor: Any
    ) -> _Functional | None:
        num_bytes, self_bytes, dtype, members = payload
        launch = (
            operation, state, seq, num_bytes, self_bytes, dtype, peer, True, self._tracer.coordinates, members,
            now_ns(),
        )  # fmt: skip
        device = _device(tensor)
        if self._devices is None or device is None or device.type != "cuda":
            return _Functional(launch)
        call = self._devices.launch(launch, device.index)
        return None if call is None else _Functional(call.launch, call)

    def _remember(self, pending: _Functional, results: Iterable[Any]) -> None:
        for tensor in results:
            storage = _storage(tensor)
            earlier = self._pending.get(storage)
            if earlier is not None:
                self._forget(earlier)
            self._pending[storage] = pending

    def _forget(self, pending: _Functional) -> None:
        if not pending.waited:
            pending.waited = True
            if pending.call is not None and self._devices is not None:
                self._devices.forgotten(pending.call)
                return
            self._tracer.append((forgotten_rows, kind_of(pending.launch), pending.launch, pending.number))

    def _wait_kernel(self, overload: Any) -> Callable[..., Any]:
        from torch._C import DispatchKey

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed
        blocked = self._tracer.blocked

        def kernel(tensor: Any) -> Any:
            key = pending = start = None
            try:
                if is_traced(tensor):
                    key = meta
                else:
                    key = composite
                    pending, start = self._about_to_wait(tensor)
            except Exception as error:
                pending = None
                failed(PART, error)
            if key is None:  # The failure has taken this kernel out, so that this call passes by it.
                return overload(tensor)
            try:
                result = overload._op_dk(key, tensor)
            finally:
                try:
                    blocked[0] = None
                except Exception as error:
                    failed(PART, error)
            try:
                if pending is not None:
                    self._waited(pending, start, self._mark(pending))
            except Exception as error:
                failed(PART, error)
            return result

        return kernel

    def _about_to_wait(self, tensor: Any) -> tuple[_Functional | None, Mark]:
        pending = self._pending.pop(_storage(tensor), None)
        if pending is None or (pending.waited and pending.launch[0].is_p2p):
            # A message that has been waited for: torch did not wait either, tensor and result have one Work.
            return None, None
        self._tracer.blocked[0] = pending.launch
        return pending, self._mark(pending)

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
        kinds = (kind_of(pending.launch), schema.STALL)
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


def _storage(tensor: Any) -> int:
    """What torch keeps the Work of a result by."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _process_group(group: Any) -> Any:
    """The group itself: graphs name it."""
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(group) if isinstance(group, str) else group


def overload_of(namespace: Any, name: str) -> Any:
    """The operator's default overload, or None where this version of torch does not have it."""
    packet = getattr(namespace, name, None)
    return None if packet is None else getattr(packet, "default", None)


def is_traced(value: Any) -> bool:
    """Whether a tensor is a stand-in, as when ``torch.compile`` traces a graph: nothing is sent then."""
    from torch._subclasses.fake_tensor import FakeTensor

    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(tensor, FakeTensor) or bool(getattr(tensor, "is_meta", False))
