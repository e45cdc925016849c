"""What ``DistributedDataParallel`` sends from C++, its gradient buckets and its broadcasts, and the stalls on it.

On torch ≥ 2.14 the hooks of process groups see it (:mod:`commtrace.capture.collectives.process_group_hooks`); before,
kernels in the dispatcher do, which are used from the first DDP on
(:mod:`commtrace.capture.collectives.reducer_kernels`).

The reducer waits for its buckets inside a callback that autograd runs at the end of a backward pass. Callbacks run in
the order in which they were queued, and may queue more, so two of ours stand around the reducer's: one queued with the
first bucket, the other by the first one. The time between them is the stall.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.collectives.calling_thread import graph_task
from commtrace.capture.collectives.issued import PART as PART
from commtrace.capture.collectives.issued import Issued, IssuedCalls
from commtrace.capture.collectives.reducer_kernels import ReducerKernels
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
        by_kernels: kernels see what is sent, and hand it on to here; else hooks of process groups do.

    Attributes:
        has_seen_ddp: there is, or was, a ``DistributedDataParallel``.
    """

    def __init__(self, tracer: Tracer, issued: IssuedCalls, *, by_kernels: bool = True) -> None:
        self.has_seen_ddp = False
        self._tracer = tracer
        self._issued = issued
        self._kernels = ReducerKernels(tracer, issued, self) if by_kernels else None
        self._ddp_init: tuple[Any, Any, Any] | None = None
        self._hooks = Hooks(PART, tracer)
        self._backward: _Backward | None = None
        self._sent_outside: Issued | None = None

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

    def sent(self, issued: Issued, work: Any, *, in_backward: bool) -> None:
        """Something was sent: by the reducer in a backward, or by a function of C++ that waits for it itself."""
        self._issued.complete(issued, work, stalls_until_end=not in_backward)
        if in_backward:
            self._around_the_reducer().last_launch = issued
        else:
            self._sent_outside = issued

    def sent_by_python(self) -> None:
        """A method of ``ProcessGroup`` sends something in a backward: C++ waits for its future if it is of a
        communication hook."""
        if self._issued.devices is not None:
            self._around_the_reducer()

    def _communicating_in_cpp(self, original: Any) -> Callable[..., Any]:
        """Of a function that communicates in C++, and waits there. Kernels are used at least while it runs."""
        thread, kernels = self._tracer.thread, self._kernels

        def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[bool]:
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
        """A function has returned that waits in C++, outside of a backward, for what it has sent."""
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


def _queue_callback(callback: Callable[[], None]) -> None:
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)
