"""Judge a cluster by what its ranks say of themselves and what was measured: findings, and a verdict for each node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from commtrace.analysis.communication.baseline import Measurement
from commtrace.analysis.communication.links import SLOW, SlowTraffic
from commtrace.benchmarks.facts import RankFacts
from commtrace.findings.formatting import format_ranges, ranges
from commtrace.trace.json_values import JsonObject

SLOW_DEVICE: Final = {"cuda": 0.9, "cpu": 0.5}
"""Largest share of the others' rate at which a device is slow. Cores of a busy machine differ by more than GPUs do."""

_MOST_NAMES: Final = 8


class PreflightFinding(NamedTuple):
    """What is wrong, and on which nodes."""

    check: str
    nodes: tuple[str, ...]  # empty: the whole job
    text: str


@dataclass(frozen=True, slots=True)
class PreflightVerdict:
    """The cluster, and each of its nodes."""

    nodes: tuple[str, ...]
    findings: tuple[PreflightFinding, ...]
    ranks: int
    checked: tuple[str, ...]  # checks that came to an end
    seconds: float

    @property
    def broken(self) -> tuple[str, ...]:
        """Return the nodes that a finding names."""
        named = {node for finding in self.findings for node in finding.nodes}
        return tuple(node for node in self.nodes if node in named)

    @property
    def is_good(self) -> bool:
        return not self.findings

    def sentence(self) -> str:
        if self.is_good:
            nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
            return f"Good: {self.ranks} ranks on {nodes} passed all checks."
        if not self.broken:
            return f"Not good: {self.findings[0].text}"
        return f"Not good: {len(self.broken)} of {len(self.nodes)} nodes have problems: {_listed(self.broken)}."

    def to_json(self) -> JsonObject:
        return {
            "verdict": self.sentence(),
            "good": self.is_good,
            "ranks": self.ranks,
            "nodes": [{"node": node, "good": node not in self.broken} for node in self.nodes],
            "findings": [
                {"check": finding.check, "nodes": list(finding.nodes), "text": finding.text}
                for finding in self.findings
            ],
            "checked": list(self.checked),
            "seconds": self.seconds,
        }


