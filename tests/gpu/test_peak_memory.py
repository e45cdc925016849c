"""The recorded peak of torch's allocator beside what the script reads, and what a reading takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines import details, recorded_rows
from tests.gpu.jobs import NEEDS_NCCL, run_program

MOST_NS = 200_000

pytestmark = NEEDS_NCCL


@pytest.mark.answers("recorded peak")
def test_the_peak_is_that_of_the_allocator(tmp_path: Path, figures: list[str]) -> None:
    run_program(["peak_memory.py", tmp_path], {})

    found = json.loads((tmp_path / "figures.json").read_text())
    expected, highest = [], (0, 0)
    for step, (allocated, reserved) in enumerate(found["peaks"]):
        so_far = max(allocated, highest[0]), max(reserved, highest[1])
        if so_far != highest:
            highest = so_far
            expected.append({"step": step, "allocated": so_far[0], "reserved": so_far[1]})
    assert details(recorded_rows(tmp_path / "run", 0), "peak_memory") == expected
    assert highest[0] >= 512 << 20
    figures.append(f"a reading takes {found['reading_ns'] / 1e3:.1f} µs; the highest peak is {highest[0]:,} bytes")
    assert 0 < found["reading_ns"] < MOST_NS
