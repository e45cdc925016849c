from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from commtrace.errors import ConfigurationError
from tests.pipeline_factory import PipelineJob
from tests.python.plots.drawn import boxes, plots_of

JOB = PipelineJob(stages=2, microbatches=2, data_parallel=2, optimizer_ns=1_000_000, steps=3)


def test_bars_are_the_parts_of_the_mean_step_end_to_end() -> None:
    found = boxes(plots_of(JOB.run()).breakdown())

    # ranks 0 and 1 are stage 0: 2 · 3 ms and the optimizer, 3 ms of bubble; stage 1 waits 1 ms, and 2 ms at the end
    assert found["compute"] == [(0.0, 7.0, row) for row in range(4)]
    assert found["wait mp"] == [(7.0, 7.0, 0), (7.0, 7.0, 1), (7.0, 9.0, 2), (7.0, 9.0, 3)]
    assert found["pipeline bubble"] == [(7.0, 10.0, 0), (7.0, 10.0, 1), (9.0, 10.0, 2), (9.0, 10.0, 3)]


def test_bars_have_their_sums() -> None:
    axes = plots_of(JOB.run()).breakdown().figure.axes[0]

    assert [text.get_text() for text in axes.texts] == ["10 ms"] * 4
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank} · node0" for rank in range(4)]


def test_ranks_of_a_stage_are_one_bar() -> None:
    axes = plots_of(JOB.run()).breakdown(by="stage").figure.axes[0]

    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0 · mean of 2", "stage 1 · mean of 2"]


def test_stages_are_drawn_for_many_ranks() -> None:
    job = PipelineJob(stages=2, microbatches=2, data_parallel=33, steps=2)

    axes = plots_of(job.run()).breakdown().figure.axes[0]

    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0 · mean of 33", "stage 1 · mean of 33"]


def test_other_groups_are_an_error() -> None:
    wrong: Any = "planet"
    with pytest.raises(ConfigurationError, match="by='planet': write one of rank, stage, host, replica"):
        plots_of(JOB.run()).breakdown(wrong)
