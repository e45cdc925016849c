"""Choose the steps and the ranks of a timeline that a page of bounded size holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from commtrace.analysis.timeline import Timeline, representatives, typical_step
from commtrace.findings.finding import Finding

MOST_STEPS: Final = 10


def steps_to_draw(
    durations: Mapping[int, int], most: int | None = MOST_STEPS, findings: Sequence[Finding] = ()
) -> list[int]:
    """Return the typical step, the slowest one, one of each finding, and others spread evenly over the run."""
    steps = sorted(durations)
    if not steps:
        return []
    slowest = max(steps, key=lambda step: (durations[step], step))
    first = list(dict.fromkeys([typical_step(durations), slowest, *_steps_of(findings, durations)]))[:most]
    others = [step for step in steps if step not in first]
    count = len(others) if most is None else min(max(most - len(first), 0), len(others))
    spread = [others[position * (len(others) - 1) // max(count - 1, 1)] for position in range(count)]
    return [*first, *spread][:most]


def _steps_of(findings: Sequence[Finding], durations: Mapping[int, int]) -> Iterator[int]:
    """Yield the longest step of each finding that holds in some steps only."""
    for finding in findings:
        steps = set(finding.occurrence.steps) if finding.occurrence else set()
        for stretch in finding.stretches:
            steps |= {step for step in durations if stretch.first <= step <= stretch.last}
        known = steps & durations.keys()
        if known:
            yield max(known, key=lambda step: (durations[step], step))


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """The steps of a timeline, among all steps of a run."""

    durations: Mapping[int, int]  # of all steps, ns
    preferred: Sequence[int]  # result of steps_to_draw

    def entry(self, step: int) -> dict[str, object]:
        """Return a step as the page lists it."""
        return {"step": step, "duration_ns": self.durations[step], "note": self._name(step)}

    def describe(self, embedded: Sequence[int], most_bytes: int) -> str:
        """Return sentences on the steps that a page holds, and why these."""
        if not self.durations:
            return "No step was recorded, so there is no timeline."
        if len(embedded) == len(self.durations):
            return f"The timeline holds all {len(self.durations)} steps." if len(self.durations) > 1 else ""
        named = [f"the {self._name(step)} one ({step})" for step in self.preferred[:2] if step in embedded]
        others = ["others spread over the run"] if len(embedded) > len(named) else []
        left_out = len(self.preferred) - len(embedded)
        sentences = [
            f"The timeline holds {len(embedded)} of the {len(self.durations)} steps: {', '.join(named + others)}.",
            f"{left_out} more would have made this page larger than {most_bytes / 1e6:g} MB." if left_out else "",
            "Everything else on the page is of all steps.",
            "For other steps: commtrace report RUN --steps A:B, or commtrace view RUN",
        ]
        return " ".join(filter(None, sentences))

    def _name(self, step: int) -> str:
        if len(self.durations) < 2:
            return ""
        return dict(zip(self.preferred, ("typical", "slowest"), strict=False)).get(step, "")


def ranks_to_draw(
    timeline: Timeline, steps: Sequence[int], named: Collection[int], most_boxes: int
) -> frozenset[int] | None:
    """Return the ranks whose boxes a page holds, by index; None for all.

    If the first of the steps has more boxes than there is room for, ranks are chosen so that all of these steps fit:
    the ``named`` ones, the median and the slowest of every stage, and others replica by replica. The first two kinds
    stay whatever their size.
    """
    sizes = [timeline.num_boxes(step) for step in steps]
    if not sizes or sum(sizes[0].values()) <= most_boxes:
        return None
    ranks = timeline.outline()["ranks"]
    stages = [rank["coordinates"].get("pp", 0) for rank in ranks]
    always = [index for index, rank in enumerate(ranks) if rank["rank"] in named]
    for step in steps:
        always += [rank for pair in representatives(timeline.bounds(step), stages).values() for rank in pair]
    chosen = dict.fromkeys(always)
    by_replica = sorted(range(len(ranks)), key=lambda index: (ranks[index]["coordinates"].get("dp", 0), index))
    room = most_boxes - _boxes_of(chosen, sizes)
    for rank in by_replica:
        if rank in chosen:
            continue
        room -= _boxes_of([rank], sizes)
        if room < 0:
            break
        chosen[rank] = None
    return frozenset(chosen)


def _boxes_of(ranks: Iterable[int], sizes: Sequence[Mapping[int, int]]) -> int:
    return sum(of_step.get(rank, 0) for rank in ranks for of_step in sizes)


def describe_ranks(chosen: Collection[int] | None, count: int) -> str:
    """Return a sentence on the ranks that a page holds; empty if it holds all."""
    if chosen is None or len(chosen) == count:
        return ""
    return (
        f"It has the boxes of {len(chosen)} of the {count:,} ranks: those that the verdicts name, the median and the "
        "slowest rank of every stage, and others replica by replica. All ranks: commtrace view RUN."
    )
