"""Statistics and scenarios of the steps of a job, taken of all steps at once and of some after the other."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay import step_statistics
from commtrace.analysis.replay.observed_steps import ObservedProgram, ObservedSteps, Places
from commtrace.analysis.replay.program import Program, build_program, common_steps
from commtrace.analysis.replay.scenarios import (
    MEASURED,
    EqualMicrobatches,
    NormalLinks,
    NormalStages,
    Replay,
    Scenario,
    replay_steps,
)
from commtrace.analysis.replay.segments import BETWEEN
from commtrace.analysis.replay.step_statistics import Entries, StatisticsParts, StepStatistics, WorkTable
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.analysis.stragglers.slow_links import typical_transfers
from commtrace.analysis.stragglers.slow_ranks import MICROBATCHES, SELDOM, WORK, find_slow_ranks, normal_speed
from commtrace.analysis.stragglers.work_statistics import PeerComparison, WorkStatistics, compare_with_peers
from commtrace.findings.causes import DATA, GC
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace.run import Run


def compared(*rows: dict[str, int]) -> PeerComparison:
    """What is compared of these rows, in all steps."""
    names = (*Entries._fields, "step", "microbatch", "begins_phase", "work_ns", "total_ns", "launch_bound_ns")
    columns: dict[str, Any] = {name: np.array([row.get(name, 0) for row in rows], np.int64) for name in names}
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


FAULTS = "slow-rank=3:1.4@4:12", "data=1:30@3:12:2", "gc=2:40", "slow-link=0-4:8", "sequence-imbalance=0.4"
JOB = Job(dp=2, pp=2, tp=2, microbatches=4, steps=12, jitter=0.05, faults=(*map(Fault.parse, FAULTS),))


class Recorded(NamedTuple):
    """A job with slow ranks, input and links, as a whole and in parts of 1, 4 and 7 steps."""

    run: Run
    whole: Program
    parts: list[Program]

    @property
    def work(self) -> WorkStatistics:
        return WorkStatistics.of(self.run, StepStatistics.of(self.run, self.whole), Thresholds())


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    analysis = analyse(synthesize(JOB).run)
    run, matches = analysis.run, analysis.matches
    parts = np.split(common_steps(run), [1, 5])
    return Recorded(run, build_program(run, matches), [build_program(run, matches, steps) for steps in parts])


def test_statistics_of_parts_add_up_to_those_of_the_whole(recorded: Recorded) -> None:
    first, second, third = (StatisticsParts.of(recorded.run, part) for part in recorded.parts)

    added = WorkStatistics.of(recorded.run, (first + second + third).joined(), Thresholds())

    work = recorded.work
    for one, other in (
        (added.entries, work.entries),
        (asdict(added.peers), asdict(work.peers)),
        (added.work_ns, work.work_ns),
        (added.of_steps.pauses_ns, work.of_steps.pauses_ns),
        (added.of_steps.replayed_ns, work.of_steps.replayed_ns),
        (typical_transfers(added), typical_transfers(work)),
    ):
        np.testing.assert_equal(one, other)
    assert (added.step_ns, added.replay_error) == (work.step_ns, work.replay_error)
    assert typical_transfers(work)


def test_the_same_steps_are_sampled_however_a_run_is_divided(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = StepStatistics.of(recorded.run, recorded.whole)
    monkeypatch.setattr(step_statistics, "MOST_ROWS", (len(of_all.table) + len(of_all.transfers)) // 3)
    monkeypatch.setattr(step_statistics, "FEWEST_STEPS", 2)

    whole = StatisticsParts.of(recorded.run, recorded.whole).joined()
    first, second, third = (StatisticsParts.of(recorded.run, part) for part in recorded.parts)

    assert 2 <= len(whole.steps) <= len(of_all.steps) / 2
    drawn = np.isin(of_all.steps, whole.steps)
    assert whole.measured_ns.tolist() == of_all.measured_ns[drawn].tolist()
    for parts in (first + second + third, first + (second + third)):
        added = parts.joined()
        assert added.num_rows == whole.num_rows <= step_statistics.MOST_ROWS
        works = [WorkStatistics.of(recorded.run, one, Thresholds()) for one in (added, whole)]
        found, expected = ([one.steps, one.work_ns, asdict(one.peers), typical_transfers(one)] for one in works)
        np.testing.assert_equal(found, expected)


def scenarios(work: WorkStatistics) -> list[Scenario]:
    """One of each kind, and all of them together."""
    found = find_slow_ranks(work, {})
    of_ranks = Scenario((normal_speed(found, {3: (WORK, GC), 1: (SELDOM, DATA), 5: (MICROBATCHES,), 2: (GC,)}),))
    of_stages = Scenario((NormalStages(np.linspace(0.5, 1, 2 * len(work.steady)).reshape(2, -1)),))
    of_microbatches = Scenario((EqualMicrobatches(work.peers.own_ns.astype(np.int64)),))
    rows = np.arange(len(work.of_steps.transfers.traffic))
    of_links = Scenario(
        transfers=(
            NormalLinks(work.of_steps.steps > 3, np.where(rows % 2, 0.25, 1.0), (rows * 1e3).astype(np.float64)),
        )
    )
    return [MEASURED, of_ranks, of_stages, of_microbatches, of_links, of_ranks + of_stages + of_links]


def test_a_scenario_is_replayed_part_by_part_as_in_the_whole(recorded: Recorded) -> None:
    work = recorded.work
    places, asked = pickle.loads(pickle.dumps((Places.of(work.of_steps), scenarios(work))))

    whole, *parts = (
        replay_steps(ObservedSteps.of(recorded.run, program), places, asked)
        for program in (recorded.whole, *recorded.parts)
    )

    np.testing.assert_equal(asdict(reduce(add, parts)), asdict(whole))
    assert len({step_ns.tobytes() for step_ns in whole.replayed_ns}) == 6  # each of them changes something


def test_a_rank_at_normal_speed_saves_what_it_was_slow_for() -> None:
    """Of four ranks one is slow from step 4 on; without noise, that is all that a step can save."""
    job = Job(dp=4, steps=10)
    slow, well = (synthesize(replace(job, faults=faults)) for faults in ((Fault.parse("slow-rank=3:1.4@4:10"),), ()))
    slow_ns, well_ns = (
        np.array([step["end_ns"] - step["start_ns"] for step in made.truth["steps"]]) for made in (slow, well)
    )
    analysis = analyse(slow.run)
    _, steps, statistics = ObservedProgram.of(analysis.run, analysis.matches)
    found = find_slow_ranks(WorkStatistics.of(analysis.run, statistics, Thresholds()), {})

    saved_ns = Replay.of(steps, statistics).saved_ns(Scenario((normal_speed(found, {3: (WORK,)}),)))

    assert saved_ns.tolist() == pytest.approx((slow_ns - well_ns)[steps.steps].tolist(), rel=0.01)
    assert not saved_ns[steps.steps < 4].any()
