"""The first two dashboards: all runs beside each other, and one run at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commtrace.analysis.stragglers.limits import LIVE
from commtrace.findings.causes import CAUSES, PART_OF_LOSS, PLACES, advice, cause_or_loss
from tools.grafana.panels import (
    Column,
    Limits,
    Link,
    Panel,
    Query,
    Row,
    heatmap,
    lines,
    note,
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

ALERTS, FINDINGS, LAUNCH_BOUND = "Alerts", "Findings", "Launch-bound"

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
                    "Every run that reports now; a click leads to its overview. A rank's score is its own work, as a "
                    "multiple of what its peers need. Good: no cell is coloured.",
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
                    "Alerts of all runs that fire now; a click leads to what to do. Good: the table is empty.",
                ),
            ],
        ),
        Row(
            [
                _of_runs("Step time", "s", step, "Median step of the last 5 minutes, by run. Good: it stays level."),
                _of_runs(
                    "Slowest rank", "none", "commtrace:run_straggler_score:max",
                    "Own work of the slowest rank of each run, as a multiple of what its peers need. Good: close to "
                    "1, below the lines.", zero=False, limits=SLOW
                ),
            ],
        ),
        Row(
            [
                _of_runs("MFU", "percentunit", "commtrace:mfu:mean",
                    "Share of the GPUs' peak that the model's FLOPs use, mean over ranks. Good: it stays where it was "
                    "when the run was tuned."),
                _of_runs(
                    "Goodput", "percentunit", "commtrace:goodput:mean",
                    "Share of the wall time that is spent in training steps. Good: close to 100 % once the job has "
                    "started."
                ),
            ],
        ),
    ]  # fmt: skip


def _of_runs(title: str, unit: str, series: str, text: str, *, zero: bool = True, limits: Limits = ()) -> Panel:
    link = Link("Run", f"/d/commtrace-overview?var-run_id=${{__field.labels.run_id}}&{KEPT}")
    return lines(title, unit, Query(series, "{{run_id}}"), text=text, from_zero=zero, link=link, limits=limits)


def overview() -> list[Row]:
    """Return the rows that show one run at a glance."""
    worst = f"commtrace:run_straggler_score:max{{{RUN}}}"
    return [
        _verdict_and_findings(),
        Row(_numbers_of_the_job(worst), height=5),
        Row(_more_numbers(), height=4),
        _alerts(),
        _slow_nodes_and_ranks(),
        _step_times(),
        _parts_and_roles(),
        _bubble_waits_and_goodput(),
        _critical_path_and_losses(),
    ]


def _verdict_and_findings() -> Row:
    """Return the answers for whoever was woken: what is wrong, who, since when, what it costs, what to do."""
    hung = f"2 * (sum by (run_id) (commtrace_hung{{{RUN}}}) > bool 0)"
    slow = f'count by (run_id) (commtrace_finding_cost_seconds{{{RUN}, kind="slow"}} > 0) > bool 0'
    # A label of its own lets `or` keep both.
    verdict = f'max by (run_id) ({hung} or label_replace({slow}, "of", "slow", "", ""))'
    return Row(
        [
            number(
                "Is all right?", "none", Query(verdict, ""),
                "The worst of what is found now: ranks that hang, or something that slows the job. Good: it says yes.",
                ((1, "orange"), (2, "red")), nothing="no rank answers",
                words={"0": "yes", "1": "it is slow", "2": "it hangs"},
            ),
            _findings(),
            note("How to read this", HOW_TO_READ),
        ],
        height=9,
        widths=(4, 14, 6),
    )  # fmt: skip


HOW_TO_READ: Final = """\
**Findings** are those of `commtrace top` and `commtrace summary`: what slows the job, the costliest first, then where \
the rest of the time is lost. *Costs* is what each step would save without it, by a replay of the step.

1. *It hangs*: run `commtrace doctor RUN` before anybody restarts the job. It names the rank and its line.
2. *It is slow*: the first row of the table says who, since when, and what to do. Click on the rank.
3. The table is empty: the job runs without the monitor (`COMMTRACE_EXPORT=prometheus,monitor`).

