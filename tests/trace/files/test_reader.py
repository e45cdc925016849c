from __future__ import annotations

import os
import shutil
import tracemalloc
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from commtrace.errors import ConfigurationError, RunNotFoundError, TraceFormatError
from commtrace.trace import schema
from commtrace.trace.files import compaction
from commtrace.trace.files.locate import find_run_directory
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.hang_report import Activity, InFlight
from commtrace.trace.metadata import ClockAnchor, DeviceState, Group, PeakMemory
from commtrace.trace.run import Drop
from commtrace.trace.selection import StepRange
from tests.trace.rows import Row, mark, metadata, row, steps, write_rank


def _steps(directory: Path, wanted: str | None = None, rank: int = 0) -> list[int]:
    return [int(step) for step in load_run(directory, wanted).ranks[rank].spans.step]


def test_written_columns_come_back(tmp_path: Path) -> None:
    columns = {
        "kind": schema.COLLECTIVE,
        "name": "all_reduce",
        "lane": schema.COMMUNICATION,
        "start": 10,
        "end": 25,
        "step": 2,
        "microbatch": 1,
        "chunk": 0,
        "stage": 3,
        "group": 2**62 + 1,
        "seq": 5,
        "op_in_seq": 1,
        "bytes": 2**40,
        "self_bytes": 12,
        "dtype": "bfloat16",
        "peer": 0,
        "is_async": True,
        "id": 99,
        "stalled_on": 98,
        "timing": schema.CUDA_EVENT_TIMING,
        "start_exact": False,
        "end_exact": False,
        "detail": '{"members": [1, 2]}',
        "start_lead_us": -3,
        "end_lead_us": 2_500,
    }
    write_rank(tmp_path, [row(**columns)])

    run = load_run(tmp_path)
    spans = run.ranks[0].spans

    read = {name: getattr(spans, name)[0].item() for name in schema.SCHEMA.names if name != "detail"}
    named = {**read, "name": run.names[read["name"]], "dtype": run.names[read["dtype"]]}
    assert {**named, "detail": run.ranks[0].details[99]} == columns
    assert run.ranks[0].metadata == metadata()
    assert run.ranks[0].closed is False  # no `end` mark was written
    assert run.problems == ()


def test_names_are_shared_by_all_ranks_whatever_their_order_in_the_files(tmp_path: Path) -> None:
    write_rank(tmp_path, [row(name="a"), row(name="b")], rank=0, world_size=2)
    write_rank(tmp_path, [row(name="b"), row(name="a"), row(name="c")], rank=1, world_size=2)

    run = load_run(tmp_path)

    words = {rank: [run.names[code] for code in trace.spans.name] for rank, trace in run.ranks.items()}
    assert words == {0: ["a", "b"], 1: ["b", "a", "c"]}
    assert run.name_code("b") == run.ranks[1].spans.name[0]
    assert run.name_code("never recorded") == -2


@pytest.mark.parametrize("written", list(permutations([(1, 9), (1, 2), (5, 6), (5, 6)])))
def test_spans_are_sorted_by_start_and_the_longer_first(written: list[tuple[int, int]], tmp_path: Path) -> None:
    rows = [row(start=start, end=end, id=number) for number, (start, end) in enumerate(written)]
    write_rank(tmp_path, [mark("end", {}), *rows[:2], mark("end", {}), *rows[2:]], rank=0, world_size=2)
    write_rank(tmp_path, rows[:1], rank=1, world_size=2)

    first, second = (trace.spans for trace in load_run(tmp_path).ranks.values())

    assert list(zip(first.start.tolist(), first.end.tolist(), strict=True)) == [(1, 9), (1, 2), (5, 6), (5, 6)]
    assert first.id[2] < first.id[3]  # Equal ones stay as they were written.
    assert [written[number] for number in first.id.tolist()] == [(1, 9), (1, 2), (5, 6), (5, 6)]
    assert (second.start.tolist(), second.id.tolist()) == ([written[0][0]], [0])


def test_every_column_of_a_long_recording_is_kept_in_order(tmp_path: Path) -> None:
    rows: list[Row] = []
    for number in range(1_000):
        rows += [row(start=number, end=number + 1, id=number), mark("dropped", {"p2p": 1})]
    write_rank(tmp_path, rows)

    spans = load_run(tmp_path).ranks[0].spans

    assert spans.start.tolist() == spans.id.tolist() == list(range(1_000))


