"""What a call costs the thread that makes it: without commtrace, with each engine and with torch.profiler, in turns.

    python -m tests.gpu.stages.call_costs OUTPUT

One rank, so that nobody is waited for. Wall time, as waiting for the GIL counts too: bursts of calls with pauses
between, before each of which the device is idle, and many calls without a pause. ``OUTPUT/figures.json`` has every
burst.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

import commtrace
from bench.engines import OFF, PROFILER, engines, recording
from bench.thread_time import native_threads_ns, python_threads_ns
from commtrace import _native
from commtrace.capture.device.clock import CudaClock
from commtrace.recording.options import NATIVE
from tests.gpu.stages.stage import Answers, run_stage, sized, start_one_rank, synchronize

SECONDS: Final = 95.0
"""No turn begins that would end later."""
TURNS: Final = 3
CALLS_OF_A_BURST: Final = 100
PAUSE_SECONDS: Final = 0.02
SPIN_SECONDS: Final = 0.7
"""Longer than between two passes of commtrace's thread."""
MOST_ADDED_US: Final = {("all_reduce", NATIVE): 6.0, ("all_reduce, async + wait", NATIVE): 9.0}
MOST_GIL_SHARE: Final = 0.002

Operation = Callable[[], object]


class Cost(NamedTuple):
    """Of an operation in one turn of a variant, ns per call.

    Attributes:
        bursts: wall time of each burst.
        burst_cpu: CPU time of this thread in them, mean.
        endless: wall time without pauses, mean.
    """

    bursts: list[float]
    burst_cpu: float
    endless: float


class ThreadTime(NamedTuple):
    """Of commtrace's threads in one turn of a variant, ns.

    Attributes:
        wall: of all the bursts, pauses included.
        python: CPU time of threads that may hold the GIL.
        native: CPU time of threads that never hold it.
        lost: what a thread that spins in Python lost behind a burst: the GIL was held for so long.
        calls: in the bursts.
    """

    wall: int
    python: int
    native: int
    lost: int
    calls: int


def main(answers: Answers) -> None:
    device = start_one_rank()
    operations = communication(device)
    variants = [OFF, *engines(), PROFILER]
    costs: dict[str, dict[str, list[Cost]]] = {name: {variant: [] for variant in variants} for name in operations}
    threads: dict[str, list[ThreadTime]] = {variant: [] for variant in variants}
    for operation in operations.values():
        calls_without_pause(operation, 200)  # loads kernels
    begin = time.monotonic()
    for turn in range(sized(TURNS, 1)):
        if turn and (time.monotonic() - begin) * (turn + 1) / turn > SECONDS:
            break
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            with recording(variant, answers.output / f"{variant}-{turn}"):
                threads[variant].append(one_turn(operations, variant, costs))
        (answers.output / "figures.json").write_text(json.dumps({"costs": costs, "threads": threads}))
    for name, by_variant in costs.items():
        for variant in variants[1:]:
            tell(answers, name, variant, by_variant)
    for engine in engines():
        tell_of_threads(answers, engine, threads)
    answers.add("cost of a mark and of its parts", "; ".join(parts_of_a_mark(answers, device)))
    dist.destroy_process_group()


def communication(device: torch.device) -> dict[str, Operation]:
    """Return what is measured; a span of the script stands for two marks."""
    tensor, gathered = torch.ones(1024, device=device), torch.ones(1024, device=device)
    group: Any = dist.distributed_c10d

    def waited() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    def span() -> None:
        with commtrace.span("two marks"):
            pass

    operations: dict[str, Operation] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async + wait": waited,
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "span, two marks": span,
    }
    if device.type == "cuda":  # gloo has no flat ones for a single rank in all versions
        operations["all_gather_into_tensor"] = lambda: group.all_gather_into_tensor(gathered, tensor)
        operations["reduce_scatter_tensor"] = lambda: group.reduce_scatter_tensor(gathered, tensor)
    return operations


def one_turn(operations: Mapping[str, Operation], variant: str, costs: dict[str, dict[str, list[Cost]]]) -> ThreadTime:
    """Measure every operation, and what the threads of commtrace do meanwhile."""
    for operation in operations.values():
        calls_without_pause(operation, 20)
    time.sleep(SPIN_SECONDS)  # files are open, the first marks are resolved
    wall = time.perf_counter_ns()
    python, native = python_threads_ns(), native_threads_ns()
    bursts = sized(25, 3)
    in_bursts = {name: measured_bursts(operation, bursts) for name, operation in operations.items()}
    wall = time.perf_counter_ns() - wall
    python, native = python_threads_ns() - python, native_threads_ns() - native
    # torch.profiler keeps all that it sees, and sorts it out at its end.
    endless_calls = sized(3_000 if variant != PROFILER else 300, 100)
    for name, operation in operations.items():
        endless = calls_without_pause(operation, endless_calls)[0]
        costs[name][variant].append(Cost(*in_bursts[name], endless))
        synchronize()
        time.sleep(PAUSE_SECONDS)
    calls_without_pause(operations["all_reduce, async + wait"], sized(2_000 if variant != PROFILER else 200, 100))
    synchronize()
    return ThreadTime(wall, python, native, lost_by_a_spinning_thread(), bursts * CALLS_OF_A_BURST * len(operations))


def measured_bursts(operation: Operation, bursts: int) -> tuple[list[float], float]:
    """Return ns per call of each burst, and the mean CPU time."""
    taken, cpu = [], 0.0
    for _ in range(bursts):
        synchronize()
        time.sleep(PAUSE_SECONDS)
        wall, busy = calls_without_pause(operation, CALLS_OF_A_BURST)
        taken.append(wall)
        cpu += busy
    return taken, cpu / bursts


