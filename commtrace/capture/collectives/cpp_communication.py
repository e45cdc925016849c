"""Capture communication that C++ issues: functional collectives, compiled graphs, the reducer of DDP.

Torch ≥ 2.14 has hooks of process groups for it (:class:`Hooked`); before, kernels in its dispatcher see it
(:class:`Dispatched`). Hooks pass by calls that a method of ``ProcessGroup`` or a kernel has counted.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, SupportsInt, TypeAlias, cast

from commtrace.capture.collectives.ddp_reducer import CppCall, CppCalls, HostCall, ReducerCapture
from commtrace.capture.collectives.dispatcher import is_traced
from commtrace.capture.collectives.functional import (
    FUNCTIONAL_P2P,
    AwaitedResult,
    FunctionalCapture,
    FunctionalWaits,
    storage_of,
)
from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import HOOKED_OPERATIONS, Measure, Operation
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.hooks import InstalledPart
from commtrace.capture.native import Native
from commtrace.capture.records import Launch, launch_of
from commtrace.capture.threads import is_below, nothing_communicates, other_threads
from commtrace.capture.tracer import Tracer

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

PART: Final = "capture of what C++ communicates"

NOT_HOOKED: Final = frozenset({"all_to_all_single", *FUNCTIONAL_P2P})
"""Functional operators with splits or tags."""

HOOKS_PART: Final = "capture through torch's hooks of process groups"

_hook_ids: Final = itertools.count(int.from_bytes(b"commtrac", "big") >> 1)
"""torch calls hooks in the order of these numbers, its own first."""


class HookArguments(Protocol):
    """The argument of torch's hooks; ``work`` is given to the post-hook only."""

    name: SupportsInt
    op_id: int
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int
    work: Work


GroupHook: TypeAlias = Callable[[HookArguments], None]


class HookedGroup(Protocol):
    """A ``ProcessGroup`` of torch ≥ 2.14; the stubs of earlier versions lack the methods for hooks."""

    def rank(self) -> int: ...

    def register_pre_hook(self, number: int, hook: GroupHook, /) -> None: ...

    def register_post_hook(self, number: int, hook: GroupHook, /) -> None: ...

    def unregister_pre_hook(self, number: int, /) -> None: ...

    def unregister_post_hook(self, number: int, /) -> None: ...


Issuing: TypeAlias = "tuple[int, Operation, int, CppCall | None, list[torch.Tensor]]"
"""An operation between its pre-hook and its post-hook: ``(op_id, operation, root or peer, call or None, results)``."""


class HookedOperation(NamedTuple):
    """What a hook asks of an operation."""

    operation: Operation
    measure: Measure
    has_outputs: bool  # what it receives into is an output of the hook, and comes first in its method
    has_peer: bool


class OwnRank(NamedTuple):
    """The part of a process group that measuring a payload asks. A hook that held the group would keep it alive."""

    own: int

    def rank(self) -> int:
        return self.own


