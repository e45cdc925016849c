"""``commtrace bandwidth RUN``: bandwidth by operation, message size and group."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.chain import Analysis
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.communication.links import LinkSpeeds, NodeLink, SlowTraffic, find_slow_links, measure_links
from commtrace.analysis.communication.table import Communication, CommunicationSums, Detail, communication_sums
from commtrace.analysis.judged_run import RunSums, judge_run, measure_job
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
from commtrace.cli.output import (
    NODES,
    UNKNOWN,
    at_least,
    at_most,
    duration,
    num_bytes,
    power_of_two,
    share,
    wide_console,
)
from commtrace.cli.output import bandwidth as bandwidth_words
from commtrace.cli.views import bounds_note, print_basis
from commtrace.findings.causes import CAUSES
from commtrace.findings.finding import NOT_JUDGED, SLOW, Finding, reason_of, verdict
from commtrace.findings.formatting import format_ranges, ranges
from commtrace.trace.json_values import fields_to_json

_MOST_ROWS: Final = 60
_MOST_LINKS: Final = 4
_COSTS_LITTLE: Final = " It costs the steps too little to be named a straggler."
_WIDTHS: Final = {"ranks": 10}


class By(str, Enum):
    """The division of the table."""

    OPERATION = "operation"
    SIZE = "size"
    GROUP = "group"


_LEFT_OUT: Final = {By.OPERATION: (), By.SIZE: ("bytes",), By.GROUP: ("n", "p99")}
"""Columns that make room for the additional one, so that the table stays within a terminal."""

_FIRST: Final = {
    By.OPERATION: ("calls", "bytes", "p50", "busbw", "needed", "exposed"),
    By.SIZE: ("calls", "p50", "busbw", "exposed"),
    By.GROUP: ("calls", "bytes", "p50", "busbw", "exposed"),
}
"""Columns that are shown without --details: with those of words, they fit 80 columns."""

_DETAIL: Final = {By.OPERATION: Detail.NONE, By.SIZE: Detail.SIZE, By.GROUP: Detail.GROUP}


@dataclass(frozen=True, slots=True)
class BandwidthReport:
    """The table, the most exposed first; the speed of links between nodes, from messages; slow links, or None."""

    verdict: str
    run: str
    alignment: Alignment
    problems: tuple[str, ...]
    communication: tuple[Communication, ...]
    links: tuple[NodeLink, ...]
    slow_links: SlowTraffic | None
    because: str  # id of the finding that most of all waiting is an effect of; empty without one
    findings: tuple[Finding, ...]


def bandwidth(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    by: Annotated[By, typer.Option(help="Divide further by the bytes of a call, or by process group.")] = By.OPERATION,
    steps: StepsOption = "",
    details: DetailsOption = False,
    json_output: JsonOption = False,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print how fast each kind of communication was, within nodes and between them.

    Bandwidths are those of the transfer, after the last member had arrived. "needed" is the busbw at which the bytes
    would take as long as the ranks compute: a network slower than that cannot hide them. A link between two nodes that
    carries much less than the others is named.
    """
    run = run_directory(runs, attempt)
    with chosen_workers(workers, cluster) as chosen:
        opened = open_run(run.absolute() if cluster else run, steps or None, chosen)
        measured = opened.measure(partial(_measure, detail=_DETAIL[by]))
        judged = judge_run(opened, measured.result.run)
    findings = judged.findings
    rows = measured.result.communication.table(measured.recorded)
    links = measured.result.links.links()
    slow = find_slow_links(links)
    because = _reason_of_waiting(rows, findings, len(measured.recorded.ranks) * len(measured.steps.used))
    report = BandwidthReport(
        verdict=verdict_text(rows, links, slow, findings, because),
        run=measured.recorded.any_metadata.run_id,
        alignment=measured.alignment,
        problems=measured.recorded.problems,
        communication=tuple(rows),
        links=tuple(links),
        slow_links=slow,
        because=because.id if because else "",
        findings=findings,
    )
    if json_output:
        sys.stdout.write(json.dumps(fields_to_json(report), allow_nan=False) + "\n")
        return
    console = wide_console()
    print_head(console, judged.title, findings, details=details)
    console.print(escape(_answer(rows, links, slow, findings, because)))
    print_basis(console, report.alignment, report.problems, details=details)
    if rows:
        console.print()
        _print(console, rows, by, details=details)


