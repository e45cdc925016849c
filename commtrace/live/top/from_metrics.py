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
from prometheus_client.parser import text_string_to_metric_families

from commtrace.analysis.stragglers.limits import SUMS
from commtrace.analysis.stragglers.normal import Work, judge
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.findings.causes import HOST, RANKS
from commtrace.findings.formatting import format_duration, format_ranks
from commtrace.live.http.deadline import Deadline
from commtrace.live.http.redaction import http_reason, redacted_url
from commtrace.live.top.frame import Exposed, Frame, RankRow, Slow
from commtrace.trace.inputs import all_printable, decode_json
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


ALERT: Final = "alert"
METRICS: Final = "metrics"
MONITOR: Final = "monitor"

_PARTS: Final = ("bubble", "data", "checkpoint", "gc", "other")
_SHORTEST_WINDOW_SECONDS: Final = 60
_MOST_LOOKS: Final = 1_000
_LARGEST_VALUE: Final = 2.0**52
_SILENT_SECONDS: Final = 30.0
_SILENT_STEPS: Final = 10.0
_NO_COORDINATE: Final = frozenset({"__name__", "run_id", "rank", "node", "local_rank", "instance", "job", "peers"})
_OF_SAMPLES: Final = frozenset(
    {"phase", "role", "operation", "kind", "le", "part", "straggler_rank", "place", "cause", "series"}
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
    is_in_unknown_stage: bool = False  # nobody told which ranks do the same work in its pipeline
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
        if not any(one.steps for one in now.values()):
            raise RunNotFoundError(f"{redacted_url(self._url)} has no complete step yet.")
        if self._seen and _steps(now) < _steps(self._seen[-1]):
            self._seen.clear()  # the job was restarted
        self._seen.append(now)
        while len(self._seen) > 2 and _steps(now) - _steps(self._seen[1]) >= self._last:
            self._seen.popleft()
        before = self._seen[0]
        added = {rank: one.since(before.get(rank, ScrapedTotals())) for rank, one in now.items()}
        is_all = not any(one.steps for one in added.values())
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
        newest = {one.labels.get("run_id", ""): one.value for one in runs}
        if not newest:
            raise RunNotFoundError(f"{redacted_url(self._url)} has no metrics of a step. Does it scrape the ranks?")
        if self._run_id and self._run_id not in newest:
            raise RunNotFoundError(
                f"{redacted_url(self._url)} has no run {self._run_id}. Its runs: {', '.join(newest)}."
            )
        run_id = self._run_id or max(newest, key=lambda one: newest[one])
        total = totals_of(self._samples(run_id))
        steps, seconds = _steps(total), sum(one.seconds for one in total.values())
        window = max(_SHORTEST_WINDOW_SECONDS, math.ceil(1.5 * self._last * seconds / steps) if steps else 0)
        # Not increase(): it extrapolates each counter differently, so the parts would not add up to the step.
        before = totals_of(self._samples(run_id, f" offset {window}s"))
        added = {rank: one.since(before.get(rank, ScrapedTotals())) for rank, one in total.items()}
        alerts = self._query(
            f'ALERTS{{alertname="CommtraceStraggler",alertstate="firing",run_id={json.dumps(run_id)}}}'
        )
        found = self._query(f'{{__name__=~"{"|".join(_OF_STRAGGLERS)}",run_id={json.dumps(run_id)}}}')
        frame = frame_of_totals(
            redacted_url(self._url), added, total, time.time_ns(), [one.labels for one in alerts], found
        )
        others = sorted(set(newest) - {run_id})
        notes = [*frame.notes, f"Means over the last {window} s."]
        if others and not self._run_id:
            listed = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
            notes.append(f"This run has the newest step of {len(newest)} runs. Choose another with --run-id: {listed}")
        return replace(frame, run_id=run_id, notes=tuple(notes), took_ns=time.monotonic_ns() - began)

    def _samples(self, run_id: str, offset: str = "") -> Iterator[MetricSample]:
        """Yield the samples of a run, of one moment: a scrape between two queries would part a step from its parts."""
        # A string in JSON is a string in PromQL.
        series = f'{{__name__=~"{"|".join(_SERIES)}",run_id={json.dumps(run_id)}}}{offset}'
        # Sums have no name: it travels in a label.
        named = f'label_replace({series}, "series", "$1", "__name__", "(.*)")'
        for one in self._query(f"sum without ({', '.join(_SUMMED)}) ({named})"):
            yield one._replace(name=one.labels.get("series", ""))

    def _query(self, expression: str) -> list[MetricSample]:
        answer = fetch(f"{self._url}/api/v1/query", query=expression)
        try:
            decoded: _Answer = decode_json(answer, _Answer)
            return [_sample(one.metric.get("__name__", ""), one.metric, one.value[1]) for one in decoded.data.result]
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
    "commtrace_spans_dropped_total",
    "commtrace_last_step",
    "commtrace_last_step_timestamp_seconds",
    "commtrace_unknown_stage",
)
_COST: Final = "commtrace_straggler_cost_seconds"
_SINCE: Final = "commtrace_straggler_since_timestamp_seconds"
_SINCE_STEP: Final = "commtrace_straggler_since_step"
_OF_STRAGGLERS: Final = (_COST, _SINCE, _SINCE_STEP)

