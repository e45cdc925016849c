"""A simulated 1F1B training job whose every duration is chosen, so that every answer is known.

Without delays, with zero transfer time and at least as many microbatches as stages, a step of the job takes
(m + p − 1)(F + B) + optimizer on every rank, and a stage waits (p − 1)(F + B) of it: for its neighbours, and at the
end of the step for the model-parallel all_reduce (stage r waits r·B there, as stage 0 is the last one to finish).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from commtrace.trace.metadata import ClockAnchor, Group
from commtrace.trace.run import Run
from tests.factory import EPOCH_NS, Row, collective, group, make_run, p2p, span, stall


class Clock(NamedTuple):
    """A node's clock: how far it is ahead of the true time at 0, and how much faster it runs."""

    offset_ns: int = 0
    drift_ppm: float = 0.0

    def read(self, true_ns: int) -> int:
        """What this clock shows at a true instant."""
        return true_ns + self.offset_ns + round(true_ns * self.drift_ppm * 1e-6)


@dataclass(frozen=True)
class PipelineJob:
    """A job of ``stages`` × ``data_parallel`` ranks; rank = stage · data_parallel + replica.

    Attributes:
        stages: p.
        microbatches: m, per replica and step.
        data_parallel: replicas; with more than one, a dp all_reduce of ``all_reduce_ns`` ends every step.
        forward_ns: F.
        backward_ns: B.
        transfer_ns: of one activation or gradient between stages. Sends do not hold up the sender.
        optimizer_ns: at the end of a step; 0 for none.
        steps: how many.
        extra_forward_ns: by rank, added to each of its forwards.
        nodes: by rank.
        clocks: by node.
        start_ns: true time at which the first step starts.
    """

    stages: int
    microbatches: int
    data_parallel: int = 1
    forward_ns: int = 1_000_000
    backward_ns: int = 2_000_000
    transfer_ns: int = 0
    all_reduce_ns: int = 0
    optimizer_ns: int = 0
    steps: int = 3
    extra_forward_ns: Mapping[int, int] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    start_ns: int = 0

    @property
    def step_ns(self) -> int:
        """Length of a step without delays, transfers and all_reduce."""
        return (self.microbatches + self.stages - 1) * (self.forward_ns + self.backward_ns) + self.optimizer_ns

    def rank(self, stage: int, replica: int = 0) -> int:
        return stage * self.data_parallel + replica

    def run(self) -> Run:
        """Simulate the job."""
        return _Simulation(self).run()


