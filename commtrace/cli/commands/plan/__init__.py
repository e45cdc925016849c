"""``commtrace plan``: memory and communication of a training job before it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commtrace.cli.arguments import JsonOption, StepsOption, given_memory_gib
from commtrace.cli.commands.plan.comparison import print_comparison
from commtrace.cli.commands.plan.tables import GIB, print_compared, print_plan, verdict
from commtrace.cli.commands.plan.times import plan_times, print_times
from commtrace.cli.output import wide_console
from commtrace.errors import ConfigurationError
from commtrace.planning.alternatives import Alternative, alternatives, combinations
from commtrace.planning.megatron_arguments import parse_megatron_command
from commtrace.planning.memory import leaves_margin
from commtrace.planning.plan import Plan, plan_job
from commtrace.planning.plan_file import read_plan_file
from commtrace.planning.recorded_job import recorded_job
from commtrace.trace.files.reader import load_run
from commtrace.trace.json_values import to_json

if TYPE_CHECKING:
    from commtrace.interchange.megatron_issue_488 import ComparedNumber

_FILES: Final = (".json", ".yaml", ".yml")


class Known(str, Enum):
    """A job whose estimate by another tool is known."""

    MEGATRON_ISSUE_488 = "megatron-issue-488"


def plan(
    job: Annotated[
        list[str] | None,
        typer.Argument(
            help="A YAML or JSON file, a recorded run, or after -- the command of a Megatron-LM job.",
            metavar="FILE | RUN | -- COMMAND…",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job. Default: those that torchrun's arguments give.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="GIB", help="Memory of a GPU, such as 80 or 80GB: print whether the job fits into it."),
    ] = None,
    like: Annotated[
        Known | None, typer.Option(help="Plan the sample of another tool instead, with its numbers next to ours.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Print what each rank of this run sent and held next to the plan. The job may be left out.",
        ),
    ] = None,
    steps: StepsOption = "",
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=RATE",
            help="Print the time of a role at this bus bandwidth: tp=300GB/s, all=200Gbit/s. Repeatable.",
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="10¹² FLOPs per second that a GPU achieves: print the bandwidths that compute would hide."),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Take bandwidths and compute from a recorded run of this job.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take times of communication from this file of `commtrace bench collectives`, by size."
        ),
    ] = None,
    simai: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the job as a workload of SimAI, as AICB generates it."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Print what a training job will hold and send, before it runs.

    Memory of each GPU by pipeline stage, the communication of Megatron-core by role, and the ideal bubble. All numbers
    follow from formulas; nothing is started or measured. With --memory it ends with 1 if the job will not fit; with
    --against if the run sent something else; its peak memory stands beside the plan.
    """
    memory_gib = None if memory is None else given_memory_gib(memory)
    if against is not None:
        others = {
            "--like": like, "--memory": memory, "--simai": simai, "--bandwidth": bandwidth, "--tflops": tflops,
            "--measured": measured, "--baseline": baseline,
        }  # fmt: skip
        given = [name for name, value in others.items() if value]
        if given:
            raise ConfigurationError(f"--against compares with a run: leave out {', '.join(given)}")
        print_comparison(against, _planned(job, gpus)[0] if job else None, steps, json_output=json_output)
    if steps:
        raise ConfigurationError("--steps belongs to --against RUN")
    if tflops is not None and tflops <= 0:
        raise ConfigurationError(f"--tflops is {tflops:g}: give what a GPU achieves, such as 400")
    if (like is None) == (not job) or (like is not None and gpus is not None):
        raise ConfigurationError(
            "give either a file, a run, a command after --, or --like, which needs nothing else. For example: "
            "commtrace plan --memory 80 -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 …"
        )
    compared: tuple[ComparedNumber, ...] = ()
    if job:
        planned, ignored = _planned(job, gpus)
    else:
        from commtrace.interchange.megatron_issue_488 import compare, sample_plan

        planned, ignored = sample_plan(), ()
        compared = compare(planned)
    changes = alternatives(planned)
    together = () if memory_gib is None else _together(planned, changes, memory_gib * GIB)
    times = plan_times(planned, bandwidth or (), tflops, measured, baseline)
    fits = None if memory_gib is None else planned.fullest.memory.peak_bytes <= memory_gib * GIB
    if json_output:
        head = {"verdict": verdict(planned, memory_gib), "fits": fits}
        rest = {
            "alternatives": to_json(changes),
            "combinations": to_json(together),
            "ignored_arguments": to_json(ignored),
            "compared": to_json(compared),
            "compute_seconds": None if times is None else times.compute_seconds,
            "times": [] if times is None else to_json(times.roles),
            "iteration_time": None if times is None else to_json(times.iteration),
            "pipelined_time": None if times is None else to_json(times.pipelined),
            "measured_other_sizes": [] if times is None else to_json(times.other_sizes),
            "times_not_measured": [] if times is None else to_json(times.not_measured),
        }
        typer.echo(json.dumps({**head, **planned.to_json(), **rest}, indent=2))
    else:
        console = wide_console()
        print_plan(console, planned, ignored, changes, together, memory_gib)
        if times is not None:
            print_times(console, times)
        if compared:
            print_compared(console, compared)
    if simai is not None:
        _write_simai(planned, simai)
    raise typer.Exit(1 if fits is False else 0)


def _together(planned: Plan, changes: Sequence[Alternative], memory_bytes: float) -> tuple[Alternative, ...]:
    """Return changes that together leave a margin, if neither the job nor a single change does."""
    peaks = (planned.fullest.memory.peak_bytes, *(alternative.peak_bytes for alternative in changes))
    if not changes or any(leaves_margin(peak_bytes, memory_bytes) for peak_bytes in peaks):
        return ()
    return combinations(planned, memory_bytes)


def _write_simai(planned: Plan, path: Path) -> None:
    from commtrace.interchange.simulators.simai_of_plan import differences, workload_of_plan  # most plans need no file

    workload = workload_of_plan(planned)
    workload.write(path)
    typer.echo(f"{path}: {len(workload.layers)} rows for SimAI, compute not measured", err=True)
    for difference in differences(planned):
        typer.echo(f"note: {difference}", err=True)


def _planned(job: Sequence[str], gpus: int | None) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan, and the arguments of the job that were not used."""
    if len(job) == 1 and Path(job[0]).suffix in _FILES:
        if gpus is not None:
            raise ConfigurationError("--gpus belongs to a command: in a file, set dp of the layout")
        return plan_job(read_plan_file(Path(job[0]))), ()
    if len(job) == 1 and Path(job[0]).is_dir():
        if gpus is not None:
            raise ConfigurationError("--gpus belongs to a command: a run has recorded its ranks")
        return plan_job(recorded_job(load_run(job[0]))), ()
    if not any(word.endswith(".py") for word in job) and (len(job) == 1 or _is_file_or_run(job[0])):
        if len(job) > 1:
            raise ConfigurationError(f"one file or run is planned at a time, not {len(job)}: {', '.join(job)}")
        raise ConfigurationError(
            f"{job[0]}: no such run or file. Give the directory of a run, a file that ends with "
            f"{', '.join(_FILES)}, or after -- a command"
        )
    megatron = parse_megatron_command(job, gpus)
    return plan_job(megatron), megatron.ignored


def _is_file_or_run(word: str) -> bool:
    return Path(word).suffix in _FILES or Path(word).is_dir()
