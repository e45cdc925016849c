"""Activation checkpointing of real libraries: the repeated forward is a recompute inside its backward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import wrapt
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from commtrace.integrations import recompute
from commtrace.trace import schema
from tests.capture.recording import Recording

Checkpoint = Callable[..., Tensor]


def reentrant(function: Callable[..., Tensor], *values: Any) -> Tensor:
    return checkpoint(function, *values, use_reentrant=True)


def not_reentrant(function: Callable[..., Tensor], *values: Any) -> Tensor:
    return checkpoint(function, *values, use_reentrant=False)


def deepspeed() -> ModuleType:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'commtrace[deepspeed]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime.activation_checkpointing import checkpointing
    return checkpointing


def of_deepspeed(function: Callable[..., Tensor], *values: Any) -> Tensor:
    return deepspeed().checkpoint(function, *values)


def of_deepspeed_not_reentrant(function: Callable[..., Tensor], *values: Any) -> Tensor:
    return deepspeed().non_reentrant_checkpoint(function, *values)


EVERY_WAY = (reentrant, not_reentrant, of_deepspeed, of_deepspeed_not_reentrant)


class Layer(nn.Module):
    """Says when it runs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls: list[bool] = []
        self.recording = recording

    def forward(self, values: Tensor) -> Tensor:
        innermost = self.recording.tracer.innermost
        self.calls.append(innermost is not None and innermost.kind == schema.RECOMPUTE)
        return self.inner(values).relu()


@pytest.fixture
def recording() -> Iterator[Recording]:
    made = Recording()
    uninstall = recompute.install(made.tracer)
    made.tracer.begin_step(0)
    yield made
    uninstall()
    assert made.warnings() == []


def backward(recording: Recording, loss: Tensor) -> None:
    """As an integration sees it."""
    span = recording.tracer.enter(schema.BACKWARD, "backward", 3, 1, 2)
    loss.backward()
    recording.tracer.leave(span)


def repeats(recording: Recording) -> list[Any]:
    return recording.rows(schema.RECOMPUTE)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_each_checkpoint_is_repeated_once_inside_the_backward(recording: Recording, way: Checkpoint) -> None:
    layers = [Layer(recording), Layer(recording)]
    value = torch.ones(2, 4, requires_grad=True)
    for layer in layers:
        value = way(layer, value)
    assert repeats(recording) == []

    backward(recording, value.sum())

    (around,) = recording.rows(schema.BACKWARD)
    assert [(row.name, row.lane, row.step, row.microbatch, row.chunk, row.stage) for row in repeats(recording)] == [
        ("recompute", schema.COMPUTE, 0, 3, 1, 2)
    ] * 2
    assert all(around.start <= row.start < row.end <= around.end for row in repeats(recording))
    assert [layer.calls for layer in layers] == [[False, True]] * 2
    assert recording.tracer.innermost is None


@pytest.mark.parametrize("way", EVERY_WAY)
def test_gradients_are_the_same_bits(recording: Recording, way: Checkpoint) -> None:
    def gradients(run: Checkpoint) -> list[Tensor]:
        torch.manual_seed(3)
        layers = nn.Sequential(Layer(recording), nn.Dropout(0.5), Layer(recording))
        run(layers, torch.ones(2, 4, requires_grad=True)).sum().backward()
        return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]

    plain = gradients(lambda function, value: function(value))
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients(way), strict=True))
    assert len(repeats(recording)) == 1


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")
def test_wrappers_of_torchs_checkpoint_are_recorded(recording: Recording) -> None:
    layers = nn.Sequential(*(Layer(recording) for _ in range(4)))
    value = torch.ones(2, 4, requires_grad=True)
    checkpoint_sequential(layers, 2, value, use_reentrant=False).sum().backward()
    assert len(repeats(recording)) == 1  # the last segment is not checkpointed

    for implementation in CheckpointImpl:
        checkpoint_wrapper(layers[0], implementation)(value).sum().backward()
    assert len(repeats(recording)) == 3


def test_checkpoints_inside_checkpoints(recording: Recording) -> None:
    inner, outer = Layer(recording), Layer(recording)

    def both(values: Tensor) -> Tensor:
        return not_reentrant(inner, outer(values))

    not_reentrant(both, torch.ones(2, 4, requires_grad=True)).sum().backward()

    assert (outer.calls, inner.calls) == ([False, True], [False, True])
    assert len(repeats(recording)) == 2


