from __future__ import annotations

from io import StringIO

import pytest

from commtrace.cli import output


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [(0, "0 ns"), (812, "812 ns"), (24_300, "24.3 µs"), (1_200_000, "1.20 ms"), (3e9, "3.00 s"), (None, "–")],
)
def test_durations_carry_their_unit(time_ns: float | None, text: str) -> None:
    assert output.duration(time_ns) == text


@pytest.mark.parametrize(("time_ns", "text"), [(33_000_000, "33.0"), (123_456_789, "123"), (0, "0"), (4_000, "0.0040")])
def test_milliseconds_have_three_digits(time_ns: float, text: str) -> None:
    assert output.milliseconds(time_ns) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(1, 3, "33%"), (1, 1000, "<1%"), (0, 5, "0%"), (3, 0, "–"), (None, 1, "–")]
)
def test_a_small_share_is_not_shown_as_zero_per_cent(part: float | None, whole: float, text: str) -> None:
    assert output.share(part, whole) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (4_096, "4.10 kB"), (3_500_000_000, "3.50 GB")]
)
def test_bytes_are_powers_of_ten(count: int, text: str) -> None:
    assert output.num_bytes(count) == text


def test_an_unknown_bandwidth_is_not_zero() -> None:
    assert (output.bandwidth(None), output.bandwidth(12.34)) == ("–", "12.3 GB/s")
    assert (output.bandwidth(0.0255), output.bandwidth(0.25), output.bandwidth(1.0)) == (
        "25.5 MB/s",
        "250 MB/s",
        "1.00 GB/s",
    )
    assert (output.bandwidth(0.00004), output.bandwidth(9.6e-7), output.bandwidth(0.0)) == (
        "40.0 kB/s",
        "960 B/s",
        "0 B/s",
    )


def test_sizes_by_powers_of_two() -> None:
    sizes = [output.power_of_two(1 << exponent) for exponent in (0, 8, 9, 10, 19, 20, 35)]
    assert sizes == ["1–2 B", "256–512 B", "0.5–1 KiB", "1–2 KiB", "0.5–1 MiB", "1–2 MiB", "32–64 GiB"]
    assert output.power_of_two(0) == "0 B"


def test_rates_in_a_table_have_one_unit() -> None:
    rates = [0.0021, 0.416, 1.0, 9.87, 41.04, 327.6]

    assert [output.gigabytes_per_second(rate) for rate in rates] == ["0.002", "0.416", "1.000", "9.870", "41.0", "328"]


def test_a_table_of_numbers_is_never_cut_and_one_of_sentences_stays_readable() -> None:
    file = StringIO()
    console = output.wide_console(file)
    headings = [f"a long heading {number}" for number in range(10)]
    console.print(output.text_table((), headings))
    sentences = output.text_table(["why"])
    sentences.add_row("word " * 50)
    console.print(sentences)
    lines = file.getvalue().splitlines()

    assert lines[0].rstrip() == "  ".join(headings)
    assert all(len(line) <= console.width for line in lines[1:])
