"""Checksums of complete segments: readers detect a changed byte, and read everything else.

After the end of its Arrow stream, where readers of Arrow stop, a complete segment has a table. For every message of the
stream, in order, it holds length, CRC-32, kind and dictionary. The table ends with its own CRC-32, the number of
messages, and eight fixed bytes. A segment that is still being written, or whose process was killed, has no table.
There, each record batch carries the CRC-32 of the messages since the previous batch in its custom metadata.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.trace.files.messages import Message, messages_in

_MAGIC: Final = b"ctcrc32\n"
_ENTRY: Final = struct.Struct("<QIHH")
_FOOTER: Final = struct.Struct("<II8s")
_MOST_ENTRIES: Final = 1 << 22


class Checked(NamedTuple):
    """A message, and the CRC-32 that its bytes have."""

    message: Message
    crc: int


class SegmentFile:
    """The file that a segment is written to: Arrow writes to ``sink``, and :meth:`flush` hands that on in one write."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._checked: list[Checked] = []
        self._num_taken = 0
        self.sink = BytesIO()
        self.num_bytes = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        """Write the whole messages that Arrow has produced since the last call.

        Raises:
            OSError: the disk is full, or whatever else befalls files.
        """
        content = self.sink.getvalue()
        self.sink.seek(0)
        self.sink.truncate()
        self._write(content)
        for message in messages_in(content):
            own = memoryview(content)[message.offset : message.offset + message.size]
            self._checked.append(Checked(message, zlib.crc32(own)))

    def take_pending(self) -> list[int]:
        """Return the CRC-32 of the messages that were written since the last call."""
        pending = [crc for _, crc in self._checked[self._num_taken :]]
        self._num_taken = len(self._checked)
        return pending

    def finish(self) -> None:
        """Write the rest, and the table behind it."""
        self.flush()
        self._write(_packed(self._checked))

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            written = self._file.write(rest) or 0
            self.num_bytes += written
            rest = rest[written:]

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # where it could not be opened, there is none
            self._file.close()  # a recording that was never stopped: Python would warn of an open file at the very end


def read_checksums(file: int, size: int) -> list[Checked] | None:
    """Read the table of a segment; None if it has none, or a damaged one.

    Args:
        file: descriptor of the segment.
        size: how many bytes it has.
    """
    if size < _FOOTER.size:
        return None
    crc, count, magic = _FOOTER.unpack(os.pread(file, _FOOTER.size, size - _FOOTER.size))
    begin = size - _FOOTER.size - count * _ENTRY.size
    if magic != _MAGIC or count > _MOST_ENTRIES or begin < 0:
        return None
    table = os.pread(file, count * _ENTRY.size, begin)
    if zlib.crc32(table) != crc:
        return None
    found, offset = [], 0
    for length, own, kind, dictionary in _ENTRY.iter_unpack(table):
        found.append(Checked(Message(offset, length, kind, dictionary), own))
        offset += length
    return found if offset <= begin else None


def is_as_written(path: Path) -> bool:
    """Return whether every message of a complete segment matches its checksum.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as opened:
        file = opened.fileno()
        checked = read_checksums(file, os.fstat(file).st_size)
        return checked is not None and all(
            zlib.crc32(os.pread(file, message.size, message.offset)) == crc for message, crc in checked
        )


def _packed(checked: Sequence[Checked]) -> bytes:
    table = b"".join(_ENTRY.pack(one.size, crc, one.kind, one.dictionary) for one, crc in checked)
    return table + _FOOTER.pack(zlib.crc32(table), len(checked), _MAGIC)
