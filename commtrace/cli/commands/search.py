"""``commtrace search``: the layouts in which a model should train fastest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.analysis.communication.baseline import read_baseline
from commtrace.analysis.judged_run import judge_run, measure_job
from commtrace.analysis.prediction.predict import StepModel, steps_drawn
from commtrace.analysis.windows.run import open_run
from commtrace.cli.aceso import predict_aceso, search_profile
from commtrace.cli.arguments import STEPS_HELP, JsonOption, given_memory_gib
from commtrace.cli.found_layouts import print_search, search_json
from commtrace.cli.output import wide_console
from commtrace.errors import ConfigurationError
from commtrace.findings.causes import OF_DIVISION
from commtrace.findings.finding import SLOW, Finding
from commtrace.interchange.aceso.profile import has_aceso_profile
from commtrace.planning.layout import Layout, PlannedJob
from commtrace.planning.megatron_arguments import parse_megatron_command
from commtrace.planning.model import Model
from commtrace.planning.plan import plan_notes
from commtrace.planning.plan_file import read_plan_file
from commtrace.planning.recorded_job import recorded_job
from commtrace.planning.search.costs import measure_costs
from commtrace.planning.search.layouts import search_layouts
from commtrace.planning.search.links import given_bandwidths
from commtrace.planning.search.prediction import Predictor
from commtrace.trace.files.locate import NEWEST_RUN, RUNS

_FILES: Final = (".json", ".yaml", ".yml")
_GIB: Final = 1 << 30


def search(
    measured: Annotated[
        Path,
        typer.Argument(
            help="A recorded run, or a folder of Aceso's profiles. Default, without a job: the newest run below "
            f"{RUNS}.",
            metavar="RUN|PROFILE",
            show_default=False,
        ),
    ] = NEWEST_RUN,
    job: Annotated[
        list[str] | None,
        typer.Argument(
            help="The recorded job: a YAML or JSON file, or after -- its command. Default: as its ranks recorded it. "
            "Of a profile: a JSON file of its model, such as a configuration of Aceso.",
            metavar="FILE | -- COMMAND…",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to divide the model between. Default: the run's.")
    ] = None,
    memory: Annotated[str, typer.Option(metavar="GIB", help="Memory of a GPU, such as 80 or 80GB.")] = "80",
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of an iteration. Default: the run's.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Print so many layouts.")] = 10,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=RATE",
            help="Bus bandwidth instead of the run's: tp=300GB/s; between nodes dp-cp=between:200Gbit/s. Repeatable.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For roles that the run does not have: a file of `commtrace bench collectives`.",
            show_default=False,
        ),
    ] = None,
    cp: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Context parallel sizes to try: 1,2,4. Default: the run's.", show_default=False
        ),
    ] = None,
    ep: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Expert parallel sizes to try: 1,2,8. Default: the run's.", show_default=False
        ),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node. Default: the run's, or 8.")] = None,
    steps: Annotated[str | None, typer.Option(help=STEPS_HELP, show_default=False)] = None,
    aceso: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Predict a configuration of Aceso instead, as Aceso does and as we do."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Of a profile: write the first as Aceso's JSON.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Print the layouts in which a recorded or profiled job should train fastest, with their memory.

    What a layer takes, and the bandwidths, are measured in the run; memory follows from formulas. Layouts are ranked as
    far as real runs had such changes in the predicted order; the others are candidates to measure. The search varies
    tp, pp, dp, microbatches, chunks, the layers of the first and the last stage, and recomputation, with --cp and --ep
    also these; the global batch stays. Of a folder of Aceso's profiles, and a JSON file of its model, it divides the
    measured operators. Ends with 1 if no layout fits.
    """
    if aceso is not None:
        predict_aceso(measured, aceso, gpus_per_node or 8, json_output)
        return
    memory_gib = given_memory_gib(memory)
    if has_aceso_profile(measured):
        if bandwidth or steps or baseline or cp or ep:
            raise ConfigurationError(
                "a profile has its own bandwidths, no steps, and neither cp nor ep: leave out --bandwidth, --baseline, "
                "--steps, --cp and --ep"
            )
        sizes = (gpus, memory_gib, global_batch, top, gpus_per_node or 8)
        raise typer.Exit(0 if search_profile(measured, job or (), *sizes, output, json_output) else 1)
    if output is not None:
        raise ConfigurationError("--output writes a configuration of Aceso: it needs a folder of Aceso's profiles")
    _check_run_first(measured, job or ())
    given = dict(given_bandwidths(bandwidth or ()))
    run = open_run(measured, steps)
    recorded = run.recorded
    world_size = max(trace.metadata.world_size for trace in recorded.ranks.values())
    model, layout, notes, _ = _job(job, world_size) if job else recorded_job(recorded)
    drawn = run.analyse_steps(steps_drawn(run.steps.used, len(run.aligned.ranks)))
    costs = measure_costs(StepModel.observed(drawn), model, layout)
    links = costs.links.with_given(given, None if baseline is None else read_baseline(baseline))
    predictor = Predictor(costs, gpus_per_node or costs.gpus_per_node, links)
    sequences = global_batch or layout.microbatch * layout.microbatches * layout.dp
    tried = (_listed("--cp", cp), _listed("--ep", ep))
    found = search_layouts(predictor, gpus or world_size, round(memory_gib * _GIB), sequences, top, *tried)
    named = (*found.best, found.chosen, *found.candidates)
    of_plans = _of_plans(model, [layout, *(one.layout for one in named if one is not None)])
    stragglers = _of_stragglers(judge_run(run, run.measure(measure_job).result).findings)
    notes = (*stragglers, *notes, *costs.notes, *of_plans, *_of_cp_and_ep(model, layout, *tried))
    if json_output:
        typer.echo(json.dumps(search_json(predictor, found, sequences, memory_gib, notes), indent=2))
    else:
        print_search(wide_console(), predictor, found, memory_gib, notes)
    raise typer.Exit(0 if found.best or found.candidates else 1)


