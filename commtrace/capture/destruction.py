"""Before a process group is destroyed, completion callbacks that are about to run are let run.

A backend calls back on a thread of its own, which needs the GIL for it, and a little later than the wait for the
operation returns. The destructor of ``ProcessGroupGloo`` joins that thread. Who holds the last reference to a group
runs its destructor: where that is the reducer of a ``DistributedDataParallel`` that outlives
``destroy_process_group``, torch does it with the GIL held, and a callback that has not run by then hangs the process
for ever. (torch alone can hang there in the same way, with a thread that drops the last reference to a tensor.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.hooks import Hooks
from commtrace.capture.tracer import Tracer

PART: Final = "waiting for callbacks before process groups are destroyed"
LONGEST_SECONDS: Final = 1.0
"""A callback is late by as long as a thread of the backend has to wait for a core. One of a communication that never
ends does not come: that is waited for once."""


def install(tracer: Tracer) -> Callable[[], None]:
    """Watch groups being destroyed; returns the function that takes the hooks out."""
    import torch.distributed
    from torch.distributed import ProcessGroup, distributed_c10d

    hooks = Hooks(PART, tracer)
    completions = tracer.completions
    has_waited = False

    def wait_for_callbacks(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        nonlocal has_waited
        if completions.pending and not has_waited:
            completions.wait(LONGEST_SECONDS)
        has_waited = completions.pending

    watched = hooks.around(wait_for_callbacks, lambda begun, result: None)
    restore = hooks.restore
    try:
        # The method is what destroy_process_group calls since torch 2.5, however a script has bound that.
        hooks.replace(ProcessGroup, "shutdown", watched)
        for owner in (distributed_c10d, torch.distributed):
            hooks.replace(owner, "destroy_process_group", watched)
        return restore
    except BaseException:
        restore()
        raise