Colours are limits: green is good. The **i** of each panel says what is good there. \
[What the numbers mean](${docs:raw}definitions/) · [How to use these dashboards](${docs:raw}grafana/)
"""


def _findings() -> Panel:
    """Return the monitor's findings with what to do, in the words of the other outputs."""
    labels = "kind, place, cause, finding_rank"

    def of_finding(series: str) -> str:
        newest = f"max by ({labels}) ({series}{{{RUN}}})"
        return f'label_join({newest}, "advice", "/", "cause", "place")'

    cost = of_finding("commtrace_finding_cost_seconds")
    return table(
        FINDINGS,
        [
            Query(cost, "cost"),
            Query(f"{cost} / scalar(max(commtrace:run_step_seconds:mean{{{RUN}}}))", "share"),
            Query(f"1000 * {of_finding('commtrace_finding_since_timestamp_seconds')}", "since"),
        ],
        [
            Column("kind", "Kind", words={"slow": "slow", "lost": "lost time"}, width=80),
            Column("place", "Where", words=_PLACES, width=90),
            Column("finding_rank", "Rank", link=link_to("rank", "rank", CELL), width=60),
            Column("cause", "Cause", words=_CAUSES, width=150),
            Column("Value #A", "Costs", "s", width=90),
            Column("Value #B", "Of the step", "percentunit", ((0.03, "yellow"), (0.1, "red")), width=90),
            Column("Value #C", "Since", "dateTimeFromNow", width=120),
            Column("advice", "What to do", words=_ADVICE),
        ],
        "What slows the job, with cause, cost per step and advice, as the monitor finds it "
        "(COMMTRACE_EXPORT=prometheus,monitor). Good: no row is of the kind slow.",
        merged=True,
    )  # fmt: skip


_PLACES: Final = {
    "ranks": "rank", "host": "host", "tensor_group": "tensor group", "stage": "stage", "link": "link",
    "network": "network", "job": "all ranks",
}  # fmt: skip
_NAMES: Final = tuple(dict.fromkeys((*CAUSES, *PART_OF_LOSS)))
_CAUSES: Final = {name: cause_or_loss(name).words for name in _NAMES}


def _advice() -> Iterator[tuple[str, str]]:
    """Yield what to do by cause and place; last of a cause, for all places that are not told apart."""
    for name in _NAMES:
        usual = advice(name, 1)
        yield from ((f"{name}/{place}", told) for place in PLACES if (told := advice(name, 1, place)) != usual)
        yield f"{name}/.*", usual


_ADVICE: Final = dict(_advice())


def _alerts() -> Row:
    """Return what fires."""
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
                "Alerts of this run that fire now; a click leads to what to do. Good: the table is empty.",
            ),
        ],
        height=5,
    )  # fmt: skip


