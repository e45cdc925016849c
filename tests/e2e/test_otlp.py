"""Real jobs and a real receiver: one trace per step of all ranks, and a receiver that is killed meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from commtrace.exporters.otlp.spans import SpanIds
from commtrace.live.summary import trace_id
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork
from tests.exporters.otlp.receiver import attributes, receiving
from tests.exporters.otlp.semantics import violations

pytestmark = pytest.mark.e2e

STEPS = 12
MANY_STEPS = 80
"""For so long that spans are sent several times."""


def environment(directory: Path, url: str, **more: str) -> dict[str, str]:
    return {
        "COMMTRACE_DIR": str(directory / "run"),
        "COMMTRACE_RUN_ID": "sent",
        "COMMTRACE_EXPORT": "otlp",
        "COMMTRACE_OTLP_LEVEL": "communication",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        **more,
    }


def test_all_ranks_spans_of_a_step_are_one_trace_whose_links_resolve(tmp_path: Path) -> None:
    with receiving() as receiver:
        given = environment(tmp_path, receiver.url, OTEL_EXPORTER_OTLP_COMPRESSION="gzip")
        completed = fork(["tests/e2e/programs/pairs.py", str(STEPS), "0.05", "5"], 4, given)
    assert completed.returncode == 0, completed.stdout

    assert violations(receiver.spans) == []
    spans = {span.span_id: span for span in receiver.spans}
    assert {resource["dl.rank"] for resource in receiver.resources} == {0, 1, 2, 3}
    for step in range(STEPS):
        trace = trace_id("sent", step).to_bytes(16, "big")
        names = Counter(span.name for span in receiver.spans if span.trace_id == trace)
        assert (names["job step"], names["step"]) == (1, 4), step
        assert (names["send pp"], names["recv pp"], names["all_reduce world"]) == (2, 2, 4), names
    assert "spans were not exported" not in completed.stdout
    _links_resolve(spans)
    _times_are_those_of_the_files(receiver.spans, tmp_path / "run")


def _links_resolve(spans: dict[bytes, Any]) -> None:
    linked = Counter[tuple[str, str]]()
    for span in spans.values():
        for link in span.links:
            other = spans[link.span_id]
            assert other.trace_id == link.trace_id == span.trace_id
            linked[span.name, other.name] += 1
            if "collective" not in span.name and not span.name.startswith("stall"):
                sequences = [attributes(one)["commtrace.collective.sequence"] for one in (span, other)]
                assert sequences[0] == sequences[1]
    for pair, count in {
        ("send pp", "recv pp"): 2, ("recv pp", "send pp"): 2, ("all_reduce world", "all_reduce world"): 6,
    }.items():  # fmt: skip
        assert linked[pair] >= count * STEPS, linked


def _times_are_those_of_the_files(spans: list[Any], directory: Path) -> None:
    """The duration of every step to the nanosecond, the instant within what reading two clocks takes."""
    run = load_run(directory)
    for trace in run.ranks.values():
        rows = trace.spans.take(trace.spans.kind == 0)
        recorded = dict(zip(rows.step.tolist(), (rows.end - rows.start).tolist(), strict=True))
        anchor = trace.metadata.anchor
        begins = dict(zip(rows.step.tolist(), rows.start.tolist(), strict=True))
        sent = {
            attributes(span)["commtrace.step"]: span
            for span in spans
            if span.name == "step" and _rank_of(span, run.world_size) == trace.metadata.rank
        }
        assert {step: one.end_time_unix_nano - one.start_time_unix_nano for step, one in sent.items()} == recorded
        for step, one in sent.items():
            at = one.start_time_unix_nano - anchor.realtime_ns + anchor.monotonic_ns
            assert abs(at - begins[step]) < 10_000_000


def _rank_of(span: Any, world_size: int) -> int:
    """Whose step it is, from its id: as any rank would find it."""
    ids, step = SpanIds("sent", 0), attributes(span)["commtrace.step"]
    (rank,) = (r for r in range(world_size) if ids.step(r, step).to_bytes(8, "big") == span.span_id)
    return rank


def test_a_receiver_that_is_killed_changes_nothing_for_training(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    receiver = subprocess.Popen([sys.executable, "-m", "tests.exporters.otlp.receiver", str(port_file)], cwd=REPOSITORY)
    try:
        _until(lambda: port_file.exists() and port_file.read_text() != "")
        given = environment(tmp_path, f"http://127.0.0.1:{port_file.read_text()}")
        completed = fork(["tests/e2e/programs/pairs.py", str(MANY_STEPS), "0.05", "0"], 2, given)
        assert receiver.wait(60) == -signal.SIGKILL, "it kills itself when it has got spans"
    finally:
        receiver.kill()
        receiver.wait(30)

    assert completed.returncode == 0, completed.stdout
    assert _losses(completed.stdout) == _expected_losses()
    assert "spans were not exported" in completed.stdout
    run = load_run(tmp_path / "run")
    for trace in run.ranks.values():
        assert trace.closed
        assert trace.dropped == {}
        assert trace.spans.step[trace.spans.kind == 0].tolist() == list(range(MANY_STEPS))


def _losses(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("loss "))


def _expected_losses() -> list[str]:
    """Of two ranks without commtrace: the first has ones, the second what the first has sent to it."""
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 1)
    ones = torch.ones(16)
    with torch.no_grad():
        losses = [(model(ones) + model(ones * (number + 1))).item() for number in range(MANY_STEPS)]
    return [f"loss {number:03d} {loss:.9f}" for number, loss in enumerate(losses)]


def _until(is_true: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