def test_a_repetition_that_stops_early_or_raises_is_closed(recording: Recording) -> None:
    layer = Layer(recording)
    with set_checkpoint_early_stop(True):
        not_reentrant(layer, torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(repeats(recording)) == 1

    def raises(values: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return layer(values)

    for way in (reentrant, not_reentrant):
        with pytest.raises(ZeroDivisionError):
            way(raises, torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(repeats(recording)) == 3
    assert recording.tracer.innermost is None


def test_a_graph_that_is_kept_is_repeated_for_each_backward(recording: Recording) -> None:
    loss = reentrant(Layer(recording), torch.ones(2, 4, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()

    assert len(repeats(recording)) == 2


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_backward_after_the_end_of_the_recording(way: Checkpoint) -> None:
    made = Recording()
    uninstall = recompute.install(made.tracer)
    layer = Layer(made)
    loss = way(layer, torch.ones(2, 4, requires_grad=True)).sum()
    uninstall()
    loss.backward()

    assert layer.calls == [False, False]
    assert repeats(made) == []


def test_compiled_checkpoints_are_compiled_as_ever(recording: Recording) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounterWithBackend("aot_eager")
    layer = nn.Linear(4, 4)
    compiled = torch.compile(lambda values: not_reentrant(layer, values).sum(), backend=backend, fullgraph=True)
    compiled(torch.ones(2, 4, requires_grad=True)).backward()
    torch._dynamo.reset()

    assert backend.frame_count == 1
    assert not counters["graph_break"]
    assert layer.weight.grad is not None
    assert repeats(recording) == []  # it is part of the graph


def test_checkpoints_of_megatron(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")
    from megatron.core.tensor_parallel import random as megatron

    monkeypatch.setattr(megatron, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(megatron, "_set_all_rng_states", lambda: None)
    layer, value = Layer(recording), torch.ones(2, 4, requires_grad=True)
    megatron.checkpoint(layer, False, value).sum().backward()
    assert layer.calls == [False, True]

    activation = Layer(recording)
    kept = megatron.CheckpointWithoutOutput(fp8=None)
    hidden = kept.checkpoint(activation, value)
    loss = (hidden * hidden).sum()
    kept.discard_output_and_register_recompute(loss)
    loss.backward()
    assert activation.calls == [False, True]
    assert len(repeats(recording)) == 2


def test_checkpoints_of_transformer_engine(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a GPU. These stand in for its classes, which keep the function under the same names (distributed.py)."""

    class _CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Callable[..., Any], value: Tensor) -> Tensor:
            ctx.run_function = function
            ctx.save_for_backward(value)
            with torch.no_grad():
                return function(value)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            value = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.run_function(value)
            output.backward(gradients[0])
            return None, value.grad

    class _CheckpointFrame:
        def __init__(self, recompute_fn: Callable[..., Any], tracker: Any) -> None:
            self.recompute_fn = recompute_fn

    made = ModuleType("transformer_engine.pytorch.distributed")
    vars(made).update(_CheckpointFunction=_CheckpointFunction, _CheckpointFrame=_CheckpointFrame)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    wrapt.notify_module_loaded(made)

    layer, value = Layer(recording), torch.ones(2, 4, requires_grad=True)
    _CheckpointFunction.apply(layer, value).sum().backward()
    assert layer.calls == [False, True]
    _CheckpointFrame(layer, tracker=None).recompute_fn(value)
    assert layer.calls == [False, True, True]
    assert len(repeats(recording)) == 2


def test_every_original_is_put_back() -> None:
    owners: list[Any] = [torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._CheckpointFrame]
    owners += [deepspeed().CheckpointFunction, deepspeed()]
    before = [dict(vars(owner)) for owner in owners]
    uninstall = recompute.install(Recording().tracer)
    changed = [
        {name for name, value in vars(owner).items() if value is not then.get(name)}
        for owner, then in zip(owners, before, strict=True)
    ]
    uninstall()

    assert changed == [{"backward"}, {"__init__"}, {"backward"}, {"non_reentrant_checkpoint"}]
    assert all(
        vars(owner)[name] is value for owner, then in zip(owners, before, strict=True) for name, value in then.items()
    )
