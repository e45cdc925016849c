"""Compute the cost of a straggler: the time that steps would save without it, and in which steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.statistics import ERROR_OF_MEDIAN, Float64, robust_sigma
from commtrace.analysis.stragglers.limits import ALIKE
from commtrace.analysis.stragglers.verdict import VerdictStretch
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.finding import Occurrence
from commtrace.trace.spans import Bool, Int64

_MOST_OF_IT: Final = 0.8


def occurrence(steps: Sequence[int], times_ns: npt.NDArray[np.generic], others_ns: float = 0.0) -> Occurrence:
    """Return the steps in which a time occurred; ``times_ns`` is by step, ``others_ns`` in shorter steps, not known."""
    times = np.maximum(np.asarray(times_ns, np.float64), 0.0)
    total = float(times.sum()) + others_ns
    if not total:
        return Occurrence((), 0, len(steps))
    order = np.argsort(-times, kind="stable")
    enough = int(np.searchsorted(np.cumsum(times[order]), _MOST_OF_IT * total)) + 1
    if enough > len(steps):
        return Occurrence((), round(total), len(steps))
    return Occurrence(tuple(sorted(int(steps[at]) for at in order[:enough])), round(total), len(steps))


class StragglerCost(NamedTuple):
    """The typical time per step that a fix would save."""

    ms: float
    share: float  # of the step
    standard_error_ms: float  # of ``ms``, from the scatter over steps
    persistence: float  # share of the steps that save at least half of ``ms``
    when: Occurrence  # the steps in which most of it is saved
    first_step: int  # the first of the steps that save at least half of ``ms``; −1 if none does


class TotalCost(NamedTuple):
    """The cost of a verdict per step of the run."""

    ms: float
    gpu_hours_per_day: float
    costliest: int  # number of the stretch in which it costs most
    cost: StragglerCost  # in a step of that stretch
    stretches: tuple[VerdictStretch, ...]  # the steps in which it lasts, if these are not all

    @property
    def since_step(self) -> int:
        return self.stretches[0].first if self.stretches else self.cost.first_step


def cost_of(work: WorkStatistics, saved_ns: Int64, *, rare: bool = False) -> StragglerCost:
    """Return the cost of a cause without which each step would save so much: a median; a mean if it is ``rare``."""
    saved = saved_ns[work.steady] / 1e6
    typical = float(saved.mean() if rare else np.median(saved))
    lasting = saved >= max(typical, 1e-6) / 2
    persistence = float(lasting.mean())
    if not rare and persistence:
        # Steps in which it costs nothing count; single steps that the machine held up do not.
        typical = float(np.median(saved[lasting])) * persistence
    return StragglerCost(
        ms=typical,
        share=typical * 1e6 / work.step_ns,
        standard_error_ms=ERROR_OF_MEDIAN * robust_sigma(saved) / np.sqrt(len(saved)),
        persistence=persistence,
        when=occurrence(work.steps.tolist(), saved * 1e6),
        first_step=int(work.steps[int(np.argmax(lasting))]) if persistence else -1,
    )


def stands_out(work: WorkStatistics, cost: StragglerCost, *, rare: bool = False, meant: bool = False) -> bool:
    """Return whether a cost is large, lasting and above its noise.

    ``rare``: it strikes now and then and has spans of its own. ``meant``: the program does it on purpose, so that even
    a single strike is no chance.
    """
    limits = work.thresholds
    if cost.ms < limits.cost_ms or cost.share < limits.share_of_step:
        return False
    if meant:
        return True
    if rare:
        often = len(cost.when.steps) >= limits.fewest_strikes or not work.noise_is_known
        return often and cost.persistence >= limits.rare_persistence
    return cost.persistence >= limits.majority and cost.ms >= limits.standard_errors * cost.standard_error_ms


def gpu_hours_per_day(work: WorkStatistics, share_of_step: float) -> float:
    """Return the device hours that a day of the job would save."""
    return share_of_step * 24 * work.run.world_size


def total_cost(
    whole: WorkStatistics,
    stretches: Sequence[WorkStatistics],
    held_in: Iterable[int],
    saved_ns: Int64,
    *,
    rare: bool = False,
    meant: bool = False,
) -> TotalCost | None:
    """Return the cost of a verdict that held in some of the stretches; None if it does not stand out.

    ``saved_ns`` is of each step of the run; ``rare`` and ``meant`` are those of :func:`stands_out`.
    """
    costs = {number: cost_of(stretches[number], saved_ns, rare=rare) for number in held_in}
    costs = {
        number: cost for number, cost in costs.items() if stands_out(stretches[number], cost, rare=rare, meant=meant)
    }
    if not costs:
        return None
    costliest = max(costs, key=lambda number: costs[number].ms)
    if len(stretches) == 1:
        # The cost of what strikes now and then is a mean, and so a share of the mean step.
        step_ms = (whole.mean_step_ns if rare else whole.step_ns) / 1e6
        ms, lasted = costs[costliest].ms, tuple[VerdictStretch, ...]()
    else:
        within = np.logical_or.reduce([stretches[number].steady for number in costs])
        step_ms = whole.mean_step_ns / 1e6
        ms, lasted = mean_ms(whole.steady, np.where(within, saved_ns, 0)), _joined(stretches, costs)
    return TotalCost(ms, gpu_hours_per_day(whole, ms / step_ms), costliest, costs[costliest], lasted)


def mean_ms(steps: Bool, saved_ns: Int64 | Float64) -> float:
    return float(saved_ns[steps].mean()) / 1e6


def _joined(stretches: Sequence[WorkStatistics], costs: Mapping[int, StragglerCost]) -> tuple[VerdictStretch, ...]:
    """Join consecutive stretches of about the same cost."""
    joined: list[VerdictStretch] = []
    for number in sorted(costs):
        work, cost = stretches[number], costs[number]
        own = VerdictStretch(int(work.steps[0]), int(work.steps[-1]), cost.ms)
        before = joined[-1] if joined else None
        if before is not None and _follow(work.of_steps.steps, before, own) and _cost_alike(before, own):
            length, more = before.last - before.first + 1, own.last - own.first + 1
            cost_ms = (length * before.cost_ms_per_step + more * own.cost_ms_per_step) / (length + more)
            joined[-1] = VerdictStretch(before.first, own.last, cost_ms)
        else:
            joined.append(own)
    return tuple(joined)


def _follow(steps: Int64, before: VerdictStretch, own: VerdictStretch) -> bool:
    return not ((steps > before.last) & (steps < own.first)).any()


def _cost_alike(one: VerdictStretch, other: VerdictStretch) -> bool:
    most = max(one.cost_ms_per_step, other.cost_ms_per_step)
    return abs(one.cost_ms_per_step - other.cost_ms_per_step) <= ALIKE * most
