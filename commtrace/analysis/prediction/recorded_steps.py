"""The recorded steps of a run as a dependency graph, with everything that a prediction changes in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.roles import PIPELINE, Roles, between_stages
from commtrace.analysis.replay.edges import Joins, work_between, worked_before
from commtrace.analysis.replay.lanes import Lanes
from commtrace.analysis.replay.observed_steps import ModelTransfers, ModelWork, ObservedIndex, Places
from commtrace.analysis.replay.program import Program, join_lanes
from commtrace.analysis.replay.scenarios import Scenario, durations
from commtrace.analysis.replay.step_statistics import TransferTable, WorkTable, pause_ns
from commtrace.findings.causes import PAUSES
from commtrace.trace.blocks import pick
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Steps that every rank recorded, ready to be replayed with other durations."""

    run: Run
    roles: Roles
    program: Program
    lanes: Lanes
    joins: Joins
    transfer_role: Int32  # code of each transfer
    between_stages: Bool  # of each wait of the lanes: it is for a message of the pipeline

    @classmethod
    def of(cls, analysis: Analysis, steps: Int64) -> RecordedSteps:
        """Read these steps. Raise ReplayError if they cannot be replayed."""
        rows = analysis.replayed
        joined = join_lanes(rows.run, rows.matches, steps)
        lanes, _, joins = joined
        waits = lanes.waits
        roles = {rank: rows.roles.ranks[rank].role for rank in rows.run.ranks}
        return cls(
            run=rows.run,
            roles=rows.roles,
            program=Program.of(rows.run, joined, steps),
            lanes=lanes,
            joins=joins,
            transfer_role=pick(roles, joins.transfers.rank, joins.transfers.row),
            between_stages=pick(between_stages(rows.run, rows.roles), waits.rank, waits.row),
        )

    @property
    def steps(self) -> Int64:
        """Return the numbers of the steps, ascending."""
        return self.program.steps

    @property
    def ranks(self) -> Int64:
        """Return the ranks, ascending."""
        return self.program.ranks

    @property
    def transfer_ns(self) -> Int64:
        """Return the measured transfers; a send is over when its message has been received.

        The recorded end of a send that nobody waits for is when the rank asks for it, after other work.
        """
        transfers = self.joins.transfers
        is_send, is_receive = (transfers.name == self.run.name_code(name) for name in ("send", "recv"))
        received_ns = np.full(self.joins.count, np.iinfo(np.int64).max)
        np.minimum.at(received_ns, transfers.join[is_receive], transfers.ns[is_receive])
        return np.where(is_send, np.minimum(transfers.ns, received_ns[transfers.join]), transfers.ns)

    def of_role(self, role: str) -> Bool:
        """Return which transfers have this role; ``all`` has every one."""
        if role == "all":
            return np.ones(len(self.joins.transfers), np.bool_)
        return np.asarray(self.transfer_role == self.roles.code(role))

    def in_scenario(self, scenario: Scenario, statistics: Places) -> tuple[Int64, Int64]:
        """Return the durations of the pieces and of the transfers in a scenario that was made from statistics."""
        segments, transfers = self.lanes.segments, self.joins.transfers
        work, traffic = WorkTable.of(segments), TransferTable.of(self.run, transfers)
        own = Places(self.ranks, self.steps, work.entries, traffic.traffic, traffic.kinds)
        index = ObservedIndex.of(own, statistics)
        work_ns, transfer_ns = durations(
            scenario,
            ModelWork(
                rank=segments.rank,
                row=index.rank[np.searchsorted(self.ranks, segments.rank)],
                step=index.step[segments.step],
                entry=index.entry[work.entry],
                stage=segments.stage,
                chunk=segments.chunk,
                microbatch=segments.microbatch,
                kind=segments.kind,
                total_ns=segments.total_ns,
                pauses_ns={cause: pause_ns(segments, cause) for cause in PAUSES},
                launch_bound_ns=segments.launch_bound_ns,
            ),
            ModelTransfers(
                row=index.traffic[traffic.row],
                kind=index.kind[traffic.kind],
                rank=index.rank[np.searchsorted(self.ranks, traffic.rank)],
                step=index.step[traffic.step],
                ns=self.transfer_ns,
                is_of_pipeline=self.of_role(PIPELINE),
            ),
        )
        return self.program.scaled_pieces(work_ns), np.asarray(transfer_ns, np.int64)

    def times(self, piece_ns: Int64, transfer_ns: Int64) -> Int64:
        """Return the instant of every node, from a common start of all ranks."""
        edges = self.program.edges
        work_ns = work_between(worked_before(piece_ns), edges.first_piece, edges.end_piece)
        return self.program.graph.times(edges.weights(work_ns, transfer_ns))

    def step_ns(self, times: Int64) -> Int64:
        """Return the length of each step: up to the latest end of all ranks, from the end of the step before."""
        return np.asarray(times[self.program.last_node].max(axis=0) + self.program.between_step_times())

    def measured_ns(self) -> npt.NDArray[np.float64]:
        """Return the recorded duration of each step: the mean over ranks."""
        program = self.program
        return np.asarray((program.end_ns - program.start_ns + program.between_ns).mean(axis=0), np.float64)


