"""Read the JSON lines of NCCL Inspector and RCCL Inspector, formats v4.0 to v4.3.

Source: https://github.com/NVIDIA/nccl/tree/master/plugins/profiler/inspector. Times are µs of ``gettimeofday``, bytes
those of one rank's buffer, durations those of the kernel's slowest channel.
"""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from commtrace.errors import ImportFileError
from commtrace.trace.inputs import MOST_RANKS, decode_json, most_unpacked, open_file

UNNAMED: Final = "unknown"
"""The name of a communicator that has none."""

_BLANK: Final = b" \t\r\n\0"
_MOST_BLANK: Final = 4 << 20
"""Bytes without anything, as in a sparse file."""

_LONGEST_LINE: Final = 1 << 20
"""A verbose line of 64 channels has 20 kB."""
_MOST_SHOWN: Final = 200
_LATEST_US: Final = 2**51
_LONGEST_US: Final = 2**45

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=_LATEST_US)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class InspectorHeader(msgspec.Struct, frozen=True):
    id: _Text
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    comm_name: _Text = UNNAMED


class _InspectorMetadata(msgspec.Struct, frozen=True):
    dump_timestamp_us: _Time
    hostname: _Text
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    inspector_output_format_version: _Text = ""


class _Channel(msgspec.Struct, frozen=True):
    kernel_start_ts: _Time = 0
    kernel_stop_ts: _Time = 0


class _KernelTimes(msgspec.Struct, frozen=True):
    kernel_events: Annotated[tuple[_Channel, ...], msgspec.Meta(max_length=4096)] = ()


class Collective(msgspec.Struct, frozen=True, rename=lambda name: name if name == "event_trace_ts" else f"coll_{name}"):
    sn: _Count
    msg_size_bytes: _Count
    exec_time_us: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_US)]
    operation: _Text = msgspec.field(name="coll")
    timing_source: _Text = ""
    event_trace_ts: _KernelTimes | None = msgspec.field(default=None, name="event_trace_ts")


class InspectorMessage(msgspec.Struct, frozen=True, rename=lambda name: f"p2p_{name}"):
    sn: _Count
    peer: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    msg_size_bytes: _Count
    exec_time_us: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_US)]
    operation: _Text = msgspec.field(name="p2p")
    timing_source: _Text = ""
    event_trace_ts: _KernelTimes | None = msgspec.field(default=None, name="event_trace_ts")


class Statistics(msgspec.Struct, frozen=True):
    coll_dropped_total: _Count = 0
    p2p_dropped_total: _Count = 0


class _Line(msgspec.Struct, frozen=True):
    """One line. From v4.3 on, only the ``dump_stats`` line before the operations has header and metadata."""

    header: InspectorHeader | None = None
    metadata: _InspectorMetadata | None = None
    coll_perf: Collective | None = None
    p2p_perf: InspectorMessage | None = None
    dump_stats: Statistics | None = None
    proxy_trace: msgspec.Raw | None = None


class InspectorProcess(NamedTuple):
    host: str
    pid: int


class Record(NamedTuple):
    """A line with an operation."""

    header: InspectorHeader
    metadata: _InspectorMetadata
    perf: Collective | InspectorMessage

    @property
    def process(self) -> InspectorProcess:
        return InspectorProcess(self.metadata.hostname, self.metadata.pid)

    @property
    def end_us(self) -> int:
        """Return the end of the last channel as the host saw it; 0 if the line is not verbose."""
        times = self.perf.event_trace_ts
        return max((event.kernel_stop_ts for event in times.kernel_events), default=0) if times else 0

    @property
    def slack_us(self) -> int:
        """Return the excess of the kernel's time as the host saw it over its duration."""
        times = self.perf.event_trace_ts
        starts = [event.kernel_start_ts for event in times.kernel_events if event.kernel_start_ts] if times else []
        return max(self.end_us - min(starts, default=self.end_us) - round(self.perf.exec_time_us), 0)


class DamagedLine(NamedTuple):
    """A line that was left out, and why."""

    reason: str


class DumpStatistics(NamedTuple):
    """A ``dump_stats`` line: records of a communicator overwritten so far before they were written."""

    header: InspectorHeader
    dropped: int


def read_records(path: Path) -> Iterator[Record | DumpStatistics | DamagedLine]:
    """Yield the records of a file; raise ImportFileError if it cannot be read."""
    header: InspectorHeader | None = None
    metadata: _InspectorMetadata | None = None
    number = 0
    try:
        for number, text in enumerate(_lines(path), 1):
            try:
                line: _Line = decode_json(text, _Line)
                header, metadata = line.header or header, line.metadata or metadata
                if line.dump_stats is not None and header is not None:
                    dropped = line.dump_stats.coll_dropped_total + line.dump_stats.p2p_dropped_total
                    yield DumpStatistics(header, dropped)
                    continue
                perf = line.coll_perf or line.p2p_perf
                if perf is not None:
                    yield _checked(header, metadata, perf)
                elif line.proxy_trace is None:
                    raise ValueError("it has neither coll_perf nor p2p_perf")
            except ValueError as error:
                yield DamagedLine(f"line {number}: {str(error)[:_MOST_SHOWN]}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield DamagedLine(f"the gzip stream breaks off after line {number}: {error}")
    except OSError as error:
        raise ImportFileError(f"{path} cannot be read: {error.strerror or error}.") from error


def _checked(
    header: InspectorHeader | None, metadata: _InspectorMetadata | None, perf: Collective | InspectorMessage
) -> Record:
    if header is None or metadata is None:
        raise ValueError("it has no header, and no dump_stats line with one is before it")
    if header.rank >= header.n_ranks:
        raise ValueError(f"rank {header.rank} of {header.n_ranks} is none")
    if isinstance(perf, InspectorMessage) and perf.peer >= header.n_ranks:
        raise ValueError(f"peer {perf.peer} of {header.n_ranks} ranks is none")
    return Record(header, metadata, perf)


def _too_much(path: Path) -> OSError:
    return OSError(errno.EFBIG, "it unpacks to far more than lines of the plugin do", str(path))


def _nothing(path: Path) -> OSError:
    return OSError(errno.EFBIG, "it is empty for the most part", str(path))


def _lines(path: Path) -> Iterator[bytes]:
    with open_file(path) as opened:
        file = gzip.GzipFile(fileobj=opened) if path.suffix == ".gz" else opened
        room = most_unpacked(os.fstat(opened.fileno()).st_size) if path.suffix == ".gz" else None
        num_blank = 0
        goes_on = False  # the line before was too long, and is left out from there on
        while line := file.readline(_LONGEST_LINE):
            if room is not None and (room := room - len(line)) < 0:
                raise _too_much(path)
            is_blank = not line.strip(_BLANK)
            if is_blank and (num_blank := num_blank + len(line)) > _MOST_BLANK:
                raise _nothing(path)
            if not is_blank and not goes_on:
                yield line
            goes_on = not line.endswith(b"\n") and len(line) == _LONGEST_LINE
