"""Problems of a recording that readers of its numbers must know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commtrace.analysis.breakdown.states import COMPUTE
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.step_problems import problems_of_steps
from commtrace.trace.run import RankTrace, Run

NO_COMMUNICATION = "No communication was recorded in these steps."
NO_COMPUTE = (
    "Communication was recorded, but nothing that computes: no forward, backward, optimizer or kernel. What is between "
    "communications is shown as other: mark steps and work with commtrace.step and commtrace.span."
)

_COARSE_RESIDUAL_NS = 1_000_000


def find_problems(analysis: Analysis, communication: Sequence[Communication]) -> list[str]:
    """Sentences, the reader's own first."""
    return [
        *analysis.recorded.problems,
        *problems_of_steps(analysis),
        *_backwards(analysis.recorded),
        *_endings(analysis.recorded.ranks.values()),
        *_drops(analysis.recorded.ranks.values()),
        *_clocks(analysis),
        *_matching(communication, steps_are_shown=bool(analysis.steps.used) or not analysis.steps.left_out),
        *_computing(analysis, communication),
    ]


def _backwards(run: Run) -> Iterable[str]:
    backwards = {trace.rank: int((trace.spans.end < trace.spans.start).sum()) for trace in run.ranks.values()}
    ranks = [rank for rank, count in backwards.items() if count]
    if ranks:
        yield (
            f"{sum(backwards.values())} spans of {ranks_in_words(ranks)} end before they start, and count as 0 ns: the "
            "clock they were taken with is not to be trusted."
        )


def _endings(traces: Iterable[RankTrace]) -> Iterable[str]:
    unclosed = [trace for trace in traces if not trace.closed]
    if unclosed:
        yield f"Not ended in order (killed, or still running): {ranks_in_words([trace.rank for trace in unclosed])}."
    for trace in unclosed:
        if trace.in_flight:
            words = [
                f"{operation.get('operation', 'communication')} number {operation.get('seq', '?')}"
                for operation in trace.in_flight
            ]
            yield f"Rank {trace.rank} was last seen in {', '.join(words[:4])}{' …' if len(words) > 4 else ''}."


def _drops(traces: Iterable[RankTrace]) -> Iterable[str]:
    dropped = {trace.rank: sum(trace.dropped.values()) for trace in traces if trace.dropped}
    if dropped:
        yield (
            f"{sum(dropped.values())} spans were dropped on {ranks_in_words(dropped)}; the numbers of these ranks are "
            "too small. Raise COMMTRACE_BUFFER_SPANS or record fewer steps; where the disk was full, the log says so."
        )


def _clocks(analysis: Analysis) -> Iterable[str]:
    alignment = analysis.alignment
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


def _computing(analysis: Analysis, communication: Sequence[Communication]) -> Iterable[str]:
    if any(row.count for row in communication) and not analysis.partition.total(COMPUTE).any():
        yield NO_COMPUTE
