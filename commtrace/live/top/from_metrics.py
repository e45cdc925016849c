"""Make frames from metrics: of one rank's endpoint, or of a Prometheus that scrapes all ranks.

Metrics do not say which rank waited for which and, without the monitor, do not split wait and transfer: these stay
None.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from commtrace.analysis.stragglers.late_hosts import LATE
from commtrace.analysis.stragglers.limits import SUMS
from commtrace.analysis.stragglers.normal import Work, judge
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.findings.causes import CAUSES, HOST, LINK, LOSSES, NETWORK, PLACES, RANKS, STAGE, TENSOR_GROUP, advice
from commtrace.findings.finding import LOST, SLOW, Finding, finding_id, not_judged
from commtrace.findings.formatting import format_duration, format_ranks
from commtrace.findings.own_cost import short_words
from commtrace.findings.progress import no_progress, stalled_after_ns
from commtrace.live.http.deadline import Deadline
from commtrace.live.http.redaction import http_reason, redacted_url
from commtrace.live.top.frame import ALERT, METRICS, MONITOR, Exposed, Frame, RankRow
from commtrace.live.top.shown_findings import ShownFinding, ranked_once
from commtrace.trace.inputs import MOST_RANKS, all_printable, decode_json
from commtrace.trace.spans import Int64

_SECONDS: Final = 10.0
_MOST_BYTES: Final = 256 << 20
"""A Prometheus answers up to some ten kilobytes for each rank."""


_MOST_BYTES_OF_RANK: Final = 16 << 20
"""The endpoint of a rank answers some ten kilobytes; a million series would take minutes to parse."""


class MetricsError(CommtraceError):
    """No metrics at this address."""


def fetch(url: str, **parameters: str) -> str:
    """Return the answer to a GET, with ``user:password@`` of the URL as credentials; raise MetricsError."""
    return _fetched(url, parameters, _MOST_BYTES)


def fetch_of_rank(url: str) -> str:
    """Return the metrics of one rank's endpoint; raise MetricsError."""
    return _fetched(url, {}, min(_MOST_BYTES, _MOST_BYTES_OF_RANK))


def _fetched(url: str, parameters: Mapping[str, str], most_bytes: int) -> str:
    try:
        with Deadline(_SECONDS) as deadline:
            content = _exchange(_request(url, parameters), deadline, most_bytes)
    except urllib.error.HTTPError as error:
        error.close()  # its body, that is
        why = " (credentials: http://USER:PASSWORD@HOST:PORT/…)" if error.code == 401 else ""
        raise MetricsError(f"{redacted_url(url)} answers {http_reason(error)}{why}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if deadline.is_over:
            raise _too_slow(url) from error
        raise MetricsError(
            f"{redacted_url(url)} does not answer: {http_reason(error)}. Check that the job runs, and the address."
        ) from error
    if len(content) > most_bytes:
        raise MetricsError(
            f"{redacted_url(url)} answers more than {most_bytes:,} bytes, too much for the metrics of a job."
        )
    if deadline.is_over:  # the end of the connection may look like that of the answer
        raise _too_slow(url)
    return content.decode("utf-8", errors="replace")


def _too_slow(url: str) -> MetricsError:
    return MetricsError(
        f"{redacted_url(url)} does not answer in full within {_SECONDS:g} s. Check that the job runs, and the address."
    )


def _exchange(request: urllib.request.Request, deadline: Deadline, most_bytes: int) -> bytes:
    """Return the body of an answer, up to a byte more than ``most_bytes``."""

    def connect(*arguments: Any, **options: Any) -> socket.socket:
        connection = socket.create_connection(*arguments, **options)
        deadline.watch(connection)
        return connection

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            self._create_connection = connect
            super().connect()

    class Secure(http.client.HTTPSConnection):
        def connect(self) -> None:
            self._create_connection = connect
            super().connect()

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, req)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Secure, req)

    opener = urllib.request.build_opener(PlainHandler, SecureHandler)
    with opener.open(request, timeout=_SECONDS) as answer:
        content: bytes = answer.read(most_bytes + 1)
    return content


def _request(url: str, parameters: Mapping[str, str]) -> urllib.request.Request:
    """Return the request with the credentials in a header, as urllib does not accept them in the address."""
    parts = urllib.parse.urlsplit(url)
    asked = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(asked + (f"?{urllib.parse.urlencode(parameters)}" if parameters else ""))
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    return request


