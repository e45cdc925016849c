"""Integrate DeepSpeed: a step per gradient accumulation, a forward and a backward per micro-step, roles of groups.

Steps have the numbers of DeepSpeed's log. Of several engines, the first to train begins them. Of a ``PipelineModule``,
the schedule's instructions are spans. Inside another framework's microbatch (Megatron-DeepSpeed) there are none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch

from commtrace.capture.hooks import RAISED, Arguments, Hooks, Keywords, Wrap, installed
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.integrations.deepspeed_sizes import deepspeed_sizes
from commtrace.integrations.topology import DeepSpeedEngine, deepspeed_roles, deepspeed_topology
from commtrace.recording.installation import warn_if_untried
from commtrace.trace import schema

if TYPE_CHECKING:
    from commtrace.trace.topology import Topology

PART: Final = "deepspeed"

DEEPCOMPILE: Final = "graphs compiled by DeepCompile"
"""Their communication is issued in C++."""


def install(tracer: Tracer) -> Callable[[], None]:
    """Instrument DeepSpeed as soon as it is imported, or now; return the function that undoes it."""
    return installed(DeepSpeedIntegration(tracer))


class Accumulation:
    """The progress of one engine between two boundaries of its gradient accumulation."""

    __slots__ = ("announced", "backwards", "begun", "direct_backward", "finished", "forwards", "microbatch")

    def __init__(self) -> None:
        # There was a forward since the last boundary; the current micro-step has had its backward.
        self.begun = self.finished = False
        # The micro-step; those of the pipeline's batch; micro-steps of the accumulation when it was announced.
        self.microbatch = self.forwards = self.backwards = self.announced = 0
        self.direct_backward: Span | None = None  # of a ``loss.backward()``, which DeepSpeed only notices


class DeepSpeedIntegration:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._engines: weakref.WeakKeyDictionary[DeepSpeedEngine, Accumulation] = weakref.WeakKeyDictionary()
        self._leader: Callable[[], DeepSpeedEngine | None] = lambda: None
        self._latest_step = -1
        self._evaluations = 0

    def install(self) -> None:
        when_imported = self._hooks.when_imported
        when_imported("deepspeed.runtime.engine", self._hook_engine)
        when_imported("deepspeed.runtime.pipe.engine", self._hook_pipeline)
        # Not of the module: recording may begin in the middle of its import, when torch is imported by it.
        when_imported("deepspeed", lambda _: warn_if_untried("deepspeed", version("deepspeed")))
        ZeroPhases(self._tracer, self._hooks).install()

    def uninstall(self) -> None:
        self._hooks.restore()
        self._engines.clear()

    def _hook_methods(self, owner: str, methods: Mapping[str, Wrap], module: ModuleType) -> None:
        for name, wrap in methods.items():
            self._hooks.replace_method(module, owner, name, wrap)

    # The engine

    def _hook_engine(self, module: ModuleType) -> None:
        timed = self._hooks.timed
        self._hook_methods(
            "DeepSpeedEngine",
            {
                "__init__": self._then_read_groups,
                "_backward_prologue": self._wrap_backward_prologue,
                "_backward_epilogue": self._wrap_backward_epilogue,
                "buffered_allreduce_fallback": timed(schema.PHASE, "reduce"),
                "save_checkpoint": timed(schema.CHECKPOINT, "save"),
                "load_checkpoint": timed(schema.CHECKPOINT, "load"),
            },
            module,
        )
        for name, wrap in (
            ("forward", self._wrap_forward),
            ("backward", self._wrap_backward),
            ("step", self._wrap_step),
        ):
            self._hooks.replace_required(module.DeepSpeedEngine, name, wrap)

    def _then_read_groups(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> DeepSpeedEngine:
            # While it initialises, DeepSpeed makes its optimizer step once: that is the end of no step.
            self._tracer.steps.give_way(is_users=False)
            engine: DeepSpeedEngine = args[0]
            return engine

        def end(engine: DeepSpeedEngine, result: object) -> None:
            if result is not RAISED and self._hooks.active:
                self._read_groups(engine)

        return self._hooks.around(begin, end)(original)

    def _read_groups(self, engine: DeepSpeedEngine) -> None:
        self._accumulation(engine).announced = engine.gradient_accumulation_steps()
        roles = deepspeed_roles(engine)
        for group, role in roles:
            self._tracer.set_role(group, role)
        if self._leader() in (None, engine):
            self._tracer.set_topology({**deepspeed_topology(engine, roles), **self._sizes(engine)})
        is_compiled = getattr(engine, "is_deepcompile_enabled", None)
        if is_compiled is not None and is_compiled():
            self._tracer.untraced_paths.add(DEEPCOMPILE)

    def _sizes(self, engine: DeepSpeedEngine) -> Topology:
        try:
            return deepspeed_sizes(engine)
        except Exception as error:  # only a plan needs them: everything else is recorded all the same
            self._tracer.failed(f"{PART} sizes", error)
            return {}

    def _wrap_forward(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> tuple[Span, bool] | None:
            engine = args[0]
            self._close_direct_backward(engine)
            if self._is_inside_a_microbatch() or self._evaluations:
                return None
            if not torch.is_grad_enabled():
                return self._begin_evaluation(), True
            return self._enter(schema.FORWARD, "forward", self._microbatch_of_forward(engine), 0), False

        def end(begun: tuple[Span, bool], result: object) -> None:
            span, is_evaluation = begun
            (self._end_evaluation if is_evaluation else self._hooks.end)(span, result)

        return self._hooks.around(begin, end)(original)

    def _wrap_backward(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> Span | None:
            if self._is_inside_a_microbatch():
                return None
            return self._enter(schema.BACKWARD, "backward", self._microbatch_of_backward(args[0]), 0)

        return self._hooks.around(begin, self._hooks.end)(original)

    def _wrap_backward_prologue(self, original: Callable[..., object]) -> Callable[..., object]:
        # Called when gradients reach the model's output: in any backward, also in a direct one.
        def begin(args: Arguments, _kwargs: Keywords) -> None:
            if not self._is_inside_a_microbatch():
                self._open_direct_backward(args[0])

        return self._hooks.around(begin, self._hooks.end)(original)

    def _wrap_backward_epilogue(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> DeepSpeedEngine:
            engine: DeepSpeedEngine = args[0]
            return engine

        def end(engine: DeepSpeedEngine, _result: object) -> None:
            if self._hooks.active:
                self._close_direct_backward(engine)

        return self._hooks.around(begin, end)(original)

    def _wrap_step(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> tuple[DeepSpeedEngine, bool, Span | None]:
            engine = args[0]
            self._close_direct_backward(engine)
            is_boundary = _is_boundary(engine)
            if not is_boundary or self._tracer.open_optimizers:
                return engine, is_boundary, None
            return engine, is_boundary, self._tracer.enter(schema.OPTIMIZER, _name_of_optimizer(engine))

        def end(begun: tuple[DeepSpeedEngine, bool, Span | None], result: object) -> None:
            engine, is_boundary, span = begun
            if span is not None:
                self._tracer.leave(span)
            if result is not RAISED:
                self._end_micro_step(engine, is_boundary)

        return self._hooks.around(begin, end)(original)

    def _is_inside_a_microbatch(self) -> bool:  # of the schedule's instruction, or of another framework
        return self._tracer.coordinates.microbatch >= 0

    def _accumulation(self, engine: DeepSpeedEngine) -> Accumulation:
        accumulation = self._engines.get(engine)
        if accumulation is None:
            accumulation = self._engines[engine] = Accumulation()
        return accumulation

    def _microbatch_of_forward(self, engine: DeepSpeedEngine) -> int:
        accumulation = self._accumulation(engine)
        if not accumulation.begun:
            self._begin_step(engine)
            accumulation.begun, accumulation.microbatch = True, 0
        elif accumulation.finished:
            accumulation.microbatch += 1
        accumulation.finished = False
        return accumulation.microbatch

    def _microbatch_of_backward(self, engine: DeepSpeedEngine) -> int:
        accumulation = self._accumulation(engine)
        accumulation.finished = True
        return accumulation.microbatch if accumulation.begun else schema.NOT_APPLICABLE

    def _end_micro_step(self, engine: DeepSpeedEngine, is_boundary: bool) -> None:
        accumulation = self._accumulation(engine)
        accumulation.finished = True
        if is_boundary:
            accumulation.begun = False

    def _open_direct_backward(self, engine: DeepSpeedEngine) -> None:
        microbatch = self._microbatch_of_backward(engine)
        if microbatch >= 0:
            self._accumulation(engine).direct_backward = self._enter(schema.BACKWARD, "backward", microbatch, 0)

    def _close_direct_backward(self, engine: DeepSpeedEngine) -> None:
        accumulation = self._accumulation(engine)
        span, accumulation.direct_backward = accumulation.direct_backward, None
        if span is not None:
            self._tracer.leave(span)

    def _begin_step(self, engine: DeepSpeedEngine) -> None:
        leader = self._leader()
        if leader is None:
            self._leader = weakref.ref(engine)
            self._tracer.set_topology({"step_numbers": "DeepSpeed's global_steps"})
        elif leader is not engine:
            return
        if self._accumulation(engine).announced != engine.gradient_accumulation_steps():
            self._read_groups(engine)  # It was made before we came, or its batch size has been changed.
        # An engine that went back to an earlier checkpoint, or a second one, must not number steps twice.
        # The engine counts a step at its end, and logs that number.
        self._latest_step = max(int(engine.global_steps) + 1, self._latest_step + 1)
        self._tracer.begin_step(self._latest_step)

    def _enter(self, kind: int, name: str, microbatch: int, stage: int) -> Span:
        if microbatch < 0:
            return self._tracer.enter(kind, name)
        return self._tracer.enter(kind, name, microbatch, 0, stage)

    def _begin_evaluation(self) -> Span:
        self._end_iteration()
        span = self._tracer.enter(schema.EVALUATION, "evaluation")
        self._evaluations += 1
        return span

    def _end_evaluation(self, span: Span, _result: object) -> None:
        self._evaluations -= 1
        self._tracer.leave(span)

    def _end_iteration(self) -> None:
        leader = self._leader()
        if not self._evaluations and leader is not None and not self._accumulation(leader).begun:
            self._tracer.end_iteration()

    # The pipeline

    def _hook_pipeline(self, module: ModuleType) -> None:
        self._hook_methods(
            "PipelineEngine",
            {
                "__init__": self._then_read_groups,
                "train_batch": self._wrap_train_batch,
                "eval_batch": self._wrap_eval_batch,
            },
            module,
        )
        wraps: dict[str, Wrap] = {
            "LoadMicroBatch": functools.partial(self._wrap_instruction, schema.DATA, "data", _loaded),
            "ForwardPass": functools.partial(self._wrap_instruction, schema.FORWARD, "forward", _next_forward),
            "BackwardPass": functools.partial(self._wrap_instruction, schema.BACKWARD, "backward", _next_backward),
            "OptimizerStep": self._wrap_optimizer_instruction,
            "ReduceTiedGrads": self._hooks.timed(schema.PHASE, "reduce tied"),
        }
        # The schedule calls what this table holds, not what the class holds by the same name.
        instructions = getattr(getattr(module, "PipelineEngine", None), "_INSTRUCTION_MAP", {})
        for instruction in list(instructions):
            wrap = wraps.get(instruction.__name__)
            if wrap is not None:
                self._hooks.replace_item(instructions, instruction, wrap)

    def _wrap_train_batch(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> None:
            self._begin_batch(args[0])

        return self._hooks.around(begin, self._hooks.end)(original)

    def _begin_batch(self, engine: DeepSpeedEngine) -> None:
        accumulation = self._accumulation(engine)
        accumulation.forwards = accumulation.backwards = 0
        self._begin_step(engine)

    def _wrap_eval_batch(self, original: Callable[..., object]) -> Callable[..., object]:
        return self._hooks.around(lambda args, kwargs: self._begin_evaluation(), self._end_evaluation)(original)

    def _wrap_instruction(
        self, kind: int, name: str, number: Callable[[Accumulation], int], original: Callable[..., object]
    ) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> Span | None:
            if self._evaluations:
                return None
            engine = args[0]
            return self._enter(kind, name, number(self._accumulation(engine)), int(getattr(engine, "stage_id", 0)))

        return self._hooks.around(begin, self._hooks.end)(original)

    def _wrap_optimizer_instruction(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> Span | None:
            if self._tracer.open_optimizers:
                return None
            return self._tracer.enter(schema.OPTIMIZER, _name_of_optimizer(args[0]))

        return self._hooks.around(begin, self._hooks.end)(original)


def _name_of_optimizer(engine: DeepSpeedEngine) -> str:
    return type(getattr(engine, "optimizer", None)).__name__


def _is_boundary(engine: DeepSpeedEngine) -> bool:
    # Where the user owns the boundary, engine.step() always updates the model.
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return bool(engine.is_gradient_accumulation_boundary()) or (managed is not None and not managed())


def _loaded(accumulation: Accumulation) -> int:
    return accumulation.forwards


def _next_forward(accumulation: Accumulation) -> int:
    accumulation.forwards += 1
    return accumulation.forwards - 1


def _next_backward(accumulation: Accumulation) -> int:
    accumulation.backwards += 1
    return accumulation.backwards - 1


_ZERO: Final = "deepspeed.runtime.zero"
_COORDINATOR: Final = (f"{_ZERO}.partitioned_param_coordinator", "PartitionedParameterCoordinator")

_REDUCE: Final = (
    (
        f"{_ZERO}.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
    ),
    (f"{_ZERO}.stage_1_and_2", "DeepSpeedZeroOptimizer", "reduce_ipg_grads"),
)
"""Module, class and method; a version without such a method has no such phase."""


class ZeroPhases:
    def __init__(self, tracer: Tracer, hooks: Hooks) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._fetched_for: torch.nn.Module | None = None

    def install(self) -> None:
        replace = self._hooks.replace_method_when_imported
        replace(*_COORDINATOR, "fetch_sub_module", self._fetching)
        replace(*_COORDINATOR, "_PartitionedParameterCoordinator__all_gather_params", self._gathering)
        for module, owner, method in _REDUCE:
            replace(module, owner, method, self._hooks.timed(schema.PHASE, "reduce"))

    def _fetching(self, original: Callable[..., object]) -> Callable[..., object]:
        # It fetches first the module's own parameters, then those of modules to come.
        def begin(args: Arguments, kwargs: Keywords) -> tuple[torch.nn.Module | None]:
            outer = self._fetched_for
            self._fetched_for = args[1] if len(args) > 1 else kwargs.get("current_submodule")
            return (outer,)

        def end(begun: tuple[torch.nn.Module | None], _result: object) -> None:
            (self._fetched_for,) = begun

        return self._hooks.around(begin, end)(original)

    def _gathering(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> Span:
            module, parameters = self._fetched_for, args[1] if len(args) > 1 else ()
            first_parameter = next(iter(parameters), None)
            is_prefetch = not (module is None or first_parameter is None or _is_parameter_of(module, first_parameter))
            return self._tracer.enter(schema.PHASE, "prefetch" if is_prefetch else "gather")

        return self._hooks.around(begin, self._hooks.end)(original)


def _is_parameter_of(module: torch.nn.Module, parameter: object) -> bool:
    parameters_of_module = module.parameters(recurse=bool(getattr(module, "_z3_leaf", False)))
    external = getattr(module, "_external_params", {}).values()  # of other modules, which it uses all the same
    return any(candidate is parameter for candidate in (*parameters_of_module, *external))
