"""Grafana's dashboards: ``python -m commtrace.exporters.grafana.dashboards`` writes the files.

Panels ask for recorded sums and means over the ranks of a run or node, or for the highest few: a job of a thousand
ranks must neither draw a thousand lines nor make Prometheus add up a hundred thousand series for every look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from commtrace.exporters.grafana.panels import (
    DATASOURCE,
    Column,
    Link,
    Panel,
    Query,
    Row,
    arrange,
    heatmap,
    lines,
    matrix,
    number,
    shares,
    table,
    timeline,
)
from commtrace.exporters.prometheus.rules import DOCS
from commtrace.trace.json_values import JsonObject

Dashboard: TypeAlias = JsonObject

RUN: Final = 'run_id=~"$run_id"'
NODE: Final = 'run_id=~"$run_id", node=~"$node"'
RANK: Final = 'run_id=~"$run_id", rank=~"$rank"'
SLOW: Final = ((1.05, "yellow"), (1.1, "red"))
"""Limits of the straggler score, as in the alert."""

ALERTS, FOUND = "Alerts", "Found by the monitor"
"""Tables that are empty while all is well."""

_MOST_NODES: Final = 20
_MOST_ROWS: Final = 32
"""Rows of a grid."""

_OPERATION: Final = "operation, role"
_KEPT: Final = "${datasource:queryparam}&${__url_time_range}"
_TO_RUN: Final = Link("Run", f"/d/commtrace-overview?var-run_id=${{__value.raw}}&{_KEPT}")
_TO_RUNBOOK: Final = Link("What to do", "${docs:raw}alerts/#${__value.raw}")


def _to(dashboard: str, variable: str, value: str) -> Link:
    """Return the link to another dashboard with a value, for the same run and time."""
    url = f"/d/commtrace-{dashboard}?var-{variable}={value}&${{run_id:queryparam}}&{_KEPT}"
    return Link(f"This {variable}", url)


_CELL, _NODE_LABEL, _RANK_LABEL = "${__value.raw}", "${__field.labels.node}", "${__field.labels.rank}"
_RANK_COLUMN: Final = Column("rank", "Rank", link=_to("rank", "rank", _CELL))
_NODE_COLUMN: Final = Column("node", "Node", link=_to("node", "node", _CELL))
_PLACE: Final = (_RANK_COLUMN, _NODE_COLUMN, Column("pp", "Stage"), Column("dp", "Replica"), Column("tp", "Tensor"))


def dashboards() -> dict[str, Dashboard]:
    """Return all of them, by the name of their file."""
    return {
        "commtrace-fleet.json": _dashboard("fleet", "Fleet", "All runs beside each other.", _fleet()),
        "commtrace-overview.json": _dashboard(
            "overview", "Overview", "One run: is it training, how fast, who is slow, since when, at what cost.",
            _overview(), _RUNS,
        ),
        "commtrace-node.json": _dashboard("node", "Node", "The ranks of one node.", _one_node(), _RUNS, _NODES),
        "commtrace-rank.json": _dashboard("rank", "Rank", "One rank, or some.", _one_rank(), _RUNS, _RANKS),
        "commtrace-grid.json": _dashboard(
            "grid", "Data x pipeline", "The run by its parallel dimensions, and by node.", _grid(), _RUNS
        ),
        "commtrace-communication.json": _dashboard(
            "communication", "Communication", "The run by operation, role, size and place.", _communication(), _RUNS
        ),
        "commtrace-health.json": _dashboard(
            "health", "Health of commtrace", "Whether the other numbers can be trusted.", _health(), _RUNS
        ),
    }  # fmt: skip


def _fleet() -> list[Row]:
    silence = "time() - max by (run_id) (commtrace_last_step_timestamp_seconds)"
    step = "commtrace:step_seconds:median"
    alerts = 'count by (run_id, alertname, severity) (ALERTS{alertname=~"Commtrace.*", alertstate="firing"})'
    return [
        Row(
            [
                table(
                    "Runs",
                    [
                        Query("commtrace:run_straggler_score:max", "score"),
                        Query(silence, "silence"),
                        Query(step, "step"),
                        Query(f"{step} / {step} offset 1h - 1", "change"),
                        Query("commtrace:tokens:rate", "tokens"),
                        Query("commtrace:mfu:mean", "MFU"),
                        Query("commtrace:goodput:mean", "goodput"),
                        Query("sum by (run_id) (commtrace_hung)", "hung"),
                        Query("commtrace:ranks:count", "ranks"),
                    ],
                    [
                        Column("run_id", "Run", link=_TO_RUN),
                        Column("Value #B", "Last step ago", "s", ((120, "yellow"), (600, "red"))),
                        Column("Value #C", "Step", "s"),
                        Column("Value #D", "Against 1 h ago", "percentunit", ((0.03, "yellow"), (0.07, "red"))),
                        Column("Value #A", "Slowest rank", "none", SLOW),
                        Column("Value #H", "Hanging", "none", ((1, "red"),)),
                        Column("Value #I", "Ranks", "none"),
                        Column("Value #E", "Tokens per second", "short"),
                        Column("Value #F", "MFU", "percentunit"),
                        Column("Value #G", "Goodput", "percentunit"),
                    ],
                    "Every run that reports now. A rank's score is its own work by that of its peers.",
                    joined_by="run_id",
                ),
            ],
            height=12,
        ),
        Row(
            [
                table(
                    ALERTS, [Query(alerts, "alerts")],
                    [
                        Column("run_id", "Run", link=_TO_RUN),
                        Column("alertname", "Alert", link=_TO_RUNBOOK),
                        Column("severity", "Severity"),
                        Column("Value", "How many", "none"),
                    ],
                    "That fire now. Empty is good.",
                ),
            ],
        ),
        Row(
            [
                _of_runs("Step time", "s", step, "Median over 5 minutes of each run."),
                _of_runs(
                    "Slowest rank", "none", "commtrace:run_straggler_score:max", "1 is like its peers.", zero=False
                ),
            ],
        ),
        Row(
            [
                _of_runs("MFU", "percentunit", "commtrace:mfu:mean", "Mean over ranks."),
                _of_runs(
                    "Goodput", "percentunit", "commtrace:goodput:mean", "Share of the wall time in training steps."
                ),
            ],
        ),
    ]  # fmt: skip


def _of_runs(title: str, unit: str, series: str, text: str, *, zero: bool = True) -> Panel:
    link = Link("Run", f"/d/commtrace-overview?var-run_id=${{__field.labels.run_id}}&{_KEPT}")
    return lines(title, unit, Query(series, "{{run_id}}"), text=text, from_zero=zero, link=link)


def _overview() -> list[Row]:
    worst = f"commtrace:run_straggler_score:max{{{RUN}}}"
    return [
        Row(_first_row(worst), height=5),
        Row(_second_row(), height=4),
        _alerts_and_findings(),
        _slow_nodes_and_ranks(),
        _step_times(),
        _parts_and_roles(),
        _bubble_waits_and_goodput(),
        _critical_path_and_losses(),
    ]


def _alerts_and_findings() -> Row:
    """Return the tables that are empty while all is well."""
    return Row(
        [
            table(
                ALERTS,
                [
                    Query(
                        "count by (alertname, severity, node) "
                        f'(ALERTS{{{RUN}, alertname=~"Commtrace.*", alertstate="firing"}})',
                        "alerts",
                    )
                ],
                [
                    Column("alertname", "Alert", link=_TO_RUNBOOK),
                    Column("severity", "Severity"),
                    _NODE_COLUMN,
                    Column("Value", "How many", "none"),
                ],
                "That fire now, with a link to what to do. Empty is good.",
            ),
            table(
                FOUND, [Query(f"commtrace_straggler_cost_seconds{{{RUN}}}", "cost")],
                [
                    Column("straggler_rank", "Slow rank", link=_to("rank", "rank", _CELL)),
                    Column("place", "Place"),
                    Column("cause", "Cause"),
                    Column("Value", "Costs per step", "s"),
                ],
                "Slow ranks, with cause and cost (COMMTRACE_EXPORT=prometheus,monitor). Empty is good.",
            ),
        ],
        height=6,
    )  # fmt: skip


def _slow_nodes_and_ranks() -> Row:
    """Return the nodes over time, and the slowest ranks."""
    return Row(
        [
            timeline(
                "Nodes, slowest first",
                Query(_worst("node", f"commtrace:node_straggler_score:max{{{RUN}}}", _MOST_NODES), "{{node}}"),
                f"The slowest rank of each node over time: own work by that of its peers. Shown are the "
                f"{_MOST_NODES} nodes that were slowest in this range.",
                SLOW,
                _to("node", "node", _NODE_LABEL),
            ),
            table(
                "Slowest ranks", [Query(f"topk(10, commtrace:straggler_score:ratio{{{RUN}}})", "score")],
                [*_PLACE, Column("Value", "Score", "none", SLOW)],
                "Own work of a rank by what the ranks of its stage need. Click for rank or node.",
            ),
        ],
        title="Who is slow, since when",
        height=11,
    )  # fmt: skip


def _step_times() -> Row:
    """Return the durations of steps."""
    return Row(
        [
            heatmap(
                "Steps by duration", "s",
                Query(f"commtrace:step_duration_seconds_bucket:rate{{{RUN}}}", "{{le}}"),
                "Buckets are 5 % apart around the usual duration. A change moves the band; outliers are above it.",
            ),
            lines(
                "Step time", "s",
                Query(f"commtrace:step_seconds:median{{{RUN}}}", "median"),
                Query(
                    f"histogram_quantile(0.95, commtrace:step_duration_seconds_bucket:rate{{{RUN}}})", "95 %"
                ),
                Query(f"commtrace:run_step_seconds:mean{{{RUN}}}", "mean"),
                Query(f"commtrace:step_seconds:median{{{RUN}}} offset 1h", "median 1 h before"),
                Query(
                    "histogram_quantile(0.5, rate(commtrace_step_duration_seconds_bucket"
                    f'{{{RUN}, rank="0"}}[$__rate_interval]))', "rank 0", exemplars=True,
                ),
                text="A point is a step; it leads to its trace.", from_zero=False,
            ),
        ],
        title="How fast",
        height=9,
    )  # fmt: skip


def _parts_and_roles() -> Row:
    """Return the parts of a step, and its exposed communication."""
    return Row(
        [
            lines(
                "Where the step goes", "s", *_parts_of_run(), stacked=True,
                text="Mean over ranks, per step. The parts add up to the step.",
            ),
            lines(
                "Exposed by role", "percentunit",
                Query(f"commtrace:role_exposed:mean{{{RUN}}}", "{{role}}"), stacked=True,
                text="Share of the step in which a rank stalls for communication, waiting included.",
            ),
        ],
        title="Where the time goes",
    )  # fmt: skip


def _bubble_waits_and_goodput() -> Row:
    """Return bubble by stage, waiting for the last rank, and the wall time."""
    return Row(
        [
            lines(
                "Bubble by stage", "percentunit",
                Query(f"commtrace:stage_bubble:mean{{{RUN}}}", "stage {{pp}}"),
                text="Share of the step in which a rank stalls for its neighbour in the pipeline.",
            ),
            _by_operation(
                "Waiting for the last rank", "percentunit", "commtrace:exposed_wait:ratio",
                "Of the exposed time of those calls that the monitor compares between ranks; the rest is transfer.",
            ),
            shares(
                "Wall time of the job", "percentunit",
                Query(
                    f"commtrace:run_seconds:mean{{{RUN}}} / ignoring (part) group_left () "
                    f"sum by (run_id) (commtrace:run_seconds:mean{{{RUN}}})", "{{part}}",
                ),
                "Since this launch began, mean over ranks. Goodput is the share of training.",
            ),
        ],
    )  # fmt: skip


def _critical_path_and_losses() -> Row:
    """Return the critical path and the lost time."""
    return Row(
        [
            lines(
                "Critical path", "percentunit",
                Query(
                    _share("rate", "commtrace_critical_path_seconds_total", "rank, kind"),
                    "rank {{rank}}: {{kind}}",
                ),
                stacked=True,
                text="Share of the steps by rank and kind, the ten largest. From commtrace metrics RUN --serve.",
            ),
            lines(
                "Lost time", "percentunit",
                Query(_share("delta", "commtrace_lost_seconds", "part"), "{{part}}"), stacked=True,
                text="Share of the job's steps: the ideal time, and each loss. From commtrace metrics RUN --serve.",
            ),
        ],
    )  # fmt: skip


def _first_row(worst: str) -> list[Panel]:
    """Return the answers for whoever was woken: is it training, how fast, who is slow, since when, at what cost."""
    step = f"commtrace:step_seconds:median{{{RUN}}}"
    excess, ranks = f"commtrace:run_straggler_excess_seconds:max{{{RUN}}}", f"commtrace:ranks:count{{{RUN}}}"
    return [
        number(
            "Last step ago", "s",
            Query(f"time() - max by (run_id) (commtrace_last_step_timestamp_seconds{{{RUN}}})", ""),
            "Grows while the run makes no progress. Empty: no rank answers.", ((120, "yellow"), (600, "red")),
            nothing="no answer",
        ),
        number(
            "Hanging ranks", "none", Query(f"sum by (run_id) (commtrace_hung{{{RUN}}})", ""),
            "Ranks without progress for too long.", ((1, "red"),),
        ),
        number("Step", "s", Query(step, ""), "Median of 5 minutes."),
        number(
            "Against 1 h ago", "percentunit", Query(f"{step} / {step} offset 1h - 1", ""),
            "Longer steps are above 0.", ((0.03, "yellow"), (0.07, "red")),
        ),
        number(
            "Slowest rank", "none",
            Query(f"topk(1, commtrace:straggler_score:ratio{{{RUN}}})", "rank {{rank}} on {{node}}"),
            "Own work, as a multiple of what its peers need. Click for the rank.", SLOW,
            link=_to("rank", "rank", _RANK_LABEL),
        ),
        number(
            "Slow since", "dateTimeFromNow",
            Query(f"1000 * min_over_time(timestamp({worst} > 1.1)[$__range:15s]) and {worst} > 1.1", ""),
            "When a rank first was slow in the range that is shown, if one is slow now.", nothing="nobody is slow",
        ),
        number(
            "GPUs lost to it", "none",
            Query(f"{excess} / commtrace:run_step_seconds:mean{{{RUN}}} * {ranks} * ({worst} > bool 1.1)", ""),
            "The excess of the slowest rank, during which the others wait, as a share of the step, times all ranks.",
            ((1, "yellow"), (8, "red")),
        ),
        number(
            "Goodput", "percentunit", Query(f"commtrace:goodput:mean{{{RUN}}}", ""),
            "Share of the wall time of this launch in training steps.",
        ),
    ]  # fmt: skip


def _second_row() -> list[Panel]:
    return [
        number(
            "MFU", "percentunit", Query(f"commtrace:mfu:mean{{{RUN}}}", ""),
            "Needs commtrace.count(model_flops=…) and a GPU whose peak is known.",
        ),
        number(
            "Tokens per second", "short", Query(f"commtrace:tokens:rate{{{RUN}}}", ""),
            "Sum over the ranks that call commtrace.count(tokens=…).",
        ),
        number("Exposed", "percentunit", Query(f"commtrace:exposed:mean{{{RUN}}}", ""), "Of the step."),
        number("Bubble", "percentunit", Query(f"commtrace:bubble:mean{{{RUN}}}", ""), "Of the step."),
        number("Ranks", "none", Query(f"commtrace:ranks:count{{{RUN}}}", ""), "That have ended a step and answer."),
        number(
            "Ranks missing", "none",
            Query(f"max by (run_id) (commtrace_world_size{{{RUN}}}) - commtrace:ranks:count{{{RUN}}}", ""),
            "Of the job, which do not answer.", ((1, "red"),),
        ),
        number(
            "Pauses", "none", Query(f"sum by (run_id) (commtrace_open_phase{{{RUN}}})", ""),
            "Ranks that save a checkpoint or evaluate.",
        ),
        number(
            "Number of the step", "none", Query(f"max by (run_id) (commtrace_last_step{{{RUN}}})", ""), "The newest."
        ),
    ]  # fmt: skip


def _worst(label: str, series: str, most: int) -> str:
    """Return the series of those that had the highest values in the range that is shown."""
    return f"{series} and on ({label}) topk({most}, max by ({label}) (max_over_time({series}[$__range] @ end())))"


def _share(function: str, series: str, labels: str) -> str:
    """Return the ten largest of these labels, as shares of the whole."""
    rate = f"{function}({series}{{{RUN}}}[$__rate_interval])"
    return f"topk(10, sum by ({labels}) ({rate})) / ignoring ({labels}) group_left () sum({rate})"


def _parts_of_run() -> tuple[Query, ...]:
    return (
        Query(f"commtrace:compute_seconds:per_step{{{RUN}}}", "{{phase}}"),
        Query(f"sum by (role) (commtrace:exposed_seconds:per_step{{{RUN}}})", "exposed {{role}}"),
        Query(f"commtrace:part_seconds:per_step{{{RUN}}}", "{{part}}"),
    )


def _one_node() -> list[Row]:
    score = f"commtrace:straggler_score:ratio{{{NODE}}}"
    return [
        Row(
            [
                table(
                    "Ranks",
                    [
                        Query(score, "score"),
                        Query(f"commtrace:work_seconds:per_step{{{NODE}}}", "work"),
                        Query(f"commtrace:exposed:ratio{{{NODE}}}", "exposed"),
                        Query(f"commtrace_hung{{{NODE}}}", "hung"),
                        Query(f"time() - commtrace_last_step_timestamp_seconds{{{NODE}}}", "silence"),
                    ],
                    [
                        _RANK_COLUMN,
                        Column("Value #A", "Score", "none", SLOW),
                        Column("Value #B", "Own work", "s"),
                        Column("Value #C", "Exposed", "percentunit"),
                        Column("Value #D", "Hangs", "none", ((1, "red"),)),
                        Column("Value #E", "Last step ago", "s", ((120, "yellow"), (600, "red"))),
                    ],
                    "Of this node; a click leads to the rank.",
                    joined_by="rank",
                ),
                lines(
                    "Straggler score", "none",
                    Query(score, "rank {{rank}}"),
                    text="One rank above the others: its device. All of them: the node.", from_zero=False,
                    link=_to("rank", "rank", _RANK_LABEL),
                ),
            ],
            height=10,
        ),
        Row(
            [
                lines(
                    "Own work", "s",
                    Query(f"commtrace:node_work_seconds:mean{{{NODE}}}", "this node"),
                    Query(f"avg(commtrace:node_work_seconds:mean{{{RUN}}})", "all nodes"),
                    text="Per step, without waiting for others, mean over ranks.", from_zero=False,
                ),
                lines(
                    "Where the step goes", "s", *_parts(NODE, "avg"), stacked=True, text="Mean over the node's ranks."
                ),
            ],
        ),
        Row(
            [
                _each("Waiting for input", "s", _per_step("commtrace_data_seconds_total", NODE), "Per step."),
                _each(
                    "Peak device memory", "bytes", f"commtrace_device_memory_peak_bytes{{{NODE}}}",
                    "Most that torch's allocator has held.",
                ),
                _each(
                    "Communications in flight", "none", f"commtrace_communications_in_flight{{{NODE}}}",
                    "Under way since before the last look at them: what a hung rank hangs in.",
                ),
            ],
        ),
        Row(
            [
                _of_gpus(
                    "Tensor cores active", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
                    "Share of cycles in which the tensor cores worked. A wait inside of a kernel of NCCL is none.",
                ),
                _of_gpus(
                    "Occupancy", "DCGM_FI_PROF_SM_OCCUPANCY",
                    "Resident warps as a share of what fits on the multiprocessors.",
                ),
            ],
            title="GPUs, by dcgm-exporter where it runs",
        ),
    ]  # fmt: skip


def _of_gpus(title: str, series: str, text: str) -> Panel:
    """Return a series of dcgm-exporter on the node's GPUs, for the time in which the chosen run trains there.

    Its GPU_UTIL is left out: that some kernel runs says nothing of how much of the GPU works.
    """
    hosts = f'label_replace(commtrace_last_step{{{NODE}}}, "Hostname", "$1", "node", "(.*)")'
    query = f'max by (gpu) ({series}{{Hostname=~"$node"}} and on (Hostname) {hosts})'
    return lines(title, "percentunit", Query(query, "GPU {{gpu}}"), text=text, most=1)


def _one_rank() -> list[Row]:
    phases = _per_step("commtrace_compute_seconds_total", RANK, "phase")
    return [
        Row(
            [
                table(
                    "Place", [Query(f"commtrace:straggler_score:ratio{{{RANK}}}", "score")],
                    [*_PLACE, Column("Value", "Score", "none", SLOW)],
                    "A click on the node leads to its other ranks.",
                ),
                lines(
                    "Straggler score", "none",
                    Query(f"commtrace:straggler_score:ratio{{{RANK}}}", "rank {{rank}}"),
                    text="Own work by what the ranks of its stage need.", from_zero=False,
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Step time", "s",
                    Query(
                        f"rate(commtrace_step_duration_seconds_sum{{{RANK}}}[$__rate_interval]) / "
                        f"({_steps(RANK)})", "rank {{rank}}",
                    ),
                    text="Mean.", from_zero=False,
                ),
                lines(
                    "Where the step goes", "s", *_parts(RANK, "avg"), stacked=True, text="Mean over the ranks shown."
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Compute by phase", "s", Query(f"avg by (phase) ({phases})", "{{phase}}"), stacked=True,
                    text="Per step.",
                ),
                lines(
                    "Exposed by operation", "s",
                    Query(
                        f"avg by ({_OPERATION}) ({_per_step('commtrace_exposed_seconds_total', RANK, _OPERATION)})",
                        "{{operation}} {{role}}",
                    ),
                    text="Per step; pipeline transfers are in the bubble.", stacked=True,
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Own work", "s",
                    Query(f"commtrace:work_seconds:per_step{{{RANK}}}", "rank {{rank}}"),
                    Query(
                        f"commtrace:work_seconds:typical{{{RUN}}} and on (run_id, pp) commtrace_last_step{{{RANK}}}",
                        "typical of stage {{pp}}",
                    ),
                    text="Per step, without waiting for others: against what is typical of the stage.", from_zero=False,
                ),
                lines(
                    "Memory", "bytes",
                    *(
                        Query(f"commtrace_{name}_bytes{{{RANK}}}", f"{legend}, rank {{{{rank}}}}")
                        for name, legend in (
                            ("device_memory_allocated", "tensors"), ("device_memory_peak", "tensors, peak"),
                            ("device_memory_reserved", "reserved"), ("device_memory_reserved_peak", "reserved, peak"),
                            ("host_memory", "host"),
                        )
                    ),
                    text="Of torch's allocator on the device; on the host, of the process.",
                ),
            ],
        ),
    ]  # fmt: skip


def _grid() -> list[Row]:
    text = (
        "One cell per data-parallel replica (down) and pipeline stage (across); of its ranks the highest. Shown are "
        f"the {_MOST_ROWS} replicas with the slowest ranks."
    )
    of_nodes = (
        f"One cell per node (down) and local rank (across). Shown are the {_MOST_ROWS} nodes with the slowest ranks."
    )

    def cells(title: str, unit: str, series: str, limits: Sequence[tuple[float, str]] = ()) -> Panel:
        worst = f"topk({_MOST_ROWS}, max by (dp) (commtrace:straggler_score:ratio{{{RUN}}}))"
        query = f"(max by (dp, pp) ({series}{{{RUN}}}) and on (dp) {worst})"
        return matrix(title, unit, query, "dp", "pp", text, limits)

    worst_nodes = f"topk({_MOST_ROWS}, commtrace:node_straggler_score:max{{{RUN}}})"
    return [
        Row(
            [
                cells("Straggler score", "none", "commtrace:straggler_score:ratio", SLOW),
                cells("Own work per step", "s", "commtrace:work_seconds:per_step"),
            ],
            height=12,
        ),
        Row(
            [
                cells("Bubble", "percentunit", "commtrace:bubble:ratio"),
                cells("Exposed communication", "percentunit", "commtrace:exposed:ratio"),
            ],
            height=12,
        ),
        Row(
            [
                matrix(
                    "Straggler score by node", "none",
                    f"(max by (node, local_rank) (commtrace:straggler_score:ratio{{{RUN}}}) "
                    f"and on (node) {worst_nodes})",
                    "node", "local_rank", of_nodes, SLOW,
                ),
            ],
            height=16,
        ),
    ]  # fmt: skip


def _communication() -> list[Row]:
    sizes = "{{operation}} {{nodes}}, up to {{up_to}}"
    return [
        Row(
            [
                lines(
                    "Bus bandwidth by size", "Bps", Query(f"commtrace:message_busbw:mean{{{RUN}}}", sizes),
                    text="Effective, as nccl-tests defines it, within and between nodes; waiting for others lowers it.",
                ),
                lines(
                    "Duration by size", "s", Query(f"commtrace:message_seconds:mean{{{RUN}}}", sizes),
                    text="Mean time in flight of a call.",
                ),
            ],
            title="By size, within and between nodes",
            height=10,
        ),
        Row(
            [
                lines(
                    "Time in flight within and between nodes", "s",
                    Query(f"sum by (nodes) (commtrace:message_seconds:per_step{{{RUN}}})", "{{nodes}}"), stacked=True,
                    text="Per step, summed over calls, mean over ranks.",
                ),
                lines(
                    "Bus bandwidth within and between nodes", "Bps",
                    Query(
                        "sum by (nodes) (commtrace:message_busbw:mean"
                        f"{{{RUN}}} * commtrace:message_seconds:per_step{{{RUN}}}) "
                        f"/ sum by (nodes) (commtrace:message_seconds:per_step{{{RUN}}})", "{{nodes}}",
                    ),
                    text="Effective, mean over the time in flight: NVLink against the network.",
                ),
            ],
        ),
        Row(
            [
                _by_operation(
                    "Bus bandwidth", "Bps", "commtrace:communication_busbw:mean",
                    "Effective, of the last step, mean over ranks; waiting for others lowers it.",
                ),
                _by_operation(
                    "Waiting for the last rank", "percentunit", "commtrace:exposed_wait:ratio",
                    "Of the exposed time of those calls that the monitor compares between ranks. High: a slow rank. "
                    "Low with little bandwidth: the network.",
                ),
            ],
            title="By operation and role",
        ),
        Row(
            [
                _by_operation(
                    "Time in flight", "s", "commtrace:communication_seconds:per_step", "Per step, summed over calls."
                ),
                _by_operation(
                    "Exposed", "s", "commtrace:exposed_seconds:per_step",
                    "Per step; pipeline transfers are in the bubble.", stacked=True,
                ),
            ],
        ),
        Row(
            [
                _by_operation(
                    "Bytes per second", "Bps", "commtrace:communication_bytes:rate", "Full tensors, all ranks."
                ),
                _by_operation(
                    "Overlap", "percentunit", "commtrace:communication_overlap:mean",
                    "Share of the time in flight without a stall.", most=1,
                ),
                _by_operation("Calls per second", "cps", "commtrace:communication_operations:rate", "Of all ranks."),
            ],
        ),
    ]  # fmt: skip


def _health() -> list[Row]:
    silence = f"time() - commtrace_last_step_timestamp_seconds{{{RUN}}}"
    drops = f"sum by (kind) (rate(commtrace_spans_dropped_total{{{RUN}}}[$__rate_interval]))"
    return [
        Row(
            [
                lines(
                    "Since the last step", "s",
                    Query(f"max({silence})", "longest"), Query(f"min({silence})", "shortest"),
                    text="Grows while a run makes no progress.",
                ),
                table(
                    "Ranks that wait",
                    [Query(f"topk(10, commtrace_communications_in_flight{{{RUN}}} > 0)", "in flight")],
                    [_RANK_COLUMN, _NODE_COLUMN, Column("Value", "Communications in flight", "none")],
                    "Under way since before the last look at them: what a hung rank hangs in. Ten ranks at most.",
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Dropped spans", "cps", Query(drops, "{{kind}}"),
                    text="Anything but 0 makes the other numbers too small.",
                ),
                lines(
                    "Spans", "cps",
                    Query(f"sum(rate(commtrace_spans_total{{{RUN}}}[$__rate_interval]))", "all ranks"),
                ),
            ],
        ),
        Row(
            [
                _of_ranks(
                    "Overhead", "percentunit", f"rate(commtrace_overhead_seconds_total{{{RUN}}}[$__rate_interval])",
                    "Share of one CPU core that commtrace's own thread takes.",
                ),
                _of_ranks(
                    "Clock residual", "s", f"commtrace_clock_residual_seconds{{{RUN}}}",
                    "Error with which the monotonic clock is tied to the wall clock.",
                ),
                _of_ranks(
                    "Clock offset", "s", f"abs(commtrace_clock_offset_seconds{{{RUN}}})",
                    "How far the wall clock was moved since the recording began.",
                ),
            ],
        ),
    ]  # fmt: skip


def _of_ranks(title: str, unit: str, expr: str, text: str) -> Panel:
    """Return the median and the highest of all ranks."""
    return lines(title, unit, Query(f"max({expr})", "highest"), Query(f"quantile(0.5, {expr})", "median"), text=text)


def _each(title: str, unit: str, expr: str, text: str) -> Panel:
    return lines(title, unit, Query(expr, "rank {{rank}}"), text=text)


def _by_operation(
    title: str, unit: str, series: str, text: str, *, stacked: bool = False, most: float | None = None
) -> Panel:
    """Return a line for each operation and role of a recorded series."""
    return lines(
        title, unit, Query(f"{series}{{{RUN}}}", "{{operation}} {{role}}"), text=text, stacked=stacked, most=most
    )


def _steps(where: str) -> str:
    return f"rate(commtrace_step_duration_seconds_count{{{where}}}[$__rate_interval]) > 0"


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
    rate = f"rate({series}{{{where}}}[$__rate_interval])"
    steps = f"({_steps(where)})"
    if not by:
        return f"{rate} / {steps}"
    return f"sum without ({by}) ({rate}) / {steps}" if summed else f"{rate} / ignoring ({by}) group_left () {steps}"


def _label_values(name: str, title: str, where: str, sort: int, *, several: bool = False) -> JsonObject:
    query = f"label_values(commtrace_last_step_timestamp_seconds{where}, {name})"
    # Without "All": it would draw a line for every rank. Grafana begins with the first value.
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": sort,
        "multi": several,
        "includeAll": False,
    }


_ALPHABETICAL, _ALPHABETICAL_FROM_THE_END, _NUMERICAL = 1, 2, 3
_OF_RUN: Final = '{run_id=~"$run_id"}'
_RUNS: Final = _label_values("run_id", "Run", "", _ALPHABETICAL_FROM_THE_END)
_NODES: Final = _label_values("node", "Node", _OF_RUN, _ALPHABETICAL)
_RANKS: Final = _label_values("rank", "Rank", _OF_RUN, _NUMERICAL, several=True)


def _dashboard(name: str, title: str, text: str, rows: Sequence[Row], *variables: JsonObject) -> Dashboard:
    of_run = f"{{{RUN}}}" if variables else ""
    shown_runs = f'{RUN}, alertname=~"Commtrace.*"' if variables else 'alertname=~"Commtrace.*"'
    return {
        "uid": f"commtrace-{name}",
        "title": f"commtrace / {title}",
        "description": text,
        "tags": ["commtrace"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                *variables,
                {"name": "docs", "type": "textbox", "label": "Documentation", "query": DOCS, "hide": 2},
            ]
        },
        "annotations": {
            "list": [
                _annotation(
                    "Alerts", f'count by (alertname) (ALERTS{{{shown_runs}, alertstate="firing"}})', "{{alertname}}",
                    "red",
                ),
                _annotation("Pauses", f"max by (phase) (commtrace_open_phase{of_run}) > 0", "{{phase}}", "blue"),
                _annotation("Launches", f"changes(commtrace:launch:max{of_run}[1m]) > 0", "restarted", "purple"),
            ]
        },
        "links": [
            {
                "type": "dashboards", "tags": ["commtrace"], "title": "commtrace", "asDropdown": True,
                "includeVars": True, "keepTime": True,
            }
        ],
        "panels": arrange(rows),
    }  # fmt: skip


def _annotation(name: str, expr: str, title: str, color: str) -> JsonObject:
    return {
        "name": name, "datasource": DATASOURCE, "enable": True, "iconColor": color, "expr": expr, "step": "60s",
        "titleFormat": title, "useValueForTime": False,
    }  # fmt: skip


DIRECTORY: Final = Path(__file__).parent / "dashboards"


def dashboard_files() -> dict[str, str]:
    """Return the texts of the files by name."""
    return {name: json.dumps(dashboard, indent=1) + "\n" for name, dashboard in dashboards().items()}


if __name__ == "__main__":
    for name, text in dashboard_files().items():
        (DIRECTORY / name).write_text(text)
        print(DIRECTORY / name)
