"""The plan of a job, and what would take less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import RoleTotal, alternatives, make_plan

MODEL = Model(layers=8, hidden=1024, heads=16, sequence=2048, vocabulary=51_200)


def test_the_cluster_s_communication_is_that_of_all_ranks() -> None:
    plan = make_plan(MODEL, Layout(pp=4, dp=2, microbatches=8, microbatch=2))
    totals = {total.role: total for total in plan.role_totals()}

    # 2m(p − 1) transfers in each of two pipelines
    message = 2 * 2048 * 2 * 1024
    assert totals["pp"] == RoleTotal("pp", 96, 96 * message, 96 * message)
    embedding = 4 * 51_200 * 1024
    assert totals["embedding"] == RoleTotal("embedding", 4, 4 * embedding, 4 * embedding)
    assert plan.groups()["pp"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert plan.groups()["embedding"] == ((0, 6), (1, 7))


def test_the_first_stage_is_the_fullest() -> None:
    plan = make_plan(MODEL, Layout(pp=4, microbatches=8))

    assert plan.fullest.stage == 0
    assert plan.fullest.memory.peak_bytes == max(stage.memory.peak_bytes for stage in plan.stages)


def test_alternatives_keep_the_ranks_and_the_batch() -> None:
    layout = Layout(tp=2, dp=4, microbatch=2, microbatches=4)
    plan = make_plan(MODEL, layout)
    found = alternatives(plan)

    assert [one.change for one in found] == [
        "flash attention", "distributed optimizer", "sequence parallelism", "microbatch of 1, 8 microbatches",
        "selective recomputation", "tp 4, dp 2", "full recomputation",
    ]  # fmt: skip
    for one in found:
        changed = one.layout
        assert changed.world_size == layout.world_size
        assert changed.dp * changed.microbatch * changed.microbatches == 4 * 2 * 4
        assert one.peak_bytes == make_plan(MODEL, changed).fullest.memory.peak_bytes
        assert one.peak_bytes < plan.fullest.memory.peak_bytes


def test_an_alternative_must_be_possible() -> None:
    changes = {one.change for one in alternatives(make_plan(replace(MODEL, heads=1, query_groups=1), Layout(dp=2)))}

    assert "tp 2, dp 1" not in changes


def test_experts_on_all_ranks_leave_no_room_for_more_tensor_parallelism() -> None:
    layout = Layout(pp=4, dp=8, ep=8, distributed_optimizer=True, flash_attention=True)

    assert [one.change for one in alternatives(make_plan(replace(MODEL, experts=8), layout))] == ["full recomputation"]


def test_experts_are_divided_by_tensor_parallelism_with_sequence_parallelism() -> None:
    changes = {one.change for one in alternatives(make_plan(replace(MODEL, experts=8), Layout(dp=4)))}

    assert "tp 2, dp 2, sequence parallelism" in changes
    assert "tp 2, dp 2" not in changes


def test_the_next_stage_of_zero_is_an_alternative() -> None:
    plan = make_plan(MODEL, Layout(dp=4, zero_stage=1, flash_attention=True))

    assert [one.change for one in alternatives(plan)] == ["ZeRO stage 2", "tp 2, dp 2", "full recomputation"]


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (MODEL, Layout(), []),
        (MODEL, Layout(dp=2, zero_stage=3), ["Buckets hold tensors in Megatron-core's", "ZeRO 3 has gathered"]),
        (MODEL, Layout(tp=2, zero_stage=1), ["for data parallelism only"]),
        (replace(MODEL, experts=4), Layout(dp=2, ep=2), ["divided evenly between experts"]),
        (
            replace(MODEL, experts=4),
            Layout(dp=2, ep=2, tp=2, sequence_parallel=True, expert_dispatcher="other"),
            ["divided evenly", "all-to-all token dispatcher"],
        ),
        (replace(MODEL, experts=4), Layout(dp=2, ep=4, tp=2, expert_tp=1, sequence_parallel=True), ["divided evenly"]),
        (MODEL, Layout(cp=2, cp_communication="other"), ["communication of cp is left out"]),
    ],
)
def test_what_is_left_out_is_said(model: Model, layout: Layout, words: list[str]) -> None:
    notes = make_plan(model, layout).notes

    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="8 layers cannot be divided"):
        make_plan(MODEL, Layout(pp=3))
