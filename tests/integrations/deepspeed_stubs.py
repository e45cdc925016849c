"""DeepSpeed's engines without their insides, and a tracer that only takes notes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from commtrace.capture.model.step_finder import StepFinder
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates

pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'commtrace[deepspeed]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

GATHER = "_PartitionedParameterCoordinator__all_gather_params"
ZERO_METHODS = (
    (PartitionedParameterCoordinator, GATHER),
    (DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"),
    (DeepSpeedZeroOptimizer, "reduce_ipg_grads"),
)


class NotingTracer:
    """Notes its calls: ``"+forward m0 s2"`` when a phase begins, ``"-forward"`` when it ends."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.coordinates = Coordinates()
        tracer: Any = self  # it has what the finder of steps calls
        self.steps = StepFinder(tracer)
        self.open_optimizers = 0
        self.roles: dict[int, str] = {}
        self.topology: dict[str, Any] = {}
        self.untraced_paths: set[str] = set()
        self.failures: list[str] = []

    def begin_step(self, number: int | None = None) -> None:
        self.notes.append(f"step {number}")
        self.coordinates = Coordinates(-1 if number is None else number)

    def enter(self, kind: int, name: str, microbatch: int = -1, chunk: int = -1, stage: int = -1) -> Any:
        place = "" if microbatch < 0 else f" m{microbatch} s{stage}"
        detail = f" {name}" if kind in (schema.PHASE, schema.OPTIMIZER, schema.CHECKPOINT) else ""
        self.notes.append(f"+{schema.KINDS[kind]}{detail}{place}")
        span = (kind, self.coordinates)
        if microbatch >= 0:
            self.coordinates = self.coordinates._replace(microbatch=microbatch)
        self.open_optimizers += kind == schema.OPTIMIZER
        return span

    def end_iteration(self) -> None:
        self.notes.append("end")

    def leave(self, span: Any) -> None:
        kind, self.coordinates = span
        self.open_optimizers -= kind == schema.OPTIMIZER
        self.notes.append(f"-{schema.KINDS[kind]}")

    def set_role(self, process_group: Any, role: str) -> None:
        self.roles[id(process_group)] = role

    def set_topology(self, topology: dict[str, Any]) -> None:
        self.topology.update(topology)

    def failed(self, part: str, error: BaseException) -> None:
        self.failures.append(f"{part}: {error}")


class Originals:
    """What the engines do in these tests."""

    @staticmethod
    def forward(engine: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch * 2

    @staticmethod
    def backward(engine: Any, loss: torch.Tensor) -> torch.Tensor:
        engine._backward_prologue()
        engine._backward_epilogue()
        return loss

    @staticmethod
    def nothing(engine: Any, *args: Any, **kwargs: Any) -> None:
        return None

    @staticmethod
    def step(engine: Any) -> None:
        engine.global_steps += engine.is_gradient_accumulation_boundary()
        engine.micro_steps += 1

    @staticmethod
    def is_boundary(engine: Any) -> bool:
        return bool((engine.micro_steps + 1) % engine.accumulation == 0)

    @staticmethod
    def train_batch(engine: Any) -> None:
        """1F1B of the first of two stages."""
        for name in engine.instructions:
            instruction = getattr(schedule, name)
            PipelineEngine._INSTRUCTION_MAP[instruction](engine)
        engine.global_steps += 1

    @staticmethod
    def eval_batch(engine: Any) -> None:
        with torch.no_grad():
            for name in ("LoadMicroBatch", "ForwardPass"):
                PipelineEngine._INSTRUCTION_MAP[getattr(schedule, name)](engine)

    @staticmethod
    def forward_pass(engine: Any) -> None:
        DeepSpeedEngine.forward(engine, torch.ones(1))

    @staticmethod
    def backward_pass(engine: Any) -> None:
        DeepSpeedEngine.backward(engine, torch.ones(1))


def empty_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out the insides of DeepSpeed's engines, until the end of the test."""
    engine_methods = {
        "__init__": Originals.nothing,
        "__getattr__": torch.nn.Module.__getattr__,
        "forward": Originals.forward,
        "backward": Originals.backward,
        "_backward_prologue": Originals.nothing,
        "_backward_epilogue": Originals.nothing,
        "step": Originals.step,
        "is_gradient_accumulation_boundary": Originals.is_boundary,
        "managed_gradient_accumulation": lambda engine: engine.managed,
        "gradient_accumulation_steps": lambda engine: engine.accumulation,
        "zero_optimization_stage": lambda engine: 3,
        "is_deepcompile_enabled": lambda engine: engine.deep_compile,
        "save_checkpoint": Originals.nothing,
    }
    for name, method in engine_methods.items():
        monkeypatch.setattr(DeepSpeedEngine, name, method)
    for owner, name in ZERO_METHODS:
        monkeypatch.setattr(owner, name, Originals.nothing)
    for name, method in {"train_batch": Originals.train_batch, "eval_batch": Originals.eval_batch}.items():
        monkeypatch.setattr(PipelineEngine, name, method)
    for instruction, function in {
        schedule.ForwardPass: Originals.forward_pass,
        schedule.BackwardPass: Originals.backward_pass,
        schedule.LoadMicroBatch: Originals.nothing,
        schedule.OptimizerStep: Originals.nothing,
        schedule.ReduceTiedGrads: Originals.nothing,
    }.items():
        monkeypatch.setitem(PipelineEngine._INSTRUCTION_MAP, instruction, function)


def noting() -> Any:
    """A tracer as far as the integration calls one."""
    return NotingTracer()


def engine_of(kind: Any = DeepSpeedEngine, **attributes: Any) -> Any:
    engine = kind.__new__(kind)
    torch.nn.Module.__init__(engine)
    defaults = {
        "global_steps": 0, "micro_steps": 0, "accumulation": 2, "managed": True, "deep_compile": False, "mpu": None,
        "optimizer": None,
    }  # fmt: skip
    for name, value in {**defaults, **attributes}.items():
        setattr(engine, name, value)
    return engine
