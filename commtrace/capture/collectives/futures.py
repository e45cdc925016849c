"""Stalls of those who wait for a communication's future instead of its Work: ``work.get_future().wait()``.

A future is C++'s, shared by everything in torch that is asynchronous, and does not say whose it is. So each future that
a captured Work hands out is remembered while it lives; for every other one a wait costs a look into a dictionary.
Futures that are made of such a future (``then``, ``torch.futures.collect_all``) are not known: what waits for them
shows as work. With tensors on an accelerator a future's wait is no wait of the host, and no stall is told here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.collectives.process_groups import Pending, ProcessGroupCapture, subclasses
from commtrace.capture.device.clock import Mark
from commtrace.capture.hooks import Hooks, installed
from commtrace.capture.tracer import Tracer

PART: Final = "capture of waits for futures"


def install(tracer: Tracer, process_groups: ProcessGroupCapture) -> Callable[[], None]:
    """Replace ``Work.get_future`` and the wait of futures; returns the function that puts the originals back."""
    return installed(FutureWaits(tracer, process_groups))


class FutureWaits:
    """The futures that captured Works have handed out, and the waits for them."""

    def __init__(self, tracer: Tracer, process_groups: ProcessGroupCapture) -> None:
        self._tracer = tracer
        self._process_groups = process_groups
        self._hooks = Hooks(PART, tracer)
        # By id of the future: what it belongs to, and the reference that takes it out of here when it dies.
        self._known: dict[int, tuple[Pending, weakref.ref[Any]]] = {}

    def install(self) -> None:
        """Replace ``get_future`` of every kind of Work, and the wait of futures."""
        import torch
        from torch.distributed import Work

        for work_type in (Work, *subclasses(Work)):
            self._hooks.replace(work_type, "get_future", self._handing_out)
        self._hooks.replace(torch._C.Future, "wait", self._waiting)

    def uninstall(self) -> None:
        """Put the originals back."""
        self._hooks.restore()
        self._known.clear()

    def _handing_out(self, original: Any) -> Callable[..., Any]:
        future_taken, remember, failed = self._process_groups.future_taken, self._remember, self._hooks.failed

        def get_future(work: Any, /, *arguments: Any, **keywords: Any) -> Any:
            pending: Pending | None = None
            try:
                pending = future_taken(work)
            except Exception as error:
                failed(error)
            future = original(work, *arguments, **keywords)
            try:
                if pending is not None:
                    remember(future, pending)
            except Exception as error:
                failed(error)
            return future

        return get_future

    def _remember(self, future: Any, pending: Pending) -> None:
        key, known = id(future), self._known
        known[key] = (pending, weakref.ref(future, lambda _: known.pop(key, None)))

    def _waiting(self, original: Any) -> Callable[..., Any]:
        known, hooks, failed, blocked = self._known, self._hooks, self._hooks.failed, self._tracer.blocked
        mark, waited_for = self._process_groups.mark, self._process_groups.waited_for_future

        def wait(future: Any, /, *arguments: Any, **keywords: Any) -> Any:
            pending: Pending | None = None
            start: Mark | None = None
            try:
                ours = known.pop(id(future), None)
                if ours is not None and hooks.active:
                    pending = ours[0]
                    blocked[0] = pending.launch
                    start = mark()
            except Exception as error:
                failed(error)
            if pending is None or start is None:
                return original(future, *arguments, **keywords)
            try:
                result = original(future, *arguments, **keywords)
            finally:
                try:
                    blocked[0] = None
                except Exception as error:
                    failed(error)
            try:
                waited_for(pending, start, mark())
            except Exception as error:
                failed(error)
            return result

        return wait