def _slow_communication(findings: Sequence[Finding]) -> list[Finding]:
    return [one for one in findings if one.kind == SLOW and CAUSES[one.cause].mended_at == "link"]


def _reason_of_waiting(
    rows: Sequence[Communication], findings: Sequence[Finding], ranks_and_steps: int
) -> Finding | None:
    """Return the finding that most of all waiting for the last members is an effect of; None if that is not known."""
    waiting_ns = sum(min(row.wait_ns or 0, row.exposed_ns) for row in rows)
    return reason_of(waiting_ns / ranks_and_steps, findings) if waiting_ns and ranks_and_steps else None


def verdict_text(
    rows: Sequence[Communication],
    links: Sequence[NodeLink],
    slow: SlowTraffic | None,
    findings: Sequence[Finding] = (),
    because: Finding | None = None,
) -> str:
    """Return what stops the job, else slow communication, as the judge or the bandwidth shows it, else the stalls."""
    if is_stopped(findings):
        return verdict(findings)
    if named := _slow_communication(findings):
        costs = [f"{one.who} slows communication: {one.format_cost()}." for one in named]
        return " ".join(text[:1].upper() + text[1:] for text in [*costs, *([slow_links_text(slow)] if slow else [])])
    if slow is not None:
        return _links(links, slow, findings)
    return " ".join(filter(None, (_links(links, slow, findings), _stalls(rows, because))))


def _answer(
    rows: Sequence[Communication],
    links: Sequence[NodeLink],
    slow: SlowTraffic | None,
    findings: Sequence[Finding],
    because: Finding | None,
) -> str:
    """Return what the findings do not say: links by their bandwidth, and the communication that ranks stall on."""
    return " ".join(filter(None, (_links(links, slow, findings), _stalls(rows, because))))


def _links(links: Sequence[NodeLink], slow: SlowTraffic | None, findings: Sequence[Finding]) -> str:
    is_judged = all(one.kind != NOT_JUDGED for one in findings)
    is_named = bool(_slow_communication(findings))
    if slow is not None:
        return slow_links_text(slow) + (_COSTS_LITTLE if is_judged and not is_named else "")
    return "No slow link between nodes was found." if len(links) > 1 and is_judged and not is_named else ""


def _stalls(rows: Sequence[Communication], because: Finding | None) -> str:
    if not rows:
        return (
            "No communication was recorded in these steps. There may have been some on a path that commtrace does not "
            "see."
        )
    stalled_ns = sum(row.exposed_ns for row in rows)
    if not stalled_ns:
        return "No rank stalled on communication."
    waiting = ""
    if waiting_ns := sum(row.exposed_ns - _transfer_ns(row) for row in rows):
        effect = f", most of that because of {because.words}" if because else ""
        waiting = f" {share(waiting_ns, stalled_ns)} of the time in stalls is spent waiting for the last rank{effect}."
    transfers_ns = sum(map(_transfer_ns, rows))
    if not transfers_ns:
        return waiting.strip()
    most = max(rows, key=_transfer_ns)
    part = share(_transfer_ns(most), transfers_ns)
    return f"Ranks stall most on transfers of {most.role} {most.operation}: {part} of all stalls on transfers.{waiting}"


def _transfer_ns(row: Communication) -> float:
    """Return how long ranks stalled on calls after their last members had come; all of it where that is not known."""
    return row.exposed_ns - min(row.wait_ns or 0, row.exposed_ns)


