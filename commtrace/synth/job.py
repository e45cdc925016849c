"""Describe a synthetic job: sizes, schedule, durations, network, clocks of hosts, and process groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from commtrace.errors import ConfigurationError
from commtrace.synth.faults import LONG_MICROBATCH, OF_HOSTS, SEQUENCE_IMBALANCE, UNEVEN_STAGE, Fault
from commtrace.trace.metadata import ClockAnchor, Group, group_id
from commtrace.trace.schedule import WRITTEN, check_sizes, default_schedule, schedule_named, with_chunks
from commtrace.trace.spans import Int64

_SHARES: Final = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Times (n − 1)/n of the tensor: a ring's traffic over its slowest link. Other operations move the tensor once."""


@dataclass(frozen=True, slots=True)
class Network:
    """Latency of an operation, and bandwidth inside a host and between hosts, GB/s = 10⁹ bytes per second."""

    latency_ns: int = 15_000
    host_gbps: float = 300.0
    network_gbps: float = 45.0

    def transfer_ns(self, operation: str, num_bytes: int, ranks: int, *, same_host: bool) -> int:
        """Return the duration, ns, of an operation after all ``ranks`` members have arrived."""
        share = _SHARES[operation] * (ranks - 1) / ranks if operation in _SHARES else 1.0
        return self.latency_ns + round(num_bytes * share / (self.host_gbps if same_host else self.network_gbps))


FREE: Final = Network(latency_ns=0, host_gbps=float("inf"), network_gbps=float("inf"))
"""Communication takes no time."""


EPOCH_NS = 1_700_000_000_000_000_000
"""Epoch ns of the true instant 0."""

_ANCHOR_BRACKET_NS = 120
_ANCHOR_EVERY_NS = 10_000_000_000
_MOST_UPTIME_NS = 30 * 24 * 3600 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class SimulatedClock:
    """A host's monotonic clock and wall clock.

    At the true instant t the monotonic clock shows t + ``offset_ns`` + round(t · ``drift_ppm`` · 10⁻⁶). The wall clock
    has the same rate, off by ``wall_error_ns``. From ``step_at_ns`` on both are ahead, by ``step_ns`` and
    ``wall_step_ns``.
    """

    offset_ns: int = 0
    drift_ppm: float = 0.0
    wall_error_ns: int = 0
    step_at_ns: int = 0
    step_ns: int = 0
    wall_step_ns: int = 0

    def read(self, true_ns: Int64) -> Int64:
        """Return the monotonic clock's readings at true instants, ns."""
        drifted = true_ns + np.rint(true_ns * (self.drift_ppm * 1e-6)).astype(np.int64) + self.offset_ns
        if self.step_ns:
            drifted = drifted + np.where(true_ns >= self.step_at_ns, self.step_ns, 0)
        return np.asarray(drifted, np.int64)

    def anchors(self, first_ns: int, last_ns: int) -> tuple[ClockAnchor, ...]:
        """Return a recorder's pairs of readings between two true instants: at the start and every ten seconds."""
        moments = np.arange(first_ns, last_ns + 1, _ANCHOR_EVERY_NS, dtype=np.int64)
        monotonic = self.read(moments)
        wall = monotonic - self.offset_ns + self.wall_error_ns + EPOCH_NS
        wall = wall + np.where((moments >= self.step_at_ns) & (self.wall_step_ns != 0), self.wall_step_ns, 0)
        return tuple(
            ClockAnchor(int(shown), int(real), _ANCHOR_BRACKET_NS) for shown, real in zip(monotonic, wall, strict=True)
        )


PERFECT = SimulatedClock()


def random_clocks(
    hosts: int, *, wall_error_ns: int = 0, drift_ppm: float = 0.0, seed: int = 0
) -> Mapping[int, SimulatedClock]:
    """Return the clocks of hosts, by number, with random uptimes and errors up to the given amounts."""
    random = np.random.default_rng([seed, hosts])
    return {
        host: SimulatedClock(
            offset_ns=int(random.integers(0, _MOST_UPTIME_NS)),
            drift_ppm=float(random.uniform(-drift_ppm, drift_ppm)),
            wall_error_ns=int(random.integers(-wall_error_ns, wall_error_ns + 1)),
        )
        for host in range(hosts)
    }


