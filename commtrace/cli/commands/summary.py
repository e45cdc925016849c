"""``commtrace summary RUN``: where the time went, in a terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.breakdown.modules import ModuleTime
from commtrace.analysis.breakdown.rank_means import PARTS, ExposedTime, RankMean
from commtrace.analysis.communication.baseline import read_baseline
from commtrace.analysis.communication.baseline_share import baseline_shares, measure_sizes
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.engines import engine_words
from commtrace.analysis.judged_run import mean_step_ns
from commtrace.analysis.steps.choice import QUIET, StepChoice
from commtrace.analysis.summary import Summary, summarise_steps
from commtrace.analysis.utilization import Utilization
from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    STEPS_HELP,
    AttemptOption,
    BaselineOption,
    ClusterOption,
    DetailsOption,
    JsonOption,
    KeepOption,
    RunsArgument,
    WorkersOption,
    check_keeps_whole_run,
    chosen_workers,
    run_directory,
)
from commtrace.cli.commands.history import keep_summary
from commtrace.cli.commands.pipeline import print_pipeline
from commtrace.cli.head import print_head
from commtrace.cli.output import (
    NODES,
    UNKNOWN,
    at_least,
    at_most,
    bandwidth,
    duration,
    milliseconds,
    num_bytes,
    print_table,
    share,
    table_width,
    text_table,
    wide_console,
)
from commtrace.cli.utilization import Recomputed, UtilizationOptions, measure_utilization, utilization_lines
from commtrace.cli.views import (
    attempt_lines,
    bounds_note,
    critical_path_lines,
    detail_lines,
    lost_time_lines,
    memory_lines,
    moved_ranks_lines,
    print_awaited,
    print_baseline,
    print_basis,
    print_evidence,
    print_sums,
    run_budget_lines,
    step_attempts_lines,
)
from commtrace.cli.worlds import job_to_json, print_job, worlds_of_job
from commtrace.findings.formatting import format_ranges
from commtrace.recording.installation import own_command
from commtrace.trace.json_values import to_json


def summary(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    steps: Annotated[
        str,
        typer.Option(
            help=f"{STEPS_HELP} Default: all but the first.",
            show_default=False,
        ),
    ] = "",
    keep: KeepOption = False,
    details: DetailsOption = False,
    json_output: JsonOption = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank. Default: of more than 16, the extremes.")
    ] = False,
    baseline: BaselineOption = None,
    flops_per_step: Annotated[
        float | None,
        typer.Option(metavar="N", help="The model's FLOPs in a step of the job: prints MFU.", show_default=False),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A file of `commtrace plan`, from whose model these FLOPs follow.", show_default=False),
    ] = None,
    recompute: Annotated[
        Recomputed | None, typer.Option(help="Whether forward passes are computed again, for HFU.", show_default=False)
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Peak of a GPU that is not known by its name.", show_default=False)
    ] = None,
    achievable_tflops: Annotated[
        float | None,
        typer.Option(metavar="N", help="Result of `commtrace bench matmul`, for MAMFU.", show_default=False),
    ] = None,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print where the time of a run went, and what to look at.

    The state of the job and its findings stand first, ranked by cost, and what to do. Without --steps, the wall time
    of the whole run follows (training steps, evaluation, checkpoints, loading, start, restarts) with the goodput. Then
    every rank's mean step is divided, exactly, into compute, exposed communication, pipeline bubble, input,
    checkpoints, garbage collection and time outside all spans. Then come the critical path of the job's step, lost time
    by cause, communication by role and operation, and the pipeline. The first step is left out as warm-up unless
    --steps includes it.

    Of a directory that holds the worlds of one job, as trainers and rollout engines are, prints each world at a glance
    and how to read it.
    """
    if attempt is None and (worlds := worlds_of_job(runs)):
        if json_output:
            sys.stdout.write(json.dumps(job_to_json(worlds), allow_nan=False) + "\n")
        else:
            print_job(wide_console(), worlds)
        return
    check_keeps_whole_run(keep, runs, steps, attempt is not None)
    run = run_directory(runs, attempt)
    measured = None if baseline is None else read_baseline(baseline)
    options = UtilizationOptions(flops_per_step, plan, recompute, peak_tflops, achievable_tflops)
    with chosen_workers(workers, cluster) as chosen:
        opened = open_run(run.absolute() if cluster else run, steps or None, chosen)
        found = summarise_steps(opened, is_whole=not steps)
        shares = () if measured is None else baseline_shares(opened.measure(measure_sizes).result, measured)
    utilization = measure_utilization(found, options, opened.recorded)
    if json_output:
        made = {} if measured is None else {"baseline": {"made": dict(measured.made), "shares": to_json(shares)}}
        used = {} if utilization is None else {"utilization": utilization.to_json()}
        sys.stdout.write(json.dumps({**found.to_json(), **made, **used}, allow_nan=False) + "\n")
    else:
        console = wide_console()
        print_summary(console, found, all_ranks=all_ranks, details=details, utilization=utilization)
        if measured is not None:
            console.print()
            print_baseline(console, shares, measured.made)
    if keep:
        keep_summary(opened.recorded, found, by="summary")


