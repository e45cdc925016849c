"""The partition against one worked out instant by instant."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from commtrace.analysis.breakdown.partition import Partition, partition
from commtrace.analysis.breakdown.states import BUBBLE, OTHER, STALL_PRIORITY, STATE_OF_KIND, TRANSFER, WAIT, State
from commtrace.analysis.matching.match import RankMatches, match
from commtrace.analysis.matching.roles import PIPELINE as PIPELINE_ROLE
from commtrace.analysis.matching.roles import Roles, find_roles
from commtrace.trace import schema
from commtrace.trace.run import RankTrace
from commtrace.trace.spans import Int64
from tests.analysis.breakdown.drawn_rows import DATA_PARALLEL, PIPELINE, any_rows
from tests.factory import Row, make_run


class Believed:
    """One rank, looked at in every nanosecond."""

    def __init__(self, trace: RankTrace, matches: RankMatches, roles: Roles, table: Partition) -> None:
        self.spans, self.table = trace.spans, table
        self.ready = matches.stall_ready
        self.role = [roles.words[code] for code in roles.ranks[trace.rank].role]
        self.stalled: Counter[tuple[int, int, State]] = Counter()

    def look(self, instant: int) -> tuple[State, bool]:
        """The state, and whether communication is in flight behind work."""
        spans = self.spans
        claims = [
            claim
            for row in np.flatnonzero((spans.start <= instant) & (instant < spans.end)).tolist()
            if (claim := self._claim(row, instant)) is not None
        ]
        # By priority, then the innermost; the state decides what is left.
        best = max(claims, default=None, key=lambda claim: (claim[0], claim[1], -claim[2], claim[3]))
        state = State(OTHER) if best is None else self.table.states[best[3]]
        is_stall = best is not None and best[0] == STALL_PRIORITY
        if best is not None and is_stall:
            self.stalled[best[1], best[2], state] += 1
        in_flight = ((spans.kind == schema.P2P) & (spans.start <= instant) & (instant < spans.end)).any()
        return state, bool(in_flight and not is_stall)

    def of_table(self, stalled_ns: Int64) -> Counter[tuple[int, int, State]]:
        """What each row stands for, by what it claims: of those that claim the same, any one may be believed."""
        stalled: Counter[tuple[int, int, State]] = Counter()
        for row in np.flatnonzero(stalled_ns.any(axis=1)).tolist():
            first, last = int(self.spans.start[row]), int(self.spans.end[row]) - 1
            for instant, ns in zip((first, last), stalled_ns[row].tolist(), strict=True):
                claim = self._claim(row, instant)
                assert claim is not None
                stalled[claim[1], claim[2], self.table.states[claim[3]]] += ns
        return +stalled

    def _claim(self, row: int, instant: int) -> tuple[int, int, int, int] | None:
        spans, kind = self.spans, int(self.spans.kind[row])
        start, end = int(spans.start[row]), int(spans.end[row])
        if kind == schema.STALL:
            ready = min(max(int(self.ready[row]), start), end)
            if instant >= ready:
                return STALL_PRIORITY, ready, end, self._position(State(TRANSFER, self.role[row]))
            waits = State(BUBBLE) if self.role[row] == PIPELINE_ROLE else State(WAIT, self.role[row])
            return STALL_PRIORITY, start, ready, self._position(waits)
        claim = STATE_OF_KIND.get(kind)
        return None if claim is None else (claim.priority, start, end, self._position(claim.state))

    def _position(self, state: State) -> int:
        return self.table.states.index(state)


@settings(max_examples=150, deadline=None)
@given(any_rows(), any_rows(), st.booleans())
def test_every_instant_is_in_the_state_that_is_believed(rows: list[Row], other: list[Row], only_last: bool) -> None:
    run = make_run({0: rows, 1: other}, [DATA_PARALLEL, PIPELINE])
    matches, roles = match(run), find_roles(run)
    table = partition(run, matches, roles, [1] if only_last else None)

    for rank, trace in run.ranks.items():
        believed = Believed(trace, matches.ranks[rank], roles, table)
        for row in np.flatnonzero(table.rank == rank).tolist():
            expected, hidden = np.zeros(len(table.states), np.int64), 0
            for instant in range(int(table.start[row]), int(table.end[row])):
                state, is_hidden = believed.look(instant)
                expected[table.states.index(state)] += 1
                hidden += is_hidden
            assert table.ns[row].tolist() == expected.tolist()
            assert table.hidden_ns[row] == hidden
        assert believed.of_table(table.stalled_ns[rank]) == believed.stalled
