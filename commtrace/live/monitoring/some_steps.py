"""Faults of some steps while the job runs: the newest steps are judged as a recording is, once some of them are long.

A rank, a host or a link that costs much in a few steps makes these steps long on the ranks of the job. So nothing is
done until steps are long; then the functions for a recording say whether chance explains it, who it was, and the cost.

>>> faults = FaultsOfSomeSteps(world_size=8, seconds=4.0)
>>> faults.look(sampled_steps, now=1795425246.0)  # doctest: +SKIP
>>> faults.known(now=1795425247.0)
()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from commtrace.analysis.matched import match_run
from commtrace.analysis.statistics import Float64
from commtrace.analysis.steps.choice import ChosenSteps
from commtrace.analysis.stragglers.limits import CHANCE_OF_FEW, LONG_STEP, Thresholds
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.analysis.stragglers.slow_links import COMMUNICATION
from commtrace.analysis.stragglers.strikes import chance_of
from commtrace.findings.causes import MEANT, OF_DIVISION, RANKS
from commtrace.findings.finding import MOST_MEMBERS, Finding, Occurrence
from commtrace.live.monitoring.sampled_steps import SampledSteps, StepDurations
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

_WINDOWS_KNOWN: Final = 15
"""A fault that is over is known for so long: a minute, with windows of the usual length."""

_LONGER: Final = LONG_STEP / 2
"""Share by which a step is long enough to be looked into. A fault costs LONG_STEP, of which noise may take a part."""

_DOUBLINGS: Final = 8
_LEVELS: Final = _LONGER * 2.0 ** np.arange(_DOUBLINGS)
"""Long steps are counted by how long they are: such a share longer than usual, or more."""

_HELD_UP: Final = 1.0
"""A busy machine holds up a process for a part of a step, outside of any phase, as while a job begins."""

_NEARLY_ALL: Final = 0.9
"""Share of what a finding costs in all that its stretches must hold."""

_MOST_TOLD: Final = 64


class _KnownFault(NamedTuple):
    finding: Finding
    until: float  # epoch seconds


class FaultsOfSomeSteps:
    """Finds faults that are over: those that go on are slow ranks and links, which lasting windows show.

    Not thread-safe.
    """

    def __init__(self, world_size: int, seconds: float) -> None:
        self._world_size = world_size
        self._seconds = seconds * _WINDOWS_KNOWN
        self._known: dict[tuple[str, str, str], _KnownFault] = {}
        self._newest = -1  # step that was looked at
        self._newest_before = -1  # step that was looked at the last time but one
        self._num_steps = 0  # of the job so far, that were looked at
        self._num_longer = np.zeros(_DOUBLINGS, np.int64)  # of these, longer by _LONGER and twice, four times … as much
        self._goes_on = False  # something was struck in the newest step

    def known(self, now: float) -> tuple[Finding, ...]:
        """Return the faults of the last minute; ``now`` is in epoch seconds."""
        self._known = {key: fault for key, fault in self._known.items() if fault.until > now}
        return tuple(fault.finding for fault in self._known.values())

    def look(self, sampled: SampledSteps, now: float) -> None:
        """Look at the new steps, and judge all that are kept if some are long."""
        durations = sampled.durations()
        steps = durations.steps
        if not len(steps) or steps[-1] <= self._newest:
            return
        longer, is_new = _longer(durations), steps > self._newest
        is_long = longer > _LONGER
        self._num_steps += int(is_new.sum())
        self._num_longer += (longer[is_new] > _LEVELS[:, np.newaxis]).sum(axis=1)
        # Of a single window, a few long steps may be many: these are judged once more with the next one.
        is_due = self._goes_on or bool(is_long[steps > self._newest_before].any())
        self._newest_before, self._newest = self._newest, int(steps[-1])
        if not is_due or is_long.sum() < 2 or len(steps) < Thresholds().fewest_steps:
            return
        self._goes_on = False
        step_ns = float(np.median(durations.ns))
        for finding in _judged(sampled.run_of(steps), step_ns):
            is_over = _last(finding) < self._newest
            if not is_over or not _are_all_of_few(finding, steps):
                self._goes_on = True  # more steps will tell
            elif not self._is_chance(finding, steps, step_ns):
                self._remember(finding, now)

    def _is_chance(self, finding: Finding, steps: Int64, step_ns: float) -> bool:
        """Return whether chance explains it among all steps of the job so far.

        Each step that is longer by half of what it costs, or nearly so, counts as a strike.
        """
        struck = np.flatnonzero(_are_in_stretches(finding, steps)).tolist()
        half = min(stretch.cost_ns for stretch in finding.stretches) / step_ns / 2
        level = max(int(np.searchsorted(_LEVELS, half, side="right")) - 1, 0)
        elsewhere = max(int(self._num_longer[level]) - len(struck), 0)
        return chance_of(struck, elsewhere, self._world_size, self._num_steps) > CHANCE_OF_FEW

    def _remember(self, finding: Finding, now: float) -> None:
        key = finding.place, finding.who, finding.cause
        known = self._known.get(key)
        if known is not None and _last(known.finding) >= _last(finding):
            return  # nothing new: what it cost is the mean over the steps in which it was found
        self._known[key] = _KnownFault(finding, now + self._seconds)


class _Told(NamedTuple):
    ranks: frozenset[int]
    first: int  # step
    last: int


class ToldFaults:
    """What was named while it went on: it is not named once more when it is over. Not thread-safe."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], _Told] = {}

    def tell(self, standing: Iterable[Finding], last_step: int) -> None:
        """Take what stands now, up to the newest step."""
        for finding in standing:
            key, first = (finding.id, finding.since_step), finding.since_step - finding.since_within_steps
            self._told.pop(key, None)
            self._told[key] = _Told(frozenset(finding.ranks), first, last_step)
        while len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]

    def new(self, faults: Iterable[Finding], pauses: Sequence[Finding]) -> list[Finding]:
        """Return the faults of some steps that were not named, and are none of these pauses."""
        return [
            fault
            for fault in faults
            if not any(told.first <= fault.since_step and _last(fault) <= told.last for told in self._of_ranks(fault))
            and not any(pause.cause == fault.cause and _share_ranks(pause.ranks, fault.ranks) for pause in pauses)
        ]

    def _of_ranks(self, fault: Finding) -> Iterator[_Told]:
        return (told for told in self._told.values() if _share_ranks(told.ranks, fault.ranks))


