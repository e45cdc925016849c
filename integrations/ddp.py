"""Integrates ``DistributedDataParallel``: its forward is a span, its process group has the role dp.

:mod:`commtrace.capture.collectives.ddp_reducer` captures what its reducer sends.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from commtrace.capture.hooks import Hooks
from commtrace.capture.tracer import Tracer
from commtrace.integrations.dimensions import tell_dimension, tell_framework, tell_role


class ForwardWrapper(Protocol):
    """Makes a forward a span."""

    def wrap_forward(self, original: Callable[..., object], tell: Callable[[object], None]) -> Callable[..., object]:
        """Return ``original`` as a span; ``tell`` is called with the model before it."""


def hook(hooks: Hooks, tracer: Tracer, loop: ForwardWrapper) -> None:
    """Hook the class as soon as it is imported, or now if it has been."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def tell(model: object) -> None:
        if model not in known:
            known.add(model)
            _tell(tracer, model)

    def replace(module: ModuleType) -> None:
        hooks.replace(module.DistributedDataParallel, "forward", functools.partial(_wrap, loop, tell))

    hooks.when_imported("torch.nn.parallel.distributed", replace)


def _wrap(
    loop: ForwardWrapper, tell: Callable[[object], None], original: Callable[..., object]
) -> Callable[..., object]:
    return loop.wrap_forward(original, tell)


def _tell(tracer: Tracer, model: Any) -> None:
    group = model.process_group
    role = tell_role(tracer, group, "dp")
    tell_dimension(tracer, role, group.rank(), group.size())
    tell_framework(tracer, "DDP")
