"""Turn a run into Arrow tables: times are whole ns, and null is unknown or not applicable.

Each field's metadata describes its column; docs/python.md lists them.

>>> tables.steps(aligned, choice, partition).column("bubble_ns")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.breakdown.run_steps import REPEATED
from commtrace.analysis.breakdown.states import (
    BETWEEN_STEPS,
    BUBBLE,
    CHECKPOINT,
    COMPUTE,
    DATA,
    GC,
    IDLE,
    MEMORY,
    OTHER,
    REPLAY,
    TRANSFER,
    WAIT,
)
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.matching.roles import Roles
from commtrace.analysis.pipeline.bubble import StageBubble
from commtrace.analysis.steps.attempts import is_earlier, number_of
from commtrace.analysis.steps.choice import StepChoice
from commtrace.findings.finding import Finding
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

_WORD: Final = pa.dictionary(pa.int32(), pa.string())
_RANKS: Final = pa.list_(pa.int32())

_STATE_COLUMNS: Final[Mapping[str, str]] = {
    COMPUTE: "compute_ns",
    WAIT: "exposed_wait_ns",
    TRANSFER: "exposed_transfer_ns",
    BUBBLE: "bubble_ns",
    DATA: "data_ns",
    CHECKPOINT: "checkpoint_ns",
    GC: "gc_ns",
    MEMORY: "exposed_memory_ns",
    IDLE: "idle_ns",
    REPLAY: "replay_ns",
    BETWEEN_STEPS: "between_ns",
    OTHER: "other_ns",
}
"""The column of a state; those of a row add up to its ``wall_ns``."""


def _column(name: str, kind: pa.DataType, meaning: str) -> pa.Field:
    return pa.field(name, kind, metadata={"meaning": meaning})


_STATES: Final = (
    _column("compute_ns", pa.int64(), "compute: forward, backward, recompute, optimizer, evaluation, other"),
    _column("exposed_wait_ns", pa.int64(), "stalled on communication whose last member had not arrived"),
    _column("exposed_transfer_ns", pa.int64(), "stalled on communication after its last member had arrived"),
    _column("bubble_ns", pa.int64(), "stalled on another pipeline stage that had not sent yet"),
    _column("data_ns", pa.int64(), "waiting for input"),
    _column("checkpoint_ns", pa.int64(), "saving or loading a checkpoint"),
    _column("gc_ns", pa.int64(), "collecting garbage"),
    _column("exposed_memory_ns", pa.int64(), "copies during which nothing else ran; only in imported kernel traces"),
    _column("idle_ns", pa.int64(), "device idle; only in imported kernel traces"),
    _column("replay_ns", pa.int64(), "replays of CUDA graphs that communicate: how they divide is not known"),
    _column("between_ns", pa.int64(), "between the step before and the step's own work, for no known purpose"),
    _column("other_ns", pa.int64(), "in no recorded span"),
)
_HIDDEN: Final = _column(
    "hidden_ns", pa.int64(), "communication in flight while the lane did not stall; not part of the sum"
)

_LAUNCH_BOUND: Final = _column(
    "launch_bound_ns",
    pa.int64(),
    "the device waited for its host ([how](definitions.md#launch-bound-time)); not known without a device",
)

SPANS: Final = pa.schema(
    [
        _column("rank", pa.int32(), "global rank"),
        _column("kind", _WORD, "kind of the span ([list](recorded-spans.md#columns))"),
        _column("name", _WORD, "operation of a communication or of a stall on it, else a free name"),
        _column("lane", _WORD, "`host`, `compute`, `communication`"),
        _column("start_ns", pa.int64(), "ns on the reference clock"),
        _column("end_ns", pa.int64(), "ns on the reference clock"),
        _column("step", pa.int32(), "training step in which it began"),
        _column("microbatch", pa.int32(), "of the step, from 0"),
        _column("chunk", pa.int32(), "virtual pipeline chunk on the rank"),
        _column("stage", pa.int32(), "pipeline stage"),
        _column("role", _WORD, "of a communication or a stall: `tp`, `pp`, `dp`, …"),
        _column("group", pa.int64(), "process group, the same number on all of its members in a world"),
        _column("seq", pa.int64(), "number of the communication in its group, or between its two ranks"),
        _column("op_in_seq", pa.int32(), "position among the operations that share the number"),
        _column("bytes", pa.int64(), "of the full tensor"),
        _column("self_bytes", pa.int64(), "in an uneven all_to_all, the bytes that the rank sends to itself"),
        _column("dtype", _WORD, "of the tensor"),
        _column(
            "peer",
            pa.int32(),
            "rank of the other side of a message, or of the root; from 2²⁰ on of another world",
        ),
        _column("is_async", pa.bool_(), "whether the call returned a handle to wait for"),
        _column("id", pa.int64(), "of a communication, unique on its rank"),
        _column("stalled_on", pa.int64(), "of a stall: the `id` of the communication that it waited for"),
        _column("timing", _WORD, "source of start and end"),
        _column("start_exact", pa.bool_(), "false: a lower bound, the span started then or later"),
        _column("end_exact", pa.bool_(), "false: an upper bound, the span ended then or earlier"),
        _column("start_lead_us", pa.int16(), "how far the host was ahead of the device at the start, µs"),
        _column("end_lead_us", pa.int16(), "the same at the end ([leads](recorded-spans.md#leads))"),
    ]
)

STEPS: Final = pa.schema(
    [
        _column("rank", pa.int32(), "global rank"),
        _column("step", pa.int32(), "training step; null: the whole recording, if there are no steps"),
        _column("start_ns", pa.int64(), "ns on the reference clock"),
        _column("end_ns", pa.int64(), "ns on the reference clock"),
        _column("wall_ns", pa.int64(), "end − start"),
        _column("used", pa.bool_(), "whether the step counts in means; if not, the following columns are null"),
        _column("left_out", pa.string(), "reason why it does not count, such as `warm-up`"),
        *_STATES,
        _HIDDEN,
        _LAUNCH_BOUND,
    ]
)

PARTITION: Final = pa.schema(
    [
        _column("rank", pa.int32(), "global rank"),
        _column("step", pa.int32(), "training step; null: the whole recording, if there are no steps"),
        _column("state", _WORD, f"{', '.join(f'`{state}`' for state in _STATE_COLUMNS)}"),
        _column("detail", _WORD, "phase of `compute`, role of exposed communication"),
        _column("time_ns", pa.int64(), "time in that state; the rows of a rank and step add up to its wall time"),
    ]
)

RANKS: Final = pa.schema(
    [
        _column("rank", pa.int32(), "global rank"),
        _column("local_rank", pa.int32(), "on its node"),
        _column("host", pa.string(), "name of its node"),
        _column("device", pa.string(), "name of its device"),
        _column("closed", pa.bool_(), "whether its recording ended cleanly: false if it was killed or still runs"),
        _column("dropped_spans", pa.int64(), "spans that the recorder dropped"),
        _column("steps", pa.int32(), "steps that count; the following columns are means over them"),
        _column("wall_ns", pa.int64(), "of a step"),
        *_STATES,
        _HIDDEN,
        _LAUNCH_BOUND,
        _column("wait_ns", pa.int64(), "in flight before the last member had arrived, hidden or not"),
        _column("blame_ns", pa.int64(), "time that other ranks waited for this one, summed"),
        _column("unmatched_ns", pa.int64(), "stalled on communication with members that were not recorded"),
    ]
)

COMMUNICATION: Final = pa.schema(
    [
        _column("role", pa.string(), "role of its groups: `tp`, `pp`, `dp`, …"),
        _column("operation", pa.string(), "`all_reduce`, `send`, …"),
        _column("group_size", pa.int32(), "members of the group"),
        _column("inter_node", pa.bool_(), "whether its ranks are on several nodes"),
        _column("bytes_from", pa.int64(), "by size: bytes of one call, inclusive"),
        _column("bytes_to", pa.int64(), "by size: bytes of one call, exclusive"),
        _column("ranks", _RANKS, "by group: its members"),
        _column("count", pa.int64(), "calls, counted on every rank that made them"),
        _column("bytes", pa.int64(), "bytes of the calls whose bytes are known, full tensors"),
        _column("unsized", pa.int64(), "calls with unknown bytes"),
        _column("duration_p50_ns", pa.int64(), "median of the durations"),
        _column("duration_p99_ns", pa.int64(), "99th percentile"),
        _column("duration_max_ns", pa.int64(), "longest"),
        _column("duration_sum_ns", pa.int64(), "sum"),
        _column("durations_are_bounds", pa.bool_(), "most bytes are in calls with bounds: these are upper bounds"),
        _column("algbw_gbps", pa.float64(), "algorithm bandwidth, 10⁹ bytes/s"),
        _column("busbw_gbps", pa.float64(), "bus bandwidth, 10⁹ bytes/s"),
        _column("bandwidth_time", pa.string(), "the time that both rates use: `transfer` or `duration`"),
        _column("bandwidth_is_bound", pa.bool_(), "likewise for the rates: both are lower bounds"),
        _column("needed_busbw_gbps", pa.float64(), "bus bandwidth below which the bytes cannot be hidden, 10⁹ bytes/s"),
        _column("exposed_ns", pa.int64(), "time that lanes stalled on these calls, summed over ranks"),
        _column("hidden_ns", pa.int64(), "time in flight during which no lane stalled"),
        _column("wait_ns", pa.int64(), "time in flight before the last member had arrived"),
        _column("unfinished", pa.int64(), "calls whose end was not recorded"),
        _column("unmatched", pa.int64(), "calls that were not matched on all members"),
        _column("mismatched", pa.int64(), "calls whose members disagree on operation, bytes or dtype"),
        _column("replayed", pa.int64(), "calls in replays of CUDA graphs: counted and sized, without times"),
        _column("upper_bounds", pa.int64(), "calls whose start or end is a bound: their durations are upper bounds"),
    ]
)

FINDINGS: Final = pa.schema(
    [
        _column("id", pa.string(), "of kind, place, cause and lowest rank: the same in every command and run"),
        _column("kind", pa.string(), "`slow`, `lost`, `not_judged`, …"),
        _column("place", pa.string(), "where: `ranks`, `host`, `tensor_group`, `stage`, `link`, `network` or `job`"),
        _column("cause", pa.string(), "why: `compute`, `backward`, `data`, `gc`, …"),
        _column("who", pa.string(), "the place in words"),
        _column("rank", pa.int32(), "the slow rank, the slowest of several; null if the cause moves between ranks"),
        _column("host", pa.string(), "its node"),
        _column("ranks", _RANKS, "all slow ranks, slowest first"),
        _column("hosts", pa.list_(pa.string()), "their nodes, each once"),
        _column("since_step", pa.int64(), "the first step in which it costs at least half; −1 if not known"),
        _column("since_ns", pa.int64(), "begin of that step, epoch; null if not known"),
        _column("cost_ns", pa.float64(), "time that a step would save without it; null if not known"),
        _column("share", pa.float64(), "the same, of the mean step"),
        _column("part_ns", pa.float64(), "per step: the parts add up to the time beyond the ideal; null if not known"),
        _column("gpu_hours_per_day", pa.float64(), "the cost for all devices of the job"),
        _column("persistence", pa.float64(), "share of the steps in which it costs at least half of that"),
        _column("occurrence", pa.string(), "for what strikes in few steps: the steps and the duration; else null"),
        _column("evidence", pa.string(), "the numbers behind it, or why it could not be judged"),
        _column("advice", pa.string(), "what to do"),
    ]
)

STAGES: Final = pa.schema(
    [
        _column("stage", pa.int32(), "pipeline stage; all times are means over its ranks and the steps"),
        _column("ranks", _RANKS, "ranks of the stage"),
        _column("forward_ns", pa.int64(), "one forward, without stalls on other stages"),
        _column("backward_ns", pa.int64(), "one backward, without stalls on other stages"),
        _column("work_ns", pa.int64(), "all forwards and backwards of a step"),
        _column("wall_ns", pa.int64(), "the step"),
        _column("phase_ns", pa.int64(), "from the first forward of any stage to the last backward of any stage"),
        _column("bubble_ns", pa.int64(), "waiting for other stages"),
        _column("warm_up_ns", pa.int64(), "part of the bubble: before the first backward"),
        _column("steady_ns", pa.int64(), "part of the bubble: from the first backward to the end of the last forward"),
        _column("cool_down_ns", pa.int64(), "part of the bubble: after the last forward"),
        _column("schedule_ns", pa.int64(), "cause of the bubble: the schedule itself"),
        _column("imbalance_ns", pa.int64(), "cause of the bubble: stages differ"),
        _column("variation_ns", pa.int64(), "cause of the bubble: microbatches and ranks differ"),
        _column("p2p_ns", pa.int64(), "cause of the bubble: transfers"),
        _column("transfer_ns", pa.int64(), "stalled on messages after both sides had arrived"),
        _column("drain_ns", pa.int64(), "from its own last backward to the last backward of the pipeline"),
        _column("unmatched_ns", pa.int64(), "stalled on messages whose other side was not recorded"),
        _column("left_out", _RANKS, "ranks of the stage with too much unmatched communication"),
    ]
)


def spans(run: Run, roles: Roles) -> pa.Table:
    """Return every span of a run on one clock, by rank and then by start."""
    of_ranks = {rank: trace.spans for rank, trace in run.ranks.items()}
    every = Spans.concatenate(list(of_ranks.values()))
    role = _concatenated([roles.ranks[rank].role for rank in of_ranks])
    columns = {
        "rank": _repeated(of_ranks),
        "start_ns": every.start,
        "end_ns": every.end,
        "kind": _words(every.kind, schema.KINDS),
        "lane": _words(every.lane, schema.LANES),
        "timing": _words(every.timing, schema.TIMINGS),
        "name": _words(every.name, run.names),
        "dtype": _words(every.dtype, run.names),
        "role": _words(role, roles.words),
        "is_async": every.is_async,
        "start_exact": every.start_exact,
        "end_exact": every.end_exact,
        "start_lead_us": _where_known(every.start_lead_us),
        "end_lead_us": _where_known(every.end_lead_us),
    }
    for name in SPANS.names:
        if name not in columns:
            columns[name] = _where_it_applies(getattr(every, name))
    return pa.table([columns[name] for name in SPANS.names], schema=SPANS)


def steps(recorded: Run, choice: StepChoice, partition: Partition) -> pa.Table:
    """Return one row per rank and step that was recorded, by rank and then by start.

    Args:
        recorded: all that was loaded, on one clock; earlier attempts of a step have numbers of their own.
        choice: the steps that count.
        partition: of those.
    """
    rows = {rank: trace.spans.take(_is_left_out(trace.spans, choice)) for rank, trace in recorded.ranks.items()}
    uncounted = Spans.concatenate(list(rows.values()))
    unknown = pa.nulls(len(uncounted), pa.int64())
    again = is_earlier(uncounted.step)
    counted = len(partition.rank)
    left_out = [
        REPEATED if repeated else choice.left_out.get(step)
        for step, repeated in zip(uncounted.step.tolist(), again.tolist(), strict=True)
    ]
    columns = {
        "rank": (partition.rank, _repeated(rows)),
        "step": (_where_it_applies(partition.step), number_of(uncounted.step)),
        "start_ns": (partition.start, uncounted.start),
        "end_ns": (partition.end, uncounted.end),
        "wall_ns": (partition.wall_ns, uncounted.end - uncounted.start),
        "used": (np.ones(counted, np.bool_), np.zeros(len(uncounted), np.bool_)),
        "left_out": (pa.nulls(counted, pa.string()), left_out),
        "hidden_ns": (partition.hidden_ns, unknown),
        "launch_bound_ns": (_where_it_applies(partition.launch_bound_of_steps), unknown),
        **{column: (partition.total(state), unknown) for state, column in _STATE_COLUMNS.items()},
    }
    both = (pa.table([columns[name][part] for name in STEPS.names], schema=STEPS) for part in (0, 1))
    return pa.concat_tables(both).sort_by([("rank", "ascending"), ("start_ns", "ascending")])


def partition(divided: Partition) -> pa.Table:
    """Return one row per rank, step and state, without states of 0 ns."""
    row, state = np.nonzero(divided.ns)
    return pa.table(
        [
            divided.rank[row],
            _where_it_applies(divided.step[row]),
            _chosen([of_state.kind for of_state in divided.states], state),
            _chosen([of_state.detail for of_state in divided.states], state),
            divided.ns[row, state],
        ],
        schema=PARTITION,
    )


def ranks(recorded: Run, partition: Partition, means: Sequence[RankMean]) -> pa.Table:
    """Return one row per recorded rank, with the mean of its steps that count.

    A column for each parallel dimension (``tp``, ``pp``, …) follows those of :data:`RANKS`.
    """
    mean_of = {mean.rank: mean for mean in means}
    num_steps = dict(zip(*(column.tolist() for column in np.unique(partition.rank, return_counts=True)), strict=True))
    dimensions = dict.fromkeys(
        name for trace in recorded.ranks.values() for name in trace.coordinates if name not in RANKS.names
    )
    rows = [
        {
            "rank": rank,
            "local_rank": trace.metadata.local_rank,
            "host": trace.metadata.node,
            "device": trace.metadata.device,
            "closed": trace.closed,
            "dropped_spans": sum(trace.dropped.values()),
            "steps": num_steps.get(rank, 0),
            **(_mean_columns(mean_of[rank]) if rank in mean_of else {}),
            **{name: trace.coordinates.get(name) for name in dimensions},
        }
        for rank, trace in recorded.ranks.items()
    ]
    columns = [_column(name, pa.int32(), "position in this parallel dimension") for name in dimensions]
    return _of_rows(rows, pa.schema([*RANKS, *columns]))


def _mean_columns(mean: RankMean) -> dict[str, int | None]:
    states = {column: mean.total(state) for state, column in _STATE_COLUMNS.items()}
    names = ("wall_ns", "hidden_ns", "wait_ns", "blame_ns", "unmatched_ns")
    waited = None if mean.launch_bound_ns is None else sum(mean.launch_bound_ns.values())
    return {**states, **{name: getattr(mean, name) for name in names}, "launch_bound_ns": waited}


def communication(rows: Sequence[Communication]) -> pa.Table:
    return _of_rows(
        (
            {
                **{name: getattr(row, name) for name in COMMUNICATION.names if hasattr(row, name)},
                "bytes": row.num_bytes,
                "bytes_from": row.size[0] if row.size else None,
                "bytes_to": row.size[1] if row.size else None,
            }
            for row in rows
        ),
        COMMUNICATION,
    )


def findings(listed: Sequence[Finding]) -> pa.Table:
    """Return the findings in their order."""
    return _of_rows(
        (
            {
                **{name: getattr(finding, name) for name in FINDINGS.names},
                "rank": finding.rank if finding.ranks else None,
                "occurrence": finding.occurrence.describe() if finding.occurrence else None,
            }
            for finding in listed
        ),
        FINDINGS,
    )


def stages(bubbles: Sequence[StageBubble]) -> pa.Table:
    return _of_rows((asdict(stage) for stage in bubbles), STAGES)


def _of_rows(rows: Iterable[Mapping[str, object]], columns: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in columns.names} for row in rows], schema=columns)


def _repeated(of_ranks: Mapping[int, Spans]) -> Int32:
    return np.repeat(np.array(list(of_ranks), np.int32), [len(spans) for spans in of_ranks.values()])


def _concatenated(columns: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[Any]:
    return np.concatenate(columns) if columns else np.empty(0, np.int32)


def _is_left_out(of_rank: Spans, choice: StepChoice) -> Bool:
    return np.asarray((of_rank.kind == schema.STEP) & ~np.isin(of_rank.step, choice.used))


def _where_it_applies(column: npt.NDArray[np.generic]) -> pa.Array:
    return pa.array(column, mask=column == schema.NOT_APPLICABLE)


def _where_known(leads: npt.NDArray[np.int16]) -> pa.Array:
    return pa.array(leads, mask=leads < schema.LEAST_LEAD_US)


def _words(codes: npt.NDArray[np.integer], words: Sequence[str]) -> pa.Array:
    """Return codes as strings; negative codes are null."""
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32), mask=codes < 0), pa.array(words, pa.string())
    )


def _chosen(words: Sequence[str], which: Int64) -> pa.Array:
    """Return the string at each position, null if it is empty."""
    distinct = list(dict.fromkeys(filter(None, words)))
    codes = np.array([distinct.index(word) if word else -1 for word in words])
    return _words(codes[which], distinct)
