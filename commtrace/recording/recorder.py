"""The recorder: a bounded buffer that training threads fill, and a harvester thread that empties it into sinks."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from commtrace.recording.process_end import how_it_ended
from commtrace.trace import schema
from commtrace.trace.schema import MarkDetail, Row, mark_row
from commtrace.trace.spans import RowBatch, Spans

_logger = logging.getLogger("commtrace")

FLUSH_SECONDS: Final = 0.5
"""Interval at which rows reach the file: a killed process loses that, and the time of one pass, at most."""

_OPENING_SECONDS: Final = 0.1
"""Interval of attempts to open the sinks: a job may be over in less than a second."""

_RETRY_SECONDS: Final = 10.0
_ENTRIES_BETWEEN_YIELDS: Final = 64
_ENTRIES_NOT_REACHED: Final = 256
"""Entries that are asked for again in each pass; later ones stay in the buffer."""
_LAST_WORK_SECONDS: Final = 2.0
"""The longest wait of the end of the recording for the device to reach its last marks."""
_WRITTEN_AGAIN: Final = frozenset({"activity", "clock_anchor", "count", "dropped", "end", "in_flight"})
"""Marks that need no second try when they could not be written: newer ones take their place, or they are a step's."""


Entry: TypeAlias = tuple[Any, ...]
"""An item of the buffer: ``(make_rows, kind, …)``. The harvester calls ``make_rows(entry)`` for the rows; None means
that the device has not reached a mark of the entry. An entry for which there is no room is counted as ``kind``: a code
of ``schema.KINDS``, or a tuple of them, one for each row."""
# Entries of plain numbers, which the garbage collector stops tracking, were tried: of 20,000 that wait for a pass each
# costs 17 ns less. Only with 100,000 do those that wait cause full collections (bench/RESULTS.md).


class Sink(Protocol):
    """A receiver of finished rows on the harvester thread."""

    def write(self, rows: RowBatch) -> None:
        """Take the rows of a pass, perhaps none. If it raises, they count as dropped, and it is tried again later."""

    def close(self) -> None: ...


class Source(Protocol):
    """What records beside the buffer, and makes columns itself: :class:`commtrace.capture.native.Native`."""

    def gather(self) -> None:
        """Take over what is finished: at the beginning of a pass."""

    def take(self) -> tuple[Spans, list[Row], list[str]]:
        """Return the finished spans, those that have a detail as rows, and the strings for the codes of the spans."""

    def dropped(self) -> Sequence[int]:
        """Return how many rows were dropped so far, by kind."""

    @property
    def num_added(self) -> int:
        """Return how many communications and spans were recorded so far."""

    @property
    def num_waiting(self) -> int:
        """Return how many of them were not taken yet."""

    def give_up(self) -> None:
        """Count the rows that wait for the device as dropped."""


