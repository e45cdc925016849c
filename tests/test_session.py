"""What users call: start, step, span, stop. Whatever they pass, training goes on and what can be recorded is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commtrace
from commtrace.trace import schema
from commtrace.trace.reader import load_run


def test_step_numbers_of_numpy_are_in_the_window_and_other_things_cost_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: Any = "7"
    commtrace.start(commtrace.Config(dir=str(tmp_path), steps="3:9"))
    try:
        with commtrace.step(np.int64(3)):  # type: ignore[arg-type]
            pass
        with commtrace.step(wrong):
            pass
        with commtrace.step(8):
            pass
    finally:
        commtrace.stop()

    spans = load_run(tmp_path).ranks[0].spans
    assert spans.step[spans.kind == schema.STEP].tolist() == [3, 8]
    assert "commtrace.step and commtrace.span" in caplog.text


@pytest.mark.parametrize("option", ["buffer_spans", "steps_per_segment"])
def test_a_size_of_nothing_is_refused(option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        commtrace.start(commtrace.Config(dir=str(tmp_path), **{option: 0}))
        commtrace.stop()

    assert f"{option}=0: write a whole number of at least 1" in caplog.text
    assert list(tmp_path.iterdir()) == []
