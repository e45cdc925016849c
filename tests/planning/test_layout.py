"""Layouts: process groups in Megatron-core's order, and layouts that are not possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout, groups
from commtrace.planning.model import Model

SMALL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)


def test_groups_are_those_of_the_order_tp_cp_ep_dp_pp() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2)

    assert layout.world_size == 16
    assert layout.stage_ranks(1) == range(8, 16)
    assert [layout.tp_group(13), layout.cp_group(13), layout.dp_cp_group(13), layout.pp_group(13)] == [
        (12, 13), (13, 15), (9, 11, 13, 15), (5, 13),
    ]  # fmt: skip


def test_experts_have_an_order_of_their_own() -> None:
    layout = Layout(tp=2, dp=4, ep=4, expert_tp=1)

    assert list(groups(layout, "ep")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(groups(layout, "expert-dp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(groups(layout, "tp")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(groups(layout, "dp-cp")) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_the_first_and_the_last_stage_share_the_embedding() -> None:
    assert Layout(tp=2, pp=4, dp=2).embedding_group(6) == (2, 14)


def test_chunks_take_turns_between_the_stages() -> None:
    layout = Layout(pp=2, chunks=2, microbatches=2)

    assert [layout.stage_layers(SMALL, stage) for stage in (0, 1)] == [
        (range(1), range(2, 3)), (range(1, 2), range(3, 4)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp is 0: give a number above 0"),
        ({"sequence_parallel": True}, "divides activations over tp, which is 1"),
        ({"chunks": 2}, "2 chunks need a pipeline"),
        ({"pp": 4, "chunks": 2, "microbatches": 6}, "groups of the 4 stages: 6 is no multiple"),
        ({"zero_stage": 4}, "DeepSpeed has 0, 1, 2 and 3"),
        ({"zero_stage": 1, "distributed_optimizer": True}, "give one of them"),
        ({"dp": 4, "ep": 3}, "is no multiple of expert_tp · ep .3.: lower ep"),
    ],
)
def test_a_layout_that_contradicts_itself_says_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Layout(**fields)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=3), "4 layers cannot be divided evenly into pp · chunks = 3 parts"),
        (Layout(tp=8), r"heads \(4\) is no multiple of tp \(8\): lower tp"),
        (Layout(cp=3), r"sequence \(32\) cannot be divided over cp \(3\)"),
        (Layout(dp=2, ep=2), "but the model has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_says_what_to_do(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        layout.check(SMALL)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(cp=8, cp_communication="all_to_all"), r"heads \(4\) is no multiple of tp · cp \(8\)"),
        (Layout(tp=2, cp=2, cp_communication="all_to_all"), r"query_groups \(2\) is no multiple of tp · cp \(4\)"),
    ],
)
def test_all_to_all_context_parallelism_divides_the_heads_that_tp_left(layout: Layout, message: str) -> None:
    grouped = replace(SMALL, query_groups=2)

    with pytest.raises(ConfigurationError, match=f"{message}.* take the ring"):
        layout.check(grouped)
    replace(layout, cp_communication="ring").check(grouped)
    replace(layout, tp=1, cp=2, expert_tp=1).check(grouped)


def test_experts_on_tensor_parallel_ranks_need_sequence_parallelism() -> None:
    experts = replace(SMALL, experts=4)

    with pytest.raises(ConfigurationError, match=r"does not train experts with tp 2 .* set sequence_parallel"):
        Layout(tp=2).check(experts)
    Layout(tp=2, sequence_parallel=True).check(experts)
    Layout(tp=2, zero_stage=1).check(experts)


def test_the_vocabulary_is_to_be_padded() -> None:
    with pytest.raises(ConfigurationError, match=r"vocabulary \(50257\) .* change vocabulary to 50304"):
        Layout(tp=2).check(replace(SMALL, vocabulary=50_257))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 5}, "is no multiple of heads"),
        ({"query_groups": 3}, "is no multiple of query_groups"),
        ({"max_positions": 16}, "is below sequence"),
        ({"experts": 1}, "experts_per_token"),
        ({"ffn": -1}, "ffn is -1"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(fields: dict[str, Any], message: str) -> None:
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
    with pytest.raises(ConfigurationError, match=message):
        Model(**{**sizes, **fields})


UNEVEN = Model(layers=10, hidden=64, heads=4, sequence=32, vocabulary=128)


def test_the_first_and_the_last_stage_may_have_fewer_layers() -> None:
    layout = Layout(pp=4, first_stage_layers=1, last_stage_layers=3)

    assert layout.stage_sizes(UNEVEN) == (1, 3, 3, 3)
    assert [layout.stage_layers(UNEVEN, stage) for stage in range(4)] == [
        (range(1),), (range(1, 4),), (range(4, 7),), (range(7, 10),),
    ]  # fmt: skip


def test_chunks_of_uneven_stages() -> None:
    layout = Layout(pp=2, chunks=2, microbatches=2, first_stage_layers=4)

    assert layout.stage_layers(UNEVEN, 0) == (range(2), range(5, 7))
    assert layout.stage_layers(UNEVEN, 1) == (range(2, 5), range(7, 10))


@pytest.mark.parametrize("ends", [{"first_stage_layers": 2}, {"first_stage_layers": 5, "last_stage_layers": 5}])
def test_uneven_stages_that_do_not_fit_are_refused(ends: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="10 layers cannot be divided into 4 stages of 1 chunks with"):
        Layout(pp=4, **ends).check(UNEVEN)


def test_a_copy_of_the_model() -> None:
    assert list(groups(Layout(tp=2, pp=2, dp=2), "mp")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert list(groups(Layout(tp=2, dp=2), "dist-opt")) == [(0, 1, 2, 3)]
