"""What the stages of the GPU hour make of figures: made-up ones, and those of an earlier hour."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engines import OFF, PROFILER, recorded_rows
from commtrace.recording.options import NATIVE, PYTHON
from tests.e2e.launch import REPOSITORY
from tests.gpu.kernels import read_kernels, without_replays, write_kernels
from tests.gpu.stages import QUESTIONS, accuracy, call_costs, megatron, steps
from tests.gpu.stages.call_costs import Cost, ThreadTime
from tests.gpu.stages.stage import REHEARSED, Answers, read_answers
from tests.gpu.table import Row
from tests.reference import reference_data


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """As on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return Answers(tmp_path / "stage")


def test_a_cost_is_what_is_added_in_the_same_turn(answers: Answers) -> None:
    off = [Cost([24_000.0, 26_000.0, 90_000.0], 20_000.0, 30_000.0), Cost([34_000.0] * 3, 30_000.0, 40_000.0)]
    native = [Cost([31_000.0] * 3, 25_000.0, 35_000.0), Cost([40_000.0, 41_000.0, 38_000.0], 35_000.0, 47_000.0)]

    call_costs.tell(answers, "all_reduce", NATIVE, {OFF: off, NATIVE: native})
    call_costs.tell(answers, "all_reduce, async + wait", NATIVE, {OFF: off, NATIVE: [Cost([50_000.0], 0, 0)] * 2})
    call_costs.tell(answers, "span, two marks", PROFILER, {OFF: off, PROFILER: native})

    assert read_answers(answers.output) == [
        Row(
            "cost of a call: all_reduce",
            NATIVE,
            "holds",
            "30.0 µs off; +5.5 µs (turns +5.0 to +6.0; least burst 31.0); +6.0 µs without pauses; +5.0 µs of CPU",
        ),
        Row(
            "cost of a call: all_reduce, async + wait",
            NATIVE,
            "FAILS: the aim is +9 µs",
            "30.0 µs off; +20.0 µs (turns +16.0 to +24.0; least burst 50.0); -35.0 µs without pauses; -25.0 µs of CPU",
        ),
        Row(
            "cost of a span, two marks",
            PROFILER,
            "measured",
            "30.0 µs off; +5.5 µs (turns +5.0 to +6.0; least burst 31.0); +6.0 µs without pauses; +5.0 µs of CPU",
        ),
    ]


def test_threads_that_may_hold_the_gil_are_told_from_those_that_never_do(answers: Answers) -> None:
    second = 1_000_000_000
    off = ThreadTime(second, 0, 0, 1_000_000, 1_000)
    native = ThreadTime(second, 5_000_000, 10_000_000, 1_250_000, 1_000)

    call_costs.tell_of_threads(answers, NATIVE, {OFF: [off], NATIVE: [native]})

    (row,) = read_answers(answers.output)
    assert row.verdict == "FAILS: the aim is 0.2% with the GIL"
    assert row.figures.startswith("at 1000 calls/s: Python threads 0.50% of the time")
    assert "native ones 1.00%; " in row.figures
    assert row.figures.endswith("lost 0.25 ms more than without")


def test_a_step_is_compared_with_that_of_the_same_turn(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "engines", lambda: [NATIVE, PYTHON])
    step_ns: dict[str, Sequence[int]] = {
        OFF: [30_000_000, 40_000_000, 31_000_000],
        NATIVE: [30_150_000, 40_200_000, 31_930_000],
    }
    step_ns[PYTHON] = step_ns[PROFILER] = [taken * 2 for taken in step_ns[OFF]]

    for variant in (NATIVE, PYTHON, PROFILER):
        waits = {OFF: 1, NATIVE: 1, PYTHON: 2}
        steps.tell(answers, steps.STEPS[0], variant, step_ns, waits)

    native, python, profiler = read_answers(answers.output)
    assert native.verdict == "holds"
    assert native.figures.endswith("× 1.0050 (1.0050 to 1.0300 in 3 turns)")
    assert python.verdict == "FAILS: waits for the device: 1 off, 2"
    assert profiler.verdict == "measured"


def test_exposed_communication_of_an_h100_is_as_in_its_kernels() -> None:
    folder = reference_data("gpu_h100", "megatron_tp2_pp2")
    ranks = [
        megatron.exposed(
            recorded_rows(folder / "run", rank), read_kernels(folder / f"kernels-{rank}.csv.gz"), range(3, 6)
        )
        for rank in range(4)
    ]

    steps_ns = sum(rank.steps for rank in ranks)
    assert round(sum(rank.by_recording for rank in ranks) / steps_ns, 3) == 0.636
    assert round(sum(rank.by_kernels for rank in ranks) / steps_ns, 3) == 0.639


def test_starts_that_an_earlier_version_had_too_early_are_found(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, profiled = reference_data("gpu_h100", "operations"), range(100, 108)
    write_kernels(without_replays(read_kernels(folder / "kernels-0.csv.gz")), tmp_path / "kernels-0.csv.gz")

    def rows_of_profiled_steps(_output: Path, rank: int) -> list[dict[str, Any]]:
        rows = recorded_rows(folder / "run", rank)
        return [row for row in rows if row["kind"] == "mark" or row["step"] in profiled]

    monkeypatch.setattr(accuracy, "recorded_rows", rows_of_profiled_steps)
    accuracy.compare(answers, PYTHON, tmp_path, 0)

    dropped, compared, brackets = read_answers(answers.output)
    assert dropped.verdict == brackets.verdict == "holds"
    assert compared.verdict.startswith("FAILS: 95 % of the exact starts are within 4")
    assert compared.figures.startswith("rank 0: starts: 80 exact, median 13.8 µs, largest 4167.2 µs; ends: 64 exact, ")
    assert brackets.figures.startswith("rank 0: starts: 8 exact, ")


def test_an_answer_without_a_gpu_says_so_and_a_fault_shows_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answers = Answers(tmp_path)

    answers.add("dropped spans", "none of 9", NATIVE, misses=[])
    answers.add("dropped spans", "", PYTHON, misses=["one"])

    assert [row.verdict for row in read_answers(tmp_path)] == [REHEARSED, f"{REHEARSED}; FAILS: one"]


def test_an_answer_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    line = json.dumps(Row("dropped spans", "", "holds", "")._asdict())
    (tmp_path / "answers.jsonl").write_text(f"{line}\n{line[:20]}")

    assert len(read_answers(tmp_path)) == 1


def test_the_documentation_has_every_stage_with_its_limit_and_its_questions() -> None:
    page = (REPOSITORY / "docs" / "gpu-validation.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) s \| .* \|$", page, re.MULTILINE))
    stages = re.findall(r'Stage\("(\w+)", ([\d.]+)\)', (REPOSITORY / "bench" / "gpu_hour.py").read_text())

    assert rows == {name: f"{float(seconds):.0f}" for name, seconds in stages}
    for question in QUESTIONS:
        subject, _, detail = question.partition(": ")
        assert subject in page, question
        assert all(word in page for word in detail.replace("async + wait", "asynchronous").split(", ")), question