class LaneTimes(NamedTuple):
    """Recorded instants of one lane in one step, ascending, and the same in a replay; ns from the step's start."""

    recorded: Int64
    replayed: Int64
    wait_begin: Int64  # of its waits, in order, recorded
    wait_end: Int64
    new_begin: Int64  # replayed
    new_end: Int64
    is_between_stages: Bool

    def at(self, recorded: Int64 | int, *, before: bool = False) -> Int64:
        """Return the replayed instants; where a wait without a length grew, those ``before`` it or those after it."""
        time = np.atleast_1d(np.asarray(recorded, np.int64))
        side = np.searchsorted(self.recorded, time, side="left" if before else "right")
        last = len(self.recorded) - 1
        behind = np.clip(side if before else side - 1, 0, last)
        exact = self.recorded[behind] == time
        left = np.clip(behind - 1 if before else behind, 0, last)
        right = np.minimum(left + 1, last)
        span = np.maximum(self.recorded[right] - self.recorded[left], 1)
        share = (time - self.recorded[left]) / span
        between = self.replayed[left] + np.rint((self.replayed[right] - self.replayed[left]) * share).astype(np.int64)
        return np.where(exact, self.replayed[behind], between)

    def waited_ns(self, begin: Int64, end: Int64) -> Int64:
        """Return how long the lane waited within each of these recorded intervals, none of which divides a wait."""
        waited = worked_before(self.wait_end - self.wait_begin)
        first = np.searchsorted(self.wait_begin, begin, side="left")
        return np.asarray(waited[np.maximum(np.searchsorted(self.wait_begin, end, side="left"), first)] - waited[first])


def lane_times(recorded: RecordedSteps, piece_ns: Int64, times: Int64, rank_index: int, step: int) -> LaneTimes:
    """Return the instants of a lane in a step, as recorded and as replayed with these pieces."""
    lanes = recorded.lanes
    first, last = int(lanes.first_node[rank_index, step]), int(lanes.last_node[rank_index, step])
    low, high = np.searchsorted(lanes.waits.node, np.array([first, last], np.int32))  # no copy in another type
    waits = slice(int(low), int(high))
    begins_step = int(lanes.step_start[rank_index, step])
    wait_begin, wait_end = lanes.waits.start[waits] - begins_step, lanes.waits.end[waits] - begins_step
    # Between two nodes work pieces; then the lane waits until the second one. After the last pieces the step ends.
    bounds = lanes.node_piece[first : last + 1]
    pieces, bounds = slice(int(bounds[0]), int(bounds[-1])), bounds - bounds[0]
    node = np.repeat(np.arange(last - first), np.diff(bounds))
    number, wait = np.arange(len(node)), np.arange(len(wait_begin))
    at_piece, at_wait = 1 + number + 2 * node, 1 + bounds[wait + 1] + 2 * wait
    worked_old, worked_new = worked_before(lanes.piece_ns[pieces]), worked_before(piece_ns[pieces])
    old, new = np.zeros((2, 1 + len(node) + 2 * len(wait)), np.int64)
    new[0] = times[first]
    old[at_piece] = np.append(0, wait_end)[node] + worked_old[number + 1] - worked_old[bounds[node]]
    new[at_piece] = times[first + node] + worked_new[number + 1] - worked_new[bounds[node]]
    new_begin = times[first + wait] + worked_new[bounds[wait + 1]] - worked_new[bounds[wait]]
    new_end = times[first + wait + 1]
    old[at_wait], old[at_wait + 1] = wait_begin, wait_end
    new[at_wait], new[at_wait + 1] = new_begin, new_end
    return LaneTimes(
        recorded=old,
        replayed=new,
        wait_begin=wait_begin,
        wait_end=wait_end,
        new_begin=new_begin,
        new_end=new_end,
        is_between_stages=recorded.between_stages[waits],
    )
