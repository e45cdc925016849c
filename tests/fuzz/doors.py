"""What commtrace reads from outside: for each door an intact input, ways to damage it, and the commands that read it.

A further door is a further entry of ``DOORS``: ``make`` writes what is intact into a folder, once; ``damage`` changes a
copy of that folder; ``uses`` are what is then called, one of them for each input.
"""

from __future__ import annotations

import json
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import commtrace
from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.messages import (
    MOST_BYTES,
    MessageError,
    PeerBaseline,
    Reply,
    decoded_reply,
    decoded_request,
    encoded,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.synth.job import Job
from commtrace.synth.synthesis import synthesize, write
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.schema import mark_row
from commtrace.trace.selection import make_request, read_requests, write_request
from commtrace.viewer.run_view import RunView
from commtrace.viewer.server import RunServer
from tests.exporters.monitor.conftest import JOB
from tests.exporters.monitor.made_reports import report, stopped
from tests.fuzz.mutators import (
    HOSTILE_NUMBERS,
    HOSTILE_VALUES,
    HOSTILE_WORDS,
    damage_bytes,
    damage_directory,
    damage_json,
    damage_segment,
    damage_value,
)
from tests.interchange.dumps.flight_recorder_files import entry, gloo_hang, write_dump
from tests.interchange.simulators.aicb_files import AICB_LINES
from tests.interchange.simulators.aicb_files import write as write_aicb_log
from tests.interchange.traces import ascend_files, kineto_files
from tests.interchange.whatif_study.whatif_files import COLUMNS, two_stages, write_trace
from tests.interchange.worker_logs import job, write_log
from tests.live.findings import hang_finding, not_judged, slow_finding, status
from tests.trace.rows import mark, row, steps, write_rank

Command = list[str]
Call = Callable[[], object]


class Door(NamedTuple):
    """See the module.

    Attributes:
        uses: of the damaged folder: words of a command, or a call that may raise ValueError or OSError, and no more.
        keeps_word: whether numbers that differ from those of the intact input must come with a problem, after this
            damage; asked of the last use of ``uses`` that prints JSON.
    """

    name: str
    make: Callable[[Path], None]
    damage: Callable[[Path, Random], bool]
    uses: Callable[[Path], Sequence[Command | Call]]


def _make_run(folder: Path) -> None:
    """Four ranks: a complete segment each, and one that still grows and has every kind of mark."""
    write(synthesize(Job(pp=2, dp=2, microbatches=2, steps=4, layers=2)), folder / "run")
    run = load_run(folder / "run")
    for trace in run.ranks.values():
        group = next(iter(trace.groups))
        last = trace.last_written_ns or 0
        writer = SegmentWriter(folder / "run", trace.metadata)
        in_flight = {"operation": "all_reduce", "group": group, "seq": 9, "peer": -1, "bytes": 8, "start": last}
        activity = {
            "at": [4, 0, 0, 1], "open": [{"kind": "forward", "name": "forward", "since": last}],
            "collectives": {str(group): 4}, "p2p": [[group, True, 0, 0, 3]], "frames": ["train.py:3 step"],
            "no_progress_ns": 3_000_000_000, "again_within_ns": 4_000_000_000,
        }  # fmt: skip
        writer.write([
            *(mark_row("process_group", one.to_json(), at_ns=last)
              for one in trace.groups.values()),
            mark_row("topology", {"recording": {"sample": 2}, "invisible_paths": {"pybind": "loaded"}}, at_ns=last),
            mark_row("dropped", {"collective": 3}, at_ns=last),
            mark_row("clock_anchor", {"monotonic_ns": last, "realtime_ns": last + 1, "bracket_ns": 9}, at_ns=last),
            mark_row("aggregate", [["forward", "forward", -1, -1, 3, 3000, 0, 1500]], step=4, at_ns=last),
            mark_row("trigger", {"id": "1-x", "first": 2, "end": 4, "modules": "", "by": "x", "seen_at_step": 1,
                                 "late": False}, at_ns=last),
            mark_row("problem", {"message": "a part was disabled"}, at_ns=last),
        ])  # fmt: skip
        writer.write([mark_row("in_flight", [in_flight], at_ns=last), mark_row("activity", activity, at_ns=last)])
        writer.write([mark_row("progress", {"step": 4}, at_ns=last)])
    told = fields_to_json(status(slow_finding(1), hang_finding(), not_judged("E.")))
    (folder / "run" / "monitor.json").write_text(json.dumps(told))
    write_request(folder / "run", make_request("synthetic", 0, 5, 3, by="somebody"))


def _make_complete_run(folder: Path) -> None:
    write(synthesize(Job(pp=2, dp=2, microbatches=2, steps=4, layers=2)), folder / "run")


def _make_short_segments(folder: Path) -> None:
    """Two ranks of three complete segments each."""
    for rank in (0, 1):
        spans = [row(step=step, start=100 * step + 5, end=100 * step + 60 + step, id=step) for step in range(6)]
        rows = sorted([*steps(0, 6), *spans], key=lambda one: one.step)
        write_rank(folder / "run", [*rows, mark("end", {})], rank=rank, world_size=2, steps_per_segment=2)


def _make_two_runs(folder: Path) -> None:
    _make_run(folder)
    write(synthesize(Job(pp=2, dp=2, microbatches=2, steps=4, layers=2, seed=1)), folder / "other")


def _segments(folder: Path) -> list[Path]:
    return sorted((folder / "run").rglob("*.arrows"))


def _flip_in_run(folder: Path, random: Random) -> bool:
    path = random.choice(_segments(folder))
    path.write_bytes(damage_bytes(path.read_bytes(), random))
    return True


def _exchange_in_run(folder: Path, random: Random) -> bool:
    damage_directory(folder / "run", random)
    return False


def _exchange_and_tell(folder: Path, random: Random) -> bool:
    damage_directory(folder / "run", random)
    return True


def _rewrite_in_run(folder: Path, random: Random) -> bool:
    for path in random.sample(_segments(folder), random.choice((1, 1, 2))):
        damage_segment(path, random)
    return False


def _damage_beside_run(folder: Path, random: Random) -> bool:
    path = random.choice([folder / "run" / "monitor.json", *(folder / "run" / "triggers").iterdir()])
    if random.random() < 0.7:
        path.write_text(damage_json(path.read_text(), random), encoding="utf-8", errors="replace")
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), random))
    return False


