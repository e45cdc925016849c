"""Compute everything that ``commtrace straggler`` prints.

>>> report_of_steps(open_run("commtrace-runs/my-run")).judgement.slow  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from commtrace.analysis.chain import analyse
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.engines import on_gpu
from commtrace.analysis.judged_run import JudgedRun, judge_run, measure_job
from commtrace.analysis.matching.operations import ONLY_KERNELS
from commtrace.analysis.replay.whatif import WhatIf, what_if
from commtrace.analysis.steps.attempts import LaunchSteps, RepeatedStep, repeated_steps
from commtrace.analysis.steps.choice import recorded_steps
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.list_of_findings import NO_STEPS
from commtrace.analysis.stragglers.search import (
    Judgement,
    measure_work,
)
from commtrace.analysis.windows.run import ALONE, OpenedRun, Workers, open_run
from commtrace.errors import CommtraceError
from commtrace.findings.finding import Finding
from commtrace.findings.nodes import exclude_nodes
from commtrace.trace.files.reader import load_earlier_attempts
from commtrace.trace.json_values import JsonObject, to_json
from commtrace.trace.run import Run


class NodesOfFinding(NamedTuple):
    """The nodes of the ranks that a finding names."""

    finding: str  # its id
    devices: tuple[str, ...]  # of ranks whose device is known, ``rank 3: GPU-…``
    exclude_nodes: str  # a command, or advice, that keeps these nodes out of the next job


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """The stragglers of a job, and what it would gain without them."""

    run: str
    attempt: int  # how often the job had been started before
    alignment: Alignment
    problems: tuple[str, ...]  # of the run's files, in sentences
    slowdown: WhatIf
    on_gpu: bool
    judged: JudgedRun
    nodes: tuple[NodesOfFinding, ...]  # of each that is slow
    repeated_steps: tuple[RepeatedStep, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what stops the job, then what steps lose time to by cost, then what could not be judged."""
        return self.judged.findings

    @property
    def judgement(self) -> Judgement:
        return self.judged.judgement

    def to_json(self) -> JsonObject:
        """Return the output of ``--json`` (docs/json/straggler.schema.json)."""
        return {
            "run": self.run,
            "attempt": self.attempt,
            "alignment": self.alignment.to_json(),
            "problems": self.problems,
            **self.slowdown.to_json(),
            "steps": len(self.slowdown.by_step),
            "on_gpu": self.on_gpu,
            "together_ns": self.judgement.together_ns,
            "waited_for": self.judgement.waited_for,
            "repeated_steps": to_json(self.repeated_steps),
            "awaited": to_json(self.judged.awaited),
            "findings": to_json(self.findings),
            "nodes": to_json(self.nodes),
        }


def report_of_steps(
    run: OpenedRun, baseline: HealthyRun | None = None, slowdown: Callable[[Run], WhatIf] | None = None
) -> StragglerReport:
    """Find the stragglers of a job, and replay the job without them.

    Args:
        slowdown: replays a run by other rules than ours, which take all steps at once.

    Raises:
        CommtraceError: no step was recorded in full, only kernels were, or the steps cannot be replayed.
    """
    path = run.recorded.path
    if slowdown is not None and not run.is_in_memory:
        run = OpenedRun.of(analyse(path))
    if not run.steps.used:
        raise CommtraceError(f"{path}: {NO_STEPS}")
    measured = run.measure(measure_job)
    measured = replace(measured, result=measured.result.joined())  # the parts can go
    work, recorded = measured.result.stragglers.work, measured.recorded
    if work.why_not == ONLY_KERNELS:
        raise CommtraceError(f"{path}: {ONLY_KERNELS}")
    judged = judge_run(run, measured.result, baseline)
    if slowdown is not None:
        gain = slowdown(recorded)
    elif work.steps is not None:
        gain = what_if(run.aligned, work.steps, run.replay(work.steps))
    else:
        raise CommtraceError(f"{path}: the steps cannot be replayed: {work.why_not}")
    return StragglerReport(
        run=recorded.any_metadata.run_id,
        attempt=recorded.any_metadata.attempt,
        alignment=run.alignment,
        problems=recorded.problems,
        slowdown=gain,
        on_gpu=on_gpu(recorded),
        judged=judged,
        nodes=tuple(_nodes(recorded, finding) for finding in judged.judgement.slow),
        repeated_steps=tuple(_repeated(recorded)),
    )


def baseline_of(path: str | Path, workers: Workers = ALONE) -> HealthyRun:
    """Return a run as the baseline of others of the same job. Raise CommtraceError if it cannot be replayed."""
    run = open_run(path, workers=workers)
    work = run.measure(measure_work).result.joined()
    if work.steps is None:
        raise CommtraceError(f"{path}: the steps cannot be replayed: {work.why_not}")
    return HealthyRun.of(run.aligned, work.steps)


def _repeated(recorded: Run) -> list[RepeatedStep]:
    launches = [LaunchSteps.of(launch) for launch in (*load_earlier_attempts(recorded), recorded)]
    steps = set(recorded_steps(recorded))
    return [step for step in repeated_steps(launches) if step.step in steps]


def _nodes(run: Run, finding: Finding) -> NodesOfFinding:
    known = [run.ranks[rank].metadata for rank in finding.ranks if rank in run.ranks]
    return NodesOfFinding(
        finding.id,
        tuple(
            f"rank {rank_metadata.rank}: {rank_metadata.device_uuid}"
            for rank_metadata in known
            if rank_metadata.device_uuid
        ),
        exclude_nodes(known, (trace.metadata for trace in run.ranks.values())),
    )
