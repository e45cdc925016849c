"""Write Chrome's trace JSON, which Perfetto, Speedscope and others open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from commtrace.analysis.timeline import Outline, StepBoxes
from commtrace.exporters.slices import RankTracks, Slice, Words, arrow_of, join_of, layers, processes

_TIDS_PER_RANK: Final = 100


def write(outline: Outline, steps: Iterable[StepBoxes], output: Path) -> int:
    """Write the outline and steps of a :class:`commtrace.analysis.timeline.Timeline`; return the number of slices."""
    # Times are doubles in microseconds, which cannot hold epoch ns: they count from the first slice.
    ranks = processes(outline, steps)
    base = min((one.start for rank in ranks for track in rank.tracks for one in track.slices), default=0)
    header = {"displayTimeUnit": "ms", "otherData": {"base_ns": base, "clock_residual_ns": outline["residual_ns"]}}
    num_slices = 0
    with output.open("w", encoding="utf-8") as file:
        file.write(_json(header)[:-1] + ',"traceEvents":[\n')
        for number, event in enumerate(_events(ranks, Words(outline), base)):
            num_slices += event["ph"] == "X"
            file.write((",\n" if number else "") + _json(event))
        file.write("\n]}\n")
    return num_slices


def _events(ranks: Sequence[RankTracks], words: Words, base: int) -> Iterator[dict[str, object]]:
    for order, rank in enumerate(ranks):
        yield _metadata("process_name", rank.rank + 1, 0, {"name": rank.name})
        yield _metadata("process_sort_index", rank.rank + 1, 0, {"sort_index": order})
        for sample in rank.bytes_in_flight:
            yield _counter("bytes in flight", rank.rank + 1, sample.time - base, sample.value)
        for sample in rank.stalled_percent:
            yield _counter("stalled, % of the step", rank.rank + 1, sample.time - base, sample.value)
    all_layers = layers(ranks, words)
    # Slices of a thread must nest, and thread ids are global: every layer is a thread.
    tids_per_rank = max([_TIDS_PER_RANK, *(layer.lane + 1 for layer in all_layers)])
    for layer in all_layers:
        pid = ranks[layer.process].rank + 1
        tid = pid * tids_per_rank + layer.lane
        yield _metadata("thread_name", pid, tid, {"name": layer.name})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": layer.lane})
        for one in layer.slices:
            yield from _slice(one, words, pid, tid, base)


def _slice(one: Slice, words: Words, pid: int, tid: int, base: int) -> Iterator[dict[str, object]]:
    where = {"pid": pid, "tid": tid}
    join = join_of(one)
    correlation = {} if join is None else {"correlation": join}
    yield {
        "ph": "X",
        "name": words.name(one),
        "cat": words.category(one),
        "ts": _microseconds(one.start - base),
        "dur": _microseconds(one.end - one.start),
        **where,
        "args": {**words.arguments(one), **correlation},
    }
    arrow = arrow_of(one, words)
    if arrow is not None:
        phase = {"ph": "s"} if arrow.is_source else {"ph": "f", "bp": "e"}
        at = _microseconds(one.start - base)
        yield {**phase, "id": arrow.number, "name": "p2p", "cat": "p2p", "ts": at, **where}


def _counter(name: str, pid: int, time: int, value: float) -> dict[str, object]:
    return {"ph": "C", "name": name, "pid": pid, "ts": _microseconds(time), "args": {"": value}}


def _metadata(name: str, pid: int, tid: int, arguments: Mapping[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments}


def _microseconds(ns: int) -> float:
    return ns / 1000


def _json(value: object) -> str:
    # Not as ASCII: Perfetto shows escapes in the names of threads as they are written.
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
