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
    predictor: Predictor, found: FoundLayouts, sequences: int, memory: float, notes: Sequence[str]
) -> JsonObject:
    """Return the answer as ``--json`` has it."""
    sentences = (
        *_of_ties(found),
        *_of_reliability(found),
        *_of_candidates(found),
        *_of_the_run(predictor, found, memory),
    )
    return {
        "verdict": _verdict(predictor, found, memory),
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
        **found.to_json(),
        "notes": [*sentences, *notes],
    }


def print_search(
    console: Console, predictor: Predictor, found: FoundLayouts, memory: float, notes: Sequence[str]
) -> None:
    """Print the layout to take with its arguments, those that can be ranked, and candidates to measure."""
    console.print(_verdict(predictor, found, memory), style="bold", markup=False)
    for sentence in (*_of_ties(found), *_of_reliability(found)):
        console.print(sentence, markup=False)
    if found.chosen is not None:
        _print_arguments(console, found.chosen)
    if found.best:
        console.print("")
        console.print(_table(found))
    console.print("")
    for sentence in _of_candidates(found):
        console.print(sentence, markup=False, soft_wrap=True)
    if found.candidates:
        console.print(_table_of(found.candidates))  # without a ±, which would not hold what they assume
        console.print("")
    for sentence in (*_of_the_run(predictor, found, memory), *notes):
        console.print(sentence, markup=False)
    print_not_predicted(console, found.not_known)


def _print_arguments(console: Console, prediction: PredictedLayout) -> None:
    console.print(" ".join(megatron_arguments(prediction.layout)), markup=False, soft_wrap=True)


def _verdict(predictor: Predictor, found: FoundLayouts, memory: float) -> str:
    tried = f"{found.layouts:,} layouts"
    fitting = f"the {found.fitting:,} of {tried}"
    if not found.fitting:
        return none_fits(tried, memory)
    if not found.best and not found.candidates:
        return f"None of {fitting} that fit into {memory:.4g} GiB can be predicted."
    if found.chosen is None:
        return f"None of {fitting} that fit into {memory:.4g} GiB can be ranked: measure some of the candidates below."
    error = f" (± {duration(round(found.chosen.uncertainty_ns))})"
    ranked = f"the {found.ranked:,} of {tried}"
    if found.keeps_recorded:
        return (
            f"Keep the recorded layout: of {ranked} that fit into {memory:.4g} GiB and can be ranked, none is faster "
            f"by more than the error. It is {_result(found.chosen, error)}"
        )
    if found.recorded is not None and found.gain is not None:
        change = f"{abs(found.gain):.1%} {'less' if found.gain > 0 else 'more'}"
        error += f", {change} than in the recorded layout ({duration(found.recorded.time.step_ns)})"
    return fastest(ranked, memory, _result(found.chosen, error), how=" and can be ranked")


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


def _of_ties(found: FoundLayouts) -> Iterator[str]:
    """Yield why the layout of the verdict may not be the first of the table."""
    if len(found.ties) > 1:
        yield (
            f"{len(found.ties):,} layouts are a tie: no other is faster by more than its ±. This is the simplest of "
            "them."
        )


def _of_reliability(found: FoundLayouts) -> Iterator[str]:
    """Yield how often the order of such layouts was as predicted in real runs."""
    kinds = {kind: None for each in found.best for kind in found.changes[each.layout]}
    held = "; ".join(_held(kind) for kind in ORDER_HELD if kind in kinds)
    if held:
        yield f"Pairs of layouts that real runs had in the predicted order, by what changes: {held}."


def _held(kind: str) -> str:
    right, pairs = ORDER_HELD[kind]
    return f"{kind} {right} of {pairs}" if pairs else f"{kind} never measured"


def _of_candidates(found: FoundLayouts) -> Iterator[str]:
    if not found.candidates:
        return
    kinds = {kind: None for each in found.candidates for kind in found.changes[each.layout]}
    held = "; ".join(_held(kind) for kind in ORDER_HELD if kind in kinds and not ORDER_HELD[kind].is_enough)
    yield (
        f"Candidates to measure: what they change was not in the predicted order often enough ({held}), so that these "
        "times say little on which is faster. Record some steps of one, and search again from that run."
    )
    roles = dict.fromkeys(role for each in found.candidates for role in each.assumptions.borrowed_roles)
    for role in roles:
        layout = next(each.layout for each in found.candidates if role in each.assumptions.borrowed_roles)
        members = ",".join(map(str, next(iter(groups(layout, role)))))
        yield (
            f"The bandwidth of {role} alone: torchrun … -m commtrace bench collectives --group {members} -o "
            "baseline.json, and --baseline baseline.json with this search."
        )


def _of_the_run(predictor: Predictor, found: FoundLayouts, memory: float) -> Iterator[str]:
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
    if found.recorded is not None and found.recorded.peak_bytes > memory * (1 << 30):
        yield f"The recorded layout does not fit: it needs {binary_bytes(found.recorded.peak_bytes)}."


def _table(found: FoundLayouts) -> Table:
    """Return the fastest layouts that can be ranked, the chosen and the recorded one, with their marks."""
    shown = {one.layout: one for one in (*found.best, found.chosen, found.recorded) if one is not None}
    rows = sorted(shown.values(), key=lambda one: one.time.step_ns)
    return _table_of(rows, lambda layout: ", ".join(_marks(found, layout)))


def _table_of(rows: Sequence[PredictedLayout], marks: Callable[[Layout], str] | None = None) -> Table:
    names = ["tp", "pp", "dp", *(name for name in ("cp", "ep") if any(getattr(one.layout, name) > 1 for one in rows))]
    uncertainty = ["±"] if marks else []
    table = number_table("step", *uncertainty, "memory", *names, "chunks", "layers", "batch", "m", "recompute")
    table.add_column("assumed", justify="left")
    if marks:
        table.add_column("", justify="left", no_wrap=True)
    for one in rows:
        layout = one.layout
        ends = (layout.first_stage_layers, layout.last_stage_layers)
        sizes = (*(getattr(layout, name) for name in names), layout.chunks)
        table.add_row(
            duration(one.time.step_ns),
            *([duration(round(one.uncertainty_ns))] if marks else []),
            binary_bytes(one.peak_bytes),
            *map(str, sizes),
            f"{ends[0]}…{ends[1]}" if any(ends) else "even",
            str(layout.microbatch),
            str(layout.microbatches),
            layout.recompute,
            ", ".join(one.assumed),
            *([marks(layout)] if marks else []),
        )
    return table


def _marks(found: FoundLayouts, layout: Layout) -> Iterator[str]:
    if found.chosen is not None and layout == found.chosen.layout:
        yield "chosen"
    elif any(layout == one.layout for one in found.ties):
        yield "tie"
    if found.recorded is not None and layout == found.recorded.layout:
        yield "recorded"
