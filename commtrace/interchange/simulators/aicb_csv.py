"""Import the communication log that AICB writes of a benchmark (``commtrace import aicb-csv``).

A line has a call of one rank and how long it took; neither when it began nor who the members of its group are. AICB
waits for each call, so the calls of an epoch are laid end to end, and the rest of the epoch's time is in no call.
Bandwidths are computed from bytes and times; those of the log have had other units and formulas in other versions.
https://github.com/aliyun/aicb

>>> import_aicb_csv(Path("results/comm_logs/megatron_log.csv"), Path("imported"))  # doctest: +SKIP
"""

from __future__ import annotations

import csv
import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from commtrace.errors import ImportFileError
from commtrace.interchange.rows import Imported, group_rows, imported_rank, mark_row, new_run, write_rank
from commtrace.trace import schema
from commtrace.trace.inputs import MOST_RANKS, open_file, printable
from commtrace.trace.metadata import Group, group_id
from commtrace.trace.schema import Row

COLUMNS: Final = (
    "comm_type", "comm_group", "comm_group_size", "msg_size", "stage", "dst", "src", "additional", "_elapsed_time",
    "algbw", "busbw", "count",
)  # fmt: skip

_OPERATIONS: Final[Mapping[str, str]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "barrier": "barrier",
    "isend": "send",
    "irecv": "recv",
}
_COMPUTATION: Final = "computation"
_EPOCH_END: Final = "epoch_end"
_ROLES: Final[Mapping[str, str]] = {
    "tp_group": "tp",
    "pp_group": "pp",
    "dp_group": "dp",
    "ep_group": "ep",
    "ep_dp_group": "expert-dp",
    "ep_tp_group": "tp-ep",
    "embedding_group": "embedding",
    "all": "world",
    "all_nodes": "world",
}
_NONE: Final = ("", "None")
_WORD: Final = re.compile(r"[A-Za-z_]{1,100}")
_NUMBER: Final = re.compile(r"[0-9]{1,18}(\.0+)?")
_LONGEST_MS: Final = 1e9
_MOST_BYTES: Final = 2**50
_NS_PER_MS: Final = 1e6
_GIB_PER_GB: Final = 1e9 / (1 << 30)
_ENOUGH_DIGITS: Final = 10.0
"""From here on, a bandwidth that was rounded to two decimals tells GB/s from GiB/s."""
_LARGEST_FILE: Final = 1 << 30


class _CsvCall(NamedTuple):
    operation: str  # or computation, or epoch_end
    group: str
    group_size: int | None
    num_bytes: int
    stage: str
    peer: int
    elapsed_ns: int
    algbw: float
    busbw: float
    is_overlapped: bool  # AICB did not wait for it, and has no time


class _Epoch(NamedTuple):
    calls: Sequence[_CsvCall]
    time_ns: int | None  # None if the log ends before

    @property
    def length_ns(self) -> int:
        return max(self.time_ns or 0, sum(call.elapsed_ns for call in self.calls))


