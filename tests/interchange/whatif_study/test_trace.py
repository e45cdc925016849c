from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.replay.graph import ReplayError
from commtrace.cli.main import app
from commtrace.errors import TraceFormatError
from commtrace.interchange.whatif_study.analysis import analyse_whatif_trace
from commtrace.interchange.whatif_study.files import import_whatif
from commtrace.interchange.whatif_study.trace import is_whatif_run, whatif_trace_of
from commtrace.trace.files.reader import load_run
from tests.factory import make_run, span
from tests.findings.reading import in_json
from tests.interchange.whatif_study.whatif_files import Operation, operation, two_stages, write_trace
from tests.reference import reference_data


def test_a_run_that_commtrace_recorded_is_none() -> None:
    run = make_run({0: [span("forward", 0, 10)]})

    assert not is_whatif_run(run)
    with pytest.raises(TraceFormatError, match="commtrace import whatif"):
        whatif_trace_of(run)


def test_the_straggler_command_gives_the_published_answers(tmp_path: Path) -> None:
    folder = reference_data("whatif")
    import_whatif(folder / "trace-ST.parquet", tmp_path / "run", meta=folder / "meta-ST.yaml")

    result = CliRunner().invoke(app, ["straggler", str(tmp_path / "run"), "--json"])

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["S"] == pytest.approx(1.179, rel=1e-3)
    assert report["S_by_stage"]["3"] == pytest.approx(1.232, rel=1e-3)
    assert report["M_S"] == pytest.approx(1.219, rel=1e-3)
    assert report["M_W"] == pytest.approx(0.031, abs=5e-4)
    assert report["launch_slowdown"] == pytest.approx(1.019, rel=1e-3)


def test_a_trace_that_only_the_studys_rules_can_replay_has_the_studys_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ReplayError("recorded events wait for one another in a circle")

    import_whatif(write_trace(tmp_path / "trace.parquet", two_stages()), tmp_path / "run")
    monkeypatch.setattr("commtrace.analysis.chain.build_program", refuse)

    report = json.loads(CliRunner().invoke(app, ["straggler", str(tmp_path / "run"), "--json"]).stdout)

    assert (report["S"], report["steps"], in_json(report)) == (pytest.approx(1.0), 1, [])
    assert [one["evidence"] for one in in_json(report, "not_judged")] == [
        "Stragglers were not looked for: recorded events wait for one another in a circle"
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([one for one in two_stages() if one["optype"] != "forward-recv"], "1 forward-send and stage 1 0 forward-recv"),
        ([*two_stages(), operation(1, "forward-recv", 0.1, 0.2, seq=1)], "2 forward-recv and 1 forward-compute"),
        ([one for one in two_stages() if one["optype"] != "backward-compute"], "stage 0 has no backward-compute"),
        ([one for one in two_stages() if one["optype"] != "optimizer"], "no operation of type optimizer"),
    ],
)
def test_a_trace_that_the_rules_do_not_fit_is_refused_in_words(
    tmp_path: Path, rows: list[Operation], message: str
) -> None:
    import_whatif(write_trace(tmp_path / "trace.parquet", rows), tmp_path / "run")

    with pytest.raises(TraceFormatError, match=message):
        analyse_whatif_trace(whatif_trace_of(load_run(tmp_path / "run")))
