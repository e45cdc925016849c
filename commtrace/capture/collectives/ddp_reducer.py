"""Captures what ``DistributedDataParallel`` sends from C++, gradient buckets and broadcasts, and the stalls on it.

On torch ≥ 2.14 hooks of process groups see it (:mod:`commtrace.capture.collectives.process_group_hooks`). Before,
kernels in torch's dispatcher do, from the first DDP on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.collectives.cpp_calls import PART, CppCall, CppCalls
from commtrace.capture.collectives.dispatcher import Captures, Kernel, KeyOf, graph_task, is_traced, kernel_for
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import OPERATIONS, _flat
from commtrace.capture.device.clock import Mark
from commtrace.capture.hooks import Hooks
from commtrace.capture.records import DeviceCall, next_id
from commtrace.capture.tracer import Tracer

_COMMUNICATE_IN_CPP: Final = ("_broadcast_coalesced", "_verify_params_across_processes")
"""Functions of ``torch.distributed`` in C++ that others than DDP call too: FSDP1 to give all ranks the same model."""


class ReducerCapture:
    """Knows of every ``DistributedDataParallel`` and takes the times of its stalls.

    Args:
        tracer: where entries go and coordinates come from.
        issued: times what nobody in Python waits for.
        by_kernels: kernels see what is sent; else hooks of process groups do.

    Attributes:
        has_seen_ddp: there is, or was, a ``DistributedDataParallel``.
    """

    def __init__(self, tracer: Tracer, issued: CppCalls, *, by_kernels: bool = True) -> None:
        self.has_seen_ddp = False
        self._tracer = tracer
        self._issued = issued
        self._kernels = ReducerKernels(tracer, issued, self) if by_kernels else None
        self._ddp_init: tuple[Any, Any, Any] | None = None
        self._hooks = Hooks(PART, tracer)
        self._backward: _Backward | None = None
        self._sent_outside: CppCall | None = None

    def install(self) -> None:
        """Wait for the first DDP; there may be one already. Idempotent."""
        import torch.distributed
        from torch._C._distributed_c10d import Reducer
        from torch.nn.parallel import DistributedDataParallel

        if self._ddp_init is not None:
            return
        original = DistributedDataParallel.__dict__["__init__"]
        watch, failed = self._watch_from_now_on, self._tracer.failed

        def __init__(wrapper: Any, /, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
            try:
                watch()
            except Exception as error:
                failed(PART, error)
            original(wrapper, *arguments, **keywords)

        __init__.__wrapped__ = original  # type: ignore[attr-defined]
        __init__.__doc__ = original.__doc__
        self._ddp_init = (DistributedDataParallel, original, __init__)
        DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign,assignment]
        for name in _COMMUNICATE_IN_CPP:
            self._hooks.replace(torch.distributed, name, self._communicating_in_cpp)
        self._hooks.replace(Reducer, "_rebuild_buckets", self._communicating_in_cpp)
        if torch.distributed.is_initialized() and any(
            issubclass(type(thing), DistributedDataParallel)  # isinstance would run code of lazy and deprecated objects
            for thing in gc.get_objects()
        ):
            watch()

    def uninstall(self) -> None:
        """Have the kernels pass everything through, and put DDP's constructor back."""
        if self._ddp_init is not None:
            owner, original, replacement = self._ddp_init
            if owner.__dict__.get("__init__") is replacement:
                owner.__init__ = original
            self._ddp_init = None
        self._hooks.restore()
        self.has_seen_ddp = False
        if self._kernels is not None:
            self._kernels.uninstall()

    def sent(self, issued: CppCall, work: Any, *, in_backward: bool) -> None:
        """Take what the reducer sent in a backward, or what a function of C++ sent that waits for it itself."""
        self._issued.complete(issued, work, stalls_until_end=not in_backward)
        if in_backward:
            self._around_the_reducer().last_launch = issued
        else:
            self._sent_outside = issued

    def sent_by_python(self) -> None:
        """Mark the reducer's wait: it waits for the future of what a communication hook has sent."""
        if self._issued.devices is not None:
            self._around_the_reducer()

    def _communicating_in_cpp(self, original: Any) -> Callable[..., object]:
        """Wrap a function that communicates in C++ and waits there. Kernels are used at least while it runs."""
        thread, kernels = self._tracer.thread, self._kernels

        def begin(_args: tuple[Any, ...], _kwargs: dict[str, object]) -> tuple[bool]:
            self._sent_outside = None
            thread.waits_in_cpp = True
            installs = kernels is not None and not kernels.installed
            if installs:
                self._watch()
            return (installs,)

        def end(begun: tuple[bool], _result: Any) -> None:
            thread.waits_in_cpp = False
            self._has_waited_itself()
            if begun[0] and kernels is not None and not self.has_seen_ddp:  # Another thread may have made one.
                kernels.uninstall()

        return self._hooks.around(begin, end)(original)

    def _has_waited_itself(self) -> None:
        sent, self._sent_outside = self._sent_outside, None
        if isinstance(sent, DeviceCall):
            self._issued.stalled(sent, sent.launch.start, self._issued.mark(sent))

    def _watch_from_now_on(self) -> None:
        self.has_seen_ddp = True
        self._watch()

    def _watch(self) -> None:
        if self._kernels is not None and not self._kernels.installed:
            self._kernels.install()
            if not self._hooks.active:  # A signal's handler has stopped the recording meanwhile.
                self._kernels.uninstall()

    def _around_the_reducer(self) -> _Backward:
        task = graph_task()
        backward = self._backward
        if backward is None or backward.task != task:
            self._backward = backward = _Backward(task, self._tracer, self._issued)
            backward.queue()
        return backward


