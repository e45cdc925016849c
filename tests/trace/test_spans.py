from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN, RowBatch, Spans
from tests.trace.rows import mark, metadata, row


def test_rows_are_coded_and_new_names_appended() -> None:
    names = ["all_reduce"]

    spans = Spans.from_rows(
        [
            {"kind": "collective", "name": "all_reduce", "lane": "communication", "dtype": "bfloat16", "bytes": 64},
            {"kind": "forward", "name": "forward", "microbatch": 2},
        ],
        names,
    )

    assert names == ["all_reduce", "bfloat16", "forward"]
    assert spans.kind.tolist() == [schema.COLLECTIVE, schema.FORWARD]
    assert spans.lane.tolist() == [schema.COMMUNICATION, schema.COMPUTE]
    assert spans.name.tolist() == [0, 2]
    assert spans.dtype.tolist() == [1, schema.NOT_APPLICABLE]
    assert spans.bytes.tolist() == [64, schema.NOT_APPLICABLE]
    assert spans.microbatch.tolist() == [schema.NOT_APPLICABLE, 2]


def test_a_misspelt_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such columns: \['micro_batch'\]"):
        Spans.from_rows([{"kind": "forward", "micro_batch": 2}], [])


def test_take_replace_and_concatenate_keep_rows_together() -> None:
    spans = Spans.from_rows([{"start": i, "end": i + 10, "step": i} for i in range(4)], [])

    odd = spans.take(spans.step % 2 == 1)
    shifted = odd.replace(start=odd.start + 100)
    both = Spans.concatenate([shifted, spans.take(np.array([0]))])

    assert both.start.tolist() == [101, 103, 0]
    assert both.end.tolist() == [11, 13, 10]
    assert len(both) == 3


def test_columns_of_one_value_hold_it_once() -> None:
    spans = Spans.from_rows([{"kind": "step", "start": i, "end": i + 10, "step": i} for i in range(4)], [])
    narrowed = spans.narrowed()

    assert repr(narrowed) == repr(spans)
    assert narrowed.kind.strides == (0,)
    assert narrowed.start is spans.start
    assert len(Spans.empty().narrowed()) == 0


def test_no_spans_have_every_column_in_its_type() -> None:
    for spans in (Spans.empty(), Spans.concatenate([])):
        assert len(spans) == 0
        assert all(getattr(spans, name).dtype == dtype for name, dtype in DTYPE_OF_COLUMN.items())


def rows(count: int) -> list[Row]:
    """Words that come late, words that are missing, details, marks, and steps of two segments."""
    made = [
        row(kind=schema.COLLECTIVE, name=f"op{at // 400}", dtype="float32" if at % 3 else None, step=at // 100,
            start=at, end=at + 5, detail='{"a": 1}' if at % 7 == 0 else None)
        for at in range(count)
    ]  # fmt: skip
    return [*made, mark("topology", {"parallel": {"dp": 2}}), row(name="late", step=-1)]


@pytest.mark.parametrize("count", [1, 499, 1_201])
def test_a_file_is_the_same_whoever_made_the_columns(count: int, tmp_path: Path) -> None:
    made = rows(count)
    batch = RowBatch(made)
    assert not batch.has_columns
    assert len(batch.columns) == len(made)
    for directory, given in ((tmp_path / "rows", made), (tmp_path / "columns", batch)):
        writer = SegmentWriter(directory, metadata(), steps_per_segment=10)
        writer.write([row(step=0)])
        writer.write(given)
        writer.close()

    (of_rows,), (of_columns,) = (load_run(tmp_path / one).ranks.values() for one in ("rows", "columns"))
    names = [load_run(tmp_path / one).names for one in ("rows", "columns")]
    for column in DTYPE_OF_COLUMN:
        both = [getattr(one.spans, column).tolist() for one in (of_rows, of_columns)]
        if column in ("name", "dtype"):
            both = [
                [words[code] if code >= 0 else None for code in codes] for words, codes in zip(names, both, strict=True)
            ]
        assert both[0] == both[1], column
    assert of_rows.details == of_columns.details
    assert of_rows.parallel == of_columns.parallel == {"dp": 2}


def test_nothing_has_no_columns() -> None:
    assert len(RowBatch().columns) == 0
