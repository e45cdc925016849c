"""Keeps the verdicts of commands that read a whole run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from commtrace.analysis.stragglers.verdict import Verdict
from commtrace.analysis.summary import Summary
from commtrace.errors import CommtraceError
from commtrace.history.runs import remember
from commtrace.history.verdicts import RunVerdict, verdict_of_analysis
from commtrace.trace.inputs import printable_lines
from commtrace.trace.processes import process_state
from commtrace.trace.run import Run


def keep_analysis(
    run: Path | Run,
    verdicts: Iterable[Verdict],
    abstentions: Sequence[str],
    *,
    by: str,
    attempt: int,
    used_steps: Iterable[int],
) -> None:
    """Keep the findings in all steps of a run, for ``commtrace list`` and ``commtrace hosts``."""
    last_step = max(used_steps, default=None)
    keep(
        run,
        verdict_of_analysis(
            verdicts, abstentions, by=by, attempt=attempt, judged_ns=time.time_ns(), last_step=last_step
        ),
    )


def keep_summary(run: Path, summary: Summary, *, by: str) -> None:
    """Keep the findings of a summary of a whole run."""
    keep_analysis(
        run,
        summary.stragglers,
        summary.abstentions,
        by=by,
        attempt=summary.run.attempt,
        used_steps=summary.run.steps.used,
    )


def keep(run: Path | Run, verdict: RunVerdict | None) -> None:
    """Keep a verdict, None for that of the monitor's files in the run; warn on stderr if that fails."""
    try:
        remember(run, verdict, now_ns=time.time_ns(), ask=process_state)
    except (CommtraceError, OSError) as error:
        typer.echo(printable_lines(f"commtrace: the verdict was not kept for `commtrace list`: {error}"), err=True)
