from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.errors import ConfigurationError
from commtrace.trace.selection.step_range import StepRange


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("3:6", [3, 4, 5]),
        ("3:10:3", [3, 6, 9]),
        ("8:", [8, 9, 10, 11]),
        (":2", [0, 1]),
        ("::5", [0, 5, 10]),
        ("7", [7]),
        (" 7 ", [7]),
        ("0", [0]),
    ],
)
def test_the_forms_that_users_write(text: str, chosen: list[int]) -> None:
    parsed = StepRange.parse(text)

    assert [step for step in range(-1, 12) if step in parsed] == chosen


@pytest.mark.parametrize("text", ["", " ", "5:5", "6:5", "1:9:0", "a:b", "-1:3", "1:2:3:4", "1.5:2", "all"])
def test_what_holds_no_step_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"A:B|A must be below B"):
        StepRange.parse(text)


ranges = st.builds(
    lambda first, length, every: StepRange(first, first + length, every),
    st.integers(0, 50),
    st.integers(1, 50),
    st.integers(1, 7),
)


@given(ranges)
def test_text_and_back(steps: StepRange) -> None:
    assert StepRange.parse(str(steps)) == steps


@given(ranges)
def test_a_mask_says_the_same_as_membership(steps: StepRange) -> None:
    numbers = np.arange(-3, 120, dtype=np.int32)

    assert steps.mask(numbers).tolist() == [int(number) in steps for number in numbers]


@given(ranges, st.integers(-1, 120), st.integers(0, 60))
def test_no_segment_with_a_chosen_step_is_skipped(steps: StepRange, first: int, length: int) -> None:
    held = range(first, first + length + 1)

    assert steps.overlaps(held[0], held[-1]) or not any(step in steps for step in held)
