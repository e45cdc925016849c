"""Injects faults of every kind into jobs, and asks commtrace who it was, why, and what it costs.

    python bench/stragglers.py                         # all kinds, without hidden ranks and clean runs
    python bench/stragglers.py --hidden 50 --clean 200 # and those
    python bench/stragglers.py --list                  # the names of the cases
    python bench/stragglers.py --only "half of 4" -v   # one case, with the sentences that were said
    python bench/stragglers.py --only link --ranks 16  # cases with this in their name, of at most so many ranks
    python bench/stragglers.py --only half --seed 7    # the same with other noise
    python bench/stragglers.py --recorded              # without the monitor

Jobs are simulated (docs/synthetic-runs.md), so the guilty ranks, the cause and the true cost are known: the mean step
with the faults less the mean step without them, by the simulation's own schedule. *Offline* asks `find_stragglers` as
`commtrace straggler` does; *live* hands every simulated step to the windows that ranks report and joins them as the
monitor does, by a clock that ticks with the simulation. Real jobs: bench/stragglers_real.py.

A case is a *hit* if the guilty ranks are named before any other rank, and all of them; of a link both of its ends. The
cost is right if it is, of each that is named, within 20 % or 1 ms of what its faults cost when all others are mended:
offline per step of the run, live per step of the stretch (of what strikes every so many steps, up to the next strike).
A *false alarm* is an innocent rank that is named at all. Live, every stretch of steps with the same faults must be
named; *named* and *cleared* are seconds from its begin, and from its end, in the slowest stretch. The monitor gives the
*same name* if the sets that stand at the end of the stretches are those of the verdicts on the recording: the same
ranks or place and the same cause, in the same words.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import analyse
from commtrace.analysis.stragglers.search import Findings, find_stragglers
from commtrace.live.collector import owners
from commtrace.live.gil import GilYield
from commtrace.live.monitoring.findings import FOUND, LiveStraggler
from commtrace.live.monitoring.watch import Watch
from commtrace.live.monitoring.window import Window
from commtrace.live.rank import LiveRank
from commtrace.live.summarise import StepExtras, StepWindow, summarise
from commtrace.live.summary import StepSummary
from commtrace.synth import Fault, Job, Synthetic, synthesize
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row
from commtrace.trace.spans import Spans

MS: Final = 1_000_000
NAN: Final = float("nan")
WINDOW_SECONDS: Final = 4.0
JOIN_DELAY_SECONDS: Final = 1.0
"""The monitor's default window, and how long after its end it compares."""

TOLERANCE: Final = 0.2
TOLERANCE_MS: Final = 1.0

COMPUTE: Final = ("compute",)
HOST: Final = ("host",)
TENSOR: Final = ("tensor_group", "ranks")
STAGE: Final = ("stage_imbalance",)
NETWORK: Final = ("communication",)
SEQUENCES: Final = ("sequence_length_imbalance",)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of fault in a job.

    Attributes:
        family, name: which kind; the name says what is special.
        job: with its faults.
        causes: words that are right; none where nobody must be named.
        places: likewise; empty where all are.
    """

    family: str
    name: str
    job: Job
    causes: tuple[str, ...] = COMPUTE
    places: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nobody must be named."""
        return not self.causes

    @property
    def title(self) -> str:
        return f"{self.family}: {self.name}"

    def is_cause(self, named: Named) -> bool:
        """Whether place and cause were said as they are."""
        return named.cause in self.causes and (not self.places or named.place in self.places)


