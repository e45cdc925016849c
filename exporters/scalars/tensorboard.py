"""A file of events that TensorBoard reads, written by TensorBoard's own code on the caller's thread.

Not torch's ``SummaryWriter``: on a full disk, its thread dies with a traceback, after which some scripts end the job.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text

from commtrace.exporters.scalars.series import PREFIX, DatedEvent, Point

# Python keeps in a file's buffer what a full disk did not take, and writes it first when there is room again: no record
# is torn as long as each is shorter than the buffer.
_BUFFER_BYTES: Final = 1 << 20
_MOST_TEXT: Final = 100_000


class EventFile:
    """Scalars and findings in a file of a directory without others, as TensorBoard reads one of them at a time."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.commtrace"
        self._file = (directory / name).open("ab", buffering=_BUFFER_BYTES)
        self._records = RecordWriter(self._file)
        self._has_begun = False
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def is_open(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True

    def write(self, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
        for point in points:
            self._begin(point)
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.tagged.items()]
            self._add(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
        for step, event in findings:
            summary = text(f"{PREFIX}/findings", event.sentence[:_MOST_TEXT])
            self._add(Event(wall_time=event.time_ns / 1e9, step=max(step, 0), summary=summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _begin(self, first: Point) -> None:
        """Mark the first step, so that steps before a restart, which the job repeats, are not shown."""
        if not self._has_begun:
            self._has_begun = True
            self._add(Event(wall_time=first.time, step=first.step, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
