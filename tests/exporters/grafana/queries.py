"""The queries of all dashboards, with variables filled in as Grafana does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.e2e.prometheus import Prometheus, Sample
from tests.exporters.grafana.simulated_job import RUN_ID, SCRAPE_SECONDS
from tools.grafana.dashboards import dashboards

RANGE_SECONDS = 3600
"""What the dashboards show if nobody chooses another time."""

_STEP = 15  # an hour on a thousand pixels would be 4 s: Grafana's least interval is that of the scrapes


class PanelQuery(NamedTuple):
    """One expression and its place."""

    dashboard: str
    panel: str
    expr: str
    is_instant: bool
    legend: str = ""

    @property
    def title(self) -> str:
        return f"{self.dashboard}: {self.panel}"

    def run(self, server: Prometheus, end: float) -> list[Sample]:
        """Return the newest value of each series."""
        if self.is_instant:
            return server.query_at(self.expr, end)
        return server.query_range(self.expr, end - RANGE_SECONDS, end, _STEP)


def queries(
    rank: str = "0", node: str = "node0", run_id: str = RUN_ID, scrape_seconds: int = SCRAPE_SECONDS
) -> Iterator[PanelQuery]:
    """Yield the queries of panels and annotations of every dashboard."""
    rate_interval = f"{max(_STEP + scrape_seconds, 4 * scrape_seconds)}s"
    values = {"run_id": run_id, "rank": rank, "node": node, "__rate_interval": rate_interval}
    for model in dashboards().values():
        dashboard: dict[str, Any] = json.loads(json.dumps(model))  # as Grafana reads it
        title = dashboard["title"].removeprefix("commtrace / ")
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                legend = target["legendFormat"]
                yield PanelQuery(title, panel["title"], filled(target["expr"], values), target["instant"], legend)
        for annotation in dashboard["annotations"]["list"]:
            yield PanelQuery(title, f"annotation {annotation['name']}", filled(annotation["expr"], values), False)


def filled(expr: str, values: dict[str, str]) -> str:
    """Return an expression with its variables filled in."""
    known: dict[str, Any] = {
        "__range": f"{RANGE_SECONDS}s",
        **values,
    }
    return re.sub(r"\$(\w+)", lambda found: str(known.get(found[1], found[0])), expr)