def _slow_nodes_and_ranks() -> Row:
    """Return the nodes over time, and the slowest ranks."""
    return Row(
        [
            timeline(
                "Nodes, slowest first",
                Query(highest("node", f"commtrace:node_straggler_score:max{{{RUN}}}", _MOST_NODES), "{{node}}"),
                "The score of each node's slowest rank over time: own work, as a multiple of what its peers need. "
                f"Shown are the {_MOST_NODES} nodes that were slowest in this range. Good: all bands are green.",
                SLOW,
                link_to("node", "node", NODE_LABEL),
            ),
            table(
                "Slowest ranks", [Query(f"topk(10, commtrace:straggler_score:ratio{{{RUN}}})", "score")],
                [*PLACE, Column("Value", "Score", "none", SLOW)],
                "The ten ranks with the highest score: own work, as a multiple of what the ranks of the same stage "
                "need. A click leads to the rank or node. Good: no score is coloured.",
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
                "How many steps took how long; buckets are 5 % apart around the usual duration. Good: one narrow, "
                "level band, with few steps above it.",
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
                text="Duration of a step, now and an hour before; a point leads to the trace of its step. Good: "
                "median and mean lie close together and stay level.", from_zero=False,
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
                text="The parts of a step, mean over ranks; they add up to the step. Good: compute is by far the "
                "largest part.",
            ),
            lines(
                "Exposed by role", "percentunit",
                Query(f"commtrace:role_exposed:mean{{{RUN}}}", "{{role}}"), stacked=True,
                text="Share of the step in which a rank stalls for communication of this role, waiting included. "
                "Good: a few per cent, and level.",
            ),
            lines(
                LAUNCH_BOUND, "s",
                Query(
                    f"avg by (phase) ({per_step('commtrace_launch_bound_seconds_total', RUN, 'phase')})", "{{phase}}"
                ),
                stacked=True,
                text="Per step, mean over ranks: compute, by phase, and time in no span, for which the device waited "
                "for its host, at most. It is contained in the other parts, and unknown without a device. Good: close "
                "to 0.",
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
                text="Share of the step in which a rank of this stage waits for its neighbours in the pipeline. Good: "
                "close to what the schedule makes unavoidable, which commtrace pipeline prints.",
            ),
            lines_by_operation(
                "Waiting for the last rank", "percentunit", "commtrace:exposed_wait:ratio",
                "Share of the exposed time in which a call waits for its last rank; the rest is transfer. Needs the "
                "monitor. Good: low; high means that some rank comes late.",
            ),
            shares(
                "Wall time of the job", "percentunit",
                Query(
                    f"commtrace:run_seconds:mean{{{RUN}}} / ignoring (part) group_left () "
                    f"sum by (run_id) (commtrace:run_seconds:mean{{{RUN}}})", "{{part}}",
                ),
                "What the wall time since this launch began was spent on, mean over ranks. Good: training has nearly "
                "all.",
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
                text="Share of the critical path by rank and kind of work, the ten largest. From commtrace metrics "
                "RUN --serve. Good: compute, evenly spread over the ranks of a stage.",
            ),
            lines(
                "Lost time", "percentunit",
                Query(largest_shares("delta", "commtrace_lost_seconds", "part"), "{{part}}"), stacked=True,
                text="The ideal time and each loss, as shares of the steps. From commtrace metrics RUN --serve. Good: "
                "the ideal time is by far the largest.",
            ),
            lines(
                "Lost time, by the monitor", "s",
                Query(f'commtrace_finding_cost_seconds{{{RUN}, kind="lost"}}', "{{cause}}"), stacked=True,
                text="Seconds per step that are lost without anybody being slow: exposed communication, bubble "
                "(schedule), uneven work, input and the rest. Needs COMMTRACE_EXPORT=prometheus,monitor. Good: small "
                "compared with the step.",
            ),
        ],
    )  # fmt: skip