_IDENTITY_VERSIONS: Final = ("commtrace", "torch", "cuda", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def print_summary(
    console: Console,
    summary: Summary,
    *,
    all_ranks: bool = False,
    details: bool = False,
    utilization: Utilization | None = None,
) -> None:
    print_head(console, summary.title, summary.findings, details=details)
    slow = (rank for finding in summary.slow for rank in finding.ranks)
    for line in moved_ranks_lines(slow, summary.run.earlier_attempts):
        console.print(escape(line))
    print_awaited(console, summary.awaited)
    for line in (
        *run_budget_lines(summary.run_budget),
        *step_attempts_lines(summary.repeated_steps, summary.run.attempt),
        *([] if utilization is None else utilization_lines(utilization)),
        *memory_lines(summary.peak_memory),
    ):
        console.print(escape(line))
    for line in _circumstances(summary):
        console.print(line, style="dim")
    print_basis(console, summary.alignment, (), details=details)
    console.print()
    if details and summary.slow:
        print_evidence(console, summary.slow)
    if summary.ranks:
        table, note = rank_table(summary, all_ranks=all_ranks, width=console.width)
        print_table(console, "Mean step of each rank, ms", table, note)
    launch_bound = [summary.launch_bound] if summary.launch_bound else []
    path_lines = critical_path_lines(summary.critical_path, mean_step_ns(summary.ranks))
    for line in (*path_lines, *lost_time_lines(summary.lost_time), *launch_bound):
        console.print(f"{escape(line)}\n")
    _print_exposed(console, summary)
    _print_communication(console, summary.communication, details=details)
    print_sums(console, summary.detail)
    modules = module_table(summary)
    if modules is not None:
        print_table(console, "Modules, ms per step, mean of ranks", modules, NOTE)
    print_pipeline(console, summary.pipeline, details=details)
    _print_coverage(console, summary)
    for problem in summary.problems:
        console.print(f"[yellow]![/] {escape(problem)}")
    path = shlex.quote(summary.run.path)
    following = [f"report {path} -o report.html"]
    if summary.slow:
        following.insert(0, f"straggler {path}")  # the evidence
    console.print()
    for command in following:
        console.print(f"Next: {escape(f'{own_command()} {command}')}", style="dim", soft_wrap=True)


def _circumstances(summary: Summary) -> Iterable[str]:
    run = summary.run
    for line in attempt_lines(run.earlier_attempts):
        yield escape(line)
    if run.iterations:
        yield f"[yellow]![/] {escape(run.iterations)}"
    parallel = " × ".join(f"{name} {size}" for name, size in run.parallel.items() if size > 1)
    versions = [f"{name} {run.versions[name]}" for name in _IDENTITY_VERSIONS if name in run.versions]
    framework = " ".join((run.framework or {}).values())
    yield escape(" · ".join(filter(None, [parallel, run.backend or "no backend", run.device, framework, *versions])))
    numbers = f" ({escape(run.step_numbers)})" if run.step_numbers else ""
    yield _steps_line(run.steps, numbers) + (
        ", inferred from the period of communication" if run.steps_inferred else ""
    )
    yield from detail_lines(summary.detail)


def _steps_line(steps: StepChoice, numbers: str) -> str:
    if not steps.used:
        return "Steps: none recorded in full"
    left_out = [
        f"step{'s' * (part.count > 1)} {format_ranges([(part.first, part.last)])} ({part.reason})"
        for part in steps.ranges_left_out()
    ]
    quiet = sum(reason == QUIET for reason in steps.left_out.values())
    if quiet:
        left_out.append(f"{quiet} {QUIET}")
    count = len(steps.used)
    used = f"Step{'s' * (count > 1)} {format_ranges([(steps.used[0], steps.used[-1])])}{numbers}: {count} used"
    return used + (f"; left out: {', '.join(left_out)}" if left_out else "")


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
    table = text_table(["role"], ["mean wait", "mean transfer", "mean share", "most", "on rank"])
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
    print_table(console, "Stalls for communication, ms per step", table, note)


def _roles_of_one_rank(communication: Sequence[Communication]) -> set[str]:
    sizes: dict[str, set[int | None]] = {}
    for row in communication:
        sizes.setdefault(row.role, set()).add(row.group_size)
    return {role for role, found in sizes.items() if found == {1}}


def _print_communication(console: Console, rows: Sequence[Communication], *, details: bool) -> None:
    if not any(row.count for row in rows):
        return
    reaches = len({row.inter_node for row in rows if row.group_size != 1}) > 1
    table = text_table(
        ["role", "operation", *(["nodes"] if reaches else [])],
        ["n", "calls", "bytes", "p50", *(["p99", "algbw"] if details else []), "busbw", "exposed", "wait"],
    )
    if reaches:
        table.padding = (0, 1, 0, 0)  # else the names of operations would be folded in 100 columns
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
            at_most(duration(row.duration_p50_ns), row.durations_are_bounds),
            *(
                [
                    at_most(duration(row.duration_p99_ns), row.durations_are_bounds),
                    at_least(bandwidth(row.algbw_gbps), row.bandwidth_is_bound) + during,
                ]
                if details
                else []
            ),
            at_least(bandwidth(row.busbw_gbps), row.bandwidth_is_bound) + during,
            share(row.exposed_ratio),
            share(row.wait_ns, total),
        )
    note = "Bandwidth is of the transfer. exposed: share in stalls. wait: share that is for the last rank."
    if reaches:
        note += "\nnodes: 1 if all members are on one, >1 if they are on several."
    if any(row.bandwidth_time == "duration" for row in rows):
        note += "\n* not matched on all members: bytes per duration, waiting included."
    replayed = sum(row.replayed for row in rows)
    if replayed:
        note += f"\n{replayed} calls were replayed from CUDA graphs: they are counted, and their times are not known."
    if bounds := bounds_note(rows):
        note += f"\n{bounds} Their hidden time is a bound as well."
    if alone:
        note += f"\nLeft out: {alone} calls on groups of one rank, which send nothing."
    print_table(console, "Communication, all ranks and steps", table, note)


