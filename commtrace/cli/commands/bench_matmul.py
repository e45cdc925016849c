"""``commtrace bench matmul``: what matrix multiplications reach on this device."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.utilization import peak_flops
from commtrace.cli.arguments import JsonOption
from commtrace.cli.output import share, text_table, wide_console
from commtrace.errors import ConfigurationError
from commtrace.recording import launchers
from commtrace.trace.json_values import to_json

if TYPE_CHECKING:
    from commtrace.benchmarks.matmul import MatmulRate

_SHAPES: Final = {
    "cuda": "4096x4096x4096,8192x8192x8192,16384x16384x16384,8192x28672x8192,16384x8192x2048,4096x16384x4096",
    "cpu": "256x256x256,512x512x512,1024x1024x1024,512x2048x512",
}
_DTYPES: Final = ("bfloat16", "float16", "float32")
_TERA: Final = 1e12


def bench_matmul(
    shapes: Annotated[
        str,
        typer.Option(metavar="MxNxK,…", help="Shapes to multiply. Default: squares and others.", show_default=False),
    ] = "",
    dtype: Annotated[str, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU.", show_default=False)] = "",
    warmup: Annotated[int, typer.Option(min=0, help="Iterations that are not timed.")] = 50,
    iterations: Annotated[int, typer.Option(min=1, help="Timed iterations of each shape.")] = 100,
    json_output: JsonOption = False,
) -> None:
    """Measure the rate of matrix multiplications on this GPU, or on the CPU where there is none.

    A product of an m × k and a k × n matrix has 2mnk FLOPs. The cache of a GPU is flushed before each iteration. The
    highest median is what a model can reach: `commtrace summary --achievable-tflops` shows a run's share of it.
    """
    if dtype and dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype {dtype}: write one of {', '.join(_DTYPES)}")
    sizes = _sizes(shapes) if shapes else []
    # Here, because it imports torch.
    from commtrace.benchmarks.device import device_name, own_device
    from commtrace.benchmarks.matmul import Shape, measure_matmul

    device = own_device(launchers.local_rank(os.environ) or 0)
    chosen = [Shape(*one) for one in sizes or _sizes(_SHAPES[device.type])]
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    rates = list(measure_matmul(chosen, device, dtype, warmup, iterations))
    best, name = max(rates, key=lambda one: one.median), device_name(device)
    peak = peak_flops(name) if dtype == "bfloat16" else None
    verdict = f"Matrix multiplications reach {best.median / _TERA:.4g} TFLOP/s ({dtype}, {best.shape}) on {name}" + (
        "." if peak is None else f": {share(best.median / peak)} of its peak of {peak / _TERA:g}."
    )
    if json_output:
        described = {
            "verdict": verdict,
            "device": name,
            "dtype": dtype,
            "achievable_flops_per_second": best.median,
            "peak_flops_per_second": peak,
            "shapes": to_json(rates),
        }
        sys.stdout.write(json.dumps(described, allow_nan=False) + "\n")
        return
    console = wide_console()
    console.print(f"[bold]{escape(verdict)}[/]")
    console.print(_table(rates))
    print_next = f"Next: commtrace summary RUN --flops-per-step N --achievable-tflops {best.median / _TERA:.4g}"
    console.print(print_next, style="dim")


def _sizes(text: str) -> list[tuple[int, int, int]]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}(,[1-9]\d*(x[1-9]\d*){2})*", text, re.ASCII):
        raise ConfigurationError(f"--shapes {text}: write MxNxK, such as 4096x4096x4096,8192x8192x8192")
    return [(int(m), int(n), int(k)) for m, n, k in (shape.split("x") for shape in text.split(","))]


def _table(rates: list[MatmulRate]) -> Table:
    table = text_table(["m x n x k"], ["mean", "median", "max", "n"])
    for one in rates:
        numbers = (f"{number / _TERA:.4g}" for number in (one.mean, one.median, one.max))
        table.add_row(str(one.shape), *numbers, str(one.iterations))
    table.caption = "TFLOP/s"
    return table
