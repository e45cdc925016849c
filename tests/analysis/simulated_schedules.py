"""Runs of any pipeline schedule, simulated from the order in which each stage works.

>>> run = simulate(gpipe(stages=2, microbatches=3))
>>> run.ranks[0].spans.end.max()                     # (m + p − 1)(F + B)
12
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from commtrace.trace.run import Run
from tests.factory import Row, group, make_run, p2p, span, stall


class Action(NamedTuple):
    """Forward or backward of a microbatch through a chunk."""

    kind: str
    microbatch: int
    chunk: int = 0


Orders = Sequence[Sequence[Action]]


def gpipe(stages: int, microbatches: int) -> Orders:
    """All forwards, then all backwards."""
    order = [Action(kind, microbatch) for kind in ("forward", "backward") for microbatch in range(microbatches)]
    return [order] * stages


def interleaved(stages: int, microbatches: int, chunks: int) -> Orders:
    """Interleaved 1F1B as Megatron orders it: p microbatches through one chunk, then through the next one."""
    total = microbatches * chunks
    orders = []
    for stage in range(stages):
        warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
        forwards = [_virtual(number, stages, chunks, "forward") for number in range(total)]
        backwards = [_virtual(number, stages, chunks, "backward") for number in range(total)]
        order = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[total - warm_up :])
    return orders


def _virtual(number: int, stages: int, chunks: int, kind: str) -> Action:
    round_, place = divmod(number, stages * chunks)
    chunk, microbatch = divmod(place, stages)
    return Action(kind, round_ * stages + microbatch, chunk if kind == "forward" else chunks - 1 - chunk)


def simulate(
    orders: Orders,
    duration_ns: Callable[[int, Action], int] = lambda _, action: 1 if action.kind == "forward" else 2,
    steps: int = 1,
) -> Run:
    """Run a schedule with transfers that take no time and sends that hold up nobody. Every stage has one rank."""
    return _Simulation(orders, duration_ns).run(steps)


class _Simulation:
    def __init__(self, orders: Orders, duration_ns: Callable[[int, Action], int]) -> None:
        self._orders = orders
        self._duration_ns = duration_ns
        self._chunks = 1 + max(action.chunk for order in orders for action in order)
        self._group = group("pp", *range(len(orders)))
        self._rows: dict[int, list[Row]] = {stage: [] for stage in range(len(orders))}
        self._now = dict.fromkeys(self._rows, 0)
        self._ids = 0

    def run(self, steps: int) -> Run:
        for step in range(steps):
            begins = dict(self._now)
            todo = [list(order) for order in self._orders]
            done: dict[tuple[Action, int], int] = {}
            while any(todo):
                progress = [self._next(step, stage, actions, done) for stage, actions in enumerate(todo)]
                assert any(progress), "the schedule waits for itself"
            end = max(self._now.values())
            for stage, begin in begins.items():
                self._rows[stage].append(span("step", begin, end, step=step))
                self._now[stage] = end
        return make_run(
            self._rows,
            [self._group],
            coordinates=lambda rank: {"pp": rank, "dp": 0},
            parallel={"pp": len(self._orders), "dp": 1},
        )

    def _next(self, step: int, stage: int, actions: list[Action], done: dict[tuple[Action, int], int]) -> bool:
        if not actions:
            return False
        action = actions[0]
        source = self._source(stage, action)
        if source is not None and source not in done:
            return False
        where = {"step": step, "microbatch": action.microbatch, "chunk": action.chunk, "stage": stage}
        if source is not None and source[1] != stage:
            self._receive(stage, source[1], done[source], where, self._seq(step, source))
        begin = self._now[stage]
        self._now[stage] = begin + self._duration_ns(stage, action)
        self._rows[stage].append(span(action.kind, begin, self._now[stage], **where))
        done[action, stage] = self._now[stage]
        actions.pop(0)
        return True

    def _source(self, stage: int, action: Action) -> tuple[Action, int] | None:
        """What must be done before an action, and on which stage; None for the first forward of a microbatch."""
        last = len(self._orders) - 1
        if action.kind == "forward":
            if stage > 0:
                return action, stage - 1
            return (action._replace(chunk=action.chunk - 1), last) if action.chunk > 0 else None
        if stage < last:
            return action, stage + 1
        if action.chunk < self._chunks - 1:
            return action._replace(chunk=action.chunk + 1), 0
        return Action("forward", action.microbatch, action.chunk), stage

    def _seq(self, step: int, source: tuple[Action, int]) -> int:
        """A number that is unique among the messages of a pair; the join asks for no more."""
        action, _ = source
        number = (action.microbatch * self._chunks + action.chunk) * 2 + (action.kind == "backward")
        return step * 100_000 + number

    def _receive(self, stage: int, source: int, sent: int, where: Mapping[str, int], seq: int) -> None:
        self._ids += 1
        now = self._now[stage]
        end = max(now, sent)
        receive = p2p("recv", self._group, source, seq, now, end, id=self._ids, is_async=True, **where)
        send = p2p(
            "send", self._group, stage, seq, sent, end, id=self._ids, is_async=True, **{**where, "stage": source}
        )
        self._rows[stage].append(receive)
        self._rows[source].append(send)
        if end > now:
            self._rows[stage].append(stall(receive, now, end))
        self._now[stage] = end
