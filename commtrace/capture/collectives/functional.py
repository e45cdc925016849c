"""Capture functional collectives and the waits for them.

Calls from Python are intercepted in the operators (:mod:`commtrace.capture.collectives.operator_calls`). Kernels in
torch's dispatcher follow once something may call an operator from C++, and leave to those what came from Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from commtrace.capture.collectives.dispatcher import (
    Capture,
    Captures,
    Original,
    default_overload,
    is_traced,
    kernel_for,
)
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import NO_SELF_BYTES, OPERATIONS, Arguments, Operation
from commtrace.capture.collectives.operator_calls import (
    OperatorCalls,
    by_position,
    what_reaches_kernels,
)
from commtrace.capture.device.clock import Mark, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.hooks import Hooks
from commtrace.capture.native import Native, NativeFacts
from commtrace.capture.records import (
    NUMBER,
    WAITED,
    DeviceCall,
    Launch,
    forgotten_rows,
    kind_of,
    launch_of,
    next_id,
    stall_rows,
    waited_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload
    from torch.distributed import ProcessGroup

PART: Final = "capture of functional collectives"

FunctionalPayload: TypeAlias = "tuple[int, int, torch.dtype | None, tuple[int, ...] | None]"
"""``(num_bytes, self_bytes, dtype, bytes of each member if several)``."""


class FunctionalOperation(NamedTuple):
    """An operator of ``_c10d_functional``, with the positions of its arguments; a root of −1 is none."""

    operation: Operation
    measure: Callable[[Arguments, ProcessGroup], FunctionalPayload]  # sizes come from inputs
    group_argument: int
    tensor_argument: int = 0
    root_argument: int = -1


def _input(arguments: Arguments, _process_group: object) -> FunctionalPayload:
    tensor = arguments[0]
    return tensor.nbytes, NO_SELF_BYTES, tensor.dtype, None


def _input_per_member(arguments: Arguments, process_group: ProcessGroup) -> FunctionalPayload:
    tensor = arguments[0]
    return tensor.nbytes * process_group.size(), NO_SELF_BYTES, tensor.dtype, None


def _inputs(arguments: Arguments, _process_group: object) -> FunctionalPayload:
    return _members([tensor.nbytes for tensor in arguments[0]], arguments[0])


def _inputs_per_member(arguments: Arguments, process_group: ProcessGroup) -> FunctionalPayload:
    return _members([tensor.nbytes * process_group.size() for tensor in arguments[0]], arguments[0])


def _members(sizes: list[int], tensors: Sequence[torch.Tensor]) -> FunctionalPayload:
    dtype = tensors[0].dtype if tensors else None
    return sum(sizes), NO_SELF_BYTES, dtype, tuple(sizes) if len(sizes) > 1 else None


def _splits(arguments: Arguments, process_group: ProcessGroup) -> FunctionalPayload:
    tensor, splits = arguments[0], [int(split) for split in arguments[2]]
    rows = tensor.size(0)
    self_bytes = tensor.nbytes // rows * splits[process_group.rank()] if splits and rows else 0
    return tensor.nbytes, self_bytes if splits else NO_SELF_BYTES, tensor.dtype, None


_ALL_REDUCE: Final = OPERATIONS["allreduce"]
_ALL_GATHER: Final = OPERATIONS["allgather"]
_REDUCE_SCATTER: Final = OPERATIONS["reduce_scatter"]
_BROADCAST: Final = OPERATIONS["broadcast"]

FUNCTIONAL: Final[Mapping[str, FunctionalOperation]] = {
    "all_reduce": FunctionalOperation(_ALL_REDUCE, _input, 2),
    "all_reduce_": FunctionalOperation(_ALL_REDUCE, _input, 2),
    "all_reduce_coalesced": FunctionalOperation(_ALL_REDUCE, _inputs, 2),
    "all_reduce_coalesced_": FunctionalOperation(_ALL_REDUCE, _inputs, 2),
    "all_gather_into_tensor": FunctionalOperation(_ALL_GATHER, _input_per_member, 2),
    "all_gather_into_tensor_out": FunctionalOperation(_ALL_GATHER, _input_per_member, 2),
    "all_gather_into_tensor_coalesced": FunctionalOperation(_ALL_GATHER, _inputs_per_member, 2),
    "reduce_scatter_tensor": FunctionalOperation(_REDUCE_SCATTER, _input, 3),
    "reduce_scatter_tensor_out": FunctionalOperation(_REDUCE_SCATTER, _input, 3),
    "reduce_scatter_tensor_coalesced": FunctionalOperation(_REDUCE_SCATTER, _inputs, 3),
    "all_to_all_single": FunctionalOperation(OPERATIONS["alltoall"], _splits, 3),
    "broadcast": FunctionalOperation(_BROADCAST, _input, 2, root_argument=1),
    "broadcast_": FunctionalOperation(_BROADCAST, _input, 2, root_argument=1),
}


class FunctionalMessage(NamedTuple):
    """A point-to-point operation; ``peer`` is a rank inside the group."""

    operation: Operation
    tensor: torch.Tensor
    peer: int
    tag: int


def _sent(arguments: Arguments) -> list[FunctionalMessage]:
    return [FunctionalMessage(OPERATIONS["send"], *arguments[:3])]


def _received(arguments: Arguments) -> list[FunctionalMessage]:
    return [FunctionalMessage(OPERATIONS["recv"], *arguments[:3])]


def _batch(arguments: Arguments) -> list[FunctionalMessage]:
    names, peers, tags, tensors = arguments[:4]
    return [
        FunctionalMessage(OPERATIONS["send" if name == "isend" else "recv"], tensor, peer, tag)
        for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True)
    ]


FUNCTIONAL_P2P: Final[Mapping[str, Callable[[Arguments], list[FunctionalMessage]]]] = {
    "isend": _sent,
    "irecv": _received,
    "batch_p2p_ops": _batch,
}
"""Operators of newer versions of torch → the messages in their arguments; the last argument is the group."""

TENSOR_ARGUMENT: Final[Mapping[str, int]] = {"batch_p2p_ops": 3}
"""Position of the tensors where it is not the first one."""

EVERY_OPERATOR: Final = frozenset({*FUNCTIONAL, *FUNCTIONAL_P2P})


_WITH_GRADIENTS: Final = ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
"""Operators of ``_c10d_functional_autograd``, which have the arguments of those of ``_c10d_functional``."""


class FunctionalCapture:
    """Record functional collectives; ``kernels_for`` names those that nothing but a kernel sees when C++ calls them."""

    def __init__(
        self,
        tracer: Tracer,
        waits: FunctionalWaits,
        devices: DeviceCalls | None = None,
        kernels_for: Collection[str] = EVERY_OPERATOR,
    ) -> None:
        self._tracer = tracer
        self._waits = waits
        self._devices = devices
        self._kernels_for = kernels_for
        self._calls = OperatorCalls(None if tracer.native is None else tracer.native.core)
        self._captures = Captures(tracer.thread)
        self._hooks = Hooks(PART, tracer)
        self._state_of: Callable[[str | ProcessGroup], tuple[ProcessGroup, GroupState]] = _states(tracer)

    def install(self) -> None:
        if self._calls:
            return
        reaches_kernels = what_reaches_kernels()
        for name in sorted(EVERY_OPERATOR):
            overload = default_overload("_c10d_functional", name)
            if overload is not None:
                capture = self._capture(name, overload, reaches_kernels, from_python=True)
                self._calls.take(overload, capture, **self._common(name, overload))
        for name in _WITH_GRADIENTS:
            overload = default_overload("_c10d_functional_autograd", name)
            if overload is not None and _communicates_itself(overload):
                capture = self._collective_capture(overload, FUNCTIONAL[name], reaches_kernels, from_python=True)
                self._calls.take(overload, capture, **self._common(name, overload))
            elif overload is not None:
                self._calls.take(overload, self._called_from_cpp)
        self._waits.install()
        self._hooks.when_imported("torch._inductor.codecache", self._watch_compiled_cpp)
        self._hooks.when_imported("torch._inductor.package.package", self._watch_packages)

    def uninstall(self) -> None:
        self._hooks.restore()
        self._calls.release()
        self._captures.release()
        self._waits.uninstall()

    def capture_calls_of_cpp(self) -> None:
        """Register kernels, for operators that C++ calls. Idempotent."""
        if self._captures or not self._calls:
            return
        thread = self._tracer.thread

        def is_sent(value: object) -> bool:
            return not thread.is_in_operator and not is_traced(value)

        for name in sorted(self._kernels_for):
            kernel = kernel_for("_c10d_functional", name)
            if kernel is not None:
                self._captures.take(kernel, self._capture(name, kernel.overload, is_sent, from_python=False))
        self._waits.capture_calls_of_cpp()

    def _common(self, name: str, overload: OpOverload) -> dict[str, int]:
        """Return what the native part needs to know of an operator with one tensor; nothing of others."""
        native, functional = self._tracer.native, FUNCTIONAL.get(name)
        if native is None or functional is None or functional.measure not in (_input, _input_per_member):
            return {}
        return {
            "operation": native.operation(functional.operation),
            "name": native.code(functional.operation.name),
            "num_arguments": len(overload._schema.arguments),
            "tensor": functional.tensor_argument,
            "group": functional.group_argument,
            "root": functional.root_argument,
            "is_per_rank": functional.measure is _input_per_member,
        }

    def _called_from_cpp(self, original: Original, arguments: Arguments, keywords: dict[str, Any]) -> object:
        try:
            self.capture_calls_of_cpp()
        except Exception as error:
            self._tracer.failed(PART, error)
        return original(*arguments, **keywords)

    def _watch_compiled_cpp(self, codecache: ModuleType) -> None:
        # With torch._inductor.config.cpp_wrapper a graph calls operators from C++.
        compiled = getattr(codecache, "CppWrapperCodeCache", None)
        if getattr(compiled, "cache", None):
            self.capture_calls_of_cpp()

        def begin(arguments: Arguments, _keywords: dict[str, object]) -> None:
            if arguments and arguments[0] is compiled:
                self.capture_calls_of_cpp()

        wrap = self._hooks.around(begin)
        self._hooks.replace_method(codecache, "CppPythonBindingsCodeCache", "load_pybinding_async", wrap)

    def _watch_packages(self, package: ModuleType) -> None:
        # So do the graphs in packages of AOTInductor.
        wrap = self._hooks.around(lambda _args, _kwargs: self.capture_calls_of_cpp())
        self._hooks.replace_method(package, "AOTICompiledModel", "__init__", wrap)

    def _capture(
        self, name: str, overload: OpOverload, is_sent: Callable[[object], bool], *, from_python: bool
    ) -> Capture:
        if name in FUNCTIONAL:
            return self._collective_capture(overload, FUNCTIONAL[name], is_sent, from_python=from_python)
        return self._p2p_capture(overload, FUNCTIONAL_P2P[name], TENSOR_ARGUMENT.get(name, 0), is_sent)

    def _collective_capture(
        self,
        overload: OpOverload,
        operation: FunctionalOperation,
        is_sent: Callable[[object], bool],
        *,
        from_python: bool,
    ) -> Capture:
        from torch._C import _functorch

        is_wrapped: Callable[[Any], bool] = _functorch.is_functorch_wrapped_tensor
        thread, failed = self._tracer.thread, self._tracer.failed
        launch, remember, forget_results = self._launching(operation), self._waits.remember, self._waits.forget_results
        tensor_argument, group_argument, state_of = operation.tensor_argument, operation.group_argument, self._state_of

        def capture(original: Original, arguments: Arguments, keywords: dict[str, Any]) -> object:
            functional = state = None
            seq = -1
            try:
                positional = by_position(overload, arguments, keywords) if keywords else arguments
                tensor = positional[tensor_argument]
                if from_python and type(tensor) is not list and is_wrapped(tensor):
                    self.capture_calls_of_cpp()  # A transform of torch.func calls the operator, perhaps several times.
                elif is_sent(tensor):
                    process_group, state = state_of(positional[group_argument])
                    seq = next(state.collective_seq)
                    functional = launch(positional, process_group, state, seq)
                    # The operator goes on to one of ``c10d``, with a hook or kernel of its own, and may itself have a
                    # kernel of ours: neither must count it again.
                    thread.has_counted = thread.is_in_operator = True
            except Exception as error:
                failed(PART, error)
            if state is None:
                return original(*arguments, **keywords)
            try:
                result = original(*arguments, **keywords)
            except BaseException:
                try:
                    if seq >= 0:
                        state.take_back(seq)
                except Exception as error:
                    failed(PART, error)
                raise
            finally:
                try:
                    thread.has_counted = thread.is_in_operator = False
                except Exception as error:
                    failed(PART, error)
            try:
                storages = map(storage_of, result if type(result) is list else (result,))
                if functional is not None:
                    remember(functional, storages)
                else:
                    forget_results(storages)
            except Exception as error:
                failed(PART, error)
            return result

        return capture

    def _p2p_capture(
        self,
        overload: OpOverload,
        messages: Callable[[Arguments], list[FunctionalMessage]],
        tensor_argument: int,
        is_sent: Callable[[object], bool],
    ) -> Capture:
        thread, failed = self._tracer.thread, self._tracer.failed

        def capture(original: Original, arguments: Arguments, keywords: dict[str, Any]) -> object:
            sent: list[tuple[torch.Tensor, AwaitedResult | None]] = []
            numbers: list[tuple[bool, int, int]] = []
            state: GroupState | None = None
            try:
                positional = by_position(overload, arguments, keywords) if keywords else arguments
                if is_sent(positional[tensor_argument]):
                    _, state = self._state_of(positional[-1])
                    for message in messages(positional):
                        peer = state.ranks_by_group_rank[message.peer]
                        seq = state.next_p2p(message.operation.is_send, peer, message.tag)
                        numbers.append((message.operation.is_send, peer, seq))
                        sent.append((message.tensor, self._launch_message(message, state, peer, seq)))
                    thread.has_counted = thread.is_in_operator = True
            except Exception as error:
                failed(PART, error)
            if state is None:
                return original(*arguments, **keywords)
            try:
                results = original(*arguments, **keywords)
            except BaseException:
                try:
                    for number in reversed(numbers):
                        state.take_back_p2p(*number)
                except Exception as error:
                    failed(PART, error)
                raise
            finally:
                try:
                    thread.has_counted = thread.is_in_operator = False
                except Exception as error:
                    failed(PART, error)
            try:
                results_of_all = results if isinstance(results, (list, tuple)) else (results,)
                # None were launched if that failed.
                for (tensor, functional), result in zip(sent, results_of_all, strict=False):
                    if functional is not None:
                        # torch waits for the same Work at either of them.
                        self._waits.remember(functional, map(storage_of, (tensor, result)))
            except Exception as error:
                failed(PART, error)
            return results

        return capture

    def _launch_message(
        self, message: FunctionalMessage, state: GroupState, peer: int, seq: int
    ) -> AwaitedResult | None:
        operation, tensor, _, _ = message
        is_wanted = self._tracer.recording or state.graph is not None
        if not is_wanted or self._tracer.groups.skips(state, peer):
            return None
        try:
            payload: FunctionalPayload = (tensor.nbytes, NO_SELF_BYTES, tensor.dtype, None)
        except Exception as error:
            payload = self._unmeasured(operation, (tensor,), error)
        return self._timed(operation, state, seq, payload, peer, tensor)

    def _unmeasured(self, operation: Operation, arguments: Arguments, error: Exception) -> FunctionalPayload:
        num_bytes, self_bytes, dtype, _, members = self._tracer.unmeasured(operation, arguments, error)
        return num_bytes, self_bytes, dtype, members

    def _launching(
        self, functional: FunctionalOperation
    ) -> Callable[[Arguments, ProcessGroup, GroupState, int], AwaitedResult | None]:
        """Return what takes the facts of a call, flat: it is the hot path."""
        operation, measure, _, tensor_argument, root = functional
        tracer, has_devices, timed, unmeasured = self._tracer, self._devices is not None, self._timed, self._unmeasured
        skip_roles, skips = tracer.groups.skip_roles, tracer.groups.skips

        def launch(
            arguments: Arguments, process_group: ProcessGroup, state: GroupState, seq: int
        ) -> AwaitedResult | None:
            if not (tracer.recording or state.graph is not None) or (skip_roles and skips(state)):
                return None
            try:
                num_bytes, self_bytes, dtype, members = payload = measure(arguments, process_group)
            except Exception as error:
                num_bytes, self_bytes, dtype, members = payload = unmeasured(operation, arguments, error)
            peer = -1 if root < 0 else state.ranks_by_group_rank[arguments[root]]
            if has_devices:
                return timed(operation, state, seq, payload, peer, arguments[tensor_argument])
            return AwaitedResult(launch_of((
                operation, state, seq, num_bytes, self_bytes, dtype, peer, True, tracer.coordinates, members, now_ns(),
            )))  # fmt: skip

        return launch

    def _timed(
        self,
        operation: Operation,
        state: GroupState,
        seq: int,
        payload: FunctionalPayload,
        peer: int,
        tensor: torch.Tensor,
    ) -> AwaitedResult | None:
        num_bytes, self_bytes, dtype, members = payload
        launch = launch_of((
            operation, state, seq, num_bytes, self_bytes, dtype, peer, True, self._tracer.coordinates, members,
            now_ns(),
        ))  # fmt: skip
        if self._devices is None:
            return AwaitedResult(launch)
        device = _device(tensor)
        if device is None or device.type != "cuda":
            return AwaitedResult(launch) if state.graph is None else None
        call = self._devices.launch(launch, device.index)
        return None if call is None else AwaitedResult(call.launch, call)


def _device(value: torch.Tensor | Sequence[torch.Tensor]) -> torch.device | None:
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return getattr(tensor, "device", None)


def _communicates_itself(overload: OpOverload) -> bool:
    # In older versions of torch it calls the operator of the same name in ``_c10d_functional``, from C++, and so does
    # its backward.
    import torch

    key = "CompositeExplicitAutograd"
    name = f"{overload._namespace}::{overload._opname}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _states(tracer: Tracer) -> Callable[[str | ProcessGroup], tuple[ProcessGroup, GroupState]]:
    states, register, captures = tracer.groups.states, tracer.groups.state, tracer.captures

    def state_of(group: str | ProcessGroup) -> tuple[ProcessGroup, GroupState]:
        process_group = _resolving()(group) if isinstance(group, str) else group
        state = states.get(id(process_group)) or register(process_group)
        return process_group, captures.state(state) if captures.open else state

    return state_of


@functools.cache
def _resolving() -> Callable[[str], ProcessGroup]:
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]
    return resolve


class AwaitedResult:
    """A communication whose results may be waited for.

    ``call`` times it on an accelerator; a ``completion`` of None means that the return of its wait is its end.
    """

    __slots__ = ("call", "completion", "launch", "number", "waited")

    def __init__(
        self,
        launch: Launch,
        call: DeviceCall | None = None,
        completion: list[int] | None = None,
        number: int | None = None,
    ) -> None:
        self.launch = launch
        self.call = call
        self.completion = completion
        self.number = number if number is not None else next_id() if completion is None else completion[NUMBER]
        self.waited = False


class FunctionalWaits:
    """Find the communication that a wait belongs to, and record the stall."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        self._tracer = tracer
        self._devices = devices
        self._native = tracer.native
        self._calls = OperatorCalls(None if tracer.native is None else tracer.native.core)
        self._captures = Captures(tracer.thread)
        # By storage of the result (not by address: empty ones have none). The native part has a table of its own.
        self._pending: dict[int, AwaitedResult] = {}

    def install(self) -> None:
        if self._calls:
            return
        if self._native is not None:
            self._configure(self._native)
        reaches_kernels = what_reaches_kernels()
        for overload, capture in self._capturing(reaches_kernels):
            is_wait = overload._opname == "wait_tensor"
            self._calls.take(overload, capture, **({"is_wait": True, "num_arguments": 1} if is_wait else {}))

    def _configure(self, native: Native) -> None:
        import torch
        from torch._C import _functorch, _has_torch_function_unary

        native.core.configure_operators(
            failed=functools.partial(self._tracer.failed, PART),
            resolve_group=_resolving(),
            has_function=_has_torch_function_unary,
            num_modes=torch._C._len_torch_dispatch_stack,
            is_transformed=_functorch.is_functorch_wrapped_tensor,
            pending=self._pending,
            forget_result=self._forget_result,
        )

    def capture_calls_of_cpp(self) -> None:
        if self._captures:
            return
        for overload, capture in self._capturing(lambda value: not is_traced(value)):
            kernel = kernel_for("_c10d_functional", overload._opname)
            if kernel is not None:
                self._captures.take(kernel, capture)

    def uninstall(self) -> None:
        self._calls.release()
        self._captures.release()
        if self._native is not None:
            self._native.core.end_operators()
        for pending in list(self._pending.values()):
            self._forget(pending)
        self._pending.clear()

    def _capturing(self, is_waited_for: Callable[[object], bool]) -> Iterator[tuple[OpOverload, Capture]]:
        overload = default_overload("_c10d_functional", "wait_tensor")
        several = default_overload("_c10d_functional", "wait_tensors")
        if overload is not None:
            yield overload, self._wait_capture(is_waited_for)
        if overload is not None and several is not None:  # torch ≥ 2.15
            yield several, self._waits_capture(overload, is_waited_for)

    def unfinished(self) -> list[Launch]:
        """Return the communications that end with a wait, which has not come yet."""
        pending = list(self._pending.values())
        return [each.launch for each in pending if not each.waited and each.completion is None]

    def remember(self, awaited: AwaitedResult, storages: Iterable[int]) -> None:
        """Treat a wait for a tensor in one of these storages as a wait for this communication."""
        if awaited.call is not None and self._devices is not None:
            self._devices.record_handover(awaited.call)
        for storage in storages:
            earlier = self._pending.get(storage)
            if earlier is not None:
                self._forget(earlier)
            self._pending[storage] = awaited
            if self._native is not None:
                self._native.core.forget_result(storage)

    def forget_results(self, storages: Iterable[int]) -> None:
        """Give up what had these storages, which are those of other results now."""
        if not self._pending and self._native is None:
            return
        for storage in storages:
            self._forget_result(storage)
            if self._native is not None:
                self._native.core.forget_result(storage)

    def _forget_result(self, storage: int) -> None:
        earlier = self._pending.pop(storage, None)
        if earlier is not None:
            self._forget(earlier)

    def _take(self, storage: int) -> AwaitedResult | None:
        """Return the communication with its result in a storage, which is now waited for."""
        pending = self._pending.pop(storage, None)
        if pending is not None or self._native is None:
            return pending
        known = self._native.core.surrender_result(storage)
        if known is None:
            return None
        facts = NativeFacts(*known)
        launch = self._native.launch(facts)
        if self._devices is None or isinstance(launch.start, int):
            return AwaitedResult(launch, number=facts.id)
        return AwaitedResult(launch, self._devices.call_of(launch, facts.id, facts.position))

    def _is_result(self, storage: int) -> bool:
        return storage in self._pending or (self._native is not None and self._native.core.has_result(storage))

    def _forget(self, pending: AwaitedResult) -> None:
        if pending.waited or pending.completion is not None:
            return
        pending.waited = True
        if pending.call is not None and self._devices is not None:
            self._devices.give_up(pending.call)
            return
        self._tracer.append((forgotten_rows, kind_of(pending.launch), pending.launch, pending.number))

    def _wait_capture(self, is_waited_for: Callable[[object], bool]) -> Capture:
        blocked, failed = self._tracer.blocked, self._tracer.failed
        pending_by_storage, take, waited, has_native = self._pending, self._take, self._waited, self._native is not None

        def capture(original: Original, arguments: Arguments, keywords: dict[str, Any]) -> object:
            pending: AwaitedResult | None = None
            start: Mark = None
            storage = 0
            try:
                if pending_by_storage or has_native:
                    tensor = arguments[0] if arguments else keywords["tensor"]
                    if is_waited_for(tensor):
                        storage = tensor.untyped_storage()._cdata
                        pending = take(storage)
                    if pending is not None:
                        start = now_ns() if pending.call is None else pending.call.clock.mark(pending.call.device)
                        blocked[0] = pending.launch  # last: from here on it is reset, whatever happens
            except Exception as error:
                pending = None
                failed(PART, error)
            if pending is None:
                return original(*arguments, **keywords)
            try:
                result = original(*arguments, **keywords)
            except BaseException:
                try:  # Nobody has waited for it so far.
                    pending_by_storage.setdefault(storage, pending)
                except Exception as error:
                    failed(PART, error)
                raise
            finally:
                try:
                    blocked[0] = None
                except Exception as error:
                    failed(PART, error)
            try:
                if pending.call is None:
                    waited(pending, start, now_ns())
                else:
                    waited(pending, start, pending.call.clock.mark(pending.call.device))
            except Exception as error:
                failed(PART, error)
            return result

        return capture

    def _waits_capture(self, overload: OpOverload, is_waited_for: Callable[[object], bool]) -> Capture:
        def capture(original: Original, arguments: Arguments, keywords: dict[str, Any]) -> object:
            ours: list[torch.Tensor] = []
            try:
                tensors = arguments[0] if arguments else keywords["tensors"]
                if is_waited_for(tensors):
                    ours = [tensor for tensor in tensors if self._is_result(storage_of(tensor))]
            except Exception as error:
                self._tracer.failed(PART, error)
            # torch waits for one after the other. Where one wait ends and the next begins is known only if each is
            # an operator of its own, which is captured; the operator for all of them then finds nothing left to do.
            for tensor in ours:
                overload(tensor)
            return original(*arguments, **keywords)

        return capture

    def _waited(self, pending: AwaitedResult, start: Mark, end: Mark) -> None:
        if pending.waited and pending.launch.operation.is_p2p:
            return  # torch did not wait either: tensor and result of a message have one Work
        if pending.call is not None and self._devices is not None:
            self._devices.record_wait(pending.call, start, end)
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


def storage_of(tensor: torch.Tensor) -> int:
    """Return the storage of a tensor, by which torch keeps the Work of a result."""
    storage: int = tensor.untyped_storage()._cdata
    return storage
