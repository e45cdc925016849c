"""Panels of a dashboard in Grafana's JSON model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from commtrace.trace.json_values import JsonObject, JsonValue

Panel: TypeAlias = JsonObject
"""A panel of Grafana's JSON model."""

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
"""Columns of Grafana's grid."""

Limits: TypeAlias = Sequence[tuple[float, str]]
"""Values from which on something has a colour."""


class Query(NamedTuple):
    """One expression of a panel, in PromQL with Grafana's variables; ``exemplars`` shows the histogram's too."""

    expr: str
    legend: str
    exemplars: bool = False


class Link(NamedTuple):
    """A link of a value: its text, and a URL with Grafana's variables."""

    title: str
    url: str

    def to_json(self) -> JsonObject:
        return {"title": self.title, "url": self.url, "targetBlank": False}


Words: TypeAlias = Mapping[str, str]
"""What is shown instead of a value; keys that end in ``.*`` are patterns, and the first that fits counts."""


class Column(NamedTuple):
    """A shown column of a table. ``name`` is a label, or ``Value``, with ``Value #B`` for the second query's."""

    name: str
    heading: str
    unit: str = ""
    limits: Limits = ()
    link: Link | None = None
    words: Words = MappingProxyType({})
    width: int = 0  # in pixels; 0 shares what the others leave


class Row(NamedTuple):
    """Panels beside each other, below a heading if there is a title; without ``widths`` they share the width."""

    panels: Sequence[Panel]
    height: int = 8
    title: str = ""
    widths: Sequence[int] = ()


def lines(
    title: str, unit: str, *queries: Query, text: str = "", stacked: bool = False, from_zero: bool = True,
    most: float | None = None, link: Link | None = None, limits: Limits = (),
) -> Panel:  # fmt: skip
    """Return series over time; ``stacked`` if they are parts of a whole, ``most`` is the end of the axis.

    Limits are drawn as lines.
    """
    custom: dict[str, JsonValue] = {"fillOpacity": 70 if stacked else 5, "lineWidth": 1, "showPoints": "auto"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, JsonValue] = {"unit": unit, "custom": custom, "links": _links(link)}
    if limits:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = _thresholds(limits)
    if from_zero:
        defaults["min"] = 0
    if most is not None:
        defaults["max"] = most
    return {
        **_panel("timeseries", title, text),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "max"], "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(number, query) for number, query in enumerate(queries)],
    }


def number(
    title: str, unit: str, query: Query, text: str = "", limits: Limits = (), *, nothing: str = "–",
    link: Link | None = None, words: Words | None = None,
) -> Panel:  # fmt: skip
    """Return the newest value, large, with the legend if it has one; ``nothing`` stands where there is no value."""
    defaults: dict[str, JsonValue] = {
        "unit": unit, "noValue": nothing, "thresholds": _thresholds(limits), "links": _links(link),
        "mappings": _mappings(words or {}),
    }  # fmt: skip
    return {
        **_panel("stat", title, text),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "background" if limits else "value",
            "graphMode": "none",
            "textMode": "value_and_name" if query.legend else "value",
        },
        "targets": [_instant(0, query)],
    }


def shares(title: str, unit: str, query: Query, text: str = "") -> Panel:
    """Return the newest value of each series as a bar."""
    return {
        **_panel("bargauge", title, text),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "thresholds": _thresholds(())}, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "horizontal",
            "displayMode": "basic",
        },
        "targets": [_instant(0, query)],
    }


def table(
    title: str, queries: Sequence[Query], columns: Sequence[Column], text: str = "", *, joined_by: str = "",
    merged: bool = False, nothing: str = "–",
) -> Panel:  # fmt: skip
    """Return the newest value of each series, the highest of the first query first, with these columns in this order.

    Several queries need a label that they are ``joined_by``, or are ``merged`` by all their labels. The value of a
    single one is called ``Value``, those of several ``Value #A``, ``Value #B``.
    """
    first_value = next(column for column in columns if column.name.startswith("Value"))
    transformations: list[JsonObject] = []
    if joined_by:
        transformations.append({"id": "joinByField", "options": {"byField": joined_by, "mode": "outer"}})
    if merged:
        transformations.append({"id": "merge", "options": {}})
    transformations += [
        {"id": "filterFieldsByName", "options": {"include": {"names": [column.name for column in columns]}}},
        {
            "id": "organize",
            "options": {
                "indexByName": {column.name: place for place, column in enumerate(columns)},
                "renameByName": {column.name: column.heading for column in columns},
            },
        },
    ]
    return {
        **_panel("table", title, text),
        "fieldConfig": {
            "defaults": {"custom": {"align": "left"}, "noValue": nothing},
            "overrides": [_override(column) for column in columns],
        },
        "options": {"showHeader": True, "sortBy": [{"displayName": first_value.heading, "desc": True}]},
        "targets": [{**_instant(place, query), "format": "table"} for place, query in enumerate(queries)],
        "transformations": transformations,
    }


