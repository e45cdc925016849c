"""Which ranks report, and which have fallen silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commtrace.analysis.clocks.time_of_day import clock_time
from commtrace.findings.causes import RANKS
from commtrace.findings.finding import SILENT, Finding, finding_id
from commtrace.findings.status import CLEARED, FOUND, LiveEvent
from commtrace.live.monitoring.window import WindowReport

SILENT_WINDOWS: Final = 3.0


@dataclass(slots=True)
class _Voice:
    """A rank as it was last heard; times in epoch seconds."""

    host: str
    window: int
    heard_at: float
    has_ended: bool
    is_silent: bool = False


class ReportingRanks:
    """Notes when ranks report; a window lasts ``seconds``. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._voices: dict[int, _Voice] = {}

    @property
    def silent(self) -> list[int]:
        return sorted(rank for rank, voice in self._voices.items() if voice.is_silent)

    @property
    def heard(self) -> int:
        """Return the number of ranks that have ever reported."""
        return len(self._voices)

    def is_new(self, report: WindowReport) -> bool:
        """Return whether the report is not the one that its rank was last heard with."""
        known = self._voices.get(report.rank)
        return known is None or report.window != known.window

    def hear(self, report: WindowReport, now: float) -> None:
        """Take a new report, at ``now`` in epoch seconds."""
        known = self._voices.get(report.rank)
        was_silent = known is not None and known.is_silent
        self._voices[report.rank] = _Voice(report.host, report.window, now, report.ended, was_silent)

    @property
    def findings(self) -> list[Finding]:
        """Return the ranks that are silent."""
        return [_silent(rank, voice) for rank, voice in sorted(self._voices.items()) if voice.is_silent]

    def changes(self, now: float) -> list[LiveEvent]:
        """Return the ranks that have fallen silent, and those that report again."""
        events, now_ns = [], round(now * 1e9)
        for rank, voice in sorted(self._voices.items()):
            quiet = now - voice.heard_at
            is_silent = quiet > SILENT_WINDOWS * self._seconds and not voice.has_ended
            if is_silent and not voice.is_silent:
                sentence = f"Rank {rank} on {voice.host} has not reported for {quiet:.0f} s: dead, stuck or cut off."
                events.append(LiveEvent(FOUND, now_ns, _silent(rank, voice), sentence))
            elif voice.is_silent and not is_silent:
                sentence = f"Rank {rank} on {voice.host} reports again."
                events.append(LiveEvent(CLEARED, now_ns, _silent(rank, voice), sentence))
            voice.is_silent = is_silent
        return events


def _silent(rank: int, voice: _Voice) -> Finding:
    since_ns = round(voice.heard_at * 1e9)
    return Finding(
        id=finding_id(SILENT, RANKS, "", [rank]),
        kind=SILENT,
        place=RANKS,
        who=f"rank {rank} on {voice.host}",
        ranks=(rank,),
        hosts=(voice.host,) if voice.host else (),
        since_ns=since_ns,
        evidence=f"Rank {rank} on {voice.host} has not reported since {clock_time(since_ns)}: dead, stuck or cut off.",
        advice="See what its process does, and the log of its node.",
    )