def test_marks_tell_about_the_rank_and_are_not_spans(tmp_path: Path) -> None:
    group = {"id": 7, "ranks": [0], "ordinal": 0, "role": "", "name": "1", "description": "", "backend": "gloo"}
    anchor = {"monotonic_ns": 50, "realtime_ns": 60, "bracket_ns": 1}
    in_flight: list[dict[str, Any]] = [{"operation": "all_reduce", "group": 7, "seq": 3, "start": 40}]
    rows = [
        mark("process_group", group),
        mark("topology", {"coordinates": {"tp": 1}, "parallel": {"tp": 2}, "framework": {"name": "megatron-core"}}),
        mark("process_group", {**group, "role": "tp"}),
        mark("dropped", {"collective": 2}),
        *steps(0, 1),
        mark("dropped", {"collective": 1, "p2p": 4}),
        mark("clock_anchor", anchor),
        mark("in_flight", in_flight),
        mark("problem", {"message": "the optimizer hook was disabled"}),
        mark("end", {}),
        mark("from_a_newer_version", {"x": 1}),
    ]
    write_rank(tmp_path, rows)

    run = load_run(tmp_path)
    trace = run.ranks[0]

    assert trace.groups == {7: Group(7, (0,), 0, "tp", "1", "", "gloo")}
    assert (trace.coordinates, trace.parallel) == ({"tp": 1}, {"tp": 2})
    assert trace.topology == {"framework": {"name": "megatron-core"}}
    assert trace.dropped == {"collective": 3, "p2p": 4}
    assert trace.anchors == (metadata().anchor, ClockAnchor(50, 60, 1))
    assert trace.in_flight == tuple(InFlight(**one) for one in in_flight)
    assert trace.closed
    assert trace.spans.step.tolist() == [0]
    assert run.problems == ("rank 0: the optimizer hook was disabled",)


def test_readings_of_the_device_are_kept_in_their_order(tmp_path: Path) -> None:
    reading = {"at_ns": 3, "clock_mhz": 1095, "temperature_c": 91, "slowdowns": ["thermal slowdown"], "serial": "165"}
    write_rank(tmp_path, [*steps(0, 1), mark("device_state", reading), mark("device_state", {"at_ns": 9})])

    assert load_run(tmp_path).ranks[0].device_states == (
        DeviceState(3, clock_mhz=1095, temperature_c=91, slowdowns=("thermal slowdown",), serial="165"),
        DeviceState(9),
    )


def test_the_peak_memory_is_in_every_later_segment(tmp_path: Path) -> None:
    peaks = [{"step": step, "allocated": 700 + step, "reserved": 1000} for step in (0, 1)]
    rows = [*steps(0, 1), mark("peak_memory", peaks[0]), *steps(1, 2), mark("peak_memory", peaks[1]), *steps(2, 6)]
    write_rank(tmp_path, rows, steps_per_segment=2)
    first, *_, last = sorted((tmp_path / "rank-00000").glob("spans-*"))
    assert first != last
    first.unlink()

    assert load_run(tmp_path).ranks[0].peak_memory == PeakMemory(1, 701, 1000)


def test_the_last_activity_of_a_rank_is_kept_with_its_time(tmp_path: Path) -> None:
    rows = [
        *steps(0, 2),
        row(kind=schema.MARK, name="activity", start=300, end=300, detail='{"no_progress_ns": 0}'),
        row(kind=schema.MARK, name="dropped", start=400, end=400, detail='{"p2p": 2}'),
        row(kind=schema.MARK, name="activity", start=700, end=700, detail='{"no_progress_ns": 9}'),
    ]
    write_rank(tmp_path, rows)
    trace = load_run(tmp_path).ranks[0]

    assert (trace.activity, trace.activity_ns, trace.no_progress_ns) == (Activity(), 700, 9)
    assert trace.drops == (Drop(400, {"p2p": 2}),)
    assert trace.last_written_ns == 700
    assert len(trace.spans) == 2


def test_steps_are_chosen_and_what_describes_the_rank_is_kept(tmp_path: Path) -> None:
    rows = [mark("topology", {"coordinates": {"pp": 1}}), *steps(0, 30), mark("dropped", {"gc": 1}), mark("end", {})]
    write_rank(tmp_path, rows, steps_per_segment=5)

    assert _steps(tmp_path, "12:15") == [12, 13, 14]
    assert _steps(tmp_path, "3:30:10") == [3, 13, 23]
    assert _steps(tmp_path, "29") == [29]
    assert load_run(tmp_path, StepRange(2, 4)).ranks[0].spans.step.tolist() == [2, 3]
    trace = load_run(tmp_path, "12:15").ranks[0]
    assert (trace.coordinates, trace.dropped, trace.closed) == ({"pp": 1}, {"gc": 1}, True)


