"""What ``commtrace search`` prints of a recorded run: the layout to take, what another one would assume, a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from commtrace.cli.layouts import fastest, none_fits, number_table, print_not_predicted, size_words
from commtrace.cli.output import binary_bytes, duration, share
from commtrace.planning.layout import Layout, groups
from commtrace.search.layouts import Found
from commtrace.search.megatron import megatron_arguments
from commtrace.search.prediction import Prediction, Predictor
from commtrace.trace.json_values import JsonObject, to_json


def search_json(predictor: Predictor, found: Found, sequences: int, memory: float, notes: Sequence[str]) -> JsonObject:
    """Return the answer as ``--json`` has it."""
    sentences = (
        *_of_ties(predictor, found),
        *_of_assumptions(predictor, found),
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


def print_search(console: Console, predictor: Predictor, found: Found, memory: float, notes: Sequence[str]) -> None:
    """Print the layout to take with its arguments, the fastest with assumptions with its own, and the others."""
    console.print(_verdict(predictor, found, memory), style="bold", markup=False)
    for sentence in _of_ties(predictor, found):
        console.print(sentence, markup=False)
    if found.chosen is not None:
        _print_arguments(console, found.chosen)
        console.print("")
    for sentence in _of_assumptions(predictor, found):
        console.print(sentence, markup=False)
    if found.assuming is not None and _is_faster_with_assumptions(predictor, found):
        _print_arguments(console, found.assuming)
        for sentence in _to_measure(found.assuming):
            console.print(sentence, markup=False, soft_wrap=True)
    if found.best:
        console.print("")
        console.print(_table(found))
        console.print("")
    for sentence in (*_of_the_run(predictor, found, memory), *notes):
        console.print(sentence, markup=False)
    print_not_predicted(console, found.not_known)


def _print_arguments(console: Console, prediction: Prediction) -> None:
    console.print(" ".join(megatron_arguments(prediction.layout)), markup=False, soft_wrap=True)


def _verdict(predictor: Predictor, found: Found, memory: float) -> str:
    tried = f"{found.layouts:,} layouts"
    fitting = f"the {found.fitting:,} of {tried}"
    if not found.fitting:
        return none_fits(tried, memory)
    if not found.best:
        return f"None of {fitting} that fit into {memory:.4g} GiB can be predicted."
    if found.chosen is None:
        return fastest(fitting, memory, _result(found.assuming or found.best[0]), how="with assumptions")
    error = f" (± {share(predictor.uncertainty)})"
    if found.keeps_recorded:
        return (
            f"Keep the recorded layout: as measured, none of {fitting} that fit into {memory:.4g} GiB is faster by "
            f"more than the error. It is {_result(found.chosen, error)}"
        )
    if found.recorded is not None and found.gain is not None:
        change = f"{abs(found.gain):.1%} {'less' if found.gain > 0 else 'more'}"
        error += f", {change} than in the recorded layout ({duration(found.recorded.time.step_ns)})"
    return fastest(fitting, memory, _result(found.chosen, error), how="as measured")


def _result(prediction: Prediction, more: str = "") -> str:
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


def _of_ties(predictor: Predictor, found: Found) -> Iterator[str]:
    """Yield why the layout of the verdict may not be the first of the table."""
    ties = found.assuming_ties if found.chosen is None else found.ties
    if len(ties) > 1:
        yield _tie(predictor, ties)


def _tie(predictor: Predictor, ties: Sequence[Prediction]) -> str:
    return (
        f"{len(ties):,} layouts are a tie: within ± {share(predictor.uncertainty)} of the fastest of them, "
        f"{duration(ties[0].time.step_ns)}. This is the simplest."
    )


def _is_faster_with_assumptions(predictor: Predictor, found: Found) -> bool:
    if found.assuming is None:
        return False
    limit_ns = found.assuming.time.step_ns * (1 + predictor.uncertainty)
    return found.chosen is None or limit_ns < found.chosen.time.step_ns


def _of_assumptions(predictor: Predictor, found: Found) -> Iterator[str]:
    if found.assuming is None:
        return
    assumed = ", ".join(found.assuming.assumed)
    if found.chosen is None:
        yield f"No layout that fits was measured as it is. This one assumes {assumed}; the run did not measure that."
    elif _is_faster_with_assumptions(predictor, found):
        tie = f" {_tie(predictor, found.assuming_ties)}" if len(found.assuming_ties) > 1 else ""
        slower = found.chosen.time.step_ns / found.assuming.time.step_ns - 1
        yield (
            f"With assumptions: {_result(found.assuming)}{tie} It assumes {assumed}; the run did not measure that. If "
            f"its step takes {share(slower)} longer, it is no faster than the one above."
        )
    else:
        yield "With assumptions, none is faster by more than the error."


def _to_measure(prediction: Prediction) -> Iterator[str]:
    """Yield how what a prediction assumes can be measured."""
    yield "To measure it, record some steps with these arguments, and search again from that run."
    roles = prediction.assumptions.borrowed_roles
    if roles:
        members = dict.fromkeys(next(groups(prediction.layout, role)) for role in roles)
        options = " ".join(f"--group {','.join(map(str, ranks))}" for ranks in members)
        yield (
            f"To measure only the bandwidth of {' and '.join(roles)}:\n"
            f"torchrun … -m commtrace bench collectives {options} -o baseline.json\n"
            "and add --baseline baseline.json to this search."
        )


def _of_the_run(predictor: Predictor, found: Found, memory: float) -> Iterator[str]:
    costs = predictor.costs
    predicted_ns = costs.step_ns - predictor.reproduced.rest_ns
    rest = f" The rest, {duration(predictor.rest_ns)}, is added to every prediction."
    yield (
        f"The recorded step took {duration(costs.step_ns)}; its parts make {duration(predicted_ns)} "
        f"({predictor.error:+.1%}).{rest if predictor.rest_ns else ''}"
    )
    if predictor.links.bounds:
        yield (
            f"Bandwidths that are lower bounds: {', '.join(predictor.links.bounds)}. Most of their bytes in the run "
            "are in calls without an exact start and end. So layouts that send more there may be faster than "
            "predicted; --bandwidth gives exact ones."
        )
    if found.recorded is not None and found.recorded.peak_bytes > memory * (1 << 30):
        yield f"The recorded layout does not fit: it needs {binary_bytes(found.recorded.peak_bytes)}."


def _table(found: Found) -> Table:
    """Return the fastest layouts, the chosen and the recorded one, with their marks."""
    shown = {one.layout: one for one in (*found.best, found.chosen, found.recorded) if one is not None}
    rows = sorted(shown.values(), key=lambda one: one.time.step_ns)
    names = ["tp", "pp", "dp", *(name for name in ("cp", "ep") if any(getattr(one.layout, name) > 1 for one in rows))]
    table = number_table("step", "memory", *names, "chunks", "layers", "batch", "m", "recompute")
    table.add_column("assumed", justify="left")
    table.add_column("", justify="left", no_wrap=True)
    for one in rows:
        layout = one.layout
        ends = (layout.first_stage_layers, layout.last_stage_layers)
        sizes = (*(getattr(layout, name) for name in names), layout.chunks)
        table.add_row(
            duration(one.time.step_ns),
            binary_bytes(one.peak_bytes),
            *map(str, sizes),
            f"{ends[0]}…{ends[1]}" if any(ends) else "even",
            str(layout.microbatch),
            str(layout.microbatches),
            layout.recompute,
            ", ".join(one.assumed),
            ", ".join(_marks(found, layout)),
        )
    return table


def _marks(found: Found, layout: Layout) -> Iterator[str]:
    if found.chosen is not None and layout == found.chosen.layout:
        yield "chosen"
    elif any(layout == one.layout for one in found.ties):
        yield "tie"
    if found.recorded is not None and layout == found.recorded.layout:
        yield "recorded"
