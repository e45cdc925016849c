"""Spans of modules by the native part: the rules of :mod:`commtrace.capture.model.module_backward`, in C."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from commtrace.capture.device.clock import HostClock
from commtrace.capture.model.module_backward import attach
from commtrace.capture.native import Native, NativeClock
from commtrace.capture.tracer import Tracer
from commtrace.recording.compile_safe import wrap_call_impl_natively
from commtrace.trace import schema


class NativeCalls:
    """The calls of the modules in ``labels``: see :class:`commtrace.capture.model.modules.Calls`."""

    def __init__(self, native: Native, tracer: Tracer, part: str, labels: dict[int, Any]) -> None:
        self._native = native
        on_device = tracer.clock.timing != schema.HOST_TIMING
        graph_task: Any = torch._C._current_graph_task_id
        next_node: Any = torch._C._autograd._get_sequence_nr
        self._modules: Any = native.core.Modules(
            labels, torch.Tensor, OrderedDict, torch.is_grad_enabled, graph_task, next_node, attach, self._end_later,
            functools.partial(tracer.failed, part), on_device,
        )  # fmt: skip

    def label(self, name: str, is_wrapped: bool) -> Any:
        codes = tuple(map(self._native.code, (name, f"{name} backward", f"{name} recompute")))
        return self._native.core.Label(name, codes, is_wrapped)

    def wrap(self, original: Callable[..., object]) -> Callable[..., object]:
        return wrap_call_impl_natively(original, self._modules.begin, self._modules.end)

    def forget(self) -> None:
        self._modules.forget()

    def _end_later(self, task: int) -> None:
        """Have the backwards that are going on in this pass end with it."""
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._modules.end_pass, task))


def has_native_marks(tracer: Tracer) -> bool:
    """Return whether the native part can take the marks of this tracer's clock."""
    return isinstance(tracer.clock, (HostClock, NativeClock))
