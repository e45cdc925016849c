"""What ``commtrace search`` prints of a profile of Aceso: the fastest configurations, or the times of a given one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from commtrace.cli.layouts import fastest, none_fits, number_table, print_not_predicted, size_words
from commtrace.cli.output import duration, wide_console
from commtrace.errors import ConfigurationError
from commtrace.interchange.aceso.configuration import check_sizes, read_aceso_configuration, read_aceso_job
from commtrace.interchange.aceso.prediction import LEFT_OUT, AcesoPrediction, predict
from commtrace.interchange.aceso.profile import read_aceso_profile
from commtrace.interchange.aceso.search import SEARCH_LEAVES_OUT, AcesoChoice, AcesoFound, fullest_mib, search_aceso
from commtrace.planning.search.megatron import megatron_arguments
from commtrace.trace.json_values import JsonObject, to_json

_NO_JOB = (
    "{folder} has profiles of operators. Name a JSON file of the model behind it, such as a configuration of Aceso: "
    "model_name, model_size, num_layers and global_batch_size are needed; and give --gpus"
)
_STAGES_SHOWN = 6


def predict_aceso(folder: Path, path: Path, gpus_per_node: int, json_output: bool) -> None:
    """Print what Aceso predicts for a configuration, and what we do."""
    configuration = read_aceso_configuration(path)
    prediction = predict(read_aceso_profile(folder, configuration.model), configuration, gpus_per_node)
    if json_output:
        typer.echo(json.dumps({"aceso": {**prediction.to_json(), "left_out": to_json(LEFT_OUT)}}, indent=2))
    else:
        _print_prediction(wide_console(), prediction)


def search_profile(
    folder: Path,
    job: Sequence[str],
    gpus: int | None,
    memory_gib: float,
    global_batch: int | None,
    top: int,
    gpus_per_node: int,
    output: Path | None,
    json_output: bool,
) -> bool:
    """Print the fastest configurations of a profiled model, and write the first one; return whether there is any.

    Raises:
        ConfigurationError: the model, its batch or the GPUs are not said, or the profile has no form for them.
    """
    if len(job) != 1 or gpus is None:
        raise ConfigurationError(_NO_JOB.format(folder=folder))
    model, sizes = read_aceso_job(Path(job[0]))
    if global_batch is not None:
        model = replace(model, global_batch_size=global_batch)
        check_sizes("--global-batch", model.num_layers, global_batch)
    profile = read_aceso_profile(folder, model.model)
    choices = search_aceso(profile, model, gpus, memory_gib * 1024, top, gpus_per_node)
    if output is not None and choices.best:
        output.write_text(json.dumps(choices.best[0].configuration.file_content(sizes)) + "\n")
    sentence = _verdict(choices, model.model, memory_gib)
    if json_output:
        typer.echo(json.dumps(_search_json(choices, sentence, model.global_batch_size), indent=2))
        return bool(choices.best)
    console = wide_console()
    console.print(sentence, style="bold", markup=False)
    if choices.best:
        _print_found(console, choices)
        if output is not None:
            console.print(f"\nThe first one was written. Read it again: commtrace search {folder} --aceso {output}")
    print_not_predicted(console, choices.not_known)
    return bool(choices.best)


def _verdict(choices: AcesoFound, model: str, memory_gib: float) -> str:
    ways = f"{choices.forms:,} ways to divide {model}"
    if not choices.best:
        return none_fits(ways, memory_gib)
    best = choices.best[0]
    return fastest(
        f"those of {ways}",
        memory_gib,
        f"{_words(best)}. An iteration should take {_duration(best.prediction.our_iteration_ms)}, the fullest GPU "
        f"{best.prediction.our_memory_mib:,.0f} MiB; as Aceso predicts it {_duration(best.prediction.iteration_ms)} "
        f"and {best.prediction.memory_mib:,.0f} MiB.",
    )


def _duration(ms: float) -> str:
    return duration(round(ms * 1e6))


def _words(choice: AcesoChoice) -> str:
    words = size_words({"tp": choice.tp, "pp": choice.pp, "dp": choice.dp})
    words.append(f"microbatches of {choice.microbatch}")
    if choice.recomputed_share:
        words.append(f"{choice.recomputed_share:.0%} of the operators recomputed")
    return " · ".join(words)


def _search_json(choices: AcesoFound, verdict: str, global_batch: int) -> JsonObject:
    return {
        "verdict": verdict,
        "global_batch": global_batch,
        "aceso_search": {
            "best": to_json(choices.best),
            "for_megatron": to_json(choices.for_megatron),
            "forms": choices.forms,
            "too_large": choices.too_large,
            "not_known": list(choices.not_known),
            "left_out": [*LEFT_OUT, *SEARCH_LEAVES_OUT],
            "notes": list(choices.notes),
        },
    }


def _print_found(console: Console, choices: AcesoFound) -> None:
    console.print("")
    console.print(_choices(choices.best))
    if choices.for_megatron is not None and choices.for_megatron.layout is not None:
        console.print(
            f"\nOf those that Megatron-LM can be told, the fastest takes "
            f"{_duration(choices.for_megatron.prediction.our_iteration_ms)} and "
            f"{fullest_mib(choices.for_megatron.prediction):,.0f} MiB. Its arguments:",
            markup=False,
        )
        console.print(" ".join(megatron_arguments(choices.for_megatron.layout)), markup=False, soft_wrap=True)
    console.print("\nWhat is left out")
    for sentence in (*LEFT_OUT, *SEARCH_LEAVES_OUT, *choices.notes):
        console.print(f"  {sentence}", markup=False)


def _choices(best: Sequence[AcesoChoice]) -> Table:
    names = ("iteration", "memory", "Aceso's", "memory", "tp", "pp", "dp", "batch", "m", "recomputed")
    table = number_table(*names)
    table.add_column("operators", justify="left")
    for choice in best:
        stages = choice.configuration.num_ops_in_each_stage
        shown = " ".join(map(str, stages[:_STAGES_SHOWN]))
        table.add_row(
            _duration(choice.prediction.our_iteration_ms),
            f"{choice.prediction.our_memory_mib:,.0f} MiB",
            _duration(choice.prediction.iteration_ms),
            f"{choice.prediction.memory_mib:,.0f} MiB",
            *map(str, (choice.tp, choice.pp, choice.dp, choice.microbatch, choice.configuration.microbatches)),
            f"{choice.recomputed_share:.0%}",
            f"{shown} …" if len(stages) > _STAGES_SHOWN else shown,
        )
    return table


def _print_prediction(console: Console, prediction: AcesoPrediction) -> None:
    console.print(
        f"Aceso predicts {prediction.iteration_ms:,.2f} ms for an iteration of {prediction.model} and "
        f"{prediction.memory_mib:,.2f} MiB on the fullest GPU.",
        style="bold",
    )
    console.print(
        f"From the same measurements we predict {prediction.our_iteration_ms:,.2f} ms, "
        f"{prediction.our_gradients_ms:,.2f} of them for gradients, and {prediction.our_memory_mib:,.2f} MiB."
    )
    times = number_table("stage", "GPUs", "forward", "backward", "recompute", "incoming", "outgoing", "iteration")
    memory = number_table("stage", "parameters", "allocated", "reserved", "together")
    for index, stage in enumerate(prediction.stages):
        name = f"{'*' if index == prediction.slowest else ''}{index}"
        parts = (stage.forward_ms, stage.backward_ms, stage.recompute_ms, stage.incoming_ms, stage.outgoing_ms)
        times.add_row(name, str(stage.gpus), *(f"{ms:,.3f}" for ms in parts), f"{stage.iteration_ms:,.2f}")
        sizes = (stage.parameters_mib, stage.allocated_mib, stage.reserved_mib, stage.memory_mib)
        memory.add_row(str(index), *(f"{mib:,.2f}" for mib in sizes))
    console.print("\nAceso's model: ms of a microbatch, and of an iteration if this stage were the slowest (*)")
    console.print(times)
    console.print("\nAceso's model: MiB of each GPU")
    console.print(memory)
    console.print("")
    for sentence in (*LEFT_OUT, *prediction.notes):
        console.print(sentence, markup=False)
