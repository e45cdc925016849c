"""Megatron's schedules with models of a few numbers, and a tracer that only takes notes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commtrace.trace import schema
from commtrace.trace.schema import Coordinates

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron names the accelerator libraries that it does without
    from megatron.core import parallel_state
    from megatron.core.models import gpt  # noqa: F401  (the schedules import it while they run)
    from megatron.core.pipeline_parallel import schedules


def initialize(*sizes: int, **options: int) -> None:
    """Set up Megatron's groups; not those of gloo, which the fake backend cannot make."""
    parallel_state.initialize_model_parallel(*sizes, **options, create_gloo_process_groups=False)


class NotingTracer:
    """Notes its calls: ``"+forward m0 c1 s2"`` when a phase begins, ``"-forward"`` when it ends."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.roles: dict[int, str] = {}
        self.topology: dict[str, Any] = {}
        self.failures: list[str] = []
        self.coordinates = Coordinates()

    def begin_step(self, number: int | None = None) -> None:
        self.notes.append("step" if number is None else f"step {number}")
        self.coordinates = Coordinates(schema.NOT_APPLICABLE if number is None else number)

    def enter(self, kind: int, name: str, microbatch: int = -1, chunk: int = -1, stage: int = -1) -> str:
        word = schema.KINDS[kind]
        place = "" if microbatch < 0 else f" m{microbatch} c{chunk} s{stage}"
        self.notes.append(f"+{word}{place}")
        self.coordinates = Coordinates(-1, microbatch, chunk, stage)
        return word

    def be_at(self, coordinates: Coordinates) -> Coordinates:
        before, self.coordinates = self.coordinates, coordinates
        return before

    def end_iteration(self) -> None:
        self.notes.append("end")

    def leave(self, span: str) -> None:
        self.notes.append(f"-{span}")

    def set_role(self, process_group: Any, role: str) -> None:
        self.roles[id(process_group)] = role

    def set_topology(self, topology: dict[str, Any]) -> None:
        self.topology.update(topology)

    def failed(self, part: str, error: BaseException) -> None:
        self.failures.append(f"{part}: {error}")


def noting() -> Any:
    """A tracer as far as the integration calls one."""
    return NotingTracer()


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, float]:
    return output.sum(), 0.0


def forward(model: torch.nn.Module, microbatch: int | None, chunk: int | None = None) -> torch.Tensor:
    """One forward as the schedules call it."""
    output, _ = forward_results(model, microbatch, chunk)
    return output


def forward_results(
    model: torch.nn.Module, microbatch: int | None, chunk: int | None = None, is_last_stage: bool = True
) -> Any:
    config = SimpleNamespace(
        timers=None, enable_autocast=False, calculate_per_token_loss=False, num_moe_experts=None, mtp_num_layers=None
    )
    return schedules.forward_step(
        lambda data, model: (model(torch.ones(1, 2)), loss_of),
        None,
        model,
        1,
        None,
        [],
        config,
        1,
        current_microbatch=microbatch,
        vp_stage=chunk,
        is_last_stage=is_last_stage,
    )


def backward(output: torch.Tensor, backward_step: Callable[..., Any] | None = None) -> None:
    """One backward as the schedules call it; versions before 0.17 also hand on the type of the model."""
    config = SimpleNamespace(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=False)
    function = backward_step or schedules.backward_step
    model_type = [None] if "model_type" in inspect.signature(function).parameters else []
    function(None, output, None, *model_type, config)


def tiny_model() -> Any:
    model: Any = torch.nn.Linear(2, 1)
    model.set_input_tensor = lambda tensor: None
    return model


def schedule_call(**options: Any) -> None:
    """A call of the real schedule that stops at its first assertion: what surrounds it is what is tested."""
    with pytest.raises(AssertionError):
        schedules.forward_backward_no_pipelining(
            forward_step_func=None, data_iterator=None, model=[None, None], num_microbatches=4,
            micro_batch_size=1, **{"seq_length": 8, **options},
        )  # fmt: skip
