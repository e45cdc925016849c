"""Problems of a recording that readers of its numbers must know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.keys import grouped
from commtrace.analysis.matched import Context
from commtrace.analysis.matching.arrivals import describe_group, known_groups
from commtrace.analysis.matching.coverage import RowCounts
from commtrace.analysis.steps.attempts import is_earlier
from commtrace.analysis.steps.choice import DURATION_ONLY, LENGTH_KNOWN, WARM_UP, StepChoice
from commtrace.analysis.steps.progress import unreached_steps
from commtrace.findings.formatting import format_ranges, format_ranks
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run

NO_COMMUNICATION = "No communication was recorded in these steps."
NO_COMPUTE = (
    "Communication was recorded, but nothing that computes: no forward, backward, optimizer or kernel. What is between "
    "communications is shown as other: mark steps and work with commtrace.step and commtrace.span."
)

_COARSE_RESIDUAL_NS: Final = 1_000_000
_MOST_APART: Final = 0.3
"""Share of the matched rows that may be in another step than the first row of their communication: a launch at the end
of a step on one rank may be at the start of the next on another.
"""

_MOST_RANGES_LISTED: Final = 4
_MOST_GROUPS: Final = 4


class StepsThatMeet(NamedTuple):
    """A step of one rank whose communication is in another step on the first rank."""

    step: int
    rank: int
    other_step: int
    other: int


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A check that ranks give one step the same number; those of several windows add up."""

    matched: int = 0  # rows whose communication another rank began
    apart: int = 0  # those in another step than that rank's row
    example: StepsThatMeet | None = None  # the first of these

    def __add__(self, other: StepNumbers) -> StepNumbers:
        examples = [example for example in (self.example, other.example) if example is not None]
        return StepNumbers(self.matched + other.matched, self.apart + other.apart, min(examples, default=None))

    @property
    def are_apart(self) -> bool:
        """Return whether communications of different step numbers meet so often that ranks cannot be compared."""
        return self.example is not None and self.apart >= _MOST_APART * self.matched

    def problems(self) -> Iterable[str]:
        """Yield a sentence if communications of different step numbers meet too often."""
        if self.example is None or not self.are_apart:
            return
        step, rank, other_step, other_rank = self.example
        yield (
            f"Ranks number their steps differently: what rank {other_rank} does in step {other_step} meets what rank "
            f"{rank} does in step {step}. Whatever compares ranks step by step compares different steps: give "
            "commtrace.step the same number on all ranks."
        )


def find_step_numbers(context: Context) -> StepNumbers:
    """Compare the numbers of the steps that count with those of the steps that their communication meets."""
    rows = []
    for block in context.run.blocks:
        bucket, participants = (
            block.together({rank: getattr(context.matches.ranks[rank], column) for rank in block.ranks})
            for column in ("bucket", "participants")
        )
        rows_of_steps = np.flatnonzero((participants > 1) & (block.spans.step >= 0))
        rows.append((bucket[rows_of_steps], block.spans.step[rows_of_steps], block.rank()[rows_of_steps]))
    if not rows:
        return StepNumbers(0, 0, None)
    bucket, step, whose = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    firsts, communication = grouped(bucket)
    first = firsts[communication]
    counts = np.isin(step, context.steps) & (first != np.arange(len(first)))
    apart = np.flatnonzero(counts & (step != step[first]))
    meet = (step[apart], whose[apart], step[first[apart]], whose[first[apart]])
    examples = map(StepsThatMeet, *(column.tolist() for column in meet))
    return StepNumbers(int(counts.sum()), len(apart), min(examples, default=None))


def find_problems(
    recorded: Run,
    alignment: Alignment,
    steps: StepChoice,
    counts: Mapping[int, RowCounts],
    numbers: StepNumbers,
    communication: Sequence[Communication],
    *,
    computes: bool,
) -> list[str]:
    """Return sentences on problems, the reader's own first; ``recorded`` may be an outline, ``counts`` are complete."""
    return [
        *recorded.problems,
        *_choice(recorded, steps),
        *numbers.problems(),
        *_backwards(counts),
        *_endings(recorded.ranks.values()),
        *_drops(recorded.ranks.values()),
        *_clocks(alignment),
        *_matching(communication, steps_are_shown=bool(steps.used) or not steps.left_out),
        *_over_worlds(recorded),
        *((NO_COMPUTE,) if any(row.count for row in communication) and not computes else ()),
    ]


def _choice(recorded: Run, choice: StepChoice) -> Iterable[str]:
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
            f"Step numbers occur more than once on {format_ranks(again)}: the numbers of a step are of its last "
            "attempt. If that was no rollback, give every step a number of its own, also in later epochs."
        )
    silent = sorted(set(recorded.ranks) - set(choice.ranks))
    if silent:
        yield f"Left out, because they recorded no complete step: {format_ranks(silent)}."
    incomplete = sum(reason not in (WARM_UP, *LENGTH_KNOWN) for reason in choice.left_out.values())
    if choice.used and incomplete:
        were = "step was" if incomplete == 1 else "steps were"
        yield f"{incomplete} {were} left out because not every rank recorded them in full."


