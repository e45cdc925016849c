"""Run a synthetic job in true time.

Each stage runs as far as its inputs exist, all its ranks at once. A collective ends one transfer time after its last
participant arrived, a message after both sides did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.synth import faults
from commtrace.synth.job import Job, SimulatedLayout
from commtrace.synth.rows import Instant, SimulatedMessage, StageRows
from commtrace.trace import schema
from commtrace.trace.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, Action, orders, splits_backwards
from commtrace.trace.schema import Coordinates
from commtrace.trace.spans import Bool, Int64

Float64 = npt.NDArray[np.float64]

_OPTIMIZER: Final = "O"
_SLOW_PHASE: Final = {
    FORWARD: faults.SLOW_FORWARD,
    BACKWARD: faults.SLOW_BACKWARD,
    WEIGHTS: faults.SLOW_BACKWARD,
    _OPTIMIZER: faults.SLOW_OPTIMIZER,
}
_LAUNCH: Final = 0.3
"""Time that a host needs to launch some work, as a share of the time that the device needs for it."""

_LAUNCHED_PHASES: Final = ("forward", "backward", "optimizer", "other")

_MEMORY: Final = 0.9
"""Correlation of a rank's wandering speed from one step to the next."""

_BUCKETS: Final = 4
"""Of gradients, if their reduction overlaps the last backwards."""


def stage_orders(job: Job) -> list[list[Action]]:
    """Return what each stage does in a step; the part of a backward for the inputs is its backward here."""
    return [
        [action._replace(letter=BACKWARD) if action.letter == INPUT else action for action in order]
        for order in orders(job.order, job.pp, job.microbatches, job.chunks)
    ]


class SimulatedSteps(NamedTuple):
    """True start and end of each step, shape (steps, ranks)."""

    start: Int64
    end: Int64

    @property
    def mean_ns(self) -> int:
        """Return the time from the start of the first step to the end of the last one, per step."""
        return round(float(self.end[-1].max() - self.start[0].min()) / len(self.end))


@dataclass(frozen=True, slots=True)
class Simulated:
    """A job that ran: the rows of every stage, and its steps."""

    stages: tuple[StageRows, ...]
    steps: SimulatedSteps
    # By phase (``other`` lies between phases), shape (steps, ranks), ns: devices had nothing queued at both ends of the
    # work between two marks.
    launch_bound_ns: Mapping[str, Int64]


def simulate(job: Job) -> Simulated:
    """Run the job."""
    return _Simulation(job).run()


@dataclass(slots=True)
class _Sent:
    """A message in flight: the time of each rank's send, and the end of its row, still to be filled in."""

    message: SimulatedMessage
    start: Int64
    end: Int64


