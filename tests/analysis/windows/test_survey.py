"""A first look keeps what is small, and it says of the run what the whole of it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commtrace.analysis.breakdown.run_budget import run_budget
from commtrace.analysis.clocks import causality
from commtrace.analysis.clocks import fit as clock_fit
from commtrace.analysis.clocks.align import align
from commtrace.analysis.steps.attempts import separate_attempts
from commtrace.analysis.steps.choice import choose_steps
from commtrace.analysis.windows import survey as survey_module
from commtrace.analysis.windows.survey import Survey
from commtrace.analysis.windows.survey import survey_run as survey_files
from commtrace.synth import Job, random_clocks, synthesize
from commtrace.synth.synthesis import write
from commtrace.trace import schema
from commtrace.trace.files import segment_index
from commtrace.trace.files.budget import Budget
from commtrace.trace.files.reader import find_files, load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.run import Run
from tests.analysis.windows.made_runs import MADE, far_reaching_run
from tests.analysis.windows.recording import record
from tests.factory import make_run, span
from tests.trace.rows import mark, metadata, row, steps


def survey_run(directory: Path) -> Survey:
    return survey_files(find_files(directory))


def without_rows(run: Run) -> Run:
    empty = {rank: replace(trace, spans=trace.spans.take(slice(0)), details={}) for rank, trace in run.ranks.items()}
    return replace(run, ranks=empty, names=[])


@pytest.mark.parametrize("name", MADE)
def test_all_but_the_rows_is_what_the_reader_reads(name: str, tmp_path: Path) -> None:
    directory = record(MADE[name], tmp_path / "run")
    survey, run = survey_run(directory), separate_attempts(load_run(directory))

    assert repr(without_rows(survey.outline)) == repr(without_rows(run))
    assert run_budget(survey.outline) == run_budget(run)
    assert choose_steps(survey.outline, keep_warm_up=False) == choose_steps(run, keep_warm_up=False)
    assert survey.rows_of_step.num_rows.sum() == sum(len(trace.spans) for trace in run.ranks.values())


def test_the_outline_has_steps_saves_evaluations_and_the_first_row(tmp_path: Path) -> None:
    rows = [
        span("user", 0, 5, name="setup"),
        span("data", 6, 9),  # before the first step
        *(span("step", begin, begin + 90, step=begin // 100) for begin in (100, 200, 300)),
        *(span("forward", begin, begin + 80, step=begin // 100) for begin in (100, 200, 300)),
        span("data", 110, 120, step=1),  # within a step
        span("data", 285, 305, step=2),  # reaches out of one
        span("evaluation", 192, 199),
        span("checkpoint", 391, 399),
    ]
    survey = survey_run(record(make_run({0: rows}), tmp_path / "run"))

    outline = survey.outline.ranks[0].spans
    assert [(schema.KINDS[kind], start) for kind, start in zip(outline.kind, outline.start.tolist(), strict=True)] == [
        ("user", 0), ("data", 6), ("step", 100), ("evaluation", 192), ("step", 200), ("data", 285), ("step", 300),
        ("checkpoint", 391),
    ]  # fmt: skip


def test_rows_that_reach_far_are_kept(tmp_path: Path) -> None:
    survey = survey_run(record(far_reaching_run(), tmp_path / "run"))

    far = survey.ranks[2].far
    names = [survey.outline.names[code] for code in far.name.tolist()]
    assert sorted(names) == ["all_gather", "broadcast", "checkpoint", "epoch"]


def test_clocks_are_fitted_as_by_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tp=1, pp=2, dp=2, steps=6, gpus_per_host=1, clocks=random_clocks(4, wall_error_ns=2_000_000, drift_ppm=5))
    write(synthesize(job), tmp_path / "run")

    for most in (10**9, 40):
        for module, name in ((clock_fit, "MOST_ENDS"), (causality, "MOST_MESSAGES")):
            monkeypatch.setattr(module, name, most)
            monkeypatch.setattr(survey_module, name, most)
        alignment = align(load_run(tmp_path / "run"))
        assert alignment.observations > 0
        assert survey_run(tmp_path / "run").alignment == alignment


@pytest.mark.parametrize("recent", [1, 2, 64])
@pytest.mark.parametrize("name", [*MADE, "far"])
def test_reading_in_many_parts_equals_reading_in_one(
    name: str, recent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {**MADE, "far": far_reaching_run()}[name]
    survey = survey_run(record(run, tmp_path / "run", steps_per_segment=100))
    monkeypatch.setattr("commtrace.trace.files.compaction.is_worthwhile", lambda *_: False)
    monkeypatch.setattr(segment_index, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(survey_module, "_RECENT_STEPS", recent)
    in_parts = survey_run(record(run, tmp_path / "parts", steps_per_segment=100))

    for rank, whole in survey.ranks.items():
        parts = in_parts.ranks[rank]
        assert len(parts.extents) > len(whole.extents) == 1
        assert parts.far.start.tolist() == whole.far.start.tolist()
        assert parts.trace.spans.start.tolist() == whole.trace.spans.start.tolist()
        assert [column.tolist() for column in parts.rows_of_step] == [column.tolist() for column in whole.rows_of_step]


def test_steps_of_which_a_part_was_deleted_are_left_out(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata(), steps_per_segment=2, budget=Budget(steps=4))
    for one in steps(0, 12):
        number = one.step
        writer.write([row(step=number, start=100 * number, end=100 * number + 50), one])
    writer.write([mark("end", {})])
    writer.close()
    run, outline = load_run(tmp_path), survey_run(tmp_path).outline

    kept = run.ranks[0].spans.step[run.ranks[0].spans.kind == schema.STEP]
    assert run.ranks[0].discarded
    assert outline.ranks[0].discarded == run.ranks[0].discarded
    assert np.array_equal(outline.ranks[0].spans.step, kept)
