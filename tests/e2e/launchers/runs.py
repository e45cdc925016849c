"""What a run has to look like whose ranks were started by a launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from commtrace.live.summary import trace_id
from commtrace.trace.files.reader import load_run
from tests.e2e.launchers.programs.few_steps import STEPS


class Place(NamedTuple):
    """Where a rank is said to run."""

    host: str
    local_rank: int


class Recorded(NamedTuple):
    """What the files of a run agree on."""

    run_id: str
    attempt: int
    places: dict[int, Place]


def live_environment(directory: Path) -> dict[str, str]:
    """The variables with which every rank also tells Prometheus and OpenTelemetry of itself."""
    return {
        "COMMTRACE_EXPORT": "prometheus,otlp",
        "COMMTRACE_PROMETHEUS_TARGETS": str(directory / "targets"),
        "COMMTRACE_OTLP_FILE": str(directory / "otlp"),
        "COMMTRACE_OTLP_PROCESS": "0",
    }


def recorded(run_directory: Path, *, earlier_attempts: bool = False) -> Recorded:
    """Read a run that has to be whole: every rank, every step, one id, nothing to complain of but the first attempt."""
    run = load_run(run_directory)
    assert len(run.problems) == int(earlier_attempts), run.problems
    assert all("attempt 1)" in problem for problem in run.problems), run.problems
    ranks = run.ranks
    assert sorted(ranks) == list(range(run.world_size))
    for trace in ranks.values():
        assert int((trace.spans.kind == 0).sum()) == STEPS
    (name,) = {(trace.metadata.run_id, trace.metadata.attempt) for trace in ranks.values()}
    places = {rank: Place(trace.metadata.host, trace.metadata.local_rank) for rank, trace in ranks.items()}
    return Recorded(*name, places)


def on_nodes(*ranks: int) -> dict[int, Place]:
    """So many ranks on node0, on node1 and so on."""
    places = [Place(f"node{node}", local_rank) for node, number in enumerate(ranks) for local_rank in range(number)]
    return dict(enumerate(places))


def assert_live(directory: Path, expected: Recorded) -> None:
    """All ranks gave Prometheus the labels of their files, and OpenTelemetry one trace per step."""
    targets = json.loads((directory / "targets.json").read_text())
    labels = {int(target["labels"]["rank"]): target["labels"] for target in targets}
    assert {rank: own["node"] for rank, own in labels.items()} == {
        rank: place.host for rank, place in expected.places.items()
    }
    assert {own["run_id"] for own in labels.values()} == {expected.run_id}
    traces = [_trace_ids(file) for file in (directory / "otlp").iterdir()]
    wanted = {f"{trace_id(expected.run_id, step):032x}" for step in range(STEPS)}
    assert traces.count(wanted) == len(expected.places)
    assert set().union(*traces) == wanted  # also those of an attempt that failed


def _trace_ids(file: Path) -> set[str]:
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        span["traceId"].lower()
        for request in requests
        for resource in request.get("resourceSpans", ())
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }


ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_oob_tcp_if_include": "eth0",
}
"""Tests are root."""
