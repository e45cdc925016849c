"""Capture the communication that ``DistributedDataParallel`` issues from C++, and the stalls on it.

On torch ≥ 2.14 :mod:`commtrace.capture.collectives.cpp_communication` sees it, before that the kernels here do.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from torch.autograd import Variable

from commtrace.capture.collectives.dispatcher import Capture, Captures, Kernel, Original, is_traced, kernel_for
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import OPERATIONS, Arguments, Operation, Payload, flat_tensors
from commtrace.capture.device.clock import Mark, is_on_device, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.hooks import Hooks
from commtrace.capture.instances import instances_of
from commtrace.capture.native import Native, facts_of
from commtrace.capture.records import (
    ENDED,
    NUMBER,
    WAITED,
    DeviceCall,
    Launch,
    completed_rows,
    ended_by_rows,
    forgotten_rows,
    kind_of,
    launch_of,
    next_id,
    stall_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

if TYPE_CHECKING:
    from torch.distributed import Work

PART: Final = "capture of DistributedDataParallel"
"""Switched off if the times cannot be taken."""


_MOST_ASKED: Final = 1_000
"""Works that are kept to be asked: those of a backend in Python may never say that they are over."""


class HostCall:
    """A host-timed communication of C++. ``completion`` is as in :mod:`commtrace.capture.records`."""

    __slots__ = ("completion", "launch")

    def __init__(self, launch: Launch, number: int | None = None, end: int = 0) -> None:
        self.launch = launch
        self.completion = [next_id() if number is None else number, 0, end]

    @property
    def id(self) -> int:
        return self.completion[NUMBER]


class NativeBucket(NamedTuple):
    """A bucket of a device's tensors that the native part has: it is the last one of its backward."""

    launch: Launch
    id: int


CppCall: TypeAlias = "HostCall | DeviceCall"
AwaitedBucket: TypeAlias = "CppCall | NativeBucket"
"""The last bucket of a backward, for which the reducer waits with all before it."""


