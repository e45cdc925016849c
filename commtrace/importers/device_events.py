"""Read kernels, copies and communication kernels from one torch.profiler trace."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from commtrace.errors import ImportFileError
from commtrace.importers.trace_events import Event, Header, TraceFile, nanoseconds
from commtrace.trace.inputs import decode_json, printable

COMMUNICATION_PATTERN: Final = "(?i)nccl"
"""Finds communication kernels by name."""

_KERNEL: Final = frozenset({"kernel", "Kernel"})
_MEMORY: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
_DEVICE_ANNOTATION: Final = "gpu_user_annotation"
_HOST_OPERATION: Final = "cpu_op"
_CALL_BEGINS: Final = b'"nccl:'
_STEP_BEGINS: Final = b'"ProfilerStep#'
_STEP_NAME: Final = re.compile(r"^ProfilerStep#([0-9]{1,9})\b")
_COMMUNICATION_CALL: Final = b'"record_param_comms"'
_RUNTIMES: Final = {"XPU": ("xpu_",), "CUDA": ("cuda_", "runtime", "hip")}
"""Categories of calls on the host begin with these words."""

_DEVICES_NOT_READ: Final = ("mtia", "privateuse1", "hpu", "npu")
_MOST_NAMES: Final = 1_000
_LINKS: Final = ("External id", "external id")
"""Joins a kernel and the call that launched it; lower case in traces of torch 1.8."""

_LARGEST_NUMBER: Final = 2**61
_DEVICE: Final = re.compile(rb'"device"\s*:\s*"?(\d{1,9})\b')


@dataclass(slots=True)
class Work:
    """Kernels or copies as columns; ``name`` is a position in ``DeviceTrace.names``."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    name: array[int] = field(default_factory=lambda: array("q"))
    bytes: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.start)

    def append(self, start: int, end: int, name: int, num_bytes: int = -1) -> None:
        self.start.append(start)
        self.end.append(end)
        self.name.append(name)
        self.bytes.append(num_bytes)


@dataclass(frozen=True, slots=True)
class CommunicationKernel:
    """A kernel that communicates; ``arguments`` include those of the call that launched it."""

    start: int
    end: int
    name: str
    stream: str
    arguments: dict[str, object]

    @property
    def is_described(self) -> bool:
        return "Process Group Name" in self.arguments


@dataclass(slots=True)
class DeviceTrace:
    """The device events of one file. Times are ns after ``header.base_time_ns``."""

    path: Path
    header: Header
    names: list[str] = field(default_factory=list)  # of kernels and copies, each once
    kernels: Work = field(default_factory=Work)
    memory: Work = field(default_factory=Work)
    communication: list[CommunicationKernel] = field(default_factory=list)
    profiler_steps: list[tuple[int, int, int]] = field(default_factory=list)  # number, start, end; of the host
    device_steps: list[tuple[int, int, int]] = field(default_factory=list)  # the same annotations of the device
    host_calls: set[str] = field(default_factory=set)  # names of communication on the host: nccl:all_to_all
    other_categories: set[str] = field(default_factory=set)
    devices: set[tuple[int, bytes]] = field(default_factory=set)  # number and pid
    unreadable: int = 0  # events left out: damaged arguments, or no valid time

    @property
    def device(self) -> int:
        """Return the lowest device number; −1 if unknown."""
        return min((number for number, _ in self.devices), default=-1)

    def bounds(self) -> tuple[int, int]:
        """Return the start of the first device event and the end of the last."""
        starts = [min(work.start) for work in (self.kernels, self.memory) if len(work)]
        ends = [max(work.end) for work in (self.kernels, self.memory) if len(work)]
        starts += [kernel.start for kernel in self.communication]
        ends += [kernel.end for kernel in self.communication]
        return min(starts), max(ends)


def read_device_trace(path: Path, communication_pattern: str | None = None) -> DeviceTrace:
    """Read one file, plain or gzip; memory is bounded by the events kept.

    Args:
        path: written by ``export_chrome_trace`` or ``tensorboard_trace_handler``.
        communication_pattern: regular expression for names of further communication kernels.

    Raises:
        ImportFileError: it cannot be read, or holds no device event.
    """
    file = TraceFile(path)
    reader = _Reader(DeviceTrace(path, file.header), communication_pattern)
    for events in file.events():
        reader.read(events)
    trace = reader.finish()
    if not (len(trace.kernels) or len(trace.memory) or trace.communication):
        if trace.unreadable:
            raise ImportFileError(
                f"{path}: none of its {trace.unreadable} device events has a readable start and duration. "
                "Export it again."
            )
        raise ImportFileError(
            f"{path} holds no device events (cat kernel, gpu_memcpy, gpu_memset). {_advice(trace.other_categories)}"
        )
    return trace


def _advice(categories: Collection[str]) -> str:
    """Return what to do about a trace without device events, by the device that its other events are of."""
    alike = sorted(category for category in categories if category.lower().startswith(_DEVICES_NOT_READ))
    if alike:
        return (
            f"Its events of the device ({printable(', '.join(alike[:3]))}) are not read. Record the job with "
            "`commtrace run` instead, which sees the communication of every backend of torch.distributed."
        )
    for device, begins in _RUNTIMES.items():
        if any(category.lower().startswith(begins) for category in categories):
            return (
                f"It holds what the host called on {device}, but not what ran there. Profile with "
                f"activities=[ProfilerActivity.CPU, ProfilerActivity.{device}]."
            )
    return (
        "It holds only what the host did. If the job used a device, profile with activities=[ProfilerActivity.CPU, "
        "ProfilerActivity.CUDA] (or .XPU), and leave out ranks that used none. Record a job on CPUs with `commtrace "
        "run`."
    )