_PARTS: Final = ("bubble", "data", "checkpoint", "gc", "between", "other")
_SHORTEST_WINDOW_SECONDS: Final = 60
_MOST_LOOKS: Final = 1_000
_LARGEST_VALUE: Final = 2.0**52
_SCRAPE_SECONDS: Final = 15.0
"""Through a Prometheus, what a rank says may be so old: the usual time between two scrapes."""

_CAUSE_AND_COST: Final = "Cause, cost and what to do: commtrace straggler RUN"
_WORDS_OF_PLACE: Final = {
    STAGE: "the stage of ",
    LINK: "a link of ",
    NETWORK: "the network of ",
    TENSOR_GROUP: "the tensor-parallel group of ",
}
_NO_COORDINATE: Final = frozenset({"__name__", "run_id", "rank", "node", "local_rank", "instance", "job", "peers"})
_OF_SAMPLES: Final = frozenset(
    {"phase", "role", "operation", "kind", "le", "part", "finding_rank", "place", "cause", "series"}
)
"""Labels that distinguish the series of a rank and do not describe it."""


class MetricSample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class ScrapedTotals:
    """Totals of one rank, or their growth; seconds."""

    labels: Mapping[str, str] = field(default_factory=dict)
    steps: float = 0.0  # number; their total length is seconds
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # compute, bubble, …; without exposed
    exposed: dict[str, float] = field(default_factory=dict)  # by role
    work: float | None = None  # own time; None if unknown
    dropped: float | None = None  # spans
    last_step: int = -1  # −1 before the first
    ended: float | None = None  # epoch seconds of its end
    launch_bound: float | None = None  # None if unknown
    is_in_unknown_stage: bool = False  # nobody told which ranks do the same work in its pipeline
    recording_cost: float | None = None  # share of a step, with the half width of its interval; None if unknown
    recording_cost_error: float = 0.0
    is_pausing: bool = False  # saves a checkpoint or evaluates, in which no step ends
    # by role, wait and transfer of the calls that the monitor compared
    split: dict[str, tuple[float, float]] = field(default_factory=dict)

    def since(self, before: ScrapedTotals) -> ScrapedTotals:
        """Return the growth; everything so far if the rank was restarted meanwhile."""
        if before.steps > self.steps:
            return self
        return replace(
            self,
            steps=self.steps - before.steps,
            seconds=self.seconds - before.seconds,
            parts={part: value - before.parts.get(part, 0.0) for part, value in self.parts.items()},
            exposed={role: value - before.exposed.get(role, 0.0) for role, value in self.exposed.items()},
            split={
                role: (wait - before.split.get(role, (0.0, 0.0))[0], transfer - before.split.get(role, (0.0, 0.0))[1])
                for role, (wait, transfer) in self.split.items()
            },
            work=None if self.work is None else self.work - (before.work or 0.0),
            launch_bound=None if self.launch_bound is None else self.launch_bound - (before.launch_bound or 0.0),
        )


Totals = dict[str, ScrapedTotals]
"""By the label ``rank``, which may be empty."""


def metrics_source(url: str, last: int, run_id: str = "") -> EndpointSource | PrometheusSource:
    """Return the source for an address; that of a rank ends with ``/metrics``."""
    if url.partition("?")[0].endswith("/metrics"):
        return EndpointSource(url, last)
    return PrometheusSource(url.rstrip("/"), last, run_id)


