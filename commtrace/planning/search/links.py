"""What a run measured of its network: the bandwidth of each role, within nodes and between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.analysis.communication.baseline import GroupKind, NetworkBaseline
from commtrace.analysis.communication.rates import parse_rate
from commtrace.analysis.communication.table import Communication, with_exact_rates
from commtrace.errors import ConfigurationError
from commtrace.planning.communication import Traffic

_NAMES_IN_RUNS: Final = {"dp-cp": ("dp-cp", "dp"), "expert-dp": ("expert-dp", "ep-dp", "dp-cp", "dp")}
"""A role of a plan under the names that frameworks give its process group."""

_LEFT_OUT: Final = 0.02
"""Bandwidths are of calls of at least this share of the bytes of the largest ones: small calls show the latency."""


class RoleReach(NamedTuple):
    """A role, and whether its groups reach over nodes."""

    role: str
    between_nodes: bool


class Bandwidth(NamedTuple):
    """A bandwidth on the bus, and the bytes of the calls of which it is."""

    gbps: float
    bytes_each: float
    is_bound: bool = False  # it is a lower bound: most of the bytes are in calls without exact times


@dataclass(frozen=True, slots=True)
class Links:
    """The bandwidths of a run; GB/s are bytes per ns."""

    bandwidths: Mapping[RoleReach, Bandwidth]
    exposed: Mapping[str, float]  # by role: the share of its time that no work hid
    baseline: NetworkBaseline | None = None  # what the network carries, for roles that the run does not have

    def has(self, reach: RoleReach) -> bool:
        """Return whether the role's own bandwidth is known."""
        return self._bandwidth_of(reach) is not None

    @property
    def bounds(self) -> tuple[str, ...]:
        """Return the roles whose bandwidth is a lower bound."""
        return tuple(sorted({reach.role for reach, bandwidth in self.bandwidths.items() if bandwidth.is_bound}))

    def in_baseline(self, traffic: Traffic, between_nodes: bool) -> bool:
        """Return whether the baseline has such calls."""
        return self._baseline_ns(traffic, between_nodes) is not None

    def with_given(self, gbps: Mapping[RoleReach, float], baseline: NetworkBaseline | None = None) -> Links:
        """Return these links with other bandwidths for some roles, and a baseline for those that the run lacks."""
        given = {reach: Bandwidth(bandwidth_gbps, float("inf")) for reach, bandwidth_gbps in gbps.items()}
        return replace(self, bandwidths={**self.bandwidths, **given}, baseline=baseline)

    def ns(self, traffic: Traffic, between_nodes: bool) -> float:
        """Return the time of all calls of one kind.

        Without a measurement of the role it is that of such calls in the baseline. If that has none, the bandwidth of
        another role is taken which uses the same links: that with the largest calls, because small ones show the
        latency.

        Raises:
            ConfigurationError: no bandwidth of this reach was measured.
        """
        bandwidth = self._bandwidth_of(RoleReach(traffic.role, between_nodes))
        if bandwidth is None:
            if (time_ns := self._baseline_ns(traffic, between_nodes)) is not None:
                return time_ns
            bandwidth = self._of_another_role(between_nodes)
        if bandwidth is None:
            where = "between nodes" if between_nodes else "within a node"
            raise ConfigurationError(f"no bandwidth {where} was measured for {traffic.role}: give --bandwidth")
        factor = bus_factor(traffic.operation, traffic.group_size)
        return traffic.tensor_bytes * factor / bandwidth.gbps

    def borrowing_otherwise(self, reach: RoleReach) -> tuple[Links, ...]:
        """Return links in which this role, which borrows one, has the slowest and the fastest of the same reach.

        Roles with small calls do not count. Empty if there is only one.
        """
        same_reach = [
            bandwidth for where, bandwidth in self.bandwidths.items() if where.between_nodes == reach.between_nodes
        ]
        largest = max((bandwidth.bytes_each for bandwidth in same_reach), default=0.0)
        gbps = {bandwidth.gbps for bandwidth in same_reach if bandwidth.bytes_each >= _LEFT_OUT * largest}
        if len(gbps) < 2:
            return ()
        return tuple(self.with_given({reach: each}, self.baseline) for each in (min(gbps), max(gbps)))

    def _bandwidth_of(self, reach: RoleReach) -> Bandwidth | None:
        reaches = (RoleReach(role, reach.between_nodes) for role in _names(reach.role))
        return next((self.bandwidths[reach] for reach in reaches if reach in self.bandwidths), None)

    def _of_another_role(self, between_nodes: bool) -> Bandwidth | None:
        others = [bandwidth for reach, bandwidth in self.bandwidths.items() if reach.between_nodes == between_nodes]
        return max(others, key=lambda bandwidth: bandwidth.bytes_each, default=None)

    def _baseline_ns(self, traffic: Traffic, between_nodes: bool) -> float | None:
        if self.baseline is None:
            return None
        kind = GroupKind(traffic.operation, traffic.group_size, between_nodes)
        each_ns = self.baseline.call_ns(kind, traffic.bytes_per_call)
        return None if each_ns is None else traffic.count * each_ns

    def exposed_share(self, role: str) -> float:
        return next((self.exposed[name] for name in _names(role) if name in self.exposed), 1.0)


