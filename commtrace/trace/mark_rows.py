"""Makes marks: rows that are not spans, such as process groups or clock anchors (trace/metadata.py lists them)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from commtrace.trace import schema

_NO = schema.NOT_APPLICABLE


def mark_row(name: str, detail: Mapping[str, Any] | Sequence[Any], step: int = _NO, at_ns: int = 0) -> tuple[Any, ...]:
    """Return a row of kind ``mark``, of this moment unless ``at_ns`` says of which."""
    now = at_ns or time.monotonic_ns()
    return (
        schema.MARK, name, schema.HOST, now, now, step, _NO, _NO, _NO, _NO, _NO, 0, _NO, _NO, None, _NO, False, _NO,
        _NO, schema.HOST_TIMING, json.dumps(detail, separators=(",", ":")),
    )  # fmt: skip
