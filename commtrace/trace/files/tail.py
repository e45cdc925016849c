"""Read the end of a growing run repeatedly, cheaply enough for a terminal view of thousands of ranks.

>>> tail = RunTail("commtrace-runs/my-run")                     # doctest: +SKIP
>>> newest = tail.read(steps=20)                                # doctest: +SKIP
>>> newest.first, newest.end                                    # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from commtrace.errors import RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.files.arrays import is_there, numbers
from commtrace.trace.files.decoding import LONGEST_NS, RankTable, decode, known_columns
from commtrace.trace.files.locate import find_run_directory, missing_ranks
from commtrace.trace.files.rank_files import rank_directory, segment_paths
from commtrace.trace.files.reader import newest_segments
from commtrace.trace.files.segment_index import ROOM_OF_TAIL, SegmentIndex, SegmentReplacedError
from commtrace.trace.inputs import MOST_RANKS, printable
from commtrace.trace.marks import read_mark
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.run import Run
from commtrace.trace.selection import StepRange

_NEWEST: Final = 3
"""Segments of each rank whose headers are read: the last steps may lie in more than one."""

_MOST_THREADS: Final = 16
_MOST_HEAD: Final = 64
_MOST_BATCHES_WITHOUT_STEPS: Final = 64
"""Batches to read of a job that marks no steps: about half a minute."""

_TRIES: Final = 3
_SAMPLED_SEGMENTS: Final = 16
_BATCHES_OF_A_SAMPLE: Final = 4
_MOST_BATCHES: Final = 32
"""Batches that are read, from the begin on and evenly, where those of a sample hold no step."""

_BEHIND: Final = 2
_QUIET_NS: Final = 15_000_000_000
"""A rank counts as stopped if its files are older than others by this, and it is behind by more than a multiple of the
steps asked for. Ranks write twice a second, not all at once."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The end of a run."""

    run: Run  # the newest steps, one before them, and those after them that only some ranks have ended
    first: int  # of the newest steps that all ranks have ended
    end: int  # exclusive; equal to first if there are none
    last_steps: dict[int, int]  # by rank; −1 if unknown


