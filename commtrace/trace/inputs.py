r"""Open and decode untrusted files, JSON and text: limit sizes, and escape control characters.

>>> decode_json(b'{"step": 3}', dict[str, int])
{'step': 3}
>>> printable("all_reduce\x1b[2J")
'all_reduce\\x1b[2J'
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.json import Decoder

_T = TypeVar("_T")

MOST_RANKS: Final = 1 << 20
"""A larger job is damage; a list of this many ranks still fits into memory."""

LONGEST_WORD: Final = 8_192
"""Characters of a name; kernels of C++ templates have some thousand."""

_PIECE: Final = 65_536

_UNPACKED_IN_ANY_CASE: Final = 64 << 20
_UNPACKED_PER_BYTE: Final = 100

_DECODERS: Final[dict[object, Decoder[Any]]] = {}

_MAKING: Final = threading.Lock()
"""msgspec 0.22 lets a thread use a decoder that another one is still building, and crashes the process."""

_KINDS_OF_FILE: Final = {
    stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, without waiting for a writer; raise OSError for a directory, a FIFO or a device."""
    if "\0" in str(path):  # of a name that another file gave; os.open raises ValueError
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
            raise OSError(number, f"is {_KINDS_OF_FILE.get(kind, 'no regular file')}, not a file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most_bytes: int) -> bytes:
    """Read a whole file; raise OSError if it is unreadable, no regular file, or larger than ``most_bytes``."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Not most_bytes: a read takes memory for all that it might find. Nor more than there was: what a writer adds
        # meanwhile would be cut in the middle of a record. The kernel's files, as in /proc, have the size 0.
        content = file.read(min(size, most_bytes + 1)) if size else _read_pieces(file, most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes:,} bytes", str(path))
    return content


def most_unpacked(packed_bytes: int) -> int:
    """Return how much a gzip file of text may unpack to: text of traces and logs shrinks 5 to 30 times."""
    return _UNPACKED_IN_ANY_CASE + _UNPACKED_PER_BYTE * packed_bytes


def _read_pieces(file: BufferedReader, most_bytes: int) -> bytes:
    content = b""
    while len(content) < most_bytes and (piece := file.read(min(_PIECE, most_bytes - len(content)))):
        content += piece
    return content


def decode_json(text: str | bytes, kind: type[_T] | Any = Any) -> _T:
    """Decode JSON of a declared type (structs, dataclasses, containers); raise ValueError if it is not."""
    with _MAKING:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind)
    try:
        decoded: _T = _DECODERS[kind].decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    return decoded


def printable_json(text: str | bytes, kind: type[_T]) -> _T:
    """Decode JSON as :func:`decode_json`, with all text in it :func:`printable`."""
    decoded: _T = decode_json(text, kind)
    if is_plain_json(text):  # nearly always
        return decoded
    printed: _T = msgspec.convert(all_printable(msgspec.to_builtins(decoded)), kind)
    return printed


def printable(text: str) -> str:
    """Escape control characters and directions of writing, and cut the text after :data:`LONGEST_WORD` characters."""
    if len(text) > LONGEST_WORD:
        text = text[:LONGEST_WORD] + "…"
    if text.isprintable():
        return text
    # Half of a surrogate pair cannot be encoded at all; it is escaped like the rest.
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def is_plain_json(text: str | bytes) -> bool:
    """Return whether all text in JSON is sure to be :func:`printable` as it is, without decoding it."""
    if len(text) > LONGEST_WORD or not text.isascii():
        return False
    characters = text if isinstance(text, str) else text.decode("ascii")
    return "\\" not in characters and characters.isprintable()


def printable_lines(text: str) -> str:
    """Make every line of the text :func:`printable`."""
    return "\n".join(map(printable, text.split("\n")))


def all_printable(value: object) -> Any:
    """Make all text in a plain value :func:`printable`, including keys."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_printable(item) for item in value]
    return value