class Named(NamedTuple):
    """One that was named.

    Attributes:
        ranks: the guilty.
        who, place, cause, cost_ms, sentence: as they were said.
        steps: over how many the cost of a pause is the mean; 0 of what holds in every step.
    """

    ranks: frozenset[int]
    who: str
    place: str
    cause: str
    cost_ms: float
    sentence: str
    steps: int = 0

    def cost_in_ms(self, stretch: Stretch) -> float:
        """Per step of the stretch, which may be far shorter than what a single pause was spread over."""
        return self.cost_ms * max(self.steps, len(stretch.steps)) / len(stretch.steps)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of a case.

    Attributes:
        hit: the guilty were named before anybody else; live, in every stretch.
        cause: of the first one that was named, and whether it is right.
        cost_ms: of the first one that was named; NaN without a hit.
        cost_is_right: so are those of all that were named until all guilty ones were.
        false_alarms: innocent ranks, or groups of them, that were named.
        sentences: what was said.
        names: who was named, and for which cause; live, where the guilty were named last in each stretch.
        seconds: live, until the guilty were named, in the slowest stretch; NaN if they were not.
        seconds_to_clear: live, from the end of a stretch until its ranks were no longer named; NaN if they never were.
    """

    hit: bool
    cause: str
    cause_is_right: bool
    cost_ms: float
    cost_is_right: bool
    false_alarms: int
    sentences: tuple[str, ...]
    names: frozenset[tuple[str, str]] = frozenset()
    seconds: float = NAN
    seconds_to_clear: float = NAN


class Stretch(NamedTuple):
    """Consecutive steps with the same faults.

    Attributes:
        steps: their numbers, from the first to the last.
        begin, end: true seconds.
        ranks: the guilty; none where the fault moves between microbatches.
    """

    steps: range
    begin: float
    end: float
    ranks: frozenset[int]


class Truth:
    """What is true of a simulated case.

    Attributes:
        ranks: the guilty; none where the fault moves between microbatches, or there is none.
        cost_ms: of all faults, per step, mean over the run.
        stretches: in their order.
    """

    def __init__(self, made: Synthetic) -> None:
        self._made = made
        self._steps_of: dict[frozenset[int], Sequence[Mapping[str, int]]] = {}
        self._all = frozenset(range(len(made.job.faults)))
        self._ranks = [frozenset(fault["ranks"]) for fault in made.truth["faults"]]
        self.ranks = frozenset().union(*self._ranks)
        self.stretches = tuple(self._find_stretches())
        self.cost_ms = self._cost_ms(self._all, range(made.job.steps))

    def cost_of_ms(self, ranks: frozenset[int], stretch: Stretch | None = None) -> float:
        """What the faults of these ranks cost when all others are mended, per step of the run or of a stretch."""
        faults = frozenset(at for at in self._all if self._ranks[at] & ranks or not self._ranks[at] | ranks)
        if stretch is None:
            return self._cost_ms(faults, range(self._made.job.steps))
        return self._cost_ms(faults, stretch.steps) * len(stretch.steps) / self._steps_between(faults, stretch)

    def _steps_between(self, faults: frozenset[int], stretch: Stretch) -> int:
        """Of what strikes every so many steps, the steps from each strike to the next; else those of the stretch."""
        (struck,) = {self._made.job.faults[at].steps for at in faults} if len(faults) == 1 else {None}
        if struck is None or struck.every == 1:
            return len(stretch.steps)
        return len(range(struck.first, min(struck.end, stretch.steps.stop), struck.every)) * struck.every

    def _find_stretches(self) -> Iterator[Stretch]:
        steps = self._made.truth["steps"]
        for faults, group in groupby(range(len(steps)), key=self._active):
            if faults:
                numbers = list(group)
                inside = range(numbers[0], numbers[-1] + 1)
                begin, end = steps[inside[0]]["start_ns"] / 1e9, steps[inside[-1]]["end_ns"] / 1e9
                yield Stretch(inside, begin, end, frozenset().union(*(self._ranks[fault] for fault in faults)))

    def _active(self, step: int) -> tuple[int, ...]:
        """The faults of a step; one that strikes every so many steps is there between them, too."""
        return tuple(
            at for at, fault in enumerate(self._made.job.faults) if fault.steps.first <= step < fault.steps.end
        )

    def _cost_ms(self, faults: frozenset[int], steps: range) -> float:
        with_them, without = (self._duration_ns(some, steps) for some in (faults, frozenset[int]()))
        return (with_them - without) / len(steps) / MS

    def _duration_ns(self, faults: frozenset[int], steps: range) -> int:
        """Of consecutive steps of the job with these of its faults."""
        if faults not in self._steps_of:
            job, truth = self._made.job, self._made.truth
            if faults != self._all:
                truth = synthesize(replace(job, faults=tuple(job.faults[at] for at in sorted(faults)))).truth
            self._steps_of[faults] = truth["steps"]
        known = self._steps_of[faults]
        return known[steps[-1]]["end_ns"] - known[steps[0]]["start_ns"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A case, its guilty ranks, what its faults cost per step, and what was said."""

    case: Case
    ranks: frozenset[int]
    cost_ms: float
    offline: Answer
    live: Answer

    @property
    def same_name(self) -> bool:
        """Whether the monitor and the recording name the same sets, places and causes, in the same words."""
        return self.live.hit and self.live.names == self.offline.names


# The jobs: steps of about half a second, so that a minute of training is a hundred steps.


def _job(**sizes: Any) -> Job:
    usual: dict[str, Any] = {
        "microbatches": 4, "steps": 60, "layers": max(2, sizes.get("pp", 1) * sizes.get("chunks", 1)),
        "forward_ns": 40 * MS, "backward_ns": 80 * MS, "optimizer_ns": 10 * MS, "data_ns": 2 * MS,
    }  # fmt: skip
    return Job(**usual | sizes)


def _pipeline(stages: int, replicas: int, **others: Any) -> Job:
    sizes = {"microbatches": 8, "forward_ns": 15 * MS, "backward_ns": 30 * MS, **others}
    return _job(pp=stages, dp=replicas, **sizes)


def _with(job: Job, *faults: str, **changes: Any) -> Job:
    return replace(job, faults=tuple(Fault.parse(fault) for fault in faults), **changes)


def _numbers(ranks: Iterable[int]) -> str:
    return ",".join(map(str, ranks))


DP4, DP8, DP16 = _job(dp=4), _job(dp=8), _job(dp=16)
PP4, PP8, PP2 = _pipeline(4, 2), _pipeline(8, 2, microbatches=16), _pipeline(2, 4)
TP4 = _job(tp=4, dp=4)
ALL = _pipeline(2, 4, tp=2)
NODES = _pipeline(4, 2, gpus_per_host=2, sequence=16_384)
"""Every stage is a host of its own, and messages are large."""


def cases() -> list[Case]:
    """All kinds of faults."""
    return [
        *_one_rank(), *_sets(), *_hosts_and_stages(), *_links(), *_stretches(), *_microbatches(), *_pauses(), *_mixed(),
    ]  # fmt: skip