def _check_run_first(measured: Path, job: Sequence[str]) -> None:
    """Raise ConfigurationError if the words begin with the job: a file, or a command and its options."""
    is_command = measured.suffix == ".py" or (bool(job) and job[0].startswith("-"))
    if measured.is_dir() or not (is_command or measured.suffix in _FILES):
        return
    words = f"-- {measured} …" if is_command else str(measured)
    raise ConfigurationError(
        f"{measured} is the job, not its run: name the run first, as in commtrace search {NEWEST_RUN} {words}"
    )


def _listed(option: str, text: str | None) -> tuple[int, ...]:
    """Return the sizes of an option, each once; none if it is not given."""
    try:
        sizes = tuple(dict.fromkeys(int(size) for size in text.split(","))) if text is not None else ()
    except ValueError:
        sizes = (0,)
    if min(sizes, default=1) < 1:
        raise ConfigurationError(f"{option} {text}: write sizes with commas between them, such as 1,2,4")
    return sizes


def _of_plans(model: Model, layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Return what the plans of these layouts leave out, each sentence once."""
    return tuple(dict.fromkeys(note for layout in layouts for note in plan_notes(model, layout)))


def _of_stragglers(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield what slowed ranks in the recorded steps that no layout changes."""
    for finding in findings:
        if finding.kind == SLOW and finding.ranks and finding.cause not in OF_DIVISION:
            yield (
                f"The recorded steps have a straggler: {finding.line()}. What was measured, and so what is predicted, "
                "includes it: once it is mended, record again."
            )


def _of_cp_and_ep(model: Model, layout: Layout, cp: Sequence[int], ep: Sequence[int]) -> Iterator[str]:
    """Yield what is fixed, and what is taken for granted of what is not."""
    fixed = {"cp": layout.cp} if not cp else {}
    if model.experts and not ep:
        fixed["ep"] = layout.ep
    if fixed:
        sizes = " and ".join(f"{name} is {size}" for name, size in fixed.items())
        options = " and ".join(f"--{name} 1,2,4" for name in fixed)
        yield f"In all layouts {sizes}, as in the run: {options} would try others."
    if set(cp) - {layout.cp}:
        yield (
            "Other sizes of cp: work is taken to be divided evenly. What cp ranks exchange follows from Megatron-core "
            "by its source, and is taken to be hidden by work as much as in the run, or not at all."
        )
    if set(ep) - {layout.ep}:
        yield (
            "Other sizes of ep: routing is taken to be even, and the work of a rank to stay the same. What ep ranks "
            "exchange is an estimate, taken to be hidden by work as much as in the run, or not at all."
        )


def _job(job: Sequence[str], world_size: int) -> PlannedJob:
    if len(job) == 1 and Path(job[0]).suffix in _FILES:
        return read_plan_file(Path(job[0]))
    return parse_megatron_command(job, world_size)