class RunTail:
    """The positions of the newest steps of a run; ``path`` and errors are as for ``load_run``."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._indexes: dict[Path, SegmentIndex] = {}
        self._guess = 2
        self._samples: dict[Path, list[int]] = {}

    def read(self, steps: int) -> Newest:
        """Return the newest ``steps`` steps that every rank has ended.

        Raises:
            RunNotFoundError: nothing was recorded there, or nothing yet.
            TraceFormatError: the files were written by a newer, incompatible commtrace.
        """
        for _ in range(_TRIES):
            try:
                return self._read(steps)
            except SegmentReplacedError:
                continue  # a rank has just compacted a segment: the next look finds the new file
        return self._read(steps)

    def _read(self, steps: int) -> Newest:
        problems: list[str] = []
        directory = find_run_directory(self._path)
        segments = newest_segments(directory, problems, _NEWEST)
        self._forget({segment.path for segments_of_rank in segments.values() for segment in segments_of_rank})
        tails = {
            rank: _RankTail(segments_of_rank[-1].metadata, [self._index(segment.path) for segment in segments_of_rank])
            for rank, segments_of_rank in segments.items()
        }
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
            list(pool.map(lambda tail: tail.find_steps(steps, self._guess), tails.values()))
            self._guess = max((tail.batches_read for tail in tails.values()), default=self._guess)
            last_steps = {rank: tail.last_step for rank, tail in tails.items()}
            end = _common_end(tails.values(), steps)
            first = max(0, end - steps)
            list(pool.map(lambda tail: tail.reach(first - 1), tails.values()))
            tables = list(pool.map(lambda tail: tail.table(), tails.values()))
        # Also the steps of ranks that are ahead, which tell when the job last came on.
        foremost = max(last_steps.values(), default=-1)
        wanted = StepRange(first - 1, max(end, foremost) + 1) if end else None
        problems += [problem for tail in tails.values() for problem in tail.all_problems()]
        tables_of_ranks = [
            RankTable(tail.metadata, table)
            for tail, table in zip(tails.values(), tables, strict=True)
            if table is not None
        ]
        if not tables_of_ranks:
            what = "nothing has been written to its files yet"
            if problems:
                what = "no readable spans"
            elif tails:  # the file of a running job may end in the middle of a batch
                what = "its files hold no whole batch of spans yet; if the job has ended, they are torn"
            raise RunNotFoundError(" ".join([f"{directory}: {what}.", *problems]))
        read = decode(tables_of_ranks, wanted)
        problems += [*read.problems, *missing_ranks(read.ranks, directory)]
        first = _without_the_very_first(tails.values(), first, end)
        run = Run(directory, read.ranks, read.names, tuple(map(printable, problems))).with_blocks([read.block])
        return Newest(run, first, end, last_steps)

    def sample_durations(self, rank: int) -> list[int]:
        """Return durations of steps of a rank, ns, sampled evenly over the whole run."""
        try:
            paths = segment_paths(rank_directory(find_run_directory(self._path), rank))
        except FileNotFoundError:
            return []
        chosen = [paths[at] for at in _evenly(len(paths), _SAMPLED_SEGMENTS)]
        for path in chosen:
            # The newest one still grows; of the others the first look counts.
            if path not in self._samples or path == paths[-1]:
                self._samples[path] = _durations(self._indexes.get(path) or SegmentIndex(path, ROOM_OF_TAIL))
        self._samples = {path: self._samples[path] for path in chosen}
        return [duration for path in chosen for duration in self._samples[path]]

    def _index(self, path: Path) -> SegmentIndex:
        return self._indexes.setdefault(path, SegmentIndex(path, ROOM_OF_TAIL))

    def _forget(self, kept: set[Path]) -> None:
        self._indexes = {path: index for path, index in self._indexes.items() if path in kept}


class _RankTail:
    def __init__(self, metadata: RankMetadata, indexes: list[SegmentIndex]) -> None:
        self.metadata = metadata
        self.problems: list[str] = []
        self.last_step = -1
        self.batches_read = 0
        self.is_at_beginning = False
        self._indexes = indexes
        self._at = len(indexes) - 1
        self._begin = 0
        self._parts: list[pa.Table] = []
        self._first_step: int | None = None

    @property
    def modified_ns(self) -> int:
        return self._indexes[-1].modified_ns

    @property
    def first_step(self) -> int | None:
        return self._first_step

    def find_steps(self, steps: int, guess: int) -> None:
        """Read back until this many steps have ended, ``guess`` batches at a time."""
        for index in self._indexes:
            self._guarded(index, index.extend)
        self._begin = len(self._indexes[self._at].batches)
        while not self._is_found(steps) and self._read_back(guess):
            pass

    def _is_found(self, steps: int) -> bool:
        if self._first_step is None:
            return self.batches_read >= _MOST_BATCHES_WITHOUT_STEPS
        return self._first_step <= self.last_step - steps

    def reach(self, step: int) -> None:
        """Read back until the step before ``step`` has ended, so that all rows of ``step`` have been read."""
        while self._first_step is not None and self._first_step >= step and self._read_back(self._more(step)):
            pass

    def _more(self, step: int) -> int:
        assert self._first_step is not None
        seen = self.last_step - self._first_step + 1
        return max(1, -(-self.batches_read * (self._first_step - step + 1) // seen))

    def table(self) -> pa.Table | None:
        """Return the rows as written, after those at the beginning of the newest segment."""
        head = self._head()
        parts = [*head, *reversed(self._parts)]
        return pa.concat_tables(map(known_columns, parts)) if parts else None

    def _read_back(self, count: int) -> bool:
        while self._begin == 0:
            if self._at == 0:
                self.is_at_beginning = True
                return False
            self._at -= 1
            self._begin = len(self._indexes[self._at].batches)
        index, end = self._indexes[self._at], self._begin
        self._begin = max(0, end - count)
        self.batches_read += end - self._begin
        part = self._guarded(index, lambda: index.read(self._begin, end))
        if part is not None:
            self._parts.append(part)
            ended = _ended_steps(part)
            if len(ended):
                if self.last_step < 0:  # after a rollback, others before it have higher numbers
                    self.last_step = int(ended[-1])
                first = int(ended.min())
                self._first_step = first if self._first_step is None else min(self._first_step, first)
        return True

    def _head(self) -> list[pa.Table]:
        """Return batches from the beginning of the newest segment to its first step, which hold the process groups."""
        index = self._indexes[-1]
        end = self._begin if self._at == len(self._indexes) - 1 else 0
        head: list[pa.Table] = []
        for at in range(min(end, _MOST_HEAD)):
            part = self._guarded(index, partial(index.read, at, at + 1))
            if part is None:
                break
            head.append(part)
            if len(_ended_steps(part)):
                break
        known = _recorded_groups([*head, *self._parts])
        if _groups_used(self._parts) <= known:
            return head
        # The mark of a group that was made later lies somewhere between: read all of it.
        rest = self._guarded(index, lambda: index.read(len(head), end))
        return [*head, *([rest] if rest is not None else [])]

    def all_problems(self) -> list[str]:
        return [*self.problems, *(problem for index in self._indexes for problem in index.problems)]

    def _guarded(self, index: SegmentIndex, read: Callable[[], object]) -> object:
        """Return the result of ``read``; None if the file is gone or broken, which is reported once."""
        try:
            return read()
        except SegmentReplacedError:
            raise
        except FileNotFoundError:
            return None  # a running job has just deleted it to keep to its budget
        except (OSError, pa.ArrowException) as error:
            self.problems.append(f"{index.path}: not readable ({str(error).partition(chr(10))[0]}).")
            return None


def _ended_steps(part: pa.Table) -> np.ndarray:
    return np.asarray(_values(part, "step")[_rows_of(part, schema.STEP)])


def _rows_of(part: pa.Table, kind: int) -> np.ndarray:
    chunks = [_holds(chunk, schema.KINDS[kind]) for chunk in part["kind"].chunks]
    return np.concatenate(chunks) if chunks else np.zeros(len(part), np.bool_)


def _holds(chunk: pa.DictionaryArray, word: str) -> np.ndarray:
    words = chunk.dictionary.to_pylist()
    if word not in words:
        return np.zeros(len(chunk), np.bool_)
    return np.asarray(is_there(chunk.indices) & (numbers(chunk.indices) == words.index(word)))


def _values(part: pa.Table, column: str) -> np.ndarray:
    chunks = [np.where(is_there(chunk), numbers(chunk), -1) for chunk in part[column].chunks]
    return np.concatenate([np.zeros(0, np.int64), *chunks])


def _recorded_groups(parts: Iterable[pa.Table]) -> set[int]:
    ids = set()
    for part in parts:
        rows = np.flatnonzero(_rows_of(part, schema.MARK))
        for row in rows.tolist():
            if part["name"][row].as_py() == "process_group":
                with contextlib.suppress(ValueError):  # reported when the marks are read
                    ids.add(read_mark("process_group", part["detail"][row].as_py(), most_ranks=MOST_RANKS).id)
    return ids


def _groups_used(parts: Iterable[pa.Table]) -> set[int]:
    used = {int(group) for part in parts for group in np.unique(_values(part, "group"))}
    return {group for group in used if group >= 0}


def _common_end(tails: Iterable[_RankTail], steps: int) -> int:
    """Return the step after the last one that all ranks have ended, except ranks far behind; 0 if there is none."""
    known = [tail for tail in tails if tail.last_step >= 0]
    foremost = max((tail.last_step for tail in known), default=-1)
    newest = max((tail.modified_ns for tail in known), default=0)
    deciding = [
        tail.last_step
        for tail in known
        if tail.last_step >= foremost - _BEHIND * steps or tail.modified_ns >= newest - _QUIET_NS
    ]
    return min(deciding, default=-1) + 1


def _without_the_very_first(tails: Iterable[_RankTail], first: int, end: int) -> int:
    """Skip the run's first step, its warm-up, if there are others."""
    begins = [tail.first_step for tail in tails if tail.is_at_beginning and tail.first_step is not None]
    return max(first, min(begins) + 1) if begins and end - min(begins) >= 3 else first


