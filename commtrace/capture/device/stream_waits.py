"""Find stalls on communication beside the computing stream, as that of FSDP and ZeRO 3.

That stream waits for an event recorded behind the communication; marks around the wait are the stall. It includes the
other stream's work between communication and event: a copy, a division of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from commtrace.capture.device.clock import CudaClock, CudaMark, Mark
from commtrace.capture.records import DeviceCall, device_stall_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

if TYPE_CHECKING:
    import torch

_DEFAULT_STREAM: Final = 0
"""torch's number of the stream on which work runs by default."""

_STANDS_FOR: Final = "_commtrace_stands_for"
"""Attribute of an event: the communication behind which it was recorded."""

_COMPUTES: Final = frozenset({schema.FORWARD, schema.BACKWARD, schema.RECOMPUTE, schema.OPTIMIZER})


class StreamWaits:
    """Find the stream that computes, and its waits for communication on another stream."""

    def __init__(self, tracer: Tracer, clock: CudaClock, part: str) -> None:
        self._tracer = tracer
        self._clock = clock
        self._part = part
        self._latest: dict[tuple[int, int], DeviceCall] = {}

    def computes(self, mark: Mark) -> bool:
        """Return whether the mark is on the stream that computes: that of the step's begin, or of an open phase."""
        return not isinstance(mark, CudaMark) or self._is_computing(mark.device, mark.stream)

    def passes(self, mark: CudaMark, call: DeviceCall) -> None:
        """Note that the stream of ``mark`` has run ``call`` or waited for it."""
        self._passes(mark.device, mark.stream, call)

    def forget(self) -> None:
        self._latest.clear()

    def recording(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``torch.cuda.Event.record``."""
        latest, failed, part = self._latest, self._tracer.failed, self._part

        def record(event: object, /, *arguments: object, **keywords: object) -> object:
            result = original(event, *arguments, **keywords)
            try:
                if latest:
                    self._recorded(event, _stream_of(arguments, keywords))
            except Exception as error:
                failed(part, error)
            return result

        return record

    def waiting(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``torch.cuda.Event.wait``, which ``Stream.wait_event`` and ``wait_stream`` call."""
        failed, part = self._tracer.failed, self._part

        def wait(event: object, /, *arguments: object, **keywords: object) -> object:
            call: DeviceCall | None = None
            start: CudaMark | None = None
            try:
                call = getattr(event, _STANDS_FOR, None)
                if call is not None:
                    start = self._about_to_wait(call, _stream_of(arguments, keywords))
            except Exception as error:
                failed(part, error)
            result = original(event, *arguments, **keywords)
            try:
                if call is not None and start is not None:
                    self._waited(call, start)
            except Exception as error:
                failed(part, error)
            return result

        return wait

    def _recorded(self, event: object, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            stream = self._clock.current_stream()
        call = self._latest.get((stream.device_index, stream.stream_id))
        if call is not None and not call.is_joined:
            setattr(event, _STANDS_FOR, call)
        elif getattr(event, _STANDS_FOR, None) is not None:
            setattr(event, _STANDS_FOR, None)

    def _is_computing(self, device: int, stream: int) -> bool:
        step, span = self._tracer.step_start, self._tracer.innermost
        marks = [step] if isinstance(step, CudaMark) and step.device == device else []
        has_step = bool(marks)
        while span is not None:
            if span.kind in _COMPUTES and isinstance(span.start, CudaMark) and span.start.device == device:
                marks.append(span.start)
            span = span.outer
        return any(mark.stream == stream for mark in marks) or (stream == _DEFAULT_STREAM and not has_step)

    def _passes(self, device: int, stream: int, call: DeviceCall) -> None:
        latest = self._latest.get((device, stream))
        if latest is None or latest.id < call.id:
            self._latest[device, stream] = call

    def _about_to_wait(self, call: DeviceCall, stream: torch.cuda.Stream | None) -> CudaMark | None:
        """Return a mark before a wait of the computing stream; None for a wait of another one."""
        if call.is_joined or not self._tracer.recording or self._clock.is_off:
            return None
        if stream is None:
            stream = self._clock.current_stream()
        device, number = stream.device_index, stream.stream_id
        if not self._is_computing(device, number):
            self._passes(device, number, call)
            return None
        start = self._clock.mark(device)
        return start if isinstance(start, CudaMark) and start.stream == number else None

    def _waited(self, call: DeviceCall, start: CudaMark) -> None:
        tracer = self._tracer
        call.is_joined = True
        tracer.last_mark = end = self._clock.mark(start.device)
        tracer.append((device_stall_rows, schema.STALL, call, tracer.coordinates, start, end))


def _stream_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.cuda.Stream | None:
    return arguments[0] if arguments else keywords.get("stream")