def import_aicb_csv(path: Path, output: Path, *, on_file: Callable[[Path], None] = lambda path: None) -> Imported:
    """Write a run with the one rank of a log; its first epoch is the init phase, and precedes step 0.

    Raises:
        ImportFileError: the file is no log of AICB, or one of its lines is damaged; the message says which.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    on_file(path)
    epochs = _epochs(path)
    sizes = _sizes(epochs)
    groups = _groups(sizes)
    notes = tuple(_notes(epochs, sizes))
    world_size = max([1, *(size for size in sizes.values() if size)])
    metadata = imported_rank(0, world_size, session=session, run_id=run_id, source="aicb-csv")
    sizes_of_roles = {_role(name): size for name, size in sizes.items() if size}
    marks = [
        *group_rows(groups.values()),
        mark_row("topology", {"parallel": sizes_of_roles, "framework": {"name": "aicb"}}),
        *(mark_row("problem", {"message": note}) for note in notes),
    ]
    num_spans = write_rank(output, metadata, _rows(epochs, groups), marks)
    return Imported(1, num_spans, notes)


def _epochs(path: Path) -> list[_Epoch]:
    epochs: list[_Epoch] = []
    calls: list[_CsvCall] = []
    for call in _read(path):
        if call.operation != _EPOCH_END:
            calls.append(call)
            continue
        epochs.append(_Epoch(calls, call.elapsed_ns))
        calls = []
    if calls:
        epochs.append(_Epoch(calls, None))
    if not epochs:
        raise ImportFileError(f"{path} has no calls: it holds a header only. Run the benchmark again.")
    return epochs


def _read(path: Path) -> Iterator[_CsvCall]:
    try:
        with open_file(path) as opened, TextIOWrapper(opened, "utf-8", newline="") as file:
            if os.fstat(opened.fileno()).st_size > _LARGEST_FILE:
                raise OSError(errno.EFBIG, f"it is larger than {_LARGEST_FILE:,} bytes")
            lines = csv.reader(file, strict=True)
            head = next(lines, [])
            if tuple(head) != COLUMNS:
                first = ", ".join(map(printable, head[:4])) or "nothing"
                raise ImportFileError(
                    f"{path} is no log of AICB: its first line has to be {','.join(COLUMNS)}, and begins with {first}."
                )
            for fields in lines:
                try:
                    yield _call(fields)
                except ValueError as error:
                    raise ImportFileError(
                        f"{path}, line {lines.line_num}: {error}. Take the line out, or copy the file again."
                    ) from error
    except OSError as error:
        raise ImportFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ImportFileError(f"{path} is damaged, or no CSV: {error}. Copy it again.") from error


def _call(fields: Sequence[str]) -> _CsvCall:
    if len(fields) != len(COLUMNS):
        raise ValueError(f"it has {len(fields)} of {len(COLUMNS)} fields")
    row = dict(zip(COLUMNS, fields, strict=True))
    operation = row["comm_type"].removeprefix("CommType.")
    if operation not in (*_OPERATIONS, _COMPUTATION, _EPOCH_END):
        raise ValueError(f"comm_type {printable(operation[:40])!r} is none of AICB's")
    group = row["comm_group"].removeprefix("CommGroup.")
    if operation in _OPERATIONS and not _WORD.fullmatch(group):
        raise ValueError(f"comm_group {printable(group[:40])!r} is no name")
    peer = row["dst"] if row["dst"] not in _NONE else row["src"]
    size = _integer(row, "comm_group_size", MOST_RANKS)
    if size == 0:
        raise ValueError("comm_group_size is 0")
    return _CsvCall(
        _OPERATIONS.get(operation, operation),
        group,
        size,
        # of a computation it has the shapes of two matrices
        0 if operation == _COMPUTATION else _integer(row, "msg_size", _MOST_BYTES) or 0,
        printable(row["stage"][:200]),
        -1 if peer in _NONE else _integer({"dst or src": peer}, "dst or src", MOST_RANKS - 1) or 0,
        round(_decimal(row, "_elapsed_time", _LONGEST_MS) * _NS_PER_MS),
        _decimal(row, "algbw", 1e12),
        _decimal(row, "busbw", 1e12),
        row["additional"] == "overlap",
    )


def _integer(row: Mapping[str, str], name: str, most: int) -> int | None:
    text = row[name].strip()
    if text in _NONE:
        return None
    if not _NUMBER.fullmatch(text) or int(float(text)) > most:
        raise ValueError(f"{name} is {printable(text[:40])!r}, not a whole number up to {most}")
    return int(text.partition(".")[0])


def _decimal(row: Mapping[str, str], name: str, most: float) -> float:
    text = row[name].strip()
    if text in _NONE:
        if name == "_elapsed_time":
            raise ValueError("_elapsed_time is missing: this is a workload that was not run, not a log")
        return 0.0
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:  # NaN compares as False
        raise ValueError(f"{name} is {printable(text[:40])!r}, not a number from 0 to {most:g}")
    return number


def _sizes(epochs: Sequence[_Epoch]) -> dict[str, int | None]:
    """Return the size of each group; some lines of a group may lack it."""
    sizes: dict[str, int | None] = {}
    for epoch in epochs:
        for call in epoch.calls:
            if call.operation != _COMPUTATION:
                known = [size for size in (sizes.get(call.group), call.group_size) if size]
                sizes[call.group] = max(known, default=None)
    return sizes


def _role(name: str) -> str:
    return _ROLES.get(name) or name.removesuffix("_group").replace("_", "-")


def _groups(sizes: Mapping[str, int | None]) -> dict[str, Group]:
    groups = {}
    for ordinal, (name, size) in enumerate(sizes.items()):
        members = tuple(range(size or 0))  # their true numbers are not in the log
        groups[name] = Group(group_id(members, ordinal), members, ordinal, _role(name), name)
    return groups


def _notes(epochs: Sequence[_Epoch], sizes: Mapping[str, int | None]) -> Iterator[str]:
    yield (
        "An AICB log has one rank and no start times: its calls are laid end to end, and waits cannot be told from "
        "transfers."
    )
    unknown = [name for name, size in sizes.items() if size is None]
    if unknown:
        yield f"The log does not say how many ranks {', '.join(unknown)} has: there is no bus bandwidth for it."
    overlapped = sum(call.is_overlapped for epoch in epochs for call in epoch.calls)
    if overlapped:
        yield f"{overlapped} calls overlapped with compute, and AICB did not time them: they take no time here."
    if epochs[-1].time_ns is None:
        yield "The last epoch is not complete: it is as long as its calls."
    calls = [call for epoch in epochs for call in epoch.calls]
    unit = _unit(calls)
    if unit:
        yield f"The bandwidths in the log are {unit}. Those that commtrace prints are GB/s, from bytes and times."
    assumed = _assumed_size(calls)
    if assumed and assumed not in sizes.values():
        yield f"The bus bandwidths in the log are those of groups of {assumed} ranks, which it has not."


def _unit(calls: Sequence[_CsvCall]) -> str:
    """Return the unit of the log's algbw, from the calls in which its two decimals tell; empty if none does."""
    ratios = [
        call.algbw * call.elapsed_ns / call.num_bytes
        for call in calls
        if call.algbw >= _ENOUGH_DIGITS and call.num_bytes and call.elapsed_ns
    ]
    if not ratios:
        return ""
    ratio = median(ratios)
    for unit, expected in (("GB/s", 1.0), ("GiB/s", _GIB_PER_GB)):
        if abs(ratio / expected - 1) < 0.01:
            return unit
    return f"{ratio:.2f} times bytes over time in GB/s, by a formula that is not known"


