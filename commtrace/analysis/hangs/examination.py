"""Examine a run for ``commtrace doctor``: the contents and gaps of its files, and the places where its job hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from commtrace.analysis.clocks.align import align
from commtrace.analysis.clocks.time_of_day import wall_clock_ns
from commtrace.analysis.engines import engine_notes, engines_used
from commtrace.analysis.hangs.diagnosis import (
    CommunicationStops,
    Diagnosis,
    Drops,
    ExaminedRank,
    ExaminedRun,
    ExitCalled,
    Failure,
    LeftOut,
    Mismatches,
)
from commtrace.analysis.hangs.explanation import find_findings, hang_sentences
from commtrace.analysis.hangs.first_failure import find_first_failure
from commtrace.analysis.hangs.flight_recorder import (
    FlightCall,
    fit_flight_calls,
    flight_evidence,
    with_flight_calls,
)
from commtrace.analysis.hangs.job_end import RUNNING, EarlierAttempt, earlier_attempts, how_it_ended
from commtrace.analysis.hangs.no_progress import find_no_progress
from commtrace.analysis.hangs.other_worlds import with_other_worlds
from commtrace.analysis.hangs.rank_state import Ending, find_endings, last_activity, own_frame
from commtrace.analysis.hangs.setup import find_setup_hang
from commtrace.analysis.hangs.stops import HUNG, find_chains, find_stops
from commtrace.analysis.matching.arrivals import RankArrivals, describe_group, find_arrivals, known_groups
from commtrace.analysis.matching.coverage import cover_groups, find_coverage
from commtrace.analysis.matching.mismatches import find_mismatches
from commtrace.analysis.matching.roles import find_roles
from commtrace.findings.nodes import exclude_nodes
from commtrace.trace.files.reader import load_run
from commtrace.trace.metadata import Group
from commtrace.trace.processes import AskProcess, unknown_process
from commtrace.trace.run import OsExit, RankTrace, Run

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
) -> Diagnosis:
    """Return the diagnosis of a run directory or a loaded run.

    Args:
        now_ns: epoch ns, to judge a running job.
        ask: returns the state of the process that recorded a rank.
        all_ranks: show the activity of every rank, not only of those that a hang concerns.
        flight_calls: from dumps of torch's flight recorder.
        goes_on: True if the job still runs; None to find out.
        silent: ranks of which only the last sign of life, or their end, is known.

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
    stops = with_other_worlds(run, stops, now_ns, ask)
    chains = find_chains(stops, arrivals, endings)
    mismatches, num_mismatches = find_mismatches(run, arrivals)
    groups = known_groups(run)
    concerned = {rank for stop in stops for rank in (*stop.arrived, *(one.rank for one in stop.missing))} | {
        rank for rank, ending in endings.items() if ending.state == "silent"
    }
    arrivals = {**arrivals, **{trace.rank: RankArrivals() for trace in silent}}
    setup_hang = find_setup_hang(run, arrivals, endings)
    first = find_first_failure(heard, arrivals, endings, stops)
    if setup_hang is not None and first is not None and not first.raised:
        first = None  # The end of a job that hung does not show why it hung.
    is_explained = setup_hang is not None or first is not None or any(stop.kind == HUNG for stop in stops)
    is_running = how_it_ended(endings)[0] == RUNNING
    stalled = find_no_progress(run, now_ns) if is_running and not is_explained else None
    shown = list(heard.ranks) if all_ranks or stalled is not None else sorted(concerned & set(heard.ranks))
    evidence = flight_evidence(run, flight, stops, (call.rank for call in flight_calls)) if flight_calls else None
    diagnosis = Diagnosis(
        run=_identity(run, endings, earlier_attempts(run, now_ns=now_ns, ask=ask)),
        ranks=tuple(
            _rank(heard.ranks[rank], heard, endings[rank], arrivals[rank], groups) for rank in sorted(heard.ranks)
        ),
        groups=tuple(cover_groups(run, arrivals)),
        coverage=find_coverage(run, find_roles(run)),
        recording=_recording(run),
        engines=engines_used(run),
        drops=_drops(run),
        alignment=align(run),
        mismatches=Mismatches(num_mismatches, tuple(mismatches)),
        hang=CommunicationStops(
            tuple(stops),
            chains,
            {rank: last_activity(run, heard.ranks[rank], arrivals[rank], groups) for rank in shown},
        ),
        problems=tuple(run.problems),
        setup_hang=setup_hang,
        first_failure=first,
        flight_recorder=evidence,
    )
    hang = diagnosis.hang._replace(sentences=tuple(hang_sentences(diagnosis)))
    limits = frozenset(limit for trace in run.ranks.values() for limit in trace.limits)
    findings, notes = find_findings(diagnosis, limits)
    if stalled is not None:
        findings.insert(0, structs.replace(stalled, advice=""))  # which is to come here
    notes += engine_notes(diagnosis.engines, run.ranks.values())
    return replace(diagnosis, hang=hang, findings=tuple(findings), notes=tuple(notes))


