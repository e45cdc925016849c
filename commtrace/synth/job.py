"""Describe a synthetic job: sizes, schedule, durations, and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from commtrace.errors import ConfigurationError
from commtrace.synth.clocks import Clock
from commtrace.synth.faults import LONG_MICROBATCH, OF_HOSTS, SEQUENCE_IMBALANCE, UNEVEN_STAGE, Fault

GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved"
ZERO_BUBBLE: Final = "zero-bubble"
SCHEDULES: Final = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)

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


@dataclass(frozen=True, slots=True)
class Job:
    """A Megatron-like job of tp · cp · dp · pp ranks, numbered in that order (tp fastest, pp slowest)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1  # taken from the data-parallel (and context-parallel) ranks
    chunks: int = 1  # v, model chunks per stage; more than one only with the interleaved schedule
    microbatches: int = 8  # m, per replica and step
    steps: int = 10
    schedule: str = ""  # gpipe, 1f1b, interleaved or zero-bubble (deferred weight backwards); "": see order
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
    clocks: Mapping[int, Clock] = field(default_factory=dict)  # by number of the host; perfect by default
    gpus_per_host: int = 8  # they share a clock
    start_ns: int = 1_000_000_000  # true start of the first step
    seed: int = 0  # durations do not depend on the faults, so runs can be compared

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "microbatches", "steps", "gpus_per_host"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if (self.dp * self.cp) % self.ep:
            raise ConfigurationError(f"ep {self.ep} must divide dp · cp = {self.dp * self.cp}")
        if self.schedule not in ("", *SCHEDULES):
            raise ConfigurationError(f"schedule {self.schedule!r}: there are {', '.join(SCHEDULES)}")
        if self.chunks > 1 and self.order != INTERLEAVED:
            raise ConfigurationError(
                f"the schedule {self.order} has one chunk per stage: take interleaved for {self.chunks}"
            )
        if self.order == INTERLEAVED and self.microbatches % self.pp:
            raise ConfigurationError(
                f"the interleaved schedule takes microbatches in groups of pp: {self.microbatches} is no multiple of "
                f"{self.pp}"
            )
        if self.layers < self.pp * self.chunks:
            raise ConfigurationError(f"{self.layers} layers are too few for {self.pp} stages of {self.chunks} chunks")
        for fault in self.faults:
            self._check(fault)

    @property
    def order(self) -> str:
        """Return the schedule, or the default."""
        return self.schedule or (INTERLEAVED if self.chunks > 1 else ONE_F_ONE_B)

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
        for place, limit in zip(fault.where, self._limits(fault), strict=False):
            if not 0 <= place < limit:
                raise ConfigurationError(f"fault {fault.kind}={place}: the job has 0 to {limit - 1}")

    def _limits(self, fault: Fault) -> tuple[int, ...]:
        """Return the upper limit (exclusive) of each number in the fault's place."""
        if fault.kind == LONG_MICROBATCH:
            return (self.microbatches, self.dp)
        limit = {UNEVEN_STAGE: self.pp, **dict.fromkeys(OF_HOSTS, self.hosts)}.get(fault.kind, self.world_size)
        return (limit,) * len(fault.where)