def _one_rank() -> Iterator[Case]:
    for percent in (5, 10, 20, 50, 100):
        yield Case("one rank", f"{percent} %, 4 ranks", _with(DP4, f"slow-rank=2:{1 + percent / 100}"))
    for jitter in (0.0, 0.02, 0.05, 0.1):
        yield Case("one rank", f"20 %, jitter {jitter:.0%}", _with(DP4, "slow-rank=1:1.2", jitter=jitter))
    yield Case("one rank", "10 %, jitter 5 %", _with(DP8, "slow-rank=5:1.1", jitter=0.05))
    for ranks, steps in ((8, 60), (16, 60), (64, 60), (256, 40), (1_024, 40)):
        yield Case(
            "one rank", f"20 %, {ranks} ranks", _with(_job(dp=ranks, steps=steps), f"slow-rank={ranks // 3}:1.2")
        )
    for percent in (10, 20, 50):
        yield Case("one rank", f"{percent} %, 4 stages", _with(PP4, f"slow-rank=3:{1 + percent / 100}"))
    yield Case("one rank", "20 %, tensor 4", _with(TP4, "slow-rank=6:1.2"))
    yield Case("one rank", "20 %, tensor, pipeline, data", _with(ALL, "slow-rank=11:1.2"))
    yield Case("one rank", "30 %, gpipe", _with(replace(PP4, schedule="gpipe"), "slow-rank=2:1.3"))
    yield Case("one rank", "30 %, interleaved", _with(_pipeline(4, 2, chunks=2), "slow-rank=5:1.3"))
    yield Case("one rank", "30 %, zero-bubble", _with(replace(PP4, schedule="zero-bubble"), "slow-rank=0:1.3"))
    yield Case("one rank", "20 %, overlapped", _with(replace(DP8, overlap_grad_reduce=True), "slow-rank=7:1.2"))
    big = _pipeline(8, 128, microbatches=8, steps=24)
    yield Case("one rank", "30 %, 8 stages of 128", _with(big, "slow-rank=700:1.3"))
    yield Case("one rank", "30 %, all drift by 4 %", _with(DP8, "slow-rank=3:1.3", jitter=0.02, wander=0.04))
    starved = [f"slow-rank=0:{1.2 + 0.25 * (step % 4)}@{step}:{step + 1}" for step in range(15, 33)]
    yield Case("one rank", "75 %, its only replica starved", _with(_job(dp=2), "slow-rank=1:1.75", *starved))
    yield Case("phase", "forward 50 %", _with(DP8, "slow-forward=4:1.5"), ("forward",))
    yield Case("phase", "backward 30 %", _with(PP4, "slow-backward=4:1.3"), ("backward",))
    yield Case("phase", "optimizer 400 %", _with(DP4, "slow-optimizer=1:5"), ("optimizer",))


