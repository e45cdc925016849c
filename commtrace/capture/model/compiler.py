"""Keep torch.compile out of capture's own functions: traced, they would keep the numbers and times of the trace."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import wrapt

from commtrace import capture
from commtrace._compile_safe import wrapper_code
from commtrace.capture.hooks import Hooks
from commtrace.capture.tracer import Tracer

PART: Final = "keeping torch.compile out of capture"


def install(tracer: Tracer) -> Callable[[], None]:
    """Put capture's files on Dynamo's list when it is imported; return the function that takes them off."""
    hooks = Hooks(PART, tracer)
    taken_off: list[Callable[[], None]] = []

    def uninstall() -> None:
        hooks.restore()
        while taken_off:
            taken_off.pop()()

    try:
        hooks.when_imported("torch._dynamo.trace_rules", lambda rules: taken_off.append(_skip_own_files(rules)))
        hooks.when_imported("torch._dynamo.eval_frame", lambda frames: frames.skip_code(wrapper_code()))
        return uninstall
    except BaseException:
        uninstall()
        raise


def _skip_own_files(rules: ModuleType) -> Callable[[], None]:
    names: dict[str, Any] = vars(rules)
    skipped: list[str] = names["SKIP_DIRS"]
    before = list(skipped)
    names["add"](capture.__name__)
    added = [entry for entry in skipped if entry not in before]

    def take_off() -> None:
        for entry in added:
            if entry in skipped:
                skipped.remove(entry)
        names["_recompile_re"]()

    return take_off


def leave_to_python(*functions: object) -> None:
    """Have ``torch.compile`` compile no frames of these: after a graph break it would take them for the model's."""
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]

    def skip(eval_frame: ModuleType) -> None:
        for code in codes:
            eval_frame.skip_code(code)

    wrapt.register_post_import_hook(skip, "torch._dynamo.eval_frame")
