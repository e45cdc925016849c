"""``commtrace metrics RUN``: metrics that need the files of all ranks, for Prometheus or OpenTelemetry."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commtrace.analysis.path_totals import PathTotals
from commtrace.cli.arguments import DEFAULT_RUNS, AttemptOption, JsonOption, RunsArgument, run_directory
from commtrace.errors import CommtraceError, MissingExtraError, RunNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from commtrace.analysis.breakdown.critical_path import CriticalPath
    from commtrace.exporters.prometheus.critical_path import PathCollector
    from commtrace.trace.json_values import JsonObject

_SECONDS = 15.0


def metrics(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a file for node-exporter, such as x.prom.", show_default=False),
    ] = None,
    serve: Annotated[
        str, typer.Option(help="Serve them to Prometheus at HOST:PORT, updated until Ctrl-C.", show_default=False)
    ] = "",
    otlp: Annotated[bool, typer.Option("--otlp", help="Send them over OTLP to OTEL_EXPORTER_OTLP_ENDPOINT.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two updates until the run ends; 0: once.", min=0)] = 0.0,
    json_output: JsonOption = False,
) -> None:
    """Export the critical path of a run as metrics: what the length of the job's steps consists of.

    Sums by rank, kind and role over all steps that all ranks have recorded; of a running job, some seconds behind it.
    Without an option they are printed in the format of Prometheus. With --serve they are updated every 15 seconds until
    Ctrl-C.
    """
    from commtrace.exporters.prometheus.critical_path import PathCollector

    run = run_directory(runs, attempt)
    totals = PathTotals(run)
    collector = PathCollector(totals)
    pause = every or (_SECONDS if serve else 0.0)
    with contextlib.ExitStack() as ending, contextlib.suppress(KeyboardInterrupt):
        if serve:
            ending.enter_context(_served(serve, collector, run))
        send = _otlp_sender(totals, collector) if otlp else None
        problem = ""
        while True:
            problem = _read_on(totals, problem, waits=pause > 0)
            if output is not None:
                _write(output, collector)
            if send is not None:
                send()
            if not pause or (totals.has_ended and not serve):
                break
            time.sleep(pause)
    if json_output:
        typer.echo(json.dumps(path_json(totals), allow_nan=False))
    elif not (output or serve or otlp):
        typer.echo(_as_text(collector), nl=False)


def _read_on(totals: PathTotals, problem: str, *, waits: bool) -> str:
    try:
        totals.read_on(to_the_end=not waits)
    except (CommtraceError, OSError) as error:
        if not waits or not isinstance(error, (RunNotFoundError, OSError)):
            raise
        if str(error) != problem:
            typer.echo(f"commtrace: waiting: {error}", err=True)
        return str(error)
    if totals.num_left_out and not problem:
        problem = f"{totals.num_left_out} steps are left out: the clocks of the hosts could not be aligned."
        typer.echo(f"commtrace: {problem}", err=True)
    return problem


def path_json(totals: PathTotals) -> JsonObject:
    """Return the sums so far; before the first step the critical path has no shares."""
    path, lost = totals.path, totals.lost
    return {
        "verdict": _verdict(path),
        "run": totals.run_id,
        "last_step": totals.last_step,
        "has_ended": totals.has_ended,
        "steps_left_out": totals.num_left_out,
        "critical_path": path.to_json(),
        "lost_time": None if lost is None else lost.to_json(),
        "nodes": {str(rank): node for rank, node in totals.nodes.items()},
    }


def _verdict(path: CriticalPath) -> str:
    if not path.shares:
        return "No step has been recorded by all ranks yet."
    share = path.shares[0]
    what = " ".join(filter(None, (share.role, share.kind)))
    return f"{share.ns / path.ns:.0%} of the critical path of {path.num_steps} steps is {what} of rank {share.rank}."


def _as_text(collector: PathCollector) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def _write(path: Path, collector: PathCollector) -> None:
    from commtrace.exporters.prometheus.exporter import replace_file

    replace_file(path, _as_text(collector))


@contextlib.contextmanager
def _served(address: str, collector: PathCollector, run: Path) -> Iterator[None]:
    """Serve the samples with the endpoint options of the ranks, and a target file for Prometheus."""
    from commtrace.config import Config
    from commtrace.exporters.monitor.rendezvous import Address
    from commtrace.exporters.prometheus.critical_path import path_target
    from commtrace.exporters.prometheus.exporter import Endpoint

    host, port = Address.parse(address)
    of_ranks = Config.from_env()
    options = replace(of_ranks.prometheus, address=host, port=port)
    endpoint = Endpoint(replace(of_ranks, prometheus=options), 0, collector)
    target = path_target(endpoint, Path(options.targets or run / "prometheus"), run.resolve().name)
    typer.echo(f"Prometheus finds the metrics at {endpoint.scheme}://{host}:{endpoint.port}, by {target}", err=True)
    try:
        yield
    finally:
        target.unlink(missing_ok=True)
        endpoint.close()


def _otlp_sender(totals: PathTotals, collector: PathCollector) -> Callable[[], None]:
    try:
        from commtrace.exporters.otlp.http import RunMetrics
    except ImportError as error:
        raise MissingExtraError(f"{error}: pip install 'commtrace[otlp]'") from error

    sender = RunMetrics()

    def send() -> None:
        if totals.run_id and not sender.send(collector.collect(), totals.run_id):
            typer.echo("commtrace: the OpenTelemetry receiver did not take the metrics", err=True)

    return send
