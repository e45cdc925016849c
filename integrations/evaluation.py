"""Evaluation in loops without a wrapper around their model: from ``model.eval()`` to ``model.train()``.

A bare ``nn.Module`` has no forward of its own kind to be hooked. But its loop says in which mode it is: the time
from ``eval()`` (or ``train(False)``, which some classes make of it) until ``train()`` of the same module is an
``evaluation`` span named ``eval() to train()``, if nothing was trained meanwhile. Else the mode says something else (a
frozen teacher, frozen batch norms), and there is none; nor is there one of a model that is never put back into
training. What an evaluation loads, saves or collects is in it, with spans of its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

_MOST: Final = 16
"""So many models in evaluation mode are remembered, those that were put into it last."""


class EvaluationMode:
    """The models that are in evaluation mode, as long as nothing is trained."""

    def __init__(self, tracer: Tracer, hooks: Hooks) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._training_thread = threading.main_thread().ident
        self._open: dict[int, tuple[weakref.ref[Any], Span]] = {}

    def install(self) -> None:
        """Register the hooks."""
        self._hooks.replace(torch.nn.Module, "eval", self._wrap_eval)
        self._hooks.replace(torch.nn.Module, "train", self._wrap_train)

    def training_goes_on(self) -> None:
        """A forward or backward that trains begins: what is in evaluation mode now is no evaluation."""
        if self._open:
            self._open.clear()

    def _wrap_eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        failed, begins = self._hooks.failed, self._begins

        @functools.wraps(original)
        def eval(module: Any) -> Any:
            result = original(module)
            if torch.compiler.is_compiling():
                return result
            try:
                begins(module)
            except Exception as error:
                failed(error)
            return result

        return eval

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Called for every module in a model: little more than a look whether any model is in evaluation mode."""
        failed, begins, ends, opened = self._hooks.failed, self._begins, self._ends, self._open
        leaving = False  # a module leaves training, and with it its children

        @functools.wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            nonlocal leaving
            if torch.compiler.is_compiling() or (leaving and not mode):
                return original(module, mode)
            if mode:
                result = original(module, mode)
            else:
                leaving = True
                try:
                    result = original(module, mode)
                finally:
                    leaving = False
            try:
                if not mode:
                    begins(module)
                elif opened:
                    ends(module)
            except Exception as error:
                failed(error)
            return result

        return train

    def _begins(self, module: Any) -> None:
        tracer = self._tracer
        if not self._hooks.active or tracer.steps.is_marked_by_framework or id(module) in self._open:
            return
        if threading.get_ident() != self._training_thread:
            return
        span = tracer.aside(schema.EVALUATION, "eval() to train()")
        if span is None:
            return
        key, opened = id(module), self._open

        def gone(_reference: Any) -> None:  # before another object can have its id
            opened.pop(key, None)

        opened[key] = (weakref.ref(module, gone), span)
        if len(opened) > _MOST:
            del opened[next(iter(opened))]

    def _ends(self, module: Any) -> None:
        known = self._open.pop(id(module), None)
        if known is not None and self._hooks.active and self._tracer.recording:
            self._tracer.leave_aside(known[1])
            self._tracer.steps.evaluation_ended()
