"""Replays of CUDA graphs as spans, by the methods of ``torch.cuda.CUDAGraph``; no graph is changed.

torch ≥ 2.14 has hooks of graphs, too. These methods are Python's in every version that was tried: one way serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from commtrace.capture.device.clock import Mark, now_ns
from commtrace.capture.graphs.contents import RecordedGraph
from commtrace.capture.graphs.stamps import StampingOfGraphs
from commtrace.capture.hooks import RAISED, Arguments, Hooks, Keywords
from commtrace.capture.records import Span, graph_rows, replay_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

if TYPE_CHECKING:
    import torch

PART: Final = "capture of CUDA graphs"

EARLIER_GRAPHS: Final = "CUDA graphs captured before the recording began"
"""A path that is noted at their first replay: what they contain was not seen."""

_OPTIMIZER: Final = schema.KINDS[schema.OPTIMIZER]

_Ended: TypeAlias = "tuple[torch.cuda.CUDAGraph, RecordedGraph | None]"


class _OpenReplay(NamedTuple):
    contents: RecordedGraph
    phase: Span | None  # of the host
    start: Mark | None  # None where nothing is recorded


class GraphReplays:
    """Note what graphs contain as they are captured, and record each replay of them.

    ``graph_type`` stands for ``torch.cuda.CUDAGraph``.
    """

    def __init__(
        self, tracer: Tracer, graph_type: type | None = None, stamping: StampingOfGraphs | None = None
    ) -> None:
        self._tracer = tracer
        self._stamping = stamping
        self._graph_type = graph_type
        self._hooks = Hooks(PART, tracer)
        self._is_grad_enabled: Callable[[], bool] = lambda: True  # torch's own
        # Those of graphs that are destroyed go with them.
        self._contents: WeakKeyDictionary[torch.cuda.CUDAGraph, RecordedGraph] = WeakKeyDictionary()

    def install(self) -> None:
        import torch

        graph_type = self._graph_type or torch.cuda.CUDAGraph
        self._is_grad_enabled = torch.is_grad_enabled
        replace, around = self._hooks.replace_required, self._hooks.around
        replace(graph_type, "capture_begin", around(self._capture_begins, self._capture_begun))
        replace(graph_type, "capture_end", around(self._capture_ends, self._capture_ended))
        replace(graph_type, "replay", around(self._about_to_replay, self._replayed))
        self._tracer.captures.are_followed = True

    def uninstall(self) -> None:
        """Put the originals back. A capture that is going on is not known any more."""
        self._hooks.restore()
        self._tracer.captures.forget()
        if self._stamping is not None:
            self._stamping.close()
        self._contents.clear()

    def _capture_begins(self, arguments: Arguments, _keywords: Keywords) -> torch.cuda.CUDAGraph:
        if self._stamping is not None:
            self._stamping.prepare(is_alone=not self._tracer.captures.open)
        graph: torch.cuda.CUDAGraph = arguments[0]
        return graph

    def _capture_begun(self, graph: torch.cuda.CUDAGraph, result: object) -> None:
        if result is RAISED:
            return
        self._contents.pop(graph, None)  # of an earlier capture
        begun = self._tracer.captures.begin(graph)
        if self._stamping is not None:
            begun.stamps = self._stamping.begin(begun.id)
        contents = self._tracer.captures.current()
        if contents is not None:
            for span in self._tracer.open_computing_spans():
                contents.passed(span.kind)

    def _capture_ends(self, arguments: Arguments, _keywords: Keywords) -> _Ended:
        # Before the original: a stream is no longer captured after it, also if it raises.
        graph = arguments[0]
        contents = self._tracer.captures.end(graph)
        if contents is not None and contents.stamps is not None:
            contents.stamps.complete()
        return graph, contents

    def _capture_ended(self, ended: _Ended, result: object) -> None:
        graph, contents = ended
        if contents is not None and contents.stamps is not None and result is RAISED:
            contents.stamps.abandon()
        if contents is not None and result is not RAISED:
            contents.close()
            self._keep(graph, contents)

    def _keep(self, graph: torch.cuda.CUDAGraph, contents: RecordedGraph) -> None:
        self._contents[graph] = contents
        self._tracer.append((graph_rows, schema.MARK, contents, now_ns()))

    def _about_to_replay(self, arguments: Arguments, _keywords: Keywords) -> _OpenReplay:
        graph = arguments[0]
        tracer, contents = self._tracer, self._contents.get(graph)
        if contents is None:
            contents = RecordedGraph(is_known=False)
            self._keep(graph, contents)
            tracer.untraced_paths.add(EARLIER_GRAPHS)
        phase = next(tracer.open_computing_spans(), None)
        if phase is None and self._is_grad_enabled() and contents.phases != _OPTIMIZER:
            tracer.steps.work_begins()
        start = tracer.clock.mark() if tracer.recording else None
        if start is not None and contents.is_stamped and contents.stamps is not None:
            contents.stamps.expect(contents.num_replays)  # before the launch: its times may be read before that returns
        return _OpenReplay(contents, phase, start)

    def _replayed(self, replay: _OpenReplay, result: object) -> None:
        contents, phase, start = replay
        tracer = self._tracer
        outer = tracer.captures.current() if tracer.captures.open else None
        if contents.stamps is not None and (result is RAISED or outer is not None):
            contents.stamps.expect_not(contents.num_replays)
        if result is RAISED:
            return
        if outer is not None:  # it has become a part of a graph that is captured now
            outer.include(contents)
            return
        number, firsts = contents.replayed()
        if start is None:
            return
        end = tracer.clock.mark()
        if phase is None:
            tracer.replayed(end)
        else:
            tracer.last_mark = end
        name = contents.phases if phase is None else schema.KINDS[phase.kind]
        tracer.append((
            replay_rows, schema.REPLAY, contents, number, name, tracer.coordinates, tracer.clock, start, end, firsts,
            contents.take_ids(),
        ))  # fmt: skip
