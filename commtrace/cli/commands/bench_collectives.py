"""``torchrun … -m commtrace bench collectives``: the bandwidth of the network, before a job needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.communication.baseline import Baseline, Measurement
from commtrace.analysis.communication.links import SlowLinks, find_slow_links
from commtrace.analysis.formatting import format_ranks
from commtrace.benchmarks.groups import WORDS, choose_groups
from commtrace.benchmarks.job import join
from commtrace.benchmarks.operations import OPERATIONS
from commtrace.cli.arguments import JsonOption, given_bytes
from commtrace.cli.commands.bandwidth import slow_links_text
from commtrace.cli.output import bandwidth, binary_bytes, duration, gigabytes_per_second, text_table, wide_console
from commtrace.errors import ConfigurationError
from commtrace.trace.json_values import to_json

if TYPE_CHECKING:
    from commtrace.benchmarks.collectives import Results

_LARGEST: Final = {"nccl": 1 << 34, "gloo": 1 << 28}


class Backend(str, Enum):
    """A backend of torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"


class Dtype(str, Enum):
    """An element of the tensors."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def bench_collectives(
    operations: Annotated[
        str, typer.Option(metavar="A,B", help=f"Of {', '.join(OPERATIONS)}. Default: all.", show_default=False)
    ] = "",
    min_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="The smallest tensor: 4M and 4MiB are 2²² bytes, 4MB are 4·10⁶.")
    ] = "32K",
    max_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="The largest: sizes double until it. Default: 16G with NCCL, 256M with gloo.",
            show_default=False,
        ),
    ] = "",
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHICH",
            help=f"{', '.join(WORDS)} or ranks such as 0-3,8; may be repeated. node: the ranks of each node; "
            "across: ranks at the same place of all nodes; pairs: each two nodes, to find a slow one. Default: world.",
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations that are not timed.")] = 5,
    iterations: Annotated[int, typer.Option(min=1, help="Timed iterations, each behind a barrier.")] = 20,
    backend: Annotated[
        Backend | None, typer.Option(help="Default: NCCL where there are GPUs.", show_default=False)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default: bfloat16 on GPUs, float32 on CPUs.", show_default=False)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a rank that does not answer failed.")
    ] = 300,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a baseline file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw busbw by size as SVG, PNG or PDF.", show_default=False)
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure the bandwidth of collectives by operation, size and group; start it with torchrun.

    Groups without a common rank are measured at the same time. A call is over when its slowest member is; the mean and
    the extremes are over the timed iterations. Ctrl-C ends it, and prints what was measured until then. With -o,
    `commtrace summary --baseline` shows a run's bandwidth as a share of it.
    """
    chosen = _operations(operations)
    smallest, largest = (
        given_bytes("--min-bytes", min_bytes),
        given_bytes("--max-bytes", max_bytes) if max_bytes else None,
    )
    with join(backend.value if backend else "", timeout) as job:
        # Here, because it imports torch.
        from commtrace.benchmarks.collectives import Results, Settings, environment, measure_collectives

        largest = largest or max(_LARGEST[job.backend], smallest)
        if largest < smallest:
            raise ConfigurationError(f"--max-bytes {max_bytes} is below --min-bytes {min_bytes}: exchange them")
        rounds = [each for word in group or ["world"] for each in choose_groups(word, job.nodes)]
        results = Results(environment(job))
        progress = Console(stderr=True, quiet=job.rank != 0, highlight=False)

        def say_all() -> None:
            if job.rank == 0:
                _report(results, json_output=json_output, output=output, plot=plot)

        job.stop.last_words = say_all
        sizes = tuple(smallest << doubled for doubled in range((largest // smallest).bit_length()))
        settings = Settings(chosen, sizes, warmup, iterations, dtype.value if dtype else "")
        try:
            measure_collectives(
                job, rounds, settings, results, lambda one: progress.print(escape(_line(one)), style="dim")
            )
        finally:
            say_all()
    raise typer.Exit(130 if results.is_stopped else 0)


def _operations(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text else OPERATIONS
    unknown = [name for name in chosen if name not in OPERATIONS]
    if unknown:
        raise ConfigurationError(f"--operations {unknown[0]}: write some of {', '.join(OPERATIONS)}")
    return chosen


def _report(results: Results, *, json_output: bool, output: Path | None, plot: Path | None) -> None:
    baseline = results.baseline()
    slow = find_slow_links(baseline.links())
    verdict = _verdict(baseline.measurements, slow, is_stopped=results.is_stopped)
    written = []
    if output is not None and baseline.measurements:
        baseline.save(output)
        written.append(output)
    if plot is not None and baseline.measurements:
        from commtrace.plots.collectives import draw_collectives

        draw_collectives(baseline).save(plot)
        written.append(plot)
    if json_output:
        described = {"verdict": verdict, "notes": results.notes, "slow_links": to_json(slow), **baseline.to_json()}
        sys.stdout.write(json.dumps(described, allow_nan=False) + "\n")
    else:
        _print(wide_console(), verdict, results, baseline)
        for path in written:
            typer.echo(f"Written: {path}")
        if output in written:
            typer.echo(f"Next: commtrace summary RUN --baseline {output}")
    sys.stdout.flush()


def _verdict(measurements: Sequence[Measurement], slow: SlowLinks | None, *, is_stopped: bool) -> str:
    stopped = "Stopped early. " if is_stopped else ""
    if not measurements:
        return f"{stopped}Nothing was measured."
    if slow is not None:
        return stopped + slow_links_text(slow)
    best = max(measurements, key=lambda one: one.busbw_gbps.mean)
    compared = {one.nodes for one in measurements if len(one.nodes) == 2}
    found = "No slow pair of nodes was found. " if len(compared) > 1 else ""
    return (
        f"{stopped}{found}Highest busbw: {_rate(best.busbw_gbps.mean)}, {best.operation} of "
        f"{binary_bytes(best.num_bytes)} on {_members(best)}."
    )


def _rate(gbps: float) -> str:
    return f"{bandwidth(gbps)} GB/s" if gbps >= 1 else bandwidth(gbps)


def _members(one: Measurement) -> str:
    where = f"{len(one.nodes)} nodes" if len(one.nodes) > 2 else " and ".join(one.nodes)
    return f"{format_ranks(one.ranks)} of {where}"


def _line(one: Measurement) -> str:
    return (
        f"{one.operation} {binary_bytes(one.num_bytes)} on {_members(one)}: busbw {_rate(one.busbw_gbps.mean)}, "
        f"{duration(one.duration_ns.mean)}"
    )


def _print(console: Console, verdict: str, results: Results, baseline: Baseline) -> None:
    console.print(f"[bold]{escape(verdict)}[/]")
    console.print(escape(" · ".join(f"{name} {value}" for name, value in results.made.items())), style="dim")
    for own in baseline.by_group():
        one = own[0]
        console.print(f"\n[bold]{one.operation}[/] in group {escape(f'{one.group}: {_members(one)}, {one.dtype}')}")
        console.print(_table(own))
    if baseline.measurements:
        console.print(
            "\nbusbw is the bytes on the busiest link of a ring: with other algorithms it may exceed the link.",
            style="dim",
        )
    for note in results.notes:
        console.print(f"[yellow]![/] {escape(note)}")


def _table(rows: Sequence[Measurement]) -> Table:
    table = text_table([], ["payload", "busbw GB/s", "min", "max", "algbw GB/s", "min", "max", "time", "n"])
    for one in rows:
        table.add_row(
            binary_bytes(one.num_bytes),
            *map(gigabytes_per_second, one.busbw_gbps),
            *map(gigabytes_per_second, one.algbw_gbps),
            duration(one.duration_ns.mean),
            str(one.iterations),
        )
    return table
