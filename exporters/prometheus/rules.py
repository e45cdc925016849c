"""Recording rules and alerts for Prometheus: ``python -m commtrace.exporters.prometheus.rules`` writes the files.

A rank is slow if its *work*, its step without waiting, takes longer than the lower quartile of its run and stage (of
two ranks the faster one), so up to half of the ranks may be slow. PromQL cannot cluster ranks (docs/stragglers.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

PEERS: Final = "run_id, pp"
"""Ranks with equal labels do the same work. Without pipeline all ranks of the run are peers."""


_DIRECTORY: Final = (
    '{{ with printf "last_over_time(commtrace_run_info{run_id=%q}[1h])" $labels.run_id | query }}'
    '{{ . | first | label "directory" }}{{ else }}RUN{{ end }}'
)
"""The run's directory in an annotation, if a rank exports it."""

_TARGETS: Final = 'up{run_id!="", local_rank!=""}'
"""The ranks in target files."""

_PAUSING: Final = "max by (run_id) (sum without (phase) (commtrace_open_phase) > 0 and commtrace_hung == 0)"
"""Runs in which a rank saves or evaluates and does not hang: the others may wait for it."""


_FEWEST_STEPS: Final = 4
"""With fewer steps in the short window, a single odd step would be an alert."""


class Timing(NamedTuple):
    """Time ranges of the rules, in Prometheus' notation."""

    window: str = "5m"  # of rates: several scrapes and several steps
    short_window: str = "45s"  # of rates in alerts, if it holds four steps; else window
    baseline: str = "1h"  # age of the value to compare with
    stalled: int = 120  # least silence, seconds
    gone: str = "45s"  # time without an answer of a rank


class RecordingRule(NamedTuple):
    """A series that Prometheus computes: ``level:metric:operation``."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert; its ``operands`` are the parts of ``expr`` that need data for it to work."""

    name: str
    expr: str
    operands: tuple[str, ...]
    severity: str
    summary: str
    description: str

    def __post_init__(self) -> None:
        assert all(operand in self.expr for operand in self.operands), self.name


def recording_rules(timing: Timing) -> tuple[RecordingRule, ...]:
    """Return the recording rules; each uses only earlier ones."""
    window = timing.window
    steps = f"(rate(commtrace_step_duration_seconds_count[{window}]) > 0)"
    seconds = f"(rate(commtrace_step_duration_seconds_sum[{window}]) > 0)"
    work = "commtrace:work_seconds:per_step"
    return (
        RecordingRule("commtrace:step_seconds:mean", f"rate(commtrace_step_duration_seconds_sum[{window}])\n/ {steps}"),
        RecordingRule(
            work, _soon(timing, "rate(commtrace_work_seconds_total[{window}])", "commtrace_step_duration_seconds_count")
        ),
        RecordingRule(
            "commtrace:work_seconds:typical",
            f"(quantile by ({PEERS}) (0.25, {work}) and count by ({PEERS}) ({work}) > 2)\n"
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
            _soon(
                timing,
                "sum without (operation, role) (rate(commtrace_exposed_seconds_total[{window}]))",
                "commtrace_step_duration_seconds_sum",
            ),
        ),
        RecordingRule(
            "commtrace:exposed_by_role:ratio",
            f"sum without (operation) (rate(commtrace_exposed_seconds_total[{window}]))\n"
            f"/ ignoring (role) group_left ()\n{seconds}",
        ),
        RecordingRule(
            "commtrace:bubble:ratio",
            _soon(timing, "rate(commtrace_bubble_seconds_total[{window}])", "commtrace_step_duration_seconds_sum"),
        ),
    )


def _soon(timing: Timing, rate: str, of: str) -> str:
    """Divide ``rate``, a text with ``{window}``, by the rate of the counter ``of``, over the short window if it can."""

    def over(window: str) -> str:
        return f"{rate.format(window=window)}\n/ (rate({of}[{window}]) > 0)"

    short = timing.short_window
    enough = f"increase(commtrace_step_duration_seconds_count[{short}]) >= {_FEWEST_STEPS}"
    return f"({over(short)}\nand {enough})\nor ({over(timing.window)})"


def alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return every alert."""
    # None has a "for": a restarted Prometheus forgets how long a condition was true. Means or minima over less than a
    # minute instead fire and clear within a minute, and a single odd step counts little.
    return (
        _straggler(),
        _went_up(
            timing, "CommtraceExposedCommunicationUp", "commtrace:exposed:ratio", "exposed communication",
            "Where CommtraceStraggler fires as well, the others wait for that rank. Else look at the network. Which "
            f"communication, and waiting from transfer: commtrace summary {_DIRECTORY}.",
        ),
        _went_up(
            timing, "CommtraceBubbleUp", "commtrace:bubble:ratio", "the pipeline bubble",
            f"Whether schedule, uneven stages, a slow rank or transfers cause it: commtrace pipeline {_DIRECTORY}.",
        ),
        _stalled(timing),
        _hung(),
        _gone(timing),
        _dropped(timing),
        _clock(timing),
    )  # fmt: skip


def _straggler() -> Alert:
    score, excess = "commtrace:straggler_score:ratio", "commtrace:straggler_excess_seconds:per_step"
    mean = "commtrace:step_seconds:mean"
    return Alert(
        name="CommtraceStraggler",
        expr=f"{score} > 1.1\nand {excess} > 0.05 * {mean}",
        operands=(score, excess, mean),
        severity="warning",
        summary="Rank {{ $labels.rank }} of {{ $labels.run_id }} on {{ $labels.node }} is slow",
        description=(
            "Its own work takes {{ $value | humanize }} times that of the ranks of its stage; the others wait for it. "
            f"Cause, cost and what to do: commtrace straggler {_DIRECTORY}. On {{{{ $labels.node }}}}, look at clocks, "
            "throttling and errors of its device and at other processes; move the rank to see whether "
            "the slowness moves with it."
        ),
    )


def _went_up(timing: Timing, name: str, ratio: str, what: str, advice: str) -> Alert:
    now = f"avg by (run_id) ({ratio})"
    # The mean over a few minutes an hour ago: one odd moment must not be the reference.
    before = f"avg by (run_id) (avg_over_time({ratio}[{timing.window}] offset {timing.baseline}))"
    # While one rank saves or evaluates, and shortly after, the others rightly wait for it.
    pauses = f"max by (run_id) (max_over_time(commtrace_open_phase[{timing.short_window}]))"
    return Alert(
        name=name,
        expr=f"{now}\n- {before}\n> 0.05\nunless {pauses} > 0",
        operands=(now, before, pauses),
        severity="warning",
        summary=f"In {{{{ $labels.run_id }}}} {what} takes more of each step than {timing.baseline} ago",
        description=f"By {{{{ $value | humanizePercentage }}}} of the step, in the mean over ranks. {advice}",
    )


def _stalled(timing: Timing) -> Alert:
    silence = "time() - max by (run_id) (commtrace_last_step_timestamp_seconds)"
    typical = "avg by (run_id) (commtrace_step_duration_seconds_sum / (commtrace_step_duration_seconds_count > 0))"
    pauses = "max by (run_id) (commtrace_open_phase)"
    return Alert(
        name="CommtraceStepStalled",
        expr=f"{silence}\n> clamp_min(10 * {typical}, {timing.stalled})\n* (1 + 9 * {pauses})",
        operands=(silence, typical, pauses),
        severity="critical",
        summary="{{ $labels.run_id }} has completed no step for {{ $value | humanizeDuration }}",
        description=(
            "Its processes still answer. Where it stands, and which rank the others wait for: commtrace doctor "
            f"{_DIRECTORY}. Without CommtraceHung the job still makes progress: it loads, compiles, or retries. "
            "While a rank saves a checkpoint or evaluates (commtrace_open_phase), ten times "
            "as long is waited."
        ),
    )


def _hung() -> Alert:
    hung = "sum by (run_id) (commtrace_hung)"
    return Alert(
        name="CommtraceHung",
        expr=f"{hung} > 0\nunless {_PAUSING}",
        operands=(hung,),
        severity="critical",
        summary="{{ $labels.run_id }} hangs: {{ $value | humanize }} of its ranks report no progress",
        description=(
            f"The missing rank, and its place in the program: commtrace doctor {_DIRECTORY}; with the "
            "monitor, the log of rank 0 says it. Take the stacks of that rank (py-spy dump) before the job is "
            "restarted; the job does not end on its own."
        ),
    )


def _gone(timing: Timing) -> Alert:
    # Not "for", which restarts with Prometheus.
    silent = f"count by (run_id) (max_over_time({_TARGETS}[{timing.gone}]) == 0)"
    return Alert(
        name="CommtraceRanksGone",
        expr=silent,
        operands=(_TARGETS,),
        severity="critical",
        summary="{{ $value | humanize }} ranks of {{ $labels.run_id }} no longer answer",
        description=(
            "They did not end in order: their processes were killed, their nodes are gone, or nothing lets their "
            f'threads run. Which: up{{run_id="{{{{ $labels.run_id }}}}"}} == 0. What they did last: commtrace doctor '
            f"{_DIRECTORY}. The next launch of the run takes their place; if there is none, delete their target files, "
            "rank-*.json."
        ),
    )


def _dropped(timing: Timing) -> Alert:
    drops = f"sum by (run_id, rank, node, kind) (increase(commtrace_spans_dropped_total[{timing.window}]))"
    return Alert(
        name="CommtraceSpansDropped",
        expr=f"{drops} > 0",
        operands=(drops,),
        severity="warning",
        summary="commtrace loses {{ $labels.kind }} spans on rank {{ $labels.rank }} of {{ $labels.run_id }}",
        description=(
            "{{ $value | humanize }} of them lately: numbers computed from them are too low; training is "
            "not affected. The rank's log says why: free the disk if it is full; set "
            "COMMTRACE_BUFFER_SPANS higher, or "
            "record less (COMMTRACE_SAMPLE), if the buffer is."
        ),
    )


def _clock(timing: Timing) -> Alert:
    residual = f"min_over_time(commtrace_clock_residual_seconds[{timing.short_window}])"
    return Alert(
        name="CommtraceClockResidual",
        expr=f"{residual} > 0.0001",
        operands=(residual,),
        severity="warning",
        summary="The clock of rank {{ $labels.rank }} on {{ $labels.node }} cannot be read precisely",
        description=(
            "Its readings are exact only to {{ $value | humanizeDuration }}: times of its node cannot be compared with "
            "those of others more precisely than that; training is not affected. Look for a node that is overloaded or "
            "has a slow clock source (/sys/devices/system/clocksource/clocksource0/current_clocksource, tsc is fast)."
        ),
    )


DIRECTORY: Final = Path(__file__).parent / "rules"
_GENERATED: Final = "# Generated by commtrace/exporters/prometheus/rules.py from rules.py; edit that one.\n"


def rule_files(timing: Timing = Timing(), interval: str = "5s") -> dict[str, str]:  # noqa: B008 -- immutable
    recording = [_rule({"record": rule.record}, rule.expr) for rule in recording_rules(timing)]
    alerting = [
        _rule(
            {"alert": alert.name},
            alert.expr,
            "labels:",
            f"  severity: {alert.severity}",
            "annotations:",
            f"  summary: {json.dumps(alert.summary)}",
            f"  description: {json.dumps(alert.description)}",
        )
        for alert in alerts(timing)
    ]
    return {
        "commtrace-recording.yml": _group("commtrace-recording", interval, recording),
        "commtrace-alerts.yml": _group("commtrace-alerts", interval, alerting),
    }


def write(directory: Path, timing: Timing = Timing(), interval: str = "5s") -> list[Path]:  # noqa: B008
    paths = []
    for name, text in rule_files(timing, interval).items():
        paths.append(directory / name)
        paths[-1].write_text(text)
    return paths


def _group(name: str, interval: str, rules: list[str]) -> str:
    return f"{_GENERATED}groups:\n  - name: {name}\n    interval: {interval}\n    rules:\n" + "".join(rules)


def _rule(head: Mapping[str, str], expr: str, *more: str) -> str:
    ((key, name),) = head.items()
    lines = [f"      - {key}: {name}", *_indented(["expr: |-", *(f"  {line}" for line in expr.splitlines()), *more])]
    return "\n".join(lines) + "\n"


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"        {line}" for line in lines)


if __name__ == "__main__":
    for path in write(DIRECTORY):
        print(path)
