"""The search: it finds what trying all layouts finds, keeps to the memory, and prints what Megatron-LM reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.megatron_arguments import parse_megatron_command
from commtrace.planning.model import Model
from commtrace.search.candidates import candidates, fitting_model
from commtrace.search.costs import PartTimes, RunCosts
from commtrace.search.layouts import search_layouts
from commtrace.search.links import Bandwidth, Links, Place
from commtrace.search.megatron import megatron_arguments
from commtrace.search.pipeline_time import ChunkTimes
from commtrace.search.prediction import Predictor

MODEL = Model(layers=8, hidden=1024, heads=16, sequence=1024, vocabulary=50_304)
LAYOUT = Layout(tp=2, pp=4, dp=1, microbatch=2, microbatches=4, flash_attention=True)
WITHIN, BETWEEN = Bandwidth(100.0, 1e8), Bandwidth(20.0, 1e8)
COSTS = RunCosts(
    model=MODEL,
    layout=LAYOUT,
    gpus_per_node=4,
    parts=PartTimes(ChunkTimes(1_000_000, 2_000_000), ChunkTimes(50_000, 100_000), ChunkTimes(900_000, 1_500_000)),
    links=Links({Place("tp", False): WITHIN, Place("pp", True): BETWEEN}, {}),
    optimizer_ns=500_000,
    step_ns=60_000_000,
    step_scatter=0.01,
    notes=(),
)
GIB = 1 << 30


@pytest.mark.parametrize(("memory_gib", "top"), [(80, 5), (3, 3), (1.5, 8)])
def test_the_search_finds_what_trying_everything_finds(memory_gib: float, top: int) -> None:
    predictor = Predictor.like(COSTS)
    every = [predictor.predict(layout) for layout in candidates(MODEL, LAYOUT, 8, 8)]
    fitting = sorted(one.time.step_ns for one in every if one.peak_bytes <= memory_gib * GIB)
    found = search_layouts(predictor, 8, round(memory_gib * GIB), 8, top)

    assert found.layouts == len(every)
    assert [one.time.step_ns for one in found.best] == fitting[:top]
    measured = [one.time.step_ns for one in every if not one.assumed and one.peak_bytes <= memory_gib * GIB]
    assert (found.measured.time.step_ns if found.measured else None) == min(measured, default=None)


def test_nothing_fits_into_no_memory() -> None:
    found = search_layouts(Predictor.like(COSTS), 8, 1, 8, 5)

    assert (found.best, found.measured, found.margin) == ((), None, None)


def test_all_sizes_divide_what_they_must() -> None:
    for layout in candidates(MODEL, LAYOUT, 16, 24):
        layout.check(fitting_model(MODEL, layout.tp))
        assert layout.world_size == 16
        assert layout.microbatch * layout.microbatches * layout.dp == 24


def test_stages_may_have_uneven_numbers_of_layers() -> None:
    divided = {
        (one.first_stage_layers, one.last_stage_layers) for one in candidates(MODEL, LAYOUT, 2, 4) if one.pp == 2
    }

    assert divided == {(0, 0), (1, 7), (2, 6), (3, 5), (5, 3), (6, 2), (7, 1)}


def test_a_reach_without_a_measured_bandwidth_is_not_predicted() -> None:
    within = Links({Place("tp", False): WITHIN}, {})
    predictor = Predictor(replace(COSTS, gpus_per_node=8, links=within), gpus_per_node=4, links=within)
    found = search_layouts(predictor, 8, 80 * GIB, 8, 5)

    assert found.not_known
    assert all("no bandwidth between nodes was measured" in sentence for sentence in found.not_known)
    assert all(one.layout.tp <= 4 for one in found.best)


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no layout divides 8 layers and a global batch of 3"):
        search_layouts(Predictor.like(replace(COSTS, model=replace(MODEL, heads=1, query_groups=1))), 64, GIB, 3, 5)


COMMAND = [
    "pretrain_gpt.py", "--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16",
    "--seq-length", "1024", "--max-position-embeddings", "1024", "--vocab-size", "50257", "--bf16", "--use-flash-attn",
    "--moe-token-dispatcher-type", "alltoall",
]  # fmt: skip


def test_megatron_reads_the_layout_that_was_printed() -> None:
    for layout in candidates(MODEL, LAYOUT, 8, 8):
        job = parse_megatron_command([*COMMAND, *megatron_arguments(layout)], gpus=8)
        assert (job.layout, job.ignored) == (layout, ())