def test_steps_that_were_not_recorded_leave_a_run_without_spans(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 3))

    assert _steps(tmp_path, "50:60") == []


def test_segments_of_other_steps_are_not_even_opened(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, steps(0, 40), steps_per_segment=10)
    torn = directory / "spans-0001.arrows"
    torn.write_bytes(torn.read_bytes()[:-200])

    assert load_run(tmp_path, "35:38").problems == ()
    assert len(load_run(tmp_path, "12:13").problems) == 1


@pytest.mark.parametrize(("value", "found"), [("1", [13]), ("0", [])])
def test_rows_may_come_some_segments_late_when_nccl_measures(tmp_path: Path, value: str, found: list[int]) -> None:
    late = row(kind=schema.COLLECTIVE, step=13, start=1_300, end=1_350)
    rows = [*steps(0, 36), late, *steps(36, 60)]
    write_rank(tmp_path, rows, steps_per_segment=10, environment={"TORCH_NCCL_ENABLE_TIMING": value})

    spans = load_run(tmp_path, "12:14").ranks[0].spans
    assert spans.step[spans.kind == schema.COLLECTIVE].tolist() == found


def test_steps_that_cannot_be_parsed_are_a_configuration_error(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 1))

    with pytest.raises(ConfigurationError, match="steps '9:3'"):
        load_run(tmp_path, "9:3")


def test_a_rank_that_was_killed_is_read_up_to_its_last_batch(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write(steps(0, 4))
    writer.write(steps(4, 6))

    assert _steps(tmp_path) == list(range(6))
    assert load_run(tmp_path).ranks[0].closed is False
    assert load_run(tmp_path).problems == ()


def test_a_file_torn_anywhere_gives_its_whole_batches_and_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "is_worthwhile", lambda *_: False)  # several batches, as in a file being written
    whole = write_rank(tmp_path / "whole", steps(0, 3)) / "spans-0000.arrows"
    content = whole.read_bytes()
    torn = write_rank(tmp_path / "torn", []) / "spans-0000.arrows"
    read = set()

    for length in (*range(0, len(content), 16), len(content) - 8):  # all but the end of the stream
        torn.write_bytes(content[:length])
        try:
            run = load_run(tmp_path / "torn")
        except RunNotFoundError:
            read.add(0)
        else:
            own = run.ranks[0].spans.step.tolist()
            assert own == list(range(len(own)))
            assert all("torn after" in problem for problem in run.problems)
            read.add(len(own))

    assert read == {0, 1, 2, 3}


def test_a_torn_segment_does_not_hide_the_next_one(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, steps(0, 20), steps_per_segment=10)
    first = directory / "spans-0000.arrows"
    first.write_bytes(first.read_bytes()[:-300])

    run = load_run(tmp_path)

    assert run.ranks[0].spans.step.tolist()[-10:] == list(range(10, 20))
    assert len(run.problems) == 1
    assert "spans-0000.arrows: torn after" in run.problems[0]


def test_a_header_that_is_not_readable_skips_only_that_file(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, steps(0, 20), steps_per_segment=10)
    (directory / "spans-0002.arrows").write_bytes(b"")
    (directory / "spans-0003.arrows").write_bytes((directory / "spans-0000.arrows").read_bytes()[:100])

    run = load_run(tmp_path)

    assert run.ranks[0].spans.step.tolist() == list(range(20))
    assert len(run.problems) == 2
    assert all("skipped, its header is not readable" in problem for problem in run.problems)


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    directory = write_rank(tmp_path, steps(0, 1))
    (directory / "notes.txt").write_text("mine")
    (tmp_path / "report.html").write_text("<html>")
    (tmp_path / "rank-notes").mkdir()

    assert _steps(tmp_path) == [0]


def test_a_run_repeated_under_its_name_with_fewer_ranks_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    for rank in range(4):
        write_rank(tmp_path, steps(0, 9), rank=rank, world_size=4, session=1_000 + rank)
    for rank in range(2):
        write_rank(tmp_path, steps(0, 3), rank=rank, world_size=2, session=2_000 + rank)

    run = load_run(tmp_path)

    assert sorted(run.ranks) == [0, 1]
    assert run.world_size == 2
    assert _steps(tmp_path, rank=1) == [0, 1, 2]