@dataclass(frozen=True, slots=True)
class Job:
    """A Megatron-like job of tp · cp · dp · pp ranks, numbered in that order (tp fastest, pp slowest)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1  # taken from the data-parallel (and context-parallel) ranks
    chunks: int = 1  # v, model chunks per stage
    microbatches: int = 8  # m, per replica and step
    steps: int = 10
    schedule: str = ""  # any name of one that can be written; "": see order
    layers: int = 8  # of the whole model; each makes two tp all_reduces per forward and per backward
    hidden: int = 4096  # with layers and sequence, it gives the bytes of every communication
    sequence: int = 4096
    forward_ns: int = 4_000_000  # F, of one microbatch in one chunk, without communication
    backward_ns: int = 8_000_000  # B, likewise, weights included
    optimizer_ns: int = 3_000_000  # at the end of a step
    data_ns: int = 200_000  # at the start of a step
    overlap_grad_reduce: bool = False  # reduce gradients in buckets while the last backwards run
    network: Network = field(default_factory=Network)
    jitter: float = 0.01  # sigma of the logarithm of every duration; 0 for exact runs
    wander: float = 0.0  # sigma of the logarithm of a rank's speed; ten steps apart, the correlation is a third
    end_scatter_ns: int = 1_500  # mean difference between the ends of a collective on its ranks
    outliers: float = 0.0  # share of collectives recorded with ends late by milliseconds
    missing: float = 0.0  # share of communications that were not recorded
    faults: tuple[Fault, ...] = ()
    clocks: Mapping[int, SimulatedClock] = field(default_factory=dict)  # by number of the host; perfect by default
    gpus_per_host: int = 8  # they share a clock
    start_ns: int = 1_000_000_000  # true start of the first step
    seed: int = 0  # durations do not depend on the faults, so runs can be compared

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "microbatches", "steps", "gpus_per_host"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if (self.dp * self.cp) % self.ep:
            raise ConfigurationError(f"ep {self.ep} must divide dp · cp = {self.dp * self.cp}")
        check_sizes(self.order, self.pp, self.microbatches, self.chunks)
        if self.layers < self.pp * self.chunks:
            raise ConfigurationError(f"{self.layers} layers are too few for {self.pp} stages of {self.chunks} chunks")
        for fault in self.faults:
            self._check(fault)

    @property
    def order(self) -> str:
        """Return the printed name of the schedule; 1F1B or its interleaved form by default."""
        if not self.schedule:
            return default_schedule(self.chunks)
        return with_chunks(schedule_named(self.schedule, WRITTEN), self.chunks)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def hosts(self) -> int:
        return -(-self.world_size // self.gpus_per_host)

    @property
    def layers_per_chunk(self) -> int:
        return self.layers // (self.pp * self.chunks)

    @property
    def weight_ns(self) -> int:
        """Return W, the weights' part of a backward, ns."""
        return self.backward_ns // 2

    def to_json(self) -> dict[str, object]:
        options = {name: getattr(self, name) for name in self.__slots__ if name not in ("faults", "clocks", "network")}
        network = {name: value if value < float("inf") else None for name, value in asdict(self.network).items()}
        return {**options, "schedule": self.order, "network": network}

    def _check(self, fault: Fault) -> None:
        if fault.kind != SEQUENCE_IMBALANCE and not fault.where:
            raise ConfigurationError(f"fault {fault.kind}: say where")
        for position, limit in zip(fault.where, self._limits(fault), strict=False):
            if not 0 <= position < limit:
                raise ConfigurationError(f"fault {fault.kind}={position}: the job has 0 to {limit - 1}")

    def _limits(self, fault: Fault) -> tuple[int, ...]:
        """Return the upper limit (exclusive) of each number in the fault's place."""
        if fault.kind == LONG_MICROBATCH:
            return (self.microbatches, self.dp)
        limit = {UNEVEN_STAGE: self.pp, **dict.fromkeys(OF_HOSTS, self.hosts)}.get(fault.kind, self.world_size)
        return (limit,) * len(fault.where)


