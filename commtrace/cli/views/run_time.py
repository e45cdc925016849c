"""Lines on the time of a run: wall time, repeated steps, critical path, losses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.breakdown.run_budget import RunBudget
from commtrace.analysis.rank_words import seconds_in_words
from commtrace.analysis.steps.attempts import Attempt, RepeatedStep
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.cli.units import duration, share

_WALL_PARTS: Final = {
    "training": "training steps",
    "repeated": "steps that were done again",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "loading": "loading data between steps",
    "start": "start",
    "restart": "restarts",
    "unknown": "not known",
}
_LEAST_SHARE_OF_WALL: Final = 0.001
_UNEVEN: Final = 1.2
"""Least multiple of the mean over ranks for which the rank with most of a part is named."""


def run_budget_lines(budget: RunBudget | None) -> Iterator[str]:
    """Yield the parts of the wall time; nothing if only some steps were asked for."""
    if budget is None or not budget.job.wall_ns:
        return
    wall, parts = budget.job.wall_ns, budget.job.by_name()
    attempts = f" in {budget.attempts} attempts" if budget.attempts > 1 else ""
    yield (
        f"Whole run: {seconds_in_words(wall)}{attempts}, goodput {share(budget.goodput)} "
        "(training steps that were kept)"
    )
    for part, words in _WALL_PARTS.items():
        time_ns = parts[part]
        if time_ns >= _LEAST_SHARE_OF_WALL * wall:
            line = f"{share(time_ns, wall):>4}  {seconds_in_words(time_ns):>8}  {words}"
            yield f"  {line}{_most(budget, part)}"
    if budget.repeated_steps:
        yield f"  {budget.repeated_steps} steps were lost by a restart or rollback and done again."
    elif budget.repeated_steps is None:
        yield "  Steps that were done again are not known: the program's own step numbers were not recorded."


def _most(budget: RunBudget, part: str) -> str:
    of_rank = {rank: parts.by_name()[part] for rank, parts in budget.ranks.items()}
    most = max(of_rank, key=lambda rank: of_rank[rank])
    if part not in ("evaluation", "checkpoint", "loading") or of_rank[most] < _UNEVEN * budget.job.by_name()[part]:
        return ""
    return f" (rank {most}: {seconds_in_words(of_rank[most])})"


_NAMED: Final = 0.05
"""Least share of the path for which a rank is named."""

_MOST_RANKS: Final = 3
_LEAST_SHARE_OF_PATH: Final = 0.01
_NOT_OF_A_RANK: Final = ("transfer", "unknown")


def critical_path_lines(path: CriticalPath | None) -> Iterator[str]:
    if path is None or not path.ns:
        return
    whole = path.ns
    parts = [part for part in _parts(path.shares, whole) if part[0] >= _LEAST_SHARE_OF_PATH * whole]
    listed = ", ".join(words for _, words in sorted(parts, key=lambda part: -part[0]))
    unsure = path.uncertain_ns
    note = f"; {share(unsure, whole)} not resolved by these clocks" if unsure >= _LEAST_SHARE_OF_PATH * whole else ""
    yield f"Critical path ({duration(whole / path.num_steps)} a step): {listed}{note}"


def _parts(shares: Sequence[Share], whole: int) -> Iterator[tuple[int, str]]:
    """Yield time and text of ranks with a large share, of the other ranks together, and of transfers by role."""
    by_rank: dict[int, list[Share]] = {}
    by_communication: dict[str, int] = {}
    for one in shares:
        if one.kind in _NOT_OF_A_RANK:
            words = " ".join(filter(None, (one.role, one.kind)))
            by_communication[words] = by_communication.get(words, 0) + one.ns
        else:
            by_rank.setdefault(one.rank, []).append(one)
    ordered = sorted(by_rank, key=lambda rank: -_ns(by_rank[rank]))
    named = [rank for rank in ordered[:_MOST_RANKS] if _ns(by_rank[rank]) >= _NAMED * whole]
    for rank in named:
        yield _of_ranks(f"rank {rank}", by_rank.pop(rank), whole)
    if by_rank:
        other = "other " if named else ""
        who = f"{len(by_rank)} {other}rank{'s' * (len(by_rank) != 1)}"
        yield _of_ranks(who, [one for own in by_rank.values() for one in own], whole)
    for words, ns in by_communication.items():
        yield ns, f"{words} {share(ns, whole)}"


def _of_ranks(who: str, shares: Sequence[Share], whole: int) -> tuple[int, str]:
    by_kind: dict[str, int] = {}
    for one in shares:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + one.ns
    kinds = sorted(
        (kind for kind in by_kind if by_kind[kind] >= _LEAST_SHARE_OF_PATH * whole), key=lambda kind: -by_kind[kind]
    )
    listed = ", ".join(f"{kind} {share(by_kind[kind], whole)}" for kind in kinds)
    return _ns(shares), f"{who} {share(_ns(shares), whole)}" + (f" ({listed})" if listed else "")


def _ns(shares: Sequence[Share]) -> int:
    return sum(one.ns for one in shares)


_LOST_PARTS: Final = {
    "stragglers_ns": "stragglers",
    "imbalance_ns": "imbalance",
    "exposed_communication_ns": "exposed communication",
    "bubble_ns": "bubble",
    "input_ns": "input",
    "rest_ns": "the rest",
}
_LEAST_SHARE_OF_LOSS: Final = 0.001
_WORTH_A_TIME: Final = 0.01
_NS_PER_HOUR: Final = 3.6e12


def lost_time_lines(lost: LostTime | None) -> Iterator[str]:
    """Yield the loss by cause; nothing if steps were not replayed."""
    if lost is None or not lost.steps_ns:
        return
    whole, gpus, costs_ns = lost.steps_ns, lost.gpus, lost.costs_ns()
    parts = [
        f"{words} {share(costs_ns[name], whole)}"
        + (f" ({_time(costs_ns[name], gpus)})" if costs_ns[name] >= _WORTH_A_TIME * whole else "")
        for name, words in _LOST_PARTS.items()
        if costs_ns[name] >= _LEAST_SHARE_OF_LOSS * whole or costs_ns[name] <= -_WORTH_A_TIME * whole
    ]
    beyond = whole - lost.ideal_ns
    yield (
        f"Lost: {share(beyond, whole)} of {_time(whole, gpus)} in steps"
        + (f": {', '.join(parts)}" if parts else "")
        + f"; ideal {share(lost.ideal_ns, whole)}"
    )


def _time(time_ns: int, gpus: int | None) -> str:
    if gpus is None:
        return seconds_in_words(time_ns)
    return f"{time_ns * gpus / _NS_PER_HOUR:.3g} GPU-hours"


_MOST_RANGES: Final = 4


def step_attempts_lines(repeated: Sequence[RepeatedStep], launch: int) -> Iterator[str]:
    """Yield ``Steps 5–8 were done twice: attempt 1 from …`` for each range; ``launch`` is the one that is shown."""
    ranges = list(_ranges(repeated))
    for steps in ranges[:_MOST_RANGES]:
        first, last = steps[0], steps[-1]
        count = len(first.attempts)
        often = "twice" if count == 2 else f"{count} times"
        which = f"Step {first.step} was" if first is last else f"Steps {first.step}–{last.step} were"
        attempts = "; ".join(
            _attempt([step.attempts[number] for step in steps], number + 1 == count, launch) for number in range(count)
        )
        yield f"{which} done {often}: {attempts}"
    if len(ranges) > _MOST_RANGES:
        yield f"{sum(map(len, ranges[_MOST_RANGES:]))} more steps were done more than once (--json)."


def _ranges(repeated: Sequence[RepeatedStep]) -> Iterator[Sequence[RepeatedStep]]:
    # Consecutive steps that were done in the same launches.

    def key(item: tuple[int, RepeatedStep]) -> tuple[int, tuple[int, ...]]:
        position, step = item
        return step.step - position, tuple(attempt.launch for attempt in step.attempts)

    for _, alike in groupby(enumerate(repeated), key):
        yield [step for _, step in alike]


def _attempt(attempts: Sequence[Attempt], is_last: bool, launch: int) -> str:
    first = attempts[0]
    began = time.strftime("%H:%M:%S", time.localtime(first.start_ns / 1e9))
    mean_ns = sum(attempt.duration_ns for attempt in attempts) / len(attempts)
    shown = ", shown here" if is_last and first.launch == launch else ""
    return f"attempt {first.attempt} from {began}, {duration(mean_ns)} a step{shown}"
