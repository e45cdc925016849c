"""Kernels in torch's dispatcher for what C++ sends without a Python method: before torch 2.14, which has hooks for it.

Python methods of ``ProcessGroup`` and functional collectives reach these operators too; the calling thread says that
such a communication has been counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from commtrace.capture.collectives.calling_thread import graph_task
from commtrace.capture.collectives.dispatcher import Captures, Kernel, KeyOf, is_traced, kernel_for
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.issued import PART, Issued, IssuedCalls
from commtrace.capture.collectives.operations import OPERATIONS, _flat
from commtrace.capture.tracer import Tracer

_OPERATIONS: Final = {"allreduce_": "allreduce", "broadcast_": "broadcast", "allgather_": "allgather"}
"""c10d operators that DDP's C++ issues, with the method of ``ProcessGroup`` that takes the same tensors."""


class Reducer(Protocol):
    """Gets what the kernels see."""

    def sent(self, issued: Issued, work: Any, *, in_backward: bool) -> None:
        """C++ has sent something."""

    def sent_by_python(self) -> None:
        """A method of ``ProcessGroup`` sends something in a backward."""


class ReducerKernels:
    """The kernels for a reducer, active while there is something to capture.

    Args:
        tracer: where coordinates come from.
        issued: times what nobody in Python waits for.
        reducer: takes the times of the stalls.
    """

    def __init__(self, tracer: Tracer, issued: IssuedCalls, reducer: Reducer) -> None:
        self._tracer = tracer
        self._issued = issued
        self._reducer = reducer
        self._captures = Captures()

    @property
    def installed(self) -> bool:
        """Return whether they call this capture."""
        return bool(self._captures)

    def install(self) -> None:
        """Capture what the kernels get. Idempotent."""
        if self._captures:
            return
        key_of = _key_of_backend()
        for name, method in _OPERATIONS.items():
            kernel = kernel_for("c10d", name, key_of)
            if kernel is not None:
                self._captures.take(kernel, self._capture(kernel, method))

    def uninstall(self) -> None:
        """Have the kernels pass everything through."""
        self._captures.release()

    def _capture(self, kernel: Kernel, method: str) -> Callable[..., Any]:
        from torch._C import DispatchKey
        from torch.distributed import Work

        meta, operation = DispatchKey.Meta, OPERATIONS[method]
        group_argument = 2 if method == "allgather" else 1
        failed, completions, unmeasured = self._tracer.failed, self._tracer.completions, self._tracer.unmeasured
        thread, overload, original = self._tracer.thread, kernel.overload, kernel.original
        key_of = kernel.key_of

        def capture(*arguments: Any, **keywords: Any) -> Any:
            key: Any = None
            issued: Issued | None = None
            state: GroupState | None = None
            seq = -1
            try:
                tensor: Any = next(iter(_flat(arguments[0])), None)
                traced = tensor is None or is_traced(tensor)
                key = meta if traced else key_of(arguments)
                if thread.has_counted and not traced and graph_task() != -1:
                    self._reducer.sent_by_python()
                elif not traced and not thread.has_counted:
                    try:
                        payload = operation.measure(arguments, None)
                    except Exception as error:
                        payload = unmeasured(operation, arguments, error)
                    root = int(arguments[2]) if operation.has_root else None
                    state = self._issued.state(arguments[group_argument])
                    seq = next(state.collective_seq)
                    issued = self._issued.launch(operation, state, seq, payload, root)
                    if graph_task() == -1:  # In a backward they are the reducer's buckets, which live as long as it.
                        completions.add_temporaries(_flat(arguments[:group_argument]))
            except Exception as error:
                failed(PART, error)
            if key is None:
                return original(*arguments, **keywords)
            try:
                result = overload._op_dk(key, *arguments, **keywords)
            except BaseException:
                try:
                    if state is not None and seq >= 0:  # refused: the number is free, as it is on the other ranks
                        state.take_back(seq)
                except Exception as error:
                    failed(PART, error)
                raise
            try:
                if issued is not None:
                    self._reducer.sent(issued, Work.unbox(result[1]), in_backward=graph_task() != -1)
            except Exception as error:
                failed(PART, error)
            return result

        return capture


def _key_of_backend() -> KeyOf:
    """Return what tells the key of the first tensor's backend."""
    from torch._C import DispatchKey, _dispatch_keys, _dispatch_keyset_full_after

    meta, backends = DispatchKey.Meta, _dispatch_keyset_full_after(DispatchKey.BackendSelect)

    def key_of(arguments: tuple[Any, ...]) -> Any:
        tensor = next(iter(_flat(arguments[0])), None)
        # Not the device's key: sparse tensors and devices of other makers have keys of their own.
        return meta if tensor is None else (_dispatch_keys(tensor) & backends).highestPriorityTypeId()

    return key_of
