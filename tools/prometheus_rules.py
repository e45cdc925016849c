"""Recording rules and alerts for Prometheus: ``python -m tools.prometheus_rules`` writes the files.

``--docs URL`` is where the documentation is served, for the runbook links of alerts, and ``--output DIRECTORY`` another
place for the files.

A rank is slow if its *work*, its step without waiting, takes longer than the lower quartile of its run and stage (of
two ranks the faster one), so up to half of the ranks may be slow. PromQL cannot cluster ranks (docs/stragglers.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.analysis.stragglers.limits import LIVE, SUMS

DOCS: Final = "http://127.0.0.1:8000/"
"""Where `python -m http.server 8000 -d build/site` serves the documentation after `make site`."""

PEERS: Final = "run_id, pp, peers"
"""Ranks with equal labels do the same work. Without pipeline all ranks of the run are peers. ``peers`` is what the
monitor found from messages where no framework told the stages."""


_DIRECTORY: Final = (
    '{{ with printf "last_over_time(commtrace_run_info{run_id=%q}[1h])" $labels.run_id | query }}'
    '{{ . | first | label "directory" }}{{ else }}RUN{{ end }}'
)
"""The run's directory in an annotation, if a rank exports it."""

_TARGETS: Final = 'up{run_id!="", local_rank!=""}'
"""The ranks in target files."""

_PAUSING: Final = "max by (run_id) (sum without (phase) (commtrace_open_phase) > 0 and commtrace_hung == 0)"
"""Runs in which a rank saves or evaluates and does not hang: the others may wait for it."""


_DEAD: Final = "max by (run_id) (commtrace_exported_timestamp_seconds) < time() - 60"
"""Runs of which only files for node-exporter are left: whoever was to remove them was killed."""

_FEWEST_STEPS: Final = 4
"""With fewer steps in the short window, a single odd step would be an alert."""


class Timing(NamedTuple):
    """Time ranges of the rules, in Prometheus' notation."""

    window: str = "5m"  # of rates: several scrapes and several steps
    short_window: str = "45s"  # of rates in alerts, if it holds four steps; else window
    baseline: str = "1h"  # age of the value to compare with
    stalled: int = 120  # least silence, seconds
    gone: str = "1m"  # time without an answer of a rank, and for which another one answers