def slow_links_text(slow: SlowTraffic) -> str:
    """Return ``Slow link: node0 → node1 carries 24.1 MB/s, …``"""
    traffic = slow.links[0].traffic
    kind = f"{'messages' if traffic.operation == 'send' else traffic.operation} of {power_of_two(1 << traffic.size)}"
    named = [f"{_arrow(link)} carries {bandwidth_words(link.gbps)}" for link in slow.links[:_MOST_LINKS]]
    more = [f"{len(slow.links) - _MOST_LINKS} more"] if len(slow.links) > _MOST_LINKS else []
    if slow.within_nodes:
        # Networks between nodes are slower than links within: without another pair of nodes this is no finding.
        return (
            f"Slowest link{'s' * (len(slow.links) > 1)}: {', '.join(named + more)} ({kind}), within a node it is "
            f"{bandwidth_words(slow.usual_gbps)}. There is no other pair of nodes to compare with: is that what the "
            "network should carry?"
        )
    shared = f" All of them are links of {slow.common_node}." if slow.common_node is not None else ""
    return (
        f"Slow link{'s' * (len(slow.links) > 1)}: {', '.join(named + more)} ({kind}); "
        f"between other nodes it is {bandwidth_words(slow.usual_gbps)}.{shared}"
    )


def _arrow(link: NodeLink) -> str:
    return f"{link.source} {'→' if link.traffic.operation == 'send' else '–'} {link.target}"


@dataclass(frozen=True, slots=True)
class _Bandwidths:
    communication: CommunicationSums
    links: LinkSpeeds
    run: RunSums

    def __add__(self, other: _Bandwidths) -> _Bandwidths:
        return _Bandwidths(self.communication + other.communication, self.links + other.links, self.run + other.run)


def _measure(analysis: Analysis, detail: Detail) -> _Bandwidths:
    context, times = analysis.context, analysis.partition
    return _Bandwidths(
        communication_sums(context.run, context.matches, times, context.roles, context.steps, detail),
        measure_links(context.run, context.matches, context.steps),
        measure_job(analysis),
    )


def _print(console: Console, rows: Sequence[Communication], by: By, *, details: bool) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for word in ("role", "operation", "nodes", *{By.SIZE: ["size"], By.GROUP: ["ranks"]}.get(by, [])):
        table.add_column(word, overflow="fold", no_wrap=word != "ranks", min_width=_WIDTHS.get(word))
    numbers = [_numbers(row) for row in rows[:_MOST_ROWS]]
    first = numbers[0] if details else _FIRST[by]
    headings = [heading for heading in numbers[0] if heading in first and heading not in _LEFT_OUT[by]]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, own in zip(rows, numbers, strict=False):
        table.add_row(*_words(row, by), *(own[heading] for heading in headings))
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"({len(rows) - _MOST_ROWS} more that are less exposed: --json)", style="dim")
    needed = " needed: the busbw below which the bytes take longer than the ranks compute." * ("needed" in headings)
    console.print(f"nodes: >1 if the group spans several. Bandwidths are of the transfer.{needed}", style="dim")
    if any(row.bandwidth_time == "duration" for row in rows):
        console.print("* not matched on all members: bytes per duration, waiting included.", style="dim")
    if note := bounds_note(rows):
        console.print(note, style="dim")


def _words(row: Communication, by: By) -> list[str]:
    words = [row.role, row.operation, NODES[row.inter_node]]
    if by is By.SIZE:
        words.append("unknown" if row.size is None else power_of_two(row.size[0]))
    if by is By.GROUP and row.ranks is not None:
        words.append(format_ranges(ranges(row.ranks)) or UNKNOWN)
    return [escape(word) for word in words]


def _rate(gbps: float | None, row: Communication) -> str:
    return UNKNOWN if gbps is None else at_least(bandwidth_words(gbps), row.bandwidth_is_bound)


def _numbers(row: Communication) -> dict[str, str]:
    during = "*" if row.bandwidth_time == "duration" else ""
    return {
        "n": str(row.group_size or "?"),
        "calls": str(row.count),
        "bytes": num_bytes(row.num_bytes),
        "p50": at_most(duration(row.duration_p50_ns), row.durations_are_bounds),
        "p99": at_most(duration(row.duration_p99_ns), row.durations_are_bounds),
        "algbw": _rate(row.algbw_gbps, row) + during,
        "busbw": _rate(row.busbw_gbps, row) + during,
        "needed": bandwidth_words(row.needed_busbw_gbps),
        "exposed": share(row.exposed_ratio),
    }
