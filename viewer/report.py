"""Render a run as one HTML file, which opens offline.

>>> page = render(summary, timeline)                            # doctest: +SKIP
>>> Path("report.html").write_text(page.html, encoding="utf-8") # doctest: +SKIP
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from commtrace.analysis.pipeline.plan import PlanTimeline
from commtrace.analysis.summary import Summary
from commtrace.analysis.timeline import StepBoxes, Timeline
from commtrace.viewer.data import VERSION, step_tables

MOST_STEPS: Final = 10
MOST_BYTES: Final = 24_000_000
"""A browser opens a page of this size at once; larger ones take seconds."""

_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered report."""

    html: str
    embedded: tuple[int, ...]  # the steps in its timeline, ascending
    note: str  # a sentence about these steps and their choice


def render(
    summary: Summary,
    timeline: Timeline,
    *,
    durations: Mapping[int, int] | None = None,
    plan: PlanTimeline | None = None,
    most_steps: int | None = MOST_STEPS,
    most_bytes: int = MOST_BYTES,
    views: Mapping[str, bytes] | None = None,
) -> Page:
    """Return the report of a run.

    Args:
        timeline: the steps that :func:`steps_to_draw` chooses, or more; a bounded number of them is drawn.
        durations: of all steps of the summary, ns; by default those of the timeline.
        plan: result of :func:`commtrace.analysis.pipeline.plan.plan_timeline`; drawn below every step.
        most_steps: limit of steps in the timeline; None for all.
        most_bytes: limit of their data; one step is always included.
        views: further resources, tables or JSON (names that end in ``.json``), by name.
    """
    if durations is None:
        durations = {step: timeline.duration_ns(step) for step in timeline.steps}
    preferred = steps_to_draw(durations, most_steps)
    encoded = _encode_within(timeline, preferred, most_bytes)
    embedded = tuple(sorted(encoded))
    note = _describe_choice(durations, preferred, embedded, most_bytes)
    title = f"commtrace · {summary.run.id}"
    run = {
        "version": VERSION,
        "title": title,
        "summary": summary.to_json(),
        "timeline": timeline.outline(),
        "plan": {"outline": plan["outline"], "duration_ns": plan["step"]["duration_ns"]} if plan else None,
        "steps": [
            {
                "step": step,
                "duration_ns": timeline.duration_ns(step),
                "note": _name_of_step(step, preferred, durations),
            }
            for step in embedded
        ],
        "first_shown": embedded.index(preferred[0]) if embedded else 0,
        "note": note,
    }
    resources = [_script("run", _json(run))]
    resources += [_script(name, text) for step in embedded for name, text in encoded[step].items()]
    if plan:
        resources += [_script(name, text) for name, text in _encoded(plan["step"], "plan").items()]
    resources += [_script(name, _embedded_view(name, view)) for name, view in (views or {}).items()]
    return Page(_fill_template(title, resources), embedded, note)


def steps_to_draw(durations: Mapping[int, int], most: int | None = MOST_STEPS) -> list[int]:
    """Return the typical step, the slowest one, and others spread evenly over the run."""
    steps = sorted(durations)
    if not steps:
        return []
    by_duration = sorted(steps, key=lambda step: (durations[step], step))
    typical, slowest = by_duration[(len(steps) - 1) // 2], by_duration[-1]
    first = list(dict.fromkeys([typical, slowest]))
    others = [step for step in steps if step not in first]
    count = len(others) if most is None else min(max(most - len(first), 0), len(others))
    spread = [others[position * (len(others) - 1) // max(count - 1, 1)] for position in range(count)]
    return [*first, *spread][:most]


def _encode_within(timeline: Timeline, preferred: Sequence[int], most_bytes: int) -> dict[int, dict[str, str]]:
    encoded: dict[int, dict[str, str]] = {}
    size = 0
    for step in preferred:
        tables = _encoded(timeline.step(step), f"step/{step}")
        size += sum(map(len, tables.values()))
        if encoded and size > most_bytes:
            break
        encoded[step] = tables
    return encoded


def _encoded(step: StepBoxes, prefix: str) -> dict[str, str]:
    """Return the tables of a step as the page holds them: gzip in base64. Equal data give equal text."""
    return {name: _compressed(table) for name, table in step_tables(step, prefix)}


def _compressed(table: bytes) -> str:
    return base64.b64encode(gzip.compress(table, mtime=0)).decode()


def _embedded_view(name: str, view: bytes) -> str:
    return _without_markup(view.decode()) if name.endswith(".json") else _compressed(view)


def _name_of_step(step: int, preferred: Sequence[int], durations: Mapping[int, int]) -> str:
    if len(durations) < 2:
        return ""
    return dict(zip(preferred, ("typical", "slowest"), strict=False)).get(step, "")


def _describe_choice(
    durations: Mapping[int, int], preferred: Sequence[int], embedded: Sequence[int], most_bytes: int
) -> str:
    if not durations:
        return "No step was recorded, so there is no timeline."
    if len(embedded) == len(durations):
        return f"The timeline holds all {len(durations)} steps." if len(durations) > 1 else ""
    named = [
        f"the {_name_of_step(step, preferred, durations)} one ({step})" for step in preferred[:2] if step in embedded
    ]
    others = ["others spread over the run"] if len(embedded) > len(named) else []
    left_out = len(preferred) - len(embedded)
    sentences = [
        f"The timeline holds {len(embedded)} of the {len(durations)} steps: {', '.join(named + others)}.",
        f"{left_out} more would have made this page larger than {most_bytes / 1e6:g} MB." if left_out else "",
        "The numbers below are those of all steps.",
        "For other steps: commtrace report RUN --steps A:B",
    ]
    return " ".join(filter(None, sentences))


def _json(value: object) -> str:
    return _without_markup(json.dumps(value, separators=(",", ":"), allow_nan=False))


def _without_markup(json_text: str) -> str:
    # "<" as an escape: no text of a user can end the script element that holds the data, or start a comment in it.
    return json_text.replace("<", "\\u003c")


def _script(name: str, text: str) -> str:
    kind = "application/json" if name == "run" or name.endswith(".json") else "text/plain"
    return f'<script type="{kind}" id="resource:{name}">{text}</script>'


def _fill_template(title: str, resources: Sequence[str]) -> str:
    script = _asset("viewer.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "title": html.escape(title),
        "style": _asset("viewer.css"),
        "resources": "\n".join(resources),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], _asset("viewer.html"))


def _asset(name: str) -> str:
    return files("commtrace.viewer").joinpath("assets", name).read_text("utf-8")
