"""Tables as CSV and Parquet files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import IO

import pyarrow as pa

from commtrace.trace.inputs import printable


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
