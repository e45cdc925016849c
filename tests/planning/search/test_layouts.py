"""The search: it finds what trying all layouts finds, keeps to the memory, and prints what Megatron-LM reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.cli.found_layouts import search_json
from commtrace.errors import ConfigurationError
from commtrace.planning.communication import GRADIENT_NORM, Traffic, stage_traffic
from commtrace.planning.layout import Layout
from commtrace.planning.megatron_arguments import parse_megatron_command
from commtrace.planning.model import Model
from commtrace.planning.search.candidates import candidates, fitting_model
from commtrace.planning.search.layouts import search_layouts
from commtrace.planning.search.links import Bandwidth, Links, RoleReach, given_bandwidths, measured_links
from commtrace.planning.search.megatron import megatron_arguments
from commtrace.planning.search.prediction import PredictedLayout, Predictor
from commtrace.planning.search.reliability import can_be_ranked, kinds_of_change
from commtrace.planning.times import measure_communication
from tests.factory import collective, group, make_run, span
from tests.json_reading import read_back
from tests.planning.search.exact_costs import BETWEEN, COSTS, GIB, LAYOUT, MODEL, WITHIN, exact


@pytest.mark.parametrize(("memory_gib", "top"), [(80, 5), (3, 3), (1.5, 8)])
def test_the_search_finds_what_trying_everything_finds(memory_gib: float, top: int) -> None:
    predictor = Predictor.like(COSTS)
    every = [predictor.predict(layout) for layout in candidates(MODEL, LAYOUT, 8, 8)]
    fitting = [one for one in every if one.peak_bytes <= memory_gib * GIB]
    found = search_layouts(predictor, 8, round(memory_gib * GIB), 8, top)

    ranked = sorted(one.time.step_ns for one in fitting if is_ranked(one))
    others = sorted(one.time.step_ns for one in fitting if not is_ranked(one))
    assert (found.layouts, found.fitting, found.ranked) == (len(every), len(fitting), len(ranked))
    assert [one.time.step_ns for one in found.best] == ranked[:top]
    assert sorted(one.time.step_ns for one in found.candidates) == others[:top]


def is_ranked(prediction: PredictedLayout) -> bool:
    return can_be_ranked(kinds_of_change(prediction.assumptions, prediction.layout, LAYOUT))


def test_candidates_stand_in_the_order_of_their_sizes_as_their_times_say_nothing() -> None:
    found = search_layouts(Predictor.like(COSTS), 8, 80 * GIB, 8, 20)
    sizes = [(one.layout.tp, one.layout.pp, one.layout.dp, one.layout.chunks) for one in found.candidates]

    assert sizes == sorted(sizes)
    assert {"tp" in found.changes[one.layout] for one in found.candidates} == {True}
    assert not any("tp" in found.changes[one.layout] for one in found.best)


def test_nothing_fits_into_no_memory() -> None:
    found = search_layouts(Predictor.like(COSTS), 8, 1, 8, 5)

    assert (found.best, found.chosen, found.ties, found.candidates, found.gain) == ((), None, (), (), None)
    assert (found.fitting, found.ranked, found.too_large) == (0, 0, found.layouts)


@pytest.mark.parametrize("scatter", [0.0, 0.05, 0.3])
def test_all_that_are_a_tie_with_the_fastest_are_found(scatter: float) -> None:
    predictor = exact(scatter)
    every = [predictor.predict(layout) for layout in candidates(MODEL, LAYOUT, 8, 8)]
    found = search_layouts(predictor, 8, 80 * GIB, 8, top=1)

    steps = {one.layout: one.time.step_ns for one in every if is_ranked(one)}
    limit_ns = min(one.time.step_ns + one.uncertainty_ns for one in every if is_ranked(one))
    assert {one.layout for one in found.ties} == {layout for layout, step_ns in steps.items() if step_ns <= limit_ns}
    assert found.ties[0].time.step_ns == min(steps.values())
    assert found.chosen in found.ties


def test_the_recorded_layout_is_kept_if_it_is_a_tie() -> None:
    """Four stages with one chunk: 2 chunks are faster by less than the scatter of the steps."""
    found = search_layouts(exact(0.5), 8, 80 * GIB, 8, top=3)

    assert found.best[0].layout != LAYOUT
    assert found.chosen is not None
    assert (found.chosen.layout, found.gain) == (LAYOUT, 0.0)
    assert found.recorded == found.chosen


def test_layouts_on_another_number_of_gpus_are_candidates_only() -> None:
    found = search_layouts(exact(0.5), 16, 80 * GIB, 16, top=3)

    assert (found.recorded, found.gain, found.best, found.chosen, found.ranked) == (None, None, (), None, 0)
    assert len(found.candidates) == 3


def test_a_borrowed_bandwidth_may_be_the_slowest_or_the_fastest_of_its_reach() -> None:
    layout = replace(LAYOUT, pp=2, dp=4)
    other = Bandwidth(50.0, 1e7)
    links = Links({RoleReach("tp", False): WITHIN, RoleReach("pp", False): WITHIN, RoleReach("pp", True): BETWEEN}, {})
    spread = {part.cause: part.ns for part in Predictor(COSTS, 4, links).predict(layout).uncertainty}
    links = Links({**links.bandwidths, RoleReach("cp", True): other}, {})
    wider = {part.cause: part.ns for part in Predictor(COSTS, 4, links).predict(layout).uncertainty}

    assert "bandwidth of dp-cp" not in spread  # there is one bandwidth between nodes
    assert wider["bandwidth of dp-cp"] > 0


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
    within = Links({RoleReach("tp", False): WITHIN}, {})
    predictor = Predictor(replace(COSTS, gpus_per_node=8, links=within), gpus_per_node=4, links=within)
    found = search_layouts(predictor, 8, 80 * GIB, 8, 5)

    assert found.not_known
    assert all("no bandwidth between nodes was measured" in sentence for sentence in found.not_known)
    assert (found.best, found.ties, found.candidates) == ((), (), ())  # each sends something between nodes


@pytest.mark.parametrize("is_bound", [True, False])
def test_layouts_say_that_their_bandwidths_are_lower_bounds(is_bound: bool) -> None:
    links = Links({RoleReach("tp", False): Bandwidth(100.0, 1e8, is_bound), RoleReach("pp", True): BETWEEN}, {})
    predictor = Predictor(replace(COSTS, links=links), 4, links)
    notes = read_back(search_json(predictor, search_layouts(predictor, 8, 80 * GIB, 8, 5), 8, 80, ()))["notes"]
    told = [note for note in notes if note.startswith("Bandwidths that are lower bounds: tp. ")]

    assert len(told) == is_bound
    assert links.with_given({RoleReach("tp", False): 90.0}).bounds == ()


def test_the_links_of_a_run_are_lower_bounds_where_few_bytes_have_exact_times() -> None:
    """A large call whose end is not known, and one of a tenth of its bytes that is exact."""
    pair = group("dp", 0, 1)
    rows = [
        span("step", 0, 10_000, step=0),
        collective("all_reduce", pair, 0, 0, 800, id=0, bytes=12_000, step=0, end_exact=False),
        collective("broadcast", pair, 1, 800, 900, id=1, bytes=1_200, step=0),
    ]
    context = analyse(make_run({0: rows, 1: rows}, [pair]))
    links = measured_links(measure_communication(context).table(context.run))

    assert links.bounds == ("dp",)


def test_a_bandwidth_is_given_as_for_other_commands_or_as_gigabytes_per_second() -> None:
    given = dict(given_bandwidths(["tp=250", "dp-cp=250GB/s", "pp=between:200Gbit/s", "cp=between:25"]))

    assert given == {
        RoleReach("tp", False): 250.0,
        RoleReach("dp-cp", False): 250.0,
        RoleReach("pp", True): 25.0,
        RoleReach("cp", True): 25.0,
    }


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


def test_cp_and_ep_are_those_of_the_run_unless_they_are_to_be_tried() -> None:
    experts = replace(MODEL, experts=8)
    fixed = candidates(experts, LAYOUT, 16, 16)
    tried = list(candidates(experts, LAYOUT, 16, 16, cp=(1, 2), ep=(1, 4)))

    assert {(one.cp, one.ep) for one in fixed} == {(1, 1)}
    assert {(one.cp, one.ep) for one in tried} == {(1, 1), (2, 1), (1, 4), (2, 4)}
    assert {one.world_size for one in tried} == {16}
    assert {one.microbatch * one.microbatches * one.dp for one in tried} == {16}


def test_megatron_halves_the_share_of_a_context_parallel_rank() -> None:
    odd = replace(MODEL, sequence=1026, max_positions=1026)  # 2 · 513

    assert {one.cp for one in candidates(odd, LAYOUT, 8, 8, cp=(1, 2))} == {1}


def test_all_to_all_divides_the_heads_that_tensor_parallel_ranks_have() -> None:
    like = replace(LAYOUT, cp_communication="all_to_all")
    tried = list(candidates(replace(MODEL, query_groups=4), like, 8, 8, cp=(1, 2, 4)))

    assert {(one.tp, one.cp) for one in tried if one.cp > 1} == {(1, 2), (2, 2), (1, 4)}
    assert {one.tp for one in tried if one.cp == 1} == {1, 2, 4}


def test_experts_have_sequence_parallelism_wherever_they_are_divided_by_tp() -> None:
    tried = list(candidates(replace(MODEL, experts=8), replace(LAYOUT, tp=1, pp=8, expert_tp=0), 8, 8, ep=(1,)))

    assert {(one.tp > 1, one.sequence_parallel) for one in tried} == {(False, False), (True, True)}


@pytest.mark.parametrize(
    ("model", "like", "sizes", "message"),
    [
        (MODEL, LAYOUT, {"ep": (2,)}, "has no experts"),
        (replace(MODEL, experts=8), replace(LAYOUT, expert_dispatcher="other"), {"ep": (2,)}, "by all-to-all"),
        (MODEL, replace(LAYOUT, cp_communication="other"), {"cp": (2,)}, "exchanges keys and values"),
    ],
)
def test_an_exchange_that_is_not_known_is_not_searched(
    model: Model, like: Layout, sizes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        list(candidates(model, like, 8, 8, **sizes))


def test_context_parallel_ranks_share_the_work_and_exchange_keys_and_values() -> None:
    predictor = Predictor.like(COSTS)
    one, two = (
        predictor.predict(replace(LAYOUT, tp=1, pp=1, dp=1, cp=cp, expert_tp=0, microbatch=1, microbatches=1))
        for cp in (1, 2)
    )

    # of work half; of the ring, 8 layers with 1 block of keys and values in the forward and 2 in the backward, each
    # 2 · 2 bytes · 512 tokens · 1024 at 100 GB/s: one is received while the other is sent
    ring_ns = 8 * 3 * (2 * 2 * 512 * 1024 / 100)
    assert two.time.pipeline_ns == pytest.approx(one.time.pipeline_ns / 2 + ring_ns, rel=1e-4)
    assert two.assumed[:2] == ("tp 1", "cp 2")
    assert two.peak_bytes < one.peak_bytes


def test_each_rank_updates_fewer_experts_with_a_distributed_optimizer() -> None:
    like = replace(LAYOUT, tp=1, pp=1, dp=8, expert_tp=0, distributed_optimizer=True)
    predictor = Predictor.like(replace(COSTS, model=replace(MODEL, experts=8), layout=like))

    # experts are 1/8 on each rank then, and have no copies between which they could be divided further
    together, apart = (predictor.predict(replace(like, ep=ep)).time.optimizer_ns for ep in (1, 8))
    assert together == apart == COSTS.optimizer_ns


def measured(operation: str, num_bytes: int, duration_ns: float) -> Measurement:
    return Measurement(operation, (0, 1), ("a",), num_bytes, "float32", 1, MeasuredSpread(*[duration_ns] * 3))


def test_a_role_that_the_run_lacks_is_timed_by_the_baseline() -> None:
    baseline = NetworkBaseline({}, (measured("all_reduce", 1 << 10, 5_000.0), measured("all_reduce", 1 << 30, 8e6)))
    links = Links({RoleReach("tp", False): WITHIN}, {}).with_given({}, baseline)
    gradients = Traffic("dp-cp", "all_reduce", "gradients", "step", 3, 1 << 30, 2)

    assert links.ns(gradients, between_nodes=False) == pytest.approx(3 * 8e6)
    assert links.ns(replace(gradients, bytes_per_call=4), between_nodes=False) == pytest.approx(3 * 5_000)
    # the run's own goes before it; what the baseline lacks has the bandwidth of another role
    assert links.ns(replace(gradients, role="tp"), between_nodes=False) == pytest.approx(3 * (1 << 30) / 100)
    assert links.ns(replace(gradients, group_size=4), between_nodes=False) == pytest.approx(3 * 1.5 * (1 << 30) / 100)


def test_the_source_of_a_bandwidth_is_named() -> None:
    baseline = NetworkBaseline({}, (measured("all_reduce", 1 << 10, 5_000.0), measured("all_reduce", 1 << 30, 8e6)))
    links = COSTS.links.with_given({}, baseline)
    layout = replace(LAYOUT, pp=2, dp=2)

    borrowed = ("bandwidth of pp", "bandwidth of dp-cp", "bandwidth of embedding")
    assert Predictor(COSTS, 8, COSTS.links).assumptions(layout).phrases == borrowed
    found = ("bandwidth of pp", "dp-cp of the baseline", "embedding of the baseline")
    assert Predictor(COSTS, 8, links).assumptions(layout).phrases == found
    assert Predictor(COSTS, 8, links).assumptions(layout).borrowed_roles == ("pp",)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 2), (2, 2), (4, 1)])
def test_every_role_whose_bandwidth_is_borrowed_is_named(tied: bool, ep: int, expert_tp: int) -> None:
    model = replace(MODEL, experts=8, tied_embeddings=tied)
    layout = replace(LAYOUT, pp=2, dp=4, cp=2, ep=ep, expert_tp=expert_tp, sequence_parallel=True)
    rows = [row for stage in (0, 1) for row in stage_traffic(model, layout, stage)]
    sends = {row.role for row in rows if row.group_size > 1 and row.what != GRADIENT_NORM}
    predictor = Predictor(replace(COSTS, model=model), 64, Links({RoleReach("mp", False): WITHIN}, {}))
    assumed = predictor.assumptions(layout).phrases

    assert {one for one in assumed if one.startswith("bandwidth")} == {f"bandwidth of {role}" for role in sends}


def test_roles_of_an_exchange_that_is_not_planned_are_not_named() -> None:
    """Nothing is sent in the plan then, so that no time depends on their bandwidth."""
    model = replace(MODEL, experts=8, tied_embeddings=False)
    layout = replace(LAYOUT, pp=2, dp=2, cp=2, ep=2, expert_tp=2, sequence_parallel=True)
    unplanned = replace(layout, cp_communication="other", expert_dispatcher="other")
    predictor = Predictor(replace(COSTS, model=model, layout=layout), 64, Links({RoleReach("mp", False): WITHIN}, {}))
    usual, other = (
        {one.removeprefix("bandwidth of ") for one in predictor.assumptions(each).phrases}
        for each in (layout, unplanned)
    )

    assert usual == {"tp", "cp", "pp", "dp-cp", "expert-dp", "ep", "expert-tp", "tp-ep"}
    assert usual - other == {"cp", "ep", "expert-tp", "tp-ep"}
    assert other < usual