def _sets() -> Iterator[Case]:
    yield Case("several", "two of 8 alike", _with(DP8, "slow-rank=1,3:1.5", jitter=0.02))
    yield Case("several", "two of 8, 50 and 40 %", _with(DP8, "slow-rank=1:1.5", "slow-rank=3:1.4", jitter=0.02))
    yield Case("several", "two of 8, 50 and 20 %", _with(DP8, "slow-rank=6:1.5", "slow-rank=0:1.2"))
    yield Case(
        "several", "three of 16", _with(DP16, "slow-rank=2:1.1", "slow-rank=7:1.3", "slow-rank=11:1.6", jitter=0.02)
    )
    yield Case("several", "five of 16 alike", _with(DP16, "slow-rank=0,3,6,9,12:1.3"))
    yield Case("several", "two of 64", _with(_job(dp=64), "slow-rank=10,50:1.25"))
    twenty = f"slow-rank={_numbers(range(500, 520))}:1.2"  # two whole hosts among them
    yield Case("several", "20 of 1,024", _with(_job(dp=1024, steps=30), twenty))
    yield Case("several", "in two stages", _with(PP2, "slow-rank=1:1.4", "slow-rank=6:1.4"))
    for ranks in (2, 4, 8, 16, 64):
        half = _numbers(range(ranks // 2))
        yield Case("half", f"half of {ranks}", _with(_job(dp=ranks), f"slow-rank={half}:1.3"))
    yield Case("half", "half of 8, from the middle on", _with(DP8, "slow-rank=4,5,6,7:1.3@30:60"))
    yield Case("half", "half of each stage", _with(PP2, "slow-rank=0,1,4,5:1.3"))
    yield Case("half", "three of 4", _with(DP4, "slow-rank=1,2,3:1.4"))
    yield Case("tensor group", "20 %", _with(TP4, "slow-rank=4,5,6,7:1.2"), places=TENSOR)
    yield Case("tensor group", "50 %", _with(TP4, "slow-rank=8,9,10,11:1.5"), places=TENSOR)
    yield Case("tensor group", "of a stage", _with(ALL, "slow-rank=10,11:1.3"), places=TENSOR)


def _hosts_and_stages() -> Iterator[Case]:
    for percent in (10, 30):
        job = _with(replace(DP8, gpus_per_host=4), f"slow-host=1:{1 + percent / 100}")
        yield Case("host", f"{percent} %, one of two", job, places=HOST)
    yield Case("host", "20 %, one of four", _with(replace(DP16, gpus_per_host=4), "slow-host=2:1.2"), places=HOST)
    yield Case("host", "50 %, one of 128", _with(_job(dp=1024, steps=30), "slow-host=77:1.5"), places=HOST)
    yield Case("host", "30 %, two of four", _with(replace(DP16, gpus_per_host=4), "slow-host=0,3:1.3"), places=HOST)
    yield Case("host", "5 %, one of eight", _with(_job(dp=64), "slow-host=5:1.05"), places=HOST)
    yield Case("host", "of half of each stage", _with(_pipeline(2, 8, gpus_per_host=4), "slow-host=1:1.3"))
    yield Case("host", "from step 30 on", _with(replace(DP16, gpus_per_host=4), "slow-host=1:1.3@30:60"), places=HOST)
    for factor in (1.1, 1.2, 1.45, 2.0):
        job = _with(PP4, f"uneven-stage=1:{factor}", jitter=0.02)
        yield Case("stage", f"{factor - 1:.0%} more, of 4", job, STAGE)
    yield Case("stage", "30 % more, the last of 8", _with(PP8, "uneven-stage=7:1.3"), STAGE)
    yield Case("stage", "30 % more, the first of 2", _with(PP2, "uneven-stage=0:1.3"), STAGE)
    yield Case("stage", "20 % more, two of 8", _with(PP8, "uneven-stage=0,7:1.2"), STAGE)
    yield Case("stage", "20 % more, 8 of 32", _with(_pipeline(8, 32), "uneven-stage=3:1.2"), STAGE)
    for first in (30, 45):
        job = _with(PP4, f"uneven-stage=1:1.3@{first}:60", jitter=0.02)
        yield Case("stage", f"30 % more, from step {first} on", job, STAGE)
    yield Case("stage", "25 % more, three of 4, late", _with(PP4, "uneven-stage=0,1,3:1.25@30:60", jitter=0.02), STAGE)
    late = _with(PP4, *(f"uneven-stage={stage}:1.2@30:60" for stage in range(3)), jitter=0.02)
    yield Case("stage", "20 % more, the first three of 4, late", late, STAGE)
    yield Case("stage", "one always, one late", _with(PP8, "uneven-stage=2:1.3", "uneven-stage=5:1.4@30:60"), STAGE)
    yield Case("stage", "30 % more, no replicas", _with(_pipeline(4, 1), "uneven-stage=2:1.3"), STAGE)


def _links() -> Iterator[Case]:
    for factor in (4, 10):
        yield Case("link", f"pair, {factor} times", _with(NODES, f"slow-link=2-4:{factor}"), NETWORK)
    yield Case("link", "pair in a tensor group's job", _with(ALL, "slow-link=0-8:30"), NETWORK)
    yield Case("link", "all of a rank", _with(NODES, "slow-link=4:6"), NETWORK)
    yield Case("link", "all of a rank, tensor 4", _with(TP4, "slow-link=5:6"), NETWORK)
    yield Case("link", "sends of one rank", _with(NODES, "slow-send=2:8"), NETWORK)
    yield Case("link", "one direction", _with(NODES, "slow-send=2-4:8"), NETWORK)
    yield Case("link", "one direction, backwards", _with(NODES, "slow-send=4-2:15"), NETWORK)
    yield Case("link", "network of a host", _with(NODES, "slow-network=2:5"), NETWORK)
    for first, factor in ((30, 10), (45, 100)):
        late = _with(NODES, f"slow-link=2-4:{factor}@{first}:60")
        yield Case("link", f"pair, from step {first} on", late, NETWORK)
    yield Case("link", "network of a host, first third", _with(NODES, "slow-network=2:6@0:20"), NETWORK)
    # Which of both ends is slow cannot be told: all ranks that use the network are named.
    late = _with(_pipeline(2, 4, gpus_per_host=4), "slow-network=0:7@30:60", "slow-network=1:7@30:60")
    yield Case("link", "network of both hosts, late", late, NETWORK)
    both = _with(replace(DP8, gpus_per_host=4, sequence=8192), "slow-network=0:3@30:60", "slow-network=1:3@30:60")
    yield Case("link", "all-reduce between two hosts, late", both, NETWORK)


def _stretches() -> Iterator[Case]:
    yield Case("late onset", "last half", _with(DP4, "slow-rank=3:1.5@30:60"))
    yield Case("late onset", "last quarter", _with(DP4, "slow-rank=3:1.5@45:60"))
    yield Case("late onset", "last fifth, 20 %", _with(DP8, "slow-rank=3:1.2@48:60"))
    yield Case("late onset", "last quarter, of a stage", _with(PP4, "slow-rank=5:1.4@45:60"))
    yield Case("recovery", "first half", _with(DP4, "slow-rank=0:1.4@0:30"))
    yield Case("recovery", "from step 12 to 32", _with(DP8, "slow-rank=5:1.3@12:32"))
    yield Case("moving", "every 25 steps", _with(replace(DP4, steps=100), *_moving((3, 0, 2, 1), 25, 1.5)))
    yield Case("moving", "every 30 steps", _with(DP8, *_moving((6, 1), 30, 1.5)))
    yield Case("moving", "every 30 steps, data", _with(DP4, "data=1:150@0:30", "data=2:150@30:60"), ("data",))
    yield Case(
        "coming and going",
        "25 on, 25 off",
        _with(replace(DP4, steps=100), "slow-rank=2:1.5@0:25", "slow-rank=2:1.5@50:75"),
    )
    yield Case("coming and going", "one step in five", _with(DP8, "slow-rank=2:2@3:60:5"))


def _moving(ranks: Sequence[int], steps: int, factor: float) -> list[str]:
    return [f"slow-rank={rank}:{factor}@{at * steps}:{(at + 1) * steps}" for at, rank in enumerate(ranks)]


def _microbatches() -> Iterator[Case]:
    yield Case("one microbatch", "on all replicas", _with(PP4, "long-microbatch=3:3"), SEQUENCES)
    yield Case("one microbatch", "of one replica", _with(PP4, "long-microbatch=3-1:3"), SEQUENCES)
    yield Case("one microbatch", "of one rank", _with(DP8, "long-microbatch=1-6:2"), SEQUENCES)
    late = _with(PP4, "long-microbatch=3-1:3@30:60")
    yield Case("one microbatch", "of one replica, from step 30 on", late, SEQUENCES)
    every = [f"long-microbatch={number}-1:1.3" for number in range(8)]
    yield Case("one microbatch", "all of one replica", _with(PP4, *every, jitter=0.02), SEQUENCES)
    for sigma in (0.15, 0.3, 0.8):
        yield Case("sequences", f"scatter {sigma:.0%}", _with(DP8, f"sequence-imbalance={sigma}"), SEQUENCES)
    yield Case("sequences", "scatter 30 %, 4 stages", _with(PP4, "sequence-imbalance=0.3"), SEQUENCES)


def _pauses() -> Iterator[Case]:
    for ms in (30, 100, 400):
        yield Case("data", f"{ms} ms", _with(DP4, f"data=3:{ms}"), ("data",))
    yield Case("data", "300 ms, every 10th step", _with(DP8, "data=2:300@5:60:10"), ("data",))
    yield Case("data", "100 ms, of a stage", _with(PP4, "data=0:100"), ("data",))
    yield Case("data", "100 ms, of a host", _with(replace(DP16, gpus_per_host=4), "data=4,5,6,7:100"), ("data", "host"))
    yield Case("gc", "50 ms", _with(DP8, "gc=1:50"), ("gc",))
    yield Case("gc", "500 ms, every 10th step", _with(DP4, "gc=2:500@5:60:10"), ("gc",))
    short = _job(dp=4, steps=200, forward_ns=7_500_000, backward_ns=15 * MS, optimizer_ns=MS)
    yield Case("gc", "500 ms, every 2nd step of 100 ms", _with(short, "gc=3:500@60:90:2"), ("gc",))
    yield Case("gc", "50 ms, of a stage", _with(PP4, "gc=5:50"), ("gc",))
    yield Case("checkpoint", "2 s, every 20th step", _with(DP4, "checkpoint=1:2000@19:60:20"), ("checkpoint",))
    yield Case("checkpoint", "8 s, once", _with(DP4, "checkpoint=2:8000@30:31"), ("checkpoint",))
    yield Case("evaluation", "100 ms, every step", _with(DP4, "evaluation=0:100"), ("evaluation",))
    late = ("late_launch",)
    for ms in (20, 60, 150):
        yield Case("late launch", f"{ms} ms", _with(DP4, f"late-launch=1:{ms}"), late)
    yield Case("late launch", "100 ms, of a stage", _with(PP4, "late-launch=2:100"), late)


def _mixed() -> Iterator[Case]:
    """The cause that is named first is that of the costliest."""
    yield Case("mixed", "slow rank, slow input", _with(DP8, "slow-rank=1:1.4", "data=6:60"))
    host = replace(DP16, gpus_per_host=4)
    yield Case("mixed", "slow host, slow rank", _with(host, "slow-host=1:1.4", "slow-rank=13:1.2"), places=HOST)
    yield Case("mixed", "uneven stage, slow rank", _with(PP4, "uneven-stage=1:1.5", "slow-rank=6:1.2"), STAGE)
    both = replace(_pipeline(4, 3), schedule="zero-bubble")
    yield Case(
        "mixed", "zero-bubble, uneven stage, slow rank", _with(both, "uneven-stage=0:1.25", "slow-rank=7:1.2"), STAGE
    )
    hosts = _pipeline(2, 6, gpus_per_host=4, sequence=16_384)
    yield Case("mixed", "slow host, slow link", _with(hosts, "slow-host=0:1.3", "slow-link=5-11:8"), NETWORK)
    yield Case("mixed", "slow rank, slow link", _with(NODES, "slow-rank=7:1.3", "slow-link=0-2:4"))


def hidden(count: int, seed: int) -> Iterator[Case]:
    """One rank in a job of random size and noise, slow by two to five times the noise (and 5 % at least)."""
    random = np.random.default_rng([seed, 1])
    for number in range(count):
        job = _random_job(random)
        noise = float(random.choice([0.01, 0.02, 0.05, 0.1]))
        excess = max(noise * random.uniform(2, 5), random.uniform(0.06, 0.2))
        rank = int(random.integers(job.world_size))
        name = f"{number}: {excess:.0%} of rank {rank}, jitter {noise:.0%}, tp {job.tp} pp {job.pp} dp {job.dp}"
        job = replace(job, jitter=noise, seed=int(random.integers(2**31)))
        yield Case("hidden", name, _with(job, f"slow-rank={rank}:{1 + excess:.4f}"))


def clean(count: int, seed: int) -> Iterator[Case]:
    """Nothing is wrong; in some the speed of healthy ranks drifts, or the input of all ranks stalls now and then."""
    random, drifts = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 3])
    for number in range(count):
        job, noise = _random_job(random), float(random.choice([0.0, 0.01, 0.02, 0.05, 0.1, 0.2]))
        wander = float(drifts.choice([0.0, 0.0, 0.02, 0.04, 0.05]))
        chance, ms = ((0.0, 0), (0.0, 0), (0.02, 500), (0.1, 100))[int(drifts.integers(4))]
        name = f"{number}: jitter {noise:.0%}, drift {wander:.0%}, tp {job.tp} pp {job.pp} dp {job.dp}"
        name += f", stalls of {ms} ms in {chance:.0%}" if chance else ""
        job = replace(job, jitter=noise, wander=wander, seed=int(random.integers(2**31)))
        yield Case("clean", name, _with(job, *_stalls(job, chance, ms, drifts)), causes=())


