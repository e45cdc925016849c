"""The sinks of the monitor: the log, the files of the run, and the webhook with receivers that refuse, hang or move."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from commtrace.config import Config, MonitorConfig
from commtrace.errors import ConfigurationError
from commtrace.exporters.monitor import sinks
from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.messages import MOST_BYTES, MonitorFindings, Reply, Report, WatchedJob, encoded
from commtrace.exporters.monitor.sinks import (
    FileSink,
    FindingsSink,
    LogSink,
    WebhookSink,
    json_payload,
    open_webhook,
    pagerduty_payload,
    slack_payload,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.findings.finding import Member, Occurrence, Stretch
from commtrace.findings.status import CLEARED, FOUND, JobMeans, LiveEvent, MonitorStatus
from commtrace.live.monitoring.standing import StandingFindings, cleared, found
from commtrace.trace.json_values import fields_to_json
from tests.json_reading import read_back
from tests.json_schemas import errors
from tests.live.findings import SECOND, hang_finding, not_judged, silent_finding, slow_finding, status
from tests.live.monitoring.window_reports import SECONDS, report


def test_that_it_cannot_be_told_who_is_slow_is_logged_once_until_it_can_be_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = LogSink()
    with caplog.at_level(logging.WARNING, logger="commtrace"):
        for reasons in (["60 ms."], ["61 ms."], [], ["62 ms."]):
            sink.alert([], status(*map(not_judged, reasons)))
    assert [record.getMessage() for record in caplog.records] == [
        "commtrace: Not judged: 60 ms.",
        "commtrace: Not judged: 62 ms.",
    ]


def test_the_files_of_a_run_match_their_schemas(tmp_path: Path) -> None:
    job = WatchedJob("run", 0, 8, SECONDS)
    store = MonitorStore(job)
    aggregator = Aggregator(job, [FileSink(tmp_path)])
    states = []
    for window in range(8):
        for rank in range(8 if window < 6 else 7):
            is_slow = rank == 5 and window < 4
            store.answer(Report(job, report(rank, window, (72, 5, 0, 5) if is_slow else (60, 5, 0, 5))))
        aggregator.join(store, now=(window + 1) * SECONDS if window < 7 else 100.0)
        states.append(json.loads((tmp_path / "monitor.json").read_text()))
    events = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]

    assert [(event["kind"], event["finding"]["kind"]) for event in events] == [
        ("found", "slow"),
        ("recovered", "slow"),
        ("found", "silent"),
    ]
    assert [[one["kind"] for one in state["findings"]] for state in states] == [
        [], ["slow"], ["slow"], ["slow"], [], [], [], ["silent"]
    ]  # fmt: skip
    assert [found for state in states for found in errors("monitor", state)] == []
    assert [found for event in events for found in errors("monitor-event", event)] == []


SILENT = LiveEvent(
    FOUND, SECOND, silent_finding(3), "Rank 3 on node0 has not reported for 12 s: dead, stuck or cut off."
)
BACK = LiveEvent(CLEARED, 2 * SECOND, silent_finding(3), "Rank 3 on node0 reports again.")


def test_links_that_somebody_has_put_into_the_run_are_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("monitor.json", "monitor.tmp", "monitor.jsonl"):
        (run / name).symlink_to(theirs)

    FileSink(run).alert([SILENT], status())

    assert theirs.read_text() == "theirs"
    assert json.loads((run / "monitor.json").read_text())["world_size"] == status().world_size
    assert "the monitor cannot write" in caplog.text


HANG = LiveEvent(FOUND, 3 * SECOND, hang_finding(), "Training has stopped: 4 of 4 ranks say so.")
RESUMED = LiveEvent(CLEARED, 4 * SECOND, hang_finding(), "Training goes on; no rank hangs any more.")
STRAGGLER = slow_finding()
SLOW = found(STRAGGLER, 8 * SECOND, "GPU")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "monitor.md"
LIMIT_SECONDS = 60.0
SECRET = "s3cret"


@dataclass
class Receiver:
    """A server that answers with these statuses, one after the other, then with 200.

    Attributes:
        received: bodies, by path.
    """

    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    received: list[tuple[str, str, Any]] = field(default_factory=list)
    url: str = ""

    @property
    def bodies(self) -> list[Any]:
        return [body for _, _, body in self.received]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    served = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.received.append((self.command, self.path, body))
            code, headers = served.answers.pop(0) if served.answers else (200, {})
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            served.received.append((self.command, self.path, None))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not on the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/services/{SECRET}"
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def sent(url: str, events: Sequence[LiveEvent], payload: Callable[..., Any] = json_payload) -> list[float]:
    """Send events and return how long was waited between tries."""
    waits: list[float] = []
    sink = WebhookSink(url, "llm-7b", payload, wait=waits.append)
    sink.alert(events, status())
    sink._waiting.put(None)
    sink._thread.join(LIMIT_SECONDS)
    assert not sink._thread.is_alive()
    return waits


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_plain_json_is_the_event_with_its_run() -> None:
    payload = json_payload(SLOW, "llm-7b")
    assert payload == {**fields_to_json(SLOW), "run_id": "llm-7b"}
    for event in (SLOW, SILENT, BACK, HANG, RESUMED, cleared(STRAGGLER, 9 * SECOND)):
        assert list(errors("monitor-event", read_back(json_payload(event, "llm-7b")))) == []


def test_slack_gets_one_line_of_text() -> None:
    assert slack_payload(SILENT, "llm-7b") == {
        "text": ":warning: commtrace, run llm-7b: Rank 3 on node0 has not reported for 12 s: dead, stuck or cut off."
    }
    assert slack_payload(BACK, "llm-7b") == {
        "text": ":white_check_mark: commtrace, run llm-7b: Rank 3 on node0 reports again."
    }


def test_slack_gets_no_markup_from_a_sentence_and_no_endless_one() -> None:
    event = replace(HANG, sentence="<!channel> & " + 5_000 * "x")
    text = read_back(slack_payload(event, "llm-7b"))["text"]
    assert text.startswith(":warning: commtrace, run llm-7b: &lt;!channel&gt; &amp; xxx")
    assert text.endswith("x…")
    assert len(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")) == 3_000


def test_pagerduty_gets_an_incident_that_is_resolved_when_the_finding_is_over() -> None:
    incident = pagerduty_payload(SLOW, "llm-7b", "key")
    assert incident == {
        "routing_key": "key",
        "event_action": "trigger",
        "dedup_key": incident["dedup_key"],
        "client": "commtrace",
        "payload": {
            "summary": SLOW.sentence,
            "source": "node0",
            "severity": "warning",
            "timestamp": "1970-01-01T00:00:08.000+00:00",
            "component": "llm-7b",
            "class": "compute",
            "custom_details": json_payload(SLOW, "llm-7b"),
        },
    }
    assert pagerduty_payload(cleared(STRAGGLER, 9 * SECOND), "llm-7b", "key") == {
        "routing_key": "key",
        "event_action": "resolve",
        "dedup_key": incident["dedup_key"],
    }


def test_pagerduty_gets_no_event_that_is_too_long_for_it() -> None:
    many = slow_finding(ranks=tuple(range(200_000)))
    payload = read_back(pagerduty_payload(found(many, 8 * SECOND, "GPU"), "llm-7b", "key"))["payload"]
    assert "finding" not in payload["custom_details"]
    assert payload["custom_details"]["sentence"] == payload["summary"]
    assert len(json.dumps(payload)) < 512 * 1024


@pytest.mark.parametrize(("begin", "end", "severity"), [(SILENT, BACK, "error"), (HANG, RESUMED, "critical")])
def test_hangs_and_silent_ranks_are_incidents_as_well(begin: LiveEvent, end: LiveEvent, severity: str) -> None:
    opened, resolved = (read_back(pagerduty_payload(event, "llm-7b", "key")) for event in (begin, end))
    assert opened["payload"]["severity"] == severity
    assert (opened["event_action"], resolved["event_action"]) == ("trigger", "resolve")
    assert opened["dedup_key"] == resolved["dedup_key"]


def test_incidents_of_other_findings_and_runs_have_other_keys() -> None:
    other_rank, other_finding = (
        replace(SILENT, finding=silent_finding(4)),
        found(slow_finding(cause="data"), 8 * SECOND, "GPU"),
    )
    keys = {
        pagerduty_payload(event, "llm-7b", "")["dedup_key"] for event in (SILENT, other_rank, HANG, SLOW, other_finding)
    }
    keys.add(pagerduty_payload(SLOW, "llm-8b", "")["dedup_key"])
    assert len(keys) == 6
    assert max(len(str(key)) for key in keys) <= 255


def test_a_finding_that_changes_stays_the_same_incident() -> None:
    standing = StandingFindings(windows_to_name=1)
    rank_1, both = slow_finding(1), slow_finding(1, ranks=(1, 2), who="ranks 1 and 2", cause="data")
    events = [event for seen in ([rank_1], [both], []) for event in standing.join(seen, 9.0, "GPU")]
    assert [event.kind for event in events] == ["found", "changed", "recovered"]
    payloads = [pagerduty_payload(event, "llm-7b", "key") for event in events]
    assert [payload["event_action"] for payload in payloads] == ["trigger", "trigger", "resolve"]
    assert len({payload["dedup_key"] for payload in payloads}) == 1


def test_the_examples_of_the_documentation_are_what_is_sent() -> None:
    _, _, section = PAGE.read_text("utf-8").partition("\n## Webhook\n")
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)]
    at = 1795425247 * SECOND
    event = replace(SILENT, time_ns=at, finding=silent_finding(3, since_ns=at - 12 * SECOND))
    incident = read_back(pagerduty_payload(event, "llm-7b", "0f3c6b0a4d6e4f5a9d7c1b2e8a7f6c5d"))
    incident["payload"]["custom_details"] = {}
    assert shown == [slack_payload(event, "llm-7b"), incident, json_payload(event, "llm-7b")]


@pytest.mark.parametrize(
    ("url", "given", "receiver"),
    [
        ("https://hooks.slack.com/services/T0/B0/abc", "", "slack"),
        ("https://events.pagerduty.com/v2/enqueue", "", "pagerduty"),
        ("https://events.eu.pagerduty.com/v2/enqueue", "", "pagerduty"),
        ("https://hooks.example.com/hooks.slack.com", "", "json"),
        ("https://chat.example.com/hooks/abc", "slack", "slack"),
        ("https://hooks.slack.com/services/T0/B0/abc", "json", "json"),
        ("http://[/", "", "json"),
    ],
)
def test_the_form_is_as_given_or_that_of_the_host(url: str, given: str, receiver: str) -> None:
    assert MonitorConfig(webhook=url, webhook_format=given, webhook_key="key").webhook_receiver == receiver


def test_pagerduty_without_a_key_is_a_wrong_configuration() -> None:
    with pytest.raises(ConfigurationError, match="COMMTRACE_MONITOR_WEBHOOK_KEY"):
        Config.from_env({"COMMTRACE_MONITOR_WEBHOOK": "https://events.pagerduty.com/v2/enqueue"})


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("json", json_payload(SILENT, "llm-7b")),
        ("slack", slack_payload(SILENT, "llm-7b")),
        ("pagerduty", pagerduty_payload(SILENT, "llm-7b", SECRET)),
    ],
)
def test_the_configured_form_arrives(receiver: Receiver, form: str, body: Any) -> None:
    sink = open_webhook(MonitorConfig(webhook=receiver.url, webhook_format=form, webhook_key=SECRET), "llm-7b")
    assert sink is not None
    sink.alert([SILENT], status())
    sink.close()
    sink._thread.join(LIMIT_SECONDS)
    assert receiver.received == [("POST", f"/services/{SECRET}", body)]


def test_without_a_url_there_is_no_webhook() -> None:
    assert open_webhook(MonitorConfig(webhook_format="slack"), "llm-7b") is None


def test_events_that_fail_for_a_moment_are_sent_again_in_order(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(500, {}), (503, {}), (502, {})]
    assert sent(receiver.url, [SILENT, BACK]) == [1, 2, 4]
    assert [body["kind"] for body in receiver.bodies] == [*["found"] * 4, "recovered"]
    assert caplog.records == []


def test_a_receiver_says_when_to_try_again(receiver: Receiver) -> None:
    later = format_datetime(datetime.now(timezone.utc) + timedelta(hours=1), usegmt=True)
    receiver.answers = [(429, {"Retry-After": wait}) for wait in ("30", later, "0", "soon", "-5")]
    assert sent(receiver.url, [SILENT]) == [30, 120, 4, 8, 16]
    assert len(receiver.received) == 6


def test_a_receiver_that_goes_on_failing_is_given_up_and_reported_once_without_what_is_secret(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(500, {})] * 14
    assert sent(receiver.url, [SILENT, BACK]) == [1, 2, 4, 8, 16, 32] * 2
    address = receiver.url.partition("/services")[0]
    assert messages(caplog) == [
        f"commtrace: the webhook {address}/… did not accept an event (7 tries): HTTP status 500"
    ]


@pytest.mark.parametrize("code", [400, 403, 404, 410])
def test_events_that_a_receiver_refuses_for_good_are_not_sent_again(
    receiver: Receiver, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(code, {})]
    assert sent(receiver.url, [SILENT, BACK]) == []
    assert [body["kind"] for body in receiver.bodies] == ["found", "recovered"]
    assert messages(caplog)[0].endswith(f"did not accept an event (1 try): HTTP status {code}")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, code: int, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answers = [(code, {"Location": receiver.url.replace("services", "elsewhere")})]
    assert sent(receiver.url, [SILENT]) == []
    assert [path for _, path, _ in receiver.received] == [f"/services/{SECRET}"]
    assert f"HTTP status {code}, a redirect, which is not followed" in caplog.text
    assert SECRET not in caplog.text


def test_a_receiver_that_is_not_there_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert sent(f"http://127.0.0.1:{port}/{SECRET}", [SILENT]) == [1, 2, 4, 8, 16, 32]
    assert messages(caplog) == [
        f"commtrace: the webhook http://127.0.0.1:{port}/… did not accept an event (7 tries): Connection refused"
    ]


def test_a_receiver_that_answers_too_late_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "_POST_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert len(sent(f"http://127.0.0.1:{silent.getsockname()[1]}/", [SILENT])) == 6
    assert "(7 tries): TimeoutError" in caplog.text


@pytest.mark.parametrize(
    "url", [f"http://me:{SECRET}@127.0.0.1:1/", f"http://127.0.0.1:{SECRET}/", f"http://127.0.0.1\x00/{SECRET}"]
)
def test_an_address_that_cannot_be_used_does_not_show_its_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    sent(url, [SILENT])
    assert "did not accept an event" in caplog.text
    assert SECRET not in caplog.text


def test_a_receiver_that_hangs_holds_up_neither_the_monitor_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "_POST_SECONDS", 2 * LIMIT_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        sink = WebhookSink(f"http://127.0.0.1:{silent.getsockname()[1]}/", "llm-7b")
        begin = time.monotonic()
        sink.alert([SILENT] * 300, status())
        sink.close()
        assert time.monotonic() - begin < LIMIT_SECONDS
    assert caplog.text.count("the webhook is too slow") >= 190


def test_the_end_of_the_job_waits_for_no_second_try(receiver: Receiver) -> None:
    receiver.answers = [(500, {})] * 10
    sink = WebhookSink(receiver.url, "llm-7b")
    sink._ends.set()
    sink.alert([SILENT, BACK], status())
    sink.close()
    sink._thread.join(LIMIT_SECONDS)
    assert not sink._thread.is_alive()
    assert len(receiver.received) <= 2


def test_an_event_that_the_webhook_does_not_get_is_logged_without_control_characters(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WebhookSink, "_run", lambda _: None)
    sink = WebhookSink("http://127.0.0.1:1/", "llm-7b")
    sink.alert([replace(SILENT, sentence="node\x1b[2J")] * 101, status())
    assert "\x1b" not in caplog.text
    assert caplog.text.count("the webhook is too slow") == 1


@pytest.mark.parametrize("num_events", [0, 1, 50])
@pytest.mark.parametrize("host", ["node0", "\x07" * 1_000])
def test_what_ranks_are_told_fits_into_a_message_however_much_is_found(host: str, num_events: int) -> None:
    """Of a job of 4,096 ranks with as many slow ones, on hosts whose names take six bytes a letter in JSON."""
    ranks, long = tuple(range(4_096)), host * 99
    many = slow_finding(
        ranks=ranks,
        members=tuple(Member(rank, host, 1e6) for rank in range(100)),
        hosts=tuple(f"{host}{rank}" for rank in ranks),
        stretches=tuple(Stretch(step, step, 1e6) for step in range(9_000)),
        occurrence=Occurrence(tuple(range(1_000_000, 1_009_000)), 10 * SECOND, 90_000),
        who=host * 9,
        evidence=long,
        advice=long,
    )
    event = found(many, 8 * SECOND, "GPU")

    told = asked_of_a_sink([event] * num_events, status(*[many] * 50))

    assert len(encoded(Reply(findings=told))) < MOST_BYTES
    assert len(told.events) >= min(num_events, 1)
    assert len(told.findings) >= (1 if num_events else 2)
    assert told.findings[0].ranks == ranks[:256]
    assert [(one.first, one.last) for one in told.findings[0].stretches] == [
        (step, step) for step in range(8_984, 9_000)
    ]
    assert told.findings[0].occurrence is None, "some of the steps would be taken for all of them"


def test_the_newest_events_stay_as_many_as_fit_beside_all_findings() -> None:
    long = "\x07" * 2_048
    events = [replace(SILENT, time_ns=number, sentence=long) for number in range(20)]
    rare = Occurrence((7, 9), 3 * SECOND, 40)

    told = asked_of_a_sink(events, status(*[slow_finding(rank, occurrence=rare) for rank in range(15)]))

    assert [finding.rank for finding in told.findings] == [*range(15)]
    assert told.findings[0].occurrence == rare
    assert 1 < len(told.events) < 20
    assert [event.time_ns for event in told.events] == [*range(20 - len(told.events), 20)]


def test_roles_with_endless_names_do_not_keep_findings_from_ranks() -> None:
    exposed = {"\x07" * 1_000 + str(number): 5 for number in range(16)}
    means = JobMeans(3, 8, 100_000_000, {"\x07" * 1_000 + str(number): 5 for number in range(16)}, exposed)
    told = asked_of_a_sink([SILENT], replace(status(slow_finding()), means=means))
    assert (told.events, told.findings, told.means) == ((SILENT,), (slow_finding(),), None)


def asked_of_a_sink(events: Sequence[LiveEvent], present: MonitorStatus) -> MonitorFindings:
    """What a rank gets that asks after these events."""
    store = MonitorStore(WatchedJob("run", 0, 4_096, SECONDS))
    FindingsSink(store).alert(events, present)
    return store.answer(Report(WatchedJob("run", 0, 4_096, SECONDS), report(0, 1), asks_findings=True)).findings
