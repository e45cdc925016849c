"""Record where a process is that does not get as far as its job: in data preparation, init_process_group, new_group.

Until a rank knows its run, nothing can be written to its files. One that takes long for that is given files all the
same, under the name that its launcher has for the run: they say where it is. They go once the rank knows its run.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import structs

from commtrace.capture.device.clock import now_ns
from commtrace.capture.hangs.activity import LONG_QUIET_NS, QUIET_NS, SELDOM_NS, ActivityWatch
from commtrace.capture.hangs.hang_watch import HangWatch
from commtrace.capture.tracer import Tracer
from commtrace.config import Config
from commtrace.recording import identity, launchers
from commtrace.recording.identity import Identity, Place
from commtrace.recording.process_end import how_it_ended
from commtrace.trace.files.file_calls import FileCalls
from commtrace.trace.files.rank_files import discard_recording, files_of_recording, head_of_newest, rank_directory
from commtrace.trace.files.writer import SegmentWriter, read_header
from commtrace.trace.hang_report import Activity
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.processes import GONE, process_state
from commtrace.trace.schema import MarkDetail, mark_row

PART: Final = "recording where a rank is before it has joined its job"

_AFTER_NS: Final = 10_000_000_000
"""A rank that knows its run sooner has no such files."""

_LATENESS_NS: Final = 1_000_000_000

_VARIABLE: Final = "_COMMTRACE_RANK_PROCESS"
"""Tells processes that a rank starts, which inherit its launcher's variables, that they are no ranks."""


class SetupRecording:
    """The files of one process before it knows its run.

    For the harvester's thread, but for :meth:`start`, :meth:`stop` and ``exit``.
    """

    def __init__(
        self,
        tracer: Tracer,
        config: Config,
        who: Identity,
        files: FileCalls,
        announce: Callable[[Path, RankMetadata], None],
    ) -> None:
        self._tracer = tracer
        self._files = files
        self._config = config
        self._identity = who
        self._announce = announce
        self._activity = ActivityWatch(tracer)
        self._hang_watch = HangWatch(tracer, lambda: (), config.hang_seconds, files)
        self._writer: SegmentWriter | None = None
        self._earlier: set[Path] = set()
        self._started_ns = self._moved_ns = now_ns()
        self._frames: tuple[str, ...] = ()
        self._due_ns = 0
        self._is_over = False
        self.exit: MarkDetail | None = None  # a call of os._exit with another status than 0, until it is written
        self._is_ranks_child = False
        self._variable = ""

    def start(self) -> None:
        """Find out if a rank has started this process, and tell those that this one starts."""
        launched = launchers.position(os.environ)
        if launched is None:
            return
        mine = f"{launched.rank}/{launched.world_size}:"
        inherited = os.environ.get(_VARIABLE, "")
        self._is_ranks_child = inherited.startswith(mine) and inherited != f"{mine}{os.getpid()}"
        if not self._is_ranks_child:
            self._variable = os.environ[_VARIABLE] = f"{mine}{os.getpid()}"

    def stop(self) -> None:
        """Tell processes no more that this one has started them."""
        if self._variable and os.environ.get(_VARIABLE) == self._variable:
            del os.environ[_VARIABLE]

    def look(self) -> None:
        """Write where the process is, if it is time; a failure ends it, with a warning."""
        now = now_ns()
        if self._is_over or (now < self._due_ns and self.exit is None):
            return
        self._due_ns = now + QUIET_NS
        try:
            activity = self._activity.current()
            if activity.frames != self._frames:
                self._frames, self._moved_ns = activity.frames, now
            if now - self._started_ns < _AFTER_NS:
                return
            if self._writer is None:
                place = self._place()
                if place is None:
                    return
                self._open(place)
            self._write(activity, now)
        except Exception as error:
            self._is_over = True
            self._tracer.failed(PART, error)

    def discard(self) -> None:
        """Remove the files: the rank knows its run, or has ended without one."""
        self._is_over = True
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._hang_watch.stop()
        try:
            writer.close()
            self._files.call(discard_recording, writer.directory, self._earlier)
        except OSError as error:
            self._tracer.failed(PART, error)

    def end(self) -> None:
        """Close the files if the process fails; remove them if it ends well."""
        detail = how_it_ended()
        writer = self._writer
        if writer is None or not detail:
            self.discard()
            return
        self._is_over, self._writer = True, None
        self._hang_watch.stop()
        try:
            writer.write([mark_row("end", detail)])
            writer.close()
        except OSError as error:
            self._tracer.failed(PART, error)

    def _place(self) -> Place | None:
        known = self._tracer.groups.place or self._tracer.groups.joining
        if known is not None:
            return known
        # Not a child of a rank: a DataLoader worker, a compiler of torch's, a script that the training calls.
        if self._is_ranks_child or multiprocessing.parent_process() is not None:
            return None
        return self._identity.launched_place()

    def _open(self, place: Place) -> None:
        agreed = self._identity.on_its_own(place)
        metadata = identity.collect(self._config, agreed)
        directory = identity.directory(self._config, agreed.run_id)
        if self._is_in_use(rank_directory(directory, metadata.rank), metadata):
            # By the same rank of another world, which has joined: readers would take this recording for the newer one.
            directory = directory.with_name(f"{directory.name}-joining")
        self._earlier = self._files.call(files_of_recording, rank_directory(directory, metadata.rank))
        self._writer = SegmentWriter(directory, metadata, files=self._files)
        anchor = mark_row("clock_anchor", structs.asdict(identity.clock_anchor()))
        self._writer.write([anchor, mark_row("topology", self._tracer.topology()[1])])
        self._announce(directory, metadata)
        if self._config.hang_seconds:
            self._hang_watch.start(directory, metadata)

    def _write(self, activity: Activity, now: int) -> None:
        assert self._writer is not None
        quiet = now - self._moved_ns
        interval = QUIET_NS if quiet < LONG_QUIET_NS else SELDOM_NS
        self._due_ns = now + interval
        times = {"no_progress_ns": quiet, "again_within_ns": interval + _LATENESS_NS}
        marks = [mark_row("activity", {**activity.to_json(), **times})]
        if self.exit is not None:
            marks.append(mark_row("exit", self.exit))
            self.exit = None
        self._writer.write(marks)

    def _is_in_use(self, folder: Path, metadata: RankMetadata) -> bool:
        """Return whether another process of this host, which lives, records in the folder of a rank."""
        newest = read_header(self._files.call(head_of_newest, folder))
        if newest is None:
            return False
        is_other = (newest.host, newest.boot_id) == (metadata.host, metadata.boot_id) and newest.pid != metadata.pid
        return is_other and bool(newest.world) and process_state(newest) not in (None, GONE)
