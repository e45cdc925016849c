"""The programs of the GPU tests themselves, under gloo: needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.engines import details, recorded_rows
from tests.gpu.jobs import run_program

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.thorough,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the programs use NCCL, as the other tests do"),
]


def test_all_kinds_of_operations_are_recorded(tmp_path: Path) -> None:
    run_program(["nccl_operations.py", tmp_path], {"COMMTRACE_DIR": str(tmp_path)}, ranks=2)

    for rank in range(2):
        figures = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert figures["host_bytes"] > 0
        assert json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        rows = recorded_rows(tmp_path, rank)
        assert sorted({row["step"] for row in rows if row["kind"] == "collective"}) == [-1, *range(3, 13)]
        assert len(details(rows, "end")) == 1


def test_without_a_device_no_peak_is_recorded(tmp_path: Path) -> None:
    run_program(["peak_memory.py", tmp_path], {})

    assert json.loads((tmp_path / "figures.json").read_text()) == {"peaks": [[0, 0]] * 5, "reading_ns": 0}
    rows = recorded_rows(tmp_path / "run", 0)
    assert sorted(row["step"] for row in rows if row["kind"] == "step") == [0, 1, 2, 3, 4]
    assert details(rows, "peak_memory") == []


def test_steps_are_timed_with_and_without(tmp_path: Path) -> None:
    arguments = ["--layout", "ddp", "--size", "tiny", "--turns", "3", "--steps", "2"]
    run_program(["step_times.py", tmp_path, *arguments, "--variants", "off,python,python+modules,torch.profiler"], {})

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {variant: len(taken) for variant, taken in figures["step_ns"].items()} == {
        "off": 2, "python": 2, "python+modules": 2, "torch.profiler": 2,
    }  # fmt: skip
    assert min(min(taken) for taken in figures["step_ns"].values()) > 0
    assert figures["synchronisations"] == {"off": 0, "python": 0, "python+modules": 0}
    assert any(row["kind"] == "collective" for row in recorded_rows(tmp_path / "python-0", 0))
    assert any(row["kind"] == "module" for row in recorded_rows(tmp_path / "python+modules-0", 0))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_training_is_recorded_beside_the_profiler(tmp_path: Path, layout: str) -> None:
    run_program(["training.py", tmp_path, "--layout", layout], {"COMMTRACE_DIR": str(tmp_path)}, ranks=2)

    for rank in range(2):
        assert json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        steps = {row["step"] for row in recorded_rows(tmp_path, rank) if row["kind"] == "collective"}
        assert steps - {-1} == set(range(9))
