"""Optimizer steps that are compiled: Dynamo leaves out the hooks on them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commtrace.capture.model.compiled_steps import CompiledSteps
from commtrace.capture.model.optimizers import OptimizerPhase
from commtrace.integrations import loop
from commtrace.trace import schema
from tests.capture.recording import Recording

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own

Step = Callable[[], Any]


@pytest.fixture
def compiling(recording: Recording) -> Iterator[Recording]:
    torch._dynamo.reset()
    phase, compiled = OptimizerPhase(recording.tracer), CompiledSteps(recording.tracer)
    phase.install()
    compiled.install()
    uninstall = loop.install(recording.tracer)
    yield recording
    uninstall()
    compiled.uninstall()
    phase.uninstall()
    torch._dynamo.reset()
    assert recording.warnings() == []


def plain(optimizer: torch.optim.Optimizer) -> Step:
    return optimizer.step


def method(optimizer: torch.optim.Optimizer) -> Step:
    compiled: Step = torch.compile(optimizer.step, backend="eager")
    return compiled


def function(optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    return step


def given(optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager")
    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    return lambda: step(optimizer)


def train(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, step: Step, iterations: int = 4) -> None:
    for _ in range(iterations):
        (weight * 2).sum().backward()
        step()
        optimizer.zero_grad()


def kinds(recording: Recording) -> list[tuple[str, int]]:
    rows = recording.rows(schema.BACKWARD, schema.OPTIMIZER)
    return [(schema.KINDS[row.kind], row.step) for row in rows]


ITERATIONS = [(kind, step) for step in range(4) for kind in ("backward", "optimizer")]


@pytest.mark.parametrize("make_step", [plain, method, function, given])
def test_a_step_ends_with_it(compiling: Recording, make_step: Callable[[torch.optim.Optimizer], Step]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    train(weight, optimizer, make_step(optimizer))

    assert kinds(compiling) == ITERATIONS
    assert {row.name for row in compiling.rows(schema.OPTIMIZER)} == {"Adam"}
    assert compiling.tracer.innermost is None


def test_a_compiled_iteration_has_its_optimizer_after_its_backward(compiling: Recording) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)

    @torch.compile(backend="eager")
    def iteration() -> None:
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        iteration()

    assert kinds(compiling) == ITERATIONS
    ends = [row.end for row in compiling.rows(schema.BACKWARD)]
    assert all(row.start >= end for row, end in zip(compiling.rows(schema.OPTIMIZER), ends, strict=True))


def test_a_compiled_function_without_an_optimizer_is_none(compiling: Recording) -> None:
    @torch.compile(backend="eager")
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    for _ in range(2):
        double(torch.ones(2))

    assert kinds(compiling) == []
    assert compiling.tracer.steps.updates == 0


def test_a_compiled_step_that_raises_ends_no_step(compiling: Recording) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    fails = False

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()
        torch._dynamo.graph_break()
        if fails:
            raise RuntimeError("the script's own")

    train(weight, optimizer, step, iterations=2)
    fails = True
    (weight * 2).sum().backward()
    with pytest.raises(RuntimeError, match="the script's own"):
        step()

    assert len(compiling.rows(schema.STEP)) == 2
    assert compiling.tracer.innermost is None


def test_a_function_of_an_earlier_recording_is_recorded_by_the_next_and_keeps_none(recording: Recording) -> None:
    torch._dynamo.reset()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    first = CompiledSteps(recording.tracer)
    first.install()
    step = function(optimizer)
    step()
    first.uninstall()
    step()
    ended = weakref.ref(first)
    del first
    gc.collect()
    assert ended() is None
    assert len(recording.rows(schema.OPTIMIZER)) == 1

    second = CompiledSteps(recording.tracer)
    second.install()
    step()
    second.uninstall()
    assert [row.name for row in recording.rows(schema.OPTIMIZER)] == ["Adam", "Adam"]


def test_all_is_as_before_once_it_is_uninstalled(recording: Recording) -> None:
    before = torch.compile
    compiled = CompiledSteps(recording.tracer)
    compiled.install()
    assert torch.compile is not before
    compiled.uninstall()

    assert torch.compile is before
