from __future__ import annotations

from commtrace.trace import schema
from commtrace.trace.schema import Row
from commtrace.trace.spans import DTYPE_OF_COLUMN


def test_codes_are_positions_in_the_vocabularies() -> None:
    for words, suffix in ((schema.KINDS, ""), (schema.LANES, "")):
        for position, word in enumerate(words):
            assert getattr(schema, word.upper() + suffix) == position
    assert [schema.TIMINGS[code] for code in (schema.HOST_TIMING, schema.CUDA_EVENT_TIMING, schema.NCCL_TIMING)] == [
        "host",
        "cuda_event",
        "nccl_timing",
    ]
    assert (schema.TIMINGS[schema.KERNEL_TIMING], schema.TIMINGS[schema.UNKNOWN_TIMING]) == ("kernel", "unknown")


def test_words_of_recorded_files_keep_their_codes() -> None:
    """Appending is fine, any other change makes old files unreadable."""
    assert schema.KINDS[:6] == ("step", "forward", "backward", "recompute", "module", "optimizer")
    assert schema.KINDS[6:13] == ("collective", "p2p", "stall", "data", "checkpoint", "gc", "mark")
    assert schema.KINDS[13:16] == ("evaluation", "user", "phase")
    assert schema.LANES == ("host", "compute", "communication")


def test_spans_in_memory_have_every_column_but_the_detail() -> None:
    assert [name for name in schema.SCHEMA.names if name != "detail"] == [*DTYPE_OF_COLUMN]


def test_a_row_has_the_columns_of_the_schema_in_its_order() -> None:
    assert Row._fields == tuple(schema.SCHEMA.names)
