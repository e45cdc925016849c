"""``commtrace plan``: memory and communication of a training job before it runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from commtrace.cli.arguments import JsonOption, StepsOption, given_memory_gib
from commtrace.cli.output import binary_bytes, num_bytes, share, wide_console
from commtrace.cli.plan_against import print_beside
from commtrace.cli.plan_times import plan_times, print_times
from commtrace.errors import ConfigurationError
from commtrace.planning.communication import Traffic
from commtrace.planning.megatron_arguments import parse_megatron_command
from commtrace.planning.megatron_issue_488 import Compared, compare, sample_plan
from commtrace.planning.plan import Alternative, Plan, StagePlan, alternatives, make_plan
from commtrace.planning.plan_file import read_plan_file
from commtrace.planning.recorded_job import recorded_job
from commtrace.trace.files.reader import load_run
from commtrace.trace.json_values import to_json

_FILES: Final = (".json", ".yaml", ".yml")
_GIB: Final = 1 << 30


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
        Known | None, typer.Option(help="Plan the sample of another tool instead, with its numbers beside.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Print what each rank of this run sent and held beside the plan. The job may be left out.",
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
        if like is not None or memory is not None or simai is not None:
            raise ConfigurationError("--against compares with a run: leave out --like, --memory and --simai")
        print_beside(against, _planned(job, gpus)[0] if job else None, steps, json_output=json_output)
    if steps:
        raise ConfigurationError("--steps belongs to --against RUN")
    if tflops is not None and tflops <= 0:
        raise ConfigurationError(f"--tflops is {tflops:g}: give what a GPU achieves, such as 400")
    if (like is None) == (not job) or (like is not None and gpus is not None):
        raise ConfigurationError("give either a file, a run, a command after --, or --like, which needs nothing else")
    planned, ignored = _planned(job, gpus) if job else (sample_plan(), ())
    compared = compare(planned) if like is not None else ()
    found = alternatives(planned)
    times = plan_times(planned, bandwidth or (), tflops, measured, baseline)
    fits = None if memory_gib is None else planned.fullest.memory.peak_bytes <= memory_gib * _GIB
    if json_output:
        head = {"verdict": _verdict(planned, memory_gib), "fits": fits}
        rest = {
            "alternatives": to_json(found),
            "ignored_arguments": to_json(ignored),
            "compared": to_json(compared),
            "compute_seconds": None if times is None else times.compute_seconds,
            "times": [] if times is None else to_json(times.roles),
            "times_not_measured": [] if times is None else to_json(times.not_measured),
        }
        typer.echo(json.dumps({**head, **planned.to_json(), **rest}, indent=2))
    else:
        console = wide_console()
        _print_plan(console, planned, ignored, found, memory_gib)
        if times is not None:
            print_times(console, times)
        if compared:
            _print_compared(console, compared)
    if simai is not None:
        _write_simai(planned, simai)
    raise typer.Exit(1 if fits is False else 0)


def _write_simai(planned: Plan, path: Path) -> None:
    from commtrace.exporters.simulators.simai_of_plan import differences, workload_of_plan  # most plans need no file

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
        return make_plan(*read_plan_file(Path(job[0]))), ()
    if len(job) == 1 and Path(job[0]).is_dir():
        if gpus is not None:
            raise ConfigurationError("--gpus belongs to a command: a run has recorded its ranks")
        return make_plan(*recorded_job(load_run(job[0]))), ()
    megatron = parse_megatron_command(job, gpus)
    return make_plan(megatron.model, megatron.layout, megatron.notes), megatron.ignored


def _verdict(planned: Plan, memory: float | None) -> str:
    fullest = planned.fullest
    of_stage = f" on stage {fullest.stage}" if planned.layout.pp > 1 else ""
    need = f"a GPU{of_stage} needs {binary_bytes(fullest.memory.peak_bytes)}"
    if memory is None:
        return f"At its peak {need}."
    fits = fullest.memory.peak_bytes <= memory * _GIB
    return f"{'Fits' if fits else 'Does not fit'}: {need} of {memory:g} GiB at its peak."


def _print_plan(
    console: Console, planned: Plan, ignored: Sequence[str], found: Sequence[Alternative], memory: float | None
) -> None:
    layout = planned.layout
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "chunks")}
    divided = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "not divided"
    console.print(
        f"{planned.parameters:,} parameters on {layout.world_size} GPUs ({divided}), "
        f"{layout.microbatches} microbatches of {layout.microbatch} × {planned.model.sequence:,} tokens."
    )
    console.print(_verdict(planned, memory), style="bold", markup=False)
    console.print("Not in it: the CUDA context, NCCL's buffers, workspaces and fragmentation.")
    for note in planned.notes:
        console.print(f"! {note}", markup=False)
    if ignored:
        console.print(f"Ignored: {' '.join(ignored)}", markup=False)
    _print_memory(console, planned.stages)
    _print_activations(console, planned.stages)
    _print_communication(console, planned)
    if layout.pp > 1:
        console.print(
            f"\nIdeal pipeline bubble: {share(planned.bubble.fraction_of_step)} of the step, "
            f"{share(planned.bubble.ratio_to_work)} of the work."
        )
    if found:
        _print_alternatives(console, found, memory)


def _table(*columns: str, left: Sequence[str] = (), wrapped: str = "") -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_left = column in left or column == wrapped
        table.add_column(column, justify="left" if is_left else "right", no_wrap=column != wrapped)
    return table


def _print_memory(console: Console, stages: Sequence[StagePlan]) -> None:
    table = _table("stage", "ranks", "layers", "parameters", "gradients", "optimizer", "activations", "peak")
    for stage in stages:
        memory = stage.memory
        held = (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes)
        table.add_row(
            str(stage.stage),
            _numbers("", stage.ranks[0], stage.ranks[-1]),
            str(sum(map(len, stage.layers))),
            *map(binary_bytes, held),
            binary_bytes(memory.peak_bytes),
        )
    console.print("\nMemory of each GPU, by stage")
    console.print(table)


def _print_activations(console: Console, stages: Sequence[StagePlan]) -> None:
    parts = list(dict.fromkeys(part for stage in stages for part, _ in stage.memory.activations))
    table = _table("stage", *parts)
    for stage in stages:
        held = dict(stage.memory.activations)
        table.add_row(str(stage.stage), *(binary_bytes(held[part]) if part in held else "" for part in parts))
    console.print("\nActivations of each GPU at the peak, by part of the model")
    console.print(table)


def _print_communication(console: Console, planned: Plan) -> None:
    if not any(stage.traffic for stage in planned.stages):
        return
    for _, alike in groupby(planned.stages, key=lambda stage: stage.traffic):
        _print_traffic(console, list(alike), planned.layout.pp)
    table = _table("role", "calls", "tensors", "on the wire", left=["role"])
    for total in planned.role_totals():
        table.add_row(total.role, f"{total.calls:,}", num_bytes(total.tensor_bytes), num_bytes(total.wire_bytes))
    console.print("\nCommunication of all GPUs in one iteration")
    console.print(table)
    table = _table("role", "groups", "ranks", "the first one", left=["role", "the first one"])
    for role, groups in planned.groups().items():
        table.add_row(role, str(len(groups)), str(len(groups[0])), _members(groups[0]))
    console.print("\nProcess groups")
    console.print(table)


def _numbers(what: str, first: int, last: int) -> str:
    """Return ``stage 3`` or ``stages 1–2``; without a word, only the numbers."""
    return f"{what} {first}".strip() if first == last else f"{what}s {first}–{last}" if what else f"{first}–{last}"


def _members(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, of a large one the first and the last: ``0, 8, … 120``."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def _print_traffic(console: Console, stages: Sequence[StagePlan], pipeline: int) -> None:
    traffic = stages[0].traffic
    is_all_counted = all(row.basis == "counted" for row in traffic)
    words = ("role", "operation", "of", "when")
    columns = (*words, "count", "ranks", "each", "tensors", "on the wire", "basis")
    table = _table(*columns[: -1 if is_all_counted else None], left=[*words, "basis"], wrapped="of")
    for row in _joined(traffic):
        basis = () if is_all_counted else ("" if row.basis == "counted" else row.basis,)
        sizes = (row.bytes_per_call, row.tensor_bytes, row.wire_bytes)
        numbers = (f"{row.count:,}", str(row.group_size), *map(num_bytes, sizes))
        table.add_row(row.role, row.operation, row.what, row.when, *numbers, *basis)
    where = f" on {_numbers('stage', stages[0].stage, stages[-1].stage)}" if pipeline > 1 else ""
    console.print(f"\nCommunication of each GPU{where} in one iteration")
    console.print(table)
    if not is_all_counted:
        console.print("source: read in Megatron-core, not counted on real ranks. estimate: if experts are used evenly.")


def _joined(traffic: Iterable[Traffic]) -> Iterator[Traffic]:
    """Yield calls that are alike once, such as the buckets of equal layers."""
    counts: Counter[Traffic] = Counter()
    for row in traffic:
        counts[replace(row, count=0)] += row.count
    for row, count in counts.items():
        yield replace(row, count=count)


def _print_alternatives(console: Console, found: Sequence[Alternative], memory: float | None) -> None:
    columns = ("change", "peak") if memory is None else ("change", "peak", "")
    table = _table(*columns, left=["change", ""])
    for one in found:
        fits = () if memory is None else ("fits" if one.peak_bytes <= memory * _GIB else "does not fit",)
        table.add_row(one.change, binary_bytes(one.peak_bytes), *fits)
    console.print("\nOne change that would need less memory")
    console.print(table)


def _print_compared(console: Console, compared: Sequence[Compared]) -> None:
    why = "what is wrong in the tool's, or differs"
    table = _table("", "number", "tool", "here", why, left=["", "number"], wrapped=why)
    for one in compared:
        is_bytes = one.unit == "bytes"
        numbers = (f"{number / _GIB:,.1f} GiB" if is_bytes else f"{number:,}" for number in (one.tool, one.ours))
        quantity = one.quantity if is_bytes or one.quantity == one.unit else f"{one.quantity} {one.unit}"
        table.add_row(one.of, f"{quantity}{' bytes' * is_bytes}", *numbers, one.difference)
    console.print("\nBeside the analysis tool of Megatron-LM's issue 488")
    console.print(table)