def _stalls(job: Job, chance: float, ms: int, random: np.random.Generator) -> list[str]:
    """Input that keeps each rank waiting in some steps, by chance."""
    struck = np.argwhere(random.random((job.steps, job.world_size)) < chance).tolist()
    return [f"data={rank}:{ms}@{step}:{step + 1}" for step, rank in struck]


def _random_job(random: np.random.Generator) -> Job:
    jobs = (DP4, DP8, DP16, TP4, PP4, PP2, ALL, _job(dp=32), _pipeline(4, 4), replace(DP16, gpus_per_host=4))
    return jobs[int(random.integers(len(jobs)))]


# A run of a case


NOT_ASKED: Final = Answer(
    hit=False, cause="", cause_is_right=False, cost_ms=NAN, cost_is_right=False, false_alarms=0, sentences=()
)


def judge(case: Case, seed: int | None = None, *, is_live: bool = True) -> Judged:
    """Simulate a case and ask both ways, or only what a recording tells."""
    made = synthesize(case.job if seed is None else replace(case.job, seed=seed))
    truth, run = Truth(made), made.run
    on = live(case, truth, run) if is_live else NOT_ASKED
    return Judged(case, truth.ranks, truth.cost_ms, offline(case, truth, run), on)


def offline(case: Case, truth: Truth, run: Run) -> Answer:
    """What the analysis of the files says."""
    analysis = analyse(run)
    findings = find_stragglers(analysis.run, analysis.matches)
    named = [
        Named(ranks_in(verdict.who, verdict.rank).union(verdict.ranks), verdict.who, verdict.place, verdict.cause,
              verdict.cost_ms_per_step,
              f"{verdict.who}: {verdict.cause}, {verdict.cost_ms_per_step:.1f} ms. {verdict.evidence}")
        for verdict in findings.verdicts
    ]  # fmt: skip
    return _answer(case, truth, named, tuple(_unsaid(findings)))