class ProcessGroupHooks:
    """Register hooks with every group, and turn their calls into entries of the recorder's buffer."""

    def __init__(self, tracer: Tracer, issued: CppCalls, waits: FunctionalWaits, reducer: ReducerCapture) -> None:
        self._tracer = tracer
        self._issued = issued
        self._waits = waits
        self._reducer = reducer
        self._active = False
        self._native = tracer.native
        self._id = next(_hook_ids)
        self._groups: list[weakref.ref[HookedGroup]] = []
        self._operations: dict[int, HookedOperation] = {}
        self._code: set[CodeType] = set()

    def install(self) -> None:
        """Register the hooks with the groups there are, and with new ones as they are made. Idempotent."""
        from torch._C._distributed_c10d import HookOpName  # type: ignore[attr-defined]

        if self._active:
            return
        names = HookOpName.__members__
        self._operations = {
            int(names[name]): HookedOperation(
                operation,
                operation.measure,
                has_outputs=len(operation.arguments) == 3 and not operation.is_p2p,
                has_peer=operation.has_root or operation.is_p2p,
            )
            for name, operation in HOOKED_OPERATIONS.items()
            if name in names
        }
        if self._native is not None:
            self._configure(self._native, int(names["ALLREDUCE"]))
        self._active = True
        atexit.register(self._end)
        self._tracer.groups.follow(self._register)

    def _configure(self, native: Native, all_reduce: int) -> None:
        import torch

        operation = HOOKED_OPERATIONS["ALLREDUCE"]
        native.core.configure_hooks(
            failed=functools.partial(self._tracer.failed, HOOKS_PART),
            graph_task=torch._C._current_graph_task_id,
            current_node=torch._C._current_autograd_node,
            begin_backward=self._reducer.begin_backward,
            all_reduce=all_reduce,
            operation=native.operation(operation),
            name=native.code(operation.name),
        )

    def _deactivate(self) -> None:
        self._active = False
        if self._native is not None:
            self._native.core.end_hooks()

    def uninstall(self) -> None:
        self._deactivate()
        self._tracer.groups.unfollow(self._register)
        # torch keeps hooks in a map without a lock: taking one out while a communication passes it, on this thread or
        # another, ends the process with a segmentation fault. So it is done only where none can be in one. Elsewhere
        # they stay, do nothing, and go with their group, or at exit: a group that outlives Python with a hook ends it
        # with a segmentation fault, too.
        # In a hook we are here if it has failed, or if a signal's handler stops the recording in it.
        if nothing_communicates(self._tracer.thread) and not is_below(self._code):
            self._take_out()
            atexit.unregister(self._end)

    def _end(self) -> None:
        # As Python ends. Not while a daemon thread communicates: it may be in a hook now.
        self._deactivate()
        self._tracer.groups.unfollow(self._register)
        if not self._tracer.thread.threads & other_threads():
            self._take_out()

    def _take_out(self) -> None:
        while self._groups:
            process_group = self._groups[-1]()
            if process_group is not None:
                process_group.unregister_pre_hook(self._id)
                process_group.unregister_post_hook(self._id)
            self._groups.pop()

    def _register(self, process_group: ProcessGroup, state: GroupState) -> None:
        hooked = cast("HookedGroup", process_group)
        try:
            self._groups.append(weakref.ref(hooked))
            pre, post = self._hooks_of(state, OwnRank(hooked.rank()))
            hooked.register_pre_hook(self._id, pre)
            hooked.register_post_hook(self._id, post)
        except Exception as error:  # A foreign class that is no group of C++.
            self._tracer.guard.noticed(
                f"group {state.group.name!r} takes no hooks ({error}): its communication from C++ is not recorded"
            )

    def _hooks_of(self, state: GroupState, own_rank: OwnRank) -> tuple[GroupHook, GroupHook]:
        pre, post = self._pre_hook(state, own_rank), self._post_hook(state)
        if self._native is None:
            return pre, post
        hook, counters = self._native.core.GroupHook, state.collective_seq
        return hook(counters, pre, is_post=False), hook(counters, post, is_post=True)

    def _pre_hook(self, state: GroupState, own_rank: OwnRank) -> GroupHook:
        import torch

        thread, reducer, failed, unmeasured = (
            self._tracer.thread,
            self._reducer,
            self._tracer.failed,
            self._tracer.unmeasured,
        )
        graph_task, operations, issue = torch._C._current_graph_task_id, self._operations, self._issued.launch
        captures = self._tracer.captures

        def pre(arguments: HookArguments) -> None:
            try:
                if thread.has_counted:
                    if reducer.has_seen_ddp:
                        task = graph_task()
                        if task != -1:
                            reducer.sent_by_python(task)
                    return
                hooked = operations.get(int(arguments.name))
                if hooked is None or not self._active:
                    return
                operation, measure, has_outputs, has_peer = hooked
                inputs = arguments.input_tensors
                results = arguments.output_tensors if has_outputs or not inputs else inputs
                if is_traced(inputs or results):
                    return
                tensors = (results, inputs) if has_outputs else (results,)
                peer = arguments.root if has_peer else -1
                try:
                    payload = measure(tensors, own_rank)
                except Exception as error:
                    payload = unmeasured(operation, tensors, error)
                scope = captures.state(state) if captures.open else state
                issued = issue(operation, scope, -1, payload, peer)
                thread.issuing.append((arguments.op_id, operation, peer, issued, results))
            except Exception as error:
                failed(HOOKS_PART, error)

        self._code.add(pre.__code__)
        return pre

    def _post_hook(self, state: GroupState) -> GroupHook:
        import torch

        thread, failed, reducer = self._tracer.thread, self._tracer.failed, self._reducer
        graph_task, sent_elsewhere = torch._C._current_graph_task_id, self._sent_elsewhere
        current_node, captures = torch._C._current_autograd_node, self._tracer.captures

        def post(arguments: HookArguments) -> None:
            try:
                issuing = thread.issuing
                if not issuing:
                    return
                op_id = arguments.op_id
                number, operation, peer, issued, results = issuing.pop()
                while number != op_id:  # One that was refused had no post-hook.
                    if not issuing:
                        return
                    number, operation, peer, issued, results = issuing.pop()
                # Here, not in the pre-hook: what is refused takes no number.
                scope = captures.state(state) if captures.open else state
                seq = number_of_message(scope, operation, peer) if operation.is_p2p else next(scope.collective_seq)
                if scope.graph is not None:
                    scope.graph.number(scope, seq, is_p2p=operation.is_p2p)
                if issued is None:
                    return
                launch = issued.launch
                issued.launch = launch_of((*launch[:2], seq, *launch[3:]))
                task = -1 if thread.waits_in_cpp else graph_task()
                if task != -1 and reducer.has_seen_ddp and is_of_the_reducer(current_node()):
                    reducer.sent(issued, arguments.work, task)
                else:
                    sent_elsewhere(issued, arguments.work, results)
            except Exception as error:
                failed(HOOKS_PART, error)

        self._code.add(post.__code__)
        return post

    def _sent_elsewhere(self, issued: CppCall, work: Work, results: list[torch.Tensor]) -> None:
        if self._tracer.thread.waits_in_cpp:
            self._tracer.completions.add_temporaries(results)
            self._reducer.sent(issued, work, -1)
        elif isinstance(issued, HostCall):
            self._issued.complete(issued, work, stalls_until_end=False)
            awaited = AwaitedResult(issued.launch, completion=issued.completion)
            self._waits.remember(awaited, map(storage_of, results))
        else:
            self._waits.remember(AwaitedResult(issued.launch, issued), map(storage_of, results))