def test_the_newest_of_several_runs_in_one_directory_is_shown(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, steps(0, 9), rank=rank, world_size=2, run_id="old", session=1_000 + rank)
    for rank in (0, 1):
        write_rank(tmp_path, steps(50, 53), rank=rank, world_size=2, run_id="new", session=2_000 + rank)

    run = load_run(tmp_path)

    assert run.any_metadata.run_id == "new"
    assert _steps(tmp_path, rank=1) == [50, 51, 52]
    assert run.problems == (
        "2 segments of other runs or attempts in the same directory were left out (run old, attempt 1); "
        "shown is run new, attempt 1.",
    )


def test_the_newest_attempt_of_a_restarted_run_is_shown(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 9), attempt=0, session=1_000)
    write_rank(tmp_path, steps(5, 7), attempt=1, session=2_000)

    assert _steps(tmp_path) == [5, 6]


def test_a_run_repeated_under_the_same_name_does_not_mix_with_itself(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 9), session=1_000)
    write_rank(tmp_path, steps(0, 2), session=2_000)

    assert _steps(tmp_path) == [0, 1]


@pytest.mark.parametrize(("boot_id", "ended_before_seconds"), [("b1", 31), ("another host's", 3_601)])
def test_ranks_of_an_earlier_job_of_the_same_name_are_left_out(
    tmp_path: Path, boot_id: str, ended_before_seconds: int
) -> None:
    """The second job has two ranks as well, but only one of them has written."""
    second = 1_700_000_000
    for rank, session, boot in ((0, second, "b1"), (1, second - 9_000, boot_id)):
        directory = write_rank(tmp_path, steps(0, 2), rank=rank, world_size=2, session=session * 10**9, boot_id=boot)
    (segment,) = directory.iterdir()

    def shown() -> list[int]:
        return sorted(load_run(tmp_path).ranks)

    os.utime(segment, (second - ended_before_seconds + 2, second - ended_before_seconds + 2))
    assert shown() == [0, 1]
    os.utime(segment, (second - ended_before_seconds, second - ended_before_seconds))
    assert shown() == [0]
    assert load_run(tmp_path).problems[0] == (
        "rank 1 left out: recorded by an earlier job of the same name, r1, which had ended before this one began."
    )


@pytest.mark.parametrize(
    ("second", "is_told"),
    [
        ({"pid": 2}, True),
        ({"pid": 1}, False),  # a script that records twice
        ({"pid": 2, "attempt": 1}, False),  # a restart, however long the first one took to end
        ({"pid": 2, "host": "another"}, False),
        ({"pid": 2, "anchor": ClockAnchor(9_500_000_000, 0, 0)}, False),
    ],
)
def test_two_jobs_at_once_under_one_name_are_reported(tmp_path: Path, second: dict[str, Any], is_told: bool) -> None:
    begun = ClockAnchor(2_000_000_000, 1_700_000_000_000_000_000, 40)
    write_rank(tmp_path, [row(end=10_000_000_000)], session=1_000, pid=1)
    write_rank(tmp_path, [row(end=3_000_000_000)], **{"session": 2_000, "anchor": begun, **second})

    problems = [problem for problem in load_run(tmp_path).problems if "two jobs ran under the name r1" in problem]

    assert problems == is_told * [
        "rank 0: another process recorded the same at the same time: two jobs ran under the name r1, and what is "
        "shown may be of both. Give each a COMMTRACE_RUN_ID or COMMTRACE_DIR of its own."
    ]


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 3):
        write_rank(tmp_path, steps(0, 1), rank=rank, world_size=4)

    run = load_run(tmp_path)

    assert list(run.ranks) == [0, 3]
    assert run.world_size == 4
    assert len(run.problems) == 1
    assert run.problems[0].startswith("2 of 4 ranks have no readable files: 1, 2. Bring their rank-NNNNN folders")


def test_no_folders_are_asked_for_of_an_imported_run(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 1), world_size=2, versions={"imported from": "kineto"})

    assert load_run(tmp_path).problems == (
        "1 of 2 ranks have no readable files: 1. Import again with their kineto files as well, if there are any.",
    )


def test_a_copy_of_a_ranks_folder_is_left_out(tmp_path: Path) -> None:
    """Somebody kept a copy, or gathered nodes' folders under other names: no row counts twice."""
    folder = write_rank(tmp_path, steps(0, 3), rank=3, world_size=4)
    for name in ("rank-00007", "rank-3"):
        shutil.copytree(folder, tmp_path / name)

    run = load_run(tmp_path)

    assert run.ranks[3].spans.step.tolist() == [0, 1, 2]
    assert run.problems[0] == (
        "rank-00007, rank-3: left out, holds rank 3 as rank-00003 does. Was a folder copied or renamed?"
    )


