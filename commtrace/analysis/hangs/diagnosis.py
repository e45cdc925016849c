"""Everything that ``commtrace doctor`` says, as one dictionary of plain values.

>>> told = examine("commtrace-runs/my-run", now_ns=time.time_ns())            # doctest: +SKIP
>>> told["findings"]                                                          # doctest: +SKIP
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commtrace.analysis.clocks.align import align
from commtrace.analysis.clocks.time_of_day import wall_clock_ns
from commtrace.analysis.hangs.chain import find_chains
from commtrace.analysis.hangs.findings import find_findings
from commtrace.analysis.hangs.first_failure import find_first_failure
from commtrace.analysis.hangs.flight_calls import FlightCall, describe_flight, fit_flight_calls, with_flight_calls
from commtrace.analysis.hangs.last_activity import doing, own_frame
from commtrace.analysis.hangs.liveness import Ending, find_endings
from commtrace.analysis.hangs.stops import HUNG, find_stops
from commtrace.analysis.hangs.story import hang_sentences
from commtrace.analysis.matching.arrivals import RankArrivals, describe_group, find_arrivals, known_groups
from commtrace.analysis.matching.coverage import find_coverage
from commtrace.analysis.matching.group_coverage import cover_groups
from commtrace.analysis.matching.mismatches import find_mismatches
from commtrace.analysis.matching.roles import find_roles
from commtrace.analysis.stragglers.exclusion import keep_out
from commtrace.trace.files.reader import load_run
from commtrace.trace.groups import Group
from commtrace.trace.processes import AskProcess, unknown_process
from commtrace.trace.run import RankTrace, Run

_FLUSH_NS = 500_000_000
_MUST_AGREE = (
    "commtrace", "torch", "cuda", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "megatron-core", "deepspeed",
    "transformer-engine",
)  # fmt: skip


def examine(
    source: str | Path | Run,
    *,
    now_ns: int,
    ask: AskProcess = unknown_process,
    all_ranks: bool = False,
    flight_calls: Sequence[FlightCall] = (),
    goes_on: bool | None = None,
    silent: Sequence[RankTrace] = (),
) -> dict[str, Any]:
    """What a run's files hold, what they miss, and where its job hangs or stopped.

    Args:
        source: a run directory or a loaded run.
        now_ns: epoch ns, against which a run that is still going on is judged.
        ask: for the process that recorded a rank.
        flight_calls: from dumps of torch's flight recorder.
        goes_on: whether the job does; None: to be found out.
        silent: ranks of which only a last sign of life is known, and not how far they had come.
        all_ranks: tell of every rank what it was doing; without, of those that a hang is about.

    Returns:
        Values that JSON can hold: ``run``, ``ranks``, ``groups``, ``coverage``, ``recording``, ``drops``,
        ``alignment``, ``mismatches``, ``first_failure`` (None if nobody failed, or nothing tells),
        ``hang``, ``flight_recorder`` (None without dumps), ``problems``, ``findings``
        (sentences; empty if the run is healthy) and ``notes``.

    Raises:
        RunNotFoundError: nothing was recorded there.
    """
    run = source if isinstance(source, Run) else load_run(source)
    arrivals: Mapping[int, RankArrivals] = find_arrivals(run)
    flight = fit_flight_calls(run, arrivals, flight_calls)
    arrivals = with_flight_calls(arrivals, flight)
    heard = replace(run, ranks={**run.ranks, **{trace.rank: trace for trace in silent}})
    endings = find_endings(heard, now_ns, ask, goes_on)
    stops = find_stops(run, arrivals, endings)
    chains = find_chains(stops, arrivals, endings)
    mismatches, num_mismatches = find_mismatches(run, arrivals)
    groups = known_groups(run)
    concerned = {rank for stop in stops for rank in (*stop.arrived, *stop.missing)} | {
        rank for rank, ending in endings.items() if ending.state == "silent"
    }
    arrivals = {**arrivals, **{trace.rank: RankArrivals() for trace in silent}}
    shown = list(heard.ranks) if all_ranks else sorted(concerned & set(heard.ranks))
    told: dict[str, Any] = {
        "run": _identity(run, endings),
        "ranks": [
            _rank(heard.ranks[rank], heard, endings[rank], arrivals[rank], groups) for rank in sorted(heard.ranks)
        ],
        "groups": [one.to_json() for one in cover_groups(run, arrivals)],
        "coverage": find_coverage(run, find_roles(run)).to_json(),
        "recording": _recording(run),
        "drops": _drops(run),
        "alignment": align(run).to_json(),
        "mismatches": {"count": num_mismatches, "first": [one.to_json() for one in mismatches]},
        "hang": {
            "stops": [stop.to_json() for stop in stops],
            "chains": chains.to_json(),
            "doing": {str(rank): doing(run, heard.ranks[rank], arrivals[rank], groups) for rank in shown},
        },
        "problems": list(run.problems),
    }
    first = find_first_failure(heard, arrivals, endings)
    told["first_failure"] = None if first is None else first.to_json()
    told["flight_recorder"] = None
    if flight_calls:
        told["flight_recorder"] = describe_flight(run, flight, stops, (call.rank for call in flight_calls))
    told["hang"]["is_hung"] = any(stop.kind == HUNG for stop in stops)
    told["hang"]["sentences"] = hang_sentences(told)
    told["findings"], told["notes"] = find_findings(told)
    return told


def _identity(run: Run, endings: Mapping[int, Ending]) -> dict[str, Any]:
    metadata = run.any_metadata
    words = [ending.last_ns for ending in endings.values() if ending.last_ns is not None]
    return {
        "id": metadata.run_id,
        "attempt": metadata.attempt,
        "path": str(run.path),
        "world_size": run.world_size,
        "missing_ranks": sorted(set(range(run.world_size)) - set(run.ranks)),
        "hosts": list(dict.fromkeys(trace.metadata.node for trace in run.ranks.values())),
        "backend": metadata.backend,
        "device": metadata.device,
        "states": dict(Counter(ending.state for ending in endings.values())),
        "last_written_ns": max(words, default=None),
        "versions": dict(metadata.versions),
        "differing_versions": _differing_versions(run.ranks.values()),
    }


def _differing_versions(traces: Any) -> dict[str, dict[str, list[int]]]:
    """Of packages that should be the same everywhere and are not: by package and version, the ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    for trace in traces:
        for package in _MUST_AGREE:
            version = trace.metadata.versions.get(package, "none")
            found.setdefault(package, {}).setdefault(version, []).append(trace.rank)
    return {package: versions for package, versions in found.items() if len(versions) > 1}


