"""Breaks one line of commtrace at a time: the line of a hook raises what it is told to raise, when training gets there.

Nothing is listed by hand. :func:`places` runs a training once and notes every line of commtrace that it executes, with
the lines of commtrace through which it got there; :func:`broken` makes one of these lines raise.

Two sorts of lines are told from the code itself:

* a line that *cannot* fail: its instructions only move references (``launch = None``, ``return work``, ``try:``);
* a line that *hands on* to what training called (``original(…)``): what is raised there is training's own, and must
  reach training as it is.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import commtrace
from commtrace.capture.collectives.dispatcher import Kernel
from commtrace.capture.collectives.operator_calls import OperatorCall

SOURCES: Final = str(Path(commtrace.__file__).parent)

HANDS_ON: Final = frozenset({"__enter__", "__exit__", "original", "overload"})
"""The names by which hooks call what stands behind them."""

_MOVES: Final = frozenset({
    "CACHE", "COPY", "COPY_FREE_VARS", "DELETE_FAST", "EXTENDED_ARG", "IS_OP", "JUMP_BACKWARD",
    "JUMP_FORWARD", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "MAKE_CELL", "NOP", "POP_EXCEPT",
    "POP_TOP", "PUSH_EXC_INFO", "PUSH_NULL",
        "RAISE_VARARGS", "RERAISE", "RESUME", "RETURN_CONST", "RETURN_GENERATOR", "RETURN_VALUE",
    "STORE_DEREF", "STORE_FAST", "SWAP", "YIELD_VALUE",
    "CALL_INTRINSIC_1",
    "POP_BLOCK", "DUP_TOP", "ROT_TWO", "ROT_THREE", "ROT_FOUR", "SETUP_FINALLY", "GEN_START",
})  # fmt: skip
"""Instructions that cannot raise; the last line is of Python 3.10, the one before ends generators of 3.12. Tests of
truth are those of None and of flags."""
_TORCH_KNOWS: Final = frozenset({"is_compiling", "_current_graph_task_id"})
"""Questions to torch that hooks ask before anything else: torch.compile must not see what stands around them."""

_CALLERS: Final = frozenset({Kernel.call.__code__, OperatorCall.__call__.__code__})

_TESTS: Final = ("POP_JUMP", "JUMP_IF", "JUMP_ABSOLUTE")


class Sort(Enum):
    """What an exception in a line means."""

    FAILS = "a failure of commtrace"
    CANNOT_FAIL = "impossible"
    HANDS_ON = "training's own exception"


class Place(NamedTuple):
    """A line, as a path of (function, line) from where training called commtrace down to the line itself."""

    path: tuple[tuple[CodeType, int], ...]

    @property
    def code(self) -> CodeType:
        return self.path[-1][0]

    @property
    def line(self) -> int:
        return self.path[-1][1]

    @property
    def sort(self) -> Sort:
        sort = sort_of(self.code, self.line)
        if sort is Sort.HANDS_ON and any(sort_of(code, line) is not Sort.HANDS_ON for code, line in self.path[:-1]):
            return Sort.FAILS  # a hook of ours that calls what is replaced
        return sort

    def __str__(self) -> str:
        return " → ".join(
            f"{code.co_filename.removeprefix(SOURCES + '/')}:{line} {code.co_name}" for code, line in self.path
        )


def places(job: Callable[[], object]) -> list[Place]:
    """Every line of commtrace that the job executes, in the order in which it gets there first."""
    found: dict[Place, None] = {}

    def note(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            found.setdefault(_place(frame))
        return note

    with _tracing(lambda frame, _event, _argument: note if _is_ours(frame.f_code) else None):
        job()
    return list(found)


class Fault:
    """What is raised, and whether it has been."""

    def __init__(self, place: Place, error: BaseException) -> None:
        self.place = place
        self.error = error
        self.raised = False


@contextmanager
def broken(place: Place, error: BaseException) -> Iterator[Fault]:
    """Within, the line raises the error the first time that training gets there."""
    fault = Fault(place, error)
    code, line = place.path[-1]

    def check(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and frame.f_lineno == line and not fault.raised and _place(frame) == place:
            fault.raised = True
            raise error
        return check

    try:
        with _tracing(lambda frame, _event, _argument: check if frame.f_code is code else None):
            yield fault
    finally:
        _let_go(error)


@contextmanager
def interrupted(place: Place, handler: Callable[[], None]) -> Iterator[None]:
    """Within, the handler is called before the line the first time that training gets there, as a signal's would be."""
    code, line = place.path[-1]
    waiting = [handler]

    def check(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and frame.f_lineno == line and waiting and _place(frame) == place:
            waiting.pop()()
        return check

    with _tracing(lambda frame, _event, _argument: check if frame.f_code is code else None):
        yield


def _let_go(error: BaseException) -> None:
    """Of what was going on when it was raised: whoever keeps the error (torch does, of a backward that it ended) would
    keep the models of the job as well, and tests that look for all models would find them."""
    seen: list[BaseException] = []
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is not None and one not in seen:
            seen.append(one)
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            rest += [one.__context__, one.__cause__]


@contextmanager
def _tracing(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)


_TRACING: Final[CodeType] = inspect.unwrap(_tracing).__code__


def _is_ours(code: CodeType) -> bool:
    # The body of a module or class runs when it is imported: that is no hook. Two others call one, and guard nothing.
    is_function = code.co_flags & 0x1 != 0
    return code.co_filename.startswith(SOURCES) and is_function and code not in _CALLERS


def _place(frame: FrameType) -> Place:
    path = []
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not _TRACING:
        if _is_ours(outer.f_code):
            path.append((outer.f_code, outer.f_lineno))
        outer = outer.f_back
    return Place(tuple(reversed(path)))


@functools.cache
def sort_of(code: CodeType, line: int) -> Sort:
    """What an exception in this line of this function means."""
    if line in _lines_that_call(code.co_filename, HANDS_ON):
        return Sort.HANDS_ON
    if line in _lines_that_call(code.co_filename, _TORCH_KNOWS):
        return Sort.CANNOT_FAIL
    names = _instructions(code).get(line, set())
    # ``except Exception:`` looks up the name of the type.
    safe = _MOVES | {"CHECK_EXC_MATCH", "LOAD_GLOBAL"} if "CHECK_EXC_MATCH" in names else _MOVES
    moves = all(name in safe or name.startswith(_TESTS) for name in names)
    return Sort.CANNOT_FAIL if moves else Sort.FAILS


@functools.cache
def _instructions(code: CodeType) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    current = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.starts_line is not None:
            current = int(instruction.starts_line)
        found.setdefault(current, set()).add(instruction.opname)
    return found


@functools.cache
def _lines_that_call(file: str, names: frozenset[str]) -> frozenset[int]:
    lines = set[int]()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Call) and _name(node.func) in names:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
