"""``commtrace sql RUN QUERY``: any question about a run."""

from __future__ import annotations

import json
import math
import sys
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import IO, Annotated, Final

import pyarrow as pa
import typer
from rich.markup import escape
from rich.table import Table

from commtrace.cli.arguments import StepsOption, tell_of_worlds
from commtrace.cli.output import wide_console, write_csv, write_parquet
from commtrace.errors import ConfigurationError

_MOST_ROWS: Final = 1_000
_WIDEST: Final = 10_000
_NUMBERS: Final = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


class TableFormat(str, Enum):
    """The format of the rows."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def sql(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run directory, e.g. commtrace-runs/latest.", show_default=False)
    ],
    query: Annotated[str, typer.Argument(help="A SELECT statement of DuckDB.", metavar="QUERY")],
    steps: StepsOption = "",
    output_format: Annotated[TableFormat, typer.Option("--format", help="How to write the rows.")] = TableFormat.TABLE,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write. Default: standard output.")
    ] = None,
) -> None:
    """Query a run with SQL.

    The tables are spans, steps, partition, ranks, communication, communication_by_size, communication_by_group, stages,
    findings, and files, which has every row as it was recorded. Times are in nanoseconds. docs/python.md has their
    columns. Needs the extra "sql": pip install 'commtrace[sql]'.
    """
    from commtrace.python.recorded_run import open as open_run
    from commtrace.python.sql import query as answer

    if output_format is TableFormat.PARQUET and output is None:
        raise ConfigurationError("--format parquet is no text: name a file with -o FILE")
    tell_of_worlds(run)
    recorded = open_run(run, steps=steps or None)
    for problem in recorded.problems:
        typer.echo(f"! {problem}", err=True)
    rows = answer(recorded, query)
    if output_format is TableFormat.PARQUET:
        assert output is not None
        write_parquet(rows, output)
        return
    with _opened(output) as file:
        if output_format is TableFormat.CSV:
            write_csv(rows, file, for_terminal=output is None and sys.stdout.isatty())
        elif output_format is TableFormat.JSON:
            json.dump([_jsonable(row) for row in rows.to_pylist()], file, allow_nan=False, default=str)
            file.write("\n")
        else:
            _print(rows, file)


def _opened(output: Path | None) -> AbstractContextManager[IO[str]]:
    return nullcontext(sys.stdout) if output is None else output.open("w", newline="")


def _jsonable(value: object) -> object:
    """Return a value for JSON: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, Decimal):
        return float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(rows: pa.Table, file: IO[str]) -> None:
    table = Table(box=None, pad_edge=False)
    for field in rows.schema:
        is_number = any(is_of(field.type) for is_of in _NUMBERS)
        table.add_column(escape(field.name), justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows.slice(0, _MOST_ROWS).to_pylist():
        table.add_row(*("" if value is None else escape(str(value)) for value in row.values()))
    console = wide_console(file)
    # A terminal wraps lines that are too long; rich would cut the columns instead.
    console.width = max(
        console.width, console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    )
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"({len(rows) - _MOST_ROWS} more rows: --format csv, json or parquet)", style="dim")
