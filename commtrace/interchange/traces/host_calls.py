"""Collect what the host of a trace called to communicate, and find the call that launched a kernel.

Events join on their ``External id``, that of the innermost operation that was open at the launch. On CUDA this is
torch's ``record_param_comms``, which describes the collective. On XPU it may be the ``c10d::`` operation around it, as
the description is closed before the launch (https://github.com/intel/torch-xpu-ops/pull/5486).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import msgspec

from commtrace.interchange.traces.trace_events import TraceEvent, nanoseconds
from commtrace.trace.inputs import decode_json, printable

_CALL: Final = re.compile(rb'"[nxh]ccl::?(\w+)')
"""A call by the name of its backend: ``nccl:all_reduce``, ``xccl::allreduce``."""

_DESCRIPTION: Final = b'"record_param_comms"'
_OPERATION_BEGINS: Final = b'"c10d::'
_HOST_OPERATION: Final = "cpu_op"
_MOST_NAMES: Final = 1_000
_LINKS: Final = ("External id", "external id")
"""Lower case in traces of torch 1.8."""

_LARGEST_NUMBER: Final = 2**61
Arguments = dict[str, object]


class HostCalls:
    """The communication calls on the host of one trace."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # nccl:all_to_all, whatever the backend
        self._described: dict[int, Arguments] = {}  # by External id
        self._starts: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # by thread: start and id of each
        self._operations: list[tuple[int, bytes, int, int]] = []  # id, thread, start, end

    def read(self, event: TraceEvent) -> None:
        """Take an event of the host; raise ValueError if its arguments are damaged."""
        name = bytes(event.name)
        call = _CALL.match(name)
        if call:
            self._name(call[1].decode())
        elif event.cat != _HOST_OPERATION:
            return
        elif name == _DESCRIPTION:
            self._description(event)
        elif name.startswith(_OPERATION_BEGINS):
            self._operation(event)

    def _name(self, call: str) -> None:
        if len(self.names) < _MOST_NAMES:
            self.names.add(f"nccl:{call}")

    def _description(self, event: TraceEvent) -> None:
        arguments = arguments_of(event)
        if "Collective name" in arguments:
            self._name(printable(str(arguments["Collective name"])))
        link = link_of(arguments)
        if link is None:
            return
        self._described[link] = arguments
        interval = interval_of(event)
        if interval:
            self._starts[bytes(event.tid)].append((interval[0], link))

    def _operation(self, event: TraceEvent) -> None:
        link, interval = link_of(arguments_of(event)), interval_of(event)
        if link is not None and interval:
            self._operations.append((link, bytes(event.tid), *interval))

    def launching(self) -> Mapping[int, Arguments]:
        """Return the description, by External id, of all that launches communication; empty where there is none.

        An operation has the description that was given while it was open on its thread, if it is the only one.
        """
        described = {link: dict[str, object]() for link, *_ in self._operations}
        for starts in self._starts.values():
            starts.sort()
        for link, thread, start, end in self._operations:
            starts = self._starts.get(thread, [])
            first = bisect_left(starts, (start, -1))
            inside = [call for begin, call in starts[first : first + 2] if begin <= end]
            if len(inside) == 1:
                described[link] = self._described[inside[0]]
        return {**described, **self._described}


def arguments_of(event: TraceEvent) -> Arguments:
    """Return the arguments of an event; raise ValueError if they are damaged."""
    text = bytes(event.args)
    decoded: object = decode_json(text) if text else {}
    return decoded if isinstance(decoded, dict) else {}


def text_of(raw: msgspec.Raw) -> str:
    """Return a field of an event as printable text; raise ValueError if it is damaged."""
    if not bytes(raw):
        return ""
    decoded: object = decode_json(bytes(raw))
    return printable(str(decoded))


def interval_of(event: TraceEvent) -> tuple[int, int] | None:
    """Return start and end of an event, ns; None if it has no valid time."""
    try:
        start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    except ValueError:
        return None
    return (start, start + duration) if duration >= 0 else None


def link_of(arguments: Mapping[str, object]) -> int | None:
    """Return the External id in the arguments of an event, if it was launched inside of an operation."""
    number = next((integer(arguments[name]) for name in _LINKS if name in arguments), -1)
    return number if number > 0 else None


def integer(value: object, default: int = -1) -> int:
    """Return an argument of an event, which some writers quote, as a number; else the default."""
    if not isinstance(value, (int, float, str)):
        return default
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return default
    return number if abs(number) < _LARGEST_NUMBER else default
