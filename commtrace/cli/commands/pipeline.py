"""``commtrace pipeline RUN``: the schedule and its bubble, stage by stage."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.judged_run import judge_run, measure_job
from commtrace.analysis.pipeline.bubble import StageBubble
from commtrace.analysis.pipeline.observed import Pipeline
from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    AttemptOption,
    ClusterOption,
    DetailsOption,
    JsonOption,
    RunsArgument,
    StepsOption,
    WorkersOption,
    chosen_workers,
    run_directory,
)
from commtrace.cli.head import is_stopped, print_head
from commtrace.cli.output import UNKNOWN, milliseconds, print_table, share, text_table, wide_console
from commtrace.cli.views import print_basis
from commtrace.findings.causes import CAUSES
from commtrace.findings.finding import SLOW, Finding, reason_of, verdict
from commtrace.findings.formatting import format_ranks
from commtrace.trace.json_values import to_json


def pipeline(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    steps: StepsOption = "",
    details: DetailsOption = False,
    json_output: JsonOption = False,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print the pipeline schedule of a run, and why each stage waits.

    The schedule, stages, chunks and microbatches are reconstructed from the spans. The bubble of every stage is divided
    by phase (warm-up, steady, cool-down) and by cause: the ideal schedule, differences between stages, differences
    between microbatches and ranks, and transfers.
    """
    run = run_directory(runs, attempt)
    with chosen_workers(workers, cluster) as chosen:
        opened = open_run(run.absolute() if cluster else run, steps or None, chosen)
        judged = judge_run(opened, opened.measure(measure_job).result)
    found, findings = judged.pipeline, judged.findings
    alignment, problems = opened.alignment, opened.recorded.problems
    if json_output:
        printed = (
            {
                "verdict": verdict_text(found, findings),
                **found.to_json(),
                "because": because.id if (because := reason_of_bubble(found, findings)) else "",
                "findings": to_json(findings),
                "alignment": alignment.to_json(),
                "problems": problems,
            }
            if found
            else None
        )
        sys.stdout.write(json.dumps(printed, allow_nan=False) + "\n")
        return
    console = wide_console()
    print_head(console, judged.title, findings, details=details)
    print_basis(console, alignment, problems, details=details)
    if found is None:
        console.print("This run has no pipeline: no step of it holds forwards and backwards on several stages.")
        return
    if not is_stopped(findings):
        console.print(f"{escape(verdict_text(found, findings))}\n")
    print_pipeline(console, found, details=details)


_FEW: Final = 0.05
_PHASES: Final = {"warm_up_ns": "warm-up", "steady_ns": "steady", "cool_down_ns": "cool-down"}
_CAUSES: Final = {"schedule_ns": "schedule", "imbalance_ns": "imbalance", "variation_ns": "variation", "p2p_ns": "P2P"}


_BECAUSE: Final = {
    "schedule_ns": "because of the schedule",
    "imbalance_ns": "because stages differ",
    "variation_ns": "because microbatches or ranks differ",
    "p2p_ns": "for transfers",
}
_OF_DIFFERENCES: Final = ("imbalance_ns", "variation_ns")
"""Causes of the bubble that a slow rank or stage may be behind."""


def verdict_text(pipeline: Pipeline, findings: Sequence[Finding] = ()) -> str:
    """Return what stops the job, else the idle share of the pipeline, and the longest wait, with its cause."""
    if is_stopped(findings):
        return verdict(findings)
    worst = _longest_wait(pipeline)
    if worst is None:
        return "The bubble is not known: the other side of the stages' messages was not recorded."
    why = ""
    if largest := _largest_cause(worst):
        finding = reason_of_bubble(pipeline, findings)
        most = "most of it" if getattr(worst, largest) >= worst.bubble_ns / 2 else "the largest part of it"
        why = f", most of it because of {finding.words}" if finding else f", {most} {_BECAUSE[largest]}"
    at_least = "at least " if any(not _is_known(stage) for stage in pipeline.per_stage) else ""
    return (
        f"The pipeline is idle for {at_least}{share(pipeline.idle_fraction_of_phase)} of its phase. "
        f"Stage {worst.stage} waits longest: {milliseconds(worst.bubble_ns)} ms per step{why}."
    )


