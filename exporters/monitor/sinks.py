"""Sinks of the monitor's findings: the log, files of the run, and other exporters."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace.exporters.monitor.messages import MOST_EVENTS, Findings
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.live.monitoring.findings import JobView, LiveEvent, LiveStraggler, MonitorStatus
from commtrace.live.rank import LiveRank
from commtrace.trace.inputs import printable

_logger = logging.getLogger("commtrace")

_MOST_SENTENCE: Final = 4_096
_MOST_RANKS: Final = 256


class LogSink:
    """Logs one line per event, and an abstention once until it is over."""

    def __init__(self) -> None:
        self._abstains = False

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        for event in events:
            _logger.warning("commtrace: %s", printable(event.sentence))
        abstentions = status.abstentions
        if abstentions and not self._abstains:
            _logger.warning("commtrace: %s", printable(abstentions[0]))
        self._abstains = bool(abstentions)


class FileSink:
    """Writes ``monitor.json``, the present state, and ``monitor.jsonl``, one line per event. Schemas: docs/json."""

    def __init__(self, directory: Path) -> None:
        self._status = directory / "monitor.json"
        self._events = directory / "monitor.jsonl"
        self._failed = False

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        try:
            beside = self._status.with_suffix(".tmp")
            beside.write_text(json.dumps(status.to_json()) + "\n", encoding="utf-8")
            beside.replace(self._status)
            if events:
                with self._events.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(event.to_json()) + "\n" for event in events)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                _logger.warning("commtrace: the monitor cannot write %s: %s", self._status, error)


class LiveSink:
    """Passes the findings to the other exporters of this process."""

    def __init__(self, rank: LiveRank) -> None:
        self._rank = rank
        rank.joins = True

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        self._rank.stragglers = status.stragglers
        self._rank.events.extend(events)
        self._rank.job = JobView(status.stragglers, tuple(self._rank.events), status.means)


class FindingsSink:
    """Passes the findings to the exporters of ranks that ask: of rank 0, if the monitor is outside of the job."""

    def __init__(self, store: MonitorStore) -> None:
        self._store = store
        self._events: deque[LiveEvent] = deque(maxlen=MOST_EVENTS)

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        for event in events:
            straggler = _with_fewer_ranks(event.straggler) if event.straggler is not None else None
            self._events.append(replace(event, sentence=event.sentence[:_MOST_SENTENCE], straggler=straggler))
        stragglers = tuple(map(_with_fewer_ranks, status.stragglers[:MOST_EVENTS]))
        self._store.publish_findings(Findings(stragglers, tuple(self._events), status.means))


def _with_fewer_ranks(straggler: LiveStraggler) -> LiveStraggler:
    # Half of a large job may be slow, and a message is bounded.
    return replace(straggler, ranks=straggler.ranks[:_MOST_RANKS])
