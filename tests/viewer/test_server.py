"""The server of ``commtrace view``, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import summarise
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import open_run
from commtrace.viewer import server as server_module
from commtrace.viewer.data import step_resources
from commtrace.viewer.run_view import RunView
from commtrace.viewer.server import RunServer
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run
from tests.waiting import until

TOKEN = "a-token"
LIMIT_S = 60.0


@dataclass
class Client:
    server: RunServer

    def ask(self, path: str, *, token: str = TOKEN, method: str = "GET") -> tuple[int, bytes]:
        address = f"http://127.0.0.1:{self.server.port}/{path}"
        request = Request(address, headers={"Authorization": f"Bearer {token}"}, method=method)
        try:
            with urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()

    def ready(self, path: str) -> bytes:
        """Return a resource when it is no longer pending."""
        status, answer = self.answer(path)
        assert status == 200, answer
        return answer

    def answer(self, path: str) -> tuple[int, bytes]:
        """Return what is answered when the resource is no longer pending."""

        def settled() -> tuple[int, bytes] | None:
            status, answer = self.ask(path)
            return None if status == 202 else (status, answer)

        answered = until(settled, LIMIT_S)
        assert answered is not None
        return answered

    def json(self, path: str) -> Any:
        return json.loads(self.ready(path))


def trace_of(timeline: Timeline, step: int) -> bytes:
    return f"trace of step {timeline.step(step)['step']}".encode()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path], Client]]:
    servers = []

    def start(*runs: Path) -> Client:
        paths = {run.name: run for run in runs}
        server = RunServer(lambda: paths, partial(RunView, trace_of=trace_of), lambda: {"runs": sorted(paths)}, TOKEN)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        servers.append((server, thread))
        return Client(server)

    yield start
    for server, thread in servers:
        server.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = PipelineJob(stages=2, microbatches=4, data_parallel=2, transfer_ns=1_000, steps=14)
    return write_run(tmp_path_factory.mktemp("runs") / "run", job.run())


def test_nothing_is_answered_without_the_token(serve: Callable[[Path], Client], recorded: Path) -> None:
    client = serve(recorded)

    for path in ("", "data/runs.json", "run/run/", "run/run/data/run.json", "run/run/state"):
        assert client.ask(path, token="another")[0] == 403
    assert client.ask("run/run/read", token="", method="POST")[0] == 403
    assert client.ask(f"run/run/?token={TOKEN}", token="")[0] == 200


def test_the_server_listens_on_this_machine_only(serve: Callable[[Path], Client], recorded: Path) -> None:
    assert serve(recorded).server.address("run").startswith("http://127.0.0.1:")


def test_the_resources_are_those_of_the_analysis(serve: Callable[[Path], Client], recorded: Path) -> None:
    client = serve(recorded)

    run = client.json("run/run/data/run.json")
    summary = client.json("run/run/data/summary.json")

    assert summary == json.loads(json.dumps(summarise(recorded).to_json()))
    assert run["can_show"] == list(range(1, 14))
    assert len(run["steps"]) == 10
    shown = run["first_shown"]
    described = client.json(f"run/run/data/step/{shown}.json")
    assert described["duration_ns"] == next(one["duration_ns"] for one in run["steps"] if one["step"] == shown)
    assert len(client.json(f"run/run/data/{described['outline']}")["ranks"]) == 4
    expected = step_resources(Timeline.of_analysis(analyse(recorded)), shown, described["outline"])
    for table in ("ranks", "work", "stalls", "communication"):
        assert client.ready(f"run/run/data/step/{shown}/{table}") == expected[f"step/{shown}/{table}"]


def test_a_step_can_be_had_for_the_perfetto_ui(serve: Callable[[Path], Client], recorded: Path) -> None:
    client = serve(recorded)

    assert client.ready("run/run/data/step/2/perfetto") == b"trace of step 2"
    assert client.ask("run/run/data/step/99/perfetto")[0] == 204


def test_boxes_are_those_of_the_ranks_that_are_asked_for(serve: Callable[[Path], Client], recorded: Path) -> None:
    client = serve(recorded)
    client.ready("run/run/data/run.json")

    table = pa.ipc.open_stream(client.ready("run/run/data/step/3/work?ranks=0,2-3")).read_all()

    assert set(table["rank"].to_pylist()) == {0, 2, 3}
    assert client.ask("run/run/data/step/3/work?ranks=all") == (
        422,
        b"ranks=all: write numbers and ranges, like 0-3,8",
    )


def test_a_large_run_is_served_step_by_step(
    serve: Callable[[Path], Client], recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = serve(recorded)
    steps = [whole.ready(f"run/run/data/step/{step}/{table}") for step in (2, 9) for table in ("ranks", "work")]
    monkeypatch.setattr(
        "commtrace.viewer.run_view.open_run",
        lambda path, steps, workers: open_run(path, steps, workers, most_bytes=0, most_rows=50),
    )
    monkeypatch.setattr("commtrace.viewer.run_view.MOST_ROWS", 0)

    windows = serve(recorded)

    of_windows = [windows.ready(f"run/run/data/step/{step}/{table}") for step in (2, 9) for table in ("ranks", "work")]
    assert of_windows == steps
    assert windows.json("run/run/data/summary.json") == whole.json("run/run/data/summary.json")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("x", 404),
        ("run/other/", 404),
        ("run/other/data/run.json", 404),
        ("run/other/state", 404),
        ("run/../data/runs.json", 404),
        ("run/run/data/step/99.json", 204),
        ("run/run/data/step/2/nothing", 204),
        ("run/run/data/step/two.json", 204),
        ("run/run/data/nothing", 204),
    ],
)
def test_what_is_not_there(serve: Callable[[Path], Client], recorded: Path, path: str, status: int) -> None:
    client = serve(recorded)
    client.ready("run/run/data/summary.json")
    client.ready("run/run/data/steps")

    assert client.ask(path)[0] == status


def test_a_run_that_cannot_be_read_is_a_sentence(serve: Callable[[Path], Client], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "rank-00000").mkdir(parents=True)
    (broken / "rank-00000" / "spans-0000.arrows").write_bytes(b"no trace at all")
    client = serve(broken)

    status, answer = client.answer("run/broken/data/run.json")

    assert status == 422
    assert "broken" in answer.decode()


def test_a_run_that_has_grown_is_read_again(serve: Callable[[Path], Client], recorded: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    shutil.copytree(recorded, growing)
    client = serve(growing)
    assert client.json("run/growing/data/run.json")["can_show"][-1] == 13
    assert client.json("run/growing/state") == {"has_grown": False}

    shutil.rmtree(growing)
    write_run(growing, PipelineJob(stages=2, microbatches=4, data_parallel=2, transfer_ns=1_000, steps=20).run())

    assert client.json("run/growing/state") == {"has_grown": True}
    assert client.ask("run/growing/read", method="POST")[0] == 200
    assert client.json("run/growing/data/run.json")["can_show"][-1] == 19
    assert client.json("run/growing/state") == {"has_grown": False}


def test_the_address_of_a_run_with_any_name(serve: Callable[[Path], Client], recorded: Path, tmp_path: Path) -> None:
    named = tmp_path / "lr=0.1 #2?"
    shutil.copytree(recorded, named)
    server = serve(named).server

    with urlopen(server.address(named.name), timeout=LIMIT_S) as answer:
        assert b"lr=0.1 #2?" in answer.read()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    return answer


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://[ HTTP/1.1", b"400"),
        (b"GET //[/ HTTP/1.1", b"403"),
        (b"GET /?token=" + b"%ff" * 10 + b" HTTP/1.1", b"403"),
        (b"GET /?token=\xed\xa0\x80 HTTP/1.1", b"400"),
        (b"BREW / HTTP/1.1", b"501"),
        (b"GET /?" + b"a=1&" * 2_000 + b" HTTP/1.1", b"400"),
        (b"POST http://[ HTTP/1.1", b"400"),
        (b"HEAD http://[ HTTP/1.1", b"400"),
        (b"HEAD / HTTP/1.1", b"403"),
        (b"GET / HTTP/9.9.9", b"Bad request"),
        (b"\x00\xff", b"Bad request"),
        (b"GET", b"Bad request"),
    ],
)
def test_any_request_has_an_answer_and_none_a_traceback(
    serve: Callable[..., Client], capfd: pytest.CaptureFixture[str], line: bytes, status: bytes
) -> None:
    answer = raw(serve().server.port, line + b"\r\n\r\n")

    assert status in answer
    assert b"text/plain" in answer or b"HTTP/1.1" not in answer, "one page for all errors"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "are_read"),
    [
        ("-5", False),
        ("5-", True),
        ("-", False),
        ("a", False),
        ("1,,2", False),
        ("²", False),
        ("9" * 5_000, False),
        ("0-999999999", True),
    ],
)
def test_ranks_of_an_address_are_checked(
    serve: Callable[..., Client], capfd: pytest.CaptureFixture[str], tmp_path: Path, ranks: str, are_read: bool
) -> None:
    client = serve(write_run(tmp_path / "run", PipelineJob(stages=1, microbatches=1).run()))

    status, _ = client.ask(f"run/run/data/overview.json?ranks={quote(ranks)}")

    assert status in ((200, 202) if are_read else (422,))
    assert "Traceback" not in capfd.readouterr().err


def test_the_head_of_a_page_is_that_of_its_answer(serve: Callable[..., Client]) -> None:
    status, content = serve().ask("", method="HEAD")

    assert (status, content) == (200, b"")


def test_the_number_of_connections_is_limited(serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 3)
    client = serve()
    begin = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", client.server.port), LIMIT_S))
            connection.sendall(b"GET / HTTP/1.1\r\n")
        until(lambda: threading.active_count() >= begin + 3, LIMIT_S)
        assert threading.active_count() == begin + 3
        with pytest.raises((OSError, HTTPException)):
            client.ask("")
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError):
            assert client.ask("")[0] == 200
            break
        assert time.monotonic() < deadline


def test_a_silent_connection_is_closed(serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", serve().server.port), LIMIT_S) as connection:
        assert connection.recv(10) == b""
