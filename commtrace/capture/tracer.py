"""Follow training through its schedule and the phases of a step. All of it runs on training threads, so it is short."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.capture.collectives.operations import Unmeasured
from commtrace.capture.device.clock import DeviceClock, HostClock, Mark, is_on_device, now_ns
from commtrace.capture.graphs.contents import OpenCaptures
from commtrace.capture.guard import Guard
from commtrace.capture.model.late_numbers import LateNumbers
from commtrace.capture.model.step_finder import StepFinder
from commtrace.capture.records import (
    DeviceCall,
    Launch,
    Span,
    coordinates_of,
    count_rows,
    failed_rows,
    quiet_rows,
    span_rows,
)
from commtrace.capture.threads import CallingThread, CompletionCallbacks, NativeCallingThread
from commtrace.recording.recorder import Recorder
from commtrace.trace import schema
from commtrace.trace.quiet import QuietChange
from commtrace.trace.schema import Coordinates
from commtrace.trace.selection import DetailPlan, QuietPlan, StepRange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from commtrace.capture.native import Native
    from commtrace.trace.topology import Topology

_HOST_LANE_KINDS = frozenset({schema.DATA, schema.CHECKPOINT, schema.GC, schema.EVALUATION})

_WAITING_KINDS = frozenset({schema.DATA, schema.CHECKPOINT})

_COUNTED_KINDS = _WAITING_KINDS | {schema.OPTIMIZER}

_WORK_KINDS = frozenset({schema.FORWARD, schema.BACKWARD, schema.RECOMPUTE, schema.OPTIMIZER})

_BETWEEN = "between steps"
"""The name of the span from the end of a step to the begin of the next one's work."""

_LONGEST_REST_SECONDS = 2.0
"""Of the harvester, for a stretch of quiet steps: what is recorded reaches the file so much later at most."""

_MOST_FAILURES = 8
_PATIENCE_SECONDS = 0.1
"""The longest wait of a failed communication for its record to be written."""


def _nobody(_is_capturing: bool) -> None: ...