def _evenly(count: int, most: int) -> list[int]:
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, most))}) if count else []


def _durations(index: SegmentIndex) -> list[int]:
    durations: list[int] = []
    try:
        index.extend()
        fields = index.schema()
        columns = [fields.names.index(name) for name in ("kind", "start", "end")]
        if any(not fields.field(at).equals(schema.SCHEMA.field(fields.field(at).name)) for at in columns):
            return []  # of another program
        count = len(index.batches)
        chosen = _evenly(count, _BATCHES_OF_A_SAMPLE)
        for at in chosen:
            durations += _durations_in(index, at, columns)
        if not durations:  # few batches hold steps where these are long, or where a job hangs
            for at in {*range(min(count, _MOST_BATCHES)), *_evenly(count, _MOST_BATCHES)}.difference(chosen):
                durations += _durations_in(index, at, columns)
    except (OSError, ValueError, pa.ArrowException):
        pass  # deleted meanwhile, or torn: it is a sample of others all the same
    return durations


def _durations_in(index: SegmentIndex, batch: int, columns: list[int]) -> list[int]:
    part = index.read(batch, batch + 1, columns)
    if part is None:
        return []
    durations = (_values(part, "end") - _values(part, "start"))[_rows_of(part, schema.STEP)]
    return [int(duration) for duration in durations[(durations >= 0) & (durations < LONGEST_NS)]]
