"""Frames of made metrics: the text of an endpoint, and the answers of a Prometheus."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from commtrace.errors import RunNotFoundError
from commtrace.live.top import from_metrics
from commtrace.live.top.frame import Exposed
from commtrace.live.top.from_metrics import (
    EndpointSource,
    MetricSample,
    MetricsError,
    PrometheusSource,
    ScrapedTotals,
    fetch,
    frame_of_totals,
    metrics_source,
    totals_of,
)

NOW = 2_000 * 10**9


def text(steps: int, *, compute: float = 0.6, ended: float = 1_999.0) -> str:
    """What a rank answers after so many steps of one second."""
    return f"""# TYPE commtrace_step_duration_seconds histogram
commtrace_step_duration_seconds_bucket{{le="+Inf"}} {steps}
commtrace_step_duration_seconds_sum {steps}
commtrace_step_duration_seconds_count {steps}
# TYPE commtrace_compute_seconds counter
commtrace_compute_seconds_total{{phase="forward"}} {steps * compute / 3}
commtrace_compute_seconds_total{{phase="backward"}} {steps * compute * 2 / 3}
# TYPE commtrace_exposed_seconds counter
commtrace_exposed_seconds_total{{operation="all_reduce",role="dp"}} {steps * 0.1}
commtrace_exposed_seconds_total{{operation="all_gather",role="dp"}} {steps * 0.1}
# TYPE commtrace_bubble_seconds counter
commtrace_bubble_seconds_total {steps * 0.15}
# TYPE commtrace_other_seconds counter
commtrace_other_seconds_total {steps * 0.05}
# TYPE commtrace_spans_dropped counter
commtrace_spans_dropped_total{{kind="forward"}} 0
commtrace_spans_dropped_total{{kind="module"}} 4
# TYPE commtrace_last_step gauge
commtrace_last_step {steps - 1}
# TYPE commtrace_last_step_timestamp_seconds gauge
commtrace_last_step_timestamp_seconds {ended}
# TYPE process_open_fds gauge
process_open_fds 12
"""


def test_an_endpoint_gives_the_parts_of_its_rank_and_says_what_it_does_not_know() -> None:
    frame = EndpointSource("http://h:1/metrics", 20).frame_of(text(10), NOW)
    (row,) = frame.ranks
    assert (row.rank, row.step_ns, row.last_step, row.age_ns, row.dropped) == (-1, 10**9, 9, 10**9, 4)
    assert row.parts == {"compute": 600_000_000, "bubble": 150_000_000, "other": 50_000_000, "exposed": 200_000_000}
    assert row.exposed == {"dp": Exposed(200_000_000, None, None)}
    assert (row.waits_for, row.waits_ns, row.blame_ns, row.state) == (None, None, None, "running")
    assert frame.world_size is None
    assert [one.line() for one in frame.findings] == ["Not judged: One rank alone does not show who is slow."]


def test_launch_bound_time_is_of_all_phases_and_unknown_without_its_metric() -> None:
    (row,) = EndpointSource("http://h:1/metrics", 20).frame_of(text(10), NOW).ranks
    assert row.launch_bound_ns is None
    launches = """# TYPE commtrace_launch_bound_seconds counter
commtrace_launch_bound_seconds_total{phase="forward"} 1
commtrace_launch_bound_seconds_total{phase="in_no_span"} 0.5
"""
    (row,) = EndpointSource("http://h:1/metrics", 20).frame_of(text(10) + launches, NOW).ranks
    assert row.launch_bound_ns == 150_000_000


def test_labels_that_distinguish_series_of_a_rank_are_no_coordinates() -> None:
    joins = """# TYPE commtrace_finding_cost_seconds gauge
