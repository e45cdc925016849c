"""``torchrun … -m commtrace bench replay RUN``: the communication of a run again, without its training."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from commtrace.analysis.chain import analyse
from commtrace.benchmarks.job import join
from commtrace.benchmarks.replay_program import Programs, programs_of
from commtrace.cli.arguments import JsonOption, StepsOption
from commtrace.cli.output import UNKNOWN, duration, num_bytes, text_table, wide_console
from commtrace.errors import CommtraceError, ConfigurationError

if TYPE_CHECKING:
    from commtrace.benchmarks.replay import ReplayComparison


class ReplayBackend(str, Enum):
    """A backend of torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"


def bench_replay(
    run: Annotated[Path, typer.Argument(help="The directory of the run.", show_default=False)],
    steps: StepsOption = "",
    most_steps: Annotated[int, typer.Option(min=1, help="Replay at most so many of the steps that count.")] = 10,
    backend: Annotated[
        ReplayBackend | None, typer.Option(help="Default: NCCL where there are GPUs.", show_default=False)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a rank that does not answer failed.")
    ] = 300,
    json_output: JsonOption = False,
) -> None:
    """Issue the communication of a recorded run again, and compare; start it with torchrun, on as many ranks.

    Every rank issues the same calls in the same groups and the same order, with the same bytes, and waits for them
    where it waited; what it did between is slept. Only rank 0 reads the run.
    """
    with join(backend.value if backend else "", timeout) as job:
        # Here, because it imports torch.
        from commtrace.benchmarks.replay import replay, share

        own = (_read(run, steps, most_steps, job.world_size),) if job.rank == 0 else None
        (programs,) = share(job, own)
        if isinstance(programs, str):  # all ranks end, so that none waits for rank 0
            raise ConfigurationError(programs)
        comparison = replay(job, programs)
        if comparison is not None:
            _report(comparison, json_output=json_output)


def _read(run: Path, steps: str, most_steps: int, world_size: int) -> Programs | str:
    """Return the programs, or why there are none."""
    try:
        programs = programs_of(analyse(run, steps or None), most_steps)
    except CommtraceError as error:
        return str(error)
    if len(programs.ranks) != world_size:
        return f"the run has {len(programs.ranks)} ranks, and this job {world_size}: start as many as the run has"
    return programs


def _report(comparison: ReplayComparison, *, json_output: bool) -> None:
    verdict = _verdict(comparison)
    if json_output:
        sys.stdout.write(json.dumps({"verdict": verdict, **comparison.to_json()}, allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    console = wide_console()
    console.print(f"[bold]{escape(verdict)}[/]\n")
    _print_rows(console, comparison)
    for note in comparison.notes:
        console.print(f"[yellow]![/] {escape(note)}")


def _verdict(comparison: ReplayComparison) -> str:
    return (
        f"A step takes {duration(comparison.replayed_step_ns)} in the replay and took "
        f"{duration(comparison.recorded_step_ns)}: {comparison.ratio:.2f} times as long."
    )


def _print_rows(console: Console, comparison: ReplayComparison) -> None:
    table = text_table(["role", "operation"], ["calls", "bytes", "recorded", "replayed", "ratio"])
    for row in comparison.rows:
        ratio = f"{row.replayed_ns / row.recorded_ns:.2f}" if row.recorded_ns else UNKNOWN
        times = (duration(row.recorded_ns), duration(row.replayed_ns), ratio)
        table.add_row(row.role, row.operation, str(row.calls), num_bytes(row.num_bytes), *times)
    console.print(table)
    console.print(
        f"\nTime that ranks stood still for a call, over all ranks and {comparison.steps} "
        f"step{'s' * (comparison.steps != 1)}.",
        style="dim",
    )
