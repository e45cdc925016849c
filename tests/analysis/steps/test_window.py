"""Steps chosen by the user: what is said of a step does not depend on which others are shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.communication.table import communication_table
from commtrace.analysis.steps.window import load_window
from commtrace.analysis.timeline import Timeline
from commtrace.errors import ConfigurationError
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, span, stall
from tests.pipeline_factory import PipelineJob

STEPS, STEP_NS, LATE_NS, TRANSFER_NS = 7, 100, 30, 5
PAIR = group("dp", 0, 1)


def crossing_run() -> Run:
    """Both ranks launch an all_reduce at the end of a step, rank 1 late, and wait for it at the start of the next."""
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for step in range(STEPS):
        begin, end = STEP_NS * step, STEP_NS * (step + 1)
        for rank, launched in ((0, end - 10), (1, end + LATE_NS - 10)):
            done = end + LATE_NS - 10 + TRANSFER_NS
            # Rank 1 counts the launch to the next step: the members of one communication have different numbers.
            number = step if rank == 0 else step + 1
            row = collective("all_reduce", PAIR, step, launched, done, id=step, step=number)
            rows[rank] += [span("step", begin, end, step=step), row]
            rows[rank].append(stall(row, max(launched, end), done, step=step + 1))
    return make_run(rows, [PAIR])


RUNS = {
    "crossing": crossing_run(),
    "pipeline": PipelineJob(2, 3, data_parallel=2, transfer_ns=7_000, all_reduce_ns=90_000, steps=STEPS).run(),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("steps", [None, "0:7", "2:4", "3:4", "3", "1:6:2", "3:"])
def test_a_step_is_told_alike_in_every_window(name: str, steps: str | None) -> None:
    run = RUNS[name]
    alone, shown = (_of_step(analyse(run, text), 3) for text in ("3", steps))
    assert shown == alone


def _of_step(analysis: Analysis, step: int) -> list[Any]:
    table = analysis.partition
    rows = table.step == step
    drawn = Timeline.of_analysis(analysis).step(step)["ranks"]
    stalls = [[rank["stalls"][name] for name in ("state", "start", "duration")] for rank in drawn]
    return [table.states, table.ns[rows].tolist(), table.hidden_ns[rows].tolist(), stalls]


@pytest.mark.parametrize("name", RUNS)
def test_the_tables_of_single_steps_add_up_to_that_of_all(name: str) -> None:
    run = RUNS[name]
    of_each = [_totals(analyse(run, str(step))) for step in range(STEPS)]
    assert np.sum(of_each, axis=0).tolist() == _totals(analyse(run, f"0:{STEPS}")).tolist()


def _totals(analysis: Analysis) -> Any:
    context = analysis.context
    table = communication_table(context.run, context.matches, analysis.partition, context.roles, context.steps)
    columns = ("count", "num_bytes", "exposed_ns", "hidden_ns", "unmatched")
    return np.array([sum(getattr(row, column) for row in table) for column in columns])


def test_waiting_for_what_was_launched_in_the_warm_up_is_waiting() -> None:
    analysis = analyse(crossing_run())

    first = (analysis.partition.rank == 0) & (analysis.partition.step == 1)
    assert analysis.steps.used[0] == 1
    assert analysis.partition.total("exposed wait")[first].tolist() == [LATE_NS - 10]
    assert analysis.partition.total("exposed transfer")[first].tolist() == [TRANSFER_NS]


def test_an_exported_step_is_matched_with_its_neighbours() -> None:
    window = load_window(crossing_run(), "4:5")
    timeline = Timeline.of_recording(window.context, window.wanted)

    assert timeline.steps == [4]
    (of_rank_0, _) = timeline.step(4)["ranks"]
    assert of_rank_0["stalls"]["duration"] == [LATE_NS - 10, TRANSFER_NS]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (crossing_run(), "no step in 90:95; recorded are 0–6"),
        (make_run({0: [span("step", 0, 9, step=4)]}), "no step in 90:95; recorded is only 4"),
        (make_run({0: [span("forward", 0, 9)]}), "no step in 90:95; the run has no steps at all"),
    ],
)
def test_steps_that_were_not_recorded_are_refused(run: Run, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_window(run, "90:95")
