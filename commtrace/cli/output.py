"""Consoles of commands, which escape text from outside, tables on them and as files, and formats of numbers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from commtrace.cli.pipes import CLOSED_PIPE, discard_output
from commtrace.trace.inputs import printable, printable_lines

if TYPE_CHECKING:
    import pyarrow as pa

_READABLE_WIDTH: Final = 80
_UNLIMITED: Final = 10_000


class PlainConsole(Console):
    """A console that escapes control characters, so that no text moves the cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> None:
        discard_output()
        raise SystemExit(CLOSED_PIPE)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable_lines(text), **options)


class _WideConsole(PlainConsole):
    """A console that never cuts a number or a heading: tables that need more than its width get it."""

    def print(self, *objects: Any, **options: Any) -> None:
        width = self.width
        self.width = max([width, *(_needed_width(self, one) for one in objects if isinstance(one, Table))])
        try:
            super().print(*objects, **options)
        finally:
            self.width = width


def _needed_width(console: Console, table: Table) -> int:
    """Return the width at which a table cuts nothing; sentences in it stay wrapped."""
    options = console.options.update(width=_UNLIMITED)
    padding = table.padding[1] + table.padding[3]
    needed = 0
    for column in table.columns:
        sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        needed += padding + max(size.maximum if column.no_wrap else size.minimum for size in sizes)
    return needed


def table_width(table: Table) -> int:
    """Return the width at which a table cuts nothing; sentences in it stay wrapped."""
    return _needed_width(PlainConsole(width=_UNLIMITED), table)


def wide_console(file: IO[str] | None = None) -> Console:
    """Return a console wide enough for every number, also for files and pagers."""
    console = _WideConsole(file=file)
    if console.width < _READABLE_WIDTH:
        console.width = _READABLE_WIDTH
    return console


def text_table(words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """Return a table with columns of words, on the left, and of numbers, on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(console: Console, title: str, table: Table, note: str = "") -> None:
    """Print a table below its title, and a note on it."""
    # Not the table's own title: that is folded to the width of the table.
    console.print(f"[bold]{escape(title)}[/]")
    console.print(table)
    if note:
        console.print(escape(note), style="dim")
    console.print()


UNKNOWN: Final = "–"
"""Printed for an unknown number; never 0."""

NODES: Final = {True: ">1", False: "1", None: "?"}
"""Number of nodes of a group, by ``inter_node``."""


def milliseconds(time_ns: float | None) -> str:
    """Return ``24.3``, with at least three digits."""
    return UNKNOWN if time_ns is None else _three_digits(time_ns / 1e6)


def duration(time_ns: float | None) -> str:
    """Return a time with its unit: ``812 ns``, ``24.3 µs``, ``1.20 ms``, ``3.00 s``."""
    if time_ns is None:
        return UNKNOWN
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(time_ns) >= size:
            return f"{_three_digits(time_ns / size)} {unit}"
    return f"{time_ns:.0f} ns"


def share(part: float | None, whole: float = 1.0) -> str:
    """Return ``31%``, and ``<1%`` for a small part that is not 0."""
    if part is None or not whole:
        return UNKNOWN
    percent = 100 * part / whole
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


_BINARY: Final = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))


def num_bytes(count: float | None) -> str:
    """Return ``24.3 MB``, in powers of ten."""
    if count is None:
        return UNKNOWN
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def binary_bytes(count: float) -> str:
    """Return ``24.3 GiB``, in powers of two, as the memory of devices is given."""
    exponent, unit = next((exponent, unit) for exponent, unit in _BINARY if count >= 1 << exponent or not exponent)
    return f"{_three_digits(count / (1 << exponent)) if exponent else round(count)} {unit}"


def power_of_two(num_bytes: int) -> str:
    """Return the range of sizes from a power of two to the next: ``32–64 KiB``, ``0.5–1 MiB``; ``0 B`` for 0."""
    if num_bytes == 0:
        return "0 B"
    exponent, unit = next((exponent, unit) for exponent, unit in _BINARY if num_bytes >= 1 << max(exponent - 1, 0))
    return f"{num_bytes / (1 << exponent):g}–{2 * num_bytes / (1 << exponent):g} {unit}"


def bandwidth(gigabytes_per_second: float | None) -> str:
    """Return a bandwidth, given in 10⁹ bytes per second, with its unit: ``298 GB/s``, ``25.5 MB/s``."""
    return UNKNOWN if gigabytes_per_second is None else f"{num_bytes(gigabytes_per_second * 1e9)}/s"


def at_least(text: str, is_bound: bool) -> str:
    """Mark a lower bound: ``≥25.5``."""
    return f"≥{text}" if is_bound and text != UNKNOWN else text


def at_most(text: str, is_bound: bool) -> str:
    """Mark an upper bound: ``≤1.20 ms``."""
    return f"≤{text}" if is_bound and text != UNKNOWN else text


def gigabytes_per_second(rate: float) -> str:
    """Return GB/s without a unit, however slow: for a table in which numbers are compared."""
    return f"{rate:.3f}" if rate < 10 else _three_digits(rate)


def _three_digits(number: float) -> str:
    size = abs(number)
    if 0 < size < 1e-4:
        return f"{number:.1e}"
    decimals = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 0.01 else 4
    return f"{number:.{decimals}f}"


def write_csv(rows: pa.Table, file: IO[str], *, for_terminal: bool = False) -> None:
    """Write a header and the rows; null is an empty field.

    Args:
        for_terminal: without the control characters that a recording may hold.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(rows.column_names)
    for batch in rows.to_batches():  # not all rows at once: as Python's objects they are ten times as large
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            writer.writerow(_printable(value) if for_terminal else value for value in row)


def write_parquet(rows: pa.Table, path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(rows, path)


def _printable(value: object) -> object:
    return printable(value) if isinstance(value, str) else value
