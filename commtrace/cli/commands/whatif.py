"""``commtrace whatif RUN``: the step time of a run under changes."""

from __future__ import annotations

import io
import json
import math
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from commtrace.analysis.chain import Analysis
from commtrace.analysis.judged_run import judge_run, judge_slow, measure_job
from commtrace.analysis.prediction.changes import (
    BandwidthChange,
    Changes,
    LatencyChange,
    OverlapChange,
    parse_layers,
)
from commtrace.analysis.prediction.predict import TARGET_ERROR, Outcome, Prediction, predict, steps_drawn
from commtrace.analysis.prediction.predicted_run import predicted_ranks
from commtrace.analysis.stragglers.mended import JudgedSteps
from commtrace.analysis.windows.run import OpenedRun, open_run
from commtrace.cli.arguments import DEFAULT_RUNS, AttemptOption, JsonOption, RunsArgument, StepsOption, run_directory
from commtrace.cli.head import print_head
from commtrace.cli.output import milliseconds, wide_console
from commtrace.errors import ConfigurationError
from commtrace.planning.recorded_job import has_sizes, recorded_job
from commtrace.recording.installation import own_command
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.schedule import WRITTEN
from commtrace.trace.schema import mark_row
from commtrace.viewer.what_if import Question

_PLACED_BY_HAND: Final = "pipeline_model_parallel_layout"
"""Megatron-core's option that gives each stage any layers; of a run that has it, the layout does not tell them."""

_MOST_DIGITS: Final = 3

_ALL: Final = "all"
"""Every rank that ``commtrace straggler`` names."""


class Switch(str, Enum):
    """On or off."""

    ON = "on"
    OFF = "off"


BandwidthOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=2x",
        help="Bandwidth of a role (or of all): a factor, or bus bandwidth: dp=100GB/s, dp=800Gbit/s. Repeatable.",
        show_default=False,
    ),
]
LatencyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=+50us",
        help="Latency of a role (or of all): pp=0.5x, pp=20us, pp=+50us. Repeatable.",
        show_default=False,
    ),
]
OverlapOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=perfect",
        help="perfect: work hides all transfers of the role. none: the lane waits where each starts. Repeatable.",
        show_default=False,
    ),
]
SlowRankOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK",
        help="This rank works as fast as its peers; all: every rank that commtrace straggler names. Repeatable.",
        show_default=False,
    ),
]
ScheduleOption = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Another pipeline schedule: {', '.join(WRITTEN)}.", show_default=False),
]
ChunksOption = Annotated[
    int | None, typer.Option(min=1, metavar="V", help="Model chunks per stage.", show_default=False)
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="M", help="Microbatches per replica and step, each as large.", show_default=False),
]
LayersOption = Annotated[
    str, typer.Option(metavar="8,9,8,7", help="Layers of each stage, after moving some.", show_default=False)
]
LayersBeforeOption = Annotated[
    str,
    typer.Option(metavar="8,8,8,8", help="Layers of each stage in the run. Default: as recorded.", show_default=False),
]
RecomputeOption = Annotated[
    Switch | None, typer.Option(help="Recompute all activations in the backward.", show_default=False)
]
WeightShareOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of a backward for the gradients of weights, if the run does not tell. Default: 0.5.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write the predicted steps: as a run directory, or, if it ends in .html, as a report that compares them "
        "with the run.",
        show_default=False,
    ),
]


