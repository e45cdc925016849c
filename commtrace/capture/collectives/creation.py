"""Registers process groups when they are created, so that they are numbered in the same order on every member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.tracer import Tracer

PART: Final = "process group creation"
_CREATORS: Final = ("_update_default_pg", "_new_group_with_tag", "_register_pg_in_world")
"""Functions that torch's own code looks up in its module when it makes a group: replacing them reaches every caller.
``init_process_group`` passes the first one, ``split_group`` the last."""


def install(tracer: Tracer) -> Callable[[], None]:
    """Watch torch's creation of groups; returns the function that puts torch's own functions back."""
    from torch.distributed import distributed_c10d

    replaced: list[tuple[str, Any, Any]] = []

    def uninstall() -> None:
        for name, original, replacement in replaced:
            if getattr(distributed_c10d, name) is replacement:
                setattr(distributed_c10d, name, original)

    try:
        for name in _CREATORS:
            original = getattr(distributed_c10d, name, None)
            if original is not None:
                replacement = _watched(original, tracer)
                replaced.append((name, original, replacement))
                setattr(distributed_c10d, name, replacement)
        tracer.groups.register_known_groups()
    except BaseException:
        uninstall()
        raise
    return uninstall


def _watched(original: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    def create(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        try:
            tracer.groups.register_known_groups()
        except Exception as error:
            tracer.failed(PART, error)
        return result

    return create
