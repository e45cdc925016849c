"""Register kernels of ours in torch's dispatcher, at the key BackendSelect, for calls that only C++ makes.

While a kernel is there, a call takes about 9 µs more: torch makes Python objects of its arguments, and arguments of
these again. It is taken out when the recording stops, if nothing can be in it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from commtrace.capture.collectives.operations import Arguments
from commtrace.capture.threads import CallingThread, is_below, nothing_communicates

if TYPE_CHECKING:
    import torch
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload

Original: TypeAlias = "Callable[..., Any]"
"""What a call would have run without us."""

Capture: TypeAlias = "Callable[[Original, Arguments, dict[str, Any]], object]"
"""Handles a call: it gets what the call would have run, and its arguments."""


class Kernel:
    """A kernel of ours, made by :func:`kernel_for`; ``capture`` gets the calls, unless it is None."""

    def __init__(self, overload: OpOverload) -> None:
        from torch._C import DispatchKey, _dispatch_keyset_full_after

        self.overload = overload
        self.capture: Capture | None = None
        # Not OpOverload._op_dk: that throws and catches exceptions of C++ until it has found out what a group is.
        self.redispatch = overload._handle.redispatch_boxed
        self.backends = _dispatch_keyset_full_after(DispatchKey.BackendSelect)

    def call(self, keys: DispatchKeySet, /, *arguments: object, **keywords: object) -> object:
        original = functools.partial(self.redispatch, keys & self.backends)
        capture = self.capture
        return original(*arguments, **keywords) if capture is None else capture(original, arguments, keywords)

    def release(self, capture: Capture) -> None:
        """Have calls pass through, unless another capture gets them by now."""
        if self.capture is capture:
            self.capture = None


class Captures:
    """The kernels that call one recording; false while there are none. ``thread`` knows who has used them."""

    def __init__(self, thread: CallingThread) -> None:
        self._thread = thread
        self._taken: list[tuple[Kernel, Capture]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, kernel: Kernel, capture: Capture) -> None:
        self._taken.append((kernel, capture))
        kernel.capture = capture

    def release(self) -> None:
        """Have calls pass through, and take kernels out where nothing can be in one; elsewhere they stay."""
        if not self._taken:
            return
        for kernel, capture in self._taken:
            kernel.release(capture)
        if nothing_communicates(self._thread) and not is_below({Kernel.call.__code__}):
            take_out()
        self._taken.clear()


# torch looks a kernel up and runs it without a lock. Were it taken out meanwhile, the call would fail
# ("fallthrough_kernel was executed") or run what was freed. Adding one is safe.
# Re-entrant: the handler of a signal may start a recording while another one starts.
_lock: Final = threading.RLock()
_kernels: Final[dict[str, tuple[Kernel, torch.library.Library]]] = {}


def default_overload(namespace: str, name: str) -> OpOverload | None:
    """Return an operator's default overload; None where this version of torch does not have it."""
    import torch

    overload: OpOverload | None = getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)
    return overload


def kernel_for(namespace: str, name: str, native: Any = None) -> Kernel | None:
    """Return the kernel of an operator's default overload; None where this version of torch does not have it.

    ``native`` makes of a kernel the function of C that torch calls in its place.
    """
    import torch

    overload = default_overload(namespace, name)
    if overload is None:
        return None
    qualified = f"{namespace}::{name}"
    with _lock:
        if qualified not in _kernels:
            kernel, library = Kernel(overload), torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            call = kernel.call if native is None else native(kernel)
            library.impl(name, call, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
            _kernels[qualified] = kernel, library
        return _kernels[qualified][0]


def take_out() -> None:
    """Take the kernels that nobody captures out of the dispatcher: only while no thread can be in one."""
    with _lock:
        for qualified, (kernel, library) in list(_kernels.items()):
            if kernel.capture is None:
                library._destroy()  # type: ignore[no-untyped-call]
                del _kernels[qualified]


def is_traced(value: object) -> bool:
    """Return whether a tensor is a stand-in, as when ``torch.compile`` traces a graph: nothing is sent then."""
    while type(value) is list and value:
        value = value[0]
    return bool(getattr(value, "is_meta", False)) or isinstance(value, _fake_tensor())


@functools.cache
def _fake_tensor() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor
