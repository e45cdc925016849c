"""Capture phases beside the model, on the training thread: data, gradient clipping, checkpoints, garbage collection."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any, Final

from commtrace.capture.device.clock import HostClock, now_ns
from commtrace.capture.hooks import Hooks, Wrap
from commtrace.capture.records import Span, span_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of data loading, gradient clipping and checkpoints"

_STATEFUL_LOADER: Final = "torchdata.stateful_dataloader.stateful_dataloader"

_CHECKPOINT_FUNCTIONS: Final = (
    ("torch.distributed.checkpoint.state_dict_saver", "save", "distributed.checkpoint.save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save", "distributed.checkpoint.async_save"),
    ("torch.distributed.checkpoint.state_dict_loader", "load", "distributed.checkpoint.load"),
    ("megatron.core.dist_checkpointing.serialization", "save", "megatron.save"),
    ("megatron.core.dist_checkpointing.serialization", "load", "megatron.load"),
    ("megatron.training.checkpointing", "load_checkpoint", "megatron.load"),
    ("safetensors.torch", "serialize_file", "safetensors.save"),
)
"""Module, function, and the name of its span."""

_BETWEEN_STEPS: Final = ("megatron.training.checkpointing", "save_checkpoint", "megatron.save")
"""The same of the loop that saves after a step: its log counts that in no iteration, so the step ends before."""

_CHECKPOINT_METHODS: Final = (
    ("transformers.trainer", "Trainer", "_save_checkpoint", "transformers.save"),
    ("transformers.trainer", "Trainer", "save_model", "transformers.save"),
    ("transformers.trainer", "Trainer", "_load_from_checkpoint", "transformers.load"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "transformers.save"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint", "lightning.save"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint", "lightning.save"),
    ("accelerate.accelerator", "Accelerator", "save_state", "accelerate.save"),
    ("accelerate.accelerator", "Accelerator", "load_state", "accelerate.load"),
)
"""Module, class, method, and the name of its span; what it saves with torch or safetensors is inside."""

_CLIPPING_FUNCTIONS: Final = (
    ("torch.nn.utils.clip_grad", "clip_grad_norm_", "clip_grad_norm"),
    ("torch.nn.utils.clip_grad", "_get_total_norm", "clip_grad_norm"),
    ("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "clip_grad_norm"),
    ("torch.nn.utils.clip_grad", "clip_grad_value_", "clip_grad_value"),
    ("megatron.core.optimizer.clip_grads", "get_grad_norm_fp32", "clip_grad_norm"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32", "clip_grad_norm"),
)

_CLIPPING_METHODS: Final = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "clip_grad_norm_"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "clip_fp32_gradients"),
)

_HOLDERS: Final = (
    "torch.nn.utils",
    "torch.distributed.checkpoint",
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer.optimizer",
    "megatron.training.training",
)
"""Modules that hold such functions by the same name."""


class PhaseCapture:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._training_thread = threading.main_thread().ident
        self._is_clipping = False

    def install(self) -> None:
        when_imported = self._hooks.when_imported
        when_imported("torch.utils.data.dataloader", self._hook_loader)
        when_imported(_STATEFUL_LOADER, self._hook_loader)
        when_imported("torch.serialization", self._hook_serialization)
        for module, function, name in _CHECKPOINT_FUNCTIONS:
            wrap = self._waiting(schema.CHECKPOINT, name)
            when_imported(module, functools.partial(self._hook_function, function, wrap))
        module, function, name = _BETWEEN_STEPS
        when_imported(module, functools.partial(self._hook_function, function, self._saving_between_steps(name)))
        for module, owner, method, name in _CHECKPOINT_METHODS:
            wrap = self._waiting(schema.CHECKPOINT, name)
            self._hooks.replace_method_when_imported(module, owner, method, wrap)
        for module, function, name in _CLIPPING_FUNCTIONS:
            when_imported(module, functools.partial(self._hook_function, function, self._clipping(name)))
        for module, owner, method in _CLIPPING_METHODS:
            self._hooks.replace_method_when_imported(module, owner, method, self._clipping("clip_grad_norm"))

    def uninstall(self) -> None:
        self._hooks.restore()

    def _hook_function(self, function: str, wrap: Wrap, module: ModuleType) -> None:
        self._hooks.replace_function(module, function, wrap, *_HOLDERS)

    def _hook_loader(self, module: ModuleType) -> None:
        # Every class that has a __next__ or makes such an iterator; nested ones count once.
        for loader_type in list(vars(module).values()):
            if not isinstance(loader_type, type) or loader_type.__module__ != module.__name__:
                continue
            if loader_type.__name__.endswith("Iter"):
                self._hooks.replace(loader_type, "__next__", self._waiting(schema.DATA, "next batch"))
            elif loader_type.__name__.endswith("DataLoader"):
                self._hooks.replace(loader_type, "__iter__", self._waiting(schema.DATA, "start of loader"))

    def _hook_serialization(self, module: ModuleType) -> None:
        # torch.save and torch.load look them up late.
        self._hooks.replace(module, "_open_zipfile_writer", self._opening)
        self._hooks.replace(module, "_open_file_like", self._opening)

    def _opening(self, original: Callable[..., object]) -> Callable[..., object]:
        hooks = self._hooks

        @functools.wraps(original)
        def opener(*arguments: object, **keywords: object) -> object:
            span: Span | None = None
            try:
                file, *mode = (*arguments, *keywords.values())
                if hooks.active and _is_file(file):
                    reads = "r" in str(mode[0] if mode else "")
                    span = self._enter_wait(schema.CHECKPOINT, "torch.load" if reads else "torch.save")
            except Exception as error:
                hooks.failed(error)
            if span is None:
                return original(*arguments, **keywords)
            opened: Any = None
            try:
                opened = original(*arguments, **keywords)
            finally:
                try:
                    if opened is None:
                        hooks.leave(span)
                    else:
                        opened = _OpenFile(opened, hooks, span)
                except Exception as error:
                    hooks.failed(error)
            return opened

        return opener

    def _waiting(self, kind: int, name: str) -> Wrap:
        enter_wait, leave = self._enter_wait, self._tracer.leave
        return self._hooks.around(lambda args, kwargs: enter_wait(kind, name), lambda span, _: leave(span))

    def _saving_between_steps(self, name: str) -> Wrap:
        def begin(_args: tuple[object, ...], _kwargs: dict[str, object]) -> Span | None:
            if not self._tracer.open_waits and threading.get_ident() == self._training_thread:
                self._tracer.end_iteration()
            return self._enter_wait(schema.CHECKPOINT, name)

        return self._hooks.around(begin, lambda span, _: self._tracer.leave(span))

    def _enter_wait(self, kind: int, name: str) -> Span | None:
        # Only the outermost, and only of the training thread: a loader that reads ahead, say, stops no training.
        if self._tracer.open_waits or threading.get_ident() != self._training_thread:
            return None
        return self._tracer.enter(kind, name)

    def _clipping(self, name: str) -> Wrap:
        """Return a wrapper for clipping: an ``optimizer`` span, or a ``phase`` inside an optimizer's step."""

        def begin(_args: tuple[object, ...], _kwargs: dict[str, object]) -> Span | None:
            if self._is_clipping:
                return None
            span = self._tracer.enter(schema.PHASE if self._tracer.open_optimizers else schema.OPTIMIZER, name)
            self._is_clipping = True
            return span

        def end(span: Span, _result: object) -> None:
            self._is_clipping = False
            self._tracer.leave(span)

        return self._hooks.around(begin, end)


