"""Dashboards are what is generated, follow Grafana's JSON model, and ask only for what is exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.path_totals import PathTotals
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.exporters.prometheus.critical_path import PathCollector
from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters
from commtrace.findings.causes import CAUSES, PART_OF_LOSS, PLACES, advice, cause_or_loss
from commtrace.live.monitoring.waits import Split
from commtrace.live.summary import DeviceMemory
from tests.exporters.prometheus.steps import rank, summary
from tests.json_reading import read_back
from tests.live.findings import slow_finding
from tools.grafana.dashboards import DIRECTORY, dashboard_files, dashboards
from tools.grafana.panels import WIDTH
from tools.grafana.pictures import addresses
from tools.prometheus_rules import Timing, alerts, recording_rules

DASHBOARDS: dict[str, dict[str, Any]] = read_back(dashboards())
NAMES = list(DASHBOARDS)

PANEL_TYPES = {"bargauge", "heatmap", "stat", "state-timeline", "table", "timeseries"}
UNITS = {"Bps", "bytes", "cps", "dateTimeFromNow", "none", "ops", "percentunit", "s", "short", "string"}
"""Ids of @grafana/data's value formats, those that are used: a mistyped one is shown as a suffix."""

TRANSFORMATIONS = {
    "filterFieldsByName": {"include"},
    "groupingToMatrix": {"columnField", "rowField", "valueField"},
    "joinByField": {"byField", "mode"},
    "merge": set(),
    "organize": {"indexByName", "renameByName"},
    "sortBy": {"fields", "sort"},
}
"""Of Grafana's transformations, those that are used, with their options."""

GLOBAL_VARIABLES = {"__field", "__range", "__rate_interval", "__url_time_range", "__value"}


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARDS[name]["panels"]
    return found


def shown(name: str) -> list[dict[str, Any]]:
    """The panels that show data: no headings, no texts."""
    return [panel for panel in panels(name) if panel["type"] not in {"row", "text"}]


def targets(name: str) -> list[dict[str, Any]]:
    return [target for panel in shown(name) for target in panel["targets"]]


def links(value: Any) -> Iterator[dict[str, Any]]:
    """The data links anywhere in a panel."""
    if isinstance(value, dict):
        yield from ([value] if {"title", "url"} <= set(value) else [])
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from links(one)


def test_the_files_that_are_checked_in_are_those_that_are_generated() -> None:
    checked_in = {path.name: path.read_text() for path in DIRECTORY.iterdir()}

    assert checked_in == dashboard_files(), "run python -m tools.grafana.dashboards"


def exported() -> set[str]:
    """The names of all series of a rank of which everything is known, and of what is recorded from them."""
    totals = StepCounters()
    counts = {"tokens": 1.0, "samples": 1.0, "model_flops": 1.0}
    device = DeviceMemory("NVIDIA H200", 1, 1, 1, 1)
    totals.add(summary(counts=counts, device=device, launch_bound_ns={"forward": 1}))
    live = rank()
    live.split = {("all_reduce", "dp"): Split(1, 1)}
    live.joins, live.findings = True, (slow_finding(),)
    samples = {sample.name for family in RankCollector(live, totals).collect() for sample in family.samples}
    run = PathTotals(".")
    run.path, run.last_step = CriticalPath(1, (Share(0, "forward", "", 1, 0),)), 0
    run.lost = LostTime(1, None, 1, 1, 0, 0, 0, 0, 0, 0)
    samples |= {sample.name for family in PathCollector(run).collect() for sample in family.samples}
    return samples | {rule.record for rule in recording_rules(Timing())}


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_asks_only_for_what_is_exported(name: str) -> None:
    dashboard = DASHBOARDS[name]
    expressions = [one["expr"] for one in (*targets(name), *dashboard["annotations"]["list"])]
    asked = {word for expr in expressions for word in re.findall(r"commtrace[\w:]+", expr)}

    assert asked
    assert asked <= exported()


