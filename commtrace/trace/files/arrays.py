"""Make Arrow arrays of numbers and text without ``pyarrow.array``, which imports pandas wherever it is installed.

That takes 0.2 to 0.5 s of every training process, whatever is converted: see ``_is_array_like`` in
https://github.com/apache/arrow/blob/main/python/pyarrow/array.pxi.
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
    own = np.asarray(codes, np.int64)
    is_there = own >= 0
    indices = number_array(np.where(is_there, own, 0), kind)
    if is_there.all():
        return indices
    return pa.Array.from_buffers(kind, len(own), [_bits(is_there), indices.buffers()[1]])


def text_array(values: Sequence[str | None]) -> pa.Array:
    """Return an array of strings; None becomes null."""
    texts = {place: value.encode() for place, value in enumerate(values) if value is not None}
    if not texts:
        return pa.nulls(len(values), pa.string())
    places = np.fromiter(texts, np.int64, len(texts))
    offsets = np.zeros(len(values) + 1, np.int64)
    offsets[places + 1] = [len(text) for text in texts.values()]
    offsets = offsets.cumsum()
    is_there = None
    if len(texts) < len(values):
        present = np.zeros(len(values), np.bool_)
        present[places] = True
        is_there = _bits(present)
    narrow = number_array(offsets, pa.int32())  # more than 2 GiB of text are an error
    return pa.StringArray.from_buffers(
        len(values), narrow.buffers()[1], pa.py_buffer(b"".join(texts.values())), is_there
    )


def _bits(values: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
