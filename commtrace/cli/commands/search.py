"""``commtrace search``: the layouts in which a model should train fastest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from commtrace.cli.arguments import JsonOption
from commtrace.cli.output import wide_console
from commtrace.search.aceso_configuration import read_aceso_configuration
from commtrace.search.aceso_prediction import LEFT_OUT, AcesoPrediction, predict
from commtrace.search.aceso_profile import read_aceso_profile
from commtrace.trace.json_values import to_json


def search(
    measured: Annotated[Path, typer.Argument(help="A folder with Aceso's profile.", metavar="PROFILE")],
    aceso: Annotated[
        Path, typer.Option(metavar="FILE", help="Predict a configuration of Aceso, as Aceso does and as we do.")
    ],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    json_output: JsonOption = False,
) -> None:
    """Print how long a configuration of Aceso should take, and what memory it should need.

    The prediction of Aceso's own model and ours stand beside each other, with what they leave out.
    """
    configuration = read_aceso_configuration(aceso)
    prediction = predict(read_aceso_profile(measured, configuration.model), configuration, gpus_per_node)
    if json_output:
        typer.echo(json.dumps({"aceso": {**prediction.to_json(), "left_out": to_json(LEFT_OUT)}}, indent=2))
    else:
        _print_aceso(wide_console(), prediction)


def _print_aceso(console: Console, prediction: AcesoPrediction) -> None:
    console.print(
        f"Aceso predicts {prediction.iteration_ms:,.2f} ms for an iteration of {prediction.model} and "
        f"{prediction.memory_mib:,.2f} MiB on the fullest GPU.",
        style="bold",
    )
    console.print(
        f"From the same measurements we predict {prediction.our_iteration_ms:,.2f} ms, "
        f"{prediction.our_gradients_ms:,.2f} of them for gradients, and {prediction.our_memory_mib:,.2f} MiB."
    )
    times = _table("stage", "GPUs", "forward", "backward", "recompute", "incoming", "outgoing", "iteration")
    memory = _table("stage", "parameters", "allocated", "reserved", "together")
    for index, one in enumerate(prediction.stages):
        name = f"{'*' if index == prediction.slowest else ''}{index}"
        parts = (one.forward_ms, one.backward_ms, one.recompute_ms, one.incoming_ms, one.outgoing_ms)
        times.add_row(name, str(one.gpus), *(f"{ms:,.3f}" for ms in parts), f"{one.iteration_ms:,.2f}")
        sizes = (one.parameters_mib, one.allocated_mib, one.reserved_mib, one.memory_mib)
        memory.add_row(str(index), *(f"{mib:,.2f}" for mib in sizes))
    console.print("\nAceso's model: ms of a microbatch, and of an iteration if this stage were the slowest (*)")
    console.print(times)
    console.print("\nAceso's model: MiB of each GPU")
    console.print(memory)
    console.print("")
    for sentence in (*LEFT_OUT, *prediction.notes):
        console.print(sentence, markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
