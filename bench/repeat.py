"""Make a long synthetic run of a short one: its steps several times, one after the other.

    commtrace synth -o short --tp 2 --pp 2 --dp 2 --num-steps 1000
    python bench/repeat.py short long --times 10

Times, steps and numbers of communications go on from one repetition to the next. That takes a tenth of the time and of
the memory of a simulation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.spans import Int64, Spans


def repeated(spans: Spans, times: int, length_ns: int) -> Iterator[Spans]:
    """Yield the rows of each repetition."""
    steps, ids, numbers = int(spans.step.max()) + 1, int(spans.id.max()) + 1, numbers_of_each(spans)
    for number in range(times):
        yield spans.replace(
            start=spans.start + number * length_ns,
            end=spans.end + number * length_ns,
            step=np.where(spans.step >= 0, spans.step + number * steps, -1).astype(np.int32),
            seq=np.where(spans.seq >= 0, spans.seq + number * numbers, -1),
            id=np.where(spans.id >= 0, spans.id + number * ids, -1),
            stalled_on=np.where(spans.stalled_on >= 0, spans.stalled_on + number * ids, -1),
        )


def numbers_of_each(spans: Spans) -> Int64:
    """Return, by row, how many numbers its communications have: per group, messages per direction and peer as well."""
    is_message = spans.kind == schema.P2P
    series = pack([spans.group, is_message, *(np.where(is_message, own, -1) for own in (spans.peer, spans.name))])
    _, which = grouped(series)
    last = np.full(which.max() + 1, -1)
    np.maximum.at(last, which, spans.seq)
    return np.asarray(last[which] + 1)


def marks_of(trace: RankTrace) -> list[Row]:
    begin = int(trace.spans.start[0])
    topology = {**trace.topology, "coordinates": trace.coordinates, "parallel": trace.parallel}
    groups = [group.to_json() for group in trace.groups.values()]
    return [
        *(mark_row("process_group", group, at_ns=begin) for group in groups),
        mark_row("topology", topology, at_ns=begin),
    ]


def repeat(run: Run, times: int, output: Path) -> None:
    """Write a run of one host whose steps follow one another."""
    steps = [trace.spans.take(trace.spans.kind == schema.STEP) for trace in run.ranks.values()]
    length_ns = max(int(own.end.max()) for own in steps) - min(int(own.start.min()) for own in steps)
    for trace in run.ranks.values():
        writer = SegmentWriter(output, trace.metadata)
        writer.write(marks_of(trace))
        spans = trace.spans.take(np.argsort(trace.spans.step, kind="stable"))
        for part in repeated(spans, times, length_ns):
            writer.write_spans(part, run.names)
        writer.write([mark_row("end", {}, at_ns=int(part.end.max()))])
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--times", type=int, default=10)
    chosen = parser.parse_args()
    repeat(load_run(chosen.run), chosen.times, chosen.output)


if __name__ == "__main__":
    main()