class _Reader:
    def __init__(self, trace: DeviceTrace, communication_pattern: str | None) -> None:
        self._trace = trace
        patterns = [COMMUNICATION_PATTERN, *([communication_pattern] if communication_pattern else [])]
        self._communicates = [re.compile(pattern) for pattern in patterns]
        self._names: dict[bytes, tuple[int, bool]] = {}
        self._calls: dict[int, dict[str, object]] = {}  # by External id

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.ph == "X":
                try:
                    self._read(event)
                except ValueError:
                    self._trace.unreadable += 1

    def _read(self, event: Event) -> None:
        category = event.cat
        if category in _KERNEL:
            self._kernel(event)
        elif category in _MEMORY:
            self._copy(event)
        else:
            self._host_event(event)

    def _host_event(self, event: Event) -> None:
        category = event.cat
        if category is not None and len(self._trace.other_categories) < _MOST_NAMES:
            self._trace.other_categories.add(category)
        if bytes(event.name).startswith(_CALL_BEGINS):
            self._host_call(_text(event.name))
        elif bytes(event.name).startswith(_STEP_BEGINS):  # category Operator in torch 1.8, later user_annotation
            self._step(event)
        elif category == _HOST_OPERATION and bytes(event.name) == _COMMUNICATION_CALL:
            arguments = _arguments(event)
            link = _link(arguments)
            if "Collective name" in arguments:
                self._host_call(f"nccl:{arguments['Collective name']}")
            if link is not None:
                self._calls[link] = arguments

    def _host_call(self, name: str) -> None:
        if len(self._trace.host_calls) < _MOST_NAMES:
            self._trace.host_calls.add(name)

    def _kernel(self, event: Event) -> None:
        times = self._device_times(event)
        if times is None:
            return
        start, end = times
        name, communicates = self._name(event)
        if not communicates:
            self._trace.kernels.append(start, end, name)
            return
        arguments = _arguments(event)
        stream = printable(str(arguments.get("stream", bytes(event.tid).decode("utf-8", "replace"))))
        self._trace.communication.append(CommunicationKernel(start, end, self._trace.names[name], stream, arguments))

    def _copy(self, event: Event) -> None:
        times = self._device_times(event)
        if times is None:
            return
        name, _ = self._name(event)
        self._trace.memory.append(*times, name, integer(_arguments(event).get("bytes")))

    def _device_times(self, event: Event) -> tuple[int, int] | None:
        times = _times(event)
        if times is None:
            self._trace.unreadable += 1
            return None
        device = _DEVICE.search(bytes(event.args))  # most arguments are never decoded
        if device:
            self._trace.devices.add((int(device[1]), bytes(event.pid)))
        return times

    def _step(self, event: Event) -> None:
        match = _STEP_NAME.match(_text(event.name))
        times = _times(event) if match else None
        if match and times:
            on_device = event.cat == _DEVICE_ANNOTATION
            steps = self._trace.device_steps if on_device else self._trace.profiler_steps
            steps.append((int(match[1]), *times))

    def _name(self, event: Event) -> tuple[int, bool]:
        """Return the position of the event's name, and whether kernels of that name communicate."""
        text = bytes(event.name)
        known = self._names.get(text)
        if known is None:
            name = _text(event.name)
            known = len(self._trace.names), any(pattern.search(name) for pattern in self._communicates)
            self._names[text] = known
            self._trace.names.append(name)
        return known

    def finish(self) -> DeviceTrace:
        """Add the arguments of the launching calls to kernels without a description."""
        trace = self._trace
        for position, kernel in enumerate(trace.communication):
            link = _link(kernel.arguments)
            call = None if link is None else self._calls.get(link)
            if call and not kernel.is_described:
                trace.communication[position] = CommunicationKernel(
                    kernel.start, kernel.end, kernel.name, kernel.stream, {**kernel.arguments, **call}
                )
        return trace


def integer(value: object, default: int = -1) -> int:
    """Return an argument of an event, which some writers quote, as a number; else the default."""
    if not isinstance(value, (int, float, str)):
        return default
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return default
    return number if abs(number) < _LARGEST_NUMBER else default


def _arguments(event: Event) -> dict[str, object]:
    text = bytes(event.args)
    decoded: object = decode_json(text) if text else {}
    return decoded if isinstance(decoded, dict) else {}


def _link(arguments: dict[str, object]) -> int | None:
    number = next((integer(arguments[name]) for name in _LINKS if name in arguments), -1)
    return number if number > 0 else None  # 0: launched outside of every operation


def _text(raw: msgspec.Raw) -> str:
    if not bytes(raw):
        return ""
    decoded: object = decode_json(bytes(raw))
    return printable(str(decoded))


def _times(event: Event) -> tuple[int, int] | None:
    try:
        start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    except ValueError:
        return None
    return (start, start + duration) if duration >= 0 else None