commtrace_finding_cost_seconds{finding_rank="1",kind="slow",cause="compute",pp="2"} 0.1
# TYPE commtrace_exposed_split_seconds counter
commtrace_exposed_split_seconds_total{operation="all_reduce",role="dp",part="wait"} 0.1
"""
    (row,) = EndpointSource("http://h:1/metrics", 20).frame_of(text(10) + joins, NOW).ranks
    assert row.where == "pp2"


def test_the_second_look_is_about_what_is_new() -> None:
    source = EndpointSource("http://h:1/metrics", 20)
    source.frame_of(text(10), NOW)
    grown = text(10).replace("_sum 10", "_sum 18").replace("_count 10", "_count 14")
    frame = source.frame_of(grown, NOW)
    assert (frame.ranks[0].step_ns, frame.num_steps) == (2 * 10**9, 4)
    assert frame.before_ns == round(18e9 / 14)


def test_looks_older_than_the_steps_shown_are_forgotten() -> None:
    source = EndpointSource("http://h:1/metrics", 5)
    assert [source.frame_of(text(steps), NOW).num_steps for steps in (10, 12, 14, 16, 18, 20)] == [10, 2, 4, 6, 6, 6]


def test_a_job_that_was_started_again_begins_anew() -> None:
    source = EndpointSource("http://h:1/metrics", 5)
    source.frame_of(text(10), NOW)
    assert source.frame_of(text(3), NOW).num_steps == 3


def test_no_step_yet_is_reported() -> None:
    with pytest.raises(RunNotFoundError, match="no complete step"):
        EndpointSource("http://h:1/metrics", 5).frame_of("commtrace_spans_total 7\n", NOW)


def test_a_page_without_metrics_is_an_error() -> None:
    with pytest.raises(MetricsError, match="text format"):
        EndpointSource("http://h:1/metrics", 5).frame_of("<html>no</html>", NOW)


def test_a_rank_whose_last_step_is_long_ago_is_silent() -> None:
    frame = EndpointSource("http://h:1/metrics", 20).frame_of(text(10, ended=1_900.0), NOW)
    assert frame.ranks[0].state == "silent"
    assert frame.verdict == "No step has ended for 100 s (a step takes 1.0 s)."
    assert frame.findings[0].advice == "See where each rank is: commtrace doctor RUN"


@pytest.mark.parametrize(("delay", "quiet"), [(0.0, 15), (15.0, 30)])
def test_a_rank_is_silent_after_15_seconds_and_the_age_of_what_a_prometheus_knows(delay: float, quiet: int) -> None:
    def kinds(quiet: int) -> list[str]:
        so_far = {str(rank): totals(rank, 0.06, 0.04) for rank in range(2)}
        for one in so_far.values():
            one.seconds, one.ended = 1.0, NOW / 1e9 - quiet
        return [one.kind for one in frame_of_totals("p", so_far, so_far, NOW, delay_seconds=delay).findings]

    assert [kinds(quiet), kinds(quiet + 1)] == [[], ["hang"]]


def test_while_a_rank_saves_or_evaluates_no_step_has_to_end() -> None:
    saving = """# TYPE commtrace_open_phase gauge
