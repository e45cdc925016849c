"""The optimizer phase: every step of an optimizer once, the outermost where they are nested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commtrace.capture.model.optimizers import OptimizerPhase
from commtrace.trace import schema
from tests.capture.recording import Recording


@pytest.fixture
def optimizing(recording: Recording) -> Iterator[Recording]:
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    yield recording
    phase.uninstall()


def parameter() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


class Wrapping(torch.optim.SGD):
    """Steps another optimizer inside its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([parameter()])
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


def names(recording: Recording) -> list[str]:
    assert {row.kind for row in recording.rows()} <= {schema.OPTIMIZER, schema.STEP}
    return [row.name for row in recording.rows(schema.OPTIMIZER)]


def test_each_step_is_a_span(optimizing: Recording) -> None:
    for optimizer in (torch.optim.SGD([parameter()]), torch.optim.Adam([parameter()])):
        optimizer.step()

    assert names(optimizing) == ["SGD", "Adam"]


def test_an_optimizer_inside_another_belongs_to_its_phase(optimizing: Recording) -> None:
    Wrapping(torch.optim.Adam([parameter()])).step()

    assert names(optimizing) == ["Wrapping"]


def test_an_optimizer_inside_a_phase_that_a_framework_opened_belongs_to_that(optimizing: Recording) -> None:
    phase = optimizing.tracer.enter(schema.OPTIMIZER, "DistributedOptimizer")
    torch.optim.Adam([parameter()]).step()
    optimizing.tracer.leave(phase)

    assert names(optimizing) == ["DistributedOptimizer"]


def test_a_step_that_raised_does_not_hide_the_following_ones(optimizing: Recording) -> None:
    failing, good = Failing([parameter()]), torch.optim.SGD([parameter()])
    for _ in range(2):
        optimizing.tracer.begin_step()
        with pytest.raises(ZeroDivisionError):
            failing.step()
        optimizing.tracer.begin_step()
        good.step()

    assert [(row.name, row.step) for row in optimizing.rows(schema.OPTIMIZER)] == [("SGD", 1), ("SGD", 3)]


def test_a_phase_that_is_installed_twice_records_once_and_then_no_more(recording: Recording) -> None:
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    phase.install()
    torch.optim.SGD([parameter()]).step()
    assert names(recording) == ["SGD"]

    phase.uninstall()
    phase.uninstall()

    torch.optim.SGD([parameter()]).step()
    assert names(recording) == ["SGD"]


def test_a_failure_of_ours_does_not_stop_the_optimizer(optimizing: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(optimizing.tracer, "enter", fail)
    weight = parameter()

    torch.optim.SGD([weight], lr=1.0).step()

    assert weight.tolist() == [0.0, 0.0]
    assert len(optimizing.warnings()) == 1
