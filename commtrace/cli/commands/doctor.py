"""``commtrace doctor [RUN]``: checks the recording here, or finds where a job hangs and what its recording misses."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.engines import engine_words
from commtrace.analysis.hangs.diagnosis import Diagnosis, Drops
from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.explanation import activity_words
from commtrace.analysis.hangs.flight_recorder import FlightCall
from commtrace.analysis.hangs.job_end import ENDED, RUNNING, end_words
from commtrace.analysis.hangs.job_state import state_of_examined
from commtrace.analysis.hangs.rank_state import SILENT, STOPPED
from commtrace.analysis.judged_run import RunTitle
from commtrace.analysis.matching.arrivals import GroupLabel
from commtrace.analysis.matching.coverage import Seen
from commtrace.cli.arguments import AttemptOption, DetailsOption, JsonOption, run_directory
from commtrace.cli.head import print_advice, print_findings, print_indented
from commtrace.cli.newest_steps import judge_newest_steps
from commtrace.cli.output import wide_console
from commtrace.cli.self_check import Check, check_installation
from commtrace.cli.views import attempt_lines, moved_ranks_lines, print_basis
from commtrace.cli.worlds import job_verdict, worlds_of_job
from commtrace.errors import CommtraceError, ConfigurationError, ImportFileError
from commtrace.findings.formatting import format_duration, format_ranges, format_ranks, ranges
from commtrace.history.facts import read_facts
from commtrace.interchange.dumps.flight_recorder import read_flight_record, with_members
from commtrace.trace.files.jobs import World
from commtrace.trace.files.locate import NEWEST_RUN, find_run_directory
from commtrace.trace.files.reader import load_run
from commtrace.trace.inputs import printable
from commtrace.trace.json_values import JsonObject
from commtrace.trace.metadata import IMPORTED_FROM, UNKNOWN_ROLE
from commtrace.trace.processes import SUSPENDED, process_state
from commtrace.trace.run import Run

_FINDINGS: Final = 1
_ENDS_WITH_RANK: Final = re.compile(r"\d+(\.(pkl|pickle|bin|json))?$")


def doctor(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="The run directory, or several that hold ranks of one job. Default: none, check the installation.",
            show_default=False,
        ),
    ] = None,
    flight_recorder: Annotated[
        list[Path] | None,
        typer.Option(
            help="Dumps of torch's flight recorder to merge in: files (repeat the option), the beginning of their "
            "names, or their directory.",
            show_default=False,
        ),
    ] = None,
    attempt: AttemptOption = None,
    details: DetailsOption = False,
    json_output: JsonOption = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Print the last activity of every rank, not only of those concerned.")
    ] = False,
) -> None:
    """Check the installation; or, of a run, print where its job hangs and what the recording misses.

    Without RUN: checks packages and their versions, the COMMTRACE_* variables, the run directory, the addresses of
    exporters, and makes a small recording in a process of its own. Run it where the job runs, in the job's environment.
    Exit code: 1 if the job would not be recorded as configured.

    With RUN: reads the files of a job that hangs, was killed, or still runs. Names what failed or hangs first, per
    process group the communication at which it stopped, the ranks that had arrived and those that had not, what each
    was doing, and the rank at the root. Then come the coverage of every group, and communication that cannot be seen.
    Of a directory that holds the worlds of one job, as trainers and rollout engines are, examines each.
    Exit code: 0 if nothing was found, 1 if something was, 2 if the run cannot be read.
    """
    if not runs:
        if flight_recorder or all_ranks or attempt is not None:
            raise ConfigurationError(
                "--flight-recorder, --attempt and --all-ranks are about a run: name it, or commtrace-runs/latest"
            )
        _check_installation(as_json=json_output)
        return
    flight_calls = read_flight_calls(flight_recorder or [])
    if attempt is None and (worlds := worlds_of_job(runs)):
        if flight_calls:
            raise ConfigurationError("--flight-recorder is about one world: name its directory")
        _examine_job(worlds, as_json=json_output, all_ranks=all_ranks, details=details)
        return
    run = run_directory(runs, attempt)
    recorded, now_ns = load_run(run), time.time_ns()
    diagnosis = examine(recorded, now_ns=now_ns, ask=process_state, all_ranks=all_ranks, flight_calls=flight_calls)
    if json_output:
        sys.stdout.write(json.dumps(_to_json(diagnosis), allow_nan=False) + "\n")
    else:
        print_doctor(wide_console(), recorded, diagnosis, now_ns=now_ns, details=details)
    if not diagnosis.is_healthy:
        raise typer.Exit(_FINDINGS)


def _examine_job(worlds: Sequence[World], *, as_json: bool, all_ranks: bool, details: bool) -> None:
    """Print the diagnosis of each world of a job; those with findings come first."""
    now_ns = time.time_ns()
    runs = [load_run(world.path) for world in worlds]
    diagnoses = [(run, examine(run, now_ns=now_ns, ask=process_state, all_ranks=all_ranks)) for run in runs]
    diagnoses.sort(key=lambda examined: examined[1].is_healthy)
    if as_json:
        of_worlds = [_to_json(diagnosis) for _, diagnosis in diagnoses]
        sys.stdout.write(json.dumps({"verdict": job_verdict(worlds), "worlds": of_worlds}, allow_nan=False) + "\n")
    else:
        console = wide_console()
        console.print(f"[bold]{escape(job_verdict(worlds))}[/]")
        for run, diagnosis in diagnoses:
            console.print()
            print_doctor(console, run, diagnosis, now_ns=now_ns, details=details)
    if not all(diagnosis.is_healthy for _, diagnosis in diagnoses):
        raise typer.Exit(_FINDINGS)


def _to_json(diagnosis: Diagnosis) -> JsonObject:
    return {"verdict": _verdict(diagnosis), **diagnosis.to_json()}


def _check_installation(*, as_json: bool) -> None:
    checks = check_installation(os.environ)
    if as_json:
        sys.stdout.write(
            json.dumps({"verdict": _checks_verdict(checks), "checks": [check.to_json() for check in checks]}) + "\n"
        )
    else:
        console = wide_console()
        _print_newest_run(console)
        print_checks(console, checks)
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(_FINDINGS)


def _print_newest_run(console: Console) -> None:
    """Print how the newest run does or ended, if it is not well: whoever looks for that may have left out the run."""
    try:
        directory = find_run_directory(NEWEST_RUN)
        facts = read_facts(directory, now_ns=time.time_ns(), ask=process_state)
    except (CommtraceError, OSError):
        return  # there is none here, or it cannot be read: then this checks what it is asked to
    if facts.ending or facts.state not in (RUNNING, ENDED):
        state = end_words(facts.state, facts.ending)
        console.print(f"[bold red]The newest run, {escape(printable(directory.name))}: {escape(state)}[/]")
        print_advice(console, f"See where it stands: commtrace doctor {NEWEST_RUN}")
        console.print()


def read_flight_calls(paths: Sequence[Path]) -> list[FlightCall]:
    """Return the collectives in dumps, folders or prefixes; raise :class:`ImportFileError` without readable ones."""
    records = [read_flight_record(path) for given in paths for path in _dumps(given)]
    return [
        FlightCall(
            record.rank,
            entry.group.ranks,
            entry.group.ordinal,
            entry.operation,
            entry.seq,
            entry.state,
            entry.frames,
        )
        for record in with_members(records)
        for entry in record.entries
        if entry.group is not None and not entry.is_p2p
    ]


def _dumps(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    folder, begin = (given, "") if given.is_dir() else (given.parent, given.name)
    listing = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [
        path for path in listing if path.name.startswith(begin) and path.is_file() and _ENDS_WITH_RANK.search(path.name)
    ]
    if not found:
        raise ImportFileError(
            f"{given}: no dumps of the flight recorder. Give the files that TORCH_NCCL_DEBUG_INFO_TEMP_FILE names, "
            "what their names begin with, or their directory; the names end with the rank."
        )
    return found


HEALTHY: Final = "Nothing hangs or failed, and nothing is missing from the recording."

_MOST_GROUPS: Final = 24
_MOST_ACTIVITIES: Final = 16
_MOST_FRAMES: Final = 4


def _verdict(diagnosis: Diagnosis) -> str:
    return diagnosis.findings[0].line() if diagnosis.findings else HEALTHY


def _checks_verdict(checks: Sequence[Check]) -> str:
    problems = sum(check.state == "problem" for check in checks)
    if problems:
        return f"A job that is started here is not recorded as configured: {problems} to mend."
    return "A job that is started here is recorded."


def print_doctor(console: Console, recorded: Run, diagnosis: Diagnosis, *, now_ns: int, details: bool = False) -> None:
    """Print the state of the job and what was found, then where it stands still, and what of it was recorded."""
    state = state_of_examined(recorded, diagnosis, now_ns=now_ns, ask=process_state)
    console.print(f"[bold]{escape(RunTitle.of(recorded, state).words)}[/]")
    for finding in diagnosis.findings:
        print_indented(console, finding.line(), "  ", "! ", "yellow")
    if not diagnosis.findings:
        console.print(f"[bold green]{HEALTHY}[/]")
        _print_lost_time(console, Path(diagnosis.run.path))
    for note in diagnosis.notes:
        print_indented(console, note, "  ", "note: ", "dim")
    console.print()
    for sentence in diagnosis.hang.sentences:
        indent = " " * (len(sentence) - len(sentence.lstrip()))
        print_indented(console, sentence.strip(), f"{indent}  ", indent, "bold red" if not indent else None)
    for line in moved_ranks_lines(_named(diagnosis), diagnosis.run.earlier_attempts):
        print_indented(console, line, "  ")
    if diagnosis.hang.sentences:
        console.print()
    for line in _circumstances(diagnosis, now_ns):
        console.print(line, style="dim")
    print_basis(console, diagnosis.alignment, (), details=details)
    console.print()
    _print_activity(console, diagnosis)
    _print_groups(console, diagnosis)
    _print_invisible(console, diagnosis)


def _print_lost_time(console: Console, run: Path) -> None:
    """Print what the steps of a run that goes on or ended well lose time to, as the other commands do."""
    try:
        findings = judge_newest_steps(run).findings
    except (CommtraceError, OSError):
        findings = ()  # it has no whole step, or was not read from a directory
    if findings:
        print_findings(console, findings)
    way = "See more of it" if findings else "See what its steps lose time to"
    print_advice(console, f"{way}: commtrace summary {run}")


def _named(diagnosis: Diagnosis) -> Iterable[int]:
    """Return the ranks at which the findings lead: the roots of a hang, and those that failed first or fell silent."""
    first = diagnosis.first_failure
    silent = (one.rank for one in diagnosis.ranks if one.state == SILENT or one.exception or one.exit)
    return (*(root.rank for root in diagnosis.hang.chains.roots), *(first.ranks if first else ()), *silent)


_MARKS: Final = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print the result for a job that is started here, then the checks behind it."""
    colour = "red" if any(check.state == "problem" for check in checks) else "green"
    console.print(f"[bold {colour}]{_checks_verdict(checks)}[/]\n")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        text = escape(check.text) + (f"\n→ {escape(check.advice)}" if check.advice else "")
        table.add_row(_MARKS[check.state], escape(check.subject), text)
    console.print(table)
    console.print("\nOf a run: commtrace doctor commtrace-runs/latest", style="dim")