_SUMMED: Final = ("phase", "operation", "kind")
"""Labels that Prometheus sums over, which keeps the answer small."""


def _parsed(text: str, where: str) -> list[MetricSample]:
    try:
        families = list(text_string_to_metric_families(text))
    except Exception as error:  # its parser raises nearly anything for what is not in the format
        raise MetricsError(f"{where} is not in Prometheus's text format: {error}") from error
    return [_sample(one.name, one.labels, one.value) for family in families for one in family.samples]


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
    found: Totals = {}
    for name, labels, value in samples:
        if not name.startswith("commtrace_") or math.isnan(value):
            continue
        one = found.setdefault(labels.get("rank", ""), ScrapedTotals())
        own = {key: text for key, text in labels.items() if key not in _OF_SAMPLES}
        one.labels = {**one.labels, **own}
        part = name.removeprefix("commtrace_").removesuffix("_seconds_total")
        if name == "commtrace_step_duration_seconds_count":
            one.steps = value
        elif name == "commtrace_step_duration_seconds_sum":
            one.seconds = value
        elif name == "commtrace_compute_seconds_total":
            one.parts["compute"] = one.parts.get("compute", 0.0) + value
        elif name == "commtrace_exposed_seconds_total":
            role = labels.get("role", "other")
            one.exposed[role] = one.exposed.get(role, 0.0) + value
        elif name == "commtrace_exposed_split_seconds_total":
            role = labels.get("role", "other")
            wait, transfer = one.split.get(role, (0.0, 0.0))
            is_wait = labels.get("part") == "wait"
            one.split[role] = (wait + value, transfer) if is_wait else (wait, transfer + value)
        elif name == "commtrace_work_seconds_total":
            one.work = value
        elif name == "commtrace_spans_dropped_total":
            one.dropped = (one.dropped or 0.0) + value
        elif name == "commtrace_last_step":
            one.last_step = int(value)
        elif name == "commtrace_last_step_timestamp_seconds":
            one.ended = value
        elif name == "commtrace_unknown_stage":
            one.is_in_unknown_stage = True
        elif part in _PARTS and name.endswith("_seconds_total"):
            one.parts[part] = value
    return found


def frame_of_totals(
    source: str,
    shown_totals: Totals,
    so_far: Totals,
    now_ns: int,
    alerts: Sequence[Mapping[str, str]] = (),
    found: Sequence[MetricSample] = (),
) -> Frame:
    """Return the frame of the growth in the steps shown, and of totals since the ranks started.

    Args:
        alerts: labels of the firing alerts about stragglers.
        found: the monitor's metrics of slow ranks: cost and begin.
    """
    rows = tuple(sorted((_row(so_far[rank], shown_totals.get(rank), now_ns) for rank in so_far), key=_by_rank))
    ids = {one.labels["run_id"] for one in so_far.values() if "run_id" in one.labels}
    nodes = {row.host for row in rows}
    steps_ns = [row.step_ns for row in rows if row.step_ns is not None]
    all_steps, all_seconds = _steps(so_far), sum(one.seconds for one in so_far.values())
    least = round(min((one.steps for one in shown_totals.values() if one.steps), default=0))
    by_monitor = {one.rank: one for one in _from_monitor(found, rows)}
    by_alert = [one for one in _from_alerts(alerts, rows) if one.rank not in by_monitor]
    named = {str(one.rank) for one in (*by_monitor.values(), *by_alert)}
    stragglers = (*by_monitor.values(), *by_alert, *_from_work(shown_totals, rows, named))
    return Frame(
        source=source,
        time_ns=now_ns,
        run_id=ids.pop() if len(ids) == 1 else "",
        hosts=len(nodes) if "" not in nodes else None,
        num_steps=least,
        step_ns=round(float(np.median(steps_ns))) if steps_ns else None,
        before_ns=round(1e9 * all_seconds / all_steps) if all_steps else None,
        before="the mean of all steps so far",
        ranks=rows,
        stragglers=stragglers,
        abstentions=("One rank alone does not show who is slow.",) if len(rows) < 2 else (),
        notes=tuple(_notes(rows)),
    )


def _by_rank(row: RankRow) -> int:
    return row.rank


def _steps(totals: Totals) -> float:
    return sum(one.steps for one in totals.values())


def _row(so_far: ScrapedTotals, added: ScrapedTotals | None, now_ns: int) -> RankRow:
    labels = so_far.labels
    dimensions = sorted((key, text) for key, text in labels.items() if key not in _NO_COORDINATE and text.isdecimal())
    age = None if so_far.ended is None else max(0, now_ns - round(so_far.ended * 1e9))
    step = so_far.seconds / so_far.steps if so_far.steps else 0.0
    is_silent = age is not None and age > 1e9 * max(_SILENT_SECONDS, _SILENT_STEPS * step)
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
        exposed={role: _split(ns, *added.split.get(role, (0.0, 0.0))) for role, ns in exposed.items() if ns},
    )


