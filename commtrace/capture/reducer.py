"""Captures what ``DistributedDataParallel`` sends from C++: its gradient buckets and its broadcasts.

From the first DDP on there are kernels for three ``c10d`` operators in the dispatcher (how and at which cost:
:mod:`commtrace.capture.functional`). Python methods of ``ProcessGroup`` and functional collectives reach these
operators too; they are told by the Python frame below the kernel's: when that is one of ours, the communication has
been counted.

The reducer waits for its buckets inside a callback that autograd runs at the end of a backward pass. Callbacks run in
the order in which they were queued, and may queue more, so two of ours stand around the reducer's: one queued with the
first bucket, the other by the first one. The time between them is the stall.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.clock import Mark
from commtrace.capture.functional import is_traced, overload_of
from commtrace.capture.groups import GroupState
from commtrace.capture.hooks import Hooks
from commtrace.capture.issued import PART as PART
from commtrace.capture.issued import Issued, IssuedCalls
from commtrace.capture.operations import OPERATIONS, _flat
from commtrace.capture.process_groups import CAPTURED_CODE
from commtrace.capture.records import DeviceCall, next_id
from commtrace.capture.tracer import Tracer

_OPERATIONS: Final = {"allreduce_": "allreduce", "broadcast_": "broadcast", "allgather_": "allgather"}
"""c10d operators that DDP's C++ issues, with the method of ``ProcessGroup`` that takes the same tensors."""

_COMMUNICATE_IN_CPP: Final = ("_broadcast_coalesced", "_verify_params_across_processes")
"""Functions of ``torch.distributed`` in C++ that others than DDP call too: FSDP1 to give all ranks the same model."""


class ReducerCapture:
    """Registers the kernels when the first ``DistributedDataParallel`` is made.

    Args:
        tracer: where entries go and coordinates come from.
        issued: times what nobody in Python waits for.
    """

    def __init__(self, tracer: Tracer, issued: IssuedCalls) -> None:
        self._tracer = tracer
        self._issued = issued
        self._library: Any = None
        self._lasts = False
        self._ddp_init: tuple[Any, Any, Any] | None = None
        self._hooks = Hooks(PART, tracer)
        self._backward: _Backward | None = None
        self._sent_outside: Issued | None = None

    def install(self) -> None:
        """Wait for the first DDP, or register the kernels now if there is one. Idempotent."""
        import torch.distributed
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
            self._hooks.replace(torch.distributed, name, self._watched)
        if torch.distributed.is_initialized() and any(
            issubclass(type(thing), DistributedDataParallel)  # isinstance would run code of lazy and deprecated objects
            for thing in gc.get_objects()
        ):
            watch()

    def uninstall(self) -> None:
        """Take the kernels out and put DDP's constructor back."""
        if self._ddp_init is not None:
            owner, original, replacement = self._ddp_init
            if owner.__dict__.get("__init__") is replacement:
                owner.__init__ = original
            self._ddp_init = None
        self._hooks.restore()
        self._lasts = False
        self._unregister()

    def _unregister(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _watched(self, original: Any) -> Callable[..., Any]:
        """Of a function that communicates in C++: the kernels are there while it runs."""

        def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[bool]:
            self._sent_outside = None
            registers = self._library is None
            if registers:
                self._watch()
            return (registers,)

        def end(begun: tuple[bool], _result: Any) -> None:
            self._has_waited_itself()
            if begun[0] and not self._lasts:  # Another thread may have made a DDP meanwhile.
                self._unregister()

        return self._hooks.around(begin, end)(original)

    def _has_waited_itself(self) -> None:
        """A function has returned that waits in C++, outside of a backward, for what it has sent."""
        sent, self._sent_outside = self._sent_outside, None
        if isinstance(sent, DeviceCall):
            self._issued.stalled(sent, sent.launch[-1], self._issued.mark(sent))

    def _watch_from_now_on(self) -> None:
        self._lasts = True
        self._watch()

    def _watch(self) -> None:
        if self._library is None:
            self._register()
            if not self._hooks.active:  # A signal's handler has stopped the recording meanwhile.
                self._unregister()

    def _register(self) -> None:
        import torch

        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, method in _OPERATIONS.items():
            overload = overload_of(torch.ops.c10d, name)
            if overload is not None:
                self._library.impl(name, self._kernel(overload, method), "BackendSelect")

    def _kernel(self, overload: Any, method: str) -> Callable[..., Any]:
        from torch._C import DispatchKey, _dispatch_keys, _dispatch_keyset_full_after

        backends = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
        operation = OPERATIONS[method]
        group_argument = 2 if method == "allgather" else 1
        failed, completions, unmeasured = self._tracer.failed, self._tracer.completions, self._tracer.unmeasured

        def kernel(*arguments: Any, **keywords: Any) -> Any:
            key: Any = None
            issued: Issued | None = None
            state: GroupState | None = None
            seq = -1
            try:
                tensor: Any = next(iter(_flat(arguments[0])), None)
                traced = tensor is None or is_traced(tensor)
                # Not the device's key: sparse tensors and devices of other makers have keys of their own.
                key = DispatchKey.Meta if traced else (_dispatch_keys(tensor) & backends).highestPriorityTypeId()
                # Of autograd's own threads, this function is the outermost frame.
                caller = sys._getframe().f_back
                is_counted = caller is not None and caller.f_code in CAPTURED_CODE
                if is_counted and self._issued.devices is not None and not traced and _graph_task() != -1:
                    self._around_the_reducer()  # It may be of a communication hook, for whose future C++ waits.
                elif not traced and not is_counted:
                    try:
                        payload = operation.measure(arguments, None)
                    except Exception as error:
                        payload = unmeasured(operation, arguments, error)
                    root = int(arguments[2]) if operation.has_root else None
                    state = self._issued.state(arguments[group_argument])
                    seq = next(state.collective_seq)
                    issued = self._issued.launch(operation, state, seq, payload, root)
                    if _graph_task() == -1:  # In a backward they are the reducer's buckets, which live as long as it.
                        completions.add_temporaries(_flat(arguments[:group_argument]))
            except Exception as error:
                failed(PART, error)
            if key is None:  # The failure has taken this kernel out, so that this call passes by it.
                return overload(*arguments, **keywords)
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
                    self._launched(issued, result[1])
            except Exception as error:
                failed(PART, error)
            return result

        return kernel

    def _launched(self, issued: Issued, boxed_work: Any) -> None:
        from torch.distributed import Work

        in_backward = _graph_task() != -1
        self._issued.complete(issued, Work.unbox(boxed_work), stalls_until_end=not in_backward)
        if in_backward:
            self._around_the_reducer().last_launch = issued
        else:
            self._sent_outside = issued

    def _around_the_reducer(self) -> _Backward:
        task = _graph_task()
        backward = self._backward
        if backward is None or backward.task != task:
            self._backward = backward = _Backward(task, self._tracer, self._issued)
            backward.queue()
        return backward


class _Backward:
    """One backward pass: takes a mark before and after the reducer's own callback."""

    def __init__(self, task: int, tracer: Tracer, issued: IssuedCalls) -> None:
        self.task = task
        self.last_launch: Issued | None = None
        self._tracer = tracer
        self._issued = issued
        self._first = next_id()
        self._start: Mark = None

    def queue(self) -> None:
        """Run :meth:`_before` when the backward pass has ended, before what is queued later."""
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


def _graph_task() -> int:
    """Number of the backward pass that this thread is in; −1 outside of one."""
    import torch

    return int(torch._C._current_graph_task_id())


def _queue_callback(callback: Callable[[], None]) -> None:
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)