class _Simulation:
    def __init__(self, job: PipelineJob) -> None:
        self._job = job
        world = range(job.stages * job.data_parallel)
        self._rows: dict[int, list[Row]] = {rank: [] for rank in world}
        self._now = dict.fromkeys(world, job.start_ns)
        self._next_id = dict.fromkeys(world, 0)
        self._seq: dict[tuple[int, int], int] = {}
        self._pipelines = [
            group("pp", *(job.rank(stage, replica) for stage in range(job.stages)))
            for replica in range(job.data_parallel)
        ]
        self._data_parallel = [
            group("dp", *(job.rank(stage, replica) for replica in range(job.data_parallel)), ordinal=1)
            for stage in range(job.stages)
        ]
        self._model_parallel = group("mp", *world, ordinal=2)

    def run(self) -> Run:
        for step in range(self._job.steps):
            begins = dict(self._now)
            for replica in range(self._job.data_parallel):
                self._pipeline(step, replica)
            self._finish(step)
            for rank, begin in begins.items():
                self._rows[rank].append(span("step", begin, self._now[rank], step=step))
        return self._recorded()

    def _pipeline(self, step: int, replica: int) -> None:
        """Run all 1F1B orders of one pipeline, taking each action once what it needs exists."""
        job = self._job
        todo = {stage: one_forward_one_backward(stage, job.stages, job.microbatches) for stage in range(job.stages)}
        sent: dict[tuple[str, int, int], tuple[int, Row]] = {}
        while any(todo.values()):
            for stage, actions in todo.items():
                while actions and self._act(step, replica, stage, actions[0], sent):
                    actions.pop(0)

    def _act(
        self,
        step: int,
        replica: int,
        stage: int,
        action: tuple[str, int],
        sent: dict[tuple[str, int, int], tuple[int, Row]],
    ) -> bool:
        job = self._job
        kind, microbatch = action
        source = stage - 1 if kind == "forward" else stage + 1
        target = stage + 1 if kind == "forward" else stage - 1
        where = {"step": step, "microbatch": microbatch, "chunk": 0, "stage": stage}
        if 0 <= source < job.stages:
            if (kind, source, microbatch) not in sent:
                return False
            self._receive(replica, stage, source, sent[kind, source, microbatch], where)
        rank = job.rank(stage, replica)
        extra = job.extra_forward_ns.get(rank, 0) if kind == "forward" else 0
        duration = (job.forward_ns if kind == "forward" else job.backward_ns) + extra
        self._rows[rank].append(span(kind, self._now[rank], self._now[rank] + duration, **where))
        self._now[rank] += duration
        if 0 <= target < job.stages:
            sent[kind, stage, microbatch] = self._send(replica, stage, target, where)
        return True

    def _send(self, replica: int, stage: int, target: int, where: Mapping[str, int]) -> tuple[int, Row]:
        rank, peer = self._job.rank(stage, replica), self._job.rank(target, replica)
        self._seq[rank, peer] = seq = self._seq.get((rank, peer), -1) + 1
        now = self._now[rank]
        # The end is known when the receiver comes; see _receive.
        row = p2p("send", self._pipelines[replica], peer, seq, now, now, id=self._id(rank), is_async=True, **where)
        self._rows[rank].append(row)
        return seq, row

    def _receive(
        self, replica: int, stage: int, source: int, message: tuple[int, Row], where: Mapping[str, int]
    ) -> None:
        rank, peer = self._job.rank(stage, replica), self._job.rank(source, replica)
        seq, send = message
        now = self._now[rank]
        end = max(now, send["start"]) + self._job.transfer_ns
        send["end"] = end
        receive = p2p("recv", self._pipelines[replica], peer, seq, now, end, id=self._id(rank), is_async=True, **where)
        self._rows[rank].append(receive)
        if end > now:
            self._rows[rank].append(stall(receive, now, end))
        self._now[rank] = end

    def _finish(self, step: int) -> None:
        job = self._job
        if job.data_parallel > 1:
            for own in self._data_parallel:
                self._all_reduce(own, step, job.all_reduce_ns)
        self._all_reduce(self._model_parallel, step, 0)
        for rank in self._now:
            if job.optimizer_ns:
                self._rows[rank].append(
                    span("optimizer", self._now[rank], self._now[rank] + job.optimizer_ns, step=step)
                )
                self._now[rank] += job.optimizer_ns

    def _all_reduce(self, where: Group, step: int, transfer_ns: int) -> None:
        end = max(self._now[rank] for rank in where.ranks) + transfer_ns
        for rank in where.ranks:
            row = collective("all_reduce", where, step, self._now[rank], end, id=self._id(rank), step=step)
            self._rows[rank].append(row)
            if end > self._now[rank]:
                self._rows[rank].append(stall(row, self._now[rank], end))
            self._now[rank] = end

    def _id(self, rank: int) -> int:
        self._next_id[rank] += 1
        return self._next_id[rank]

    def _recorded(self) -> Run:
        job = self._job
        clocks = {rank: job.clocks.get(job.nodes.get(rank, "node0"), Clock()) for rank in self._rows}
        rows = {
            rank: [
                {**row, "start": clock.read(row["start"]), "end": clock.read(row["end"])} for row in self._rows[rank]
            ]
            for rank, clock in clocks.items()
        }
        return make_run(
            rows,
            [*self._pipelines, *self._data_parallel, self._model_parallel],
            nodes=job.nodes,
            anchors={rank: ClockAnchor(clock.read(0), EPOCH_NS) for rank, clock in clocks.items()},
            coordinates=lambda rank: {"pp": rank // job.data_parallel, "dp": rank % job.data_parallel},
            parallel={"pp": job.stages, "dp": job.data_parallel},
            topology={"schedule": "1f1b", "microbatches": job.microbatches},
        )


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage does in a step of 1F1B, in order: ("forward" or "backward", microbatch)."""
    warm_up = min(stages - stage - 1, microbatches)
    actions = [("forward", microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches - warm_up):
        actions += [("forward", warm_up + microbatch), ("backward", microbatch)]
    return actions + [("backward", microbatch) for microbatch in range(microbatches - warm_up, microbatches)]