def whatif(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    overlap: OverlapOption = None,
    without_slow_rank: SlowRankOption = None,
    schedule: ScheduleOption = "",
    chunks: ChunksOption = None,
    microbatches: MicrobatchesOption = None,
    layers: LayersOption = "",
    layers_before: LayersBeforeOption = "",
    recompute: RecomputeOption = None,
    weight_share: WeightShareOption = None,
    output: OutputOption = None,
    steps: StepsOption = "",
    json_output: JsonOption = False,
) -> None:
    """Print what a step of a run would take with changes.

    The state of the job and its findings stand first. Then the recorded steps are replayed with the changes; the answer
    says how well the replay reproduces the run itself. Without changes, only that is printed.
    """
    changes = Changes(
        bandwidth=tuple(BandwidthChange.parse(text) for text in bandwidth or ()),
        latency=tuple(LatencyChange.parse(text) for text in latency or ()),
        overlap=tuple(OverlapChange.parse(text) for text in overlap or ()),
        schedule=schedule,
        chunks=chunks,
        microbatches=microbatches,
        layers=parse_layers("--layers", layers) if layers else (),
        layers_before=parse_layers("--layers-before", layers_before) if layers_before else (),
        recompute=None if recompute is None else recompute is Switch.ON,
        weight_share=weight_share,
    )
    run = run_directory(runs, attempt)
    opened = open_run(run, steps or None)
    analysis = _read(opened)
    judged = judge_slow(opened) if without_slow_rank else None
    outcome = _outcome(analysis, _with_recorded_layers(changes, analysis.recorded), without_slow_rank or [], judged)
    if output is not None:
        _write(outcome, output, run)
    if json_output:
        typer.echo(json.dumps(_answer(opened, outcome.prediction), allow_nan=False, indent=2))
        return
    of_run = judge_run(opened, opened.measure(measure_job).result)
    console = wide_console()
    print_head(console, of_run.title, of_run.findings)
    print_prediction(console, outcome.prediction)
    if output is not None:
        _print_where(console, run, output)
    if not outcome.prediction.changes:
        console.print(f"Next: {escape(_next_command(opened, outcome, run))}", style="dim", soft_wrap=True)


def predict_for_page(opened: OpenedRun, question: Question, directory: Path) -> Mapping[str, object]:
    """Answer a question of the page as ``--json`` does, and write the predicted steps into a new directory."""
    judged = judge_slow(opened) if question.without_slow_rank else None
    outcome = _outcome(_read(opened), question.changes, question.without_slow_rank, judged)
    write_predicted(outcome, directory)
    return _answer(opened, outcome.prediction)


def _with_recorded_layers(changes: Changes, run: Run) -> Changes:
    """Return changes that say how many layers the stages of the run have, if it recorded that.

    Raises:
        ConfigurationError: other numbers were given that have another sum.
    """
    if not changes.layers or not has_sizes(run):
        return changes
    recorded = recorded_job(run)
    if changes.layers_before:
        if sum(changes.layers_before) != recorded.model.layers:
            raise ConfigurationError(
                f"--layers-before has {sum(changes.layers_before)} layers, and the run recorded {recorded.model.layers}"
            )
        return changes
    if any(_PLACED_BY_HAND in trace.topology.get("not_planned", []) for trace in run.ranks.values()):
        return changes
    return replace(changes, layers_before=tuple(recorded.layout.stage_sizes(recorded.model)))


def _read(opened: OpenedRun) -> Analysis:
    return opened.analyse_steps(steps_drawn(opened.steps.used, len(opened.aligned.ranks)))


def _outcome(
    analysis: Analysis, changes: Changes, without_slow_rank: Sequence[str], judged: JudgedSteps | None
) -> Outcome:
    return predict(analysis, changes.with_slow_ranks(_slow_ranks(without_slow_rank, judged)), judged)


def _answer(opened: OpenedRun, prediction: Prediction) -> JsonObject:
    return {"verdict": verdict_text(prediction), **prediction.to_json(), "problems": list(opened.recorded.problems)}


def _write(outcome: Outcome, output: Path, run: Path) -> None:
    if output.suffix != ".html":
        write_predicted(outcome, output)
        return
    from commtrace.cli.commands.report import report

    with tempfile.TemporaryDirectory(prefix="commtrace-") as folder, redirect_stdout(io.StringIO()):
        predicted = Path(folder) / "whatif"
        write_predicted(outcome, predicted)
        report([predicted], output=output, against=run, workers=1)


