"""Jobs with faults of every kind, hidden ones and none, for bench/stragglers.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from commtrace.synth import Fault, Job

MS: Final = 1_000_000

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

    def is_cause(self, cause: str, place: str) -> bool:
        """Whether cause and place were said as they are."""
        return cause in self.causes and (not self.places or place in self.places)


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


def with_faults(job: Job, *faults: str, **changes: Any) -> Job:
    return replace(job, faults=tuple(Fault.parse(fault) for fault in faults), **changes)


def format_numbers(ranks: Iterable[int]) -> str:
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
        yield Case("one rank", f"{percent} %, 4 ranks", with_faults(DP4, f"slow-rank=2:{1 + percent / 100}"))
    for jitter in (0.0, 0.02, 0.05, 0.1):
        yield Case("one rank", f"20 %, jitter {jitter:.0%}", with_faults(DP4, "slow-rank=1:1.2", jitter=jitter))
    yield Case("one rank", "10 %, jitter 5 %", with_faults(DP8, "slow-rank=5:1.1", jitter=0.05))
    for ranks, steps in ((8, 60), (16, 60), (64, 60), (256, 40), (1_024, 40)):
        yield Case(
            "one rank", f"20 %, {ranks} ranks", with_faults(_job(dp=ranks, steps=steps), f"slow-rank={ranks // 3}:1.2")
        )
    for percent in (10, 20, 50):
        yield Case("one rank", f"{percent} %, 4 stages", with_faults(PP4, f"slow-rank=3:{1 + percent / 100}"))
    yield Case("one rank", "20 %, tensor 4", with_faults(TP4, "slow-rank=6:1.2"))
    yield Case("one rank", "20 %, tensor, pipeline, data", with_faults(ALL, "slow-rank=11:1.2"))
    yield Case("one rank", "30 %, gpipe", with_faults(replace(PP4, schedule="gpipe"), "slow-rank=2:1.3"))
    yield Case("one rank", "30 %, interleaved", with_faults(_pipeline(4, 2, chunks=2), "slow-rank=5:1.3"))
    yield Case("one rank", "30 %, zero-bubble", with_faults(replace(PP4, schedule="zero-bubble"), "slow-rank=0:1.3"))
    yield Case("one rank", "20 %, overlapped", with_faults(replace(DP8, overlap_grad_reduce=True), "slow-rank=7:1.2"))
    big = _pipeline(8, 128, microbatches=8, steps=24)
    yield Case("one rank", "30 %, 8 stages of 128", with_faults(big, "slow-rank=700:1.3"))
    yield Case("one rank", "30 %, all drift by 4 %", with_faults(DP8, "slow-rank=3:1.3", jitter=0.02, wander=0.04))
    starved = [f"slow-rank=0:{1.2 + 0.25 * (step % 4)}@{step}:{step + 1}" for step in range(15, 33)]
    yield Case("one rank", "75 %, its only replica starved", with_faults(_job(dp=2), "slow-rank=1:1.75", *starved))
    yield Case("phase", "forward 50 %", with_faults(DP8, "slow-forward=4:1.5"), ("forward",))
    yield Case("phase", "backward 30 %", with_faults(PP4, "slow-backward=4:1.3"), ("backward",))
    yield Case("phase", "optimizer 400 %", with_faults(DP4, "slow-optimizer=1:5"), ("optimizer",))


def _sets() -> Iterator[Case]:
    yield Case("several", "two of 8 alike", with_faults(DP8, "slow-rank=1,3:1.5", jitter=0.02))
    yield Case("several", "two of 8, 50 and 40 %", with_faults(DP8, "slow-rank=1:1.5", "slow-rank=3:1.4", jitter=0.02))
    yield Case("several", "two of 8, 50 and 20 %", with_faults(DP8, "slow-rank=6:1.5", "slow-rank=0:1.2"))
    yield Case(
        "several",
        "three of 16",
        with_faults(DP16, "slow-rank=2:1.1", "slow-rank=7:1.3", "slow-rank=11:1.6", jitter=0.02),
    )
    yield Case("several", "five of 16 alike", with_faults(DP16, "slow-rank=0,3,6,9,12:1.3"))
    yield Case("several", "two of 64", with_faults(_job(dp=64), "slow-rank=10,50:1.25"))
    twenty = f"slow-rank={format_numbers(range(500, 520))}:1.2"  # two whole hosts among them
    yield Case("several", "20 of 1,024", with_faults(_job(dp=1024, steps=30), twenty))
    yield Case("several", "in two stages", with_faults(PP2, "slow-rank=1:1.4", "slow-rank=6:1.4"))
    for ranks in (2, 4, 8, 16, 64):
        half = format_numbers(range(ranks // 2))
        yield Case("half", f"half of {ranks}", with_faults(_job(dp=ranks), f"slow-rank={half}:1.3"))
    yield Case("half", "half of 8, from the middle on", with_faults(DP8, "slow-rank=4,5,6,7:1.3@30:60"))
    yield Case("half", "half of each stage", with_faults(PP2, "slow-rank=0,1,4,5:1.3"))
    yield Case("half", "three of 4", with_faults(DP4, "slow-rank=1,2,3:1.4"))
    yield Case("tensor group", "20 %", with_faults(TP4, "slow-rank=4,5,6,7:1.2"), places=TENSOR)
    yield Case("tensor group", "50 %", with_faults(TP4, "slow-rank=8,9,10,11:1.5"), places=TENSOR)
    yield Case("tensor group", "of a stage", with_faults(ALL, "slow-rank=10,11:1.3"), places=TENSOR)


def _hosts_and_stages() -> Iterator[Case]:
    for percent in (10, 30):
        job = with_faults(replace(DP8, gpus_per_host=4), f"slow-host=1:{1 + percent / 100}")
        yield Case("host", f"{percent} %, one of two", job, places=HOST)
    yield Case("host", "20 %, one of four", with_faults(replace(DP16, gpus_per_host=4), "slow-host=2:1.2"), places=HOST)
    yield Case("host", "50 %, one of 128", with_faults(_job(dp=1024, steps=30), "slow-host=77:1.5"), places=HOST)
    yield Case(
        "host", "30 %, two of four", with_faults(replace(DP16, gpus_per_host=4), "slow-host=0,3:1.3"), places=HOST
    )
    yield Case("host", "5 %, one of eight", with_faults(_job(dp=64), "slow-host=5:1.05"), places=HOST)
    yield Case("host", "of half of each stage", with_faults(_pipeline(2, 8, gpus_per_host=4), "slow-host=1:1.3"))
    yield Case(
        "host", "from step 30 on", with_faults(replace(DP16, gpus_per_host=4), "slow-host=1:1.3@30:60"), places=HOST
    )
    for factor in (1.1, 1.2, 1.45, 2.0):
        job = with_faults(PP4, f"uneven-stage=1:{factor}", jitter=0.02)
        yield Case("stage", f"{factor - 1:.0%} more, of 4", job, STAGE)
    yield Case("stage", "30 % more, the last of 8", with_faults(PP8, "uneven-stage=7:1.3"), STAGE)
    yield Case("stage", "30 % more, the first of 2", with_faults(PP2, "uneven-stage=0:1.3"), STAGE)
    yield Case("stage", "20 % more, two of 8", with_faults(PP8, "uneven-stage=0,7:1.2"), STAGE)
    yield Case("stage", "20 % more, 8 of 32", with_faults(_pipeline(8, 32), "uneven-stage=3:1.2"), STAGE)
    for first in (30, 45):
        job = with_faults(PP4, f"uneven-stage=1:1.3@{first}:60", jitter=0.02)
        yield Case("stage", f"30 % more, from step {first} on", job, STAGE)
    yield Case(
        "stage", "25 % more, three of 4, late", with_faults(PP4, "uneven-stage=0,1,3:1.25@30:60", jitter=0.02), STAGE
    )
    late = with_faults(PP4, *(f"uneven-stage={stage}:1.2@30:60" for stage in range(3)), jitter=0.02)
    yield Case("stage", "20 % more, the first three of 4, late", late, STAGE)
    yield Case(
        "stage", "one always, one late", with_faults(PP8, "uneven-stage=2:1.3", "uneven-stage=5:1.4@30:60"), STAGE
    )
    yield Case("stage", "30 % more, no replicas", with_faults(_pipeline(4, 1), "uneven-stage=2:1.3"), STAGE)


def _links() -> Iterator[Case]:
    for factor in (4, 10):
        yield Case("link", f"pair, {factor} times", with_faults(NODES, f"slow-link=2-4:{factor}"), NETWORK)
    yield Case("link", "pair in a tensor group's job", with_faults(ALL, "slow-link=0-8:30"), NETWORK)
    yield Case("link", "all of a rank", with_faults(NODES, "slow-link=4:6"), NETWORK)
    yield Case("link", "all of a rank, tensor 4", with_faults(TP4, "slow-link=5:6"), NETWORK)
    yield Case("link", "sends of one rank", with_faults(NODES, "slow-send=2:8"), NETWORK)
    yield Case("link", "one direction", with_faults(NODES, "slow-send=2-4:8"), NETWORK)
    yield Case("link", "one direction, backwards", with_faults(NODES, "slow-send=4-2:15"), NETWORK)
    yield Case("link", "network of a host", with_faults(NODES, "slow-network=2:5"), NETWORK)
    for first, factor in ((30, 10), (45, 100)):
        late = with_faults(NODES, f"slow-link=2-4:{factor}@{first}:60")
        yield Case("link", f"pair, from step {first} on", late, NETWORK)
    yield Case("link", "network of a host, first third", with_faults(NODES, "slow-network=2:6@0:20"), NETWORK)
    # Which of both ends is slow cannot be told: all ranks that use the network are named.
    late = with_faults(_pipeline(2, 4, gpus_per_host=4), "slow-network=0:7@30:60", "slow-network=1:7@30:60")
    yield Case("link", "network of both hosts, late", late, NETWORK)
    both = with_faults(replace(DP8, gpus_per_host=4, sequence=8192), "slow-network=0:3@30:60", "slow-network=1:3@30:60")
    yield Case("link", "all-reduce between two hosts, late", both, NETWORK)


def _stretches() -> Iterator[Case]:
    yield Case("late onset", "last half", with_faults(DP4, "slow-rank=3:1.5@30:60"))
    yield Case("late onset", "last quarter", with_faults(DP4, "slow-rank=3:1.5@45:60"))
    yield Case("late onset", "last fifth, 20 %", with_faults(DP8, "slow-rank=3:1.2@48:60"))
    yield Case("late onset", "last quarter, of a stage", with_faults(PP4, "slow-rank=5:1.4@45:60"))
    yield Case("recovery", "first half", with_faults(DP4, "slow-rank=0:1.4@0:30"))
    yield Case("recovery", "from step 12 to 32", with_faults(DP8, "slow-rank=5:1.3@12:32"))
    yield Case("moving", "every 25 steps", with_faults(replace(DP4, steps=100), *moving((3, 0, 2, 1), 25, 1.5)))
    yield Case("moving", "every 30 steps", with_faults(DP8, *moving((6, 1), 30, 1.5)))
    yield Case("moving", "every 30 steps, data", with_faults(DP4, "data=1:150@0:30", "data=2:150@30:60"), ("data",))
    yield Case(
        "coming and going",
        "25 on, 25 off",
        with_faults(replace(DP4, steps=100), "slow-rank=2:1.5@0:25", "slow-rank=2:1.5@50:75"),
    )
    yield Case("coming and going", "one step in five", with_faults(DP8, "slow-rank=2:2@3:60:5"))


def moving(ranks: Sequence[int], steps: int, factor: float) -> list[str]:
    return [f"slow-rank={rank}:{factor}@{at * steps}:{(at + 1) * steps}" for at, rank in enumerate(ranks)]


def _microbatches() -> Iterator[Case]:
    yield Case("one microbatch", "on all replicas", with_faults(PP4, "long-microbatch=3:3"), SEQUENCES)
    yield Case("one microbatch", "of one replica", with_faults(PP4, "long-microbatch=3-1:3"), SEQUENCES)
    yield Case("one microbatch", "of one rank", with_faults(DP8, "long-microbatch=1-6:2"), SEQUENCES)
    late = with_faults(PP4, "long-microbatch=3-1:3@30:60")
    yield Case("one microbatch", "of one replica, from step 30 on", late, SEQUENCES)
    every = [f"long-microbatch={number}-1:1.3" for number in range(8)]
    yield Case("one microbatch", "all of one replica", with_faults(PP4, *every, jitter=0.02), SEQUENCES)
    for sigma in (0.15, 0.3, 0.8):
        yield Case("sequences", f"scatter {sigma:.0%}", with_faults(DP8, f"sequence-imbalance={sigma}"), SEQUENCES)
    yield Case("sequences", "scatter 30 %, 4 stages", with_faults(PP4, "sequence-imbalance=0.3"), SEQUENCES)


def _pauses() -> Iterator[Case]:
    for ms in (30, 100, 400):
        yield Case("data", f"{ms} ms", with_faults(DP4, f"data=3:{ms}"), ("data",))
    yield Case("data", "300 ms, every 10th step", with_faults(DP8, "data=2:300@5:60:10"), ("data",))
    yield Case("data", "100 ms, of a stage", with_faults(PP4, "data=0:100"), ("data",))
    yield Case(
        "data", "100 ms, of a host", with_faults(replace(DP16, gpus_per_host=4), "data=4,5,6,7:100"), ("data", "host")
    )
    yield Case("gc", "50 ms", with_faults(DP8, "gc=1:50"), ("gc",))
    yield Case("gc", "500 ms, every 10th step", with_faults(DP4, "gc=2:500@5:60:10"), ("gc",))
    short = _job(dp=4, steps=200, forward_ns=7_500_000, backward_ns=15 * MS, optimizer_ns=MS)
    yield Case("gc", "500 ms, every 2nd step of 100 ms", with_faults(short, "gc=3:500@60:90:2"), ("gc",))
    yield Case("gc", "50 ms, of a stage", with_faults(PP4, "gc=5:50"), ("gc",))
    yield Case("checkpoint", "2 s, every 20th step", with_faults(DP4, "checkpoint=1:2000@19:60:20"), ("checkpoint",))
    yield Case("checkpoint", "8 s, once", with_faults(DP4, "checkpoint=2:8000@30:31"), ("checkpoint",))
    yield Case("evaluation", "100 ms, every step", with_faults(DP4, "evaluation=0:100"), ("evaluation",))
    late = ("late_launch",)
    for ms in (20, 60, 150):
        yield Case("late launch", f"{ms} ms", with_faults(DP4, f"late-launch=1:{ms}"), late)
    yield Case("late launch", "100 ms, of a stage", with_faults(PP4, "late-launch=2:100"), late)


def _mixed() -> Iterator[Case]:
    """The cause that is named first is that of the costliest."""
    yield Case("mixed", "slow rank, slow input", with_faults(DP8, "slow-rank=1:1.4", "data=6:60"))
    host = replace(DP16, gpus_per_host=4)
    yield Case("mixed", "slow host, slow rank", with_faults(host, "slow-host=1:1.4", "slow-rank=13:1.2"), places=HOST)
    yield Case("mixed", "uneven stage, slow rank", with_faults(PP4, "uneven-stage=1:1.5", "slow-rank=6:1.2"), STAGE)
    both = replace(_pipeline(4, 3), schedule="zero-bubble")
    yield Case(
        "mixed",
        "zero-bubble, uneven stage, slow rank",
        with_faults(both, "uneven-stage=0:1.25", "slow-rank=7:1.2"),
        STAGE,
    )
    hosts = _pipeline(2, 6, gpus_per_host=4, sequence=16_384)
    yield Case("mixed", "slow host, slow link", with_faults(hosts, "slow-host=0:1.3", "slow-link=5-11:8"), NETWORK)
    yield Case("mixed", "slow rank, slow link", with_faults(NODES, "slow-rank=7:1.3", "slow-link=0-2:4"))


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
        yield Case("hidden", name, with_faults(job, f"slow-rank={rank}:{1 + excess:.4f}"))


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
        yield Case("clean", name, with_faults(job, *_stalls(job, chance, ms, drifts)), causes=())


def _stalls(job: Job, chance: float, ms: int, random: np.random.Generator) -> list[str]:
    """Input that keeps each rank waiting in some steps, by chance."""
    struck = np.argwhere(random.random((job.steps, job.world_size)) < chance).tolist()
    return [f"data={rank}:{ms}@{step}:{step + 1}" for step, rank in struck]


def _random_job(random: np.random.Generator) -> Job:
    jobs = (DP4, DP8, DP16, TP4, PP4, PP2, ALL, _job(dp=32), _pipeline(4, 4), replace(DP16, gpus_per_host=4))
    return jobs[int(random.integers(len(jobs)))]
