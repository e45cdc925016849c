from __future__ import annotations

from itertools import compress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.errors import ConfigurationError
from commtrace.trace import selection
from commtrace.trace.selection import (
    ModuleChoice,
    StepRange,
    first_step_after,
    make_request,
    read_requests,
    write_request,
)


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
def test_the_forms_of_step_ranges_that_users_write(text: str, chosen: list[int]) -> None:
    parsed = StepRange.parse(text)

    assert [step for step in range(-1, 12) if step in parsed] == chosen


@pytest.mark.parametrize("text", ["", " ", "5:5", "6:5", "1:9:0", "a:b", "-1:3", "1:2:3:4", "1.5:2", "all"])
def test_a_range_without_a_step_is_refused_with_what_to_write(text: str) -> None:
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


NAMES = {
    "GPT": 0,
    "embedding": 1,
    "decoder.layers.3": 2,
    "decoder.layers.3.self_attention": 3,
    "decoder.layers.3.self_attention.linear_qkv": 4,
    "layers": 1,
}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("depth=0", ["GPT"]),
        (" depth=2", ["GPT", "embedding", "decoder.layers.3", "layers"]),
        ("layers.*", ["decoder.layers.3"]),
        ("layers.**", [name for name in NAMES if "layers." in name]),
        ("*.self_attention, embedding", ["embedding", "decoder.layers.3.self_attention"]),
        ("linear_q?v", ["decoder.layers.3.self_attention.linear_qkv"]),
        ("self", []),
        (r"re:decoder\.layers\.\d+", ["decoder.layers.3"]),
    ],
)
def test_the_forms_of_module_choices_that_users_write(text: str, taken: list[str]) -> None:
    choice = ModuleChoice.parse(text)

    assert list(compress(NAMES, choice.taken(list(NAMES.items())))) == taken


@pytest.mark.parametrize(
    "text", ["depth=", "depth=-1", "a..b", ",", "re:(", "re:a)|(b", r"re:(a)\1", "re:(?!a)", "a" * 1_001]
)
def test_choices_of_modules_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="modules"):
        ModuleChoice.parse(text)


@pytest.mark.parametrize(
    "text", [r"re:(\w+\.?)*!", "**.**.**.**.**.**.**.**.**.**.**.**!", "*a*a*a*a*a*a*a*a*a*a*a*a!"]
)
def test_no_pattern_is_tried_for_ever(text: str) -> None:
    """Python's own module for regular expressions takes years for the first one."""
    names = [(f"transformer_decoder.layers.{number}.self_attention_with_bias" + ".a" * 50, 4) for number in range(100)]
    assert not any(ModuleChoice.parse(text).taken(names))


def test_a_pattern_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ModuleChoice.parse("layers.*")
    monkeypatch.setattr(selection, "MATCH_SECONDS", 0.0)
    with pytest.raises(ConfigurationError, match="cannot be matched with 50000 names within 0 s"):
        choice.taken([("decoder.layers.3" * 100, 2)] * 50_000)


def test_names_that_are_no_text_are_matched_too() -> None:
    assert ModuleChoice.parse("layers.*").taken([("decoder.layers.\udc80", 2)]) == [True]


def test_the_steps_lie_ahead_by_seconds_and_at_least_three_steps() -> None:
    assert first_step_after(100, 20e6) == 351
    assert first_step_after(100, 30e9) == 103
    assert first_step_after(100, None) == 120
    assert first_step_after(100, 1e9, margin_seconds=60) == 161


def test_requests_are_read_once_oldest_first(tmp_path: Path) -> None:
    assert read_requests(tmp_path) == []
    second = make_request("r1", 0, 50, 10, by="command", modules="depth=2", now_ns=2)
    first = make_request("r1", 0, 5, 1, by="command", now_ns=1)
    for request in (second, first):
        write_request(tmp_path, request)

    assert read_requests(tmp_path) == [first, second]
    assert read_requests(tmp_path, {first.id}) == [second]
    assert (second.first, second.end, 59 in second.steps, 60 in second.steps) == (50, 60, True, False)
    assert sorted(path.name for path in (tmp_path / "triggers").iterdir()) == ["1-command.json", "2-command.json"]


def test_a_file_that_is_no_request_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "1.json").write_text("{}")
    with pytest.raises(ValueError, match="is no request for steps in detail"):
        read_requests(tmp_path)


def test_a_request_under_another_name_is_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    request = make_request("r1", 0, 5, 1, by="command", now_ns=1)
    path = write_request(tmp_path, request)
    path.with_name("copy.json").write_text(path.read_text())
    refused: list[str] = []
    assert read_requests(tmp_path, refuse=lambda name, _: refused.append(name)) == [request]
    assert refused == ["copy"]
