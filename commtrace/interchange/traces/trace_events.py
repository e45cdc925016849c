"""Read the events of a Chrome trace, the JSON that torch.profiler writes, as a stream, as files reach gigabytes.

>>> file = TraceFile(Path("rank-0.json.gz"))                    # doctest: +SKIP
>>> for events in file.events(): ...                            # doctest: +SKIP
>>> file.header.distributed                                     # doctest: +SKIP
Distributed(backend='nccl', rank=0, world_size=8, …)
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from commtrace.errors import ImportFileError
from commtrace.trace.inputs import most_unpacked, open_file, printable

_HEADER_PIECE: Final = 2**16
_LARGEST_HEADER: Final = 64 * 2**20
_LARGEST_EVENT: Final = 64 * 2**20
"""More text without the end of an event is refused."""
_GZIP_MAGIC: Final = b"\x1f\x8b"
_EVENTS_BEGIN: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_LONGEST_MATCH: Final = 256
_CUT: Final = re.compile(rb"\}\s*,\s*\{")
_WINDOWS: Final = (2**14, 2**18)
"""Bytes at the end of a piece that are searched first."""
_CUTS_TRIED: Final = 4
_LATEST_NS: Final = 2**61
"""The year 2043. The sum of a base, a start and a duration below it fits into 64 bits."""

_LONGEST_NUMBER: Final = 40
_DIGITS: Final = 20
_File = gzip.GzipFile | BufferedReader
_NO_HOST: Final = frozenset({"", "localhost"})
_OPENING: Final = b'{"traceEvents":['
_NOTHING: Final = msgspec.Raw(b"")


class TraceEvent(msgspec.Struct, gc=False):
    """An event; ``Raw`` fields are JSON, empty if missing."""

    ph: str = ""
    cat: str | None = None
    name: msgspec.Raw = _NOTHING
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    pid: msgspec.Raw = _NOTHING
    tid: msgspec.Raw = _NOTHING
    args: msgspec.Raw = _NOTHING


class _Document(msgspec.Struct):
    traceEvents: list[TraceEvent] | None = None  # noqa: N815 -- the name in the file
    distributedInfo: dict[str, object] | None = None  # noqa: N815
    deviceProperties: list[dict[str, object]] | None = None  # noqa: N815
    baseTimeNanoseconds: int | None = None  # noqa: N815
    host_name: str | None = None
    hostname: str | None = None


_DECODE_EVENTS: Final = msgspec.json.Decoder(list[TraceEvent]).decode
_DECODE_DOCUMENT: Final = msgspec.json.Decoder(_Document).decode


class ConfiguredGroup(msgspec.Struct, frozen=True):
    """A process group in ``distributedInfo``."""

    pg_name: str | int | None = None
    ranks: str | list[int] | None = None
    pg_desc: str | None = None


class Distributed(msgspec.Struct, frozen=True):
    """The used fields of ``distributedInfo``; torch writes some numbers as text."""

    backend: str | None = None
    rank: int | str | None = None
    world_size: int | str | None = None
    nccl_version: str | int | float | None = None
    pg_config: list[ConfiguredGroup] | None = None


def _distributed(info: dict[str, object]) -> Distributed:
    try:
        return msgspec.convert(info, Distributed)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ImportFileError(f"its distributedInfo cannot be read ({error})") from None


@dataclass(slots=True)
class TraceHeader:
    """Fields of a file besides its events."""

    distributed: Distributed | None = None
    devices: tuple[str, ...] = ()  # names
    base_time_ns: int = 0  # epoch ns of the events' time 0
    host: str = ""  # empty if the file does not name it

    def update(self, document: _Document) -> None:
        if document.distributedInfo:
            self.distributed = _distributed(document.distributedInfo)
        if document.deviceProperties:
            self.devices = tuple(str(device.get("name", "")) for device in document.deviceProperties)
        base = document.baseTimeNanoseconds or 0
        host = (document.host_name or document.hostname or "").strip()
        self.host = self.host if host in _NO_HOST else printable(host)
        self.base_time_ns = base if 0 < base < _LATEST_NS else self.base_time_ns


class TraceFile:
    """One file. ``header`` is complete after :meth:`events`: part of it may follow them."""

    def __init__(self, path: Path, *, num_bytes_per_piece: int = 1 * 2**20) -> None:
        self.path = path
        self.header = TraceHeader()
        self.is_list = False  # of events alone: known with the first piece, and then there is no header
        self._piece = num_bytes_per_piece

    def events(self) -> Generator[Sequence[TraceEvent], None, None]:
        """Yield all events in pieces, the first piece empty and after the header. A kept event keeps its piece's text.

        Raises:
            ImportFileError: the file cannot be read, is cut off, or is no trace.
        """
        try:
            with _open(self.path) as file:
                yield from self._pieces(file)
        except ImportFileError as error:
            raise error if str(self.path) in str(error) else ImportFileError(f"{self.path}: {error}.") from None
        except EOFError as error:
            raise ImportFileError(
                f"{self.path} is cut off: the end of the gzip stream is missing. Copy it again."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ImportFileError(f"{self.path} is a damaged gzip file ({error}). Copy it again.") from error
        except OSError as error:
            raise ImportFileError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def _pieces(self, file: _File) -> Iterator[Sequence[TraceEvent]]:
        buffer, closing = self._read_header(file)
        yield []  # for callers that only read the header
        wanted = self._piece
        room = most_unpacked(os.stat(self.path).st_size) if isinstance(file, gzip.GzipFile) else None
        while block := file.read(max(self._piece, wanted - len(buffer))):
            if room is not None and (room := room - len(block)) < 0:
                raise ImportFileError(
                    f"{self.path} unpacks to far more than a trace does. It is damaged, or not one of torch.profiler."
                )
            buffer += block
            if len(buffer) < wanted:
                continue
            if len(buffer) > _LARGEST_EVENT:
                raise ImportFileError(
                    f"{self.path} has {len(buffer):,} bytes without the end of an event. It is damaged, or not a trace "
                    "of torch.profiler."
                )
            events, rest = _whole_events(buffer)
            # Without a cut that is right, one event is longer than this, or the list has ended: read on.
            wanted = self._piece if events else 2 * len(buffer)
            buffer = rest
            if events:
                yield events
        document = _decode_document(_OPENING + buffer + closing)
        if document is None or document.traceEvents is None:
            raise ImportFileError(
                f"{self.path} is cut off, or not valid JSON, {len(buffer):,} bytes before its end. Copy it again; "
                "if it was still being written, wait until the profiler is done."
            )
        self.header.update(document)
        yield document.traceEvents

    def _read_header(self, file: _File) -> tuple[bytes, bytes]:
        """Read up to the first event; return the text after it, and the text that the file lacks at its end."""
        num_bytes = min(self._piece, _HEADER_PIECE)
        buffer = file.read(num_bytes).lstrip(b"\xef\xbb\xbf \t\r\n")
        if buffer[:1] == b"[":
            self.is_list = True
            return buffer[1:], b"}"
        if buffer[:1] != b"{":
            raise ImportFileError(
                f"{self.path} is not JSON. Give the file that torch.profiler's export_chrome_trace wrote."
            )
        searched = 0
        while True:
            for match in _EVENTS_BEGIN.finditer(buffer, searched):
                document = _decode_document(buffer[: match.end()] + b"]}")
                if document is not None and document.traceEvents == []:
                    self.header.update(document)
                    return buffer[match.end() :], b""
            searched = max(0, len(buffer) - _LONGEST_MATCH)
            block = file.read(max(num_bytes, len(buffer)))
            if not block or len(buffer) > _LARGEST_HEADER:
                raise ImportFileError(
                    f"{self.path} is not a trace of torch.profiler: it has no list named traceEvents. "
                    "Give the file that export_chrome_trace wrote."
                )
            buffer += block


def _open(path: Path) -> _File:
    file = open_file(path)
    compressed = file.read(2) == _GZIP_MAGIC
    file.seek(0)
    return _Unpacked(file) if compressed else file


class _Unpacked(gzip.GzipFile):
    def __init__(self, packed: BufferedReader) -> None:
        self._packed = packed
        super().__init__(fileobj=packed, mode="rb")

    def close(self) -> None:
        super().close()
        self._packed.close()


def _whole_events(buffer: bytes) -> tuple[list[TraceEvent], bytes]:
    """Return the events before the last cut with valid JSON before it, and the text after it.

    A cut may lie inside an event, so the decoder decides; no events if no cut is right.
    """
    cuts: list[int] = []
    for window in (*_WINDOWS, len(buffer)):
        cuts = cuts or [match.start() + 1 for match in _CUT.finditer(buffer, max(0, len(buffer) - window))]
    for decode in (_decode_strictly, _decode_leniently):
        for cut in reversed(cuts[-_CUTS_TRIED:]):
            events = decode(b"[" + buffer[:cut] + b"]")
            if events is not None:
                return events, buffer[buffer.index(b",", cut) + 1 :]
    return [], buffer


def _decode_strictly(text: bytes) -> list[TraceEvent] | None:
    try:
        return _DECODE_EVENTS(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decode_leniently(text: bytes) -> list[TraceEvent] | None:
    """Accept invalid JSON of some writers: NaN, Infinity, control characters, broken UTF-8."""
    events = _loads(text)
    return [_event(event) for event in events if isinstance(event, dict)] if isinstance(events, list) else None


def _decode_document(text: bytes) -> _Document | None:
    try:
        return _DECODE_DOCUMENT(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    loaded = _loads(text)
    if not isinstance(loaded, dict):
        return None
    events = loaded.get("traceEvents")
    hosts = [name if isinstance(name := loaded.get(key), str) else None for key in ("host_name", "hostname")]
    distributed, devices, base = (
        loaded.get(name) for name in ("distributedInfo", "deviceProperties", "baseTimeNanoseconds")
    )
    return _Document(
        traceEvents=[_event(event) for event in events if isinstance(event, dict)]
        if isinstance(events, list)
        else None,
        distributedInfo=distributed if isinstance(distributed, dict) else None,
        deviceProperties=[device for device in devices if isinstance(device, dict)]
        if isinstance(devices, list)
        else None,
        baseTimeNanoseconds=_whole(base),
        host_name=hosts[0],
        hostname=hosts[1],
    )


def _whole(number: object) -> int | None:
    try:
        decimal = Decimal(str(number)[:_LONGEST_NUMBER])
        return int(decimal) if decimal.is_finite() and decimal.adjusted() < _DIGITS else None
    except (ArithmeticError, ValueError):
        return None


def _loads(text: bytes) -> object:
    try:
        # Numbers with a point stay text, and so exact.
        return json.loads(text.decode("utf-8", "replace"), strict=False, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None


def _event(loaded: dict[str, object]) -> TraceEvent:
    ph, cat = loaded.get("ph"), loaded.get("cat")
    raw = {
        name: msgspec.Raw(json.dumps(loaded[name]).encode())
        for name in ("name", "ts", "dur", "pid", "tid", "args")
        if name in loaded
    }
    return TraceEvent(ph=ph if isinstance(ph, str) else "", cat=cat if isinstance(cat, str) else None, **raw)


def nanoseconds(microseconds: msgspec.Raw) -> int:
    """Return a time, µs, as exact ns; raise ValueError. A float of epoch µs would be off by up to 256 ns."""
    text = bytes(microseconds)[: 2 * _LONGEST_NUMBER].strip(b'"').decode("utf-8", "replace")
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"{text!r} … is no time")
    whole, _, fraction = text.partition(".")
    if len(fraction) <= 3 and fraction.isdecimal() and whole.isdecimal():
        time = int(whole) * 1000 + int(fraction.ljust(3, "0"))
    else:
        try:
            decimal = Decimal(text)
            # As a whole number, 1e999999999 would fill the memory.
            time = int((decimal * 1000).to_integral_value()) if decimal.adjusted() < _DIGITS else _LATEST_NS
        except (ArithmeticError, OverflowError, ValueError) as error:
            raise ValueError(f"{text[:40]!r} is no time") from error
    if abs(time) >= _LATEST_NS:
        raise ValueError(f"{text[:40]!r} is no time")
    return time
