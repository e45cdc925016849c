"""What nodes in CUDA graphs cost, and whether stamps of captured communication tell the truth.

    python -m tests.gpu.stages.graphs OUTPUT

Without a GPU the driver is the simulated one of tests/native, if there is a C compiler: that tries this program, and
answers nothing. Stamps are compared with the kernels of two NCCL ranks on a GPU only.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.engines import OFF, environment, why_not_native
from commtrace import _native
from commtrace.recording.options import NATIVE, STAMPS
from tests.gpu import replays
from tests.gpu.jobs import BACKENDS
from tests.gpu.stages.driver import Driver, libcuda
from tests.gpu.stages.stage import Answers, run_job, run_stage, sized

JOB_SECONDS: Final = 60.0
EXTERNAL: Final = 1
"""Flag of a record in a capture: a node of the graph, which each launch resets when it is enqueued."""
MOST_NS_PER_STAMP: Final = 600
"""The aim: what a stamp adds to a replay."""
MOST_SHARE: Final = 1.01
"""The aim: how much longer a replay may take with one stamp in 50 µs."""

VARIANTS: Final = ("plain", "stamps", "event leaves", "external events")


class Bench:
    """Graphs of kernels on a stream of its own, through the driver, with the stamps of the native part."""

    def __init__(self, library: str) -> None:
        self.driver = Driver(library)
        core, reason = _native.load()
        assert core is not None, reason
        self.core: Any = core
        self._streams: dict[int, Any] = {}
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
            torch.zeros(1, device="cuda")
            self.torch_stream = torch.cuda.Stream()
            self.handle = self.torch_stream.cuda_stream
        else:
            self.handle = int(self.driver.new_stream().value or 0)
        self._configure(library)
        self._graph_ids = iter(range(1, 1_000_000))
        self._tensor: torch.Tensor | None = None

    def _configure(self, library: str) -> None:
        def open_device() -> bool:
            self.core.open_driver(library, True)
            return True

        def nothing(*_arguments: object) -> None:
            return None

        self.core.reset(1_000)
        self.core.configure(
            tensor_types=(torch.Tensor,), p2p_codes=(None,) * 4, code_of_dtype=lambda _: 0, failed=nothing,
            wait_failed=nothing, waited_on_a_side=None, pending=(None, None), forget_in_python=nothing,
            times_devices=True, raw_stream=lambda _: self.handle, current_device=lambda: 0, open_device=open_device,
        )  # fmt: skip

    def close(self) -> None:
        self.core.end()
        self.core.close_device(2_000)

    def prepare(self) -> str:
        """Have the native part load its kernels; return why it cannot."""
        self.core.mark()
        reason: str = self.core.prepare_stamps(True)
        return reason

    def kernel(self, microseconds: int) -> None:
        """Put a kernel on the stream: of about so many µs on an H100."""
        if not torch.cuda.is_available():
            start, end = ctypes.c_int64(), ctypes.c_int64()
            times = (ctypes.byref(start), ctypes.byref(end))
            self("simulated_kernel", ctypes.c_uint64(self.handle), ctypes.c_int64(microseconds * 1_000), *times)
            return
        if self._tensor is None:
            self._tensor = torch.randn(1_024, 1_024, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(self.torch_stream):
            if microseconds < 10:
                self._tensor.neg_()
            else:
                torch.cuda._sleep(microseconds * 1_700)  # cycles

    def __call__(self, function: str, *arguments: Any) -> None:
        status = self.driver(function, *arguments)
        assert status == 0, f"{function}: {status}"

    @property
    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.handle)

    def capture(self, variant: str, kernels: int, microseconds: int, marked_each: int) -> Graph:
        """Capture kernels, with two marks around each ``marked_each``-th of them."""
        graph_id = next(self._graph_ids)
        events: list[ctypes.c_void_p] = []
        self("cuStreamBeginCapture_v2", self.stream, 2)
        stamps = self.core.begin_stamps(graph_id) if variant == "stamps" else None
        assert not isinstance(stamps, str), stamps
        for at in range(kernels):
            with self._marked(variant, stamps, events) if at % marked_each == 0 else nothing_around():
                self.kernel(microseconds)
        handle, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamEndCapture", self.stream, ctypes.byref(handle))
        if stamps is not None:
            self.core.close_stamps(stamps, True)
        begin = time.perf_counter_ns()
        self("cuGraphInstantiateWithFlags", ctypes.byref(executable), handle, ctypes.c_ulonglong(0))
        taken_ns = time.perf_counter_ns() - begin
        return Graph(
            self,
            graph_id,
            handle,
            executable,
            taken_ns,
            0 if variant == "plain" else 2 * -(-kernels // marked_each),
            events,
        )

    @contextmanager
    def _marked(self, variant: str, stamps: tuple[int, int] | None, events: list[ctypes.c_void_p]) -> Iterator[None]:
        if variant == "stamps":
            before = self.core.stamps_before(stamps, 0)
            yield
            started = self.core.stamp_start(stamps, before)
            assert not isinstance(started, str), started
            ended = self.core.stamp_end(stamps, 0, before, started[1])
            assert not isinstance(ended, str), ended
            return
        self._event(variant, events)
        yield
        self._event(variant, events)

    def _event(self, variant: str, events: list[ctypes.c_void_p]) -> None:
        if variant == "plain":
            return
        event = self.driver.new_event()
        events.append(event)
        if variant == "external events":
            self("cuEventRecordWithFlags", event, self.stream, EXTERNAL)
            return
        status, capture_id = ctypes.c_int(), ctypes.c_uint64()
        graph, nodes, count, node = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_void_p()
        asked = (status, capture_id, graph, nodes, count)
        self("cuStreamGetCaptureInfo_v2", self.stream, *map(ctypes.byref, asked))
        self("cuGraphAddEventRecordNode", ctypes.byref(node), graph, nodes, count, event)


class Graph:
    """A graph that was captured: ``marks`` nodes of it are ours."""

    def __init__(
        self, bench: Bench, graph_id: int, handle: ctypes.c_void_p, executable: ctypes.c_void_p, instantiated_ns: int,
        marks: int, events: list[ctypes.c_void_p],
    ) -> None:  # fmt: skip
        self._bench = bench
        self.id = graph_id
        self._handle = handle
        self._executable = executable
        self.instantiated_ns = instantiated_ns
        self.marks = marks
        self.events = events

    def launch(self) -> None:
        self._bench("cuGraphLaunch", self._executable, self._bench.stream)

    def replay_ns(self, replays: int) -> tuple[float, float]:
        """Return the device's time of a replay, and the host's time of its launch, ns."""
        bench = self._bench
        start, end = bench.driver.new_event(0), bench.driver.new_event(0)
        bench("cuEventRecord", start, bench.stream)
        began = time.perf_counter_ns()
        for _ in range(replays):
            self.launch()
        host_ns = (time.perf_counter_ns() - began) / replays
        bench("cuEventRecord", end, bench.stream)
        bench("cuStreamSynchronize", bench.stream)
        milliseconds = ctypes.c_float()
        bench("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value * 1e6 / replays, host_ns

    def destroy(self) -> None:
        self._bench("cuGraphExecDestroy", self._executable)
        self._bench("cuGraphDestroy", self._handle)


@contextmanager
def nothing_around() -> Iterator[None]:
    yield


def main(answers: Answers) -> None:
    library = None if why_not_native() else libcuda()
    if library is None:
        for question in ("events in graphs", "cost of marks in graphs", "replays without a synchronisation"):
            answers.add(question, why_not_native() or "neither libcuda.so.1 nor a compiler for the simulated one")
    else:
        bench = Bench(library)
        try:
            reason = bench.prepare()
            ask_events(answers, bench)
            if reason:
                answers.add("cost of marks in graphs", reason, misses=[reason])
            else:
                cost_of_marks(answers, bench)
                count_replays(answers, bench)
        finally:
            bench.close()
    if torch.cuda.is_available():
        compare_with_kernels(answers)


def ask_events(answers: Answers, bench: Bench) -> None:
    """Ask for external events of a graph before its launches, within one, and when a later one is enqueued."""
    graph = bench.capture("external events", 2, 20_000, 2)
    first, last = graph.events
    said = [f"before any launch: query {bench.driver('cuEventQuery', first)}"]
    anchor = bench.driver.new_event(0)
    bench("cuEventRecord", anchor, bench.stream)
    graph.launch()
    time.sleep(0.005)
    statuses = [bench.driver("cuEventQuery", event) for event in (first, last)]
    said.append(f"5 ms into a graph of 40 ms: first {statuses[0]}, last {statuses[1]}")
    graph.launch()
    said.append(f"as another launch was enqueued: first {bench.driver('cuEventQuery', first)}")
    bench("cuStreamSynchronize", bench.stream)
    milliseconds = ctypes.c_float()
    status = bench.driver("cuEventElapsedTime", ctypes.byref(milliseconds), anchor, last)
    said.append(f"from an event outside of the graph {milliseconds.value:.2f} ms (status {status})")
    graph.destroy()
    answers.add("events in graphs", "; ".join(said))


def cost_of_marks(answers: Answers, bench: Bench) -> None:
    """Time replays of graphs of long and of short kernels without and with marks of each sort."""
    shapes = {"50 µs kernels, a mark in 50 µs": (200, 50, 2), "3 µs kernels, a mark each": (1_000, 3, 2)}
    for name, (kernels, microseconds, marked_each) in shapes.items():
        graphs = {
            variant: bench.capture(variant, sized(kernels, 20), microseconds, marked_each) for variant in VARIANTS
        }
        taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
        for graph in graphs.values():
            graph.replay_ns(3)  # the first launch uploads it
        for turn in range(sized(25, 2)):
            order = VARIANTS if turn % 2 else tuple(reversed(VARIANTS))
            for variant in order:
                taken[variant].append(graphs[variant].replay_ns(sized(10, 2)))
        medians = {
            variant: [statistics.median(column) for column in zip(*taken[variant], strict=True)] for variant in VARIANTS
        }
        plain_ns, plain_host_ns = medians["plain"]
        parts = [f"plain {plain_ns / 1e3:.1f} µs, its launch {plain_host_ns / 1e3:.1f} µs of the host"]
        for variant in VARIANTS[1:]:
            added = (medians[variant][0] - plain_ns) / graphs[variant].marks
            parts.append(
                f"{variant} {medians[variant][0] / plain_ns - 1:+.2%}, {added:+.0f} ns a mark, launch "
                f"{(medians[variant][1] - plain_host_ns) / 1e3:+.1f} µs, instantiation "
                f"{(graphs[variant].instantiated_ns - graphs['plain'].instantiated_ns) / 1e3:+.0f} µs"
            )
        share, per_stamp = medians["stamps"][0] / plain_ns, (medians["stamps"][0] - plain_ns) / graphs["stamps"].marks
        misses = [f"a stamp adds {per_stamp:.0f} ns"] if per_stamp > MOST_NS_PER_STAMP else []
        if microseconds >= 50 and share > MOST_SHARE:
            misses.append(f"replays take {share - 1:.1%} longer")
        answers.add("cost of marks in graphs", f"{name}: {'; '.join(parts)}", misses=misses)
        for graph in graphs.values():
            graph.destroy()


def count_replays(answers: Answers, bench: Bench) -> None:
    """Count of how many of many replays without a synchronisation the times are read: by stamps, and by events."""
    replays_made = sized(500, 40)
    graph = bench.capture("stamps", 20, 50, 2)
    lost_before = bench.core.stamps_lost()
    for _ in range(replays_made):
        graph.launch()
    stamps: dict[int, Any] = {}  # by replay
    deadline = time.monotonic() + 10
    while len(stamps) < replays_made and time.monotonic() < deadline:
        for graph_id, replay, _, times in bench.core.take_stamps():
            if graph_id == graph.id:
                stamps[replay] = np.frombuffer(times, np.int64)
        bench.driver("cuStreamQuery", bench.stream)
        time.sleep(0.0005)
    lost = bench.core.stamps_lost() - lost_before
    whole = [times for times in stamps.values() if (times >= 0).all()]
    took = [int(times.max() - times.min()) / 1e3 for times in whole]
    events = by_events(bench, replays_made)
    misses = [] if len(whole) == replays_made else [f"stamps of {replays_made - len(whole)} replays are missing"]
    answers.add(
        "replays without a synchronisation",
        f"{replays_made} replays: stamps of {len(whole)}, lost {lost}, {statistics.median(took or [0.0]):.0f} µs from "
        f"the first to the last in the median; external events, asked each millisecond, of {events}",
        misses=misses,
    )
    graph.destroy()


def by_events(bench: Bench, replays_made: int) -> int:
    """Return of how many replays a reader of external events sees the last one, by its distance from an anchor."""
    graph = bench.capture("external events", 20, 50, 10)
    anchor = bench.driver.new_event(0)
    bench("cuEventRecord", anchor, bench.stream)
    seen: set[float] = set()
    milliseconds = ctypes.c_float()

    def look() -> None:
        if bench.driver("cuEventQuery", graph.events[-1]) == 0:
            status = bench.driver("cuEventElapsedTime", ctypes.byref(milliseconds), anchor, graph.events[-1])
            if status == 0:
                seen.add(milliseconds.value)

    for at in range(replays_made):
        graph.launch()
        if at % 10 == 0:
            look()
    deadline = time.monotonic() + 2
    while bench.driver("cuStreamQuery", bench.stream) != 0 and time.monotonic() < deadline:
        look()
        time.sleep(0.001)
    look()
    graph.destroy()
    return len(seen)


def compare_with_kernels(answers: Answers) -> None:
    """Compare stamps of two NCCL ranks with kernels of torch.profiler, and results and steps with those without."""
    for backend in BACKENDS:
        outputs = {variant: answers.output / f"{backend}-{variant}" for variant in (OFF, "replays", STAMPS)}
        # One after the other: their steps are timed.
        failures = {variant: failure(backend, variant, output) for variant, output in outputs.items()}
        failed = [f"{variant}: {text}" for variant, text in failures.items() if text]
        if failed:
            answers.add("stamps against kernels", f"{backend}: not recorded", NATIVE, misses=failed)
            continue
        misses, figures = [], []
        for rank in range(2):
            misses += [f"rank {rank}: {miss}" for miss in replays.misses(outputs[STAMPS], outputs[OFF], rank)]
            compared = replays.stamps_against_kernels(outputs[STAMPS], rank)
            misses += [f"rank {rank}: {miss}" for miss in compared.misses]
            figures.append(f"rank {rank}: {compared.figures}")
        steps = {variant: replays.step_ms(output, 0) for variant, output in outputs.items()}
        figures.append("steps " + ", ".join(f"{variant} {ms:.2f} ms" for variant, ms in steps.items()))
        answers.add("stamps against kernels", f"{backend}: {'; '.join(figures)}", NATIVE, misses=misses)


def failure(backend: str, variant: str, output: Path) -> str:
    """Run the program; return the end of what it printed if it failed, else nothing."""
    chosen = environment(OFF if variant == OFF else NATIVE, output)
    graphs = {} if variant == OFF else {"COMMTRACE_GRAPHS": variant}
    try:
        run_job(["graph_replays.py", output, backend], chosen | graphs, ranks=2, timeout=JOB_SECONDS)
    except RuntimeError as error:
        return str(error)[-300:]
    return ""


if __name__ == "__main__":
    run_stage(main, __doc__)
