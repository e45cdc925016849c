"""``commtrace view RUN``: the page of a run, from a server on this machine."""

from __future__ import annotations

import atexit
import getpass
import html
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
import webbrowser
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from commtrace.analysis.timeline import Timeline
from commtrace.cli.arguments import (
    AttemptOption,
    ClusterOption,
    WorkersOption,
    chosen_workers,
    run_directory,
    tell_of_worlds,
)
from commtrace.cli.commands.whatif import predict_for_page
from commtrace.errors import ConfigurationError
from commtrace.exporters import chrome_trace, perfetto
from commtrace.history.runs import list_runs
from commtrace.trace.files.jobs import nested_worlds
from commtrace.trace.files.locate import RUNS, find_run_directory, rank_directories, runs_below
from commtrace.trace.processes import process_state
from commtrace.viewer.run_view import RunView
from commtrace.viewer.server import RunServer


def view(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|DIR",
            help=f"A run directory, or a directory of runs, which are listed. Default: {RUNS}.",
            show_default=False,
        ),
    ] = RUNS,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 for a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser here.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="Another run: show what differs, and its typical step.", show_default=False),
    ] = None,
    attempt: AttemptOption = None,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Show a run in a browser, however large it is, also while it is recorded.

    The page is that of `commtrace report`, but every step and rank can be seen: their data are read when they are
    looked at. The server listens on this machine only, and asks for the token in the address that it prints. Ctrl-C
    ends it. With --against, the page of a run shows what differs from another one, and the typical step of that run
    under the steps of this one.
    """
    single = _single_run(run)
    if attempt is not None:
        if single is None:
            raise ConfigurationError(f"{run} holds several runs: name the one whose attempt {attempt} is meant.")
        single = run_directory([single], attempt)
    if against:
        against = find_run_directory(against).absolute()
        if single is None:
            raise ConfigurationError(f"{run} holds several runs: name the one to compare with {against}.")
    directory = single.parent if single else run
    with chosen_workers(workers, cluster) as chosen:
        server = RunServer(
            partial(_paths, directory) if single is None else lambda: {single.name: single},
            partial(RunView, workers=chosen, trace_of=perfetto_trace, against=against, predict=predict_for_page),
            lambda: list_runs(directory, now_ns=time.time_ns(), ask=process_state).to_json(),
            token=secrets.token_urlsafe(16),
            port=port,
        )
        address = server.address(single.name if single else "")
        typer.echo(f"{single or run}\n  {address}")
        tunnel = f"ssh -L {server.port}:127.0.0.1:{server.port} {getpass.getuser()}@{socket.gethostname()}"
        typer.echo(f"From another machine: {tunnel}, then open that address there. Ctrl-C ends it.")
        if open_browser:
            _open_in_browser(address)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its workers, too
        try:
            server.serve()
        except KeyboardInterrupt:
            _end()


def _open_in_browser(address: str) -> None:
    """Open an address by a private file that leads to it: every user sees the arguments of a browser's process."""
    folder = Path(tempfile.mkdtemp(prefix="commtrace-view-"))  # readable by this user only
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    page = folder / "open.html"
    page.write_text(
        f'<!doctype html><meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0; url={html.escape(address)}"><title>commtrace</title>',
        encoding="utf-8",
    )
    webbrowser.open(page.as_uri())


def perfetto_trace(timeline: Timeline, step: int) -> bytes:
    """Return a step for the Perfetto UI, in its own format if the perfetto package is installed, else Chrome JSON."""
    exporter = perfetto if perfetto.is_available() else chrome_trace
    with tempfile.TemporaryDirectory(prefix="commtrace-") as directory:
        path = Path(directory) / "trace"
        exporter.write(timeline.outline(), [timeline.step(step)], path)
        return path.read_bytes()


def _end() -> NoReturn:
    """End at once. Threads that read a run cannot be stopped, and Python's usual exit would abort in their C++ code."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    atexit._run_exitfuncs()
    os._exit(0)


def _single_run(path: Path) -> Path | None:
    """Return the run that is meant; None for a directory of several."""
    if path.is_dir() and not rank_directories(path) and len(runs_below(path)) > 1:
        return None
    tell_of_worlds(path)
    return find_run_directory(path).absolute()


def _paths(directory: Path) -> Mapping[str, Path]:
    runs = runs_below(directory)
    nested = [world for run in runs for world in nested_worlds(run)]  # whose names have that of their run before them
    return {path.relative_to(directory).as_posix(): path.absolute() for path in (*runs, *nested)}
