"""Capture ``Work.wait`` and waits for a Work's future. Closures over local names, and flat: they are the hot path."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from commtrace.capture.collectives.dead_works import DeadWorks, WorkReference
from commtrace.capture.device.clock import Mark, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.hooks import Hooks
from commtrace.capture.records import (
    COLLECTIVE_AND_STALL,
    NUMBER,
    P2P_AND_STALL,
    WAITED,
    DeviceCall,
    Entry,
    Launch,
    completed_rows,
    kind_of,
    next_id,
    stall_rows,
    waited_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

if TYPE_CHECKING:
    from torch.distributed import Work

PendingWork: TypeAlias = tuple[Launch, "list[int] | None", Callable[[], object]]
"""``(launch, completion, weak reference to the Work)``: a ``completion`` of None means that its wait ends the
communication, ``[id, end of the wait, end]`` that a callback does."""

PendingWorks: TypeAlias = dict[int, PendingWork]
"""Communications without a wait so far, by the id of their Work. That may be another Work's by now: the reference
tells."""


def record_failure(tracer: Tracer, blocked: Launch | DeviceCall | None, raised: Exception, part: str) -> None:
    """Record that a communication failed: another rank's failure has cut this rank off."""
    try:
        launch = blocked.launch if isinstance(blocked, DeviceCall) else blocked
        if launch is not None:
            tracer.communication_failed(launch, raised)
    except Exception as error:
        tracer.failed(part, error)


def _from_anybody(launch: Launch, work: Work) -> Launch:
    """Return the launch of a receive from anybody, with the sender that its Work knows once it is over."""
    state = launch.state
    try:
        peer = state.ranks_by_group_rank[work._source_rank()]
    except RuntimeError:  # This backend does not know.
        return launch
    return launch._replace(seq=state.next_p2p(False, peer), peer=peer)


def wrap_wait(
    original: Callable[..., object], tracer: Tracer, pending: PendingWorks, part: str
) -> Callable[..., object]:
    """Wrap ``wait`` of a Work, on a machine without an accelerator. If that fails, ``part`` is switched off."""
    blocked = tracer.blocked
    buffer, capacity, drop = tracer.recorder.buffer, tracer.recorder.capacity, tracer.recorder.drop

    def wait(work: Work, /, *arguments: object, **keywords: object) -> object:
        start = 0
        try:
            key = id(work)
            ours = pending.get(key)
            if ours is not None and ours[2]() is work:
                blocked[0] = ours[0]
                start = now_ns()
        except Exception as error:
            tracer.failed(part, error)
        if not start:
            return original(work, *arguments, **keywords)
        try:
            result = original(work, *arguments, **keywords)
        except Exception as raised:
            record_failure(tracer, blocked[0], raised, part)
            raise
        finally:
            try:
                blocked[0] = None
            except Exception as error:
                tracer.failed(part, error)
        try:
            end = now_ns()
            waited_for = pending.pop(key, None)
            if waited_for is None:  # Another thread has waited for it too, and recorded that.
                return result
            launch, completion, _ = waited_for
            entry: Entry
            tracer.last_mark = end
            if launch.seq < 0 and launch.operation.is_p2p:
                launch = _from_anybody(launch, work)
            if completion is None:
                kinds = P2P_AND_STALL if launch.operation.is_p2p else COLLECTIVE_AND_STALL
                entry = (waited_rows, kinds, launch, tracer.coordinates, start, end)
            else:
                completion[WAITED] = end
                entry = (stall_rows, schema.STALL, launch, completion[NUMBER], tracer.coordinates, start, end)
            if len(buffer) < capacity:
                buffer.append(entry)
            else:
                drop(entry)
        except Exception as error:
            tracer.failed(part, error)
        return result

    return wait


def wrap_wait_on_device(
    original: Callable[..., object], tracer: Tracer, pending: PendingWorks, part: str, devices: DeviceCalls
) -> Callable[..., object]:
    """Wrap ``wait`` where there is an accelerator: a stream's stall counts, and it may be busy while the host waits."""
    blocked = tracer.blocked

    def wait(work: Work, /, *arguments: object, **keywords: object) -> object:
        calls: tuple[DeviceCall, ...] | None = None
        stall_start: Mark | None = None
        try:
            ours = pending.get(id(work))
            if ours is not None and ours[2]() is work:
                blocked[0], stall_start = ours[0], devices.mark()
            else:
                calls, stall_start = devices.begin_wait(work)
                if calls is not None:
                    blocked[0] = calls[0]
        except Exception as error:
            tracer.failed(part, error)
        if stall_start is None:
            return original(work, *arguments, **keywords)
        try:
            result = original(work, *arguments, **keywords)
        except Exception as raised:
            record_failure(tracer, blocked[0], raised, part)
            raise
        finally:
            try:
                blocked[0] = None
            except Exception as error:
                tracer.failed(part, error)
        try:
            if calls is not None:
                devices.end_wait(work, calls, stall_start)
                return result
            end, stall_end = now_ns(), devices.mark()
            waited_for = pending.pop(id(work), None)
            if waited_for is None or stall_end is None:
                return result
            launch, completion, _ = waited_for
            if launch.seq < 0 and launch.operation.is_p2p:
                launch = _from_anybody(launch, work)
            if completion is None:
                number = next_id()
                tracer.append((completed_rows, kind_of(launch), launch, number, end, ()))
            else:
                number, completion[WAITED] = completion[NUMBER], end
            devices.record_host_stall(launch, number, stall_start, stall_end)
        except Exception as error:
            tracer.failed(part, error)
        return result

    return wait


