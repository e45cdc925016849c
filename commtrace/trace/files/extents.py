"""Reads a rank forward, some record batches at a time, and later only the batches that hold some steps.

A long recording is never in memory as a whole: the first look tells where the rows of each step lie.

>>> for extent, decoded in read_forward(segments, RankMarks.none(), problems):         # doctest: +SKIP
...     print(extent.first_step, extent.last_step, len(decoded.block))
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import pyarrow as pa

from commtrace.errors import RunNotFoundError
from commtrace.trace.files.decoding import DecodedBlock, RankMarks, RankTable, decode, known_columns
from commtrace.trace.files.segment_index import SegmentIndex, SegmentReplacedError, first_line
from commtrace.trace.files.sessions import Segment
from commtrace.trace.spans import Spans

_BYTES_AT_ONCE: Final = 50_000
"""Compressed: about 8,000 rows, as of a batch that compaction made, or some smaller batches of files that it has not
come to."""


class Extent(NamedTuple):
    """Record batches of one segment that follow one another, and what they hold.

    Attributes:
        segment: position among the segments of the rank.
        first_batch, end_batch: the batches; the end is exclusive.
        end_byte: where the last of them ends in the file, which tells whether the file is still the same one.
        num_rows: spans in them.
        first_step, last_step: of the rows that belong to a step; (0, −1) without any.
        first_ns, last_ns: when the first and the last of the other rows begin, on the rank's clock; (0, −1) without
            any.
    """

    segment: int
    first_batch: int
    end_batch: int
    end_byte: int
    num_rows: int
    first_step: int
    last_step: int
    first_ns: int
    last_ns: int

    @classmethod
    def of(cls, segment: int, index: SegmentIndex, batches: tuple[int, int], spans: Spans) -> Extent:
        """Describe batches of a segment, which hold these spans."""
        steps = spans.step[spans.step >= 0]
        begins = spans.start[spans.step < 0]
        return cls(segment, *batches, _end_byte(index, batches[1]), len(spans), *_range(steps), *_range(begins))

    def holds(self, first_step: int, last_step: int, begin_ns: int, end_ns: int) -> bool:
        """Return whether it may hold rows of these steps, or rows of no step that begin between these instants.

        All bounds are inclusive.
        """
        of_steps = max(first_step, self.first_step) <= min(last_step, self.last_step)
        between = self.first_ns <= self.last_ns and max(begin_ns, self.first_ns) <= min(end_ns, self.last_ns)
        return of_steps or between


def read_forward(
    segments: Sequence[Segment], marks: RankMarks, problems: list[str]
) -> Iterator[tuple[Extent, DecodedBlock]]:
    """Read all batches of a rank in the order in which they were written, a few at a time.

    Args:
        segments: of the rank, oldest first.
        marks: to which those that are read are added.
        problems: to which what is damaged or missing is added.

    Raises:
        RunNotFoundError: this machine does not see the files.
    """
    _must_see(segments)
    for number, segment in enumerate(segments):
        index = SegmentIndex(segment.path)
        if not _extend(index, problems):
            continue
        for first, end in _groups(index):
            table = _read(index, first, end, problems)
            if table is None:
                continue
            decoded = decode([RankTable(segments[0].metadata, known_columns(table))], None, [marks])
            yield Extent.of(number, index, (first, end), decoded.block.spans), decoded
        index.tell_torn_end()
        problems += index.problems


def read_extents(
    segments: Sequence[Segment], extents: Iterable[Extent], marks: RankMarks, problems: list[str]
) -> Iterator[DecodedBlock]:
    """Read only these batches of a rank again; of a segment that was compacted meanwhile, all.

    Args:
        segments: of the rank, oldest first.
        extents: ascending.
        marks: what must be known of the rank to read them: up to which step rows were deleted.
        problems: to which what is damaged or missing is added.

    Raises:
        RunNotFoundError: this machine does not see the files.
    """
    _must_see(segments)
    for number, own in groupby(extents, key=lambda extent: extent.segment):
        index = SegmentIndex(segments[number].path)
        if not _extend(index, problems):
            continue
        wanted = [*own]
        same = all(_end_byte(index, extent.end_batch) == extent.end_byte for extent in wanted)
        for first, end in _runs(wanted) if same else _groups(index):
            table = _read(index, first, end, problems)
            if table is not None:
                yield decode([RankTable(segments[0].metadata, known_columns(table))], None, [marks])
        problems += index.problems


def _must_see(segments: Sequence[Segment]) -> None:
    # Single segments are deleted to keep to a budget; the folder of a rank is there as long as the run is.
    folder = segments[0].path.parent
    if not folder.is_dir():
        raise RunNotFoundError(
            f"{folder}: not there on {socket.gethostname()}, which was to read it. Workers must see the run under the "
            "same path."
        )


def _end_byte(index: SegmentIndex, end_batch: int) -> int:
    """Where a batch ends that comes before this one; −1 where the segment has no such batch."""
    if not 0 < end_batch <= len(index.batches):
        return -1
    last = index.batches[end_batch - 1]
    return last.offset + last.size


def _range(values: npt.NDArray[Any]) -> tuple[int, int]:
    return (int(values.min()), int(values.max())) if len(values) else (0, -1)


def _groups(index: SegmentIndex) -> Iterator[tuple[int, int]]:
    """Batches that are read together, as their first one and the one behind the last."""
    first, size = 0, 0
    for number, message in enumerate(index.batches):
        size += message.size
        if size >= _BYTES_AT_ONCE:
            yield first, number + 1
            first, size = number + 1, 0
    if first < len(index.batches):
        yield first, len(index.batches)


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """The first batch, and the one behind the last, of extents that follow one another."""
    first, end = extents[0].first_batch, extents[0].end_batch
    for extent in extents[1:]:
        if extent.first_batch != end:
            yield first, end
            first = extent.first_batch
        end = extent.end_batch
    yield first, end


def _extend(index: SegmentIndex, problems: list[str]) -> bool:
    """Find the batches of a segment; False where it cannot be read."""
    try:
        index.extend()
    except FileNotFoundError:
        problems.append(f"{index.path}: was deleted while the run was read, to keep to its budget.")
        return False
    except OSError as error:
        problems.append(f"{index.path}: not readable ({first_line(error)}).")
        return False
    return True


def _read(index: SegmentIndex, first: int, end: int, problems: list[str]) -> pa.Table | None:
    try:
        return index.read(first, end)
    except FileNotFoundError:
        problems.append(f"{index.path}: was deleted while the run was read, to keep to its budget.")
    except SegmentReplacedError:
        problems.append(f"{index.path}: was written anew while the run was read; read the run again.")
    except (pa.ArrowException, OSError) as error:
        problems.append(f"{index.path}: not readable ({first_line(error)}).")
    return None
