"""Two runs beside each other: what the steps were made of, and what changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.breakdown.states import BUBBLE, COMPUTE, OTHER, TRANSFER, State
from commtrace.analysis.chain import analyse
from commtrace.analysis.comparison.compare import (
    ComparedLink,
    RunComparison,
    StepSeries,
    compare,
    compare_series,
    step_series,
)
from commtrace.analysis.windows.run import MeasuredRun
from commtrace.trace.run import Run
from tests.analysis.comparison.two_rank_jobs import job


def compared(before: Run, after: Run) -> RunComparison:
    return compare([measured(before)], [measured(after)])


def measured(run: Run) -> MeasuredRun[StepSeries]:
    analysis = analyse(run)
    return MeasuredRun(run, analysis.alignment, analysis.steps, {}, step_series(analysis))


def test_a_step_is_the_sum_of_its_states() -> None:
    series = step_series(analyse(job()))
    assert series.wall_ns.tolist() == [140.0] * 7  # the first of eight is warm-up
    assert {state: values.tolist() for state, values in series.states.items()} == {
        State(COMPUTE, "forward"): [100.0] * 7,
        State(TRANSFER, "dp"): [40.0] * 7,
    }


def test_bandwidth_of_a_step_is_bytes_on_the_bus_over_transfer() -> None:
    # 4000 bytes in 40 ns between 2 ranks: algbw 100 GB/s, factor 2·(2−1)/2 = 1.
    series = step_series(analyse(job()))
    assert series.busbw_gbps.keys() == {ComparedLink("dp", "all_reduce", 2)}
    assert series.busbw_gbps[ComparedLink("dp", "all_reduce", 2)].tolist() == pytest.approx([100.0] * 7)


def test_a_run_compared_with_itself_has_not_changed() -> None:
    comparison = compared(job(), job())
    assert (comparison.wall_ns.difference, comparison.wall_ns.is_real) == (0.0, False)
    assert not comparison.is_slower(0.0)
    assert comparison.circumstances == ()
    assert comparison.can_be_judged


def test_slower_transfers_make_the_step_slower_and_are_named_first() -> None:
    comparison = compared(job(), job(transfer=60))
    assert comparison.wall_ns.relative == pytest.approx(20 / 140)
    assert [(state, change.difference) for state, change in comparison.parts.items()] == [
        (State(TRANSFER, "dp"), 20.0),
        (State(COMPUTE, "forward"), 0.0),
    ]
    bandwidth = comparison.busbw_gbps[ComparedLink("dp", "all_reduce", 2)]
    assert (bandwidth.before, bandwidth.after) == pytest.approx((100.0, 4000 / 60))
    assert comparison.is_slower(0.05)
    assert not comparison.is_slower(0.2)


def test_a_faster_run_is_not_slower() -> None:
    comparison = compared(job(transfer=60), job())
    assert comparison.wall_ns.is_real
    assert not comparison.is_slower(0.0)


def test_a_state_that_one_run_lacks_took_no_time_in_it() -> None:
    before = after = step_series(analyse(job()))
    states = {**after.states, State(BUBBLE): np.full(7, 7.0)}
    comparison = compare_series([before], [replace(after, states=states)])
    assert comparison.parts[State(BUBBLE)].difference == 7.0
    assert State(OTHER) not in comparison.parts


def test_transfer_is_unknown_in_a_comparison_where_ranks_are_missing_on_one_side() -> None:
    whole = job()
    some = replace(whole, ranks={0: whole.ranks[0]})
    comparison = compared(whole, some)

    change = comparison.parts[State(TRANSFER, "dp")]
    assert (change.before, change.after, change.difference) == (40.0, None, None)
    assert [(one.what, one.before, one.after) for one in comparison.circumstances] == [
        ("ranks recorded", "2 of 2", "1 of 2")
    ]
    assert compared(some, some).parts[State(TRANSFER, "dp")].difference == 0.0


def test_too_few_steps_cannot_be_judged() -> None:
    comparison = compared(job(), job(steps=4, transfer=400))
    assert not comparison.can_be_judged
    assert not comparison.is_slower(0.05)


def test_versions_environment_and_layout_that_differ_are_reported() -> None:
    after = job(parallel={"dp": 2})
    ranks = {
        rank: replace(
            trace,
            metadata=replace(
                trace.metadata,
                versions={**trace.metadata.versions, "torch": "2.14.0"},
                environment={"NCCL_ALGO": "Ring"} if rank else {},
            ),
        )
        for rank, trace in after.ranks.items()
    }
    found = compared(job(), replace(after, ranks=ranks)).circumstances
    assert found == (
        ("NCCL_ALGO", "–", "Ring"),
        ("dp (parallel)", "–", "2"),
        ("torch (version)", "2.13.0", "2.14.0"),
    )