class RecordingRule(NamedTuple):
    """A series that Prometheus computes: ``level:metric:operation``."""

    record: str
    expr: str
    labels: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert; its ``operands`` are the parts of ``expr`` that need data for it to work."""

    name: str
    expr: str
    operands: tuple[str, ...]
    severity: str  # critical: training stands still; warning: it is slower, or is not seen well; info
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """Return the place in the documentation, below its address."""
        return f"alerts/#{self.name.lower()}"

    def __post_init__(self) -> None:
        assert all(operand in self.expr for operand in self.operands), self.name


def recording_rules(timing: Timing) -> tuple[RecordingRule, ...]:
    """Return the recording rules; each uses only earlier ones."""
    return (*_of_ranks(timing), *_of_runs(timing))


def _of_ranks(timing: Timing) -> tuple[RecordingRule, ...]:
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
            f"((quantile by ({PEERS}) (0.25, {work}) and count by ({PEERS}) ({work}) > 2)\n"
            f"or (min by ({PEERS}) ({work}) and count by ({PEERS}) ({work}) == 2))\n"
            # Ranges also hold samples from before the monitor found who does the same work: these lack its label.
            f"unless on (run_id, peers) max by (run_id, peers) (max_over_time(commtrace_unknown_stage[{window}]))",
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


_RUN: Final = "sum by (run_id)"
_BY_OPERATION: Final = "run_id, operation, role"
_BY_SIZE: Final = "run_id, operation, nodes, up_to"
_PARTS: Final = ("bubble", "data", "checkpoint", "gc", "between", "other")


def _of_runs(timing: Timing) -> tuple[RecordingRule, ...]:
    """Return sums and means over the ranks of a run or node: panels with a line per rank do not scale."""
    window = timing.window

    def rate(series: str) -> str:
        return f"rate({series}[{window}])"

    def per_step(series: str, by: str) -> str:
        steps = f"(sum by (run_id) ({rate('commtrace_step_duration_seconds_count')}) > 0)"
        return f"sum by ({by}) ({rate(series)})\n/ on (run_id) group_left () {steps}"

    def ratio(above: str, below: str, by: str) -> str:
        return f"sum by ({by}) ({rate(above)})\n/ (sum by ({by}) ({rate(below)}) > 0)"

    split = "commtrace_exposed_split_seconds_total"
    return (
        # The median over ranks: at the edges, not all ranks export the same bounds.
        RecordingRule(
            "commtrace:step_duration_seconds_bucket:rate",
            f"quantile by (run_id, le) (0.5, {rate('commtrace_step_duration_seconds_bucket')})",
        ),
        RecordingRule(
            "commtrace:step_seconds:median",
            "histogram_quantile(0.5, commtrace:step_duration_seconds_bucket:rate) > 0",
        ),
        RecordingRule("commtrace:run_step_seconds:mean", "avg by (run_id) (commtrace:step_seconds:mean)"),
        RecordingRule(
            "commtrace:compute_seconds:per_step", per_step("commtrace_compute_seconds_total", "run_id, phase")
        ),
        RecordingRule("commtrace:exposed_seconds:per_step", per_step("commtrace_exposed_seconds_total", _BY_OPERATION)),
        *(
            RecordingRule(
                "commtrace:part_seconds:per_step", per_step(f"commtrace_{part}_seconds_total", "run_id"), {"part": part}
            )
            for part in _PARTS
        ),
        RecordingRule("commtrace:exposed:mean", "avg by (run_id) (commtrace:exposed:ratio)"),
        RecordingRule("commtrace:bubble:mean", "avg by (run_id) (commtrace:bubble:ratio)"),
        RecordingRule("commtrace:stage_bubble:mean", "avg by (run_id, pp) (commtrace:bubble:ratio)"),
        RecordingRule("commtrace:role_exposed:mean", "avg by (run_id, role) (commtrace:exposed_by_role:ratio)"),
        RecordingRule("commtrace:node_straggler_score:max", "max by (run_id, node) (commtrace:straggler_score:ratio)"),
        RecordingRule("commtrace:node_work_seconds:mean", "avg by (run_id, node) (commtrace:work_seconds:per_step)"),
        RecordingRule("commtrace:run_straggler_score:max", "max by (run_id) (commtrace:straggler_score:ratio)"),
        RecordingRule(
            "commtrace:run_straggler_excess_seconds:max",
            "max by (run_id) (commtrace:straggler_excess_seconds:per_step)",
        ),
        RecordingRule("commtrace:ranks:count", "count by (run_id) (commtrace_last_step)"),
        RecordingRule("commtrace:launch:max", "max by (run_id) (commtrace_attempt)"),
        RecordingRule("commtrace:tokens:rate", f"{_RUN} ({rate('commtrace_tokens_total')})"),
        RecordingRule("commtrace:mfu:mean", "avg by (run_id) (commtrace_mfu_ratio)"),
        RecordingRule("commtrace:goodput:mean", "avg by (run_id) (commtrace_goodput_ratio)"),
        RecordingRule("commtrace:run_seconds:mean", "avg by (run_id, part) (commtrace_run_seconds_total)"),
        RecordingRule(
            "commtrace:communication_seconds:per_step", per_step("commtrace_communication_seconds_total", _BY_OPERATION)
        ),
        RecordingRule(
            "commtrace:communication_bytes:rate",
            f"sum by ({_BY_OPERATION}) ({rate('commtrace_communication_bytes_total')})",
        ),
        RecordingRule(
            "commtrace:communication_operations:rate",
            f"sum by ({_BY_OPERATION}) ({rate('commtrace_communication_operations_total')})",
        ),
        RecordingRule(
            "commtrace:communication_overlap:mean",
            f"avg by ({_BY_OPERATION}) (commtrace_communication_overlap_ratio)",
        ),
        RecordingRule(
            "commtrace:communication_busbw:mean",
            f"avg by ({_BY_OPERATION}) (commtrace_communication_busbw_bytes_per_second)",
        ),
        # The rank that waits least is nearest to what the network does.
        RecordingRule(
            "commtrace:communication_baseline:max",
            f"max by ({_BY_OPERATION}) (commtrace_communication_baseline_ratio)",
        ),
        RecordingRule("commtrace:exposed_wait:ratio", ratio(f'{split}{{part="wait"}}', split, _BY_OPERATION)),
        RecordingRule(
            "commtrace:message_busbw:mean",
            ratio("commtrace_message_bus_bytes_total", "commtrace_message_seconds_total", _BY_SIZE),
        ),
        RecordingRule(
            "commtrace:message_seconds:mean",
            ratio("commtrace_message_seconds_total", "commtrace_message_operations_total", _BY_SIZE),
        ),
        RecordingRule("commtrace:message_seconds:per_step", per_step("commtrace_message_seconds_total", _BY_SIZE)),
    )


def _soon(timing: Timing, rate: str, of: str) -> str:
    """Divide ``rate``, a text with ``{window}``, by the rate of the counter ``of``, over the short window if it can."""

    def over(window: str) -> str:
        return f"{rate.format(window=window)}\n/ (rate({of}[{window}]) > 0)"

    short = timing.short_window
    enough = f"increase(commtrace_step_duration_seconds_count[{short}]) >= {_FEWEST_STEPS}"
    # A rank that has ended is in the window for minutes, and must not be compared with those of the next launch. But a
    # scrape may fail, and Prometheus itself may have been away for a while.
    steps = "commtrace_step_duration_seconds_count"
    answers = f"({steps} or last_over_time({steps}[{short}]))"
    return f"(({over(short)}\nand {enough})\nor ({over(timing.window)}))\nand {answers}"


def alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return every alert."""
    # None has a "for": a restarted Prometheus forgets how long a condition was true. Means or minima over less than a
    # minute instead fire and clear within a minute, and a single odd step counts little.
    return (
        _straggler(),
        _slower(timing),
        _mfu_down(timing),
        _went_up(
            timing, "CommtraceExposedCommunicationUp", "commtrace:exposed:ratio", "exposed communication",
            "Where CommtraceStraggler fires as well, the others wait for that rank. Else look at the network. Which "
            f"communication, and waiting from transfer: commtrace summary {_DIRECTORY}.",
        ),
        _went_up(
            timing, "CommtraceBubbleUp", "commtrace:bubble:ratio", "the pipeline bubble",
            f"Whether schedule, uneven stages, a slow rank or transfers cause it: commtrace pipeline {_DIRECTORY}.",
        ),
        _below_baseline(timing),
        _stalled(timing),
        _hung(),
        _gone(timing),
        _ended(timing),
        _dropped(timing),
        _clock(timing),
    )  # fmt: skip