def _backwards(counts: Mapping[int, RowCounts]) -> Iterable[str]:
    backwards = {rank: rank_counts.backwards for rank, rank_counts in counts.items() if rank_counts.backwards}
    if backwards:
        yield (
            f"{sum(backwards.values())} spans of {format_ranks(backwards)} end before they start, and count as 0 ns: "
            "that clock is unreliable."
        )


def _endings(traces: Collection[RankTrace]) -> Iterable[str]:
    exits: dict[str, list[int]] = {}
    for trace in traces:
        if trace.exit is not None:
            exits.setdefault(trace.exit.call, []).append(trace.rank)
    unclosed = [trace for trace in traces if not trace.closed and trace.exit is None]
    if unclosed and not any(trace.metadata.is_dump for trace in unclosed):
        ranks = format_ranks([trace.rank for trace in unclosed])
        yield f"Not ended cleanly (killed, or still running): {ranks}. See commtrace doctor."
    raised: dict[str, list[int]] = {}
    for trace in traces:
        if trace.exception:
            raised.setdefault(trace.exception, []).append(trace.rank)
    if raised:
        who = ", ".join(f"{exception} on {format_ranks(numbers)}" for exception, numbers in raised.items())
        yield f"Ended with an uncaught exception: {who}. See commtrace doctor."
    for call, numbers in exits.items():
        yield f"Ended by {call}: {format_ranks(numbers)}. See commtrace doctor."
    for trace in unclosed:
        if trace.in_flight:
            words = [f"{call.operation} number {call.seq if call.seq >= 0 else '?'}" for call in trace.in_flight]
            yield f"Rank {trace.rank} was last seen in {', '.join(words[:4])}{' …' if len(words) > 4 else ''}."


def _drops(traces: Iterable[RankTrace]) -> Iterable[str]:
    dropped = {trace.rank: sum(trace.dropped.values()) for trace in traces if trace.dropped}
    if dropped:
        yield (
            f"{sum(dropped.values())} spans were dropped on {format_ranks(dropped)}; the numbers of these ranks are "
            "too small. Raise COMMTRACE_BUFFER_SPANS or record fewer steps; where the disk was full, the log says so."
        )


def _clocks(alignment: Alignment) -> Iterable[str]:
    if alignment.refused:
        yield (
            f"Clocks are not aligned: {alignment.refused} Between hosts, the rank with the shortest collective counts "
            "as the last to arrive, and waits for point-to-point operations count as transfer."
        )
    elif alignment.residual_ns["p99"] > _COARSE_RESIDUAL_NS:
        residual = alignment.residual_ns["p99"] / 1e6
        yield f"Clocks of the hosts agree only to {residual:.1f} ms (p99): waits between hosts are no finer than that."


def _matching(communication: Sequence[Communication], *, steps_are_shown: bool) -> Iterable[str]:
    calls = sum(row.count for row in communication)
    if not calls and steps_are_shown:
        yield NO_COMMUNICATION
    unmatched = sum(row.unmatched for row in communication)
    if unmatched:
        yield (
            f"{unmatched} of {calls} communications could not be matched on all members: their wait is a lower bound, "
            "and what is not wait counts as transfer."
        )
    mismatched = sum(row.mismatched for row in communication)
    if mismatched:
        yield f"{mismatched} communications differ between their members in operation, bytes or dtype."
    unsized = [row for row in communication if row.unsized and row.operation not in WITHOUT_BANDWIDTH]
    if unsized:
        operations = ", ".join(sorted({row.operation for row in unsized}))
        yield (
            f"The bytes of {sum(row.unsized for row in unsized)} communications ({operations}) are unknown: sums and "
            "bandwidths are of the others."
        )
    unfinished = sum(row.unfinished for row in communication)
    if unfinished:
        yield f"{unfinished} communications were never seen to end (nobody waited for them): no duration is known."


def _over_worlds(run: Run) -> Iterable[str]:
    labels = [describe_group(group, number) for number, group in known_groups(run).items() if group.is_over_worlds]
    if labels:
        names = ", ".join(
            dict.fromkeys(f"{label.name or label.role} ({label.words})" for label in labels[:_MOST_GROUPS])
        )
        more = f" and {len(labels) - _MOST_GROUPS} more" if len(labels) > _MOST_GROUPS else ""
        yield (
            f"Groups with members in other worlds, which are recorded apart: {names}{more}. Waiting for those members "
            "is not told from transfer."
        )


def _apart(traces: Iterable[RankTrace]) -> str:
    numbers = [np.unique(trace.spans.step[trace.spans.kind == schema.STEP]) for trace in traces]
    ranges = dict.fromkeys(format_ranges([(int(steps[0]), int(steps[-1]))]) for steps in numbers if len(steps))
    if len(ranges) < 2:
        return ""
    return f" The ranks number their steps differently: {'; '.join(list(ranges)[:_MOST_RANGES_LISTED])}."
