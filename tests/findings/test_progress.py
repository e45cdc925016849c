"""A job that makes no progress: after when, and in which words."""

from __future__ import annotations

import pytest

from commtrace.findings.progress import no_progress, stalled_after_ns

SECOND = 1_000_000_000


@pytest.mark.parametrize(("step", "after"), [(0.0, 15), (0.08, 15), (1.5, 15), (2.0, 20), (60.0, 600)])
def test_it_takes_ten_usual_steps_and_15_seconds(step: float, after: int) -> None:
    assert stalled_after_ns(step * SECOND) == after * SECOND


def test_ranks_that_are_behind_are_named() -> None:
    finding = no_progress(7 * SECOND, 16 * SECOND, 2 * SECOND, {0: 9, 1: 8, 2: 9, 3: 7}, "runs/a")

    assert (finding.id, finding.kind, finding.place, finding.who) == ("hang", "hang", "ranks", "ranks 1, 3")
    assert (finding.ranks, finding.since_step, finding.since_ns) == ((1, 3), 9, 7 * SECOND)
    assert finding.line() == (
        "No step has ended for 16 s (a step takes 2.0 s). The last one is 9; ranks 1, 3 ended none after 7."
    )
    assert finding.advice == "See where each rank is: commtrace doctor runs/a"


def test_where_all_are_alike_it_is_the_job() -> None:
    finding = no_progress(None, 16 * SECOND, None, {0: 9, 1: 9})

    assert (finding.place, finding.who, finding.ranks) == ("job", "the job", ())
    assert finding.line() == "No step has ended for 16 s."
    assert no_progress(None, 16 * SECOND, None, {}).who == "the job"
