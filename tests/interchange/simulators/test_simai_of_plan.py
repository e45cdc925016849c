"""A plan as SimAI's workload. The expected sizes are those that AICB's generator writes for the same job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from commtrace.errors import ConfigurationError
from commtrace.interchange.simulators.simai_of_plan import differences, workload_of_plan
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import make_plan
from tests.reference import reference_data

MODEL = Model(
    layers=8,
    hidden=1024,
    heads=16,
    sequence=2048,
    vocabulary=50432,
    tokenizer_vocabulary=50257,
    linear_bias=False,
    qkv_bias=False,
)
LAYOUT = Layout(tp=2, dp=4, sequence_parallel=True, microbatches=2)


def lines(model: Model, layout: Layout) -> list[str]:
    return workload_of_plan(make_plan(model, layout)).text().splitlines()


def test_the_reference_is_reproduced_to_the_byte() -> None:
    expected = reference_data("simai", "simai_tp2_dp4_sp.simai.txt").read_text()

    assert workload_of_plan(make_plan(MODEL, LAYOUT)).text() == expected


def test_without_sequence_parallelism_layers_reduce() -> None:
    model = replace(
        MODEL, layers=6, hidden=768, heads=12, query_groups=12, ffn=3072, head_size=64, sequence=1024, vocabulary=32256
    )
    written = lines(replace(model, tokenizer_vocabulary=32000), Layout(tp=4, dp=2, microbatches=4))

    # 4 · 32256/4 · 768 + 1024 · 768 for the embeddings and 12 · 768²/4 for each of 6 layers
    parameters = 32256 * 768 + 1024 * 768 + 6 * 3 * 768 * 768
    assert written[2].split("\t")[4] == str(2 * parameters)
    assert written[3] == f"layernorm\t-1\t1\tNONE\t0\t1\tALLREDUCE\t{2 * parameters}\t1\tNONE\t0\t100"
    assert Counter(line.split("\t")[0] for line in written[6:-7]) == {
        "embedding_layer": 4,
        "attention_layer": 24,
        "mlp_layer": 24,
        "embedding_norm": 4,
    }
    assert "attention_layer\t-1\t1\tALLREDUCE\t1572864\t1\tALLREDUCE\t1572864\t1\tNONE\t0\t100" in written


def test_experts_exchange_tokens() -> None:
    model = replace(
        MODEL, layers=4, hidden=512, heads=8, query_groups=8, head_size=64, ffn=2048, sequence=1024, experts=8
    )
    model = replace(model, expert_ffn=2048, vocabulary=32000, tokenizer_vocabulary=32000)
    written = lines(model, Layout(tp=2, dp=4, ep=2, sequence_parallel=True, microbatches=2))

    experts = 4 * 2 * 512 * 2048 * 4 // 2  # layers, matrices, sizes, experts of a rank, tp
    assert written[3] == f"moe_grad_norm1\t-1\t1\tNONE\t0\t1\tNONE\t0\t1\tALLGATHER_DP_EP\t{2 * experts}\t100"
    begin = written.index("attention_row\t-1\t1\tREDUCESCATTER\t1048576\t1\tNONE\t1048576\t1\tNONE\t0\t100")
    assert written[begin + 1 : begin + 6] == [
        "mlp_moelayer\t-1\t1\tALLGATHER\t64\t1\tNONE\t0\t1\tNONE\t0\t100",
        "mlp_moelayer\t-1\t1\tALLTOALL_EP\t1048576\t1\tALLTOALL_EP\t1048576\t1\tNONE\t0\t100",
        "mlp_moelayer\t-1\t1\tALLGATHER\t2097152\t1\tREDUCESCATTER\t2097152\t1\tNONE\t0\t100",
        "mlp_moelayer\t-1\t1\tREDUCESCATTER\t2097152\t1\tALLGATHER\t2097152\t1\tNONE\t0\t100",
        "mlp_moelayer\t-1\t1\tALLTOALL_EP\t1048576\t1\tALLTOALL_EP\t1048576\t1\tNONE\t0\t100",
    ]


@pytest.mark.parametrize(
    ("layout", "end"),
    [
        (Layout(tp=2, pp=2, dp=2, sequence_parallel=True, microbatch=2, microbatches=4), "pp_comm: 4194304"),
        (Layout(tp=2, pp=2, dp=2, microbatch=2, microbatches=4), "pp_comm: 8388608"),
    ],
)
def test_a_pipeline_has_a_part_of_the_layers(layout: Layout, end: str) -> None:
    assert lines(MODEL, layout)[0] == (
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 1 pp: 2 vpp: 4 ga: 4 all_gpus: 8 "
        f"checkpoints: 0 checkpoint_initiates: 0 {end}"
    )


def test_differences_from_the_plan_are_reported() -> None:
    gated = replace(MODEL, gated=True)

    assert len(differences(make_plan(MODEL, LAYOUT))) == 3
    assert "an MLP with one matrix" in differences(make_plan(gated, LAYOUT))[-1]


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (MODEL, Layout(dp=4, zero_stage=1), "leave zero_stage out"),
        (replace(MODEL, experts=4), Layout(dp=4, ep=2), "only with tp above 1 and sequence_parallel"),
        (replace(MODEL, experts=4, moe_every=2), LAYOUT, "every layer has experts"),
    ],
)
def test_jobs_that_aicb_does_not_generate(model: Model, layout: Layout, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        workload_of_plan(make_plan(model, layout))