def _circumstances(diagnosis: Diagnosis, now_ns: int) -> Iterable[str]:
    run = diagnosis.run
    for line in attempt_lines(run.earlier_attempts):
        yield escape(line)
    states = run.states
    last = run.last_written_ns
    source = run.versions.get(IMPORTED_FROM)
    if states.get("running") and last is not None:
        yield f"Still running: last write {format_duration(max(0, now_ns - last))} ago."
    elif last is not None:
        last_sign = (
            "Last operation in the dumps:"
            if states.get("dumped")
            else f"Last event in the {escape(source)} files:"
            if source
            else "Not running: last write"
        )
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last / 1e9))
        yield f"{last_sign} {when}, {format_duration(max(0, now_ns - last))} ago."
    words = {
        "ended": "in the files, which say nothing about their end" if source else "ended cleanly",
        "stopped": "stopped without ending",
        "silent": "went silent before others",
        "dumped": "in a dump, which says nothing about their end",
    }
    by_state = {words.get(state, state): _ranges_of(diagnosis, state) for state in states}
    suspended = [one.rank for one in diagnosis.ranks if one.process == SUSPENDED]
    if suspended:
        by_state["suspended"] = ranges(suspended)
    raised = ranges(one.rank for one in diagnosis.ranks if one.exception)
    if raised:
        by_state["ended with an uncaught exception"] = raised
    exited = ranges(one.rank for one in diagnosis.ranks if one.exit)
    if exited:
        by_state["ended by os._exit"] = exited
    yield "Ranks: " + "; ".join(f"{state}: {format_ranges(own)}" for state, own in by_state.items() if own)
    if run.missing_ranks:
        yield f"[yellow]No readable files of {format_ranks(run.missing_ranks)}.[/]"
    engine = engine_words(diagnosis.engines)
    if engine:
        yield escape(f"Engine: {engine}")