def _print_coverage(console: Console, summary: Summary) -> None:
    # Paths that are not visible never count as 0.
    coverage = summary.coverage
    captured = ", ".join(f"{count} {kind}" for kind, count in coverage.captured.items())
    dropped = sum(coverage.dropped.values())
    missing, hidden = summary.missing, len(coverage.not_visible)
    engine = engine_words(summary.run.engines, with_reason=False)
    parts = [
        f"Captured: {captured or 'nothing'}",
        "" if missing is None else f"missing: {missing} collectives" if missing else "missing: none",
        f"dropped: {dropped} spans" if dropped else "",
        f"not visible: {hidden} path{'s' * (hidden != 1)}, below" if hidden else "not visible: nothing known",
        f"engine: {engine}" if engine else "",
    ]
    console.print(escape("; ".join(filter(None, parts))), style="dim")
    if summary.own_cost is not None:
        console.print(escape(summary.own_cost.sentence), style="dim")
    if missing or dropped or coverage.not_visible:
        details = f"{own_command()} doctor {shlex.quote(summary.run.path)}"
        console.print(f"Details: {escape(details)}", style="dim", soft_wrap=True)
    for path in coverage.not_visible:
        console.print(f"[yellow]Not visible:[/] {escape(path)}")
    for replays in coverage.replays:
        console.print(escape(replays.sentence))


_MOST_RANKS: Final = 16
_ALWAYS_SHOWN: Final = ("compute", "exposed", "bubble", "other")
_WORTH_A_COLUMN: Final = 0.001
_WORTH_A_MARK: Final = 0.005
"""Least share of the step, stalled on communications without all of their members, that is marked."""


def rank_table(summary: Summary, *, all_ranks: bool, width: int) -> tuple[Table, str]:
    """Return the table, and a note on how to read it. Shares are left out if they do not fit."""
    ranks = summary.ranks
    shown = ranks if all_ranks else _extremes(ranks, {finding.rank for finding in summary.slow})
    parts = [
        part
        for part in PARTS
        if (part in _ALWAYS_SHOWN and (part != "bubble" or summary.pipeline is not None))
        or _largest_share(ranks, part) >= _WORTH_A_COLUMN
    ]
    table = _rank_table(summary, shown, parts, with_shares=True)
    if table_width(table) > width:
        table = _rank_table(summary, shown, parts, with_shares=False)
    if table_width(table) > width:
        table.padding = (0, 1, 0, 0)
    return table, _note(ranks, parts, len(ranks) - len(shown))