def _unsaid(findings: Findings) -> Iterator[str]:
    yield from findings.abstentions
    if findings.waited_for:
        yield findings.waited_for


class Join(NamedTuple):
    """What the monitor said at the end of a window: who is slow now, and what is new."""

    at: float
    named: list[Named]
    found: list[Named]
    sentences: list[str]


def live(case: Case, truth: Truth, run: Run) -> Answer:
    """What the monitor says while the job runs."""
    joins = list(_joins(run))
    sentences = tuple(f"[{join.at:.0f} s] {sentence}" for join in joins for sentence in join.sentences)
    found = [one for join in joins for one in join.found]
    stretches = () if case.is_clean else truth.stretches
    ends = [*(stretch.begin for stretch in stretches[1:]), float("inf")]
    heard = [_heard(case, truth, stretch, until, joins) for stretch, until in zip(stretches, ends, strict=False)]
    seconds_to_clear = [one.seconds_to_clear for one in heard if one.seconds_to_clear == one.seconds_to_clear]
    first = next((one.first for one in heard if one.first is not None), found[0] if found else None)
    return Answer(
        hit=not found if case.is_clean else all(one.hit for one in heard),
        cause=first.cause if first else "",
        cause_is_right=first is not None and case.is_cause(first),
        cost_ms=heard[0].cost_ms if heard else NAN,
        cost_is_right=all(one.cost_is_right for one in heard),
        false_alarms=sum(_is_false(case, truth, one) for one in found),
        sentences=sentences,
        names=frozenset().union(*(one.names for one in heard)),
        seconds=max((one.seconds for one in heard), default=NAN) if all(one.hit for one in heard) else NAN,
        seconds_to_clear=max(seconds_to_clear, default=NAN),
    )


def _joins(run: Run) -> Iterator[Join]:
    """Hand the steps of all ranks to their windows, by a clock that shows the simulation's time."""
    watch = Watch(run.world_size, WINDOW_SECONDS)
    ranks = [LiveRank(trace.metadata, Path("run")) for trace in run.ranks.values()]
    for rank, trace in zip(ranks, run.ranks.values(), strict=True):
        _tell(rank, trace)
    steps = [deque(steps_of(rank, run.ranks[rank.rank], run.names)) for rank in ranks]
    windows = [Window(rank) for rank in ranks]
    for number in range(1, int(max(own[-1].summary.end_ns for own in steps) / 1e9 / WINDOW_SECONDS) + 1):
        now_ns = round(number * WINDOW_SECONDS * 1e9)
        for window, own in zip(windows, steps, strict=True):
            while own and own[0].summary.end_ns <= now_ns:
                window.add(*own.popleft())
        at = now_ns / 1e9 + JOIN_DELAY_SECONDS
        events = watch.join([window.close(number, now_ns) for window in windows], at)
        found = [_named_live(event.straggler) for event in events if event.kind == FOUND and event.straggler]
        yield Join(at, [_named_live(one) for one in watch.stragglers], found, [event.sentence for event in events])


class _Heard(NamedTuple):
    """What the monitor said of a stretch."""

    hit: bool
    first: Named | None
    cost_ms: float
    cost_is_right: bool
    seconds: float
    seconds_to_clear: float
    names: frozenset[tuple[str, str]] = frozenset()


