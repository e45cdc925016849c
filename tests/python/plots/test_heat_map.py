from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from commtrace.errors import ConfigurationError
from commtrace.python.plots.style import Plot
from tests.pipeline_factory import Clock, PipelineJob
from tests.python.plots.drawn import plots_of

JOB = PipelineJob(
    stages=2, microbatches=4, data_parallel=3, optimizer_ns=1_000_000, steps=4, extra_forward_ns={4: 250_000}
)


def cells(plot: Plot) -> list[list[float]]:
    axes = plot.figure.axes[0]
    shape = len(axes.get_yticklabels()), len(axes.get_xticklabels())
    drawn = axes.collections[0].get_array()
    assert drawn is not None
    values: list[list[float]] = np.ma.filled(drawn, np.nan).reshape(shape).round(6).tolist()
    return values


def test_the_slow_rank_stands_out_among_dp_and_pp() -> None:
    plot = plots_of(JOB.run()).heat_map()

    axes = plot.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dp 0", "dp 1", "dp 2"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["pp 0", "pp 1"]
    assert cells(plot) == [[1.0, 1.0], [1.0, round(14 / 13, 6)], [1.0, 1.0]]
    assert [text.get_text() for text in axes.texts] == ["1", "1", "1", "1.077", "1", "1"]


def test_a_rank_that_a_finding_names_does_not_make_its_peer_look_fast() -> None:
    job = replace(JOB, data_parallel=2, steps=12, extra_forward_ns={3: 2_000_000})

    plot = plots_of(job.run()).heat_map()

    assert cells(plot) == [[1.0, 1.0], [1.0, round(21 / 13, 6)]]


def test_times_are_per_step() -> None:
    plot = plots_of(JOB.run()).heat_map("compute", "rank", "step")

    assert [label.get_text() for label in plot.figure.axes[0].get_xticklabels()] == ["1", "2", "3"]
    assert cells(plot) == [[13.0 + (rank == 4)] * 3 for rank in range(6)]


def test_a_cell_shows_the_highest_of_its_ranks() -> None:
    plot = plots_of(JOB.run()).heat_map("compute", "rank", "pp")
    assert np.isnan(cells(plot)[0][1])  # rank 0 is not in stage 1

    plot = plots_of(JOB.run()).heat_map("compute", "pp", "step")
    assert cells(plot) == [[13.0] * 3, [14.0] * 3]
    assert "the highest of them" in plot.figure.get_supxlabel()


def test_clock_offsets_are_those_of_the_hosts() -> None:
    nodes = {rank: "ab"[rank // 3] for rank in range(6)}

    plot = plots_of(replace(JOB, nodes=nodes, clocks={"b": Clock(5_000_000)}).run()).heat_map(
        "clock offset", "host", "step"
    )

    assert cells(plot)[0] == [0.0] * 3
    assert cells(plot)[1] == pytest.approx([5_000.0] * 3, abs=10)


def test_a_value_that_the_run_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth is not known of this run"):
        plots_of(JOB.run()).heat_map("bandwidth")


def test_other_values_and_dimensions_are_an_error() -> None:
    plots = plots_of(JOB.run())
    with pytest.raises(ConfigurationError, match="value='beauty': write one of slowness, compute, wait"):
        plots.heat_map("beauty")
    with pytest.raises(ConfigurationError, match="'tp' is no dimension of this run: write one of rank, pp, dp"):
        plots.heat_map(rows="tp")
    with pytest.raises(ConfigurationError, match="'step' is no dimension"):
        plots.heat_map(rows="step")


def test_it_can_be_saved(tmp_path: Path) -> None:
    plots_of(JOB.run()).heat_map().save(tmp_path / "map.svg")

    assert ">dp 1</text>" in (tmp_path / "map.svg").read_text("utf-8")
