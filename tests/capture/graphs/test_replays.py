"""Replays of CUDA graphs on a simulated GPU, whose class of graphs takes the place of torch's."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.cpp_communication import HookedOperation, OwnRank, ProcessGroupHooks
from commtrace.capture.collectives.ddp_reducer import CppCalls, ReducerCapture
from commtrace.capture.collectives.functional import FUNCTIONAL, FunctionalCapture, FunctionalWaits
from commtrace.capture.collectives.operations import OPERATIONS
from commtrace.capture.collectives.untraced_paths import CAPTURED_COMMUNICATION
from commtrace.capture.graphs import contents
from commtrace.capture.graphs.replays import EARLIER_GRAPHS, GraphReplays
from commtrace.capture.hooks import keep_compiler_out
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.capture.graphs.graph_job import GraphJob
from tests.capture.simulated_cuda import MILLISECOND, ForbiddenError, SimulatedGraph
from tests.capture.simulated_nccl import options, tensor
from tests.trace.rows import write_rank

pytestmark = pytest.mark.usefixtures("world")


class Job(GraphJob):
    """A training process with a simulated GPU and its graphs, captured."""

    def all_reduce(self, num_bytes: int = 32, *, asynchronous: bool = False) -> Any:
        return self.group.allreduce([tensor(num_bytes)], options(asynchronous))

    def captured(self, *sizes: int, graph: SimulatedGraph | None = None, **how: Any) -> SimulatedGraph:
        """A graph of work and as many all_reduces."""
        with self.cuda.graph(graph or self.cuda.CUDAGraph(), **how) as graph:
            self.cuda.current_stream().run(MILLISECOND)
            for size in sizes:
                self.all_reduce(size)
        return graph


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(monkeypatch)
    with job.recorded():
        yield job
    assert job.recording.warnings() == []


def firsts(row: Any) -> list[int]:
    first: list[int] = json.loads(row.detail)["first"]
    return first


def test_a_replay_is_a_span_on_its_stream_with_what_it_contains(job: Job, tmp_path: Path) -> None:
    graph = job.captured(64, 128)
    job.cuda.current_stream().run(5 * MILLISECOND)
    began = job.cuda.now_ns
    graph.replay()

    (row,) = job.replay_rows()
    assert (row.start, row.end) == (began + 5 * MILLISECOND, began + 8 * MILLISECOND)
    assert (row.name, row.lane, row.timing) == ("graph", schema.COMPUTE, schema.CUDA_EVENT_TIMING)
    assert (row.seq, row.op_in_seq, row.bytes) == (0, 2, 192)
    assert json.loads(row.detail) == {"launched_ns": began, "first": [0]}

    spans = job.read(tmp_path).ranks[1].spans
    rows = spans.kind == schema.COLLECTIVE
    assert spans.seq[rows].tolist() == [0, 1]
    assert spans.bytes[rows].tolist() == [64, 128]
    assert set(spans.start[rows].tolist()) == {row.start}
    assert set(spans.end[rows].tolist()) == {row.end}
    assert set(spans.timing[rows].tolist()) == {schema.REPLAY_TIMING}
    assert not spans.start_exact[rows].any()
    assert not spans.end_exact[rows].any()


def test_numbers_go_on_by_what_each_replay_contains(job: Job, tmp_path: Path) -> None:
    job.all_reduce()
    graph = job.captured(1, 2, 3)
    job.all_reduce()
    graph.replay()
    graph.replay()
    job.all_reduce()

    rows = job.replay_rows()
    assert [firsts(row) for row in rows] == [[2], [5]]
    assert [row.seq for row in rows] == [0, 1]
    run = job.read(tmp_path)
    spans = run.ranks[1].spans
    collectives = spans.take(spans.kind == schema.COLLECTIVE)
    assert collectives.seq.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert collectives.bytes.tolist() == [32, 32, 1, 2, 3, 1, 2, 3, 32]


def test_messages_and_brackets_are_numbered_as_they_would_be_without_a_graph(job: Job, tmp_path: Path) -> None:
    device = torch.device("cuda:0")

    def communicate() -> None:
        job.group.send([tensor(8)], 2, 0).wait()
        job.group._start_coalescing(device)
        for size in (1, 2):
            job.group.allreduce([tensor(size)], options(True))
        job.group._end_coalescing(device).wait()
        job.group._start_coalescing(device)
        job.group.send([tensor(3)], 2, 7)
        job.group.recv([tensor(4)], 3, 7)
        job.group._end_coalescing(device).wait()

    communicate()
    with job.cuda.graph(job.cuda.CUDAGraph()) as graph:
        communicate()
    graph.replay()
    communicate()
    graph.replay()

    spans = job.read(tmp_path).ranks[1].spans
    replayed = spans.timing == schema.REPLAY_TIMING

    def facts(rows: Any) -> list[tuple[int, ...]]:
        own = spans.take(rows & (spans.kind != schema.STALL) & (spans.kind != schema.REPLAY))
        columns = (own.kind, own.name, own.op_in_seq, own.bytes, own.peer, own.seq)
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    def moved(facts: list[tuple[int, ...]], by: int) -> list[tuple[int, ...]]:
        return sorted((*fact[:-1], fact[-1] + by) for fact in facts)

    eager, captured = facts(~replayed), facts(replayed)
    first = [fact for fact in eager if fact[-1] & 0xFFFF == 0]
    assert len(first) == 5
    assert eager == sorted(first + moved(first, 2))
    assert captured == sorted(moved(first, 1) + moved(first, 3))


def test_the_host_in_a_phase_says_which_phase_is_replayed(job: Job, tmp_path: Path) -> None:
    graph = job.captured(64)
    job.tracer.begin_step(3)
    span = job.tracer.enter(schema.BACKWARD, "backward", microbatch=5, chunk=1, stage=2)
    graph.replay()
    job.tracer.leave(span)

    (row,) = job.replay_rows()
    assert (row.name, row.step, row.microbatch, row.chunk, row.stage) == ("backward", 3, 5, 1, 2)
    spans = job.read(tmp_path).ranks[1].spans
    (at,) = (spans.kind == schema.COLLECTIVE).nonzero()[0]
    assert (spans.step[at], spans.microbatch[at], spans.chunk[at], spans.stage[at]) == (3, 5, 1, 2)


def test_else_it_is_those_that_were_captured(job: Job, tmp_path: Path) -> None:
    job.tracer.begin_step(1)
    with job.cuda.graph(job.cuda.CUDAGraph()) as graph:
        for microbatch in range(2):
            for kind, name in ((schema.FORWARD, "forward"), (schema.BACKWARD, "backward")):
                span = job.tracer.enter(kind, name, microbatch=microbatch, stage=0)
                job.all_reduce()
                job.tracer.leave(span)
    job.tracer.begin_step(2)
    graph.replay()
    job.tracer.begin_step(3)

    (row,) = job.replay_rows()
    assert (row.name, row.step, row.microbatch) == ("forward+backward", 2, -1)
    spans = job.read(tmp_path).ranks[1].spans
    collectives = spans.take(spans.kind == schema.COLLECTIVE)
    assert collectives.microbatch.tolist() == [0, 0, 1, 1]
    assert set(collectives.step.tolist()) == {2}
    # Nothing ran while it was captured.
    assert not job.recording.rows(schema.FORWARD, schema.BACKWARD)


def test_the_module_of_an_operation_is_that_whose_forward_runs(job: Job) -> None:
    class Layer(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            job.all_reduce()
            return value

    with job.cuda.graph(job.cuda.CUDAGraph()):
        Layer()(torch.ones(1))
        job.all_reduce()

    (mark,) = job.marks()
    assert [operation[-1] for operation in mark["operations"]] == ["Layer", ""]


def test_communication_is_captured_on_autograds_threads_and_beside(job: Job) -> None:
    with job.cuda.graph(job.cuda.CUDAGraph(), mode="relaxed") as graph:
        stream = job.cuda.current_stream()

        def backward() -> None:
            job.cuda.driver.set_current(0)
            with job.cuda.stream(stream):
                job.all_reduce(7)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(10)
    graph.replay()

    (row,) = job.replay_rows()
    assert (row.op_in_seq, row.bytes) == (1, 7)


def test_communication_of_another_thread_is_not_captured(job: Job) -> None:
    with job.cuda.graph(job.cuda.CUDAGraph(), mode="relaxed") as graph:
        job.all_reduce(1)

        def elsewhere() -> None:
            job.cuda.driver.set_current(0)
            with job.cuda.stream(job.cuda.Stream()):
                job.all_reduce(2)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10)
    graph.replay()

    (row,) = job.replay_rows()
    assert (row.op_in_seq, row.bytes, firsts(row)) == (1, 1, [1])
    (eager,) = job.recording.communications()
    assert (eager.seq, eager.bytes) == (0, 2)


def test_each_of_several_captures_has_what_its_own_thread_launches(job: Job) -> None:
    both_open, graphs = threading.Barrier(2, timeout=10), {}

    def capture(size: int) -> None:
        job.cuda.driver.set_current(0)
        with job.cuda.graph(job.cuda.CUDAGraph(), job.cuda.Stream(), "thread_local") as graphs[size]:
            both_open.wait()
            job.all_reduce(size)
            both_open.wait()

    threads = [threading.Thread(target=capture, args=(size,)) for size in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    graphs[1].replay()
    graphs[2].replay()

    assert [(row.op_in_seq, row.bytes) for row in job.replay_rows()] == [(1, 1), (1, 2)]


def test_a_graph_replayed_into_another_is_part_of_it(job: Job) -> None:
    inner = job.captured(1, 2)
    with job.cuda.graph(job.cuda.CUDAGraph()) as outer:
        job.all_reduce(4)
        inner.replay()
        inner.replay()
        job.all_reduce(8)
    outer.replay()
    inner.replay()

    rows = job.replay_rows()
    assert [(row.op_in_seq, row.bytes, firsts(row)) for row in rows] == [(6, 18, [0]), (2, 3, [6])]
    offsets = [(operation[2], operation[4]) for operation in job.marks()[1]["operations"]]
    assert offsets == [(0, 4), (1, 1), (2, 2), (3, 1), (4, 2), (5, 8)]


def test_messages_within_a_graph_within_a_graph_keep_their_order(job: Job) -> None:
    def communicate() -> None:
        job.group.send([tensor(1)], 2, 7).wait()
        job.all_reduce(2)
        job.group.send([tensor(3)], 2, 7).wait()

    communicate()
    with job.cuda.graph(job.cuda.CUDAGraph()) as inner:
        communicate()
    with job.cuda.graph(job.cuda.CUDAGraph()) as outer:
        communicate()
        inner.replay()
    outer.replay()

    (row,) = job.replay_rows()
    assert sorted(firsts(row)) == [1, (7 << 32) + 2]
    operations = job.marks()[1]["operations"]
    assert [operation[4] for operation in operations] == [1, 2, 3, 1, 2, 3]
    assert [operation[2] for operation in operations] == [0, 0, 1, 2, 1, 3]


def test_launches_of_cpp_are_captured_by_torchs_hooks(job: Job) -> None:
    """As since torch 2.14, of which only the arguments of the hooks are needed."""
    issued, waits = CppCalls(job.tracer, job.devices), FunctionalWaits(job.tracer, job.devices)
    reducer = ReducerCapture(job.tracer, issued, by_kernels=False)
    hooks = ProcessGroupHooks(job.tracer, issued, waits, reducer)
    operations = (OPERATIONS["allreduce"], OPERATIONS["send"])
    hooks._operations = {
        number: HookedOperation(operation, operation.measure, has_outputs=False, has_peer=operation.is_p2p)
        for number, operation in enumerate(operations)
    }
    hooks._active = True
    state = job.tracer.groups.state(job.group)
    before, behind = hooks._pre_hook(state, OwnRank(1)), hooks._post_hook(state)

    def launch(number: int, size: int, peer: int = -1) -> None:
        arguments: Any = SimpleNamespace(
            name=number, op_id=size, input_tensors=[tensor(size)], output_tensors=[], root=peer, work=None
        )
        before(arguments)
        behind(arguments)

    with job.cuda.graph(job.cuda.CUDAGraph()) as graph:
        launch(0, 1)
        launch(1, 2, peer=3)
        launch(0, 4)
    assert state.collective_seq.launched == 0
    graph.replay()
    graph.replay()

    assert [(row.op_in_seq, row.bytes, firsts(row)) for row in job.replay_rows()] == [(3, 7, [0, 0]), (3, 7, [2, 1])]
    (mark,) = job.marks()
    assert [operation[:3] for operation in mark["operations"]] == [
        ["all_reduce", 0, 0], ["send", 1, 0], ["all_reduce", 0, 1],
    ]  # fmt: skip


def test_functional_collectives_are_captured(job: Job) -> None:
    waits = FunctionalWaits(job.tracer, job.devices)
    functional = FunctionalCapture(job.tracer, waits, job.devices)
    operation = FUNCTIONAL["all_reduce"]._replace(measure=lambda *_: (8, -1, torch.float32, None))
    arguments = [tensor(8)] * (operation.group_argument + 1)
    arguments[operation.group_argument] = job.group

    job.tracer.recording = False
    with job.cuda.graph(job.cuda.CUDAGraph()) as graph:
        _, state = functional._state_of(job.group)
        seq = next(state.collective_seq)
        assert functional._launching(operation)(tuple(arguments), job.group, state, seq) is None
    job.tracer.recording = True
    graph.replay()

    (row,) = job.replay_rows()
    assert (row.op_in_seq, row.bytes) == (1, 8)


def test_a_graph_captured_before_the_recording_has_unknown_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    graph = job.captured(64)
    with job.recorded():
        graph.replay()
        graph.replay()
        rows = job.replay_rows()
        assert [(row.seq, row.bytes, row.op_in_seq) for row in rows] == [(0, -1, 0), (1, -1, 0)]
        assert job.tracer.untraced_paths == {EARLIER_GRAPHS}
        (mark,) = job.marks()
        assert not mark["is_known"]


def test_a_graph_that_torch_does_not_know_is_noted(job: Job) -> None:
    with job.cuda.graph():
        job.all_reduce()
    job.recording.rows()

    assert job.tracer.untraced_paths == {CAPTURED_COMMUNICATION}
    assert job.marks() == []


def test_a_capture_that_fails_leaves_nothing(job: Job) -> None:
    job.all_reduce()

    def raise_in_a_capture() -> None:
        with job.cuda.graph(job.cuda.CUDAGraph()):
            job.all_reduce()
            raise ZeroDivisionError

    def leave_a_stream_unjoined() -> None:
        with job.cuda.graph(job.cuda.CUDAGraph()):
            job.all_reduce(asynchronous=True)

    with pytest.raises(ZeroDivisionError):
        raise_in_a_capture()
    assert len(job.marks()) == 1  # torch ends the capture: the graph is there
    with pytest.raises(ForbiddenError):
        leave_a_stream_unjoined()
    job.all_reduce()
    job.finish()

    assert job.tracer.captures.open == ()
    assert len(job.marks()) == 1
    assert [row.seq for row in job.recording.communications()] == [0, 1]


def test_a_replay_that_fails_is_training_s_and_takes_no_numbers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = job.captured(1)
    executable, graph.executable = graph.executable, 12345
    with pytest.raises(Exception, match="cuGraphLaunch"):
        graph.replay()
    graph.executable = executable
    graph.replay()

    (row,) = job.replay_rows()
    assert firsts(row) == [0]


def test_an_operation_that_is_refused_is_no_part_of_the_graph(job: Job) -> None:
    with job.cuda.graph(job.cuda.CUDAGraph()) as graph:
        job.all_reduce(1)
        job.nccl.is_aborted = True
        with pytest.raises(dist.DistBackendError):
            job.all_reduce(2)
        job.nccl.is_aborted = False
        job.all_reduce(4)
    graph.replay()

    (row,) = job.replay_rows()
    assert (row.op_in_seq, row.bytes) == (2, 5)


def test_a_graph_that_is_captured_again_has_its_new_contents(job: Job) -> None:
    graph = job.captured(1)
    graph.replay()
    job.captured(2, 4, graph=graph)
    graph.replay()

    rows = job.replay_rows()
    assert [(row.seq, row.bytes, firsts(row)) for row in rows] == [(0, 1, [0]), (0, 6, [1])]
    assert rows[0].id != rows[1].id


def test_graphs_that_are_kept_are_instantiated_later(job: Job) -> None:
    graph = job.captured(1, graph=job.cuda.CUDAGraph(keep_graph=True))
    assert not graph.executable
    graph.replay()

    (row,) = job.replay_rows()
    assert row.bytes == 1


def test_a_graph_that_is_destroyed_is_forgotten(job: Job) -> None:
    graph = job.captured(1)
    graph.replay()
    assert len(job.replays._contents) == 1
    del graph
    gc.collect()

    assert len(job.replays._contents) == 0
    assert len(job.replay_rows()) == 1


def test_outside_of_the_window_a_graph_is_listed_and_numbers_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(monkeypatch, steps="2:3")
    with job.recorded():
        graph = job.captured(1, 2)
        for step in range(4):
            job.tracer.begin_step(step)
            graph.replay()
        job.tracer.end_step()

        (row,) = job.replay_rows()
        assert (row.step, row.seq, firsts(row)) == (2, 2, [4])
        spans = job.read(tmp_path).ranks[1].spans
        assert spans.bytes[spans.kind == schema.COLLECTIVE].tolist() == [1, 2]


def test_skipped_roles_are_numbered_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.tracer.groups.skip_roles = frozenset({"world"})
    with job.recorded():
        graph = job.captured(1, 2)
        job.all_reduce()
        graph.replay()
        graph.replay()

        rows = job.replay_rows()
        assert [(row.op_in_seq, firsts(row)) for row in rows] == [(0, [1]), (0, [3])]


def test_a_long_list_is_cut_and_counted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MOST_OPERATIONS", 2)
    graph = job.captured(1, 2, 4)
    graph.replay()

    (row,) = job.replay_rows()
    assert (row.op_in_seq, row.bytes) == (3, 3)
    (mark,) = job.marks()
    assert (len(mark["operations"]), mark["unlisted"]) == (2, 1)
    job.all_reduce()
    job.finish()
    assert [row.seq for row in job.recording.communications()] == [3]


def test_stopping_puts_the_methods_back_also_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    methods = dict(vars(job.cuda.CUDAGraph))
    with job.recorded():
        assert vars(job.cuda.CUDAGraph)["replay"] is not methods["replay"]
        graph = job.cuda.CUDAGraph()
        with job.cuda.graph(graph):
            job.all_reduce()
            job.replays.uninstall()
            job.all_reduce()
        assert {name: vars(job.cuda.CUDAGraph)[name] for name in methods} == methods
        graph.replay()
        job.finish()
        assert job.marks() == []
        assert job.replay_rows() == []


def test_failures_of_ours_never_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in ("_capture_begun", "_capture_ends", "_capture_ended", "_about_to_replay", "_replayed"):
        job = Job(monkeypatch)
        with monkeypatch.context() as changed:

            def fails(*_arguments: object) -> None:
                raise ZeroDivisionError

            changed.setattr(GraphReplays, broken, fails)
            with job.recorded():
                graph = job.captured(1)
                graph.replay()
                graph.replay()
        assert len(job.recording.warnings()) == 1, broken


def test_host_tensors_in_a_capture_are_sent_at_once(job: Job) -> None:
    with job.cuda.graph(job.cuda.CUDAGraph()):
        job.group.allreduce([tensor(4, "cpu")], options(False))

    (mark,) = job.marks()
    assert (mark["operations"], mark["counters"]) == ([], [])


def test_the_compiler_does_not_look_into_replays(job: Job) -> None:
    uninstall = keep_compiler_out(job.tracer)
    try:
        compiled = torch.compile(lambda graph, value: (graph.replay(), value + 1)[1], backend="eager")
        graph = job.captured(1)
        assert compiled(graph, torch.ones(1)).tolist() == [2]
    finally:
        uninstall()
    (row,) = job.replay_rows()
    assert row.bytes == 1


def test_rows_of_graphs_need_no_other_segment(job: Job, tmp_path: Path) -> None:
    """What a graph contains is written once, and again at the begin of each file."""
    graph = job.captured(1)
    for step in range(6):
        job.tracer.begin_step(step)
        graph.replay()
    job.tracer.end_step()
    job.finish()
    job.recording.rows()
    write_rank(tmp_path, job.recording.sink.rows, steps_per_segment=2, rank=1, world_size=4)

    spans = load_run(tmp_path, "4").ranks[1].spans
    assert spans.seq[spans.kind == schema.COLLECTIVE].tolist() == [4]
