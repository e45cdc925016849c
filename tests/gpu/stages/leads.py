"""How far the host is ahead of the device at a mark, where it is known what it must be.

    python -m tests.gpu.stages.leads OUTPUT

Without a GPU the host's clock times spans, which have no leads: that tries this program, and answers nothing.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist

import commtrace
from bench.engines import engines, recorded_rows, recording
from commtrace.trace import schema
from tests.gpu.stages.stage import Answers, run_stage, sized, start_one_rank, synchronize

QUESTION: Final = "leads of marks"
LIMITS_US: Final = (10, 20, 50)

_CYCLES_PER_MS: Final = 1_500_000
"""Of torch.cuda._sleep, about."""


def main(answers: Answers) -> None:
    device = start_one_rank()
    for engine in engines():
        folder = answers.output / f"leads-{engine}"
        with recording(engine, folder):
            time.sleep(0.7)  # the files are open
            marked(device)
            synchronize()
        answers.add(QUESTION, "; ".join(sentences(folder)), engine)
    dist.destroy_process_group()


def marked(device: torch.device) -> None:
    """Take marks in each situation, under the name of a span."""
    situations: dict[str, Callable[[], object]] = {
        "idle stream": lambda: time.sleep(0.002),
        "after gc.collect": gc.collect,
        "after .item()": lambda: torch.ones(8, device=device).sum().item(),
        "after synchronize": synchronize,
    }
    if device.type == "cuda":
        situations["queue of 5 ms"] = lambda: torch.cuda._sleep(5 * _CYCLES_PER_MS)
        situations["first mark after a graph launch"] = graph_of(device).replay
        situations["behind a wait of 2 ms for another stream"] = lambda: wait_for_a_stream(device)
    for name, prepare in situations.items():
        take(name, prepare)
    with hogged():
        take("idle stream beside a thread that holds the GIL", lambda: time.sleep(0.002))


def take(name: str, prepare: Callable[[], object]) -> None:
    for _ in range(sized(60, 3)):
        synchronize()
        with commtrace.span("waits"):  # the mark after the synchronisation that was seen
            pass
        prepare()
        with commtrace.span(name):
            pass


def graph_of(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of a millisecond."""
    tensor, graph = torch.ones(8, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        torch.cuda._sleep(_CYCLES_PER_MS)
    return graph


def wait_for_a_stream(device: torch.device) -> None:
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(2 * _CYCLES_PER_MS)
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def hogged() -> Iterator[None]:
    """Have another thread run Python all the time."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def sentences(folder: object) -> Iterator[str]:
    """Yield a sentence on each situation, from the recording."""
    leads: dict[str, list[int]] = {}
    for row in recorded_rows(str(folder)):
        if row["kind"] == "user":
            leads.setdefault(row["name"], []).append(row["start_lead_us"])
    for name, leads_us in leads.items():
        if name != "waits":
            yield f"{name}: {described(leads_us)}"


def described(leads: Sequence[int]) -> str:
    """Return the distribution of leads, µs, and how many are small by several limits."""
    known = sorted(lead for lead in leads if lead >= schema.LEAST_LEAD_US)
    without = f", {len(leads) - len(known)} of {len(leads)} without" if len(known) < len(leads) else ""
    if not known:
        return f"none known{without}"
    small = ", ".join(f"{sum(lead < known[0] + limit for lead in known)} below +{limit}" for limit in LIMITS_US)
    span = f"least {known[0]} µs, median {statistics.median(known):.0f}, most {known[-1]}"
    return f"{span}; {small} of {len(known)}{without}"


if __name__ == "__main__":
    run_stage(main, __doc__)
