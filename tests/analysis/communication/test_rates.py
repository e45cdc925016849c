"""Bandwidths as people write them."""

from __future__ import annotations

import re

import pytest

from commtrace.analysis.communication.rates import parse_rate


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("300GB/s", 3e11), ("1.5 TB/s", 1.5e12), ("200Gbit/s", 25e9), ("80Mbit/s", 1e7), ("500MB/s", 5e8)],
)
def test_a_rate_has_a_unit_of_bytes_or_bits(text: str, bytes_per_second: float) -> None:
    assert parse_rate(text) == bytes_per_second


def test_a_number_alone_has_the_unit_that_the_command_names() -> None:
    assert parse_rate("250", plain="GB") == 250e9


@pytest.mark.parametrize("text", ["GB/s", "250", "0GB/s", "fastGB/s", "1GB/h", "100Gb/s", "-1GB/s", "1e400GB/s"])
def test_anything_else_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_rate(text)
