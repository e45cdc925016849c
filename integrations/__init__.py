"""One module per training framework, installed when, and only when, its framework is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commtrace.capture.tracer import Tracer
from commtrace.config import Config


def _megatron(tracer: Tracer) -> Callable[[], None]:
    from commtrace.integrations import megatron

    return megatron.install(tracer)


def _deepspeed(tracer: Tracer) -> Callable[[], None]:
    from commtrace.integrations import deepspeed

    return deepspeed.install(tracer)


def _pipelining(tracer: Tracer) -> Callable[[], None]:
    from commtrace.integrations import pipelining

    return pipelining.install(tracer)


def _recompute(tracer: Tracer) -> Callable[[], None]:
    from commtrace.integrations import recompute

    return recompute.install(tracer)


def _loop(tracer: Tracer) -> Callable[[], None]:
    from commtrace.integrations import loop

    return loop.install(tracer)


def _trainers(tracer: Tracer) -> Callable[[], None]:
    from commtrace.integrations import loop

    return loop.install_numbers(tracer)


def told_layout(config: Config) -> tuple[tuple[str, Callable[[Tracer], Callable[[], None]]], ...]:
    """Return the installer of the layout that the user tells, with its name; empty without one."""
    sizes = config.layout_sizes
    if not sizes:
        return ()

    def install(tracer: Tracer) -> Callable[[], None]:
        from commtrace.integrations import layout

        return layout.install(tracer, sizes)

    return (("the layout", install),)


INTEGRATIONS: Final = (
    ("megatron", _megatron),
    ("deepspeed", _deepspeed),
    ("pipelining", _pipelining),
    ("recompute", _recompute),
    ("training loops", _loop),
    ("step numbers of trainers", _trainers),
)
"""Name and installer of every integration; an installer returns what takes it out again."""
