"""Real NCCL ranks on one GPU, against torch.profiler. docs/gpu-validation.md says what has been run and when."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commtrace.trace import schema
from commtrace.trace.reader import load_run
from tests.e2e.launch import REPOSITORY, launch, run
from tests.e2e.traces import rows
from tests.gpu.kernels import compared, nccl_kernels, recorded_operations, synchronisations

PROGRAMS = REPOSITORY / "tests" / "gpu" / "programs"
RANKS = 2
ACCURACY_NS = 20_000

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL: this build has none"),
]


def train(output: Path, **environment: str) -> list[dict[str, Any]]:
    """Run the program; returns the figures of each rank."""
    completed = launch(
        [PROGRAMS / "nccl_operations.py", output, "--profile"],
        RANKS,
        {"COMMTRACE_DIR": str(output), **environment},
        300,
    )
    assert completed.returncode == 0, completed.stdout
    assert "switched off" not in completed.stdout, completed.stdout
    return [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    output = tmp_path_factory.mktemp("with")
    return output, train(output)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    output = tmp_path_factory.mktemp("without")
    return output, train(output, COMMTRACE_ENABLED="0")


def operations(output: Path, rank: int) -> list[dict[str, Any]]:
    run = load_run(output)
    recorded = [row for row in rows(run, rank, schema.COLLECTIVE, schema.P2P) if row["step"] >= 0]
    return recorded_operations(recorded)


@pytest.mark.parametrize("rank", range(RANKS))
def test_spans_agree_with_the_kernels(recorded: tuple[Path, list[dict[str, Any]]], rank: int) -> None:
    output, _ = recorded
    kernels = nccl_kernels(output / f"trace-{rank}.json")

    errors = compared(kernels, operations(output, rank))

    starts, ends = errors.p95()
    print(f"rank {rank}: {len(errors.end)} of {len(kernels)} timed; p95 {starts / 1e3:.1f} and {ends / 1e3:.1f} µs")
    assert ends <= ACCURACY_NS
    assert starts <= ACCURACY_NS


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_not_known_exactly_is_a_bound(recorded: tuple[Path, list[dict[str, Any]]], rank: int) -> None:
    output, _ = recorded
    kernels = nccl_kernels(output / f"trace-{rank}.json")
    spans = operations(output, rank)
    offset = np.median([row["end"] - kernel.end for kernel, row in zip(kernels, spans, strict=True)])
    bounds = [
        (row["end"] - kernel.end - offset, kernel.start + offset - row["start"])
        for kernel, row in zip(kernels, spans, strict=True)
        if row["timing"] == schema.UNKNOWN_TIMING
    ]

    assert bounds
    assert min(min(bound) for bound in bounds) >= -ACCURACY_NS


def test_memory_and_results_are_those_of_a_run_without(
    recorded: tuple[Path, list[dict[str, Any]]], plain: tuple[Path, list[dict[str, Any]]]
) -> None:
    assert recorded[1] == plain[1]


def test_the_process_waits_for_the_device_as_often_as_without(
    recorded: tuple[Path, list[dict[str, Any]]], plain: tuple[Path, list[dict[str, Any]]]
) -> None:
    for rank in range(RANKS):
        name = f"trace-{rank}.json"
        assert synchronisations(recorded[0] / name) == synchronisations(plain[0] / name)


def test_nothing_was_dropped(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    run = load_run(recorded[0])

    assert run.problems == ()
    assert {rank: trace.dropped for rank, trace in run.ranks.items()} == {rank: {} for rank in range(RANKS)}


def test_graph_captures_survive_the_harvester(tmp_path: Path) -> None:
    completed = run([sys.executable, str(PROGRAMS / "graph_capture.py")], {"COMMTRACE_DIR": str(tmp_path)}, 120)

    assert completed.returncode == 0, completed.stdout
    assert "switched off" not in completed.stdout, completed.stdout