class Recorder:
    """Buffer entries, make rows of them on the harvester thread, and feed the sinks.

    Args:
        open_sinks: called once on the harvester thread, as soon as ``ready`` returns True; that is given whether
            this is the last pass.
        before_pass: called at the beginning of each pass; returns marks (name, detail) to write.
        note_losses: called at the end with the lost spans, by kind, that no sink could note.
        at_end: called on the harvester thread when it has written the rest.
        source: records beside the buffer.
    """

    def __init__(
        self,
        open_sinks: Callable[[], list[Sink]],
        *,
        ready: Callable[[bool], bool] = lambda last: True,
        capacity: int = 200_000,
        before_pass: Callable[[], Iterable[tuple[str, MarkDetail]]] = lambda: (),
        note_losses: Callable[[Mapping[str, int]], None] = lambda lost: None,
        at_end: Callable[[], None] = lambda: None,
        source: Source | None = None,
    ) -> None:
        self.recording = True
        self._open_sinks = open_sinks
        self._ready = ready
        self.capacity = capacity
        self._before_pass = before_pass
        self._note_losses = note_losses
        self._at_end = at_end
        self._source = source
        self.is_end_written = False  # whether the files hold everything until the end
        self.renumber: Callable[[RowBatch], RowBatch] | None = None
        """Changes the rows of a pass before the sinks get them; set as these are opened."""
        self.end_pass: Callable[[bool], list[Row]] = lambda last: []
        """Called when the entries of a pass, or of the ``last`` one, have been asked for; returns further rows."""
        self.buffer: deque[Entry] = deque()  # hot paths append to it, minding ``capacity`` and ``drop``
        self._unresolved: deque[Entry] = deque()
        self._drops = tuple(itertools.count() for _ in schema.KINDS)
        self._drop_reads = 0
        self._recorded_drops: dict[str, int] = {}
        self._added_at_last_pass = 0 if source is None else source.num_added
        self._unwritten_marks: list[Row] = []
        self._has_warned_of_entry = False
        self._lost_in_sink = [0] * len(schema.KINDS)
        self._sinks: list[Sink] | None = None
        self._sink_retry_at = self._pass_retry_at = self._marks_retry_at = 0.0
        self._write_retry_at: dict[Sink, float] = {}
        self._sink_failed = False
        self._failure = ""
        # Of passes at once: locks that are released once their pass has ended. A signal's handler, which may have
        # interrupted a thread that was asking as well, waits for no lock to ask.
        self._requests: queue.SimpleQueue[threading.Lock] = queue.SimpleQueue()
        self._stopping = False
        self._rests_until = 0.0
        self._pass_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.captured = [0] * len(schema.KINDS)

    def append(self, entry: Entry) -> None:
        """Add an entry, from any thread. One deque append: atomic under the GIL, no lock."""
        if len(self.buffer) < self.capacity:
            self.buffer.append(entry)
        else:
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        for kind in _kinds(entry):
            next(self._drops[kind])

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="commtrace-harvester", daemon=True)
        thread.start()
        self._thread = thread  # Once it runs: a system out of threads leaves none that a stop would join.

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """Harvest the rest and close the sinks; return False if that did not end in time."""
        self.recording = False
        self._stopping = True
        self._request()
        # An object of the script's that stops the recording when it dies may die on the harvester's thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                _logger.warning(
                    "commtrace: the harvester did not end within %s s: the disk or an exporter holds it up. %d spans, "
                    "and what it is writing now, are lost unless the process goes on",
                    timeout_seconds,
                    sum(len(_kinds(entry)) for entry in [*self.buffer, *self._unresolved])
                    + (0 if self._source is None else self._source.num_waiting),
                )
                return False
        return True

    def harvest_soon(self, patience_seconds: float = 0.0) -> None:
        """Have the harvester write at once, from any thread, and wait so long: the process may be killed soon."""
        written = self._request()
        thread = self._thread
        if patience_seconds and thread is not None and thread is not threading.current_thread() and thread.is_alive():
            written.acquire(timeout=patience_seconds)

    def _request(self) -> threading.Lock:
        written = threading.Lock()
        written.acquire()
        self._requests.put(written)
        return written

    def rest(self, seconds: float) -> None:
        """Have the harvester take nothing for so long, unless it is asked to; 0 ends that. From any thread."""
        self._rests_until = time.monotonic() + seconds if seconds else 0.0

    def flush(self) -> None:
        """Harvest now, on the calling thread: for tests."""
        with self._pass_lock:
            self._harvest(last=False)

    def abandon_after_fork(self) -> None:
        """Give up thread and files in a forked child: they are the parent's."""
        self.recording = False
        self._stopping = True
        self._thread = None
        # The thread may have held their locks.
        self._requests, self._pass_lock = queue.SimpleQueue(), threading.Lock()
        self._sinks = []
        self.buffer.clear()

    @property
    def source_has_rows(self) -> bool:
        """Return whether the source has recorded rows since the last pass."""
        return self._source is not None and self._source.num_added != self._added_at_last_pass

    def unresolved(self) -> list[Entry]:
        """Return entries that wait for the device, oldest first. For the harvester's thread."""
        return list(self._unresolved)

    @property
    def dropped(self) -> dict[str, int]:
        """Return the spans dropped so far, by kind. To be read by one thread at a time."""
        counts = {}
        of_source = [0] * len(schema.KINDS) if self._source is None else self._source.dropped()
        for kind, (drops, lost) in enumerate(zip(self._drops, self._lost_in_sink, strict=True)):
            # Advancing a counter is atomic under the GIL, reading it is advancing it: so subtract the earlier reads.
            total = next(drops) - self._drop_reads + lost + of_source[kind]
            if total:
                counts[schema.KINDS[kind]] = total
        self._drop_reads += 1
        return counts

    def _run(self) -> None:
        while not self._stopping:
            requests = self._next_requests(_OPENING_SECONDS if self._sinks is None else FLUSH_SECONDS)
            if not requests and time.monotonic() < self._rests_until:
                continue
            self._guarded_pass(last=False)
            for written in requests:
                written.release()
        deadline = time.monotonic() + _LAST_WORK_SECONDS
        while self._is_ahead_of_device() and time.monotonic() < deadline:
            time.sleep(FLUSH_SECONDS / 10)
            self._guarded_pass(last=False)
        self._guarded_pass(last=True)
        self._close_sinks()
        self._report_losses()
        try:
            self._at_end()
        except Exception:
            _logger.warning("commtrace: its recording did not end as it should; its files are whole", exc_info=True)

    def _next_requests(self, patience_seconds: float) -> list[threading.Lock]:
        """Wait for requests of a pass; later ones are for the next pass, as this one may be past what they are for."""
        try:
            requests = [self._requests.get(timeout=patience_seconds)]
        except queue.Empty:
            return []
        return requests + [self._requests.get() for _ in range(self._requests.qsize())]

    def _is_ahead_of_device(self) -> bool:
        entries = self._unresolved or (self._sinks and self.buffer)
        return bool(entries) or (self._source is not None and self._source.num_waiting > 0)

    def _guarded_pass(self, *, last: bool) -> None:
        try:
            with self._pass_lock:
                self._harvest(last=last)
        except Exception:
            # The harvester must survive anything a record or sink does: training cannot see it die. Until the next try
            # what is recorded stays in the buffer.
            self._pass_retry_at = time.monotonic() + _RETRY_SECONDS
            _logger.warning("commtrace: a harvest failed; trying again in %s s", _RETRY_SECONDS, exc_info=True)

    def _harvest(self, *, last: bool) -> None:
        if time.monotonic() < self._pass_retry_at and not last:
            return
        if self._sinks is None:
            if not (self._ready(last) or (last and self._trained())):
                return
            if time.monotonic() < self._sink_retry_at and not last:
                return
            if not self._try_open():
                if last:
                    self._count_unwritten()
                return
        marks = self._unwritten_marks + self._marks()
        if self._source is not None:
            if last:
                self._source.give_up()
            self._added_at_last_pass = self._source.num_added
            self._source.gather()
        rows = marks + self._resolved_rows(last)
        if last:
            self._count_unreached()
        spans, names = self._taken(rows)
        dropped = self.dropped
        rows += self._drop_marks(dropped)
        if last:
            rows.append(mark_row("end", how_it_ended()))
        if self._write(RowBatch(rows, spans, names)):
            self._recorded_drops, self._unwritten_marks = dropped, []
            self.is_end_written = last
        else:
            self._unwritten_marks = [row for row in rows if row.kind == schema.MARK and row.name not in _WRITTEN_AGAIN]

    def _marks(self) -> list[Row]:
        marks: list[Row] = []
        if time.monotonic() >= self._marks_retry_at:
            try:
                marks.extend(mark_row(name, detail) for name, detail in self._before_pass())
            except Exception:
                if not self._marks_retry_at:
                    _logger.warning(
                        "commtrace: the metadata of the run could not be collected; trying again every %s s",
                        _RETRY_SECONDS,
                        exc_info=True,
                    )
                self._marks_retry_at = time.monotonic() + _RETRY_SECONDS
        return marks

    def _taken(self, rows: list[Row]) -> tuple[Spans | None, list[str]]:
        """Return what the source has finished; those of its rows that have a detail are added to ``rows``."""
        if self._source is None:
            return None, []
        spans, detailed, names = self._source.take()
        rows += detailed
        return spans, names

    def _trained(self) -> bool:  # a launcher or data loader records nothing but garbage collections, and is no rank
        if multiprocessing.parent_process() is not None:
            return False  # what a spawned DataLoader worker records must not take the place of its rank
        return self.source_has_rows or any(entry[1] != schema.GC for entry in list(self.buffer))

    def _try_open(self) -> bool:
        try:
            self._sinks = self._open_sinks()
        except OSError as error:
            self._sink_retry_at = time.monotonic() + _RETRY_SECONDS
            self._warn_of_sink(error)
            return False
        return True

    def _resolved_rows(self, last: bool) -> list[Row]:
        rows: list[Row] = []
        most = sys.maxsize if last else _ENTRIES_NOT_REACHED
        again, self._unresolved = self._unresolved, deque()
        while again and len(self._unresolved) < most:
            self._resolve(again.popleft(), rows)
        self._unresolved.extend(again)
        for position in range(len(self.buffer)):
            if len(self._unresolved) >= most:
                break
            if position % _ENTRIES_BETWEEN_YIELDS == 0:
                # Let go of the GIL: a training thread that waits for it would otherwise wait a whole switch interval.
                time.sleep(0)
            self._resolve(self.buffer.popleft(), rows)
        try:
            rows += self.end_pass(last)
        except Exception:
            self._warn_of_entry()
        return rows

    def _resolve(self, entry: Entry, rows: list[Row]) -> None:
        try:
            resolved = entry[0](entry)
        except Exception:
            self._count_lost_entry(entry)
            self._warn_of_entry()
            return
        if resolved is None:
            self._unresolved.append(entry)
        else:
            rows += resolved

    def _count_unreached(self) -> None:  # work that the device never reached cannot be timed
        while self._unresolved:
            self._count_lost_entry(self._unresolved.popleft())

    def _count_unwritten(self) -> None:
        while self.buffer:
            self._count_lost_entry(self.buffer.popleft())
        if self._source is not None:
            self._source.give_up()
            self._source.gather()
            rows = self._resolved_rows(last=True)  # the source's: the buffer is empty
            spans, names = self._taken(rows)
            self._count_lost(RowBatch(rows, spans, names))

    def _report_losses(self) -> None:
        if self._sinks is None and not self._sink_failed:
            return  # there was nothing to record
        dropped = self.dropped
        unwritten = {kind: count - self._recorded_drops.get(kind, 0) for kind, count in dropped.items()}
        where = "Its files have the counts."
        if not self.is_end_written:
            where = f"Its files end before the job did: {self._failure or 'they could not be written'}."
            try:
                self._note_losses({kind: count for kind, count in unwritten.items() if count})
            except OSError as error:
                where += f" The counts could not be written either: {error.strerror}."
        if dropped:
            _logger.warning(
                "commtrace: %d spans of this process were lost (%s). %s",
                sum(dropped.values()),
                ", ".join(f"{count} {kind}" for kind, count in dropped.items()),
                where,
            )

    def _count_lost_entry(self, entry: Entry) -> None:
        for kind in _kinds(entry):
            self._lost_in_sink[kind] += 1

    def _drop_marks(self, dropped: Mapping[str, int]) -> list[Row]:
        known = self._recorded_drops
        news = {word: count - known.get(word, 0) for word, count in dropped.items() if count > known.get(word, 0)}
        return [mark_row("dropped", news)] if news else []

    def _write(self, batch: RowBatch) -> bool:
        """Hand rows to the sinks; return False, and count them, if they could not be taken."""
        if self.renumber is not None:
            batch = self.renumber(batch)
        # A full disk takes nothing from other sinks. Passes without rows go to them as well: a sink may
        # wait for what does not come any more.
        taken = [self._hand_to(sink, batch) for sink in self._sinks or ()]
        if not batch:
            return True
        if not all(taken):
            self._count_lost(batch)
            return False
        self._sink_failed = False
        for kind, count in enumerate(batch.counts_by_kind().tolist()):
            self.captured[kind] += count
        return True

    def _hand_to(self, sink: Sink, rows: RowBatch) -> bool:
        if time.monotonic() < self._write_retry_at.get(sink, 0.0) and not self._stopping:
            return False
        try:
            sink.write(rows)
        except Exception as error:
            self._warn_of_sink(error)
            self._write_retry_at[sink] = time.monotonic() + _RETRY_SECONDS
            return False
        return True

    def _count_lost(self, batch: RowBatch) -> None:
        for kind, count in enumerate(batch.counts_by_kind().tolist()):
            if kind != schema.MARK:
                self._lost_in_sink[kind] += count

    def _warn_of_entry(self) -> None:
        if not self._has_warned_of_entry:
            self._has_warned_of_entry = True
            _logger.warning(
                "commtrace: an entry could not be turned into a span; such spans are counted as dropped", exc_info=True
            )

    def _warn_of_sink(self, error: Exception) -> None:
        self._failure = str(error)
        if not self._sink_failed:
            self._sink_failed = True
            _logger.warning(
                "commtrace: cannot write its trace (%s). Training goes on; spans are dropped and counted, and writing "
                "is tried again every %s s. Free some space or set COMMTRACE_DIR to a writable directory.",
                error,
                _RETRY_SECONDS,
                exc_info=None if isinstance(error, OSError) else error,
            )

    def _close_sinks(self) -> None:
        # The trace is the last sink and is closed first: the others may wait for another process when they close.
        for sink in reversed(self._sinks or ()):
            try:
                sink.close()
            except Exception as error:
                _logger.warning("commtrace: could not close its trace: %s", error)


def _kinds(entry: Entry) -> tuple[int, ...]:
    kind = entry[1]
    return kind if isinstance(kind, tuple) else (kind,)
