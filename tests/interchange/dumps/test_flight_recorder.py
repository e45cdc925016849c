from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.matching.match import match
from commtrace.analysis.summary import summarise
from commtrace.cli.commands.doctor import read_flight_calls
from commtrace.errors import ImportFileError
from commtrace.interchange.dumps import flight_recorder
from commtrace.interchange.dumps.flight_recorder import import_flight_recorder, read_flight_record, with_members
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.hang_report import InFlight
from commtrace.trace.metadata import group_id
from tests.findings.reading import said
from tests.interchange.dumps.flight_recorder_files import EPOCH, PP, entry, gloo_dump, gloo_entry, gloo_hang, write_dump


def test_a_rank_that_did_not_arrive_is_seen(tmp_path: Path) -> None:
    """Rank 1 waits in number 8; rank 3 never launched it."""
    files = [
        write_dump(tmp_path / "nccl_trace_rank_1", entry(7, 0), entry(8, 900, state="started")),
        write_dump(tmp_path / "nccl_trace_rank_3", entry(7, 100)),
    ]

    import_flight_recorder(files, tmp_path / "run")

    run = load_run(tmp_path / "run")
    number = group_id([1, 3], 1)
    assert (run.ranks[1].closed, run.ranks[3].closed) == (False, False), "a dump says nothing of the end"
    (in_flight,) = run.ranks[1].in_flight
    assert in_flight == InFlight(
        "all_reduce", group=number, seq=8, bytes=24, dtype="bfloat16", start=EPOCH + 900, state="started"
    )
    matches = match(run)
    assert matches.ranks[1].complete.tolist() == [True, False]
    assert matches.ranks[1].wait_ns(run.ranks[1].spans).tolist() == [100, 0]
    assert run.ranks[1].groups[number].role == "dp"
    spans = run.ranks[1].spans
    assert spans.bytes.tolist() == [24, 24]
    assert (spans.end - spans.start).tolist() == [500, 0]
    assert (spans.timing == schema.UNKNOWN_TIMING).all()
    result = summarise(tmp_path / "run")
    assert [row.unfinished for row in result.communication] == [1]
    assert any("Rank 1 was last seen in all_reduce number 8" in problem for problem in result.problems)


def test_the_place_in_the_program_is_kept(tmp_path: Path) -> None:
    import_flight_recorder([write_dump(tmp_path / "trace_0", entry(7, 0, state="scheduled"))], tmp_path / "run")

    (detail,) = load_run(tmp_path / "run").ranks[0].details.values()
    assert detail == '{"state": "scheduled", "unfinished": true, "frames": ["train_step train.py:42"]}'


def test_messages_meet_their_other_side(tmp_path: Path) -> None:
    """The names count inside the group: its members 0 and 1 are the ranks 1 and 3."""
    p2p: dict[str, Any] = {"is_p2p": True, "process_group": PP, "collective_seq_id": 0}
    files = [
        write_dump(tmp_path / "d1", entry(0, 0, name="nccl:send 0->1", p2p_seq_id=5, **p2p)),
        write_dump(tmp_path / "d3", entry(0, 9, name="nccl:recv 1<-0", p2p_seq_id=8, **p2p)),
    ]

    import_flight_recorder(files, tmp_path / "run")

    run = load_run(tmp_path / "run")
    assert (run.ranks[1].spans.peer.tolist(), run.ranks[3].spans.peer.tolist()) == ([3], [1])
    assert match(run).ranks[1].complete.tolist() == [True]


def test_a_hang_in_dumps_of_gloo_is_found(tmp_path: Path) -> None:
    import_flight_recorder(gloo_hang(tmp_path), tmp_path / "run")

    diagnosis = examine(tmp_path / "run", now_ns=EPOCH + 10_000)

    assert said(diagnosis.findings) == ["The job hangs: 1 communication is held up by rank 2."]
    (stop,) = diagnosis.hang.stops
    assert (stop.kind, stop.seq, stop.arrived, [one.rank for one in stop.missing]) == ("hung", 4, (0, 1), [2])
    assert diagnosis.run.backend == "gloo"
    assert diagnosis.run.states == {"dumped": 3}
    assert [(group.group.role, group.group.ranks) for group in diagnosis.groups] == [
        ("world", (0, 1, 2)),
        ("sub", (0, 1)),
    ]
    assert [seen.in_flight for seen in diagnosis.groups[0].collectives] == [1, 1, 0]
    assert all(group.missing == 0 for group in diagnosis.groups), "dumps begin where they begin"


