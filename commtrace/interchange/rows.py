"""Write rows, marks and rank metadata, for all importers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from commtrace.errors import ConfigurationError
from commtrace.trace import schema
from commtrace.trace.files.rank_files import RANK_DIRECTORY_PATTERN
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.metadata import IMPORTED, IMPORTED_FROM, ClockAnchor, Group, RankMetadata
from commtrace.trace.schema import Row
from commtrace.trace.spans import Int64, Spans

_ROWS_PER_BATCH: Final = 20_000
_ROWS_PER_SEGMENT: Final = 50_000
_LEAST_STEPS_PER_SEGMENT: Final = 100


_GUESSED_HOSTS: Final = (
    "the {files} do not name their hosts. Which ranks share a host, and so a clock, is a guess{from_what}: "
    "--ranks-per-host sets it."
)

_CLOCK_SLACK_NS: Final = 50_000
"""Tolerance between the ends of a gap and of its communication, which are read one after the other."""


class Imported(NamedTuple):
    """Counts of an import, and notes on its limits."""

    ranks: int
    num_spans: int
    notes: tuple[str, ...] = ()


class Guess(NamedTuple):
    """What an import had to guess, and the mark with which every reading command says so."""

    note: str
    mark: Row


def guessed_hosts(files: str, from_what: str = "") -> Guess:
    """Say that it is a guess which ranks share a host, as the ``files`` do not name hosts."""
    note = _GUESSED_HOSTS.format(files=files, from_what=from_what)
    return Guess(note, mark_row("problem", {"message": note, "is_limit": True}))


def mark_row(name: str, detail: object) -> Row:
    return Row(schema.MARK, name, schema.HOST, 0, 0, detail=json.dumps(detail, sort_keys=True))


def group_rows(groups: Iterable[Group]) -> list[Row]:
    return [mark_row("process_group", group.to_json()) for group in groups]


def imported_rank(
    rank: int,
    world_size: int,
    *,
    session: int,
    run_id: str,
    source: str,
    node: str = "host0",
    local_rank: int = 0,
    backend: str = "",
    device: str = "",
    versions: dict[str, str] | None = None,
) -> RankMetadata:
    """Return the metadata of an imported rank, whose times are epoch ns; ranks of one ``node`` share a clock."""
    return RankMetadata(
        run_id=run_id,
        attempt=0,
        session=session,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        host=node,
        node=node,
        boot_id=IMPORTED,
        pid=0,
        backend=backend,
        device=device,
        device_uuid="",
        versions={**(versions or {}), IMPORTED_FROM: source},
        anchor=ClockAnchor(0, 0),
    )


def write_rank(
    output: Path, metadata: RankMetadata, spans: Iterable[Row], marks: Sequence[Row] = (), *, closed: bool = True
) -> int:
    """Write one rank and return the number of its spans; ``closed`` is False if its recording was cut off."""
    writer = SegmentWriter(output, metadata)
    ending = [mark_row("end", {})] if closed else []
    num_rows = 0
    for batch in _batches(chain(marks, spans, ending)):
        num_rows += len(batch)
        writer.write(batch)
    writer.close()
    return num_rows - len(marks) - len(ending)


def write_rank_spans(
    output: Path, metadata: RankMetadata, spans: Spans, names: Sequence[str], marks: Sequence[Row]
) -> None:
    """Write one rank from columns, ascending by step."""
    writer = SegmentWriter(output, metadata, steps_per_segment=_steps_per_segment(spans))
    writer.write_spans(spans, names, before=marks, after=[mark_row("end", {})])
    writer.close()


def _steps_per_segment(spans: Spans) -> int:
    # Steps may be sparse: many files would then be nearly empty and slow to open.
    steps = int(np.ptp(spans.step)) + 1 if len(spans) else 1
    return max(_LEAST_STEPS_PER_SEGMENT, steps * _ROWS_PER_SEGMENT // max(len(spans), 1))


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, _ROWS_PER_BATCH)):
        yield batch


def new_run(output: Path) -> tuple[str, int]:
    """Return id and session of a new run; raise ConfigurationError if ``output`` holds a run, or is a file."""
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"{output} is a file. Give a directory with -o.")
    if output.is_dir() and any(RANK_DIRECTORY_PATTERN.match(child.name) for child in output.iterdir()):
        raise ConfigurationError(f"{output} holds a run already. Give another directory with -o, or delete that one.")
    return output.resolve().name, time.time_ns()


class Intervals(NamedTuple):
    start: Int64
    end: Int64


class ImportedStalls(NamedTuple):
    """Stalls as columns, ns; ``on`` is the position of the communication."""

    start: Int64
    end: Int64
    on: Int64


def gaps(steps: Intervals, work: Intervals, step: Int64) -> Intervals:
    """Return the idle times of a lane inside its ascending steps.

    Args:
        work: ascending within each step, and inside of it; ``step`` is the position of its step.
    """
    number = np.arange(len(steps.start))
    # Either end of each step is a piece of work without length.
    order = np.argsort(np.concatenate([number, step, number]), kind="stable")
    start = np.concatenate([steps.start, work.start, steps.end])[order]
    end = np.concatenate([steps.start, work.end, steps.end])[order]
    idle = end[:-1] < start[1:]
    last_of_step = np.cumsum(np.bincount(step, minlength=len(number)) + 2) - 1
    idle[last_of_step[:-1]] = False  # what lies between two steps is in neither
    return Intervals(end[:-1][idle], start[1:][idle])


def stalls(idle: Intervals, communications: Intervals) -> ImportedStalls:
    """Return the stalls in the gaps of a lane; by gap, and in each from its end backwards.

    The communication that ends last in a gap delayed the next work. The time before its launch belongs to the one that
    ends last before that, and so on. The rest, and communication that continues after the gap, is no stall.

    Args:
        idle: ascending and disjoint.
        communications: in any order.
    """
    first = np.searchsorted(idle.end, communications.start, "right")
    count = np.maximum(np.searchsorted(idle.start, communications.end, "left") - first, 0)
    on = np.repeat(np.arange(len(count)), count)
    gap = first[on] + np.arange(len(on)) - np.repeat(np.cumsum(count) - count, count)
    waited_for = communications.end[on] <= idle.end[gap] + _CLOCK_SLACK_NS
    on, gap = on[waited_for], gap[waited_for]
    start, end = communications.start[on], communications.end[on]
    begin, until = np.maximum(start, idle.start[gap]), np.minimum(end, idle.end[gap])
    # From the last gap to the first. Of two communications that end together, or just after the gap, the one that
    # started last is the reason.
    order = np.lexsort((end, -start, -until))
    on, gap, begin, until = on[order], gap[order], begin[order], until[order]
    if len(on):
        until[1:] = np.minimum(until[1:], np.minimum.accumulate(begin)[:-1])
    kept = np.flatnonzero(until > begin)
    kept = kept[np.argsort(gap[kept], kind="stable")]
    return ImportedStalls(begin[kept], until[kept], on[kept])