def _ranges_of(diagnosis: Diagnosis, state: str) -> list[tuple[int, int]]:
    return ranges(
        one.rank
        for one in diagnosis.ranks
        if one.state == state and not (one.exception or one.exit) and one.process != SUSPENDED
    )


def _name(group: GroupLabel) -> str:
    return group.words if group.role == UNKNOWN_ROLE and group.words else group.role


def _role(group: GroupLabel) -> str:
    return group.name or group.role if group.members and group.role == UNKNOWN_ROLE else group.role


def _print_groups(console: Console, diagnosis: Diagnosis) -> None:
    rows = []
    groups = [group for group in diagnosis.groups if group.collectives or group.messages]
    broken_off = {one.rank for one in diagnosis.ranks if one.state in (STOPPED, SILENT)}
    for group in groups[:_MOST_GROUPS]:
        members = format_ranges(ranges(group.group.ranks)) or group.group.words or "not known"
        for what, seen in (("collectives", group.collectives), ("messages", group.messages)):
            for ranks, example in _alike(seen, broken_off):
                numbers = "" if example.first is None else f"{example.first}–{example.last}"
                rows.append(
                    {
                        "group": _role(group.group),
                        "members": members,
                        "ranks": format_ranges(ranges(ranks)),
                        "what": what,
                        "seen": str(example.recorded),
                        "numbers": numbers,
                        "in flight": str(example.in_flight or ""),
                        "missing": _missing(example),
                        "not written": _not_written(example) if ranks[0] in broken_off else "",
                    }
                )
    console.print("[bold]Coverage: communications of every group by their sequence numbers[/]")
    console.print(_table_of(rows))
    if len(groups) > _MOST_GROUPS:
        console.print(f"({len(groups) - _MOST_GROUPS} more groups: --json)", style="dim")
    silent = [group.group for group in diagnosis.groups if not group.collectives and not group.messages]
    if silent:
        named = ", ".join(dict.fromkeys(_name(group) for group in silent))
        console.print(
            f"{len(silent)} group{'s' * (len(silent) != 1)} without any communication: {escape(named)}", style="dim"
        )
    for drop in diagnosis.drops:
        kinds = ", ".join(f"{count} {kind}" for kind, count in drop.dropped.items())
        console.print(f"[yellow]Dropped on rank {drop.rank}:[/] {escape(kinds)}{_between(drop)}")
    for one in diagnosis.recording:
        where = "every rank" if len(one.ranks) == len(diagnosis.ranks) else format_ranks(one.ranks)
        console.print(f"Left out on purpose: {escape(one.option)}: {escape(one.value)} on {where}", style="dim")
    console.print()