def _straggler() -> Alert:
    score, excess = "commtrace:straggler_score:ratio", "commtrace:straggler_excess_seconds:per_step"
    mean = "commtrace:step_seconds:mean"
    return Alert(
        name="CommtraceStraggler",
        expr=f"{score} > {1 + SUMS.share:g}\nand {excess} > {LIVE.share:g} * {mean}",
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


def _pauses(timing: Timing) -> str:
    """Return an expression above 0 while a rank saves or evaluates, and shortly after: the others wait for it."""
    return f"max by (run_id) (max_over_time(commtrace_open_phase[{timing.short_window}]))"


def _slower(timing: Timing) -> Alert:
    median, ranks, pauses = "commtrace:step_seconds:median", "commtrace:ranks:count", _pauses(timing)
    before = f"avg_over_time({median}[{timing.window}] offset {timing.baseline})"
    return Alert(
        name="CommtraceStepSlower",
        # A job that goes on with other ranks has other steps.
        expr=(
            f"{median}\n/ {before}\n- 1 > 0.07\nand {ranks} == {ranks} offset {timing.baseline}\nunless {pauses} > 0"
        ),
        operands=(median, before, ranks, pauses),
        severity="warning",
        summary=f"Steps of {{{{ $labels.run_id }}}} take longer than {timing.baseline} ago",
        description=(
            "By {{ $value | humanizePercentage }}, in the median. Where CommtraceStraggler fires as well, that rank is "
            "why. Else all ranks are slower: longer input, lower clocks of all devices, storage or network. What the "
            f"time goes to: commtrace summary {_DIRECTORY}."
        ),
    )


def _mfu_down(timing: Timing) -> Alert:
    # Medians over time: a step with a checkpoint has a low MFU.
    now = f"quantile_over_time(0.5, commtrace:mfu:mean[{timing.window}])"
    before = f"quantile_over_time(0.5, commtrace:mfu:mean[{timing.window}] offset {timing.baseline})"
    pauses = _pauses(timing)
    return Alert(
        name="CommtraceMfuDown",
        expr=f"1 - {now}\n/ {before}\n> 0.05\nunless {pauses} > 0",
        operands=(now, before, pauses),
        severity="warning",
        summary=f"The MFU of {{{{ $labels.run_id }}}} is lower than {timing.baseline} ago",
        description=(
            "By {{ $value | humanizePercentage }} of what it was. With CommtraceStepSlower, steps take longer for the "
            "same work; without it, steps do less work: look at batch size and sequence length. What the time goes to: "
            f"commtrace summary {_DIRECTORY}."
        ),
    )


def _went_up(timing: Timing, name: str, ratio: str, what: str, advice: str) -> Alert:
    now = f"avg by (run_id) ({ratio})"
    # The mean over a few minutes an hour ago: one odd moment must not be the reference.
    before = f"avg by (run_id) (avg_over_time({ratio}[{timing.window}] offset {timing.baseline}))"
    pauses = _pauses(timing)
    return Alert(
        name=name,
        expr=f"{now}\n- {before}\n> 0.05\nunless {pauses} > 0",
        operands=(now, before, pauses),
        severity="warning",
        summary=f"In {{{{ $labels.run_id }}}} {what} takes more of each step than {timing.baseline} ago",
        description=f"By {{{{ $value | humanizePercentage }}}} of the step, averaged over the ranks. {advice}",
    )


def _below_baseline(timing: Timing) -> Alert:
    # The best moment of a while: a burst of waiting must not look like a slow network.
    share = f"max_over_time(commtrace:communication_baseline:max[{timing.short_window}])"
    exposed, step = "commtrace:exposed_seconds:per_step", "commtrace:run_step_seconds:mean"
    return Alert(
        name="CommtraceBelowBaseline",
        expr=f"{share} < 0.5\nand {exposed}\n> on (run_id) group_left () 0.05 * {step}",
        operands=(share, exposed, step),
        severity="warning",
        summary="{{ $labels.operation }} ({{ $labels.role }}) of {{ $labels.run_id }} is slower than the baseline",
        description=(
            "On the rank that waits least it reaches {{ $value | humanizePercentage }} of what was measured, and "
            "training stalls on it for more than 5 % of the step. Where CommtraceStraggler fires as well, look there "
            f"first. The share without waiting, by size and group: commtrace summary {_DIRECTORY} --baseline FILE."
        ),
    )


def _stalled(timing: Timing) -> Alert:
    silence = "time() - max by (run_id) (commtrace_last_step_timestamp_seconds)"
    typical = "avg by (run_id) (commtrace_step_duration_seconds_sum / (commtrace_step_duration_seconds_count > 0))"
    pauses = "max by (run_id) (commtrace_open_phase)"
    return Alert(
        name="CommtraceStepStalled",
        expr=f"{silence}\n> clamp_min(10 * {typical}, {timing.stalled})\n* (1 + 9 * {pauses})\nunless {_DEAD}",
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
        expr=f"{hung} > 0\nunless {_PAUSING}\nunless {_DEAD}",
        operands=(hung,),
        severity="critical",
        summary="{{ $labels.run_id }} hangs: {{ $value | humanize }} of its ranks report no progress",
        description=(
            f"The missing rank, and its place in the program: commtrace doctor {_DIRECTORY}; with the "
            "monitor, the log of rank 0 says it. Take the stacks of that rank (py-spy dump) before the job is "
            "restarted; the job does not end on its own."
        ),
    )


def _unanswered(timing: Timing, by: str) -> str:
    """Return the expression for those of which no target has answered for a while."""
    return f"max by ({by}) (max_over_time({_TARGETS}[{timing.gone}])) == 0"


def _gone(timing: Timing) -> Alert:
    # Not "for", which restarts with Prometheus. A rank that was started again has a target for each launch for a while.
    silent = _unanswered(timing, "run_id, rank")
    # Of a job that was cancelled, none answers; of one that was started again, none did before.
    others = f"count by (run_id) ({_TARGETS} == 1 and {_TARGETS} offset {timing.gone} == 1)"
    return Alert(
        name="CommtraceRanksGone",
        expr=f"count by (run_id) ({silent})\nand {others} > 0",
        operands=(_TARGETS, others),
        severity="critical",
        summary="{{ $value | humanize }} ranks of {{ $labels.run_id }} no longer answer, while others do",
        description=(
            "Their processes were killed, their nodes are gone, or nothing lets their threads run; the others wait for "
            'them. Which: up{run_id="{{ $labels.run_id }}"} == 0. What they did last: commtrace doctor '
            f"{_DIRECTORY}. The next launch of the run takes their place; if there is none, delete their target files, "
            "rank-*.json."
        ),
    )


def _ended(timing: Timing) -> Alert:
    none = _unanswered(timing, "run_id")
    lately = f"max by (run_id) (max_over_time({_TARGETS}[{timing.baseline}])) == 1"
    return Alert(
        name="CommtraceJobKilled",
        expr=f"{none}\nand {lately}",
        operands=(_TARGETS,),
        severity="info",
        summary="All ranks of {{ $labels.run_id }} ended without closing their recording",
        description=(
            "The job was cancelled, preempted, out of time, or it crashed: the scheduler knows which. After a crash, "
            f"commtrace doctor {_DIRECTORY} shows which rank failed first. This ends "
            f"{timing.baseline} later, with the next launch, or when the target files, rank-*.json, are deleted."
        ),
    )


def _dropped(timing: Timing) -> Alert:
    drops = f"sum by (run_id, kind) (increase(commtrace_spans_dropped_total[{timing.window}]))"
    return Alert(
        name="CommtraceSpansDropped",
        expr=f"{drops} > 0",
        operands=(drops,),
        severity="warning",
        summary="commtrace loses {{ $labels.kind }} spans of {{ $labels.run_id }}",
        description=(
            "{{ $value | humanize }} of them lately: numbers computed from them are too low; training is "
            "not affected. Which ranks: increase(commtrace_spans_dropped_total[5m]) > 0. A rank's log says why: free "
            "the disk if it is full; set COMMTRACE_BUFFER_SPANS higher, or record less (COMMTRACE_SAMPLE), if the "
            "buffer is."
        ),
    )


def _clock(timing: Timing) -> Alert:
    residual = f"min_over_time(commtrace_clock_residual_seconds[{timing.short_window}])"
    # One alert for the run: a bad day of the time service has all ranks in it.
    return Alert(
        name="CommtraceClockResidual",
        expr=f"max by (run_id) ({residual}) > 0.0001",
        operands=(residual,),
        severity="warning",
        summary="Clocks of {{ $labels.run_id }} cannot be read precisely",
        description=(
            "The worst reading is exact only to {{ $value | humanizeDuration }}: times of its node cannot be compared "
            "with those of others more precisely than that; training is not affected. Which nodes: "
            "commtrace_clock_residual_seconds > 0.0001. Look for a node that is overloaded or has a slow clock source "
            "(/sys/devices/system/clocksource/clocksource0/current_clocksource, tsc is fast)."
        ),
    )


DIRECTORY: Final = Path(__file__).parents[1] / "exporters" / "prometheus" / "rules"
_GENERATED: Final = "# Generated by commtrace/exporters/prometheus/rules.py from rules.py; edit that one.\n"


def rule_files(
    timing: Timing = Timing(),  # noqa: B008 -- immutable
    interval: str = "5s",
    docs: str = DOCS,
) -> dict[str, str]:
    """Return the texts of the files by name; ``docs`` is the address of the documentation, for runbook links."""
    recording = [_rule({"record": rule.record}, rule.expr, *_labels(rule.labels)) for rule in recording_rules(timing)]
    alerting = [
        _rule(
            {"alert": alert.name},
            alert.expr,
            *_labels({"severity": alert.severity}),
            "annotations:",
            f"  summary: {json.dumps(alert.summary)}",
            f"  description: {json.dumps(alert.description)}",
            f"  runbook_url: {json.dumps(docs.rstrip('/') + '/' + alert.runbook)}",
        )
        for alert in alerts(timing)
    ]
    return {
        "commtrace-recording.yml": _group("commtrace-recording", interval, recording),
        "commtrace-alerts.yml": _group("commtrace-alerts", interval, alerting),
    }


def write(directory: Path, timing: Timing = Timing(), interval: str = "5s", docs: str = DOCS) -> list[Path]:  # noqa: B008
    paths = []
    for name, text in rule_files(timing, interval, docs).items():
        paths.append(directory / name)
        paths[-1].write_text(text)
    return paths


def _group(name: str, interval: str, rules: list[str]) -> str:
    return f"{_GENERATED}groups:\n  - name: {name}\n    interval: {interval}\n    rules:\n" + "".join(rules)


def _rule(head: Mapping[str, str], expr: str, *more: str) -> str:
    ((key, name),) = head.items()
    lines = [f"      - {key}: {name}", *_indented(["expr: |-", *(f"  {line}" for line in expr.splitlines()), *more])]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> list[str]:
    return ["labels:", *(f"  {name}: {value}" for name, value in labels.items())] if labels else []


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"        {line}" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the files of rules and alerts.")
    parser.add_argument("--docs", default=DOCS, help="address of the documentation, for runbook links")
    parser.add_argument("--output", type=Path, default=DIRECTORY, help="directory of the files")
    parser.add_argument("--interval", default="5s", help="time between evaluations")
    arguments = parser.parse_args()
    for path in write(arguments.output, interval=arguments.interval, docs=arguments.docs):
        print(path)