FUTURES: Final = "capture of waits for futures"


class _OfWork(NamedTuple):
    key: int
    entry: PendingWork

    @property
    def launch(self) -> Launch:
        return self.entry[0]


class FutureWaits:
    """Capture waits for a Work's future; futures made of it (``then``, ``collect_all``) are not known."""

    def __init__(
        self,
        tracer: Tracer,
        pending: PendingWorks,
        dead: DeadWorks[PendingWork],
        devices: DeviceCalls | None,
        surrendered: Callable[[object], None] = lambda work: None,
    ) -> None:
        self._tracer = tracer
        self._pending = pending
        self._devices = devices
        self._surrendered = surrendered
        self._dead = dead
        self._hooks = Hooks(FUTURES, tracer)
        # By id of the future: what it belongs to, and the reference that takes it out of here when it dies.
        self._known: dict[int, tuple[_OfWork, weakref.ref[object]]] = {}

    def install(self) -> None:
        import torch
        from torch.distributed import Work

        for work_type in (Work, *subclasses(Work)):
            self._hooks.replace(work_type, "get_future", self._handing_out)
        self._hooks.replace(torch._C.Future, "wait", self._waiting)

    def uninstall(self) -> None:
        self._hooks.restore()
        self._known.clear()

    def _handing_out(self, original: Callable[..., object]) -> Callable[..., object]:
        future_taken, remember, failed = self._taken, self._remember, self._hooks.failed

        def get_future(work: Work, /, *arguments: object, **keywords: object) -> object:
            pending: _OfWork | None = None
            try:
                pending = future_taken(work)
            except Exception as error:
                failed(error)
            future = original(work, *arguments, **keywords)
            try:
                if pending is not None:
                    remember(future, pending)
            except Exception as error:
                failed(error)
            return future

        return get_future

    def _taken(self, work: object) -> _OfWork | None:
        self._surrendered(work)
        if self._devices is not None:
            self._devices.note_future(work)
        key = id(work)
        pending = self._pending.get(key)
        return None if pending is None or pending[2]() is not work else _OfWork(key, pending)

    def _mark(self) -> Mark:
        return now_ns() if self._devices is None else self._devices.mark()

    def _waited_for(self, pending: _OfWork, start: Mark, end: Mark) -> None:
        if self._pending.get(pending.key) is pending.entry:
            del self._pending[pending.key]
        elif not self._dead.take(pending.entry):
            return  # A wait for the Work was recorded, or the communication was given up.
        launch, completion, _ = pending.entry
        tracer, ended = self._tracer, end if self._devices is None else now_ns()
        if completion is None:
            number = next_id()
            tracer.append((completed_rows, kind_of(launch), launch, number, ended, ()))
        else:
            number, completion[WAITED] = completion[NUMBER], ended
        if self._devices is None:
            tracer.last_mark = end
            tracer.append((stall_rows, schema.STALL, launch, number, tracer.coordinates, start, end))
        else:
            self._devices.record_host_stall(launch, number, start, end)

    def _remember(self, future: object, pending: _OfWork) -> None:
        key, known = id(future), self._known
        futures: set[int] = set()
        reference = pending.entry[-1]
        if isinstance(reference, WorkReference):
            futures = reference.futures = reference.futures or futures
        futures.add(key)

        def died(_future: object) -> None:
            known.pop(key, None)
            futures.discard(key)

        known[key] = (pending, weakref.ref(future, died))

    def _waiting(self, original: Callable[..., object]) -> Callable[..., object]:
        known, hooks, failed, blocked = self._known, self._hooks, self._hooks.failed, self._tracer.blocked
        mark, waited_for = self._mark, self._waited_for

        def wait(future: object, /, *arguments: object, **keywords: object) -> object:
            pending: _OfWork | None = None
            start: Mark | None = None
            try:
                ours = known.pop(id(future), None)
                if ours is not None and hooks.active:
                    pending = ours[0]
                    blocked[0] = pending.launch
                    start = mark()
            except Exception as error:
                failed(error)
            if pending is None or start is None:
                return original(future, *arguments, **keywords)
            try:
                result = original(future, *arguments, **keywords)
            finally:
                try:
                    blocked[0] = None
                except Exception as error:
                    failed(error)
            try:
                waited_for(pending, start, mark())
            except Exception as error:
                failed(error)
            return result

        return wait


def subclasses(owner: type) -> list[type]:
    """Return the direct and indirect subclasses."""
    children: list[type] = owner.__subclasses__()
    return [subclass for child in children for subclass in (child, *subclasses(child))]
