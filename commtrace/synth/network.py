"""Durations of communications after all participants have arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHARES: Final = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Times (n − 1)/n of the tensor: what a ring moves over the slowest link. Other operations move the tensor once."""


@dataclass(frozen=True, slots=True)
class Network:
    """Latency of an operation, and bandwidth inside a host and between hosts, GB/s = 10⁹ bytes per second."""

    latency_ns: int = 15_000
    host_gbps: float = 300.0
    network_gbps: float = 45.0

    def transfer_ns(self, operation: str, num_bytes: int, ranks: int, *, same_host: bool) -> int:
        """Duration of an operation of ``ranks`` members on a tensor of ``num_bytes``."""
        share = _SHARES[operation] * (ranks - 1) / ranks if operation in _SHARES else 1.0
        return self.latency_ns + round(num_bytes * share / (self.host_gbps if same_host else self.network_gbps))


FREE: Final = Network(latency_ns=0, host_gbps=float("inf"), network_gbps=float("inf"))
"""Communication that takes no time: what is left is the schedule."""
