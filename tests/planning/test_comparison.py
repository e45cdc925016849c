"""What ranks sent and held beside what they should: every difference has a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.memory import RankMemory
from commtrace.errors import ConfigurationError
from commtrace.planning.call_counts import CallCounts, count_calls
from commtrace.planning.communication import GRADIENT_NORM, Traffic
from commtrace.planning.comparison import (
    ExpectedTraffic,
    MemoryRow,
    PlanComparison,
    TrafficRow,
    compare_memory,
    compare_plan,
    expected_of,
    expected_of_run,
)
from commtrace.planning.layout import Layout, ZeroOptions
from commtrace.planning.memory import Activations, Memory
from commtrace.planning.model import Model
from commtrace.planning.plan import make_plan
from commtrace.planning.recorded_job import recorded_zero_job
from commtrace.planning.zero import GATHERED_AGAIN, ZeroJob, zero_traffic
from tests.factory import collective, group, make_run, span

Sent = tuple[str, int]
"""An operation and its bytes."""


def call_counts(
    in_forward: Sequence[Sent] = (),
    in_backward: Sequence[Sent] = (),
    *,
    steps: int = 1,
    further: Sequence[Sent] = (),
    optimizer: bool = True,
    recomputes: bool = False,
    role: str = "dp",
) -> CallCounts:
    """Two ranks that send this in every step; ``further`` in the last one only, behind the backward."""
    rows, members = [], group(role, 0, 1)
    for step in range(steps):
        begin = 1000 * step
        rows += [
            span("step", begin, begin + 1000, step=step),
            span("forward", begin, begin + 300, step=step, microbatch=0),
            span("backward", begin + 300, begin + 600, step=step, microbatch=0),
        ]
        if optimizer:
            rows.append(span("optimizer", begin + 900, begin + 1000, step=step))
        if recomputes:
            rows.append(span("recompute", begin + 310, begin + 320, step=step))
        places = [(begin, in_forward), (begin + 300, in_backward)]
        if step == steps - 1:
            places.append((begin + 600, further))
        for start, sent in places:
            for number, (operation, num_bytes) in enumerate(sent):
                at = start + 5 * number
                rows.append(collective(operation, members, len(rows), at, at + 4, bytes=num_bytes, step=step))
    return count_calls(analyse(make_run({0: rows, 1: rows}, [members])))


def planned(*calls: tuple[str, int, int], what: str = "gradients", role: str = "dp") -> list[ExpectedTraffic]:
    """Calls of ranks 0 and 1: operation, count, bytes."""
    return [
        ExpectedTraffic(
            range(2), tuple(Traffic(role, name, what, "step", count, size, 2) for name, count, size in calls)
        )
    ]


def only_row(comparison: PlanComparison) -> TrafficRow:
    (row,) = comparison.rows
    return row


def test_the_same_is_no_difference() -> None:
    comparison = compare_plan(
        planned(("all_reduce", 2, 64)), call_counts(in_backward=[("all_reduce", 64)] * 2, steps=3)
    )

    assert only_row(comparison) == TrafficRow((0, 1), "dp", "all_reduce", 2, 2, 128, 128, "same", "")
    assert (comparison.differences, comparison.steps, comparison.notes) == (0, (1, 2), ())
    assert comparison.verdict == "0 differences in 1 kind of communication."


GATHERS = [("all_gather", 100), ("all_gather", 28)]


@pytest.mark.parametrize(
    ("expected", "run", "reason"),
    [
        (
            planned(("all_gather", 1, 100), ("all_gather", 1, 28)),
            call_counts(GATHERS, GATHERS),
            "Sent twice.",
        ),
        (
            planned(("all_gather", 1, 100), ("all_gather", 1, 28)),
            call_counts(GATHERS, GATHERS[:1]),
            "Extra all-gather in the backward: parameters do not stay live. 1 call of 100 bytes more than planned.",
        ),
        (
            planned(("all_reduce", 1, 100)),
            call_counts([("all_reduce", 100)], [("all_reduce", 100), ("all_reduce", 8)], recomputes=True),
            "The forward's calls again in the backward, which recomputes activations: 1 call of 100 bytes, 1 of 8 "
            "more.",
        ),
        (
            planned(("all_reduce", 1, 100)),
            call_counts(in_backward=[("all_reduce", 100), ("all_reduce", 8), ("all_reduce", 8)]),
            "2 calls of 8 bytes more than planned, in the backward.",
        ),
        (planned(("all_reduce", 3, 100)), call_counts([("all_reduce", 100)] * 2), "1 call of 100 bytes is missing."),
        (planned(("all_reduce", 1, 100)), call_counts(), "Not sent, or on a path that commtrace does not see"),
        (
            planned(),
            call_counts([("broadcast", 8)]),
            "Not in the plan: 1 call of 8 bytes, in the forward. Of the script",
        ),
        (
            planned(("all_reduce", 1, 100), ("all_reduce", 2, 60)),
            call_counts([("all_reduce", 200), ("all_reduce", 120), ("all_reduce", 120)]),
            "Each call has 2 times the bytes: another precision or size of the parameters than planned.",
        ),
        (
            planned(("all_reduce", 2, 50)),
            call_counts([("all_reduce", 40), ("all_reduce", 60)]),
            "The same bytes, divided otherwise: 1 call of 60 bytes, 1 of 40 instead of 2 calls of 50 bytes.",
        ),
        (
            planned(("all_reduce", 2, 50)),
            call_counts([("all_reduce", 40), ("all_reduce", 70)]),
            "1 call of 70 bytes, 1 of 40 instead of 2 calls of 50 bytes, in the forward.",
        ),
    ],
)
def test_every_difference_has_a_sentence(expected: list[ExpectedTraffic], run: CallCounts, reason: str) -> None:
    comparison = compare_plan(expected, run)

    assert only_row(comparison).verdict == "different"
    assert only_row(comparison).reason.startswith(reason)
    assert comparison.differences == 1
    assert comparison.verdict.startswith("1 difference. The largest: dp ")


def test_bytes_of_activations_depend_on_the_sequence_and_the_microbatch() -> None:
    comparison = compare_plan(planned(("all_reduce", 1, 100), role="tp"), call_counts([("all_reduce", 200)], role="tp"))

    assert only_row(comparison).reason.endswith("another precision, sequence or microbatch than planned.")


def test_buckets_in_one_coalesced_call_are_no_difference() -> None:
    row = only_row(
        compare_plan(planned(("all_gather", 1, 100), ("all_gather", 1, 28)), call_counts([("all_gather", 128)]))
    )

    assert (row.verdict, row.reason) == ("explained", "2 buckets went in one coalesced call of 128 bytes.")


def test_routing_makes_bytes_uneven_but_not_the_number_of_calls() -> None:
    run = call_counts([("all_to_all", 90), ("all_to_all", 30)], role="ep")

    assert only_row(compare_plan(planned(("all_to_all", 2, 50), role="ep"), run)).verdict == "explained"
    assert only_row(compare_plan(planned(("all_to_all", 3, 40), role="ep"), run)).verdict == "different"


@pytest.mark.parametrize("role", ["cp", "sp"])
def test_ranks_that_exchange_heads_send_equal_parts(role: str) -> None:
    run = call_counts([("all_to_all", 128)] * 4, role=role)
    row = only_row(compare_plan(planned(("all_to_all", 4, 64), role=role), run))

    assert row.verdict == "different"
    assert row.reason == "Each call has 2 times the bytes: another precision, sequence or microbatch than planned."


@pytest.mark.parametrize(("role", "verdict"), [("expert-tp", "explained"), ("tp", "different")])
def test_ranks_that_divide_an_expert_gather_as_many_tokens_as_are_routed_to_it(role: str, verdict: str) -> None:
    run = call_counts([("all_gather", 90), ("all_gather", 30)], role=role)
    row = only_row(compare_plan(planned(("all_gather", 2, 50), role=role), run))

    assert (row.verdict, row.expected_bytes, row.measured_bytes) == (verdict, 100, 120)


def test_without_an_optimizer_no_norm_is_expected() -> None:
    norm = planned(("all_reduce", 1, 4), what=GRADIENT_NORM)

    assert compare_plan(norm, call_counts(optimizer=False)).rows == ()
    assert "No optimizer made a step" in compare_plan(norm, call_counts(optimizer=False)).notes[0]
    assert only_row(compare_plan(norm, call_counts())).verdict == "different"


def test_the_usual_step_is_compared_and_the_others_are_named() -> None:
    comparison = compare_plan(
        planned(("all_reduce", 1, 64)),
        call_counts([("all_reduce", 64)], steps=4, further=[("all_reduce", 8)]),
    )

    assert (comparison.steps, comparison.differences) == ((1, 2), 0)
    assert "Rank 0 sent something else in the steps 3, which are not compared" in comparison.notes[0]


@pytest.mark.parametrize(
    ("num_bytes", "rest"),
    [
        (64, "0 differences in 1 kind of communication."),
        (8, "1 difference. The largest: dp all_reduce. Each call has 0.125 times the bytes"),
    ],
)
def test_other_sizes_of_the_run_are_named_first(num_bytes: int, rest: str) -> None:
    comparison = compare_plan(
        planned(("all_reduce", 1, 64)),
        call_counts([("all_reduce", num_bytes)]),
        other_sizes=["flash_attention true instead of false"],
    )

    assert comparison.verdict.startswith(
        f"This is not the planned job: the run has flash_attention true instead of false. {rest}"
    )


def test_ranks_of_another_job_are_named() -> None:
    sent = [Traffic("dp", "all_reduce", "gradients", "step", 1, 64, 2)]
    run = call_counts([("all_reduce", 64)])

    assert compare_plan([ExpectedTraffic(range(4), tuple(sent))], run).notes == (
        "The plan also has ranks 2–3: not recorded, so not compared.",
    )
    assert compare_plan([ExpectedTraffic(range(1), tuple(sent))], run).notes == (
        "The run also has rank 1; the plan is of a smaller job.",
    )
    with pytest.raises(ConfigurationError, match="of ranks 4–5, which the plan has, none was recorded"):
        compare_plan([ExpectedTraffic(range(4, 6), tuple(sent))], run)


def test_a_plan_has_the_roles_that_are_recorded() -> None:
    model = Model(layers=2, hidden=64, heads=4, sequence=32, vocabulary=128)
    roles = {row.role for row in expected_of(make_plan(model, Layout(dp=2)))[0].traffic}

    assert roles == {"dp", "tp", "mp"}
    assert "dp-cp" in {row.role for row in expected_of(make_plan(model, Layout(dp=2, cp=2)))[0].traffic}


def test_counts_of_parts_of_a_run_add_up() -> None:
    one, more = call_counts([("all_reduce", 64)], steps=3), call_counts([("all_reduce", 32)], steps=5)

    both = one + more

    assert both.usual(0).steps == (1, 2, 3, 4)
    assert both.unusual_steps(0) == []
    assert {len(alike.steps) for alike in both.ranks[1].values()} == {2, 4}
    assert both.optimizer_steps == one.optimizer_steps + more.optimizer_steps


def test_repeated_gathers_of_zero_3_are_an_upper_limit() -> None:
    gathers = [
        Traffic("dp", "all_gather", "parameters", "forward", 1, 100, 2),
        Traffic("dp", "all_gather", GATHERED_AGAIN, "backward", 1, 100, 2),
    ]
    less = compare_plan(
        [ExpectedTraffic(range(2), tuple(gathers))], call_counts([("all_gather", 100)], [("all_gather", 60)])
    )
    more = compare_plan(
        [ExpectedTraffic(range(2), tuple(gathers))], call_counts([("all_gather", 100)], [("all_gather", 160)])
    )

    assert only_row(less).verdict == "explained"
    assert only_row(less).reason.startswith("Extra all-gather in the backward: parameters do not stay live within")
    assert only_row(more).verdict == "different"


def test_a_recorded_job_of_deepspeed() -> None:
    facts = {"zero_stage": 1, "microbatches": 2, "parameter_elements": [8, 2], "parameter_groups": [0, 1]}
    zero = {"reduce_bucket_size": 4, "overlap_comm": 1, "gradient_bytes": 4}
    run = make_run({0: [], 1: []}, topology={**facts, "zero": zero}, parallel={"dp": 2})
    recorded = recorded_zero_job(run)

    assert recorded is not None
    assert recorded.job == ZeroJob(
        1, (8, 2), 2, 2, gradient_bytes=4, options=ZeroOptions(4, overlap_comm=True), groups=(0, 1)
    )
    (expected,), notes = expected_of_run(run)
    assert (expected.ranks, notes) == ((0, 1), ())
    assert expected.traffic == zero_traffic(recorded.job)
    with pytest.raises(ConfigurationError, match="2 parameters and 1 groups were recorded"):
        recorded_zero_job(make_run({0: []}, topology={**facts, "parameter_groups": [0]}, parallel={"dp": 1}))
    assert recorded_zero_job(make_run({0: [], 1: []}, topology=facts, parallel={"dp": 1, "pp": 2})) is None


PLANNED_MEMORY = Memory(100, 200, 300, (Activations("attention", 250), Activations("mlp", 150)))  # 1000 in all


def peak(rank: int, allocated_bytes: int) -> RankMemory:
    return RankMemory(rank, 0, allocated_bytes, 2 * allocated_bytes, 3)


@pytest.mark.parametrize(
    ("measured", "beginning"),
    [
        (950, ""),
        (1050, ""),
        (1051, "More than planned: the plan has no workspaces"),
        (949, "Parameters, gradients and optimizer states fit in it; fewer activations"),
        (600, "Parameters, gradients and optimizer states fit in it; fewer activations"),
        (599, "Less than parameters, gradients and optimizer states would take"),
    ],
)
def test_a_difference_beyond_a_twentieth_has_a_sentence(measured: int, beginning: str) -> None:
    (row,) = compare_memory([((0,), PLANNED_MEMORY)], [peak(0, measured)])

    assert row.reason.startswith(beginning)
    assert bool(row.reason) == bool(beginning)


def test_the_fullest_rank_of_a_stage_is_compared_and_ranks_without_a_peak_are_left_out() -> None:
    peaks = [peak(0, 980), peak(2, 1000), peak(5, 990)]

    rows = list(compare_memory([(range(4), PLANNED_MEMORY), ((4, 5), None), ((6, 7), PLANNED_MEMORY)], peaks))

    assert rows == [
        MemoryRow((0, 2), PLANNED_MEMORY, 2, 1000, 980, 2000, ""),
        MemoryRow((5,), None, 5, 990, 990, 1980, ""),
    ]