def _uses_of_run(folder: Path) -> Sequence[Command | Call]:
    run = str(folder / "run")
    return [
        ["summary", run], ["summary", run, "--json", "--steps", "1:3"], ["report", run, "-o", str(folder / "r.html")],
        ["straggler", run], ["straggler", run, "--json"], ["pipeline", run], ["pipeline", run, "--json"],
        ["bandwidth", run], ["bandwidth", run, "--json"], ["doctor", run], ["doctor", run, "--json"],
        ["compare", str(folder / "other"), run], ["export", run, "-o", str(folder / "t.json")], ["top", run, "--once"],
        ["top", run, "--json"], partial(read_requests, folder / "run"), partial(_read_in_python, folder / "run"),
        ["sql", run, "SELECT * FROM steps"], ["sql", run, "SELECT * FROM files", "--format", "csv"],
        ["summary", run, "--json"],
    ]  # fmt: skip


def _read_in_python(folder: Path) -> None:
    run = commtrace.open(folder)
    for table in (run.spans(), run.steps(), run.partition(), run.ranks(), run.communication("group")):
        table.validate(full=True)
    run.pipeline()
    run.findings()


def _only_summary(folder: Path) -> Sequence[Command | Call]:
    return [["summary", str(folder / "run"), "--json"]]


def _only_top(folder: Path) -> Sequence[Command | Call]:
    run = str(folder / "run")
    return [["top", run, "--once"], ["top", run, "--json"], partial(read_requests, folder / "run")]


def _make_kineto(folder: Path) -> None:
    for rank in (0, 1):
        events = [
            kineto_files.annotation("ProfilerStep#3", 1.0, 50.0),
            kineto_files.kernel(2, 10),
            kineto_files.copy(13, 4),
            *(kineto_files.nccl(20 + 5 * n, 4, seq=n, group="1", ranks=[0, 1], dtype="Float", collective="allreduce",
                                sent=64, received=64) for n in range(3)),
            kineto_files.kernel(40, 5),
        ]  # fmt: skip
        suffix = ".json.gz" if rank else ".json"
        kineto_files.write_trace(folder / f"rank-{rank}{suffix}", events, rank=rank, world_size=2)


