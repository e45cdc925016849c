"""What would take less memory."""

from __future__ import annotations

from dataclasses import replace

from commtrace.planning.alternatives import alternatives, combinations
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import make_plan

MODEL = Model(layers=8, hidden=1024, heads=16, sequence=2048, vocabulary=51_200)


def test_alternatives_keep_the_ranks_and_the_batch() -> None:
    layout = Layout(tp=2, dp=4, microbatch=2, microbatches=4)
    plan = make_plan(MODEL, layout)
    found = alternatives(plan)

    assert [one.change for one in found] == [
        "flash attention", "distributed optimizer", "sequence parallelism", "microbatch of 1, 8 microbatches",
        "selective recomputation", "pp 2, dp 2", "tp 4, dp 2", "cp 2, dp 2", "full recomputation",
    ]  # fmt: skip
    for one in found:
        changed = one.layout
        assert changed.world_size == layout.world_size
        assert changed.dp * changed.microbatch * changed.microbatches == 4 * 2 * 4
        assert one.peak_bytes == make_plan(MODEL, changed).fullest.memory.peak_bytes
        assert one.peak_bytes < plan.fullest.memory.peak_bytes


def test_an_alternative_must_be_possible() -> None:
    changes = {one.change for one in alternatives(make_plan(replace(MODEL, heads=1, query_groups=1), Layout(dp=2)))}

    assert "pp 2, dp 1" in changes
    assert "tp 2, dp 1" not in changes


def test_experts_on_all_ranks_leave_no_room_for_more_tensor_parallelism() -> None:
    layout = Layout(pp=4, dp=8, ep=8, distributed_optimizer=True, flash_attention=True)

    changes = [one.change for one in alternatives(make_plan(replace(MODEL, experts=8), layout))]

    assert changes == ["cp 2, dp 4", "full recomputation"]


def test_experts_are_divided_by_tensor_parallelism_with_sequence_parallelism() -> None:
    changes = {one.change for one in alternatives(make_plan(replace(MODEL, experts=8), Layout(dp=4)))}

    assert "tp 2, dp 2, sequence parallelism" in changes
    assert "tp 2, dp 2" not in changes


def test_experts_are_divided_between_more_ranks_where_there_are_some() -> None:
    model = replace(MODEL, experts=8)
    layout = Layout(dp=4, ep=2)
    (divided,) = [one for one in alternatives(make_plan(model, layout)) if one.change == "ep 4"]

    assert divided.layout == replace(layout, ep=4)
    for no_more in (replace(layout, ep=4), Layout(dp=3), Layout(dp=4, zero_stage=1)):
        assert not [one for one in alternatives(make_plan(model, no_more)) if "ep" in one.change.split()]
    three_experts = make_plan(replace(MODEL, experts=3), Layout(dp=4))
    assert "ep 2" not in [one.change for one in alternatives(three_experts)]


def test_further_stages_of_zero_are_alternatives_and_other_parallelism_only_where_there_is_some() -> None:
    plan = make_plan(MODEL, Layout(dp=4, zero_stage=1, flash_attention=True))
    with_tp = make_plan(MODEL, Layout(tp=2, dp=4, zero_stage=2, flash_attention=True, sequence_parallel=True))

    assert [one.change for one in alternatives(plan)] == ["ZeRO stage 2", "ZeRO stage 3", "full recomputation"]
    assert [one.change for one in alternatives(with_tp)] == ["ZeRO stage 3", "tp 4, dp 2", "full recomputation"]


LLAMA_70B = Model(
    layers=80, hidden=8192, heads=64, query_groups=8, ffn=28_672, gated=True, sequence=8192, vocabulary=128_256,
    normalization="RMSNorm", positions="rope", linear_bias=False, qkv_bias=False, tied_embeddings=False,
    hidden_dropout=False, attention_dropout=False,
)  # fmt: skip
GIB = 1 << 30


def test_the_fewest_changes_that_fit_come_first_without_recomputation() -> None:
    plan = make_plan(LLAMA_70B, Layout(tp=4, pp=2, dp=8, microbatches=16, flash_attention=True))
    without, recomputing = combinations(plan, 80 * GIB)

    assert without.change == "distributed optimizer, tp 8, dp 4, sequence parallelism"
    assert recomputing.change == "distributed optimizer, full recomputation"
    for one in (without, recomputing):
        peak_bytes = make_plan(LLAMA_70B, one.layout).fullest.memory.peak_bytes
        assert one.peak_bytes == peak_bytes <= 0.95 * 80 * GIB
        assert one.layout.world_size == 64
        assert one.layout.dp * one.layout.microbatch * one.layout.microbatches == 8 * 16


def test_plans_with_as_many_changes_are_ordered_by_their_costliest_one() -> None:
    plan = make_plan(LLAMA_70B, Layout(tp=2, pp=2, dp=16, microbatch=2, microbatches=16))
    first, recomputing = combinations(plan, 192 * GIB)

    # not tensor parallelism of 4 with sequence parallelism, which costs more than a pipeline of 4
    assert first.change == "flash attention, distributed optimizer, pp 4, dp 8, microbatch of 1, 64 microbatches"
    assert recomputing.change == "distributed optimizer, full recomputation"


def test_if_nothing_fits_the_smallest_is_returned() -> None:
    plan = make_plan(LLAMA_70B, Layout(tp=4, pp=2, dp=8, microbatches=16, flash_attention=True))
    (smallest,) = combinations(plan, 1 * GIB)

    assert smallest.layout.recompute == "full"
    assert GIB < smallest.peak_bytes < min(one.peak_bytes for one in alternatives(plan))


def test_zero_3_and_full_recomputation_are_combined() -> None:
    plan = make_plan(LLAMA_70B, Layout(dp=64, zero_stage=1, flash_attention=True))

    assert [one.change for one in combinations(plan, 60 * GIB)] == ["ZeRO stage 3, full recomputation"]