class _Simulation:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._layout = SimulatedLayout.of(job)
        self._width = self._layout.ranks_per_stage
        self._now = [np.full(self._width, job.start_ns, np.int64) for _ in range(job.pp)]
        self._host = [now.copy() for now in self._now]  # when each host gets to what follows
        # Devices that have done all that was launched before they waited for communication, if they do.
        self._is_empty = [np.ones(self._width, np.bool_) for _ in range(job.pp)]
        self._launch_bound = {phase: np.zeros((job.steps, job.world_size), np.int64) for phase in _LAUNCHED_PHASES}
        self._launch_share = np.full(job.world_size, _LAUNCH)
        self._rows = [StageRows() for _ in range(job.pp)]
        self._orders = stage_orders(job)
        self._sequence: dict[tuple[int, str], int] = {}
        self._random = np.random.default_rng([job.seed, 1])
        self._step = 0
        self._faults: list[faults.Fault] = []
        self._speed: dict[str, Float64] = {}
        self._uneven = np.ones((job.microbatches, self._width))
        self._wandering = _wandering(job)
        self._sizes = _MessageSizes(job)
        self._reductions: dict[int, list[tuple[SimulatedMessage, int, Int64]]] = {}
        self._operations = {
            letter: self._layer_operations(letter) * job.layers_per_chunk for letter in (FORWARD, BACKWARD, WEIGHTS)
        }

    def run(self) -> Simulated:
        starts, ends = [], []
        for step in range(self._job.steps):
            self._step = step
            self._faults = [fault for fault in self._job.faults if step in fault.steps]
            self._speed = {phase: self._work_factors(slow) for phase, slow in _SLOW_PHASE.items()}
            self._launch_share = self._launch_shares()
            begins = [self._instant(stage) for stage in range(self._job.pp)]
            self._uneven = self._sequence_factors()
            self._load_data()
            self._pipeline()
            self._finish()
            for stage, begin in enumerate(begins):
                end = self._instant(stage)
                self._rows[stage].work(schema.STEP, "step", Coordinates(step, stage=stage), begin, end)
            starts.append(np.concatenate([begin.time for begin in begins]))
            ends.append(np.concatenate(self._now))
        return Simulated(tuple(self._rows), SimulatedSteps(np.stack(starts), np.stack(ends)), self._launch_bound)

    # Hosts and their devices

    def _instant(self, stage: int) -> Instant:
        return Instant(self._now[stage], self._now[stage] - self._host[stage])

    def _launch_shares(self) -> Float64:
        shares = np.full(self._job.world_size, _LAUNCH)
        for fault in self._active(faults.LATE_HOST):
            shares[list(fault.where)] = fault.amount
        return shares

    def _run(self, stage: int, phase: str, work: Int64) -> None:
        """Have the hosts launch some work, and the devices do it: not before it is launched."""
        ranks = slice(stage * self._width, (stage + 1) * self._width)
        begin, was_empty = self._now[stage], self._is_empty[stage]
        self._host[stage] = self._host[stage] + np.rint(work * self._launch_share[ranks]).astype(np.int64)
        self._now[stage] = np.maximum(begin + work, self._host[stage])
        self._is_empty[stage] = self._now[stage] <= self._host[stage]
        waited = was_empty & self._is_empty[stage]
        self._launch_bound[phase][self._step, ranks] += np.where(waited, self._now[stage] - begin, 0)

    def _wait_for_hosts(self, stage: int, duration: Int64) -> None:
        """Keep hosts busy, and with them their devices, which have nothing else to do then."""
        self._now[stage] = self._now[stage] + duration
        self._host[stage] = np.where(duration > 0, self._now[stage], self._host[stage])
        self._is_empty[stage] = self._is_empty[stage] | (duration > 0)

    # What is wrong

    def _active(self, *kinds: str) -> list[faults.Fault]:
        return [fault for fault in self._faults if fault.kind in kinds]

    def _work_factors(self, slow_phase: str) -> Float64:
        """Return factors on the work of a phase, shape (stages, ranks of a stage)."""
        factors = np.array(self._wandering[self._step])
        for fault in self._active(faults.SLOW_RANK, slow_phase):
            factors[list(fault.where)] *= fault.amount
        for fault in self._active(faults.SLOW_HOST):
            factors[self._on_hosts(np.arange(len(factors)), fault)] *= fault.amount
        shaped = factors.reshape(self._job.pp, self._width)
        for fault in self._active(faults.UNEVEN_STAGE):
            shaped[list(fault.where)] *= fault.amount
        return shaped

    def _on_hosts(self, ranks: Int64, fault: faults.Fault) -> Bool:
        return np.isin(ranks // self._job.gpus_per_host, fault.where)

    def _sequence_factors(self) -> Float64:
        """Return the work of each microbatch, shape (microbatches, ranks of a stage)."""
        job = self._job
        factors = np.ones((job.microbatches, job.dp))
        for fault in self._active(faults.SEQUENCE_IMBALANCE):
            drawn = np.random.default_rng([job.seed, 2, self._step]).normal(0.0, fault.amount, factors.shape)
            factors *= np.exp(drawn - fault.amount**2 / 2)
        for fault in self._active(faults.LONG_MICROBATCH):
            factors[fault.where] *= fault.amount
        return np.repeat(factors, job.cp * job.tp, axis=1)

    def _link_factors(self, members: Int64) -> Float64:
        factors = np.ones(len(members))
        for fault in self._active(faults.SLOW_LINK):
            uses = np.all([(members == rank).any(axis=1) for rank in fault.where], axis=0)
            factors[uses] *= fault.amount
        for fault in self._active(faults.SLOW_NETWORK):
            inside = self._on_hosts(members, fault)
            factors[inside.any(axis=1) & ~inside.all(axis=1)] *= fault.amount
        return factors

    def _send_factors(self, sender: Int64, receiver: Int64) -> Float64:
        factors = np.ones(len(sender))
        for fault in self._active(faults.SLOW_SEND):
            goes = np.all([ends == rank for ends, rank in zip((sender, receiver), fault.where, strict=False)], axis=0)
            factors[goes] *= fault.amount
        return factors

    def _jittered(self, duration_ns: float | Float64, count: int) -> Int64:
        sigma = self._job.jitter
        if not sigma:
            return np.full(count, np.rint(duration_ns), np.int64)
        factors = np.exp(sigma * self._random.standard_normal(count) - sigma * sigma / 2)
        return np.rint(duration_ns * factors).astype(np.int64)

    # A step

    def _load_data(self) -> None:
        for stage in range(self._job.pp):
            duration = self._jittered(self._job.data_ns, self._width) + self._added(faults.DATA, stage)
            self._pause(stage, schema.DATA, "data", duration, Coordinates(self._step, stage=stage))

    def _added(self, kind: str, stage: int) -> Int64:
        """Return the time that faults of this kind add to a step, ns by rank of a stage."""
        added = np.zeros(self._job.world_size, np.int64)
        for fault in self._active(kind):
            added[list(fault.where)] += round(fault.amount * 1e6)
        return added[stage * self._width : (stage + 1) * self._width]

    def _pause(self, stage: int, kind: int, name: str, duration: Int64, coordinates: Coordinates) -> None:
        begin = self._instant(stage)
        self._wait_for_hosts(stage, duration)
        self._rows[stage].work(kind, name, coordinates, begin, self._instant(stage))

    def _pipeline(self) -> None:
        sent: dict[tuple[str, int, int], _Sent] = {}
        next_action = [0] * self._job.pp
        progress = True
        while progress:
            progress = False
            for stage, order in enumerate(self._orders):
                while next_action[stage] < len(order) and self._ready(stage, order[next_action[stage]], sent):
                    self._act(stage, order[next_action[stage]], sent)
                    next_action[stage] += 1
                    progress = True
        assert next_action == [len(order) for order in self._orders], "the schedule waits for itself"

    def _source(self, stage: int, action: Action) -> tuple[int, int] | None:
        """Return stage and chunk of an action's input; None if it comes from the stage itself."""
        stages, chunks = self._job.pp, self._job.chunks
        virtual = action.chunk * stages + stage + {FORWARD: -1, BACKWARD: 1}.get(action.letter, 0)
        if action.letter not in (FORWARD, BACKWARD) or not 0 <= virtual < stages * chunks or stages == 1:
            return None
        return virtual % stages, virtual // stages

    def _ready(self, stage: int, action: Action, sent: dict[tuple[str, int, int], _Sent]) -> bool:
        source = self._source(stage, action)
        return source is None or (action.letter, source[1] * self._job.pp + source[0], action.microbatch) in sent

    def _act(self, stage: int, action: Action, sent: dict[tuple[str, int, int], _Sent]) -> None:
        job, stages, chunks = self._job, self._job.pp, self._job.chunks
        coordinates = Coordinates(self._step, action.microbatch, action.chunk, stage)
        virtual = action.chunk * stages + stage
        source = self._source(stage, action)
        if action.letter == FORWARD:  # launched late: until then the lane is idle, without a row
            self._launch_late(stage, self._added(faults.LATE_LAUNCH, stage) // (job.microbatches * chunks))
        if source is not None:
            self._receive(
                stage, source[0], coordinates, sent[action.letter, source[1] * stages + source[0], action.microbatch]
            )
        self._compute(stage, action, coordinates)
        target = virtual + {FORWARD: 1, BACKWARD: -1}.get(action.letter, 0)
        if target != virtual and 0 <= target < stages * chunks and stages > 1:
            sent[action.letter, virtual, action.microbatch] = self._send(stage, target % stages, coordinates)

    def _launch_late(self, stage: int, duration: Int64) -> None:
        ranks, was_empty = slice(stage * self._width, (stage + 1) * self._width), self._is_empty[stage]
        self._wait_for_hosts(stage, duration)
        self._launch_bound["other"][self._step, ranks] += np.where(was_empty, duration, 0)

    def _send(self, stage: int, target: int, coordinates: Coordinates) -> _Sent:
        message = SimulatedMessage(
            "send", "pp", self._next(stage, f"send {target}"), self._sizes.activation, peer=target
        )
        start, end = self._now[stage], np.zeros(self._width, np.int64)
        self._rows[stage].communication(coordinates, message, start, end, is_async=True)
        return _Sent(message, start, end)

    def _receive(self, stage: int, source: int, coordinates: Coordinates, sent: _Sent) -> None:
        now = self._now[stage]
        pairs = np.arange(self._width)[:, np.newaxis] + np.array([stage, source]) * self._width
        transfer = self._transfer_ns("recv", sent.message.num_bytes, pairs)
        transfer = np.rint(transfer * self._send_factors(pairs[:, 1], pairs[:, 0])).astype(np.int64)
        end = np.maximum(now, sent.start) + transfer
        sent.end[:] = end
        message = sent.message._replace(operation="recv", peer=source)
        number = self._rows[stage].communication(coordinates, message, now, end, is_async=True)
        self._stall(stage, coordinates, message, number, end)

    def _stall(
        self, stage: int, coordinates: Coordinates, message: SimulatedMessage, communication: int, end: Int64
    ) -> None:
        begin = self._instant(stage)
        self._now[stage] = end
        self._rows[stage].stall(coordinates, message, communication, begin, self._instant(stage))

    def _compute(self, stage: int, action: Action, coordinates: Coordinates) -> None:
        """Run a forward or backward: one interval of work before, between and after its communications."""
        job, begin = self._job, self._instant(stage)
        split = splits_backwards(job.order)
        if action.letter == FORWARD:
            usual, kind, name = job.forward_ns, schema.FORWARD, "forward"
        elif action.letter == BACKWARD:
            usual, kind, name = job.backward_ns - job.weight_ns * split, schema.BACKWARD, "backward"
        else:
            usual, kind, name = job.weight_ns, schema.BACKWARD, "backward weights"
        work = self._jittered(usual * self._speed[action.letter][stage] * self._uneven[action.microbatch], self._width)
        operations = self._operations[action.letter]
        done = np.zeros(self._width, np.int64)
        self._collect_garbage(stage, action, coordinates)
        for number, (role, operation) in enumerate(operations, start=1):
            part = work * number // (len(operations) + 1)
            self._run(stage, schema.KINDS[kind], part - done)
            done = part
            self._collective(stage, role, operation, self._sizes.activation, coordinates)
        self._overlap_reduction(stage, action, coordinates, work - done)
        self._run(stage, schema.KINDS[kind], work - done)
        self._rows[stage].work(kind, name, coordinates, begin, self._instant(stage))

    def _layer_operations(self, letter: str) -> list[tuple[str, str]]:
        if letter not in (FORWARD, BACKWARD):
            return []
        forward = letter == FORWARD
        wanted = [("cp", "all_gather" if forward else "reduce_scatter"), ("tp", "all_reduce"), ("ep", "all_to_all")]
        wanted += [("ep", "all_to_all"), ("tp", "all_reduce")]
        return [(role, operation) for role, operation in wanted if self._layout.size(role) > 1]

    def _collect_garbage(self, stage: int, action: Action, coordinates: Coordinates) -> None:
        """Collect garbage in the forward of the middle microbatch."""
        if action != Action(FORWARD, self._job.microbatches // 2, 0):
            return
        self._pause(stage, schema.GC, "gc", self._added(faults.GC, stage), coordinates)

    # Communication

    def _next(self, stage: int, what: str) -> int:
        number = self._sequence.get((stage, what), 0)
        self._sequence[stage, what] = number + 1
        return number

    def _transfer_ns(self, operation: str, num_bytes: int, members: Int64) -> Int64:
        same_host = self._layout.on_one_host(members)
        usual = self._job.network.transfer_ns(operation, num_bytes, members.shape[1], same_host=same_host)
        return self._jittered(usual * self._link_factors(members), len(members))

    def _collective(
        self,
        stage: int,
        role: str,
        operation: str,
        num_bytes: int,
        coordinates: Coordinates,
        dtype: str = "bfloat16",
    ) -> None:
        members = self._layout.of_stage(role, stage)
        start = self._now[stage]
        end = self._ends(operation, num_bytes, members + stage * self._width, start[members])
        message = SimulatedMessage(operation, role, self._next(stage, role), num_bytes, dtype)
        scattered = np.empty(self._width, np.int64)
        scattered[members] = end
        number = self._rows[stage].communication(coordinates, message, start, scattered)
        self._stall(stage, coordinates, message, number, scattered)

    def _ends(self, operation: str, num_bytes: int, members: Int64, starts: Int64) -> Int64:
        """Return the end of each member's operation, shape (groups, members)."""
        after = starts.max(axis=1) + self._transfer_ns(operation, num_bytes, members)
        scatter = self._job.end_scatter_ns
        if not scatter:
            return np.repeat(after[:, np.newaxis], members.shape[1], axis=1)
        late = np.rint(self._random.exponential(scatter, members.shape)).astype(np.int64)
        return np.asarray(after[:, np.newaxis] + late)

    def _across_stages(self, role: str, operation: str, num_bytes: int, dtype: str) -> None:
        members = self._layout.members[role]
        stages = np.unique(members // self._width).tolist()
        start = np.concatenate(self._now)
        end = start.copy()
        end[members] = self._ends(operation, num_bytes, members, start[members])
        for stage in stages:
            ranks = slice(stage * self._width, (stage + 1) * self._width)
            coordinates = Coordinates(self._step, stage=stage)
            message = SimulatedMessage(operation, role, self._next(stage, role), num_bytes, dtype)
            number = self._rows[stage].communication(coordinates, message, start[ranks], end[ranks])
            self._stall(stage, coordinates, message, number, end[ranks])

    # The end of a step

    def _overlap_reduction(self, stage: int, action: Action, coordinates: Coordinates, remaining: Int64) -> None:
        """Launch the reduction of gradients, bucket by bucket, during the last stretch of the last backward."""
        job, role = self._job, self._layout.gradients
        last = self._orders[stage][-1]
        if not job.overlap_grad_reduce or action != last or self._layout.size(role) == 1:
            return
        members = self._layout.of_stage(role, stage)
        free = np.zeros(self._width, np.int64)
        for bucket in range(_BUCKETS):
            start = np.maximum(self._now[stage] + remaining * (bucket + 1) // _BUCKETS, free)
            end = np.empty(self._width, np.int64)
            num_bytes = self._sizes.gradients // _BUCKETS
            end[members] = self._ends("reduce_scatter", num_bytes, members + stage * self._width, start[members])
            message = SimulatedMessage("reduce_scatter", role, self._next(stage, role), num_bytes, "float32")
            number = self._rows[stage].communication(coordinates, message, start, end, is_async=True)
            self._reductions.setdefault(stage, []).append((message, number, end))
            free = end

    def _finish(self) -> None:
        job, sizes, role = self._job, self._sizes, self._layout.gradients
        for stage in range(job.pp):
            coordinates = Coordinates(self._step, stage=stage)
            for message, number, end in self._reductions.pop(stage, []):
                self._stall(stage, coordinates, message, number, np.maximum(self._now[stage], end))
            if self._layout.size(role) > 1 and not job.overlap_grad_reduce:
                self._collective(stage, role, "reduce_scatter", sizes.gradients, coordinates, "float32")
        if job.pp > 1:
            self._across_stages("embedding", "all_reduce", sizes.embedding, "float32")
        begins = [self._instant(stage) for stage in range(job.pp)]
        if job.pp * job.tp > 1:
            self._across_stages("mp", "all_reduce", 4, "float32")
        for stage, begin in enumerate(begins):
            coordinates = Coordinates(self._step, stage=stage)
            self._run(
                stage, "optimizer", self._jittered(job.optimizer_ns * self._speed[_OPTIMIZER][stage], self._width)
            )
            self._rows[stage].work(schema.OPTIMIZER, "optimizer", coordinates, begin, self._instant(stage))
            if self._layout.size(role) > 1:
                self._collective(stage, role, "all_gather", sizes.parameters, coordinates)
            self._pause(stage, schema.EVALUATION, "evaluation", self._added(faults.EVALUATION, stage), coordinates)
            self._pause(stage, schema.CHECKPOINT, "checkpoint", self._added(faults.CHECKPOINT, stage), coordinates)


def _wandering(job: Job) -> Float64:
    """Return factors on the work of each rank in each step, shape (steps, ranks): an autoregressive process."""
    drawn = np.random.default_rng([job.seed, 3]).normal(0.0, job.wander, (job.steps, job.world_size))
    speed = np.empty_like(drawn)
    speed[0] = drawn[0]
    for step in range(1, job.steps):
        speed[step] = _MEMORY * speed[step - 1] + np.sqrt(1 - _MEMORY**2) * drawn[step]
    return np.asarray(np.exp(speed - job.wander**2 / 2))


class _MessageSizes:
    """Bytes of a job's communication, from its model: 12 h² parameters per layer, activations of s · h in 16 bits."""

    def __init__(self, job: Job) -> None:
        parameters = 12 * job.hidden**2 * job.layers // (job.tp * job.pp)
        self.activation = 2 * job.sequence * job.hidden // job.cp
        self.gradients = 4 * parameters
        self.parameters = 2 * parameters
        self.embedding = 4 * job.hidden * 32_000 // job.tp
