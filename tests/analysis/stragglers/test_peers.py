"""Work of ranks, compared with the same work of others."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.segments import BETWEEN
from commtrace.analysis.replay.step_statistics import Entries, WorkTable
from commtrace.analysis.stragglers.peers import PeerComparison, compare_with_peers


def compared(*rows: dict[str, int]) -> PeerComparison:
    """What is compared of these rows, in all steps."""
    names = (*Entries._fields, "step", "microbatch", "begins_phase", "work_ns", "total_ns")
    columns = {name: np.array([row.get(name, 0) for row in rows], np.int64) for name in names}
    first, entry = grouped(pack([columns[name] for name in Entries._fields]))
    entries = Entries(*(columns.pop(name)[first].astype(np.int32) for name in Entries._fields))
    table = WorkTable(entries, entry.astype(np.int32), **columns)
    return compare_with_peers(table, np.ones(table.step.max() + 1, np.bool_))


def test_work_of_one_step_in_many_is_a_small_part_of_each() -> None:
    """Ranks 0 and 1 do the same in every step; in the first one rank 1 does something else for 900 ns."""
    every = [{"rank": rank, "step": step, "work_ns": 100} for rank in (0, 1) for step in range(9)]
    once = [{"rank": rank, "ordinal": 1, "work_ns": 10 + 890 * rank} for rank in (0, 1)]

    peers = compared(*every, *once)

    assert peers.excess_ns[peers.rank == 1].sum() == pytest.approx(890 / 9)


def test_a_pause_between_phases_that_only_one_rank_of_a_stage_makes_is_none_on_the_others() -> None:
    """Ranks 0 and 1 do the same; rank 1 pauses for 30 ns before it. Rank 2 is another stage."""
    rows = [
        {"rank": rank, "step": step, "stage": rank == 2, "kind": 1, "work_ns": 100}
        for rank in (0, 1, 2)
        for step in range(4)
    ]
    rows += [{"rank": 1, "step": step, "kind": BETWEEN + 1, "work_ns": 30} for step in range(4)]

    peers = compared(*rows)

    assert peers.from_typical_ns() == {0: pytest.approx(-15), 1: pytest.approx(15), 2: 0.0}
    assert peers.excess_ns[peers.rank == 1].sum() == pytest.approx(30)
    assert peers.ratio[(peers.kind > BETWEEN) & (peers.rank == 1)].tolist() == [0.0]