def _ranks(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return f"rank{'s' * (len(ordered) > 1)} {format_ranges(ranges(ordered))}"


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """The job as its launcher and scheduler describe it."""

    world_size: int
    ranks_per_node: int | None = None  # where ranks are numbered node by node
    nodes: tuple[str, ...] = ()  # that the scheduler gave to the job; empty if it does not say


def judge_absent(present: Mapping[int, RankFacts], expected: LaunchedJob, seconds: float) -> Iterator[PreflightFinding]:
    """Find ranks that never came, with the names of their nodes as far as others or the scheduler tell them.

    Args:
        seconds: how long they were waited for.
    """
    said = f"did not start, or did not reach rank 0, within {seconds:.3g} s"
    beside: dict[str, list[int]] = defaultdict(list)
    alone = []
    for rank in sorted(set(range(expected.world_size)) - set(present)):
        node = _node_beside(rank, present, expected.ranks_per_node)
        beside[node].append(rank) if node else alone.append(rank)
    for node, ranks_of_node in beside.items():
        yield PreflightFinding("started", (node,), f"{_ranks(ranks_of_node)} {said}")
    if alone:
        came = {
            _host(name)
            for rank_facts in present.values()
            for name in (rank_facts.scheduler_node, rank_facts.host, rank_facts.node)
        }
        silent = tuple(name for name in expected.nodes if _host(name) not in came)
        numbers = {rank // expected.ranks_per_node for rank in alone} if expected.ranks_per_node else set()
        # A list of more nodes than ranks are missing from has spare ones: which are to blame is then not known.
        is_certain = len(silent) == (len(numbers) or _missing_nodes(present, expected.world_size))
        text = f"{_ranks(alone)} {said}; {_where_nobody_came(silent, numbers, present)}"
        yield PreflightFinding("started", silent if is_certain else (), text)


def _host(name: str) -> str:
    """Return a name without its domain, which not all who tell it add; an address as it is."""
    host = name.partition(".")[0]
    return name if host.isdecimal() else host


def _missing_nodes(present: Mapping[int, RankFacts], world_size: int) -> int | None:
    """Return from how many nodes no rank came, if all nodes have equally many; None if they cannot."""
    came = Counter(rank_facts.node for rank_facts in present.values())
    nodes, rest = divmod(world_size, max(came.values()))
    return None if rest else nodes - len(came)


def _node_beside(rank: int, present: Mapping[int, RankFacts], ranks_per_node: int | None) -> str:
    """Return the node that ranks beside this one named; empty if none came, or they do not agree."""
    if not ranks_per_node:
        return ""
    first = rank - rank % ranks_per_node
    named = {present[neighbour].node for neighbour in range(first, first + ranks_per_node) if neighbour in present}
    return named.pop() if len(named) == 1 else ""


def _where_nobody_came(silent: Sequence[str], numbers: Collection[int], present: Mapping[int, RankFacts]) -> str:
    if silent:
        return f"no rank came from {_listed(silent)}"
    came = _listed(list(dict.fromkeys(rank_facts.node for rank_facts in present.values())))
    if not numbers:
        return f"ranks came from {came}"
    nodes = f"node{'s' * (len(numbers) > 1)} {format_ranges(ranges(sorted(numbers)))}"
    return f"these are the ranks of {nodes}, counted from 0 as --node-rank of torchrun; ranks came from {came}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def judge_reached(
    facts: Mapping[int, RankFacts], unreached: Mapping[int, Sequence[int] | None]
) -> Iterator[PreflightFinding]:
    """Find ranks that others cannot reach.

    Args:
        unreached: those that each rank could not reach; None if the rank did not say.
    """
    silent = {rank for rank, missed in unreached.items() if missed is None}
    by_target: dict[int, list[int]] = defaultdict(list)
    for rank, missed in unreached.items():
        for target in missed or ():
            by_target[target].append(rank)
    speaking = len(unreached) - len(silent)
    yield from judge_silent(facts, silent)
    for target, sources in sorted(by_target.items()):
        if target in silent:
            continue
        where = f"{facts[target].address} ({facts[target].interface or 'no interface'})"
        if len(sources) >= max(speaking - 1, 1) and speaking > 2:
            yield PreflightFinding("reached", (facts[target].node,), f"no rank reaches rank {target} at {where}")
        else:
            nodes = tuple(dict.fromkeys(facts[rank].node for rank in (*sources, target)))
            yield PreflightFinding("reached", nodes, f"{_ranks(sources)} cannot reach rank {target} at {where}")


def judge_silent(facts: Mapping[int, RankFacts], silent: Iterable[int]) -> Iterator[PreflightFinding]:
    """Name ranks that came, and say nothing any more."""
    for rank in sorted(silent):
        yield PreflightFinding("answers", (facts[rank].node,), f"{_ranks([rank])} started, but no longer answers")


def judge_settings(facts: Mapping[int, RankFacts]) -> Iterator[PreflightFinding]:
    """Find versions and variables that are not what most ranks have."""
    yield from _differing(facts, "versions", lambda rank_facts: rank_facts.versions)
    yield from _differing(facts, "environment", lambda rank_facts: rank_facts.environment)
    yield from _differing(facts, "device", lambda rank_facts: {"device": rank_facts.device})


def _differing(
    facts: Mapping[int, RankFacts], check: str, values: Callable[[RankFacts], Mapping[str, str]]
) -> Iterator[PreflightFinding]:
    for name in sorted({name for rank_facts in facts.values() for name in values(rank_facts)}):
        by_value: dict[str | None, list[int]] = defaultdict(list)
        for rank, rank_facts in facts.items():
            by_value[values(rank_facts).get(name)].append(rank)
        usual, _ = max(by_value.items(), key=lambda item: len(item[1]))
        for value, ranks in by_value.items():
            if value != usual:
                is_now, is_else = (f"{text!r}" if text is not None else "not set" for text in (value, usual))
                text = f"{name} is {is_now} on {_ranks(ranks)}, and {is_else} on the others"
                yield PreflightFinding(check, tuple(dict.fromkeys(facts[rank].node for rank in ranks)), text)


def judge_interfaces(facts: Mapping[int, RankFacts]) -> Iterator[PreflightFinding]:
    """Find addresses that other hosts cannot use, names of interfaces that are not there, and slower interfaces."""
    several = len({rank_facts.host for rank_facts in facts.values()}) > 1
    for rank_facts in facts.values():
        if several and rank_facts.address.startswith("127."):
            only_loopback = f"rank {rank_facts.rank} has only the loopback address towards rank 0"
            text = f"{only_loopback}: MASTER_ADDR must be of the network"
            yield PreflightFinding("interface", (rank_facts.node,), text)
    missing = {(rank_facts.node, name) for rank_facts in facts.values() for name in rank_facts.missing_interfaces}
    for node, name in sorted(missing):
        yield PreflightFinding("interface", (node,), f"{name}: {node} has no such interface")
    yield from _slower_interfaces(facts)


def _slower_interfaces(facts: Mapping[int, RankFacts]) -> Iterator[PreflightFinding]:
    speeds = {
        rank_facts.node: (rank_facts.interface, rank_facts.interface_mbits)
        for rank_facts in facts.values()
        if rank_facts.interface_mbits
    }
    fastest = max((speed for _, speed in speeds.values()), default=0)
    for node, (name, speed) in sorted(speeds.items()):
        if speed < fastest:
            text = f"{node} reaches the others through {name} with {speed} Mbit/s, other nodes have {fastest} Mbit/s"
            yield PreflightFinding("interface", (node,), text)


def judge_affinity(facts: Mapping[int, RankFacts]) -> Iterator[PreflightFinding]:
    """Find ranks that share too few cores, run far from their GPU, or share a GPU."""
    shared: dict[tuple[str, tuple[int, ...]], list[RankFacts]] = defaultdict(list)
    for rank_facts in facts.values():
        shared[rank_facts.host, tuple(rank_facts.cores)].append(rank_facts)
    for (_, cores), sharing in shared.items():
        if len(sharing) > len(cores) and len(cores) < sharing[0].machine_cores:
            numbers = _ranks(rank_facts.rank for rank_facts in sharing)
            text = f"{numbers} share {len(cores)} of {sharing[0].machine_cores} cores: bind each to its own"
            yield PreflightFinding("affinity", tuple(dict.fromkeys(rank_facts.node for rank_facts in sharing)), text)
    for rank_facts in facts.values():
        if rank_facts.device_cores and not set(rank_facts.device_cores) & set(rank_facts.cores):
            cores_nearby = format_ranges(ranges(rank_facts.device_cores))
            text = f"rank {rank_facts.rank} may not run on a core next to its GPU ({cores_nearby})"
            yield PreflightFinding("affinity", (rank_facts.node,), text)
    devices = Counter((rank_facts.host, rank_facts.device_id) for rank_facts in facts.values() if rank_facts.device_id)
    for (host, device), count in devices.items():
        if count > 1:
            sharing = [
                rank_facts for rank_facts in facts.values() if (rank_facts.host, rank_facts.device_id) == (host, device)
            ]
            yield PreflightFinding(
                "affinity", (sharing[0].node,), f"{_ranks(rank_facts.rank for rank_facts in sharing)} use the same GPU"
            )


def judge_devices(facts: Mapping[int, RankFacts], rates: Mapping[int, float], kind: str) -> Iterator[PreflightFinding]:
    """Find devices that multiply matrices slower than the median of all."""
    usual = median(rates.values())
    for rank, rate in sorted(rates.items()):
        if rate < SLOW_DEVICE[kind] * usual:
            text = f"the device of rank {rank} multiplies matrices at {rate / usual:.0%} of the median rate"
            yield PreflightFinding("device speed", (facts[rank].node,), text)


def judge_links(slow: SlowTraffic | None) -> Iterator[PreflightFinding]:
    """Find pairs of nodes with less bandwidth than the others."""
    if slow is None or slow.within_nodes:
        return
    common = slow.common_node
    for link in slow.links:
        nodes = (common,) if common is not None else (link.source, link.target)
        text = f"{link.source} and {link.target} reach {link.gbps:.3g} GB/s, other nodes {slow.usual_gbps:.3g} GB/s"
        yield PreflightFinding("bandwidth", nodes, text)


def judge_within_nodes(measurements: Sequence[Measurement]) -> Iterator[PreflightFinding]:
    """Find nodes whose ranks are connected more slowly than those of groups alike."""
    for size in sorted({len(measurement.ranks) for measurement in measurements}):
        gbps_of_node = {
            measurement.nodes[0]: measurement.busbw_gbps.mean
            for measurement in measurements
            if len(measurement.ranks) == size
        }
        usual = median(gbps_of_node.values())
        for node, gbps in sorted(gbps_of_node.items()):
            if gbps <= SLOW * usual:
                text = f"within {node} ranks reach {gbps:.3g} GB/s, in other nodes {usual:.3g} GB/s (median)"
                yield PreflightFinding("bandwidth", (node,), text)