def calls_without_pause(operation: Operation, calls: int) -> tuple[float, float]:
    """Return wall and CPU time of this thread, ns per call."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(calls):
        operation()
    return (time.perf_counter_ns() - wall) / calls, (time.thread_time_ns() - cpu) / calls


def lost_by_a_spinning_thread() -> int:
    """Spin in Python; return for how long another thread kept this one from it, ns. True where cores are idle."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    deadline = wall + int(SPIN_SECONDS * 1e9)
    while time.perf_counter_ns() < deadline:
        pass
    return (time.perf_counter_ns() - wall) - (time.thread_time_ns() - cpu)


def tell(answers: Answers, name: str, variant: str, costs: Mapping[str, Sequence[Cost]]) -> None:
    """Answer for an operation and a variant: what is added in the same turn, medians."""
    pairs = list(zip(costs[variant], costs[OFF], strict=True))
    added = [statistics.median(cost.bursts) - statistics.median(off.bursts) for cost, off in pairs]
    endless = [cost.endless - off.endless for cost, off in pairs]
    cpu = [cost.burst_cpu - off.burst_cpu for cost, off in pairs]
    plain = statistics.median(statistics.median(off.bursts) for off in costs[OFF])
    least = min(min(cost.bursts) for cost in costs[variant])
    text = (
        f"{plain / 1e3:.1f} µs off; {us(added)} (turns {min(added) / 1e3:+.1f} to {max(added) / 1e3:+.1f}; least burst "
        f"{least / 1e3:.1f}); {us(endless)} without pauses; {us(cpu)} of CPU"
    )
    question = "cost of a span, two marks" if name.startswith("span") else f"cost of a call: {name}"
    most = MOST_ADDED_US.get((name, variant))
    misses = None
    if most is not None and torch.cuda.is_available():
        misses = [] if statistics.median(added) <= most * 1e3 else [f"the aim is {most:+.0f} µs"]
    answers.add(question, text, variant, misses=misses)


def us(added_ns: Sequence[float]) -> str:
    return f"{statistics.median(added_ns) / 1e3:+.1f} µs"


def tell_of_threads(answers: Answers, engine: str, threads: Mapping[str, Sequence[ThreadTime]]) -> None:
    """Answer on the threads of an engine."""
    share = statistics.median(turn.python / turn.wall for turn in threads[engine])
    native = statistics.median(turn.native / turn.wall for turn in threads[engine])
    rate = statistics.median(turn.calls / turn.wall * 1e9 for turn in threads[engine])
    lost = statistics.median(turn.lost for turn in threads[engine]) - statistics.median(
        turn.lost for turn in threads[OFF]
    )
    text = (
        f"at {rate:.0f} calls/s: Python threads {share:.2%} of the time, the most that they hold the GIL; native ones "
        f"{native:.2%}; behind 2,000 calls a thread that spins in Python lost {lost / 1e6:.2f} ms more than without"
    )
    misses = None
    if engine == NATIVE and torch.cuda.is_available():
        misses = [] if share <= MOST_GIL_SHARE else [f"the aim is {MOST_GIL_SHARE:.1%} with the GIL"]
    answers.add("threads of commtrace", text, engine, misses=misses)


def parts_of_a_mark(answers: Answers, device: torch.device) -> list[str]:
    """Return what a mark of each engine and the calls in that of Python take, by name."""
    parts: dict[str, Operation] = {}
    if device.type == "cuda":
        cuda: Any = torch.cuda
        event, stream = cuda.Event(enable_timing=True), cuda.current_stream()
        parts = {
            "torch.cuda.current_stream": lambda: cuda.current_stream(0),
            "Event.record": lambda: event.record(stream),
            "current_device": cuda.current_device,
            "is_current_stream_capturing": cuda.is_current_stream_capturing,
            "_cuda_getCurrentRawStream": lambda: torch._C._cuda_getCurrentRawStream(0),
            "Event.query": event.query,
        }
    taken = {"CudaClock.mark": marks_in_python(CudaClock())}
    if NATIVE in engines():
        taken["core.mark"] = marks_in_c(answers)
    for name, part in parts.items():
        part()
        synchronize()
        taken[name] = statistics.median(calls_without_pause(part, CALLS_OF_A_BURST)[0] for _ in range(sized(25, 3)))
    return [f"{name} {nanoseconds / 1e3:.2f} µs" for name, nanoseconds in taken.items()]


def marks_in_python(clock: CudaClock) -> float:
    """Return ns per mark of the Python engine, with events from its pool, as in a job."""
    taken = []
    for turn in range(sized(26, 4)):
        begin = time.perf_counter_ns()
        marks = [clock.mark() for _ in range(CALLS_OF_A_BURST)]
        if turn:  # the first one makes the events
            taken.append((time.perf_counter_ns() - begin) / CALLS_OF_A_BURST)
        synchronize()
        clock.refresh()
        for mark in marks:
            clock.resolve(mark)
    return statistics.median(taken)


def marks_in_c(answers: Answers) -> float:
    """Return ns per mark of the native engine, called from Python, while it records."""
    core, _ = _native.load()
    assert core is not None
    with recording(NATIVE, answers.output / "marks"):
        with commtrace.step(0), commtrace.span("opens the device"):
            dist.all_reduce(torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu"))
        calls_without_pause(core.mark, CALLS_OF_A_BURST)
        return statistics.median(measured_bursts(core.mark, sized(25, 3))[0])


if __name__ == "__main__":
    run_stage(main, __doc__)
