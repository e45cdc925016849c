"""Hooks that come and go while torch calls hooks: no optimizer notices, and no table of torch's changes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from commtrace.capture.model import compiler, optimizers
from commtrace.capture.model.optimizer_hooks import AFTER_STEP, BEFORE_STEP, HookTable, OptimizerHook
from commtrace.capture.model.optimizers import OptimizerPhase
from tests.capture.recording import Recording

REGISTER: dict[str, Callable[..., Any]] = {
    BEFORE_STEP: torch_optimizer.register_optimizer_step_pre_hook,
    AFTER_STEP: torch_optimizer.register_optimizer_step_post_hook,
}
tables = pytest.mark.parametrize("table", REGISTER)


@pytest.fixture(autouse=True)
def torch_is_as_before() -> Iterator[None]:
    before = {name: getattr(torch_optimizer, name) for name in REGISTER}
    contents = {name: dict(table) for name, table in before.items()}
    yield
    assert {name: getattr(torch_optimizer, name) for name in REGISTER} == before
    assert all(getattr(torch_optimizer, name) is table for name, table in before.items())
    assert {name: dict(table) for name, table in before.items()} == contents


def stepped() -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=1.0).step()
    return weight.detach()


@tables
def test_a_hook_that_takes_itself_out_leaves_the_hooks_behind_it_alone(table: str) -> None:
    calls: list[str] = []

    def once(*_arguments: object) -> None:
        calls.append("ours")
        hook.remove()

    hook = OptimizerHook(table, once, pytest.fail)
    with REGISTER[table](lambda *_arguments: calls.append("theirs")):
        results = [stepped(), stepped()]

    assert [result.tolist() for result in results] == [[0.0, 0.0]] * 2
    assert calls == ["ours", "theirs", "theirs"]


@tables
def test_a_hook_of_somebody_else_puts_ours_in_and_takes_it_out_again(table: str) -> None:
    calls: list[str] = []
    hooks: list[OptimizerHook] = []

    def switches(*_arguments: object) -> None:
        if hooks:
            hooks.pop().remove()
        else:
            hooks.append(OptimizerHook(table, lambda *_: calls.append("ours"), pytest.fail))

    with REGISTER[table](switches), REGISTER[table](lambda *_arguments: calls.append("theirs")):
        for _ in range(4):
            stepped()

    assert calls == ["theirs", "ours", "theirs", "theirs", "ours", "theirs"]


@tables
def test_one_of_ours_takes_another_one_out_that_would_be_next(table: str) -> None:
    calls: list[str] = []
    first = OptimizerHook(table, lambda *_: second.remove(), pytest.fail)
    second = OptimizerHook(table, lambda *_: calls.append("second"), pytest.fail)
    third = OptimizerHook(table, lambda *_: calls.append("third"), pytest.fail)

    stepped()
    first.remove()
    third.remove()

    assert calls == ["third"]


@tables
def test_handles_of_others_work_whether_ours_are_there_or_not(table: str) -> None:
    calls: list[str] = []
    earlier = REGISTER[table](lambda *_: calls.append("earlier"))
    hook = OptimizerHook(table, lambda *_: None, pytest.fail)
    meanwhile = REGISTER[table](lambda *_: calls.append("meanwhile"))
    earlier.remove()
    stepped()
    hook.remove()
    stepped()
    meanwhile.remove()
    stepped()

    assert calls == ["meanwhile", "meanwhile"]


@tables
def test_for_others_the_table_is_what_it_is(table: str) -> None:
    torchs = getattr(torch_optimizer, table)
    hook = OptimizerHook(table, lambda *_: None, pytest.fail)
    with REGISTER[table](len) as handle:
        stand_in = getattr(torch_optimizer, table)
        assert isinstance(stand_in, HookTable)
        assert dict(stand_in.items()) == dict(torchs)
        assert (handle.id in stand_in, stand_in[handle.id], len(stand_in)) == (True, len, len(torchs))
    copy = pickle.loads(pickle.dumps(HookTable(OrderedDict({7: len}), torch.compiler.is_dynamo_compiling)))
    hook.remove()

    assert copy == OrderedDict({7: len})
    assert type(copy) is OrderedDict


@tables
def test_somebody_who_replaces_the_table_too_is_left_in_place(table: str) -> None:
    torchs = getattr(torch_optimizer, table)
    hook = OptimizerHook(table, pytest.fail, pytest.fail)
    theirs = HookTable(getattr(torch_optimizer, table), torch.compiler.is_dynamo_compiling)
    setattr(torch_optimizer, table, theirs)
    try:
        hook.remove()
        assert getattr(torch_optimizer, table) is theirs
        stepped()
    finally:
        setattr(torch_optimizer, table, torchs)


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
    def step(self, closure: Any = None) -> None:
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
    uninstall = compiler.install(recording.tracer)
    phase.install()
    with_ours = compiled(make, how, fullgraph)
    phase.uninstall()
    uninstall()

    assert with_ours == plain
    assert (plain[0] > 0) is (plain[2] == "")
    assert (plain[2] == "") or make is not Descent
    assert recording.warnings() == []
