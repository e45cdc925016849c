"""``commtrace.open``: the numbers of the commands, as tables and objects."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import commtrace
from commtrace.analysis.windows.run import survey_large_run
from commtrace.cli.main import app
from commtrace.errors import ConfigurationError, MissingExtraError, RunNotFoundError
from commtrace.python import recorded_run, tables
from commtrace.trace import schema
from tests import factory
from tests.findings.reading import why_not
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import mark, row, write_rank, write_run
from tests.two_ranks import GROUP, write_two_ranks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_ranks(tmp_path_factory.mktemp("two") / "run")


@pytest.fixture(scope="module")
def run(directory: Path) -> commtrace.RecordedRun[pa.Table]:
    return commtrace.open(directory)


def rows(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))


def test_a_run_says_which_one_it_is(run: commtrace.RecordedRun[pa.Table], directory: Path) -> None:
    assert (run.run_id, run.world_size, run.path, run.problems) == ("r1", 2, directory, ())
    assert repr(run) == "<commtrace.RecordedRun 'r1': 2 of 2 ranks>"


def test_spans_have_words_and_nulls_where_files_have_codes_and_minus_one(run: commtrace.RecordedRun[pa.Table]) -> None:
    spans = run.spans()

    assert spans.schema == tables.SPANS
    assert len(spans) == 24, "marks are no spans"
    first = spans.slice(1, 3).to_pylist()
    assert [(span["kind"], span["name"], span["role"]) for span in first] == [
        ("forward", "forward", None),
        ("collective", "all_reduce", "dp"),
        ("stall", "all_reduce", "dp"),
    ]
    assert [(span["start_ns"], span["end_ns"], span["step"]) for span in first] == [
        (0, 40, 0),
        (40, 80, 0),
        (40, 80, 0),
    ]
    assert [(span["microbatch"], span["group"], span["seq"]) for span in first] == [
        (0, None, None),
        (None, GROUP.id, 0),
        (None, GROUP.id, 0),
    ]
    assert [(span["bytes"], span["dtype"], span["id"], span["stalled_on"]) for span in first] == [
        (None, None, None, None),
        (1024, "float32", 1, None),
        (None, None, None, 1),
    ]


def test_steps_are_divided_exactly_and_say_why_they_do_not_count(run: commtrace.RecordedRun[pa.Table]) -> None:
    steps = run.steps()

    assert steps.schema == tables.STEPS
    assert rows(steps, "rank", "step", "start_ns", "end_ns", "used", "left_out") == [
        (rank, step, 100 * step, 100 * step + 100, step > 0, None if step else "warm-up")
        for rank in (0, 1)
        for step in (0, 1, 2)
    ]
    parts = rows(steps, "compute_ns", "exposed_wait_ns", "exposed_transfer_ns", "other_ns", "bubble_ns")
    assert parts[:3] == [(None,) * 5, (40, 20, 20, 20, 0), (40, 20, 20, 20, 0)]
    assert parts[3:] == [(None,) * 5, (60, 0, 20, 20, 0), (60, 0, 20, 20, 0)]


def test_the_partition_is_the_same_in_long_form(run: commtrace.RecordedRun[pa.Table]) -> None:
    partition = run.partition()

    assert partition.schema == tables.PARTITION
    assert sorted(rows(partition.slice(0, 4), "rank", "step", "state", "detail", "time_ns"), key=str) == [
        (0, 1, "compute", "forward", 40),
        (0, 1, "exposed transfer", "dp", 20),
        (0, 1, "exposed wait", "dp", 20),
        (0, 1, "other", None, 20),
    ]
    assert sum(partition.column("time_ns").to_pylist()) == 2 * 2 * 100


def test_ranks_have_their_mean_step_and_their_place_in_the_job(run: commtrace.RecordedRun[pa.Table]) -> None:
    ranks = run.ranks()

    assert ranks.column_names == [*tables.RANKS.names, "dp"]
    assert rows(ranks, "rank", "dp", "host", "device", "closed", "steps", "wall_ns", "compute_ns", "blame_ns") == [
        (0, 0, "alpha", "cpu", True, 2, 100, 40, 0),
        (1, 1, "alpha", "cpu", True, 2, 100, 60, 20),
    ]


def test_a_rank_without_a_step_has_a_row_without_means(tmp_path: Path) -> None:
    write_two_ranks(tmp_path, world_size=3)
    write_rank(tmp_path, [row(start=5, end=9)], rank=2, world_size=3)

    assert rows(commtrace.open(tmp_path).ranks(), "rank", "steps", "wall_ns", "dp")[2] == (2, 0, None, None)


def test_communication_can_be_divided_by_size_and_group(run: commtrace.RecordedRun[pa.Table]) -> None:
    table = run.communication()

    assert table.schema == tables.COMMUNICATION
    assert rows(table, "role", "operation", "group_size", "count", "bytes", "exposed_ns", "wait_ns") == [
        ("dp", "all_reduce", 2, 4, 4096, 120, 40)
    ]
    assert rows(table, "busbw_gbps", "bandwidth_time", "bytes_from", "ranks") == [(51.2, "transfer", None, None)]
    assert rows(run.communication("size"), "bytes_from", "bytes_to") == [(1024, 2048)]
    assert rows(run.communication("group"), "ranks") == [([0, 1],)]
    wrong: Any = "colour"
    with pytest.raises(ConfigurationError, match="by='colour': write one of operation, size, group"):
        run.communication(wrong)


def test_clocks_and_stragglers_are_objects_that_say_what_is_not_known(run: commtrace.RecordedRun[pa.Table]) -> None:
    assert run.align().method == "shared clock"
    assert run.align().refused is None
    assert run.pipeline() is None
    assert [one for one in run.findings() if one.kind == "slow"] == []
    assert "too few steps: 2" in why_not(run.findings())[0]
    assert why_not(run.summary().findings) == why_not(run.findings())
    assert run.summary().alignment is run.align()


def test_a_slow_rank_is_named_also_against_a_baseline(tmp_path: Path) -> None:
    slow = commtrace.open(write_two_ranks(tmp_path / "slow", steps=12))

    assert [one for one in slow.findings(baseline=slow) if one.kind == "slow"] == [], (
        "nobody is slower there than in the same run"
    )


def test_a_pipeline_has_its_schedule(tmp_path: Path) -> None:
    run = commtrace.open(write_run(tmp_path, PipelineJob(stages=2, microbatches=2, steps=3).run()))
    pipeline = run.pipeline()

    assert pipeline is not None
    assert (pipeline.schedule, pipeline.stages, pipeline.microbatches) == ("1f1b", 2, 2)
    assert [stage.stage for stage in pipeline.per_stage] == [0, 1]
    assert tables.stages(pipeline.per_stage).column("wall_ns").to_pylist() == [
        stage.wall_ns for stage in pipeline.per_stage
    ]


def test_an_imported_trace_of_kernels_has_idle_time_and_no_verdict(tmp_path: Path) -> None:
    kernels = [
        span
        for begin in (0, 100, 200)
        for span in (
            factory.span("step", begin, begin + 100, step=begin // 100, timing="kernel"),
            factory.span("kernel", begin + 10, begin + 60, step=begin // 100, timing="kernel"),
            factory.span("memory", begin + 50, begin + 70, step=begin // 100, timing="kernel"),
        )
    ]
    run = commtrace.open(write_run(tmp_path, factory.make_run({0: kernels, 1: kernels})))

    parts = rows(run.steps(), "used", "compute_ns", "exposed_memory_ns", "idle_ns", "other_ns")
    assert parts == 2 * [(False, None, None, None, None), *2 * [(True, 50, 10, 40, 0)]]
    assert "kernels show when a rank computes" in why_not(run.findings())[0]


def test_spans_of_several_hosts_are_on_one_clock(tmp_path: Path) -> None:
    job = ["--dp", "4", "--gpus-per-host", "2", "--num-steps", "4", "--clock-offset", "1=5"]
    assert CliRunner().invoke(app, ["synth", "-o", str(tmp_path / "run"), *job]).exit_code == 0
    run = commtrace.open(tmp_path / "run")

    alignment = run.align()
    assert (alignment.method, alignment.refused, [one.host for one in alignment.hosts]) == (
        "collective ends", None, ["node0", "node1"],
    )  # fmt: skip
    collectives = run.spans().to_pandas().query("kind == 'collective' and name == 'all_gather'")
    ends = collectives.groupby(["group", "seq", "op_in_seq"]).end_ns.agg(["min", "max", "size"])
    assert set(ends["size"]) == {4}
    assert (ends["max"] - ends["min"]).max() < 50_000, "the members leave together; their clocks differ by milliseconds"


def test_only_the_steps_that_are_asked_for_are_read(directory: Path) -> None:
    run = commtrace.open(directory, steps="0:2")

    assert rows(run.steps(), "rank", "step", "used") == [(rank, step, True) for rank in (0, 1) for step in (0, 1)]
    assert set(run.spans().column("step").to_pylist()) == {0, 1}


def test_the_last_attempt_of_a_step_counts_and_the_others_say_why_they_do_not(tmp_path: Path) -> None:
    spans = [
        row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + 100)
        for begin, step in ((0, 0), (100, 1), (200, 2), (300, 1), (400, 2), (500, 3))
    ]
    write_rank(tmp_path, spans)

    assert rows(commtrace.open(tmp_path).steps(), "step", "start_ns", "used", "left_out") == [
        (0, 0, False, "warm-up"),
        (1, 100, False, "done again later"),
        (2, 200, False, "done again later"),
        (1, 300, True, None),
        (2, 400, True, None),
        (3, 500, True, None),
    ]


def test_a_recording_without_steps_is_one_step_without_a_number(tmp_path: Path) -> None:
    write_rank(tmp_path, [row(start=0, end=30), row(start=40, end=50)])
    run = commtrace.open(tmp_path)

    assert rows(run.steps(), "step", "start_ns", "end_ns", "used", "compute_ns", "other_ns") == [
        (None, 0, 50, True, 40, 10)
    ]
    assert run.pipeline() is None
    assert "No step was recorded in full" in why_not(run.findings())[0]


def test_a_large_run_has_the_same_tables_without_its_rows(
    directory: Path, run: commtrace.RecordedRun[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_run, "survey_large_run", partial(survey_large_run, most_bytes=0))
    large = commtrace.open(directory)
    with monkeypatch.context() as without_rows:
        without_rows.setattr(recorded_run, "load_window", None)
        assert (large.run_id, large.world_size, large.path, large.problems) == ("r1", 2, directory, ())
        assert (repr(large), large.align()) == (repr(run), run.align())
        for method in ("steps", "ranks", "partition"):
            assert getattr(large, method)() == getattr(run, method)()
        for by in ("operation", "size", "group"):
            assert large.communication(by) == run.communication(by)

    assert large.spans() == run.spans()
    assert large.findings() == run.findings()


def test_pandas_keeps_whole_numbers_whole(directory: Path) -> None:
    run = commtrace.open(directory, tables="pandas")
    steps = run.steps()

    assert isinstance(steps, pandas.DataFrame)
    assert steps[steps.used].groupby("rank").compute_ns.sum().to_dict() == {0: 80, 1: 120}
    assert run.spans().group.dropna().unique().tolist() == [GROUP.id]
    assert pandas.api.types.is_integer_dtype(steps.compute_ns)


def test_polars_is_there_by_request(directory: Path) -> None:
    steps = commtrace.open(directory, tables="polars").steps()

    assert isinstance(steps, polars.DataFrame)
    assert steps.filter("used")["compute_ns"].to_list() == [40, 40, 60, 60]


def test_tables_of_another_kind_are_an_error(directory: Path) -> None:
    wrong: Any = "excel"
    with pytest.raises(ConfigurationError, match="tables='excel': write one of arrow, pandas, polars"):
        commtrace.open(directory, tables=wrong)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_an_extra_that_is_missing_is_named_with_its_command(
    package: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'commtrace\[{package}\]'"):
        commtrace.open(directory, tables=package)


def _nothing(path: Path) -> None:
    """No directory at all."""


def _empty(path: Path) -> None:
    path.mkdir()


def _torn_in_its_header(path: Path) -> None:
    for file in sorted(write_two_ranks(path).rglob("*.arrows")):
        file.write_bytes(file.read_bytes()[:40])


def _of_a_newer_version(path: Path) -> None:
    file = next(write_two_ranks(path).rglob("*.arrows"))
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    metadata = {**table.schema.metadata, b"commtrace.format": b"99"}
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("spoil", [_nothing, _empty, _torn_in_its_header, _of_a_newer_version])
def test_an_unreadable_run_raises_the_error_of_the_commands(spoil: Any, tmp_path: Path) -> None:
    spoil(tmp_path / "run")
    with pytest.raises(commtrace.CommtraceError) as error:
        commtrace.open(tmp_path / "run")

    command = CliRunner().invoke(app, ["summary", str(tmp_path / "run")])
    assert command.stderr.replace("\n", " ").strip() == f"commtrace: {error.value}".replace("\n", " ").strip()
    assert isinstance(error.value, ValueError)


def test_steps_that_were_not_recorded_are_an_error(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="no step in 90:95; recorded are 0–2"):
        commtrace.open(directory, steps="90:95")


def test_faults_of_the_files_are_among_the_problems_of_a_run(tmp_path: Path) -> None:
    write_rank(tmp_path, [*(row(start=i, end=i + 1) for i in range(3)), mark("end", {})], rank=0, world_size=2)

    assert [problem.partition(". ")[0] for problem in commtrace.open(tmp_path).problems] == [
        "1 of 2 ranks have no readable files: 1"
    ]


def test_without_a_path_the_newest_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunNotFoundError):
        commtrace.open()
    write_two_ranks(tmp_path / "commtrace-runs" / "a")

    assert commtrace.open().run_id == "r1"


def test_naming_what_reads_is_all_that_imports_it() -> None:
    source = (
        "import sys, commtrace\n"
        "before = {'numpy', 'pyarrow'} & set(sys.modules)\n"
        "commtrace.open\n"
        "print(before, {'numpy', 'pyarrow'} <= set(sys.modules), {'torch', 'polars', 'duckdb'} & set(sys.modules))"
    )
    completed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)

    assert completed.stdout == "set() True set()\n", completed.stderr