def _damage_kineto(folder: Path, random: Random) -> bool:
    path = folder / "rank-0.json"
    if random.random() < 0.6:
        path.write_text(damage_json(path.read_text(), random), encoding="utf-8", errors="replace")
    else:
        path = random.choice([path, folder / "rank-1.json.gz"])
        path.write_bytes(damage_bytes(path.read_bytes(), random))
    return False


def _make_ascend(folder: Path) -> None:
    ascend_files.two_ranks(folder, metadata=True)


def _damage_ascend(folder: Path, random: Random) -> bool:
    path = random.choice(sorted(folder.rglob("*.json")))
    if random.random() < 0.7:
        path.write_text(damage_json(path.read_text(), random), encoding="utf-8", errors="replace")
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), random))
    return False


def _uses_of_ascend(folder: Path) -> Sequence[Command | Call]:
    files = [str(path) for path in sorted(folder.rglob("trace_view.json"))]
    command = ["import", "kineto", *files, "-o", str(folder / "imported")]
    return [command, [*command, "--step-source", "profiler"]]


def _uses_of_kineto(folder: Path) -> Sequence[Command | Call]:
    files = [str(folder / "rank-0.json"), str(folder / "rank-1.json.gz")]
    command = ["import", "kineto", *files, "-o", str(folder / "imported")]
    return [command, [*command, "--step-source", "profiler"]]


def _make_flight_records(folder: Path) -> None:
    for rank in (1, 3):
        write_dump(folder / f"dump_{rank}", entry(0, 100), entry(1, 300, state="started"),
                   entry(2, 400, name=f"nccl:send {rank // 2}->1", is_p2p=True))  # fmt: skip


def _damage_flight_records(folder: Path, random: Random) -> bool:
    path = folder / "dump_1"
    what = random.random()
    if what < 0.4:
        path.write_bytes(damage_bytes(path.read_bytes(), random))
        return False
    dump = pickle.loads(path.read_bytes())
    for _ in range(random.choice((1, 1, 4))):
        dump = damage_value(dump, random)
    if what < 0.7:
        path.write_bytes(pickle.dumps(dump))
    else:
        path.write_text(json.dumps(dump))
    return False


def _uses_of_flight_records(folder: Path) -> Sequence[Command | Call]:
    files = [str(folder / "dump_1"), str(folder / "dump_3")]
    return [
        ["import", "flight-recorder", *files, "-o", str(folder / "imported")],
        ["import", "flight-recorder", *files, "-o", str(folder / "imported")],
        ["doctor", str(folder / "run"), "--flight-recorder", files[0], "--flight-recorder", files[1]],
    ]


def _make_gloo_dumps(folder: Path) -> None:
    for path in gloo_hang(folder):
        path.rename(folder / f"dump_{path.name[-1]}")


def _damage_gloo_dumps(folder: Path, random: Random) -> bool:
    path = folder / "dump_1"
    path.write_text(damage_json(path.read_text(), random), encoding="utf-8", errors="replace")
    return False


def _uses_of_gloo_dumps(folder: Path) -> Sequence[Command | Call]:
    files = [str(folder / f"dump_{rank}") for rank in range(3)]
    return [["import", "flight-recorder", *files, "-o", str(folder / "imported")]]


_PLAN: Final = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128, "experts": 2},
    "layout": {"tp": 2, "sequence_parallel": True, "pp": 2, "dp": 2, "ep": 2, "microbatches": 4},
    "deepspeed": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
}


def _make_plan(folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(_PLAN))


def _damage_plan(folder: Path, random: Random) -> bool:
    path = folder / "job.json"
    content = json.loads(path.read_text())
    if random.random() < 0.5:
        del content["deepspeed"]
    text = json.dumps(content)
    if random.random() < 0.5:
        part = random.choice(("model", "layout"))
        content[part][random.choice([*content[part]])] = random.choice(HOSTILE_VALUES)
        text = json.dumps(content)
    else:
        text = damage_json(text, random)
    path.write_text(text, encoding="utf-8", errors="replace")
    if random.random() < 0.3:
        path.rename(folder / "job.yaml")
    return False


