"""``commtrace plan --bandwidth … --baseline … --tflops …``: how long communication takes, and what would hide it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from commtrace.analysis.communication.baseline import read_baseline
from commtrace.analysis.windows.run import measure_run
from commtrace.cli.output import UNKNOWN, num_bytes
from commtrace.planning.baseline_times import baseline_times
from commtrace.planning.plan import Plan
from commtrace.planning.recorded_job import job_differences
from commtrace.planning.times import (
    IterationTime,
    PipelinedTime,
    RoleTime,
    compute_seconds,
    iteration_time,
    measure_communication,
    measured_rates,
    parse_bandwidths,
    pipelined_time,
    role_times,
)

_SHORTEST: Final = 1e-6
"""Seconds; roles that take less have no row."""


class Times(NamedTuple):
    """The communication of every role and stage, beside the compute of a GPU in an iteration."""

    compute_seconds: float | None
    roles: tuple[RoleTime, ...]
    not_measured: tuple[str, ...] = ()  # what a baseline lacks
    other_sizes: tuple[str, ...] = ()  # of the measured run, in words; empty if it is the planned job
    at_a_bandwidth: tuple[str, ...] = ()  # roles whose times follow from one, without latencies
    pipelined: PipelinedTime | None = None  # with the bubble; None without a pipeline
    at_most: tuple[str, ...] = ()  # roles whose times are upper bounds, as the run has only bounds of their bandwidth

    @property
    def iteration(self) -> IterationTime | None:
        return iteration_time(self.roles, self.compute_seconds)


def plan_times(
    planned: Plan, bandwidths: Iterable[str], tflops: float | None, run: Path | None, baseline: Path | None
) -> Times | None:
    """Return the times that options ask for; None if there are none.

    The bandwidth that is given for a role goes before a baseline, and that before what a run achieved.
    """
    given = parse_bandwidths(bandwidths)
    seconds = None if tflops is None else compute_seconds(planned, tflops)
    by_size = None if baseline is None else baseline_times(planned, read_baseline(baseline))
    of_baseline = {} if by_size is None else {at: time for at, time in by_size.seconds.items() if at[1] not in given}
    other_sizes: tuple[str, ...] = ()
    at_least: set[str] = set()
    if run is not None:
        of_run = measure_run(run, measure_communication)
        measured, other_sizes = measured_rates(of_run, planned), job_differences(of_run.recorded, planned)
        at_least = set(measured.at_least) - set(given)
        given = {**measured.bandwidths, **given}
        seconds = measured.compute_seconds if seconds is None else seconds
    if not given and seconds is None and by_size is None:
        return None
    roles = role_times(planned, given, seconds, of_baseline)
    at_a_bandwidth = tuple(
        dict.fromkeys(row.role for row in roles if row.seconds is not None and (row.stage, row.role) not in of_baseline)
    )
    return Times(
        seconds,
        roles,
        not_measured=() if by_size is None else by_size.not_measured,
        other_sizes=other_sizes,
        at_a_bandwidth=at_a_bandwidth,
        pipelined=pipelined_time(planned, roles, seconds),
        at_most=tuple(role for role in at_a_bandwidth if role in at_least),
    )


def print_times(console: Console, times: Times) -> None:
    """Print a table; stages with the same times share their rows."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "role"):
        table.add_column(name, no_wrap=True)
    for name in ("on the wire", "bandwidth", "time", "needed to hide it"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    shown = [row for row in times.roles if row.seconds is None or row.seconds >= _SHORTEST]
    stages = [(stage, tuple(row._replace(stage=0) for row in rows)) for stage, rows in groupby(shown, _stage)]
    for rows, alike in groupby(stages, key=lambda pair: pair[1]):
        numbers = [stage for stage, _ in alike]
        where = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        for row in rows:
            hidden = {None: "", True: "shorter than compute", False: "longer than compute"}[row.is_hidden]
            numbers_of_role = (
                num_bytes(row.wire_bytes),
                _rate(row.bytes_per_second),
                UNKNOWN if row.seconds is None else seconds(row.seconds),
                _rate(row.hiding_bytes_per_second),
            )
            table.add_row(where, row.role, *numbers_of_role, hidden)
    known = {row.role for row in times.roles if row.seconds is not None}
    latencies = ", without latencies" if times.at_a_bandwidth and known == set(times.at_a_bandwidth) else ""
    console.print(f"\nTime of the communication of each GPU in one iteration, each role alone{latencies}")
    console.print(table)
    for sentence in _sentences(times, known):
        console.print(sentence, markup=False)


def _sentences(times: Times, known: set[str]) -> Iterator[str]:
    if times.other_sizes:
        yield f"! The measured run is not the planned job: it has {', '.join(times.other_sizes)}."
    left_out = dict.fromkeys(row.role for row in times.roles if row.seconds is not None and row.seconds < _SHORTEST)
    if left_out:
        yield f"Below 1 µs: {', '.join(left_out)}."
    if known > set(times.at_a_bandwidth) > set():
        yield f"Without latencies, as they follow from a bandwidth: {', '.join(times.at_a_bandwidth)}."
    if times.at_most:
        yield (
            f"At most: {', '.join(times.at_most)}. In the measured run, most bytes of it are in calls without an exact "
            "start and end, so its bandwidth is a lower bound."
        )
    if times.not_measured:
        yield (
            f"The baseline has no time for {'; '.join(times.not_measured)}: "
            "measure it with commtrace bench collectives."
        )
    if times.compute_seconds is not None:
        yield f"Compute of a GPU in one iteration: {seconds(times.compute_seconds)}."
    if times.iteration is not None:
        yield _together(times, times.iteration)


def _together(times: Times, iteration: IterationTime) -> str:
    stages = {row.stage for row in times.roles}
    where = f", on stage {iteration.stage}, the slowest" if len(stages) > 1 else ""
    at_least = "at least " if any(row.seconds is None for row in times.roles) else ""
    bubble = ""
    if times.pipelined is not None:
        bubble = (
            f" With the bubble of the pipeline, whose schedule is replayed: {at_least}"
            f"{seconds(times.pipelined.all_hidden_seconds)} and {at_least}"
            f"{seconds(times.pipelined.none_hidden_seconds)}."
        )
    return (
        f"Both together: {at_least}{seconds(iteration.all_hidden_seconds)} if all communication is hidden, "
        f"{at_least}{seconds(iteration.none_hidden_seconds)} if none is{where}.{bubble}"
    )


def seconds(time: float) -> str:
    """Return ``53 ms`` or ``1.2 s``."""
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} µs"


def _stage(row: RoleTime) -> int:
    return row.stage


def _rate(bytes_per_second: float | None) -> str:
    return UNKNOWN if bytes_per_second is None else f"{num_bytes(round(bytes_per_second))}/s"
