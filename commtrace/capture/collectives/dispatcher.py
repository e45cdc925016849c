"""Register kernels of ours in torch's dispatcher, at the key BackendSelect: once in a process, and never taken out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from commtrace.capture.collectives.operations import Arguments

if TYPE_CHECKING:
    import torch
    from torch._C import DispatchKey
    from torch._ops import OpOverload

_logger = logging.getLogger("commtrace")

KeyOf: TypeAlias = "Callable[[Arguments], DispatchKey]"
"""The dispatch key to go on with, from the arguments of a call that really communicates."""


class Kernel:
    """A kernel of ours, made by :func:`kernel_for`; ``capture`` gets the calls, unless it is None."""

    def __init__(self, overload: OpOverload, key_of: KeyOf, tensor_argument: int = 0) -> None:
        from torch._C import DispatchKey

        self.overload = overload
        self.capture: Callable[..., object] | None = None
        self.key_of = key_of
        self.has_warned = False
        self._latest_key: DispatchKey | None = None
        self._tensor_argument = tensor_argument
        self._meta = DispatchKey.Meta

    def call(self, *arguments: object, **keywords: object) -> object:
        return (self.capture or self.original)(*arguments, **keywords)

    def original(self, *arguments: object, **keywords: object) -> object:
        key: DispatchKey | None = None
        traced = False
        try:
            traced = is_traced(arguments[self._tensor_argument])
        except Exception as error:  # A class of tensors that does not say; those that torch traces with do.
            self._warn(error)
        try:
            key = self._meta if traced else self.key_of(arguments)
            if not traced:
                self._latest_key = key
        except Exception as error:
            self._warn(error)
            if key is None:  # The key of the call before: nearly all jobs send what lies on one kind of device.
                key = self._latest_key
        if key is None:
            return self._dispatched_without(*arguments, **keywords)
        return self.overload._op_dk(key, *arguments, **keywords)

    def _dispatched_without(self, *arguments: object, **keywords: object) -> object:
        from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.BackendSelect)):
            return self.overload(*arguments, **keywords)

    def _warn(self, error: Exception) -> None:
        if not self.has_warned:
            self.has_warned = True
            _logger.warning("commtrace: a call of %s is passed on in another way: %r", self.overload, error)

    def release(self, capture: Callable[..., object]) -> None:
        """Have calls pass through, unless another capture gets them by now."""
        if self.capture is capture:
            self.capture = None


class Captures:
    """The kernels that call one recording; false while there are none."""

    def __init__(self) -> None:
        self._taken: list[tuple[Kernel, Callable[..., object]]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, kernel: Kernel, capture: Callable[..., object]) -> None:
        self._taken.append((kernel, capture))
        kernel.capture = capture

    def release(self) -> None:
        for kernel, capture in self._taken:
            kernel.release(capture)
        self._taken.clear()


# torch looks a kernel up and runs it without a lock. Were it taken out meanwhile, the call would fail
# ("fallthrough_kernel was executed") or run what was freed. Adding one is safe, so kernels stay.
# Re-entrant: the handler of a signal may start a recording while another one starts.
_lock: Final = threading.RLock()
_libraries: Final[dict[str, torch.library.Library]] = {}
_kernels: Final[dict[str, Kernel]] = {}


def kernel_for(namespace: str, name: str, key_of: KeyOf, tensor_argument: int = 0) -> Kernel | None:
    """Return the kernel of an operator's default overload; None where this version of torch does not have it.

    ``key_of`` finds the key to go on with. ``tensor_argument`` is the position of the tensors that show a traced graph.
    """
    import torch

    overload = getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)
    if overload is None:
        return None
    qualified = f"{namespace}::{name}"
    with _lock:
        known = _kernels.get(qualified)
        if known is not None:
            return known
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        kernel = _kernels[qualified] = Kernel(overload, key_of, tensor_argument)
        _libraries[namespace].impl(name, kernel.call, "BackendSelect")  # type: ignore[no-untyped-call]
        return kernel


def is_traced(value: object) -> bool:
    """Return whether a tensor is a stand-in, as when ``torch.compile`` traces a graph: nothing is sent then."""
    from torch._subclasses.fake_tensor import FakeTensor

    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(tensor, FakeTensor) or bool(getattr(tensor, "is_meta", False))


def graph_task() -> int:
    """Return the number of the backward pass that this thread is in; −1 outside of one."""
    import torch

    return int(torch._C._current_graph_task_id())
