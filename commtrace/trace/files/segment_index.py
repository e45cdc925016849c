"""Reads a segment message by message, all of it or only its end; damaged parts are reported, the rest is read.

Of a segment that has come to its end the table of checksums (checksums.py) says where the messages lie and which of
them are damaged. One that still grows is walked through, up to its last whole message, and each batch tells of those
before it.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from commtrace.trace.files.messages import (
    DICTIONARY,
    RECORD_BATCH,
    SCHEMA,
    Message,
    is_end,
    message_at,
    read_checksums,
    unpacked_bytes,
)
from commtrace.trace.inputs import open_file

_MOST_UNPACKED: Final = 256 << 20
_MOST_UNPACKED_PER_BYTE: Final = 100
"""What is read at a time may take so many bytes when it is unpacked, and so many more for each of its own: of columns
that were recorded, a byte becomes 5 to 15."""


class SegmentReplacedError(OSError):
    """Another file has taken the place of a segment since the last look: it was compacted."""


class SegmentIndex:
    """The messages of a segment that may still grow. Not thread-safe.

    Attributes:
        path: of the segment.
        batches: its record batches, in their order.
        modified_ns: when the file was last written to, epoch ns; 0 before the first look.
        ends_whole: nothing follows the last message that is none.
        problems: what was found to be damaged so far, in sentences; each once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches: list[Message] = []
        self.modified_ns = 0
        self.ends_whole = True
        self.problems: list[str] = []
        self._schema: Message | None = None
        self._dictionaries: list[Message] = []
        self._unverified: list[Message] = []
        self._since_batch: list[Message] = []
        self._checksums: dict[int, int] = {}
        self._has_table = False
        self._damaged: set[int] = set()
        self._end = 0
        self._file_number = 0

    def extend(self) -> None:
        """Find messages that were written since the last call. An incomplete message is left for the next call.

        A file that has taken the place of the one before is read from its beginning.

        Raises:
            OSError: the file cannot be read, or is gone.
        """
        with open_file(self.path) as opened:
            file = opened.fileno()
            status = os.fstat(file)
            size, self.modified_ns = status.st_size, status.st_mtime_ns
            if status.st_ino != self._file_number:
                self._file_number, self._end = status.st_ino, 0
                self._schema, self._dictionaries, self.batches = None, [], []
                self._unverified, self._since_batch = [], []
                self._checksums, self._has_table, self._damaged = {}, False, set()
            if not self._has_table:
                self._find(file, size)

    def _find(self, file: int, size: int) -> None:
        checked = read_checksums(file, size)
        if checked is not None:
            self._checksums = {message.offset: crc for message, crc in checked}
            self.ends_whole = self._has_table = True
            for message, _ in checked:
                if message.offset >= self._end:
                    self._add(message)
            return
        read = partial(_pread, file)
        while (found := message_at(read, self._end)) is not None and found.offset + found.size <= size:
            self._add(found)
        # Behind the end of a stream there is its table, or nothing in files of older versions.
        self.ends_whole = self._end == size or (is_end(read, self._end) and self._end + 8 == size)

    def _add(self, message: Message) -> None:
        if not self._has_table:
            self._take_checksums(message)
        if message.kind == SCHEMA and self._schema is None:
            self._schema = message
        elif message.kind == DICTIONARY:
            self._dictionaries.append(message)
        elif message.kind == RECORD_BATCH:
            self.batches.append(message)
        self._end = message.offset + message.size

    def _take_checksums(self, message: Message) -> None:
        """Check the messages since the previous batch against this one's checksums, except its own dictionaries."""
        if message.kind == RECORD_BATCH and len(message.crcs) == len(self._unverified):
            self._checksums.update(zip([one.offset for one in self._unverified], message.crcs, strict=True))
        self._since_batch.append(message)
        if message.kind == RECORD_BATCH:
            self._unverified, self._since_batch = self._since_batch, []

    def schema(self) -> pa.Schema:
        """Return the header.

        Raises:
            OSError: the file cannot be read, or is gone.
            pa.ArrowException: it has none that can be read.
        """
        if self._schema is None:
            raise pa.ArrowInvalid("it holds no Arrow stream, or not yet")
        (content,) = self._contents([self._schema])
        if content is None:
            raise pa.ArrowInvalid("its checksum differs: some of its bytes have changed")
        return pa.ipc.open_stream(pa.py_buffer(content)).schema

    def read(self, first: int, end: int, columns: list[int] | None = None) -> pa.Table | None:
        """Read record batches ``first`` to ``end`` (exclusive), without damaged ones.

        Args:
            first, end: positions in ``batches``.
            columns: only these, by their position in the schema.

        Raises:
            SegmentReplacedError: it is another file than at the last look.
            OSError: the file cannot be read, or is gone.
            pa.ArrowException: its header cannot be read.
        """
        wanted = self.batches[first:end]
        if self._schema is None or not wanted:
            return None
        # Dictionaries replace each other; those before the last wanted batch are all that it can refer to.
        words = [one for one in self._dictionaries if one.offset < wanted[-1].offset]
        messages = [self._schema, *sorted([*words, *wanted])]
        contents = self._contents(messages)
        if contents[0] is None:
            raise pa.ArrowInvalid("its header is damaged")
        kept = self._readable(messages, contents)
        batches = self._decode(kept, columns)
        if not batches:
            return None
        return pa.Table.from_batches(batches).replace_schema_metadata()

    def _contents(self, messages: Sequence[Message]) -> list[bytes | None]:
        """Return the bytes of messages; None where their checksum differs."""
        contents: list[bytes | None] = []
        with open_file(self.path) as opened:
            file = opened.fileno()
            if os.fstat(file).st_ino != self._file_number:
                raise SegmentReplacedError(errno.ESTALE, "replaced while the run was read", str(self.path))
            for message in messages:
                content = os.pread(file, message.size, message.offset)
                crc = self._checksums.get(message.offset)
                is_whole = len(content) == message.size and (crc is None or zlib.crc32(content) == crc)
                contents.append(content if is_whole else None)
        return contents

    def _readable(self, messages: Sequence[Message], contents: Sequence[bytes | None]) -> list[tuple[Message, bytes]]:
        """Return what is whole, of a size that can be, and has whole dictionaries."""
        room = _MOST_UNPACKED + _MOST_UNPACKED_PER_BYTE * sum(message.size for message in messages)
        kept: list[tuple[Message, bytes]] = []
        missing: set[int] = set()
        for message, content in zip(messages, contents, strict=True):
            if content is not None and message.kind != SCHEMA:
                try:
                    unpacked = unpacked_bytes(content)
                except ValueError as error:
                    self._leave_out(message, str(error))
                    content = None
                else:
                    if unpacked > room:
                        self._leave_out(message, f"it would take {unpacked:,} bytes of memory")
                        content = None
                    room -= unpacked
            elif content is None:
                self._leave_out(message, "its checksum differs: some of its bytes have changed")
            if message.kind == DICTIONARY:
                (missing.add if content is None else missing.discard)(message.dictionary)
            if content is None:
                continue
            if message.kind == RECORD_BATCH and missing:
                self._leave_out(message, "the words that its rows refer to are damaged")
                continue
            kept.append((message, content))
        return kept

    def _decode(self, kept: Sequence[tuple[Message, bytes]], columns: list[int] | None) -> list[pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        stream = pa.ipc.open_stream(pa.py_buffer(b"".join(content for _, content in kept)), options=options)
        batches = []
        for message in (message for message, _ in kept if message.kind == RECORD_BATCH):
            try:
                batch = stream.read_next_batch()
                batch.validate(full=True)  # pyarrow would read beyond the end of a damaged column
            except (pa.ArrowException, OSError, StopIteration) as error:
                # What follows may refer to what was damaged here: without checksums that is not known.
                self._give_up_at(message, first_line(error))
                break
            batches.append(batch)
        return batches

    def _leave_out(self, message: Message, why: str) -> None:
        if message.kind == DICTIONARY or message.offset in self._damaged:
            return  # the batches that refer to a dictionary are reported
        self._damaged.add(message.offset)
        number = self.batches.index(message) + 1
        self.problems.append(
            f"{self.path}: batch {number} of {len(self.batches)} is damaged and was left out ({why}). "
            "Copy the file again if the original is still there."
        )

    def _give_up_at(self, message: Message, why: str) -> None:
        if message.offset not in self._damaged:
            self._damaged.add(message.offset)
            whole = self.batches.index(message)
            self.problems.append(f"{self.path}: torn after {whole} batches, read up to there ({why}).")

    def tell_torn_end(self) -> None:
        """Add what is wrong with the end of a file that nobody writes to any more."""
        if not self.ends_whole:
            why = "what follows is no whole message, or not the checksums of those before it"
            self.problems.append(f"{self.path}: torn after {len(self.batches)} batches, read up to there ({why}).")


def first_line(error: BaseException) -> str:
    """Return what an error of a library says, shortly."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _pread(file: int, size: int, offset: int) -> bytes:
    return os.pread(file, size, offset)
