"""``commtrace plan --bandwidth … --baseline … --tflops …``: how long communication takes, and what would hide it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from commtrace.analysis.communication.baseline import read_baseline
from commtrace.analysis.windows.run import measure_run
from commtrace.cli.output import UNKNOWN, num_bytes
from commtrace.planning.baseline_times import baseline_times
from commtrace.planning.plan import Plan
from commtrace.planning.times import (
    RoleTime,
    compute_seconds,
    measure_communication,
    measured_rates,
    parse_bandwidths,
    role_times,
)


class Times(NamedTuple):
    """The communication of every role and stage, beside the compute of a GPU in an iteration."""

    compute_seconds: float | None
    roles: tuple[RoleTime, ...]
    not_measured: tuple[str, ...] = ()  # what a baseline lacks
    has_latencies: bool = False  # in the times of all roles


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
    if run is not None:
        measured = measured_rates(measure_run(run, measure_communication), planned)
        given = {**measured.bandwidths, **given}
        seconds = measured.compute_seconds if seconds is None else seconds
    if not given and seconds is None and by_size is None:
        return None
    roles = role_times(planned, given, seconds, of_baseline)
    return Times(
        seconds,
        roles,
        not_measured=() if by_size is None else by_size.not_measured,
        has_latencies=all((one.stage, one.role) in of_baseline for one in roles),
    )


def print_times(console: Console, times: Times) -> None:
    """Print a table; stages with the same times share their rows."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "role"):
        table.add_column(name, no_wrap=True)
    for name in ("on the wire", "bandwidth", "time", "hidden from"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    stages = [(stage, tuple(one._replace(stage=0) for one in own)) for stage, own in groupby(times.roles, _stage)]
    for own, alike in groupby(stages, key=lambda pair: pair[1]):
        numbers = [stage for stage, _ in alike]
        where = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        for one in own:
            hidden = {None: "", True: "shorter than compute", False: "longer than compute"}[one.is_hidden]
            numbers_of_role = (
                num_bytes(one.wire_bytes),
                _rate(one.bytes_per_second),
                UNKNOWN if one.seconds is None else seconds(one.seconds),
                _rate(one.hiding_bytes_per_second),
            )
            table.add_row(where, one.role, *numbers_of_role, hidden)
    latencies = "" if times.has_latencies else ", without latencies"
    console.print(f"\nTime of the communication of each GPU in one iteration, each role alone{latencies}")
    console.print(table)
    if times.not_measured:
        console.print("The baseline has no time for", end=" ")
        console.print(f"{'; '.join(times.not_measured)}: measure it with commtrace bench collectives.", markup=False)
    if times.compute_seconds is not None:
        console.print(f"Compute of a GPU in one iteration: {seconds(times.compute_seconds)}.")


def seconds(time: float) -> str:
    """Return ``53 ms`` or ``1.2 s``."""
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} µs"


def _stage(one: RoleTime) -> int:
    return one.stage


def _rate(bytes_per_second: float | None) -> str:
    return UNKNOWN if bytes_per_second is None else f"{num_bytes(round(bytes_per_second))}/s"