class EndpointSource:
    """Makes frames of the metrics of one rank: of its ``last`` steps, at the first look of all so far."""

    def __init__(self, url: str, last: int) -> None:
        self._url = url
        self._last = last
        self._seen: deque[Totals] = deque(maxlen=_MOST_LOOKS)

    def look(self) -> Frame:
        """Return the present frame.

        Raises:
            MetricsError: no answer, or not in Prometheus's text format.
            RunNotFoundError: no step has ended yet.
        """
        began = time.monotonic_ns()
        frame = self.frame_of(fetch_of_rank(self._url), time.time_ns())
        return replace(frame, took_ns=time.monotonic_ns() - began)

    def frame_of(self, text: str, now_ns: int) -> Frame:
        """Return the frame of this answer of the endpoint and of its former answers."""
        now = totals_of(_parsed(text, redacted_url(self._url)))
        if not any(totals.steps for totals in now.values()):
            raise RunNotFoundError(f"{redacted_url(self._url)} has no complete step yet.")
        if self._seen and _steps(now) < _steps(self._seen[-1]):
            self._seen.clear()  # the job was restarted
        self._seen.append(now)
        while len(self._seen) > 2 and _steps(now) - _steps(self._seen[1]) >= self._last:
            self._seen.popleft()
        before = self._seen[0]
        added = {rank: totals.since(before.get(rank, ScrapedTotals())) for rank, totals in now.items()}
        is_all = not any(totals.steps for totals in added.values())
        note = (
            "A metrics endpoint has one rank. Give top the run directory, or a Prometheus, to see the others."
            if len(now) == 1
            else ""
        )
        frame = frame_of_totals(redacted_url(self._url), now if is_all else added, now, now_ns)
        first = "These are means over the whole run; later frames show the newest steps." if is_all else ""
        return replace(frame, notes=(*frame.notes, *filter(None, (note, first))))


class PrometheusSource:
    """Makes frames from a Prometheus: of ``last`` steps, at least a minute, by default of the newest run."""

    def __init__(self, url: str, last: int, run_id: str = "") -> None:
        self._url = url
        self._last = last
        self._run_id = run_id

    def look(self) -> Frame:
        """Return the present frame.

        Raises:
            MetricsError: no answer, or no Prometheus.
            RunNotFoundError: it knows no run of ours.
        """
        began = time.monotonic_ns()
        runs = self._query("max by (run_id) (commtrace_last_step_timestamp_seconds)")
        newest = {sample.labels.get("run_id", ""): sample.value for sample in runs}
        if not newest:
            raise RunNotFoundError(f"{redacted_url(self._url)} has no metrics of a step. Does it scrape the ranks?")
        if self._run_id and self._run_id not in newest:
            raise RunNotFoundError(
                f"{redacted_url(self._url)} has no run {self._run_id}. Its runs: {', '.join(newest)}."
            )
        run_id = self._run_id or max(newest, key=lambda sample: newest[sample])
        total = totals_of(self._samples(run_id))
        steps, seconds = _steps(total), sum(totals.seconds for totals in total.values())
        window = max(_SHORTEST_WINDOW_SECONDS, math.ceil(1.5 * self._last * seconds / steps) if steps else 0)
        # Not increase(): it extrapolates each counter differently, so the parts would not add up to the step.
        before = totals_of(self._samples(run_id, f" offset {window}s"))
        added = {rank: totals.since(before.get(rank, ScrapedTotals())) for rank, totals in total.items()}
        alerts = self._query(
            f'ALERTS{{alertname="CommtraceStraggler",alertstate="firing",run_id={json.dumps(run_id)}}}'
        )
        samples = self._query(f'{{__name__=~"{"|".join(_OF_FINDINGS)}",run_id={json.dumps(run_id)}}}')
        frame = frame_of_totals(
            redacted_url(self._url),
            added,
            total,
            time.time_ns(),
            [sample.labels for sample in alerts],
            samples,
            delay_seconds=_SCRAPE_SECONDS,
        )
        other_runs = sorted(set(newest) - {run_id})
        notes = [*frame.notes, f"Means over the last {window} s."]
        if other_runs and not self._run_id:
            listed = ", ".join(other_runs[:3]) + (" …" if len(other_runs) > 3 else "")
            notes.append(f"This run has the newest step of {len(newest)} runs. Choose another with --run-id: {listed}")
        return replace(frame, run_id=run_id, notes=tuple(notes), took_ns=time.monotonic_ns() - began)

    def _samples(self, run_id: str, offset: str = "") -> Iterator[MetricSample]:
        """Yield the samples of a run, of one moment: a scrape between two queries would part a step from its parts."""
        # A string in JSON is a string in PromQL.
        series = f'{{__name__=~"{"|".join(_SERIES)}",run_id={json.dumps(run_id)}}}{offset}'
        # Sums have no name: it travels in a label.
        named = f'label_replace({series}, "series", "$1", "__name__", "(.*)")'
        for sample in self._query(f"sum without ({', '.join(_SUMMED)}) ({named})"):
            yield sample._replace(name=sample.labels.get("series", ""))

    def _query(self, expression: str) -> list[MetricSample]:
        answer = fetch(f"{self._url}/api/v1/query", query=expression)
        try:
            decoded: _Answer = decode_json(answer, _Answer)
            return [
                _sample(result.metric.get("__name__", ""), result.metric, result.value[1])
                for result in decoded.data.result
            ]
        except ValueError as error:
            raise MetricsError(
                f"{redacted_url(self._url)} does not answer like a Prometheus. "
                "For the metrics of one rank, give an address that ends with /metrics."
            ) from error


