"""``commtrace bench overhead -- torchrun … train.py``: measures the cost of recording this very job."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

import commtrace._inject
from commtrace.analysis.comparison.overhead import OPTIMIZER, Measured, Overhead, RankStamps, Ratio, summarise_overhead
from commtrace.cli.commands.run import injected_environment
from commtrace.cli.output import duration, num_bytes, text_table
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.inputs import decode_json

_LINES_OF_OUTPUT: Final = 15


class BenchError(CommtraceError):
    """The measured command failed."""


def bench_overhead(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="The training command.", show_default=False)
    ],
    pairs: Annotated[int, typer.Option(min=1, help="Number of runs without commtrace, and of runs with it.")] = 5,
    json_output: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, in nanoseconds.")] = False,
) -> None:
    """Run a training command with and without commtrace in turns, and print what recording costs it.

    Steps are timed by a clock of its own, the same on both sides: after each step of an optimizer. The command should
    do the same work each time and take at least 20 steps. Nothing it records is kept.
    """
    progress = Console(stderr=True)
    measured = []
    with tempfile.TemporaryDirectory(prefix="commtrace-bench-") as scratch:
        for pair in range(pairs):
            sides: dict[bool, Measured] = {}
            # Each side goes first as often as the other: a machine that gets slower must not favour one of them.
            for records in (False, True) if pair % 2 == 0 else (True, False):
                name = "with" if records else "without"
                progress.print(f"pair {pair + 1} of {pairs}: {name} commtrace …", style="dim")
                folder = Path(scratch) / f"{pair}-{name}"
                folder.mkdir()
                sides[records] = _measure(command, folder, records=records)
            measured.append((sides[False], sides[True]))
    overhead = summarise_overhead(measured)
    if json_output:
        sys.stdout.write(json.dumps({"command": command, **overhead.to_json()}, allow_nan=False) + "\n")
        return
    _print_overhead(Console(soft_wrap=True), command, overhead)


def _measure(command: Sequence[str], folder: Path, *, records: bool) -> Measured:
    stamps, run = folder / "stamps", folder / "run"
    stamps.mkdir()
    start = time.monotonic_ns()
    cpu_ns = _execute(command, _environment(stamps, run, records=records), folder / "output")
    wall_ns = time.monotonic_ns() - start
    ranks = [_read_stamps(path) for path in sorted(stamps.glob("*.json"))]
    if not records:
        return Measured(wall_ns, cpu_ns, ranks)
    return _with_recording(Measured(wall_ns, cpu_ns, ranks), run)


def _environment(stamps: Path, run: Path, *, records: bool) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COMMTRACE_ENABLED"}
    environment = {**inherited, "_COMMTRACE_STAMPS": str(stamps)}
    if records:
        return injected_environment(environment, {"dir": str(run)})
    search_path = [str(Path(commtrace._inject.__file__).parent), os.environ.get("PYTHONPATH", "")]
    off = {"COMMTRACE_ENABLED": "0", "_COMMTRACE_ONLY_STAMPS": "1"}
    return {**environment, **off, "PYTHONPATH": os.pathsep.join(filter(None, search_path))}


def _execute(command: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """Return the CPU time of the command and its processes, ns; raise :class:`BenchError` if it fails."""
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        except OSError as error:
            raise BenchError(f"{command[0]}: {error.strerror}") from error
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        last = output.read_text(errors="replace").splitlines()[-_LINES_OF_OUTPUT:]
        raise BenchError("\n".join([f"the command ended with {process.returncode}. It said last:", *last]))
    return int((used.ru_utime + used.ru_stime) * 1e9)


def _read_stamps(path: Path) -> RankStamps:
    return decode_json(path.read_text(), RankStamps)


def _with_recording(measured: Measured, run_directory: Path) -> Measured:
    try:
        traces = load_run(run_directory).ranks.values()
    except RunNotFoundError as error:
        raise BenchError(f"nothing was recorded, so there is nothing to compare: {error}") from error
    dropped: dict[str, int] = {}
    for trace in traces:
        for kind, count in trace.dropped.items():
            dropped[kind] = dropped.get(kind, 0) + count
    return replace(
        measured,
        # A step of four ranks counts four times.
        steps=sum(int((trace.spans.kind == schema.STEP).sum()) for trace in traces),
        spans=sum(len(trace.spans) for trace in traces),
        num_bytes=sum(path.stat().st_size for path in run_directory.glob("*/*.arrows")),
        dropped=dropped,
    )


def _print_overhead(console: Console, command: Sequence[str], overhead: Overhead) -> None:
    console.print(f"[bold]Overhead of recording[/] {escape(shlex.join(command))}")
    ratio = overhead.step_time.ratio
    unit = "A step" if overhead.clock == OPTIMIZER else "The command"
    console.print(
        f"{unit} takes {ratio.median:.3f} times as long with recording "
        f"(95% interval {ratio.low:.3f} to {ratio.high:.3f}).\n"
    )
    table = text_table([""], ["without", "with", "ratio", "95% interval"])
    by_steps = overhead.clock == OPTIMIZER
    costs = {"step time" if by_steps else "wall time": overhead.step_time, "CPU time of the job": overhead.job_cpu}
    if overhead.step_cpu:
        costs["CPU time per step and rank"] = overhead.step_cpu
    for name, cost in costs.items():
        table.add_row(name, duration(cost.without_ns), duration(cost.recorded_ns), *_ratio(cost.ratio))
    if overhead.noise:
        table.add_row("noise: without / without", "", "", *_ratio(overhead.noise))
    console.print(table)
    memory, recorded = overhead.memory_bytes, overhead.recorded
    if memory:
        console.print(f"Memory: {_signed(memory.median)} per rank at its peak (median; most {_signed(memory.max)})")
    if recorded.bytes_per_step is not None and recorded.bytes_per_span is not None:
        console.print(
            f"Files: {num_bytes(round(recorded.bytes_per_step))} per step and rank, "
            f"{recorded.bytes_per_span:.1f} bytes per span, {recorded.spans_per_step:.0f} spans per step"
        )
    dropped = ", ".join(f"{count} {kind}" for kind, count in recorded.dropped.items())
    console.print(f"Dropped: {dropped or 'nothing'}")
    console.print(
        f"Medians over {overhead.pairs} pairs of runs that took turns. "
        + ("" if by_steps else "No process stepped a torch optimizer twice and ended cleanly: whole runs were timed. ")
        + "The job's CPU time includes the start of its processes.",
        style="dim",
    )


def _ratio(ratio: Ratio) -> tuple[str, str]:
    return f"{ratio.median:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}"


def _signed(count: int) -> str:
    return f"{'−' if count < 0 else '+'}{num_bytes(abs(count))}"
