"""interchange/dumps/inspector.py: the JSON lines of NCCL Inspector and RCCL Inspector."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.matching.match import match
from commtrace.cli.commands.doctor import HEALTHY
from commtrace.cli.main import app
from commtrace.errors import ImportFileError
from commtrace.interchange.dumps.inspector import import_inspector
from commtrace.interchange.rows import Imported
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run

EPOCH_US = 1_752_867_229_000_000
WORLD = "0x7f8c496ae9f661"
README_LINE = (
    '{"header": {"id": "0xe62dedaa97644a", "rank": 4, "n_ranks": 8, "nnodes": 1}, "metadata": '
    '{"inspector_output_format_version": "v4.0", "git_rev": "9019a1912-dirty", "rec_mechanism": '
    '"nccl_profiler_interface", "dump_timestamp_us": 1752867229276385, "hostname": "example-hostname", "pid": 438776}, '
    '"coll_perf": {"coll": "ReduceScatter", "coll_sn": 1231, "coll_msg_size_bytes": 2147483648, "coll_exec_time_us": '
    '41057, "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 418.439467, "coll_busbw_gbs": 366.134533, '
    '"event_trace_sn": {"coll_start_sn": 1, "coll_stop_sn": 2, "kernel_events": [{"channel_id": 0, "kernel_start_sn": '
    '3, "kernel_stop_sn": 48, "kernel_record_sn": 47}]}, "event_trace_ts": {"coll_start_ts": 1752867229235059, '
    '"coll_stop_ts": 1752867229235064, "kernel_events": [{"channel_id": 0, "kernel_start_ts": 1752867229235181, '
    '"kernel_stop_ts": 1752867229275811, "kernel_record_ts": 1752867229275811}]}}}'
)
"""The verbose example of the plugin's README."""

FACTORS = {"AllReduce": lambda n: 2 * (n - 1) / n, "AllGather": lambda n: (n - 1) / n, "Send": lambda n: 1.0}


def line(
    rank: int,
    number: int,
    *,
    operation: str = "AllReduce",
    took: int = 100,
    stop: int | None = None,
    num_bytes: int = 1_000_000,
    comm: str = WORLD,
    size: int = 2,
    name: str = "",
    host: str = "alpha",
    pid: int | None = None,
    peer: int | None = None,
    source: str = "kernel_gpu",
) -> dict[str, Any]:
    """Return one line as the plugin writes it, with its own bandwidths; verbose if ``stop``, in µs, is given."""
    kind = "coll" if peer is None else "p2p"
    traffic = num_bytes * (size if operation in ("AllGather", "ReduceScatter") else 1)
    algbw = traffic / 1e9 / (took / 1e6)
    factor = FACTORS.get(operation, FACTORS["AllGather"])(size)
    perf: dict[str, Any] = {
        kind: operation,
        f"{kind}_sn": number,
        f"{kind}_msg_size_bytes": num_bytes,
        f"{kind}_exec_time_us": took,
        f"{kind}_timing_source": source,
        f"{kind}_algobw_gbs": round(algbw, 6),
        f"{kind}_busbw_gbs": round(algbw * factor, 6),
    }
    if peer is not None:
        perf["p2p_peer"] = peer
    if stop is not None:
        last = EPOCH_US + stop
        channels = [
            {"channel_id": 0, "kernel_start_ts": last - took - 7, "kernel_stop_ts": last, "kernel_record_ts": last},
            {"channel_id": 1, "kernel_start_ts": last - took, "kernel_stop_ts": last - 1, "kernel_record_ts": 0},
        ]
        perf["event_trace_ts"] = {f"{kind}_start_ts": EPOCH_US, f"{kind}_stop_ts": EPOCH_US, "kernel_events": channels}
    return {
        "header": {"id": comm, "rank": rank, "n_ranks": size, "nnodes": 1, **({"comm_name": name} if name else {})},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": EPOCH_US + 10_000,
            "hostname": host,
            "pid": 100 + rank if pid is None else pid,
        },
        f"{kind}_perf": perf,
    }


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def imported(tmp_path: Path, *files: list[Any]) -> tuple[Run, Imported]:
    """Import one file per list of lines."""
    paths = [write(tmp_path / f"host-pid{number}.log", *lines) for number, lines in enumerate(files)]
    result = import_inspector(paths, tmp_path / "run")
    return load_run(tmp_path / "run"), result


