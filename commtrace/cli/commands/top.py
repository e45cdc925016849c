"""``commtrace top RUN|URL``: where the time of a running job goes now."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Final, Protocol

import typer
from rich.live import Live
from rich.text import Text

from commtrace.cli.arguments import run_directory
from commtrace.cli.console import PlainConsole
from commtrace.cli.views.top import NARROWEST, WIDEST, draw
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.top.frame import MOST_STEPS, Frame
from commtrace.trace.files.locate import NEWEST_RUN, RUNS
from commtrace.trace.inputs import printable, printable_lines

_BUSY_SHARE: Final = 0.2
"""Limit of top's share of a core: a login node has other users."""

_WAITING: Final = 3
"""Exit code of ``--once`` if there is nothing to show yet."""


class Source(Protocol):
    """A source of frames."""

    def look(self) -> Frame:
        """Return the present frame; raise :class:`RunNotFoundError` if there is none yet."""


def top(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...|URL",
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
    """Show where the time of a running job goes: its ranks, what they wait for, who is slow.

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


def _source(run: str, last: int, run_id: str) -> Source:
    if run.startswith(("http://", "https://")):
        from commtrace.top.from_metrics import metrics_source

        return metrics_source(run, last or MOST_STEPS, run_id)
    from commtrace.top.from_files import FileSource
    from commtrace.trace.processes import process_state

    return FileSource(run, last, process_state)


def _print_once(source: Source, run: str, ranks: int, *, as_json: bool) -> None:
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


def _watch(source: Source, run: str, console: PlainConsole, refresh: float, ranks: int) -> None:
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


def _drawn(source: Source, run: str, console: PlainConsole, ranks: int, refresh: float) -> Text:
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
