"""The plan of simulated pipelines: exact, whatever happened to the recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.analysis.matching.match import match
from commtrace.analysis.pipeline.plan import PlannedPipeline, plan_of, plan_timeline
from commtrace.analysis.replay.program import build_program
from commtrace.trace import schema
from commtrace.trace.run import Run
from tests.analysis.simulated_schedules import Orders, gpipe, interleaved, simulate
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob

MS = 1_000_000


def plan(run: Run) -> PlannedPipeline:
    found = plan_of(run, build_program(run, match(run)))
    assert found is not None
    return found


@pytest.mark.parametrize(("stages", "microbatches", "step_ms"), [(4, 8, 33), (8, 16, 69), (2, 2, 9), (4, 4, 21)])
def test_1f1b_takes_as_long_as_the_formula_gives(stages: int, microbatches: int, step_ms: int) -> None:
    found = plan(PipelineJob(stages, microbatches).run())
    assert found.duration_ns == step_ms * MS
    assert [len(rank.start_ns) for rank in found.ranks] == [2 * microbatches] * stages
    assert found.ranks[-1].start_ns[0] == (stages - 1) * MS


def test_transfers_and_a_slow_rank_are_not_in_the_plan() -> None:
    """Half of the replicas of stage 1 take 2 ms longer: the plan has the mean, 1 ms longer, on that stage alone."""
    job = PipelineJob(2, 4, data_parallel=2, transfer_ns=MS // 2, extra_forward_ns={3: 2 * MS}, steps=3)
    clean = plan(PipelineJob(2, 4).run())
    found = plan(job.run())
    assert [rank.rank for rank in found.ranks] == [0, 2]  # one replica
    forwards = [(rank.end_ns - rank.start_ns)[rank.kind == schema.FORWARD].tolist() for rank in found.ranks]
    assert forwards == [[MS] * 4, [2 * MS] * 4]
    assert found.duration_ns > clean.duration_ns
    assert found.duration_ns < plan(replace(job, extra_forward_ns={3: 2 * MS, 2: 2 * MS}).run()).duration_ns


@pytest.mark.parametrize("schedule", [gpipe(4, 8), interleaved(4, 8, 2)])
def test_any_schedule_without_faults_is_its_own_plan(schedule: Orders) -> None:
    run = simulate(schedule, steps=2)
    found = plan(run)
    for rank in found.ranks:
        spans = run.ranks[rank.rank].spans
        rows = (spans.step == found.step) & ((spans.kind == schema.FORWARD) | (spans.kind == schema.BACKWARD))
        begin = min(int(trace.spans.start[trace.spans.kind == schema.STEP].min()) for trace in run.ranks.values())
        assert rank.microbatch.tolist() == spans.microbatch[rows].tolist()
        assert rank.chunk.tolist() == spans.chunk[rows].tolist()
        # A span may hold the wait for its input at its front; where it ends is exact.
        assert rank.end_ns.tolist() == (spans.end[rows] - begin).tolist()


def test_a_run_without_stages_has_no_plan() -> None:
    run = make_run({rank: [span("step", 0, 10, step=0), span("forward", 0, 5, step=0)] for rank in (0, 1)})
    assert plan_of(run, build_program(run, match(run))) is None


def test_every_instant_of_the_plans_timeline_is_work_or_bubble() -> None:
    run = PipelineJob(4, 8).run()
    found = plan(run)
    timeline = plan_timeline(run, found)
    assert [rank["rank"] for rank in timeline["outline"]["ranks"]] == [0, 1, 2, 3]
    for rank in timeline["step"]["ranks"]:
        assert sum(rank["work"]["duration"]) == 24 * MS
        assert sum(rank["stalls"]["duration"]) == 9 * MS
