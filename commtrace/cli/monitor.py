"""``commtrace monitor --serve HOST:PORT``: joins the ranks of a running job from outside of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commtrace.errors import CommtraceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from commtrace.exporters.monitor.board import Announcement
    from commtrace.live.watch import LiveEvent

_POLL_SECONDS = 1.0


def monitor(
    serve: Annotated[str, typer.Option(help="Listen here for the ranks: HOST:PORT.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where monitor.json and monitor.jsonl go.")] = Path(),
    webhook: Annotated[str, typer.Option(help="POST every finding to this URL.", show_default=False)] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print every finding as a line of JSON.")] = False,
    windows: Annotated[int, typer.Option(help="End after so many windows; 0: with Ctrl-C.", min=0)] = 0,
) -> None:
    """Watch a running job: who is slow, since when, why, and what it costs.

    Start the job with COMMTRACE_EXPORT=monitor and COMMTRACE_MONITOR_STORE=HOST:PORT. The job does not need this
    process: it trains and records the same when this one is gone, and reports to it again when it is back.
    """
    # Imported here: the store is torch's, and no other reading command needs torch.
    try:
        from commtrace.exporters.monitor.board import Board
    except ImportError as error:
        raise CommtraceError(f"commtrace monitor needs torch for its store: {error}") from error
    from commtrace.exporters.monitor.joiner import Joiner, Outlet
    from commtrace.exporters.monitor.outlets import BoardOutlet, FileOutlet, WebhookOutlet

    board = Board.serve(serve, "")
    typer.echo(f"Waiting for a job with COMMTRACE_EXPORT=monitor COMMTRACE_MONITOR_STORE={serve}", err=True)
    while (job := board.announced()) is None:
        time.sleep(_POLL_SECONDS)
    typer.echo(f"Watching run {job.run}: {job.world_size} ranks, windows of {job.seconds:g} s", err=True)
    poster = WebhookOutlet(webhook) if webhook else None
    outlets: list[Outlet] = [_Printed(json_output), FileOutlet(output), *([poster] if poster else [])]

    def joiner_of(announced: Announcement) -> Joiner:
        own = BoardOutlet(board.of_run(announced.run))
        return Joiner(announced.world_size, announced.seconds, [*outlets, own])

    joiner = joiner_of(job)
    count, due = 0, time.monotonic() + job.seconds
    while not windows or count < windows:
        time.sleep(min(_POLL_SECONDS, job.seconds))
        joiner.look_for_hangs(board.of_run(job.run), time.time())
        if time.monotonic() < due:
            continue
        due += job.seconds
        newest = board.announced() or job
        if newest != job:  # the next attempt, or another job
            job, joiner = newest, joiner_of(newest)
        joiner.join(board.of_run(job.run), time.time())
        count += 1
    if poster:
        poster.close()


class _Printed:
    """One line per finding on stdout."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def tell(self, events: Sequence[LiveEvent], status: dict[str, Any]) -> None:
        import json

        for event in events:
            when = time.strftime("%H:%M:%S", time.localtime(event.time))
            typer.echo(json.dumps(event.to_json()) if self._as_json else f"{when} {event.sentence}")
