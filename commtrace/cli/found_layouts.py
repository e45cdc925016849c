"""What ``commtrace search`` prints of a recorded run: the layout to take, what another one would assume, a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from commtrace.cli.layouts import fastest, none_fits, number_table, print_not_predicted, size_words
from commtrace.cli.output import binary_bytes, duration
from commtrace.planning.layout import Layout, groups
from commtrace.planning.search.layouts import FoundLayouts
from commtrace.planning.search.megatron import megatron_arguments
from commtrace.planning.search.prediction import PredictedLayout, Predictor
from commtrace.planning.search.reliability import ORDER_HELD
from commtrace.trace.json_values import JsonObject, to_json


def search_json(
    predictor: Predictor, layouts: FoundLayouts, sequences: int, memory: float, notes: Sequence[str]
) -> JsonObject:
    """Return the answer as ``--json`` has it."""
    sentences = (
        *_of_ties(layouts),
        *_of_reliability(layouts),
        *_of_candidates(layouts),
        *_of_the_run(predictor, layouts, memory),
    )
    return {
        "verdict": _verdict(predictor, layouts, memory),
        "global_batch": sequences,
        "recorded": {
            "layout": to_json(predictor.costs.layout),
            "step_ns": predictor.costs.step_ns,
            "scatter": predictor.costs.step_scatter,
            "parts_ns": to_json(predictor.reproduced),
            "error": predictor.error,
            "costs_ns": to_json(predictor.costs.parts),
        },
        "uncertainty": predictor.uncertainty,
        **layouts.to_json(),
        "notes": [*sentences, *notes],
    }


def print_search(
    console: Console, predictor: Predictor, layouts: FoundLayouts, memory: float, notes: Sequence[str]
) -> None:
    """Print the layout to take with its arguments, those that can be ranked, and candidates to measure."""
    console.print(_verdict(predictor, layouts, memory), style="bold", markup=False)
    for sentence in (*_of_ties(layouts), *_of_reliability(layouts)):
        console.print(sentence, markup=False)
    if layouts.chosen is not None:
        _print_arguments(console, layouts.chosen)
    if layouts.best:
        console.print("")
        console.print(_table(layouts))
    console.print("")
    for sentence in _of_candidates(layouts):
        console.print(sentence, markup=False, soft_wrap=True)
    if layouts.candidates:
        console.print(_table_of(layouts.candidates))  # without a ±, which would not hold what they assume
        console.print("")
    for sentence in (*_of_the_run(predictor, layouts, memory), *notes):
        console.print(sentence, markup=False)
    print_not_predicted(console, layouts.not_known)


def _print_arguments(console: Console, prediction: PredictedLayout) -> None:
    console.print(" ".join(megatron_arguments(prediction.layout)), markup=False, soft_wrap=True)


def _verdict(predictor: Predictor, layouts: FoundLayouts, memory: float) -> str:
    tried = f"{layouts.layouts:,} layouts"
    fitting = f"the {layouts.fitting:,} of {tried}"
    if not layouts.fitting:
        return none_fits(tried, memory)
    if not layouts.best and not layouts.candidates:
        return f"None of {fitting} that fit into {memory:.4g} GiB can be predicted."
    if layouts.chosen is None:
        return f"None of {fitting} that fit into {memory:.4g} GiB can be ranked: measure some of the candidates below."
    error = f" (± {duration(round(layouts.chosen.uncertainty_ns))})"
    ranked = f"the {layouts.ranked:,} of {tried}"
    if layouts.keeps_recorded:
        return (
            f"Keep the recorded layout: of {ranked} that fit into {memory:.4g} GiB and can be ranked, none is faster "
            f"by more than the error. It is {_result(layouts.chosen, error)}"
        )
    if layouts.recorded is not None and layouts.gain is not None:
        change = f"{abs(layouts.gain):.1%} {'less' if layouts.gain > 0 else 'more'}"
        error += f", {change} than in the recorded layout ({duration(layouts.recorded.time.step_ns)})"
    return fastest(ranked, memory, _result(layouts.chosen, error), how=" and can be ranked")


def _result(prediction: PredictedLayout, more: str = "") -> str:
    return (
        f"{_words(prediction.layout)}. A step should take {duration(prediction.time.step_ns)}{more}; the fullest GPU "
        f"needs {binary_bytes(prediction.peak_bytes)}."
    )


def _words(layout: Layout) -> str:
    words = size_words({name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep")})
    if layout.chunks > 1:
        words.append(f"{layout.chunks} chunks")
    if layout.first_stage_layers or layout.last_stage_layers:
        words.append(f"{layout.first_stage_layers} layers first, {layout.last_stage_layers} last")
    words.append(f"microbatches of {layout.microbatch}")
    if layout.recompute != "none":
        words.append(f"{layout.recompute} recomputation")
    return " · ".join(words)


def _of_ties(layouts: FoundLayouts) -> Iterator[str]:
    """Yield why the layout of the verdict may not be the first of the table."""
    if len(layouts.ties) > 1:
        yield (
            f"{len(layouts.ties):,} layouts are a tie: no other is faster by more than its ±. This is the simplest of "
            "them."
        )


def _of_reliability(layouts: FoundLayouts) -> Iterator[str]:
    """Yield how often the order of such layouts was as predicted in real runs."""
    kinds = {kind: None for each in layouts.best for kind in layouts.changes[each.layout]}
    held = "; ".join(_held(kind) for kind in ORDER_HELD if kind in kinds)
    if held:
        yield f"Pairs of layouts that real runs had in the predicted order, by what changes: {held}."


def _held(kind: str) -> str:
    right, pairs = ORDER_HELD[kind]
    return f"{kind} {right} of {pairs}" if pairs else f"{kind} never measured"


def _of_candidates(layouts: FoundLayouts) -> Iterator[str]:
    if not layouts.candidates:
        return
    kinds = {kind: None for each in layouts.candidates for kind in layouts.changes[each.layout]}
    held = "; ".join(_held(kind) for kind in ORDER_HELD if kind in kinds and not ORDER_HELD[kind].is_enough)
    yield (
        f"Candidates to measure: what they change was not in the predicted order often enough ({held}), so that these "
        "times say little on which is faster. Record some steps of one, and search again from that run."
    )
    roles = dict.fromkeys(role for each in layouts.candidates for role in each.assumptions.borrowed_roles)
    for role in roles:
        layout = next(each.layout for each in layouts.candidates if role in each.assumptions.borrowed_roles)
        members = ",".join(map(str, next(iter(groups(layout, role)))))
        yield (
            f"The bandwidth of {role} alone: torchrun … -m commtrace bench collectives --group {members} -o "
            "baseline.json, and --baseline baseline.json with this search."
        )


def _of_the_run(predictor: Predictor, layouts: FoundLayouts, memory: float) -> Iterator[str]:
    costs = predictor.costs
    yield (
        f"The recorded step took {duration(costs.step_ns)}; rebuilt from its parts it takes "
        f"{duration(costs.modelled_ns)} ({predictor.error:+.1%})."
    )
    if predictor.rest_ns > 0:
        yield (
            f"Of it, {duration(predictor.rest_ns)} are neither forwards and backwards nor gradients nor the optimizer: "
            "every layout is taken to have them."
        )
    if predictor.links.bounds:
        yield (
            f"Bandwidths that are lower bounds: {', '.join(predictor.links.bounds)}. Most of their bytes in the run "
            "are in calls without an exact start and end. So layouts that send more there may be faster than "
            "predicted; --bandwidth gives exact ones."
        )
    if layouts.recorded is not None and layouts.recorded.peak_bytes > memory * (1 << 30):
        yield f"The recorded layout does not fit: it needs {binary_bytes(layouts.recorded.peak_bytes)}."


def _table(layouts: FoundLayouts) -> Table:
    """Return the fastest layouts that can be ranked, the chosen and the recorded one, with their marks."""
    shown = {
        prediction.layout: prediction
        for prediction in (*layouts.best, layouts.chosen, layouts.recorded)
        if prediction is not None
    }
    rows = sorted(shown.values(), key=lambda prediction: prediction.time.step_ns)
    return _table_of(rows, lambda layout: ", ".join(_marks(layouts, layout)))


def _table_of(rows: Sequence[PredictedLayout], marks: Callable[[Layout], str] | None = None) -> Table:
    names = [
        "tp",
        "pp",
        "dp",
        *(name for name in ("cp", "ep") if any(getattr(prediction.layout, name) > 1 for prediction in rows)),
    ]
    uncertainty = ["±"] if marks else []
    table = number_table("step", *uncertainty, "memory", *names, "chunks", "layers", "batch", "m", "recompute")
    table.add_column("assumed", justify="left")
    if marks:
        table.add_column("", justify="left", no_wrap=True)
    for prediction in rows:
        layout = prediction.layout
        ends = (layout.first_stage_layers, layout.last_stage_layers)
        sizes = (*(getattr(layout, name) for name in names), layout.chunks)
        table.add_row(
            duration(prediction.time.step_ns),
            *([duration(round(prediction.uncertainty_ns))] if marks else []),
            binary_bytes(prediction.peak_bytes),
            *map(str, sizes),
            f"{ends[0]}…{ends[1]}" if any(ends) else "even",
            str(layout.microbatch),
            str(layout.microbatches),
            layout.recompute,
            ", ".join(prediction.assumed),
            *([marks(layout)] if marks else []),
        )
    return table


def _marks(layouts: FoundLayouts, layout: Layout) -> Iterator[str]:
    if layouts.chosen is not None and layout == layouts.chosen.layout:
        yield "chosen"
    elif any(layout == tie.layout for tie in layouts.ties):
        yield "tie"
    if layouts.recorded is not None and layout == layouts.recorded.layout:
        yield "recorded"