class _Backward:
    """One backward pass: takes a mark before and after the reducer's own callback."""

    def __init__(self, task: int, tracer: Tracer, issued: CppCalls) -> None:
        self.task = task
        self.last_launch: CppCall | None = None
        self._tracer = tracer
        self._issued = issued
        self._first = next_id()
        self._start: Mark = None

    def queue(self) -> None:
        _queue_callback(self._before)

    def _before(self) -> None:
        try:
            if self.last_launch is not None:
                self._start = self._issued.mark(self.last_launch)
                self._tracer.blocked[0] = self.last_launch.launch
                _queue_callback(self._after)
            elif self._issued.devices is not None:
                self._start = self._issued.devices.mark()
                _queue_callback(self._after)
        except Exception as error:
            self._tracer.failed(PART, error)

    def _after(self) -> None:
        try:
            self._tracer.blocked[0] = None
            if self.last_launch is not None:
                self._issued.stalled(self.last_launch, self._start, self._issued.mark(self.last_launch))
            elif self._issued.devices is not None:
                devices = self._issued.devices
                devices.futures_waited(self._first, self._start, devices.mark())
        except Exception as error:
            self._tracer.failed(PART, error)


def _queue_callback(callback: Callable[[], None]) -> None:
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


_OPERATIONS: Final = {"allreduce_": "allreduce", "broadcast_": "broadcast", "allgather_": "allgather"}
"""c10d operators that DDP's C++ issues, with the method of ``ProcessGroup`` that takes the same tensors."""


class ReducerKernels:
    """Kernels in torch's dispatcher for what C++ sends: before torch 2.14, which has hooks for it.

    Python methods and functional collectives reach these operators too. The calling thread says that they were counted.

    Args:
        tracer: where coordinates come from.
        issued: times what nobody in Python waits for.
        reducer: takes the times of the stalls.
    """

    def __init__(self, tracer: Tracer, issued: CppCalls, reducer: ReducerCapture) -> None:
        self._tracer = tracer
        self._issued = issued
        self._reducer = reducer
        self._captures = Captures()

    @property
    def installed(self) -> bool:
        """Return whether they call this capture."""
        return bool(self._captures)

    def install(self) -> None:
        """Capture what the kernels get. Idempotent."""
        if self._captures:
            return
        key_of = _key_of_backend()
        for name, method in _OPERATIONS.items():
            kernel = kernel_for("c10d", name, key_of)
            if kernel is not None:
                self._captures.take(kernel, self._capture(kernel, method))

    def uninstall(self) -> None:
        """Have the kernels pass everything through."""
        self._captures.release()

    def _capture(self, kernel: Kernel, method: str) -> Callable[..., object]:
        from torch._C import DispatchKey
        from torch.distributed import Work

        meta, operation = DispatchKey.Meta, OPERATIONS[method]
        group_argument = 2 if method == "allgather" else 1
        failed, completions, unmeasured = self._tracer.failed, self._tracer.completions, self._tracer.unmeasured
        thread, overload, original = self._tracer.thread, kernel.overload, kernel.original
        key_of = kernel.key_of

        def capture(*arguments: Any, **keywords: Any) -> object:
            key: Any = None
            issued: CppCall | None = None
            state: GroupState | None = None
            seq = -1
            try:
                tensor: Any = next(iter(_flat(arguments[0])), None)
                traced = tensor is None or is_traced(tensor)
                key = meta if traced else key_of(arguments)
                if thread.has_counted and not traced and graph_task() != -1:
                    self._reducer.sent_by_python()
                elif not traced and not thread.has_counted:
                    try:
                        payload = operation.measure(arguments, None)
                    except Exception as error:
                        payload = unmeasured(operation, arguments, error)
                    root = int(arguments[2]) if operation.has_root else None
                    state = self._issued.state(arguments[group_argument])
                    seq = next(state.collective_seq)
                    issued = self._issued.launch(operation, state, seq, payload, root)
                    if graph_task() == -1:  # In a backward they are the reducer's buckets, which live as long as it.
                        completions.add_temporaries(_flat(arguments[:group_argument]))
            except Exception as error:
                failed(PART, error)
            if key is None:
                return original(*arguments, **keywords)
            try:
                result = overload._op_dk(key, *arguments, **keywords)
            except BaseException:
                try:
                    if state is not None and seq >= 0:  # refused: the number is free, as it is on the other ranks
                        state.take_back(seq)
                except Exception as error:
                    failed(PART, error)
                raise
            try:
                if issued is not None:
                    self._reducer.sent(issued, Work.unbox(result[1]), in_backward=graph_task() != -1)
            except Exception as error:
                failed(PART, error)
            return result

        return capture


def _key_of_backend() -> KeyOf:
    from torch._C import DispatchKey, _dispatch_keys, _dispatch_keyset_full_after

    meta, backends = DispatchKey.Meta, _dispatch_keyset_full_after(DispatchKey.BackendSelect)

    def key_of(arguments: tuple[Any, ...]) -> object:
        tensor = next(iter(_flat(arguments[0])), None)
        # Not the device's key: sparse tensors and devices of other makers have keys of their own.
        return meta if tensor is None else (_dispatch_keys(tensor) & backends).highestPriorityTypeId()

    return key_of
