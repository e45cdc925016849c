"""The cost of a verdict: in each stretch of the run in which it holds, and over the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from commtrace.analysis.stragglers.costs import Bench, Cost
from commtrace.analysis.stragglers.limits import ALIKE
from commtrace.analysis.stragglers.verdict import Stretch
from commtrace.trace.spans import Bool, Int64


class Price(NamedTuple):
    """The cost of a verdict.

    Attributes:
        ms: per step of the run.
        gpu_hours_per_day: the same over all devices of the job.
        dearest: number of the stretch in which it costs most.
        cost: in a step of that one.
        stretches: where it does not last all the run, the steps in which it does.
    """

    ms: float
    gpu_hours_per_day: float
    dearest: int
    cost: Cost
    stretches: tuple[Stretch, ...]


def price_of(
    whole: Bench,
    stretches: Sequence[Bench],
    held_in: Iterable[int],
    saved_ns: Int64,
    *,
    rare: bool = False,
    meant: bool = False,
) -> Price | None:
    """Return what a verdict costs; None where it costs too little, too seldom, or does not stand out.

    Args:
        whole: all steps that count.
        stretches: that were judged one by one.
        held_in: numbers of those in which it held.
        saved_ns: what each step of the program would save without it.
        rare: it strikes now and then, and has spans of its own.
        meant: the program does it on purpose.
    """
    costs = {number: stretches[number].cost_of(saved_ns, rare=rare) for number in held_in}
    costs = {number: cost for number, cost in costs.items() if stretches[number].passes(cost, rare=rare, meant=meant)}
    if not costs:
        return None
    dearest = max(costs, key=lambda number: costs[number].ms)
    if len(stretches) == 1:
        # Of what strikes now and then the cost is a mean, and so a share of the mean step.
        step_ms = mean_step_ms(whole) if rare else whole.step_ns / 1e6
        ms, told = costs[dearest].ms, tuple[Stretch, ...]()
    else:
        within = np.logical_or.reduce([stretches[number].steady for number in costs])
        step_ms = mean_step_ms(whole)
        ms, told = mean_ms(whole.steady, np.where(within, saved_ns, 0)), _joined(stretches, costs)
    return Price(ms, ms / step_ms * 24 * whole.run.world_size, dearest, costs[dearest], told)


def mean_ms(steps: Bool, saved_ns: Int64) -> float:
    """Return the mean over these steps."""
    return float(saved_ns[steps].mean()) / 1e6


def mean_step_ms(bench: Bench) -> float:
    """Return how long the steps that count took, in the mean."""
    return mean_ms(bench.steady, bench.program.measured_step_times())


def _joined(stretches: Sequence[Bench], costs: dict[int, Cost]) -> tuple[Stretch, ...]:
    """Return the stretches in the order of time; those that follow each other at about the same cost are one."""
    joined: list[Stretch] = []
    for number in sorted(costs):
        bench, cost = stretches[number], costs[number]
        numbers = bench.program.steps[bench.steady]
        own = Stretch(int(numbers[0]), int(numbers[-1]), cost.ms)
        before = joined[-1] if joined else None
        if before is not None and _follow(bench.program.steps, before, own) and _cost_alike(before, own):
            length, more = before.last - before.first + 1, own.last - own.first + 1
            cost_ms = (length * before.cost_ms_per_step + more * own.cost_ms_per_step) / (length + more)
            joined[-1] = Stretch(before.first, own.last, cost_ms)
        else:
            joined.append(own)
    return tuple(joined)


def _follow(steps: Int64, before: Stretch, own: Stretch) -> bool:
    return not ((steps > before.last) & (steps < own.first)).any()


def _cost_alike(one: Stretch, other: Stretch) -> bool:
    most = max(one.cost_ms_per_step, other.cost_ms_per_step)
    return abs(one.cost_ms_per_step - other.cost_ms_per_step) <= ALIKE * most
