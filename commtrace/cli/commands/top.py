"""``commtrace top RUN|URL``: where the time of a running job goes now."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Protocol

import typer
from rich.live import Live
from rich.text import Text

from commtrace.analysis.clocks.time_of_day import clock_time
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.cli.arguments import run_directory
from commtrace.cli.output import UNKNOWN, PlainConsole, milliseconds, share
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.findings.finding import FAILED, HANG, LOST, NOT_JUDGED, RECORDING, SLOW, Finding, format_since_step
from commtrace.findings.formatting import format_duration
from commtrace.live.top.frame import MOST_STEPS, URGENT, Frame, RankRow, choose_ranks
from commtrace.trace.files.locate import NEWEST_RUN, RUNS
from commtrace.trace.inputs import printable, printable_lines

_BUSY_SHARE: Final = 0.2
"""Limit of top's share of a core: a login node has other users."""

_WAITING: Final = 3
"""Exit code of ``--once`` if there is nothing to show yet."""


class FrameSource(Protocol):
    """A source of frames."""

    def look(self) -> Frame:
        """Return the present frame; raise :class:`RunNotFoundError` if there is none yet."""


def top(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|URL",
            help="The run directory, or several that hold ranks of one job; or http://HOST:PORT/metrics of one rank, "
            f"or http://HOST:PORT of a Prometheus. Default: the newest run below {RUNS}.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        int,
        typer.Option(
            min=0, help="Number of the newest steps to show; 0: 20, down to 8 in jobs of more than 256 ranks."
        ),
    ] = 0,
    refresh: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two looks; more where looking takes long.")
    ] = 2.0,
    ranks: Annotated[int, typer.Option(min=0, help="Show at most this number of ranks; 0: as many as fit.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one frame as JSON, in nanoseconds.")] = False,
    run_id: Annotated[
        str, typer.Option(help="The run to show of a Prometheus. Default: the newest.", show_default=False)
    ] = "",
) -> None:
    """Show where the time of a running job goes: its ranks, what they wait for, and which are slow.

    Reads only the newest steps, so it works on a login node, over ssh, while the job runs. It uses at most a fifth of a
    core, and waits for a run that does not exist yet. Ctrl-C ends it. With --once, or without a terminal, it prints one
    frame. The exit code of --once and --json is 3 if there is nothing to show yet.
    """
    runs = runs or [str(NEWEST_RUN)]
    run = runs[0] if len(runs) == 1 else str(run_directory([Path(one) for one in runs]))
    source = _source(run, last, run_id)
    console = PlainConsole()
    if once or json_output or not console.is_terminal:
        _print_once(source, run, ranks, as_json=json_output)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(source, run, console, refresh, ranks)


def _source(run: str, last: int, run_id: str) -> FrameSource:
    if run.startswith(("http://", "https://")):
        from commtrace.live.top.from_metrics import metrics_source

        return metrics_source(run, last or MOST_STEPS, run_id)
    from commtrace.live.top.from_files import FileSource
    from commtrace.trace.processes import process_state

    return FileSource(run, last, process_state)