def number_of_message(state: GroupState, operation: Operation, peer: int) -> int:
    """Return the number of a message to, or from, a rank of the group; −1 for a receive from anybody."""
    ranks = state.ranks_by_group_rank
    return state.next_p2p(operation.is_send, ranks[peer]) if 0 <= peer < len(ranks) else -1


def is_of_the_reducer(node: object) -> bool:
    """Return whether a reducer sends here: where a gradient is accumulated, or behind all nodes of a backward."""
    return node is None or type(node).__name__ == "AccumulateGrad"


class CppCommunication(InstalledPart, Protocol):
    """A way to see communication that C++ issues."""

    def unfinished(self) -> list[Launch]:
        """Return launches whose end has not been seen."""


def capture_of_cpp(tracer: Tracer, devices: DeviceCalls | None = None) -> CppCommunication:
    return Hooked(tracer, devices) if torch_has_hooks() else Dispatched(tracer, devices)


def torch_has_hooks() -> bool:
    from torch.distributed import ProcessGroup

    return hasattr(ProcessGroup, "register_pre_hook") and hasattr(ProcessGroup, "register_post_hook")


class _Timed:
    def __init__(self, tracer: Tracer, devices: DeviceCalls | None) -> None:
        self._issued = CppCalls(tracer, devices)
        self._waits = FunctionalWaits(tracer, devices)

    def unfinished(self) -> list[Launch]:
        return [*self._waits.unfinished(), *self._issued.unfinished()]


class Hooked(_Timed):
    """Capture by torch's hooks, and by kernels for splits, tags and waits, which hooks do not get."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        super().__init__(tracer, devices)
        self._reducer = ReducerCapture(tracer, self._issued, by_kernels=False)
        self._functional = FunctionalCapture(tracer, self._waits, devices, kernels_for=NOT_HOOKED)
        self._hooks = ProcessGroupHooks(tracer, self._issued, self._waits, self._reducer)

    def install(self) -> None:
        self._functional.install()
        self._reducer.install()
        self._hooks.install()

    def uninstall(self) -> None:
        self._hooks.uninstall()
        self._reducer.uninstall()
        self._functional.uninstall()


class Dispatched(_Timed):
    """Capture all by kernels; those for the reducer from the first DDP on."""

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        super().__init__(tracer, devices)
        self._reducer = ReducerCapture(tracer, self._issued)
        self._functional = FunctionalCapture(tracer, self._waits, devices)

    def install(self) -> None:
        self._functional.install()
        self._reducer.install()

    def uninstall(self) -> None:
        self._reducer.uninstall()
        self._functional.uninstall()
