"""Install hooks: replacements that can be restored, with failures that never reach training, and out of torch.compile.

>>> hooks = Hooks("deepspeed", tracer)                                    # doctest: +SKIP
>>> hooks.when_imported("deepspeed.runtime.engine", hook_engine)          # doctest: +SKIP
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CellType, ModuleType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import wrapt

from commtrace import capture
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.recording.compile_safe import RAISED as RAISED
from commtrace.recording.compile_safe import do_nothing, wrap_with_callbacks, wrapper_codes
from commtrace.recording.installation import PAGE

Function: TypeAlias = Callable[..., Any]
"""A function of torch, of a framework or of the script."""

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
"""What such a function is called with."""

Wrap: TypeAlias = Callable[[Any], Any]
"""Turns an original into its replacement."""

_Begun = TypeVar("_Begun")


class InstalledPart(Protocol):
    def install(self) -> None:
        """Install the hooks, or wait for the modules that they belong in."""

    def uninstall(self) -> None:
        """Put every original back. Can be called again after an interruption."""


def installed(part: InstalledPart) -> Callable[[], None]:
    """Install a part, wholly or not at all; return the function that takes it out."""
    try:
        part.install()
        return part.uninstall
    except BaseException:
        part.uninstall()
        raise


class Hooks:
    """The replacements of one part of commtrace; once ``active`` is False, every wrapper passes calls through."""

    def __init__(self, part: str, tracer: Tracer) -> None:
        self.active = True
        self._part = part
        self._tracer = tracer
        self._attributes: list[tuple[object, str, object, object]] = []
        self._items: list[tuple[dict[object, object], object, object, object]] = []
        self._cells: list[tuple[CellType, object, object]] = []
        self._waiting: list[tuple[str, Callable[[ModuleType], None]]] = []

    def when_imported(self, module: str, hook: Callable[[ModuleType], None]) -> None:
        """Call ``hook`` with the module as soon as it is imported, or now."""
        waiting = functools.partial(self._on_import, hook)
        self._waiting.append((module, waiting))
        wrapt.register_post_import_hook(waiting, module)

    def replace(self, owner: object, name: str, wrap: Wrap) -> None:
        """Replace an attribute of a class or module, if this version has it."""
        original = vars(owner).get(name)
        if original is None:
            return
        binding = type(original) if isinstance(original, (staticmethod, classmethod)) else None
        wrapper = wrap(original if binding is None else original.__func__)
        replacement = wrapper if binding is None else binding(wrapper)
        self._attributes.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def replace_required(self, owner: type | ModuleType, name: str, wrap: Wrap) -> None:
        """Replace an attribute that every tried version has; report a version without it."""
        if vars(owner).get(name) is None:
            where = getattr(owner, "__qualname__", owner.__name__)
            self._tracer.guard.noticed(
                f"{self._part}: {where} has no {name} in this version: what commtrace records there is missing. "
                f"The tested versions are in {PAGE}."
            )
            return
        self.replace(owner, name, wrap)

    def replace_method(self, module: ModuleType, owner: str, name: str, wrap: Wrap) -> None:
        holder = getattr(module, owner, None)
        if holder is not None:
            self.replace(holder, name, wrap)

    def replace_method_when_imported(self, module: str, owner: str, name: str, wrap: Wrap) -> None:
        self.when_imported(module, lambda imported: self.replace_method(imported, owner, name, wrap))

    def replace_function(self, module: ModuleType, name: str, wrap: Wrap, *also_in: str) -> None:
        """Replace a function of a module and of ``also_in``; a decorated one also where its name is bound already."""
        function = vars(module).get(name)
        cell = None if function is None else _decorated(function)
        if cell is not None:
            original = cell.cell_contents
            replacement = wrap(original)
            self._cells.append((cell, original, replacement))
            cell.cell_contents = replacement
            return
        for holder in (
            module,
            *(sys.modules[name_of_module] for name_of_module in also_in if name_of_module in sys.modules),
        ):
            if function is not None and vars(holder).get(name) is function:
                self.replace(holder, name, wrap)

    def owners_of(self, name: str) -> list[object]:
        return [owner for owner, replaced, _, _ in self._attributes if replaced == name]

    def replace_item(self, table: dict[object, object], key: object, wrap: Wrap) -> None:
        original = table[key]
        replacement = wrap(original)
        self._items.append((table, key, original, replacement))
        table[key] = replacement

    def restore(self) -> None:
        """Put every original back, except where other code has replaced ours."""
        self.active = False
        while self._waiting:
            _wait_no_more(*self._waiting[-1])
            self._waiting.pop()
        for owner, name, original, replacement in reversed(self._attributes):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        for cell, original, replacement in reversed(self._cells):
            if cell.cell_contents is replacement:
                cell.cell_contents = original
        for table, key, original, replacement in reversed(self._items):
            if table.get(key) is replacement:
                table[key] = original
        # Forgotten last: an interrupted restore begins again.
        self._attributes.clear()
        self._cells.clear()
        self._items.clear()

    def around(
        self, begin: Callable[[Arguments, Keywords], _Begun | None], end: Callable[[_Begun, Any], None] = do_nothing
    ) -> Callable[[Function], Function]:
        """Return a wrapper that calls ``begin`` before a function and ``end`` after it; failures switch the part off.

        ``begin`` gets positional and keyword arguments; unless it returns None, ``end`` gets its result, and that of
        the function or ``RAISED``, also when the part is off. ``begin`` opens spans last, so that none stays open.
        """
        import torch

        return functools.partial(
            wrap_with_callbacks, is_compiling=torch.compiler.is_dynamo_compiling, part=self, begin=begin, end=end
        )

    def failed(self, error: Exception) -> None:
        self.active = False
        self._tracer.failed(self._part, error)

    def guarded(self, action: Callable[..., object], *arguments: object) -> Any:
        """Return the result of ``action``; None if it fails, which switches the part off."""
        try:
            return action(*arguments)
        except Exception as error:
            self.failed(error)
            return None

    def enter(self, kind: int, name: str, microbatch: int = -1, chunk: int = -1, stage: int = -1) -> Span | None:
        span: Span | None = self.guarded(self._tracer.enter, kind, name, microbatch, chunk, stage)
        return span

    def leave(self, span: Span | None) -> None:
        """End a phase, if it was begun, also when the part is off by now."""
        if span is not None:
            self.guarded(self._tracer.leave, span)

    def timed(self, kind: int, name: str) -> Wrap:
        return self.around(lambda args, kwargs: self._tracer.enter(kind, name), self.end)

    def end(self, span: Span, _result: object) -> None:
        self._tracer.leave(span)

    def _on_import(self, hook: Callable[[ModuleType], None], module: ModuleType) -> None:
        if self.active:
            self.guarded(hook, module)


def _decorated(function: object) -> CellType | None:
    """Return the cell in which a decorator keeps the function that it decorates, if there is one."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return None
    return next((cell for cell in getattr(function, "__closure__", None) or () if _holds(cell, inner)), None)


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _wait_no_more(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Take a hook of a module that was never imported out of wrapt's table; in an unknown version it stays, inert."""
    importer: Any = sys.modules.get("wrapt.importer")
    table = getattr(importer, "_post_import_hooks", None)
    lock = getattr(importer, "_post_import_hooks_lock", None)
    if not isinstance(table, dict) or lock is None:
        return
    with lock:
        waiting = table.get(module)
        if not isinstance(waiting, list):
            return
        if hook in waiting:
            waiting.remove(hook)
        if not waiting:
            del table[module]


COMPILER: Final = "keeping torch.compile out of capture"


def keep_compiler_out(tracer: Tracer) -> Callable[[], None]:
    """Put capture's files on Dynamo's list when it is imported; return the function that takes them off."""
    # Traced, they would keep the numbers and times of the trace.
    hooks = Hooks(COMPILER, tracer)
    taken_off: list[Callable[[], None]] = []

    def uninstall() -> None:
        hooks.restore()
        while taken_off:
            taken_off.pop()()

    try:
        hooks.when_imported("torch._dynamo.trace_rules", lambda rules: taken_off.append(_skip_own_files(rules)))
        hooks.when_imported("torch._dynamo.eval_frame", _skip_wrappers)
        return uninstall
    except BaseException:
        uninstall()
        raise


def _skip_wrappers(frames: ModuleType) -> None:
    for code in wrapper_codes():
        frames.skip_code(code)


def _skip_own_files(rules: ModuleType) -> Callable[[], None]:
    names = vars(rules)
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