def _uses_of_plan(folder: Path) -> Sequence[Command | Call]:
    job = next(str(path) for path in folder.iterdir())
    return [["plan", job], ["plan", job, "--memory", "80"], ["plan", job, "--json"]]


def _make_served_run(folder: Path) -> None:
    _make_complete_run(folder)
    (folder / "request").write_bytes(b"GET /run/run/data/overview.json?ranks=0-1&token=t HTTP/1.1\r\nHost: x\r\n\r\n")


def _damage_request(folder: Path, random: Random) -> bool:
    path = folder / "request"
    content = path.read_bytes()
    if random.random() < 0.7:
        resource = random.choice(("overview", "step/1/timeline", "step/999999999999999999999/x", "", "modules", "../x"))
        value = random.choice([*HOSTILE_WORDS, *map(str, HOSTILE_NUMBERS), "0-", "-5", "1,,2", "9" * 5_000])
        name = random.choice(("ranks", "token", "x", "rank", "factor"))
        address = f"/run/run/{random.choice(('data/', 'state', 'whatif', ''))}{resource}?token=t&{name}={value}"
        method = random.choice(("GET", "POST", "HEAD", "PUT", "\x00"))
        content = f"{method} {address} HTTP/1.1\r\nHost: x\r\n\r\n".encode("utf-8", "replace")
    path.write_bytes(content if random.random() < 0.5 else damage_bytes(content, random))
    return False


def _uses_of_request(folder: Path) -> Sequence[Command | Call]:
    return [partial(_ask_server, folder)]


def _ask_server(folder: Path) -> None:
    """Send a request to the server of the page; it prints nothing of it."""
    server = RunServer(lambda: {"run": folder / "run"}, _view, lambda: {"runs": []}, "t")
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    printed = StringIO()
    try:
        with redirect_stderr(printed), socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.sendall((folder / "request").read_bytes())
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while connection.recv(65_536):
                    pass
    finally:
        server.close()
        thread.join()
    assert "Traceback" not in printed.getvalue(), printed.getvalue()


def _view(path: Path) -> RunView:
    return RunView(path, trace_of=lambda timeline, step: b"")


def _make_flight_records_and_run(folder: Path) -> None:
    _make_complete_run(folder)
    _make_flight_records(folder)


def _make_whatif(folder: Path) -> None:
    write_trace(folder / "trace.parquet", [*two_stages(7), *two_stages(8)])
    (folder / "meta.yaml").write_text("pp_size: 2\ndp_size: 1\n")


def _damage_whatif(folder: Path, random: Random) -> bool:
    path = folder / "trace.parquet"
    what = random.random()
    if what < 0.1:
        (folder / "meta.yaml").write_bytes(damage_bytes((folder / "meta.yaml").read_bytes(), random))
    elif what < 0.5:
        path.write_bytes(damage_bytes(path.read_bytes(), random))
    else:
        rows = [*two_stages(7), *two_stages(8)]
        column = random.choice(COLUMNS)
        fitting = [one for one in HOSTILE_VALUES if _fits(one, column)]
        if what > 0.85:
            fitting = [row[random.choice(_NUMBERS)] for row in rows]
            column = random.choice(_NUMBERS)
        for row in random.sample(rows, random.choice((1, 3, len(rows)))):
            row[column] = random.choice(fitting)
        if random.random() < 0.1:
            rows = [{**row, column: str(row[column])} for row in rows]
        try:
            columns = {name: [row[name] for row in rows] for name in COLUMNS}
            pq.write_table(pa.table(columns), path)
        except (pa.ArrowException, OverflowError, UnicodeError):
            path.write_bytes(damage_bytes(path.read_bytes(), random))
    return False


_NUMBERS: Final = [name for name in COLUMNS if name != "optype"]


def _fits(value: object, column: str) -> bool:
    if column == "optype":
        return value is None or isinstance(value, str)
    return value is None or (isinstance(value, (int, float)) and abs(value) < 2**63)


def _uses_of_whatif(folder: Path) -> Sequence[Command | Call]:
    command = ["import", "whatif", str(folder / "trace.parquet"), "-o", str(folder / "imported")]
    return [command, [*command, "--meta", str(folder / "meta.yaml")]]