def _assumed_size(calls: Sequence[_CsvCall]) -> int | None:
    """Return the group size behind the log's busbw; None if no call tells."""
    factors = [
        call.busbw / call.algbw / (2 if call.operation == "all_reduce" else 1)
        for call in calls
        if call.operation in ("all_reduce", "all_gather", "reduce_scatter") and call.algbw >= _ENOUGH_DIGITS
    ]
    share = median(factors) if factors else 0.0
    return round(1 / (1 - share)) if 0.4 < share < 0.999 else None


def _rows(epochs: Sequence[_Epoch], groups: Mapping[str, Group]) -> Iterator[Row]:
    begin, number = 0, 0
    seq: Counter[tuple[int, int, bool]] = Counter()
    for step, epoch in enumerate(epochs, -1):
        if step >= 0:
            yield Row(
                schema.STEP, "step", schema.COMPUTE, begin, begin + epoch.length_ns, step=step,
                timing=schema.UNKNOWN_TIMING, end_exact=False,
            )  # fmt: skip
        at = begin
        for call in epoch.calls:
            end = at + call.elapsed_ns
            if call.operation == _COMPUTATION:
                yield Row(schema.PHASE, call.stage or _COMPUTATION, schema.COMPUTE, at, end, step=step,
                          timing=schema.CUDA_EVENT_TIMING)  # fmt: skip
            else:
                yield from _communication(call, groups[call.group].id, step, number, at, end, seq)
                number += 1
            at = end
        begin += epoch.length_ns


def _communication(
    call: _CsvCall, group: int, step: int, number: int, start: int, end: int, seq: Counter[tuple[int, int, bool]]
) -> Iterator[Row]:
    is_p2p = call.operation in ("send", "recv")
    key = (group, call.peer if is_p2p else -1, call.operation == "send")
    kind = schema.P2P if is_p2p else schema.COLLECTIVE
    yield Row(
        kind, call.operation, schema.COMMUNICATION, start, end, step=step, group=group, seq=seq[key],
        bytes=call.num_bytes, peer=call.peer, is_async=call.is_overlapped, id=number,
        timing=schema.UNKNOWN_TIMING if call.is_overlapped else schema.CUDA_EVENT_TIMING,
        end_exact=not call.is_overlapped,
    )  # fmt: skip
    if end > start:
        yield Row(
            schema.STALL, call.operation, schema.COMPUTE, start, end, step=step, group=group, seq=seq[key],
            peer=call.peer, stalled_on=number, timing=schema.CUDA_EVENT_TIMING,
        )  # fmt: skip
    seq[key] += 1