def bandwidth(run: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["bandwidth", str(run), "--json"])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["communication"]
    return rows


def test_the_example_of_the_plugin_is_read_exactly(tmp_path: Path) -> None:
    run, result = imported(tmp_path, [README_LINE])

    assert (result.ranks, result.num_spans) == (1, 1)
    (rank,) = run.ranks
    spans = run.ranks[rank].spans
    assert (rank, run.world_size) == (4, 8)
    assert (spans.start[0], spans.end[0]) == (1752867229234754000, 1752867229275811000)
    assert (run.names[spans.name[0]], spans.bytes[0], spans.timing[0]) == (
        "reduce_scatter", 8 * 2147483648, schema.NCCL_TIMING,
    )  # fmt: skip
    assert run.ranks[rank].metadata.node == "example-hostname"
    (group,) = run.ranks[rank].groups.values()
    assert (group.ranks, group.role, group.name, group.backend) == (
        tuple(range(8)), "world", "0xe62dedaa97644a", "nccl",
    )  # fmt: skip
    (row,) = bandwidth(tmp_path / "run")
    assert (row["algbw_gbps"], row["busbw_gbps"]) == pytest.approx((418.439467, 366.134533), abs=1e-6)


@pytest.mark.parametrize("operation", ["AllReduce", "AllGather", "ReduceScatter"])
def test_bandwidths_without_times_are_those_of_the_file(tmp_path: Path, operation: str) -> None:
    lines = [[line(rank, 0, operation=operation, took=50, size=4)] for rank in range(4)]

    imported(tmp_path, *lines)

    (row,) = bandwidth(tmp_path / "run")
    perf = lines[0][0]["coll_perf"]
    assert row["bandwidth_time"] == "duration"
    assert (row["algbw_gbps"], row["busbw_gbps"]) == pytest.approx(
        (perf["coll_algobw_gbs"], perf["coll_busbw_gbs"]), abs=1e-6
    )
    assert (row["count"], row["group_size"], row["inter_node"]) == (4, 4, False)


def test_bandwidths_of_messages_are_those_of_the_file(tmp_path: Path) -> None:
    send = line(0, 1, operation="Send", peer=1, took=37)

    imported(tmp_path, [send], [line(1, 1, operation="Recv", peer=0, took=37)])

    rows = {row["operation"]: row for row in bandwidth(tmp_path / "run")}
    assert rows["send"]["busbw_gbps"] == pytest.approx(send["p2p_perf"]["p2p_busbw_gbs"], abs=1e-6)
    assert rows["send"]["bandwidth_time"] == rows["recv"]["bandwidth_time"] == "duration"


def test_without_times_nothing_is_joined_and_no_steps_are_guessed(tmp_path: Path) -> None:
    run, result = imported(tmp_path, *([line(rank, number) for number in range(12)] for rank in range(2)))

    assert not any(own.complete.any() for own in match(run).ranks.values())
    assert any("The lines do not say when an operation ran" in note for note in result.notes)
    summary = CliRunner().invoke(app, ["summary", str(tmp_path / "run"), "--json"])
    printed = json.loads(summary.stdout)
    assert printed["run"]["steps_inferred"] is False
    assert "Only communication was recorded: what else the ranks did is not known." in printed["verdict"]


def test_waiting_is_told_from_transfer_where_lines_have_times(tmp_path: Path) -> None:
    """Rank 1 arrives 60 µs after rank 0; both end together, after 40 µs of transfer."""
    run, result = imported(tmp_path, [line(0, 0, took=100, stop=500)], [line(1, 0, took=40, stop=500)])

    matches = match(run)
    assert [matches.ranks[rank].complete.tolist() for rank in (0, 1)] == [[True], [True]]
    assert [matches.ranks[rank].wait_ns(run.ranks[rank].spans).tolist() for rank in (0, 1)] == [[60_000], [0]]
    (row,) = bandwidth(tmp_path / "run")
    assert (row["bandwidth_time"], row["algbw_gbps"], row["wait_ns"]) == ("transfer", 25.0, 60_000)
    assert "by 7 µs (median) to 7 µs (99th percentile)" in result.notes[1]


