"""Sinks of the monitor's findings: the log, files of the run, other exporters, and a webhook."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec import structs

from commtrace.analysis.clocks.time_of_day import iso_utc
from commtrace.config import MonitorConfig
from commtrace.exporters.monitor.messages import MOST_BYTES, MOST_EVENTS, MonitorFindings
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.findings.finding import HANG, MOST_MEMBERS, NOT_JUDGED, SILENT, Finding
from commtrace.findings.status import CLEARED, JobView, LiveEvent, MonitorStatus
from commtrace.live.http.redaction import http_reason, redacted_url
from commtrace.live.rank import LiveRank
from commtrace.recording.options import PAGERDUTY, SLACK
from commtrace.trace.files.safe_files import open_to_append, replace_file
from commtrace.trace.inputs import printable
from commtrace.trace.json_values import JsonObject, fields_to_json

_logger = logging.getLogger("commtrace")

_MOST_SENTENCE: Final = 2_048
_MOST_RANKS: Final = 256
_MOST_HOSTS: Final = 16
_MOST_NAME: Final = 64
_MOST_STRETCHES: Final = 16
_MOST_STEPS: Final = 256
_MOST_FINDINGS_BYTES: Final = MOST_BYTES // 2
"""Leaves room for the rest of a reply."""


class AlertSink(Protocol):
    """A destination of findings."""

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        """Take the new events, possibly none, and the present state."""


class LogSink:
    """Logs one line per event, and an abstention once until it is over."""

    def __init__(self) -> None:
        self._abstains = False

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        for event in events:
            _logger.warning("commtrace: %s", printable(event.sentence))
        not_judged = next((finding for finding in status.findings if finding.kind == NOT_JUDGED), None)
        if not_judged is not None and not self._abstains:
            _logger.warning("commtrace: %s", printable(not_judged.line()))
        self._abstains = not_judged is not None


class FileSink:
    """Writes ``monitor.json``, the present state, and ``monitor.jsonl``, one line per event. Schemas: docs/json."""

    def __init__(self, directory: Path) -> None:
        self._status = directory / "monitor.json"
        self._events = directory / "monitor.jsonl"
        self._failed = False

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        try:
            self._status.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._status, json.dumps(fields_to_json(status)) + "\n")
            if events:
                with open(open_to_append(self._events), "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(fields_to_json(event)) + "\n" for event in events)
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
        self._rank.findings = status.findings
        self._rank.events.extend(events)
        self._rank.job = JobView(status.findings, tuple(self._rank.events), status.means)


class FindingsSink:
    """Passes the findings to the exporters of ranks that ask: of rank 0, if the monitor is outside of the job."""

    def __init__(self, store: MonitorStore) -> None:
        self._store = store
        self._events: deque[LiveEvent] = deque(maxlen=MOST_EVENTS)

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        for event in events:
            finding, sentence = _shortened(event.finding), event.sentence[:_MOST_SENTENCE]
            self._events.append(structs.replace(event, finding=finding, sentence=sentence))
        findings = tuple(map(_shortened, status.findings[:MOST_EVENTS]))
        told = MonitorFindings(findings, tuple(self._events), status.means)
        self._store.publish_findings(_fitting(told))


def _fitting(told: MonitorFindings) -> MonitorFindings:
    """Return what fits into a reply: old events are left out first, all but the newest, then the last findings."""
    while len(msgspec.json.encode(told)) > _MOST_FINDINGS_BYTES:
        if len(told.events) > 1:
            told = structs.replace(told, events=told.events[1:])
        elif len(told.findings) > 1:
            told = structs.replace(told, findings=told.findings[:-1])
        else:  # by the bounds of _shortened these two fit; the names of roles come from ranks
            return structs.replace(told, means=None)
    return told


def _shortened(finding: Finding) -> Finding:
    # Half of a large job may be slow, and a message is bounded.
    when = finding.occurrence
    return structs.replace(
        finding,
        ranks=finding.ranks[:_MOST_RANKS],
        hosts=tuple(host[:_MOST_NAME] for host in finding.hosts[:_MOST_HOSTS]),
        members=tuple(
            structs.replace(member, host=member.host[:_MOST_NAME]) for member in finding.members[:MOST_MEMBERS]
        ),
        stretches=finding.stretches[-_MOST_STRETCHES:],
        # A part of the steps would be said to be all of them: then the mean cost of a step is told.
        occurrence=None if when is not None and len(when.steps) > _MOST_STEPS else when,
        who=finding.who[: _MOST_SENTENCE // 4],
        evidence=finding.evidence[:_MOST_SENTENCE],
        advice=finding.advice[:_MOST_SENTENCE],
    )


TRIES: Final = 7
MOST_WAIT_SECONDS: Final = 120.0
_FIRST_WAIT_SECONDS: Final = 1.0
_POST_SECONDS: Final = 5.0
_LAST_SECONDS: Final = 1.0
_MOST_WAITING: Final = 100

_SEVERITIES: Final = {HANG: "critical", SILENT: "error"}
_MOST_SLACK_TEXT: Final = 3_000
_MOST_PAGERDUTY_SUMMARY: Final = 1_024
_MOST_PAGERDUTY_DETAILS: Final = 500_000
"""Bytes; PagerDuty refuses events of more than 512 KB, which a finding on thousands of ranks can be."""


def json_payload(event: LiveEvent, run_id: str) -> JsonObject:
    """Return an event and its run (docs/json/monitor-event.schema.json)."""
    return {**fields_to_json(event), "run_id": run_id}


def slack_payload(event: LiveEvent, run_id: str) -> JsonObject:
    """Return a message for an incoming webhook of Slack, or of a compatible chat."""
    symbol = ":white_check_mark:" if event.kind == CLEARED else ":warning:"
    text = f"{symbol} commtrace, run {run_id}: {event.sentence}"
    if len(text) > _MOST_SLACK_TEXT:
        text = f"{text[: _MOST_SLACK_TEXT - 1]}…"
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def pagerduty_payload(event: LiveEvent, run_id: str, routing_key: str) -> JsonObject:
    """Return an event of PagerDuty's Events API v2, which opens, adds to or resolves an incident."""
    about: JsonObject = {"routing_key": routing_key, "dedup_key": _incident(event, run_id)}
    if event.kind == CLEARED:
        return {**about, "event_action": "resolve"}
    details = json_payload(event, run_id)
    if len(json.dumps(details)) > _MOST_PAGERDUTY_DETAILS:
        details = {name: value for name, value in details.items() if name != "finding"}
    payload: JsonObject = {
        "summary": event.sentence[:_MOST_PAGERDUTY_SUMMARY],
        "source": event.finding.host or run_id,
        "severity": _SEVERITIES.get(event.finding.kind, "warning"),
        "timestamp": iso_utc(event.time_ns),
        "component": run_id,
        "class": event.finding.cause or event.finding.kind,
        "custom_details": details,
    }
    return {**about, "event_action": "trigger", "client": "commtrace", "payload": payload}


