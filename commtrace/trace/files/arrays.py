"""Make Arrow arrays of numbers and text without ``pyarrow.array``, and read them without ``Array.to_numpy``.

Both import pandas wherever it is installed, which takes 0.2 to 0.5 s of every process, whatever is converted: see
``_is_array_like`` in https://github.com/apache/arrow/blob/main/python/pyarrow/array.pxi.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# DataType.to_pandas_dtype would import pandas, too.
_DTYPES: Final[Mapping[pa.DataType, type[np.generic]]] = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.bool_(): np.bool_,
}


def number_array(values: Sequence[int] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of int8, int16, int32, int64 or bool.

    Raises:
        pyarrow.ArrowInvalid: a value is no such number, or is too large for the type.
    """
    if not len(values):
        return pa.nulls(0, kind)
    plain = np.asarray(values)
    if plain.dtype.kind not in "biu":
        raise pa.ArrowInvalid(f"{plain.dtype} among values of type {kind}")
    narrow = np.ascontiguousarray(plain, _DTYPES[kind])
    if narrow.dtype != plain.dtype and not np.array_equal(narrow, plain):
        raise pa.ArrowInvalid(f"a number does not fit into {kind}")
    return pa.Array.from_buffers(
        kind, len(narrow), [None, _bits(narrow) if kind == pa.bool_() else pa.py_buffer(narrow)]
    )


def index_array(codes: Sequence[int] | npt.NDArray[np.integer], kind: pa.DataType) -> pa.Array:
    """Return indices of a dictionary; negative codes become null."""
    codes_of_rows = np.asarray(codes, np.int64)
    is_known = codes_of_rows >= 0
    indices = number_array(np.where(is_known, codes_of_rows, 0), kind)
    if is_known.all():
        return indices
    return pa.Array.from_buffers(kind, len(codes_of_rows), [_bits(is_known), indices.buffers()[1]])


def text_array(values: Sequence[str | None]) -> pa.Array:
    """Return an array of strings; None becomes null."""
    texts = {position: value.encode() for position, value in enumerate(values) if value is not None}
    if not texts:
        return pa.nulls(len(values), pa.string())
    places = np.fromiter(texts, np.int64, len(texts))
    offsets = np.zeros(len(values) + 1, np.int64)
    offsets[places + 1] = [len(text) for text in texts.values()]
    offsets = offsets.cumsum()
    validity = None
    if len(texts) < len(values):
        present = np.zeros(len(values), np.bool_)
        present[places] = True
        validity = _bits(present)
    narrow = number_array(offsets, pa.int32())  # more than 2 GiB of text are an error
    return pa.StringArray.from_buffers(
        len(values), narrow.buffers()[1], pa.py_buffer(b"".join(texts.values())), validity
    )


def numbers(array: pa.Array) -> npt.NDArray[Any]:
    """Return the numbers or booleans of an array, without a copy where it holds whole bytes.

    What stands for a null is any number.
    """
    kind = _DTYPES.get(array.type)
    if kind is None:
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if not len(array):
        return np.zeros(0, kind)
    values = array.buffers()[1]
    if kind is np.bool_:
        return _from_bits(values, array.offset, len(array))
    return np.frombuffer(values, kind, len(array), array.offset * np.dtype(kind).itemsize)


def texts_of_rows(array: pa.Array, rows: npt.NDArray[np.integer]) -> list[str | None]:
    """Return these rows of an array of strings; equal ones are one object.

    The members of the world are 100 kB in a job of 16,384 ranks, and every rank records them. ``Array.take`` would
    import pyarrow.compute, which takes 0.1 s.
    """
    if array.type != pa.string():
        return list(array.take(number_array(rows, pa.int64())).to_pylist())
    if not len(array):
        return []
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * np.dtype(np.int32).itemsize)
    held = memoryview(data) if data is not None else memoryview(b"")
    bounds = zip(is_there(array)[rows].tolist(), ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)
    known: dict[bytes, str] = {}
    texts: list[str | None] = []
    for there, begin, end in bounds:
        text = bytes(held[begin:end])
        if there and text not in known:
            known[text] = text.decode()
        texts.append(known[text] if there else None)
    return texts


def is_there(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which values are not null."""
    bits = array.buffers()[0] if array.null_count else None
    if bits is None:  # of an array of type null, too
        return np.full(len(array), not array.null_count)
    return _from_bits(bits, array.offset, len(array))


def _from_bits(bits: pa.Buffer, first: int, count: int) -> npt.NDArray[np.bool_]:
    held = np.frombuffer(bits, np.uint8, -(-(first + count) // 8))
    return np.unpackbits(held, count=first + count, bitorder="little")[first:].view(np.bool_)


def _bits(values: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
