"""The exporter against a real receiver: over HTTP, packed, slow, dead and back; every span is accounted for."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from commtrace.config import Config, OtlpConfig
from commtrace.errors import ConfigurationError
from commtrace.exporters.live import live_view
from commtrace.exporters.otlp import exporter as exporter_module
from commtrace.exporters.otlp.exporter import OtlpExporter, open_otlp
from commtrace.findings.status import LiveEvent
from commtrace.live.monitoring.job_steps import JobStep
from commtrace.live.summary import trace_id
from commtrace.recording.recorder import Recorder
from tests.exporters.otlp.made import (
    EPOCH_NS,
    RUN,
    SECONDS,
    WORLD_SIZE,
    is_settled,
    job_spans,
    live_rank,
    run_steps,
)  # fmt: skip
from tests.exporters.otlp.receiver import attributes, receiving
from tests.free_ports import free_port
from tests.live.findings import silent_finding
from tests.waiting import until


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_receiver_gets_every_span(
    compression: str, opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "gpt")
        exporter = opened(rank=0)
        run_steps(exporter, 0, 3)
        until(lambda: is_settled(exporter))  # the end of a job waits less than two seconds
        exporter.close()

    made = [span for step in range(3) for span in job_spans(step)[0]]
    assert [(span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in receiver.spans] == [
        (span.name, span.start_time, span.end_time) for span in made
    ]
    assert {span.trace_id for span in receiver.spans} == {trace_id(RUN, step).to_bytes(16, "big") for step in range(3)}
    assert attributes(receiver.spans[1])["commtrace.compute_ns.forward"] == 300
    assert (receiver.resources[0]["service.name"], receiver.resources[0]["dl.rank"]) == ("gpt", 0)
    assert {headers.get("Content-Encoding", "none") for headers in receiver.headers} == {compression}
    assert {headers["x-token"] for headers in receiver.headers} == {"secret"}
    account = exporter.account
    assert (account.produced, account.sent, account.total_dropped) == (27, 27, 0)


def test_a_slow_receiver_costs_spans_but_not_the_harvester(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        receiver.seconds_per_request = 0.3
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened(rank=1, most_spans=40)
        run_steps(exporter, 0, 50)
        produced = exporter.account.produced
        until(lambda: exporter.account.sent >= 40)
        receiver.seconds_per_request = 0.0
        run_steps(exporter, 50, 2)
        until(lambda: is_settled(exporter))
        exporter.close()

    account = exporter.account
    assert produced == 50 * 8
    assert account.produced == account.sent + account.dropped["queue_full"] == 52 * 8
    assert account.dropped["queue_full"] >= 50 * 8 - 40 - 8 - 8
    assert len(receiver.spans) == account.sent
    assert len([one for one in caplog.records if "does not get all spans" in one.message]) == 1
    assert f"{account.total_dropped} of {account.produced} spans were not exported" in caplog.text


def test_a_receiver_that_dies_and_comes_back_is_used_again(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    with receiving() as first:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", first.url)
        exporter = opened(rank=0)
        run_steps(exporter, 0, 4)
        until(lambda: exporter.account.sent == 36)
    run_steps(exporter, 4, 3)
    until(lambda: exporter.account.dropped["refused"] == 27)
    with receiving(first.port) as second:
        run_steps(exporter, 7, 5)
        until(lambda: is_settled(exporter))
        exporter.close()

    account = exporter.account
    assert (account.produced, account.sent, account.dropped["refused"]) == (12 * 9, 9 * 9, 27)
    assert (len(first.spans), len(second.spans)) == (36, 45)
    steps = [one for one in second.spans if one.name == "step"]
    assert attributes(steps[-1])["commtrace.otlp.dropped_spans"] == 27
    others = [one.name for one in caplog.records if one.name != "commtrace" and one.levelno >= logging.WARNING]
    assert others == []


def test_the_end_does_not_wait_for_a_receiver_that_does_not_answer(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(exporter_module, "CLOSE_SECONDS", 0.2)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
        exporter = opened(rank=0)
        run_steps(exporter, 0, 3)
        exporter.close()
        account = exporter.account
        assert (account.produced, account.sent, account.dropped["at_the_end"]) == (27, 0, 27)
        exporter._thread.join(SECONDS)

    assert not exporter._thread.is_alive()
    assert (account.sent, account.total_dropped) == (0, 27)  # what the thread told after the end is not counted


class Held:
    """A sink that takes its first batch only when it may."""

    def __init__(self) -> None:
        self.may, self.has_one = threading.Event(), threading.Event()
        self.batches: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        self.batches.append(len(spans))
        self.has_one.set()
        return self.may.wait(SECONDS)

    def shutdown(self) -> None:
        pass


def test_steps_that_have_waited_are_sent_together(opened: Callable[..., OtlpExporter]) -> None:
    sink = Held()
    exporter = opened(spans=lambda: sink)
    run_steps(exporter, 0, 1)
    assert sink.has_one.wait(SECONDS)
    run_steps(exporter, 1, 5)
    sink.may.set()
    exporter.close()

    assert sink.batches == [9, 45]
    assert exporter.account.sent == 54


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        self.spans += spans
        return True

    def shutdown(self) -> None:
        pass


class Broken:
    """A sink that is."""

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        raise RuntimeError("broken")

    def shutdown(self) -> None:
        pass


def test_a_defect_switches_the_export_off_once_and_is_still_accounted_for(
    opened: Callable[..., OtlpExporter], caplog: pytest.LogCaptureFixture
) -> None:
    exporter = opened(rank=0, spans=Broken)
    run_steps(exporter, 0, 1)
    until(lambda: not exporter._thread.is_alive())
    run_steps(exporter, 1, 2)
    exporter.close()

    assert is_settled(exporter)
    assert (exporter.account.produced, exporter.account.sent) == (27, 0)
    assert len([one for one in caplog.records if "OpenTelemetry export is off" in one.message]) == 1


def test_spans_go_to_a_provider_that_the_script_has_installed(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(memory, max_queue_size=512))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    exporter = opened(rank=0)
    run_steps(exporter, 0, 150)
    until(lambda: exporter.account.sent == 150 * 9)
    exporter.close()
    with provider.get_tracer("theirs").start_as_current_span("of the script"):
        pass
    provider.force_flush()

    spans = memory.get_finished_spans()
    provider.shutdown()
    assert len(spans) == 150 * 9 + 1, "the processor's queue of 512 lost none"
    assert spans[-1].name == "of the script"


def test_a_provider_is_left_alone_if_told_so(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened(rank=0, config=Config(otlp=OtlpConfig(level="steps", provider=False)))
        run_steps(exporter, 0, 2)
        until(lambda: is_settled(exporter))
        exporter.close()
    provider.shutdown()

    assert [span.name for span in receiver.spans] == ["job step", "step"] * 2
    assert memory.get_finished_spans() == ()


def test_metrics_of_every_rank_also_of_those_that_send_no_spans(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        exporter = opened(rank=1, config=Config(otlp=OtlpConfig(metrics=True, ranks="0")))
        run_steps(exporter, 0, 5)
        until(lambda: exporter.metric_account.sent >= 2)
        exporter.close()

    assert receiver.spans == []
    (of_resource,) = receiver.metrics[-1].resource_metrics
    assert attributes(of_resource.resource)["dl.rank"] == 1
    requests = exporter.metric_account
    assert requests.produced == requests.sent + requests.total_dropped
    assert 2 <= requests.sent <= len(receiver.metrics)
    metrics = {one.name: one for one in of_resource.scope_metrics[0].metrics}
    assert metrics["commtrace.step.duration"].histogram.data_points[0].count == 5
    assert metrics["commtrace.compute"].sum.is_monotonic


def test_requests_with_metrics_that_are_refused_are_counted_apart_from_spans(
    opened: Callable[..., OtlpExporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "0.3")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        exporter = opened(config=Config(otlp=OtlpConfig(level="steps", metrics=True)))
        run_steps(exporter, 0, 1)
        until(lambda: is_settled(exporter) and exporter.metric_account.dropped["refused"] >= 2)
        run_steps(exporter, 1, 1)
        until(lambda: is_settled(exporter))
        exporter.close()

    spans, requests = exporter.account, exporter.metric_account
    assert (spans.produced, spans.sent, spans.total_dropped) == (4, 4, 0)
    assert (requests.sent, requests.total_dropped) == (0, requests.produced)
    assert len([one for one in caplog.records if "does not get all metrics" in one.message]) == 1
    assert f"{requests.produced} of {requests.produced} requests with metrics were not exported" in caplog.text
    assert "spans were not exported" not in caplog.text


def test_findings_of_the_monitor_are_reported_once(opened: Callable[..., OtlpExporter], tmp_path: Path) -> None:
    exporter = opened(config=Config(otlp=OtlpConfig(level="steps", file=str(tmp_path))))
    finding = LiveEvent("found", 1_700_000_000 * 10**9, silent_finding(2), "…")
    run_steps(exporter, 0, 1)
    exporter._rank.events.append(finding)
    run_steps(exporter, 1, 2)
    exporter._rank.events.append(replace(finding, kind="recovered", time_ns=1_800_000_000 * 10**9))
    run_steps(exporter, 3, 1)
    until(lambda: is_settled(exporter))
    exporter.close()

    (path,) = tmp_path.glob("*traces*")
    lines = path.read_text()
    assert (lines.count('"name":"silent found"'), lines.count('"name":"silent recovered"')) == (1, 1)


def test_with_a_monitor_the_job_step_is_sent_when_the_times_of_all_ranks_are_known(
    opened: Callable[..., OtlpExporter],
) -> None:
    sink = Kept()
    exporter = opened(config=Config(export="monitor,otlp", otlp=OtlpConfig(level="steps")), spans=lambda: sink)
    run_steps(exporter, 0, 2)
    until(lambda: is_settled(exporter))
    assert [span.name for span in sink.spans] == ["step", "step"]

    exporter._rank.job_steps = {(0, 0): JobStep(0, 0, EPOCH_NS - 39, EPOCH_NS + 1_020, WORLD_SIZE)}
    run_steps(exporter, 2, 1)
    until(lambda: is_settled(exporter))
    exporter.close()

    job_steps = [span for span in sink.spans if span.name == "job step"]
    ranks_seen = [dict(span.attributes or {})["commtrace.step.ranks_seen"] for span in job_steps]
    times = [(span.start_time, span.end_time) for span in job_steps]
    assert list(zip(times, ranks_seen, strict=True)) == [
        ((EPOCH_NS - 39, EPOCH_NS + 1_020), 4),
        ((EPOCH_NS + 1_000, EPOCH_NS + 2_000), 1),  # the end of the job waits for nobody
        ((EPOCH_NS + 2_000, EPOCH_NS + 3_000), 1),
    ]
    assert [span.name for span in sink.spans].count("step") == 3
    assert (exporter.account.produced, exporter.account.sent) == (6, 6)


def test_what_leaves_nothing_to_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert open_otlp(Config(otlp=OtlpConfig(ranks="1")), live_rank(0)) is None
    with pytest.raises(ConfigurationError, match="set COMMTRACE_OTLP_METRICS=1"):
        open_otlp(Config(otlp=OtlpConfig(level="none")), live_rank(0))
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    view = live_view(Config(export="otlp"))(live_rank(0).metadata, Path(), Recorder(list), lambda: None, str)

    assert view[0]._listeners == []
    assert "no export to otlp: OTEL_SDK_DISABLED=true switches it off" in caplog.text


def test_grpc_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    for config in (Config(), Config(otlp=OtlpConfig(file=str(tmp_path)))):
        exporter = open_otlp(config, live_rank(0))
        assert exporter is not None
        exporter.close()

    assert caplog.text.count("commtrace sends OTLP as http/protobuf, not grpc") == 1
