"""``commtrace trigger RUN``: records coming steps of a running job in detail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.analysis.steps.progress import Progress, find_progress
from commtrace.cli.arguments import RunArgument
from commtrace.cli.output import duration
from commtrace.errors import ConfigurationError
from commtrace.recording.installation import own_command
from commtrace.trace.files.locate import NEWEST_RUN
from commtrace.trace.files.reader import load_newest
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.run import Run, TriggeredDetail
from commtrace.trace.selection import ModuleChoice, Request, first_step_after, make_request, write_request

_LOOK_AGAIN_SECONDS: Final = 0.5
_LONG_SILENCE_NS: Final = 60_000_000_000

_NOT_CONFIRMED: Final = 3
"""Exit code if a rank has not confirmed the request in time."""


@dataclass(frozen=True, slots=True)
class TriggerReport:
    """A request for detailed steps, and the ranks that confirmed it (docs/json/trigger.schema.json)."""

    id: str
    first: int  # the first step in detail
    end: int  # the step after the last one
    modules: str  # the modules to record, as given; empty for none
    latest_step: int  # of the run when the request was made
    seen_by: tuple[int, ...]
    late: Mapping[int, int]  # by rank that saw it after its first step had begun, the step in which it did
    not_seen_by: tuple[int, ...]


def trigger(
    run: RunArgument = NEWEST_RUN,
    num_steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 10,
    modules: Annotated[
        str, typer.Option(help="Record modules as well in these steps, e.g. depth=2.", show_default=False)
    ] = "",
    after: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Begin this many steps after the latest one. Default: five seconds from now at the pace of the run.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the ranks to confirm it.")] = 10.0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the request and the ranks that confirmed it as JSON.")
    ] = False,
) -> None:
    """Record some coming steps of a running job in detail, the same steps on all ranks.

    The request is a file in the run directory; ranks look for it twice a second. The steps are far enough ahead for
    every rank to see the request in time; a rank that is late reports it. Ranks that write to another directory (nodes
    without a shared file system) do not get the request. The exit code is 3 if a rank has not
    confirmed the request after --wait seconds.
    """
    if modules:
        ModuleChoice.parse(modules)
    newest = load_newest(run)
    progress = find_progress(newest)
    _check(run, newest, progress)
    metadata = newest.any_metadata
    first = first_step_after(progress.latest, progress.step_ns) if after is None else progress.latest + after
    request = make_request(metadata.run_id, metadata.attempt, first, num_steps, by="command", modules=modules)
    write_request(newest.path, request)
    if not json_output:
        _announce(request, progress)
    seen = _answers(run, request, wait)
    report = TriggerReport(
        id=request.id,
        first=request.first,
        end=request.end,
        modules=request.modules,
        latest_step=progress.latest,
        seen_by=tuple(sorted(seen)),
        late={rank: answer.seen_at_step for rank, answer in sorted(seen.items()) if answer.late},
        not_seen_by=tuple(sorted(set(newest.ranks) - set(seen))),
    )
    if json_output:
        sys.stdout.write(json.dumps(fields_to_json(report)) + "\n")
    else:
        _print_report(report, wait)
        typer.echo(f"Next: {own_command()} summary {run} --steps {request.first}:{request.end}")
    if report.not_seen_by:
        raise typer.Exit(_NOT_CONFIRMED)


def _check(run: Path, newest: Run, progress: Progress) -> None:
    if progress.closed:
        raise ConfigurationError(f"{run}: this run has ended; a trigger needs a running job")
    if progress.latest < 0:
        raise ConfigurationError(
            f"{run}: no step is known yet of {len(newest.ranks)} ranks. Wait for the first one to end; a script in a "
            "loop of its own marks them with `with commtrace.step(i):`"
        )


def _announce(request: Request, progress: Progress) -> None:
    pace = "" if progress.step_ns is None else f", {duration(progress.step_ns)} per step"
    typer.echo(f"Now in step {progress.latest}{pace}. Asked for steps {request.first}–{request.end - 1} in detail.")
    if progress.age_ns > _LONG_SILENCE_NS:
        typer.echo(f"The last step was seen {duration(progress.age_ns)} ago: does the job still run?")


def _answers(run: Path, request: Request, seconds: float) -> dict[int, TriggeredDetail]:
    """Return the ranks' answers, once all have answered or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        newest = load_newest(run)
        seen = {
            rank: answer for rank, trace in newest.ranks.items() for answer in trace.triggers if answer.id == request.id
        }
        if len(seen) == len(newest.ranks) or time.monotonic() > deadline:
            return seen
        time.sleep(_LOOK_AGAIN_SECONDS)


def _print_report(report: TriggerReport, wait: float) -> None:
    silent = report.not_seen_by
    if not silent and not report.late:
        typer.echo(f"All {len(report.seen_by)} ranks have confirmed the request in time.")
    if report.late:
        listed = ", ".join(f"rank {rank} (in step {step})" for rank, step in report.late.items())
        typer.echo(f"Seen too late by {listed}: not all ranks have the first steps in detail. Try --after with more.")
    if silent:
        listed = ", ".join(map(str, silent[:16])) + (" …" if len(silent) > 16 else "")
        typer.echo(
            f"Not confirmed within {wait:g} s by {len(silent)} ranks ({listed}); the summary lists those that did."
        )
