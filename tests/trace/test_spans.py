from __future__ import annotations

import numpy as np
import pytest

from commtrace.trace import schema
from commtrace.trace.spans import DTYPE_OF_COLUMN, Spans


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


def test_no_spans_have_every_column_in_its_type() -> None:
    for spans in (Spans.empty(), Spans.concatenate([])):
        assert len(spans) == 0
        assert all(getattr(spans, name).dtype == dtype for name, dtype in DTYPE_OF_COLUMN.items())
