"""Writes a synthetic run as a recorder would."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.errors import ConfigurationError
from commtrace.synth.synthesis import Synthetic
from commtrace.trace import schema
from commtrace.trace.files.writer import RANK_DIRECTORY_PATTERN, SegmentWriter
from commtrace.trace.metadata import Group
from commtrace.trace.run import RankTrace
from commtrace.trace.schema import Row

TRUTH_FILE: Final = "truth.json"

_THREADS: Final = 2
"""Compression releases the GIL; more threads would not help."""


def write(
    synthetic: Synthetic,
    directory: Path,
    ranks: Iterable[int] | None = None,
    progress: Callable[[int], object] = lambda num_spans: None,
) -> int:
    """Write the run and ``truth.json``, and return the number of spans.

    Args:
        synthetic: the run.
        directory: of the new run; it must not hold one.
        ranks: only these, as if the files of the others were lost.
        progress: called after each rank with its number of spans.

    Raises:
        ConfigurationError: a run is there already.
    """
    if directory.is_dir() and any(RANK_DIRECTORY_PATTERN.match(child.name) for child in directory.iterdir()):
        raise ConfigurationError(f"{directory} holds a run already. Give another directory, or delete that one.")
    directory.mkdir(parents=True, exist_ok=True)
    session, run_id = time.time_ns(), directory.resolve().name
    (directory / TRUTH_FILE).write_text(json.dumps(synthetic.truth, indent=1, allow_nan=False) + "\n")
    wanted = range(synthetic.job.world_size) if ranks is None else sorted(ranks)
    with ThreadPoolExecutor(_THREADS) as pool:
        total = 0
        for num_spans in pool.map(lambda rank: _write_rank(synthetic, directory, rank, session, run_id), wanted):
            total += num_spans
            progress(num_spans)
    return total


def _write_rank(synthetic: Synthetic, directory: Path, rank: int, session: int, run_id: str) -> int:
    trace = synthetic.rank_trace(rank)
    writer = SegmentWriter(directory, replace(trace.metadata, session=session, run_id=run_id))
    writer.write(_marks(synthetic, trace))
    writer.write_spans(trace.spans.take(np.argsort(trace.spans.step, kind="stable")), synthetic.names)
    writer.write([_mark("end", {})])
    writer.close()
    return len(trace.spans)


def _marks(synthetic: Synthetic, trace: RankTrace) -> list[Row]:
    """Return the marks of a recorder."""
    dropped = [_mark("dropped", dict(trace.dropped))] if trace.dropped else []
    return [
        *(_mark("process_group", _group(one)) for one in trace.groups.values()),
        _mark("topology", synthetic.topology(trace.rank)),
        *(_mark("clock_anchor", asdict(anchor)) for anchor in trace.anchors[1:]),
        *dropped,
    ]


def _group(one: Group) -> dict[str, object]:
    return {**one._asdict(), "ranks": list(one.ranks)}


def _mark(name: str, detail: object) -> Row:
    return Row(schema.MARK, name, schema.HOST, 0, 0, detail=json.dumps(detail))
