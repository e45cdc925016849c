"""Lets megatron-core train on a machine without CUDA, under gloo.

Megatron asks for "cuda" by name in a few places. While :func:`use_cpu_for_cuda` is in effect those get the CPU; nothing
of what Megatron computes, schedules or communicates changes. With a GPU none of this is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    """Rewrites calls such as ``torch.zeros(1, device="cuda")`` and ``tensor.cuda()``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        result = func(*args, **options)
        if func is torch.Tensor.type and isinstance(result, str):
            # The optimizers accept a parameter only if it calls itself "torch.cuda.FloatTensor".
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def use_cpu_for_cuda() -> None:
    """Substitute the CPU for CUDA in this process, from here on. Call it before any model is built."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def current_device() -> torch.device:
        return torch.device("cpu")

    def synchronize(device: Any = None) -> None:
        return None

    def fork(tracker: Any, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.synchronize = synchronize
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    # The tracker switches between states of the CUDA random number generator: there is none.
    CudaRNGStatesTracker.fork = fork
    _CpuForCuda().__enter__()  # type: ignore[no-untyped-call]
