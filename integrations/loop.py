"""Capture training loops that no integration marks: forwards or evaluations of DDP and FSDP models, every backward.

``microbatch`` is the number of the forward or backward in its step. Where an integration marks the steps of a
framework, there are none of these spans. The loops of Hugging Face's Trainer and of Lightning give steps their numbers.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Final, NamedTuple

import torch

from commtrace.capture.collectives.waits import record_failure
from commtrace.capture.hooks import Arguments, Function, Hooks, Keywords, installed
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.integrations import data_parallel
from commtrace.trace import schema

PART: Final = "training loops"

_WORK: Final = frozenset({schema.FORWARD, schema.BACKWARD, schema.EVALUATION})


def install(tracer: Tracer) -> Callable[[], None]:
    """Instrument ``torch.autograd.backward``, DDP and FSDP; return the function that undoes it."""
    return installed(TrainingLoop(tracer))


class TrainingLoop:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._evaluation = EvaluationMode(tracer, self._hooks)
        self._step = schema.NOT_APPLICABLE
        self._has_left_step = False
        self._forwards = self._backwards = 0
        self._forwards_of_fsdp: data_parallel.LeftForwards | None = None

    def install(self) -> None:
        self._hooks.replace(torch.autograd, "backward", self._wrap_backward)
        self._evaluation.install()
        self._forwards_of_fsdp = data_parallel.hook(self._hooks, self._tracer, self)
        self._tracer.optimizer_listeners.append(self._training_goes_on)

    def uninstall(self) -> None:
        if self._training_goes_on in self._tracer.optimizer_listeners:
            self._tracer.optimizer_listeners.remove(self._training_goes_on)
        self._hooks.restore()

    def _training_goes_on(self) -> None:
        forwards = self._forwards_of_fsdp
        if forwards is not None and forwards.opened is not None:
            self._hooks.guarded(forwards.end_left)

    def wrap_forward(self, original: Function, announce: Callable[[torch.nn.Module], None]) -> Function:
        """Wrap the forward of the class of a wrapped model; ``announce`` is called with each model before it."""

        def begin_of(module: torch.nn.Module) -> Span | None:
            announce(module)
            return self.begin_forward(module)

        calls = self._unseen_by_dynamo(begin_of, self.end_forward)
        failed = self._hooks.failed

        def forward(module: torch.nn.Module, /, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            span: Span | None = None
            try:
                span = calls[0](module)
            except Exception as error:
                failed(error)
            try:
                return original(module, *args, **kwargs)
            finally:
                try:
                    if span is not None:
                        calls[1](span)
                except Exception as error:
                    failed(error)

        self._run_as_it_is(forward)
        return functools.wraps(original)(forward)

    def begin_forward(self, module: torch.nn.Module) -> Span | None:
        """Begin the outermost forward of a model; return None inside another one, or inside a framework's."""
        tracer = self._tracer
        if not self._hooks.active or tracer.steps.is_marked_by_framework:
            return None
        if tracer.innermost is not None and self._is_inside_work():
            return None
        if not torch.is_grad_enabled() and not module.training:
            self._has_left_step = self._tracer.steps.evaluation_begins()
            return self._tracer.enter(schema.EVALUATION, "evaluation")
        self._begin_work()
        self._forwards += 1
        return self._tracer.enter(schema.FORWARD, "forward", self._forwards - 1)

    def end_forward(self, span: Span | None) -> None:
        if span is not None:
            self._tracer.leave(span)
            if span.kind == schema.EVALUATION:
                has_left, self._has_left_step = self._has_left_step, False
                self._tracer.steps.evaluation_ended(has_left=has_left)

    def _wrap_backward(self, original: Function) -> Function:
        calls = self._unseen_by_dynamo(self._begin_backward, self._end_backward)
        failed, tracer, steps = self._hooks.failed, self._tracer, self._tracer.steps

        def backward(*args: object, **kwargs: object) -> object:
            # A backward inside a backward (activation checkpointing, double differentiation) is part of that one.
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
                return original(*args, **kwargs)
            is_ours = False
            span: Span | None = None
            try:
                is_ours = not steps.is_marked_by_framework  # A framework's integration has spans of its own.
                span = calls[0]() if is_ours else None
            except Exception as error:
                failed(error)
            try:
                return original(*args, **kwargs)
            except Exception as raised:
                # The reducer of DDP waits in C++, where no hook stands: what it waited for is what has failed.
                record_failure(tracer, tracer.blocked[0], raised, PART)
                tracer.blocked[0] = None
                raise
            finally:
                try:
                    if is_ours:
                        calls[1](span)
                except Exception as error:
                    failed(error)

        self._run_as_it_is(backward)
        return functools.wraps(original)(backward)

    def _begin_backward(self) -> Span | None:
        forwards = self._forwards_of_fsdp
        if forwards is not None and forwards.opened is not None:
            self._hooks.guarded(forwards.end_left)
        tracer = self._tracer
        if not self._hooks.active or tracer.steps.is_marked_by_framework:
            return None
        if tracer.innermost is not None and self._is_inside_work():
            return None
        self._begin_work()
        self._backwards += 1
        return self._tracer.enter(schema.BACKWARD, "backward", self._backwards - 1)

    def _end_backward(self, span: Span | None) -> None:
        if span is not None:
            self._tracer.leave(span)
        self._tracer.steps.backward_ended()

    def _begin_work(self) -> None:
        if self._evaluation.opened:
            self._evaluation.training_goes_on()
        self._tracer.steps.work_begins()
        step = self._tracer.coordinates.step
        if step != self._step:
            self._step = step
            self._forwards = self._backwards = 0

    def _is_inside_work(self) -> bool:
        span = self._tracer.innermost
        while span is not None:
            if span.kind in _WORK:
                return True
            span = span.outer
        return False

    def _unseen_by_dynamo(self, *functions: Function) -> list[Function]:
        """Return functions as a list, in which those that dynamo neither compiles nor traces take their places."""
        calls: list[Function] = list(functions)

        # When it is imported: that takes seconds, and most jobs never do.
        def disable(dynamo: ModuleType) -> None:
            if hasattr(dynamo, "disable"):
                calls[:] = map(dynamo.disable, functions)
            else:  # The recording starts while it is being imported.
                calls[:] = [functools.partial(look_again, dynamo, index) for index in range(len(functions))]

        def look_again(dynamo: ModuleType, index: int, *args: object) -> object:
            disable(dynamo)
            return (calls if hasattr(dynamo, "disable") else functions)[index](*args)

        self._run_as_it_is(look_again)
        self._hooks.when_imported("torch._dynamo", disable)
        return calls

    def _run_as_it_is(self, wrapper: Function) -> None:
        """Keep dynamo from the wrapper's own frame; what it calls is compiled as ever."""

        def skip(dynamo: ModuleType) -> None:
            skip_code = getattr(getattr(dynamo, "eval_frame", None), "skip_code", None)
            if skip_code is not None:
                skip_code(wrapper.__code__)

        self._hooks.when_imported("torch._dynamo", skip)


