"""Arrays are made and read as pyarrow does it; but ranks that record, and commands, do not load pandas for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.trace.files.arrays import index_array, is_there, number_array, numbers, text_array, texts_of_rows

KINDS = [pa.int8(), pa.int32(), pa.int64()]


def whole(array: pa.Array) -> pa.Array:
    array.validate(full=True)
    return array


@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(st.integers(-128, 127), max_size=40))
def test_numbers(kind: pa.DataType, values: list[int]) -> None:
    expected = pa.array(values, kind)
    assert whole(number_array(values, kind)).equals(expected)
    assert whole(number_array(np.array(values, np.int32), kind)).equals(expected)


@given(st.lists(st.booleans(), max_size=40))
def test_booleans(values: list[bool]) -> None:
    assert whole(number_array(values, pa.bool_())).equals(pa.array(values, pa.bool_()))


@pytest.mark.parametrize("kind", KINDS)
@given(codes=st.lists(st.integers(-1, 127), max_size=40))
def test_indices_of_which_some_are_missing(kind: pa.DataType, codes: list[int]) -> None:
    expected = pa.array([None if code < 0 else code for code in codes], kind)
    assert whole(index_array(codes, kind)).equals(expected)


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=40))
def test_texts_of_which_some_are_missing(values: list[str | None]) -> None:
    assert whole(text_array(values)).equals(pa.array(values, pa.string()))


@pytest.mark.parametrize("kind", [*KINDS, pa.int16(), pa.bool_(), pa.uint32(), pa.float64()])
@given(values=st.lists(st.none() | st.integers(0, 1), max_size=40), first=st.integers(0, 40))
def test_numbers_of_which_some_are_missing(kind: pa.DataType, values: list[int | None], first: int) -> None:
    array = pa.array(values, pa.int64()).cast(kind)[first:]  # a part of another one, as those of a batch are
    there = is_there(array)
    assert there.tolist() == array.is_valid().to_pylist()
    assert numbers(array)[there].tolist() == [value for value in array.to_pylist() if value is not None]
    assert is_there(pa.nulls(3)).tolist() == [False] * 3


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@given(values=st.lists(st.none() | st.sampled_from(["", "a", "ü", "word"]), max_size=30), first=st.integers(0, 30))
def test_texts_of_some_rows(kind: pa.DataType, values: list[str | None], first: int) -> None:
    array = pa.array(values, kind)[first:]
    rows = np.arange(len(array))[::-2]
    assert texts_of_rows(array, rows) == [array[int(row)].as_py() for row in rows]
    assert texts_of_rows(pa.nulls(2), np.array([1, 0])) == [None, None]


def test_columns_that_are_views_of_others() -> None:
    rows = np.arange(12, dtype=np.int64).reshape(6, 2)
    assert number_array(rows[:, 1], pa.int64()).to_pylist() == [1, 3, 5, 7, 9, 11]
    assert number_array(np.broadcast_to(np.int32(7), 3), pa.int32()).to_pylist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([1, 1 << 40], pa.int32(), "does not fit into int32"),
        ([1 << 63], pa.int64(), "does not fit into int64"),
        ([1, 1 << 70], pa.int64(), "object among values of type int64"),
        ([1, None], pa.int64(), "object among values of type int64"),
        ([1.5, 2.5], pa.int64(), "float64 among values of type int64"),
        (["a"], pa.int64(), "<U1 among values of type int64"),
    ],
)
def test_a_value_that_is_no_such_number_is_refused(values: list[int], kind: pa.DataType, message: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match=message):
        number_array(values, kind)


_RANK = """
import sys
import commtrace
from commtrace.config import Config
commtrace.start(Config(dir=sys.argv[1]))
for number in range(3):
    with commtrace.step(number), commtrace.span("work"):
        pass
commtrace.stop()
print("pandas" in sys.modules)
"""


def test_a_process_that_records_does_not_load_pandas(tmp_path: Path) -> None:
    rank = subprocess.run(
        [sys.executable, "-c", _RANK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert rank.stdout == "False\n", rank.stderr
    assert list(tmp_path.glob("rank-00000/spans-*.arrows"))


_READER = """
import sys
from commtrace.analysis.chain import analyse
assert analyse(sys.argv[1]).steps.used == (1, 2)
print("pandas" in sys.modules)
"""


def test_a_command_does_not_load_pandas_to_read(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _RANK, str(tmp_path)], capture_output=True, check=True, timeout=120)
    reader = subprocess.run(
        [sys.executable, "-c", _READER, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert reader.stdout == "False\n", reader.stderr
