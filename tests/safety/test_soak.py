"""The verdict of the soak test, on samples that grow by a known amount."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.e2e.launch import REPOSITORY


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    """bench/ is no package: its scripts are run by their path."""
    spec = importlib.util.spec_from_file_location("soak", REPOSITORY / "bench" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "bench")
        spec.loader.exec_module(module)
    return module


def samples(soak: ModuleType, change: Callable[[float], dict[str, float]]) -> list[object]:
    """100 seconds of a rank; ``change`` gives what is added at a second."""
    usual = {"memory_mib": 300.0, "threads": 5, "files": 20, "step_ns": 1e6}
    return [
        soak.Sample(float(second), **{name: value + change(second).get(name, 0) for name, value in usual.items()})
        for second in range(101)
    ]


def test_a_rank_that_only_grows_while_it_warms_up_is_steady(soak: ModuleType) -> None:
    verdict = soak.judge(samples(soak, lambda second: {"memory_mib": min(second, 15.0) * 10}))

    assert verdict.problems == ()
    assert verdict.growth_mib == pytest.approx(0)
    assert verdict.drift == 1


def test_growth_is_that_of_the_line_through_all_samples_after_the_warm_up(soak: ModuleType) -> None:
    verdict = soak.judge(samples(soak, lambda second: {"memory_mib": 0.2 * second + second % 2}))

    assert verdict.growth_mib == pytest.approx(0.2 * 80, abs=0.1)
    assert verdict.problems == ("memory grew by 16.0 MiB",)


def test_a_thread_a_file_a_lost_span_and_longer_steps_are_told(soak: ModuleType) -> None:
    def change(second: float) -> dict[str, float]:
        late = second > 90
        return {"threads": late, "files": 2 * late, "step_ns": 1e5 * (second > 70)}

    verdict = soak.judge(samples(soak, change), dropped=3)

    assert verdict.problems == (
        "threads grew from 5 to 6",
        "open files grew from 20 to 22",
        "3 spans were dropped",
        "steps became 10.0% longer",
    )


def test_steps_that_scatter_as_much_as_they_drift_are_no_drift(soak: ModuleType) -> None:
    verdict = soak.judge(samples(soak, lambda second: {"step_ns": 1e5 * (second // 10 % 2) + 1e3 * second}))

    assert verdict.problems == ()


def test_a_run_that_is_too_short_has_no_verdict(soak: ModuleType) -> None:
    with pytest.raises(ValueError, match="too few"):
        soak.judge(samples(soak, lambda second: {})[:10])
