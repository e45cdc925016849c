"""Find the messages of a segment without reading their contents, and check their CRC-32.

A segment is a stream of encapsulated Arrow messages
(https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format). A complete segment has a table behind
the stream: length, CRC-32, kind and dictionary of each message; the table's CRC-32, the number of messages, and eight
fixed bytes. Elsewhere each record batch carries the CRC-32 of the messages since the previous batch.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.trace.files.file_calls import HERE, FileCalls

SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
"""Kinds of messages (Message.fbs)."""

_CONTINUES: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<II")
_READ_AT_ONCE: Final = 2048
"""Enough for the metadata of one of our batches, so that a message costs one read."""

_LARGEST_METADATA: Final = 1 << 20

# Fields by their number: of the tables Message, DictionaryBatch, RecordBatch and KeyValue in Message.fbs.
_HEADER_TYPE, _HEADER, _BODY_LENGTH, _CUSTOM_METADATA = 1, 2, 3, 4
_ID, _DATA = 0, 1
_BUFFERS, _COMPRESSION = 2, 3
_KEY, _VALUE = 0, 1
_NOT_COMPRESSED: Final = -1
_CRCS: Final = b"commtrace.crc32"

_MAGIC: Final = b"ctcrc32\n"
_ENTRY: Final = struct.Struct("<QIHH")
_FOOTER: Final = struct.Struct("<II8s")
_MOST_ENTRIES: Final = 1 << 22


class ArrowMessage(NamedTuple):
    """Position, length (bytes) and kind of one message."""

    offset: int
    size: int
    kind: int
    dictionary: int = 0  # number of the dictionary in it; 0 in other messages
    crcs: tuple[int, ...] = ()  # of as many messages before it


def custom_metadata(crcs: Sequence[int]) -> dict[bytes, bytes]:
    """Encode checksums for the metadata of a record batch."""
    return {_CRCS: b"".join(b"%08x" % crc for crc in crcs)}


def message_at(read: Callable[[int, int], bytes], offset: int) -> ArrowMessage | None:
    """Return the message at ``offset``; None if there is none, or not yet. ``read`` takes a size and an offset."""
    head = read(_READ_AT_ONCE, offset)
    if len(head) < _PREFIX.size:
        return None
    marker, size = _PREFIX.unpack_from(head)
    if marker != _CONTINUES or not 0 < size <= _LARGEST_METADATA:
        return None
    if len(head) < _PREFIX.size + size:
        head += read(_PREFIX.size + size - len(head), offset + len(head))
        if len(head) < _PREFIX.size + size:
            return None
    try:
        return _described(head[_PREFIX.size : _PREFIX.size + size], offset)
    except struct.error:
        return None


def messages_in(content: bytes) -> Iterator[ArrowMessage]:
    """Yield the whole messages at the beginning of ``content``."""
    offset = 0
    while (message := message_at(partial(_part, content), offset)) and offset + message.size <= len(content):
        yield message
        offset += message.size


def is_end(read: Callable[[int, int], bytes], offset: int) -> bool:
    """Return whether the stream ends at ``offset``."""
    return read(_PREFIX.size, offset) == _PREFIX.pack(_CONTINUES, 0)


def unpacked_bytes(message: bytes) -> int:
    """Return the claimed size of a message's columns when unpacked; raise ValueError if its metadata is damaged."""
    _, size = _PREFIX.unpack_from(message)
    metadata, body = message[_PREFIX.size : _PREFIX.size + size], memoryview(message)[_PREFIX.size + size :]
    try:
        table = _root(metadata)
        (kind,) = struct.unpack_from("<B", metadata, _field(metadata, table, _HEADER_TYPE))
        batch = _inner(metadata, table, _HEADER)
        if kind == DICTIONARY:
            batch = _inner(metadata, batch, _DATA)
        is_compressed = _field(metadata, batch, _COMPRESSION) > 0
        buffers = _inner(metadata, batch, _BUFFERS)
        (count,) = struct.unpack_from("<I", metadata, buffers)
        places = struct.unpack_from(f"<{2 * count}q", metadata, buffers + 4)
        return sum(
            _unpacked(body, offset, length, is_compressed)
            for offset, length in zip(places[::2], places[1::2], strict=True)
        )
    except struct.error:
        raise ValueError("its metadata is damaged") from None


def _unpacked(body: memoryview, offset: int, length: int, is_compressed: bool) -> int:
    if offset < 0 or length < 0 or offset + length > len(body):
        raise ValueError("a column does not lie in it")
    if not is_compressed or length < 8:
        return length
    (claimed,) = struct.unpack_from("<q", body, offset)
    if claimed < _NOT_COMPRESSED:
        raise ValueError("a column has a negative length")
    return length if claimed == _NOT_COMPRESSED else claimed


def _part(content: bytes, size: int, offset: int) -> bytes:
    return content[offset : offset + size]


