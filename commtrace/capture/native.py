"""The native part as the rest of capture sees it: the clock of its marks, its rows, and the methods that it replaces.

What it does not record itself (operations on lists, brackets, tensors of the host beside a device) goes through the
Python methods of :mod:`commtrace.capture.collectives.process_groups`, with the same numbers, marks and clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.capture.collectives.operations import NcclBackend, Operation
from commtrace.capture.device.clock import Mark
from commtrace.capture.records import Coordinates, Launch, dtype_name
from commtrace.trace import schema
from commtrace.trace.metadata import Group
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN, Spans, rows_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from commtrace.capture.collectives.groups import Counters, GroupState

PART: Final = "the native part"


class Positions(NamedTuple):
    """Where a method has its tensor and its options, or its peer; the process group is 0. 0 is none."""

    tensor: int
    options: int
    splits: int = 0


METHODS: Final[Mapping[str, Positions]] = {
    "allreduce": Positions(1, 2),
    "broadcast": Positions(1, 2),
    "reduce": Positions(1, 2),
    "_allgather_base": Positions(1, 3),
    "all_gather_single": Positions(1, 3),
    "_reduce_scatter_base": Positions(2, 3),
    "reduce_scatter_single": Positions(2, 3),
    "alltoall_base": Positions(2, 5, splits=3),
    "all_to_all_single": Positions(2, 5, splits=3),
    "send": Positions(1, 2),
    "recv": Positions(1, 2),
}
"""The common methods of ``ProcessGroup``, which the extension records: those with one tensor."""

_MOST_LAUNCHES: Final = 4_096
"""Launches that are kept, so that those who ask again get the same object."""

Facts: TypeAlias = tuple[int, int, int, int, int, int, int, int, bool, tuple[int, int, int, int], Any]
"""What the extension knows of a communication: id, operation, group, seq, bytes, self_bytes, dtype, peer, is_async,
place, mark at its launch."""


class Native:
    """The extension in the service of one recording. ``capacity``: rows for which there is room."""

    def __init__(self, core: ModuleType, capacity: int) -> None:
        core.reset(capacity)
        self.core: Any = core
        self._names: list[str] = []
        self._codes: dict[str, int] = {}
        self._operations: list[Operation] = []
        self._dtypes: dict[int, object] = {schema.NOT_APPLICABLE: None}
        self._states: dict[int, GroupState] = {}
        self._launches: dict[int, Launch] = {}

    # Names and groups

    def code(self, name: str) -> int:
        """Return the code of a name; the same name has the same one."""
        code = self._codes.get(name)
        if code is None:
            self._names.append(name)
            code = self._codes[name] = len(self._names) - 1
        return code

    def code_of_dtype(self, dtype: object) -> int:
        code = self.code(dtype_name(dtype) or "")
        self._dtypes[code] = dtype
        return code

    def make_counters(
        self, process_group: ProcessGroup, group: Group, ranks: Sequence[int], nccl: NcclBackend
    ) -> Counters:
        """Make the counters of a new group: see :class:`commtrace.capture.collectives.groups.GroupRegistry`."""
        counters: Counters = self.core.Group(
            process_group, group.id, tuple(ranks), nccl.has_stream_per_pair, nccl.returns_work
        )
        return counters

    def follow(self, _process_group: ProcessGroup, state: GroupState) -> None:
        """Remember the state of a group by the number of its counters."""
        counters: Any = state.collective_seq
        self._states[counters.number] = state

    # Rows

    def take(self) -> tuple[Spans, list[Row], list[str]]:
        """Return the spans that are finished, those among them that have a detail as rows, and the spans' names."""
        num_rows, of_rows, _num_calls, _of_calls = self.core.take()
        columns = _columns(num_rows, of_rows, self.core.ROW_COLUMNS)
        names = list(self._names)
        spans = spans_of(columns)
        is_unfinished = columns["is_unfinished"] != 0
        if not is_unfinished.any():
            return spans, [], names
        rows = rows_of(spans.take(is_unfinished), names)
        return spans.take(~is_unfinished), [row._replace(detail='{"unfinished":true}') for row in rows], names

    def dropped(self) -> Sequence[int]:
        """Return how many rows were dropped so far, by kind."""
        counts: Sequence[int] = self.core.dropped()
        return counts

    @property
    def num_rows(self) -> int:
        """Return how many rows were recorded so far."""
        return int(self.core.num_rows_added())

    @property
    def num_waiting(self) -> int:
        """Return how many rows wait for the device, or for the next :meth:`take`."""
        return int(self.core.num_rows_waiting())

    def give_up(self) -> None:
        """Count what still waits for the device as dropped."""
        self.core.give_up()

    # Facts

    def launch(self, facts: Facts) -> Launch:
        """Return the launch of a communication; the same object for the same one while it is in flight."""
        number, operation, group, seq, num_bytes, self_bytes, dtype, peer, is_async, place, start = facts
        known = self._launches.get(number)
        if known is not None:
            return known
        launch = Launch(
            self._operations[operation], self._states[group], seq, num_bytes, self_bytes, self._dtypes[dtype], peer,
            is_async, Coordinates(*place), None, start,
        )  # type: ignore[arg-type]  # fmt: skip
        self._launches[number] = launch
        if len(self._launches) > _MOST_LAUNCHES:
            self._launches.pop(next(iter(self._launches)), None)
        return launch

    def in_flight(self) -> list[Launch]:
        """Return the launches of communications that nobody has waited for."""
        return [self.launch(facts) for facts in self.core.pending()]

    def ahead(self) -> list[Launch]:
        """Return the launches of communications that the device has not finished, though the job is past them."""
        return [self.launch(facts) for facts in self.core.ahead()]

    def blocked(self) -> Launch | None:
        """Return the launch of what is being handed on, or waited for."""
        facts = self.core.blocked()
        return None if facts is None else self.launch(facts)

    def operation(self, operation: Operation) -> int:
        """Return the number of an operation."""
        if operation not in self._operations:
            self._operations.append(operation)
        return self._operations.index(operation)


