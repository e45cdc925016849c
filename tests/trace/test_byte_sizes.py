from __future__ import annotations

import pytest

from commtrace.trace.byte_sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("32768", 32768),
        ("7B", 7),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("1 MiB", 1 << 20),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
        ("1kB", 1000),
        ("1KB", 1000),
        ("3MB", 3_000_000),
        ("80GB", 80 * 10**9),
        ("2tb", 2 * 10**12),
        ("1.5GiB", 3 << 29),
        ("0.5KB", 500),
        (" 4MiB ", 4 << 20),
    ],
)
def test_units_with_a_byte_mean_the_same_everywhere(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, 1000) == parse_bytes(text, 1024) == num_bytes


def test_a_letter_alone_means_what_the_command_says() -> None:
    assert [parse_bytes(text, 1024) for text in ("1K", "4m", "1G", "1T")] == [1 << 10, 4 << 20, 1 << 30, 1 << 40]
    assert [parse_bytes(text, 1000) for text in ("1K", "4m", "1G", "1T")] == [10**3, 4 * 10**6, 10**9, 10**12]


def test_a_number_alone_has_the_unit_of_the_option() -> None:
    assert parse_bytes("11.7", 1024, plain="GiB") == int(11.7 * 2**30)
    assert parse_bytes("80GB", 1024, plain="GiB") == 80 * 10**9
    assert parse_bytes("7B", 1024, plain="GiB") == 7


@pytest.mark.parametrize(
    "text",
    ["", "lots", "M", "-1", "1.G", ".5G", "1iB", "1KK", "1XB", "1e9", "1,5G", "٣M", "9" * 19, "inf", "nan", "1_0"],
)
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^" + text.replace(".", r"\.") + "$"):
        parse_bytes(text, 1024)
