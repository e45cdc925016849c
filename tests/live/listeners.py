"""What receives the summaries of steps, and marks that they need."""

from __future__ import annotations

from collections.abc import Sequence

from commtrace.live.summary import StepSummary
from commtrace.trace.metadata import Group
from commtrace.trace.schema import Row
from tests.trace.rows import mark


class Listener:
    def __init__(self) -> None:
        self.summaries: list[StepSummary] = []
        self.rows: list[Sequence[Row]] = []
        self.closed = 0
        self.error: Exception | None = None

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        if self.error is not None:
            raise self.error
        self.summaries.append(summary)
        self.rows.append(rows)

    def close(self) -> None:
        self.closed += 1

    def abandon_after_fork(self) -> None:
        pass


def group_mark(one: Group) -> Row:
    return mark("process_group", one.to_json())
