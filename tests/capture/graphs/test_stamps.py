"""Stamps of captured communication, on a simulated GPU that runs the kernels of the native part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace.trace import schema
from tests.capture.graphs.stamped_job import StampedJob, intervals
from tests.capture.simulated_cuda import MILLISECOND

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.engine("native")]

COMMUNICATION = (schema.COLLECTIVE, schema.P2P)


@pytest.fixture(params=["nccl", "nccl2"])
def job(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[StampedJob]:
    job = StampedJob(monkeypatch, request.param)
    with job.recorded():
        job.prepare()
        yield job
    assert job.recording.warnings() == []


def test_a_synchronous_operation_has_times_of_its_own(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.run(2)
        job.all_reduce(3)
        job.run(4)
    begin = job.cuda.now_ns
    graph.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert intervals(rows, begin) == [(2.0, 5.0)]
    assert rows.timing.tolist() == [schema.GRAPH_STAMP_TIMING]
    assert (rows.start_exact.tolist(), rows.end_exact.tolist()) == ([True], [True])
    stalls = job.spans(tmp_path / "stalls", schema.STALL)
    assert intervals(stalls, begin) == [(2.0, 5.0)]
    assert stalls.stalled_on.tolist() == rows.id.tolist()
    assert (rows.seq.tolist(), stalls.seq.tolist()) == ([0], [0])


def test_hidden_and_exposed_operations_end_when_they_do(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.run(1)
        hidden = job.all_reduce(2, asynchronous=True)
        job.run(5)
        hidden.wait()
        exposed = job.all_reduce(4, asynchronous=True)
        job.run(1)
        exposed.wait()
        job.run(1)
    begin = job.cuda.now_ns
    graph.replay()

    assert intervals(job.spans(tmp_path, *COMMUNICATION), begin) == [(1.0, 3.0), (6.0, 10.0)]
    assert intervals(job.spans(tmp_path / "stalls", schema.STALL), begin) == [(7.0, 10.0)]


def test_nothing_of_the_job_depends_on_a_stamp(job: StampedJob) -> None:
    def capture() -> tuple[list[int], list[list[int]]]:
        with job.graph() as graph:
            job.run(1)
            work = job.all_reduce(2, asynchronous=True)
            job.run(1)
            work.wait()
            job.all_reduce(1)
            job.run(1)
        stamps = job.stamps_of(graph)
        nodes = [node for node in job.driver.nodes(graph._graph) if node not in stamps]
        return stamps, [[nodes.index(before) for before in job.driver.dependencies(node)] for node in nodes]

    stamps, edges = capture()
    assert len(stamps) == 1 + 3 + 2  # the counter; start, wait and end; start and end
    assert {job.driver.priority(stamp) for stamp in stamps} == {-5}
    job.replays.uninstall()  # the same without stamps
    assert capture() == ([], edges)


def test_every_replay_is_read_without_a_synchronisation(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.run(1)
        job.all_reduce(1)
    begin = job.cuda.now_ns
    for _ in range(500):
        graph.replay()
    for _ in range(500):
        job.cuda.advance(2 * MILLISECOND)
        job.recording.recorder.flush()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert intervals(rows, begin) == [(2.0 * at + 1, 2.0 * at + 2) for at in range(500)]
    assert rows.seq.tolist() == list(range(500))
    assert set(rows.timing.tolist()) == {schema.GRAPH_STAMP_TIMING}


def test_what_was_overwritten_is_counted(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
    for _ in range(100):
        graph.replay()
    job.cuda.advance(1000 * MILLISECOND)

    rows = job.spans(tmp_path, *COMMUNICATION)
    stamped = rows.timing == schema.GRAPH_STAMP_TIMING
    assert stamped.tolist() == [False] * 68 + [True] * 32
    assert job.core.stamps_lost() == 68


def test_several_graphs_are_told_apart(job: StampedJob, tmp_path: Path) -> None:
    graphs = []
    for milliseconds in (1, 2, 3):
        with job.graph() as graph:
            job.all_reduce(milliseconds)
        graphs.append(graph)
    begin = job.cuda.now_ns
    for graph in (*graphs, *reversed(graphs)):
        graph.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert intervals(rows, begin) == [(0.0, 1.0), (1.0, 3.0), (3.0, 6.0), (6.0, 9.0), (9.0, 11.0), (11.0, 12.0)]
