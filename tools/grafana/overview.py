"""The first two dashboards: all runs beside each other, and one run at a glance."""

from __future__ import annotations

from typing import Final

from tools.grafana.panels import (
    Column,
    Link,
    Panel,
    Query,
    Row,
    heatmap,
    lines,
    number,
    shares,
    table,
    timeline,
)
from tools.grafana.queries import (
    CELL,
    KEPT,
    NODE_COLUMN,
    NODE_LABEL,
    PLACE,
    RANK_LABEL,
    RUN,
    SLOW,
    TO_RUN,
    TO_RUNBOOK,
    highest,
    largest_shares,
    lines_by_operation,
    link_to,
    per_step,
)

ALERTS, FOUND, LAUNCH_BOUND = "Alerts", "Found by the monitor", "Launch-bound"
"""Tables that are empty while all is well."""

_MOST_NODES: Final = 20


def fleet() -> list[Row]:
    """Return the rows that show all runs beside each other."""
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
                        Column("run_id", "Run", link=TO_RUN),
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
                        Column("run_id", "Run", link=TO_RUN),
                        Column("alertname", "Alert", link=TO_RUNBOOK),
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
    link = Link("Run", f"/d/commtrace-overview?var-run_id=${{__field.labels.run_id}}&{KEPT}")
    return lines(title, unit, Query(series, "{{run_id}}"), text=text, from_zero=zero, link=link)


def overview() -> list[Row]:
    """Return the rows that show one run at a glance."""
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
                    Column("alertname", "Alert", link=TO_RUNBOOK),
                    Column("severity", "Severity"),
                    NODE_COLUMN,
                    Column("Value", "How many", "none"),
                ],
                "That fire now, with a link to what to do. Empty is good.",
            ),
            table(
                FOUND, [Query(f"commtrace_finding_cost_seconds{{{RUN}, kind=\"slow\"}}", "cost")],
                [
                    Column("finding_rank", "Rank", link=link_to("rank", "rank", CELL)),
                    Column("place", "Place"),
                    Column("cause", "Cause"),
                    Column("Value", "Costs per step", "s"),
                ],
                "What slows the job: ranks, stages, links, with cause and cost (COMMTRACE_EXPORT=prometheus,monitor). "
                "Empty is good.",
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
                Query(highest("node", f"commtrace:node_straggler_score:max{{{RUN}}}", _MOST_NODES), "{{node}}"),
                f"The slowest rank of each node over time: own work by that of its peers. Shown are the "
                f"{_MOST_NODES} nodes that were slowest in this range.",
                SLOW,
                link_to("node", "node", NODE_LABEL),
            ),
            table(
                "Slowest ranks", [Query(f"topk(10, commtrace:straggler_score:ratio{{{RUN}}})", "score")],
                [*PLACE, Column("Value", "Score", "none", SLOW)],
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
            lines(
                LAUNCH_BOUND, "s",
                Query(
                    f"avg by (phase) ({per_step('commtrace_launch_bound_seconds_total', RUN, 'phase')})", "{{phase}}"
                ),
                stacked=True,
                text="Per step, mean over ranks: compute, by phase, and time in no span, for which the device waited "
                "for its host, at most. It is no part of its own. Empty where it is not known, as without a device.",
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
            lines_by_operation(
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
                    largest_shares("rate", "commtrace_critical_path_seconds_total", "rank, kind"),
                    "rank {{rank}}: {{kind}}",
                ),
                stacked=True,
                text="Share of the steps by rank and kind, the ten largest. From commtrace metrics RUN --serve.",
            ),
            lines(
                "Lost time", "percentunit",
                Query(largest_shares("delta", "commtrace_lost_seconds", "part"), "{{part}}"), stacked=True,
                text="Share of the job's steps: the ideal time, and each loss. From commtrace metrics RUN --serve.",
            ),
            lines(
                "Lost time, by the monitor", "s",
                Query(f'commtrace_finding_cost_seconds{{{RUN}, kind="lost"}}', "{{cause}}"), stacked=True,
                text="Per step, beside what slows the job: exposed communication, bubble (schedule), uneven work, "
                "input and the rest, of the steps that the monitor replays (COMMTRACE_EXPORT=prometheus,monitor).",
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
            link=link_to("rank", "rank", RANK_LABEL),
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


def _parts_of_run() -> tuple[Query, ...]:
    return (
        Query(f"commtrace:compute_seconds:per_step{{{RUN}}}", "{{phase}}"),
        Query(f"sum by (role) (commtrace:exposed_seconds:per_step{{{RUN}}})", "exposed {{role}}"),
        Query(f"commtrace:part_seconds:per_step{{{RUN}}}", "{{part}}"),
    )
