"""The dashboards that are checked in are those that are generated, and ask only for what is exported."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.path_totals import PathTotals
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.exporters.grafana.dashboards import DIRECTORY, dashboard_files, dashboards
from commtrace.exporters.grafana.panels import WIDTH
from commtrace.exporters.prometheus.critical_path import PathCollector
from commtrace.exporters.prometheus.metrics import RankCollector, StepTotals
from commtrace.exporters.prometheus.rules import Timing, recording_rules
from commtrace.live.monitoring.waits import Split
from commtrace.live.summary import Device
from tests.exporters.prometheus.steps import rank, summary
from tests.live.findings import live_straggler

NAMES = list(dashboards())


def test_the_files_that_are_checked_in_are_those_that_are_generated() -> None:
    checked_in = {path.name: path.read_text() for path in DIRECTORY.iterdir()}

    assert checked_in == dashboard_files(), "run python -m commtrace.exporters.grafana.dashboards"


def exported() -> set[str]:
    """The names of all series of a rank of which everything is known, and of what is recorded from them."""
    totals = StepTotals()
    counts = {"tokens": 1.0, "samples": 1.0, "model_flops": 1.0}
    totals.add(summary(counts=counts, device=Device("NVIDIA H200", 1)))
    live = rank()
    live.split = {("all_reduce", "dp"): Split(1, 1)}
    live.joins, live.stragglers = True, (live_straggler(),)
    samples = {sample.name for family in RankCollector(live, totals).collect() for sample in family.samples}
    run = PathTotals(".")
    run.path, run.last_step = CriticalPath(1, (Share(0, "forward", "", 1, 0),)), 0
    run.lost = LostTime(1, None, 1, 1, 0, 0, 0, 0, 0, 0)
    samples |= {sample.name for family in PathCollector(run).collect() for sample in family.samples}
    return samples | {rule.record for rule in recording_rules(Timing())}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_asks_only_for_what_is_exported(name: str) -> None:
    asked = {word for expr in expressions(dashboards()[name]) for word in re.findall(r"commtrace[\w:]+", expr)}

    assert asked
    assert asked <= exported()


@pytest.mark.parametrize("name", NAMES)
def test_every_expression_is_about_the_chosen_run(name: str) -> None:
    dashboard = dashboards()[name]
    chosen = {variable["name"] for variable in dashboard["templating"]["list"]}
    for expr in expressions(dashboard):
        assert re.findall(r'run_id=~"\$run_id"', expr), expr
        assert len(re.findall(r"commtrace[\w:]+\{", expr)) == len(re.findall(r"commtrace[\w:]+", expr)), expr
        assert set(re.findall(r"\$(?!__)(\w+)", expr)) <= chosen, expr


@pytest.mark.parametrize("name", NAMES)
def test_panels_fit_beside_each_other(name: str) -> None:
    panels = dashboards()[name]["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < WIDTH
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_no_two_dashboards_are_the_same_to_grafana() -> None:
    texts = [json.loads(text) for text in dashboard_files().values()]

    assert len({text["uid"] for text in texts}) == len({text["title"] for text in texts}) == len(texts)
