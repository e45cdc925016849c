"""Grafana's dashboards: ``python -m commtrace.exporters.grafana.dashboards`` writes the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from commtrace.exporters.grafana.panels import (
    DATASOURCE,
    Panel,
    Query,
    arrange,
    lines,
    matrix,
    number,
    table,
)
from commtrace.trace.json_values import JsonObject

Dashboard: TypeAlias = JsonObject

RUN: Final = 'run_id=~"$run_id"'
RANK: Final = 'run_id=~"$run_id", rank=~"$rank"'
SLOW: Final = ((1.05, "yellow"), (1.1, "red"))
"""Limits of the straggler score, as in the alert."""

ALERTS, FOUND = "Alerts", "Found by the monitor"
"""Tables that are empty while all is well."""

_STEPS: Final = "rate(commtrace_step_duration_seconds_count{{{where}}}[$__rate_interval]) > 0"
_OPERATION: Final = "operation, role"
_BUCKETS: Final = f"sum by (le) (rate(commtrace_step_duration_seconds_bucket{{{RUN}}}[$__rate_interval]))"


def dashboards() -> dict[str, Dashboard]:
    """Return all of them, by the name of their file."""
    return {
        "commtrace-overview.json": _dashboard("overview", "Overview", _overview(), ranks=False),
        "commtrace-rank.json": _dashboard("rank", "Rank", _one_rank(), ranks=True),
        "commtrace-grid.json": _dashboard("grid", "Data x pipeline", _grid(), ranks=False),
        "commtrace-communication.json": _dashboard("communication", "Communication", _communication(), ranks=True),
        "commtrace-health.json": _dashboard("health", "Health of commtrace", _health(), ranks=True),
    }


def _overview() -> list[list[Panel]]:
    score = f"topk(10, commtrace:straggler_score:ratio{{{RUN}}})"
    alerts = f'ALERTS{{{RUN}, alertname=~"Commtrace.*"}}'
    mean_step = f"avg(commtrace:step_seconds:mean{{{RUN}}})"
    return [
        [
            number("Step", "s", Query(mean_step, ""), "Mean over ranks."),
            _average(
                "MFU", "commtrace_mfu_ratio", "Needs commtrace.count(model_flops=…) and a GPU whose peak is known.",
            ),
            number(
                "Tokens per second", "short", Query(f"sum({_rate('commtrace_tokens_total', RUN)})", ""),
                "Sum over the ranks that call commtrace.count(tokens=…).",
            ),
            _average("Exposed", "commtrace:exposed:ratio", "Of the step."),
            _average("Bubble", "commtrace:bubble:ratio", "Of the step."),
            number(
                "Slowest rank", "none", Query(f"max(commtrace:straggler_score:ratio{{{RUN}}})", ""),
                "Its own work, as a multiple of what its peers need.", SLOW,
            ),
            number(
                "Hanging ranks", "none", Query(f"sum(commtrace_hung{{{RUN}}})", ""),
                "In which nothing has moved for too long.", ((1, "red"),),
            ),
            number(
                "Ranks", "none", Query(f"count(commtrace_last_step{{{RUN}}})", ""), "That have ended a step.",
            ),
        ],
        [
            table(
                ALERTS, "none", Query(alerts, ""),
                {"alertname": "Alert", "alertstate": "State", "rank": "Rank", "node": "Node", "severity": "Severity"},
                "What each of them says to do is in its annotation. Empty is good.", hides=("Value", "run_id"),
            ),
            table(
                FOUND, "s", Query(f"commtrace_straggler_cost_seconds{{{RUN}}}", ""),
                {"straggler_rank": "Slow rank", "place": "Place", "cause": "Cause", "Value": "Costs per step"},
                "What the monitor on rank 0 has found (COMMTRACE_EXPORT=prometheus,monitor). Empty is good.",
                hides=("run_id", "rank", "node", "local_rank", "tp", "pp", "dp"),
            ),
        ],
        [
            lines(
                "Step time", "s",
                Query(f"histogram_quantile(0.5, {_BUCKETS})", "p50", exemplars=True),
                Query(f"histogram_quantile(0.99, {_BUCKETS})", "p99"),
                Query(mean_step, "mean"),
                text="Quantiles are as fine as the buckets. A point is a step; it leads to its trace.",
            ),
            _step(RUN, "Mean over ranks, per step. The parts add up to the step."),
        ],
        [
            lines(
                "Exposed by role", "percentunit",
                Query(f"avg by (role) (commtrace:exposed_by_role:ratio{{{RUN}}})", "{{role}}"), stacked=True,
                text="Share of the step in which a rank stalls for communication, waiting included.",
            ),
            lines(
                "Bubble by stage", "percentunit",
                Query(f"avg by (pp) (commtrace:bubble:ratio{{{RUN}}})", "stage {{pp}}"),
                text="Share of the step in which a rank stalls for its neighbour in the pipeline.",
            ),
        ],
        [
            lines(
                "Critical path", "percentunit",
                Query(
                    _share("rate", "commtrace_critical_path_seconds_total", "rank, kind"), "rank {{rank}}: {{kind}}",
                ),
                stacked=True,
                text="Share of the job's steps by rank and kind, the ten largest. Needs commtrace metrics RUN --serve.",
            ),
            lines(
                "Lost time", "percentunit",
                Query(_share("delta", "commtrace_lost_seconds", "part"), "{{part}}"), stacked=True,
                text="Share of the job's steps: the ideal time, and each loss. Needs commtrace metrics RUN --serve.",
            ),
        ],
        [
            lines(
                "Straggler score", "none", Query(score, "rank {{rank}} on {{node}}"),
                text="Own work of a rank, as a multiple of what the ranks of its stage need. 1 is like the others.",
            ),
            table(
                "Slowest ranks", "none", Query(score, ""),
                {"rank": "Rank", "node": "Node", "pp": "Stage", "dp": "Replica", "tp": "Tensor", "Value": "Value"},
                limits=SLOW,
            ),
        ],
    ]  # fmt: skip


def _share(function: str, series: str, labels: str) -> str:
    """Return the ten largest of these labels, as shares of the whole."""
    rate = f"{function}({series}{{{RUN}}}[$__rate_interval])"
    return f"topk(10, sum by ({labels}) ({rate})) / ignoring ({labels}) group_left () sum({rate})"


def _one_rank() -> list[list[Panel]]:
    phases = _per_step("commtrace_compute_seconds_total", RANK, "phase")
    return [
        [
            _each_rank("Step time", "s", "commtrace:step_seconds:mean"),
            _step(RANK, "Mean over the chosen ranks."),
        ],
        [
            lines(
                "Compute by phase", "s", Query(f"avg by (phase) ({phases})", "{{phase}}"), stacked=True,
                text="Per step.",
            ),
            _exposed("Exposed by operation"),
        ],
        [
            lines(
                "Own work", "s",
                Query(f"commtrace:work_seconds:per_step{{{RANK}}}", "rank {{rank}}"),
                Query(f"commtrace:work_seconds:typical{{{RUN}}}", "typical of stage {{pp}}"),
                text="Per step, without waiting for others: against what is typical of the stage.",
            ),
            _each_rank(
                "Peak device memory", "bytes", "commtrace_device_memory_peak_bytes",
                "Most that torch's allocator has held.",
            ),
        ],
    ]  # fmt: skip


def _grid() -> list[list[Panel]]:
    text = "One cell per data-parallel replica (down) and pipeline stage (across); of its ranks the highest."

    def cells(title: str, unit: str, series: str, limits: Sequence[tuple[float, str]] = ()) -> Panel:
        return matrix(title, unit, Query(f"max by (dp, pp) ({series}{{{RUN}}})", ""), "dp", "pp", text, limits)

    return [
        [
            cells("Straggler score", "none", "commtrace:straggler_score:ratio", SLOW),
            cells("Own work per step", "s", "commtrace:work_seconds:per_step"),
        ],
        [
            cells("Bubble", "percentunit", "commtrace:bubble:ratio"),
            cells("Exposed communication", "percentunit", "commtrace:exposed:ratio"),
        ],
    ]


def _communication() -> list[list[Panel]]:
    return [
        [
            _by_operation(
                "Bus bandwidth", "Bps", f"avg by ({{by}}) (commtrace_communication_busbw_bytes_per_second{{{RANK}}})",
                "Effective, as nccl-tests defines it, mean over ranks; waiting for others lowers it.",
            ),
            _by_operation(
                "Bytes", "Bps", f"sum by ({{by}}) ({_rate('commtrace_communication_bytes_total', RANK)})",
                "Full tensors.",
            ),
        ],
        [
            _by_operation(
                "Time in flight", "s",
                f"avg by ({{by}}) ({_per_step('commtrace_communication_seconds_total', RANK, _OPERATION)})",
                "Per step, summed over calls.",
            ),
            _exposed("Exposed"),
        ],
        [
            _by_operation(
                "Overlap", "percentunit", f"avg by ({{by}}) (commtrace_communication_overlap_ratio{{{RANK}}})",
                "Share of the time in flight without a stall.",
            ),
            _by_operation(
                "Waiting for the last rank", "percentunit", _share_of_wait(),
                "Of the exposed time of those calls that the monitor compares between ranks.",
            ),
            _by_operation(
                "Calls", "ops", f"sum by ({{by}}) ({_rate('commtrace_communication_operations_total', RANK)})"
            ),
        ],
    ]  # fmt: skip


def _health() -> list[list[Panel]]:
    return [
        [
            _each_rank(
                "Since the last step", "s", "time() - commtrace_last_step_timestamp_seconds",
                "Grows while a run makes no progress.",
            ),
            _each_rank(
                "Communications in flight", "none", "commtrace_communications_in_flight",
                "Under way since before the last look at them: what a hung rank hangs in.",
            ),
        ],
        [
            lines("Spans", "ops", Query(_rate("commtrace_spans_total", RANK), "rank {{rank}}")),
            lines(
                "Dropped spans", "ops",
                Query(f"sum by (kind) ({_rate('commtrace_spans_dropped_total', RANK)})", "{{kind}}"),
                text="Anything but 0 makes the other numbers too small.",
            ),
        ],
        [
            lines(
                "Overhead", "percentunit", Query(_rate("commtrace_overhead_seconds_total", RANK), "rank {{rank}}"),
                text="Share of one CPU core that commtrace's own thread takes.",
            ),
            _each_rank(
                "Clock residual", "s", "commtrace_clock_residual_seconds",
                "Error with which the monotonic clock is tied to the wall clock.",
            ),
            lines(
                "Clock offset", "s", Query(f"abs(commtrace_clock_offset_seconds{{{RANK}}})", "rank {{rank}}"),
                text="How far the wall clock was moved since the recording began.",
            ),
        ],
    ]  # fmt: skip


def _average(title: str, series: str, text: str) -> Panel:
    return number(title, "percentunit", Query(f"avg({series}{{{RUN}}})", ""), text)


def _each_rank(title: str, unit: str, series: str, text: str = "") -> Panel:
    return lines(title, unit, Query(f"{series}{{{RANK}}}", "rank {{rank}}"), text=text)


def _by_operation(title: str, unit: str, expr: str, text: str = "", *, stacked: bool = False) -> Panel:
    """Return a line for each operation and role; ``{by}`` in the expression stands for these two labels."""
    named = Query(expr.replace("{by}", _OPERATION), "{{operation}} {{role}}")
    return lines(title, unit, named, text=text, stacked=stacked)


def _exposed(title: str) -> Panel:
    return _by_operation(
        title, "s", f"avg by ({{by}}) ({_per_step('commtrace_exposed_seconds_total', RANK, _OPERATION)})",
        "Per step; pipeline transfers are in the bubble.", stacked=True,
    )  # fmt: skip


def _share_of_wait() -> str:
    split = "commtrace_exposed_split_seconds_total"
    waited, known = (_rate(split, f"{RANK}{part}") for part in (', part="wait"', ""))
    return f"sum by ({{by}}) ({waited}) / (sum by ({{by}}) ({known}) > 0)"


def _step(where: str, text: str) -> Panel:
    return lines("Where the step goes", "s", *_parts(where, "avg"), stacked=True, text=text)


def _rate(series: str, where: str) -> str:
    return f"rate({series}{{{where}}}[$__rate_interval])"


def _parts(where: str, aggregate: str) -> tuple[Query, ...]:
    """Return the parts of a step, seconds per step, averaged over ranks."""

    def part(series: str, legend: str, by: str = "") -> Query:
        return Query(f"{aggregate}({_per_step(series, where, by, summed=True)})", legend)

    return (
        part("commtrace_compute_seconds_total", "compute", "phase"),
        part("commtrace_exposed_seconds_total", "exposed", _OPERATION),
        part("commtrace_bubble_seconds_total", "bubble"),
        part("commtrace_data_seconds_total", "data"),
        part("commtrace_checkpoint_seconds_total", "checkpoint"),
        part("commtrace_gc_seconds_total", "gc"),
        part("commtrace_other_seconds_total", "other"),
    )


def _per_step(series: str, where: str, by: str = "", *, summed: bool = False) -> str:
    """Return seconds per step of each rank; ``by`` names the labels that the series has beside the rank's own."""
    rate = _rate(series, where)
    steps = f"({_STEPS.format(where=where)})"
    if not by:
        return f"{rate} / {steps}"
    return f"sum without ({by}) ({rate}) / {steps}" if summed else f"{rate} / ignoring ({by}) group_left () {steps}"


