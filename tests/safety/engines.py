"""Jobs of the frameworks: the classes and functions that integrations hook, with little behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.safety.jobs import digest, seed, values


def empty_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out the insides of Megatron's combined step: a plan for streams of CUDA."""
    from megatron.core.pipeline_parallel import combined_1f1b, utils

    def step(f_model: Any, b_model: Any, post_backward: Any, f_model_chunk_id: Any = None) -> list[str]:
        node = utils.ScheduleNode(lambda: "forward", None, None)
        return [node.forward(), node.backward(None), post_backward()]

    monkeypatch.setattr(combined_1f1b, "combined_forward_backward_step", step)
    monkeypatch.setattr(utils.ScheduleNode, "_forward", lambda node, *_: node.forward_func())
    monkeypatch.setattr(utils.ScheduleNode, "_backward", lambda node, *_: "backward")


def megatron() -> str:
    """Microbatches with the real functions of the schedules, an optimizer, a recomputation, an evaluation."""
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.pipeline_parallel import combined_1f1b, schedules
    from megatron.core.tensor_parallel import random as checkpointing

    from tests.integrations import megatron_stubs as stubs

    seed()

    class Own(FP32Optimizer):
        def __init__(self) -> None:
            self.is_stub_optimizer = True

        def step(self) -> bool:
            return True

    stubs.schedule_call()
    model = stubs.tiny_model()
    outputs = [stubs.forward(model, 0, 0), stubs.forward(model, None)]
    for output in outputs:
        stubs.backward(output)
    chunks = [SimpleNamespace(vp_stage=number) for number in (0, 1)]
    both = combined_1f1b.combined_forward_backward_step(*chunks, post_backward=lambda: "message", f_model_chunk_id=1)
    assert both == ["forward", "backward", "message"]
    Own().step()
    stubs.schedule_call(forward_only=True)
    layer, value = torch.nn.Linear(8, 8), values().requires_grad_()
    checkpointing._get_all_rng_states = lambda: ()
    checkpointing._set_all_rng_states = lambda: None
    checkpointing.checkpoint(layer, False, value).sum().backward()
    assert schedules.forward_step is not None
    gradients = [parameter.grad for parameter in (*model.parameters(), *layer.parameters())]
    return digest(*(gradient for gradient in gradients if gradient is not None))


def empty_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out the insides of DeepSpeed's engines."""
    from tests.integrations import deepspeed_stubs as stubs

    stubs.empty_engines(monkeypatch)
    monkeypatch.setattr(checkpoint_function(), "backward", staticmethod(lambda node: node.run_function()))


def checkpoint_function() -> Any:
    """Of DeepSpeed's activation checkpointing."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing.CheckpointFunction


def deepspeed() -> str:
    """Micro-steps, a pipeline's batch, phases of ZeRO, a checkpoint, a recomputation."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from tests.integrations import deepspeed_stubs as stubs

    engine = stubs.engine_of(global_steps=7)
    losses: list[torch.Tensor] = []
    for _ in range(3):
        loss = engine(values())
        losses.append(loss)
        engine.backward(loss)
        engine.step()
    with torch.no_grad():
        losses.append(engine(values()))
    engine(values())
    engine._backward_prologue()
    engine._backward_epilogue()
    engine.save_checkpoint("folder")
    pipeline = stubs.engine_of(
        PipelineEngine, stage_id=1, num_stages=2,
        instructions=["LoadMicroBatch", "ForwardPass", "BackwardPass", "ReduceTiedGrads", "OptimizerStep"],
    )  # fmt: skip
    pipeline.train_batch()
    pipeline.eval_batch()
    for owner, name in stubs.ZERO_METHODS:
        getattr(owner, name)(None)
    repeated: list[Any] = []
    checkpoint_function().backward(SimpleNamespace(run_function=lambda: repeated.append(values())))
    return digest(*losses, *repeated, torch.tensor([engine.global_steps, engine.micro_steps, pipeline.global_steps]))
