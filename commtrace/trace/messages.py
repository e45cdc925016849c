"""Where the messages of a segment lie, found without reading what is in them: only the end of it may be wanted.

A segment is a stream of encapsulated Arrow messages (https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format):
a marker, the size of the metadata, the metadata, a body. The metadata (a flatbuffer, Message.fbs) tells the length of
the body, so that one can step over it.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

_CONTINUES: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<II")
_READ_AT_ONCE: Final = 2048
"""Enough for the metadata of a batch of ours, so that a message costs one read."""

_LARGEST_METADATA: Final = 1 << 20
_HEADER_TYPE, _BODY_LENGTH = 1, 3
_DICTIONARY, _RECORD_BATCH = 2, 3
"""Of the table Message in Message.fbs: fields by their number, and what a header can be."""


class SegmentReplacedError(OSError):
    """Another file has taken the place of a segment since the last look: it was compacted."""


class Message(NamedTuple):
    """Where one message begins, and how long it is with all that belongs to it; bytes."""

    offset: int
    size: int


class MessageIndex:
    """The messages of a segment that may still grow. Not for several threads at a time.

    Attributes:
        path: of the segment.
        batches: its record batches, in their order.
        modified_ns: when the file was last written to, epoch ns; 0 before the first look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches: list[Message] = []
        self.modified_ns = 0
        self._schema: Message | None = None
        self._dictionaries: list[Message] = []
        self._end = 0
        self._file_number = 0

    def extend(self) -> None:
        """Find what was written since the last time. A message that is not there in full is left for the next.

        A file that has taken the place of the one before is read from its beginning.

        Raises:
            OSError: the file cannot be read, or is gone.
        """
        file = os.open(self.path, os.O_RDONLY)
        try:
            status = os.fstat(file)
            size, self.modified_ns = status.st_size, status.st_mtime_ns
            if status.st_ino != self._file_number:
                self._file_number, self._end = status.st_ino, 0
                self._schema, self._dictionaries, self.batches = None, [], []
            while self._end < size:
                found = _message_at(file, self._end)
                if found is None or found[1].offset + found[1].size > size:
                    break
                kind, message = found
                if self._schema is None:
                    self._schema = message
                elif kind == _DICTIONARY:
                    self._dictionaries.append(message)
                elif kind == _RECORD_BATCH:
                    self.batches.append(message)
                self._end = message.offset + message.size
        finally:
            os.close(file)

    def read(self, first: int, end: int, columns: list[int] | None = None) -> pa.Table | None:
        """Record batches ``first`` to ``end`` (exclusive), and no others.

        Args:
            first, end: positions in ``batches``.
            columns: only these, by their position in the schema.

        Raises:
            SegmentReplacedError: it is another file than at the last look.
            OSError: the file cannot be read, or is gone.
            pa.ArrowException: it holds something else than it did.
        """
        wanted = self.batches[first:end]
        if self._schema is None or not wanted:
            return None
        # Dictionaries replace each other; those before the last wanted batch are all that it can refer to.
        words = [one for one in self._dictionaries if one.offset < wanted[-1].offset]
        file = os.open(self.path, os.O_RDONLY)
        try:
            if os.fstat(file).st_ino != self._file_number:
                raise SegmentReplacedError(errno.ESTALE, "replaced while the run was read", str(self.path))
            parts = [os.pread(file, one.size, one.offset) for one in (self._schema, *sorted([*words, *wanted]))]
        finally:
            os.close(file)
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        return pa.ipc.open_stream(pa.py_buffer(b"".join(parts)), options=options).read_all().replace_schema_metadata()


def _message_at(file: int, offset: int) -> tuple[int, Message] | None:
    """What kind of message begins there, and where it ends; None where none does, or not yet."""
    head = os.pread(file, _READ_AT_ONCE, offset)
    if len(head) < _PREFIX.size:
        return None
    marker, size = _PREFIX.unpack_from(head)
    if marker != _CONTINUES or not 0 < size <= _LARGEST_METADATA:
        return None
    if len(head) < _PREFIX.size + size:
        head += os.pread(file, _PREFIX.size + size - len(head), offset + len(head))
    try:
        kind, body = _kind_and_body(head[_PREFIX.size : _PREFIX.size + size])
    except struct.error:
        return None
    if body < 0:
        return None
    return kind, Message(offset, _PREFIX.size + size + body)


def _kind_and_body(metadata: bytes) -> tuple[int, int]:
    """The two fields of the flatbuffer that matter here; a field that is not written has the value 0."""
    (table,) = struct.unpack_from("<I", metadata)
    (to_fields,) = struct.unpack_from("<i", metadata, table)
    fields = table - to_fields
    (size_of_fields,) = struct.unpack_from("<H", metadata, fields)

    def field(number: int, form: str) -> int:
        place = 4 + 2 * number
        (at,) = struct.unpack_from("<H", metadata, fields + place) if place < size_of_fields else (0,)
        value: int = struct.unpack_from(form, metadata, table + at)[0] if at else 0
        return value

    return field(_HEADER_TYPE, "<B"), field(_BODY_LENGTH, "<q")
