"""What ``commtrace summary`` prints."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.analysis.matching.coverage import Coverage
from commtrace.analysis.pipeline.bubble import StageBubble
from commtrace.analysis.pipeline.observed import Pipeline
from commtrace.analysis.summary import summarise
from commtrace.cli.commands.summary import print_summary
from commtrace.cli.main import app
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace.run import Run
from commtrace.trace.topology import Topology
from tests.factory import collective, group, make_run, span, stall
from tests.json_schemas import errors
from tests.pipeline_factory import Clock, PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()
MS = 1_000_000


def printed(run: Run, *, width: int = 100, all_ranks: bool = False, details: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False)
    print_summary(console, summarise(run), all_ranks=all_ranks, details=details)
    return output.getvalue()


def row(text: str, *beginning: str) -> list[str]:
    """The cells of the first line that begins with these words."""
    for line in text.splitlines():
        if line.split()[: len(beginning)] == list(beginning):
            return line.split()
    raise AssertionError(f"no line begins with {beginning}:\n{text}")


def test_the_state_of_the_job_stands_first_and_below_the_findings_what_is_shown() -> None:
    run = PipelineJob(2, 4, data_parallel=2, steps=5).run()
    lines = printed(run).splitlines()
    assert lines[0] == "Run made-run · ended · 4 ranks on node0 · 4 steps of 15.0 ms"
    assert "pp 2 × dp 2 · gloo · cpu · commtrace 0.1.0 · torch 2.13.0" in lines
    assert "Steps 1–4: 4 used; left out: step 0 (warm-up)" in lines
    assert "Clocks: shared clock" in printed(run, details=True).splitlines()


def test_the_answer_is_within_the_first_screen() -> None:
    faults = (Fault("slow-rank", (1,), 1.5), Fault("data", (2,), 30.0), Fault("gc", (3,), 40.0))
    text = printed(synthesize(Job(pp=2, dp=4, steps=12, faults=faults)).run, width=80)
    first_screen = "\n".join(text.splitlines()[:24])
    assert "1. rank 1 on node0, compute: " in first_screen
    assert "→ Look at the device while the job runs" in first_screen
    assert "Mean step of each rank" in first_screen


@pytest.mark.parametrize("details", [False, True])
def test_clocks_and_evidence_are_details(details: bool) -> None:
    job = Job(pp=2, dp=4, microbatches=4, steps=12, gpus_per_host=4, faults=(Fault("slow-rank", (1,), 1.5),))
    text = printed(synthesize(job).run, details=details)
    for words in ("residual", "more than the ranks that do the same work", "algbw", "p99"):
        assert (words in text) is details, words


def test_several_stragglers_are_all_among_the_findings() -> None:
    faults = (Fault("slow-rank", (1,), 1.5), Fault("data", (2,), 30.0))
    run = synthesize(Job(dp=4, steps=12, faults=faults)).run
    summary, output = summarise(run), printed(run)

    assert [straggler.rank for straggler in summary.slow] == [1, 2]
    assert summary.to_json()["together_ns"] == summary.together_ns > 0
    assert all(f". {straggler.line()}" in output for straggler in summary.slow)


def test_the_engine_that_recorded_is_among_what_was_captured() -> None:
    run = make_run({0: [span("step", 0, 10 * MS, step=0), span("step", 10 * MS, 20 * MS, step=1)]})
    topology: Topology = {"engine": {"name": "python", "reason": "switched off"}}
    recorded = replace(run, ranks={0: replace(run.ranks[0], topology=topology)})

    assert "; engine: Python\n" in printed(recorded, width=200)
    assert "engine" not in printed(run, width=200)


def test_one_rank_is_not_plural() -> None:
    run = make_run({0: [span("step", 0, 10 * MS, step=0)]})
    assert printed(run).startswith("Run made-run · ended · 1 rank on node0 · 1 step of 10.0 ms\n")


def test_parts_that_were_not_recorded_are_not_shown_as_zero() -> None:
    alone = printed(make_run({0: [span("step", 0, 10 * MS, step=0)]}))
    assert row(alone, "0") == ["0", "10.0", "0", "0%", "–", "10.0", "100%", "–"]

    whole = synthesize(Job(pp=2, dp=2, microbatches=4, steps=4)).run
    without_2 = replace(whole, ranks={rank: trace for rank, trace in whole.ranks.items() if rank != 2})
    text = printed(without_2)
    exposed, bubble = row(text, "0", "pp0")[6:9:2]
    assert exposed.endswith("*"), "of rank 0 nobody knows what of it was waiting"
    assert bubble == "–", "so its bubble is not 0"
    assert "* up to" in text
    assert "Left out, because the other side of their messages is not known: rank 0." in text

    ends_only = printed(replace(whole, ranks={rank: whole.ranks[rank] for rank in (0, 3)}))
    assert "microbatches; idle at least" in ends_only
    assert "Causes of the bubble" not in ends_only


def test_a_wait_that_nobody_can_know_is_not_none() -> None:
    """Of two ranks, one was recorded: its all_reduce stood still for somebody, or for the network."""
    dp = group("dp", 0, 1)
    reduce = collective("all_reduce", dp, 0, 2 * MS, 5 * MS, step=0, id=1)
    rows = [span("step", 0, 10 * MS, step=0), reduce, stall(reduce, 2 * MS, 5 * MS)]
    alone = make_run({0: rows}, [dp], world_size=2)
    both = make_run({0: rows, 1: rows}, [dp])

    assert row(printed(alone), "dp")[1:3] == ["–", "3.00"]
    assert row(printed(both), "dp")[1:3] == ["0", "3.00"]


def test_the_table_of_roles_says_that_waiting_for_messages_is_bubble() -> None:
    text = printed(synthesize(Job(pp=2, dp=2, microbatches=4, steps=4)).run)
    assert row(text[text.index("Stalls for communication") :], "pp")[1] == "bubble"
    assert "waiting for pipeline messages counts as bubble, above" in text


def test_every_rank_has_its_parts_in_milliseconds_and_per_cent() -> None:
    text = printed(PipelineJob(4, 8, forward_ns=MS, backward_ns=2 * MS).run())
    heading = row(text, "rank")
    assert heading == ["rank", "where", "step", "compute", "exposed", "bubble", "other", "hidden"]
    assert row(text, "0", "pp0") == ["0", "pp0", "33.0", "24.0", "73%", "0", "0%", "9.00", "27%", "0", "0%", "0"]
    assert row(text, "3", "pp3") == ["3", "pp3", "33.0", "24.0", "73%", "6.00", "18%", "3.00", "9%", "0", "0%", "0"]


def test_parts_that_no_rank_has_are_not_shown_and_those_that_one_has_are() -> None:
    rows = [
        span("step", 0, 10 * MS, step=0),
        span("data", 0, MS, step=0),
        span("checkpoint", MS, 3 * MS, step=0),
        span("gc", 0, 20_000, step=0),
    ]
    text = printed(make_run({0: rows}))
    assert row(text, "rank")[3:] == ["compute", "exposed", "data", "checkpoint", "gc", "other", "hidden"]
    assert row(text, "0")[1:12:2] == ["10.0", "0%", "0.98", "2.00", "0.02", "7.00"]
    assert "%" not in " ".join(row(printed(make_run({0: rows}), width=60), "0")), "shares that do not fit"


def test_parts_too_small_for_a_column_are_told_below_the_table() -> None:
    rows = [span("step", 0, 10 * MS, step=0), span("gc", 0, 1_000, step=0)]
    text = printed(make_run({0: rows}))
    assert "gc" not in row(text, "rank")
    assert "Below 0.1% of every step: gc at most 0.0010 ms." in text


def test_communication_is_shown_by_role_and_operation() -> None:
    text = printed(PipelineJob(1, 2, data_parallel=2, all_reduce_ns=MS).run())
    assert " ".join(row(text, "dp", "all_reduce")) == ("dp all_reduce 2 4 4.10 kB 1.00 ms 1.02 MB/s 100% 0%")


def test_ends_that_nothing_measured_are_called_upper_bounds() -> None:
    pair = group("dp", 0, 1)
    reduce = collective("all_reduce", pair, 0, 1, 2, step=0, is_async=True, end_exact=False)
    text = printed(make_run({0: [span("step", 0, 10 * MS, step=0), reduce]}, [pair], world_size=2), details=True)
    words = " ".join(text.split())
    assert "1 call has only a bound of its start or end (docs/definitions.md)." in words
    assert "≤ and ≥: of all, as the exact ones hold less than half of the bytes." in words
    assert row(text, "dp", "all_reduce")[6:10] == ["≤1", "ns", "≤1", "ns"]
    assert "bound" not in printed(PipelineJob(1, 2, data_parallel=2, all_reduce_ns=MS).run())


def test_calls_on_groups_of_one_rank_are_counted_and_not_listed() -> None:
    alone = group("tp", 0)
    run = make_run({0: [span("step", 0, 10 * MS, step=0), collective("all_reduce", alone, 0, 1, 2, step=0)]}, [alone])
    text = printed(run)
    assert "Left out: 1 calls on groups of one rank, which send nothing." in text
    assert not any(line.startswith("tp  ") for line in text.splitlines())


def test_waiting_in_calls_on_groups_of_one_rank_is_reported_as_such() -> None:
    alone = group("tp", 0)
    call = collective("all_reduce", alone, 0, 1, 2 * MS, step=0, id=7)
    text = printed(make_run({0: [span("step", 0, 10 * MS, step=0), call, stall(call, 1, 2 * MS)]}, [alone]))
    assert row(text, "tp*")[0] == "tp*"
    assert "* calls on groups of one rank, which send nothing." in text


def test_the_clock_line_tells_the_residual() -> None:
    job = PipelineJob(2, 4, nodes={0: "a", 1: "b"}, clocks={"b": Clock(10**9, 30.0)}, steps=10)
    text = printed(job.run(), details=True)
    assert "on 2 hosts" in text
    assert "Clocks: collective ends, 10 observations, residual" in text
    assert row(text, "rank")[:3] == ["rank", "host", "where"]


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_extremes_of_many_ranks_are_shown(all_ranks: bool) -> None:
    run = PipelineJob(1, 2, data_parallel=40, extra_forward_ns={rank: 1_000 * rank for rank in range(40)}).run()
    text = printed(run, all_ranks=all_ranks)
    table = text[text.index("Mean step") : text.index("The parts")].splitlines()[2:]
    shown = [int(line.split()[0]) for line in table]
    assert shown == (list(range(40)) if all_ranks else [*range(8), *range(32, 40)])
    assert ("24 ranks between the extremes of compute are not shown" in text) is not all_ranks


def test_the_straggler_stands_first_with_what_to_do() -> None:
    run = PipelineJob(2, 8, data_parallel=2, extra_forward_ns={1: 5 * MS}, steps=12).run()
    text = printed(run)
    assert text.splitlines()[1].startswith("1. rank 1 on node0, slow forward: ")
    *_, evidence, following = [line for line in text.splitlines() if line.strip()]
    assert (evidence, following) == (
        "Next: commtrace straggler made-run", "Next: commtrace report made-run -o report.html"
    )  # fmt: skip
    assert text.index("→ Profile the forward") < text.index("Mean step of each rank")


def test_problems_are_printed_word_by_word() -> None:
    run = replace(make_run({0: [span("step", 0, 10, step=0)]}), problems=("[torn] file",))
    text = printed(run)
    assert "! [torn] file" in text
    assert "! No communication was recorded in these steps." in text


def test_a_dimension_that_was_not_heard_is_printed() -> None:
    text = printed(make_run({0: [span("step", 0, 10, step=0)]}, world_size=2, parallel={"tp": 2}))
    assert "Not visible: tp communication: tp = 2, and none was seen." in text


def test_no_line_is_longer_than_eighty_columns_and_nothing_is_cut() -> None:
    nodes = {rank: f"gpu-node-{rank // 4:03d}.cluster" for rank in range(32)}
    job = PipelineJob(4, 8, 8, 950 * MS, 1_950 * MS, transfer_ns=20_000, all_reduce_ns=55 * MS, nodes=nodes)
    text = printed(job.run(), width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_the_command_prints_what_the_analysis_says(tmp_path: Path) -> None:
    directory = write_run(tmp_path, PipelineJob(2, 3, steps=4).run())

    result = runner.invoke(app, ["summary", str(directory)])
    assert result.exit_code == 0, result.output
    assert "Steps 1–3: 3 used; left out: step 0 (warm-up)" in result.output

    result = runner.invoke(app, ["summary", str(directory), "--json", "--steps", "0:2"])
    assert json.loads(result.output) == json.loads(json.dumps(summarise(directory, "0:2").to_json()))


def test_without_a_run_the_newest_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, ["summary"]).exit_code == 2
    for name, steps, written_at in (("old", 4, 100_000), ("new", 6, 200_000)):
        directory = write_run(tmp_path / "commtrace-runs" / name, PipelineJob(2, 3, steps=steps).run())
        for path in (directory, *directory.glob("rank-00000/*")):
            os.utime(path, (written_at, written_at))

    result = runner.invoke(app, ["summary"])
    assert result.exit_code == 0, result.output
    assert "Steps 1–5: 5 used" in result.output


@pytest.mark.parametrize(
    ("missing", "dropped", "hidden", "line"),
    [
        (0, 0, (), "Captured: 3 collective; missing: none; not visible: nothing known"),
        (None, 0, (), "Captured: 3 collective; not visible: nothing known"),
        (
            7,
            7,
            ("DeepEP",),
            "Captured: 3 collective; missing: 7 collectives; dropped: 7 spans; not visible: 1 path, below",
        ),
    ],
)
def test_one_line_says_what_was_seen_and_what_was_not(
    missing: int | None, dropped: int, hidden: tuple[str, ...], line: str
) -> None:
    coverage = Coverage({"collective": 3}, {"collective": dropped} if dropped else {}, hidden)
    answer = replace(summarise(make_run({0: [span("step", 0, 10, step=0)]})), coverage=coverage, missing=missing)
    output = io.StringIO()
    print_summary(Console(file=output, width=120, highlight=False), answer)
    text = output.getvalue()

    assert line in text.splitlines()
    assert ("commtrace doctor" in text) == bool(missing)


def test_a_folder_without_a_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    result = runner.invoke(app, ["summary", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no recorded run" in result.output


def test_rows_within_nodes_and_between_them_can_be_told_apart() -> None:
    answer = printed(synthesize(Job(pp=4, dp=2, microbatches=4, steps=4, gpus_per_host=4)).run)
    table = answer[answer.index("Communication, all ranks") :].splitlines()

    assert table[1].split()[:4] == ["role", "operation", "nodes", "n"]
    reach = {tuple(line.split()[:3]) for line in table if line.startswith("pp ")}
    assert {("pp", "recv", "1"), ("pp", "recv", ">1")} <= reach
    assert "nodes" not in printed(synthesize(Job(pp=2, dp=2, microbatches=4, steps=4)).run)


def test_a_pipeline_is_shown_stage_by_stage_beside_its_theoretical_bubble() -> None:
    stages = tuple(
        StageBubble(
            stage=stage, ranks=(stage,), forward_ns=MS, backward_ns=MS, work_ns=2 * MS, wall_ns=5 * MS,
            bubble_ns=3 * MS, warm_up_ns=MS, steady_ns=MS, cool_down_ns=MS, schedule_ns=2 * MS, imbalance_ns=2 * MS,
            variation_ns=2 * MS, p2p_ns=-3 * MS, transfer_ns=0, drain_ns=0,
        )
        for stage in (0, 1)
    )  # fmt: skip
    pipeline = Pipeline(
        schedule="1f1b", reason="", stages=2, chunks=1, microbatches=4, idle_fraction_of_phase=0.31,
        theoretical_fraction_of_phase=0.2, idle_ratio_to_work=0.4, theoretical_ratio_to_work=0.25,
        phase_fraction_of_step=0.8, bubble_fraction_of_step=0.3, drain_fraction_of_step=0.0, per_stage=stages,
    )  # fmt: skip
    answer = replace(summarise(make_run({0: [span("step", 0, 10, step=0)]})), pipeline=pipeline)
    output = io.StringIO()
    print_summary(Console(file=output, width=100, highlight=False), answer)
    text = output.getvalue()
    assert "Pipeline: 1f1b, 2 stages, 4 microbatches; idle 31% of its phase (theoretical 1f1b bubble 20%)" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["stage"], ["1"])]
    assert rows == [
        ["stage", "forward", "backward", "bubble", "warm-up", "steady", "cool-down"],
        ["1", "1.00", "1.00", "3.00", "1.00", "1.00", "1.00"],
        ["stage", "schedule", "imbalance", "variation", "P2P", "bubble"],
        ["1", "2.00", "2.00", "2.00", "-3.00", "3.00"],
    ]


def _answer_of(*words: str) -> str:
    result = runner.invoke(app, ["summary", *words])
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a simulated job of four ranks, with a baseline and a plan beside it."""
    folder = tmp_path_factory.mktemp("job")
    made = runner.invoke(app, ["synth", "-o", str(folder / "run"), "--dp", "4", "--num-steps", "4"])
    assert made.exit_code == 0, made.output
    measured = [
        Measurement("all_gather", (0, 1, 2, 3), ("node0",), 1 << size, "bfloat16", 20, MeasuredSpread(ns, ns, ns))
        for size, ns in ((31, 4 * MS), (32, 8 * MS))
    ]
    NetworkBaseline({"backend": "nccl"}, tuple(measured)).save(folder / "baseline.json")
    model = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
    layout = {"dp": 4, "microbatches": 2, "recompute": "full"}
    (folder / "plan.json").write_text(json.dumps({"model": model, "layout": layout}))
    return folder