class _OpenFile:
    """A file that torch has open; its phase ends when it is closed."""

    def __init__(self, opened: Any, hooks: Hooks, span: Span) -> None:
        self._opened = opened
        self._hooks = hooks
        self._span: Span | None = span

    def __getattr__(self, name: str) -> object:
        return getattr(self._opened, name)

    def __enter__(self) -> object:
        entered = None
        try:
            entered = self._opened.__enter__()
        finally:
            try:
                if entered is None:
                    self._leave()
            except Exception as error:
                self._hooks.failed(error)
        return entered

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> object:
        try:
            return self._opened.__exit__(error, value, traceback)
        finally:
            try:
                self._leave()
            except Exception as error:
                self._hooks.failed(error)

    def _leave(self) -> None:
        span, self._span = self._span, None
        self._hooks.leave(span)


def _is_file(file: object) -> bool:
    # A checkpoint in memory is on its way to another rank, or a copy.
    if isinstance(file, (str, os.PathLike)):
        return True
    try:
        return isinstance(file.fileno(), int)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


GARBAGE: Final = "capture of garbage collections"
SHORTEST_GARBAGE_NS: Final = 200_000


class GarbageCollections:
    """Record long collections: Python's garbage collector stops the thread that launches the work."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._clock = HostClock()
        self._start_ns = 0
        self._listener = self._collected  # one object, so that it can be found again in gc.callbacks

    def install(self) -> None:
        if self._listener not in gc.callbacks:
            gc.callbacks.append(self._listener)

    def uninstall(self) -> None:
        if self._listener in gc.callbacks:
            gc.callbacks.remove(self._listener)

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        try:
            if phase == "start":
                self._start_ns = now_ns()
                return
            end = now_ns()
            if end - self._start_ns < SHORTEST_GARBAGE_NS:
                return
            # Outside of steps collections cost no step anything: imports alone cause hundreds of them.
            if self._tracer.recording and self._tracer.coordinates.step >= 0:
                name = f"generation {info['generation']}"
                span = Span(schema.GC, name, schema.HOST, self._tracer.coordinates, self._clock, self._start_ns)
                span.end = end
                self._tracer.append((span_rows, schema.GC, span))
        except Exception as error:
            self._tracer.failed(GARBAGE, error)
