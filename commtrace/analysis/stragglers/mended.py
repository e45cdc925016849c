"""A finding together with the steps as they would be without it.

The cost of a finding is what its scenario saves; ``commtrace whatif`` asks for the same scenario.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from commtrace.analysis.replay.observed_steps import Places
from commtrace.analysis.replay.scenarios import MEASURED, Scenario
from commtrace.findings.causes import STAGE
from commtrace.findings.finding import Finding


class MendedFinding(NamedTuple):
    """A finding, and the scenario in which what it names is normal; None if it names no ranks."""

    finding: Finding
    normal: Scenario | None

    @property
    def cost_ns(self) -> float:
        return self.finding.cost_ns or 0.0


def costliest_first(mended: Iterable[MendedFinding]) -> list[MendedFinding]:
    return sorted(mended, key=lambda each: -each.cost_ns)


class MendedRanks(NamedTuple):
    """Ranks that are named by findings, and the scenario without these findings."""

    ranks: frozenset[int]
    of_stages: frozenset[int]  # those that are named as a stage: what is normal for them, other stages show
    normal: Scenario
    places: Places  # of the statistics that the scenario was made from


class JudgedSteps(NamedTuple):
    """What slows the steps of a run, and the places of their statistics."""

    mended: tuple[MendedFinding, ...]
    places: Places

    def without(self, ranks: Collection[int]) -> MendedRanks:
        """Return the scenario without the findings all of whose ranks are among these."""
        chosen = [each for each in self.mended if each.normal is not None and set(each.finding.ranks) <= set(ranks)]
        of_stages = [each for each in chosen if each.finding.place == STAGE]
        named, named_as_stages = (
            frozenset(rank for each in some for rank in each.finding.ranks) for some in (chosen, of_stages)
        )
        normal = sum((each.normal for each in chosen if each.normal is not None), MEASURED)
        return MendedRanks(named, named_as_stages, normal, self.places)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks that are named, ascending."""
        return tuple(sorted({rank for each in self.mended if each.normal is not None for rank in each.finding.ranks}))
