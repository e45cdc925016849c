"""What recording costs a step of a real transformer with real kernels."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from bench.engines import recorded_rows
from tests.gpu.jobs import BACKENDS, NEEDS_NCCL, run_program

MOST_RATIO = 1.03
"""Where the GPU is busy. Where launches take longer than kernels the figure is told, not judged."""

pytestmark = NEEDS_NCCL


@pytest.mark.answers("overhead of a step")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_a_step_takes_as_long_as_without(
    tmp_path: Path, backend: str, layout: str, size: str, figures: list[str]
) -> None:
    arguments: list[str | Path] = ["step_times.py", tmp_path, "--layout", layout, "--size", size, "--backend", backend]
    run_program(arguments, {}, timeout=60)

    found = json.loads((tmp_path / "figures.json").read_text())
    without, recorded = (sorted(found["step_ns"][side]) for side in ("off", "auto"))
    ratio = median(recorded) / median(without)
    rows = [row for row in recorded_rows(tmp_path / "auto-0", 0) if row["step"] >= 0 and row["kind"] != "mark"]
    calls = sum(row["kind"] == "collective" for row in rows)
    waits = [found["synchronisations"][side] for side in ("off", "auto")]
    plain, own = (
        f"{median(taken) / 1e6:.3f} ms ({taken[0] / 1e6:.3f} to {taken[-1] / 1e6:.3f})" for taken in (without, recorded)
    )
    figures.append(
        f"{layout}, {size}: {plain} without, {own} with: × {ratio:.4f}; {len(rows)} spans and "
        f"{calls} collectives in the turn under the profiler; "
        f"{waits[0]} synchronisations without, {waits[1]} with"
    )
    assert rows
    assert calls or layout == "fsdp2"  # which communicates nothing on a single rank
    assert waits[0] == waits[1]
    assert size != "wide" or ratio <= MOST_RATIO
