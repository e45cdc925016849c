"""MFU from the sizes that a run has recorded."""

from __future__ import annotations

import pytest

from commtrace.analysis.summary import summarise
from commtrace.cli.utilization import UtilizationOptions, measure_utilization
from tests.factory import make_run, span


def test_flops_follow_from_the_sizes_that_were_recorded() -> None:
    model = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
    rows = {rank: [span("step", step * 1_000, (step + 1) * 1_000, step=step) for step in range(3)] for rank in (0, 1)}
    sizes = {"model": model, "layout": {"microbatch": 3}, "microbatches": 2}
    run = make_run(rows, topology=sizes, parallel={"dp": 2})

    found = measure_utilization(summarise(run), UtilizationOptions(peak_tflops=1e6), run)

    assert found is not None
    per_token = 2 * (24 * 64**2 + 4 * 32 * 64) + 2 * 64 * 128
    assert found.model_flops == 3 * 32 * per_token * 12  # 2 ranks of 2 microbatches of 3 sequences
    assert found.mfu == pytest.approx(found.model_flops / 1e-6 / 2 / 1e18)
    assert found.recompute == "none"


def test_nothing_is_said_of_a_device_without_a_known_peak() -> None:
    run = make_run({0: [span("step", 0, 1_000, step=0)]}, topology={"model": {"layers": 1}})

    assert measure_utilization(summarise(run), UtilizationOptions(), run) is None
