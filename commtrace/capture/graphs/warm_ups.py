"""Warm-ups before the capture of CUDA graphs: real communication, and of no step."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from commtrace.capture.hooks import Arguments, Hooks, Keywords
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates

PART: Final = "capture of warm-ups of CUDA graphs"

WARM_UP: Final = "warm-up of CUDA graphs"
"""Name of the span of kind ``phase`` around a warm-up and the captures behind it."""


class WarmUps:
    """Set what runs inside of functions that warm up and capture apart from the step around it.

    They are those of torch, Transformer Engine and Megatron-core. A program that runs whole steps without a graph first
    trains in them: those are no warm-ups here.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._is_inside = False

    def install(self) -> None:
        wrap = self._hooks.around(self._begin, self._end)
        self._hooks.when_imported(
            "torch.cuda.graphs",
            lambda graphs: self._hooks.replace_function(graphs, "make_graphed_callables", wrap, "torch.cuda"),
        )
        # Of these two, callers may hold the outer function already: what it calls is looked up late.
        self._hooks.when_imported(
            "transformer_engine.pytorch.graph",
            lambda graph: self._hooks.replace(graph, "_make_graphed_callables", wrap),
        )
        self._hooks.when_imported("megatron.core.transformer.cuda_graphs", self._hook_megatron)

    def uninstall(self) -> None:
        self._hooks.restore()

    def _hook_megatron(self, cuda_graphs: ModuleType) -> None:
        wrap = self._hooks.around(self._begin, self._end)
        self._hooks.replace_method(cuda_graphs, "_CudagraphGlobalRecord", "create_cudagraphs", wrap)

    def _begin(self, _arguments: Arguments, _keywords: Keywords) -> tuple[Span, Coordinates] | None:
        if self._is_inside:  # one library's around another's
            return None
        self._is_inside = True
        tracer = self._tracer
        before = tracer.be_at(Coordinates())
        try:
            return tracer.enter(schema.PHASE, WARM_UP), before
        except BaseException:
            tracer.be_at(before)
            raise

    def _end(self, begun: tuple[Span, Coordinates], _result: object) -> None:
        span, before = begun
        self._is_inside = False
        self._tracer.leave(span)
        if self._tracer.coordinates.step == schema.NOT_APPLICABLE:  # no step began meanwhile
            self._tracer.be_at(before)