def reason_of_bubble(pipeline: Pipeline, findings: Sequence[Finding]) -> Finding | None:
    """Return the finding for which the stage that waits longest does most of its waiting; None if that is not known."""
    worst = _longest_wait(pipeline)
    if worst is None or not _largest_cause(worst):
        return None
    differences_ns = sum(getattr(worst, name) for name in _OF_DIFFERENCES)
    if differences_ns < worst.bubble_ns / 2:
        return None
    of_work = [one for one in findings if one.kind == SLOW and CAUSES[one.cause].part == "imbalance_ns"]
    return reason_of(differences_ns, of_work)


def _longest_wait(pipeline: Pipeline) -> StageBubble | None:
    known = [stage for stage in pipeline.per_stage if _is_known(stage)]
    return max(known, key=lambda stage: stage.bubble_ns, default=None)


def _largest_cause(stage: StageBubble) -> str:
    causes = {name: getattr(stage, name) for name in _BECAUSE}
    if any(time_ns is None for time_ns in causes.values()):
        return ""
    return max(causes, key=lambda name: causes[name])


def print_pipeline(console: Console, pipeline: Pipeline | None, *, details: bool = False) -> None:
    """Print the schedule, the stages, and the causes of their bubbles; nothing without a pipeline."""
    if pipeline is None:
        return
    stages = pipeline.per_stage
    unsure = [stage for stage in stages if not _is_known(stage)]
    at_least = "at least " if unsure else ""
    chunks = f" × {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    title = (
        f"Pipeline: {pipeline.schedule}, {pipeline.stages} stages{chunks}, {pipeline.microbatches} "
        f"microbatches; idle {at_least}{share(pipeline.idle_fraction_of_phase)} of its phase"
    )
    if pipeline.theoretical_fraction_of_phase is not None:
        title += f" (theoretical {pipeline.schedule} bubble {share(pipeline.theoretical_fraction_of_phase)})"
    columns = {"forward_ns": "forward", "backward_ns": "backward", "bubble_ns": "bubble", **_PHASES}
    table = text_table([], ["stage", *columns.values()])
    for stage in stages:
        table.add_row(str(stage.stage), *(_stage_cell(stage, name) for name in columns))
    note = "Mean ms of a forward and a backward; bubble: waiting for neighbours, ms per step."
    if details:
        note += (
            " The pipeline's phase, from its first forward to its last backward, is "
            f"{share(pipeline.phase_fraction_of_step)} of the step; idle in it: bubble, transfers, and waiting for the "
            "last backward of others."
        )
    left_out = [rank for stage in stages for rank in stage.left_out]
    if left_out:
        note += f"\nLeft out, because the other side of their messages is not known: {format_ranks(left_out)}."
    if unsure:
        note += "\n–: unknown, because the other side of these stages' messages is not known."
    print_table(console, title, table, note)
    if not unsure:
        _print_bubble_causes(console, stages)


def _is_known(stage: StageBubble) -> bool:
    # Both sides of the stage's messages were seen, with few exceptions: its wait can be separated from transfers.
    return stage.unmatched_ns <= _FEW * (stage.bubble_ns + stage.transfer_ns)


def _stage_cell(stage: StageBubble, name: str) -> str:
    if name in ("forward_ns", "backward_ns") or _is_known(stage):
        return milliseconds(getattr(stage, name))
    return UNKNOWN


def _print_bubble_causes(console: Console, stages: Sequence[StageBubble]) -> None:
    # A cause that shortens the bubble is negative.
    if any(getattr(stage, name) is None for stage in stages for name in _CAUSES):
        return
    table = text_table([], ["stage", *_CAUSES.values(), "bubble"])
    for stage in stages:
        table.add_row(str(stage.stage), *(milliseconds(getattr(stage, name)) for name in (*_CAUSES, "bubble_ns")))
    note = (
        "schedule: the wait of equal stages. imbalance: stages differ on average, also if one rank is slow (see "
        "commtrace straggler). variation: microbatches and ranks differ. P2P: transfer."
    )
    print_table(console, "Causes of the bubble, ms per step", table, note)
