"""Read kernels, copies and communication kernels from one trace of torch.profiler, or of torch_npu's."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from commtrace.errors import ImportFileError
from commtrace.interchange.traces import ascend
from commtrace.interchange.traces.host_calls import HostCalls, arguments_of, integer, interval_of, link_of, text_of
from commtrace.interchange.traces.trace_events import TraceEvent, TraceFile, TraceHeader
from commtrace.trace.inputs import printable

COMMUNICATION_PATTERN: Final = "(?i)nccl|oneccl"
"""Finds communication kernels by name: of NCCL, RCCL (ncclDevKernel), oneCCL."""

_KERNEL: Final = frozenset({"kernel", "Kernel"})
_MEMORY: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
_DEVICE_ANNOTATION: Final = "gpu_user_annotation"
_STEP_BEGINS: Final = b'"ProfilerStep#'
_STEP_NAME: Final = re.compile(r"^ProfilerStep#([0-9]{1,9})\b")
_RUNTIMES: Final = {"XPU": ("xpu_",), "CUDA": ("cuda_", "runtime", "hip"), "NPU": ("enqueue", "dequeue")}
"""Categories of calls on the host begin with these words."""

_DEVICES_NOT_READ: Final = ("mtia", "privateuse1", "hpu", "npu")
_MOST_NAMES: Final = 1_000
_DEVICE: Final = re.compile(rb'"device"\s*:\s*"?(\d{1,9})\b')
_LINK: Final = re.compile(rb'"[Ee]xternal id"\s*:\s*"?(\d{1,18})\b')


@dataclass(slots=True)
class DeviceWork:
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
    header: TraceHeader
    names: list[str] = field(default_factory=list)  # of kernels and copies, each once
    kernels: DeviceWork = field(default_factory=DeviceWork)
    memory: DeviceWork = field(default_factory=DeviceWork)
    communication: list[CommunicationKernel] = field(default_factory=list)
    profiler_steps: list[tuple[int, int, int]] = field(default_factory=list)  # number, start, end; of the host
    device_steps: list[tuple[int, int, int]] = field(default_factory=list)  # the same annotations of the device
    host_calls: set[str] = field(default_factory=set)  # names of communication on the host: nccl:all_to_all
    other_categories: set[str] = field(default_factory=set)
    devices: set[tuple[int, bytes]] = field(default_factory=set)  # number and pid
    backend: str = ""  # where the trace shows it otherwise than in its header
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
    processes = ascend.Processes()
    trace = _read(path, communication_pattern, processes)
    if processes.named_late:
        trace = _read(path, communication_pattern, processes)
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


def _read(path: Path, communication_pattern: str | None, processes: ascend.Processes) -> DeviceTrace:
    file = TraceFile(path)
    reader = _Reader(DeviceTrace(path, file.header), communication_pattern, processes)
    for events in file.events():
        reader.read(events)
    return reader.finish()


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
    def __init__(self, trace: DeviceTrace, communication_pattern: str | None, processes: ascend.Processes) -> None:
        self._trace = trace
        patterns = [COMMUNICATION_PATTERN, *([communication_pattern] if communication_pattern else [])]
        self._communicates = [re.compile(pattern) for pattern in patterns]
        self._names: dict[bytes, tuple[int, bool]] = {}
        self._host = HostCalls()
        self._processes = processes
        self._links = array("q")  # of kernels: External id of the operation that launched each, 0 if unknown
        self._threads = array("q")  # of kernels: position in the next
        self._thread_names: dict[bytes, int] = {}

    def read(self, events: Sequence[TraceEvent]) -> None:
        for event in events:
            try:
                if event.ph == "X":
                    self._read(event)
                elif event.ph == "M":
                    self._processes.name(event)
            except ValueError:
                self._trace.unreadable += 1

    def _read(self, event: TraceEvent) -> None:
        category = event.cat
        process = self._processes.kind(event)
        if process is ascend.ProcessKind.DEVICE:
            self._task(event)
        elif process is ascend.ProcessKind.COMMUNICATION:
            self._operation(event)
        elif category in _KERNEL:
            self._kernel(event)
        elif category in _MEMORY:
            self._copy(event)
        else:
            self._host_event(event)

    def _host_event(self, event: TraceEvent) -> None:
        category = event.cat
        if category is not None and len(self._trace.other_categories) < _MOST_NAMES:
            self._trace.other_categories.add(category)
        if bytes(event.name).startswith(_STEP_BEGINS):  # category Operator in torch 1.8, later user_annotation
            self._step(event)
        else:
            self._host.read(event)

    def _kernel(self, event: TraceEvent) -> None:
        times = self._device_times(event)
        if times is None:
            return
        name, communicates = self._name(event)
        if communicates:
            arguments = arguments_of(event)
            stream = printable(str(arguments.get("stream", _thread(bytes(event.tid)))))
            self._trace.communication.append(CommunicationKernel(*times, self._trace.names[name], stream, arguments))
            return
        self._trace.kernels.append(*times, name)
        link = _LINK.search(bytes(event.args))
        self._links.append(int(link[1]) if link else 0)
        self._threads.append(self._thread_names.setdefault(bytes(event.tid), len(self._thread_names)))

    def _copy(self, event: TraceEvent) -> None:
        times = self._device_times(event)
        if times is not None:
            name, _ = self._name(event)
            self._trace.memory.append(*times, name, integer(arguments_of(event).get("bytes")))

    def _task(self, event: TraceEvent) -> None:
        """Take a task of an Ascend device."""
        copies = ascend.copies(event)
        if not (copies or ascend.computes(event)):
            return
        times = self._device_times(event)
        if times is None:
            return
        self._trace.devices.add((self._processes.device(event), bytes(event.pid)))
        name, _ = self._name(event)
        if copies:
            self._trace.memory.append(*times, name, integer(arguments_of(event).get("size(B)")))
        else:
            self._trace.kernels.append(*times, name)

    def _operation(self, event: TraceEvent) -> None:
        """Take an operation of HCCL; its parts are on other threads."""
        group = self._processes.group(event)
        times = None if group is None else self._device_times(event)
        if group is None or times is None:
            return
        name = text_of(event.name)
        arguments = ascend.described(name, group, arguments_of(event))
        self._trace.communication.append(CommunicationKernel(*times, name, _thread(bytes(event.tid)), arguments))

    def _device_times(self, event: TraceEvent) -> tuple[int, int] | None:
        times = interval_of(event)
        if times is None:
            self._trace.unreadable += 1
            return None
        device = _DEVICE.search(bytes(event.args))  # most arguments are never decoded
        if device:
            self._trace.devices.add((int(device[1]), bytes(event.pid)))
        return times

    def _step(self, event: TraceEvent) -> None:
        match = _STEP_NAME.match(text_of(event.name))
        times = interval_of(event) if match else None
        if match and times:
            on_device = event.cat == _DEVICE_ANNOTATION
            steps = self._trace.device_steps if on_device else self._trace.profiler_steps
            steps.append((int(match[1]), *times))

    def _name(self, event: TraceEvent) -> tuple[int, bool]:
        """Return the position of the event's name, and whether kernels of that name communicate."""
        text = bytes(event.name)
        known = self._names.get(text)
        if known is None:
            name = text_of(event.name)
            known = len(self._trace.names), any(pattern.search(name) for pattern in self._communicates)
            self._names[text] = known
            self._trace.names.append(name)
        return known

    def finish(self) -> DeviceTrace:
        """Join kernels with the calls that launched them: some are only so known to communicate, or described."""
        trace = self._trace
        trace.host_calls = self._host.names
        trace.backend = ascend.BACKEND if self._processes else ""
        launching = self._host.launching()
        for position, kernel in enumerate(trace.communication):
            call = launching.get(link_of(kernel.arguments) or 0)
            if call and not kernel.is_described:
                trace.communication[position] = replace(kernel, arguments={**kernel.arguments, **call})
        if not self._processes and any(link in launching for link in self._links):
            self._take_launched(launching)
        return trace

    def _take_launched(self, launching: Mapping[int, dict[str, object]]) -> None:
        """Move kernels of any name that a communication call launched to communication."""
        trace = self._trace
        threads = [*self._thread_names]
        kernels, trace.kernels = trace.kernels, DeviceWork()
        columns = zip(kernels.start, kernels.end, kernels.name, self._links, self._threads, strict=True)
        for start, end, name, link, thread in columns:
            if link in launching:
                stream = _thread(threads[thread])
                kernel = CommunicationKernel(start, end, trace.names[name], stream, dict(launching[link]))
                trace.communication.append(kernel)
            else:
                trace.kernels.append(start, end, name)


def _thread(tid: bytes) -> str:
    return printable(tid.decode("utf-8", "replace").strip('"'))
