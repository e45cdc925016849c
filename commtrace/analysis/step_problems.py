"""Problems of a run's steps: steps that were left out, and ranks that count them differently."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.steps.attempts import is_earlier
from commtrace.analysis.steps.choice import DURATION_ONLY, WARM_UP
from commtrace.analysis.steps.progress import unreached_steps
from commtrace.trace import schema
from commtrace.trace.run import RankTrace

_ENOUGH_ROWS = 200_000
_MOST_APART = 0.3
"""Share of the matched rows that may be in another step than the first row of their communication: what one rank
launches at the end of a step another may launch at the start of the next."""

_MOST_RANGES_LISTED = 4


def problems_of_steps(analysis: Analysis) -> Iterable[str]:
    """Sentences."""
    yield from _choice(analysis)
    yield from _apart_in_number(analysis)


def _choice(analysis: Analysis) -> Iterable[str]:
    recorded, choice = analysis.recorded, analysis.steps
    unreached = unreached_steps(recorded)
    if unreached is not None:
        yield unreached
    elif not choice.used and not choice.left_out:
        yield (
            "No step was recorded; all of the recording is shown as one. Mark steps with `with commtrace.step(i):` "
            "or train with a framework that commtrace knows."
        )
    elif recorded.steps_inferred:
        yield (
            "Nothing marked the steps of this job: they are inferred from the period of its communication. Mark them "
            "with `with commtrace.step(i):` to be sure of them."
        )
    elif not choice.used and DURATION_ONLY in choice.left_out.values():
        yield (
            "No step was recorded in detail by every rank: only durations and sums are known. While the job runs, "
            "`commtrace trigger RUN` has all ranks record the next steps in detail."
        )
    elif not choice.used:
        yield "No step was recorded in full by every rank; there is nothing to show." + _apart(recorded.ranks.values())
    again = [rank for rank, trace in recorded.ranks.items() if is_earlier(trace.spans.step).any()]
    if again:
        yield (
            f"Step numbers occur more than once on {ranks_in_words(again)}: what is said of a step is of its last "
            "attempt. If that was no rollback, give every step a number of its own, also in later epochs."
        )
    silent = sorted(set(recorded.ranks) - set(choice.ranks))
    if silent:
        yield f"Left out, because they recorded no complete step: {ranks_in_words(silent)}."
    incomplete = sum(reason not in (WARM_UP, DURATION_ONLY) for reason in choice.left_out.values())
    if choice.used and incomplete:
        were = "step was" if incomplete == 1 else "steps were"
        yield f"{incomplete} {were} left out because not every rank recorded them in full."


def _apart_in_number(analysis: Analysis) -> Iterable[str]:
    """Yield ranks whose steps of one number are not the same step: their communications meet those of other numbers."""
    found = _steps_that_meet(analysis)
    if found is None:
        return
    (rank, step), (other, other_step) = found
    yield (
        f"Ranks number their steps differently: what rank {rank} does in step {step} meets what rank {other} does in "
        f"step {other_step}. Whatever compares ranks step by step compares different steps: give commtrace.step the "
        "same number on all ranks."
    )


def _steps_that_meet(analysis: Analysis) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Of matched communications, an example of two rows in different steps; None where most are of one step."""
    context = analysis.context
    # Of very many communications some: chosen by their numbers, and so on all of their members.
    one_in = max(1, sum(map(len, context.run.blocks)) // _ENOUGH_ROWS)
    rows = []
    for rank, matches in context.matches.ranks.items():
        own = np.flatnonzero(matches.participants > 1)
        own = own[matches.bucket[own] % one_in == 0] if one_in > 1 else own
        own = own[context.run.ranks[rank].spans.step[own] >= 0]
        rows.append((matches.bucket[own], context.run.ranks[rank].spans.step[own], np.full(len(own), rank)))
    if len(rows) < 2:
        return None
    bucket, step, whose = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    first = np.full(int(bucket.max(initial=-1)) + 1, -1, np.int64)
    first[bucket[::-1]] = np.arange(len(bucket))[::-1]  # of equal ones the first row stays
    apart = np.flatnonzero(step != step[first[bucket]])
    if len(apart) < _MOST_APART * (len(bucket) - (first >= 0).sum()):
        return None
    example = apart[len(apart) // 2] if len(apart) else None
    if example is None:
        return None
    meets = first[bucket[example]]
    return (int(whose[meets]), int(step[meets])), (int(whose[example]), int(step[example]))


def _apart(traces: Iterable[RankTrace]) -> str:
    """Return why ranks that recorded steps have none in common."""
    numbers = [np.unique(trace.spans.step[trace.spans.kind == schema.STEP]) for trace in traces]
    ranges = dict.fromkeys(_range(int(steps[0]), int(steps[-1])) for steps in numbers if len(steps))
    if len(ranges) < 2:
        return ""
    return f" The ranks number their steps differently: {'; '.join(list(ranges)[:_MOST_RANGES_LISTED])}."


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
