"""What a step would take if some operations lasted as long as their peers."""

from __future__ import annotations

import math

import pytest

from commtrace.analysis.matching.match import match
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.replay.scenarios import Replay
from commtrace.analysis.replay.whatif import WhatIf, what_if
from commtrace.trace.run import Run
from tests.pipeline_factory import PipelineJob

MS = 1_000_000


def replayed(run: Run) -> WhatIf:
    _, steps, statistics = ObservedProgram.of(run, match(run))
    return what_if(run, statistics, Replay.of(steps, statistics))


def test_a_job_without_differences_has_no_slowdown() -> None:
    run = PipelineJob(4, 8, data_parallel=2).run()

    result = replayed(run)

    assert result.slowdown == 1.0
    assert set(result.by_stage.values()) == {1.0}
    assert math.isnan(result.slowest_workers_share)
    assert result.to_json()["M_W"] is None


def test_the_slowdown_of_one_slow_rank_by_hand() -> None:
    # m = 4, p = 2, F = 1, B = 2; rank 1 (stage 0 of the second replica) needs 3 per forward.
    run = PipelineJob(2, 4, data_parallel=2, extra_forward_ns={1: 2 * MS}).run()

    result = replayed(run)

    # Actual: stage 0 works 20 and waits 1 before its last backward. Ideal: F = (3 + 1 + 1 + 1)/4: 5·3.5 = 17.5.
    assert (result.actual_ns, result.ideal_ns) == (21 * MS, 17.5 * MS)
    assert result.slowdown == pytest.approx(21 / 17.5)
    assert result.by_operation["forward"] == pytest.approx(21 / 17.5)
    assert result.by_operation["backward"] == 1.0
    assert result.by_step == {0: result.slowdown, 1: result.slowdown, 2: result.slowdown}
    # Only replica 1 as measured: the whole slowdown. Only replica 0: both of its stages are quicker than the mean,
    # the other replica then sets the pace.
    assert result.by_dp_rank == {0: 1.0, 1: pytest.approx(21 / 17.5)}
    # Only stage 0 as measured, F = 1.5 on stage 1: 20 of work, and it waits 0.5 and 1.5.
    assert result.by_stage[0] == pytest.approx(22 / 17.5)
    assert result.by_worker[1] == pytest.approx(21 / 17.5)
    # The slowest worker fixed: F = 1.5 on rank 1, 1 on its next stage: 14 of work, and it waits 1.5 and 1.
    assert result.slowest_workers_share == pytest.approx((21 - 16.5) / (21 - 17.5))


def test_the_last_stage_as_the_cause() -> None:
    run = PipelineJob(2, 4, data_parallel=2, extra_forward_ns={2: 2 * MS, 3: 2 * MS}).run()

    result = replayed(run)

    # Actual: 1 + 4·(3 + 2) + 2 = 23. Ideal: F = 2: 5·4 = 20. Last stage at 2, the first one at 1: 1 + 4·4 + 2 = 19.
    assert result.slowdown == pytest.approx(23 / 20)
    assert result.last_stage_share == pytest.approx((23 - 19) / (23 - 20))
