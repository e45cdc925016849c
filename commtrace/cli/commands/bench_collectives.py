"""``torchrun … -m commtrace bench collectives``: the bandwidth of the network, before a job needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.communication.baseline import Measurement, NetworkBaseline
from commtrace.analysis.communication.links import SlowTraffic, find_slow_links
from commtrace.analysis.communication.rates import parse_rate
from commtrace.benchmarks.expectations import ALL_GROUPS, USUAL, ExpectedShare, Rate, decisive, shares
from commtrace.benchmarks.groups import WORDS, choose_groups
from commtrace.benchmarks.job import BenchmarkJob, join
from commtrace.benchmarks.operations import OPERATIONS
from commtrace.cli.arguments import JsonOption, given_bytes
from commtrace.cli.commands.bandwidth import slow_links_text
from commtrace.cli.output import (
    bandwidth,
    binary_bytes,
    duration,
    gigabytes_per_second,
    share,
    text_table,
    wide_console,
)
from commtrace.errors import ConfigurationError
from commtrace.findings.formatting import format_ranks
from commtrace.trace.json_values import to_json

if TYPE_CHECKING:
    from commtrace.benchmarks.collectives import Results

_LARGEST: Final = {"nccl": 1 << 34, "gloo": 1 << 28}

_FILLS_A_LINK: Final = 64 << 20
"""Bytes below which even a healthy link may show less than it carries."""


class CollectiveBackend(str, Enum):
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
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE",
            help="Print the share of this rate that is reached; the exit code is 1 below 75%. A rate is what one rank "
            "can send in one direction: over its NIC between nodes (400Gbit/s), over NVLink within one (450GB/s). "
            "node=450GB/s is that of --group node. Repeatable.",
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations that are not timed.")] = 5,
    iterations: Annotated[int, typer.Option(min=1, help="Timed iterations, each behind a barrier.")] = 20,
    backend: Annotated[
        CollectiveBackend | None, typer.Option(help="Default: NCCL where there are GPUs.", show_default=False)
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
    chosen, words = _operations(operations), group or ["world"]
    rates = _rates(expect or [], words)
    smallest, largest = (
        given_bytes("--min-bytes", min_bytes),
        given_bytes("--max-bytes", max_bytes) if max_bytes else None,
    )
    with join(backend.value if backend else "", timeout) as job:
        # Here, because it imports torch.
        from commtrace.benchmarks.collectives import Results, Settings, environment, measure_collectives

        _check_folders(job, {"--output": output, "--plot": plot})
        largest = largest or max(_LARGEST[job.backend], smallest)
        if largest < smallest:
            raise ConfigurationError(f"--max-bytes {max_bytes} is below --min-bytes {min_bytes}: exchange them")
        rounds = [each for word in words for each in choose_groups(word, job.nodes)]
        results = Results(environment(job))
        progress = Console(stderr=True, quiet=job.rank != 0, highlight=False)

        def say_all() -> None:
            if job.rank == 0:
                of_expected = shares(results.baseline(), rates, job.nodes)
                _report(results, of_expected, json_output=json_output, output=output, plot=plot)

        job.stop.last_words = say_all
        sizes = tuple(smallest << doubled for doubled in range((largest // smallest).bit_length()))
        settings = Settings(chosen, sizes, warmup, iterations, dtype.value if dtype else "")
        try:
            measure_collectives(
                job,
                rounds,
                settings,
                results,
                lambda measurement: progress.print(escape(_line(measurement)), style="dim"),
            )
        finally:
            say_all()
        lowest = decisive(shares(results.baseline(), rates, job.nodes))
        job.await_rank_0()
    raise typer.Exit(130 if results.is_stopped else 1 if lowest is not None and not lowest.is_enough else 0)


def _check_folders(job: BenchmarkJob, files: Mapping[str, Path | None]) -> None:
    """Raise ConfigurationError on all ranks if rank 0 could not write a file later: measuring takes minutes."""
    missing = [
        f"{option} {path}: the folder {path.parent} does not exist; make it first"
        for option, path in files.items()
        if job.rank == 0 and path is not None and not path.absolute().parent.is_dir()
    ]
    of_rank_0 = job.gather(missing)[0]
    if of_rank_0:
        raise ConfigurationError(of_rank_0[0])


def _operations(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text else OPERATIONS
    unknown = [name for name in chosen if name not in OPERATIONS]
    if unknown:
        raise ConfigurationError(f"--operations {unknown[0]}: write some of {', '.join(OPERATIONS)}")
    return chosen


def _rates(texts: Sequence[str], words: Sequence[str]) -> dict[str, Rate]:
    """Return the rates of ``--expect`` by the word of a group."""
    rates = {}
    for text in texts:
        word, _, rate = text.rpartition("=")
        try:
            bytes_per_second = parse_rate(rate)
        except ValueError:
            raise ConfigurationError(
                f"--expect {text}: write a rate, such as 400Gbit/s or 50GB/s, or that of a group, such as node=450GB/s"
            ) from None
        if word and word not in words:
            raise ConfigurationError(f"--expect {text}: this group is not measured; add --group {word}")
        rates[word or ALL_GROUPS] = Rate(rate, bytes_per_second / 1e9)
    return rates


def _report(
    results: Results, of_expected: Sequence[ExpectedShare], *, json_output: bool, output: Path | None, plot: Path | None
) -> None:
    baseline = results.baseline()
    slow = find_slow_links(baseline.links())
    lowest = decisive(of_expected)
    verdict = _verdict(results, slow, lowest)
    written = []
    if output is not None and baseline.measurements:
        baseline.save(output)
        written.append(output)
    if plot is not None and baseline.measurements:
        from commtrace.python.plots.collectives import draw_collectives

        draw_collectives(baseline).save(plot)
        written.append(plot)
    if json_output:
        described = {
            "verdict": verdict,
            "reached": None if lowest is None else lowest.is_enough,
            "shares": to_json(of_expected),
            "notes": results.notes,
            "slow_links": to_json(slow),
            **baseline.to_json(),
        }
        sys.stdout.write(json.dumps(described, allow_nan=False) + "\n")
    else:
        _print(wide_console(), verdict, of_expected, results, baseline)
        for path in written:
            typer.echo(f"Written: {path}")
        if output in written:
            typer.echo(f"Next: commtrace summary RUN --baseline {output}")
    sys.stdout.flush()


def _verdict(results: Results, slow: SlowTraffic | None, lowest: ExpectedShare | None) -> str:
    measurements = results.measurements
    stopped = "Stopped early. " if results.is_stopped else ""
    if not measurements:
        return f"{stopped}Nothing was measured."
    expected = "" if lowest is None else f"{_share_text(lowest, results.made['backend'])} "
    if slow is not None:
        return stopped + expected + slow_links_text(slow)
    compared = {measurement.nodes for measurement in measurements if len(measurement.nodes) == 2}
    no_slow_pair = "No slow pair of nodes was found. " if len(compared) > 1 else ""
    if expected:
        return f"{stopped}{expected}{no_slow_pair}".rstrip()
    best = max(measurements, key=lambda measurement: measurement.busbw_gbps.mean)
    return (
        f"{stopped}{no_slow_pair}Highest busbw: {_rate(best.busbw_gbps.mean)}, {best.operation} of "
        f"{binary_bytes(best.num_bytes)} on {_members(best)}."
    )


def _share_text(reached: ExpectedShare, backend: str) -> str:
    """Return ``all_reduce on ranks 0–15 of a and b reaches 328 GB/s at 1.00 GiB: 82 % of the …``"""
    reaches = "reaches" if reached.is_enough else "reaches only"
    look = "." if reached.is_enough else f": {_advice(reached.best, backend)}."
    return (
        f"{reached.best.operation} on {_members(reached.best)} {reaches} {_rate(reached.busbw_gbps)} at "
        f"{binary_bytes(reached.best.num_bytes)}, {100 * reached.ratio:.0f}% of the {_rate(reached.expected_gbps)} "
        f"that {reached.rate.text} per rank allow. Expect {USUAL}{look}"
    )


def _advice(measurement: Measurement, backend: str) -> str:
    if measurement.num_bytes < _FILLS_A_LINK:
        return "measure larger tensors first, with --max-bytes 1G"
    if backend == "gloo":
        return "look at the CPUs first, through which gloo sends; NCCL measures the network of GPUs"
    if measurement.inter_node:
        return "look at the interfaces that NCCL_DEBUG=INFO names, and at single nodes with --group pairs"
    return "look at nvidia-smi topo -m, which says whether NVLink or PCIe joins the GPUs"


def _rate(gbps: float) -> str:
    return bandwidth(gbps)


def _members(measurement: Measurement) -> str:
    where = f"{len(measurement.nodes)} nodes" if len(measurement.nodes) > 2 else " and ".join(measurement.nodes)
    return f"{format_ranks(measurement.ranks)} of {where}"


def _line(row: Measurement) -> str:
    return (
        f"{row.operation} {binary_bytes(row.num_bytes)} on {_members(row)}: busbw {_rate(row.busbw_gbps.mean)}, "
        f"{duration(row.duration_ns.mean)}"
    )


def _print(
    console: Console, verdict: str, of_expected: Sequence[ExpectedShare], results: Results, baseline: NetworkBaseline
) -> None:
    console.print(f"[bold]{escape(verdict)}[/]")
    console.print(escape(" · ".join(f"{name} {value}" for name, value in results.made.items())), style="dim")
    if of_expected:
        console.print("\n[bold]What is reached of the expected busbw[/]")
        console.print(_share_table(of_expected))
    for of_group in baseline.by_group():
        first = of_group[0]
        console.print(
            f"\n[bold]{first.operation}[/] in group {escape(f'{first.group}: {_members(first)}, {first.dtype}')}"
        )
        console.print(_table(of_group))
    if baseline.measurements:
        console.print(
            "\nbusbw is the bytes on the busiest link of a ring: with other algorithms it may exceed the link."
            + ("" if of_expected else " --expect RATE prints the share of what the link should carry."),
            style="dim",
        )
    for note in results.notes:
        console.print(f"[yellow]![/] {escape(note)}")


def _share_table(of_expected: Sequence[ExpectedShare]) -> Table:
    table = text_table(["operation", "group", "ranks"], ["payload", "busbw GB/s", "expected", "share"])
    for expected in of_expected:
        words = (expected.best.operation, expected.best.group, _members(expected.best))
        table.add_row(
            *map(escape, words),
            binary_bytes(expected.best.num_bytes),
            gigabytes_per_second(expected.busbw_gbps),
            gigabytes_per_second(expected.expected_gbps),
            share(expected.ratio),
        )
    return table


def _table(rows: Sequence[Measurement]) -> Table:
    table = text_table([], ["payload", "busbw GB/s", "min", "max", "algbw GB/s", "min", "max", "time", "n"])
    for row in rows:
        spreads = (row.busbw_gbps, row.algbw_gbps)
        table.add_row(
            binary_bytes(row.num_bytes),
            *(gigabytes_per_second(gbps) for each in spreads for gbps in (each.mean, each.min, each.max)),
            duration(row.duration_ns.mean),
            str(row.iterations),
        )
    return table
