"""Write the communication of one rank as AICB logs it: 12 columns, a line per call, an ``epoch_end`` per step.

What came before the first step is the init phase, as in AICB. Bandwidths follow AICB's formula and are GiB/s there.
AICB's analyser makes two tables of a log, which are written too: its calls by type, group and size, and the times of
its iterations.
https://github.com/aliyun/aicb
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.matching.operations import communication_rows, unfinished_rows
from commtrace.analysis.matching.roles import find_roles
from commtrace.errors import ConfigurationError
from commtrace.trace import schema
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.run import RankTrace, Run

COLUMNS: Final = (
    "comm_type", "comm_group", "comm_group_size", "msg_size", "stage", "dst", "src", "additional", "_elapsed_time",
    "algbw", "busbw", "count",
)  # fmt: skip

OPERATIONS: Final[Mapping[str, str]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "barrier": "barrier",
    "send": "isend",
    "recv": "irecv",
}
"""AICB's name of an operation. Others it does not know."""

_GROUPS: Final[Mapping[str, str]] = {
    "tp": "tp_group",
    "pp": "pp_group",
    "dp": "dp_group",
    "dp-cp": "dp_group",
    "ep": "ep_group",
    "expert-dp": "ep_dp_group",
    "tp-ep": "ep_tp_group",
    "embedding": "embedding_group",
    "world": "all",
}
_PHASES: Final = {schema.FORWARD: "forward", schema.BACKWARD: "backward", schema.OPTIMIZER: "optimizer"}
_GIB: Final = 1 << 30
_NS_PER_MS: Final = 1_000_000
INIT, TRAIN = "init", "train"
_P90: Final = 0.9
_SPREAD: Final = ("mean", "std", "min", "max")


class LoggedCall(NamedTuple):
    """A communication of the rank."""

    operation: str  # AICB's name
    group: str  # AICB's name, such as dp_group
    group_size: int  # −1 if unknown
    num_bytes: int  # of the full tensor
    stage: str  # where in the step
    elapsed_ns: int
    source: int | None = None
    destination: int | None = None

    @property
    def bandwidth(self) -> tuple[float, float]:
        """Return algbw and busbw, bytes per second, by AICB's formula: an all_to_all has no factor there."""
        if self.operation == "barrier" or self.elapsed_ns <= 0:
            return 0.0, 0.0
        algbw = 1e9 * self.num_bytes / self.elapsed_ns
        size = max(self.group_size, 1)
        factor = {"all_reduce": 2 * (size - 1) / size}.get(self.operation, 1.0)
        if self.operation in ("all_gather", "reduce_scatter"):
            factor = (size - 1) / size
        return algbw, algbw * factor


@dataclass(frozen=True, slots=True)
class Log:
    """One rank's communication: what preceded the first step, and each step."""

    rank: int
    init: tuple[LoggedCall, ...]
    init_ns: int | None  # from the first call to the first step; None without a call
    steps: tuple[tuple[LoggedCall, ...], ...]
    step_ns: tuple[int, ...]
    notes: tuple[str, ...]  # what was left out, in sentences


def log_of_rank(run: Run, rank: int) -> Log:
    """Return the log of a rank, over all recorded steps.

    Raises:
        ConfigurationError: the rank was not recorded, or has no step.
    """
    trace = rank_of(run, rank)
    spans = trace.spans
    at = np.flatnonzero(spans.kind == schema.STEP)
    if not len(at):
        raise ConfigurationError(f"rank {rank} recorded no step: mark them with `with commtrace.step(i):`")
    begins, ends = spans.start[at], spans.end[at]
    left_out: Counter[str] = Counter()
    calls, starts = _calls(run, trace, left_out)
    number = np.searchsorted(ends, starts, "right")
    is_init = starts < begins[0]
    after = int(((number >= len(at)) & ~is_init).sum())
    if after:
        left_out["began after the last step"] += after
    init = tuple(call._replace(stage="init") for call, early in zip(calls, is_init, strict=True) if early)
    steps: list[list[LoggedCall]] = [[] for _ in at]
    for call, step, early in zip(calls, number.tolist(), is_init, strict=True):
        if not early and step < len(at):
            steps[step].append(call)
    notes = [f"{count} calls are left out: {reason}." for reason, count in left_out.items()]
    if not init:
        notes.append("Nothing was recorded before the first step: AICB's analyser takes that step for the init phase.")
    unknown = sorted({call.group for call in calls} - {*_GROUPS.values()})
    if unknown:
        notes.append(f"AICB has no such groups: {', '.join(unknown)}. Its analyser reads them, its replay does not.")
    return Log(
        rank,
        init,
        int(begins[0] - starts[is_init].min()) if init else None,
        tuple(map(tuple, steps)),
        tuple((ends - begins).tolist()),
        tuple(notes),
    )