class Tracer:
    """The recorder as instrumentation sees it. One per process.

    Outside the window of steps, and in quiet steps, ``recording`` is False, but sequence numbers are counted, so that
    ranks stay joined. Of a quiet step the length is recorded, and what the script counts in it.
    Listeners run on the training thread and must not raise.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        clock: DeviceClock | None = None,
        window: StepRange | None = None,
        guard: Guard | None = None,
        groups: GroupRegistry | None = None,
        detail: DetailPlan | None = None,
        quiet: QuietPlan | None = None,
        native: Native | None = None,
        first_step: int = 0,
    ) -> None:
        self.native = native
        self._first_step = first_step  # where the program does not number its steps
        self._has_numbers = False  # of the program
        self._late_numbers: LateNumbers | None = None
        self.recorder = recorder
        self.append = recorder.append
        self.clock: DeviceClock = clock or HostClock()
        self.window = window
        self.detail = detail or DetailPlan()
        self._quiet = quiet or QuietPlan()
        self._is_quiet = False
        self.guard = guard or Guard()
        self.groups = groups or GroupRegistry()
        self.captures = OpenCaptures(self.clock, _nobody if native is None else native.core.set_capturing)
        self.completions = CompletionCallbacks()
        self._host_clock = HostClock()
        self._coordinates = Coordinates()
        self._recording = False
        self._last_mark: Mark | None = None
        self.coordinates = Coordinates()
        self.recording = window is None
        self.pauses = 0  # of the recording: what was launched meanwhile is not known
        self.untraced_paths: set[str] = set()  # ways of communicating that are in use here and not recorded
        self.unmeasured = Unmeasured(self.guard)
        self.open_optimizers = 0
        self.innermost: Span | None = None
        self.blocked: list[Launch | DeviceCall | None] = [None]  # one item: the launch being handed on or waited for
        self.thread = CallingThread(set()) if native is None else NativeCallingThread(set(), native.core)
        self.open_waits = 0  # ``data`` and ``checkpoint`` phases; only the outermost is recorded
        self.steps = StepFinder(self)
        self.step_listeners: list[Callable[[], None]] = []
        self.end_listeners: list[Callable[[int], None]] = []  # called with a step that was recorded in full
        self.optimizer_listeners: list[Callable[[], None]] = []
        self._step: Span | None = None
        self._is_in_step = False
        self._ended: Mark | None = None  # end of the step before, where the next one begins; None: there is none
        self._work_begun: Mark | None = None  # the same as begin of the step, or of its work behind the time before it
        self._step_is_users = False
        self._work_end: Mark | None = None
        self._latest_step = -1
        self._counted_on = 0
        self.failures_recorded = 0
        self._at_steps: tuple[tuple[int, Callable[[], None]], ...] = ()
        self._topology: Topology = {}
        self._topology_version = 0
        self._lock = threading.RLock()
        self._is_abandoned = False
        self._tells_streams = native is not None and self.clock.timing != schema.HOST_TIMING

    @property
    def coordinates(self) -> Coordinates:
        """Return where training is in its schedule."""
        return self._coordinates

    @coordinates.setter
    def coordinates(self, coordinates: Coordinates) -> None:
        self._coordinates = coordinates
        if self.native is not None:
            self.native.core.set_place(coordinates)

    @property
    def recording(self) -> bool:
        """Return whether what happens is recorded, not only counted."""
        return self._recording

    @recording.setter
    def recording(self, recording: bool) -> None:
        self._recording = recording
        if self.native is not None:
            self.native.core.set_recording(recording)

    @property
    def last_mark(self) -> Mark | None:
        """Return the latest end of a phase or stall in this step."""
        # The native part knows the stalls that it records; what Python has seen since takes its place.
        of_native = None if self.native is None else self.native.core.latest_end()
        return self._last_mark if of_native is None else of_native

    @last_mark.setter
    def last_mark(self, mark: Mark | None) -> None:
        self._last_mark = mark
        if self.native is not None:
            self.native.core.clear_latest_end()

    @property
    def blocked_launch(self) -> Launch | None:
        """Return the communication that is being handed on, or waited for."""
        blocked = self.blocked[0]
        if blocked is None and self.native is not None:
            return self.native.blocked()
        return blocked.launch if isinstance(blocked, DeviceCall) else blocked

    def open_computing_spans(self) -> Iterator[Span]:
        """Yield the phases around this place whose work is computing, the innermost first."""
        span = self.innermost
        while span is not None:
            if span.kind in _WORK_KINDS:
                yield span
            span = span.outer

    def _tell_computing_streams(self) -> None:
        """Tell the native part which streams compute: those of the step's begin and of the open phases."""
        assert self.native is not None
        marks = [span.start for span in self.open_computing_spans() if span.start is not None]
        step = self.step_start
        has_step = is_on_device(step)
        self.native.core.set_computing((step, *marks) if has_step else tuple(marks), has_step)

    @property
    def has_begun_a_step(self) -> bool:
        """Return whether this process trains for sure: steps that were only found do not count."""
        return self._latest_step >= 0 and not self.steps.finding

    @property
    def step_start(self) -> Mark | None:
        """Return the begin of the work of the current step, on the stream that computes it."""
        if self._step is None:
            return None
        return self._step.start if self._work_begun is None else self._work_begun

    @property
    def work_end(self) -> Mark | None:
        """Return the end of the latest forward, backward or optimizer of the step."""
        return self._work_end

    @property
    def num_steps(self) -> int:
        """Return how many steps have begun, by their numbers."""
        return self._latest_step + 1 - self._topology.get("first_step", 0)

    @property
    def latest_step(self) -> int:
        """Return the number of the latest step; −1 before the first one."""
        return self._latest_step

    def is_in_window(self, step: int) -> bool:
        """Return whether this very step was chosen for detail: by a range of steps, by sampling, or on request."""
        chosen = self.window is not None and step in self.window
        sampled = self.detail.every > 1 and self.detail.details(step)
        return step >= 0 and (chosen or sampled or self.detail.requests(step))

    def at_step(self, number: int, action: Callable[[], None]) -> None:
        """Call ``action`` on the training thread as step ``number``, or a later one, begins. From any thread."""
        with self._lock:
            self._at_steps = (*self._at_steps, (number, action))

    def begin_step(
        self, number: int | None = None, *, is_users: bool = False, is_found: bool = False, skipped: int = 0
    ) -> None:
        """Close the current step and open the next one.

        A step lasts from the end of the one before: a span tells the time between it and now. The first one begins now.

        Args:
            number: the previous one plus 1 if None. Numbers that repeat (batches inside of epochs) are counted on.
            is_users: the script itself marks its steps; a step that an integration begins inside one is ignored.
            is_found: :attr:`steps` found it.
            skipped: how many numbers are left out before it.
        """
        if not is_found:
            self.steps.give_way(is_users=is_users)
        if self._step_is_users and not is_users:
            return
        self._step_is_users = is_users
        step = self._next(skipped) if number is None else self._unused(number)
        if is_users and number is not None and self._latest_step < 0:
            self.set_topology({"step_numbers": "the script's numbers"})
        is_chosen = self.window is None or step in self.window or self.detail.requests(step)
        is_drawn = self.window is None and self._quiet.is_quiet(step) and not self.is_in_window(step)
        record = is_chosen and not (is_drawn or self._is_abandoned)
        is_quiet = is_drawn and not self._is_abandoned
        now = self.clock.mark() if record or is_quiet or self._recording or self._is_quiet else None
        self._close_step(now)
        if is_quiet or self._is_quiet:
            # What was launched is counted at both ends of a stretch.
            counts = () if is_quiet and self._is_quiet else self._launched_by_group()
            self.append((quiet_rows, schema.MARK, QuietChange(step, is_quiet, *counts), now_ns()))
        if is_quiet:
            # What the steps before it cost the harvester is not to fall into steps that stand for a job without it.
            if not self._is_quiet:
                self.recorder.rest(_LONGEST_REST_SECONDS)
        elif self._is_quiet:
            self.recorder.rest(0)
        self._is_quiet = is_quiet
        self.open_optimizers = 0  # an optimizer that raised never left its phase
        if self._latest_step < 0:
            self.set_topology({"first_step": step})
        self._latest_step = step
        self._work_end = self._last_mark = None
        self._coordinates = coordinates = coordinates_of((step, -1, -1, -1))
        if self.native is not None:
            self.native.core.clear_latest_end()
            self.native.core.set_place(coordinates)
        if record != self._recording:
            self.pauses += record
            self.recording = record
        is_timed = record or is_quiet
        self._step = Span(schema.STEP, "step", schema.COMPUTE, coordinates, self.clock, now) if is_timed else None
        if self._step is not None and self._ended is not None:
            self._step.start = self._work_begun = self._ended
            self._work_begins(now)
        else:
            self._work_begun = None
        self._is_in_step = True
        if self._tells_streams:
            self._tell_computing_streams()
        for listener in tuple(self.step_listeners):
            listener()
        if self._at_steps:
            self._act(step)

    def _work_begins(self, now: Mark | None) -> None:
        """Record the time since the end of the step before, or since this was last called, as between steps."""
        if self._step is not None and self._work_begun is not now:
            # Of the step, also while spans are assigned to none.
            place = self._step.coordinates
            span = Span(schema.BETWEEN, _BETWEEN, schema.COMPUTE, place, self.clock, self._work_begun)
            self._work_begun = span.end = now
            self.record(span)

    def _launched_by_group(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Return how many collectives and messages there have been, by the id of the group."""
        states = list(self.groups.states.values())
        return (
            tuple((state.group.id, state.collective_seq.launched) for state in states),
            tuple((state.group.id, sum(kind[-1] for kind in state.collective_seq.messages())) for state in states),
        )

    def _next(self, skipped: int) -> int:
        step = max(self._latest_step + 1, self._first_step) + skipped
        if self._late_numbers is not None:
            step = self._late_numbers.next(step)
        return step

    def count_from(self, first_step: int) -> LateNumbers | None:
        """Count the steps of this world from ``first_step`` on; return what changes the numbers of those so far.

        None where nothing changes: they are counted so already, or the program numbers them. From any thread.
        """
        shift = first_step - self._first_step
        if shift <= 0 or self._has_numbers:
            return None
        self._late_numbers = LateNumbers(shift)
        with self._lock:
            if "first_step" in self._topology:
                self.set_topology({"first_step": self._topology["first_step"] + shift})
        return self._late_numbers

    def _unused(self, number: int) -> int:
        self._has_numbers = True
        step = number + self._counted_on
        behind = self._latest_step + 1 - step
        if behind <= 0:
            return step
        if not self._counted_on and (self.groups.place is None or self.groups.place.rank == 0):
            self.guard.noticed(
                f"steps are numbered again from {number} after {self._latest_step}; numbers must be unique, so the "
                f"count goes on with {step + behind}"
            )
        self._counted_on += behind
        return step + behind

    def _act(self, step: int) -> None:
        with self._lock:
            due = [action for number, action in self._at_steps if number <= step]
            self._at_steps = tuple(later for later in self._at_steps if later[0] > step)
        for action in due:
            try:
                action()
            except Exception as error:
                self.failed("a request for detail", error)

    def end_step(self, *, is_last: bool = False) -> None:
        """Close the current step; spans carry no number until the next one begins, unless it ``is_last`` at its end."""
        self._step_is_users = False
        # Also of a step that is not recorded, as the next one may be.
        is_timed = self._recording or self._is_quiet or self.is_in_window(self._latest_step + 1)
        self._close_step(self.clock.mark() if is_timed else None)
        if is_last:
            self._ended = None
        self.coordinates = Coordinates()
        if self._is_quiet:
            self.pauses += 1
            self._is_quiet = False
            change = QuietChange(self._latest_step + 1, False, *self._launched_by_group())
            self.append((quiet_rows, schema.MARK, change, now_ns()))
            self.recorder.rest(0)
        self.recording = self.window is None and not self._is_abandoned

    def end_iteration(self) -> None:
        """Close a framework's step before other work than training, unless the script marked it or it is empty."""
        if not self._step_is_users and self._work_end is not None:
            self.end_step()

    def restart_step(self, *, is_first: bool = False) -> None:
        """Have the work of the current step begin now. If it ``is_first``, its earlier part belongs to no step."""
        if self._step is None:
            return
        if self._work_begun is None or is_first:
            self._step.start, self._work_begun = self.clock.mark(), None
        else:
            self._work_begins(self.clock.mark())

    def leave_step(self) -> None:
        """Assign spans to no step for now; the current one goes on at :meth:`return_to_step`."""
        self.coordinates = self.coordinates._replace(step=schema.NOT_APPLICABLE)

    def return_to_step(self) -> None:
        self.coordinates = self.coordinates._replace(step=self._latest_step)

    def discard_step(self, *, frees_number: bool = False) -> None:
        """Drop the current step; the next one may have its number."""
        if frees_number and self._step is not None:
            self._latest_step -= 1
        self._step, self._is_in_step = None, False

    def finish(self) -> None:
        """End the last step with its last forward, backward or optimizer, not at process exit."""
        if self.steps.finding:
            self.discard_step()
        self._close_step(self.last_mark if self._work_end is None else self._work_end)

    def be_at(self, coordinates: Coordinates) -> Coordinates:
        """Go elsewhere in the schedule without a phase; return the coordinates to go back to."""
        before = self.coordinates
        self.coordinates = coordinates
        return before

    def _close_step(self, end: Mark | None) -> None:
        step, self._step = self._step, None
        if self._is_in_step:  # whether or not it is recorded
            self._is_in_step, self._ended = False, end
        if step is None or end is None:
            return
        if self._is_quiet:
            step.end = end
            self.record(step)
        elif self._recording:
            step.end = end
            self.record(step)
            for listener in tuple(self.end_listeners):
                listener(step.coordinates.step)

    def enter(self, kind: int, name: str, microbatch: int = -1, chunk: int = -1, stage: int = -1) -> Span:
        """Begin a phase, to be ended by :meth:`leave` in a ``finally``; arguments of −1 are the surrounding phase's."""
        # With few calls of Python, here and in leave(): where a job's data fill the caches each takes microseconds.
        outer = self._coordinates
        lane = schema.HOST if kind in _HOST_LANE_KINDS else schema.COMPUTE
        span = Span(kind, name, lane, outer, self.clock, None)
        if microbatch >= 0 or chunk >= 0 or stage >= 0:
            self._coordinates = coordinates = coordinates_of((
                outer[0],
                microbatch if microbatch >= 0 else outer[1],
                chunk if chunk >= 0 else outer[2],
                stage if stage >= 0 else outer[3],
            ))  # fmt: skip
            if self.native is not None:
                self.native.core.set_place(coordinates)
        span.outer, self.innermost = self.innermost, span
        if kind in _COUNTED_KINDS:
            self.open_optimizers += kind == schema.OPTIMIZER
            self.open_waits += kind in _WAITING_KINDS
        if self._recording:
            span.start = self.clock.mark()
            if self._tells_streams and kind in _WORK_KINDS:
                self._tell_computing_streams()
        return span

    def record(self, span: Span) -> None:
        """Record a span whose start and end are known."""
        native = self.native
        if native is None:
            self.append((span_rows, span.kind, span))
        else:
            native.core.span(span.kind, native.code(span.name), span.lane, span.coordinates, span.start, span.end)

    def leave(self, span: Span) -> None:
        native, self.innermost = self.native, span.outer
        is_captured = False
        if span.start is not None:
            self._last_mark = span.end = self.clock.mark()
            if span.kind in _WORK_KINDS:
                self._work_end = span.end
                if self._tells_streams:
                    self._tell_computing_streams()
                is_captured = bool(self.captures.open) and self._was_captured(span)
        if span.kind in _COUNTED_KINDS:
            self.open_optimizers -= span.kind == schema.OPTIMIZER and self.open_optimizers > 0
            self.open_waits -= span.kind in _WAITING_KINDS and self.open_waits > 0
        inner, outer = self._coordinates, span.coordinates
        if outer is not inner:
            # A step that began inside the phase (an iteration called from a phase of the user's) stays.
            self._coordinates = outer if outer[0] == inner[0] else outer._replace(step=inner.step)
            span.coordinates = inner if outer[0] == inner[0] else inner._replace(step=outer.step)
        if native is None:
            if span.start is not None and not is_captured:
                self.append((span_rows, span.kind, span))
        elif span.start is None or is_captured:
            self.coordinates = self._coordinates
            if is_captured:
                native.core.clear_latest_end()
        else:
            code = native.codes.get(span.name)
            if code is None:
                code = native.code(span.name)
            native.core.end_phase(span.kind, code, span.lane, span.coordinates, span.start, span.end, self._coordinates)

    def _was_captured(self, span: Span) -> bool:
        """Return whether a phase went into a CUDA graph: nothing has run, and its time is that of the capture."""
        graph = self.captures.current()
        if graph is not None:
            graph.passed(span.kind)
        return graph is not None

    def replayed(self, end: Mark) -> None:
        """Note the end of work that was replayed from a CUDA graph, outside of any phase."""
        self.last_mark = self._work_end = end

    def aside(self, kind: int, name: str) -> Span | None:
        """Begin a span of another thread than training's, on the host lane."""
        if not self.recording:
            return None
        coordinates = Coordinates(self.coordinates.step)
        return Span(kind, name, schema.HOST, coordinates, self._host_clock, self._host_clock.mark())

    def leave_aside(self, span: Span) -> None:
        span.end = self._host_clock.mark()
        self.record(span)

    def count(self, counts: dict[str, float]) -> None:
        """Add ``tokens``, ``samples`` or ``model_flops`` to the current step."""
        if self.recording or self._is_quiet:
            self.append((count_rows, schema.MARK, self.coordinates.step, now_ns(), counts))

    def set_role(self, process_group: ProcessGroup, role: str) -> None:
        self.groups.set_role(process_group, role)

    def set_topology(self, topology: Topology) -> None:
        """Merge ``coordinates``, ``parallel``, ``framework``, ``schedule``, … into the topology of this rank."""
        with self._lock:
            self._topology.update(topology)
            self._topology_version += 1

    def topology(self) -> tuple[int, Topology]:
        """Return a version that changes with the topology, and the topology."""
        with self._lock:
            return self._topology_version, self._topology.copy()

    def abandon_after_fork(self) -> None:
        """Stop recording in a forked child, even if it trains."""
        self._is_abandoned = True
        self.recording = self._is_quiet = False
        # Another thread of the parent may have held the old locks.
        self._lock = threading.RLock()
        self.guard.renew_lock()
        self.groups.renew_lock()

    def communication_failed(self, launch: Launch, error: BaseException) -> None:
        """Record a communication that raised. The first few are written at once: the process may end of it."""
        if self.failures_recorded < _MOST_FAILURES:
            self.failures_recorded += 1
            self.append((failed_rows, schema.MARK, launch, type(error).__name__, now_ns()))
            # The launcher may end this process before the exception has: to print it keeps Python's lock for long.
            self.recorder.harvest_soon(_PATIENCE_SECONDS)

    def failed(self, part: str, error: BaseException) -> None:
        self.guard.failed(part, error)