def _table_of(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of rows with the same headings, without columns in which nothing stands."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    headings = [heading for heading in (rows[0] if rows else ()) if any(row[heading] for row in rows)]
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in ("seen", "in flight") else "left",
            overflow="fold",
            no_wrap=heading in ("group", "what", "seen", "numbers"),
        )
    for row in rows:
        table.add_row(*(escape(row[heading]) for heading in headings))
    return table


def _between(drop: Drops) -> str:
    if drop.first_ns is None or drop.last_ns is None:
        return ""
    first, last = (time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9)) for at_ns in (drop.first_ns, drop.last_ns))
    return f", between {first} and {last}"


def _alike(seen: Sequence[Seen], broken_off: Collection[int]) -> Iterable[tuple[list[int], Seen]]:
    # With one rank of each set, which have the same coverage and the same end.
    by_sight: dict[tuple[Seen, bool], list[Seen]] = {}
    for one in seen:
        by_sight.setdefault((one._replace(rank=0), one.rank in broken_off), []).append(one)
    return [([one.rank for one in alike], alike[0]) for alike in by_sight.values()]


def _missing(seen: Seen) -> str:
    if not seen.missing:
        return "none"
    which = format_ranges(list(seen.ranges))
    return f"{seen.missing}" + (f": {which}" if which else "")


def _not_written(seen: Seen) -> str:
    # The least number of communications that a broken-off file lacks, by those that other ranks completed.
    if seen.unwritten is None:
        return ""
    return f"at least {seen.unwritten}" if seen.unwritten else "unknown"


def _print_invisible(console: Console, diagnosis: Diagnosis) -> None:
    for path in diagnosis.coverage.not_visible:
        console.print(f"[yellow]Not visible:[/] {escape(path)}")
    for replays in diagnosis.coverage.replays:
        console.print(escape(replays.sentence))
    if diagnosis.coverage.not_visible or diagnosis.coverage.replays:
        console.print()


def _print_activity(console: Console, diagnosis: Diagnosis) -> None:
    activities = diagnosis.hang.last_activities
    if not activities:
        return
    console.print("[bold]Last activity of each rank[/]")
    for rank, own in list(activities.items())[:_MOST_ACTIVITIES]:
        print_indented(console, f"rank {rank}: {activity_words(own)}", "  ")
    if len(activities) > _MOST_ACTIVITIES:
        console.print(f"({len(activities) - _MOST_ACTIVITIES} more: --json)", style="dim")
    for root in diagnosis.hang.chains.roots[:2]:
        examined, last = diagnosis.rank(root.rank), activities.get(root.rank)
        frames = (examined.stack if examined else ()) or (last.frames if last else ())
        if frames:
            console.print(f"rank {root.rank} is at, innermost first:", style="dim")
            for frame in frames[:_MOST_FRAMES]:
                console.print(f"    {escape(frame)}", style="dim", soft_wrap=True)
    console.print()