def test_operations_are_joined_by_their_own_numbers(tmp_path: Path) -> None:
    """NCCL counts each operation for itself, and a graph that is replayed may repeat a number."""
    mine = [line(0, 5, stop=100), line(0, 5, operation="AllGather", stop=300), line(0, 5, stop=700)]
    others = [line(1, 5, operation="AllGather", stop=300), line(1, 5, stop=100), line(1, 5, stop=700)]

    run, _ = imported(tmp_path, mine, others)

    spans = [run.ranks[rank].spans for rank in (0, 1)]
    assert spans[0].seq.tolist() == spans[1].seq.tolist() == [1, 0, 2]  # by number, repetition and name
    assert [run.names[code] for code in spans[0].name] == ["all_reduce", "all_gather", "all_reduce"]
    assert match(run).ranks[0].complete.all()


def test_ranks_are_those_of_the_communicator_of_all(tmp_path: Path) -> None:
    pairs = {0: ("0xa", 0), 1: ("0xb", 0), 2: ("0xa", 1), 3: ("0xb", 1)}
    files = [
        [
            line(pairs[rank][1], 0, comm=pairs[rank][0], name="TENSOR_MODEL_PARALLEL_GROUP:7", pid=90 - rank, stop=50),
            line(rank, 0, size=4, host="alpha" if rank < 2 else "beta", pid=90 - rank, stop=100),
        ]
        for rank in range(4)
    ]
    for rank, lines in enumerate(files):
        lines[0]["metadata"]["hostname"] = lines[1]["metadata"]["hostname"]
        assert lines[0]["header"]["rank"] == rank // 2

    run, _ = imported(tmp_path, *files)

    assert [(rank, trace.metadata.node, trace.metadata.local_rank) for rank, trace in run.ranks.items()] == [
        (0, "alpha", 0), (1, "alpha", 1), (2, "beta", 0), (3, "beta", 1),
    ]  # fmt: skip
    assert sorted((group.role, group.ranks) for group in run.ranks[3].groups.values()) == [
        ("tp", (1, 3)), ("world", (0, 1, 2, 3)),
    ]  # fmt: skip


def test_without_a_communicator_of_all_ranks_are_numbered_and_it_is_reported(tmp_path: Path) -> None:
    files = [[line(rank % 2, 0, comm=f"0x{rank // 2}", pid=200 - rank)] for rank in range(4)]

    run, result = imported(tmp_path, *files)

    assert list(run.ranks) == [0, 1, 2, 3]
    assert any(note.startswith("No communicator holds all processes") for note in result.notes)
    assert {group.ranks for trace in run.ranks.values() for group in trace.groups.values()} == {(0, 1), (2, 3)}


def test_a_communicator_with_unknown_members_is_no_group(tmp_path: Path) -> None:
    run, result = imported(tmp_path, [line(0, 0, size=8), line(0, 0, comm="0xa", size=2)])

    assert [group.size for group in run.ranks[0].groups.values()] == [8]
    assert any(note.startswith("Of 1 communicator not all members have files") for note in result.notes)
    assert {row["group_size"]: row["busbw_gbps"] is None for row in bandwidth(tmp_path / "run")} == {
        8: False,
        None: True,
    }


def test_one_process_may_drive_several_devices(tmp_path: Path) -> None:
    """As all_reduce_perf -g 2 does."""
    run, result = imported(tmp_path, [line(rank, 0, pid=7, stop=100) for rank in range(2)])

    assert (result.ranks, result.num_spans) == (2, 2)
    assert [len(trace.spans) for trace in run.ranks.values()] == [1, 1]
    assert match(run).ranks[0].complete.tolist() == [True]