_DRIVERS: Final = ("libcuda.so.1", "libamdhip64.so")


class NativeClock:
    """A clock of the extension's marks: see :class:`commtrace.capture.device.clock.CudaClock`.

    ``driver`` is the path of the driver's library; ``is_threaded`` is False where a test passes the marks itself.
    """

    timing: Final = schema.CUDA_EVENT_TIMING

    def __init__(self, core: Any, cuda: Any, *, driver: str | None = None, is_threaded: bool = True) -> None:
        self._core = core
        self._cuda = cuda
        self._drivers = _DRIVERS if driver is None else (driver,)
        self._is_threaded = is_threaded
        self._failure = ""
        self.mark: Callable[..., Mark] = core.mark
        self.resolve: Callable[[Mark], int | None] = core.resolve

    @property
    def of_torch(self) -> dict[str, object]:
        """Return what the extension asks torch, as arguments of its ``configure``."""
        raw_stream = getattr(self._cuda, "raw_stream", None)
        if raw_stream is None:
            import torch

            raw_stream = torch._C._cuda_getCurrentRawStream
        return {
            "raw_stream": raw_stream, "current_device": self._cuda.current_device, "open_device": self._open_device,
        }  # fmt: skip

    @property
    def is_off(self) -> bool:
        return bool(self._failure) or self._core.device_state()[1] != 0

    @property
    def event_type(self) -> type:
        event_type: type = self._cuda.Event
        return event_type

    @property
    def used_device(self) -> int | None:
        """Return the device that was marked first; None before one has been."""
        first: int = self._core.device_state()[2]
        return None if first < 0 else first

    def is_capturing(self) -> bool:
        return bool(self._cuda.is_initialized() and self._cuda.is_current_stream_capturing())

    def current_stream(self) -> Any:
        return self._cuda.current_stream()

    def stream_number(self, stream: Any) -> int:
        """Return a stream's number in marks: the driver's handle."""
        number: int = stream.cuda_stream
        return number

    def refresh(self) -> None:
        """Look which marks were passed, where no thread does; raise RuntimeError if the device has failed."""
        is_open, failure, _ = self._core.device_state()
        if failure > 0 or self._failure:
            raise RuntimeError(self._failure or f"the driver has failed with status {failure}")
        if is_open and not self._is_threaded:
            self._core.pass_marks()

    def switch_off(self) -> None:
        self._core.switch_off()

    def close(self, patience_ms: int = 1_000) -> bool:
        """End the extension's thread; return False if the driver holds it."""
        has_ended: bool = self._core.close_device(patience_ms)
        return has_ended

    def _open_device(self) -> bool:
        # Not before the job uses a device: it may fork, or choose one, until then.
        if self._failure or not self._cuda.is_initialized():
            return False
        errors = []
        for driver in self._drivers:
            try:
                self._core.open_driver(driver, self._is_threaded)
                return True
            except OSError as error:
                errors.append(str(error))
        self._failure = "no driver can be used: " + "; ".join(errors)
        return False


def _columns(num_rows: int, buffer: bytes, layout: Sequence[tuple[str, str]]) -> dict[str, Any]:
    columns, at = {}, 0
    for name, code in layout:
        dtype = np.dtype(code)
        columns[name] = np.frombuffer(buffer, dtype, num_rows, at)
        at += -(-num_rows * dtype.itemsize // 8) * 8
    return columns


def spans_of(columns: Mapping[str, Any], **replaced: Any) -> Spans:
    """Return the spans of columns of the extension; some of them, or those that it lacks, are ``replaced``."""
    exact = np.ones(len(columns["start"]), np.bool_)
    every = {"start_exact": exact, "end_exact": exact, **columns, **replaced}
    return Spans(*(every[name].view(dtype) if dtype is np.bool_ else every[name].astype(dtype, copy=False)
                   for name, dtype in DTYPE_OF_COLUMN.items()))  # fmt: skip


def replacement(function: Any) -> object:
    """Return what stands in the class for a function of the extension: what pybind has there, too.

    Dynamo binds it like torch's own; the limited API of Python has no other way to make one.
    """
    from torch.distributed import ProcessGroup

    instancemethod: Callable[[Any], object] = type(ProcessGroup.__dict__["rank"])
    return instancemethod(function)


@functools.cache
def p2p_codes() -> tuple[object, ...]:
    """Return the code of ``send``, ``recv``, ``isend`` and ``irecv``, by which a caller that waits is known."""
    from torch.distributed import distributed_c10d

    functions = (getattr(distributed_c10d, name) for name in ("send", "recv", "isend", "irecv"))
    return tuple(getattr(function, "__wrapped__", function).__code__ for function in functions)

