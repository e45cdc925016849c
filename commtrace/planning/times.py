"""How long a plan's communication takes at some bandwidths, and the bandwidth at which compute would hide it.

>>> role_times(plan, {"tp": 300e9}, compute_seconds=0.4)[0].seconds  # doctest: +SKIP
0.21
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.analysis.communication.rates import parse_rate
from commtrace.analysis.communication.table import (
    Communication,
    CommunicationSums,
    communication_sums,
    with_exact_rates,
)
from commtrace.analysis.windows.run import MeasuredRun
from commtrace.errors import ConfigurationError
from commtrace.planning.flops import flops_per_sequence
from commtrace.planning.pipeline_time import ChunkTimes, pipeline_ns
from commtrace.planning.plan import Plan, StagePlan

ALL: Final = "all"

_PIPELINE: Final = "pp"
_NS: Final = 10**9

_FULL_RECOMPUTATION: Final = 4 / 3  # the forward, a third of the work, once more


class RoleTime(NamedTuple):
    """The communication of one role, of each GPU on one stage in one iteration."""

    stage: int
    role: str
    wire_bytes: int
    bytes_per_second: float | None  # bus bandwidth; None if it is not known
    seconds: float | None  # without any other communication; with latencies only if it was measured by size
    hiding_bytes_per_second: float | None  # that takes as long as compute; None if its time is not known

    @property
    def is_hidden(self) -> bool | None:
        """Whether compute is long enough to hide it, if nothing else is to be hidden; None if a time is not known."""
        if self.bytes_per_second is None or self.hiding_bytes_per_second is None:
            return None
        return self.bytes_per_second >= self.hiding_bytes_per_second


class IterationTime(NamedTuple):
    """What compute and communication of each GPU take together on the slowest stage, without waiting for others."""

    stage: int  # with the largest sum; another one can have the longest role
    all_hidden_seconds: float  # the longest of compute and each role, on all stages
    none_hidden_seconds: float  # the sum of all on this stage


def iteration_time(roles: Iterable[RoleTime], compute_seconds: float | None) -> IterationTime | None:
    """Return the time of the slowest stage; None without compute, or if no role has a time.

    Roles without a time are left out, so that both are lower bounds.
    """
    by_stage: dict[int, list[float]] = defaultdict(list)
    for role in roles:
        if role.seconds is not None:
            by_stage[role.stage].append(role.seconds)
    if compute_seconds is None or not by_stage:
        return None
    stage, seconds = max(by_stage.items(), key=lambda item: sum(item[1]))
    longest = max(map(max, by_stage.values()))
    return IterationTime(stage, max(compute_seconds, longest), compute_seconds + sum(seconds))


class PipelinedTime(NamedTuple):
    """How long an iteration takes with its pipeline: the order of its schedule, replayed."""

    all_hidden_seconds: float  # only compute, and no longer than the longest role
    none_hidden_seconds: float  # with communication of layers in forwards and backwards, messages, and the rest behind


def pipelined_time(plan: Plan, roles: Iterable[RoleTime], compute_seconds: float | None) -> PipelinedTime | None:
    """Return the time of an iteration with the bubble; None without compute, times or a pipeline.

    Roles without a time are left out, so that both are lower bounds. A stage computes a third of its time, with full
    recomputation a quarter, in forwards; its communication within layers is divided likewise.
    """
    layout = plan.layout
    of_stage: dict[int, dict[str, float]] = defaultdict(dict)
    for role in roles:
        if role.seconds is not None:
            of_stage[role.stage][role.role] = role.seconds
    if compute_seconds is None or not of_stage or layout.pp == 1:
        return None
    only_compute, with_communication, message_ns, once = [], [], [], 0.0
    for stage in plan.stages:
        seconds = of_stage[stage.stage]
        messages = sum(row.count for row in stage.traffic if row.role == _PIPELINE)
        message_ns.append(round(seconds.get(_PIPELINE, 0.0) * _NS / max(messages, 1)))
        in_step = {row.role for row in stage.traffic if row.when == "step"}
        in_layers = {row.role for row in stage.traffic if row.when != "step"} - {_PIPELINE}
        once = max(once, sum(ns for role, ns in seconds.items() if role in in_step - in_layers))
        communication = sum(ns for role, ns in seconds.items() if role in in_layers)
        only_compute.append(_chunk_times(plan, stage, compute_seconds))
        with_communication.append(_chunk_times(plan, stage, compute_seconds + communication))
    longest = max(max(seconds.values()) for seconds in of_stage.values())
    return PipelinedTime(
        max(pipeline_ns(only_compute, layout.microbatches) / _NS, longest),
        pipeline_ns(with_communication, layout.microbatches, message_ns) / _NS + once,
    )


def _chunk_times(plan: Plan, stage: StagePlan, seconds: float) -> list[ChunkTimes]:
    """Return the forward and the backward of a microbatch in each chunk of a stage that works for so long."""
    layout = plan.layout
    forward = 1 / 4 if layout.recompute == "full" else 1 / 3
    layers = [len(chunk) for chunk in stage.layers]
    ns = [seconds * _NS / layout.microbatches * of_chunk / sum(layers) for of_chunk in layers]
    return [ChunkTimes(round(chunk_ns * forward), round(chunk_ns * (1 - forward))) for chunk_ns in ns]


def parse_bandwidths(texts: Iterable[str]) -> dict[str, float]:
    """Return bytes per second by role, of ``tp=300GB/s`` or ``all=200Gbit/s``.

    Raises:
        ConfigurationError: a text is neither.
    """
    bandwidths = {}
    for text in texts:
        role, _, rate = text.partition("=")
        try:
            bandwidths[role] = parse_rate(rate if role else "")
        except ValueError:
            raise ConfigurationError(
                f"--bandwidth {text}: write a role and a rate, as tp=300GB/s or all=200Gbit/s"
            ) from None
    return bandwidths


def compute_seconds(plan: Plan, tflops: float) -> float:
    """Return the mean compute time of a GPU in an iteration, at a rate of 10¹² FLOPs per second that it achieves."""
    layout = plan.layout
    sequences = layout.microbatch * layout.microbatches * layout.dp
    repeated = _FULL_RECOMPUTATION if layout.recompute == "full" else 1
    return repeated * flops_per_sequence(plan.model) * sequences / layout.world_size / (tflops * 1e12)


def role_times(
    plan: Plan,
    bandwidths: Mapping[str, float],
    compute_seconds: float | None = None,
    measured: Mapping[tuple[int, str], float] | None = None,
) -> tuple[RoleTime, ...]:
    """Return the time of every role on every stage.

    Args:
        bandwidths: Bus bandwidth by role, bytes per second; ``all`` for roles that are not named.
        compute_seconds: Of each GPU in an iteration.
        measured: Seconds by stage and role, which go before bandwidths; their bandwidth is what they amount to.

    Raises:
        ConfigurationError: a role has no communication in the plan.
    """
    times = []
    for stage in plan.stages:
        wire_bytes: dict[str, int] = defaultdict(int)
        for row in stage.traffic:
            wire_bytes[row.role] += row.wire_bytes
        for role, num_bytes in wire_bytes.items():
            if num_bytes:
                rate = bandwidths.get(role, bandwidths.get(ALL))
                seconds = (measured or {}).get((stage.stage, role), None if rate is None else num_bytes / rate)
                rate = None if seconds is None else num_bytes / seconds
                hiding = num_bytes / compute_seconds if compute_seconds else None
                times.append(RoleTime(stage.stage, role, num_bytes, rate, seconds, hiding))
    known = {time.role for time in times}
    unknown = set(bandwidths) - known - {ALL}
    if unknown:
        raise ConfigurationError(
            f"--bandwidth names {', '.join(sorted(unknown))}, but the plan communicates over "
            f"{', '.join(sorted(known)) or 'nothing'}"
        )
    return tuple(times)


def measure_communication(analysis: Analysis) -> CommunicationSums:
    """Measure bandwidths and compute; to be handed to ``measure_run``."""
    context = analysis.context
    return communication_sums(context.run, context.matches, analysis.partition, context.roles, context.steps)


class MeasuredJob(NamedTuple):
    """What a recorded run achieved."""

    bandwidths: Mapping[str, float]  # bus bandwidth by role, bytes per second
    compute_seconds: float  # of a rank in a step
    at_least: tuple[str, ...] = ()  # roles whose bandwidth is a lower bound


def measured_rates(measured: MeasuredRun[CommunicationSums], plan: Plan) -> MeasuredJob:
    """Return the bandwidths of a run by the roles of a plan, and its compute in a step."""
    by_role: dict[str, list[Communication]] = defaultdict(list)
    for row in measured.result.table(measured.recorded):
        by_role[row.role].append(row)
    roles = {row.role for stage in plan.stages for row in stage.traffic if row.wire_bytes}
    rows_of = {role: with_exact_rates(by_role[role] or by_role[role.removesuffix("-cp")]) for role in roles}
    rates = {role: _rate(rows) for role, rows in rows_of.items()}
    at_least = tuple(sorted(role for role, rows in rows_of.items() if any(row.bandwidth_is_bound for row in rows)))
    steps = max(len(measured.steps.used), 1) * max(len(measured.recorded.ranks), 1)
    return MeasuredJob(
        {role: rate for role, rate in rates.items() if rate is not None},
        measured.result.compute_ns / 1e9 / steps,
        at_least,
    )


def _rate(rows: Iterable[Communication]) -> float | None:
    """Return the bytes on the bus over the time that they took, of all operations of a role."""
    on_the_bus = seconds = 0.0
    for row in rows:
        if row.busbw_gbps and row.num_bytes and row.group_size:
            moved = row.num_bytes * bus_factor(row.operation, row.group_size)
            on_the_bus += moved
            seconds += moved / (row.busbw_gbps * 1e9)
    return on_the_bus / seconds if seconds else None
