"""One thing that a job loses time to, or one that could not be judged: what every command and page shows.

>>> finding.line()                                                        # doctest: +SKIP
'rank 1 on vm, slow forward: 224 ms per step (62.9% of it)'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from commtrace.findings.causes import JOB, cause_or_loss, format_cause
from commtrace.trace.bounds import Size, Step, Word

SLOW: Final = "slow"
LOST: Final = "lost"
NOT_JUDGED: Final = "not_judged"

KINDS: Final = (SLOW, LOST, NOT_JUDGED)
"""Ranks, a host, a stage, a link, … that cost time; time that no such thing explains, by cause; and what could not be
judged, because a signal is missing."""

_EXPLAINS: Final = 0.5
"""Smallest share of a wait that its cause explains."""

Nanoseconds = Annotated[float, Meta(ge=-1e18, le=1e18)]


class Finding(Struct, frozen=True, kw_only=True):
    """A finding. Times are ns in a step: the mean over the steps of the run that count."""

    id: Word  # of kind, place, cause and subject: equal for the same finding in another command
    kind: Literal["slow", "lost", "not_judged"]
    place: Word = ""  # one of PLACES, as the cause one of CAUSES, or of LOSSES if time was lost
    cause: Word = ""
    who: Word = ""  # the place in words
    ranks: tuple[Size, ...] = ()  # slowest first; of a link both ends; empty: changing ranks, or all
    hosts: tuple[Word, ...] = ()  # of these ranks, each once
    steps: tuple[tuple[Step, Step], ...] = ()  # first and last of each stretch in which it holds; empty: in all
    since_step: Step = -1  # the first step in which it costs at least half; −1 if unknown
    # What a step would save without it if everything else that is slow were mended before; of lost time its part; None
    # if unknown.
    cost_ns: Nanoseconds | None = None
    cost_is_bound: bool = False  # it costs no more than that
    share: float | None = None  # of the mean step
    part_ns: Nanoseconds | None = None  # the parts of a list add up to the time beyond the ideal; None: unknown
    persistence: float | None = None  # share of the steps in which it costs at least half
    evidence: Word = ""  # sentences; of what was not judged, why not
    advice: Word = ""

    @property
    def words(self) -> str:
        """Return ``rank 1 on vm, slow forward``."""
        if self.kind == NOT_JUDGED:
            return "not judged"
        if self.kind == LOST:
            return cause_or_loss(self.cause).words
        return f"{self.who}, {format_cause(self.cause)}"

    def line(self) -> str:
        """Return it with its cost; the reason of what was not judged."""
        if self.kind == NOT_JUDGED:
            return f"Not judged: {self.evidence}"
        if self.cost_ns is None:
            return self.words
        return f"{self.words}: {self.format_cost()}"

    def format_cost(self) -> str:
        """Return ``224 ms per step (62.9% of it)``; an empty string if the cost is not known."""
        if self.cost_ns is None:
            return ""
        ms, most = self.cost_ns / 1e6, "at most " if self.cost_is_bound else ""
        share = "" if self.share is None else f" ({self.share:.1%} of it)"
        return f"{most}{ms:.0f} ms per step{share}" if ms >= 100 else f"{most}{ms:.3g} ms per step{share}"


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return what is slow, costliest first, then lost time, the largest part first, then what was not judged."""
    return tuple(sorted(findings, key=lambda one: (KINDS.index(one.kind), -(one.cost_ns or 0.0))))


def reason_of(wait_ns: float, findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that most of a wait of ``wait_ns`` in a step is an effect of; None if there is none.

    Without a finding the step is shorter by its cost, and so is the wait of a rank that works as long as before.
    Several findings on the same ranks are one reason, which the costliest stands for. Nobody waits for what all ranks
    do alike.
    """
    slow = [
        finding
        for finding in ranked(findings)
        if finding.kind == SLOW and finding.cost_ns is not None and not finding.cost_is_bound and finding.place != JOB
    ]
    of_subject: dict[frozenset[int] | str, float] = {}
    for finding in slow:
        subject = _subject(finding)
        of_subject[subject] = of_subject.get(subject, 0.0) + (finding.cost_ns or 0.0)
    return next((finding for finding in slow if of_subject[_subject(finding)] >= _EXPLAINS * wait_ns), None)


def _subject(finding: Finding) -> frozenset[int] | str:
    return frozenset(finding.ranks) or finding.id  # changing ranks are no ranks that findings have in common