def rank_of(run: Run, rank: int) -> RankTrace:
    """Return a rank of a run; raise ConfigurationError if it was not recorded."""
    if rank not in run.ranks:
        recorded = list(run.ranks)
        raise ConfigurationError(
            f"rank {rank} was not recorded; the run has {len(recorded)} ranks, {recorded[0]} to {recorded[-1]}"
        )
    return run.ranks[rank]


def _calls(run: Run, trace: RankTrace, left_out: Counter[str]) -> tuple[list[LoggedCall], np.ndarray]:
    spans = trace.spans
    roles = find_roles(run)
    of_rank = roles.ranks[trace.rank]
    unfinished = unfinished_rows(trace)
    phase = _Phases(trace)
    calls: list[LoggedCall] = []
    starts: list[int] = []
    bracket: tuple[int, int, int, int] | None = None
    for row in np.flatnonzero(communication_rows(spans)).tolist():
        name = run.names[spans.name[row]] if spans.name[row] >= 0 else ""
        num_bytes, peer = int(spans.bytes[row]), int(spans.peer[row])
        if name not in OPERATIONS:
            left_out[f"AICB has no operation {name or 'without a name'}"] += 1
            continue
        if unfinished[row]:
            left_out["their ends were not recorded"] += 1
            continue
        if peer >= OUTSIDE:
            left_out["their other side is in another world"] += 1
            continue
        if num_bytes < 0 and name != "barrier":
            left_out["their bytes are unknown"] += 1
            continue
        if spans.timing[row] == schema.REPLAY_TIMING:
            left_out["they were replayed from CUDA graphs, in which their times are not known"] += 1
            continue
        key = (int(spans.group[row]), int(spans.seq[row]), int(spans.name[row]), int(spans.start[row]))
        if spans.kind[row] == schema.COLLECTIVE and spans.op_in_seq[row] > 0 and key == bracket:
            calls[-1] = calls[-1]._replace(num_bytes=calls[-1].num_bytes + num_bytes)
            continue
        bracket = key
        start = int(spans.start[row])
        calls.append(
            LoggedCall(
                OPERATIONS[name],
                aicb_group(roles.words[of_rank.role[row]]),
                int(of_rank.group_size[row]),
                max(num_bytes, 0),
                phase.at(start),
                int(spans.end[row]) - start,
                source=peer if name in ("recv", "broadcast") and peer >= 0 else None,
                destination=peer if name in ("send", "reduce") and peer >= 0 else None,
            )
        )
        starts.append(start)
    return calls, np.array(starts, np.int64)


def aicb_group(role: str) -> str:
    """Return AICB's name for groups of a role."""
    return _GROUPS.get(role, f"{role.replace('-', '_')}_group")


class _Phases:
    """The phases of a rank, to look an instant up."""

    def __init__(self, trace: RankTrace) -> None:
        spans = trace.spans
        rows = np.flatnonzero(np.isin(spans.kind, list(_PHASES)))
        self._start, self._end, self._kind = spans.start[rows], spans.end[rows], spans.kind[rows]

    def at(self, instant: int) -> str:
        row = int(np.searchsorted(self._start, instant, "right")) - 1
        if row < 0 or instant > self._end[row]:
            return "step"
        return _PHASES[int(self._kind[row])]