class CppCalls:
    """Number and time communications that C++ issues. ``devices`` times tensors of an accelerator."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        self._tracer = tracer
        self._devices = devices
        self._native = tracer.native
        self._unfinished: dict[int, HostCall] = {}
        # Whose Works are asked whether they are over, oldest first.
        self._asked: deque[tuple[HostCall, Work]] = deque()

    def launch(
        self, operation: Operation, state: GroupState, seq: int, payload: Payload, root: int | None
    ) -> CppCall | None:
        """Take the time before a communication is handed on; return None if it is not to be recorded."""
        tracer = self._tracer
        is_wanted = tracer.recording or state.graph is not None
        if not is_wanted or (tracer.groups.skip_roles and tracer.groups.skips(state)):
            return None
        num_bytes, self_bytes, dtype, tensor, members = payload
        is_member = root is not None and 0 <= root < len(state.ranks_by_group_rank)  # else its backend will refuse it
        peer = state.ranks_by_group_rank[root] if root is not None and is_member else -1
        launch = launch_of((
            operation, state, seq, num_bytes, self_bytes, dtype, peer, True, tracer.coordinates, members, now_ns(),
        ))  # fmt: skip
        if self._devices is not None and tensor is not None and tensor.is_cuda:
            return self._devices.launch(launch, tensor.device.index)
        return HostCall(launch) if state.graph is None else None

    def complete(self, issued: CppCall, work: Work, *, stalls_until_end: bool) -> None:
        """Have the end recorded. ``stalls_until_end``: the caller does nothing until then."""
        if isinstance(issued, DeviceCall):
            if self._devices is not None:
                self._devices.record_cpp_submission(issued, work)
            return
        call, append, unfinished, failed = issued, self._tracer.append, self._unfinished, self._tracer.failed
        try:
            future = work.get_future()
        except RuntimeError:  # This backend's work has none: its end cannot be known.
            append((forgotten_rows, kind_of(call.launch), call.launch, call.id))
            return
        unfinished[call.id] = call
        coordinates = self._tracer.coordinates

        def completed(_alive: object, _future: object) -> None:
            try:
                call.completion[ENDED] = end = now_ns()
                unfinished.pop(call.id, None)
                append((completed_rows, kind_of(call.launch), call.launch, call.id, end, call.completion))
                self.ask()
                if stalls_until_end:
                    append((stall_rows, schema.STALL, call.launch, call.id, coordinates, call.launch.start, end))
            except Exception as error:  # torch would only write it to the log
                failed(PART, error)

        completions = self._tracer.completions
        completions.add(future, functools.partial(completed, completions.alive))

    def ask_later(self, issued: HostCall, work: Work) -> None:
        """Have the Work asked for its end, and ask those before it."""
        # A callback for each costs more than all the rest: a thread of the backend takes the GIL twice, and gets a
        # state of Python for it. With ten buckets on four gloo ranks it was a tenth of the job's CPU time.
        if self._asked:
            self.ask()
            if len(self._asked) >= _MOST_ASKED:
                self._forget_oldest()
        self._asked.append((issued, work))

    def ask(self) -> None:
        """Note the end of what is over by now. What runs behind something that goes on is not asked."""
        if self._native is not None:
            self._native.core.ask_buckets()
        if self._asked:
            self._ask_in_order()

    def _ask_in_order(self) -> None:
        asked, append, end = self._asked, self._tracer.append, 0
        while asked:
            try:
                call, work = entry = asked.popleft()
            except IndexError:  # Another thread has asked it.
                return
            if not work.is_completed():
                asked.appendleft(entry)
                return
            call.completion[ENDED] = end = end or now_ns()
            append((ended_by_rows, schema.COLLECTIVE, call.launch, call.completion[NUMBER], end))

    def about_to_wait(self, last: CppCall | None, task: int) -> AwaitedBucket | None:
        """Return the last bucket of a backward pass, ``last`` if the native part has no later one.

        The host is about to wait for all of them: the last one that goes on calls back when it ends.
        """
        self.ask()
        known = None if self._native is None else self._native.core.latest_bucket(task)
        if self._native is None or known is None:
            self._call_back()
            return last
        facts, end = facts_of(known[0]), known[1]
        if last is not None and last.id > facts.id:
            self._call_back()
            return last
        launch = self._native.launch(facts)
        if is_on_device(launch.start):
            return NativeBucket(launch, facts.id)
        bucket = HostCall(launch, facts.id, end)
        work = None if end else self._native.core.take_bucket(facts.id)
        if work is not None:
            self.complete(bucket, work, stalls_until_end=False)
        return bucket

    def _call_back(self) -> None:
        try:
            call, work = self._asked.pop()
        except IndexError:  # All are over, maybe since another thread has asked.
            return
        self.complete(call, work, stalls_until_end=False)

    def forget_asked(self) -> None:
        """Note what is over; record the rest without an end."""
        self.ask()
        if self._native is not None:
            self._native.core.forget_buckets()
        while self._asked:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        try:
            call, _ = self._asked.popleft()
        except IndexError:  # Another thread has found that it is over.
            return
        self._tracer.append((forgotten_rows, kind_of(call.launch), call.launch, call.id))

    def mark(self, issued: AwaitedBucket) -> Mark:
        if isinstance(issued, HostCall) or self._devices is None:
            return now_ns()
        start = issued.launch.start
        return self._devices.mark(start.device if is_on_device(start) else None)

    def stalled(self, issued: AwaitedBucket, start: Mark, end: Mark, last_in_python: CppCall | None = None) -> None:
        """Record the wait for a communication, and for all before it, of which the last may be Python's."""
        tracer = self._tracer
        tracer.last_mark = end
        if not isinstance(issued, HostCall):
            if self._native is not None:
                self._native.core.buckets_waited(start, end, isinstance(issued, NativeBucket))
            call = issued if isinstance(issued, DeviceCall) else last_in_python
            if self._devices is not None and isinstance(call, DeviceCall):
                self._devices.record_cpp_stall(call, start, end, is_last=call is issued)
            return
        issued.completion[WAITED] = end
        # What follows the end of the communication is the reducer copying gradients: work, not a stall. One that was
        # over before the wait stalled no stream.
        end = min(end, issued.completion[ENDED] or end)
        if end > start:
            tracer.append((stall_rows, schema.STALL, issued.launch, issued.id, tracer.coordinates, start, end))

    @property
    def devices(self) -> DeviceCalls | None:
        return self._devices

    def unfinished(self) -> list[Launch]:
        self.ask()  # A Work keeps its tensors: after the last step of a training nobody else asks.
        asked = [call.launch for call, work in list(self._asked) if not work.is_completed()]
        return [*asked, *(call.launch for call in list(self._unfinished.values()))]


_COMMUNICATE_IN_CPP: Final = ("_broadcast_coalesced", "_verify_params_across_processes")
"""Functions of ``torch.distributed`` in C++ that others than DDP call too: FSDP1 to give all ranks the same model."""


