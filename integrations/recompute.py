"""Capture activation checkpointing: the forward that a backward repeats outside of compiled graphs is ``recompute``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Final, Protocol

from commtrace.capture.hooks import RAISED, Arguments, Function, Hooks, Keywords, installed
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of activation recomputation"

_NODES: Final = (
    ("torch.utils.checkpoint", "CheckpointFunction", "backward"),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", "CheckpointFunction", "backward"),
    ("megatron.core.tensor_parallel.random", "CheckpointFunction", "backward"),
    ("megatron.core.tensor_parallel.random", "CheckpointWithoutOutput", "_recompute"),
    ("transformer_engine.pytorch.distributed", "_CheckpointFunction", "backward"),
)
"""Module, class and the method that calls ``run_function`` of its first argument again."""

_FRAMES: Final = (
    ("torch.utils.checkpoint", "_CheckpointFrame"),
    ("transformer_engine.pytorch.distributed", "_CheckpointFrame"),
)
"""Module and class whose objects hold, as ``recompute_fn``, what is called when a saved tensor is asked for."""

_CALLS_AGAIN: Final = ("deepspeed.runtime.activation_checkpointing.checkpointing", "non_reentrant_checkpoint")
"""A function that keeps its first argument to itself, and calls it once now and again in the backward."""


def install(tracer: Tracer) -> Callable[[], None]:
    """Instrument each of these libraries, now or when imported; return the function that undoes it."""
    return installed(Recomputation(tracer))


class Checkpoint(Protocol):
    """A node of a graph whose backward repeats a forward, or what a node keeps for that."""

    run_function: Function


class CheckpointFrame(Protocol):
    """An object that repeats a forward for its saved tensors."""

    recompute_fn: Function


class Recomputation:
    def __init__(self, tracer: Tracer) -> None:
        self._hooks = Hooks(PART, tracer)
        self._timed = self._hooks.timed(schema.RECOMPUTE, "recompute")

    def install(self) -> None:
        for module, owner, method in _NODES:
            self._hooks.replace_method_when_imported(module, owner, method, self._repeating)
        for module, owner in _FRAMES:
            self._hooks.replace_method_when_imported(module, owner, "__init__", self._keeping)
        module, function = _CALLS_AGAIN
        self._hooks.when_imported(module, functools.partial(self._hook_function, function))

    def uninstall(self) -> None:
        """Put every original back; a backward after that repeats its forward without a span."""
        self._hooks.restore()

    def _hook_function(self, function: str, module: ModuleType) -> None:
        self._hooks.replace(module, function, self._calling_again)

    def _repeating(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> tuple[Checkpoint, Function, Function] | None:
            checkpoint: Checkpoint = args[0]
            run_function = getattr(checkpoint, "run_function", None)
            if run_function is None:
                return None
            recompute = self._timed(run_function)
            checkpoint.run_function = recompute
            return checkpoint, run_function, recompute

        def end(begun: tuple[Checkpoint, Function, Function], _result: object) -> None:
            checkpoint, run_function, recompute = begun
            if checkpoint.run_function is recompute:
                checkpoint.run_function = run_function

        return self._hooks.around(begin, end)(original)

    def _keeping(self, original: Callable[..., None]) -> Callable[..., None]:
        def end(frame: CheckpointFrame, result: object) -> None:
            recompute = getattr(frame, "recompute_fn", None)
            if result is not RAISED and recompute is not None:
                frame.recompute_fn = self._timed(recompute)

        return self._hooks.around(lambda args, kwargs: args[0], end)(original)

    def _calling_again(self, original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def checkpoint(function: object, *args: object, **kwargs: object) -> object:
            repeated = self._hooks.guarded(self._after_the_first, function) if self._hooks.active else None
            return original(repeated or function, *args, **kwargs)

        return checkpoint

    def _after_the_first(self, function: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``function``, whose first call is the forward."""
        calls = iter((function,))
        timed = self._timed(function)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            return next(calls, timed)(*args, **kwargs)

        return call
