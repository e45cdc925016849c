"""``torchrun … -m commtrace preflight``: is this cluster fit for a job?"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from commtrace.cli.arguments import JsonOption
from commtrace.cli.commands.bench_collectives import CollectiveBackend
from commtrace.cli.output import wide_console

if TYPE_CHECKING:
    from commtrace.benchmarks.judgement import PreflightVerdict


def preflight(
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that ranks have to start and meet.")] = 30,
    network_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which an operation of the network has failed.")
    ] = 20,
    backend: Annotated[
        CollectiveBackend | None, typer.Option(help="Default: NCCL where there are GPUs.", show_default=False)
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check a cluster before a job, with a verdict for each node; start it with torchrun or srun.

    Every rank starts and reaches every other, versions and environment differ nowhere, the interface is the right one,
    cores and GPUs are shared by nobody, devices are equally fast, and each two nodes have the bandwidth of the others.
    It ends with 0 if all is well and else with 1. A dead or stopped rank is named; nothing waits without an end. At
    SIGTERM or Ctrl-C it says what is known so far.
    """
    # Here, because it imports torch.
    from commtrace.benchmarks.preflight import PreflightLimits
    from commtrace.benchmarks.preflight import preflight as check

    def report(verdict: PreflightVerdict) -> None:
        _print(verdict, json_output=json_output)

    good = check(backend.value if backend else "", PreflightLimits(start_timeout, network_timeout), report)
    raise typer.Exit(0 if good else 1)


def _print(verdict: PreflightVerdict, *, json_output: bool) -> None:
    if json_output:
        sys.stdout.write(json.dumps(verdict.to_json(), allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    console = wide_console()
    console.print(f"[bold]{escape(verdict.sentence())}[/]")
    for node in verdict.nodes:
        own = [finding for finding in verdict.findings if node in finding.nodes]
        console.print(f"{escape(node)}: {'[red]BROKEN[/]' if own else 'ok'}")
        for finding in own:
            console.print(f"  {finding.check}: {escape(finding.text)}")
    for finding in verdict.findings:
        if not finding.nodes:
            console.print(f"{finding.check}: {escape(finding.text)}")
    console.print(f"Checked in {verdict.seconds:g} s: {', '.join(verdict.checked)}", style="dim")
    if verdict.broken:
        console.print(f"Next: leave out {escape(','.join(verdict.broken))}", style="dim")
    sys.stdout.flush()
