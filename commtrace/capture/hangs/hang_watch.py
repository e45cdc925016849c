"""Notice on a separate thread that training has stopped, and write a hang report; never interrupt the job.

The thread makes no call of the run's file system, which may not answer for long: each report is written on a thread of
its own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from commtrace.capture.device.clock import now_ns
from commtrace.capture.hangs.activity import ActivityWatch
from commtrace.capture.hangs.stack_timer import NoStackTimerError, StackTimer
from commtrace.capture.records import Launch
from commtrace.capture.threads import frames_by_thread
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.files.rank_files import rank_directory, report_path, stack_path, write_report
from commtrace.trace.hang_report import HangReport, InFlight, ThreadStack
from commtrace.trace.metadata import RankMetadata

_logger = logging.getLogger("commtrace")

PART: Final = "watching for hangs"

TIMES_MEDIAN: Final = 10.0
"""Training hangs after this many typical steps without progress, and after the configured time at least."""

BEFORE_STEPS: Final = 10.0
"""Factor of the limit before the third step, and while the rank saves, loads or evaluates."""

_TICK_SECONDS: Final = 1.0
_LATENESS_SECONDS: Final = 1.0
"""A look may be so late where the process is only short of cores."""

_FEWEST_STEPS: Final = 3
_STEPS_KEPT: Final = 64
_SLOW_KINDS: Final = ("checkpoint", "evaluation")
_MOST_FRAMES: Final = 64
_WORK: Final = (
    schema.FORWARD, schema.BACKWARD, schema.RECOMPUTE, schema.MODULE, schema.OPTIMIZER, schema.DATA, schema.EVALUATION,
)  # fmt: skip


class HangWatch:
    """Watch one process; ``report`` is the state since training stopped, None while it goes on.

    Args:
        unfinished: returns launches whose end has not been seen yet, oldest first.
        least_seconds: nothing shorter is a hang.
        files: where the file system is called.
    """

    def __init__(
        self,
        tracer: Tracer,
        unfinished: Callable[[], Sequence[Launch]],
        least_seconds: float,
        files: FileCalls = HERE,
        *,
        now: Callable[[], int] = now_ns,
    ) -> None:
        self.report: HangReport | None = None
        self._tracer = tracer
        self._unfinished = unfinished
        self._files = files
        self._least_ns = round(least_seconds * 1e9)
        self._now = now
        self._activity = ActivityWatch(tracer, now, asks_device=False)
        self._metadata: RankMetadata | None = None
        self._directory: Path | None = None
        self._progress: object = None
        self._moved_at = self._stepped_at = now()
        self._step = -1
        self._steps_seen = 0
        self._step_ns: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._dumps = 0
        self._stack_timer: StackTimer | None = None
        self._writing: threading.Thread | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, directory: Path, metadata: RankMetadata) -> None:
        """Begin to watch; reports go beside the rank's trace files."""
        self._metadata, self._directory = metadata, rank_directory(directory, metadata.rank)
        thread = threading.Thread(target=self._run, name="commtrace-hang-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # Since Python 3.12 none starts once Python ends, where a short job is first heard of: nothing to watch.
            if threading.main_thread().is_alive():
                self._tracer.failed(PART, error)
            return
        self._thread = thread  # Once it runs: another thread may stop the watch at any line, and joins what it finds.

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_TICK_SECONDS)

    def abandon_after_fork(self) -> None:
        """Give up, in a forked child: the thread and the timer are not there, and the timer's file is the parent's."""
        self._stack_timer = None
        self._thread = self._writing = None
        self._stop = threading.Event()  # the thread may have held the lock of the old one

    def slow_phase(self) -> str:
        """Return ``checkpoint`` or ``evaluation`` while one is open, when no step ends; else "". From any thread."""
        kinds = self._activity.open_kinds()
        return next((kind for kind in _SLOW_KINDS if kind in kinds), "")

    def look(self) -> None:
        now = self._now()
        self._learn_step(now)
        progress = (self._activity.progress(), self._work_recorded())
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
            if self.report is not None:
                self.report = None
                if self._logs:
                    _logger.warning("commtrace: training goes on again on rank %d", self._rank)
            return
        in_flight = self._activity.in_flight(self._unfinished())
        no_progress_ns = now - self._moved_at
        if self.report is None and no_progress_ns >= self._limit_ns():
            self._dump(no_progress_ns, in_flight)

    def _run(self) -> None:
        try:
            if not self._stop.is_set():  # a short job is first heard of as it ends
                self._watch()
        except Exception as error:
            self._tracer.failed(PART, error)

    def _watch(self) -> None:
        self._open_stack_timer()
        try:
            while not self._stop.wait(_TICK_SECONDS):
                self.look()
                self._set_stack_timer()
        finally:
            if self._stack_timer is not None:
                self._stack_timer.close()

    def _open_stack_timer(self) -> None:
        assert self._metadata is not None
        assert self._directory is not None
        try:
            self._stack_timer = StackTimer(stack_path(self._directory, self._metadata.session), self._files)
        except NoStackTimerError as error:
            _logger.info("commtrace: where code in C holds up all of Python is not written: %s", error)
        except (OSError, RuntimeError) as error:
            self._tracer.failed("writing where code in C holds up all of Python", error)

    def _set_stack_timer(self) -> None:
        """Have the stack written by the time at which this thread, could it run, would have reported a hang."""
        timer = self._stack_timer
        if timer is None:
            return
        if self.report is not None:
            timer.set(0)
            return
        left_ns = self._moved_at + self._limit_ns() - self._now()
        timer.set(max(0.0, left_ns / 1e9) + _TICK_SECONDS + _LATENESS_SECONDS)

    def _learn_step(self, now: int) -> None:
        step = self._tracer.latest_step
        if step > self._step >= 0:
            self._steps_seen += step - self._step
            self._step_ns.append((now - self._stepped_at) / (step - self._step))
        if step != self._step:
            self._step, self._stepped_at = step, now

    def _limit_ns(self) -> float:
        if self._steps_seen < _FEWEST_STEPS:
            return BEFORE_STEPS * self._least_ns
        import statistics  # brings fractions and decimal along, which every rank would pay for at its start

        limit = max(self._least_ns, TIMES_MEDIAN * statistics.median(self._step_ns))
        return limit * BEFORE_STEPS if self.slow_phase() else limit

    def _work_recorded(self) -> int:
        # Phases that have ended: an evaluation or a data loader may go on for long without communication. As of the
        # harvester's last pass; where that is stuck, this does not change, and hides nothing.
        captured = self._tracer.recorder.captured
        return sum(captured[kind] for kind in _WORK)

    @property
    def _rank(self) -> int:
        return -1 if self._metadata is None else self._metadata.rank

    @property
    def _logs(self) -> bool:  # else a thousand ranks of a hung job would say the same
        return self._rank <= 0

    def _dump(self, no_progress_ns: int, in_flight: Sequence[InFlight]) -> None:
        assert self._metadata is not None
        topology = self._tracer.topology()[1]
        self.report = HangReport(
            time=time.time(),
            monotonic_ns=self._now(),
            no_progress_ns=no_progress_ns,
            metadata=self._metadata,
            groups=tuple(self._tracer.groups.known_groups()),
            coordinates=topology.get("coordinates", {}),
            parallel=topology.get("parallel", {}),
            activity=self._activity.current(),
            in_flight=tuple(in_flight),
            threads=tuple(stacks_of_threads()),
        )
        if self._logs:
            _logger.warning(
                "commtrace: no progress for %.0f s on rank %d: training hangs, or waits for another rank. %s For all "
                "ranks: commtrace doctor RUN",
                no_progress_ns / 1e9,
                self._rank,
                self._begin_to_write(self.report),
            )
        else:
            self._begin_to_write(self.report)

    def _begin_to_write(self, report: HangReport) -> str:
        """Have the report written, and return a sentence about its file."""
        if self._directory is None:
            return ""
        if self._writing is not None and self._writing.is_alive():
            return "Its state is not written: the file system of the run does not answer."
        self._dumps += 1
        path = report_path(self._directory, report.metadata.session, self._dumps)
        self._writing = threading.Thread(
            target=self._write, args=(path, report), name="commtrace-hang-report", daemon=True
        )
        self._writing.start()
        return f"Its state, with the stacks of its threads: {path}."

    def _write(self, path: Path, report: HangReport) -> None:
        try:
            self._files.call(write_report, path, json.dumps(report.to_json(), indent=1) + "\n")
        except OSError as error:
            if self._logs:
                _logger.warning("commtrace: the state of the hang could not be written: %s", error)


def stacks_of_threads() -> list[ThreadStack]:
    """Return the stacks of all threads of Python but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, innermost in frames_by_thread().items():  # let go at once, with the tensors that they hold
        if ident == threading.get_ident():
            continue
        frames: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None and len(frames) < _MOST_FRAMES:
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        stacks.append(ThreadStack(names.get(ident, str(ident)), tuple(frames)))
    return stacks
