"""Rows of any shape, for tests of what holds for all of them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.factory import Row, group, p2p, span, stall

DATA_PARALLEL = group("dp", 0, 1)
PIPELINE = group("pp", 0, 1, ordinal=1)
KINDS = ("forward", "backward", "recompute", "optimizer", "module", "user", "data", "checkpoint", "gc", "evaluation")
instants = st.integers(-10, 110)


@st.composite
def any_rows(draw: st.DrawFn) -> list[Row]:
    """Spans of all kinds that overlap as they like, and two steps that may have a gap between them."""
    rows = [
        span(kind, start, end)
        for kind, start, end in draw(st.lists(st.tuples(st.sampled_from(KINDS), instants, instants), max_size=8))
    ]
    places = st.sampled_from([DATA_PARALLEL, PIPELINE])
    for number, (where, start, end, stalled, until) in enumerate(
        draw(st.lists(st.tuples(places, instants, instants, instants, instants), max_size=5))
    ):
        message = p2p("recv", where, 1, number, start, max(start, end), id=number)
        rows += [message, stall(message, stalled, until)]
    return [*rows, span("step", 0, 50, step=0), span("step", draw(st.integers(50, 60)), 100, step=1)]