def write_log(log: Log, path: Path) -> int:
    """Write AICB's CSV and return its number of lines without the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        count = 0
        for line in _lines(log):
            writer.writerow(line)
            count += 1
    return count


def _lines(log: Log) -> Iterator[Sequence[object]]:
    for call in log.init:
        yield _line(call)
    if log.init_ns is not None:
        yield _epoch_end(log.init_ns)
    for calls, step_ns in zip(log.steps, log.step_ns, strict=True):
        for call in calls:
            yield _line(call)
        yield _epoch_end(step_ns)


def _line(call: LoggedCall) -> Sequence[object]:
    algbw, busbw = call.bandwidth
    return (
        f"CommType.{call.operation}",
        f"CommGroup.{call.group}",
        call.group_size if call.group_size > 0 else "None",
        call.num_bytes,
        call.stage,
        str(call.destination),
        str(call.source),
        "",
        call.elapsed_ns / _NS_PER_MS,
        round(algbw / _GIB, 2),
        round(busbw / _GIB, 2),
        1,
    )


def _epoch_end(time_ns: int) -> Sequence[object]:
    return ("CommType.epoch_end", "None", "None", 0, "", "None", "None", "", time_ns / _NS_PER_MS, 0.0, 0.0, 1)


class TimeSpread(NamedTuple):
    """Mean, standard deviation of the whole population, least and most."""

    mean: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> TimeSpread:
        numbers = np.array(values, np.float64)
        return cls(float(numbers.mean()), float(numbers.std()), float(numbers.min()), float(numbers.max()))


class CallsOfSize(NamedTuple):
    """The calls of one phase with the same operation, group and size."""

    phase: str  # init or train
    operation: str
    group: str
    group_size: int
    num_bytes: int  # of one call
    calls: int
    elapsed_ms: TimeSpread
    busbw_gibps: TimeSpread  # GiB/s, by AICB's formula


def calls_by_size(log: Log) -> list[CallsOfSize]:
    """Return the calls of a log by phase, operation, group and size, ascending."""
    trained = [call for step in log.steps for call in step]
    return [*_grouped(INIT, log.init), *_grouped(TRAIN, trained)]


def _grouped(phase: str, calls: Iterable[LoggedCall]) -> Iterator[CallsOfSize]:
    calls_by_key: dict[tuple[str, str, int, int], list[LoggedCall]] = {}
    for call in calls:
        calls_by_key.setdefault((call.operation, call.group, call.num_bytes, call.group_size), []).append(call)
    for (operation, group, num_bytes, group_size), alike in sorted(calls_by_key.items()):
        elapsed = TimeSpread.of([call.elapsed_ns / _NS_PER_MS for call in alike])
        busbw = TimeSpread.of([call.bandwidth[1] / _GIB for call in alike])
        yield CallsOfSize(phase, operation, group, group_size, num_bytes, len(alike), elapsed, busbw)


class IterationTimes(NamedTuple):
    """The times of a log's steps, ms. AICB calls the first step the init time."""

    init: float
    most: float
    least: float
    mean: float
    p90: float
    std: float

    @classmethod
    def of(cls, log: Log) -> IterationTimes:
        """Return the times of all steps, the first included, as AICB's analyser computes them."""
        times = [time / _NS_PER_MS for time in log.step_ns]
        spread = TimeSpread.of(times)
        p90 = sorted(times)[int(len(times) * _P90)]
        return cls(times[0], spread.most, spread.least, spread.mean, p90, spread.std)


def write_calls(rows: Iterable[CallsOfSize], path: Path) -> None:
    """Write the first table as CSV, with units in the names of its columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        head = ("phase", "comm_type", "comm_group", "comm_group_size", "msg_bytes", "count")
        times, bandwidths = ([f"{name}_{which}" for which in _SPREAD] for name in ("elapsed_ms", "busbw_GiBps"))
        writer.writerow([*head, *times, *bandwidths])
        for row in rows:
            key = (row.phase, row.operation, row.group, row.group_size, row.num_bytes, row.calls)
            writer.writerow([*key, *map(_rounded, row.elapsed_ms), *map(_rounded, row.busbw_gibps)])


def write_iterations(times: IterationTimes, path: Path) -> None:
    """Write the second table as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["init_ms", "max_ms", "min_ms", "mean_ms", "p90_ms", "std_ms"])
        writer.writerow(map(_rounded, times))


def _rounded(number: float) -> float:
    return round(number, 6)