def test_devices_that_cannot_be_told_apart_are_an_error(tmp_path: Path) -> None:
    lines = [*(line(rank, 0, pid=7) for rank in range(2)), line(0, 0, comm="0xa", pid=7)]

    with pytest.raises(ImportFileError, match="Process 7 on alpha drives several devices"):
        imported(tmp_path, lines)


def test_messages_are_joined_by_their_order_between_two_ranks(tmp_path: Path) -> None:
    sends = [line(0, number, operation="Send", peer=1, stop=100 * number) for number in (1, 2)]
    receives = [line(1, number, operation="Recv", peer=0, stop=100 * number) for number in (2, 1)]

    run, _ = imported(tmp_path, sends, receives)

    assert [run.ranks[rank].spans.seq.tolist() for rank in (0, 1)] == [[0, 1], [0, 1]]
    assert [run.ranks[rank].spans.peer.tolist() for rank in (0, 1)] == [[1, 1], [0, 0]]
    assert set(run.ranks[0].spans.kind.tolist()) == {schema.P2P}
    assert match(run).ranks[0].complete.tolist() == [True, True]


def test_messages_are_not_joined_if_some_are_missing(tmp_path: Path) -> None:
    sends = [line(0, number, operation="Send", peer=1, stop=100 * number) for number in (1, 3)]
    receives = [line(1, number, operation="Recv", peer=0, stop=100 * number) for number in (1, 2, 3)]

    run, result = imported(tmp_path, sends, receives)

    assert not match(run).ranks[0].complete.any()
    assert any(note.startswith("In 1 communicator messages are missing") for note in result.notes)


def test_missing_numbers_are_counted(tmp_path: Path) -> None:
    _, result = imported(tmp_path, *([line(rank, number) for number in (3, 7, 8)] for rank in range(2)))

    assert any(note.startswith("3 collectives, by the numbers of the others, are in no file") for note in result.notes)


def test_an_operation_of_which_the_plugin_knows_no_traffic_has_no_bytes(tmp_path: Path) -> None:
    run, _ = imported(tmp_path, [line(0, 0, operation="All2All", size=8)])

    assert (run.names[run.ranks[0].spans.name[0]], run.ranks[0].spans.bytes[0]) == ("All2All", -1)


def test_durations_of_the_host_are_reported(tmp_path: Path) -> None:
    run, result = imported(tmp_path, [line(0, 0, source="collective_cpu")])

    assert run.ranks[0].spans.timing.tolist() == [schema.HOST_TIMING]
    assert "1 durations were measured on the host, not by the GPU: they are too long." in result.notes


def test_version_4_3_and_later_have_the_header_before_the_operations(tmp_path: Path) -> None:
    whole = [line(rank, 0, stop=100) for rank in range(2)]
    files = []
    for one in whole:
        marker = {"header": one["header"], "metadata": {**one["metadata"], "inspector_output_format_version": "v4.3"}}
        statistics = {"coll_records": 1, "coll_dropped_total": 40, "p2p_dropped_total": 2, "proxy_records": 1}
        perf = {**one["coll_perf"], "coll_algo": "RING", "coll_proto": "LL"}
        files.append([{**marker, "dump_stats": statistics}, {"coll_perf": perf}, {"proxy_trace": {"peer": 3}}])

    run, result = imported(tmp_path, *files)

    assert (result.ranks, result.num_spans) == (2, 2)
    assert run.ranks[0].metadata.versions["inspector format"] == "v4.3"
    assert "84 records were overwritten before they were written (dump_stats)." in result.notes


