"""The model of recorded steps replays them as their program does, and is a small part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.observed_steps import ObservedSteps, Places
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.replay.scenarios import MEASURED, NoTransfers, Scenario, WithoutPauses, replay_steps
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.stragglers.search import find_stragglers, measure_work
from commtrace.findings.causes import PAUSES
from commtrace.synth import Fault, Job, synthesize

ALIKE = Job(tp=2, pp=2, dp=2, microbatches=4, steps=9, jitter=0.05)
"""Eight of its steps count."""

FAULTS = (Fault.parse("data=1:30@3:6"), Fault.parse("checkpoint=0:50@5:6"), Fault.parse("gc=2:5"))


def analysed(job: Job = ALIKE, **changes: Any) -> Analysis:
    return analyse(synthesize(replace(job, **changes)).run)


def columns(analysis: Analysis) -> list[int]:
    """The number of columns of each part of the model."""
    return sorted(part.steps.shape[1] for part in analysis.observed.parts)


JOBS = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"faults": FAULTS},
        {"missing": 0.001, "faults": FAULTS},
        {"schedule": "gpipe", "overlap_grad_reduce": True},
        {"pp": 1, "jitter": 0.0},
    ],
    ids=str,
)


@JOBS
def test_steps_take_as_long_as_in_their_program(changes: dict[str, Any]) -> None:
    analysis = analysed(**changes)

    assert analysis.observed.step_ns().tolist() == analysis.program.step_times().tolist()


def test_steps_that_do_the_same_are_columns_of_one_shape() -> None:
    assert columns(analysed()) == [8]
    # Only the step of the checkpoint has other stretches of work than the others.
    assert columns(analysed(faults=FAULTS)) == [1, 7]
    # Where communications are missing, a step is like no other one: all of these are side by side in one column.
    assert columns(analysed(missing=0.001)) == [1, 4]


def test_the_model_takes_less_than_a_tenth_of_its_program() -> None:
    analysis = analysed(steps=40)
    spans = sum(len(trace.spans) for trace in analysis.run.ranks.values())

    assert analysis.observed.num_bytes < 16 * spans
    assert _num_bytes(analysis.program) > 100 * spans


def _num_bytes(program: Program) -> int:
    tables = (program.edges, program.segments, program.transfers, program.stalls)
    of_tables = [getattr(table, name) for table in tables for name in table.__slots__]
    return sum(column.nbytes for column in (program.piece_ns, program.piece_segment, *of_tables))


@dataclass(frozen=True)
class Shorter:
    """All work takes a share of its time, by entry."""

    share: Any

    def apply(self, work: Any, ns: Any) -> Any:
        return np.rint(ns * self.share[work.entry]).astype(np.int64)


@JOBS
def test_a_scenario_takes_as_long_as_in_the_program(changes: dict[str, Any]) -> None:
    analysis = analysed(**changes)
    program, table = analysis.program, analysis.work
    statistics = StepStatistics.of(analysis.replayed.run, program)
    share = np.linspace(0.25, 1.5, len(table.entries.rank))
    shorter: Any = Shorter(share)
    scenarios = [
        MEASURED,
        Scenario((shorter,)),
        Scenario((WithoutPauses(PAUSES),), (NoTransfers(),)),
        Scenario(transfers=(NoTransfers(),), without_launches=True),
    ]

    found = replay_steps(analysis.observed, Places.of(statistics), scenarios)

    segments, none = program.segments, np.zeros_like(program.transfers.ns)
    shortened = np.rint(segments.total_ns * share[table.entry]).astype(np.int64)
    bare = replace(program, edges=replace(program.edges, fixed_ns=np.zeros_like(program.edges.fixed_ns)))
    expected = [
        program.step_times(),
        program.step_times(shortened),
        program.step_times(segments.work_ns, none),
        bare.step_times(None, none),
    ]
    assert found.replayed_ns.tolist() == [one.tolist() for one in expected]
    assert found.sums.work_ns.tolist() == [
        int(one.sum()) for one in (segments.total_ns, shortened, segments.work_ns, segments.total_ns)
    ]
    assert found.sums.measured_ns == int(program.measured_step_times().sum())
    assert found.steps.tolist() == program.steps.tolist()


def test_without_roles_no_stall_is_of_a_pipeline() -> None:
    analysis = analysed()
    observed = ObservedSteps.of(analysis.run, build_program(analysis.run, analysis.matches))

    waits = [part.waits_between_stages(None, part.transfer_ns) for part in observed.parts]

    assert [len(own) for own in waits] == [0]
    assert all(len(part.waits_between_stages(None, part.transfer_ns)) for part in analysis.observed.parts)


def test_events_that_wait_for_one_another_in_a_circle_are_no_error_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ReplayError("a circle")

    monkeypatch.setattr("commtrace.analysis.replay.observed_steps.ReplayGraph.from_edges", fails)
    analysis = analysed()

    assert measure_work(analysis).why_not == "a circle"
    assert "a circle" in str(find_stragglers(analysis.run, analysis.matches).not_judged)
