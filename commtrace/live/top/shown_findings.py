"""The findings of a frame with their sources: one list, whatever the frame is made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import structs

from commtrace.findings.finding import HANG, Finding, ranked


class ShownFinding(NamedTuple):
    """A finding, and who says so."""

    finding: Finding
    source: str  # one of frame.SOURCES


def ranked_once(shown: Iterable[ShownFinding]) -> list[ShownFinding]:
    """Return findings in the order of a list, each with an id of its own; the job makes no progress once."""
    by_id: dict[str, ShownFinding] = {}
    for finding, source in shown:
        number, free = 1, finding.id
        while free in by_id:
            number, free = number + 1, f"{finding.id}+{number + 1}"
        if number == 1 or finding.kind != HANG:
            by_id[free] = ShownFinding(structs.replace(finding, id=free), source)
    return [by_id[finding.id] for finding in ranked(finding for finding, _ in by_id.values())]
