from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from commtrace.errors import ConfigurationError
from commtrace.python.plots.style import COLOURS, Plot
from tests.factory import make_run, span
from tests.pipeline_factory import Clock, PipelineJob
from tests.python.plots.drawn import boxes, plots_of

JOB = PipelineJob(stages=2, microbatches=2, optimizer_ns=1_000_000, steps=3)


def texts(plot: Plot) -> list[str]:
    return [text.get_text() for text in plot.figure.axes[0].texts]


def caption(plot: Plot) -> str:
    return str(plot.figure.get_supxlabel())


def test_every_box_is_where_the_work_was() -> None:
    found = boxes(plots_of(JOB.run()).timeline(step=1))

    # rank 0: F0 F1, waits for B0 of rank 1, B0, waits for B1, B1; rank 1: waits for F0, F0 B0 F1 B1, waits for rank 0
    assert found["row"] == [(0.0, 10.0, 0), (0.0, 10.0, 1)]
    assert found["forward"] == [(0.0, 1.0, 0), (1.0, 2.0, 0), (1.0, 2.0, 1), (4.0, 5.0, 1)]
    assert found["backward"] == [(4.0, 6.0, 0), (7.0, 9.0, 0), (2.0, 4.0, 1), (5.0, 7.0, 1)]
    assert found["pipeline bubble"] == [(2.0, 4.0, 0), (6.0, 7.0, 0), (0.0, 1.0, 1)]
    assert found["wait mp"] == [(7.0, 9.0, 1)]
    assert found["optimizer"] == [(9.0, 10.0, 0), (9.0, 10.0, 1)]


def test_boxes_have_the_number_of_their_microbatch() -> None:
    plot = plots_of(JOB.run()).timeline(step=1)

    assert texts(plot) == ["0", "1", "0", "1", "optimizer", "0", "0", "1", "1", "optimizer"]


def test_stalls_are_hatched_and_work_is_not() -> None:
    axes = plots_of(JOB.run()).timeline(step=1).figure.axes[0]

    hatched = {one.get_label() for one in axes.collections if one.get_hatch()}
    assert hatched == {"pipeline bubble", "wait mp"}


def test_colours_can_be_those_of_microbatches() -> None:
    found = boxes(plots_of(JOB.run()).timeline(step=1, colour_by="microbatch"))

    assert found["forward, by microbatch"] == [(0.0, 1.0, 0), (1.0, 2.0, 1)]
    assert found["microbatch-1"] == [(1.0, 2.0, 0), (4.0, 5.0, 1)]


def test_without_a_step_it_is_the_one_of_median_duration() -> None:
    def lengthened(step: int) -> int:
        return {1: 300, 2: 100, 3: 200}.get(step, 50)

    begins = [1_000 * step for step in range(4)]
    rows = [span("step", begin, begin + lengthened(step), step=step) for step, begin in enumerate(begins)]

    plot = plots_of(make_run({0: rows, 1: rows})).timeline()

    assert "step 3" in plot.figure.get_suptitle()


def test_ranks_are_chosen() -> None:
    plot = plots_of(JOB.run()).timeline(step=1, ranks=[1])

    assert [label.get_text() for label in plot.figure.axes[0].get_yticklabels()] == ["rank 1 · pp1 · node0"]
    assert "1 of 2 ranks." in caption(plot)


def test_each_stage_of_many_ranks_has_its_median_and_its_slowest() -> None:
    job = PipelineJob(stages=2, microbatches=2, data_parallel=13, steps=2, extra_forward_ns={4: 500_000, 20: 250_000})

    plot = plots_of(job.run()).timeline()

    labels = [label.get_text() for label in plot.figure.axes[0].get_yticklabels()]
    assert [label.split(" · ")[0] for label in labels] == [
        "median: rank 7", "slowest: rank 4", "median: rank 19", "slowest: rank 20",
    ]  # fmt: skip
    assert "Of 26 ranks, the median and the slowest of each stage." in caption(plot)


def test_the_caption_states_how_well_the_clocks_agree() -> None:
    nodes = {0: "a", 1: "b"}
    aligned = PipelineJob(stages=2, microbatches=2, nodes=nodes, clocks={"b": Clock(5_000_000)})

    assert "All ranks are on the clock of one host." in caption(plots_of(JOB.run()).timeline())
    assert re.search(r"agree to [\d.]+ µs \(p99\)", caption(plots_of(aligned.run()).timeline()))


def test_narrow_boxes_are_drawn_once_per_place() -> None:
    many = [span("forward", 10 * number, 10 * number + 5, step=0) for number in range(10_000)]
    run = make_run({0: [span("step", 0, 100_000, step=0), *many]})

    found = boxes(plots_of(run).timeline())["forward"]

    assert 3_900 <= len(found) <= 4_001


def test_names_stay_text(tmp_path: Path) -> None:
    names = ["$\\alpha$", "<script>alert(1)</script>", "_hidden", "a & b", "\x00\n"]
    rows = [span("user", 10 * number, 10 * number + 10, step=0, name=name) for number, name in enumerate(names)]
    run = make_run({0: [span("step", 0, 50, step=0), *rows]}, nodes={0: "$host_1$"})
    plot = plots_of(run).timeline()

    plot.save(tmp_path / "step.svg")

    svg = (tmp_path / "step.svg").read_text("utf-8")
    assert "$host_1$</text>" in svg
    assert "_hidden</text>" in svg
    assert "$\\alpha$</text>" in svg
    assert "a &amp; b</text>" in svg
    assert "<script" not in svg
    assert "\x00" not in svg


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    plots = plots_of(JOB.run())
    for name in ("one.svg", "other.svg", "one.pdf", "other.pdf", "one.png", "other.png"):
        plots.timeline(step=1).save(tmp_path / name)

    for suffix in ("svg", "pdf", "png"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"other.{suffix}").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "one.svg").read_bytes()


def test_a_notebook_shows_a_bitmap() -> None:
    assert plots_of(JOB.run()).timeline()._repr_png_().startswith(b"\x89PNG")


def test_a_step_that_does_not_count_is_an_error_with_its_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"step 0 cannot be drawn: warm-up. These can: 1–2$"):
        plots_of(JOB.run()).timeline(step=0)
    with pytest.raises(ConfigurationError, match=r"step 7 cannot be drawn: it was not recorded. These can: 1–2$"):
        plots_of(JOB.run()).timeline(step=7)


def test_ranks_without_the_step_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no rank of these recorded step 1: 8"):
        plots_of(JOB.run()).timeline(step=1, ranks=[8])


def test_other_suffixes_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"name a file that ends in \.svg, \.png, \.pdf"):
        plots_of(JOB.run()).timeline().save(tmp_path / "step.gif")


def test_a_recording_without_steps_is_drawn_whole() -> None:
    run = make_run({0: [span("forward", 0, 2_000_000), span("backward", 2_000_000, 5_000_000)]})

    plot = plots_of(run).timeline()

    assert "whole recording" in plot.figure.get_suptitle()
    assert boxes(plot)["backward"] == [(2.0, 5.0, 0)]


def test_colours_are_those_of_the_page() -> None:
    style = (Path(__file__).resolve().parents[3] / "viewer/web/src/viewer.css").read_text()
    light = style.partition("}")[0]

    assert {name: colour for name, colour in re.findall(r"--([\w-]+): (#\w{6})", light) if name in COLOURS} == COLOURS