def _numbers_of_the_job(worst: str) -> list[Panel]:
    """Return whether it trains, how fast, and who is slow by the sums of all ranks, which need no monitor."""
    step = f"commtrace:step_seconds:median{{{RUN}}}"
    excess, ranks = f"commtrace:run_straggler_excess_seconds:max{{{RUN}}}", f"commtrace:ranks:count{{{RUN}}}"
    return [
        number(
            "Last step ago", "s",
            Query(f"time() - max by (run_id) (commtrace_last_step_timestamp_seconds{{{RUN}}})", ""),
            "Time since any rank has ended a step; it grows while the run makes no progress. Good: less than a few "
            "steps.", ((120, "yellow"), (600, "red")),
            nothing="no answer",
        ),
        number(
            "Hanging ranks", "none", Query(f"sum by (run_id) (commtrace_hung{{{RUN}}})", ""),
            "Ranks that have made no progress for too long. Good: 0.", ((1, "red"),),
        ),
        number("Step", "s", Query(step, ""), "Median step of the last 5 minutes. Good: it stays the same."),
        number(
            "Against 1 h ago", "percentunit", Query(f"{step} / {step} offset 1h - 1", ""),
            "Change of the step compared with an hour ago; above 0 the steps are longer. Good: below 3 "
            "%.", ((0.03, "yellow"), (0.07, "red")),
        ),
        number(
            "Slowest rank", "none",
            Query(f"topk(1, commtrace:straggler_score:ratio{{{RUN}}})", "rank {{rank}} on {{node}}"),
            "The rank whose own work takes longest, as a multiple of what its peers need; a click leads to it. Good: "
            f"below {1 + LIVE.share:.2f}.", SLOW,
            link=link_to("rank", "rank", RANK_LABEL),
        ),
        number(
            "Slow since", "dateTimeFromNow",
            Query(f"1000 * min_over_time(timestamp({worst} > 1.1)[$__range:15s]) and {worst} > 1.1", ""),
            "When a rank first was slow in the range that is shown, if one is slow now. Good: nobody is "
            "slow.", nothing="nobody is slow",
        ),
        number(
            "GPUs lost to it", "none",
            Query(f"{excess} / commtrace:run_step_seconds:mean{{{RUN}}} * {ranks} * ({worst} > bool 1.1)", ""),
            "The excess of the slowest rank, during which the others wait, as a share of the step, times the number "
            "of ranks. Good: below 1.",
            ((1, "yellow"), (8, "red")),
        ),
        number(
            "Goodput", "percentunit", Query(f"commtrace:goodput:mean{{{RUN}}}", ""),
            "Share of the wall time of this launch that is spent in training steps. Good: close to 100 %.",
        ),
    ]  # fmt: skip


def _more_numbers() -> list[Panel]:
    return [
        number(
            "MFU", "percentunit", Query(f"commtrace:mfu:mean{{{RUN}}}", ""),
            "Share of the GPUs' peak that the model's FLOPs use; needs commtrace.count(model_flops=…) and a GPU whose "
            "peak is known. Good: it stays where it was when the run was tuned.",
        ),
        number(
            "Tokens per second", "short", Query(f"commtrace:tokens:rate{{{RUN}}}", ""),
            "Tokens of all ranks that call commtrace.count(tokens=…). Good: it stays level.",
        ),
        number(
            "Exposed", "percentunit", Query(f"commtrace:exposed:mean{{{RUN}}}", ""),
            "Share of the step in which ranks stall for communication. Good: a few per cent, and level.",
        ),
        number(
            "Bubble", "percentunit", Query(f"commtrace:bubble:mean{{{RUN}}}", ""),
            "Share of the step in which ranks wait for their neighbours in the pipeline. Good: close to what the "
            "schedule makes unavoidable.",
        ),
        number(
            "Ranks", "none", Query(f"commtrace:ranks:count{{{RUN}}}", ""),
            "Ranks that have ended a step and answer. Good: as many as the job has.",
        ),
        number(
            "Ranks missing", "none",
            Query(f"max by (run_id) (commtrace_world_size{{{RUN}}}) - commtrace:ranks:count{{{RUN}}}", ""),
            "Ranks of the job that do not answer. Good: 0.", ((1, "red"),),
        ),
        number(
            "Pauses", "none", Query(f"sum by (run_id) (commtrace_open_phase{{{RUN}}})", ""),
            "Ranks that save a checkpoint or evaluate now, while no steps end. Good: 0, or all ranks at once and not "
            "for long.",
        ),
        number(
            "Number of the step", "none", Query(f"max by (run_id) (commtrace_last_step{{{RUN}}})", ""),
            "The newest step that a rank has ended. Good: it grows.",
        ),
    ]  # fmt: skip


def _parts_of_run() -> tuple[Query, ...]:
    return (
        Query(f"commtrace:compute_seconds:per_step{{{RUN}}}", "{{phase}}"),
        Query(f"sum by (role) (commtrace:exposed_seconds:per_step{{{RUN}}})", "exposed {{role}}"),
        Query(f"commtrace:part_seconds:per_step{{{RUN}}}", "{{part}}"),
    )