def _heard(case: Case, truth: Truth, stretch: Stretch, until: float, joins: Sequence[Join]) -> _Heard:
    """What was said of a stretch; the next one begins at ``until``."""
    inside = [join for join in joins if stretch.begin < join.at - JOIN_DELAY_SECONDS < stretch.end + WINDOW_SECONDS]
    hits = [(join, count) for join in inside if (count := count_until_found(case.causes, stretch.ranks, join.named))]
    if not hits:
        return _Heard(hit=False, first=None, cost_ms=NAN, cost_is_right=False, seconds=NAN, seconds_to_clear=NAN)
    said: dict[frozenset[int], list[float]] = defaultdict(list)
    for join, count in hits:
        for one in join.named[:count]:
            said[one.ranks].append(one.cost_in_ms(stretch))
    costs = {ranks: float(np.median(of_windows)) for ranks, of_windows in said.items()}
    after = [join for join in joins if stretch.end < join.at <= until]
    still = [join.at for join in after if any(one.ranks & stretch.ranks for one in join.named)]
    cleared = next((join.at for join in after if not still or join.at > still[-1]), NAN)
    first = hits[0][0].named[0]
    return _Heard(
        hit=True,
        first=first,
        cost_ms=costs[first.ranks],
        cost_is_right=all(is_right(ms, truth.cost_of_ms(ranks, stretch)) for ranks, ms in costs.items()),
        seconds=hits[0][0].at - stretch.begin,
        seconds_to_clear=cleared - stretch.end,
        names=frozenset((one.who, one.cause) for one in hits[-1][0].named),
    )


def _tell(rank: LiveRank, trace: RankTrace) -> None:
    """What a recorder tells of a rank besides its rows."""
    for group in trace.groups.values():
        rank.marks.read("process_group", {**group._asdict(), "ranks": list(group.ranks)})
    rank.marks.read("topology", {"coordinates": trace.coordinates, "parallel": trace.parallel, **trace.topology})


class Step(NamedTuple):
    """A step of a rank in numbers, and its rows, as a collector tells them."""

    summary: StepSummary
    rows: list[Row]


def steps_of(rank: LiveRank, trace: RankTrace, names: Sequence[str]) -> list[Step]:
    """The steps of a rank, as its collector tells them."""
    spans = trace.spans
    rows = np.flatnonzero(spans.kind == schema.STEP)
    steps = rows[np.argsort(spans.end[rows], kind="stable")]
    owner = owners(spans, steps)
    window = StepWindow(list(names), spans, steps, owner, {})
    told = summarise(window, rank, [StepExtras(0, 0, {}, {}, None) for _ in steps], GilYield())
    return [Step(summary, _rows(spans.take(owner == at), names)) for at, summary in enumerate(told)]


def _rows(spans: Spans, names: Sequence[str]) -> list[Row]:
    """Rows as a recorder makes them."""
    columns = {name: getattr(spans, name).tolist() for name in schema.SCHEMA.names if name != "detail"}
    for name in ("name", "dtype"):
        columns[name] = [names[code] if code >= 0 else None for code in columns[name]]
    return [Row(*values) for values in zip(*columns.values(), strict=True)]


def _named_live(one: LiveStraggler) -> Named:
    ranks = ranks_in(one.who, one.rank).union(one.ranks)
    return Named(ranks, one.who, one.place, one.cause, one.cost_ms_per_step, one.evidence, one.steps)


def ranks_in(who: str, rank: int) -> frozenset[int]:
    """The ranks that a sentence names: ``rank 3 on node0``, ``host node1 (ranks 4–7, 9)``."""
    words = re.search(r"ranks? ([\d–, ]+)", who)
    if rank < 0 or words is None:
        return frozenset()
    parts = [part.strip().split("–") for part in words[1].split(",") if part.strip()]
    return frozenset(one for part in parts for one in range(int(part[0]), int(part[-1]) + 1))


def count_until_found(causes: Sequence[str], guilty: frozenset[int], named: Sequence[Named]) -> int:
    """How many must be read until all guilty ones are named; 0 if an innocent one comes before, or some never."""
    if not guilty:
        return int(bool(named) and not named[0].ranks and named[0].cause in causes)
    read: set[int] = set()
    for count, one in enumerate(named, start=1):
        read |= one.ranks
        if not one.ranks or not read <= guilty:
            return 0
        if read == guilty:
            return count
    return 0


def _is_false(case: Case, truth: Truth, one: Named) -> bool:
    return case.is_clean or not one.ranks <= truth.ranks


def is_right(said_ms: float, true_ms: float) -> bool:
    return abs(said_ms - true_ms) <= max(TOLERANCE * true_ms, TOLERANCE_MS)


def _answer(case: Case, truth: Truth, named: Sequence[Named], unsaid: tuple[str, ...]) -> Answer:
    read = named[: count_until_found(case.causes, truth.ranks, named)] if not case.is_clean else ()
    return Answer(
        hit=not named if case.is_clean else bool(read),
        cause=named[0].cause if named else "",
        cause_is_right=bool(named) and case.is_cause(named[0]),
        cost_ms=read[0].cost_ms if read else NAN,
        cost_is_right=bool(read) and all(is_right(one.cost_ms, truth.cost_of_ms(one.ranks)) for one in read),
        false_alarms=sum(_is_false(case, truth, one) for one in named),
        sentences=(*(one.sentence for one in named), *unsaid),
        names=frozenset((one.who, one.cause) for one in named),
    )


