"""SQL over a run, from Python and from the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import commtrace
from commtrace.cli.commands.sql import TableFormat, sql
from commtrace.cli.main import app
from commtrace.errors import CommtraceError
from commtrace.python.sql import TABLES, query
from commtrace.trace import schema
from tests.trace.rows import row, steps, write_rank
from tests.two_ranks import write_two_ranks

COMPUTE = "SELECT rank, sum(compute_ns) AS compute_ns FROM steps WHERE used GROUP BY rank ORDER BY rank"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_ranks(tmp_path_factory.mktemp("two") / "run")


def asked(*words: str) -> str:
    result = CliRunner().invoke(app, ["sql", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_sums_of_whole_numbers_are_whole(directory: Path) -> None:
    rows = query(commtrace.open(directory), COMPUTE)

    assert rows.schema == pa.schema([("rank", pa.int32()), ("compute_ns", pa.int64())])
    assert rows.to_pylist() == [{"rank": 0, "compute_ns": 80}, {"rank": 1, "compute_ns": 120}]


def test_tables_can_be_joined(directory: Path) -> None:
    text = """
        SELECT ranks.host, spans.role, sum(spans.end_ns - spans.start_ns) AS ns
        FROM Spans JOIN ranks USING (rank) WHERE kind = 'stall' GROUP BY ALL
    """
    assert query(commtrace.open(directory), text).to_pylist() == [{"host": "alpha", "role": "dp", "ns": 3 * 60}]


def test_the_files_have_every_row_marks_included(directory: Path) -> None:
    text = "SELECT rank, detail->>'$.coordinates.dp' AS dp FROM files WHERE name = 'topology' ORDER BY rank"

    assert query(commtrace.open(directory), text).to_pylist() == [{"rank": 0, "dp": "0"}, {"rank": 1, "dp": "1"}]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_read(name: str, directory: Path) -> None:
    [count] = query(commtrace.open(directory), f"SELECT count(*) AS n FROM {name}").to_pylist()

    expected = {
        "spans": 24, "steps": 6, "partition": 14, "ranks": 2, "communication": 1, "communication_by_size": 1,
        "communication_by_group": 1, "stages": 0, "findings": 7, "files": 30,
    }  # fmt: skip
    assert count["n"] == expected[name]


def test_a_name_means_a_table_of_the_run_and_no_variable_of_python(directory: Path) -> None:
    run = commtrace.open(directory)
    with pytest.raises(CommtraceError, match="Tables of a run: spans, steps, partition"):
        query(run, "SELECT * FROM run")


def test_the_command_prints_a_table_with_every_column(directory: Path) -> None:
    assert asked(str(directory), COMPUTE) == "rank  compute_ns\n   0          80\n   1         120\n"
    heading = asked(str(directory), "SELECT * FROM spans LIMIT 1").splitlines()[0]
    assert heading.split() == commtrace.open(directory).spans().column_names


def test_the_command_writes_csv_json_and_parquet(directory: Path, tmp_path: Path) -> None:
    assert asked(str(directory), COMPUTE, "--format", "csv") == "rank,compute_ns\n0,80\n1,120\n"
    text = f"SELECT *, compute_ns / 0 AS nothing, [rank] AS ranks FROM ({COMPUTE}) LIMIT 1"
    assert json.loads(asked(str(directory), text, "--format", "json")) == [
        {"rank": 0, "compute_ns": 80, "nothing": None, "ranks": [0]}
    ]
    file = tmp_path / "compute.parquet"
    assert asked(str(directory), COMPUTE, "--format", "parquet", "-o", str(file)) == ""
    assert pa.parquet.read_table(file).to_pylist() == [{"rank": 0, "compute_ns": 80}, {"rank": 1, "compute_ns": 120}]


def test_words_that_a_terminal_would_obey_are_escaped_on_one_and_whole_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path / "run", [*steps(0, 3), row(kind=schema.USER, name="\x1b[2J", start=5, end=9)])
    text = "SELECT name FROM files WHERE kind = 'user'"

    words = ["sql", str(tmp_path / "run"), text, "--format", "csv"]
    assert CliRunner().invoke(app, [*words, "-o", str(tmp_path / "names.csv")]).exit_code == 0
    assert (tmp_path / "names.csv").read_text() == "name\n\x1b[2J\n"
    assert asked(str(tmp_path / "run"), text) == "name   \n\\x1b[2J\n"
    monkeypatch.setattr("sys.stdout", terminal := _Terminal())
    sql(tmp_path / "run", text, output_format=TableFormat.CSV, output=None)
    assert terminal.getvalue() == "name\n\\x1b[2J\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_command_reads_only_the_steps_that_are_asked_for(directory: Path) -> None:
    assert asked(str(directory), COMPUTE, "--steps", "2", "--format", "csv") == "rank,compute_ns\n0,40\n1,60\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["SELEKT 1"], "Parser Error"),
        (["SELECT colour FROM steps"], "colour"),
        ([""], "gives no rows; write a SELECT"),
        (["SELECT 1", "--format", "parquet"], "name a file with -o FILE"),
        (["SELECT 1", "--steps", "90:95"], "no step in 90:95; recorded are 0–2"),
    ],
)
def test_queries_that_cannot_be_answered_are_explained_in_words(words: list[str], said: str, directory: Path) -> None:
    result = CliRunner().invoke(app, ["sql", str(directory), *words])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("commtrace: ")
    assert said in result.stderr


def test_a_run_that_is_not_there_is_said_as_by_other_commands(tmp_path: Path) -> None:
    said = [
        CliRunner().invoke(app, [*words]).stderr
        for words in (["sql", str(tmp_path), "SELECT 1"], ["summary", str(tmp_path)])
    ]

    assert said[0] == said[1]
    assert "is empty: it holds no recorded run" in said[0]


def test_without_duckdb_the_command_says_how_to_install_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    result = CliRunner().invoke(app, ["sql", str(directory), "SELECT 1"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "commtrace: commtrace sql needs DuckDB: pip install 'commtrace[sql]'\n"