_SERIES: Final = (
    "commtrace_step_duration_seconds_count",
    "commtrace_step_duration_seconds_sum",
    "commtrace_compute_seconds_total",
    "commtrace_exposed_seconds_total",
    "commtrace_exposed_split_seconds_total",
    *(f"commtrace_{part}_seconds_total" for part in (*_PARTS, "work")),
    "commtrace_launch_bound_seconds_total",
    "commtrace_spans_dropped_total",
    "commtrace_last_step",
    "commtrace_last_step_timestamp_seconds",
    "commtrace_unknown_stage",
    "commtrace_open_phase",
)
_COST: Final = "commtrace_finding_cost_seconds"
_SINCE: Final = "commtrace_finding_since_timestamp_seconds"
_SINCE_STEP: Final = "commtrace_finding_since_step"
_OF_FINDINGS: Final = (_COST, _SINCE, _SINCE_STEP)

_SUMMED: Final = ("phase", "operation", "kind")
"""Labels that Prometheus sums over, which keeps the answer small."""


def _parsed(text: str, where: str) -> list[MetricSample]:
    try:
        families = list(text_string_to_metric_families(text))
    except Exception as error:  # its parser raises nearly anything for what is not in the format
        raise MetricsError(f"{where} is not in Prometheus's text format: {error}") from error
    return [_sample(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def _sample(name: str, labels: Mapping[str, str], value: float | str) -> MetricSample:
    """Return a sample, NaN for an impossible value, which is ignored; raise ValueError if it is not a number."""
    number = float(value)
    return MetricSample(name, all_printable(dict(labels)), number if abs(number) < _LARGEST_VALUE else math.nan)


class _MetricSeries(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Result(msgspec.Struct):
    result: list[_MetricSeries]


class _Answer(msgspec.Struct):
    data: _Result


def totals_of(samples: Iterable[MetricSample]) -> Totals:
    """Return totals by rank; metrics of other programs are ignored."""
    totals: Totals = {}
    for name, labels, value in samples:
        if not name.startswith("commtrace_") or math.isnan(value):
            continue
        of_rank = totals.setdefault(labels.get("rank", ""), ScrapedTotals())
        of_target = {key: text for key, text in labels.items() if key not in _OF_SAMPLES}
        of_rank.labels = {**of_rank.labels, **of_target}
        part = name.removeprefix("commtrace_").removesuffix("_seconds_total")
        if name == "commtrace_step_duration_seconds_count":
            of_rank.steps = value
        elif name == "commtrace_step_duration_seconds_sum":
            of_rank.seconds = value
        elif name == "commtrace_compute_seconds_total":
            of_rank.parts["compute"] = of_rank.parts.get("compute", 0.0) + value
        elif name == "commtrace_exposed_seconds_total":
            role = labels.get("role", "other")
            of_rank.exposed[role] = of_rank.exposed.get(role, 0.0) + value
        elif name == "commtrace_exposed_split_seconds_total":
            role = labels.get("role", "other")
            wait, transfer = of_rank.split.get(role, (0.0, 0.0))
            is_wait = labels.get("part") == "wait"
            of_rank.split[role] = (wait + value, transfer) if is_wait else (wait, transfer + value)
        elif name == "commtrace_work_seconds_total":
            of_rank.work = value
        elif name == "commtrace_launch_bound_seconds_total":
            of_rank.launch_bound = (of_rank.launch_bound or 0.0) + value
        elif name == "commtrace_spans_dropped_total":
            of_rank.dropped = (of_rank.dropped or 0.0) + value
        elif name == "commtrace_recording_cost_ratio":
            of_rank.recording_cost = value
        elif name == "commtrace_recording_cost_error_ratio":
            of_rank.recording_cost_error = value
        elif name == "commtrace_last_step":
            of_rank.last_step = int(value)
        elif name == "commtrace_last_step_timestamp_seconds":
            of_rank.ended = value
        elif name == "commtrace_unknown_stage":
            of_rank.is_in_unknown_stage = True
        elif name == "commtrace_open_phase":
            of_rank.is_pausing = of_rank.is_pausing or value > 0
        elif part in _PARTS and name.endswith("_seconds_total"):
            of_rank.parts[part] = value
    return totals


def frame_of_totals(
    source: str,
    shown_totals: Totals,
    so_far: Totals,
    now_ns: int,
    alerts: Sequence[Mapping[str, str]] = (),
    of_monitor: Sequence[MetricSample] = (),
    *,
    delay_seconds: float = 0.0,
) -> Frame:
    """Return the frame of the growth in the steps shown, and of totals since the ranks started.

    Args:
        alerts: labels of the firing alerts about stragglers.
        found: the monitor's metrics of its findings: cost and begin.
        delay_seconds: the totals may be so old.
    """
    told_ns = now_ns - round(1e9 * delay_seconds)
    each = (_row(so_far[rank], shown_totals.get(rank), now_ns, told_ns) for rank in so_far)
    rows = tuple(sorted(each, key=_by_rank))
    ids = {totals.labels["run_id"] for totals in so_far.values() if "run_id" in totals.labels}
    nodes = {row.host for row in rows}
    steps_ns = [row.step_ns for row in rows if row.step_ns is not None]
    all_steps, all_seconds = _steps(so_far), sum(totals.seconds for totals in so_far.values())
    least = round(min((totals.steps for totals in shown_totals.values() if totals.steps), default=0))
    step_ns = round(float(np.median(steps_ns))) if steps_ns else None
    shown = [ShownFinding(finding, MONITOR) for finding in _from_monitor(of_monitor, rows, step_ns)]
    shown += [ShownFinding(finding, ALERT) for finding in _from_alerts(alerts) if not _is_named(finding, shown)]
    shown += [ShownFinding(finding, METRICS) for finding in _from_work(shown_totals) if not _is_named(finding, shown)]
    if len(rows) <= 1:
        shown.append(ShownFinding(not_judged(RANKS, "One rank alone does not show who is slow."), METRICS))
    pausing = sorted(rank for rank, totals in so_far.items() if totals.is_pausing)
    if not pausing:
        shown += [ShownFinding(finding, METRICS) for finding in _stalled(rows, step_ns)]
    findings = ranked_once(shown)
    return Frame(
        source=source,
        time_ns=now_ns,
        run_id=ids.pop() if len(ids) == 1 else "",
        hosts=len(nodes) if "" not in nodes else None,
        num_steps=least,
        step_ns=step_ns,
        before_ns=round(1e9 * all_seconds / all_steps) if all_steps else None,
        before="the mean of all steps so far",
        own_cost=_own_cost(so_far),
        ranks=rows,
        findings=tuple(shown.finding for shown in findings),
        sources={shown.finding.id: shown.source for shown in findings},
        notes=tuple(_notes(rows, pausing)),
    )


def _own_cost(so_far: Totals) -> str:
    """Return the mean of what the ranks measured; their errors are not independent, so that the largest holds."""
    known = [totals for totals in so_far.values() if totals.recording_cost is not None]
    if not known:
        return ""
    shares = [totals.recording_cost for totals in known if totals.recording_cost is not None]
    return short_words(float(np.mean(shares)), max(totals.recording_cost_error for totals in known))


def _by_rank(row: RankRow) -> int:
    return row.rank


def _steps(totals: Totals) -> float:
    return sum(of_rank.steps for of_rank in totals.values())


def _row(so_far: ScrapedTotals, added: ScrapedTotals | None, now_ns: int, told_ns: int) -> RankRow:
    labels = so_far.labels
    dimensions = sorted((key, text) for key, text in labels.items() if key not in _NO_COORDINATE and text.isdecimal())
    age = None if so_far.ended is None else max(0, now_ns - round(so_far.ended * 1e9))
    step = so_far.seconds / so_far.steps if so_far.steps else 0.0
    is_silent = so_far.ended is not None and told_ns - 1e9 * so_far.ended > stalled_after_ns(1e9 * step)
    row = RankRow(
        rank=int(labels["rank"]) if labels.get("rank", "").isdecimal() else -1,
        host=labels.get("node", ""),
        where=" ".join(f"{name}{at}" for name, at in dimensions),
        last_step=so_far.last_step,
        age_ns=age,
        state="silent" if is_silent else "running",
        dropped=None if so_far.dropped is None else round(so_far.dropped),
    )
    if added is None or added.steps <= 0:
        return row
    per_step = {part: round(1e9 * seconds / added.steps) for part, seconds in added.parts.items()}
    exposed = {role: round(1e9 * seconds / added.steps) for role, seconds in added.exposed.items()}
    return replace(
        row,
        step_ns=round(1e9 * added.seconds / added.steps),
        parts={**per_step, "exposed": sum(exposed.values())},
        launch_bound_ns=None if added.launch_bound is None else round(1e9 * added.launch_bound / added.steps),
        exposed={role: _split(ns, *added.split.get(role, (0.0, 0.0))) for role, ns in exposed.items() if ns},
    )


def _split(exposed_ns: int, wait: float, transfer: float) -> Exposed:
    """Return exposed time, split in proportion to the calls that the monitor compared, if there are any."""
    compared = wait + transfer
    if compared <= 0:
        return Exposed(exposed_ns)
    wait_ns = round(exposed_ns * wait / compared)
    return Exposed(exposed_ns, wait_ns, exposed_ns - wait_ns)


def _is_named(finding: Finding, shown: Sequence[ShownFinding]) -> bool:
    return any(shown_finding.kind == SLOW and finding.rank in shown_finding.ranks for shown_finding, _ in shown)


def _slow(labels: Mapping[str, str], evidence: str) -> Finding:
    """Return that the rank of these labels is slow; metrics do not say why."""
    ranks = _ranks(labels.get("rank", ""))
    return Finding(
        id=finding_id(SLOW, RANKS, "unknown", ranks),
        kind=SLOW,
        place=RANKS,
        cause="unknown",
        who=_who(labels),
        ranks=ranks,
        hosts=tuple(filter(None, [labels.get("node", "")])),
        evidence=evidence,
        advice=_CAUSE_AND_COST,
    )


def _from_alerts(alerts: Iterable[Mapping[str, str]]) -> Iterator[Finding]:
    for labels in alerts:
        yield _slow(labels, "The alert CommtraceStraggler fires.")


def _from_monitor(samples: Iterable[MetricSample], rows: Sequence[RankRow], step_ns: int | None) -> Iterator[Finding]:
    hosts = {row.rank: row.host for row in rows}
    values: dict[str, dict[_FindingLabels, float]] = {name: {} for name in _OF_FINDINGS}
    for sample in samples:
        if sample.name in values:  # a server may answer what nobody asked for
            values[sample.name][_FindingLabels.of(sample.labels)] = sample.value
    for labels, seconds in sorted(values[_COST].items(), key=lambda item: -item[1]):
        if not labels.are_known or math.isnan(seconds):
            continue
        since, step = values[_SINCE].get(labels, math.nan), values[_SINCE_STEP].get(labels, math.nan)
        ranks = _ranks(labels.rank)
        node = hosts.get(ranks[0], "") if ranks else ""
        yield Finding(
            id=finding_id(labels.kind, labels.place, labels.cause, ranks),
            kind=SLOW if labels.kind == SLOW else LOST,
            place=labels.place,
            cause=labels.cause,
            who="" if labels.kind == LOST else labels.who(node),
            ranks=ranks,
            hosts=tuple(filter(None, [node])),
            since_step=-1 if math.isnan(step) else int(step),
            since_ns=None if math.isnan(since) else round(1e9 * since),
            cost_ns=1e9 * seconds,
            share=1e9 * seconds / step_ns if step_ns else None,
            evidence="" if labels.kind == LOST else "The log of rank 0, whose monitor names it, has the numbers.",
            advice=advice(labels.cause, len(ranks), labels.place),
        )


class _FindingLabels(NamedTuple):
    """The labels of a finding of the monitor; a server may have any."""

    kind: str
    place: str
    cause: str
    rank: str

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> _FindingLabels:
        return cls(*(labels.get(name, "") for name in ("kind", "place", "cause", "finding_rank")))

    @property
    def are_known(self) -> bool:
        causes = {str(SLOW): CAUSES, str(LOST): {**CAUSES, **LOSSES}}.get(self.kind, {})
        return self.place in PLACES and self.cause in causes

    def who(self, node: str) -> str:
        if self.place == HOST and node:
            return f"host {node}"
        if not self.rank:
            return "launch-bound work" if self.cause == LATE else "the job"
        return f"{_WORDS_OF_PLACE.get(self.place, '')}{_who({'rank': self.rank, 'node': node})}"


def _who(labels: Mapping[str, str]) -> str:
    node = f" on {labels['node']}" if labels.get("node") else ""
    return f"rank {labels.get('rank', '?')}{node}"


def _ranks(label: str) -> tuple[int, ...]:
    return (int(label),) if label.isdecimal() and int(label) < MOST_RANKS else ()


def _from_work(totals: Totals) -> Iterator[Finding]:
    """Yield ranks with more own work than is normal at their stage."""
    known = [rank for rank, of_rank in totals.items() if of_rank.work is not None and of_rank.steps > 0]
    if not known or any(of_rank.is_in_unknown_stage for of_rank in totals.values()):
        return
    per_step = [totals[rank] for rank in known]
    scale_ns = np.array([1e9 * of_rank.seconds / of_rank.steps for of_rank in per_step])
    judged = judge(
        Work(
            rank=np.arange(len(known)),
            peers=_numbers(f"{of_rank.labels.get('pp', '')},{of_rank.labels.get('peers', '')}" for of_rank in per_step),
            host=_numbers(of_rank.labels.get("node", "") for of_rank in per_step),
            total_ns=np.array([1e9 * (of_rank.work or 0.0) / of_rank.steps for of_rank in per_step]),
            error_ns=np.zeros(len(known)),
            scale_ns=scale_ns,
        ),
        SUMS,
    )
    waiting = np.array([sum(of_rank.exposed.values()) + of_rank.parts.get("bubble", 0.0) for of_rank in per_step])
    waiting_ns = 1e9 * waiting / np.array([of_rank.steps for of_rank in per_step])
    for row in sorted(np.flatnonzero(judged.is_slow).tolist(), key=lambda row: -judged.excess_ns[row]):
        normal_ns, excess_ns = float(judged.normal_ns[row]), float(judged.excess_ns[row])
        cost_ns = min(excess_ns, float(np.median(waiting_ns[~judged.is_slow])))
        normal_ms, work_ms = normal_ns / 1e6, (normal_ns + excess_ns) / 1e6
        evidence = f"It works {work_ms:.1f} ms per step; normal at its stage is {normal_ms:.1f} ms."
        slow = _slow(per_step[row].labels, evidence)
        yield structs.replace(slow, cost_ns=cost_ns, share=cost_ns / max(float(scale_ns[row]), 1.0))


def _numbers(words: Iterable[str]) -> Int64:
    return np.unique([*words], return_inverse=True)[1].reshape(-1).astype(np.int64)


def _stalled(rows: Sequence[RankRow], step_ns: int | None) -> Iterator[Finding]:
    if rows and all(row.state == "silent" for row in rows):
        youngest_ns = min(row.age_ns or 0 for row in rows)
        yield no_progress(None, youngest_ns, step_ns, {row.rank: row.last_step for row in rows if row.rank >= 0})


def _notes(rows: Sequence[RankRow], pausing: Sequence[str]) -> Iterator[str]:
    silent = [row for row in rows if row.state == "silent"]
    if pausing and silent:
        who = format_ranks(int(rank) for rank in pausing if rank.isdecimal()) if pausing != [""] else "the rank"
        yield f"A checkpoint or an evaluation, in which no step ends: on {who}."
    elif silent and len(silent) < len(rows):
        oldest = max(row.age_ns or 0 for row in silent)
        yield f"SILENT: {format_ranks(row.rank for row in silent)} ended no step for {format_duration(oldest)}."
    dropped = sum(row.dropped or 0 for row in rows)
    if dropped:
        yield f"{dropped} spans were dropped so far."