commtrace_open_phase{phase="checkpoint"} 1
commtrace_open_phase{phase="evaluation"} 0
"""
    frame = EndpointSource("http://h:1/metrics", 20).frame_of(text(10, ended=1_900.0) + saving, NOW)
    assert [one.kind for one in frame.findings] == ["not_judged"]
    assert frame.notes[0] == "A checkpoint or an evaluation, in which no step ends: on the rank."


def totals(rank: int, work: float, exposed: float, pp: int = 0) -> ScrapedTotals:
    labels = {"rank": str(rank), "pp": str(pp), "node": f"n{rank}", "run_id": "r"}
    return ScrapedTotals(labels, 10, 10.0, {"compute": 10 * work}, {"dp": 10 * exposed}, 10 * work, 0, 9, 1_999.0)


def test_a_rank_that_works_longer_than_its_peers_is_named() -> None:
    found = {str(rank): totals(rank, 0.9 if rank == 2 else 0.6, 0.1 if rank == 2 else 0.4) for rank in range(4)}
    frame = frame_of_totals("p", found, found, NOW)
    (slow,) = frame.slow
    assert (slow.rank, slow.host, frame.sources[slow.id]) == (2, "n2", "metrics")
    assert slow.line() == "rank 2 on n2, cause unknown: 300 ms per step (30.0% of it)"
    assert (frame.run_id, frame.hosts, frame.ranks[3].where) == ("r", 4, "pp0")


def test_ranks_of_other_stages_are_no_peers_and_an_alert_is_not_told_twice() -> None:
    stages = {str(rank): totals(rank, 0.9 if rank == 2 else 0.6, 0.1, pp=rank) for rank in range(4)}
    assert frame_of_totals("p", stages, stages, NOW).findings == ()
    same = {str(rank): totals(rank, 0.9 if rank == 2 else 0.6, 0.1) for rank in range(4)}
    frame = frame_of_totals("p", same, same, NOW, [{"rank": "2", "node": "n2"}])
    assert [(one.rank, frame.sources[one.id]) for one in frame.findings] == [(2, "alert")]


def test_findings_with_one_id_are_told_apart_with_the_source_of_each() -> None:
    """Two alerts and the metrics, none of which names its rank."""
    found = {str(rank): totals(rank, 0.9 if rank == 2 else 0.6, 0.1) for rank in range(4)}
    found["2"].labels = {"node": "n2", "pp": "0"}
    frame = frame_of_totals("p", found, found, NOW, [{"node": "a"}, {"node": "b"}])
    assert [(finding.id, finding.host, frame.sources[finding.id]) for finding in frame.findings] == [
        ("slow/ranks/unknown+3", "n2", "metrics"),
        ("slow/ranks/unknown", "a", "alert"),
        ("slow/ranks/unknown+2", "b", "alert"),
    ]


def test_stages_that_nobody_told_are_no_peers() -> None:
    """Ranks 1 and 3 are last stages; of "found", the monitor has told who does the same work, and rank 3 is slow."""
    untold = {str(rank): totals(rank, 0.9 if rank % 2 else 0.45, 0.1) for rank in range(4)}
    for rank, one in untold.items():
        one.labels = {key: text for key, text in one.labels.items() if key != "pp"}
        one.is_in_unknown_stage = rank in ("1", "3")
    assert frame_of_totals("p", untold, untold, NOW).findings == ()

    found = {str(rank): totals(rank, (0.45, 0.6, 0.45, 0.9)[rank], 0.1) for rank in range(4)}
    for rank, one in found.items():
        one.labels = {**one.labels, "pp": "", "peers": str(int(rank) % 2)}
    frame = frame_of_totals("p", found, found, NOW)
    assert [one.rank for one in frame.findings] == [3]
    assert "peers" not in frame.ranks[3].where


def test_a_rank_without_new_steps_has_no_parts() -> None:
    added, so_far = {"0": ScrapedTotals({"rank": "0"})}, {"0": totals(0, 0.5, 0.5)}
    (row,) = frame_of_totals("p", added, so_far, NOW).ranks
    assert (row.step_ns, dict(row.parts), row.last_step) == (None, {}, 9)


def test_a_stage_that_nobody_told_is_read_from_the_metrics() -> None:
    (one,) = totals_of([MetricSample("commtrace_unknown_stage", {"rank": "1"}, 1.0)]).values()
    assert one.is_in_unknown_stage


def test_nan_is_not_known() -> None:
    assert totals_of([MetricSample("commtrace_step_duration_seconds_sum", {"rank": "0"}, float("nan"))]) == {}


def test_the_address_tells_what_is_behind_it() -> None:
    assert isinstance(metrics_source("http://h:9400/metrics", 5), EndpointSource)
    assert isinstance(metrics_source("http://h:9090/", 5), PrometheusSource)


class Answers:
    """A Prometheus whose ranks make a step a second: 20 of 0.5 s, then, in the last minute, 4 of 1 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_monitor: bool = False) -> None:
        self.has_monitor = has_monitor
        monkeypatch.setattr("commtrace.live.top.from_metrics.fetch", self.fetch)
        self.asked: list[str] = []

    def fetch(self, url: str, **parameters: str) -> str:
        self.asked.append(parameters["query"])
        return json.dumps({"data": {"result": list(self.result(parameters["query"]))}})

    def result(self, query: str) -> Iterator[dict[str, Any]]:
        if query.startswith("max by (run_id)"):
            for run, ended in (("old", 100.0), ("new", 1_999.0)):
                yield {"metric": {"run_id": run}, "value": [0, str(ended)]}
            return
        steps, seconds = (20, 10.0) if "offset" in query else (24, 14.0)
        values = {
            "commtrace_step_duration_seconds_count": steps,
            "commtrace_step_duration_seconds_sum": seconds,
            "commtrace_compute_seconds_total": seconds / 2,
            "commtrace_exposed_seconds_total": seconds / 2,
            "commtrace_last_step": steps - 1,
        }
        for name, value in values.items():
            if name in query:
                for rank in ("1", "0"):
                    labels = {"run_id": "new", "rank": rank, "series": name}
                    yield {"metric": labels | ({"role": "dp"} if "exposed" in name else {}), "value": [0, str(value)]}
        if self.has_monitor and "exposed_split" in query:
            for part, value in (("wait", steps * 0.03), ("transfer", steps * 0.01)):
                labels = {"run_id": "new", "rank": "0", "role": "dp", "part": part}
                name = "commtrace_exposed_split_seconds_total"
                yield {"metric": {**labels, "series": name}, "value": [0, str(value)]}
        if self.has_monitor and "finding_cost" in query:
            slow = {"kind": "slow", "place": "ranks", "cause": "compute", "finding_rank": "1"}
            lost = {"kind": "lost", "place": "job", "cause": "transfer"}
            of_a_newer_one = {"kind": "slow", "place": "rack", "cause": "compute", "finding_rank": "1"}
            for name, value in (("cost_seconds", 0.012), ("since_step", 30), ("since_timestamp_seconds", 1_990.5)):
                for labels in (slow, lost, of_a_newer_one) if name == "cost_seconds" else (slow,):
                    metric = {"run_id": "new", "rank": "0", **labels, "__name__": f"commtrace_finding_{name}"}
                    yield {"metric": metric, "value": [0, str(value)]}