_MOST_MODELS: Final = 16
"""Number of models in evaluation mode that are remembered, the latest."""


class EvaluationMode:
    """Capture the evaluation of any model: from ``model.eval()`` to ``model.train()``, without training between.

    Between two found steps its communication belongs to neither, if the model is the one that the optimizer trains.
    """

    def __init__(self, tracer: Tracer, hooks: Hooks) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._training_thread = threading.main_thread().ident
        self.opened: dict[int, _OpenEvaluation] = {}  # by the ids of the models in evaluation mode
        self._not_evaluated: dict[int, weakref.ref[torch.nn.Module]] = {}

    def install(self) -> None:
        self._hooks.replace(torch.nn.Module, "eval", self._wrap_eval)
        self._hooks.replace(torch.nn.Module, "train", self._wrap_train)

    def training_goes_on(self) -> None:
        """Forget the models in evaluation mode: training in between means that this is no evaluation."""
        for key in tuple(self.opened):
            self._dismiss(key)

    def _wrap_eval(self, original: Callable[..., object]) -> Callable[..., object]:
        failed, begins = self._hooks.failed, self._begins

        @functools.wraps(original)
        def eval(module: torch.nn.Module) -> object:
            if torch.compiler.is_compiling():
                return original(module)
            was_training = False
            try:
                was_training = module.training
            except Exception as error:
                failed(error)
            result = original(module)
            try:
                begins(module, was_training)
            except Exception as error:
                failed(error)
            return result

        return eval

    def _wrap_train(self, original: Callable[..., object]) -> Callable[..., object]:
        # It is called for every module in a model: a look whether any model is in evaluation mode.
        failed, begins, ends, opened = self._hooks.failed, self._begins, self._ends, self.opened
        leaving: set[int] = set()  # threads in which a module leaves training, and with it its children
        thread = threading.get_ident

        @functools.wraps(original)
        def train(module: torch.nn.Module, mode: bool = True) -> object:
            if torch.compiler.is_compiling():
                return original(module, mode)
            if mode:
                result = original(module, mode)
                try:
                    if opened:
                        ends(module)
                except Exception as error:
                    failed(error)
                return result
            was_training = is_outermost = False
            try:
                is_outermost = thread() not in leaving
                if is_outermost:
                    was_training = module.training
                    leaving.add(thread())
            except Exception as error:
                failed(error)
            try:
                result = original(module, mode)
            finally:
                try:
                    if is_outermost:
                        leaving.discard(thread())
                except Exception as error:
                    failed(error)
            try:
                if is_outermost:
                    begins(module, was_training)
            except Exception as error:
                failed(error)
            return result

        return train

    def _begins(self, module: torch.nn.Module, was_training: bool) -> None:
        tracer, key = self._tracer, id(module)
        if not self._hooks.active or tracer.steps.is_marked_by_framework or key in self.opened:
            return
        if threading.get_ident() != self._training_thread or not tracer.recording:
            return
        is_known = key in self._not_evaluated
        if is_known and not was_training:
            return
        steps = tracer.steps
        # Averaged weights are never put back into training: only the model that is trained leaves the step.
        has_left = was_training and not is_known and steps.trains(module) and steps.evaluation_begins()
        span = tracer.aside(schema.EVALUATION, "eval() to train()")
        if span is None:
            return
        self.opened[key] = _OpenEvaluation(self._until_gone(module), span, has_left)
        if len(self.opened) > _MOST_MODELS:  # They are parts of one model.
            self._dismiss(next(iter(self.opened)))

    def _ends(self, module: torch.nn.Module) -> None:
        known = self.opened.pop(id(module), None)
        if known is not None and self._hooks.active and self._tracer.recording:
            self._tracer.leave_aside(known.span)
            self._tracer.steps.evaluation_ended(has_left=known.has_left)

    def _dismiss(self, key: int) -> None:
        opened = self.opened.pop(key, None)
        if opened is not None and opened.reference() is not None:
            self._not_evaluated[key] = opened.reference

    def _until_gone(self, module: torch.nn.Module) -> weakref.ref[torch.nn.Module]:
        key, opened, not_evaluated = id(module), self.opened, self._not_evaluated

        def gone(_reference: object) -> None:  # before another object can have its id
            opened.pop(key, None)
            not_evaluated.pop(key, None)

        return weakref.ref(module, gone)


