"""Captures functional collectives: those of DTensor, of compiled graphs, and of code that calls them itself.

C++ issues them, so no method of Python sees them, but kernels in torch's dispatcher do. A kernel costs about 20 µs, so
it is used only where nothing cheaper sees the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from commtrace.capture.collectives.dispatcher import Captures, Kernel, is_traced
from commtrace.capture.collectives.functional_waits import PART as PART
from commtrace.capture.collectives.functional_waits import Awaited, FunctionalWaits, functional_kernel, storage_of
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import NO_SELF_BYTES, OPERATIONS, Operation
from commtrace.capture.device.clock import now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.records import Launch
from commtrace.capture.tracer import Tracer

FunctionalPayload = tuple[int, int, Any, "tuple[int, ...] | None"]
"""``(num_bytes, self_bytes, dtype, bytes of each member if several)``, as in
:mod:`commtrace.capture.collectives.operations`."""


class FunctionalOperation(NamedTuple):
    """An operator of ``_c10d_functional``. Sizes come from its inputs: an all_gather gathers its input once per member.

    Attributes:
        operation: what it does.
        measure: payload from the arguments and the process group.
        group_argument: position of the group (its name, or the group itself).
        tensor_argument: position of the tensor, or list of tensors, that is sent.
        root_argument: position of the root's rank inside the group; −1 where there is no root.
    """

    operation: Operation
    measure: Callable[[tuple[Any, ...], Any], FunctionalPayload]
    group_argument: int
    tensor_argument: int = 0
    root_argument: int = -1


def _input(arguments: tuple[Any, ...], _process_group: Any) -> FunctionalPayload:
    tensor = arguments[0]
    return tensor.nbytes, NO_SELF_BYTES, tensor.dtype, None


def _input_per_member(arguments: tuple[Any, ...], process_group: Any) -> FunctionalPayload:
    tensor = arguments[0]
    return tensor.nbytes * process_group.size(), NO_SELF_BYTES, tensor.dtype, None


def _inputs(arguments: tuple[Any, ...], _process_group: Any) -> FunctionalPayload:
    return _members([tensor.nbytes for tensor in arguments[0]], arguments[0])


def _inputs_per_member(arguments: tuple[Any, ...], process_group: Any) -> FunctionalPayload:
    return _members([tensor.nbytes * process_group.size() for tensor in arguments[0]], arguments[0])


def _members(sizes: list[int], tensors: Any) -> FunctionalPayload:
    dtype = tensors[0].dtype if tensors else None
    return sum(sizes), NO_SELF_BYTES, dtype, tuple(sizes) if len(sizes) > 1 else None


def _splits(arguments: tuple[Any, ...], process_group: Any) -> FunctionalPayload:
    tensor, splits = arguments[0], [int(split) for split in arguments[2]]
    rows = tensor.size(0)
    own = tensor.nbytes // rows * splits[process_group.rank()] if splits and rows else 0
    return tensor.nbytes, own if splits else NO_SELF_BYTES, tensor.dtype, None


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


class Message(NamedTuple):
    """One point-to-point operation. ``peer`` is a rank inside the group."""

    operation: Operation
    tensor: Any
    peer: int
    tag: int


def _sent(arguments: tuple[Any, ...]) -> list[Message]:
    return [Message(OPERATIONS["send"], *arguments[:3])]


def _received(arguments: tuple[Any, ...]) -> list[Message]:
    return [Message(OPERATIONS["recv"], *arguments[:3])]


def _batch(arguments: tuple[Any, ...]) -> list[Message]:
    names, peers, tags, tensors = arguments[:4]
    return [
        Message(OPERATIONS["send" if name == "isend" else "recv"], tensor, peer, tag)
        for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True)
    ]


FUNCTIONAL_P2P: Final[Mapping[str, Callable[[tuple[Any, ...]], list[Message]]]] = {
    "isend": _sent,
    "irecv": _received,
    "batch_p2p_ops": _batch,
}
"""Operators of newer versions of torch → the messages in their arguments, of which the last is the group."""

TENSOR_ARGUMENT: Final[Mapping[str, int]] = {"batch_p2p_ops": 3}
"""Position of the tensors where it is not the first one."""

EVERY_OPERATOR: Final = frozenset({*FUNCTIONAL, *FUNCTIONAL_P2P})


class FunctionalCapture:
    """Turns what passes the kernels of functional collectives into entries of the recorder's buffer.

    Args:
        tracer: where entries go and coordinates come from.
        waits: captures the waits for the results.
        devices: times tensors of an accelerator; None where there is none.
        operators: names of those that are met by a kernel.
    """

    def __init__(
        self,
        tracer: Tracer,
        waits: FunctionalWaits,
        devices: DeviceCalls | None = None,
        operators: Collection[str] = EVERY_OPERATOR,
    ) -> None:
        self._tracer = tracer
        self._waits = waits
        self._devices = devices
        self._operators = operators
        self._captures = Captures()

    def install(self) -> None:
        """Capture what the kernels get. Idempotent."""
        if self._captures:
            return
        for name in sorted(self._operators):
            kernel = functional_kernel(name, TENSOR_ARGUMENT.get(name, 0))
            if kernel is None:
                continue
            if name in FUNCTIONAL:
                self._captures.take(kernel, self._collective_capture(kernel, FUNCTIONAL[name]))
            else:
                self._captures.take(kernel, self._p2p_capture(kernel, FUNCTIONAL_P2P[name]))
        self._waits.install()

    def uninstall(self) -> None:
        """Have the kernels pass everything through."""
        self._captures.release()
        self._waits.uninstall()

    def _collective_capture(self, kernel: Kernel, operation: FunctionalOperation) -> Callable[..., Any]:
        from torch._C import DispatchKey

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed
        thread, overload, original = self._tracer.thread, kernel.overload, kernel.original

        def capture(*arguments: Any, **keywords: Any) -> Any:
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
                # The operator goes on to one of ``c10d``, with a hook or kernel of its own, which must not count again.
                thread.has_counted = key is composite
            except Exception as error:
                failed(PART, error)
            if key is None:
                return original(*arguments, **keywords)
            try:
                result = overload._op_dk(key, *arguments, **keywords)
            except BaseException:
                try:
                    if state is not None:
                        state.take_back(seq)
                except Exception as error:
                    failed(PART, error)
                raise
            finally:
                try:
                    thread.has_counted = False
                except Exception as error:
                    failed(PART, error)
            try:
                if functional is not None:
                    results = result if isinstance(result, (list, tuple)) else (result,)
                    self._waits.remember(functional, map(storage_of, results))
            except Exception as error:
                failed(PART, error)
            return result

        return capture

    def _p2p_capture(self, kernel: Kernel, messages: Callable[[tuple[Any, ...]], list[Message]]) -> Callable[..., Any]:
        from torch._C import DispatchKey

        meta, composite, failed = DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, self._tracer.failed
        thread, overload, original = self._tracer.thread, kernel.overload, kernel.original

        def capture(*arguments: Any) -> Any:
            key = None
            sent: list[tuple[Any, Awaited | None]] = []
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
                thread.has_counted = key is composite
            except Exception as error:
                failed(PART, error)
            if key is None:
                return original(*arguments)
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
            finally:
                try:
                    thread.has_counted = False
                except Exception as error:
                    failed(PART, error)
            try:
                results_of_all = results if isinstance(results, (list, tuple)) else (results,)
                # None were launched if that failed, and none when a graph is traced.
                for (tensor, functional), result in zip(sent, results_of_all, strict=False):
                    if functional is not None:
                        # torch waits for the same Work at either of them.
                        self._waits.remember(functional, map(storage_of, (tensor, result)))
            except Exception as error:
                failed(PART, error)
            return results

        return capture

    def _launch_message(self, message: Message, state: GroupState, peer: int, seq: int) -> Awaited | None:
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
    ) -> Awaited | None:
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
    ) -> Awaited | None:
        num_bytes, self_bytes, dtype, members = payload
        launch = Launch(
            operation, state, seq, num_bytes, self_bytes, dtype, peer, True, self._tracer.coordinates, members,
            now_ns(),
        )  # fmt: skip
        device = _device(tensor)
        if self._devices is None or device is None or device.type != "cuda":
            return Awaited(launch)
        call = self._devices.launch(launch, device.index)
        return None if call is None else Awaited(call.launch, call)


def _device(value: Any) -> Any:
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return getattr(tensor, "device", None)


def _process_group(group: Any) -> Any:
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(group) if isinstance(group, str) else group
