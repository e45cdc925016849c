"""One thing that a job loses time to, or one that could not be judged: what every command and page shows.

>>> finding.line()                                                        # doctest: +SKIP
'rank 1 on vm, slow forward: 224 ms per step (62.9% of it)'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from commtrace.findings.causes import CAUSES, JOB, OF_DIVISION, cause_or_loss, format_cause
from commtrace.findings.formatting import format_duration, format_ranges, ranges
from commtrace.trace.bounds import Count, Rank, Size, Step, Time, Word
from commtrace.trace.json_values import JsonObject, fields_to_json

Kind = Literal["failed", "hang", "mismatch", "silent", "slow", "lost", "recording", "not_judged"]

FAILED: Final[Kind] = "failed"
HANG: Final[Kind] = "hang"
MISMATCH: Final[Kind] = "mismatch"
SILENT: Final[Kind] = "silent"
SLOW: Final[Kind] = "slow"
LOST: Final[Kind] = "lost"
RECORDING: Final[Kind] = "recording"
NOT_JUDGED: Final[Kind] = "not_judged"

KINDS: Final = (FAILED, HANG, MISMATCH, SILENT, SLOW, LOST, RECORDING, NOT_JUDGED)
"""In the order of a list, but that the first two stand as they come, the cause first, and slow and lost are one list by
cost: ranks that failed; ranks without progress; ranks that do not call the same; ranks that no longer report; ranks, a
host, a stage, a link, … that cost time; time that no such thing explains, by cause; what is wrong with the recording;
and what could not be judged, because a signal is missing."""

STOPS: Final = (FAILED, HANG)
"""The job makes no progress: whatever else it loses is no matter now."""

COSTS: Final = (SLOW, LOST)
"""What the steps lose time to."""

WORTH_NAMING: Final = 0.01
"""Smallest share of the step of lost time that is told among the findings."""

_EXPLAINS: Final = 0.5
"""Smallest share of a wait that its cause explains."""

_FEWEST_STEPS: Final = 4
_RARE: Final = 0.25
"""A time in at most this share of the steps belongs to those steps alone."""

_MOST_STEPS_NAMED: Final = 6

MOST_SIGMAS: Final = 1000.0

MOST_MEMBERS: Final = 16
"""Limit of the members of a finding on a running job."""

Nanoseconds = Annotated[float, Meta(ge=-1e18, le=1e18)]
Hours = Annotated[float, Meta(ge=-1e12, le=1e12)]
Sigmas = Annotated[float, Meta(ge=0, le=MOST_SIGMAS)]

Norm = Literal["majority", "past", "baseline", "fastest", ""]
"""What normal is taken from: most of those that do the same, the job's own past, another run, or the fastest few; empty
if nothing was compared."""


class Member(Struct, frozen=True):
    """One of the ranks that a finding names. Times are ns in a step."""

    rank: Rank
    host: Word
    excess_ns: Nanoseconds  # of its work over normal
    # Lost to it in a step with every other slow rank mended; None if there are too many to try. Ranks that are slow
    # side by side each cost all of it.
    share_ns: Nanoseconds | None = None
    alone_ns: Nanoseconds | None = None  # saved in a step if only this rank were mended


class Stretch(Struct, frozen=True):
    """Steps of a run in which one thing held, from the first to the last."""

    first: Step
    last: Step
    cost_ns: Nanoseconds  # of one of these steps
    since_ns: Time | None = None  # epoch: begin of the first step; None if unknown
    until_ns: Time | None = None  # epoch: end of the last step; None if unknown


class Occurrence(Struct, frozen=True):
    """The fewest steps that hold most of a time."""

    steps: tuple[Step, ...]  # ascending; empty if the time is 0, or in more steps than are kept of a long run
    total_ns: Count
    num_steps: Count  # among so many

    @property
    def is_rare(self) -> bool:
        """Return whether most steps have none of it, so that a mean over all steps would mislead."""
        enough = self.num_steps >= _FEWEST_STEPS and bool(self.steps)
        return enough and len(self.steps) <= max(1, int(_RARE * self.num_steps))

    def describe(self) -> str:
        """Return ``once, in step 7: 2.2 s`` or ``in 2 of 25 steps (10, 20): 11 s in all``."""
        total = format_duration(self.total_ns)
        if len(self.steps) == 1:
            return f"once, in step {self.steps[0]}: {total}"
        named = format_ranges(ranges(self.steps), _MOST_STEPS_NAMED)
        return f"in {len(self.steps)} of {self.num_steps} steps ({named}): {total} in all"


class Finding(Struct, frozen=True, kw_only=True):
    """A finding. Costs are ns in a step: the mean over the steps that count, or over a window of a running job."""

    id: Word  # see finding_id: equal for the same finding in another command, and while the job runs
    kind: Kind
    place: Word = ""  # one of PLACES
    cause: Word = ""  # one of CAUSES, or of LOSSES if time was lost
    who: Word = ""  # the place in words
    ranks: tuple[Rank, ...] = ()  # slowest first; of a link both ends; empty: changing ranks, or all
    hosts: tuple[Word, ...] = ()  # of these ranks, each once; empty where the division of work is to blame
    members: tuple[Member, ...] = ()  # slowest first, of a running job the first 16; empty where no rank is the cause
    stretches: tuple[Stretch, ...] = ()  # in which it holds, if that is not in all steps
    since_step: Step = -1  # the first step in which it costs at least half, or of ``occurrence``; −1 if unknown
    since_within_steps: Size = 0  # by so many steps ``since_step`` may be off
    since_first_compared: bool = False  # no step before ``since_step`` was compared: it may have begun earlier
    since_ns: Time | None = None  # begin of ``since_step``, epoch; None if unknown
    occurrence: Occurrence | None = None  # of what strikes in few steps only; its cost is spread over all of these
    # What a step would save without it if everything else that is slow were mended before; without a replay the excess
    # over normal, at most the stall of others; of lost time its part; None if unknown.
    cost_ns: Nanoseconds | None = None
    cost_is_bound: bool = False  # it costs no more than that
    share: float | None = None  # the cost, of the mean step
    part_ns: Nanoseconds | None = None  # the parts of a list add up to the time beyond the ideal; None: unknown
    gpu_hours_per_day: Hours | None = None  # the cost, over all devices of the job, a rank without a GPU counted as one
    persistence: float | None = None  # share of the steps in which it costs at least half
    norm: Norm = ""
    sigmas: Sigmas | None = None  # the cost of a step in which it holds, by its standard error; None if unknown
    evidence: Word = ""  # sentences; of what was not judged, why not
    advice: Word = ""

    def to_json(self) -> JsonObject:
        """Return the fields, and what to call it in ``words`` and ``text``, which is :meth:`line`."""
        return {**fields_to_json(self), "words": self.words, "text": self.line()}

    @property
    def rank(self) -> int:
        """Return the slowest rank; −1 where the cause moves between ranks, or all have it."""
        return self.ranks[0] if self.ranks else -1

    @property
    def host(self) -> str:
        """Return the node of :attr:`rank`; empty where it has none."""
        if self.members:
            return self.members[0].host
        return self.hosts[0] if self.hosts else ""

    @property
    def words(self) -> str:
        """Return ``rank 1 on vm, slow forward``."""
        if self.kind == NOT_JUDGED:
            return "not judged"
        if self.kind == LOST:
            return self.who or cause_or_loss(self.cause).words
        return f"{self.who}, {format_cause(self.cause)}" if self.kind == SLOW else self.who

    def line(self) -> str:
        """Return it with its cost; what was not judged, or has no cost, as a sentence."""
        if self.kind == NOT_JUDGED:
            return f"Not judged: {self.evidence}"
        if self.kind not in (SLOW, LOST):
            return self.evidence
        return ": ".join(filter(None, (self.words, self.format_cost())))

    def format_cost(self) -> str:
        """Return ``224 ms per step (62.9% of it)``, or ``once, in step 7: 2.2 s (4.0%)``; empty if it is not known.

        The share of what happens in a few steps is that of the time of all steps.
        """
        if self.occurrence is not None:
            return self.occurrence.describe() + ("" if self.share is None else f" ({self.share:.1%})")
        if self.cost_ns is None:
            return ""
        ms, most = self.cost_ns / 1e6, "at most " if self.cost_is_bound else ""
        share = "" if self.share is None else f" ({self.share:.1%} of it)"
        return f"{most}{ms:.0f} ms per step{share}" if ms >= 100 else f"{most}{ms:.3g} ms per step{share}"


def finding_id(kind: str, place: str, cause: str, ranks: Iterable[int] = ()) -> str:
    """Return the id of a finding: no words, which may change, and the first rank only, as others come and go.

    >>> finding_id(SLOW, "host", "compute", [5, 4])
    'slow/host/compute/4'
    """
    return "/".join(filter(None, (kind, place, cause, *map(str, sorted(ranks)[:1]))))


def not_judged(place: str, why: str) -> Finding:
    """Return that ranks, stages, links or the whole job could not be judged; ``why`` is a sentence."""
    return Finding(id=finding_id(NOT_JUDGED, place, ""), kind=NOT_JUDGED, place=place, evidence=why)


def hosts_of(members: Iterable[Member], cause: str) -> tuple[str, ...]:
    """Return the hosts of ranks that a finding names, each once; none where the division of work is to blame."""
    return () if cause in OF_DIVISION else tuple(dict.fromkeys(member.host for member in members if member.host))


def format_since_step(step: int, within: int) -> str:
    """Return ``step 30``, or ``about step 32 (± 8)``; empty if the step is not known."""
    if step < 0:
        return ""
    return f"about step {step} (± {within})" if within else f"step {step}"


def beginning_as(finding: Finding, first: Finding) -> Finding:
    """Return a finding with the begin of ``first``, an earlier look at the same."""
    return replace(
        finding,
        since_step=first.since_step,
        since_ns=first.since_ns,
        since_within_steps=first.since_within_steps,
        since_first_compared=first.since_first_compared,
    )


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return what stops the job, then what steps lose time to, costliest first, then the rest, in the order of KINDS.

    Findings of one id, as of two stretches with other ranks beside the first, are told apart by a number.
    """
    ordered = sorted(findings, key=lambda one: (_position(one.kind), -(one.cost_ns or 0.0)))
    return tuple(with_own_ids(ordered))


