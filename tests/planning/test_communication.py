"""Communication: the calls that ranks of real Megatron-core models were counted to make, and formulas by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from commtrace.planning.communication import Traffic, bucket_elements, stage_traffic, total_bytes
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.parameters import chunk_parameters

SMALL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)
SHARDED = Layout(microbatches=4, distributed_optimizer=True, clip_gradients=False)  # no optimizer made a step


def calls(model: Model, layout: Layout, stage: int = 0) -> Counter[tuple[str, str, int]]:
    """Counts by role, operation and bytes, as they can be counted in a rank."""
    found: Counter[tuple[str, str, int]] = Counter()
    for row in stage_traffic(model, layout, stage):
        found[row.role, row.operation, row.bytes_per_call] += row.count
    return found


def test_tensor_parallelism_as_counted() -> None:
    assert calls(SMALL, replace(SHARDED, tp=2)) == {
        ("dp-cp", "all_gather", 214_272): 1,
        ("tp", "all_reduce", 128): 12,
        ("tp", "all_reduce", 4096): 72,
        ("dp-cp", "reduce_scatter", 428_544): 1,
    }


def test_sequence_parallelism_as_counted() -> None:
    assert calls(SMALL, replace(SHARDED, tp=2, sequence_parallel=True)) == {
        ("dp-cp", "all_gather", 214_272): 1,
        ("tp", "all_gather", 4096): 108,
        ("tp", "all_reduce", 128): 12,
        ("tp", "all_reduce", 4096): 4,
        ("tp", "all_reduce", 6656): 1,
        ("dp-cp", "reduce_scatter", 428_544): 1,
        ("tp", "reduce_scatter", 4096): 68,
    }


@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        (
            0,
            {
                ("dp-cp", "all_gather", 16_384): 1,
                ("dp-cp", "all_gather", 104_192): 1,
                ("embedding", "all_reduce", 32_768): 1,
                ("pp", "recv", 4096): 8,
                ("pp", "send", 4096): 8,
                ("dp-cp", "reduce_scatter", 32_768): 1,
                ("dp-cp", "reduce_scatter", 208_384): 1,
            },
        ),
        *(
            (
                stage,
                {
                    ("dp-cp", "all_gather", 100_096): 1,
                    ("pp", "recv", 4096): 16,
                    ("pp", "send", 4096): 16,
                    ("dp-cp", "reduce_scatter", 200_192): 1,
                },
            )
            for stage in (1, 2)
        ),
        (
            3,
            {
                ("dp-cp", "all_gather", 16_384): 1,
                ("dp-cp", "all_gather", 100_352): 1,
                ("embedding", "all_reduce", 32_768): 1,
                ("tp", "all_reduce", 128): 24,
                ("pp", "recv", 4096): 8,
                ("pp", "send", 4096): 8,
                ("dp-cp", "reduce_scatter", 32_768): 1,
                ("dp-cp", "reduce_scatter", 200_704): 1,
            },
        ),
    ],
)
def test_a_pipeline_as_counted(stage: int, counted: dict[tuple[str, str, int], int]) -> None:
    assert calls(SMALL, replace(SHARDED, pp=4, microbatches=8), stage) == counted


@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        (
            0,
            {
                ("dp-cp", "all_gather", 8192): 1,
                ("dp-cp", "all_gather", 104_960): 1,
                ("tp", "all_gather", 4096): 52,
                ("embedding", "all_reduce", 16_384): 1,
                ("tp", "all_reduce", 3072): 1,
                ("tp", "all_reduce", 4096): 4,
                ("pp", "recv", 2048): 4,
                ("pp", "send", 2048): 4,
                ("dp-cp", "reduce_scatter", 16_384): 1,
                ("dp-cp", "reduce_scatter", 209_920): 1,
                ("tp", "reduce_scatter", 4096): 32,
            },
        ),
        (
            1,
            {
                ("dp-cp", "all_gather", 8192): 1,
                ("dp-cp", "all_gather", 101_120): 1,
                ("tp", "all_gather", 4096): 56,
                ("embedding", "all_reduce", 16_384): 1,
                ("tp", "all_reduce", 128): 12,
                ("tp", "all_reduce", 3584): 1,
                ("pp", "recv", 2048): 4,
                ("pp", "send", 2048): 4,
                ("dp-cp", "reduce_scatter", 16_384): 1,
                ("dp-cp", "reduce_scatter", 202_240): 1,
                ("tp", "reduce_scatter", 4096): 36,
            },
        ),
    ],
)
def test_tensor_and_pipeline_parallelism_as_counted(stage: int, counted: dict[tuple[str, str, int], int]) -> None:
    assert calls(SMALL, replace(SHARDED, tp=2, pp=2, sequence_parallel=True), stage) == counted


@pytest.mark.parametrize(("pp", "chunks", "transfers"), [(2, 1, 2 * 8 * 1), (4, 1, 2 * 8 * 3), (2, 2, 2 * 8 * 3)])
def test_a_pipeline_transfers_2m_pv_minus_1_times(pp: int, chunks: int, transfers: int) -> None:
    layout = Layout(pp=pp, chunks=chunks, microbatches=8)
    rows = [row for stage in range(pp) for row in stage_traffic(SMALL, layout, stage) if row.role == "pp"]

    for operation in ("send", "recv"):
        assert sum(row.count for row in rows if row.operation == operation) == transfers


def test_without_the_distributed_optimizer_gradients_are_all_reduced_unpadded() -> None:
    assert calls(SMALL, Layout(tp=2, dp=4))["dp-cp", "all_reduce", 4 * 107_008] == 1


def test_positions_without_parameters_are_reduced_into_parts_of_the_sequence() -> None:
    rotary = calls(replace(SMALL, positions="rope"), replace(SHARDED, tp=2, sequence_parallel=True))

    assert rotary["tp", "reduce_scatter", 4096] == 68 + 4
    assert rotary["tp", "all_reduce", 4096] == 0


def test_a_fused_cross_entropy_is_reduced_twice() -> None:
    fused = calls(SMALL, replace(SHARDED, tp=2, fused_cross_entropy=True))

    assert (fused["tp", "all_reduce", 128], fused["tp", "all_reduce", 256]) == (4, 4)


def test_full_recomputation_repeats_the_forward_of_layers() -> None:
    layout = replace(SHARDED, tp=2, recompute="full")

    assert calls(SMALL, layout)["tp", "all_reduce", 4096] == 72 + 2 * 4 * 4
    assert [row.what for row in stage_traffic(SMALL, layout, 0) if row.basis == "source"] == ["recomputed layers"]


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_of_keys_and_values(cp: int) -> None:
    block = 4 * (32 // cp) * 64
    rows = [row for row in stage_traffic(SMALL, Layout(cp=cp), 0) if (row.role, row.operation) == ("cp", "send")]

    for when, count, num_bytes in (("forward", cp - 1, (cp - 1) * block), ("backward", cp, 2 * (cp - 1) * block)):
        assert sum(row.count for row in rows if row.when == when) == 4 * count
        assert sum(row.tensor_bytes for row in rows if row.when == when) == 4 * num_bytes


def test_heads_are_exchanged_for_the_sequence() -> None:
    exchanged = calls(SMALL, Layout(cp=2, cp_communication="all_to_all"))

    assert exchanged["cp", "all_to_all", 2 * 16 * 64] == 8 * 4


def test_experts() -> None:
    model = replace(SMALL, experts=4, linear_bias=False, qkv_bias=False)
    found = calls(model, Layout(dp=4, ep=2, microbatches=3, distributed_optimizer=True))

    assert found["tp-ep", "all_gather", 8 * 4 * 2] == 4 * 3
    assert found["ep", "all_to_all", 2 * 32 * 2 * 64] == 4 * 4 * 3
    assert found["ep", "all_to_all", 2 * 32 * 2] == 2 * 4 * 3
    assert found["expert-dp", "reduce_scatter", 4 * 4 * 2 * 8 * 64 * 64] == 1
    assert found["expert-dp", "all_gather", 2 * 4 * 2 * 8 * 64 * 64] == 1


def test_experts_that_are_not_divided_are_reduced_with_all_other_parameters() -> None:
    model = replace(SMALL, experts=4, linear_bias=False, qkv_bias=False)
    found = calls(model, replace(SHARDED, tp=2, expert_tp=2, sequence_parallel=True))  # as two ranks were counted

    assert found["dp-cp", "reduce_scatter", 1_212_928] == 1
    assert found["dp-cp", "all_gather", 606_464] == 1
    assert "expert-dp" not in {role for role, _, _ in found}


def test_experts_that_tensor_parallel_ranks_divide_as_counted() -> None:
    """The counts of two and of four ranks, whose bytes are means where tokens were not routed evenly."""
    model = replace(SMALL, experts=4, linear_bias=False, qkv_bias=False)
    layout = Layout(tp=2, microbatches=4, sequence_parallel=True)
    exchanged = {
        ("expert-tp", "all_gather", 8192): 32,
        ("expert-tp", "all_gather", 128): 16,
        ("expert-tp", "reduce_scatter", 8192): 32,
        ("expert-tp", "reduce_scatter", 128): 16,
    }

    for ep, gathered_bytes in ((1, 64), (2, 128)):
        found = calls(model, replace(layout, dp=ep, ep=ep))
        assert {kind: count for kind, count in found.items() if kind[0] == "expert-tp"} == exchanged
        assert found["tp-ep", "all_gather", gathered_bytes] == 16
        assert found["tp", "all_gather", 4096] == 60
        assert found["tp", "reduce_scatter", 4096] == 36
    assert not {kind for kind in calls(model, replace(layout, expert_tp=1)) if kind[0] in ("expert-tp", "tp-ep")}


def test_buckets_are_filled_from_the_end_where_reduction_overlaps() -> None:
    layout = Layout(overlap_gradients=True, bucket_elements=60_000)
    parameters = chunk_parameters(SMALL, layout, 0, 0)
    whole = sum(parameter.elements for parameter in parameters)
    divided = bucket_elements(parameters, layout, 1, is_divided=True)

    assert bucket_elements(parameters, layout, 1, is_divided=False) == (whole,)
    # the final norm and the last layer, then one half of the one before, with its MLP
    assert divided[0] == 128 + 49_984 + (64 * 256 + 64)
    assert sum(divided) == whole
    assert all(elements >= 60_000 for elements in divided[:-1])


def test_bytes_on_the_wire_are_those_of_a_ring() -> None:
    def wire_bytes(operation: str) -> int:
        return Traffic("tp", operation, "layers", "forward", 3, 800, 8).wire_bytes

    assert wire_bytes("all_reduce") == 3 * 1400
    assert {wire_bytes(operation) for operation in ("all_gather", "reduce_scatter", "all_to_all")} == {3 * 700}
    assert (wire_bytes("send"), wire_bytes("recv")) == (2400, 0)


def test_a_message_counts_where_it_is_sent() -> None:
    rows = [Traffic("pp", operation, "activations", "forward", 2, 10, 4) for operation in ("send", "recv")]

    assert total_bytes(rows) == (20, 20)


def test_only_the_first_chunk_of_the_first_stage_has_several_buckets() -> None:
    layout = Layout(pp=2, dp=2, chunks=2, microbatches=2, overlap_gradients=True, bucket_elements=60_000)
    model = Model(layers=8, hidden=64, heads=4, sequence=32, vocabulary=128)
    calls = [
        sum(row.count for row in stage_traffic(model, layout, stage) if (row.role, row.what) == ("dp-cp", "gradients"))
        for stage in range(2)
    ]
    first = bucket_elements(chunk_parameters(model, layout, 0, 0), layout, 2, is_divided=True)

    assert len(first) > 1
    assert calls == [len(first) + 1, 2]
