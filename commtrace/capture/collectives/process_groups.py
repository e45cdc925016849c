"""Capture every communication that Python code hands to a process group, by methods of the class ``ProcessGroup``.

The order of events around one operation::

    launch mark → original method → (completion callback: end mark) → wait: mark → original wait → mark
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from commtrace.capture.collectives.dead_works import DeadWorks, has_future
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import NOT_COMMUNICATION, ONE_SIDED, OPERATIONS, Arguments, Operation
from commtrace.capture.collectives.untraced_paths import CAPTURED_COMMUNICATION
from commtrace.capture.collectives.waits import (
    PendingWork,
    PendingWorks,
    record_failure,
    subclasses,
    wrap_wait,
    wrap_wait_on_device,
)
from commtrace.capture.device.clock import DeviceTiming, Mark, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.native import METHODS, Native, NativeClock, NativeFacts, as_method, p2p_codes
from commtrace.capture.records import (
    COLLECTIVE_AND_STALL,
    ENDED,
    NUMBER,
    P2P_AND_STALL,
    Launch,
    completed_rows,
    forgotten_rows,
    kind_of,
    launch_of,
    next_id,
    waited_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

if TYPE_CHECKING:
    import torch
    from torch._C import Future
    from torch.distributed import ProcessGroup, Work

PART: Final = "capture of communication"
_UNFINISHED: Final = -1
"""The end of an operation whose row says that it did not end."""


_NO_DEVICE: Final[dict[str, object]] = {"raw_stream": None, "current_device": None, "open_device": None}

_SYNCHRONOUS_P2P: Final = frozenset({"send", "recv"})


class ProcessGroupCapture:
    """Turn calls of ``ProcessGroup`` and ``Work`` into entries; ``pending`` holds communications without a wait.

    Of ``tensor_types``, and of torch's own, attributes run no Python: the native part may read them.
    """

    def __init__(
        self, tracer: Tracer, device_clock: DeviceTiming | None = None, tensor_types: tuple[type, ...] = ()
    ) -> None:
        self._tracer = tracer
        self._tensor_types = tensor_types
        self._devices = None if device_clock is None else DeviceCalls(tracer, device_clock)
        self.pending: PendingWorks = {}
        self.dead = DeadWorks(self.pending, _may_end, self._forgotten)
        self._originals: list[tuple[type, str, object, Callable[..., object]]] = []
        self._get_future: Callable[[Work], Future[object]] = lambda work: work.get_future()
        self._native = tracer.native

    @property
    def devices(self) -> DeviceCalls | None:
        return self._devices

    def install(self) -> None:
        from torch.distributed import ProcessGroup, Work

        if self._originals:
            return
        self._get_future = Work.get_future
        if self._native is not None:
            self._configure(self._native)
        for name, operation in OPERATIONS.items():
            if name in ProcessGroup.__dict__:
                original = ProcessGroup.__dict__[name]
                captured = self._captured(original, operation)
                self._replace(ProcessGroup, name, self._in_c(name, operation, original, captured))
        for name in unknown_methods(ProcessGroup):
            unknown = "it is unknown to this version of commtrace, and its communication is not recorded"
            self._replace(ProcessGroup, name, self._not_followed(ProcessGroup.__dict__[name], name, unknown))
        for name, meaning in ONE_SIDED.items():
            if name in ProcessGroup.__dict__:
                self._replace(ProcessGroup, name, self._not_followed(ProcessGroup.__dict__[name], name, meaning))
        if self._devices is not None:
            for name, wrap in (
                ("_start_coalescing", self._devices.starting_bracket),
                ("_end_coalescing", self._devices.ending_bracket),
            ):
                if name in ProcessGroup.__dict__:
                    self._replace(ProcessGroup, name, wrap(ProcessGroup.__dict__[name]))
            for events, name, replacing in self._devices.replacements:
                self._replace(events, name, replacing(events.__dict__[name]))
        for work_type in (Work, *subclasses(Work)):
            if "wait" in work_type.__dict__:
                original = work_type.__dict__["wait"]
                self._replace(work_type, "wait", self._wait_in_c(original, self._wrapped_wait(original)))
            # Where there is no accelerator it does nothing, and is no wait.
            if "synchronize" in work_type.__dict__ and self._devices is not None:
                synchronize = self._devices.synchronizing(work_type.__dict__["synchronize"])
                original = work_type.__dict__["synchronize"]
                self._replace(work_type, "synchronize", self._wait_in_c(original, synchronize))

    def uninstall(self) -> None:
        """Put every original back, except a method that other code has replaced since."""
        for owner, name, original, replacement in reversed(self._originals):
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
        self._originals.clear()
        if self._native is not None:
            self._native.core.end()
        entries = [*self.pending.values(), *self.dead.entries]
        self.pending.clear()
        self.dead.entries.clear()
        for launch, completion, _ in entries:
            if completion is None:
                self._tracer.append((forgotten_rows, kind_of(launch), launch, next_id()))
            elif not completion[ENDED]:
                completion[ENDED] = _UNFINISHED
                self._tracer.append((forgotten_rows, kind_of(launch), launch, completion[NUMBER]))
        if self._devices is not None:
            self._devices.give_up_all()

    def unfinished(self) -> list[Launch]:
        waiting = [
            launch
            for launch, completion, _ in (*list(self.pending.values()), *self.dead.unfinished())
            if completion is None or not completion[ENDED]
        ]
        of_native = [] if self._native is None else self._native.in_flight()
        return [*waiting, *of_native, *([] if self._devices is None else self._devices.unfinished())]

    def _wrapped_wait(self, original: Callable[..., object]) -> Callable[..., object]:
        if self._devices is None:
            return wrap_wait(original, self._tracer, self.pending, PART)
        return wrap_wait_on_device(original, self._tracer, self.pending, PART, self._devices)

    def _replace(self, owner: type, name: str, replacement: Callable[..., object]) -> None:
        # From the class dictionary, and back into it: assigning what getattr() gives would lose the binding.
        original = owner.__dict__[name]
        if isinstance(replacement, FunctionType):
            _copy_description(original, replacement)
        self._originals.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def _configure(self, native: Native) -> None:
        import torch

        tracer, devices = self._tracer, self._devices
        clock = tracer.clock
        native.core.configure(
            tensor_types=(torch.Tensor, torch.nn.Parameter, *self._tensor_types),
            p2p_codes=p2p_codes(),
            code_of_dtype=native.code_of_dtype,
            failed=partial(tracer.failed, PART),
            wait_failed=self._wait_failed,
            waited_on_a_side=None if devices is None else self._waited_on_a_side,
            pending=(self.pending, None if devices is None else devices.pending),
            forget_in_python=self._unrecorded,
            times_devices=devices is not None,
            **(clock.of_torch if isinstance(clock, NativeClock) else _NO_DEVICE),
        )
        tracer.groups.follow(native.follow)
        if devices is not None:
            native.place_with(devices.resolved.add, tracer.is_in_window)
            native.on_capture = partial(tracer.untraced_paths.add, CAPTURED_COMMUNICATION)

    def _in_c(
        self, name: str, operation: Operation, original: object, captured: Callable[..., object]
    ) -> Callable[..., object]:
        """Return the method of the native part, which leaves uncommon calls to ``captured``, where there is one."""
        native, positions = self._native, METHODS.get(name)
        if native is None or positions is None or not (operation.is_p2p or _options_say_async()):
            return captured
        method = native.core.Method(
            original,
            captured,
            operation=native.operation(operation),
            name=native.code(operation.name),
            **positions._asdict(),
            is_p2p=operation.is_p2p,
            is_send=operation.is_send,
            has_root=operation.has_root,
        )
        return as_method(method.function())

    def _wait_in_c(self, original: object, wait: Callable[..., object]) -> Callable[..., object]:
        native, surrendered, failed = self._native, self.surrendered, self._tracer.failed
        if native is None:
            return wait
        if not isinstance(original, FunctionType):
            return as_method(native.core.Method(original, wait, is_wait=True).function())

        # Dynamo may look into a wait that is Python.
        def wait_in_python(work: Work, /, *arguments: object, **keywords: object) -> object:
            try:
                surrendered(work)
            except Exception as error:
                failed(PART, error)
            return wait(work, *arguments, **keywords)

        return wait_in_python

    def _wait_failed(self, known: tuple[Any, ...], error: BaseException) -> None:
        if self._native is not None and isinstance(error, Exception):
            record_failure(self._tracer, self._native.launch(NativeFacts(*known)), error, PART)

    def _waited_on_a_side(self, known: tuple[Any, ...], waited_from: Mark, end: Mark) -> None:
        if self._native is not None and self._devices is not None:
            facts = NativeFacts(*known)
            launch = self._native.launch(facts)
            self._devices.record_side_wait(launch, facts.id, facts.position, waited_from, end)

    def _captured(self, original: Callable[..., object], operation: Operation) -> Callable[..., object]:
        tracer, devices = self._tracer, self._devices
        states, register = tracer.groups.states, tracer.groups.state
        skip_roles, skips = tracer.groups.skip_roles, tracer.groups.skips
        number = _p2p_number if operation.is_p2p else _collective_number
        measure, is_collective = operation.measure, not operation.is_p2p
        launched, remember, unrecorded = self._launching(operation), self._remember, self._unrecorded
        refused, blocked, thread, unmeasured = self._refused, tracer.blocked, tracer.thread, tracer.unmeasured
        captures = tracer.captures

        def method(process_group: ProcessGroup, /, *arguments: object, **keywords: object) -> object:
            launch = device_call = state = None
            seq = peer = -1
            try:  # around all that is ours, and never around the original: its failures are training's
                thread.has_counted = True
                positional = _by_position(arguments, keywords, operation.arguments) if keywords else arguments
                state = states.get(id(process_group)) or register(process_group)
                if captures.open:
                    state = captures.state(state)
                seq, peer, is_async = number(operation, state, positional)
                is_wanted = tracer.recording or state.graph is not None
                if is_wanted and not (skip_roles and skips(state, -1 if is_collective else peer)):
                    try:
                        num_bytes, self_bytes, dtype, tensor, members = measure(positional, process_group)
                    except Exception as error:
                        num_bytes, self_bytes, dtype, tensor, members = unmeasured(operation, positional, error)
                    launch = launch_of((
                        operation, state, seq, num_bytes, self_bytes, dtype, peer, is_async, tracer.coordinates,
                        members, now_ns(),
                    ))  # fmt: skip
                    if devices is not None:
                        device = tensor.device if tensor is not None else _barrier_device(positional)
                        if device is not None and device.type == "cuda":
                            device_call, launch = devices.launch(launch, device.index), None
                        elif state.graph is not None:
                            refused(operation, state, peer, seq)  # of the host's tensors: it is no part of the graph
                            launch, seq = None, -1
                    blocked[0] = launch or device_call
            except Exception as error:
                tracer.failed(PART, error)
            try:
                work = original(process_group, *arguments, **keywords)
            except BaseException:
                try:
                    if state is not None and seq >= 0:
                        refused(operation, state, peer, seq)
                except Exception as error:
                    tracer.failed(PART, error)
                raise
            finally:
                try:
                    blocked[0], thread.has_counted = None, False
                except Exception as error:
                    tracer.failed(PART, error)
            try:
                if launch is not None:
                    if work is None or (is_async and is_collective):
                        launched(launch, work)
                    else:
                        remember(launch, None, work)
                elif device_call is not None and devices is not None:
                    devices.record_submission(device_call, work)
                elif work is not None:
                    unrecorded(work)
            except Exception as error:
                tracer.failed(PART, error)
            return work

        return method

    def _not_followed(self, original: Callable[..., object], name: str, meaning: str) -> Callable[..., object]:
        """Wrap a method that may communicate: its first call is reported, with its ``meaning``."""
        from torch.distributed import Work

        tracer, path = self._tracer, f"ProcessGroup.{name}"
        is_private = name.startswith("_")

        def method(process_group: ProcessGroup, /, *arguments: object, **keywords: object) -> object:
            result = original(process_group, *arguments, **keywords)
            try:
                if path not in tracer.untraced_paths and (not is_private or isinstance(result, Work)):
                    tracer.untraced_paths.add(path)
                    tracer.guard.noticed(f"{path} was called: {meaning}.")
            except Exception as error:
                tracer.failed(PART, error)
            return result

        return method

    def _refused(self, operation: Operation, state: GroupState, peer: int, seq: int) -> None:
        if operation.is_p2p:
            state.take_back_p2p(operation.is_send, peer, seq)
        else:
            state.take_back(seq)

    def _launching(self, operation: Operation) -> Callable[[Launch, Any], None]:
        tracer, completions, completed = self._tracer, self._tracer.completions, self._completing()
        append = tracer.append
        kinds = P2P_AND_STALL if operation.is_p2p else COLLECTIVE_AND_STALL
        # Torch's own method: what FutureWaits puts in its place is for waits for the future.
        get_future, remember = self._get_future, self._remember

        def launched(launch: Launch, work: Work | None) -> None:
            if work is None:  # It was blocking.
                tracer.last_mark = end = now_ns()
                append((waited_rows, kinds, launch, tracer.coordinates, launch.start, end))
                return
            try:
                future = get_future(work)
            except RuntimeError:  # This backend's work has none: the return of the wait is its end.
                remember(launch, None, work)
                return
            completion = [next_id(), 0, 0]
            remember(launch, completion, work)
            # completions.add, without its frame
            future.add_done_callback(partial(completed, completions.alive, (launch, completion)))

        return launched

    def _completing(self) -> Callable[[object, tuple[Launch, list[int]], object], None]:
        tracer = self._tracer
        buffer, capacity, drop = tracer.recorder.buffer, tracer.recorder.capacity, tracer.recorder.drop

        def completed(_alive: object, pending: tuple[Launch, list[int]], _future: object) -> None:
            try:
                end = now_ns()
                launch, completion = pending
                if not completion[ENDED]:
                    completion[ENDED] = end
                    entry = (completed_rows, schema.COLLECTIVE, launch, completion[NUMBER], end, completion)
                    if len(buffer) < capacity:
                        buffer.append(entry)
                    else:
                        drop(entry)
            except Exception as error:  # torch would only write it to the log
                tracer.failed(PART, error)

        return completed

    def _remember(self, launch: Launch, completion: list[int] | None, work: object) -> None:
        earlier = self.pending.pop(id(work), None)
        if earlier is not None:
            self._forgotten(earlier)
        if self.dead.entries:
            self.dead.clear_away()
        self.pending[id(work)] = (launch, completion, self.dead.reference(work))

    def _forgotten(self, pending: PendingWork) -> None:
        launch, completion, _ = pending
        if completion is None:
            self._tracer.append((forgotten_rows, kind_of(launch), launch, next_id()))

    def surrendered(self, work: object) -> None:
        """Take over a communication of the native part, as something else than its Work is waited for."""
        surrendered = None if self._native is None else self._native.core.surrender(work)
        if surrendered is None or self._native is None:
            return
        facts = NativeFacts(*surrendered)
        launch = self._native.launch(facts)
        if self._devices is None or isinstance(launch.start, int):
            self._remember(launch, None, work)
        else:
            self._devices.take_over(launch, facts.id, facts.position, work)

    def _unrecorded(self, work: object) -> None:
        earlier = self.pending.pop(id(work), None)
        if earlier is not None:
            self._forgotten(earlier)
        if self._devices is not None:
            self._devices.give_up_work(work)


def _may_end(pending: PendingWork) -> bool:
    """Return whether the end of a communication may be seen although its Work is gone."""
    _, completion, reference = pending
    return has_future(reference) or (completion is not None and not completion[ENDED])


def _collective_number(operation: Operation, state: GroupState, arguments: Arguments) -> tuple[int, int, bool]:
    """Return sequence number, global rank of the root (or −1), and True if the caller gets the Work."""
    position = len(operation.arguments) - 1
    options = arguments[position] if len(arguments) > position else None
    is_async = getattr(options, "asyncOp", None)
    if is_async is None or not _options_say_async():
        # torch before 2.8 passes it only to its own Python function, which is the caller of the replaced method. Any
        # other caller gets the Work, unless its options say something else.
        caller = sys._getframe(2).f_locals
        is_async = bool(caller.get("async_op", caller.get("async_ops", is_async is not False)))
    peer = -1
    if operation.has_root:
        root = getattr(options, "rootRank", options)
        peer = _global_rank(state, root) if isinstance(root, int) else -1
    if state.bracket is not None:
        state.bracket_is_collective = True
        return -1, peer, is_async
    return next(state.collective_seq), peer, is_async


@functools.cache
def _options_say_async() -> bool:
    # In all options: some have had the field without a meaning before.
    from torch.distributed import AllreduceOptions

    return hasattr(AllreduceOptions, "asyncOp")


def _global_rank(state: GroupState, group_rank: object) -> int:
    # −1 for a rank that the group does not have: torch refuses the call, and that is no failure of ours.
    ranks, rank = state.ranks_by_group_rank, _integer(group_rank)
    return ranks[rank] if rank is not None and 0 <= rank < len(ranks) else -1


def _integer(argument: object) -> int | None:
    """Return the integer that torch takes an argument for; None if it refuses it."""
    try:
        number = 0 if argument is None else operator.index(argument)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if -(2**31) <= number < 2**31 else None


def _p2p_number(operation: Operation, state: GroupState, arguments: Arguments) -> tuple[int, int, bool]:
    """Return the number towards the peer, the peer's global rank, and True if the caller gets the Work."""
    # The peer of a receive from anybody, and so its number, is not known when it is posted: see from_anybody.
    tag = _integer(arguments[2]) if len(arguments) > 2 else None
    peer = -1 if tag is None else _global_rank(state, arguments[1])
    # Frame 0 is this function, 1 the replaced method, 2 its caller: isend, irecv, send or recv.
    caller = sys._getframe(2)
    outer = caller.f_back
    is_async = caller.f_code.co_name not in _SYNCHRONOUS_P2P and (
        # dist.send and dist.recv call isend and irecv, and wait.
        outer is None or outer.f_code.co_name not in _SYNCHRONOUS_P2P or outer.f_globals is not caller.f_globals
    )
    seq = -1 if peer < 0 or tag is None else state.next_p2p(operation.is_send, peer, tag)
    return seq, peer, is_async


def _barrier_device(arguments: Arguments) -> torch.device | None:
    return getattr(arguments[-1], "device", None) if arguments else None


def _by_position(arguments: Arguments, keywords: dict[str, object], names: tuple[tuple[str, ...], ...]) -> Arguments:
    """Return arguments in the order of ``names``, also those passed by keyword; None for missing ones."""
    return arguments + tuple(
        next((keywords[name] for name in alternatives if name in keywords), None)
        for alternatives in names[len(arguments) :]
    )


def unknown_methods(owner: type) -> list[str]:
    """Return the methods of ``ProcessGroup`` in no list of operations, which may communicate."""
    return [
        name
        for name, value in vars(owner).items()
        if name not in OPERATIONS
        and name not in NOT_COMMUNICATION
        and name not in ONE_SIDED
        and not name.startswith("__")
        and callable(value)
        and not isinstance(value, (type, staticmethod, classmethod))
    ]


def _copy_description(original: Any, replacement: Any) -> None:
    replacement.__name__ = getattr(original, "__name__", replacement.__name__)
    replacement.__qualname__ = getattr(original, "__qualname__", replacement.__qualname__)
    replacement.__doc__ = getattr(original, "__doc__", None)
    replacement.__wrapped__ = original
