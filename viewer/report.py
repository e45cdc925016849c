"""Render a run as one HTML file, which opens offline.

>>> page = render(summary, timeline)                            # doctest: +SKIP
>>> Path("report.html").write_text(page.html, encoding="utf-8") # doctest: +SKIP
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from commtrace.analysis.pipeline.plan import PlanTimeline
from commtrace.analysis.summary import Summary
from commtrace.analysis.timeline import Timeline
from commtrace.viewer.choice import MOST_STEPS, DrawnSteps, describe_ranks, ranks_to_draw, steps_to_draw
from commtrace.viewer.data import Resources, encode_json, outline_json, plan_resources, run_json, step_resources
from commtrace.viewer.page import fill_page

MOST_BYTES: Final = 15_000_000
"""Of a report: what a mail may carry, and a browser opens at once."""

_BYTES_PER_BOX: Final = 13
"""About what a box takes, compressed and in base64 (12.2 in the measured report)."""


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered report."""

    html: str
    embedded: tuple[int, ...]  # the steps in its timeline, ascending
    note: str  # sentences about these steps, their ranks, and the choice


def render(
    summary: Summary,
    timeline: Timeline,
    *,
    durations: Mapping[int, int] | None = None,
    plan: PlanTimeline | None = None,
    most_steps: int | None = MOST_STEPS,
    most_bytes: int = MOST_BYTES,
    views: Resources | None = None,
) -> Page:
    """Return the report of a run.

    Args:
        timeline: the steps that :func:`steps_to_draw` chooses, or more; a bounded number of them is drawn.
        durations: of all steps of the summary, ns; by default those of the timeline.
        plan: result of :func:`commtrace.analysis.pipeline.plan.plan_timeline`; drawn below every step.
        most_steps: limit of steps in the timeline; None for all.
        most_bytes: limit of the page. Steps are left out to keep it, and ranks where two steps are too large; one step
            with the median and the slowest rank of each stage is always there.
        views: further resources, tables or JSON (names that end in ``.json``), by name.
    """
    if durations is None:
        durations = {step: timeline.duration_ns(step) for step in timeline.steps}
    title = f"commtrace · {summary.run.id}"
    drawn = DrawnSteps(durations, steps_to_draw(durations, most_steps, summary.slow))
    outline = timeline.outline()
    resources: Resources = {
        "summary.json": encode_json(summary.to_json()),
        "outline.json": encode_json(outline_json(outline)),
    }
    if plan:
        resources |= plan_resources(plan)
    elements = _elements(resources | (views or {}))
    room = most_bytes - len(fill_page(title, elements))
    named = {rank for finding in summary.slow for rank in finding.ranks}
    ranks = ranks_to_draw(timeline, drawn.preferred[:2], named, room // _BYTES_PER_BOX)
    steps = _encode_within(timeline, drawn.preferred, ranks, room)
    embedded = tuple(sorted(steps))
    note = f"{drawn.describe(embedded, most_bytes)} {describe_ranks(ranks, len(outline['ranks']))}".strip()
    run = run_json(title, drawn, embedded, note, has_plan=plan is not None)
    elements += [element for step in embedded for element in steps[step]]
    return Page(fill_page(title, [*_elements({"run.json": encode_json(run)}), *elements]), embedded, note)


def _encode_within(
    timeline: Timeline, preferred: Sequence[int], ranks: Collection[int] | None, room: int
) -> dict[int, list[str]]:
    encoded: dict[int, list[str]] = {}
    size = 0
    for step in preferred:
        elements = _elements(step_resources(timeline, step, "outline.json", ranks))
        size += sum(map(len, elements))
        if encoded and size > room:
            break
        encoded[step] = elements
    return encoded


def _elements(resources: Resources) -> list[str]:
    return [_element(name, content) for name, content in resources.items()]


def _element(name: str, content: bytes) -> str:
    """Return a resource as an element of the page. Equal data give equal text."""
    if name.endswith(".json"):
        # "<" as an escape: no text of a user can end the script element, or start a comment in it.
        text = content.decode().replace("<", "\\u003c")
        return f'<script type="application/json" id="resource:{name}">{text}</script>'
    text = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    return f'<script type="text/plain" id="resource:{name}">{text}</script>'