def _make_workerlog(folder: Path) -> None:
    write_log(folder / "workerlog.0", job("lr", 0, 0, 1), job("forward", 0, 1, 10), job("backward", 0, 33, 40),
              job("lr", 0, 41, 42), job("forward", 0, 42, 50))  # fmt: skip
    write_log(folder / "workerlog.1", job("lr", 0, 0, 1), job("forward", 0, 11, 20), job("backward", 0, 20, 32))


def _damage_workerlog(folder: Path, random: Random) -> bool:
    path = random.choice([folder / "workerlog.0", folder / "workerlog.1"])
    text = path.read_text()
    if random.random() < 0.5:
        path.write_bytes(damage_bytes(text.encode(), random))
    else:
        words = text.split(" ")
        for _ in range(random.choice((1, 3))):
            value = random.choice([*HOSTILE_VALUES, "1e999999999", "NaN", "9" * 5_000])
            words[random.randrange(len(words))] = f"{value}"
        path.write_text(" ".join(words), encoding="utf-8", errors="replace")
    return False


def _make_aicb_log(folder: Path) -> None:
    write_aicb_log(folder / "log.csv", *AICB_LINES)


def _damage_aicb_log(folder: Path, random: Random) -> bool:
    path = folder / "log.csv"
    text = path.read_text()
    if random.random() < 0.5:
        path.write_bytes(damage_bytes(text.encode(), random))
    else:
        fields = text.split(",")
        for _ in range(random.choice((1, 3))):
            value = random.choice([*HOSTILE_VALUES, "1e999999999", "NaN", "9" * 5_000])
            fields[random.randrange(12, len(fields))] = f"{value}"
        path.write_text(",".join(fields), encoding="utf-8", errors="replace")
    return False


def _uses_of_aicb_log(folder: Path) -> Sequence[Command | Call]:
    return [["import", "aicb-csv", str(folder / "log.csv"), "-o", str(folder / "imported")]]


def _uses_of_workerlog(folder: Path) -> Sequence[Command | Call]:
    return [["import", "workerlog", str(folder), "-o", str(folder / "imported")]]


_METRICS: Final = """# TYPE commtrace_step_duration_seconds histogram
commtrace_step_duration_seconds_bucket{rank="0",le="1.0"} 4
commtrace_step_duration_seconds_bucket{rank="0",le="+Inf"} 4
commtrace_step_duration_seconds_count{rank="0",node="a",run_id="r",pp="0"} 4
commtrace_step_duration_seconds_sum{rank="0",node="a",run_id="r",pp="0"} 2.0
# TYPE commtrace_compute_seconds counter
commtrace_compute_seconds_total{rank="0",phase="forward"} 1.0
commtrace_exposed_seconds_total{rank="0",role="dp",operation="all_reduce"} 0.5
commtrace_last_step{rank="0"} 3
commtrace_last_step_timestamp_seconds{rank="0",run_id="r"} 1.7e9
"""
_ANSWER: Final = {"status": "success", "data": {"resultType": "vector", "result": [
    {"metric": {"__name__": "commtrace_last_step", "rank": "0", "run_id": "r", "node": "a"}, "value": [1.7e9, "3"]},
    {"metric": {"rank": "1", "run_id": "r", "role": "dp", "part": "wait"}, "value": [1.7e9, "2.5"]},
]}}  # fmt: skip


def _make_answers(folder: Path) -> None:
    (folder / "metrics").write_text(_METRICS)
    (folder / "query").write_text(json.dumps(_ANSWER))


def _damage_answers(folder: Path, random: Random) -> bool:
    path, other = folder / "query", folder / "metrics"
    path.write_text(damage_json(path.read_text(), random), encoding="utf-8", errors="replace")
    other.write_bytes(damage_bytes(other.read_bytes(), random))
    if random.random() < 0.5:
        words = other.read_text(errors="replace").replace('"', ' " ').split(" ")
        words[random.randrange(len(words))] = f"{random.choice(HOSTILE_VALUES)}"
        other.write_text("".join(words), encoding="utf-8", errors="replace")
    return False