def _incident(event: LiveEvent, run_id: str) -> str:
    """Return the same key for the begin, the changes and the end of a finding, also after a restart of the job."""
    return f"commtrace-{hashlib.sha256(f'{run_id}/{event.finding.id}'.encode()).hexdigest()[:32]}"


def open_webhook(config: MonitorConfig, run_id: str) -> WebhookSink | None:
    """Return the webhook of a configuration; None if it has none."""
    if not config.webhook:
        return None
    payload: Callable[[LiveEvent, str], JsonObject] = json_payload
    if config.webhook_receiver == SLACK:
        payload = slack_payload
    elif config.webhook_receiver == PAGERDUTY:

        def payload(event: LiveEvent, run_id: str) -> JsonObject:
            return pagerduty_payload(event, run_id, config.webhook_key)

    return WebhookSink(config.webhook, run_id, payload)


class _Failure(NamedTuple):
    """A failed attempt: the reason without the address, True if another try is worth it, the wait that is asked for."""

    reason: str
    may_pass: bool
    wait_seconds: float = 0.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would follow it by a GET without the event, to any address."""

    def redirect_request(self, *_: object) -> None:
        return None


class WebhookSink:
    """POSTs every event from a thread, in order, and retries for some minutes; ``wait`` returns early at the end."""

    def __init__(
        self,
        url: str,
        run_id: str,
        payload: Callable[[LiveEvent, str], JsonObject] = json_payload,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.run_id = run_id
        self._url = url
        self._payload = payload
        self._ends = threading.Event()
        self._wait = wait or self._ends.wait
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="commtrace-webhook", daemon=True)
        self._thread.start()

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        for event in events:
            body = json.dumps(self._payload(event, self.run_id)).encode()
            try:
                self._waiting.put_nowait(body)
            except queue.Full:
                sentence = printable(event.sentence)
                _logger.warning("commtrace: the webhook is too slow; an event is only in the log: %s", sentence)

    def close(self) -> None:
        """Send the waiting events once more, with a short timeout."""
        self._ends.set()
        with contextlib.suppress(queue.Full):  # then the thread is not waiting for one
            self._waiting.put_nowait(None)
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while not (self._ends.is_set() and self._waiting.empty()):
            body = self._waiting.get()
            if body is None:
                return
            failure, tries = self._deliver(body)
            if failure is not None and not self._has_failed:
                _logger.warning(
                    "commtrace: the webhook %s did not accept an event (%s): %s",
                    redacted_url(self._url),
                    "1 try" if tries == 1 else f"{tries} tries",
                    failure.reason,
                )
            self._has_failed = failure is not None

    def _deliver(self, body: bytes) -> tuple[_Failure | None, int]:
        """Return the last failure, None after a success, and the number of tries."""
        for number in range(TRIES):
            failure = self._post(body)
            is_last = number == TRIES - 1 or self._ends.is_set()
            if failure is None or not failure.may_pass or is_last:
                break
            self._wait(min(max(_FIRST_WAIT_SECONDS * 2**number, failure.wait_seconds), MOST_WAIT_SECONDS))
        return failure, number + 1

    def _post(self, body: bytes) -> _Failure | None:
        try:
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
            with self._opener.open(request, timeout=_POST_SECONDS):
                return None
        except urllib.error.HTTPError as error:
            with error:
                what = ", a redirect, which is not followed" if 300 <= error.code < 400 else ""
                may_pass = error.code == http.HTTPStatus.TOO_MANY_REQUESTS or error.code >= 500
                return _Failure(f"{http_reason(error)}{what}", may_pass, _retry_after(error.headers.get("Retry-After")))
        except (OSError, ValueError, http.client.HTTPException) as error:  # a bad URL is a ValueError
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            is_final = isinstance(cause, (ValueError, ssl.SSLCertVerificationError))
            return _Failure(http_reason(error), not is_final)


def _retry_after(header: str | None) -> float:
    """Return the seconds in a ``Retry-After`` header, a number or a date; 0 without."""
    try:
        text = (header or "").strip()
        seconds = float(text) if text.isdecimal() else parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0
    return max(seconds, 0.0)