@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl", "ucc", "gloo"])
def test_a_message_that_nobody_receives_is_a_hang_and_no_other_call(tmp_path: Path, backend: str) -> None:
    def message(number: int, words: str, *, retired: bool) -> Any:
        name = f"{backend}:{words}"
        return {**gloo_entry(0, number, retired=retired), "profiling_name": name, "is_p2p": True, "p2p_seq_id": number}

    sent = [message(1, "send 0->1", retired=True), message(2, "send 0->1", retired=False)]
    files = [
        gloo_dump(tmp_path / "dump_0", *sent),
        gloo_dump(tmp_path / "dump_1", message(1, "recv 1<-0", retired=True)),
    ]
    import_flight_recorder(files, tmp_path / "run")

    diagnosis = examine(tmp_path / "run", now_ns=EPOCH)
    assert said(diagnosis.findings) == ["The job hangs: 1 communication is held up by rank 1."]
    assert (diagnosis.hang.stops[0].seq, diagnosis.hang.stops[0].arrived) == (1, (0,))
    assert [(seen.recorded, seen.in_flight) for seen in diagnosis.groups[0].messages] == [(1, 1), (1, 0)]


def test_calls_completed_at_an_unknown_time_ended_before_the_dump(tmp_path: Path) -> None:
    """Old recorders name the state, and no time of it."""

    def old(seq: int, created: int, state: str) -> Any:
        return {**entry(seq, created, state=state), "time_discovered_completed_ns": None, "retired": None}

    files = [
        write_dump(tmp_path / "dump_1", old(7, 0, "completed"), old(8, 900, "started")),
        write_dump(tmp_path / "dump_3", old(7, 100, "completed")),
    ]
    import_flight_recorder(files, tmp_path / "run")

    diagnosis = examine(tmp_path / "run", now_ns=EPOCH)
    assert diagnosis.findings[0].evidence == "The job hangs: 1 communication is held up by rank 3."
    seen = [seen for group in diagnosis.groups for seen in group.collectives]
    assert [(one.recorded, one.in_flight) for one in seen] == [(1, 1), (1, 0)]


def test_the_last_call_of_a_rank_is_its_last_activity(tmp_path: Path) -> None:
    """Dumps of gloo have no ends but a common bound."""
    import_flight_recorder(gloo_hang(tmp_path), tmp_path / "run")

    last = examine(tmp_path / "run", now_ns=EPOCH).hang.last_activities[2].last
    assert last is not None
    assert (last.role, last.seq, last.ago_ns) == ("world", 3, None)


def test_hosts_that_dumps_do_not_name_are_said_to_be_a_guess(tmp_path: Path) -> None:
    files = gloo_hang(tmp_path)
    guessed = import_flight_recorder(files, tmp_path / "run")
    given = import_flight_recorder(files, tmp_path / "given", ranks_per_host=1)

    assert "is a guess" in guessed.notes[0]
    assert any("is a guess" in note for note in examine(tmp_path / "run", now_ns=EPOCH).notes)
    assert given.notes == ()


def test_the_summary_of_dumps_leads_to_the_hang(tmp_path: Path) -> None:
    import_flight_recorder(gloo_hang(tmp_path), tmp_path / "run")

    verdict = summarise(tmp_path / "run").verdict
    assert verdict.startswith("The job hangs: 1 communication is held up by rank 2. ")
    assert verdict.endswith(f"commtrace doctor {tmp_path / 'run'}")


@pytest.mark.parametrize(
    "shown",
    [
        {"name": "gloo:all_gather", "input_sizes": [[2]], "output_sizes": [[5, 2]]},
        {"name": "gloo:all_gather", "input_sizes": [[2]], "output_sizes": [[2]] * 5},
        {"name": "gloo:reduce_scatter", "input_sizes": [[10]], "output_sizes": [[2]]},
        {"name": "gloo:send 0->4", "is_p2p": True},
    ],
)
def test_the_last_ranks_of_the_world_are_awaited_though_they_left_no_dump(
    tmp_path: Path, shown: dict[str, Any]
) -> None:
    """Ranks 3 and 4 of five died; the others wait for them."""
    files = []
    for rank in range(3):
        known = [entry(1, 1_000, process_group=["0", "default_pg"], **shown)] if rank == 0 else [gloo_entry(1, 1_000)]
        files.append(gloo_dump(tmp_path / f"dump_{rank}", *known, gloo_entry(2, 2_000, retired=False)))
    records = with_members(map(read_flight_record, files))

    assert {record.groups["0"].ranks for record in records} == {(0, 1, 2, 3, 4)}
    import_flight_recorder(files, tmp_path / "run")
    (stop,) = examine(tmp_path / "run", now_ns=EPOCH + 10_000).hang.stops
    assert stop.unknown == (3, 4)


