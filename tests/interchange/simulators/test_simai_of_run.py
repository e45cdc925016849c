"""A step whose every time is known, as a SimAI workload, as overlap ratios and as a row of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.breakdown.states import BUBBLE
from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.step_totals import step_totals
from commtrace.errors import ConfigurationError
from commtrace.interchange.simulators import aiob
from commtrace.interchange.simulators.simai_of_run import class_of, roles_of_groups, workload_of_rank
from commtrace.interchange.simulators.simai_result import overlaps, result_of, write_options, write_result
from commtrace.trace.metadata import Group
from tests.factory import Row, collective, group, make_run, span, stall
from tests.pipeline_factory import PipelineJob

US = 1000
TP, DP, WORLD = group("tp", 0, 1), group("dp", 0, 1, ordinal=1), group("world", 0, 1, ordinal=2)


def blocking(operation: str, where: Group, seq: int, begin: int, end: int, **columns: Any) -> list[Row]:
    row = collective(operation, where, seq, begin, end, **columns)
    return [row, stall(row, begin, end)]


def step(number: int, begin: int) -> list[Row]:
    """A step of 100 µs: forward 40, all-gather of 10 in it; backward 45, reduce-scatter of 5 in it; all-reduce 10."""
    at = {"step": number, "microbatch": 0}
    ids = 10 * number
    hidden = collective(
        "all_to_all", TP, 3 * number + 2, begin + 70 * US, begin + 80 * US, bytes=99, id=ids + 4, is_async=True, **at
    )
    return [
        span("step", begin, begin + 100 * US, step=number),
        span("forward", begin, begin + 40 * US, **at),
        span("module", begin, begin + 30 * US, **at) | {"name": "decoder.layers.0.self_attention"},
        *blocking("all_gather", TP, 3 * number, begin + 20 * US, begin + 30 * US, bytes=4096, id=ids + 1, **at),
        span("backward", begin + 40 * US, begin + 85 * US, **at),
        span("module", begin + 40 * US, begin + 55 * US, **at) | {"name": "decoder.layers.0.self_attention backward"},
        *blocking("reduce_scatter", TP, 3 * number + 1, begin + 50 * US, begin + 55 * US, bytes=4096, id=ids + 2, **at),
        hidden,
        *blocking("all_reduce", DP, number, begin + 85 * US, begin + 95 * US, bytes=800, id=ids + 3, step=number),
        *blocking("all_reduce", WORLD, number, begin + 95 * US, begin + 96 * US, bytes=4, id=ids + 5, step=number),
        span("optimizer", begin + 96 * US, begin + 99 * US, step=number),
    ]


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    rows = [row for number in range(3) for row in step(number, number * 100 * US)]
    return analyse(make_run({0: rows, 1: rows}, [TP, DP, WORLD]))


def test_compute_is_cut_where_the_rank_communicated(analysis: Analysis) -> None:
    measured = workload_of_rank(analysis, 0)

    assert (measured.step, measured.wall_ns) == (1, 100 * US)
    assert measured.workload.text().splitlines() == [
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 1 pp: 1 vpp: 1 ga: 1 all_gpus: 2 "
        "checkpoints: 0 checkpoint_initiates: 0 pp_comm: 0",
        "7",
        "step_compute\t-1\t0\tNONE\t0\t3000\tNONE\t0\t0\tNONE\t0\t100",
        "step_0\t-1\t0\tNONE\t0\t0\tNONE\t0\t0\tALLREDUCE\t800\t100",
        "forward_microbatch0_0\t-1\t20000\tALLGATHER\t4096\t0\tNONE\t0\t0\tNONE\t0\t100",
        "forward_microbatch0_1\t-1\t10000\tNONE\t0\t0\tNONE\t0\t0\tNONE\t0\t100",
        "backward_microbatch0_2\t-1\t0\tNONE\t0\t15000\tNONE\t0\t0\tNONE\t0\t100",
        "backward_microbatch0_1\t-1\t0\tNONE\t0\t15000\tALLTOALL\t99\t0\tNONE\t0\t100",
        "backward_microbatch0_0\t-1\t0\tNONE\t0\t10000\tREDUCESCATTER\t4096\t0\tNONE\t0\t100",
    ]
    assert measured.notes == ("1 calls of the step are left out: SimAI has no group for world.",)


def test_overlap_and_result_are_those_that_were_measured(analysis: Analysis, tmp_path: Path) -> None:
    totals, roles = step_totals(analysis), roles_of_groups(analysis.run)
    found = overlaps(totals.communication.table(analysis.run), roles)

    assert write_options(found, tmp_path / "overlap.txt") == "-dp_o 0.0000 -tp_o 0.4000"
    assert [one.ratio for one in found][2:] == [None, None]
    write_result(result_of(totals.means(analysis.run), roles), "a,b", tmp_path / "result.csv")
    assert (tmp_path / "result.csv").read_text() == (
        "File name, Expose DP comm, Expose DP_EP comm, Expose TP comm, Expose_EP_comm, Expose_PP_comm, bubble time, "
        "total comp, total exposed comm, Total time\n"
        "a_b, 10 (10.00%), 0 (0.00%), 15 (15.00%), 0 (0.00%), 0 (0.00%), 0 (0.00%), 73 (73.00%), 26 (26.00%), 100\n"
    )


def test_compute_files_have_forward_and_backward_without_stalls(analysis: Analysis, tmp_path: Path) -> None:
    times = aiob.compute_times(analysis, 0)
    aiob.write_times(times.steps, times.forward, tmp_path / "aiob.txt")

    assert (tmp_path / "aiob.txt").read_text().splitlines() == [
        "train_iter:2",
        "atten_self_attention:",
        "    time_gpu_max: 20.000",
        "    time_gpu_min: 20.000",
        "    time_gpu_avg: 20.000",
        "param_time:",
        "    time_gpu_max: 3.000",
        "    time_gpu_min: 3.000",
        "    time_gpu_avg: 3.000",
    ]
    assert {section: own.tolist() for section, own in times.backward.items()} == {
        "atten_self_attention": [10 * US, 10 * US]
    }


@pytest.mark.parametrize(
    ("module", "section"),
    [
        ("decoder.layers.3.self_attention", "atten_self_attention"),
        ("decoder.layers.3.self_attention.linear_qkv", ""),
        ("decoder.layers.3.input_layernorm", "layernorm"),
        ("decoder.layers.3.pre_mlp_layernorm", "layernorm2"),
        ("transformer.h.0.mlp", "mlp_mlp"),
        ("embedding", "Emb"),
        ("embedding.word_embeddings", ""),
        ("decoder.final_layernorm", "layernorm_post"),
        ("output_layer", "logit_time"),
        ("decoder", ""),
    ],
)
def test_sections_of_modules(module: str, section: str) -> None:
    assert aiob.section_of(module) == section


def test_a_pipeline_has_its_message_and_its_bubble_apart() -> None:
    analysis = analyse(PipelineJob(stages=2, microbatches=4, transfer_ns=1000).run())
    workload = workload_of_rank(analysis, 1).workload

    assert (workload.pp, workload.microbatches, workload.pipeline_bytes) == (2, 4, 1024)
    totals, roles = step_totals(analysis), roles_of_groups(analysis.run)
    result = result_of(totals.means(analysis.run), roles)
    assert result.bubble_ns > 0
    bubble = int(analysis.partition.total(BUBBLE).sum())
    pipeline = overlaps(totals.communication.table(analysis.run), roles, bubble)[3]
    assert pipeline.exposed_ns == pytest.approx(result.exposed_ns["PP"] * 2 * 2, abs=4)
    assert sum(layer.forward.compute_ns for layer in workload.layers) == 4 * 1_000_000


def test_the_world_is_data_parallel_where_there_is_nothing_else() -> None:
    assert class_of("world", ["world"]) == "DP"
    assert class_of("world", ["tp", "world"]) == ""


def test_a_run_without_phases_cannot_be_a_workload() -> None:
    run = make_run({0: [span("step", 100 * number, 100 * number + 100, step=number) for number in range(3)]})

    with pytest.raises(ConfigurationError, match="rank 0 recorded no forward and no backward"):
        workload_of_rank(analyse(run), 0)