def test_a_torn_last_line_is_left_out_and_reported(tmp_path: Path) -> None:
    run, result = imported(tmp_path, [line(0, 0), line(0, 1), json.dumps(line(0, 2))[:150]])

    assert len(run.ranks[0].spans) == 2
    (note,) = [note for note in result.notes if "damaged" in note]
    assert note.startswith("host-pid0.log: 1 damaged line left out; line 3: ")
    assert run.problems[-1] != ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no json", "line 1: JSON is malformed"),
        ("[" * 100_000, "line 1: "),
        ('{"header": {"id": 7}}', "line 1: Expected `str`, got `int`"),
        ('{"coll_perf": {"coll": "AllReduce"}}', "line 1: Object missing required field `coll_sn`"),
        ("{}", "line 1: it has neither coll_perf nor p2p_perf"),
        (json.dumps({"coll_perf": line(0, 0)["coll_perf"]}), "line 1: it has no header"),
        (json.dumps(line(2, 0)), "line 1: rank 2 of 2 is none"),
        (json.dumps(line(0, 0, operation="Send", peer=5)), "line 1: peer 5 of 2 ranks is none"),
        (json.dumps(line(0, 2**63)), "line 1: Expected `int` <= "),
        (json.dumps(line(0, 0, took=-1)), "line 1: Expected"),
        (json.dumps(line(0, 0)).replace('"coll_exec_time_us": 100', '"coll_exec_time_us": "nan"'), "line 1: Expected"),
        ("", "it holds no operation"),
    ],
)
def test_a_file_without_a_readable_line_is_an_error_with_the_first_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = write(tmp_path / "host-pid1.log", *([text] if text else []))

    with pytest.raises(ImportFileError, match="is no output of NCCL Inspector or RCCL Inspector") as raised:
        import_inspector([path], tmp_path / "run")
    assert reason in str(raised.value)
    assert not (tmp_path / "run" / "rank-00000").exists()


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "host-pid1.log", '{"header": "' + "x" * 5_000_000 + '"}', line(0, 0))

    result = import_inspector([path], tmp_path / "run")

    assert result.num_spans == 1
    assert any("host-pid1.log: 1 damaged line left out; line 1: " in note for note in result.notes)


def test_lines_of_two_jobs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="has 4 ranks, but 2 in other lines"):
        imported(tmp_path, [line(0, 0)], [line(1, 0, size=4)])
    with pytest.raises(ImportFileError, match="is process 8 on alpha, and in other lines 7 on alpha"):
        imported(tmp_path, [line(0, 0, pid=7)], [line(0, 0, pid=8)])


def test_a_folder_is_read_with_what_else_lies_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "nccl-inspector-4711"
    (folder / "deep").mkdir(parents=True)
    write(folder / "a-pid1.log", line(0, 0))
    (folder / "deep" / "b-pid2.jsonl.gz").write_bytes(gzip.compress(json.dumps(line(1, 0)).encode()))
    write(folder / "job.log", "epoch 1", "epoch 2")
    (folder / "metrics.prom").write_text("nccl_bus_bandwidth_gbs 1")

    result = import_inspector([folder], tmp_path / "run")

    assert (result.ranks, result.num_spans) == (2, 2)
    assert result.notes[-1] == "1 files hold no line of the plugin, such as job.log."


def test_a_gzip_file_that_breaks_off_keeps_its_lines(tmp_path: Path) -> None:
    packed = gzip.compress("".join(json.dumps(line(0, number)) + "\n" for number in range(50)).encode())
    (tmp_path / "a-pid1.log.gz").write_bytes(packed[:-20])

    result = import_inspector([tmp_path / "a-pid1.log.gz"], tmp_path / "run")

    assert 0 < result.num_spans <= 50
    assert any("the gzip stream breaks off after line" in note for note in result.notes)


def test_rotated_files_are_read_and_copies_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    write(folder / "host-pid100.log", *(line(0, number, stop=number * 1_000) for number in range(4, 6)))
    write(folder / "host-pid100.log.1", *(line(0, number, stop=number * 1_000) for number in range(2, 4)))
    older = "".join(json.dumps(line(0, number, stop=number * 1_000)) + "\n" for number in range(2))
    (folder / "host-pid100.log.2.gz").write_bytes(gzip.compress(older.encode()))
    write(folder / "host-pid101.log", *(line(1, number, stop=number * 1_000) for number in range(6)))
    (folder / "host-pid101.log.gz").write_bytes(gzip.compress((folder / "host-pid101.log").read_bytes()[:-40]))

    result = import_inspector([folder], tmp_path / "run")

    assert result.num_spans == 12
    assert result.notes[2:] == ("host-pid101.log.gz: left out, it begins as host-pid101.log does.",)
    run = load_run(tmp_path / "run")
    assert [trace.spans.seq.tolist() for trace in run.ranks.values()] == [[*range(6)]] * 2