class ReducerCapture:
    """Record the stalls of every DDP; ``by_kernels`` if kernels see its communications, not hooks of process groups."""

    def __init__(self, tracer: Tracer, issued: CppCalls, *, by_kernels: bool = True) -> None:
        self.has_seen_ddp = False
        self._tracer = tracer
        self._issued = issued
        self._kernels = ReducerKernels(tracer, issued, self) if by_kernels else None
        self._is_installed = False
        self._hooks = Hooks(PART, tracer)
        self._backward: _Backward | None = None
        self._sent_outside: CppCall | None = None

    def install(self) -> None:
        import torch.distributed
        from torch._C._distributed_c10d import Reducer
        from torch.nn.parallel import DistributedDataParallel

        if self._is_installed:
            return
        self._is_installed = True
        self._hooks.replace(DistributedDataParallel, "__init__", self._watching)
        for name in _COMMUNICATE_IN_CPP:
            self._hooks.replace(torch.distributed, name, self._communicating_in_cpp)
        self._hooks.replace(Reducer, "_rebuild_buckets", self._communicating_in_cpp)
        self._tell_native()
        if torch.distributed.is_initialized() and instances_of(DistributedDataParallel):
            self._watch_from_now_on()

    def uninstall(self) -> None:
        self._is_installed = False
        self._hooks.restore()
        self.has_seen_ddp = False
        self._tell_native()
        if self._kernels is not None:
            self._kernels.uninstall()
        self._issued.forget_asked()

    def _tell_native(self) -> None:
        native = self._tracer.native
        if native is not None:
            native.core.watch_reducer(self.has_seen_ddp, self._issued.devices is not None)

    def sent(self, issued: CppCall, work: Work, task: int) -> None:
        """Take a communication of the reducer in a backward pass; if ``task`` is −1, of C++ that waits for it."""
        if task == -1:
            self._issued.complete(issued, work, stalls_until_end=True)
            self._sent_outside = issued
            return
        backward = self._backward
        if backward is None or backward.task != task:
            backward = self.begin_backward(task)
        backward.last_launch = issued
        if type(issued) is HostCall:
            self._issued.ask_later(issued, work)
        else:
            self._issued.complete(issued, work, stalls_until_end=False)

    def sent_by_python(self, task: int) -> None:
        """Mark the reducer's wait for the future of a communication hook, in a backward pass."""
        if self._issued.devices is not None:
            self.begin_backward(task)

    def _watching(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(wrapper: object, /, *arguments: object, **keywords: object) -> None:  # noqa: N807
            try:
                self._watch_from_now_on()
            except Exception as error:
                self._tracer.failed(PART, error)
            original(wrapper, *arguments, **keywords)

        return __init__

    def _communicating_in_cpp(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap a function that communicates in C++ and waits there. Kernels are used at least while it runs."""
        native, kernels = self._tracer.native, self._kernels
        say_that_it_waits: Callable[[bool], None] = (
            functools.partial(setattr, self._tracer.thread, "waits_in_cpp")
            if native is None
            else native.core.set_waits_in_cpp
        )

        def begin(_args: tuple[object, ...], _kwargs: dict[str, object]) -> tuple[bool]:
            self._sent_outside = None
            say_that_it_waits(True)
            installs = kernels is not None and not kernels.installed
            if installs:
                self._watch()
            return (installs,)

        def end(begun: tuple[bool], _result: object) -> None:
            say_that_it_waits(False)
            sent, self._sent_outside = self._sent_outside, None
            if isinstance(sent, DeviceCall):
                self._issued.stalled(sent, sent.launch.start, self._issued.mark(sent))
            if begun[0] and kernels is not None and not self.has_seen_ddp:  # Another thread may have made one.
                kernels.uninstall()

        return self._hooks.around(begin, end)(original)

    def _watch_from_now_on(self) -> None:
        self.has_seen_ddp = True
        self._tell_native()
        self._watch()

    def _watch(self) -> None:
        if self._kernels is not None and not self._kernels.installed:
            self._kernels.install()
            if not self._hooks.active:  # A signal's handler has stopped the recording meanwhile.
                self._kernels.uninstall()

    def begin_backward(self, task: int) -> _Backward:
        """Take marks around the reducer's callback of a backward pass, of which it sends the first bucket."""
        backward = self._backward
        if backward is None or backward.task != task:
            self._backward = backward = _Backward(task, self._tracer, self._issued)
            _queue_callback(backward.before)
        return backward


class _Backward:
    """One backward pass: takes a mark before and after the reducer's own callback."""

    def __init__(self, task: int, tracer: Tracer, issued: CppCalls) -> None:
        self.task = task
        self.last_launch: CppCall | None = None
        self._tracer = tracer
        self._issued = issued
        self._first = next_id()
        self._awaited: AwaitedBucket | None = None
        self._start: Mark = None

    def before(self) -> None:
        try:
            awaited = self._awaited = self._issued.about_to_wait(self.last_launch, self.task)
            if awaited is not None:
                self._start = self._issued.mark(awaited)
                self._tracer.blocked[0] = awaited.launch
                _queue_callback(self._after)
            elif self._issued.devices is not None:
                self._start = self._issued.devices.mark()
                _queue_callback(self._after)
        except Exception as error:
            self._tracer.failed(PART, error)

    def _after(self) -> None:
        try:
            self._tracer.blocked[0] = None
            awaited = self._awaited
            if awaited is not None:
                self._issued.stalled(awaited, self._start, self._issued.mark(awaited), self.last_launch)
                self._issued.ask()
            elif self._issued.devices is not None:
                devices = self._issued.devices
                devices.record_future_waits(self._first, self._start, devices.mark())
        except Exception as error:
            self._tracer.failed(PART, error)


_queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Has a function called at the end of this thread's backward pass, behind those that were queued before."""


_OPERATIONS: Final = {"allreduce_": "allreduce", "broadcast_": "broadcast", "allgather_": "allgather"}
"""c10d operators that DDP's C++ issues, with the method of ``ProcessGroup`` that takes the same tensors."""

_BUCKETS: Final = "allreduce_"
"""The operator of buckets, which the native part records."""


class ReducerKernels:
    """Kernels in torch's dispatcher for communication from C++, before torch 2.14."""

    def __init__(self, tracer: Tracer, issued: CppCalls, reducer: ReducerCapture) -> None:
        self._tracer = tracer
        self._issued = issued
        self._reducer = reducer
        self._captures = Captures(tracer.thread)
        self.installed = False

    def install(self) -> None:
        if self.installed:
            return
        self.installed = True
        native = self._tracer.native
        if native is not None:
            self._configure(native)
        for name, method in _OPERATIONS.items():
            kernel = kernel_for("c10d", name, self._native_kernel if native is not None and name == _BUCKETS else None)
            if kernel is not None:
                self._captures.take(kernel, self._capture(method))

    def uninstall(self) -> None:
        if self.installed and self._tracer.native is not None:
            self._tracer.native.core.end_hooks()
        self._captures.release()
        self.installed = False

    def _configure(self, native: Native) -> None:
        import torch

        operation = OPERATIONS[_OPERATIONS[_BUCKETS]]
        native.core.configure_hooks(
            failed=functools.partial(self._tracer.failed, PART),
            graph_task=torch._C._current_graph_task_id,
            current_node=None,
            begin_backward=self._reducer.begin_backward,
            all_reduce=schema.NOT_APPLICABLE,
            operation=native.operation(operation),
            name=native.code(operation.name),
        )

    def _native_kernel(self, kernel: Kernel) -> Original:
        from torch.distributed import ProcessGroup, Work

        assert self._tracer.native is not None
        make: Callable[..., Original] = self._tracer.native.core.BucketKernel
        return make(kernel.redispatch, kernel.backends, kernel.call, ProcessGroup.unbox, Work.unbox)

    def _capture(self, method: str) -> Capture:
        import torch
        from torch.distributed import ProcessGroup, Work

        operation = OPERATIONS[method]
        group_argument = 2 if method == "allgather" else 1
        failed, completions, unmeasured = self._tracer.failed, self._tracer.completions, self._tracer.unmeasured
        thread, groups, issue, reducer = self._tracer.thread, self._tracer.groups, self._issued.launch, self._reducer
        captures = self._tracer.captures
        group_of, work_of, graph_task = ProcessGroup.unbox, Work.unbox, torch._C._current_graph_task_id
        states, register = groups.states, groups.state

        def capture(original: Original, arguments: Arguments, keywords: dict[str, Any]) -> object:
            issued: CppCall | None = None
            state: GroupState | None = None
            seq = task = -1
            try:
                tensors = arguments[0]
                if tensors and not is_traced(tensors[0]):
                    task = graph_task()
                    if not thread.has_counted:
                        try:
                            payload = operation.measure(arguments, None)
                        except Exception as error:
                            payload = unmeasured(operation, arguments, error)
                        root = int(arguments[2]) if operation.has_root else None
                        process_group = group_of(arguments[group_argument])
                        state = states.get(id(process_group)) or register(process_group)
                        if captures.open:
                            state = captures.state(state)
                        seq = next(state.collective_seq)
                        issued = issue(operation, state, seq, payload, root)
                        if task == -1:  # In a backward they are the reducer's buckets, which live as long as it.
                            completions.add_temporaries(flat_tensors(arguments[:group_argument]))
                    elif task != -1:
                        reducer.sent_by_python(task)
            except Exception as error:
                failed(PART, error)
            try:
                result = original(*arguments, **keywords)
            except BaseException:
                try:
                    if state is not None and seq >= 0:  # refused: the number is free, as it is on the other ranks
                        state.take_back(seq)
                except Exception as error:
                    failed(PART, error)
                raise
            try:
                if issued is not None:
                    reducer.sent(issued, work_of(result[1]), task)
            except Exception as error:
                failed(PART, error)
            return result

        return capture
