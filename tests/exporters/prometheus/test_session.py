"""The exporter in a recording session of this process."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import commtrace
from commtrace.config import BaselineConfig
from tests.waiting import until

SECONDS = 60.0


def started(directory: Path) -> str:
    """The address of the endpoint, once the first step is told."""
    path = directory / "prometheus" / "rank-00000.json"
    until(path.exists)
    return f"http://{json.loads(path.read_text())[0]['targets'][0]}/metrics"


def value(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def test_every_step_is_told_also_those_that_the_trace_holds_as_sums(tmp_path: Path) -> None:
    commtrace.start(commtrace.Config(dir=str(tmp_path), export="prometheus", sample=100))
    try:
        for step in range(12):
            with commtrace.step(step), commtrace.span("work"):
                commtrace.count(tokens=10)
        url = started(tmp_path)
        until(lambda: value(url, "commtrace_step_duration_seconds_count") >= 12)
        assert value(url, "commtrace_last_step") == 11
        assert value(url, "commtrace_tokens_total") == 120
        parts = [value(url, f"commtrace_{part}_seconds_total") for part in ("work", "bubble", "checkpoint")]
        assert sum(parts) == pytest.approx(value(url, "commtrace_step_duration_seconds_sum"), abs=1e-9)
    finally:
        commtrace.stop()

    assert list((tmp_path / "prometheus").iterdir()) == []
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b'{"format": "another", "made": {}, "measurements": []}', b"[" * 100_000],
    ids=["missing", "empty", "truncated", "of another version", "too deep"],
)
def test_a_baseline_that_cannot_be_used_is_one_warning_and_all_else_is_served(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, run = tmp_path / "baseline.json", tmp_path / "run"
    if content is not None:
        file.write_bytes(content)
    commtrace.start(commtrace.Config(dir=str(run), export="prometheus", baseline=BaselineConfig(file=str(file))))
    try:
        for step in range(3):
            with commtrace.step(step), commtrace.span("work"):
                pass
        url = started(run)
        until(lambda: value(url, "commtrace_last_step") >= 2)
    finally:
        commtrace.stop()

    (warning,) = [record.message for record in caplog.records if "baseline" in record.message]
    assert warning.startswith(f"commtrace: live metrics have no share of a baseline: {file}")


@contextmanager
def forked_child() -> Iterator[None]:
    """A child, as of a data loader, that is there until the end."""
    may_end, ends = os.pipe()
    is_ready, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ready, b".")
            os.read(may_end, 1)
        finally:
            os._exit(0)
    try:
        os.read(is_ready, 1)
        yield
    finally:
        os.write(ends, b".")
        os.waitpid(child, 0)
        for pipe in (may_end, ends, is_ready, ready):
            os.close(pipe)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_neither_keeps_the_port_nor_removes_the_target(tmp_path: Path) -> None:
    commtrace.start(commtrace.Config(dir=str(tmp_path), export="prometheus"))
    try:
        for step in range(3):
            with commtrace.step(step):
                pass
        url = started(tmp_path)
        with forked_child():
            assert value(url, "commtrace_last_step") >= 0
            commtrace.stop()
            with socket.socket() as next_run:
                next_run.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                next_run.bind(("127.0.0.1", int(url.split(":")[2].split("/")[0])))
                next_run.listen()
    finally:
        commtrace.stop()


def test_without_exporters_there_are_no_targets(tmp_path: Path) -> None:
    commtrace.start(commtrace.Config(dir=str(tmp_path)))
    try:
        with commtrace.step(0):
            pass
    finally:
        commtrace.stop()

    assert not (tmp_path / "prometheus").exists()
