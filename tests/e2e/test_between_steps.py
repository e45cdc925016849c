"""A loop that leaves 30 % of its time between the steps that it marks: every surface says one length of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from commtrace.analysis.breakdown.states import State
from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.predict import predict
from commtrace.analysis.steps.work_begins import work_begins
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.analysis.summary import Summary, summarise
from commtrace.analysis.timeline import step_durations
from commtrace.history.facts import facts_of
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import launch
from tests.free_ports import free_port

pytestmark = pytest.mark.e2e

STEPS = 12


@dataclass(frozen=True)
class RecordedLoop:
    run: Run
    analysis: Analysis
    summary: Summary
    metrics: str  # of rank 0, after all steps


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> RecordedLoop:
    directory, metrics = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("metrics") / "rank-0"
    environment = {
        "COMMTRACE_DIR": str(directory),
        "COMMTRACE_EXPORT": "prometheus",
        "COMMTRACE_PROMETHEUS_PORT": str(free_port()),
    }
    program = ["tests/e2e/programs/between_steps.py", str(STEPS), str(metrics)]
    completed = launch(program, nproc=2, env=environment)
    assert completed.returncode == 0, completed.stdout
    run = load_run(directory)
    return RecordedLoop(run, analyse(run), summarise(run), metrics.read_text())


def mean_step_ns(loop: RecordedLoop) -> float:
    """The mean over ranks and steps from one end to the next."""
    lengths = []
    for trace in loop.run.ranks.values():
        rows = np.flatnonzero(trace.spans.kind == schema.STEP)
        ends = trace.spans.end[rows[np.argsort(trace.spans.step[rows])]]
        assert len(ends) == STEPS
        lengths.append(np.diff(ends))
    return float(np.mean(lengths))


def test_the_steps_add_up_to_the_time_of_the_run(loop: RecordedLoop) -> None:
    for trace in loop.run.ranks.values():
        rows = np.flatnonzero(trace.spans.kind == schema.STEP)
        start, end = trace.spans.start[rows], trace.spans.end[rows]
        assert start[1:].tolist() == end[:-1].tolist()
        own = end - work_begins(trace.spans, rows)
        assert own[0] == end[0] - start[0]  # the first step has none before it
        assert own[1:].sum() < 0.85 * (end - start)[1:].sum()


def test_the_parts_of_a_step_have_the_names_of_what_was_done_between_steps(loop: RecordedLoop) -> None:
    partition = loop.analysis.partition

    assert (partition.ns.sum(axis=1) == partition.wall_ns).all()
    for rank in loop.summary.ranks:
        evaluation = rank.of_state[State("compute", "evaluation")]
        assert rank.part("data") > 4e6
        assert evaluation > 1e6
        assert rank.part("between") > 5e6
        assert rank.part("between") + rank.part("data") + evaluation > 25e6
        assert rank.part("other") < 0.1 * rank.wall_ns


def test_all_surfaces_say_the_same_length(loop: RecordedLoop) -> None:
    mean = mean_step_ns(loop)
    used = loop.analysis.steps.used
    assert len(used) == STEPS - 1
    chart = step_durations(loop.analysis.run, used)
    observed = find_stragglers(loop.analysis.run, loop.analysis.matches, around=loop.analysis.context.run)
    path = loop.summary.critical_path
    fidelity = predict(loop.analysis, Changes()).prediction.fidelity
    facts = facts_of(loop.run, now_ns=0)

    assert observed.findings is not None
    assert np.mean([rank.wall_ns for rank in loop.summary.ranks]) == pytest.approx(mean, abs=1)
    assert np.mean(list(chart.values())) == pytest.approx(mean, abs=1)
    assert fidelity.measured_ns == pytest.approx(mean, abs=1)
    assert fidelity.replayed_ns == pytest.approx(mean, rel=0.02)
    assert path is not None
    assert path.ns / path.num_steps == pytest.approx(mean, rel=0.02)
    assert facts.step_ns == pytest.approx(mean, rel=0.02)
    lost = loop.summary.lost_time
    assert lost is not None
    assert lost.steps_ns / lost.num_steps == pytest.approx(mean, abs=1)
    assert lost.steps_ns - lost.ideal_ns == sum(lost.costs_ns().values())


def test_a_single_step_has_the_parts_that_it_has_among_all(loop: RecordedLoop) -> None:
    number = 8  # behind an evaluation
    alone = analyse(loop.run.path, str(number)).partition
    among = loop.analysis.partition

    assert alone.ns.tolist() == among.ns[among.step == number].tolist()
    assert (alone.total("compute", "evaluation") > 5e6).all()
    assert (alone.total("data") > 5e6).all()


def test_the_metrics_count_the_same(loop: RecordedLoop) -> None:
    spans = loop.run.ranks[0].spans
    rows = spans.kind == schema.STEP

    def counted(name: str) -> float:
        match = re.search(rf"^{name} (\S+)$", loop.metrics, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    assert counted("commtrace_step_duration_seconds_count") == STEPS
    recorded_s = float((spans.end[rows] - spans.start[rows]).sum()) / 1e9
    assert counted("commtrace_step_duration_seconds_sum") == pytest.approx(recorded_s, rel=1e-6)
    means = analyse(loop.run, f"0:{STEPS}").partition
    between_s = float(means.total("between")[means.rank == 0].sum()) / 1e9
    assert counted("commtrace_between_seconds_total") == pytest.approx(between_s, rel=1e-3)


def test_what_the_rest_of_the_lost_time_is_has_its_name(loop: RecordedLoop) -> None:
    (rest,) = (finding for finding in loop.summary.findings if finding.cause == "rest")

    assert rest.words == "time between steps"
    assert (rest.share or 0.0) > 0.15