@dataclass(frozen=True, slots=True)
class SimulatedLayout:
    """The groups of a job by role, in Megatron's order of ranks; ``members`` are global ranks, (groups, members)."""

    job: Job
    members: dict[str, Int64]
    groups: dict[str, tuple[Group, ...]]

    @classmethod
    def of(cls, job: Job) -> SimulatedLayout:
        members = _members(job)
        ordinals: dict[tuple[int, ...], int] = {}
        groups: dict[str, tuple[Group, ...]] = {}
        for role, table in members.items():
            groups[role] = tuple(_group(role, tuple(row), ordinals) for row in np.sort(table, axis=1).tolist())
        return cls(job, members, groups)

    @property
    def ranks_per_stage(self) -> int:
        return self.job.tp * self.job.cp * self.job.dp

    @property
    def gradients(self) -> str:
        """Return the role of the group that reduces gradients."""
        return "dp-cp" if self.job.cp > 1 else "dp"

    def of_stage(self, role: str, stage: int) -> Int64:
        """Return the groups of a role inside a stage as positions in it, shape (groups, members)."""
        table = self.members[role]
        per_stage = len(table) // self.job.pp
        return np.asarray(table[stage * per_stage : (stage + 1) * per_stage] - stage * self.ranks_per_stage)

    def size(self, role: str) -> int:
        return int(self.members[role].shape[1]) if role in self.members else 1

    def groups_of(self, rank: int) -> dict[int, Group]:
        return {group.id: group for role in self.groups for group in self.groups[role] if rank in group.ranks}

    def group_ids(self, role: str) -> Int64:
        """Return the id of every rank's group of this role; −1 without one."""
        ids = np.full(self.job.world_size, -1, np.int64)
        for group in self.groups[role]:
            ids[list(group.ranks)] = group.id
        return ids

    def coordinates(self, rank: int) -> dict[str, int]:
        job = self.job
        rest, tp = divmod(rank, job.tp)
        rest, cp = divmod(rest, job.cp)
        pp, dp = divmod(rest, job.dp)
        return {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": (dp * job.cp + cp) % job.ep}

    def parallel(self) -> dict[str, int]:
        job = self.job
        return {"tp": job.tp, "pp": job.pp, "dp": job.dp, "cp": job.cp, "ep": job.ep, "vpp": job.chunks}

    def host(self, rank: int) -> int:
        return rank // self.job.gpus_per_host

    def on_one_host(self, members: Int64) -> bool:
        """Return whether groups (of global ranks, of one role) lie inside a host."""
        # All groups of a role lie alike.
        return len(set((members[0] // self.job.gpus_per_host).tolist())) == 1


def _members(job: Job) -> dict[str, Int64]:
    grid = np.arange(job.world_size).reshape(job.pp, job.dp, job.cp, job.tp)
    tables = {
        "world": grid.reshape(1, -1),
        "tp": grid.reshape(-1, job.tp),
        "cp": grid.transpose(0, 1, 3, 2).reshape(-1, job.cp),
        "dp": grid.transpose(0, 2, 3, 1).reshape(-1, job.dp),
        "dp-cp": grid.transpose(0, 3, 1, 2).reshape(-1, job.dp * job.cp),
        "ep": grid.reshape(job.pp, -1, job.ep, job.tp).transpose(0, 1, 3, 2).reshape(-1, job.ep),
        "pp": grid.transpose(1, 2, 3, 0).reshape(-1, job.pp),
        "mp": grid.transpose(1, 2, 0, 3).reshape(-1, job.pp * job.tp),
    }
    if job.pp > 1:
        tables["embedding"] = grid[[0, -1]].transpose(1, 2, 3, 0).reshape(-1, 2)
    # Megatron makes all of them; those of one rank never communicate. dp-cp is dp where there is no cp.
    wanted = {"world", "dp", "pp", "tp", "mp", "embedding"} | ({"cp", "dp-cp"} if job.cp > 1 else set())
    wanted |= {"ep"} if job.ep > 1 else set()
    return {role: table.astype(np.int64) for role, table in tables.items() if role in wanted}


def _group(role: str, ranks: tuple[int, ...], ordinals: dict[tuple[int, ...], int]) -> Group:
    ordinal = ordinals.get(ranks, 0)
    ordinals[ranks] = ordinal + 1
    return Group(group_id(ranks, ordinal), ranks, ordinal, role, backend="nccl")
