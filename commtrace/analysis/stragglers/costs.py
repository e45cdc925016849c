"""Compute the cost of a straggler: the time that steps would save without it, and in which steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.statistics import ERROR_OF_MEDIAN, Float64, robust_sigma
from commtrace.analysis.stragglers.limits import ALIKE, LONG_STEP, LOST_STEPS, LOST_TIME
from commtrace.analysis.stragglers.strikes import runs_of
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.finding import (
    MOST_SIGMAS,
    SLOW,
    Finding,
    Member,
    Norm,
    Occurrence,
    Stretch,
    finding_id,
    hosts_of,
)
from commtrace.trace.spans import Bool, Int64

_MOST_OF_IT: Final = 0.8
_MOST_STRUCK: Final = 0.5
"""What strikes in a larger share of the steps is no matter of some of them."""
_FEWEST_IN_A_ROW: Final = 2
"""Mean length of the stretches from which on a cause that is not rare is dated by them."""


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

    ns: float
    share: float  # of the step
    standard_error_ns: float  # of ``ns``, from the scatter over steps
    persistence: float  # share of the steps that save at least half of ``ns``
    when: Occurrence  # the steps in which most of it is saved
    first_step: int  # the first of the steps that save at least half of ``ns``; −1 if none does

    @property
    def sigmas(self) -> float | None:
        """Return the cost by its standard error; None if steps do not scatter."""
        return min(max(self.ns, 0.0) / self.standard_error_ns, MOST_SIGMAS) if self.standard_error_ns else None


class TotalCost(NamedTuple):
    """The cost of a finding per step of the run."""

    ns: float
    gpu_hours_per_day: float
    costliest: int  # number of the stretch in which it costs most
    cost: StragglerCost  # in a step of that stretch
    when: Occurrence  # the steps of the run in which most of it is saved
    stretches: tuple[Stretch, ...] = ()  # the steps in which it lasts, or strikes, if these are not all
    is_of_some_steps: bool = False  # it strikes in those of ``when``, and ``stretches`` are these

    @property
    def since_step(self) -> int:
        return self.stretches[0].first if self.stretches else self.cost.first_step


def cost_of(work: WorkStatistics, saved_ns: Int64, *, rare: bool = False) -> StragglerCost:
    """Return the cost of a cause without which each step would save so much: a median; a mean if it is ``rare``."""
    saved = saved_ns[work.steady].astype(np.float64)
    typical = float(saved.mean() if rare else np.median(saved))
    lasting = saved >= max(typical, 1.0) / 2
    persistence = float(lasting.mean())
    if not rare and persistence:
        # Steps in which it costs nothing count; single steps that the machine held up do not.
        typical = float(np.median(saved[lasting])) * persistence
    return StragglerCost(
        ns=typical,
        share=typical / work.step_ns,
        standard_error_ns=ERROR_OF_MEDIAN * robust_sigma(saved) / np.sqrt(len(saved)),
        persistence=persistence,
        when=occurrence(work.steps.tolist(), saved),
        first_step=int(work.steps[int(np.argmax(lasting))]) if persistence else -1,
    )


def stands_out(work: WorkStatistics, cost: StragglerCost, *, rare: bool = False, meant: bool = False) -> bool:
    """Return whether a cost is large, lasting and above its noise.

    ``rare``: it strikes now and then and has spans of its own. ``meant``: the program does it on purpose, so that even
    a single strike is no chance.
    """
    limits = work.thresholds
    if rare and makes_steps_long(work, cost):
        return True
    if cost.ns < limits.cost_ms * 1e6 or cost.share < limits.share_of_step:
        return False
    if meant:
        return True
    if rare:
        often = len(cost.when.steps) >= limits.fewest_strikes or not work.noise_is_known
        return often and cost.persistence >= limits.rare_persistence
    return cost.persistence >= limits.majority and cost.ns >= limits.standard_errors * cost.standard_error_ns


def makes_steps_long(work: WorkStatistics, cost: StragglerCost) -> bool:
    """Return whether what strikes in some steps costs a good part of them, however many other steps there are."""
    num_struck = len(cost.when.steps)
    if num_struck < 2 or not work.noise_is_known:
        return False
    total_ns = float(cost.when.total_ns)
    least_ns = max(LONG_STEP * work.step_ns, work.thresholds.cost_ms * 1e6)
    least_total_ns = max(LOST_STEPS, LOST_TIME * work.num_steps) * work.step_ns
    return total_ns >= max(num_struck * least_ns, least_total_ns)


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
    """Return the cost of what held in some of the stretches; None if it does not stand out.

    ``saved_ns`` is of each step of the run; ``rare`` and ``meant`` are those of :func:`stands_out`.
    """
    costs = {number: cost_of(stretches[number], saved_ns, rare=rare) for number in held_in}
    costs = {
        number: cost for number, cost in costs.items() if stands_out(stretches[number], cost, rare=rare, meant=meant)
    }
    if not costs:
        return None
    costliest = max(costs, key=lambda number: costs[number].ns)
    if len(stretches) == 1:
        # The cost of what strikes now and then is a mean, and so a share of the mean step.
        step_ns = whole.mean_step_ns if rare else whole.step_ns
        ns, lasted = costs[costliest].ns, tuple[Stretch, ...]()
    else:
        within = np.logical_or.reduce([stretches[number].steady for number in costs])
        saved_ns = np.where(within, saved_ns, 0)
        step_ns = whole.mean_step_ns
        ns = mean_ns(whole.steady, saved_ns)
        lasted = _within_cuts(_joined(stretches, costs), whole.steps, saved_ns[whole.steady])
    when = occurrence(whole.steps.tolist(), saved_ns[whole.steady])
    struck = struck_steps(whole.steps, saved_ns[whole.steady], when) if rare else None
    if struck is not None:
        when, lasted = struck
    hours = gpu_hours_per_day(whole, ns / step_ns)
    return TotalCost(ns, hours, costliest, costs[costliest], when, lasted, is_of_some_steps=struck is not None)


def struck_steps(steps: Int64, saved_ns: Int64, when: Occurrence) -> tuple[Occurrence, tuple[Stretch, ...]] | None:
    """Return the steps in which a cause strikes, with their stretches; None if these are not some of the steps only.

    It strikes in those that save at least half as much as the steps of ``when``, which save most of it. Both are of
    ``steps``, ascending, of which each saves ``saved_ns``. They are some of the steps if ``when`` is rare, or if they
    follow each other and are no more than half.
    """
    if not when.steps:
        return None
    saved = np.maximum(saved_ns, 0)
    # Steps that cost alike are all meant: most of the time may be in fewer of them, whichever noise makes the longest.
    struck = np.flatnonzero(saved >= saved[np.isin(steps, when.steps)].mean() / 2).tolist()
    runs = list(runs_of(struck))
    in_a_row = len(struck) >= _FEWEST_IN_A_ROW * len(runs)
    if len(struck) > _MOST_STRUCK * len(steps) or not (when.is_rare or in_a_row):
        return None
    stretches = tuple(
        Stretch(int(steps[run.first]), int(steps[run.last]), float(saved[run.first : run.last + 1].mean()))
        for run in runs
    )
    return Occurrence(tuple(steps[struck].tolist()), when.total_ns, when.num_steps), stretches


def finding_of(
    place: str,
    cause: str,
    who: str,
    cost: TotalCost,
    *,
    evidence: str,
    advice: str,
    members: tuple[Member, ...] = (),
    norm: Norm = "",
    is_bound: bool = False,
) -> Finding:
    """Return what slows the job, with its cost; the time of day and the share of the step are known to the caller."""
    ranks = tuple(member.rank for member in members)
    return Finding(
        id=finding_id(SLOW, place, cause, ranks),
        kind=SLOW,
        place=place,
        cause=cause,
        who=who,
        ranks=ranks,
        hosts=hosts_of(members, cause),
        members=members,
        stretches=cost.stretches,
        since_step=cost.since_step,
        cost_ns=cost.ns,
        cost_is_bound=is_bound,
        gpu_hours_per_day=cost.gpu_hours_per_day,
        persistence=cost.cost.persistence,
        norm=norm,
        sigmas=cost.cost.sigmas,
        evidence=evidence,
        advice=advice,
    )


def whole_cost(work: WorkStatistics, cost: StragglerCost) -> TotalCost:
    """Return the cost of what was looked for in all steps at once."""
    return TotalCost(cost.ns, gpu_hours_per_day(work, cost.share), 0, cost, cost.when)


def mean_ns(steps: Bool, saved_ns: Int64 | Float64) -> float:
    return float(saved_ns[steps].mean())


def _joined(stretches: Sequence[WorkStatistics], costs: Mapping[int, StragglerCost]) -> tuple[Stretch, ...]:
    """Join consecutive stretches of about the same cost."""
    joined: list[Stretch] = []
    for number in sorted(costs):
        work, cost = stretches[number], costs[number]
        own = Stretch(int(work.steps[0]), int(work.steps[-1]), cost.ns)
        before = joined[-1] if joined else None
        if before is not None and _follow(work.of_steps.steps, before, own) and _cost_alike(before, own):
            length, more = before.last - before.first + 1, own.last - own.first + 1
            cost_ns = (length * before.cost_ns + more * own.cost_ns) / (length + more)
            joined[-1] = Stretch(before.first, own.last, cost_ns)
        else:
            joined.append(own)
    return tuple(joined)


def _within_cuts(joined: Sequence[Stretch], steps: Int64, saved_ns: Int64) -> tuple[Stretch, ...]:
    """Return stretches without the steps at their ends in which nothing is saved.

    A run is cut into parts of several steps, so a cut may lie some steps before a fault begins, or behind its end.
    Where stretches adjoin, nothing ends. At either end of the run one step may be chance.
    """
    exact = []
    for stretch in joined:
        first, end = np.searchsorted(steps, [stretch.first, stretch.last + 1]).tolist()
        saved = np.maximum(saved_ns[first:end], 0)
        most = np.isin(np.arange(first, end), occurrence(range(first, end), saved).steps)
        costs = np.flatnonzero(saved >= saved[most].mean() / 2) if most.any() else np.arange(end - first)
        before, behind = int(costs[0]), end - first - 1 - int(costs[-1])
        adjoins = [other for other in joined if _follow(steps, other, stretch) and other.last < stretch.first]
        if adjoins or (first == 0 and before < 2):
            before = 0
        adjoins = [other for other in joined if _follow(steps, stretch, other) and stretch.last < other.first]
        if adjoins or (end == len(steps) and behind < 2):
            behind = 0
        if before or behind:
            cost_ns = float(saved[before : len(saved) - behind].mean())
            stretch = Stretch(int(steps[first + before]), int(steps[end - 1 - behind]), cost_ns)
        exact.append(stretch)
    return tuple(exact)


def _follow(steps: Int64, before: Stretch, own: Stretch) -> bool:
    return not ((steps > before.last) & (steps < own.first)).any()


def _cost_alike(one: Stretch, other: Stretch) -> bool:
    most = max(one.cost_ns, other.cost_ns)
    return abs(one.cost_ns - other.cost_ns) <= ALIKE * most
