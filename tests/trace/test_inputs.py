"""What others wrote is opened, decoded and shown within bounds."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from commtrace.trace.inputs import (
    LONGEST_WORD,
    all_printable,
    decode_json,
    is_plain_json,
    open_file,
    printable,
    read_file,
)


class Place(NamedTuple):
    rank: int
    host: str


def test_only_a_regular_file_is_opened_and_nobody_waits_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, why in (
        (tmp_path / "fifo", "is a FIFO, not a file"),
        (tmp_path, "is a directory, not a file"),
        (Path("/dev/zero"), "is a device, not a file"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "missing", "No such file"),
        (tmp_path / "a\0name", "No such file"),
    ):
        with pytest.raises(OSError, match=why) as error:
            open_file(path)
        assert error.value.filename == str(path)


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_file(tmp_path / "file", 4) == b"1234"
    with pytest.raises(OSError, match="is larger than 3 bytes"):
        read_file(tmp_path / "file", 3)


def test_reading_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    tracemalloc.start()
    try:
        assert read_file(tmp_path / "file", 1 << 28) == b"1234"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_the_kernel_gives_no_size_is_read_whole() -> None:
    status = read_file(Path("/proc/self/status"), 1 << 20)
    assert status.startswith(b"Name:")
    assert status.endswith(b"\n")
    with pytest.raises(OSError, match="is larger than 100 bytes"):
        read_file(Path("/proc/self/status"), 100)


def test_no_half_record_of_a_growing_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records"
    path.write_bytes(b"first\n")
    read_size = os.fstat

    def read_size_before_a_write(descriptor: int) -> os.stat_result:
        found = read_size(descriptor)
        with path.open("ab") as file:
            file.write(b"later\n")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", read_size_before_a_write)
        content = read_file(path, 1 << 20)

    assert set(content.split(b"\n")) <= {b"first", b"later", b""}


@pytest.mark.parametrize(
    "text",
    [b"", b"[", b"[" * 10_000, b"\xff", b'["a", 1]', b'[1, "\\ud800"]', b'[1e999, "a"]', b'[NaN, "a"]', b'{"a": 1}'],
)
def test_json_of_another_type_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_json(text, Place)


def test_json_of_the_declared_type_comes_back() -> None:
    assert decode_json('[3, "a"]', Place) == Place(3, "a")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("all_reduce", "all_reduce"),
        ("größer · 模型", "größer · 模型"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\nb\tc\0", r"a\nb\tc\x00"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("x" * (LONGEST_WORD + 1), "x" * LONGEST_WORD + "…"),
    ],
)
def test_control_characters_of_a_terminal_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert all_printable({text: [text, 1, None]}) == {shown: [shown, 1, None]}


def slow_type() -> type[int]:
    """An annotation that lets other threads run while msgspec looks at it."""
    time.sleep(0.05)
    return int


def test_threads_decode_the_first_of_a_type_at_once() -> None:
    """With msgspec alone the second one crashes the process: of what the first one makes it sees half."""
    inner = msgspec.defstruct("Inner", [("number", "slow_type()")], module=__name__)
    outer = msgspec.defstruct("Outer", [("inner", inner), ("word", str)], module=__name__)
    with ThreadPoolExecutor(4) as pool:
        decoded: list[Any] = list(
            pool.map(lambda _: decode_json('{"inner": {"number": 3}, "word": "a"}', outer), range(4))
        )
    assert decoded == [outer(inner(3), "a")] * 4


def test_json_is_plain_if_printable_would_change_none_of_its_text() -> None:
    assert is_plain_json('{"host": "node 0"}')
    assert is_plain_json(b'{"host": "node 0"}')
    assert not is_plain_json(r'{"host": "node\u001b[2J"}')
    assert not is_plain_json('{"host": "no\u202ede"}')
    assert not is_plain_json('{"host": "\xff"}'.encode())
    assert not is_plain_json(json.dumps("x" * (LONGEST_WORD + 1)))
