"""The native part as the rest of capture sees it: the clock of its marks, its rows, and the methods that it replaces.

What it does not record itself (operations on lists, brackets, tensors of the host beside a device) goes through the
Python methods of :mod:`commtrace.capture.collectives.process_groups`, with the same numbers, marks and clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from commtrace.capture.collectives.operations import NcclBackend, Operation
from commtrace.capture.device.clock import Mark
from commtrace.capture.device.facts import Handed
from commtrace.capture.device.placement import UNMEASURED, DeviceOperations, PlacedTimes
from commtrace.capture.records import Launch, coordinates_of, dtype_name, launch_of
from commtrace.trace import schema
from commtrace.trace.metadata import Group
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN, Bool, Int64, Spans, rows_of

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


class NativeFacts(NamedTuple):
    """What the extension knows of a communication."""

    id: int
    operation: int
    group: int
    seq: int
    num_bytes: int
    self_bytes: int
    dtype: int
    peer: int
    is_async: bool
    position: int  # of its launch on its communicator
    place: tuple[int, int, int, int]
    start: Mark


facts_of: Final[Callable[[tuple[Any, ...]], NativeFacts]] = functools.partial(tuple.__new__, NativeFacts)
"""Takes facts from the extension, without a frame of Python."""


class Native:
    """The extension in the service of one recording, with room for ``capacity`` communications and spans."""

    _latest: ClassVar[Native | None] = None

    def __init__(self, core: ModuleType, capacity: int) -> None:
        core.reset(capacity)
        Native._latest = self
        self.core: Any = core
        self._names: list[str] = []
        self.codes: dict[str, int] = {}
        """Codes of names, for a look-up without a call; :meth:`code` gives new ones."""
        self._operations: list[Operation] = []
        self._dtypes: dict[int, object] = {schema.NOT_APPLICABLE: None}
        self._states: dict[int, GroupState] = {}
        self._launches: dict[int, Launch] = {}
        self._spans: list[Spans] = []
        self._rows: list[Row] = []
        self._dropped: Sequence[int] = [0] * len(schema.KINDS)
        self._add_calls: Callable[[DeviceOperations, CallColumns], None] | None = None
        self._is_in_detail: Callable[[int], bool] = lambda step: False
        self.on_capture: Callable[[], None] = lambda: None  # called when a communication was captured into a graph

    # Names and groups

    def code(self, name: str) -> int:
        """Return the code of a name; the same name has the same one."""
        code = self.codes.get(name)
        if code is None:
            self._names.append(name)
            code = self.codes[name] = len(self._names) - 1
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

    @property
    def is_over(self) -> bool:
        """Return whether another recording has the extension, though the harvester of this one still runs."""
        return Native._latest is not self

    def place_with(
        self, add: Callable[[DeviceOperations, CallColumns], None], is_in_detail: Callable[[int], bool]
    ) -> None:
        """Have device-timed communications given to ``add`` in each pass, which has them placed and made into rows."""
        self._add_calls, self._is_in_detail = add, is_in_detail

    def gather(self) -> None:
        """Take over what is finished: at the beginning of a pass."""
        if self.is_over:
            return
        if self.core.saw_capture():
            self.on_capture()
        num_rows, of_rows, num_calls, of_calls = self.core.take()
        layout = self.core.ROW_COLUMNS
        if num_rows:
            self._add_spans(_columns(num_rows, of_rows, layout))
        if num_calls and self._add_calls is not None:
            columns = _columns(num_calls, of_calls, (*layout, *self.core.CALL_COLUMNS))
            self._add_calls(self._calls_of(columns), CallColumns(self, columns))

    def take(self) -> tuple[Spans, list[Row], list[str]]:
        """Return the spans that are finished, those among them that have a detail as rows, and the spans' names."""
        spans, self._spans = self._spans, []
        rows, self._rows = self._rows, []
        return Spans.concatenate(spans), rows, list(self._names)

    def _add_spans(self, columns: Mapping[str, Any]) -> None:
        spans, is_unfinished = spans_of(columns), columns["is_unfinished"] != 0
        if is_unfinished.any():
            rows = rows_of(spans.take(is_unfinished), self._names)
            self._rows += [row._replace(detail='{"unfinished":true}') for row in rows]
            spans = spans.take(~is_unfinished)
        self._spans.append(spans)

    def _calls_of(self, columns: Mapping[str, Any]) -> DeviceOperations:
        return DeviceOperations(
            id=columns["id"],
            batch=columns["id"],
            queue=self._queues_of(columns) + columns["on_job_stream"],
            position=columns["position"],
            launch=columns["start"],
            waited_from=columns["waited_from"],
            end=columns["end"],
            waited_taken_at=columns["waited_taken_at"],
            end_taken_at=np.where(columns["timing"] == schema.HOST_TIMING, 0, columns["end_taken_at"]),
            handed_on=columns["returned_at"],
            duration=np.full(len(columns["id"]), UNMEASURED, np.int64),
        )

    def _queues_of(self, columns: Mapping[str, Any]) -> Int64:
        keys = np.stack([columns["group_number"], columns["queue_peer"], columns["device"]], axis=1)
        communicators, of_row = np.unique(keys, axis=0, return_inverse=True)
        numbers = [self._states[group].queue(peer, device).number for group, peer, device in communicators.tolist()]
        return np.array(numbers, np.int64)[of_row.reshape(-1)]

    def handed(self, columns: Mapping[str, Any]) -> list[Handed]:
        """Return when communications were handed to their backends."""
        names = ("id", "group_number", "launched_at", "returned_at")
        handed = []
        for number, group, launched_at, returned_at in zip(*(columns[name].tolist() for name in names), strict=True):
            state = self._states[group]
            handed.append(Handed(number, number, state.nccl.name, state.group.name, launched_at, returned_at))
        return handed

    def are_in_detail(self, steps: npt.NDArray[np.int32]) -> Bool:
        """Return which rows belong to steps in detail, by their steps."""
        detailed = [step for step in np.unique(steps).tolist() if self._is_in_detail(step)]
        return np.isin(steps, detailed)

    def add_placed(self, columns: Mapping[str, Any], placed: PlacedTimes) -> None:
        """Take the times of communications."""
        times = {name: getattr(placed, name) for name in ("start", "end", "start_exact", "end_exact", "timing")}
        self._spans.append(spans_of(columns, **times))

    def dropped(self) -> Sequence[int]:
        """Return how many rows were dropped so far, by kind."""
        if not self.is_over:
            self._dropped = self.core.dropped()
        return self._dropped

    @property
    def num_added(self) -> int:
        """Return how many communications and spans were recorded so far."""
        return 0 if self.is_over else int(self.core.num_added())

    @property
    def num_waiting(self) -> int:
        """Return how many of them wait for the device, or for the next :meth:`take`."""
        return 0 if self.is_over else int(self.core.num_waiting())

    def give_up(self) -> None:
        """Count what still waits for the device as dropped."""
        if not self.is_over:
            self.core.give_up()

    # Facts

    def launch(self, facts: NativeFacts) -> Launch:
        """Return the launch of a communication; the same object for the same one while it is in flight."""
        known = self._launches.get(facts.id)
        if known is not None:
            return known
        dtype: Any = self._dtypes[facts.dtype]
        launch = launch_of((
            self._operations[facts.operation], self._states[facts.group], facts.seq, facts.num_bytes, facts.self_bytes,
            dtype, facts.peer, facts.is_async, coordinates_of(facts.place), None, facts.start,
        ))  # fmt: skip
        self._launches[facts.id] = launch
        if len(self._launches) > _MOST_LAUNCHES:
            self._launches.pop(next(iter(self._launches)), None)
        return launch

    def in_flight(self) -> list[Launch]:
        """Return the launches of communications that nobody has waited for."""
        return [self.launch(NativeFacts(*known)) for known in self.core.pending()]

    def ahead(self) -> list[Launch]:
        """Return the launches of communications that the device has not finished, though the job is past them."""
        return [self.launch(NativeFacts(*known)) for known in self.core.ahead()]

    def blocked(self) -> Launch | None:
        """Return the launch of what is being handed on, or waited for."""
        known = self.core.blocked()
        return None if known is None else self.launch(NativeFacts(*known))

    def operation(self, operation: Operation) -> int:
        """Return the number of an operation."""
        if operation not in self._operations:
            self._operations.append(operation)
        return self._operations.index(operation)


