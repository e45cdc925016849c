"""``commtrace plan``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.cli.main import app
from commtrace.synth import Job, synthesize, write
from tests.cli.planned_runs import LAYOUT, MODEL, recorded
from tests.json_schemas import errors

MEGATRON = shlex.split(
    "torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --vocab-size 128 --micro-batch-size 2 --global-batch-size 16 --bf16"
)


def run_plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def plan_file(folder: Path, **layout: Any) -> str:
    path = folder / "job.json"
    path.write_text(json.dumps({"model": MODEL, "layout": layout}))
    return str(path)


def test_a_command_of_megatron() -> None:
    result = run_plan("--", *MEGATRON, "--tensor-model-parallel-size", "2", "--lr", "1")

    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "218,496 parameters on 4 GPUs (tp 2 · dp 2), 4 microbatches of 2 × 32 tokens."
    assert lines[1].startswith("At its peak a GPU needs ")
    assert "Ignored: --lr" in lines
    assert "tp all_reduce layers forward 32 2 8.19 kB 262 kB 262 kB" in lines


@pytest.mark.parametrize(("memory", "exit_code", "verdict"), [("80", 0, "Fits"), ("0.001", 1, "Does not fit")])
def test_whether_it_fits_is_the_exit_code(tmp_path: Path, memory: str, exit_code: int, verdict: str) -> None:
    path = plan_file(tmp_path)
    as_text, as_json = run_plan(path, "--memory", memory), run_plan(path, "--memory", memory, "--json")

    assert (as_text.exit_code, as_json.exit_code) == (exit_code, exit_code)
    assert f"{verdict}: a GPU needs " in as_text.stdout
    assert json.loads(as_json.stdout)["fits"] is (exit_code == 0)
    assert " at its peak and has 74.51 GiB" in run_plan(path, "--memory", "80GB").stdout


def test_a_plan_that_fits_says_how_much_memory_is_left(tmp_path: Path) -> None:
    path = plan_file(tmp_path, dp=4)
    peak_bytes = json.loads(run_plan(path, "--json").stdout)["stages"][0]["memory"]["peak_bytes"]
    with_room = run_plan(path, "--memory", f"{2 * peak_bytes}B").stdout
    tight = run_plan(path, "--memory", f"{101 * peak_bytes // 100}B")

    assert "so that 3.98 MiB are left." in " ".join(with_room.split())
    assert tight.exit_code == 0
    assert "Fits, but leaves only 40.8 KiB: a GPU needs 3.98 MiB at its peak and has " in tight.stdout
    assert "Leave a few GiB for what is not in it." in " ".join(tight.stdout.split())


def test_if_no_single_change_fits_several_together_do(tmp_path: Path) -> None:
    path = plan_file(tmp_path, tp=2, dp=4, microbatch=2)
    peak_bytes = json.loads(run_plan(path, "--json").stdout)["stages"][0]["memory"]["peak_bytes"]
    memory = f"{4 * peak_bytes // 10}B"
    as_text, as_json = run_plan(path, "--memory", memory), run_plan(path, "--memory", memory, "--json")
    printed = json.loads(as_json.stdout)

    assert (as_text.exit_code, as_json.exit_code) == (1, 1)
    assert "Several changes that together make it fit" in as_text.stdout
    assert list(errors("plan", printed)) == []
    assert all(one["peak_bytes"] <= 0.4 * peak_bytes for one in printed["combinations"])
    nothing = run_plan(path, "--memory", "1kB").stdout
    assert "Even 5 such changes together do not make it fit. The smallest peak" in nothing
    assert json.loads(run_plan(path, "--memory", "80", "--json").stdout)["combinations"] == []


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "sequence_parallel": True, "distributed_optimizer": True},
        {"dp": 4, "zero_stage": 3},
        {"cp": 2, "recompute": "full"},
    ],
)
def test_json_matches_the_schema(tmp_path: Path, layout: dict[str, Any]) -> None:
    printed = json.loads(run_plan(plan_file(tmp_path, **layout), "--json").stdout)

    assert list(errors("plan", printed)) == []
    assert printed["parameters"] == 210_304


def test_stages_with_the_same_communication_share_a_table(tmp_path: Path) -> None:
    printed = run_plan(plan_file(tmp_path, pp=4, microbatches=8)).stdout

    assert "Communication of each GPU on stages 1–2 in one iteration" in printed
    assert "Ideal pipeline bubble: 27% of the step, 38% of the work." in printed


def test_buckets_of_equal_layers_are_one_row(tmp_path: Path) -> None:
    sizes = {"dp": 2, "overlap_gradients": True, "bucket_elements": 1, "distributed_optimizer": True}
    words = plan_file(tmp_path, **sizes)
    rows = [line.split() for line in run_plan(words).stdout.splitlines() if "reduce_scatter" in line]
    in_json = [
        (row["bytes_per_call"], row["count"])
        for row in json.loads(run_plan(words, "--json").stdout)["stages"][0]["traffic"]
        if row["operation"] == "reduce_scatter"
    ]

    assert len(rows) == len({size for size, _ in in_json}) < len(in_json)
    assert sum(int(row[4]) for row in rows) == len(in_json)


def test_a_padded_vocabulary_is_reported(tmp_path: Path) -> None:
    printed = run_plan(
        "--", *MEGATRON, "--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "100"
    ).stdout

    assert "The vocabulary of 128 is padded to 200." in printed
    assert "is padded" not in run_plan("--", *MEGATRON).stdout


def test_estimates_are_explained_where_there_are_any(tmp_path: Path) -> None:
    def legend(**layout: Any) -> list[str]:
        printed = run_plan(plan_file(tmp_path, **layout)).stdout
        return [line for line in printed.splitlines() if line.startswith(("source:", "estimate:"))]

    (of_zero,) = legend(
        dp=2, zero_stage=3, zero={"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0}
    )
    assert of_zero.startswith("estimate: parameters exceed stage3_max_live_parameters")
    assert legend(cp=2) == ["source: read in Megatron-core, not counted on real ranks."]
    assert legend(dp=2) == []


def test_deepspeed_has_communication_of_data_parallel_ranks_only(tmp_path: Path) -> None:
    printed = run_plan(plan_file(tmp_path, dp=4, zero_stage=3)).stdout

    assert printed.startswith("210,304 parameters on 4 GPUs (dp 4 · ZeRO 3), 1 microbatch of 1 × 32 tokens.")
    assert "Communication of each GPU in one iteration" in printed
    assert "dp    reduce_scatter  gradients" in printed
    printed = run_plan(plan_file(tmp_path, tp=2, dp=2, zero_stage=3)).stdout
    assert "! The communication of DeepSpeed is known for data parallelism only" in printed
    assert "Communication of" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.yaml"], "absent.yaml: No such file"),
        (["nosuchrun"], "nosuchrun: no such run or file. Give the directory of a run, a file that ends with .json"),
        (["a.yaml", "b.yaml"], "one file or run is planned at a time, not 2: a.yaml, b.yaml"),
        (MEGATRON, "write -- before that command"),
        (["--memory", "-1", "--", *MEGATRON], "--memory -1: give the memory of a GPU in GiB"),
        (["--", *MEGATRON, "--pipeline-model-parallel-size", "3"], "4 ranks cannot be divided by 3"),
        (["--", *MEGATRON, "--num-query-groups", "1", "--group-query-attention", "--tensor-model-parallel-size", "2"],
         "query_groups (1) is below tp (2): Megatron-core then gathers"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_planned_is_an_error(words: list[str], message: str) -> None:
    result = run_plan(*words)

    assert result.exit_code == 2
    assert message in result.stderr


def test_gpus_are_of_a_command(tmp_path: Path) -> None:
    assert "in a file, set dp" in run_plan(plan_file(tmp_path), "--gpus", "8").stderr
    assert "on 8 GPUs" in run_plan("--gpus", "8", "--", *MEGATRON).stdout


def test_a_run_that_sends_what_it_should(tmp_path: Path) -> None:
    run = recorded(tmp_path, model=MODEL, layout=LAYOUT)
    as_text, as_json = run_plan("--against", run), run_plan("--against", run, "--json")
    printed = json.loads(as_json.stdout)

    assert (as_text.exit_code, as_json.exit_code) == (0, 0), as_text.output
    lines = [line.rstrip() for line in as_text.stdout.splitlines()]
    assert "0 differences in 4 kinds of communication." in lines
    assert "0–1    tp        all_reduce            9     9        2.30 kB     2.30 kB  same" in lines
    assert list(errors("plan-against", printed)) == []
    assert {row["verdict"] for row in printed["rows"]} == {"same"}


def test_the_peak_stands_beside_the_planned_memory(tmp_path: Path) -> None:
    run = recorded(tmp_path, model=MODEL, layout=LAYOUT, peaks=[(5 << 20, 6 << 20), (7 << 20, 8 << 20)])
    as_text, as_json = run_plan("--against", run), run_plan("--against", run, "--json")
    planned = json.loads(run_plan(run, "--json").stdout)["stages"][0]["memory"]
    printed = json.loads(as_json.stdout)

    assert as_text.exit_code == 0, as_text.output
    assert list(errors("plan-against", printed)) == []
    (row,) = printed["memory"]
    assert row.pop("reason").startswith("More than planned: the plan has no workspaces")
    assert row == {
        "ranks": [0, 1], "planned": planned, "fullest_rank": 1, "measured_bytes": 7 << 20, "lowest_bytes": 5 << 20,
        "reserved_bytes": 8 << 20,
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in as_text.stdout.splitlines()]
    assert "ranks parameters gradients optimizer activations planned peak difference reserved" in lines
    assert "0–1 411 KiB 822 KiB 1.20 MiB 756 KiB 3.15 MiB 7.00 MiB +3.85 MiB 8.00 MiB" in lines


def test_without_a_device_there_is_no_peak_beside_the_plan(tmp_path: Path) -> None:
    run = recorded(tmp_path, model=MODEL, layout=LAYOUT)

    assert "Memory: no rank recorded a peak" in run_plan("--against", run).stdout
    assert json.loads(run_plan("--against", run, "--json").stdout)["memory"] == []


def test_a_run_that_sends_something_else_ends_with_1(tmp_path: Path) -> None:
    run = recorded(tmp_path, missing="all_gather", model=MODEL, layout=LAYOUT)
    result = run_plan("--against", run)

    assert result.exit_code == 1
    assert "ranks 0–1, dp all_gather: Not sent, or on a path" in result.stdout
    assert json.loads(run_plan("--against", run, "--json").stdout)["differences"] == 1


def test_a_run_beside_another_plan(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", model=MODEL, layout=LAYOUT)
    same = plan_file(tmp_path, dp=2, microbatches=3, microbatch=2, distributed_optimizer=True)
    other = [*MEGATRON, "--use-distributed-optimizer", "--tensor-model-parallel-size", "2", "--gpus", "2"]

    assert run_plan("--against", run, same).exit_code == 0
    result = run_plan("--against", run, "--gpus", "2", "--", *other)
    assert result.exit_code == 1
    assert (
        "This is not the planned job: the run has vocabulary 128 instead of 256, tp 1 instead of 2, dp 2 instead of 1, "
        "microbatches 3 instead of 8. "
    ) in " ".join(result.stdout.split())
    printed = json.loads(run_plan("--against", run, "--json", "--gpus", "2", "--", *other).stdout)
    assert list(errors("plan-against", printed)) == []
    assert "tp 1 instead of 2" in printed["other_sizes"]


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    result = run_plan(recorded(tmp_path, model=MODEL, layout=LAYOUT, not_planned=["fp8"]))

    assert result.exit_code == 0
    assert result.stdout.startswith("210,304 parameters on 2 GPUs (dp 2), 3 microbatches of 2 × 32 tokens.")
    assert "! The numbers depend on fp8, which a plan does not understand yet." in result.stdout


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "the sizes of its model were not recorded"),
        ({"model": {**MODEL, "layers": 0}}, "the recorded sizes do not fit together: layers is 0"),
        ({"model": MODEL, "layout": {"tensor": True, "microbatch": 0}}, "do not fit together: microbatch is 0"),
    ],
)
def test_a_run_without_sizes_says_what_to_give(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    result = run_plan("--against", recorded(tmp_path, **facts))

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_options_that_do_not_belong_to_a_comparison_are_refused(tmp_path: Path) -> None:
    words = ("--memory", "1", "--baseline", "file", "--tflops", "3")
    assert "leave out --memory, --tflops, --baseline" in run_plan("--against", str(tmp_path), *words).stderr
    assert "--steps belongs to --against" in run_plan("--steps", "1", plan_file(tmp_path)).stderr
    assert "no" in run_plan("--against", str(tmp_path)).stderr


def test_times_at_a_bandwidth(tmp_path: Path) -> None:
    path = plan_file(tmp_path, pp=4, microbatches=8)
    words = ("--bandwidth", "all=1GB/s", "--bandwidth", "pp=2GB/s", "--tflops", "1")
    as_text, as_json = run_plan(path, *words), run_plan(path, *words, "--json")
    printed = json.loads(as_json.stdout)

    assert as_text.exit_code == 0, as_text.output
    assert "Time of the communication of each GPU in one iteration, each role alone" in as_text.stdout
    lines = [" ".join(line.split()) for line in as_text.stdout.splitlines()]
    assert "1–2 pp 65.5 kB 2.00 GB/s 32.8 µs 772 MB/s shorter than compute" in lines
    assert any("bandwidth time needed to hide it" in line for line in lines)
    assert "Below 1 µs: mp." in lines
    assert "Compute of a GPU in one iteration: " in as_text.stdout
    assert list(errors("plan", printed)) == []
    pp = next(one for one in printed["times"] if (one["stage"], one["role"]) == (1, "pp"))
    assert pp["seconds"] == 65_536 / 2e9
    assert pp["hiding_bytes_per_second"] == 65_536 / printed["compute_seconds"]
    iteration, compute = printed["iteration_time"], printed["compute_seconds"]
    of_stage = [one["seconds"] for one in printed["times"] if one["stage"] == iteration["stage"]]
    assert iteration["all_hidden_seconds"] == max(compute, *(one["seconds"] for one in printed["times"]))
    assert iteration["none_hidden_seconds"] == compute + sum(of_stage)
    assert "Both together: 84.9 µs if all communication is hidden, 134 µs if none is, on stage 0, the slowest." in (
        " ".join(as_text.stdout.split())
    )
    pipelined = printed["pipelined_time"]
    # (m + p − 1) / m, as the stages compute alike
    assert pipelined["all_hidden_seconds"] == pytest.approx(compute * (8 + 3) / 8, rel=1e-3)
    assert pipelined["none_hidden_seconds"] > max(iteration["none_hidden_seconds"], pipelined["all_hidden_seconds"])
    assert "With the bubble of the pipeline, whose schedule is replayed: 117 µs and " in " ".join(
        as_text.stdout.split()
    )
    without = json.loads(run_plan(path, "--json").stdout)
    assert (without["times"], without["iteration_time"]) == ([], None)


def test_times_by_a_baseline(tmp_path: Path) -> None:
    def measured(operation: str, num_bytes: int, time_ns: float) -> Measurement:
        return Measurement(
            operation, (0, 1), ("a",), num_bytes, "float32", 20, MeasuredSpread(time_ns, time_ns, time_ns)
        )

    kinds = ("reduce_scatter", "all_gather")
    file = tmp_path / "baseline.json"
    NetworkBaseline({}, tuple(measured(kind, 1 << size, 8e6) for kind in kinds for size in (10, 24))).save(file)
    path = plan_file(tmp_path, dp=2, distributed_optimizer=True)
    as_text, as_json = run_plan(path, "--baseline", str(file)), run_plan(path, "--baseline", str(file), "--json")
    printed = json.loads(as_json.stdout)

    assert as_text.exit_code == 0, as_text.output
    assert list(errors("plan", printed)) == []
    times = {one["role"]: one["seconds"] for one in printed["times"]}
    assert times == {"dp-cp": pytest.approx(0.016), "dist-opt": None}
    assert printed["times_not_measured"] == ["all_reduce of 4 bytes by 2 ranks within a node"]
    as_printed = " ".join(as_text.stdout.split())
    assert "The baseline has no time for all_reduce of 4 bytes by 2 ranks within a node: measure it with" in as_printed
    assert "without latencies" not in as_printed
    mixed = run_plan(path, "--baseline", str(file), "--bandwidth", "dist-opt=0.000001MB/s").stdout
    assert "Without latencies, as they follow from a bandwidth: dist-opt." in mixed
    named = json.loads(run_plan(path, "--baseline", str(file), "--bandwidth", "dp-cp=1GB/s", "--json").stdout)
    assert [one["bytes_per_second"] for one in named["times"] if one["role"] == "dp-cp"] == [1e9]


def test_times_of_a_recorded_run(tmp_path: Path) -> None:
    run = recorded(tmp_path, model=MODEL, layout=LAYOUT)
    printed = json.loads(run_plan(run, "--measured", run, "--json").stdout)

    assert {one["role"] for one in printed["times"]} == {"dp-cp", "dist-opt"}
    assert all(one["seconds"] > 0 for one in printed["times"])
    assert printed["measured_other_sizes"] == []
    other = plan_file(tmp_path, dp=4, microbatches=3, microbatch=2, distributed_optimizer=True)
    assert (
        "! The measured run is not the planned job: it has dp 2 instead of 4."
        in run_plan(other, "--measured", run).stdout
    )


def test_what_a_run_measured_of_roles_that_send_nothing_in_the_plan_is_left_out(tmp_path: Path) -> None:
    write(synthesize(Job(pp=2, dp=2, microbatches=4, steps=3)), tmp_path / "run")
    result = run_plan(plan_file(tmp_path, dp=2), "--measured", str(tmp_path / "run"), "--json")

    assert result.exit_code == 0, result.stderr
    assert [one["role"] for one in json.loads(result.stdout)["times"]] == ["dp-cp"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bandwidth", "tp=3"), "write a role and a rate"),
        (("--bandwidth", "ep=3GB/s"), "the plan communicates over"),
        (("--tflops", "0"), "--tflops is 0"),
    ],
)
def test_times_that_cannot_be_computed_say_why(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    result = run_plan(plan_file(tmp_path, dp=2), *words)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_numbers_of_another_tool_stand_beside() -> None:
    as_text, as_json = run_plan("--like", "megatron-issue-488"), run_plan("--like", "megatron-issue-488", "--json")
    lines = [" ".join(line.split()) for line in as_text.stdout.splitlines()]

    assert "fullest GPU total bytes 40.2 GiB 36.4 GiB the sum" in lines
    assert "one iteration all operations 34,818 35,136 the sum" in lines
    assert any(line.startswith("one iteration data bytes 12.8 GiB 153.3 GiB that of one") for line in lines)
    assert list(errors("plan", json.loads(as_json.stdout))) == []
    assert len(json.loads(as_json.stdout)["compared"]) == 20


@pytest.mark.parametrize("words", [[], ["--like", "megatron-issue-488", "--", *MEGATRON]])
def test_one_job_is_needed(words: list[str]) -> None:
    assert "give either a file, a run, a command after --, or --like" in run_plan(*words).stderr


def test_a_workload_for_simai_is_written_beside_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "workload.txt"

    result = run_plan("--simai", str(path), "--json", "--", *MEGATRON, "--tensor-model-parallel-size", "2")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["parameters"] == 218_496
    assert path.read_text().splitlines()[1] == "51"
    assert f"{path}: 51 rows for SimAI, compute not measured" in result.stderr
    assert "note: AICB counts the word embedding 4 times" in result.stderr