def test_many_missing_ranks_are_abbreviated(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 1), world_size=1_000)

    assert "999 of 1000 ranks have no readable files: 1, 2, 3" in load_run(tmp_path).problems[0]
    assert len(load_run(tmp_path).problems[0]) < 300


def test_a_million_missing_ranks_are_counted_without_a_look_at_each(tmp_path: Path) -> None:
    write_rank(tmp_path, steps(0, 1), world_size=1_000_000)

    tracemalloc.start()
    problem = load_run(tmp_path).problems[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert problem.startswith("999999 of 1000000 ranks have no readable files: 1, 2, 3")
    assert peak < 10_000_000


def _rewritten(path: Path, **changes: bytes) -> None:
    """The same segment with other entries in its schema metadata."""
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    kept = {**table.schema.metadata, **{name.encode(): value for name, value in changes.items()}}
    table = table.replace_schema_metadata({name: value for name, value in kept.items() if value})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write_rank(tmp_path, steps(0, 1)) / "spans-0000.arrows"
    _rewritten(path, **{"commtrace.format": b"2"})

    with pytest.raises(TraceFormatError, match=r"has format 2; this commtrace reads up to 1.*pip install --upgrade"):
        load_run(tmp_path)


def test_an_arrow_stream_of_somebody_else_is_not_a_segment(tmp_path: Path) -> None:
    path = write_rank(tmp_path, steps(0, 1)) / "spans-0000.arrows"
    _rewritten(path, commtrace=b"")

    with pytest.raises(RunNotFoundError, match=r"skipped, .* of another program \(an Arrow stream, but no segment"):
        load_run(tmp_path)


def test_a_damaged_header_costs_its_own_file_only(tmp_path: Path) -> None:
    damaged = [write_rank(tmp_path, steps(0, 1), rank=rank) / "spans-0000.arrows" for rank in (0, 1, 2)][1:]
    _rewritten(damaged[0], commtrace=b"{oops")
    _rewritten(damaged[1], commtrace=b"")

    run = load_run(tmp_path)

    assert list(run.ranks) == [0]
    assert [str(path) in problem for path, problem in zip(damaged, run.problems, strict=False)] == [True, True]


def test_any_damage_to_a_file_is_told_and_costs_no_other_rank(tmp_path: Path) -> None:
    """Flipped bits can point beyond a column's end: what pyarrow does not check it reads, and the process dies."""
    path = [write_rank(tmp_path, steps(0, 50), rank=rank) / "spans-0000.arrows" for rank in (0, 1)][1]
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x24]) + whole[place + 1 :])

        run = None
        with suppress(TraceFormatError):  # the version, the name of a column or one of its words was hit
            run = load_run(tmp_path)
        assert run is None or len(run.ranks[0].spans) == 50


def test_the_parent_of_a_single_run_stands_for_it(tmp_path: Path) -> None:
    write_rank(tmp_path / "only", steps(0, 1))
    (tmp_path / "something-else").mkdir()

    assert find_run_directory(tmp_path) == tmp_path / "only"
    assert load_run(tmp_path).path == tmp_path / "only"


def test_the_parent_of_several_runs_lists_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_rank(tmp_path / name, steps(0, 1))

    with pytest.raises(RunNotFoundError, match="holds 2 runs"):
        load_run(tmp_path)


def test_an_empty_recording_is_answered_with_its_likely_reason(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"import commtrace\.auto"):
        load_run(tmp_path)
    with pytest.raises(RunNotFoundError, match="no such directory"):
        load_run(tmp_path / "nowhere")


def test_groups_told_in_a_segment_that_is_not_read_are_known(tmp_path: Path) -> None:
    group = {"id": 7, "ranks": [0], "ordinal": 0, "role": "dp", "name": "7", "description": "", "backend": "gloo"}
    rows = [*steps(0, 3), mark("process_group", group), mark("problem", {"message": "it broke"}), *steps(3, 8)]
    write_rank(tmp_path, rows, steps_per_segment=2)

    run = load_run(tmp_path, "6:7")

    assert run.ranks[0].spans.step.tolist() == [6]
    assert run.ranks[0].groups[7].role == "dp"
    assert run.problems == ("rank 0: it broke",)


def test_a_device_that_was_used_later_than_the_header_was_written_is_the_ranks(tmp_path: Path) -> None:
    write_rank(tmp_path, [mark("topology", {"device": {"name": "GPU 3", "uuid": "u"}}), *steps(0, 1)])
    metadata = load_run(tmp_path).ranks[0].metadata
    assert (metadata.device, metadata.device_uuid) == ("GPU 3", "u")
