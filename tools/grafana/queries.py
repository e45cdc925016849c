"""What several dashboards ask Prometheus for, and the links and columns that they share."""

from __future__ import annotations

from typing import Final

from commtrace.analysis.stragglers.limits import LIVE, SUMS
from tools.grafana.panels import Column, Link, Panel, Query, lines

RUN: Final = 'run_id=~"$run_id"'
NODE: Final = 'run_id=~"$run_id", node=~"$node"'
RANK: Final = 'run_id=~"$run_id", rank=~"$rank"'
SLOW: Final = ((1 + LIVE.share, "yellow"), (1 + SUMS.share, "red"))
"""Limits of the straggler score, as in the alert."""

OPERATION: Final = "operation, role"
KEPT: Final = "${datasource:queryparam}&${__url_time_range}"
TO_RUN: Final = Link("Run", f"/d/commtrace-overview?var-run_id=${{__value.raw}}&{KEPT}")
TO_RUNBOOK: Final = Link("What to do", "${docs:raw}alerts/#${__value.raw}")


def link_to(dashboard: str, variable: str, value: str) -> Link:
    """Return the link to another dashboard with a value, for the same run and time."""
    url = f"/d/commtrace-{dashboard}?var-{variable}={value}&${{run_id:queryparam}}&{KEPT}"
    return Link(f"This {variable}", url)


CELL, NODE_LABEL, RANK_LABEL = "${__value.raw}", "${__field.labels.node}", "${__field.labels.rank}"
RANK_COLUMN: Final = Column("rank", "Rank", link=link_to("rank", "rank", CELL))
NODE_COLUMN: Final = Column("node", "Node", link=link_to("node", "node", CELL))
PLACE: Final = (RANK_COLUMN, NODE_COLUMN, Column("pp", "Stage"), Column("dp", "Replica"), Column("tp", "Tensor"))


def highest(label: str, series: str, most: int) -> str:
    """Return the series of those that had the highest values in the range that is shown."""
    return f"{series} and on ({label}) topk({most}, max by ({label}) (max_over_time({series}[$__range] @ end())))"


def largest_shares(function: str, series: str, labels: str) -> str:
    """Return the ten largest of these labels, as shares of the whole."""
    rate = f"{function}({series}{{{RUN}}}[$__rate_interval])"
    return f"topk(10, sum by ({labels}) ({rate})) / ignoring ({labels}) group_left () sum({rate})"


def lines_of_ranks(title: str, unit: str, expr: str, text: str) -> Panel:
    """Return the median and the highest of all ranks."""
    return lines(title, unit, Query(f"max({expr})", "highest"), Query(f"quantile(0.5, {expr})", "median"), text=text)


def lines_by_rank(title: str, unit: str, expr: str, text: str) -> Panel:
    """Return a line for each rank."""
    return lines(title, unit, Query(expr, "rank {{rank}}"), text=text)


def lines_by_operation(
    title: str, unit: str, series: str, text: str, *, stacked: bool = False, most: float | None = None
) -> Panel:
    """Return a line for each operation and role of a recorded series."""
    return lines(
        title, unit, Query(f"{series}{{{RUN}}}", "{{operation}} {{role}}"), text=text, stacked=stacked, most=most
    )


def steps_rate(where: str) -> str:
    """Return the steps per second of each rank that trains."""
    return f"rate(commtrace_step_duration_seconds_count{{{where}}}[$__rate_interval]) > 0"


def step_parts(where: str, aggregate: str) -> tuple[Query, ...]:
    """Return the parts of a step, seconds per step, averaged over ranks."""

    def part(series: str, legend: str, by: str = "") -> Query:
        return Query(f"{aggregate}({per_step(series, where, by, summed=True)})", legend)

    return (
        part("commtrace_compute_seconds_total", "compute", "phase"),
        part("commtrace_exposed_seconds_total", "exposed", OPERATION),
        part("commtrace_bubble_seconds_total", "bubble"),
        part("commtrace_data_seconds_total", "data"),
        part("commtrace_checkpoint_seconds_total", "checkpoint"),
        part("commtrace_gc_seconds_total", "gc"),
        part("commtrace_between_seconds_total", "between steps"),
        part("commtrace_other_seconds_total", "other"),
    )


def per_step(series: str, where: str, by: str = "", *, summed: bool = False) -> str:
    """Return seconds per step of each rank; ``by`` names the labels that the series has beside the rank's own."""
    rate = f"rate({series}{{{where}}}[$__rate_interval])"
    steps = f"({steps_rate(where)})"
    if not by:
        return f"{rate} / {steps}"
    return f"sum without ({by}) ({rate}) / {steps}" if summed else f"{rate} / ignoring ({by}) group_left () {steps}"
