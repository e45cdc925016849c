"""Tables and lines that several commands print: the basis of numbers, the time of a whole run, stragglers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from statistics import median
from typing import Final

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.breakdown.run_budget import RunBudget
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.communication.baseline_share import BaselineShare, whole_share
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.hangs.job_end import EarlierAttempt
from commtrace.analysis.memory import RankMemory, fullest
from commtrace.analysis.steps.attempts import Attempt, RepeatedStep
from commtrace.analysis.steps.detail import RecordedDetail, TriggeredSteps
from commtrace.analysis.straggler_report import NodesOfFinding
from commtrace.analysis.stragglers.awaited import AwaitedRank
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.cli.head import print_indented
from commtrace.cli.output import (
    NODES,
    UNKNOWN,
    at_least,
    bandwidth,
    binary_bytes,
    duration,
    milliseconds,
    num_bytes,
    power_of_two,
    print_table,
    share,
    text_table,
)
from commtrace.findings.causes import HOST, LINK, OF_A_NODE
from commtrace.findings.finding import Finding
from commtrace.findings.formatting import format_duration, format_ranges, format_ranks

_MOST_SHARES: Final = 20


def print_baseline(console: Console, shares: Sequence[BaselineShare], made: Mapping[str, str]) -> None:
    """Print recorded bandwidth beside that of a baseline, the longest calls first."""
    if not shares:
        return
    table = text_table(["role", "operation", "nodes", "size"], ["n", "calls", "busbw", "baseline", "share"])
    table.padding = (0, 1, 0, 0)
    for one in shares[:_MOST_SHARES]:
        table.add_row(
            escape(one.role),
            escape(one.operation),
            NODES[one.inter_node],
            power_of_two(one.size[0]),
            str(one.group_size),
            str(one.calls),
            at_least(bandwidth(one.busbw_gbps), one.is_bound) + "*" * one.includes_waits,
            bandwidth(one.baseline_busbw_gbps),
            at_least(share(one.share), one.is_bound),
        )
    whole = whole_share(shares)
    where = " · ".join(filter(None, (made.get("backend"), made.get("device"), made.get("date"))))
    note = f"Baseline: {where}. All calls together: {share(whole)} of it."
    if any(one.share is None for one in shares):
        note += f"\n{UNKNOWN}: the baseline has no such operation, size of group or payload."
    if any(one.includes_waits for one in shares):
        note += "\n* not matched on all members: waiting included."
    if any(one.is_bound for one in shares):
        note += "\n≥ most bytes are in calls without an exact start and end."
    if len(shares) > _MOST_SHARES:
        note += f"\n{len(shares) - _MOST_SHARES} more that took less time: --json"
    print_table(console, "Bandwidth compared with the baseline", table, note)


def bounds_note(rows: Iterable[Communication]) -> str:
    """Say how many calls have only bounds of their times, and which calls the figures are of; empty if none has."""
    bounds = sum(row.upper_bounds for row in rows)
    if not bounds:
        return ""
    calls = "1 call has only a bound of its" if bounds == 1 else f"{bounds} calls have only a bound of their"
    return (
        f"{calls} start or end (docs/definitions.md). Medians and bandwidths are of the exact calls; ≤ and ≥: of all, "
        "as the exact ones hold less than half of the bytes."
    )


def print_basis(console: Console, alignment: Alignment, problems: Iterable[str], *, details: bool = True) -> None:
    """Print why the hosts' clocks are not aligned, and the problems of the run's files; if asked for, the residual."""
    if details:
        console.print(clock_line(alignment), style="dim")
    if alignment.refused:
        console.print(f"[yellow]! Clocks are not aligned:[/] {escape(alignment.refused)}")
    for problem in problems:
        console.print(f"[yellow]![/] {escape(problem)}")


def clock_line(alignment: Alignment) -> str:
    """Return the method of the alignment, with its residual."""
    residual = alignment.residual_ns
    if alignment.refused is not None:
        return f"Clocks: [yellow]{escape(alignment.method)}[/]"
    if not alignment.observations:
        return f"Clocks: {escape(alignment.method)}"
    return (
        f"Clocks: {escape(alignment.method)}, {alignment.observations} observations, residual "
        f"{duration(residual['p50'])} (p50), {duration(residual['p99'])} (p99), {duration(residual['max'])} (max)"
    )


_MOST_ATTEMPTS: Final = 4


def attempt_lines(earlier: Sequence[EarlierAttempt]) -> Iterator[str]:
    """Yield one line per attempt of the job before the one that is shown, the last ones of many."""
    if len(earlier) > _MOST_ATTEMPTS:
        yield f"{len(earlier) - _MOST_ATTEMPTS} more attempts before these: --json"
    for one in earlier[-_MOST_ATTEMPTS:]:
        steps = "no step"
        if one.first_step is not None and one.last_step is not None:
            steps = f"step{'s' * (one.first_step != one.last_step)} "
            steps += format_ranges([(one.first_step, one.last_step)])
        ranks = f"{one.world_size} rank{'s' * (one.world_size != 1)}"
        yield (f"Attempt {one.attempt + 1} (--attempt {one.attempt}): {ranks}, {steps}, {one.words}.{_went_on(one)}")


def _went_on(attempt: EarlierAttempt) -> str:
    if not attempt.went_on:
        return ""
    before, after = ([getattr(one, name) for one in attempt.went_on] for name in ("rank", "next_rank"))
    went = "went on"
    if before != after:
        moved = ", ".join(f"{one.rank} → {one.next_rank}" for one in attempt.went_on[:_MOST_MOVED])
        more = " …" * (len(before) > _MOST_MOVED)
        went = f"went on in the same process{'es' * (len(before) > 1)} as {format_ranks(after)} ({moved}{more})"
    return f" {format_ranks(before).capitalize()} {went}."


def moved_ranks_lines(ranks: Iterable[int], earlier: Sequence[EarlierAttempt]) -> Iterator[str]:
    """Yield which process each of these ranks is, if it was in the attempt before as well."""
    before = {one.next_rank: one for one in earlier[-1].went_on} if earlier else {}
    for rank in dict.fromkeys(ranks):
        process = before.get(rank)
        if process is not None:
            yield (
                f"Rank {rank} is process {process.pid} on {process.host}, which was rank {process.rank} of attempt "
                f"{earlier[-1].attempt + 1}."
            )


_MOST_MOVED: Final = 8

_MOST_SUMS: Final = 12


def detail_lines(detail: RecordedDetail) -> Iterable[str]:
    """Yield the detail and triggers of a run; nothing for a run that is in detail as a whole."""
    times = detail.step_time_ns
    if times and (detail.steps_in_detail + detail.quiet_steps < detail.steps or detail.every != 1):
        every = detail.every
        rule = f"1 step in {every}" if every else "only steps that were asked for"
        yield (
            f"Detail: {rule} ({detail.steps_in_detail} of {detail.steps} steps). Step times of all steps: "
            f"{duration(times.p50)} (p50), {duration(times.p99)} (p99), {duration(times.max)} (max)"
        )
    for trigger in detail.triggers:
        yield _trigger_line(trigger)
    discarded = detail.discarded
    if discarded:
        at = datetime.fromtimestamp(discarded.at_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        upto = f"up to step {discarded.last_step}, " if discarded.last_step >= 0 else ""
        yield (
            f"Discarded to keep to the budget: {upto}{discarded.segments} files, {num_bytes(discarded.num_bytes)} "
            f"on {discarded.ranks} rank{'s' * (discarded.ranks != 1)}, last at {at}"
        )


def _trigger_line(trigger: TriggeredSteps) -> str:
    line = f"Triggered: steps {trigger.first}–{trigger.end - 1} in detail"
    if not trigger.late:
        return line
    late = ", ".join(f"rank {rank} (at step {step})" for rank, step in trigger.late.items())
    return f"{line}; [yellow]seen too late by {escape(late)}[/]: these begin later"


def print_sums(console: Console, detail: RecordedDetail) -> None:
    """Print the means of the steps that are not in detail."""
    sums = detail.sums
    if not sums:
        return
    table = text_table(["span", "role", "operation"], ["count", "time", "bytes", "longest"])
    for one in sums[:_MOST_SUMS]:
        table.add_row(
            one.kind,
            escape(one.role),
            escape(one.name),
            f"{one.count:.4g}",
            milliseconds(one.time_ns),
            num_bytes(one.num_bytes) if one.num_bytes else "",
            milliseconds(one.longest_ns),
        )
    console.print("[bold]Steps not in detail, mean per rank and step, ms[/]")
    console.print(table)
    if len(sums) > _MOST_SUMS:
        console.print(f"{len(sums) - _MOST_SUMS} more with --json.", style="dim")
    console.print()


_WALL_PARTS: Final = {
    "training": "training steps",
    "repeated": "steps that were done again",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "loading": "loading data between steps",
    "start": "start",
    "restart": "restarts",
    "unknown": "not known",
}
_LEAST_SHARE_OF_WALL: Final = 0.001
_UNEVEN: Final = 1.2
"""Least multiple of the mean over ranks for which the rank with most of a part is named."""


def run_budget_lines(budget: RunBudget | None) -> Iterator[str]:
    """Yield the parts of the wall time; nothing if only some steps were asked for."""
    if budget is None or not budget.job.wall_ns:
        return
    wall, parts = budget.job.wall_ns, budget.job.by_name()
    attempts = f" in {budget.attempts} attempts" if budget.attempts > 1 else ""
    yield (
        f"Whole run: {format_duration(wall)}{attempts}, goodput {share(budget.goodput)} (training steps that were kept)"
    )
    for part, words in _WALL_PARTS.items():
        time_ns = parts[part]
        if time_ns >= _LEAST_SHARE_OF_WALL * wall:
            line = f"{share(time_ns, wall):>4}  {format_duration(time_ns):>8}  {words}"
            yield f"  {line}{_most(budget, part)}"
    if budget.repeated_steps:
        yield f"  {budget.repeated_steps} steps were lost by a restart or rollback and done again."
    elif budget.repeated_steps is None:
        yield "  Steps that were done again are not known: the program's own step numbers were not recorded."


def _most(budget: RunBudget, part: str) -> str:
    of_rank = {rank: parts.by_name()[part] for rank, parts in budget.ranks.items()}
    most = max(of_rank, key=lambda rank: of_rank[rank])
    if part not in ("evaluation", "checkpoint", "loading") or of_rank[most] < _UNEVEN * budget.job.by_name()[part]:
        return ""
    return f" (rank {most}: {format_duration(of_rank[most])})"


_NAMED: Final = 0.05
"""Least share of the path for which a rank is named."""

_MOST_RANKS: Final = 3
_LEAST_SHARE_OF_PATH: Final = 0.01
_NOT_OF_A_RANK: Final = ("transfer", "unknown")


def critical_path_lines(path: CriticalPath | None, mean_step_ns: float | None = None) -> Iterator[str]:
    """Yield what the path consists of, and why it is not as long as the mean step over the ranks, if it is not."""
    if path is None or not path.ns:
        return
    whole = path.ns
    parts = [part for part in _parts(path.shares, whole) if part[0] >= _LEAST_SHARE_OF_PATH * whole]
    listed = ", ".join(words for _, words in sorted(parts, key=lambda part: -part[0]))
    unsure = path.uncertain_ns
    note = (
        f"; {share(unsure, whole)} not resolved by clocks and starts" if unsure >= _LEAST_SHARE_OF_PATH * whole else ""
    )
    yield f"Critical path ({duration(whole / path.num_steps)} a step): {listed}{note}"
    if mean_step_ns and abs(whole / path.num_steps - mean_step_ns) > _LEAST_SHARE_OF_PATH * mean_step_ns:
        yield (
            f"It leads from the end of the last rank to that of the step before; the mean over the ranks is "
            f"{duration(mean_step_ns)}, as not all of them end a step with the last one."
        )


def _parts(shares: Sequence[Share], whole: int) -> Iterator[tuple[int, str]]:
    """Yield time and text of ranks with a large share, of the other ranks together, and of transfers by role."""
    by_rank: dict[int, list[Share]] = {}
    by_communication: dict[str, int] = {}
    for one in shares:
        if one.kind in _NOT_OF_A_RANK:
            words = " ".join(filter(None, (one.role, one.kind)))
            by_communication[words] = by_communication.get(words, 0) + one.ns
        else:
            by_rank.setdefault(one.rank, []).append(one)
    ordered = sorted(by_rank, key=lambda rank: -_ns(by_rank[rank]))
    named = [rank for rank in ordered[:_MOST_RANKS] if _ns(by_rank[rank]) >= _NAMED * whole]
    for rank in named:
        yield _of_ranks(f"rank {rank}", by_rank.pop(rank), whole)
    if by_rank:
        other = "other " if named else ""
        who = f"{len(by_rank)} {other}rank{'s' * (len(by_rank) != 1)}"
        yield _of_ranks(who, [one for own in by_rank.values() for one in own], whole)
    for words, ns in by_communication.items():
        yield ns, f"{words} {share(ns, whole)}"


def _of_ranks(who: str, shares: Sequence[Share], whole: int) -> tuple[int, str]:
    by_kind: dict[str, int] = {}
    for one in shares:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + one.ns
    kinds = sorted(
        (kind for kind in by_kind if by_kind[kind] >= _LEAST_SHARE_OF_PATH * whole), key=lambda kind: -by_kind[kind]
    )
    listed = ", ".join(f"{kind} {share(by_kind[kind], whole)}" for kind in kinds)
    return _ns(shares), f"{who} {share(_ns(shares), whole)}" + (f" ({listed})" if listed else "")


def _ns(shares: Sequence[Share]) -> int:
    return sum(one.ns for one in shares)


_LOST_PARTS: Final = {
    "stragglers_ns": "stragglers",
    "imbalance_ns": "imbalance",
    "exposed_communication_ns": "exposed communication",
    "bubble_ns": "bubble",
    "input_ns": "input",
    "rest_ns": "the rest",
}
_LEAST_SHARE_OF_LOSS: Final = 0.001
_WORTH_A_TIME: Final = 0.01
_NS_PER_HOUR: Final = 3.6e12


def lost_time_lines(lost: LostTime | None) -> Iterator[str]:
    """Yield the loss by cause; nothing if steps were not replayed."""
    if lost is None or not lost.steps_ns:
        return
    whole, gpus, costs_ns = lost.steps_ns, lost.gpus, lost.costs_ns()
    parts = [
        f"{words} {share(costs_ns[name], whole)}"
        + (f" ({_time(costs_ns[name], gpus)})" if costs_ns[name] >= _WORTH_A_TIME * whole else "")
        for name, words in _LOST_PARTS.items()
        if costs_ns[name] >= _LEAST_SHARE_OF_LOSS * whole
    ]
    # Each part is what a step would save without it alone: what two of them hide from each other is in both, or none.
    twice_ns = -sum(costs_ns[name] for name in _LOST_PARTS if costs_ns[name] < 0)
    twice = f", less {share(twice_ns, whole)} that counts in two of them" if twice_ns >= _WORTH_A_TIME * whole else ""
    beyond = whole - lost.ideal_ns
    yield (
        f"Lost: {share(beyond, whole)} of {_time(whole, gpus)} in steps"
        + (f": {', '.join(parts)}{twice}" if parts else "")
        + f"; ideal {share(lost.ideal_ns, whole)}"
    )


def _time(time_ns: int, gpus: int | None) -> str:
    if gpus is None:
        return format_duration(time_ns)
    return f"{time_ns * gpus / _NS_PER_HOUR:.3g} GPU-hours"


_MOST_RANGES: Final = 4


def step_attempts_lines(repeated: Sequence[RepeatedStep], launch: int) -> Iterator[str]:
    """Yield ``Steps 5–8 were done twice: attempt 1 from …`` for each range; ``launch`` is the one that is shown."""
    ranges = list(_ranges(repeated))
    for steps in ranges[:_MOST_RANGES]:
        first, last = steps[0], steps[-1]
        count = len(first.attempts)
        often = "twice" if count == 2 else f"{count} times"
        which = f"Step {first.step} was" if first is last else f"Steps {first.step}–{last.step} were"
        attempts = "; ".join(
            _attempt([step.attempts[number] for step in steps], number + 1 == count, launch) for number in range(count)
        )
        yield f"{which} done {often}: {attempts}"
    if len(ranges) > _MOST_RANGES:
        yield f"{sum(map(len, ranges[_MOST_RANGES:]))} more steps were done more than once (--json)."


def _ranges(repeated: Sequence[RepeatedStep]) -> Iterator[Sequence[RepeatedStep]]:
    # Consecutive steps that were done in the same launches.

    def key(item: tuple[int, RepeatedStep]) -> tuple[int, tuple[int, ...]]:
        position, step = item
        return step.step - position, tuple(attempt.launch for attempt in step.attempts)

    for _, alike in groupby(enumerate(repeated), key):
        yield [step for _, step in alike]


def _attempt(attempts: Sequence[Attempt], is_last: bool, launch: int) -> str:
    first = attempts[0]
    began = time.strftime("%H:%M:%S", time.localtime(first.start_ns / 1e9))
    mean_ns = sum(attempt.duration_ns for attempt in attempts) / len(attempts)
    shown = ", shown here" if is_last and first.launch == launch else ""
    return f"attempt {first.attempt} from {began}, {duration(mean_ns)} a step{shown}"


_MOST_MEMBERS = 4


def print_evidence(
    console: Console,
    findings: Sequence[Finding],
    *,
    on_gpu: bool = False,
    nodes: Sequence[NodesOfFinding] | None = None,
    told: Sequence[Finding] = (),
) -> None:
    """Print how each thing that slows the job is known, the costliest first, with GPU-hours if ``on_gpu``.

    ``nodes`` has the devices of each finding and how to keep them out of the next job; with it, print the advice,
    unless the finding is among those ``told``.
    """
    for position, finding in enumerate(findings):
        hours = f": {finding.gpu_hours_per_day:.3g} GPU-hours per day" if on_gpu else ""
        console.print(f"[bold]{escape(finding.words)}[/]{hours}")
        texts = [finding.evidence]
        if nodes is not None:
            texts += [_members(finding), *_nodes(finding, nodes[position])]
        for text in filter(None, texts):
            print_indented(console, text, "  ", "  ")
        if nodes is not None and finding.advice and finding.id not in {one.id for one in told}:
            print_indented(console, f"→ {finding.advice}", "    ", "  ")
        console.print()


def together_line(findings: Sequence[Finding], together_ns: float) -> str:
    """Return what several findings cost together, which is not the sum of what each of them does."""
    at_least = "at least " if any(finding.cost_is_bound for finding in findings) else ""
    return f"Together they cost {at_least}{milliseconds(together_ns)} ms per step."


def _nodes(finding: Finding, nodes: NodesOfFinding) -> tuple[str, ...]:
    if finding.cause not in OF_A_NODE and finding.place != HOST:
        return ()
    end = "one of its ends" if finding.place == LINK else "it"
    of = "Device of " if len(nodes.devices) == 1 else "Devices: "
    devices = f"{of}{', '.join(nodes.devices)}." if nodes.devices else ""
    return devices, f"To keep the next job off {end}: {nodes.exclude_nodes}"


def _members(finding: Finding) -> str:
    members = finding.members
    if not 2 <= len(members) <= _MOST_MEMBERS or members[0].share_ns is None:
        return ""
    shares = (f"rank {one.rank} {milliseconds(one.share_ns)} ({milliseconds(one.alone_ns)})" for one in members)
    return f"Cost of each rank in ms per step if the others are fixed (saved if only it is): {', '.join(shares)}."


def print_awaited(console: Console, awaited: Sequence[AwaitedRank]) -> None:
    """Print the rank that the others waited for most, if one stands out, and its activity unless a finding names it."""
    if not awaited or not awaited[0].stands_out:
        return
    first = awaited[0]
    who = f"rank {first.rank} ({first.share:.0%} of all waiting), named above" if first.because else first.describe()
    console.print(escape(f"Waited for most: {who}."))


def memory_lines(peaks: Sequence[RankMemory]) -> Iterator[str]:
    """Yield the peak memory of the fullest rank beside that of the median one; nothing if none was recorded."""
    if not peaks:
        return
    most = fullest(peaks)
    usual = binary_bytes(median(one.allocated_bytes for one in peaks))
    beside = f"; {usual} on the median rank" if len(peaks) > 1 else ""
    yield (
        f"Peak memory: {binary_bytes(most.allocated_bytes)} of tensors on rank {most.rank}, for which "
        f"{binary_bytes(most.reserved_bytes)} were reserved{beside}"
    )
