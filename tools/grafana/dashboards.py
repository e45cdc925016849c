"""Grafana's dashboards: ``python -m tools.grafana.dashboards`` writes the files.

Panels ask for recorded sums and means over the ranks of a run or node, or for the highest few: a job of a thousand
ranks must neither draw a thousand lines nor make Prometheus add up a hundred thousand series for every look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from commtrace.trace.json_values import JsonObject
from tools.grafana.details import communication, grid, health, node, rank
from tools.grafana.overview import fleet, overview
from tools.grafana.panels import DATASOURCE, Row, arrange
from tools.grafana.queries import RUN
from tools.prometheus_rules import DOCS

Dashboard: TypeAlias = JsonObject


def dashboards() -> dict[str, Dashboard]:
    """Return all of them, by the name of their file."""
    return {
        "commtrace-fleet.json": _dashboard("fleet", "Fleet", "All runs beside each other.", fleet()),
        "commtrace-overview.json": _dashboard(
            "overview", "Overview", "One run: is it training, how fast, who is slow, since when, at what cost.",
            overview(), _RUNS,
        ),
        "commtrace-node.json": _dashboard("node", "Node", "The ranks of one node.", node(), _RUNS, _NODES),
        "commtrace-rank.json": _dashboard("rank", "Rank", "One rank, or some.", rank(), _RUNS, _RANKS),
        "commtrace-grid.json": _dashboard(
            "grid", "Data x pipeline", "The run by its parallel dimensions, and by node.", grid(), _RUNS
        ),
        "commtrace-communication.json": _dashboard(
            "communication", "Communication", "The run by operation, role, size and place.", communication(), _RUNS
        ),
        "commtrace-health.json": _dashboard(
            "health", "Health of commtrace", "Whether the other numbers can be trusted.", health(), _RUNS
        ),
    }  # fmt: skip


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


DIRECTORY: Final = Path(__file__).parents[2] / "exporters" / "grafana" / "dashboards"


def dashboard_files() -> dict[str, str]:
    """Return the texts of the files by name."""
    return {name: json.dumps(dashboard, indent=1) + "\n" for name, dashboard in dashboards().items()}


if __name__ == "__main__":
    for name, text in dashboard_files().items():
        (DIRECTORY / name).write_text(text)
        print(DIRECTORY / name)