# The table


def main() -> int:
    """Run the cases that were asked for; 1 if some clean run named somebody."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="Cases with this in their title.")
    parser.add_argument("--ranks", type=int, default=10_000, help="Cases of at most so many ranks.")
    parser.add_argument("--hidden", type=int, default=0, metavar="N", help="N runs with one slow rank, at random.")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="N runs with nothing wrong, at random.")
    parser.add_argument("--seed", type=int, help="Of the noise; default: 0, as the cases say.")
    parser.add_argument("--processes", type=int, default=1, help="That judge cases side by side.")
    parser.add_argument("--recorded", action="store_true", help="Ask only what a recording tells, not the monitor.")
    parser.add_argument("--list", action="store_true", help="Print the titles of the cases only.")
    parser.add_argument("-v", "--verbose", action="store_true", help="Print what was said of each case.")
    options = parser.parse_args()
    chosen = [
        case
        for case in (*cases(), *hidden(options.hidden, options.seed or 0), *clean(options.clean, options.seed or 0))
        if options.only.lower() in case.title.lower() and case.job.world_size <= options.ranks
    ]
    if options.list:
        print("\n".join(case.title for case in chosen))
        return 0
    begin = time.perf_counter()
    judged = list(_told(chosen, options))
    _summary(judged)
    print(f"\n{len(judged)} cases in {time.perf_counter() - begin:.0f} s, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    return int(any(one.offline.false_alarms + one.live.false_alarms for one in judged if one.case.is_clean))


def _told(chosen: Sequence[Case], options: argparse.Namespace) -> Iterator[Judged]:
    """Judge cases, and print a line of each as it is done."""
    print(f"{'':44s} {'offline':32s} live")
    print(f"{'case':36s} {'true ms':>7s} {'hit':4s} {'cause':13s} {'ms':>7s} {'false':>5s}", end="  ")
    print(f"{'hit':4s} {'cause':13s} {'ms':>7s} {'false':>5s} {'named':>7s} {'cleared':>7s} same name")
    work = partial(judge, seed=options.seed, is_live=not options.recorded)
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes) as pool:
            for one in pool.map(work, chosen):
                _line(one, options.verbose)
                yield one
        return
    for case in chosen:
        one = work(case)
        _line(one, options.verbose)
        yield one


def _line(one: Judged, verbose: bool) -> None:
    print(f"{one.case.title[:36]:36s} {one.cost_ms:7.1f} {columns(one.offline)}  {columns(one.live)} ", end="")
    print(f"{seconds_or_none(one.live.seconds)} {seconds_or_none(one.live.seconds_to_clear)}", end=" ")
    print("" if one.case.is_clean else "yes" if one.same_name else "no", flush=True)
    if verbose:
        print(f"    guilty: {_some(one.ranks)}, {' or '.join(one.case.causes)}")
        for way, answer in (("offline", one.offline), ("live", one.live)):
            for sentence in answer.sentences or ("nothing was said",):
                print(f"    {way}: {sentence}")


def seconds_or_none(seconds: float) -> str:
    return f"{seconds:5.1f} s" if seconds == seconds else "      -"


def _some(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return ("rank " + _numbers(listed[:16]) + (" …" if len(listed) > 16 else "")) if listed else "no single rank"


def columns(answer: Answer) -> str:
    cause = f"{answer.cause[:12]}{'' if answer.cause_is_right or not answer.cause else '!'}"
    cost = f"{answer.cost_ms:.1f}{'' if answer.cost_is_right else '!'}" if answer.cost_ms == answer.cost_ms else "-"
    return f"{'yes' if answer.hit else 'MISS':4s} {cause or '-':13s} {cost:>7s} {answer.false_alarms or '-':>5}"


class Tally(NamedTuple):
    """Counts of one family, one way."""

    hits: int
    causes: int
    costs: int
    false_alarms: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Tally:
        return cls(
            sum(one.hit for one in answers),
            sum(one.hit and one.cause_is_right for one in answers),
            sum(one.hit and one.cost_is_right for one in answers),
            sum(one.false_alarms for one in answers),
        )


def _summary(judged: Sequence[Judged]) -> None:
    """By family, as a table in Markdown."""
    families: Mapping[str, list[Judged]] = defaultdict(list)
    for one in judged:
        families[one.case.family].append(one)
    print("\n| fault | cases | offline: hit | cause | cost | false ", end="")
    print("| live: hit | cause | cost | false | same name | s to name |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    faulty = [one for one in judged if not one.case.is_clean]
    for family, own in [*families.items(), *([("**all faults**", faulty)] if len(families) > 1 else [])]:
        off, on = Tally.of([one.offline for one in own]), Tally.of([one.live for one in own])
        seconds = [one.live.seconds for one in own if one.live.seconds == one.live.seconds]
        named = f"{np.median(seconds):.0f} (at most {max(seconds):.0f})" if seconds else "-"
        same = sum(one.same_name for one in own)
        print(f"| {family} | {len(own)} | {_row(off, own)} | {_row(on, own)} | {same} | {named} |")


def _row(tally: Tally, own: Sequence[Judged]) -> str:
    if all(one.case.is_clean for one in own):
        return f"{tally.hits} named nobody | | | {tally.false_alarms}"
    return " | ".join(map(str, tally))


if __name__ == "__main__":
    sys.exit(main())
