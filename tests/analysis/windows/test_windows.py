"""What is found in a run does not depend on how its steps are cut into windows: equal to the digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.timeline import Outline, StepBoxes, Timeline
from commtrace.analysis.windows.run import (
    FEWEST_STEPS,
    measure_run,
    open_run,
    survey_large_run,
)
from commtrace.synth import Fault, Job, random_clocks, synthesize
from commtrace.synth.synthesis import write
from commtrace.trace import schema
from commtrace.trace.files.reader import find_files
from tests.analysis.windows.made_runs import MADE, Told, plain, stragglers_of, summary_of, tell
from tests.analysis.windows.recording import record
from tests.json_reading import read_back

WINDOWS = pytest.mark.parametrize("sizes", [(1, 3), pytest.param((7, 1_000), marks=pytest.mark.thorough)], ids=str)
"""Steps of a window."""


def assert_windows_change_nothing(directory: Path, sizes: tuple[int, ...]) -> None:
    """Compare windows of these sizes with the run as a whole."""
    whole = measure_run(directory, tell, most_bytes=1 << 30)
    stragglers, summary = stragglers_of(open_run(directory)), summary_of(open_run(directory))
    in_plain = plain(whole)
    numbers = np.concatenate([trace.spans.step for trace in whole.recorded.ranks.values()])
    rows_of_step = min(int((numbers == step).sum()) for step in whole.steps.used)
    for steps in sizes:
        windows: list[Analysis] = []

        def measure(analysis: Analysis, windows: list[Analysis] = windows) -> Told:
            windows.append(analysis)
            return tell(analysis)

        cut = measure_run(directory, measure, most_bytes=0, most_rows=steps * rows_of_step)

        # Of fewer recorded steps, each window would be the whole run, which is then read at once.
        few = whole.recorded.ranks[min(whole.recorded.ranks)].spans.kind.tolist().count(schema.STEP) < FEWEST_STEPS
        assert few or len(windows) >= len(whole.steps.used) // steps
        assert plain(cut) == in_plain, f"windows of {steps} steps"
        in_windows = open_run(directory, most_bytes=0, most_rows=steps * rows_of_step)
        assert stragglers_of(in_windows) == stragglers, f"windows of {steps} steps"
        assert summary_of(in_windows) == summary, f"windows of {steps} steps"


@WINDOWS
@pytest.mark.parametrize("name", MADE)
def test_windows_of_any_size_say_what_the_whole_run_says(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    assert_windows_change_nothing(record(MADE[name], tmp_path / "run"), sizes)


JOBS = st.builds(
    Job,
    tp=st.integers(1, 2),
    pp=st.integers(1, 2),
    dp=st.integers(2, 3),
    microbatches=st.just(4),
    steps=st.integers(4, 9),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
    overlap_grad_reduce=st.booleans(),
    missing=st.sampled_from([0.0, 0.05]),
    jitter=st.sampled_from([0.0, 0.02]),
    faults=st.sampled_from([(), (Fault.parse("slow-rank=0:1.4"),), (Fault.parse("data=0:30"),)]),
    seed=st.integers(0, 2**20),
    gpus_per_host=st.just(2),
    clocks=st.sampled_from([{}, random_clocks(8, wall_error_ns=2_000_000, drift_ppm=5)]),
)


@WINDOWS
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=JOBS)
def test_windows_of_simulated_jobs_say_what_the_whole_run_says(
    job: Job, sizes: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run")
    write(synthesize(job), directory)

    assert_windows_change_nothing(directory, sizes)


@pytest.mark.parametrize("name", ["far reaching", "repeated", "pipeline"])
def test_steps_that_lie_apart_are_read_together(name: str, tmp_path: Path) -> None:
    directory = record(MADE[name], tmp_path / "run")
    whole, large = analyse(directory), survey_large_run(find_files(directory), most_bytes=0)
    assert large is not None
    steps = large.steps.used[::3]

    read = large.analyse_steps(steps)

    own = [Timeline.of_analysis(analysis) for analysis in (read, whole)]
    assert read.context.steps == steps
    for step in steps:
        drawn, expected = (_without_codes(timeline.step(step), timeline.outline()) for timeline in own)
        assert drawn == expected


def _without_codes(step: StepBoxes, outline: Outline) -> dict[str, Any]:
    """The same with words for names, and communications numbered as they come."""
    words, joins = [*outline["names"], ""], dict[int, int]()
    drawn: dict[str, Any] = read_back(step)
    for rank in drawn["ranks"]:
        for table in ("work", "host", "communication"):
            for column in {"name", "dtype"} & set(rank[table]):
                rank[table][column] = [words[code] for code in rank[table][column]]
        rank["communication"]["join"] = [joins.setdefault(one, len(joins)) for one in rank["communication"]["join"]]
    return drawn


def test_the_causes_of_a_bubble_are_those_of_the_whole_run(tmp_path: Path) -> None:
    directory = record(MADE["pipeline"], tmp_path / "run")

    whole = find_pipeline(open_run(directory))

    assert whole is not None
    assert whole.per_stage[0].schedule_ns is not None
    assert find_pipeline(open_run(directory, most_bytes=0, most_rows=1)) == whole
