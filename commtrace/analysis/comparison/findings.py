"""The findings of two runs side by side: what is new, what has gone, and what costs more or less.

>>> [(one.change, one.finding.words) for one in compare_findings(before, after)]     # doctest: +SKIP
[('gone', 'rank 5 on node0, compute'), ('new', 'rank 2 on node0, communication')]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from commtrace.findings.finding import WORTH_NAMING, Finding, worth_naming
from commtrace.trace.json_values import JsonObject

Change = Literal["new", "gone", "more", "less", "same"]

NEW: Final[Change] = "new"
GONE: Final[Change] = "gone"
MORE: Final[Change] = "more"
LESS: Final[Change] = "less"
SAME: Final[Change] = "same"


class ComparedFinding(NamedTuple):
    """A finding of one of two runs, or of both."""

    change: Change
    finding: Finding  # of the later run, if it is worth naming there
    before_ns: float | None  # cost in a step; None if it is not there, or not known
    after_ns: float | None

    def to_json(self) -> JsonObject:
        return {
            "change": self.change,
            "id": self.finding.id,
            "text": self.finding.line(),
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
        }


def compare_findings(
    before: Sequence[Finding], after: Sequence[Finding], step_ns: float | None
) -> tuple[ComparedFinding, ...]:
    """Match the findings of two runs by their ids: the same place, cause and first rank.

    A cost has changed if it differs by as much as is worth naming of a step of ``step_ns``. New ones stand first, then
    those that cost more, less, that have gone, and that are the same, each the costliest first.
    """
    named: dict[str, Finding] = {}
    for finding in (*worth_naming(after), *worth_naming(before)):
        named.setdefault(finding.id, finding)
    # What is worth naming on one side only may be there on the other: then its cost has changed.
    of_before, of_after = ({finding.id: finding for finding in side} for side in (before, after))
    least_ns = (step_ns or 0.0) * WORTH_NAMING
    compared = [_compared(finding, of_before.get(key), of_after.get(key), least_ns) for key, finding in named.items()]
    order = (NEW, MORE, LESS, GONE, SAME)
    return tuple(sorted(compared, key=lambda row: (order.index(row.change), -(row.after_ns or row.before_ns or 0.0))))


def _compared(finding: Finding, before: Finding | None, after: Finding | None, least_ns: float) -> ComparedFinding:
    before_ns, after_ns = (None if side is None else side.cost_ns for side in (before, after))
    change: Change = SAME
    if before is None:
        change = NEW
    elif after is None:
        change = GONE
    elif before_ns is not None and after_ns is not None and abs(after_ns - before_ns) >= least_ns:
        change = MORE if after_ns > before_ns else LESS
    return ComparedFinding(change, finding, before_ns, after_ns)
