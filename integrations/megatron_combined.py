"""Captures Megatron's combined steps: one microbatch's forward and another one's backward, interleaved layer by layer.

With ``overlap_moe_expert_parallel_comm`` one function runs both. There is a span of each, from the begin of the two to
their end: the forward lies inside the backward, and the time of both counts as forward. What is communicated has the
place of what issued it: nodes that run backward have the backward's microbatch and chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, NamedTuple

from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Coordinates, Span
from commtrace.capture.tracer import Tracer

_MESSAGES: Final = ("pre_forward", "pre_backward", "post_forward", "post_backward")
"""Arguments of a combined step: functions that send to other stages, and receive."""


class Combined(NamedTuple):
    """The spans that a combined step opens.

    Attributes:
        spans: in this order.
        backward: where its backward is in the schedule; None without one.
    """

    spans: list[Span]
    backward: Coordinates | None


class CombinedSteps:
    """Hooks around combined steps and the nodes that they run.

    Args:
        tracer: gets the place of the nodes.
        hooks: of the integration.
        open_spans: opens the spans of a step, from its arguments.
    """

    def __init__(self, tracer: Tracer, hooks: Hooks, open_spans: Callable[[Callable[[str], Any]], Combined]) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._open_spans = open_spans
        self._backward: Coordinates | None = None

    def hook_steps(self, module: ModuleType, argument_getter: Callable[[Callable[..., Any]], Any]) -> None:
        """Hook ``megatron.core.pipeline_parallel.combined_1f1b``."""

        def wrap(original: Callable[..., object]) -> Callable[..., object]:
            argument = argument_getter(original)

            def begin(args: tuple[object, ...], kwargs: dict[str, Any]) -> Combined:
                around = self._tracer.coordinates
                # These are the arguments that the step will get: it passes the functions by keyword.
                for name in _MESSAGES:
                    if kwargs.get(name) is not None:
                        kwargs[name] = self._at(lambda: around, kwargs[name])
                combined = self._open_spans(lambda name: argument(args, kwargs, name))
                self._backward = combined.backward
                return combined

            return self._hooks.around(begin, self._end)(original)

        self._hooks.replace(module, "combined_forward_backward_step", wrap)

    def _end(self, combined: Combined, _result: object) -> None:
        self._backward = None
        for span in reversed(combined.spans):
            self._tracer.leave(span)

    def hook_nodes(self, module: ModuleType) -> None:
        """Hook ``megatron.core.pipeline_parallel.utils``, for what a node's backward issues."""
        self._hooks.replace_method(module, "ScheduleNode", "backward", lambda original: self._at(self._place, original))

    def _place(self) -> Coordinates | None:
        return self._backward

    def _at(self, place: Callable[[], Coordinates | None], original: Callable[..., object]) -> Callable[..., Any]:
        """Return ``original``, run at another place in the schedule, if there is one."""
        tracer = self._tracer

        def begin(_args: tuple[object, ...], _kwargs: dict[str, object]) -> Coordinates | None:
            there = place()
            return None if there is None else tracer.be_at(there)

        def end(before: Coordinates, _result: object) -> None:
            tracer.be_at(before)

        return self._hooks.around(begin, end)(original)
