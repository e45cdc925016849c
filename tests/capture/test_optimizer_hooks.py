"""Hooks that are taken out while torch calls them: no optimizer notices."""

from __future__ import annotations

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from commtrace.capture import optimizers
from commtrace.capture.optimizer_hooks import OptimizerHook
from commtrace.capture.optimizers import OptimizerPhase
from tests.capture.recording import Recording


def stepped() -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=1.0).step()
    return weight.detach()


def test_a_hook_that_takes_itself_out_leaves_the_hooks_behind_it_alone() -> None:
    table = torch_optimizer._global_optimizer_pre_hooks
    calls: list[str] = []
    before = len(table)

    def once(*_arguments: object) -> None:
        calls.append("ours")
        assert not hook.remove()

    hook = OptimizerHook(torch_optimizer.register_optimizer_step_pre_hook, once, pytest.fail)
    behind = torch_optimizer.register_optimizer_step_pre_hook(lambda *_arguments: calls.append("theirs"))
    try:
        results = [stepped(), stepped()]
    finally:
        behind.remove()

    assert [result.tolist() for result in results] == [[0.0, 0.0]] * 2
    assert calls == ["ours", "theirs", "theirs"]
    assert hook.remove()
    assert hook.remove()
    assert len(table) == before


def test_an_optimizer_steps_although_our_hook_fails(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    phase = OptimizerPhase(recording.tracer)
    before = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    phase.install()
    recording.tracer.guard.on_failure(optimizers.PART, phase.uninstall)
    behind = torch_optimizer.register_optimizer_step_pre_hook(lambda *_arguments: None)
    monkeypatch.setattr(recording.tracer, "enter", None)
    try:
        assert stepped().tolist() == [0.0, 0.0]
        assert stepped().tolist() == [0.0, 0.0]
    finally:
        behind.remove()
    phase.uninstall()

    assert len(recording.warnings()) == 1
    after = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    assert after == before
