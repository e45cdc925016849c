"""Training with torch and Megatron-core on NCCL ranks of one GPU: spans against kernels, results with and without."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench.engines import details, recorded_rows
from tests.gpu.jobs import BACKENDS, NEEDS_NCCL, run_program
from tests.gpu.kernels import compared, nccl_kernels, recorded_operations
from tests.gpu.programs.one_gpu import WARM_UP_STEPS
from tests.gpu.table import microseconds

RANKS = 2
ACCURACY_NS = 20_000
MEGATRON_RANKS = 4
LAYOUT = "--tensor 2 --pipeline 2 --layers 4 --hidden 1024 --sequence 512 --microbatches 4 --iterations 5"

pytestmark = NEEDS_NCCL


@pytest.mark.answers("training: spans against kernels")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_spans_of_training_agree_with_the_kernels(
    tmp_path: Path, backend: str, layout: str, figures: list[str]
) -> None:
    arguments: list[str | Path] = ["training.py", tmp_path, "--layout", layout, "--backend", backend]
    run_program(arguments, {"COMMTRACE_DIR": str(tmp_path)}, ranks=RANKS)

    for rank in range(RANKS):
        rows = recorded_rows(tmp_path, rank)
        assert details(rows, "dropped") == []
        assert details(rows, "problem") == []
        kernels = nccl_kernels(tmp_path / f"trace-{rank}.json")
        operations = recorded_operations(
            [row for row in rows if row["kind"] == "collective" and row["step"] >= WARM_UP_STEPS]
        )
        exact = compared(kernels, operations)
        bounds = compared(kernels, operations, "unknown")
        figures.append(
            f"{layout}, rank {rank}: {len(exact.end)} of {len(kernels)} timed by events; "
            f"starts {microseconds(exact.start)}; ends {microseconds(exact.end)}; "
            f"{len(bounds.end)} bounds lie behind the end: {microseconds(bounds.end)}"
        )
        start_p95, end_p95 = exact.p95()
        assert end_p95 <= ACCURACY_NS
        # What DDP launches in an idle moment starts, as a span, when the host launches it: before its kernel.
        assert exact.start.max() <= ACCURACY_NS if layout == "ddp" else start_p95 <= ACCURACY_NS
        if len(bounds.end):
            assert min(bounds.end.min(), -bounds.start.max()) >= -ACCURACY_NS


@pytest.mark.answers("Megatron-core: results")
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_computes_the_same_bit_for_bit(tmp_path: Path, figures: list[str]) -> None:
    results = []
    for name, enabled in (("without", "0"), ("with", "1")):
        environment = {"COMMTRACE_DIR": str(tmp_path / "run"), "COMMTRACE_ENABLED": enabled}
        losses = tmp_path / name
        run_program(["train_megatron.py", *LAYOUT.split(), "--print-losses", losses], environment, ranks=MEGATRON_RANKS)
        results.append(losses.read_text())

    assert results[0].count("\n") == 5
    assert results[1] == results[0]
    for rank in range(MEGATRON_RANKS):
        rows = recorded_rows(tmp_path / "run", rank)
        assert details(rows, "dropped") == []
        assert details(rows, "problem") == []
        timed = [row["timing"] for row in rows if row["kind"] in ("collective", "p2p") and row["step"] >= 0]
        exact, bounds = timed.count("cuda_event"), timed.count("unknown")
        figures.append(f"rank {rank}: {exact} of {len(timed)} timed by events, {bounds} bounds")
        assert exact + bounds >= 0.95 * len(timed)