def _print_once(source: FrameSource, run: str, ranks: int, *, as_json: bool) -> None:
    try:
        frame = source.look()
    except RunNotFoundError as error:
        if as_json:
            sys.stdout.write(json.dumps({"source": run, "waiting": str(error)}) + "\n")
        else:
            typer.echo(printable_lines(f"Nothing to show yet: {error}"))
        raise typer.Exit(_WAITING) from error
    if as_json:
        sys.stdout.write(json.dumps(frame.to_json(), allow_nan=False) + "\n")
        return
    console = PlainConsole()
    console.width = min(max(console.width, NARROWEST), WIDEST)
    for line in draw(frame, console.width, most_ranks=ranks or None):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def _watch(source: FrameSource, run: str, console: PlainConsole, refresh: float, ranks: int) -> None:
    with Live(Text(printable(f"Reading {run} …")), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            began = time.monotonic()
            drawn = _drawn(source, run, console, ranks, refresh)
            pause = pause_seconds(time.monotonic() - began, refresh)
            live.update(drawn, refresh=True)
            time.sleep(pause)


def pause_seconds(took: float, refresh: float) -> float:
    """Return the pause after a look: ``refresh``, or longer to bound the share of a core."""
    return max(refresh, took * (1 - _BUSY_SHARE) / _BUSY_SHARE)


def _drawn(source: FrameSource, run: str, console: PlainConsole, ranks: int, refresh: float) -> Text:
    try:
        frame = source.look()
        width, height = max(console.width, NARROWEST), console.height
        pause = pause_seconds(frame.took_ns / 1e9, refresh)
        lines = draw(frame, width, height=height, most_ranks=ranks or None, refresh=pause)
    except (CommtraceError, OSError) as error:
        lines = [
            Text(f"{time.strftime('%H:%M:%S')}  waiting for {printable(run)}", style="bold"),
            Text(),
            Text(printable_lines(str(error))),
            Text(),
            Text(f"Looks again every {refresh:g} s. Ctrl-C ends.", style="dim"),
        ]
    return Text("\n").join(lines)


NARROWEST: Final = 80
WIDEST: Final = 200

_ROWS_WITHOUT_TERMINAL: Final = 16
_FEWEST_ROWS: Final = 4
_MOST_FINDINGS: Final = 3
_MOST_LOST: Final = 2
_WORTH_A_LINE: Final = 0.05
_MOST_NOTES: Final = 4
_MOST_ROLES: Final = 4
_MOST_ROLE_COLUMNS: Final = 3
_ROLE_COLUMNS_GO: Final = 6
_WORTH_A_COLUMN: Final = 0.001
_NARROWEST_BAR: Final = 10
_WIDEST_BAR: Final = 40
_TREND_WORTH_A_COLOUR: Final = 0.05

_LETTERS: Final = {
    "compute": ("█", "green"),
    "exposed": ("x", "red"),
    "bubble": ("b", "yellow"),
    "data": ("d", "magenta"),
    "checkpoint": ("c", "blue"),
    "gc": ("g", "magenta"),
    "memory": ("m", "cyan"),
    "idle": ("i", "yellow"),
    "replay": ("r", "cyan"),
    "between": ("-", "dim"),
    "other": ("·", "dim"),
}


class _Brevity(IntEnum):
    """What is left out of a low terminal, in this order, until some ranks have room."""

    NOTHING = 0
    ONE_EVIDENCE = 1  # only that of the first finding is shown
    NO_ROLES = 2
    NO_EVIDENCE = 3
    NO_ADVICE_ON_LOSSES = 4


class _Column(NamedTuple):
    """A column of the table of ranks; in a narrow terminal, the highest ``rank_to_go`` is left out first."""

    heading: str
    cell: Callable[[RankRow], str]
    rank_to_go: int = 0
    is_left: bool = False


def draw(
    frame: Frame,
    width: int,
    *,
    height: int | None = None,
    most_ranks: int | None = None,
    refresh: float | None = None,
) -> list[Text]:
    """Return the lines of a frame.

    Without a terminal, ``height`` is None and nothing is left out. ``most_ranks`` limits the rows; None: as many as
    fit, or 16 without a terminal. ``refresh`` is the time to the next look in seconds, if there is one.
    """
    below = list(_footer(frame, width, refresh))
    for brevity in _Brevity:
        roles = [] if brevity >= _Brevity.NO_ROLES else _roles(frame)
        above = [_title(frame), *_verdict(frame, width, brevity), *_steps(frame), *roles]
        room = height - len(above) - len(below) - 4 if height is not None else _ROWS_WITHOUT_TERMINAL
        if room >= _FEWEST_ROWS:
            break
    most = min(most_ranks, room) if most_ranks and height is not None else most_ranks or room
    table = _table(frame, max(most, _FEWEST_ROWS), min(width, WIDEST))
    lines = [*above, Text(), *table, *below]
    return [_cut(line, width) for line in (lines if height is None else lines[:height])]


def _title(frame: Frame) -> Text:
    name = frame.run_id or frame.source
    count = frame.world_size or len(frame.ranks)
    size = f"{count} rank{'s' * (count != 1)}{'' if frame.world_size else ' seen'}"
    hosts = f" on {frame.hosts} host{'s' * (frame.hosts != 1)}" if frame.hosts else ""
    when = time.strftime("%H:%M:%S", time.localtime(frame.time_ns / 1e9))
    return Text.assemble((name, "bold"), f" · {size}{hosts} · {when}")


def _steps(frame: Frame) -> Iterator[Text]:
    line = Text(f"Step {_last_step(frame)} · takes {_ms(frame.step_ns)}")
    if frame.before_ns and frame.step_ns:
        change = frame.step_ns / frame.before_ns - 1
        style = "bold red" if change > _TREND_WORTH_A_COLOUR else ""
        line.append(f", {_ms(frame.before_ns)} over the run: ")
        line.append(f"{change:+.1%}", style)
    yield line
    yield Text(f"Shown: mean of {_steps_shown(frame)}", "dim")
    if frame.own_cost:
        yield Text(frame.own_cost, "dim")


def _last_step(frame: Frame) -> str:
    last = max((row.last_step for row in frame.ranks), default=-1)
    return str(last) if last >= 0 else UNKNOWN


def _ms(time_ns: int | None) -> str:
    return UNKNOWN if time_ns is None else f"{milliseconds(time_ns)} ms"


def _steps_shown(frame: Frame) -> str:
    if frame.first_step is None or frame.last_step is None:
        return f"{frame.num_steps} steps" if frame.num_steps else "no step"
    if frame.num_steps == 0:
        return "nothing but the length of a step"
    return f"{frame.num_steps} step{'s' * (frame.num_steps != 1)}, {frame.first_step}–{frame.last_step}"


def _verdict(frame: Frame, width: int, brevity: _Brevity = _Brevity.NOTHING) -> Iterator[Text]:
    for note in frame.notes[:_MOST_NOTES]:
        yield from _wrapped(note, width, "bold red" if note.startswith(URGENT) else "yellow", "  ")
    if len(frame.notes) > _MOST_NOTES:
        yield Text(f"({len(frame.notes) - _MOST_NOTES} more notes: --json)", "dim")
    urgent = [finding for finding in frame.findings if finding.kind not in (LOST, RECORDING, NOT_JUDGED)]
    for number, finding in enumerate(urgent[:_MOST_FINDINGS]):
        by = _by(finding, frame.sources.get(finding.id, ""))
        if finding.kind == SLOW:
            yield from _wrapped(f"STRAGGLER {finding.line()}{by}", width, "bold red", "  ")
            evidence = finding.evidence if number < _most_evidence(brevity) else ""
            if more := f"{evidence} {'' if number else finding.advice}".strip():
                yield from _wrapped(f"  {more}", width, "", "  ")
        else:
            yield from _wrapped(f"{finding.kind.upper()}: {finding.line()}{by}", width, "bold red", "  ")
            yield from _wrapped(f"  {finding.advice}", width, "", "  ")
    if len(urgent) > _MOST_FINDINGS:
        yield Text(f"({len(urgent) - _MOST_FINDINGS} more that cost less: --json)", "dim")
    if _has_stopped(frame):
        return  # what its steps lost is not what it needs
    if not any(finding.kind == SLOW for finding in frame.findings):
        not_judged = next((finding for finding in frame.findings if finding.kind == NOT_JUDGED), None)
        if not_judged is not None:
            yield from _wrapped(not_judged.line(), width, "yellow", "  ")
        elif frame.num_steps:
            yield Text("No straggler in these steps.", "green")
    lost = [finding for finding in frame.findings if finding.kind == LOST and (finding.share or 0.0) >= _WORTH_A_LINE]
    for finding in lost[:_MOST_LOST]:
        advice = "" if brevity >= _Brevity.NO_ADVICE_ON_LOSSES else f" {finding.advice}"
        yield from _wrapped(f"Lost time, {finding.line()}.{advice}", width, "yellow", "  ")
    yield from _most_waited_for(frame)


def _most_evidence(brevity: _Brevity) -> int:
    if brevity >= _Brevity.NO_EVIDENCE:
        return 0
    return 1 if brevity >= _Brevity.ONE_EVIDENCE else _MOST_FINDINGS


def _has_stopped(frame: Frame) -> bool:
    """Return whether the job makes no progress, or ended otherwise than in order."""
    return any(finding.kind in (HANG, FAILED) for finding in frame.findings) or any(
        row.state == "stopped" for row in frame.ranks
    )


def _by(finding: Finding, source: str) -> str:
    """Return who says so, and since when it holds."""
    since = ""
    if finding.since_ns is not None:
        step = format_since_step(finding.since_step, finding.since_within_steps)
        since = f", since {step}{', ' if step else ''}{clock_time(finding.since_ns)}"
    return f" (by the {source}{since})"


def _most_waited_for(frame: Frame) -> Iterator[Text]:
    blamed = sorted((row for row in frame.ranks if row.blame_ns), key=lambda row: -(row.blame_ns or 0))
    total = sum(row.blame_ns or 0 for row in blamed)
    if not blamed or frame.num_steps < Thresholds().fewest_steps:  # of fewer, it may be chance
        return
    named = ", ".join(f"rank {row.rank} {share(row.blame_ns, total)}" for row in blamed[:3])
    yield Text(f"Waited for, of all waiting: {named}")


def _roles(frame: Frame) -> Iterator[Text]:
    # One line per role: the mean over the known ranks, and the rank that loses most.
    roles = _roles_by_size(frame)
    if not roles:
        return
    known = [row for row in frame.ranks if row.parts]
    wall = sum(row.step_ns or 0 for row in known)
    yield Text()
    yield Text(
        f"{'exposed by role':<17}{'mean ms':>9}{'share':>7}{'wait':>9}{'transfer':>10}{'most':>9}  on rank", "bold"
    )
    for role in roles[:_MOST_ROLES]:
        own = [(row, row.exposed[role]) for row in known if role in row.exposed]
        total = sum(one.total_ns for _, one in own)
        most_row, most = max(own, key=lambda pair: pair[1].total_ns)
        waits = [one.wait_ns for _, one in own]
        transfers = [one.transfer_ns for _, one in own]
        wait, transfer = (
            None if None in parts else sum(part or 0 for part in parts) / len(known) for parts in (waits, transfers)
        )
        yield Text(
            f"{role:<17}{milliseconds(total / len(known)):>9}{share(total, wall):>7}{milliseconds(wait):>9}"
            f"{milliseconds(transfer):>10}{milliseconds(most.total_ns):>9}  {_rank(most_row)}"
        )
    if len(roles) > _MOST_ROLES:
        yield Text(f"({', '.join(roles[_MOST_ROLES:])}: less)", "dim")


def _roles_by_size(frame: Frame) -> list[str]:
    totals: dict[str, int] = {}
    for row in frame.ranks:
        for role, one in row.exposed.items():
            totals[role] = totals.get(role, 0) + one.total_ns
    return sorted(totals, key=lambda role: -totals[role])


def _table(frame: Frame, most: int, width: int) -> Iterator[Text]:
    if not frame.ranks:
        return
    rows = choose_ranks(frame, most)
    columns = _fitting(_columns(frame), rows, width)
    widths = [max(len(column.heading), *(len(column.cell(row)) for row in rows)) for column in columns]
    bar = min(_WIDEST_BAR, width - sum(widths) - 2 * len(widths))
    has_bar = bar >= _NARROWEST_BAR and any(row.parts for row in rows)
    yield Text(_line([column.heading for column in columns], columns, widths), "bold")
    slow = frame.slow_ranks
    for row in rows:
        style = "bold red" if row.rank in slow or row.state == "silent" else ""
        line = Text(_line([column.cell(row) for column in columns], columns, widths), style)
        yield line.append_text(_bar(row, bar)) if has_bar else line
    if has_bar:
        shown = [part for part in _LETTERS if any(row.parts.get(part) for row in rows)]
        legend = "  ".join(f"{_LETTERS[part][0]} {part}" for part in shown)
        yield Text(f"ms per step; {legend}", "dim")
    else:
        yield Text("ms per step", "dim")
    yield from _hidden(frame, rows)


def _columns(frame: Frame) -> list[_Column]:
    parts = [part for part in _LETTERS if _is_worth_it(frame, part) or part in ("compute", "exposed", "other")]
    ages = [row.age_ns for row in frame.ranks if row.age_ns is not None]
    lasts = {row.last_step for row in frame.ranks}
    columns = [_Column("rank", _rank)]
    if any(row.where for row in frame.ranks):
        columns.append(_Column("where", lambda row: row.where, 3, is_left=True))
    if frame.hosts and frame.hosts > 1:
        columns.append(_Column("host", lambda row: row.host, 7, is_left=True))
    columns.append(_Column("step", lambda row: milliseconds(row.step_ns)))
    for part in parts:
        columns.append(_Column(part, _cell_of(part), 0 if part in ("compute", "exposed") else 2))
        if part == "compute" and any(_is_launch_bound(row) for row in frame.ranks):
            columns.append(_Column("launch-bound", lambda row: milliseconds(row.launch_bound_ns), 2))
        if part == "exposed":
            roles = _roles_by_size(frame)[:_MOST_ROLE_COLUMNS]
            columns += [_Column(f"x {role}", _cell_of_role(role), _ROLE_COLUMNS_GO) for role in roles]
    if any(row.blame_ns is not None for row in frame.ranks):
        columns.append(_Column("waits for", _waits_for, 1))
        columns.append(_Column("blamed", lambda row: milliseconds(row.blame_ns), 4))
    if len(lasts) > 1:
        columns.append(_Column("last", lambda row: str(row.last_step) if row.last_step >= 0 else UNKNOWN, 5))
    if ages:
        columns.append(_Column("heard", _age, 1))
    if any(row.dropped for row in frame.ranks):
        columns.append(_Column("dropped", lambda row: UNKNOWN if row.dropped is None else str(row.dropped), 5))
    return columns


def _is_worth_it(frame: Frame, part: str) -> bool:
    return any(row.parts.get(part, 0) > _WORTH_A_COLUMN * (row.step_ns or 0) for row in frame.ranks)


def _is_launch_bound(row: RankRow) -> bool:
    return (row.launch_bound_ns or 0) > _WORTH_A_COLUMN * (row.step_ns or 0)


def _cell_of(part: str) -> Callable[[RankRow], str]:
    return lambda row: milliseconds(row.parts.get(part))


def _cell_of_role(role: str) -> Callable[[RankRow], str]:
    # 0 for a role without exposed time, if the rank's step is known.
    return lambda row: milliseconds(row.exposed[role].total_ns if role in row.exposed else 0 if row.parts else None)


def _rank(row: RankRow) -> str:
    return str(row.rank) if row.rank >= 0 else UNKNOWN


def _waits_for(row: RankRow) -> str:
    if row.waits_ns is None:
        return UNKNOWN
    return "none" if row.waits_for is None or not row.waits_ns else f"{row.waits_for}: {milliseconds(row.waits_ns)}"


def _age(row: RankRow) -> str:
    if row.state in ("ended", "stopped"):
        return row.state
    if row.age_ns is None:
        return UNKNOWN
    return f"{row.state.upper()} {format_duration(row.age_ns)}" if row.state == "silent" else _ago(row.age_ns)


def _ago(age_ns: int) -> str:
    return "now" if age_ns < 1_000_000_000 else f"{format_duration(age_ns)} ago"


def _fitting(columns: list[_Column], rows: Sequence[RankRow], width: int) -> list[_Column]:
    kept = list(columns)
    while (
        len(kept) > 1 and sum(max(len(one.heading), *(len(one.cell(row)) for row in rows)) + 2 for one in kept) > width
    ):
        worst = max(one.rank_to_go for one in kept)
        if worst == 0:
            break
        kept.remove(next(one for one in reversed(kept) if one.rank_to_go == worst))
    return kept


def _line(cells: Sequence[str], columns: Sequence[_Column], widths: Sequence[int]) -> str:
    aligned = [
        f"{cell:<{width}}" if column.is_left else f"{cell:>{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return "  ".join(aligned) + "  "


def _bar(row: RankRow, width: int) -> Text:
    # Every part is as long as its share, to one letter.
    bar, total, done, at = Text(), row.step_ns or 0, 0, 0
    for part, (letter, style) in _LETTERS.items():
        done += row.parts.get(part, 0)
        end = round(width * done / total) if total else 0
        bar.append(letter * max(0, end - at), style)
        at = max(at, end)
    return bar


def _hidden(frame: Frame, rows: Sequence[RankRow]) -> Iterator[Text]:
    shown = {row.rank for row in rows}
    hidden = [row for row in frame.ranks if row.rank not in shown]
    if not hidden:
        return
    line = f"{len(hidden)} of {len(frame.ranks)} ranks hidden"
    compute = [row.parts["compute"] for row in hidden if row.parts]
    if compute:
        line += f": compute {milliseconds(min(compute))}–{milliseconds(max(compute))} ms"
    silent = sum(row.state == "silent" for row in hidden)
    yield Text(line + (f", {silent} of them silent" if silent else "") + "; --ranks N shows more", "dim")


def _footer(frame: Frame, width: int, refresh: float | None) -> Iterator[Text]:
    if refresh is not None:
        took, pause = format_duration(frame.took_ns), format_duration(round(refresh * 1e9))
        yield Text(f"A look takes {took}, then {pause} until the next. Ctrl-C ends.", "dim")


def _wrapped(text: str, width: int, style: str, indent: str) -> Iterator[Text]:
    for line in textwrap.wrap(text, width, subsequent_indent=indent) or [""]:
        yield Text(line, style)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
