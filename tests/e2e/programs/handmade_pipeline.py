"""Parallelism that is written by hand, on sleeps, so that every rank's work is known: no framework tells any stage.

    torchrun --nproc-per-node 4 handmade_pipeline.py '{"pp": 2, "dp": 2, "schedule": "1f1b", "slow": 2}'

Ranks are numbered with tp fastest, then pp, then dp. ``head`` is how many times as long the last stage works, ``slow``
a rank that works twice as long as its peers.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

OPTIONS: dict[str, Any] = {
    "pp": 1, "dp": 1, "tp": 1, "chunks": 1, "microbatches": 4, "steps": 14, "schedule": "gpipe", "ring": "",
    "head": 2.0, "slow": -1, "tied": False, "reports_loss": False, "work": 0.004, "mesh": False, "records": False,
}  # fmt: skip
OPTIONS |= json.loads(sys.argv[1])
PP, DP, TP, CHUNKS, MICROBATCHES = (int(OPTIONS[name]) for name in ("pp", "dp", "tp", "chunks", "microbatches"))
WIDTH = 32

if OPTIONS["records"]:  # else `commtrace run` does
    import commtrace.auto  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
TENSOR, STAGE, REPLICA = RANK % TP, RANK // TP % PP, RANK // TP // PP


def group_of(same: tuple[str, ...]) -> dist.ProcessGroup | None:
    """Return this rank's group of all ranks that are alike in these dimensions, each group made on all ranks."""
    places: dict[tuple[int, ...], list[int]] = {}
    for rank in range(SIZE):
        place = {"tp": rank % TP, "pp": rank // TP % PP, "dp": rank // TP // PP}
        places.setdefault(tuple(place[name] for name in same), []).append(rank)
    own = None
    for ranks in places.values():
        group = dist.new_group(ranks)
        own = group if RANK in ranks else own
    return own


gradients, tensors = group_of(("tp", "pp")), group_of(("pp", "dp"))
if OPTIONS["schedule"] == "bidirectional":  # each stage's weights are on two ranks
    mirrored = [dist.new_group([stage, PP - 1 - stage]) for stage in range(PP // 2)]
    gradients = mirrored[min(STAGE, PP - 1 - STAGE)]
tied = dist.new_group([0, PP - 1]) if OPTIONS["tied"] else None
if OPTIONS["mesh"]:
    # Made after the others, for the name of its dimension: messages still go over the group of all ranks.
    dist.device_mesh.init_device_mesh("cpu", (DP, PP, TP), mesh_dim_names=("dp", "pp", "tp"))


def next_to(distance: int) -> int:
    """Return the rank of the stage at this distance in the same pipeline."""
    return (REPLICA * PP + (STAGE + distance) % PP) * TP + TENSOR


def works(chunk_is_last: bool) -> float:
    return (
        float(OPTIONS["work"])
        * (float(OPTIONS["head"]) if chunk_is_last else 1)
        * (2 if OPTIONS["slow"] == RANK else 1)
    )


class Work(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        if TP > 1:
            dist.all_reduce(torch.ones(8), group=tensors)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        time.sleep(2 * context.seconds)
        if TP > 1:
            dist.all_reduce(torch.ones(8), group=tensors)
        return gradient, None


model = torch.nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)


sent: list[tuple[dist.Work, torch.Tensor]] = []
"""What is waited for at the end of the step: where stages alternate, two of them would else wait for each other."""


def exchange(*, sends: tuple[torch.Tensor, int] | None = None, receives: int | None = None) -> Any:
    """Send, receive, or do both; return the tensor that came, or None."""
    operations, received = [], None
    if sends is not None:
        operations.append(dist.P2POp(dist.isend, sends[0], sends[1]))
    if receives is not None:
        received = torch.empty(4, WIDTH, requires_grad=True)
        operations.append(dist.P2POp(dist.irecv, received, receives))
    works = dist.batch_isend_irecv(operations) if operations else []
    if sends is not None and OPTIONS["schedule"] != "gpipe" and not OPTIONS["ring"]:
        sent.append((works.pop(0), sends[0]))
    for work in works:
        work.wait()
    return received


class Pipeline:
    """One direction of a pipeline: stage i passes on to the rank ``forward`` further."""

    def __init__(self, first: bool, last: bool, direction: int = 1) -> None:
        self.before = None if first else next_to(-direction)
        self.after = None if last else next_to(direction)
        self.is_last = last
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self) -> None:
        x = torch.ones(4, WIDTH) if self.before is None else exchange(receives=self.before)
        y = Work.apply(model(x), works(self.is_last))
        if self.after is not None:
            exchange(sends=(y.detach(), self.after))
        self.waiting.append((x, y if self.after is not None else y.pow(2).mean()))

    def backward(self) -> None:
        x, y = self.waiting.pop(0)
        gradient = None if self.after is None else exchange(receives=self.after)
        torch.autograd.backward(y, gradient)
        if self.before is not None:
            assert x.grad is not None
            exchange(sends=(x.grad, self.before))


def gpipe() -> None:
    pipeline = Pipeline(STAGE == 0, STAGE == PP - 1)
    for _ in range(MICROBATCHES):
        pipeline.forward()
    for _ in range(MICROBATCHES):
        pipeline.backward()


def one_f_one_b() -> None:
    pipeline = Pipeline(STAGE == 0, STAGE == PP - 1)
    ahead = min(PP - STAGE - 1, MICROBATCHES)
    for _ in range(ahead):
        pipeline.forward()
    for _ in range(MICROBATCHES - ahead):
        pipeline.forward()
        pipeline.backward()
    for _ in range(ahead):
        pipeline.backward()


def interleaved() -> None:
    """All forwards, then all backwards, of several chunks on each rank."""
    chunks = [Pipeline(STAGE == chunk == 0, STAGE == PP - 1 and chunk == CHUNKS - 1) for chunk in range(CHUNKS)]
    for chunk in chunks:
        for _ in range(MICROBATCHES):
            chunk.forward()
    for chunk in reversed(chunks):
        for _ in range(MICROBATCHES):
            chunk.backward()


def bidirectional() -> None:
    """Two pipelines in opposite directions: rank i holds stage i of one and stage p - 1 - i of the other."""
    down = Pipeline(STAGE == 0, STAGE == PP - 1)
    up = Pipeline(STAGE == PP - 1, STAGE == 0, -1)
    both = [down, up] if STAGE < PP // 2 else [up, down]
    for pipeline in both:
        for _ in range(MICROBATCHES):
            pipeline.forward()
    for pipeline in reversed(both):
        for _ in range(MICROBATCHES):
            pipeline.backward()


def ring() -> None:
    """Attention over sequences that are divided among all ranks: keys go round while every rank works."""
    keys = torch.ones(4, WIDTH)

    def once(seconds: float) -> None:
        nonlocal keys
        for _ in range(SIZE - 1):
            if OPTIONS["ring"] == "at once" or RANK % 2 == 0:
                together = OPTIONS["ring"] == "at once"
                received = exchange(sends=(keys, (RANK + 1) % SIZE), receives=(RANK - 1) % SIZE if together else None)
                keys = received.detach() if received is not None else exchange(receives=(RANK - 1) % SIZE).detach()
            else:
                received = exchange(receives=(RANK - 1) % SIZE)
                exchange(sends=(keys, (RANK + 1) % SIZE))
                keys = received.detach()
            time.sleep(seconds)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            once(works(False))
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            once(2 * works(False))
            return gradient

    for _ in range(MICROBATCHES):
        Attention.apply(model(torch.ones(4, WIDTH))).pow(2).mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "bidirectional": bidirectional}
train = ring if OPTIONS["ring"] else SCHEDULES[str(OPTIONS["schedule"])]
for _ in range(int(OPTIONS["steps"])):
    train()
    while sent:
        sent.pop(0)[0].wait()
    if not OPTIONS["ring"]:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=gradients)
    if tied is not None and RANK in (0, PP - 1):
        dist.all_reduce(torch.ones(WIDTH, 64), group=tied)
    norm = torch.ones(1)
    dist.all_reduce(norm)
    optimizer.step()
    optimizer.zero_grad()
    if OPTIONS["reports_loss"] and PP > 1 and STAGE in (0, PP - 1):
        exchange(**({"receives": next_to(-1)} if STAGE == 0 else {"sends": (torch.ones(4, WIDTH), next_to(1))}))
dist.destroy_process_group()
