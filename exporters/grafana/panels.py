"""Panels of a dashboard in Grafana's JSON model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from commtrace.trace.json_values import JsonObject, JsonValue

Panel: TypeAlias = JsonObject
"""A panel of Grafana's JSON model."""

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
"""Columns of Grafana's grid."""

HEIGHT: Final = 8


class Query(NamedTuple):
    """One expression of a panel, in PromQL with ``$run_id`` and ``$rank``; ``exemplars`` shows the histogram's too."""

    expr: str
    legend: str
    exemplars: bool = False


def lines(title: str, unit: str, *queries: Query, text: str = "", stacked: bool = False) -> Panel:
    """Return series over time; ``stacked`` if they are parts of a whole."""
    custom: dict[str, JsonValue] = {"fillOpacity": 70 if stacked else 5, "lineWidth": 1, "showPoints": "auto"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        **_panel("timeseries", title, text),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "max"], "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(number, query) for number, query in enumerate(queries)],
    }


def number(title: str, unit: str, query: Query, text: str = "", limits: Sequence[tuple[float, str]] = ()) -> Panel:
    """Return the newest value, large; ``limits`` are values from which on it has a colour."""
    return {
        **_panel("stat", title, text),
        "fieldConfig": {"defaults": {"unit": unit, "thresholds": _thresholds(limits)}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
        "targets": [_target(0, query)],
    }


def table(
    title: str, unit: str, query: Query, columns: Mapping[str, str], text: str = "",
    limits: Sequence[tuple[float, str]] = (), hides: Sequence[str] = (),
) -> Panel:  # fmt: skip
    """Return the newest value of each series, the highest first; ``columns`` are shown labels with headings."""
    hidden = {"Time": True, **dict.fromkeys(("__name__", "instance", "job", *hides), True)}
    return {
        **_panel("table", title, text),
        "fieldConfig": {
            "defaults": {"custom": {"align": "left"}},
            "overrides": [_value_column(unit, limits)],
        },
        "options": {"showHeader": True, "sortBy": [{"displayName": columns.get("Value", "Value"), "desc": True}]},
        "targets": [{**_target(0, query), "format": "table", "instant": True, "range": False}],
        "transformations": [
            {"id": "organize", "options": {"excludeByName": hidden, "renameByName": dict(columns)}},
        ],
    }


def matrix(
    title: str, unit: str, query: Query, rows: str, columns: str, text: str = "",
    limits: Sequence[tuple[float, str]] = (),
) -> Panel:  # fmt: skip
    """Return the newest values as a heat map: one label down, another across."""
    defaults: dict[str, JsonValue] = {
        "unit": unit,
        "decimals": 2,
        "custom": {"align": "center", "cellOptions": {"type": "color-background", "mode": "basic"}},
    }
    if limits:
        defaults["thresholds"] = _thresholds(limits)
    else:
        defaults["color"] = {"mode": "continuous-GrYlRd"}
    return {
        **_panel("table", title, text),
        "fieldConfig": {
            "defaults": defaults,
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": f"{rows}\\{columns}"},
                    "properties": [
                        {"id": "custom.cellOptions", "value": {"type": "auto"}},
                        {"id": "unit", "value": ""},
                    ],
                }
            ],
        },
        "options": {"showHeader": True},
        "targets": [{**_target(0, query), "format": "table", "instant": True, "range": False}],
        "transformations": [
            {
                "id": "groupingToMatrix",
                "options": {"columnField": columns, "rowField": rows, "valueField": "Value"},
            }
        ],
    }


def arrange(rows: Sequence[Sequence[Panel]]) -> list[Panel]:
    """Return the panels with their places; those of a row share its width."""
    placed: list[Panel] = []
    for down, row in enumerate(rows):
        width = WIDTH // len(row)
        for across, panel in enumerate(row):
            place = {"x": across * width, "y": down * HEIGHT, "w": width, "h": HEIGHT}
            placed.append({**panel, "id": len(placed) + 1, "gridPos": place})
    return placed


def _panel(kind: str, title: str, text: str) -> Panel:
    return {"type": kind, "title": title, "description": text, "datasource": DATASOURCE}


def _target(number: int, query: Query) -> JsonObject:
    target: JsonObject = {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": True,
    }
    return {**target, "exemplar": True} if query.exemplars else target


def _value_column(unit: str, limits: Sequence[tuple[float, str]]) -> JsonObject:
    properties: list[JsonObject] = [{"id": "unit", "value": unit}]
    if limits:
        properties += [
            {"id": "thresholds", "value": _thresholds(limits)},
            {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}},
        ]
    return {"matcher": {"id": "byName", "options": "Value"}, "properties": properties}


def _thresholds(limits: Sequence[tuple[float, str]]) -> JsonObject:
    steps: list[JsonObject] = [{"color": "green", "value": None}]
    return {"mode": "absolute", "steps": steps + [{"color": color, "value": value} for value, color in limits]}
