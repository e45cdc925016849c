"""Every step of an optimizer is a phase once, the outermost where they are nested, whenever a recording starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from commtrace.capture.hooks import keep_compiler_out
from commtrace.capture.model import optimizers
from commtrace.capture.model.optimizers import OptimizerPhase, StepHooks
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


REGISTER: dict[str, Callable[..., Any]] = {
    "before": torch_optimizer.register_optimizer_step_pre_hook,
    "after": torch_optimizer.register_optimizer_step_post_hook,
}
TABLES: tuple[dict[int, Any], ...] = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
around = pytest.mark.parametrize("place", REGISTER)


@pytest.fixture
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has started a recording before."""
    registered = [dict(table) for table in TABLES]
    hooks = StepHooks()
    monkeypatch.setattr(optimizers, "STEP_HOOKS", hooks)
    yield
    for table, before in zip(TABLES, registered, strict=True):
        for number in [number for number in table if number not in before]:
            del table[number]


def stepped() -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return weight.detach()


def recorded_steps(recording: Recording) -> int:
    return len(recording.rows(schema.OPTIMIZER))


def test_torch_gets_each_hook_once(recording: Recording, as_in_a_new_process: None) -> None:
    before = [len(table) for table in TABLES]
    for _ in range(3):
        phase = OptimizerPhase(recording.tracer)
        phase.install()
        phase.uninstall()

    assert [len(table) for table in TABLES] == [number + 1 for number in before]


@around
def test_a_hook_of_somebody_else_stops_and_starts_the_recording(recording: Recording, place: str) -> None:
    first = OptimizerPhase(recording.tracer)
    first.install()
    steps_of_first: list[int] = []
    second: list[tuple[Recording, OptimizerPhase]] = []

    def start_second() -> None:
        steps_of_first.append(recorded_steps(recording))
        later = Recording()
        second.append((later, OptimizerPhase(later.tracer)))
        second[0][1].install()

    switches = iter([lambda: None, first.uninstall, start_second, lambda: None])
    behind: list[str] = []

    with (
        REGISTER[place](lambda *_: next(switches)()),
        REGISTER[place](lambda *_: behind.append("called")),
    ):
        results = [stepped().tolist() for _ in range(4)]
    [(later, phase)] = second
    phase.uninstall()

    assert results == [[0.0, 0.0]] * 4
    assert behind == ["called"] * 4
    assert steps_of_first == [{"before": 1, "after": 2}[place]]
    assert recorded_steps(later) == 1
    assert recording.warnings() == later.warnings() == []


@around
def test_the_first_start_within_a_step_is_heard_from_the_next_zero_grad_on(
    recording: Recording, as_in_a_new_process: None, place: str
) -> None:
    phase = OptimizerPhase(recording.tracer)
    starts = iter([phase.install, lambda: None, lambda: None])
    behind: list[str] = []

    with (
        REGISTER[place](lambda *_: next(starts)()),
        REGISTER[place](lambda *_: behind.append("called")),
    ):
        results = [stepped().tolist() for _ in range(3)]
    phase.uninstall()

    assert results == [[0.0, 0.0]] * 3
    assert behind == ["called"] * 3
    assert recorded_steps(recording) == 2
    [warning] = recording.warnings()
    assert "started within an optimizer's step" in warning


def test_an_optimizer_steps_although_our_hook_fails(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    recording.tracer.guard.on_failure(optimizers.PART, phase.uninstall)
    monkeypatch.setattr(recording.tracer, "enter", None)
    with torch_optimizer.register_optimizer_step_pre_hook(lambda *_arguments: None):
        assert stepped().tolist() == [0.0, 0.0]
        assert stepped().tolist() == [0.0, 0.0]
    phase.uninstall()

    assert len(recording.warnings()) == 1


class Descent(torch.optim.Optimizer):
    """Dynamo can have all of its step in one graph, unlike those of torch's own optimizers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.5)


def compiled(make: Callable[..., torch.optim.Optimizer], how: str, fullgraph: bool) -> tuple[int, list[float], str]:
    """How many graphs, what has been trained, and what was raised."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight])
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function() -> None:
        optimizer.step()

    step = torch.compile(function if how == "function" else optimizer.step, backend=backend, fullgraph=fullgraph)
    raised = ""
    for _ in range(2):
        weight.grad = torch.ones(2)
        try:
            step()
        except torch._dynamo.exc.Unsupported as error:
            raised = str(error)
    torch._dynamo.reset()
    return len(graphs), weight.detach().tolist(), raised


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of dynamo's own
@pytest.mark.parametrize("how", ["function", "method"])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("make", [Descent, torch.optim.AdamW])
def test_a_step_is_compiled_as_ever(recording: Recording, make: Any, fullgraph: bool, how: str) -> None:
    phase = OptimizerPhase(recording.tracer)
    plain = compiled(make, how, fullgraph)
    uninstall = keep_compiler_out(recording.tracer)
    phase.install()
    with_ours = compiled(make, how, fullgraph)
    phase.uninstall()
    uninstall()

    assert with_ours == plain
    assert (plain[0] > 0) is (plain[2] == "")
    assert (plain[2] == "") or make is not Descent
    assert recording.warnings() == []
