"""Spans as rows of the table that commtrace records, and marks: rows that are no spans (see trace/marks.py)."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commtrace.trace import schema

_NO = schema.NOT_APPLICABLE


class Row(NamedTuple):
    """One span: the columns of ``schema.SCHEMA``, which says what they mean, in its order.

    Kind, lane and timing are codes, name and dtype words. A column that is not given does not apply.
    """

    kind: int
    name: str
    lane: int
    start: int
    end: int
    step: int = _NO
    microbatch: int = _NO
    chunk: int = _NO
    stage: int = _NO
    group: int = _NO
    seq: int = _NO
    op_in_seq: int = 0
    bytes: int = _NO
    self_bytes: int = _NO
    dtype: str | None = None
    peer: int = _NO
    is_async: bool = False
    id: int = _NO
    stalled_on: int = _NO
    timing: int = schema.HOST_TIMING
    detail: str | None = None


row_of: Final[Callable[[tuple[Any, ...]], Row]] = functools.partial(tuple.__new__, Row)
"""Makes a row of all its columns: for what is recorded, in a third of the time of ``Row(…)``."""


def mark_row(name: str, detail: Mapping[str, Any] | Sequence[Any], step: int = _NO, at_ns: int = 0) -> Row:
    """Return a row of kind ``mark``, of this moment unless ``at_ns`` says of which."""
    now = at_ns or time.monotonic_ns()
    return Row(schema.MARK, name, schema.HOST, now, now, step, detail=json.dumps(detail, separators=(",", ":")))
