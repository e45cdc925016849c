"""Recording rules and alerts, written down once; ``python -m commtrace.exporters.prometheus.generate`` makes the files.

A rank's *work* is its step without waiting for others. Ranks of one run and pipeline stage do the same work, so the one
whose work takes longer is slow; those that wait for it have the same work as ever. The yardstick is the median of the
stage (of two ranks the faster one, as the median of two is half the slow one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

PEERS: Final = "run_id, pp"
"""Ranks with equal labels do the same work. Without pipeline all ranks of the run are peers."""


class Timing(NamedTuple):
    """How far the rules look and how long they wait, as Prometheus writes durations.

    Attributes:
        window: over which rates are taken: several scrapes and several steps long.
        baseline: how long ago "before" was, for what went up.
        persists: how long something must be true before it is an alert.
        stalled: shortest silence that is one, seconds.
    """

    window: str = "5m"
    baseline: str = "1h"
    persists: str = "5m"
    stalled: int = 120


class RecordingRule(NamedTuple):
    """A series that Prometheus computes: ``level:metric:operation``."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert.

    Attributes:
        name: of the alert.
        expr: true where it fires.
        operands: the parts of ``expr`` that must have data for it to be able to fire.
        wait: how long it must be true.
        severity: ``warning`` or ``critical``.
        summary, description: what is said, and what to do.
    """

    name: str
    expr: str
    operands: tuple[str, ...]
    wait: str
    severity: str
    summary: str
    description: str

    def __post_init__(self) -> None:
        assert all(operand in self.expr for operand in self.operands), self.name


def recording_rules(timing: Timing) -> tuple[RecordingRule, ...]:
    """In the order in which they build on each other."""
    window = timing.window
    steps = f"(rate(commtrace_step_duration_seconds_count[{window}]) > 0)"
    seconds = f"(rate(commtrace_step_duration_seconds_sum[{window}]) > 0)"
    work = "commtrace:work_seconds:per_step"
    return (
        RecordingRule("commtrace:step_seconds:mean", f"rate(commtrace_step_duration_seconds_sum[{window}])\n/ {steps}"),
        RecordingRule(work, f"rate(commtrace_work_seconds_total[{window}])\n/ {steps}"),
        RecordingRule(
            "commtrace:work_seconds:typical",
            f"(quantile by ({PEERS}) (0.5, {work}) and count by ({PEERS}) ({work}) > 2)\n"
            f"or (min by ({PEERS}) ({work}) and count by ({PEERS}) ({work}) == 2)",
        ),
        RecordingRule(
            "commtrace:straggler_score:ratio",
            f"{work}\n/ on ({PEERS}) group_left ()\n(commtrace:work_seconds:typical > 0)",
        ),
        RecordingRule(
            "commtrace:straggler_excess_seconds:per_step",
            f"{work}\n- on ({PEERS}) group_left ()\ncommtrace:work_seconds:typical",
        ),
        RecordingRule(
            "commtrace:exposed:ratio",
            f"sum without (operation, role) (rate(commtrace_exposed_seconds_total[{window}]))\n/ {seconds}",
        ),
        RecordingRule(
            "commtrace:exposed_by_role:ratio",
            f"sum without (operation) (rate(commtrace_exposed_seconds_total[{window}]))\n"
            f"/ ignoring (role) group_left ()\n{seconds}",
        ),
        RecordingRule("commtrace:bubble:ratio", f"rate(commtrace_bubble_seconds_total[{window}])\n/ {seconds}"),
    )


def alerts(timing: Timing) -> tuple[Alert, ...]:
    """Every alert."""
    return (
        _straggler(timing),
        _went_up(
            timing, "CommtraceExposedCommunicationUp", "commtrace:exposed:ratio", "exposed communication",
            "commtrace summary on the run's directory tells which communication, and waiting from transfer.",
        ),
        _went_up(
            timing, "CommtraceBubbleUp", "commtrace:bubble:ratio", "the pipeline bubble",
            "commtrace pipeline on the run's directory tells whether schedule, uneven stages or transfers cause it.",
        ),
        _stalled(timing),
        _hung(),
        _dropped(timing),
        _clock(timing),
    )  # fmt: skip


def _straggler(timing: Timing) -> Alert:
    score, excess = "commtrace:straggler_score:ratio", "commtrace:straggler_excess_seconds:per_step"
    mean = "commtrace:step_seconds:mean"
    return Alert(
        name="CommtraceStraggler",
        expr=f"{score} > 1.1\nand {excess} > 0.05 * {mean}",
        operands=(score, excess, mean),
        wait=timing.persists,
        severity="warning",
        summary="Rank {{ $labels.rank }} of {{ $labels.run_id }} on {{ $labels.node }} is slow",
        description=(
            "Its own work takes {{ $value | humanize }} times that of the ranks of its stage; the others wait for it. "
            "commtrace straggler on the run's directory tells the cause and the cost."
        ),
    )


def _went_up(timing: Timing, name: str, ratio: str, what: str, advice: str) -> Alert:
    now, before = f"avg by (run_id) ({ratio})", f"avg by (run_id) ({ratio} offset {timing.baseline})"
    return Alert(
        name=name,
        expr=f"{now}\n- {before}\n> 0.05",
        operands=(now, before),
        wait=timing.persists,
        severity="warning",
        summary=f"In {{{{ $labels.run_id }}}} {what} takes more of each step than {timing.baseline} ago",
        description=f"By {{{{ $value | humanizePercentage }}}} of the step, in the mean over ranks. {advice}",
    )


def _stalled(timing: Timing) -> Alert:
    silence = "time() - max by (run_id) (commtrace_last_step_timestamp_seconds)"
    typical = "avg by (run_id) (commtrace_step_duration_seconds_sum / (commtrace_step_duration_seconds_count > 0))"
    return Alert(
        name="CommtraceStepStalled",
        expr=f"{silence}\n> clamp_min(10 * {typical}, {timing.stalled})",
        operands=(silence, typical),
        wait="0s",
        severity="critical",
        summary="{{ $labels.run_id }} has completed no step for {{ $value | humanizeDuration }}",
        description=(
            "Its processes still answer, so it hangs or saves or evaluates. commtrace_communications_in_flight tells "
            "which ranks are inside a communication, commtrace_last_step which of them are behind."
        ),
    )


def _hung() -> Alert:
    hung = "sum by (run_id) (commtrace_hung)"
    return Alert(
        name="CommtraceHung",
        expr=f"{hung} > 0",
        operands=(hung,),
        wait="0s",
        severity="critical",
        summary="{{ $labels.run_id }} hangs: {{ $value | humanize }} of its ranks say that nothing moves in them",
        description=(
            "commtrace doctor on the run's directory tells which rank did not arrive where, and where in the program "
            "it is; with the monitor, so does the log of rank 0."
        ),
    )


def _dropped(timing: Timing) -> Alert:
    drops = f"sum by (run_id, rank, node, kind) (increase(commtrace_spans_dropped_total[{timing.window}]))"
    return Alert(
        name="CommtraceSpansDropped",
        expr=f"{drops} > 0",
        operands=(drops,),
        wait="0s",
        severity="warning",
        summary="commtrace loses {{ $labels.kind }} spans on rank {{ $labels.rank }} of {{ $labels.run_id }}",
        description=(
            "{{ $value | humanize }} of them lately: what is computed from them is too small. A full disk is said in "
            "the rank's log; a full buffer grows with COMMTRACE_BUFFER_SPANS."
        ),
    )


def _clock(timing: Timing) -> Alert:
    residual = "commtrace_clock_residual_seconds"
    return Alert(
        name="CommtraceClockResidual",
        expr=f"{residual} > 0.0001",
        operands=(residual,),
        wait=timing.persists,
        severity="warning",
        summary="The clock of rank {{ $labels.rank }} on {{ $labels.node }} cannot be read closely",
        description=(
            "Its readings are only good to {{ $value | humanizeDuration }}: times of its node cannot be compared with "
            "those of others more closely than that. The node is overloaded, or its clock source is slow."
        ),
    )
