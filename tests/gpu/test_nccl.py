"""Real NCCL ranks on one GPU, against torch.profiler. docs/gpu-validation.md says what has been run and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bench.engines import details, recorded_rows
from tests.gpu import replays
from tests.gpu.jobs import BACKENDS, NEEDS_NCCL, run_program
from tests.gpu.kernels import compared, nccl_kernels, recorded_operations, synchronisations
from tests.gpu.table import microseconds

RANKS = 2
FIRST_STEP, LAST_STEP = 3, 12
"""As in the program."""
ACCURACY_NS = 20_000

pytestmark = NEEDS_NCCL


class Run(NamedTuple):
    """What the program has left behind."""

    output: Path
    figures: list[dict[str, Any]]

    def kernels(self, rank: int) -> Any:
        return nccl_kernels(self.output / f"trace-{rank}.json")

    def operations(self, rank: int) -> list[dict[str, Any]]:
        """Communication of the profiled steps, in the order of the launches."""
        rows = recorded_rows(self.output, rank)
        return recorded_operations([row for row in rows if row["kind"] in ("collective", "p2p") and row["step"] >= 0])


def train(output: Path, backend: str, **environment: str) -> Run:
    run_program(
        ["nccl_operations.py", output, "--backend", backend],
        {"COMMTRACE_DIR": str(output), **environment},
        ranks=RANKS,
    )
    return Run(output, [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(RANKS)])


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def recorded(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("with"), backend)


@pytest.fixture(scope="module")
def plain(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("without"), backend, COMMTRACE_ENABLED="0")


@pytest.fixture(scope="module")
def measured(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """NCCL measures durations, and the profiled steps are a window of detail."""
    steps = f"{FIRST_STEP}:{LAST_STEP + 1}"
    return train(tmp_path_factory.mktemp("measured"), backend, TORCH_NCCL_ENABLE_TIMING="1", COMMTRACE_STEPS=steps)


@pytest.mark.answers("spans against kernels")
def test_spans_agree_with_the_kernels(recorded: Run, figures: list[str]) -> None:
    for rank in range(RANKS):
        kernels = recorded.kernels(rank)
        errors = compared(kernels, recorded.operations(rank))
        figures.append(
            f"rank {rank}: {len(errors.end)} of {len(kernels)} timed by events; starts {microseconds(errors.start)}; "
            f"ends {microseconds(errors.end)}"
        )
        assert max(errors.p95()) <= ACCURACY_NS


@pytest.mark.answers("barriers")
def test_a_barrier_ends_when_the_host_goes_on(recorded: Run, figures: list[str]) -> None:
    for rank in range(RANKS):
        errors = compared(recorded.kernels(rank), recorded.operations(rank), barriers=True)
        figures.append(f"rank {rank}: starts {microseconds(errors.start)}; ends {microseconds(errors.end)} behind")
        assert float(np.percentile(np.abs(errors.start), 95)) <= ACCURACY_NS
        assert errors.end.min() >= -ACCURACY_NS


@pytest.mark.answers("hidden ends: upper bounds")
def test_inexact_times_are_bounds(recorded: Run, figures: list[str]) -> None:
    for rank in range(RANKS):
        errors = compared(recorded.kernels(rank), recorded.operations(rank), "unknown")
        assert len(errors.end)
        figures.append(f"rank {rank}: {len(errors.end)} bounds lie behind the end: {microseconds(errors.end)}")
        assert min(errors.end.min(), -errors.start.max()) >= -ACCURACY_NS


@pytest.mark.answers("hidden ends: flight recorder")
def test_ends_by_the_durations_of_the_flight_recorder_agree_with_the_kernels(measured: Run, figures: list[str]) -> None:
    for rank in range(RANKS):
        errors = compared(measured.kernels(rank), measured.operations(rank), "nccl_timing")
        marks = details(recorded_rows(measured.output, rank), "hidden_ends")
        hidden, known, refused = (sum(mark[name] for mark in marks) for name in ("hidden", "known", "refused"))
        largest = [mark["largest_difference_ns"] for mark in marks if mark["compared"]]
        figures.append(
            f"rank {rank}: {known} of {hidden} known, {refused} refused; ends {microseconds(errors.end)}; "
            f"against {sum(mark['compared'] for mark in marks)} stalls {microseconds(largest)}; "
            f"asked for {max((mark['took_ns'] for mark in marks), default=0) / 1e6:.1f} ms at most"
        )
        assert known
        assert float(np.percentile(np.abs(errors.end), 95)) <= ACCURACY_NS


@pytest.mark.answers("memory")
def test_memory_and_results_are_those_of_a_run_without(recorded: Run, plain: Run, figures: list[str]) -> None:
    for rank, (own, other) in enumerate(zip(recorded.figures, plain.figures, strict=True)):
        host = (own.pop("host_bytes") - other.pop("host_bytes")) / 2**20
        sides = [
            f"allocated {side['allocated'] / 2**20:.1f}, reserved {side['reserved'] / 2**20:.1f} MiB"
            for side in (other, own)
        ]
        figures.append(f"rank {rank}: {sides[0]} without; {sides[1]}, and {host:+.0f} MiB of the host, with")
        assert own == other


@pytest.mark.answers("synchronisations")
def test_the_process_waits_for_the_device_as_often_as_without(recorded: Run, plain: Run, figures: list[str]) -> None:
    for rank in range(RANKS):
        counts = [synchronisations(run.output / f"trace-{rank}.json") for run in (plain, recorded)]
        figures.append(f"rank {rank}: {counts[0]} without, {counts[1]} with")
        assert counts[0] == counts[1]


@pytest.mark.answers("dropped spans")
def test_nothing_was_dropped(recorded: Run, figures: list[str]) -> None:
    for rank in range(RANKS):
        rows = recorded_rows(recorded.output, rank)
        figures.append(f"rank {rank}: none of {len(rows)}")
        assert details(rows, "dropped") == []
        assert details(rows, "problem") == []


@pytest.mark.answers("replays of graphs")
def test_replays_contain_what_was_captured(backend: str, tmp_path: Path, figures: list[str]) -> None:
    recorded, plain = tmp_path / "with", tmp_path / "without"
    run_program(["graph_replays.py", recorded, backend], {"COMMTRACE_DIR": str(recorded)}, ranks=RANKS)
    run_program(["graph_replays.py", plain, backend], {"COMMTRACE_ENABLED": "0"}, ranks=RANKS)

    for rank in range(RANKS):
        figures.append(f"rank {rank}: {replays.figures(recorded, rank)}")
        assert replays.misses(recorded, plain, rank) == []


@pytest.mark.answers("graph capture")
def test_graph_captures_survive_the_harvester(backend: str, tmp_path: Path) -> None:
    run_program(["graph_capture.py", backend], {"COMMTRACE_DIR": str(tmp_path)}, timeout=60)