def _dashboard(name: str, title: str, rows: Sequence[Sequence[Panel]], *, ranks: bool) -> Dashboard:
    variables: list[JsonObject] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        _labels("run_id", "Run", "label_values(commtrace_last_step_timestamp_seconds, run_id)", several=False),
    ]
    if ranks:
        query = 'label_values(commtrace_last_step_timestamp_seconds{run_id=~"$run_id"}, rank)'
        variables.append(_labels("rank", "Rank", query, several=True))
    return {
        "uid": f"commtrace-{name}",
        "title": f"commtrace / {title}",
        "tags": ["commtrace"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "links": [{"type": "dashboards", "tags": ["commtrace"], "title": "commtrace", "includeVars": True}],
        "panels": arrange(rows),
    }


def _labels(name: str, title: str, query: str, *, several: bool) -> JsonObject:
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 3 if several else 2,
        "multi": several,
        "includeAll": several,
        "allValue": ".*" if several else None,
    }


DIRECTORY: Final = Path(__file__).parent / "dashboards"


def dashboard_files() -> dict[str, str]:
    """Return the texts of the files by name."""
    return {name: json.dumps(dashboard, indent=1) + "\n" for name, dashboard in dashboards().items()}


if __name__ == "__main__":
    for name, text in dashboard_files().items():
        (DIRECTORY / name).write_text(text)
        print(DIRECTORY / name)