def test_recorded_bandwidth_is_shown_beside_a_baseline(job: Path) -> None:
    words = [str(job / "run"), "--baseline", str(job / "baseline.json")]
    answer = json.loads(_answer_of(*words, "--json"))
    text = _answer_of(*words)

    assert list(errors("summary", answer)) == []
    shares = {one["operation"]: one for one in answer["baseline"]["shares"]}
    gathered = shares["all_gather"]
    assert gathered["share"] == pytest.approx(gathered["busbw_gbps"] / gathered["baseline_busbw_gbps"])
    assert shares["reduce_scatter"]["share"] is None
    assert row(text, "dp", "all_gather", "1", "2–4")[-1] == f"{gathered['share']:.0%}"
    assert row(text, "dp", "reduce_scatter", "1", "4–8")[-1] == "–"
    assert "All calls together: " in text


def test_the_use_of_the_devices_is_named_with_its_formula_and_nothing_is_guessed(job: Path) -> None:
    words = [str(job / "run"), "--plan", str(job / "plan.json")]
    unknown = _answer_of(*words)
    answer = json.loads(_answer_of(*words, "--peak-tflops", "2e-4", "--achievable-tflops", "1e-4", "--json"))
    used = answer["utilization"]

    assert "MFU –: unknown GPU 'simulated device'" in unknown
    assert "2mnk of every matrix multiplication" in unknown
    assert list(errors("summary", answer)) == []
    per_token = 2 * (24 * 64**2 + 4 * 32 * 64) + 2 * 64 * 128
    assert used["flops_per_step"] == 3 * 32 * per_token * 8  # 4 ranks of 2 sequences
    step_ns = sum(rank["wall_ns"] for rank in answer["ranks"]) / 4
    assert used["mfu"] == pytest.approx(used["flops_per_step"] / (step_ns / 1e9) / 4 / 2e8)
    assert used["hfu"] == pytest.approx(used["mfu"] * 4 / 3)
    assert used["mamfu"] == pytest.approx(2 * used["mfu"])
    assert 0 < used["run_mfu"] < used["mfu"] * 1.05


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--flops-per-step", "1", "--plan", "plan.json"], "exclude each other"),
        (["--flops-per-step", "0"], "--flops-per-step 0: give a number above 0"),
        (["--peak-tflops", "1"], "--peak-tflops needs --flops-per-step or --plan"),
    ],
)
def test_options_that_contradict_one_another(job: Path, words: list[str], said: str) -> None:
    result = runner.invoke(app, ["summary", str(job / "run"), *words])

    assert result.exit_code == 2
    assert said in result.stderr