def _split(exposed_ns: int, wait: float, transfer: float) -> Exposed:
    """Return exposed time, split in proportion to the calls that the monitor compared, if there are any."""
    compared = wait + transfer
    if compared <= 0:
        return Exposed(exposed_ns)
    wait_ns = round(exposed_ns * wait / compared)
    return Exposed(exposed_ns, wait_ns, exposed_ns - wait_ns)


def _from_alerts(alerts: Iterable[Mapping[str, str]], rows: Sequence[RankRow]) -> Iterator[Slow]:
    for labels in alerts:
        rank = int(labels["rank"]) if labels.get("rank", "").isdecimal() else -1
        evidence = "The alert CommtraceStraggler fires."
        yield Slow(rank, labels.get("node", ""), RANKS, "slow", None, evidence, ALERT, _who(labels))


def _from_monitor(found: Iterable[MetricSample], rows: Sequence[RankRow]) -> Iterator[Slow]:
    hosts = {row.rank: row.host for row in rows}
    values: dict[str, dict[tuple[str | None, ...], float]] = {name: {} for name in _OF_STRAGGLERS}
    costs: list[MetricSample] = []
    for one in found:
        if one.name not in values:  # a server may answer what nobody asked for
            continue
        values[one.name][_finding(one)] = one.value
        if one.name == _COST:
            costs.append(one)
    for one in sorted(costs, key=lambda one: -one.value):
        number = one.labels.get("straggler_rank", "")
        rank = int(number) if number.isdecimal() else -1
        node = hosts.get(rank, "")
        place, cause = one.labels.get("place", RANKS), one.labels.get("cause", "unknown")
        who = f"host {node}" if place == HOST and node else _who({"rank": number, "node": node})
        evidence = "The monitor on rank 0 names it; its log has the numbers and what to do."
        slow = Slow(rank, node, place, cause, 1e3 * one.value, evidence, MONITOR, who)
        since, step = values[_SINCE].get(_finding(one)), values[_SINCE_STEP].get(_finding(one))
        yield replace(slow, since=since, since_step=None if step is None else int(step))


def _finding(one: MetricSample) -> tuple[str | None, ...]:
    return tuple(one.labels.get(name) for name in ("straggler_rank", "place", "cause"))


def _who(labels: Mapping[str, str]) -> str:
    node = f" on {labels['node']}" if labels.get("node") else ""
    return f"rank {labels.get('rank', '?')}{node}"


def _from_work(totals: Totals, rows: Sequence[RankRow], named: set[str]) -> Iterator[Slow]:
    """Yield ranks with more own work than is normal at their stage."""
    known = [rank for rank, one in totals.items() if one.work is not None and one.steps > 0]
    if not known or any(one.is_in_unknown_stage for one in totals.values()):
        return
    per_step = [totals[rank] for rank in known]
    judged = judge(
        Work(
            rank=np.arange(len(known)),
            peers=_numbers(f"{one.labels.get('pp', '')},{one.labels.get('peers', '')}" for one in per_step),
            host=_numbers(one.labels.get("node", "") for one in per_step),
            total_ns=np.array([1e9 * (one.work or 0.0) / one.steps for one in per_step]),
            error_ns=np.zeros(len(known)),
            scale_ns=np.array([1e9 * one.seconds / one.steps for one in per_step]),
        ),
        SUMS,
    )
    waiting = np.array([sum(one.exposed.values()) + one.parts.get("bubble", 0.0) for one in per_step])
    waiting_ms = 1e3 * waiting / np.array([one.steps for one in per_step])
    found = []
    for row in np.flatnonzero(judged.is_slow).tolist():
        labels, excess_ms = per_step[row].labels, float(judged.excess_ns[row]) / 1e6
        if known[row] in named:
            continue
        cost = min(excess_ms, float(np.median(waiting_ms[~judged.is_slow])))
        normal_ms = float(judged.normal_ns[row]) / 1e6
        evidence = f"It works {normal_ms + excess_ms:.1f} ms per step; normal at its stage is {normal_ms:.1f} ms."
        number = int(known[row]) if known[row].isdecimal() else -1
        found.append(Slow(number, labels.get("node", ""), RANKS, "own work", cost, evidence, METRICS, _who(labels)))
    yield from sorted(found, key=lambda one: -(one.cost_ms_per_step or 0.0))


def _numbers(words: Iterable[str]) -> Int64:
    return np.unique([*words], return_inverse=True)[1].reshape(-1).astype(np.int64)


def _notes(rows: Sequence[RankRow]) -> Iterator[str]:
    silent = [row for row in rows if row.state == "silent"]
    if silent and len(silent) == len(rows):
        youngest = min(row.age_ns or 0 for row in silent)
        yield f"NO STEP has ended on any rank for {format_duration(youngest)}: see commtrace doctor RUN."
    elif silent:
        oldest = max(row.age_ns or 0 for row in silent)
        yield f"SILENT: {format_ranks(row.rank for row in silent)} ended no step for {format_duration(oldest)}."
    dropped = sum(row.dropped or 0 for row in rows)
    if dropped:
        yield f"{dropped} spans were dropped so far."
