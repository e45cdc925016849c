from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.errors import ImportFileError
from commtrace.interchange.traces.trace_events import Distributed, TraceFile, nanoseconds

NASTY: list[dict[str, Any]] = [
    {"ph": "X", "cat": "kernel", "name": 'a "}, {" b', "ts": 1, "dur": 2},
    {"ph": "X", "cat": "cpu_op", "name": "nested", "args": {"list": [{"a": 1}, {"b": [{}, {}]}, {"c": {}}]}},
    {"ph": "M", "name": "}\\", "args": {"traceEvents": [{}, {}]}},
    {"ph": "f", "id": 3},
]


def read(path: Path, piece: int = 64) -> tuple[list[str], TraceFile]:
    file = TraceFile(path, num_bytes_per_piece=piece)
    names = [
        str(msgspec.json.decode(event.name)) if bytes(event.name) else ""
        for events in file.events()
        for event in events
    ]
    return names, file


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece", [1, 7, 64, 4096])
def test_every_event_is_read_once_wherever_the_file_is_cut(tmp_path: Path, piece: int, indent: int | None) -> None:
    events = NASTY * 20
    text = json.dumps({"traceName": '"traceEvents": [', "traceEvents": events, "after": [{}, {}]}, indent=indent)

    names, _ = read(written(tmp_path / "trace.json", text), piece)

    assert names == [event.get("name", "") for event in events]


@given(
    events=st.lists(
        st.dictionaries(
            st.sampled_from(["name", "args", "cat"]),
            st.recursive(st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)),
        ).map(lambda event: {**event, "cat": str(event.get("cat", "")), "name": str(event.get("name", ""))}),
        max_size=12,
    ),
    piece=st.integers(1, 200),
)
def test_any_list_of_events_comes_back(tmp_path_factory: pytest.TempPathFactory, events: Any, piece: int) -> None:
    path = written(tmp_path_factory.mktemp("traces") / "trace.json", json.dumps({"traceEvents": events}))

    assert read(path, piece)[0] == [event["name"] for event in events]


def test_the_header_may_stand_before_and_behind_the_events(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "deviceProperties": [{"id": 0, "name": "H100"}],
            "distributedInfo": {"rank": 3},
            "traceEvents": NASTY,
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        }
    )

    _, file = read(written(tmp_path / "trace.json.gz", gzip.compress(text.encode())))

    assert file.header.distributed == Distributed(rank=3)
    assert file.header.devices == ("H100",)
    assert file.header.base_time_ns == 1_700_000_000_000_000_000


def test_a_list_of_events_alone_is_a_trace(tmp_path: Path) -> None:
    names, _ = read(written(tmp_path / "trace.json", json.dumps(NASTY)))

    assert names == [event.get("name", "") for event in NASTY]


def test_a_list_of_events_is_recognised_as_headless_by_its_first_piece(tmp_path: Path) -> None:
    for content, is_list in ((NASTY, True), ({"traceEvents": NASTY}, False)):
        file = TraceFile(written(tmp_path / "trace.json", json.dumps(content)))
        assert next(file.events()) == []
        assert file.is_list is is_list


def test_invalid_json_that_profilers_write_is_read(tmp_path: Path) -> None:
    odd = '{"name": "a\tb", "ts": 1712345678901234.567, "args": {"occupancy": NaN, "bandwidth": Infinity}}'
    path = written(tmp_path / "trace.json", '{"traceEvents": [' + ", ".join([odd] * 30) + "]}")

    file = TraceFile(path, num_bytes_per_piece=200)
    times = [nanoseconds(event.ts) for events in file.events() for event in events]

    assert times == [1_712_345_678_901_234_567] * 30


@pytest.mark.parametrize(
    ("microseconds", "expected"),
    [
        (b"1712345678901234.567", 1_712_345_678_901_234_567),
        (b"4458676524670.5", 4_458_676_524_670_500),
        (b"1712345678901234", 1_712_345_678_901_234_000),
        (b'"12.001"', 12_001),
        (b"-1.5", -1_500),
        (b"1.5e3", 1_500_000),
        (b"0.0004", 0),
        (b"0.00051", 1),
    ],
)
def test_times_are_exact(microseconds: bytes, expected: int) -> None:
    assert nanoseconds(msgspec.Raw(microseconds)) == expected


@pytest.mark.parametrize("text", [b"", b"null", b"NaN", b'"NaN"', b'"Infinity"', b"1e30", b"[]", b'"soon"'])
def test_a_value_that_is_no_time_is_not_taken_for_one(text: bytes) -> None:
    with pytest.raises(ValueError, match="is no time"):
        nanoseconds(msgspec.Raw(text))


@pytest.mark.parametrize(
    ("base", "expected"),
    [("17", 17), ('"17"', 17), ("1.7e3", 1700), ("null", 0), ('"then"', 0), ("100000000000000000000", 0), ("-3", 0)],
)
def test_the_base_of_times_is_read_however_it_is_written(tmp_path: Path, base: str, expected: int) -> None:
    file = TraceFile(written(tmp_path / "trace.json", f'{{"traceEvents": [{{}}], "baseTimeNanoseconds": {base}}}'))

    assert len([event for events in file.events() for event in events]) == 1
    assert file.header.base_time_ns == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\x80\x04\x95pickle", "is not JSON"),
        (b'{"schemaVersion": 1}', "no list named traceEvents"),
        (b'{"traceEvents": [{"name": "a"}, {"name": ', "is cut off, or not valid JSON"),
        (b'{"traceEvents": [{"name": "a"}, oops]}', "is cut off, or not valid JSON"),
        (gzip.compress(b'{"traceEvents": []}' * 9, mtime=0)[:-12], "is cut off"),
        (b"\x1f\x8bno gzip at all", "damaged gzip"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_words(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ImportFileError, match=message):
        read(written(tmp_path / "file.json", content))


def test_a_file_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="No such file"):
        read(tmp_path / "nowhere.json")


def test_a_string_that_does_not_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    """200 MB of one name, in 200 kB of gzip."""
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents":[{"ph":"X","name":"')
        for _ in range(200):
            file.write(b"x" * 2**20)
    with pytest.raises(ImportFileError, match="without the end of an event"):
        list(TraceFile(path).events())


@pytest.mark.parametrize("text", ["1e999999999", '"1e999999"', "9" * 5_000, "2e18"])
def test_a_number_that_no_clock_shows_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        nanoseconds(msgspec.Raw(text.encode()))


def test_a_packed_trace_of_tiny_events_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [{}')
        for _ in range(100):
            file.write(b",{}" * (1 << 19))
        file.write(b"]}")

    with pytest.raises(ImportFileError, match="unpacks to far more than a trace does"):
        for _ in TraceFile(path).events():
            pass
