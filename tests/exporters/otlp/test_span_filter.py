"""What is exported."""

from __future__ import annotations

from itertools import pairwise

import pytest

from commtrace.config import Config, OtlpConfig
from commtrace.exporters.otlp.span_filter import SpanFilter
from commtrace.options import OTLP_LEVELS
from commtrace.trace import schema
from tests.trace.rows import row


def test_every_level_holds_those_before_it() -> None:
    sizes = [SpanFilter(level).kinds for level in OTLP_LEVELS]

    assert sizes == sorted(sizes, key=len)
    assert all(less < more for less, more in pairwise(sizes))
    assert SpanFilter("modules").kinds == set(range(len(schema.KINDS))) - {schema.MARK, schema.KERNEL, schema.MEMORY}


@pytest.mark.parametrize(
    ("ranks", "taken"),
    [("", [0, 1, 2, 3, 4, 5]), ("0,4", [0, 4]), ("1:6:2", [1, 3, 5]), ("5, 0:2", [0, 1, 5]), ("7", [])],
)
def test_ranks(ranks: str, taken: list[int]) -> None:
    span_filter = SpanFilter.from_config(Config(otlp=OtlpConfig(ranks=ranks)), world_size=6)

    assert [rank for rank in range(6) if span_filter.takes_rank(rank)] == taken
    assert span_filter.first_rank == (taken[0] if taken else -1)


def test_rows_are_chosen_by_the_step_that_they_bear() -> None:
    rows = [row(step=9, start=1), row(step=10, start=2), row(step=11, start=3), row(step=-1, start=4)]
    span_filter = SpanFilter("phases", every=5)

    assert [one[3] for one in span_filter.rows(rows, step=11)] == [2]
    assert [one[3] for one in span_filter.rows(rows, step=10)] == [2, 4]
    assert span_filter.rows([row(kind=schema.COLLECTIVE, step=10)], step=10) == []
