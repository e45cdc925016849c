"""Integrate Megatron: a schedule's call is a step, numbered as in Megatron-LM's log; ``forward_only`` is evaluation.

Spans are the microbatches' forwards and backwards, the outermost optimizer, and phases of experts and gradients.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from commtrace.capture.hooks import RAISED, Arguments, Function, Hooks, Keywords, installed
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.integrations.megatron_sizes import megatron_sizes
from commtrace.integrations.topology import (
    collection_roles,
    communicator_roles,
    megatron_framework,
    megatron_roles,
    megatron_topology,
)
from commtrace.recording.installation import warn_if_untried
from commtrace.trace import schema
from commtrace.trace.schedule import schedule_named
from commtrace.trace.schema import Coordinates

if TYPE_CHECKING:
    from commtrace.trace.topology import Topology

PART: Final = "megatron"

_SCHEDULES: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
"""Functions of megatron.core.pipeline_parallel.schedules that run an iteration."""

_PHASES: Final = (
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup", "start_param_sync", "gather"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup", "finish_param_sync", "gather"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup", "start_grad_sync", "reduce"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup", "finish_grad_sync", "reduce"),
    *(
        ("megatron.core.transformer.moe.token_dispatcher", f"MoE{kind}TokenDispatcher", f"token_{name}", name)
        for kind in ("AllGather", "AlltoAll", "Flex")
        for name in ("dispatch", "combine")
    ),
)
"""Module, class, method, and the name of the phase; a version without such a method has no such phase."""

_OPTIMIZER_MODULES: Final = ("optimizer", "distrib_optimizer", "layer_wise_optimizer")


def install(tracer: Tracer) -> Callable[[], None]:
    """Instrument megatron-core now or when it is imported; return the function that undoes it."""
    return installed(MegatronIntegration(tracer))


ReadArgument: TypeAlias = Callable[[str], Any]
"""Returns an argument of a call by its name."""


class MegatronPlace(NamedTuple):
    microbatch: int
    chunk: int


class MegatronIntegration:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._parallel_state: ModuleType | None = None
        self._optimizer_module: ModuleType | None = None
        self._known_groups: tuple[int, ...] = ()
        self._stage = 0
        self._schedule: Topology = {}
        self._evaluations = 0
        self._numbered = False
        self._open_optimizers = 0
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._awaiting_backward: dict[int, MegatronPlace] = {}
        self._combined = CombinedSteps(tracer, self._hooks, self._open_combined)

    def install(self) -> None:
        hooks = {
            "megatron.core.parallel_state": self._hook_parallel_state,
            "megatron.core.pipeline_parallel.schedules": self._hook_schedules,
            "megatron.core.pipeline_parallel.combined_1f1b": self._hook_combined,
            "megatron.core.pipeline_parallel.utils": self._combined.hook_nodes,
            **{f"megatron.core.optimizer.{name}": self._hook_optimizers for name in _OPTIMIZER_MODULES},
        }
        for name, hook in hooks.items():
            self._hooks.when_imported(name, hook)
        self._hooks.when_imported(
            "megatron.core", lambda core: warn_if_untried("megatron-core", megatron_framework()["version"])
        )
        for module, owner, method, phase in _PHASES:
            wrap = self._hooks.timed(schema.PHASE, phase)
            self._hooks.replace_method_when_imported(module, owner, method, wrap)

    def uninstall(self) -> None:
        self._hooks.restore()
        self._awaiting_backward.clear()

    # Process groups

    def _hook_parallel_state(self, module: ModuleType) -> None:
        self._parallel_state = module
        for name in ("initialize_model_parallel", "destroy_model_parallel"):
            self._hooks.replace(module, name, self._then_read_groups)
        self._read_groups()

    def _then_read_groups(self, original: Function) -> Function:
        def end(_begun: bool, result: object) -> None:
            if result is not RAISED and self._hooks.active:
                self._read_groups()

        return self._hooks.around(lambda args, kwargs: True, end)(original)

    def _read_groups(self) -> None:
        if self._parallel_state is None:
            return
        if not self._parallel_state.model_parallel_is_initialized():
            # destroy_model_parallel forgets most groups, not all: what is left would be given another role.
            self._known_groups = ()
            return
        roles = megatron_roles(self._parallel_state)
        groups = tuple(id(group) for group, _ in roles)
        if groups == self._known_groups:
            return
        self._known_groups = groups
        for group, role in roles:
            self._tracer.set_role(group, role)
        self._stage = self._parallel_state.get_pipeline_model_parallel_rank()
        self._tracer.set_topology(megatron_topology(self._parallel_state))

    # Iterations

    def _hook_schedules(self, module: ModuleType) -> None:
        self._hooks.replace_required(module, "forward_step", self._wrap_forward)
        self._hooks.replace_required(module, "backward_step", self._wrap_backward)
        self._hooks.replace(module, "backward_step_multimodule", self._wrap_backward)  # since 0.19
        for name in _SCHEDULES:
            self._hooks.replace_required(module, name, self._wrap_schedule)

    def _wrap_schedule(self, original: Function) -> Function:
        schedule = original.__name__

        def begin(_args: Arguments, kwargs: Keywords) -> Callable[[], None]:
            if kwargs.get("forward_only"):
                return self._begin_evaluation()
            self._begin_iteration(schedule, kwargs)
            return self._time_finalization(kwargs.get("model"))

        def end(finish: Callable[[], None], _result: object) -> None:
            finish()

        return self._hooks.around(begin, end)(original)

    def _begin_iteration(self, schedule: str, arguments: Mapping[str, object]) -> None:
        self._forwards.clear()
        self._backwards.clear()
        self._awaiting_backward.clear()
        self._open_optimizers = 0
        self._read_groups()
        self._wrap_optimizers()
        self._read_arguments(arguments)
        self._report_schedule(schedule, arguments)
        self._begin_step()

    def _begin_step(self) -> None:
        iteration = _iteration()
        if iteration is None:
            self._tracer.begin_step()
        elif iteration != self._tracer.coordinates.step:  # Megatron repeats an iteration whose result it suspects
            if not self._numbered:
                self._numbered = True
                self._tracer.set_topology({"step_numbers": "Megatron's iterations"})
            self._tracer.begin_step(iteration)

    def _read_arguments(self, arguments: Mapping[str, object]) -> None:
        collection, communicator = arguments.get("pg_collection"), arguments.get("p2p_communicator")
        for group, role in communicator_roles(communicator):
            self._tracer.set_role(group, role)
        for group, role in collection_roles(collection):
            self._tracer.set_role(group, role)
            if role == "pp":
                self._stage = group.rank()
        # Of a pipeline of several modules, only the communicator knows the stages of the whole.
        self._stage = getattr(communicator, "current_stage", self._stage)

    def _report_schedule(self, schedule: str, arguments: Mapping[str, Any]) -> None:
        model = arguments.get("model")
        parallel_state = self._parallel_state
        pipeline = parallel_state is not None and parallel_state.model_parallel_is_initialized()
        stages = parallel_state.get_pipeline_model_parallel_world_size() if pipeline and parallel_state else 1
        topology: Topology = {
            "schedule": schedule_named(schedule),
            "stages": int(getattr(arguments.get("p2p_communicator"), "total_stages", stages)),
            "chunks": len(model) if isinstance(model, Sequence) else 1,
            "microbatches": int(arguments.get("num_microbatches", schema.NOT_APPLICABLE)),
        }
        if topology != self._schedule:
            self._schedule = topology
            # Those of the first iteration only: sequences may be of another length in each.
            sizes = self._sizes(model, arguments.get("seq_length"), arguments.get("micro_batch_size"))
            self._tracer.set_topology({**topology, **sizes, "framework": megatron_framework()})

    def _sizes(self, model: object, sequence: object, microbatch: object) -> Topology:
        try:
            return megatron_sizes(model, sequence, microbatch)
        except Exception as error:  # only a plan needs them: everything else is recorded all the same
            self._tracer.failed(f"{PART} sizes", error)
            return {}

    def _time_finalization(self, model: object) -> Callable[[], None]:
        """Time the schedule's call after the last backward as a phase; return the function that undoes it."""
        # The schedule takes the function from the model's configuration: scripts bind it before commtrace is imported,
        # or have their own.
        config = _configuration(model)
        function = getattr(config, "finalize_model_grads_func", None)
        if config is None or function is None:
            return lambda: None
        timed = self._hooks.timed(schema.PHASE, "finalize gradients")(function)
        config.finalize_model_grads_func = timed

        def put_back() -> None:
            if config.finalize_model_grads_func is timed:
                config.finalize_model_grads_func = function

        return put_back

    def _begin_evaluation(self) -> Callable[[], None]:
        if not self._evaluations:
            self._tracer.end_iteration()
        span = self._tracer.enter(schema.EVALUATION, "evaluation")
        self._evaluations += 1

        def end() -> None:
            self._evaluations -= 1
            self._tracer.leave(span)

        return end

    # Microbatches

    def _wrap_forward(self, original: Function) -> Function:
        parameters = Parameters(original)

        def begin(args: Arguments, kwargs: Keywords) -> tuple[Span, MegatronPlace] | None:
            if self._evaluations:
                return None
            place = self._place_of_forward(parameters, args, kwargs)
            return self._enter(schema.FORWARD, "forward", place), place

        def end(begun: tuple[Span, MegatronPlace], result: object) -> None:
            span, place = begun
            self._tracer.leave(span)
            if result is not RAISED:
                self._remember(result, place)

        return self._hooks.around(begin, end)(original)

    def _wrap_backward(self, original: Function) -> Function:
        parameters = Parameters(original)

        def begin(args: Arguments, kwargs: Keywords) -> Span:
            return self._enter(schema.BACKWARD, "backward", self._place_of_backward(parameters, args, kwargs))

        return self._hooks.around(begin, self._hooks.end)(original)

    def _hook_combined(self, module: ModuleType) -> None:
        self._combined.hook_steps(module)

    def _open_combined(self, argument: ReadArgument) -> Combined:
        """Open the spans of a combined step; a model of None means that its direction does not run."""
        opened: list[Span] = []
        backward = None
        if argument("b_model") is not None:
            place = self._place_of_combined_backward(argument("b_model"))
            opened.append(self._enter(schema.BACKWARD, "backward", place))
            backward = self._tracer.coordinates
        if argument("f_model") is not None:
            opened.append(self._enter(schema.FORWARD, "forward", self._place_of_combined_forward(argument)))
        return Combined(opened, backward)

    def _place_of_combined_forward(self, argument: ReadArgument) -> MegatronPlace:
        chunk = argument("f_model_chunk_id")
        if chunk is None:
            chunk = self._chunk_of_model(argument("f_model"))
        microbatch = argument("current_microbatch")
        if microbatch is None:
            microbatch = self._forwards[chunk]
        self._forwards[chunk] += 1
        return MegatronPlace(int(microbatch), int(chunk))

    def _place_of_combined_backward(self, model: object) -> MegatronPlace:
        chunk = self._chunk_of_model(model)
        self._backwards[chunk] += 1  # backwards of each chunk come in the order of their microbatches
        return MegatronPlace(self._backwards[chunk] - 1, chunk)

    def _place_of_forward(self, parameters: Parameters, args: Arguments, kwargs: Keywords) -> MegatronPlace:
        chunk = parameters.read(args, kwargs, "vp_stage")
        if chunk is None:
            chunk = self._chunk_of_model(parameters.read(args, kwargs, "model"))
        microbatch = parameters.read(args, kwargs, "current_microbatch")
        if microbatch is None:
            microbatch = self._forwards[chunk]
        self._forwards[chunk] += 1
        return MegatronPlace(int(microbatch), int(chunk))

    def _chunk_of_model(self, model: object) -> int:
        # Some versions of Megatron do not pass the chunk: the model or the global state knows it.
        while model is not None:
            chunk = getattr(model, "vp_stage", None)
            if chunk is not None:
                return int(chunk)
            model = getattr(model, "module", None)
        return int(getattr(self._parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", None) or 0)

    def _remember(self, result: object, place: MegatronPlace) -> None:
        # The schedule keeps the tensor until its backward, so the id cannot be used again before that.
        output = _first_tensor(result)
        if output is not None:
            self._awaiting_backward[id(output)] = place

    def _place_of_backward(self, parameters: Parameters, args: Arguments, kwargs: Keywords) -> MegatronPlace | None:
        output = _first_tensor(parameters.read(args, kwargs, "output_tensor"))
        place = self._awaiting_backward.pop(id(output), None)
        if place is None and self._awaiting_backward:
            # Another tensor than the forward returned: schedules run backwards in the order of the forwards.
            place = self._awaiting_backward.pop(next(iter(self._awaiting_backward)))
        return place

    def _enter(self, kind: int, name: str, place: MegatronPlace | None) -> Span:
        microbatch, chunk = place or (schema.NOT_APPLICABLE, schema.NOT_APPLICABLE)
        return self._tracer.enter(kind, name, microbatch, chunk, self._stage)

    # Optimizers

    def _hook_optimizers(self, module: ModuleType) -> None:
        if hasattr(module, "MegatronOptimizer"):
            self._optimizer_module = module
        self._wrap_optimizers()

    def _wrap_optimizers(self) -> None:
        # Again in each iteration: the script may define more classes of them later.
        base = getattr(self._optimizer_module, "MegatronOptimizer", None)
        if base is None:
            return
        wrapped = self._hooks.owners_of("step")
        for optimizer in _subclasses(base):
            if "step" in vars(optimizer) and optimizer not in wrapped:
                self._hooks.replace(optimizer, "step", self._wrap_optimizer_step)

    def _wrap_optimizer_step(self, original: Function) -> Function:
        def begin(args: Arguments, _kwargs: Keywords) -> Span | None:
            if self._open_optimizers:
                return None
            span = self._tracer.enter(schema.OPTIMIZER, type(args[0]).__name__)
            self._open_optimizers += 1
            return span

        def end(span: Span, _result: object) -> None:
            self._open_optimizers -= 1
            self._tracer.leave(span)

        return self._hooks.around(begin, end)(original)


def _iteration() -> int | None:
    """Return the iteration that begins, as Megatron-LM will log it; None outside of Megatron-LM's loop."""
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    completed = getattr(arguments, "curr_iteration", None)
    return completed + 1 if isinstance(completed, int) else None


class Parameters:
    """The parameters of a function of Megatron's, to read the arguments of a call by name."""

    def __init__(self, function: Function) -> None:
        self._positions = {name: position for position, name in enumerate(inspect.signature(function).parameters)}

    def read(self, args: Arguments, kwargs: Keywords, name: str) -> Any:
        """Return an argument; None where it is not given, or this version has no such parameter."""
        if name in kwargs:
            return kwargs[name]
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else None


def _first_tensor(value: object) -> object:
    # forward_step returns one, a list, or one for each module, perhaps with the number of tokens.
    while isinstance(value, (list, tuple, dict)):
        value = next(iter(value.values() if isinstance(value, dict) else value), None)
    return value


def _configuration(model: object) -> Any:
    if isinstance(model, (list, tuple)):
        model = model[0] if model else None
    while model is not None and not hasattr(model, "config"):
        model = getattr(model, "module", None)
    return getattr(model, "config", None)


def _subclasses(base: type) -> Iterator[type]:
    child: type
    for child in base.__subclasses__():
        yield child
        yield from _subclasses(child)


_MESSAGES: Final = ("pre_forward", "pre_backward", "post_forward", "post_backward")
"""Arguments of a combined step: functions that send to other stages, and receive."""


class Combined(NamedTuple):
    """The open spans of a combined step, outermost first, and the place of its backward; None without one."""

    spans: list[Span]
    backward: Coordinates | None


class CombinedSteps:
    """Capture steps that interleave one microbatch's forward with another's backward.

    The forward's span lies inside the backward's. Communication gets the microbatch and chunk of its node.
    """

    def __init__(self, tracer: Tracer, hooks: Hooks, open_spans: Callable[[ReadArgument], Combined]) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._open_spans = open_spans
        self._backward: Coordinates | None = None

    def hook_steps(self, module: ModuleType) -> None:
        """Hook ``megatron.core.pipeline_parallel.combined_1f1b``."""

        def wrap(original: Function) -> Function:
            parameters = Parameters(original)

            def begin(args: Arguments, kwargs: Keywords) -> Combined:
                around = self._tracer.coordinates
                # These are the arguments that the step will get: it passes the functions by keyword.
                for name in _MESSAGES:
                    if kwargs.get(name) is not None:
                        kwargs[name] = self._at(lambda: around, kwargs[name])
                combined = self._open_spans(functools.partial(parameters.read, args, kwargs))
                self._backward = combined.backward
                return combined

            return self._hooks.around(begin, self._end)(original)

        self._hooks.replace(module, "combined_forward_backward_step", wrap)

    def _end(self, combined: Combined, _result: object) -> None:
        self._backward = None
        for span in reversed(combined.spans):
            self._tracer.leave(span)

    def hook_nodes(self, module: ModuleType) -> None:
        """Hook ``megatron.core.pipeline_parallel.utils``, for the communication of a node's backward."""
        self._hooks.replace_method(module, "ScheduleNode", "backward", lambda original: self._at(self._place, original))

    def _place(self) -> Coordinates | None:
        return self._backward

    def _at(self, place: Callable[[], Coordinates | None], original: Function) -> Function:
        """Return ``original``, run at another place in the schedule; a place of None changes nothing."""
        tracer = self._tracer

        def begin(_args: Arguments, _kwargs: Keywords) -> Coordinates | None:
            there = place()
            return None if there is None else tracer.be_at(there)

        def end(before: Coordinates, _result: object) -> None:
            tracer.be_at(before)

        return self._hooks.around(begin, end)(original)