class _OpenEvaluation(NamedTuple):
    reference: weakref.ref[torch.nn.Module]
    span: Span
    has_left: bool


NUMBERS: Final = "step numbers of trainers"

_LIGHTNING: Final = ("lightning.pytorch.trainer.call", "pytorch_lightning.trainer.call")


def install_numbers(tracer: Tracer) -> Callable[[], None]:
    """Hook Hugging Face's Trainer and Lightning now or when imported; return the function that undoes it."""
    return installed(TrainerNumbers(tracer))


class TrainerNumbers:
    """Number steps as these trainers do, also after a resume; the step finder finds the steps."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(NUMBERS, tracer)

    def install(self) -> None:
        wrap = self._hooks.around(self._transformers)
        module, owner = "transformers.trainer_callback", "CallbackHandler"
        self._hooks.replace_method_when_imported(module, owner, "on_train_begin", wrap)
        for module in _LIGHTNING:
            self._hooks.when_imported(module, self._hook_lightning)

    def uninstall(self) -> None:
        self._hooks.restore()

    def _hook_lightning(self, module: ModuleType) -> None:
        self._hooks.replace(module, "_call_callback_hooks", self._hooks.around(self._lightning))

    def _transformers(self, args: Arguments, kwargs: Keywords) -> None:
        state = kwargs["state"] if "state" in kwargs else args[2]
        # transformers logs a step under the number of updates made by its end, Lightning under that before it.
        self._begins_with(int(state.global_step) + 1, "the Trainer's global_step")

    def _lightning(self, args: Arguments, kwargs: Keywords) -> None:
        hook = kwargs["hook_name"] if "hook_name" in kwargs else args[1]
        if hook == "on_train_start":
            trainer = kwargs["trainer"] if "trainer" in kwargs else args[0]
            self._begins_with(int(trainer.global_step), "Lightning's global_step")

    def _begins_with(self, number: int, whose: str) -> None:
        if self._tracer.steps.begins_with(number):
            self._tracer.set_topology({"step_numbers": whose})