def write_predicted(outcome: Outcome, directory: Path) -> None:
    """Write the predicted steps into a new run directory. Raise ConfigurationError if it is not empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(f"{directory} exists and is no empty directory; name one that does not exist yet")
    directory.mkdir(parents=True, exist_ok=True)
    session = time.time_ns()
    for rank in predicted_ranks(outcome):
        versions = {"predicted by": f"commtrace whatif: {'; '.join(outcome.prediction.changes) or 'no changes'}"}
        metadata = replace(rank.trace.metadata, session=session, run_id=directory.resolve().name, versions=versions)
        writer = SegmentWriter(directory, metadata)
        writer.write([*rank.marks, *rank.rows, mark_row("end", {}, at_ns=rank.rows[-1].end)])
        writer.close()


def _slow_ranks(asked: Sequence[str], judged: JudgedSteps | None) -> tuple[int, ...]:
    if _ALL in asked:
        if judged is None or not judged.ranks:
            raise ConfigurationError(
                "--without-slow-rank all: commtrace straggler names no slow rank in these steps; name one yourself"
            )
        return judged.ranks
    try:
        return tuple(sorted({int(one) for one in asked}))
    except ValueError:
        raise ConfigurationError(f"--without-slow-rank {' '.join(asked)}: write a rank, or all") from None


def verdict_text(prediction: Prediction) -> str:
    """Return the predicted step time beside the measured one, with its uncertainty."""
    measured = prediction.fidelity.measured_ns
    if not prediction.changes:
        return f"A step takes {milliseconds(measured)} ms; the replay takes {_percent(prediction.fidelity.error)}."
    saved = measured - prediction.predicted_ns
    digits = _digits(prediction.uncertainty_ns)
    predicted, error, recorded = (
        f"{ns / 1e6:.{digits}f}" for ns in (prediction.predicted_ns, prediction.uncertainty_ns, measured)
    )
    change = f"{abs(saved) / measured:.1%}"
    less = "less" if saved >= 0 else "more"
    compared = f"{change} {less} than the measured {recorded} ms" if change != "0.0%" else "as long as the measured one"
    return f"A step would take {predicted} ± {error} ms: {compared}."


def _digits(error_ns: float) -> int:
    """Return the digits behind the point of an error in ms, and of its number: two that count, but none below 1 µs."""
    return min(max(1 - math.floor(math.log10(max(error_ns, 1) / 1e6)), 0), _MOST_DIGITS)


def print_prediction(console: Console, prediction: Prediction) -> None:
    """Print how faithful the replay is, then the answer and what it assumes."""
    fidelity = prediction.fidelity
    if prediction.changes:
        console.print(f"[bold]{escape(verdict_text(prediction))}[/]\n")
    console.print(
        f"Replay of the run itself: {milliseconds(fidelity.replayed_ns)} ms for a step of "
        f"{milliseconds(fidelity.measured_ns)} ms ({_percent(fidelity.replayed_ns / fidelity.measured_ns - 1)})."
    )
    if fidelity.rebuilt_ns is not None:
        console.print(
            f"Rebuilt from its forwards, backwards and messages: {milliseconds(fidelity.rebuilt_ns)} ms "
            f"({_percent(fidelity.error)})."
        )
    if abs(fidelity.error) > TARGET_ERROR:
        console.print(
            f"[yellow]More than {TARGET_ERROR:.0%} of a step is not explained: read the answer as a direction.[/]"
        )
    if not prediction.changes:
        return
    console.print(f"Changed: {escape('; '.join(prediction.changes))}.")
    if prediction.microbatches != prediction.recorded_microbatches:
        console.print(
            f"A step has {prediction.microbatches} microbatches instead of {prediction.recorded_microbatches}: "
            f"{prediction.throughput_ratio:.3f} times as many per second."
        )
    for sentence in prediction.assumptions:
        console.print(f"Assumed: {escape(sentence)}")
    for phrase in prediction.left_out:
        console.print(f"Left out: {escape(phrase)}.")
    parts = ", ".join(f"{escape(part.cause)} {milliseconds(part.ns)} ms" for part in prediction.uncertainty)
    console.print(f"± holds: {parts}.", style="dim")


def _print_where(console: Console, run: Path, output: Path) -> None:
    is_page = output.suffix == ".html"
    to_run = f"{own_command()} report {shlex.quote(str(output))} --against {shlex.quote(str(run))}"
    look = f"open {output} in a browser" if is_page else to_run
    console.print(f"Next, the predicted steps: {escape(look)}", style="dim", soft_wrap=True)


def _next_command(opened: OpenedRun, outcome: Outcome, run: Path) -> str:
    """Return a command that this run can answer."""
    path = shlex.quote(str(run))
    judged = judge_slow(opened)
    if judged is not None and judged.ranks:
        return f"{own_command()} whatif {path} --without-slow-rank all"
    if len(outcome.recorded.joins.transfers):
        return f"{own_command()} whatif {path} --bandwidth all=2x"
    return f"{own_command()} straggler {path}"


def _percent(share: float) -> str:
    return f"{share:+.2%}"