def _names(role: str) -> tuple[str, ...]:
    return _NAMES_IN_RUNS.get(role, (role,))


def measured_links(table: Iterable[Communication]) -> Links:
    """Return the bandwidths of a run's communication; the time of a role is that of all its calls together."""
    bus_bytes: dict[RoleReach, float] = {}
    time_ns: dict[RoleReach, float] = {}
    calls: dict[RoleReach, int] = {}
    tensor_bytes: dict[RoleReach, int] = {}
    bounds: set[RoleReach] = set()
    exposed_ns: dict[str, int] = {}
    in_flight_ns: dict[str, int] = {}
    rows = list(table)
    largest = {row.role: max(_bytes_each(of_role) for of_role in rows if of_role.role == row.role) for row in rows}
    for row in rows:
        exposed_ns[row.role] = exposed_ns.get(row.role, 0) + row.exposed_ns
        in_flight_ns[row.role] = in_flight_ns.get(row.role, 0) + row.exposed_ns + row.hidden_ns
    for row in with_exact_rates(row for row in rows if _bytes_each(row) >= _LEFT_OUT * largest[row.role]):
        if not row.busbw_gbps or row.inter_node is None or not row.num_bytes or not row.group_size:
            continue
        reach = RoleReach(row.role, row.inter_node)
        moved = row.num_bytes * bus_factor(row.operation, row.group_size)
        bus_bytes[reach] = bus_bytes.get(reach, 0) + moved
        time_ns[reach] = time_ns.get(reach, 0) + moved / row.busbw_gbps
        calls[reach] = calls.get(reach, 0) + row.count
        tensor_bytes[reach] = tensor_bytes.get(reach, 0) + row.num_bytes
        if row.bandwidth_is_bound:
            bounds.add(reach)
    return Links(
        bandwidths={
            reach: Bandwidth(bus_bytes[reach] / time_ns[reach], tensor_bytes[reach] / calls[reach], reach in bounds)
            for reach in bus_bytes
        },
        exposed={role: exposed_ns[role] / ns for role, ns in in_flight_ns.items() if ns},
    )


def _bytes_each(row: Communication) -> float:
    return (row.num_bytes or 0) / max(row.count, 1)


def given_bandwidths(texts: Iterable[str]) -> Iterator[tuple[RoleReach, float]]:
    """Yield the bandwidths of options such as ``tp=200GB/s`` (within a node) and ``dp-cp=between:200Gbit/s``.

    A number without a unit is GB/s.

    Raises:
        ConfigurationError: a text is of another form.
    """
    for text in texts:
        role, _, value = text.partition("=")
        between_nodes, rate = value.startswith("between:"), value.removeprefix("between:")
        try:
            bytes_per_second = parse_rate(rate, plain="GB") if role else 0.0
        except ValueError:
            bytes_per_second = 0.0
        if not bytes_per_second:
            raise ConfigurationError(
                f"--bandwidth {text}: write a role and a rate, as tp=300GB/s or dp-cp=between:200Gbit/s"
            )
        yield RoleReach(role, between_nodes), bytes_per_second / 1e9
