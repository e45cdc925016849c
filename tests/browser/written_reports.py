"""Reports as files, for a browser to open."""

from __future__ import annotations

from pathlib import Path

from commtrace.analysis.chain import analyse
from commtrace.analysis.pipeline.plan import plan_of, plan_timeline
from commtrace.analysis.replay.program import build_program
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace.run import Run
from commtrace.viewer.report import render


def written(run: Run, directory: Path) -> Path:
    analysis = analyse(run)
    path = directory / "report.html"
    summary = summarise_steps(OpenedRun.of(analysis))
    plan = plan_of(analysis.run, build_program(analysis.run, analysis.matches)) if summary.pipeline else None
    planned = plan_timeline(analysis.run, plan) if plan else None
    path.write_text(render(summary, Timeline.of_analysis(analysis), plan=planned).html, encoding="utf-8")
    return path