def _rank_table(summary: Summary, shown: Sequence[RankMean], parts: Sequence[str], *, with_shares: bool) -> Table:
    communicates = any(row.count for row in summary.communication)
    several_hosts = len(summary.run.hosts) > 1
    table = text_table([], ["rank"])
    for heading in (*(["host"] if several_hosts else []), "where"):
        table.add_column(heading, overflow="fold")
    for heading in ("step", *parts, "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in shown:
        host = [escape(rank.host)] if several_hosts else []
        cells = [_cell(rank, part, communicates=communicates, with_share=with_shares) for part in parts]
        table.add_row(
            str(rank.rank),
            *host,
            _where(rank, summary.run.parallel),
            milliseconds(rank.wall_ns),
            *cells,
            milliseconds(rank.hidden_ns) if communicates else UNKNOWN,
        )
    return table


def _largest_share(ranks: Sequence[RankMean], part: str) -> float:
    return max(rank.part(part) / max(rank.wall_ns, 1) for rank in ranks)


def _extremes(ranks: Sequence[RankMean], named: set[int]) -> Sequence[RankMean]:
    # At most 16 ranks: those that compute most and least, and those that are named elsewhere.
    if len(ranks) <= _MOST_RANKS:
        return ranks
    by_compute = sorted(ranks, key=lambda rank: (rank.part("compute"), rank.rank))
    half = _MOST_RANKS // 2
    chosen = {rank.rank for rank in (*by_compute[:half], *by_compute[-half:])} | named
    return [rank for rank in ranks if rank.rank in chosen]


def _cell(rank: RankMean, part: str, *, communicates: bool, with_share: bool) -> str:
    part_ns, wall_ns = rank.part(part), rank.wall_ns
    of_communication = part in ("exposed", "bubble")
    unsure = of_communication and rank.unmatched_ns > _WORTH_A_MARK * wall_ns
    if not part_ns and ((unsure and part == "bubble") or (of_communication and not communicates)):
        return UNKNOWN + "     " * with_share  # none was recorded: that does not mean there was none
    mark = "*" if unsure else ""
    return f"{milliseconds(part_ns)}{mark}" + (f" {share(part_ns, wall_ns):>4}" if with_share else "")


def _where(rank: RankMean, parallel: Mapping[str, int]) -> str:
    coordinates = rank.coordinates.items()
    return escape(" ".join(f"{name}{position}" for name, position in coordinates if parallel.get(name, 2) > 1))


def _note(ranks: Sequence[RankMean], shown_parts: Sequence[str], hidden_ranks: int) -> str:
    between = " between: outside of steps, since the one before." if "between" in shown_parts else ""
    note = f"The parts add up to the step; other is in no span.{between} hidden: communication in parallel, not a part."
    unsure = max(rank.unmatched_ns for rank in ranks)
    if any(rank.unmatched_ns > _WORTH_A_MARK * rank.wall_ns for rank in ranks):
        note += (
            f"\n* up to {milliseconds(unsure)} ms of exposed is on communications whose other members are not known: "
            "wait,\ntransfer and bubble cannot be separated there."
        )
    small = {part: max(rank.part(part) for rank in ranks) for part in PARTS if part not in shown_parts}
    listed = [f"{part} at most {milliseconds(most)} ms" for part, most in small.items() if most]
    if listed:
        note += f"\nBelow 0.1% of every step: {', '.join(listed)}."
    if hidden_ranks:
        note += f"\n{hidden_ranks} ranks between the extremes of compute are not shown: --all-ranks shows them."
    return note


MOST_ROWS: Final = 25
_LEAST_SHARE: Final = 0.01
NOTE: Final = (
    "Nested modules are included. exposed: stalls for communication in that time. median, p95: forward "
    "and backward of a step. slowest: the rank whose median is largest, and how much it exceeds that of ranks."
)


def module_table(summary: Summary) -> Table | None:
    """Return times per rank and step; None if no module was recorded."""
    rows = summary.modules
    divisor = max(len(summary.ranks), 1) * max(len(summary.run.steps.used), 1)
    if not rows:
        return None
    table = text_table(
        ["module"], ["modules", "calls", "forward", "backward", "recompute", "exposed", "median", "p95", "slowest"]
    )
    for row in rows[:MOST_ROWS]:
        table.add_row(
            escape(row.name),
            str(len(row.members)),
            f"{row.calls / divisor:.3g}",
            *(milliseconds(part / divisor) for part in (*row.ns.values(), row.exposed_ns)),
            *(milliseconds(row.step_quantile(percent)) for percent in (50, 95)),
            _slowest(row),
        )
    return table


def _slowest(row: ModuleTime) -> str:
    # Empty if no rank is slower than the others by a visible share.
    rank, slower = row.slowest()
    return "" if slower is None or slower < _LEAST_SHARE else f"rank {rank} +{slower:.0%}"