def _described(metadata: bytes, offset: int) -> ArrowMessage | None:
    """Decode the metadata of a message. A flatbuffer leaves out fields of value 0."""
    table = _root(metadata)
    at = _field(metadata, table, _HEADER_TYPE)
    kind = struct.unpack_from("<B", metadata, at)[0] if at else 0
    at = _field(metadata, table, _BODY_LENGTH)
    body = struct.unpack_from("<q", metadata, at)[0] if at else 0
    if body < 0:
        return None
    number = 0
    if kind == DICTIONARY:
        header = _inner(metadata, table, _HEADER)
        at = _field(metadata, header, _ID)
        number = struct.unpack_from("<q", metadata, at)[0] if at else 0
    return ArrowMessage(offset, _PREFIX.size + len(metadata) + body, kind, number, tuple(_crcs(metadata, table)))


def _crcs(metadata: bytes, table: int) -> Iterator[int]:
    if not _field(metadata, table, _CUSTOM_METADATA):
        return
    pairs = _inner(metadata, table, _CUSTOM_METADATA)
    (count,) = struct.unpack_from("<I", metadata, pairs)
    if count != 1:
        return
    pair = pairs + 4 + int(struct.unpack_from("<I", metadata, pairs + 4)[0])
    if _word(metadata, _inner(metadata, pair, _KEY)) != _CRCS:
        return
    value = _word(metadata, _inner(metadata, pair, _VALUE))
    for begin in range(0, len(value), 8):
        try:
            yield int(value[begin : begin + 8], 16)
        except ValueError:
            raise struct.error("no CRC") from None


def _word(metadata: bytes, at: int) -> bytes:
    (length,) = struct.unpack_from("<I", metadata, at)
    return metadata[at + 4 : at + 4 + length]


def _root(metadata: bytes) -> int:
    return int(struct.unpack_from("<I", metadata)[0])


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the place of a field of a table; 0 if it is not written."""
    (to_fields,) = struct.unpack_from("<i", metadata, table)
    fields = table - to_fields
    (size_of_fields,) = struct.unpack_from("<H", metadata, fields)
    position = 4 + 2 * number
    (at,) = struct.unpack_from("<H", metadata, fields + position) if position < size_of_fields else (0,)
    return table + at if at else 0


def _inner(metadata: bytes, table: int, number: int) -> int:
    at = _field(metadata, table, number)
    if not at:
        raise struct.error("a field is missing")
    return at + int(struct.unpack_from("<I", metadata, at)[0])


class Checked(NamedTuple):
    """A message and the CRC-32 of its bytes."""

    message: ArrowMessage
    crc: int


class SegmentFile:
    """A new file of a segment: Arrow writes to ``sink``, and :meth:`flush` writes that to the file at once."""

    def __init__(self, path: Path, files: FileCalls = HERE) -> None:
        self._file = files.create(path)
        self._checked: list[Checked] = []
        self._num_taken = 0
        self.sink = BytesIO()
        self.num_bytes = 0

    def has_name(self) -> bool:
        """Return whether nobody has deleted it."""
        return self._file.has_name()

    def sync(self) -> None:
        self._file.sync()

    def flush(self) -> None:
        """Write the messages that Arrow has produced since the last call; raise OSError as for a full disk."""
        content = self.sink.getvalue()
        self.sink.seek(0)
        self.sink.truncate()
        self._write(content)
        for message in messages_in(content):
            message_bytes = memoryview(content)[message.offset : message.offset + message.size]
            self._checked.append(Checked(message, zlib.crc32(message_bytes)))

    def take_pending(self) -> list[int]:
        """Return the CRC-32 of the messages since the last call."""
        pending = [crc for _, crc in self._checked[self._num_taken :]]
        self._num_taken = len(self._checked)
        return pending

    def finish(self) -> None:
        """Write the rest, and the table behind it."""
        self.flush()
        self._write(_packed(self._checked))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self.num_bytes += len(content)

    def close(self) -> None:
        self._file.close()


def read_checksums(file: int, size: int) -> list[Checked] | None:
    """Read the table of a segment of ``size`` bytes; None if it is missing or damaged."""
    if size < _FOOTER.size:
        return None
    crc, count, magic = _FOOTER.unpack(os.pread(file, _FOOTER.size, size - _FOOTER.size))
    begin = size - _FOOTER.size - count * _ENTRY.size
    if magic != _MAGIC or count > _MOST_ENTRIES or begin < 0:
        return None
    table = os.pread(file, count * _ENTRY.size, begin)
    if zlib.crc32(table) != crc:
        return None
    messages, offset = [], 0
    for length, crc_of_message, kind, dictionary in _ENTRY.iter_unpack(table):
        messages.append(Checked(ArrowMessage(offset, length, kind, dictionary), crc_of_message))
        offset += length
    return messages if offset <= begin else None


def is_as_written(path: Path) -> bool:
    """Return whether every message of a complete segment matches its checksum; raise OSError if it cannot be read."""
    with path.open("rb") as opened:
        file = opened.fileno()
        checked = read_checksums(file, os.fstat(file).st_size)
        return checked is not None and all(
            zlib.crc32(os.pread(file, message.size, message.offset)) == crc for message, crc in checked
        )


def _packed(checked: Sequence[Checked]) -> bytes:
    table = b"".join(_ENTRY.pack(message.size, crc, message.kind, message.dictionary) for message, crc in checked)
    return table + _FOOTER.pack(zlib.crc32(table), len(checked), _MAGIC)