def test_the_newest_run_of_a_prometheus_is_shown_over_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch)
    frame = PrometheusSource("http://p", 20).look()
    assert (frame.run_id, [row.rank for row in frame.ranks], frame.num_steps) == ("new", [0, 1], 4)
    assert frame.ranks[0].step_ns == 10**9
    assert frame.ranks[0].parts == {"compute": 500_000_000, "exposed": 500_000_000}
    assert frame.before_ns == round(14e9 / 24)
    assert frame.notes == (
        "Means over the last 60 s.",
        "This run has the newest step of 2 runs. Choose another with --run-id: old",
    )
    runs, now, before, *others = answers.asked
    assert before == now.replace('run_id="new"}', 'run_id="new"} offset 60s'), "a step and its parts are of one query"
    assert not [query for query in (runs, *others) if "step_duration" in query]


def test_findings_of_the_monitor_are_shown_with_their_split(monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, has_monitor=True)
    frame = PrometheusSource("http://p", 20).look()

    slow, lost = frame.findings
    assert (slow.rank, slow.line(), frame.sources[slow.id]) == (
        1, "rank 1, compute: 12 ms per step (1.2% of it)", "monitor",
    )  # fmt: skip
    assert (slow.since_step, slow.since_ns) == (30, 1_990_500_000_000)
    assert lost.line() == "exposed communication: 12 ms per step (1.2% of it)"
    assert lost.advice == "Overlap it with compute, or send less."
    assert frame.ranks[0].exposed == {"dp": Exposed(500_000_000, 375_000_000, 125_000_000)}
    assert frame.ranks[1].exposed == {"dp": Exposed(500_000_000)}, "nothing of it was compared"


def test_a_run_that_a_prometheus_does_not_know_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch)
    with pytest.raises(RunNotFoundError, match=r"has no run mine\. Its runs: old, new"):
        PrometheusSource("http://p", 20, "mine").look()


def test_a_server_that_is_no_prometheus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commtrace.live.top.from_metrics.fetch", lambda url, **parameters: "<html>")
    with pytest.raises(MetricsError, match="does not answer like a Prometheus"):
        PrometheusSource("http://p", 20).look()


SECRET = "s3cret"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers whoever has the password with the query, and 100 bytes at /much."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
            is_known = given == f"me:{SECRET}".encode()
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(b"x" * 100 if self.path == "/much" else self.path.encode())

        def log_message(self, *_: object) -> None:
            """Not on stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(5)


def test_credentials_of_the_address_are_sent_with_the_request(server: HTTPServer) -> None:
    assert fetch(f"http://me:{SECRET}@127.0.0.1:{server.server_port}/api", query="a b") == "/api?query=a+b"


def test_a_refused_login_is_answered_with_how_to_give_credentials(server: HTTPServer) -> None:
    with pytest.raises(MetricsError) as error:
        fetch(f"http://you:{SECRET}@127.0.0.1:{server.server_port}/metrics")

    assert str(error.value) == (
        f"http://127.0.0.1:{server.server_port}/… answers HTTP status 401 "
        "(credentials: http://USER:PASSWORD@HOST:PORT/…)"
    )


def test_no_more_is_read_than_metrics_of_a_job(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_metrics, "_MOST_BYTES", 99)
    with pytest.raises(MetricsError, match="answers more than 99 bytes"):
        fetch(f"http://me:{SECRET}@127.0.0.1:{server.server_port}/much")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://me:{SECRET}@127.0.0.1:9/metrics", "http://127.0.0.1:9/… does not answer: Connection refused."),
        (f"http://me:{SECRET}/x@127.0.0.1:9/metrics", "a URL that cannot be read does not answer: InvalidURL."),
        (f"http://127.0.0.1:9/metrics?token={SECRET}", "http://127.0.0.1:9/… does not answer: Connection refused."),
        (f"http://[{SECRET}/metrics", "a URL that cannot be read does not answer: ValueError."),
    ],
)
def test_an_error_names_the_host_alone(url: str, message: str) -> None:
    with pytest.raises(MetricsError) as error:
        metrics_source(url, 5).look()

    assert str(error.value) == f"{message} Check that the job runs, and the address."


@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b"HTTP/1.1 "]
)
def test_an_answer_that_comes_byte_by_byte_is_given_up(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_metrics, "_SECONDS", 0.5)
    ends = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(begin)
            while not ends.wait(0.05):
                connection.sendall(b"2")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        try:
            with pytest.raises(MetricsError, match=r"does not answer in full within 0\.5 s"):
                fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        finally:
            ends.set()
            thread.join(5)


def test_a_rank_does_not_answer_with_as_much_as_a_prometheus(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_metrics, "_MOST_BYTES_OF_RANK", 99)
    with pytest.raises(MetricsError, match="answers more than 99 bytes"):
        from_metrics.fetch_of_rank(f"http://me:{SECRET}@127.0.0.1:{server.server_port}/much")
