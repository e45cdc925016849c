"""Inject faults into real jobs of four ranks (gloo), one after the other, and ask commtrace who it was.

    python bench/stragglers_real.py                       # all faults: two jobs, about ten minutes
    python bench/stragglers_real.py --job pipeline -v     # one of the jobs, with the sentences that were said

Work is mostly sleep, so that four ranks need a small part of two cores. Every fault lasts for some steps, and has as
many steps without a fault behind it. Every rank notes with a clock of its own, not with commtrace's spans, when its
steps end: the true cost is the median step with the fault less the median step in the pauses beside it. *Live* is what
the monitor told in `monitor.jsonl` meanwhile; *offline* asks `find_stragglers` about these steps, as
`commtrace straggler --steps A:B` does. What counts as a hit is said in bench/stragglers.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    import torch

    from bench.stragglers import Answer, Named

RANKS: Final = 4
WARM_UP: Final = 60
STEPS: Final = 150
"""Of each fault, and of the pause behind it: longer than the monitor needs to name and to clear, 8 to 15 s."""

SETTLED: Final = 5
"""Steps at either end of a stretch that are left out of its mean."""

SECONDS_TO_CLEAR: Final = 14.0
REPLICAS, PIPELINE = "replicas", "pipeline"

TWO_HOSTS: Final = 'export COMMTRACE_NODE_ID=$([ $LOCAL_RANK -lt 2 ] && echo a || echo b); exec "$@"'
"""Ranks 0 and 1 are on host a, 2 and 3 on host b."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a rank takes for what, seconds.

    Attributes:
        forward, backward, data: of a step.
        launch: nothing at all, between forward and backward.
        wait: longer than the message needs, in each wait for the one that it receives.
        send: before its message leaves, inside the send.
        evaluation: a model in evaluation mode, in every step.
        save: of a checkpoint in every 40th step.
        garbage: cycles that are collected in every step.
    """

    forward: float = 0.03
    backward: float = 0.06
    data: float = 0.002
    launch: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    garbage: int = 0


def slower(percent: float) -> Pace:
    return Pace(forward=0.03 * (1 + percent / 100), backward=0.06 * (1 + percent / 100))


@dataclass(frozen=True, slots=True)
class RealFault:
    """A fault of a real job.

    Attributes:
        job: in which.
        name: of the fault.
        pace: of the ranks that have it.
        causes: words that are right.
        places: likewise; empty where all are.
        link: both of its ends, where nothing tells whether it is the link or the rank that has the fault.
    """

    job: str
    name: str
    pace: Mapping[int, Pace]
    causes: tuple[str, ...] = ("compute",)
    link: frozenset[int] = frozenset()
    places: tuple[str, ...] = ()

    @property
    def ranks(self) -> frozenset[int]:
        """None but these may be named."""
        return self.link | frozenset(self.pace)

    def is_cause(self, cause: str, place: str) -> bool:
        """Whether cause and place were said as they are."""
        return cause in self.causes and (not self.places or place in self.places)

    def count_until_found(self, named: Sequence[Named]) -> int:
        """As that of bench/stragglers.py."""
        from bench.stragglers import count_until_found

        guilty = [frozenset(self.pace), *([self.link] if self.link else [])]
        return max(count_until_found(self.causes, ranks, named) for ranks in guilty)


FAULTS: Final = (
    RealFault(REPLICAS, "one rank 20 %", {2: slower(20)}),
    RealFault(REPLICAS, "one rank 50 %", {0: slower(50)}),
    RealFault(REPLICAS, "two of 4 alike, 40 %", {1: slower(40), 3: slower(40)}),
    RealFault(REPLICAS, "two of 4, 50 and 25 %", {0: slower(50), 3: slower(25)}),
    RealFault(REPLICAS, "one host of two, 30 %", {2: slower(30), 3: slower(30)}, places=("host",)),
    RealFault(REPLICAS, "three of 4, 40 %", {0: slower(40), 1: slower(40), 2: slower(40)}),
    RealFault(REPLICAS, "forward 80 %", {3: Pace(forward=0.054)}, ("forward",)),
    RealFault(REPLICAS, "backward 40 %", {1: Pace(backward=0.084)}, ("backward",)),
    RealFault(REPLICAS, "data 25 ms", {1: Pace(data=0.027)}, ("data",)),
    RealFault(REPLICAS, "garbage collection", {3: Pace(garbage=5_000)}, ("gc",)),
    RealFault(REPLICAS, "late launch 25 ms", {2: Pace(launch=0.025)}, ("late_launch",)),
    RealFault(REPLICAS, "checkpoint 1 s, every 40th step", {0: Pace(save=1.0)}, ("checkpoint",)),
    RealFault(REPLICAS, "evaluation 30 ms", {1: Pace(evaluation=0.03)}, ("evaluation",)),
    RealFault(PIPELINE, "uneven stage 40 %", {2: slower(40), 3: slower(40)}, ("stage_imbalance",)),
    RealFault(PIPELINE, "one rank of a stage 50 %", {1: slower(50)}),
    RealFault(PIPELINE, "slow sends 12 ms, 0 to 2", {0: Pace(send=0.012)}, ("communication",), frozenset({0, 2})),
    RealFault(PIPELINE, "slow receives 12 ms, 1 to 3", {3: Pace(wait=0.012)}, ("communication",), frozenset({1, 3})),
    RealFault(PIPELINE, "a rank of each stage 40 %", {0: slower(40), 3: slower(40)}),
)


def first_step(number: int) -> int:
    """Of the fault of this number in its job."""
    return WARM_UP + 2 * STEPS * number


# A rank


def train(job: str, folder: Path) -> None:
    """One rank: all faults of a job."""
    delay = _delay_messages()
    import torch
    import torch.distributed as dist

    import commtrace
    import commtrace.auto

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    faults = [fault for fault in FAULTS if fault.job == job]
    step = _replica() if job == REPLICAS else _stage(rank, delay)
    with (folder / f"rank-{rank}.jsonl").open("w", buffering=1) as notes:
        for number in range(first_step(len(faults))):
            stretch, place = divmod(number - WARM_UP, STEPS)
            is_faulty = number >= WARM_UP and stretch % 2 == 0
            pace = faults[stretch // 2].pace.get(rank, Pace()) if is_faulty else Pace()
            with commtrace.step(number):
                step(pace, place)
            notes.write(f"{time.time()}\n")
    dist.destroy_process_group()


@dataclass(slots=True)
class _Delay:
    """What is slept in messages, seconds."""

    wait: float = 0.0
    send: float = 0.0


Step: TypeAlias = Callable[["Pace", int], None]
"""Trains a step at a pace; the number is its place in its stretch."""


def _delay_messages() -> _Delay:
    """Make waits and sends last as much longer as the result says.

    Before commtrace replaces the methods, so that the delay is part of what it sees.
    """
    from torch import distributed

    groups: Any = distributed.ProcessGroup
    works: Any = distributed.Work
    wait, send, delay = works.wait, groups.send, _Delay()

    def slow_wait(work: object, *arguments: object, **keywords: object) -> object:
        finished = wait(work, *arguments, **keywords)
        time.sleep(delay.wait)
        return finished

    def slow_send(group: object, *arguments: object, **keywords: object) -> object:
        time.sleep(delay.send)
        return send(group, *arguments, **keywords)

    works.wait, groups.send = slow_wait, slow_send
    return delay


def _replica() -> Step:
    """A step of a data-parallel job: DDP, a loader, an optimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    now = [Pace()]

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: object, values: torch.Tensor) -> torch.Tensor:
            time.sleep(now[0].forward)
            return values.clone()

        @staticmethod
        def backward(context: object, *gradients: torch.Tensor) -> torch.Tensor:
            time.sleep(now[0].backward)
            return gradients[0]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = Sleep.apply(self.linear(batch))  # type: ignore[no-untyped-call]
            return output

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                time.sleep(now[0].data)
                yield torch.ones(8, 64)

    class Slow:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            time.sleep(now[0].save)
            return dict, ()

    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(torch.utils.data.DataLoader(Batches(), batch_size=None))
    path = Path(tempfile.mkdtemp()) / "checkpoint.pt"

    def step(pace: Pace, place: int) -> None:
        now[0] = pace
        loss = model(next(batches)).square().mean()
        time.sleep(pace.launch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if pace.garbage:
            _collect(pace.garbage)
        if pace.evaluation:
            model.eval()
            time.sleep(pace.evaluation)
            model.train()  # type: ignore[no-untyped-call]
        if pace.save and place % 40 == 20:
            torch.save(Slow(), path)

    return step


def _stage(rank: int, delay: _Delay) -> Step:
    """A step of two stages of two replicas, one microbatch: the pipeline's messages, the reduction of gradients."""
    import torch
    import torch.distributed as dist

    from commtrace.recording import session
    from commtrace.trace import schema

    stage, replica = divmod(rank, 2)
    pipelines = [dist.new_group([first, first + 2], group_desc="pp") for first in (0, 1)]
    replicas = [dist.new_group([first, first + 1], group_desc="dp") for first in (0, 2)]
    pipeline, other = pipelines[replica], (rank + 2) % RANKS
    assert session._current is not None
    tracer = session._current.tracer
    tracer.set_topology({"coordinates": {"tp": 0, "pp": stage, "dp": replica}, "parallel": {"tp": 1, "pp": 2, "dp": 2}})
    activations = torch.ones(1000)

    def work(kind: int, name: str, seconds: float) -> None:
        phase = tracer.enter(kind, name)
        time.sleep(seconds)
        tracer.leave(phase)

    def message(operation: Callable[..., object], pace: Pace) -> None:
        delay.wait, delay.send = pace.wait, pace.send
        operation(activations, other, group=pipeline)
        delay.wait = delay.send = 0.0

    def step(pace: Pace, place: int) -> None:
        if stage:
            message(dist.recv, pace)
        work(schema.FORWARD, "forward", pace.forward / 2)
        if not stage:
            message(dist.send, pace)
            message(dist.recv, Pace())
        work(schema.BACKWARD, "backward", pace.backward / 2)
        if stage:
            message(dist.send, Pace())
        dist.all_reduce(torch.ones(100_000), group=replicas[stage])
        dist.all_reduce(torch.ones(1))  # the norm of the gradients
        work(schema.OPTIMIZER, "optimizer", 0.003)

    return step


def _collect(cycles: int) -> None:
    for _ in range(cycles):
        cycle: list[object] = []
        cycle.append(cycle)
    gc.collect()


# The job, and what was said of it


def run_job(job: str, folder: Path) -> None:
    """Train to the end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COMMTRACE_DIR": str(folder / "run"),
        "COMMTRACE_EXPORT": "monitor",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    host = ["--no-python", "bash", "-c", TWO_HOSTS, "bash", sys.executable]
    subprocess.run([*launcher, *host, __file__, "--train", job, str(folder)], env=environment, timeout=1200, check=True)


class Judgement(NamedTuple):
    """A fault, what it cost (ms per step), and what was said of it."""

    fault: RealFault
    true_ms: float
    offline: Answer
    live: Answer


def judge(job: str, folder: Path) -> list[Judgement]:
    """What was said of each fault of a job; prints the false alarms of its pauses."""
    ends = [float(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    file = folder / "run" / "monitor.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    faults = [fault for fault in FAULTS if fault.job == job]
    judged, in_a_fault = [], []
    for number, fault in enumerate(faults):
        first = first_step(number)
        begin, end = ends[first - 1], ends[first + STEPS - 1]
        during = [event for event in events if begin <= event["time"] < end + SECONDS_TO_CLEAR]
        in_a_fault += during
        true_ms = _cost_ms(fault, ends, first)
        judged.append(
            Judgement(
                fault, true_ms, _offline(fault, true_ms, folder, first), _live(fault, true_ms, during, begin, end)
            )
        )
    for event in events:
        if event not in in_a_fault and event["kind"] != "recovered":
            print(f"FALSE, in a pause of the job {job}: {event['sentence']}")
    pauses = [one for number in range(len(faults)) for one in _seconds(ends, first_step(number) + STEPS)]
    print(f"job {job}: {len(ends)} steps; in pauses {1e3 * statistics.median(pauses):.1f} ms (median)")
    return judged


def _seconds(ends: Sequence[float], first: int) -> list[float]:
    """Of each step of a stretch."""
    inner = ends[first + SETTLED : first + STEPS - SETTLED]
    return [end - begin for begin, end in pairwise(inner)]


def _cost_ms(fault: RealFault, ends: Sequence[float], first: int) -> float:
    """By the median step, as other work on the machine holds up single ones; by the mean of what is not in every step.

    The pauses are those before and behind; before the first fault is the warm-up, which does not count.
    """
    around = [first - STEPS, first + STEPS] if first > WARM_UP else [first + STEPS]
    pause = statistics.fmean(statistics.median(_seconds(ends, one)) for one in around)
    is_rare = any(pace.save for pace in fault.pace.values())
    typical = statistics.fmean if is_rare else statistics.median
    return 1e3 * (typical(_seconds(ends, first)) - pause)


def _offline(fault: RealFault, true_ms: float, folder: Path, first: int) -> Answer:
    from bench.stragglers import Named, ranks_in
    from commtrace.analysis.chain import analyse
    from commtrace.analysis.stragglers.search import find_stragglers

    analysis = analyse(folder / "run", f"{first + SETTLED}:{first + STEPS - SETTLED}")
    judgement = find_stragglers(analysis.run, analysis.matches)
    named = [
        Named(ranks_in(one.who, one.rank).union(one.ranks), one.who, one.place, one.cause, (one.cost_ns or 0.0) / 1e6,
              f"{one.who}: {one.cause}, {(one.cost_ns or 0.0) / 1e6:.1f} ms. {one.evidence}")
        for one in judgement.slow
    ]  # fmt: skip
    return _answer(
        fault, true_ms, named, (*(finding.evidence for finding in judgement.not_judged), judgement.waited_for)
    )


def _live(fault: RealFault, true_ms: float, events: Sequence[Mapping[str, Any]], begin: float, end: float) -> Answer:
    """The newest of what was said before the pause; the seconds are those until it was right."""
    from bench.stragglers import NAN, Named

    current: dict[str, Named] = {}
    seconds, seconds_to_clear = NAN, NAN
    at_hit: tuple[Named, ...] = ()
    for event in events:
        finding = event["finding"]
        if finding["kind"] != "slow":
            continue
        who = finding["who"]
        if event["kind"] == "found":
            ranks, cost_ms = _named_in(finding), finding["cost_ns"] / 1e6
            current[who] = Named(ranks, who, finding["place"], finding["cause"], cost_ms, event["sentence"])
        else:
            current.pop(who, None)
            seconds_to_clear = event["time_ns"] / 1e9 - end
        named = sorted(current.values(), key=lambda one: -one.cost_ms)
        if not at_hit and fault.count_until_found(named):
            seconds, at_hit = event["time_ns"] / 1e9 - begin, tuple(named)
    sentences = tuple(event["sentence"] for event in events)
    said = at_hit or list(current.values())
    answer = _answer(fault, true_ms, list(said), ())
    found = [event["finding"] for event in events if event["kind"] == "found" and event["finding"]["kind"] == "slow"]
    false = sum(not _named_in(finding) <= fault.ranks for finding in found)
    return replace(answer, seconds=seconds, seconds_to_clear=seconds_to_clear, false_alarms=false, sentences=sentences)


def _named_in(finding: Mapping[str, Any]) -> frozenset[int]:
    """The ranks that the monitor named: of a link both ends."""
    from bench.stragglers import ranks_in

    return ranks_in(finding["who"], (*finding["ranks"], -1)[0]).union(finding["ranks"])


def _answer(fault: RealFault, true_ms: float, named: Sequence[Named], unsaid: Sequence[str]) -> Answer:
    from bench.stragglers import NAN, Answer, is_right

    count = fault.count_until_found(named)
    return Answer(
        hit=bool(count),
        cause=named[0].cause if named else "",
        cause_is_right=bool(named) and fault.is_cause(named[0].cause, named[0].place),
        cost_ms=named[0].cost_ms if count else NAN,
        cost_is_right=bool(count) and is_right(named[0].cost_ms, true_ms),
        false_alarms=sum(not one.ranks <= fault.ranks for one in named),
        sentences=(*(one.sentence for one in named), *(sentence for sentence in unsaid if sentence)),
    )


def report(judged: Sequence[Judgement], verbose: bool) -> None:
    """Print the table."""
    from bench.stragglers import Tally, columns, seconds_or_none

    print(f"{'':44s} {'offline':32s} live")
    print(f"{'fault':36s} {'true ms':>7s} {'hit':4s} {'cause':13s} {'ms':>7s} {'false':>5s}", end="  ")
    print(f"{'hit':4s} {'cause':13s} {'ms':>7s} {'false':>5s} {'named':>7s} {'cleared':>7s}")
    for one in judged:
        print(f"{one.fault.name[:36]:36s} {one.true_ms:7.1f} {columns(one.offline)}  {columns(one.live)} ", end="")
        print(f"{seconds_or_none(one.live.seconds)} {seconds_or_none(one.live.seconds_to_clear)}")
        if verbose:
            print(f"    guilty: {sorted(one.fault.ranks)}, {' or '.join(one.fault.causes)}")
            for way, answer in (("offline", one.offline), ("live", one.live)):
                for sentence in answer.sentences or ("nothing was said",):
                    print(f"    {way}: {sentence}")
    for way, answers in (("offline", [one.offline for one in judged]), ("live", [one.live for one in judged])):
        tally = Tally.of(answers)
        print(
            f"{way}: {tally.hits} of {len(answers)} hit, of these {tally.causes} with the right cause, "
            f"{tally.costs} with the right cost; {tally.false_alarms} false alarms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=(REPLICAS, PIPELINE), action="append", help="Default: both.")
    parser.add_argument("--keep", type=Path, help="A new directory for the runs, or one of a run before with --judge.")
    parser.add_argument("--judge", action="store_true", help="Judge what --keep kept; train nothing.")
    parser.add_argument("-v", "--verbose", action="store_true", help="Print what was said of each fault.")
    options = parser.parse_args()
    judged = []
    with tempfile.TemporaryDirectory() as scratch:
        for job in options.job or (REPLICAS, PIPELINE):
            folder = (options.keep or Path(scratch)) / job
            folder.mkdir(parents=True, exist_ok=options.judge)
            if not options.judge:
                run_job(job, folder)
            judged += judge(job, folder)
    report(judged, options.verbose)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