def test_gpu_activity_has_tensor_cores_and_occupancy_and_nothing_else() -> None:
    """nvidia-smi's GPU-Util is the time in which any kernel runs, one that waits for another rank included."""
    asked = {word for name in NAMES for one in targets(name) for word in re.findall(r"DCGM\w+", one["expr"])}
    words = " ".join(f"{panel['title']} {panel.get('description', '')}" for name in NAMES for panel in panels(name))

    assert asked == {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY"}
    assert re.findall(r"(?i)gpu.?util\w*|\bbusy\b", words) == []


def test_bus_bandwidth_is_called_effective_and_no_alert_is_about_it() -> None:
    """With NVLS or SHARP it exceeds what a link can carry: that is no fault, and no reason for an alert."""
    about = [panel for name in NAMES for panel in shown(name) if "busbw" in json.dumps(panel["targets"])]

    assert len(about) == 3
    assert [panel["title"] for panel in about if not panel["description"].startswith("Effective, ")] == []
    assert [alert.name for alert in alerts(Timing()) if "busbw" in alert.expr] == []


@pytest.mark.parametrize("name", [name for name in NAMES if "fleet" not in name])
def test_every_expression_is_about_the_chosen_run(name: str) -> None:
    for target in targets(name):
        expr = target["expr"]
        assert re.findall(r'run_id=~"\$run_id"', expr), expr
        assert len(re.findall(r"commtrace[\w:]+\{", expr)) == len(re.findall(r"commtrace[\w:]+", expr)), expr


@pytest.mark.parametrize("name", NAMES)
def test_only_variables_that_exist_are_used(name: str) -> None:
    chosen = {variable["name"] for variable in DASHBOARDS[name]["templating"]["list"]}
    used = set(re.findall(r"\$\{?([A-Za-z_]\w*)", json.dumps(DASHBOARDS[name])))

    assert used <= chosen | GLOBAL_VARIABLES
    assert {"datasource", "docs"} <= chosen


@pytest.mark.parametrize("name", NAMES)
def test_no_variable_begins_with_all_and_every_one_asks_the_chosen_prometheus(name: str) -> None:
    for variable in DASHBOARDS[name]["templating"]["list"]:
        assert variable["type"] in {"datasource", "query", "textbox"}
        if variable["type"] == "query":
            assert not variable["includeAll"]
            assert variable["datasource"]["uid"] == "${datasource}"
            assert variable["query"]["query"] == variable["definition"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_fit_beside_each_other(name: str) -> None:
    cells = [
        (x, y)
        for panel in panels(name)
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < WIDTH
    assert sorted(panel["id"] for panel in panels(name)) == list(range(1, len(panels(name)) + 1))
    assert len({panel["title"] for panel in shown(name)}) == len(shown(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_description_says_in_sentences_what_is_shown_and_what_is_good(name: str) -> None:
    sentences = re.compile(r"[A-Z][^.]{15,}\b.*[.;] Good: [^.].*\.")

    assert [panel["title"] for panel in shown(name) if not sentences.fullmatch(panel["description"])] == []


def test_the_first_row_of_the_overview_answers_and_says_how_to_read_it() -> None:
    first = [panel for panel in panels("commtrace-overview.json") if panel["gridPos"]["y"] == 0]

    assert [panel["title"] for panel in first] == ["Is all right?", "Findings", "How to read this"]
    assert sum(panel["gridPos"]["w"] for panel in first) == WIDTH
    (docs,) = re.findall(r"\(\$\{docs:raw\}(\w+)/\) · ", first[2]["options"]["content"])
    assert docs == "definitions"


def test_findings_have_the_words_and_the_advice_of_the_other_outputs() -> None:
    (findings,) = (panel for panel in panels("commtrace-overview.json") if panel["title"] == "Findings")
    columns = {one["matcher"]["options"]: one["properties"] for one in findings["fieldConfig"]["overrides"]}

    def word(column: str, value: str) -> str:
        (mappings,) = (one["value"] for one in columns[column] if one["id"] == "mappings")
        for mapping in mappings:
            options = mapping["options"]
            if mapping["type"] == "value" and value in options:
                return str(options[value]["text"])
            if mapping["type"] == "regex" and re.fullmatch(options["pattern"], value):
                return str(options["result"]["text"])
        raise AssertionError(f"{value} is shown as it is")

    for name in (*CAUSES, *PART_OF_LOSS):
        assert word("Cause", name) == cause_or_loss(name).words
        assert [word("What to do", f"{name}/{place}") for place in PLACES] == [advice(name, 1, at) for at in PLACES]
    assert [word("Where", place) for place in PLACES]


def test_a_picture_of_each_dashboard_is_asked_for() -> None:
    asked = dict(addresses("http://localhost:3000/", {"var-run_id": "a b"}, "30m"))

    assert [name.removeprefix("grafana-").removesuffix(".png") for name in asked] == [
        name.removeprefix("commtrace-").removesuffix(".json") for name in NAMES
    ]
    assert asked["grafana-node.png"] == (
        "http://localhost:3000/d/commtrace-node?kiosk=1&from=now-30m&to=now&var-run_id=a+b"
    )


def test_limits_are_drawn_where_there_are_some() -> None:
    drawn = {
        panel["title"]
        for name in NAMES
        for panel in shown(name)
        if panel["fieldConfig"]["defaults"].get("custom", {}).get("thresholdsStyle", {}).get("mode") == "dashed"
    }
    assert drawn == {"Straggler score", "Slowest rank", "Since the last step"}


@pytest.mark.parametrize("name", NAMES)
def test_panels_follow_grafanas_model(name: str) -> None:
    for panel in shown(name):
        assert panel["type"] in PANEL_TYPES
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults.get("unit", "none") in UNITS, panel["title"]
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["id"] == "byName"
            units = {one["value"] for one in override["properties"] if one["id"] == "unit"}
            assert units <= UNITS, panel["title"]
        for one in panel.get("transformations", ()):
            assert TRANSFORMATIONS[one["id"]] == set(one["options"])
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJ"[: len(panel["targets"])])
        for target in panel["targets"]:
            assert target["instant"] != target["range"]
            assert target["legendFormat"] or panel["type"] in {"stat", "table"}, panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_tables_show_columns_that_their_queries_have(name: str) -> None:
    for panel in shown(name):
        organize = [one["options"] for one in panel.get("transformations", ()) if one["id"] == "organize"]
        for options in organize:
            values = [column for column in options["renameByName"] if column.startswith("Value")]
            count = len(panel["targets"])
            assert sorted(values) == (
                ["Value"] if count == 1 else [f"Value #{'ABCDEFGHIJ'[at]}" for at in range(count)]
            )
            headings = list(options["renameByName"].values())
            assert {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]} == set(headings)
            assert panel["options"]["sortBy"][0]["displayName"] in headings


@pytest.mark.parametrize("name", NAMES)
def test_links_keep_the_time_and_lead_to_a_dashboard_or_the_documentation(name: str) -> None:
    uids = {dashboard["uid"]: dashboard for dashboard in DASHBOARDS.values()}
    (menu,) = DASHBOARDS[name]["links"]
    assert (menu["keepTime"], menu["includeVars"]) == (True, True)
    for panel in panels(name):
        for link in links(panel.get("fieldConfig", {})):
            if link["url"].startswith("${docs:raw}alerts/#"):
                continue
            target = re.match(r"/d/([\w-]+)\?var-(\w+)=", link["url"])
            assert target, link
            assert target[2] in {one["name"] for one in uids[target[1]]["templating"]["list"]}
            assert link["url"].endswith("&${datasource:queryparam}&${__url_time_range}")
            assert ("${run_id:queryparam}" in link["url"]) == (target[2] != "run_id")


def test_ranks_lead_to_nodes_and_nodes_to_ranks() -> None:
    def led_to(name: str) -> set[str]:
        return {link["url"].split("?")[0] for panel in shown(name) for link in links(panel["fieldConfig"])}

    assert led_to("commtrace-fleet.json") == {"/d/commtrace-overview", "${docs:raw}alerts/#${__value.raw}"}
    assert led_to("commtrace-overview.json") == {
        "/d/commtrace-node", "/d/commtrace-rank", "${docs:raw}alerts/#${__value.raw}",
    }  # fmt: skip
    assert led_to("commtrace-node.json") == {"/d/commtrace-rank"}
    assert led_to("commtrace-rank.json") == {"/d/commtrace-node", "/d/commtrace-rank"}


def test_grids_are_sorted_before_they_become_a_matrix() -> None:
    for panel in shown("commtrace-grid.json"):
        sort, matrix = panel["transformations"]
        assert (sort["id"], sort["options"]["sort"]) == ("sortBy", [{"field": "cell"}])
        rows, columns = matrix["options"]["rowField"], matrix["options"]["columnField"]
        assert f'"cell", " ", "{rows}", "{columns}"' in panel["targets"][0]["expr"]


def test_no_two_dashboards_are_the_same_to_grafana() -> None:
    texts = [json.loads(text) for text in dashboard_files().values()]

    assert len({text["uid"] for text in texts}) == len({text["title"] for text in texts}) == len(texts)
