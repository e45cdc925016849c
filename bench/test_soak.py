"""The verdict of the soak test, on samples that grow by a known amount."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import soak


def samples(change: Callable[[float], dict[str, float]]) -> list[soak.Sample]:
    """100 seconds of a rank; ``change`` gives what is added at a second."""
    made = []
    for second in range(101):
        added = {"memory_mib": 0.0, "threads": 0.0, "files": 0.0, "step_ns": 0.0, **change(second)}
        threads, files = 5 + int(added["threads"]), 20 + int(added["files"])
        made.append(soak.Sample(second, 300 + added["memory_mib"], threads, files, 1e6 + added["step_ns"]))
    return made


def test_a_rank_that_only_grows_while_it_warms_up_is_steady() -> None:
    verdict = soak.judge(samples(lambda second: {"memory_mib": min(second, 15.0) * 10}))

    assert verdict.problems == ()
    assert verdict.growth_mib == pytest.approx(0)
    assert verdict.drift == 1


def test_growth_is_that_of_the_line_through_all_samples_after_the_warm_up() -> None:
    verdict = soak.judge(samples(lambda second: {"memory_mib": 0.2 * second + second % 2}))

    assert verdict.growth_mib == pytest.approx(0.2 * 80, abs=0.1)
    assert verdict.problems == ("memory grew by 16.0 MiB",)


def test_a_thread_a_file_a_lost_span_and_longer_steps_are_reported() -> None:
    def change(second: float) -> dict[str, float]:
        late = second > 90
        return {"threads": late, "files": 2 * late, "step_ns": 1e5 * (second > 70)}

    verdict = soak.judge(samples(change), dropped=3)

    assert verdict.problems == (
        "threads grew from 5 to 6",
        "open files grew from 20 to 22",
        "3 spans were dropped",
        "steps became 10.0% longer",
    )


def test_steps_that_scatter_as_much_as_they_drift_are_no_drift() -> None:
    verdict = soak.judge(samples(lambda second: {"step_ns": 1e5 * (second // 10 % 2) + 1e3 * second}))

    assert verdict.problems == ()


def test_a_run_that_is_too_short_has_no_verdict() -> None:
    with pytest.raises(ValueError, match="too few"):
        soak.judge(samples(lambda second: {})[:10])
