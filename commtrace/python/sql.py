"""Query a recorded run with SQL, as tables of DuckDB.

>>> query(commtrace.open("runs/a"), "SELECT rank, avg(bubble_ns) FROM steps GROUP BY rank")  # doctest: +SKIP
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from commtrace.errors import CommtraceError, MissingExtraError
from commtrace.python import tables
from commtrace.python.recorded_run import RecordedRun
from commtrace.trace.files.reader import read_files


def _stages(run: RecordedRun[pa.Table]) -> pa.Table:
    pipeline = run.pipeline()
    return tables.stages(pipeline.per_stage if pipeline else ())


TABLES: Final[Mapping[str, Callable[[RecordedRun[pa.Table]], pa.Table]]] = {
    "spans": lambda run: run.spans(),
    "steps": lambda run: run.steps(),
    "partition": lambda run: run.partition(),
    "ranks": lambda run: run.ranks(),
    "communication": lambda run: run.communication(),
    "communication_by_size": lambda run: run.communication("size"),
    "communication_by_group": lambda run: run.communication("group"),
    "stages": _stages,
    "findings": lambda run: tables.findings(run.findings()),
    "files": lambda run: pa.concat_tables(read_files(run.path)),
}
"""Tables by name; docs/python.md describes them."""


def query(run: RecordedRun[pa.Table], text: str) -> pa.Table:
    """Return the rows of a DuckDB query. Only tables named in it are made.

    Raises:
        MissingExtraError: DuckDB is not installed.
        CommtraceError: DuckDB refuses the query; the message says why.
    """
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("commtrace sql needs DuckDB: pip install 'commtrace[sql]'") from error
    # Only tables of the run: a name must not mean a variable of this program, and nothing is downloaded.
    settings = {"python_enable_replacements": "false", "autoinstall_known_extensions": "false"}
    with duckdb.connect(config=settings) as database:
        for name, make in TABLES.items():
            if re.search(rf"\b{name}\b", text, re.IGNORECASE):
                database.register(name, make(run))
        try:
            result = database.sql(text)
            if result is None:
                raise CommtraceError(f"{text!r} gives no rows; write a SELECT")
            return _with_whole_sums(result.to_arrow_table())
        except duckdb.CatalogException as error:
            raise CommtraceError(f"{error}\nTables of a run: {', '.join(TABLES)}") from error
        except duckdb.Error as error:
            raise CommtraceError(str(error)) from error


def _with_whole_sums(rows: pa.Table) -> pa.Table:
    """Cast sums of whole numbers, which DuckDB returns as decimals, to int64."""
    columns = [
        field.with_type(pa.int64()) if pa.types.is_decimal(field.type) and not field.type.scale else field
        for field in rows.schema
    ]
    try:
        return rows.cast(pa.schema(columns))
    except pa.ArrowInvalid:  # one does not fit into 64 bits
        return rows
