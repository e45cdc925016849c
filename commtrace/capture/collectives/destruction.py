"""Before a process group is destroyed, the threads of its backend are let do what they need the GIL for.

They call back, and drop their references to tensors, a little later than the wait for the operation returns. The
destructor of ``ProcessGroupGloo`` joins them. Who holds the last reference to a group runs its destructor: where that
is the reducer of a ``DistributedDataParallel`` that outlives ``destroy_process_group``, torch does it with the GIL
held, and a thread that wants the GIL then hangs the process for ever. torch alone hangs there as well, with a thread
that drops the last reference to a tensor of the script's: the pause is for such threads, of which nobody can know. It
is made only where there has been such a reducer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.hooks import Hooks
from commtrace.capture.tracer import Tracer

PART: Final = "waiting for callbacks before process groups are destroyed"
LONGEST_SECONDS: Final = 1.0
"""A callback is late by as long as a thread of the backend has to wait for a core. One of a communication that never
ends does not come: that is waited for once."""
PAUSE_SECONDS: Final = 0.01


def install(tracer: Tracer, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Watch groups being destroyed; returns the function that takes the hooks out.

    Args:
        tracer: of the process.
        before: called before the default group is destroyed, while its store is still there.
    """
    import torch.distributed
    from torch.distributed import ProcessGroup, distributed_c10d

    hooks = Hooks(PART, tracer)
    completions = tracer.completions
    has_waited = is_inside = False

    def is_subgroup(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the group is one of several, while the default group stays."""
        group, default = args[0] if args else kwargs.get("group"), distributed_c10d._world.default_pg
        return group is not None and default is not None and group is not default and group.size() < default.size()

    def settle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        nonlocal has_waited, is_inside
        if is_inside:
            return None
        if not is_subgroup(args, kwargs):
            before()
        if completions.unsettled and not has_waited:
            completions.settle(LONGEST_SECONDS)
        has_waited = completions.unsettled
        if completions.saw_temporaries:
            time.sleep(PAUSE_SECONDS)
        is_inside = True
        return True

    def leave(_begun: bool, _result: Any) -> None:
        nonlocal is_inside
        is_inside = False

    watched = hooks.around(settle, leave)
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
