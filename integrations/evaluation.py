"""Capture evaluation of models without a wrapper: from ``model.eval()`` to ``model.train()``, without training between.

Between two found steps its communication belongs to neither, if the model is the one that the optimizer trains.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

_MOST: Final = 16
"""Number of models in evaluation mode that are remembered, the latest."""


class EvaluationMode:
    """Remember the models in evaluation mode, until a model trains."""

    def __init__(self, tracer: Tracer, hooks: Hooks) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._training_thread = threading.main_thread().ident
        self._open: dict[int, _Opened] = {}
        self._not_evaluated: dict[int, weakref.ref[torch.nn.Module]] = {}

    def install(self) -> None:
        self._hooks.replace(torch.nn.Module, "eval", self._wrap_eval)
        self._hooks.replace(torch.nn.Module, "train", self._wrap_train)

    def training_goes_on(self) -> None:
        """Forget the models in evaluation mode: training in between means that this is no evaluation."""
        if self._open:
            for key in tuple(self._open):
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
        failed, begins, ends, opened = self._hooks.failed, self._begins, self._ends, self._open
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
        if not self._hooks.active or tracer.steps.is_marked_by_framework or key in self._open:
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
        self._open[key] = _Opened(self._until_gone(module), span, has_left)
        if len(self._open) > _MOST:  # They are parts of one model.
            self._dismiss(next(iter(self._open)))

    def _ends(self, module: torch.nn.Module) -> None:
        known = self._open.pop(id(module), None)
        if known is not None and self._hooks.active and self._tracer.recording:
            self._tracer.leave_aside(known.span)
            self._tracer.steps.evaluation_ended(has_left=known.has_left)

    def _dismiss(self, key: int) -> None:
        opened = self._open.pop(key, None)
        if opened is not None and opened.reference() is not None:
            self._not_evaluated[key] = opened.reference

    def _until_gone(self, module: torch.nn.Module) -> weakref.ref[torch.nn.Module]:
        key, opened, others = id(module), self._open, self._not_evaluated

        def gone(_reference: object) -> None:  # before another object can have its id
            opened.pop(key, None)
            others.pop(key, None)

        return weakref.ref(module, gone)


class _Opened(NamedTuple):
    reference: weakref.ref[torch.nn.Module]
    span: Span
    has_left: bool