def test_operations_of_one_number_in_two_files_of_a_process_are_two(tmp_path: Path) -> None:
    """A captured graph repeats its numbers."""
    run, result = imported(tmp_path, [line(0, 7, stop=1_000)], [line(0, 7, stop=2_000)])
    assert result.num_spans == 2
    assert run.ranks[0].spans.end.tolist() == [(EPOCH_US + stop) * 1_000 for stop in (1_000, 2_000)]


def test_doctor_notes_the_limits_of_the_plugin_and_finds_the_gaps_of_the_files(tmp_path: Path) -> None:
    whole, gaps = tmp_path / "whole", tmp_path / "gaps"
    whole.mkdir()
    gaps.mkdir()
    imported(whole, *([line(rank, number, stop=number * 1_000) for number in range(3)] for rank in (0, 1)))
    imported(gaps, *([line(rank, number, stop=number * 1_000) for number in (0, 2)] for rank in (0, 1)))

    healthy = CliRunner().invoke(app, ["doctor", str(whole / "run")])
    assert healthy.exit_code == 0, healthy.output
    assert HEALTHY in healthy.stdout
    assert "note: NCCL Inspector records NCCL's kernels alone, neither compute nor steps" in healthy.stdout

    found = CliRunner().invoke(app, ["doctor", str(gaps / "run")])
    assert found.exit_code == 1
    assert "! rank 0: 1 collectives, by the numbers of the others, are in no file" in found.stdout


def test_an_empty_folder_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportFileError, match=r"holds no \.log or \.jsonl.* NCCL_INSPECTOR_PROM_DUMP=1"):
        import_inspector([tmp_path / "empty"], tmp_path / "run")
    with pytest.raises(ImportFileError, match="cannot be read: No such file or directory"):
        import_inspector([tmp_path / "gone.log"], tmp_path / "run")


def test_words_of_a_file_cannot_move_the_cursor(tmp_path: Path) -> None:
    path = write(tmp_path / "host-pid1.log", line(0, 0, operation="All\x1b[2J", name="tp\x1b[2J", host="al\x1b[2Jpha"))
    command = ["import", "inspector", str(path), "-o", str(tmp_path / "run")]

    printed = CliRunner().invoke(app, command)

    assert printed.exit_code == 0, printed.output
    for result in (printed, CliRunner().invoke(app, ["bandwidth", str(tmp_path / "run")])):
        assert "\x1b" not in result.stdout + result.stderr


def test_the_command_says_what_cannot_be_concluded(tmp_path: Path) -> None:
    path = write(tmp_path / "host-pid1.log", line(0, 0), line(0, 1))

    result = CliRunner().invoke(app, ["import", "inspector", str(path), "-o", str(tmp_path / "run")])

    assert result.stdout == f"{tmp_path / 'run'}: 1 rank, 2 spans. Next: commtrace summary {tmp_path / 'run'}\n"
    assert result.stderr.splitlines()[0] == (
        "Note: NCCL Inspector records NCCL's kernels alone, neither compute nor steps: exposed communication, bubbles "
        "and stragglers cannot be found."
    )


@pytest.mark.parametrize("name", ["host-pid1.log", "host-pid1.log.gz"])
@pytest.mark.parametrize("content", [b"\n", b"\0"])
def test_a_file_of_nothing_is_not_read_to_its_end(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    text = json.dumps(line(1, 0)).encode() + b"\n" + content * (16 << 20)
    path.write_bytes(gzip.compress(text, compresslevel=1) if name.endswith("gz") else text)

    with pytest.raises(ImportFileError, match="empty for the most part"):
        import_inspector([path], tmp_path / "run")
