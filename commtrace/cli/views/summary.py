"""The summary as tables, for tired people: the verdict comes first, then the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.breakdown.rank_means import ExposedTime
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.pipeline.bubble import StageBubble
from commtrace.analysis.pipeline.observed import Pipeline
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.steps.choice import StepChoice
from commtrace.analysis.summary import Summary
from commtrace.cli.units import NODES, UNKNOWN, bandwidth, duration, milliseconds, num_bytes, share
from commtrace.cli.views.basis import clock_line, detail_lines, print_sums
from commtrace.cli.views.run_time import critical_path_lines, lost_time_lines, run_budget_lines, step_attempts_lines
from commtrace.cli.views.straggler import print_awaited, print_stragglers
from commtrace.cli.views.tables import NOTE, module_table, rank_table

_IDENTITY_VERSIONS: Final = ("commtrace", "torch", "cuda", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def print_summary(console: Console, summary: Summary, *, all_ranks: bool = False) -> None:
    for line in _header(summary):
        console.print(line)
    console.print(f"\n[bold]{escape(summary.verdict)}[/]\n")
    print_stragglers(console, summary.stragglers)
    print_awaited(console, summary.awaited, summary.stragglers)
    for abstention in summary.abstentions:
        console.print(f"[yellow]Not judged:[/] {escape(abstention)}")
    for line in (
        *run_budget_lines(summary.run_budget),
        *step_attempts_lines(summary.repeated_steps, summary.run.attempt),
    ):
        console.print(escape(line))
    console.print()
    if summary.ranks:
        table, note = rank_table(summary, all_ranks=all_ranks)
        _print_table(console, "Mean step of each rank, ms and share", table, note)
    for line in (*critical_path_lines(summary.critical_path), *lost_time_lines(summary.lost_time)):
        console.print(f"{escape(line)}\n")
    _print_exposed(console, summary)
    _print_communication(console, summary.communication)
    print_sums(console, summary.detail)
    modules = module_table(summary)
    if modules is not None:
        _print_table(console, "Modules, ms per step, mean of ranks", modules, NOTE)
    print_pipeline(console, summary.pipeline)
    _print_coverage(console, summary)
    for problem in summary.problems:
        console.print(f"[yellow]![/] {escape(problem)}")
    console.print(f"\nNext: commtrace report {escape(summary.run.path)} -o report.html", style="dim")


def _header(summary: Summary) -> Iterable[str]:
    run = summary.run
    num_ranks = f"{run.world_size} rank{'s' * (run.world_size != 1)}"
    recorded = "" if run.ranks_recorded == run.world_size else f" ({run.ranks_recorded} recorded)"
    hosts = run.hosts
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    attempt = f", attempt {run.attempt + 1}" if run.attempt else ""
    yield (
        f"[bold]Run {escape(run.id)}[/]{attempt} · {num_ranks}{recorded} on {escape(where)} · "
        f"{escape(run.backend or 'no backend')} · {escape(run.device)}"
    )
    parallel = " × ".join(f"{name} {size}" for name, size in run.parallel.items() if size > 1)
    versions = [f"{name} {run.versions[name]}" for name in _IDENTITY_VERSIONS if name in run.versions]
    framework = " ".join((run.framework or {}).values())
    yield escape(" · ".join(filter(None, [parallel, framework, *versions])))
    numbers = f" ({escape(run.step_numbers)})" if run.step_numbers else ""
    yield _steps_line(run.steps, numbers) + (
        ", inferred from the period of communication" if run.steps_inferred else ""
    )
    yield from detail_lines(summary.detail)
    yield clock_line(summary.alignment)


def _steps_line(steps: StepChoice, numbers: str) -> str:
    if not steps.used:
        return "Steps: none recorded in full"
    left_out = [
        f"step{'s' * (part.count > 1)} {_range(part.first, part.last)} ({part.reason})"
        for part in steps.ranges_left_out()
    ]
    used = f"Steps {_range(steps.used[0], steps.used[-1])}{numbers}: {len(steps.used)} used"
    return used + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _waits_are_bubble(summary: Summary, role: str) -> bool:
    return role == "pp" and any(rank.part("bubble") for rank in summary.ranks)


def _mean_wait(summary: Summary, role: str, wait_ns: float) -> str:
    if wait_ns == 0 and _waits_are_bubble(summary, role):
        return "bubble"
    calls = [row for row in summary.communication if row.role == role and row.group_size != 1]
    matched = not calls or any(row.wait_ns is not None for row in calls)
    return milliseconds(wait_ns) if wait_ns or matched else UNKNOWN


def _print_exposed(console: Console, summary: Summary) -> None:
    # The mean over ranks, and the rank that lost most.
    ranks = summary.ranks
    roles = sorted({role for rank in ranks for role in rank.exposed})
    if not roles:
        return
    table = _table(["role"])
    for heading in ("mean wait", "mean transfer", "mean share", "most", "on rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    wall = sum(rank.wall_ns for rank in ranks)
    alone = _roles_of_one_rank(summary.communication)
    for role in roles:
        parts = [rank.exposed.get(role, ExposedTime()) for rank in ranks]
        wait, transfer = sum(part.wait_ns for part in parts), sum(part.transfer_ns for part in parts)
        most, on_rank = max((part.total_ns, -rank.rank) for part, rank in zip(parts, ranks, strict=True))
        table.add_row(
            escape(role) + "*" * (role in alone),
            _mean_wait(summary, role, wait / len(ranks)),
            milliseconds(transfer / len(ranks)),
            share(wait + transfer, wall),
            milliseconds(most),
            str(-on_rank),
        )
    notes = ["* calls on groups of one rank, which send nothing."] if alone.intersection(roles) else []
    if any(_waits_are_bubble(summary, role) for role in roles):
        notes.append("bubble: waiting for pipeline messages counts as bubble, above.")
    note = "\n".join(notes)
    _print_table(console, "Stalls for communication, ms per step", table, note)


def _roles_of_one_rank(communication: Sequence[Communication]) -> set[str]:
    sizes: dict[str, set[int | None]] = {}
    for row in communication:
        sizes.setdefault(row.role, set()).add(row.group_size)
    return {role for role, found in sizes.items() if found == {1}}


def _print_communication(console: Console, rows: Sequence[Communication]) -> None:
    if not any(row.count for row in rows):
        return
    reaches = len({row.inter_node for row in rows if row.group_size != 1}) > 1
    table = _table(["role", "operation", *(["nodes"] if reaches else [])])
    if reaches:
        table.padding = (0, 1, 0, 0)  # else the names of operations would be folded in 100 columns
    for heading in ("n", "calls", "bytes", "p50", "p99", "algbw", "busbw", "exposed", "wait"):
        table.add_column(heading, justify="right", no_wrap=True)
    alone = sum(row.count for row in rows if row.group_size == 1)
    for row in rows:
        if row.group_size == 1:
            continue
        during = "*" if row.bandwidth_time == "duration" else ""
        total = row.duration_sum_ns
        table.add_row(
            escape(row.role),
            escape(row.operation),
            *([NODES[row.inter_node]] if reaches else []),
            str(row.group_size or "?"),
            str(row.count),
            num_bytes(row.num_bytes),
            duration(row.duration_p50_ns),
            duration(row.duration_p99_ns),
            bandwidth(row.algbw_gbps) + during,
            bandwidth(row.busbw_gbps) + during,
            share(row.exposed_ratio),
            share(row.wait_ns, total),
        )
    note = "Bandwidth of transfer, GB/s without a unit. exposed: stalls. wait: for the last rank."
    if reaches:
        note += "\nnodes: 1 if all members are on one, >1 if they are on several."
    if any(row.bandwidth_time == "duration" for row in rows):
        note += "\n* not matched on all members: bytes per duration, waiting included."
    bounds = sum(row.upper_bounds for row in rows)
    if bounds:
        note += (
            f"\nThe end of {bounds} calls, for which no rank stalled, is known only as an upper bound, and so is "
            "their hidden time (docs/gpu-validation.md)."
        )
    if alone:
        note += f"\nLeft out: {alone} calls on groups of one rank, which send nothing."
    _print_table(console, "Communication, all ranks and steps", table, note)


_FEW: Final = 0.05
_PHASES: Final = {"warm_up_ns": "warm-up", "steady_ns": "steady", "cool_down_ns": "cool-down"}
_CAUSES: Final = {"schedule_ns": "schedule", "imbalance_ns": "imbalance", "variation_ns": "variation", "p2p_ns": "P2P"}


def print_pipeline(console: Console, pipeline: Pipeline | None) -> None:
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
    table = _table([])
    columns = {"forward_ns": "forward", "backward_ns": "backward", "bubble_ns": "bubble", **_PHASES}
    for heading in ("stage", *columns.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        table.add_row(str(stage.stage), *(_stage_cell(stage, name) for name in columns))
    note = (
        "Mean ms of a forward and a backward; bubble: waiting for neighbours, ms per step. The pipeline's phase, from "
        f"its first forward to its last backward, is {share(pipeline.phase_fraction_of_step)} of the step; idle "
        "in it: bubble, transfers, and waiting for the last backward of others."
    )
    left_out = [rank for stage in stages for rank in stage.left_out]
    if left_out:
        note += f"\nLeft out, because the other side of their messages is not known: {ranks_in_words(left_out)}."
    if unsure:
        note += "\n–: unknown, because the other side of these stages' messages is not known."
    _print_table(console, title, table, note)
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
    table = _table([])
    for heading in ("stage", *_CAUSES.values(), "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        table.add_row(str(stage.stage), *(milliseconds(getattr(stage, name)) for name in (*_CAUSES, "bubble_ns")))
    note = (
        "schedule: the wait of equal stages. imbalance: stages differ in the mean, also if one rank is slow (see "
        "commtrace straggler). variation: microbatches and ranks differ. P2P: transfer."
    )
    _print_table(console, "Causes of the bubble, ms per step", table, note)


def _print_coverage(console: Console, summary: Summary) -> None:
    # Paths that are not visible never count as 0.
    coverage = summary.coverage
    captured = ", ".join(f"{count} {kind}" for kind, count in coverage.captured.items())
    dropped = sum(coverage.dropped.values())
    missing, hidden = summary.missing, len(coverage.not_visible)
    parts = [
        f"Captured: {captured or 'nothing'}",
        "" if missing is None else f"missing: {missing} collectives" if missing else "missing: none",
        f"dropped: {dropped} spans" if dropped else "",
        f"not visible: {hidden} path{'s' * (hidden != 1)}, below" if hidden else "not visible: nothing known",
    ]
    console.print(escape("; ".join(filter(None, parts))), style="dim")
    if missing or dropped or coverage.not_visible:
        console.print(f"Details: commtrace doctor {escape(summary.run.path)}", style="dim")
    for path in coverage.not_visible:
        console.print(f"[yellow]Not visible:[/] {escape(path)}")


def _table(words: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for word in words:
        table.add_column(word, overflow="fold")
    return table


def _print_table(console: Console, title: str, table: Table, note: str = "") -> None:
    # Not the table's own title: that is folded to the width of the table.
    console.print(f"[bold]{escape(title)}[/]")
    console.print(table)
    if note:
        console.print(escape(note), style="dim")
    console.print()
