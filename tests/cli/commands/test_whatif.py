"""``commtrace whatif``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.synth import Fault, Job, synthesize, write
from commtrace.synth.synthesis import Synthetic
from commtrace.trace import schema
from tests.trace.rows import row, steps, write_rank


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("runs") / "slow"
    write(synthesize(Job(pp=2, dp=4, steps=24, faults=(Fault.parse("slow-rank=5:1.5"),))), directory)
    return str(directory)


def asked(*words: str) -> Any:
    result = CliRunner().invoke(app, ["whatif", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["whatif", *words])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_without_all_slow_ranks_the_step_is_as_long_as_that_of_the_healthy_job(job: str, tmp_path: Path) -> None:
    truth = json.loads((Path(job) / "truth.json").read_text())
    answer = asked(job, "--without-slow-rank", "all")

    assert answer["changes"] == ["rank 5 as fast as the others"]
    healthy = truth["ideal"]["step_without_faults_ns"]
    assert answer["predicted_ns"] == pytest.approx(healthy, rel=0.02)
    assert abs(answer["predicted_ns"] - healthy) < answer["uncertainty_ns"] < 0.03 * healthy
    assert answer["fidelity"]["is_faithful"]


def test_the_answer_names_its_fidelity_its_changes_and_its_assumptions(job: str) -> None:
    result = CliRunner().invoke(app, ["whatif", job, "--schedule", "zero-bubble", "--microbatches", "4"])
    printed = " ".join(result.stdout.split())

    assert result.exit_code == 0, result.output
    for words in (
        "A step would take",
        "Replay of the run itself:",
        "Rebuilt from its forwards, backwards and messages:",
        "Changed: schedule zb1p; 4 microbatches.",
        "A step has 4 microbatches instead of 8:",
        "50% are assumed. Set it with --weight-share.",
    ):
        assert words in printed


def test_without_changes_only_the_fidelity_is_printed(job: str) -> None:
    result = CliRunner().invoke(app, ["whatif", job])

    assert "Replay of the run itself" in result.stdout
    assert "would take" not in result.stdout
    assert f"commtrace whatif {job} --without-slow-rank all" in result.stdout.replace("\n", "")


def test_a_bandwidth_stands_beside_the_recorded_one(job: str) -> None:
    result = CliRunner().invoke(app, ["whatif", job, "--bandwidth", "dp=800Gbit/s"])

    assert "Changed: dp bandwidth 100 GB/s (recorded: 29" in result.stdout


def test_operations_whose_latency_is_not_known_are_named(job: str) -> None:
    of_all, of_pp = (asked(job, "--bandwidth", text)["assumptions"] for text in ("all=2x", "pp=2x"))
    said = "cannot be told apart where all calls of an operation are of about one size: all of the time of "

    assert of_pp[0].endswith(f"{said}pp recv and pp send is taken to depend on the bandwidth.")
    assert "dp all_gather, dp reduce_scatter, " in of_all[0]


def test_a_number_and_its_error_have_as_many_digits(job: str) -> None:
    verdict = asked(job, "--without-slow-rank", "all")["verdict"]
    changed_nothing = asked(job, "--bandwidth", "all=1x")["verdict"]

    assert re.fullmatch(r"A step would take \d+\.\d ± \d\.\d ms: \d+\.\d% less than the measured \d+\.\d ms\.", verdict)
    assert changed_nothing.endswith(" ms: as long as the measured one.")


def test_steps_that_hardly_scatter_have_no_more_digits_than_a_microsecond(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(synthesize(Job(dp=2, steps=4, jitter=0.0, wander=0.0)), run)
    verdict = asked(str(run), "--bandwidth", "dp=2x")["verdict"]

    assert re.match(r"A step would take \d+\.\d{3} ± 0\.\d{3} ms: ", verdict), verdict


@pytest.mark.parametrize(
    ("healthy", "suggested"), [(Job(pp=4, steps=6), "whatif {} --bandwidth all=2x"), (Job(steps=6), "straggler {}")]
)
def test_the_suggestion_without_a_slow_rank_is_a_command_that_works(
    healthy: Job, suggested: str, tmp_path: Path
) -> None:
    write(synthesize(healthy), tmp_path / "run")

    printed = CliRunner().invoke(app, ["whatif", str(tmp_path / "run")]).stdout
    command = suggested.format(tmp_path / "run")

    # Without blanks, as a long path is broken wherever a line ends.
    assert "".join(printed.split()).endswith("".join(f"Next: commtrace {command}".split()))
    assert CliRunner().invoke(app, command.split()).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bandwidth", "xp=2x"), "no communication of role xp; they have"),
        (("--bandwidth", "tp=2"), "write a factor or a bus bandwidth"),
        (("--without-slow-rank", "first"), "write a rank, or all"),
        (("--without-slow-rank", "8"), "the run has ranks 0–7"),
        (("--layers", "5,3"), "did not record how many layers its stages have. Say it with --layers-before"),
        (("--layers", "4,4,4"), "names 3 stages, but the pipeline of this run has 2"),
        (("--chunks", "3", "--microbatches", "7"), "is no multiple"),
        (("--recompute", "off"), "recomputes nothing"),
        (("--layers-before", "4,4"), "--layers-before 4,4 moves no layers: say with --layers how many"),
        (("--weight-share", "0.3"), "--weight-share 0.3 has no effect, as no backward is split: add --schedule"),
        (("--weight-share", "0.3", "--schedule", "gpipe"), "has no effect, as no backward is split"),
        (("--weight-share", "0.3", "--microbatches", "4"), "has no effect, as no backward is split"),
        (("--microbatches", "65536"), "65536 microbatches in 1 chunk per stage are more than 1,048,576 forwards"),
        (("--chunks", "100000", "--microbatches", "4"), "4 microbatches in 100000 chunks per stage are more than"),
    ],
)
def test_what_cannot_be_answered_is_refused(job: str, words: tuple[str, ...], message: str) -> None:
    assert message in refused(job, *words)


def test_the_layers_that_the_run_recorded_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Synthetic.topology
    model = {"layers": 9, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
    sizes = {"model": model, "layout": {"first_stage_layers": 5}}
    monkeypatch.setattr(Synthetic, "topology", lambda self, rank: {**recorded(self, rank), **sizes})
    write(synthesize(Job(pp=2, steps=6)), tmp_path / "run")
    run = str(tmp_path / "run")

    assert asked(run, "--layers", "4,5")["assumptions"][0] == "In the run, the stages have 5, 4 layers."
    assert "--layers has 8 layers, and the run 9 (5, 4): moving keeps their sum" in refused(run, "--layers", "4,4")
    given = refused(run, "--layers", "4,4", "--layers-before", "5,3")
    assert "--layers-before has 8 layers, and the run recorded 9" in given


def test_a_file_that_cannot_be_read_is_named(job: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(job, damaged)
    segment = next(damaged.glob("rank-00000/spans-*.arrows"))
    segment.write_bytes(segment.read_bytes()[:10])
    result = CliRunner().invoke(app, ["whatif", str(damaged), "--bandwidth", "dp=2x"])

    assert result.exit_code == 2
    said = "".join(result.stderr.split())
    assert "ranksareinthisrun" in said
    assert "rank-00000/spans-0000.arrows:skipped" in said


def test_a_run_of_kernels_is_refused(tmp_path: Path) -> None:
    kernels = [
        row(kind=schema.KERNEL, step=step, start=100 * step + 5, end=100 * step + 50, timing=schema.KERNEL_TIMING)
        for step in range(4)
    ]
    write_rank(tmp_path / "kernels", [*steps(0, 4), *kernels])

    assert "holds kernels of a profiler" in refused(str(tmp_path / "kernels"))


def test_the_predicted_steps_are_written_as_a_run_and_as_a_report_beside_the_real_one(job: str, tmp_path: Path) -> None:
    predicted, page = tmp_path / "predicted", tmp_path / "whatif.html"
    result = CliRunner().invoke(app, ["whatif", job, "--microbatches", "4", "-o", str(predicted)])
    asked(job, "--microbatches", "4", "-o", str(page))
    summary = CliRunner().invoke(app, ["summary", str(predicted)])

    assert f"commtrace report {predicted} --against {job}" in result.stdout.replace("\n", "")
    assert summary.exit_code == 0, summary.output
    assert "8 ranks" in summary.stdout
    assert page.stat().st_size > 100_000
    assert "no empty directory" in refused(job, "-o", str(predicted))


@pytest.mark.parametrize(
    "faults",
    [
        ("slow-rank=5:1.5@12:24",),  # in a part of the run
        ("slow-link=1:4",),
        ("gc=1", "checkpoint=0:200", "evaluation=0,1:100"),  # several findings on one rank
    ],
)
def test_what_is_slow_costs_what_the_step_would_save_without_it(faults: tuple[str, ...], tmp_path: Path) -> None:
    job = Job(tp=2, dp=4, steps=24, gpus_per_host=4, faults=tuple(map(Fault.parse, faults)))
    write(synthesize(job), tmp_path / "run")

    stragglers = CliRunner().invoke(app, ["straggler", str(tmp_path / "run"), "--json"])
    answer = asked(str(tmp_path / "run"), "--without-slow-rank", "all")

    saved_ns = answer["fidelity"]["measured_ns"] - answer["predicted_ns"]
    assert saved_ns == pytest.approx(json.loads(stragglers.stdout)["together_ns"], rel=0.02)
    assert answer["assumptions"] == []
