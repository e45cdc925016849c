"""docs/json/: what ``--json`` prints is what the schemas say, field for field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec import structs
from typer.testing import CliRunner

from commtrace.analysis.communication.links import NodeLink, NodeTraffic, SlowTraffic
from commtrace.analysis.hangs.examination import examine
from commtrace.cli.commands.trigger import TriggerReport
from commtrace.cli.main import app
from commtrace.findings.causes import CAUSES, LOSSES, PLACES
from commtrace.trace.hang_report import Activity, HangReport, InFlight, OpenPhase, ThreadStack
from commtrace.trace.json_values import fields_to_json
from tests.analysis.hangs.flight_calls import calls, hung
from tests.analysis.hung_runs import NOW_NS, done, flight, stopped_run
from tests.factory import group, metadata
from tests.findings.reading import in_json
from tests.json_schemas import errors, schemas
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run
from tests.two_ranks import write_two_ranks


def _answer_of(*words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    nodes = ["--dp", "6", "--gpus-per-host", "2", "--num-steps", "6"]
    assert CliRunner().invoke(app, ["synth", "-o", str(folder / "nodes"), *nodes]).exit_code == 0
    late = ["--dp", "4", "--num-steps", "24", "--fault", "slow-rank=1:1.5@12:24"]
    assert CliRunner().invoke(app, ["synth", "-o", str(folder / "slow"), *late]).exit_code == 0
    made = {
        "nodes": folder / "nodes",
        "slow": folder / "slow",
        "pipeline": write_run(folder / "pipeline", PipelineJob(stages=2, microbatches=4, steps=4).run()),
        "two": write_two_ranks(folder / "two", steps=12),
    }
    return {"all": str(folder), **{name: str(path) for name, path in made.items()}}


@pytest.mark.parametrize("name", schemas())
def test_a_schema_is_one(name: str) -> None:
    Draft202012Validator.check_schema(schemas()[name])


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("compare", ["two", "nodes"]),
        ("compare", ["two", "pipeline"]),
        ("pipeline", ["pipeline"]),
        ("pipeline", ["two"]),
        ("whatif", ["pipeline"]),
        ("whatif", ["pipeline", "--microbatches=8"]),
        ("bandwidth", ["nodes"]),
        ("bandwidth", ["nodes", "--by=size"]),
        ("bandwidth", ["nodes", "--by=group"]),
        ("bandwidth", ["two"]),
        ("straggler", ["slow"]),
        ("straggler", ["pipeline"]),
        ("summary", ["pipeline"]),
        ("summary", ["slow"]),
        ("summary", ["nodes", "--steps=2:4"]),
        ("doctor", ["nodes"]),
        ("doctor", ["pipeline"]),
        ("top", ["slow"]),
        ("list", ["all"]),
        ("hosts", ["all"]),
        ("metrics", ["pipeline"]),
        ("metrics", ["two"]),
    ],
)
def test_printed_json_matches_the_schema(command: str, names: list[str], runs: dict[str, str]) -> None:
    answer = _answer_of(command, *(runs.get(name, name) for name in names))

    assert list(errors(command, answer)) == []


def test_a_written_report_matches_the_schema(runs: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    answer = _answer_of("report", runs["two"], "-o", str(page), "--steps=1:3")

    assert list(errors("report", answer)) == []
    assert (answer["path"], answer["bytes"], answer["steps"]) == (str(page), page.stat().st_size, [1, 2])
    assert (answer["left_out"], answer["verdict"][-1]) == ([], ".")


def test_the_words_for_where_and_why_are_those_of_findings(runs: dict[str, str]) -> None:
    (finding,) = in_json(_answer_of("straggler", runs["slow"]))
    words = schemas()["finding.schema.json"]["$defs"]["finding"]["properties"]

    assert words["place"]["enum"] == ["", *PLACES]
    assert words["cause"]["enum"] == list(dict.fromkeys(["", *CAUSES, *LOSSES]))
    assert (finding["place"], finding["cause"], len(finding["stretches"])) == ("ranks", "compute", 1)


def test_slow_links_and_clocks_that_were_stepped_have_their_place_in_the_schema(runs: dict[str, str]) -> None:
    answer = _answer_of("bandwidth", runs["nodes"])
    link = NodeLink(NodeTraffic("send", 2, 22), "node0", "node1", 3, 0.02)
    answer["slow_links"] = SlowTraffic((link, link), 1.1, within_nodes=False).to_json()
    answer["alignment"]["hosts"][1]["steps"] = [{"at_ns": 5, "offset_ns": -40, "drift_ppm": 0.1}]

    assert answer["alignment"]["observations"] > 0
    assert list(errors("bandwidth", answer)) == []


def test_the_diagnosis_of_a_hang_and_of_a_failure_matches_the_schema() -> None:
    pair = group("tp", 0, 1)
    rows = {0: done({pair: 5}), 1: done({pair: 5})}
    failed = stopped_run(rows, [pair], last={1: 98}, exceptions={1: "ValueError"}, in_flight={0: [flight(pair, 5)]})
    dumps = [*calls(0, 6, state="started"), *calls(1, 5)]
    for diagnosis in (
        examine(hung(), now_ns=NOW_NS),
        examine(hung(), now_ns=NOW_NS, flight_calls=dumps),
        examine(failed, now_ns=NOW_NS, all_ranks=True),
    ):
        printed = json.loads(json.dumps(diagnosis.to_json()))
        assert diagnosis.findings
        assert list(errors("doctor", printed)) == []


def test_the_report_of_a_trigger_matches_the_schema() -> None:
    report = TriggerReport("command-1", 40, 50, "depth=2", 31, seen_by=(0, 2), late={2: 44}, not_seen_by=(1,))
    printed = json.loads(json.dumps(fields_to_json(report)))

    assert list(errors("trigger", printed)) == []
    assert printed["late"] == {"2": 44}


@pytest.mark.parametrize(
    "command", ["compare", "pipeline", "bandwidth", "straggler", "doctor", "top", "list", "hosts", "metrics"]
)
def test_the_verdict_is_the_first_field(command: str, runs: dict[str, str]) -> None:
    names = {"compare": ["two", "nodes"], "list": ["all"], "hosts": ["all"]}.get(command, ["pipeline"])
    printed = _answer_of(command, *(runs[name] for name in names))

    assert next(iter(printed)) == "verdict"
    assert len(printed["verdict"]) > 10


@pytest.mark.parametrize("command", ["compare", "pipeline", "bandwidth", "straggler", "top", "list", "hosts"])
def test_the_verdict_is_printed_before_the_numbers(command: str, runs: dict[str, str]) -> None:
    names = {"compare": ["two", "nodes"], "list": ["all"], "hosts": ["all"]}.get(command, ["pipeline"])
    words = [runs[name] for name in names]
    lines = CliRunner().invoke(app, [command, *words]).output.splitlines()

    if command in ("compare", "pipeline", "bandwidth", "straggler"):
        assert re.match(r"(Before: )?Run [\w-]+ · (ended|cut off)", lines[0])
    if command != "straggler":
        assert _answer_of(command, *words)["verdict"][:40] in " ".join(lines[:20])


def test_a_field_that_no_schema_names_would_be_found(runs: dict[str, str]) -> None:
    answer = {**_answer_of("bandwidth", runs["two"]), "colour": "red"}
    answer["communication"][0]["count"] = "many"

    assert sorted(errors("bandwidth", answer)) == [
        "$.communication[0].count: 'many' is not of type 'integer'",
        "$: Additional properties are not allowed ('colour' was unexpected)",
    ]


def test_hang_report() -> None:
    dp = group("dp", 0, 1)
    waiting = InFlight("all_reduce", dp.id, 3, -1, 40, "float32", False, 7, True)
    report = HangReport(
        time=1.7e9,
        monotonic_ns=60_000_000_000,
        no_progress_ns=60_000_000_000,
        metadata=metadata(1, world_size=2),
        groups=(dp,),
        coordinates={"dp": 1},
        parallel={"dp": 2},
        activity=Activity(
            (9, 2, -1, -1), (OpenPhase("forward", "f", None),), {"5": 3}, ((5, True, 0, 0, 1),), ("a.py:1 f",)
        ),
        in_flight=(waiting, structs.replace(waiting, state="started")),
        threads=(ThreadStack("MainThread", ("a.py:1 f",)),),
    )

    assert list(errors("hang", json.loads(json.dumps(report.to_json())))) == []
    assert list(errors("hang", {**report.to_json(), "no_progress_ns": "60 s"})) != []
