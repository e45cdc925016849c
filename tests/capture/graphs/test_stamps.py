"""Stamps of captured communication, on a simulated GPU that runs the kernels of the native part."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d

from commtrace.capture.collectives.operations import OPERATIONS
from commtrace.capture.graphs.replays import GraphReplays
from commtrace.capture.graphs.stamps import (
    NEEDS_NATIVE,
    OF_ANOTHER,
    TOO_MANY,
    CapturedCall,
    Frontier,
    GraphStamps,
    ReplayTimes,
)
from commtrace.capture.instrumentation import Instrumentation
from commtrace.capture.records import Launch
from commtrace.config import Config
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates
from tests.capture.graphs.stamped_job import BYTES, StampedJob, intervals
from tests.capture.simulated_cuda import MILLISECOND, ForbiddenError, SimulatedGraph
from tests.capture.simulated_nccl import options, tensor
from tests.native import simulated_driver
from tests.native.forked import in_child
from tests.safety.devices import SimulatedGpu

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


def test_overwritten_stamps_are_counted(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
    for _ in range(100):
        graph.replay()
    job.cuda.advance(1000 * MILLISECOND)

    rows = job.spans(tmp_path, *COMMUNICATION)
    stamped = rows.timing == schema.GRAPH_STAMP_TIMING
    assert stamped.tolist() == [False] * 36 + [True] * 64
    assert job.core.stamps_lost() == 36


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


def test_members_of_a_bracket_are_stamped_together(job: StampedJob, tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    with job.graph() as graph:
        job.run(1)
        job.nccl.duration_ns = MILLISECOND
        job.group._start_coalescing(device)
        for _ in range(3):
            job.group.allreduce([tensor(BYTES)], options(True))
        work = job.group._end_coalescing(device)
        job.run(1)
        work.wait()
    begin = job.cuda.now_ns
    graph.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert intervals(rows, begin) == [(1.0, 4.0)] * 3
    assert rows.op_in_seq.tolist() == [0, 1, 2]
    stalls = job.spans(tmp_path / "stalls", schema.STALL)
    assert intervals(stalls, begin) == [(2.0, 4.0)]
    assert stalls.stalled_on.tolist() == rows.id.tolist()[:1]


def test_messages_are_stamped(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.nccl.duration_ns = 2 * MILLISECOND
        received = job.group.recv([tensor(BYTES)], 2, 0)
        job.run(1)
        received.wait()
    begin = job.cuda.now_ns
    graph.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert (rows.kind.tolist(), intervals(rows, begin)) == ([schema.P2P], [(0.0, 2.0)])
    assert intervals(job.spans(tmp_path / "stalls", schema.STALL), begin) == [(1.0, 2.0)]


def test_a_stream_beside_the_computing_one_stalls_it_by_an_event(job: StampedJob, tmp_path: Path) -> None:
    """As FSDP2 gathers parameters: synchronously on a stream of its own, with an event behind a copy."""
    with job.graph() as graph:
        side, main = job.cuda.Stream(), job.stream
        job.run(1)
        side.wait_stream(main)
        with job.cuda.stream(side):
            job.all_reduce(3)
            job.run(1)
            event = side.record_event()
        job.run(2)
        main.wait_event(event)
        job.run(1)
    begin = job.cuda.now_ns
    graph.replay()

    assert intervals(job.spans(tmp_path, *COMMUNICATION), begin) == [(1.0, 4.0)]
    assert intervals(job.spans(tmp_path / "stalls", schema.STALL), begin) == [(3.0, 5.0)]


def test_a_wait_on_a_stream_beside_is_a_stall_once_that_stream_is_waited_for(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        side, main = job.cuda.Stream(), job.stream
        work = job.all_reduce(3, asynchronous=True)
        side.wait_stream(main)
        with job.cuda.stream(side):
            work.wait()
        event = side.record_event()
        job.run(2)
        main.wait_event(event)
    begin = job.cuda.now_ns
    graph.replay()

    assert intervals(job.spans(tmp_path, *COMMUNICATION), begin) == [(0.0, 3.0)]
    assert intervals(job.spans(tmp_path / "stalls", schema.STALL), begin) == [(2.0, 3.0)]


def test_an_operation_that_nobody_is_seen_to_wait_for_ends_with_its_last_node(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        work = job.all_reduce(2, asynchronous=True)
        job.run(5)
        job.stream.follow(work.captured_on)  # as C++ waits
    begin = job.cuda.now_ns
    graph.replay()

    assert intervals(job.spans(tmp_path, *COMMUNICATION), begin) == [(0.0, 2.0)]
    assert len(job.spans(tmp_path / "stalls", schema.STALL)) == 0
    (mark,) = job.marks()
    assert [stamped[6] for stamped in mark["stamps"]] == [False]


def test_waits_for_results_of_functional_operations_are_stamped(job: StampedJob, tmp_path: Path) -> None:
    assert job.devices is not None
    with job.graph() as graph:
        state = job.tracer.captures.state(job.tracer.groups.state(job.group))
        launch = Launch(
            OPERATIONS["allreduce"], state, next(state.collective_seq), BYTES, -1, torch.float32, -1, True,
            Coordinates(), None, 0,
        )  # fmt: skip
        call = job.devices.launch(launch, 0)
        assert call is not None
        job.nccl.duration_ns = 3 * MILLISECOND
        work = job.nccl.launch(True, -1)
        job.devices.record_handover(call)
        job.run(1)
        start = call.clock.mark(call.device)
        work.wait_for_stream()
        job.devices.record_wait(call, start, call.clock.mark(call.device))
    begin = job.cuda.now_ns
    graph.replay()

    assert intervals(job.spans(tmp_path, *COMMUNICATION), begin) == [(0.0, 3.0)]
    assert intervals(job.spans(tmp_path / "stalls", schema.STALL), begin) == [(1.0, 3.0)]


def test_small_ones_are_stamped_first_and_then_one_in_sixteen(job: StampedJob) -> None:
    with job.graph() as graph:
        for _ in range(40):
            job.all_reduce(1, num_bytes=1000)
        job.all_reduce(1)

    (mark,) = job.marks()
    assert [stamped[0] for stamped in mark["stamps"]] == [*range(17), 32, 40]
    assert mark["unstamped"] == {TOO_MANY: 22}
    assert len(job.stamps_of(graph)) == 1 + 2 * 19


# What is refused, and what fails


def captured_without(job: StampedJob, capture: Callable[[], None], reason: str, **how: Any) -> SimulatedGraph:
    """Capture what must not be stamped, and check that nothing was added and the reason is recorded."""
    with job.graph(**how) as graph:
        capture()
    assert job.stamps_of(graph) == []
    (mark,) = job.marks()
    assert (mark["stamps"], mark["unstamped"]) == ([], {reason: 1})
    graph.replay()
    (row,) = job.replay_rows()
    assert "stamps" not in row.detail
    return graph


def test_programmatic_edges_are_refused(job: StampedJob) -> None:
    def capture() -> None:
        job.run(1)
        job.driver.set_programmatic(job.stream._handle)
        job.all_reduce(1)
        job.driver.set_programmatic(job.stream._handle, False)

    captured_without(job, capture, "kernels around it overlap (programmatic edges)")


def test_another_graph_than_that_of_the_capture_is_refused(job: StampedJob) -> None:
    """As the body of a conditional node is, which is captured meanwhile."""

    def capture() -> None:
        body = job.cuda.Stream()
        job.driver.begin_capture(body.handle, simulated_driver.RELAXED)
        with job.cuda.stream(body):
            job.all_reduce(1)
        job.driver.end_capture(body.handle)

    captured_without(
        job, capture, "captured into another graph, such as the body of a conditional node", mode="relaxed"
    )


def test_another_device_and_another_context_are_refused(job: StampedJob) -> None:
    job.cuda.contexts.add(1)

    def other_device() -> None:
        job.group.allreduce([tensor(BYTES, "cuda:1")], options(False))

    captured_without(job, other_device, "captured on another device than its graph")
    job.recording.sink.rows.clear()

    def other_context() -> None:
        job.driver.set_current(1)
        job.all_reduce(1)
        job.driver.set_current(0)

    captured_without(job, other_context, "captured in another context than its graph", mode="relaxed")


@pytest.mark.parametrize(
    "function",
    [
        "cuStreamGetCaptureInfo", "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphNodeGetDependencies",
        "cuGraphAddKernelNode", "cuUserObjectCreate", "cuGraphRetainUserObject",
    ],
)  # fmt: skip
def test_a_driver_that_fails_leaves_the_capture_as_it_is(job: StampedJob, function: str) -> None:
    def capture() -> SimulatedGraph:
        with job.graph() as graph:
            job.run(1)
            work = job.all_reduce(1, asynchronous=True)
            job.run(1)
            work.wait()
        graph.replay()
        return graph

    job.driver.fail(function, simulated_driver.INVALID_VALUE)
    graph = capture()
    job.driver.fail(function, simulated_driver.SUCCESS)
    assert job.stamps_of(graph) == []
    (mark,) = job.marks()
    assert (mark["stamps"], sum(mark["unstamped"].values())) == ([], 1)
    (row,) = job.replay_rows()
    assert (row.op_in_seq, "stamps" in row.detail) == (1, False)

    assert len(job.stamps_of(capture())) == 4  # it works again


@pytest.mark.parametrize("call", range(1, 12))
def test_wherever_the_driver_begins_to_fail_a_replay_is_recorded(job: StampedJob, call: int, tmp_path: Path) -> None:
    job.driver.fail("cuGraphAddKernelNode", simulated_driver.INVALID_VALUE, call)
    with job.graph() as graph:
        for _ in range(3):
            job.run(1)
            work = job.all_reduce(1, asynchronous=True)
            job.run(2)
            work.wait()
    job.driver.fail("cuGraphAddKernelNode", simulated_driver.SUCCESS)
    graph.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    stamped = min((call - 1 - 1) // 3, 3) if call > 1 else 0  # the counter, and three of each
    assert (rows.timing == schema.GRAPH_STAMP_TIMING).sum() == stamped
    assert sorted(rows.seq.tolist()) == [0, 1, 2]


def test_an_aborted_communicator_is_not_waited_for(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
        job.stream.run(simulated_driver.NEVER_NS)
        job.all_reduce(1)
    graph.replay()
    job.finish()

    # The replay has no end: it is not recorded, and nothing has waited for it.
    assert job.recording.rows(schema.REPLAY) == []
    assert job.core.take_stamps() == []


def test_a_graph_within_a_graph_has_no_stamps_of_its_own_any_more(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as inner:
        job.all_reduce(1)
    with job.graph() as outer:
        job.all_reduce(2)
        inner.replay()
    begin = job.cuda.now_ns
    outer.replay()
    inner.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert rows.timing.tolist() == [schema.GRAPH_STAMP_TIMING, schema.REPLAY_TIMING, schema.REPLAY_TIMING]
    assert intervals(rows, begin)[0] == (0.0, 2.0)
    assert job.marks()[1]["unstamped"] == {OF_ANOTHER: 1}


def test_replays_that_something_else_launches_are_found_out(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
    job.driver.launch_graph(graph.executable, job.stream._handle)
    job.cuda.advance(10 * MILLISECOND)
    graph.replay()
    job.cuda.advance(10 * MILLISECOND)
    graph.replay()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert rows.timing.tolist() == [schema.REPLAY_TIMING] * 2


# Lifetime


def test_the_memory_of_graphs_that_are_gone_is_used_again(job: StampedJob, tmp_path: Path) -> None:
    for _ in range(3):
        with job.graph() as graph:
            job.all_reduce(1)
        for _ in range(5):
            graph.replay()
        job.finish()
        job.driver.call("cuGraphDestroy", graph._graph)
        job.core.pass_marks()
        assert job.core.begin_stamps(0) == "the stream is not captured"
        job.driver.call("cuGraphExecDestroy", graph.executable)
        job.core.pass_marks()

    rows = job.spans(tmp_path, *COMMUNICATION)
    assert set(rows.timing.tolist()) == {schema.GRAPH_STAMP_TIMING}
    assert len(rows) == 15
    assert job.driver.calls("cuMemHostAlloc") == 2


def test_a_number_that_another_graph_has_by_now_stamps_nothing(job: StampedJob) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
    (stamps,) = job.stamping._graphs.values()
    earlier = stamps._native
    job.driver.call("cuGraphDestroy", graph._graph)
    job.driver.call("cuGraphExecDestroy", graph.executable)
    job.core.pass_marks()

    with job.graph() as later:
        job.run(1)
        *_, stamps = job.stamping._graphs.values()
        assert earlier is not None
        assert stamps._native is not None
        assert (stamps._native[0], stamps._native != earlier) == (earlier[0], True)
        assert job.core.stamps_before(stamps._native, 0) == 1
        for handle in (earlier, None):
            assert job.core.stamps_before(handle, 0) == "the stream is not captured"
            assert job.core.stamp_start(handle, 0) == "the stream is not captured"
        with pytest.raises(TypeError, match="graph id"):
            job.core.stamps_before(earlier[0], 0)
    assert job.stamps_of(later) == []


def test_a_capture_that_fails_keeps_nothing(job: StampedJob) -> None:
    def capture(then: Callable[[], object]) -> None:
        with job.graph():
            job.all_reduce(1)
            then()

    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 // 0)
    with pytest.raises(ForbiddenError):
        capture(job.driver.library.cuCtxSynchronize)  # which breaks it
    with job.graph() as graph:
        job.all_reduce(1)
    graph.replay()

    (row,) = job.replay_rows()
    assert "stamps" in row.detail


def test_replays_whose_rows_are_lost_are_given_up(job: StampedJob) -> None:
    with job.graph():
        job.all_reduce(1)
    (stamps,) = job.stamping._graphs.values()
    times = ReplayTimes(np.zeros(2, np.int64), 0)
    for replay in range(10_000):
        stamps.expect(replay)
        stamps.add(replay, times)

        assert len(stamps._read) == len(stamps._awaited) <= 4_096
    assert list(stamps._awaited)[-1] == 9_999
    assert len(stamps._awaited) > 3_000

    stamps.abandon()
    assert (stamps._read, stamps._awaited) == ({}, {})


def test_rows_after_the_end_of_the_recording_have_the_times_that_were_read(job: StampedJob) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
    graph.replay()
    job.cuda.advance(20 * MILLISECOND)
    job.core.pass_marks()
    job.stamping.read()
    job.replays.uninstall()

    (row,) = job.replay_rows()
    assert "stamps" in row.detail


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_an_operation_without_stamps_is_not_waited_for_after_its_capture(
    job: StampedJob, monkeypatch: pytest.MonkeyPatch, is_abandoned: bool
) -> None:
    num_marks = 0

    def refuse(_stamps: GraphStamps, call: CapturedCall) -> None:
        call.reason = "refused"

    def frontier(_stamps: GraphStamps, _device: int | None) -> Frontier:
        nonlocal num_marks
        num_marks += 1
        return Frontier("not known")

    monkeypatch.setattr(GraphStamps, "about_to_launch", refuse)
    monkeypatch.setattr(GraphStamps, "frontier", frontier)
    side = job.cuda.Stream()
    with job.graph() as graph:
        side.wait_stream(job.stream)
        with job.cuda.stream(side):
            job.all_reduce(1)
        early = side.record_event()
        job.stream.wait_event(early)
        assert num_marks == 1
        if is_abandoned:
            job.stamping.close()
            job.stream.wait_event(early)
    early.record(side)
    job.stream.wait_event(early)
    job.stream.wait_event(side.record_event())
    graph.replay()

    assert num_marks == 1


def test_two_threads_capture_and_replay(job: StampedJob, tmp_path: Path) -> None:
    both_open, one_launches, graphs = threading.Barrier(2, timeout=10), threading.Lock(), {}

    def capture(milliseconds: int) -> None:
        job.driver.set_current(0)
        with job.graph(stream=job.cuda.Stream(), mode="thread_local") as graphs[milliseconds]:
            both_open.wait()
            with one_launches:  # of two that last otherwise
                job.all_reduce(milliseconds)
            both_open.wait()

    threads = [threading.Thread(target=capture, args=(milliseconds,)) for milliseconds in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    begin = job.cuda.now_ns
    graphs[1].replay()
    graphs[2].replay()

    assert intervals(job.spans(tmp_path, *COMMUNICATION), begin) == [(0.0, 1.0), (1.0, 3.0)]


def test_a_forked_child_leaves_the_stamps_of_its_parent_alone(job: StampedJob, tmp_path: Path) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
    graph.replay()

    assert in_child(lambda: job.core.take_stamps() == [] and job.core.stamps_lost() == 0)
    assert job.driver.calls_in_children() == {}
    assert len(job.spans(tmp_path, *COMMUNICATION)) == 1


def test_stopping_within_a_capture_and_recording_again(job: StampedJob) -> None:
    with job.graph() as graph:
        job.all_reduce(1)
        job.replays.uninstall()
        job.all_reduce(1)
    graph.replay()
    assert job.replay_rows() == []

    again = GraphReplays(job.tracer, job.cuda.CUDAGraph, job.stamping)
    again.install()
    graph.replay()  # of which nothing is known
    with job.graph() as later:
        job.all_reduce(1)
    later.replay()
    unknown, known = job.replay_rows()
    assert ("stamps" in unknown.detail, "stamps" in known.detail) == (False, True)
    again.uninstall()


# The clock


def test_the_devices_clock_may_drift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = StampedJob(monkeypatch)
    job.driver.set_globaltimer(ppm=80)
    begins = []
    with job.recorded():
        job.prepare()
        with job.graph() as graph:
            job.all_reduce(1)
        for _ in range(10):
            job.cuda.advance(1000 * MILLISECOND)
            job.recording.recorder.flush()
            job.cuda.advance(700 * MILLISECOND)
            begins.append(job.cuda.now_ns)
            graph.replay()
            job.cuda.advance(10 * MILLISECOND)
            job.recording.recorder.flush()
        job.finish()

    rows = job.spans(tmp_path, *COMMUNICATION)
    late = [abs(start - begin) for start, begin in zip(rows.start.tolist(), begins, strict=True)]
    assert max(late) < 4_000  # ns: without its drift they would be 56,000 late
    errors = [json.loads(row.detail)["error_ns"] for row in job.recording.rows(schema.REPLAY)]
    assert all(distance <= error + 1 for distance, error in zip(late, errors, strict=True))


def test_the_devices_clock_is_followed_where_a_stamp_arrives_behind_its_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = StampedJob(monkeypatch)
    job.driver.set_globaltimer(ppm=80)
    begins = []
    with job.recorded():
        job.prepare()
        job.driver.set_launch_latency_ns(8_000)
        with job.graph() as graph:
            job.all_reduce(1)
        for _ in range(10):
            job.cuda.advance(1000 * MILLISECOND)
            job.cuda.reading_ns = 100  # the thread polls while the device takes its time
            job.recording.recorder.flush()
            job.cuda.reading_ns = 0
            job.cuda.advance(100 * MILLISECOND)
            begins.append(job.cuda.now_ns)
            graph.replay()
            job.cuda.advance(10 * MILLISECOND)
            job.recording.recorder.flush()
        job.finish()

    rows = job.spans(tmp_path, *COMMUNICATION)
    late = [abs(start - begin) for start, begin in zip(rows.start.tolist(), begins, strict=True)]
    assert max(late) < 15_000  # ns: by the anchor of the self-test alone, the last would be 900,000 late
    errors = [json.loads(row.detail)["error_ns"] for row in job.recording.rows(schema.REPLAY)]
    assert all(distance <= error + 1 for distance, error in zip(late, errors, strict=True))


@pytest.mark.parametrize("call", range(1, 7))  # two launches for each try to take an anchor
def test_anchors_are_taken_again_after_a_launch_was_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: int
) -> None:
    job = StampedJob(monkeypatch)
    job.driver.set_globaltimer(ppm=80)
    with job.recorded():
        job.prepare()
        with job.graph() as graph:
            job.all_reduce(1)
        job.driver.fail("cuLaunchKernel", simulated_driver.INVALID_VALUE, call)
        job.cuda.advance(1000 * MILLISECOND)
        job.recording.recorder.flush()
        job.driver.fail("cuLaunchKernel", simulated_driver.SUCCESS)
        for _ in range(10):
            job.cuda.advance(1000 * MILLISECOND)
            job.recording.recorder.flush()
        begin = job.cuda.now_ns
        graph.replay()
        job.finish()

    (start,) = job.spans(tmp_path, *COMMUNICATION).start.tolist()
    assert abs(start - begin) < 4_000  # ns: by the anchors of before, it is 50,000 off


def test_a_device_that_is_too_busy_for_an_anchor_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = StampedJob(monkeypatch)
    with job.recorded():
        job.prepare()
        with job.graph() as graph:
            job.all_reduce(1)
        job.driver.set_launch_latency_ns(50 * MILLISECOND)
        job.cuda.advance(1000 * MILLISECOND)
        job.cuda.reading_ns = 1_000
        begin = job.cuda.now_ns
        job.recording.recorder.flush()
        assert job.cuda.now_ns - begin < MILLISECOND
        job.cuda.reading_ns = 0
        graph.replay()
        job.finish()
    assert len(job.spans(tmp_path, *COMMUNICATION)) == 1


class Unready(StampedJob):
    """A job whose device cannot stamp."""

    def warnings(self) -> list[str]:
        """Capture, and return the warnings."""
        with self.recorded():
            self.cuda.reading_ns = 20_000
            for _ in range(2):
                with self.graph() as graph:
                    self.all_reduce(1)
                assert self.stamps_of(graph) == []
            self.cuda.reading_ns = 0
        return self.recording.warnings()


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("cuModuleLoadData", 223, "CUDA_DISABLE_PTX_JIT"),
        ("cuModuleLoadData", 999, "has not loaded the kernels"),
        ("cuModuleGetFunction", 999, "has not loaded the kernels"),
        ("cuMemHostAlloc", 2, "no memory"),
        ("cuMemAlloc", 2, "no memory"),
        ("cuLaunchKernel", 999, "did not arrive"),
    ],
)
def test_a_device_that_cannot_stamp_says_why_once(
    monkeypatch: pytest.MonkeyPatch, function: str, status: int, reason: str
) -> None:
    job = Unready(monkeypatch)
    job.driver.fail(function, status)
    (message,) = job.warnings()
    assert reason in message


def test_a_clock_that_does_not_go_as_the_hosts_switches_stamps_off(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Unready(monkeypatch)
    job.driver.set_globaltimer(ppm=150_000)
    (message,) = job.warnings()
    assert "1 ms apart" in message


def test_old_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Unready(monkeypatch)
    job.driver.set_version(11080)
    (message,) = job.warnings()
    assert "CUDA 12.0" in message

    job = Unready(monkeypatch)
    job.driver.set_version(12020)
    assert job.core.prepare_stamps(False) in ("", "the job uses no device here")
    with job.recorded():
        job.core.mark()
        assert "before CUDA 12.3" in job.core.prepare_stamps(False)
        job.cuda.reading_ns = 20_000
        assert job.core.prepare_stamps(True) == ""
        job.cuda.reading_ns = 0


# The option


@pytest.mark.parametrize(("chosen", "is_stamped"), [("native", True), ("python", False)])
def test_the_option_asks_for_stamps_which_need_the_native_part(
    chosen: str, is_stamped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = SimulatedGpu(monkeypatch).prepare_stamps()
    recording = Instrumentation(Config(dir=str(tmp_path), engine=chosen, graphs="stamps"))
    messages = recording.tracer.guard.take_messages()
    assert messages == ([] if is_stamped else [NEEDS_NATIVE])
    recording.start()
    try:
        graph = gpu.cuda.CUDAGraph()
        with gpu.cuda.graph(graph):
            distributed_c10d._get_default_group().allreduce([tensor(BYTES)], options(False))
        assert len(gpu.cuda.driver.stamps(graph._graph)) == (3 if is_stamped else 0)
    finally:
        recording.stop()