def test_operations_that_the_recorder_retired_have_ended(tmp_path: Path) -> None:
    import_flight_recorder(gloo_hang(tmp_path), tmp_path / "run")

    rows = summarise(tmp_path / "run").communication
    assert {row.role: (row.count, row.unfinished) for row in rows} == {"world": (11, 2), "sub": (2, 0)}


def test_dumps_in_which_all_has_ended_are_healthy(tmp_path: Path) -> None:
    files = [gloo_dump(tmp_path / f"dump_{rank}", gloo_entry(1, 10), gloo_entry(2, 20)) for rank in (0, 1)]
    import_flight_recorder(files, tmp_path / "run")

    diagnosis = examine(tmp_path / "run", now_ns=EPOCH + 100 * 10**9)

    assert (diagnosis.findings, diagnosis.hang.stops) == ((), ())


def test_a_hang_in_dumps_of_nccl_stands_first(tmp_path: Path) -> None:
    """Rank 3 launched nothing after number 7, of which rank 1 has launched two."""
    waiting = [entry(seq, 900 + seq, state=state, retired=False) for seq, state in ((8, "started"), (9, "scheduled"))]
    files = [
        write_dump(tmp_path / "nccl_trace_rank_1", entry(7, 0), *waiting),
        write_dump(tmp_path / "nccl_trace_rank_3", entry(7, 100)),
    ]
    import_flight_recorder(files, tmp_path / "run")

    diagnosis = examine(tmp_path / "run", now_ns=EPOCH)

    assert diagnosis.findings[0].evidence == "The job hangs: 1 communication is held up by rank 3."
    assert (diagnosis.hang.stops[0].seq, diagnosis.hang.stops[0].arrived) == (8, (1,))
    assert not any("ended cleanly" in sentence for sentence in diagnosis.hang.sentences)


def test_calls_of_groups_without_members_reach_doctor(tmp_path: Path) -> None:
    calls = read_flight_calls(gloo_hang(tmp_path))

    assert {call.members for call in calls} == {(0, 1, 2), (0, 1)}
    assert {call.state for call in calls} == {"retired", ""}


def test_half_a_surrogate_pair_in_an_entry_damages_only_that_entry(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    odd = {**entry(2, 10), "\ud800": 1}
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [entry(1, 0), odd]}, protocol=4))

    record = read_flight_record(path)

    assert len(record.entries) + record.unreadable == 2


def test_an_operation_of_several_parts_takes_one_number(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d0", entry(4, 0), entry(4, 1), entry(5, 2))

    import_flight_recorder([dump], tmp_path / "run")

    spans = load_run(tmp_path / "run").ranks[0].spans
    assert (spans.seq.tolist(), spans.op_in_seq.tolist()) == ([4, 4, 5], [0, 1, 0])


class Malicious:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def test_a_dump_may_be_json(tmp_path: Path) -> None:
    """As torch serves it over HTTP: tuples are lists there."""
    pickled = write_dump(tmp_path / "nccl_trace_rank_1", entry(1, 10), entry(2, 2_000, state="started"))
    as_json = tmp_path / "nccl_trace_rank_1.json"
    as_json.write_text(json.dumps(pickle.loads(pickled.read_bytes())))

    one, other = read_flight_record(pickled), read_flight_record(as_json)

    assert one.entries == other.entries
    assert one.groups == other.groups
    assert (other.rank, other.version) == (1, "2.10")
    assert [call.seq for call in read_flight_calls([tmp_path / "nccl_trace"])] == [1, 2, 1, 2]


def test_dumps_of_old_versions_are_lists_of_entries(tmp_path: Path) -> None:
    """torch 2.1: no version, no groups, one count of all operations."""
    old = {key: value for key, value in entry(0, 10).items() if key not in ("process_group", "collective_seq_id")}
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps([{**old, "seq_id": 7}]))

    (read,) = read_flight_record(path).entries

    assert (read.operation, read.group, read.seq, read.completed_ns) == ("all_reduce", None, 7, EPOCH + 510)


