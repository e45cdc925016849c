"""MFU, HFU and MAMFU of a summary, from the options of a command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from commtrace.analysis.summary import Summary
from commtrace.analysis.utilization import Recompute, Utilization, peak_flops
from commtrace.cli.output import UNKNOWN, share
from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan_file import read_plan_file
from commtrace.planning.recorded_job import has_sizes, recorded_job
from commtrace.planning.utilization import StepFlops, flops_of_step, utilization_of
from commtrace.trace.run import Run

_TERA = 1e12


class Recomputed(str, Enum):
    """Which forward passes are computed again."""

    NONE = "none"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class UtilizationOptions:
    """What a user gives; None for what was not given."""

    flops_per_step: float | None = None
    plan: Path | None = None
    recompute: Recomputed | None = None
    peak_tflops: float | None = None
    achievable_tflops: float | None = None


def measure_utilization(summary: Summary, options: UtilizationOptions, recorded: Run) -> Utilization | None:
    """Return the utilization; None if the model's FLOPs are neither given nor, with the peak, known.

    Raises:
        ConfigurationError: the options contradict one another, or no step can be used.
    """
    if options.flops_per_step is not None and options.plan is not None:
        raise ConfigurationError("--flops-per-step and --plan exclude each other: write one of them")
    for name in ("flops_per_step", "peak_tflops", "achievable_tflops"):
        number = getattr(options, name)
        if number is not None and not 0 < number < float("inf"):
            raise ConfigurationError(f"--{name.replace('_', '-')} {number:g}: give a number above 0")
    run = summary.run
    is_derived = options.flops_per_step is None and options.plan is None
    if is_derived and not (has_sizes(recorded) and (options.peak_tflops or peak_flops(run.device))):
        needless = [name for name in ("recompute", "peak_tflops", "achievable_tflops") if getattr(options, name)]
        if needless:
            raise ConfigurationError(f"--{needless[0].replace('_', '-')} needs --flops-per-step or --plan")
        return None
    if not summary.ranks:
        if is_derived:
            return None
        raise ConfigurationError("no step was recorded in full, so there is no time to divide FLOPs by")
    return utilization_of(
        summary,
        _work(options, recorded),
        peak=options.peak_tflops * _TERA if options.peak_tflops else None,
        achievable=options.achievable_tflops * _TERA if options.achievable_tflops else None,
    )


def _work(options: UtilizationOptions, recorded: Run) -> StepFlops:
    given: Recompute | None = options.recompute.value if options.recompute else None
    if options.flops_per_step is not None:
        return StepFlops(options.flops_per_step, "given by --flops-per-step", given)
    planned = flops_of_step(*_job(options.plan, recorded))
    return planned._replace(recompute=given or planned.recompute)


def _job(plan: Path | None, recorded: Run) -> tuple[Model, Layout]:
    if plan is not None:
        described = read_plan_file(plan)
        return described.model, described.layout
    job = recorded_job(recorded)
    return job.model, job.layout


def utilization_lines(found: Utilization) -> Iterator[str]:
    """Yield the shares, and what is missing for those that are not known."""
    rate = f"{found.flops_per_second / _TERA:.3g} TFLOP/s on each of {found.devices} devices"
    yield f"Utilization: {found.model_flops / _TERA:.4g} TFLOP per step ({found.formula}), {rate}"
    if found.peak is None:
        yield f"MFU {UNKNOWN}: unknown GPU {found.device!r}, give its peak with --peak-tflops"
    else:
        whole = "" if found.run_mfu is None else f", {share(found.run_mfu)} of the wall time of the run"
        yield f"MFU {share(found.mfu)} of steps{whole}; peak {found.peak / _TERA:g} TFLOP/s (dense bf16)"
        if found.hfu is None:
            yield f"HFU {UNKNOWN}: it is not known what is computed again, say --recompute none or full"
        else:
            passes = "4 passes for 3" if found.recompute == "full" else "nothing is computed again"
            yield f"HFU {share(found.hfu)}: {passes}"
    if found.mamfu is None:
        yield f"MAMFU {UNKNOWN}: measure the device with commtrace bench matmul, and give --achievable-tflops"
    else:
        yield f"MAMFU {share(found.mamfu)} of {(found.achievable or 0) / _TERA:g} TFLOP/s"
