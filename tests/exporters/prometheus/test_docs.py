"""docs/prometheus.md and docs/grafana.md list what there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.matching.stages import Flow
from commtrace.analysis.path_totals import PathTotals
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.exporters.prometheus.critical_path import PathCollector
from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters
from commtrace.findings.own_cost import OwnCost
from commtrace.live.monitoring.waits import Split
from commtrace.live.summary import DeviceMemory
from commtrace.trace import schema
from commtrace.trace.schema import Row
from tests.exporters.prometheus.steps import rank, summary
from tests.live.findings import slow_finding
from tools.grafana.dashboards import dashboards
from tools.prometheus_rules import Timing, alerts

DOCS = Path(__file__).resolve().parents[3] / "docs"


def first_cells(page: str, pattern: str) -> list[str]:
    rows = [line.split("|")[1] for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    return [word for row in rows for word in re.findall(pattern, row)]


def test_every_metric_is_documented() -> None:
    totals = StepCounters()
    counts = {"tokens": 1.0, "samples": 1.0, "model_flops": 1.0}
    device = DeviceMemory("NVIDIA H200", 1, 1, 1, 1)
    totals.add(summary(counts=counts, device=device, launch_bound_ns={"forward": 1}))
    live = rank()
    live.flow, live.marks.topology["coordinates"] = Flow(sender=0), {}  # a stage that nobody told
    live.joins, live.score, live.findings = True, 1.0, (slow_finding(),)
    live.budget.add([Row(schema.STEP, "step", schema.COMPUTE, 0, 1)], {})
    live.own_cost.cost = OwnCost(stretches=9, quiet_ns=100, cost_ns=2, error_ns=1)
    live.split = {("all_reduce", "dp"): Split(1, 1)}
    names = {
        sample.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for family in RankCollector(live, totals).collect()
        for sample in family.samples
    }

    totals_of_run = PathTotals(".")
    totals_of_run.path, totals_of_run.last_step = CriticalPath(1, (Share(0, "forward", "", 1, 0),)), 0
    totals_of_run.lost = LostTime(1, None, 1, 1, 0, 0, 0, 0, 0, 0)
    names |= {sample.name for family in PathCollector(totals_of_run).collect() for sample in family.samples}

    assert sorted(first_cells("prometheus.md", r"`(commtrace_\w+)`")) == sorted(names)


def test_every_alert_and_dashboard_is_documented() -> None:
    assert first_cells("alerts.md", r"`(Commtrace\w+)`") == [alert.name for alert in alerts(Timing())]
    titles = [str(dashboard["title"]).removeprefix("commtrace / ") for dashboard in dashboards().values()]
    assert [cell for cell in first_cells("grafana.md", r"^ ([A-Z][^`]*?) $") if cell in titles] == titles


def test_every_runbook_link_leads_to_a_section_of_the_page_on_alerts() -> None:
    page = (DOCS / "alerts.md").read_text()
    for alert in alerts(Timing()):
        assert alert.runbook == f"alerts/#{alert.name.lower()}"
        heading, anchor = f"\n## {alert.name}\n", f'<a id="{alert.name}"></a>\n'  # dashboards link by the alert's label
        assert heading + anchor in page
    assert "alerts.md" in (DOCS.parent / "mkdocs.yml").read_text()
