from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from commtrace.analysis.summary import summarise
from commtrace.cli.main import app
from commtrace.errors import ImportFileError, TraceFormatError
from commtrace.interchange.whatif_study.files import import_whatif
from commtrace.interchange.whatif_study.trace import whatif_trace_of
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.interchange.whatif_study.whatif_files import COLUMNS, Operation, operation, two_stages, write_trace
from tests.reference import reference_data


def test_idle_time_is_bubble_or_exposed_by_what_the_stage_waits_for(tmp_path: Path) -> None:
    import_whatif(write_trace(tmp_path / "trace.parquet", two_stages()), tmp_path / "run")

    first, second = summarise(tmp_path / "run").ranks
    assert first.wall_ns == second.wall_ns == 8_000_000_000
    # Stage 0 waits from 1.0 for the backward, which is sent at 5.0 and there at 5.5.
    assert (first.part("compute"), first.part("bubble"), first.part("exposed")) == (3 * 10**9, 4 * 10**9, 5 * 10**8)
    # Stage 1 waits until 1.0, receives until 1.5; then it is in nothing until 2.0, and from 5.5 to 7.0.
    assert (second.part("compute"), second.part("bubble")) == (4 * 10**9, 10**9)
    assert (second.part("exposed"), second.part("other")) == (10**9, 2 * 10**9)


def test_places_and_sizes(tmp_path: Path) -> None:
    meta = tmp_path / "meta.yaml"
    meta.write_text("trial_name: X\ntp_size: 4\npp_size: 2\ndp_size: 1\n")

    import_whatif(write_trace(tmp_path / "trace.parquet", two_stages()), tmp_path / "run", meta=meta)

    trace = load_run(tmp_path / "run").ranks[1]
    assert trace.coordinates == {"pp": 1, "dp": 0}
    assert trace.parallel == {"pp": 2, "dp": 1, "tp": 4}
    assert {group.name: group.role for group in trace.groups.values()} == {"forward": "pp", "backward": "pp"}
    forward = trace.spans.kind == schema.FORWARD
    assert (trace.spans.microbatch[forward].tolist(), trace.spans.stage[forward].tolist()) == ([0], [1])


def test_steps_lie_one_behind_the_other(tmp_path: Path) -> None:
    import_whatif(write_trace(tmp_path / "trace.parquet", [*two_stages(9), *two_stages(7)]), tmp_path / "run")

    spans = load_run(tmp_path / "run").ranks[0].spans
    steps = spans.take(spans.kind == schema.STEP)
    assert steps.step.tolist() == [7, 9]
    assert (steps.start.tolist(), steps.end.tolist()) == ([0, 8 * 10**9], [8 * 10**9, 16 * 10**9])
    assert all(row.unmatched == 0 for row in summarise(tmp_path / "run", "7:10").communication)


def test_rows_of_a_rank(tmp_path: Path) -> None:
    import_whatif(write_trace(tmp_path / "trace.parquet", [*two_stages(9), *two_stages(7)]), tmp_path / "run")

    run = load_run(tmp_path / "run")
    spans = run.ranks[1].spans
    spans = spans.take(spans.step == 9)
    recorded = [
        (schema.KINDS[kind], run.names[name], start / 10**9, end / 10**9, chunk, peer, seq, number, stalled_on)
        for kind, name, start, end, chunk, peer, seq, number, stalled_on in zip(
            *(
                getattr(spans, column).tolist()
                for column in ("kind", "name", "start", "end", "chunk", "peer", "seq", "id", "stalled_on")
            ),
            strict=True,
        )
    ]
    assert recorded == [
        ("step", "step", 8.0, 16.0, -1, -1, -1, -1, -1),
        ("p2p", "recv", 8.0, 9.5, -1, 0, 1, 2, -1),
        ("stall", "recv", 8.0, 9.5, -1, 0, 1, -1, 2),
        ("forward", "forward-compute", 10.0, 11.0, 0, -1, -1, -1, -1),
        ("backward", "backward-compute", 11.0, 13.0, 0, -1, -1, -1, -1),
        ("p2p", "send", 13.0, 13.5, -1, 0, 1, 3, -1),
        ("stall", "send", 13.0, 13.5, -1, 0, 1, -1, 3),
        ("optimizer", "optimizer", 15.0, 16.0, -1, -1, -1, -1, -1),
    ]
    assert spans.is_async.tolist() == [kind in ("p2p", "stall") for kind, *_ in recorded]
    assert set(spans.group[spans.group >= 0].tolist()) == {
        group.id for group in run.ranks[0].groups.values() if group.name in ("forward", "backward")
    }


def test_few_steps_in_a_wide_range_are_in_one_file(tmp_path: Path) -> None:
    import_whatif(write_trace(tmp_path / "trace.parquet", [*two_stages(7), *two_stages(7000)]), tmp_path / "run")

    assert len(list((tmp_path / "run").glob("rank-00000/*.arrows"))) == 1
    assert load_run(tmp_path / "run", "7000").ranks[0].spans.step.tolist() == [7000] * 6
    assert load_run(tmp_path / "run").problems == ()