def _identity(run: Run, endings: Mapping[int, Ending], earlier: tuple[EarlierAttempt, ...]) -> ExaminedRun:
    metadata = run.any_metadata
    writes = [ending.last_ns for ending in endings.values() if ending.last_ns is not None]
    return ExaminedRun(
        id=metadata.run_id,
        attempt=metadata.attempt,
        path=str(run.path),
        world_size=run.world_size,
        missing_ranks=tuple(sorted(set(range(run.world_size)) - set(run.ranks))),
        hosts=tuple(dict.fromkeys(trace.metadata.node for trace in run.ranks.values())),
        backend=metadata.backend,
        device=metadata.device,
        states=dict(Counter(ending.state for ending in endings.values())),
        last_written_ns=max(writes, default=None),
        versions=dict(metadata.versions),
        differing_versions=_differing_versions(run.ranks.values()),
        earlier_attempts=earlier,
    )


def _differing_versions(traces: Iterable[RankTrace]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the ranks by package that must agree and does not, and version."""
    found: dict[str, dict[str, list[int]]] = {}
    for trace in traces:
        for package in _MUST_AGREE:
            version = trace.metadata.versions.get(package, "none")
            found.setdefault(package, {}).setdefault(version, []).append(trace.rank)
    return {
        package: {version: tuple(ranks) for version, ranks in versions.items()}
        for package, versions in found.items()
        if len(versions) > 1
    }


def _rank(
    trace: RankTrace, heard: Run, ending: Ending, arrivals: RankArrivals, groups: Mapping[int, Group]
) -> ExaminedRank:
    return ExaminedRank(
        rank=trace.rank,
        host=trace.metadata.node,
        pid=trace.metadata.pid,
        state=ending.state,
        last_written_ns=ending.last_ns,
        behind_ns=ending.behind_ns,
        process=ending.process,
        launcher=ending.launcher or None,
        exception=ending.exception or None,
        exception_at=own_frame(trace.exception_frames),
        stack=trace.stack,
        stack_at=own_frame(trace.stack),
        device_uuid=trace.metadata.device_uuid or None,
        exclude_nodes=exclude_nodes([trace.metadata], (other.metadata for other in heard.ranks.values())),
        failures=tuple(
            Failure(**{**structs.asdict(failure), "group": describe_group(groups.get(failure.group), failure.group)})
            for failure in trace.failures
        ),
        dropped=dict(trace.dropped),
        collectives=sum(arrivals.launched.values()),
        coordinates=dict(trace.coordinates),
        exit=_exit_called(trace.exit),
        shell_hides_end=trace.shell_hides_end,
    )


def _exit_called(call: OsExit | None) -> ExitCalled | None:
    if call is None:
        return None
    return ExitCalled(call.status, call.signal or None, call.exception or None, own_frame(call.frames))


def _recording(run: Run) -> tuple[LeftOut, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for rank, trace in run.ranks.items():
        for option, value in trace.recording.items():
            found.setdefault((option, str(value)), []).append(rank)
        if trace.discarded:
            deleted = ("deleted to keep to its budget", f"steps up to {trace.discarded.last_step}")
            found.setdefault(deleted, []).append(rank)
    return tuple(LeftOut(option, value, tuple(ranks)) for (option, value), ranks in found.items())


def _drops(run: Run) -> tuple[Drops, ...]:
    return tuple(
        Drops(
            rank,
            dict(trace.dropped),
            wall_clock_ns(trace, trace.drops[0].reported_ns) - _FLUSH_NS if trace.drops else None,
            wall_clock_ns(trace, trace.drops[-1].reported_ns) if trace.drops else None,
        )
        for rank, trace in run.ranks.items()
        if trace.dropped
    )
