"""Integrate ``DistributedDataParallel``: its forward is a span, its process group has the role dp."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from commtrace.capture.hooks import Hooks
from commtrace.capture.tracer import Tracer
from commtrace.integrations.dimensions import add_dimension, add_framework, set_role_if_unknown


class ForwardWrapper(Protocol):
    """A maker of forward spans."""

    def wrap_forward(
        self, original: Callable[..., object], announce: Callable[[object], None]
    ) -> Callable[..., object]:
        """Return ``original`` as a span; ``announce`` is called with the model before it."""


def hook(hooks: Hooks, tracer: Tracer, loop: ForwardWrapper) -> None:
    """Hook the class as soon as it is imported, or now."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def announce(model: object) -> None:
        if model not in known:
            known.add(model)
            _announce(tracer, model)

    def replace(module: ModuleType) -> None:
        hooks.replace(module.DistributedDataParallel, "forward", lambda original: loop.wrap_forward(original, announce))

    hooks.when_imported("torch.nn.parallel.distributed", replace)


def _announce(tracer: Tracer, model: Any) -> None:
    group = model.process_group
    role = set_role_if_unknown(tracer, group, "dp")
    add_dimension(tracer, role, group.rank(), group.size())
    add_framework(tracer, "DDP")