def _position(kind: Kind) -> int:
    alike = next((kinds for kinds in (STOPS, COSTS) if kind in kinds), (kind,))
    return KINDS.index(alike[0])


def worth_naming(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return what to tell first: what stops or slows the job, and lost time but for small parts of the step."""
    return tuple(
        finding
        for finding in findings
        if finding.kind in (FAILED, HANG, MISMATCH, SILENT, SLOW)
        or (finding.kind == LOST and (finding.share or 0.0) >= WORTH_NAMING)
    )


def advised(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return which of a ranked list to advise on: the first, and the costliest fault if the first is none.

    Exposed communication or a bubble is how the job is built, which takes longer to change than one slow rank, link or
    input.
    """
    listed = [finding for finding in findings if finding.advice]
    fault = next((finding for finding in listed if _is_fault(finding)), None)
    if not listed or fault is None or fault is listed[0] or listed[0].kind in STOPS:
        return tuple(listed[:1])
    return listed[0], fault


def _is_fault(finding: Finding) -> bool:
    return finding.kind not in COSTS or finding.cause in CAUSES


NOTHING_COSTS: Final = f"Nothing was found that costs {WORTH_NAMING:.0%} of the step or more."


def verdict(findings: Sequence[Finding]) -> str:
    """Return the first finding of a ranked list with what to do, and the next one, as a paragraph."""
    named = worth_naming(findings)
    if not named:
        why_not = next((finding.line() for finding in findings if finding.kind == NOT_JUDGED), "")
        return why_not or NOTHING_COSTS
    first = named[0]
    sentences = [_sentence(first.line()), first.evidence if first.kind == LOST else "", first.advice]
    if first.kind not in STOPS and len(named) > 1:
        sentences.append(f"Then: {_sentence(named[1].line())}")
    return " ".join(filter(None, sentences))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def with_own_ids(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; of several with one id, the later ones have a number behind it."""
    seen: dict[str, int] = {}
    for finding in findings:
        number = seen[finding.id] = seen.get(finding.id, 0) + 1
        yield finding if number == 1 else replace(finding, id=f"{finding.id}+{number}")


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