def _last(fault: Finding) -> int:
    return fault.stretches[-1].last


def _share_ranks(first: Collection[int], second: Collection[int]) -> bool:
    """Return whether more than half of the smaller set is in both."""
    return 2 * len({*first} & {*second}) > min(len({*first}), len({*second}))


def _longer(durations: StepDurations) -> Float64:
    """Return by which share each step takes longer than usual on the rank where that is most; 0 for the warm-up."""
    ns = np.maximum(durations.ns, 1).astype(np.float64)
    longer = (ns / np.median(ns, axis=1, keepdims=True)).max(axis=0) - 1
    return np.where(durations.steps > durations.first_step, longer, 0.0)


def _are_in_stretches(finding: Finding, steps: Int64) -> Bool:
    within = np.zeros(len(steps), np.bool_)
    for stretch in finding.stretches:
        within |= (steps >= stretch.first) & (steps <= stretch.last)
    return within


def _judged(run: Run, step_ns: float) -> Iterator[Finding]:
    """Yield what makes some of the steps of a run long, with these steps; ``step_ns`` is a typical one."""
    numbers = np.unique(np.concatenate([trace.spans.step for trace in run.ranks.values()]))
    matched = match_run(ChosenSteps(run, run), f"{max(int(numbers[0]), 0)}:{int(numbers[-1]) + 1}")
    if not matched.steps.used:
        return
    steps = np.array(matched.steps.used, np.int64)
    for finding in find_stragglers(matched.run, matched.matches).slow:
        costs = [stretch.cost_ns for stretch in finding.stretches]
        is_unmeant = finding.cause not in MEANT and finding.cause not in OF_DIVISION
        # A busy machine strikes several of its ranks in the same few steps.
        has_place = finding.place != RANKS or len(finding.ranks) == 1
        # Nor is a link compared with other links in a stretch that is cut off.
        has_place &= finding.cause != COMMUNICATION or finding.occurrence is not None
        if finding.ranks and is_unmeant and has_place and costs and min(costs) >= _least_share(finding.cause) * step_ns:
            yield replace(
                finding,
                occurrence=finding.occurrence or _occurrence(finding, steps),
                members=finding.members[:MOST_MEMBERS],
            )


def _least_share(cause: str) -> float:
    """Return the share of a typical step that each of the steps must cost."""
    return _HELD_UP if cause == "unknown" else LONG_STEP


def _are_all_of_few(finding: Finding, steps: Int64) -> bool:
    """Return whether the stretches of a finding are few of the steps, and all in which it costs something."""
    # If only the costliest of its steps are few, the stretches are those.
    in_stretches = _occurrence(finding, steps)
    total_ns = in_stretches.total_ns if finding.occurrence is None else finding.occurrence.total_ns
    return in_stretches.is_rare and in_stretches.total_ns >= _NEARLY_ALL * total_ns


def _occurrence(finding: Finding, steps: Int64) -> Occurrence:
    struck = [steps[(steps >= stretch.first) & (steps <= stretch.last)] for stretch in finding.stretches]
    total_ns = sum(stretch.cost_ns * len(within) for stretch, within in zip(finding.stretches, struck, strict=True))
    return Occurrence(tuple(np.concatenate(struck).tolist()), round(total_ns), len(steps))