def _rank(
    trace: RankTrace, heard: Run, ending: Ending, arrivals: RankArrivals, groups: Mapping[int, Group]
) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "host": trace.metadata.node,
        "pid": trace.metadata.pid,
        **ending.to_json(),
        "exception_at": own_frame(trace.exception_frames),
        "device_uuid": trace.metadata.device_uuid or None,
        "keep_out": keep_out([trace.metadata], (other.metadata for other in heard.ranks.values())),
        "failures": [
            {**failure, "group": describe_group(groups.get(failure["group"]), failure["group"])}
            for failure in trace.failures
        ],
        "dropped": dict(trace.dropped),
        "collectives": sum(arrivals.launched.values()),
        "coordinates": dict(trace.coordinates),
    }


def _recording(run: Run) -> list[dict[str, Any]]:
    """Options that leave something out on purpose, and on which ranks they were set."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, trace in run.ranks.items():
        for option, value in trace.recording.items():
            found.setdefault((option, str(value)), []).append(rank)
        if trace.discarded:
            last = trace.discarded.get("last_step", "?")
            found.setdefault(("deleted to keep to its budget", f"steps up to {last}"), []).append(rank)
    return [{"option": option, "value": value, "ranks": ranks} for (option, value), ranks in found.items()]


def _drops(run: Run) -> list[dict[str, Any]]:
    """By rank: what was dropped, and between when: a rank tells at most half a second later."""
    return [
        {
            "rank": rank,
            "dropped": dict(trace.dropped),
            "first_ns": wall_clock_ns(trace, trace.drops[0].reported_ns) - _FLUSH_NS if trace.drops else None,
            "last_ns": wall_clock_ns(trace, trace.drops[-1].reported_ns) if trace.drops else None,
        }
        for rank, trace in run.ranks.items()
        if trace.dropped
    ]


def is_healthy(told: Mapping[str, Any]) -> bool:
    """Whether nothing was found that somebody should look at."""
    findings: Sequence[str] = told["findings"]
    return not findings
