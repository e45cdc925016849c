"""A predicted run as rows of each rank, which every reading command opens as it opens a recorded one.

Rows of the steps are moved to the instants of the replay. Of a rebuilt step there are forwards and backwards, the
messages between stages and what follows the last backward; communication inside a forward or backward is in its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.matching.operations import communication_rows
from commtrace.analysis.matching.roles import PIPELINE, is_p2p
from commtrace.analysis.prediction.parts import PipelineParts
from commtrace.analysis.prediction.pipeline_graph import places_in_a_loop
from commtrace.analysis.prediction.predict import Outcome
from commtrace.analysis.prediction.rebuilt_steps import RebuiltSteps
from commtrace.analysis.prediction.recorded_steps import LaneTimes, lane_times
from commtrace.trace import schema
from commtrace.trace.metadata import Group
from commtrace.trace.run import RankTrace
from commtrace.trace.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, Action
from commtrace.trace.schema import Row
from commtrace.trace.spans import Int64

MOST_STEPS: Final = 10
"""Steps that are written."""

_NAMES: Final = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward_input",
    WEIGHTS: "backward_weight",
}


class PredictedRank(NamedTuple):
    """What one rank would have recorded."""

    trace: RankTrace  # of the run that the prediction was made from
    marks: tuple[Row, ...]
    rows: tuple[Row, ...]  # ascending by step and start


class _Message(NamedTuple):
    """A message of a rebuilt step, ns."""

    sender: int  # index
    receiver: int
    sent: int
    posted: int
    received: int
    action: Action  # of the sender
    receiving: Action


def predicted_ranks(outcome: Outcome) -> Iterator[PredictedRank]:
    """Yield the rows of every rank; consecutive steps follow one another, each from a common start of all ranks."""
    recorded = outcome.recorded
    steps = range(min(len(recorded.steps), MOST_STEPS))
    times = outcome.times if outcome.rebuilt is None else outcome.rebuilt.times
    step_ns = recorded.step_ns(times)
    begin = int(recorded.lanes.step_start.min())
    between_ns = recorded.program.between_step_times()
    origins = [begin + int(step_ns[:step].sum() + between_ns[step] - between_ns[0]) for step in steps]
    messages = {step: tuple(_messages(outcome, outcome.rebuilt, step)) for step in steps} if outcome.rebuilt else {}
    for index, rank in enumerate(recorded.ranks.tolist()):
        rows: list[Row] = []
        counts: dict[tuple[int, int, int], int] = {}
        for step in steps:
            lane = lane_times(recorded, outcome.durations.piece_ns, times, index, step)
            new_rows = _moved(outcome, lane, times, index, step)
            if outcome.rebuilt is not None:
                new_rows += _actions(outcome, outcome.rebuilt, index, step)
                new_rows += _messages_of(outcome, messages[step], index, step, counts)
            new_rows.sort(key=lambda row: (row.start, -row.end))
            rows += [row._replace(start=row.start + origins[step], end=row.end + origins[step]) for row in new_rows]
        yield PredictedRank(recorded.run.ranks[rank], tuple(_marks(outcome, recorded.run.ranks[rank])), tuple(rows))


def _moved(outcome: Outcome, lane: LaneTimes, times: Int64, index: int, step: int) -> list[Row]:
    """Return the rows of a rank in a step; of a rebuilt one, those after the last action, and the step."""
    recorded = outcome.recorded
    rank, number = int(recorded.ranks[index]), int(recorded.steps[step])
    spans, names = recorded.run.ranks[rank].spans, recorded.run.names
    rows = np.flatnonzero(spans.step == number)
    start, end = (values[rows] - recorded.lanes.step_start[index, step] for values in (spans.start, spans.end))
    if outcome.rebuilt is not None and outcome.parts is not None:
        after = start >= outcome.parts.lanes[index][step].end[-1]
        is_pipeline = recorded.roles.ranks[rank].role[rows] == recorded.roles.code(PIPELINE)
        after &= ~(is_p2p(recorded.run, spans)[rows] & is_pipeline)  # placed anew
        rows, start, end = rows[after], start[after], end[after]
    new_start = lane.at(start)
    new_end = np.maximum(lane.at(end, before=True), new_start)
    is_wait = spans.kind[rows] == schema.STALL
    new_start = np.where(is_wait, lane.at(start, before=True), new_start)
    _end_communications(outcome, times, index, step, rows, new_start, new_end)
    moved = []
    for row, first, last in zip(rows.tolist(), new_start.tolist(), new_end.tolist(), strict=True):
        if spans.kind[row] in (schema.STEP, schema.BETWEEN):
            continue
        values = {name: getattr(spans, name)[row].item() for name in schema.SCHEMA.names if name != "detail"}
        values |= {"start": first, "end": last, "name": names[values["name"]] if values["name"] >= 0 else ""}
        values["dtype"] = names[values["dtype"]] if values["dtype"] >= 0 else None
        moved.append(Row(**values))
    whole = int(times[recorded.lanes.last_node[index, step]])
    between = -int(recorded.program.between_step_times()[step])
    if between:
        moved.append(Row(schema.BETWEEN, "between steps", schema.COMPUTE, between, 0, number))
    return [*moved, Row(schema.STEP, "step", schema.COMPUTE, between, whole, number)]


def _end_communications(
    outcome: Outcome, times: Int64, index: int, step: int, rows: Int64, start: Int64, end: Int64
) -> None:
    """Let each communication end its transfer after the last participant started."""
    recorded = outcome.recorded
    transfers, joins = recorded.joins.transfers, recorded.joins
    transfer = np.flatnonzero((transfers.rank == recorded.ranks[index]) & (transfers.step == step))
    at = np.searchsorted(rows, transfers.row[transfer])
    known = (at < len(rows)) & (rows[np.minimum(at, len(rows) - 1)] == transfers.row[transfer]) if len(rows) else None
    if known is None or not known.any():
        return
    transfer, at = transfer[known], at[known]
    arrived = times[len(recorded.lanes.node_piece) + joins.waits_for[transfer]]
    arrived = np.where(transfers.eager[transfer], start[at], np.maximum(arrived, start[at]))
    end[at] = arrived + outcome.durations.transfer_ns[transfer]


def _actions(outcome: Outcome, rebuilt: RebuiltSteps, index: int, step: int) -> list[Row]:
    number, stage = int(outcome.recorded.steps[step]), _stage(outcome, index)
    work, rows = outcome.work[index][step], []
    for action, begin, busy in zip(
        work.actions, rebuilt.begin[index][step].tolist(), work.busy_ns.tolist(), strict=True
    ):
        kind = schema.FORWARD if action.letter == FORWARD else schema.BACKWARD
        rows.append(
            Row(
                kind,
                _NAMES[action.letter],
                schema.COMPUTE,
                begin,
                begin + busy,
                number,
                action.microbatch,
                action.chunk,
                stage,
            )
        )
    return rows


def _stage(outcome: Outcome, index: int) -> int:
    assert outcome.parts is not None
    return next(pipeline.index(index) for pipeline in outcome.parts.pipelines if index in pipeline)


def _messages(outcome: Outcome, rebuilt: RebuiltSteps, step: int) -> Iterator[_Message]:
    """Yield the messages between the stages of every pipeline, in the order of each sender."""
    parts: PipelineParts | None = outcome.parts
    assert parts is not None
    chunks = outcome.prediction.chunks
    places = parts.places if chunks == parts.chunks else places_in_a_loop(parts.stages, chunks or 1)
    for pipeline in parts.pipelines:
        receivers = {}
        for stage, index in enumerate(pipeline):
            for at, action in enumerate(outcome.work[index][step].actions):
                if action.letter != WEIGHTS:
                    receivers[_way(action), places[stage, action.chunk], action.microbatch] = index, at, action
        for stage, index in enumerate(pipeline):
            work = outcome.work[index][step]
            for at, action in enumerate(work.actions):
                way = _way(action)
                key = way, places[stage, action.chunk] + (1 if way == FORWARD else -1), action.microbatch
                if action.letter == WEIGHTS or key not in receivers or receivers[key][0] == index:
                    continue
                receiver, position, receiving = receivers[key]
                sent = int(rebuilt.begin[index][step][at] + work.busy_ns[at] + parts.send_delay_ns[index])
                posted = int(rebuilt.ready[receiver][step][position])
                received = int(rebuilt.begin[receiver][step][position])
                yield _Message(index, receiver, sent, posted, max(received, sent), action, receiving)


def _way(action: Action) -> str:
    return FORWARD if action.letter == FORWARD else BACKWARD


def _messages_of(
    outcome: Outcome,
    messages: tuple[_Message, ...],
    index: int,
    step: int,
    counts: dict[tuple[int, int, int], int],
) -> list[Row]:
    """Return the sends and receives of a rank in a step, and its waits for them."""
    recorded = outcome.recorded
    number, trace = int(recorded.steps[step]), recorded.run.ranks[int(recorded.ranks[index])]
    stage, group = _stage(outcome, index), _pipeline_group(trace)
    if group is None:
        return []
    num_bytes = _bytes_of_messages(outcome, trace)
    rows: list[Row] = []
    for message in messages:
        if index not in (message.sender, message.receiver):
            continue
        pair = (message.sender, message.receiver, 0)
        seq = counts[pair] = counts.get(pair, -1) + 1
        is_sender = index == message.sender
        action = message.action if is_sender else message.receiving
        begin = message.sent if is_sender else message.posted
        peer = int(recorded.ranks[message.receiver if is_sender else message.sender])
        identity = _FIRST_ID + number * _IDS_PER_STEP + len(rows)
        row = Row(
            schema.P2P,
            "send" if is_sender else "recv",
            schema.COMMUNICATION,
            begin,
            max(message.received, begin),
            number,
            action.microbatch,
            action.chunk,
            stage,
            group.id,
            seq,
            bytes=num_bytes,
            peer=peer,
            is_async=True,
            id=identity,
        )
        rows.append(row)
        if not is_sender and row.end > row.start:
            rows.append(
                row._replace(
                    kind=schema.STALL,
                    lane=schema.COMPUTE,
                    id=schema.NOT_APPLICABLE,
                    stalled_on=identity,
                    is_async=False,
                )
            )
    return rows


_FIRST_ID: Final = 1 << 40
"""Beyond the ids of the recorded communications that stay."""

_IDS_PER_STEP: Final = 1 << 20


def _pipeline_group(trace: RankTrace) -> Group | None:
    pipelines = (group for group in trace.groups.values() if group.role == PIPELINE and trace.rank in group.ranks)
    return next(pipelines, None)


def _bytes_of_messages(outcome: Outcome, trace: RankTrace) -> int:
    spans = trace.spans
    rows = np.flatnonzero(communication_rows(spans) & (spans.kind == schema.P2P))
    return int(np.median(spans.bytes[rows])) if len(rows) else schema.NOT_APPLICABLE


def _marks(outcome: Outcome, trace: RankTrace) -> Iterator[Row]:
    for group in trace.groups.values():
        yield _mark("process_group", group.to_json())
    facts: dict[str, object] = dict(trace.topology)
    facts.pop("process_start_ns", None)  # nothing lies before the first predicted step
    prediction = outcome.prediction
    if prediction.chunks is not None:
        facts |= {"chunks": prediction.chunks, "microbatches": prediction.microbatches}
        for name in ("schedule", "stage_indices"):
            facts.pop(name, None)
    yield _mark("topology", {**facts, "coordinates": dict(trace.coordinates), "parallel": dict(trace.parallel)})


def _mark(name: str, detail: Mapping[str, object]) -> Row:
    return Row(schema.MARK, name, schema.HOST, 0, 0, detail=json.dumps(detail))
