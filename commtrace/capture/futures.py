"""Stalls of those who wait for a communication's future instead of its Work: ``work.get_future().wait()``.

A future is C++'s, shared by everything in torch that is asynchronous, and does not say whose it is. So each future that
a captured Work hands out is remembered while it lives; for every other one a wait costs a look into a dictionary.
Futures that are made of such a future (``then``, ``torch.futures.collect_all``) are not known: what waits for them
shows as work. With tensors on an accelerator nothing is told here, for a future's wait is then no wait of the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.clock import now_ns
from commtrace.capture.hooks import Hooks
from commtrace.capture.process_groups import ProcessGroupCapture
from commtrace.capture.tracer import Tracer

PART: Final = "capture of waits for futures"


def install(tracer: Tracer, process_groups: ProcessGroupCapture) -> Callable[[], None]:
    """Replace ``Work.get_future`` and the wait of futures; returns the function that puts the originals back."""
    import torch
    from torch.distributed import Work

    hooks = Hooks(PART, tracer)
    failed = hooks.failed
    # By id of the future: what it belongs to, and the reference that takes it out of here when it dies.
    known: dict[int, tuple[Any, weakref.ref[Any]]] = {}

    def handing_out(original: Any) -> Callable[..., Any]:
        def get_future(work: Any, /, *arguments: Any, **keywords: Any) -> Any:
            future = original(work, *arguments, **keywords)
            try:
                pending = process_groups.pending(work)
                if pending is not None:
                    remember(future, pending)
            except Exception as error:
                failed(error)
            return future

        return get_future

    def remember(future: Any, pending: Any) -> None:
        key = id(future)
        known[key] = (pending, weakref.ref(future, lambda _: known.pop(key, None)))

    def waiting(original: Any) -> Callable[..., Any]:
        blocked = tracer.blocked

        def wait(future: Any, /, *arguments: Any, **keywords: Any) -> Any:
            pending: Any = None
            start = 0
            try:
                ours = known.pop(id(future), None)
                if ours is not None and hooks.active:
                    pending = ours[0]
                    blocked[0] = pending.launch
                    start = now_ns()
            except Exception as error:
                failed(error)
            if not start:
                return original(future, *arguments, **keywords)
            try:
                result = original(future, *arguments, **keywords)
            finally:
                try:
                    blocked[0] = None
                except Exception as error:
                    failed(error)
            try:
                process_groups.waited_for_future(pending, start, now_ns())
            except Exception as error:
                failed(error)
            return result

        return wait

    def uninstall() -> None:
        hooks.restore()
        known.clear()

    try:
        for work_type in (Work, *Work.__subclasses__()):
            hooks.replace(work_type, "get_future", handing_out)
        hooks.replace(torch._C.Future, "wait", waiting)
    except BaseException:
        uninstall()
        raise
    return uninstall
