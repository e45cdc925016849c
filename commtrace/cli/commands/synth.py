"""``commtrace synth -o RUN``: a run of a simulated job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from commtrace.errors import ConfigurationError
from commtrace.recording.installation import own_command
from commtrace.synth import Fault, Job, SimulatedClock, random_clocks, synthesize, write
from commtrace.synth.faults import FORMS
from commtrace.trace.schedule import WRITTEN


def synth(
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory of the new run.", show_default=False)],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel size.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size; divides dp · cp.")] = 1,
    chunks: Annotated[int, typer.Option(min=1, help="Model chunks per stage.")] = 1,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per replica and step.")] = 8,
    num_steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 10,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"The schedule: {', '.join(WRITTEN)}. Default: 1f1b, or interleaved_1f1b with several chunks.",
            show_default=False,
        ),
    ] = "",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the whole model.")] = 8,
    overlap_grad_reduce: Annotated[
        bool, typer.Option("--overlap-grad-reduce", help="Reduce gradients while the last backwards run.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    jitter: Annotated[float, typer.Option(min=0.0, help="Scatter of every duration: 0.01 is about 1%.")] = 0.01,
    wander: Annotated[
        float, typer.Option(min=0.0, help="Drift of every rank's speed over steps: 0.03 is about 3%.")
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help=f"A fault; repeatable: {'; '.join(FORMS.values())}. Append @A:B for only these steps.",
            show_default=False,
        ),
    ] = None,
    clock_offset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MS | HOST=MS",
            help="Error of the hosts' wall clocks: of all, up to MS, or of one.",
            show_default=False,
        ),
    ] = None,
    clock_drift: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PPM | HOST=PPM",
            help="Drift of the hosts' clocks: of all, up to PPM, or of one.",
            show_default=False,
        ),
    ] = None,
    clock_step: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST=MS@S",
            help="Jump of a host's clocks by MS, S seconds after the start.",
            show_default=False,
        ),
    ] = None,
    outliers: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of collectives whose recorded end is milliseconds late.")
    ] = 0.0,
    missing: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of communications that were not recorded.")
    ] = 0.0,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="Ranks that share a host and its clock.")] = 8,
) -> None:
    """Make a run of a simulated Megatron-like job, with the truth about it in truth.json.

    The run has the files that a recorder writes: every reading command works on it. truth.json holds the true length of
    every step, what each fault costs, the schedule's ideal time, and offset and drift of every host's clock.
    """
    job = Job(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        chunks=chunks,
        microbatches=microbatches,
        steps=num_steps,
        schedule=schedule,
        layers=max(layers, pp * chunks),
        overlap_grad_reduce=overlap_grad_reduce,
        seed=seed,
        jitter=jitter,
        wander=wander,
        outliers=outliers,
        missing=missing,
        gpus_per_host=gpus_per_host,
        faults=tuple(Fault.parse(text) for text in fault or ()),
    )
    job = replace(job, clocks=_clocks(job, clock_offset or (), clock_drift or (), clock_step or ()))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Simulating", total=None)
        synthetic = synthesize(job)
        progress.update(task, description="Writing", total=job.world_size)
        num_spans = write(synthetic, output, progress=lambda _: progress.advance(task))
    typer.echo(f"{output}: {job.world_size} ranks, {num_spans} spans; the truth about them is in truth.json")
    typer.echo(f"Next: {own_command()} summary {output}")


def _clocks(
    job: Job, offsets: Sequence[str], drifts: Sequence[str], steps: Sequence[str]
) -> Mapping[int, SimulatedClock]:
    # Perfect ones without options.
    if not (offsets or drifts or steps):
        return {}
    offset, offset_of = _amounts("--clock-offset", offsets)
    drift, drift_of = _amounts("--clock-drift", drifts)
    clocks = dict(random_clocks(job.hosts, wall_error_ns=round(offset * 1e6), drift_ppm=drift, seed=job.seed))
    for host, milliseconds in offset_of.items():
        clocks[host] = replace(_clock(clocks, host), wall_error_ns=round(milliseconds * 1e6))
    for host, ppm in drift_of.items():
        clocks[host] = replace(_clock(clocks, host), drift_ppm=ppm)
    for text in steps:
        jump, _, at = text.partition("@")
        _, jump_of = _amounts("--clock-step", [jump])
        for host, milliseconds in jump_of.items():
            when = job.start_ns + round(_number("--clock-step", at) * 1e9)
            clocks[host] = replace(_clock(clocks, host), step_ns=round(milliseconds * 1e6), step_at_ns=when)
    return clocks


def _clock(clocks: Mapping[int, SimulatedClock], host: int) -> SimulatedClock:
    if host not in clocks:
        raise ConfigurationError(f"host {host}: the job has the hosts 0 to {len(clocks) - 1}")
    return clocks[host]


def _amounts(option: str, texts: Sequence[str]) -> tuple[float, dict[int, float]]:
    """Return the amount for all hosts (0 without one), and those of single hosts."""
    of_all, of_host = 0.0, {}
    for text in texts:
        host, single, amount = text.partition("=")
        if single:
            of_host[int(_number(option, host))] = _number(option, amount)
        else:
            of_all = _number(option, text)
    return of_all, of_host


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{option}: {text!r} is not a number") from None