def note(title: str, text: str) -> Panel:
    """Return a text in Markdown."""
    return {"type": "text", "title": title, "options": {"mode": "markdown", "content": text}}


def matrix(title: str, unit: str, series: str, rows: str, columns: str, text: str = "", limits: Limits = ()) -> Panel:
    """Return the newest values as a heat map: one label of the series down, another across, both in order.

    Prometheus' labels are text, and Grafana takes rows and columns in order of arrival: so numbers are padded with
    zeros, missing labels are 0, and the cells are sorted by both.
    """
    query = series
    for label in (rows, columns):
        for digits, zeros in (("", "000"), ("[0-9]", "00$1"), ("[0-9]{2}", "0$1")):
            query = f'label_replace({query}, "{label}", "{zeros}", "{label}", "({digits})")'
    query = f'label_join({query}, "cell", " ", "{rows}", "{columns}")'
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
                        {"id": "unit", "value": "string"},
                    ],
                }
            ],
        },
        "options": {"showHeader": True},
        "targets": [{**_instant(0, Query(query, "")), "format": "table"}],
        "transformations": [
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "cell"}]}},
            {
                "id": "groupingToMatrix",
                "options": {"columnField": columns, "rowField": rows, "valueField": "Value"},
            },
        ],
    }


def heatmap(title: str, unit: str, query: Query, text: str = "") -> Panel:
    """Return the buckets of a histogram over time."""
    return {
        **_panel("heatmap", title, text),
        "fieldConfig": {"defaults": {"unit": "ops"}, "overrides": []},
        "options": {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
            "yAxis": {"unit": unit},
            "tooltip": {"mode": "single"},
            "legend": {"show": True},
        },
        "targets": [{**_target(0, query), "format": "heatmap"}],
    }


def timeline(title: str, query: Query, text: str, limits: Limits, link: Link) -> Panel:
    """Return one band per series over time, coloured by its value."""
    return {
        **_panel("state-timeline", title, text),
        "fieldConfig": {
            "defaults": {
                "unit": "none", "decimals": 2, "color": {"mode": "thresholds"}, "thresholds": _thresholds(limits),
                "custom": {"fillOpacity": 80, "lineWidth": 0}, "links": _links(link),
            },
            "overrides": [],
        },
        "options": {
            "mergeValues": True, "showValue": "never", "rowHeight": 0.9,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
            "tooltip": {"mode": "single"},
        },
        "targets": [_target(0, query)],
    }  # fmt: skip


def arrange(rows: Sequence[Row]) -> list[Panel]:
    """Return the panels with their ids and places; those of a row share its width."""
    placed: list[Panel] = []
    down = 0
    for row in rows:
        if row.title:
            place: JsonObject = {"x": 0, "y": down, "w": WIDTH, "h": 1}
            heading: Panel = {"type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
            placed.append({**heading, "id": len(placed) + 1})
            down += 1
        widths = row.widths or [WIDTH // len(row.panels)] * len(row.panels)
        for panel, width, end in zip(row.panels, widths, accumulate(widths), strict=True):
            place = {"x": end - width, "y": down, "w": width, "h": row.height}
            placed.append({**panel, "id": len(placed) + 1, "gridPos": place})
        down += row.height
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
        "instant": False,
    }
    return {**target, "exemplar": True} if query.exemplars else target


def _instant(number: int, query: Query) -> JsonObject:
    return {**_target(number, query), "instant": True, "range": False}


def _override(column: Column) -> JsonObject:
    # Renamed fields are matched by their new name.
    properties: list[JsonObject] = []
    if column.unit:
        properties.append({"id": "unit", "value": column.unit})
    if column.limits:
        properties += [
            {"id": "thresholds", "value": _thresholds(column.limits)},
            {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}},
        ]
    if column.link:
        properties.append({"id": "links", "value": _links(column.link)})
    if column.words:
        properties.append({"id": "mappings", "value": _mappings(column.words)})
    if column.width:
        properties.append({"id": "custom.width", "value": column.width})
    elif column.words:  # long texts
        properties.append({"id": "custom.cellOptions", "value": {"type": "auto", "wrapText": True}})
    return {"matcher": {"id": "byName", "options": column.heading}, "properties": properties}


def _mappings(words: Words) -> list[JsonValue]:
    return [
        {"type": "regex", "options": {"pattern": f"^{value}$", "result": {"text": text, "index": index}}}
        if value.endswith(".*")
        else {"type": "value", "options": {value: {"text": text, "index": index}}}
        for index, (value, text) in enumerate(words.items())
    ]


def _links(link: Link | None) -> list[JsonValue]:
    return [link.to_json()] if link else []


def _thresholds(limits: Limits) -> JsonObject:
    steps: list[JsonObject] = [{"color": "green", "value": None}]
    return {"mode": "absolute", "steps": steps + [{"color": color, "value": value} for value, color in limits]}