def test_a_column_whose_name_is_damaged_is_explained_in_words(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.parquet", two_stages())
    path.write_bytes(path.read_bytes().replace(b"gmc", b"\xffmc"))

    with pytest.raises(ImportFileError, match="cannot be read as Parquet: 'utf-8' codec can't decode"):
        import_whatif(path, tmp_path / "run")


def test_a_file_that_is_no_trace_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"stage": [1]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({name: [1] for name in COLUMNS}).slice(0, 0), tmp_path / "empty.parquet")
    moved = [operation(0, "optimizer", 0, 1), {**operation(1, "optimizer", 0, 1), "rank": 0}]
    shared = [operation(0, "optimizer", 0, 1), {**operation(0, "optimizer", 0, 1), "rank": 1}]
    good = write_trace(tmp_path / "good.parquet", two_stages())

    for path, message in {
        tmp_path / "text.parquet": "cannot be read as Parquet",
        tmp_path / "other.parquet": "has no columns dp_rank, duration",
        tmp_path / "empty.parquet": "has no rows",
        write_trace(tmp_path / "moved.parquet", moved): "more than one stage",
        write_trace(tmp_path / "shared.parquet", shared): "several ranks have the same stage",
    }.items():
        with pytest.raises(ImportFileError, match=message):
            import_whatif(path, tmp_path / "run")
    with pytest.raises(ImportFileError, match="given with --meta"):
        import_whatif(good, tmp_path / "run", meta=tmp_path / "nowhere.yaml")
    two = CliRunner().invoke(app, ["import", "whatif", str(good), str(good), "-o", str(tmp_path / "run")])
    assert two.exit_code == 2
    assert "takes the one Parquet file" in two.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": float("nan")}, "duration is missing, NaN or more than 10,000,000 s in 1 of 9 rows"),
        ({"start_ts": 1.7e18}, "start_ts is missing, NaN or more than 10,000,000 s in 1 of 9 rows"),
    ],
)
def test_rows_without_a_time_are_refused(tmp_path: Path, change: Operation, message: str) -> None:
    first, *others = two_stages()

    with pytest.raises(ImportFileError, match=message):
        import_whatif(write_trace(tmp_path / "trace.parquet", [{**first, **change}, *others]), tmp_path / "run")


def test_columns_that_do_not_apply_may_be_empty(tmp_path: Path) -> None:
    """Some writers put −1 where an operation belongs to no microbatch or chunk, others nothing."""
    empty = [{name: None if value == -1 else value for name, value in one.items()} for one in two_stages()]
    import_whatif(write_trace(tmp_path / "minus.parquet", two_stages()), tmp_path / "minus")
    import_whatif(write_trace(tmp_path / "empty.parquet", empty), tmp_path / "empty")

    for rank, trace in load_run(tmp_path / "minus").ranks.items():
        other = load_run(tmp_path / "empty").ranks[rank].spans
        assert (trace.spans.chunk.tolist(), trace.spans.microbatch.tolist()) == (
            other.chunk.tolist(),
            other.microbatch.tolist(),
        )


def test_times_may_count_from_anywhere(tmp_path: Path) -> None:
    since_1970 = [{**one, "start_ts": one["start_ts"] + 1.7e9} for one in two_stages()]
    import_whatif(write_trace(tmp_path / "trace.parquet", since_1970), tmp_path / "run")

    first, second = summarise(tmp_path / "run").ranks
    assert first.wall_ns == second.wall_ns == pytest.approx(8 * 10**9, abs=1000)
    assert first.part("bubble") == pytest.approx(4 * 10**9, abs=1000)


@pytest.mark.parametrize("column", ["rank", "stage", "dp_rank", "step", "seq_id"])
def test_rows_without_a_place_are_refused(tmp_path: Path, column: str) -> None:
    first, *others = two_stages()

    with pytest.raises(ImportFileError, match=f"1 of 9 rows have no {column}"):
        import_whatif(write_trace(tmp_path / "trace.parquet", [{**first, column: None}, *others]), tmp_path / "run")


def test_a_trace_in_which_nothing_takes_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="no operation takes any time"):
        import_whatif(
            write_trace(tmp_path / "trace.parquet", [{**one, "duration": 0.0} for one in two_stages()]),
            tmp_path / "run",
        )


def test_a_stage_of_which_a_replica_has_no_rows_is_named(tmp_path: Path) -> None:
    other = [{**one, "dp_rank": 1, "rank": 2} for one in two_stages() if one["stage"] == 0]

    with pytest.raises(ImportFileError, match="stage 1 of data-parallel rank 1 has no rows"):
        import_whatif(write_trace(tmp_path / "trace.parquet", [*two_stages(), *other]), tmp_path / "run")


@pytest.mark.parametrize(("doubled", "left_out"), [(1, 0), (0, 1), (0, 5)])
def test_steps_that_hold_other_operations_than_the_rest_are_named(tmp_path: Path, doubled: int, left_out: int) -> None:
    steps = {step: two_stages(step) for step in (7, 8, 9)}
    steps[8] = [*steps[8][left_out:], *steps[8][:doubled]]
    trace = write_trace(tmp_path / "trace.parquet", [one for own in steps.values() for one in own])
    import_whatif(trace, tmp_path / "run")

    with pytest.raises(TraceFormatError, match="steps 8 hold others than the rest"):
        whatif_trace_of(load_run(tmp_path / "run"))
    assert len(whatif_trace_of(load_run(tmp_path / "run", "9")).steps) == 1


def test_a_real_job(tmp_path: Path) -> None:
    folder = reference_data("whatif")
    result = CliRunner().invoke(
        app,
        [
            *("import", "whatif", str(folder / "trace-ST.parquet"), "--meta", str(folder / "meta-ST.yaml")),
            *("-o", str(tmp_path / "run")),
        ],
    )
    assert result.exit_code == 0, result.output

    summary = summarise(tmp_path / "run")

    assert (summary.run.world_size, len(summary.run.steps.used)) == (8, 31)
    assert {name: summary.run.parallel[name] for name in ("pp", "dp")} == {"pp": 4, "dp": 2}
    assert summary.pipeline
    assert (summary.pipeline.schedule, summary.pipeline.microbatches) == ("1f1b", 4)
    assert all(row.unmatched == 0 for row in summary.communication)
    stage_of_most_compute = max(summary.ranks, key=lambda rank: rank.part("compute")).coordinates["pp"]
    assert stage_of_most_compute == 3
