"""Intercept calls of torch's operators from Python, at a tenth of what a kernel in its dispatcher costs.

``torch.ops._c10d_functional.all_reduce(…)`` and the ``.default`` of it, which compiled graphs call, hand on to a
function of C++ in their attribute ``_op`` (torch/_ops.py). What stands there while a recording runs is put back exactly
when it ends, whatever other threads do. Calls of C++ do not pass here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commtrace.capture.collectives.dispatcher import Capture, Original
from commtrace.capture.collectives.operations import Arguments

if TYPE_CHECKING:
    from torch._ops import OpOverload


class OperatorCall:
    """Stands for the function of C++, as ``Operator`` of the native part does: an operator's hash is its ``_op``'s."""

    def __init__(self, original: Original, capture: Capture | None) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.capture = capture

    def __call__(self, /, *arguments: Any, **keywords: Any) -> object:
        capture = self.capture
        return self.original(*arguments, **keywords) if capture is None else capture(self.original, arguments, keywords)

    def __hash__(self) -> int:
        return hash(self.original)


class OperatorCalls:
    """The operators whose calls one recording gets; false while there are none. ``core`` is the native part's."""

    def __init__(self, core: Any = None) -> None:
        self._core = core
        self._replaced: list[tuple[Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def take(self, overload: OpOverload, capture: Capture, **common: int) -> None:
        """Have ``capture`` get the calls of an overload, and of its operator called without naming an overload.

        Those that the native part records itself, it does not get: ``common`` says what they are, in the arguments of
        its ``Operator``.
        """
        for operator in (overload, overload._overloadpacket):
            call = self._standing_for(operator._op, capture, common)
            self._replaced.append((operator, call))
            _tell_the_compiler_of_scripts(call)
            operator._op = call

    def _standing_for(self, original: Original, capture: Capture, common: dict[str, int]) -> Any:
        if self._core is None:
            return OperatorCall(original, capture)
        call = self._core.Operator(original, capture, **common)
        return functools.update_wrapper(call, original)

    def release(self) -> None:
        """Put every original back, except where other code has replaced ours. Can be called again."""
        for operator, call in reversed(self._replaced):
            call.capture = None  # A script may have kept it.
            if operator._op is call:
                operator._op = call.original
            _builtins().pop(id(call), None)
        self._replaced.clear()


def by_position(overload: OpOverload, arguments: Arguments, keywords: dict[str, Any]) -> Arguments:
    """Return the arguments of a call by their position in the operator's schema; None for missing ones."""
    names = [argument.name for argument in overload._schema.arguments[len(arguments) :]]
    return arguments + tuple(keywords.get(name) for name in names)


def what_reaches_kernels() -> Callable[[object], bool]:
    """Return a function that tells whether a call with a tensor, or a list of them, does now what the operator does.

    If not, it is traced, or goes first to a mode or to a class of tensors, which calls the operator again.
    """
    import torch
    from torch._C import DispatchKey, _dispatch_tls_is_dispatch_key_excluded, _has_torch_function_unary

    num_modes, python, tensor_type = torch._C._len_torch_dispatch_stack, DispatchKey.Python, torch.Tensor
    no_class = tensor_type.__torch_dispatch__

    def reaches_kernels(value: Any) -> bool:
        if type(value) is list:
            return all(map(reaches_kernels, value))
        if _has_torch_function_unary(value):  # a class of tensors handles functions, or a mode does
            return False
        if num_modes() and not _dispatch_tls_is_dispatch_key_excluded(python):
            return False
        kind = type(value)
        if kind is not tensor_type and kind.__torch_dispatch__ is not no_class:
            return False
        return not value.is_meta

    return reaches_kernels


def _builtins() -> dict[int, str]:
    import torch.jit._builtins

    table: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    return table


def _tell_the_compiler_of_scripts(call: Any) -> None:
    # torch.jit.script looks up an operator by the identity of its ``_op``.
    table = _builtins()
    name = table.get(id(call.original))
    if name is not None:
        table[id(call)] = name
