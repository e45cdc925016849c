"""``commtrace monitor HOST:PORT``: compares the ranks of a running job from outside of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commtrace.errors import ConfigurationError
from commtrace.trace.inputs import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from commtrace.exporters.monitor.exchange import MonitorServer
    from commtrace.exporters.monitor.messages import WatchedJob
    from commtrace.exporters.monitor.sinks import AlertSink, WebhookSink
    from commtrace.exporters.monitor.store import MonitorStore
    from commtrace.findings.status import LiveEvent, MonitorStatus

_POLL_SECONDS = 1.0


def monitor(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Listen here for the ranks.", show_default=False)
    ] = "",
    serve: Annotated[str, typer.Option(help="The same as HOST:PORT.", show_default=False)] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of monitor.json, monitor.jsonl.")] = Path(),
    webhook: Annotated[
        str, typer.Option(help="POST every finding to this URL. [COMMTRACE_MONITOR_WEBHOOK]", show_default=False)
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print every finding as a line of JSON.")] = False,
    windows: Annotated[int, typer.Option(help="End after this number of windows; 0: with Ctrl-C.", min=0)] = 0,
) -> None:
    """Watch a running job: which ranks are slow, since when, why, and what it costs.

    Start the job with COMMTRACE_EXPORT=monitor and COMMTRACE_MONITOR_STORE=HOST:PORT. The job does not depend on this
    process: without it the job trains and records as before, and it reports again when the process is back. Both share
    a token: COMMTRACE_MONITOR_TOKEN, else ~/.config/commtrace/monitor-token, which is created if it is missing.
    """
    from commtrace.cli.commands.history import keep
    from commtrace.config import Config
    from commtrace.exporters.monitor.sinks import FileSink, FindingsSink, open_webhook
    from commtrace.exporters.monitor.store import MonitorStore
    from commtrace.trace.files.locate import rank_directories

    if bool(address) == bool(serve):
        raise ConfigurationError("name one address to listen on: commtrace monitor HOST:PORT")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--output {output} cannot be made: {error.strerror or error}") from error
    store = MonitorStore()
    config = Config.from_env().monitor
    if webhook:
        config = replace(config, webhook=webhook)
    server = _listen(address or serve, config.token, store)
    while (job := store.job) is None:
        time.sleep(_POLL_SECONDS)
    _announce(job)
    poster = open_webhook(config, job.run_id)
    sinks: list[AlertSink] = [_Printed(json_output), FileSink(output), *([poster] if poster else [])]
    sinks.append(FindingsSink(store))
    try:
        _compare(store, job, sinks, poster, windows)
    finally:
        if output.is_dir() and rank_directories(output):
            keep(output, None)
    if poster:
        poster.close()
    server.close()


def _listen(address: str, given_token: str, store: MonitorStore) -> MonitorServer:
    """Open the server and print what a job needs to find it."""
    from commtrace.exporters.monitor.exchange import MonitorServer
    from commtrace.exporters.monitor.rendezvous import Address, checked_token, make_token, token_path

    token = checked_token(given_token) if given_token else make_token(token_path())
    server = MonitorServer(Address.parse(address), token, store.answer)
    typer.echo("Waiting for a job. In its environment, on every node:", err=True)
    typer.echo(f"export COMMTRACE_EXPORT=monitor COMMTRACE_MONITOR_STORE={server.address}", err=True)
    if not given_token:
        typer.echo(
            f"Ranks read the token from {token_path()}. Where they cannot: "
            f'export COMMTRACE_MONITOR_TOKEN="$(cat {token_path()})"',
            err=True,
        )
    return server


def _compare(
    store: MonitorStore, job: WatchedJob, sinks: Sequence[AlertSink], poster: WebhookSink | None, windows: int
) -> None:
    """Compare the ranks of a job, and of each that takes its place, until so many windows are over; 0 for no end."""
    from commtrace.exporters.monitor.aggregator import Aggregator

    aggregator = Aggregator(job, sinks)
    count, due = 0, time.monotonic() + job.seconds
    while not windows or count < windows:
        time.sleep(min(_POLL_SECONDS, job.seconds))
        if store.job is not None and store.job != job:
            job = store.job
            aggregator = Aggregator(job, sinks)
            if poster:
                poster.run_id = job.run_id
            _announce(job)
        aggregator.look_for_hangs(store, time.time())
        if time.monotonic() < due:
            continue
        due += job.seconds
        aggregator.join(store, time.time())
        count += 1


def _announce(job: WatchedJob) -> None:
    typer.echo(f"Watching run {printable(job.run_id)}: {job.world_size} ranks, windows of {job.seconds:g} s", err=True)


class _Printed:
    """One line per finding on stdout."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def alert(self, events: Sequence[LiveEvent], status: MonitorStatus) -> None:
        import json

        from commtrace.trace.json_values import fields_to_json

        for event in events:
            when = time.strftime("%H:%M:%S", time.localtime(event.time_ns / 1e9))
            typer.echo(json.dumps(fields_to_json(event)) if self._as_json else f"{when} {printable(event.sentence)}")