@pytest.mark.parametrize("created", [None, "soon", -5, 10**30, float("nan")])
def test_an_operation_that_was_enqueued_nobody_knows_when_has_no_duration(tmp_path: Path, created: Any) -> None:
    path = write_dump(tmp_path / "nccl_trace_rank_1", entry(1, 10, time_created_ns=created))

    import_flight_recorder([path], tmp_path / "run")

    (row,) = summarise(tmp_path / "run").communication
    assert (row.unfinished, row.duration_max_ns) == (1, None)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"entries": [Malicious()]}))

    with pytest.raises(ImportFileError, match=r"it refers to builtins\.print"):
        read_flight_record(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trace_0", b"no pickle", "not a dump of the flight recorder"),
        ("trace_0", pickle.dumps({"entries": []})[:-4], "is damaged, or not a dump"),
        ("trace_0", pickle.dumps([1, 2]), "all of its 2 entries are damaged"),
        ("trace", pickle.dumps({"entries": []}), "must end with its rank"),
    ],
)
def test_a_file_that_is_no_dump_is_refused_in_words(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ImportFileError, match=message):
        read_flight_record(tmp_path / name)


FAR_AWAY = b"r" + (1 << 27).to_bytes(4, "little")
"""Keeps a value in a place before which there are as many empty ones, of eight bytes each."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04(" + b"\x8f" * 10 + b"l.", "it holds EMPTY_SET, but a dump holds only plain values"),
        (b"\x80\x02]" + FAR_AWAY + b".", "it stores a value at an impossible position"),
        (b"\x80\x02]q\x00h\x00a.", "it takes more than .* bytes of memory"),
        (b"\x80\x02(" + b"]" * 40 + b"l.", "it has more than 30 values"),
        (b"[" + b"[]," * 20 + b"[]]", "it has more than 30 values"),
        (pickle.dumps([["x" * 1_000] * 300] * 1_000), "it takes more than .* bytes of memory"),
    ],
)
def test_a_dump_that_would_take_far_more_memory_than_its_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    if "30 values" in message:
        monkeypatch.setattr(flight_recorder, "_MOST_VALUES", 30)
    (tmp_path / "trace_0").write_bytes(content)

    with pytest.raises(ImportFileError, match=message):
        read_flight_record(tmp_path / "trace_0")


def test_a_dump_of_usual_length_with_deep_frames_is_read(tmp_path: Path) -> None:
    frames = [{"name": f"function_{n}", "filename": "/site-packages/torch/module.py", "line": n} for n in range(60)]
    path = write_dump(tmp_path / "trace_1", *(entry(n, 1_000 * n, frames=frames) for n in range(2_000)))

    entries = read_flight_record(path).entries

    assert len(entries) == 2_000
    assert entries[-1].frames[59] == "function_59 /site-packages/torch/module.py:59"


def test_files_that_cannot_be_put_together(tmp_path: Path) -> None:
    one, other = write_dump(tmp_path / "a_0", entry(1, 0)), write_dump(tmp_path / "b_0", entry(1, 0))

    with pytest.raises(ImportFileError, match="both of rank 0"):
        import_flight_recorder([one, other], tmp_path / "run")
    with pytest.raises(ImportFileError, match="cannot be read"):
        read_flight_record(tmp_path / "nowhere_3")


@pytest.mark.parametrize("ranks", ["[0, 999999999]", "[-1, 0]", "[0, 0]", [0, 2**70]])
def test_a_group_that_no_job_has_is_refused(tmp_path: Path, ranks: Any) -> None:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"pg_config": groups, "entries": [entry(0, 100)]}))

    with pytest.raises(ImportFileError, match="a process group lists the ranks"):
        import_flight_recorder([tmp_path / "dump_0"], tmp_path / "run")


def test_entries_that_the_recorder_does_not_write_are_left_out_and_reported(tmp_path: Path) -> None:
    damaged = [entry(1, 200, profiling_name=3), entry(2, 300, collective_seq_id=-1), [], None]
    dump = write_dump(tmp_path / "dump_0", entry(0, 100), *damaged)

    imported = import_flight_recorder([dump], tmp_path / "run")

    assert imported.num_spans == 1
    (problem,) = [problem for problem in load_run(tmp_path / "run").problems if "entries" in problem]
    assert problem == "rank 0: 4 damaged entries of dump_0 were left out."