def _uses_of_answers(folder: Path) -> Sequence[Command | Call]:
    server = _server(folder)
    return [["top", f"{server}/metrics", "--once"], ["top", server, "--once"], ["top", server, "--json"]]


def _server(folder: Path) -> str:
    """The address of a server of this process that answers what lies in the folder."""
    if _Answers.running is None:
        _Answers.running = HTTPServer(("127.0.0.1", 0), _Answers)
        threading.Thread(target=_Answers.running.serve_forever, daemon=True).start()
    _Answers.folder = folder
    return f"http://127.0.0.1:{_Answers.running.server_port}"


class _Answers(BaseHTTPRequestHandler):
    folder = Path()
    running: HTTPServer | None = None

    def do_GET(self) -> None:
        content = (self.folder / ("metrics" if self.path == "/metrics" else "query")).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _make_messages(folder: Path) -> None:
    """Requests of ranks, a reply, and what rank 0 leaves in the job's store."""
    (folder / "report").write_bytes(encoded(report(1, 7, groups=(5,))))
    (folder / "hang").write_bytes(encoded(stopped(2, (0, 1, 3))))
    (folder / "regular-hang").write_bytes(encoded(stopped(2)))
    (folder / "reply").write_bytes(encoded(Reply(baseline=PeerBaseline(64, 7, 5.5e7))))


def _damage_messages(folder: Path, random: Random) -> bool:
    for path in folder.iterdir():
        if random.random() < 0.5:
            path.write_bytes(damage_bytes(path.read_bytes(), random))
        else:
            path.write_text(damage_json(path.read_text(), random), encoding="utf-8", errors="surrogatepass")
    return False


def _uses_of_messages(folder: Path) -> Sequence[Command | Call]:
    return [partial(_take_messages, folder)]


def _take_messages(folder: Path) -> None:
    """What passes the schema is aggregated; the rest is refused."""
    store, aggregator = MonitorStore(JOB), Aggregator(JOB, [])
    for name in ("report", "hang", "regular-hang"):
        with suppress(MessageError):
            store.answer(decoded_request((folder / name).read_bytes()[:MOST_BYTES]))
    with suppress(MessageError):
        decoded_reply((folder / "reply").read_bytes()[:MOST_BYTES])
    for now in (1.0, 9.0, 17.0):
        aggregator.join(store, now)
        aggregator.look_for_hangs(store, now)
    if aggregator._hangs_failed:
        raise AssertionError("a hang report has ended the look for hangs")


DOORS: Final = (
    Door("messages of ranks and of the monitor", _make_messages, _damage_messages, _uses_of_messages),
    Door("flipped bytes of complete segments", _make_complete_run, _flip_in_run, _only_summary),
    Door("flipped bytes of segments", _make_two_runs, _flip_in_run, _uses_of_run),
    Door("segments of valid Arrow", _make_two_runs, _rewrite_in_run, _uses_of_run),
    Door("segments of valid Arrow, again", _make_two_runs, _rewrite_in_run, _uses_of_run),
    Door("files in the directory", _make_two_runs, _exchange_in_run, _uses_of_run),
    Door("files of complete segments", _make_short_segments, _exchange_and_tell, _only_summary),
    Door("monitor.json and triggers", _make_two_runs, _damage_beside_run, _only_top),
    Door("kineto", _make_kineto, _damage_kineto, _uses_of_kineto),
    Door("ascend", _make_ascend, _damage_ascend, _uses_of_ascend),
    Door("flight recorder", _make_flight_records_and_run, _damage_flight_records, _uses_of_flight_records),
    Door("dumps of gloo", _make_gloo_dumps, _damage_gloo_dumps, _uses_of_gloo_dumps),
    Door("plans", _make_plan, _damage_plan, _uses_of_plan),
    Door("requests to view", _make_served_run, _damage_request, _uses_of_request),
    Door("what-if", _make_whatif, _damage_whatif, _uses_of_whatif),
    Door("workerlog", _make_workerlog, _damage_workerlog, _uses_of_workerlog),
    Door("aicb-csv", _make_aicb_log, _damage_aicb_log, _uses_of_aicb_log),
    Door("answers of a server", _make_answers, _damage_answers, _uses_of_answers),
)

assert schema.FORMAT_VERSION == 1, "the mutators know this version"
