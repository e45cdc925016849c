"""Stages, chunks, microbatches, schedule and bubbles of simulated pipelines, by hand and by formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.pipeline.bubble import BubbleCause, RankWaits, bubbles_of_stages
from commtrace.analysis.pipeline.observed import Pipeline, find_pipeline
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.windows.run import OpenedRun
from commtrace.synth import Job, synthesize
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.schedule import recognise
from tests.analysis.simulated_schedules import Action, gpipe, interleaved, simulate
from tests.factory import Row, make_run, span
from tests.json_reading import read_back
from tests.pipeline_factory import PipelineJob

MS = 1_000_000


def pipeline_of(run: Run) -> Pipeline:
    pipeline = find_pipeline(OpenedRun.of(analyse(run, "0:")))
    assert pipeline is not None
    return pipeline


def test_a_stage_counts_only_ranks_whose_waits_are_known() -> None:
    """Rank 2, the other stage of rank 0, was not recorded: rank 0 seems to have waited for nobody."""
    run = synthesize(Job(pp=2, dp=2, microbatches=4, steps=4, jitter=0.0)).run
    whole = pipeline_of(run).per_stage
    without = pipeline_of(replace(run, ranks={rank: trace for rank, trace in run.ranks.items() if rank != 2})).per_stage

    assert [(stage.ranks, stage.left_out) for stage in whole] == [((0, 1), ()), ((2, 3), ())]
    assert [(stage.ranks, stage.left_out) for stage in without] == [((1,), (0,)), ((3,), ())]
    for known, part in zip(whole, without, strict=True):
        assert part.unmatched_ns == 0
        assert part.bubble_ns == pytest.approx(known.bubble_ns, rel=0.01)


@pytest.mark.parametrize("shift_ns", [-(10**15), -1_500_000_000, 10**15])
def test_nothing_depends_on_where_the_clocks_begin(shift_ns: int) -> None:
    """Times of imported traces may be negative: they count from somewhere in the middle."""
    run = synthesize(Job(pp=4, dp=2, microbatches=4, steps=4)).run
    moved = {
        rank: replace(
            trace, spans=trace.spans.replace(start=trace.spans.start + shift_ns, end=trace.spans.end + shift_ns)
        )
        for rank, trace in run.ranks.items()
    }

    assert pipeline_of(replace(run, ranks=moved)) == pipeline_of(run)
    assert pipeline_of(run).drain_fraction_of_step > 0


def test_a_stage_without_any_rank_with_known_waits_is_reported() -> None:
    run = synthesize(Job(pp=2, dp=2, microbatches=4, steps=4, jitter=0.0)).run
    ends_only = replace(run, ranks={rank: run.ranks[rank] for rank in (0, 3)})

    first, second = pipeline_of(ends_only).per_stage

    assert (first.ranks, first.left_out, first.bubble_ns) == ((0,), (), 0)
    assert 0 < first.unmatched_ns == first.transfer_ns
    assert 0 < second.unmatched_ns == second.transfer_ns


@pytest.mark.parametrize(("stages", "microbatches", "step_ms"), [(4, 8, 33), (8, 16, 69), (2, 2, 9), (4, 4, 21)])
def test_one_forward_one_backward(stages: int, microbatches: int, step_ms: int) -> None:
    pipeline = pipeline_of(PipelineJob(stages, microbatches).run())

    assert (pipeline.schedule, pipeline.stages, pipeline.chunks) == ("1f1b", stages, 1)
    assert pipeline.microbatches == microbatches
    ideal = (stages - 1) / (microbatches + stages - 1)
    assert pipeline.theoretical_fraction_of_phase == pytest.approx(ideal)
    assert pipeline.idle_fraction_of_phase == pytest.approx(ideal)
    assert pipeline.theoretical_ratio_to_work == pytest.approx((stages - 1) / microbatches)
    for number, stage in enumerate(pipeline.per_stage):
        assert stage.wall_ns == step_ms * MS
        assert (stage.forward_ns, stage.backward_ns, stage.work_ns) == (MS, 2 * MS, 3 * MS * microbatches)
        # Stage r fills for r·F, then waits (p − 1 − r)(F + B) for its gradients, and drains for r·B.
        assert stage.bubble_ns == stage.schedule_ns == (3 * (stages - 1 - number) + number) * MS
        assert stage.drain_ns == 2 * number * MS
        assert (stage.imbalance_ns, stage.variation_ns, stage.p2p_ns, stage.transfer_ns) == (0, 0, 0, 0)


@pytest.mark.parametrize(("chunks", "tp", "dp"), [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_a_run_whose_stages_scatter_is_idle_for_longer_than_in_theory(chunks: int, tp: int, dp: int) -> None:
    """Of the step, which also holds the reduction of gradients and the optimizer, the bubble is a smaller share."""
    pipeline = pipeline_of(synthesize(Job(pp=4, dp=dp, tp=tp, chunks=chunks, steps=6, jitter=0.05)).run)

    theoretical = 3 / (8 * chunks + 3)
    assert pipeline.theoretical_fraction_of_phase == pytest.approx(theoretical)
    assert theoretical < pipeline.idle_fraction_of_phase < theoretical + 0.06
    assert pipeline.bubble_fraction_of_step < theoretical


def test_gpipe() -> None:
    pipeline = pipeline_of(simulate(gpipe(4, 8), steps=2))

    assert (pipeline.schedule, pipeline.microbatches) == ("gpipe", 8)
    assert pipeline.theoretical_fraction_of_phase == 3 / 11
    assert {stage.wall_ns for stage in pipeline.per_stage} == {33}
    # Stage 0 waits for 3 F and 3 B of the others between its forwards and its backwards.
    assert (pipeline.per_stage[0].bubble_ns, pipeline.per_stage[0].warm_up_ns) == (9, 9)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (2, 4, 2), (4, 8, 3), (3, 6, 4)])
def test_interleaved(stages: int, microbatches: int, chunks: int) -> None:
    run = simulate(interleaved(stages, microbatches, chunks), steps=2)

    pipeline = pipeline_of(run)

    assert (pipeline.schedule, pipeline.chunks, pipeline.microbatches) == ("interleaved_1f1b", chunks, microbatches)
    # v·m·(F + B) of work and a bubble of (p − 1)(F + B): a chunk is 1/v of a stage.
    assert pipeline.per_stage[0].wall_ns == (chunks * microbatches + stages - 1) * 3
    assert pipeline.per_stage[0].bubble_ns == (stages - 1) * 3
    assert pipeline.theoretical_fraction_of_phase == (stages - 1) / (chunks * microbatches + stages - 1)


def test_uneven_stages() -> None:
    # p = 2, m = 4; F = 1, B = 2 on stage 0 and twice that on stage 1, which works without a pause once it has begun.
    run = simulate(
        gpipe(2, 4), lambda stage, action: MS * (1 if action.kind == "forward" else 2) * (stage + 1), steps=2
    )

    first, second = pipeline_of(run).per_stage

    assert first.wall_ns == (1 + 4 * 2 + 4 * 4 + 2) * MS
    # Stage 0 works for 12; with 1.5 and 3 everywhere it would wait for one F and one B.
    assert (first.bubble_ns, first.schedule_ns, first.imbalance_ns) == (15 * MS, round(4.5 * MS), round(10.5 * MS))
    assert (second.bubble_ns, second.drain_ns) == (MS, 0)
    assert first.variation_ns == second.variation_ns == 0


def test_imbalance_of_the_stages() -> None:
    # Every forward of stage 1 takes 1 ms more: nothing varies within a stage. In the mean F is 1.5.
    first, _ = pipeline_of(PipelineJob(2, 8, extra_forward_ns={1: MS}).run()).per_stage

    assert first.schedule_ns == round(1.5 * MS) + 2 * MS
    assert first.variation_ns == 0
    assert first.imbalance_ns == first.bubble_ns - first.schedule_ns > 0


def test_variation_of_the_microbatches() -> None:
    # F = 4, 1, 1, 2 on stage 0: 2 in the mean, as always on stage 1. That one waits for 4 instead of 2.
    forward = {0: 4, 1: 1, 2: 1, 3: 2}
    run = simulate(
        gpipe(2, 4),
        lambda stage, action: MS * (forward[action.microbatch] if (stage, action.kind) == (0, "forward") else 2),
    )

    _, second = pipeline_of(run).per_stage

    assert (second.bubble_ns, second.schedule_ns) == (4 * MS, 2 * MS)
    assert (second.variation_ns, second.imbalance_ns, second.p2p_ns) == (2 * MS, 0, 0)


def test_transfers_between_stages_have_their_own_part() -> None:
    pipeline = pipeline_of(PipelineJob(2, 4, transfer_ns=100_000).run())
    first = pipeline.per_stage[0]

    assert first.transfer_ns == 4 * 100_000
    assert first.bubble_ns is not None
    assert first.schedule_ns is not None
    # Each round trip through stage 1 has one more transfer, which stage 0 waits for.
    assert first.p2p_ns == first.bubble_ns - first.schedule_ns > 0
    assert first.variation_ns == first.imbalance_ns == 0


def test_overlapping_forwards_count_as_work_once() -> None:
    """Each forward is seen to end half a millisecond late: in the next one, in a stall, in a backward."""
    job = PipelineJob(2, 4)
    run = job.run()
    late = {}
    for rank, trace in run.ranks.items():
        spans = trace.spans
        end = np.where(spans.kind == schema.FORWARD, spans.end + MS // 2, spans.end)
        late[rank] = replace(trace, spans=spans.replace(end=end))

    stages = pipeline_of(replace(run, ranks=late)).per_stage

    assert [stage.work_ns for stage in stages] == [12 * MS, 12 * MS]
    assert all(stage.work_ns + stage.bubble_ns + stage.drain_ns == stage.wall_ns for stage in stages)


def test_two_pipelines_of_which_one_runs_fewer_microbatches_have_no_schedule_in_common() -> None:
    run = PipelineJob(2, 4, data_parallel=2).run()
    fewer = {
        rank: replace(trace, spans=trace.spans.take(~((trace.spans.microbatch == 3) & (rank % 2 == 1))))
        for rank, trace in run.ranks.items()
    }

    pipeline = pipeline_of(replace(run, ranks=fewer))

    assert (pipeline.schedule, pipeline.theoretical_fraction_of_phase) == ("unknown", None)
    assert pipeline.reason.startswith("Ranks 0 and 1, both of stage 0, run different forwards and backwards in a step")


@pytest.mark.parametrize("fails_in", ["chain.build_program", "replay.observed_steps.ReplayGraph.from_edges"])
def test_a_bubble_is_measured_although_the_run_cannot_be_replayed(
    monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    def fails(*_: object) -> None:
        raise ReplayError("a circle")

    monkeypatch.setattr(f"commtrace.analysis.{fails_in}", fails)

    pipeline = pipeline_of(PipelineJob(2, 4).run())

    assert [stage.bubble_ns for stage in pipeline.per_stage] == [3 * MS, MS]
    assert "schedule_ns" not in read_back(pipeline.to_json())["per_stage"][0]


def test_without_stages_there_is_no_pipeline() -> None:
    run = make_run({rank: [span("step", 0, 10, step=0), span("forward", 0, 5, step=0)] for rank in (0, 1)})

    assert find_pipeline(OpenedRun.of(analyse(run, "0:"))) is None


def test_without_steps_there_is_no_pipeline() -> None:
    run = PipelineJob(2, 2).run()
    rows = {rank: replace(trace, spans=trace.spans.take(trace.spans.kind != 0)) for rank, trace in run.ranks.items()}

    assert find_pipeline(OpenedRun.of(analyse(replace(run, ranks=rows)))) is None


@pytest.mark.parametrize(
    ("orders", "chunks", "name"),
    [
        (["F0 F1 I0 W0 I1 W1", "F0 I0 F1 W0 I1 W1"], 1, "zb1p"),
        (["F0 F1 B0 W0 B1 W1"] * 2, 1, "zero_bubble"),
        # The first two microbatches of torch's own plans for two ranks.
        (
            ["F0.0 F1.0 F0.1 F1.1 I0.1 W0.1 I1.1 W1.1", "F0.0 F1.0 F0.1 I0.1 F1.1 I1.1 W0.1 I0.0"],
            2,
            "interleaved_zero_bubble",
        ),
        (["F0.0 F1.0 F2.0 F0.1 I0.1 W0.1", "F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0"], 2, "zbv"),
        (["F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 B1.1", "F0.0 F0.1 F1.0 F1.1 F2.0 B0.1 F2.1 B0.0 W2.1"], 2, "dualpipev"),
    ],
)
def test_schedules_that_run_the_backward_of_weights_apart(orders: list[str], chunks: int, name: str) -> None:
    assert recognise([order.split() for order in orders], chunks).name == name


def test_looped_breadth_first_runs_all_forwards_of_all_chunks_first() -> None:
    forwards = [f"F{microbatch}.{chunk}" for chunk in (0, 1) for microbatch in range(4)]
    order = forwards + [f"B{forward[1:]}" for forward in reversed(forwards)]

    assert recognise([order, order], chunks=2).name == "looped_bfs"


def test_both_parts_of_a_backward_are_one() -> None:
    def stage(number: int) -> list[Row]:
        where = {"step": 0, "microbatch": 0, "stage": number}
        return [
            span("step", 0, 60, step=0),
            span("forward", 0, 10, **where),
            span("backward", 10, 30, **where) | {"name": "backward_input"},
            span("backward", 30, 60, **where) | {"name": "backward_weight"},
        ]

    pipeline = pipeline_of(make_run({rank: stage(rank) for rank in (0, 1)}))

    assert [(stage.forward_ns, stage.backward_ns, stage.work_ns) for stage in pipeline.per_stage] == [(10, 50, 60)] * 2
    assert pipeline.schedule == "zb1p"


@pytest.mark.parametrize(
    ("orders", "chunks", "reason"),
    [
        (["FB", "FB"], 1, "single microbatch"),
        (["FFFBFBBFBB", "FBFBFBFBFB"], 1, "Stage 0 runs FFFBFBBFBB, which no known schedule does."),
        (["FFFBFBBB", "FFFBFBBB"], 1, "The stages run 2, 2 forwards ahead of their first backward"),
        (["FFB", "FFB"], 1, "A step has 2 forwards and 1 backwards."),
        (["FFBB", "FB"], 1, "different numbers"),
        (["FF", "FF"], 1, "without a backward"),
    ],
)
def test_an_unknown_schedule_says_why(orders: list[str], chunks: int, reason: str) -> None:
    schedule = recognise([[f"{letter}0" for letter in order] for order in orders], chunks)

    assert schedule.name == "unknown"
    assert reason in schedule.reason


def test_interleaved_with_as_many_microbatches_as_stages_runs_all_forwards_first() -> None:
    orders = [[f"{action.kind[0].upper()}{action.microbatch}" for action in order] for order in interleaved(4, 4, 2)]

    assert recognise(orders, chunks=2).name == "interleaved_1f1b"


def test_a_pipeline_as_json() -> None:
    pipeline = read_back(pipeline_of(simulate([[Action("forward", 0), Action("backward", 0)]] * 2)).to_json())

    assert (pipeline["schedule"], pipeline["stages"], pipeline["chunks"], pipeline["microbatches"]) == (
        "unknown",
        2,
        1,
        1,
    )
    assert pipeline["fraction_of_phase"].keys() == {"idle", "theoretical_bubble"}
    assert pipeline["fraction_of_phase"]["theoretical_bubble"] is None
    assert [stage["bubble_ns"] for stage in pipeline["per_stage"]] == [3, 1]


@pytest.mark.parametrize(("without_transfers", "p2p"), [(4 * MS, MS), (9 * MS, 0)])
def test_transfers_have_no_negative_share_and_the_causes_still_add_up(without_transfers: int, p2p: int) -> None:
    measured = RankWaits(
        stage=0, num_steps=1, chunks=1, forwards=1, backwards=1, forward_ns=MS, backward_ns=MS, work_ns=2 * MS,
        wall_ns=10 * MS, phase_ns=10 * MS, warm_up_ns=5 * MS, steady_ns=0, cool_down_ns=0, transfer_ns=0, drain_ns=0,
        unmatched_ns=0,
    )  # fmt: skip
    cause = BubbleCause(
        steps=1, as_replayed=5 * MS, without_transfers=without_transfers, with_means=3 * MS, with_equal_stages=MS
    )

    (stage,) = bubbles_of_stages({0: measured}, {0: cause})

    assert stage.p2p_ns == p2p
    causes = (stage.schedule_ns, stage.imbalance_ns, stage.variation_ns, stage.p2p_ns)
    assert sum(cause or 0 for cause in causes) == stage.bubble_ns == 5 * MS
