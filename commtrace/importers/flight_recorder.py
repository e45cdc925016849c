"""``commtrace import flight-recorder``: the dumps that torch writes when a collective times out, one per rank.

A dump tells who had enqueued what, and in which order. It does not tell device times: an operation begins where it was
enqueued and ends where a poll found it completed, with the timing ``unknown``; one that was not found completed has no
duration, and is in flight.

>>> import_flight_recorder(sorted(Path("/tmp").glob("nccl_trace_rank_*")), Path("imported"))  # doctest: +SKIP
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from commtrace.errors import ImportFileError
from commtrace.importers.flight_record import Entry, FlightRecord, read_flight_record
from commtrace.importers.rows import Imported, group_rows, imported_rank, mark_row, new_run, write_rank
from commtrace.trace import schema
from commtrace.trace.rows import Row

_USUAL_RANKS_PER_HOST = 8


def import_flight_recorder(
    files: Sequence[Path],
    output: Path,
    *,
    ranks_per_host: int = 0,
    on_file: Callable[[Path], None] = lambda path: None,
) -> Imported:
    """Make a run from the dumps of a job.

    Args:
        files: one per rank; their names end with the rank.
        output: directory of the new run.
        ranks_per_host: how many consecutive ranks share a clock; 0 for 8.
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    records: dict[int, FlightRecord] = {}
    for path in files:
        on_file(path)
        record = read_flight_record(path)
        if record.rank in records:
            raise ImportFileError(f"{records[record.rank].path} and {path} are both of rank {record.rank}.")
        records[record.rank] = record
    world_size = max(record.world_size for record in records.values())
    num_spans = 0
    for rank, record in sorted(records.items()):
        per_host = ranks_per_host or _USUAL_RANKS_PER_HOST
        metadata = imported_rank(
            rank,
            world_size,
            session=session,
            run_id=run_id,
            source="flight-recorder",
            node=f"host{rank // per_host}",
            local_rank=rank % per_host,
            backend="nccl",
            versions={"flight recorder": record.version},
        )
        problems = []
        if record.unreadable:
            message = f"{record.unreadable} entries of {record.path.name} are none that the flight recorder writes."
            problems.append(mark_row("problem", {"message": f"{message} They were left out."}))
        in_flight = [_in_flight(entry) for entry in record.entries if entry.state != "completed"]
        marks = [*group_rows(record.groups.values()), *problems, mark_row("in_flight", in_flight)]
        num_spans += write_rank(output, metadata, _rows(record), marks, closed=not in_flight)
    return Imported(len(records), num_spans)


def _rows(record: FlightRecord) -> Iterator[Row]:
    messages = Counter[tuple[int, int, int]]()
    places = Counter[tuple[int, int]]()
    for number, entry in enumerate(record.entries):
        group = entry.group.id if entry.group else -1
        seq, op_in_seq = entry.seq, 0
        if entry.is_p2p:  # the recorder counts all messages of a rank together; a pair counts its own
            sender, receiver = record.rank, entry.peer
            if entry.operation == "recv":
                sender, receiver = receiver, sender
            seq = messages[group, sender, receiver]
            messages[group, sender, receiver] += 1
        else:
            op_in_seq = places[group, seq]
            places[group, seq] += 1
        yield Row(
            schema.P2P if entry.is_p2p else schema.COLLECTIVE,
            entry.operation,
            schema.COMMUNICATION,
            entry.created_ns,
            max(entry.created_ns, entry.completed_ns or 0) if entry.state == "completed" else entry.created_ns,
            group=group,
            seq=seq,
            op_in_seq=op_in_seq,
            bytes=entry.num_bytes,
            dtype=entry.dtype,
            peer=entry.peer,
            is_async=True,
            id=number,
            timing=schema.UNKNOWN_TIMING,
            detail=_detail(entry),
        )


def _detail(entry: Entry) -> str:
    detail: dict[str, Any] = {"state": entry.state}
    if entry.state != "completed" or entry.completed_ns is None:
        detail["unfinished"] = True
    if entry.frames:
        detail["frames"] = list(entry.frames)
    return json.dumps(detail)


def _in_flight(entry: Entry) -> dict[str, Any]:
    return {
        "operation": entry.operation,
        "group": entry.group.id if entry.group else -1,
        "seq": entry.seq,
        "start": entry.created_ns,
        "state": entry.state,
    }