class _MarkOn(Protocol):
    def __call__(self, device: int | None = None, /) -> Mark:
        """Return a mark on the current stream of ``device``, or of the current one."""


class CallColumns:
    """The facts of communications that came as columns: see :class:`commtrace.capture.device.facts.Facts`."""

    def __init__(self, native: Native, columns: Mapping[str, Any]) -> None:
        self._native = native
        self._columns = columns

    @property
    def kinds(self) -> Sequence[int]:
        kinds: list[int] = self._columns["kind"].tolist()
        return kinds

    @property
    def is_in_detail(self) -> Bool:
        return self._native.are_in_detail(self._columns["step"])

    def take(self, rows: Bool) -> CallColumns:
        return CallColumns(self._native, {name: column[rows] for name, column in self._columns.items()})

    def handed(self) -> Sequence[Handed]:
        return self._native.handed(self._columns)

    def rows(self, placed: PlacedTimes) -> list[Row]:
        """Hand the rows to the native part, whose spans go to the sinks as columns."""
        self._native.add_placed(self._columns, placed)
        return []


_DRIVERS: Final = ("libcuda.so.1", "libamdhip64.so")


class NativeClock:
    """A clock of the extension's marks: see :class:`commtrace.capture.device.clock.CudaClock`.

    ``driver`` is the path of the driver's library; ``is_threaded`` is False where a test passes the marks itself.
    """

    timing: int = schema.CUDA_EVENT_TIMING

    def __init__(self, core: Any, cuda: Any, *, driver: str | None = None, is_threaded: bool = True) -> None:
        self._core = core
        self._cuda = cuda
        self._drivers = _DRIVERS if driver is None else (driver,)
        self._is_threaded = is_threaded
        self._failure = ""
        # Functions of C, called as they are.
        self.mark: _MarkOn = core.mark
        self.resolve: Callable[[Mark], int | None] = core.resolve
        self.host_ns: Callable[[], int] = core.host_ns
        self.synchronized: Callable[[], None] = core.synchronized

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
            except BlockingIOError:  # Another thread closes the device, or is stuck in it: the next mark tries again.
                return False
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


def as_method(function: Any) -> Callable[..., object]:
    """Return what stands in the class for a function of the extension: what pybind has there, too.

    Dynamo binds it like torch's own; the limited API of Python has no other way to make one.
    """
    from torch.distributed import ProcessGroup

    instancemethod: Callable[[Any], Callable[..., object]] = type(ProcessGroup.__dict__["rank"])
    return instancemethod(function)


@functools.cache
def p2p_codes() -> tuple[object, ...]:
    """Return the code of ``send``, ``recv``, ``isend`` and ``irecv``, by which a caller that waits is known."""
    from torch.distributed import distributed_c10d

    functions = (getattr(distributed_c10d, name) for name in ("send", "recv", "isend", "irecv"))
    return tuple(getattr(function, "__wrapped__", function).__code__ for function in functions)
