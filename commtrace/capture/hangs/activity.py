"""Report the activity of a quiet process, read on the harvester's thread: a rank that hangs ends no span."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from commtrace.capture.device.clock import DeviceClock, Mark, now_ns
from commtrace.capture.records import DeviceCall, Launch, Span, dtype_name
from commtrace.capture.threads import frames_by_thread
from commtrace.capture.tracer import Tracer
from commtrace.recording.process_end import OWN_FILES
from commtrace.trace import schema
from commtrace.trace.hang_report import Activity, InFlight, OpenPhase

PART: Final = "activity of a quiet rank"

QUIET_NS: Final = 2_000_000_000
"""A rank that recorded nothing for so long writes its activity, and again after each such interval."""

LONG_QUIET_NS: Final = 60_000_000_000
SELDOM_NS: Final = 10_000_000_000
"""After a minute, such a rank writes every ten seconds only: the files of a job that hangs overnight stay small."""

_LATENESS_NS: Final = 1_000_000_000
"""Added to the announced time of the next mark, for the interval between passes."""

MOST_FRAMES: Final = 16
_MOST_OPEN: Final = 16
_MOST_PAIRS: Final = 512


class ActivityWatch:
    """Read the activity of the training thread. Not for several threads at a time.

    ``asks_device`` is False where a stuck driver must not block.
    """

    def __init__(
        self,
        tracer: Tracer,
        now: Callable[[], int] = now_ns,
        frames: Callable[[], tuple[str, ...]] | None = None,
        *,
        asks_device: bool = True,
    ) -> None:
        self._tracer = tracer
        self._now = now
        self._frames = frames or _frames_of_main_thread
        self._asks_device = asks_device  # not where a device with a stuck driver may never answer
        self._recorded_at = self._progress_at = now()
        self._progress: object = None
        self._due_at = 0
        self._seen: dict[int, tuple[Launch, int]] = {}

    def marks(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield the mark ``activity`` if it is due. Called once per pass, before the buffer is emptied."""
        now = self._now()
        progress = self.progress()
        entries, has_rows = list(self._tracer.recorder.buffer), self._tracer.recorder.source_has_rows
        # Other threads make garbage while training is stalled.
        if has_rows or any(entry[1] != schema.GC for entry in entries):
            self._recorded_at = self._progress_at = now
        if progress != self._progress:  # Training goes on in steps, too, that are not recorded.
            self._progress, self._progress_at = progress, now
        idle = now - self._recorded_at
        # The first pass writes it in any case: readers learn from it how often to expect the next one.
        if now < self._due_at or (self._due_at and idle < QUIET_NS):
            return
        interval = QUIET_NS if idle < LONG_QUIET_NS else SELDOM_NS
        self._due_at = now + interval
        no_progress_ns = now - self._progress_at
        again_within_ns = interval + _LATENESS_NS
        yield (
            "activity",
            {**self.current().to_json(), "no_progress_ns": no_progress_ns, "again_within_ns": again_within_ns},
        )

    def current(self) -> Activity:
        collectives, messages = self._launched()
        phases = tuple(_open_phase(span, self._asks_device) for span in _outwards(self._tracer.innermost))
        step, microbatch, chunk, stage = self._tracer.coordinates
        return Activity((step, microbatch, chunk, stage), phases, collectives, messages, self._frames())

    def open_kinds(self) -> set[str]:
        return {schema.KINDS[span.kind] for span in _outwards(self._tracer.innermost)}

    def progress(self) -> object:
        """Return a value that changes with training's place and its launches."""
        return (self._tracer.coordinates, *self._launched())

    def in_flight(self, unfinished: Iterable[Launch]) -> list[InFlight]:
        """Return communications in flight since before the last pass, the one that blocks training first."""
        blocked = self._tracer.blocked_launch
        on_device = {id(launch): launch for launch in self._on_device()}
        launches = [*filter(None, [blocked]), *unfinished, *on_device.values()]
        unique = {id(launch): launch for launch in launches}
        before, now = self._seen, self._now()
        self._seen = {key: (launch, before[key][1] if key in before else now) for key, launch in unique.items()}
        return [
            _in_flight(launch, since, launch is blocked, self._state_on_device(launch) if key in on_device else "")
            for key, (launch, since) in self._seen.items()
            if key in before
        ]

    def _state_on_device(self, launch: Launch) -> str:
        is_known, start = _resolved(self._tracer.clock, launch.start)
        return "" if not is_known else "scheduled" if start is None else "started"

    def _on_device(self) -> list[Launch]:
        """Return what the device has not finished, although the job is past it."""
        if not self._asks_device:
            return []
        entries = self._tracer.recorder.unresolved()
        calls = (entry[2] for entry in entries if len(entry) > 2 and isinstance(entry[2], DeviceCall))
        native = self._tracer.native
        return [*(call.launch for call in calls), *([] if native is None else native.ahead())]

    def _launched(self) -> tuple[dict[str, int], tuple[tuple[int, bool, int, int, int], ...]]:
        states = list(self._tracer.groups.states.values())
        messages = tuple((state.group.id, *kind) for state in states for kind in state.collective_seq.messages())
        return {str(state.group.id): state.collective_seq.launched for state in states}, messages[:_MOST_PAIRS]


def _outwards(span: Span | None) -> Iterator[Span]:
    for _ in range(_MOST_OPEN):
        if span is None:
            return
        yield span
        span = span.outer


def _resolved(clock: DeviceClock, mark: Mark) -> tuple[bool, int | None]:
    """Return whether the clock still knows the mark, and its time, None while the device has not passed it."""
    try:
        return True, clock.resolve(mark)
    except RuntimeError:  # It was lost, or the driver has failed: the rest is worth telling all the same.
        return False, None


def _open_phase(span: Span, asks_device: bool) -> OpenPhase:
    ask = span.start is not None and (asks_device or isinstance(span.start, int))
    _, since = _resolved(span.clock, span.start) if ask else (False, None)
    return OpenPhase(schema.KINDS[span.kind], span.name, since)


def _in_flight(launch: Launch, since: int, blocking: bool, state: str) -> InFlight:
    return InFlight(
        operation=launch.operation.name,
        group=launch.state.group.id,
        seq=launch.seq,
        peer=launch.peer,
        bytes=launch.num_bytes,
        dtype=dtype_name(launch.dtype),
        is_async=bool(launch.is_async),
        start=launch.start if isinstance(launch.start, int) else since,
        blocking=blocking or state == "started",
        state=state,
    )


def _frames_of_main_thread() -> tuple[str, ...]:
    # They are let go at once: they keep the tensors of their functions alive.
    frame = frames_by_thread().get(threading.main_thread().ident or 0)
    frames: list[str] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(OWN_FILES):
            frames.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(frames)
