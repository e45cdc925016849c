"""The plan of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import RoleTotal, make_plan

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
def test_parts_that_are_left_out_are_named(model: Model, layout: Layout, words: list[str]) -> None:
    notes = make_plan(model, layout).notes

    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="8 layers cannot be divided"):
        make_plan(MODEL, Layout(pp=3))
